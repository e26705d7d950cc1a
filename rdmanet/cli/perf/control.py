"""What the two sides of a measurement say to each other: lines of JSON, on a socket beside what is measured.

    client                                     server
                        <-  Hello              which version, which process, which CPU
    Hello               ->
    Run                 ->                     a test, a size, the settings: for each measurement
                        <-  Verbs or Address   where to send: queue pairs and memory, or a listener
    Verbs               ->                     only for verbs
                        <-  Go                 it is connected, and has posted what it receives into
    Go                  ->                     the client begins
    Stop                ->
                        <-  Done               what the server measured

Failed comes instead of any answer, and says why; the server goes on with the next Run. Before a Run the client may send
Probe, if it has given the server shared memory: both measure then how far their CPUs are apart. The end of the
connection ends it all: it is Gone here, so that it is not taken for the end of a connection that is measured. Who
listens takes nothing on trust: each line has a limit, its type is checked, and each number has a range. So a stranger
can make it measure, but not allocate more than these limits, and not more than those of guard.py.
"""

import ipaddress
import select
import socket
import time
from typing import Annotated, Any, Literal, TypeVar, overload

import msgspec

from rdmanet.cli.fabrics import HOST
from rdmanet.cli.perf.kinds import KINDS

MOST_BYTES = 1 << 30
"""The longest message."""
MOST_MEMORY = 1 << 32
"""What all queue pairs together may have."""
MOST_COUNT = 1 << 40
MOST_DEPTH = 16384
MOST_QUEUE_PAIRS = 1024
MOST_INLINE = 4096
MOST_OUTSTANDING = 255
MOST_CALLS = 4096
MOST_CONNECTIONS = 1024
MOST_RATE = 1e9
MOST_ADDRESS = (1 << 62) - 1
"""Above all addresses of programs: an offset can be added to it."""
LINE_BYTES = 1 << 20
ANSWER_S = 30.0

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=MOST_DEPTH)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class PerfError(Exception):
    """It cannot be measured; the text says why."""


class Gone(Exception):
    """The other side has closed the connection between the two, or has ended."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How everything is measured. perftest's letters are in parentheses.

    :ivar iterations: how many messages, on each queue pair (-n); 0 is for `seconds` (-D)
    :ivar warm_up_s: so long before that
    :ivar depth: requests in flight on each queue pair (-t)
    :ivar receive_depth: receives posted on each (-r)
    :ivar every: which request is signaled (-Q)
    :ivar list_size: how many are posted as one list (-l)
    :ivar inline: up to so many bytes are posted inline (-I)
    :ivar events: sleep until a completion comes (-e)
    :ivar both_ways: both sides send (-b)
    :ivar outstanding: outstanding READs and atomics of each queue pair (-o)
    :ivar api: how streams are used
    :ivar in_flight: calls of rpc_bw at once; messages of each connection of an "rr" test
    :ivar connections: those of an "rr" test
    :ivar rate: messages a second, where not as many are sent as fit; 0.0 is no limit
    :ivar first: each message has a connection of its own, whose making counts
    """

    seconds: Seconds = 1.0
    iterations: Count = 0
    warm_up_s: Seconds = 0.1
    queue_pairs: Annotated[int, msgspec.Meta(ge=1, le=MOST_QUEUE_PAIRS)] = 1
    connection: Literal["RC", "UC", "UD"] = "RC"
    mtu: Literal[0, 256, 512, 1024, 2048, 4096] = 0
    depth: Depth = 128
    receive_depth: Depth = 512
    every: Depth = 1
    list_size: Depth = 1
    inline: Annotated[int, msgspec.Meta(ge=0, le=MOST_INLINE)] = 0
    events: bool = False
    both_ways: bool = False
    outstanding: Annotated[int, msgspec.Meta(ge=1, le=MOST_OUTSTANDING)] = 16
    api: Literal["protocol", "buffered", "streams"] = "protocol"
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=MOST_CALLS)] = 32
    connections: Annotated[int, msgspec.Meta(ge=1, le=MOST_CONNECTIONS)] = 1
    rate: Annotated[float, msgspec.Meta(ge=0, le=MOST_RATE)] = 0.0
    first: bool = False


