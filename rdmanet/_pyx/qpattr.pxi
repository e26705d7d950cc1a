# The types, states and attributes of queue pairs, and which transition takes which attributes.
#
#     RESET -> INIT -> RTR -> RTS          (to_init, to_rtr, to_rts, or the connection manager)
#       any -> ERR: all posted requests complete as flushed; any -> RESET: all posted requests are dropped
#
# Each transition has required and optional attributes; the table below is that of the InfiniBand specification. The
# device decides: devices allow more or less than the specification. Only if it refuses a transition, the table tells
# which attribute is missing or not allowed.


@_late
def QPCap():
    @_record
    class QPCap(_Record):
        """The sizes of a queue pair. What the device grants is at least what is asked for.

        :param max_send_wr: how many requests the send queue holds
        :param max_recv_wr: how many requests the receive queue holds
        :param max_send_sge: how many elements a send may have
        :param max_recv_sge: how many elements a receive may have
        :param max_inline_data: how many bytes a request with SendFlags.INLINE may have
        """
        max_send_wr: int = 1
        max_recv_wr: int = 1
        max_send_sge: int = 1
        max_recv_sge: int = 1
        max_inline_data: int = 0
    return QPCap


@_late
def QPInitAttr():
    import_dataclasses()

    @_record
    class QPInitAttr(_Record):
        """The attributes of a new queue pair; see ibv_create_qp(3).

        :param send_cq: the CQ of its sends; None for XRC_RECV
        :param recv_cq: the CQ of its receives; None for XRC_SEND and XRC_RECV
        :param cap: a QPCap: its sizes, which are updated to what the device grants
        :param qp_type: a QPType
        :param sq_sig_all: whether every send gives a completion, not only those with SendFlags.SIGNALED
        :param srq: the SRQ that its receives come from; None for a receive queue of its own
        """
        send_cq: "CQ | None" = None
        recv_cq: "CQ | None" = None
        cap: QPCap = dataclasses.field(default_factory=core.QPCap)
        qp_type: QPType = core.QPType.RC
        sq_sig_all: bool = False
        srq: "SRQ | None" = None
    return QPInitAttr


@_late
def QPInitAttrEx():
    @_record
    class QPInitAttrEx(core.QPInitAttr):
        """The extended attributes of a new queue pair; see ibv_create_qp_ex(3).

        :param send_ops_flags: the operations of QP.wr(); creation fails if the device does not support one of them
        :param create_flags: QPCreateFlags
        :param xrcd: for XRC_RECV
        """
        send_ops_flags: SendOpsFlags | int = 0
        create_flags: QPCreateFlags | int = 0
        xrcd: "XRCD | None" = None
    return QPInitAttrEx


@_late
def QPAttr():
    @_record
    class QPAttr(_Record):
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
            """The mask of the attributes that are given."""
            mask = core.QPAttrMask(0)
            for bit, name in _ATTRIBUTES.items():
                if getattr(self, name) is not None:
                    mask |= bit
            return mask
    return QPAttr


_ATTRIBUTES = {
    verbs.IBV_QP_STATE: "qp_state", verbs.IBV_QP_CUR_STATE: "cur_qp_state",
    verbs.IBV_QP_EN_SQD_ASYNC_NOTIFY: "en_sqd_async_notify", verbs.IBV_QP_ACCESS_FLAGS: "qp_access_flags",
    verbs.IBV_QP_PKEY_INDEX: "pkey_index", verbs.IBV_QP_PORT: "port_num", verbs.IBV_QP_QKEY: "qkey",
    verbs.IBV_QP_AV: "ah_attr", verbs.IBV_QP_PATH_MTU: "path_mtu", verbs.IBV_QP_TIMEOUT: "timeout",
    verbs.IBV_QP_RETRY_CNT: "retry_cnt", verbs.IBV_QP_RNR_RETRY: "rnr_retry", verbs.IBV_QP_RQ_PSN: "rq_psn",
    verbs.IBV_QP_MAX_QP_RD_ATOMIC: "max_rd_atomic", verbs.IBV_QP_ALT_PATH: "alt_ah_attr",
    verbs.IBV_QP_MIN_RNR_TIMER: "min_rnr_timer", verbs.IBV_QP_SQ_PSN: "sq_psn",
    verbs.IBV_QP_MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic", verbs.IBV_QP_PATH_MIG_STATE: "path_mig_state",
    verbs.IBV_QP_CAP: "cap", verbs.IBV_QP_DEST_QPN: "dest_qp_num", verbs.IBV_QP_RATE_LIMIT: "rate_limit",
}


