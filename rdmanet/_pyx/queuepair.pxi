# Queue pairs: attributes, the state machine, posting.
#
#     RESET -> INIT -> RTR -> RTS          (to_init, to_rtr, to_rts, or the connection manager)
#       any -> ERR: all that is posted completes as flushed; any -> RESET: all is forgotten
#
# Each step of modify() has attributes that must be given and some that may; the table below is the
# InfiniBand specification's. The device is asked first. Only when it refuses is the table consulted,
# to say which attribute is missing or out of place: devices allow more or less than the specification,
# and their word counts.


class QPType(enum.IntEnum):
    RC = verbs.IBV_QPT_RC
    UC = verbs.IBV_QPT_UC
    UD = verbs.IBV_QPT_UD
    RAW_PACKET = verbs.IBV_QPT_RAW_PACKET
    XRC_SEND = verbs.IBV_QPT_XRC_SEND
    XRC_RECV = verbs.IBV_QPT_XRC_RECV
    DRIVER = verbs.IBV_QPT_DRIVER


class QPState(enum.IntEnum):
    RESET = verbs.IBV_QPS_RESET
    INIT = verbs.IBV_QPS_INIT
    RTR = verbs.IBV_QPS_RTR
    RTS = verbs.IBV_QPS_RTS
    SQD = verbs.IBV_QPS_SQD
    SQE = verbs.IBV_QPS_SQE
    ERR = verbs.IBV_QPS_ERR
    UNKNOWN = verbs.IBV_QPS_UNKNOWN


class MigState(enum.IntEnum):
    MIGRATED = verbs.IBV_MIG_MIGRATED
    REARM = verbs.IBV_MIG_REARM
    ARMED = verbs.IBV_MIG_ARMED


class QPAttrMask(enum.IntFlag):
    """Which attributes a modify() gives; it follows from the QPAttr."""
    STATE = verbs.IBV_QP_STATE
    CUR_STATE = verbs.IBV_QP_CUR_STATE
    EN_SQD_ASYNC_NOTIFY = verbs.IBV_QP_EN_SQD_ASYNC_NOTIFY
    ACCESS_FLAGS = verbs.IBV_QP_ACCESS_FLAGS
    PKEY_INDEX = verbs.IBV_QP_PKEY_INDEX
    PORT = verbs.IBV_QP_PORT
    QKEY = verbs.IBV_QP_QKEY
    AV = verbs.IBV_QP_AV
    PATH_MTU = verbs.IBV_QP_PATH_MTU
    TIMEOUT = verbs.IBV_QP_TIMEOUT
    RETRY_CNT = verbs.IBV_QP_RETRY_CNT
    RNR_RETRY = verbs.IBV_QP_RNR_RETRY
    RQ_PSN = verbs.IBV_QP_RQ_PSN
    MAX_QP_RD_ATOMIC = verbs.IBV_QP_MAX_QP_RD_ATOMIC
    ALT_PATH = verbs.IBV_QP_ALT_PATH
    MIN_RNR_TIMER = verbs.IBV_QP_MIN_RNR_TIMER
    SQ_PSN = verbs.IBV_QP_SQ_PSN
    MAX_DEST_RD_ATOMIC = verbs.IBV_QP_MAX_DEST_RD_ATOMIC
    PATH_MIG_STATE = verbs.IBV_QP_PATH_MIG_STATE
    CAP = verbs.IBV_QP_CAP
    DEST_QPN = verbs.IBV_QP_DEST_QPN
    RATE_LIMIT = verbs.IBV_QP_RATE_LIMIT


@dataclasses.dataclass
class QPCap:
    """The sizes of a queue pair. What the device grants is at least what is asked for."""
    max_send_wr: int = 1
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclasses.dataclass
class QPInitAttr:
    """How a queue pair is made."""
    send_cq: "CQ"
    recv_cq: "CQ"
    cap: QPCap = dataclasses.field(default_factory=QPCap)
    qp_type: QPType = QPType.RC
    sq_sig_all: bool = False


