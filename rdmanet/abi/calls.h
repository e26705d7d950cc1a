/*
 * Every call into a verbs library, with one convention instead of four.
 *
 * The public ABI reports failure in four ways. They are settled in the helpers
 * below, once, and each call after them says by its helper which way it has;
 * arguments have the types of the library's call. What comes out is the same for
 * all: >= 0 is success, everything else is -errno. An object that is made comes
 * through the last argument, which is NULL after a failure.
 *
 *     RN_POINTER   an object, or NULL with errno          ibv_create_*, ibv_alloc_pd, ibv_reg_mr
 *     rn_errno     0, or the error number, positive       ibv_post_*, ibv_modify_qp, ibv_destroy_*
 *     rn_minus     >= 0, or -1 with errno                 ibv_get_cq_event, ibv_query_gid, rdma_*
 *     rn_count     a count, or any negative number        ibv_poll_cq
 *
 * Programs are not alone in confusing them: there are providers that return -1
 * with errno, or -errno, where the second way is documented. rn_errno reads
 * these too, since a failure must never be taken for a strange success.
 *
 * What an older library lacks answers -EOPNOTSUPP.
 */
#ifndef RDMANET_ABI_CALLS_H
#define RDMANET_ABI_CALLS_H

#include "loader.h"

/* A library that fails without saying why. */
static inline int rn_last_error(void)
{
    return errno > 0 ? -errno : -EIO;
}

static inline int rn_errno(int rc)
{
    if (rc == 0)
        return 0;
    if (rc > 0)
        return -rc;
    return rc == -1 ? rn_last_error() : rc;
}

static inline int rn_minus(int rc)
{
    return rc >= 0 ? rc : rn_last_error();
}

static inline int rn_count(int rc)
{
    return rc >= 0 ? rc : -EIO;
}

#define RN_POINTER(out, call) ((errno = 0), (*(out) = (call)) ? 0 : rn_last_error())
#define RN_ERRNO(call) ((errno = 0), rn_errno(call))
#define RN_MINUS(call) ((errno = 0), rn_minus(call))

/* ---- Devices -------------------------------------------------------------------- */

static inline int rn_get_device_list(const struct rn_library *lib, int *count, struct ibv_device ***list)
{
    *count = 0;
    return RN_POINTER(list, lib->ibv_get_device_list(count));
}

#define rn_free_device_list(lib, list) (lib)->ibv_free_device_list(list)
#define rn_open_device(lib, device, out) RN_POINTER(out, (lib)->ibv_open_device(device))
#define rn_close_device(lib, context) RN_ERRNO((lib)->ibv_close_device(context))
#define rn_query_device(lib, context, attr) RN_ERRNO((lib)->ibv_query_device(context, attr))

/* The extended attributes where the device has them, else the old ones and zeros. */
static inline int rn_query_device_ex(const struct rn_library *lib, struct ibv_context *context,
                                     struct ibv_device_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, query_device_ex);
    int rc = -EOPNOTSUPP;

    memset(attr, 0, sizeof(*attr));
    if (vctx)
        rc = RN_ERRNO(vctx->query_device_ex(context, NULL, attr, sizeof(*attr)));
    if (rc == -EOPNOTSUPP || rc == -ENOSYS)
        rc = rn_query_device(lib, context, &attr->orig_attr);
    return rc;
}

/* The export knows only the first 48 bytes; the whole port comes from the context's table. */
static inline int rn_query_port(const struct rn_library *lib, struct ibv_context *context, uint8_t port_num,
                                struct ibv_port_attr *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, query_port);

    memset(attr, 0, sizeof(*attr));
    if (vctx)
        return RN_ERRNO(vctx->query_port(context, port_num, attr, sizeof(*attr)));
    return RN_ERRNO(lib->ibv_query_port(context, port_num, (struct _compat_ibv_port_attr *)attr));
}

#define rn_query_gid(lib, context, port_num, index, gid) RN_MINUS((lib)->ibv_query_gid(context, port_num, index, gid))

static inline int rn_query_gid_ex(const struct rn_library *lib, struct ibv_context *context, uint32_t port_num,
                                  uint32_t index, struct ibv_gid_entry *entry)
{
    if (!lib->_ibv_query_gid_ex)
        return -EOPNOTSUPP;
    return RN_ERRNO(lib->_ibv_query_gid_ex(context, port_num, index, entry, 0, sizeof(*entry)));
}

