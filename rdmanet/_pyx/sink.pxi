# Where a connection's bytes go. The connection says when, a sink says where: its `take` moves bytes of the connection's
# inbox to whoever wants them, and gives consumed slots back. It may call the application, which may do anything, also
# end the connection or choose another sink.
#
# The base class is in receiver.pxi. A new kind of sink is a class here, and a line in `choose_sink`.

cdef extern from "Python.h":
    int PyContext_Enter(object) except -1
    int PyContext_Exit(object) except -1

cdef enum:
    GATHER_BYTES = 65536        # larger fresh `bytes` cost page faults (malloc's mmap threshold)
    TLS_BYTES = 262144          # as much as SSLProtocol takes at a time; then it may pause reading


@cython.final
cdef class DataReceived(Sink):
    """asyncio.Protocol: as `bytes`, of several frames if they are small."""

    cdef object data_received

    def __cinit__(self, protocol):
        self.callback = "data_received"
        self.data_received = getattr(protocol, "data_received", None)

    cdef bint take(self, Receiver connection) except -1:
        cdef Inbox inbox = connection.inbox
        cdef ready_slot *entry
        cdef uint32_t total = 0, count = 0
        cdef char *to
        while count < inbox.count:
            entry = inbox.at(count)
            if count and total + entry.length > GATHER_BYTES:
                break
            total += entry.length
            count += 1
        total -= inbox.offset
        chunk = PyBytes_FromStringAndSize(NULL, total)
        to = PyBytes_AS_STRING(chunk)
        while count:
            entry = inbox.at(0)
            memcpy(to, entry.data + inbox.offset, entry.length - inbox.offset)
            to += entry.length - inbox.offset
            inbox.first_consumed()
            count -= 1
        repost_if_half(connection)
        PyContext_Enter(connection.context)
        try:
            self.data_received(chunk)
        finally:
            PyContext_Exit(connection.context)
        return True


@cython.final
cdef class IntoBuffer(Sink):
    """asyncio.BufferedProtocol: into the memory that get_buffer() returns.

    After a burst of PLACE_BYTES into memory of rdmanet.alloc(), get_buffer(-1) is called before bytes come, as
    asyncio's proactor does, and the peer may place them there. get_buffer() and buffer_updated() still take turns:
    buffer_updated() is called when the peer cannot write there any more. If the connection ends first, or another
    protocol takes over, it is not called.
    """

    cdef object get_buffer, buffer_updated
    cdef bint asks_ahead        # the protocol does not forbid it
    cdef object ahead           # what get_buffer(-1) returned, while nothing has come
    cdef Landing landing        # what of that the peer was asked to write to
    cdef Receiver connection  # while there is one
    cdef size_t burst           # bytes, since the peer had no more to send

    def __cinit__(self, protocol):
        self.callback = "buffer_updated"
        self.get_buffer = protocol.get_buffer
        self.buffer_updated = protocol.buffer_updated
        self.asks_ahead = bool(getattr(protocol, "rdma_get_buffer_ahead", True))

    cdef bint take(self, Receiver connection) except -1:
        cdef Inbox inbox = connection.inbox
        cdef Py_buffer view
        cdef ready_slot *entry
        cdef size_t taken = 0, n
        cdef uint32_t size
        cdef bint may_place, short = False
        if self.landing is not None:
            if not self.landing.over:
                return False    # landed() comes
            self.landing = self.connection = None
        PyContext_Enter(connection.context)
        try:
            self.callback = "get_buffer"    # also for what it returned
            if self.ahead is None:
                target = self.get_buffer(inbox.at(0).length - inbox.offset)
            else:
                target, self.ahead = self.ahead, None
            PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
            try:
                if view.len == 0:
                    raise RuntimeError("get_buffer() returned an empty buffer")
                may_place = (
                    self.asks_ahead and connection.ledger is not None and connection.ledger.placement
                    and self.memory_of(connection, &view) is not None
                )
                while inbox.count and taken < <size_t>view.len:
                    entry = inbox.at(0)
                    n = min(<size_t>view.len - taken, <size_t>(entry.length - inbox.offset))
                    if <char *>view.buf + taken != entry.data + inbox.offset:   # the peer has placed it there
                        if not copy_carefully(<char *>view.buf + taken, entry.data + inbox.offset, n):
                            raise memory_is_gone("get_buffer")
                    taken += n
                    size = entry.length
                    if inbox.take(<uint32_t>n):
                        short = size < connection.frame_bytes
            finally:
                PyBuffer_Release(&view)
            target = None
            self.burst += taken
            repost_if_half(connection)
            self.callback = "buffer_updated"
            self.buffer_updated(taken)
            if may_place and self.burst >= PLACE_BYTES and self.is_dry(connection):
                self.ask_ahead(connection)
            if short:
                self.burst = 0
        finally:
            PyContext_Exit(connection.context)
        return True

    cdef bint is_dry(self, Receiver connection) noexcept:
        """Whether the next byte of the stream is the next one for this protocol, and it wants it."""
        return (
            connection.sink is self and connection.attached and not connection.reading_paused
            and not connection.discarding and not connection.broken and connection.inbox.count == 0
        )

    cdef AllocatedMemory memory_of(self, Receiver connection, Py_buffer *view):
        """That in which the peer may place bytes, or None."""
        cdef size_t size = <size_t>view.len
        return memory_at(<char *>view.buf, size) if size >= connection.engine.place_bytes else None

    cdef int ask_ahead(self, Receiver connection) except -1:
        """Have the peer place what it sends next."""
        cdef Landings landings
        cdef AllocatedMemory memory
        cdef Py_buffer view
        if connection.engine.by_hand or not connection.engine.confines_peers():
            return 0
        landings = landings_of(connection)
        if landings is None or not landings.expect(connection):
            return 0
        self.callback = "get_buffer"
        target = self.get_buffer(-1)
        PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
        try:
            if view.len == 0:
                raise RuntimeError("get_buffer() returned an empty buffer")
            self.ahead = target
            memory = self.memory_of(connection, &view)
            if memory is None or not self.is_dry(connection):
                return 0
            self.ahead = PyMemoryView_FromObject(target)    # keeps it
            self.landing = landings.name(
                connection, self, memory, self.ahead, <char *>view.buf, <size_t>view.len, False)
            if self.landing is not None:
                self.connection = connection
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int landed(self) except -1:
        if self.connection is not None and self.connection.attached:
            self.connection.engine.deliver_later(self.connection)
            self.connection.engine.wake_if_running()
        return 0

    cdef int leaves(self, Receiver connection) except -1:
        self.ahead = self.landing = self.connection = None
        return 0


