# Where the peer places bytes of the stream: the receiving half of direct placement. placement.py has its rules.
#
# A read that has to wait for much, and whose memory is of rdmanet.alloc(), names that memory. From then on there is a
# Landing, until nobody can write to the memory any more: the Want is OVER, and its key is good no more. Only then does
# the read end, whether it has its bytes, was cancelled, or failed. So a program never has memory that still changes.
#
#     named ----> key bound, Want said ----> OVER ----> key invalidated: the read may end
#        |                                    ^
#        +-- not said: the read may end       +-- by Placed, DATA, an answer to Unwant, Fin, or the queue pair's end
#
# The key is that of a type 2 window on exactly the bytes named, bound to the connection's queue pair. BIND_MW is posted
# ahead of the Credit that says the key; LOCAL_INV is posted when the Want is over, and its completion is awaited. So
# a peer cannot change what a program has been given, whatever it has remembered. A device without such windows places
# nothing.
#
# Placed bytes go through the inbox as others do, by an entry that points to where they are. The read that named the
# memory finds them in their place; any other use of them (it was cancelled, the protocol was switched) copies them out,
# before the memory is let go.
#
# When it pays, and when it does not:
#
#   * Reads of less than `engine.place_bytes` are copied. An adapter places without a CPU, so it saves a copy. The
#     embedded device copies with a CPU in any case, and a Want costs a round trip, in which slots would have been
#     filled. So its library names a higher limit than PLACE_BYTES. RDMANET_PLACE_BYTES sets another.
#   * The peer may send at once as much as it was granted, and it never waits for a Want. So a connection that reads
#     into such memory grants little ahead, EAGER_SLOTS: these are copied, and the rest of a large message is placed.
#   * A read of a known length names its memory if `place_bytes` are missing; or, when some bytes have come, that and
#     what the peer may send already. A read that may return less names it only if the one before got much, and before
#     it waits.
#   * If the peer has not placed anything in UNUSED_MOST attempts (its writes are small, say), the connection goes back
#     to slots for a number of reads, each time for longer.

cdef enum:
    WANT_BYTES_MAX = 1 << 30
    EAGER_SLOTS = 2
    EXPECTANT_FRAMES = 8        # data frames without a Placed until the connection grants as always
    UNUSED_MOST = 4
    PAUSE_LEAST = 8             # reads
    PAUSE_MOST = 1024


cdef class Namer:
    """Who names memory: a sink."""

    cdef int landed(self) except -1:
        """The peer cannot write any more to memory that this has named."""
        return 0


@cython.final
@cython.no_gc_clear
cdef class Landing:
    """Memory that a read has named."""

    cdef OurWant want
    cdef object export              # a memoryview of what the program named: it keeps the memory, and its owner off it
    cdef MR mr
    cdef Namer namer                # is told when it is over
    cdef MW window                  # that gives the peer its key; None before that, and when it is good no more
    cdef bint bound                 # BIND_MW has completed
    cdef bint invalidating          # LOCAL_INV is posted
    cdef bint taken_back            # the read is given up, so what is placed has to be copied out
    cdef bint over                  # nobody can write there any more

    def failure(self, status, vendor_err, qp_num):
        """The exception for a failed BIND_MW or LOCAL_INV, as of memory.Posted."""
        if self.invalidating and status != verbs.IBV_WC_WR_FLUSH_ERR:
            return ProtocolError("the peer has invalidated the key of memory that it was to place bytes into")
        return completion_error(status, "LOCAL_INV" if self.invalidating else "BIND_MW", vendor_err, qp_num)


