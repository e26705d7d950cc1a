"""One connection does not take the loop from the others: how many messages are handled in a turn of it."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Net, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import link, messenger
from rdmanet.rpc.framing import PlainCall, reply_head
from rdmanet.rpc.messages import Cancel, Framer, OutItem, Ping, Release, frame
from tests.support.waiting import loop_turns


class Adder(rpc.Service):
    async def add(self, a: int) -> int:
        return a + 1

    async def put(self, data: memoryview) -> int:
        return data.nbytes


class Turns:
    """Counts, for each turn of the loop, how often something was done in it."""

    def __init__(self) -> None:
        self.most = 0
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._count = 0
        self._handle = self._loop.call_soon(self._turn)

    def done(self) -> None:
        self._count += 1
        self.most = max(self.most, self._count)

    def end(self) -> None:
        self._handle.cancel()


def watched(handlers: Any, kind: str, turns: Turns) -> None:
    """Count the messages of this kind that come to these handlers."""
    (type_,) = (type_ for type_ in handlers if type_.__name__ == kind)
    original = handlers[type_]

    def handler(message: Any) -> None:
        turns.done()
        original(message)

    handlers[type_] = handler


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "control"])
async def test_calls_and_answers_come_in_turns(net: Net, bounded: bool, monkeypatch: pytest.MonkeyPatch):
    """Without the bound, a turn has more of them than a turn may have."""
    if not bounded:
        monkeypatch.setattr(messenger, "TURN_COST", math.inf)
    server = await net.serve(Adder(), limits=rpc.Limits(calls=3000))
    client = await net.connect(Adder, server, limits=rpc.Limits(calls=3000))
    await client.add(0)
    at_server, at_client = Turns(), Turns()
    watched(callee(server).link._handlers, "PlainCall", at_server)
    watched(channel(client).link._handlers, "PlainReply", at_client)
    for _ in range(3):
        assert await asyncio.gather(*map(client.add, range(3000))) == list(range(1, 3001))
    at_server.end()
    at_client.end()
    if bounded:
        assert 2 <= at_server.most <= 64 and at_client.most <= 64
    else:
        assert at_server.most > 200


async def test_calls_of_many_turns_stop_nobody(net: Net, monkeypatch: pytest.MonkeyPatch):
    """They are more than are handled in one turn, but few come in each."""
    client, _ = await net.pair(Adder())
    stopped: list[link.Link] = []
    monkeypatch.setattr(link.Link, "_end_turn", stopped.append)
    for number in range(3 * messenger.TURN_COST):
        assert await client.add(number) == number + 1
    assert not stopped


async def test_a_call_by_itself_costs_no_turn_more(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Nor does its answer. Calls that are made together are still written together."""
    client, server = await net.pair(Adder())
    await client.add(0)
    await loop_turns(3)
    turns: list[link.Link] = []
    turn_ends = link.Link._turn_ends
    monkeypatch.setattr(link.Link, "_turn_ends", lambda this: turns.append(this) or turn_ends(this))
    for number in range(3 * messenger.TURN_COST):
        assert await client.add(number) == number + 1
    assert not turns
    for _ in range(2):
        assert len(await asyncio.gather(*map(client.add, range(30)))) == 30
    assert {channel(client).link, callee(server).link} == set(turns)


@pytest.mark.parametrize("nbytes", [1, 30 << 10])
async def test_answers_at_once(net: Net, nbytes: int, monkeypatch: pytest.MonkeyPatch):
    """By the handler itself, as eager tasks give them: the link goes on in the next turn, and joins the answers."""
    client, server = await net.pair(Adder())
    await client.put(b"")
    here = callee(server).link
    here._handlers[PlainCall] = lambda call: here.send_plain(reply_head(call.number), 7, True)  # type: ignore[index]
    turns: list[link.Link] = []
    turn_ends = link.Link._turn_ends
    monkeypatch.setattr(link.Link, "_turn_ends", lambda this: turns.append(this) or turn_ends(this))
    assert await asyncio.gather(*(client.put(bytes(nbytes)) for _ in range(300))) == [7] * 300
    assert here in turns


async def test_messages_of_many_bytes_count_more(net: Net):
    client, server = await net.pair(Adder())
    await client.add(0)
    turns = Turns()
    watched(callee(server).link._handlers, "PlainCall", turns)
    data = bytes(20 << 10)
    assert await asyncio.gather(*(client.put(data) for _ in range(400))) == [20 << 10] * 400
    turns.end()
    assert turns.most <= 4


class Counting(rpc.Service):
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number


