# Work requests: what is posted to a queue pair.
#
# A request is a list of buffers (scatter/gather elements) and what to do with them. Each element is
# checked against its region when it is made, so a slip of the pen is an IndexError here with the
# numbers in it, and not a protection error later without. The elements hold their regions, and the
# queue pair holds the elements of all that it has in flight: the device writes into them until the
# completion has been polled. That holds in a garbage cycle too, hence no_gc_clear all along the way.


class WROpcode(enum.IntEnum):
    """What a send request does."""
    RDMA_WRITE = verbs.IBV_WR_RDMA_WRITE
    RDMA_WRITE_WITH_IMM = verbs.IBV_WR_RDMA_WRITE_WITH_IMM
    SEND = verbs.IBV_WR_SEND
    SEND_WITH_IMM = verbs.IBV_WR_SEND_WITH_IMM
    RDMA_READ = verbs.IBV_WR_RDMA_READ
    ATOMIC_CMP_AND_SWP = verbs.IBV_WR_ATOMIC_CMP_AND_SWP
    ATOMIC_FETCH_AND_ADD = verbs.IBV_WR_ATOMIC_FETCH_AND_ADD
    LOCAL_INV = verbs.IBV_WR_LOCAL_INV
    BIND_MW = verbs.IBV_WR_BIND_MW
    SEND_WITH_INV = verbs.IBV_WR_SEND_WITH_INV
    TSO = verbs.IBV_WR_TSO
    FLUSH = verbs.IBV_WR_FLUSH
    ATOMIC_WRITE = verbs.IBV_WR_ATOMIC_WRITE


class SendFlags(enum.IntFlag):
    """How a send request is done."""
    NONE = 0
    FENCE = verbs.IBV_SEND_FENCE
    SIGNALED = verbs.IBV_SEND_SIGNALED
    SOLICITED = verbs.IBV_SEND_SOLICITED
    INLINE = verbs.IBV_SEND_INLINE
    IP_CSUM = verbs.IBV_SEND_IP_CSUM


@cython.final
@cython.no_gc_clear
cdef class SGE:
    """A scatter/gather element: length bytes at offset of a region.

    :param buffer: an MR; or any buffer, with the lkey of a region that covers it, or without one for
        a request with SendFlags.INLINE, whose bytes are copied while it is posted
    """

    cdef verbs.ibv_sge c
    cdef readonly object buffer  # the MR, or a memoryview that holds the export

    def __init__(self, buffer, size_t offset=0, length=None, *, lkey=None):
        cdef MR mr
        cdef Py_buffer view
        cdef size_t base, size, wanted
        if isinstance(buffer, MR):
            mr = buffer
            mr.usable()
            base, size = <size_t>mr.addr, mr.length
            self.c.lkey = mr.ptr.lkey if lkey is None else lkey
            self.buffer = mr
        else:
            self.buffer = memoryview(buffer)
            PyObject_GetBuffer(self.buffer, &view, PyBUF_SIMPLE)
            base, size = <size_t>view.buf, view.len
            PyBuffer_Release(&view)
            self.c.lkey = 0 if lkey is None else lkey
        if offset > size:
            raise IndexError(f"SGE: offset {offset} is past the end of {size} bytes")
        if length is None:
            wanted = size - offset
        elif length < 0:
            raise IndexError(f"SGE: length {length} is negative")
        else:
            wanted = length
        if wanted > size - offset:
            raise IndexError(f"SGE: {wanted} bytes at offset {offset} are more than the {size} bytes")
        if wanted > 0xffffffff:
            raise IndexError(f"SGE: {wanted} bytes do not fit in one element of at most {0xffffffff}")
        self.c.addr = base + offset
        self.c.length = wanted

    def __repr__(self):
        return f"<SGE {self.c.length} bytes at {self.c.addr:#x}, lkey {self.c.lkey:#x}>"

    @property
    def addr(self):
        return self.c.addr

    @property
    def length(self):
        return self.c.length

    @property
    def lkey(self):
        return self.c.lkey


@cython.final
@cython.no_gc_clear
cdef class _Elements:
    """The elements of a request, as the ABI wants them, with what keeps them valid."""

    cdef verbs.ibv_sge *sges
    cdef readonly tuple sg_list
    cdef int count
    cdef uint64_t total

    def __cinit__(self, *args, sg_list=(), **kwargs):
        cdef SGE sge
        cdef int i
        if isinstance(sg_list, (SGE, MR)):
            sg_list = (sg_list,)
        self.sg_list = tuple([e if isinstance(e, SGE) else SGE(e) for e in sg_list])
        self.count = len(self.sg_list)
        self.sges = <verbs.ibv_sge *>calloc(self.count or 1, sizeof(verbs.ibv_sge))
        if self.sges is NULL:
            raise MemoryError
        for i in range(self.count):
            sge = self.sg_list[i]
            self.sges[i] = sge.c
            self.total += sge.c.length

    def __dealloc__(self):
        free(self.sges)


