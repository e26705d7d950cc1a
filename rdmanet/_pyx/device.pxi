# Devices and contexts: finding, opening, asking, closing.
#
# A Device is an entry of a library's list. Opening it gives a Context, the parent of all other objects. A context's
# async_fd becomes readable for events of the device, its ports, queues and queue pairs; events of completions come by a
# CompChannel, which has a descriptor of its own.


cdef class Device:
    """A device as a library lists it; open() returns a Context.

    :ivar name: its name, as in ibv_devices(1)
    :ivar guid: its GUID, an int of 64 bits
    :ivar node_type: a NodeType
    :ivar transport_type: a TransportType
    :ivar library: the library that lists it
    """

    cdef readonly Library library
    cdef readonly str name
    cdef readonly object node_type
    cdef readonly object transport_type
    cdef readonly object guid

    def __cinit__(self, token=None):
        made_here(token, "use devices() or Library.devices()")

    def __repr__(self):
        return f"<Device {self.name} of {self.library.name}>"

    def open(self):
        """Open the device.

        :raises DeviceNotFoundError: it has gone since it was listed
        :raises OSError: it cannot be opened; a note says what to do about permissions and modules. EINVAL of the
            embedded device means that an environment variable is wrong; the message says which
        """
        cdef verbs.ibv_device **devices
        cdef verbs.ibv_context *ptr = NULL
        cdef int count, i, rc = 1
        check_kernel(verbs.rn_get_device_list(self.library.c, &count, &devices), "ibv_get_device_list")
        try:
            for i in range(count):
                if self.library.c.ibv_get_device_name(devices[i]).decode() == self.name:
                    with nogil:
                        rc = verbs.rn_open_device(self.library.c, devices[i], &ptr)
                    break
        finally:
            verbs.rn_free_device_list(self.library.c, devices)
        if rc == 1:
            raise DeviceNotFoundError(ENODEV, f"device {self.name} no longer exists")
        check_open(self.library, rc, f"ibv_open_device({self.name})")
        return _context(self.library, ptr, self.name, True)


cdef Device _device(Library library, verbs.ibv_device *c):
    cdef Device device = Device.__new__(Device, _HERE)
    cdef uint64_t guid = library.c.ibv_get_device_guid(c)
    device.library = library
    device.name = library.c.ibv_get_device_name(c).decode()
    device.node_type = enum_of(core.NodeType, c.node_type)
    device.transport_type = enum_of(core.TransportType, c.transport_type)
    device.guid = int.from_bytes((<char *>&guid)[:8], "big")
    return device


def devices():
    """All devices: the system's, if its libraries are installed, and the embedded one."""
    found = []
    system = Library.system()
    if system is not None:
        try:
            found += system.devices()
        except OSError as exc:
            _missing["rdma-core"] = ". ".join([str(exc), *getattr(exc, "__notes__", ())])
    try:
        found += Library.embedded().devices()
    except DeviceNotFoundError:
        pass
    return found


ctypedef verbs.ibv_context *(*cm_hold_fn)() noexcept nogil
ctypedef void (*cm_release_fn)(verbs.ibv_context *) noexcept nogil


