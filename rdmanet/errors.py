"""The exceptions, and how status codes become exceptions.

Every failure is an OSError, with a real errno where one fits, so that programs written for sockets catch what they
always caught. A failed *call* raises OSError with the library's errno. A failed *completion* is not a failed call: the
work request was accepted and failed later. It has a class of its own, with the device's completion status. Connections
fail with the events of the connection manager.

    OSError
    +-- RdmaError                       an error that only RDMA has
    |   +-- DeviceNotFoundError         no such device, or no library to find one with
    |   +-- ModifyQPError               a state transition of a queue pair with the wrong attributes
    |   +-- RegionRevokedError          the owner of a remote memory region has revoked it
    +-- ConnectionError
        +-- DeviceLostError             the device of a connection failed or was removed; also an RdmaError
        +-- ProtocolError               the peer violated rdmanet's protocol
        +-- CompletionError             a work request completed with an error
            +-- RemoteAccessError       ... because the peer does not allow the access
            +-- CompletionResetError    ... because the connection is gone; also a ConnectionResetError

This module is pure: numbers in, exceptions out. The numbers are part of the ABI and never change.
"""

import enum
import errno
import os
import re
import reprlib
from collections.abc import Iterable

__all__ = [
    "CompletionError", "CompletionResetError", "DeviceLostError", "DeviceNotFoundError", "ModifyQPError",
    "ProtocolError", "RdmaError", "RegionRevokedError", "RemoteAccessError", "cm_error", "completion_error",
    "event_error",
]  # fmt: skip

PEER_TEXT_MAX = 200
"""How many characters of a peer's text reach an exception, a log or a terminal."""


def endpoint(address: tuple[object, ...]) -> str:
    """An address as text: 10.0.0.1:7471, [fe80::1%2]:7471.

    :param address: (ip, port), or (ip, port, flowinfo, scope_id), as of a socket
    """
    ip, port = str(address[0]), address[1]
    if len(address) > 3 and address[3] and "%" not in ip:
        ip = f"{ip}%{address[3]}"
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def name_peer(error: BaseException | None, peer: tuple[object, ...] | None) -> None:
    """Put the peer's address into the text of a connection's error, unless it is there already.

    A lost device is named instead: no peer has to do with it.

    :param peer: (ip, port), as for `endpoint`; None if it is not known
    """
    if not isinstance(error, OSError) or isinstance(error, DeviceLostError):
        return
    if peer is None or endpoint(peer) in str(error):
        return
    if error.errno is None:
        error.args = (f"{error} (peer {endpoint(peer)})",)
    else:
        error.strerror = f"{error.strerror} (peer {endpoint(peer)})"
        error.args = (error.errno, error.strerror)


def _text_of(error: OSError) -> dict[str, object]:
    """What a copy of an error is to have besides its constructor's arguments: a peer may have been named."""
    return {"strerror": error.strerror, "args": error.args}


def printable(text: str, most: int = PEER_TEXT_MAX) -> str:
    """A text that a peer has chosen, made safe to print: without line breaks, terminal escapes and characters that
    change the direction of the text around them, and of limited length.
    """
    shown = text if len(text) <= most else f"{text[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in shown
    )


class RdmaError(OSError):
    """Base of the errors that only RDMA has."""


class DeviceNotFoundError(RdmaError):
    """There is no such device, or no library to find one with; the message says which, and why."""


class ModifyQPError(RdmaError):
    """A device refused to change the state of a queue pair (EINVAL); the sets say what is wrong by the InfiniBand
    specification.

    Both sets may be empty: then a value is wrong, or the device has a reason of its own.

    :ivar cur_state: the state in which the queue pair was, and still is, a :class:`rdmanet.verbs.QPState`
    :ivar next_state: the state that was asked for
    :ivar missing: the attributes of QPAttr that this transition requires and that were not given
    :ivar not_allowed: the attributes that were given although this transition does not take them
    """

    cur_state: enum.IntEnum
    next_state: enum.IntEnum
    missing: frozenset[str]
    not_allowed: frozenset[str]

    def __init__(
        self,
        message: str,
        cur_state: enum.IntEnum,
        next_state: enum.IntEnum,
        missing: Iterable[str] = (),
        not_allowed: Iterable[str] = (),
    ) -> None:
        self.cur_state = cur_state
        self.next_state = next_state
        self.missing = frozenset(missing)
        self.not_allowed = frozenset(not_allowed)
        super().__init__(errno.EINVAL, message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.strerror, self.cur_state, self.next_state, self.missing, self.not_allowed)


class RegionRevokedError(RdmaError):
    """The owner of this remote memory has revoked the offer."""


