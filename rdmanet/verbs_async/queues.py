"""Awaitable completion queues and queue pairs.

    async with AsyncCQ(context, 256) as cq:
        with PD(context) as pd, pd.alloc_mr(4096) as mr:
            qp = cq.create_qp(pd, QPCap(max_send_wr=64, max_recv_wr=64))
            ...                                             # connect it
            await qp.write(mr.at[:64], remote[128:192])
            before = await qp.fetch_and_add(remote.array("<u8")[3], 1)
            qp.close()

Theory
------
An `AsyncCQ` is a completion queue, its channel, and the loop to which both belong; many queue pairs may complete on
it. The compiled core (awaited.pxi) posts, polls, sleeps and resolves; this module wraps that in coroutines.

Each operation is posted when its coroutine first runs, in that order, and resolved by its own completion. Operations
that do not fit into the send or receive queue wait for their turn.

**Cancelling** an operation that waits for its turn withdraws it. A posted one cannot be withdrawn: its awaiter is
released, the operation goes on, and its buffers are kept until its completion has been polled. Closing the queue pair
ends all operations: those that are awaited fail with CompletionResetError.

**Errors.** A request that the device refuses raises OSError. One that fails later raises CompletionError, and puts a
reliable queue pair into the error state: everything else in flight fails as flushed.

An operation that completes immediately does not suspend its task, except every so often, so that a task that does
nothing else cannot starve the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Self

from rdmanet._core import (  # isort: skip
    CQ, MR, MW, PD, QP, SGE, SRQ, WC, AccessFlags, CompChannel, CompletionWatcher, Context, MWBind,
    MWBindInfo, MWType, Operation, OperationQueue, QPCap, QPInitAttr, QPType, SendFlags, SendWR, WROpcode,
    inc_rkey,
)  # fmt: skip
from rdmanet.base.closable import Closable
from rdmanet.base.notifier import Notifier, current_notifier
from rdmanet.wire.remote import RemoteArray, RemoteMemory, RemoteStruct

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Local = SGE | Buffer | Iterable[SGE | Buffer]
    """What a request sends from or receives into: an SGE, an MR or a memoryview of an MR, or several of them."""
    Remote = RemoteMemory | RemoteArray | RemoteStruct

__all__ = ["AsyncCQ", "AsyncQP", "shared"]

# Plain integers: looking up a member of an enumeration costs more than posting.
_WRITE = int(WROpcode.RDMA_WRITE)
_WRITE_WITH_IMM = int(WROpcode.RDMA_WRITE_WITH_IMM)
_SEND = int(WROpcode.SEND)
_SEND_WITH_IMM = int(WROpcode.SEND_WITH_IMM)
_READ = int(WROpcode.RDMA_READ)
_COMPARE_AND_SWAP = int(WROpcode.ATOMIC_CMP_AND_SWP)
_FETCH_AND_ADD = int(WROpcode.ATOMIC_FETCH_AND_ADD)


class AsyncCQ(Closable):
    """A completion queue that an event loop polls.

    :param cqe: entries: at least as many as the queue pairs on it may have in flight together
    :param notifier: the loop; by default the running one
    :param busy_poll: for how many seconds to poll after a completion before sleeping. None learns it from the traffic;
        0 always sleeps
    :raises RuntimeError: no known kind of event loop is running
    """

    def __init__(
        self,
        context: Context,
        cqe: int,
        *,
        notifier: Notifier | None = None,
        busy_poll: float | None = None,
        comp_vector: int = 0,
    ) -> None:
        self._closed = True  # until there is something to close
        self._notifier = current_notifier() if notifier is None else notifier
        with contextlib.ExitStack() as undo:
            self.channel = undo.enter_context(CompChannel(context))
            self.cq = undo.enter_context(CQ(context, cqe, self.channel, comp_vector))
            self._watcher = CompletionWatcher(self.cq, self._notifier, busy_poll)
            undo.pop_all()
        self._closed = False

    @property
    def notifier(self) -> Notifier:
        """The event loop."""
        return self._notifier

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def pending(self) -> int:
        """How many operations have not ended, including those that are no longer awaited."""
        return self._watcher.pending

    def create_qp(
        self,
        pd: PD,
        cap: QPCap | None = None,
        *,
        qp_type: QPType = QPType.RC,
        srq: SRQ | None = None,
        recv_cq: AsyncCQ | None = None,
    ) -> AsyncQP:
        """Create a queue pair that completes here; its receives may complete on `recv_cq`. It is not yet connected."""
        recv_cq = recv_cq or self
        qp = QP(pd, QPInitAttr(self.cq, recv_cq.cq, cap or QPCap(), qp_type, False, srq))
        try:
            return AsyncQP(qp, self, recv_cq)
        except BaseException:
            qp.close()
            raise

    # -- completions of requests that were posted otherwise: QP.post_send(), SRQ.post_recv() --

    async def wait(self) -> list[WC]:
        """Wait for completions, and return all there are, oldest first.

        Those of an AsyncQP's operations are not among them. Cancelling loses none.

        :raises ValueError: the queue is closed, or was closed meanwhile
        """
        watcher = self._watcher
        watcher.look()
        while not watcher.found:
            await watcher.wait()
            if self._closed:
                raise ValueError("this AsyncCQ is closed")
            watcher.look()
        found = list(watcher.found)
        watcher.found.clear()
        return found

    async def wait_wr(self, wr_id: object) -> WC:
        """Wait for the completion of the request with this wr_id. Other completions stay in the queue.

        Cancelling loses none.

        :raises ValueError: the queue is closed, or was closed meanwhile
        """
        watcher = self._watcher
        while True:
            watcher.look()
            for index, wc in enumerate(watcher.found):
                if wc.wr_id == wr_id:
                    del watcher.found[index]
                    return wc
            await watcher.wait()
            if self._closed:
                raise ValueError("this AsyncCQ is closed")

    def poll(self, num_entries: int = 16) -> list[WC]:
        """Return up to num_entries completions; never waits."""
        self._watcher.look()
        found = self._watcher.found
        return [found.popleft() for _ in range(min(num_entries, len(found)))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WC:
        """The next completion; the iteration ends when the queue is closed. Cancelling loses none."""
        watcher = self._watcher
        while not watcher.found:
            if self._closed:
                raise StopAsyncIteration
            watcher.look()
            if not watcher.found:
                await watcher.wait()
        return watcher.found.popleft()

    # -- the end --

    def statistics(self) -> dict[str, int]:
        """Counters since it was created: looks, sleeps, wake-ups, events, completions."""
        return self._watcher.stats()

    def close(self) -> None:
        """Stop polling, acknowledge the remaining events, and free the queue. Waiting tasks get an error.

        :raises OSError: EBUSY while queue pairs are open on it
        :raises RuntimeError: in another thread, while the loop's thread lives
        """
        if self._closed:
            return
        self._watcher.mine()
        self.cq.close()
        self._closed = True
        self._watcher.close()
        self.channel.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<AsyncCQ closed>"
        return f"<AsyncCQ of {self.cq!r}, {self.pending} operations pending>"


class AsyncQP(Closable):
    """A queue pair with awaitable operations.

    :param qp: the queue pair, in any state; closing this object closes it
    :param cq: the queue on which its sends complete
    :param recv_cq: the queue on which its receives complete; by default the same

    All operations have in common:

    - An OSError that is raised at once means that the device refused the request and did nothing; for a batch the
      message says how many requests were posted. A CompletionError, also an OSError, comes later: the operation
      failed, and a reliable queue pair is then in the error state. Operations in flight behind it end with a
      CompletionResetError, and so do all operations when the queue pair is closed.
    - Cancelling an operation that waits for its turn withdraws it. A posted one goes on, and its buffers are kept,
      until its completion has been polled; its awaiter is released.
    - TypeError, ValueError and OverflowError mean that an argument is wrong and nothing was posted; RuntimeError, that
      this is not the loop's thread.

    :raises ValueError: the queue pair was created on other completion queues, or these have no room for its depths
    """

    def __init__(self, qp: QP, cq: AsyncCQ, recv_cq: AsyncCQ | None = None) -> None:
        self.qp = qp
        self._sends = OperationQueue(qp, cq._watcher, True)
        try:
            self._receives = OperationQueue(qp, (recv_cq or cq)._watcher, False)
        except BaseException:
            self._sends.close()
            raise

    @property
    def in_flight(self) -> tuple[int, int]:
        """(sends, receives) that are posted to the device."""
        return self.qp.in_flight

    @property
    def waiting(self) -> tuple[int, int]:
        """(sends, receives) that wait for their turn."""
        return self._sends.waiting, self._receives.waiting

    # -- operations; `flags` are SendFlags such as FENCE, SOLICITED and INLINE; all operations are signaled anyway --

    async def send(self, local: Local = (), *, flags: SendFlags | int = 0) -> WC:
        """SEND the bytes of local into the peer's oldest receive.

        Memory that is in no region, such as bytes, is sent inline, if max_inline_data of the queue pair allows it.
        """
        operation = self._sends.send(_SEND, local, flags)
        return operation.result() if operation.done else await operation.wait()

    async def send_with_imm(self, local: Local, imm_data: int, *, flags: SendFlags | int = 0) -> WC:
        """SEND, with 32 bits that the peer gets as imm_data of the receive's completion."""
        operation = self._sends.send(_SEND_WITH_IMM, local, flags, imm_data)
        return operation.result() if operation.done else await operation.wait()

    async def recv(self, local: Local = ()) -> WC:
        """Receive one message into local, which is filled in order; wc.byte_len is the length of the message.

        Receives are posted in the order in which they begin. Begin them before the peer sends.

        A peer's write_with_imm() completes a receive, too, without filling it: then wc.opcode is RECV_RDMA_WITH_IMM,
        wc.byte_len is how much was written elsewhere, and local is unchanged. If you do not trust the peer, check
        wc.opcode first.
        """
        operation = self._receives.receive(local)
        return operation.result() if operation.done else await operation.wait()

    async def write(self, local: Local, remote: Remote, *, flags: SendFlags | int = 0) -> WC:
        """RDMA WRITE the bytes of local to the beginning of remote.

        When it returns, the bytes are in the peer's memory. The peer's program does not notice.

        :raises IndexError: local is longer than remote
        """
        operation = self._sends.rdma(_WRITE, local, remote, flags)
        return operation.result() if operation.done else await operation.wait()

    async def write_with_imm(
        self, local: Local, remote: Remote, imm_data: int, *, flags: SendFlags | int = 0
    ) -> WC:
        """RDMA WRITE, with 32 bits that complete a receive of the peer."""
        operation = self._sends.rdma(_WRITE_WITH_IMM, local, remote, flags, imm_data)
        return operation.result() if operation.done else await operation.wait()

    async def read(self, local: Local, remote: Remote, *, flags: SendFlags | int = 0) -> WC:
        """RDMA READ from the beginning of remote until local is full.

        :raises IndexError: local is longer than remote
        """
        operation = self._sends.rdma(_READ, local, remote, flags)
        return operation.result() if operation.done else await operation.wait()

    async def compare_and_swap(
        self, remote: Remote, compare: int, swap: int, *, flags: SendFlags | int = 0
    ) -> int:
        """Store swap in 8 bytes of the peer's memory if they equal compare; returns their old value.

        Both sides must have the same byte order.
        """
        operation = self._sends.atomic(_COMPARE_AND_SWAP, remote, compare, swap, flags)
        return operation.result() if operation.done else await operation.wait()

    async def fetch_and_add(self, remote: Remote, add: int, *, flags: SendFlags | int = 0) -> int:
        """Add to 8 bytes of the peer's memory, modulo 2 ** 64; returns their old value."""
        operation = self._sends.atomic(_FETCH_AND_ADD, remote, add % 2**64, 0, flags)
        return operation.result() if operation.done else await operation.wait()

    async def bind_mw(self, mw: MW, bind_info: MWBindInfo, *, flags: SendFlags | int = 0) -> int:
        """Bind a window, of either type, to a part of a region; returns its new key.

        The region needs AccessFlags.MW_BIND. A cancelled binding goes on: if the window is closed before it has ended,
        the binding fails, and the queue pair with it.
        """
        operation = self._bind(mw, bind_info, flags)
        operation.result() if operation.done else await operation.wait()
        return mw.rkey

    def _bind(self, mw: MW, bind_info: MWBindInfo, flags: SendFlags | int = 0) -> Operation[Any]:
        if mw.mw_type == MWType.TYPE_1:
            return self._sends.bind(mw, MWBind(bind_info, 0, SendFlags.SIGNALED | flags))
        rkey = inc_rkey(mw.rkey)
        wr = SendWR(WROpcode.BIND_MW, mw=mw, bind_info=bind_info, rkey=rkey, flags=int(flags))
        return self._sends.batch([wr])

    async def invalidate(self, rkey: int, *, flags: SendFlags | int = 0) -> None:
        """LOCAL_INV: invalidate a local key, such as that of a bound window of type 2."""
        await self.batch([SendWR(WROpcode.LOCAL_INV, invalidate_rkey=rkey, flags=int(flags))])

    async def batch(self, requests: Iterable[SendWR]) -> list[WC]:
        """Post requests as one chain, and wait for the last one; returns the completions of the signaled ones.

        Requests are SIGNALED by default. For a long chain flags=0 is cheaper: the last request is always signaled.

        :raises CompletionError: the error of the first that failed
        :raises ValueError: there are more requests than the queue holds
        """
        operation = self._sends.batch(requests)
        return operation.result() if operation.done else await operation.wait()

    @contextlib.asynccontextmanager
    async def shared(
        self,
        mr: MR,
        access: AccessFlags = AccessFlags.REMOTE_READ,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> AsyncIterator[RemoteMemory]:
        """Give the peer of this queue pair access to a part of a region for the length of the block.

        `async with qp.shared(mr, AccessFlags.REMOTE_WRITE) as remote:` binds a memory window of type 2 and yields what
        to tell the peer. Leaving the block closes the window, which revokes the access at once, without waiting: the
        peer can no longer reach the memory, and if it tries, its request and its connection fail. The same happens
        when an exception or a cancellation leaves the block, even while the window is being bound.

        :param mr: a region with MW_BIND, and with LOCAL_WRITE if the peer may write
        """
        whole = mr.to_remote(offset, length)
        mw = MW(self.qp.pd, MWType.TYPE_2)
        try:
            binding = self._bind(mw, MWBindInfo(mr, whole.address, whole.length, access))
        except BaseException:
            mw.close()
            raise
        try:
            binding.result() if binding.done else await binding.wait()
            yield RemoteMemory(whole.address, whole.length, mw.rkey)
        finally:
            binding.close_after(mw)  # a cancelled binding needs the window until it is done

    # -- the end --

    def close(self) -> None:
        """Destroy the queue pair. From then on the device does not touch the memory of its requests.

        Awaited operations fail with CompletionResetError. Closing it again does nothing.

        :raises RuntimeError: in another thread, while the loop's thread lives
        """
        self._sends.watcher.mine()
        self._receives.watcher.mine()
        self.qp.close()
        self._sends.close()
        self._receives.close()

    def __repr__(self) -> str:
        waiting = sum(self.waiting)
        return f"<AsyncQP of {self.qp!r}{f', {waiting} waiting' if waiting else ''}>"


@contextlib.asynccontextmanager
async def shared(
    pd: PD, buffer: Buffer, access: AccessFlags = AccessFlags.REMOTE_READ
) -> AsyncIterator[RemoteMemory]:
    """Give all peers of a protection domain access to memory for the length of the block.

    It registers the memory on entry and deregisters it on exit, and works on every device. Neither waits, so only the
    body of the block can be cancelled. `AsyncQP.shared` needs memory windows, but costs no registration.

    :param buffer: contiguous memory, also an MR; writable if access includes writing
    """
    if access & (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC):
        access |= AccessFlags.LOCAL_WRITE
    with pd.reg_mr(buffer, access) as mr:
        yield mr.to_remote()
