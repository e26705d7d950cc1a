# How a connection fails, and what of it is told when.
#
# A failure of whatever kind ends in `fail_connection`, once: from then on nothing is posted, and the owner is told by
# the engine (`fail_all`) when everything that has completed before has been seen. So data comes before its end.


cdef inline void post_no_more(Sender connection) noexcept:
    connection.broken = True


cdef int fail_connection(Sender connection, object failure) except -1:
    """Post nothing more; tell the owner when all completions that are there have been seen."""
    if connection.failure is not None or not connection.attached:
        return 0
    connection.broken = True
    connection.failure = failure
    connection.failure_tick = connection.engine.tick
    connection.engine.failed.append(connection)
    connection.engine.wake()
    return 0


cdef int distrust_peer(Sender connection, object exc) except -1:
    """The peer broke the protocol: tell the owner, who may still say Abort, and hear nothing more."""
    connection.distrusted = True
    try:
        connection.owner.protocol_broken(exc)
    finally:
        connection.broken = True
    return 0


cdef int fail_by_completion(Sender connection, verbs.ibv_wc *wc) except -1:
    """A request has failed, and with it all later ones. The first that was not just flushed says why."""
    cdef bint is_send = bool(wc.wr_id & SEND_FLAG), was_flushed = wc.status == verbs.IBV_WC_WR_FLUSH_ERR
    if connection.broken and (was_flushed or not is_flush(connection.failure)):
        return 0
    failure = (
        wc.status, is_send, wc.vendor_err,
        connection.log.operation_at(<uint32_t>(wc.wr_id & LOW_MASK)) if is_send else None)
    if not connection.broken:
        return fail_connection(connection, failure)
    connection.failure = failure    # receives may be flushed before that which flushes them completes
    return 0


cdef bint is_flush(object failure):
    return type(failure) is tuple and failure[0] == verbs.IBV_WC_WR_FLUSH_ERR


cdef inline bint carried(Sender connection, char *to, const char *data, size_t size) except -1:
    """Copy memory of the program's. False: it is gone, and the connection fails, as TCP's does with EFAULT."""
    if copy_carefully(to, data, size):
        return True
    fail_connection(connection, memory_is_gone("write"))
    return False
