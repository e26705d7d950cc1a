/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The send queue when it isn't empty: executing what waits in it, and waiting again.
 *
 * The holder of the send lock may go on with the queue; mostly it is the engine, woken by a timer, a notice or a reply.
 * post.c says when a request comes here.
 *
 * Budgets.  The responder's queue pair not there (yet): local ack timeout times retries, then RETRY_EXC_ERR.  No
 * receive posted: the responder's RNR timer, rnr_retry times, 7 meaning for ever, then RNR_RETRY_EXC_ERR.  Each
 * request that succeeds starts both anew.  Until we have met the responder's process there is more time than the
 * program has asked for, because an adapter would answer even while that process is busy or waits for a CPU: at least
 * a second for a host to answer at all, and what SILENCE says for a process whose socket is there.
 *
 * Turns.  A long request would keep whoever posts it, or another of its queue pair, waiting for its copy.  So it is
 * queued at once, and the engine copies it, a turn at a time; in between other tasks have theirs, and whoever waits for
 * the send lock gets it.  A program that polls without pause takes turns, too (objects/cq_poll.c).
 */
#include "objects/mw.h"
#include "requester/requester.h"

enum {
	FIRST_BACKOFF_NS = 20 * 1000,
	LAST_BACKOFF_NS = 5 * 1000 * 1000,
	MIN_TIMEOUT_NS = 4 * 1000 * 1000, /* adapters raise shorter ones as well */
	MIN_LINK_NS = 1000 * 1000 * 1000, /* meeting the host is no part of what the timeout is for */
	AFTER_OTHERS_NS = 20 * 1000,      /* for those that wait for the send lock; doubled while they have not got it, */
	STAND_BACK_MOST = 9,              /* but only so often, which is 10 ms in all: they may be waiting for a CPU */
	AFTER_POLLER_NS = 1000 * 1000,    /* until the engine goes on with what a poller has copied, unless that does */
	BATCH = 16,                       /* requests the engine executes before others have their turn */
};

/* --- waiting -------------------------------------------------------------------------------------------- */

/* How long one try waits for its acknowledgement. */
static uint64_t ack_timeout_ns(const struct rn_qp *qp)
{
	uint64_t timeout = 4096ull << qp->attr.timeout;

	return timeout < MIN_TIMEOUT_NS ? MIN_TIMEOUT_NS : timeout;
}

uint64_t rn_sq_ack_budget_ns(const struct rn_qp *qp)
{
	return ack_timeout_ns(qp) * (qp->attr.retry_cnt + 1);
}

/* The head, or what acknowledges it, was lost. A timeout of 0 has no end. */
static void start_wait_for_nothing(struct rn_qp *qp)
{
	uint64_t timeout = ack_timeout_ns(qp);

	qp->wait = RN_WAIT_LOST;
	qp->waited = false;
	rn_sq_at(qp, qp->sq_executed)->has_begun = true;
	rn_sq_at(qp, qp->sq_executed)->plan.tries++;
	qp->deadline_ns = qp->attr.timeout ? rn_now_ns() + timeout : UINT64_MAX;
	if (qp->attr.timeout)
		rn_timer_set(&qp->timer, timeout);
}

/* Is it time to try again? The last try in vain ends it. */
bool rn_sq_waited_for_nothing(struct rn_qp *qp)
{
	uint64_t now = rn_now_ns();

	if (now < qp->deadline_ns) {
		if (qp->attr.timeout)
			rn_timer_set(&qp->timer, qp->deadline_ns - now);
		return false;
	}
	qp->wait = RN_WAIT_NOT;
	if (rn_sq_at(qp, qp->sq_executed)->plan.tries <= qp->attr.retry_cnt)
		return true;
	rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	return false;
}

/* How long that may take: see Budgets. */
static uint64_t budget_ns(const struct rn_qp *qp, enum rn_wait why)
{
	uint64_t least = qp->uses_tcp ? MIN_LINK_NS : rn_settings.silence_ms * 1000000;
	uint64_t budget = rn_sq_ack_budget_ns(qp);

	return why != RN_WAIT_PEER && budget < least ? least : budget;
}

bool rn_sq_has_waited(const struct rn_qp *qp, enum rn_wait why)
{
	return qp->waited && qp->wait == why && qp->attr.timeout && rn_now_ns() >= qp->deadline_ns;
}

/* The responder has no receive posted. */
static void wait_for_receive(struct rn_qp *qp)
{
	if (unlikely(rn_settings.iwarp)) {
		/* TCP had taken it. */
		rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, IBV_WC_SUCCESS, 0);
		rn_qp_terminate(qp);
		return;
	}
	qp->wait = RN_WAIT_RNR;
	rn_sq_at(qp, qp->sq_executed)->has_begun = true;
	qp->waited = false; /* the responder has answered */
	qp->count.rnr_naks++;
	if (qp->attr.rnr_retry != 7 && qp->rnr_tried++ >= qp->attr.rnr_retry)
		rn_sq_fail_head(qp, IBV_WC_RNR_RETRY_EXC_ERR);
	else
		rn_timer_set(&qp->timer, rn_rnr_delay_ns(qp));
}