#define rn_query_pkey(lib, context, port_num, index, pkey) \
    RN_MINUS((lib)->ibv_query_pkey(context, port_num, index, pkey))
#define rn_get_async_event(lib, context, event) RN_MINUS((lib)->ibv_get_async_event(context, event))
#define rn_ack_async_event(lib, event) (lib)->ibv_ack_async_event(event)

/* ---- Memory ------------------------------------------------------------------------ */

#define rn_alloc_pd(lib, context, out) RN_POINTER(out, (lib)->ibv_alloc_pd(context))
#define rn_dealloc_pd(lib, pd) RN_ERRNO((lib)->ibv_dealloc_pd(pd))

/*
 * Optional access bits are for the newer export: an old kernel is asked without them. It is also told the address 0:
 * ibv_reg_mr() leaves ZERO_BASED to the driver, and some ignore it. (ibv_reg_mr_iova(3): the two mean the same.)
 */
static inline int rn_reg_mr(const struct rn_library *lib, struct ibv_pd *pd, void *addr, size_t length,
                            int access, struct ibv_mr **out)
{
    uint64_t iova = access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)addr;

    if ((access & (IBV_ACCESS_OPTIONAL_RANGE | IBV_ACCESS_ZERO_BASED)) && lib->ibv_reg_mr_iova2)
        return RN_POINTER(out, lib->ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access));
    return RN_POINTER(out, lib->ibv_reg_mr(pd, addr, length, access & ~IBV_ACCESS_OPTIONAL_RANGE));
}

static inline int rn_reg_dmabuf_mr(const struct rn_library *lib, struct ibv_pd *pd, uint64_t offset,
                                   size_t length, uint64_t iova, int fd, int access, struct ibv_mr **out)
{
    *out = NULL;
    if (!lib->ibv_reg_dmabuf_mr)
        return -EOPNOTSUPP;
    return RN_POINTER(out, lib->ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access));
}

/*
 * The one call whose failure has kinds (enum ibv_rereg_mr_err_code): with *lost the region is of no use any
 * more, and only good for deregistering.
 */
static inline int rn_rereg_mr(const struct rn_library *lib, struct ibv_mr *mr, int flags, struct ibv_pd *pd,
                              void *addr, size_t length, int access, int *lost)
{
    int rc;

    *lost = 0;
    if (!lib->ibv_rereg_mr)
        return -EOPNOTSUPP;
    errno = 0;
    rc = lib->ibv_rereg_mr(mr, flags, pd, addr, length, access);
    *lost = rc == IBV_REREG_MR_ERR_CMD || rc == IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW;
    if (rc > 0)
        return -rc;
    if (rc == IBV_REREG_MR_ERR_DO_FORK_OLD)
        return 0; /* it is changed; only what it was before cannot be inherited by a child again */
    return rc == 0 ? 0 : rc == IBV_REREG_MR_ERR_INPUT && errno == 0 ? -EINVAL : rn_last_error();
}

static inline int rn_alloc_null_mr(struct ibv_pd *pd, struct ibv_mr **out)
{
    struct verbs_context *vctx = verbs_get_ctx_op(pd->context, alloc_null_mr);

    *out = NULL;
    return vctx ? RN_POINTER(out, vctx->alloc_null_mr(pd)) : -EOPNOTSUPP;
}

#define rn_advise_mr(pd, advice, flags, sges, count) \
    RN_ERRNO(ibv_advise_mr(pd, (enum ib_uverbs_advise_mr_advice)advice, flags, sges, count))
#define rn_dereg_mr(lib, mr) RN_ERRNO((lib)->ibv_dereg_mr(mr))
#define rn_alloc_mw(pd, type, out) RN_POINTER(out, ibv_alloc_mw(pd, type))
#define rn_dealloc_mw(mw) RN_ERRNO(ibv_dealloc_mw(mw))
#define rn_bind_mw(qp, mw, bind) RN_ERRNO(ibv_bind_mw(qp, mw, bind))

