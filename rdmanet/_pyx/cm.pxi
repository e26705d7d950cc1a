# The connection manager's identifiers: one connection each, or one listener.
#
#     client                                   server
#     resolve_addr  -> ADDR_RESOLVED           bind_addr, listen
#     resolve_route -> ROUTE_RESOLVED
#     create_qp, connect                       -> CONNECT_REQUEST, which brings a new CMID
#                                              create_qp, accept (or reject -> REJECTED at the client)
#     -> ESTABLISHED                           -> ESTABLISHED
#     disconnect    -> DISCONNECTED            -> DISCONNECTED
#
# Port space UDP has no connections: ESTABLISHED brings the address of the server's queue pair (qp_num, qkey, ah_attr),
# for requests with an AH; join_multicast() -> MULTICAST_JOIN brings that of the group.
#
# Every step ends with an event on the identifier's channel (cmevent.pxi), whose fd is all that a program waits for.
#
# create_qp() creates an identifier's queue pair, and the connection manager moves it through its states. Private data
# is padded with zeros on InfiniBand and RoCE, so a program must encode its length in it.

ctypedef int (*resolve_fn)(void *id, verbs.sockaddr *src, verbs.sockaddr *dst) noexcept nogil

cdef enum:
    MIN_RNR_TIMER = 12  # 640 us, as in soft/cm/qp.c


