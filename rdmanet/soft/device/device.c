/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device as programs meet it: list, open, queries.
 *
 * There is one device, soft0, with one port: link layer Ethernet, a RoCE v2 GID for each address of
 * this host (base/gid.c).  The device is always listed; only opening it can fail.  The first context makes
 * the arena, the first queue pair starts the engine, and both go with the last context that needs them.
 *
 * Error conventions are libibverbs': creators return NULL and set errno; queries, modify and
 * destroy return errno's value; ibv_query_gid, ibv_query_pkey and the two get_event calls
 * return -1 and set errno.
 */
#include <stdlib.h>

#include "base/extras.h"
#include "base/gid.h"
#include "datagram/datagram.h"
#include "datagram/multicast.h"
#include "datagram/port.h"
#include "device/fault_bench.h"
#include "device/query.h"
#include "objects/eager.h"
#include "objects/dm.h"
#include "objects/mw.h"
#include "objects/own_look.h"
#include "objects/quiesce.h"
#include "objects/srq.h"
#include "objects/xrc.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

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

/* By the rules in force: see faults/iwarp.h. */
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
	pthread_mutex_lock(&rn_process_lock);
	dress(rn_list_empty(&rn_contexts) ? rn_settings_are_iwarp() : rn_settings.iwarp);
	pthread_mutex_unlock(&rn_process_lock);
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
	return RN_GUID;
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

/* --- contexts ------------------------------------------------------------------------------------------------------- */

static void process_forked(void)
{
	rn_process_forked();
	rn_context_forked();
	rn_settings_forked();
	rn_fault_bench_forked();
	rn_qp_forked();
	rn_srq_forked();
	rn_ud_port_forked();
	rn_mcast_forked();
	rn_eager_forked();
	rn_cq_forked();
	rn_own_forked();
	rn_own_watch_forked();
	rn_mr_forked();
	rn_mw_forked();
	rn_quiesce_forked();
	rn_dm_forked();
	rn_arena_forked();
}

static const struct rn_peer_ops for_peers = {
	.channel_fd = rn_channel_fd,
	.channel_signal = rn_channel_signal,
	.serve = rn_serve_request,
	.withdrawn = rn_qp_segment_withdrawn,
	.died = rn_qp_process_died,
	.mapped = rn_own_watch,
	.accepted = rn_tcp_accepted,
	.port_reserve = rn_ud_port_reserve,
	.port_free = rn_ud_port_free,
};

/* The first context opens. With rn_process_lock held; 0 or errno. */
static int start(void)
{
	static bool registered;
	int err = rn_settings_read();

	if (!registered)
		rn_at_fork_child(process_forked);
	registered = true;
	rn_peers_register(&for_peers);
	rn_requester_register(&rn_requester_of_qps);
	rn_cq_at_overrun(rn_qp_cq_fell);
	rn_path_register(RN_PATH_TCP, &rn_tcp_path_ops);
	rn_path_register(RN_PATH_DATAGRAM, &rn_datagram_path_ops);
	dress(rn_settings.iwarp);
	return err;
}

RN_EXPORT int rdmanet_soft_check(char *error, size_t size)
{
	int err;

	pthread_mutex_lock(&rn_process_lock);
	err = rn_list_empty(&rn_contexts) ? rn_settings_read() : 0;
	pthread_mutex_unlock(&rn_process_lock);
	if (!err)
		return rn_fault_bench_check(error, size);
	rdmanet_soft_settings_error(error, size);
	return err;
}

/* What a program reaches through its context. */
static const struct verbs_context calls = {
	.sz = sizeof(struct verbs_context),
	.query_port = rn_query_port,
	.query_device_ex = rn_query_device_ex,
	.query_rt_values = rn_query_rt_values,
	.create_cq_ex = rn_create_cq_ex,
	.modify_cq = rn_modify_cq,
	.create_qp_ex = rn_create_qp_ex,
	.create_srq_ex = rn_create_srq_ex,
	.get_srq_num = rn_get_srq_num,
	.open_xrcd = rn_open_xrcd,
	.close_xrcd = rn_close_xrcd,
	.open_qp = rn_open_qp,
	.alloc_td = rn_alloc_td,
	.dealloc_td = rn_dealloc_td,
	.alloc_parent_domain = rn_alloc_parent_domain,
	.alloc_dm = rn_alloc_dm,
	.free_dm = rn_free_dm,
	.reg_dm_mr = rn_reg_dm_mr,
	.advise_mr = rn_advise_mr,
	.alloc_null_mr = rn_alloc_null_mr,
	.context = {
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
	},
};

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
	context->verbs = calls;
	context->verbs.context.device = device;
	err = rn_context_init(context);
	if (err)
		goto failed;
	pthread_mutex_lock(&rn_contexts_lock);
	pthread_mutex_lock(&rn_process_lock);
	err = rn_list_empty(&rn_contexts) ? start() : 0;
	if (!err)
		err = rn_arena_open();
	if (!err)
		rn_list_add(&rn_contexts, &context->link);
	pthread_mutex_unlock(&rn_process_lock);
	pthread_mutex_unlock(&rn_contexts_lock);
	if (!err) {
		rn_gid_open(rn_port_event);
		err = rn_fault_bench_open(context);
		if (!err)
			return &context->verbs.context;
		ibv_close_device(&context->verbs.context);
		errno = err;
		return NULL;
	}
	rn_context_destroy(context);
failed:
	free(context);
	errno = err;
	return NULL;
}

/* Children that the program has left are reclaimed, as the kernel does. */
RN_EXPORT int ibv_close_device(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);

	if (rn_is_foreign(ibv_context))
		return 0;
	rn_fault_bench_close(context);
	rn_qp_destroy_all(context);
	rn_srq_destroy_all(context);
	rn_xrc_destroy_all(context);
	rn_ah_destroy_all(context);
	rn_cq_destroy_all(context);
	rn_mw_destroy_all(context);
	rn_mr_destroy_all(context);
	rn_dm_destroy_all(context);
	rn_domain_destroy_all(context);
	rn_context_release_engine(context);
	pthread_mutex_lock(&rn_contexts_lock);
	pthread_mutex_lock(&rn_process_lock);
	rn_list_del(&context->link);
	if (rn_list_empty(&rn_contexts)) {
		rn_pool_forget_all(); /* with what is claimed there, which keeps memory aside */
		rn_mr_close();
		rn_null_close();
		rn_qp_forget_sqs();
	}
	rn_arena_close();
	pthread_mutex_unlock(&rn_process_lock);
	pthread_mutex_unlock(&rn_contexts_lock);
	rn_gid_close();
	rn_context_destroy(context);
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
	pthread_mutex_lock(&rn_contexts_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next) {
		struct rn_context *context = container_of(at, struct rn_context, link);

		pthread_mutex_lock(&context->mutex);
		live->contexts++;
		live->pds += length_of(&context->pds);
		live->mrs += length_of(&context->mrs);
		live->channels += length_of(&context->channels);
		live->cqs += length_of(&context->cqs);
		live->qps += length_of(&context->qps);
		pthread_mutex_unlock(&context->mutex);
	}
	pthread_mutex_unlock(&rn_contexts_lock);
	live->fds = rn_fd_count() + live->channels + live->contexts;
	live->mappings = rn_mr_count_mappings() + (live->contexts ? 1 : 0) + peers.mappings;
	live->peers = peers.peers;
	live->links = peers.links;
	live->quarantined = rdmanet_soft_quarantined();
}