static inline int rn_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr, struct ibv_dm **out)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, alloc_dm);

    *out = NULL;
    return vctx ? RN_POINTER(out, vctx->alloc_dm(context, attr)) : -EOPNOTSUPP;
}

static inline int rn_free_dm(struct ibv_dm *dm)
{
    struct verbs_context *vctx = verbs_get_ctx_op(dm->context, free_dm);

    return vctx ? RN_ERRNO(vctx->free_dm(dm)) : -EOPNOTSUPP;
}

static inline int rn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length,
                               unsigned int access, struct ibv_mr **out)
{
    struct verbs_context *vctx = verbs_get_ctx_op(pd->context, reg_dm_mr);

    *out = NULL;
    return vctx ? RN_POINTER(out, vctx->reg_dm_mr(pd, dm, offset, length, access)) : -EOPNOTSUPP;
}

static inline int rn_memcpy_to_dm(struct ibv_dm *dm, uint64_t offset, const void *from, size_t length)
{
    return RN_ERRNO(dm->memcpy_to_dm(dm, offset, from, length));
}

static inline int rn_memcpy_from_dm(void *to, struct ibv_dm *dm, uint64_t offset, size_t length)
{
    return RN_ERRNO(dm->memcpy_from_dm(to, dm, offset, length));
}

/* ---- Completions -------------------------------------------------------------------- */

#define rn_create_comp_channel(lib, context, out) RN_POINTER(out, (lib)->ibv_create_comp_channel(context))
#define rn_destroy_comp_channel(lib, channel) RN_ERRNO((lib)->ibv_destroy_comp_channel(channel))
#define rn_create_cq(lib, context, cqe, cq_context, channel, comp_vector, out) \
    RN_POINTER(out, (lib)->ibv_create_cq(context, cqe, cq_context, channel, comp_vector))
#define rn_resize_cq(lib, cq, cqe) RN_ERRNO((lib)->ibv_resize_cq(cq, cqe))
#define rn_destroy_cq(lib, cq) RN_ERRNO((lib)->ibv_destroy_cq(cq))
#define rn_get_cq_event(lib, channel, cq, cq_context) RN_MINUS((lib)->ibv_get_cq_event(channel, cq, cq_context))
#define rn_ack_cq_events(lib, cq, nevents) (lib)->ibv_ack_cq_events(cq, nevents)
#define rn_poll_cq(cq, num_entries, wc) rn_count(ibv_poll_cq(cq, num_entries, wc))
#define rn_req_notify_cq(cq, solicited_only) RN_ERRNO(ibv_req_notify_cq(cq, solicited_only))
#define rn_create_cq_ex(context, attr, out) RN_POINTER(out, ibv_create_cq_ex(context, attr))

/* Its way of saying that there is nothing is ENOENT. */
static inline int rn_start_poll(struct ibv_cq_ex *cq)
{
    struct ibv_poll_cq_attr attr = {0};

    return RN_ERRNO(ibv_start_poll(cq, &attr));
}

static inline int rn_modify_cq(struct ibv_cq *cq, uint16_t count, uint16_t period)
{
    struct ibv_modify_cq_attr attr = {
        .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {.cq_count = count, .cq_period = period}};

    return RN_ERRNO(ibv_modify_cq(cq, &attr));
}

static inline int rn_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    return RN_ERRNO(ibv_query_rt_values_ex(context, values));
}

/* ---- Shared receive queues and XRC domains ------------------------------------------------ */

#define rn_create_srq(lib, pd, attr, out) RN_POINTER(out, (lib)->ibv_create_srq(pd, attr))
#define rn_create_srq_ex(context, attr, out) RN_POINTER(out, ibv_create_srq_ex(context, attr))
#define rn_modify_srq(lib, srq, attr, mask) RN_ERRNO((lib)->ibv_modify_srq(srq, attr, mask))
#define rn_query_srq(lib, srq, attr) RN_ERRNO((lib)->ibv_query_srq(srq, attr))
#define rn_destroy_srq(lib, srq) RN_ERRNO((lib)->ibv_destroy_srq(srq))
#define rn_post_srq_recv(srq, wr, bad_wr) RN_ERRNO(ibv_post_srq_recv(srq, wr, bad_wr))
#define rn_get_srq_num(srq, number) RN_ERRNO(ibv_get_srq_num(srq, number))

