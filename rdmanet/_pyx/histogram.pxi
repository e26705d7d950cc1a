# Counts of times, for percentiles of any number of them in a little memory.
#
# The cells grow with the time: 128 for each power of two. So a percentile is known to 1 %, a median of 300 ns to 2 ns,
# and 35 KiB hold everything from a nanosecond to eighteen minutes. Least, greatest, sum and sum of squares are exact.

cdef extern from *:
    """
    #define rn_leading_zeros(value) __builtin_clzll(value)  /* not of 0 */
    """
    int rn_leading_zeros(uint64_t value) noexcept nogil

cdef enum:
    CELL_BITS = 7
    CELLS_AN_OCTAVE = 1 << CELL_BITS
    TIME_BITS = 40
    TIME_CELLS = (TIME_BITS - CELL_BITS + 1) * CELLS_AN_OCTAVE


@cython.final
cdef class Histogram:
    """How often which time was measured, in nanoseconds. A time of 2**40 ns (18 minutes) or more counts as that.

    :ivar count: how many there are
    :ivar min_ns: the least; 0 if there is none
    :ivar max_ns: the greatest
    """

    cdef uint64_t cells[TIME_CELLS]
    cdef readonly uint64_t count, min_ns, max_ns
    cdef double sum_ns, sum_of_squares, lap_began_s

    cdef inline void note(self, uint64_t ns) noexcept nogil:
        cdef int shift
        if ns >= <uint64_t>1 << TIME_BITS:
            ns = (<uint64_t>1 << TIME_BITS) - 1
        if ns < CELLS_AN_OCTAVE:
            self.cells[ns] += 1
        else:
            shift = 63 - CELL_BITS - rn_leading_zeros(ns)
            self.cells[(shift << CELL_BITS) + (ns >> shift)] += 1
        if ns < self.min_ns or not self.count:
            self.min_ns = ns
        if ns > self.max_ns:
            self.max_ns = ns
        self.count += 1
        self.sum_ns += ns
        self.sum_of_squares += <double>ns * ns

    def add(self, uint64_t ns):
        """Count one time."""
        self.note(ns)

    def lap(self, double now_s):
        """Count the time since the last call, in seconds of any clock; the first one, and a 0, only begin."""
        if self.lap_began_s and now_s:
            self.note(<uint64_t>max(0.0, (now_s - self.lap_began_s) * 1e9 + 0.5))
        self.lap_began_s = now_s

    def merge(self, Histogram other not None):
        """Count all that the other one has."""
        cdef int i
        if not other.count:
            return
        for i in range(TIME_CELLS):
            self.cells[i] += other.cells[i]
        self.min_ns = min(self.min_ns, other.min_ns) if self.count else other.min_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.count += other.count
        self.sum_ns += other.sum_ns
        self.sum_of_squares += other.sum_of_squares

    def clear(self):
        """Forget all times; a lap goes on."""
        memset(self.cells, 0, sizeof(self.cells))
        self.count = self.min_ns = self.max_ns = 0
        self.sum_ns = self.sum_of_squares = 0.0

    def percentile(self, double percent):
        """The time in nanoseconds that so many percent do not exceed, by nearest rank; 0.0 without any.

        :raises ValueError: percent is not in 0..100
        """
        cdef uint64_t rank, seen = 0
        cdef int i
        if not 0 <= percent <= 100:
            raise ValueError(f"percentile: {percent} is not in 0..100")
        if not self.count:
            return 0.0
        rank = min(self.count, max(<uint64_t>1, <uint64_t>(self.count * (percent / 100) + 0.999999)))
        if rank == self.count:
            return <double>self.max_ns
        for i in range(TIME_CELLS):
            seen += self.cells[i]
            if seen >= rank:
                break
        return min(max(middle_of_cell(i), <double>self.min_ns), <double>self.max_ns)

    @property
    def mean_ns(self):
        """The mean; 0.0 without any."""
        return self.sum_ns / self.count if self.count else 0.0

    @property
    def deviation_ns(self):
        """The standard deviation."""
        if not self.count:
            return 0.0
        return max(0.0, self.sum_of_squares / self.count - (self.sum_ns / self.count) ** 2) ** 0.5

    def filled(self):
        """[(nanoseconds, how many)] of the cells that are not empty, in order: the times are their middles."""
        cdef int i
        return [(middle_of_cell(i), self.cells[i]) for i in range(TIME_CELLS) if self.cells[i]]


cdef double middle_of_cell(int cell) noexcept:
    cdef int shift
    if cell < 2 * CELLS_AN_OCTAVE:
        return cell
    shift = (cell >> CELL_BITS) - 1
    return <double>((<uint64_t>(cell - (shift << CELL_BITS))) << shift) + ((<uint64_t>1 << shift) - 1) / 2.0
