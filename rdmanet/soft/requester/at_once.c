/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists of READs or WRITEs that are executed while they are handed over.
 *
 * A work request is posted, executed, completed and polled, which for 4 KiB takes several times as long as the copy.
 * rdmanet_soft_move() takes a list of blocks instead, and copies those at its front that can be copied at once, each
 * checked as a request is.  Nothing is in flight when it returns, and nothing completes.
 *
 * It reports no errors.  It stops before the first block that would be refused, has to wait, or goes another way than by
 * memory that is mapped here.  The caller posts that one, and learns from its completion what is wrong.  A part of it may
 * have been copied by then, and is copied again.
 */
#include "base/extras.h"
#include "base/fence.h"
#include "bus_error.h"
#include "objects/own_look.h"
#include "requester/requester.h"
#include "responder/place.h"

/* Would a request be executed by who posts it? With sq_lock held. */
static bool can_move(const struct rn_qp *qp, bool is_read)
{
	return atomic_load_explicit(&qp->state, memory_order_relaxed) == IBV_QPS_RTS && qp->sq_posted == qp->sq_executed &&
	       qp->ex.qp_base.qp_type == IBV_QPT_RC && !qp->uses_tcp && !qp->faults.injector &&
	       (!is_read || qp->attr.max_rd_atomic);
}

/* Where it is; NULL: something is wrong, or it has to be probed first. */
static char *find_ours(const struct rn_qp *qp, uint32_t lkey, uint64_t addr, uint32_t length, bool is_read)
{
	const struct rn_mr_entry *mr = rn_mr_find(rn_mr_table, lkey);
	uint32_t needed = RN_ACCESS_LOCAL | (is_read ? IBV_ACCESS_LOCAL_WRITE : 0);

	if (!mr || mr->pd != rn_pd(qp->ex.qp_base.pd)->number || !rn_mr_covers(mr, addr, length) ||
	    (mr->access & needed) != needed || mr->kind == RN_MR_ON_DEMAND || mr->kind == RN_MR_NULL)
		return NULL;
	return (char *)(uintptr_t)(mr->base + (addr - mr->iova));
}

enum {
	LEAST_BYTES = 256, /* a short block takes as long as so many: to look up its keys takes longer than to copy it */
	YIELDS_MOST = 16,  /* for those that wait for the send lock */
};

static uint32_t work_of(uint32_t length)
{
	return length < LEAST_BYTES ? LEAST_BYTES : length;
}

/* since: the work that was done since the owner could withdraw a key. */
static bool move_one(struct rn_qp *qp, const struct rn_block *block, bool is_read, bool is_large, uint32_t *since)
{
	struct rn_responder_ctx *ctx = &qp->responder;
	uint32_t run;

	for (uint32_t at = 0; at < block->length; at += run) {
		uint32_t left = block->length - at;
		char *here = find_ours(qp, block->lkey, block->here + at, left, is_read);
		char *there = rn_respond_mapped(ctx, is_read, block->rkey, block->there + at, left);

		if (!here || !there)
			return false;
		run = left < RN_PIECE_BYTES ? left : RN_PIECE_BYTES;
		if (is_read)
			rn_move(here, there, run, is_large);
		else
			rn_place_one(there, here, run, is_large);
		*(ctx->self ? &ctx->count->bytes_local : &ctx->count->bytes_mapped) += run;
		if ((*since += work_of(run)) < RN_PIECE_BYTES)
			continue;
		*since = 0;
		if (!rn_respond_goes_on(ctx))
			return false;
	}
	return true;
}

/* moved: so many are done. */
__attribute__((noinline)) static void move_some(struct rn_qp *qp, bool is_read, unsigned send_flags,
						const struct rn_block *blocks, uint32_t count, uint64_t most_bytes,
						volatile uint32_t *moved)
{
	bool is_large = !qp->responder.self && send_flags & rdmanet_soft_send_of_much;
	uint32_t since = 0;

	for (; *moved < count && work_of(blocks->length) <= most_bytes; blocks++, ++*moved) {
		if (!move_one(qp, blocks, is_read, is_large, &since))
			return;
		most_bytes -= work_of(blocks->length);
	}
}

/* The memory of either side may be a file's. */
static uint32_t move_with_care(struct rn_qp *qp, bool is_read, unsigned send_flags, const struct rn_block *blocks,
			       uint32_t count, uint64_t most_bytes)
{
	volatile uint32_t moved = 0;
	struct rn_bus bus;

	if (sigsetjmp(bus.back, 0))
		return moved;
	rn_bus_begin(&bus);
	move_some(qp, is_read, send_flags, blocks, count, most_bytes, &moved);
	rn_bus_end();
	return moved;
}

RN_EXPORT uint32_t rdmanet_soft_move(struct ibv_qp *base, int opcode, unsigned send_flags, const struct rn_block *blocks,
				     uint32_t count, uint64_t most_bytes)
{
	bool is_read = opcode == IBV_WR_RDMA_READ;
	struct rn_qp *qp = rn_qp(base);
	uint32_t moved = 0;

	if (unlikely(rn_is_foreign(base->context)))
		return 0;
	/* Who moves list after list has the lock nearly all the time: others, as the engine, would hardly get it. */
	for (int i = 0; i < YIELDS_MOST && unlikely(rn_lock_is_wanted(&qp->sq_lock)); i++)
		sched_yield();
	rn_lock(&qp->sq_lock);
	if (can_move(qp, is_read) && rn_enter(qp) == RN_WAIT_NOT) {
		moved = move_with_care(qp, is_read, send_flags, blocks, count, most_bytes);
		qp->count.send_wrs += moved;
		rn_leave(qp);
	}
	rn_unlock(&qp->sq_lock);
	if (moved) {
		rn_order_by_peer();
		rn_own_moves();
	}
	return moved;
}
