"""Both sides of a measurement of streams: over RDMA, TCP and Unix sockets, with the traffic of workloads.py.

The client connects twice: for the warm-up, and for the measurement, whose messages the server counts from the first
byte to the end. The times go into a histogram, so a long run needs no more memory than a short one.

"rr" is latency's traffic with several messages under way, on one or several connections: how many answers come in a
second. With `first` each message of a latency test has a connection of its own, and its time is from connecting to the
answer.
"""

import asyncio
import contextlib
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
from rdmanet.cli.perf.paced import PacedBufferedPinger, PacedPinger, PacedStreamPinger, Schedule
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
CLOSE_S = 5.0
"""How long the server waits for the client to close its connections."""


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
    fabric = _fabric(kind, run, host=own_address(control))
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
        await closed(server)


def _fabric(kind: Kind, run: Run, **options: Any) -> Fabric:
    """Sockets always sleep; RDMA does so if it does not poll."""
    if run.settings.events and kind.over == "rdmanet":
        options["busy_poll"] = 0
    return FABRICS[kind.over](**options)


async def _listen(fabric: Fabric, kind: Kind, run: Run) -> tuple[Any, list[Any]]:
    echoes = kind.measures != "bw"
    if run.settings.api == "streams":
        return await fabric.listen_streams(stream_echo(run.size) if echoes else stream_sink)
    buffered = run.settings.api == "buffered"
    if echoes:
        return await fabric.listen(BufferedEcho if buffered else Echo)
    return await fabric.listen(BufferedSink if buffered else Sink)


async def heard(control: Control) -> None:
    """Wait until the other side says something, or has gone, while the loop turns.

    :raises PerfError: Control.end_after() is over
    """
    loop = asyncio.get_running_loop()
    if control.heard():
        return
    said = asyncio.Event()
    loop.add_reader(control.fileno(), said.set)
    try:
        async with asyncio.timeout(control.left_s()):
            await said.wait()
    except TimeoutError:
        control.left_s()
        raise
    finally:
        loop.remove_reader(control.fileno())


