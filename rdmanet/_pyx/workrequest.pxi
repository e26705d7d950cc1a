# Work requests, which are posted to queue pairs.
#
# A request is a list of buffers (scatter/gather elements) and an operation on them. Each element is checked against its
# region when it is created, so a mistake is an IndexError with the numbers, and not a protection error later. The
# elements hold their regions, and a queue pair holds the elements of all its requests in flight, because the device may
# write into them until the completion has been polled. This must hold in a garbage cycle as well, hence no_gc_clear on
# every class in between.


@cython.final
@cython.no_gc_clear
cdef class SGE:
    """A scatter/gather element: length bytes at offset of a region.

    :param buffer: an MR, a PooledBuffer, or a part of one as `memoryview(mr)[a:b]`; or any buffer, with the lkey of a
        region that covers it, or without an lkey for a request with SendFlags.INLINE, which copies the bytes when it is
        posted
    :param offset: in bytes, from the buffer's beginning
    :param length: in bytes; None is the rest
    :raises IndexError: the part is not within the buffer
    :raises TypeError: it is not a buffer
    """

    cdef verbs.ibv_sge c
    cdef uint64_t here           # where its first byte is in this process
    cdef bint elsewhere          # it is in no memory of this process
    cdef readonly object buffer  # the MR, or a memoryview that holds the export

    def __init__(self, buffer, offset=0, length=None, *, lkey=None):
        cdef MR mr = None           # whose addresses the request has
        cdef Py_buffer view
        cdef size_t base, size, wanted, start
        read_size(offset, "SGE: offset", IndexError, &start)
        if isinstance(buffer, MR):
            mr = buffer
            mr.usable()
            base, size = <size_t>mr.addr, mr.length
            self.c.lkey = mr.ptr.lkey if lkey is None else lkey
            self.buffer = mr
            self.elsewhere = mr.not_here is not None and not mr.is_implicit()
            if self.c.lkey != mr.ptr.lkey and not self.elsewhere:
                mr = None
        else:
            self.buffer = memoryview(buffer)
            PyObject_GetBuffer(self.buffer, &view, PyBUF_SIMPLE)
            base, size = <size_t>view.buf, view.len
            PyBuffer_Release(&view)
            self.c.lkey = 0 if lkey is None else lkey
            if isinstance(self.buffer.obj, MR) and lkey in (None, (<MR>self.buffer.obj).ptr.lkey):
                mr = self.buffer.obj
                self.c.lkey, self.buffer = mr.ptr.lkey, mr
            elif lkey is None and isinstance(self.buffer.obj, PooledBuffer):
                self.c.lkey = (<PooledBuffer>self.buffer.obj).pool.mr.lkey     # its export stays: it is in use
        if start > size:
            raise IndexError(f"SGE: offset {start} is past the end of {size} bytes")
        if length is None:
            wanted = size - start
        else:
            read_size(length, "SGE: length", IndexError, &wanted)
        if wanted > size - start:
            raise IndexError(f"SGE: {wanted} bytes at offset {start} are not within {size} bytes")
        if wanted > 0xffffffff:
            raise IndexError(f"SGE: {wanted} bytes do not fit in one element, which has at most {0xffffffff}")
        self.here = base + start
        self.c.addr = self.here if mr is None else self.here - <uint64_t><uintptr_t>mr.addr + mr.iova
        self.c.length = wanted

    def __repr__(self):
        return f"<SGE {self.c.length} bytes at {self.c.addr:#x}, lkey {self.c.lkey:#x}>"

    @property
    def addr(self):
        """The address of its first byte: in the process, or from 0 on in a region with AccessFlags.ZERO_BASED."""
        return self.c.addr

    @property
    def length(self):
        """Its length in bytes."""
        return self.c.length

    @property
    def lkey(self):
        """The lkey of the region; 0 if there is none."""
        return self.c.lkey


