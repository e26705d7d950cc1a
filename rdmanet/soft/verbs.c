/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device as programs meet it: list, open, queries.
 *
 * There is one device, soft0, with one port: link layer Ethernet, a RoCE v2 GID for each address of
 * this host (gid.c).  It is there always, so that opening it is what can fail.  The first context
 * makes the arena, the first queue pair starts the engine; both go with the last context that needs
 * them.
 *
 * Error conventions are libibverbs': creators return NULL and set errno; queries, modify and
 * destroy return errno's value; ibv_query_gid, ibv_query_pkey and the two get_event calls
 * return -1 and set errno.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "gid.h"
#include "soft.h"
#include "mcast.h"
#include "srq.h"
#include "ud_wire.h"
#include "xrc.h"

unsigned rn_process;
pthread_mutex_t rn_world = PTHREAD_MUTEX_INITIALIZER;

/* With rn_world held. */
struct rn_list rn_contexts = {&rn_contexts, &rn_contexts};

/* Starting and stopping what the engine does for us. Not rn_world: stopping waits for callbacks,
 * which take that one. */
static pthread_mutex_t engine_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned engine_users;

/* --- the device --------------------------------------------------------------------------------------------- */

/* Provider libraries that are loaded next to us look for their own fields right behind the public
 * struct: they must find zeros. */
static union {
	struct ibv_device device;
	char room[2048];
} soft0 = {
	.device =
		{
			.node_type = IBV_NODE_CA,
			.transport_type = IBV_TRANSPORT_IB,
			.name = "soft0",
			.dev_name = "rdmanet_soft0",
			.dev_path = "/sys/class/infiniband_verbs/rdmanet_soft0",
			.ibdev_path = "/sys/class/infiniband/soft0",
		},
};

#define GUID htobe64(0x025244fffe4d414eull) /* locally administered */

/* By the rules in force: see iwarp.h. */
static void dress(bool iwarp)
{
	soft0.device.node_type = iwarp ? IBV_NODE_RNIC : IBV_NODE_CA;
	soft0.device.transport_type = iwarp ? IBV_TRANSPORT_IWARP : IBV_TRANSPORT_IB;
}

RN_EXPORT struct ibv_device **ibv_get_device_list(int *num_devices)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	if (!list)
		return NULL;
	pthread_mutex_lock(&rn_world);
	dress(rn_list_empty(&rn_contexts) ? rn_settings_are_iwarp() : rn_settings.iwarp);
	pthread_mutex_unlock(&rn_world);
	list[0] = &soft0.device;
	if (num_devices)
		*num_devices = 1;
	return list;
}

RN_EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

RN_EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

RN_EXPORT __be64 ibv_get_device_guid(struct ibv_device *device)
{
	(void)device;
	return GUID;
}

RN_EXPORT int ibv_get_device_index(struct ibv_device *device)
{
	(void)device;
	return -1; /* no kernel device */
}

/* Forks are handled from the moment that a context opens. */
RN_EXPORT int ibv_fork_init(void)
{
	return 0;
}

RN_EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return IBV_FORK_UNNEEDED;
}

/* --- queries ---------------------------------------------------------------------------------------------------- */

