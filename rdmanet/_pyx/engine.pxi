# The data engine of one (loop, device): completions in, bytes out, and when to look again.
#
# A pass polls a bounded number of completions, gives each to its connection, lets the connections
# deliver, flushes what was written meanwhile, and returns to the loop. What then makes the next pass
# happen is the whole art:
#
#   * Waking a sleeping process costs some 20 us each way, a look at the queue 30 ns. So while traffic
#     flows the engine stays awake: it passes again by call_soon, and looks a couple of microseconds
#     in C, but only when nothing was delivered (woken tasks must not wait for it).
#   * A queue that is silent for longer than a sleep and a wake cost is not worth watching. The engine
#     learns the gaps between messages (watch.pxi); when they are long it arms the queue and sleeps at once.
#   * Sleeping: arm, then poll once more (a completion that came before the arming raises no event:
#     ibv_req_notify_cq(3)), then wait for the channel's file descriptor.
#
# A pass costs what is busy, not what there is. A thousand connections have many completion queues, and of those only
# the ones are polled that are awake. One that was armed, and polled once more in vain, is asleep: an event names it,
# and makes it one of the awake again; so does a write, whose completion is to come. All go to sleep when the engine
# does; while others keep that awake, one goes alone that had nothing while they were found to have something MISSED
# times. Queues grow, each twice as large as the one before, so there are few to be named.
#
# Every wr_id is 20 bits of connection index, 16 of generation, 3 unused, 1 that says "a send", and 24
# of slot or sequence number. A completion of an earlier generation is counted and dropped. The slots of shared rings
# have SHARED_INDEX for an index, which no connection has, and the ring's number for a generation.

cdef enum:
    ACK_BATCH = 16                  # events acknowledged in one call: it takes a lock
    BATCH = 64                      # completions of one poll
    INDEX_SHIFT = 44
    STREAM_GENERATION_SHIFT = 28
    STREAM_QUEUE = 4096             # completion queue entries asked for, of the first queue
    STREAM_QUEUE_MOST = 65536       # and of any; the embedded device has no more queue pairs for one than fit that
    MISSED = 1024                   # some milliseconds of traffic; going to sleep and being woken costs a few us
    NOT_ARMED = 0
    ARMED = 1
    ARMED_AND_EMPTY = 2             # a look after the arming found nothing
    PATIENCE = 64                   # passes, of a batch each, that empty a queue of STREAM_QUEUE
    MAX_INLINE = 192
    SEND_BUFFERS_SPARE = 16         # connections on shared rings take turns at those

cdef uint64_t WR_BASE_MASK = ~((<uint64_t>1 << STREAM_GENERATION_SHIFT) - 1)


@cython.no_gc_clear
cdef class StreamPD(PD):
    """An engine's protection domain: if regions of the application outlive the engine, it goes with the last."""

    def __del__(self):
        pass    # that is no omission of anybody's to warn of


