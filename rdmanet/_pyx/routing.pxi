# Completions of the byte stream go to their connections, which their wr_ids name: wrid.pxi has the layouts. Those of
# programs' requests: collecting.pxi.


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
