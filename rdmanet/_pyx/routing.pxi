# To whom a completion belongs.
#
# Of a failed completion only wr_id, the number of the queue pair, status and vendor_err are valid, not even its opcode.
# So wr_id, which is ours to choose, has to say everything that finding the owner takes. There are two layouts, because
# there are two ways to find one:
#
#     requests of programs         63..48  generation of the queue pair, or of the shared receive queue (WR_SHARED)
#     (queuepair.pxi, srq.pxi)     47..2   position in its queue
#                                  1       WR_SHARED: a receive of a shared receive queue
#                                  0       WR_SEND: of the send queue
#
#     the byte stream              63..44  index of the connection in the engine's table; SHARED_INDEX: of a shared ring
#     (sending.pxi, ownring.pxi,   43..28  generation of this place in the table; of a shared ring: its number
#     sharedring.pxi)              27..25  unused
#                                  24      SEND_FLAG: of the send queue
#                                  23..0   sequence number of the send (sendlog.pxi), or slot of the ring
#
# A program's queue pairs come and go on any completion queue. The number finds the queue pair in a dict; the position
# finds the program's own wr_id, and what is kept for the request, in the in-flight table. A position is never used
# twice, so the completion of a request that was dropped finds nothing. What stands in the table instead of the
# program's wr_id may be an Operation, which somebody awaits; all other completions are the program's to collect.
#
# A message of the byte stream has no time for a dict, for objects, or for an entry a request. The index finds the
# connection, and its slots and sequence numbers are few. The generation tells an earlier connection here apart;
# its completions are counted, and dropped.
#
# No completion queue has both: those of an engine are its own, and nobody else posts to its queue pairs. So whoever
# polls a queue knows the layout, and calls the function below.

cdef enum:
    # Requests of programs.
    QP_GENERATION_SHIFT = 48
    POSITION_SHIFT = 2
    WR_SHARED = 2
    WR_SEND = 1

    # The byte stream.
    INDEX_SHIFT = 44
    SHARED_INDEX = 0xFFFFF
    STREAM_GENERATION_SHIFT = 28
    STREAM_GENERATION_MASK = 0xFFFF
    SEND_FLAG = 1 << 24
    LOW_MASK = 0xFFFFFF

cdef uint64_t POSITION_MASK = ((<uint64_t>1) << 46) - 1
cdef uint64_t WR_BASE_MASK = ~((<uint64_t>1 << STREAM_GENERATION_SHIFT) - 1)    # index and generation


cdef inline uint64_t stream_wr_base(uint64_t index, uint64_t generation) noexcept:
    """What all wr_ids of a connection, or of a shared ring, begin with."""
    return index << INDEX_SHIFT | (generation & STREAM_GENERATION_MASK) << STREAM_GENERATION_SHIFT


cdef inline WC route_to_request(CQ cq, verbs.ibv_wc *c):
    """The WC of a program's request; releases what was kept for it. None if its queue pair is gone."""
    cdef WC wc = WC.__new__(WC)     # may run the collector, hence first: below, the queue pair is borrowed
    wc.c = c[0]
    if cq.last_qp is NULL or cq.last_number != c.qp_num:
        cq.find_qp(c.qp_num)
    if c.wr_id & WR_SHARED:
        # The queue pair that took it may be gone, or (XRC) belong to another process; the buffers are ours.
        reference = _shared_queues.get(c.wr_id >> QP_GENERATION_SHIFT)
        srq = None if reference is None else reference()
        if srq is None:
            cq.stray += 1
            return None
        if cq.last_qp is not NULL:
            wc.qp = <QP>cq.last_qp
        wc.rare = _Rare.__new__(_Rare)
        wc.rare.srq = srq
        wc.wr_id = wc.rare.srq.receives.end(c.wr_id)
    elif cq.last_qp is NULL or c.wr_id >> QP_GENERATION_SHIFT != (<QP>cq.last_qp).generation:
        cq.stray += 1
        return None
    else:
        wc.qp = <QP>cq.last_qp
        if c.wr_id & WR_SEND:
            wc.wr_id = wc.qp.sends.end(c.wr_id)
        else:
            wc.wr_id = wc.qp.receives.end(c.wr_id)
    return wc


cdef inline int route_to_awaiter(CompletionWatcher watcher, verbs.ibv_wc *c) except -1:
    """The same where requests are awaited: end the operation, or put the completion with those to be collected."""
    cdef WC wc = route_to_request(watcher.cq, c)
    cdef Operation operation
    if wc is None:
        return 0
    if type(wc.wr_id) is Operation:
        operation = wc.wr_id    # ended() takes it from there, and it may be the last one to hold it
        return operation.ended(wc)
    watcher.found.append(wc)
    return 0


cdef inline int route_to_stream(StreamEngine engine, verbs.ibv_wc *wc) except -1:
    """Give a completion to its connection, or to its shared ring, which finds the connection by the queue pair."""
    cdef uint64_t index = wc.wr_id >> INDEX_SHIFT
    cdef Connection connection = engine.table[index] if index < <uint64_t>len(engine.table) else None
    if connection is None or (wc.wr_id & WR_BASE_MASK) != connection.wr_base:
        if index == SHARED_INDEX:
            return route_to_ring(engine, wc)
        engine.stale += 1
        return 0
    return stream_completed(connection, wc)


cdef int route_to_ring(StreamEngine engine, verbs.ibv_wc *wc) except -1:
    cdef uint64_t number = (wc.wr_id >> STREAM_GENERATION_SHIFT) & STREAM_GENERATION_MASK
    cdef SharedRing ring = engine.shared_rings[number] if number < <uint64_t>len(engine.shared_rings) else None
    if ring is None:
        engine.stale += 1
        return 0
    return ring.received(wc)
