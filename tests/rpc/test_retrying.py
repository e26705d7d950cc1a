"""Calls that are made again after certain errors, and calls that wait at the limit of unfinished ones."""

import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Journal, Net, channel, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.reads import Reads
from rdmanet.rpc.retry import Retry
from tests.support.waiting import begin, loop_turns, until_seen

AGAIN = Retry(first_seconds=0.001, most_seconds=0.002, attempts=4, codes=[Code.ABORTED, Code.UNAVAILABLE])
SLOW = Retry(first_seconds=3600, most_seconds=3600, codes=[Code.ABORTED], methods=["unmarked"])


class Flaky(rpc.Service):
    """Fails so many times."""

    def __init__(self, failures: int = 0, code: Code = Code.ABORTED, name: str = "") -> None:
        self.failures = failures
        self.code = code
        self.name = name
        self.journal = Journal()
        self.gate = asyncio.Event()

    def _fail(self, what: str) -> None:
        self.journal(what)
        if self.journal.entries.count(what) <= self.failures:
            raise rpc.Error(self.code, "not now", details=what)

    @rpc.method(idempotent=True)
    async def marked(self) -> str:
        self._fail("marked")
        return self.name

    async def unmarked(self) -> str:
        self._fail("unmarked")
        return self.name

    @rpc.method(idempotent=True)
    async def items(self, before: int) -> AsyncIterator[int]:
        for number in range(before):
            yield number
        self._fail("items")
        yield -1

    @rpc.method(idempotent=True)
    async def total(self, numbers: AsyncIterator[int], takes: bool) -> int:
        found = [number async for number in numbers] if takes else []
        self._fail("total")
        return sum(found)

    async def wait(self, number: int) -> int:
        self.journal(f"wait {number}")
        await self.gate.wait()
        return number

    async def sized(self, data: memoryview) -> int:
        return data.nbytes

    @rpc.method(idempotent=True)
    async def lent(self, nbytes: int) -> memoryview:
        self.journal("lent")
        return memoryview(bytearray(nbytes))

    async def count(self, until: int) -> AsyncIterator[int]:
        self.journal("count")
        await self.gate.wait()
        for number in range(until):
            yield number


def pool(client: rpc.Service) -> Pool:
    return client._caller  # type: ignore[attr-defined, no-any-return]


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


# ---- Again, after certain errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [Code.ABORTED, Code.UNAVAILABLE])
async def test_again_until_it_succeeds(net: Net, code: Code):
    service = Flaky(3, code, "a")
    server = await net.serve(service)
    client = await net.connect(Flaky, server, retry=AGAIN)
    assert await client.marked() == "a"
    assert service.journal.entries == ["marked"] * 4
    assert rpc.stats(client)["marked"].ended == {code.name: 3, "OK": 1}
    assert len(server.callees) == 1, "its connection lives"


async def test_giving_up_after_so_many(net: Net):
    service = Flaky(4)
    client = await net.connect(Flaky, await net.serve(service), retry=AGAIN)
    error = await failure(client.marked())
    assert (error.code, error.text, error.details) == (Code.ABORTED, "not now", "marked")
    assert service.journal.entries == ["marked"] * 4


@pytest.mark.parametrize(
    ("code", "retry"),
    [(Code.NOT_FOUND, AGAIN), (Code.ABORTED, Retry()), (Code.UNAVAILABLE, Retry(methods=["marked"]))],
)
async def test_not_after_other_errors(net: Net, code: Code, retry: Retry):
    service = Flaky(1, code)
    client = await net.connect(Flaky, await net.serve(service), retry=retry)
    assert (await failure(client.marked())).code is code
    assert service.journal.entries == ["marked"]


async def test_only_methods_that_are_idempotent(net: Net):
    """Because they are marked, or because the client says so."""
    service = Flaky(2)
    server = await net.serve(service)
    client = await net.connect(Flaky, server, retry=AGAIN)
    assert (await failure(client.unmarked())).code is Code.ABORTED
    assert service.journal.entries == ["unmarked"]
    named = Retry(first_seconds=0.001, codes={Code.ABORTED}, methods=("unmarked",))
    other = await net.connect(Flaky, server, retry=named)
    assert await other.unmarked() == ""
    assert service.journal.entries == ["unmarked"] * 3


