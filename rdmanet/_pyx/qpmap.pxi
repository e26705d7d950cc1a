# A hash table from queue pair numbers to connection indices, to find the connection of a completion.
#
# The completion of a shared receive names its queue pair by number, and every message is looked up. So this is an
# open-addressing table in C with linear probing, at most half full. Removing a number moves the following entries
# closer to their home positions, so no tombstones lengthen later searches.

cdef struct qp_place:
    uint32_t qp_num
    uint32_t index_and_1        # 0: an empty entry


cdef class QPMap:
    cdef qp_place *places
    cdef uint32_t mask
    cdef readonly uint32_t count

    def __cinit__(self):
        self.allocate(64)

    def __dealloc__(self):
        free(self.places)

    cdef int allocate(self, uint32_t size) except -1:
        cdef qp_place *places = <qp_place *>malloc(size * sizeof(qp_place))
        if places == NULL:
            raise MemoryError
        memset(places, 0, size * sizeof(qp_place))
        self.places = places
        self.mask = size - 1
        return 0

    cdef inline uint32_t home(self, uint32_t qp_num) noexcept:
        return ((qp_num * <uint32_t>0x9E3779B1) >> 8) & self.mask

    cdef inline int64_t find(self, uint32_t qp_num) noexcept:
        """The index kept for this number, or -1."""
        cdef uint32_t at = self.home(qp_num)
        while self.places[at].index_and_1:
            if self.places[at].qp_num == qp_num:
                return <int64_t>self.places[at].index_and_1 - 1
            at = (at + 1) & self.mask
        return -1

    cdef int put(self, uint32_t qp_num, uint32_t index) except -1:
        """Keep an index for a number that has none."""
        if 2 * (self.count + 1) > self.mask:
            self.grow()
        self.place(qp_num, index + 1)
        self.count += 1
        return 0

    cdef void place(self, uint32_t qp_num, uint32_t index_and_1) noexcept:
        cdef uint32_t at = self.home(qp_num)
        while self.places[at].index_and_1:
            at = (at + 1) & self.mask
        self.places[at].qp_num = qp_num
        self.places[at].index_and_1 = index_and_1

    cdef int grow(self) except -1:
        cdef qp_place *old = self.places
        cdef uint32_t size = self.mask + 1, i
        self.allocate(2 * size)
        for i in range(size):
            if old[i].index_and_1:
                self.place(old[i].qp_num, old[i].index_and_1)
        free(old)
        return 0

    cdef void take_out(self, uint32_t qp_num) noexcept:
        """Forget a number, if it is known."""
        cdef uint32_t hole = self.home(qp_num), at
        while self.places[hole].qp_num != qp_num or not self.places[hole].index_and_1:
            if not self.places[hole].index_and_1:
                return
            hole = (hole + 1) & self.mask
        self.count -= 1
        at = hole
        while True:
            at = (at + 1) & self.mask
            if not self.places[at].index_and_1:
                break
            # It may move into the hole only if its home is not between the hole and itself.
            if ((at - self.home(self.places[at].qp_num)) & self.mask) >= ((at - hole) & self.mask):
                self.places[hole] = self.places[at]
                hole = at
        self.places[hole].index_and_1 = 0
