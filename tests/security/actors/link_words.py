"""The links between processes, as an attacker speaks them, and who he may be."""

import array
import ctypes
import os
import re
import signal
import socket
import struct
import tempfile

from tests.support.versions import WIRE

HELLO, WELCOME, REFUSED, CHALLENGE, PROOF = 1, 2, 3, 12, 13
REASONS = {
    1: "user",
    2: "unseen",
    3: "no trace",
    4: "version",
    6: "nonce",
    7: "secret",
    8: "transport",
    9: "again",
}
ARENA_MAGIC = b"NERAN"[::-1]

_MESSAGE = struct.Struct("<IHHIIq")
_IDENTITY = struct.Struct("<32s32sQqQQ")
_MAGIC = 0x524E504C
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_SYS_CAPSET, _SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_RESTRICT_SELF = 126, 444, 446
_MAKE_BLOCK = 1 << 11  # LANDLOCK_ACCESS_FS_MAKE_BLOCK

libc = ctypes.CDLL(None, use_errno=True)


def dumpable(yes):
    """A program that a user starts is; one that root has started, and that became a user by itself, is not."""
    assert libc.prctl(_PR_SET_DUMPABLE, int(yes), 0, 0, 0) == 0


def become(*roles):
    """One after the other: a user's number, `sandbox` (a user namespace, the same user in it), `unmapped` (another, in
    which he has no name), `pids` (a pid namespace), `mounts` (a mount namespace), `ipc` (an IPC namespace), `landlock`,
    `seccomp` (a filter that forbids nothing), `chroot` (an empty root directory), `bare` (without capabilities),
    `undumpable`."""
    for role in roles:
        user = os.geteuid()
        if role in ("sandbox", "unmapped"):
            if libc.unshare(_CLONE_NEWUSER):
                raise OSError(ctypes.get_errno(), "unshare")
            dumpable(True)
            if role == "sandbox":
                with open("/proc/self/uid_map", "w") as file:
                    file.write(f"{user} {user} 1")
        elif role == "pids":
            if libc.unshare(_CLONE_NEWPID):
                raise OSError(ctypes.get_errno(), "unshare")
            if child := os.fork():
                os.waitpid(child, 0)
                os._exit(0)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        elif role in ("mounts", "ipc"):
            if libc.unshare(_CLONE_NEWNS if role == "mounts" else _CLONE_NEWIPC):
                raise OSError(ctypes.get_errno(), "unshare")
        elif role == "landlock":
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            rules = libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, struct.pack("Q", _MAKE_BLOCK), 8, 0)
            if rules < 0 or libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, rules, 0):
                raise OSError(ctypes.get_errno(), "landlock")
            os.close(rules)
        elif role == "seccomp":
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            allow = ctypes.create_string_buffer(
                struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
            )  # BPF_RET, SECCOMP_RET_ALLOW
            if libc.prctl(_PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)), 0, 0):
                raise OSError(ctypes.get_errno(), "seccomp")
        elif role == "chroot":
            with tempfile.TemporaryDirectory() as empty:
                os.chroot(empty)
                os.chdir("/")
        elif role == "bare":
            header = struct.pack("<Ii", 0x20080522, 0)
            assert libc.syscall(_SYS_CAPSET, header, bytes(24)) == 0
            dumpable(True)
        elif role == "undumpable":
            dumpable(False)
        else:
            os.setgroups([])
            os.setresgid(int(role), int(role), int(role))
            os.setresuid(int(role), int(role), int(role))
            dumpable(True)


def become_or_end(roles, say):
    """become(); or say why that is `unfit` for the test, and end."""
    try:
        become(*roles)
    except OSError as exc:
        say(unfit=f"{','.join(roles)}: {exc}")
        raise SystemExit from None


def link_to(port):
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(f"\0rdmanet-soft/{port}")
    return link


def peer_of(link):
    return struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def say_on(link, kind, value=0, nonce=None, size=0, arena_size=0, fd=None):
    data = _MESSAGE.pack(_MAGIC, WIRE, kind, value, 0, size)
    if nonce is not None:
        data += _IDENTITY.pack(nonce, bytes(32), os.getpid() * 2 + 1, arena_size, 0, 0)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    link.sendmsg([data], rights)


def hear_on(link):
    """Kind, value, nonce (None: there is none) and descriptor of the next message; kind is 0 at the end."""
    try:
        data, control, *_ = link.recvmsg(1 << 16, socket.CMSG_SPACE(4))
    except ConnectionError:
        data, control = b"", []
    fd = array.array("i", control[0][2])[0] if control else None
    if not data:
        return 0, 0, None, fd
    _, _, kind, value, _, _ = _MESSAGE.unpack_from(data)
    nonce = (
        _IDENTITY.unpack_from(data, _MESSAGE.size)[0] if len(data) >= _MESSAGE.size + _IDENTITY.size else None
    )
    return kind, value, nonce, fd


def offer(pid, nonce):
    """A descriptor with a nonce in its name, for that process."""
    return os.memfd_create(f"rdmanet-link-{pid}-{nonce.hex()}")


def read(pid, number):
    """The nonce in the name of another's descriptor; a guess, where the kernel doesn't tell."""
    try:
        name = os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return os.urandom(32)
    found = re.fullmatch(r"/memfd:rdmanet-link-\d+-([0-9a-f]{64}) \(deleted\)", name)
    return bytes.fromhex(found[1]) if found else os.urandom(32)


def ask_for_arena(port):
    """Does all that the server wants, as well as can be: its arena, or why not."""
    with link_to(port) as link:
        victim = peer_of(link)
        offered = offer(victim, os.urandom(32))
        say_on(link, HELLO, offered)
        kind, value, _, fd = hear_on(link)
        if kind == CHALLENGE:
            say_on(link, PROOF, nonce=read(victim, value))
            kind, value, _, fd = hear_on(link)
        os.close(offered)
        if fd is not None:
            return fd, None
        return None, REASONS.get(value, str(value)) if kind == REFUSED else "closed"
