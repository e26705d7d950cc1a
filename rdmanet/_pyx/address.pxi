# The addresses of peers, as a record (AHAttr) and as a handle (AH).
#
# A connected queue pair gets its peer's address once, as an attribute of modify(). Each datagram request names it as an
# address handle: the record, which the device has checked and keeps. A request holds its AH until it completes, so a
# program may drop the AH earlier. What happens if it closes the AH while a request uses it depends on the device.
#
# The sender of a datagram follows from its completion and the 40 bytes of routing header (GRH) in front of the payload:
# AH.from_wc() creates the handle for an answer from them.


@_late
def GlobalRoute():
    @_record
    class GlobalRoute(_FrozenRecord):
        """The part of an address that routes beyond the subnet; on Ethernet it is the whole address.

        Names as in struct ibv_global_route; see ibv_create_ah(3).
        """
        dgid: bytes
        flow_label: int = 0
        sgid_index: int = 0
        hop_limit: int = 64
        traffic_class: int = 0
    return GlobalRoute


@_late
def AHAttr():
    import_dataclasses()

    @_record
    class AHAttr(_Record):
        """The address of a peer: its GID, or its LID within an InfiniBand subnet, and how packets get there.

        See ibv_create_ah(3).

        :param dgid: the peer's GID, 16 bytes; None if only the LID is used
        :param sgid_index: which GID of the local port packets come from
        :param hop_limit: how many routers packets may pass
        :param traffic_class: how routers treat the packets
        :param flow_label: a label for packets that routers treat alike
        :param dlid: the peer's LID, on InfiniBand
        :param sl: the service level, on InfiniBand; the priority, on Ethernet
        :param src_path_bits: which LID of the local port packets come from
        :param static_rate: a limit of the rate, a value of enum ibv_rate; 0 is none
        :param port_num: the local port
        :param gr: the fields of the route as one: AHAttr(gr=GlobalRoute(...))
        """
        dgid: bytes | None = None
        sgid_index: int = 0
        hop_limit: int = 64
        traffic_class: int = 0
        flow_label: int = 0
        dlid: int = 0
        sl: int = 0
        src_path_bits: int = 0
        static_rate: int = 0
        port_num: int = 1
        gr: dataclasses.InitVar[GlobalRoute | None] = None

        def __init__(self, *values, **named):
            super().__init__(*values, **named)
            gr = self.__dict__.pop("gr")
            if gr is not None:
                self.dgid, self.flow_label, self.sgid_index = gr.dgid, gr.flow_label, gr.sgid_index
                self.hop_limit, self.traffic_class = gr.hop_limit, gr.traffic_class

        @property
        def is_global(self):
            """Whether there is a global route; without one the peer is in the local subnet, at dlid."""
            return self.dgid is not None

        @property
        def global_route(self):
            """The fields of the route as a GlobalRoute, or None."""
            if self.dgid is None:
                return None
            return core.GlobalRoute(self.dgid, self.flow_label, self.sgid_index, self.hop_limit, self.traffic_class)
    return AHAttr


cdef int fill_ah(verbs.ibv_ah_attr *c, attr) except -1:
    cdef bytes gid
    if attr.dgid is not None:
        gid = gid_bytes(attr.dgid, "dgid")
        memcpy(c.grh.dgid.raw, <const char *>gid, 16)
        c.is_global = 1
        c.grh.sgid_index = field(attr, "sgid_index", 0xff)
        c.grh.hop_limit = field(attr, "hop_limit", 0xff)
        c.grh.traffic_class = field(attr, "traffic_class", 0xff)
        c.grh.flow_label = field(attr, "flow_label", 0xffffffff)
    c.dlid = field(attr, "dlid", 0xffff)
    c.sl = field(attr, "sl", 0xff)
    c.src_path_bits = field(attr, "src_path_bits", 0xff)
    c.static_rate = field(attr, "static_rate", 0xff)
    c.port_num = field(attr, "port_num", 0xff)
    return 0