async def test_streams(net: Net):
    """As long as nothing was given, or taken, as it is when a connection is lost."""
    service = Flaky(1)
    client = await net.connect(Flaky, await net.serve(service), retry=AGAIN)
    assert [number async for number in client.items(0)] == [-1]
    service.journal.entries.clear()
    items = client.items(2)
    assert [await anext(items), await anext(items)] == [0, 1]  # type: ignore[call-overload]
    assert (await failure(anext(items))).code is Code.ABORTED  # type: ignore[call-overload]
    assert service.journal.entries == ["items"]
    assert (await failure(client.total(numbers(), takes=True))).code is Code.ABORTED
    assert service.journal.entries == ["items", "total"]


async def test_calls_that_have_not_begun(net: Net):
    """What the server has refused is asked for again, whatever the method is."""
    service = Flaky()
    server = await net.serve(service, limits=rpc.Limits(server_calls=1))
    first = await net.connect(Flaky, server)
    retry = Retry(first_seconds=0.001, most_seconds=0.01, attempts=None, codes=[Code.RESOURCE_EXHAUSTED])
    second = await net.connect(Flaky, server, retry=retry)
    calls = await begin(first.wait(1), *(second.wait(number) for number in range(2, 5)))
    await service.journal.until("wait 1")
    await until_seen(lambda: rpc.stats(second)["wait"].ended.get("RESOURCE_EXHAUSTED", 0) >= 3)
    service.gate.set()
    assert await asyncio.gather(*calls) == [1, 2, 3, 4]
    assert sorted(service.journal.entries) == ["wait 1", "wait 2", "wait 3", "wait 4"]


async def test_another_server_is_tried(net: Net):
    services = [Flaky(1 << 30, name="a"), Flaky(name="b")]
    servers = [await net.serve(service) for service in services]
    where: list[Any] = [net.address(server) for server in servers]
    addresses = [each[0] for each in where] if net.is_by_name else where
    async with rpc.connect(Flaky, addresses, transport=net.transport, policy="spread", retry=AGAIN) as client:
        await until_seen(lambda: all(slot.usable for slot in pool(client)._slots))
        assert [await client.marked() for _ in range(10)] == ["b"] * 10


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_wait_that_is_longer_than_the_deadline(net: Net):
    """The error is told at once."""
    service = Flaky(1)
    client = await net.connect(Flaky, await net.serve(service), retry=SLOW, timeout=600)
    assert (await failure(client.marked())).code is Code.ABORTED


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("name", ["marked", "unmarked"])
async def test_the_end_of_a_wait(net: Net, name: str):
    """By cancelling it, and by closing the client."""
    service = Flaky(10)
    server = await net.serve(service)
    async with net.connecting(Flaky, server, retry=SLOW) as client:
        calls = await begin(getattr(client, name)(), getattr(client, name)())
        await service.journal.until(name, 2)
        await until_seen(lambda: rpc.stats(client)[name].ended.get("ABORTED") == 2)  # both wait
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert not calls[1].done()
    error = await failure(calls[1])
    assert error.code is Code.CANCELLED and "the client was closed" in error.text


@pytest.mark.parametrize("transport", ["tcp"])
async def test_what_is_no_retry(net: Net):
    for wrong in (
        {"codes": [14]},
        {"codes": "UNAVAILABLE"},
        {"methods": "marked"},
        {"methods": [Code.ABORTED]},
    ):
        with pytest.raises(TypeError, match="Retry: (codes|methods)=.* is no collection of (Code|str)"):
            Retry(**wrong)  # type: ignore[arg-type]
    server = await net.serve(Flaky())
    with pytest.raises(ValueError, match="Flaky has no method 'markd'"):
        await net.connecting(Flaky, server, retry=Retry(methods=["marked", "markd"]))


# ---- At the limit of unfinished calls --------------------------------------------------------------------------

FEW = rpc.Limits(calls=4)


