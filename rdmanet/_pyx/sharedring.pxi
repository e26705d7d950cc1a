# One shared receive queue for many connections of the byte stream (start_rdma_server(shared_receive=True)).
#
# A receive ring per connection costs data_slots + CONTROL_RESERVE receives, even for an idle connection. Here all
# connections of a server receive from one shared receive queue (SRQ), and the rule that a SEND always finds a receive
# (credit.py) holds for their sum:
#
#     posted receives >= sum over the connections of (granted and unused credits + control frames that may come)
#
# Accounting. Each slot is either posted, or holds bytes that are not yet consumed. A connection's share is what it was
# promised (grantable - received: granted to the peer, or to be granted with the next header) plus what it holds. Slots
# are created and posted before a connection is accepted, so that there are
#
#     slots >= members * (SHARED_OWN + SHARED_CONTROL) + common
#
# Each connection is guaranteed SHARED_OWN data slots and its allowance of control frames; the `common` slots are lent.
# The part of a share above SHARED_OWN is borrowed; all borrowed slots together never exceed `common`. The slot of a
# control frame is posted again at once, a data slot as soon as its bytes are consumed: it does not wait for half a
# ring, since the next connection may need it.
#
# Borrowing. A granted credit cannot be revoked: a connection that falls silent keeps its credits until it sends again,
# or ends. So grants follow use. A connection's target (`aim`, see promise()) is SHARED_OWN slots at first. When its
# peer has used up all credits it was told of, the target doubles, up to data_slots; when the peer had more than half of
# them left, the target shrinks by one. A connection may borrow at most half of the slots that are left, rounded up. So
# a single connection gets at most half of the common slots, the next one a quarter, and as long as any slot is left, a
# newcomer gets one. A connection that does not read keeps what it borrowed, at most data_slots - SHARED_OWN; even when
# all common slots are gone, the others continue with their own.
#
# Overruns. A peer that sends more than it was granted consumes receives of other connections before anyone can notice.
# Its frame is not delivered, its connection is cut off at once without an Abort, and its slots are posted again. Peers
# whose SENDs find no receive meanwhile retry in their devices (the accepting side asks for that: SHARED_RNR_RETRY in
# establish.py). iWARP has no such retry: there these connections are lost.
#
# The end of a connection. Destroying a queue pair does not flush the receives of an SRQ. Its completions that were not
# polled would be lost with it, and their slots, too. So the queue pair is first set to ERR, after which it consumes no
# more receives, and its completions are polled from the CQ. Completions of other connections found there are kept for
# the next poll (`kept`): a connection may be ended from any callback, and no other callback may run inside it. On
# devices other than the embedded one a message in flight may have consumed a receive that never completes: its slot is
# written off, and replaced by another. A queue with many such slots, and one that is too large for its few
# connections, is given up when its last connection ends.

cdef enum:
    SHARED_QUEUE = 8192             # slots of one queue, at most
    SHARED_GROWTH = 64              # minimum number of slots created at a time
    SHARED_LOST = 64                # slots written off before newcomers get another queue

STREAM_SHARED_OWN = SHARED_OWN
STREAM_SHARED_SLOTS_MAX = SHARED_QUEUE // 2

cdef struct shared_slot:
    char *address
    uint32_t lkey
    bint posted