static inline int rn_open_xrcd(struct ibv_context *context, int fd, int oflags, struct ibv_xrcd **out)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = oflags};
    struct verbs_context *vctx = verbs_get_ctx_op(context, open_xrcd);

    *out = NULL;
    return vctx ? RN_POINTER(out, vctx->open_xrcd(context, &attr)) : -EOPNOTSUPP;
}

static inline int rn_close_xrcd(struct ibv_xrcd *xrcd)
{
    struct verbs_context *vctx = verbs_get_ctx_op(xrcd->context, close_xrcd);

    return vctx ? RN_ERRNO(vctx->close_xrcd(xrcd)) : -EOPNOTSUPP;
}

static inline int rn_open_qp(struct ibv_context *context, struct ibv_xrcd *xrcd, uint32_t qp_num,
                             struct ibv_qp **out)
{
    struct ibv_qp_open_attr attr = {
        .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
        .qp_num = qp_num,
        .xrcd = xrcd,
        .qp_type = IBV_QPT_XRC_RECV};
    struct verbs_context *vctx = verbs_get_ctx_op(context, open_qp);

    *out = NULL;
    return vctx ? RN_POINTER(out, vctx->open_qp(context, &attr)) : -EOPNOTSUPP;
}

/* ---- Address handles ------------------------------------------------------------------------ */

#define rn_create_ah(lib, pd, attr, out) RN_POINTER(out, (lib)->ibv_create_ah(pd, attr))
#define rn_destroy_ah(lib, ah) RN_ERRNO((lib)->ibv_destroy_ah(ah))

static inline int rn_init_ah_from_wc(const struct rn_library *lib, struct ibv_context *context, uint8_t port_num,
                                     struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
    if (!lib->ibv_init_ah_from_wc)
        return -EOPNOTSUPP;
    return RN_ERRNO(lib->ibv_init_ah_from_wc(context, port_num, wc, grh, attr));
}

/* ---- Queue pairs ----------------------------------------------------------------------- */

#define rn_create_qp(lib, pd, attr, out) RN_POINTER(out, (lib)->ibv_create_qp(pd, attr))
#define rn_create_qp_ex(context, attr, out) RN_POINTER(out, ibv_create_qp_ex(context, attr))

static inline int rn_qp_to_qp_ex(const struct rn_library *lib, struct ibv_qp *qp, struct ibv_qp_ex **out)
{
    *out = NULL;
    if (!lib->ibv_qp_to_qp_ex)
        return -EOPNOTSUPP;
    return RN_POINTER(out, lib->ibv_qp_to_qp_ex(qp));
}

#define rn_attach_mcast(lib, qp, gid, lid) \
    ((lib)->ibv_attach_mcast ? RN_ERRNO((lib)->ibv_attach_mcast(qp, gid, lid)) : -EOPNOTSUPP)
#define rn_detach_mcast(lib, qp, gid, lid) \
    ((lib)->ibv_detach_mcast ? RN_ERRNO((lib)->ibv_detach_mcast(qp, gid, lid)) : -EOPNOTSUPP)
#define rn_modify_qp(lib, qp, attr, attr_mask) RN_ERRNO((lib)->ibv_modify_qp(qp, attr, attr_mask))
#define rn_query_qp(lib, qp, attr, attr_mask, init_attr) RN_ERRNO((lib)->ibv_query_qp(qp, attr, attr_mask, init_attr))
#define rn_destroy_qp(lib, qp) RN_ERRNO((lib)->ibv_destroy_qp(qp))
#define rn_post_send(qp, wr, bad_wr) RN_ERRNO(ibv_post_send(qp, wr, bad_wr))
#define rn_post_recv(qp, wr, bad_wr) RN_ERRNO(ibv_post_recv(qp, wr, bad_wr))

/* ---- The extended way to post --------------------------------------------------------------- */

/* What a request has beyond struct ibv_send_wr: ATOMIC_WRITE its 8 bytes, FLUSH its range. */
struct rn_wr_more {
    uint8_t atomic_write[8];
    uint64_t flush_length;
    uint8_t flush_type;
    uint8_t flush_level;
};

