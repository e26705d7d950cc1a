# Unread bytes of programs that do not read, spilled so that their peers can go on, as TCP's buffers would.
#
# If the program does not read, and the peer has used up its credits (it is stalled), what has come is spilled: copied
# out of its slots, into memory of its own, up to `spill_bytes`. The engine looks a few passes later
# (`relieve_stalled`) and calls `spill_unread`.

cdef enum:
    STALLED_PASSES = 8              # a program that does not read for so long may not read at all


cdef inline int look_for_reader(Receiver connection) except -1:
    """The peer has used up its credits: look in a while whether its bytes have been read."""
    if (
        not connection.stalled and connection.inbox.held and connection.inbox.bytes < connection.spill_bytes
        and connection.ledger.granted == connection.ledger.received and connection.attached
    ):
        look_again(connection.engine, connection)
    return 0


cdef int look_again(_Engine engine, Receiver connection) except -1:
    """Its peer has no credits left: see in a while whether its program reads."""
    connection.stalled = True
    connection.stalled_tick = engine.tick
    engine.stalled.append(connection)
    return engine.wake_if_running()


cdef int relieve_stalled(_Engine engine) except -1:
    """Where programs do not read, take in what the peers have yet to send, as TCP would."""
    cdef Receiver connection
    cdef list stalled = engine.stalled
    engine.stalled = []
    for connection in stalled:
        if not connection.inbox.held or connection.ledger.granted != connection.ledger.received:
            connection.stalled = False
        elif engine.tick - connection.stalled_tick < STALLED_PASSES:
            engine.stalled.append(connection)
        else:
            connection.stalled = False
            spill_unread(connection)
    return 0


cdef int spill_unread(Receiver connection) except -1:
    """The program does not read, and the peer can send no more: free the slots of what has come."""
    try:
        connection.inbox.spill(connection.data_slots)
        repost_freed(connection)
    except Exception as exc:
        return fail_connection(connection, exc)
    return connection.engine.flush_later(connection)
