# Protection domains and memory regions.
#
# A memory region gives a device access to a range of memory. Local requests name it by its lkey, RDMA of the peer by
# its rkey. The kinds:
#
#     pd.reg_mr(buffer)     borrows the memory of any object with the buffer protocol, and holds its export
#     pd.alloc_mr(n)        owns newly allocated memory: on the embedded device a sealed memfd, which the peer maps, so
#                           this is the fast kind; elsewhere ordinary pages
#     pd.reg_implicit()     the whole address space, for local use: bytes are sent from where they are
#
#     pd.reg_dm_mr(dm)      memory on the device; pd.reg_dmabuf_mr(fd): memory of another device, such as a GPU
#     pd.alloc_null_mr()    no memory: writes to it are dropped, and reads from it return zeros
#
# The access rights are chosen at registration. Local reading is always allowed, local writing is the default if the
# memory is writable, and all remote access must be asked for.


cdef enum:
    NEEDS_WRITABLE = (
        verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_ATOMIC
    )


@cython.no_gc_clear
cdef class PD(Resource):
    """A protection domain: regions and queue pairs of different domains cannot be used together.

    :param context: the device
    :raises OSError: ENOMEM if the device has no more
    """

    cdef verbs.ibv_pd *ptr
    cdef readonly Context context

    def __init__(self, Context context not None):
        cdef int rc
        self.unmade()
        context.usable()
        with nogil:
            rc = verbs.rn_alloc_pd(context.library.c, context.ptr, &self.ptr)
        check(rc, "ibv_alloc_pd")
        self.context = context
        context.add_child()
        self.opened(PDS)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        return f"<PD of {self.context.name}{state_of(self)}>" if self.context else "<PD closed>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_pd *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_dealloc_pd(self.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_dealloc_pd")
        self.context.remove_child()
        self.destroyed()
        return 0

    def reg_mr(self, buffer, access=None):
        """Register the memory of another object. Its export is held until the region is closed.

        :param buffer: contiguous memory; writable if access includes writing
        :param access: AccessFlags; by default LOCAL_WRITE if the memory is writable, else none
        :raises BufferError: access includes writing and the memory is read-only, or it is not contiguous; numpy raises
            ValueError instead
        :raises OSError: EINVAL for memory of 0 bytes, or REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM
        """
        cdef int flags = verbs.IBV_ACCESS_LOCAL_WRITE if access is None else access
        cdef MR mr = MR.__new__(MR)
        self.usable()
        try:
            mr.borrow(buffer, flags)
        except (BufferError, ValueError):  # numpy's
            if access is not None:
                raise
            flags = 0
            mr.borrow(buffer, flags)
        return mr.register(self, flags)

    def alloc_mr(self, length, access=verbs.IBV_ACCESS_LOCAL_WRITE, *, huge_pages=False):
        """Allocate zeroed memory and register it. On the embedded device a peer can map it.

        :param length: in bytes; whole pages are allocated
        :param huge_pages: True for huge pages of the system's default size; "try" for huge pages if there are enough,
            else for ordinary pages that the kernel may turn into huge ones. `MR.page_size` says which they are
        :raises ValueError: length is 0 or out of range
        :raises OSError: EINVAL for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM. If there are not enough
            huge pages, it says how many there are and which command reserves more
        """
        cdef MR mr
        cdef rn_pages pages
        cdef size_t size
        read_size(length, "alloc_mr: length", ValueError, &size)
        self.usable()
        if not 0 < size <= <size_t>-1 >> 1:
            raise ValueError(f"alloc_mr: length {size} is not in 1..{2**63 - 1}")
        mr = MR.__new__(MR)
        take_pages(&pages, size, self.context.library.embedded_device, huge_pages)
        mr.addr, mr.mapped, mr.page_size, mr.length = pages.address, pages.length, pages.page_size, size
        try:
            return mr.register(self, access, pages.fd if self.context.library.embedded_device else -1)
        finally:
            if pages.fd >= 0:
                close_fd(pages.fd)

    def reg_implicit(self, access=0):
        """Register the whole address space, on demand, for local use.

        :raises OSError: EOPNOTSUPP or EINVAL if the device does not support it
        """
        cdef MR mr = MR.__new__(MR)
        self.usable()
        mr.not_here = "the whole address space"
        mr.length = <size_t>-1
        return mr.register(self, access | verbs.IBV_ACCESS_ON_DEMAND)

    def reg_dm_mr(self, DM dm not None, uint64_t offset=0, length=None, access=verbs.IBV_ACCESS_LOCAL_WRITE):
        """Register device memory, or a part of it. The addresses of the region begin at 0.

        :raises OSError: EINVAL if the part is not within the memory
        """
        cdef MR mr
        cdef const verbs.rn_library *c
        cdef int rc
        cdef unsigned int flags = access | verbs.IBV_ACCESS_ZERO_BASED
        self.usable()
        dm.usable()
        same_library(self.context, dm.context)
        mr = MR.__new__(MR)
        mr.not_here = "device memory"
        mr.dm = dm
        if length is None:
            mr.length = dm.length - offset if offset <= dm.length else 0
        else:
            mr.length = length
        with nogil:
            rc = verbs.rn_reg_dm_mr(self.ptr, dm.ptr, offset, mr.length, flags, &mr.ptr)
        check(rc, f"ibv_reg_dm_mr(offset {offset}, {mr.length} bytes)")
        return mr.registered(self, flags)

    def reg_dmabuf_mr(self, int fd, size_t length, *, uint64_t offset=0, uint64_t iova=0,
                      access=verbs.IBV_ACCESS_LOCAL_WRITE):
        """Register memory of another device by its dma-buf. The addresses of the region begin at iova.

        :raises OSError: EOPNOTSUPP if the device or the library does not support it
        """
        cdef MR mr
        cdef int rc, flags = access
        self.usable()
        mr = MR.__new__(MR)
        mr.not_here = "another device's memory"
        mr.iova = iova
        mr.length = length
        with nogil:
            rc = verbs.rn_reg_dmabuf_mr(self.context.library.c, self.ptr, offset, length, iova, fd, flags, &mr.ptr)
        check(rc, "ibv_reg_dmabuf_mr")
        return mr.registered(self, flags)

    def alloc_null_mr(self):
        """Create a region without memory: writes to it are dropped, and reads from it return zeros.

        :raises OSError: EOPNOTSUPP if the device does not support it
        """
        cdef MR mr
        cdef int rc
        self.usable()
        mr = MR.__new__(MR)
        mr.not_here = "no memory"
        mr.length = <size_t>-1
        with nogil:
            rc = verbs.rn_alloc_null_mr(self.ptr, &mr.ptr)
        check(rc, "ibv_alloc_null_mr")
        return mr.registered(self, verbs.IBV_ACCESS_LOCAL_WRITE)

    def advise_mr(self, advice, sg_list, flags=0):
        """Tell the device the planned use of parts of regions that are registered on demand.

        :raises OSError: EOPNOTSUPP if the device takes no advice; EFAULT, ENOENT or EINVAL for wrong parts
        """
        cdef _Elements elements = elements_of(sg_list)
        cdef int rc, what = advice
        cdef uint32_t how = flags
        self.usable()
        with nogil:
            rc = verbs.rn_advise_mr(self.ptr, what, how, elements.sges, elements.count)
        check(rc, f"ibv_advise_mr({advice!r})")


