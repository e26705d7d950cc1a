"""PyTorch's one-sided transports over RDMA, for tensors in the processor's memory.

docs/howto/pytorch.md is for its users.

Theory
------
PyTorch has an interface for one-sided transports under discussion, `torch.distributed._transport` (its pull request
195643). No release that we know has it, so importing this module fails where torch lacks it. A transport joins two
processes: each binds, and connects to what the other has bound. It registers tensors, and describes them to the other
side, which reads and writes them.

All of that is what an endpoint of `rdmanet.tensors.blocking` does: `bind` opens one, a `RemoteBuffer` is a descriptor
of `rdmanet.tensors`, and a `Work` is a transfer in the endpoint's thread. What ends there completes the Work's future,
so who has callbacks on it runs in that thread, and must not block there. A Work's time-out ends the wait alone, as
PyTorch says. `close` waits for what is under way, and then ends what was described: nobody can touch it any more.
"""

from __future__ import annotations

import dataclasses
import threading
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Work

from rdmanet import tensors
from rdmanet.errors import shown
from rdmanet.tensors import blocking

try:
    from torch.distributed._transport import Transport
except ImportError:
    raise ImportError(
        f"torch {torch.__version__} has no torch.distributed._transport, the interface of one-sided transports: use"
        " rdmanet.tensors, which reads and writes tensors of any torch",
        name="torch.distributed._transport",
    ) from None

TIMEOUT_S: Final = 30.0


@dataclasses.dataclass(frozen=True)
class RemoteBuffer:
    """Registered memory of the other side. It can be pickled, and goes there by any channel.

    :ivar descriptor: of rdmanet.tensors
    """

    descriptor: bytes


class MemoryView:
    """Bytes of registered memory, which a transport writes to the other side."""

    def __init__(self, memory: Memory, data: memoryview) -> None:
        self._memory = memory
        self._data = data

    def size(self) -> int:
        """In bytes."""
        return self._data.nbytes


class MutableMemoryView(MemoryView):
    """Bytes of registered memory, into which a transport reads."""


