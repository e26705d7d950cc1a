/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting: from the program's work requests to executed ones.
 *
 * The common case has no queue: post_send enters the responder, executes each request of the chain
 * in the caller's thread, completes it, and leaves.  A request goes into the send queue's ring
 * only when it has to wait (the link isn't up, no receive is posted, memory isn't mapped, ...), and
 * then everything behind it does, so order holds.  The engine goes on with the queue.
 *
 *     freed          executed                 posted
 *       |---------------|------------------------|          counts modulo 2^32
 *        done, but its    waiting, in the ring
 *        slot not free
 *
 * A slot is free again when a completion of it, or of a later request, was polled: as in
 * hardware, so whoever never asks for completions ends with ENOMEM.
 *
 * Budgets.  The responder's queue pair not there (yet): local ack timeout times retries, then
 * RETRY_EXC_ERR.  No receive posted: the responder's RNR timer, rnr_retry times, 7 meaning for ever,
 * then RNR_RETRY_EXC_ERR.  Each request that succeeds starts both anew.  Until the responder's process has been met
 * there is more time than the program has thought of, as an adapter answers for a process that is busy or waits for a
 * CPU: at least a second for a host to answer at all, and what SILENCE says for a process whose socket is there.
 *
 * Faults on purpose (chaos.h) happen to requests in the queue only: with them, nothing is executed before
 * it was queued.
 */
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "iwarp.h"
#include "soft.h"

enum {
	FIRST_BACKOFF_NS = 20 * 1000,
	LAST_BACKOFF_NS = 5 * 1000 * 1000,
	MIN_TIMEOUT_NS = 4 * 1000 * 1000, /* adapters raise shorter ones as well */
	MIN_LINK_NS = 1000 * 1000 * 1000, /* meeting the host is no part of what the timeout is for */
	BATCH = 16,                       /* requests the engine executes before others have their turn */
};

static const uint8_t wc_opcodes[] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_SEND] = IBV_WC_SEND,
	[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
	[IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
	[IBV_WR_SEND_WITH_INV] = IBV_WC_SEND,
};

/* --- completing ----------------------------------------------------------------------------------------- */

/* The request at sq_executed is done, one way or the other. */
void rn_sq_complete(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status, uint32_t byte_len)
{
	uint32_t end = ++qp->sq_executed;

	qp->wait = RN_WAIT_NOT;
	qp->waited = false;
	qp->rnr_tried = 0;
	if (!(wr->send_flags & IBV_SEND_SIGNALED) && !qp->sq_sig_all && status == IBV_WC_SUCCESS)
		return;
	rn_cq_push(qp->send_cq, &(struct rn_cqe){
					.wr_id = wr->wr_id,
					.qp = qp,
					.sq_freed = end,
					.byte_len = byte_len,
					.status = status,
					.opcode = wc_opcodes[wr->opcode],
				});
}

void rn_sq_flush(struct rn_qp *qp)
{
	while (qp->sq_executed != qp->sq_posted)
		rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, IBV_WC_WR_FLUSH_ERR, 0);
}

void rn_sq_fail_head(struct rn_qp *qp, enum ibv_wc_status status)
{
	int state = atomic_load(&qp->state);

	if (state >= IBV_QPS_SQE || state == IBV_QPS_RESET)
		return;
	rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, status, 0);
	rn_qp_send_failed(qp);
}

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
	uint64_t least = qp->is_stream ? MIN_LINK_NS : rn_settings.silence_ms * 1000000;
	uint64_t budget = rn_sq_ack_budget_ns(qp);

	return why != RN_WAIT_PEER && budget < least ? least : budget;
}

bool rn_sq_has_waited(const struct rn_qp *qp, enum rn_wait why)
{
	return qp->waited && qp->wait == why && qp->attr.timeout && rn_now_ns() >= qp->deadline_ns;
}

