# Posting to a queue pair: requests become a chain, and the table of what is in flight has the same order as the queue.
#
# Callers: QP.post_send and post_recv, the queues of awaited operations (awaited.pxi), and the sessions of wr()
# (wrsession.pxi). A request is entered in the table (inflight.pxi) before it is posted, since its completion may be
# polled at once, and taken back if it is refused.
#
# Sends: several threads may post to one queue pair. The lock `posting` keeps table and queue in one order. While a
# thread waits for it, or the device copies, others run, and may change the list; so the chain is filled again then.
# Receives are posted with the GIL held throughout.

# Posting a big message to the embedded device copies it; other threads may run meanwhile.
cdef enum:
    LONG_COPY = 65536
    CHAIN_ON_STACK = 32


cdef uint64_t post_chain(QP qp, list requests, Operation operation) except? 0:
    """Post requests as one chain. For an operation, all completions belong to it, and the last request has one.

    Returns the device's wr_id of the last one.
    """
    cdef verbs.ibv_send_wr few[CHAIN_ON_STACK]
    cdef verbs.ibv_send_wr *chain = few
    cdef verbs.ibv_send_wr *bad = NULL
    cdef Py_ssize_t n = len(requests), i
    cdef uint64_t total = 0, last = 0
    cdef bint binds = False, others_run
    cdef int rc
    cdef SendWR wr, begun
    if n == 0:
        return 0
    if n > CHAIN_ON_STACK:
        chain = <verbs.ibv_send_wr *>malloc(n * sizeof(verbs.ibv_send_wr))
        if chain is NULL:
            raise MemoryError
    try:
        fill_chain(qp, requests, chain, &total, &binds)
        others_run = total >= LONG_COPY or not try_to_lock_posting(qp, n)
        # Other threads run while the device copies and while we wait for the lock. They may change the list.
        if others_run:
            requests = list(requests)
            if len(requests) != n:
                raise RuntimeError("ibv_post_send: the list of requests changed while it was posted")
            lock_posting(qp, n)
        # The table has the same order as the queue. So we keep the lock until these requests are posted.
        try:
            if others_run:
                fill_chain(qp, requests, chain, &total, &binds)
            qp.usable()
            for i in range(n):
                begun = <SendWR>PyList_GET_ITEM(requests, i)
                if operation is None:
                    last = qp.sends.begin(begun.wr_id, begun.elements)
                else:
                    last = qp.sends.begin(operation, begun.elements)
                    if i == n - 1:
                        chain[i].send_flags |= verbs.IBV_SEND_SIGNALED
                chain[i].wr_id = last
                qp.sends.may_be_overtaken(&chain[i])
            if total >= LONG_COPY:
                with nogil:
                    rc = verbs.rn_post_send(qp.ptr, chain, &bad)
            else:
                rc = verbs.rn_post_send(qp.ptr, chain, &bad)
            i = n
            if rc < 0:
                i = <Py_ssize_t>(bad - chain) if bad is not NULL else 0
                wr = requests[i]
                qp.sends.take_back(n - i)
        finally:
            PyThread_release_lock(qp.posting)
    finally:
        if chain is not few:
            free(chain)
    if binds:
        for posted in requests[:i]:
            window_bound(qp, posted)
    if rc < 0:
        raise OSError(-rc, refusal("ibv_post_send", rc, wr, qp, i, n) + why_unsent(qp, rc, wr))
    return last


cdef int fill_chain(QP qp, list requests, verbs.ibv_send_wr *chain, uint64_t *total, bint *binds) except -1:
    """Check the requests and fill the chain; also count the bytes, and report whether windows are bound.

    No Python code runs, unless a request is refused.
    """
    cdef Py_ssize_t n = len(requests), i
    cdef SendWR wr
    total[0] = 0
    for i in range(n):
        wr = requests[i]
        check_send(qp, wr)
        chain[i] = wr.c
        chain[i].next = &chain[i + 1] if i + 1 < n else NULL
        total[0] += wr.elements.total
        binds[0] |= wr.mw is not None
    return 0


cdef bint try_to_lock_posting(QP qp, Py_ssize_t n) noexcept:
    """Take the posting lock, if no other thread has it and the table has room for n requests."""
    if not PyThread_acquire_lock(qp.posting, NOWAIT_LOCK):
        return False
    if qp.sends.room(n):
        return True
    PyThread_release_lock(qp.posting)
    return False


cdef int lock_posting(QP qp, Py_ssize_t n) except -1:
    """Take the posting lock, waiting for other threads and making room if necessary."""
    while True:
        if not PyThread_acquire_lock(qp.posting, NOWAIT_LOCK):
            with nogil:
                PyThread_acquire_lock(qp.posting, WAIT_LOCK)
        if qp.sends.room(n):
            return 0
        PyThread_release_lock(qp.posting)
        qp.sends.grow(n)


cdef inline int check_send(QP qp, SendWR wr) except -1:
    """Raise if a request names a closed object, or lacks one that the library would read."""
    if (wr is not None and wr.elements is not None and wr.elements.others is None
            and qp.ptr is not NULL and qp.ptr.qp_type != verbs.IBV_QPT_UD):
        return 0
    return check_rare_send(qp, wr)


cdef int check_rare_send(QP qp, SendWR wr) except -1:
    """The same for all requests other than plain ones to a connected peer."""
    if wr is None or wr.elements is None:
        raise TypeError(f"{shown(wr)} is not a SendWR")
    if wr.elements.others is not None:
        wr.usable(qp.pd.context)
        if wr.ah is not None and qp.ptr is not NULL and qp.ptr.qp_type != verbs.IBV_QPT_UD:
            raise ValueError(f"{wr!r} on {qp!r}: a request to a connected peer takes no ah")
    if wr.ah is None and qp.ptr is not NULL and qp.ptr.qp_type == verbs.IBV_QPT_UD:
        raise OSError(EINVAL, f"ibv_post_send: {wr!r} on {qp!r}: a datagram needs ah, remote_qpn and remote_qkey")
    return 0