class DeviceLostError(RdmaError, ConnectionError):
    """The device of this connection failed or was removed, which ended all connections on it. ENODEV.

    The peer may still be reachable, over another device, or over this one once it is back.

    :ivar device: its name
    :ivar event: the event that reported it: DEVICE_FATAL (of the device) or DEVICE_REMOVAL (of the connection manager)
    """

    device: str
    event: str

    def __init__(self, device: str, event: str) -> None:
        self.device = device
        self.event = event
        super().__init__(errno.ENODEV, f"device {device} is lost: {event}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.device, self.event)


class ProtocolError(ConnectionError):
    """The peer sent something that rdmanet's protocol does not allow; the connection is closed."""


class CompletionError(ConnectionError):
    """A work request was accepted and failed; the queue pair is in the error state.

    :ivar status: the completion status, a number of :class:`rdmanet.verbs.WCStatus`
    :ivar opcode: the operation, if it was awaited; else "send" or "receive", for its queue; None if it is not known
    :ivar vendor_err: the device's own code, for its vendor's support
    :ivar qp_num: the queue pair
    """

    status: int
    opcode: str | None
    vendor_err: int
    qp_num: int

    def __init__(
        self,
        status: int,
        opcode: str | None = None,
        vendor_err: int = 0,
        qp_num: int = 0,
        *,
        where: str = "",
        why: str = "",
    ) -> None:
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err
        self.qp_num = qp_num
        name, number, hint = _STATUS.get(status, (f"status {status}", errno.EIO, ""))
        hint = why or hint
        what = f"{opcode} on queue pair {qp_num:#x}" if opcode else f"queue pair {qp_num:#x}"
        detail = f", vendor error {vendor_err:#x}" if vendor_err else ""
        super().__init__(number, f"{what}: {name}{where}{detail}{f' ({hint})' if hint else ''}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.status, self.opcode, self.vendor_err, self.qp_num), _text_of(self)


class RemoteAccessError(CompletionError):
    """The peer's device refused access to its memory; nothing was changed, neither there nor here.

    Awaited operations raise it, because they know what they accessed. A polled completion does not say, so its
    `raise_for_status()` raises a plain CompletionError.

    :ivar address: the first byte that was to be accessed, in the peer's address space
    :ivar length: in bytes
    :ivar rkey: the key that was used
    """

    address: int
    length: int
    rkey: int

    def __init__(
        self,
        status: int,
        opcode: str | None = None,
        vendor_err: int = 0,
        qp_num: int = 0,
        address: int = 0,
        length: int = 0,
        rkey: int = 0,
    ) -> None:
        self.address = address
        self.length = length
        self.rkey = rkey
        where = f" for {length} bytes at {address:#x} by rkey {rkey:#x}"
        super().__init__(status, opcode, vendor_err, qp_num, where=where)

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.status, self.opcode, self.vendor_err, self.qp_num)
        return type(self), (*known, self.address, self.length, self.rkey), _text_of(self)


class CompletionResetError(CompletionError, ConnectionResetError):
    """A work request failed because the connection, or the peer, is gone.

    :ivar peer_gone: whether the device knows that the peer's process has ended; adapters never know
    """

    peer_gone: bool

    def __init__(
        self,
        status: int,
        opcode: str | None = None,
        vendor_err: int = 0,
        qp_num: int = 0,
        peer_gone: bool = False,
    ) -> None:
        self.peer_gone = peer_gone
        super().__init__(status, opcode, vendor_err, qp_num, why=PEER_GONE if peer_gone else "")

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.status, self.opcode, self.vendor_err, self.qp_num, self.peer_gone)
        return type(self), known, _text_of(self)


PEER_GONE = "the peer's process is gone"


# Completion status to name, errno, and the usual cause.
_STATUS: dict[int, tuple[str, int, str]] = {
    0: ("success", 0, ""),
    1: (
        "local length error",
        errno.EMSGSIZE,
        "a message longer than the posted receive, or than max_msg_sz of the port, or an atomic operation whose local "
        "buffer is not of 8 bytes",
    ),
    2: ("local queue pair operation error", errno.EIO, ""),
    4: (
        "local protection error",
        errno.EFAULT,
        "a local buffer lies outside the region of its lkey, or that region may not be written to",
    ),
    5: ("flushed", errno.ECONNRESET, "the queue pair went to the error state first"),
    6: ("memory window bind error", errno.EACCES, ""),
    7: ("bad response", errno.EPROTO, ""),
    8: ("local access error", errno.EACCES, "the local memory region does not allow it"),
    9: (
        "remote invalid request",
        errno.EINVAL,
        "the peer's queue pair does not allow this request: its qp_access_flags lack the right, or its "
        "max_dest_rd_atomic is 0, or the address of an atomic operation is not a multiple of 8, or a message is longer "
        "than its receive",
    ),
    10: ("remote access error", errno.EACCES, "the peer's rkey, range or access rights do not allow it"),
    11: ("remote operation error", errno.EIO, "the peer could not complete it"),
    12: ("transport retries exceeded", errno.ECONNRESET, "the peer did not answer"),
    13: ("receiver-not-ready retries exceeded", errno.ECONNRESET, "the peer has posted no receive"),
    16: (
        "remote aborted",
        errno.ECONNABORTED,
        "on the embedded device: the peer has another version of rdmanet, or not the same secret "
        "(RDMANET_SOFT_SECRET_FILE or RDMANET_SOFT_SECRET); both logs say which",
    ),
    19: ("fatal error", errno.EIO, ""),
    20: ("response timeout", errno.ETIMEDOUT, ""),
    21: ("general error", errno.EIO, ""),
}

