/*
 * Every call into a verbs library, with one convention instead of four.
 *
 * The public ABI reports failure in four ways. They are settled in the helpers
 * below, once, and each function after them says by its helper which way its
 * call has. What comes out is the same for all: >= 0 is success, everything
 * else is -errno. An object that is made comes through the last argument, which
 * is NULL after a failure.
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

static inline void rn_free_device_list(const struct rn_library *lib, struct ibv_device **list)
{
    lib->ibv_free_device_list(list);
}

static inline int rn_open_device(const struct rn_library *lib, struct ibv_device *device,
                                 struct ibv_context **out)
{
    return RN_POINTER(out, lib->ibv_open_device(device));
}

static inline int rn_close_device(const struct rn_library *lib, struct ibv_context *context)
{
    return RN_ERRNO(lib->ibv_close_device(context));
}

static inline int rn_query_device(const struct rn_library *lib, struct ibv_context *context,
                                  struct ibv_device_attr *attr)
{
    return RN_ERRNO(lib->ibv_query_device(context, attr));
}

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

static inline int rn_query_gid(const struct rn_library *lib, struct ibv_context *context, uint8_t port_num,
                               int index, union ibv_gid *gid)
{
    return RN_MINUS(lib->ibv_query_gid(context, port_num, index, gid));
}

static inline int rn_query_gid_ex(const struct rn_library *lib, struct ibv_context *context, uint32_t port_num,
                                  uint32_t index, struct ibv_gid_entry *entry)
{
    if (!lib->_ibv_query_gid_ex)
        return -EOPNOTSUPP;
    return RN_ERRNO(lib->_ibv_query_gid_ex(context, port_num, index, entry, 0, sizeof(*entry)));
}

/* The number of entries written; -errno is this one's own convention. */
static inline ssize_t rn_query_gid_table(const struct rn_library *lib, struct ibv_context *context,
                                         struct ibv_gid_entry *entries, size_t max_entries)
{
    if (!lib->_ibv_query_gid_table)
        return -EOPNOTSUPP;
    return lib->_ibv_query_gid_table(context, entries, max_entries, 0, sizeof(*entries));
}

static inline int rn_query_pkey(const struct rn_library *lib, struct ibv_context *context, uint8_t port_num,
                                int index, __be16 *pkey)
{
    return RN_MINUS(lib->ibv_query_pkey(context, port_num, index, pkey));
}

static inline int rn_get_async_event(const struct rn_library *lib, struct ibv_context *context,
                                     struct ibv_async_event *event)
{
    return RN_MINUS(lib->ibv_get_async_event(context, event));
}

static inline void rn_ack_async_event(const struct rn_library *lib, struct ibv_async_event *event)
{
    lib->ibv_ack_async_event(event);
}

/* ---- Memory ------------------------------------------------------------------------ */

static inline int rn_alloc_pd(const struct rn_library *lib, struct ibv_context *context, struct ibv_pd **out)
{
    return RN_POINTER(out, lib->ibv_alloc_pd(context));
}

static inline int rn_dealloc_pd(const struct rn_library *lib, struct ibv_pd *pd)
{
    return RN_ERRNO(lib->ibv_dealloc_pd(pd));
}

/* Optional access bits are for the newer export: an old kernel is asked without them. */
static inline int rn_reg_mr(const struct rn_library *lib, struct ibv_pd *pd, void *addr, size_t length,
                            int access, struct ibv_mr **out)
{
    if ((access & IBV_ACCESS_OPTIONAL_RANGE) && lib->ibv_reg_mr_iova2)
        return RN_POINTER(out, lib->ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access));
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

static inline int rn_dereg_mr(const struct rn_library *lib, struct ibv_mr *mr)
{
    return RN_ERRNO(lib->ibv_dereg_mr(mr));
}

/* ---- Completions -------------------------------------------------------------------- */

