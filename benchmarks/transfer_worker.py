"""One process of `benchmarks.transfers`: an owner of memory, or a user who reads it.

usage: PYTHON -m benchmarks.transfer_worker KIND own
       PYTHON -m benchmarks.transfer_worker KIND use FACTS...

The owner prints a line of facts, which the user is given, and sleeps until its standard input ends. The user prints a
line when it is ready. Then each line of its standard input is the number of a case and how many calls of it; it prints
the seconds that a call took, and those of a processor. Each kind is used as its documents say, as fast as it can be.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import numpy

KIB, MIB = 1 << 10, 1 << 20
ALL = 64 * MIB
COUNT = 1000
WAITING = "CPU while waiting"
SLEEPS_S = {"nixl-1ms": 0.001, "nixl-10ms": 0.01}
WAIT_S = 0.5


class Case(NamedTuple):
    """So many blocks of a size in one call; the calls of one turn, which is too short for the clock otherwise."""

    name: str
    nbytes: int
    blocks: int
    calls: int


CASES = [
    Case("64 B", 64, 1, 100),
    Case("4 KiB", 4 * KIB, 1, 100),
    Case("64 KiB", 64 * KIB, 1, 20),
    Case("1 MiB", MIB, 1, 5),
    Case("64 MiB", ALL, 1, 1),
    Case("1,000 x 4 KiB", 4 * KIB, COUNT, 1),
    Case("4 MiB", COUNT * 4 * KIB, 1, 1),
    Case("1,000 x 64 KiB", 64 * KIB, COUNT, 1),
    Case(WAITING, 0, 0, 1),
]
Call = Callable[[], object]


def order() -> Any:
    """Which block of the owner's each of the user's is: they do not follow each other."""
    return numpy.random.default_rng(1).permutation(COUNT)


def pin(number: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})


def asked() -> Iterator[tuple[Case, int]]:
    print("ready", flush=True)
    for line in sys.stdin:
        number, calls = map(int, line.split())
        yield CASES[number], calls


def tell(took: float, used: float, calls: int) -> None:
    print("took", took / calls, used / calls, flush=True)


def turns(call_of: Callable[[Case], Call]) -> None:
    """Do what is asked, by functions that return when it is done."""
    for case, calls in asked():
        call = call_of(case)
        if case.blocks:
            call()  # what was stopped wakes up
        began, ran = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        took, used = time.perf_counter() - began, time.process_time() - ran
        tell(took, used, calls)


# -- rdmanet -------------------------------------------------------------------------------------------------------


def own_rdmanet(is_of_numpy: bool) -> None:
    import asyncio

    import uvloop

    import rdmanet
    from rdmanet import tensors

    async def own() -> None:
        async with tensors.open() as endpoint:
            array = numpy.ones(ALL, "u1")
            if not is_of_numpy:
                array = numpy.frombuffer(rdmanet.alloc(ALL), "u1")
                array[:] = 1
            async with endpoint.register(array) as memory:
                print("facts", endpoint.address().hex(), memory.describe().hex(), flush=True)
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(sys.stdin, ended.set)
                await ended.wait()
                loop.remove_reader(sys.stdin)

    uvloop.run(own())


def use_rdmanet(address: str, descriptor: str) -> None:
    import asyncio

    import uvloop

    from rdmanet import tensors

    async def use() -> None:
        async with tensors.open() as endpoint:
            peer = await endpoint.connect(bytes.fromhex(address))
            mine, blocks = numpy.ones(ALL, "u1"), order()
            async with endpoint.register(mine):
                whole = tensors.Descriptor.from_bytes(bytes.fromhex(descriptor))
                for case, calls in asked():
                    here, there = mine[: case.nbytes], whole[: case.nbytes]
                    if case.blocks > 1:
                        here = mine[: case.blocks * case.nbytes].reshape(case.blocks, case.nbytes)
                        there = tensors.Descriptor(
                            *(
                                whole.version,
                                whole.endpoint,
                                whole.grant,
                                "r",
                                0,
                                here.nbytes,
                                "|u1",
                                here.shape,
                            )
                        )
                    for call in range(-bool(case.blocks), calls):
                        if call <= 0:  # the one before is not counted: what was stopped wakes up
                            began, ran = time.perf_counter(), time.process_time()
                        if case.blocks == 1:
                            await peer.read(there, here)
                        elif case.blocks:
                            await peer.read_rows(there, blocks, here)
                        else:
                            try:
                                await asyncio.wait_for(anext(endpoint.notifications()), WAIT_S)
                            except TimeoutError:
                                pass
                    took, used = time.perf_counter() - began, time.process_time() - ran
                    tell(took, used, calls)

    uvloop.run(use())


# -- NIXL ----------------------------------------------------------------------------------------------------------


def nixl_agent_with(name: str, memory: Any) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def own_nixl() -> None:
    memory = numpy.ones(ALL, "u1")
    agent = nixl_agent_with(f"owner {os.getpid()}", memory)
    print("facts", agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


def use_nixl(metadata: str, address: str, sleep_s: float) -> None:
    mine, blocks = numpy.ones(ALL, "u1"), order()
    agent = nixl_agent_with(f"user {os.getpid()}", mine)
    owner = agent.add_remote_agent(bytes.fromhex(metadata))
    sides: dict[Case, tuple[Any, Any, Any]] = {}

    def prepared(case: Case) -> tuple[Any, Any, Any]:
        count, nbytes = case.blocks, case.nbytes
        here = [(mine.ctypes.data + i * nbytes, nbytes, 0) for i in range(count)]
        there = [
            (int(address) + (int(blocks[i]) if count > 1 else 0) * nbytes, nbytes, 0) for i in range(count)
        ]
        return (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
            agent.prep_xfer_dlist(owner, there, "DRAM"),
            numpy.arange(count, dtype=numpy.int32),
        )

    def read(case: Case) -> None:
        local, remote, indices = sides[case]
        transfer = agent.make_prepped_xfer("READ", local, indices, remote, indices)
        state = agent.transfer(transfer)
        while state == "PROC":
            if sleep_s:
                time.sleep(sleep_s)
            state = agent.check_xfer_state(transfer)
        assert state == "DONE", state
        agent.release_xfer_handle(transfer)

    def wait(_: Case) -> None:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and not agent.get_new_notifs():
            if sleep_s:
                time.sleep(sleep_s)

    def call_of(case: Case) -> Call:
        if not case.blocks:
            return lambda: wait(case)
        if case not in sides:
            sides[case] = prepared(case)
        return lambda: read(case)

    turns(call_of)


# -- shared memory -------------------------------------------------------------------------------------------------


def own_shared() -> None:
    memory = shared_memory.SharedMemory(create=True, size=ALL)
    try:
        numpy.frombuffer(memory.buf, "u1")[:] = 1
        print("facts", memory.name, flush=True)
        sys.stdin.read()
    finally:
        memory.unlink()


def use_shared(name: str) -> None:
    shared = shared_memory.SharedMemory(name, track=False) if sys.version_info >= (3, 13) else None
    shared = shared or shared_memory.SharedMemory(name)
    there, mine, blocks = numpy.frombuffer(shared.buf, "u1"), numpy.ones(ALL, "u1"), order()

    def call_of(case: Case) -> Call:
        if not case.blocks:
            return lambda: time.sleep(WAIT_S)
        here, source = mine[: case.nbytes], there[: case.nbytes]
        if case.blocks == 1:
            return lambda: numpy.copyto(here, source)
        shape = case.blocks, case.nbytes
        rows, table = (each[: shape[0] * shape[1]].reshape(shape) for each in (mine, there))
        return lambda: numpy.take(table, blocks, axis=0, out=rows, mode="clip")

    turns(call_of)


def main() -> None:
    kind, role, *facts = sys.argv[1:]
    pin(0 if role == "use" else 1)
    if kind.startswith("rdmanet"):
        own_rdmanet(kind == "rdmanet-numpy") if role == "own" else use_rdmanet(*facts)
    elif kind == "memcpy":
        own_shared() if role == "own" else use_shared(*facts)
    elif role == "own":
        own_nixl()
    else:
        use_nixl(*facts, SLEEPS_S.get(kind, 0.0))


if __name__ == "__main__":
    main()
