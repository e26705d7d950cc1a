# Extended completion queues: polled with an iterator, and with additional fields, such as timestamps.
#
# In most libraries the ABI's iterator (ibv_start_poll, ibv_next_poll, ibv_end_poll) holds the queue's lock from start
# to end. Here each completion is started, read and ended separately, so that no lock is held while Python runs: the
# body of a loop may poll, close a queue pair, or let another thread do so. This also avoids a bug of libraries that
# advance twice when next_poll finds the end (rdma-core's rxe until version 45).


@_late
def CQInitAttrEx():
    @_record
    class CQInitAttrEx(_FrozenRecord):
        """The attributes of a new extended completion queue; see ibv_create_cq_ex(3).

        :param cqe: how many completions it must hold at least
        :param channel: the CompChannel for its events
        :param comp_vector: the completion vector (interrupt) of its events, below Context.num_comp_vectors
        :param wc_flags: CreateCQWCFlags: the fields of its completions
        :param flags: CreateCQFlags
        """
        cqe: int
        channel: "CompChannel | None" = None
        comp_vector: int = 0
        wc_flags: CreateCQWCFlags | int = core.CreateCQWCFlags.STANDARD
        flags: CreateCQFlags | int = core.CreateCQFlags.NONE
    return CQInitAttrEx


@cython.no_gc_clear
cdef class CQEX(CQ):
    """An extended completion queue; it can be used wherever a CQ can.

    :raises OSError: EOPNOTSUPP if the device has none, or does not support all wc_flags
    """

    cdef verbs.ibv_cq_ex *ex
    cdef uint64_t told           # wc_flags

    def __init__(self, Context context not None, init_attr):
        cdef verbs.ibv_cq_init_attr_ex c
        cdef CompChannel channel = init_attr.channel
        cdef int rc
        self.unmade()
        context.usable()
        memset(&c, 0, sizeof(c))
        c.cqe = field(init_attr, "cqe", 0x7fffffff)
        c.comp_vector = field(init_attr, "comp_vector", 0x7fffffff)
        # A completion finds the entry of its request by the queue pair's number.
        c.wc_flags = field(init_attr, "wc_flags", <uint64_t>-1) | verbs.IBV_WC_EX_WITH_QP_NUM
        c.flags = field(init_attr, "flags", 0xffffffff)
        if c.flags:
            c.comp_mask = verbs.IBV_CQ_INIT_ATTR_MASK_FLAGS
        if channel is not None:
            channel.usable()
            same_library(context, channel.context)
            c.channel = channel.ptr
        with nogil:
            rc = verbs.rn_create_cq_ex(context.ptr, &c, &self.ex)
        check_queue(rc, f"ibv_create_cq_ex({init_attr.cqe} entries, vector {init_attr.comp_vector}, "
                        f"{init_attr.wc_flags!r})", context)
        self.ptr = verbs.ibv_cq_ex_to_cq(self.ex)
        self.told = c.wc_flags
        self.adopted(context, channel)

    def __dealloc__(self):
        self.drop()

    @property
    def wc_flags(self):
        """The fields of its completions."""
        return core.CreateCQWCFlags(self.told)

    def poll(self, int num_entries=16):
        """Return up to num_entries completions, oldest first, with the fields of wc_flags. It never blocks.

        :raises OSError: the queue is broken, for instance because it was overrun
        """
        cdef list found = []
        cdef WC wc
        while num_entries > 0 and (wc := self.next_one()) is not None:
            found.append(wc)
            num_entries -= 1
        return found

    def start_poll(self):
        """An iterator over the completions in the queue. It ends when there are no more, and can be used again later.
        It works in a `with` block, in analogy to the C calls, but needs none."""
        return Completions(self)

    cdef WC next_one(self):
        """The next completion whose queue pair still exists, or None."""
        cdef verbs.ibv_wc c
        cdef verbs.ibv_cq_ex *ex
        cdef uint64_t flags, timestamp = 0, wallclock = 0
        cdef int rc
        cdef WC wc = None
        flags = self.told
        while wc is None:
            self.usable()
            ex = self.ex
            rc = verbs.rn_start_poll(ex)
            if rc == -ENOENT:
                return None
            if rc < 0:
                raise self.failure(rc, "ibv_start_poll")
            self.read_one(&c)
            if flags & verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP:
                timestamp = verbs.ibv_wc_read_completion_ts(ex)
            if flags & verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK:
                wallclock = verbs.ibv_wc_read_completion_wallclock_ns(ex)
            verbs.ibv_end_poll(ex)
            wc = route_to_request(self, &c)
        if flags & (verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK):
            if wc.rare is None:
                wc.rare = _Rare.__new__(_Rare)
            if flags & verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP:
                wc.rare.timestamp = timestamp
            if flags & verbs.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK:
                wc.rare.wallclock_ns = wallclock
        return wc

    cdef void read_one(self, verbs.ibv_wc *c) noexcept:
        """Read the completion at the iterator's position. Only the requested fields can be read; if it failed, only
        wr_id, qp_num, status and vendor_err are valid."""
        cdef verbs.ibv_cq_ex *ex = self.ex
        cdef uint64_t flags = self.told
        memset(c, 0, sizeof(c[0]))
        c.wr_id = ex.wr_id
        c.status = ex.status
        c.qp_num = verbs.ibv_wc_read_qp_num(ex)
        c.vendor_err = verbs.ibv_wc_read_vendor_err(ex)
        if c.status != verbs.IBV_WC_SUCCESS:
            return
        c.opcode = verbs.ibv_wc_read_opcode(ex)
        c.wc_flags = verbs.ibv_wc_read_wc_flags(ex)
        if flags & verbs.IBV_WC_EX_WITH_BYTE_LEN:
            c.byte_len = verbs.ibv_wc_read_byte_len(ex)
        if flags & verbs.IBV_WC_EX_WITH_IMM and c.wc_flags & (verbs.IBV_WC_WITH_IMM | verbs.IBV_WC_WITH_INV):
            c.imm_data = verbs.ibv_wc_read_imm_data(ex)
        if flags & verbs.IBV_WC_EX_WITH_SRC_QP:
            c.src_qp = verbs.ibv_wc_read_src_qp(ex)
        if flags & verbs.IBV_WC_EX_WITH_SLID:
            c.slid = verbs.ibv_wc_read_slid(ex)
        if flags & verbs.IBV_WC_EX_WITH_SL:
            c.sl = verbs.ibv_wc_read_sl(ex)
        if flags & verbs.IBV_WC_EX_WITH_DLID_PATH_BITS:
            c.dlid_path_bits = verbs.ibv_wc_read_dlid_path_bits(ex)


@cython.final
cdef class Completions:
    """An iterator over the completions of an extended completion queue."""

    cdef CQEX cq

    def __cinit__(self, CQEX cq not None):
        self.cq = cq

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def __iter__(self):
        return self

    def __next__(self):
        cdef WC wc = self.cq.next_one()
        if wc is None:
            raise StopIteration
        return wc
