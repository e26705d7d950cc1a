/* SPDX-License-Identifier: Apache-2.0 */
/*
 * To ERR and to RESET: what happens to a queue pair's work, and to a peer that is inside.
 *
 * Both change `generation_state` in its block, and peers that look afterwards leave.  We wait for a peer that is inside
 * already, but not for long, because it may be stopped in there.  After that, on the way to ERR, what it writes is
 * ignored; a reset fails until it has left.
 */
#include "base/fence.h"
#include "objects/qp_inside.h"
#include "objects/sq.h"

/* --- ERR and RESET --------------------------------------------------------------------------------------------- */

bool rn_qp_last_look(struct rn_qp *qp)
{
	if (qp->path->last_look)
		qp->path->last_look(qp);
	return atomic_load(&qp->state) != IBV_QPS_ERR;
}

static void become_err(struct rn_qp *qp)
{
	uint32_t polled, posted;

	qp->draining = false;
	atomic_store(&qp->state, IBV_QPS_ERR);
	rn_qp_tell_state(qp, IBV_QPS_ERR);
	if (rn_qp_wait_idle(qp, rn_now_ns() + RN_IDLE_WAIT_NS))
		rn_qp_pool_recover(qp);
	rn_qp_pool_wait(qp, rn_now_ns() + RN_IDLE_WAIT_NS);
	rn_requester->forget_responder(qp);
	if (qp->path->leave)
		qp->path->leave(qp);

	/* From here on ignore what the peer says is done: a stopped one may wake up. */
	rn_lock(&qp->rq_lock);
	rn_lock(&qp->recv_cq->lock);
	polled = atomic_load(&qp->rq_polled);
	posted = atomic_load(&qp->rq_posted);
	qp->rq_frozen = polled;
	while (qp->rq_frozen != posted && rn_rq_is_done(qp, qp->rq_frozen))
		qp->rq_frozen++;
	qp->rq_flushing = true;
	rn_unlock(&qp->recv_cq->lock);
	rn_unlock(&qp->rq_lock);

	rn_sq_flush(qp);
	if (posted != polled)
		rn_cq_mark_ready(qp->recv_cq, qp);
	rn_qp_pool_fail(qp);
}

void rn_qp_fail(struct rn_qp *qp)
{
	int state = atomic_load(&qp->state);

	if (state != IBV_QPS_ERR && state != IBV_QPS_RESET && rn_qp_last_look(qp))
		become_err(qp);
}

void rn_qp_send_failed(struct rn_qp *qp)
{
	if (!qp->unreliable) {
		become_err(qp);
		return;
	}
	/* Nothing of the receiving side is affected. */
	qp->draining = false;
	atomic_store(&qp->state, IBV_QPS_SQE);
	rn_qp_tell_state(qp, IBV_QPS_SQE);
	rn_sq_flush(qp);
}

void rn_sq_fail_head(struct rn_qp *qp, enum ibv_wc_status status)
{
	int state = atomic_load(&qp->state);

	if (state >= IBV_QPS_SQE || state == IBV_QPS_RESET)
		return;
	rn_share_stop(&qp->responder);
	/* Now, not later: behind a request that has failed none succeeds. */
	if (!qp->unreliable && !rn_qp_last_look(qp))
		return;
	if (qp->sq_executed != qp->sq_posted) /* else that has answered it */
		rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, status, 0);
	rn_qp_send_failed(qp);
}

/* Nothing sets these again in RESET. Returns EBUSY for a peer that sleeps: it would write its words when it wakes up. */
static int part_from_peer(struct rn_qp *qp)
{
	struct rn_peer *peer;

	qp->path->close(qp);
	rn_timer_cancel(&qp->timer);
	rn_task_cancel(&qp->task);
	rn_reply_cancel(&qp->reply);
	rn_reply_cancel(&qp->responder.share.reply);
	/* An engine that saw the state before may be about to post this task: it has the lock until it has done so. */
	pthread_mutex_lock(&rn_process_lock);
	pthread_mutex_unlock(&rn_process_lock);
	rn_task_cancel(&qp->help.task);
	if (qp->noticed)
		rn_peer_unsubscribe(&qp->notice);
	qp->noticed = false;
	if (!rn_qp_wait_idle(qp, rn_now_ns() + RN_IDLE_WAIT_NS) ||
	    !rn_qp_pool_wait(qp, rn_now_ns() + RN_IDLE_WAIT_NS))
		return EBUSY;
	rn_qp_pool_discard(qp);
	rn_qp_pool_recover(qp);
	if (qp->path->clear)
		qp->path->clear(qp);
	pthread_mutex_lock(&rn_process_lock);
	peer = qp->peer;
	qp->peer = NULL;
	qp->generation = rn_qp_next_generation(qp->index);
	pthread_mutex_unlock(&rn_process_lock);
	if (peer)
		rn_peer_put(peer);
	return 0;
}

