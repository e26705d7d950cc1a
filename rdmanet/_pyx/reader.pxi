# asyncio's StreamReader, compiled, as a sink.
#
# asyncio's own keeps what has come in a bytearray and gives out new `bytes` from it: two copies, and Python code for
# each piece that arrives. Here received bytes stay in the connection's slots until somebody asks for them, and go from
# there to where they are wanted: into the `bytes` that a read returns, or into the program's own memory.
#
#   IntoReader          the sink: what has come and is unread, and who waits for it
#   ReadRequest         one read: an awaitable that mostly has its result at once
#   CompiledReader      the methods, for a subclass of asyncio.StreamReader (rdmanet/streams/reader_writer.py)
#   DrainRequest, CompiledWriter    the same for StreamWriter.drain()
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
# A read into memory of rdmanet.alloc() that has to wait for much has the peer place it there (landing.pxi). It ends,
# also when it is cancelled, only when the peer cannot write there any more.
#
# A read takes nothing before it is awaited. One that finds what it needs returns without a trip through the loop; so
# that other tasks run, every FAIR_READS reads look at the clock, and one that finds FAIR_NS passed goes by way of the
# loop.

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1
    PyObject *PyBytes_FromStringAndSize_raw "PyBytes_FromStringAndSize"(const char *, Py_ssize_t)
    char *PyBytes_AS_STRING_raw "PyBytes_AS_STRING"(PyObject *)
    Py_ssize_t PyBytes_GET_SIZE_raw "PyBytes_GET_SIZE"(PyObject *)

    ctypedef struct PyAsyncMethods:
        int (*am_send)(PyObject *, PyObject *, PyObject **) except -1
    ctypedef struct PyTypeObject:
        PyObject *(*tp_iternext)(PyObject *) except? NULL
        PyAsyncMethods *tp_as_async
        unsigned long tp_flags
    void PyType_Modified(type)
    int PyIter_Send(object, PyObject *, PyObject **)
    void PyErr_SetObject(PyObject *, PyObject *) noexcept
    void Py_XDECREF(PyObject *)
    char *PyByteArray_AS_STRING(object)
    Py_ssize_t PyByteArray_GET_SIZE(object)
    int PyByteArray_Resize(object, Py_ssize_t) except -1

cdef extern from *:
    """
    #ifdef _Py_TPFLAGS_HAVE_AM_SEND     /* CPython says by a flag that there is an am_send */
    #define HAS_AM_SEND _Py_TPFLAGS_HAVE_AM_SEND
    #else
    #define HAS_AM_SEND 0
    #endif
    """
    unsigned long HAS_AM_SEND

cdef extern from "string.h" nogil:
    void *memchr(const void *, int, size_t)
    int memcmp(const void *, const void *, size_t)

cdef enum read_kind:
    READ_SOME
    READ_ALL
    READ_EXACTLY
    READ_UNTIL
    READ_LINE
    READ_INTO
    READ_INTO_EXACTLY
    READ_LEASE

cdef enum:
    FAIR_READS = 32
    FAIR_NS = 100000
    FIRST_BYTES = 64 << 20      # a read of more begins with this much memory: the number may be a peer's

cdef size_t expected_of_malloc = 128 << 10


cdef inline void expect_large(size_t size) noexcept:
    """Have malloc keep the memory of objects of this size when they are freed.

    By default glibc maps each large object anew, and the page faults cost more than copying the bytes. Once it has seen
    a mapped object freed, it keeps the memory of later ones up to that size (mallopt(3), M_MMAP_THRESHOLD). So allocate
    and free one, without touching it. It is eight times as large, so that the memory of several objects is kept.
    """
    global expected_of_malloc
    if size > expected_of_malloc:
        expected_of_malloc = 8 * min(size, <size_t>(4 << 20)) - PAGE
        PyMem_RawFree(PyMem_RawMalloc(expected_of_malloc))  # a compiler leaves malloc() and free() side by side out
        if size >= 4 << 20:
            expected_of_malloc = <size_t>-1     # it learns of no larger ones


cdef inline void *check_memory(void *memory) except NULL:
    if memory == NULL:
        raise MemoryError
    return memory


cdef object TURN = object()     # what begin() answers: go by way of the loop, and begin again
cdef object WAIT = object()     # await `inner`


