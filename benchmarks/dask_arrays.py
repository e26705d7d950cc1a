"""Compare arrays that Dask moves by RDMA with the same over TCP.

usage: make bench-dask ARGS="[--megabytes N] [--arrays N] [--turns N] [--workers N]"

A cluster for each protocol, each with workers in processes of their own. They take turns:

    scatter       from the client to the workers, by the scheduler, as Dask does unless it is asked otherwise
    gather        back to the client, by the scheduler
    scatter*      directly to the workers (`direct=True`)
    gather*       directly from them
    between       a worker reads all that another one has

The CPU time is that of all processes: the client, the scheduler, which is in the client's, and the workers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy
from distributed import Client, LocalCluster

PROTOCOLS = ("tcp", "rdma")
WARM_UP = 2


class Side:
    """A cluster, and arrays on it."""

    def __init__(self, protocol: str, workers: int, stack: ExitStack) -> None:
        cluster = LocalCluster(
            protocol=protocol,
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            worker_dashboard_address=None,
        )
        stack.enter_context(cluster)
        self.client = stack.enter_context(Client(cluster))
        self.workers = sorted(self.client.scheduler_info()["workers"])

    def cpu_s(self) -> float:
        """Of all processes, so far."""
        return time.process_time() + sum(self.client.run(time.process_time).values())


def first_bytes(*arrays: Any) -> list[int]:
    return [int(array[0]) for array in arrays]


class Turn:
    """Each of the ways, once.

    :ivar figures: of each way its name, the seconds that it took, and the CPU seconds
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self.figures: list[tuple[str, float, float]] = []

    def run(self, arrays: list[Any]) -> None:
        client, workers = self._side.client, self._side.workers
        for mark, direct in (("", False), ("*", True)):
            placed = {"direct": direct, "hash": False, "workers": workers[:1]}
            futures = self._timed(f"scatter{mark}", client.scatter, arrays, **placed)
            back = self._timed(f"gather{mark}", client.gather, futures, direct=direct)
            for array, came in zip(arrays, back, strict=True):
                if array.nbytes != came.nbytes or array[-1] != came[-1]:
                    raise ValueError("what came back is not what was sent")
            del back, array, came
            if direct:
                self._timed("between", self._read, futures, workers[-1:])
            client.cancel(futures)
            del futures

    def _read(self, futures: list[Any], workers: list[str]) -> None:
        self._side.client.submit(first_bytes, *futures, workers=workers, pure=False).result()

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        ran, began = self._side.cpu_s(), time.perf_counter()
        result = call(*args, **options)
        took = time.perf_counter() - began
        self.figures.append((name, took, self._side.cpu_s() - ran))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.dask_arrays", description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=50.0, metavar="N", help="of each array")
    parser.add_argument("--arrays", type=int, default=4, metavar="N")
    parser.add_argument("--turns", type=int, default=10, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    args = parser.parse_args()
    nbytes = int(args.megabytes * 1e6)
    arrays = [numpy.full(nbytes, at + 1, "u1") for at in range(args.arrays)]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with ExitStack() as stack:
        sides = {protocol: Side(protocol, args.workers, stack) for protocol in PROTOCOLS}
        for number in range(-WARM_UP, args.turns):
            for protocol, side in sides.items():
                turn = Turn(side)
                turn.run(arrays)
                for name, took, used in turn.figures if number >= 0 else ():
                    found.setdefault(name, {}).setdefault(protocol, []).append((took, used))
    print(
        f"| {args.arrays} x {args.megabytes:g} MB | tcp:// | rdma:// | times as fast | CPU: tcp:// | rdma:// |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, each in found.items():
        (tcp_s, tcp_cpu_s), (rdma_s, rdma_cpu_s) = (
            [statistics.median(column) for column in zip(*each[protocol], strict=True)]
            for protocol in PROTOCOLS
        )
        print(
            f"| {name} | {tcp_s * 1e3:.0f} ms | {rdma_s * 1e3:.0f} ms | {tcp_s / rdma_s:.2f} |"
            f" {tcp_cpu_s * 1e3:.0f} ms | {rdma_cpu_s * 1e3:.0f} ms |"
        )


if __name__ == "__main__":
    main()
