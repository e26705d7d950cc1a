# What a data engine has, and what its connections ask of it: memory, a place in its table, a turn in the next pass.
#
# The passes themselves are above, in passes.pxi: they call the connections, which call this.

cdef enum:
    MAX_INLINE = 192
    MUCH_BYTES = 32 << 20       # more than the caches hold: the embedded device copies the parts of it past them
    TURN_US = 100               # of what is done at once, without a turn of the loop: see turn_is_over
    WINDOWS_OF_TYPE_2 = 1 << 23 | 1 << 24   # ibv_device_cap_flags: MEM_WINDOW_TYPE_2A, _2B
    # The vendor_id of software devices. rxe compares a write through a window with the region's bounds (Linux 6.12).
    NO_VENDOR = 0xFFFFFF


@cython.no_gc_clear
cdef class Member:
    """A connection, as its engine and its ring know it: its place there, and its queue pair.

    The base of Sender (sender.pxi).
    """

    cdef readonly _Engine engine
    cdef readonly QP qp
    cdef verbs.ibv_qp *qp_c
    cdef CQ queue                       # where its completions come
    cdef uint64_t wr_base               # index and generation, as every wr_id of ours begins
    cdef bint attached                  # has memory and a place in the engine
    cdef bint solicits                  # the peer marks its SENDs as solicited
    cdef bint listed                    # on the engine's list of connections to deliver,
    cdef bint dirty                     # and of those to flush
    cdef readonly bint broken           # a completion failed or the peer broke the protocol: post nothing more


@cython.no_gc_clear
cdef class StreamPD(PD):
    """An engine's protection domain: if regions of the application outlive the engine, it goes with the last."""

    def __del__(self):
        pass    # that is no omission of anybody's to warn of


cdef extern from "soft/base/block.h" nogil:
    struct block "rn_block":
        uint64_t here
        uint64_t there
        uint32_t length
        uint32_t lkey
        uint32_t rkey

# rdmanet_soft_move(): for blocks.pxi
ctypedef uint32_t (*move_fn)(verbs.ibv_qp *, int opcode, unsigned send_flags, const block *, uint32_t count,
                             uint64_t most_bytes) noexcept nogil