static inline int rn_create_comp_channel(const struct rn_library *lib, struct ibv_context *context,
                                         struct ibv_comp_channel **out)
{
    return RN_POINTER(out, lib->ibv_create_comp_channel(context));
}

static inline int rn_destroy_comp_channel(const struct rn_library *lib, struct ibv_comp_channel *channel)
{
    return RN_ERRNO(lib->ibv_destroy_comp_channel(channel));
}

static inline int rn_create_cq(const struct rn_library *lib, struct ibv_context *context, int cqe,
                               void *cq_context, struct ibv_comp_channel *channel, int comp_vector,
                               struct ibv_cq **out)
{
    return RN_POINTER(out, lib->ibv_create_cq(context, cqe, cq_context, channel, comp_vector));
}

static inline int rn_resize_cq(const struct rn_library *lib, struct ibv_cq *cq, int cqe)
{
    return RN_ERRNO(lib->ibv_resize_cq(cq, cqe));
}

static inline int rn_destroy_cq(const struct rn_library *lib, struct ibv_cq *cq)
{
    return RN_ERRNO(lib->ibv_destroy_cq(cq));
}

static inline int rn_get_cq_event(const struct rn_library *lib, struct ibv_comp_channel *channel,
                                  struct ibv_cq **cq, void **cq_context)
{
    return RN_MINUS(lib->ibv_get_cq_event(channel, cq, cq_context));
}

static inline void rn_ack_cq_events(const struct rn_library *lib, struct ibv_cq *cq, unsigned int nevents)
{
    lib->ibv_ack_cq_events(cq, nevents);
}

static inline int rn_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
    return rn_count(ibv_poll_cq(cq, num_entries, wc));
}

static inline int rn_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    return RN_ERRNO(ibv_req_notify_cq(cq, solicited_only));
}

/* ---- Queue pairs ----------------------------------------------------------------------- */

static inline int rn_create_qp(const struct rn_library *lib, struct ibv_pd *pd, struct ibv_qp_init_attr *attr,
                               struct ibv_qp **out)
{
    return RN_POINTER(out, lib->ibv_create_qp(pd, attr));
}

static inline int rn_modify_qp(const struct rn_library *lib, struct ibv_qp *qp, struct ibv_qp_attr *attr,
                               int attr_mask)
{
    return RN_ERRNO(lib->ibv_modify_qp(qp, attr, attr_mask));
}

static inline int rn_query_qp(const struct rn_library *lib, struct ibv_qp *qp, struct ibv_qp_attr *attr,
                              int attr_mask, struct ibv_qp_init_attr *init_attr)
{
    return RN_ERRNO(lib->ibv_query_qp(qp, attr, attr_mask, init_attr));
}

static inline int rn_destroy_qp(const struct rn_library *lib, struct ibv_qp *qp)
{
    return RN_ERRNO(lib->ibv_destroy_qp(qp));
}

static inline int rn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
    return RN_ERRNO(ibv_post_send(qp, wr, bad_wr));
}

static inline int rn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    return RN_ERRNO(ibv_post_recv(qp, wr, bad_wr));
}

/* ---- The connection manager -------------------------------------------------------------- */

static inline int rn_create_event_channel(const struct rn_library *lib, struct rdma_event_channel **out)
{
    *out = NULL;
    if (!lib->cm_handle)
        return -EOPNOTSUPP;
    return RN_POINTER(out, lib->rdma_create_event_channel());
}

static inline void rn_destroy_event_channel(const struct rn_library *lib, struct rdma_event_channel *channel)
{
    lib->rdma_destroy_event_channel(channel);
}

static inline int rn_get_cm_event(const struct rn_library *lib, struct rdma_event_channel *channel,
                                  struct rdma_cm_event **event)
{
    *event = NULL;
    return RN_MINUS(lib->rdma_get_cm_event(channel, event));
}

static inline int rn_ack_cm_event(const struct rn_library *lib, struct rdma_cm_event *event)
{
    return RN_MINUS(lib->rdma_ack_cm_event(event));
}

