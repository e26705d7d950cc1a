# Posting frames: from the open frame and the backlog to work requests of the queue pair.
#
# `pump` turns both into frames, whoever calls it: a write, a delivery, or `settle` at the end of an engine's pass. Two
# budgets bound it: the peer's credits (the ledger) and our own send queue (the log). Control frames have a reserve of
# their own in both. Frames are chained in the engine's work requests, and `post_sends` posts the chain; it is empty
# again before anything else of the engine runs.
#
# The memory that frames are sent from: sendmemory.pxi.

cdef enum:
    SIGNAL_EVERY = 4            # at most so many data frames without a signaled completion


cdef int pump(Sender connection, bint flush) except -1:
    """Post what credits and slots allow; a frame that is not full only when `flush`."""
    cdef _Engine engine = connection.engine
    cdef object first
    cdef const char *data
    cdef size_t left, n
    cdef uint32_t budget, lkey
    if not may_post(connection):
        return 0
    budget = <uint32_t>connection.ledger.credits()
    while budget and send_queue_has_room(connection) and (connection.fill or connection.backlog.size):
        if connection.peer_wants is not None and connection.peer_wants.count and place_next(connection):
            budget -= 1
            continue
        if connection.backlog.size:
            first = connection.backlog.first(&data, &left)
            if connection.fill == 0 and left >= BORROW_BYTES and readable_in_place(connection, first, &lkey):
                n = min(left, <size_t>connection.frame_bytes)
                if type(first) is Loan:
                    connection.backlog.lend(first, n)
                connection.backlog.taken(first, n, left)
                chain_data(connection, first, data, <uint32_t>n, lkey)
                budget -= 1
                continue
            n = min(left, <size_t>(connection.frame_bytes - connection.fill))
            if not carried(connection, open_frame(connection) + HEADER + connection.fill, data, n):
                break
            connection.fill += <uint32_t>n
            connection.backlog.taken(first, n, left)
            if connection.fill < connection.frame_bytes and connection.backlog.size:
                continue
        if connection.fill < connection.frame_bytes and not flush:
            break
        chain_data(connection, None, NULL, connection.fill, 0)
        budget -= 1
    post_sends(connection)
    set_blocked(connection, connection.backlog.size > 0 or connection.fill == connection.frame_bytes)
    if connection.backlog.spent and not connection.amid_lines:
        connection.backlog.let_go()
    return 0


cdef int chain_data(Sender connection, object owner, const char *data, uint32_t length, uint32_t lkey) except -1:
    """Add a DATA frame to the chain: the open frame, or `length` bytes of `owner` where they lie."""
    cdef _Engine engine = connection.engine
    cdef char *frame = open_frame(connection)
    cdef verbs.ibv_send_wr *wr
    cdef bint last = connection.backlog.size == 0 and (data == NULL or connection.fill == 0)
    cdef bint inline = data == NULL and HEADER + length <= engine.max_inline
    connection.ledger.data_sent()
    wr = chain_entry(connection, FRAME_DATA, frame, length, owner)
    if data != NULL:
        engine.send_sge[2 * (engine.send_count - 1)].length = HEADER
        engine.send_sge[2 * (engine.send_count - 1) + 1].addr = <uint64_t>data
        engine.send_sge[2 * (engine.send_count - 1) + 1].length = length
        engine.send_sge[2 * (engine.send_count - 1) + 1].lkey = lkey
        wr.num_sge = 2
        connection.bytes_borrowed += length
    else:
        connection.fill = 0
    # The last frame of a burst is signaled, so that what has been delivered is known when it is
    # asked; in between one in signal_every, so that slots come back in time.
    connection.unsignaled += 1
    if last or owner is not None or connection.unsignaled >= connection.signal_every:
        wr.send_flags |= verbs.IBV_SEND_SIGNALED
        connection.unsignaled = 0
    connection.posted += 1
    connection.frames_sent += 1
    connection.bytes_sent += length
    if engine.in_pass:
        connection.sent_ns = engine.window.looked_ns    # else send_taken looks at a clock
    if connection.peer_wants is not None:
        connection.peer_wants.sent(length)
    if inline:
        wr.send_flags |= verbs.IBV_SEND_INLINE
    else:
        connection.frames_used += 1
    if inline or engine.send_count == CHAIN:
        post_sends(connection)
    return 0


cdef int post_control(Sender connection, uint32_t kind, bytes body) except -1:
    cdef char *frame = connection.controls + (connection.controls_posted % CONTROL_RESERVE) * CONTROL_BYTES
    cdef verbs.ibv_send_wr *wr
    cdef size_t length = PyBytes_GET_SIZE(body)
    if length > STREAM_CONTROL_BODY_BYTES:
        raise ValueError(f"control body of {length} bytes, at most {STREAM_CONTROL_BODY_BYTES} fit")
    memcpy(frame + HEADER, PyBytes_AS_STRING(body), length)
    connection.ledger.control_sent(kind)
    if (kind == FRAME_FIN or kind == FRAME_ABORT) and connection.peer_wants is not None:
        connection.peer_wants.finish()
    wr = chain_entry(connection, kind, frame, <uint32_t>length, None)
    if HEADER + length <= connection.engine.max_inline:
        wr.send_flags |= verbs.IBV_SEND_INLINE
    wr.send_flags |= verbs.IBV_SEND_SIGNALED
    connection.unsignaled = 0
    connection.controls_posted += 1
    post_sends(connection)
    return connection.engine.wake_if_running()    # no event tells that it has completed


cdef bint post_control_if_allowed(Sender connection, uint32_t kind, bytes body) except -1:
    """Post a control frame, if the ledger and the memory for them permit; whether it did."""
    if not may_post(connection) or not connection.ledger.may_send(kind):
        return False
    if connection.controls_posted - connection.controls_done >= CONTROL_RESERVE:
        return False
    if connection.controls == NULL and not borrow_frames(connection):
        return False
    post_control(connection, kind, body)
    return True


cdef int say_held_abort(Sender connection) except -1:
    """The peer's first frame has come, so we may send."""
    cdef bytes body = connection.held_abort
    if body is not None:
        connection.held_abort = None
        if not post_control_if_allowed(connection, FRAME_ABORT, body):
            connection.owner.control_sent(FRAME_ABORT)     # nothing to wait for
        connection.broken = True
    return 0


cdef int credit_is_due(Sender connection) except -1:
    """There is news of regions, or of direct placement: say it as soon as a Credit may go."""
    connection.body_due = True
    if connection.attached and connection.opened:
        connection.engine.flush_later(connection)
        connection.engine.wake()
    return 0


cdef int hear_slot_size(Sender connection, uint32_t number, uint32_t slot_bytes) except -1:
    """The peer says that its slots have another size from its receive of this number on."""
    connection.peer_slots.hear(number, slot_bytes)
    connection.frame_bytes = min(connection.peer_slots.limit, connection.slot_bytes)
    if connection.fill > connection.frame_bytes:
        # They have shrunk: what is in the open frame goes out in several.
        connection.backlog.put_first(PyBytes_FromStringAndSize(open_frame(connection) + HEADER, connection.fill))
        connection.fill = 0
    return connection.engine.flush_later(connection)


cdef inline bint send_queue_has_room(Sender connection):
    return (
        connection.posted - connection.done < connection.data_slots
        and (connection.frames != NULL or borrow_frames(connection))
    )