/* The bit of enum ibv_qp_create_send_ops_flags that a queue pair must have been made with; 0 for none such. */
static inline uint64_t rn_send_op(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
        return IBV_QP_EX_WITH_RDMA_WRITE;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    case IBV_WR_SEND:
        return IBV_QP_EX_WITH_SEND;
    case IBV_WR_SEND_WITH_IMM:
        return IBV_QP_EX_WITH_SEND_WITH_IMM;
    case IBV_WR_RDMA_READ:
        return IBV_QP_EX_WITH_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    case IBV_WR_LOCAL_INV:
        return IBV_QP_EX_WITH_LOCAL_INV;
    case IBV_WR_BIND_MW:
        return IBV_QP_EX_WITH_BIND_MW;
    case IBV_WR_SEND_WITH_INV:
        return IBV_QP_EX_WITH_SEND_WITH_INV;
    case IBV_WR_FLUSH:
        return IBV_QP_EX_WITH_FLUSH;
    case IBV_WR_ATOMIC_WRITE:
        return IBV_QP_EX_WITH_ATOMIC_WRITE;
    default:
        return 0;
    }
}

/*
 * One request through the builder's functions, between wr_start and wr_complete. The caller has checked
 * with rn_send_op() that the queue pair has the function: a library need not fill in any other.
 */