/* The head of the queue can't be executed, for this reason. */
void rn_sq_wait(struct rn_qp *qp, enum rn_wait why)
{
	uint64_t now = rn_now_ns();

	if (why == RN_WAIT_DUE) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);

		qp->wait = why;
		rn_timer_set(&qp->timer, head->due_ns > now ? head->due_ns - now : 0);
		return;
	}
	if (why == RN_WAIT_LOST) {
		start_wait_for_nothing(qp);
		return;
	}
	if (why == RN_WAIT_RNR && unlikely(rn_settings.iwarp)) {
		/* TCP had taken it. */
		rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, IBV_WC_SUCCESS, 0);
		rn_iwarp_terminate(qp);
		return;
	}
	if (why == RN_WAIT_RNR) {
		qp->wait = why;
		qp->waited = false; /* the responder has answered */
		qp->count.rnr_naks++;
		if (qp->attr.rnr_retry != 7 && qp->rnr_tried++ >= qp->attr.rnr_retry)
			rn_sq_fail_head(qp, IBV_WC_RNR_RETRY_EXC_ERR);
		else
			rn_timer_set(&qp->timer, rn_rnr_delay_ns(qp));
		return;
	}
	if (!qp->waited || qp->wait != why) {
		qp->waited = true;
		qp->wait = why;
		qp->deadline_ns = now + budget_ns(qp, why);
		qp->backoff_ns = FIRST_BACKOFF_NS;
	}
	if (qp->attr.timeout && now >= qp->deadline_ns) {
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
		return;
	}
	switch (why) {
	case RN_WAIT_PEER:
	backoff:
		/* Nobody tells us when it comes to life: look again, less and less often. */
		rn_timer_set(&qp->timer, qp->backoff_ns);
		if (qp->backoff_ns < LAST_BACKOFF_NS)
			qp->backoff_ns *= 2;
		break;
	case RN_WAIT_LINK:
	case RN_WAIT_SEGMENT:
		if (qp->ud) /* nobody tells it of its many peers */
			goto backoff;
		/* A notice comes; unless its engine was stopped. */
		if (qp->attr.timeout)
			rn_timer_set(&qp->timer, qp->deadline_ns - now);
		break;
	default: /* RN_WAIT_OWNER: the answer comes, or news of its death */
		break;
	}
}

/* One try of the head of the queue. */
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
	if (unlikely(qp->chaos)) {
		wait = rn_chaos_set_off(qp, head, status);
		if (wait != RN_WAIT_NOT && qp->unreliable)
			return RN_WAIT_NOT; /* nobody will know */
		if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
			return wait;
	}
	if (!*entered) {
		wait = rn_enter(qp);
		if (wait != RN_WAIT_NOT)
			return wait;
		*entered = true;
	}
	if (unlikely(qp->chaos)) {
		*status = rn_chaos_refuse(qp, head);
		if (*status != IBV_WC_SUCCESS)
			return RN_WAIT_NOT;
		if (rn_settings.iwarp && rn_iwarp_is_too_early(qp)) {
			rn_view_leave_fault(&qp->view, RN_FAULT_TERMINATED);
			return RN_WAIT_RNR;
		}
		if (rn_chaos_finds_no_receive(qp, head))
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_RNR;
	}
	if (unlikely(head->plan.is_done)) {
		*byte_len = head->plan.byte_len;
	} else {
		wait = rn_execute(qp, &head->wr, &head->moved, status, byte_len);
		if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
			return wait;
	}
	if (likely(!qp->chaos))
		return RN_WAIT_NOT;
	head->plan.byte_len = *byte_len;
	return rn_chaos_acknowledge(qp, head);
}

void rn_sq_drained(struct rn_qp *qp)
{
	if (likely(!qp->draining) || qp->reply_pending || rn_stream_in_flight(qp))
		return;
	qp->draining = false;
	rn_event_raise(qp->context, IBV_EVENT_SQ_DRAINED, qp);
}

