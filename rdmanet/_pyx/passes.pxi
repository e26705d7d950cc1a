# The passes of a data engine: all connections of the byte stream of one (loop, device).
#
# It is a Watcher (watcher.pxi), whose passes come when completions do, or when a connection has something to do. A pass
# gives each completion to its connection, lets the connections deliver, flushes what was written meanwhile, reports
# failures, and returns to the loop. What connections ask of their engine is in engine.pxi.
#
# What is particular to it: it expects messages as long as it lives; the window is learned from those only, not from the
# completions of its own sends; and while connections wait for credits it watches for longer (`blocked`), since a reader
# grants half a ring at a time. A thousand connections have several completion queues, each twice as large as the one
# before, so there are few to be watched.

cdef enum:
    STREAM_QUEUE = 4096             # completion queue entries asked for, of the first queue
    STREAM_QUEUE_MOST = 65536       # and of any; the embedded device has no more queue pairs for one than fit that
    PATIENCE = 64                   # passes, of a batch each, that empty a queue of STREAM_QUEUE


@cython.no_gc_clear
cdef class StreamEngine(_Engine):
    """All connections of one event loop on one device.

    `notifier` tells when the completion channel is readable, and is told if a forked child is who hears it.
    `busy_poll` is how long to watch after each message, in seconds: None leaves it to the engine (see busypoll.pxi), 0
    switches it off.
    """

    cdef readonly GrownRings grown
    cdef readonly KeepAlive alive

    def __cinit__(self, loop, notifier, Context context, busy_poll=None):
        self.set_busy_poll(busy_poll)
        self.grown = GrownRings(self)
        self.alive = KeepAlive(self, context.library)
        self.begin(CompChannel(context), notifier, loop.call_soon, self.channel_ready, contextvars.copy_context())
        self.totals = begin_count(self)

    def set_busy_poll(self, busy_poll):
        """Watch for `busy_poll` seconds after each message (None: adaptive, 0: none)."""
        watch_limit(&self.window, busy_poll)

    cdef int expel(self, Member connection) except -1:
        self.grown.remove(<Receiver>connection)
        return _Engine.expel(self, connection)

    cdef int shrink_later(self, Member connection) except -1:
        return self.grown.add(<Receiver>connection)

    cdef int run_by_hand(self, bint by_hand) except -1:
        _Engine.run_by_hand(self, by_hand)
        return self.alive.run_by_hand(by_hand)

    # -- queues --------------------------------------------------------------------------------------

    cdef int resting(self) except -1:
        return cool_down(self, 0)

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

    @property
    def can_share(self):
        """Whether the device has shared receive queues."""
        attr = self.pd.context.query_device()
        return attr.max_srq > 0 and attr.max_srq_wr > 0

    @property
    def reads_in_place(self):
        """Whether the device reads bytes from where they are, without a registration (on-demand paging)."""
        return self.implicit_lkey_valid

    def reserve(self, entries):
        """A completion queue with room for `entries` more, for a queue pair of such depths."""
        cdef CQ cq
        cdef verbs.ibv_device_attr_ex attr
        for cq in self.cqs:
            if cq.reserved + entries <= cq.ptr.cqe:
                cq.reserved += entries
                return cq
        size = max([STREAM_QUEUE] + [min(2 * (<CQ>other).ptr.cqe, STREAM_QUEUE_MOST) for other in self.cqs])
        self.pd.context.ask(&attr)
        size = max(min(size, attr.orig_attr.max_cqe), entries)
        cq = CQ(self.pd.context, size, self.channel)
        # Not on adapters: they complete sends later, so some are in flight whenever the engine goes to sleep. Nor for
        # shared receives: unmarked SENDs of one peer could use up those that others need, and would not wake us.
        cq.solicits = self.pd.context.library.embedded_device
        self.add_queue(cq, entries)
        return cq

    def unreserve(self, CQ cq, entries):
        """The queue pair made on `cq` is gone, or never came to be."""
        cq.reserved -= entries

    # -- the pass ------------------------------------------------------------------------------------

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

    cdef int work(self, int found) except -1:
        """Let the connections deliver, flush and end."""
        self.loop_has_turned()
        self.deliver_all()
        if self.stalled:
            relieve_stalled(self)
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
        cdef Receiver connection
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

    cdef int deliver_all(self) except -1:
        cdef list ready = self.ready
        cdef Receiver connection
        cdef Py_ssize_t i = 0, n = len(ready)
        if n == 0:
            return 0
        self.ready = []
        try:
            while i < n:
                connection = <Receiver>ready[i]
                i += 1
                if self.is_to_deliver(connection):
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
        cdef Receiver connection
        cdef Py_ssize_t i = 0, n = len(dirty)
        if n == 0:
            return 0
        self.dirty = []
        try:
            while i < n:
                connection = <Receiver>dirty[i]
                i += 1
                if self.is_to_flush(connection):
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
        cdef Receiver connection
        cdef bint drained
        if not self.failed or self.by_hand:     # by hand: the loop will report them
            return 0
        self.rouse_all()    # what the failed ones still have may be in a queue whose event has not been taken
        drained = self.poll() == 0
        for connection in list(self.failed):
            # Hearing of one's end may be that of others, too.
            if connection in self.failed and (drained or self.tick - connection.failure_tick > PATIENCE):
                self.failed.remove(connection)
                connection.owner.fabric_failed(connection.failure)
        return 0

    def close(self):
        """Give everything back; the connections must have been released."""
        cdef CQ cq
        if self.closed:
            return
        count_engine(self, &(<Totals>self.totals).engines)
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

        `us_asleep` and `us_polling` are times: the latter awake without anything to do. `polling` is whether it is
        awake now. `us_longest_stretch` is the longest time from one pass to the next in which it did not sleep: the
        loop did something else. `long_stretches` took 10 ms or more each, `us_in_long_stretches` in all. `queues` and
        `queues_awake` are of now: completion queues, and those of them that a pass polls.
        """
        return {
            "passes": self.passes,
            "sleeps": self.sleeps,
            "wakeups": self.wakeups,
            "messages": self.messages,
            "polls": self.polls,
            "queues": len(self.cqs),
            "queues_awake": len(self.awake),
            "polling": self.scheduled or self.in_pass,
            "us_asleep": slept_ns(&self.window) // 1000,
            "us_polling": self.window.polled_ns // 1000,
            "us_longest_stretch": self.window.worked.longest_ns // 1000,
            "long_stretches": self.window.worked.long_count,
            "us_in_long_stretches": self.window.worked.long_ns // 1000,
            "registrations": self.registrations.misses,
            "registrations_reused": self.registrations.hits,
            "stale_completions": self.stale,
            "window_ns": self.window.ns,
            "busy_ns": self.window.busy_ns,
            "wait_ns": self.window.wait_ns,
        }
