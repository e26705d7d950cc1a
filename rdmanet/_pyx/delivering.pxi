# What a connection has received goes to its sink, which brings it to the program.
#
# The engine calls `deliver_received` in a pass, for each connection on its list. A sink takes bytes then, or, if a
# program reads them itself, at another time; it tells that by `slots_consumed`. A callback may do anything: close the
# connection, pause it, or choose another sink. So after each callback everything is read again.


cdef int deliver_received(Receiver connection) except -1:
    """Hand the protocol what has arrived, then send what is due. A callback may do anything."""
    if not connection.greeted:
        return settle(connection)
    cdef uint32_t turns = connection.data_slots
    cdef Inbox inbox = connection.inbox
    cdef Sink sink = connection.sink
    cdef bint wanted = True
    if connection.discarding:
        while inbox.count:
            inbox.first_consumed()
        repost_if_half(connection)
    connection.engine.delivering = connection
    try:
        while inbox.count and turns and not connection.reading_paused and not connection.discarding:
            turns -= 1
            sink = connection.sink        # the application may have chosen another
            wanted = sink.take(connection)
            if connection.fill or connection.backlog.size:
                pump(connection, True)
            if not wanted:
                break
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        connection.owner.callback_raised(exc, sink.callback)
        return 0
    finally:
        connection.engine.delivering = None
    if connection.telling_unread:
        tell_unread(connection)
    if connection.inbox.count == 0:
        if connection.tell_drained and not connection.reading_paused:
            connection.tell_drained = False
            connection.owner.drained()
    elif wanted and not connection.reading_paused:
        connection.engine.deliver_later(connection)
    else:
        look_for_reader(connection)
    return settle(connection)


cdef int slots_consumed(Receiver connection) except -1:
    """A sink has taken bytes. Outside of a delivery: what follows from that."""
    cdef _Engine engine = connection.engine
    cdef uint32_t freed = connection.inbox.freed_count
    if engine.delivering is connection:
        try:
            return repost_if_half(connection)
        except Exception as exc:
            return fail_connection(connection, exc)   # whoever reads is not to blame
    if freed and (freed >= connection.repost_at or freed > connection.ledger.outstanding()):
        try:
            repost_freed(connection)
        except Exception as exc:
            fail_connection(connection, exc)
        engine.flush_later(connection)
        engine.wake_if_running()
    if connection.inbox.count:
        look_for_reader(connection)
    else:
        if connection.tell_drained:
            engine.deliver_later(connection)
            engine.wake_if_running()
        if connection.telling_unread:
            tell_unread(connection)
    return 0


cdef int pause_reading(Receiver connection, bint paused) except -1:
    """Whether what arrives is to wait. It keeps its slots, so the peer runs out of credits."""
    connection.reading_paused = paused
    if not paused and (connection.inbox.count or connection.tell_drained) and connection.opened:
        connection.engine.deliver_later(connection)
        connection.engine.wake()
    return 0


cdef int tell_when_drained(Receiver connection) except -1:
    """Call `drained` once all that arrived has been delivered (reading must be on)."""
    connection.tell_drained = True
    if connection.opened:
        connection.engine.deliver_later(connection)
        connection.engine.wake()
    return 0


cdef int watch_unread(Receiver connection) except -1:
    """Call `unread_changed` from now on."""
    connection.telling_unread = True
    connection.unread_told = connection.inbox.count > 0
    return 0


cdef inline void deliver_no_more(Receiver connection) noexcept:
    """Nobody is left to be told."""
    connection.reading_paused = True
    connection.tell_drained = connection.telling_unread = False


cdef int tell_unread(Receiver connection) except -1:
    if connection.unread_told != (connection.inbox.count > 0):
        connection.unread_told = not connection.unread_told
        connection.owner.unread_changed()
    return 0


cdef inline uint32_t many_slots(Receiver connection) noexcept:
    """How many slots of unread bytes may be kept for a program that does not read."""
    return (connection.data_slots + 1) // 2 if connection.shared is None else 1
