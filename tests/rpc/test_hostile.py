"""Peers that break the protocol of rdmanet.rpc: their connection ends, and nobody else notices.

The bytes go over TCP. What a peer can do with RDMA itself is tested in tests/streams and tests/security.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from net import Net, callee, channel, idle
from strangers import HELLO, LIMITS, NUMBERS, SCHEMA, Store, Stranger, call, stranger

from rdmanet import rpc
from rdmanet.base import log_rate
from rdmanet.rpc import Code, link, messages, parting
from rdmanet.rpc.messages import (
    MAGIC,
    VERSION,
    Call,
    Cancel,
    End,
    Failure,
    Goaway,
    Hello,
    Initial,
    Item,
    Lent,
    OutReply,
    Ping,
    Pong,
    Release,
    Reply,
    Window,
    frame,
    raw,
)
from tests.support.waiting import until_seen

pytestmark = pytest.mark.parametrize("transport", ["tcp"])


def with_metadata(metadata: Any) -> Call:
    return Call(1, NUMBERS["add"], None, raw((1, 2)), raw(metadata))


@pytest.fixture(autouse=True)
def log_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rate, "_said", {})


VIOLATIONS = {
    "another protocol": [b"GET / HTTP/1.1\r\n\r\n"],
    "no Hello": [call(1, "add", 1, 2)],
    "another magic": [Hello("grpc", VERSION, "Store", SCHEMA.digest, 1, 1, 1)],
    "another version": [Hello(MAGIC, 2, "Store", SCHEMA.digest, 1, 1, 1)],
    "Hello that accepts nothing": [Hello(MAGIC, VERSION, "Store", SCHEMA.digest, 255, 1, 1)],
    "Hello twice": [HELLO, HELLO],
    "a length beyond the limit": [HELLO, ((1 << 20) + 1).to_bytes(4, "big")],
    "a body that is no message": [HELLO, b"\x00\x00\x00\x01\xc0"],
    "a message of the server": [HELLO, Reply(1, Raw(b"\x01"))],
    "Goaway of a client": [HELLO, Goaway("away")],
    "a number in use": [HELLO, call(1, "wait"), call(1, "add", 1, 2)],
    "an item for a call without a stream": [HELLO, call(1, "wait"), Item(1, Raw(b"\x01"))],
    "an end for a call without a stream": [HELLO, call(1, "wait"), End(1)],
    "credit for a call without a stream": [HELLO, call(1, "wait"), Window(1, 1 << 40)],
    "credit taken back": [HELLO, call(1, "watch"), Window(1, 9_999)],
    "a release of what runs": [HELLO, call(1, "wait"), Release(1)],
    "items after the end": [HELLO, call(1, "total"), End(1), Item(1, Raw(b"\x01"))],
    "two ends": [HELLO, call(1, "total"), End(1), End(1)],
    "items without credit": [HELLO, call(1, "total"), *[Item(1, raw("x" * 3000))] * 10],
    "a depth": [HELLO, (900_005).to_bytes(4, "big") + b"\x95\x01\x01\x02\xc0" + b"\x91" * 900_000],
}


@pytest.mark.parametrize("violation", VIOLATIONS)
async def test_a_violation_ends_that_connection_alone(net: Net, violation: str):
    service = Store()
    client, server = await net.pair(service, limits=LIMITS)
    peer = await stranger(net, server, *VIOLATIONS[violation])
    assert await peer.is_cut_off()
    assert await client.add(1, 2) == 3
    await idle(server)  # what the peer has begun ends
    assert len(server.callees) == 1 and service.alive == 0


async def test_a_long_message_before_hello_is_not_waited_for(net: Net):
    """It is refused by its length, long before the time for a Hello is over."""
    client, server = await net.pair(Store(), limits=rpc.Limits(message_bytes=1 << 20, hello_seconds=3600))
    peer = await stranger(net, server, (4097).to_bytes(4, "big"))
    assert await peer.is_cut_off()
    assert await client.add(1, 2) == 3


async def test_a_stranger_that_says_nothing(net: Net):
    client, server = await net.pair(Store(), limits=LIMITS)
    peers = [await stranger(net, server), await stranger(net, server, frame(HELLO)[:-1])]
    for peer in peers:
        assert await peer.is_cut_off()
    assert await client.add(1, 2) == 3


async def test_a_peer_that_reads_nothing_does_not_keep_a_server_open(
    net: Net, monkeypatch: pytest.MonkeyPatch
):
    paused = asyncio.Event()

    def pause_writing(self: link.Link) -> None:
        original(self)
        paused.set()

    original = link.Link.pause_writing
    monkeypatch.setattr(link.Link, "pause_writing", pause_writing)
    monkeypatch.setattr(link, "CLOSE_S", 0.05)
    monkeypatch.setattr(parting, "HEAR_S", 0.05)
    server = await net.serve(Store(), limits=LIMITS)
    await stranger(net, server, HELLO, *[call(number, "much") for number in range(40)])
    await paused.wait()
    server.close()
    await server.wait_closed()


async def test_closing_waits_for_a_peer_that_reads_slowly(net: Net, monkeypatch: pytest.MonkeyPatch):
    class Transport(asyncio.Transport):
        unsent = [300, 200, 200, 200]  # when closed, when asked, when it waits again, when asked again
        aborted = False

        def get_write_buffer_size(self) -> int:
            return self.unsent.pop(0)

        def close(self) -> None: ...

        def abort(self) -> None:
            self.aborted = True

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(link, "CLOSE_S", 3600)
    one = link.Link(loop, rpc.Limits(), {}, lambda: None, lambda error: None)
    transport = Transport()
    one.connection_made(transport)
    one.close()  # 300 bytes are unsent
    one._close_is_late(300)
    assert not transport.aborted
    one._close_is_late(200)
    assert transport.aborted
    one.connection_lost(None)


REFUSED = {
    "unknown method": (Call(1, 99, None, raw(())), rpc.Code.UNIMPLEMENTED),
    "the largest number of a method": (Call(1, (1 << 32) - 1, None, raw(())), rpc.Code.UNIMPLEMENTED),
    "arguments that are no array": (Call(1, NUMBERS["add"], None, raw(5)), rpc.Code.INVALID_ARGUMENT),
    "too few": (call(1, "add", 1), rpc.Code.INVALID_ARGUMENT),
    "of a wrong type": (call(1, "add", 1, "2"), rpc.Code.INVALID_ARGUMENT),
    "a loan beyond the limit": (call(1, "put", Lent(1, 1 << 40)), rpc.Code.RESOURCE_EXHAUSTED),
    "a loan that the method reads, without RDMA": (
        call(1, "peek", Lent(1, 8 << 30)),
        rpc.Code.INVALID_ARGUMENT,
    ),
    "text that is no UTF-8": (
        Call(1, NUMBERS["name"], None, Raw(b"\x91\xa1\xff")),
        rpc.Code.INVALID_ARGUMENT,
    ),
    "a loan without RDMA": (call(1, "put", Lent(1, 10)), rpc.Code.INVALID_ARGUMENT),
    "metadata that is no map": (with_metadata(5), rpc.Code.INVALID_ARGUMENT),
    "metadata of wrong values": (with_metadata({"a": 1}), rpc.Code.INVALID_ARGUMENT),
    "metadata of wrong names": (with_metadata({1: "a"}), rpc.Code.INVALID_ARGUMENT),
    "metadata with a long name": (with_metadata({"x" * 257: "a"}), rpc.Code.INVALID_ARGUMENT),
    "metadata in metadata": (with_metadata({"a": {"b": "c"}}), rpc.Code.INVALID_ARGUMENT),
    "metadata that is no UTF-8": (with_metadata(Raw(b"\x81\xa1\xff\xa1a")), rpc.Code.INVALID_ARGUMENT),
    "metadata that is too long": (with_metadata({"a": b"x" * 9000}), rpc.Code.RESOURCE_EXHAUSTED),
    "many metadata": (with_metadata({f"{n}": "" for n in range(5000)}), rpc.Code.RESOURCE_EXHAUSTED),
    "a time-out that is over": (call(1, "wait", timeout_us=0), rpc.Code.DEADLINE_EXCEEDED),
}


@pytest.mark.parametrize("refused", REFUSED)
async def test_a_call_that_is_refused_leaves_the_connection(net: Net, refused: str):
    server = await net.serve(Store(), limits=LIMITS)
    message, code = REFUSED[refused]
    peer = await stranger(net, server, HELLO, message)
    assert isinstance(await peer.hear(), Hello)
    failure = await peer.hear()
    assert isinstance(failure, Failure) and (failure.number, failure.code) == (1, code)
    peer.say(call(1, "add", 1, 2))
    reply = await peer.hear()
    assert msgspec.msgpack.decode(reply.result) == 3


@pytest.mark.parametrize("text", ["x" * 5000, "\U0001f600" * 5000, ""])
@pytest.mark.parametrize("accepted", [256, 1000])
async def test_a_failure_fits_into_what_the_client_accepts(net: Net, text: str, accepted: int):
    server = await net.serve(Store(), limits=LIMITS)
    hello = Hello(MAGIC, VERSION, "Store", bytes(32), accepted, 1, 1)  # the schema is sent all the same
    peer = await stranger(net, server, hello, call(1, "fail", text))
    assert isinstance(await peer.hear(), Hello)
    failure = await peer.hear()
    assert isinstance(failure, Failure) and failure.code == rpc.Code.ABORTED
    assert len(frame(failure)) - 4 <= accepted and text.startswith(failure.text)


async def test_a_deep_argument(net: Net):
    """Where the method takes anything: the arguments are skipped, and decoded later."""
    server = await net.serve(Store(), limits=LIMITS)
    depth = 100
    peer = await stranger(net, server, HELLO, Call(1, NUMBERS["tree"], None, Raw(b"\x91" * depth + b"\xc0")))
    await peer.hear()
    assert isinstance(await peer.hear(), Reply)


async def test_floods(net: Net):
    """Calls and cancels without end, as in HTTP/2's rapid reset: each call counts until its handler has ended."""
    service = Store()
    client, server = await net.pair(service, limits=LIMITS)
    peer = await stranger(net, server, HELLO)
    most = 0
    for number in range(3000):
        peer.say(call(number, "wait"), Cancel(number), Cancel(number + 1), Ping(number))
        if number % 100 == 99:
            await peer.writer.drain()
            assert await client.add(1, 2) == 3
            most = max(most, service.alive)
    answers: dict[type, int] = {}
    while answers.get(Pong, 0) < 3000 or answers.get(Failure, 0) < 3000:
        heard = await peer.hear()
        answers[type(heard)] = answers.get(type(heard), 0) + 1
        most = max(most, service.alive)
    assert most <= LIMITS.calls


