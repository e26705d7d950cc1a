"""Tensors between processes, for programs without an event loop and for threads::

    with blocking.open() as endpoint:                           # the owner
        with endpoint.register(weights) as memory:
            send(endpoint.address(), memory.describe())         # by any channel
            compute()                                           # peers are answered meanwhile

    with blocking.open() as endpoint:                           # another process
        transfer = endpoint.connect(address).read(descriptor, into=mine)
        compute()
        transfer.wait(timeout=10)

Theory
------
Each call here is one of `rdmanet.tensors`, in a thread that the endpoint has: loop_thread.py says why, and how it ends.
Operations on a peer's memory return at once, a `Transfer`; all other calls wait. Any number of threads may call at a
time. What is an iterator is taken in the caller's thread, so no code of the program runs in the other one.

A call raises what is wrong with its use: the endpoint is closed, this is a forked child. What the operation itself
raises, `Transfer.wait` does, as the call of the same name in `rdmanet.tensors`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, TypeVar

from rdmanet import tensors
from rdmanet.stream.blocks import numbers_of
from rdmanet.stream.options import CONNECT_TIMEOUT_S
from rdmanet.tensors.descriptor import Address, Descriptor, Mode
from rdmanet.tensors.endpoint import open_endpoint
from rdmanet.tensors.loop_thread import LoopThread, Transfer

if TYPE_CHECKING:
    from rdmanet.stream.bindings import HeldOffer

    Described = Descriptor | bytes | bytearray | memoryview

__all__ = ["Endpoint", "Memory", "Notification", "Peer", "Transfer", "open"]

THREAD_NAME = "rdmanet-tensors"
_T = TypeVar("_T")


def open(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    device: str | None = None,
    connect_timeout: float | None = CONNECT_TIMEOUT_S,
    busy_poll: float | None = None,
) -> Endpoint:
    """An endpoint with a thread of its own, until `Endpoint.close`: also ``with``. See `rdmanet.tensors.open`.

    The thread is a daemon, and sleeps while there is nothing to do. What is open at the interpreter's exit is closed
    then. A forked child opens another.
    """
    opening = functools.partial(
        open_endpoint, host, port, device=device, connect_timeout=connect_timeout, busy_poll=busy_poll
    )
    return Endpoint(LoopThread(THREAD_NAME, opening))


class Endpoint:
    """Where a program's memory is found by others, and from where it reaches theirs: see `open`."""

    def __init__(self, thread: LoopThread[tensors.Endpoint]) -> None:
        self._thread = thread
        self._endpoint = thread.opened
        # These are for the thread.
        self._memories: weakref.WeakValueDictionary[tensors.Memory, Memory] = weakref.WeakValueDictionary()
        self._peers: weakref.WeakValueDictionary[tensors.Peer, Peer] = weakref.WeakValueDictionary()

    def address(self) -> bytes:
        """What another endpoint's `connect` needs to find this one. Send it by any channel."""
        return self._endpoint.address()

    def register(self, array: Any) -> Memory:
        """Memory that can be described to others, until `Memory.close`. See `rdmanet.tensors.Endpoint.register`."""
        return self._thread.call(lambda: self._memory(self._endpoint.register(array)))

    def _memory(self, memory: tensors.Memory) -> Memory:
        found = self._memories.get(memory)
        if found is None:
            found = self._memories[memory] = Memory(self._thread, memory)
        return found

    def connect(self, address: bytes | Address, timeout: float | None = None) -> Peer:
        """Another endpoint. It is the same `Peer` each time, with one connection, which all threads share.

        :param timeout: in seconds; None: as long as it takes (see ``connect_timeout`` of `open`)
        :raises TimeoutError: it was not reached by then
        """

        async def connected() -> Peer:
            peer = await self._endpoint.connect(address)
            found = self._peers.get(peer)
            if found is None:
                found = self._peers[peer] = Peer(self._thread, peer)
            return found

        return self._thread.run(connected, timeout)

    def notification(self, timeout: float | None = None) -> Notification:
        """The next one that a peer has sent with a write. Each is given once; a time-out loses none.

        :raises TimeoutError: there was none in so many seconds
        :raises EOFError: the endpoint is closed
        """

        async def said() -> Notification:
            try:
                memory, payload, peer = await anext(self._endpoint.notifications())
            except StopAsyncIteration:
                raise EOFError("this endpoint is closed") from None
            return Notification(self._memory(memory), payload, peer)

        return self._thread.run(said, timeout)

    def submit(self, call: Callable[[tensors.Endpoint], Coroutine[Any, Any, _T]]) -> Transfer[_T]:
        """Have the thread run a coroutine of the program's own, of several operations, say.

        It shares the thread with all else that the endpoint does: it must not block, nor compute for long.

        :param call: a coroutine function. It gets the endpoint of `rdmanet.tensors`
        """
        return self._thread.submit(functools.partial(call, self._endpoint))

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is in the endpoint's own thread, where no call may wait: a finalizer, say."""
        return self._thread.is_this

    def close(self) -> None:
        """End what is under way and all that is open, and then the thread. In a forked child this does nothing."""
        self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._thread.is_ending and not self._thread.is_foreign:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
            self._thread.end(wait=False)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._endpoint)[1:]}"


