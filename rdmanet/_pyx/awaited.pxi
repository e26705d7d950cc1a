# Awaited verbs: who posts an Operation (operation.pxi), and who watches for its completion.
#
# An OperationQueue is one side of a queue pair. What does not fit into the device's queue waits here for
# its turn, so a full queue is a delay and not an error.
#
# A CompletionWatcher is a Watcher (watcher.pxi) of one completion queue, for as long as somebody awaits something of
# it. What is particular to it: after a request is posted it looks at once, since the embedded device has often done it
# by then; but only so many times in a row, lest a task that never has to wait keep the loop from all others, and not
# behind others in the queue, whose tasks have to hear of their ends first.
#
# Completions of requests that were posted by other means wait for wait(). The event loop is whatever has
# the four methods of a Notifier (verbs_async/). All belongs to the thread in which it was made.

cdef enum:
    FEW_WAITING = 64
    EAGER_LOOKS = 16


cdef object memory_of(object remote):
    """The RemoteMemory that an argument is, or is in."""
    load_remote()
    try:
        return remote.memory
    except AttributeError:
        hint = "; MR.to_remote() tells what a peer needs" if isinstance(remote, MR) else ""
        raise TypeError(
            f"{shown(remote)} is no remote memory: a RemoteMemory, or an array or a structure in one{hint}") from None


