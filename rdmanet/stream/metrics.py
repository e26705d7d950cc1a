"""What this process does with its connections, as metrics: `metrics()`, and `MetricsCollector` for prometheus_client.

Theory
------
A monitoring system asks a process for its counters and gauges every some seconds, and computes rates from the
difference. So a counter must not go back while the process lives. `stream_totals` (_core) has the sums of all
connections by RDMA, also of those that have ended; connections by TCP are counted when they are made, and their bytes
are not, since the kernel forgets them with the connection.

Each combination of labels is kept by the monitoring system for weeks. So there is a label for the device, the side and
the fabric, and none for a connection or a peer: `rdmanet ss` shows single connections.

Nothing is computed before somebody asks, and then in C, for each connection some additions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rdmanet._core import STREAM_STRETCH_NS, stream_totals
from rdmanet.base import watching

if TYPE_CHECKING:
    from prometheus_client import Metric

Labels = dict[str, str]
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n"}


class _About(NamedTuple):
    """What is said of a metric; a counter's name ends in _total, as Prometheus wants it."""

    name: str
    help: str

    @property
    def kind(self) -> str:
        return "histogram" if self is _STRETCHES else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def family(self) -> str:
        """Its name to OpenMetrics and to prometheus_client."""
        return self.name.removesuffix("_total")


class _Found(NamedTuple):
    """A metric and its samples.

    :ivar ends: of a histogram: what the names of samples have at their ends
    """

    about: _About
    samples: Sequence[tuple[Labels, float]]
    ends: Sequence[str] = ()

    def named(self) -> Iterator[tuple[str, Labels, float]]:
        """The samples, with their names."""
        for number, sample in enumerate(self.samples):
            yield (self.about.name + self.ends[number] if self.ends else self.about.name, *sample)


_CONNECTIONS = _About("rdmanet_connections", "Connections that live.")
_OPENED = _About("rdmanet_connections_opened_total", "Connections that were established.")
_WAITING = _About(
    "rdmanet_connections_waiting",
    "Connections on which bytes wait: for the peer's program to read, the peer's device to acknowledge, or this "
    "program to read.",
)
_SUMS = {
    "bytes_sent": _About("rdmanet_sent_bytes_total", "Bytes sent by RDMA."),
    "bytes_received": _About("rdmanet_received_bytes_total", "Bytes received by RDMA."),
    "bytes_borrowed": _About(
        "rdmanet_sent_borrowed_bytes_total", "Bytes sent that were read from where the program has them."
    ),
    "bytes_placed": _About(
        "rdmanet_sent_placed_bytes_total", "Bytes sent that were written to memory which the peer's read named."
    ),
    "frames_sent": _About("rdmanet_sent_frames_total", "Frames with bytes that were sent."),
    "frames_received": _About("rdmanet_received_frames_total", "Frames with bytes that were received."),
    "control_frames_sent": _About("rdmanet_sent_control_frames_total", "Frames without bytes that were sent."),
    "waits_for_credits": _About("rdmanet_waits_for_credits_total", "How often bytes had to wait for a credit."),
    "ns_without_credits": _About(
        "rdmanet_without_credits_seconds_total", "For how long bytes have waited for credits, over all connections."
    ),
    "bytes_unsent": _About("rdmanet_unsent_bytes", "Bytes that were written and wait to be sent."),
    "bytes_registered": _About("rdmanet_registered_bytes", "Registered memory that connections have of their own."),
    "sends_in_flight": _About("rdmanet_frames_in_flight", "Frames that the device has not completed."),
    "slots_held": _About("rdmanet_receive_slots_held", "Receive slots with bytes that wait for the program."),
}  # fmt: skip
"""What `stream_totals` knows of each side."""
_WAITS = {"wait_for_peer": "peer", "wait_for_device": "device", "wait_for_reader": "reader"}
_ENGINES = {
    "engines": _About("rdmanet_loops", "Event loops that use the device."),
    "passes": _About("rdmanet_loop_passes_total", "Looks of event loops for completions."),
    "polls": _About("rdmanet_loop_polls_total", "Polls of completion queues."),
    "sleeps": _About("rdmanet_loop_sleeps_total", "How often event loops went to sleep on the device."),
    "wakeups": _About("rdmanet_loop_wakeups_total", "How often the device woke an event loop."),
    "messages": _About("rdmanet_loop_messages_total", "Completions that somebody waited for."),
    "ns_asleep": _About("rdmanet_loop_asleep_seconds_total", "For how long event loops slept on the device."),
    "ns_polling": _About(
        "rdmanet_loop_polling_seconds_total",
        "For how long event loops polled the device and had nothing to do.",
    ),
}
_STRETCHES = _About(
    "rdmanet_loop_stretch_seconds",
    "Stretches of 16 us or more for which event loops did something else than to look for messages.",
)
_HALF_OPEN = _About(
    "rdmanet_server_half_open_connections", "Connections that servers have accepted and that are being made."
)
_REQUESTS = _About("rdmanet_server_waiting_requests", "Requests that wait until fewer are being made.")

