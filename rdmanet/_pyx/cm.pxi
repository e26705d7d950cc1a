# The connection manager: identifiers, their event channel, and events.
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
# Every step ends with an event on the identifier's channel, whose fd is all that a program waits for. Reading an event
# copies and acknowledges it, because destroying an identifier waits until its events are acknowledged.
#
# Only one thread at a time may use an identifier or a channel. The libraries promise no more, and closing an object
# while a call of another thread uses it would free it there. So each object is marked while a call is in progress
# (enter, leave), and a concurrent call is refused; the GIL makes that exact. Other threads may use it at other times.
#
# create_qp() creates an identifier's queue pair, and the connection manager moves it through its states. Private data
# is padded with zeros on InfiniBand and RoCE, so a program must encode its length in it.


class CMEventType(enum.IntEnum):
    """What happened to an identifier."""
    ADDR_RESOLVED = verbs.RDMA_CM_EVENT_ADDR_RESOLVED
    ADDR_ERROR = verbs.RDMA_CM_EVENT_ADDR_ERROR
    ROUTE_RESOLVED = verbs.RDMA_CM_EVENT_ROUTE_RESOLVED
    ROUTE_ERROR = verbs.RDMA_CM_EVENT_ROUTE_ERROR
    CONNECT_REQUEST = verbs.RDMA_CM_EVENT_CONNECT_REQUEST
    CONNECT_RESPONSE = verbs.RDMA_CM_EVENT_CONNECT_RESPONSE
    CONNECT_ERROR = verbs.RDMA_CM_EVENT_CONNECT_ERROR
    UNREACHABLE = verbs.RDMA_CM_EVENT_UNREACHABLE
    REJECTED = verbs.RDMA_CM_EVENT_REJECTED
    ESTABLISHED = verbs.RDMA_CM_EVENT_ESTABLISHED
    DISCONNECTED = verbs.RDMA_CM_EVENT_DISCONNECTED
    DEVICE_REMOVAL = verbs.RDMA_CM_EVENT_DEVICE_REMOVAL
    MULTICAST_JOIN = verbs.RDMA_CM_EVENT_MULTICAST_JOIN
    MULTICAST_ERROR = verbs.RDMA_CM_EVENT_MULTICAST_ERROR
    ADDR_CHANGE = verbs.RDMA_CM_EVENT_ADDR_CHANGE
    TIMEWAIT_EXIT = verbs.RDMA_CM_EVENT_TIMEWAIT_EXIT
    ADDRINFO_RESOLVED = verbs.RDMA_CM_EVENT_ADDRINFO_RESOLVED
    ADDRINFO_ERROR = verbs.RDMA_CM_EVENT_ADDRINFO_ERROR
    USER = verbs.RDMA_CM_EVENT_USER
    INTERNAL = verbs.RDMA_CM_EVENT_INTERNAL


class PortSpace(enum.IntEnum):
    """TCP: reliable connections; UDP: datagrams."""
    IPOIB = verbs.RDMA_PS_IPOIB
    TCP = verbs.RDMA_PS_TCP
    UDP = verbs.RDMA_PS_UDP
    IB = verbs.RDMA_PS_IB


# ---- Addresses ----------------------------------------------------------------------------------

cdef extern from "<arpa/inet.h>" nogil:
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr_in:
        uint16_t sin_family
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_family
        uint16_t sin6_port
        uint32_t sin6_flowinfo
        in6_addr sin6_addr
        uint32_t sin6_scope_id
    enum: AF_INET, AF_INET6
    uint16_t htons(uint16_t value)
    uint16_t ntohs(uint16_t value)
    int inet_pton(int family, const char *text, void *address)
    const char *inet_ntop(int family, const void *address, char *text, unsigned int size)


cdef int fill_sockaddr(verbs.sockaddr_storage *c, address) except -1:
    """Convert (ip, port) or (ip, port, flowinfo, scope_id). Host names have to be resolved before."""
    cdef sockaddr_in *v4 = <sockaddr_in *>c
    cdef sockaddr_in6 *v6 = <sockaddr_in6 *>c
    cdef bytes host
    cdef int port
    memset(c, 0, sizeof(c[0]))
    if not isinstance(address, (tuple, list)) or not 2 <= len(address) <= 4 or not isinstance(address[0], str):
        raise TypeError(f"{address!r} is not (ip, port) or (ip, port, flowinfo, scope_id)")
    text, number = address[0], PyNumber_Index(address[1])
    if not 0 <= number <= 65535:
        raise OverflowError(f"port {number} is not in 0..65535")
    port = number
    if "\0" in text:
        raise ValueError(f"{text!r} is not an IP address")
    text, _, zone = text.partition("%")
    host = text.encode()
    if inet_pton(AF_INET, host, &v4.sin_addr) == 1:
        v4.sin_family = AF_INET
        v4.sin_port = htons(port)
    elif inet_pton(AF_INET6, host, &v6.sin6_addr) == 1:
        v6.sin6_family = AF_INET6
        v6.sin6_port = htons(port)
        if len(address) > 2:
            v6.sin6_flowinfo = htonl(address[2])
        if len(address) > 3:
            v6.sin6_scope_id = address[3]
        elif zone:
            v6.sin6_scope_id = int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)
    else:
        raise ValueError(f"{address[0]!r} is not an IP address")
    return 0


