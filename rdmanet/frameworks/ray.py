"""Ray's direct transport over RDMA: arrays that actors return go from memory to memory, and not by Ray's object store.

Importing it makes two transports known to Ray in this process: ``RDMANET`` for `numpy.ndarray`, and, where torch is
installed, ``RDMANET_TORCH`` for tensors in the processor's memory. docs/howto/ray.md is for its users.

Theory
------
Ray keeps what a method returns in the actor that has made it, and asks a transport to describe it. The description
travels by Ray to whoever wants the arrays, who fetches them: the transport is one-sided. Here each process has one
endpoint of `rdmanet.tensors.blocking`, since Ray calls from several threads and has no loop for us. An object's arrays
are registered and granted when Ray asks to describe it (`extract_tensor_transport_metadata`), and revoked when Ray says
that nobody refers to it any more (`garbage_collect`): when that returns, nobody can read them. Until then the
registration keeps their memory, also if the actor drops them. An actor that ends, or is killed, takes its grants with
it. So what it leaves in others' processes is a lost connection, and an error for whoever fetches.

A fetch is a coroutine in the endpoint's thread; `wait_fetch_complete` waits for its end. A connection has a number of
descriptors that it can use at a time, and ``ray.get()`` of a list begins all fetches at once, so they take turns
(`_Room`). Where Ray names no arrays to fetch into, memory is taken that other arrays have left (`unfilled`).

Ray makes a transport known to an actor once, when that is first used. One that Ray has started anew does not know it.
It learns by importing this module: when a metadata object arrives, or by Ray's question before each call that returns
by the transport (`actor_has_tensor_transport`).

A thread of Ray's aborts transfers whose receiver has died. Before anything else it imports what needs PyTorch, also for
a transport that does not. Where that is not installed, the exception ended the thread, and the actors of all later
transfers were kept (Ray 2.60). So it is told how to abort one of ours without (`_abort_without_torch`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import importlib
import importlib.util
import os
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any, Final

import numpy
import ray
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt import util
from ray.experimental.rdt.rdt_manager import RDTManager
from ray.experimental.rdt.rdt_store import __ray_abort_transport__
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from rdmanet import tensors
from rdmanet._core import unfilled
from rdmanet.errors import shown
from rdmanet.tensors import blocking

_AT_ONCE: Final = 64
"""Descriptors of one peer that are in use at a time; and arrays of one list. A connection can have 200."""
_ABORTED_MOST: Final = 1000

_lock = threading.Lock()
_endpoint: blocking.Endpoint | None = None
_endpoint_pid = 0


def endpoint() -> blocking.Endpoint:
    """This process's, which is opened by the first call, at the address by which Ray's other nodes reach this one."""
    global _endpoint, _endpoint_pid
    with _lock:
        if _endpoint is None or _endpoint_pid != os.getpid():
            _endpoint = blocking.open(ray.util.get_node_ip_address())
            _endpoint_pid = os.getpid()
        return _endpoint


@dataclasses.dataclass
class RdmaMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """What describes an object's arrays.

    :ivar address: of the endpoint that has them
    :ivar descriptors: of each array; empty if it has no bytes
    """

    address: bytes = b""
    descriptors: list[bytes] = dataclasses.field(default_factory=list)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclasses.dataclass
class RdmaFetch(FetchRequest):  # type: ignore[misc]
    """A fetch that has begun. Ray drops it when it wants it no more, and then it is cancelled."""

    transfer: blocking.Transfer[None] | None = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __del__(self) -> None:
        if self.transfer is not None and not self.transfer.done:
            self.transfer.cancel(wait=False)  # the collector may run this in any thread


class RdmaTransport(TensorTransportManager):  # type: ignore[misc]
    """Arrays of NumPy by RDMA, one-sided: Ray makes one in each process."""

    NAME = "RDMANET"

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never taken by what a finalizer may call
        self._objects: dict[str, tuple[RdmaMetadata, list[tensors.Memory], blocking.Endpoint]] = {}
        self._fetches: weakref.WeakSet[RdmaFetch] = weakref.WeakSet()
        self._aborted: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._rooms: weakref.WeakKeyDictionary[tensors.Peer, _Room] = weakref.WeakKeyDictionary()

    # -- what it is ------------------------------------------------------------------------------------------

    def tensor_transport_backend(self) -> str:
        return self.NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        called = actor.__ray_call__.options(concurrency_group="_ray_system").remote(_is_available)
        return bool(ray.get(called))

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    # -- at the source ---------------------------------------------------------------------------------------

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> RdmaMetadata:
        """Grant the arrays of an object, until `garbage_collect`.

        :raises ValueError: one of them is not C-contiguous, or not plain memory of the processor's
        """
        with self._lock:
            if obj_id in self._objects:  # Ray has lost the answer, and asks again
                return self._objects[obj_id][0]
            views = [self._bytes_of(array) for array in rdt_object]
            ours = endpoint()
            memories: list[tensors.Memory] = []

            async def grant(opened: tensors.Endpoint) -> list[bytes]:
                descriptors = []
                try:
                    for view in views:
                        if view.nbytes:
                            memories.append(opened.register(view))
                        descriptors.append(memories[-1].describe() if view.nbytes else b"")
                except BaseException:
                    await _withdraw(memories)
                    raise
                return descriptors

            descriptors = ours.submit(grant).wait()
            metadata = RdmaMetadata(
                [(tuple(array.shape), array.dtype) for array in rdt_object],
                "cpu" if rdt_object else None,
                ours.address(),
                descriptors,
            )
            self._objects[obj_id] = metadata, memories, ours
            return metadata

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """Revoke what was granted of an object. When this returns, nobody reads it any more.

        A finalizer may call it, in any thread and whatever that holds: so it takes no lock of this module's, and does
        not wait in the endpoint's thread.
        """
        found = self._objects.pop(obj_id, None)
        if found is None or not found[1]:
            return
        _, memories, ours = found
        try:
            withdrawing = ours.submit(lambda _: _withdraw(memories))
        except ValueError:  # the endpoint is closed, as at the interpreter's exit, with all its grants
            return
        if not ours.is_this_thread:
            withdrawing.wait()

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise NotImplementedError(f"{self.NAME} is one-sided: only the receiver does something")

    # -- at the destination ----------------------------------------------------------------------------------

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> RdmaFetch:
        """Begin to read an object's arrays, into these buffers or into new arrays."""
        metadata = tensor_transport_metadata
        if not isinstance(metadata, RdmaMetadata):
            raise TypeError(f"object {obj_id} is described by {shown(metadata)}, and not for {self.NAME}")
        with self._lock:
            if obj_id in self._aborted:
                del self._aborted[obj_id]
                raise RayDirectTransportError(f"the transfer of object {obj_id} was aborted")
        arrays = target_buffers or [self._new(*meta) for meta in metadata.tensor_meta]
        blocks = [
            (descriptor, self._bytes_of(array))
            for descriptor, array in zip(metadata.descriptors, arrays, strict=True)
            if descriptor
        ]

        async def fetch(opened: tensors.Endpoint) -> None:
            if blocks:
                peer = await opened.connect(metadata.address)
                room = self._rooms.setdefault(peer, _Room())
                for first in range(0, len(blocks), _AT_ONCE):
                    part = blocks[first : first + _AT_ONCE]
                    await room.take(len(part))
                    try:
                        await peer.read_many(part)
                    finally:
                        room.give(len(part))

        with self._lock:
            request = RdmaFetch(obj_id, arrays, endpoint().submit(fetch))
            self._fetches.add(request)
        return request

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        """The arrays, once they are there.

        :raises TimeoutError: they are not there in so many seconds (-1: any time). The fetch goes on
        :raises RayDirectTransportError: they cannot be had, or the fetch was aborted
        """
        assert isinstance(fetch_request, RdmaFetch) and fetch_request.transfer is not None
        transfer = fetch_request.transfer
        try:
            transfer.wait(None if timeout < 0 else timeout)
        except CancelledError:
            raise RayDirectTransportError(
                f"the transfer of object {fetch_request.obj_id} was aborted"
            ) from None
        except (OSError, ValueError, TypeError, IndexError) as exc:
            if isinstance(exc, TimeoutError) and not transfer.done:
                raise
            raise RayDirectTransportError(
                f"object {fetch_request.obj_id} cannot be fetched; its actor may have died: {exc!r}"
            ) from exc
        return fetch_request.tensors  # type: ignore[no-any-return]

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Read an object's arrays."""
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(
                obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
            )
        )

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """End the fetches of an object: when this returns, nothing writes to their arrays. Else, the next one fails."""
        with self._lock:
            fetches = [
                each.transfer
                for each in self._fetches
                if each.obj_id == obj_id and each.transfer is not None and not each.transfer.done
            ]
            if not fetches:
                self._aborted[obj_id] = None
                if len(self._aborted) > _ABORTED_MOST:
                    self._aborted.popitem(last=False)
        for each in fetches:
            each.cancel()

    # -- arrays ----------------------------------------------------------------------------------------------

    @staticmethod
    def _bytes_of(array: Any) -> Any:
        if array.dtype.hasobject:
            raise ValueError(f"an array of {array.dtype} is no plain memory, and does not go by RDMA")
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of the shape {array.shape} is not C-contiguous: return a copy")
        return array.reshape(-1).view(numpy.uint8) if array.nbytes else numpy.empty(0, numpy.uint8)

    @staticmethod
    def _new(shape: tuple[int, ...], dtype: Any) -> Any:
        nbytes = dtype.itemsize * int(numpy.prod(shape, dtype=object))
        if not nbytes:
            return numpy.empty(shape, dtype)
        return numpy.frombuffer(memoryview(unfilled(nbytes)), dtype).reshape(shape)


