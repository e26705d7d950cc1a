# How a connection begins: memory, a queue pair, what both sides have agreed on, a protocol.
#
# In this order, each once, called by Connection's methods for its owner:
#
#     attach_connection    memory, and a place in an engine
#     create_queue_pair    of an identifier of the connection manager
#     start_receiving      the queue pair exists: post receives, before the peer can send
#     agree_on             the peer's Hello is known: its frames may come
#     open_connection      established: from now on it delivers and sends
#
# Frames may come before the owner knows that the connection is established. Data waits in the inbox, control frames in
# `early`. `greeted` is when delivery begins: what connection_made() has scheduled has run.


cdef int attach_connection(Receiver connection, _Engine engine, object context, uint32_t slot_bytes,
                           uint32_t data_slots, object shared_slots, object first_bytes) except -1:
    """Take memory and a place in `engine`."""
    if not 1 <= data_slots <= STREAM_DATA_SLOTS_MAX:
        raise ValueError(f"a ring of {data_slots} slots, 1 to {STREAM_DATA_SLOTS_MAX} are possible")
    connection.slot_bytes = slot_bytes
    connection.data_slots = data_slots
    # Slots come back by signaled completions: a small ring cannot wait for SIGNAL_EVERY of them.
    connection.signal_every = max(1, min(<uint32_t>SIGNAL_EVERY, data_slots // 2))
    connection.stride = stream_stride(slot_bytes)
    connection.context = context
    connection.inbox.begin(data_slots)
    connection.sends = send_buffers(engine, slot_bytes, data_slots)
    if shared_slots is None:
        connection.own = OwnRing(
            engine, data_slots + CONTROL_RESERVE, min(slot_bytes, first_bytes or slot_bytes), slot_bytes)
        connection.repost_at = (data_slots + 1) // 2
    else:
        ring = ring_with_room(engine, slot_bytes, data_slots, shared_slots)
        ring.join(&connection.share)
        connection.shared = ring
        connection.repost_at = 1
    connection.engine = engine
    return engine.enroll(connection)


cdef QP create_queue_pair(Receiver connection, CMID id, CQ cq):
    """Create its queue pair, on `cq`, with as much inline data as the device takes."""
    cdef _Engine engine = connection.engine
    cdef verbs.ibv_qp_cap cap
    cdef SRQ srq = None if connection.shared is None else connection.shared.srq
    cdef QP qp
    memset(&cap, 0, sizeof(cap))
    cap.max_send_wr = connection.data_slots + CONTROL_RESERVE + OPERATIONS
    cap.max_recv_wr = connection.data_slots + CONTROL_RESERVE if srq is None else 0
    cap.max_send_sge, cap.max_recv_sge = 2, 1
    # The largest inline size is the one limit that ibv_query_device does not report.
    for inline in (engine.max_inline, 64, 0):
        cap.max_inline_data = inline
        try:
            qp = id.create_rc(engine.pd, cq, srq, &cap)
        except OSError as exc:
            if exc.errno != EINVAL or inline == 0:
                raise
        else:
            engine.takes_inline(inline)
            if tracing != NULL and not knows_its_peer(qp):
                trace_addresses(id, qp)
            return qp


cdef int start_receiving(Receiver connection, QP qp) except -1:
    """Post the whole receive ring."""
    connection.engine.serve(connection, qp)
    if tracing != NULL:
        connection.traced_as = qp.ptr.qp_num
    if connection.shared is not None:
        connection.shared.numbers.put(qp.ptr.qp_num, <uint32_t>(connection.wr_base >> INDEX_SHIFT))
    else:
        connection.own.post_all(connection)
    return 0


cdef bint knows_its_peer(QP qp):
    """Does its device say which queue pair it is connected to? No adapter does on iWARP: soft-iWARP answers with all
    ones. The embedded device does, by iWARP's rules, too; there a client has no port when its queue pair is made."""
    return (qp.pd.context.ptr.device.transport_type != verbs.IBV_TRANSPORT_IWARP
            or qp.pd.context.library.embedded_device)


cdef int trace_addresses(CMID id, QP qp) except -1:
    """Enter by what both ends of an iWARP connection know it: its addresses, whose ports are TCP's."""
    from binascii import crc32
    ours, theirs = id.local_addr, id.peer_addr
    if ours is None or theirs is None:
        return 0
    both = sorted([ours[:2], theirs[:2]])
    trace(TRACE_PAIRED, qp.ptr.qp_num, crc32(repr(both).encode()), both[0] != ours[:2])
    return 0


cdef int agree_on(Receiver connection, Ledger ledger, uint32_t frame_bytes, uint32_t depth, bint solicits) except -1:
    """Both sides' geometry is known."""
    connection.engine.learn_of_peer(connection, solicits)
    agree_on_frames(connection, ledger, frame_bytes, depth)
    return 0


cdef uint64_t number_of_peer(Receiver connection):
    """Its queue pair's; 0 if the device does not say, or has lost ours: a trace must not end a connection."""
    qp = connection.qp
    if qp is None or not knows_its_peer(qp):
        return 0
    try:
        return qp.query()[0].dest_qp_num or 0
    except (OSError, ValueError):
        return 0


cdef int open_connection(Receiver connection, object protocol, bint buffered, bint may_send) except -1:
    """Delivery and sending may begin."""
    has_engine(connection)
    if may_send:
        begin_to_send(connection)
    connection.accepted = not may_send
    connection.opened_ns = now_ns()
    allow_writes(connection, True)
    choose_sink(connection, protocol, buffered)
    connection.opened = True
    if tracing != NULL:
        trace_of(connection, TRACE_OPENED, number_of_peer(connection), 0)
    if connection.failure is not None and connection not in connection.engine.failed:
        connection.engine.failed.append(connection)     # the owner was told before it could end what was not open yet
    if connection.inbox.count or connection.tell_drained:
        connection.engine.deliver_later(connection)
    # Frames that came early may want an answer.
    connection.engine.flush_later(connection)
    connection.engine.wake()
    return 0


cdef int has_engine(Receiver connection) except -1:
    if connection.engine is None:
        raise RuntimeError("this connection has no engine yet")
    return 0
