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
            n = min(left, <size_t>(connection.frame_bytes - connection.fill))
            if (
                left >= BORROW_BYTES and (connection.fill == 0 or n >= BORROW_BYTES)
                and readable_in_place(connection, first, &lkey)
            ):
                if type(first) is Loan:
                    connection.backlog.lend(first, connection.fill + n)   # as much as its frame
                connection.backlog.taken(first, n, left)
                chain_data(connection, first, data, <uint32_t>n, lkey)
                budget -= 1
                continue
            if not fill_frame(connection, data, n, False):
                break
            connection.backlog.taken(first, n, left)
            if connection.fill < connection.frame_bytes and connection.backlog.size:
                continue
        if connection.fill < connection.frame_bytes and not flush:
            break
        chain_data(connection, None, NULL, 0, 0)
        budget -= 1
    post_sends(connection)
    set_blocked(connection, connection.backlog.size > 0 or connection.fill == connection.frame_bytes)
    if connection.backlog.spent and not connection.amid_lines:
        connection.backlog.let_go()
    return 0


cdef int chain_data(Sender connection, object owner, const char *data, uint32_t length, uint32_t lkey) except -1:
    """Add a DATA frame to the chain: the open frame, and behind its bytes `length` bytes of `owner` where they lie."""
    cdef _Engine engine = connection.engine
    cdef uint32_t before = HEADER + connection.fill
    cdef uint32_t total = connection.fill + length
    cdef verbs.ibv_send_wr *wr = chain_frame(connection, FRAME_DATA, open_frame(connection), total, total, owner)
    cdef bint is_inline = data == NULL and before <= engine.max_inline
    if data != NULL:
        wr.sg_list[0].length = before
        wr.sg_list[1].addr, wr.sg_list[1].length, wr.sg_list[1].lkey = <uint64_t>data, length, lkey
        wr.num_sge = 2
        connection.bytes_borrowed += length
    # The last frame of a burst is signaled, so that what has been delivered is known when it is
    # asked; in between one in signal_every, so that slots come back in time.
    signal_frame(connection, wr, owner is not None or connection.backlog.size == 0)
    frame_goes(connection, is_inline)
    if is_inline:
        wr.send_flags |= verbs.IBV_SEND_INLINE
    if is_inline or engine.send_count == CHAIN:
        post_sends(connection)
    return 0


cdef int post_control(Sender connection, uint32_t kind, bytes body) except -1:
    cdef char *frame = connection.controls + (connection.controls_posted % CONTROL_RESERVE) * CONTROL_BYTES
    cdef verbs.ibv_send_wr *wr
    cdef size_t length = PyBytes_GET_SIZE(body)
    if length > STREAM_CONTROL_BODY_BYTES:
        raise ValueError(f"control body of {length} bytes, at most {STREAM_CONTROL_BODY_BYTES} fit")
    memcpy(frame + HEADER, PyBytes_AS_STRING(body), length)
    wr = chain_frame(connection, kind, frame, <uint32_t>length, 0, None)
    if HEADER + length <= connection.engine.max_inline:
        wr.send_flags |= verbs.IBV_SEND_INLINE
    signal_frame(connection, wr, True)
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


cdef bint say_abort(Sender connection, bytes body) except -1:
    """Post an Abort if that may go; whether it did, or will when the peer's first frame comes."""
    if connection.opened and not connection.may_send and not connection.broken:
        connection.held_abort = body
        return True
    return post_control_if_allowed(connection, FRAME_ABORT, body)


cdef int begin_to_send(Sender connection) except -1:
    """We may send: the peer's first frame has come, or we need not wait for one."""
    cdef bytes body = connection.held_abort
    connection.may_send = True
    if body is not None:
        connection.held_abort = None
        if not post_control_if_allowed(connection, FRAME_ABORT, body):
            connection.owner.control_sent(FRAME_ABORT)     # nothing to wait for
        post_no_more(connection)
    return 0


cdef int credit_is_due(Sender connection) except -1:
    """There is news of regions, or of direct placement: say it as soon as a Credit may go."""
    connection.body_due = True
    if connection.attached and connection.opened:
        connection.engine.flush_later(connection)
        connection.engine.wake()
    return 0


cdef bytes credit_body(Sender connection):
    """What a Credit that goes now says besides what its header does. Whether there is more, is known afterwards."""
    # frame_bytes: the peer's slots may be smaller than our buffers.
    connection.body_due, body = connection.owner.credit_body(
        connection.ledger.grantable, min(<uint32_t>(CONTROL_BYTES - HEADER), connection.frame_bytes))
    return body


cdef int slot_size_came(Sender connection, uint32_t number, uint32_t slot_bytes) except -1:
    """The peer's slots get another size; see wire/slots.py."""
    hear_slot_size(connection, number, slot_bytes)
    if connection.fill > connection.frame_bytes:
        # They have shrunk: what is in the open frame goes out in several.
        connection.backlog.put_first(PyBytes_FromStringAndSize(open_frame(connection) + HEADER, connection.fill))
        take_from_frame(connection, connection.fill)
    return connection.engine.flush_later(connection)


cdef inline bint send_queue_has_room(Sender connection):
    return has_free_frame(connection) and (connection.frames != NULL or borrow_frames(connection))