_RESET = {5, 12, 13}
_REMOTE_ACCESS = 10
_LOCAL_LENGTH = 1
_REMOTE_INVALID = 9
_ATOMIC_BYTES = 8


def completion_error(
    status: int,
    opcode: str | None = None,
    vendor_err: int = 0,
    qp_num: int = 0,
    remote: tuple[int, int, int] | None = None,
    peer_gone: bool = False,
) -> CompletionError:
    """The exception for a completion that failed.

    :param remote: address, length and key of the peer's memory, if that was accessed and is known
    :param peer_gone: the device knows that the peer's process has ended
    """
    if status == _REMOTE_ACCESS and remote is not None:
        return RemoteAccessError(status, opcode, vendor_err, qp_num, *remote)
    if status in _RESET:
        return CompletionResetError(status, opcode, vendor_err, qp_num, peer_gone)
    where = why = ""
    if status == _REMOTE_INVALID and remote is not None:
        where, why = f" for {remote[1]} bytes at {remote[0]:#x}", _why_invalid(opcode or "", remote[0])
    elif status == _LOCAL_LENGTH:
        why = _why_length(opcode or "")
    return CompletionError(status, opcode, vendor_err, qp_num, where=where, why=why)


def _why_invalid(opcode: str, address: int) -> str:
    """Why the peer's queue pair may refuse an operation whose memory is known; "" if anything may be the reason."""
    if opcode.startswith("ATOMIC_") and address % _ATOMIC_BYTES:
        return f"the address of an atomic operation is a multiple of {_ATOMIC_BYTES}, and {address:#x} is not"
    if opcode == "ATOMIC_WRITE" or opcode.startswith("RDMA_WRITE"):
        return "the peer's queue pair has no REMOTE_WRITE in its qp_access_flags"
    if opcode == "RDMA_READ" or opcode.startswith("ATOMIC_"):
        right = "REMOTE_READ" if opcode == "RDMA_READ" else "REMOTE_ATOMIC"
        return f"the peer's queue pair has no {right} in its qp_access_flags, or its max_dest_rd_atomic is 0"
    return ""


def _why_length(opcode: str) -> str:
    """What had the wrong length; "" if it is not known whether the request was sent or received."""
    if opcode in ("RECV", "receive"):
        return "a message longer than the posted receive"
    if opcode.startswith("ATOMIC_"):
        return f"the local buffer of an atomic operation has {_ATOMIC_BYTES} bytes, and this one has not"
    if opcode.startswith("RDMA_") or opcode == "SEND":
        return "a message longer than max_msg_sz of the port"
    return ""


# The InfiniBand CM's reject reasons that applications meet. iWARP devices report an errno instead.
_REJECT_REASONS = {
    3: "the server has no descriptors left (`ulimit -n` there), or lacks other resources",
    8: "no RDMA program listens there",
    10: "stale connection",
    28: "refused by the application",
}

# On the embedded device also for datagrams. The others below are specific to its connection manager (cm.h).
_NO_RESOURCES = 3
_OUR_REASONS = {
    0x5301: "the server requires a secret, and none is set here (RDMANET_SOFT_SECRET_FILE or RDMANET_SOFT_SECRET)",
    0x5302: "the server has another secret than {secret} here",
    0x5303: "the server has no secret, and one is set here ({secret})",
    0x5304: "the server has another version of the embedded device",
}

_VERSION = 0x5304
_OTHER_VERSION = rb"rdmanet: version (\d{1,5}) there, (\d{1,5}) here"


def other_version_error(
    status: int, private_data: bytes | None, peer: tuple[object, ...] | None
) -> ConnectionRefusedError | None:
    """The exception for a peer whose embedded device has another version, if the event says so (cm.h)."""
    if status != _VERSION or not (versions := re.match(_OTHER_VERSION, private_data or b"")):
        return None
    there, here = (int(version) for version in versions.groups())
    why = (
        f"has another version of rdmanet: its embedded device speaks version {there} of the protocol, this "
        f"side speaks version {here}; install the same version on both sides"
    )
    return ConnectionRefusedError(errno.ECONNREFUSED, f"{endpoint(peer) if peer else 'the peer'} {why}")


