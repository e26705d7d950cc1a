# Unread bytes of programs that do not read, put by so that their peers can go on, as TCP's buffers would.
#
# If the program does not read, and the peer has used up its credits, what has come is put by, into memory of its own,
# up to `put_by_bytes`: the engine looks a few passes later (`relieve_stuffed`) and calls `put_unread_by`.

cdef enum:
    STUFFED_PASSES = 8              # a program that does not read for so long may not read at all


cdef inline int look_for_reader(Connection connection) except -1:
    """The peer has used up its credits: look in a while whether its bytes have been read."""
    if (
        not connection.stuffed and connection.inbox.held and connection.inbox.bytes < connection.put_by_bytes
        and connection.ledger.granted == connection.ledger.received and connection.attached
    ):
        look_again(connection.engine, connection)
    return 0


cdef int look_again(_Engine engine, Connection connection) except -1:
    """Its peer has no credits left: see in a while whether its program reads."""
    connection.stuffed = True
    connection.stuffed_tick = engine.tick
    engine.stuffed.append(connection)
    return engine.wake_if_running()


cdef int relieve_stuffed(_Engine engine) except -1:
    """Where programs do not read, take in what the peers have yet to send, as TCP would."""
    cdef Connection connection
    cdef list stuffed = engine.stuffed
    engine.stuffed = []
    for connection in stuffed:
        if not connection.inbox.held or connection.ledger.granted != connection.ledger.received:
            connection.stuffed = False
        elif engine.tick - connection.stuffed_tick < STUFFED_PASSES:
            engine.stuffed.append(connection)
        else:
            connection.stuffed = False
            put_unread_by(connection)
    return 0


cdef int put_unread_by(Connection connection) except -1:
    """The program does not read, and the peer can send no more: free the slots of what has come."""
    try:
        connection.inbox.put_by(connection.data_slots)
        repost_freed(connection)
    except Exception as exc:
        return fail_connection(connection, exc)
    return connection.engine.flush_later(connection)
