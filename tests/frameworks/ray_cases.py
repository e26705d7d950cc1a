"""Ray's transport over RDMA, without Ray's processes: what Ray calls of it, in the order in which Ray does."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt import util
from ray.experimental.rdt.rdt_manager import RDTManager, RDTSource, TransferMetadata
from ray.experimental.rdt.tensor_transport_manager import TensorTransportMetadata

from rdmanet.frameworks import ray as transport_module
from rdmanet.frameworks.ray import CommunicatorMetadata, RdmaMetadata, RdmaTransport
from rdmanet.tensors import Descriptor
from tests.support.processes import Process

ROOT = Path(__file__).parents[2]
KEEPER = ROOT / "tests/tensors/keeper.py"
NOTHING = CommunicatorMetadata()
MIB = 1 << 20
LONG_S = 60


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[RdmaTransport]:
    monkeypatch.setattr(transport_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    yield RdmaTransport()
    transport_module.endpoint().close()
    transport_module._endpoint = None


@pytest.fixture
def sink(source: RdmaTransport) -> RdmaTransport:
    """In the same process, which has one endpoint."""
    return RdmaTransport()


def test_ray_knows_it():
    transport_module.register()
    found = util.get_tensor_transport_manager("RDMANET")
    assert type(found) is RdmaTransport and found.tensor_transport_backend() == "RDMANET"
    assert util.get_transport_data_type("RDMANET") is numpy.ndarray
    assert util.is_one_sided_transport("RDMANET") and found.can_abort_transport()
    assert util.device_match_transport("cpu", "RDMANET") and not util.device_match_transport(
        "cuda", "RDMANET"
    )


def test_the_bytes(source: RdmaTransport, sink: RdmaTransport):
    numbers = numpy.random.default_rng(1)
    read_only = numpy.arange(5)
    read_only.flags.writeable = False
    arrays = [
        numbers.random((300, 1000)),
        numbers.integers(0, 255, 3 * MIB + 1, "u1"),
        numpy.arange(12, dtype=">i2").reshape(3, 4),
        numpy.array("2026-11-29", "M8[s]"),
        numpy.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        numpy.empty((0, 7), "f4"),
        numpy.ones((), "c16"),
        read_only,
    ]
    described = source.extract_tensor_transport_metadata("object", arrays)
    assert source.extract_tensor_transport_metadata("object", arrays) is described
    assert described.tensor_device == "cpu" and len(described.descriptors) == len(arrays)
    came = sink.recv_multiple_tensors("object", described, NOTHING)
    for array, mine in zip(arrays, came, strict=True):
        assert (array.shape, array.dtype, array.tobytes()) == (mine.shape, mine.dtype, mine.tobytes())
        assert mine.flags.writeable
    source.garbage_collect("object", described, arrays)
    source.garbage_collect("object", described, arrays)
    with pytest.raises(RayDirectTransportError, match="RegionRevokedError"):
        sink.recv_multiple_tensors("object", described, NOTHING)
    nothing = source.extract_tensor_transport_metadata("empty", [])
    assert sink.recv_multiple_tensors("empty", nothing, NOTHING) == [] and nothing.tensor_device is None


def test_into_the_caller_s_memory(source: RdmaTransport, sink: RdmaTransport):
    theirs = numpy.arange(200_000.0)
    described = source.extract_tensor_transport_metadata("object", [theirs])
    mine = numpy.zeros(200_000)
    targets = [transport_module.target(mine)]
    assert targets[0].is_contiguous() and not transport_module.target(mine[::2]).is_contiguous()
    request = sink.fetch_multiple_tensors("object", described, NOTHING, targets)
    (came,) = sink.wait_fetch_complete(request)
    assert came is targets[0] and (mine == theirs).all()


def test_memory_stays_while_ray_holds_the_object(source: RdmaTransport, sink: RdmaTransport):
    array = numpy.full(MIB, 7)
    described = source.extract_tensor_transport_metadata("object", [array])
    del array
    gc.collect()
    others = [numpy.full(MIB, 8) for _ in range(8)]
    assert (sink.recv_multiple_tensors("object", described, NOTHING)[0] == 7).all()
    source.garbage_collect("object", described, [])
    del others
    assert not source._objects and not transport_module.endpoint()._endpoint._memories


@pytest.mark.parametrize(
    "wrong", [numpy.ones((4, 4))[:, :2], numpy.asfortranarray(numpy.ones((3, 4))), numpy.array([None])]
)
def test_what_is_refused(source: RdmaTransport, wrong: Any):
    with pytest.raises(ValueError, match="C-contiguous|no plain memory"):
        source.extract_tensor_transport_metadata("object", [numpy.ones(3), wrong])
    assert not source._objects and not transport_module.endpoint()._endpoint._memories


def test_a_description_that_is_wrong(source: RdmaTransport, sink: RdmaTransport):
    described = source.extract_tensor_transport_metadata("object", [numpy.ones(3)])
    (whole,) = described.descriptors
    beyond = bytes(msgspec.structs.replace(Descriptor.from_bytes(whole), offset=8))
    for descriptor in (beyond, whole[:-1], b"x"):
        wrong = dataclasses.replace(described, descriptors=[descriptor])
        with pytest.raises(RayDirectTransportError, match="cannot be fetched"):
            sink.recv_multiple_tensors("object", wrong, NOTHING)
    for wrong_array in (numpy.ones(4), numpy.frombuffer(bytes(24))):
        with pytest.raises(RayDirectTransportError, match="cannot be fetched"):
            sink.recv_multiple_tensors("object", described, NOTHING, [wrong_array])
    other: Any = TensorTransportMetadata([], None)
    with pytest.raises(TypeError, match="not for RDMANET"):
        sink.fetch_multiple_tensors("object", other, NOTHING)


def test_many_arrays_and_many_fetches(source: RdmaTransport, sink: RdmaTransport):
    """More than a connection can have claimed at a time."""
    arrays = [numpy.full(10, at) for at in range(220)]
    whole = source.extract_tensor_transport_metadata("whole", arrays)
    each = [source.extract_tensor_transport_metadata(f"{at}", [array]) for at, array in enumerate(arrays)]
    requests = [sink.fetch_multiple_tensors("whole", whole, NOTHING)]
    requests += [sink.fetch_multiple_tensors(f"{at}", one, NOTHING) for at, one in enumerate(each)]
    for request in requests[1::7]:
        sink.abort_transport(request.obj_id, NOTHING)
    assert [array[9] for array in sink.wait_fetch_complete(requests[0])] == list(range(220))
    for at, request in enumerate(requests[1:]):
        if at % 7 == 0 and isinstance(request.transfer._error, BaseException):
            with pytest.raises(RayDirectTransportError, match="was aborted"):
                sink.wait_fetch_complete(request)
        else:
            assert (sink.wait_fetch_complete(request)[0] == at).all()
    (room,) = sink._rooms.values()
    assert room._free == transport_module._AT_ONCE and not room._waiting


# -- what does not come ------------------------------------------------------------------------------------


class Unanswered:
    """A peer that is stopped, and what describes its memory."""

    def __init__(self) -> None:
        self.keeper = Process(sys.executable, KEEPER, env=dict(os.environ))
        facts = self.keeper.hear()
        self.metadata = RdmaMetadata(
            [((facts["nbytes"],), numpy.dtype("u1"))],
            "cpu",
            bytes.fromhex(facts["address"]),
            [bytes.fromhex(facts["descriptor"])],
        )
        self.keeper.stop()


@pytest.fixture
def unanswered() -> Iterator[Unanswered]:
    made = Unanswered()
    with made.keeper:
        yield made
        made.keeper.send_signal(signal.SIGCONT)


def under_way() -> int:
    return len(transport_module.endpoint()._thread.under_way)


def test_a_fetch_does_not_block(sink: RdmaTransport, unanswered: Unanswered):
    request = sink.fetch_multiple_tensors("object", unanswered.metadata, NOTHING)
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError):
            sink.wait_fetch_complete(request, timeout)
    transfer = request.transfer
    assert under_way() == 1 and transfer is not None
    del request  # as Ray does when ray.get() has timed out
    gc.collect()
    with pytest.raises(CancelledError):
        transfer.wait(LONG_S)
    assert not under_way() and not sink._fetches


def test_abort_ends_what_waits(sink: RdmaTransport, unanswered: Unanswered):
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            sink.recv_multiple_tensors("object", unanswered.metadata, NOTHING)
        except RayDirectTransportError as exc:
            errors.append(exc)

    thread = threading.Thread(target=receive)
    thread.start()
    while not under_way():
        pass
    sink.abort_transport("another", NOTHING)
    assert under_way()
    while not sink._fetches:
        pass
    sink.abort_transport("object", NOTHING)
    assert not under_way()
    thread.join()
    assert "was aborted" in str(errors[0])


def test_abort_before_the_fetch(source: RdmaTransport, sink: RdmaTransport):
    described = source.extract_tensor_transport_metadata("object", [numpy.ones(3)])
    sink.abort_transport("object", NOTHING)
    with pytest.raises(RayDirectTransportError, match="was aborted"):
        sink.fetch_multiple_tensors("object", described, NOTHING)
    assert len(sink.recv_multiple_tensors("object", described, NOTHING)) == 1
    for at in range(2000):
        sink.abort_transport(f"{at}", NOTHING)
    assert len(sink._aborted) == 1000


def test_a_source_that_is_killed(sink: RdmaTransport, unanswered: Unanswered):
    request = sink.fetch_multiple_tensors("object", unanswered.metadata, NOTHING)
    unanswered.keeper.close()
    with pytest.raises(RayDirectTransportError, match="its actor may have died"):
        sink.wait_fetch_complete(request, LONG_S)
    with pytest.raises(RayDirectTransportError, match="its actor may have died"):
        sink.recv_multiple_tensors("object", unanswered.metadata, NOTHING)


def test_an_object_that_is_dropped_in_the_endpoint_s_thread(source: RdmaTransport):
    """Where Python's collector may run. Nothing waits there."""
    described = source.extract_tensor_transport_metadata("object", [numpy.ones(3)])
    ours = transport_module.endpoint()

    async def drop(_: object) -> None:
        source.garbage_collect("object", described, [])

    ours.submit(drop).wait(LONG_S)
    deadline = time.monotonic() + LONG_S
    while ours._endpoint._memories and time.monotonic() < deadline:
        pass
    assert not ours._endpoint._memories


