# What has happened, for RDMANET_TRACE: a ring of events in memory, which stream/tracing.py makes a file of.
#
# While nobody traces, `tracing` is NULL: each place costs a load, and a branch that always goes the same way. While
# somebody does, an event is a look at the clock and five stores, and the eldest are overwritten. There is one ring for
# the process, whose events are entered with the GIL held. `first` and `second` depend on the kind:
#
#     TRACE_OPENED         the peer's queue pair number, or 0 where the device does not know it; 0
#     TRACE_ENDED          0, 0
#     TRACE_WITHOUT        whether bytes wait for a credit now, 0
#     TRACE_WANTED         how many bytes a read wants in memory that it names, 0
#     TRACE_ASLEEP         whether the engine sleeps now, which engine
#     TRACE_PAIRED         a number of the connection's two addresses, the same at both ends, and which end this is:
#                          0 or 1. Only on an adapter by iWARP, which does not know the peer's queue pair
#     TRACE_SENT and       of the kind of frame: the number of the data frame, from 1, or 0 if it is another frame;
#     TRACE_RECEIVED       its bytes, and above SECOND_SHIFT the credits that are left, or that came with it
#     TRACE_COMPLETED      of the kind of request (sendlog.pxi): its bytes, 0

cdef enum:
    TRACE_OPENED = 1
    TRACE_ENDED = 2
    TRACE_WITHOUT = 3
    TRACE_WANTED = 4
    TRACE_ASLEEP = 5
    TRACE_PAIRED = 6
    TRACE_SENT = 16             # and the kind of frame; so the next two
    TRACE_RECEIVED = 32
    TRACE_COMPLETED = 48
    SECOND_SHIFT = 32
    TRACED_MOST = 1 << 24

cdef struct trace_event:
    uint64_t ns                 # by CLOCK_MONOTONIC
    uint32_t kind
    uint32_t qp_num             # of the connection; 0: it is an engine's
    uint64_t first, second

cdef trace_event *tracing = NULL
cdef uint64_t traced = 0        # events, ever
cdef uint64_t trace_room = 0    # a power of two


cdef void trace(uint32_t kind, uint32_t qp_num, uint64_t first, uint64_t second) noexcept:
    """Enter an event, if `tracing`; callers look at that first."""
    global traced
    cdef trace_event *event = &tracing[traced & (trace_room - 1)]
    event.ns = now_ns()
    event.kind = kind
    event.qp_num = qp_num
    event.first = first
    event.second = second
    traced += 1


def trace_begin(size_t room):
    """Trace from now on, the last `room` events, a power of two. What was traced before is forgotten."""
    global tracing, traced, trace_room
    if room == 0 or room > TRACED_MOST or room & (room - 1):
        raise ValueError(f"a ring of {room} events: it must be a power of two, at most {TRACED_MOST}")
    cdef trace_event *ring = <trace_event *>realloc(tracing, room * sizeof(trace_event))
    if ring == NULL:
        raise MemoryError
    tracing = ring
    trace_room = room
    traced = 0


def trace_end():
    """Trace no more, and give the memory back."""
    global tracing, trace_room
    free(tracing)
    tracing = NULL
    trace_room = 0


def trace_taken():
    """The events that are in the ring, as they lie there, the eldest first; and how many there were in all."""
    cdef uint64_t next
    if tracing == NULL:
        return b"", 0
    if traced <= trace_room:
        return PyBytes_FromStringAndSize(<char *>tracing, traced * sizeof(trace_event)), traced
    next = traced & (trace_room - 1)
    eldest = PyBytes_FromStringAndSize(<char *>&tracing[next], (trace_room - next) * sizeof(trace_event))
    return eldest + PyBytes_FromStringAndSize(<char *>tracing, next * sizeof(trace_event)), traced
