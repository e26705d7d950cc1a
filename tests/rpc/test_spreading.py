"""Which of several servers gets a call with policy="spread", and mistakes that no other try to connect mends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Net, callee, failure

from rdmanet import rpc
from rdmanet.rpc import Code, endpoints
from rdmanet.rpc.pool import Pool
from tests.support.waiting import until_seen

QUICK = rpc.Retry(first_seconds=0.001, most_seconds=0.002)


class Worker(rpc.Service):
    def __init__(self, code: Code | None = None) -> None:
        self.code = code
        self.calls = 0

    async def work(self) -> None:
        self.calls += 1
        if self.code is not None:
            raise rpc.Error(self.code, "as it was told")

    async def steps(self, count: int) -> AsyncIterator[int]:
        self.calls += 1
        for number in range(count):
            yield number


@contextlib.asynccontextmanager
async def spread(
    net: Net, *services: Worker, **options: Any
) -> AsyncIterator[tuple[Worker, list[rpc.Server]]]:
    """A client that is connected to all of them."""
    servers = [await net.serve(service) for service in services]
    addresses = [found if len(found) > 1 else found[0] for found in map(net.address, servers)]
    async with rpc.connect(Worker, addresses, transport=net.transport, policy="spread", **options) as client:
        pool: Pool = client._caller  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        yield client, servers


async def test_calls_one_after_the_other_go_to_all(net: Net):
    services = [Worker() for _ in range(3)]
    async with spread(net, *services) as (client, _):
        for _ in range(120):
            await client.work()
    assert min(service.calls for service in services) > 10


@pytest.mark.parametrize("at_a_time", [1, 6])
@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
async def test_a_server_that_fails_at_once_gets_few_calls(net: Net, code: Code, at_a_time: int):
    bad, *good = services = [Worker(code), Worker(), Worker()]
    async with spread(net, *services) as (client, _):
        for _ in range(300 // at_a_time):
            await asyncio.gather(*(client.work() for _ in range(at_a_time)), return_exceptions=True)
        assert bad.calls < 60 and min(service.calls for service in good) > 60
        pool: Pool = client._caller  # type: ignore[attr-defined]
        slot = pool._slots[0]
        assert slot.blamed(pool.loop.time()) > 0
        assert slot.blamed(pool.loop.time() + 60) == 0  # it is forgotten


async def test_an_error_of_the_call_is_not_the_servers_fault(net: Net):
    services = [Worker(Code.NOT_FOUND), Worker()]
    async with spread(net, *services) as (client, _):
        for _ in range(60):
            with contextlib.suppress(rpc.Error):
                await client.work()
    assert min(service.calls for service in services) > 5


@pytest.mark.parametrize("options", [{}, {"retry": QUICK}], ids=["", "retry"])
async def test_a_call_that_was_not_taken_goes_to_another_server(net: Net, options: dict[str, Any]):
    services = [Worker() for _ in range(3)]
    async with spread(net, *services, **options) as (client, servers):
        partings = [callee(server)._parting for server in servers]
        for parting in partings[:2]:
            parting.refusal = "no more"  # and nobody has told the client
        for _ in range(30):
            await client.work()
            assert [number async for number in client.steps(2)] == [0, 1]
        assert [service.calls for service in services] == [0, 0, 60]
        partings[2].refusal = "no more"
        for error in (await failure(client.work()), await failure(anext(client.steps(1)))):  # type: ignore[arg-type]
            assert error.code is Code.UNAVAILABLE and not error.begun
        for parting in partings:
            parting.refusal = None


@pytest.mark.parametrize("options", [{}, {"retry": QUICK}, {"policy": "spread"}], ids=["", "retry", "spread"])
@pytest.mark.parametrize("error", [TypeError("a mistake"), asyncio.CancelledError("not by us")])
async def test_a_mistake_is_raised_at_once(
    net: Net, options: dict[str, Any], error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    server = await net.serve(Worker())
    tries = 0

    async def connect(*_: Any) -> None:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr(endpoints, "connect", connect)
    with pytest.raises(type(error)) as caught:
        await net.connecting(Worker, server, **options).__aenter__()
    assert caught.value.args == error.args and tries == 1


async def test_an_option_that_does_not_exist(net: Net):
    server = await net.serve(Worker())
    with pytest.raises(TypeError, match="no_such_option"):
        await net.connecting(Worker, server, retry=QUICK, no_such_option=1).__aenter__()


async def test_a_mistake_when_connecting_again_ends_the_call(net: Net, monkeypatch: pytest.MonkeyPatch):
    server = await net.serve(Worker())
    async with net.connecting(Worker, server, retry=QUICK) as client:
        (callee,) = server.callees
        callee.link.transport.abort()
        await client._caller._slots[0].channel.link.closed

        async def connect(*_: Any) -> None:
            raise ValueError("no such certificate")

        monkeypatch.setattr(endpoints, "connect", connect)
        error = await failure(client.work())
        assert error.code is Code.INTERNAL and not error.begun
        assert "ValueError: no such certificate" in error.text
