"""Measure the cost of the verbs from Python: `python -m benchmarks.verbs [--json]`.

One process connects two queue pairs of the embedded device to each other, and does RDMA WRITEs of 64 bytes. Each number
is the best of several repetitions, in microseconds per operation, so that it shows rdmanet's own work and not the noise
of other processes. If the PyPI package `ibverbs` is installed, it is measured, too, on the same device: run this by
`rdmanet soft-run -- python -m benchmarks.verbs`.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

import rdmanet.verbs as v
from rdmanet.verbs_async import AsyncCQ

SIZE = 64
CHAIN = 32
DEPTH = 128
REPETITIONS = 9
ACCESS = v.AccessFlags.LOCAL_WRITE | v.AccessFlags.REMOTE_WRITE

GOALS_US = {"one by one": 1.0, "chains of 32": 0.35, "awaited, uvloop": 6.0}
PEER_RATIO = 0.8


def best(measure: Callable[[int], float], count: int) -> float:
    """The best time, in microseconds per operation."""
    measure(count // 10)
    gc.collect()
    return min(measure(count) for _ in range(REPETITIONS)) / count * 1e6


# ---- Ours ------------------------------------------------------------------------------------------


def connect(a: v.QP, b: v.QP, context: v.Context) -> None:
    gid = next(entry for entry in context.gid_table(1) if entry.address.version == 4)
    for qp in (a, b):
        qp.to_init(access=ACCESS)
    for qp, peer in ((a, b), (b, a)):
        qp.to_rtr(peer.qp_num, gid.gid, sgid_index=gid.gid_index)
    for qp in (a, b):
        qp.to_rts()


@contextlib.contextmanager
def plain() -> Iterator[tuple[v.QP, v.CQ, v.MR]]:
    (device,) = (found for found in v.devices() if found.library.embedded_device)
    with device.open() as context, v.PD(context) as pd, v.CQ(context, 4 * DEPTH) as cq:
        init = v.QPInitAttr(cq, cq, v.QPCap(DEPTH, DEPTH, 1, 1))
        with v.QP(pd, init) as a, v.QP(pd, init) as b, pd.alloc_mr(4096, ACCESS) as mr:
            connect(a, b, context)
            yield a, cq, mr


def request(mr: v.MR) -> v.SendWR:
    return v.SendWR(v.WROpcode.RDMA_WRITE, mr.at[:SIZE], remote_addr=mr.address + 1024, rkey=mr.rkey)


def one_by_one(count: int) -> float:
    with plain() as (qp, cq, mr):
        wr, post, poll = request(mr), qp.post_send, cq.poll

        def measure(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                post(wr)
                while not poll(1):
                    pass
            return time.perf_counter() - begun

        return best(measure, count)


def chains(count: int) -> float:
    with plain() as (qp, cq, mr):
        wrs, post, poll = [request(mr)] * CHAIN, qp.post_send, cq.poll

        def measure(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count // CHAIN):
                post(wrs)
                left = CHAIN
                while left:
                    left -= len(poll(CHAIN))
            return time.perf_counter() - begun

        return best(measure, count)


def awaited(count: int) -> float:
    async def main() -> float:
        (device,) = (found for found in v.devices() if found.library.embedded_device)
        with device.open() as context, v.PD(context) as pd, AsyncCQ(context, 4 * DEPTH) as cq:
            cap = v.QPCap(DEPTH, DEPTH, 1, 1)
            with cq.create_qp(pd, cap) as a, cq.create_qp(pd, cap) as b, pd.alloc_mr(4096, ACCESS) as mr:
                connect(a.qp, b.qp, context)
                local, remote = mr.at[:SIZE], mr.to_remote(1024, SIZE)
                found = []
                for _ in range(REPETITIONS):
                    begun = time.perf_counter()
                    for _ in range(count):
                        await a.write(local, remote)
                    found.append(time.perf_counter() - begun)
                return min(found) / count * 1e6

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


# ---- The package ibverbs ---------------------------------------------------------------------------


def peer() -> dict[str, float]:
    """Its times; none if it is not installed or finds no device."""
    try:
        theirs: Any = importlib.import_module("ibverbs")
        (device,) = theirs.get_device_list()[:1]
    except (ImportError, OSError, ValueError, RuntimeError) as exc:
        print(f"not compared with the package ibverbs: {exc}", file=sys.stderr)
        return {}
    context = device.open()
    pd, cq = context.alloc_pd(), context.create_cq(4 * DEPTH)
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mr = pd.reg_mr(address, len(memory), int(ACCESS))
    sizes = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, "max_send_sge": 1, "max_recv_sge": 1}
    a, b = (pd.create_qp(theirs.QPInitAttr(send_cq=cq, recv_cq=cq, **sizes)) for _ in range(2))
    index = next(i for i in range(64) if bytes(context.query_gid(1, i).raw)[10:12] == b"\xff\xff")
    gid, port = context.query_gid(1, index), context.query_port(1)
    for qp, other in ((a, b), (b, a)):
        info = theirs.local_qp_info(other, port, gid, port=1)
        theirs.connect_rc(qp, info, port=1, sgid_index=index, access=int(ACCESS))
    wr = theirs.SendWR(
        opcode=theirs.WROpcode.RDMA_WRITE,
        sg_list=[theirs.SGE(mr, SIZE)],
        remote_addr=address + 1024,
        rkey=mr.rkey,
        send_flags=theirs.SendFlags.SIGNALED,
    )

    def single(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            a.post_send(wr)
            while not cq.poll(1):
                pass
        return time.perf_counter() - begun

    chain = [wr] * CHAIN

    def chained(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count // CHAIN):
            a.post_send(chain)
            left = CHAIN
            while left:
                left -= len(cq.poll(CHAIN))
        return time.perf_counter() - begun

    return {"one by one": best(single, 20_000), "chains of 32": best(chained, 64_000)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ours = {
        "one by one": one_by_one(50_000),
        "chains of 32": chains(160_000),
        "awaited, uvloop": awaited(20_000),
    }
    theirs = peer()
    if arguments.json:
        print(json.dumps({"rdmanet_us": ours, "ibverbs_us": theirs, "goals_us": GOALS_US}))
        return 0
    print("| RDMA WRITE of 64 B, us an operation | rdmanet | goal | ibverbs | ratio | goal |")
    print("|---|---:|---:|---:|---:|---:|")
    for case, us in ours.items():
        other = f"{theirs[case]:.2f} | {us / theirs[case]:.2f} | {PEER_RATIO}" if case in theirs else "| |"
        print(f"| {case} | {us:.2f} | {GOALS_US[case]} | {other} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