@cython.no_gc_clear
cdef class Context(Resource):
    """An open device: the parent of all its objects.

    Device.open() creates it, or the connection manager does (CMID.context). The connection manager shares one context
    among all its identifiers, and closes it when the last event channel and all objects of the context are closed.

    :ivar name: the name of the device
    :ivar library: the library through which it is used
    :ivar owned: whether close() closes it; otherwise the connection manager does
    """

    cdef verbs.ibv_context *ptr
    cdef readonly Library library
    cdef readonly str name
    cdef readonly bint owned
    cdef Py_ssize_t children
    cdef bint gone                 # the connection manager has closed it
    cdef verbs.ibv_context *held   # the connection manager's context, kept open for the children if `owned` is false
    cdef object by_address  # ibv_qp, ibv_cq and ibv_srq address to weakref, to name the object of an async event
    cdef dict listeners     # listeners to asynchronous events: id to weakref
    cdef object reading     # a lock: an event is either in the queue, or has been passed to all listeners

    def __cinit__(self, token=None):
        made_here(token, "use Device.open()")
        self.by_address = {}
        self.listeners = {}
        self.reading = threading.RLock()    # reentrant: a finalizer may run in between and read as well

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        cdef str state
        if self.owned:
            state = state_of(self)
        elif self.pid != verbs.rn_pid:
            state = f" of process {self.pid}"
        else:
            state = " closed" if self.gone else ""
        return f"<Context {self.name} of {self.library.name}{state}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL and self.owned

    cdef int usable(self) except -1:
        if self.owned:
            return Resource.usable(self)
        if self.pid != verbs.rn_pid:
            raise RuntimeError(f"this Context was opened by process {self.pid}; open it again after fork")
        if self.gone:
            raise ValueError("this Context was closed together with the connection manager's last event channel")
        return 0

    cdef void add_child(self) noexcept:
        """Count a child. The connection manager's context is kept open as long as it has children, whatever happens to
        the identifiers; the system's librdmacm never closes one.

        Another thread may add or remove a child while the library works. So two threads may each add a first child and
        take a hold; one of the two is kept."""
        cdef cm_hold_fn hold
        cdef verbs.ibv_context *held
        self.children += 1
        if self.held is NULL and not self.owned and self.library.embedded_device:
            hold = <cm_hold_fn>self.library.symbol("rdmanet_soft_cm_hold")
            with nogil:
                held = hold()
            if self.held is NULL:
                self.held = held
            else:
                self.release(held)

    cdef void release(self, verbs.ibv_context *held) noexcept:
        cdef cm_release_fn give_back
        if held is not NULL:
            give_back = <cm_release_fn>self.library.symbol("rdmanet_soft_cm_release")
            with nogil:
                give_back(held)

    cdef void remove_child(self) noexcept:
        """The same in reverse: clear the hold before another thread can see it."""
        cdef verbs.ibv_context *held = self.held
        self.children -= 1
        if self.children:
            return
        if not self.owned and not self.library.channels:
            self.gone = True
        self.held = NULL
        self.release(held)

    cdef int destroy(self) except -1:
        cdef verbs.ibv_context *ptr = self.ptr
        cdef int rc
        if self.children:
            raise OSError(EBUSY, f"{self!r} still has {self.children} open objects: close them first")
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_close_device(self.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_close_device")
        self.destroyed()
        return 0

    @property
    def async_fd(self):
        """A descriptor that is readable when there are asynchronous events."""
        self.usable()
        return self.ptr.async_fd

    @property
    def num_comp_vectors(self):
        """How many completion vectors (interrupts) it has."""
        self.usable()
        return self.ptr.num_comp_vectors

    @property
    def transport_type(self):
        """The protocol family that the device speaks, a TransportType."""
        self.usable()
        return enum_of(core.TransportType, self.ptr.device.transport_type)

    cdef int ask(self, verbs.ibv_device_attr_ex *attr) except -1:
        """The properties of the device, as numbers."""
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_query_device_ex(self.library.c, self.ptr, attr)
        return check(rc, "ibv_query_device")

    def query_device(self):
        """The properties of the device."""
        cdef verbs.ibv_device_attr_ex ex
        cdef verbs.ibv_device_attr *a = &ex.orig_attr
        self.ask(&ex)
        return core.DeviceAttr(
            fw_ver=a.fw_ver.decode(errors="replace"),
            node_guid=int.from_bytes((<char *>&a.node_guid)[:8], "big"),
            sys_image_guid=int.from_bytes((<char *>&a.sys_image_guid)[:8], "big"),
            max_mr_size=a.max_mr_size, page_size_cap=a.page_size_cap, vendor_id=a.vendor_id,
            vendor_part_id=a.vendor_part_id, hw_ver=a.hw_ver, max_qp=a.max_qp, max_qp_wr=a.max_qp_wr,
            device_cap_flags=a.device_cap_flags, max_sge=a.max_sge, max_sge_rd=a.max_sge_rd,
            max_cq=a.max_cq, max_cqe=a.max_cqe, max_mr=a.max_mr, max_pd=a.max_pd,
            max_qp_rd_atom=a.max_qp_rd_atom, max_res_rd_atom=a.max_res_rd_atom,
            max_qp_init_rd_atom=a.max_qp_init_rd_atom, atomic_cap=enum_of(core.AtomicCap, a.atomic_cap),
            max_mw=a.max_mw, max_ah=a.max_ah, max_srq=a.max_srq, max_srq_wr=a.max_srq_wr,
            max_srq_sge=a.max_srq_sge, max_pkeys=a.max_pkeys, local_ca_ack_delay=a.local_ca_ack_delay,
            phys_port_cnt=a.phys_port_cnt, odp_general_caps=ex.odp_caps.general_caps,
            odp_rc_caps=ex.odp_caps.per_transport_caps.rc_odp_caps, max_mcast_grp=a.max_mcast_grp,
            max_mcast_qp_attach=a.max_mcast_qp_attach, max_total_mcast_qp_attach=a.max_total_mcast_qp_attach,
            max_dm_size=ex.max_dm_size, max_cq_count=ex.cq_mod_caps.max_cq_count,
            max_cq_period=ex.cq_mod_caps.max_cq_period,
            completion_timestamp_mask=ex.completion_timestamp_mask, hca_core_clock=ex.hca_core_clock,
        )

    def query_rt_values(self):
        """The device's clock now, in nanoseconds. Completion timestamps are read from it.

        :raises OSError: EOPNOTSUPP, where it cannot be read
        """
        cdef verbs.ibv_values_ex values
        cdef int rc
        self.usable()
        memset(&values, 0, sizeof(values))
        with nogil:
            rc = verbs.rn_query_rt_values(self.ptr, &values)
        check(rc, "ibv_query_rt_values_ex")
        return values.raw_clock.tv_sec * 1000000000 + values.raw_clock.tv_nsec

    def query_port(self, uint8_t port_num=1):
        """The state and limits of a port; the first one has number 1."""
        cdef verbs.ibv_port_attr a
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_query_port(self.library.c, self.ptr, port_num, &a)
        check(rc, f"ibv_query_port({port_num})")
        return core.PortAttr(
            state=enum_of(core.PortState, a.state), max_mtu=enum_of(core.MTU, a.max_mtu),
            active_mtu=enum_of(core.MTU, a.active_mtu), gid_tbl_len=a.gid_tbl_len,
            port_cap_flags=a.port_cap_flags, max_msg_sz=a.max_msg_sz, pkey_tbl_len=a.pkey_tbl_len,
            lid=a.lid, sm_lid=a.sm_lid, lmc=a.lmc, active_width=a.active_width,
            active_speed=a.active_speed_ex or a.active_speed, phys_state=a.phys_state,
            link_layer=enum_of(core.LinkLayer, a.link_layer), flags=a.flags,
        )

    def query_gid(self, uint8_t port_num=1, int index=0):
        """One address of a port, as 16 bytes."""
        cdef verbs.ibv_gid gid
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_query_gid(self.library.c, self.ptr, port_num, index, &gid)
        check(rc, f"ibv_query_gid(port {port_num}, index {index})")
        return (<char *>gid.raw)[:16]

    def gid_table(self, port_num=None):
        """The addresses in use, of one port or of all, with index and type."""
        cdef verbs.ibv_gid_entry entry
        cdef verbs.ibv_gid gid
        cdef int rc
        cdef uint8_t port
        cdef uint32_t index
        entries = []
        ports = range(1, self.query_device().phys_port_cnt + 1) if port_num is None else (port_num,)
        for port in ports:
            for index in range(self.query_port(port).gid_tbl_len):
                rc = verbs.rn_query_gid_ex(self.library.c, self.ptr, port, index, &entry)
                if rc == -EOPNOTSUPP:  # rdma-core before version 32 has no types
                    rc = verbs.rn_query_gid(self.library.c, self.ptr, port, index, &gid)
                    memset(&entry, 0, sizeof(entry))
                    entry.gid, entry.gid_index, entry.port_num = gid, index, port
                if rc < 0 or not any((<char *>entry.gid.raw)[:16]):
                    continue  # an empty entry of the table
                entries.append(core.GIDEntry(
                    (<char *>entry.gid.raw)[:16], entry.gid_index, entry.port_num,
                    enum_of(core.GIDType, entry.gid_type), entry.ndev_ifindex,
                ))
        return entries

    def pkey(self, uint8_t port_num=1, int index=0):
        """One partition key of a port."""
        cdef verbs.be16 key
        cdef int rc
        self.usable()
        with nogil:
            rc = verbs.rn_query_pkey(self.library.c, self.ptr, port_num, index, &key)
        check(rc, f"ibv_query_pkey(port {port_num}, index {index})")
        return int.from_bytes((<char *>&key)[:2], "big")

    def get_async_event(self):
        """The next asynchronous event, acknowledged, or None if there is none.

        Only one reader gets an event; every listener gets it too. The streams on a CMID's context read its events, so
        a program that needs all of them uses `DeviceEvents`.
        """
        self.usable()   # first: in a forked child the lock may be held by a thread that does not exist
        # The lock: a caller that finds no event concludes that there is none. So no other thread may hold an event that
        # it has read and not yet passed on.
        with self.reading:
            found = self.read_async_event()
            if found is not None:
                for reference in list(self.listeners.values()):
                    listener = reference()
                    if listener is not None:
                        listener(found)
        return found

    def add_listener(self, listener):
        """From now on, call `listener(event)` for each asynchronous event that anyone reads, in the reader's thread.

        The listener must not raise. The context holds only a weak reference to it.
        """
        self.listeners[id(listener)] = weakref.ref(listener)

    def remove_listener(self, listener):
        """Stop calling the listener. Removing a listener that was not added does nothing."""
        self.listeners.pop(id(listener), None)

    cdef object read_async_event(self):
        cdef verbs.ibv_async_event event
        cdef int rc
        cdef object kind
        self.usable()   # again: it may have been closed while waiting for the lock
        with nogil:
            rc = verbs.rn_get_async_event(self.library.c, self.ptr, &event)
        if rc == -EAGAIN or rc == -EINTR:
            return None
        check(rc, "ibv_get_async_event")
        kind = enum_of(core.EventType, event.event_type)
        try:
            if kind == verbs.IBV_EVENT_CQ_ERR:
                return event_of(kind, "cq", self.at_address(event.element.cq))
            if kind in _QP_EVENTS:
                return event_of(kind, "qp", self.at_address(event.element.qp))
            if kind in _SRQ_EVENTS:
                return event_of(kind, "srq", self.at_address(event.element.srq))
            if kind in _PORT_EVENTS:
                return event_of(kind, "port_num", event.element.port_num)
            return event_of(kind)
        finally:
            verbs.rn_ack_async_event(self.library.c, &event)

    cdef object at_address(self, void *address):
        reference = self.by_address.get(<uintptr_t>address)
        return None if reference is None else reference()

    def counters(self):
        """The embedded device's counters; an empty dict for other devices."""
        self.usable()
        return context_counters(self.library, self.ptr)

    def set_faults(self, str text):
        """Inject faults into this context, on the embedded device. docs/testing.md describes the text.

        It replaces the previous text and restarts all counts; an empty text ends all faults.

        :raises ValueError: the text is wrong; the message says what is expected
        :raises OSError: EOPNOTSUPP, on another device
        """
        self.usable()
        set_faults(self.library, self.ptr, text)

    def faults(self):
        """The faults that were set for this context, each with how often it has happened in it since."""
        self.usable()
        return counted_faults(self.library, self.ptr)


cdef Context _context(Library library, verbs.ibv_context *ptr, str name, bint owned):
    cdef Context context = Context.__new__(Context, _HERE)
    context.library, context.name, context.ptr, context.owned = library, name, ptr, owned
    if owned:
        context.opened(CONTEXTS)
    set_nonblocking(context, ptr.async_fd)
    return context


cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int cmd, ...)
    enum: F_GETFL, F_SETFL, O_NONBLOCK


cdef int set_nonblocking(Resource owner, int fd) except -1:
    """Make a descriptor non-blocking, since the libraries get events with read(2). On failure close its owner."""
    cdef int flags = fcntl(fd, F_GETFL), error
    if flags < 0 or fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0:
        error = errno
        if owner.is_open():
            owner.destroy()
        raise OSError(error, f"fcntl(O_NONBLOCK): {strerror(error).decode()}")
    return 0
