/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Polling: the sends that have finished, from the CQ's ring, and the receives, from where peers have completed them.
 *
 * A poll takes both in turns, and receives from one queue pair after another, so that none of them starves.  A peer has
 * written what is read of a receive: everything is checked.
 */
#include "base/fence.h"
#include "base/guard.h"
#include "base/offer.h"
#include "objects/eager.h"
#include "objects/cq_inside.h"
#include "objects/mw.h"
#include "objects/own_look.h"

/* Turn the bits that peers have set into the list. Summary first: see shm/arena.h. */
static void collect_ready(struct rn_cq *cq)
{
	struct rn_cq_block *block = cq->block;
	uint64_t summary, word;

	if (likely(!atomic_load(&block->summary)))
		return;
	for (summary = atomic_exchange(&block->summary, 0); summary; summary &= summary - 1) {
		unsigned at = __builtin_ctzll(summary);

		for (word = atomic_exchange(&block->dirty[at], 0); word; word &= word - 1) {
			struct rn_qp *qp = cq->attached[at * 64 + __builtin_ctzll(word)];

			if (qp)
				rn_cq_make_ready(cq, qp);
		}
	}
}

static int poll_sends(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = 0;

	while (count < entries && cq->head != cq->tail) {
		struct rn_cqe *cqe = &cq->ring[cq->head & (cq->size - 1)];
		struct rn_qp *qp = cqe->qp;

		if (unlikely(cq->stamps))
			cq->stamp = cq->stamps[cq->head & (cq->size - 1)];
		cq->head++;
		wc[count++] = (struct ibv_wc){
			.wr_id = cqe->wr_id,
			.status = cqe->status,
			.opcode = cqe->opcode,
			.vendor_err = cqe->vendor_err,
			.byte_len = cqe->byte_len,
			.qp_num = qp->ex.qp_base.qp_num,
		};
		qp->completions++;
		/* Only now are its slot, and those of the unsignaled sends before it, free. */
		atomic_store_explicit(&qp->sq_freed, cqe->sq_freed, memory_order_release);
	}
	/* Start at the front again, so that a large ring that is never full stays within a few cache lines. */
	if (cq->head == cq->tail)
		cq->head = cq->tail = 0;
	return count;
}

/* This receive fails: if the peer knows, it has left a note; we go to ERR anyway. */
static void fail_receive(struct rn_qp *qp)
{
	uint32_t none = RN_FAULT_NONE;

	if (atomic_compare_exchange_strong(&qp->theirs->fault, &none, RN_FAULT_LOCAL))
		rn_channel_signal(RN_CHANNEL_WAKEUP);
}

/* Fault injection fails it: the peer mostly knows. */
static enum ibv_wc_status fail_on_purpose(struct rn_qp *qp, const struct rn_shadow *shadow)
{
	qp->faults.failed++;
	rn_fault_received(&qp->context->injector, &shadow->plan);
	fail_receive(qp);
	return shadow->plan.status;
}

/* For the tests' control: what was received looks like a SEND, whatever it was. */
static void forget_what_it_was(struct ibv_wc *wc)
{
	wc->opcode = IBV_WC_RECV;
	wc->wc_flags &= ~(IBV_WC_WITH_IMM | IBV_WC_WITH_INV);
}

/* One completed receive. The peer has written the slot: everything in it is checked. */
static void read_slot(struct rn_qp *qp, uint32_t index, struct ibv_wc *wc)
{
	const struct rn_shadow *shadow = &qp->rq_shadow[index & (qp->rq_size - 1)];
	const struct rn_slot *slot = rn_rq_slot(qp, index);
	uint8_t status = READ_ONCE(slot->status), opcode = READ_ONCE(slot->opcode);
	uint32_t length = READ_ONCE(slot->byte_len);
	uint8_t flags = READ_ONCE(slot->wc_flags);

	if (opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		opcode = IBV_WC_RECV;
		if (unlikely(length > shadow->length))
			length = shadow->length;
	}
	if (flags & RN_SLOT_EAGER && unlikely(shadow->lost || !rn_eager_take(qp, index, length))) {
		status = IBV_WC_LOC_PROT_ERR; /* of which the sender learns by our state only */
		fail_receive(qp);
	}
	*wc = (struct ibv_wc){
		.wr_id = shadow->wr_id,
		.status = unlikely(shadow->plan.status) ? fail_on_purpose(qp, shadow)
			  : status <= IBV_WC_GENERAL_ERR  ? status
							  : IBV_WC_GENERAL_ERR,
		.opcode = opcode,
		.vendor_err = READ_ONCE(slot->vendor_err),
		.byte_len = length,
		.imm_data = READ_ONCE(slot->imm_data),
		.qp_num = qp->ex.qp_base.qp_num,
		.src_qp = qp->attr.dest_qp_num,
		.wc_flags = flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV),
	};
	if (unlikely(wc->wc_flags & IBV_WC_WITH_INV))
		rn_mw_settle(wc->invalidated_rkey);
	if (!rn_guarded(RN_GUARD_RECV_OPCODE))
		forget_what_it_was(wc);
}

