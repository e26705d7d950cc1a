# Work requests of a connection's frames, chained in the engine, and posted together.
#
# `chain_entry` adds one, with its header and its entry of the log. `post_sends` posts the chain, which is empty again
# before anything else of the engine runs.


cdef verbs.ibv_send_wr *chain_entry(Sender connection, uint32_t kind, char *frame, uint32_t length,
                                    object reference) noexcept:
    """The next work request of the chain, its header written and its log entry made."""
    cdef _Engine engine = connection.engine
    cdef frame_header *header = <frame_header *>frame
    cdef uint32_t i = engine.send_count
    cdef verbs.ibv_send_wr *wr = &engine.send_wr[i]
    cdef verbs.ibv_sge *sge = &engine.send_sge[2 * i]
    header.kind = kind
    header.length = length
    header.granted = connection.ledger.granted
    header.reaped = connection.ledger.reaped
    sge.addr = <uint64_t>frame
    sge.length = HEADER + length
    sge.lkey = connection.chunk.lkey
    wr.wr_id = connection.wr_base | SEND_FLAG | connection.log.next_low()
    wr.next = NULL
    wr.sg_list = sge
    wr.num_sge = 1
    wr.opcode = verbs.IBV_WR_SEND
    wr.send_flags = verbs.IBV_SEND_SOLICITED    # as our Hello has said
    if connection.operations:
        wr.send_flags |= engine.behind_operations
    if i:
        engine.send_wr[i - 1].next = wr
    engine.send_count = i + 1
    connection.log.posted(kind, length, reference)
    engine.in_flight += 1
    if connection.peer_slots is not None:
        connection.frame_bytes = min(connection.peer_slots.sent_one(), connection.slot_bytes)
    return wr


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
    if blocked != connection.blocked:
        connection.blocked = blocked
        connection.engine.blocked += 1 if blocked else -1


cdef inline char *open_frame(Sender connection) noexcept:
    return connection.frames + (connection.frames_used % connection.data_slots) * connection.stride
