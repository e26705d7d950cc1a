# How far apart two CPUs are: the round trip of a cache line between two processes, one on each.
#
# On one core complex it takes about 0.1 us, between two of them several times as long, and whatever is bound by that
# (message rates and bandwidth through shared memory) gets slower by as much. The host of a virtual machine moves its
# CPUs about, so this is measured with what it explains. Each side writes a word in a cache line of its own.

cdef extern from *:
    """
    static inline uint32_t rn_word_of_peer(const uint32_t *at)
    {
        return __atomic_load_n(at, __ATOMIC_ACQUIRE);
    }

    static inline void rn_word_to_peer(uint32_t *at, uint32_t value)
    {
        __atomic_store_n(at, value, __ATOMIC_RELEASE);
    }
    """
    uint32_t rn_word_of_peer(const uint32_t *) noexcept nogil
    void rn_word_to_peer(uint32_t *, uint32_t) noexcept nogil


def cache_line_ns(buffer, int rounds, bint answers, double seconds=0.1):
    """How long a cache line takes to another CPU and back, in nanoseconds: two processes call this on the same memory.

    :param buffer: shared memory of at least 128 bytes, which are zero when the first of them begins
    :param answers: this is the second process
    :param seconds: how long to wait for the other one: then it returns 0.0
    """
    cdef Py_buffer view
    cdef uint64_t began, until = now_ns() + <uint64_t>(seconds * 1e9), passes = 0
    cdef uint32_t *mine
    cdef uint32_t *theirs
    cdef uint32_t i
    cdef bint late = False
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        if view.len < 128:
            raise ValueError(f"cache_line_ns: {view.len} bytes, and 128 are needed")
        mine = <uint32_t *>view.buf + (16 if answers else 0)
        theirs = <uint32_t *>view.buf + (0 if answers else 16)
        with nogil:
            began = now_ns()
            for i in range(1, rounds + 1):
                if i == 2:
                    began = now_ns()        # the other one is there
                if not answers:
                    rn_word_to_peer(mine, i)
                while rn_word_of_peer(theirs) < i:
                    passes += 1
                    if passes % 1024 == 0 and now_ns() >= until:
                        late = True
                        break
                if late:
                    break
                if answers:
                    rn_word_to_peer(mine, i)
            began = now_ns() - began
    finally:
        PyBuffer_Release(&view)
    return 0.0 if late else began / <double>max(1, rounds - 1)
