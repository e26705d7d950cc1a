# Completion channels, completion queues, and what comes out of them.
#
# A completion queue (CQ) is polled. To sleep instead, it is armed (req_notify), polled once more,
# because what was there before arming gives no event, and then its channel's fd is awaited. Each
# event read from the channel counts on its CQ and must be acknowledged before the CQ can be destroyed;
# acknowledging takes a lock, so it is done in batches, and close() does the rest.
#
# The wr_id that the device carries is ours, not the user's: generation of the queue pair (or of the shared
# receive queue), position in its send or receive queue, and which. So a completion finds its entry in the queue pair's
# in-flight table (the user's wr_id, and the buffers that were kept alive), also when it failed and its
# opcode means nothing. A completion of a queue pair that is gone is counted and dropped.


class WCStatus(enum.IntEnum):
    """How a work request ended."""
    SUCCESS = verbs.IBV_WC_SUCCESS
    LOC_LEN_ERR = verbs.IBV_WC_LOC_LEN_ERR
    LOC_QP_OP_ERR = verbs.IBV_WC_LOC_QP_OP_ERR
    LOC_EEC_OP_ERR = verbs.IBV_WC_LOC_EEC_OP_ERR
    LOC_PROT_ERR = verbs.IBV_WC_LOC_PROT_ERR
    WR_FLUSH_ERR = verbs.IBV_WC_WR_FLUSH_ERR
    MW_BIND_ERR = verbs.IBV_WC_MW_BIND_ERR
    BAD_RESP_ERR = verbs.IBV_WC_BAD_RESP_ERR
    LOC_ACCESS_ERR = verbs.IBV_WC_LOC_ACCESS_ERR
    REM_INV_REQ_ERR = verbs.IBV_WC_REM_INV_REQ_ERR
    REM_ACCESS_ERR = verbs.IBV_WC_REM_ACCESS_ERR
    REM_OP_ERR = verbs.IBV_WC_REM_OP_ERR
    RETRY_EXC_ERR = verbs.IBV_WC_RETRY_EXC_ERR
    RNR_RETRY_EXC_ERR = verbs.IBV_WC_RNR_RETRY_EXC_ERR
    LOC_RDD_VIOL_ERR = verbs.IBV_WC_LOC_RDD_VIOL_ERR
    REM_INV_RD_REQ_ERR = verbs.IBV_WC_REM_INV_RD_REQ_ERR
    REM_ABORT_ERR = verbs.IBV_WC_REM_ABORT_ERR
    INV_EECN_ERR = verbs.IBV_WC_INV_EECN_ERR
    INV_EEC_STATE_ERR = verbs.IBV_WC_INV_EEC_STATE_ERR
    FATAL_ERR = verbs.IBV_WC_FATAL_ERR
    RESP_TIMEOUT_ERR = verbs.IBV_WC_RESP_TIMEOUT_ERR
    GENERAL_ERR = verbs.IBV_WC_GENERAL_ERR
    TM_ERR = verbs.IBV_WC_TM_ERR
    TM_RNDV_INCOMPLETE = verbs.IBV_WC_TM_RNDV_INCOMPLETE


class WCOpcode(enum.IntEnum):
    """What completed. Only a successful completion says."""
    SEND = verbs.IBV_WC_SEND
    RDMA_WRITE = verbs.IBV_WC_RDMA_WRITE
    RDMA_READ = verbs.IBV_WC_RDMA_READ
    COMP_SWAP = verbs.IBV_WC_COMP_SWAP
    FETCH_ADD = verbs.IBV_WC_FETCH_ADD
    BIND_MW = verbs.IBV_WC_BIND_MW
    LOCAL_INV = verbs.IBV_WC_LOCAL_INV
    TSO = verbs.IBV_WC_TSO
    FLUSH = verbs.IBV_WC_FLUSH
    ATOMIC_WRITE = verbs.IBV_WC_ATOMIC_WRITE
    RECV = verbs.IBV_WC_RECV
    RECV_RDMA_WITH_IMM = verbs.IBV_WC_RECV_RDMA_WITH_IMM


class WCFlags(enum.IntFlag):
    """What a completion has besides: a routing header before its data, 32 bits, a key made invalid."""
    GRH = verbs.IBV_WC_GRH
    WITH_IMM = verbs.IBV_WC_WITH_IMM
    IP_CSUM_OK = verbs.IBV_WC_IP_CSUM_OK
    WITH_INV = verbs.IBV_WC_WITH_INV


cdef extern from "<arpa/inet.h>" nogil:
    uint32_t ntohl(uint32_t value)
    uint32_t htonl(uint32_t value)


@cython.final
cdef class _Rare:
    """What few completions have. Fields of its own would cost every completion."""

    cdef SRQ srq
    cdef object timestamp
    cdef object wallclock_ns


