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

cdef struct ring_share:             # what a connection has of the data slots
    uint32_t aim                    # how many it is to have,
    uint32_t borrowed               # and how many of the common ones it has been promised, or holds


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
        self.srq = SRQ(engine.pd, core.SRQAttr(max_wr=self.most, max_sge=1))
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

    cdef int join(self, ring_share *share) except -1:
        """Post the slots that a connection may be promised. Call it before the queue pair is created."""
        self.members += 1
        try:
            self.make_enough()
        except BaseException:
            self.members -= 1
            raise
        share.aim = self.own
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

    cdef int part(self, uint32_t qp_num, bint is_amid_a_message) except -1:
        """Take back the slots of a connection whose queue pair was set to ERR and is about to be destroyed."""
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
        if is_amid_a_message:
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

    cdef int leave(self, ring_share *share, Inbox inbox) except -1:
        """After the queue pair is destroyed: forget what was promised, and take back the slots that it held."""
        while inbox.count:
            inbox.first_consumed()
        self.take_back(inbox)
        self.left += share.borrowed
        share.borrowed = 0
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

    cdef inline void came(self, uint32_t slot) noexcept:
        self.slots[slot].posted = False
        self.posted -= 1

    cdef inline int post_again(self, uint32_t slot) except -1:
        clear_header(self.slots[slot].address)
        return self.post_later(slot)

    cdef inline int post_later(self, uint32_t slot) except -1:
        cdef shared_slot *at = &self.slots[slot]
        at.posted = True
        if self.engine.chain_receive(self.wr_base | slot, at.address, self.slot_bytes + HEADER, at.lkey) == CHAIN:
            self.post()
        return 0

    cdef int post(self) except -1:
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef uint32_t count = self.engine.take_receives()
        if count == 0:
            return 0
        self.posted += count
        check(verbs.rn_post_srq_recv(self.srq.ptr, &self.engine.recv_wr[0], &bad), "ibv_post_srq_recv")
        return 0

    # -- promises ----------------------------------------------------------------------------------------

    cdef int take_back(self, Inbox inbox) except -1:
        """Post consumed slots again, for the connection that needs them next."""
        cdef uint32_t i
        for i in range(inbox.take_freed()):
            self.post_again(inbox.freed[i])
        return self.post()

    cdef int promise(self, ring_share *share, Ledger ledger, uint32_t held, bint is_to_be_placed) except -1:
        """Bytes of a connection were consumed, which holds so many slots: promise it what the rules above allow.

        `is_to_be_placed`: its peer is to place the bytes to come (landing.pxi).
        """
        cdef uint32_t unused = ledger.outstanding()
        cdef uint32_t has = ((ledger.grantable - ledger.received) & <uint32_t>0xFFFFFFFF) + held
        cdef uint32_t fresh = 0, more = 0
        if unused == 0:
            share.aim = min(2 * share.aim, self.data_slots)
        elif 2 * unused > share.aim and share.aim > self.own:
            share.aim -= 1
        self.left += share.borrowed
        share.borrowed = 0
        if is_to_be_placed:
            share.aim = self.own
            if unused and has < self.own:
                # It is granted more when it has used these up, and can be told where the rest is wanted.
                return 0
        if has < self.own:
            fresh = self.own - has
            has = self.own
        share.borrowed = has - self.own
        self.left -= share.borrowed
        if share.aim > has and self.left > <int64_t>share.borrowed:
            more = min(share.aim - has, <uint32_t>((self.left - share.borrowed + 1) // 2))
            share.borrowed += more
            self.left -= more
        return ledger.slots_freed(fresh + more)

    def stats(self):
        """Counts of its slots. `needed` is what the invariant compares `posted` with."""
        needed = sum([SHARED_CONTROL + connection.promised for connection in self.engine.connections
                      if connection.shared is self])
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


cdef SharedRing ring_with_room(_Engine engine, uint32_t slot_bytes, uint32_t data_slots, uint32_t common):
    """A shared ring of the engine's with room for one more connection."""
    cdef SharedRing ring
    cdef list rings = engine.shared_rings
    for ring in rings:
        if ring is not None and ring.serves(slot_bytes, data_slots, common) and ring.has_room():
            return ring
    number = rings.index(None) if None in rings else len(rings)
    ring = SharedRing(engine, slot_bytes, data_slots, common, number)
    rings[number:number + 1] = [ring]
    engine.add_queue(ring.cq, ring.cq.ptr.cqe)    # nobody else's
    return ring