class TorchRdmaTransport(RdmaTransport):
    """The same for PyTorch's tensors in the processor's memory."""

    NAME = "RDMANET_TORCH"

    @staticmethod
    def _bytes_of(array: Any) -> Any:
        torch = importlib.import_module("torch")
        if array.device.type != "cpu":
            raise ValueError(f"a tensor on {array.device} is not in the processor's memory")
        if not array.is_contiguous():
            raise ValueError(f"a tensor of the shape {tuple(array.shape)} is not contiguous: return a copy")
        return array.detach().reshape(-1).view(torch.uint8).numpy()

    @staticmethod
    def _new(shape: tuple[int, ...], dtype: Any) -> Any:
        torch = importlib.import_module("torch")
        nbytes = dtype.itemsize * int(numpy.prod(shape, dtype=object))
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(unfilled(nbytes), dtype=dtype).reshape(shape)


class _Room:
    """How many descriptors of one peer may be in use: who wants some waits until there are enough, in turn."""

    def __init__(self) -> None:
        self._free = _AT_ONCE
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def take(self, count: int) -> None:
        if self._waiting or count > self._free:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(count)  # it was given meanwhile
                raise
        else:
            self._free -= count

    def give(self, count: int) -> None:
        self._free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)


async def _withdraw(memories: list[tensors.Memory]) -> None:
    await asyncio.gather(*(memory.close() for memory in memories))