@dataclasses.dataclass
class AHAttr:
    """The way to a peer: its GID, or its LID within an InfiniBand subnet, and how to go."""
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


@dataclasses.dataclass
class QPAttr:
    """Attributes of a queue pair; None means not given. Names as in struct ibv_qp_attr."""
    qp_state: QPState | None = None
    cur_qp_state: QPState | None = None
    path_mtu: MTU | None = None
    path_mig_state: MigState | None = None
    qkey: int | None = None
    rq_psn: int | None = None
    sq_psn: int | None = None
    dest_qp_num: int | None = None
    qp_access_flags: AccessFlags | None = None
    cap: QPCap | None = None
    ah_attr: AHAttr | None = None
    alt_ah_attr: AHAttr | None = None
    pkey_index: int | None = None
    alt_pkey_index: int | None = None
    en_sqd_async_notify: bool | None = None
    max_rd_atomic: int | None = None
    max_dest_rd_atomic: int | None = None
    min_rnr_timer: int | None = None
    port_num: int | None = None
    timeout: int | None = None
    retry_cnt: int | None = None
    rnr_retry: int | None = None
    alt_port_num: int | None = None
    alt_timeout: int | None = None
    rate_limit: int | None = None

    @property
    def mask(self):
        """Which are given."""
        mask = QPAttrMask(0)
        for bit, name in _ATTRIBUTES.items():
            if getattr(self, name) is not None:
                mask |= bit
        return mask


_ATTRIBUTES = {
    QPAttrMask.STATE: "qp_state", QPAttrMask.CUR_STATE: "cur_qp_state",
    QPAttrMask.EN_SQD_ASYNC_NOTIFY: "en_sqd_async_notify", QPAttrMask.ACCESS_FLAGS: "qp_access_flags",
    QPAttrMask.PKEY_INDEX: "pkey_index", QPAttrMask.PORT: "port_num", QPAttrMask.QKEY: "qkey",
    QPAttrMask.AV: "ah_attr", QPAttrMask.PATH_MTU: "path_mtu", QPAttrMask.TIMEOUT: "timeout",
    QPAttrMask.RETRY_CNT: "retry_cnt", QPAttrMask.RNR_RETRY: "rnr_retry", QPAttrMask.RQ_PSN: "rq_psn",
    QPAttrMask.MAX_QP_RD_ATOMIC: "max_rd_atomic", QPAttrMask.ALT_PATH: "alt_ah_attr",
    QPAttrMask.MIN_RNR_TIMER: "min_rnr_timer", QPAttrMask.SQ_PSN: "sq_psn",
    QPAttrMask.MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic", QPAttrMask.PATH_MIG_STATE: "path_mig_state",
    QPAttrMask.CAP: "cap", QPAttrMask.DEST_QPN: "dest_qp_num", QPAttrMask.RATE_LIMIT: "rate_limit",
}


# ---- Which attributes a transition takes: (from, to) to (required, optional), by transport ------

