# Completions go to their owners, whom their wr_ids name: wrid.pxi has the layouts.
#
# Requests of programs end in their queue pairs' tables, or in an Operation, which somebody awaits. What is of the byte
# stream goes to its connection.


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


cdef inline int route_to_stream(_Engine engine, verbs.ibv_wc *wc) except -1:
    """Give a completion to its connection, or to its shared ring, which finds the connection by the queue pair."""
    cdef uint64_t index = wc.wr_id >> INDEX_SHIFT
    cdef Receiver connection = <Receiver>engine.table[index] if index < <uint64_t>len(engine.table) else None
    if connection is None or (wc.wr_id & WR_BASE_MASK) != connection.wr_base:
        if index == SHARED_INDEX:
            return route_to_ring(engine, wc)
        engine.stale += 1
        return 0
    return stream_completed(connection, wc)


cdef int route_to_ring(_Engine engine, verbs.ibv_wc *wc) except -1:
    cdef uint64_t number = (wc.wr_id >> STREAM_GENERATION_SHIFT) & STREAM_GENERATION_MASK
    cdef SharedRing ring = engine.shared_rings[number] if number < <uint64_t>len(engine.shared_rings) else None
    if ring is None:
        engine.stale += 1
        return 0
    return complete_in_ring(engine, ring, wc)


cdef int complete_in_ring(_Engine engine, SharedRing ring, verbs.ibv_wc *wc) except -1:
    """A completed receive of any of the ring's connections."""
    cdef uint32_t slot = <uint32_t>(wc.wr_id & LOW_MASK)
    cdef int64_t index = ring.numbers.find(wc.qp_num)
    cdef Receiver connection = <Receiver>engine.table[index] if index >= 0 else None
    ring.came(slot)
    if connection is None:
        engine.stale += 1
    else:
        stream_completed(connection, wc)
        if ring.slots[slot].posted or connection.inbox.ends_with(slot):
            return 0
    ring.post_again(slot)   # it was refused, or failed, or it is nobody's any more
    return ring.post()
