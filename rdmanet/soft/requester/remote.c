/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that only its owner can touch: work for the owner's engine.
 *
 * The kernel may refuse process_vm_* (Yama, containers), and an atomic on unmapped memory must be
 * done by a CPU that has it.  Then the requester sends the owner's engine a request over the link,
 * for at most RN_REMOTE_CHUNK bytes, and leaves the responder meanwhile; with the answer the
 * engine of the requester goes on from where the request had come to.  Everything else about the
 * work request (checks, the receive's completion, order) stays with the requester, in execute.c, so
 * an answer may come late or never without harm to anybody else.
 *
 * The owner trusts nothing in a request: queue pair, key, bounds and rights are looked up
 * again in its private tables.
 */
#include "base/fence.h"
#include "base/guard.h"
#include "objects/mw.h"
#include "objects/quiesce.h"
#include "requester/requester.h"

struct answer {
	int32_t error; /* 0, EACCES, EFAULT, ENOTCONN: the queue pair is not there */
	uint32_t length;
	char data[];
};

/* --- the owner's side ----------------------------------------------------------------------------------- */

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
};

static int perform(struct rn_qp *qp, const struct rn_remote *request, const char *data, size_t num_data, char *to,
		   size_t room)
{
	bool is_atomic = request->kind == RN_REMOTE_CAS || request->kind == RN_REMOTE_FAA;
	const struct rn_mr_entry *mr;
	uint64_t at, before;
	uint32_t needed;

	if (!qp)
		return ENOTCONN;
	if (request->kind < RN_REMOTE_WRITE || request->kind > RN_REMOTE_FAA || request->length > RN_REMOTE_CHUNK ||
	    (request->kind == RN_REMOTE_WRITE ? num_data : room) < request->length ||
	    (is_atomic && request->length != sizeof(before)) ||
	    (request->is_receive && request->kind != RN_REMOTE_WRITE))
		return EACCES;
	needed = request->is_receive ? IBV_ACCESS_LOCAL_WRITE : rights[request->kind];
	if (!request->is_receive && !(qp->attr.qp_access_flags & needed))
		return EACCES;
	mr = rn_mr_find(rn_mr_table, request->key);
	if (!mr || (!qp->xrc.xrcd && mr->pd != rn_qp_pd(qp)) || (mr->access & needed) != needed ||
	    !rn_mr_covers(mr, request->addr, request->length))
		return EACCES;
	/* A window may have been invalidated by its peer, who tells the arena only. */
	if (mr->qpn && ((mr->qpn != request->dest_qpn && rn_guarded(RN_GUARD_WINDOW_QP)) ||
			atomic_load(&rn_arena_mrs(rn_arena)[rn_mr_index(request->key)].key) != request->key))
		return EACCES;
	at = mr->base + (mr->kind == RN_MR_NULL ? 0 : request->addr - mr->iova);
	if (is_atomic && at % sizeof(before))
		return EACCES;
	if (!rn_mr_probe(at, request->length, request->kind != RN_REMOTE_READ))
		return EFAULT;

	before = request->compare_add;
	switch (request->kind) {
	case RN_REMOTE_WRITE:
		memcpy((void *)(uintptr_t)at, data, request->length);
		return 0;
	case RN_REMOTE_READ:
		memcpy(to, (const void *)(uintptr_t)at, request->length);
		return 0;
	case RN_REMOTE_CAS:
		__atomic_compare_exchange_n((uint64_t *)(uintptr_t)at, &before, request->swap, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST);
		break;
	default:
		before = __atomic_fetch_add((uint64_t *)(uintptr_t)at, before, __ATOMIC_SEQ_CST);
	}
	memcpy(to, &before, sizeof(before));
	return 0;
}