@cython.final
@cython.freelist(64)
cdef class WC:
    """A work completion: one work request has ended. Fields as in struct ibv_wc; see ibv_poll_cq(3).

    Of a failed one only status, vendor_err, wr_id, qp_num and whose it is mean something.

    :ivar wr_id: what its request had as wr_id
    :ivar qp: the queue pair, None where it is gone or another process's
    """

    cdef verbs.ibv_wc c
    cdef readonly object wr_id
    cdef readonly QP qp
    cdef _Rare rare     # None, mostly

    @property
    def is_send(self):
        """Whether it was in the send queue."""
        return bool(self.c.wr_id & WR_SEND)

    @property
    def srq(self):
        """The shared queue that the receive was of, or None."""
        return None if self.rare is None else self.rare.srq

    @property
    def timestamp(self):
        """When, on the device's clock, of a CQEX with WITH_COMPLETION_TIMESTAMP; else None."""
        return None if self.rare is None else self.rare.timestamp

    @property
    def wallclock_ns(self):
        """When, in nanoseconds since 1970, with WITH_COMPLETION_TIMESTAMP_WALLCLOCK; else None."""
        return None if self.rare is None else self.rare.wallclock_ns

    def __repr__(self):
        if self.c.status != verbs.IBV_WC_SUCCESS:
            side = "send" if self.is_send else "receive"
            return f"<WC {side} wr_id {self.wr_id} {self.status!r} on qp {self.c.qp_num:#x}>"
        return f"<WC {self.opcode!r} wr_id {self.wr_id} {self.c.byte_len} bytes on qp {self.c.qp_num:#x}>"

    @property
    def status(self):
        """How it ended, a WCStatus."""
        return enum_of(WCStatus, self.c.status)

    @property
    def opcode(self):
        """What completed; None when it failed, since the device does not say."""
        return enum_of(WCOpcode, self.c.opcode) if self.c.status == verbs.IBV_WC_SUCCESS else None

    @property
    def byte_len(self):
        """How many bytes were received, or read; of other sends it means nothing."""
        return self.c.byte_len

    @property
    def imm_data(self):
        """The 32 bits that came along, or None."""
        if self.c.status != verbs.IBV_WC_SUCCESS or not self.c.wc_flags & verbs.IBV_WC_WITH_IMM:
            return None
        return ntohl(self.c.imm_data)

    @property
    def invalidated_rkey(self):
        """The key that the peer's SEND_WITH_INV made invalid, or None."""
        if self.c.status != verbs.IBV_WC_SUCCESS or not self.c.wc_flags & verbs.IBV_WC_WITH_INV:
            return None
        return self.c.invalidated_rkey

    @property
    def qp_num(self):
        """The number of the queue pair."""
        return self.c.qp_num

    @property
    def pkey_index(self):
        """Of a datagram on InfiniBand: the index of its partition key."""
        return self.c.pkey_index

    @property
    def slid(self):
        """Of a datagram on InfiniBand: the sender's local identifier."""
        return self.c.slid

    @property
    def sl(self):
        """Of a datagram: its service level."""
        return self.c.sl

    @property
    def dlid_path_bits(self):
        """Of a datagram on InfiniBand: which of the port's local identifiers it came to."""
        return self.c.dlid_path_bits

    @property
    def src_qp(self):
        """Of a datagram: the sender's queue pair."""
        return self.c.src_qp

    @property
    def vendor_err(self):
        """Of a failed one: the maker's code, for its support."""
        return self.c.vendor_err

    @property
    def wc_flags(self):
        """What it has besides, as WCFlags."""
        return WCFlags(self.c.wc_flags & 0xf)

    def raise_for_status(self):
        """Nothing, when the work succeeded.

        :raises CompletionError: it did not; where the peer is gone, it is a ConnectionResetError too
        """
        if self.c.status != verbs.IBV_WC_SUCCESS:
            raise completion_error(
                self.c.status, "send" if self.is_send else "receive", self.c.vendor_err, self.c.qp_num,
                peer_gone=self.lost_its_peer(),
            )

    cdef bint lost_its_peer(self) except -1:
        """Whether it failed because the peer's process has ended, as far as that is known."""
        return self.qp is not None and self.qp.lost_its_peer()


