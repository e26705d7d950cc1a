# Keep-alive: notice that the host of an idle connection's peer has vanished.
#
# An engine with such connections looks at all of them now and then, by one timer. A connection is idle if no frame of
# it has come or gone since; the counts that tell are kept anyway, so a message costs nothing more. After `idle` seconds
# the engine posts a probe: an RDMA WRITE of no bytes. It takes no receive, needs no key, and the peer's *device*
# acknowledges it, whatever its program does, and however old that is. If it completes, all is well for another `idle`
# seconds. If it does not, the device reports what it reports of any request that is not acknowledged; or, if that takes
# longer than `interval` * `count` seconds, the engine ends the connection with the same error.
#
# A peer that is stopped, or very busy, is not taken for dead. An adapter answers for it. On the embedded device its
# process has to, but as long as the TCP of its host does, the probe stays in flight (soft/tcp/timeout.c), and the
# engine asks the device before it gives a peer up. Peers that the embedded device reaches by memory are on this
# host, and the kernel tells of their death: they get no probes.
#
# On iWARP a WRITE completes when it has been sent, which proves nothing. There the probe is a Ping, so that the
# adapter's TCP has something to send; it decides when the peer is lost.
#
# While something is in flight the device waits for an acknowledgement anyhow, so no probe is needed.

cdef enum:
    PROBES_AT_ONCE = 128            # in one look; more are soon due again
    MORE_PROBES_NS = 10000000

cdef uint64_t LOOK_LEAST_NS = 5000000

ctypedef int (*qp_way_fn)(verbs.ibv_qp *qp) noexcept nogil
ctypedef int (*qp_silence_fn)(verbs.ibv_qp *qp, uint64_t *ns) noexcept nogil

cdef enum:
    WAY_STREAM = 3                  # RDMANET_SOFT_WAY_STREAM


@cython.final
cdef class KeepAlive:
    """When an engine looks for idle connections, and what it does about them.

    :ivar probes: how many it has sent
    """

    cdef _Engine engine
    cdef object timer
    cdef bint by_hand               # a call that waits looks at the clock itself: see blocking.pxi
    cdef uint64_t next_ns           # the next look; 0: there is none
    cdef qp_way_fn way              # of the embedded device
    cdef qp_silence_fn silence
    cdef readonly uint64_t probes

    def __cinit__(self, _Engine engine not None, Library library not None):
        self.engine = engine
        self.way = <qp_way_fn>library.symbol("rdmanet_soft_qp_way")
        self.silence = <qp_silence_fn>library.symbol("rdmanet_soft_qp_silence")

    cdef int look_by(self, uint64_t when) except -1:
        """Look at that time, or sooner."""
        cdef uint64_t now
        if self.next_ns and self.next_ns <= when:
            return 0
        self.stop()
        self.next_ns = when
        if not self.by_hand:
            now = now_ns()
            self.timer = self.engine.loop.call_later((when - now) / 1e9 if when > now else 0, self.look)
        return 0

    cdef int stop(self) except -1:
        timer, self.timer = self.timer, None
        self.next_ns = 0
        if timer is not None:
            timer.cancel()
        return 0

    cdef int run_by_hand(self, bint by_hand) except -1:
        """Choose who looks: a call that waits, while the loop is not to have timers, or the loop."""
        cdef uint64_t when = self.next_ns
        if by_hand != self.by_hand:
            self.stop()
            self.by_hand = by_hand
            if when:
                self.look_by(when)
        return 0

    cdef int added(self, Receiver connection) except -1:
        connection.keep_since = now_ns()
        connection.keep_probing = False
        connection.keep_mark = frames_moved(connection)
        return self.look_by(connection.keep_since + looks_every(connection))

    def look(self):
        """The time has come."""
        cdef _Engine engine = self.engine
        self.timer = None
        self.next_ns = 0
        if engine.closed or engine.pid != verbs.rn_pid:
            return
        self.look_at_all()

    cdef int look_at_all(self) except -1:
        cdef _Engine engine = self.engine
        cdef Receiver connection
        cdef list late = []
        cdef uint64_t now = now_ns(), every = 0, waited
        cdef uint32_t moves
        cdef int probes = 0
        cdef bint more = False
        for item in engine.table:
            if item is None:
                continue
            connection = item
            if not connection.keeps_alive or not connection.opened or connection.broken:
                continue
            if every == 0 or looks_every(connection) < every:
                every = looks_every(connection)
            moves = frames_moved(connection)
            waited = now - connection.keep_since
            if moves != connection.keep_mark or (connection.keep_probing and connection.log.left() == 0):
                connection.keep_mark = moves
                connection.keep_since = now
                connection.keep_probing = connection.keep_probing and connection.log.left() > 0
            elif connection.keep_probing:
                if waited >= connection.keep_interval_ns * connection.keep_count:
                    late.append(connection)
            elif waited >= connection.keep_idle_ns and connection.log.left() == 0:
                if probes == PROBES_AT_ONCE:
                    more = True
                    continue
                probes += probe_peer(self, connection)
                connection.keep_mark = frames_moved(connection)
                connection.keep_since = now
        if probes:
            self.probes += probes
            engine.wake_if_running()
        if late:
            self.give_up(late)
        if every:
            self.look_by(now + (MORE_PROBES_NS if more else every))
        return 0

    cdef int give_up(self, list late) except -1:
        """Their probes are late. If this process has been stopped, or its loop was busy, answers may lie unread."""
        cdef Receiver connection
        cdef uint64_t silence = 0
        self.engine.drain()
        for connection in late:
            if not connection.attached or connection.broken or not connection.keep_probing:
                continue
            if connection.log.left() == 0 or frames_moved(connection) != connection.keep_mark:
                continue
            if self.silence != NULL:
                if self.silence(connection.qp_c, &silence) or (
                    silence < connection.keep_interval_ns * connection.keep_count
                ):
                    continue    # its host answers: the device goes on waiting for it
            fail_connection(connection, (verbs.IBV_WC_RETRY_EXC_ERR, True, 0, None))
        return 0


cdef inline uint64_t looks_every(Receiver connection) noexcept:
    return max(min(connection.keep_idle_ns // 4, connection.keep_interval_ns), LOOK_LEAST_NS)


cdef inline uint32_t frames_moved(Receiver connection) noexcept:
    """A number that changes with each frame that comes or goes."""
    return connection.log.sequence + <uint32_t>connection.ledger.received + <uint32_t>connection.ledger.reaped


cdef bint is_probed(KeepAlive alive, Receiver connection) noexcept:
    """The embedded device knows without of peers that it reaches through memory."""
    return connection.qp_c != NULL and (alive.way == NULL or alive.way(connection.qp_c) == WAY_STREAM)


cdef bint probe_peer(KeepAlive alive, Receiver connection) except -1:
    """Ask whether the peer's host is there. Nothing is in flight. Returns whether something was sent."""
    cdef verbs.ibv_send_wr wr
    if not may_post(connection) or not is_probed(alive, connection):
        return False
    if connection.engine.behind_operations:   # iWARP
        if connection.ledger.fin_sent or connection.ledger.fin_received:
            return False
        return post_control_if_allowed(connection, FRAME_PING, b"rdmanet!")
    memset(&wr, 0, sizeof(wr))
    wr.opcode = verbs.IBV_WR_RDMA_WRITE
    try:
        connection.keep_probing = post_beside(connection, None, &wr)
    except OSError as exc:
        fail_connection(connection, exc)
    return connection.keep_probing
