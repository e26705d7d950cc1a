"""Which calls are under way, and what each does or waits for: Server.explain(), rpc.explain() and `rdmanet ss`."""

import asyncio
import math
import os
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import json
from net import Journal, Net, channel

from rdmanet import rpc
from rdmanet.base.call_accounts import CALLS_MOST
from rdmanet.cli import ss
from rdmanet.rpc import Limits
from tests.support.waiting import begin, until_seen


class Listener(rpc.Service):
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def told(self, text: str) -> None:
        await self.gate.wait()  # told waits here


class Work(rpc.Service):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.thread_gate = threading.Event()
        self.journal = Journal()

    async def wait(self) -> None:
        self.journal("waits")
        await self.gate.wait()  # wait waits here

    async def cling(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self.gate.wait()  # cling waits here

    async def tell(self, listener: Listener) -> None:
        await listener.told("x")  # tell waits here

    async def many(self) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)

    async def make(self, count: int) -> memoryview:
        return memoryview(bytearray(count))

    @rpc.method(thread=True)
    def compute(self) -> None:
        self.thread_gate.wait()  # compute is here


def line_of(words: str) -> str:
    """How the line is named that ends with these words."""
    with open(__file__) as file:
        [number] = [number for number, line in enumerate(file, 1) if line.endswith(f"  # {words}\n")]
    return f"test_explaining.py:{number}"


async def said_by_ss() -> str:
    """What `rdmanet ss` says of this process."""
    picture = ss.Picture()
    processes = await asyncio.to_thread(picture.take, os.getpid())
    assert json.decode(b"".join(ss._as_json(picture, processes)))
    return ss._as_text(picture, processes)


async def test_the_line_at_which_a_method_waits(net: Net):
    client, server = await net.pair(work := Work())
    assert server.explain().startswith("serving Work at ") and "0 calls under way" in server.explain()
    (call,) = await begin(client.wait())
    await work.journal.until("waits")
    assert re.search(
        rf"1 calls under way\n  Work\.wait for .*s: waits at {line_of('wait waits here')} \(Work\.wait\)\n"
        "  note: 1 clients",
        server.explain(),
    )
    assert re.search(
        r"^calling Work at .*: 1 calls under way\n  Work\.wait for .*: sent to ", rpc.explain(client)
    )
    work.gate.set()
    await call
    assert "0 calls under way" in rpc.explain(client) and "0 calls under way" in server.explain()


async def test_a_method_that_is_cancelled_and_goes_on(net: Net):
    client, server = await net.pair(work := Work())
    (call,) = await begin(client.cling())
    await until_seen(lambda: "Event.wait" in server.explain() or "cling" in server.explain())
    call.cancel()
    words = f"is cancelled, and waits at {line_of('cling waits here')} (Work.cling)"
    await until_seen(lambda: words in server.explain())
    work.gate.set()


async def test_methods_in_threads_and_those_that_wait_for_one(net: Net):
    with ThreadPoolExecutor(1) as executor:
        client, server = await net.pair(work := Work(), executor=executor)
        calls = await begin(client.compute(), client.compute())
        where = f"in a thread at {line_of('compute is here')} (Work.compute)"
        # The thread's innermost frame may be threading's own.
        await until_seen(lambda: "waits for a thread of the executor" in server.explain())
        assert "note: 1 calls wait for a thread of the executor" in server.explain()
        await until_seen(lambda: where in server.explain())
        work.thread_gate.set()
        await asyncio.gather(*calls)
        assert "0 calls under way" in server.explain() and "a thread" not in server.explain()


async def test_a_thread_that_goes_on_when_its_caller_has_the_answer(net: Net):
    client, server = await net.pair(work := Work())
    (call,) = await begin(client.compute())
    await until_seen(lambda: "in a thread at" in server.explain())
    call.cancel()
    await until_seen(lambda: "its caller has its answer, and a thread goes on" in server.explain())
    work.thread_gate.set()
    await until_seen(lambda: not server.running)


async def test_callbacks(net: Net):
    client, server = await net.pair(Work())
    (call,) = await begin(client.tell(listener := Listener()))
    words = f"callback Listener.told for .*: waits at {line_of('told waits here')}"
    await until_seen(lambda: re.search(words, rpc.explain(client)))
    assert re.search(rf"Work\.tell for .*: waits at {line_of('tell waits here')}", server.explain())
    listener.gate.set()
    await call
    assert "callback Listener" not in rpc.explain(client)


async def test_a_stream_that_nobody_reads(net: Net):
    client, server = await net.pair(Work())
    items: Any = client.many()
    await anext(items)
    await until_seen(lambda: "its stream waits: the caller takes no more items" in server.explain())
    await items.aclose()


