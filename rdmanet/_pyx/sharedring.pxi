# One receive queue for many connections of the byte stream (start_rdma_server(shared_receive=True)).
#
# A ring of its own costs each connection data_slots + CONTROL_RESERVE receives, whether it has anything to
# receive or not. Here all connections of a server receive from one shared receive queue (SRQ), and the rule that a
# SEND always finds a receive (credit.py) holds for their sum:
#
#     receives posted >= sum over the connections of (credits granted and not used + control frames that may come)
#
# Where it comes from. Each slot is posted, or holds bytes that are not consumed. A connection's share is what it was
# promised (grantable - received: told the peer, or to be told with the next header) and what it holds. Slots are made,
# and posted, before a connection is accepted, so that there are
#
#     slots >= members * (SHARED_OWN + CONTROL_ALLOWANCE) + common
#
# of them. SHARED_OWN data slots and the allowance of control frames are each connection's own, guaranteed; `common`
# slots are lent. What a connection's share exceeds SHARED_OWN by is borrowed, and the borrowed never exceed `common`.
# A control frame's slot is posted again on the spot, a data slot as soon as its bytes are consumed: nobody waits
# for half a ring, since whoever is next may need it.
#
# Who may borrow how much. A granted credit cannot be taken back: a connection that falls silent keeps what it was
# granted until it sends again, or ends. So grants follow use. A connection aims at SHARED_OWN slots at first; when its
# peer was found to have used up every credit that it was told of, the aim doubles, up to data_slots; when the peer
# had more than half left, the aim shrinks by one. And nobody borrows more than is then left, but the very last. So
# one alone has half of the common slots at most, the next one a quarter, and there is one for a newcomer as long
# as there is any. Who reads nothing holds what it borrowed, at most data_slots - SHARED_OWN; even with all common
# slots gone the others go on with their own.
#
# Who sends what it was not granted takes what belongs to others, before anybody can know of it. Its frame is not
# delivered, it is cut off at once, without last words, and its slots are posted again. Others that find no
# receive meanwhile try again, by the device (the accepting side asks for that: SHARED_RNR_RETRY in transport.py);
# only iWARP has no such thing, there their connections are lost.
#
# The end of a connection. Receives of an SRQ are not flushed with a queue pair. What has completed for
# it and was not polled goes with the queue pair when that is destroyed, and the slots with it; so it is set to ERR
# first, after which it takes no more, and its completions are taken from the CQ. Those of others that are met there are
# kept for the next look (`kept`): who ends a connection may be anybody's callback, and no other's may run inside it.
# On devices other than the embedded one a message that was under way may have taken a receive that never
# completes: such a slot is written off, and made up for by another. A queue with many of them, and
# one too large for the few that use it, is given up when its last connection has gone.

cdef enum:
    SHARED_INDEX = 0xFFFFF          # in a wr_id, instead of a connection's index: the slot of a shared ring
    SHARED_OWN = 2                  # data slots that are each connection's own
    SHARED_CONTROL = 6              # credit.CONTROL_ALLOWANCE
    SHARED_QUEUE = 8192             # slots of one queue, at most
    SHARED_GROWTH = 64              # slots made at a time, at least
    SHARED_LOST = 64                # slots written off before newcomers get another queue

STREAM_SHARED_OWN = SHARED_OWN
STREAM_SHARED_SLOTS_MAX = SHARED_QUEUE // 2

cdef struct shared_slot:
    char *address
    uint32_t lkey
    bint posted