RN_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	if (rn_is_foreign(context))
		return ENODEV;
	if (rn_chaos_is_dead(context))
		return EIO;
	*attr = (struct ibv_device_attr){
		.fw_ver = "1",
		.node_guid = GUID,
		.sys_image_guid = GUID,
		.max_mr_size = UINT64_MAX,
		.page_size_cap = 4096,
		.vendor_id = 0xffffff, /* nobody's, as of other software devices */
		.hw_ver = 1,
		.max_qp = RN_QPS_MAX,
		.max_qp_wr = RN_MAX_QP_WR,
		.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID |
				    IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_XRC |
				    (rn_settings.iwarp ? 0 : IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B),
		.max_sge = RN_MAX_SGE,
		.max_sge_rd = rn_settings.iwarp ? 1 : RN_MAX_SGE,
		.max_cq = RN_CQS_MAX,
		.max_cqe = RN_MAX_CQE,
		.max_mr = RN_MRS_MAX - 1,
		.max_mw = rn_settings.iwarp ? 0 : RN_MRS_MAX - 1, /* nobody can bind them: iwarp.c */
		.max_pd = 1 << 20,
		.max_qp_rd_atom = RN_MAX_RD_ATOMIC,
		.max_res_rd_atom = RN_MAX_RD_ATOMIC * 1024,
		.max_qp_init_rd_atom = RN_MAX_RD_ATOMIC,
		.atomic_cap = rn_settings.iwarp ? IBV_ATOMIC_NONE : IBV_ATOMIC_GLOB,
		.max_ah = 1 << 20,
		.max_mcast_grp = 1 << 12,
		.max_mcast_qp_attach = 1 << 12,
		.max_total_mcast_qp_attach = 1 << 16,
		.max_srq = RN_MAX_SRQS,
		.max_srq_wr = RN_MAX_QP_WR,
		.max_srq_sge = RN_MAX_SGE,
		.max_pkeys = 1,
		.local_ca_ack_delay = 0,
		.phys_port_cnt = 1,
	};
	return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex all = {0};
	int err;

	if (input && input->comp_mask)
		return EINVAL;
	if (size < sizeof(all.orig_attr))
		return EINVAL;
	err = ibv_query_device(context, &all.orig_attr);
	if (err)
		return err;
	all.cq_mod_caps.max_cq_count = UINT16_MAX;
	all.cq_mod_caps.max_cq_period = UINT16_MAX;
	all.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
	all.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
						      IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
						      IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;
	all.odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;
	all.odp_caps.per_transport_caps.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
	all.xrc_odp_caps = all.odp_caps.per_transport_caps.rc_odp_caps;
	all.max_dm_size = RN_MAX_DM;
	all.completion_timestamp_mask = UINT64_MAX;
	all.hca_core_clock = 1000000; /* kHz: nanoseconds */
	all.device_cap_flags_ex = all.orig_attr.device_cap_flags;
	all.phys_port_cnt_ex = 1;
	memcpy(attr, &all, size < sizeof(all) ? size : sizeof(all));
	if (size > sizeof(all))
		memset((char *)attr + sizeof(all), 0, size - sizeof(all));
	return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	bool has_link = rn_gid_has_link();
	struct ibv_port_attr all = {
		.state = has_link ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = IBV_MTU_4096,
		.gid_tbl_len = RN_GIDS,
		.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
		.max_msg_sz = RN_MAX_MESSAGE,
		.pkey_tbl_len = 1,
		.max_vl_num = 1,
		.active_width = 2, /* 4x */
		.active_speed = 32, /* EDR: 100 Gb/s */
		.phys_state = has_link ? 5 : 3, /* link up, or disabled */
		.lid = rn_settings.infiniband ? RN_LID : 0,
		.sm_lid = rn_settings.infiniband ? RN_LID : 0,
		.link_layer = rn_settings.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET,
		.flags = rn_settings.infiniband || rn_settings.iwarp ? 0 : IBV_QPF_GRH_REQUIRED,
	};

	if (rn_is_foreign(context))
		return ENODEV;
	if (rn_chaos_is_dead(context))
		return EIO;
	if (port != 1)
		return EINVAL;
	if (rn_chaos_link_is_down(&rn_context(context)->chaos)) {
		all.state = IBV_PORT_DOWN;
		all.phys_state = 3; /* disabled */
	}
	memcpy(attr, &all, size < sizeof(all) ? size : sizeof(all));
	if (size > sizeof(all))
		memset((char *)attr + sizeof(all), 0, size - sizeof(all));
	return 0;
}

