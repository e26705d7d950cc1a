"""Processes that talk to each other for long, some of them killed and stopped: does every connection end?

usage: python -m tests.soak [--seconds 600] [--processes 4] [--connections 50] [--seed N]

Each process has a server, and keeps so many conversations with the others under way (worker.py). Every few seconds one
of them is killed by SIGKILL and another one takes its place; more often one is stopped by SIGSTOP for up to two
seconds. It ends with status 1 at the first hang, wrong byte or lost one; the seed it prints brings the same sizes
and victims again, though not the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.processes import AwaitedProcess

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 120.0  # longer than a conversation may take
KILL_EVERY_S = 5.0
STOP_EVERY_S = 1.0
STOPPED_S = 2.0


class Failed(Exception):
    """Something that must not be; its text is for people."""


class Worker(AwaitedProcess):
    """One of the soak's processes, seen from here."""

    def __init__(self, index: int, life: int, connections: int, seed: int) -> None:
        self.index = index
        self.life = life
        self.port = 0
        worker = (sys.executable, "-m", "tests.soak.worker")
        super().__init__(*worker, index, life, connections, seed, cwd=ROOT)

    async def hear_fact(self, name: str) -> Any:
        """What its next line says of this. A failure is raised."""
        try:
            said = await self.hear(timeout=ANSWER_S)
        except TimeoutError:
            raise Failed(f"process {self.index} said nothing for {ANSWER_S:.0f} s") from None
        except EOFError as exc:
            raise Failed(f"process {self.index}: {exc}") from None
        if "failure" in said:
            raise Failed(said["failure"])
        return said[name]


class Soak:
    def __init__(self, processes: int, connections: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.connections = connections
        self.count = processes
        self.workers: list[Worker] = []
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        with contextlib.ExitStack() as self.stack:
            self.workers = [self.start(index, 0) for index in range(self.count)]
            for worker in self.workers:
                worker.port = await worker.hear_fact("port")
            self.introduce()
            disturbing = asyncio.ensure_future(self.disturb(seconds))
            progress = asyncio.ensure_future(self.tell_progress(seconds))
            try:
                await disturbing
            finally:
                progress.cancel()
            for worker in self.workers:
                worker.tell(quiet=True)
            for worker in self.workers:
                self.done.update(await worker.hear_fact("counts"))
            for worker in self.workers:
                await self.end(worker)

    def start(self, index: int, life: int) -> Worker:
        return self.stack.enter_context(Worker(index, life, self.connections, self.random.getrandbits(32)))

    async def end(self, worker: Worker) -> None:
        """It was told all, and has nothing more to do."""
        try:
            await asyncio.wait_for(worker.finish(), ANSWER_S)
        except AssertionError as exc:
            raise Failed(f"process {worker.index}: {exc}") from None

    def introduce(self) -> None:
        peers = {worker.index: [worker.port, worker.life] for worker in self.workers}
        for worker in self.workers:
            worker.tell(peers=peers)

    async def disturb(self, seconds: float) -> None:
        """Stop and kill them, for so long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        next_kill = loop.time() + min(KILL_EVERY_S, seconds / 2)
        while (now := loop.time()) < end:
            if now >= next_kill:
                next_kill = now + KILL_EVERY_S
                await self.replace(self.random.randrange(self.count))
            victim = self.random.choice(self.workers)
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S * self.random.random() ** 3)
            victim.send_signal(signal.SIGCONT)
            self.done["stops"] += 1
            await asyncio.sleep(STOP_EVERY_S * self.random.random())

    async def replace(self, index: int) -> None:
        """Kill one, when all others know that it may leave its conversations; start another in its place."""
        victim = self.workers[index]
        others = [worker for worker in self.workers if worker is not victim]
        for worker in others:
            worker.tell(mortal=index)
        for worker in others:
            await worker.hear_fact("known")
        victim.close()
        self.workers[index] = new = self.start(index, victim.life + 1)
        new.port = await new.hear_fact("port")
        self.introduce()
        self.done["kills"] += 1

    async def tell_progress(self, seconds: float) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(10)
            print(
                f"{time.monotonic() - began:.0f} of {seconds:.0f} s: "
                f"{self.done['stops']} stops, {self.done['kills']} kills",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Does every connection end?")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--connections", type=int, default=50, help="that each process keeps under way")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    arguments = parser.parse_args()
    soak = Soak(arguments.processes, arguments.connections, arguments.seed)
    print(f"seed {arguments.seed}", flush=True)
    try:
        asyncio.run(soak.run(arguments.seconds))
    except Failed as exc:
        print(f"failed: {exc}")
        return 1
    counts = soak.done
    print(
        f"{counts['whole']} conversations went through, {counts['cut short']} were cut short as meant or killed, "
        f"{counts['not let in']} were not let in, {counts['bytes'] / 1e9:.1f} GB compared, "
        f"{counts['lent']} pieces lent; "
        f"{counts['stops']} stops, {counts['kills']} kills; no hang"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
