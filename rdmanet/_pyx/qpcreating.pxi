# Creating a queue pair: from a QPInitAttr to the library's call, and the Python side of the new object.
#
# Called by QP(), by CMID.create_qp() with the identifier that the queue pair is for, and by QP.open() for `adopt_qp`
# only. `create_rc_qp` is for the engine's connections: their numbers need no record. Whoever has a number or an address
# of the library's finds the object by tables of its queues and its context: `adopt_qp` enters it there, QP.destroy()
# takes it out, before the library may use them again.

cdef uint64_t _next_generation = 0


cdef int create_qp(QP qp, PD pd, init_attr, verbs.rdma_cm_id *id) except -1:
    """Have the library create it, for an identifier if `id` is not NULL."""
    cdef verbs.ibv_qp_init_attr_ex c
    cdef const verbs.rn_library *library
    cdef int rc, value = init_attr.qp_type
    cdef bint extended = isinstance(init_attr, core.QPInitAttrEx)
    pd.usable()
    check_queues(init_attr)
    qp.send_cq = cq_of(pd, init_attr.send_cq)
    qp.recv_cq = cq_of(pd, init_attr.recv_cq)
    library = pd.context.library.c
    memset(&c, 0, sizeof(c))
    c.send_cq = NULL if qp.send_cq is None else qp.send_cq.ptr
    c.recv_cq = NULL if qp.recv_cq is None else qp.recv_cq.ptr
    if init_attr.srq is not None:
        qp.srq = init_attr.srq
        qp.srq.usable()
        same_library(pd.context, qp.srq.pd.context)
        c.srq = qp.srq.ptr
    c.qp_type = <verbs.ibv_qp_type>value
    c.sq_sig_all = bool(init_attr.sq_sig_all)
    fill_cap(&c.cap, init_attr.cap)
    c.comp_mask = verbs.IBV_QP_INIT_ATTR_PD
    c.pd = pd.ptr
    if extended:
        fill_qp_extended(qp, pd.context, &c, init_attr)
    extended = c.comp_mask != verbs.IBV_QP_INIT_ATTR_PD
    with nogil:
        # The old struct is the beginning of the new one.
        if id is NULL and extended:
            rc = verbs.rn_create_qp_ex(pd.context.ptr, &c, &qp.ptr)
        elif id is NULL:
            rc = verbs.rn_create_qp(library, pd.ptr, <verbs.ibv_qp_init_attr *>&c, &qp.ptr)
        elif extended:
            rc = verbs.rn_cm_create_qp_ex(library, id, &c)
        else:
            rc = verbs.rn_cm_create_qp(library, id, pd.ptr, <verbs.ibv_qp_init_attr *>&c)
    if rc < 0:
        call = f"{'ibv' if id is NULL else 'rdma'}_create_qp{'_ex' if extended else ''}"
        why = why_not_created(pd.context, init_attr, -rc)
        raise OSError(-rc, f"{call}: {strerror(-rc).decode()}: {init_attr.qp_type!r}, {init_attr.cap}{why}")
    if id is not NULL:
        qp.ptr = id.qp
        qp.id = id
    qp.granted = c.cap
    init_attr.cap = qp.cap
    adopt_qp(qp, pd, c.send_ops_flags, c.sq_sig_all)
    return 0


cdef int create_rc_qp(QP qp, PD pd, CQ cq, SRQ srq, const verbs.ibv_qp_cap *cap, verbs.rdma_cm_id *id) except -1:
    """The same for a reliable connection of an identifier, on one CQ for both directions."""
    cdef verbs.ibv_qp_init_attr c
    cdef int rc
    pd.usable()
    qp.send_cq = qp.recv_cq = cq_of(pd, cq)
    memset(&c, 0, sizeof(c))
    c.send_cq = c.recv_cq = cq.ptr
    if srq is not None:
        qp.srq = srq
        srq.usable()
        c.srq = srq.ptr
    c.qp_type = verbs.IBV_QPT_RC
    c.cap = cap[0]
    with nogil:
        rc = verbs.rn_cm_create_qp(pd.context.library.c, id, pd.ptr, &c)
    if rc < 0:
        init_attr = core.QPInitAttr(send_cq=cq, recv_cq=cq, srq=srq, cap=read_cap(cap))
        why = why_not_created(pd.context, init_attr, -rc)
        raise OSError(-rc, f"rdma_create_qp: {strerror(-rc).decode()}: {init_attr.qp_type!r}, {init_attr.cap}{why}")
    qp.ptr, qp.id = id.qp, id
    qp.granted = c.cap
    return adopt_qp(qp, pd, 0, False)


cdef int fill_qp_extended(QP qp, Context context, verbs.ibv_qp_init_attr_ex *c, init_attr) except -1:
    c.send_ops_flags = field(init_attr, "send_ops_flags", <uint64_t>-1)
    if c.send_ops_flags:
        c.comp_mask |= verbs.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
    c.create_flags = field(init_attr, "create_flags", 0xffffffff)
    if c.create_flags:
        c.comp_mask |= verbs.IBV_QP_INIT_ATTR_CREATE_FLAGS
    if init_attr.xrcd is not None:
        qp.xrcd = init_attr.xrcd
        qp.xrcd.usable()
        same_library(context, qp.xrcd.context)
        c.comp_mask |= verbs.IBV_QP_INIT_ATTR_XRCD
        if init_attr.qp_type == core.QPType.XRC_RECV:
            c.comp_mask &= ~<uint32_t>verbs.IBV_QP_INIT_ATTR_PD
            c.pd = NULL
        c.xrcd = qp.xrcd.ptr
    return 0


cdef int adopt_qp(QP qp, PD pd, uint64_t send_ops, bint all_signaled) except -1:
    """Initialize the Python side, after the C object was created."""
    global _next_generation
    qp.pd = pd
    qp.send_ops = send_ops
    if send_ops:
        check(verbs.rn_qp_to_qp_ex(pd.context.library.c, qp.ptr, &qp.extended), "ibv_qp_to_qp_ex")
    _next_generation = (_next_generation + 1) & 0xffff
    qp.generation = _next_generation
    iwarp = pd.context.ptr.device.transport_type == verbs.IBV_TRANSPORT_IWARP
    qp.sends = _InFlight(qp.generation, True, iwarp, all_signaled)
    qp.receives = _InFlight(qp.generation, False, qp.ptr.qp_type == verbs.IBV_QPT_UD)
    reference = weakref.ref(qp)
    if qp.send_cq is not None:
        qp.send_cq.qps[qp.ptr.qp_num] = reference
    if qp.recv_cq is not None:
        qp.recv_cq.qps[qp.ptr.qp_num] = reference
    pd.context.by_address[<uintptr_t>qp.ptr] = reference
    pd.context.add_child()
    qp.opened(QPS)
    return 0


cdef CQ cq_of(PD pd, CQ cq):
    """Check the CQ of a queue pair of pd; it may be None."""
    if cq is not None:
        cq.usable()
        same_library(pd.context, cq.context)
    return cq