# ---- Which attributes a transition takes: (from, to) to (required, optional), by transport ------

def _transitions():
    M, S = core.QPAttrMask, core.QPState
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
    xrc_at_rts = M.SQ_PSN | M.TIMEOUT
    rc_sqd = uc_sqd | M.PORT | M.MAX_QP_RD_ATOMIC | M.MIN_RNR_TIMER | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY
    return {
        core.QPType.RC: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (rc_rtr, at_rtr), (S.RTR, S.RTS): (rc_rts, running),
            (S.RTS, S.RTS): (none, running), (S.RTS, S.SQD): (none, notify),
            (S.SQD, S.RTS): (none, running), (S.SQD, S.SQD): (none, rc_sqd | M.MAX_DEST_RD_ATOMIC),
        },
        core.QPType.UC: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (uc_rtr, at_rtr), (S.RTR, S.RTS): (M.SQ_PSN, uc_rts),
            (S.RTS, S.RTS): (none, uc_rts), (S.RTS, S.SQD): (none, notify),
            (S.SQD, S.RTS): (none, uc_rts), (S.SQD, S.SQD): (none, uc_sqd),
            (S.SQE, S.RTS): (none, M.CUR_STATE | M.ACCESS_FLAGS),
        },
        core.QPType.XRC_SEND: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (uc_rtr, at_rtr), (S.RTR, S.RTS): (rc_rts, uc_rts),
            (S.RTS, S.RTS): (none, uc_rts), (S.RTS, S.SQD): (none, notify),
            (S.SQD, S.RTS): (none, uc_rts), (S.SQD, S.SQD): (none, rc_sqd & ~M.MIN_RNR_TIMER),
        },
        core.QPType.XRC_RECV: {
            (S.RESET, S.INIT): (rights, none), (S.INIT, S.INIT): (none, rights),
            (S.INIT, S.RTR): (rc_rtr, at_rtr), (S.RTR, S.RTS): (xrc_at_rts, running),
            (S.RTS, S.RTS): (none, running), (S.RTS, S.SQD): (none, notify), (S.SQD, S.RTS): (none, running),
            (S.SQD, S.SQD): (none, uc_sqd | M.PORT | M.TIMEOUT | M.MIN_RNR_TIMER | M.MAX_DEST_RD_ATOMIC),
        },
        core.QPType.UD: {
            (S.RESET, S.INIT): (initial | M.QKEY, none), (S.INIT, S.INIT): (none, initial | M.QKEY),
            (S.INIT, S.RTR): (none, M.PKEY_INDEX | M.QKEY), (S.RTR, S.RTS): (M.SQ_PSN, ud),
            (S.RTS, S.RTS): (none, ud), (S.RTS, S.SQD): (none, notify), (S.SQD, S.RTS): (none, ud),
            (S.SQD, S.SQD): (none, M.PKEY_INDEX | M.QKEY), (S.SQE, S.RTS): (none, ud),
        },
    }


cdef list attribute_names(mask):
    return [name for bit, name in _ATTRIBUTES.items() if mask & bit]


