# Registered memory of one-sided operations, kept for the next one.
#
# To register memory costs 50 us and more on an adapter, which pins the pages; an RDMA READ costs two. So READ and WRITE
# of a connection (peer_memory.py) do not register memory again that they have used before, if the old registration
# cannot be stale. The same address and length are not enough for that: a registration is of pages, and memory that was
# freed may come back at the same address on other pages. So it depends on what is passed:
#
#     an MR of this domain, or a     It is registered: its own key is used.
#     memoryview of one
#     another memoryview             Cached, by the identity of the object. A memoryview has the same memory all its
#                                    life, and until it ends or is released nobody can free, move or resize that.
#     anything else                  Registered for this operation only. A bytearray may be resized before the next
#                                    one, and to bytes there is no weak reference. Who wants them cached passes the same
#                                    memoryview of them each time.
#
# A cached registration is valid, therefore, while its memoryview exists and is not released. It holds nothing of the
# program's: the memoryview is referred to weakly, and its end ends the registration. A released one cannot be passed
# any more, so its registration is never used again; it goes with the object, or by its turn. While an operation uses a
# registration, the operation holds the memory, and the registration stays whatever happens.
#
# There are at most `most_entries`, of `most_bytes` together; if there are more, the least recently used idle one is
# dropped. Memory of more than `most_bytes` is not cached. What is registered is locked in memory, except on the
# embedded device, and a process may lock only so much: so at most a quarter of that many bytes is kept, and nothing
# when a registration fails for want of memory. All belongs to one protection domain, and ends before it.

cdef enum:
    REGISTERED_ENTRIES = 128
    REGISTERED_BYTES = 64 << 20


@cython.final
@cython.no_gc_clear     # it may be in use by an operation that the collector ends later
cdef class Registration:
    """Registered memory, for its users: each calls close() once.

    :ivar lkey: the key of the memory
    """

    cdef readonly uint32_t lkey
    cdef MR mr                      # ours to close; None where the memory is of a region of the program's
    cdef RegistrationCache cache    # that has it; None if it ends with its last use
    cdef object reference           # weak, to the memoryview
    cdef size_t length
    cdef Py_ssize_t users

    def close(self):
        """It is not used any more."""
        self.users -= 1
        if self.users > 0:
            return
        if self.cache is not None:
            self.cache.shrink()
        elif self.mr is not None:
            self.mr.close()