async def test_no_more_calls_may_be_made(net: Net):
    server = await net.serve(work := Work())
    client = await net.connect(Work, server, limits=Limits(calls=2))
    calls = await begin(*(client.wait() for _ in range(2)))
    await work.journal.until("waits", 2)
    assert re.search("note: 2 calls of .* have not ended, and no more may be made", rpc.explain(client))
    work.gate.set()
    await asyncio.gather(*calls)


async def test_the_longest_are_named(net: Net):
    client, server = await net.pair(work := Work())
    calls = await begin(*(client.wait() for _ in range(CALLS_MOST + 3)))
    await work.journal.until("waits", CALLS_MOST + 3)
    for text in (server.explain(), rpc.explain(client)):
        assert f"{CALLS_MOST + 3} calls under way" in text and "\n  and 3 more" in text
        assert text.count("Work.wait for") == CALLS_MOST
    work.gate.set()
    await asyncio.gather(*calls)


class Clock:
    """A loop whose time stands still."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def of_two(net: Net) -> tuple[Any, list[rpc.Server]]:
    servers = [await net.serve(Work()) for _ in range(2)]
    places = [net.address(server)[0] if net.is_by_name else net.address(server) for server in servers]
    retry, transport = rpc.Retry(), net.transport
    return rpc.connect(Work, places, transport=transport, policy="spread", retry=retry), servers


async def test_a_server_that_is_ejected(net: Net):
    connecting, _ = await of_two(net)
    async with connecting as client:
        pool: Any = channel(client)
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        pool.loop = Clock(pool.loop)
        for _ in range(5):
            pool._slots[1].blame(pool.loop.time(), rpc.Retry())
        words = "note: .* is ejected: 5 calls in a row have failed there; it gets calls again in 1.0 s"
        assert re.search(words, rpc.explain(client))
        for _ in range(5):
            pool._slots[0].blame(pool.loop.time(), rpc.Retry())
        assert "2 of 2 servers fail, and get calls all the same" in rpc.explain(client)


async def test_a_server_that_is_ejected_for_ever(net: Net):
    connecting, _ = await of_two(net)
    async with connecting as client:
        pool: Any = channel(client)
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        how = rpc.Retry(eject_failures=1, eject_seconds=math.inf, eject_most_seconds=math.inf)
        pool._slots[1].blame(pool.loop.time(), how)
        assert "failed there; it gets calls again never" in rpc.explain(client)


async def test_a_server_that_is_not_there(net: Net):
    connecting, (_, gone) = await of_two(net)
    async with connecting as client:
        pool: Any = channel(client)
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        gone.close()
        await gone.wait_closed()
        words = r"note: no connection to .*: \d+ tries; the next in"
        await until_seen(lambda: re.search(words, rpc.explain(client)))
    assert rpc.explain(client) == "the client is closed, or its connection is over"


async def test_calls_that_wait_for_a_connection(net: Net):
    server = await net.serve(Work())
    where = net.address(server)
    server.close()
    await server.wait_closed()
    async with rpc.connect(Work, *where, transport=net.transport, lazy=True) as client:
        (call,) = await begin(client.make(1))
        await until_seen(
            lambda: re.search("note: 1 calls wait for a connection: there is no", rpc.explain(client))
        )
        call.cancel()


async def test_a_server_that_takes_no_new_calls(net: Net):
    client, server = await net.pair(work := Work())
    (call,) = await begin(client.wait())
    await work.journal.until("waits")
    (drain,) = await begin(server.drain())
    assert "note: it takes no new calls: it is shutting down" in server.explain()
    await until_seen(lambda: "the server takes no new calls (it is shutting down)" in rpc.explain(client))
    work.gate.set()
    await asyncio.gather(call, drain)


async def test_what_is_no_client():
    with pytest.raises(TypeError, match="is not a client of rdmanet.rpc.connect"):
        rpc.explain(Work())


async def test_ss_says_the_same_of_a_process(net: Net):
    """Over transports that `rdmanet ss` sees: of others it would say nothing."""
    if net.transport != "rdma":
        return
    client, server = await net.pair(work := Work())
    (call,) = await begin(client.wait())
    await work.journal.until("waits")
    text = await said_by_ss()
    for words in (
        r"^  serving Work at .*: 1 calls under way$",
        rf"^    Work\.wait for .*: waits at {line_of('wait waits here')} \(Work\.wait\)$",
        r"^  calling Work at .*: 1 calls under way$",
        r"^    Work\.wait for .*: sent to ",
        r"^    note: 1 clients$",
    ):
        assert len(re.findall(words, text, re.MULTILINE)) == 1, words
    work.gate.set()
    await call
