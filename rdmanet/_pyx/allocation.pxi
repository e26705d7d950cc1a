# Memory for bytes that are sent and received: rdmanet.alloc().
#
# A device accesses only registered memory, and to register memory costs more than to copy some. So the memory of
# alloc() is registered once for each protection domain in which it is used, when it is used there first, and
# deregistered when it is freed or the domain ends. The regions give the peer no rights: it gets a window (landing.pxi).
#
# The memory is a memfd, which peers of the embedded device map; the descriptor is kept for later registrations.
#
# What names memory is any view of it, also through NumPy's arrays, whose own buffers do not lead to this object. So it
# is found by its address, in a sorted list of all that there is. The view keeps it alive.

import bisect

cdef list allocated_at = []         # the address of each AllocatedMemory, in ascending order
cdef dict allocated = {}            # address to address of the object: a reference that does not count


@cython.final
@cython.no_gc_clear
cdef class AllocatedMemory:
    """Memory that streams can send from and receive into without copies; see `alloc()`.

    It has the buffer protocol: ``memoryview(memory)`` and ``numpy.frombuffer(memory, dtype)`` are views of it. It is
    freed when nothing refers to it or to a view of it any more.

    :ivar length: in bytes
    """

    cdef rn_pages pages
    cdef readonly size_t length
    cdef dict regions               # id of a PD to its MR, or to None where it cannot be registered

    def __cinit__(self):
        self.pages.fd = -1
        self.regions = {}

    def __init__(self):
        raise TypeError("use rdmanet.alloc()")

    def __dealloc__(self):
        cdef object at = <uintptr_t>self.pages.address
        if self.pages.address is NULL:
            return
        if at in allocated:
            del allocated[at]
            del allocated_at[bisect.bisect_left(allocated_at, at)]
        if self.leave_all():
            rn_pages_free(&self.pages)

    cdef bint leave_all(self) noexcept:
        """Deregister it; whether no device can access it now."""
        cdef MR mr
        cdef bint left = True
        for mr in self.regions.values():
            if mr is not None:
                mr.drop()
                left = left and (not mr.is_open() or mr.pid != verbs.rn_pid)
        return left

    cdef MR region_in(self, PD pd):
        """Its region in this protection domain, or None if it cannot be registered there."""
        cdef MR mr = self.regions.get(id(pd))
        if mr is not None and mr.is_open() and mr.pid == verbs.rn_pid:
            return mr
        if mr is None and id(pd) in self.regions:
            return None
        mr = MR.__new__(MR)
        mr.addr, mr.length = self.pages.address, self.pages.length
        mr.of_alloc = True
        try:
            mr.register(pd, verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_MW_BIND,
                        self.pages.fd if pd.context.library.embedded_device else -1)
        except OSError as exc:
            logger.warning("memory of rdmanet.alloc() is used with copies: %s", exc)
            mr = None
        self.regions[id(pd)] = mr
        return mr

    cdef int leave(self, PD pd) except -1:
        """The protection domain is about to end."""
        cdef MR mr = self.regions.pop(id(pd), None)
        if mr is not None:
            mr.drop()
        return 0

    def __len__(self):
        return <Py_ssize_t>self.length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.pages.address, <Py_ssize_t>self.length, False, flags)

    def __repr__(self):
        return f"<AllocatedMemory of {self.length} bytes>"


cdef AllocatedMemory memory_at(const char *at, size_t length):
    """The AllocatedMemory that these bytes are of, or None."""
    cdef AllocatedMemory memory
    cdef Py_ssize_t i
    cdef uintptr_t start
    if not allocated_at:
        return None
    i = bisect.bisect_right(allocated_at, <uintptr_t>at)
    if i == 0:
        return None
    start = allocated_at[i - 1]
    memory = <AllocatedMemory><PyObject *><uintptr_t>allocated[start]
    return memory if <uintptr_t>at - start + length <= memory.length else None


def region_for_peers(PD pd not None, buffer, int access):
    """`pd.reg_mr(buffer, access)`, but peers of the embedded device can map what lies in memory of `alloc()`.

    It does not look whether each page of a buffer is there, which takes as long as a good part of the copy: the buffer
    is held, so it is.
    """
    cdef AllocatedMemory of
    cdef const uint32_t *vouched
    cdef MR mr = MR.__new__(MR)
    pd.usable()
    mr.borrow(buffer, access)
    of = memory_at(mr.addr, mr.length) if pd.context.library.embedded_device else None
    if of is None:
        vouched = <const uint32_t *>verbs.rn_library_symbol(pd.context.library.c, "rdmanet_soft_access_vouched")
        return mr.register(pd, access, -1, 0, <int>vouched[0] if vouched != NULL else 0)
    return mr.register(pd, access, of.pages.fd, <uintptr_t>mr.addr - <uintptr_t>of.pages.address)


cdef int leave_domain(PD pd) except -1:
    """A protection domain is about to end: nothing is registered there any more."""
    cdef AllocatedMemory memory
    for start in list(allocated):
        at = allocated.get(start)       # another thread may have freed it: leave() lets others run
        if at is not None:
            memory = <AllocatedMemory><PyObject *><uintptr_t>at
            memory.leave(pd)
    return 0


def alloc(nbytes, *, huge_pages=False):
    """Allocate zeroed memory that streams can send from and receive into without copies.

    `reader.readinto()` and `readinto_exactly()` let the peer's device write large messages directly to where they are
    wanted, if the memory is of this kind. Any view of it will do: ``memoryview(memory)[a:b]``, or a NumPy array made
    by ``numpy.frombuffer(memory, dtype)``. The memory is registered when it is first used on a connection, and freed
    when nothing refers to it or to a view of it any more.

    :param nbytes: its length in bytes, at least 1
    :param huge_pages: as for `PD.alloc_mr`
    :returns: an AllocatedMemory
    :raises ValueError: nbytes is 0 or out of range
    :raises OSError: ENOMEM; EMFILE, because each needs a descriptor
    """
    cdef AllocatedMemory memory
    cdef size_t size
    read_size(nbytes, "alloc: nbytes", ValueError, &size)
    if not 0 < size <= <size_t>-1 >> 1:
        raise ValueError(f"alloc: nbytes {size} is not in 1..{2**63 - 1}")
    memory = AllocatedMemory.__new__(AllocatedMemory)
    take_pages(&memory.pages, size, True, huge_pages)
    memory.length = size
    at = <uintptr_t>memory.pages.address
    allocated[at] = <uintptr_t><PyObject *>memory
    bisect.insort(allocated_at, at)
    return memory