@cython.no_gc_clear
cdef class CMID(_OneThread):
    """An identifier of the connection manager: one connection, or one listener.

    :ivar channel: the channel of its events
    :ivar library: the library of its devices
    """

    cdef verbs.rdma_cm_id *ptr
    cdef readonly CMEventChannel channel
    cdef readonly Library library
    cdef QP own_qp  # created by create_qp(); it may be closed by now
    cdef bint used  # it has asked for a connection, or answered a request
    cdef bint answered  # it has accepted one

    def __init__(self):
        raise TypeError("use CMEventChannel.create_id()")

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        if not self.is_here():
            return f"<CMID{state_of(self)}>"
        return f"<CMID {self.local_addr} to {self.peer_addr} on {self.library.name}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.rdma_cm_id *ptr = self.ptr
        cdef object key = <uintptr_t>ptr
        cdef int rc
        self.enter()
        try:
            self.destroy_qp()
            reference = self.library.ids.pop(key, None)
            self.ptr = NULL
            with nogil:
                rc = verbs.rn_destroy_id(self.library.c, ptr)
        finally:
            self.leave()
        if rc < 0:
            self.ptr = ptr
            self.library.ids[key] = reference
            check(rc, "rdma_destroy_id")
        self.channel.children -= 1
        self.destroyed()
        return 0

    cdef int on_device(self, str call) except -1:
        """Raise if no address was bound or resolved to a device yet: librdmacm would crash."""
        self.usable()
        if self.ptr.verbs is NULL:
            raise OSError(EINVAL, f"{call}: no address is bound or resolved yet")
        return 0

    cdef int check_step(self, int rc, str call) except -1:
        """check() for a step towards a connection, of which an identifier makes one in its life."""
        if rc == -EINVAL and self.used:
            raise OSError(EINVAL, f"{call}: {strerror(EINVAL).decode()}: {self!r} was used already, whatever became of "
                                  "it. Each connection needs a new identifier: CMEventChannel.create_id(), AsyncCMID()")
        return check(rc, call)

    cdef int check_data(self, int rc, str call, bytes data, int most) except -1:
        """check_step() for a call with private data: if it fails, the data may be too long.

        :param most: how much InfiniBand and RoCE take; iWARP takes more
        """
        if rc == -EINVAL and not self.used and len(data) > most:
            raise OSError(
                EINVAL, f"{call}: {strerror(EINVAL).decode()}: private data of {len(data)} bytes, at most {most} fit")
        return self.check_step(rc, call)

    cdef int wait_less(self) except -1:
        """Let a peer that finds no receive here wait as long as on the embedded device, and as after QP.connect().

        The kernel's connection manager leaves min_rnr_timer 0, which is 655 ms. The value may be changed in RTS. The
        GIL is kept, so that no other thread closes the queue pair meanwhile.
        """
        cdef verbs.ibv_qp_attr c
        cdef QP qp = self.own_qp
        if (qp is None or qp.ptr is NULL or self.library.embedded_device or qp.ptr.qp_type != verbs.IBV_QPT_RC
                or qp.pd.context.ptr.device.transport_type == verbs.IBV_TRANSPORT_IWARP):
            return 0
        memset(&c, 0, sizeof(c))
        c.min_rnr_timer = MIN_RNR_TIMER
        # A device that refuses this has its own time; the connection is good.
        verbs.rn_modify_qp(self.library.c, qp.ptr, &c, verbs.IBV_QP_MIN_RNR_TIMER)
        return 0

    @property
    def context(self):
        """The device's context, shared by its identifiers; None until an address is bound or resolved."""
        self.usable()
        return None if self.ptr.verbs is NULL else self.library.context_for(self.ptr.verbs)

    @property
    def port_num(self):
        """The device's port; 0 until an address is bound or resolved."""
        self.usable()
        return self.ptr.port_num

    @property
    def qp(self):
        """The queue pair created by create_qp(), while it is open."""
        return None if self.own_qp is None or self.own_qp.ptr is NULL else self.own_qp

    @property
    def local_addr(self):
        """(ip, port), or (ip, port, flowinfo, scope_id), or None."""
        self.usable()
        return read_sockaddr(verbs.rdma_get_local_addr(self.ptr))

    @property
    def peer_addr(self):
        """The address of the peer in the same form, once it is known."""
        self.usable()
        return read_sockaddr(verbs.rdma_get_peer_addr(self.ptr))

    @property
    def peer_gone(self):
        """Whether it is known that the peer's process ended while it was connected, for example because it was killed.

        Only the embedded device knows. It is False on other devices, for a peer that disconnected, and for a peer that
        cannot be reached.
        """
        self.usable()
        return (self.library.is_gone("rdmanet_soft_cm_peer_is_gone", self.ptr)
                or self.qp is not None and self.own_qp.lost_its_peer())

    @property
    def peer_user(self):
        """The number of the user whose process asked for this connection, if it is on this host and the kernel says so.

        None on other devices, for peers on other hosts, on the side that asked, and once the connection is over.
        """
        self.usable()
        return self.library.peer_user(self.ptr)[0]

    @property
    def peer_by_name(self):
        """Whether the connection was asked for by the listener's name on this host, not by TCP."""
        self.usable()
        return self.library.peer_user(self.ptr)[1]

    cdef str local_note(self):
        """For an error: the local address that was used. None if the device or the identifier is gone."""
        try:
            local, context = self.local_addr, self.context
            if local is None or context is None:
                return None
            return gid_advice(context.gid_table(self.port_num), local[0])
        except (OSError, ValueError, RuntimeError):
            return None

    def set_reuse_addr(self, bint reuse=True):
        """Let a listener use a port that old connections still occupy."""
        self.set_option(verbs.RDMA_OPTION_ID_REUSEADDR, reuse)

    def set_af_only(self, bint only=True):
        """Restrict a listener on :: to IPv6."""
        self.set_option(verbs.RDMA_OPTION_ID_AFONLY, only)

    def set_ack_timeout(self, uint8_t timeout):
        """Set how long the queue pair waits for an ACK: 4.096 us * 2 ** timeout. Call it before connecting."""
        self.set_option(verbs.RDMA_OPTION_ID_ACK_TIMEOUT, timeout, 1, f"rdma_set_option(ACK_TIMEOUT, {timeout})")

    def set_tos(self, uint8_t tos):
        """Set the type of service of the connection's packets. Call it before the route is resolved."""
        self.set_option(verbs.RDMA_OPTION_ID_TOS, tos, 1, f"rdma_set_option(TOS, {tos})")

    def set_by_name_alone(self):
        """Have connect() ask by the listener's name on this host, never by TCP: a TCP program has the port."""
        self.usable()
        self.library.by_name_alone(self.ptr)

    cdef int set_option(self, int name, int value, size_t size=sizeof(int), str call="rdma_set_option") except -1:
        cdef uint8_t byte = <uint8_t>value
        cdef void *at = <void *>&byte if size == 1 else <void *>&value
        cdef int rc
        self.usable()
        self.enter()
        with nogil:
            rc = verbs.rn_set_option(self.library.c, self.ptr, verbs.RDMA_OPTION_ID, name, at, size)
        self.leave()
        return check(rc, call)

    def bind_addr(self, address):
        """Bind to (ip, port) or (ip, port, flowinfo, scope_id); port 0 takes a free one."""
        cdef verbs.sockaddr_storage c
        cdef int rc
        self.usable()
        fill_sockaddr(&c, address)
        self.enter()
        with nogil:
            rc = verbs.rn_bind_addr(self.library.c, self.ptr, <verbs.sockaddr *>&c)
        self.leave()
        self.check_step(rc, f"rdma_bind_addr({address[0]}, {address[1]})")

    def resolve_addr(self, src_addr, dst_addr, int timeout_ms=2000):
        """Find the device that reaches dst_addr: ADDR_RESOLVED or ADDR_ERROR. src_addr may be None."""
        cdef verbs.sockaddr_storage src, dst
        cdef verbs.sockaddr *source = NULL
        cdef int rc
        self.usable()
        fill_sockaddr(&dst, dst_addr)
        if src_addr is not None:
            fill_sockaddr(&src, src_addr)
            source = <verbs.sockaddr *>&src
        self.enter()
        with nogil:
            rc = verbs.rn_resolve_addr(self.library.c, self.ptr, source, <verbs.sockaddr *>&dst, timeout_ms)
        self.leave()
        if rc < 0:
            self.check_step(rc, resolving(dst_addr, src_addr))

    def resolve_route(self, int timeout_ms=2000):
        """Find the route to the address: ROUTE_RESOLVED or ROUTE_ERROR."""
        cdef int rc
        self.on_device("rdma_resolve_route")
        self.enter()
        with nogil:
            rc = verbs.rn_resolve_route(self.library.c, self.ptr, timeout_ms)
        self.leave()
        self.check_step(rc, "rdma_resolve_route")

    def resolve_at_once(self, src_addr, dst_addr):
        """Find the device and the route to dst_addr without waiting, if the library can: the embedded device's.

        Returns None if it cannot; True if both are found, of which no event tells; False if an event says why not.
        """
        cdef verbs.sockaddr_storage src, dst
        cdef verbs.sockaddr *source = NULL
        cdef resolve_fn call
        cdef int rc
        self.usable()
        call = <resolve_fn>self.library.symbol("rdmanet_soft_cm_resolve")
        if call is NULL:
            return None     # the system's, or RDMANET_SOFT_LIBRARY names an older one
        fill_sockaddr(&dst, dst_addr)
        if src_addr is not None:
            fill_sockaddr(&src, src_addr)
            source = <verbs.sockaddr *>&src
        self.enter()
        with nogil:
            rc = call(self.ptr, source, <verbs.sockaddr *>&dst)
            if rc < 0:
                rc = -errno
        self.leave()
        if rc < 0:
            self.check_step(rc, resolving(dst_addr, src_addr))
        return rc == 1

    def listen(self, int backlog=128):
        """Listen: each request is a CONNECT_REQUEST with a new CMID."""
        cdef int rc
        self.usable()
        self.enter()
        with nogil:
            rc = verbs.rn_listen(self.library.c, self.ptr, backlog)
        self.leave()
        self.check_step(rc, "rdma_listen")

    def connect(self, private_data=b"", *, int responder_resources=1, int initiator_depth=1,
                int retry_count=7, int rnr_retry_count=0, uint32_t qp_num=0):
        """Request a connection: ESTABLISHED, REJECTED, UNREACHABLE or CONNECT_ERROR.

        :param private_data: for the server's CONNECT_REQUEST; at most 56 bytes
        :param responder_resources: how many READs and atomics the peer may have in flight to this side
        :param initiator_depth: how many READs and atomics this side may have in flight to the peer
        :param qp_num: the queue pair, if create_qp() did not create it
        """
        cdef verbs.rdma_conn_param param
        cdef bytes data = copy_of(private_data)
        cdef int rc
        self.on_device("rdma_connect")
        fill_param(&param, data, responder_resources, initiator_depth, retry_count, rnr_retry_count)
        param.qp_num = qp_num
        self.enter()
        with nogil:
            rc = verbs.rn_connect(self.library.c, self.ptr, &param)
        self.leave()
        if rc < 0:
            peer = self.peer_addr
            self.check_data(rc, "rdma_connect" if peer is None else f"rdma_connect to {endpoint(peer)}", data, 56)
        self.used = True

    def accept(self, private_data=b"", *, int responder_resources=1, int initiator_depth=1,
               int retry_count=7, int rnr_retry_count=0, uint32_t qp_num=0):
        """Accept a CONNECT_REQUEST: ESTABLISHED. The client's event gets the private data, at most 196 bytes."""
        cdef verbs.rdma_conn_param param
        cdef bytes data = copy_of(private_data)
        cdef int rc
        self.on_device("rdma_accept")
        fill_param(&param, data, responder_resources, initiator_depth, retry_count, rnr_retry_count)
        param.qp_num = qp_num
        self.enter()
        with nogil:
            rc = verbs.rn_accept(self.library.c, self.ptr, &param)
        self.leave()
        self.check_data(rc, "rdma_accept", data, 196)
        self.used = self.answered = True
        self.wait_less()

    def reject(self, private_data=b""):
        """Reject a CONNECT_REQUEST: REJECTED at the client, with the private data, at most 148 bytes."""
        cdef bytes data = copy_of(private_data)
        cdef const char *bytes_ptr = data
        cdef uint8_t length
        cdef int rc
        self.on_device("rdma_reject")
        length = data_length(data)
        self.enter()
        with nogil:
            rc = verbs.rn_reject(self.library.c, self.ptr, bytes_ptr if length else NULL, length)
        self.leave()
        self.check_data(rc, "rdma_reject", data, 148)
        self.used = True

    def disconnect(self, *, bint told=True):
        """End the connection: the queue pair goes to ERR, and both sides get DISCONNECTED. Not `told`: this side needs
        none, so the embedded device waits for no answer."""
        cdef int rc
        self.on_device("rdma_disconnect")
        self.enter()
        with nogil:
            rc = verbs.rn_disconnect(self.library.c, self.ptr) if told else self.library.leave(self.ptr)
        self.leave()
        check(rc, "rdma_disconnect")

    def establish(self):
        """Report that the connection is ready, after CONNECT_RESPONSE: for an active side that moves its queue pair
        through the states itself. See rdma_establish(3).

        :raises OSError: EOPNOTSUPP if the library is too old
        """
        cdef int rc
        self.on_device("rdma_establish")
        self.enter()
        with nogil:
            rc = verbs.rn_establish(self.library.c, self.ptr)
        self.leave()
        check(rc, "rdma_establish")

    def notify(self, int event_type=verbs.IBV_EVENT_COMM_EST):
        """After accept(), say that the peer has sent something before ESTABLISHED, which comes then.

        The message by which the peer says that it is ready (RTU) may be lost, or be late. Call this when a request of
        the peer's has completed before ESTABLISHED, or for the asynchronous event COMM_EST of the queue pair. It does
        nothing if the connection is established already. See rdma_notify(3).

        :raises OSError: EINVAL: the request was not accepted, or the connection is over, or another event than
            COMM_EST; EOPNOTSUPP if the library is too old
        """
        cdef int rc
        self.on_device("rdma_notify")
        self.enter()
        with nogil:
            rc = verbs.rn_notify(self.library.c, self.ptr, <verbs.ibv_event_type>event_type)
        self.leave()
        if rc != -EISCONN:
            check(rc, "rdma_notify")

    def init_qp_attr(self, qp_state):
        """The QP.modify() attributes that move a program's own queue pair to a state; see rdma_init_qp_attr(3)."""
        cdef verbs.ibv_qp_attr c
        cdef int mask = 0, rc, value = qp_state
        self.on_device("rdma_init_qp_attr")
        memset(&c, 0, sizeof(c))
        c.qp_state = <verbs.ibv_qp_state>value
        self.enter()
        with nogil:
            rc = verbs.rn_cm_init_qp_attr(self.library.c, self.ptr, &c, &mask)
        self.leave()
        check(rc, f"rdma_init_qp_attr({qp_state!r})")
        if mask & verbs.IBV_QP_MIN_RNR_TIMER and not c.min_rnr_timer:
            c.min_rnr_timer = MIN_RNR_TIMER  # as wait_less()
        return only(read_attr(&c), mask)

    def join_multicast(self, address, uint32_t flags=verbs.RDMA_MC_JOIN_FLAG_FULLMEMBER):
        """Join a group, and attach the queue pair: MULTICAST_JOIN, with the address of the group, or MULTICAST_ERROR.

        :param address: (ip, port) of the group; the port is ignored
        """
        cdef verbs.sockaddr_storage c
        cdef int rc
        self.on_device("rdma_join_multicast")
        fill_sockaddr(&c, address)
        self.enter()
        with nogil:
            rc = verbs.rn_join_multicast(self.library.c, self.ptr, <verbs.sockaddr *>&c, flags)
        self.leave()
        check(rc, f"rdma_join_multicast({address[0]})")

    def leave_multicast(self, address):
        """Leave a group, and detach the queue pair."""
        cdef verbs.sockaddr_storage c
        cdef int rc
        self.on_device("rdma_leave_multicast")
        fill_sockaddr(&c, address)
        self.enter()
        with nogil:
            rc = verbs.rn_leave_multicast(self.library.c, self.ptr, <verbs.sockaddr *>&c)
        self.leave()
        check(rc, f"rdma_leave_multicast({address[0]})")

    def create_qp(self, PD pd not None, init_attr):
        """Create this connection's queue pair, in INIT. The connection manager changes its states.

        The identifier keeps it, and closes it before itself.

        :param pd: a protection domain of this identifier's context
        :param init_attr: a QPInitAttr; cap is updated to what the device grants
        :raises ValueError: it already has one, or the domain belongs to another context
        :raises OSError: EINVAL for sizes or a type that the device does not support; ENOMEM
        """
        cdef QP qp = QP.__new__(QP)
        self.may_have_qp(pd)
        self.enter()
        try:
            create_qp(qp, pd, init_attr, self.ptr)
        finally:
            self.leave()
        self.own_qp = qp
        return qp

    cdef int may_have_qp(self, PD pd) except -1:
        self.usable()
        if self.own_qp is not None and self.own_qp.ptr is not NULL:
            raise ValueError(f"{self!r} already has a queue pair")
        if self.ptr.verbs is NULL or self.ptr.verbs is not pd.context.ptr:
            raise ValueError(f"{pd!r} and {self!r} belong to different contexts")
        return 0

    cdef QP create_rc(self, PD pd, CQ cq, SRQ srq, const verbs.ibv_qp_cap *cap):
        """create_qp() for the engine: reliable, on one CQ."""
        cdef QP qp = QP.__new__(QP)
        self.may_have_qp(pd)
        self.enter()
        try:
            create_rc_qp(qp, pd, cq, srq, cap, self.ptr)
        finally:
            self.leave()
        self.own_qp = qp
        return qp

    def destroy_qp(self):
        """Destroy the queue pair; the same as closing it."""
        if self.own_qp is not None:
            self.own_qp.close()
            self.own_qp = None

    def migrate(self, CMEventChannel channel not None):
        """Move to another channel. Events that were not read yet move along.

        :raises ValueError: the channel belongs to another library
        """
        cdef int rc
        self.usable()
        if channel.library is not self.library:
            raise ValueError(f"{channel!r} and {self!r} belong to different libraries")
        channel.enter()
        try:
            self.enter()
            with nogil:
                rc = verbs.rn_migrate_id(self.library.c, self.ptr, channel.ptr)
            self.leave()
        finally:
            channel.leave()
        check(rc, "rdma_migrate_id")
        self.channel.children -= 1
        channel.children += 1
        self.channel = channel
