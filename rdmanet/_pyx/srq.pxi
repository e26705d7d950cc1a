# Shared receive queues, and the domains of extended reliable connections (XRC).
#
# Queue pairs that are created with srq= take their receives from the shared queue, in the order of their messages. So
# its receives complete in any order, on the CQ of the queue pair that took them, and the in-flight table is a dict. The
# wr_id identifies the SRQ of a receive (see wrid.pxi), so its buffers are found even if the queue pair that took
# it belongs to another process (XRC), or is gone.
#
# Receives of a shared queue are never flushed. A queue pair in the error state reports by the event QP_LAST_WQE_REACHED
# that it takes no more. Receives that it has taken and not completed are lost to the queue; their buffers are kept
# until the SRQ is closed.


@_late
def SRQAttr():
    @_record
    class SRQAttr(_Record):
        """The sizes of a shared receive queue.

        :param max_wr: how many receives it must hold at least
        :param max_sge: how many elements each receive may have at least
        :param srq_limit: one event SRQ_LIMIT_REACHED comes when fewer receives are left; 0: none
        """
        max_wr: int = 1
        max_sge: int = 1
        srq_limit: int = 0
    return SRQAttr


@_late
def SRQInitAttr():
    import_dataclasses()

    @_record
    class SRQInitAttr(_Record):
        """The attributes of a new shared receive queue; see ibv_create_srq_ex(3).

        An XRC queue has its own CQ and domain.

        :param attr: an SRQAttr: its sizes
        :param srq_type: an SRQType
        :param xrcd: the domain of an XRC queue
        :param cq: the CQ of the receives of an XRC queue
        """
        attr: SRQAttr = dataclasses.field(default_factory=core.SRQAttr)
        srq_type: SRQType = core.SRQType.BASIC
        xrcd: "XRCD | None" = None
        cq: "CQ | None" = None
    return SRQInitAttr


cdef dict _shared_queues = {}   # generation to weakref of the SRQ
cdef uint64_t _next_shared = 0


cdef uint64_t new_shared_generation() except? 0:
    """A generation number that no open SRQ has."""
    global _next_shared
    for _ in range(0x10000):
        _next_shared = (_next_shared + 1) & 0xffff
        reference = _shared_queues.get(_next_shared)
        if reference is None or reference() is None:
            return _next_shared
    raise OSError(EBUSY, "65536 shared receive queues are open")


cdef int fill_srq_attr(verbs.ibv_srq_attr *c, attr) except -1:
    c.max_wr = field(attr, "max_wr", 0xffffffff)
    c.max_sge = field(attr, "max_sge", 0xffffffff)
    c.srq_limit = field(attr, "srq_limit", 0xffffffff)
    return 0


