# Where a connection's bytes go. The connection says when, a sink says where: its `take` moves bytes of the connection's
# inbox to whoever wants them, and gives consumed slots back. It may call the application, which may do anything, also
# end the connection or choose another sink.
#
# A new kind of sink is a class here, and a line in `Connection.bind`.

cdef class Sink:
    """One of a connection's protocol; see the kinds below."""

    cdef str callback           # the protocol's method that is to blame for an exception

    cdef bint take(self, Connection connection) except -1:
        """Move bytes; false if it wants none of what is left, and will take that itself when it does."""
        raise NotImplementedError

    cdef int ends(self, Connection connection) except -1:
        """The slots are about to go: save what is unread, if that is to outlive the connection."""
        return 0

    cdef int leaves(self, Connection connection) except -1:
        """The connection has ended, or has another sink."""
        return 0


@cython.final
cdef class DataReceived(Sink):
    """asyncio.Protocol: as `bytes`, of several frames if they are small."""

    cdef object data_received

    def __cinit__(self, protocol):
        self.callback = "data_received"
        self.data_received = getattr(protocol, "data_received", None)

    cdef bint take(self, Connection connection) except -1:
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
            memcpy(to, connection.payload_of(entry.slot) + inbox.offset, entry.length - inbox.offset)
            to += entry.length - inbox.offset
            inbox.first_consumed()
            count -= 1
        connection.repost_if_half()
        PyContext_Enter(connection.context)
        try:
            self.data_received(chunk)
        finally:
            PyContext_Exit(connection.context)
        return True


@cython.final
cdef class IntoBuffer(Sink):
    """asyncio.BufferedProtocol: into the memory that get_buffer() returns."""

    cdef object get_buffer, buffer_updated

    def __cinit__(self, protocol):
        self.callback = "buffer_updated"
        self.get_buffer = protocol.get_buffer
        self.buffer_updated = protocol.buffer_updated

    cdef bint take(self, Connection connection) except -1:
        cdef Inbox inbox = connection.inbox
        cdef Py_buffer view
        cdef ready_slot *entry
        cdef size_t taken = 0, n
        PyContext_Enter(connection.context)
        try:
            target = self.get_buffer(inbox.at(0).length - inbox.offset)
            PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
            try:
                if view.len == 0:
                    raise RuntimeError("get_buffer() returned an empty buffer")
                while inbox.count and taken < <size_t>view.len:
                    entry = inbox.at(0)
                    n = min(<size_t>view.len - taken, <size_t>(entry.length - inbox.offset))
                    memcpy(<char *>view.buf + taken, connection.payload_of(entry.slot) + inbox.offset, n)
                    taken += n
                    inbox.offset += <uint32_t>n
                    if inbox.offset == entry.length:
                        inbox.first_consumed()
            finally:
                PyBuffer_Release(&view)
            target = None
            connection.repost_if_half()
            self.buffer_updated(taken)
        finally:
            PyContext_Exit(connection.context)
        return True
