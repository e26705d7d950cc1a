/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists of READs or WRITEs that are executed while they are handed over.
 *
 * A work request is posted, executed, completed and polled, which for 4 KiB takes several times as long as the copy.
 * rdmanet_soft_move() takes a list of blocks instead, and copies those at its front that can be copied at once, each
 * checked as a request is.  Nothing is in flight when it returns, and nothing completes.
 *
 * Of memory that is mapped here each is copied by itself, while the processor fetches the beginning of the next one.
 * Otherwise the kernel copies many by one call (responder/far.c), if they are short.
 *
 * It reports no errors.  It stops before the first block that would be refused, has to wait, or goes another way.  The
 * caller posts that one, and learns from its completion what is wrong.  A part of it may have been copied by then, and is
 * copied again.
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

enum {
	LEAST_BYTES = 256,   /* a short block takes as long as so many: to find it takes longer than to copy it */
	FAR_BYTES = 1024,    /* and one that the kernel copies as long as so many more: it finds pages */
	FETCHED_BYTES = 256, /* of the next block; the processor goes on by itself */
	YIELDS_MOST = 16,    /* for those that wait for the send lock */
};

/* What is to be done by one call. */
struct work {
	uint32_t moved;
	uint64_t left; /* bytes */
};

static uint32_t work_of(uint32_t length)
{
	return length < LEAST_BYTES ? LEAST_BYTES : length;
}

/* --- memory that is mapped here ------------------------------------------------------------------------------------- */

/* The regions of the last block: the next one is mostly in the same. What a key is for is looked up anew when its owner
 * could have withdrawn it, after `since` has come to RN_PIECE_BYTES. */
struct found {
	struct rn_region ours, theirs;
	uint32_t since;
};

/* A region of ours. False: something is wrong, or its memory has to be probed first. */
static bool find_ours(const struct rn_qp *qp, uint32_t lkey, bool is_read, struct rn_region *region)
{
	const struct rn_mr_entry *mr = rn_mr_find(rn_mr_table, lkey);
	uint32_t needed = RN_ACCESS_LOCAL | (is_read ? IBV_ACCESS_LOCAL_WRITE : 0);

	region->key = 0;
	if (!mr || mr->pd != rn_pd(qp->ex.qp_base.pd)->number || (mr->access & needed) != needed ||
	    mr->kind == RN_MR_ON_DEMAND || mr->kind == RN_MR_NULL)
		return false;
	*region = (struct rn_region){lkey, mr->iova, mr->length, (char *)(uintptr_t)mr->base};
	return true;
}

/* Where it is in this region; NULL: it is not within it. */
static inline char *place_in(const struct rn_region *region, uint64_t addr, uint32_t length)
{
	uint64_t at = addr - region->iova;

	return addr >= region->iova && length <= region->length && at <= region->length - length ? region->at + at : NULL;
}

static inline bool find_both(struct rn_qp *qp, const struct rn_block *block, bool is_read, struct found *found)
{
	return (found->ours.key == block->lkey || find_ours(qp, block->lkey, is_read, &found->ours)) &&
	       (found->theirs.key == block->rkey || rn_respond_region(&qp->responder, is_read, block->rkey, &found->theirs));
}

/* Begin to fetch the next block, as if it were in the same memory: if it is not, this is an address like any other. */
static inline void fetch(const struct rn_block *next, const struct found *found, bool is_read)
{
	uintptr_t from = is_read ? (uintptr_t)found->theirs.at + (next->there - found->theirs.iova)
				 : (uintptr_t)found->ours.at + (next->here - found->ours.iova);

	for (uint32_t at = 0; at < FETCHED_BYTES; at += RN_LINE)
		__builtin_prefetch((const void *)(from + at));
}

/* next: or NULL. */
static inline bool move_one(struct rn_qp *qp, const struct rn_block *block, const struct rn_block *next, bool is_read,
			    bool is_large, struct found *found)
{
	struct rn_responder_ctx *ctx = &qp->responder;
	uint32_t run;

	for (uint32_t at = 0; at < block->length; at += run) {
		uint32_t left = block->length - at;
		char *here, *there;

		if (!find_both(qp, block, is_read, found) ||
		    !(here = place_in(&found->ours, block->here + at, left)) ||
		    !(there = place_in(&found->theirs, block->there + at, left)))
			return false;
		if (next)
			fetch(next, found, is_read);
		run = left < RN_PIECE_BYTES ? left : RN_PIECE_BYTES;
		if (is_read)
			rn_move(here, there, run, is_large);
		else
			rn_place_one(there, here, run, is_large);
		*(ctx->self ? &ctx->count->bytes_local : &ctx->count->bytes_mapped) += run;
		if ((found->since += work_of(run)) < RN_PIECE_BYTES)
			continue;
		*found = (struct found){0};
		if (!rn_respond_goes_on(ctx))
			return false;
	}
	return true;
}