@cython.no_gc_clear
cdef class _Engine(Watcher):
    """All connections of one event loop on one device, but for the passes: see StreamEngine."""

    cdef readonly PD pd
    cdef readonly RegistrationCache registrations   # of one-sided operations
    cdef list lost_cqs
    cdef dict pools
    cdef list table                     # index -> Member or None
    cdef list vacant
    cdef list generations
    cdef readonly list shared_rings     # by number; None where one was given up
    cdef bint empty_rings               # one has no connection left, and may go
    cdef list in_want                   # connections that found no memory to send from
    cdef list warm                      # those that keep it though nothing is in flight
    cdef list stalled                   # those whose peer has used up its credits
    cdef list ready, dirty, failed
    cdef object delivering              # the connection whose callback is running
    cdef object loop
    cdef object totals                  # where what has ended is counted: totals.pxi
    cdef object __weakref__

    cdef verbs.ibv_recv_wr recv_wr[CHAIN]
    cdef verbs.ibv_sge recv_sge[CHAIN]
    cdef uint32_t recv_count
    cdef verbs.ibv_send_wr send_wr[CHAIN]
    cdef verbs.ibv_sge send_sge[2 * CHAIN]
    cdef uint32_t send_count

    cdef MR implicit
    cdef uint32_t implicit_lkey
    cdef bint implicit_lkey_valid
    cdef readonly uint32_t max_inline
    cdef int windows                    # 1: the device has windows of type 2; 0: not known yet; -1: it has none
    cdef bint confined                  # if it has: a window's bounds are checked
    cdef readonly size_t place_bytes    # reads of less are copied, into memory of rdmanet.alloc(), too
    cdef uint32_t behind_operations     # flags of what is posted while one-sided requests are in flight
    cdef uint32_t of_much               # flags of what is a part of MUCH_BYTES
    cdef move_fn moves                  # blocks without work requests, or NULL

    cdef uint64_t turn_began            # cheap_clock() at the first request of this turn that was done at once, or 0
    cdef readonly uint64_t stale

    def __cinit__(self, loop, notifier, Context context, busy_poll=None):
        cdef const uint32_t *vouched
        cdef const uint32_t *least
        cdef const uint32_t *of_much
        self.loop = loop
        self.lost_cqs = []
        self.pools = {}
        self.table = []
        self.vacant = []
        self.generations = []
        self.shared_rings = []
        self.in_want = []
        self.warm = []
        self.stalled = []
        self.ready = []
        self.dirty = []
        self.failed = []
        self.max_inline = MAX_INLINE
        least = <const uint32_t *>verbs.rn_library_symbol(context.library.c, "rdmanet_soft_place_bytes")
        self.place_bytes = least[0] if least != NULL else PLACE_BYTES
        of_much = <const uint32_t *>verbs.rn_library_symbol(context.library.c, "rdmanet_soft_send_of_much")
        self.of_much = of_much[0] if of_much != NULL else 0
        self.moves = <move_fn>context.library.symbol("rdmanet_soft_move")
        # The log of sends is retired in order. Not every iWARP device keeps it: Linux's completes a SEND before a READ
        # that was posted earlier, unless the SEND is told to wait.
        if context.ptr.device.transport_type == verbs.IBV_TRANSPORT_IWARP:
            self.behind_operations = verbs.IBV_SEND_FENCE
        self.pd = StreamPD(context)
        self.registrations = RegistrationCache(self.pd)
        # Only what a connection holds a reference to is ever posted, so the embedded device need not
        # try each range before it reads it.
        vouched = <const uint32_t *>verbs.rn_library_symbol(context.library.c, "rdmanet_soft_access_vouched")
        try:
            self.implicit = self.pd.reg_implicit(vouched[0] if vouched != NULL else 0)
        except OSError:
            pass    # no on-demand paging: bytes are copied into registered slots
        else:
            self.implicit_lkey = self.implicit.ptr.lkey
            self.implicit_lkey_valid = True

    # -- connections ---------------------------------------------------------------------------------

    cdef int enroll(self, Member connection) except -1:
        """Give it a place in the table. Its `engine` is this one."""
        cdef Py_ssize_t index
        self.unsolicited += 1       # until the peer says what it does
        connection.attached = True
        if self.vacant:
            index = self.vacant.pop()
            self.table[index] = connection
            self.generations[index] += 1
        else:
            index = len(self.table)
            self.table.append(connection)
            self.generations.append(0)
        connection.wr_base = stream_wr_base(index, self.generations[index])
        return 0

    cdef int serve(self, Member connection, QP qp) except -1:
        """It has a queue pair."""
        connection.qp = qp
        connection.qp_c = qp.ptr
        connection.queue = qp.send_cq
        return 0

    cdef int serve_no_more(self, Member connection) except -1:
        """Its queue pair is about to be destroyed. The connection may keep its place for long."""
        connection.qp_c = NULL
        return 0

    cdef int learn_of_peer(self, Member connection, bint solicits) except -1:
        """Its peer says whether it marks its SENDs as solicited."""
        if not solicits:
            self.rouse(connection.queue)    # to be armed for all
            self.wake()
        elif not connection.solicits:
            connection.solicits = True
            self.unsolicited -= 1
        return 0

    cdef int expel(self, Member connection) except -1:
        """Its queue pair is destroyed: it has no place here any more."""
        cdef Py_ssize_t index = connection.wr_base >> INDEX_SHIFT
        connection.attached = False
        self.serve_no_more(connection)
        connection.queue = None
        self.unsolicited -= not connection.solicits
        self.table[index] = None
        self.vacant.append(index)
        for waiting in (self.ready, self.dirty, self.failed, self.in_want, self.warm, self.stalled):
            if connection in waiting:
                waiting.remove(connection)
        return 0

    cdef int shrink_later(self, Member connection) except -1:
        """Its ring has grown: make that small again when it is idle."""
        raise NotImplementedError

    @property
    def connections(self):
        """The live connections."""
        return [connection for connection in self.table if connection is not None]

    # -- a turn in the next pass ---------------------------------------------------------------------

    cdef inline int deliver_later(self, Member connection) except -1:
        if not connection.listed:
            connection.listed = True
            self.ready.append(connection)
        return 0

    cdef inline int flush_later(self, Member connection) except -1:
        if not connection.dirty:
            connection.dirty = True
            self.dirty.append(connection)
        return 0

    cdef inline bint is_to_deliver(self, Member connection) noexcept:
        """Its turn has come; whether it has not ended meanwhile."""
        connection.listed = False
        return connection.attached

    cdef inline bint is_to_flush(self, Member connection) noexcept:
        connection.dirty = False
        return connection.attached

    cdef int wake_if_running(self) except -1:
        """The same from where connections end: their loop may have ended before."""
        if not self.closed and (self.by_hand or not self.loop.is_closed()):
            self.wake()
        return 0

    cdef bint has_work(self) except -1:
        return bool(self.ready or self.dirty or self.failed or self.keeping or self.stalled)

    def drain(self):
        """Take every completion that is there: before a disconnection is judged."""
        self.rouse_all()
        while self.poll():
            pass
        self.wake()

    cdef bint take_own(self, Member connection) except -1:
        """Take the completions of data frames that this connection has posted while the engine slept.

        Returns whether these were all, and nothing is to be done. If not, the next pass finds what there is.
        """
        cdef CQ cq = connection.queue
        if cq.armed_for_all or self.has_work() or not self.poll_own(connection):
            return False
        if self.in_flight or self.completion_count == BATCH or self.has_work():
            return False
        if cq.awake:
            cq.awake = False
            self.awake.remove(cq)
        return True

    cdef bint take_own_operations(self, Member connection) except -1:
        """Take the completions of one-sided requests that the device has executed while this connection posted them.

        Returns whether these were all. If not, the next pass finds what there is.
        """
        return (
            connection.queue is not None and not self.in_pass and not self.keeping and self.pid == verbs.rn_pid
            and self.poll_own(connection) and self.completion_count < BATCH
        )

    cdef bint poll_own(self, Member connection) except -1:
        """Poll its queue; hand out what there is, and return True, if all of that are successful sends of its own."""
        cdef verbs.ibv_wc *wc
        cdef int i
        if self.completion_next < self.completion_count:
            return False
        self.polls += 1
        self.completion_next = 0
        self.completion_count = max(0, verbs.rn_poll_cq(connection.queue.ptr, BATCH, self.completions))
        for i in range(self.completion_count):
            wc = &self.completions[i]
            if wc.status != verbs.IBV_WC_SUCCESS or wc.wr_id & ~<uint64_t>LOW_MASK != connection.wr_base | SEND_FLAG:
                return False
        self.dispatch()
        return True

    # -- what is done at once, without a turn of the loop ----------------------------------------------
    #
    # Whoever awaits something that is there already goes on without the loop. Others on the loop wait meanwhile: so
    # after TURN_US the program is to let it turn. A pass is a sign that it has turned; so one is due.

    cdef inline int begin_turn(self) except -1:
        """Something is done at once."""
        if self.turn_began == 0:
            self.turn_began = cheap_clock()
        return self.wake()

    cdef inline bint turn_is_over(self) noexcept:
        """Whether that has gone on for TURN_US, or more, since the loop turned."""
        return self.turn_began != 0 and cheap_clock() - self.turn_began > TURN_US * cheap_microsecond()

    cdef inline int loop_has_turned(self) noexcept:
        self.turn_began = 0
        return 0

    # -- receives, chained until they are posted -----------------------------------------------------

    cdef inline uint32_t chain_receive(self, uint64_t wr_id, char *to, uint32_t length, uint32_t lkey) noexcept:
        """Add a receive; returns how many there are."""
        cdef uint32_t i = self.recv_count
        self.recv_sge[i].addr = <uint64_t>to
        self.recv_sge[i].length = length
        self.recv_sge[i].lkey = lkey
        self.recv_wr[i].wr_id = wr_id
        self.recv_wr[i].sg_list = &self.recv_sge[i]
        self.recv_wr[i].num_sge = 1
        self.recv_wr[i].next = NULL
        if i:
            self.recv_wr[i - 1].next = &self.recv_wr[i]
        self.recv_count = i + 1
        return self.recv_count

    cdef inline uint32_t take_receives(self) noexcept:
        """How many there are in recv_wr. They are posted now, or never."""
        cdef uint32_t count = self.recv_count
        self.recv_count = 0
        return count

    # -- memory, and where peers may write -----------------------------------------------------------

    def set_place_bytes(self, size_t least):
        """Copy reads of less than `least` bytes; those of less than PLACE_BYTES are copied in any case."""
        self.place_bytes = max(least, <size_t>PLACE_BYTES)

    cdef RingPool rings(self, uint32_t slot_bytes, uint32_t slots):
        """Memory for so many slots."""
        key = (slot_bytes, slots)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = RingPool(self.pd, bank_stride(slot_bytes) * slots)
        return pool

    cdef int add_queue(self, CQ cq, Py_ssize_t reserved) except -1:
        cq.reserved = reserved
        self.watch(cq)
        return self.wake()

    cdef int takes_inline(self, uint32_t most) noexcept:
        """The device has taken that many bytes of inline data."""
        self.max_inline = most
        return 0

    cpdef bint has_windows(self) except -1:
        """Whether the device has memory windows of type 2, which bind keys to one connection."""
        cdef verbs.ibv_device_attr_ex ex
        cdef verbs.ibv_device_attr *attr = &ex.orig_attr
        if self.windows == 0:
            self.pd.context.ask(&ex)
            self.windows = 1 if attr.max_mw > 0 and attr.device_cap_flags & WINDOWS_OF_TYPE_2 else -1
            self.confined = attr.vendor_id != NO_VENDOR or self.pd.context.library.embedded_device
        return self.windows > 0

    cpdef bint confines_peers(self) except -1:
        """Whether a window of type 2 lets a peer write to its bytes only. Soft-RoCE's is good for the whole region."""
        return self.has_windows() and self.confined


cdef inline uint32_t flags_of_part(_Engine engine, uint64_t total) noexcept:
    """Of a READ or a WRITE that moves a part of so many bytes, or all of them."""
    return engine.of_much if engine is not None and total >= MUCH_BYTES else 0
