# What a connection has to send with: its sending half. The functions that use it take a Sender, and so cannot touch
# what is received:
#
#     failing      failures
#     chaining     work requests of frames
#     sendmemory   the memory that frames are sent from
#     placing      RDMA WRITEs to memory that the peer's reads have named
#     sending      posting frames, within credits and slots
#     beside       one-sided operations
#     blocks       lists of these
#     writing      from the program's writes to the open frame, or to the backlog
#     landing      keys of memory where the peer may place bytes: they are bound and ended by requests that are posted
#
# Member (engine.pxi), Sender, Receiver (receiver.pxi) and Connection (connection.pxi) are base classes of one another
# and not objects that a connection holds: what receives also sends, so the fields of one are next to those of the
# other, without a second reference, and the compiler refuses a function of a lower half that asks for the upper. What
# needs none of these fields is a class of its own: SendLog, Backlog.


@cython.no_gc_clear
cdef class Sender(Member):
    """A connection's sending half."""

    cdef readonly object owner          # until `release`: it refers to us, too
    cdef Ledger ledger
    cdef uint32_t slot_bytes, data_slots
    cdef size_t stride
    cdef RingPool sends                 # where the memory that it sends from is,
    cdef Chunk chunk                    # and what it has of that, while it sends
    cdef bint warm                      # it keeps that although nothing is in flight: it is on the engine's list
    cdef bint opened                    # established: it sends, and control frames are heard
    cdef bint accepted                  # and the peer has asked for it
    cdef bint distrusted                # the peer broke the protocol: deliver nothing more from it
    cdef object failure                 # what `fabric_failed` will be told once the queue is drained
    cdef uint64_t failure_tick

    cdef uint32_t frame_bytes           # payload of the next frame: what both sides' slots can hold
    cdef PeerSlots peer_slots           # how much the peer's can hold; None if they share a queue, or do not grow
    cdef char *frames
    cdef char *controls
    cdef uint64_t frames_sent, done     # data frames: posted, and completed
    cdef uint32_t open_slot             # the open frame's send slot: an inline frame leaves its own free, and warm
    cdef uint64_t controls_posted, controls_done
    cdef uint32_t operations            # one-sided work requests in flight
    cdef SendLog log
    cdef uint32_t unsignaled, signal_every
    cdef uint32_t fill                  # bytes in the open frame
    cdef Backlog backlog                # what was written and found no room in a frame
    cdef bint may_send                  # iWARP's rule: the accepting side waits for the first frame
    cdef bytes held_abort               # the last thing to say, if it waits for that
    cdef bint reference_writes          # large memory that may change is sent from where it lies
    cdef bint amid_lines                # a writelines() is under way: no memory of the program's is let go
    cdef bint writable                  # neither write_eof nor close nor a failure so far
    cdef bint blocked                   # bytes wait for credits or slots
    cdef bint tell_flushed
    cdef bint tell_delivered            # somebody waits until the peer's device has everything
    cdef bint tell_place                # somebody waits for a free frame
    cdef bint body_due                  # news of regions, or of direct placement, wait for a Credit to ride in
    cdef PeerWants peer_wants           # where we may place bytes; None: the peer has not asked for that yet
    cdef uint64_t tick                  # engine.tick of the last frame posted at once
    cdef uint64_t posted_at             # cheap_clock() then
    cdef uint64_t looked_at             # and when a write looked at it last
    cdef uint32_t held                  # writes since then
    cdef size_t high_water_bytes, low_water_bytes
    cdef readonly bint protocol_paused  # it was told to pause writing
    cdef uint64_t bytes_sent, bytes_borrowed, bytes_placed
    cdef uint64_t opened_ns
    cdef uint64_t sent_ns               # the last data, by the clock of the pass: no call for each frame
    cdef uint64_t waits_for_credits     # how often bytes had to wait for a credit,
    cdef uint64_t without_ns            # and for how long,
    cdef uint64_t without_since         # besides the time since then; 0: they do not wait
    cdef uint32_t traced_as             # the number of its queue pair, which may be gone; 0: nobody traces

    def __cinit__(self):
        self.log = SendLog()
        self.backlog = Backlog()