@cython.final
cdef class IntoTls(Sink):
    """asyncio's SSLProtocol: into its MemoryBIO, without a copy in the memory that its get_buffer() returns."""

    cdef object write, buffer_updated

    def __cinit__(self, protocol):
        self.callback = "buffer_updated"
        self.write = protocol._incoming.write
        self.buffer_updated = protocol.buffer_updated

    cdef bint take(self, Receiver connection) except -1:
        cdef Inbox inbox = connection.inbox
        cdef ready_slot *entry
        cdef size_t taken = 0
        PyContext_Enter(connection.context)
        try:
            while inbox.count and taken < TLS_BYTES:
                entry = inbox.at(0)
                taken += entry.length - inbox.offset
                self.write(PyMemoryView_FromMemory(
                    entry.data + inbox.offset, entry.length - inbox.offset, PyBUF_READ))
                inbox.first_consumed()
            repost_if_half(connection)
            self.buffer_updated(0)      # it has been written already
        finally:
            PyContext_Exit(connection.context)
        return True


cdef bint is_tls(protocol) except -1:
    module = sys.modules.get("rdmanet.stream.ssl_protocol")    # imported by whoever uses TLS
    return module is not None and type(protocol) in module.KINDS

cdef int choose_sink(Receiver connection, object protocol, bint buffered) except -1:
    """Look the protocol's callbacks up once, not once a message."""
    cdef Sink before = connection.sink
    into = getattr(protocol, "_rdma_sink", None)
    if into is not None:
        (<IntoReader?>into).joins(connection)
        connection.sink = into
    else:
        connection.sink = (
            IntoTls(protocol) if is_tls(protocol) else IntoBuffer(protocol) if buffered else DataReceived(protocol)
        )
    if before is not None and before is not connection.sink:
        if connection.landings is not None:
            take_memory_back(connection)
        before.ends(connection)
        before.leaves(connection)
    return 0


cdef int leave_sink(Receiver connection) except -1:
    """The connection has ended: its slots have gone."""
    sink, connection.sink = connection.sink, None
    if sink is not None:
        (<Sink>sink).leaves(connection)
    return 0
