/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that only its owner can touch: the owner's engine reads or writes it for a requester of another process, who asks
 * by requester/remote.c.
 *
 * The owner trusts nothing in a request: queue pair, key, bounds and rights are looked up again in its private tables.
 */
#include "base/fence.h"
#include "base/guard.h"
#include "objects/mw.h"
#include "objects/qp.h"
#include "objects/quiesce.h"
#include "responder/inside.h"

/* With rn_process_lock held: regions and queue pairs stay while it is. */
static struct rn_qp *find_responder(const struct rn_remote *request)
{
	struct rn_qp *qp = rn_qp_by_number(request->dest_qpn);
	int state = qp ? atomic_load(&qp->state) : IBV_QPS_RESET;

	return state >= IBV_QPS_RTR && state <= IBV_QPS_SQE && qp->attr.dest_qp_num == request->source_qpn &&
			       qp->generation == request->generation
		       ? qp
		       : NULL;
}

static const uint32_t rights[] = {
	[RN_REMOTE_WRITE] = IBV_ACCESS_REMOTE_WRITE,
	[RN_REMOTE_READ] = IBV_ACCESS_REMOTE_READ,
	[RN_REMOTE_CAS] = IBV_ACCESS_REMOTE_ATOMIC,
	[RN_REMOTE_FAA] = IBV_ACCESS_REMOTE_ATOMIC,
	[RN_REMOTE_HELP] = IBV_ACCESS_REMOTE_READ,
};

/* False: the memory is gone. */
static bool touch(const struct rn_remote *request, char *at, const char *data, char *to)
{
	const void *lost;
	uint64_t before;

	switch (request->kind) {
	case RN_REMOTE_WRITE:
		return rn_bus_copy(at, data, request->length, &lost);
	case RN_REMOTE_READ:
		return rn_bus_copy(to, at, request->length, &lost);
	default:
		if (!rn_respond_atomic(request->kind == RN_REMOTE_FAA, request->compare_add, request->swap, at, &before))
			return false;
		memcpy(to, &before, sizeof(before));
		return true;
	}
}

int rn_owner_find(struct rn_qp *qp, const struct rn_remote *request, uint64_t *at)
{
	uint32_t needed = request->is_receive ? IBV_ACCESS_LOCAL_WRITE : rights[request->kind];
	uint32_t pd = request->is_receive ? rn_qp_rq_pd(qp) : rn_qp_pd(qp);
	const struct rn_mr_entry *mr = rn_mr_find(rn_mr_table, request->key);

	if (!request->is_receive && !(qp->attr.qp_access_flags & needed))
		return EACCES;
	if (!mr || (!qp->xrc.xrcd && mr->pd != pd) || (mr->access & needed) != needed ||
	    !rn_mr_covers(mr, request->addr, request->length))
		return EACCES;
	/* A window may have been invalidated by its peer, who tells the arena only. */
	if (mr->qpn && ((mr->qpn != request->dest_qpn && rn_guarded(RN_GUARD_WINDOW_QP)) ||
			atomic_load(&rn_arena_mrs(rn_arena)[rn_mr_index(request->key)].key) != request->key))
		return EACCES;
	*at = mr->base + (mr->kind == RN_MR_NULL ? 0 : request->addr - mr->iova);
	return 0;
}

static int perform(struct rn_qp *qp, const struct rn_remote *request, const char *data, size_t num_data, char *to,
		   size_t room)
{
	bool is_atomic = request->kind == RN_REMOTE_CAS || request->kind == RN_REMOTE_FAA;
	uint64_t at;

	if (!qp)
		return ENOTCONN;
	if (request->kind < RN_REMOTE_WRITE || request->kind > RN_REMOTE_FAA || request->length > RN_REMOTE_CHUNK ||
	    (request->kind == RN_REMOTE_WRITE ? num_data : room) < request->length ||
	    (is_atomic && request->length != sizeof(uint64_t)) ||
	    (request->is_receive && request->kind != RN_REMOTE_WRITE) || rn_owner_find(qp, request, &at))
		return EACCES;
	if (is_atomic && at % sizeof(uint64_t))
		return EACCES;
	if (!rn_mr_probe(at, request->length, request->kind != RN_REMOTE_READ))
		return EFAULT;
	return touch(request, (char *)(uintptr_t)at, data, to) ? 0 : EFAULT;
}

int rn_serve_request(int peer_pid, const void *message, size_t length, void *room, size_t num_room)
{
	struct rn_remote_answer *answer = room;
	struct rn_remote request;
	struct rn_qp *qp;

	if (length < sizeof(request) || num_room < sizeof(*answer))
		return -EPROTO;
	memcpy(&request, message, sizeof(request));
	pthread_mutex_lock(&rn_process_lock);
	rn_order_by_peer(); /* who posted the receive, or registered the memory */
	rn_serving_begin(RN_SERVING_ENGINE);
	qp = find_responder(&request);
	if (request.kind == RN_REMOTE_HELP)
		answer->error = rn_help_begin(qp, peer_pid, &request);
	else
		answer->error = perform(qp, &request, (const char *)message + sizeof(request),
					length - sizeof(request), answer->data, num_room - sizeof(*answer));
	rn_serving_end(RN_SERVING_ENGINE);
	if (answer->error == EACCES && !request.is_receive) {
		rn_lock(&qp->sq_lock); /* not before: the thread that has it may be waiting for our end */
		rn_mr_key_refused(qp);
		rn_unlock(&qp->sq_lock);
	}
	rn_order_by_peer(); /* with the thread that polls the completion which the peer makes of it */
	pthread_mutex_unlock(&rn_process_lock);
	answer->length = answer->error || request.kind == RN_REMOTE_WRITE || request.kind == RN_REMOTE_HELP
				 ? 0
				 : request.length;
	return sizeof(*answer) + answer->length;
}
