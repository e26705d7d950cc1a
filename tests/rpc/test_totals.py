"""What rdmanet.metrics() says of calls: of all servers and clients together, and also when these are gone."""

import asyncio
import gc
import os
from collections.abc import Iterable

import pytest
from net import Journal, Net, idle
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import rdmanet
from rdmanet import rpc
from rdmanet.rpc import totals
from rdmanet.rpc.schema import schema_of
from rdmanet.rpc.stats import Counter
from tests.support.waiting import begin

Found = dict[tuple[str, ...], float]


class Counted(rpc.Service):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.journal = Journal()

    async def get(self, size: int) -> bytes:
        return bytes(size)

    async def wait(self) -> None:
        self.journal("waits")
        await self.gate.wait()

    async def fail(self) -> None:
        raise rpc.Error(rpc.Code.NOT_FOUND, "there is none")


def found(families: Iterable[Metric] | None = None) -> Found:
    """The numbers of the calls of that service, by metric, side, method and code."""
    families = text_string_to_metric_families(rdmanet.metrics()) if families is None else families
    return {
        (
            sample.name,
            *(sample.labels[name] for name in ("side", "method", "code") if name in sample.labels),
        ): (sample.value)
        for family in families
        for sample in family.samples
        if sample.labels.get("service") == "Counted"
    }


def grown(before: Found, *key: str) -> float:
    return found().get(key, 0) - before.get(key, 0)


async def use(net: Net) -> None:
    """Three calls, of which one fails."""
    client, server = await net.pair(Counted())
    await client.get(1000)
    await client.get(1)
    with pytest.raises(rpc.Error):
        await client.fail()
    await idle(server)


async def test_calls_are_counted_at_either_side(net: Net):
    before = found()
    await use(net)
    for side in ("client", "server"):
        assert grown(before, "rdmanet_rpc_begun_total", side, "get") == 2
        assert grown(before, "rdmanet_rpc_ended_total", side, "get", "OK") == 2
        assert grown(before, "rdmanet_rpc_ended_total", side, "fail", "NOT_FOUND") == 1
        assert grown(before, "rdmanet_rpc_running", side, "get") == 0
    assert grown(before, "rdmanet_rpc_received_bytes_total", "client", "get") >= 1000
    assert grown(before, "rdmanet_rpc_sent_bytes_total", "server", "get") >= 1000
    strict = openmetrics_parser.text_string_to_metric_families(rdmanet.metrics(openmetrics=True))
    assert found(strict).keys() == found().keys()


async def test_calls_that_run(net: Net):
    client, server = await net.pair(service := Counted())
    before = found()
    (call,) = await begin(client.wait())
    await service.journal.until("waits")
    assert grown(before, "rdmanet_rpc_running", "client", "wait") == 1
    assert grown(before, "rdmanet_rpc_running", "server", "wait") == 1
    service.gate.set()
    await call
    await idle(server)
    assert grown(before, "rdmanet_rpc_running", "client", "wait") == 0


async def test_what_was_counted_stays(net: Net):
    """When the server and the client are gone, the counters do not go back."""
    await use(net)
    before = found()
    await net.aclose()
    net._servers.clear()
    net._stack = type(net._stack)()
    gc.collect()
    now = found()
    assert {key: now.get(key) for key in before if key[0].endswith("_total")} == {
        key: number for key, number in before.items() if key[0].endswith("_total")
    }


class Owner:
    """A client, to who counts."""

    def __init__(self, counter: Counter) -> None:
        self.loop = asyncio.new_event_loop()
        schema = schema_of(Counted)
        totals.keep(self, "client", [(schema, [counter] + [Counter() for _ in schema.numbered[1:]])])


def test_calls_that_end_after_their_client_was_dropped():
    before, counter = found(), Counter()
    counter.begun = 1
    owner = Owner(counter)
    loop = owner.loop
    del owner
    method = schema_of(Counted).numbered[0].name
    assert grown(before, "rdmanet_rpc_running", "client", method) == 1
    counter.ok = 1
    for _ in range(2):
        assert grown(before, "rdmanet_rpc_ended_total", "client", method, "OK") == 1
        assert grown(before, "rdmanet_rpc_running", "client", method) == 0
    loop.close()


@pytest.mark.parametrize("how", ["is closed", "is gone"])
def test_calls_whose_loop_has_ended_are_not_kept(how):
    gc.collect()  # else what earlier tests have left may go meanwhile
    before, counter, kept = found(), Counter(), len(totals._kept)
    counter.begun = 1
    owner = Owner(counter)
    loop = owner.loop
    del owner
    totals.sums()
    assert len(totals._kept) == kept + 1
    loop.close()
    if how == "is gone":
        del loop
    method = schema_of(Counted).numbered[0].name
    assert grown(before, "rdmanet_rpc_begun_total", "client", method) == 1
    assert grown(before, "rdmanet_rpc_running", "client", method) == 0
    assert len(totals._kept) == kept


async def test_many_that_are_gone_are_not_kept(net: Net, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(totals, "_kept", [])  # without what earlier tests have left
    monkeypatch.setattr(totals, "_many", 1000)  # there were more at one time
    before, server = found(), await net.serve(Counted())
    for _ in range(2 * totals._FEW + 2):
        async with net.connecting(Counted, server) as client:
            await client.get(1)
        del client
    gc.collect()
    async with net.connecting(Counted, server):
        assert len(totals._kept) <= 2 * totals._FEW
    assert grown(before, "rdmanet_rpc_begun_total", "client", "get") == 2 * totals._FEW + 2


async def test_names_are_escaped(net: Net):
    class Odd(rpc.Service, name='a"b\\c\nd'):
        async def get(self) -> None: ...

    client, _ = await net.pair(Odd())
    await client.get()
    families = text_string_to_metric_families(rdmanet.metrics())
    services = {sample.labels.get("service") for family in families for sample in family.samples}
    assert 'a"b\\c\nd' in services


def test_a_forked_child_expects_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "_many", 1000)  # what its parent had
    if (child := os.fork()) == 0:
        os._exit(totals._many != totals._FEW)
    assert os.waitpid(child, 0)[1] == 0
