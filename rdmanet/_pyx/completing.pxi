# Completions of a connection.
#
# The engine gives each completion to `stream_completed`. A send's completion retires that send and all before it. A
# receive's brings a frame.


cdef int stream_completed(Receiver connection, verbs.ibv_wc *wc) except -1:
    """One completion of this connection."""
    if wc.status != verbs.IBV_WC_SUCCESS:
        return fail_by_completion(connection, wc)
    try:
        if wc.wr_id & SEND_FLAG:
            return retire_sends(connection, <uint32_t>(wc.wr_id & LOW_MASK))
        # Receives that completed before a failure still count: the peer's Fin may be among them.
        if not connection.distrusted:
            return receive_frame(connection, wc)
    except ProtocolError as exc:
        distrust_peer(connection, exc)
    except Exception as exc:
        fail_connection(connection, exc)
    return 0


cdef int retire_sends(Receiver connection, uint32_t sequence) except -1:
    """All sends up to `sequence` are done with; give back what their entries held."""
    cdef PyObject *reference
    cdef object held
    cdef uint32_t kind, length
    cdef bint made_room = False, told = False
    while connection.log.has_before(sequence):
        kind = request_ends(connection, &length, &reference)
        held = None
        if reference != NULL:
            held = <object>reference
            Py_DECREF(held)
        if kind == FRAME_DATA or kind == PLACING:
            made_room = made_room or kind == PLACING
            if type(held) is Loan:
                connection.backlog.give_back(held, length)
                connection.engine.flush_later(connection)   # the program may await the end of the loan, in drain()
        elif kind == OPERATION:
            if type(held) is Landing:
                connection.landings.done(connection, held)
                made_room = True
            elif type(held) is Blocks:
                told = True                 # perhaps: it may have ended
                made_room = made_room or not (<Blocks>held).beginning
                (<Blocks>held).completed(length)
            elif held is not None:      # else it was a probe
                told = True
                connection.owner.operation_done(held)
        elif kind != FRAME_PLACED:
            if connection.controls_posted - connection.controls_done == CONTROL_RESERVE - 1:
                connection.engine.flush_later(connection)   # something may have waited for a buffer
            if kind == FRAME_FIN or kind == FRAME_ABORT:
                told = True
                connection.owner.control_sent(kind)
    if connection.landings is not None and connection.landings.open:
        told = True     # perhaps: a read may be done
        connection.landings.sweep(connection)
        if connection.landings.has_news(connection):
            credit_is_due(connection)
    if not made_room and not told:
        connection.engine.unheard += 1
    elif made_room and connection.operations < OPERATIONS and connection.owner is not None:
        connection.owner.room_for_operations()
    if (
        connection.backlog.size or connection.fill
        or connection.tell_flushed or connection.tell_delivered or connection.tell_place or connection.body_due
    ):
        connection.engine.flush_later(connection)
    elif not connection.warm and nothing_in_flight(connection):
        keep_warm(connection.engine, connection)
    return 0
