# How long to poll a completion queue before sleeping on its channel. watcher.pxi polls, arms and sleeps.
#
# Polling a queue costs nanoseconds; waking a sleeping process costs some 20 us in each direction. So whoever expects a
# message goes on polling while that pays. Time goes like this, again and again:
#
#     a message comes    the program works for it    nothing is left to do            the next message comes
#     |<------------- busy ------------------------->|<------------- wait ----------->|
#
# Both are learned. Polling through a wait of up to SHORT_WAIT_NS costs no more than to sleep and be woken. A longer one
# costs processor time, so it is polled through only if it is at most 1.25 times as long as the program's own work: then
# polling adds at most 1.25 times what the process uses anyway. Programs gain most when both sides do real work for each
# message.
#
# A message that is there before anybody waits (our own send has completed, or the next of many has come) does not count
# as a wait: the work for it counts as part of the work before the next wait.
#
# What takes a loop's time keeps all of its connections waiting: a callback that computes, or a call that blocks. So
# stretches of work are counted, from the end of a pass to that of the next, in cells by powers of two. A short one
# costs a comparison, and the clock has been read anyway. Without polling (a limit of 0) nothing is counted, nor what
# began while nothing was expected: that is sleep.
#
# If other threads need the processor, polling may starve the very thread that we wait for, so no message comes. Or the
# kernel takes the processor from us, and counts that: an involuntary context switch, getrusage(2). After two such waits
# in a row, the next 2, 6, 14, ... are slept through.

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

    /* A clock that costs less than clock_gettime(), for intervals of about a microsecond. */
    static inline uint64_t cheap_clock(void)
    {
    #if defined(__x86_64__)
        return __builtin_ia32_rdtsc();
    #elif defined(__aarch64__)
        uint64_t t;
        __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
        return t;
    #else
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
    #endif
    }

    /* About a microsecond of it: time-stamp counters of x86 run at 1 to 5 GHz. */
    static inline uint64_t cheap_microsecond(void)
    {
    #if defined(__x86_64__)
        return 2500;
    #elif defined(__aarch64__)
        uint64_t hertz;
        __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(hertz));
        return hertz / 1000000;
    #else
        return 1000;
    #endif
    }
    """
    void cpu_relax()
    uint64_t cheap_clock()
    uint64_t cheap_microsecond()

cdef extern from "time.h" nogil:
    ctypedef long time_t
    struct timespec:
        time_t tv_sec
        long tv_nsec
    int clock_gettime(int, timespec *)
    enum: CLOCK_MONOTONIC

cdef extern from "sys/resource.h" nogil:
    struct rusage:
        long ru_nivcsw
    int getrusage(int, rusage *)
    enum: RUSAGE_THREAD

cdef enum:
    SPIN_NS = 2000
    SPIN_KEEN = 4                   # the first looks follow each other at once: what answers us mostly comes then.
    SPIN_PAUSES = 8                 # Later ones leave the core to its other thread, which may be who we wait for
    SLEEP_COST_NS = 50000           # how much of a wait that was slept through is due to the sleep, of both sides
    SHORT_WAIT_NS = 75000
    OTHER_WORK_NS = 10000           # so long between two passes: the loop had something else to do
    UNKNOWN_WORK_NS = 100000        # a message may mean so much work before any is learned
    WAIT_CLIP_NS = 2000000          # what is longer counts as this
    BUSY_CLIP_NS = 750000           # so a long wait is always longer than the work
    MOVES_MOST = 4                  # so often other work puts off the end of polling for one message
    WINDOW_NS = 1000000             # poll no longer than this in one wait
    WINDOW_BLOCKED_NS = 200000      # nor than this where bytes wait for credits
    WINDOW_FLOOR_NS = 20000
    MISSES_MOST = 8
    STRETCH_BITS = 14               # a stretch of work that is counted takes 16 us,
    STRETCH_CELLS = 20              # and in the last cell 8 s or more
    LONG_NS = 10000000              # so long a stretch is worth a note
    NOT_KNOWN = -1
    LONGEST_S = 1000000             # a limit in seconds that means "unlimited"

ctypedef struct stretches:
    uint64_t cells[STRETCH_CELLS]   # how many took less than 2 ** (STRETCH_BITS + 1 + i) ns
    uint64_t ns, longest_ns         # all of them together, and the longest
    uint64_t long_count, long_ns    # those of LONG_NS

ctypedef struct watch_window:
    uint64_t limit_ns           # 0: never poll
    bint is_given               # the limit was given: poll for so long, whatever is learned
    uint64_t ns                 # the learned time
    uint64_t busy_ns, wait_ns   # averages
    uint64_t heard_ns           # when the last message came that was waited for,
    uint64_t last_ns            # and the last of all
    uint64_t idle_ns            # since when there is nothing to do
    uint32_t moved              # how often that was moved since the last message
    uint64_t looked_ns          # when the last pass ended, or when we were woken
    long switches               # involuntary ones of this thread until the last wait's end; NOT_KNOWN
    uint32_t misses             # waits in a row in which polling was no use,
    uint32_t to_sleep           # and how many are to be slept through for it
    bint missed                 # this wait is such a one
    bint slept                  # in this wait
    uint64_t asleep_ns          # since when it sleeps; 0: it is awake,
    uint64_t woken_ns           # and since when that
    uint64_t slept_ns, polled_ns    # in all: asleep, and awake while there was nothing to do
    stretches worked            # between the ends of two passes


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <uint64_t>t.tv_sec * 1000000000 + <uint64_t>t.tv_nsec


# Both clocks at one moment: how fast the cheap one is shows when somebody asks, some time later.
cdef uint64_t first_clock = cheap_clock(), first_ns = now_ns()


cdef uint64_t cheap_ns(uint64_t interval) noexcept:
    """An interval of cheap_clock() in nanoseconds."""
    cdef uint64_t clocks = cheap_clock() - first_clock
    return <uint64_t>(<double>interval * <double>(now_ns() - first_ns) / <double>max(clocks, <uint64_t>1))


cdef int watch_limit(watch_window *window, busy_poll) except -1:
    """Poll for at most busy_poll seconds; None: as long as learned from the traffic."""
    if busy_poll is not None and not busy_poll >= 0:
        raise ValueError(f"busy_poll={shown(busy_poll)}: it must be None or at least 0 seconds")
    window.is_given = busy_poll is not None
    window.limit_ns = WINDOW_NS if busy_poll is None else int(min(busy_poll, LONGEST_S) * 1e9)
    window.ns = min(window.limit_ns, <uint64_t>WINDOW_BLOCKED_NS)
    window.busy_ns = window.wait_ns = 0
    window.misses = window.to_sleep = 0
    window.switches = NOT_KNOWN
    window.heard_ns = now_ns()
    watch_worked(window, window.heard_ns)
    return 0


cdef inline uint64_t watch_time(const watch_window *window, bint blocked) noexcept:
    """How long to poll in this wait."""
    if window.is_given:
        return window.limit_ns
    if window.to_sleep or not window.limit_ns:
        return 0
    return max(window.ns, <uint64_t>WINDOW_BLOCKED_NS) if blocked else window.ns


cdef inline bint watch_on(watch_window *window, uint64_t now, bint blocked) noexcept:
    """Whether to look again, at the end of a pass."""
    cdef uint64_t ns = watch_time(window, blocked), since
    if now - window.looked_ns > OTHER_WORK_NS:
        count_stretch(window, now)
        if window.moved < MOVES_MOST:
            watch_begin(window, now)
            window.moved += 1
    window.looked_ns = now
    # What a loop does long after a message is not for that message.
    since = min(window.idle_ns, window.last_ns + UNKNOWN_WORK_NS + 4 * window.busy_ns)
    if now - since < ns:
        return True
    if ns and not window.missed and since == window.idle_ns:
        window.missed = True
        watch_missed(window)
    return False


cdef void count_stretch(watch_window *window, uint64_t now) noexcept:
    """At the end of a pass: since the one before, or since it was woken, the loop has done something else."""
    cdef uint64_t ns = now - pass_ns(window)
    cdef int cell = 63 - rn_leading_zeros(ns | 1) - STRETCH_BITS
    if cell < 0:
        return
    window.worked.cells[min(cell, <int>STRETCH_CELLS - 1)] += 1
    window.worked.ns += ns
    window.worked.longest_ns = max(window.worked.longest_ns, ns)
    if ns >= LONG_NS:
        window.worked.long_count += 1
        window.worked.long_ns += ns


cdef void add_stretches(stretches *to, const stretches *worked) noexcept:
    cdef int i
    for i in range(STRETCH_CELLS):
        to.cells[i] += worked.cells[i]
    to.ns += worked.ns


cdef inline void watch_missed(watch_window *window) noexcept:
    window.misses = min(window.misses + 1, <uint32_t>MISSES_MOST)
    window.to_sleep = (1 << window.misses) - 2


cdef inline void watch_begin(watch_window *window, uint64_t now) noexcept:
    """From now on there is nothing to do: a wait begins."""
    window.idle_ns = window.looked_ns = now
    window.missed = window.slept = False


cdef inline void watch_worked(watch_window *window, uint64_t now) noexcept:
    """Messages have come that nobody had to wait for, and their callbacks have run."""
    window.last_ns = now
    window.moved = 0
    watch_begin(window, now)


cdef inline void watch_sleeps(watch_window *window) noexcept:
    """It goes to sleep, right after `watch_on` if it ever polls."""
    window.slept = True
    window.asleep_ns = window.looked_ns if window.limit_ns else now_ns()
    if window.limit_ns:
        watch_polled(window, window.asleep_ns)


cdef inline void watch_wakes(watch_window *window) noexcept:
    """It is awake: an event has come just now, or there is something to do."""
    window.woken_ns = window.looked_ns if window.looked_ns > window.asleep_ns else now_ns()
    window.slept_ns += window.woken_ns - window.asleep_ns
    window.asleep_ns = 0


cdef inline uint64_t pass_ns(const watch_window *window) noexcept:
    """When a pass began, or the one before it ended: without a look at the clock."""
    return max(window.looked_ns, window.woken_ns)


cdef uint64_t slept_ns(const watch_window *window) noexcept:
    """For how long it has slept, until now."""
    return window.slept_ns + (now_ns() - window.asleep_ns if window.asleep_ns else 0)


cdef inline void watch_polled(watch_window *window, uint64_t until) noexcept:
    """A wait that was polled through has ended."""
    cdef uint64_t since = max(window.idle_ns, window.woken_ns)
    if until > since:
        window.polled_ns += until - since


cdef inline bint watch_robbed(watch_window *window, uint64_t passed) noexcept:
    """Whether the kernel has taken the processor from this thread since the last wait ended, `passed` ago."""
    cdef long before = window.switches
    cdef rusage used
    if passed < OTHER_WORK_NS:
        window.switches = NOT_KNOWN     # asking would cost as much as the wait
        return False
    getrusage(RUSAGE_THREAD, &used)
    window.switches = used.ru_nivcsw
    return before != NOT_KNOWN and window.switches > before


cdef inline void watch_learn(watch_window *window, uint64_t now) noexcept:
    """A message has come, and its callbacks have run."""
    cdef uint64_t came = window.looked_ns, idle = min(window.idle_ns, came), wait = came - idle, busy
    cdef bint robbed
    if now - came > OTHER_WORK_NS:
        count_stretch(window, now)
    if wait == 0:
        watch_worked(window, now)
        return
    watch_polled(window, came)
    busy = idle - window.heard_ns
    robbed = watch_robbed(window, busy + wait)
    if window.slept:
        # If both sides sleep, most of each wait is sleep; without this correction they would never start to poll.
        wait = wait - SLEEP_COST_NS if wait > SLEEP_COST_NS else 0
        if window.to_sleep:
            window.to_sleep -= 1
    elif robbed:
        watch_missed(window)
    else:
        window.misses = 0
    window.busy_ns = (3 * window.busy_ns + min(busy, <uint64_t>BUSY_CLIP_NS)) >> 2
    window.wait_ns = (3 * window.wait_ns + min(wait, <uint64_t>WAIT_CLIP_NS)) >> 2
    window.heard_ns = came
    watch_worked(window, now)
    if window.wait_ns > max(<uint64_t>SHORT_WAIT_NS, WINDOW_FLOOR_NS + window.busy_ns + window.busy_ns // 4):
        window.ns = 0
    else:
        window.ns = min(window.limit_ns, WINDOW_FLOOR_NS + 2 * window.wait_ns)
