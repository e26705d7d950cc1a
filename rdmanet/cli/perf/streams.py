"""Both sides of a measurement of streams: over RDMA, TCP and Unix sockets, with the traffic of workloads.py.

The client connects twice: for the warm-up, and for the measurement, whose messages the server counts from the first
byte to the end. The times go into a histogram, so a long run needs no more memory than a short one.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from rdmanet._core import Histogram
from rdmanet.base.pause import pause
from rdmanet.cli.fabrics import FABRICS, Fabric, forget
from rdmanet.cli.perf.conditions import Usage
from rdmanet.cli.perf.control import Address, Control, Done, Go, Run, Stop, host_of
from rdmanet.cli.perf.kinds import KINDS, Kind
from rdmanet.cli.perf.progress import Progress
from rdmanet.cli.perf.results import Result, Sample, latency_of, note_conditions
from rdmanet.cli.workloads import (
    BufferedEcho,
    BufferedPinger,
    BufferedSink,
    Echo,
    Flooder,
    Pinger,
    Report,
    Sink,
    StreamFlooder,
    StreamPinger,
    run_client,
    stream_echo,
    stream_sink,
)

SAMPLE_S = 0.1
ENDLESS_S = 86400.0
LATEST_S = 30.0
"""So long after its time a run is given up."""


def own_address(control: Control) -> str:
    """Where the client has found this host: it will find its listeners there, too."""
    return host_of(control.sock.getsockname())


def their_address(control: Control, where: list[Any]) -> list[Any]:
    """Of a listener there. The host is that of the control connection, by which the server was found."""
    if len(where) != 2:
        return where
    return [host_of(control.sock.getpeername()), where[1]]


# ---- The server ----------------------------------------------------------------------------------------------


async def serve(control: Control, run: Run) -> None:
    """Answer one Run: listen until the client says Stop."""
    kind = KINDS[run.kind]
    fabric = FABRICS[kind.over](host=own_address(control))
    server, address = await _listen(fabric, kind, run)
    try:
        control.send(Address(address))
        control.send(Go())
        began, usage = time.perf_counter(), Usage()
        await heard(control)
        control.receive(Go)
        await heard(control)
        control.receive(Stop)
        spent = usage.since()
        control.send(
            Done(time.perf_counter() - began, spent.cpu_s, preempted=spent.preempted, slept=spent.slept)
        )
    finally:
        server.close()
        forget(address)
        await server.wait_closed()


async def _listen(fabric: Fabric, kind: Kind, run: Run) -> tuple[Any, list[Any]]:
    if run.settings.api == "streams":
        return await fabric.listen_streams(stream_echo(run.size) if kind.latency else stream_sink)
    buffered = run.settings.api == "buffered"
    if kind.latency:
        return await fabric.listen(BufferedEcho if buffered else Echo)
    return await fabric.listen(BufferedSink if buffered else Sink)


async def heard(control: Control) -> None:
    """Wait until the other side says something, or has gone, while the loop turns."""
    loop = asyncio.get_running_loop()
    if control.heard():
        return
    said = asyncio.Event()
    loop.add_reader(control.fileno(), said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(control.fileno())


# ---- The client ----------------------------------------------------------------------------------------------


async def measure(control: Control, run: Run, progress: Progress) -> Result:
    """Run one test with one size."""
    kind, settings = KINDS[run.kind], run.settings
    fabric = FABRICS[kind.over]()
    control.send(run)
    address = their_address(control, control.receive(Address).where)
    control.receive(Go)
    control.send(Go())
    try:
        if settings.warm_up_s:
            await _drive(fabric, _client(kind, run, settings.warm_up_s, None), address)
        found = Histogram()
        seconds = ENDLESS_S if settings.iterations else settings.seconds
        client = _client(kind, run, seconds, found)
        sampler = Sampler(run, progress, lambda: found.count if kind.latency else client.sent)
        usage = Usage()
        interrupted = False
        sampling = asyncio.ensure_future(sampler.run())
        try:
            report, interrupted = await _until_over(_drive(fabric, client, address), client, seconds)
        finally:
            sampling.cancel()
        spent = usage.since()
    finally:
        control.send(Stop())
    done = control.receive(Done)
    if kind.latency:
        messages, took = found.count, found.mean_ns * found.count / 1e9
    else:
        messages, took = report.received // run.size, report.seconds
    took = max(took, 1e-9)
    result = outcome(run, messages, took, client.cpu_s, report.cpu_s)
    result.latency = latency_of(found) if kind.latency else None
    result.samples = sampler.samples
    rates = [sample.messages * run.size / sample.seconds / 1e9 for sample in sampler.samples]
    if not kind.latency:
        result.min_gb_per_s, result.peak_gb_per_s = min(rates, default=None), max(rates, default=None)
    result.interrupted = interrupted
    note_conditions(result, spent, done)
    return result


def _client(kind: Kind, run: Run, seconds: float, found: Any) -> Any:
    most: float = run.settings.iterations or math.inf
    api = run.settings.api
    if kind.latency:
        times = Histogram() if found is None else found
        make = {"streams": StreamPinger, "buffered": BufferedPinger, "protocol": Pinger}[api]

        def stamp(now: float) -> None:
            times.lap(now)
            if times.count >= most:
                pinger.deadline_s = 0.0

        pinger = make(run.size, seconds, stamp=times.lap if most == math.inf else stamp)
        return pinger
    return (StreamFlooder if api == "streams" else Flooder)(run.size, seconds, most=most)


async def _drive(fabric: Fabric, client: Any, address: list[Any]) -> Report:
    if isinstance(client, StreamFlooder | StreamPinger):
        reader, writer = await fabric.open_streams(address)
        return await client.run(reader, writer)
    return await run_client(fabric.connect, client, address)


async def _until_over(running: Any, client: Any, seconds: float) -> tuple[Report, bool]:
    """The report, and whether Ctrl-C ended it: then the client ends its run now, and what it has is measured."""
    task = asyncio.ensure_future(running)
    interrupted = False
    try:
        await asyncio.wait({task}, timeout=seconds + LATEST_S)
    except asyncio.CancelledError:
        client.deadline_s, client.most = 0.0, 0
        interrupted = True
        await asyncio.wait({task}, timeout=LATEST_S)
    if not task.done():
        task.cancel()
    return await task, interrupted


class Sampler:
    """Looks at a run, ten times a second."""

    def __init__(self, run: Run, progress: Progress, done: Callable[[], int]) -> None:
        self._run, self._progress, self._done = run, progress, done
        self.samples: list[Sample] = []

    async def run(self) -> None:
        began = last = time.perf_counter()
        before = 0
        while True:
            await pause(asyncio.get_running_loop(), SAMPLE_S)
            now, count = time.perf_counter(), self._done()
            self.samples.append(Sample(now - began, count - before, now - last))
            self._progress.update(now - began, count, count * self._run.size / (now - began))
            before, last = count, now


def outcome(run: Run, messages: int, seconds: float, client_cpu_s: float, server_cpu_s: float) -> Result:
    """A Result of the numbers that all runs have."""
    each, gb = max(messages, 1), max(messages * run.size / 1e9, 1e-12)
    return Result(
        test=run.kind,
        size=run.size,
        messages=messages,
        seconds=seconds,
        messages_per_s=messages / seconds,
        gb_per_s=messages * run.size / seconds / 1e9,
        client_cpu_us=client_cpu_s / each * 1e6,
        server_cpu_us=server_cpu_s / each * 1e6,
        client_cpu_s_per_gb=client_cpu_s / gb,
        server_cpu_s_per_gb=server_cpu_s / gb,
    )
