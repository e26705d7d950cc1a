# Queue pairs: their states, connecting, and what each verb about one asks for.
#
# An instance owns a queue pair of the device, or has it from an identifier of the connection manager (cm.pxi), which
# then closes it before itself. Creating one is in qpcreating.pxi, posting to it in qpposting.pxi, attributes and states
# are in qpattr.pxi.


@cython.no_gc_clear
cdef class QP(Resource):
    """A queue pair.

    :param pd: its protection domain, which must be that of the regions of its requests
    :param init_attr: a QPInitAttr: its queues and sizes; cap is updated to what the device grants
    :ivar send_cq: the CQ of its sends; None for XRC_RECV
    :ivar recv_cq: the CQ of its receives; None for XRC
    :ivar srq: the SRQ that its receives come from, or None
    :ivar xrcd: the XRC domain of an XRC_RECV queue pair
    :raises OSError: EINVAL for sizes or a type that the device does not support; ENOMEM
    """

    cdef verbs.ibv_qp *ptr
    cdef readonly PD pd
    cdef readonly CQ send_cq
    cdef readonly CQ recv_cq
    cdef readonly SRQ srq
    cdef readonly XRCD xrcd
    cdef verbs.ibv_qp_cap granted
    cdef object known_cap        # the same as a record, once somebody has asked
    cdef verbs.ibv_qp_ex *extended  # the same object, if it supports wr()
    cdef uint64_t send_ops       # the operations of wr()
    cdef verbs.rdma_cm_id *id    # its identifier, if it has one; the CMID closes this object before itself
    cdef object told             # the QPInfo that info() returned last, ...
    cdef object told_of          # ... and its (port_num, sgid_index)
    cdef uint64_t generation
    cdef _InFlight sends
    cdef _InFlight receives
    cdef PyThread_type_lock posting
    cdef tuple kept              # the elements of requests that are in no table: traffic.pxi

    def __cinit__(self):
        self.posting = PyThread_allocate_lock()
        if self.posting is NULL:
            raise MemoryError

    def __init__(self, PD pd not None, init_attr):
        self.unmade()
        create_qp(self, pd, init_attr, NULL)

    def __del__(self):
        # In a garbage cycle the collector would clear the list of what is in flight first: it is an ordinary list.
        Resource.__del__(self)
        self.drop()

    def __dealloc__(self):
        self.drop()
        if self.posting is not NULL:
            PyThread_free_lock(self.posting)

    def __repr__(self):
        if not self.is_here():
            return f"<QP{state_of(self)}>"
        sends, receives = self.in_flight
        return (f"<QP {self.ptr.qp_num:#x} {self.qp_type.name} {self.state.name}, "
                f"in flight {sends} sends, {receives} receives>")

    @staticmethod
    def open(PD pd not None, XRCD xrcd not None, uint32_t qp_num):
        """Share an XRC_RECV queue pair of another process in the same XRC domain. It exists while any process has it.

        :param pd: any protection domain of the context
        :raises OSError: EINVAL if there is no such queue pair; EOPNOTSUPP
        """
        cdef QP qp = QP.__new__(QP)
        cdef int rc
        pd.usable()
        xrcd.usable()
        same_library(pd.context, xrcd.context)
        with nogil:
            rc = verbs.rn_open_qp(pd.context.ptr, xrcd.ptr, qp_num, &qp.ptr)
        check(rc, f"ibv_open_qp({qp_num:#x})")
        qp.xrcd = xrcd
        fill_cap(&qp.granted, core.QPCap())
        adopt_qp(qp, pd, 0, False)
        return qp

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int keep(self, _Elements elements) except -1:
        """Let them live as long as it is open."""
        self.kept = (self.kept or ()) + (elements,)
        return 0

    cdef int destroy(self) except -1:
        cdef const verbs.rn_library *library = self.pd.context.library.c
        cdef verbs.ibv_qp *ptr = self.ptr
        cdef object number = ptr.qp_num
        cdef int rc = 0
        # Out of the tables first: number and address may be reused as soon as they are free.
        reference = self.pd.context.by_address.pop(<uintptr_t>ptr, None)
        for cq in (self.send_cq, self.recv_cq):
            if cq is not None:
                (<CQ>cq).qps.pop(number, None)
                (<CQ>cq).last_qp = NULL
        self.ptr = NULL
        with nogil:
            if self.id is not NULL:
                verbs.rn_cm_destroy_qp(library, self.id)
            else:
                rc = verbs.rn_destroy_qp(library, ptr)
        if rc < 0:
            self.ptr = ptr
            self.pd.context.by_address[<uintptr_t>ptr] = reference
            for cq in (self.send_cq, self.recv_cq):
                if cq is not None:
                    (<CQ>cq).qps[number] = reference
            check(rc, "ibv_destroy_qp")
        self.sends.clear()
        self.receives.clear()
        self.kept = None
        self.pd.context.remove_child()
        self.destroyed()
        return 0

    # ---- Attributes and states ----

    @property
    def qp_num(self):
        """Its number, 24 bits, by which the peer addresses it."""
        self.usable()
        return self.ptr.qp_num

    @property
    def cap(self):
        """What the device has granted, a QPCap."""
        if self.known_cap is None:
            self.known_cap = read_cap(&self.granted)
        return self.known_cap

    @property
    def qp_type(self):
        """Its transport service, a QPType."""
        self.usable()
        return enum_of(core.QPType, self.ptr.qp_type)

    @property
    def state(self):
        """The state known to the library; query() asks the device."""
        self.usable()
        return enum_of(core.QPState, self.ptr.state)

    @property
    def in_flight(self):
        """(sends, receives) that are posted and whose completions have not been polled."""
        self.usable()
        return self.sends.count(), self.receives.count()

    @property
    def peer_gone(self):
        """Whether it is known that the peer's process ended while it was connected, for example because it was killed.

        Only the embedded device knows. It is False on other devices, for a peer that disconnected, and for a peer that
        cannot be reached.
        """
        self.usable()
        return self.lost_its_peer()

    cdef bint lost_its_peer(self) except -1:
        return self.ptr is not NULL and self.pd.context.library.is_gone("rdmanet_soft_qp_peer_is_gone", self.ptr)

    def modify(self, attr=None, **attrs):
        """Change attributes, or the state: `qp.modify(qp_state=QPState.RTS, sq_psn=0)`.

        The mask of ibv_modify_qp(3) follows from what is given.

        :param attr: a QPAttr with the changes
        :param attrs: the fields of a QPAttr, instead of attr
        :raises TypeError: neither or both are given, or attr is not a QPAttr
        :raises ModifyQPError: the device refused (EINVAL); the exception names what is missing or not allowed
        :raises OSError: the device refused for another reason
        """
        cdef verbs.ibv_qp_attr c
        cdef int mask, rc
        cdef object before
        if attr is None and attrs:
            attr = core.QPAttr(**attrs)
        elif attrs or not isinstance(attr, core.QPAttr):
            given = ", ".join(attrs) or "no fields"
            raise TypeError(
                f"QP.modify() takes either a QPAttr or its fields as keywords, not {shown(attr)} and {given}"
            )
        self.usable()
        mask = fill_attr(&c, attr)
        before = self.state
        with nogil:
            rc = verbs.rn_modify_qp(self.pd.context.library.c, self.ptr, &c, mask)
        if rc < 0:
            after = before if attr.qp_state is None else enum_of(core.QPState, attr.qp_state)
            step = f"ibv_modify_qp: {before.name} to {after.name} was refused"
            address = self.wrong_address(attr)
            if rc != -EINVAL:
                raise OSError(-rc, f"{step}; {strerror(-rc).decode()}{address}")
            why, missing, not_allowed = why_refused(self.qp_type, before, after, attr)
            why += wrong_values(self.pd.context, attr)
            raise ModifyQPError(f"{step}{why}{address}", before, after, missing, not_allowed)
        if attr.qp_state == core.QPState.RESET:
            self.sends.clear()
            self.receives.clear()

    cdef str wrong_address(self, attr):
        return f"; {describe_way(self.pd.context, attr.ah_attr)}" if attr.ah_attr is not None else ""

    def to_init(self, int port_num=1, *, int pkey_index=0, access=0, qkey=0):
        """RESET to INIT. The peer gets only the access to memory that is given here.

        :param qkey: for a datagram queue pair: the key that senders must use
        """
        attr = core.QPAttr(qp_state=core.QPState.INIT, port_num=port_num, pkey_index=pkey_index)
        if self.ptr is not NULL and self.ptr.qp_type == verbs.IBV_QPT_UD:
            attr.qkey = qkey
        else:
            attr.qp_access_flags = core.AccessFlags(access)
        self.modify(attr)

    def to_rtr(self, dest_qp_num=0, dgid=None, *, int sgid_index=0, int dlid=0, int port_num=1,
               path_mtu=verbs.IBV_MTU_1024, int rq_psn=0, int max_dest_rd_atomic=1, int min_rnr_timer=12,
               int hop_limit=64, int sl=0):
        """INIT to RTR: connect to the peer's queue pair, and receive from it.

        A datagram queue pair has no peer and takes no arguments; one of an unreliable connection takes those up to
        rq_psn.

        :param dgid: the peer's GID, 16 bytes; without it dlid is the address
        :param min_rnr_timer: how long a peer waits that has found no receive, as a code of the InfiniBand
            specification: 1 is 10 us, 12 is 640 us, 31 is 491.52 ms, 0 is 655.36 ms
        """
        cdef int kind = verbs.IBV_QPT_RC if self.ptr is NULL else self.ptr.qp_type
        attr = core.QPAttr(qp_state=core.QPState.RTR)
        if kind != verbs.IBV_QPT_UD:
            attr.dest_qp_num, attr.path_mtu, attr.rq_psn = dest_qp_num, path_mtu, rq_psn
            attr.ah_attr = core.AHAttr(dgid=dgid, sgid_index=sgid_index, dlid=dlid, sl=sl, port_num=port_num,
                                       hop_limit=hop_limit)
        if kind == verbs.IBV_QPT_RC or kind == verbs.IBV_QPT_XRC_RECV:
            attr.max_dest_rd_atomic, attr.min_rnr_timer = max_dest_rd_atomic, min_rnr_timer
        self.modify(attr)

    def to_rts(self, *, int sq_psn=0, int timeout=14, int retry_cnt=7, int rnr_retry=7, int max_rd_atomic=1):
        """RTR to RTS: send as well. Only reliable connections take other arguments than sq_psn.

        :param timeout: how long to wait for an ACK, 4.096 us * 2 ** timeout; 0 is without limit
        :param rnr_retry: how often to retry when the peer has posted no receive; 7 is without limit
        """
        cdef int kind = verbs.IBV_QPT_RC if self.ptr is NULL else self.ptr.qp_type
        attr = core.QPAttr(qp_state=core.QPState.RTS, sq_psn=sq_psn)
        if kind == verbs.IBV_QPT_RC or kind == verbs.IBV_QPT_XRC_SEND:
            attr.timeout, attr.retry_cnt, attr.rnr_retry = timeout, retry_cnt, rnr_retry
            attr.max_rd_atomic = max_rd_atomic
        elif kind == verbs.IBV_QPT_XRC_RECV:
            attr.timeout = timeout
        self.modify(attr)

    # ---- Connecting without a connection manager ----

    def info(self, *, int port_num=1, sgid_index=None, psn=None, mtu=None):
        """The QPInfo that the peer needs for its connect().

        The queue pair remembers the last one, for its own connect().

        :param sgid_index: the index of the local address for the peer; by default that of best_gid()
        :param psn: the sequence number of the first packet; by default random
        :param mtu: the MTU of this side, in bytes; by default the port's
        """
        self.usable()
        context = self.pd.context
        port = context.query_port(port_num)
        gid = bytes(16)
        if sgid_index is not None:
            gid = context.query_gid(port_num, sgid_index)
        else:
            entry = best_gid(context.gid_table(port_num))
            sgid_index = 0
            if entry is not None:
                gid, sgid_index = entry.gid, entry.gid_index
        from rdmanet.wire.qpinfo import QPInfo      # here, because it imports msgspec: see base/bodies.py
        self.told = QPInfo(
            self.ptr.qp_num, int.from_bytes(os.urandom(3)) if psn is None else psn, gid, port.lid,
            port.active_mtu.bytes if mtu is None else mtu)
        self.told_of = (port_num, sgid_index)
        return self.told

    def connect(self, peer, *, access=None, int pkey_index=0, int max_dest_rd_atomic=1, int min_rnr_timer=12,
                int hop_limit=64, int sl=0, int timeout=14, int retry_cnt=7, int rnr_retry=7, int max_rd_atomic=1):
        """RESET or INIT to RTS: connect to the peer's queue pair. The peer does the same with this side's info().

        This does not wait for the peer. Do not post a request before the peer has connected, and post the receives for
        what the peer may send at once before this call, in INIT.

        :param peer: the peer's QPInfo
        :param access: the peer's access rights to local memory; by default none, or those given to to_init()
        :raises ValueError: info() was never called, so the peer cannot have it
        :raises OSError: the device refused a transition; the queue pair stays in the last state that it reached
        """
        self.usable()
        if self.ptr.qp_type == verbs.IBV_QPT_UD:
            raise ValueError("connect: a datagram queue pair is not connected; give each request an AH")
        if self.told is None:
            raise ValueError("connect: call info() first, and give the peer the result")
        port_num, sgid_index = self.told_of
        if self.state == core.QPState.RESET:
            self.to_init(port_num, pkey_index=pkey_index, access=access or 0)
        elif access is not None:
            self.modify(core.QPAttr(qp_state=core.QPState.INIT, qp_access_flags=core.AccessFlags(access)))
        self.to_rtr(
            peer.qp_num, peer.gid if any(peer.gid) else None, sgid_index=sgid_index, dlid=peer.lid,
            port_num=port_num, path_mtu=mtu_of(min(peer.mtu, self.told.mtu)), rq_psn=peer.psn,
            max_dest_rd_atomic=max_dest_rd_atomic, min_rnr_timer=min_rnr_timer, hop_limit=hop_limit, sl=sl)
        self.to_rts(sq_psn=self.told.psn, timeout=timeout, retry_cnt=retry_cnt, rnr_retry=rnr_retry,
                    max_rd_atomic=max_rd_atomic)

    def to_error(self):
        """To ERR: all posted requests complete as flushed."""
        self.modify(core.QPAttr(qp_state=core.QPState.ERR))

    def to_reset(self):
        """To RESET: all posted requests are dropped, without completions."""
        self.modify(core.QPAttr(qp_state=core.QPState.RESET))

    def query(self):
        """All attributes, from the device, as (QPAttr, QPInitAttr)."""
        cdef verbs.ibv_qp_attr c
        cdef verbs.ibv_qp_init_attr init
        cdef int rc
        self.usable()
        memset(&c, 0, sizeof(c))
        memset(&init, 0, sizeof(init))
        with nogil:
            rc = verbs.rn_query_qp(self.pd.context.library.c, self.ptr, &c, 0x1fffff, &init)
        check(rc, "ibv_query_qp")
        return read_attr(&c), core.QPInitAttr(
            self.send_cq, self.recv_cq, read_cap(&init.cap), enum_of(core.QPType, init.qp_type),
            bool(init.sq_sig_all), self.srq)

    def counters(self):
        """The embedded device's counters for this queue pair; empty on other devices."""
        self.usable()
        return qp_counters(self.pd.context.library, self.ptr)

    # ---- Multicast ----

    def attach_mcast(self, gid, uint16_t lid=0):
        """Join a multicast group with a datagram queue pair: it also receives what is sent to the group.

        :param gid: the GID of the group: 16 bytes, or an IP address
        """
        self.multicast(gid, lid, True)

    def detach_mcast(self, gid, uint16_t lid=0):
        """Leave a group.

        :raises OSError: EINVAL if the queue pair is not a member
        """
        self.multicast(gid, lid, False)

    cdef int multicast(self, gid, uint16_t lid, bint join) except -1:
        cdef verbs.ibv_gid c
        cdef bytes raw = gid_bytes(gid, "gid")
        cdef const verbs.rn_library *library
        cdef int rc
        self.usable()
        library = self.pd.context.library.c
        memcpy(c.raw, <const char *>raw, 16)
        with nogil:
            if join:
                rc = verbs.rn_attach_mcast(library, self.ptr, &c, lid)
            else:
                rc = verbs.rn_detach_mcast(library, self.ptr, &c, lid)
        return check(rc, "ibv_attach_mcast" if join else "ibv_detach_mcast")

    # ---- Posting ----

    def post_send(self, wrs):
        """Post a SendWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM if the queue is full, EINVAL if a request or the state is wrong. The requests before the
            refused one are posted; the message says how many
        :raises ValueError: an object of a request is closed, or belongs to another context; nothing is posted
        """
        self.usable()
        if type(wrs) is not list:
            wrs = [wrs] if isinstance(wrs, SendWR) else list(wrs)
        post_chain(self, wrs, None)

    def bind_mw(self, MW mw not None, bind):
        """Bind a window of type 1, in the order of the send queue; its new key is mw.rkey.

        :param bind: an MWBind
        :raises OSError: EINVAL for a window of type 2, or rights that the region lacks; EPERM or EOPNOTSUPP
        """
        cdef verbs.ibv_mw_bind c
        cdef _Elements elements = _Elements()
        cdef int rc
        self.usable()
        check_binding(self.pd.context, mw, bind.bind_info)
        memset(&c, 0, sizeof(c))
        c.send_flags = bind.send_flags
        fill_bind_info(&c.bind_info, bind.bind_info)
        elements.others = (mw, bind.bind_info)
        lock_posting(self, 1)
        try:
            self.usable()
            c.wr_id = self.sends.begin(bind.wr_id, elements)
            rc = verbs.rn_bind_mw(self.ptr, mw.ptr, &c)
            if rc < 0:
                self.sends.take_back(1)
        finally:
            PyThread_release_lock(self.posting)
        check(rc, f"ibv_bind_mw({mw!r})")
        mw.mr = bind.bind_info.mr

    def wr(self):
        """Post with the extended calls: `with qp.wr() as wr: wr.send(...); wr.rdma_write(...)`.

        The end of the block posts its requests, all or none; an exception in the block posts none. The queue pair must
        have been created with QPInitAttrEx.send_ops_flags.

        :raises OSError: EOPNOTSUPP if it was not
        """
        self.usable()
        if self.extended is NULL:
            raise OSError(
                EOPNOTSUPP, f"{self!r} does not support wr(): create it with QPInitAttrEx(send_ops_flags=...)")
        return WRSession(self)

    def post_recv(self, wrs):
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: as for post_send()
        """
        self.usable()
        post_receives(self, [wrs] if isinstance(wrs, RecvWR) else list(wrs), None)