static inline int rn_create_id(const struct rn_library *lib, struct rdma_event_channel *channel, void *context,
                               enum rdma_port_space ps, struct rdma_cm_id **out)
{
    *out = NULL;
    return RN_MINUS(lib->rdma_create_id(channel, out, context, ps));
}

static inline int rn_destroy_id(const struct rn_library *lib, struct rdma_cm_id *id)
{
    return RN_MINUS(lib->rdma_destroy_id(id));
}

static inline int rn_migrate_id(const struct rn_library *lib, struct rdma_cm_id *id,
                                struct rdma_event_channel *channel)
{
    return RN_MINUS(lib->rdma_migrate_id(id, channel));
}

static inline int rn_set_option(const struct rn_library *lib, struct rdma_cm_id *id, int level, int optname,
                                void *optval, size_t optlen)
{
    return RN_MINUS(lib->rdma_set_option(id, level, optname, optval, optlen));
}

static inline int rn_bind_addr(const struct rn_library *lib, struct rdma_cm_id *id, struct sockaddr *addr)
{
    return RN_MINUS(lib->rdma_bind_addr(id, addr));
}

static inline int rn_resolve_addr(const struct rn_library *lib, struct rdma_cm_id *id, struct sockaddr *src,
                                  struct sockaddr *dst, int timeout_ms)
{
    return RN_MINUS(lib->rdma_resolve_addr(id, src, dst, timeout_ms));
}

static inline int rn_resolve_route(const struct rn_library *lib, struct rdma_cm_id *id, int timeout_ms)
{
    return RN_MINUS(lib->rdma_resolve_route(id, timeout_ms));
}

static inline int rn_listen(const struct rn_library *lib, struct rdma_cm_id *id, int backlog)
{
    return RN_MINUS(lib->rdma_listen(id, backlog));
}

static inline int rn_connect(const struct rn_library *lib, struct rdma_cm_id *id, struct rdma_conn_param *param)
{
    return RN_MINUS(lib->rdma_connect(id, param));
}

static inline int rn_accept(const struct rn_library *lib, struct rdma_cm_id *id, struct rdma_conn_param *param)
{
    return RN_MINUS(lib->rdma_accept(id, param));
}

static inline int rn_establish(const struct rn_library *lib, struct rdma_cm_id *id)
{
    return lib->rdma_establish ? RN_MINUS(lib->rdma_establish(id)) : -EOPNOTSUPP;
}

static inline int rn_reject(const struct rn_library *lib, struct rdma_cm_id *id, const void *private_data,
                            uint8_t length)
{
    return RN_MINUS(lib->rdma_reject(id, private_data, length));
}

static inline int rn_disconnect(const struct rn_library *lib, struct rdma_cm_id *id)
{
    return RN_MINUS(lib->rdma_disconnect(id));
}

static inline int rn_cm_create_qp(const struct rn_library *lib, struct rdma_cm_id *id, struct ibv_pd *pd,
                                  struct ibv_qp_init_attr *attr)
{
    return RN_MINUS(lib->rdma_create_qp(id, pd, attr));
}

static inline void rn_cm_destroy_qp(const struct rn_library *lib, struct rdma_cm_id *id)
{
    lib->rdma_destroy_qp(id);
}

static inline int rn_cm_init_qp_attr(const struct rn_library *lib, struct rdma_cm_id *id,
                                     struct ibv_qp_attr *attr, int *attr_mask)
{
    return lib->rdma_init_qp_attr ? RN_MINUS(lib->rdma_init_qp_attr(id, attr, attr_mask)) : -EOPNOTSUPP;
}

static inline int rn_cm_get_devices(const struct rn_library *lib, int *count, struct ibv_context ***out)
{
    *out = NULL;
    *count = 0;
    return RN_POINTER(out, lib->rdma_get_devices(count));
}

static inline void rn_cm_free_devices(const struct rn_library *lib, struct ibv_context **list)
{
    lib->rdma_free_devices(list);
}

#endif
