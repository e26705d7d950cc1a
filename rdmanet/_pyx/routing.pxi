# Completions of the byte stream go to their connections, which their wr_ids name: wrid.pxi has the layouts. Those of
# programs' requests: collecting.pxi.


cdef inline int route_to_stream(_Engine engine, verbs.ibv_wc *wc) except -1:
    """Give a completion to its connection."""
    cdef uint64_t index = wc.wr_id >> INDEX_SHIFT
    cdef Receiver connection = <Receiver>engine.table[index] if index < <uint64_t>len(engine.table) else None
    if connection is None or (wc.wr_id & WR_BASE_MASK) != connection.wr_base:
        engine.stale += 1
        return 0
    return stream_completed(connection, wc)
