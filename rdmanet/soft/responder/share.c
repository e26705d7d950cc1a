/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester's part of a long READ that both processes carry; objects/share.h has the theory.
 *
 * The requester copies some pieces in each turn.  When all are taken, and the last one of the owner's is not in place yet,
 * it looks a little longer, because that is mostly a matter of microseconds, and then waits (RN_WAIT_SHARED).
 */
#include "base/engine.h"
#include "base/witness.h"
#include "responder/inside.h"

enum {
	LEAST = 4 * RN_SHARE_PIECE, /* a shorter one is done before help has come */
	MOST_PIECES = UINT16_MAX,
	PATIENCE_NS = 50 * 1000,
};

bool rn_may_share(const struct rn_responder_ctx *ctx, const struct rn_transfer *t)
{
	const struct rn_share *share = &ctx->share;

	return t->in_turns && !t->to_remote && t->num_local == 1 && t->num_remote == 1 && !t->remote[0].at && ctx->peer &&
	       !ctx->no_cma && !share->is_declined && !share->is_asked && t->total - t->moved >= LEAST &&
	       t->total - t->moved <= (uint64_t)MOST_PIECES * RN_SHARE_PIECE &&
	       READ_ONCE(t->remote[0].mr->kind) == RN_MR_USER;
}

/* The owner has begun, or doesn't help. */
static void answered(struct rn_reply *reply, const void *data, long length)
{
	struct rn_share *share = container_of(reply, struct rn_share, reply);
	const struct rn_remote_answer *answer = data;

	share->is_declined = length < (long)sizeof(*answer) || answer->error;
	share->is_asked = false;
}

static void begin(struct rn_responder_ctx *ctx, const struct rn_transfer *t)
{
	struct rn_share *share = &ctx->share;
	struct rn_remote request = {
		.kind = RN_REMOTE_HELP,
		.source_qpn = ctx->source_qpn,
		.dest_qpn = ctx->qpn,
		.key = t->remote[0].key,
		.length = t->total - t->moved,
		.generation = ctx->generation,
		.addr = t->remote[0].addr + t->moved,
		.to = (uintptr_t)t->local[0].at + t->moved,
		.witness = rn_witness_lent(),
	};

	rn_share_begin(ctx, t->moved, t->total - t->moved);
	share->witness = request.witness;
	share->memory = t->local[0].mr;
	share->key = atomic_load(&share->memory->key);
	request.serial = share->serial;
	share->reply.done = answered;
	share->is_asked = true;
	if (rn_peer_request(ctx->peer, &request, sizeof(request), &share->reply)) {
		share->is_asked = false;
		share->is_declined = true; /* and so we take all pieces */
	}
}

/* Copy the piece that was claimed last. */
static enum rn_copied copy_piece(struct rn_responder_ctx *ctx, struct rn_transfer *t)
{
	uint64_t at = ctx->share.base + (uint64_t)(ctx->share.front - 1) * RN_SHARE_PIECE;
	uint64_t length = t->total - at < RN_SHARE_PIECE ? t->total - at : RN_SHARE_PIECE;
	enum rn_copied copied = rn_copy_far(ctx, t, t->local[0].at + at, &t->remote[0], at, length);

	if (copied != RN_COPIED)
		return copied;
	t->moved = at + length;
	return rn_still_there(ctx, t->remote, 1);
}

/* All pieces are taken. */
static enum rn_copied finish(struct rn_responder_ctx *ctx, struct rn_transfer *t)
{
	struct rn_share *share = &ctx->share;
	uint64_t until = rn_now_ns() + PATIENCE_NS;
	enum rn_copied copied;

	while (!rn_share_is_complete(ctx)) {
		if (rn_now_ns() >= until)
			return RN_COPY_SHARED;
		rn_pause();
	}
	/* An owner that has failed its queue pair uses its memory again, even while its engine copies from there. */
	copied = rn_still_there(ctx, t->remote, 1);
	share->is_active = false;
	if (copied != RN_COPIED)
		return copied;
	ctx->count->bytes_cma += t->total - t->moved;
	ctx->count->bytes_shared += t->total - t->moved;
	t->moved = t->total;
	return RN_COPIED;
}

enum rn_copied rn_copy_shared(struct rn_responder_ctx *ctx, struct rn_transfer *t)
{
	struct rn_share *share = &ctx->share;
	enum rn_copied copied = RN_COPIED;

	if (!share->is_active)
		begin(ctx, t);
	for (uint64_t end = t->moved + RN_TURN_BYTES; copied == RN_COPIED && t->moved < end;) {
		switch (rn_share_claim(ctx)) {
		case RN_SHARE_MINE:
			copied = copy_piece(ctx, t);
			break;
		case RN_SHARE_EMPTY:
			return finish(ctx, t);
		case RN_SHARE_LOST: /* who knows what is in place: all over again, alone */
			rn_share_stop(ctx);
			share->is_declined = true;
			t->moved = share->base;
			return RN_COPY_TURN;
		}
	}
	if (copied == RN_COPIED)
		return RN_COPY_TURN;
	rn_share_stop(ctx);
	return copied;
}
