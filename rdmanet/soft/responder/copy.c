/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy: from the memory of one side to that of the other.
 *
 * Long copies are cut into pieces.  After each piece we advance `busy`, so that an owner that withdraws a key waits
 * for one piece at most, and read generation_state and the keys again.  A request that waits in the send queue is
 * copied in turns of several pieces, between which the requester leaves the responder, and gives back its send lock.
 */
#include "objects/eager.h"
#include "responder/inside.h"
#include "responder/place.h"

/* Set another odd value: we are still inside, but have dropped what we had looked up. */
static void busy_move_on(struct rn_responder_ctx *ctx)
{
	ctx->busy += 2;
	atomic_exchange(&ctx->block->busy, ctx->busy);
}

/* After a piece. Then every key still to be used is looked up again. */
enum rn_copied rn_still_there(struct rn_responder_ctx *ctx, const struct rn_piece *pieces, int count)
{
	busy_move_on(ctx);
	if (!rn_responder_is_alive(ctx))
		return RN_COPY_LOST;
	for (int i = 0; i < count; i++)
		if (atomic_load(&pieces[i].mr->key) != pieces[i].key)
			return RN_COPY_FAULT;
	return RN_COPIED;
}

bool rn_respond_goes_on(struct rn_responder_ctx *ctx)
{
	return rn_still_there(ctx, NULL, 0) == RN_COPIED;
}

/* A short message into memory that can't be mapped: leave it in the slot's eager buffer. See objects/eager.c. RN_COPY_ASKED:
 * this message doesn't go that way. */
static enum rn_copied copy_eagerly(struct rn_responder_ctx *ctx, struct rn_transfer *t)
{
	const struct rn_piece *remote = &t->remote[0];
	uint32_t index = ctx->done & ctx->rq_mask;
	char *to;

	if (!t->is_receive || ctx->pool || t->num_remote != 1 || remote->at || t->total > ctx->rq_eager || t->moved ||
	    READ_ONCE(t->slot->num_sge) != 1 || READ_ONCE(remote->mr->kind) != RN_MR_USER ||
	    READ_ONCE(remote->mr->access) &
		    (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND))
		return RN_COPY_ASKED;
	to = rn_eager_room(ctx->rq + ((uint64_t)ctx->rq_mask + 1) * ctx->rq_stride, index, ctx->rq_eager);
	if (!rn_gather(t->local, t->num_local, to))
		return RN_COPY_LOCAL_FAULT;
	t->moved = t->total;
	t->is_eager = true;
	ctx->count->bytes_bounced += t->total;
	return RN_COPIED;
}

static enum rn_copied copy_mapped(struct rn_responder_ctx *ctx, const struct rn_transfer *t, bool is_firm, char *here,
				  char *there, uint64_t run)
{
	if (unlikely(!is_firm)) {
		enum rn_copied copied = rn_copy_with_care(t, here, there, run);

		if (copied != RN_COPIED)
			return copied;
	} else if (t->to_remote) {
		rn_place_one(there, here, run, t->is_large);
	} else {
		rn_move(here, there, run, t->is_large);
	}
	if (ctx->self)
		ctx->count->bytes_local += run;
	else
		ctx->count->bytes_mapped += run;
	return RN_COPIED;
}

/* On-demand memory is brought in as a whole before it is copied: to do that for each turn would take longer than the
 * copy. */
static bool is_on_demand(const struct rn_piece *pieces, int count)
{
	for (int i = 0; i < count; i++)
		if (pieces[i].mr && READ_ONCE(pieces[i].mr->kind) == RN_MR_ON_DEMAND)
			return true;
	return false;
}

/* Both lists from position t->moved on, run by run. */
enum rn_copied rn_copy(struct rn_responder_ctx *ctx, struct rn_transfer *t)
{
	uint64_t local_skip = t->moved, remote_skip = t->moved, began = t->moved;
	enum rn_copied copied;
	int l = 0, r = 0;

	if (unlikely(t->in_turns) &&
	    (is_on_demand(t->local, t->num_local) || (ctx->self && is_on_demand(t->remote, t->num_remote))))
		t->in_turns = false;
	if (unlikely(t->in_turns) && (ctx->share.is_active || rn_may_share(ctx, t)))
		return rn_copy_shared(ctx, t);
	copied = copy_eagerly(ctx, t);
	if (copied != RN_COPY_ASKED)
		return copied;
	while (l < t->num_local && local_skip >= t->local[l].length)
		local_skip -= t->local[l++].length;
	while (r < t->num_remote && remote_skip >= t->remote[r].length)
		remote_skip -= t->remote[r++].length;
	while (t->moved < t->total) {
		const struct rn_piece *remote = &t->remote[r];
		uint64_t run = t->local[l].length - local_skip;
		char *here = t->local[l].at + local_skip;

		if (run > remote->length - remote_skip)
			run = remote->length - remote_skip;
		if (run > RN_PIECE_BYTES)
			run = RN_PIECE_BYTES;
		if (likely(remote->at)) /* a peer's is a segment, or it would not be mapped */
			copied = copy_mapped(ctx, t, rn_piece_is_firm(&t->local[l]) && (!ctx->self || rn_piece_is_firm(remote)),
					     here, remote->at + remote_skip, run);
		else
			copied = rn_copy_far(ctx, t, here, remote, remote_skip, run);
		if (unlikely(copied != RN_COPIED))
			return copied;
		t->moved += run;
		if ((local_skip += run) == t->local[l].length) {
			local_skip = 0;
			l++;
		}
		if ((remote_skip += run) == remote->length) {
			remote_skip = 0;
			r++;
		}
		if (likely(run != RN_PIECE_BYTES))
			continue;
		if ((copied = rn_still_there(ctx, &t->remote[r], t->num_remote - r)) != RN_COPIED)
			return copied;
		if (t->in_turns && t->moved - began >= RN_TURN_BYTES && t->moved < t->total)
			return RN_COPY_TURN;
	}
	return RN_COPIED;
}