cdef int window_bound(QP qp, SendWR wr) except -1:
    """Update the window after BIND_MW was posted; libraries leave this to their user."""
    if wr.mw is not None:
        wr.mw.ptr.rkey = wr.c.bind_mw.rkey
        wr.mw.mr = wr.bind_info.mr
    return 0


cdef int post_session(QP qp, list requests) except -1:
    """Post the requests of a session, all or none."""
    cdef verbs.ibv_send_wr *c
    cdef verbs.ibv_data_buf *inline_bufs
    cdef SendWR wr
    cdef int most = 1, n = len(requests), i, rc
    for wr in requests:
        check_send(qp, wr)
        most = max(most, wr.elements.count)
    inline_bufs = <verbs.ibv_data_buf *>malloc(most * sizeof(verbs.ibv_data_buf))
    c = <verbs.ibv_send_wr *>malloc(n * sizeof(verbs.ibv_send_wr))
    try:
        if inline_bufs is NULL or c is NULL:
            raise MemoryError
        lock_posting(qp, n)
        try:
            qp.usable()
            for i in range(n):
                wr = requests[i]
                c[i] = wr.c
                c[i].wr_id = qp.sends.begin(wr.wr_id, wr.elements)
                qp.sends.may_be_overtaken(&c[i])
            # From start to complete the library holds the queue's lock. Nothing here creates an object, so neither
            # the collector nor another Python thread runs meanwhile.
            qp.extended.wr_start(qp.extended)
            for i in range(n):
                verbs.rn_wr_build(qp.extended, &c[i], &(<SendWR>requests[i]).more, inline_bufs)
            rc = verbs.rn_wr_complete(qp.extended)
            if rc < 0:
                qp.sends.take_back(n)
        finally:
            PyThread_release_lock(qp.posting)
        if rc < 0:
            why = [text for posted in requests if (text := why_unsent(qp, rc, posted))]
            raise OSError(-rc, f"ibv_wr_complete: {reason_of(rc)}: {n} requests on {qp!r}, none was posted"
                               + (why[0] if why else ""))
        for wr in requests:
            window_bound(qp, wr)
    finally:
        free(inline_bufs)
        free(c)
    return 0


cdef uint64_t post_receives(QP qp, list requests, Operation operation) except? 0:
    """The same as post_chain(), for receives."""
    cdef verbs.ibv_recv_wr few[CHAIN_ON_STACK]
    cdef verbs.ibv_recv_wr *chain = few
    cdef verbs.ibv_recv_wr *bad = NULL
    cdef Py_ssize_t n = len(requests), i
    cdef uint64_t last = 0
    cdef int rc
    cdef RecvWR wr
    if n == 0:
        return 0
    check_receives(requests)
    if n > CHAIN_ON_STACK:
        chain = <verbs.ibv_recv_wr *>malloc(n * sizeof(verbs.ibv_recv_wr))
        if chain is NULL:
            raise MemoryError
    try:
        while not qp.receives.room(n):
            qp.receives.grow(n)
        qp.usable()
        for i in range(n):
            wr = requests[i]
            chain[i] = wr.c
            last = qp.receives.begin(wr.wr_id if operation is None else operation, wr.elements)
            chain[i].wr_id = last
            chain[i].next = &chain[i + 1] if i + 1 < n else NULL
        rc = verbs.rn_post_recv(qp.ptr, chain, &bad)
        if rc < 0:
            i = <Py_ssize_t>(bad - chain) if bad is not NULL else 0
            qp.receives.take_back(n - i)
            wr = requests[i]
            raise OSError(-rc, refusal("ibv_post_recv", rc, wr, qp, i, n) + why_unreceived(qp, rc, wr))
    finally:
        if chain is not few:
            free(chain)
    return last


cdef str why_unsent(QP qp, int rc, SendWR wr):
    """The probable reason why a request was refused, with the numbers."""
    cdef _Elements elements = wr.elements
    if rc == -ENOMEM:
        return (f"; the queue holds {qp.granted.max_send_wr} (QPCap.max_send_wr): poll completions first. Unsignaled "
                "requests free their places when a later signaled one completes")
    if rc != -EINVAL:
        return ""
    if qp.ptr.state != verbs.IBV_QPS_RTS:
        return f"; in {qp.state.name} nothing can be sent: connect the queue pair first (RTS)"
    if elements.count > qp.granted.max_send_sge:
        return f"; it takes at most {qp.granted.max_send_sge} elements (QPCap.max_send_sge)"
    if wr.c.send_flags & verbs.IBV_SEND_INLINE and elements.total > qp.granted.max_inline_data:
        return (f"; {elements.total} bytes are to be inline, and at most {qp.granted.max_inline_data} can be "
                "(QPCap.max_inline_data)")
    return ""


cdef str why_unreceived(QP qp, int rc, RecvWR wr):
    """The same, for a receive."""
    if rc == -ENOMEM:
        return f"; the queue holds {qp.granted.max_recv_wr} (QPCap.max_recv_wr): poll completions first"
    if rc != -EINVAL:
        return ""
    if qp.srq is not None:
        return "; it receives from its srq: post there"
    if qp.ptr.state == verbs.IBV_QPS_RESET:
        return "; in RESET nothing can be posted: call to_init() first"
    if wr.elements.count > qp.granted.max_recv_sge:
        return f"; it takes at most {qp.granted.max_recv_sge} elements (QPCap.max_recv_sge)"
    return ""