class Hello(msgspec.Struct, tag=True):
    version: Text
    pid: Count
    cpu: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] = -1
    """Where the process is pinned; -1 if it is not."""


class Run(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    kind: Text
    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    settings: Settings


class Probe(msgspec.Struct, tag=True):
    pass


class QueuePair(msgspec.Struct):
    """One queue pair: its QPInfo as text, and its memory."""

    info: Text
    address: Annotated[int, msgspec.Meta(ge=0, le=MOST_ADDRESS)]
    rkey: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Verbs(msgspec.Struct, tag=True):
    device: Text
    pairs: Annotated[list[QueuePair], msgspec.Meta(max_length=MOST_QUEUE_PAIRS)]


class Address(msgspec.Struct, tag=True):
    where: Annotated[list[int | Text], msgspec.Meta(min_length=1, max_length=2)]


class Go(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    """What the server has seen between Go and Stop."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    messages: Count = 0
    sent: Count = 0
    preempted: Count = 0
    """How often its process was taken off its CPU,"""
    slept: Count = 0
    """and how often it gave it away, to sleep."""


class Failed(msgspec.Struct, tag=True):
    why: Text


Message = Hello | Probe | Run | Verbs | Address | Go | Stop | Done | Failed
_M = TypeVar("_M", bound=msgspec.Struct)
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Message)


class Control:
    """One side of the connection, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._partial = bytearray()
        self._lines: list[bytes] = []
        self._until_s: float | None = None
        self._late = ""

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: Message) -> None:
        """:raises Gone: nobody is there any more
        :raises PerfError: the other side does not read
        """
        try:
            self.sock.sendall(msgspec.json.encode(message) + b"\n")
        except TimeoutError:
            raise PerfError("the other side reads nothing") from None
        except OSError as exc:
            raise Gone(f"the other side has ended: {exc.strerror or exc}") from None

    def end_after(self, seconds: float | None, why: str = "") -> None:
        """Wait for the other side no longer than so long from now on; None is for ever."""
        self._until_s = None if seconds is None else time.monotonic() + seconds
        self._late = why

    def left_s(self) -> float | None:
        """How long end_after() lets it wait.

        :raises PerfError: no longer
        """
        if self._until_s is None:
            return None
        left = self._until_s - time.monotonic()
        if left <= 0:
            raise PerfError(self._late)
        return left

    def heard(self) -> bool:
        """Whether the other side has said something, or has gone.

        :raises PerfError: end_after() is over
        """
        if self._lines or select.select([self.sock], [], [], 0)[0]:
            return True
        self.left_s()
        return False

    def raise_failure(self) -> None:
        """What has failed here may follow from what has failed there.

        :raises PerfError: the other side has said what that is
        :raises Gone: it has gone
        """
        while self.heard():
            self.receive((Failed, Verbs, Address, Go, Done))

    @overload
    def receive(self, expected: type[_M], seconds: float | None = ANSWER_S) -> _M: ...

    @overload
    def receive(self, expected: tuple[type[Any], ...], seconds: float | None = ANSWER_S) -> Any: ...

    def receive(self, expected: Any, seconds: float | None = ANSWER_S) -> Any:
        """The next message.

        :param expected: its type, or several
        :param seconds: how long to wait; None is for ever
        :raises PerfError: the other side has failed, says something else, or nothing
        :raises Gone: it has gone
        """
        line = self._line(seconds)
        try:
            message = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise PerfError(f"the other side is no rdmanet perf, or of another version: {exc}") from None
        if isinstance(message, Failed):
            raise PerfError(message.why)
        if not isinstance(message, expected):
            wanted = expected[0] if isinstance(expected, tuple) else expected
            raise PerfError(
                f"the other side says {type(message).__name__} where {wanted.__name__} is expected: are both"
                " of one version?"
            )
        return message

    def _line(self, seconds: float | None) -> bytes:
        until = None if seconds is None else time.monotonic() + seconds
        while not self._lines:
            left = self.left_s()
            if until is not None and (left is None or until - time.monotonic() < left):
                left = max(0.0, until - time.monotonic())
            if not select.select([self.sock], [], [], left)[0]:
                self.left_s()
                raise PerfError(
                    f"the other side has said nothing for {seconds:.0f} s: it is stopped or busy (a server takes one"
                    " client at a time)"
                )
            try:
                data = self.sock.recv(1 << 16)
            except OSError as exc:
                raise Gone(f"the other side has ended: {exc.strerror or exc}") from None
            if not data:
                raise Gone("the other side has ended")
            *lines, rest = (bytes(self._partial) + data).split(b"\n")
            self._partial = bytearray(rest)
            self._lines += lines
            if len(self._partial) > LINE_BYTES:
                raise PerfError(f"the other side sends a line of more than {LINE_BYTES} bytes")
        return self._lines.pop(0)


def host_of(name: Any) -> str:
    """The host of a socket's address, as listeners and clients take it; that of a socket pair is this one."""
    if not isinstance(name, tuple):
        return HOST
    address = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)  # a listener for both
    scope = name[3] if len(name) > 3 else 0
    return f"{address}%{scope}" if scope else str(address)


