# Device memory: memory on the device itself, which the CPU cannot address.
#
# The CPU copies to and from it by calls; work requests and peers access it through a region of PD.reg_dm_mr(), whose
# addresses begin at 0.


@cython.no_gc_clear
cdef class DM(Resource):
    """Memory on the device; see ibv_alloc_dm(3).

    :param context: the device
    :param length: in bytes, also returned by len()
    :param log_align_req: the minimum alignment, as a power of 2
    :raises OSError: EOPNOTSUPP if the device has none; ENOMEM if it has no more
    """

    cdef verbs.ibv_dm *ptr
    cdef readonly Context context
    cdef readonly size_t length

    def __init__(self, Context context not None, size_t length, uint32_t log_align_req=0):
        cdef verbs.ibv_alloc_dm_attr attr
        cdef int rc
        self.unmade()
        context.usable()
        memset(&attr, 0, sizeof(attr))
        attr.length = length
        attr.log_align_req = log_align_req
        with nogil:
            rc = verbs.rn_alloc_dm(context.ptr, &attr, &self.ptr)
        check(rc, f"ibv_alloc_dm({length})")
        self.context = context
        self.length = length
        context.add_child()
        self.opened(DMS)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        return f"<DM {self.length} bytes of {self.context.name}>" if self.is_here() else f"<DM{state_of(self)}>"

    def __len__(self):
        return self.length

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_dm *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_free_dm(ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_free_dm")
        self.context.remove_child()
        self.destroyed()
        return 0

    def copy_to_dm(self, uint64_t offset, data):
        """Copy bytes into the device memory. Most devices require multiples of 4 for offset and length.

        :raises IndexError: the bytes do not fit
        """
        cdef Py_buffer view
        cdef int rc
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.usable()
            self.within("copy_to_dm", offset, <size_t>view.len)
            with nogil:
                rc = verbs.rn_memcpy_to_dm(self.ptr, offset, view.buf, <size_t>view.len)
            check(rc, "ibv_memcpy_to_dm")
        finally:
            PyBuffer_Release(&view)

    def copy_from_dm(self, uint64_t offset, size_t length):
        """Copy bytes out of the device memory. Most devices require multiples of 4 for offset and length.

        :raises IndexError: the range is not within the memory
        """
        cdef bytes data
        cdef char *target
        cdef int rc
        self.usable()
        self.within("copy_from_dm", offset, length)
        data = PyBytes_FromStringAndSize(NULL, length)
        target = PyBytes_AS_STRING(data)
        with nogil:
            rc = verbs.rn_memcpy_from_dm(target, self.ptr, offset, length)
        check(rc, "ibv_memcpy_from_dm")
        return data

    cdef int within(self, str call, uint64_t offset, size_t length) except -1:
        if offset > self.length or length > self.length - offset:
            raise IndexError(f"{call}: {length} bytes at offset {offset} are not within {self.length} bytes")
        return 0