@cython.no_gc_clear
cdef class MR(Resource):
    """A memory region, which is also its memory: memoryview(mr), mr[:], bytes(mr) work.

    :ivar pd: its protection domain
    :ivar length: in bytes
    :ivar page_size: the page size of its memory, in bytes; 0 if it does not own memory
    :ivar dm: the device memory that it registers, or None
    """

    cdef verbs.ibv_mr *ptr
    cdef readonly PD pd
    cdef int rights
    cdef char *addr            # in this process; NULL if the memory is not here
    cdef uint64_t iova         # what requests call its first byte
    cdef readonly size_t length
    cdef size_t mapped         # bytes of our own pages; 0 if the memory is borrowed
    cdef readonly size_t page_size
    cdef Py_buffer view        # the export that is borrowed
    cdef bint borrowed
    cdef str not_here          # what it registers, if that is not memory of this process
    cdef readonly DM dm
    cdef bint readonly
    cdef Py_ssize_t exports    # buffers given out
    cdef Py_ssize_t offers     # to peers that include it
    cdef bint of_alloc         # of an AllocatedMemory, which closes it, perhaps after the collector called __del__

    def __init__(self):
        raise TypeError("use PD.reg_mr(), PD.alloc_mr() or PD.reg_implicit()")

    def __dealloc__(self):
        self.drop()
        # If deregistration failed (a window is bound to it), the device may still access the memory: keep it.
        if self.ptr is NULL:
            self.give_back()

    def __del__(self):
        if not self.of_alloc:
            Resource.__del__(self)

    @property
    def access(self):
        """Its access rights, AccessFlags."""
        return core.AccessFlags(self.rights)

    def __repr__(self):
        if not self.is_here():
            return f"<MR{state_of(self)}>"
        if self.not_here is not None:
            return f"<MR {self.not_here}, lkey {self.ptr.lkey:#x}>"
        where = f"{self.length} bytes at {<uintptr_t>self.addr:#x}"
        return f"<MR {where}, lkey {self.ptr.lkey:#x}, {self.access!r}>"

    cdef int borrow(self, object buffer, int access) except -1:
        """It is memory of another object, which is held as exported for this access."""
        cdef exported memory
        hold_export(buffer, PyBUF_WRITABLE if access & NEEDS_WRITABLE else PyBUF_SIMPLE, &self.view, &memory)
        self.borrowed = True
        self.addr, self.length, self.readonly = memory.first, memory.length, memory.readonly
        return 0

    cdef MR register(self, PD pd, int access, int fd=-1, uint64_t offset=0, int hint=0):    # a flag that is no right
        cdef const verbs.rn_library *c = pd.context.library.c
        cdef int rc
        self.iova = 0 if access & verbs.IBV_ACCESS_ZERO_BASED else <uintptr_t>self.addr
        with nogil:
            if fd >= 0:
                rc = verbs.rn_reg_dmabuf_mr(c, pd.ptr, offset, self.length, self.iova, fd, access, &self.ptr)
            else:
                rc = verbs.rn_reg_mr(c, pd.ptr, self.addr, self.length, access | hint, &self.ptr)
        if rc == -EINVAL:
            raise OSError(EINVAL, f"ibv_reg_mr: {strerror(EINVAL).decode()}: {self.length} bytes, "
                                  f"{core.AccessFlags(access)!r}{why_unregistered(self.length, access)}")
        check_locked(rc, "ibv_reg_mr", self.length, pd.context.library.embedded_device)
        return self.registered(pd, access)

    cdef MR registered(self, PD pd, int access):
        self.pd = pd
        self.rights = access
        self.opened(MRS)
        return self

    cdef void give_back(self) noexcept:
        """Release the memory, after deregistration."""
        if self.borrowed:
            self.borrowed = False
            PyBuffer_Release(&self.view)
        if self.mapped and self.addr is not NULL:
            munmap(self.addr, self.mapped)
        self.addr = NULL

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef bint is_implicit(self) noexcept:
        """Whether it is the whole address space of this process."""
        return self.addr is NULL and self.rights & verbs.IBV_ACCESS_ON_DEMAND and self.length == <size_t>-1

    cdef int destroy(self) except -1:
        cdef verbs.ibv_mr *ptr = self.ptr
        cdef int rc
        if self.offers:
            raise OSError(EBUSY, f"{self!r} is still offered to a peer: close it after the block of offer() has ended")
        if self.exports:
            raise BufferError(f"{self!r} is still exported to {self.exports} buffers: release memoryviews first")
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_dereg_mr(self.pd.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            if rc == -EBUSY:
                raise OSError(EBUSY, f"ibv_dereg_mr: {strerror(EBUSY).decode()}: a window is still bound to {self!r}")
            check(rc, "ibv_dereg_mr")
        self.destroyed()
        self.give_back()
        return 0

    def _offered(self, int more):
        """Count the offers to peers that include it."""
        self.offers += more

    def rereg(self, *, PD pd=None, buffer=None, access=None):
        """Change the protection domain, the memory or the access rights of the region, or several. See ibv_rereg_mr(3).

        The keys may change. No request that uses the region may be in flight.

        :param buffer: the new memory, which it borrows from now on
        :raises BufferError: access includes writing, and the memory is read-only
        :raises OSError: EOPNOTSUPP if the device does not support it. The region is unchanged, unless the device failed
            half-way: then it is closed
        """
        cdef Py_buffer view
        cdef exported memory
        cdef int rc, flags = 0, asked = 0 if access is None else access  # 0: libibverbs insists on it
        cdef int rights = self.rights if access is None else asked
        cdef verbs.ibv_pd *pd_ptr = NULL
        cdef void *addr = NULL
        cdef size_t length = 0
        cdef bint lost = False
        self.usable()
        if self.offers:
            raise OSError(EBUSY, f"{self!r} is still offered to a peer: change it after the block of offer() has ended")
        if pd is not None:
            pd.usable()
            same_library(self.pd.context, pd.context)
            flags |= verbs.IBV_REREG_MR_CHANGE_PD
            pd_ptr = pd.ptr
        if access is not None:
            flags |= verbs.IBV_REREG_MR_CHANGE_ACCESS
            if buffer is None and self.readonly and rights & NEEDS_WRITABLE:
                raise BufferError(f"{self!r} is of read-only memory: access={access!r} includes writing")
        if buffer is not None:
            if self.exports:
                raise BufferError(f"{self!r} is still exported to {self.exports} buffers: release memoryviews first")
            hold_export(buffer, PyBUF_WRITABLE if rights & NEEDS_WRITABLE else PyBUF_SIMPLE, &view, &memory)
            if self.exports:  # only now: the buffer is the region itself
                PyBuffer_Release(&view)
                raise BufferError(f"{self!r} cannot be registered on its own memory")
            flags |= verbs.IBV_REREG_MR_CHANGE_TRANSLATION
            addr, length = memory.first, memory.length
        with nogil:
            rc = verbs.rn_rereg_mr(
                self.pd.context.library.c, self.ptr, flags, pd_ptr, addr, length, asked, &lost)
        if rc < 0:
            if buffer is not None:
                PyBuffer_Release(&view)
            if lost:
                self.close()
            check(rc, "ibv_rereg_mr")
        if pd is not None:
            self.pd = pd
        self.rights = rights
        if buffer is not None:
            self.give_back()
            self.mapped = self.page_size = 0
            self.not_here = None
            self.borrowed, self.view = True, view
            self.readonly = memory.readonly
            self.addr, self.length = <char *>addr, length
            self.iova = 0 if rights & verbs.IBV_ACCESS_ZERO_BASED else <uintptr_t>addr

    @property
    def lkey(self):
        """The key for local work requests."""
        self.usable()
        return self.ptr.lkey

    @property
    def rkey(self):
        """The key for peers, as far as `access` permits."""
        self.usable()
        return self.ptr.rkey

    @property
    def address(self):
        """The address of its first byte for requests, and for a peer that has the rkey: where the memory is in this
        process, or 0 with AccessFlags.ZERO_BASED.
        """
        self.usable()
        return self.iova

    def __len__(self):
        return 0 if self.not_here is not None or self.ptr is NULL else <Py_ssize_t>self.length

    def __bool__(self):
        return self.ptr is not NULL

    def __getitem__(self, key):
        with memoryview(self) as view:
            part = view[key]
            return bytes(part) if isinstance(part, memoryview) else part

    def __setitem__(self, key, value):
        with memoryview(self) as view:
            view[key] = value

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.usable()
        if self.not_here is not None:
            raise BufferError(f"{self!r} has no memory that this process can access")
        PyBuffer_FillInfo(view, self, self.addr, self.length, self.readonly, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1

    def sge(self, offset=0, length=None):
        """A part of the region for a work request; SGE checks the bounds.

        :param offset: in bytes, from 0 on
        :param length: in bytes; None is the rest
        :raises IndexError: the part is not within the region
        """
        return SGE(self, offset, length)

    @property
    def at(self):
        """Parts of the region for work requests, by slicing: `mr.at[64:128]` is an SGE.

        :raises IndexError: the slice is not within the region; unlike that of a list, it is not truncated
        """
        return _Slices(self)

    def to_remote(self, offset=0, length=None):
        """What a peer needs to access the region, or a part of it: a RemoteMemory.

        :param offset: in bytes, from 0 on
        :param length: in bytes; None is the rest
        :raises IndexError: the part is not within the region
        """
        self.usable()
        offset = PyNumber_Index(offset)
        if not 0 <= offset <= self.length or (length is not None and not 0 <= length <= self.length - offset):
            raise IndexError(
                f"{'the rest' if length is None else length} at offset {offset} is not within {self.length} bytes")
        load_remote()
        return RemoteMemory(self.iova + offset, self.length - offset if length is None else length, self.ptr.rkey)


cdef str why_unregistered(size_t length, int access):
    if length == 0:
        return "; a region needs at least one byte"
    if access & (verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_ATOMIC) and (
            not access & verbs.IBV_ACCESS_LOCAL_WRITE):
        return "; REMOTE_WRITE and REMOTE_ATOMIC also need LOCAL_WRITE"
    return ""