enum { COMPAT_PORT_ATTR_SIZE = 48 }; /* what callers of the exported function have room for */

RN_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return query_port(context, port, (struct ibv_port_attr *)attr, COMPAT_PORT_ATTR_SIZE);
}

static int fail(int err)
{
	errno = err;
	return -1;
}

RN_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	if (port != 1 || index < 0 || index >= RN_GIDS)
		return fail(EINVAL);
	if (!rn_gid_at((uint32_t)index, gid, NULL))
		memset(gid, 0, sizeof *gid);
	return 0;
}

static bool fill_gid(uint32_t index, void *entry, size_t size)
{
	enum ibv_gid_type type = rn_settings.infiniband ? IBV_GID_TYPE_IB : IBV_GID_TYPE_ROCE_V2;
	struct ibv_gid_entry one = {.gid_index = index, .port_num = 1, .gid_type = type};

	if (!rn_gid_at(index, &one.gid, &one.ndev_ifindex))
		return false;
	memset(entry, 0, size);
	memcpy(entry, &one, size < sizeof(one) ? size : sizeof(one));
	return true;
}

RN_EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
				uint32_t flags, size_t entry_size)
{
	if (rn_is_foreign(context))
		return ENODEV;
	if (flags)
		return EOPNOTSUPP;
	if (port != 1 || index >= RN_GIDS)
		return EINVAL;
	return fill_gid(index, entry, entry_size) ? 0 : ENODATA;
}

/* Those that are there: their indexes may have gaps. */
RN_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
				       uint32_t flags, size_t entry_size)
{
	union ibv_gid unused;
	size_t count = 0;

	if (rn_is_foreign(context))
		return -ENODEV;
	if (flags)
		return -EOPNOTSUPP;
	for (uint32_t i = 0; i < RN_GIDS; i++) {
		if (count < max_entries)
			count += fill_gid(i, (char *)entries + count * entry_size, entry_size);
		else if (rn_gid_at(i, &unused, NULL))
			return -EINVAL;
	}
	return (ssize_t)count;
}

RN_EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	if (port != 1 || index != 0)
		return fail(EINVAL);
	*pkey = htobe16(0xffff);
	return 0;
}

RN_EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	return port == 1 && pkey == htobe16(0xffff) ? 0 : fail(EINVAL);
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	/* Ticks of the clock of completion time stamps, which programs take from tv_nsec alone. */
	if (values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK)
		values->raw_clock = (struct timespec){.tv_nsec = rn_now_ns()};
	values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
	return 0;
}

/* --- contexts ------------------------------------------------------------------------------------------------------- */

static void process_forked(void)
{
	rn_process++;
	pthread_mutex_init(&rn_world, NULL);
	pthread_mutex_init(&engine_mutex, NULL);
	rn_list_init(&rn_contexts);
	engine_users = 0;
	rn_settings_forked();
	rn_chaos_forked();
	rn_qp_forked();
	rn_srq_forked();
	rn_ud_wire_forked();
	rn_mcast_forked();
	rn_bounce_forked();
	rn_cq_forked();
	rn_own_forked();
	rn_mr_forked();
	rn_mw_forked();
	rn_dm_forked();
	rn_arena_forked();
}

/* The first context opens. With rn_world held; 0 or errno. */
static int start(void)
{
	static bool registered;
	int err = rn_settings_read();

	if (!registered)
		rn_at_fork_child(process_forked);
	registered = true;
	dress(rn_settings.iwarp);
	return err;
}