cdef object read_sockaddr(verbs.sockaddr *c):
    cdef sockaddr_in *v4 = <sockaddr_in *>c
    cdef sockaddr_in6 *v6 = <sockaddr_in6 *>c
    cdef char text[64]
    if v4.sin_family == AF_INET and inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text)) is not NULL:
        return text.decode(), ntohs(v4.sin_port)
    if v4.sin_family == AF_INET6 and inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text)) is not NULL:
        return text.decode(), ntohs(v6.sin6_port), ntohl(v6.sin6_flowinfo), v6.sin6_scope_id
    return None


# ---- One thread at a time -----------------------------------------------------------------------

@cython.no_gc_clear
cdef class _OneThread(Resource):
    """An object that only one thread at a time may use."""

    cdef bint in_use

    cdef int enter(self) except -1:
        """Mark the object before a library call without the GIL. Nothing may raise between this and leave()."""
        self.usable()
        if self.in_use:
            raise RuntimeError(
                f"{self!r} is in use by another thread; only one thread at a time can use a {type(self).__name__}")
        self.in_use = True
        return 0

    cdef void leave(self) noexcept:
        self.in_use = False


# ---- Events and their channel -------------------------------------------------------------------

@cython.final
cdef class CMEvent:
    """A copy of an event, already acknowledged. Names as in struct rdma_cm_event; see rdma_get_cm_event(3).

    :ivar type: a CMEventType
    :ivar status: 0 or -errno; for REJECTED the reason of the rejection
    :ivar id: the identifier concerned; for CONNECT_REQUEST a new one
    :ivar listen_id: for CONNECT_REQUEST: the listener
    :ivar private_data: the peer's private data, on InfiniBand and RoCE padded with zeros
    :ivar responder_resources: how many READs and atomics the peer asks to have in flight to this side
    :ivar initiator_depth: how many READs and atomics this side may have in flight to the peer
    :ivar retry_count: how often the peer retries
    :ivar rnr_retry_count: how often the peer retries when it finds no receive; 7 is without limit
    :ivar qp_num: the peer's queue pair
    :ivar ah_attr: for datagrams: the address of the peer
    :ivar qkey: for datagrams: the key that the peer expects
    """

    cdef readonly object type
    cdef readonly int status
    cdef readonly CMID id           # for CONNECT_REQUEST: the new identifier
    cdef readonly CMID listen_id    # for CONNECT_REQUEST: the listener
    cdef readonly bytes private_data
    cdef readonly int responder_resources
    cdef readonly int initiator_depth
    cdef readonly int retry_count
    cdef readonly int rnr_retry_count
    cdef readonly uint32_t qp_num
    cdef readonly object ah_attr    # for datagrams: the address of the peer
    cdef readonly object qkey       # for datagrams: the key that the peer expects

    def __repr__(self):
        return f"<CMEvent {getattr(self.type, 'name', self.type)} status {self.status} for {self.id!r}>"

    def error(self):
        """The exception for this event, or None if it is not a failure."""
        if self.type not in _CM_FAILURES:
            return None
        peer, peer_gone = self.peer()
        if self.type is CMEventType.REJECTED and peer is not None and is_not_ours(self.private_data):
            return not_ours_error(peer)
        exc = other_version_error(self.status, self.private_data, peer)
        if exc is not None:
            return exc
        exc = cm_error(self.type.name, self.status, peer, peer_gone)
        if self.type in _CM_UNREACHED and self.id is not None:
            note = self.id.local_note()
            if note is not None:
                exc.add_note(note)
        return exc

    cdef tuple peer(self):
        """The peer's address, or None if it is unknown, and whether its process has ended."""
        try:
            return self.id.peer_addr, self.id.peer_gone
        except (AttributeError, ValueError, RuntimeError):  # none, or closed, or of the parent process
            return None, False

    def raise_for_status(self):
        """Raise the exception of error(), if there is one."""
        exc = self.error()
        if exc is not None:
            raise exc