class Memory:
    """Registered memory of an `Endpoint`, from `Endpoint.register` until `close`: also ``with``."""

    def __init__(self, thread: LoopThread[tensors.Endpoint], memory: tensors.Memory) -> None:
        self._thread = thread
        self._memory = memory

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self._memory.nbytes

    @property
    def dtype(self) -> str | None:
        """The type of the array's items, as ``numpy.dtype.str`` has it; None: they are bytes."""
        return self._memory.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the array; None: it is none."""
        return self._memory.shape

    def describe(self, part: slice | None = None, *, mode: Mode = "r", lease: float | None = None) -> bytes:
        """Let whoever has the result read or write this memory. See `rdmanet.tensors.Memory.describe`."""
        return self._thread.call(lambda: self._memory.describe(part, mode=mode, lease=lease))

    def revoke(self, descriptor: bytes | Descriptor | None = None) -> None:
        """End what a descriptor stands for, or all that there is of this memory. Then nobody can touch it by that."""
        self._thread.run(lambda: self._memory.revoke(descriptor))

    def held(self) -> list[HeldOffer]:
        """Who has a key to it."""
        return self._thread.call(self._memory.held)

    def close(self) -> None:
        """Revoke all that is granted of it, and deregister it. Then its owner may resize or free it.

        After the endpoint's close, and in a forked child, this does nothing.
        """
        if not self._thread.is_foreign:
            with contextlib.suppress(ValueError):  # the endpoint is closed
                self._thread.run(self._memory.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking {repr(self._memory)[1:]}"


class Notification(NamedTuple):
    """What a peer has said with a write.

    :ivar memory: which has been written to
    """

    memory: Memory
    payload: bytes
    peer: Any
    """Its address."""


class Peer:
    """Another endpoint, as `Endpoint.connect` returns it. Each operation returns a `Transfer`.

    What an operation raises, `Transfer.wait` does: see `rdmanet.tensors.Peer`.
    """

    def __init__(self, thread: LoopThread[tensors.Endpoint], peer: tensors.Peer) -> None:
        self._thread = thread
        self._peer = peer

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._peer.address

    def read(self, descriptor: Described, into: Any) -> Transfer[None]:
        """RDMA READ what a descriptor says into an array of as many bytes."""
        return self._thread.submit(lambda: self._peer.read(descriptor, into))

    def write(self, array: Any, descriptor: Described, *, notify: bytes | None = None) -> Transfer[None]:
        """RDMA WRITE an array to where a descriptor says, and then tell its owner."""
        return self._thread.submit(lambda: self._peer.write(array, descriptor, notify=notify))

    def read_many(self, blocks: Iterable[tuple[Described, Any]]) -> Transfer[None]:
        """RDMA READ many pairs of a descriptor and an array, in any order: one list of chained requests."""
        listed = list(blocks)
        return self._thread.submit(lambda: self._peer.read_many(listed))

    def write_many(
        self, blocks: Iterable[tuple[Any, Described]], *, notify: bytes | None = None
    ) -> Transfer[None]:
        """RDMA WRITE many pairs of an array and a descriptor, in any order, and then tell the owner."""
        listed = list(blocks)
        return self._thread.submit(lambda: self._peer.write_many(listed, notify=notify))

    def read_rows(self, descriptor: Described, indices: Iterable[SupportsIndex], into: Any) -> Transfer[None]:
        """RDMA READ many rows of the array that a descriptor says: ``into[i]`` becomes row ``indices[i]``."""
        numbers = numbers_of(indices)
        return self._thread.submit(lambda: self._peer.read_rows(descriptor, numbers, into))

    def fetch_and_add(self, descriptor: Described, add: int) -> Transfer[int]:
        """Add to the 8 bytes that a descriptor says; `Transfer.wait` returns what was there before."""
        return self._thread.submit(lambda: self._peer.fetch_and_add(descriptor, add))

    def compare_and_swap(self, descriptor: Described, compare: int, swap: int) -> Transfer[int]:
        """Store ``swap`` if the 8 bytes equal ``compare``; `Transfer.wait` returns what was there before."""
        return self._thread.submit(lambda: self._peer.compare_and_swap(descriptor, compare, swap))

    def statistics(self) -> dict[str, int]:
        """Counters since it was connected to first."""
        return self._thread.call(self._peer.statistics)

    def close(self) -> None:
        """Close the connection. What is under way by it fails. After the endpoint's close this does nothing."""
        if not self._thread.is_foreign:
            with contextlib.suppress(ValueError):  # the endpoint is closed
                self._thread.run(self._peer.close)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._peer)[1:]}"
