# Completion channels, completion queues and work completions.
#
# A completion queue (CQ) is polled. To sleep, a program arms it (req_notify), polls once more, because completions from
# before the arming cause no event, and waits for the channel's fd. Each event that is read from the channel counts on
# its CQ, and must be acknowledged before the CQ can be destroyed. Acknowledging takes a lock, so it is done in
# batches, and close() does the rest.
#
# The device does not get the user's wr_id but one of this module, by which a completion finds its entry in the queue
# pair's in-flight table (the user's wr_id, and the buffers that are kept alive) even if it failed and its opcode is
# undefined: routing.pxi. A completion of a queue pair that is gone is counted and dropped.


cdef extern from "<arpa/inet.h>" nogil:
    uint32_t ntohl(uint32_t value)
    uint32_t htonl(uint32_t value)


@cython.final
cdef class _Rare:
    """Fields that few completions have, kept apart because they would cost time for every completion."""

    cdef SRQ srq
    cdef object timestamp
    cdef object wallclock_ns


@cython.final
@cython.freelist(64)
cdef class WC:
    """A work completion: the end of one work request. Fields as in struct ibv_wc; see ibv_poll_cq(3).

    If it failed, only status, vendor_err, wr_id, qp_num, qp and srq are valid.

    :ivar wr_id: the wr_id of its request
    :ivar qp: the queue pair; None if it is gone or belongs to another process
    """

    cdef verbs.ibv_wc c
    cdef readonly object wr_id
    cdef readonly QP qp
    cdef _Rare rare     # None, mostly

    @property
    def is_send(self):
        """Whether its request was in the send queue."""
        return bool(self.c.wr_id & WR_SEND)

    @property
    def srq(self):
        """The shared receive queue that the receive came from, or None."""
        return None if self.rare is None else self.rare.srq

    @property
    def timestamp(self):
        """When it completed, in ticks of the device's clock, with WITH_COMPLETION_TIMESTAMP; else None."""
        return None if self.rare is None else self.rare.timestamp

    @property
    def wallclock_ns(self):
        """When it completed, in ns since 1970, with WITH_COMPLETION_TIMESTAMP_WALLCLOCK; else None."""
        return None if self.rare is None else self.rare.wallclock_ns

    def __repr__(self):
        if self.c.status != verbs.IBV_WC_SUCCESS:
            side = "send" if self.is_send else "receive"
            return f"<WC {side} wr_id {self.wr_id} {self.status!r} on qp {self.c.qp_num:#x}>"
        return f"<WC {self.opcode!r} wr_id {self.wr_id} {self.c.byte_len} bytes on qp {self.c.qp_num:#x}>"

    @property
    def status(self):
        """Its status, a WCStatus."""
        return enum_of(core.WCStatus, self.c.status)

    @property
    def opcode(self):
        """The operation; None if it failed, because then the device does not report it."""
        return enum_of(core.WCOpcode, self.c.opcode) if self.c.status == verbs.IBV_WC_SUCCESS else None

    @property
    def byte_len(self):
        """How many bytes were received or read; undefined for other sends."""
        return self.c.byte_len

    @property
    def imm_data(self):
        """The immediate data, 32 bits, or None."""
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
        """Of a datagram on InfiniBand: to which of the port's local identifiers it came."""
        return self.c.dlid_path_bits

    @property
    def src_qp(self):
        """Of a datagram: the sender's queue pair."""
        return self.c.src_qp

    @property
    def vendor_err(self):
        """If it failed: the vendor's error code, for the vendor's support."""
        return self.c.vendor_err

    @property
    def wc_flags(self):
        """Its WCFlags."""
        return core.WCFlags(self.c.wc_flags & 0xf)

    def raise_for_status(self):
        """Do nothing if the request succeeded.

        :raises CompletionError: it did not; where the peer is gone, it is a ConnectionResetError too
        """
        if self.c.status != verbs.IBV_WC_SUCCESS:
            raise completion_error(
                self.c.status, "send" if self.is_send else "receive", self.c.vendor_err, self.c.qp_num,
                peer_gone=self.lost_its_peer(),
            )

    cdef bint lost_its_peer(self) except -1:
        """Whether it failed because the peer's process has ended, if that is known."""
        return self.qp is not None and self.qp.lost_its_peer()