def _transitions():
    M, S = QPAttrMask, QPState
    initial = M.PKEY_INDEX | M.PORT
    rights = initial | M.ACCESS_FLAGS
    uc_rtr = M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN
    rc_rtr = uc_rtr | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
    rc_rts = M.SQ_PSN | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC
    at_rtr = M.ALT_PATH | M.ACCESS_FLAGS | M.PKEY_INDEX
    uc_rts = M.CUR_STATE | M.ACCESS_FLAGS | M.ALT_PATH | M.PATH_MIG_STATE
    running = uc_rts | M.MIN_RNR_TIMER
    none, notify, ud = M(0), M.EN_SQD_ASYNC_NOTIFY, M.CUR_STATE | M.QKEY
    uc_sqd = M.PKEY_INDEX | M.AV | M.ALT_PATH | M.ACCESS_FLAGS | M.PATH_MIG_STATE
    rc_sqd = uc_sqd | M.PORT | M.MAX_QP_RD_ATOMIC | M.MIN_RNR_TIMER | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY
    return {
        QPType.RC: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (rc_rtr, at_rtr), (S.RTR, S.RTS): (rc_rts, running),
            (S.RTS, S.RTS): (none, running), (S.RTS, S.SQD): (none, notify),
            (S.SQD, S.RTS): (none, running), (S.SQD, S.SQD): (none, rc_sqd | M.MAX_DEST_RD_ATOMIC),
        },
        QPType.UC: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (uc_rtr, at_rtr), (S.RTR, S.RTS): (M.SQ_PSN, uc_rts),
            (S.RTS, S.RTS): (none, uc_rts), (S.RTS, S.SQD): (none, notify),
            (S.SQD, S.RTS): (none, uc_rts), (S.SQD, S.SQD): (none, uc_sqd),
            (S.SQE, S.RTS): (none, M.CUR_STATE | M.ACCESS_FLAGS),
        },
        QPType.UD: {
            (S.RESET, S.INIT): (initial | M.QKEY, none), (S.INIT, S.INIT): (none, initial | M.QKEY),
            (S.INIT, S.RTR): (none, M.PKEY_INDEX | M.QKEY), (S.RTR, S.RTS): (M.SQ_PSN, ud),
            (S.RTS, S.RTS): (none, ud), (S.RTS, S.SQD): (none, notify), (S.SQD, S.RTS): (none, ud),
            (S.SQD, S.SQD): (none, M.PKEY_INDEX | M.QKEY), (S.SQE, S.RTS): (none, ud),
        },
    }


_TRANSITIONS = _transitions()


cdef str attribute_names(mask):
    return ", ".join([name for bit, name in _ATTRIBUTES.items() if mask & bit])


cdef str why_refused(object qp_type, object state, attr):
    """What the specification says about a modify() that the device refused; nothing if it agrees."""
    cdef object new = state if attr.qp_state is None else attr.qp_state
    given = attr.mask & ~QPAttrMask.STATE
    if new == QPState.RESET or new == QPState.ERR:
        rule = (QPAttrMask(0), QPAttrMask.CUR_STATE)
    else:
        table = _TRANSITIONS.get(qp_type)
        if table is None:
            return ""
        rule = table.get((state, new))
        if rule is None:
            ways = [to.name for (origin, to) in table if origin == state and to != state]
            allowed = ", ".join(dict.fromkeys([*ways, "RESET", "ERR"]))
            return f"; there is no way from {state.name} to {new.name}, only to {allowed}"
    required, optional = rule
    text = ""
    if required & ~given:
        text += f"; missing: {attribute_names(required & ~given)}"
    if given & ~(required | optional):
        text += f"; not allowed: {attribute_names(given & ~(required | optional))}"
    return text


# ---- Between the records and the ABI's structs --------------------------------------------------

cdef int fill_ah(verbs.ibv_ah_attr *c, attr) except -1:
    cdef bytes gid
    if attr.dgid is not None:
        gid = attr.dgid
        if len(gid) != 16:
            raise ValueError(f"dgid: {len(gid)} bytes, a GID has 16")
        memcpy(c.grh.dgid.raw, <const char *>gid, 16)
        c.is_global = 1
        c.grh.sgid_index = attr.sgid_index
        c.grh.hop_limit = attr.hop_limit
        c.grh.traffic_class = attr.traffic_class
        c.grh.flow_label = attr.flow_label
    c.dlid = attr.dlid
    c.sl = attr.sl
    c.src_path_bits = attr.src_path_bits
    c.static_rate = attr.static_rate
    c.port_num = attr.port_num
    return 0


cdef object read_ah(verbs.ibv_ah_attr *c):
    return AHAttr(
        dgid=(<char *>c.grh.dgid.raw)[:16] if c.is_global else None, sgid_index=c.grh.sgid_index,
        hop_limit=c.grh.hop_limit, traffic_class=c.grh.traffic_class, flow_label=c.grh.flow_label,
        dlid=c.dlid, sl=c.sl, src_path_bits=c.src_path_bits, static_rate=c.static_rate, port_num=c.port_num,
    )


