/* SPDX-License-Identifier: Apache-2.0 */
/*
 * To ERR and to RESET: what happens to a queue pair's work, and to whoever is inside it.
 *
 * Both end a life of its block: peers who look afterwards find another word there and go away.  Who is
 * inside already is waited for, but not for long: a peer may be stopped in there.  On the way to ERR
 * its word then counts no more; a reset can't happen until it has left.
 */
#include "ud.h"
#include "ud_wire.h"
#include "qp.h"

void rn_qp_life_store(struct rn_qp *qp, enum ibv_qp_state state)
{
	uint64_t life = (uint64_t)qp->generation << 8 | state;

	atomic_store(&qp->own->life, life);
	atomic_store(&qp->block->life, life);
	rn_fence();
}

/* --- waiting for who is inside ---------------------------------------------------------------------------- */

bool rn_qp_is_inside(struct rn_qp_block *block, struct rn_peer *peer)
{
	return atomic_load(&block->busy) & 1 && !(peer && atomic_load(&peer->state) == RN_PEER_DEAD);
}

static bool wait_for(struct rn_qp *qp, uint64_t deadline_ns, bool moved_will_do)
{
	bool self = qp->peer && atomic_load(&qp->peer->state) == RN_PEER_SELF;
	uint32_t seen = atomic_load(&qp->theirs->busy);

	while (rn_qp_is_inside(qp->theirs, qp->peer)) {
		if (atomic_load_explicit(&qp->peer_gone, memory_order_relaxed) ||
		    (moved_will_do && atomic_load(&qp->theirs->busy) != seen))
			return true;
		/* A thread of this process can't be stopped without us: it will be through soon. */
		if (!self && rn_now_ns() >= deadline_ns)
			return false;
		sched_yield();
	}
	return true;
}

bool rn_qp_wait_idle(struct rn_qp *qp, uint64_t deadline_ns)
{
	return wait_for(qp, deadline_ns, false);
}

bool rn_qp_wait_moved(struct rn_qp *qp, uint64_t deadline_ns)
{
	return wait_for(qp, deadline_ns, true);
}

void rn_qp_reset_words(struct rn_qp_block *block, uint32_t next_receive)
{
	atomic_store(&block->done, next_receive);
	atomic_store(&block->busy, (atomic_load(&block->busy) + 3) & ~1u);
	atomic_store(&block->fault, RN_FAULT_NONE);
	atomic_store(&block->established, 0);
	atomic_store(&block->finished, 0);
}

void rn_qp_reset_peers_words(struct rn_qp *qp, uint32_t next_receive)
{
	rn_qp_reset_words(qp->block, next_receive);
	if (qp->own != qp->block)
		rn_qp_reset_words(qp->own, next_receive);
}

/* --- ERR and RESET --------------------------------------------------------------------------------------------- */

void rn_qp_fail(struct rn_qp *qp)
{
	uint32_t polled, posted;
	int state = atomic_load(&qp->state);

	if (state == IBV_QPS_ERR || state == IBV_QPS_RESET)
		return;
	rn_stream_last_look(qp);
	if (atomic_load(&qp->state) == IBV_QPS_ERR)
		return; /* for that reason, then */
	atomic_store(&qp->state, IBV_QPS_ERR);
	rn_qp_life_store(qp, IBV_QPS_ERR);
	if (rn_qp_wait_idle(qp, rn_now_ns() + RN_IDLE_WAIT_NS))
		rn_qp_pool_recover(qp);
	rn_qp_pool_wait(qp, rn_now_ns() + RN_IDLE_WAIT_NS);
	rn_forget_responder(qp);
	rn_stream_leave(qp);

	/* From here on the peer's word for what is done doesn't count: a stopped one may wake up. */
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
		rn_cq_kick(qp->recv_cq, qp);
	rn_qp_pool_fail(qp);
}

void rn_qp_send_failed(struct rn_qp *qp)
{
	if (!qp->unreliable) {
		rn_qp_fail(qp);
		return;
	}
	/* Nothing of the receiving side is affected. */
	atomic_store(&qp->state, IBV_QPS_SQE);
	rn_qp_life_store(qp, IBV_QPS_SQE);
	rn_sq_flush(qp);
}

int rn_qp_reset(struct rn_qp *qp)
{
	struct rn_peer *peer;

	rn_lock(&qp->sq_lock);
	atomic_store(&qp->state, IBV_QPS_RESET);
	rn_qp_life_store(qp, IBV_QPS_RESET);
	rn_forget_responder(qp);
	rn_unlock(&qp->sq_lock);
	rn_stream_close(qp);
	/* Nothing sets these again in RESET. */
	rn_timer_cancel(&qp->timer);
	rn_task_cancel(&qp->task);
	rn_reply_cancel(&qp->reply);
	if (qp->noticed)
		rn_peer_unsubscribe(&qp->notice);
	qp->noticed = false;
	if (qp->ud && qp->is_heard) {
		rn_ud_wire_close(qp);
		qp->is_heard = false;
	}
	if (!rn_qp_wait_idle(qp, rn_now_ns() + RN_IDLE_WAIT_NS) ||
	    !rn_qp_pool_wait(qp, rn_now_ns() + RN_IDLE_WAIT_NS))
		return EBUSY; /* its words would be written by a peer that slept through the reset */
	rn_qp_pool_discard(qp);
	rn_qp_pool_recover(qp);
	if (qp->ud)
		rn_ud_reset(qp);
	pthread_mutex_lock(&rn_world);
	peer = qp->peer;
	qp->peer = NULL;
	qp->generation = rn_qp_next_generation(qp->index);
	pthread_mutex_unlock(&rn_world);
	if (peer)
		rn_peer_put(peer);

	rn_lock(&qp->sq_lock);
	rn_lock(&qp->rq_lock);
	rn_cq_purge(qp->send_cq, qp);
	rn_cq_purge(qp->recv_cq, qp);
	qp->sq_posted = qp->sq_executed = 0;
	rn_stream_forget(qp);
	atomic_store(&qp->sq_freed, 0);
	qp->wait = RN_WAIT_NOT;
	qp->reply_error = 0;
	qp->waited = qp->reply_pending = qp->link_failed = qp->draining = false;
	/* Counted on: no slot that was posted before can look so afterwards. */
	rn_lock(&qp->recv_cq->lock);
	atomic_store(&qp->rq_polled, qp->rq_posted);
	qp->rq_flushing = false;
	rn_unlock(&qp->recv_cq->lock);
	rn_qp_reset_peers_words(qp, qp->rq_posted);
	qp->established_reported = false;
	atomic_store(&qp->peer_gone, false);
	atomic_store(&qp->peer_left_us, false);
	atomic_store(&qp->own->dest_qpn, 0);
	rn_own_tell_qp(qp->index);
	memset(&qp->attr, 0, sizeof(qp->attr));
	rn_qp_life_store(qp, IBV_QPS_RESET);
	rn_unlock(&qp->rq_lock);
	rn_unlock(&qp->sq_lock);
	return 0;
}