cdef class RecvWR:
    """A receive request: buffers for one message.

    :param sg_list: SGEs or MRs, or one of them; they fill in order
    :param wr_id: anything; its completion brings it back
    """

    cdef verbs.ibv_recv_wr c
    cdef readonly object wr_id
    cdef _Elements elements

    def __init__(self, sg_list=(), *, wr_id=0):
        self.elements = _Elements(sg_list=sg_list)
        self.wr_id = wr_id
        self.c.sg_list = self.elements.sges
        self.c.num_sge = self.elements.count

    def __repr__(self):
        return f"<RecvWR wr_id {self.wr_id}, {self.elements.total} bytes in {self.elements.count} elements>"

    @property
    def sg_list(self):
        return self.elements.sg_list


cdef class SendWR:
    """A send request.

    :param opcode: what to do
    :param sg_list: the local side: SGEs or MRs, or one of them
    :param wr_id: anything; its completion brings it back
    :param flags: signaled by default; a request without SIGNALED gives no completion of its own, and its
        place in the queue comes free when a later one completes
    :param imm_data: 32 bits for SEND_WITH_IMM and RDMA_WRITE_WITH_IMM
    :param remote_addr: where, and
    :param rkey: by which key, for RDMA and atomics
    :param compare_add: what to compare with, or to add
    :param swap: what to store if it compares equal
    """

    cdef verbs.ibv_send_wr c
    cdef readonly object wr_id
    cdef _Elements elements

    def __init__(self, opcode, sg_list=(), *, wr_id=0, int flags=verbs.IBV_SEND_SIGNALED, uint32_t imm_data=0,
                 uint64_t remote_addr=0, uint32_t rkey=0, uint64_t compare_add=0, uint64_t swap=0):
        cdef int code = opcode
        self.elements = _Elements(sg_list=sg_list)
        self.wr_id = wr_id
        self.c.sg_list = self.elements.sges
        self.c.num_sge = self.elements.count
        self.c.opcode = <verbs.ibv_wr_opcode>code
        self.c.send_flags = flags
        self.c.imm_data = htonl(imm_data)
        if code == verbs.IBV_WR_ATOMIC_CMP_AND_SWP or code == verbs.IBV_WR_ATOMIC_FETCH_AND_ADD:
            self.c.wr.atomic.remote_addr = remote_addr
            self.c.wr.atomic.compare_add = compare_add
            self.c.wr.atomic.swap = swap
            self.c.wr.atomic.rkey = rkey
        else:
            self.c.wr.rdma.remote_addr = remote_addr
            self.c.wr.rdma.rkey = rkey

    def __repr__(self):
        return (f"<SendWR {self.opcode!r} wr_id {self.wr_id}, {self.elements.total} bytes in "
                f"{self.elements.count} elements, {self.flags!r}>")

    @property
    def opcode(self):
        return enum_of(WROpcode, self.c.opcode)

    @property
    def flags(self):
        return SendFlags(self.c.send_flags)

    @property
    def sg_list(self):
        return self.elements.sg_list


# ---- In flight ----------------------------------------------------------------------------------
#
# wr_id on the device: 63..48 generation of the queue pair, 47..1 position, 0 which queue (1 = send).

cdef enum:
    QP_GENERATION_SHIFT = 48

cdef uint64_t POSITION_MASK = ((<uint64_t>1) << 47) - 1


@cython.final
@cython.no_gc_clear
cdef class _InFlight:
    """One queue of a queue pair: what is posted and not yet seen to end, in order."""

    cdef object entries        # deque of (position, the user's wr_id, elements)
    cdef uint64_t tag          # generation and queue
    cdef uint64_t next_position

    def __init__(self, uint64_t generation, bint send):
        self.entries = collections.deque()
        self.tag = generation << QP_GENERATION_SHIFT | send

    cdef uint64_t begin(self, object wr_id, _Elements elements) except? 0:
        """The device's wr_id for a request about to be posted."""
        cdef uint64_t position = self.next_position & POSITION_MASK
        self.next_position += 1
        self.entries.append((position, wr_id, elements))
        return self.tag | position << 1

    cdef void take_back(self, int count):
        """The last count requests were refused."""
        for _ in range(count):
            self.entries.pop()
        self.next_position -= count

    cdef object end(self, uint64_t device_wr_id):
        """The user's wr_id. Requests before it, which gave no completion of their own, end with it."""
        cdef uint64_t position = device_wr_id >> 1 & POSITION_MASK
        while self.entries:
            entry = self.entries.popleft()
            if entry[0] == position:
                return entry[1]
        return None
