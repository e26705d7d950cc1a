# Work requests of a connection's frames, chained in the engine, and posted together.
#
# `chain_frame` adds one, with its header and its entries in the books (sender.pxi). `post_sends` posts the chain, which
# is empty again before anything else of the engine runs.


cdef inline verbs.ibv_send_wr *chain_request(Sender connection, uint32_t kind, uint32_t length,
                                             object reference) noexcept:
    """The next work request of the chain, with its entry of the log. What it is to do, the caller says."""
    cdef _Engine engine = connection.engine
    cdef uint32_t i = engine.send_count
    cdef verbs.ibv_send_wr *wr = &engine.send_wr[i]
    wr.wr_id = connection.wr_base | SEND_FLAG | connection.log.next_low()
    wr.next = NULL
    wr.sg_list = &engine.send_sge[2 * i]
    wr.num_sge = 1
    wr.send_flags = engine.behind_operations if connection.operations else 0
    if i:
        engine.send_wr[i - 1].next = wr
    engine.send_count = i + 1
    request_begins(connection, kind, length, reference)
    return wr


cdef verbs.ibv_send_wr *chain_frame(Sender connection, uint32_t kind, char *frame, uint32_t length, uint32_t carries,
                                    object reference) except NULL:
    """The next frame of the chain, counted, its header written. `carries`: so many bytes of the stream."""
    cdef frame_header *header = <frame_header *>frame
    cdef verbs.ibv_send_wr *wr
    count_frame(connection, kind, carries)
    header.kind = kind
    header.length = length
    header.granted = connection.ledger.granted
    header.reaped = connection.ledger.reaped
    wr = chain_request(connection, kind, length, reference)
    wr.sg_list.addr = <uint64_t>frame
    wr.sg_list.length = HEADER + length
    wr.sg_list.lkey = connection.chunk.lkey
    wr.opcode = verbs.IBV_WR_SEND
    wr.send_flags |= verbs.IBV_SEND_SOLICITED    # as our Hello has said
    return wr


cdef inline void signal_frame(Sender connection, verbs.ibv_send_wr *wr, bint now) noexcept:
    """Have the device tell of this frame's completion, and so of all before: now, or if it is one in signal_every."""
    connection.unsignaled += 1
    if now or connection.unsignaled >= connection.signal_every:
        wr.send_flags |= verbs.IBV_SEND_SIGNALED
        connection.unsignaled = 0


cdef int post_sends(Sender connection) except -1:
    cdef verbs.ibv_send_wr *bad = NULL
    cdef int rc
    if connection.engine.send_count == 0:
        return 0
    connection.engine.send_count = 0
    rc = verbs.rn_post_send(connection.qp_c, &connection.engine.send_wr[0], &bad)
    if rc < 0:
        # Budgets make a full queue impossible; whatever it is, the connection cannot go on.
        fail_connection(connection, OSError(-rc, f"ibv_post_send: {strerror(-rc).decode()}"))
    if not connection.queue.awake:
        connection.engine.rouse(connection.queue)
    return 0


cdef inline bint may_post(Sender connection) noexcept:
    return connection.opened and connection.may_send and not connection.broken and connection.engine.pid == verbs.rn_pid


cdef void note_credits(Sender connection, bint lacks) noexcept:
    """Bytes begin to wait for a credit, or need not wait any more."""
    cdef uint64_t now = now_ns()
    if lacks:
        connection.waits_for_credits += 1
        connection.without_since = now
    else:
        connection.without_ns += now - connection.without_since
        connection.without_since = 0


cdef uint64_t ns_without_credits(Sender connection) noexcept:
    """For how long bytes have waited for credits, until now."""
    return connection.without_ns + (now_ns() - connection.without_since if connection.without_since else 0)


cdef inline void set_blocked(Sender connection, bint blocked) noexcept:
    cdef bint lacks = blocked and connection.ledger.peer_granted == connection.ledger.sent
    if lacks != (connection.without_since != 0):
        note_credits(connection, lacks)
        if tracing != NULL:
            trace_of(connection, TRACE_WITHOUT, lacks, 0)
    if blocked != connection.blocked:
        connection.blocked = blocked
        connection.engine.blocked += 1 if blocked else -1