int rn_serve_request(int peer_pid, const void *message, size_t length, void *room, size_t num_room)
{
	struct answer *answer = room;
	struct rn_remote request;
	struct rn_qp *qp;

	(void)peer_pid;
	if (length < sizeof(request) || num_room < sizeof(*answer))
		return -EPROTO;
	memcpy(&request, message, sizeof(request));
	pthread_mutex_lock(&rn_process_lock);
	rn_order_by_peer(); /* who posted the receive, or registered the memory */
	rn_serving_begin(RN_SERVING_ENGINE);
	qp = find_responder(&request);
	answer->error = perform(qp, &request, (const char *)message + sizeof(request), length - sizeof(request),
				answer->data, num_room - sizeof(*answer));
	rn_serving_end(RN_SERVING_ENGINE);
	if (answer->error == EACCES && !request.is_receive) {
		rn_lock(&qp->sq_lock); /* not before: the thread that has it may be waiting for our end */
		rn_mr_key_refused(qp);
		rn_unlock(&qp->sq_lock);
	}
	rn_order_by_peer(); /* with the thread that polls the completion which the peer makes of it */
	pthread_mutex_unlock(&rn_process_lock);
	answer->length = answer->error || request.kind == RN_REMOTE_WRITE ? 0 : request.length;
	return sizeof(*answer) + answer->length;
}

/* --- the requester's side --------------------------------------------------------------------------------- */

/* Take the answer's bytes to where the request wants them. With sq_lock held. */
static enum ibv_wc_status take_answer(struct rn_qp *qp, struct rn_send *head, const struct answer *answer, size_t length)
{
	struct rn_piece pieces[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint64_t total;
	int count;

	if (rn_fetches(head->wr.opcode)) {
		if (answer->length != qp->reply_length || length - sizeof(*answer) < answer->length)
			return IBV_WC_BAD_RESP_ERR;
		status = rn_local_pieces(qp, &head->wr, pieces, &count, &total);
		if (status != IBV_WC_SUCCESS)
			return status;
		rn_scatter(pieces, count, head->moved, answer->data, answer->length);
	}
	head->moved += qp->reply_length;
	qp->count.bytes_engine += qp->reply_length;
	return IBV_WC_SUCCESS;
}

static void answered(struct rn_reply *reply, const void *data, long length)
{
	struct rn_qp *qp = container_of(reply, struct rn_qp, reply);
	const struct answer *answer = data;

	rn_lock(&qp->sq_lock);
	qp->reply_pending = false;
	/* The queue may have been flushed meanwhile. */
	if (qp->sq_executed != qp->sq_posted && qp->reply_for == qp->sq_executed) {
		struct rn_send *head = (struct rn_send *)(qp->sq + (uint64_t)(qp->sq_executed & qp->sq_mask) * qp->sq_stride);
		enum ibv_wc_status status = IBV_WC_SUCCESS;

		if (length < (long)sizeof(*answer))
			; /* died, or makes no sense: the retry budget runs, and news of a death come anyway */
		else if (!answer->error)
			status = take_answer(qp, head, answer, length);
		else if (answer->error != ENOTCONN)
			qp->reply_error = answer->error;
		if (status != IBV_WC_SUCCESS)
			rn_sq_fail_head(qp, status);
	}
	rn_unlock(&qp->sq_lock);
	rn_qp_progress(qp);
}

int rn_remote_start(struct rn_qp *qp, const struct rn_remote *request, const void *data)
{
	struct {
		struct rn_remote request;
		char data[RN_REMOTE_CHUNK];
	} message; /* 32 KiB: only what is used is written */
	size_t length = sizeof(*request);
	int err;

	message.request = *request;
	message.request.source_qpn = qp->ex.qp_base.qp_num;
	message.request.dest_qpn = qp->attr.dest_qp_num;
	message.request.generation = qp->responder.generation;
	if (request->kind == RN_REMOTE_WRITE) {
		memcpy(message.data, data, request->length);
		length += request->length;
	}
	qp->reply.done = answered;
	qp->reply_length = request->length;
	qp->reply_for = qp->sq_executed;
	qp->reply_pending = true;
	err = -rn_peer_request(qp->peer, &message, length, &qp->reply);
	if (err)
		qp->reply_pending = false;
	return err;
}