# Of wire/remote.py, from the first call of load_remote() on: that imports msgspec, which takes long (base/bodies.py).
cdef object RemoteMemory = None
cdef object bounds = None


cdef int load_remote() except -1:
    global RemoteMemory, bounds
    if RemoteMemory is None:
        from rdmanet.wire import remote
        bounds, RemoteMemory = remote.bounds, remote.RemoteMemory
    return 0


@cython.final
cdef class _Slices:
    """mr.at"""

    cdef MR mr

    def __init__(self, MR mr not None):
        self.mr = mr

    def __getitem__(self, key):
        load_remote()
        start, stop = bounds(key, self.mr.length, "bytes")
        return SGE(self.mr, start, stop - start)


@cython.final
@cython.no_gc_clear
cdef class _Elements:
    """The elements of a request as the ABI needs them, and the references that keep them valid."""

    cdef verbs.ibv_sge few[2]
    cdef verbs.ibv_sge *sges
    cdef readonly tuple sg_list
    cdef int count
    cdef uint64_t total
    cdef bint unregistered       # some elements have no lkey: for INLINE only
    cdef bint translated         # some addresses are not those of this process
    cdef object others           # what else the request names: an address handle, a window and its region

    def __cinit__(self):
        self.sges = self.few
        self.sg_list = ()

    def __dealloc__(self):
        if self.sges is not self.few:
            free(self.sges)

    cdef int inline_data(self) except -1:
        """For INLINE: the library reads the bytes from this process, whatever the region."""
        cdef SGE sge
        cdef int i = 0
        if self.translated:
            for sge in self.sg_list:
                if sge.elsewhere and sge.c.length:
                    raise ValueError(f"{sge!r} cannot be sent inline: {sge.buffer!r} has no memory in this process")
                self.sges[i].addr = sge.here
                i += 1
        return 0


cdef _Elements elements_of(sg_list):
    """The elements of a list, or of a single object in place of a list."""
    cdef _Elements elements = _Elements.__new__(_Elements)
    cdef SGE sge
    cdef int i = 0
    if isinstance(sg_list, SGE):
        elements.sg_list = (sg_list,)
    elif PyObject_CheckBuffer(sg_list):
        elements.sg_list = (SGE(sg_list),)
    else:
        elements.sg_list = tuple([e if isinstance(e, SGE) else SGE(e) for e in sg_list])
    elements.count = len(elements.sg_list)
    if elements.count > 2:
        elements.sges = <verbs.ibv_sge *>malloc(elements.count * sizeof(verbs.ibv_sge))
        if elements.sges is NULL:
            elements.sges = elements.few
            raise MemoryError
    for sge in elements.sg_list:
        elements.sges[i] = sge.c
        elements.total += sge.c.length
        elements.translated |= sge.elsewhere or sge.here != sge.c.addr
        if not isinstance(sge.buffer, MR) and not sge.c.lkey:
            elements.unregistered = True
        i += 1
    return elements


cdef class RecvWR:
    """A receive request: buffers for one message.

    :param sg_list: SGEs, MRs or memoryviews of MRs, or one of them; they are filled in order
    :param wr_id: any object; the completion has the same
    """

    cdef verbs.ibv_recv_wr c
    cdef readonly object wr_id
    cdef _Elements elements

    def __init__(self, sg_list=(), *, wr_id=0):
        self.elements = elements_of(sg_list)
        self.wr_id = wr_id
        self.c.sg_list = self.elements.sges
        self.c.num_sge = self.elements.count

    def __repr__(self):
        if self.elements is None:
            return "<RecvWR that was not initialized>"
        return f"<RecvWR wr_id {self.wr_id}, {self.elements.total} bytes in {self.elements.count} elements>"

    @property
    def sg_list(self):
        """Its elements."""
        return () if self.elements is None else self.elements.sg_list


