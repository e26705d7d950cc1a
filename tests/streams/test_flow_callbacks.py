"""What a protocol may do while it is told to pause or to resume: beside what asyncio's TCP makes of the same.

Each cell of the table is a call, the callback that comes of it, and what the protocol does there. It runs over RDMA, on
the loop under test, and over TCP on asyncio's; what the protocol, the peer and the caller have seen must be the same.
"""

import asyncio
import functools
from typing import Any

import pytest
from harness import HOST, Net, Recorder

import rdmanet
from tests.support.waiting import Conditions, begin, until_seen

pytestmark = pytest.mark.once

PARTS = [letter * (4 << 20) for letter in (b"a", b"b", b"c")]
SENT = b"".join(PARTS)


def lower_the_limits(transport: Any) -> None:
    transport.set_write_buffer_limits(high=1 << 30)
    transport.write(SENT)
    transport.set_write_buffer_limits(high=65536)


CALLS = {
    "set_write_buffer_limits": lower_the_limits,
    "write": lambda transport: transport.write(SENT),
    "writelines": lambda transport: transport.writelines(PARTS),
    "writelines of a generator": lambda transport: transport.writelines(part for part in PARTS),
}


class Failure(Exception):
    pass


def fail(side: Any) -> None:
    raise Failure


def replace(side: Any) -> None:
    side.transport.set_protocol(Replaced(side))


def pause_and_resume_reading(side: Any) -> None:
    side.transport.pause_reading()
    side.transport.resume_reading()


ACTS = {
    "nothing": lambda side: None,
    "write": lambda side: side.transport.write(b"X"),
    "writelines": lambda side: side.transport.writelines([b"X", b"Y"]),
    "write much": lambda side: side.transport.write(SENT),
    "close": lambda side: side.transport.close(),
    "abort": lambda side: side.transport.abort(),
    "write_eof": lambda side: side.transport.write_eof(),
    "pause and resume reading": pause_and_resume_reading,
    "set_protocol": replace,
    "set_write_buffer_limits": lambda side: side.transport.set_write_buffer_limits(high=0),
    "raise": fail,
    "write, then close": lambda side: (side.transport.write(b"X"), side.transport.close()),
}