/* Execute what is queued, until it has to wait. With sq_lock held. */
static void progress(struct rn_qp *qp)
{
	bool entered = false;
	int batch = 0, state;

	/*
	 * Nobody there who would let us map its memory: perhaps it listens.  But in RESET it is nobody's stream: who
	 * resets it has taken it off the streams' list already, and frees it next.
	 */
	if (unlikely(qp->link_failed && !qp->is_stream && rn_settings.transport == RN_TRANSPORT_AUTO) &&
	    atomic_load(&qp->state) != IBV_QPS_RESET)
		rn_stream_use(qp);
	if (qp->is_stream) {
		rn_stream_progress(qp);
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
		if (state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && (head->moved || head->plan.is_done)))
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

void rn_sq_progress_locked(struct rn_qp *qp)
{
	progress(qp);
}

void rn_qp_progress(struct rn_qp *qp)
{
	rn_lock(&qp->sq_lock);
	progress(qp);
	rn_unlock(&qp->sq_lock);
}

/* --- posting sends ---------------------------------------------------------------------------------------- */

static uint64_t total_length(const struct ibv_send_wr *wr)
{
	uint64_t total = 0;

	for (int i = 0; i < wr->num_sge; i++)
		total += wr->sg_list[i].length;
	return total;
}

/* What may be sent on other than RC. */
static bool has_operation(enum ibv_qp_type type, enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return type != IBV_QPT_XRC_RECV;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
	case IBV_WR_BIND_MW:
		return type == IBV_QPT_UC || type == IBV_QPT_XRC_SEND;
	default:
		return type == IBV_QPT_XRC_SEND;
	}
}

/* What is refused at once; everything else is the completion's to say. */
static int check_send(const struct rn_qp *qp, const struct ibv_send_wr *wr)
{
	if (unlikely(qp->sq_posted - atomic_load_explicit(&qp->sq_freed, memory_order_acquire) >= qp->cap.max_send_wr))
		return ENOMEM;
	if (unlikely(qp->ex.qp_base.qp_type != IBV_QPT_RC && !has_operation(qp->ex.qp_base.qp_type, wr->opcode)))
		return EINVAL;
	if (unlikely((unsigned)wr->opcode > IBV_WR_SEND_WITH_INV))
		return wr->opcode <= IBV_WR_ATOMIC_WRITE ? EOPNOTSUPP : EINVAL;
	if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge))
		return EINVAL;
	if (wr->send_flags & IBV_SEND_INLINE &&
	    (rn_fetches(wr->opcode) || total_length(wr) > qp->cap.max_inline_data))
		return EINVAL;
	return 0;
}

/* Keep a copy: the program's request, list and inline data are its own again when post returns. */
static void enqueue(struct rn_qp *qp, const struct ibv_send_wr *wr)
{
	struct rn_send *send = rn_sq_at(qp, qp->sq_posted++);
	struct ibv_sge *sge = (struct ibv_sge *)send->tail;

	send->wr = *wr;
	send->wr.next = NULL;
	send->wr.sg_list = sge;
	send->moved = 0;
	send->deferred = false;
	send->plan = (struct rn_plan){0};
	if (wr->send_flags & IBV_SEND_INLINE) {
		char *data = (char *)(sge + 1), *to = data;

		for (int i = 0; i < wr->num_sge; i++) {
			memcpy(to, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			to += wr->sg_list[i].length;
		}
		*sge = (struct ibv_sge){.addr = (uintptr_t)data, .length = to - data};
		send->wr.num_sge = 1;
	} else if (unlikely(rn_is_local(wr->opcode))) {
		rn_mw_keep(&send->wr);
	} else if (wr->num_sge) {
		memcpy(sge, wr->sg_list, wr->num_sge * sizeof(*sge));
	}
	if (unlikely(qp->chaos))
		rn_chaos_plan(qp, send);
	if (send->deferred)
		qp->count.deferred++;
	else
		qp->count.queued++;
}

/* Execute now. False: it has to wait, in the queue. */
static bool execute_now(struct rn_qp *qp, const struct ibv_send_wr *wr, bool *entered, enum rn_wait *wait)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	uint32_t byte_len;

	if (unlikely(rn_is_local(wr->opcode))) {
		if (*entered)
			rn_leave(qp);
		*entered = false;
		status = rn_mw_execute(qp, wr);
		byte_len = 0;
		goto executed;
	}
	if (!*entered) {
		*wait = rn_enter(qp);
		if (unlikely(*wait != RN_WAIT_NOT))
			return false;
		*entered = true;
	}
	*wait = rn_execute(qp, wr, NULL, &status, &byte_len);
	if (unlikely(*wait != RN_WAIT_NOT || status != IBV_WC_SUCCESS)) {
		rn_leave(qp);
		*entered = false;
		if (*wait != RN_WAIT_NOT)
			return false;
	}
executed:
	qp->sq_posted++;
	rn_sq_complete(qp, wr, status, byte_len);
	if (unlikely(status != IBV_WC_SUCCESS))
		rn_qp_send_failed(qp);
	return true;
}

