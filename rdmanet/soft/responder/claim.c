/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Receives from a pool, which many senders share: shm/pool.h.
 *
 * A claimed receive stays ours while its message has to wait, and is given back if the message will not be finished.
 */
#include "responder/inside.h"

uint32_t rn_responder_pool_list(const struct rn_responder_ctx *ctx, struct rn_slot_sge *list)
{
	return rn_pool_posted_list((uint32_t)(ctx->pool - rn_arena_pool(ctx->arena, 0)), ctx->claim.entry, list);
}

struct rn_slot *rn_responder_claim(struct rn_responder_ctx *ctx)
{
	struct rn_recv_claim *claim = &ctx->claim;
	struct rn_slot_sge unused[RN_MAX_SGE];

	if (!claim->entry) {
		if (!rn_recv_claim(ctx->arena, ctx->pool, ctx->name, claim))
			return NULL;
		/* In this process: a receive that was posted only by scribbling is lost, and counts as none. */
		if (unlikely(ctx->self && rn_responder_pool_list(ctx, unused) == RN_NOT_POSTED)) {
			claim->entry = NULL;
			return NULL;
		}
		/* The claim keeps the owner from reusing the entry, so only now its contents can be trusted. */
		if (ctx->datagram && !rn_responder_is_alive(ctx)) {
			rn_responder_give_back(ctx);
			return NULL;
		}
		ctx->rq_max_sge = claim->max_sge;
		if (unlikely(claim->low)) {
			rn_responder_wake_owner(ctx);
			rn_recv_claim_woke(ctx->pool, claim);
		}
	}
	return &claim->entry->slot;
}

void rn_responder_give_back(struct rn_responder_ctx *ctx)
{
	if (ctx->claim.entry)
		rn_recv_claim_give_back(ctx->pool, &ctx->claim);
}