@cython.final
@cython.no_gc_clear     # as its operations
cdef class OperationQueue:
    """The send queue, or the receive queue, of a queue pair whose requests are awaited.

    :param watcher: of the queue's completion queue
    :raises ValueError: the completion queue is another, or too small for it
    """

    cdef readonly QP qp
    cdef readonly CompletionWatcher watcher
    cdef bint sends
    cdef Py_ssize_t depth
    cdef uint32_t max_inline
    cdef uint32_t qp_num
    cdef object backlog
    cdef Py_ssize_t many        # in the backlog: time to look for those that were cancelled
    cdef object __weakref__
    cdef list cells             # 8 bytes each, for the answers of atomic operations
    cdef list cell_mrs
    cdef bint closed

    def __cinit__(self, QP qp not None, CompletionWatcher watcher not None, bint sends):
        cdef CQ cq = qp.send_cq if sends else qp.recv_cq
        qp.usable()
        watcher.usable()
        if cq is not watcher.cq:
            raise ValueError(f"{qp!r} has another completion queue than {watcher.cq!r}")
        self.qp, self.watcher, self.sends = qp, watcher, sends
        self.depth = qp.granted.max_send_wr if sends else qp.granted.max_recv_wr
        if not sends and qp.srq is not None:
            self.depth = 0
        self.max_inline = qp.granted.max_inline_data
        self.qp_num = qp.ptr.qp_num
        self.many = FEW_WAITING
        if cq.reserved + self.depth > cq.ptr.cqe:
            raise ValueError(f"{self.depth} requests of {qp!r} do not fit in {cq!r}, "
                             f"where {cq.reserved} entries are taken")
        self.backlog = collections.deque()
        self.cells, self.cell_mrs = [], []
        cq.reserved += self.depth
        if self.table().queues is None:
            self.table().queues = []
        self.table().queues.append(weakref.ref(self))

    def __del__(self):
        if self.closed or self.backlog is None:
            return
        # Who awaited is forgotten too, or he would hold the AsyncQP that holds this: there is nobody to be told.
        for entry in [*self.backlog, *self.table().ring[::2]]:
            if type(entry) is Operation and (<Operation>entry).queue is self:
                (<Operation>entry).future = None
        self.close()

    cdef int emptied(self) except -1:
        """The queue pair was reset, or is gone: what waits for its turn ends with what is in flight."""
        cdef Operation operation
        while self.backlog:
            operation = self.backlog.popleft()
            operation.lost()
        return 0

    @property
    def waiting(self):
        """How many operations wait for a place in the queue."""
        cdef Operation operation
        cdef Py_ssize_t n = 0
        for operation in self.backlog:
            n += not operation.given_up()
        return n

    @property
    def in_flight(self):
        """How many requests are on the device."""
        return self.table().count()

    def close(self):
        """After the queue pair was closed: end what waits for its turn, and give back what was reserved."""
        cdef Operation operation
        cdef MR mr
        if self.closed:
            return
        self.closed = True
        self.emptied()
        self.watcher.cq.reserved -= self.depth
        queues = self.table().queues
        queues[:] = [reference for reference in queues if reference() not in (self, None)]
        self.cells.clear()
        for mr in self.cell_mrs:
            mr.close()

    # ---- What can be asked for ----

    def receive(self, sg_list):
        """RECV."""
        cdef RecvWR wr = RecvWR(sg_list)
        if wr.elements.unregistered:
            raise ValueError(f"{wr!r}: the device cannot write to memory that is in no region (pd.reg_mr())")
        return self.start(operation_of([wr], False))

    def send(self, int opcode, sg_list, int flags, uint32_t imm_data=0):
        """SEND or SEND_WITH_IMM."""
        return self.start(operation_of([awaited_send(opcode, sg_list, flags, imm_data, self.max_inline)], False))

    def rdma(self, int opcode, sg_list, remote, int flags, uint32_t imm_data=0):
        """RDMA_WRITE, RDMA_WRITE_WITH_IMM or RDMA_READ.

        :raises IndexError: the elements are longer than the remote memory
        """
        cdef SendWR wr = awaited_send(opcode, sg_list, flags, imm_data, self.max_inline)
        cdef uint64_t length
        if type(remote) is not RemoteMemory:
            remote = memory_of(remote)
        length = remote.length
        if wr.elements.total > length:
            raise IndexError(f"{wr.elements.total} bytes are more than {remote!r} has")
        wr.c.wr.rdma.remote_addr = remote.address
        wr.c.wr.rdma.rkey = remote.rkey
        return self.start(operation_of([wr], False))

    def atomic(self, int opcode, remote, compare_add, swap, int flags):
        """ATOMIC_CMP_AND_SWP or ATOMIC_FETCH_AND_ADD.

        :raises IndexError: the remote memory is shorter than 8 bytes
        :raises ValueError: its address is not a multiple of 8
        """
        cdef SendWR wr
        cdef MR mr
        cdef size_t offset
        cdef Operation operation
        remote = memory_of(remote)
        if remote.length < 8:
            raise IndexError(f"an atomic operation is on 8 bytes, {remote!r} has fewer")
        if remote.address % 8:
            raise ValueError(f"an atomic operation needs an address that is a multiple of 8: {remote!r}")
        self.usable()
        if not self.cells:
            mr = self.qp.pd.alloc_mr(PAGE)
            self.cell_mrs.append(mr)
            self.cells.extend([(mr, offset) for offset in range(0, PAGE, 8)])
        mr, offset = self.cells[-1]
        wr = awaited_send(opcode, SGE(mr, offset, 8), flags, 0, self.max_inline)
        wr.c.wr.atomic.remote_addr = remote.address
        wr.c.wr.atomic.rkey = remote.rkey
        wr.c.wr.atomic.compare_add = PyNumber_Index(compare_add)
        wr.c.wr.atomic.swap = PyNumber_Index(swap)
        operation = operation_of([wr], False)
        operation.cell_mr, operation.cell = self.cells.pop()    # start() gives it back
        return self.start(operation)

    def bind(self, MW mw not None, bind):
        """A window of type 1.

        :param bind: an MWBind; its wr_id means nothing
        """
        cdef Operation operation = Operation.__new__(Operation)
        from dataclasses import replace
        operation.binding = (mw, replace(bind, wr_id=operation))
        return self.start(operation)

    def batch(self, requests):
        """Requests made elsewhere, as one chain.

        :raises ValueError: there are none, or more than fit in the queue
        """
        cdef list chain = list(requests)
        cdef SendWR wr
        if not chain:
            raise ValueError("a batch of no requests")
        for wr in chain:    # now, though they may be posted later
            check_send(self.qp, wr)
        return self.start(operation_of(chain, True))

    # ---- Posting ----

    cdef Operation start(self, Operation operation):
        cdef CompletionWatcher watcher = self.watcher
        cdef Py_ssize_t n = operation.count()
        self.usable()
        if n > self.depth:
            if not self.sends and self.qp.srq is not None:
                raise ValueError(f"{self.qp!r} receives from its srq: SRQ.post_recv(), and AsyncCQ.wait_wr()")
            raise ValueError(f"{n} requests at once are more than the {self.depth} that {self.qp!r} holds")
        operation.queue = self
        watcher.pending += 1
        try:
            if self.backlog or not self.post(operation):
                if not self.backlog:
                    watcher.backlogged.append(self)
                self.backlog.append(operation)
                if len(self.backlog) > self.many:
                    self.forget_cancelled()
        except BaseException:
            operation.leave()
            raise
        if self.sends and self.table().count() == n and watcher.looks < EAGER_LOOKS:
            watcher.looks += 1
            if watcher.glance() and watcher.window.limit_ns:
                watcher.learned = watcher.messages
                watch_worked(&watcher.window, now_ns())
        if not operation.done:
            watcher.expect()
        return operation

    cdef inline int usable(self) except -1:
        if self.closed:
            raise ValueError("this queue is closed")
        self.qp.usable()
        return self.watcher.usable()

    cdef inline _InFlight table(self):
        return self.qp.sends if self.sends else self.qp.receives

    cdef bint post(self, Operation operation) except -1:
        """Whether there was room for it."""
        cdef _InFlight table = self.table()
        if table.count() + operation.count() > self.depth:
            return False
        try:
            if operation.requests is None:
                self.qp.bind_mw(operation.binding[0], operation.binding[1])
                operation.last = table.tag | ((table.next_position - 1) & POSITION_MASK) << POSITION_SHIFT
            elif self.sends:
                operation.last = post_chain(self.qp, operation.requests, operation)
            else:
                operation.last = post_receives(self.qp, operation.requests, operation)
        except OSError as exc:
            # Devices may count their places otherwise; as long as some complete there will be one.
            if exc.errno != ENOMEM or table.count() == 0 or operation.count() > 1:
                raise
            return False
        operation.posted = True
        return True

    cdef int advance(self) except -1:
        """Post what has waited for its turn."""
        cdef Operation operation
        while self.backlog:
            operation = self.backlog[0]
            try:
                if not operation.given_up() and not self.post(operation):
                    return 0
            except Exception as exc:
                operation.fail(exc)
            self.backlog.popleft()
            if not operation.posted:
                operation.fail(None)    # nobody is there to hear it
        return 0

    cdef int forget_cancelled(self) except -1:
        """Of those that wait for their turn. Often enough that they never are more than the others, or a few."""
        cdef Operation operation
        waiting, self.backlog = self.backlog, collections.deque()
        for operation in waiting:
            if operation.given_up():
                operation.fail(None)
            else:
                self.backlog.append(operation)
        self.many = max(<Py_ssize_t>FEW_WAITING, 2 * <Py_ssize_t>len(self.backlog))
        return 0


