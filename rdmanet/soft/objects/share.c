/* SPDX-License-Identifier: Apache-2.0 */
/* A long READ that both processes carry: who has which piece.  share.h has the theory. */
#include "objects/share.h"

#include <sched.h>
#include <time.h>

#include "base/engine.h"
#include "base/process.h"
#include "base/witness.h"
#include "objects/quiesce.h"
#include "objects/responder_ctx.h"

/* --- the requester --------------------------------------------------------------------------------------------- */

void rn_share_begin(struct rn_responder_ctx *ctx, uint64_t base, uint64_t length)
{
	static _Atomic uint32_t serials;
	struct rn_share *share = &ctx->share;
	uint32_t unset = 0;

	/* Other processes share with the same owner, in slots that may have been ours. */
	atomic_compare_exchange_strong(&serials, &unset, (uint32_t)(rn_now_ns() >> 10) | 1);
	share->serial = atomic_fetch_add(&serials, 2);
	share->base = base;
	share->pieces = share->back = (uint32_t)((length + RN_SHARE_PIECE - 1) / RN_SHARE_PIECE);
	share->front = 0;
	share->is_active = true;
	atomic_store(&ctx->block->shared, rn_share_word(share->serial, 0, share->pieces));
}

/* The word, if it can be true. */
static bool look(struct rn_responder_ctx *ctx, uint64_t *word)
{
	struct rn_share *share = &ctx->share;

	*word = atomic_load(&ctx->block->shared);
	if (rn_share_serial(*word) != share->serial || rn_share_front(*word) != share->front ||
	    rn_share_back(*word) < share->front || rn_share_back(*word) > share->pieces)
		return false;
	share->back = rn_share_back(*word);
	return true;
}

enum rn_share_claim rn_share_claim(struct rn_responder_ctx *ctx)
{
	struct rn_share *share = &ctx->share;
	uint64_t word;

	for (;;) {
		if (!look(ctx, &word))
			return RN_SHARE_LOST;
		if (share->front == share->back)
			return RN_SHARE_EMPTY;
		if (atomic_compare_exchange_strong(&ctx->block->shared, &word,
						   rn_share_word(share->serial, share->front + 1, share->back))) {
			share->front++;
			return RN_SHARE_MINE;
		}
	}
}

/* Are so many of the owner's pieces in place? */
static bool has_given(const struct rn_responder_ctx *ctx, uint32_t count)
{
	uint64_t given = count ? atomic_load(&ctx->block->given) : 0;

	return !count || (rn_share_serial(given) == ctx->share.serial && (uint32_t)given >= count);
}

/* Has the owner reset its queue pair? It has let go of everything then, and its words may be another's. */
static bool has_parted(const struct rn_responder_ctx *ctx)
{
	return atomic_load(&ctx->facts->generation_state) >> 8 != ctx->generation;
}

bool rn_share_is_complete(const struct rn_responder_ctx *ctx)
{
	return has_given(ctx, ctx->share.pieces - ctx->share.back);
}

/* Wait until the owner has let go of all its pieces, for so long. False: it has not. */
static bool wait_for_owner(struct rn_responder_ctx *ctx, uint32_t count, uint64_t limit_ns, bool even_stopped)
{
	enum { SOON_NS = 100 * 1000, NAP_NS = 200 * 1000 };
	uint64_t began = rn_now_ns(), now = began;

	for (; !has_given(ctx, count) && !has_parted(ctx); now = rn_now_ns()) {
		enum rn_life life;

		if (now - began < SOON_NS) {
			sched_yield();
			continue;
		}
		life = atomic_load(&ctx->peer->state) == RN_PEER_DEAD ? RN_LIFE_OVER : rn_process_life(ctx->peer->pid);
		if (life == RN_LIFE_OVER)
			return true;
		if ((life == RN_LIFE_STOPPED && !even_stopped) || now - began > limit_ns)
			return false;
		nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
	}
	return true;
}

void rn_share_stop(struct rn_responder_ctx *ctx)
{
	struct rn_share *share = &ctx->share;
	uint32_t count;
	uint64_t word;

	if (!share->is_active)
		return;
	share->is_active = false;
	while (look(ctx, &word))
		if (atomic_compare_exchange_strong(&ctx->block->shared, &word, 0))
			break;
	/* If the word was scribbled over, the owner takes nothing by it, but may have before. */
	count = share->pieces - share->back;
	if (wait_for_owner(ctx, count, RN_QUIESCE_WINDOW_MS * 1000000ull, false))
		return;
	rn_witness_recall(share->witness);
	/* The first thread of a stopped process stands still before the others, which end their calls. */
	wait_for_owner(ctx, count, RN_SHARE_UNDERWAY_NS, true);
}

void rn_share_stop_withdrawn(struct rn_responder_ctx *ctx)
{
	const struct rn_share *share = &ctx->share;

	if (share->is_active && (!share->key || atomic_load(&share->memory->key) != share->key))
		rn_share_stop(ctx);
}

/* --- the owner --------------------------------------------------------------------------------------------------- */

bool rn_share_take(struct rn_qp_block *block, uint32_t serial, uint32_t *piece)
{
	uint64_t word = atomic_load(&block->shared);
	uint32_t front, back;

	do {
		front = rn_share_front(word);
		back = rn_share_back(word);
		if (rn_share_serial(word) != serial || front >= back)
			return false;
	} while (!atomic_compare_exchange_weak(&block->shared, &word, rn_share_word(serial, front, back - 1)));
	*piece = back - 1;
	return true;
}

bool rn_share_put_back(struct rn_qp_block *block, uint32_t serial, uint32_t piece)
{
	uint64_t word = atomic_load(&block->shared);

	do {
		if (rn_share_serial(word) != serial || rn_share_back(word) != piece)
			return false;
	} while (!atomic_compare_exchange_weak(&block->shared, &word,
					       rn_share_word(serial, rn_share_front(word), piece + 1)));
	return true;
}
