"""rdmanet.frameworks.torch, against a stand-in for the interface that it implements, which no release of torch has."""

import functools
import importlib
import pickle
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
from places import HOST

from rdmanet import tensors

MODULE = "rdmanet.frameworks.torch"
LONG = timedelta(seconds=30)


class Tensor:
    """What the transport asks of a tensor."""

    def __init__(self, array: Any, device: str = "cpu") -> None:
        self.array = array
        self.device = SimpleNamespace(type=device)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def detach(self) -> "Tensor":
        return self

    def reshape(self, _: int) -> "Tensor":
        return Tensor(self.array.reshape(-1))

    def view(self, type_: str) -> "Tensor":
        return Tensor(self.array.view(type_))

    def numpy(self) -> Any:
        return self.array


class Future:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.result: Any = None

    def set_result(self, result: Any) -> None:
        self.result = result
        self.ended.set()

    set_exception = set_result


class Transport:
    def __init__(self, device: str | None = None) -> None:
        self.device = None if device is None else SimpleNamespace(type=device)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # type: ignore[attr-defined]


class Work:
    pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported beside a torch that has the interface."""
    modules = {
        name: ModuleType(name) for name in ("torch", "torch.distributed", "torch.distributed._transport")
    }
    torch, distributed, transport = modules.values()
    vars(torch).update(__version__="2.99", uint8="u1", futures=SimpleNamespace(Future=Future))
    vars(torch).update(distributed=distributed)
    vars(distributed).update(Work=Work, _transport=transport)
    vars(transport).update(Transport=Transport)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def sides(stand_in: Any) -> Iterator[tuple[Any, Any]]:
    """Two transports of one process, which are connected to each other."""
    transport = functools.partial(stand_in.RdmaTransport, host=HOST)
    with transport("cpu") as one, transport() as other:
        assert one.supported() and not one.connected()
        assert one.connect(other.bind()) == other.connect(one.bind()) == 0
        assert one.connected() and other.connected()
        yield one, other


def test_read_and_write(sides: tuple[Any, Any]):
    one, other = sides
    theirs = numpy.arange(100, dtype="f4")
    mine = numpy.zeros(100, "f4")
    registered = other.register_memory(Tensor(theirs))
    remote = pickle.loads(pickle.dumps(registered.to_remote_buffer()))
    assert registered.to_remote_buffer() == remote and not registered.reused_registration()
    local = one.register_memory(Tensor(mine))
    assert one.read(local.to_mutable_view(), remote) == 0
    assert (mine == theirs).all()
    mine *= 2
    part = local.to_view(40, 20)
    assert part.size() == 20
    assert one.write(part, remote) == 0
    assert (theirs[:5] == mine[10:15]).all() and theirs[5] == 5


def test_work(sides: tuple[Any, Any]):
    one, other = sides
    remote = other.register_memory(Tensor(numpy.arange(1000))).to_remote_buffer()
    mine = numpy.zeros(1000, int)
    work: Any = one.read(one.register_memory(Tensor(mine)).to_mutable_view(), remote, async_op=True)
    assert isinstance(work, Work)
    done: Any = work
    assert done.wait(LONG)
    assert done.is_completed() and done.is_success() and done.exception() is None and done.result() == []
    assert done.get_future().ended.wait(LONG.seconds) and done.get_future().result == []
    assert (mine == range(1000)).all()


def test_work_that_fails(sides: tuple[Any, Any]):
    """What was described has ended with the other side's transport."""
    one, other = sides
    remote = other.register_memory(Tensor(numpy.arange(10))).to_remote_buffer()
    view = one.register_memory(Tensor(numpy.zeros(10, int))).to_mutable_view()
    other.close()
    work = one.read(view, remote, async_op=True)
    with pytest.raises(OSError):
        work.wait(LONG)
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), OSError)
    assert work.get_future().ended.wait(LONG.seconds) and isinstance(work.get_future().result, OSError)


def test_what_is_refused(sides: tuple[Any, Any], stand_in: Any):
    one, other = sides
    mine = one.register_memory(Tensor(bytes_of(10)))
    remote = other.register_memory(Tensor(bytes_of(9))).to_remote_buffer()
    with pytest.raises(ValueError, match="10 bytes do not fit into the other side's 9"):
        one.read(mine.to_mutable_view(), remote)
    with pytest.raises(ValueError, match="3 bytes at 8 are not within 10 bytes"):
        mine.to_view(8, 3)
    with pytest.raises(TypeError, match="no MutableMemoryView of memory of this transport"):
        one.read(mine.to_view(), remote)
    with pytest.raises(TypeError, match="of memory of this transport"):
        other.write(mine.to_view(), remote)
    with pytest.raises(TypeError, match="no remote buffer"):
        one.write(mine.to_view(), b"bytes")
    with pytest.raises(tensors.DescriptorError):
        one.write(mine.to_view(), stand_in.RemoteBuffer(b"bytes"))
    with pytest.raises(RuntimeError, match="connected already"):
        one.connect(other.bind())
    with pytest.raises(ValueError, match="not contiguous"):
        one.register_memory(Tensor(bytes_of(10)[::2]))
    with pytest.raises(ValueError, match="the processor's memory"):
        one.register_memory(Tensor(bytes_of(10), device="cuda"))
    with pytest.raises(ValueError, match="the processor's memory"):
        stand_in.RdmaTransport("cuda")


def test_after_the_end(stand_in: Any):
    transport = stand_in.RdmaTransport()
    mine = transport.register_memory(Tensor(bytes_of(4)))
    with pytest.raises(RuntimeError, match="not connected"):
        transport.write(mine.to_view(), stand_in.RemoteBuffer(mine._memory.describe()))
    transport.close()
    transport.close()
    assert not transport.connected()
    for call in (transport.bind, lambda: transport.connect(b""), lambda: transport.register_memory(mine)):
        with pytest.raises((RuntimeError, AttributeError)):
            call()


def test_a_torch_without_the_interface(stand_in: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setitem(sys.modules, "torch.distributed._transport", None)
    with pytest.raises(ImportError, match="torch 2.99 has no torch.distributed._transport"):
        importlib.import_module(MODULE)


def bytes_of(count: int) -> Any:
    return numpy.zeros(count, "u1")