@cython.final
cdef class IntoReader(Sink):
    """Where an RdmaStreamReader's bytes go, and what is unread."""

    cdef Connection connection          # None before there is one and after it has ended
    cdef object aside                   # bytearray
    cdef ReadRequest reading            # who waits, or None
    cdef object waiter                  # what somebody has set StreamReader._waiter to
    cdef object exception
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
        cdef Connection connection = self.connection
        return (
            connection is not None and connection.attached and connection.inbox.count and connection.may_deliver
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
        cdef Connection connection = self.connection
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
                inbox.offset += <uint32_t>part
                if inbox.offset == entry.length:
                    inbox.first_consumed()
            slots_consumed(connection)
        # All is taken before any other code may run: a slice may have the collector run, and that may end a connection.
        if older:
            del self.aside[:older]
        return 0

    cdef int put_aside(self, uint32_t slots) except -1:
        """Move the first slots' bytes out of them."""
        cdef Connection connection = self.connection
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
        self.put_all_aside()
        unread = bytes(self.aside)
        self.aside.clear()
        self.paused = False
        return unread

    cdef Leased lend(self, size_t n):
        """The first bytes, at least `n`, which are there."""
        cdef Connection connection = self.connection
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
        leased.keeper, self.aside = self.aside, bytearray()
        leased.data, leased.length = PyByteArray_AS_STRING(leased.keeper), PyByteArray_GET_SIZE(leased.keeper)
        self.maybe_resume()
        return leased

    cdef int put_all_aside(self) except -1:
        if self.has_slots():
            self.put_aside(self.connection.inbox.count)
        return 0

    cdef Py_ssize_t find(self, bytes separator, size_t start) except -2:
        """The position of the first separator at or after `start`; -1 if there is none."""
        cdef const char *sep = PyBytes_AS_STRING(separator)
        cdef size_t length = <size_t>PyBytes_GET_SIZE(separator), base = 0, size
        cdef size_t last = start + length - 1       # where its last byte may be, at the earliest
        cdef Connection connection = self.connection
        cdef Inbox inbox
        cdef ready_slot *entry
        cdef Py_ssize_t at
        cdef uint32_t i
        size = <size_t>PyByteArray_GET_SIZE(self.aside)
        at = self.find_in(PyByteArray_AS_STRING(self.aside), 0, size, sep, length, last)
        if at != -1 or not self.has_slots():
            return at
        base = size
        inbox = connection.inbox
        for i in range(inbox.count):
            entry = inbox.at(i)
            size = entry.length - (inbox.offset if i == 0 else 0)
            at = self.find_in(
                entry.data + (inbox.offset if i == 0 else 0), base, size, sep, length, last)
            if at != -1:
                return at
            base += size
        return -1

    cdef Py_ssize_t find_in(self, const char *piece, size_t base, size_t size, const char *sep, size_t length,
                            size_t last) except -2:
        """The same for separators whose last byte is in this piece, which begins at position `base`."""
        cdef const char *found
        cdef size_t i = last - base if last > base else 0
        cdef size_t at
        while i < size:
            found = <const char *>memchr(piece + i, sep[length - 1], size - i)
            if found == NULL:
                return -1
            i = found - piece
            at = base + i + 1 - length
            if length == 1 or (memcmp(piece + i + 1 - length, sep, length) == 0 if i + 1 >= length
                               else self.has_at(at, sep, length)):
                return <Py_ssize_t>at
            i += 1
        return -1

    cdef bint has_at(self, size_t at, const char *sep, size_t length) except -1:
        """Whether `sep` is at position `at`; it may span pieces."""
        cdef size_t size = <size_t>PyByteArray_GET_SIZE(self.aside), i
        cdef Inbox inbox
        cdef uint32_t slot = 0
        cdef size_t offset
        for i in range(length):
            if at + i < size:
                if PyByteArray_AS_STRING(self.aside)[at + i] != sep[i]:
                    return False
                continue
            inbox = self.connection.inbox
            offset = at + i - size + inbox.offset
            slot = 0
            while offset >= inbox.at(slot).length:
                offset -= inbox.at(slot).length
                slot += 1
            if inbox.at(slot).data[offset] != sep[i]:
                return False
        return True

    # -- what comes ----------------------------------------------------------------------------------

    cdef bint take(self, Connection connection) except -1:
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
        cdef Connection connection = self.connection
        cdef Inbox inbox
        if not self.has_slots():
            return 0
        inbox = connection.inbox
        if inbox.count < many_slots(connection):
            return 0
        if self.reading is not None or self.available(2 * self.limit + 1) <= 2 * <size_t>self.limit:
            self.put_aside(inbox.count)
        return 0

    cdef int ends(self, Connection connection) except -1:
        if self.connection is connection:
            self.put_all_aside()
        return 0

    cdef int leaves(self, Connection connection) except -1:
        if self.connection is connection:
            self.connection = None
        return 0

    cdef int landed(self) except -1:
        return self.tell()

    cdef int tell(self) except -1:
        """Something has changed for who waits."""
        if self.reading is not None:
            self.reading.proceed()
        elif self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            if not waiter.cancelled():
                if self.exception is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(self.exception)
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


@cython.no_gc_clear
cdef class Immediate:
    """An awaitable that mostly has its result at once, and else awaits another one. It is used once.

    It has a coroutine's methods, so tasks, wait_for() and gather() take it as one. The interpreter asks it by way of
    its type's slots, which are set below: neither a frame nor an exception is made for a result that is there.
    """

    cdef object inner           # the iterator of what it awaits
    cdef object error           # what `inner` raises: tasks throw that in again
    cdef bint begun, ended

    cdef object begin(self):
        """The result, or TURN, or WAIT with `inner` set."""
        raise NotImplementedError

    cdef int give_up(self) except -1:
        """It waited, and whoever awaited is gone."""
        return 0

    cdef int over(self) except -1:
        """It waited, and whoever awaited has the result, or the error."""
        return 0

    cdef int step(self, PyObject *value, PyObject **outcome) except -1:
        """1: `outcome` is for the loop. 0: it is the result."""
        cdef int state
        outcome[0] = NULL
        if self.ended:
            raise RuntimeError(f"cannot reuse already awaited {type(self).__name__}")
        if self.inner is None:
            self.begun = self.ended = True     # should it raise
            result = self.begin()
            if result is TURN:
                self.ended = False
                Py_INCREF(None)
                outcome[0] = <PyObject *>None
                return 1
            if result is not WAIT:
                Py_INCREF(result)
                outcome[0] = <PyObject *>result
                return 0
            self.ended = False
        state = PyIter_Send(self.inner, value, outcome)
        if state != 1:
            self.ended = True
            self.inner = None
        if state == 0:
            try:
                self.over()
            except BaseException:
                Py_DECREF(<object>outcome[0])
                outcome[0] = NULL
                raise
        return state    # -1: it has raised

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        cdef PyObject *outcome
        cdef int state = self.step(<PyObject *>value, &outcome)
        result = <object>outcome
        Py_DECREF(result)
        if state == 0:
            raise StopIteration(result)
        return result

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's."""
        cdef bint over = True
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        self.begun = True
        inner = self.inner
        try:
            if inner is None:
                raise error
            outcome = inner.throw(error)    # a future's raises it
            over = False
            return outcome
        finally:
            if over:
                self.ended = True
                if inner is not None:
                    self.inner = None
                    if error is self.error:
                        self.over()
                    else:
                        self.give_up()

    def close(self):
        """As a coroutine's."""
        inner, self.inner = self.inner, None
        self.begun = self.ended = True
        if inner is not None:
            self.give_up()
            inner.close()

    def __dealloc__(self):
        if not self.begun:
            warn_never_awaited(type(self).__name__)


cdef int warn_never_awaited(str name) noexcept:
    try:
        warnings.warn(f"{name} was never awaited", RuntimeWarning, stacklevel=1)
    except Warning as exc:      # they are errors, and nobody is there to catch one
        logger.error("%s", exc)
    return 0


cdef int immediate_send(PyObject *self, PyObject *value, PyObject **outcome) except -1:
    return (<Immediate>self).step(value, outcome)


cdef PyObject *immediate_next(PyObject *self) except? NULL:
    cdef PyObject *outcome
    if (<Immediate>self).step(<PyObject *>None, &outcome) == 1:
        return outcome
    if outcome != <PyObject *>None:     # without an exception it means StopIteration(None)
        PyErr_SetObject(<PyObject *>(<object>StopIteration), outcome)
    Py_DECREF(<object>outcome)
    return NULL


cdef int answer_at_once(type kind) except -1:
    """Give a kind of Immediate these for its slots."""
    cdef PyTypeObject *c = <PyTypeObject *>kind
    c.tp_iternext = immediate_next
    c.tp_as_async.am_send = immediate_send
    c.tp_flags |= HAS_AM_SEND
    PyType_Modified(kind)
    return 0


@cython.final
@cython.no_gc_clear
cdef class PlacedRead:
    """What a read has whose bytes the peer may place. Most reads do without, and are made for each message."""

    cdef AllocatedMemory memory     # that of the read's `view`
    cdef Landing landing            # what of it the peer was asked to write to
    cdef object stopped             # an error that ends the read when the peer lets go of the memory

    cdef bint lands(self) noexcept:
        """Whether the peer may still write to the memory."""
        return self.landing is not None and not self.landing.over


@cython.final
@cython.no_gc_clear
cdef class ReadRequest(Immediate):
    """One read."""

    cdef IntoReader sink
    cdef read_kind kind
    cdef Py_ssize_t size        # asked for
    cdef Py_ssize_t have        # of these, in `bytes` or `view`
    cdef Py_ssize_t scanned     # where a separator may begin that has not been looked for
    cdef PyObject *bytes        # an object of ours alone
    cdef Py_buffer view
    cdef bint has_view
    cdef object separators      # a tuple of bytes, by length
    cdef list chunks            # of all that comes until the end
    cdef PlacedRead placed      # None: no bytes can be placed
    cdef object future
    cdef object result          # while `future` has it and nobody was given it

    def __cinit__(self, IntoReader sink, read_kind kind, Py_ssize_t size):
        self.sink = sink
        self.kind = kind
        self.size = size

    def __dealloc__(self):
        Py_XDECREF(self.bytes)
        if self.has_view:
            PyBuffer_Release(&self.view)

    cdef object begin(self):
        cdef IntoReader sink = self.sink
        if sink.exception is not None:
            raise sink.exception
        if not sink.fair():
            return TURN
        if sink.reading is not None:
            if sink.reading.future.done():
                return TURN     # its task has yet to take the result, or to hear that it was cancelled
            raise RuntimeError(f"{self.name()}() called while another coroutine is already waiting for incoming data")
        try:
            if self.has_view and self.size >= PLACE_BYTES:
                self.look_for_memory()
            result = self.attempt()
        except BaseException:
            self.leave()
            raise
        if result is not WAIT:
            if self.has_view:
                self.leave()
            return result
        if self.placed is not None:
            self.name_rest(self.have == 0)
        if sink.paused:     # or this would wait for ever
            sink.paused = False
            sink.transport.resume_reading()
        self.future = sink.create_future()
        self.inner = self.future.__await__()
        sink.reading = self
        sink.in_row = 0
        return WAIT

    cdef str name(self):
        return ("read", "read", "readexactly", "readuntil", "readuntil", "readinto", "readinto_exactly",
                "lease")[self.kind]

    cdef int proceed(self) except -1:
        """Something has come, or is over: go on, and tell who waits when it is enough.

        Who waits may still be cancelled before the loop comes to it. So this remains the reader's one read until then,
        and what it has can be put back before anything else is read.
        """
        cdef IntoReader sink = self.sink
        future = self.future
        if future.done():
            return 0        # it has ended, or was cancelled, and its task is about to hear of it
        if self.placed is not None and (self.placed.stopped is not None or sink.exception is not None):
            self.take_back()
            if self.placed.lands():
                return 0
            if self.placed.stopped is not None:
                return tell_future(future, None, None)
        try:
            if sink.exception is not None:
                raise sink.exception
            result = self.attempt()
            if result is WAIT:
                if self.placed is not None:
                    self.name_rest(False)
                return 0
        except Exception as exc:
            self.error = exc
            partial = getattr(exc, "partial", None)
            if partial is None:
                self.put_back()     # it is not in the error
            elif not self.has_view:
                self.result = partial
            tell_future(future, None, exc)
            return 0
        self.result = result
        tell_future(future, result, None)
        return 0

    cdef int give_up(self) except -1:
        self.take_back()
        self.put_back()
        return self.leave()

    cdef int over(self) except -1:
        stopped = self.placed.stopped if self.placed is not None else None
        if stopped is not None:
            self.put_back()
        self.leave()
        if stopped is not None:
            raise stopped
        return 0

    # -- bytes that the peer places ------------------------------------------------------------------

    cdef int look_for_memory(self) except -1:
        """Is it memory where the peer may place bytes, and is that expected to pay?"""
        cdef Connection connection = self.sink.connection
        cdef AllocatedMemory memory
        if (
            connection is None or connection.landings is None or <size_t>self.size < connection.engine.place_bytes
            or connection.engine.by_hand or connection.engine.pid != verbs.rn_pid
        ):
            return 0
        memory = memory_at(<char *>self.view.buf, <size_t>self.size)
        if memory is not None and connection.landings.expect(connection):
            self.placed = PlacedRead.__new__(PlacedRead)
            self.placed.memory = memory
        return 0

    cdef int name_rest(self, bint has_nothing) except -1:
        """Let the peer know where the rest of this read is wanted, if it may then place much."""
        cdef IntoReader sink = self.sink
        cdef Connection connection = sink.connection
        cdef size_t rest = <size_t>(self.size - self.have), granted, least
        if connection is None or not connection.attached or self.placed.landing is not None:
            return 0
        least = connection.engine.place_bytes
        if rest < least:
            return 0
        if connection.inbox.count or PyByteArray_GET_SIZE(sink.aside):
            return 0
        if self.kind == READ_INTO_EXACTLY:
            granted = <size_t>connection.ledger.outstanding() * connection.slot_bytes
            if not has_nothing and rest < granted + least:
                return 0
        elif not sink.got_much:
            return 0
        self.placed.landing = connection.landings.name(
            connection, sink, self.placed.memory, <object>self.view.obj, <char *>self.view.buf + self.have, rest,
            self.kind == READ_INTO_EXACTLY)
        return 0

    cdef bint has_landing(self) noexcept:
        return self.placed is not None and self.placed.lands()

    cdef int take_back(self) except -1:
        """The read is to end without the bytes that may yet be placed."""
        cdef Connection connection = self.sink.connection
        if self.has_landing() and not self.placed.landing.taken_back and connection is not None:
            take_memory_back(connection)
        return 0

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's that awaits something in its `finally`: that the peer lets go of the memory."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        if self.inner is None or not self.has_landing():
            return Immediate.throw(self, error)
        if self.placed.stopped is None:
            self.placed.stopped = error
            self.take_back()
            if not self.has_landing():
                self.placed.stopped = None
                return Immediate.throw(self, error)
        self.future = self.sink.create_future()
        self.inner = self.future.__await__()
        return next(self.inner)

    cdef int leave(self) except -1:
        if self.sink.reading is self:
            self.sink.reading = None
        self.future = self.result = self.error = None
        if self.placed is not None:
            self.placed = None
            if self.sink.connection is not None:
                self.sink.connection.inbox.copy_out()   # what was placed for this read, and it did not get
        if self.has_view:
            self.has_view = False
            PyBuffer_Release(&self.view)
        return 0

    cdef int put_back(self) except -1:
        """What was taken and nobody got is unread again."""
        cdef Py_ssize_t have = self.have
        if type(self.result) is Leased:
            self.sink.aside[:0] = self.result
            (<Leased>self.result).end()
        elif self.result is not None and not self.has_view:
            self.sink.aside[:0] = self.result
        elif self.chunks is not None:
            self.sink.aside[:0] = b"".join(self.chunks)
            self.chunks = None
        elif have:
            self.sink.aside[:0] = (<char *>self.view.buf if self.has_view else PyBytes_AS_STRING_raw(self.bytes))[:have]
        self.result = None
        self.have = 0
        return 0

    # -- the kinds of reads: the result, or WAIT -----------------------------------------------------

    cdef object attempt(self):
        if self.kind == READ_SOME:
            return self.some()
        if self.kind == READ_EXACTLY:
            return self.exactly()
        if self.kind == READ_UNTIL or self.kind == READ_LINE:
            return self.until()
        if self.kind == READ_ALL:
            return self.everything()
        if self.kind == READ_LEASE:
            return self.lease()
        return self.into()

    cdef object fresh(self, size_t size):
        """The first `size` bytes, which are there."""
        expect_large(size)
        chunk = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        self.sink.take_into(PyBytes_AS_STRING(chunk), size)
        self.sink.maybe_resume()
        return chunk

    cdef object some(self):
        cdef size_t there = self.sink.available(<size_t>self.size)
        if there == 0 and not self.sink.eof:
            return WAIT
        return self.fresh(min(there, <size_t>self.size))

    cdef object everything(self):
        cdef size_t there
        if self.chunks is None:
            self.chunks = []
        while (there := self.sink.available(GATHER_BYTES)) != 0:
            self.chunks.append(self.fresh(min(there, <size_t>GATHER_BYTES)))
        if not self.sink.eof:
            return WAIT
        chunks, self.chunks = self.chunks, None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    cdef object exactly(self):
        cdef IntoReader sink = self.sink
        cdef size_t there = sink.available(<size_t>(self.size - self.have))
        cdef Py_ssize_t room
        if self.bytes == NULL:
            if there == <size_t>self.size:
                return self.fresh(there)
            if there > <size_t>self.size:
                return self.fresh(self.size)
            expect_large(<size_t>self.size)
            self.bytes = PyBytes_FromStringAndSize_raw(NULL, min(self.size, <Py_ssize_t>FIRST_BYTES))
            if self.bytes == NULL:
                raise MemoryError
        there = min(there, <size_t>(self.size - self.have))
        room = PyBytes_GET_SIZE_raw(self.bytes)
        if self.have + <Py_ssize_t>there > room:
            room = min(self.size, max(2 * room, self.have + <Py_ssize_t>there))
            # If this fails nothing is lost; _PyBytes_Resize() frees what it cannot make larger.
            PyMem_RawFree(check_memory(PyMem_RawMalloc(<size_t>room + PAGE)))
            _PyBytes_Resize(&self.bytes, room)
        if there:
            sink.take_into(PyBytes_AS_STRING_raw(self.bytes) + self.have, there)
            self.have += <Py_ssize_t>there
            sink.maybe_resume()
        if self.have < self.size and not sink.eof:
            return WAIT
        if self.have < self.size:
            _PyBytes_Resize(&self.bytes, self.have)
        chunk = <object>self.bytes
        Py_DECREF(chunk)
        self.bytes = NULL
        if self.have < self.size:
            self.have = 0
            raise incomplete(chunk, self.size)
        self.have = 0
        return chunk

    cdef object until(self):
        cdef IntoReader sink = self.sink
        cdef bytes separator
        cdef Py_ssize_t at, first = -1, end = -1, most = 0
        cdef size_t there
        for separator in self.separators:
            most = PyBytes_GET_SIZE(separator)
            at = sink.find(separator, self.scanned)
            if at != -1 and (end == -1 or at + most < end):
                first, end = at, at + most
        if end == -1:
            there = sink.available(<size_t>-1)
            if <Py_ssize_t>there - most + 1 > self.scanned:
                self.scanned = <Py_ssize_t>there - most + 1
                if self.scanned > sink.limit:
                    return self.overrun("Separator is not found, and chunk exceed the limit", self.scanned, False)
            if not sink.eof:
                return WAIT
            chunk = self.fresh(there)
            if self.kind == READ_LINE:
                return chunk
            raise incomplete(chunk, None)
        if first > sink.limit:
            return self.overrun("Separator is found, but chunk is longer than limit", first, True)
        return self.fresh(end)

    cdef object overrun(self, str message, Py_ssize_t consumed, bint found):
        """Raise what asyncio's would; readline() takes the line, or all that there is."""
        if self.kind == READ_UNTIL:
            from asyncio import LimitOverrunError
            raise LimitOverrunError(message, consumed)
        self.fresh(<size_t>(consumed + 1) if found else self.sink.available(<size_t>-1))
        raise ValueError(message)

    cdef object lease(self):
        cdef size_t there = self.sink.available(<size_t>self.size)
        if there < <size_t>self.size:
            if not self.sink.eof:
                return WAIT
            if there:
                raise incomplete(self.fresh(there), self.size)
        return self.sink.lend(there)

    cdef object into(self):
        cdef IntoReader sink = self.sink
        cdef size_t there = min(sink.available(<size_t>(self.size - self.have)), <size_t>(self.size - self.have))
        if there:
            sink.take_into(<char *>self.view.buf + self.have, there)
            self.have += <Py_ssize_t>there
            sink.maybe_resume()
        if self.have == self.size or sink.eof or (self.have and self.kind == READ_INTO):
            if self.has_landing():
                if sink.eof:
                    self.take_back()
                return WAIT     # until it is over
            sink.got_much = self.have >= PLACE_BYTES
            if self.have < self.size and self.kind == READ_INTO_EXACTLY:
                partial = (<char *>self.view.buf)[:self.have]
                raise incomplete(partial, self.size)
            return self.have
        if self.placed is not None and self.placed.landing is not None and self.placed.landing.over:
            self.placed.landing = None     # what is left may be named again
        return WAIT


answer_at_once(ReadRequest)


cdef object incomplete(object partial, object expected):
    from asyncio import IncompleteReadError     # programs that use only the verbs do not import asyncio
    return IncompleteReadError(partial, expected)


cdef int tell_future(future, result, exc) except -1:
    try:
        if future.done():
            pass
        elif exc is None:
            future.set_result(result)
        else:
            future.set_exception(exc)
    except RuntimeError:
        pass        # the loop is closed: nobody is left to be told
    return 0


class CompiledReader:
    """What asyncio.StreamReader does, and its attributes, by an IntoReader: the first base of RdmaStreamReader."""

    _into = None

    def __init__(self, limit, loop):
        if limit <= 0:
            raise ValueError("Limit cannot be <= 0")
        self._into = IntoReader(loop, limit)
        super().__init__(limit, loop)

    # What asyncio's has for attributes.

    @property
    def _buffer(self):
        cdef IntoReader into = self._into
        into.put_all_aside()
        return into.aside

    @_buffer.setter
    def _buffer(self, value):
        (<IntoReader>self._into).aside = bytearray(value)

    @property
    def _eof(self):
        return (<IntoReader>self._into).eof

    @_eof.setter
    def _eof(self, value):
        (<IntoReader>self._into).eof = value

    @property
    def _exception(self):
        return (<IntoReader>self._into).exception

    @_exception.setter
    def _exception(self, value):
        (<IntoReader>self._into).exception = value

    @property
    def _paused(self):
        return (<IntoReader>self._into).paused

    @_paused.setter
    def _paused(self, value):
        (<IntoReader>self._into).paused = value

    @property
    def _transport(self):
        return (<IntoReader>self._into).transport

    @_transport.setter
    def _transport(self, value):
        (<IntoReader>self._into).transport = value

    @property
    def _waiter(self):
        cdef IntoReader into = self._into
        return into.waiter if into.reading is None or into.reading.future.done() else into.reading.future

    @_waiter.setter
    def _waiter(self, value):
        (<IntoReader>self._into).waiter = value

    def set_exception(self, exc):
        """Have every read raise it."""
        cdef IntoReader into = self._into
        into.exception = exc
        into.tell()

    def feed_eof(self):
        """There will be no more bytes."""
        cdef IntoReader into = self._into
        into.eof = True
        into.tell()

    def at_eof(self):
        """Whether all bytes have been read, and no more will come."""
        cdef IntoReader into = self._into
        return into.eof and not into.available(1)

    def feed_data(self, data):
        """Bytes that came by another way than the connection."""
        cdef IntoReader into = self._into
        assert not into.eof, "feed_data after feed_eof"
        if not data:
            return
        into.put_all_aside()
        into.aside.extend(data)
        into.tell()
        if into.transport is not None and not into.paused and len(into.aside) > 2 * into.limit:
            try:
                into.transport.pause_reading()
            except NotImplementedError:
                into.transport = None
            else:
                into.paused = True

    def read(self, n=-1):
        """Up to ``n`` bytes, as soon as there is one; by default all up to the end of the stream.

        ``b""`` at the end.
        """
        if n == 0:
            return nothing_to_read(self)
        return ReadRequest(self._into, READ_ALL if n < 0 else READ_SOME, n)

    def readexactly(self, n):
        """``n`` bytes.

        :raises asyncio.IncompleteReadError: the stream ended before; its ``partial`` has what came
        """
        if n < 0:
            raise ValueError("readexactly size can not be less than zero")
        if n == 0:
            return nothing_to_read(self)
        return ReadRequest(self._into, READ_EXACTLY, n)

    def readuntil(self, separator=b"\n"):
        """Bytes up to and with a separator, or with the one of a tuple of separators that ends first.

        :raises asyncio.IncompleteReadError: the stream ended before
        :raises asyncio.LimitOverrunError: more than the reader's limit stands before it; nothing was read
        """
        cdef tuple separators = separators_of(separator)
        cdef ReadRequest request = ReadRequest(self._into, READ_UNTIL, 0)
        request.separators = separators
        return request

    def readline(self):
        """A line with its end, or what was left at the end of the stream; ``b""`` if nothing was.

        :raises ValueError: the line was longer than the reader's limit, and has been dropped
        """
        cdef ReadRequest request = ReadRequest(self._into, READ_LINE, 0)
        request.separators = NEWLINE
        return request

    def lease(self, at_least=1):
        """Look at received bytes where they are: ``async with reader.lease() as view:``.

        ``view`` is a read-only memoryview of the next bytes of the stream, which have been read then, also if the block
        does not use them. It shows one frame of the peer's, without a copy, if that has ``at_least`` bytes, else more,
        in one copy. It is empty at the end of the stream. Where receives are shared, bytes are always copied.

        The view ends with the block. As long as something made of it lives on, an array say, the bytes stay as they
        are, and the peer can send one frame less. It can send nothing more when all are held.

        Waiting can be cancelled; then nothing has been read.

        :raises ValueError: at_least is not positive
        :raises asyncio.IncompleteReadError: the stream ended after fewer bytes; its ``partial`` has them
        """
        cdef Lease lease = Lease.__new__(Lease)
        if at_least < 1:
            raise ValueError(f"lease: at_least {at_least!r} is not positive")
        lease.into, lease.at_least = self._into, at_least
        return lease

    def readinto(self, buffer):
        """Read up to as many bytes as ``buffer`` has, as soon as there is one, into it; returns how many.

        0 at the end of the stream. The buffer must not be resized before that.
        """
        return read_into(self._into, READ_INTO, buffer)

    def readinto_exactly(self, buffer):
        """Fill ``buffer``; returns its size in bytes.

        :raises asyncio.IncompleteReadError: the stream ended before; its ``partial`` has what came
        """
        return read_into(self._into, READ_INTO_EXACTLY, buffer)


cdef tuple NEWLINE = (b"\n",)


cdef tuple separators_of(separator):
    separators = sorted(separator, key=len) if isinstance(separator, tuple) else [separator]
    if not separators:
        raise ValueError("Separator should contain at least one element")
    if len(separators[0]) == 0:
        raise ValueError("Separator should be at least one-byte string")
    return tuple([bytes(one) for one in separators])


cdef ReadRequest read_into(IntoReader into, read_kind kind, buffer):
    cdef ReadRequest request
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        request = ReadRequest(into, kind, view.len)
    except BaseException:
        PyBuffer_Release(&view)
        raise
    request.view = view
    request.has_view = True
    return request


async def nothing_to_read(reader):
    if reader._exception is not None:
        raise reader._exception
    return b""


# -- writing ---------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class DrainRequest(Immediate):
    """One drain(): nothing to wait for while the connection may be written to and has not paused its protocol."""

    cdef object writer

    def __cinit__(self, writer):
        self.writer = writer

    cdef object begin(self):
        cdef Connection connection = self.writer._connection
        cdef IntoReader into = self.writer._into
        if connection.writable and not connection.protocol_paused and into.exception is None:
            return None
        self.inner = self.writer._drain_as_asyncio()
        return WAIT


answer_at_once(DrainRequest)


class CompiledWriter:
    """What asyncio.StreamWriter does that costs most: the first base of RdmaStreamWriter."""

    def drain(self):
        """Wait until it is a good time to write more: no more is buffered than the low-water mark allows.

        :raises OSError: the connection is lost, or closed
        """
        return DrainRequest(self)
