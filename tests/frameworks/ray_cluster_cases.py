"""Actors of Ray that return and take arrays by RDMA: the bytes, actors that are killed, and what is left."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import conftest
import numpy
import pytest
import ray
from conftest import holdings
from ray.exceptions import RayDirectTransportError, RayError
from ray.experimental import rdt
from ray.experimental.rdt import util

from rdmanet.frameworks import ray as transport_module

pytestmark = pytest.mark.cluster

LONG_S = 120
TURNS = int(os.environ.get("RDMANET_TEST_TURNS", 3))
OBJECTS = int(os.environ.get("RDMANET_TEST_OBJECTS", 5))
"""Of each of two actors, in a turn."""

# As Ray does with programs that are no modules: actors do not import these, nor what these import.
for module in (conftest, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_worker_niceness"] = "0"  # else they are the last to run on a busy machine
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        logging_level="warning",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def array_of(number: int, nbytes: int) -> Any:
    return numpy.random.default_rng(number).integers(0, 255, nbytes, "u1")


def held() -> dict[str, Any]:
    """What this process has of objects of Ray's, and of the verbs. Sockets may be Ray's own."""
    manager: Any = util.get_tensor_transport_manager("RDMANET")
    found = holdings()
    ours = Counter({kind: count for kind, count in found["descriptors"].items() if "rdmanet" in kind})
    return {
        "objects": len(manager._objects),
        "fetches": len(manager._fetches),
        "verbs": found["objects"] + ours,
    }


class Actor:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    @ray.method(tensor_transport="RDMANET")
    def array(self, number: int, nbytes: int) -> Any:
        return array_of(number, nbytes)

    @ray.method(tensor_transport="RDMANET")
    def several(self) -> Any:
        return {"a": numpy.arange(5), "b": [numpy.ones((2, 3)), "text"]}

    def is_right(self, array: Any, number: int) -> bool:
        return bool((array == array_of(number, array.nbytes)).all())

    def held(self) -> dict[str, Any]:
        return held()

    def pid(self) -> int:
        return os.getpid()


def started(**options: Any) -> Any:
    kind: Any = ray.remote(num_cpus=0, enable_tensor_transport=True, **options)(Actor)
    return kind.remote()


def until(condition: Any) -> None:
    """Ray tells sources in its own time that nobody refers to an object any more."""
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_from_actor_to_actor_and_to_the_driver():
    source, sink = started(), started()
    refs = [source.array.remote(number, nbytes) for number, nbytes in enumerate((1, 4096, 8_000_001))]
    for number, ref in enumerate(refs):
        assert ray.get(sink.is_right.remote(ref, number), timeout=LONG_S)
    for number, array in enumerate(ray.get(refs, timeout=LONG_S)):
        assert (array == array_of(number, array.nbytes)).all()
    several = ray.get(source.several.remote(), timeout=LONG_S)
    assert (several["a"] == numpy.arange(5)).all() and several["b"][0].shape == (2, 3)
    assert several["b"][1] == "text"
    assert ray.get(source.held.remote())["objects"] == 3
    del refs, ref
    until(lambda: not ray.get(source.held.remote())["objects"])


def test_into_the_caller_s_memory():
    source = started()
    ref = source.array.remote(5, 1 << 20)
    mine = numpy.zeros(1 << 20, "u1")
    target = transport_module.target(mine)
    rdt.set_target_for_ref(ref, [target])
    came = ray.get(ref, timeout=LONG_S)
    assert came is target and (mine == array_of(5, 1 << 20)).all()


def test_an_object_of_the_driver_s():
    sink = started()
    mine = array_of(9, 100_000)
    ref = ray.put(mine, _tensor_transport="RDMANET")
    assert ray.get(sink.is_right.remote(ref, 9), timeout=LONG_S)
    assert held()["objects"] == 1
    del ref
    until(lambda: held()["objects"] == 0)


def test_an_actor_that_is_killed_and_started_anew():
    source, sink = started(max_restarts=1), started()
    lost = source.array.remote(1, 100_000)
    assert ray.get(sink.is_right.remote(lost, 1), timeout=LONG_S)
    before = ray.get(source.pid.remote())
    ray.kill(source, no_restart=False)

    def restarted() -> bool:
        try:
            return bool(ray.get(source.pid.remote(), timeout=LONG_S) != before)
        except RayError:
            return False

    until(restarted)
    with pytest.raises(RayError):
        ray.get(sink.is_right.remote(lost, 1), timeout=LONG_S)
    assert ray.get(sink.is_right.remote(source.array.remote(2, 100_000), 2), timeout=LONG_S)


def test_many_objects_and_killed_actors():
    """The one that fetches, and the one that is fetched from, have nothing more at the end."""
    sink, source = started(), started()
    assert ray.get(sink.is_right.remote(source.array.remote(0, 1000), 0), timeout=LONG_S)
    until(lambda: not ray.get(source.held.remote())["objects"])
    before = [ray.get(each.held.remote()) for each in (sink, source)]
    right = 0
    for turn in range(TURNS):
        other_source, other_sink = started(), started()
        refs = [
            each.array.remote(number, 5000) for number in range(OBJECTS) for each in (source, other_source)
        ]
        checking = [
            each.is_right.remote(ref, at // 2) for each in (sink, other_sink) for at, ref in enumerate(refs)
        ]
        if turn % 2:
            assert ray.get(checking[0], timeout=LONG_S)
            for each in (other_source, other_sink):
                ray.kill(each)
        for at, each in enumerate(checking):
            try:
                assert ray.get(each, timeout=LONG_S)
                right += 1
            except (RayDirectTransportError, RayError):
                assert turn % 2 and (at % 2 or at >= 2 * OBJECTS)
        del refs, checking, each, other_source, other_sink
    assert right >= TURNS // 2 * (4 + 1) * OBJECTS
    # A thread of Ray's refers to the actors of the last transfer.
    assert ray.get(sink.is_right.remote(source.array.remote(0, 1000), 0), timeout=LONG_S)
    until(lambda: not ray.get(source.held.remote())["objects"])

    def more() -> list[Any]:
        after = [ray.get(each.held.remote()) for each in (sink, source)]
        return [
            now["verbs"] - then["verbs"] or now["fetches"] for then, now in zip(before, after, strict=True)
        ]

    until(lambda: not any(more()))
