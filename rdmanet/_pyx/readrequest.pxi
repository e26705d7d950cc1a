# One read of a StreamReader: how much it wants, what it has of that, and when it has its result.
#
# A read takes nothing before it is awaited. `attempt` makes the result of what is unread (unread.pxi), or says WAIT.
# Then the read is the reader's `reading`, and `proceed` attempts again whenever something has come or is over. If it is
# cancelled, what it has taken is put back: no byte is lost.
#
# A read into memory of rdmanet.alloc() that has to wait for much has the peer place it there (landing.pxi). It ends,
# also when it is cancelled, only when the peer cannot write there any more.

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1
    PyObject *PyBytes_FromStringAndSize_raw "PyBytes_FromStringAndSize"(const char *, Py_ssize_t)
    char *PyBytes_AS_STRING_raw "PyBytes_AS_STRING"(PyObject *)
    Py_ssize_t PyBytes_GET_SIZE_raw "PyBytes_GET_SIZE"(PyObject *)
    void Py_XDECREF(PyObject *)

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
    FIRST_BYTES = 64 << 20      # a read of more begins with this much memory: the number may be a peer's
    LEARNED_BYTES = 31 << 20    # the largest object that glibc's malloc learns from


@cython.final
@cython.no_gc_clear
cdef class PlacedRead:
    """What a read has whose bytes the peer may place. Most reads do without, and are made for each message."""

    cdef AllocatedMemory memory     # that of the read's `view`
    cdef Receiver connection        # whose peer is asked, and no other's: the reader may go on with another connection
    cdef Landing landing            # what of it the peer was asked to write to
    cdef object stopped             # an error that ends the read when the peer lets go of the memory

    cdef bint lands(self) noexcept:
        """Whether the peer may still write to the memory."""
        return self.landing is not None and not self.landing.over


@cython.final
@cython.no_gc_clear
cdef class ReadRequest(WaitingRead):
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
        cdef Receiver connection = self.sink.connection
        cdef AllocatedMemory memory
        if (
            connection is None or connection.ledger is None or <size_t>self.size < connection.engine.place_bytes
            or connection.engine.by_hand or connection.engine.pid != verbs.rn_pid
        ):
            return 0
        memory = memory_at(<char *>self.view.buf, <size_t>self.size)
        if memory is None or landings_of(connection) is None:
            return 0
        if connection.landings.expect(connection):
            self.placed = PlacedRead.__new__(PlacedRead)
            self.placed.memory, self.placed.connection = memory, connection
        return 0

    cdef int name_rest(self, bint has_nothing) except -1:
        """Let the peer know where the rest of this read is wanted, if it may then place much."""
        cdef IntoReader sink = self.sink
        cdef Receiver connection = self.placed.connection
        cdef size_t rest = <size_t>(self.size - self.have), granted, least
        if connection is not sink.connection or not connection.attached or self.placed.landing is not None:
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
        if self.has_landing() and not self.placed.landing.taken_back:
            take_memory_back(self.placed.connection)
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
            self.placed.connection.inbox.copy_out()     # what was placed for this read, and it did not get
            self.placed = None
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

    cdef int begin_anew(self) except -1:
        """What it has, it has not read: other bytes are to come first."""
        if not self.has_landing():
            self.put_back()
            self.scanned = 0
        return 0

    # -- the kinds of reads: the result, or WAIT -----------------------------------------------------

    cdef object attempt(self):
        result = self.attempt_kind()
        if result is WAIT and self.sink.lost is not None and not self.has_landing():
            self.put_back()
            raise self.sink.lost
        return result

    cdef object attempt_kind(self):
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
            at = find_separator(sink, separator, self.scanned)
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


cdef size_t expected_of_malloc = 128 << 10


cdef inline void expect_large(size_t size) noexcept:
    """Have malloc keep the memory of objects of this size when they are freed.

    By default glibc maps each large object anew, and the page faults cost more than copying the bytes. Once it has seen
    a mapped object freed, it keeps the memory of later ones up to that size (mallopt(3), M_MMAP_THRESHOLD), and twice
    as much of the free memory behind them. So allocate and free one, without touching it. It is eight times as large,
    so that the memory of several objects is kept.

    glibc learns nothing from a mapping of 32 MiB: the size that it compares has a flag in its lowest bits. So that the
    largest one is less, with its header and in whole pages of whatever size, it is a MiB smaller.
    """
    global expected_of_malloc
    if size > expected_of_malloc:
        expected_of_malloc = min(8 * min(size, <size_t>LEARNED_BYTES), <size_t>LEARNED_BYTES)
        PyMem_RawFree(PyMem_RawMalloc(expected_of_malloc))  # a compiler leaves malloc() and free() side by side out
        if expected_of_malloc == LEARNED_BYTES:
            expected_of_malloc = <size_t>-1     # it learns of no larger ones


cdef inline void *check_memory(void *memory) except NULL:
    if memory == NULL:
        raise MemoryError
    return memory
