/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a queue pair learns from its peers: notes that they leave in its block, and their end.
 *
 * Only its owner may change the state of a queue pair.  A requester that works in it leaves a note (`fault`,
 * `established`) and wakes the owner's engine, which acts on it here, unless another thread of the owner looks first.
 * The kernel tells when a peer's process has died (peer/peer.c), and peer/link.c when it can't be reached.
 */
#include "faults/iwarp.h"
#include "objects/qp_inside.h"
#include "objects/sq.h"
#include "objects/srq.h"

/* --- notes ------------------------------------------------------------------------------------------------ */

static bool has_note(struct rn_qp *qp)
{
	uint32_t fault = atomic_load(&qp->theirs->fault);

	return (fault != RN_FAULT_NONE && fault != RN_FAULT_UNPLUGGED) || atomic_load(&qp->theirs->established);
}

void rn_qp_process_pending(struct rn_qp *qp)
{
	uint32_t fault;
	int state;

	if (likely(!has_note(qp)))
		return;
	/* Read again under the lock: a reset may have taken the note away. */
	rn_lock(&qp->sq_lock);
	fault = atomic_load(&qp->theirs->fault);
	state = atomic_load(&qp->state);
	if (atomic_load(&qp->theirs->established) && !qp->established_reported) {
		qp->established_reported = true;
		rn_event_raise(qp->context, IBV_EVENT_COMM_EST, qp);
	}
	if (fault != RN_FAULT_NONE && fault != RN_FAULT_UNPLUGGED && state != IBV_QPS_RESET && state != IBV_QPS_ERR) {
		/* A local error has its completion, and needs no event. */
		if (fault == RN_FAULT_REQUEST)
			rn_event_raise(qp->context, IBV_EVENT_QP_REQ_ERR, qp);
		else if (fault == RN_FAULT_ACCESS)
			rn_event_raise(qp->context, IBV_EVENT_QP_ACCESS_ERR, qp);
		else if (fault == RN_FAULT_TERMINATED)
			rn_qp_terminate(qp);
		rn_qp_fail(qp);
	}
	rn_unlock(&qp->sq_lock);
}

void rn_qp_process_pending_all(void)
{
	pthread_mutex_lock(&rn_process_lock);
	rn_for_each_qp(qp)
		rn_qp_process_pending(qp);
	rn_srq_process_pending_all();
	pthread_mutex_unlock(&rn_process_lock);
}

/* --- withdrawn segments ----------------------------------------------------------------------------------- */

/* Segments are found, used and remembered under the send lock only. */
void rn_qp_segment_withdrawn(const char *base)
{
	pthread_mutex_lock(&rn_process_lock);
	rn_for_each_qp(qp) {
		rn_lock(&qp->sq_lock);
		if (qp->responder.segment_base == base)
			qp->responder.segment = qp->responder.segment_size = 0;
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_process_lock);
}

/* --- deaths ----------------------------------------------------------------------------------------------- */

/* Was it killed with its queue pair open, or was that closed before? */
static bool was_abandoned(struct rn_qp *qp)
{
	struct rn_peer *peer = qp->peer;
	struct rn_qp_block *block;

	if (!peer->arena || peer->arena_size < RN_ARENA_SIZE)
		return true;
	block = rn_arena_locate(peer->arena, qp->attr.dest_qp_num);
	return block && rn_state_is_open(atomic_load(&block->generation_state)) &&
	       atomic_load(&block->dest_qpn) == qp->ex.qp_base.qp_num;
}

/*
 * The peer's process is gone, so requests on their way will never be acknowledged. If there are none, an adapter would
 * notice nothing, and neither does this queue pair if the peer has closed its side in good order: a program may finish
 * later than its peer. But if the peer was killed, the queue pair fails at once.
 */
static void peer_died(struct rn_qp *qp)
{
	bool is_abandoned;

	atomic_store(&qp->peer_gone, true);
	rn_lock(&qp->sq_lock);
	is_abandoned = qp->peer && was_abandoned(qp);
	if (is_abandoned)
		atomic_store(&qp->peer_left_us, true); /* before any completion that it explains */
	if (qp->unreliable)
		; /* nothing waits for its answer, and it does not wait for ours */
	else if (!rn_qp_last_look(qp))
		; /* what it had sent has ended this */
	else if (qp->sq_executed != qp->sq_posted)
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	else if (is_abandoned)
		rn_qp_fail(qp);
	rn_qp_pool_recover(qp);
	rn_unlock(&qp->sq_lock);
}

RN_EXPORT int rdmanet_soft_qp_peer_is_gone(struct ibv_qp *qp)
{
	return !rn_is_foreign(qp->context) && atomic_load(&rn_qp(qp)->peer_left_us);
}

void rn_qp_peer_noticed(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
{
	struct rn_qp *qp = container_of(notice, struct rn_qp, notice);

	(void)peer;
	if (why == RN_LINK_MUTUAL)
		return;
	if (why == RN_PEER_DIED) {
		peer_died(qp);
		return;
	}
	if (why == RN_LINK_FAILED) {
		rn_lock(&qp->sq_lock);
		qp->link_failed = true;
		rn_unlock(&qp->sq_lock);
		/* It may have died in the middle of a push before we ever had a link to it. */
		rn_cq_mark_ready(qp->recv_cq, qp);
	}
	rn_requester->progress(qp);
}

/*
 * A process that was served by our engine has died, at any point in our arena. What it has published is valid; the
 * wake-up for it may not have been sent.
 */
void rn_qp_process_died(int pid)
{
	pthread_mutex_lock(&rn_process_lock);
	rn_for_each_qp(qp) {
		struct rn_peer *peer = qp->peer;
		int state = peer ? atomic_load(&peer->state) : RN_PEER_CONNECTING;

		if (!peer || state == RN_PEER_CONNECTING || state == RN_PEER_SELF || peer->pid != pid)
			continue;
		rn_cq_mark_ready(qp->recv_cq, qp);
		peer_died(qp);
	}
	rn_qp_pool_process_died(pid);
	rn_cq_recover();
	rn_qp_reap();
	rn_mr_reap();
	pthread_mutex_unlock(&rn_process_lock);
}

/* --- the end of a completion queue ----------------------------------------------------------------------------- */

void rn_qp_cq_fell(struct rn_cq *cq)
{
	pthread_mutex_lock(&rn_process_lock);
	rn_for_each_qp(qp) {
		int state;

		if (qp->send_cq != cq && qp->recv_cq != cq)
			continue;
		rn_lock(&qp->sq_lock);
		state = atomic_load(&qp->state);
		if (state != IBV_QPS_RESET && state != IBV_QPS_ERR) {
			rn_event_raise(qp->context, IBV_EVENT_QP_FATAL, qp);
			rn_qp_fail(qp);
		}
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_process_lock);
}