/* With sq_lock held. The rest of the chain from the one that was refused on, and why. */
static int post_locked(struct rn_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	bool entered = false;
	int err = 0;

	for (; wr; wr = wr->next) {
		int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		enum rn_wait wait = RN_WAIT_NOT;

		err = unlikely(state < IBV_QPS_RTS) ? EINVAL : check_send(qp, wr);
		if (unlikely(qp->chaos) && !err)
			err = rn_settings.iwarp ? rn_iwarp_check(wr) : 0;
		if (unlikely(qp->chaos) && !err)
			err = rn_chaos_call(qp->context, RN_POST_SEND);
		if (unlikely(err)) {
			*bad_wr = wr;
			break;
		}
		qp->count.send_wrs++;
		if (qp->is_stream && state != IBV_QPS_ERR) {
			enqueue(qp, wr);
			continue;
		}
		/* What waited can go on, and the engine is busy with it: help, or it never gets through. */
		if (unlikely(qp->sq_posted != qp->sq_executed && qp->wait == RN_WAIT_NOT)) {
			progress(qp);
			state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		}
		if (likely(state == IBV_QPS_RTS && qp->sq_posted == qp->sq_executed && !qp->chaos)) {
			if (likely(execute_now(qp, wr, &entered, &wait)))
				continue;
		} else if (state >= IBV_QPS_SQE) {
			qp->sq_posted++;
			rn_sq_complete(qp, wr, IBV_WC_WR_FLUSH_ERR, 0);
			continue;
		}
		enqueue(qp, wr);
		if (state == IBV_QPS_RTS && qp->sq_posted - qp->sq_executed == 1) {
			if (wait == RN_WAIT_OWNER || wait == RN_WAIT_NOT)
				progress(qp); /* it is in the queue: the owner can be asked, chaos have its way */
			else
				rn_sq_wait(qp, wait);
		}
	}
	if (entered)
		rn_leave(qp);
	if (qp->is_stream)
		rn_stream_progress(qp);
	return err;
}

/*
 * Programs that watch their memory for an answer call nothing that could tell us that they wait (ib_write_lat does);
 * if there are more such than CPUs, each message takes a time slice.  Who posts rarely, as the scheduler's clock
 * ticks, is one of them or can afford it: he offers his CPU after posting, as long as somebody takes it.  Who posts
 * without pause sees the clock tick now and then, but never twice running.
 */
static void posted(void)
{
	enum { IN_A_ROW = 64, NOBODY_NS = 1500 };
	static _Thread_local uint64_t last_tick;
	static _Thread_local unsigned ticks, offers;
	struct timespec now;
	uint64_t tick, began;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	tick = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
	ticks = tick == last_tick ? 0 : ticks + 1;
	last_tick = tick;
	if (ticks >= 2)
		offers = IN_A_ROW;
	if (likely(!offers))
		return;
	offers--;
	began = rn_now_ns();
	sched_yield();
	if (rn_now_ns() - began < NOBODY_NS)
		offers = 0;
}

int rn_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	struct rn_qp *qp = rn_qp(base);
	int err;

	if (unlikely(rn_is_foreign(base->context))) {
		*bad_wr = wr;
		return ENODEV;
	}
	rn_lock(&qp->sq_lock);
	err = post_locked(qp, wr, bad_wr);
	rn_unlock(&qp->sq_lock);
	posted();
	return err;
}

int rn_post_chain(struct rn_qp *qp, struct ibv_send_wr *first, uint32_t count)
{
	struct ibv_send_wr *bad_wr;
	int err = 0;

	if (unlikely(rn_is_foreign(qp->ex.qp_base.context)))
		return ENODEV;
	rn_lock(&qp->sq_lock);
	if (atomic_load_explicit(&qp->state, memory_order_relaxed) < IBV_QPS_RTS)
		err = EINVAL;
	else if (qp->cap.max_send_wr - (qp->sq_posted - atomic_load_explicit(&qp->sq_freed, memory_order_acquire)) < count)
		err = ENOMEM;
	for (struct ibv_send_wr *wr = first; wr && !err; wr = wr->next)
		err = check_send(qp, wr);
	if (!err)
		err = post_locked(qp, first, &bad_wr);
	rn_unlock(&qp->sq_lock);
	posted();
	return err;
}

