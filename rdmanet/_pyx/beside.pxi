# What a connection posts beside its frames: one-sided operations, and the keys that windows are bound to.
#
# They have entries in the same log (sendlog.pxi) and complete in its order. At most OPERATIONS are in flight; that many
# entries of the send queue are kept for them. They need no credit of the peer's.


cdef bint post_beside(Sender connection, object operation, verbs.ibv_send_wr *wr) except -1:
    """Post what is no frame. Returns False when OPERATIONS are in flight already."""
    cdef verbs.ibv_send_wr *bad = NULL
    if connection.broken or connection.qp_c == NULL:
        raise ConnectionResetError(ECONNRESET, "the connection is lost")
    if connection.operations >= OPERATIONS:
        return False
    wr.wr_id = connection.wr_base | SEND_FLAG | connection.log.next_low()
    wr.send_flags |= verbs.IBV_SEND_SIGNALED
    if connection.operations and wr.opcode != verbs.IBV_WR_RDMA_READ:  # READs keep their order, and take no fence
        wr.send_flags |= connection.engine.behind_operations
    check(verbs.rn_post_send(connection.qp_c, wr, &bad), "ibv_post_send")
    request_begins(connection, OPERATION, 0, operation)
    connection.engine.rouse(connection.queue)
    connection.engine.wake()
    return True


cdef bint post_invalidation(Sender connection, object operation, uint32_t rkey) except -1:
    """Post LOCAL_INV: a key of a window of type 2 is good no more."""
    cdef verbs.ibv_send_wr wr
    memset(&wr, 0, sizeof(wr))
    wr.opcode = verbs.IBV_WR_LOCAL_INV
    wr.invalidate_rkey = rkey
    return post_beside(connection, operation, &wr)


cdef bint post_bind_part(Sender connection, object operation, MW mw, MR mr, uint32_t rkey, uint64_t address,
                         uint64_t length, int access) except -1:
    """Post BIND_MW: a window of type 2 to a part of a region, with this key."""
    cdef verbs.ibv_send_wr wr
    mw.usable()
    mr.usable()
    memset(&wr, 0, sizeof(wr))
    wr.opcode = verbs.IBV_WR_BIND_MW
    wr.bind_mw.mw = mw.ptr
    wr.bind_mw.rkey = rkey
    wr.bind_mw.bind_info.mr = mr.ptr
    wr.bind_mw.bind_info.addr = address
    wr.bind_mw.bind_info.length = length
    wr.bind_mw.bind_info.mw_access_flags = access
    if not post_beside(connection, operation, &wr):
        return False
    mw.ptr.rkey = rkey
    mw.mr = mr
    return True