/* Look again, less and less often. */
static void back_off(struct rn_qp *qp)
{
	rn_timer_set(&qp->timer, qp->backoff_ns);
	if (qp->backoff_ns < LAST_BACKOFF_NS)
		qp->backoff_ns *= 2;
}

/* The copy goes on soon. It takes as long as it takes: nobody else may touch that memory. */
static void wait_for_copy(struct rn_qp *qp, enum rn_wait why)
{
	bool is_new = qp->wait != why;

	qp->wait = why;
	qp->waited = false;
	if (!atomic_load_explicit(&qp->send_cq->turn_polls, memory_order_relaxed))
		atomic_store_explicit(&qp->send_cq->turn_polls, 1, memory_order_relaxed);
	if (why == RN_WAIT_SHARED) {
		if (is_new)
			qp->backoff_ns = FIRST_BACKOFF_NS;
		back_off(qp);
	} else if (qp->is_polled) {
		rn_timer_set(&qp->timer, AFTER_POLLER_NS);
	} else if (rn_lock_is_wanted(&qp->sq_lock)) {
		rn_timer_set(&qp->timer, AFTER_OTHERS_NS);
	} else {
		rn_task_post(&qp->task);
	}
}

static void wait_until_due(struct rn_qp *qp)
{
	uint64_t now = rn_now_ns(), due_ns = rn_sq_at(qp, qp->sq_executed)->due_ns;

	qp->wait = RN_WAIT_DUE;
	rn_timer_set(&qp->timer, due_ns > now ? due_ns - now : 0);
}

/* A queue pair that is not there yet will be soon. One that was found and went does not come back as the same (rn_enter()):
 * look only so often that the request fails in time, as each look wakes the engine. */
static uint64_t first_backoff_ns(const struct rn_qp *qp, enum rn_wait why)
{
	bool was_there = why == RN_WAIT_PEER && qp->responder.found && !qp->uses_tcp;

	return was_there ? LAST_BACKOFF_NS : FIRST_BACKOFF_NS;
}

/* For what the responder has to do, or to become; this has an end. */
static void wait_for_responder(struct rn_qp *qp, enum rn_wait why)
{
	uint64_t now = rn_now_ns();

	if (!qp->waited || qp->wait != why) {
		qp->waited = true;
		qp->wait = why;
		qp->deadline_ns = now + budget_ns(qp, why);
		qp->backoff_ns = first_backoff_ns(qp, why);
	}
	if (qp->attr.timeout && now >= qp->deadline_ns) {
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
		return;
	}
	switch (why) {
	case RN_WAIT_PEER:
	backoff:
		back_off(qp); /* there is no notice when it comes to life */
		break;
	case RN_WAIT_LINK:
	case RN_WAIT_SEGMENT:
		if (qp->ud) /* it gets no notices of its many peers */
			goto backoff;
		/* A notice comes, unless the peer's engine is stopped. */
		if (qp->attr.timeout)
			rn_timer_set(&qp->timer, qp->deadline_ns - now);
		break;
	default: /* RN_WAIT_OWNER: the answer will come, or notice of its death */
		break;
	}
}

/* The head of the queue can't be executed, for this reason. */
void rn_sq_wait(struct rn_qp *qp, enum rn_wait why)
{
	switch (why) {
	case RN_WAIT_DUE:
		wait_until_due(qp);
		break;
	case RN_WAIT_LOST:
		start_wait_for_nothing(qp);
		break;
	case RN_WAIT_RNR:
		wait_for_receive(qp);
		break;
	case RN_WAIT_TURN:
	case RN_WAIT_SHARED:
		wait_for_copy(qp, why);
		break;
	default:
		wait_for_responder(qp, why);
	}
}

/* --- going on ------------------------------------------------------------------------------------------- */

/* Try the head of the queue once. */
static enum rn_wait try_head(struct rn_qp *qp, struct rn_send *head, bool *entered, enum ibv_wc_status *status,
			     uint32_t *byte_len)
{
	enum rn_wait wait;

	if (unlikely(rn_is_local(head->wr.opcode))) {
		if (*entered)
			rn_leave(qp);
		*entered = false;
		*status = rn_mw_execute(qp, &head->wr);
		return RN_WAIT_NOT;
	}
	if (unlikely(qp->faults.injector)) {
		wait = rn_fault_set_off(&qp->faults, &head->plan, status);
		if (wait != RN_WAIT_NOT && qp->unreliable)
			return RN_WAIT_NOT; /* no one will notice */
		if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
			return wait;
	}
	if (!*entered) {
		wait = rn_enter(qp);
		if (wait != RN_WAIT_NOT)
			return wait;
		*entered = true;
	}
	if (unlikely(qp->faults.injector)) {
		*status = rn_fault_refuse(&qp->faults, &head->plan);
		if (*status != IBV_WC_SUCCESS) {
			rn_responder_leave_fault(&qp->responder, rn_fault_note(*status));
			return RN_WAIT_NOT;
		}
		if (rn_settings.iwarp && rn_qp_is_too_early(qp)) {
			rn_responder_leave_fault(&qp->responder, RN_FAULT_TERMINATED);
			return RN_WAIT_RNR;
		}
		if (rn_fault_finds_no_receive(&qp->faults, &head->plan))
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_RNR;
	}
	if (unlikely(head->plan.is_done)) {
		*byte_len = head->plan.byte_len;
	} else {
		wait = rn_execute(qp, &head->wr, &head->moved, status, byte_len);
		if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
			return wait;
	}
	if (likely(!qp->faults.injector))
		return RN_WAIT_NOT;
	head->plan.byte_len = *byte_len;
	return rn_fault_acknowledge(&qp->faults, &head->plan);
}

