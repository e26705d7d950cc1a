# The memory that connections send from: they have it while they send, and take turns.
#
# The open frame is the send slot that is being filled.
#
# A connection borrows memory for its send slots and control buffers when it has something to post. When nothing of it
# is in flight any more, it likely sends again soon: up to WARM_MOST keep it, until the engine sleeps or another finds
# none. If all of the pool's memory is lent, a connection waits (`in_want`) until another gives its own back. The pool
# always has memory for one at least, so some connection has memory that it will give back.

cdef enum:
    SEND_BUFFERS_SPARE = 16         # empty slabs of what connections send from: they take turns
    AT_HAND_MOST = 16               # chunks that go from one to the next without a look at their slab
    WARM_MOST = 64                  # connections that keep it though nothing is in flight, until the engine sleeps


cdef bint borrow_frames(Sender connection):
    """Whether there is memory to send from now; if not, `settle` comes when there may be."""
    cdef _Engine engine = connection.engine
    try:
        connection.chunk = connection.sends.take()
    except (OSError, MemoryError):
        if connection not in engine.in_want:
            engine.in_want.append(connection)
        cool_down(engine, 0)      # what others keep warm is for us
        return False
    connection.frames = connection.chunk.address
    connection.controls = connection.frames + connection.data_slots * connection.stride
    return True


cdef inline char *open_frame(Sender connection) noexcept:
    return connection.frames + connection.open_slot * connection.stride


cdef inline bint fill_frame(Sender connection, const char *data, size_t n, bint stays) except -1:
    """Copy bytes into the open frame, where they have room. False: their memory is gone, and the connection fails.

    `stays`: the memory is a bytes object's, which is no file that somebody could shorten.
    """
    cdef char *to = open_frame(connection) + HEADER + connection.fill
    if stays:
        memcpy(to, data, n)
    elif not carried(connection, to, data, n):
        return False
    connection.fill += <uint32_t>n
    return True


cdef inline void take_from_frame(Sender connection, uint32_t n) noexcept:
    """Forget the last bytes of the open frame."""
    connection.fill -= n


cdef inline void frame_goes(Sender connection, bint is_inline) noexcept:
    """The open frame is posted. If inline, its slot is free, and is the next one again."""
    connection.fill = 0
    if not is_inline:
        connection.open_slot = connection.open_slot + 1 if connection.open_slot + 1 < connection.data_slots else 0


cdef inline bint has_free_frame(Sender connection) noexcept:
    return connection.frames_sent - connection.done < connection.data_slots


cdef inline bint nothing_in_flight(Sender connection) noexcept:
    """Whether the memory that it sends from has nothing in it."""
    return (
        connection.chunk is not None and connection.fill == 0
        and connection.frames_sent == connection.done and connection.controls_posted == connection.controls_done
    )


cdef int return_frames(Sender connection) except -1:
    cdef Sender waiting
    connection.frames = connection.controls = NULL
    chunk, connection.chunk = connection.chunk, None
    connection.sends.give(chunk)
    if connection.engine.in_want:
        for waiting in connection.engine.in_want:
            connection.engine.flush_later(waiting)
        connection.engine.in_want.clear()
        connection.engine.wake_if_running()
    return 0


cdef int keep_warm(_Engine engine, Sender connection) except -1:
    """Nothing of it is in flight; likely it sends again soon. If too many keep memory, the eldest gives it back."""
    cool_down(engine, WARM_MOST - 1)
    connection.warm = True
    engine.warm.append(connection)
    return 0


cdef int cool_down(_Engine engine, Py_ssize_t most) except -1:
    """Let all but so many give back what they send from."""
    cdef Sender connection
    while len(engine.warm) > most:
        connection = engine.warm.pop(0)
        connection.warm = False
        if nothing_in_flight(connection):
            return_frames(connection)
    return 0


cdef RingPool send_buffers(_Engine engine, uint32_t slot_bytes, uint32_t data_slots):
    """What connections send from, while they do; at least one slab, from the first on."""
    cdef RingPool pool = engine.pools.get((slot_bytes, data_slots, "sends"))
    if pool is None:
        pool = engine.pools[slot_bytes, data_slots, "sends"] = RingPool(
            engine.pd, stream_send_bytes(slot_bytes, data_slots), SEND_BUFFERS_SPARE, AT_HAND_MOST
        )
    pool.have_some()
    return pool
