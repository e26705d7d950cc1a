# How a connection ends: everything that it has is given back, once.
#
# `part_from_shared_ring` comes before the queue pair is destroyed, `release_connection` after it: no device reads or
# writes the connection's memory then. Whatever raises, the memory goes back, and so does the place in the engine.


cdef int part_from_shared_ring(Receiver connection) except -1:
    """A shared ring takes back what the queue pair has in its hands."""
    if connection.shared is None or connection.qp is None or connection.qp.closed or connection.parted:
        return 0
    connection.parted = True
    post_no_more(connection)
    try:
        connection.qp.to_error()
    except OSError:
        pass    # a device that is gone: then no slot comes back, and none is needed
    connection.shared.part(connection.qp_c.qp_num, may_be_amid_a_message(connection))
    return 0


cdef bint may_be_amid_a_message(Receiver connection) noexcept:
    """May its queue pair have taken a receive that will never complete? The embedded device gives them back."""
    return (
        connection.ledger is not None and not connection.ledger.fin_received
        and not connection.engine.pd.context.library.embedded_device
    )


cdef int release_connection(Receiver connection) except -1:
    """Give the memory and the place in the engine back."""
    cdef _Engine engine = connection.engine
    if not connection.attached:
        return 0
    if tracing != NULL:
        trace_of(connection, TRACE_ENDED, 0, 0)
    post_no_more(connection)
    let_memory_go(connection)
    if connection.sink is not None:
        connection.sink.ends(connection)
    count_connection(connection, engine.totals)
    engine.expel(connection)
    leave_sink(connection)
    forget_writes(connection)
    if connection.shared is not None:
        connection.shared.leave(&connection.share, connection.inbox)
    while connection.inbox.count:
        connection.inbox.first_consumed()
    deliver_no_more(connection)
    tell_writer_nothing(connection)
    requests_are_lost(connection)
    set_blocked(connection, False)
    try:
        lose_operations(connection)
    finally:
        if connection.landings is not None:
            connection.landings.lose()
        connection.log.drop_references()
        connection.backlog.forget_loans()
        if connection.chunk is not None:
            return_frames(connection)
        if connection.own is not None:
            connection.own.release()
    return 0


cdef int lose_operations(Receiver connection) except -1:
    """Operations that had begun will not complete."""
    failure = None
    for operation in connection.log.take_operations():
        if type(operation) is Landing:
            continue    # lose_landings()
        try:
            connection.owner.operation_lost(operation)
        except Exception as exc:
            failure = exc   # the others end nonetheless
    if failure is not None:
        raise failure
    return 0
