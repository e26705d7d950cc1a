# Addresses of peers: the way to one, as a record and as a handle.
#
# A connected queue pair is given its peer's address once, as an attribute of modify(). A datagram names
# it in every request, as an address handle (AH): the record, checked and kept by the device. A request
# holds its AH until it completes, so forgetting one is safe; closing it while a request with it is on its
# way is up to the device.
#
# Whom a datagram came from is told by its completion together with the 40 bytes of routing header (GRH)
# that stand before the payload: AH.from_wc() makes the handle for an answer.


@dataclasses.dataclass(frozen=True)
class GlobalRoute:
    """The part of an address that leads beyond the subnet; on Ethernet it is the whole address.

    Names as in struct ibv_global_route; see ibv_create_ah(3).
    """
    dgid: bytes
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0


@dataclasses.dataclass
class AHAttr:
    """The way to a peer: its GID, or its LID within an InfiniBand subnet, and how to go.

    See ibv_create_ah(3).

    :param dgid: the peer's GID, 16 bytes; None: the LID is all there is
    :param sgid_index: which of our port's GIDs it comes from
    :param hop_limit: how many routers it may pass
    :param traffic_class: how routers are to treat it, and
    :param flow_label: what they are to treat alike
    :param dlid: the peer's LID, on InfiniBand
    :param sl: the service level, on InfiniBand; the priority, on Ethernet
    :param src_path_bits: which of our port's LIDs it comes from
    :param static_rate: a limit to the rate, as enum ibv_rate has it; 0 is none
    :param port_num: our port
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

    def __post_init__(self, gr):
        if gr is not None:
            self.dgid, self.flow_label, self.sgid_index = gr.dgid, gr.flow_label, gr.sgid_index
            self.hop_limit, self.traffic_class = gr.hop_limit, gr.traffic_class

    @property
    def is_global(self):
        """Whether there is a route: without one the peer is in our subnet, at dlid."""
        return self.dgid is not None

    @property
    def global_route(self):
        """The fields of the route as one, or None."""
        if self.dgid is None:
            return None
        return GlobalRoute(self.dgid, self.flow_label, self.sgid_index, self.hop_limit, self.traffic_class)


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
    return AHAttr(
        dgid=(<char *>c.grh.dgid.raw)[:16] if c.is_global else None, sgid_index=c.grh.sgid_index,
        hop_limit=c.grh.hop_limit, traffic_class=c.grh.traffic_class, flow_label=c.grh.flow_label,
        dlid=c.dlid, sl=c.sl, src_path_bits=c.src_path_bits, static_rate=c.static_rate, port_num=c.port_num,
    )


cdef bytes gid_bytes(gid, str name):
    """16 bytes, of bytes or of an IP address; an IPv4 address in its form as a GID."""
    cdef bytes raw
    if isinstance(gid, ipaddress.IPv4Address):
        return bytes(10) + b"\xff\xff" + gid.packed
    raw = gid.packed if isinstance(gid, ipaddress.IPv6Address) else copy_of(gid)
    if len(raw) != 16:
        raise ValueError(f"{name}: {len(raw)} bytes, a GID has 16")
    return raw


cdef str describe_way(Context context, ah):
    """An address in words. The GID that would be used is told, since a wrong index is the usual cause."""
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
    """An address handle: where a datagram goes.

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
        """The handle that leads back to where a datagram came from.

        :param wc: the completion of its receive
        :param grh: the first 40 bytes of the receive's buffer; they count if wc_flags has GRH
        :raises OSError: EOPNOTSUPP, where the library cannot tell
        """
        cdef verbs.ibv_ah_attr attr
        cdef verbs.ibv_grh header
        cdef const unsigned char[::1] raw = memoryview(grh).cast("B")
        cdef int rc
        pd.usable()
        if raw.shape[0] < 40:
            raise ValueError(f"AH.from_wc: {raw.shape[0]} bytes, a GRH has 40")
        memcpy(&header, &raw[0], 40)
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
