# Received bytes, lent to the program where they are: RdmaStreamReader.lease().
#
# A lease shows the slot that the oldest unread bytes are in. The slot goes back to the device when the block has ended
# and nothing exports the memory any more: a NumPy array made of the view may live longer than the block. Until then the
# slot is not posted, and the chunk that it is part of is not another connection's, whatever becomes of this one.
#
# Bytes that are not in one slot of a ring of the connection's own are shown in memory that is no slot: those put aside,
# those of several slots, which are collected, and those of a shared ring, whose slots others wait for.


@cython.final
@cython.no_gc_clear
cdef class Leased:
    """Bytes that a lease shows; it exports them."""

    cdef object keeper              # what else keeps the bytes than a slot: `bytes` or a bytearray
    cdef char *data
    cdef Py_ssize_t length, exports
    cdef Receiver connection      # of the slot
    cdef Chunk chunk                # that it is in; None if there is no slot, or it has gone back
    cdef uint32_t slot
    cdef bint ended                 # the block has

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.length, True, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
        if self.ended and self.exports == 0 and self.chunk is not None:
            # Any thread may be here, at any time.
            try:
                self.connection.engine.loop.call_soon_threadsafe(self.give_back)
            except (RuntimeError, AttributeError):
                self.give_back()    # the loop, or the engine, has ended

    cdef int take_slot(self, Receiver connection) except -1:
        """Take what is left of the inbox's first entry."""
        cdef ready_slot *entry = connection.inbox.at(0)
        self.data = entry.data + connection.inbox.offset
        self.length = entry.length - connection.inbox.offset
        self.connection, self.chunk = connection, connection.own.bank_of(entry.slot).chunk
        self.slot = connection.inbox.first_leased()
        self.chunk.leases += 1
        self.chunk.slab.mr.exports += 1
        return 0

    cdef int take_bytes(self, bytearray keeper) except -1:
        self.keeper = keeper
        self.data, self.length = PyByteArray_AS_STRING(keeper), PyByteArray_GET_SIZE(keeper)
        return 0

    cdef int end(self) except -1:
        """The block has ended."""
        self.ended = True
        if self.exports == 0:
            self.give_back()
        return 0

    def give_back(self):
        """The slot may be posted again."""
        cdef Receiver connection = self.connection
        cdef Chunk chunk = self.chunk
        self.connection = self.chunk = None
        if chunk is None:
            return
        chunk.leases -= 1
        chunk.slab.mr.exports -= 1
        if connection.own is not None and connection.own.has_chunk(chunk):
            if connection.engine.pid == verbs.rn_pid:
                connection.inbox.lease_ended(self.slot)
                slots_consumed(connection)
        elif chunk.given and chunk.leases == 0:
            chunk.pool.give(chunk)
