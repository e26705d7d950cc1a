# Traffic that is measured: requests are posted again and again and their completions polled, in C: for `rdmanet perf`.
#
# What is measured is the device, so between two requests there is no Python, no object and no lock, as in the programs
# of perftest. Python prepares one request for each queue pair, gives it here, and calls flow() or exchange() for slices
# of time: between slices it looks at its clock, at its peer and at signals. A slice holds no GIL.
#
#     flow       requests of all queue pairs, up to `depth` in flight on each: bandwidth
#     exchange   one request at a time, and then a wait: for the peer's byte in our memory (WRITE), for its message
#                (SEND), or for our own completion (READ, atomics): latency
#
# These requests are not in the tables of their queue pairs (inflight.pxi). Each queue pair keeps their elements, so
# the memory is there as long as the device may touch it; and their wr_ids have no generation of a queue pair, so that
# CQ.poll() counts what is left of them as stray. Nobody else may post to these queue pairs, poll their completion
# queues, or close any of them, while a slice runs.

cdef extern from *:
    """
    static inline uint8_t rn_byte_of_peer(const void *at)
    {
        return __atomic_load_n((const uint8_t *)at, __ATOMIC_ACQUIRE);
    }
    """
    uint8_t rn_byte_of_peer(const void *) noexcept nogil

cdef enum:
    POLLED_AT_ONCE = 16
    PASSES_A_LOOK = 64          # at the clock
    ANSWERS_A_LOOK = 1024
    LONG_US = 10                # after a round trip as long as this, it always looks
    SLEEP_NS = 10_000_000       # at most: the end of the slice is not missed by more
    LANE_SHIFT = 2              # wr_id: 48.. no generation, 16.. requests that it completes, 2.. the lane
    LANES = 1 << 14
    MANY_SHIFT = 16

    BY_MEMORY = 0
    BY_RECEIVE = 1
    BY_COMPLETION = 2

    OVER = 0                    # how a slice ended: all was done,
    TIME_IS_UP = 1              # or its time was over,
    FAILED = 2                  # or a completion says that its request failed
    NOT_SUCCESS = -1000         # the same, among numbers of which the negative ones are -errno


cdef struct lane_of_traffic:    # a queue pair
    verbs.ibv_qp *qp
    verbs.ibv_send_wr *chain    # list_size requests, all alike
    uint64_t tag                # of their wr_ids
    uint64_t posted
    int in_flight
    int unsignaled


