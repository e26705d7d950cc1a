"""Completion queues and queue pairs for programs that `await`.

    async with AsyncCQ(context, 256) as cq:
        with PD(context) as pd, pd.alloc_mr(4096) as mr:
            qp = cq.create_qp(pd, QPCap(max_send_wr=64, max_recv_wr=64))
            ...                                             # connect it
            await qp.write(mr.at[:64], remote[128:192])
            before = await qp.fetch_and_add(remote.array("<u8")[3], 1)
            qp.close()

Theory
------
One `AsyncCQ` is a completion queue, its channel, and the loop that both belong to; many queue pairs may complete
on it. The work is done in the compiled core (operation.pxi): posting, watching, sleeping, resolving. What is here
gives it the shape of coroutines.

Each operation is posted when its coroutine first runs, in the order in which they run, and resolved by its own
completion. What does not fit into the send or receive queue waits for its turn.

**Cancelling** an operation that waits for its turn takes it back. One that is posted cannot be taken back: the
waiter is let go, the operation goes on, and its buffers are kept until its completion has been polled. Closing
the queue pair ends all of it: what was awaited fails with CompletionResetError.

**Errors.** A request that the device refuses raises OSError. One that fails later raises CompletionError, and a
reliable queue pair is then in the error state: all else in flight fails as flushed.

An operation that the device has done at once does not suspend its task, but every so often: a loop that does
nothing else cannot starve the others.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

from rdmanet._core import (
    CQ,
    MR,
    MW,
    PD,
    QP,
    SGE,
    SRQ,
    WC,
    AccessFlags,
    AsyncEvent,
    BufferPool,
    CompChannel,
    CompletionWatcher,
    Context,
    MWBind,
    MWBindInfo,
    MWType,
    Operation,
    OperationQueue,
    PooledBuffer,
    QPCap,
    QPInitAttr,
    QPType,
    SendFlags,
    SendWR,
    WROpcode,
    inc_rkey,
)
from rdmanet.closing import Closing
from rdmanet.device_events import EventFeed
from rdmanet.notifier import Future, Home, Notifier, current_notifier, wake
from rdmanet.remote import RemoteArray, RemoteMemory, RemoteStruct

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Local = SGE | Buffer | Iterable[SGE | Buffer]
    """What a request sends from or receives into: SGEs, MRs and memoryviews of MRs, or one of them."""
    Remote = RemoteMemory | RemoteArray | RemoteStruct

__all__ = ["AsyncCQ", "AsyncQP", "DeviceEvents", "shared"]

# Bare numbers: looking up a member of an enumeration costs more than posting does.
_WRITE = int(WROpcode.RDMA_WRITE)
_WRITE_WITH_IMM = int(WROpcode.RDMA_WRITE_WITH_IMM)
_SEND = int(WROpcode.SEND)
_SEND_WITH_IMM = int(WROpcode.SEND_WITH_IMM)
_READ = int(WROpcode.RDMA_READ)
_COMPARE_AND_SWAP = int(WROpcode.ATOMIC_CMP_AND_SWP)
_FETCH_AND_ADD = int(WROpcode.ATOMIC_FETCH_AND_ADD)


class AsyncCQ(Closing):
    """A completion queue that is watched by an event loop.

    :param cqe: entries: at least as many as the queue pairs on it may have in flight together
    :param notifier: the loop; by default the one that runs
    :param busy_poll: how many seconds to watch after a completion, at most, before sleeping. None learns it from
        the traffic, 0 always sleeps
    :raises RuntimeError: no loop runs that is known
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
        """How many operations have not ended, those included that nobody awaits any more."""
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
        """A queue pair that completes here, or its receives on another queue; it is yet to be connected."""
        recv_cq = recv_cq or self
        qp = QP(pd, QPInitAttr(self.cq, recv_cq.cq, cap or QPCap(), qp_type, False, srq))
        try:
            return AsyncQP(qp, self, recv_cq)
        except BaseException:
            qp.close()
            raise

    # -- completions of requests that were posted by other means: QP.post_send(), SRQ.post_recv() --

    async def wait(self) -> list[WC]:
        """The completions that are there, at least one, oldest first.

        Those of an AsyncQP's operations are not among them. Cancelling loses none.

        :raises ValueError: the queue is closed, or was so meanwhile
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
        """The completion of the request with this wr_id; the others stay for whoever waits for them.

        Cancelling loses none.

        :raises ValueError: the queue is closed, or was so meanwhile
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
        """Up to num_entries completions that are there now; never waits."""
        self._watcher.look()
        found = self._watcher.found
        return [found.popleft() for _ in range(min(num_entries, len(found)))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WC:
        """The next completion; it ends when the queue is closed. Cancelling loses none."""
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
        """Counters since it was made: looks, sleeps, wake-ups, events, completions."""
        return self._watcher.stats()

    def close(self) -> None:
        """Stop watching, acknowledge what is left to acknowledge, and free the queue. Who waits is told.

        :raises OSError: EBUSY while queue pairs are open on it
        :raises RuntimeError: in another thread, while the loop's lives
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
        return (
            f"<AsyncCQ of {self.cq.context.name}, {self.cq.cqe} entries, {self.pending} operations pending>"
        )


class AsyncQP(Closing):
    """A queue pair whose operations are awaited.

    :param qp: the queue pair, in any state; closing this closes it
    :param cq: that its sends complete on
    :param recv_cq: that its receives complete on, by default the same

    What all operations have in common:

    - An OSError that is raised at once: the device refused the request, and nothing was done; of a batch the message
      says how many requests were posted. A CompletionError, which is one too, comes later: the operation failed, and a
      reliable queue pair is then in the error state. What is in flight behind it ends with a CompletionResetError; so
      does all when the queue pair is closed.
    - Cancelling one that waits for its turn takes it back. One that is posted goes on, and its buffers are kept, until
      its completion has been polled; who awaited it is let go.
    - TypeError, ValueError, OverflowError: an argument makes no sense, and nothing was posted. RuntimeError: this is
      another thread than the loop's.

    :raises ValueError: the queue pair was made on other completion queues, or theirs have no room for its depths
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
        """(sends, receives) that are on the device."""
        return self.qp.in_flight

    @property
    def waiting(self) -> tuple[int, int]:
        """(sends, receives) that wait for their turn."""
        return self._sends.waiting, self._receives.waiting

    # -- operations; `flags` are SendFlags such as FENCE, SOLICITED and INLINE, each gives a completion anyway --

    async def send(self, local: Local = (), *, flags: SendFlags | int = 0) -> WC:
        """SEND what is in local: the peer's oldest receive takes it.

        Memory of no region (bytes, say) is sent inline, if it is no more than the queue pair's max_inline_data.
        """
        operation = self._sends.send(_SEND, local, flags)
        return operation.result() if operation.done else await operation.wait()

    async def send_with_imm(self, local: Local, imm_data: int, *, flags: SendFlags | int = 0) -> WC:
        """SEND, and 32 bits that the receive's completion has as imm_data."""
        operation = self._sends.send(_SEND_WITH_IMM, local, flags, imm_data)
        return operation.result() if operation.done else await operation.wait()

    async def recv(self, local: Local = ()) -> WC:
        """Receive one message into local, which fills in order; wc.byte_len says how much of it.

        Receives are posted in the order in which they begin. Begin them before the peer sends.

        A peer's write_with_imm() completes one, too, without filling it: then wc.opcode is RECV_RDMA_WITH_IMM,
        wc.byte_len is how much was written elsewhere, and what lies in local is what was there before. If the peer is
        not to be trusted, look at wc.opcode first.
        """
        operation = self._receives.receive(local)
        return operation.result() if operation.done else await operation.wait()

    async def write(self, local: Local, remote: Remote, *, flags: SendFlags | int = 0) -> WC:
        """RDMA WRITE what is in local to the beginning of remote.

        When it returns, the bytes are in the peer's memory, whose program does not notice.

        :raises IndexError: local is longer than remote
        """
        operation = self._sends.rdma(_WRITE, local, remote, flags)
        return operation.result() if operation.done else await operation.wait()

    async def write_with_imm(
        self, local: Local, remote: Remote, imm_data: int, *, flags: SendFlags | int = 0
    ) -> WC:
        """RDMA WRITE, and 32 bits that complete a receive of the peer's."""
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
        """Store swap in 8 bytes of the peer's if they equal compare; returns what was there before.

        The number is in the peer's byte order, which has to be ours.
        """
        operation = self._sends.atomic(_COMPARE_AND_SWAP, remote, compare, swap, flags)
        return operation.result() if operation.done else await operation.wait()

    async def fetch_and_add(self, remote: Remote, add: int, *, flags: SendFlags | int = 0) -> int:
        """Add to 8 bytes of the peer's, modulo 2 ** 64; returns what was there before."""
        operation = self._sends.atomic(_FETCH_AND_ADD, remote, add % 2**64, 0, flags)
        return operation.result() if operation.done else await operation.wait()

    async def bind_mw(self, mw: MW, bind_info: MWBindInfo, *, flags: SendFlags | int = 0) -> int:
        """Bind a window, of either type, to a part of a region; returns its new key.

        The region needs AccessFlags.MW_BIND. A binding that is cancelled goes on: closing the window before
        it has ended makes it fail, and the queue pair with it.
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
        """LOCAL_INV: make a key of ours, such as a bound window's of type 2, invalid."""
        await self.batch([SendWR(WROpcode.LOCAL_INV, invalidate_rkey=rkey, flags=int(flags))])

    async def batch(self, requests: Iterable[SendWR]) -> list[WC]:
        """Post requests as one chain, and wait for the last: the completions of those that have one.

        Requests are SIGNALED by default; of a long chain it is cheaper to have flags=0 for all of them: the last one
        always is.

        :raises CompletionError: of the first that failed
        :raises ValueError: they are more than the queue holds
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
        """A part of a region for this queue pair's peer, and only while the block lasts.

        `async with qp.shared(mr, AccessFlags.REMOTE_WRITE) as remote:` binds a memory window of type 2 and gives what
        the peer has to be told. Leaving the block closes the window, which revokes it, at once and without waiting:
        nothing that the peer does reaches the memory any more, and what it tries fails, on its side and with its
        connection. An exception leaves the block, too, and so does being cancelled, even while the window is bound.

        :param mr: has MW_BIND, and LOCAL_WRITE if the peer may write
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
            binding.close_after(mw)  # one that was cancelled while it is bound is needed until it is

    # -- the end --

    def close(self) -> None:
        """Destroy the queue pair: the device touches no memory of its requests any more.

        What is awaited fails with CompletionResetError. Doing it again does nothing.

        :raises RuntimeError: in another thread, while the loop's lives
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
    """Memory for all peers of a protection domain, and only while the block lasts.

    Registers it on the way in and unregisters it on the way out, on every device. Neither waits, so cancelling can
    only be of what the block awaits, and leaves it. `AsyncQP.shared` needs windows, and costs no registration.

    :param buffer: anything contiguous, an MR too; writable if access includes writing
    """
    if access & (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC):
        access |= AccessFlags.LOCAL_WRITE
    with pd.reg_mr(buffer, access) as mr:
        yield mr.to_remote()


class AsyncBufferPool(BufferPool):
    """A BufferPool whose buffers can be waited for, in turn: `with await pool.get(100) as buffer:`.

    It belongs to the thread of its event loop, like all here. Parameters are BufferPool's.
    """

    def __init__(
        self,
        pd: PD,
        buffer_bytes: int,
        count: int,
        *,
        huge_pages: bool | Literal["try"] = False,
        notifier: Notifier | None = None,
    ) -> None:
        self._waiting: collections.deque[Future] = collections.deque()
        self._promised = 0  # buffers that those who were woken are about to take
        self._home = Home()
        self._notifier = current_notifier() if notifier is None else notifier
        super().__init__(pd, buffer_bytes, count, huge_pages=huge_pages)

    async def get(self, nbytes: int | None = None) -> PooledBuffer:
        """acquire(), when there is one; who came first is served first. Cancelling takes none.

        :raises ValueError: there can be none of that length, or the pool is closed
        :raises RuntimeError: in another thread than the loop's
        """
        self._home.check(self)
        self.fits(nbytes)
        place = self._waiting.append
        while self.available <= self._promised:
            future = self._notifier.create_future()
            place(future)
            place = self._waiting.appendleft  # if acquire() is quicker than who was woken
            try:
                await future
            except BaseException:
                if future in self._waiting:
                    self._waiting.remove(future)
                else:
                    self._promised -= 1
                    self._freed()
                raise
            self._promised -= 1
            self.fits(nbytes)
        return self.acquire(nbytes)

    def _freed(self) -> None:
        while self._waiting and self.available > self._promised:
            self._promised += 1
            wake([self._waiting.popleft()])


class DeviceEvents(Closing):
    """The asynchronous events of a device, its ports, queues and queue pairs, as an async iterator.

        async for event in DeviceEvents(context): ...

    It has all that come after it was made, and so has each other one; of one that is not iterated over for long, the
    last 1024. Nothing but these may read the context's events meanwhile. It ends when it is closed.
    """

    def __init__(self, context: Context, *, notifier: Notifier | None = None) -> None:
        self.context = context
        self._notifier = current_notifier() if notifier is None else notifier
        self._home = Home()
        self._feed = EventFeed(context)
        self._waiting: list[Future] = []
        self._listening = False
        self._closed = False

    def _listen(self, on: bool) -> None:
        if on is not self._listening:
            for fd in self._feed.fds:
                if on:
                    self._notifier.add_reader(fd, self._readable)
                else:
                    self._notifier.remove_reader(fd)
        self._listening = on

    def _readable(self) -> None:
        # A descriptor stays readable until somebody takes the event.
        self._listen(False)
        wake(self._waiting)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncEvent:
        """The next event. Cancelling loses none."""
        self._home.check(self)
        while not self._closed:
            event = self._feed.next()
            if event is not None:
                return event
            future = self._notifier.create_future()
            self._waiting.append(future)
            self._listen(True)
            await future
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop; who waits is told. The context stays open."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._listen(False)
        self._feed.close()
        wake(self._waiting)
