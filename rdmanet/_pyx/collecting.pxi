# Which request of a program's a completion is of, by its wr_id: wrid.pxi has the layouts. The request ends in the table
# of its queue pair, or of its shared receive queue.


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