cdef class CompletionWatcher(Watcher):
    """Watches a completion queue for those who await its completions.

    :param notifier: the event loop
    :param busy_poll: seconds to watch after each completion before sleeping; None: adaptive, 0: none
    """

    cdef readonly CQ cq
    cdef object create_future
    cdef unsigned long thread
    cdef list backlogged                # OperationQueues where operations wait for their turn
    cdef readonly Py_ssize_t pending    # operations that have not ended
    cdef int looks                      # in a row without a pass
    cdef list waiting                   # futures of those who wait for completions of others' requests
    cdef readonly object found          # those completions
    cdef bint full                      # there may be more than a batch
    cdef bint dispatching
    cdef object owner                   # the thread
    cdef object error                   # the completion queue's

    def __init__(self, CQ cq not None, notifier, busy_poll=None):
        if cq.channel is None:
            raise ValueError(f"{cq!r} has no channel to sleep on")
        watch_limit(&self.window, busy_poll)
        self.cq = cq
        self.create_future = notifier.create_future
        self.thread = PyThread_get_thread_ident()
        self.owner = threading.current_thread()
        self.backlogged, self.waiting = [], []
        self.found = collections.deque()
        self.watch(cq)
        self.begin(cq.channel, notifier, notifier.call_soon, self.readable)

    cdef int usable(self) except -1:
        if self.closed:
            raise ValueError("this AsyncCQ is closed")
        if PyThread_get_thread_ident() != self.thread:
            raise RuntimeError("an AsyncCQ, and all that completes on it, is its own thread's only")
        if self.error is not None:
            raise self.error
        return self.cq.usable()

    def mine(self):
        """Raise in any other thread but the loop's, for as long as that one lives."""
        if PyThread_get_thread_ident() != self.thread and self.owner.is_alive():
            raise RuntimeError("an AsyncCQ, and all that completes on it, is its own thread's only")

    def close(self):
        """Stop watching; those who wait are told. The completion queue is its owner's to close."""
        if self.closed:
            return
        self.end()
        self.tell()
        self.create_future = None

    # ---- Completions of requests that were posted by other means ----

    def wait(self):
        """A future that has a result when there may be something in found, or an end to it."""
        self.usable()
        future = self.create_future()
        self.waiting.append(future)
        self.expect()
        return future

    def look(self):
        """Take what is there now."""
        self.usable()
        while self.glance() >= BATCH:
            pass

    cdef int tell(self) except -1:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            try:
                if not future.done():
                    future.set_result(None)
            except RuntimeError:
                pass
        return 0

    # ---- Looking ----

    @property
    def completions(self):
        """How many there were."""
        return self.messages

    cdef inline int expect(self) except -1:
        """Somebody does now."""
        if not self.cq.awake:
            self.rouse(self.cq)
        return self.wake()

    cdef int glance(self) except -1:
        """Take a batch now, outside of a pass; returns how many there were."""
        cdef int left
        if self.dispatching:
            return 0    # a destructor of what has completed
        left = self.completion_count - self.completion_next
        if left:
            self.dispatch()
            return left
        return self.take(self.cq)

    def readable(self):
        """The channel is: take its events, or none if it was a false alarm, then look."""
        if self.closed or self.pid != verbs.rn_pid:
            return
        self.wakeups += 1
        self.take_events()
        self.rouse(self.cq)
        if not self.scheduled:
            self.run_pass()

    cdef bint expects(self) except -1:
        return self.error is None and (self.pending > 0 or bool(self.waiting))

    cdef bint has_work(self) except -1:
        return self.full and self.expects()

    cdef int work(self, int found) except -1:
        self.looks = 0
        self.full = found >= BATCH
        if self.waiting:
            self.waiting = [future for future in self.waiting if not future.done()]  # but those cancelled
        return 0

    cdef int dispatch(self) except -1:
        cdef OperationQueue queue
        self.dispatching = True
        try:
            self.messages += self.completion_count - self.completion_next
            while self.completion_next < self.completion_count:
                self.completion_next += 1
                route_to_awaiter(self.cq, self.found, &self.completions[self.completion_next - 1])
            if self.backlogged:
                for queue in self.backlogged:
                    queue.advance()
                self.backlogged = [queue for queue in self.backlogged if (<OperationQueue>queue).backlog]
            if self.found and self.waiting:
                self.tell()
        finally:
            self.dispatching = False
        return 0

    cdef int broken(self, CQ cq, error) except -1:
        cdef OperationQueue queue
        cdef Operation operation
        cdef QP qp
        self.error = error
        self.unwatch(cq)
        for reference in list(cq.qps.values()):
            qp = reference()
            if qp is not None:
                for entry in qp.sends.ring[::2] + qp.receives.ring[::2]:
                    if type(entry) is Operation:
                        operation = entry
                        if not operation.done and operation.queue.watcher is self:
                            operation.fail(error)
        for queue in self.backlogged:
            while queue.backlog:
                operation = queue.backlog.popleft()
                operation.fail(error)
        self.backlogged.clear()
        self.tell()
        return 0

    def stats(self):
        """Counters since it began: how often it looked, slept, was woken, and for how much."""
        return {
            "passes": self.passes,
            "sleeps": self.sleeps,
            "wakeups": self.wakeups,
            "events": self.events,
            "completions": self.completions,
            "stray": self.cq.stray,
            "window_ns": self.window.ns,
            "busy_ns": self.window.busy_ns,
            "wait_ns": self.window.wait_ns,
        }
