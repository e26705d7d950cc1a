# Slots that are free again go back to the device, and only then to the peer, as credits.
#
# Consumed data slots are posted again half a ring at a time, in one chained call (`repost_if_half`); those of control
# frames on the spot. A grant rides in the header of the next frame. If none is due soon, or if there is something else
# to say (an answer to a Ping, news of regions, of direct placement or of slots that have another size), a control frame
# takes it: `say_what_is_due` is called last when a connection has been delivered to, or flushed.


cdef inline int repost_if_half(Receiver connection) except -1:
    if connection.inbox.freed_count >= connection.repost_at:
        repost_freed(connection)
    return 0


cdef int repost_freed(Receiver connection) except -1:
    """Give consumed slots back to the device, and only then to the peer."""
    cdef uint32_t i, count
    if connection.shared is not None:
        connection.shared.take_back(connection.inbox)
        return 0 if connection.broken else connection.shared.promise(
            &connection.share, connection.ledger, connection.inbox.held,
            connection.landings is not None and connection.landings.expectant != 0)
    if connection.broken:
        return 0
    count = connection.inbox.take_freed()
    for i in range(count):
        connection.own.post_later(connection, connection.inbox.freed[i])
        if connection.engine.recv_count == CHAIN:
            connection.own.post(connection)
    connection.own.post(connection)
    connection.ledger.slots_freed(
        count if connection.landings is None else connection.landings.to_grant(connection, count))
    return 0


cdef inline int repost_slot(Receiver connection, uint32_t slot) except -1:
    """What a control frame used is posted at once."""
    if connection.shared is not None:
        connection.shared.post_again(slot)
        return connection.shared.post()
    connection.own.post_later(connection, slot)
    return connection.own.post(connection)


cdef int say_what_is_due(Receiver connection) except -1:
    """Grants that no data frame carried, answers, news of memory regions."""
    cdef uint32_t kind
    cdef bint resizes
    if not may_post(connection):
        return 0
    if connection.inbox.freed_count > connection.ledger.outstanding():
        repost_freed(connection)     # the peer would run dry before half a ring is free
    while connection.controls_posted - connection.controls_done < CONTROL_RESERVE:
        resizes = connection.own is not None and connection.own.next is not None
        kind = connection.ledger.control_due(connection.body_due or resizes)
        if kind == 0 and connection.own is not None and connection.own.behind and asks_for_frames(connection):
            kind = FRAME_PING
        if kind == 0 or not (connection.controls != NULL or borrow_frames(connection)):
            break
        body = b""
        if kind == FRAME_PONG:
            body = connection.ping_body
        elif kind == FRAME_PING:
            body = b"rdmanet!"
        elif resizes:
            connection.ledger.slots_grown(connection.own.next.size)
            body = connection.own.say(connection.ledger.grantable)
        elif connection.body_due:
            body = credit_body(connection)
        post_control(connection, kind, body)
        if resizes and kind == FRAME_CREDIT:
            slots_resized(connection)
    return 0


cdef int slots_resized(Receiver connection) except -1:
    """The peer has been told."""
    if connection.own.sizes.size > connection.own.first:
        return connection.engine.shrink_later(connection)
    return repost_freed(connection)      # in small slots, where they would wait for half a ring


cdef bint slots_may_shrink(Receiver connection) except -1:
    """Whether the peer is about to be told of small slots: nothing is unread, and no memory is named."""
    if (
        not may_post(connection) or connection.inbox.count or connection.inbox.leased or connection.own.next is not None
        or connection.ledger.fin_sent or connection.ledger.fin_received
        or (connection.landings is not None and connection.landings.open)
    ):
        return False
    repost_freed(connection)     # some may be in the bank before this one, which has to be free
    connection.own.take_next(connection.own.first)
    return connection.own.next is not None


cdef inline bint asks_for_frames(Receiver connection) noexcept:
    """Whether a Ping is to bring a frame that uses up one of the large receives."""
    return (
        connection.own.sizes.wants_frames() and connection.ledger.may_send(FRAME_PING)
        and not connection.ledger.fin_sent and not connection.ledger.fin_received
    )
