# asyncio's StreamReader, compiled: the methods, for subclasses of asyncio.StreamReader and of asyncio.StreamWriter
# (rdmanet/streams/reader_writer.py).
#
# asyncio's own keeps what has come in a bytearray and gives out new `bytes` from it: two copies, and Python code for
# each piece that arrives. Here received bytes stay in the connection's slots until somebody asks for them, and go from
# there to where they are wanted: into the `bytes` that a read returns, or into the program's own memory.
#
#     immediate       awaitables that mostly have their result at once
#     unread          IntoReader, the sink: what has come and is unread, and who waits for it
#     separator       the search for a separator in that
#     readrequest     one read
#     here            CompiledReader, and CompiledWriter with its drain()

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
    def _limit(self):
        return (<IntoReader>self._into).limit

    @_limit.setter
    def _limit(self, value):
        (<IntoReader>self._into).limit = value

    @property
    def _eof(self):
        return (<IntoReader>self._into).eof

    @_eof.setter
    def _eof(self, value):
        (<IntoReader>self._into).eof = value

    @property
    def _exception(self):
        return (<IntoReader>self._into).error()

    @_exception.setter
    def _exception(self, value):
        cdef IntoReader into = self._into
        into.exception, into.lost = value, None

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
        """Have every read raise it; the loss of the connection, only reads that find no more bytes."""
        cdef IntoReader into = self._into
        if exc is not into.lost:
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
        cdef Py_ssize_t size
        if n == 0:
            return nothing_to_read(self)
        size = n    # before there is a request, which would warn that nobody awaits it
        return ReadRequest(self._into, READ_ALL if size < 0 else READ_SOME, size)

    def readexactly(self, n):
        """``n`` bytes.

        :raises asyncio.IncompleteReadError: the stream ended before; its ``partial`` has what came
        """
        cdef Py_ssize_t size
        if n < 0:
            raise ValueError("readexactly size can not be less than zero")
        if n == 0:
            return nothing_to_read(self)
        size = n
        return ReadRequest(self._into, READ_EXACTLY, size)

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
            raise ValueError(f"lease: at_least {shown(at_least)} is not positive")
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


@cython.final
cdef class Lease:
    """What RdmaStreamReader.lease() returns: an asynchronous context manager, to be entered once."""

    cdef IntoReader into
    cdef Py_ssize_t at_least
    cdef Leased leased
    cdef object view

    async def __aenter__(self):
        if self.view is not None:
            raise RuntimeError("a lease is entered once; call lease() again")
        self.leased = await ReadRequest(self.into, READ_LEASE, self.at_least)
        self.view = memoryview(self.leased)
        return self.view

    async def __aexit__(self, *exc):
        try:
            self.view.release()
        except BufferError:
            pass    # something that is made of it lives on
        self.leased.end()


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


@cython.final
@cython.no_gc_clear
cdef class DrainRequest(Immediate):
    """One drain(): nothing to wait for while the connection may be written to and has not paused its protocol."""

    cdef object writer

    def __cinit__(self, writer):
        self.writer = writer

    cdef object begin(self):
        cdef Receiver connection = self.writer._connection
        cdef IntoReader into = self.writer._into
        if connection.writable and not connection.protocol_paused and into.error() is None:
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