cdef int fill_cap(verbs.ibv_qp_cap *c, cap) except -1:
    c.max_send_wr = cap.max_send_wr
    c.max_recv_wr = cap.max_recv_wr
    c.max_send_sge = cap.max_send_sge
    c.max_recv_sge = cap.max_recv_sge
    c.max_inline_data = cap.max_inline_data
    return 0


cdef object read_cap(verbs.ibv_qp_cap *c):
    return QPCap(c.max_send_wr, c.max_recv_wr, c.max_send_sge, c.max_recv_sge, c.max_inline_data)


cdef int fill_attr(verbs.ibv_qp_attr *c, attr) except -1:
    """The struct from the record; fields that are not given stay 0. Returns the mask."""
    cdef int value
    memset(c, 0, sizeof(c[0]))
    if attr.qp_state is not None:
        value = attr.qp_state
        c.qp_state = <verbs.ibv_qp_state>value
    if attr.cur_qp_state is not None:
        value = attr.cur_qp_state
        c.cur_qp_state = <verbs.ibv_qp_state>value
    if attr.path_mtu is not None:
        value = attr.path_mtu
        c.path_mtu = <verbs.ibv_mtu>value
    if attr.path_mig_state is not None:
        value = attr.path_mig_state
        c.path_mig_state = <verbs.ibv_mig_state>value
    if attr.ah_attr is not None:
        fill_ah(&c.ah_attr, attr.ah_attr)
    if attr.alt_ah_attr is not None:
        fill_ah(&c.alt_ah_attr, attr.alt_ah_attr)
        c.alt_pkey_index = attr.alt_pkey_index or 0
        c.alt_port_num = attr.alt_port_num or attr.alt_ah_attr.port_num
        c.alt_timeout = attr.alt_timeout or 0
    if attr.cap is not None:
        fill_cap(&c.cap, attr.cap)
    c.qkey = attr.qkey or 0
    c.rq_psn = attr.rq_psn or 0
    c.sq_psn = attr.sq_psn or 0
    c.dest_qp_num = attr.dest_qp_num or 0
    c.qp_access_flags = attr.qp_access_flags or 0
    c.pkey_index = attr.pkey_index or 0
    c.en_sqd_async_notify = bool(attr.en_sqd_async_notify)
    c.max_rd_atomic = attr.max_rd_atomic or 0
    c.max_dest_rd_atomic = attr.max_dest_rd_atomic or 0
    c.min_rnr_timer = attr.min_rnr_timer or 0
    c.port_num = attr.port_num or 0
    c.timeout = attr.timeout or 0
    c.retry_cnt = attr.retry_cnt or 0
    c.rnr_retry = attr.rnr_retry or 0
    c.rate_limit = attr.rate_limit or 0
    return attr.mask


cdef object read_attr(verbs.ibv_qp_attr *c):
    return QPAttr(
        qp_state=enum_of(QPState, c.qp_state), cur_qp_state=enum_of(QPState, c.cur_qp_state),
        path_mtu=enum_of(MTU, c.path_mtu), path_mig_state=enum_of(MigState, c.path_mig_state), qkey=c.qkey,
        rq_psn=c.rq_psn, sq_psn=c.sq_psn, dest_qp_num=c.dest_qp_num,
        qp_access_flags=AccessFlags(c.qp_access_flags), cap=read_cap(&c.cap), ah_attr=read_ah(&c.ah_attr),
        alt_ah_attr=read_ah(&c.alt_ah_attr), pkey_index=c.pkey_index, alt_pkey_index=c.alt_pkey_index,
        en_sqd_async_notify=bool(c.en_sqd_async_notify), max_rd_atomic=c.max_rd_atomic,
        max_dest_rd_atomic=c.max_dest_rd_atomic, min_rnr_timer=c.min_rnr_timer, port_num=c.port_num,
        timeout=c.timeout, retry_cnt=c.retry_cnt, rnr_retry=c.rnr_retry, alt_port_num=c.alt_port_num,
        alt_timeout=c.alt_timeout, rate_limit=c.rate_limit,
    )