/* --- posting receives --------------------------------------------------------------------------------------- */

/* Our own note of a list that is longer than one. */
static int keep_list(struct rn_qp *qp, uint32_t index, const struct ibv_recv_wr *wr, bool is_full)
{
	uint32_t max_sge = qp->cap.max_recv_sge;
	struct rn_slot_sge *list;

	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > max_sge)
		return EINVAL;
	if (!qp->rq_lists) /* most never need it */
		qp->rq_lists = calloc((size_t)qp->rq_size * max_sge, sizeof(*qp->rq_lists));
	if (is_full || !qp->rq_lists)
		return ENOMEM;
	list = qp->rq_lists + (uint64_t)(index & (qp->rq_size - 1)) * max_sge;
	for (int i = 0; i < wr->num_sge; i++)
		list[i] = (struct rn_slot_sge){
			.addr = wr->sg_list[i].addr, .length = wr->sg_list[i].length, .lkey = wr->sg_list[i].lkey};
	return 0;
}

int rn_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct rn_qp *qp = rn_qp(base);
	bool flush;
	int err = 0;

	if (unlikely(rn_is_foreign(base->context))) {
		*bad_wr = wr;
		return ENODEV;
	}
	rn_order_by_peer();
	if (unlikely(qp->pool))
		return rn_qp_pool_post(qp, wr, bad_wr);
	rn_lock(&qp->rq_lock);
	if (unlikely(atomic_load_explicit(&qp->state, memory_order_acquire) == IBV_QPS_RESET))
		err = EINVAL;
	for (; wr && !err; wr = wr->next) {
		uint32_t index = atomic_load_explicit(&qp->rq_posted, memory_order_relaxed);
		struct rn_slot *slot;
		uint64_t length = 0;
		uint8_t fails;
		bool is_full;

		is_full = index - atomic_load_explicit(&qp->rq_polled, memory_order_acquire) >= qp->cap.max_recv_wr;
		if (unlikely((uint32_t)wr->num_sge > 1)) /* there is room for two, always */
			err = keep_list(qp, index, wr, is_full);
		else if (unlikely(is_full))
			err = ENOMEM;
		if (unlikely(qp->chaos) && !err)
			err = rn_chaos_call(qp->context, RN_POST_RECV);
		if (unlikely(err))
			break;
		slot = rn_rq_slot(qp, index);
		slot->num_sge = wr->num_sge;
		for (int i = 0; i < wr->num_sge; i++) {
			slot->sge[i] = (struct rn_slot_sge){
				.addr = wr->sg_list[i].addr,
				.length = wr->sg_list[i].length,
				.lkey = wr->sg_list[i].lkey,
			};
			length += wr->sg_list[i].length;
		}
		qp->rq_shadow[index & (qp->rq_size - 1)] = (struct rn_shadow){
			.wr_id = wr->wr_id,
			.length = length < RN_MAX_MESSAGE ? length : RN_MAX_MESSAGE,
			.lkey = wr->num_sge == 1 ? wr->sg_list[0].lkey : 0,
			.addr = wr->num_sge == 1 ? wr->sg_list[0].addr : 0,
			.num_sge = wr->num_sge,
		};
		if (unlikely(qp->chaos) && (fails = rn_chaos_receive(qp))) {
			/* No peer can use it: its adapter finds it malformed, as ours would. */
			slot->num_sge = UINT16_MAX;
			qp->rq_shadow[index & (qp->rq_size - 1)].num_sge = UINT16_MAX;
			qp->rq_shadow[index & (qp->rq_size - 1)].fails = fails;
		}
		qp->recv_wrs++;
		atomic_store_explicit(&qp->rq_posted, index + 1, memory_order_release);
		atomic_store_explicit(&slot->turn, index, memory_order_release);
	}
	if (unlikely(err))
		*bad_wr = wr;
	/* rn_qp_fail changes the state, then takes rq_lock: either it flushes these, or we do. */
	flush = unlikely(atomic_load(&qp->state) == IBV_QPS_ERR);
	rn_unlock(&qp->rq_lock);
	if (flush)
		rn_cq_kick(qp->recv_cq, qp);
	return err;
}
