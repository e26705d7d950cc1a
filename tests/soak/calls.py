"""Random calls with arrays in all places, of servers that are killed and restarted: is each reply right, once?

usage: python -m tests.soak.calls [--calls 50000] [--every 400] [--servers 3] [--upgrade] [--seed N]

Tasks of this process call servers of other processes (calls_server.py), over RDMA and over TCP, by clients that
reconnect: to the first of the servers that answers, or spread over all. A resolver says which there are. One of the
servers is killed by SIGKILL after every 400 calls (--every), or with --upgrade told to drain; another one takes its
place, at another port. What is compared:

- each reply, with what was sent: types of items, shapes, bytes, also of what the server gets when it calls an object
  of the caller's back, and of metadata that goes back;
- which call may fail: with --upgrade none; else one that is not idempotent, by UNAVAILABLE;
- the journal of the servers: a call that is not idempotent is in it once if it has its reply, not at all if it is said
  not to have begun, and at most once otherwise;
- that nothing is left: calls and memory of the servers, and tasks, descriptors and objects of calls here.

It ends with status 1 at the first fault. The seed that it prints brings the same calls again, not the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy

from rdmanet import rpc
from tests.soak.calls_server import HOST, Arrays, Journal, Listener, Record
from tests.support.processes import AwaitedProcess

ROOT = Path(__file__).resolve().parents[2]
TASKS = 16
KINDS = 13
EVERY = 400
HANG_S = 300.0
ANSWER_S = 120.0
DESCRIPTORS_MOST = 4
"""So many more than before may be open at the end: those of the process, and not of servers or calls."""
LARGE_BYTES = 2 << 20  # goes by reference
TYPES = [
    "f4",
    "i8",
    ">f8",
    "?",
    "f2",
    "c16",
    "S7",
    "U3",
    "M8[ns]",
    ">m8[s]",
    "u1",
    [("a", "<i2"), ("b", ">f4", (2,))],
    *(getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
]
_OF_DLPACK = ("<f4", "<i8", "<f2", "<c16", "|u1")
OF_A_CALL = {
    "Pending",
    "Receiving",
    "Sending",
    "Inflow",
    "Outflow",
    "Results",
    "Cut",
    "Loan",
    "Buffer",
    "Tried",
    "Inner",
    "Response",
}


class Wrong(Exception):
    """Something that must not be; its text is for people."""


class Server(AwaitedProcess):
    def __init__(self, journal: str) -> None:
        super().__init__(sys.executable, "-m", "tests.soak.calls_server", journal, cwd=ROOT)
        self.ports: list[int] = []

    async def end(self) -> None:
        """Have it drain, and see that nothing is left."""
        self._stdin.close()
        left = (await self.hear(timeout=ANSWER_S))["left"]
        if left or await self.ended():
            raise Wrong(f"a server has ended with status {await self.ended()}, and {left} of its calls")


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays by their bytes."""
    if isinstance(one, numpy.ndarray):
        is_array = isinstance(other, numpy.ndarray) and one.dtype == other.dtype and one.shape == other.shape
        return is_array and one.tobytes() == other.tobytes()
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and same(msgspec.structs.astuple(one), msgspec.structs.astuple(other))
    if isinstance(one, dict):
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Chance(random.Random):
    """Random arguments."""

    noise = numpy.frombuffer(random.Random(1).randbytes(4 * LARGE_BYTES), "u1")

    def array(self, dtype: Any = None, most: int = 3000) -> Any:
        """An array, which may be not contiguous."""
        found = numpy.dtype(self.choice(TYPES) if dtype is None else dtype)
        nbytes = (
            LARGE_BYTES + self.randrange(LARGE_BYTES) if self.randrange(200) == 0 else self.randrange(most)
        )
        count = nbytes // found.itemsize
        start = 16 * self.randrange((self.noise.nbytes - nbytes) // 16)
        flat = self.noise[start : start + count * found.itemsize]
        if found.kind == "U":
            array = numpy.array([chr(65 + int(each)) for each in flat[: min(count, 50)]], found)
        else:
            array = (flat % 2 if found.kind == "b" else flat).view(found)
        return self.choice(
            [array, array[::2], array.reshape(-1, 1), array.reshape(1, -1).T, array[:0], array.copy()]
        )

    def state(self) -> dict[str, Any]:
        return {f"layer{index}": self.array() for index in range(self.randrange(self.choice([3, 3, 40])))}

    def record(self) -> Record:
        layers = [self.array("f4") for _ in range(self.randrange(4))]
        mask = self.choice([None, self.array("?")])
        return Record(str(self.random()), self.state(), layers, (self.array("i8"), self.randrange(9)), mask)


class Tensor:
    """What is an array for whoever knows DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return cast("tuple[int, int]", self._array.__dlpack_device__())


class Turning(Listener):
    """What a server calls during a call."""

    async def turned(self, array: numpy.ndarray) -> numpy.ndarray:
        return array[::-1]

    async def every(self, array: numpy.ndarray, step: int) -> AsyncIterator[numpy.ndarray]:
        for start in range(step):
            yield array[start::step]


async def given(arrays: list[Any]) -> AsyncIterator[Any]:
    for array in arrays:
        yield array


class Soak:
    def __init__(self, calls: int, every: int, count: int, upgrade: bool, seed: int, journal: str) -> None:
        self.random = random.Random(seed)
        self.left = self.calls = calls
        self.every, self.count, self.upgrade, self.journal = every, count, upgrade, journal
        self.servers: list[Server] = []
        self.done: Counter[str] = Counter()
        self.replied: set[int] = set()
        self.not_begun: set[int] = set()
        self.numbers = 0

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(self.count):
                self.servers.append(await self.start(stack))
            async with contextlib.AsyncExitStack() as clients:
                ways = [(0, "spread"), (0, "first"), (1, "spread"), (1, "first")]
                pairs = [await self.clients(clients, *ways[each]) for each in range(len(ways))]
                async with asyncio.TaskGroup() as tasks:
                    for task in range(TASKS):
                        chance = Chance(self.random.getrandbits(32))
                        tasks.create_task(self.work(*pairs[task % len(pairs)], chance))
                    tasks.create_task(self.disturb(stack))
            for server in self.servers:
                await server.end()
        self.read_journal()

    async def start(self, stack: contextlib.ExitStack) -> Server:
        server = stack.enter_context(Server(self.journal))
        server.ports = (await server.hear(timeout=ANSWER_S))["ports"]
        return server

    async def clients(
        self, block: contextlib.AsyncExitStack, which: int, policy: Any
    ) -> tuple[Arrays, Journal]:
        def servers() -> list[tuple[str, int]]:
            return [(HOST, server.ports[which]) for server in self.servers if server.ports]

        resolver = rpc.Resolver(servers, every=0.05)
        retry = rpc.Retry(first_seconds=0.01, most_seconds=0.1, attempts=None)
        how: Any = {"policy": policy, "retry": retry, "transport": ("rdma", "tcp")[which], "wait": True}
        arrays = await block.enter_async_context(rpc.connect(Arrays, resolver, **how))
        return arrays, await block.enter_async_context(rpc.connect(Journal, resolver, **how))

    async def disturb(self, stack: contextlib.ExitStack) -> None:
        """End one of the servers after so many calls, and start another in its place."""
        for number in range(1, self.calls // self.every):
            while self.left > self.calls - number * self.every:
                await asyncio.sleep(0.01)
            index = self.random.randrange(self.count)
            old = self.servers[index]
            if self.upgrade:
                self.servers[index] = await self.start(stack)
                await old.end()
            else:
                old.process.kill()
                self.servers[index] = await self.start(stack)
            self.done["upgrades" if self.upgrade else "kills"] += 1

    async def work(self, arrays: Arrays, journal: Journal, chance: Chance) -> None:
        while self.left > 0:
            self.left -= 1
            kind = chance.randrange(KINDS)
            try:
                async with asyncio.timeout(HANG_S):
                    if kind < 2:
                        await self.once(journal, chance)
                    else:
                        await self.call(arrays, chance, kind)
            except TimeoutError:
                raise Wrong(f"a call of the kind {kind} has no end") from None
            except rpc.Error as exc:
                lost = exc.code is rpc.Code.UNAVAILABLE and kind in (0, 1, 8, 9)
                if self.upgrade or not lost:
                    raise Wrong(f"a call of the kind {kind}: {exc}") from exc
                self.done["lost"] += 1
            else:
                self.done["replied"] += 1

    async def once(self, journal: Journal, chance: Chance) -> None:
        self.numbers += 1
        number, array = self.numbers, chance.array()
        try:
            self.check(number + array.nbytes, await journal.once(number, array))
        except rpc.Error as exc:
            if not exc.begun:
                self.not_begun.add(number)
            raise
        self.replied.add(number)

    async def call(self, client: Arrays, chance: Chance, kind: int) -> None:
        """A call, whose reply is compared. Streams and objects of the caller's, kinds 8 and 9, are not sent twice."""
        state = chance.state()
        match kind:
            case 2:
                record = chance.record()
                self.check(record, await client.record(record))
            case 3:
                self.check(dict(reversed(state.items())), await client.state(state))
            case 4:
                one, more = chance.array(), list(state.values())
                other = chance.choice([None, chance.array()])
                self.check((other, one, more), await client.both(one, other, more))
            case 5:
                array = chance.array()
                if chance.random() < 0.5:
                    self.check(array, await client.array(array))
                elif array.dtype in _OF_DLPACK and array.flags.writeable:
                    self.check(array, await client.array(cast(Any, Tensor(array))))
                else:
                    mine = numpy.empty_like(array, order="C")
                    self.check(array, await rpc.options(client, into=mine).array(array))
            case 6:
                data = chance.array("u1").tobytes()
                self.check(data, await client.view(memoryview(data)))
                async with await client.lend(data) as buffer:
                    with contextlib.suppress(ConnectionError):
                        self.check(data, await self.read(buffer))
            case 7:
                self.check([{k: v} for k, v in state.items()], await self.items(client, state))
            case 8:
                sent = list(state.values())
                found = [item async for item in client.sums(given(sent))]
                self.check([(array.nbytes, array) for array in sent], found)
            case 9:
                objects, one = Turning(), chance.array()
                wanted = (
                    {name: array[::-1] for name, array in state.items()},
                    [one[step::3] for step in range(3)],
                )
                self.check(wanted, await client.ask(objects, one, state))
            case 10:
                array = chance.array()
                self.check((sum(array.tobytes()), array), await client.counted(array))
            case 11:
                text, array, said = str(chance.random()), chance.array(), rpc.Response()
                self.check(array, await rpc.options(client, response=said).said(text, array))
                found = said.initial_metadata, said.trailing_metadata
                self.check(({"first": text}, {"last": text[::-1]}), found)
            case _:
                text = str(chance.random())
                named = rpc.options(client, metadata={"tenant": text}, timeout=HANG_S)
                self.check(text, await named.metadata("tenant"))

    async def read(self, buffer: rpc.Buffer) -> bytes:
        """What the server has lent, unless it was killed."""
        try:
            return await buffer.read()
        except rpc.Error as exc:
            if self.upgrade or exc.code is not rpc.Code.UNAVAILABLE:
                raise
            raise ConnectionError from None

    async def items(self, client: Arrays, state: dict[str, Any]) -> list[Any]:
        """All of a stream. One of which an item has come is not made again by the client."""
        while True:
            found: list[Any] = []
            try:
                async for item in client.items(state):
                    found.append(item)
            except rpc.Error as exc:
                if self.upgrade or exc.code is not rpc.Code.UNAVAILABLE or not found:
                    raise
            else:
                return found

    def check(self, wanted: Any, found: Any) -> None:
        if not same(wanted, found):
            raise Wrong(f"a reply differs: {str(found)[:300]} instead of {str(wanted)[:300]}")

    def read_journal(self) -> None:
        times = Counter(map(int, Path(self.journal).read_text().split()))
        for number in range(1, self.numbers + 1):
            allowed = [1] if number in self.replied else [0] if number in self.not_begun else [0, 1]
            if times[number] not in allowed:
                raise Wrong(f"call {number} was made {times[number]} times; allowed: {allowed}")
        self.done["once"] = len(self.replied)


async def run(soak: Soak) -> None:
    async with await rpc.serve(
        Arrays(), HOST, 0
    ) as server:  # opens what a process keeps that uses the device
        async with rpc.connect(Arrays, HOST, server.sockets[0].getsockname()[1]) as client:
            await client.array(numpy.zeros(LARGE_BYTES, "u1"))
    descriptors = len(os.listdir("/proc/self/fd"))
    await soak.run()
    gc.collect()
    names = ((str(type(each).__module__), type(each).__name__) for each in gc.get_objects())
    left = Counter(name for module, name in names if module.startswith("rdmanet.rpc") and name in OF_A_CALL)
    others = asyncio.all_tasks() - {cast("asyncio.Task[None]", asyncio.current_task())}
    more = soak.done["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
    if left or others or more > DESCRIPTORS_MOST:
        raise Wrong(f"what is left: {dict(left)}, {others}, {more} descriptors")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.calls", description="Is each reply right, once?"
    )
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=EVERY, help="end a server after so many calls")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--upgrade", action="store_true", help="let servers drain, and kill none")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        how = arguments.calls, arguments.every, arguments.servers, arguments.upgrade, arguments.seed
        soak = Soak(*how, str(Path(folder, "journal")))
        failed: list[BaseException] = []
        try:
            asyncio.run(run(soak))
        except* Wrong as group:
            failed.extend(group.exceptions)
    if failed:
        print(f"failed: {failed[0]}")
        return 1
    done = soak.done
    print(
        f"{done['replied']} replied, {done['once']} of them made once, {done['lost']} lost with their server; "
        f"{done['kills']} kills, {done['upgrades']} upgrades; {done['descriptors']} descriptors more than before"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