/* A receive from a poll source belongs to the queue pair that it came to. */
static uint32_t number_of(const struct rn_arrival *arrival)
{
	return arrival->destination < RN_QPS_MAX ? atomic_load(&rn_own_qp(arrival->destination)->qpn) : 0;
}

/*
 * Ethernet has no service level. There adapters (mlx5) use this field to say which header precedes a datagram, and
 * programs (UCX) read it: bit 3, UDP, as with RoCE v2; the other bits, 1 for IPv6, 2 for IPv4.
 */
static uint8_t service_level(uint8_t flags)
{
	enum { UDP = 8, IPV6 = 1, IPV4 = 2 };

	return !(flags & IBV_WC_GRH) || rn_settings.infiniband ? 0 : UDP | (flags & RN_SLOT_IPV4 ? IPV4 : IPV6);
}

/* Receives that came from a pool. */
static int poll_pool(struct rn_qp *qp, int entries, struct ibv_wc *wc)
{
	struct rn_arrival arrival;
	int count = 0;

	for (; count < entries && rn_pool_next(qp->pool, &qp->arrivals, &arrival); count++) {
		wc[count] = (struct ibv_wc){
			.wr_id = arrival.wr_id,
			.status = arrival.status,
			.opcode = arrival.opcode,
			.vendor_err = arrival.vendor_err,
			.byte_len = arrival.byte_len,
			.imm_data = arrival.imm_data,
			.qp_num = qp->xrc.is_poll_source ? number_of(&arrival) : qp->ex.qp_base.qp_num,
			.src_qp = qp->ud || qp->xrc.is_poll_source ? arrival.source_qpn : qp->attr.dest_qp_num,
			.wc_flags = arrival.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV | IBV_WC_GRH),
			.sl = service_level(arrival.wc_flags),
		};
		if (unlikely(wc[count].wc_flags & IBV_WC_WITH_INV))
			rn_mw_settle(wc[count].invalidated_rkey);
		if (!rn_guarded(RN_GUARD_RECV_OPCODE))
			forget_what_it_was(&wc[count]);
	}
	qp->completions += count;
	return count;
}

static int poll_receives(struct rn_cq *cq, struct rn_qp *qp, int entries, struct ibv_wc *wc)
{
	uint32_t polled = atomic_load_explicit(&qp->rq_polled, memory_order_relaxed);
	uint32_t posted = atomic_load_explicit(&qp->rq_posted, memory_order_acquire);
	uint32_t end = qp->rq_flushing ? qp->rq_frozen : posted;
	int count = 0;

	if (unlikely(cq->stamps))
		cq->stamp = rn_now_ns(); /* for flushed receives, and those from a pool */
	if (unlikely(qp->pool))
		return poll_pool(qp, entries, wc);
	for (; count < entries && polled != end && rn_rq_is_done(qp, polled); polled++) {
		if (unlikely(cq->stamps))
			cq->stamp = atomic_load(rn_slot_stamp(rn_rq_slot(qp, polled), qp->rq_stride));
		read_slot(qp, polled, &wc[count++]);
	}
	if (unlikely(qp->rq_flushing)) {
		for (; count < entries && polled != posted; polled++) {
			wc[count++] = (struct ibv_wc){
				.wr_id = qp->rq_shadow[polled & (qp->rq_size - 1)].wr_id,
				.status = IBV_WC_WR_FLUSH_ERR,
				.opcode = IBV_WC_RECV,
				.qp_num = qp->ex.qp_base.qp_num,
			};
		}
	}
	qp->completions += count;
	atomic_store_explicit(&qp->rq_polled, polled, memory_order_release);
	return count;
}