RN_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct rn_context *context;
	int err;

	if (device != &soft0.device) {
		errno = ENODEV;
		return NULL;
	}
	context = calloc(1, sizeof(*context));
	if (!context)
		return NULL;
	context->process = rn_process;
	pthread_mutex_init(&context->mutex, NULL);
	rn_list_init(&context->pds);
	rn_list_init(&context->tds);
	rn_list_init(&context->dms);
	rn_list_init(&context->mrs);
	rn_list_init(&context->mws);
	rn_list_init(&context->channels);
	rn_list_init(&context->cqs);
	rn_list_init(&context->srqs);
	rn_list_init(&context->xrcds);
	rn_list_init(&context->ahs);
	rn_list_init(&context->qps);
	rn_list_init(&context->events);
	context->verbs.sz = sizeof(context->verbs);
	context->verbs.query_port = query_port;
	context->verbs.query_device_ex = query_device_ex;
	context->verbs.query_rt_values = query_rt_values;
	context->verbs.create_cq_ex = rn_create_cq_ex;
	context->verbs.modify_cq = rn_modify_cq;
	context->verbs.create_qp_ex = rn_create_qp_ex;
	context->verbs.create_srq_ex = rn_create_srq_ex;
	context->verbs.get_srq_num = rn_get_srq_num;
	context->verbs.open_xrcd = rn_open_xrcd;
	context->verbs.close_xrcd = rn_close_xrcd;
	context->verbs.open_qp = rn_open_qp;
	context->verbs.alloc_td = rn_alloc_td;
	context->verbs.dealloc_td = rn_dealloc_td;
	context->verbs.alloc_parent_domain = rn_alloc_parent_domain;
	context->verbs.alloc_dm = rn_alloc_dm;
	context->verbs.free_dm = rn_free_dm;
	context->verbs.reg_dm_mr = rn_reg_dm_mr;
	context->verbs.advise_mr = rn_advise_mr;
	context->verbs.alloc_null_mr = rn_alloc_null_mr;
	context->verbs.context = (struct ibv_context){
		.device = device,
		.ops =
			{
				._compat_query_device = ibv_query_device,
				._compat_query_port = ibv_query_port,
				.alloc_mw = rn_alloc_mw,
				.bind_mw = rn_bind_mw,
				.dealloc_mw = rn_dealloc_mw,
				.poll_cq = rn_cq_poll,
				.req_notify_cq = rn_cq_request_notify,
				.post_send = rn_post_send,
				.post_recv = rn_post_recv,
				.post_srq_recv = rn_post_srq_recv,
			},
		.cmd_fd = -1,
		.num_comp_vectors = 1,
		.abi_compat = (void *)UINTPTR_MAX,
	};
	pthread_mutex_init(&context->verbs.context.mutex, NULL);
	context->verbs.context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (context->verbs.context.async_fd < 0) {
		err = errno;
		goto failed;
	}
	err = rn_context_file(context);
	if (err) {
		close(context->verbs.context.async_fd);
		goto failed;
	}
	pthread_mutex_lock(&rn_world);
	err = rn_list_empty(&rn_contexts) ? start() : 0;
	if (!err)
		err = rn_arena_open();
	if (!err)
		rn_list_add(&rn_contexts, &context->link);
	pthread_mutex_unlock(&rn_world);
	if (!err) {
		rn_gid_open();
		err = rn_chaos_open(context);
		if (!err)
			return &context->verbs.context;
		ibv_close_device(&context->verbs.context);
		errno = err;
		return NULL;
	}
	rn_fd_close(context->verbs.context.cmd_fd);
	close(context->verbs.context.async_fd);
failed:
	free(context);
	errno = err;
	return NULL;
}

int rn_context_engine(struct rn_context *context)
{
	int err = 0;

	pthread_mutex_lock(&engine_mutex);
	if (!context->has_engine) {
		err = -rn_engine_hold();
		if (!err && !engine_users && (err = rn_bell_open()))
			rn_engine_release();
		if (!err) {
			engine_users++;
			context->has_engine = true;
			rn_gid_watch();
		}
	}
	pthread_mutex_unlock(&engine_mutex);
	return err;
}

