/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting: from the program's work requests to executed ones.
 *
 * The common case has no queue: post_send enters the responder, executes each request of the chain
 * in the caller's thread, completes it, and leaves.  A request goes into the send queue's ring
 * only when it has to wait (the link isn't up, no receive is posted, memory isn't mapped, ...), and
 * then everything behind it does, so order holds.  The engine goes on with the queue (progress.c).
 *
 *     freed          executed                 posted
 *       |---------------|------------------------|          counts modulo 2^32
 *        done, but its    waiting, in the ring
 *        slot not free
 *
 * A long one goes there, too: its copy takes longer than a program's thread should stand still.
 *
 * A slot is free again when a completion of it, or of a later request, was polled: as in
 * hardware, so a program that never asks for completions ends with ENOMEM.
 *
 * Faults on purpose (faults/fault.h) happen to requests in the queue only: with them, nothing is executed before
 * it was queued.
 */
#include <stdlib.h>

#include "base/fence.h"
#include "base/offer.h"
#include "faults/iwarp.h"
#include "objects/mw.h"
#include "requester/requester.h"

/* Longer ones are not executed by the poster.  A READ is waited for in any case; what the engine takes to wake up is
 * little beside the time of its copy.  Callers that send much split it into pieces of this size. */
enum { READ_AT_ONCE = 1 << 20, MOST_AT_ONCE = 4 << 20 };

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

/* What is refused at once; every other error is reported by the completion. */
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

static bool is_long(const struct ibv_send_wr *wr)
{
	return !rn_is_local(wr->opcode) &&
	       total_length(wr) > (wr->opcode == IBV_WR_RDMA_READ ? READ_AT_ONCE : MOST_AT_ONCE);
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
	send->deferred = send->has_begun = false;
	send->plan = (struct rn_plan){0};
	if (unlikely(rn_is_local(wr->opcode))) {
		rn_mw_keep(&send->wr);
	} else if (wr->send_flags & IBV_SEND_INLINE) {
		char *data = (char *)(sge + 1), *to = data;
		bool is_there = true;
		const void *lost;

		for (int i = 0; i < wr->num_sge && is_there; to += wr->sg_list[i++].length)
			is_there = rn_bus_copy(to, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length, &lost);
		*sge = (struct ibv_sge){.addr = (uintptr_t)data, .length = to - data};
		send->wr.num_sge = 1;
		if (unlikely(!is_there))
			send->wr.send_flags &= ~(unsigned)IBV_SEND_INLINE; /* without a key it fails in its turn */
	} else if (wr->num_sge) {
		memcpy(sge, wr->sg_list, wr->num_sge * sizeof(*sge));
	}
	if (unlikely(qp->faults.injector)) {
		rn_fault_plan(&qp->faults, send->wr.opcode, &send->plan);
		send->deferred = send->plan.delay_ns != 0;
		send->due_ns = send->deferred ? rn_now_ns() + send->plan.delay_ns : 0;
	}
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
	if (unlikely(status != IBV_WC_SUCCESS) && (qp->unreliable || rn_qp_last_look(qp)))
		rn_qp_send_failed(qp);
	return true;
}

