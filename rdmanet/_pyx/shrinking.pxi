# Rings that have grown, and become small again when their connections are idle.
#
# An engine that has such rings looks at them every `idle_s` seconds. If a connection has received nothing since the
# last look, its peer is told that slots are small from now on (slots.py). But the large receives stay posted: only
# frames of the peer's use them up. An idle peer has none to send, so it is asked for some: by Pings, one after the
# other, each of which it answers by a Pong. When the last large receive has been used up, the large bank goes back to
# its pool. That is 24 short frames each way, once, and it needs nothing that the peer does not know.
#
# Nothing is done where bytes are unread, or memory is named for bytes to come. Without an event loop of its own an
# engine has no timer, and its rings stay.

cdef double IDLE_S = 5.0


@cython.final
cdef class GrownRings:
    """Connections of an engine whose rings have grown.

    :ivar idle_s: after so many seconds without a frame, and at most twice as many, a ring is small again
    """

    cdef _Engine engine
    cdef dict connections       # in the order in which they have grown; the values mean nothing
    cdef object timer
    cdef public double idle_s

    def __cinit__(self, _Engine engine not None):
        self.engine = engine
        self.connections = {}
        self.idle_s = IDLE_S

    cdef int add(self, Receiver connection) except -1:
        connection.own.seen = connection.own.sizes.received
        if not connection.own.grown:
            connection.own.grown = True
            self.connections[connection] = None
        return self.arm()

    cdef int remove(self, Receiver connection) except -1:
        if connection.own is not None and connection.own.grown:
            connection.own.grown = False
            self.connections.pop(connection, None)
        return 0

    cdef int end(self) except -1:
        self.connections.clear()
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()
        return 0

    cdef int arm(self) except -1:
        cdef _Engine engine = self.engine
        if self.timer is None and self.connections and not engine.by_hand:
            self.timer = engine.loop.call_later(self.idle_s, self.look)
        return 0

    def look(self):
        """The timer has ended: shrink what is idle, and look at the rest again."""
        cdef _Engine engine = self.engine
        cdef Receiver connection
        self.timer = None
        if engine.closed or engine.pid != verbs.rn_pid:
            return
        try:
            for connection in list(self.connections):
                if connection.own.seen == connection.own.sizes.received and slots_may_shrink(connection):
                    self.remove(connection)
                    engine.flush_later(connection)
                    engine.wake()
                else:
                    connection.own.seen = connection.own.sizes.received
        finally:
            self.arm()