def check_run(run: Run) -> None:
    """What no type can say of a Run, for both sides.

    :raises PerfError: it makes no sense
    """
    kind, settings = KINDS.get(run.kind), run.settings
    if kind is None:
        raise PerfError(f"there is no test {run.kind!r}; tests: {', '.join(KINDS)}")
    if settings.connections > 1 and kind.measures != "rr":
        raise PerfError(
            f"{run.kind}: several connections (--connections) are of stream_rr, tcp_rr and unix_rr"
        )
    if settings.rate and not kind.latency and kind.family != "verbs":
        raise PerfError(f"{run.kind}: a rate (--rate) is of latency, and of the bandwidth of verbs")
    if settings.first and (kind.family == "verbs" or not kind.latency):
        raise PerfError(f"{run.kind}: first messages (--first) are of the latency of streams and calls")
    if settings.first and settings.rate:
        raise PerfError(f"{run.kind}: either --rate or --first, not both")
    if kind.family != "verbs":
        if settings.both_ways:
            raise PerfError(f"{run.kind}: both directions (-b) are measured of verbs only")
        if settings.events and kind.family == "rpc":
            raise PerfError(f"{run.kind}: sleeping instead of polling (-e) is measured of verbs and streams")
        return
    connection = settings.connection
    if connection != "RC" and kind.over in ("read", "atomic"):
        raise PerfError(f"{run.kind} needs a reliable connection: -c {connection} cannot do it")
    if connection == "UD" and kind.over == "write":
        raise PerfError(f"{run.kind} needs a connection: datagrams (-c UD) can only be sent")
    if kind.over == "atomic" and run.size != 8:
        raise PerfError(f"{run.kind}: an atomic has 8 bytes, not {run.size}")
    if kind.latency and settings.both_ways:
        raise PerfError(f"{run.kind}: both directions (-b) are of bandwidth")
    if kind.latency and settings.queue_pairs > 1:
        raise PerfError(f"{run.kind} has one message under way: several queue pairs (-q) are of bandwidth")
    if kind.latency and kind.over == "write" and settings.events:
        raise PerfError(f"{run.kind} waits for bytes in memory, which come without an event (-e)")
    if settings.list_size > settings.depth or settings.every > settings.depth:
        raise PerfError(
            f"-l {settings.list_size} and -Q {settings.every} cannot be more than -t {settings.depth}, the requests"
            " in flight"
        )
    if settings.iterations % settings.list_size and not kind.latency:
        raise PerfError(f"-n {settings.iterations} is not a multiple of -l {settings.list_size}")
    if run.size * 2 * settings.queue_pairs > MOST_MEMORY:
        raise PerfError(
            f"{settings.queue_pairs} queue pairs with messages of {run.size} bytes: at most {MOST_MEMORY} bytes of"
            " memory in all"
        )