cdef tuple why_refused(object qp_type, object state, object new, attr):
    """What is wrong by the specification with a modify() that the device refused: a text, or ""; the missing
    attributes; those that are not allowed."""
    given = attr.mask & ~core.QPAttrMask.STATE
    if new == core.QPState.RESET or new == core.QPState.ERR:
        rule = (core.QPAttrMask(0), core.QPAttrMask.CUR_STATE)
    else:
        table = _transitions().get(qp_type)
        if table is None:
            return "", (), ()
        rule = table.get((state, new))
        if rule is None:
            steps = [to.name for (origin, to) in table if origin == state and to != state]
            allowed = ", ".join(dict.fromkeys([*steps, "RESET", "ERR"]))
            return f"; there is no transition from {state.name} to {new.name}, only to {allowed}", (), ()
    required, optional = rule
    missing = attribute_names(required & ~given)
    not_allowed = attribute_names(given & ~(required | optional))
    text = ""
    if missing:
        text += f"; missing: {', '.join(missing)}"
    if not_allowed:
        text += f"; not allowed: {', '.join(not_allowed)}"
    return text, missing, not_allowed


_LARGEST = {"timeout": 31, "alt_timeout": 31, "retry_cnt": 7, "rnr_retry": 7, "min_rnr_timer": 31}
_LIMITS = {"max_rd_atomic": "max_qp_init_rd_atom", "max_dest_rd_atomic": "max_qp_rd_atom", "port_num": "phys_port_cnt"}


cdef str wrong_values(Context context, attr):
    """A text: the values of a modify() that are out of range for all devices, or for this one."""
    device = context.query_device()
    limits = _LARGEST | {name: getattr(device, limit) for name, limit in _LIMITS.items()}
    text = "".join([
        f"; {name} {getattr(attr, name)} is more than {most}"
        for name, most in limits.items() if (getattr(attr, name) or 0) > most
    ])
    if attr.path_mtu is not None and attr.path_mtu not in list(core.MTU):
        text += f"; path_mtu {attr.path_mtu} is not an MTU such as MTU.MTU_1024"
    return text


cdef int check_queues(init_attr) except -1:
    """Raise if a QPInitAttr lacks a completion queue that its type needs: libibverbs would crash."""
    if init_attr.qp_type == core.QPType.XRC_RECV:
        return 0
    for name in ("send_cq", "recv_cq"):
        if getattr(init_attr, name) is None and (name == "send_cq" or init_attr.qp_type != core.QPType.XRC_SEND):
            raise OSError(
                EINVAL, f"ibv_create_qp: {strerror(EINVAL).decode()}: {init_attr.qp_type!r}; it has no {name}")
    return 0


cdef str why_not_created(Context context, init_attr, int error):
    """The probable error in a QPInitAttr that was refused, with the numbers."""
    if error not in (EINVAL, ENOMEM):
        return ""
    device, cap = context.query_device(), init_attr.cap
    if error == ENOMEM:
        where = "; the log (rdmanet.device) says which limit it was" if context.library.embedded_device else ""
        return f"; {context.name} has at most {device.max_qp} queue pairs (max_qp){where}"
    text = "".join([
        f"; {name} {value} is more than {most}" for name, value, most in (
            ("max_send_wr", cap.max_send_wr, device.max_qp_wr), ("max_recv_wr", cap.max_recv_wr, device.max_qp_wr),
            ("max_send_sge", cap.max_send_sge, device.max_sge), ("max_recv_sge", cap.max_recv_sge, device.max_sge),
        ) if value > most
    ])
    if not text and cap.max_inline_data:
        most = f"at most {EMBEDDED_MAX_INLINE}" if context.library.embedded_device else "a number that it does not tell"
        text = f"; max_inline_data {cap.max_inline_data} may be more than {context.name} takes, which is {most}"
    if init_attr.qp_type == core.QPType.XRC_RECV and getattr(init_attr, "xrcd", None) is None:
        text += "; it has no xrcd, see QPInitAttrEx"
    return text


cdef object mtu_of(int size):
    """The MTU of so many bytes."""
    return next(mtu for mtu in core.MTU if mtu.bytes == size)


# ---- Between the records and the ABI's structs --------------------------------------------------

cdef int fill_cap(verbs.ibv_qp_cap *c, cap) except -1:
    c.max_send_wr = field(cap, "max_send_wr", 0xffffffff)
    c.max_recv_wr = field(cap, "max_recv_wr", 0xffffffff)
    c.max_send_sge = field(cap, "max_send_sge", 0xffffffff)
    c.max_recv_sge = field(cap, "max_recv_sge", 0xffffffff)
    c.max_inline_data = field(cap, "max_inline_data", 0xffffffff)
    return 0


