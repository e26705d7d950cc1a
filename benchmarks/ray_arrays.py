"""Compare an array from one actor of Ray's to another by RDMA with Ray's object store, and with Ray's own part.

usage: make bench-ray ARGS="[--megabytes N] [--turns N]"

All actors are on one node, and take turns:

    RDMANET            Ray's direct transport, by rdmanet: one copy for each reader, by both processes' engines
    the object store   Ray's own way: one copy into shared memory, by several threads, which readers map
    nothing            Ray's direct transport with a transport that moves nothing: what Ray itself takes for an object

The last one is the least that any direct transport can take. Where torch is installed, its tensors as well:

    RDMANET, of torch  as RDMANET
    GLOO               Ray's own transport for tensors in the processor's memory: by TCP, and both actors take part

The CPU time is that of both actors and of the driver.
"""

import argparse
import importlib
import importlib.util
import os
import resource
import statistics
import time
from typing import Any

import numpy
import ray
from ray.experimental.rdt import util
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from rdmanet.frameworks.ray import register

WARM_UP = 5
RDMA, STORE, NOTHING = "RDMANET", "the object store", "nothing"
RDMA_TORCH, GLOO = f"{RDMA}_TORCH", "GLOO"
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Nothing(TensorTransportManager):  # type: ignore[misc]
    """Moves nothing: whoever fetches is given an array that it has had for long."""

    def __init__(self) -> None:
        self._arrays: dict[Any, Any] = {}

    def tensor_transport_backend(self) -> str:
        return "NOTHING"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def get_communicator_metadata(self, *_: Any) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(self, obj_id: str, arrays: list[Any]) -> TensorTransportMetadata:
        return TensorTransportMetadata([(array.shape, array.dtype) for array in arrays], "cpu")

    def fetch_multiple_tensors(self, obj_id: str, metadata: Any, *_: Any) -> FetchRequest:
        for shape, dtype in metadata.tensor_meta:
            if (shape, dtype) not in self._arrays:
                self._arrays[shape, dtype] = numpy.ones(shape, dtype)
        return FetchRequest(obj_id, [self._arrays[meta] for meta in metadata.tensor_meta])

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        return list(fetch_request.tensors)

    def recv_multiple_tensors(self, *args: Any) -> list[Any]:
        return self.wait_fetch_complete(self.fetch_multiple_tensors(*args))

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError

    def abort_transport(self, *_: Any) -> None:
        pass

    def garbage_collect(self, *_: Any) -> None:
        pass


register()
util.register_tensor_transport("NOTHING", ["cpu"], Nothing, numpy.ndarray)  # before it is named below


class Actor:
    def __init__(self, nbytes: int) -> None:
        self._array = numpy.ones(nbytes, "u1")

    def total(self, array: Any) -> int:
        return int(array[::4096].sum())

    def cpu_s(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class RdmaActor(Actor):
    @ray.method(tensor_transport="RDMANET")
    def array(self) -> Any:
        return self._array


@ray.remote(num_cpus=0)
class StoreActor(Actor):
    def array(self) -> Any:
        return self._array


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class NothingActor(Actor):
    @ray.method(tensor_transport="NOTHING")
    def array(self) -> Any:
        return self._array


class TorchActor(Actor):
    def __init__(self, nbytes: int) -> None:
        torch = importlib.import_module("torch")
        self._array = torch.ones(nbytes, dtype=torch.uint8)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class RdmaTorchActor(TorchActor):
    @ray.method(tensor_transport=RDMA_TORCH if HAS_TORCH else None)
    def array(self) -> Any:
        return self._array


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class GlooActor(TorchActor):
    @ray.method(tensor_transport=GLOO if HAS_TORCH else None)
    def array(self) -> Any:
        return self._array


def measured(nbytes: int, turns: int) -> dict[str, tuple[list[float], float]]:
    """By kind: the seconds of each turn, and the CPU seconds of one."""
    kinds: dict[str, Any] = {RDMA: RdmaActor, STORE: StoreActor, NOTHING: NothingActor}
    if HAS_TORCH:
        kinds |= {RDMA_TORCH: RdmaTorchActor, GLOO: GlooActor}
    pairs: dict[str, Any] = {name: (kind.remote(nbytes), kind.remote(1)) for name, kind in kinds.items()}
    if HAS_TORCH:
        collective = importlib.import_module("ray.experimental.collective")
        collective.create_collective_group(list(pairs[GLOO]), backend="gloo")
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    cpu_s = dict.fromkeys(pairs, 0.0)
    for turn in range(-WARM_UP, turns):
        for name, pair in pairs.items():
            source, sink = pair
            if turn in (0, turns - 1):
                actors_s = sum(ray.get([actor.cpu_s.remote() for actor in pair]))
                cpu_s[name] += actors_s if turn else -actors_s
            began, driver_s = time.perf_counter(), time.process_time()
            total = ray.get(sink.total.remote(source.array.remote()))
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
            if 0 <= turn < turns - 1:
                cpu_s[name] += time.process_time() - driver_s
            if total != -(-nbytes // 4096):
                raise ValueError(f"{name}: {total} is wrong")
    return {name: (seconds[name], cpu_s[name] / (turns - 1)) for name in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ray_arrays", description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="N")
    parser.add_argument("--turns", type=int, default=30, metavar="N")
    args = parser.parse_args()
    nbytes = int(args.megabytes * 1e6)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's is 15: whatever else runs would be measured
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=max(200_000_000, 5 * nbytes),
        logging_level="error",
    )
    found = measured(nbytes, max(2, args.turns))
    store_s, store_cpu_s = statistics.median(found[STORE][0]), found[STORE][1]
    print(
        f"| {args.megabytes:g} MB by | median | least | times the store's speed | CPU | times the store's |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (seconds, cpu_s) in found.items():
        middle = statistics.median(seconds)
        print(
            f"| {name} | {middle * 1e3:.1f} ms | {min(seconds) * 1e3:.1f} ms | {store_s / middle:.2f} |"
            f" {cpu_s * 1e3:.1f} ms | {cpu_s / store_cpu_s:.2f} |",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
