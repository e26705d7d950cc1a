# The memory of the byte stream: slabs of registered memory, divided into equal chunks that are lent to connections.
#
# Registering memory is the most expensive operation of a transport: it pins pages, and a peer of the embedded device
# has to map the new memory. So memory is registered by the slab, and a chunk returns to its slab when its connection
# ends. A chunk may be reused only when no device can still write into it, so the caller releases it after the queue
# pair is destroyed. On the embedded device a peer may also be stopped in the middle of a copy. The device counts such
# peers (rdmanet_soft_quarantined); while there is one, released chunks are parked instead of reused.

cdef enum:
    SLAB_BYTES = 32 << 20
    PINNED_BYTES = 256 << 10    # of a slab on other devices, at least one chunk

ctypedef uint32_t (*quarantined_t)() noexcept nogil


cdef class Chunk:
    """A piece of a slab, that one connection has."""

    cdef Slab slab
    cdef char *address
    cdef uint32_t lkey
    cdef Py_ssize_t index
    cdef bint used              # another connection has used it before
    cdef RingPool pool
    cdef Py_ssize_t leases      # programs look at bytes in it (lease.pxi)
    cdef bint given             # its connection has ended


@cython.no_gc_clear
cdef class Slab:
    cdef MR mr
    cdef list free
    cdef bytearray used                 # for each chunk: does it contain more than zeros?

    def __cinit__(self, PD pd not None, size_t chunk_bytes, Py_ssize_t count):
        self.mr = pd.alloc_mr(chunk_bytes * count, verbs.IBV_ACCESS_LOCAL_WRITE)
        self.free = list(range(count - 1, -1, -1))
        self.used = bytearray(count)


@cython.no_gc_clear
cdef class RingPool:
    """Chunks of one size. It grows by a slab, and shrinks when more than `spare` slabs are empty.

    Up to `at_hand_most` chunks that were given back stay as they are for the next who take one.
    """

    cdef PD pd
    cdef readonly size_t chunk_bytes
    cdef readonly Py_ssize_t per_slab
    cdef list slabs
    cdef list at_hand
    cdef Py_ssize_t at_hand_most
    cdef list parked
    cdef Py_ssize_t spare               # how many empty slabs are kept
    cdef bint closed
    cdef quarantined_t quarantined      # the embedded device's own export; NULL for others

    def __cinit__(self, PD pd not None, size_t chunk_bytes, Py_ssize_t spare=1, Py_ssize_t at_hand_most=0):
        pd.usable()
        self.pd = pd
        self.spare = spare
        self.chunk_bytes = chunk_bytes
        # On the embedded device memory is sparse, and costs nothing before it is touched; other devices pin it all.
        self.per_slab = max(1, (SLAB_BYTES if pd.context.library.embedded_device else PINNED_BYTES) // chunk_bytes)
        self.slabs = []
        self.at_hand = []
        self.at_hand_most = at_hand_most
        self.parked = []
        self.quarantined = <quarantined_t>verbs.rn_library_symbol(pd.context.library.c, "rdmanet_soft_quarantined")

    cdef inline bint may_reuse(self) noexcept:
        return self.quarantined == NULL or self.quarantined() == 0

    cdef int have_some(self) except -1:
        """Make sure that there is a slab."""
        if not self.slabs:
            self.slabs.append(Slab(self.pd, self.chunk_bytes, self.per_slab))
        return 0

    cdef Chunk take(self):
        cdef Slab slab
        cdef Chunk chunk
        if self.at_hand:
            chunk = self.at_hand.pop()
            chunk.pool = self
            return chunk
        if self.parked and self.may_reuse():
            self._unpark()
        for slab in self.slabs:
            if slab.free:
                break
        else:
            slab = Slab(self.pd, self.chunk_bytes, self.per_slab)
            self.slabs.append(slab)
        chunk = Chunk.__new__(Chunk)
        chunk.slab, chunk.pool = slab, self
        chunk.index = slab.free.pop()
        chunk.address = slab.mr.addr + chunk.index * self.chunk_bytes
        chunk.lkey = slab.mr.ptr.lkey
        chunk.used = slab.used[chunk.index]
        slab.used[chunk.index] = True
        return chunk

    cdef int give(self, Chunk chunk) except -1:
        """Take a chunk back; it is reused when no device can touch it any more, and no program looks at it."""
        if chunk.leases:
            chunk.given = True
            return 0
        if self.closed:
            if chunk.slab.mr.exports == 0:
                chunk.slab.mr.close()
            return 0
        chunk.pool = None   # it may outlive us, and we it
        if len(self.at_hand) < self.at_hand_most and self.may_reuse():
            chunk.used = True
            self.at_hand.append(chunk)
            return 0
        self.parked.append(chunk)
        if self.may_reuse():
            self._unpark()
        return 0

    cdef int _unpark(self) except -1:
        cdef Chunk chunk
        for chunk in self.parked:
            chunk.slab.free.append(chunk.index)
        self.parked.clear()
        empty = [slab for slab in self.slabs if len((<Slab>slab).free) == self.per_slab]
        for slab in empty[self.spare:]:
            self.slabs.remove(slab)
            (<Slab>slab).mr.close()
        return 0

    cdef int close(self) except -1:
        cdef Slab slab
        self.closed = True
        for slab in self.slabs:
            try:
                slab.mr.close()
            except BufferError:
                pass    # a program looks at it (lease.pxi); give() closes it
        self.slabs.clear()
        self.at_hand.clear()
        self.parked.clear()
        return 0
