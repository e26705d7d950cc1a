# What a connection has received and not given back: full data slots, in order, and behind them those that are consumed
# and not yet posted again. Which memory a slot number means, the connection knows.

cdef struct ready_slot:
    uint32_t slot
    uint32_t length


@cython.final
cdef class Inbox:
    cdef ready_slot *slots      # a circle of `places`
    cdef uint32_t places, head, count
    cdef uint32_t offset        # bytes of the first slot that have been taken already
    cdef uint32_t *freed        # consumed, not yet posted again
    cdef uint32_t freed_count

    def __cinit__(self, uint32_t places):
        self.places = places
        self.slots = <ready_slot *>malloc(max(places, 1) * sizeof(ready_slot))
        self.freed = <uint32_t *>malloc(max(places, 1) * sizeof(uint32_t))
        if self.slots == NULL or self.freed == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.slots)
        free(self.freed)

    cdef inline ready_slot *at(self, uint32_t i) noexcept:
        return &self.slots[(self.head + i) % self.places]

    cdef inline void append(self, uint32_t slot, uint32_t length) noexcept:
        """The ledger has seen to it that there is a place."""
        cdef ready_slot *entry = self.at(self.count)
        entry.slot = slot
        entry.length = length
        self.count += 1

    cdef inline bint ends_with(self, uint32_t slot) noexcept:
        """Is it the slot of the frame that came last, and are its bytes not consumed?"""
        return self.count and self.at(self.count - 1).slot == slot

    cdef inline void first_consumed(self) noexcept:
        self.freed[self.freed_count] = self.slots[self.head].slot
        self.freed_count += 1
        self.head = (self.head + 1) % self.places
        self.count -= 1
        self.offset = 0
