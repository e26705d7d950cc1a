# The receives of a connection that has a ring of its own, and their memory, which grows with the traffic (slots.py),
# and becomes small again without (shrinking.pxi).
#
# The ring has a fixed number of receives. Each has a slot in a bank: memory for one slot of each. At first the slots
# are small. When a frame comes that fills its slot, a bank of larger ones is taken, the peer is told from which receive
# on they are used, and each slot that is consumed from then on is posted again in the next bank. When the last slot
# of the old bank has been consumed, that goes back to its pool. So there are at most two banks, and a slot's number
# says which one it is in.
#
# Where the peer does not know that slots grow, they stay as the Hello says.

cdef enum:
    GROWTH = 8                  # times what it was


# A Credit that says nothing else, in msgpack: [2, granted, [], [], [], [], 0, 0, slots_from, slot_bytes]. It is
# written and read here without a call of Python's, in which a signal's handler might run, and raise.
cdef extern from *:
    """
    struct rn_slots_body {
        unsigned char head[3], granted[4], nothing[7], number[4], next, size[4];
    };

    static const struct rn_slots_body rn_says_slots = {
        .head = {0x9a, 0x02, 0xce}, .nothing = {0x90, 0x90, 0x90, 0x90, 0, 0, 0xce}, .next = 0xce,
    };

    static void rn_put_be32(unsigned char *to, unsigned value)
    {
        to[0] = (unsigned char)(value >> 24), to[1] = (unsigned char)(value >> 16);
        to[2] = (unsigned char)(value >> 8), to[3] = (unsigned char)value;
    }

    static unsigned rn_get_be32(const unsigned char *from)
    {
        return (unsigned)from[0] << 24 | (unsigned)from[1] << 16 | (unsigned)from[2] << 8 | from[3];
    }
    """
    struct rn_slots_body:
        unsigned char head[3]
        unsigned char granted[4]
        unsigned char nothing[7]
        unsigned char number[4]
        unsigned char next
        unsigned char size[4]
    const rn_slots_body rn_says_slots
    void rn_put_be32(unsigned char *to, unsigned value) noexcept
    unsigned rn_get_be32(const unsigned char *source) noexcept


cdef bytes slots_body(uint32_t granted, uint32_t number, uint32_t size):
    cdef rn_slots_body body = rn_says_slots
    rn_put_be32(body.granted, granted)
    rn_put_be32(body.number, number)
    rn_put_be32(body.size, size)
    return PyBytes_FromStringAndSize(<char *>&body, sizeof(body))


cdef bint says_slots(bytes body, uint32_t granted) noexcept:
    """Whether it is such a body, and grants what its header grants."""
    cdef rn_slots_body *said = <rn_slots_body *>PyBytes_AS_STRING(body)
    return (
        PyBytes_GET_SIZE(body) == sizeof(rn_slots_body)
        and memcmp(said.head, rn_says_slots.head, sizeof(said.head)) == 0
        and memcmp(said.nothing, rn_says_slots.nothing, sizeof(said.nothing)) == 0
        and said.next == rn_says_slots.next and rn_get_be32(said.granted) == granted
    )


cdef uint32_t size_said(bytes body, bint which) noexcept:
    """0: from which receive on, 1: how many bytes."""
    cdef rn_slots_body *said = <rn_slots_body *>PyBytes_AS_STRING(body)
    return rn_get_be32(said.size) if which else rn_get_be32(said.number)


@cython.final
cdef class Bank:
    """Memory for a slot of each receive."""

    cdef RingPool pool
    cdef Chunk chunk
    cdef uint32_t size          # bytes that a slot holds after its header
    cdef bytearray used         # which slots may contain more than zeros


cdef struct bank_slots:         # the same for each frame, where the count of a reference would be felt
    char *first                 # NULL: there is no such bank
    size_t stride
    uint32_t size, lkey
    char *used


