"""Memory of other devices: a GPU's arrays are refused by name, and a dma-buf of them is granted to peers.

There is no GPU here. The embedded device takes a sealed memfd for a dma-buf.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy  # noqa: F401  it starts a thread, which no test has left behind
import pytest

import rdmanet
from rdmanet import tensors
from rdmanet.tensors import memory as memory_module

F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4
PAGE = 4096


class OfCuda:
    __cuda_array_interface__: dict[str, Any] = {}


class OfRocm:
    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("it is not asked for its memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0


@pytest.mark.parametrize(("kind", "where"), [(OfCuda, "CUDA"), (OfRocm, "ROCm")])
async def test_arrays_of_a_gpu_are_refused_by_name(
    owner: tensors.Endpoint, peer: tensors.Peer, kind: type, where: str
):
    says = rf"^{{}}: '{kind.__name__}' is in a GPU's memory \({where}\).*register a tensors.DmaBuf"
    with pytest.raises(TypeError, match=says.format(r"register\(\)")):
        owner.register(kind())
    async with owner.register(bytearray(4)) as memory:
        with pytest.raises(TypeError, match=says.format("read")):
            await peer.read(memory.describe(), into=kind())
        with pytest.raises(TypeError, match=says.format("write")):
            await peer.write(kind(), memory.describe(mode="w"))


class OfNoMemory:
    def __dlpack__(self, **options: object) -> object:
        raise BufferError("it has none")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("its device is no device of DLPack's")


async def test_an_array_that_does_not_say_where_it_is(owner: tensors.Endpoint):
    """As PyTorch's tensors without memory do."""
    with pytest.raises(TypeError, match="'OfNoMemory' has no memory that NumPy can use"):
        owner.register(OfNoMemory())


@contextmanager
def mapped_descriptor(nbytes: int) -> Iterator[tuple[int, int, mmap.mmap]]:
    """What the embedded device takes for a dma-buf; the address at which it is mapped, and its memory."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
        with mmap.mmap(fd, nbytes) as memory:
            probe = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(probe)
            del probe
            yield fd, address, memory
    finally:
        os.close(fd)


@pytest.mark.embedded_only("others take a real dma-buf")
@pytest.mark.not_on_iwarp("has no memory windows")
async def test_a_dma_buf_is_granted(owner: tensors.Endpoint, peer: tensors.Peer):
    with mapped_descriptor(4 * PAGE) as (fd, address, theirs):
        theirs[PAGE : PAGE + 6] = b"secret"
        other = os.dup(fd)
        memory = owner.register(tensors.DmaBuf(other, 2 * PAGE, PAGE, address + PAGE))
        os.close(other)
        assert (memory.nbytes, memory.dtype, memory.shape) == (2 * PAGE, None, None)
        assert "8192 bytes" in repr(memory.registered)
        whole = tensors.Descriptor.from_bytes(memory.describe(mode="rw"))
        mine = bytearray(6)
        await peer.read(whole[:6], into=mine)
        assert mine == b"secret"
        await peer.write(b"written", whole[100:107])
        assert theirs[PAGE + 100 : PAGE + 107] == b"written"
        part = memory.describe(slice(100, 103))
        await peer.read(part, into=memoryview(mine)[:3])
        assert mine == b"wriret"
        beyond = msgspec.structs.replace(whole, offset=2 * PAGE - 3, nbytes=6)
        with pytest.raises(IndexError):
            await peer.read(beyond, into=mine)
        await memory.revoke()
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.read(whole[:6], into=mine)
        await memory.close()
        assert not owner._beside
    assert peer.statistics()["connections"] == 1


@pytest.mark.embedded_only("others take a real dma-buf")
async def test_operations_of_our_own_do_not_take_it_for_an_array(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    """Its address may be that of memory of ours. An endpoint that ends takes it along."""
    with mapped_descriptor(PAGE) as (fd, address, mine):
        async with owner.register(bytearray(b"text")) as memory:
            user.register(tensors.DmaBuf(fd, PAGE, 0, address))
            await peer.read(memory.describe(), into=memoryview(mine)[:4])
        assert mine[:4] == b"text"


async def test_what_is_no_dma_buf(owner: tensors.Endpoint):
    """Its owner is told, and not a peer that claims it."""
    for wrong in ((0,), (PAGE, -1), (PAGE, 0, -1), (PAGE, 1 << 64), (1 << 63,), (PAGE, 0, (1 << 62) - 1)):
        with pytest.raises(ValueError, match=f"a dma-buf of {wrong[0]} bytes from offset"):
            owner.register(tensors.DmaBuf(0, *wrong))
    for wrong in ((1.5,), (PAGE, "1")):
        with pytest.raises(TypeError):
            owner.register(tensors.DmaBuf(0, *wrong))  # type: ignore[arg-type]
    with pytest.raises(OSError):
        owner.register(tensors.DmaBuf(-1, PAGE))


async def test_a_device_that_cannot_confine_a_peer(
    owner: tensors.Endpoint,
    peer: tensors.Peer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(memory_module, "has_windows", lambda engine: False)
    with mapped_descriptor(PAGE) as (fd, address, _):
        async with owner.register(tensors.DmaBuf(fd, PAGE, 0, address)) as memory:
            with pytest.raises(rdmanet.RdmaError, match="cannot put this memory on offer; its log says why"):
                await peer.read(memory.describe(), into=bytearray(PAGE))
    assert "no memory windows that confine a peer" in caplog.text
    assert peer.statistics()["connections"] == 1