@cython.no_gc_clear
cdef class SharedRing:
    """The slots of one shared receive queue, and their distribution among its connections."""

    cdef readonly _Engine engine
    cdef readonly CQ cq
    cdef readonly SRQ srq
    cdef readonly uint32_t slot_bytes, data_slots
    cdef uint32_t asked                         # common slots that were asked for; the device may have room for fewer
    cdef readonly uint32_t members, room        # the number of connections, and its limit
    cdef QPMap numbers
    cdef uint64_t wr_base
    cdef list slabs
    cdef shared_slot *slots
    cdef uint32_t made, most                    # the number of slots, and its limit
    cdef uint32_t posted                        # receives
    cdef uint32_t own                           # data slots that are each connection's own
    cdef int64_t common, left                   # slots to lend, and how many of them are not lent
    cdef uint32_t lost                          # slots that were lost with a queue pair
    cdef verbs.ibv_wc *kept                     # completions of other connections, found while one was ended
    cdef uint32_t kept_next, kept_count, kept_size

    def __cinit__(self, _Engine engine not None, uint32_t slot_bytes, uint32_t data_slots, uint32_t common,
                  uint32_t number):
        attr = engine.pd.context.query_device()
        cdef uint32_t sends = stream_queue_depths(data_slots)[0]
        self.engine = engine
        self.slot_bytes = slot_bytes
        self.data_slots = data_slots
        self.asked = common
        self.numbers = QPMap()
        self.wr_base = stream_wr_base(SHARED_INDEX, number)
        self.slabs = []
        self.own = min(<uint32_t>SHARED_OWN, data_slots)
        self.most = min(SHARED_QUEUE, attr.max_srq_wr, attr.max_cqe // 2)
        self.common = self.left = min(common, self.most // 2)
        spare = min(<uint32_t>SHARED_LOST, self.most // 8)  # to replace slots that are written off
        self.room = min(
            (self.most - <uint32_t>self.common - spare) // (self.own + SHARED_CONTROL),
            (attr.max_cqe - self.most) // sends,
        )
        if self.room == 0:
            raise OSError(ENOMEM, f"a shared receive queue of {self.most} receives is too small for any connection")
        self.slots = <shared_slot *>malloc(self.most * sizeof(shared_slot))
        if self.slots == NULL:
            raise MemoryError
        # A peer that overruns its credits may fill all slots, so the CQ must have room for their completions.
        self.srq = SRQ(engine.pd, SRQAttr(max_wr=self.most, max_sge=1))
        try:
            self.cq = CQ(engine.pd.context, self.most + self.room * sends, engine.channel)
        except BaseException:
            self.srq.close()
            raise

    def __dealloc__(self):
        free(self.slots)
        free(self.kept)

    # -- coming and going ----------------------------------------------------------------------------

    cdef bint serves(self, uint32_t slot_bytes, uint32_t data_slots, uint32_t common):
        return self.slot_bytes == slot_bytes and self.data_slots == data_slots and self.asked == common

    cdef bint has_room(self):
        return self.members < self.room and self.lost < SHARED_LOST and self.cq in self.engine.cqs

    cdef int join(self) except -1:
        """Post the slots that a connection may be promised. Call it before the queue pair is created."""
        self.members += 1
        try:
            self.make_enough()
        except BaseException:
            self.members -= 1
            raise
        return 0

    cdef int make_enough(self) except -1:
        cdef uint32_t needed = self.members * (self.own + SHARED_CONTROL) + <uint32_t>self.common + self.lost
        if needed > self.made:
            self.make(needed - self.made)
        return 0

    cdef int make(self, uint32_t count) except -1:
        """Create and post this many slots, and a few more if there is room, so that there are few regions."""
        cdef size_t stride = stream_stride(self.slot_bytes)
        cdef uint32_t i
        cdef MR mr
        if count > self.most - self.made:
            raise OSError(ENOMEM, f"a shared receive queue of {self.most} receives is full")
        count = min(max(count, <uint32_t>SHARED_GROWTH, self.made // 4), self.most - self.made)
        mr = self.engine.pd.alloc_mr(stride * count, verbs.IBV_ACCESS_LOCAL_WRITE)
        self.slabs.append(mr)
        for i in range(self.made, self.made + count):
            self.slots[i].address = mr.addr + (i - self.made) * stride
            self.slots[i].lkey = mr.ptr.lkey
            self.slots[i].posted = False
        self.made += count
        for i in range(self.made - count, self.made):
            self.post_later(i)
        return self.post()

    cdef int part(self, Connection connection) except -1:
        """Take back the slots of a connection whose queue pair was set to ERR and is about to be destroyed."""
        cdef uint32_t qp_num = connection.qp_c.qp_num
        cdef uint32_t left, i
        cdef int n
        for i in range(<uint32_t>self.engine.completion_next, <uint32_t>self.engine.completion_count):
            self.claim_back(&self.engine.completions[i], qp_num)
        for i in range(self.kept_next, self.kept_count):
            self.claim_back(&self.kept[i], qp_num)
        # One queue's worth at most: other connections may go on producing completions.
        left = self.cq.ptr.cqe
        while left:
            self.keep_room(BATCH)
            n = verbs.rn_poll_cq(self.cq.ptr, min(left, <uint32_t>BATCH), &self.kept[self.kept_count])
            if n <= 0:
                break
            left -= n
            for i in range(<uint32_t>n):
                self.claim_back(&self.kept[self.kept_count + i], qp_num)
            self.kept_count += n
        self.post()
        self.numbers.take_out(qp_num)
        if self.kept_next < self.kept_count:
            self.engine.keeping = True
            self.engine.wake_if_running()
        if may_be_amid_a_message(connection):
            self.write_off()
        return 0

    cdef int write_off(self) except -1:
        """Count a posted slot as lost; which one it is remains unknown."""
        self.lost += 1
        try:
            self.make_enough()
        except (OSError, MemoryError):
            self.common -= 1    # the lost slot is taken from the common ones
            self.left -= 1
        return 0

    cdef int claim_back(self, verbs.ibv_wc *wc, uint32_t qp_num) except -1:
        if wc.qp_num == qp_num and (wc.wr_id & WR_BASE_MASK) == self.wr_base:
            self.came(<uint32_t>(wc.wr_id & LOW_MASK))
            self.post_again(<uint32_t>(wc.wr_id & LOW_MASK))
            wc.wr_id = WR_BASE_MASK     # of no connection: dispatch drops it
        return 0

    cdef int keep_room(self, uint32_t count) except -1:
        cdef verbs.ibv_wc *larger
        if self.kept_next == self.kept_count:
            self.kept_next = self.kept_count = 0
        if self.kept_count + count > self.kept_size:
            larger = <verbs.ibv_wc *>realloc(self.kept, 2 * (self.kept_count + count) * sizeof(verbs.ibv_wc))
            if larger == NULL:
                raise MemoryError
            self.kept = larger
            self.kept_size = 2 * (self.kept_count + count)
        return 0

    cdef int leave(self, Connection connection) except -1:
        """After the queue pair is destroyed: forget what was promised, and take back the slots that it held."""
        while connection.inbox.count:
            connection.inbox.first_consumed()
        self.take_back(connection)
        self.left += connection.borrowed
        connection.borrowed = 0
        self.members -= 1
        if self.members == 0 and (self.lost or self.made > SHARED_GROWTH + self.common):
            self.engine.empty_rings = True
            self.engine.wake_if_running()
        return 0

    cdef int close(self) except -1:
        """Release everything but the completion queue, which is the engine's. No connection receives from it now."""
        cdef MR mr
        if self.srq is not None:
            self.srq.close()
            self.srq = None
        for mr in self.slabs:
            mr.close()
        self.slabs.clear()
        self.made = self.posted = 0
        return 0

    # -- completions -------------------------------------------------------------------------------------

    cdef int received(self, verbs.ibv_wc *wc) except -1:
        """Handle a completed receive of any of the connections."""
        cdef uint32_t slot = <uint32_t>(wc.wr_id & LOW_MASK)
        cdef int64_t index = self.numbers.find(wc.qp_num)
        cdef Connection connection = self.engine.table[index] if index >= 0 else None
        self.came(slot)
        if connection is None:
            self.engine.stale += 1
            self.post_again(slot)
            return self.post()
        stream_completed(connection, wc)
        if not self.slots[slot].posted and not connection.inbox.ends_with(slot):
            self.post_again(slot)   # it was refused, or failed
            self.post()
        return 0

    cdef inline void came(self, uint32_t slot) noexcept:
        self.slots[slot].posted = False
        self.posted -= 1

    cdef inline int post_again(self, uint32_t slot) except -1:
        clear_header(self.slots[slot].address)
        return self.post_later(slot)

    cdef inline int post_later(self, uint32_t slot) except -1:
        cdef _Engine engine = self.engine
        cdef uint32_t i = engine.recv_count
        engine.recv_sge[i].addr = <uint64_t>self.slots[slot].address
        engine.recv_sge[i].length = self.slot_bytes + HEADER
        engine.recv_sge[i].lkey = self.slots[slot].lkey
        engine.recv_wr[i].wr_id = self.wr_base | slot
        engine.recv_wr[i].sg_list = &engine.recv_sge[i]
        engine.recv_wr[i].num_sge = 1
        engine.recv_wr[i].next = NULL
        if i:
            engine.recv_wr[i - 1].next = &engine.recv_wr[i]
        engine.recv_count = i + 1
        self.slots[slot].posted = True
        if engine.recv_count == CHAIN:
            self.post()
        return 0

    cdef int post(self) except -1:
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef uint32_t count = self.engine.recv_count
        self.engine.recv_count = 0
        if count == 0:
            return 0
        self.posted += count
        check(verbs.rn_post_srq_recv(self.srq.ptr, &self.engine.recv_wr[0], &bad), "ibv_post_srq_recv")
        return 0

    # -- promises ----------------------------------------------------------------------------------------

    cdef int take_back(self, Connection connection) except -1:
        """Post consumed slots again, for the connection that needs them next."""
        cdef uint32_t i
        for i in range(connection.inbox.freed_count):
            self.post_again(connection.inbox.freed[i])
        connection.inbox.freed_count = 0
        return self.post()

    cdef int promise(self, Connection connection) except -1:
        """Bytes of this connection were consumed: promise it what the rules above allow."""
        cdef Ledger ledger = connection.ledger
        cdef uint32_t unused = ledger.outstanding()
        cdef uint32_t share = ((ledger.grantable - ledger.received) & <uint32_t>0xFFFFFFFF) + connection.inbox.held
        cdef uint32_t fresh = 0, more = 0
        if unused == 0:
            connection.aim = min(2 * connection.aim, connection.data_slots)
        elif 2 * unused > connection.aim and connection.aim > self.own:
            connection.aim -= 1
        if connection.landings is not None and connection.landings.expectant:
            connection.aim = self.own   # the peer is to place the rest (landing.pxi)
            if unused and share < self.own:
                # It is granted more when it has used these up, and can be told where the rest is wanted.
                self.left += connection.borrowed
                connection.borrowed = 0
                return 0
        if share < self.own:
            fresh = self.own - share
            share = self.own
        self.left += connection.borrowed
        connection.borrowed = share - self.own
        self.left -= connection.borrowed
        if connection.aim > share and self.left > <int64_t>connection.borrowed:
            more = min(connection.aim - share, <uint32_t>((self.left - connection.borrowed + 1) // 2))
            connection.borrowed += more
            self.left -= more
        return ledger.slots_freed(fresh + more)

    def stats(self):
        """Counts of its slots. `needed` is what the invariant compares `posted` with."""
        cdef Connection connection
        cdef Ledger ledger
        needed = 0
        for connection in self.engine.connections:
            if connection.shared is self:
                ledger = connection.ledger
                needed += SHARED_CONTROL
                needed += self.own if ledger is None else (ledger.grantable - ledger.received) & 0xFFFFFFFF
        return {
            "connections": self.members,
            "slots": self.made,
            "slots_posted": self.posted,
            "slots_needed": needed,
            "slots_lost": self.lost,
            "common_slots": self.common,
            "common_slots_left": self.left,
            "registered_bytes": sum([(<MR>mr).length for mr in self.slabs]),
        }


cdef bint may_be_amid_a_message(Connection connection) noexcept:
    """May its queue pair have taken a receive that will never complete? The embedded device gives them back."""
    return (
        connection.ledger is not None and not connection.ledger.fin_received
        and not connection.engine.pd.context.library.embedded_device
    )
