# Work requests, which are posted to queue pairs.
#
# A request is a list of buffers (scatter/gather elements) and an operation on them. Each element is checked against its
# region when it is created, so a mistake is an IndexError with the numbers, and not a protection error later. The
# elements hold their regions, and a queue pair holds the elements of all its requests in flight, because the device may
# write into them until the completion has been polled. This must hold in a garbage cycle as well, hence no_gc_clear on
# every class in between.


class WROpcode(enum.IntEnum):
    """The operation of a send request."""
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
    """Options of a send request."""
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

    :param buffer: an MR, a PooledBuffer, or a part of one as `memoryview(mr)[a:b]`; or any buffer, with the lkey of a
        region that covers it, or without an lkey for a request with SendFlags.INLINE, which copies the bytes when it is
        posted
    :param offset: in bytes, from the buffer's beginning
    :param length: in bytes; None is the rest
    :raises IndexError: the part is not within the buffer
    :raises TypeError: it is not a buffer
    """

    cdef verbs.ibv_sge c
    cdef readonly object buffer  # the MR, or a memoryview that holds the export

    def __init__(self, buffer, offset=0, length=None, *, lkey=None):
        cdef MR mr
        cdef Py_buffer view
        cdef size_t base, size, wanted, start
        read_size(offset, "SGE: offset", IndexError, &start)
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
            if lkey is None and isinstance(self.buffer.obj, MR):
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
        self.c.addr = base + start
        self.c.length = wanted

    def __repr__(self):
        return f"<SGE {self.c.length} bytes at {self.c.addr:#x}, lkey {self.c.lkey:#x}>"

    @property
    def addr(self):
        """The address of its first byte, in the address space of the process or of the region."""
        return self.c.addr

    @property
    def length(self):
        """Its length in bytes."""
        return self.c.length

    @property
    def lkey(self):
        """The lkey of the region; 0 if there is none."""
        return self.c.lkey


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
    cdef object others           # what else the request names: an address handle, a window and its region

    def __cinit__(self):
        self.sges = self.few
        self.sg_list = ()

    def __dealloc__(self):
        if self.sges is not self.few:
            free(self.sges)


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
            raise TypeError(f"{wr!r} is not a RecvWR")
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
        return enum_of(WROpcode, self.c.opcode)

    @property
    def flags(self):
        """Its SendFlags."""
        return SendFlags(self.c.send_flags)

    @property
    def sg_list(self):
        """Its elements."""
        return () if self.elements is None else self.elements.sg_list


# ---- In flight ----------------------------------------------------------------------------------
#
# By the wr_ids that routing.pxi describes.

# Storing into and taking out of a list. Most of the cost of posting and polling in Python is reference counting, and
# most of that would be for None. So an empty entry contains None, and its reference is kept while the entry is in use.
cdef extern from *:
    """
    static inline void rn_pair_put(PyObject *list, Py_ssize_t i, PyObject *wr_id, PyObject *kept)
    {
        Py_INCREF(wr_id);
        Py_INCREF(kept);
        PyList_SET_ITEM(list, i, wr_id);
        PyList_SET_ITEM(list, i + 1, kept);
    }

    static inline PyObject *rn_pair_take(PyObject *list, Py_ssize_t i)
    {
        PyObject *wr_id = PyList_GET_ITEM(list, i);
        PyObject *kept = PyList_GET_ITEM(list, i + 1);

        PyList_SET_ITEM(list, i, Py_None);
        PyList_SET_ITEM(list, i + 1, Py_None);
        Py_DECREF(kept); /* may run arbitrary code, so it comes last */
        return wr_id;
    }
    """
    void rn_pair_put(list ring, Py_ssize_t i, object wr_id, object kept)    # the entry must be empty
    object rn_pair_take(list ring, Py_ssize_t i)                            # the entry must not be empty
    PyObject *PyList_GET_ITEM(list items, Py_ssize_t i)


@cython.final
@cython.no_gc_clear
cdef class _InFlight:
    """The requests of one queue of a queue pair that are posted and whose completions have not been polled, in order.

    A ring of pairs: the user's wr_id, and the object to keep alive, which is None only in an empty entry. It is an
    ordinary list, so that the collector can traverse it. If room() has returned true, begin() needs no allocation, so
    no other thread and no destructor runs between the requests of one chain.

    A completion ends all requests before its own, because a queue completes in the order of posting. There are two
    exceptions, in which a signaled request waits for its own completion. Linux's soft-iWARP completes requests that
    were posted after a READ before the READ. The receives of a datagram queue pair of the embedded device complete in
    the order in which their senders, which take one each, have finished with them.
    """

    cdef list ring
    cdef bytearray waits       # per entry: 1 if others may overtake it; None if nothing overtakes
    cdef bint all_wait         # all entries wait for their own completions (datagram receives); else only READs
    cdef bint all_signaled
    cdef uint64_t tag          # generation and queue
    cdef uint64_t oldest, next_position
    cdef uint64_t places       # a power of two
    cdef list queues           # weak references to the OperationQueues whose operations wait for room here

    def __init__(self, uint64_t generation, bint send, bint overtakes=False, bint all_signaled=False):
        self.places = 16
        self.ring = [None] * 32
        self.queues = []
        self.tag = generation << QP_GENERATION_SHIFT | send
        if overtakes:
            self.waits = bytearray(16)
        self.all_wait = overtakes and not send
        self.all_signaled = all_signaled

    cdef inline Py_ssize_t count(self) noexcept:
        return <Py_ssize_t>(self.next_position - self.oldest)

    cdef inline bint room(self, Py_ssize_t n) noexcept:
        return self.next_position - self.oldest + n <= self.places

    cdef int grow(self, Py_ssize_t n) except -1:
        """Make room for n more."""
        cdef uint64_t places = self.places, position
        cdef Py_ssize_t i, was
        cdef list ring
        cdef bytearray waits = None
        while places < self.next_position - self.oldest + n:
            places *= 2
        ring = [None] * (2 * places)
        if self.waits is not None:
            waits = bytearray(places)
        # Creating the list may have run arbitrary code; nothing does from here on.
        if places <= self.places or places < self.next_position - self.oldest:
            return 0
        for position in range(self.oldest, self.next_position):
            was, i = 2 * (position & (self.places - 1)), 2 * (position & (places - 1))
            if self.ring[was + 1] is not None:
                rn_pair_put(ring, i, self.ring[was], self.ring[was + 1])
                rn_pair_take(self.ring, was)
            if waits is not None:
                waits[position & (places - 1)] = self.waits[position & (self.places - 1)]
        self.ring, self.waits, self.places = ring, waits, places
        return 0

    cdef inline uint64_t begin(self, object wr_id, object kept) noexcept:
        """The device's wr_id for a request about to be posted; there must be room."""
        cdef uint64_t position = self.next_position
        cdef Py_ssize_t i = 2 * (position & (self.places - 1))
        self.next_position += 1
        rn_pair_put(self.ring, i, wr_id, kept)
        if self.waits is not None:
            self.waits[position & (self.places - 1)] = self.all_wait
        return self.tag | (position & POSITION_MASK) << POSITION_SHIFT

    cdef inline void may_be_overtaken(self, const verbs.ibv_send_wr *wr) noexcept:
        """Mark the request that began last, if later ones may overtake it: a signaled READ."""
        if (self.waits is not None and wr.opcode == verbs.IBV_WR_RDMA_READ
                and (self.all_signaled or wr.send_flags & verbs.IBV_SEND_SIGNALED)):
            self.waits[(self.next_position - 1) & (self.places - 1)] = 1

    cdef int take_back(self, Py_ssize_t count) except -1:
        """Remove the last count requests, which were refused. Their caller holds the objects, so no destructor runs."""
        for _ in range(count):
            self.next_position -= 1
            rn_pair_take(self.ring, 2 * (self.next_position & (self.places - 1)))
        return 0

    cdef object end(self, uint64_t device_wr_id):
        """The user's wr_id. Unsignaled requests before it end with it."""
        cdef uint64_t ahead = ((device_wr_id >> POSITION_SHIFT) - self.oldest) & POSITION_MASK
        cdef uint64_t last = self.oldest + ahead
        if ahead >= self.next_position - self.oldest:
            return None     # it was dropped
        if self.waits is not None:
            return self.end_but_waiting(last)
        while self.oldest < last:
            self.oldest += 1
            rn_pair_take(self.ring, 2 * ((self.oldest - 1) & (self.places - 1)))
        if self.oldest != last:
            return None     # a destructor of a released object has polled, or closed the queue pair
        self.oldest += 1
        return rn_pair_take(self.ring, 2 * (last & (self.places - 1)))

    cdef object end_but_waiting(self, uint64_t last):
        """The same, except that earlier requests that wait for their own completions stay."""
        cdef uint64_t position
        cdef Py_ssize_t i
        cdef list dropped = []  # released at the end
        cdef object wr_id = None
        for position in range(self.oldest, last + 1):
            i = position & (self.places - 1)
            if self.ring[2 * i + 1] is None or (position != last and self.waits[i]):
                continue
            dropped.append(self.ring[2 * i + 1])
            wr_id = rn_pair_take(self.ring, 2 * i)
            dropped.append(wr_id)
        # An ended request keeps nothing alive.
        while self.oldest < self.next_position and self.ring[2 * (self.oldest & (self.places - 1)) + 1] is None:
            self.oldest += 1
        return wr_id

    cdef int clear(self) except -1:
        """Drop all requests. The awaiters of operations get an error."""
        cdef list ring = self.ring
        cdef OperationQueue queue
        cdef Py_ssize_t i
        cdef object wr_id
        self.places = 16
        self.ring = [None] * 32
        if self.waits is not None:
            self.waits = bytearray(16)
        self.oldest = self.next_position
        for i in range(0, len(ring), 2):
            if ring[i + 1] is not None:
                wr_id = rn_pair_take(ring, i)
                if type(wr_id) is Operation:
                    (<Operation>wr_id).lost()
        for reference in self.queues:
            queue = reference()
            if queue is not None:
                queue.emptied()
        return 0


@cython.final
@cython.no_gc_clear
cdef class _Shared:
    """The receives of an SRQ, which complete in any order."""

    cdef dict entries          # position to (the user's wr_id, elements)
    cdef uint64_t tag
    cdef uint64_t next_position

    def __init__(self, uint64_t generation):
        self.entries = {}
        self.tag = generation << QP_GENERATION_SHIFT | WR_SHARED

    cdef uint64_t begin(self, object wr_id, _Elements elements) except? 0:
        cdef uint64_t position = self.next_position & POSITION_MASK
        self.next_position += 1
        self.entries[position] = (wr_id, elements)
        return self.tag | position << POSITION_SHIFT

    cdef object end(self, uint64_t device_wr_id):
        entry = self.entries.pop(device_wr_id >> POSITION_SHIFT & POSITION_MASK, None)
        return None if entry is None else entry[0]
