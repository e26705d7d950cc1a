"""Methods that call another server: what goes on from one call to the other, and what does not."""

import asyncio
from typing import Any

from net import Net, callee, channel
from test_unary import Example, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from tests.support.waiting import begin, until_seen


class Middle(rpc.Service):
    def __init__(self, behind: Example) -> None:
        self.behind = behind
        self.gate = asyncio.Event()
        self.goes_on: asyncio.Task[Any] | None = None

    async def fail(self, how: str) -> None:
        await self.behind.fail(how)

    async def add(self) -> int:
        return await self.behind.add(1)

    async def begin(self) -> float | None:
        async def work() -> tuple[Any, ...]:
            at_first = rpc.deadline(), rpc.peer()
            await self.gate.wait()
            return at_first, (rpc.deadline(), rpc.peer()), await self.behind.deadline()

        (self.goes_on,) = await begin(work())
        return rpc.deadline()

    async def deadline(self) -> float | None:
        return await self.behind.deadline()

    async def shorter(self) -> float | None:
        return await rpc.options(self.behind, timeout=5).deadline()

    async def longer(self) -> float | None:
        return await rpc.options(self.behind, timeout=500).deadline()


async def test_nested_calls_inherit_the_deadline(net: Net):
    client, _ = await net.pair(Middle((await net.pair(Example()))[0]))
    client = rpc.options(client, timeout=50)
    assert 5 < (await client.deadline() or 0) <= 50
    assert 0 < (await client.shorter() or 0) <= 5
    assert 5 < (await client.longer() or 0) <= 50


async def test_a_task_that_outlives_its_call_has_no_deadline(net: Net):
    service = Middle((await net.pair(Example()))[0])
    client, _ = await net.pair(service)
    deadline = await rpc.options(client, timeout=50).begin()
    assert service.goes_on is not None
    service.gate.set()
    at_first, later, behind = await service.goes_on
    assert at_first[0] == deadline is not None and at_first[1] is not None
    assert later == (None, None) and behind is None


async def test_errors_of_another_server_are_passed_on_without_its_traceback(net: Net):
    behind, behind_server = await net.pair(Example(), send_tracebacks=True)
    assert "secret" in ((await failure(behind.fail("word"))).traceback or "")
    client, _ = await net.pair(Middle(behind))
    error = await failure(client.fail("word"))
    assert (error.code, error.text, error.traceback) == (Code.INTERNAL, "the service failed", None)
    open_client, _ = await net.pair(Middle(behind), send_tracebacks=True)
    assert "secret" in ((await failure(open_client.fail("word"))).traceback or "")
    callee(behind_server).drain("away")  # the client behind does not send a call any more
    await until_seen(lambda: channel(behind).refusal)
    assert (
        await failure(behind.add(1))
    ).text == "the server takes no new calls (away); this call was not sent"
    error = await failure(client.add())  # which was sent
    assert (error.code, error.text) == (Code.UNAVAILABLE, "the server takes no new calls (away)")