/* With sq_lock held. Report the first refused request of the chain, and why. */
static int post_locked(struct rn_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	bool entered = false;
	int err = 0;

	for (; wr; wr = wr->next) {
		int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		enum rn_wait wait = RN_WAIT_NOT;

		err = unlikely(state < IBV_QPS_RTS) ? EINVAL : check_send(qp, wr);
		if (unlikely(qp->faults.injector) && !err)
			err = rn_settings.iwarp ? rn_iwarp_check(wr) : 0;
		if (unlikely(qp->faults.injector) && !err)
			err = rn_device_check(qp->context, RN_POST_SEND);
		if (unlikely(err)) {
			*bad_wr = wr;
			break;
		}
		qp->count.send_wrs++;
		if (qp->uses_tcp && state < IBV_QPS_SQE) {
			enqueue(qp, wr);
			continue;
		}
		/* Waiting requests can go on, and the engine is busy with them: help, or it never finishes. */
		if (unlikely(qp->sq_posted != qp->sq_executed && qp->wait == RN_WAIT_NOT)) {
			rn_sq_progress_locked(qp);
			state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		}
		if (unlikely(is_long(wr)) && state < IBV_QPS_SQE) {
			wait = RN_WAIT_TURN;
		} else if (likely(state == IBV_QPS_RTS && qp->sq_posted == qp->sq_executed && !qp->faults.injector)) {
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
				rn_sq_progress_locked(qp); /* it is in the queue: the owner can be asked, and faults can happen */
			else {
				qp->is_polled = false; /* who polled for an earlier one may sleep now */
				rn_sq_wait(qp, wait);
			}
		}
	}
	if (entered)
		rn_leave(qp);
	if (qp->uses_tcp)
		qp->path->progress(qp);
	return err;
}

/*
 * Programs that watch their memory for an answer call nothing that could tell us that they wait (ib_write_lat does);
 * if there are more such than CPUs, each message takes a time slice.  A program that posts rarely, as the scheduler's
 * clock ticks, is one of them or can afford it: it offers its CPU after posting, as long as another process takes it.
 * One that posts without pause sees the clock tick now and then, but never twice running; one that sleeps offers nothing
 * (base/offer.h).
 */
static void posted(void)
{
	enum { IN_A_ROW = 64 };
	static _Thread_local uint64_t last_tick;
	static _Thread_local unsigned ticks, offers;
	uint64_t tick = rn_tick_ns();

	ticks = tick == last_tick ? 0 : ticks + 1;
	last_tick = tick;
	if (ticks >= 2)
		offers = IN_A_ROW;
	if (likely(!offers))
		return;
	offers--;
	if (rn_offer_cpu() != RN_TAKER_OTHERS)
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

/* Our own copy of a list with more than one entry. */
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

/* The receive with this index, as peers see it and as we note it. */
static void fill_slot(struct rn_qp *qp, uint32_t index, const struct ibv_recv_wr *wr)
{
	struct rn_slot *slot = rn_rq_slot(qp, index);
	uint64_t length = 0;
	struct rn_receive_plan plan;

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
	if (unlikely(qp->faults.injector) && (plan = rn_fault_receive(&qp->faults, qp->recv_wrs)).status) {
		/* No peer can use it: its adapter finds it malformed, as ours would. */
		slot->num_sge = UINT16_MAX;
		qp->rq_shadow[index & (qp->rq_size - 1)].num_sge = UINT16_MAX;
		qp->rq_shadow[index & (qp->rq_size - 1)].plan = plan;
	}
	qp->recv_wrs++;
	/* Whatever somebody has written there: the slot is the responder's from the last line on, and not before. */
	atomic_store_explicit(&slot->owner_sequence, index - 1, memory_order_relaxed);
	atomic_store_explicit(&qp->rq_posted, index + 1, memory_order_release);
	atomic_store_explicit(&slot->owner_sequence, index, memory_order_release);
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
		bool is_full;

		is_full = index - atomic_load_explicit(&qp->rq_polled, memory_order_acquire) >= qp->cap.max_recv_wr;
		if (unlikely((uint32_t)wr->num_sge > 1)) /* there is room for two, always */
			err = keep_list(qp, index, wr, is_full);
		else if (unlikely(is_full))
			err = ENOMEM;
		if (unlikely(qp->faults.injector) && !err)
			err = rn_device_check(qp->context, RN_POST_RECV);
		if (unlikely(err))
			break;
		fill_slot(qp, index, wr);
	}
	if (unlikely(err))
		*bad_wr = wr;
	/* rn_qp_fail changes the state, then takes rq_lock: either it flushes these, or we do. */
	flush = unlikely(atomic_load(&qp->state) == IBV_QPS_ERR);
	rn_unlock(&qp->rq_lock);
	if (flush)
		rn_cq_mark_ready(qp->recv_cq, qp);
	return err;
}