_CM_FAILURES = frozenset((
    CMEventType.ADDR_ERROR, CMEventType.ROUTE_ERROR, CMEventType.CONNECT_ERROR, CMEventType.UNREACHABLE,
    CMEventType.REJECTED, CMEventType.DISCONNECTED, CMEventType.DEVICE_REMOVAL, CMEventType.MULTICAST_ERROR,
))
_CM_UNREACHED = frozenset((CMEventType.ROUTE_ERROR, CMEventType.UNREACHABLE))
_CM_WITH_PARAM = frozenset((
    CMEventType.CONNECT_REQUEST, CMEventType.CONNECT_RESPONSE, CMEventType.REJECTED, CMEventType.ESTABLISHED,
    CMEventType.DISCONNECTED,
))
_CM_WITH_WAY = frozenset((CMEventType.ESTABLISHED, CMEventType.MULTICAST_JOIN))


cdef int read_ud_param(CMEvent event, verbs.rdma_ud_param *param) except -1:
    # UNREACHABLE has some if the embedded device itself says which versions differ (RN_REJ_VERSION in cm.h).
    if (event.type in _CM_WITH_PARAM or event.status == 0x5304) and param.private_data is not NULL:
        event.private_data = (<const char *>param.private_data)[:param.private_data_len]
    if event.type in _CM_WITH_WAY:
        event.ah_attr = read_ah(&param.ah_attr)
        event.qp_num, event.qkey = param.qp_num, param.qkey
    return 0


@cython.no_gc_clear
cdef class CMEventChannel(_OneThread):
    """A channel for connection events; its fd is readable when there are events.

    :param library: the library of the devices
    :raises OSError: the connection manager cannot be used; a note says what to do about permissions and modules
    """

    cdef verbs.rdma_event_channel *ptr
    cdef readonly Library library
    cdef Py_ssize_t children

    def __init__(self, Library library not None):
        cdef int rc
        self.unmade()
        with nogil:
            rc = verbs.rn_create_event_channel(library.c, &self.ptr)
        check_open(library, rc, "rdma_create_event_channel")
        self.library = library
        library.this_process()
        library.channels += 1
        self.opened(EVENT_CHANNELS)
        set_nonblocking(self, self.ptr.fd)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        if not self.is_here():
            return f"<CMEventChannel{state_of(self)}>"
        return f"<CMEventChannel fd {self.ptr.fd} of {self.library.name}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.rdma_event_channel *ptr = self.ptr
        if self.children:
            raise OSError(EBUSY, f"{self!r} still has {self.children} open identifiers")
        self.enter()
        self.ptr = NULL
        # First: another thread may open a channel while the library works, and must not get the contexts closed here.
        self.library.channels -= 1
        if not self.library.channels:
            self.library.forget_contexts()
        with nogil:
            verbs.rn_destroy_event_channel(self.library.c, ptr)
        self.leave()
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

    def create_id(self, ps=PortSpace.TCP):
        """Create an identifier, for one connection or for listening."""
        cdef verbs.rdma_cm_id *ptr = NULL
        cdef int value = ps, rc
        self.enter()
        with nogil:
            rc = verbs.rn_create_id(self.library.c, self.ptr, NULL, <verbs.rdma_port_space>value, &ptr)
        self.leave()
        check(rc, "rdma_create_id")
        return self.adopt(ptr)

    cdef CMID adopt(self, verbs.rdma_cm_id *ptr):
        cdef CMID id = CMID.__new__(CMID)
        id.ptr = ptr
        id.channel = self
        id.library = self.library
        self.children += 1
        self.library.this_process()
        self.library.ids[<uintptr_t>ptr] = weakref.ref(id)
        id.opened(CM_IDS)
        return id

    def get_event(self):
        """The next event, or None if there is none.

        If the program drops a CONNECT_REQUEST, the request is refused when its identifier is garbage-collected.
        """
        cdef verbs.rdma_cm_event *c = NULL
        cdef verbs.rdma_conn_param *param
        cdef CMEvent event
        cdef int rc
        while True:
            self.enter()
            with nogil:
                rc = verbs.rn_get_cm_event(self.library.c, self.ptr, &c)
            self.leave()
            if rc == -EAGAIN or rc == -EINTR:
                return None
            check(rc, "rdma_get_cm_event")
            try:
                event = CMEvent.__new__(CMEvent)
                event.type = enum_of(CMEventType, c.event)
                event.status = c.status
                event.private_data = b""
                if c.id.ps == verbs.RDMA_PS_UDP or c.id.ps == verbs.RDMA_PS_IPOIB:
                    read_ud_param(event, &c.param.ud)
                elif event.type in _CM_WITH_PARAM:
                    param = &c.param.conn
                    if param.private_data is not NULL:
                        event.private_data = (<const char *>param.private_data)[:param.private_data_len]
                    event.responder_resources = param.responder_resources
                    event.initiator_depth = param.initiator_depth
                    event.retry_count = param.retry_count
                    event.rnr_retry_count = param.rnr_retry_count
                    event.qp_num = param.qp_num
                if c.event == verbs.RDMA_CM_EVENT_CONNECT_REQUEST:
                    event.listen_id = self.known(c.listen_id)
                    event.id = self.adopt(c.id)
                else:
                    event.id = self.known(c.id)
                    if event.id is None:
                        continue  # the identifier has just been closed
                    if c.event == verbs.RDMA_CM_EVENT_ESTABLISHED and not event.id.answered:
                        event.id.wait_less()
                return event
            finally:
                with nogil:
                    verbs.rn_ack_cm_event(self.library.c, c)

    cdef CMID known(self, verbs.rdma_cm_id *ptr):
        reference = self.library.ids.get(<uintptr_t>ptr)
        return None if reference is None else reference()