@cython.final
@cython.no_gc_clear
cdef class Landings:
    """All of a connection that are not over, and whether new ones pay. Made when a read first asks (receiver.pxi)."""

    cdef OurWants wants
    cdef list open
    cdef list windows               # that are bound to nothing
    cdef bint impossible            # no windows of this kind, or no more of them
    cdef uint32_t expectant         # data frames until the connection grants as always; 0: it does
    cdef uint32_t withheld          # slots that are posted and not granted
    cdef uint32_t unused            # in a row: attempts in which nothing was placed
    cdef uint32_t pause             # reads until the next attempt
    cdef uint32_t next_pause
    cdef uint64_t bytes_placed

    def __cinit__(self, uint64_t position):
        self.wants = OurWants(position)
        self.open = []
        self.windows = []
        self.next_pause = PAUSE_LEAST

    # -- naming ---------------------------------------------------------------------------------------

    cdef bint expect(self, Sender connection) noexcept:
        """A read wants bytes in memory where they may be placed. Whether the connection is to grant little."""
        if self.impossible:
            return False
        if self.pause:
            self.pause -= 1
            return False
        if self.expectant == 0:
            self.expectant = EXPECTANT_FRAMES + connection.ledger.outstanding()     # which come in any case
        return True

    cdef Landing name(self, Sender connection, Namer namer, AllocatedMemory memory, object exporter, char *at,
                      size_t length, bint fixed):
        """Ask for bytes to be placed there, in memory that `exporter` exports; None if that is not possible now."""
        cdef Landing landing
        cdef MR mr
        if self.impossible or self.expectant == 0 or not self.wants.may_name(fixed):
            return None
        if not connection.engine.confines_peers():
            self.impossible = True
            return None
        mr = memory.region_in(connection.engine.pd)
        if mr is None:
            return None
        landing = Landing.__new__(Landing)
        landing.export, landing.mr, landing.namer = PyMemoryView_FromObject(exporter), mr, namer
        landing.want = self.wants.name(<uintptr_t>at, min(length, <size_t>WANT_BYTES_MAX), fixed)
        self.open.append(landing)
        if tracing != NULL:
            trace_of(connection, TRACE_WANTED, length, 0)
        credit_is_due(connection)
        return landing

    cdef tuple say(self, Sender connection):
        """The Wants for a Credit that goes now, their keys bound by requests that are posted ahead of it."""
        cdef list said = []
        cdef OurWant want
        cdef Landing landing
        while connection.operations < OPERATIONS and (want := self.wants.next_to_say()) is not None:
            landing = self.of(want)
            try:
                landing.window = self.windows.pop() if self.windows else MW(connection.engine.pd, core.MWType.TYPE_2)
            except OSError as exc:
                logger.warning("large reads are copied: %s", exc)
                self.impossible = True
                self.wants.drop(want)
                self.let_go(landing)
                continue
            key = inc_rkey(landing.window.ptr.rkey)
            post_bind_part(
                connection, landing, landing.window, landing.mr, key, want.address, want.length,
                verbs.IBV_ACCESS_REMOTE_WRITE)
            said.append(self.wants.say(want, key))
        return tuple(said)

    cdef bint has_news(self, Sender connection):
        """Whether a Credit has something to say that it may say now."""
        return self.wants.unwant_due or (
            connection.operations < OPERATIONS and self.wants.next_to_say() is not None
        )

    cdef Landing of(self, OurWant want):
        cdef Landing landing
        for landing in self.open:
            if landing.want is want:
                return landing
        return None

    # -- what comes -----------------------------------------------------------------------------------

    cdef inline int came(self, Sender connection, uint32_t length) except -1:
        """A data frame has come."""
        self.wants.received(length)
        if self.open:
            self.sweep(connection)
        if self.expectant:
            self.expectant -= 1
            if self.expectant == 0:
                self.not_used(connection)
        return 0

    cdef Landing placed(self, Sender connection, uint32_t serial, uint64_t upto):
        """A Placed has come: `wants.target` and `wants.placed` say where bytes are. They may have to be copied out."""
        cdef Landing landing
        cdef OurWant want = self.wants.place(serial, upto)
        landing = self.of(want)
        self.bytes_placed += self.wants.placed
        self.expectant = EXPECTANT_FRAMES + connection.ledger.outstanding()
        self.unused = 0
        self.next_pause = PAUSE_LEAST
        return landing

    cdef int not_used(self, Sender connection) except -1:
        """The peer sends into slots: grant as always, for so long."""
        self.unused += 1
        if self.unused >= UNUSED_MOST:
            self.unused = 0
            self.pause = self.next_pause
            self.next_pause = min(2 * self.next_pause, <uint32_t>PAUSE_MOST)
        if self.withheld:
            connection.ledger.slots_freed(self.withheld)
            self.withheld = 0
            connection.engine.flush_later(connection)
        return 0

    cdef int grant_instead(self, Sender connection) except -1:
        """A slot is lent to the program: grant another one for it, if there is one that was not."""
        if self.withheld:
            self.withheld -= 1
            connection.ledger.slots_freed(1)
            connection.engine.flush_later(connection)
            connection.engine.wake_if_running()
        return 0

    cdef uint32_t to_grant(self, Sender connection, uint32_t freed):
        """How many slots to grant after so many more have been posted."""
        cdef Ledger ledger = connection.ledger
        cdef uint32_t ahead = (ledger.grantable - ledger.received) & <uint32_t>0xFFFFFFFF
        cdef uint32_t there = freed + self.withheld
        cdef uint32_t granted = there
        if self.expectant:
            granted = min(there, <uint32_t>EAGER_SLOTS - ahead if ahead < EAGER_SLOTS else 0)
        self.withheld = there - granted
        return granted

    # -- letting go -----------------------------------------------------------------------------------

    cdef int take_back(self, Sender connection) except -1:
        """Nobody wants the memory any more, and what has been placed is copied out: take the Wants back."""
        cdef Landing landing
        if not self.open:
            return 0
        for landing in self.open:
            landing.taken_back = True
        self.wants.unwant()
        self.sweep(connection)
        if self.wants.unwant_due:
            credit_is_due(connection)
        return 0

    cdef int sweep(self, Sender connection) except -1:
        """Make the keys of Wants that are over invalid."""
        cdef Landing landing
        cdef bint room = not connection.broken and connection.qp_c != NULL
        for landing in self.open.copy():
            if landing.want.state != WANT_OVER or landing.invalidating:
                continue
            if landing.window is None:
                self.let_go(landing)
            elif room and connection.operations < OPERATIONS:
                landing.invalidating = True
                post_invalidation(connection, landing, landing.window.ptr.rkey)
        return 0

    cdef int done(self, Sender connection, Landing landing) except -1:
        """Its BIND_MW or its LOCAL_INV has completed."""
        if not landing.bound:
            landing.bound = True
            return 0
        if landing.window is not None:
            self.windows.append(landing.window)
            landing.window = None
        return self.let_go(landing)

    cdef int let_go(self, Landing landing) except -1:
        landing.over = True
        if landing in self.open:
            self.open.remove(landing)
        landing.export = None
        namer, landing.namer = landing.namer, None
        if namer is not None:
            (<Namer>namer).landed()
        return 0

    cdef int end_keys(self, Sender connection) except -1:
        """Before the queue pair is destroyed: give the windows back. (rxe waits fifty seconds for bound ones.)"""
        cdef Landing landing
        cdef MW window
        cdef list windows = self.windows
        self.impossible = True
        self.windows = []
        for landing in self.open:
            if landing.window is not None:
                windows.append(landing.window)
                landing.window = None
                if connection.qp is not None and not connection.qp.closed:
                    try:
                        connection.qp.to_error()
                    except OSError:
                        pass    # a device that is gone executes nothing either
        for window in windows:
            try:
                window.close()
            except OSError as exc:
                logger.error("%r cannot be freed, and leaks: %s", window, exc)
        return 0

    cdef int lose(self) except -1:
        """The queue pair is destroyed: nobody writes anywhere any more."""
        cdef Landing landing
        self.impossible = True
        self.wants.end()
        for landing in self.open.copy():
            self.let_go(landing)
        return 0