@cython.no_gc_clear
cdef class SharedRing:
    """The slots of one shared receive queue, and who may have how many of them."""

    cdef readonly StreamEngine engine
    cdef readonly CQ cq
    cdef readonly SRQ srq
    cdef readonly uint32_t slot_bytes, data_slots
    cdef uint32_t asked                         # common slots, had the device room for them
    cdef readonly uint32_t members, room        # connections, and how many there may be
    cdef QPMap numbers
    cdef uint64_t wr_base
    cdef list slabs
    cdef shared_slot *slots
    cdef uint32_t made, most                    # slots, and how many there may be
    cdef uint32_t posted                        # receives
    cdef uint32_t own                           # data slots that are each connection's own
    cdef int64_t common, left                   # slots to be lent, and those of them that are not
    cdef uint32_t lost                          # slots that a queue pair took to its grave
    cdef verbs.ibv_wc *kept                     # completions of others that were met while one was ended
    cdef uint32_t kept_next, kept_count, kept_size

    def __cinit__(self, StreamEngine engine not None, uint32_t slot_bytes, uint32_t data_slots, uint32_t common,
                  uint32_t number):
        attr = engine.pd.context.query_device()
        cdef uint32_t sends = stream_queue_depths(data_slots)[0]
        self.engine = engine
        self.slot_bytes = slot_bytes
        self.data_slots = data_slots
        self.asked = common
        self.numbers = QPMap()
        self.wr_base = (<uint64_t>SHARED_INDEX << INDEX_SHIFT) | (<uint64_t>number << STREAM_GENERATION_SHIFT)
        self.slabs = []
        self.own = min(<uint32_t>SHARED_OWN, data_slots)
        self.most = min(SHARED_QUEUE, attr.max_srq_wr, attr.max_cqe // 2)
        self.common = self.left = min(common, self.most // 2)
        spare = min(<uint32_t>SHARED_LOST, self.most // 8)  # to make up for what is written off
        self.room = min(
            (self.most - <uint32_t>self.common - spare) // (self.own + SHARED_CONTROL),
            (attr.max_cqe - self.most) // sends,
        )
        if self.room == 0:
            raise OSError(ENOMEM, f"a shared receive queue of {self.most} receives serves nobody")
        self.slots = <shared_slot *>malloc(self.most * sizeof(shared_slot))
        if self.slots == NULL:
            raise MemoryError
        # Whoever sends too much may fill all slots: their completions find room too.
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
        """Post what a connection may be promised; call before its queue pair is made."""
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
        """Make and post so many more slots; a few more where there is room, so that regions stay few."""
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

    cdef int part(self, StreamConnection connection) except -1:
        """Its queue pair is about to be destroyed, and set to ERR: what it has taken comes back."""
        cdef uint32_t qp_num = connection.qp_c.qp_num
        cdef uint32_t left, i
        cdef int n
        for i in range(<uint32_t>self.engine.completion_next, <uint32_t>self.engine.completion_count):
            self.claim_back(&self.engine.completions[i], qp_num)
        for i in range(self.kept_next, self.kept_count):
            self.claim_back(&self.kept[i], qp_num)
        # No more than was there when we began: the others need not fall silent.
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
        if connection.may_be_amid_a_message():
            self.write_off()
        return 0

    cdef int write_off(self) except -1:
        """A posted slot is gone, and nobody knows which."""
        self.lost += 1
        try:
            self.make_enough()
        except (OSError, MemoryError):
            self.common -= 1    # what is left then is shared
            self.left -= 1
        return 0

    cdef int claim_back(self, verbs.ibv_wc *wc, uint32_t qp_num) except -1:
        if wc.qp_num == qp_num and (wc.wr_id & WR_BASE_MASK) == self.wr_base:
            self.came(<uint32_t>(wc.wr_id & LOW_MASK))
            self.post_again(<uint32_t>(wc.wr_id & LOW_MASK))
            wc.wr_id = WR_BASE_MASK     # nobody's: dispatch drops it
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

    cdef int leave(self, StreamConnection connection) except -1:
        """The queue pair is gone: so is what was promised, and the slots it held come back."""
        while connection.fifo_count:
            connection.head_consumed(connection.fifo[connection.fifo_head].slot)
        self.take_back(connection)
        self.left += connection.borrowed
        connection.borrowed = 0
        self.members -= 1
        if self.members == 0 and (self.lost or self.made > SHARED_GROWTH + self.common):
            self.engine.empty_rings = True
            self.engine.wake_if_running()
        return 0

    cdef int close(self) except -1:
        """Nobody receives from it: give everything back but the completion queue, which is the engine's."""
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
        """A receive has completed, for whichever connection."""
        cdef uint32_t slot = <uint32_t>(wc.wr_id & LOW_MASK)
        cdef int64_t index = self.numbers.find(wc.qp_num)
        cdef StreamConnection connection
        self.came(slot)
        if index < 0:
            self.engine.stale += 1
            self.post_again(slot)
            return self.post()
        connection = self.engine.table[index]
        self.engine.messages += 1
        connection.completed(wc)
        if not self.slots[slot].posted and not connection.holds(slot):
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
        cdef StreamEngine engine = self.engine
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

    cdef int take_back(self, StreamConnection connection) except -1:
        """Consumed slots are for whoever needs them next."""
        cdef uint32_t i
        for i in range(connection.freed_count):
            self.post_again(connection.freed[i])
        connection.freed_count = 0
        return self.post()

    cdef int promise(self, StreamConnection connection) except -1:
        """Its bytes were consumed: promise it what it may have, by the rules above."""
        cdef Ledger ledger = connection.ledger
        cdef uint32_t unused = ledger.outstanding()
        cdef uint32_t share = ((ledger.grantable - ledger.received) & <uint32_t>0xFFFFFFFF) + connection.fifo_count
        cdef uint32_t fresh = 0, more = 0
        if unused == 0:
            connection.aim = min(2 * connection.aim, connection.data_slots)
        elif 2 * unused > connection.aim and connection.aim > self.own:
            connection.aim -= 1
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
        """How its slots stand. `needed` is what the invariant compares `posted` with."""
        cdef StreamConnection connection
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
