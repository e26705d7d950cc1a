# A pool of registered buffers: one region, divided into buffers of one size.
#
# Registering memory is expensive, and memory that a device may still access must not be reused. So a buffer is lent:
# leaving its `with` block returns it, but it becomes free only when nothing refers to its memory any more. A request
# refers to it until its completion has been polled (or its queue pair is destroyed). The buffer protocol counts these
# references: the element of a request holds an export of the buffer. A cancelled await, or a program that leaves the
# block too early, therefore only delays the reuse of a buffer. An export of a buffer also counts as one of the region,
# which cannot be closed while there is any.
#
# The pool's memory is for local use only: a key given to a peer would outlive the loan.


@cython.no_gc_clear
cdef class BufferPool:
    """A pool of registered buffers, which it lends: `with pool.acquire(100) as buffer:`.

    :param buffer_bytes: the length of each buffer
    :param count: the number of buffers; the pool never grows
    :param huge_pages: as for `PD.alloc_mr`
    :ivar mr: the region that contains all buffers
    :raises OSError: as from `PD.alloc_mr`
    """

    cdef object __weakref__
    cdef readonly MR mr
    cdef readonly size_t buffer_bytes
    cdef readonly Py_ssize_t count
    cdef size_t stride
    cdef list free

    def __init__(self, PD pd not None, size_t buffer_bytes, Py_ssize_t count, *, huge_pages=False):
        if self.mr is not None:
            raise RuntimeError(f"{self!r} is already initialized")
        if buffer_bytes == 0 or count <= 0:
            raise ValueError(f"a pool needs at least one buffer of one byte, not {count} of {buffer_bytes} bytes")
        self.stride = (buffer_bytes + 63) & ~<size_t>63    # buffers do not share a cache line
        self.mr = pd.alloc_mr(int(self.stride) * count, huge_pages=huge_pages)
        self.buffer_bytes, self.count = buffer_bytes, count
        self.free = list(range(count - 1, -1, -1))

    @property
    def available(self):
        """How many buffers are free."""
        return 0 if self.closed else len(self.free)

    @property
    def closed(self):
        """Whether close() was called."""
        return self.mr is None or self.mr.closed

    def acquire(self, nbytes=None):
        """Borrow a buffer for the length of a `with` block. It contains what its last user left in it.

        :param nbytes: its length; by default buffer_bytes
        :returns: a PooledBuffer
        :raises ValueError: nbytes is more than a buffer has, or the pool is closed
        :raises OSError: ENOBUFS if all buffers are in use
        """
        cdef PooledBuffer buffer
        self.fits(nbytes)
        if not self.free:
            raise OSError(ENOBUFS, f"all {self.count} buffers of {self.buffer_bytes} bytes are lent, "
                                   "or used by requests whose completions have not been polled")
        buffer = PooledBuffer.__new__(PooledBuffer)
        buffer.length = self.buffer_bytes if nbytes is None else nbytes
        buffer.index = self.free.pop()
        buffer.pool, buffer.mr, buffer.lent = self, self.mr, True
        return buffer

    def fits(self, nbytes):
        """Raise ValueError if no buffer is that long, or the pool is closed."""
        if self.closed:
            raise ValueError("this BufferPool is closed")
        self.mr.usable()
        if nbytes is not None and not 0 <= nbytes <= self.buffer_bytes:
            raise ValueError(f"{nbytes} bytes are not in 0..{self.buffer_bytes}, the size of a buffer")

    def _freed(self):
        """Called when a buffer has become free; for subclasses."""

    def close(self):
        """Free the memory. Closing it again does nothing.

        :raises OSError: EBUSY while buffers are lent or used by pending requests; the pool stays open
        """
        if self.closed:
            return
        if len(self.free) < self.count:
            raise OSError(EBUSY, f"{self.count - len(self.free)} of {self.count} buffers are in use")
        self.mr.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        if self.closed:
            return f"<{type(self).__name__} closed>"
        what = f"{self.count} buffers of {self.buffer_bytes} bytes"
        return f"<{type(self).__name__} {len(self.free)} of {what} are free>"


@cython.final
@cython.no_gc_clear
cdef class PooledBuffer:
    """A buffer of a pool: an element for requests, and memory for the program (`memoryview(buffer)`).

    :ivar pool: the BufferPool that lends it
    """

    cdef readonly BufferPool pool
    cdef MR mr
    cdef Py_ssize_t index, exports
    cdef size_t length
    cdef bint lent

    def __init__(self):
        raise TypeError("use BufferPool.acquire()")

    def __del__(self):
        if self.lent:
            warnings.warn(f"unreleased {self!r}", ResourceWarning, source=self)
            self.release()

    def release(self):
        """Return it to the pool. It is free as soon as no request and no memoryview refers to it.

        Releasing it again does nothing.
        """
        if self.lent:
            self.lent = False
            self.come_free()

    cdef int come_free(self) except -1:
        if not self.lent and self.exports == 0:
            self.pool.free.append(self.index)
            self.pool._freed()
        return 0

    def sge(self, size_t offset=0, length=None):
        """A part of it for a work request; SGE checks the bounds."""
        return SGE(self, offset, length)

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        with memoryview(self) as view:
            part = view[key]
            return bytes(part) if isinstance(part, memoryview) else part

    def __setitem__(self, key, value):
        with memoryview(self) as view:
            view[key] = value

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.lent:
            raise ValueError("this PooledBuffer is released")
        self.mr.usable()
        PyBuffer_FillInfo(view, self, self.mr.addr + self.index * self.pool.stride, self.length, False, flags)
        self.exports += 1
        self.mr.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
        self.mr.exports -= 1
        self.come_free()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()

    def __repr__(self):
        return f"<PooledBuffer {self.index} of {self.length} bytes{'' if self.lent else ' released'}>"
