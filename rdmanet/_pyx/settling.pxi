# The last step of a pass for a connection: what was written goes out, then what is due besides. Whoever delivers or
# flushes says that it is due, by a call of `deliver_later` or `flush_later`; only the pass does it.


cdef int settle(Receiver connection) except -1:
    """Send everything that may go now: what was written, then what control frames are due."""
    if connection.fill or connection.backlog.size:
        pump(connection, True)
    if connection.protocol_paused or connection.tell_flushed or connection.tell_delivered or connection.tell_place:
        tell_room(connection)
    return say_what_is_due(connection)
