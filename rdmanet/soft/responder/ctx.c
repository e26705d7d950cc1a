/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder's view of its queue pair: read once from the owner's arena, checked, and kept.
 *
 * A peer can write anything into an arena, so offsets and lengths that lead out of it are refused here.  For a queue
 * pair of this process the private facts are used (shm/own.h).  In the other direction it tells the owner that receives
 * have completed, or that a request was refused.
 */
#include "objects/eager.h"
#include "responder/responder.h"

void rn_responder_aim(struct rn_responder_ctx *ctx, char *arena, uint32_t index, struct rn_qp_block *words)
{
	struct rn_qp_block *block = rn_arena_qp(arena, index);

	ctx->arena = arena;
	ctx->index = index;
	ctx->facts = ctx->self ? rn_own_qp(index) : block;
	ctx->block = words ? words : block;
}

bool rn_responder_open(struct rn_responder_ctx *ctx)
{
	const struct rn_qp_block *facts = ctx->facts;
	char *arena = ctx->arena;
	uint64_t offset = READ_FACT(facts->rq_offset);
	uint32_t size = READ_FACT(facts->rq_size), stride = READ_FACT(facts->rq_stride);
	uint32_t max_sge = READ_FACT(facts->rq_max_sge), cq = READ_FACT(facts->cq), bit = READ_FACT(facts->cq_bit);
	uint32_t pool = READ_FACT(facts->pool);
	uint32_t eager = READ_FACT(facts->rq_eager);
	bool stamped = READ_FACT(facts->stamped);

	/* Read once, checked, kept. */
	if (size < 2 || size & (size - 1) || size > RN_MAX_QP_WR || stride % 64 || max_sge > RN_MAX_SGE ||
	    stride < sizeof(struct rn_slot) + max_sge * sizeof(struct rn_slot_sge) + stamped * sizeof(uint64_t) ||
	    stride > 4096 ||
	    offset < RN_ARENA_HEAP || offset % 64 || offset > RN_ARENA_SIZE ||
	    eager > RN_ARENA_SIZE ||
	    (uint64_t)size * stride + rn_eager_bytes(size, eager) > RN_ARENA_SIZE - offset || cq >= RN_CQS_MAX ||
	    bit >= RN_CQ_QPS_MAX || (pool >= RN_POOLS_MAX && pool != RN_NO_POOL))
		return false;
	ctx->mrs = ctx->self ? rn_mr_table : rn_arena_mrs(arena);
	ctx->qpn = atomic_load(&facts->qpn);
	ctx->rq = arena + offset;
	ctx->rq_mask = size - 1;
	ctx->rq_stride = stride;
	ctx->rq_max_sge = max_sge;
	ctx->rq_eager = eager;
	ctx->cq = rn_arena_cq(arena, cq);
	ctx->dirty = &ctx->cq->dirty[bit / 64];
	ctx->dirty_bit = 1ull << bit % 64;
	ctx->summary_bit = 1ull << bit / 64;
	ctx->datagram = READ_FACT(facts->type) == IBV_QPT_UD;
	ctx->unreliable = ctx->datagram || READ_FACT(facts->type) == IBV_QPT_UC;
	ctx->pd = ctx->rq_pd = READ_FACT(facts->pd);
	ctx->pool = pool == RN_NO_POOL ? NULL : rn_arena_pool(arena, pool);
	ctx->claim.entry = NULL;
	ctx->finished = &rn_arena_qp(arena, ctx->index)->finished;
	ctx->domain = READ_FACT(facts->type) == IBV_QPT_XRC_RECV ? READ_FACT(facts->domain) : 0;
	ctx->name = rn_name_of_qp(ctx->index, ctx->generation);
	if (ctx->pool)
		ctx->rq_pd = atomic_load(&rn_pool_facts(arena, ctx->pool)->pd);
	ctx->max_dest_rd_atomic = READ_FACT(facts->max_dest_rd_atomic);
	ctx->done = atomic_load(&ctx->block->done);
	ctx->segment = 0;
	ctx->segment_size = 0;
	ctx->no_cma = rn_settings.no_cma;
	ctx->stamped = stamped;
	ctx->pushed = 0;
	ctx->solicited = false;
	return true;
}

void rn_responder_wake_owner(struct rn_responder_ctx *ctx)
{
	if (ctx->peer)
		rn_peer_signal(ctx->peer, RN_CHANNEL_WAKEUP);
	else
		rn_channel_signal(RN_CHANNEL_WAKEUP);
	ctx->count->wakeups++;
	ctx->count->syscalls++;
}

void rn_responder_announce(struct rn_responder_ctx *ctx)
{
	/* See shm/arena.h for why always both, and objects/cq_event.c for why seq_cst. */
	atomic_fetch_or(ctx->dirty, ctx->dirty_bit);
	if (!(atomic_load(&ctx->cq->summary) & ctx->summary_bit))
		atomic_fetch_or(&ctx->cq->summary, ctx->summary_bit);
	if (rn_cq_notify(ctx->cq, ctx->peer, ctx->solicited, ctx->pushed)) {
		ctx->count->wakeups++;
		ctx->count->syscalls++;
	}
	ctx->pushed = 0;
	ctx->solicited = false;
}

/* The owner will go to ERR. */
void rn_responder_leave_fault(struct rn_responder_ctx *ctx, enum rn_fault fault)
{
	uint32_t none = RN_FAULT_NONE;

	if (atomic_compare_exchange_strong(&ctx->block->fault, &none, fault))
		rn_responder_wake_owner(ctx);
}

bool rn_responder_name_srq(struct rn_responder_ctx *ctx, uint32_t number)
{
	struct rn_pool_block *pool = rn_arena_pool(ctx->arena, number % RN_POOLS_MAX);
	const struct rn_pool_block *facts = rn_pool_facts(ctx->arena, pool);
	uint32_t cq, bit;

	if (!number || atomic_load(&facts->number) != number || atomic_load(&facts->domain) != ctx->domain)
		return false;
	if (likely(ctx->pool == pool))
		return true;
	cq = atomic_load(&facts->cq);
	bit = atomic_load(&facts->cq_bit);
	if (cq >= RN_CQS_MAX || bit >= RN_CQ_QPS_MAX)
		return false;
	rn_responder_give_back(ctx);
	if (ctx->pushed)
		rn_responder_announce(ctx);
	ctx->pool = pool;
	ctx->finished = &pool->finished;
	ctx->pd = ctx->rq_pd = atomic_load(&facts->pd);
	ctx->cq = rn_arena_cq(ctx->arena, cq);
	ctx->dirty = &ctx->cq->dirty[bit / 64];
	ctx->dirty_bit = 1ull << bit % 64;
	ctx->summary_bit = 1ull << bit / 64;
	return true;
}
