/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs: creation, numbers, the ways to ERR and to RESET, destruction.
 *
 * A number is port << 8 | slot: the port says which process, so number and GID together are a full
 * address, final when ibv_create_qp returns.  The first queue pair claims a port, each further
 * 256 another one.  Slots are used in turn, so a number comes back late.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "iwarp.h"
#include "soft.h"
#include "mcast.h"
#include "srq.h"
#include "ud.h"
#include "ud_wire.h"
#include "xrc.h"

struct rn_qp *rn_qps[RN_QPS_MAX];
_Atomic uint32_t rn_qps_end;

/* All of these with rn_world held. */
static uint32_t generations[RN_QPS_MAX]; /* of each slot, counted on through its users */
static bool slots_taken[RN_QPS_MAX];
static uint32_t next_slot, num_ports;

/* The slot and ring of a queue pair that is gone, but for a stopped peer. */
struct quarantined {
	uint32_t index, pd, rq_pd, name, pool; /* pool: of UD */
	bool any_pd;                           /* of an XRC target */
	uint64_t rq_offset, rq_bytes;
	uint32_t rq_size, rq_bounce;
	struct rn_peer *peer;
	struct quarantined *next;
};
static struct quarantined *quarantine;

/* --- numbers -------------------------------------------------------------------------------------------- */

/* A free slot's index, or RN_QPS_MAX. With rn_world held, and the engine. */
static uint32_t slot_take(void)
{
	uint32_t end = num_ports * 256;
	uint16_t port;

	rn_qp_reap();
	for (uint32_t tried = 0; tried < end; tried++) {
		uint32_t index = next_slot++ % end;

		if (!slots_taken[index] && !(atomic_load(&rn_arena_qp(rn_arena, index)->busy) & 1)) {
			slots_taken[index] = true;
			return index;
		}
	}
	port = num_ports < RN_PORTS_MAX ? rn_port_claim() : 0;
	if (!port)
		return RN_QPS_MAX;
	atomic_store(&rn_arena_head(rn_arena)->ports[num_ports++], port);
	slots_taken[end] = true;
	next_slot = end + 1;
	return end;
}

static void slot_give_back(uint32_t index)
{
	slots_taken[index] = false;
}

void rn_qp_life_store(struct rn_qp *qp, enum ibv_qp_state state)
{
	atomic_store(&qp->block->life, (uint64_t)qp->generation << 8 | state);
	rn_fence();
}

/* --- waiting for who is inside ---------------------------------------------------------------------------- */

static bool is_inside(struct rn_qp_block *block, struct rn_peer *peer)
{
	return atomic_load(&block->busy) & 1 && !(peer && atomic_load(&peer->state) == RN_PEER_DEAD);
}