__attribute__((noinline)) static void move_some(struct rn_qp *qp, bool is_read, unsigned send_flags,
						const struct rn_block *blocks, uint32_t count, volatile struct work *work)
{
	bool is_large = !qp->responder.self && send_flags & rdmanet_soft_send_of_much;
	struct found found = {0};

	for (; work->moved < count && work_of(blocks->length) <= work->left; blocks++, work->moved++) {
		if (!move_one(qp, blocks, work->moved + 1 < count ? blocks + 1 : NULL, is_read, is_large, &found))
			return;
		work->left -= work_of(blocks->length);
	}
}

/* The memory of either side may be a file's. */
static void move_with_care(struct rn_qp *qp, bool is_read, unsigned send_flags, const struct rn_block *blocks, uint32_t count,
			   volatile struct work *work)
{
	struct rn_bus bus;

	if (sigsetjmp(bus.back, 0))
		return;
	rn_bus_begin(&bus);
	move_some(qp, is_read, send_flags, blocks, count, work);
	rn_bus_end();
}

/* --- memory that is not ------------------------------------------------------------------------------------------- */

/* As many as are short, and not mapped here, up to RN_PIECE_BYTES of them. */
static void list_far(struct rn_qp *qp, bool is_read, const struct rn_block *blocks, uint32_t count, uint64_t most,
		     struct rn_far_list *list)
{
	uint64_t bytes = 0;
	struct rn_region ours;
	struct rn_piece piece;

	list->count = 0;
	for (; (uint32_t)list->count < count && list->count < RN_FAR_BLOCKS; blocks++) {
		char *here;

		if ((uint64_t)blocks->length + FAR_BYTES > most || (bytes += blocks->length) > RN_PIECE_BYTES ||
		    !find_ours(qp, blocks->lkey, is_read, &ours) || !(here = place_in(&ours, blocks->here, blocks->length)) ||
		    !rn_respond_range(&qp->responder, is_read, blocks->rkey, blocks->there, blocks->length, &piece) || piece.at)
			return;
		most -= blocks->length + FAR_BYTES;
		list->here[++list->count] = (struct iovec){here, blocks->length};
		list->there[list->count] = (struct iovec){(void *)(uintptr_t)piece.far, blocks->length};
	}
}

static void move_far(struct rn_qp *qp, bool is_read, const struct rn_block *blocks, uint32_t count, volatile struct work *work)
{
	struct rn_far_list list;
	int done;

	do {
		list_far(qp, is_read, blocks + work->moved, count - work->moved, work->left, &list);
		done = list.count ? rn_respond_far(&qp->responder, &list, !is_read) : 0;
		for (int i = 0; i < done; i++)
			work->left -= blocks[work->moved++].length + FAR_BYTES;
	} while (done && done == list.count && rn_respond_goes_on(&qp->responder));
}

/* --- both ----------------------------------------------------------------------------------------------------------- */

RN_EXPORT uint32_t rdmanet_soft_move(struct ibv_qp *base, int opcode, unsigned send_flags, const struct rn_block *blocks,
				     uint32_t count, uint64_t most_bytes)
{
	bool is_read = opcode == IBV_WR_RDMA_READ;
	struct rn_qp *qp = rn_qp(base);
	volatile struct work work = {0, most_bytes};

	if (unlikely(rn_is_foreign(base->context)))
		return 0;
	/* Who moves list after list has the lock nearly all the time: others, as the engine, would hardly get it. */
	for (int i = 0; i < YIELDS_MOST && unlikely(rn_lock_is_wanted(&qp->sq_lock)); i++)
		sched_yield();
	rn_lock(&qp->sq_lock);
	if (can_move(qp, is_read) && rn_enter(qp) == RN_WAIT_NOT) {
		move_with_care(qp, is_read, send_flags, blocks, count, &work);
		if (qp->responder.peer)
			move_far(qp, is_read, blocks, count, &work);
		qp->count.send_wrs += work.moved;
		rn_leave(qp);
	}
	rn_unlock(&qp->sq_lock);
	if (work.moved) {
		rn_order_by_peer();
		rn_own_moves();
	}
	return work.moved;
}
