# How long to watch a completion queue before sleeping on its channel.
#
# Looking at a queue costs nanoseconds, waking a process that sleeps some 20 us each way. So who expects a
# completion keeps looking for a while after the last one. How long is learned from the gaps between
# completions: when they are longer than a sleep and a wake cost, watching is not worth it at all.

cdef extern from * nogil:
    """
    static inline void cpu_relax(void)
    {
    #if defined(__x86_64__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ volatile("yield");
    #endif
    }
    """
    void cpu_relax()

cdef extern from "time.h" nogil:
    ctypedef long time_t
    struct timespec:
        time_t tv_sec
        long tv_nsec
    int clock_gettime(int, timespec *)
    enum: CLOCK_MONOTONIC

# Nanoseconds. A gap above GAP_LIMIT is dearer to poll through than to sleep through on the machines
# measured (a sleep and a wake: 45-55 us).
cdef enum:
    SPIN_NS = 2000
    SLEEP_COST_NS = 50000           # of a gap that was slept through, so much was the sleep's own doing
    GAP_LIMIT_NS = 75000
    GAP_CLIP_NS = 1000000
    WINDOW_NS = 200000              # watch no longer than this after the last message
    WINDOW_FLOOR_NS = 20000
    LONGEST_S = 1000000             # of a limit that means none

ctypedef struct watch_window:
    uint64_t limit_ns           # 0: never watch
    uint64_t ns                 # what has been learned
    uint64_t gap_ns
    uint64_t last_ns            # when the last completion came
    bint slept                  # since then


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <uint64_t>t.tv_sec * 1000000000 + <uint64_t>t.tv_nsec


cdef int watch_limit(watch_window *window, busy_poll) except -1:
    """Watch for at most busy_poll seconds; None leaves it to what is learned."""
    if busy_poll is not None and not busy_poll >= 0:
        raise ValueError(f"busy_poll is {busy_poll!r}, it must be None or at least 0 seconds")
    window.limit_ns = WINDOW_NS if busy_poll is None else int(min(busy_poll, LONGEST_S) * 1e9)
    window.ns = window.limit_ns
    window.gap_ns = 0
    return 0


cdef inline void watch_learn(watch_window *window, uint64_t now) noexcept:
    """Completions have come."""
    cdef uint64_t gap = now - window.last_ns
    if window.slept:
        # Two sides that sleep see gaps that are mostly sleep; without this they would never wake up.
        gap = gap - SLEEP_COST_NS if gap > SLEEP_COST_NS else 0
        window.slept = False
    if gap > GAP_CLIP_NS:
        gap = GAP_CLIP_NS
    window.gap_ns = (3 * window.gap_ns + gap) >> 2
    window.last_ns = now
    if window.gap_ns > GAP_LIMIT_NS:
        window.ns = 0
    else:
        window.ns = min(window.limit_ns, WINDOW_FLOOR_NS + 4 * window.gap_ns)