def _is_available(actor: Any) -> bool:
    """Whether an actor can use it, and be used; Ray calls this in the actor. To get here has imported this module."""
    try:
        endpoint()
    except OSError:
        return False
    return True


class _Target(numpy.ndarray[Any, Any]):
    """An array that Ray takes as a target: of NumPy's it asks what only PyTorch's tensors know."""

    def is_contiguous(self) -> bool:
        return bool(self.flags.c_contiguous)


def target(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The same memory as an array that ``ray.experimental.set_target_for_ref()`` takes. Keep it until it is filled."""
    return array.view(_Target)


def _abort_without_torch(abort: Any) -> Any:
    """`RDTManager._abort_transport`, which goes on where it could not import what needs PyTorch."""

    @functools.wraps(abort)
    def aborting(manager: Any, failed: Any, transfers: dict[str, Any], error: Exception) -> None:
        transfer = transfers.get(failed.hex())
        if transfer is None:  # it is aborted already
            return
        try:
            abort(manager, failed, transfers, error)
        except ImportError:
            if transfer.backend != RdmaTransport.NAME:
                raise
            transfers.pop(failed.hex(), None)
            transfer.dst_actor.__ray_call__.options(concurrency_group="_ray_system_error").remote(
                __ray_abort_transport__, transfer.obj_id, transfer.communicator_meta, transfer.backend
            )

    return aborting


def register() -> None:
    """Make the transports known to Ray in this process. Importing this module has done so."""
    util._ensure_default_transports_registered()
    kinds: list[tuple[type[RdmaTransport], type]] = [(RdmaTransport, numpy.ndarray)]
    if importlib.util.find_spec("torch") is not None:  # Ray has imported it
        kinds.append((TorchRdmaTransport, importlib.import_module("torch").Tensor))
    with _lock:
        if len(kinds) == 1 and not hasattr(RDTManager._abort_transport, "__wrapped__"):
            RDTManager._abort_transport = _abort_without_torch(RDTManager._abort_transport)
        for kind, data_type in kinds:
            if kind.NAME not in util.transport_manager_info:
                util.register_tensor_transport(kind.NAME, ["cpu"], kind, data_type)


register()