@cython.no_gc_clear
cdef class CompChannel(Resource):
    """A completion channel: a descriptor that is readable when an armed CQ has something.

    :param context: the device
    :raises OSError: EMFILE or ENFILE, when there are no more descriptors
    """

    cdef verbs.ibv_comp_channel *ptr
    cdef readonly Context context
    cdef dict cqs  # ibv_cq address to weakref of its CQ

    def __init__(self, Context context not None):
        cdef int rc
        self.unmade()
        context.usable()
        with nogil:
            rc = verbs.rn_create_comp_channel(context.library.c, context.ptr, &self.ptr)
        check(rc, "ibv_create_comp_channel")
        self.context = context
        self.cqs = {}
        context.add_child()
        self.opened(COMP_CHANNELS)
        set_nonblocking(self, self.ptr.fd)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        if self.ptr is NULL:
            return "<CompChannel closed>"
        return f"<CompChannel fd {self.ptr.fd} of {self.context.name}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_comp_channel *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_destroy_comp_channel(self.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_destroy_comp_channel")
        self.context.remove_child()
        self.destroyed()
        return 0

    @property
    def fd(self):
        """The descriptor; non-blocking."""
        self.usable()
        return self.ptr.fd

    def fileno(self):
        """fd, for `select` and its like."""
        return self.fd

    def get_cq_event(self):
        """The CQ whose arming has fired, or None when there is no event. CQ.ack_events() is due for it."""
        cdef verbs.ibv_cq *ptr = NULL
        cdef void *context
        cdef CQ cq
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_get_cq_event(self.context.library.c, self.ptr, &ptr, &context)
        if rc == -EAGAIN or rc == -EINTR:
            return None
        check(rc, "ibv_get_cq_event")
        reference = self.cqs.get(<uintptr_t>ptr)
        cq = None if reference is None else reference()
        if cq is None:
            verbs.rn_ack_cq_events(self.context.library.c, ptr, 1)
            return None
        cq.unacked += 1
        return cq


