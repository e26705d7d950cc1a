# What a connection has received and not given back: full data slots, in order, and behind them those that are consumed
# and not yet posted again. Which memory a slot number means, the connection knows.
#
# The bytes of an entry are in its slot, or where the peer has placed them, or in a copy of that. They are copied as
# soon as the read that named the memory is over without them. A Placed frame keeps its slot until its bytes are
# consumed. Bytes that are spilled have no slot any more; those of small frames are gathered in blocks, so that they
# take little more memory than they are.

cdef enum:
    NO_SLOT = 0xFFFFFFFF
    BLOCK_BYTES = 65536

cdef struct ready_slot:
    uint32_t slot               # or NO_SLOT
    uint32_t length
    char *data
    bint elsewhere              # in memory that a read has named
    PyObject *copy              # the bytes object that has them, or NULL
    uint32_t room               # of that, behind them


@cython.final
cdef class Inbox:
    cdef ready_slot *slots      # a circle of `places`
    cdef uint32_t places, head, count
    cdef uint32_t held          # slots of its entries
    cdef size_t bytes           # of its entries
    cdef uint32_t offset        # bytes of the first slot that have been taken already
    cdef uint32_t *freed        # consumed, not yet posted again
    cdef uint32_t freed_count
    cdef uint32_t leased        # consumed, but a program looks at them (lease.pxi)

    cdef int begin(self, uint32_t places) except -1:
        """Have memory for a ring of so many slots."""
        self.make_places(places)
        self.freed = <uint32_t *>malloc(places * sizeof(uint32_t))
        if self.freed == NULL:
            raise MemoryError
        return 0

    def __dealloc__(self):
        while self.count:
            self.first_consumed()
        free(self.slots)
        free(self.freed)

    cdef inline ready_slot *at(self, uint32_t i) noexcept:
        """One of the entries, or the place for the next."""
        i += self.head
        return &self.slots[i - self.places if i >= self.places else i]

    cdef inline void append(self, uint32_t slot, char *data, uint32_t length, bint elsewhere) noexcept:
        """The ledger has seen to it that there is a place."""
        cdef ready_slot *entry = self.at(self.count)
        entry.slot = slot
        entry.length = length
        entry.data = data
        entry.elsewhere = elsewhere
        entry.copy = NULL
        entry.room = 0
        self.count += 1
        self.held += 1
        self.bytes += length

    cdef int copy_out(self) except -1:
        """Let no entry refer to memory that a read has named."""
        cdef ready_slot *entry
        cdef uint32_t i
        for i in range(self.count):
            entry = self.at(i)
            if entry.elsewhere:
                copy = PyBytes_FromStringAndSize(entry.data, entry.length)
                Py_INCREF(copy)
                entry.copy = <PyObject *>copy
                entry.data = PyBytes_AS_STRING(copy)
                entry.elsewhere = False
        return 0

    cdef int spill(self, uint32_t slots) except -1:
        """Copy what is in slots, and free these: so many may come again."""
        cdef ready_slot *entry
        cdef ready_slot *last = NULL
        cdef uint32_t i, kept = 0
        cdef bint has_memory = True
        self.make_places(self.count + slots)
        for i in range(self.count):
            entry = self.at(i)
            if entry.slot == NO_SLOT or entry.elsewhere or entry.copy != NULL:
                pass            # it is spilled, or placed
            elif last != NULL and last.room >= entry.length:
                memcpy(last.data + last.length, entry.data, entry.length)
                last.length += entry.length
                last.room -= entry.length
                self.free_slot(entry)
                continue
            elif has_memory:
                has_memory = self.into_block(entry)
            last = self.at(kept)
            last[0] = entry[0]
            kept += 1
        self.count = kept
        return 0

    cdef bint into_block(self, ready_slot *entry) except -1:
        """Copy its bytes, and have room for more behind them. False: there is no memory."""
        cdef uint32_t size = max(entry.length, <uint32_t>BLOCK_BYTES)
        try:
            block = PyBytes_FromStringAndSize(NULL, size)
        except MemoryError:
            return False
        memcpy(PyBytes_AS_STRING(block), entry.data, entry.length)
        Py_INCREF(block)
        entry.copy = <PyObject *>block
        entry.data = PyBytes_AS_STRING(block)
        entry.room = size - entry.length
        self.free_slot(entry)
        return True

    cdef inline void free_slot(self, ready_slot *entry) noexcept:
        self.freed[self.freed_count] = entry.slot
        self.freed_count += 1
        self.held -= 1
        entry.slot = NO_SLOT

    cdef inline uint32_t take_freed(self) noexcept:
        """How many are to be posted again now: the first of `freed`."""
        cdef uint32_t count = self.freed_count
        self.freed_count = 0
        return count

    cdef int make_places(self, uint32_t places) except -1:
        """Room for so many entries."""
        cdef ready_slot *larger
        cdef uint32_t i
        if places <= self.places:
            return 0
        larger = <ready_slot *>malloc(places * sizeof(ready_slot))
        if larger == NULL:
            raise MemoryError
        for i in range(self.count):
            larger[i] = self.at(i)[0]
        free(self.slots)
        self.slots, self.places, self.head = larger, places, 0
        return 0

    cdef inline bint ends_with(self, uint32_t slot) noexcept:
        """Is it the slot of the frame that came last, and are its bytes not consumed?"""
        return self.count and self.at(self.count - 1).slot == slot

    cdef inline void drop_first(self) noexcept:
        self.head = self.head + 1 if self.head + 1 < self.places else 0
        self.count -= 1
        self.offset = 0

    cdef inline uint32_t first_leased(self) noexcept:
        """The first entry is consumed, but its slot is not free until lease_ended()."""
        cdef uint32_t slot = self.slots[self.head].slot
        self.bytes -= self.slots[self.head].length
        self.held -= 1
        self.drop_first()
        self.leased += 1
        return slot

    cdef inline void lease_ended(self, uint32_t slot) noexcept:
        self.leased -= 1
        self.freed[self.freed_count] = slot
        self.freed_count += 1

    cdef inline bint take(self, uint32_t n) noexcept:
        """So many bytes of the first entry are taken; whether it is consumed."""
        self.offset += n
        if self.offset != self.slots[self.head].length:
            return False
        self.first_consumed()
        return True

    cdef inline void first_consumed(self) noexcept:
        cdef ready_slot *entry = &self.slots[self.head]
        if entry.copy != NULL:
            Py_DECREF(<object>entry.copy)   # of bytes: nobody hears of it
            entry.copy = NULL
        self.bytes -= entry.length
        if entry.slot != NO_SLOT:
            self.free_slot(entry)
        self.drop_first()