cdef int check_receives(list requests) except -1:
    """Raise unless all are RecvWRs."""
    cdef RecvWR wr
    for wr in requests:
        if wr is None or wr.elements is None:
            raise TypeError(f"{shown(wr)} is not a RecvWR")
    return 0


cdef class SendWR:
    """A send request; see ibv_post_send(3).

    :param opcode: a WROpcode
    :param sg_list: the local side: SGEs, MRs or memoryviews of MRs, or one of them
    :param wr_id: any object; the completion has the same
    :param flags: signaled by default; a request without SIGNALED gives no completion of its own, and its
        place in the queue comes free when a later one completes
    :param imm_data: 32 bits for SEND_WITH_IMM and RDMA_WRITE_WITH_IMM
    :param remote_addr: the address in the peer's memory, for RDMA and atomics
    :param rkey: its key, for RDMA and atomics; for BIND_MW the new key of the window
    :param compare_add: the value to compare with, or to add
    :param swap: the value to store if the comparison is equal
    :param ah: for a datagram: the AH of its destination
    :param remote_qpn: for a datagram: the number of the destination's queue pair
    :param remote_qkey: for a datagram: the key that the destination expects
    :param remote_srqn: the number of the shared receive queue, for XRC
    :param invalidate_rkey: the key that LOCAL_INV invalidates here, or SEND_WITH_INV at the peer
    :param mw: the window that BIND_MW binds
    :param bind_info: an MWBindInfo: what BIND_MW binds the window to
    :param atomic_data: the 8 bytes of ATOMIC_WRITE
    """

    cdef verbs.ibv_send_wr c
    cdef verbs.rn_wr_more more
    cdef readonly object wr_id
    cdef _Elements elements
    cdef AH ah
    cdef MW mw
    cdef object bind_info

    def __init__(self, opcode, sg_list=(), *, wr_id=0, int flags=verbs.IBV_SEND_SIGNALED, uint32_t imm_data=0,
                 uint64_t remote_addr=0, uint32_t rkey=0, uint64_t compare_add=0, uint64_t swap=0,
                 AH ah=None, uint32_t remote_qpn=0, uint32_t remote_qkey=0, uint32_t remote_srqn=0,
                 uint32_t invalidate_rkey=0, MW mw=None, bind_info=None, atomic_data=None):
        cdef int code = opcode
        cdef bytes data
        self.elements = elements_of(sg_list)
        self.wr_id = wr_id
        self.c.sg_list = self.elements.sges
        self.c.num_sge = self.elements.count
        self.c.opcode = <verbs.ibv_wr_opcode>code
        self.c.send_flags = flags
        if flags & verbs.IBV_SEND_INLINE:
            self.elements.inline_data()
        if code == verbs.IBV_WR_LOCAL_INV or code == verbs.IBV_WR_SEND_WITH_INV:
            self.c.invalidate_rkey = invalidate_rkey
        else:
            self.c.imm_data = htonl(imm_data)
        if code == verbs.IBV_WR_ATOMIC_CMP_AND_SWP or code == verbs.IBV_WR_ATOMIC_FETCH_AND_ADD:
            self.c.wr.atomic.remote_addr = remote_addr
            self.c.wr.atomic.compare_add = compare_add
            self.c.wr.atomic.swap = swap
            self.c.wr.atomic.rkey = rkey
        elif ah is not None:
            ah.usable()
            self.ah = self.elements.others = ah
            self.c.wr.ud.ah = ah.ptr
            self.c.wr.ud.remote_qpn = remote_qpn
            self.c.wr.ud.remote_qkey = remote_qkey
        else:
            self.c.wr.rdma.remote_addr = remote_addr
            self.c.wr.rdma.rkey = rkey
        self.c.qp_type.xrc.remote_srqn = remote_srqn
        if code == verbs.IBV_WR_BIND_MW:
            if mw is None or bind_info is None:
                raise ValueError("SendWR: BIND_MW needs mw and bind_info")
            mw.usable()
            self.mw, self.bind_info = mw, bind_info
            self.elements.others = (mw, bind_info)
            self.c.bind_mw.mw = mw.ptr
            self.c.bind_mw.rkey = rkey
            fill_bind_info(&self.c.bind_mw.bind_info, bind_info)
        if atomic_data is not None:
            data = copy_of(atomic_data)
            if len(data) != 8:
                raise ValueError(f"SendWR: atomic_data has {len(data)} bytes, ATOMIC_WRITE needs 8")
            memcpy(self.more.atomic_write, <const char *>data, 8)

    cdef int usable(self, Context context) except -1:
        """Raise if an object that the request points to is closed, or belongs to another context."""
        if self.ah is not None:
            self.ah.usable()
            same_library(context, self.ah.pd.context)
        if self.mw is not None:
            check_binding(context, self.mw, self.bind_info)
        return 0

    cdef object remote(self):
        """(address, length, rkey) of the peer's memory, if the request accesses any."""
        cdef int code = self.c.opcode
        if code in (verbs.IBV_WR_RDMA_WRITE, verbs.IBV_WR_RDMA_WRITE_WITH_IMM, verbs.IBV_WR_RDMA_READ):
            return self.c.wr.rdma.remote_addr, self.elements.total, self.c.wr.rdma.rkey
        if code == verbs.IBV_WR_ATOMIC_WRITE:
            return self.c.wr.rdma.remote_addr, 8, self.c.wr.rdma.rkey
        if code in (verbs.IBV_WR_ATOMIC_CMP_AND_SWP, verbs.IBV_WR_ATOMIC_FETCH_AND_ADD):
            return self.c.wr.atomic.remote_addr, 8, self.c.wr.atomic.rkey
        return None

    def __repr__(self):
        if self.elements is None:
            return "<SendWR that was not initialized>"
        return (f"<SendWR {self.opcode!r} wr_id {self.wr_id}, {self.elements.total} bytes in "
                f"{self.elements.count} elements, {self.flags!r}>")

    @property
    def opcode(self):
        """Its operation, a WROpcode."""
        return enum_of(core.WROpcode, self.c.opcode)

    @property
    def flags(self):
        """Its SendFlags."""
        return core.SendFlags(self.c.send_flags)

    @property
    def sg_list(self):
        """Its elements."""
        return () if self.elements is None else self.elements.sg_list