@cython.final
@cython.no_gc_clear
cdef class OwnRing:
    cdef _Engine engine
    cdef uint32_t slots         # receives, and slots of a bank
    cdef uint32_t first, most   # what a slot holds at first, and what it may hold at last
    cdef OurSlots sizes
    cdef list banks             # two, or one and None: a slot's number is 2 * i + its bank's
    cdef bank_slots[2] each
    cdef uint32_t current       # bank
    cdef uint32_t behind        # slots of the other bank that are posted, or not consumed
    cdef Bank next              # is taken; the peer is told in the next Credit
    cdef bint grown             # it is on the engine's list of such rings,
    cdef uint32_t seen          # and had received so many frames at the last look

    def __cinit__(self, _Engine engine not None, uint32_t slots, uint32_t first, uint32_t most):
        self.engine = engine
        self.slots = slots
        self.first, self.most = first, most
        self.sizes = OurSlots(first)
        self.banks = [None, None]
        self.have_bank(0, self.take_bank(first))

    cdef Bank take_bank(self, uint32_t size):
        cdef Bank bank = Bank.__new__(Bank)
        bank.pool = self.engine.rings(size, self.slots)
        bank.chunk = bank.pool.take()
        bank.size = size
        bank.used = bytearray(b"\1" if bank.chunk.used else b"\0") * self.slots
        return bank

    cdef int have_bank(self, uint32_t which, Bank bank) except -1:
        """`bank`, or None."""
        cdef bank_slots *each = &self.each[which]
        self.banks[which] = bank
        if bank is None:
            each.first = NULL
            return 0
        each.first, each.stride = bank.chunk.address, bank_stride(bank.size)
        each.size, each.lkey = bank.size, bank.chunk.lkey
        each.used = PyByteArray_AS_STRING(bank.used)
        return 0

    cdef inline bint has(self, uint32_t slot) noexcept:
        return slot >> 1 < self.slots and self.each[slot & 1].first != NULL

    cdef Bank bank_of(self, uint32_t slot):
        return self.banks[slot & 1]

    cdef bint has_chunk(self, Chunk chunk) except -1:
        """Whether it is of one of our banks: not any more after release()."""
        for bank in self.banks:
            if bank is not None and (<Bank>bank).chunk is chunk:
                return True
        return False

    cdef inline char *at(self, uint32_t slot) noexcept:
        return self.each[slot & 1].first + (slot >> 1) * self.each[slot & 1].stride

    cdef inline uint32_t room(self, uint32_t slot) noexcept:
        """What a frame may have after its header there."""
        return self.each[slot & 1].size

    cdef size_t registered(self):
        cdef size_t total = 0
        for bank in (*self.banks, self.next):
            if bank is not None:
                total += (<Bank>bank).pool.chunk_bytes
        return total

    cdef int post_all(self, Member connection) except -1:
        cdef uint32_t i
        for i in range(self.slots):
            self.post_later(connection, 2 * i)
            if self.engine.recv_count == CHAIN:
                self.post(connection)
        return self.post(connection)

    cdef int post_later(self, Member connection, uint32_t slot) except -1:
        """Post a consumed slot's receive again, where slots are now."""
        cdef uint32_t i = slot >> 1
        cdef bank_slots *bank
        cdef char *to
        if slot & 1 != self.current:
            self.behind -= 1
            if self.behind == 0:
                self.drop_other()
        bank = &self.each[self.current]
        to = bank.first + i * bank.stride
        if bank.used[i]:
            clear_header(to)    # it is another message's
        else:
            bank.used[i] = 1
        self.engine.chain_receive(
            connection.wr_base | (2 * i + self.current), to, bank.size + HEADER, bank.lkey)
        return 0

    cdef int post(self, Member connection) except -1:
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef uint32_t count = self.engine.take_receives()
        if count == 0 or connection.broken:
            return 0
        check(verbs.rn_post_recv(connection.qp_c, &self.engine.recv_wr[0], &bad), "ibv_post_recv")
        return self.sizes.posted_some(count)

    # -- growth ---------------------------------------------------------------------------------------

    cdef inline int came(self, uint32_t length) except -1:
        """A data frame came, of such length."""
        if length >= self.sizes.size and self.sizes.size < self.most:
            self.take_next(min(self.most, GROWTH * self.sizes.size))
        return 0

    cdef int take_next(self, uint32_t size) except -1:
        """The peer is to be told of slots of this size, if that is possible now."""
        if self.next is not None or self.behind or not self.sizes.may_change():
            return 0
        try:
            self.next = self.take_bank(size)
        except (OSError, MemoryError):
            pass    # it goes on with what it has
        return 0

    cdef bytes say(self, uint32_t granted):
        """The body of a Credit that goes now: from which receive on slots have the next size. So it is from now on."""
        number = self.sizes.change(self.next.size)
        self.current ^= 1
        self.behind = self.slots
        self.have_bank(self.current, self.next)
        self.next = None
        return slots_body(granted, number, self.sizes.size)

    cdef int drop_other(self) except -1:
        """Nothing is posted in the other bank any more, and everything that came there is consumed."""
        cdef uint32_t other = self.current ^ 1
        cdef Bank bank = self.banks[other]
        self.have_bank(other, None)
        bank.pool.give(bank.chunk)
        return 0

    cdef int release(self) except -1:
        """After the queue pair is destroyed."""
        for bank in (*self.banks, self.next):
            if bank is not None:
                (<Bank>bank).pool.give((<Bank>bank).chunk)
        self.have_bank(0, None)
        self.have_bank(1, None)
        self.next = None
        return 0