@cython.no_gc_clear
cdef class CompChannel(Resource):
    """A completion channel: its descriptor is readable when an armed CQ has an event.

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
        if not self.is_here():
            return f"<CompChannel{state_of(self)}>"
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
        """fd, for `select` and similar functions."""
        return self.fd

    def get_cq_event(self):
        """The CQ of the next event, or None if there is no event. Acknowledge it with CQ.ack_events()."""
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
    :param cqe: how many completions it must hold at least
    :param channel: the CompChannel for its events
    :param comp_vector: the completion vector (interrupt) of its events, below Context.num_comp_vectors
    :ivar stray: how many completions were dropped because their queue pair was gone
    :raises OSError: EINVAL for sizes or vectors that the device does not support; ENOMEM
    """

    cdef verbs.ibv_cq *ptr
    cdef readonly Context context
    cdef readonly CompChannel channel
    cdef unsigned int unacked
    cdef bint awake                 # for its watcher: it polls this queue;
    cdef int armed                  # it has armed the queue, and taken no event since;
    cdef bint armed_for_all         # and not for solicited completions only
    cdef bint solicits              # who is to wake it from here says so: IBV_SEND_SOLICITED
    cdef uint64_t last_hit          # the number of its last look that found something here
    cdef dict qps                   # QP number to weakref of the QP
    cdef PyObject *last_qp          # the one of the last completion, borrowed: QP.destroy() forgets it
    cdef uint32_t last_number
    cdef Py_ssize_t reserved        # entries that awaited requests, or connections, may fill
    cdef readonly Py_ssize_t stray  # completions that were dropped because their queue pairs were gone

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
        if not self.is_here():
            return f"<CQ{state_of(self)}>"
        return f"<CQ of {self.context.name}, {self.ptr.cqe} entries, {len(self.qps)} queue pairs>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_cq *ptr = self.ptr
        cdef object key = <uintptr_t>ptr
        cdef int rc
        if self.qps:
            raise OSError(EBUSY, f"{self!r} is still in use: close what completes on it first")
        self.ack_rest()
        # Out of the tables first: the address may be reused as soon as it is free.
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
        """How many completions it can hold; at least as many as were asked for."""
        self.usable()
        return self.ptr.cqe

    def resize(self, int cqe):
        """Change how many completions it can hold. Completions in it stay.

        :raises OSError: EINVAL if it contains more, or the device cannot make it that large; EOPNOTSUPP or ENOSYS
        :raises ValueError: the AsyncQPs that complete here may have more in flight
        """
        cdef int rc
        self.usable()
        if cqe < self.reserved:
            raise ValueError(f"{cqe} entries are too few: the AsyncQPs of {self!r} may need {self.reserved} at once")
        with nogil:
            rc = verbs.rn_resize_cq(self.context.library.c, self.ptr, cqe)
        check(rc, f"ibv_resize_cq({cqe})")

    def modify(self, uint16_t cq_count, uint16_t cq_period):
        """Moderate its events. From the next arming on, an event comes after cq_count completions, or cq_period
        microseconds after the first one; if either is 0, there is no moderation.

        :raises OSError: EOPNOTSUPP if the device does not support it
        """
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_modify_cq(self.ptr, cq_count, cq_period)
        check(rc, f"ibv_modify_cq({cq_count}, {cq_period})")

    def req_notify(self, bint solicited_only=False):
        """Arm it: the next completion causes one event on the channel. Poll once more before sleeping."""
        self.usable()
        check(verbs.rn_req_notify_cq(self.ptr, solicited_only), "ibv_req_notify_cq")

    def ack_events(self, unsigned int nevents=1):
        """Acknowledge events that get_cq_event() returned; close() acknowledges the rest.

        :raises ValueError: fewer events are unacknowledged
        """
        self.usable()
        if nevents > self.unacked:
            raise ValueError(f"ack_events({nevents}): only {self.unacked} events are unacknowledged")
        verbs.rn_ack_cq_events(self.context.library.c, self.ptr, nevents)
        self.unacked -= nevents

    def poll(self, int num_entries=16):
        """Return up to num_entries completions, oldest first. It never blocks.

        :raises OSError: the queue is broken, for instance because it was overrun
        """
        cdef verbs.ibv_wc wcs[32]
        cdef list found = []
        cdef int n = 0, i, wanted
        cdef WC wc
        self.usable()
        while num_entries > 0:
            wanted = min(num_entries, 32)
            n = verbs.rn_poll_cq(self.ptr, wanted, wcs)
            if n < 0:
                raise self.failure(n, "ibv_poll_cq")
            for i in range(n):
                wc = route_to_request(self, &wcs[i])
                if wc is not None:
                    found.append(wc)
            num_entries -= n
            if n < wanted:
                break
        return found

    cdef object failure(self, int rc, str call):
        """The exception for a call that found the queue broken, with the numbers by which it may have been overrun."""
        cdef QP qp
        cdef Py_ssize_t most = 0
        for reference in list(self.qps.values()):
            qp = reference()
            if qp is not None:
                most += qp.granted.max_send_wr if qp.send_cq is self else 0
                most += qp.granted.max_recv_wr if qp.recv_cq is self else 0
        return OSError(-rc, (
            f"{call}: {reason_of(rc)}: {self!r} is broken, as it is when it was overrun: it holds {self.ptr.cqe} "
            f"completions, and its queue pairs may have {most} requests at once (QPCap). Create it with more entries, "
            "or poll before you post more"))

    cdef int find_qp(self, uint32_t number) except -1:
        """Make the queue pair with this number the last one, if there is one."""
        cdef QP qp
        reference = self.qps.get(number)
        qp = None if reference is None else reference()
        self.last_qp, self.last_number = NULL, number
        if qp is not None and qp.ptr is not NULL:
            self.last_qp = <PyObject *>qp
        return 0


cdef int check_queue(int rc, str call, Context context) except -1:
    """check() for a call that creates a completion queue."""
    if rc != -EINVAL:
        return check(rc, call)
    raise OSError(EINVAL, f"{call}: {strerror(EINVAL).decode()}; {context.name} takes 1 to "
                          f"{context.query_device().max_cqe} entries, and comp_vector below {context.num_comp_vectors}")


cdef int same_library(Context a, Context b) except -1:
    """Raise ValueError for objects of two libraries, or of two contexts of a device."""
    if a.ptr is not b.ptr:
        raise ValueError(f"objects of two contexts cannot be used together: {a!r} and {b!r}")
    return 0
