"""What the kernel says about this host's sockets and addresses, mostly by netlink: one question and its answer.

Names in the abstract Unix namespace have no owner, and everybody may take any. So before a name is believed (trust.py)
the kernel is asked who listens at the TCP address that the name claims (sock_diag(7)), and whether this host has that
address at all (rtnetlink(7)). Kernels of small virtual machines are often without the modules that answer the first
question. There /proc/net/tcp does (proc_pid_net(5)), which takes milliseconds where there are many connections. A host
that does not answer is no reason to believe anything. Nor is it an answer if there is no descriptor or memory left to
ask with: that is raised, and whoever asks may do so again.

All this is asked while the loop runs. None of it waits: the kernel answers netlink within send(), and makes what is in
/proc and /sys when it is read. So these are read by the calls of `posix` and by descriptors that do not block, not by
those of `os` that may stand for a disk, which tools against blocking calls (blockbuster) replace.
"""

from __future__ import annotations

import errno
import functools
import os
import posix
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

_ASKING = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_NETLINK_ROUTE = 0
_NETLINK_SOCK_DIAG = 4
_REQUEST = 1  # NLM_F_REQUEST
_DUMP = 0x300  # NLM_F_DUMP
_DONE = 3  # NLMSG_DONE
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_ANSWER_BYTES = 16384
_FILE_BYTES = 8192  # in one call
_FILE_BYTES_MOST = 1 << 20  # a process may be in 65,536 groups, each with up to ten digits
_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

_SOCK_DIAG_BY_FAMILY = 20
_TCP_LISTEN = 10
_NO_COOKIE = 0xFFFFFFFF
_BYTECODE = 1  # INET_DIAG_REQ_BYTECODE
_PORT_AT_LEAST = 2  # INET_DIAG_BC_S_GE
_PORT_AT_MOST = 3  # INET_DIAG_BC_S_LE
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then struct inet_diag_sockid: ports, source,
# destination, interface, cookie.
_DIAG_QUESTION = struct.Struct("=BBBxI2s2s16s16sIII")
# struct inet_diag_msg: family, state, timer, retransmissions; sockid; expires, queues, uid, inode.
_DIAG_ANSWER = struct.Struct("=BBBB2s2s16s16sIIIIIIII")

_GETROUTE = 26  # RTM_GETROUTE
_NEWROUTE = 24  # RTM_NEWROUTE
_ROUTE = struct.Struct("=BBBBBBBBI")  # struct rtmsg
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr
_RTA_DST = 1
_RTN_LOCAL = 2

_MAPPED = bytes(10) + b"\xff\xff"  # before an address of IPv4 (RFC 4291)

FAMILIES = {4: socket.AF_INET, 16: socket.AF_INET6}
"""An address's family, by the length of its binary form."""


class Listener(NamedTuple):
    """A TCP listener: the user who made its socket, the address that it is bound to, and the number of its inode.

    The kernel gives that number to no other socket for as long as it takes to make four billion of them.
    """

    user: int
    address: str
    inode: int


def lacks_resources(error: OSError) -> bool:
    """Whether this error says only that no descriptor or memory is left: it is no answer."""
    return error.errno in _NOTHING_LEFT


def packed(address: str) -> bytes:
    """The binary form of an address.

    :raises OSError: it is no numeric address
    """
    text = address.partition("%")[0]
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def tcp_listener(address: str, port: int) -> Listener | None:
    """Who gets a TCP connection to this address and port: a listener on the address itself before one on a wildcard.

    None if nobody listens there in this network namespace, or the kernel does not say.

    :raises OSError: there are no descriptors or memory left to ask with; or it is no numeric address
    """
    binary, interface = packed(address), 0
    if "%" in address:
        try:
            interface = socket.if_nametoindex(address.partition("%")[2])
        except OSError as exc:
            if lacks_resources(exc):
                raise
    question = _DIAG_QUESTION.pack(
        FAMILIES[len(binary)], socket.IPPROTO_TCP, 0, 0xFFFFFFFF, struct.pack("!H", port), bytes(2),
        binary.ljust(16, b"\0"), bytes(16), interface, _NO_COOKIE, _NO_COOKIE,
    )  # fmt: skip
    answer = _ask(_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, question, _SOCK_DIAG_BY_FAMILY)
    if answer is None or len(answer) < _DIAG_ANSWER.size:
        return None if _tells_of_tcp() else _listener_by_proc(binary, port)
    family, state, _, _, _, _, source, _, _, _, _, _, _, _, user, inode = _DIAG_ANSWER.unpack_from(answer)
    if state != _TCP_LISTEN or not inode:  # the kernel may report user 0 for a socket that is closed
        return None
    return Listener(user, socket.inet_ntop(family, source[: 4 if family == socket.AF_INET else 16]), inode)