async def test_more_calls_than_allowed(net: Net):
    service = Store()
    server = await net.serve(service, limits=LIMITS)
    peer = await stranger(net, server, HELLO, *(call(number, "wait") for number in range(60)))
    await peer.hear()
    refused = [await peer.hear() for _ in range(10)]
    assert {failure.number for failure in refused} == set(range(50, 60))
    assert {failure.code for failure in refused} == {rpc.Code.RESOURCE_EXHAUSTED}
    assert len(server.running) == 50


async def test_more_bytes_of_arguments_than_allowed(net: Net):
    """The sum of all calls that run, however many there may be."""
    service = Store()
    limits = rpc.Limits(message_bytes=100_000, inline_bytes=250_000, calls=50)
    server = await net.serve(service, limits=limits)
    hold = [call(number, "hold", b"x" * 99_000) for number in range(5)]
    peer = await stranger(net, server, HELLO, *hold, call(9, "add", 1, 2))
    await peer.hear()
    refused = [await peer.hear() for _ in range(3)]
    assert [failure.number for failure in refused] == [2, 3, 4]
    assert {failure.code for failure in refused} == {rpc.Code.RESOURCE_EXHAUSTED}
    assert "bytes of arguments in messages: the limit inline_bytes is 250000" in refused[0].text
    assert (await peer.hear()).number == 9
    peer.say(Cancel(0), Cancel(1))
    assert {(await peer.hear()).number for _ in range(2)} == {0, 1}
    peer.say(call(5, "put", b"x" * 99_000))
    assert isinstance(await peer.hear(), Reply)


