"""Tasks that are cancelled before their first step, as all tasks are at the end of a loop: each says its last word."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Net, channel, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.messages import OutCall, frame
from tests.support.waiting import until_seen


class Counting(rpc.Service):
    def __init__(self) -> None:
        self.begun = 0

    async def add(self, a: int) -> int:
        self.begun += 1
        return a + 1

    async def count(self, to: int) -> AsyncIterator[int]:
        self.begun += 1
        for number in range(to):
            yield number

    async def total(self, numbers: AsyncIterator[int]) -> int:
        self.begun += 1
        return sum([number async for number in numbers])

    @rpc.method(outlives_connection=True)
    async def outlive(self) -> None:
        self.begun += 1


async def numbers() -> AsyncIterator[int]:
    yield 1


class Cancelling:
    """A factory of tasks: those of coroutines of this name are cancelled before they begin."""

    def __init__(self, name: str) -> None:
        self.cancelled = 0
        self._name = name

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        if work.__qualname__ == self._name:
            self.cancelled += 1
            task.cancel()
        return task


async def test_a_method_that_is_cancelled_before_it_begins(net: Net):
    service = Counting()
    client, server = await net.pair(service)
    loop, factory = asyncio.get_running_loop(), Cancelling("Executing._run")
    assert await client.add(1) == 2
    loop.set_task_factory(factory)
    try:
        assert (await failure(client.add(1))).code is Code.CANCELLED
        assert (await failure(client.total(numbers()))).code is Code.CANCELLED
        assert (await failure(client.outlive())).code is Code.CANCELLED
        with pytest.raises(rpc.Error, match="cancelled"):
            async for _ in client.count(3):
                pass
    finally:
        loop.set_task_factory(None)
    assert factory.cancelled == 4 and service.begun == 1
    assert not server.running and server.shares.calls == 0
    server.close()
    await server.wait_closed()


async def test_a_stream_that_is_cancelled_before_it_begins(net: Net):
    client, _ = await net.pair(Counting())
    loop, factory = asyncio.get_running_loop(), Cancelling("pump")
    loop.set_task_factory(factory)
    try:
        error = await failure(client.total(numbers()))
    finally:
        loop.set_task_factory(None)
    assert error.code is Code.CANCELLED and factory.cancelled == 1
    assert await client.total(numbers()) == 1


async def test_a_connecting_that_is_cancelled_before_it_begins(net: Net):
    server = await net.serve(Counting())
    client = await net.connect(Counting, server, retry=rpc.Retry())
    assert await client.add(1) == 2
    (slot,) = channel(client)._slots  # type: ignore[attr-defined]
    slot.channel.link.abort()
    await slot.channel.link.closed
    loop, factory = asyncio.get_running_loop(), Cancelling("Pool._connect")
    loop.set_task_factory(factory)
    calling = asyncio.create_task(client.add(1))
    try:
        await until_seen(lambda: factory.cancelled)
    finally:
        loop.set_task_factory(None)
    assert await calling == 2


@pytest.mark.parametrize("has_factory", [True, False], ids=["factory", "at once"])
@pytest.mark.parametrize("transport", ["tcp"])
def test_a_loop_that_ends_with_calls_that_have_not_begun(transport: str, has_factory: bool):
    """asyncio.run() cancels them with everything else, and returns. Without a factory of tasks they begin at once."""
    left: list[rpc.Server] = []
    service = Counting()

    async def serving(ready: asyncio.Future[Any]) -> None:
        async with await rpc.serve(service, "127.0.0.1", 0, transport=transport) as server:
            left.append(server)
            ready.set_result(server.sockets[0].getsockname()[:2])
            await server.serve_forever()

    async def calling(address: Any, called: asyncio.Future[None]) -> None:
        async with rpc.connect(Counting, *address, transport=transport) as client:
            assert await client.add(1) == 2
            called.set_result(None)
            await asyncio.Event().wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        if has_factory:
            loop.set_task_factory(lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))
        ready, called = loop.create_future(), loop.create_future()
        tasks = [asyncio.create_task(serving(ready))]
        tasks.append(asyncio.create_task(calling(await ready, called)))
        await called
        (found,) = left[0].callees
        call = frame(OutCall(77, Counting.__rpc_schema__.methods["add"].number, None, [1]))
        this = asyncio.current_task()
        assert this is not None and not any(task.done() for task in tasks)
        this.add_done_callback(lambda _: found.link.data_received(call))  # in the last turn of the loop

    asyncio.run(main())
    assert service.begun == (1 if has_factory else 2)
    assert not left[0].running and left[0].shares.calls == 0