# -- the book of what is sent: each request and each frame is entered here, once ---------------------------------------

cdef inline int count_frame(Sender connection, uint32_t kind, uint32_t carries) except -1:
    """A frame is about to go, with so many bytes of the stream: what the peer has granted and wants is used up."""
    if kind == FRAME_DATA or kind == FRAME_PLACED:
        connection.ledger.data_sent()
        connection.frames_sent += 1
        connection.bytes_sent += carries
        if connection.engine.in_pass:
            connection.sent_ns = pass_ns(&connection.engine.window)     # else send_taken looks at a clock
        if connection.peer_wants is not None:
            connection.peer_wants.sent(carries)
    else:
        connection.ledger.control_sent(kind)
        connection.controls_posted += 1
        if (kind == FRAME_FIN or kind == FRAME_ABORT) and connection.peer_wants is not None:
            connection.peer_wants.finish()
    if connection.peer_slots is not None:
        connection.frame_bytes = min(connection.peer_slots.sent_one(), connection.slot_bytes)
    if tracing != NULL:
        trace_frame(connection, TRACE_SENT + kind, connection.frames_sent, carries, connection.ledger.credits())
    return 0


cdef void trace_frame(Sender connection, uint32_t kind, uint64_t number, uint32_t carries, uint64_t credits) noexcept:
    """A frame goes or comes: only data frames are numbered, of which the peer knows the same number."""
    cdef uint32_t frame = kind & (TRACE_SENT - 1)
    if frame != FRAME_DATA and frame != FRAME_PLACED:
        number = 0
    trace_of(connection, kind, number, credits << SECOND_SHIFT | carries)


cdef void trace_of(Sender connection, uint32_t kind, uint64_t first, uint64_t second) noexcept:
    trace(kind, connection.traced_as, first, second)


cdef inline void request_begins(Sender connection, uint32_t kind, uint32_t length, object reference) noexcept:
    """A work request is posted, or about to be."""
    connection.log.posted(kind, length, reference)
    connection.engine.in_flight += 1
    connection.operations += kind == OPERATION or kind == PLACING


cdef inline uint32_t request_ends(Sender connection, uint32_t *length, PyObject **reference) noexcept:
    """The eldest has completed; returns its kind. `reference`, or NULL, is the caller's to release."""
    cdef uint32_t kind = connection.log.retire(length, reference)
    connection.engine.in_flight -= 1
    if kind == FRAME_DATA or kind == FRAME_PLACED:
        connection.done += 1
    elif kind == OPERATION or kind == PLACING:
        connection.operations -= 1
    else:
        connection.controls_done += 1
    if tracing != NULL:
        trace_of(connection, TRACE_COMPLETED + kind, length[0], 0)
    return kind


cdef int requests_are_lost(Sender connection) except -1:
    """The queue pair is gone: what has not completed will not."""
    connection.engine.in_flight -= connection.log.left()
    return 0


cdef int agree_on_frames(Sender connection, Ledger ledger, uint32_t frame_bytes, uint32_t depth) except -1:
    """The peer's Hello is known: what its receives hold at first, and how many it can have posted."""
    connection.ledger = ledger
    connection.frame_bytes = min(frame_bytes, connection.slot_bytes)
    if ledger.growth:
        connection.peer_slots = PeerSlots(frame_bytes, depth)
    return 0


cdef PeerWants peer_wants_of(Sender connection):
    """Where the peer wants bytes, made when it first asks. None: our Fin or Abort is posted, and no bytes follow."""
    if connection.peer_wants is None and not connection.ledger.fin_sent and not connection.ledger.abort_sent:
        connection.peer_wants = PeerWants(connection.bytes_sent)
    return connection.peer_wants


cdef int hear_slot_size(Sender connection, uint32_t number, uint32_t slot_bytes) except -1:
    """The peer says that its slots have another size from its receive of this number on."""
    connection.peer_slots.hear(number, slot_bytes)
    connection.frame_bytes = min(connection.peer_slots.limit, connection.slot_bytes)
    return 0