def sockets_beside(listener: Listener, port: int) -> set[int]:
    """The inodes of all sockets that listen where this one does: several may share a port (SO_REUSEPORT).

    The kernel goes through all listeners for that.

    :raises OSError: there are no descriptors or memory left to ask with
    """
    binary = packed(listener.address)
    family = FAMILIES[len(binary)]
    if not _tells_of_tcp():
        return {inode for _, inode in _listeners_by_proc(port).get(binary, ())}
    question = _question_for_all(family)
    # Bytecode: the source port is at least this one, and at most; else the socket is not told of.
    code = struct.pack("=BBHHHBBHHH", _PORT_AT_LEAST, 8, 20, 0, port, _PORT_AT_MOST, 8, 12, 0, port)
    question += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(code), _BYTECODE) + code
    found = set()
    for answer in _ask_for_all(_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, question):
        if len(answer) >= _DIAG_ANSWER.size:
            its_family, _, _, _, source_port, _, source, *_, inode = _DIAG_ANSWER.unpack_from(answer)
            if (its_family, source[: len(binary)], source_port) == (family, binary, struct.pack("!H", port)):
                found.add(inode)
    return found


_tells = False


def _tells_of_tcp() -> bool:
    """Whether the kernel answers questions about TCP sockets; that it does is remembered.

    Without its modules it says of each address that nobody is there. But a list of sockets it refuses.
    """
    global _tells
    if not _tells:
        question, answers = _question_for_all(socket.AF_INET), (_SOCK_DIAG_BY_FAMILY, _DONE)
        told = _ask(_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, question, *answers, flags=_REQUEST | _DUMP)
        _tells = told is not None
    return _tells


def _question_for_all(family: int) -> bytes:
    """The question for all TCP listeners of an address family."""
    return _DIAG_QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN, bytes(2), bytes(2), bytes(16), bytes(16), 0, 0, 0
    )


def _listener_by_proc(binary: bytes, port: int) -> Listener | None:
    """What tcp_listener() says, by /proc, which shows neither that a listener takes IPv6 alone, nor its device.

    So one on ``::`` counts for IPv4 as well; and if there are several users' on one address, there is none.
    """
    listeners = _listeners_by_proc(port)
    for place in _places_for(binary):
        found = listeners.get(place, [])
        if len({user for user, _ in found}) == 1:
            return Listener(found[0][0], socket.inet_ntop(FAMILIES[len(place)], place), found[0][1])
        if found:
            break
    return None


def _listeners_by_proc(port: int) -> dict[bytes, list[tuple[int, int]]]:
    """The users and inodes of the sockets that listen on a port, by their addresses."""
    listeners: dict[bytes, list[tuple[int, int]]] = {}
    for name in ("tcp", "tcp6"):
        # Of this thread's network: /proc/net is the main thread's.
        lines = _lines(f"/proc/thread-self/net/{name}")
        try:
            next(lines, None)  # the titles
            for line in lines:
                _, local, _, state, _, _, _, user, _, inode = line.split()[:10]
                if int(state, 16) != _TCP_LISTEN:
                    break  # listeners come first
                words, _, its_port = local.partition(b":")
                if int(its_port, 16) == port and inode != b"0":
                    listeners.setdefault(_bytes_of(words), []).append((int(user), int(inode)))
        except ValueError:  # the lines are not as in Linux: nobody is there
            pass
        except OSError as exc:
            if lacks_resources(exc):
                raise
    return listeners


def _places_for(binary: bytes) -> tuple[bytes, ...]:
    """Where a listener may be bound that gets a connection to this address, the most specific first."""
    if len(binary) == 16:
        return binary, bytes(16)
    return binary, _MAPPED + binary, bytes(4), _MAPPED + bytes(4), bytes(16)