cdef object read_ah(verbs.ibv_ah_attr *c):
    return core.AHAttr(
        dgid=(<char *>c.grh.dgid.raw)[:16] if c.is_global else None, sgid_index=c.grh.sgid_index,
        hop_limit=c.grh.hop_limit, traffic_class=c.grh.traffic_class, flow_label=c.grh.flow_label,
        dlid=c.dlid, sl=c.sl, src_path_bits=c.src_path_bits, static_rate=c.static_rate, port_num=c.port_num,
    )


cdef bytes gid_bytes(gid, str name):
    """A GID as 16 bytes, from bytes or from an IP address; an IPv4 address becomes IPv4-mapped."""
    cdef bytes raw
    packed = getattr(gid, "packed", None)  # of an address of ipaddress, which few programs import
    if packed is not None and gid.version == 4:
        return bytes(10) + b"\xff\xff" + packed
    raw = copy_of(gid) if packed is None else packed
    if len(raw) != 16:
        raise ValueError(f"{name}: {len(raw)} bytes, a GID has 16")
    return raw


cdef str describe_way(Context context, ah):
    """An address as text, with the local GID that would be used: a wrong index is the usual error."""
    import ipaddress
    try:
        gid = context.query_gid(ah.port_num, ah.sgid_index)
    except OSError:
        gid = b""
    if any(gid):
        mine = str(ipaddress.IPv6Address(gid))
    else:
        mine = "nothing in the port's table; Context.gid_table() lists what there is"
    to = "no GID" if ah.dgid is None else str(ipaddress.IPv6Address(gid_bytes(ah.dgid, "dgid")))
    return f"address: to {to} from GID index {ah.sgid_index} of port {ah.port_num} ({mine})"


@cython.no_gc_clear
cdef class AH(Resource):
    """An address handle: the destination of datagrams.

    :param pd: the domain of the queue pairs that use it
    :param attr: an AHAttr, which it keeps as `attr`
    :raises OSError: EINVAL, for instance without a GID where the port is an Ethernet one
    """

    cdef verbs.ibv_ah *ptr
    cdef readonly PD pd
    cdef readonly object attr

    def __init__(self, PD pd not None, attr):
        cdef verbs.ibv_ah_attr c
        cdef int rc
        self.unmade()
        pd.usable()
        memset(&c, 0, sizeof(c))
        fill_ah(&c, attr)
        with nogil:
            rc = verbs.rn_create_ah(pd.context.library.c, pd.ptr, &c, &self.ptr)
        if rc < 0:
            raise OSError(-rc, f"ibv_create_ah: {strerror(-rc).decode()}; {describe_way(pd.context, attr)}")
        self.pd = pd
        self.attr = attr
        pd.context.add_child()
        self.opened(AHS)

    @staticmethod
    def from_wc(PD pd not None, WC wc not None, grh, uint8_t port_num=1):
        """The handle for the sender of a datagram.

        :param wc: the completion of its receive
        :param grh: the first 40 bytes of the receive's buffer; they count if wc_flags has GRH
        :raises OSError: EOPNOTSUPP if the library cannot tell the sender's address
        """
        cdef verbs.ibv_ah_attr attr
        cdef verbs.ibv_grh header
        cdef Py_buffer raw
        cdef int rc
        PyObject_GetBuffer(grh, &raw, PyBUF_SIMPLE)
        try:
            pd.usable()
            if raw.len < 40:
                raise ValueError(f"AH.from_wc: {raw.len} bytes, a GRH has 40")
            memcpy(&header, raw.buf, 40)
        finally:
            PyBuffer_Release(&raw)
        memset(&attr, 0, sizeof(attr))
        with nogil:
            rc = verbs.rn_init_ah_from_wc(pd.context.library.c, pd.context.ptr, port_num, &wc.c, &header, &attr)
        check(rc, "ibv_init_ah_from_wc")
        return AH(pd, read_ah(&attr))

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        return f"<AH to {self.attr}{state_of(self)}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_ah *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_destroy_ah(self.pd.context.library.c, ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_destroy_ah")
        self.pd.context.remove_child()
        self.destroyed()
        return 0