@cython.no_gc_clear
cdef class StreamEngine:
    """All connections of one event loop on one device.

    `busy_poll` bounds the watching after the last message, in seconds: None leaves it to the engine
    (200 us at most, less when messages are rare), 0 switches it off.
    """

    cdef readonly PD pd
    cdef readonly CompChannel channel
    cdef readonly list cqs
    cdef list awake                     # those of them that are polled; the others are armed, and will be named
    cdef Py_ssize_t expected            # events of one wake-up: so many were awake when we went to sleep
    cdef bint tired                     # one of the awake has missed too much
    cdef uint64_t hits                  # looks that found something in a queue
    cdef list lost_cqs
    cdef list reserved                  # entries promised to connections, a number a queue
    cdef dict pools
    cdef list table                     # index -> StreamConnection or None
    cdef list vacant
    cdef list generations
    cdef readonly list shared_rings     # by number; None where one was given up
    cdef bint keeping                   # a shared ring has completions that are to be dispatched first
    cdef bint empty_rings               # one has no connection left, and may go
    cdef list in_want                   # connections on shared rings that found no memory to send from
    cdef list ready, dirty, failed
    cdef StreamConnection delivering    # whose callback is running
    cdef object loop, call_soon, pass_method
    cdef Py_ssize_t blocked             # connections with bytes to send and no credit or slot
    cdef bint in_pass, scheduled, closed
    cdef bint lost                      # the device has failed: it will tell nothing any more
    cdef pid_t pid                      # a forked child touches nothing of its parent's
    cdef uint64_t tick

    cdef verbs.ibv_wc completions[BATCH]
    cdef int completion_next, completion_count
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
    cdef uint32_t behind_operations     # flags of what is posted while one-sided requests are in flight

    cdef watch_window window
    cdef readonly uint64_t passes, sleeps, wakeups, messages, stale, polls

    def __cinit__(self, loop, Context context, busy_poll=None):
        cdef const uint32_t *vouched
        self.loop = loop
        self.call_soon = loop.call_soon
        self.pass_method = self.pass_
        self.cqs = []
        self.awake = []
        self.expected = 1
        self.lost_cqs = []
        self.reserved = []
        self.pools = {}
        self.table = []
        self.vacant = []
        self.generations = []
        self.shared_rings = []
        self.in_want = []
        self.ready = []
        self.dirty = []
        self.failed = []
        self.max_inline = MAX_INLINE
        # The log of sends is retired in order. Not every iWARP device keeps it: Linux's completes a SEND before a READ
        # that was posted earlier, unless the SEND is told to wait.
        if context.ptr.device.transport_type == verbs.IBV_TRANSPORT_IWARP:
            self.behind_operations = verbs.IBV_SEND_FENCE
        self.pid = verbs.rn_pid
        self.tick = 1
        self.set_busy_poll(busy_poll)
        self.pd = StreamPD(context)
        self.channel = CompChannel(context)
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

    def set_busy_poll(self, busy_poll):
        """Bound the watching after the last message to `busy_poll` seconds (None: adaptive, 0: none)."""
        watch_limit(&self.window, busy_poll)

    # -- connections ---------------------------------------------------------------------------------

    cdef RingPool rings(self, uint32_t slot_bytes, uint32_t data_slots):
        key = (slot_bytes, data_slots)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = RingPool(self.pd, stream_chunk_bytes(slot_bytes, data_slots))
        return pool

    cdef RingPool send_buffers(self, uint32_t slot_bytes, uint32_t data_slots):
        """What connections on a shared ring send from, while they do; at least one slab, from the first on."""
        key = (slot_bytes, data_slots, "sends")
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = RingPool(self.pd, stream_send_bytes(slot_bytes, data_slots), SEND_BUFFERS_SPARE)
        return pool

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
                    self.remove_queue(ring.cq)
                    ring.cq.close()
        return 0

    cdef int add_queue(self, CQ cq, Py_ssize_t reserved) except -1:
        self.cqs.append(cq)
        self.reserved.append(reserved)
        # A new queue has to be armed before anything can be heard of it.
        self.rouse(cq)
        return self.wake()

    cdef int remove_queue(self, CQ cq) except -1:
        cdef Py_ssize_t at = self.cqs.index(cq)
        del self.cqs[at], self.reserved[at]
        if cq.awake:
            self.awake.remove(cq)
            cq.awake = False
        return 0

    @property
    def can_share(self):
        """Whether the device has shared receive queues."""
        attr = self.pd.context.query_device()
        return attr.max_srq > 0 and attr.max_srq_wr > 0

    def reserve(self, entries):
        """A completion queue with room for `entries` more, for a queue pair of such depths."""
        for i in range(len(self.cqs)):
            if self.reserved[i] + entries <= (<CQ>self.cqs[i]).ptr.cqe:
                self.reserved[i] += entries
                return self.cqs[i]
        size = max([STREAM_QUEUE] + [min(2 * (<CQ>cq).ptr.cqe, STREAM_QUEUE_MOST) for cq in self.cqs])
        size = max(min(size, self.pd.context.query_device().max_cqe), entries)
        cq = CQ(self.pd.context, size, self.channel)
        self.add_queue(cq, entries)
        return cq

    def unreserve(self, CQ cq, entries):
        """The queue pair made on `cq` is gone, or never came to be."""
        if cq in self.cqs:
            self.reserved[self.cqs.index(cq)] -= entries

    cdef uint64_t enroll(self, StreamConnection connection):
        cdef Py_ssize_t index
        if self.vacant:
            index = self.vacant.pop()
            self.table[index] = connection
            self.generations[index] = (self.generations[index] + 1) & 0xFFFF
        else:
            index = len(self.table)
            self.table.append(connection)
            self.generations.append(0)
        return (<uint64_t>index << INDEX_SHIFT) | (<uint64_t>self.generations[index] << STREAM_GENERATION_SHIFT)

    cdef int expel(self, StreamConnection connection) except -1:
        cdef Py_ssize_t index = connection.wr_base >> INDEX_SHIFT
        self.table[index] = None
        self.vacant.append(index)
        for waiting in (self.ready, self.dirty, self.failed, self.in_want):
            if connection in waiting:
                waiting.remove(connection)
        connection.listed = connection.dirty = False
        connection.set_blocked(False)
        return 0

    @property
    def connections(self):
        """The live connections."""
        return [connection for connection in self.table if connection is not None]

    # -- the pass ------------------------------------------------------------------------------------

    cdef inline int deliver_later(self, StreamConnection connection) except -1:
        if not connection.listed:
            connection.listed = True
            self.ready.append(connection)
        return 0

    cdef inline int flush_later(self, StreamConnection connection) except -1:
        if not connection.dirty:
            connection.dirty = True
            self.dirty.append(connection)
        return 0

    cdef int wake_if_running(self) except -1:
        """The same from where connections end: their loop may have ended before."""
        if not self.closed and not self.loop.is_closed():
            self.wake()
        return 0

    cdef int wake(self) except -1:
        """Have a pass run soon."""
        if not self.scheduled and not self.in_pass and not self.closed:
            self.scheduled = True
            self.call_soon(self.pass_method)
        return 0

    def pass_(self):
        """One pass, as call_soon runs it."""
        self.scheduled = False
        self.look()

    def channel_ready(self):
        """The completion channel is readable: take its events, then look. Returns whether there were any."""
        cdef CQ cq
        cdef Py_ssize_t events = 0
        if self.pid != verbs.rn_pid:
            return False
        # As many as there were busy queues, each of which an arming gives one. Should there be more, the descriptor
        # stays readable; asking until there is none would cost a system call at each wake-up.
        while events < self.expected and (cq := self.channel.get_cq_event()) is not None:
            events += 1
            cq.armed = NOT_ARMED
            self.rouse(cq)
            if cq.unacked >= ACK_BATCH:
                cq.ack_rest()
        if events:
            self.wakeups += 1
            self.look()
        return events > 0

    cdef int look(self) except -1:
        cdef uint64_t messages = self.messages
        cdef bint quiet = True
        if self.closed or self.in_pass or self.pid != verbs.rn_pid:
            return 0
        self.in_pass = True
        self.passes += 1
        self.tick += 1
        try:
            if (
                self.poll() == 0 and self.awake and not self.ready and not self.dirty
                and self.window.limit_ns and (self.window.ns or self.blocked)
            ):
                self.spin()
            self.deliver_all()
            self.flush_all()
            self.fail_all()
            if self.empty_rings:
                self.close_empty_rings()
            if self.tired:
                self.send_to_bed()
            quiet = not (
                self.ready or self.dirty or self.failed or self.keeping or self.completion_next < self.completion_count)
        except BaseException:
            quiet = False
            raise
        finally:
            self.in_pass = False
            if not self.closed:
                self.rest(quiet, messages != self.messages)
        return 0

    cdef int rest(self, bint quiet, bint got_messages) except -1:
        """Pass again, or arm and sleep."""
        cdef uint64_t now
        if not quiet:
            return self.wake()
        if self.window.limit_ns:
            now = now_ns()
            if got_messages:
                watch_learn(&self.window, now)
            # Writers that wait for credits expect them: a reader grants half a ring at a time.
            if now - self.window.last_ns < (self.window.limit_ns if self.blocked else self.window.ns):
                return self.wake()
        if self.scheduled:
            return 0
        if self.awake and not self.lost:
            if self.arm(0) and (self.poll() or self.failed):
                return self.wake()
            self.expected = max(1, len(self.awake))
            self.put_to_sleep(0)
        self.sleeps += 1
        self.window.slept = True
        return 0

    cdef int rouse(self, CQ cq) except -1:
        """Poll it from now on. One that is not ours (any more) is left alone."""
        cq.last_hit = self.hits
        if not cq.awake and cq in self.cqs:
            cq.awake = True
            self.awake.append(cq)
        return 0

    cdef int rouse_all(self) except -1:
        cdef CQ cq
        for cq in self.cqs:
            self.rouse(cq)
        return 0

    cdef int arm(self, uint64_t missed) except -1:
        """Those that are awake and have missed so many hits; returns how many were not armed yet.

        One that is, as no event of it has been taken, needs no other arming: either that one stands, or its event waits
        at the channel.
        """
        cdef CQ cq
        cdef int rc, count = 0
        for cq in self.awake.copy():
            if cq.armed or self.hits - cq.last_hit < missed:
                continue
            rc = verbs.rn_req_notify_cq(cq.ptr, 0)
            if rc < 0:
                self.lose_queue(cq, OSError(-rc, f"ibv_req_notify_cq: {strerror(-rc).decode()}"))
            cq.armed = ARMED
            count += 1
        return count

    cdef int put_to_sleep(self, uint64_t missed) except -1:
        """Those that are armed, were found empty after that, and have missed so many hits."""
        cdef CQ cq
        cdef list awake = []
        for cq in self.awake:
            if cq.armed == ARMED_AND_EMPTY and self.hits - cq.last_hit >= missed:
                cq.awake = False
            else:
                awake.append(cq)
        self.awake = awake
        return 0

    cdef int send_to_bed(self) except -1:
        """The ones that are empty while others are not: no pass is to look at them."""
        self.tired = False
        if not self.lost:
            self.arm(MISSED)
            self.poll()     # one that has something after all stays
            self.put_to_sleep(MISSED)
        return 0

    cdef int spin(self) except -1:
        """Look for a couple of microseconds; a message mostly comes right behind the last one."""
        cdef uint64_t until = now_ns() + SPIN_NS
        cdef int i
        while self.poll() == 0:
            for i in range(8):
                cpu_relax()
            if now_ns() > until:
                break
        return 0

    cdef int poll(self) except -1:
        """Take completions, at most a batch a queue; returns how many."""
        cdef CQ cq
        cdef int total = 0, n
        # What an exception kept the last pass from handing out comes first.
        if self.completion_next < self.completion_count:
            total += self.completion_count - self.completion_next
            self.dispatch()
        if self.keeping:
            total += self.dispatch_kept()
        for cq in self.awake:
            if self.keeping:
                total += self.dispatch_kept()
            self.polls += 1
            n = verbs.rn_poll_cq(cq.ptr, BATCH, self.completions)
            if n < 0:
                self.lose_queue(cq, OSError(-n, f"ibv_poll_cq: {strerror(-n).decode()}"))
                return total + 1    # the other queues at the next look
            if n:
                total += n
                self.hits += 1
                cq.last_hit = self.hits
                self.completion_next = 0
                self.completion_count = n
                self.dispatch()
            else:
                if cq.armed == ARMED:
                    cq.armed = ARMED_AND_EMPTY
                if self.hits - cq.last_hit >= MISSED:
                    self.tired = True
        return total

    def lose_queue(self, CQ cq, error):
        """A completion queue has failed for good (it was overrun, say), and with it all connections on it."""
        cdef StreamConnection connection
        if cq not in self.cqs:
            return
        self.remove_queue(cq)
        self.lost_cqs.append(cq)
        for connection in self.connections:
            if connection.qp is not None and connection.qp.send_cq is cq:
                connection.fail(type(error)(*error.args))   # each its own: it is raised in many places

    def lose_device(self):
        """The device has failed, and is not to be asked to tell of completions. What there is of them is taken yet."""
        self.lost = True
        self.rouse_all()

    cdef int dispatch_kept(self) except -1:
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

    cdef int dispatch_shared(self, verbs.ibv_wc *wc) except -1:
        cdef SharedRing ring
        cdef uint64_t number = (wc.wr_id >> STREAM_GENERATION_SHIFT) & 0xFFFF
        ring = self.shared_rings[number] if number < <uint64_t>len(self.shared_rings) else None
        if ring is None:
            self.stale += 1
            return 0
        return ring.received(wc)

    cdef int dispatch(self) except -1:
        cdef verbs.ibv_wc *wc
        cdef StreamConnection connection
        cdef uint64_t index
        while self.completion_next < self.completion_count:
            wc = &self.completions[self.completion_next]
            self.completion_next += 1
            index = wc.wr_id >> INDEX_SHIFT
            connection = self.table[index] if index < <uint64_t>len(self.table) else None
            if connection is None or (wc.wr_id & WR_BASE_MASK) != connection.wr_base:
                if index == SHARED_INDEX:
                    self.dispatch_shared(wc)
                else:
                    self.stale += 1
                continue
            if not wc.wr_id & SEND_FLAG:
                self.messages += 1
            connection.completed(wc)
        return 0

    cdef int deliver_all(self) except -1:
        cdef list ready = self.ready
        cdef StreamConnection connection
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
                    connection.deliver()
        except Exception as exc:
            connection.fail(exc)    # not the protocol's (those are reported): ours, or the device's
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
        cdef StreamConnection connection
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
                    connection.settle()
        except Exception as exc:
            connection.fail(exc)
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
        cdef StreamConnection connection
        cdef bint drained
        if not self.failed:
            return 0
        self.rouse_all()    # what the failed ones still have may be in a queue whose event has not been taken
        drained = self.poll() == 0
        for connection in list(self.failed):
            # Hearing of one's end may be that of others, too.
            if connection in self.failed and (drained or self.tick - connection.failure_tick > PATIENCE):
                self.failed.remove(connection)
                connection._fabric_failed(connection.failure)
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
        self.closed = True
        # A cycle through the loop, which no collector breaks: neither side can be cleared.
        self.loop = self.call_soon = self.pass_method = None
        for pool in self.pools.values():
            (<RingPool>pool).close()
        if self.implicit is not None:
            self.implicit.close()
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
            "gap_ns": self.window.gap_ns,
        }