# ---- Identifiers --------------------------------------------------------------------------------

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
        """Whether the connection was asked for by the listener's name on this host (a Unix socket), not by TCP."""
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
        self.set_option(verbs.RDMA_OPTION_ID, verbs.RDMA_OPTION_ID_REUSEADDR, reuse)

    def set_af_only(self, bint only=True):
        """Restrict a listener on :: to IPv6."""
        self.set_option(verbs.RDMA_OPTION_ID, verbs.RDMA_OPTION_ID_AFONLY, only)

    def set_ack_timeout(self, uint8_t timeout):
        """Set how long the queue pair waits for an ACK: 4.096 us * 2 ** timeout. Call it before connecting."""
        cdef int rc
        self.usable()
        self.enter()
        with nogil:
            rc = verbs.rn_set_option(
                self.library.c, self.ptr, verbs.RDMA_OPTION_ID, verbs.RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1)
        self.leave()
        check(rc, f"rdma_set_option(ACK_TIMEOUT, {timeout})")

    def set_tos(self, uint8_t tos):
        """Set the type of service of the connection's packets. Call it before the route is resolved."""
        cdef int rc
        self.usable()
        self.enter()
        with nogil:
            rc = verbs.rn_set_option(
                self.library.c, self.ptr, verbs.RDMA_OPTION_ID, verbs.RDMA_OPTION_ID_TOS, &tos, 1)
        self.leave()
        check(rc, f"rdma_set_option(TOS, {tos})")

    cdef int set_option(self, int level, int name, int value) except -1:
        cdef int rc
        self.usable()
        self.enter()
        with nogil:
            rc = verbs.rn_set_option(self.library.c, self.ptr, level, name, &value, sizeof(value))
        self.leave()
        return check(rc, "rdma_set_option")

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
        self.check_step(rc, f"rdma_resolve_addr({dst_addr[0]}, {dst_addr[1]})")

    def resolve_route(self, int timeout_ms=2000):
        """Find the route to the address: ROUTE_RESOLVED or ROUTE_ERROR."""
        cdef int rc
        self.on_device("rdma_resolve_route")
        self.enter()
        with nogil:
            rc = verbs.rn_resolve_route(self.library.c, self.ptr, timeout_ms)
        self.leave()
        self.check_step(rc, "rdma_resolve_route")

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

    def disconnect(self):
        """End the connection: the queue pair goes to ERR, and both sides get DISCONNECTED."""
        cdef int rc
        self.on_device("rdma_disconnect")
        self.enter()
        with nogil:
            rc = verbs.rn_disconnect(self.library.c, self.ptr)
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
        cdef QP qp
        self.usable()
        if self.qp is not None:
            raise ValueError(f"{self!r} already has a queue pair")
        if self.ptr.verbs is NULL or self.ptr.verbs is not pd.context.ptr:
            raise ValueError(f"{pd!r} and {self!r} belong to different contexts")
        qp = QP.__new__(QP)
        self.enter()
        try:
            create_qp(qp, pd, init_attr, self.ptr)
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


cdef uint8_t data_length(bytes data) except? 255:
    if len(data) > 255:
        raise ValueError(f"private data of {len(data)} bytes is too long: a message carries at most 255")
    return len(data)


cdef int fill_param(verbs.rdma_conn_param *c, bytes data, int responder_resources, int initiator_depth,
                    int retry_count, int rnr_retry_count) except -1:
    for name, value, most in (
        ("responder_resources", responder_resources, 255), ("initiator_depth", initiator_depth, 255),
        ("retry_count", retry_count, 7), ("rnr_retry_count", rnr_retry_count, 7),
    ):
        if not 0 <= value <= most:
            raise ValueError(f"{name} {value} is not in 0..{most}")
    memset(c, 0, sizeof(c[0]))
    c.private_data = <const char *>data if data else NULL
    c.private_data_len = data_length(data)
    c.responder_resources = responder_resources
    c.initiator_depth = initiator_depth
    c.retry_count = retry_count
    c.rnr_retry_count = rnr_retry_count
    return 0