void rn_sq_drained(struct rn_qp *qp)
{
	if (likely(!qp->draining) || rn_sq_is_busy(qp))
		return;
	qp->draining = false;
	rn_event_raise(qp->context, IBV_EVENT_SQ_DRAINED, qp);
}

/* Execute what is queued, until it has to wait. With sq_lock held. */
void rn_sq_progress_locked(struct rn_qp *qp)
{
	bool entered = false;
	int batch = 0, state;

	/*
	 * Nobody there who would let us map its memory: perhaps it listens.  But in RESET it is nobody's stream: who
	 * resets it has taken it off the streams' list already, and frees it next.
	 */
	if (unlikely(qp->link_failed && !qp->uses_tcp && rn_settings.transport == RN_TRANSPORT_AUTO) &&
	    atomic_load(&qp->state) != IBV_QPS_RESET)
		qp->path->use(qp);
	if (qp->uses_tcp) {
		qp->path->progress(qp);
		rn_sq_drained(qp);
		return;
	}

	while (qp->sq_executed != qp->sq_posted && !qp->reply_pending) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);
		enum ibv_wc_status status = IBV_WC_SUCCESS;
		uint32_t byte_len = 0;
		enum rn_wait wait;

		state = atomic_load(&qp->state);
		/* While draining, what has begun is finished. */
		if (state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && rn_sq_has_begun(qp)))
			break;
		if (unlikely(qp->wait == RN_WAIT_LOST && !rn_sq_waited_for_nothing(qp)))
			break;
		if (head->deferred && head->due_ns > rn_now_ns()) {
			rn_sq_wait(qp, RN_WAIT_DUE);
			break;
		}
		if (batch++ == BATCH) {
			rn_task_post(&qp->task);
			break;
		}
		wait = try_head(qp, head, &entered, &status, &byte_len);
		if (wait == RN_WAIT_NOT && status == IBV_WC_SUCCESS) {
			rn_sq_complete(qp, &head->wr, status, byte_len);
			continue;
		}
		if (entered)
			rn_leave(qp);
		entered = false;
		if (wait == RN_WAIT_NOT)
			rn_sq_fail_head(qp, status);
		else
			rn_sq_wait(qp, wait);
		break;
	}
	if (entered)
		rn_leave(qp);
	rn_sq_drained(qp);
}

void rn_qp_progress(struct rn_qp *qp)
{
	rn_lock(&qp->sq_lock);
	if (unlikely(qp->wait == RN_WAIT_TURN) && qp->is_polled) {
		qp->is_polled = false;
		rn_timer_set(&qp->timer, AFTER_POLLER_NS);
	} else if (unlikely(qp->wait == RN_WAIT_TURN) && rn_lock_is_wanted(&qp->sq_lock) && qp->stood_back < STAND_BACK_MOST) {
		rn_timer_set(&qp->timer, (uint64_t)AFTER_OTHERS_NS << qp->stood_back++);
	} else {
		qp->stood_back = 0;
		rn_sq_progress_locked(qp);
	}
	rn_unlock(&qp->sq_lock);
}

/* Its queue pair with a long request whose next turn is due, and the send lock of that. NULL: there is none. */
static struct rn_qp *find_turn(struct rn_cq *cq)
{
	bool all_seen = true;

	if (pthread_mutex_trylock(&rn_process_lock))
		return NULL;
	rn_for_each_qp(qp) {
		if (qp->send_cq != cq)
			continue;
		if (!rn_try_lock(&qp->sq_lock)) {
			all_seen = false;
			continue;
		}
		if (qp->wait == RN_WAIT_TURN && qp->sq_executed != qp->sq_posted) {
			pthread_mutex_unlock(&rn_process_lock); /* it stays while its send lock is held */
			return qp;
		}
		all_seen &= qp->wait != RN_WAIT_SHARED;
		rn_unlock(&qp->sq_lock);
	}
	if (all_seen)
		atomic_store_explicit(&cq->turn_polls, 0, memory_order_relaxed);
	pthread_mutex_unlock(&rn_process_lock);
	return NULL;
}

bool rn_cq_take_turn(struct rn_cq *cq)
{
	struct rn_qp *qp = find_turn(cq);

	if (!qp)
		return false;
	qp->is_polled = true;
	rn_sq_progress_locked(qp);
	rn_unlock(&qp->sq_lock);
	return true;
}
