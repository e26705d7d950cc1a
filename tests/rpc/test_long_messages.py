"""Long arguments and results are copied and written in pieces, and others have their turn between two of them."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy
import pytest
from net import Net, callee, channel, failure, idle
from test_paging import Turn

from rdmanet import rpc
from rdmanet.rpc import gathering, lending, messenger, outgoing, packing, paging
from rdmanet.rpc.long_writes import PIECE_BYTES, TURN_BYTES, LongWrites
from rdmanet.rpc.messages import (
    Apart,
    Array,
    OutCall,
    OutCallBringing,
    OutCallWith,
    OutReply,
    encode,
    parts_of,
)
from rdmanet.rpc.paging import LEAST_BYTES
from tests.support.waiting import begin, loop_turns, until_seen

SIZE = 2 * LEAST_BYTES
MOST = 5 << 19
"""More is not copied in one turn, nor written."""

State = dict[str, numpy.ndarray]


class Store(rpc.Service):
    def __init__(self) -> None:
        self.array = (numpy.arange(SIZE) % 251).astype("u1")
        self.wide = self.array.reshape(2, -1)[:, ::2]
        self.state = {str(at): self.array[at : at + SIZE // 50] for at in range(0, SIZE // 2, SIZE // 100)}
        self.got: Any = None

    async def get(self) -> State:
        return self.state

    async def get_made(self) -> State:
        return {name: array + numpy.uint8(1) for name, array in self.state.items()}

    async def get_array(self) -> numpy.ndarray:
        return self.array

    async def get_wide(self) -> numpy.ndarray:
        return self.wide

    async def get_view(self) -> memoryview:
        return self.array.data

    async def put(self, state: State) -> int:
        self.got = state
        return len(state)

    async def put_array(self, first: bytes, data: numpy.ndarray, last: memoryview) -> bytes:
        self.got = data
        return first + last

    async def one(self) -> int:
        return 1

    async def count(self, most: int) -> AsyncIterator[int]:
        for at in range(most):
            yield at

    async def sums(self, data: memoryview) -> AsyncIterator[int]:
        yield sum(data[:10])
        yield sum(data[:20])


class Copies:
    """Counts the bytes that are copied, encoded or written in each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, turn: Turn) -> None:
        self.of_turn: Counter[int] = Counter()
        self._turn = turn
        for module in packing, outgoing:
            for name in "of_bytes", "of_array":
                monkeypatch.setattr(module, name, self._counted(getattr(module, name)))
        monkeypatch.setattr(messenger, "encode", lambda message: self.add(encode(message)))
        begins = LongWrites.begin
        monkeypatch.setattr(
            LongWrites,
            "begin",
            lambda writes, transport, parts: begins(writes, Written(self, transport), parts),
        )

    def add(self, data: Any) -> Any:
        self.of_turn[self._turn.number] += len(data)
        return data

    def _counted(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(memory: memoryview, array: Any, piece_bytes: int = 1 << 20) -> Any:
            def step(do: Callable[[], None]) -> None:
                self.of_turn[self._turn.number] += min(piece_bytes, memory.nbytes)
                do()

            return [lambda do=do: step(do) for do in make(memory, array, piece_bytes)]

        return made


class Written:
    """A transport whose long writes are counted."""

    def __init__(self, copies: Copies, transport: Any) -> None:
        self._copies = copies
        self.is_closing = transport.is_closing
        self._write = transport.write

    def write(self, data: Any) -> None:
        self._write(self._copies.add(data))


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(map(numpy.array_equal, one.values(), other.values()))


@pytest.mark.parametrize(
    "name", ["get", "get_made", "get_array", "get_wide", "get_view", "put", "put_array", "put_wide"]
)
async def test_bytes_of_a_turn(net: Net, name: str, monkeypatch: pytest.MonkeyPatch):
    service = Store()
    client, server = await net.pair(service)
    monkeypatch.setattr(gathering, "MOMENT_BYTES", 1 << 20)
    monkeypatch.setattr(paging, "STEP_S", 0)
    async with Turn() as turn:
        copies = Copies(monkeypatch, turn)
        if name == "put":
            assert await client.put(service.state) == len(service.state) and same(service.got, service.state)
        elif name.startswith("put"):
            array = service.array if name == "put_array" else service.wide
            assert await client.put_array(b"first", array, memoryview(b"last")) == b"firstlast"
            assert numpy.array_equal(service.got, array)
        else:
            got = await getattr(client, name)()
            if name == "get_made":
                assert same(got, await service.get_made())
            elif name == "get":
                assert same(got, service.state)
            else:
                assert numpy.array_equal(got, service.wide if name == "get_wide" else service.array)
    assert max(copies.of_turn.values(), default=0) <= MOST
    if net.transport != "rdma":
        assert copies.of_turn.total() >= SIZE // 2
    await idle(server)


async def test_a_result_is_of_one_moment_in_pieces(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Each array that is not longer than MOMENT_BYTES is as it was at one moment."""
    service = Store()
    client, _ = await net.pair(service)
    monkeypatch.setattr(gathering, "MOMENT_BYTES", SIZE // 50)
    monkeypatch.setattr(paging, "STEP_S", 0)
    service.array[:] = 0
    service.state = {str(at): numpy.zeros(SIZE // 50, "u1") for at in range(100)}

    async def change() -> None:
        while True:
            for array in service.state.values():
                array += 1
            await loop_turns(1)

    (changing,) = await begin(change())
    got = await client.get()
    changing.cancel()
    assert len(got) == 100 and all(array.min() == array.max() for array in got.values())


async def test_beside_other_calls(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Messages go in order, whatever is written between the pieces of a long one."""
    monkeypatch.setattr(lending, "LEND_BYTES", 1 << 30)
    service = Store()
    client, server = await net.pair(service)
    calls = []
    for _ in range(3):
        calls += [
            client.get(),
            client.one(),
            client.put(service.state),
            client.one(),
            client.get_array(),
            client.one(),
        ]
    found = await asyncio.gather(*calls)
    for at in range(0, len(found), 6):
        state, *ones, array, last = found[at : at + 6]
        assert same(state, service.state) and numpy.array_equal(array, service.array)
        assert [*ones, last] == [1, len(service.state), 1, 1]
    await idle(server)


async def test_who_is_cancelled_in_the_middle_of_an_argument(net: Net, monkeypatch: pytest.MonkeyPatch):
    """The rest goes as it was: the caller may change its memory."""
    monkeypatch.setattr(lending, "LEND_BYTES", 1 << 30)
    service = Store()
    client, server = await net.pair(service)
    this, there = channel(client).link, callee(server).link
    there.transport.pause_reading()
    array = service.array.repeat(4)
    (call,) = await begin(client.put_array(b"", array, memoryview(b"")))
    await until_seen(lambda: 0 < this._long.nbytes < array.nbytes)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    sent = array.copy()
    array[:] = 0
    there.transport.resume_reading()
    assert await client.one() == 1
    assert service.got is None or numpy.array_equal(service.got, sent)
    await idle(server)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_end_of_a_connection_in_the_middle(net: Net, how: str):
    service = Store()
    client, server = await net.pair(service)
    this, there = channel(client).link, callee(server).link
    this.transport.pause_reading()
    service.array = service.array.repeat(8)
    (call,) = await begin(client.get_array())
    await until_seen(lambda: there._long.nbytes > 0 and there._long.is_full)
    if how == "abort":
        there.abort()
    else:
        there.close()
        assert not there.transport.is_closing()
    this.transport.resume_reading()
    if how == "abort":
        assert (await failure(call)).code is rpc.Code.UNAVAILABLE
    else:
        assert numpy.array_equal(await call, service.array)
    await there.closed
    assert there._long.nbytes == 0


async def test_a_call_without_long_memory(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It goes as any other: one that has a stream, and one whose long argument is lent."""
    service = Store()
    client, server = await net.pair(service)
    began: list[Any] = []
    begins = LongWrites.begin
    monkeypatch.setattr(LongWrites, "begin", lambda *given: (began.append(given), begins(*given)))
    assert [at async for at in client.count(3)] == [0, 1, 2]
    if net.transport == "rdma":
        assert await client.put_array(b"", service.array, memoryview(b"")) == b""
        assert numpy.array_equal(service.got, service.array)
    assert not began
    await idle(server)


async def test_a_stream_that_waits_with_a_long_argument(net: Net):
    """Others begin while its argument is copied or lent, and take its place: then it waits once more."""
    service = Store()
    client, server = await net.pair(service, limits=rpc.Limits(calls=1))
    waiting = rpc.options(client, wait=True)

    async def sums() -> list[int]:
        return [found async for found in waiting.sums(service.array.data)]

    assert await asyncio.gather(*(sums() for _ in range(3))) == [[sum(range(10)), sum(range(20))]] * 3
    await idle(server)


async def test_what_is_copied_counts(net: Net, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lending, "LEND_BYTES", 1 << 30)
    service = Store()
    client, server = await net.pair(service, limits=rpc.Limits(inline_bytes=SIZE - 1))
    for call in (client.get_array(), client.get_view()):
        error = await failure(call)
        assert error.code is rpc.Code.RESOURCE_EXHAUSTED and "the limit inline_bytes is" in error.text
    assert await client.one() == 1
    await idle(server)
    assert callee(server).share.inline_bytes == 0


@pytest.mark.parametrize("transport", ["rdma"])
async def test_what_could_not_be_lent_counts(net: Net):
    """A result that was to be lent when it had to wait, and goes in the message when the loans are used up."""
    client, server = await net.pair(Store(), limits=rpc.Limits(inline_bytes=SIZE - 1))
    there = callee(server).link
    there.turns.pause()
    (call,) = await begin(client.get())
    await until_seen(lambda: len(there.turns._waiting) > 0)
    left, there.loans_left = there.loans_left, 0
    there.turns.resume()
    error = await failure(call)
    assert error.code is rpc.Code.RESOURCE_EXHAUSTED and "the limit inline_bytes is" in error.text
    there.loans_left = left
    await idle(server)


async def test_a_message_that_is_too_long(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It is refused before its memory is copied."""
    monkeypatch.setattr(lending, "LEND_BYTES", 1 << 30)
    monkeypatch.setattr(lending, "LEND_LEAST", 1 << 30)
    copied: list[Any] = []
    gather = outgoing.gather
    monkeypatch.setattr(outgoing, "gather", lambda *given: (copied.append(given), gather(*given))[1])
    service = Store()
    limits = rpc.Limits(message_bytes=SIZE - 1)
    server = await net.serve(service, limits=limits)
    client = await net.connect(Store, server, limits=limits)
    for call in (client.get_array(), client.put_array(b"", service.array, memoryview(b""))):
        error = await failure(call)
        assert error.code is rpc.Code.RESOURCE_EXHAUSTED and "the limit message_bytes is" in error.text
    assert not copied
    assert await client.one() == 1
    await idle(server)


def test_a_message_in_parts():
    memory = memoryview(bytes(range(7)))
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(["<f4", [2, 3]]))
    for whole, apart in (
        (memory, Apart(memory)),
        (Array("<f4", [7], memory), Array("<f4", [7], Apart(memory))),
    ):  # type: ignore[arg-type]
        for arguments in (
            lambda each: (each,),
            lambda each: (1, each, "text", each),
            lambda each: [*range(20), each],
        ):
            for make in (
                lambda given: OutCall(7, 1 << 20, None, given),
                lambda given: OutCallWith(1, 2, 3, given, {"a": b"c"}),
                lambda given: OutCallBringing(1, 2, 3, msgspec.Raw(encode(record)), {}, given[-1]),
                lambda given: OutReply(1 << 31, given[-1]),
            ):
                parts = parts_of(make(arguments(apart)))
                # A long one has the longest form of its length, whatever it is.
                assert msgspec.msgpack.decode(b"".join(parts)) == msgspec.msgpack.decode(
                    encode(make(arguments(whole)))
                )
                assert any(part is memory for part in parts)


class Sink:
    """A transport that takes all, until it is told to be full."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closing = False
        self.full_after = -1

    def write(self, data: memoryview) -> None:
        self.pieces.append(bytes(data))
        if len(self.pieces) == self.full_after:
            self.writes.is_full = True

    def is_closing(self) -> bool:
        return self.closing

    writes: LongWrites


async def test_long_writes():
    ended: list[int] = []
    sink = Sink()
    writes = sink.writes = LongWrites(asyncio.get_running_loop(), lambda: ended.append(len(sink.pieces)))
    data = bytes(range(256)) * (3 * TURN_BYTES // 256)
    writes.begin(sink, [b"head", b"", data])  # type: ignore[arg-type]
    assert TURN_BYTES <= sum(map(len, sink.pieces)) <= TURN_BYTES + PIECE_BYTES and not ended
    writes.write(b"behind")
    writes.begin(sink, [b"another"])  # type: ignore[arg-type]
    sink.full_after = len(sink.pieces) + 2
    await loop_turns(5)
    assert len(sink.pieces) == sink.full_after and not ended
    writes.is_full = False
    writes.go_on()
    while not ended:
        await loop_turns(1)
    assert (
        b"".join(sink.pieces) == b"head" + data + b"behindanother"
        and max(map(len, sink.pieces)) == PIECE_BYTES
    )
    assert ended == [len(sink.pieces)] and writes.nbytes == 0
    writes.begin(sink, [data])  # type: ignore[arg-type]
    sink.closing = True
    await loop_turns(2)
    assert writes.nbytes == 0 and len(ended) == 2


@pytest.mark.parametrize("transport", ["unix"])
async def test_a_unix_socket_takes_more_at_a_time_for_long_messages(net: Net):
    """On the side that sends them."""
    client, server = await net.pair(Store())
    sockets = [side.link.transport.get_extra_info("socket") for side in (channel(client), callee(server))]

    def sizes() -> list[int]:
        return [sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for sock in sockets]

    here, there = sizes()
    assert await client.put({"a": numpy.zeros(9)}) == 1 and sizes() == [here, there]
    assert (await client.get_array()).nbytes == SIZE
    assert sizes()[0] == here and sizes()[1] > there