static void release_engine(struct rn_context *context)
{
	pthread_mutex_lock(&engine_mutex);
	if (context->has_engine) {
		if (!--engine_users) {
			rn_own_close();
			rn_qp_close();
			rn_bell_close();
		}
		rn_engine_release();
	}
	pthread_mutex_unlock(&engine_mutex);
}

/* Children that the program has left are reclaimed, as the kernel does. */
RN_EXPORT int ibv_close_device(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);

	if (rn_is_foreign(ibv_context))
		return 0;
	rn_chaos_close(context);
	rn_xrc_close_handles(context);
	rn_qp_destroy_all(context);
	rn_srq_destroy_all(context);
	rn_xrc_destroy_all(context);
	rn_ah_destroy_all(context);
	rn_cq_destroy_all(context);
	rn_mw_destroy_all(context);
	rn_mr_destroy_all(context);
	rn_dm_destroy_all(context);
	rn_domain_destroy_all(context);
	release_engine(context);
	pthread_mutex_lock(&rn_world);
	rn_list_del(&context->link);
	if (rn_list_empty(&rn_contexts)) {
		rn_pool_forget_all(); /* with what is claimed there, which keeps memory aside */
		rn_mr_close();
		rn_null_close();
	}
	rn_arena_close();
	pthread_mutex_unlock(&rn_world);
	rn_gid_close();
	while (!rn_list_empty(&context->events)) {
		struct rn_event *event = container_of(context->events.next, struct rn_event, link);

		rn_list_del(&event->link);
		free(event);
	}
	close(ibv_context->async_fd);
	rn_fd_close(ibv_context->cmd_fd);
	pthread_mutex_destroy(&context->mutex);
	pthread_mutex_destroy(&ibv_context->mutex);
	free(context);
	return 0;
}

static unsigned length_of(const struct rn_list *list)
{
	unsigned length = 0;

	for (const struct rn_list *at = list->next; at != list; at = at->next)
		length++;
	return length;
}

RN_EXPORT void rdmanet_soft_live(struct rn_live *live)
{
	struct rn_peer_live peers;

	*live = (struct rn_live){0};
	rn_peer_live(&peers);
	pthread_mutex_lock(&rn_world);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next) {
		struct rn_context *context = container_of(at, struct rn_context, link);

		live->contexts++;
		live->pds += length_of(&context->pds);
		live->mrs += length_of(&context->mrs);
		live->channels += length_of(&context->channels);
		live->cqs += length_of(&context->cqs);
		live->qps += length_of(&context->qps);
	}
	pthread_mutex_unlock(&rn_world);
	live->fds = rn_fd_count() + live->channels + live->contexts;
	live->mappings = rn_mr_count_mappings() + (live->contexts ? 1 : 0) + peers.mappings;
	live->peers = peers.peers;
	live->links = peers.links;
	live->quarantined = rdmanet_soft_quarantined();
}

/* --- the port ------------------------------------------------------------------------------------- */

void rn_port_event(enum ibv_event_type type)
{
	pthread_mutex_lock(&rn_world);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next)
		rn_event_raise(container_of(at, struct rn_context, link), type, NULL);
	pthread_mutex_unlock(&rn_world);
}

/* --- what has one answer only ----------------------------------------------------------------------------------------------- */

RN_EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp, (void)op, (void)flags;
	return 0;
}

/* Enhanced connection establishment: nothing to enhance. */
RN_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

RN_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	*ece = (struct ibv_ece){0};
	return EOPNOTSUPP;
}

/* --- words ----------------------------------------------------------------------------------------------------------------------- */

#define NAME(table, value) ((size_t)(value) < sizeof(table) / sizeof((table)[0]) && (table)[value] ? (table)[value] : "unknown")