_NOT_OURS = b"rdmanet: another language"
_NO_ANSWER = b"rdmanet: no answer"


def is_not_ours(private_data: bytes | None) -> bool:
    """Whether the embedded device itself made up this rejection (cm.h): no RDMA peer sent it."""
    return private_data is not None and private_data.startswith((_NOT_OURS, _NO_ANSWER))


def not_ours_error(peer: tuple[object, ...], private_data: bytes) -> ConnectionRefusedError:
    """The exception for connecting to a port where a TCP program listens and no RDMA program does."""
    if private_data.startswith(_NO_ANSWER):
        why = "has ended the connection without an answer: a TCP program has that port, or an RDMA program that ended"
    else:
        why = "answers, but not as rdmanet: a TCP program has that port, and no RDMA program can be reached there"
    return ConnectionRefusedError(errno.ECONNREFUSED, f"{endpoint(peer)} {why}")


def _our_reason(status: int) -> str:
    """The reason of a rejection that only the embedded device has, with the variable from which our secret is."""
    is_file = bool(os.environ.get("RDMANET_SOFT_SECRET_FILE"))
    name = "RDMANET_SOFT_SECRET_FILE" if is_file else "RDMANET_SOFT_SECRET"
    return _OUR_REASONS.get(status, "").format(secret=name)


def cm_error(
    event: str, status: int, peer: tuple[object, ...] | None = None, peer_gone: bool = False
) -> OSError:
    """The exception for an event of the connection manager that ends an attempt or a connection.

    :param event: the event's name as in :class:`rdmanet.cm.CMEventType`
    :param status: the event's status: 0, -errno, or for REJECTED the reason
    :param peer: the peer's address, as of a socket, if it is known
    :param peer_gone: the device knows that the peer's process has ended
    """
    name = "" if peer is None else f" {endpoint(peer)}"
    to = name and f" to{name}"
    if -status in (errno.EMFILE, errno.ENFILE):
        # This process ran out of them, not the peer.
        return OSError(
            -status,
            f"no file descriptor left for a connection{to} (RLIMIT_NOFILE, `ulimit -n`): {os.strerror(-status)}",
        )
    why = os.strerror(-status) if status < 0 else ""
    if event == "REJECTED" or status in _OUR_REASONS or (event == "UNREACHABLE" and status == _NO_RESOURCES):
        reason = why or _our_reason(status) or _REJECT_REASONS.get(status, f"reason {status}")
        return ConnectionRefusedError(errno.ECONNREFUSED, f"connection{to} rejected: {reason}")
    if event == "DISCONNECTED":
        text = f"{PEER_GONE}:{name}".rstrip(":") if peer_gone else f"disconnected by the peer{name}"
        return ConnectionResetError(errno.ECONNRESET, text)
    if event == "UNREACHABLE":
        if status in (0, -errno.ETIMEDOUT):
            return TimeoutError(errno.ETIMEDOUT, f"the peer{name} cannot be reached: no answer")
        number = -status if status < 0 else errno.EHOSTUNREACH
        return OSError(number, f"the peer{name} cannot be reached: {why or status}")
    if event == "DEVICE_REMOVAL":
        return OSError(errno.ENODEV, "the device was removed")
    number = -status if status < 0 else errno.EIO
    return OSError(
        number, f"{event.lower().replace('_', ' ')}{name and f' for{name}'}: {why or os.strerror(number)}"
    )


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_BYTES_SHOWN = 32


def shown(value: object) -> str:
    """A program's own value, for the text of an error about it: short, whatever it is.

    Of memory it is the type and the length. A buffer that is passed by mistake may be large, and its bytes are not for
    logs.
    """
    try:
        with memoryview(value) as view:  # type: ignore[arg-type]
            if view.ndim and (view.nbytes > _BYTES_SHOWN or not isinstance(value, bytes)):
                return f"{type(value).__name__} of {view.nbytes} bytes"
    except (TypeError, ValueError, BufferError):  # it is no buffer, or one that has been released
        pass
    try:
        return _short.repr(value)
    except ValueError:  # a number with more digits than Python converts
        return f"<{type(value).__name__}>"


# What an event of a queue pair or a completion queue means.
_EVENTS = {
    "CQ_ERR": "it failed, for example because it was overrun",
    "QP_FATAL": "it failed",
    "QP_REQ_ERR": "the peer sent an invalid request",
    "QP_ACCESS_ERR": "the peer sent a request that its access rights do not allow",
}


def event_error(event: str, device: str, what: str) -> ConnectionResetError:
    """The exception for a connection that ends by an event of its device.

    :param event: its name as in :class:`rdmanet.verbs.EventType`
    :param what: what has failed: a queue pair or a completion queue
    """
    return ConnectionResetError(errno.ECONNRESET, f"{event} for {what} of {device}: {_EVENTS[event]}")
