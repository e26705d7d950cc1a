"""One process of a measurement: a server or a client, on one CPU, on one loop, over one fabric.

usage: python -m benchmarks.worker FABRIC LOOP CPU

It reads commands as lines of JSON from standard input, and answers each with one line of JSON on standard output. The
end of the input ends the process. While a case runs, the process does nothing else.
"""

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rdmanet.base import onlookers
from rdmanet.cli.fabrics import FABRICS, Fabric, forget, loop_factory
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
    percentile,
    round_trips_s,
    stream_echo,
    stream_sink,
)


def private_bytes() -> int:
    """Memory that only this process has."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(size) for name, size, _ in lines if name.startswith("Private_"))


def registered_bytes(protocol: Any) -> int:
    """Registered memory that one connection has to itself; 0 on sockets."""
    stats = None if protocol is None else protocol.transport.get_extra_info("rdma_stats")
    return 0 if stats is None else int(stats["bytes_registered"])


def lost_cpu() -> int:
    """How often another thread was given this one's CPU."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Worker:
    def __init__(self, fabric: str) -> None:
        self.fabric_name = fabric
        self.server: Any = None
        self.served: Any = None
        self.address: list[Any] = []
        self.resting: list[Any] = []
        self.python_calls = 0
        self.stretches: list[list[float]] = []
        self.context: Any = None
        """The device's context, if there is one: it has counters."""

    async def answer(self, command: str, args: dict[str, Any]) -> Any:
        return await getattr(self, command)(**args)

    def fabric(self, case: dict[str, Any]) -> Fabric:
        return FABRICS[self.fabric_name](**(case["options"] if self.fabric_name == "rdmanet" else {}))

    # --- the server's commands ---

    async def listen(self, case: dict[str, Any], api: str) -> list[Any]:
        sink = case["kind"] == "flood"
        fabric = self.fabric(case)
        if api == "streams":
            callback = stream_sink if sink else stream_echo(case["size"])
            self.server, self.address = await fabric.listen_streams(callback)
        else:
            buffered = api == "buffered"
            factory = (BufferedSink if sink else BufferedEcho) if buffered else (Sink if sink else Echo)

            def made() -> Any:
                self.served = factory()
                return self.served

            self.server, self.address = await fabric.listen(made)
        return self.address

    async def close(self) -> None:
        self.server.close()
        await asyncio.wait_for(self.server.wait_closed(), 10)
        forget(self.address)

    # --- the client's ---

    async def run(self, case: dict[str, Any], api: str, address: list[Any]) -> dict[str, float]:
        fabric = self.fabric(case)
        if case["kind"] == "flood":
            return await self._flood(fabric, case, api, address)
        return await self._ping(fabric, case, api, address)

    async def _flood(
        self, fabric: Fabric, case: dict[str, Any], api: str, address: list[Any]
    ) -> dict[str, float]:
        client = (StreamFlooder if api == "streams" else Flooder)(case["size"], case["seconds"])
        [report] = await self._drive(fabric, [client], address)
        messages = report.received / case["size"]
        cpu_s = client.cpu_s + report.cpu_s
        return {
            "messages": messages,
            "messages_per_s": messages / report.seconds,
            "gb_per_s": report.received / report.seconds / 1e9,
            "cpu_us": cpu_s / messages * 1e6,
            "cpu_s_per_gb": cpu_s / report.received * 1e9,
        }

    async def _ping(
        self, fabric: Fabric, case: dict[str, Any], api: str, address: list[Any]
    ) -> dict[str, float]:
        size, seconds, depth = case["size"], case["seconds"], case["depth"]
        clients: list[Any]
        if api == "streams":
            clients = [StreamPinger(size, seconds, depth=depth) for _ in range(case["connections"])]
        else:
            make = BufferedPinger if api == "buffered" else Pinger
            clients = [
                make(size, seconds, depth=depth, pause_s=case["pause_s"]) for _ in range(case["connections"])
            ]
        reports = await self._drive(fabric, clients, address)
        answers = sum(len(client.stamps) - 1 for client in clients)
        begin = min(client.stamps[0] for client in clients)
        end = max(client.stamps[-1] for client in clients)
        # Each connection saw the CPU time of its whole process while it lived: the longest is that of all.
        cpu_s = max(client.cpu_s for client in clients) + max(report.cpu_s for report in reports)
        result = {
            "messages": answers,
            "messages_per_s": answers / (end - begin),
            "cpu_us": cpu_s / answers * 1e6,
        }
        if depth == 1 and len(clients) == 1:
            times = round_trips_s(clients[0])
            result["p50_us"] = percentile(times, 50) * 1e6
            result["p99_us"] = percentile(times, 99) * 1e6
            result["max_us"] = max(times) * 1e6
        return result

    async def _drive(self, fabric: Fabric, clients: list[Any], address: list[Any]) -> list[Report]:
        """Connect all, then start all, and wait for the server's reports."""
        if isinstance(clients[0], StreamFlooder | StreamPinger):
            streams = [await fabric.open_streams(address) for _ in clients]
            return await asyncio.gather(
                *(client.run(*pair) for client, pair in zip(clients, streams, strict=True))
            )
        for client in clients:
            await fabric.connect(lambda client=client: client, address)  # type: ignore[misc]
        self.note_context(clients[0].transport)
        for client in clients:
            client.start()
        return await asyncio.gather(*(client.done for client in clients))

    # --- both sides' ---

    async def open_idle(self, case: dict[str, Any], address: list[Any]) -> None:
        """Connections on which one message went to and fro, so that both ends are settled."""
        fabric = self.fabric(case)
        for _ in range(case["connections"]):
            reader, writer = await fabric.open_streams(address)
            writer.write(bytes(64))
            await reader.readexactly(64)
            self.resting.append(writer)

    async def rest(self, seconds: float) -> dict[str, float]:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        cpu_s = time.process_time() - begin_cpu_s
        return {
            "cpu_percent": 100 * cpu_s / (time.perf_counter() - begin_s),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "private_bytes": private_bytes(),
            "registered_bytes": registered_bytes(self.served),
        }

    async def longest_answer(self) -> list[list[float]]:
        """For how many milliseconds of CPU time the loop's thread answered `rdmanet ss` at a stretch.

        The longest time of each look since the last call, and the longest of those in which nobody else had its CPU:
        who gets it back finds cold caches. The first call begins to count.
        """
        if not self.stretches:
            answer: Any = onlookers._Answer
            for part, name in ((onlookers, "may_look"), (answer, "_asked"), (answer, "go_on")):
                setattr(part, name, self._timed(getattr(part, name), begins=part is onlookers))
        found, self.stretches = self.stretches, [[0.0, 0.0]]
        return found[1:]

    def _timed(self, function: Any, begins: bool) -> Any:
        def timed(*args: Any) -> Any:
            if begins:
                self.stretches.append([0.0, 0.0])
            lost, began_s = lost_cpu(), time.thread_time()
            result = function(*args)
            took_ms, longest_ms = 1e3 * (time.thread_time() - began_s), self.stretches[-1]
            for at in range(1 if lost_cpu() > lost else 2):
                longest_ms[at] = max(longest_ms[at], took_ms)
            return result

        return timed

    def note_context(self, transport: Any) -> None:
        """A context outlives its connections; a connection is how one gets to it."""
        pd = transport.get_extra_info("rdma_pd")
        self.context = self.context if pd is None else pd.context

    async def usage(self) -> dict[str, float]:
        """What this process has spent so far."""
        if self.served is not None:
            self.note_context(self.served.transport)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        used = {"sleeps": spent.ru_nvcsw, "python_calls": self.python_calls}
        if self.context is not None:
            used |= {f"device_{name}": value for name, value in self.context.counters().items()}
        return used

    async def profile(self) -> None:
        """Count calls from here on: of Python functions, and of C functions by Python code."""

        def called(frame: object, event: str, arg: object) -> None:
            if event in ("call", "c_call"):
                self.python_calls += 1

        sys.setprofile(called)

    async def close_idle(self) -> None:
        for writer in self.resting:
            writer.close()
        for writer in self.resting:
            await writer.wait_closed()
        self.resting.clear()


async def serve(worker: Worker) -> None:
    """Answer commands until the input ends."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    partial = b""

    def readable() -> None:
        nonlocal partial
        data = os.read(0, 1 << 16)
        if not data:
            loop.remove_reader(0)
            lines.put_nowait(None)
            return
        *complete, partial = (partial + data).split(b"\n")
        for line in complete:
            lines.put_nowait(line)

    loop.add_reader(0, readable)
    while (line := await lines.get()) is not None:
        command, args = json.loads(line)
        try:
            answer = {"result": await worker.answer(command, args)}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    fabric, loop, cpu = sys.argv[1:4]
    if int(cpu) >= 0:
        os.sched_setaffinity(0, {int(cpu)})
    factory, _ = loop_factory(loop)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(Worker(fabric)))


if __name__ == "__main__":
    main()
