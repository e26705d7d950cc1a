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
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 120.0  # longer than a conversation may take
KILL_EVERY_S = 5.0
STOP_EVERY_S = 1.0
STOPPED_S = 2.0


class Failed(Exception):
    """Something that must not be; its text is for people."""


class Process:
    """One of the soak's processes, seen from here."""

    def __init__(self, index: int, life: int) -> None:
        self.index = index
        self.life = life
        self.port = 0
        self.is_doomed = False
        self._process: asyncio.subprocess.Process

    async def start(self, connections: int, seed: int) -> None:
        arguments = (str(each) for each in (self.index, self.life, connections, seed))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.soak.worker", *arguments, stdin=-1, stdout=-1, cwd=ROOT
        )
        self.port = (await self.hear())["port"]

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """Its next line. A failure is raised."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Failed(f"process {self.index} said nothing for {ANSWER_S:.0f} s") from None
        if not line:
            raise Failed(f"process {self.index} ended with status {await self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "failure" in said:
            raise Failed(said["failure"])
        return said

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def killed(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def ended(self) -> None:
        """It was told all, and has nothing more to do."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if status := await asyncio.wait_for(self._process.wait(), ANSWER_S):
            raise Failed(f"process {self.index} ended with status {status}")

    def kill_if_alive(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class Soak:
    def __init__(self, processes: int, connections: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.connections = connections
        self.processes = [Process(index, 0) for index in range(processes)]
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        try:
            await asyncio.gather(*map(self.start, self.processes))
            self.introduce()
            disturbing = asyncio.ensure_future(self.disturb(seconds))
            progress = asyncio.ensure_future(self.tell_progress(seconds))
            try:
                await disturbing
            finally:
                progress.cancel()
            for process in self.processes:
                process.tell(quiet=True)
            for process in self.processes:
                self.done.update((await process.hear())["counts"])
            for process in self.processes:
                await process.ended()
        finally:
            for process in self.processes:
                process.kill_if_alive()

    async def start(self, process: Process) -> None:
        await process.start(self.connections, self.random.getrandbits(32))

    def introduce(self) -> None:
        peers = {process.index: [process.port, process.life] for process in self.processes}
        for process in self.processes:
            process.tell(peers=peers)

    async def disturb(self, seconds: float) -> None:
        """Stop and kill them, for so long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        next_kill = loop.time() + min(KILL_EVERY_S, seconds / 2)
        while (now := loop.time()) < end:
            if now >= next_kill:
                next_kill = now + KILL_EVERY_S
                await self.replace(self.random.randrange(len(self.processes)))
            victim = self.random.choice(self.processes)
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S * self.random.random() ** 3)
            victim.signal(signal.SIGCONT)
            self.done["stops"] += 1
            await asyncio.sleep(STOP_EVERY_S * self.random.random())

    async def replace(self, index: int) -> None:
        """Kill one, when all others know that it may leave its conversations; start another in its place."""
        victim = self.processes[index]
        others = [process for process in self.processes if process is not victim]
        for process in others:
            process.tell(mortal=index)
        for process in others:
            await process.hear()
        await victim.killed()
        self.processes[index] = Process(index, victim.life + 1)
        await self.start(self.processes[index])
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
        f"{counts['not let in']} were not let in, {counts['bytes'] / 1e9:.1f} GB compared; "
        f"{counts['stops']} stops, {counts['kills']} kills; no hang"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
