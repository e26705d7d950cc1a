# The writing half of direct placement: bytes go where the peer's read wants them.
#
# Where the peer has named memory for the bytes that are sent next (placement.py), `pump` has much of the backlog go
# there by one RDMA WRITE, with a Placed frame behind it in the same call. That takes one credit, as a data frame does.
# The WRITE also carries what is in the open frame, which comes before. What the peer places here: landing.pxi.

cdef enum:
    PLACE_CHUNK = 1 << 20       # of one WRITE, so that progress shows
    MUCH_CHUNK = 4 << 20        # and of one WRITE then: the reader wakes up for each


cdef bint readable_in_place(Sender connection, object first, uint32_t *lkey) except -1:
    """Whether the device can read a chunk of the backlog where it lies, and by which key."""
    cdef MR mr
    if connection.engine.implicit_lkey_valid:
        lkey[0] = connection.engine.implicit_lkey
        return True
    if type(first) is Loan and (<Loan>first).memory is not None:
        mr = (<Loan>first).memory.region_in(connection.engine.pd)
        if mr is not None:
            lkey[0] = mr.ptr.lkey
            return True
    return False


cdef bint place_next(Sender connection) except -1:
    """Write what comes next where the peer wants it, if that pays: the open frame and what is behind it."""
    cdef PeerWant want = connection.peer_wants.current()
    cdef object first
    cdef const char *data
    cdef size_t left, n
    cdef uint64_t room
    cdef uint32_t lkey
    if want is None or not connection.backlog.size or connection.operations >= OPERATIONS:
        return False
    first = connection.backlog.first(&data, &left)
    room = connection.peer_wants.room(want)
    if left < BORROW_BYTES or room <= connection.fill:
        return False
    n = MUCH_CHUNK if flags_of_part(connection.engine, want.length) else PLACE_CHUNK
    n = min(min(left, <size_t>room - connection.fill), n)
    if connection.fill + n < PLACE_BYTES or not readable_in_place(connection, first, &lkey):
        return False
    if type(first) is Loan:
        connection.backlog.lend(first, n)
    connection.backlog.taken(first, n, left)
    chain_placing(connection, want, first, data, <uint32_t>n, lkey)
    return True


cdef int chain_placing(Sender connection, PeerWant want, object owner, const char *data, uint32_t length,
                       uint32_t lkey) except -1:
    """Add a WRITE of the open frame's bytes and of `length` bytes of `owner`, and its Placed, to the chain."""
    cdef _Engine engine = connection.engine
    cdef char *frame = open_frame(connection)
    cdef placed_body *body = <placed_body *>(frame + HEADER + connection.slot_bytes)  # beyond the open frame's bytes
    cdef verbs.ibv_send_wr *wr
    cdef verbs.ibv_sge *sge
    cdef uint32_t total = connection.fill + length
    if engine.send_count > CHAIN - 2:
        post_sends(connection)
    wr = chain_request(connection, PLACING, length, owner)
    sge = wr.sg_list
    if connection.fill:
        sge.addr, sge.length, sge.lkey = <uint64_t>(frame + HEADER), connection.fill, connection.chunk.lkey
        sge += 1
        wr.num_sge = 2
    sge.addr, sge.length, sge.lkey = <uint64_t>data, length, lkey
    wr.opcode = verbs.IBV_WR_RDMA_WRITE
    wr.wr.rdma.remote_addr = connection.peer_wants.target(want)
    wr.wr.rdma.rkey = want.rkey
    wr.send_flags |= flags_of_part(engine, want.length)

    wr = chain_frame(connection, FRAME_PLACED, frame, FRAME_PLACED_BYTES, total, None)
    body.serial, body.zero, body.upto = want.serial, 0, connection.peer_wants.position
    sge = wr.sg_list
    sge[0].length = HEADER
    sge[1].addr, sge[1].length, sge[1].lkey = <uint64_t>body, FRAME_PLACED_BYTES, connection.chunk.lkey
    wr.num_sge = 2
    signal_frame(connection, wr, True)
    if HEADER + FRAME_PLACED_BYTES <= engine.max_inline:
        wr.send_flags |= verbs.IBV_SEND_INLINE
    frame_goes(connection, False)       # the WRITE reads it
    connection.bytes_placed += total
    return post_sends(connection)