async def closed(server: Any) -> None:
    """Wait until the connections have ended. A client can keep its own: those end with the loop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await server.wait_closed()


# ---- The client ----------------------------------------------------------------------------------------------


async def measure(control: Control, run: Run, progress: Progress) -> Result:
    """Run one test with one size."""
    kind, settings = KINDS[run.kind], run.settings
    fabric = _fabric(kind, run)
    control.send(run)
    address = their_address(control, control.receive(Address).where)
    control.receive(Go)
    control.send(Go())
    try:
        if settings.warm_up_s:
            warming = _Traffic(fabric, kind, run, address, settings.warm_up_s, 0)
            await warming.run()
        seconds = ENDLESS_S if settings.iterations else settings.seconds
        traffic = _Traffic(fabric, kind, run, address, seconds, settings.iterations)
        sampler = Sampler(run, progress, traffic.messages)
        usage = Usage()
        interrupted = False
        sampling = asyncio.create_task(sampler.run(), name="sample")
        try:
            interrupted = await _until_over(traffic, seconds)
        finally:
            sampling.cancel()
        spent = usage.since()
    except Exception:
        control.raise_failure()
        raise
    finally:
        control.send(Stop())
    done = control.receive(Done)
    server_cpu_s = done.cpu_s / max(done.seconds, 1e-9) * traffic.took_s()
    if not settings.first:  # the reports do not tell what connecting takes, but have nothing of the warm-up
        server_cpu_s = max(report.cpu_s for report in traffic.reports)
    result = outcome(run, traffic.received(), traffic.took_s(), traffic.cpu_s, server_cpu_s)
    result.latency = latency_of(traffic.times[0]) if kind.latency else None
    result.samples = sampler.samples
    rates = [sample.messages * run.size / sample.seconds / 1e9 for sample in sampler.samples]
    if kind.measures == "bw":
        result.min_gb_per_s, result.peak_gb_per_s = min(rates, default=None), max(rates, default=None)
    result.interrupted = interrupted
    note_conditions(result, spent, done)
    return result


class _Traffic:
    """The client's side of one run, from connecting to the reports of the server.

    :ivar times: of latency and "rr": a histogram for each connection; with `first` one for all
    :ivar clients: those of workloads.py, one for each connection
    """

    def __init__(
        self, fabric: Fabric, kind: Kind, run: Run, address: list[Any], seconds: float, most: int
    ) -> None:
        self.fabric, self.kind, self.asked, self.address = fabric, kind, run, address
        self.seconds, self.most = seconds, most or math.inf
        self.times = [Histogram() for _ in range(run.settings.connections)]
        self.first_s = self.first_cpu_s = 0.0
        self.over = False
        self.reports: list[Report] = []
        self.clients: list[Any] = []
        if not run.settings.first:
            self.clients = [self._client(times) for times in self.times]

    # ---- What comes of it ----

    def messages(self) -> int:
        if self.kind.measures == "bw":
            return int(self.clients[0].sent)
        return sum(int(times.count) for times in self.times)

    def received(self) -> int:
        """How many have arrived."""
        return self.reports[0].received // self.asked.size if self.kind.measures == "bw" else self.messages()

    def took_s(self) -> float:
        if self.asked.settings.first:
            took = self.first_s
        elif self.kind.measures == "bw" or self.asked.settings.rate:
            took = self.reports[0].seconds
        else:  # laps: one begins where the last one ended
            took = max(times.mean_ns * times.count for times in self.times) / 1e9
        return max(took, 1e-9)

    @property
    def cpu_s(self) -> float:
        """Each connection has seen the CPU time of its whole process while it lived: the longest is that of all."""
        return self.first_cpu_s or max(float(client.cpu_s) for client in self.clients)

    # ---- The run ----

    def end(self) -> None:
        """Now, with what is under way."""
        self.over = True
        for client in self.clients:
            client.deadline_s, client.most = 0.0, 0

    async def run(self) -> None:
        if self.asked.settings.first:
            await self._run_first()
        elif self.asked.settings.api == "streams":
            streams = [await self.fabric.open_streams(self.address) for _ in self.clients]
            pairs = zip(self.clients, streams, strict=True)
            self.reports = await asyncio.gather(*(client.run(*pair) for client, pair in pairs))
        else:
            await self._run_protocols()

    async def _run_protocols(self) -> None:
        transports: list[Any] = []
        try:
            for client in self.clients:
                transport, _ = await self.fabric.connect(lambda client=client: client, self.address)  # type: ignore[misc]
                transports.append(transport)
            for client in self.clients:
                client.start()
            self.reports = await asyncio.gather(*(client.done for client in self.clients))
        finally:
            for transport in transports:
                transport.abort()

    async def _run_first(self) -> None:
        """A connection for each message: these runs end by themselves after one."""
        clock, times, ended = time.perf_counter, self.times[0], [0.0]
        api = self.asked.settings.api
        make: Any = {"streams": StreamPinger, "buffered": BufferedPinger, "protocol": Pinger}[api]
        self.first_cpu_s = -time.process_time()
        began = now = clock()
        while not self.over and now < began + self.seconds and times.count < self.most:
            before = clock()
            client = make(self.asked.size, 0.0, stamp=lambda at: ended.__setitem__(0, at))
            await _drive(self.fabric, client, self.address)
            times.add(int((ended[0] - before) * 1e9))
            now = clock()
        self.first_s = now - began
        self.first_cpu_s += time.process_time()

    def _client(self, times: Any) -> Any:
        settings, size, seconds = self.asked.settings, self.asked.size, self.seconds
        if self.kind.measures == "bw":
            flooder = StreamFlooder if settings.api == "streams" else Flooder
            return flooder(size, seconds, most=self.most)
        if settings.rate:

            def note(took_s: float) -> bool:
                times.add(int(took_s * 1e9))
                return bool(times.count >= self.most)

            paced = {"streams": PacedStreamPinger, "buffered": PacedBufferedPinger, "protocol": PacedPinger}
            return paced[settings.api](size, seconds, Schedule(settings.rate, note))
        depth = 1 if self.kind.latency else int(min(settings.in_flight, self.most))
        last = self.most - (depth - 1)  # so many more are under way then
        pinger: Any = None

        def stamp(now: float) -> None:
            times.lap(now)
            if times.count >= last:
                pinger.deadline_s = 0.0

        make: Any = {"streams": StreamPinger, "buffered": BufferedPinger, "protocol": Pinger}[settings.api]
        pinger = make(size, seconds, depth=depth, stamp=times.lap if last == math.inf else stamp)
        return pinger


async def _drive(fabric: Fabric, client: Any, address: list[Any]) -> Report:
    if isinstance(client, StreamPinger):
        return await client.run(*await fabric.open_streams(address))
    return await run_client(fabric.connect, client, address)


async def _until_over(traffic: _Traffic, seconds: float) -> bool:
    """Whether Ctrl-C ended it: then the clients end now, and what they have is measured."""
    task = asyncio.create_task(traffic.run(), name="send and receive")
    interrupted = False
    try:
        await asyncio.wait({task}, timeout=seconds + LATEST_S)
    except asyncio.CancelledError:
        traffic.end()
        interrupted = True
        await asyncio.wait({task}, timeout=LATEST_S)
    if not task.done():
        task.cancel()
    await task
    return interrupted


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
        settings=run.settings,
    )
