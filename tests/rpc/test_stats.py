"""What both sides count of each method."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Journal, Net, callee, idle

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.lending import LEND_BYTES
from tests.support.waiting import begin


class Work(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.server: Any = None

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def fail(self, code: int) -> None:
        raise rpc.Error(Code(code))

    async def wait(self) -> None:
        self.journal("waits")
        await asyncio.Event().wait()

    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def lend(self, data: rpc.Buffer) -> rpc.Buffer:
        return rpc.Buffer(await data.read())

    @rpc.method(idempotent=True)
    async def drop(self) -> None:
        if "drops" not in self.journal.entries:
            self.journal("drops")
            callee(self.server).link.transport.abort()
            await asyncio.Event().wait()

    async def count(self, until: int) -> AsyncIterator[bytes]:
        for _ in range(until):
            yield bytes(1000)

    async def total(self, items: AsyncIterator[bytes]) -> int:
        return sum([len(item) async for item in items])


async def thousands(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(1000)


async def code(call: Any) -> Code:
    with pytest.raises(rpc.Error) as caught:
        await call
    return caught.value.code


async def test_calls_by_how_they_end(net: Net):
    service = Work()
    client, server = await net.pair(service)
    assert set(rpc.stats(client)) == set(server.stats()) == {
        "add", "count", "drop", "fail", "lend", "put", "total", "wait"
    }  # fmt: skip
    for number in range(10):
        assert await client.add(number, 1) == number + 1
    for each in (Code.NOT_FOUND, Code.NOT_FOUND, Code.ABORTED):
        assert await code(client.fail(each)) is each
    (call,) = await begin(client.wait())
    await service.journal.until("waits")
    for stats in (rpc.stats(client), server.stats()):
        assert (stats["wait"].begun, stats["wait"].running, stats["wait"].ended) == (1, 1, {})
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await code(rpc.options(client, timeout=0.1).wait()) is Code.DEADLINE_EXCEEDED
    assert await code(rpc.options(client, timeout=-1).wait()) is Code.DEADLINE_EXCEEDED  # it is not sent
    await idle(server)
    for stats in (rpc.stats(client), server.stats()):
        add, fail, wait = stats["add"], stats["fail"], stats["wait"]
        assert (add.begun, add.running, add.ended) == (10, 0, {"OK": 10})
        assert (fail.begun, fail.ended) == (3, {"NOT_FOUND": 2, "ABORTED": 1})
        assert (wait.begun, wait.running) == (2, 0)
        assert wait.seconds > 0.05 and add.lent_bytes == 0
        assert 20 <= add.received_bytes + add.sent_bytes <= 200
    assert rpc.stats(client)["wait"].ended == {"CANCELLED": 1, "DEADLINE_EXCEEDED": 1}
    assert server.stats()["wait"].ended in (  # it hears of a deadline from its own clock, or from its caller
        {"CANCELLED": 1, "DEADLINE_EXCEEDED": 1},
        {"CANCELLED": 2},
    )


async def test_bytes(net: Net):
    client, server = await net.pair(Work())
    assert await client.put(memoryview(bytes(1000))) == 1000
    assert await client.put(memoryview(bytearray(2 * LEND_BYTES))) == 2 * LEND_BYTES
    async with await client.lend(rpc.Buffer(bytes(LEND_BYTES))) as lent:
        assert lent.nbytes == LEND_BYTES
    await idle(server)
    here, there = rpc.stats(client), server.stats()
    for stats in (here, there):
        lends = net.transport == "rdma"
        assert stats["put"].lent_bytes == 2 * LEND_BYTES * lends
        assert stats["lend"].lent_bytes == 2 * LEND_BYTES * lends
    inline = 1000 if net.transport == "rdma" else 1000 + 2 * LEND_BYTES
    assert inline < there["put"].received_bytes < here["put"].sent_bytes < inline + 100


async def test_streams(net: Net):
    client, server = await net.pair(Work())
    assert len([item async for item in client.count(20)]) == 20
    assert await client.total(thousands(30)) == 30_000
    async for _ in (stream := client.count(1_000_000)):
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await idle(server)
    here, there = rpc.stats(client), server.stats()
    for stats in (here, there):
        assert stats["count"].ended == {"OK": 1, "CANCELLED": 1} and stats["count"].running == 0
        assert stats["total"].ended == {"OK": 1}
    assert here["total"].sent_bytes > 30_000 < there["total"].received_bytes
    assert there["count"].sent_bytes > 20_000 < here["count"].received_bytes


async def test_a_client_with_several_connections(net: Net):
    """They count together, and so does each try."""
    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, retry=rpc.Retry(first_seconds=0.01))
    service.server = server
    assert await client.add(1, 2) == 3
    await client.drop()
    assert await rpc.options(client, metadata={"a": "b"}).add(1, 2) == 3
    stats = rpc.stats(client)
    assert stats["add"].ended == {"OK": 2}
    assert (stats["drop"].begun, stats["drop"].ended) == (2, {"OK": 1, "UNAVAILABLE": 1})
    assert server.stats()["drop"].ended == {"OK": 1, "CANCELLED": 1}


async def test_who_has_no_stats():
    with pytest.raises(TypeError, match="is not a client"):
        rpc.stats(Work())