@cython.no_gc_clear
cdef class CQ(Resource):
    """A completion queue.

    :param context: the device
    :param cqe: how many completions it has to hold, at least
    :param channel: where its events go, when it is armed
    :param comp_vector: which of the device's interrupts tells, below Context.num_comp_vectors
    :ivar stray: completions that were dropped, as their queue pair was gone
    :raises OSError: EINVAL for numbers that the device does not have; ENOMEM
    """

    cdef verbs.ibv_cq *ptr
    cdef readonly Context context
    cdef readonly CompChannel channel
    cdef unsigned int unacked
    cdef bint awake                 # the stream engine's: it polls it;
    cdef int armed                  # it has armed it, and taken no event since;
    cdef uint64_t last_hit          # which of its looks, by number, was the last that found something here
    cdef dict qps                   # QP number to weakref of the QP
    cdef PyObject *last_qp          # the one of the last completion, borrowed: QP.destroy() forgets it
    cdef uint32_t last_number
    cdef Py_ssize_t reserved        # entries that those may fill whose requests are awaited
    cdef readonly Py_ssize_t stray  # completions dropped, of queue pairs that were gone

    def __init__(self, Context context not None, int cqe, CompChannel channel=None, int comp_vector=0):
        cdef verbs.ibv_comp_channel *channel_ptr = NULL
        cdef int rc
        self.unmade()
        context.usable()
        if channel is not None:
            channel.usable()
            same_library(context, channel.context)
            channel_ptr = channel.ptr
        with nogil:
            rc = verbs.rn_create_cq(
                context.library.c, context.ptr, cqe, NULL, channel_ptr, comp_vector, &self.ptr)
        check_queue(rc, f"ibv_create_cq({cqe} entries, vector {comp_vector})", context)
        self.adopted(context, channel)

    cdef void adopted(self, Context context, CompChannel channel):
        self.context = context
        self.channel = channel
        self.qps = {}
        reference = weakref.ref(self)
        context.by_address[<uintptr_t>self.ptr] = reference
        if channel is not None:
            channel.cqs[<uintptr_t>self.ptr] = reference
        context.add_child()
        self.opened(CQS)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        if self.ptr is NULL:
            return "<CQ closed>"
        return f"<CQ of {self.context.name}, {self.ptr.cqe} entries, {len(self.qps)} queue pairs>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_cq *ptr = self.ptr
        cdef object key = <uintptr_t>ptr
        cdef int rc
        if self.qps:
            raise OSError(EBUSY, f"{self!r} is in use")
        self.ack_rest()
        # Out of the tables first: the address may be another's as soon as it is free.
        reference = self.context.by_address.pop(key, None)
        if self.channel is not None:
            self.channel.cqs.pop(key, None)
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_destroy_cq(self.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            self.context.by_address[key] = reference
            if self.channel is not None:
                self.channel.cqs[key] = reference
            check(rc, "ibv_destroy_cq")
        self.context.remove_child()
        self.destroyed()
        return 0

    cdef void ack_rest(self) noexcept:
        if self.unacked:
            verbs.rn_ack_cq_events(self.context.library.c, self.ptr, self.unacked)
            self.unacked = 0

    @property
    def cqe(self):
        """How many completions it holds; at least what was asked for."""
        self.usable()
        return self.ptr.cqe

    def resize(self, int cqe):
        """Change how many completions it holds; what is in it stays.

        :raises OSError: EINVAL if more are in it, or the device has no such large one; EOPNOTSUPP or ENOSYS
        :raises ValueError: the AsyncQPs that complete here may have more in flight
        """
        cdef int rc
        self.usable()
        if cqe < self.reserved:
            raise ValueError(f"{cqe} entries: the AsyncQPs of {self!r} may need {self.reserved} at once")
        with nogil:
            rc = verbs.rn_resize_cq(self.context.library.c, self.ptr, cqe)
        check(rc, f"ibv_resize_cq({cqe})")

    def modify(self, uint16_t cq_count, uint16_t cq_period):
        """Moderate its events: an armed one fires after cq_count completions, or cq_period microseconds after
        the first, from the next arming on; with either of them 0, as ever.

        :raises OSError: EOPNOTSUPP, where the device cannot
        """
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_modify_cq(self.ptr, cq_count, cq_period)
        check(rc, f"ibv_modify_cq({cq_count}, {cq_period})")

    def req_notify(self, bint solicited_only=False):
        """Arm: one event on the channel at the next completion. Poll once more before sleeping."""
        self.usable()
        check(verbs.rn_req_notify_cq(self.ptr, solicited_only), "ibv_req_notify_cq")

    def ack_events(self, unsigned int nevents=1):
        """Acknowledge events that get_cq_event() returned; close() does what is left.

        :raises ValueError: there are fewer
        """
        self.usable()
        if nevents > self.unacked:
            raise ValueError(f"ack_events({nevents}): {self.unacked} events are not acknowledged")
        verbs.rn_ack_cq_events(self.context.library.c, self.ptr, nevents)
        self.unacked -= nevents

    def poll(self, int num_entries=16):
        """Up to num_entries completions, oldest first. Never sleeps.

        :raises OSError: the queue is broken, for instance because it was overrun
        """
        cdef verbs.ibv_wc wcs[32]
        cdef list found = []
        cdef int n = 0, i, wanted
        cdef WC wc
        self.usable()
        while num_entries > 0:
            wanted = min(num_entries, 32)
            n = check(verbs.rn_poll_cq(self.ptr, wanted, wcs), "ibv_poll_cq")
            for i in range(n):
                wc = self.completed(&wcs[i])
                if wc is not None:
                    found.append(wc)
            num_entries -= n
            if n < wanted:
                break
        return found

    cdef WC completed(self, verbs.ibv_wc *c):
        """The user's view of a completion, and the end of what was kept for it; None for a stray."""
        cdef WC wc = WC.__new__(WC)     # may run the collector, hence first: the queue pair is borrowed until it is in
        wc.c = c[0]
        if self.last_qp is NULL or self.last_number != c.qp_num:
            self.find_qp(c.qp_num)
        if c.wr_id & WR_SHARED:
            # The queue pair that took it may be gone, or (XRC) never have been ours: the buffers are.
            reference = _shared_queues.get(c.wr_id >> QP_GENERATION_SHIFT)
            srq = None if reference is None else reference()
            if srq is None:
                self.stray += 1
                return None
            if self.last_qp is not NULL:
                wc.qp = <QP>self.last_qp
            wc.rare = _Rare.__new__(_Rare)
            wc.rare.srq = srq
            wc.wr_id = wc.rare.srq.receives.end(c.wr_id)
        elif self.last_qp is NULL or c.wr_id >> QP_GENERATION_SHIFT != (<QP>self.last_qp).generation:
            self.stray += 1
            return None
        else:
            wc.qp = <QP>self.last_qp
            if c.wr_id & WR_SEND:
                wc.wr_id = wc.qp.sends.end(c.wr_id)
            else:
                wc.wr_id = wc.qp.receives.end(c.wr_id)
        return wc

    cdef int find_qp(self, uint32_t number) except -1:
        """The queue pair of that number, if there is one, is the last one now."""
        cdef QP qp
        reference = self.qps.get(number)
        qp = None if reference is None else reference()
        self.last_qp, self.last_number = NULL, number
        if qp is not None and qp.ptr is not NULL:
            self.last_qp = <PyObject *>qp
        return 0


cdef int check_queue(int rc, str call, Context context) except -1:
    """check(), for a call that makes a completion queue."""
    if rc != -EINVAL:
        return check(rc, call)
    raise OSError(EINVAL, f"{call}: {strerror(EINVAL).decode()}; {context.name} has from 1 to "
                          f"{context.query_device().max_cqe} entries, and vectors below {context.num_comp_vectors}")


cdef int same_library(Context a, Context b) except -1:
    """Objects of two libraries, or of two openings of a device, know nothing of each other."""
    if a.ptr is not b.ptr:
        raise ValueError(f"objects of two contexts cannot be used together: {a!r} and {b!r}")
    return 0