@cython.no_gc_clear
cdef class SRQ(Resource):
    """A shared receive queue.

    :param pd: its protection domain
    :param init_attr: an SRQInitAttr or an SRQAttr; the sizes are updated to what the device grants
    :ivar srq_type: its SRQType
    :ivar xrcd: the domain of an XRC queue; else None
    :ivar cq: the CQ of the receives of an XRC queue; else None
    :raises OSError: EOPNOTSUPP; EINVAL for sizes that the device does not support; ENOMEM
    """

    cdef verbs.ibv_srq *ptr
    cdef readonly PD pd
    cdef readonly XRCD xrcd
    cdef readonly CQ cq
    cdef readonly object srq_type
    cdef uint64_t generation
    cdef _Shared receives

    def __init__(self, PD pd not None, init_attr=None):
        cdef verbs.ibv_srq_init_attr c
        cdef verbs.ibv_srq_init_attr_ex ex
        cdef XRCD xrcd = None
        cdef CQ cq = None
        cdef int rc, kind
        self.unmade()
        pd.usable()
        if init_attr is None or isinstance(init_attr, core.SRQAttr):
            init_attr = core.SRQInitAttr(core.SRQAttr() if init_attr is None else init_attr)
        attr = init_attr.attr
        self.generation = new_shared_generation()
        self.receives = _Shared(self.generation)
        if init_attr.srq_type == core.SRQType.BASIC:
            memset(&c, 0, sizeof(c))
            fill_srq_attr(&c.attr, attr)
            with nogil:
                rc = verbs.rn_create_srq(pd.context.library.c, pd.ptr, &c, &self.ptr)
            check(rc, f"ibv_create_srq({attr})")
            attr.max_wr, attr.max_sge = c.attr.max_wr, c.attr.max_sge
        else:
            kind = init_attr.srq_type
            memset(&ex, 0, sizeof(ex))
            fill_srq_attr(&ex.attr, attr)
            ex.comp_mask = verbs.IBV_SRQ_INIT_ATTR_TYPE | verbs.IBV_SRQ_INIT_ATTR_PD
            ex.srq_type = <verbs.ibv_srq_type>kind
            ex.pd = pd.ptr
            if init_attr.xrcd is not None:
                xrcd = init_attr.xrcd
                xrcd.usable()
                same_library(pd.context, xrcd.context)
                ex.comp_mask |= verbs.IBV_SRQ_INIT_ATTR_XRCD
                ex.xrcd = xrcd.ptr
            if init_attr.cq is not None:
                cq = init_attr.cq
                cq.usable()
                same_library(pd.context, cq.context)
                ex.comp_mask |= verbs.IBV_SRQ_INIT_ATTR_CQ
                ex.cq = cq.ptr
            with nogil:
                rc = verbs.rn_create_srq_ex(pd.context.ptr, &ex, &self.ptr)
            check(rc, f"ibv_create_srq_ex({init_attr.srq_type!r})")
            attr.max_wr, attr.max_sge = ex.attr.max_wr, ex.attr.max_sge
        self.pd, self.xrcd, self.cq = pd, xrcd, cq
        self.srq_type = core.SRQType(init_attr.srq_type)
        reference = weakref.ref(self)
        _shared_queues[self.generation] = reference
        pd.context.by_address[<uintptr_t>self.ptr] = reference
        pd.context.add_child()
        self.opened(SRQS)

    def __dealloc__(self):
        self.drop()

    def __del__(self):
        # As for a queue pair. In a cycle it may be finalized before its queue pairs: then it is destroyed after them.
        Resource.__del__(self)
        try:
            self.close()
        except OSError:
            pass

    def __repr__(self):
        if not self.is_here():
            return f"<SRQ{state_of(self)}>"
        return f"<SRQ of {self.pd.context.name}, {len(self.receives.entries)} receives in flight>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_srq *ptr = self.ptr
        cdef object key = <uintptr_t>ptr
        cdef int rc
        reference = self.pd.context.by_address.pop(key, None)
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_destroy_srq(self.pd.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            self.pd.context.by_address[key] = reference
            check(rc, "ibv_destroy_srq")
        _shared_queues.pop(self.generation, None)
        self.receives.entries.clear()
        self.pd.context.remove_child()
        self.destroyed()
        return 0

    @property
    def in_flight(self):
        """How many receives are posted whose completions have not been polled."""
        return 0 if self.receives is None else len(self.receives.entries)

    @property
    def srq_num(self):
        """The number by which an XRC sender names this queue.

        :raises OSError: EOPNOTSUPP or EINVAL if it has none
        """
        cdef uint32_t number
        self.usable()
        check(verbs.rn_get_srq_num(self.ptr, &number), "ibv_get_srq_num")
        return number

    def query(self):
        """Query its sizes and its limit from the device, as an SRQAttr."""
        cdef verbs.ibv_srq_attr c
        cdef int rc
        self.usable()
        memset(&c, 0, sizeof(c))
        with nogil:
            rc = verbs.rn_query_srq(self.pd.context.library.c, self.ptr, &c)
        check(rc, "ibv_query_srq")
        return core.SRQAttr(c.max_wr, c.max_sge, c.srq_limit)

    def modify(self, *, max_wr=None, srq_limit=None):
        """Change the size, or set the limit.

        :param max_wr: the new number of receives; posted ones stay
        :param srq_limit: one event SRQ_LIMIT_REACHED comes when fewer receives than this are left; the limit is then 0
            again, so that no further event comes
        :raises OSError: EINVAL for a limit above the size, or a size below the number of posted receives; EOPNOTSUPP if
            the device does not support it
        """
        cdef verbs.ibv_srq_attr c
        cdef int rc, mask = 0
        self.usable()
        memset(&c, 0, sizeof(c))
        if max_wr is not None:
            c.max_wr = max_wr
            mask |= verbs.IBV_SRQ_MAX_WR
        if srq_limit is not None:
            c.srq_limit = srq_limit
            mask |= verbs.IBV_SRQ_LIMIT
        with nogil:
            rc = verbs.rn_modify_srq(self.pd.context.library.c, self.ptr, &c, mask)
        check(rc, f"ibv_modify_srq(max_wr={max_wr}, srq_limit={srq_limit})")

    def post_recv(self, wrs):
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM if the queue is full, EINVAL if a request is wrong. The requests before the refused one
            are posted; the message says how many
        """
        cdef verbs.ibv_recv_wr *chain
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef list requests = [wrs] if isinstance(wrs, RecvWR) else list(wrs)
        cdef int n = len(requests), i, first, rc
        cdef RecvWR wr
        self.usable()
        check_receives(requests)
        if n == 0:
            return
        chain = <verbs.ibv_recv_wr *>malloc(n * sizeof(verbs.ibv_recv_wr))
        if chain is NULL:
            raise MemoryError
        try:
            for i in range(n):
                wr = requests[i]
                chain[i] = wr.c
                chain[i].wr_id = self.receives.begin(wr.wr_id, wr.elements)
                chain[i].next = &chain[i + 1] if i + 1 < n else NULL
            self.usable()  # creating the entries may have run arbitrary code
            rc = verbs.rn_post_srq_recv(self.ptr, chain, &bad)
            if rc < 0:
                first = i = <int>(bad - chain) if bad is not NULL else 0
                for i in range(first, n):
                    self.receives.end(chain[i].wr_id)
                raise OSError(-rc, refusal("ibv_post_srq_recv", rc, requests[first], self, first, n))
        finally:
            free(chain)


@cython.no_gc_clear
cdef class XRCD(Resource):
    """An XRC domain, which joins the shared receive queues of several processes with the queue pairs that feed them.

    :param context: the device
    :param fd: a file that identifies the domain to all its processes; -1 for a private domain
    :param oflags: os.O_CREAT to create it, with os.O_EXCL to fail if it exists
    :raises OSError: EOPNOTSUPP if the device has no XRC
    """

    cdef verbs.ibv_xrcd *ptr
    cdef readonly Context context

    def __init__(self, Context context not None, int fd=-1, int oflags=os.O_CREAT):
        cdef int rc
        self.unmade()
        context.usable()
        with nogil:
            rc = verbs.rn_open_xrcd(context.ptr, fd, oflags, &self.ptr)
        check(rc, "ibv_open_xrcd")
        self.context = context
        context.add_child()
        self.opened(XRCDS)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        return f"<XRCD of {self.context.name}{state_of(self)}>" if self.context else "<XRCD closed>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_xrcd *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_close_xrcd(ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_close_xrcd")
        self.context.remove_child()
        self.destroyed()
        return 0
