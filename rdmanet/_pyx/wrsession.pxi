# Posting with the extended calls (ibv_wr_start, ibv_wr_send, ..., ibv_wr_complete).
#
#     with qp.wr() as wr:
#         wr.rdma_write(mr.sge(0, 4096), remote_addr=..., rkey=..., flags=0)
#         wr.send(mr.sge(4096, 8))
#
# Between start and complete a library holds the queue's lock. So the block collects requests, and its end
# builds them all in one go: no lock is held while Python runs, an exception has nothing to undo, and
# the rules about buffers are those of QP.post_send(). A queue pair has only the calls that it was made
# for; asking for another is an error here, since a library need not check.


@cython.final
cdef class WRSession:
    """The requests of one `with qp.wr()` block. Keywords are those of SendWR; flags are SIGNALED by default."""

    cdef QP qp
    cdef list requests
    cdef bint ended

    def __cinit__(self, QP qp not None):
        self.qp = qp
        self.requests = []

    def __enter__(self):
        if self.ended:
            raise ValueError("this session has ended; QP.wr() makes another")
        return self

    def __exit__(self, kind, exc, tb):
        requests, self.requests, self.ended = self.requests, [], True
        if kind is None and requests:
            post_session(self.qp, requests)

    def __len__(self):
        return len(self.requests)

    def abort(self):
        """Discard the requests collected so far; the end of the block posts only later ones."""
        self.requests.clear()

    def post(self, SendWR wr not None):
        """Add a request that was created elsewhere.

        :raises OSError: EOPNOTSUPP if its opcode is not in the queue pair's send_ops_flags
        """
        if self.ended:
            raise ValueError("this session has ended; QP.wr() makes another")
        check_send(self.qp, wr)
        if not self.qp.send_ops & verbs.rn_send_op(wr.c.opcode):
            name = getattr(wr.opcode, "name", wr.opcode)
            raise OSError(
                EOPNOTSUPP,
                f"{name} is not in the send_ops_flags {core.SendOpsFlags(self.qp.send_ops)!r} of {self.qp!r}")
        self.requests.append(wr)

    def send(self, sg_list=(), *, imm_data=None, invalidate_rkey=None, **options):
        """SEND, SEND_WITH_IMM, or SEND_WITH_INV."""
        if imm_data is not None:
            self.post(SendWR(core.WROpcode.SEND_WITH_IMM, sg_list, imm_data=imm_data, **options))
        elif invalidate_rkey is not None:
            self.post(SendWR(core.WROpcode.SEND_WITH_INV, sg_list, invalidate_rkey=invalidate_rkey, **options))
        else:
            self.post(SendWR(core.WROpcode.SEND, sg_list, **options))

    def rdma_write(self, sg_list=(), *, remote_addr, rkey, imm_data=None, **options):
        """RDMA_WRITE, or RDMA_WRITE_WITH_IMM."""
        if imm_data is None:
            self.post(SendWR(core.WROpcode.RDMA_WRITE, sg_list, remote_addr=remote_addr, rkey=rkey, **options))
        else:
            self.post(SendWR(core.WROpcode.RDMA_WRITE_WITH_IMM, sg_list, remote_addr=remote_addr, rkey=rkey,
                             imm_data=imm_data, **options))

    def rdma_read(self, sg_list=(), *, remote_addr, rkey, **options):
        """RDMA_READ into sg_list."""
        self.post(SendWR(core.WROpcode.RDMA_READ, sg_list, remote_addr=remote_addr, rkey=rkey, **options))

    def atomic_cmp_swp(self, sg_list, *, remote_addr, rkey, compare, swap, **options):
        """ATOMIC_CMP_AND_SWP; sg_list receives the old 8 bytes."""
        self.post(SendWR(core.WROpcode.ATOMIC_CMP_AND_SWP, sg_list, remote_addr=remote_addr, rkey=rkey,
                         compare_add=compare, swap=swap, **options))

    def atomic_fetch_add(self, sg_list, *, remote_addr, rkey, add, **options):
        """ATOMIC_FETCH_AND_ADD; sg_list receives the old 8 bytes."""
        self.post(SendWR(core.WROpcode.ATOMIC_FETCH_AND_ADD, sg_list, remote_addr=remote_addr, rkey=rkey,
                         compare_add=add, **options))

    def atomic_write(self, data, *, remote_addr, rkey, **options):
        """ATOMIC_WRITE of 8 bytes, to an address that is a multiple of 8."""
        self.post(SendWR(core.WROpcode.ATOMIC_WRITE, (), remote_addr=remote_addr, rkey=rkey, atomic_data=data,
                         **options))

    def flush(self, *, remote_addr, rkey, length, placement=verbs.IBV_FLUSH_GLOBAL, level=verbs.IBV_FLUSH_RANGE,
              **options):
        """FLUSH: completes when earlier writes to the range have reached the level of `placement`."""
        cdef SendWR wr = SendWR(core.WROpcode.FLUSH, (), remote_addr=remote_addr, rkey=rkey, **options)
        wr.more.flush_length = length
        wr.more.flush_type = placement
        wr.more.flush_level = level
        self.post(wr)

    def bind_mw(self, MW mw not None, rkey, bind_info, **options):
        """BIND_MW: bind a window of type 2 to a part of a region, with this key."""
        self.post(SendWR(core.WROpcode.BIND_MW, (), mw=mw, rkey=rkey, bind_info=bind_info, **options))

    def local_inv(self, rkey, **options):
        """LOCAL_INV: invalidate a local key."""
        self.post(SendWR(core.WROpcode.LOCAL_INV, (), invalidate_rkey=rkey, **options))