class Sender(asyncio.Protocol):
    """Does something in one of its callbacks, once."""

    def __init__(self, during: str, act: Any) -> None:
        self.during, self.act = during, act
        self.transport: Any = None
        self.seen: list[str] = []
        self.conditions = Conditions()

    def note(self, name: str) -> None:
        # How often it is told to pause and to resume is the transport's own business: the sizes of buffers differ.
        if name not in self.seen:
            self.seen.append(name)
        self.conditions.look()

    def happens(self, name: str) -> None:
        self.note(name)
        if name == self.during and self.act is not None:
            act, self.act = self.act, None
            try:
                act(self)
            finally:
                self.conditions.look()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def pause_writing(self) -> None:
        self.happens("pause")

    def resume_writing(self) -> None:
        self.happens("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.note(f"lost {type(exc).__name__}")


class Replaced(asyncio.Protocol):
    """Follows a Sender; its callbacks are told apart."""

    def __init__(self, before: Sender) -> None:
        self.before = before

    def pause_writing(self) -> None:
        self.before.note("the new protocol's pause")

    def resume_writing(self) -> None:
        self.before.note("the new protocol's resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.before.note(f"the new protocol's lost {type(exc).__name__}")


class Receiver(asyncio.Protocol):
    """Reads nothing until it is told to."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.end = ""
        self.lost = False
        self.conditions = Conditions()
        self.made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.pause_reading()
        self.made.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.conditions.look()

    def eof_received(self) -> bool:
        self.end = "eof"
        self.conditions.look()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self.end = self.end or f"lost {type(exc).__name__}"
        self.lost = True
        self.conditions.look()


async def story(over_rdma: bool, call: str, during: str, act: str) -> dict[str, Any]:
    """What comes of one cell."""
    loop = asyncio.get_running_loop()
    complaints: list[str] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(
        lambda loop, context: complaints.append(type(context.get("exception")).__name__)
    )
    serve: Any = rdmanet.start_rdma_server if over_rdma else loop.create_server
    connect: Any = rdmanet.create_rdma_connection if over_rdma else loop.create_connection
    accepted: list[Receiver] = []

    def receiver() -> Receiver:
        accepted.append(Receiver())
        return accepted[-1]

    server = await serve(receiver, HOST, 0)
    sender = Sender(during, ACTS[act])
    transport, _ = await connect(lambda: sender, HOST, server.sockets[0].getsockname()[1])
    transport.set_write_buffer_limits(high=65536)
    await until_seen(lambda: accepted)
    peer = accepted[0]
    await peer.made
    raised = ""
    try:
        CALLS[call](transport)
    except Exception as exc:
        raised = type(exc).__name__
    paused = "pause" in sender.seen
    peer.transport.resume_reading()
    if during == "resume":
        await sender.conditions.until(lambda: sender.act is None)
    if not transport.is_closing():
        try:
            transport.write(b"end")
        except RuntimeError:
            raised += " after"  # after write_eof()
    extra = {"write": b"X", "writelines": b"XY", "write much": SENT, "write, then close": b"X"}.get(act, b"")
    ends = act in ("close", "abort", "write_eof", "write, then close")
    if act != "abort":
        await sender.conditions.until(lambda: any("resume" in seen for seen in sender.seen))
    if ends:
        await peer.conditions.until(lambda: peer.end)
    else:
        want = len(SENT) + len(extra) + 3
        await peer.conditions.until(lambda: len(peer.data) >= want)
    # Over TCP, what is in the kernel is sent though the transport aborts: then only the beginning is compared.
    data = "a beginning" if act == "abort" and SENT.startswith(bytes(peer.data)) else bytes(peer.data)
    end = "abort" if act == "abort" else peer.end
    if not transport.is_closing():
        transport.abort()  # of a TCP transport that is gone it would raise
    await sender.conditions.until(lambda: any("lost" in seen for seen in sender.seen))
    if not peer.transport.is_closing():
        peer.transport.abort()
    await peer.conditions.until(lambda: peer.lost)
    server.close()
    await server.wait_closed()
    loop.set_exception_handler(before)
    return {
        "raised": raised,
        "paused": paused,
        "seen": sender.seen,
        "data": data,
        "end": end,
        "complaints": complaints,
    }


@functools.cache
def over_tcp(call: str, during: str, act: str) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        told = runner.run(story(False, call, during, act))
    # If resume_writing() closes, asyncio's transport ends twice, and complains of itself.
    told["complaints"] = [name for name in told["complaints"] if name != "AttributeError"]
    return told


def as_over_tcp(call: str, during: str, act: str) -> dict[str, Any]:
    """In Python 3.12.1 and 3.13.0 TCP's writelines() never pauses. There it is to do what write() of the same does."""
    pauses = over_tcp(call, "pause", "nothing")["paused"]
    return over_tcp(call if pauses or not call.startswith("writelines") else "write", during, act)


@pytest.mark.not_on_siw("keeps a TCP port for a minute, and hundreds take them from other tests")
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("during", ["pause", "resume"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_protocol_that_acts_in_a_callback_of_flow_control(net: Net, call, during, act):
    expected = await asyncio.to_thread(as_over_tcp, call, during, act)
    assert expected["paused"]
    got = await story(True, call, during, act)
    shown = {name: value for name, value in got.items() if name != "data"}
    assert shown == {name: value for name, value in expected.items() if name != "data"}
    assert got["data"] == expected["data"], (len(got["data"]), len(expected["data"]))


@pytest.mark.parametrize("bad", [1, "text", None, memoryview(b"abcd")[::2]], ids=repr)
async def test_lines_of_which_one_is_not_bytes_like_are_not_sent(net: Net, bad):
    client, server = await net.pair()
    with pytest.raises((TypeError, BufferError)):
        client.transport.writelines([b"before", bad, b"after"])
    client.transport.write(b"end")
    client.transport.close()
    await server.until_lost()
    assert bytes(server.data) == b"end"


async def test_an_iterator_that_fails_has_sent_nothing(net: Net):
    def parts():
        yield b"before"
        raise Failure

    client, server = await net.pair()
    with pytest.raises(Failure):
        client.transport.writelines(parts())
    client.transport.close()
    await server.until_lost()
    assert bytes(server.data) == b""


async def test_lines_after_the_end_are_refused_as_a_write_is(net: Net, caplog):
    client, server = await net.pair()
    client.transport.write_eof()
    with pytest.raises(RuntimeError, match="after write_eof"):
        client.transport.writelines([b"x"])
    other, _ = await net.pair()
    other.transport.close()
    other.transport.writelines([b"x"] * 20)  # one late call, not twenty
    assert "write() on a closed RDMA transport" not in caplog.text
    await other.until_lost()
    for _ in range(10):
        other.transport.writelines([b"x"])
    assert "write() on a closed RDMA transport" in caplog.text


async def test_a_view_of_memory_that_is_being_read_pauses_the_next_protocol_too(net: Net):
    """drain() of the new protocol's writer must not return while the device may read the view."""
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(memoryview(bytearray(16 << 20)))
    assert client.writing_paused
    follower = Recorder()
    follower.events.append("made")
    client.transport.set_protocol(follower)
    assert follower.writing_paused
    server.transport.resume_reading()
    await follower.until(lambda: not follower.writing_paused)
    assert follower.events == ["made", "pause", "resume"]
    assert client.transport.get_write_buffer_size() == 0
    client.transport.set_protocol(client)  # the test's net waits for its end


async def test_drain_of_a_writer_over_the_next_protocol_waits_for_the_view(net: Net):
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(memoryview(bytearray(16 << 20)))
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    client.transport.set_protocol(protocol)
    writer = asyncio.StreamWriter(client.transport, protocol, reader, loop)
    (draining,) = await begin(writer.drain())
    assert not draining.done()
    server.transport.resume_reading()
    await draining
    assert client.transport.get_write_buffer_size() == 0
    writer.close()
    client.transport.set_protocol(client)  # the test's net waits for its end