static bool wait_for(struct rn_qp *qp, uint64_t deadline_ns, bool moved_will_do)
{
	bool self = qp->peer && atomic_load(&qp->peer->state) == RN_PEER_SELF;
	uint32_t seen = atomic_load(&qp->block->busy);

	while (is_inside(qp->block, qp->peer)) {
		if (atomic_load_explicit(&qp->peer_gone, memory_order_relaxed) ||
		    (moved_will_do && atomic_load(&qp->block->busy) != seen))
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

/* The words that a peer writes, for a new one; nobody is inside. The old one fails to enter. */
static void reset_peers_words(struct rn_qp_block *block, uint32_t next_receive)
{
	atomic_store(&block->done, next_receive);
	atomic_store(&block->busy, (atomic_load(&block->busy) + 3) & ~1u);
	atomic_store(&block->fault, RN_FAULT_NONE);
	atomic_store(&block->established, 0);
	atomic_store(&block->finished, 0);
}

/* --- creating ------------------------------------------------------------------------------------------------ */

/* An XRC target is of a domain, all others are of a PD. */
static struct ibv_context *home_of(const struct ibv_qp_init_attr_ex *init)
{
	return init->qp_type == IBV_QPT_XRC_RECV && init->xrcd ? init->xrcd->context : init->pd->context;
}

static int check_init(const struct ibv_qp_init_attr_ex *init)
{
	const struct ibv_qp_cap *cap = &init->cap;
	const struct ibv_context *context = home_of(init);

	if (rn_is_foreign(context))
		return ENODEV;
	switch (init->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
		if (init->srq && (init->srq->context != context || rn_srq(init->srq)->type != IBV_SRQT_BASIC))
			return EINVAL;
		if (!init->send_cq || !init->recv_cq || init->send_cq->context != context ||
		    init->recv_cq->context != context)
			return EINVAL;
		break;
	case IBV_QPT_XRC_SEND:
		if (!init->send_cq || init->send_cq->context != context || init->srq)
			return EINVAL;
		break;
	case IBV_QPT_XRC_RECV:
		if (init->srq || !init->xrcd)
			return EINVAL;
		break;
	default:
		return EOPNOTSUPP;
	}
	if (cap->max_send_wr > RN_MAX_QP_WR || cap->max_recv_wr > RN_MAX_QP_WR || cap->max_send_sge > RN_MAX_SGE ||
	    cap->max_recv_sge > RN_MAX_SGE || cap->max_inline_data > RN_MAX_INLINE)
		return EINVAL;
	return 0;
}

static uint32_t power_of_two(uint32_t n)
{
	uint32_t size = 1;

	while (size < n)
		size *= 2;
	return size;
}

static uint32_t to_lines(uint64_t bytes)
{
	return (bytes + 63) & ~63u;
}

/* Sizes of the rings; what they really hold is what the program gets to know. */
static void plan_rings(struct rn_qp *qp, struct ibv_qp_cap *cap)
{
	uint64_t tail;

	cap->max_send_wr = cap->max_send_wr ? power_of_two(cap->max_send_wr) : 0;
	cap->max_recv_wr = cap->max_recv_wr ? power_of_two(cap->max_recv_wr) : 0;
	if (!cap->max_send_sge)
		cap->max_send_sge = 1;
	/* The room of the scatter list, at least: programs rely on that, asking for none. */
	if (cap->max_inline_data < sizeof(struct ibv_sge) * cap->max_send_sge)
		cap->max_inline_data = sizeof(struct ibv_sge) * cap->max_send_sge;
	cap->max_inline_data = to_lines(cap->max_inline_data);
	if (cap->max_recv_sge < 2)
		cap->max_recv_sge = 2; /* they fit into the slot's line anyway */
	tail = sizeof(struct ibv_sge) * cap->max_send_sge;
	if (tail < sizeof(struct ibv_sge) + cap->max_inline_data)
		tail = sizeof(struct ibv_sge) + cap->max_inline_data;

	qp->cap = *cap;
	qp->sq_mask = (cap->max_send_wr ? cap->max_send_wr : 1) - 1;
	qp->sq_stride = to_lines(sizeof(struct rn_send) + tail);
	qp->rq_size = cap->max_recv_wr > 2 ? cap->max_recv_wr : 2; /* see struct rn_slot */
	qp->rq_stride = to_lines(sizeof(struct rn_slot) + sizeof(struct rn_slot_sge) * cap->max_recv_sge +
				 (qp->recv_cq->stamps ? sizeof(uint64_t) : 0));
}

static void timer_fired(struct rn_timer *timer)
{
	rn_qp_progress(container_of(timer, struct rn_qp, timer));
}

static void task_ran(struct rn_task *task)
{
	struct rn_qp *qp = container_of(task, struct rn_qp, task);

	rn_qp_progress(qp);
	rn_iwarp_hang_up(qp);
}

/*
 * The peer's process has gone. What was on its way will never be acknowledged. Without that, an
 * adapter would notice nothing: so it is when the peer has closed its side in good order, and
 * a program that is just done may be slower to finish than its peer. But of a peer that was
 * killed everybody is told at once.
 */
static void peer_died(struct rn_qp *qp)
{
	atomic_store(&qp->peer_gone, true);
	rn_lock(&qp->sq_lock);
	if (qp->unreliable)
		; /* nobody waits for an answer of its, nor it for ours */
	else if (qp->sq_executed != qp->sq_posted)
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	else if (qp->peer && rn_was_abandoned(qp))
		rn_qp_fail(qp);
	rn_qp_pool_recover(qp);
	rn_unlock(&qp->sq_lock);
}

static void peer_noticed(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
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

/* The first receive's index is one that no slot of the ring, zeroed, has for its turn. */
static void start_receives(struct rn_qp *qp)
{
	for (uint32_t i = 0; i < qp->rq_size; i++)
		atomic_store_explicit(&rn_rq_slot(qp, i)->turn, 0, memory_order_relaxed);
	atomic_store(&qp->rq_posted, qp->rq_size);
	atomic_store(&qp->rq_polled, qp->rq_size);
	reset_peers_words(qp->block, qp->rq_size);
}

/* One that no program knows: it is on no list. */
static struct rn_cq *make_own_cq(struct rn_context *context)
{
	struct ibv_cq_init_attr_ex attr = {.cqe = 1};
	struct rn_cq *cq = rn_cq_create(&context->verbs.context, &attr, false);

	if (!cq)
		return NULL;
	pthread_mutex_lock(&context->mutex);
	rn_list_del(&cq->link);
	pthread_mutex_unlock(&context->mutex);
	return cq;
}

static void free_rings(struct rn_qp *qp)
{
	if (qp->rq_offset) {
		rn_arena_free(qp->rq_offset, rn_rq_bytes(qp));
		rn_bounce_release(qp->rq_size, qp->rq_bounce);
	}
	free(qp->rq_shadow);
	free(qp->sq);
	free(qp->builder);
	if (qp->own_cq) {
		qp->own_cq->users = 0;
		ibv_destroy_cq(&qp->own_cq->cq);
	}
}

struct rn_qp *rn_qp_create(struct ibv_qp_init_attr_ex *init)
{
	bool is_target = init->qp_type == IBV_QPT_XRC_RECV;
	struct ibv_pd *pd = is_target ? NULL : init->pd;
	struct rn_context *context = rn_context(home_of(init));
	struct ibv_qp *base;
	struct rn_qp *qp;

	errno = check_init(init);
	if (!errno)
		errno = rn_settings.iwarp && init->qp_type != IBV_QPT_RC ? EOPNOTSUPP
									 : rn_chaos_call(context, RN_CREATE_QP);
	if (!errno)
		errno = rn_context_engine(context);
	if (errno)
		return NULL;
	qp = aligned_alloc(alignof(struct rn_qp), sizeof(*qp));
	if (!qp)
		return NULL;
	memset(qp, 0, sizeof(*qp));
	if (init->srq || is_target || init->qp_type == IBV_QPT_XRC_SEND)
		init->cap.max_recv_wr = init->cap.max_recv_sge = 0; /* the SRQ's own count, or there is none */
	if (is_target)
		init->cap.max_send_wr = 0;
	if (is_target && !(qp->own_cq = make_own_cq(context))) {
		free(qp);
		return NULL;
	}
	qp->send_cq = is_target ? qp->own_cq : rn_cq(init->send_cq);
	qp->recv_cq = is_target ? qp->own_cq : init->recv_cq ? rn_cq(init->recv_cq) : qp->send_cq;
	plan_rings(qp, &init->cap);
	if (rn_qp_pool_open(qp, init)) {
		rn_qp_pool_close(qp);
		free_rings(qp);
		free(qp);
		errno = ENOMEM;
		return NULL;
	}
	qp->sq = calloc(qp->sq_mask + 1, qp->sq_stride);
	qp->rq_shadow = calloc(qp->rq_size, sizeof(*qp->rq_shadow));
	qp->rq_bounce = qp->pool || !init->cap.max_recv_wr ? 0 : rn_bounce_reserve(qp->rq_size);
	qp->rq_offset = rn_arena_alloc(rn_rq_bytes(qp));
	if (!qp->rq_offset)
		rn_bounce_release(qp->rq_size, qp->rq_bounce);
	if (!qp->sq || !qp->rq_shadow || !qp->rq_offset || rn_cq_attach(qp->recv_cq, qp, &qp->cq_bit)) {
		rn_qp_pool_close(qp);
		free_rings(qp);
		free(qp);
		errno = ENOMEM;
		return NULL;
	}
	qp->context = context;
	qp->sq_sig_all = init->sq_sig_all;
	qp->unreliable = init->qp_type == IBV_QPT_UC || init->qp_type == IBV_QPT_UD;
	qp->timer.fire = timer_fired;
	qp->task.run = task_ran;
	qp->notice.run = peer_noticed;
	rn_stream_init(qp);

	pthread_mutex_lock(&context->mutex);
	pthread_mutex_lock(&rn_world);
	qp->index = slot_take();
	if (qp->index == RN_QPS_MAX) {
		pthread_mutex_unlock(&rn_world);
		pthread_mutex_unlock(&context->mutex);
		rn_cq_detach(qp->recv_cq, qp);
		rn_qp_pool_close(qp);
		free_rings(qp);
		free(qp);
		errno = ENOMEM;
		return NULL;
	}
	qp->generation = ++generations[qp->index];
	qp->block = rn_arena_qp(rn_arena, qp->index);
	base = &qp->ex.qp_base;
	*base = (struct ibv_qp){
		.context = &context->verbs.context,
		.qp_context = init->qp_context,
		.pd = pd,
		.send_cq = is_target ? NULL : init->send_cq,
		.recv_cq = is_target ? NULL : init->recv_cq,
		.srq = init->srq,
		.handle = qp->index,
		.qp_num = atomic_load(&rn_arena_head(rn_arena)->ports[qp->index / 256]) << 8 | qp->index % 256,
		.state = IBV_QPS_RESET,
		.qp_type = init->qp_type,
	};
	pthread_mutex_init(&base->mutex, NULL);
	pthread_cond_init(&base->cond, NULL);
	qp->block->qpn = base->qp_num;
	qp->block->dest_qpn = 0;
	qp->arrivals = (struct rn_arrivals){.finished = &qp->block->finished};
	start_receives(qp);
	rn_qp_life_store(qp, IBV_QPS_RESET);
	rn_qps[qp->index] = qp;
	if (rn_qps_end <= qp->index)
		rn_qps_end = qp->index + 1;
	pthread_mutex_unlock(&rn_world);

	if (pd)
		rn_pd(pd)->users++;
	if (is_target) {
		qp->xrcd = rn_xrcd(init->xrcd);
		qp->xrcd->users++;
	}
	qp->send_cq->users++;
	qp->recv_cq->users++;
	if (init->srq)
		rn_srq(init->srq)->users++;
	rn_chaos_adopt(qp);
	rn_list_add(&context->qps, &qp->link);
	pthread_mutex_unlock(&context->mutex);
	return qp;
}

RN_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex ex = {
		.qp_context = init->qp_context,
		.send_cq = init->send_cq,
		.recv_cq = init->recv_cq,
		.srq = init->srq,
		.cap = init->cap,
		.qp_type = init->qp_type,
		.sq_sig_all = init->sq_sig_all,
		.pd = pd,
	};
	struct rn_qp *qp = rn_qp_create(&ex);

	if (!qp)
		return NULL;
	init->cap = ex.cap;
	return &qp->ex.qp_base;
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
	qp->generation = ++generations[qp->index];
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
	reset_peers_words(qp->block, qp->rq_posted);
	qp->established_reported = false;
	atomic_store(&qp->peer_gone, false);
	qp->block->dest_qpn = 0;
	memset(&qp->attr, 0, sizeof(qp->attr));
	rn_qp_life_store(qp, IBV_QPS_RESET);
	rn_unlock(&qp->rq_lock);
	rn_unlock(&qp->sq_lock);
	return 0;
}

/* --- what peers have left for us ---------------------------------------------------------------------------------- */

static bool has_news(struct rn_qp *qp)
{
	uint32_t fault = atomic_load(&qp->block->fault);

	return (fault != RN_FAULT_NONE && fault != RN_FAULT_UNPLUGGED) || atomic_load(&qp->block->established);
}

void rn_qp_attend(struct rn_qp *qp)
{
	uint32_t fault;
	int state;

	if (likely(!has_news(qp)))
		return;
	/* Read again under the lock: a reset may have taken the note away. */
	rn_lock(&qp->sq_lock);
	fault = atomic_load(&qp->block->fault);
	state = atomic_load(&qp->state);
	if (atomic_load(&qp->block->established) && !qp->established_reported) {
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

/* --- destroying ------------------------------------------------------------------------------------------------------ */

/* The peer is stopped inside: its slot and ring stay as they are until it has moved on, or died. */
static void put_aside(struct rn_qp *qp)
{
	struct quarantined *aside = malloc(sizeof(*aside));

	if (!aside)
		return; /* lost for good, which is safe */
	*aside = (struct quarantined){
		.index = qp->index,
		.pd = rn_qp_pd(qp),
		.rq_pd = qp->ex.qp_base.srq ? rn_pd(qp->ex.qp_base.srq->pd)->number : rn_qp_pd(qp),
		.any_pd = qp->xrcd,
		.name = rn_name_of_qp(qp->index, qp->generation),
		.pool = qp->ud ? rn_pool_index(qp->pool) : RN_NO_POOL,
		.rq_offset = qp->rq_offset,
		.rq_bytes = rn_rq_bytes(qp),
		.rq_size = qp->rq_size,
		.rq_bounce = qp->rq_bounce,
		.peer = qp->peer,
		.next = quarantine,
	};
	quarantine = aside;
	qp->rq_offset = 0;
	qp->peer = NULL;
}

void rn_qp_reap(void)
{
	for (struct quarantined **at = &quarantine; *at;) {
		struct quarantined *aside = *at;

		if (is_inside(rn_arena_qp(rn_arena, aside->index), aside->peer) || rn_pool_is_claimed(aside->pool)) {
			at = &aside->next;
			continue;
		}
		rn_pool_recover(aside->name);
		rn_arena_free(aside->rq_offset, aside->rq_bytes);
		rn_bounce_release(aside->rq_size, aside->rq_bounce);
		reset_peers_words(rn_arena_qp(rn_arena, aside->index), 0);
		slot_give_back(aside->index);
		if (aside->peer)
			rn_peer_put(aside->peer);
		*at = aside->next;
		free(aside);
	}
	rn_pool_reap();
}

unsigned rn_qp_count_quarantined(void)
{
	unsigned count = 0;

	for (struct quarantined *at = quarantine; at; at = at->next)
		count++;
	return count;
}

bool rn_qp_is_quarantined(uint32_t pd)
{
	for (struct quarantined *at = quarantine; at; at = at->next)
		if (at->pd == pd || at->rq_pd == pd || at->any_pd)
			return true;
	return false;
}

RN_EXPORT int ibv_destroy_qp(struct ibv_qp *base)
{
	struct rn_context *context = rn_context(base->context);
	struct rn_qp *qp = rn_qp(base);
	struct rn_counters count;
	int err;

	if (rn_is_foreign(base->context))
		return 0;
	if (qp->groups)
		return EBUSY;
	if (unlikely(base->qp_type == IBV_QPT_XRC_RECV) && rn_xrc_close_handle(qp))
		return 0;
	err = rn_qp_reset(qp);
	rn_mw_forget_qp(base->qp_num);
	pthread_mutex_lock(&rn_world);
	if (err)
		put_aside(qp);
	else
		slot_give_back(qp->index);
	rn_qps[qp->index] = NULL;
	while (rn_qps_end && !rn_qps[rn_qps_end - 1])
		rn_qps_end--;
	pthread_mutex_unlock(&rn_world);
	if (err) {
		rn_cq_purge(qp->send_cq, qp);
		rn_cq_purge(qp->recv_cq, qp);
		rn_qp_pool_discard(qp);
	}
	rn_cq_detach(qp->recv_cq, qp);
	rn_event_forget(context, base, &qp->async_reported, &base->events_completed, &base->mutex, &base->cond);

	pthread_mutex_lock(&context->mutex);
	rn_list_del(&qp->link);
	rdmanet_soft_qp_counters(base, &count);
	rn_counters_add(&context->retired, &count);
	if (base->pd)
		rn_pd(base->pd)->users--;
	if (qp->xrcd)
		qp->xrcd->users--;
	qp->send_cq->users--;
	qp->recv_cq->users--;
	if (base->srq)
		rn_srq(base->srq)->users--;
	pthread_mutex_unlock(&context->mutex);
	rn_qp_pool_close(qp);
	free_rings(qp);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	free(qp);
	return 0;
}

void rn_qp_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->qps)) {
		struct rn_qp *qp = container_of(context->qps.next, struct rn_qp, link);

		rn_mcast_detach_all(qp);
		qp->ex.qp_base.events_completed = qp->async_reported;
		ibv_destroy_qp(&qp->ex.qp_base);
	}
}

/* The last context that had queue pairs is closing: the engine is still there. */
void rn_qp_close(void)
{
	pthread_mutex_lock(&rn_world);
	/* Contexts without queue pairs may keep this arena: a slot where somebody is stopped still has its
	 * busy word to protect it, and its ring stays allocated. Without the engine nobody will tell. */
	rn_qp_reap();
	while (quarantine) {
		struct quarantined *aside = quarantine;

		quarantine = aside->next;
		if (aside->peer)
			rn_peer_put(aside->peer);
		free(aside);
	}
	memset(slots_taken, 0, sizeof(slots_taken));
	while (num_ports)
		rn_port_release(atomic_exchange(&rn_arena_head(rn_arena)->ports[--num_ports], 0));
	next_slot = 0;
	pthread_mutex_unlock(&rn_world);
}

void rn_qp_forked(void)
{
	memset(rn_qps, 0, rn_qps_end * sizeof(rn_qps[0]));
	rn_qps_end = 0;
	memset(slots_taken, 0, sizeof(slots_taken));
	num_ports = next_slot = 0;
	quarantine = NULL;
}