static inline void rn_wr_build(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr, const struct rn_wr_more *more,
                               struct ibv_data_buf *inline_bufs)
{
    qp->wr_id = wr->wr_id;
    qp->wr_flags = wr->send_flags; /* INLINE, too: rxe's wr_set_inline_data relies on it */
    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE:
        qp->wr_rdma_write(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        qp->wr_rdma_write_imm(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wr->imm_data);
        break;
    case IBV_WR_SEND:
        qp->wr_send(qp);
        break;
    case IBV_WR_SEND_WITH_IMM:
        qp->wr_send_imm(qp, wr->imm_data);
        break;
    case IBV_WR_SEND_WITH_INV:
        qp->wr_send_inv(qp, wr->invalidate_rkey);
        break;
    case IBV_WR_RDMA_READ:
        qp->wr_rdma_read(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        qp->wr_atomic_cmp_swp(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.compare_add,
                              wr->wr.atomic.swap);
        break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        qp->wr_atomic_fetch_add(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.compare_add);
        break;
    case IBV_WR_LOCAL_INV:
        qp->wr_local_inv(qp, wr->invalidate_rkey);
        return;
    case IBV_WR_BIND_MW:
        qp->wr_bind_mw(qp, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
        return;
    case IBV_WR_ATOMIC_WRITE:
        qp->wr_atomic_write(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, more->atomic_write);
        return;
    case IBV_WR_FLUSH:
        qp->wr_flush(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, more->flush_length, more->flush_type,
                     more->flush_level);
        return;
    default:
        return;
    }
    if (qp->qp_base.qp_type == IBV_QPT_UD)
        qp->wr_set_ud_addr(qp, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
    else if (qp->qp_base.qp_type == IBV_QPT_XRC_SEND)
        qp->wr_set_xrc_srqn(qp, wr->qp_type.xrc.remote_srqn);
    /* One element, the usual case, has shorter calls of its own. */
    if ((wr->send_flags & IBV_SEND_INLINE) && wr->num_sge == 1) {
        qp->wr_set_inline_data(qp, (void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
    } else if (wr->num_sge == 1) {
        qp->wr_set_sge(qp, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
    } else if (wr->send_flags & IBV_SEND_INLINE) {
        for (int i = 0; i < wr->num_sge; i++) {
            inline_bufs[i].addr = (void *)(uintptr_t)wr->sg_list[i].addr;
            inline_bufs[i].length = wr->sg_list[i].length;
        }
        qp->wr_set_inline_data_list(qp, (size_t)wr->num_sge, inline_bufs);
    } else {
        qp->wr_set_sge_list(qp, (size_t)wr->num_sge, wr->sg_list);
    }
}

static inline int rn_wr_complete(struct ibv_qp_ex *qp)
{
    return RN_ERRNO(qp->wr_complete(qp));
}

/* ---- The connection manager -------------------------------------------------------------- */

static inline int rn_create_event_channel(const struct rn_library *lib, struct rdma_event_channel **out)
{
    *out = NULL;
    if (!lib->cm_handle)
        return -EOPNOTSUPP;
    return RN_POINTER(out, lib->rdma_create_event_channel());
}

#define rn_destroy_event_channel(lib, channel) (lib)->rdma_destroy_event_channel(channel)

static inline int rn_get_cm_event(const struct rn_library *lib, struct rdma_event_channel *channel,
                                  struct rdma_cm_event **event)
{
    *event = NULL;
    return RN_MINUS(lib->rdma_get_cm_event(channel, event));
}

#define rn_ack_cm_event(lib, event) RN_MINUS((lib)->rdma_ack_cm_event(event))

static inline int rn_create_id(const struct rn_library *lib, struct rdma_event_channel *channel, void *context,
                               enum rdma_port_space ps, struct rdma_cm_id **out)
{
    *out = NULL;
    return RN_MINUS(lib->rdma_create_id(channel, out, context, ps));
}

#define rn_destroy_id(lib, id) RN_MINUS((lib)->rdma_destroy_id(id))
#define rn_migrate_id(lib, id, channel) RN_MINUS((lib)->rdma_migrate_id(id, channel))
#define rn_set_option(lib, id, level, optname, optval, optlen) \
    RN_MINUS((lib)->rdma_set_option(id, level, optname, optval, optlen))
#define rn_bind_addr(lib, id, addr) RN_MINUS((lib)->rdma_bind_addr(id, addr))
#define rn_resolve_addr(lib, id, src, dst, timeout_ms) RN_MINUS((lib)->rdma_resolve_addr(id, src, dst, timeout_ms))
#define rn_resolve_route(lib, id, timeout_ms) RN_MINUS((lib)->rdma_resolve_route(id, timeout_ms))
#define rn_listen(lib, id, backlog) RN_MINUS((lib)->rdma_listen(id, backlog))
#define rn_connect(lib, id, param) RN_MINUS((lib)->rdma_connect(id, param))
#define rn_accept(lib, id, param) RN_MINUS((lib)->rdma_accept(id, param))
#define rn_establish(lib, id) ((lib)->rdma_establish ? RN_MINUS((lib)->rdma_establish(id)) : -EOPNOTSUPP)
/* -EISCONN: the connection is established already. */
#define rn_notify(lib, id, event) ((lib)->rdma_notify ? RN_MINUS((lib)->rdma_notify(id, event)) : -EOPNOTSUPP)
#define rn_reject(lib, id, private_data, length) RN_MINUS((lib)->rdma_reject(id, private_data, length))
#define rn_disconnect(lib, id) RN_MINUS((lib)->rdma_disconnect(id))
#define rn_cm_create_qp(lib, id, pd, attr) RN_MINUS((lib)->rdma_create_qp(id, pd, attr))
#define rn_cm_create_qp_ex(lib, id, attr) \
    ((lib)->rdma_create_qp_ex ? RN_MINUS((lib)->rdma_create_qp_ex(id, attr)) : -EOPNOTSUPP)
#define rn_cm_destroy_qp(lib, id) (lib)->rdma_destroy_qp(id)
#define rn_cm_init_qp_attr(lib, id, attr, attr_mask) \
    ((lib)->rdma_init_qp_attr ? RN_MINUS((lib)->rdma_init_qp_attr(id, attr, attr_mask)) : -EOPNOTSUPP)

/* Only the younger call knows of flags. */
static inline int rn_join_multicast(const struct rn_library *lib, struct rdma_cm_id *id, struct sockaddr *addr,
                                    uint32_t flags)
{
    struct rdma_cm_join_mc_attr_ex attr = {
        .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
        .join_flags = flags,
        .addr = addr};

    if (lib->rdma_join_multicast_ex)
        return RN_MINUS(lib->rdma_join_multicast_ex(id, &attr, NULL));
    if (!lib->rdma_join_multicast || flags)
        return -EOPNOTSUPP;
    return RN_MINUS(lib->rdma_join_multicast(id, addr, NULL));
}

#define rn_leave_multicast(lib, id, addr) \
    ((lib)->rdma_leave_multicast ? RN_MINUS((lib)->rdma_leave_multicast(id, addr)) : -EOPNOTSUPP)

#endif