class Memory:
    """A registered tensor, until the transport's close."""

    def __init__(self, transport: RdmaTransport, memory: blocking.Memory, data: memoryview) -> None:
        self._transport = transport
        self._memory = memory
        self._data = data
        self._remote: RemoteBuffer | None = None

    def to_view(self, offset: int | None = None, length: int | None = None) -> MemoryView:
        """Some of its bytes, or all, to be written to the other side."""
        return MemoryView(self, self._part(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> MutableMemoryView:
        """Some of its bytes, or all, to be read into."""
        return MutableMemoryView(self, self._part(offset, length))

    def to_remote_buffer(self) -> RemoteBuffer:
        """What lets the other side read and write all of it. Each call returns the same."""
        if self._remote is None:
            self._remote = RemoteBuffer(self._memory.describe(mode="rw"))
        return self._remote

    def reused_registration(self) -> bool:
        """Whether it was registered before: never, each call registers anew."""
        return False

    def _part(self, offset: int | None, length: int | None) -> memoryview:
        start = 0 if offset is None else offset
        end = self._data.nbytes if length is None else start + length
        if not 0 <= start <= end <= self._data.nbytes:
            raise ValueError(f"{end - start} bytes at {start} are not within {self._data.nbytes} bytes")
        return self._data[start:end]


class TransferWork(Work):  # type: ignore[misc]
    """A READ or WRITE under way.

    :param timeout: of `wait`, if that is given none
    """

    def __init__(self, transfer: blocking.Transfer[None], future: Any, timeout: float) -> None:
        super().__init__()
        self._transfer = transfer
        self._future = future
        self._timeout = timeout

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for its end, and raise what the operation does. A time-out ends the wait alone."""
        self._transfer.wait(timeout.total_seconds() or self._timeout)
        return True

    def is_completed(self) -> bool:
        return self._transfer.done

    def is_success(self) -> bool:
        return self._transfer.done and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it has failed; None if it has not, or is under way."""
        if self._transfer.done:
            try:
                self._transfer.wait()
            except BaseException as error:
                return error
        return None

    def get_future(self) -> Any:
        """A torch.futures.Future of its end. Its callbacks run in the endpoint's thread."""
        return self._future

    def result(self) -> list[Any]:
        self.wait()
        return []

    def synchronize(self) -> None:
        self.wait()


class RdmaTransport(Transport):  # type: ignore[misc]
    """One-sided READ and WRITE of tensors in the processor's memory.

    :param device: of the tensors: "cpu", or None
    :param host: an address of this host, by which the other side reaches it
    :param rdma_device: the name of an RDMA device; None: see `rdmanet.tensors.open`
    :param timeout: of `connect` and of transfers that are waited for, in seconds
    """

    def __init__(
        self,
        device: Any = None,
        *,
        host: str = "127.0.0.1",
        rdma_device: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise ValueError(
                f"rdmanet moves tensors in the processor's memory, and not those of {shown(self.device)}"
            )
        self._host = host
        self._rdma_device = rdma_device
        self._timeout = timeout
        self._lock = threading.Condition(threading.Lock())
        self._endpoint: blocking.Endpoint | None = None
        self._peer: blocking.Peer | None = None
        self._under_way = 0  # transfers
        self._is_closed = False

    @staticmethod
    def supported() -> bool:
        """Whether it can be used in this process: it can, since rdmanet has a device of its own."""
        return True

    def bind(self) -> bytes:
        """Where the other side connects to."""
        return self._opened().address()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to what the other side has bound.

        :raises RuntimeError: it is connected already
        :raises OSError: nobody is there
        """
        endpoint = self._opened()
        if self._peer is not None:
            raise RuntimeError("this transport is connected already")
        self._peer = endpoint.connect(peer_url, self._timeout if timeout is None else timeout)
        return 0

    def connected(self) -> bool:
        """Whether it has been connected, and not closed. A connection that is lost is made again when it is used."""
        return self._peer is not None and not self._is_closed

    def register_memory(self, tensor: Any) -> Memory:
        """Register a contiguous tensor.

        :raises ValueError: it is not in the processor's memory, not contiguous, or has no bytes
        """
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor on {tensor.device}: rdmanet registers those in the processor's memory"
            )
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous: give its contiguous parts, or a copy")
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # it cannot be resized while this exists
        return Memory(self, self._opened().register(data), memoryview(data))

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | TransferWork:
        """Write all of a view to the beginning of the other side's memory; returns 0, or with `async_op` a Work."""
        part, data = self._checked(local_buffer, remote_buffer, MemoryView)

        async def written(peer: tensors.Peer) -> None:
            await peer.write(data, part)

        return self._moved(written, async_op, timeout)

    def read(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | TransferWork:
        """Read the beginning of the other side's memory into all of a view; returns 0, or with `async_op` a Work."""
        part, data = self._checked(local_buffer, remote_buffer, MutableMemoryView)

        async def read(peer: tensors.Peer) -> None:
            await peer.read(part, data)

        return self._moved(read, async_op, timeout)

    def close(self) -> None:
        """Wait for what is under way, and end the transport: nobody can touch what was registered any more."""
        with self._lock:
            self._is_closed = True
            self._lock.wait_for(lambda: self._under_way == 0, self._timeout)
            endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close()  # which cancels what is left

    # -- what they have in common ------------------------------------------------------------------------------

    def _opened(self) -> blocking.Endpoint:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this transport is closed")
            if self._endpoint is None:
                self._endpoint = blocking.open(self._host, device=self._rdma_device)
            return self._endpoint

    def _checked(
        self, view: MemoryView, remote: RemoteBuffer, type_: type[MemoryView]
    ) -> tuple[tensors.Descriptor, memoryview]:
        if not isinstance(view, type_) or view._memory._transport is not self:
            raise TypeError(f"{shown(view)} is no {type_.__name__} of memory of this transport")
        if not isinstance(remote, RemoteBuffer):
            raise TypeError(f"{shown(remote)} is no remote buffer of this transport")
        described = tensors.Descriptor.from_bytes(remote.descriptor)
        if view.size() > described.nbytes:
            raise ValueError(f"{view.size()} bytes do not fit into the other side's {described.nbytes}")
        return described[: view.size()], view._data

    def _count(self, change: int) -> None:
        with self._lock:
            self._under_way += change
            self._lock.notify_all()

    def _moved(self, move: Any, async_op: bool, timeout: float | None) -> int | TransferWork:
        endpoint, peer = self._opened(), self._peer
        if peer is None:
            raise RuntimeError("this transport is not connected")
        address, future = peer.address, torch.futures.Future()

        async def carry_out(opened: tensors.Endpoint) -> None:
            try:
                await move(await opened.connect(address))
            except BaseException as error:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                raise
            else:
                future.set_result([])
            finally:
                self._count(-1)

        self._count(1)
        try:
            transfer = endpoint.submit(carry_out)
        except BaseException:
            self._count(-1)
            raise
        work = TransferWork(transfer, future, self._timeout if timeout is None else timeout)
        if async_op:
            return work
        work.wait()
        return 0