async def test_a_client_that_does_not_read(net: Net):
    """The server stops reading from it, and remembers no more than its stream's credit and what the transport holds."""
    service = Store()
    client, server = await net.pair(service, limits=LIMITS)
    before = set(server.callees)
    peer = await stranger(net, server, HELLO, call(0, "watch"), Window(0, 1 << 50))
    link = None
    while link is None or not link.paused:
        await asyncio.sleep(0)
        link = next((found.link for found in server.callees - before), None)
    assert not link.transport.is_reading()
    size = link.transport.get_write_buffer_size()
    assert await client.add(1, 2) == 3
    assert link.transport.get_write_buffer_size() == size < 1 << 20
    assert not peer.writer.is_closing()


# ---- Servers that are hostile to clients --------------------------------------------------------------------


async def hostile_server(net: Net, *answers: Any) -> tuple[str, int]:
    """A server that says Hello, waits for a call, and says this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        try:
            await peer.hear()
            peer.say(HELLO)
            await peer.hear()
            peer.say(*answers)
            await peer.is_cut_off()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await net._stack.enter_async_context(server)
    return server.sockets[0].getsockname()[:2]


ANSWERS = {
    "a reply to nobody": [Reply(2, Raw(b"\x01"))],
    "two replies": [Reply(1, Raw(b"\x01")), Reply(1, Raw(b"\x01"))],
    "a failure of nobody": [Failure(9, 5, "")],
    "items of a unary call": [Item(1, Raw(b"\x01"))],
    "an end of a unary call": [End(1)],
    "credit for a unary call": [Window(1, 1 << 50)],
    "initial metadata for nobody": [Initial(9, raw({}))],
    "initial metadata that was not asked for": [Initial(1, raw({}))],
    "a call": [call(1, "add", 1, 2)],
    "a release": [Release(1)],
    "a second Hello": [HELLO],
    "garbage": [b"\x00\x00\x00\x02\xff\xff"],
    "nothing": [b"\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_client_survives_its_server(net: Net, answer: str):
    host, port = await hostile_server(net, *ANSWERS[answer])
    async with rpc.connect(Store, host, port, transport="tcp") as client:
        if answer == "two replies":
            assert await client.add(1, 2) == 1
            await channel(client).link.closed
        with pytest.raises(rpc.Error) as caught:
            await client.add(1, 2)
        assert caught.value.code is rpc.Code.UNAVAILABLE


@pytest.mark.parametrize(
    "answer",
    [
        Reply(1, raw("text")),
        Failure(1, 4_000_000_000, "\x1b[31m", raw({"x": 1})),
        Failure(1, 0, ""),
    ],
)
async def test_a_wrong_answer_fails_its_call_alone(net: Net, answer: Any):
    host, port = await hostile_server(net, answer)
    async with rpc.connect(Store, host, port, transport="tcp") as client:
        with pytest.raises(rpc.Error) as caught:
            await client.add(1, 2)
        assert caught.value.code in (rpc.Code.INTERNAL, rpc.Code.UNKNOWN)
        assert "\x1b" not in str(caught.value)
        assert not channel(client).link.is_over


@pytest.mark.parametrize("metadata", [5, {1: "a"}, {"a": 1}, {"a": "x" * 8192}, {"x" * 257: "a"}])
@pytest.mark.parametrize("kind", ["initial", "trailing"])
async def test_wrong_metadata_of_an_answer_fails_its_call_alone(net: Net, kind: str, metadata: Any):
    initial = kind == "initial"
    answer = Initial(1, raw(metadata)) if initial else Reply(1, raw(3), False, None, raw(metadata))
    host, port = await hostile_server(net, answer)
    async with rpc.connect(Store, host, port, transport="tcp") as client:
        with pytest.raises(rpc.Error) as caught:
            await rpc.options(client, response=rpc.Response()).add(1, 2)
        assert caught.value.code in (rpc.Code.INVALID_ARGUMENT, rpc.Code.RESOURCE_EXHAUSTED)
        assert f"the method's {kind} metadata" in caught.value.text
        assert not channel(client).link.is_over


async def test_a_flood_of_initial_metadata_takes_no_memory(net: Net):
    flood = [Initial(1, raw({f"name {number}": "x" * 100})) for number in range(1000)]
    host, port = await hostile_server(net, *flood)
    async with rpc.connect(Store, host, port, transport="tcp") as client:
        said = rpc.Response()
        with pytest.raises(rpc.Error, match="metadata_bytes is 8192"):
            await rpc.options(client, response=said).add(1, 2)
        assert 50 < len(said.initial_metadata) < 100


async def test_a_server_that_knows_nothing_of_metadata_back(net: Net):
    host, port = await hostile_server(net, OutReply(1, 3))
    async with rpc.connect(Store, host, port, transport="tcp") as client:
        said = rpc.Response()
        assert await rpc.options(client, response=said).add(1, 2) == 3
        assert said.initial_metadata == said.trailing_metadata == {}


# ---- Fuzzing ------------------------------------------------------------------------------------------------


def random_message(chance: random.Random) -> Any:
    """Something that a client may say, in any order, with numbers that are often right."""
    number = chance.choice([0, 1, 2, 3, (1 << 32) - 1])
    value = raw(chance.choice([None, 1, "x", [1], (1, 2), {"a": 1}, b"x" * 100, [Lent(1, 5)], [[1]]]))
    makers: list[Callable[[], Any]] = [
        lambda: Call(number, chance.randrange(8), chance.choice([None, 0, 1, 1000]), value),
        lambda: call(number, chance.choice(list(NUMBERS))),
        lambda: Item(number, value),
        lambda: End(number),
        lambda: Window(number, chance.choice([0, 10_000, 20_000, 1 << 52])),
        lambda: Cancel(number),
        lambda: Release(number),
        lambda: Ping(number),
        lambda: chance.choice([HELLO, Goaway("x"), Reply(number, value), Failure(number, 5, "x")]),
    ]
    encoded = bytearray(frame(chance.choices(makers, [9, 9, 9, 3, 3, 9, 3, 3, 0.3])[0]()))
    if chance.random() < 0.05:
        encoded[chance.randrange(4, len(encoded))] = chance.randrange(256)
    return bytes(encoded)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_fuzzing_a_server(net: Net, seed: int):
    """Random messages, and messages with a wrong byte: the server serves others, and in the end has nothing left."""
    chance = random.Random(seed)
    service = Store()
    client, server = await net.pair(service, limits=LIMITS)
    for _ in range(60 if seed == 1 else 3000):
        peer = await stranger(net, server, HELLO)
        peer.say(*(random_message(chance) for _ in range(chance.randrange(100))))
        if chance.random() < 0.5:
            peer.say(Ping(1 << 40))
            while (heard := await peer.hear()) is not None and heard != Pong(1 << 40):
                assert type(heard) in messages.Message.__args__
        peer.writer.close()
        assert await client.add(1, 2) == 3
    service.gate.set()
    await until_seen(lambda: len(server.callees) == 1 and not server.running)
    assert service.alive == 0 and len(callee(server).book) == 0


# ---- What is held --------------------------------------------------------------------------------------------


async def test_items_of_a_stream_that_has_failed_are_not_held(net: Net):
    service = Store()
    server = await net.serve(service, limits=rpc.Limits(stream_bytes=1 << 20, decoded_bytes=1000))
    peer = await stranger(net, server, HELLO, call(1, "idle"))
    await until_seen(lambda: server.running)
    heavy = Item(1, raw([[]] * 1000))
    peer.say(heavy, *[Item(1, raw(number)) for number in range(100)], call(2, "add", 1, 2))
    while not isinstance(await peer.hear(), Reply):
        pass
    assert callee(server).share.inline_bytes < 100
    service.gate.set()
    assert (await peer.hear()).code == Code.RESOURCE_EXHAUSTED


async def test_errors_that_are_not_read_wait_and_count(net: Net):
    """A client that reads nothing gets no more of them written than of results."""
    server = await net.serve(Store(), limits=rpc.Limits(message_bytes=1 << 20, calls=50))
    hello = msgspec.structs.replace(HELLO, message_bytes=1 << 30)
    peer = await stranger(net, server, hello, call(0, "much"))
    while not isinstance(await peer.hear(), Reply):
        pass
    peer.writer.transport.pause_reading()
    peer.say(*[call(number, "fail_much", 1_000_000) for number in range(1, 41)])
    link, share = callee(server).link, callee(server).share
    await until_seen(lambda: link.paused and len(server.running) > 20 and share.inline_bytes > 20_000_000)
    assert link.transport.get_write_buffer_size() < 10_000_000
    peer.writer.transport.resume_reading()
    heard = [await peer.hear() for _ in range(40)]
    assert {message.number for message in heard} == set(range(1, 41))
    assert all(message.code == Code.ABORTED and len(message.details) > 1_000_000 for message in heard)


@pytest.mark.parametrize("end", ["cancel", "close", "no room"])
async def test_errors_that_cannot_wait_go_without_details(net: Net, end: str):
    limits = rpc.Limits(message_bytes=1 << 20, inline_bytes=5_000_000 if end == "no room" else 1 << 30)
    server = await net.serve(Store(), limits=limits)
    hello = msgspec.structs.replace(HELLO, message_bytes=1 << 30)
    peer = await stranger(net, server, hello)
    while not isinstance(await peer.hear(), Hello):
        pass
    peer.writer.transport.pause_reading()
    peer.say(*[call(number, "fail_much", 1_000_000) for number in range(40)])
    found = callee(server)
    await until_seen(lambda: found.link.paused and (found.share.inline_bytes > 3_000_000))
    if end == "cancel":
        for running in list(server.running):
            running.cancel()
    elif end == "close":
        server.close()
    peer.writer.transport.resume_reading()
    heard = [message for message in [await peer.hear() for _ in range(40)] if isinstance(message, Failure)]
    assert any(message.code == Code.ABORTED and message.details == raw(None) for message in heard)
    await until_seen(lambda: not server.running)