def _bytes_of(words: bytes) -> bytes:
    """An address that is written in hexadecimal words of this machine."""
    return b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))


def is_of_this_host(address: str) -> bool:
    """Whether this network namespace has the address; false if the kernel does not say.

    :raises OSError: there are no descriptors or memory left to ask with; or it is no numeric address
    """
    binary = packed(address)
    question = _ROUTE.pack(FAMILIES[len(binary)], len(binary) * 8, 0, 0, 0, 0, 0, 0, 0)
    question += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(binary), _RTA_DST) + binary
    answer = _ask(_NETLINK_ROUTE, _GETROUTE, question, _NEWROUTE)
    if answer is None or len(answer) < _ROUTE.size:
        return False
    return bool(_ROUTE.unpack_from(answer)[7] == _RTN_LOCAL)


@functools.cache
def overflow_user() -> int:
    """The number that the kernel gives all users who do not exist in our user namespace: it proves nothing."""
    try:
        return int(read("/proc/sys/kernel/overflowuid"))
    except OSError as exc:
        if lacks_resources(exc):
            raise
    except ValueError:
        pass
    return 65534


def read(name: str) -> bytes:
    """A whole file of /proc or /sys.

    :raises OSError: it cannot be read, or is longer than any that we know (EFBIG)
    """
    found = bytearray()
    for some in _pieces(name):
        found += some
        if len(found) > _FILE_BYTES_MOST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
    return bytes(found)


def first_line(name: str) -> bytes:
    """The first line of a file of /proc or /sys.

    :raises OSError: it cannot be read
    """
    return next(_lines(name), b"")


def _lines(name: str) -> Iterator[bytes]:
    """The lines of such a file, without their ends."""
    rest = b""
    for some in _pieces(name):
        *lines, rest = (rest + some).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _pieces(name: str) -> Iterator[bytes]:
    """What is in such a file, as the kernel gives it: often less at once than it is asked for."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while some := os.read(fd, _FILE_BYTES):
            yield some
    finally:
        os.close(fd)


def names_in(directory: str) -> list[str]:
    """What is in a directory of /proc or /sys; nothing if there is none.

    :raises OSError: there are no descriptors or memory left to ask with
    """
    try:
        return posix.listdir(directory)
    except OSError as exc:
        if lacks_resources(exc):
            raise
        return []


def _ask(family: int, kind: int, question: bytes, *answers: int, flags: int = _REQUEST) -> bytes | None:
    """The kernel's answer to one question, which it gives within send(), or the first of several.

    :param answers: which kinds of message are one; None is returned for others
    :raises OSError: there are no descriptors or memory left to ask with
    """
    try:
        with socket.socket(socket.AF_NETLINK, _ASKING, family) as asking:
            asking.sendto(_HEADER.pack(_HEADER.size + len(question), kind, flags, 1, 0) + question, (0, 0))
            answer, (sender, _) = asking.recvfrom(_ANSWER_BYTES)
    except OSError as exc:
        if lacks_resources(exc):
            raise
        return None
    if sender != 0 or len(answer) < _HEADER.size:  # the kernel is 0
        return None
    length, found, _, _, _ = _HEADER.unpack_from(answer)
    return answer[_HEADER.size : length] if found in answers else None


def _ask_for_all(family: int, kind: int, question: bytes) -> Iterator[bytes]:
    """All answers of that kind to a question: the kernel writes them while they are read.

    :raises OSError: there are no descriptors or memory left to ask with
    """
    try:
        with socket.socket(socket.AF_NETLINK, _ASKING, family) as asking:
            asking.sendto(
                _HEADER.pack(_HEADER.size + len(question), kind, _REQUEST | _DUMP, 1, 0) + question, (0, 0)
            )
            while True:
                answers, (sender, _) = asking.recvfrom(_ANSWER_BYTES)
                while not sender and len(answers) >= _HEADER.size:
                    length, found, _, _, _ = _HEADER.unpack_from(answers)
                    if found != kind or length < _HEADER.size:
                        return
                    yield answers[_HEADER.size : length]
                    answers = answers[(length + 3) & ~3 :]
                if sender:
                    return
    except OSError as exc:
        if lacks_resources(exc):
            raise