@cython.no_gc_clear
cdef class RegistrationCache:
    """What is registered in a protection domain for one-sided operations.

    :param most_entries: how many registrations are kept,
    :param most_bytes: and of how many bytes together; by default 64 MiB, or a quarter of what may be locked
    """

    cdef PD pd
    cdef readonly Py_ssize_t most_entries
    cdef readonly size_t most_bytes
    cdef dict entries               # id of the memoryview to Registration; the least recently used first
    cdef size_t bytes
    cdef readonly uint64_t hits, misses, evictions
    cdef bint closed
    cdef object __weakref__

    def __cinit__(self, PD pd not None, Py_ssize_t most_entries=REGISTERED_ENTRIES, most_bytes=None):
        pd.usable()
        self.pd = pd
        self.most_entries = most_entries
        self.most_bytes = REGISTERED_BYTES if most_bytes is None else most_bytes
        if most_bytes is None and not pd.context.library.embedded_device:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            if soft != resource.RLIM_INFINITY:
                self.most_bytes = min(self.most_bytes, <size_t>(soft // 4))
        self.entries = {}

    def take(self, buffer, view):
        """The registration of a buffer, to be closed after its use.

        :param view: a memoryview of its bytes, which the caller keeps until then; it is registered for writing, unless
            it is read-only
        :raises OSError: the memory cannot be registered
        :raises ValueError: the cache, or its protection domain, is closed
        """
        cdef Registration registration
        cdef Py_buffer c
        self.usable()
        PyObject_GetBuffer(view, &c, PyBUF_SIMPLE)
        try:
            registration = self.region_of(view.obj, c.readonly)
            if registration is not None:
                return registration
            if type(buffer) is not memoryview:
                return self.register(&c)
            registration = self.entries.get(id(buffer))
            if registration is not None and registration.reference() is buffer:
                self.hits += 1
                self.entries[id(buffer)] = self.entries.pop(id(buffer))     # it is the most recently used now
                registration.users += 1
                return registration
            registration = self.register(&c)
            if registration.length <= self.most_bytes:
                self.keep(registration, buffer)
            return registration
        finally:
            PyBuffer_Release(&c)

    cdef int usable(self) except -1:
        if self.closed or self.pd is None:
            raise ValueError("this cache is closed")
        return self.pd.usable()

    cdef Registration region_of(self, exporter, bint readonly):
        """For memory of a region of our domain, if its rights suffice."""
        cdef MR mr
        cdef Registration registration
        if not isinstance(exporter, MR):
            return None
        mr = exporter
        if mr.pd is not self.pd or mr.ptr is NULL or mr.not_here is not None:
            return None
        if mr.rights & (verbs.IBV_ACCESS_ZERO_BASED | verbs.IBV_ACCESS_ON_DEMAND):
            return None
        if not readonly and not mr.rights & verbs.IBV_ACCESS_LOCAL_WRITE:
            return None
        registration = Registration.__new__(Registration)
        registration.lkey = mr.ptr.lkey
        registration.users = 1
        return registration

    cdef Registration register(self, Py_buffer *c):
        """Register what a buffer has, without holding its export."""
        cdef Registration registration = Registration.__new__(Registration)
        cdef MR mr = MR.__new__(MR)
        cdef int access = 0 if c.readonly else verbs.IBV_ACCESS_LOCAL_WRITE
        self.misses += 1
        mr.addr = <char *>c.buf
        mr.length = c.len
        mr.readonly = bool(c.readonly)
        try:
            registration.mr = mr.register(self.pd, access)
        except OSError as exc:
            if exc.errno != ENOMEM or not self.drop_idle():
                raise
            registration.mr = mr.register(self.pd, access)
        registration.lkey = mr.ptr.lkey
        registration.length = c.len
        registration.users = 1
        return registration

    cdef int keep(self, Registration registration, buffer) except -1:
        registration.reference = weakref.KeyedRef(buffer, self.forget, id(buffer))
        registration.cache = self
        self.entries[id(buffer)] = registration
        self.bytes += registration.length
        return self.shrink()

    def forget(self, reference):
        """A memoryview has ended."""
        cdef Registration registration = self.entries.get(reference.key)
        if registration is not None and registration.reference is reference:
            self.drop(reference.key, registration)

    cdef int drop(self, key, Registration registration) except -1:
        del self.entries[key]
        self.bytes -= registration.length
        registration.cache = registration.reference = None
        if registration.users == 0:
            try:
                registration.mr.close()
            except Exception:
                logger.exception("%r cannot be closed, and leaks", registration.mr)
        return 0

    cdef int shrink(self) except -1:
        """Drop what is too much; nothing that is in use."""
        cdef Registration registration
        if len(self.entries) <= self.most_entries and self.bytes <= self.most_bytes:
            return 0
        for key, registration in self.entries.copy().items():
            if len(self.entries) <= self.most_entries and self.bytes <= self.most_bytes:
                break
            if registration.users == 0 and registration.cache is self:
                self.evictions += 1
                self.drop(key, registration)
        return 0

    cdef bint drop_idle(self) except -1:
        """Drop what is not in use; returns whether there was anything."""
        cdef Registration registration
        cdef uint64_t before = self.evictions
        for key, registration in self.entries.copy().items():
            if registration.users == 0 and registration.cache is self:
                self.evictions += 1
                self.drop(key, registration)
        return self.evictions != before

    def close(self):
        """Drop everything. What is in use ends with its use."""
        cdef Registration registration
        self.closed = True
        for key, registration in self.entries.copy().items():
            if registration.cache is self:
                self.drop(key, registration)

    def stats(self):
        """How often memory was found registered, and how much of it is kept."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "entries": len(self.entries),
            "bytes": self.bytes,
        }


def address_of(buffer):
    """The address of the first byte of a contiguous buffer, which its owner may move when nobody holds its export."""
    cdef Py_buffer c
    PyObject_GetBuffer(buffer, &c, PyBUF_SIMPLE)
    try:
        return <uintptr_t>c.buf
    finally:
        PyBuffer_Release(&c)
