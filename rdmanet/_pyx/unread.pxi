# What a StreamReader has not read yet: a sink that leaves bytes where they are until somebody asks for them.
#
# Unread bytes are in two places: `aside`, a bytearray, has the older ones, the connection's inbox the others. Bytes are
# put aside only where they cannot stay in the slots:
#
#   * The inbox is half full and the program does not read. asyncio's reader then takes in 2 * limit bytes, so a peer
#     that writes that much before it reads must not wait here either. Full slots of 64 KiB are more than that already.
#   * A separator has not been found in all that there is. The search goes on only if slots come free.
#   * The connection ends: what is unread outlives it.
#   * A read was cancelled after it had taken bytes.
#
# One read may wait (`reading`); whatever comes has it `proceed`. So that other tasks run although reads return at once,
# every FAIR_READS reads look at the clock (`fair`), and one that finds FAIR_NS passed goes by way of the loop.

cdef extern from "Python.h":
    char *PyByteArray_AS_STRING(object)
    Py_ssize_t PyByteArray_GET_SIZE(object)
    int PyByteArray_Resize(object, Py_ssize_t) except -1

cdef enum:
    FAIR_READS = 32
    FAIR_NS = 100000


@cython.no_gc_clear
cdef class WaitingRead(Immediate):
    """A read that has not all it wants; see ReadRequest."""

    cdef object future

    cdef int proceed(self) except -1:
        """Something has come, or is over."""
        raise NotImplementedError

    cdef int begin_anew(self) except -1:
        """What it has, it has not read: other bytes are to come first."""
        raise NotImplementedError


