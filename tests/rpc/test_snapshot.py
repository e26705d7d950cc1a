"""What a method returns arrives as it was at one moment, also if its service changes it before it is read."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from net import Net, callee, idle

from rdmanet import rpc
from rdmanet._core import ReusableMemory, unfilled
from rdmanet.rpc import lending, snapshot
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.outgoing import Outgoing
from tests.support.waiting import loop_turns

LARGE = LEND_BYTES // 4
"""So many numbers of 4 bytes go by reference over RDMA."""
REUSED = 2 * LARGE


class Store(rpc.Service):
    def __init__(self) -> None:
        self.array = numpy.zeros(2 * LARGE, "f4")
        self.bytes = bytearray(LEND_BYTES)
        self.kept = rpc.Buffer(self.array)
        self.constant = bytes(LEND_BYTES)

    def _change(self) -> None:
        self.array += 1
        self.bytes[:] = b"\1" * len(self.bytes)

    async def own(self) -> numpy.ndarray:
        return self.array

    async def view(self) -> numpy.ndarray:
        return self.array.reshape(2, -1)

    async def part(self) -> numpy.ndarray:
        return self.kept.array[1:]

    async def frozen(self) -> numpy.ndarray:
        found = self.array[:]
        found.flags.writeable = False
        return found

    async def of_memoryview(self) -> numpy.ndarray:
        return numpy.frombuffer(self.bytes, "u1")

    async def bytes_view(self) -> memoryview:
        return memoryview(self.bytes).toreadonly()

    async def bytes_of_bytearray(self) -> bytes:
        return self.bytes

    async def array_as_memoryview(self) -> memoryview:
        return self.array  # type: ignore[return-value]

    async def made(self) -> numpy.ndarray:
        return numpy.zeros(LARGE, "f4") + 0

    async def made_later(self) -> numpy.ndarray:
        await loop_turns(1)
        return numpy.zeros(LARGE, "f4") + 0

    async def made_and_reshaped(self) -> numpy.ndarray:
        return numpy.zeros(LARGE, "f4").reshape(2, -1)[:].T[:].T

    async def not_contiguous(self) -> numpy.ndarray:
        return self.array.reshape(2, -1).T

    async def constants(self) -> numpy.ndarray:
        return numpy.frombuffer(self.constant, "u1")

    async def constant_memoryview(self) -> memoryview:
        return memoryview(self.constant)[:]

    async def constant_bytes(self) -> bytes:
        return self.constant

    async def lent(self) -> numpy.ndarray:
        return self.kept.array

    async def buffer(self) -> rpc.Buffer:
        return self.kept

    async def echo(self, data: numpy.ndarray) -> numpy.ndarray:
        return data

    async def echo_memoryview(self, data: memoryview) -> memoryview:
        self.echoed = data
        return data[1:]


CHANGED = [
    "own", "view", "part", "frozen", "of_memoryview", "bytes_view", "bytes_of_bytearray", "array_as_memoryview",
    "not_contiguous",
]  # fmt: skip
NOT_COPIED = [
    "made", "made_later", "made_and_reshaped", "not_contiguous", "constants", "constant_memoryview",
    "constant_bytes", "lent",
]  # fmt: skip


async def proceeding(call: Any, proceed: Callable[[], Any]) -> Any:
    return await proceed()


@pytest.mark.parametrize("interceptors", [[], [proceeding]], ids=["plain", "intercepted"])
@pytest.mark.parametrize("name", CHANGED)
async def test_what_changes_before_it_is_read(
    net: Net, name: str, interceptors: Any, monkeypatch: pytest.MonkeyPatch
):
    service = Store()
    client, server = await net.pair(service, interceptors=interceptors)

    async def found(*arguments: Any) -> Any:
        remote = await original(*arguments)
        service._change()
        changed.append(name)
        return remote

    original, changed = lending.found, []
    monkeypatch.setattr(lending, "found", found)
    got = await getattr(client, name)()
    assert bool(changed) == (net.transport == "rdma")
    assert not numpy.asarray(got if name != "bytes_of_bytearray" else bytearray(got)).any()
    await idle(server)


@pytest.mark.parametrize("transport", ["rdma"])
@pytest.mark.parametrize("interceptors", [[], [proceeding]], ids=["plain", "intercepted"])
async def test_what_is_not_copied(net: Net, interceptors: Any, monkeypatch: pytest.MonkeyPatch):
    service = Store()
    client, server = await net.pair(service, interceptors=interceptors)

    async def settled(going: Outgoing, loop: Any) -> None:
        assert going.is_settled, "it is copied"

    monkeypatch.setattr(Outgoing, "settle", settled)
    for name in NOT_COPIED:
        got = await getattr(client, name)()
        assert memoryview(got).nbytes >= LEND_BYTES, name
    async with await client.buffer() as buffer:
        assert buffer.nbytes == service.array.nbytes
    for count in (LARGE, REUSED):
        sent = numpy.arange(count, dtype="f4")
        assert (await client.echo(sent) == sent).all()
    data = memoryview(bytes(range(256)) * (REUSED * 4 // 256))
    assert await client.echo_memoryview(data) == data[1:]
    await idle(server)
    service.kept.release()


@pytest.mark.parametrize("transport", ["rdma"])
async def test_copies_count_as_arguments_do(net: Net):
    """A peer that reads none of its results cannot make the server copy them without end."""
    service = Store()
    client, server = await net.pair(service, limits=rpc.Limits(lent_bytes=service.array.nbytes - 1))
    with pytest.raises(rpc.Error, match="the limit lent_bytes is") as caught:
        await client.own()
    assert caught.value.code is rpc.Code.RESOURCE_EXHAUSTED
    assert (await client.lent()).nbytes == service.array.nbytes
    assert (await client.made()).nbytes == LEND_BYTES
    await idle(server)  # the caller has let go of what was lent, and of what was made
    service.kept.release()
    assert callee(server).share.lent_bytes == 0


def array() -> Any:
    return numpy.zeros(10)


def reusable() -> Any:
    memory = unfilled(REUSED * 4)
    assert isinstance(memory, ReusableMemory)
    return memory


def settled(value: Callable[[], Any]) -> bool:
    return snapshot.is_settled([value()])


def test_whose_memory_it_is():
    for value in (
        array,
        lambda: array().reshape(2, 5)[1:],
        lambda: numpy.frombuffer(b"12345678"),
        lambda: numpy.ndarray(1, "f8", bytearray(8)),
        lambda: numpy.asarray(memoryview(b"1234")),
        lambda: numpy.frombuffer(memoryview(reusable()).toreadonly()),
        lambda: numpy.ndarray(REUSED, "f4", reusable()),
        lambda: memoryview(b"1234")[1:],
        lambda: memoryview(reusable()).toreadonly()[1:],
        lambda: bytearray(10),
        lambda: b"1234",
    ):
        assert settled(value)


def test_memory_that_somebody_else_can_reach():
    kept: list[Any] = []

    def shared(what: Callable[[Any], Any]) -> bool:
        held = [array()]
        kept.append(what(held[0]))
        return snapshot.is_settled(held)

    for what in (
        lambda found: found,
        lambda found: found[:],
        lambda found: memoryview(found),
        lambda found: weakref.ref(found),
        lambda found: found.__dlpack__(),
        lambda found: found.__array_struct__,
        lambda found: ctypes.c_char.from_buffer(found),
        lambda found: found.ctypes,
        lambda found: rpc.Buffer(found),
    ):
        assert not shared(what)
    owner = array()
    assert not snapshot.is_settled([owner[:]])
    assert not snapshot.is_settled([owner.reshape(2, -1)[:]])
    memory = bytearray(8)
    assert not snapshot.is_settled([memory])
    assert not snapshot.is_settled([numpy.ndarray(1, "f8", memory)])
    assert not snapshot.is_settled([numpy.frombuffer(memory)])
    assert not snapshot.is_settled([memoryview(memory).toreadonly()])
    assert not snapshot.is_settled([numpy.frombuffer(memoryview(memory))])
    large = reusable()
    assert not snapshot.is_settled([numpy.ndarray(REUSED, "f4", large)])
    assert not snapshot.is_settled([memoryview(large).toreadonly()])
    assert not snapshot.is_settled([memoryview(reusable())])