cdef object read_cap(const verbs.ibv_qp_cap *c):
    cap = core.QPCap.__new__(core.QPCap)
    cdef dict own = cap.__dict__
    own["max_send_wr"], own["max_recv_wr"] = c.max_send_wr, c.max_recv_wr
    own["max_send_sge"], own["max_recv_sge"] = c.max_send_sge, c.max_recv_sge
    own["max_inline_data"] = c.max_inline_data
    return cap


cdef int fill_attr(verbs.ibv_qp_attr *c, attr) except -1:
    """Fill the struct from the record; fields that are not given are 0. Returns the mask."""
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
        c.alt_pkey_index = field(attr, "alt_pkey_index", 0xffff, True)
        c.alt_port_num = field(attr, "alt_port_num", 0xff, True) or c.alt_ah_attr.port_num
        c.alt_timeout = field(attr, "alt_timeout", 0xff, True)
    if attr.cap is not None:
        fill_cap(&c.cap, attr.cap)
    c.qkey = field(attr, "qkey", 0xffffffff, True)
    c.rq_psn = field(attr, "rq_psn", 0xffffffff, True)
    c.sq_psn = field(attr, "sq_psn", 0xffffffff, True)
    c.dest_qp_num = field(attr, "dest_qp_num", 0xffffffff, True)
    c.qp_access_flags = field(attr, "qp_access_flags", 0x7fffffff, True)
    c.pkey_index = field(attr, "pkey_index", 0xffff, True)
    c.en_sqd_async_notify = bool(attr.en_sqd_async_notify)
    c.max_rd_atomic = field(attr, "max_rd_atomic", 0xff, True)
    c.max_dest_rd_atomic = field(attr, "max_dest_rd_atomic", 0xff, True)
    c.min_rnr_timer = field(attr, "min_rnr_timer", 0xff, True)
    c.port_num = field(attr, "port_num", 0xff, True)
    c.timeout = field(attr, "timeout", 0xff, True)
    c.retry_cnt = field(attr, "retry_cnt", 0xff, True)
    c.rnr_retry = field(attr, "rnr_retry", 0xff, True)
    c.rate_limit = field(attr, "rate_limit", 0xffffffff, True)
    return attr.mask


cdef object read_attr(verbs.ibv_qp_attr *c):
    return core.QPAttr(
        qp_state=enum_of(core.QPState, c.qp_state), cur_qp_state=enum_of(core.QPState, c.cur_qp_state),
        path_mtu=enum_of(core.MTU, c.path_mtu), path_mig_state=enum_of(core.MigState, c.path_mig_state), qkey=c.qkey,
        rq_psn=c.rq_psn, sq_psn=c.sq_psn, dest_qp_num=c.dest_qp_num,
        qp_access_flags=core.AccessFlags(c.qp_access_flags), cap=read_cap(&c.cap), ah_attr=read_ah(&c.ah_attr),
        alt_ah_attr=read_ah(&c.alt_ah_attr), pkey_index=c.pkey_index, alt_pkey_index=c.alt_pkey_index,
        en_sqd_async_notify=bool(c.en_sqd_async_notify), max_rd_atomic=c.max_rd_atomic,
        max_dest_rd_atomic=c.max_dest_rd_atomic, min_rnr_timer=c.min_rnr_timer, port_num=c.port_num,
        timeout=c.timeout, retry_cnt=c.retry_cnt, rnr_retry=c.rnr_retry, alt_port_num=c.alt_port_num,
        alt_timeout=c.alt_timeout, rate_limit=c.rate_limit,
    )


cdef object only(attr, int mask):
    """A QPAttr with the attributes of a mask only."""
    kept = {name for bit, name in _ATTRIBUTES.items() if mask & bit}
    if mask & core.QPAttrMask.ALT_PATH:
        kept |= {"alt_pkey_index", "alt_port_num", "alt_timeout"}
    return core.QPAttr(**{name: getattr(attr, name) for name in kept})