@pytest.mark.parametrize("streams", [1, 30])
async def test_small_items_of_streams_come_in_turns(net: Net, streams: int, monkeypatch: pytest.MonkeyPatch):
    """Though the iterators await nothing, and the client takes whatever comes, and has many streams."""
    turns = Turns()
    send = link.Link.send

    def counted(one: link.Link, message: Any, body: bytes | None = None) -> int:
        if isinstance(message, OutItem):
            turns.done()
        return send(one, message, body)

    monkeypatch.setattr(link.Link, "send", counted)
    server = await net.serve(Counting())
    client = await net.connect(Counting, server, limits=rpc.Limits(stream_bytes=1 << 40))

    async def take(to: int) -> list[int]:
        return [item async for item in client.count(to)]

    to = 3000 // streams
    assert await asyncio.gather(*[take(to) for _ in range(streams)]) == [list(range(to))] * streams
    turns.end()
    assert turns.most <= 64


@pytest.mark.parametrize("turns", [3, 10, 30])
async def test_streams_that_end_early_hold_up_no_others(net: Net, turns: int):
    """Whether they have their turn, wait for it, or let others have theirs."""
    client, server = await net.pair(Counting())

    async def take(to: int) -> int:
        return sum([1 async for _ in client.count(to)])

    tasks = [asyncio.create_task(take(1000)) for _ in range(20)]
    await loop_turns(turns)
    for task in tasks[::2]:
        task.cancel()
    assert await asyncio.gather(*tasks[1::2]) == [1000] * 10
    assert await idle(server) and await take(10) == 10


# ---- A link alone ------------------------------------------------------------------------------------------


class Transport(asyncio.Transport):
    is_paused = False

    def write(self, data: Any) -> None: ...

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


PINGS = b"".join(frame(Ping(number)) for number in range(1000))


def linked(is_server: bool) -> tuple[link.Link, Transport, list[int]]:
    heard: list[int] = []
    one = link.Link(
        asyncio.get_running_loop(),
        rpc.Limits(message_bytes=1 << 20),
        {Ping: lambda ping: heard.append(ping.token)},
        lambda: None,
        lambda error: None,
        is_server,
    )
    transport = Transport()
    one.connection_made(transport)
    return one, transport, heard


@pytest.mark.parametrize("transport", ["tcp"])
class TestALink:
    async def test_it_stops_reading_until_it_has_handled_what_has_come(self, net: Net):
        one, transport, heard = linked(is_server=False)
        one.data_received(PINGS)
        assert len(heard) == 64 and transport.is_paused
        one.data_received(PINGS[:100])  # as a transport may that has some more at hand
        await loop_turns(5)
        assert len(heard) == 6 * 64 and transport.is_paused
        await loop_turns(12)
        assert heard == list(range(1000)) + heard[1000:] and len(heard) > 1000
        assert not transport.is_paused
        one.connection_lost(None)

    async def test_who_sends_little_at_a_time_is_never_stopped(self, net: Net):
        one, transport, heard = linked(is_server=True)
        transport.pause_reading = None  # type: ignore[assignment, method-assign]
        few = b"".join(frame(Ping(number)) for number in range(64))
        for _ in range(10):
            one.data_received(few)
            await loop_turns(1)
        assert len(heard) == 640
        one.connection_lost(None)

    async def test_a_server_that_cannot_write_handles_no_more(self, net: Net):
        one, transport, heard = linked(is_server=True)
        one.data_received(PINGS)
        one.pause_writing()
        await loop_turns(5)
        assert len(heard) == 64 and transport.is_paused
        one.resume_writing()
        await loop_turns(20)
        assert heard == list(range(1000)) and not transport.is_paused
        one.connection_lost(None)

    @pytest.mark.parametrize("is_server", [False, True])
    @pytest.mark.parametrize("how", ["lost", "eof"])
    async def test_the_end_of_a_connection(self, net: Net, how: str, is_server: bool):
        """A client takes the answers that came before; a server begins nothing more."""
        one, _, heard = linked(is_server)
        one.data_received(PINGS)
        if how == "eof":
            one.eof_received()
        one.connection_lost(None)
        await loop_turns(20)
        assert len(heard) == (64 if is_server else 1000)


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("step", [1, 7, 64, 10_000])
async def test_a_budget_loses_nothing(net: Net, step: int):
    messages = [Ping(number) if number % 3 else Release(number) for number in range(200)] + [Cancel(5)]
    stream = b"".join(map(frame, messages))
    framer, found = Framer(1000), []
    for start in range(0, len(stream), step):
        framer.budget = 1 if start % 2 else 0
        found += framer.feed(stream[start : start + step])
    while framer.is_behind:
        framer.budget = 3
        got = framer.feed()
        assert len(got) <= 3
        found += got
    assert found == messages