_CALLS = {
    "begun": _About("rdmanet_rpc_begun_total", "Calls of rdmanet.rpc that were sent, or taken."),
    "running": _About("rdmanet_rpc_running", "Calls that have not ended."),
    "seconds": _About("rdmanet_rpc_seconds_total", "For how long the calls ran that have ended."),
    "sent_bytes": _About("rdmanet_rpc_sent_bytes_total", "Bytes of messages sent for calls."),
    "received_bytes": _About("rdmanet_rpc_received_bytes_total", "Bytes of messages received for calls."),
    "lent_bytes": _About("rdmanet_rpc_lent_bytes_total", "Bytes of arguments and results by reference."),
}
_ENDED = _About("rdmanet_rpc_ended_total", "Calls that have ended, with OK or the name of a code.")


def metrics(openmetrics: bool = False) -> str:
    """What this process does with its connections, in Prometheus' text format: what a handler of ``/metrics`` answers.

    It may be called in any thread. docs/howto/watch.md lists the metrics.

    :param openmetrics: as OpenMetrics 1.0 (``application/openmetrics-text; version=1.0.0; charset=utf-8``), and not as
        Prometheus' own format (``text/plain; version=0.0.4``)
    """
    lines = []
    for found in _found():
        about = found.about
        family = about.family if openmetrics else about.name
        lines.append(f"# HELP {family} {about.help}")
        lines.append(f"# TYPE {family} {about.kind}")
        lines += [f"{name}{_label_text(labels)} {number}" for name, labels, number in found.named()]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


class MetricsCollector:
    """The same for prometheus_client: ``prometheus_client.REGISTRY.register(rdmanet.MetricsCollector())``."""

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now; what a registry calls."""
        from prometheus_client import Metric

        for found in _found():
            metric = Metric(found.about.family, found.about.help, found.about.kind)
            for name, labels, number in found.named():
                metric.add_sample(name, labels, number)
            yield metric


def _found() -> Iterator[_Found]:
    totals = stream_totals()
    sides = [
        ({"fabric": "rdma", "device": device, "side": side}, sums[side])
        for device, sums in sorted(totals.items())
        for side in ("client", "server")
    ]
    opened, live = watching.tcp_connections()
    by_tcp = [{"fabric": "tcp", "device": "", "side": side} for side in ("client", "server")]
    yield _Found(
        _CONNECTIONS,
        [(labels, sums["connections"]) for labels, sums in sides]
        + [(labels, live[labels["side"]]) for labels in by_tcp],
    )
    yield _Found(
        _OPENED,
        [(labels, sums["opened"]) for labels, sums in sides]
        + [(labels, opened[labels["side"]]) for labels in by_tcp],
    )
    yield _Found(
        _WAITING,
        [({**labels, "for": who}, sums[name]) for labels, sums in sides for name, who in _WAITS.items()],
    )
    for name, about in _SUMS.items():
        yield _Found(about, [(labels, _number(sums, name)) for labels, sums in sides])
    for name, about in _ENGINES.items():
        yield _Found(
            about,
            [({"device": device}, _number(sums["engines"], name)) for device, sums in sorted(totals.items())],
        )
    yield _stretches({device: sums["engines"]["worked"] for device, sums in sorted(totals.items())})
    servers = [info for info in watching.servers() if info.fabric == "rdma"]
    yield _Found(_HALF_OPEN, [({}, sum(info.half_open for info in servers))])
    yield _Found(_REQUESTS, [({}, sum(info.waiting for info in servers))])
    calls = [
        ({"side": side, "service": service, "method": method}, sums)
        for (side, service, method), sums in sorted(watching.call_sums().items())
    ]
    for name, about in _CALLS.items():
        yield _Found(about, [(labels, sums.numbers[name]) for labels, sums in calls])
    yield _Found(
        _ENDED,
        [({**labels, "code": code}, count) for labels, sums in calls for code, count in sums.ended.items()],
    )


def _stretches(worked: dict[str, Any]) -> _Found:
    """For how long loops did not look, as a histogram for each device."""
    samples, ends = list[tuple[Labels, float]](), list[str]()
    for device, counts in worked.items():
        below = 0
        for number, count in enumerate(counts["cells"][:-1]):
            below += count
            samples.append(({"device": device, "le": repr(STREAM_STRETCH_NS * 2**number / 1e9)}, below))
        count = below + counts["cells"][-1]
        samples += [({"device": device, "le": "+Inf"}, count)]
        samples += [({"device": device}, counts["ns"] / 1e9), ({"device": device}, count)]
        ends += ["_bucket"] * len(counts["cells"]) + ["_sum", "_count"]
    return _Found(_STRETCHES, samples, ends)


def _number(sums: dict[str, int], name: str) -> float:
    """A sum in its metric's unit: Prometheus wants seconds."""
    return sums[name] / 1e9 if name.startswith("ns_") else sums[name]


def _label_text(labels: Labels) -> str:
    """Labels as the formats write them. Their values are names of ours, of devices, and of services of the program."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"