# Big messages are copied while they are posted to the embedded device; other threads may run meanwhile.
cdef enum:
    LONG_COPY = 65536

cdef uint64_t _next_generation = 0


@cython.no_gc_clear
cdef class QP(Resource):
    """A queue pair.

    :param pd: its protection domain; the regions of its requests must be of the same
    :param init_attr: its queues and sizes; cap is updated to what the device grants
    """

    cdef verbs.ibv_qp *ptr
    cdef readonly PD pd
    cdef readonly CQ send_cq
    cdef readonly CQ recv_cq
    cdef readonly object cap
    cdef verbs.rdma_cm_id *id    # whose it is, if it was made through one; its CMID closes us before itself
    cdef uint64_t generation
    cdef _InFlight sends
    cdef _InFlight receives
    cdef object posting          # a lock

    def __init__(self, PD pd not None, init_attr):
        self.create(pd, init_attr, NULL)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        if self.ptr is NULL:
            return "<QP closed>"
        sends, receives = self.in_flight
        return (f"<QP {self.ptr.qp_num:#x} {self.qp_type.name} {self.state.name}, "
                f"in flight {sends} sends, {receives} receives>")

    cdef int create(self, PD pd, init_attr, verbs.rdma_cm_id *id) except -1:
        global _next_generation
        cdef verbs.ibv_qp_init_attr c
        cdef CQ send_cq = init_attr.send_cq, recv_cq = init_attr.recv_cq
        cdef const verbs.rn_library *library
        cdef int rc, value = init_attr.qp_type
        pd.usable()
        send_cq.usable()
        recv_cq.usable()
        same_library(pd.context, send_cq.context)
        same_library(pd.context, recv_cq.context)
        library = pd.context.library.c
        memset(&c, 0, sizeof(c))
        c.send_cq, c.recv_cq = send_cq.ptr, recv_cq.ptr
        c.qp_type = <verbs.ibv_qp_type>value
        c.sq_sig_all = bool(init_attr.sq_sig_all)
        fill_cap(&c.cap, init_attr.cap)
        if id is NULL:
            with nogil:
                rc = verbs.rn_create_qp(library, pd.ptr, &c, &self.ptr)
            check(rc, "ibv_create_qp")
        else:
            with nogil:
                rc = verbs.rn_cm_create_qp(library, id, pd.ptr, &c)
            check(rc, "rdma_create_qp")
            self.ptr = id.qp
            self.id = id
        self.pd, self.send_cq, self.recv_cq = pd, send_cq, recv_cq
        self.cap = init_attr.cap = read_cap(&c.cap)
        _next_generation = (_next_generation + 1) & 0xffff
        self.generation = _next_generation
        self.posting = threading.Lock()
        self.sends = _InFlight(self.generation, True)
        self.receives = _InFlight(self.generation, False)
        reference = weakref.ref(self)
        send_cq.qps[self.ptr.qp_num] = recv_cq.qps[self.ptr.qp_num] = reference
        pd.context.by_address[<uintptr_t>self.ptr] = reference
        pd.context.add_child()
        self.opened(QPS)
        return 0

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef const verbs.rn_library *library = self.pd.context.library.c
        cdef verbs.ibv_qp *ptr = self.ptr
        cdef object number = ptr.qp_num
        cdef int rc = 0
        # Out of the tables first: number and address may be another's as soon as they are free.
        reference = self.pd.context.by_address.pop(<uintptr_t>ptr, None)
        self.send_cq.qps.pop(number, None)
        self.recv_cq.qps.pop(number, None)
        self.ptr = NULL
        with nogil:
            if self.id is not NULL:
                verbs.rn_cm_destroy_qp(library, self.id)
            else:
                rc = verbs.rn_destroy_qp(library, ptr)
        if rc < 0:
            self.ptr = ptr
            self.pd.context.by_address[<uintptr_t>ptr] = reference
            self.send_cq.qps[number] = self.recv_cq.qps[number] = reference
            check(rc, "ibv_destroy_qp")
        self.sends.entries.clear()
        self.receives.entries.clear()
        self.pd.context.remove_child()
        self.destroyed()
        return 0

    # ---- Attributes and states ----

    @property
    def qp_num(self):
        self.usable()
        return self.ptr.qp_num

    @property
    def qp_type(self):
        self.usable()
        return enum_of(QPType, self.ptr.qp_type)

    @property
    def state(self):
        """The state that the library knows of; query() asks the device."""
        self.usable()
        return enum_of(QPState, self.ptr.state)

    @property
    def in_flight(self):
        """(sends, receives) that are posted and whose end has not been polled."""
        self.usable()
        return len(self.sends.entries), len(self.receives.entries)

    def modify(self, attr):
        """Change attributes, or the state.

        :param attr: a QPAttr with what is to change
        :raises OSError: the device refused; the message names what is missing or not allowed
        """
        cdef verbs.ibv_qp_attr c
        cdef int mask, rc
        cdef object before
        self.usable()
        mask = fill_attr(&c, attr)
        before = self.state
        with nogil:
            rc = verbs.rn_modify_qp(self.pd.context.library.c, self.ptr, &c, mask)
        if rc < 0:
            after = before if attr.qp_state is None else QPState(attr.qp_state)
            why = why_refused(self.qp_type, before, attr) if rc == -EINVAL else f"; {strerror(-rc).decode()}"
            raise OSError(
                -rc, f"ibv_modify_qp: {before.name} to {after.name} was refused{why}{self.wrong_address(attr)}")
        if attr.qp_state == QPState.RESET:
            self.sends.entries.clear()
            self.receives.entries.clear()

    cdef str wrong_address(self, attr):
        """Address errors name the GID that would be used, since a wrong index is the usual cause."""
        if attr.ah_attr is None:
            return ""
        ah = attr.ah_attr
        try:
            gid = self.pd.context.query_gid(ah.port_num, ah.sgid_index)
        except OSError:
            gid = b""
        if any(gid):
            mine = str(ipaddress.IPv6Address(gid))
        else:
            mine = "nothing in the port's table; Context.gid_table() lists what there is"
        to = "no GID" if ah.dgid is None else str(ipaddress.IPv6Address(ah.dgid))
        return f"; address: to {to} from GID index {ah.sgid_index} of port {ah.port_num} ({mine})"

    def to_init(self, int port_num=1, *, int pkey_index=0, access=0):
        """RESET to INIT. The peer gets no access to memory that is not given here."""
        self.modify(QPAttr(
            qp_state=QPState.INIT, port_num=port_num, pkey_index=pkey_index,
            qp_access_flags=AccessFlags(access)))

    def to_rtr(self, dest_qp_num, dgid=None, *, int sgid_index=0, int dlid=0, int port_num=1,
               path_mtu=MTU.MTU_1024, int rq_psn=0, int max_dest_rd_atomic=1, int min_rnr_timer=12,
               int hop_limit=64, int sl=0):
        """INIT to RTR: connect to the peer's queue pair, and receive from it.

        :param dgid: the peer's GID, 16 bytes; without it dlid is its address
        """
        self.modify(QPAttr(
            qp_state=QPState.RTR, dest_qp_num=dest_qp_num, path_mtu=path_mtu, rq_psn=rq_psn,
            max_dest_rd_atomic=max_dest_rd_atomic, min_rnr_timer=min_rnr_timer,
            ah_attr=AHAttr(dgid=dgid, sgid_index=sgid_index, dlid=dlid, sl=sl, port_num=port_num,
                           hop_limit=hop_limit),
        ))

    def to_rts(self, *, int sq_psn=0, int timeout=14, int retry_cnt=7, int rnr_retry=7, int max_rd_atomic=1):
        """RTR to RTS: send, too.

        :param timeout: for an answer, 4.096 us * 2 ** timeout; 0 waits for ever
        :param rnr_retry: how often to try again when the peer has posted no receive; 7 is without limit
        """
        self.modify(QPAttr(
            qp_state=QPState.RTS, sq_psn=sq_psn, timeout=timeout, retry_cnt=retry_cnt, rnr_retry=rnr_retry,
            max_rd_atomic=max_rd_atomic))

    def to_error(self):
        """To ERR: all that is posted completes as flushed."""
        self.modify(QPAttr(qp_state=QPState.ERR))

    def to_reset(self):
        """To RESET: all that is posted is forgotten, without completions."""
        self.modify(QPAttr(qp_state=QPState.RESET))

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
        return read_attr(&c), QPInitAttr(
            self.send_cq, self.recv_cq, read_cap(&init.cap), enum_of(QPType, init.qp_type),
            bool(init.sq_sig_all))

    def counters(self):
        """What the embedded device has counted for this queue pair; empty on another."""
        self.usable()
        return qp_counters(self.pd.context.library, self.ptr)

    # ---- Posting ----

    def post_send(self, wrs):
        """Post a SendWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM when the queue is full, EINVAL when a request or the state is wrong. The
            requests before the one that was refused are posted; the message says how many
        """
        cdef verbs.ibv_send_wr *chain
        cdef verbs.ibv_send_wr *bad = NULL
        cdef list requests = [wrs] if isinstance(wrs, SendWR) else list(wrs)
        cdef int n = len(requests), i, rc
        cdef uint64_t total = 0
        cdef SendWR wr
        if n == 0:
            return
        for wr in requests:  # all are checked before the first is counted
            total += wr.elements.total
        chain = <verbs.ibv_send_wr *>malloc(n * sizeof(verbs.ibv_send_wr))
        if chain is NULL:
            raise MemoryError
        try:
            # The table has the order of the queue: another thread's turn comes when these are posted.
            with self.posting:
                self.usable()
                for i in range(n):
                    wr = requests[i]
                    chain[i] = wr.c
                    chain[i].wr_id = self.sends.begin(wr.wr_id, wr.elements)
                    chain[i].next = &chain[i + 1] if i + 1 < n else NULL
                if total >= LONG_COPY:
                    with nogil:
                        rc = verbs.rn_post_send(self.ptr, chain, &bad)
                else:
                    rc = verbs.rn_post_send(self.ptr, chain, &bad)
                if rc < 0:
                    i = <int>(bad - chain) if bad is not NULL else 0
                    self.sends.take_back(n - i)
                    raise OSError(-rc, self.refusal("ibv_post_send", rc, requests[i], i, n))
        finally:
            free(chain)

    def post_recv(self, wrs):
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: as post_send()
        """
        cdef verbs.ibv_recv_wr *chain
        cdef verbs.ibv_recv_wr *bad = NULL
        cdef list requests = [wrs] if isinstance(wrs, RecvWR) else list(wrs)
        cdef int n = len(requests), i, rc
        cdef RecvWR wr
        self.usable()
        if n == 0:
            return
        for wr in requests:
            pass  # all are RecvWRs, or this says that one is not
        chain = <verbs.ibv_recv_wr *>malloc(n * sizeof(verbs.ibv_recv_wr))
        if chain is NULL:
            raise MemoryError
        try:
            for i in range(n):
                wr = requests[i]
                chain[i] = wr.c
                chain[i].wr_id = self.receives.begin(wr.wr_id, wr.elements)
                chain[i].next = &chain[i + 1] if i + 1 < n else NULL
            rc = verbs.rn_post_recv(self.ptr, chain, &bad)
            if rc < 0:
                i = <int>(bad - chain) if bad is not NULL else 0
                self.receives.take_back(n - i)
                raise OSError(-rc, self.refusal("ibv_post_recv", rc, requests[i], i, n))
        finally:
            free(chain)

    cdef str refusal(self, str call, int rc, object wr, int index, int count):
        text = f"{call}: {strerror(-rc).decode()}: {wr!r} on {self!r}"
        return f"{text}; {index} of {count} were posted" if count > 1 else text