RN_EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	static const char *const names[] = {
		[IBV_WC_SUCCESS] = "success",
		[IBV_WC_LOC_LEN_ERR] = "local length error",
		[IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
		[IBV_WC_LOC_EEC_OP_ERR] = "local EE context operation error",
		[IBV_WC_LOC_PROT_ERR] = "local protection error",
		[IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
		[IBV_WC_MW_BIND_ERR] = "memory management operation error",
		[IBV_WC_BAD_RESP_ERR] = "bad response error",
		[IBV_WC_LOC_ACCESS_ERR] = "local access error",
		[IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
		[IBV_WC_REM_ACCESS_ERR] = "remote access error",
		[IBV_WC_REM_OP_ERR] = "remote operation error",
		[IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
		[IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
		[IBV_WC_LOC_RDD_VIOL_ERR] = "local RDD violation error",
		[IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid RD request",
		[IBV_WC_REM_ABORT_ERR] = "aborted error",
		[IBV_WC_INV_EECN_ERR] = "invalid EE context number",
		[IBV_WC_INV_EEC_STATE_ERR] = "invalid EE context state",
		[IBV_WC_FATAL_ERR] = "fatal error",
		[IBV_WC_RESP_TIMEOUT_ERR] = "response timeout error",
		[IBV_WC_GENERAL_ERR] = "general error",
		[IBV_WC_TM_ERR] = "TM error",
		[IBV_WC_TM_RNDV_INCOMPLETE] = "TM software rendezvous",
	};

	return NAME(names, status);
}

RN_EXPORT const char *ibv_event_type_str(enum ibv_event_type event)
{
	static const char *const names[] = {
		[IBV_EVENT_CQ_ERR] = "CQ error",
		[IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
		[IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
		[IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
		[IBV_EVENT_COMM_EST] = "communication established",
		[IBV_EVENT_SQ_DRAINED] = "send queue drained",
		[IBV_EVENT_PATH_MIG] = "path migrated",
		[IBV_EVENT_PATH_MIG_ERR] = "path migration request error",
		[IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
		[IBV_EVENT_PORT_ACTIVE] = "port active",
		[IBV_EVENT_PORT_ERR] = "port error",
		[IBV_EVENT_LID_CHANGE] = "LID change",
		[IBV_EVENT_PKEY_CHANGE] = "P_Key change",
		[IBV_EVENT_SM_CHANGE] = "SM change",
		[IBV_EVENT_SRQ_ERR] = "SRQ catastrophic error",
		[IBV_EVENT_SRQ_LIMIT_REACHED] = "SRQ limit reached",
		[IBV_EVENT_QP_LAST_WQE_REACHED] = "last WQE reached",
		[IBV_EVENT_CLIENT_REREGISTER] = "client reregistration",
		[IBV_EVENT_GID_CHANGE] = "GID table change",
		[IBV_EVENT_WQ_FATAL] = "WQ fatal",
		[IBV_EVENT_DEVICE_SPEED_CHANGE] = "device speed change",
	};

	return NAME(names, event);
}

RN_EXPORT const char *ibv_port_state_str(enum ibv_port_state state)
{
	static const char *const names[] = {
		[IBV_PORT_NOP] = "no state change (NOP)",
		[IBV_PORT_DOWN] = "down",
		[IBV_PORT_INIT] = "init",
		[IBV_PORT_ARMED] = "armed",
		[IBV_PORT_ACTIVE] = "active",
		[IBV_PORT_ACTIVE_DEFER] = "active deferred",
	};

	return NAME(names, state);
}

RN_EXPORT const char *ibv_node_type_str(enum ibv_node_type type)
{
	static const char *const names[] = {
		[IBV_NODE_CA] = "InfiniBand channel adapter",
		[IBV_NODE_SWITCH] = "InfiniBand switch",
		[IBV_NODE_ROUTER] = "InfiniBand router",
		[IBV_NODE_RNIC] = "iWARP NIC",
		[IBV_NODE_USNIC] = "usNIC",
		[IBV_NODE_USNIC_UDP] = "usNIC UDP",
		[IBV_NODE_UNSPECIFIED] = "unspecified",
	};

	return NAME(names, type);
}
