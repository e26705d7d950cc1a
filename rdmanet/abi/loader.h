/*
 * A verbs library, opened at run time.
 *
 * rn_library_open() opens the two shared objects that together are "a verbs
 * library" (libibverbs.so.1 and librdmacm.so.1, or twice the embedded device,
 * which exports both halves) and looks up every function the core calls. The
 * lists below are the one place where a function's name is written: they make
 * the members of struct rn_library, each with the type of its declaration in
 * verbs.h or rdma_cma.h, and the table from which loader.c fills them.
 *
 * A required function that is missing makes the library unusable. An optional
 * one is NULL there, and its caller in calls.h answers EOPNOTSUPP.
 *
 * Objects made through one library must never be given to another; nothing
 * here can check that, so whoever wraps them keeps the library beside them.
 */
#ifndef RDMANET_ABI_LOADER_H
#define RDMANET_ABI_LOADER_H

#include <stdbool.h>
#include <sys/types.h>

#include "rdma_cma.h"

#define RN_VERBS_REQUIRED(F)                                                                         \
    F(ibv_get_device_list) F(ibv_free_device_list) F(ibv_get_device_name) F(ibv_get_device_guid)     \
    F(ibv_open_device) F(ibv_close_device) F(ibv_query_device) F(ibv_query_port) F(ibv_query_gid)    \
    F(ibv_query_pkey) F(ibv_get_async_event) F(ibv_ack_async_event) F(ibv_alloc_pd)                  \
    F(ibv_dealloc_pd) F(ibv_reg_mr) F(ibv_dereg_mr) F(ibv_create_comp_channel)                       \
    F(ibv_destroy_comp_channel) F(ibv_create_cq) F(ibv_resize_cq) F(ibv_destroy_cq)                  \
    F(ibv_get_cq_event) F(ibv_ack_cq_events) F(ibv_create_srq) F(ibv_modify_srq) F(ibv_query_srq)    \
    F(ibv_destroy_srq) F(ibv_create_qp) F(ibv_modify_qp) F(ibv_query_qp) F(ibv_destroy_qp)           \
    F(ibv_create_ah) F(ibv_destroy_ah)

/* Younger than some rdma-core still in use, or absent where a device cannot do it. */
#define RN_VERBS_OPTIONAL(F)                                                                         \
    F(_ibv_query_gid_ex) F(_ibv_query_gid_table) F(ibv_reg_mr_iova2) F(ibv_reg_dmabuf_mr)            \
    F(ibv_rereg_mr) F(ibv_init_ah_from_wc) F(ibv_attach_mcast) F(ibv_detach_mcast)                   \
    F(ibv_qp_to_qp_ex) F(ibv_fork_init) F(ibv_is_fork_initialized)

#define RN_CM_REQUIRED(F)                                                                            \
    F(rdma_create_event_channel) F(rdma_destroy_event_channel) F(rdma_get_cm_event)                  \
    F(rdma_ack_cm_event) F(rdma_create_id) F(rdma_destroy_id) F(rdma_migrate_id)                     \
    F(rdma_set_option) F(rdma_bind_addr) F(rdma_resolve_addr) F(rdma_resolve_route)                  \
    F(rdma_listen) F(rdma_connect) F(rdma_accept) F(rdma_reject) F(rdma_disconnect)                  \
    F(rdma_create_qp) F(rdma_destroy_qp)

#define RN_CM_OPTIONAL(F)                                                                            \
    F(rdma_establish) F(rdma_notify) F(rdma_init_qp_attr) F(rdma_create_qp_ex)                       \
    F(rdma_join_multicast) F(rdma_join_multicast_ex) F(rdma_leave_multicast)

struct rn_library {
    void *verbs_handle;
    void *cm_handle;
#define RN_MEMBER(name) __typeof__(name) *name;
    RN_VERBS_REQUIRED(RN_MEMBER)
    RN_VERBS_OPTIONAL(RN_MEMBER)
    RN_CM_REQUIRED(RN_MEMBER)
    RN_CM_OPTIONAL(RN_MEMBER)
#undef RN_MEMBER
};

/*
 * Opens the library; 0 or -errno, with a line of explanation in err. The two
 * paths may be equal. Where cm_path is NULL there is no connection manager,
 * and its functions are NULL.
 */
int rn_library_open(const char *verbs_path, const char *cm_path, struct rn_library **lib, char *err,
                    size_t errlen);
void rn_library_close(struct rn_library *lib);

/* The name of the index-th optional function, and whether the library has it; NULL after the last. */
const char *rn_library_optional(const struct rn_library *lib, size_t index, int *present);

/* Any other export of the library, or NULL. */
void *rn_library_symbol(const struct rn_library *lib, const char *name);

/*
 * The process that runs this code, kept by a fork handler: what getpid() says,
 * for the cost of a load, so that every call can afford to ask.
 */
extern pid_t rn_pid;

#endif
