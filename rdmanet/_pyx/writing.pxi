# From the program's `write` to the frames: what is taken, what has to wait, and when the program is to pause.
#
# `take_data` fills the open frame (a send slot being filled) or, for large exact `bytes` and memoryviews, lets the
# device read them where they lie; what finds no credit or no slot waits in the backlog (backlog.pxi has when the
# program may change its memory again). `send_taken` decides when that is posted, `pump` (sending.pxi) posts it.
#
# Writes are held back only while they come in a burst: one that comes a microsecond or more after the one before goes
# out at once, with what was held, and so does one that comes HOLD_US after the last post. In a long burst only one
# write in LOOK_EVERY asks the clock, so its end may be noticed that much later. The rest goes with the engine's next
# pass. A pass flushes after each callback, so what a callback writes coalesces.
#
# pause_writing() is called last in a write, and resume_writing() never within one: a protocol may do anything in them.

cdef enum:
    LOOK_FIRST = 4              # writes of a burst that look at the clock,
    LOOK_EVERY = 16             # and then one in so many
    HOLD_US = 50                # microseconds, roughly; a post costs a fifth of one
    LEND_BYTES = 262144         # below this a copy is cheaper than to wait until memory that may change is read

cdef size_t GONE = <size_t>-1    # memory that was to be copied


cdef int write_lines(Sender connection, object list_of_data) except -1:
    """Send all buffers of an iterable, in one step."""
    cdef list parts = list(list_of_data)
    cdef bint taken = False
    cdef Py_buffer view
    for data in parts:
        if not PyObject_CheckBuffer(data):
            raise not_bytes_like(data)
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        PyBuffer_Release(&view)
    if not may_write(connection):
        return 0
    connection.amid_lines = True
    try:
        for data in parts:
            if take_data(connection, data):
                taken = True
                if connection.backlog.size:
                    pump(connection, False)
    finally:
        connection.amid_lines = False
        if taken:
            send_taken(connection)
    pause_if_full(connection)
    return 0


cdef inline bint may_write(Sender connection) except -1:
    """Whether written bytes are taken; if not, the owner says why."""
    if connection.writable and connection.opened and (connection.qp is None or connection.qp.pid == verbs.rn_pid):
        return True
    return refuse_write(connection)


cdef bint refuse_write(Sender connection) except -1:
    """Returns False, unless it raises."""
    if connection.qp is not None and connection.qp.pid != verbs.rn_pid:
        raise RuntimeError(f"this connection was opened by process {connection.qp.pid}; open another after fork")
    if connection.owner is not None:
        connection.owner.write_refused()
    return False