static int poll_ready(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = 0;

	collect_ready(cq);
	while (count < entries && cq->ready) {
		struct rn_qp *qp = cq->ready;
		int got = poll_receives(cq, qp, entries - count, wc + count);

		cq->ready = qp->next_ready;
		if (!cq->ready)
			cq->ready_tail = &cq->ready;
		qp->is_ready = false;
		count += got;
		/* It has more, but it is the turn of the next. */
		if (count == entries && rn_cq_has_receives(qp))
			rn_cq_make_ready(cq, qp);
	}
	return count;
}

/*
 * Programs that poll in a loop: the peer whose work they wait for may be waiting for this CPU.  Yielding costs as
 * much as a message, so it is done less and less often while nobody takes the CPU, and rarely after another thread of
 * this process did (base/offer.h).  True: somebody ran, and what completed meanwhile must be polled before the program
 * looks elsewhere: libfabric's rxm, after an empty poll, reads that a connection has ended and drops what arrived in
 * between.
 */
static bool offered_cpu(void)
{
	enum { LEAST = 32, MOST = 2048, RARE = 65536 }; /* RARE: a few milliseconds of polls */
	static _Thread_local unsigned in_vain, patience = LEAST;

	if (likely(++in_vain < patience))
		return false;
	in_vain = 0;
	switch (rn_offer_cpu()) {
	case RN_TAKER_OTHERS:
		patience = LEAST;
		return true;
	case RN_TAKER_OURSELVES:
		patience = RARE;
		return true;
	default:
		patience = patience < MOST ? patience * 2 : MOST;
		return false;
	}
}

/*
 * A long request is copied by the engine, in turns.  A program that polls for it keeps a CPU from the engine, or the
 * engine waits for one that others have.  So the poller takes turns as well.  One that sleeps until there is an event
 * does not come here: it polls a few times only, and then arms the queue.
 */
static bool took_turn(struct rn_cq *cq)
{
	enum { PATIENCE = 64 };
	uint32_t polls = atomic_load_explicit(&cq->turn_polls, memory_order_relaxed);

	if (likely(!polls))
		return false;
	if (polls < PATIENCE) {
		atomic_store_explicit(&cq->turn_polls, polls + 1, memory_order_relaxed);
		return false;
	}
	return rn_requester->take_turn(cq);
}

/* Fault injection overruns the queue at one of these: it and all later ones are lost. With the lock held. */
static int lose_one(struct rn_cq *cq, int count)
{
	int left = rn_fault_overrun(&rn_context(cq->cq.context)->injector, count);

	if (left == count)
		return count;
	cq->overrun = true;
	rn_cq_report_overrun(cq);
	return left ? left : -EIO;
}

/* Take as many as there are, sends and receives in turns; or -errno. */
static int poll_all(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count;

	rn_lock(&cq->lock);
	if (unlikely(cq->overrun)) {
		rn_unlock(&cq->lock);
		return -EIO;
	}
	cq->sends_first = !cq->sends_first;
	if (cq->sends_first) {
		count = poll_sends(cq, entries, wc);
		count += poll_ready(cq, entries - count, wc + count);
	} else {
		count = poll_ready(cq, entries, wc);
		count += poll_sends(cq, entries - count, wc + count);
	}
	if (unlikely(atomic_load_explicit(&rn_context(cq->cq.context)->injector.may_overrun, memory_order_relaxed)))
		count = lose_one(cq, count);
	if (unlikely(rn_settings.lenient) && count && cq->cq.channel)
		rn_cq_take_event_back(cq);
	rn_unlock(&cq->lock);
	return count;
}

static int poll_or_look(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = poll_all(cq, entries, wc);

	if (!count && unlikely(atomic_load_explicit(&cq->num_tcp, memory_order_acquire)) &&
	    atomic_load_explicit(&cq->source, memory_order_relaxed)->poll(cq))
		count = poll_all(cq, entries, wc);
	if (!count && (took_turn(cq) || offered_cpu()))
		count = poll_all(cq, entries, wc);
	if (count) {
		rn_order_by_peer();
		rn_own_moves();
	}
	return count;
}

int rn_cq_poll(struct ibv_cq *ibv_cq, int entries, struct ibv_wc *wc)
{
	if (unlikely(rn_is_foreign(ibv_cq->context)))
		return -ENODEV;
	if (unlikely(entries <= 0))
		return entries < 0 ? -EINVAL : 0;
	return poll_or_look(rn_cq(ibv_cq), entries, wc);
}

int rn_cq_take(struct rn_cq *cq, struct ibv_wc *wc, uint64_t *stamp)
{
	int got = rn_cq_poll(&cq->cq, 1, wc);

	*stamp = cq->stamp;
	return got;
}