@cython.final
@cython.no_gc_clear
cdef class Traffic:
    """The same requests again and again, on queue pairs that share their completion queues.

    :param qps: the queue pairs, connected, all with the same send_cq and recv_cq
    :param sends: a SendWR for each, or none; its flags say whether it is INLINE
    :param receives: a RecvWR for each, or none
    :param depth: how many requests may be in flight on each
    :param list_size: how many are posted as one chain
    :param every: which one is signaled: 1 is each
    :param receive_depth: how many receives are kept posted on each; they are posted here
    :param sleeps: it waits for events of the queues' channel, and does not poll
    :param memory: BY_MEMORY: the region that is written from, and by the peer into
    :param outgoing: the offset there of the last byte that is written to the peer
    :param incoming: the offset there of the last byte that the peer writes
    :ivar sent: completed requests
    :ivar received: completed receives
    """

    cdef list qps
    cdef CQ send_queue, recv_queue
    cdef MR memory
    cdef size_t outgoing, incoming
    cdef lane_of_traffic *lanes
    cdef verbs.ibv_send_wr *chains
    cdef verbs.ibv_recv_wr *receives    # POLLED_AT_ONCE for each lane
    cdef int count, list_size, depth, every
    cdef bint sleeps, armed, waiting, early
    cdef readonly uint64_t sent, received
    cdef uint64_t lap_began, flow_began, due
    cdef verbs.ibv_cq *send_cq
    cdef verbs.ibv_cq *recv_cq
    cdef const verbs.rn_library *library
    cdef verbs.ibv_comp_channel *channel
    cdef char *source
    cdef const char *target
    cdef verbs.ibv_wc failed

    def __init__(self, list qps not None, list sends not None, list receives not None, *, int depth, int list_size=1,
                 int every=1, int receive_depth=0, bint sleeps=False, MR memory=None, size_t outgoing=0,
                 size_t incoming=0):
        cdef QP qp
        cdef int i
        if self.lanes is not NULL:
            raise RuntimeError("Traffic: it has been initialized")
        if not 0 < len(qps) < LANES or len(sends) not in (0, len(qps)) or len(receives) not in (0, len(qps)):
            raise ValueError(f"Traffic: {len(qps)} queue pairs, {len(sends)} sends and {len(receives)} receives")
        if not (0 < list_size <= depth and 0 < every <= depth and receive_depth >= 0):
            raise ValueError(f"Traffic: depth {depth}, lists of {list_size}, every {every}, {receive_depth} receives")
        self.qps, self.count = list(qps), len(qps)
        self.list_size, self.depth, self.every, self.sleeps = list_size, depth, every, sleeps
        if memory is not None and max(outgoing, incoming) >= memory.length:
            raise IndexError(f"Traffic: bytes {outgoing} and {incoming} are not within {memory.length}")
        self.memory, self.outgoing, self.incoming = memory, outgoing, incoming
        self.send_queue, self.recv_queue = (<QP?>qps[0]).send_cq, (<QP>qps[0]).recv_cq
        if receives and self.send_queue is self.recv_queue:
            raise ValueError("Traffic: receives need a completion queue of their own")
        if sleeps and (self.send_queue.channel is None or self.recv_queue.channel is not self.send_queue.channel):
            raise ValueError("Traffic: to sleep, both completion queues need the same channel")
        self.lanes = <lane_of_traffic *>calloc(self.count, sizeof(lane_of_traffic))
        self.chains = <verbs.ibv_send_wr *>calloc(self.count * list_size, sizeof(verbs.ibv_send_wr))
        self.receives = <verbs.ibv_recv_wr *>calloc(self.count * POLLED_AT_ONCE, sizeof(verbs.ibv_recv_wr))
        if self.lanes is NULL or self.chains is NULL or self.receives is NULL:
            raise MemoryError
        for i in range(self.count):
            qp = qps[i]
            qp.usable()
            if qp.send_cq is not self.send_queue or qp.recv_cq is not self.recv_queue:
                raise ValueError(f"Traffic: {qp!r} does not share the completion queues of {qps[0]!r}")
            self.begin_lane(i, qp, sends[i] if sends else None, receives[i] if receives else None)
        self.prepare()
        for i in range(self.count if receives else 0):
            check(self.post_receives(&self.lanes[i], receive_depth), "ibv_post_recv")

    def __dealloc__(self):
        free(self.lanes)
        free(self.chains)
        free(self.receives)

    cdef int begin_lane(self, int index, QP qp, SendWR send, RecvWR receive) except -1:
        cdef lane_of_traffic *lane = &self.lanes[index]
        cdef verbs.ibv_recv_wr *posted = &self.receives[index * POLLED_AT_ONCE]
        cdef int i
        lane.qp = qp.ptr
        lane.tag = (qp.generation ^ 0xffff) << QP_GENERATION_SHIFT | <uint64_t>index << LANE_SHIFT
        if send is not None:
            check_send(qp, send)
            qp.keep(send.elements)
            lane.chain = &self.chains[index * self.list_size]
            for i in range(self.list_size):
                lane.chain[i] = send.c
                lane.chain[i].send_flags &= ~<unsigned int>verbs.IBV_SEND_SIGNALED
                lane.chain[i].wr_id = lane.tag | WR_SEND
                lane.chain[i].next = &lane.chain[i + 1] if i + 1 < self.list_size else NULL
        if receive is not None:
            check_receives([receive])
            qp.keep(receive.elements)
            for i in range(POLLED_AT_ONCE):
                posted[i] = receive.c
                posted[i].wr_id = lane.tag
                posted[i].next = &posted[i + 1] if i + 1 < POLLED_AT_ONCE else NULL
        return 0

    cdef int prepare(self) except -1:
        """Before a slice: everything is open, and where it was."""
        cdef QP qp
        if self.lanes is NULL:
            raise RuntimeError("Traffic: it was not initialized")
        for qp in self.qps:
            qp.usable()
        self.send_queue.usable()
        self.recv_queue.usable()
        self.send_cq, self.recv_cq = self.send_queue.ptr, self.recv_queue.ptr
        self.library = self.send_queue.context.library.c
        if self.sleeps:
            self.send_queue.channel.usable()
            self.channel = self.send_queue.channel.ptr
        if self.memory is not None:
            self.memory.usable()
            self.source = <char *>self.memory.addr + self.outgoing
            self.target = <const char *>self.memory.addr + self.incoming
        return 0

    # ---- What Python calls ----

    @property
    def in_flight(self):
        """How many requests were posted and have not completed."""
        cdef int i, total = 0
        for i in range(self.count):
            total += self.lanes[i].in_flight
        return total

    def flow(self, double seconds, uint64_t limit=0, *, bint posting=True, double rate=0.0):
        """Keep the queues full for a slice of time. True if `limit` was reached on all queue pairs, or, with posting
        off, if everything has completed.

        :param limit: how many requests are to be posted on each; 0 is any number
        :param rate: how many a second, on all together; 0.0 is no limit
        :raises CompletionError: a request failed
        """
        cdef uint64_t until = now_ns() + <uint64_t>(seconds * 1e9)
        cdef double interval_ns = self.count * 1e9 / rate if rate > 0 else 0.0
        cdef int how
        self.prepare()
        with nogil:
            how = self.run_flow(until, limit if limit else ~<uint64_t>0, posting, interval_ns)
        return self.ended(how)

    def exchange(self, double seconds, Histogram found not None, uint64_t limit=0, *, int by, bint answers,
                 double rate=0.0):
        """Post one request at a time, and wait, for a slice of time. True if `limit` was reached.

        :param limit: how many times `found` is to have; 0 is any number
        :param found: gets the times: of BY_COMPLETION the whole time, else half a round trip
        :param by: BY_MEMORY (0), BY_RECEIVE (1) or BY_COMPLETION (2): what is waited for
        :param answers: it waits first
        :raises CompletionError: a request failed
        """
        cdef uint64_t until = now_ns() + <uint64_t>(seconds * 1e9)
        cdef double clock_ns = cheap_ns(1 << 30) / <double>(1 << 30)
        cdef int how
        self.prepare()
        if by == BY_MEMORY and (self.source is NULL or self.target is NULL):
            raise ValueError("Traffic.exchange: BY_MEMORY needs memory")
        if self.lanes[0].chain is NULL:
            raise ValueError("Traffic.exchange: it has no sends")
        with nogil:
            how = self.run_exchange(until, limit if limit else ~<uint64_t>0, by, answers,
                                    clock_ns if by == BY_COMPLETION else clock_ns / 2, found,
                                    <uint64_t>(1e9 / rate / clock_ns) if rate > 0 else 0)
        return self.ended(how)

    def restart(self):
        """flow() counts from 0 again. Everything has completed.

        :raises RuntimeError: something is in flight
        """
        cdef int i
        if self.in_flight:
            raise RuntimeError(f"Traffic.restart: {self.in_flight} requests are in flight")
        for i in range(self.count):
            self.lanes[i].posted = 0
        self.sent = self.received = self.flow_began = 0

    cdef bint ended(self, int how) except -1:
        if how < 0:
            raise OSError(-how, f"{strerror(-how).decode()}: a call of the measured traffic failed")
        if how == FAILED:
            raise completion_error(self.failed.status, "send" if self.failed.wr_id & WR_SEND else "receive",
                                   self.failed.vendor_err, self.failed.qp_num, peer_gone=False)
        return how == OVER

    # ---- The loops ----

    cdef int run_flow(self, uint64_t until, uint64_t limit, bint posting, double interval_ns) noexcept nogil:
        cdef int i, rc, moved, passes = 0
        cdef uint64_t allowed
        cdef bint over
        self.flow_began = self.flow_began or now_ns()
        while True:
            moved, over = 0, True
            allowed = min(limit, <uint64_t>((now_ns() - self.flow_began) / interval_ns) + 1) if interval_ns else limit
            for i in range(self.count):
                if self.lanes[i].chain is NULL:
                    continue
                rc = self.fill(&self.lanes[i], allowed) if posting else self.finish(&self.lanes[i])
                if rc < 0:
                    return rc
                if self.lanes[i].in_flight or (posting and self.lanes[i].posted < limit):
                    over = False
            rc = self.collect_sends()
            if rc < 0:
                return self.why(rc)
            moved += rc
            rc = self.collect_receives()
            if rc < 0:
                return self.why(rc)
            moved += rc
            if over and self.lanes[0].chain is not NULL:
                return OVER
            passes += 1
            if passes % PASSES_A_LOOK == 0 and now_ns() >= until:
                return TIME_IS_UP
            if self.sleeps and not moved:
                if now_ns() >= until:
                    return TIME_IS_UP
                rc = self.sleep(True, True)
                if rc < 0:
                    return rc

    cdef inline int fill(self, lane_of_traffic *lane, uint64_t limit) noexcept nogil:
        """Post chains while there is room."""
        cdef int rc
        while lane.in_flight + self.list_size <= self.depth and lane.posted < limit:
            rc = self.post(lane, lane.unsignaled + self.list_size >= self.every
                           or lane.posted + self.list_size >= limit
                           or lane.in_flight + 2 * self.list_size > self.depth)
            if rc < 0:
                return rc
        return 0

    cdef inline int finish(self, lane_of_traffic *lane) noexcept nogil:
        """Post one more, signaled, if otherwise the last ones would never complete."""
        if lane.unsignaled and lane.in_flight + self.list_size <= self.depth:
            return self.post(lane, True)
        return 0

    cdef inline int post(self, lane_of_traffic *lane, bint signaled) noexcept nogil:
        cdef verbs.ibv_send_wr *last = &lane.chain[self.list_size - 1]
        cdef verbs.ibv_send_wr *bad = NULL
        cdef int rc
        if signaled:
            last.send_flags |= verbs.IBV_SEND_SIGNALED
        else:
            last.send_flags &= ~<unsigned int>verbs.IBV_SEND_SIGNALED
        last.wr_id = lane.tag | <uint64_t>(lane.unsignaled + self.list_size) << MANY_SHIFT | WR_SEND
        rc = verbs.rn_post_send(lane.qp, lane.chain, &bad)
        if rc < 0:
            return rc
        lane.posted += self.list_size
        lane.in_flight += self.list_size
        lane.unsignaled = 0 if signaled else lane.unsignaled + self.list_size
        return 0

    cdef inline int post_receives(self, lane_of_traffic *lane, int many) noexcept nogil:
        cdef verbs.ibv_recv_wr *chain = &self.receives[(lane - self.lanes) * POLLED_AT_ONCE]
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef verbs.ibv_recv_wr *after
        cdef int n, rc
        while many > 0:
            n = min(many, <int>POLLED_AT_ONCE)
            after = chain[n - 1].next
            chain[n - 1].next = NULL
            rc = verbs.rn_post_recv(lane.qp, chain, &bad)
            chain[n - 1].next = after
            if rc < 0:
                return rc
            many -= n
        return 0

    cdef inline int collect_sends(self) noexcept nogil:
        """How many completions there were; -errno; or NOT_SUCCESS."""
        cdef verbs.ibv_wc wcs[POLLED_AT_ONCE]
        cdef int i, n = verbs.rn_poll_cq(self.send_cq, POLLED_AT_ONCE, wcs), many
        for i in range(n):
            if wcs[i].status != verbs.IBV_WC_SUCCESS:
                return self.failure(&wcs[i])
            many = <int><uint32_t>(wcs[i].wr_id >> MANY_SHIFT)
            self.lanes[wcs[i].wr_id >> LANE_SHIFT & (LANES - 1)].in_flight -= many
            self.sent += many
        return n

    cdef inline int collect_receives(self) noexcept nogil:
        """The same of receives, which are posted again."""
        cdef verbs.ibv_wc wcs[POLLED_AT_ONCE]
        cdef int i, rc, n, again = 0
        cdef uint64_t lane, last = 0
        if self.receives[0].sg_list is NULL:
            return 0
        n = verbs.rn_poll_cq(self.recv_cq, POLLED_AT_ONCE, wcs)
        for i in range(n):
            if wcs[i].status != verbs.IBV_WC_SUCCESS:
                return self.failure(&wcs[i])
            lane = wcs[i].wr_id >> LANE_SHIFT & (LANES - 1)
            if again and lane != last:
                rc = self.post_receives(&self.lanes[last], again)
                if rc < 0:
                    return rc
                again = 0
            last = lane
            again += 1
        if again:
            rc = self.post_receives(&self.lanes[last], again)
            if rc < 0:
                return rc
        if n > 0:
            self.received += n
        return n

    cdef int failure(self, verbs.ibv_wc *wc) noexcept nogil:
        self.failed = wc[0]
        return NOT_SUCCESS

    cdef inline int why(self, int rc) noexcept nogil:
        return FAILED if rc == NOT_SUCCESS else rc

    cdef int sleep(self, bint for_sends, bint for_receives) noexcept nogil:
        """The first call arms the queues: what came before that is polled once more. The second one sleeps."""
        cdef verbs.ibv_cq *cq = NULL
        cdef void *context
        cdef pollfd fd
        cdef timespec t
        cdef int rc = 0
        if not self.armed:
            if for_sends:
                rc = verbs.rn_req_notify_cq(self.send_cq, 0)
            if for_receives and rc >= 0:
                rc = verbs.rn_req_notify_cq(self.recv_cq, 0)
            self.armed = rc >= 0
            return rc
        fd.fd, fd.events, fd.revents = self.channel.fd, POLLIN, 0
        t.tv_sec, t.tv_nsec = 0, SLEEP_NS
        if ppoll(&fd, 1, &t, NULL) > 0 and verbs.rn_get_cq_event(self.library, self.channel, &cq, &context) >= 0:
            verbs.rn_ack_cq_events(self.library, cq, 1)
            self.armed = False
        return 0

    cdef int run_exchange(self, uint64_t until, uint64_t limit, int by, bint answers, double clock_ns,
                          Histogram found, uint64_t interval) noexcept nogil:
        cdef lane_of_traffic *lane = self.lanes
        cdef uint64_t began = self.lap_began, now
        cdef bint long_ago
        cdef int rc
        if not self.waiting:
            began = cheap_clock()
        while found.count < limit:
            if interval and not self.waiting:
                began = self.pace(interval, until)
                if not began:
                    return TIME_IS_UP
            if not self.waiting and by != BY_COMPLETION and lane.in_flight >= POLLED_AT_ONCE:
                rc = self.make_room(lane, until)
                if rc:
                    return rc if rc == TIME_IS_UP else self.why(rc)
            if not answers and not self.waiting:
                rc = self.say(lane, by)
                if rc < 0:
                    return self.why(rc)
            self.waiting = True
            rc = self.wait(lane, by, answers, until)
            if rc:
                self.lap_began = began
                return rc if rc == TIME_IS_UP else self.why(rc)
            self.waiting = False
            if answers:
                rc = self.say(lane, by)
                if rc < 0:
                    return self.why(rc)
                if lane.posted % ANSWERS_A_LOOK == 0 and now_ns() >= until:
                    return TIME_IS_UP
                continue
            now = cheap_clock()
            found.note(<uint64_t>((now - began) * clock_ns + 0.5))
            long_ago = now - began > LONG_US * cheap_microsecond()
            began = now
            if (long_ago or found.count % PASSES_A_LOOK == 0) and now_ns() >= until:
                return TIME_IS_UP
        return OVER

    cdef uint64_t pace(self, uint64_t interval, uint64_t until) noexcept nogil:
        """When the next request is due, after waiting for that; 0 if the slice is over before. Its time counts from
        then on, also if the answer before it was late: so a stall counts for all that it delays."""
        cdef uint64_t now = cheap_clock()
        if self.early or not self.due:
            self.due = max(self.due, now)       # what passed between two slices was no wait for the peer
        self.early = False
        while now < self.due:
            if now_ns() >= until:
                self.early = True
                return 0
            now = cheap_clock()
        self.due += interval
        return self.due - interval

    cdef inline int say(self, lane_of_traffic *lane, int by) noexcept nogil:
        if by == BY_MEMORY:
            self.source[0] = <char>(lane.posted + 1)
        return self.post(lane, True)

    cdef int make_room(self, lane_of_traffic *lane, uint64_t until) noexcept nogil:
        """0 when there is room for a send. Sends complete only if the peer has receives for them."""
        cdef int rc, passes = 0
        while lane.in_flight >= POLLED_AT_ONCE:
            rc = self.collect_sends()
            if rc < 0:
                return rc
            passes += 1
            if passes % PASSES_A_LOOK == 0 and now_ns() >= until:
                return TIME_IS_UP
        return 0

    cdef inline int wait(self, lane_of_traffic *lane, int by, bint answers, uint64_t until) noexcept nogil:
        """0 when it has come."""
        cdef uint8_t expected = <uint8_t>(lane.posted + (1 if answers else 0))
        cdef int rc, passes = 0
        while True:
            if by == BY_MEMORY:
                if rn_byte_of_peer(self.target) == expected:
                    return 0
            else:
                rc = self.collect_receives() if by == BY_RECEIVE else self.collect_sends()
                if rc:
                    return rc if rc < 0 else 0
                if self.sleeps:
                    rc = self.sleep(by == BY_COMPLETION, by == BY_RECEIVE)
                    if rc < 0:
                        return rc
            passes += 1
            if passes % PASSES_A_LOOK == 0 or self.sleeps:
                if by != BY_COMPLETION:
                    rc = self.collect_sends()
                    if rc < 0:
                        return rc
                if now_ns() >= until:
                    return TIME_IS_UP
