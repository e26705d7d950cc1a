# Events of the connection manager, and the channel where they come.
#
# Every step ends with an event on the identifier's channel, whose fd is all that a program waits for. Reading an event
# copies and acknowledges it, because destroying an identifier waits until its events are acknowledged.
#
# An event is about an identifier (cm.pxi). A channel finds it by its address in its library's table; a CONNECT_REQUEST
# brings a new one. What fails has an exception: CMEvent.error().


CMEventType = core.CMEventType     # which every connection needs


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
            return not_ours_error(peer, self.private_data)
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

    def create_id(self, ps=verbs.RDMA_PS_TCP):
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
