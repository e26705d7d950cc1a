"""rdmanet.metrics(): what Prometheus reads, and what it may rely on."""

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from harness import Net, Recorder
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import rdmanet
from tests.support.waiting import until_seen

MUCH = 8 << 20
"""More than a connection takes in that its program does not read."""

DASHBOARD = Path(__file__).parents[2] / "examples/grafana.json"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def samples() -> Samples:
    return samples_of(text_string_to_metric_families(rdmanet.metrics()))


def total(name: str, found: Samples | None = None, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, now or then."""
    found = samples() if found is None else found
    return sum(
        number for (each, of), number in found.items() if each == name and labels.items() <= dict(of).items()
    )


def gone_back(before: Samples) -> dict[Any, float]:
    """The counters that are smaller than they were."""
    now = samples()
    counters = {key: was for key, was in before.items() if key[0].endswith("_total")}
    return {key: now.get(key, -1) for key, was in counters.items() if now.get(key, -1) < was}


async def test_both_formats_say_the_same(net: Net):
    client, server = await net.pair()
    client.transport.write(b"hello")
    await server.until_received(5)
    text = rdmanet.metrics()
    strict = list(openmetrics_parser.text_string_to_metric_families(rdmanet.metrics(openmetrics=True)))
    found = samples_of(strict)
    assert found.keys() == samples().keys() and len(found) > 40
    for family in strict:  # which the parser of OpenMetrics has made of names, HELP and TYPE
        assert family.name.startswith("rdmanet_") and family.documentation.endswith(".")
        assert family.type == ("histogram" if "stretch" in family.name else family.type) != "unknown"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n" in text


async def test_a_collector_for_prometheus_client(net: Net):
    client, server = await net.pair()
    client.transport.write(b"hello")
    await server.until_received(5)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(rdmanet.MetricsCollector())
    found = samples_of(text_string_to_metric_families(generate_latest(registry).decode()))
    assert found.keys() == samples().keys()
    assert (
        registry.get_sample_value("rdmanet_connections", {"fabric": "tcp", "device": "", "side": "client"})
        == 0
    )


async def test_counters_are_the_sums_of_the_connections_and_stay_when_they_end(net: Net):
    before = samples()
    client, server = await net.pair()
    device = client.transport.get_extra_info("rdma_device")
    client.transport.write(b"a few bytes")
    await server.until_received(11)
    server.transport.write(bytes(100_000))
    await client.until_received(100_000)

    def more(name: str, side: str) -> float:
        of = {"fabric": "rdma", "device": device, "side": side}
        return total(name, **of) - total(name, before, **of)

    await until_seen(lambda: not server.transport.get_extra_info("rdma_stats")["sends_in_flight"])
    for side, end in (("client", client), ("server", server)):
        stats = end.transport.get_extra_info("rdma_stats")
        assert more("rdmanet_connections", side) == more("rdmanet_connections_opened_total", side) == 1
        assert more("rdmanet_sent_bytes_total", side) == stats["bytes_sent"]
        assert more("rdmanet_received_bytes_total", side) == stats["bytes_received"]
        assert more("rdmanet_sent_frames_total", side) == stats["frames_sent"]
        assert more("rdmanet_registered_bytes", side) == stats["bytes_registered"] > 0
    lived = samples()
    client.transport.close()
    await server.until_lost()
    await until_seen(lambda: not rdmanet.connections())
    assert not gone_back(lived)
    for side, sent in (("client", 11), ("server", 100_000)):
        assert more("rdmanet_connections", side) == more("rdmanet_registered_bytes", side) == 0
        assert more("rdmanet_connections_opened_total", side) == 1
        assert more("rdmanet_sent_bytes_total", side) == sent


async def test_more_connections_are_no_more_samples(net: Net):
    await net.pair()
    few = samples().keys()
    for _ in range(3):
        await net.pair()
    assert samples().keys() == few
    labels = {name for metric, of in few if "_rpc_" not in metric for name, _ in of}
    assert labels == {"fabric", "device", "side", "for", "le"}


class Busy(Recorder):
    """Its callback computes."""

    def data_received(self, data: bytes) -> None:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        super().data_received(data)


async def test_stretches_of_a_loops_work(net: Net):
    name = "rdmanet_loop_stretch_seconds"

    def longer(found: Samples, seconds: float) -> float:
        """How many took longer."""
        below = {
            float(dict(of)["le"]): count for (each, of), count in found.items() if each == f"{name}_bucket"
        }
        return below[float("inf")] - max((count for le, count in below.items() if le <= seconds), default=0)

    client, server = await net.pair(server=Busy)
    before = samples()
    client.transport.write(b"hello")
    await server.until_received(5)
    await until_seen(lambda: longer(samples(), 0.04) > longer(before, 0.04))
    now = samples()
    assert total(f"{name}_sum", now) - total(f"{name}_sum", before) >= 0.05
    assert total(f"{name}_count", now) == longer(now, 0)


async def test_who_waits(net: Net):
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(bytes(MUCH))
    await client.until(lambda: client.writing_paused)
    await until_seen(lambda: total("rdmanet_connections_waiting", **{"side": "client", "for": "peer"}) == 1)
    await until_seen(lambda: total("rdmanet_connections_waiting", **{"side": "server", "for": "reader"}) == 1)
    assert (
        total("rdmanet_unsent_bytes", side="client") > 0 < total("rdmanet_receive_slots_held", side="server")
    )
    lacking = total("rdmanet_without_credits_seconds_total", side="client")
    await until_seen(lambda: total("rdmanet_without_credits_seconds_total", side="client") > lacking)
    assert total("rdmanet_waits_for_credits_total", side="client") > 0
    server.transport.resume_reading()
    await server.until_received(MUCH)
    await until_seen(lambda: not total("rdmanet_connections_waiting") + total("rdmanet_unsent_bytes"))


async def test_another_thread_sees_no_counter_go_back(net: Net):
    """Connections end in one thread while another asks again and again."""
    backward: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        before = samples()
        while not done.is_set():
            backward.extend(gone_back(before))
            before = samples()

    other = threading.Thread(target=ask)
    other.start()
    try:
        for _ in range(20):
            client, server = await net.pair()
            client.transport.write(bytes(1000))
            await server.until_received(1000)
            client.transport.close()
            await server.until_lost()
    finally:
        done.set()
        await until_seen(lambda: not other.is_alive())
        other.join()
    assert not backward


async def test_a_forked_child_begins_anew(net: Net):
    client, server = await net.pair()
    client.transport.write(b"hello")
    await server.until_received(5)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, rdmanet.metrics().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        found = samples_of(text_string_to_metric_families(pipe.read()))
    assert os.waitpid(child, 0)[1] == 0
    assert found and not any(found.values())


@pytest.mark.once
def test_the_dashboard_asks_for_what_there_is():
    board = json.loads(DASHBOARD.read_text())
    known = {family.name: family.type for family in rdmanet.MetricsCollector().collect()}
    known = {f"{name}_total" if kind == "counter" else name: kind for name, kind in known.items()}
    known |= {f"{name}_bucket": "counter" for name, kind in known.items() if kind == "histogram"}
    asked = set[str]()
    for panel in board["panels"]:
        for target in panel["targets"]:
            expr = target["expr"]
            names = set(re.findall(r"rdmanet_\w+", expr))
            rates = set(re.findall(r"rate\((rdmanet_\w+)\{[^}]*\}\[\$__rate_interval\]\)", expr))
            assert rates == {name for name in names if known.get(name) == "counter"}, expr
            assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}") == len(
                re.findall(r'rdmanet_\w+\{job=~"\$job",instance=~"\$instance"\}', expr)
            ), expr
            asked |= names
    assert "rdmanet_loop_stretch_seconds_bucket" in asked <= known.keys()
    assert {name for name in known if name.startswith("rdmanet_rpc_")} - asked == {"rdmanet_rpc_begun_total"}
    x_y = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len({panel["id"] for panel in board["panels"]}) == len(set(x_y)) == len(x_y)