@cython.final
cdef class IntoReader(Sink):
    """Where an RdmaStreamReader's bytes go, and what is unread."""

    cdef Receiver connection          # None before there is one and after it has ended
    cdef object aside                   # bytearray
    cdef WaitingRead reading            # who waits, or None
    cdef object waiter                  # what somebody has set StreamReader._waiter to
    cdef object exception               # reads raise it at once
    cdef object lost                    # why the connection is lost: they raise it where they would wait
    cdef object create_future
    cdef object transport
    cdef Py_ssize_t limit
    cdef bint eof, paused
    cdef bint got_much                  # the last read into memory did
    cdef uint32_t in_row                # reads that did not wait
    cdef uint64_t since_ns              # when the first of them began

    def __cinit__(self, loop, Py_ssize_t limit):
        self.callback = "data_received"
        self.aside = bytearray()
        self.create_future = loop.create_future
        self.limit = limit

    # -- what there is -------------------------------------------------------------------------------

    cdef inline bint has_slots(self) noexcept:
        """Whether there are bytes in slots that may be taken."""
        cdef Receiver connection = self.connection
        return (
            connection is not None and connection.attached and connection.inbox.count and not connection.reading_paused
            and connection.opened and connection.engine.pid == verbs.rn_pid
        )

    cdef size_t available(self, size_t enough) noexcept:
        """How many bytes are unread; stops counting at `enough`."""
        cdef size_t n = <size_t>PyByteArray_GET_SIZE(self.aside)
        cdef Inbox inbox
        cdef uint32_t i
        if n < enough and self.has_slots():
            inbox = self.connection.inbox
            n -= inbox.offset
            for i in range(inbox.count):
                n += inbox.at(i).length
                if n >= enough:
                    break
        return n

    cdef int take_into(self, char *to, size_t n) except -1:
        """Move the first `n` bytes, which are there, to `to`. If that memory is gone, none is moved."""
        cdef Receiver connection = self.connection
        cdef Inbox inbox
        cdef ready_slot *entry
        cdef size_t older = min(n, <size_t>PyByteArray_GET_SIZE(self.aside)), part, left
        cdef uint32_t i = 0, offset
        if not copy_carefully(to, PyByteArray_AS_STRING(self.aside), older):
            raise memory_is_gone("read")
        to += older
        n -= older
        if n:
            inbox = connection.inbox
            left, offset = n, inbox.offset
            while left:
                entry = inbox.at(i)
                part = min(left, <size_t>(entry.length - offset))
                if to != entry.data + offset and not copy_carefully(to, entry.data + offset, part):
                    raise memory_is_gone("read")    # else the peer has placed it there, or it is copied
                to += part
                left -= part
                i += 1
                offset = 0
            while n:
                entry = inbox.at(0)
                part = min(n, <size_t>(entry.length - inbox.offset))
                n -= part
                inbox.take(<uint32_t>part)
            slots_consumed(connection)
        # All is taken before any other code may run: a slice may have the collector run, and that may end a connection.
        if older:
            del self.aside[:older]
        return 0

    cdef int put_aside(self, uint32_t slots) except -1:
        """Move the first slots' bytes out of them."""
        cdef Receiver connection = self.connection
        cdef Inbox inbox = connection.inbox
        cdef Py_ssize_t size = PyByteArray_GET_SIZE(self.aside), more = 0
        cdef ready_slot *entry
        cdef uint32_t i
        cdef char *to
        if slots == 0:
            return 0
        for i in range(slots):
            more += inbox.at(i).length
        more -= inbox.offset
        PyByteArray_Resize(self.aside, size + more)
        to = PyByteArray_AS_STRING(self.aside) + size
        for i in range(slots):
            entry = inbox.at(0)
            memcpy(to, entry.data + inbox.offset, entry.length - inbox.offset)
            to += entry.length - inbox.offset
            inbox.first_consumed()
        return slots_consumed(connection)

    def take_unread(self):
        """What has come and nobody has read, as `bytes`. It is no longer to be read here."""
        if self.reading is not None and not self.reading.future.done():
            self.reading.begin_anew()
        self.put_all_aside()
        unread = bytes(self.aside)
        self.aside.clear()
        self.paused = False
        return unread

    cdef Leased lend(self, size_t n):
        """The first bytes, at least `n`, which are there."""
        cdef Receiver connection = self.connection
        cdef Leased leased = Leased.__new__(Leased)
        cdef ready_slot *entry
        if n and PyByteArray_GET_SIZE(self.aside) == 0:     # so they are in slots
            entry = connection.inbox.at(0)
            if entry.length - connection.inbox.offset >= n and entry.copy == NULL and connection.shared is None:
                leased.take_slot(connection)
                if connection.landings is not None:
                    connection.landings.grant_instead(connection)
                return leased
        while <size_t>PyByteArray_GET_SIZE(self.aside) < n:
            self.put_aside(1)
        leased.take_bytes(self.aside)
        self.aside = bytearray()
        self.maybe_resume()
        return leased

    cdef int put_all_aside(self) except -1:
        if self.has_slots():
            self.put_aside(self.connection.inbox.count)
        return 0

    # -- what comes ----------------------------------------------------------------------------------

    cdef bint take(self, Receiver connection) except -1:
        cdef uint32_t before = connection.inbox.count, offset = connection.inbox.offset
        if self.reading is not None:
            self.reading.proceed()
        elif self.waiter is not None:
            self.tell()
        if connection.tell_drained:
            self.put_all_aside()
        else:
            self.make_room()
        return connection.inbox.count != before or connection.inbox.offset != offset

    cdef int make_room(self) except -1:
        """Put aside what keeps the peer from sending though it is less than asyncio's reader would hold."""
        cdef Receiver connection = self.connection
        cdef Inbox inbox
        if not self.has_slots():
            return 0
        inbox = connection.inbox
        if inbox.count < many_slots(connection):
            return 0
        if self.reading is not None or self.available(2 * self.limit + 1) <= 2 * <size_t>self.limit:
            self.put_aside(inbox.count)
        return 0

    cdef int ends(self, Receiver connection) except -1:
        if self.connection is connection:
            self.put_all_aside()
        return 0

    cdef int joins(self, Receiver connection) except -1:
        """Its bytes come here from now on."""
        self.connection = connection
        return 0

    cdef int leaves(self, Receiver connection) except -1:
        if self.connection is connection:
            self.connection = None
        return 0

    cdef int landed(self) except -1:
        return self.tell()

    cdef inline object error(self):
        return self.lost if self.exception is None else self.exception

    def loses(self, exc):
        """The connection is lost. What has come before is read first."""
        self.lost = exc
        self.tell()

    cdef int tell(self) except -1:
        """Something has changed for who waits."""
        if self.reading is not None:
            self.reading.proceed()
        elif self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            if not waiter.cancelled():
                if self.error() is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(self.error())
        return 0

    cdef bint fair(self) noexcept:
        """Whether a read may return at once once more."""
        cdef uint64_t now
        if self.in_row % FAIR_READS == 0:
            now = now_ns()
            if self.in_row and now - self.since_ns > FAIR_NS:
                self.in_row = 0
                return False
            if self.in_row == 0:
                self.since_ns = now
        self.in_row += 1
        return True

    cdef int maybe_resume(self) except -1:
        if self.paused and PyByteArray_GET_SIZE(self.aside) <= self.limit:
            self.paused = False
            self.transport.resume_reading()
        return 0
