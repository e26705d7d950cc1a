/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a responder sees of the queue pair that it plays: read once from its owner's arena, checked, kept.
 *
 * An arena is a peer's to write, so an offset or a length that leads out of it ends here.  Of a queue pair of
 * this process the facts are the private ones (own.h).  The other way round goes what the owner is told: receives
 * have completed, a request was refused.
 */
#include "soft.h"

void rn_view_aim(struct rn_view *view, char *arena, uint32_t index, struct rn_qp_block *words)
{
	struct rn_qp_block *block = rn_arena_qp(arena, index);

	view->arena = arena;
	view->index = index;
	view->facts = view->self ? rn_own_qp(index) : block;
	view->block = words ? words : block;
}

bool rn_view_open(struct rn_view *view)
{
	const struct rn_qp_block *facts = view->facts;
	char *arena = view->arena;
	uint64_t offset = READ_ONCE(facts->rq_offset);
	uint32_t size = READ_ONCE(facts->rq_size), stride = READ_ONCE(facts->rq_stride);
	uint32_t max_sge = READ_ONCE(facts->rq_max_sge), cq = READ_ONCE(facts->cq), bit = READ_ONCE(facts->cq_bit);
	uint32_t pool = READ_ONCE(facts->pool);
	uint32_t bounce = READ_ONCE(facts->rq_bounce);
	bool stamped = READ_ONCE(facts->stamped);

	/* Read once, checked, kept. */
	if (size < 2 || size & (size - 1) || size > RN_MAX_QP_WR || stride % 64 || max_sge > RN_MAX_SGE ||
	    stride < sizeof(struct rn_slot) + max_sge * sizeof(struct rn_slot_sge) + stamped * sizeof(uint64_t) ||
	    stride > 4096 ||
	    offset < RN_ARENA_HEAP || offset % 64 || offset > RN_ARENA_SIZE ||
	    bounce > RN_ARENA_SIZE ||
	    (uint64_t)size * stride + rn_bounce_bytes(size, bounce) > RN_ARENA_SIZE - offset || cq >= RN_CQS_MAX ||
	    bit >= RN_CQ_QPS_MAX || (pool >= RN_POOLS_MAX && pool != RN_NO_POOL))
		return false;
	view->mrs = view->self ? rn_mr_table : rn_arena_mrs(arena);
	view->qpn = atomic_load(&facts->qpn);
	view->rq = arena + offset;
	view->rq_mask = size - 1;
	view->rq_stride = stride;
	view->rq_max_sge = max_sge;
	view->rq_bounce = bounce;
	view->cq = rn_arena_cq(arena, cq);
	view->dirty = &view->cq->dirty[bit / 64];
	view->dirty_bit = 1ull << bit % 64;
	view->summary_bit = 1ull << bit / 64;
	view->datagram = READ_ONCE(facts->type) == IBV_QPT_UD;
	view->unreliable = view->datagram || READ_ONCE(facts->type) == IBV_QPT_UC;
	view->pd = view->rq_pd = READ_ONCE(facts->pd);
	view->pool = pool == RN_NO_POOL ? NULL : rn_arena_pool(arena, pool);
	view->claim.entry = NULL;
	view->finished = &rn_arena_qp(arena, view->index)->finished;
	view->domain = READ_ONCE(facts->type) == IBV_QPT_XRC_RECV ? READ_ONCE(facts->domain) : 0;
	view->name = rn_name_of_qp(view->index, view->generation);
	if (view->pool)
		view->rq_pd = atomic_load(&rn_pool_facts(arena, view->pool)->pd);
	view->max_dest_rd_atomic = READ_ONCE(facts->max_dest_rd_atomic);
	view->done = atomic_load(&view->block->done);
	view->segment = 0;
	view->segment_size = 0;
	view->no_cma = rn_settings.no_cma;
	view->stamped = stamped;
	view->pushed = 0;
	view->solicited = false;
	return true;
}

void rn_view_ring_bell(struct rn_view *view)
{
	if (view->peer)
		rn_peer_signal(view->peer, RN_CHANNEL_BELL);
	else
		rn_channel_signal(RN_CHANNEL_BELL);
	view->count->wakeups++;
	view->count->syscalls++;
}

void rn_view_announce(struct rn_view *view)
{
	/* See arena.h for why always both, and cq_event.c for why seq_cst. */
	atomic_fetch_or(view->dirty, view->dirty_bit);
	if (!(atomic_load(&view->cq->summary) & view->summary_bit))
		atomic_fetch_or(&view->cq->summary, view->summary_bit);
	if (rn_cq_notify(view->cq, view->peer, view->solicited, view->pushed)) {
		view->count->wakeups++;
		view->count->syscalls++;
	}
	view->pushed = 0;
	view->solicited = false;
}

/* The owner will go to ERR. */
void rn_view_leave_fault(struct rn_view *view, enum rn_fault fault)
{
	uint32_t none = RN_FAULT_NONE;

	if (atomic_compare_exchange_strong(&view->block->fault, &none, fault))
		rn_view_ring_bell(view);
}

bool rn_view_name_srq(struct rn_view *view, uint32_t number)
{
	struct rn_pool_block *pool = rn_arena_pool(view->arena, number % RN_POOLS_MAX);
	const struct rn_pool_block *facts = rn_pool_facts(view->arena, pool);
	uint32_t cq, bit;

	if (!number || atomic_load(&facts->number) != number || atomic_load(&facts->domain) != view->domain)
		return false;
	if (likely(view->pool == pool))
		return true;
	cq = atomic_load(&facts->cq);
	bit = atomic_load(&facts->cq_bit);
	if (cq >= RN_CQS_MAX || bit >= RN_CQ_QPS_MAX)
		return false;
	rn_view_give_back(view);
	if (view->pushed)
		rn_view_announce(view);
	view->pool = pool;
	view->finished = &pool->finished;
	view->pd = view->rq_pd = atomic_load(&facts->pd);
	view->cq = rn_arena_cq(view->arena, cq);
	view->dirty = &view->cq->dirty[bit / 64];
	view->dirty_bit = 1ull << bit % 64;
	view->summary_bit = 1ull << bit / 64;
	return true;
}
