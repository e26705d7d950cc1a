/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a queue pair hears of its peers: notes that they have left in its block, and their end.
 *
 * A requester can't change the state of the queue pair that it works in, which is its owner's business.  It
 * leaves a note (`fault`, `established`) and rings the bell; here the owner's engine acts on it, or
 * whoever looks first.  The kernel tells when a peer's process has died (peer.c), and peer_link.c
 * when it can't be reached.
 */
#include "iwarp.h"
#include "qp.h"
#include "srq.h"

/* --- notes ------------------------------------------------------------------------------------------------ */

static bool has_news(struct rn_qp *qp)
{
	uint32_t fault = atomic_load(&qp->theirs->fault);

	return (fault != RN_FAULT_NONE && fault != RN_FAULT_UNPLUGGED) || atomic_load(&qp->theirs->established);
}

void rn_qp_attend(struct rn_qp *qp)
{
	uint32_t fault;
	int state;

	if (likely(!has_news(qp)))
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
			rn_iwarp_terminate(qp);
		rn_qp_fail(qp);
	}
	rn_unlock(&qp->sq_lock);
}

void rn_qp_attend_all(void)
{
	pthread_mutex_lock(&rn_world);
	for (uint32_t i = 0; i < rn_qps_end; i++)
		if (rn_qps[i])
			rn_qp_attend(rn_qps[i]);
	rn_srq_attend_all();
	pthread_mutex_unlock(&rn_world);
}

/* --- withdrawn segments ----------------------------------------------------------------------------------- */

/* Segments are found, used and remembered under the send lock only. */
void rn_segment_withdrawn(const char *base)
{
	pthread_mutex_lock(&rn_world);
	for (uint32_t i = 0; i < rn_qps_end; i++) {
		struct rn_qp *qp = rn_qps[i];

		if (!qp)
			continue;
		rn_lock(&qp->sq_lock);
		if (qp->view.segment_base == base)
			qp->view.segment = qp->view.segment_size = 0;
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_world);
}

/* --- deaths ----------------------------------------------------------------------------------------------- */

/*
 * The peer's process has gone. What was on its way will never be acknowledged. Without that, an
 * adapter would notice nothing: so it is when the peer has closed its side in good order, and
 * a program that is just done may be slower to finish than its peer. But of a peer that was
 * killed everybody is told at once.
 */
static void peer_died(struct rn_qp *qp)
{
	bool is_abandoned;

	atomic_store(&qp->peer_gone, true);
	rn_lock(&qp->sq_lock);
	is_abandoned = qp->peer && rn_was_abandoned(qp);
	if (is_abandoned)
		atomic_store(&qp->peer_left_us, true); /* before any completion that it explains */
	if (qp->unreliable)
		; /* nobody waits for an answer of its, nor it for ours */
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
	if (why == RN_PEER_DIED) {
		peer_died(qp);
		return;
	}
	if (why == RN_LINK_FAILED) {
		rn_lock(&qp->sq_lock);
		qp->link_failed = true;
		rn_unlock(&qp->sq_lock);
		/* It may have died in the middle of a push before we ever had a link to it. */
		rn_cq_kick(qp->recv_cq, qp);
	}
	rn_qp_progress(qp);
}

/*
 * A process that was served by our engine has died, wherever it was in our arena. What it had
 * published is there; the wake-up for it may not have been sent.
 */
void rn_peer_died(int pid)
{
	pthread_mutex_lock(&rn_world);
	for (uint32_t i = 0; i < rn_qps_end; i++) {
		struct rn_qp *qp = rn_qps[i];
		struct rn_peer *peer = qp ? qp->peer : NULL;
		int state = peer ? atomic_load(&peer->state) : RN_PEER_CONNECTING;

		if (!peer || state == RN_PEER_CONNECTING || state == RN_PEER_SELF || peer->pid != pid)
			continue;
		rn_cq_kick(qp->recv_cq, qp);
		peer_died(qp);
	}
	rn_qp_pool_process_died(pid);
	rn_cq_recover();
	rn_qp_reap();
	rn_mr_reap();
	pthread_mutex_unlock(&rn_world);
}