/* Under both queues' locks. */
static void empty_the_queues(struct rn_qp *qp)
{
	rn_cq_purge(qp->send_cq, qp);
	rn_cq_purge(qp->recv_cq, qp);
	qp->sq_posted = qp->sq_executed = 0;
	if (qp->path->forget)
		qp->path->forget(qp);
	atomic_store(&qp->sq_freed, 0);
	qp->wait = RN_WAIT_NOT;
	qp->reply_error = 0;
	qp->rnr_tried = 0;
	qp->waited = qp->reply_pending = qp->link_failed = qp->draining = false;
	qp->responder.share.is_asked = qp->responder.share.is_declined = false;
	/* The counter goes on, so no slot that was posted before can look valid afterwards. */
	rn_lock(&qp->recv_cq->lock);
	atomic_store(&qp->rq_polled, qp->rq_posted);
	qp->rq_flushing = false;
	rn_unlock(&qp->recv_cq->lock);
}

int rn_qp_reset(struct rn_qp *qp)
{
	int err;

	rn_lock(&qp->sq_lock);
	atomic_store(&qp->state, IBV_QPS_RESET);
	rn_qp_tell_state(qp, IBV_QPS_RESET);
	rn_requester->forget_responder(qp);
	rn_unlock(&qp->sq_lock);
	err = part_from_peer(qp);
	if (err)
		return err;

	rn_lock(&qp->sq_lock);
	rn_lock(&qp->rq_lock);
	empty_the_queues(qp);
	rn_qp_reset_peers_words(qp, qp->rq_posted);
	qp->established_reported = false;
	atomic_store(&qp->peer_gone, false);
	atomic_store(&qp->peer_left_us, false);
	atomic_store(&qp->own->dest_qpn, 0);
	rn_own_tell_qp(qp->index);
	memset(&qp->attr, 0, sizeof(qp->attr));
	rn_qp_tell_state(qp, IBV_QPS_RESET);
	rn_unlock(&qp->rq_lock);
	rn_unlock(&qp->sq_lock);
	return 0;
}

/* --- faults, and iWARP's rules ---------------------------------------------------------------------------- */

void rn_qp_terminate(struct rn_qp *qp)
{
	int state = atomic_load(&qp->state);

	if (state == IBV_QPS_ERR || state == IBV_QPS_RESET)
		return;
	rn_event_raise(qp->context, IBV_EVENT_QP_FATAL, qp);
	rn_qp_fail(qp);
	atomic_store(&qp->iwarp.is_terminated, true);
	rn_task_post(&qp->task);
}

bool rn_qp_is_too_early(struct rn_qp *qp)
{
	/* A peer that enters leaves a mark in the block, whatever its request. */
	if (qp->iwarp.is_passive && (atomic_load(&qp->theirs->busy) != qp->iwarp.busy_before ||
			       atomic_load(&qp->theirs->done) != qp->iwarp.done_before ||
			       (qp->path->has_heard && qp->path->has_heard(qp))))
		qp->iwarp.is_passive = false;
	return qp->iwarp.is_passive;
}

void rn_qp_plug(struct rn_qp *qp, bool is_down)
{
	uint32_t from = is_down ? RN_FAULT_NONE : RN_FAULT_UNPLUGGED;

	atomic_compare_exchange_strong(&qp->theirs->fault, &from, is_down ? RN_FAULT_UNPLUGGED : RN_FAULT_NONE);
}

void rn_qp_take_faults(struct rn_qp *qp)
{
	struct rn_injector *injector = &qp->context->injector;

	rn_lock(&qp->sq_lock);
	rn_lock(&qp->rq_lock);
	qp->faults = (struct rn_qp_faults){
		.injector = injector->faults.is_set || rn_settings.iwarp ? injector : NULL,
		.count = &qp->count,
		.unreliable = qp->unreliable,
		.number = ++injector->qps,
		.failed = qp->faults.failed,
	};
	rn_unlock(&qp->rq_lock);
	rn_unlock(&qp->sq_lock);
}