cdef bint take_data(Sender connection, data) except -1:
    """Put bytes into frames, or behind those that wait. False: there are none, or they are refused."""
    cdef Py_buffer view
    cdef Loan loan
    if PyBytes_CheckExact(data):
        return accept_bytes(connection, data, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    if (
        PyMemoryView_Check(data) and PyMemoryView_GET_BUFFER(data).len >= LEND_BYTES
        and (connection.reference_writes or PyBytes_CheckExact(data.obj))
        and data.obj is not None    # else it is good for this call only: io.BufferedWriter passes such
    ):
        loan = loan_of(data)
        return accept_bytes(connection, loan, loan.data, loan.size)
    if not PyObject_CheckBuffer(data):
        raise not_bytes_like(data)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return accept_bytes(connection, None, <const char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef inline bint accept_bytes(Sender connection, object owner, const char *data, size_t size) except -1:
    """Take `size` bytes. `owner` is the exact `bytes` or the Loan that they are all of, or None: then copy."""
    cdef size_t taken = 0
    if not may_write(connection) or size == 0:
        return False
    if connection.backlog.size == 0 and (owner is None or size < BORROW_BYTES):
        taken = copy_in(connection, data, size, owner is not None)
        if taken == GONE:
            return False
    if type(owner) is Loan:
        connection.backlog.append_loan(owner)
    elif taken < size:
        if owner is None or taken:
            owner = PyBytes_FromStringAndSize(NULL, size - taken)
            if not carried(connection, PyBytes_AS_STRING(owner), data + taken, size - taken):
                return False
        connection.backlog.append(owner)
    return True


cdef inline int send_taken(Sender connection) except -1:
    """Post what was taken, now or at the end of the engine's pass."""
    if connection.engine.in_pass:
        # Whoever runs now was called from a pass, which flushes before it ends.
        if connection.backlog.size:
            pump(connection, False)
        if connection.engine.delivering is not connection:
            connection.engine.flush_later(connection)
    elif connection.tick != connection.engine.tick or held_long(connection):
        connection.tick = connection.engine.tick
        connection.held = 0
        pump(connection, True)
        connection.posted_at = connection.looked_at = cheap_clock()
        if connection.protocol_paused:
            connection.engine.flush_later(connection)
        if not sends_are_done(connection):
            connection.engine.wake()
    else:
        if connection.backlog.size:
            pump(connection, False)
        connection.engine.flush_later(connection)
        connection.engine.wake()
    return 0


cdef inline bint held_long(Sender connection) noexcept:
    """Whether a write is not one of a burst, or the last post is long ago. In bursts only some ask the clock."""
    cdef uint64_t now, gap
    connection.held += 1
    if connection.held > LOOK_FIRST and connection.held % LOOK_EVERY:
        return False
    now = cheap_clock()
    gap = now - connection.looked_at
    connection.looked_at = now
    return (
        gap > (LOOK_EVERY if connection.held > LOOK_FIRST else 1) * cheap_microsecond()
        or now - connection.posted_at > HOLD_US * cheap_microsecond()
    )


cdef inline bint sends_are_done(Sender connection) except -1:
    """Whether what was just posted has completed already, so that the engine, which sleeps, can go on sleeping."""
    return (
        not connection.engine.scheduled and connection.queue is not None and connection.queue.armed == ARMED_AND_EMPTY
        and connection.fill == 0 and connection.backlog.size == 0 and connection.operations == 0
        and connection.controls_posted == connection.controls_done and connection.engine.take_own(connection)
    )


cdef inline int pause_if_full(Sender connection) except -1:
    """Call pause_writing(), if it is due. This is the last step of a call: the protocol may do anything there."""
    if is_full_of_writes(connection) and not connection.protocol_paused and connection.owner is not None:
        connection.protocol_paused = True
        connection.owner.pause_writing()
    return 0


cdef inline bint is_full_of_writes(Sender connection) noexcept:
    """Whether a protocol is to pause writing."""
    return connection.backlog.loans > 0 or connection.fill + connection.backlog.size > connection.high_water_bytes


cdef int set_write_limits(Sender connection, object high, object low) except -1:
    """Change when the protocol is paused, and pause it if that is now."""
    if high is None:
        high = 65536 if low is None else 4 * low
    if low is None:
        low = high // 4
    if not high >= low >= 0:
        raise ValueError(f"high ({shown(high)}) must be >= low ({shown(low)}) must be >= 0")
    # asyncio and uvloop take fractions, too.
    connection.high_water_bytes = int(min(high, INT64_MAX))
    connection.low_water_bytes = int(min(low, INT64_MAX))
    pause_if_full(connection)
    return 0


cdef inline void allow_writes(Sender connection, bint allowed) noexcept:
    connection.writable = allowed


cdef int forget_writes(Sender connection) except -1:
    """No write from now on, and what is not posted is forgotten."""
    allow_writes(connection, False)
    connection.backlog.clear()
    take_from_frame(connection, connection.fill)
    return 0


cdef int tell_when_flushed(Sender connection) except -1:
    """Call `flushed` once nothing is left to post."""
    connection.tell_flushed = True
    connection.engine.flush_later(connection)
    return connection.engine.wake()


cdef inline bint is_undelivered(Sender connection) noexcept:
    """Whether bytes of ours may not have reached the peer."""
    return connection.fill or connection.backlog.size or connection.frames_sent != connection.done


cdef inline void tell_when_delivered(Sender connection) noexcept:
    """Call `delivered` once the peer's device has everything; a pass follows each completion anyway."""
    connection.tell_delivered = True


cdef int tell_of_place(Sender connection) except -1:
    """Call `resume_writing` when a frame is free, and when all is posted."""
    connection.tell_place = True
    return set_write_limits(connection, 0, None)


cdef inline void tell_writer_nothing(Sender connection) noexcept:
    """Nobody is left to be told."""
    connection.protocol_paused = connection.tell_flushed = connection.tell_delivered = False


cdef int tell_room(Sender connection) except -1:
    """Tell whom it concerns what has been posted. Never from `write`: resume_writing() writes."""
    cdef bint is_place = connection.tell_place and has_place(connection)
    cdef bint resumes = (
        connection.protocol_paused and connection.backlog.loans == 0
        and connection.fill + connection.backlog.size <= connection.low_water_bytes
    )
    # All may be posted while the only frame is in flight: then who waits for place is told again.
    if is_place:
        connection.tell_place = False
    if resumes:
        connection.protocol_paused = False
    if is_place or resumes:
        connection.owner.resume_writing()
    if connection.tell_flushed and connection.fill == 0 and connection.backlog.size == 0 and may_post(connection):
        connection.tell_flushed = False
        connection.owner.flushed()
    if connection.tell_delivered and not is_undelivered(connection):
        connection.tell_delivered = False
        connection.owner.delivered()
    return 0


cdef int resume_if_discarded(Sender connection) except -1:
    if (
        connection.protocol_paused and connection.backlog.loans == 0
        and not connection.writable and connection.owner is not None
    ):
        connection.protocol_paused = False
        connection.owner.resume_writing()
    return 0


cdef inline size_t copy_in(Sender connection, const char *data, size_t size, bint stays) except? 0:
    """Copy into the open frame, posting full ones on the way; returns how much found a place, or GONE."""
    cdef size_t taken = 0, n
    while taken < size and send_queue_has_room(connection) and connection.fill < connection.frame_bytes:
        n = min(size - taken, <size_t>(connection.frame_bytes - connection.fill))
        if not fill_frame(connection, data + taken, n, stays):
            return GONE
        taken += n
        if connection.fill == connection.frame_bytes:
            pump(connection, False)
    return taken


cdef size_t take_back_unposted(Sender connection, size_t size) except? 0:
    """Forget what is not posted of the last `size` bytes that were accepted; returns how many that are."""
    cdef size_t dropped = min(size, connection.backlog.size), unposted
    connection.backlog.drop_last(dropped)
    unposted = min(size - dropped, <size_t>connection.fill)
    take_from_frame(connection, <uint32_t>unposted)
    set_blocked(connection, connection.backlog.size > 0 or connection.fill == connection.frame_bytes)
    return dropped + unposted


cdef inline bint has_place(Sender connection) noexcept:
    """Whether there is a free frame, or part of one."""
    return connection.fill < connection.frame_bytes and has_free_frame(connection)


cdef object not_bytes_like(data):
    return TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
