"""Both sides of a measurement of rdmanet.rpc: calls of a method that takes bytes and returns them."""

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rdmanet import rpc
from rdmanet._core import Histogram
from rdmanet.base.pause import pause
from rdmanet.cli.perf.conditions import Usage
from rdmanet.cli.perf.control import Address, Control, Done, Go, Run, Stop
from rdmanet.cli.perf.kinds import KINDS
from rdmanet.cli.perf.paced import Schedule
from rdmanet.cli.perf.progress import Progress
from rdmanet.cli.perf.results import Result, latency_of, note_conditions
from rdmanet.cli.perf.streams import ENDLESS_S, Sampler, heard, outcome, own_address, their_address

TRANSPORTS = {"rdmanet": "rdma", "tcp": "tcp", "unix": "unix"}


class Measured(rpc.Service):
    """What is called."""

    async def echo(self, data: bytes) -> bytes:
        return data


async def serve(control: Control, run: Run) -> None:
    """Answer one Run: serve until the client says Stop."""
    transport = TRANSPORTS[KINDS[run.kind].over]
    with tempfile.TemporaryDirectory(prefix="rdmanet-") as directory:
        path = str(Path(directory) / "s")
        at: tuple[Any, ...] = (path,) if transport == "unix" else (own_address(control), 0)
        async with await rpc.serve(Measured(), *at, transport=transport) as server:
            where = [path] if transport == "unix" else list(server.sockets[0].getsockname()[:2])
            control.send(Address(where))
            control.send(Go())
            await heard(control)
            control.receive(Go)
            began, usage = time.perf_counter(), Usage()
            await heard(control)
            control.receive(Stop)
            spent = usage.since()
            control.send(
                Done(time.perf_counter() - began, spent.cpu_s, preempted=spent.preempted, slept=spent.slept)
            )


async def measure(control: Control, run: Run, progress: Progress) -> Result:
    """Run one test with one size."""
    kind, settings = KINDS[run.kind], run.settings
    control.send(run)
    where = their_address(control, control.receive(Address).where)
    control.receive(Go)
    at_once = 1 if kind.latency else settings.in_flight
    found = Histogram()
    interrupted = False
    connect = functools.partial(rpc.connect, Measured, *where, transport=TRANSPORTS[kind.over])
    try:
        async with connect() as client:
            await _call(client, run, at_once, settings.warm_up_s, 0, Histogram())
            sampler = Sampler(run, progress, lambda: int(found.count))
            sampling = asyncio.create_task(sampler.run(), name="sample")
            control.send(Go())
            usage, began = Usage(), time.perf_counter()
            seconds = ENDLESS_S if settings.iterations else settings.seconds
            try:
                if settings.first:
                    await _call_first(connect, run, seconds, found)
                else:
                    await _call(client, run, at_once, seconds, settings.iterations, found, settings.rate)
            except asyncio.CancelledError:
                interrupted = True
            finally:
                sampling.cancel()
            took, spent = time.perf_counter() - began, usage.since()
    except Exception:
        control.raise_failure()
        raise
    finally:
        control.send(Stop())
    done = control.receive(Done)
    server_cpu_s = done.cpu_s / max(done.seconds, 1e-9) * took
    result = outcome(run, found.count, max(took, 1e-9), spent.cpu_s, server_cpu_s)
    result.latency = latency_of(found)
    result.samples, result.interrupted = sampler.samples, interrupted
    note_conditions(result, spent, done)
    return result


async def _call_first(connect: Callable[[], Any], run: Run, seconds: float, found: Any) -> None:
    """A client for each call: from connecting to the answer."""
    data, clock, most = bytes(run.size), time.perf_counter, run.settings.iterations
    until = clock() + seconds
    while clock() < until and (not most or found.count < most):
        before = clock()
        async with connect() as client:
            await client.echo(data)
            found.add(int((clock() - before) * 1e9))


async def _call(
    client: Measured, run: Run, at_once: int, seconds: float, most: int, found: Any, rate: float = 0.0
) -> None:
    """Call until the time is over, or `most` calls were begun (0: any number).

    :param rate: calls a second, one at a time; 0.0 is no limit
    """
    data, clock, begun = bytes(run.size), time.perf_counter, 0
    until = clock() + seconds

    async def caller() -> None:
        nonlocal begun
        now = clock()
        while now < until and (not most or begun < most):
            begun += 1
            before = now
            await client.echo(data)
            now = clock()
            found.add(int((now - before) * 1e9))

    async def at_rate() -> None:
        def note(took_s: float) -> bool:
            found.add(int(took_s * 1e9))
            return bool(most and found.count >= most)

        schedule = Schedule(rate, note)
        schedule.begin()
        while True:
            await client.echo(data)
            if schedule.answered(clock()) or schedule.due_s >= until:
                break
            while left := schedule.left_s():
                await pause(asyncio.get_running_loop(), left)

    if rate:
        await at_rate()
        return
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(caller(), name="call")