@pytest.mark.parametrize("at", ["client", "server"])
async def test_calls_wait_in_their_order(net: Net, at: str):
    service = Flaky()
    now = most = 0

    async def wait(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        service.journal(f"wait {number}")
        await loop_turns(number % 3)
        now -= 1
        return number

    service.wait = wait  # type: ignore[method-assign]
    server = await net.serve(service, **({"limits": FEW} if at == "server" else {}))
    client = await net.connect(Flaky, server, wait=True, **({"limits": FEW} if at == "client" else {}))
    assert await asyncio.gather(*(client.wait(number) for number in range(100))) == list(range(100))
    assert 1 < most <= 4 and service.journal.entries == [f"wait {number}" for number in range(100)]
    assert not channel(client)._places.busy


async def test_others_fail(net: Net):
    """Those that do not wait; also if there are some that do."""
    service = Flaky()
    client = await net.connect(Flaky, await net.serve(service, limits=FEW))
    waiting = rpc.options(client, wait=True)
    calls = await begin(*(waiting.wait(number) for number in range(6)))
    error = await failure(client.wait(6))
    assert error.code is Code.RESOURCE_EXHAUSTED and not error.begun
    assert (await failure(rpc.options(waiting, wait=False).wait(6))).code is Code.RESOURCE_EXHAUSTED
    service.gate.set()
    assert await asyncio.gather(*calls) == list(range(6))


async def test_streams_wait(net: Net):
    service = Flaky()
    client = await net.connect(Flaky, await net.serve(service, limits=FEW), wait=True)

    async def all_of(until: int) -> list[int]:
        return [number async for number in client.count(until)]

    calls = await begin(*(all_of(2) for _ in range(10)))
    await service.journal.until("count", 4)
    await loop_turns(5)
    assert service.journal.entries == ["count"] * 4
    service.gate.set()
    assert await asyncio.gather(*calls) == [[0, 1]] * 10


async def test_who_gives_up_waiting(net: Net):
    service = Flaky()
    client = await net.connect(Flaky, await net.serve(service, limits=FEW), wait=True)
    calls = await begin(*(client.wait(number) for number in range(10)))
    error = await failure(rpc.options(client, timeout=0.01).wait(11))
    assert error.code is Code.DEADLINE_EXCEEDED and not error.begun
    await service.journal.until("wait 3")
    for call in calls[::2]:
        call.cancel()
    service.gate.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert done[1::2] == [1, 3, 5, 7, 9] and all(
        isinstance(each, asyncio.CancelledError) for each in done[::2]
    )
    assert not any(f"wait {number}" in service.journal.entries for number in (6, 8, 11))
    assert await client.wait(12) == 12


@pytest.mark.parametrize("how", ["lost", "closed", "drained"])
async def test_the_end_of_the_connection(net: Net, how: str):
    service = Flaky()
    server = await net.serve(service, limits=FEW)
    async with net.connecting(Flaky, server, wait=True) as client:
        calls = await begin(*(client.wait(number) for number in range(6)))
        await service.journal.until("wait 3")
        if how == "lost":
            channel(client).link.transport.abort()
        elif how == "closed":
            await client.aclose()
        else:
            (draining,) = await begin(server.drain())
        for call in calls[4:]:
            error = await failure(call)
            assert error.code is (Code.CANCELLED if how == "closed" else Code.UNAVAILABLE) and not error.begun
        if how == "drained":
            service.gate.set()
            assert await asyncio.gather(*calls[:4]) == list(range(4))
            await draining
        else:
            assert not any(
                [(await failure(call)).code not in (Code.CANCELLED, Code.UNAVAILABLE) for call in calls[:4]]
            )


@pytest.mark.parametrize("transport", ["rdma"])
async def test_who_waits_lends_nothing(net: Net):
    service = Flaky()
    client = await net.connect(Flaky, await net.serve(service, limits=FEW), wait=True)
    calls = await begin(*(client.wait(number) for number in range(4)))
    link = channel(client).link
    before = link.loans_left
    data = bytes(range(256)) * (1 << 13)
    (sized,) = await begin(client.sized(data))
    await service.journal.until("wait 3")
    assert link.loans_left == before
    service.gate.set()
    assert await sized == len(data)
    await asyncio.gather(*calls)


@pytest.mark.parametrize("transport", ["rdma"])
@pytest.mark.parametrize("policy", ["first", "spread"])
async def test_a_server_that_dies_while_its_result_is_read(
    net: Net, policy: Any, monkeypatch: pytest.MonkeyPatch
):
    """The READ fails first, and its task goes on before the client is told that the connection is lost."""
    service = Flaky()
    client = await net.connect(
        Flaky, await net.serve(service), retry=Retry(first_seconds=0.001), policy=policy
    )
    read = Reads.read
    failures = iter([ConnectionResetError(errno.ECONNRESET, "transport retries exceeded")])

    async def fails(self: Reads, *arguments: Any) -> None:
        if (error := next(failures, None)) is not None:
            self._link.transport.abort()  # type: ignore[attr-defined]
            raise error
        await read(self, *arguments)

    monkeypatch.setattr(Reads, "read", fails)
    assert await client.lent(3_000_000) == bytes(3_000_000)
    assert service.journal.entries == ["lent", "lent"]