def test_an_object_that_is_dropped_while_another_is_described(
    source: RdmaTransport, monkeypatch: pytest.MonkeyPatch
):
    """Python's collector may run in the endpoint's thread while a caller's waits for that."""
    first = source.extract_tensor_transport_metadata("first", [numpy.ones(3)])
    opened = transport_module.endpoint()._endpoint
    really = opened.register

    def register(view: Any) -> Any:
        source.garbage_collect("first", first, [])
        return really(view)

    monkeypatch.setattr(opened, "register", register)
    describing = threading.Thread(
        target=source.extract_tensor_transport_metadata, args=("second", [numpy.ones(3)]), daemon=True
    )
    describing.start()
    describing.join(LONG_S)
    assert not describing.is_alive() and list(source._objects) == ["second"]


def test_an_object_that_outlives_the_endpoint(source: RdmaTransport):
    """As at the interpreter's exit, where Ray drops references after the endpoint was closed."""
    described = source.extract_tensor_transport_metadata("object", [numpy.ones(3)])
    transport_module.endpoint().close()
    source.garbage_collect("object", described, [])
    assert not source._objects


def test_pytorch_s_tensors(source: RdmaTransport):
    torch = pytest.importorskip("torch")
    transport = transport_module.TorchRdmaTransport()
    tensors = [
        torch.arange(6.0).reshape(2, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.ones(0),
    ]
    described = transport.extract_tensor_transport_metadata("object", tensors)
    for theirs, mine in zip(
        tensors, transport.recv_multiple_tensors("object", described, NOTHING), strict=True
    ):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="not contiguous"):
        transport.extract_tensor_transport_metadata("other", [torch.ones(3, 4).T])
    transport.garbage_collect("object", described, tensors)


@pytest.mark.cluster
def test_the_example():
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/ray_arrays.py", "1"],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ran.returncode == 0, ran.stderr
    assert "1 MB by RDMA: median " in ran.stdout and "1 MB by the object store: median " in ran.stdout


def test_ray_aborts_without_torch():
    """What it needs PyTorch for is no affair of this transport's."""

    class Actor:
        def __init__(self) -> None:
            self.called: list[Any] = []
            self.__ray_call__ = self

        def options(self, **_: Any) -> Any:
            return self

        def remote(self, *arguments: Any) -> None:
            self.called.append(arguments)

    class Ref:
        def hex(self) -> str:
            return "of the receiver's task"

    sink, received = Actor(), Ref()
    transfer = TransferMetadata(RDTSource.DRIVER, sink, None, received, NOTHING, "RDMANET", "object", 0.0)
    transfers = {received.hex(): transfer}
    RDTManager._abort_transport(RDTManager(), received, transfers, OSError())
    assert not transfers
    RDTManager._abort_transport(RDTManager(), received, transfers, OSError())  # as Ray does
    [(function, *arguments)] = sink.called
    assert function.__name__ == "__ray_abort_transport__" and arguments == ["object", NOTHING, "RDMANET"]
