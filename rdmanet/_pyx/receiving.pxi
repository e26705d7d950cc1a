# What a connection receives: frames, checked before anything in them is used.
#
# `receive_frame` is called for each receive that completed without an error, by `stream_completed`. A data frame stays
# in its slot, as an entry of the inbox, until `deliver_received` or a sink takes its bytes. A control frame is copied
# out, and its slot is posted again at once. What a correct peer does not send is a ProtocolError, and the caller ends
# the connection.
#
# What a slot has held before is another message, or another client's: it must never be taken for a frame. A peer can
# complete a receive without filling it, by RDMA WRITE WITH IMM (which needs no key if it has no bytes), or with
# less than a header. So a completion counts only if it is a SEND's, and as far as its byte_len; and no slot
# is posted with a header in it.
#
# What the peer places outside of the slots: landing.pxi.

cdef enum:
    # A completion with one of these is not a SEND's, or did more than that. (GRH says nothing: some adapters set it.)
    NO_FRAME_FLAGS = verbs.IBV_WC_WITH_IMM | verbs.IBV_WC_WITH_INV


cdef int receive_frame(Receiver connection, verbs.ibv_wc *wc) except -1:
    """A frame lies in the slot that wc names. Raises ProtocolError for what no correct peer sends."""
    cdef uint32_t slot = <uint32_t>(wc.wr_id & LOW_MASK), byte_len = wc.byte_len
    cdef frame_header header
    cdef char *frame
    if not connection.may_send:
        begin_to_send(connection)
        connection.owner.heard_first()
    if wc.opcode != verbs.IBV_WC_RECV or wc.wc_flags & NO_FRAME_FLAGS:
        raise ProtocolError("a receive was completed by something else than a SEND")
    if byte_len < HEADER:
        raise ProtocolError(f"a frame of {byte_len} bytes is shorter than its {HEADER}-byte header")
    check_size(connection, slot, byte_len)
    if connection.ledger is None:
        raise ProtocolError("a frame from a peer that has not said hello")
    frame = slot_at(connection, slot)
    header = (<frame_header *>frame)[0]
    if header.kind == FRAME_DATA or header.kind == FRAME_PLACED or connection.blocked:
        connection.engine.messages += 1   # what somebody waits for: credits, only where bytes wait for them
    if header.kind == FRAME_DATA:
        connection.ledger.frame_received(byte_len, FRAME_DATA, header.length, header.granted, header.reaped)
        connection.frames_received += 1
        connection.bytes_received += header.length
        connection.heard_ns = pass_ns(&connection.engine.window)
        connection.inbox.append(slot, frame + HEADER, header.length, False)
        if connection.landings is not None:
            connection.landings.came(connection, header.length)
        if connection.own is not None and connection.ledger.growth:
            connection.own.came(header.length)
        if connection.ledger.granted == connection.ledger.received:
            look_for_reader(connection)
    elif header.kind == FRAME_PLACED:
        connection.ledger.frame_received(byte_len, FRAME_PLACED, header.length, header.granted, header.reaped)
        receive_placed(connection, slot, <placed_body *>(frame + HEADER))
    else:
        body = PyBytes_FromStringAndSize(frame + HEADER, byte_len - HEADER) if byte_len > HEADER else b""
        repost_slot(connection, slot)
        connection.ledger.frame_received(byte_len, header.kind, header.length, header.granted, header.reaped)
        if (header.kind == FRAME_FIN or header.kind == FRAME_ABORT) and connection.landings is not None:
            connection.landings.wants.end()
            connection.landings.sweep(connection)
        if header.kind == FRAME_PING:
            connection.ping_body = body
        elif header.kind == FRAME_CREDIT and connection.ledger.growth and says_slots(body, header.granted):
            slot_size_came(connection, size_said(body, 0), size_said(body, 1))
        elif header.kind != FRAME_PONG and (header.kind != FRAME_CREDIT or byte_len > HEADER):
            if connection.opened:
                connection.owner.control_received(header.kind, body, header.granted)
            else:
                # The peer is connected and we do not know it yet; few frames, the ledger sees to that.
                if connection.early is None:
                    connection.early = []
                connection.early.append((header.kind, body, header.granted))
    if tracing != NULL:
        trace_frame(
            connection, TRACE_RECEIVED + header.kind, connection.frames_received, header.length,
            connection.ledger.credits())
    # Also for frames without data: they may have brought credits, or answered control frames.
    if connection.opened:
        connection.engine.deliver_later(connection)
    return 0


cdef int receive_placed(Receiver connection, uint32_t slot, placed_body *body) except -1:
    """The peer has placed bytes where we wanted them, or where we did until a moment ago."""
    cdef Landings landings = connection.landings
    cdef Landing landing
    if body.zero:
        raise ProtocolError(f"a Placed with {body.zero:#x} where zero must be")
    if landings is None:
        raise ProtocolError(f"bytes were placed into Want {body.serial}, and none was said")
    landing = landings.placed(connection, body.serial, body.upto)
    connection.frames_received += 1
    connection.bytes_received += landings.wants.placed
    connection.heard_ns = pass_ns(&connection.engine.window)
    connection.inbox.append(slot, <char *><uintptr_t>landings.wants.target, <uint32_t>landings.wants.placed, True)
    if landing.taken_back:
        connection.inbox.copy_out()
    return landings.sweep(connection)


cdef inline int check_size(Receiver connection, uint32_t slot, uint32_t byte_len) except -1:
    """Raise ProtocolError for a completion of something else than what was posted."""
    if connection.shared is not None:
        if slot < connection.shared.most and byte_len <= HEADER + connection.slot_bytes:
            return 0
    elif connection.own.has(slot):
        connection.own.sizes.received_one()
        if byte_len <= HEADER + connection.own.room(slot):
            return 0
    return refuse_size(connection, slot, byte_len)


cdef int refuse_size(Receiver connection, uint32_t slot, uint32_t byte_len) except -1:
    room = connection.slot_bytes
    if connection.shared is None and connection.own.has(slot):
        room = connection.own.room(slot)
    raise ProtocolError(f"a completion of {byte_len} bytes in a receive of {HEADER + room}")


cdef inline char *slot_at(Receiver connection, uint32_t slot) noexcept:
    return connection.own.at(slot) if connection.shared is None else connection.shared.slots[slot].address


cdef int hear_early_frames(Receiver connection) except -1:
    """connection_made() has been called: now for the control frames that came before."""
    early, connection.early = connection.early, None
    for kind, body, granted in early or ():
        if not connection.attached:
            break
        try:
            connection.owner.control_received(kind, body, granted)
        except ProtocolError as exc:
            return distrust_peer(connection, exc)
    return 0
