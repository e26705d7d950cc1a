# The data engine of one (loop, device): all connections of the byte stream there.
#
# It is a Watcher (watcher.pxi), whose passes come when completions do, or when a connection has something to do. A pass
# gives each completion to its connection, lets the connections deliver, flushes what was written meanwhile, reports
# failures, and returns to the loop.
#
# What is particular to it: it expects messages as long as it lives; the window is learned from those only, not from the
# completions of its own sends; and while connections wait for credits it watches for longer (`blocked`), since a reader
# grants half a ring at a time. A thousand connections have several completion queues, each twice as large as the one
# before, so there are few to be watched.

cdef enum:
    STREAM_QUEUE = 4096             # completion queue entries asked for, of the first queue
    STREAM_QUEUE_MOST = 65536       # and of any; the embedded device has no more queue pairs for one than fit that
    PATIENCE = 64                   # passes, of a batch each, that empty a queue of STREAM_QUEUE
    MAX_INLINE = 192


@cython.no_gc_clear
cdef class StreamPD(PD):
    """An engine's protection domain: if regions of the application outlive the engine, it goes with the last."""

    def __del__(self):
        pass    # that is no omission of anybody's to warn of


@cython.no_gc_clear
cdef class StreamEngine(Watcher):
    """All connections of one event loop on one device.

    `notifier` tells when the completion channel is readable, and is told if a forked child is who hears it.
    `busy_poll` is how long to watch after each message, in seconds: None leaves it to the engine (see busypoll.pxi), 0
    switches it off.
    """

    cdef readonly PD pd
    cdef readonly RegistrationCache registrations   # of one-sided operations
    cdef list lost_cqs
    cdef dict pools
    cdef list table                     # index -> Connection or None
    cdef list vacant
    cdef list generations
    cdef readonly list shared_rings     # by number; None where one was given up
    cdef bint empty_rings               # one has no connection left, and may go
    cdef list in_want                   # connections that found no memory to send from
    cdef list warm                      # those that keep it though nothing is in flight
    cdef list stuffed                   # those whose peer has used up its credits
    cdef readonly GrownRings grown
    cdef readonly KeepAlive alive
    cdef list ready, dirty, failed
    cdef Connection delivering    # whose callback is running
    cdef object loop

    cdef verbs.ibv_recv_wr recv_wr[CHAIN]
    cdef verbs.ibv_sge recv_sge[CHAIN]
    cdef uint32_t recv_count
    cdef verbs.ibv_send_wr send_wr[CHAIN]
    cdef verbs.ibv_sge send_sge[2 * CHAIN]
    cdef uint32_t send_count

    cdef MR implicit
    cdef uint32_t implicit_lkey
    cdef bint implicit_lkey_valid
    cdef public uint32_t max_inline
    cdef int windows                    # 1: the device has windows of type 2; 0: not known yet; -1: it has none
    cdef bint confined                  # if it has: a window's bounds are checked
    cdef readonly size_t place_bytes    # reads of less are copied, into memory of rdmanet.alloc(), too
    cdef uint32_t behind_operations     # flags of what is posted while one-sided requests are in flight
    cdef uint32_t of_much               # flags of what is a part of MUCH_BYTES

    cdef readonly uint64_t stale

    def __cinit__(self, loop, notifier, Context context, busy_poll=None):
        cdef const uint32_t *vouched
        cdef const uint32_t *least
        cdef const uint32_t *of_much
        self.set_busy_poll(busy_poll)
        self.loop = loop
        self.lost_cqs = []
        self.pools = {}
        self.table = []
        self.vacant = []
        self.generations = []
        self.shared_rings = []
        self.in_want = []
        self.warm = []
        self.stuffed = []
        self.grown = GrownRings(self)
        self.alive = KeepAlive(self, context.library)
        self.ready = []
        self.dirty = []
        self.failed = []
        self.max_inline = MAX_INLINE
        least = <const uint32_t *>verbs.rn_library_symbol(context.library.c, "rdmanet_soft_place_bytes")
        self.place_bytes = least[0] if least != NULL else PLACE_BYTES
        of_much = <const uint32_t *>verbs.rn_library_symbol(context.library.c, "rdmanet_soft_send_of_much")
        self.of_much = of_much[0] if of_much != NULL else 0
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
        self.begin(CompChannel(context), notifier, loop.call_soon, self.channel_ready, contextvars.copy_context())

    def set_busy_poll(self, busy_poll):
        """Watch for `busy_poll` seconds after each message (None: adaptive, 0: none)."""
        watch_limit(&self.window, busy_poll)

    def set_place_bytes(self, size_t least):
        """Copy reads of less than `least` bytes; those of less than PLACE_BYTES are copied in any case."""
        self.place_bytes = max(least, <size_t>PLACE_BYTES)

    # -- connections ---------------------------------------------------------------------------------

    cdef RingPool rings(self, uint32_t slot_bytes, uint32_t slots):
        """Memory for so many slots."""
        key = (slot_bytes, slots)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = RingPool(self.pd, bank_stride(slot_bytes) * slots)
        return pool

    cdef int resting(self) except -1:
        return cool_down(self, 0)

    cdef SharedRing shared_ring(self, uint32_t slot_bytes, uint32_t data_slots, uint32_t common):
        """A shared ring with room for one more connection."""
        cdef SharedRing ring
        for ring in self.shared_rings:
            if ring is not None and ring.serves(slot_bytes, data_slots, common) and ring.has_room():
                return ring
        number = self.shared_rings.index(None) if None in self.shared_rings else len(self.shared_rings)
        ring = SharedRing(self, slot_bytes, data_slots, common, number)
        self.shared_rings[number:number + 1] = [ring]
        self.add_queue(ring.cq, ring.cq.ptr.cqe)    # nobody else's
        return ring

    cdef int close_empty_rings(self) except -1:
        cdef SharedRing ring
        cdef Py_ssize_t number
        self.empty_rings = False
        for number, ring in enumerate(self.shared_rings):
            if ring is not None and ring.members == 0:
                self.shared_rings[number] = None
                ring.close()
                if ring.cq in self.cqs:
                    self.unwatch(ring.cq)
                    ring.cq.close()
        return 0

    cdef int add_queue(self, CQ cq, Py_ssize_t reserved) except -1:
        cq.reserved = reserved
        self.watch(cq)
        return self.wake()

    @property
    def can_share(self):
        """Whether the device has shared receive queues."""
        attr = self.pd.context.query_device()
        return attr.max_srq > 0 and attr.max_srq_wr > 0

    @property
    def reads_in_place(self):
        """Whether the device reads bytes from where they are, without a registration (on-demand paging)."""
        return self.implicit_lkey_valid

    cpdef bint has_windows(self) except -1:
        """Whether the device has memory windows of type 2, which bind keys to one connection."""
        if self.windows == 0:
            attr = self.pd.context.query_device()
            self.windows = 1 if attr.max_mw > 0 and attr.device_cap_flags & WINDOWS_OF_TYPE_2 else -1
            self.confined = attr.vendor_id != NO_VENDOR or self.pd.context.library.embedded_device
        return self.windows > 0

    cpdef bint confines_peers(self) except -1:
        """Whether a window of type 2 lets a peer write to its bytes only. Soft-RoCE's is good for the whole region."""
        return self.has_windows() and self.confined

    def reserve(self, entries):
        """A completion queue with room for `entries` more, for a queue pair of such depths."""
        cdef CQ cq
        for cq in self.cqs:
            if cq.reserved + entries <= cq.ptr.cqe:
                cq.reserved += entries
                return cq
        size = max([STREAM_QUEUE] + [min(2 * (<CQ>other).ptr.cqe, STREAM_QUEUE_MOST) for other in self.cqs])
        size = max(min(size, self.pd.context.query_device().max_cqe), entries)
        cq = CQ(self.pd.context, size, self.channel)
        # Not on adapters: they complete sends later, so some are in flight whenever the engine goes to sleep. Nor for
        # shared receives: unmarked SENDs of one peer could use up those that others need, and would not wake us.
        cq.solicits = self.pd.context.library.embedded_device
        self.add_queue(cq, entries)
        return cq

    def unreserve(self, CQ cq, entries):
        """The queue pair made on `cq` is gone, or never came to be."""
        cq.reserved -= entries

    cdef uint64_t enroll(self, Connection connection):
        cdef Py_ssize_t index
        if self.vacant:
            index = self.vacant.pop()
            self.table[index] = connection
            self.generations[index] += 1
        else:
            index = len(self.table)
            self.table.append(connection)
            self.generations.append(0)
        return stream_wr_base(index, self.generations[index])

    cdef int expel(self, Connection connection) except -1:
        cdef Py_ssize_t index = connection.wr_base >> INDEX_SHIFT
        self.table[index] = None
        self.vacant.append(index)
        for waiting in (self.ready, self.dirty, self.failed, self.in_want, self.warm, self.stuffed):
            if connection in waiting:
                waiting.remove(connection)
        self.grown.remove(connection)
        connection.listed = connection.dirty = connection.warm = connection.stuffed = False
        set_blocked(connection, False)
        return 0

    @property
    def connections(self):
        """The live connections."""
        return [connection for connection in self.table if connection is not None]

    # -- the pass ------------------------------------------------------------------------------------

    cdef inline int deliver_later(self, Connection connection) except -1:
        if not connection.listed:
            connection.listed = True
            self.ready.append(connection)
        return 0

    cdef inline int flush_later(self, Connection connection) except -1:
        if not connection.dirty:
            connection.dirty = True
            self.dirty.append(connection)
        return 0

    cdef int wake_if_running(self) except -1:
        """The same from where connections end: their loop may have ended before."""
        if not self.closed and (self.by_hand or not self.loop.is_closed()):
            self.wake()
        return 0

    def channel_ready(self):
        """The completion channel is readable: take its events, then look. Returns whether there were any."""
        if self.closed:
            return False
        if self.pid != verbs.rn_pid:
            self.notifier.heard_by_child()
            return False
        if not self.take_events():
            return False
        self.wakeups += 1
        self.run_pass()
        return True

    cdef bint has_work(self) except -1:
        return bool(self.ready or self.dirty or self.failed or self.keeping or self.stuffed)

    cdef int work(self, int found) except -1:
        """Let the connections deliver, flush and end."""
        self.deliver_all()
        if self.stuffed:
            relieve_stuffed(self)
        self.flush_all()
        self.fail_all()
        if self.empty_rings:
            self.close_empty_rings()
        return 0

    cdef int broken(self, CQ cq, error) except -1:
        self.lose_queue(cq, error)
        return 0

    def lose_queue(self, CQ cq, error):
        """A completion queue has failed for good (it was overrun, say), and with it all connections on it."""
        cdef Connection connection
        if cq not in self.cqs:
            return
        self.unwatch(cq)
        self.lost_cqs.append(cq)
        for connection in self.connections:
            if connection.qp is not None and connection.qp.send_cq is cq:
                fail_connection(connection, type(error)(*error.args))   # each its own: it is raised in many places

    def lose_device(self):
        """The device has failed, and is not to be asked to tell of completions. What there is of them is taken yet."""
        self.lost = True
        self.rouse_all()
        self.turn_deaf()

    cdef int take_kept(self) except -1:
        """What shared rings met while they took a connection's slots back comes before anything newer."""
        cdef SharedRing ring
        cdef int total = 0, n
        for ring in list(self.shared_rings):
            while ring is not None and ring.kept_next < ring.kept_count:
                n = <int>min(ring.kept_count - ring.kept_next, <uint32_t>BATCH)
                memcpy(self.completions, &ring.kept[ring.kept_next], n * sizeof(verbs.ibv_wc))
                ring.kept_next += n
                self.completion_next = 0
                self.completion_count = n
                total += n
                self.dispatch()
        self.keeping = False
        return total

    cdef int dispatch(self) except -1:
        while self.completion_next < self.completion_count:
            self.completion_next += 1
            route_to_stream(self, &self.completions[self.completion_next - 1])
        return 0

    cdef bint take_own(self, Connection connection) except -1:
        """Take the completions of data frames that this connection has posted while the engine slept.

        Returns whether these were all, and nothing is to be done. If not, the next pass finds what there is.
        """
        cdef CQ cq = connection.queue
        cdef verbs.ibv_wc *wc
        cdef int i
        if cq.armed_for_all or self.completion_next < self.completion_count or self.has_work():
            return False
        self.polls += 1
        self.completion_next = 0
        self.completion_count = max(0, verbs.rn_poll_cq(cq.ptr, BATCH, self.completions))
        for i in range(self.completion_count):
            wc = &self.completions[i]
            if wc.status != verbs.IBV_WC_SUCCESS or wc.wr_id & ~<uint64_t>LOW_MASK != connection.wr_base | SEND_FLAG:
                return False
        self.dispatch()
        if self.in_flight or self.completion_count == BATCH or self.has_work():
            return False
        if cq.awake:
            cq.awake = False
            self.awake.remove(cq)
        return True

    cdef int deliver_all(self) except -1:
        cdef list ready = self.ready
        cdef Connection connection
        cdef Py_ssize_t i = 0, n = len(ready)
        if n == 0:
            return 0
        self.ready = []
        try:
            while i < n:
                connection = ready[i]
                i += 1
                if connection.attached:
                    connection.listed = False
                    deliver_received(connection)
        except Exception as exc:
            fail_connection(connection, exc)    # not the protocol's (those are reported): ours, or the device's
        except BaseException:
            # KeyboardInterrupt, say: whoever runs the loop again finds everything as it was.
            self.deliver_later(connection)
            raise
        finally:
            if i < n:
                self.ready = ready[i:] + self.ready
        return 0

    cdef int flush_all(self) except -1:
        cdef list dirty = self.dirty
        cdef Connection connection
        cdef Py_ssize_t i = 0, n = len(dirty)
        if n == 0:
            return 0
        self.dirty = []
        try:
            while i < n:
                connection = dirty[i]
                i += 1
                if connection.attached:
                    connection.dirty = False
                    settle(connection)
        except Exception as exc:
            fail_connection(connection, exc)
        except BaseException:
            self.flush_later(connection)
            raise
        finally:
            if i < n:
                self.dirty = dirty[i:] + self.dirty
        return 0

    cdef int fail_all(self) except -1:
        """Report failures once no completion is waiting any more: data first, then its end.

        Others' traffic may see to it that some always are; then the older ones have been seen at least.
        """
        cdef Connection connection
        cdef bint drained
        if not self.failed or self.by_hand:     # by hand: the loop will report them
            return 0
        self.rouse_all()    # what the failed ones still have may be in a queue whose event has not been taken
        drained = self.poll() == 0
        for connection in list(self.failed):
            # Hearing of one's end may be that of others, too.
            if connection in self.failed and (drained or self.tick - connection.failure_tick > PATIENCE):
                self.failed.remove(connection)
                connection.owner._fabric_failed(connection.failure)
        return 0

    def drain(self):
        """Take every completion that is there: before a disconnection is judged."""
        self.rouse_all()
        while self.poll():
            pass
        self.wake()

    def close(self):
        """Give everything back; the connections must have been released."""
        cdef CQ cq
        if self.closed:
            return
        self.end()
        self.grown.end()
        self.alive.stop()
        self.loop = None
        for pool in self.pools.values():
            (<RingPool>pool).close()
        if self.implicit is not None:
            self.implicit.close()
        self.registrations.close()
        leave_domain(self.pd)
        for ring in self.shared_rings:
            if ring is not None:
                (<SharedRing>ring).close()
        self.shared_rings.clear()   # they refer to us
        for cq in self.cqs + self.lost_cqs:
            cq.close()
        self.channel.close()
        try:
            self.pd.close()
        except OSError:
            pass    # the application's memory regions are on it

    def stats(self):
        """Counters since the engine began: how often it looked, slept, was woken, and for how much.

        `queues` and `queues_awake` are of now: completion queues, and those of them that a pass polls.
        """
        return {
            "passes": self.passes,
            "sleeps": self.sleeps,
            "wakeups": self.wakeups,
            "messages": self.messages,
            "polls": self.polls,
            "queues": len(self.cqs),
            "queues_awake": len(self.awake),
            "stale_completions": self.stale,
            "window_ns": self.window.ns,
            "busy_ns": self.window.busy_ns,
            "wait_ns": self.window.wait_ns,
        }
