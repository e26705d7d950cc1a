"""Arrays from one actor of Ray's to another by RDMA, and the same by Ray's object store, in turns.

usage: python examples/ray_arrays.py [MEGABYTES]

It takes ``pip install "rdmanet[ray]"``.
"""

import statistics
import sys
import time
from typing import Any

import numpy
import ray

from rdmanet.frameworks.ray import register

TURNS = 10


@ray.remote(num_cpus=0)
class Source:
    def __init__(self, nbytes: int) -> None:
        self._array = numpy.ones(nbytes, "u1")

    @ray.method(tensor_transport="RDMANET")
    def array(self) -> Any:
        return self._array


@ray.remote(num_cpus=0)
class StoreSource:
    """Another class: once an actor has used the transport, Ray pickles what it puts into its store."""

    def __init__(self, nbytes: int) -> None:
        self._array = numpy.ones(nbytes, "u1")

    def array(self) -> Any:
        return self._array


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Sink:
    def total(self, array: Any) -> int:
        return int(array[::4096].sum())


def main() -> None:
    nbytes = int(sys.argv[1] if len(sys.argv) > 1 else 100) * 1_000_000
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=max(200_000_000, 5 * nbytes),
        logging_level="error",
    )
    register()  # makes the transport known to Ray; to import the module is enough
    kinds: dict[str, tuple[Any, Any]] = {"RDMA": (Source, Sink), "the object store": (StoreSource, Sink)}
    pairs = {name: (source.remote(nbytes), sink.remote()) for name, (source, sink) in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(TURNS + 3):
        for name, (source, sink) in pairs.items():
            begin = time.perf_counter()
            total = ray.get(sink.total.remote(source.array.remote()))
            seconds[name].append(time.perf_counter() - begin)
            if total != -(-nbytes // 4096):
                raise ValueError(f"{total} is wrong")
    for name, taken in seconds.items():
        best, middle = min(taken[3:]), statistics.median(taken[3:])
        print(
            f"{nbytes / 1e6:g} MB by {name}: median {middle * 1e3:.1f} ms, best {best * 1e3:.1f} ms",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
