"""May this process be trusted as much as the TCP listener that it claims to be? One question, and its one answer.

Theory
------
Names in the abstract Unix namespace belong to nobody. The kernel says which process is behind one, and its user
(SO_PEERCRED), but a user id says little: a container or a sandbox may have the same one, and the same network, and
exist to keep a program from what its user may do. There is one thing that shows exactly who can do no more by a name
than by TCP: who *has* the TCP listener may accept all that is sent to it. So whoever speaks for a TCP listener says
which of its descriptors that is, and ``/proc/PID/fd`` shows whether it is true (proc_pid_fd(5)). There, and in its list
of listeners (kernel.py), the kernel names a socket by the number of its inode. That holds whatever a sandbox is made
of, also where nothing shows it: Landlock, seccomp, chroot.

It must live in our user and pid namespaces, too. A process that shares its listener with a container has let it in by
TCP; no client is sent there by a name.

``/proc/PID/fd`` is readable for who may trace the process. A client may trace the servers of its own user: if not, they
are in a sandbox, or have rights that it lacks, and TCP reaches them. Of another user's process only root may read it.
Others judge it by what everybody may read: it must be the listener's user's, without no_new_privs, since Landlock needs
that and does not show, and confined by nothing that does not confine us (namespaces, the root directory, more filters
of seccomp, the capabilities that it could ever have).

The question is asked by a client about who has a door (doors.py), by the front about a worker, and by a worker about
the front (workers.py). The embedded device asks it about the names of its listeners (soft/cm/name.c, base/equal.c).
There nobody says a number. So only a confined process has to have the listener, and its descriptors are searched.

Pids are used again, also while somebody else has the socket of a process that has ended. So at last the process must
still live: the kernel says so of the very one that made the socket (SO_PEERPIDFD, since Linux 6.5). Before that whoever
has its pid must at least be of its user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix  # for what is in /proc: see kernel.py
import select
import socket
import struct

from rdmanet.loop import kernel

_CREDENTIALS = struct.Struct("iII")  # struct ucred
_SO_PEERPIDFD = 77  # Linux 6.5; socket has no name for it
_NOT_READABLE = (errno.EACCES, errno.EPERM)


def owner_of(far_end: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, and its user.

    The process is 0 if it is in a pid namespace that is not seen from here.
    """
    pid, user, _ = _CREDENTIALS.unpack(
        far_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user


class Speaker:
    """The process at the other end of a Unix socket, which claims to have the TCP listener of an address and port.

    :ivar pid: its number; 0 if it is in a pid namespace that is not seen from here
    :ivar user: its user
    :ivar listener: what the kernel says of the address and port
    """

    def __init__(self, to_it: socket.socket, address: str, port: int) -> None:
        """
        :param to_it: connected to its socket, or accepted from it: it is whoever called listen(), or connect()
        :raises OSError: there are no descriptors or memory left to ask with; so do all methods
        """
        self._socket = to_it
        self._port = port
        self.listener = kernel.tcp_listener(address, port)
        self.pid, self.user = owner_of(to_it)

    def why_not(self) -> str:
        """Why it is not to be listened to, before it has said anything; "" if it may be."""
        if self.listener is None:
            return "the kernel knows no TCP listener there, so nobody can speak for it"
        if self.user == kernel.overflow_user():
            return (
                f"user {self.user} offers RDMA there, which stands for every user without a name in this user"
                " namespace, so nobody knows whether the TCP listener is the same user's"
            )
        if self.listener.user != self.user:
            return f"user {self.user} offers RDMA there, but the TCP listener is user {self.listener.user}'s"
        return "" if self.pid == os.getpid() else self._why_confined()

    def why_not_with(self, number: int) -> str:
        """Why it is not to be trusted, though why_not() has said ""; "" if it is.

        :param number: its descriptor of the TCP listener, as it says
        """
        assert self.listener is not None
        shown: str | None
        try:
            shown = posix.readlink(self.link(number))
        except OSError as exc:
            if kernel.lacks_resources(exc):
                raise
            is_hidden = exc.errno in _NOT_READABLE and self.user != os.geteuid()
            shown = None if is_hidden else ""  # why_not() has looked at what there is to see
        if shown is not None and not _is_one_of(shown, self.listener, self._port):
            return f"process {self.pid} offers RDMA there, but does not have the TCP listener"
        if not self.lives():
            return f"process {self.pid}, which offers RDMA there, has ended"
        return ""

    def link(self, number: int) -> str:
        """Where /proc shows what this descriptor of its is."""
        return f"/proc/{self.pid}/fd/{number}"

    def _why_confined(self) -> str:
        """Why it may be in a container or a sandbox; "" if it is not, or only in one that has the listener, too."""
        who = f"process {self.pid} offers RDMA there, but"
        if self.pid <= 0 or not _proc_is_ours():
            return "a process offers RDMA there that is in another pid namespace, or /proc does not show it"
        try:
            for kind in ("user", "pid"):
                if _namespace(self.pid, kind) != _namespace(os.getpid(), kind):
                    return f"{who} is in another {kind} namespace: in a container or sandbox"
            return ""
        except OSError as exc:
            if kernel.lacks_resources(exc):
                raise
            if exc.errno not in _NOT_READABLE:
                return f"process {self.pid}, which offers RDMA there, has ended"
        if self.user == os.geteuid():
            return (
                f"{who} this one may not trace it: it is in a sandbox, not dumpable, or has more capabilities"
            )
        try:
            sign = _more_confined(self.pid)
        except (OSError, ValueError, LookupError) as exc:
            if isinstance(exc, OSError) and kernel.lacks_resources(exc):
                raise
            return f"{who} /proc does not tell what confines it: {exc}"
        return f"{who} is in a container or sandbox: it has {sign}" if sign else ""

    def lives(self) -> bool:
        """Whether the process has not ended."""
        try:
            fd = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError as exc:
            if kernel.lacks_resources(exc):
                raise
            return exc.errno == errno.ENOPROTOOPT and _user_of(self.pid) == self.user
        try:
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            return not ended.poll(0)
        finally:
            os.close(fd)


def is_still(link: str, inode: int) -> bool:
    """Whether a descriptor, as `Speaker.link` names it, is this socket. Whoever has the pid now: it has the socket.

    :raises OSError: there is no memory left to ask with
    """
    try:
        return posix.readlink(link) == f"socket:[{inode}]"
    except OSError as exc:
        if kernel.lacks_resources(exc):
            raise
        return False


def may_map(pid: int) -> bool:
    """Whether this process may read that one's memory: the embedded device needs it for its fast path.

    The links are readable for who may trace the process (proc_pid_ns(5)). The device finds out by itself what is so
    (soft/peer/proof.c); this is only to know it before.
    """
    if pid <= 0:
        return False
    with contextlib.suppress(OSError):
        return all(_namespace(pid, kind) == _namespace(os.getpid(), kind) for kind in ("user", "pid"))
    return False


def why_no_proc() -> str:
    """Why processes cannot be found in /proc; "" if they can."""
    if _proc_is_ours():
        return ""
    if not kernel.names_in("/proc"):
        return "/proc, by which its memory is found, is not mounted here"
    return "/proc, by which its memory is found, shows another pid namespace"


def _is_one_of(shown: str, listener: kernel.Listener, port: int) -> bool:
    """Whether this socket, as /proc shows it, listens where that one does."""
    inode = shown.removeprefix("socket:[").removesuffix("]")
    if not shown.startswith("socket:[") or not inode.isdigit():
        return False
    return int(inode) == listener.inode or int(inode) in kernel.sockets_beside(listener, port)


def _proc_is_ours() -> bool:
    """Whether the numbers in /proc are those that we know: one of another pid namespace may be mounted there."""
    with contextlib.suppress(OSError):
        return posix.readlink("/proc/self") == str(os.getpid())
    return False


def _namespace(pid: int, kind: str) -> str:
    """Its number, as text. The kernel asks the same of who reads the link as of who follows it, which takes longer."""
    return posix.readlink(f"/proc/{pid}/ns/{kind}")


def _more_confined(pid: int) -> str:
    """What confines this process and not us, of what everybody may read; "" if nothing does.

    :raises OSError, ValueError, LookupError: it cannot be read
    """
    its, ours = _status(pid), _status(os.getpid())
    if len(its.get("NSpid", "1").split()) != 1:  # a kernel may be without these namespaces
        return "a pid namespace of its own"
    if kernel.read(f"/proc/{pid}/uid_map") != kernel.read("/proc/self/uid_map"):
        return "another user namespace"
    # Of the mounts the first: its number is no other namespace's, and it is below the root directory.
    if kernel.first_line(f"/proc/{pid}/mountinfo") != kernel.first_line("/proc/self/mountinfo"):
        return "another mount namespace or root directory"
    # It may have Landlock, too, which does not show: also if we have no_new_privs ourselves.
    if int(its["NoNewPrivs"]):
        return "NoNewPrivs set"
    for name in ("Seccomp", "Seccomp_filters"):  # a kernel may be without; the latter since Linux 5.9
        if int(its.get(name, 0)) > int(ours.get(name, 0)):
            return f"{name} set"
    if int(ours["CapBnd"], 16) & ~int(its["CapBnd"], 16):
        return "a smaller set of capabilities"
    return ""


def _user_of(pid: int) -> int | None:
    """The user of a process; None if /proc does not say."""
    try:
        return int(_status(pid)["Uid"].split()[1])
    except OSError as exc:
        if kernel.lacks_resources(exc):
            raise
    except (ValueError, LookupError):
        pass
    return None


def _status(pid: int) -> dict[str, str]:
    # Its name may contain anything but a newline, which the kernel escapes.
    text = kernel.read(f"/proc/{pid}/status").decode(errors="replace")
    return {key: rest.strip() for key, _, rest in (line.partition(":") for line in text.split("\n"))}