cdef str refusal(str call, int rc, object wr, object queue, int index, int count):
    """What a queue says of the first of these requests that it does not take."""
    text = f"{call}: {strerror(-rc).decode()}: {wr!r} on {queue!r}"
    return f"{text}; {index} of {count} were posted" if count > 1 else text


cdef SendWR awaited_send(int opcode, sg_list, int flags, uint32_t imm_data, uint32_t max_inline):
    """A SendWR, without the detour by keywords. What is in no region is sent inline."""
    cdef SendWR wr = SendWR.__new__(SendWR)
    wr.wr_id = 0
    wr.elements = elements_of(sg_list)
    wr.c.sg_list = wr.elements.sges
    wr.c.num_sge = wr.elements.count
    wr.c.opcode = <verbs.ibv_wr_opcode>opcode
    wr.c.send_flags = flags | verbs.IBV_SEND_SIGNALED
    wr.c.imm_data = htonl(imm_data)
    if wr.elements.unregistered and not wr.c.send_flags & verbs.IBV_SEND_INLINE:
        if opcode == verbs.IBV_WR_RDMA_READ or wr.elements.total > max_inline:
            raise ValueError(f"{wr!r}: memory that is in no region can be sent inline only, here up to "
                             f"{max_inline} bytes; register it (pd.reg_mr())")
        wr.c.send_flags |= verbs.IBV_SEND_INLINE
    if wr.c.send_flags & verbs.IBV_SEND_INLINE:
        wr.elements.inline_data()
    return wr
