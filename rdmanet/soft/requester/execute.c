/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester: finds the responder, reads the work request, and plays the responder's part too.
 *
 *     rn_enter    find the responder's queue pair (once), mark it busy, look whether it still lives
 *     rn_execute  one work request: local checks, then responder/responder.c: checks there, one copy, publish
 *     rn_leave    announce what was published, clear busy
 *
 * If the responder is missing, or in another state or generation, nothing answers: the requester uses up its retries.
 * Everything else is answered; responder/responder.c has the list.  UC has neither budget nor answers: a request that
 * finds nobody, or is refused, counts as sent.
 *
 * Busy.  While inside, this code takes no lock that a thread could hold that waits for `busy`, and
 * makes no unbounded wait.  We enter by compare-and-swap from the value we left with: the owner that
 * gives the slot to another pair changes it, so a latecomer can't touch a word that is no longer its own.
 */
#include "requester/requester.h"

static const uint32_t rnr_delays_us[32] = {
	655360, 10,   20,   30,   40,   60,   80,    120,   160,   240,   320,   480,   640,   960,    1280,   1920,
	2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
};

/* --- in and out -------------------------------------------------------------------------------------------- */

/* False: the slot was reset since we left it, and the word may be another's already. */
static bool busy_begin(struct rn_responder_ctx *ctx)
{
	uint32_t idle = ctx->busy;

	/* Sequentially consistent, as the reading of generation_state and keys is: shm/arena.h. */
	if (unlikely(!atomic_compare_exchange_strong(&ctx->block->busy, &idle, ctx->busy + 1)))
		return false;
	ctx->busy++;
	return true;
}

static void busy_end(struct rn_responder_ctx *ctx)
{
	atomic_store_explicit(&ctx->block->busy, ++ctx->busy, memory_order_release);
}

/* We should not have entered: restore the word, since another process may be counting. */
static void busy_undo(struct rn_responder_ctx *ctx)
{
	atomic_store_explicit(&ctx->block->busy, --ctx->busy, memory_order_release);
}

static bool is_for_us(const struct rn_qp *qp)
{
	return atomic_load(&qp->responder.facts->dest_qpn) == qp->ex.qp_base.qp_num;
}

/* Look for the responder; entered when it is found. */
static enum rn_wait find(struct rn_qp *qp)
{
	uint32_t dest = qp->attr.dest_qp_num;
	struct rn_responder_ctx *ctx = &qp->responder;
	struct rn_qp_block *block;
	uint32_t index;
	uint64_t generation_state;

	if (unlikely(qp->ud))
		return RN_WAIT_PEER; /* it looks for another with each message */
	switch (atomic_load(&qp->peer->state)) {
	case RN_PEER_SELF:
		index = rn_own_locate(dest);
		if (index == RN_QPS_MAX)
			return RN_WAIT_PEER;
		ctx->self = true;
		rn_responder_aim(ctx, rn_arena, index, atomic_load(&rn_theirs[index]));
		break;
	case RN_PEER_READY:
		if (qp->peer->arena_size < RN_ARENA_SIZE ||
		    READ_ONCE(rn_arena_head(qp->peer->arena)->magic) != RN_ARENA_MAGIC)
			return RN_WAIT_PEER; /* another version of this library */
		block = rn_arena_locate(qp->peer->arena, dest);
		if (!block)
			return RN_WAIT_PEER;
		ctx->self = false;
		rn_responder_aim(ctx, qp->peer->arena, (uint32_t)(block - rn_arena_qp(qp->peer->arena, 0)), NULL);
		break;
	case RN_PEER_CONNECTING:
		return qp->link_failed ? RN_WAIT_PEER : RN_WAIT_LINK;
	default:
		return RN_WAIT_PEER;
	}
	/* The words of its peer are ours to write only if it takes us for its peer. */
	generation_state = atomic_load(&ctx->facts->generation_state);
	if (!rn_state_is_open(generation_state) || atomic_load(&ctx->facts->qpn) != dest || !is_for_us(qp))
		return RN_WAIT_PEER;
	ctx->busy = atomic_load(&ctx->block->busy);
	if (ctx->busy & 1 || !busy_begin(ctx))
		return RN_WAIT_PEER; /* a predecessor of ours died in there, as its owner will notice */
	generation_state = atomic_load(&ctx->facts->generation_state);
	ctx->generation = generation_state >> 8;
	if (!rn_responder_is_alive(ctx) || !is_for_us(qp) || !rn_responder_open(ctx) ||
	    READ_ONCE(ctx->facts->rq_psn) != qp->attr.sq_psn) {
		busy_undo(ctx);
		return RN_WAIT_PEER;
	}
	ctx->peer = ctx->self ? NULL : qp->peer;
	ctx->waiting = ctx->self ? NULL : &qp->notice;
	ctx->owner = ctx->self ? rn_qps[ctx->index] : NULL; /* it waits for us before it is destroyed */
	ctx->count = &qp->count;
	ctx->source_qpn = qp->ex.qp_base.qp_num;
	ctx->found = true;
	return RN_WAIT_NOT;
}

enum rn_wait rn_enter(struct rn_qp *qp)
{
	struct rn_responder_ctx *ctx = &qp->responder;

	if (unlikely(!ctx->found)) {
		enum rn_wait wait = find(qp);

		if (wait == RN_WAIT_PEER && qp->unreliable)
			return RN_WAIT_NOT; /* to send into the void */
		if (wait != RN_WAIT_NOT)
			return wait;
	} else {
		if (unlikely(!busy_begin(ctx))) {
			ctx->found = !qp->unreliable;
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_PEER;
		}
		if (unlikely(!rn_responder_is_alive(ctx))) {
			busy_end(ctx);
			ctx->found = !qp->unreliable; /* after its next reset it has another generation */
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_PEER;
		}
	}
	if (unlikely((atomic_load(&ctx->facts->generation_state) & 0xff) == IBV_QPS_RTR) &&
	    !atomic_exchange(&ctx->block->established, 1))
		rn_responder_wake_owner(ctx);
	return RN_WAIT_NOT;
}

void rn_leave(struct rn_qp *qp)
{
	struct rn_responder_ctx *ctx = &qp->responder;

	if (unlikely(!ctx->found)) {
		if (ctx->pushed)
			rn_responder_announce(ctx);
		return;
	}
	if (ctx->pushed) {
		rn_responder_announce(ctx);
		/* The next receive was mostly posted long ago: prefetch its cache line meanwhile. */
		__builtin_prefetch(rn_responder_slot(ctx, ctx->done), 1);
	}
	busy_end(ctx);
}

static void forget_responder(struct rn_qp *qp)
{
	struct rn_responder_ctx *ctx = &qp->responder;

	rn_share_stop(ctx);
	if (ctx->found && unlikely(ctx->claim.entry) && busy_begin(ctx)) {
		rn_responder_give_back(ctx);
		busy_end(ctx);
	}
	ctx->claim.entry = NULL;
	ctx->found = false;
}

uint64_t rn_rnr_code_ns(uint8_t code)
{
	return rnr_delays_us[code & 31] * 1000ull;
}

uint64_t rn_rnr_delay_ns(struct rn_qp *qp)
{
	return rn_rnr_code_ns(qp->uses_tcp ? qp->rnr_timer : atomic_load(&qp->responder.facts->min_rnr_timer));
}

/* --- one work request ------------------------------------------------------------------------------------- */

static inline enum ibv_wc_status local_pieces(struct rn_qp *qp, const struct ibv_send_wr *wr, bool probes,
					      struct rn_piece *pieces, int *count, uint64_t *total)
{
	bool writes = rn_fetches(wr->opcode);
	uint32_t needed = writes ? RN_ACCESS_LOCAL | IBV_ACCESS_LOCAL_WRITE : RN_ACCESS_LOCAL;
	uint64_t sum = 0;
	int n = 0;

	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];
		const struct rn_mr_entry *mr;

		if (!sge->length)
			continue;
		pieces[n].length = sge->length;
		sum += sge->length;
		pieces[n].mr = NULL;
		if (wr->send_flags & IBV_SEND_INLINE) {
			pieces[n++].at = (char *)(uintptr_t)sge->addr;
			continue;
		}
		mr = rn_mr_find(rn_mr_table, sge->lkey);
		if (unlikely(!mr || mr->pd != rn_pd(qp->ex.qp_base.pd)->number ||
			     !rn_mr_covers(mr, sge->addr, sge->length) || (mr->access & needed) != needed))
			return IBV_WC_LOC_PROT_ERR;
		pieces[n].at = (char *)(uintptr_t)(mr->base + (sge->addr - mr->iova));
		pieces[n].mr = mr;
		if (mr->kind == RN_MR_ON_DEMAND && probes) {
			qp->count.syscalls++;
			if (!rn_mr_probe((uintptr_t)pieces[n].at, sge->length, writes))
				return IBV_WC_LOC_PROT_ERR;
		}
		if (unlikely(mr->kind == RN_MR_NULL))
			pieces[n].at = (char *)(uintptr_t)(mr->base + (writes ? 0 : RN_MAX_MESSAGE));
		n++;
	}
	*count = n;
	*total = sum;
	return sum > RN_MAX_MESSAGE ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

enum ibv_wc_status rn_local_pieces(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces, int *count,
				   uint64_t *total)
{
	return local_pieces(qp, wr, true, pieces, count, total);
}

enum ibv_wc_status rn_local_pieces_unprobed(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces,
					    int *count, uint64_t *total)
{
	return local_pieces(qp, wr, false, pieces, count, total);
}

static void read_request(enum ibv_qp_type type, const struct ibv_send_wr *wr, struct rn_request *request)
{
	request->opcode = wr->opcode;
	request->srqn = unlikely(type == IBV_QPT_XRC_SEND) ? wr->qp_type.xrc.remote_srqn : 0;
	request->send_flags = wr->send_flags;
	request->imm_data = wr->imm_data;
	if (unlikely(wr->opcode == IBV_WR_SEND_WITH_INV)) {
		request->invalidate_rkey = wr->invalidate_rkey;
	} else if (wr->opcode >= IBV_WR_ATOMIC_CMP_AND_SWP) {
		request->remote_addr = wr->wr.atomic.remote_addr;
		request->rkey = wr->wr.atomic.rkey;
		request->compare_add = wr->wr.atomic.compare_add;
		request->swap = wr->wr.atomic.swap;
	} else {
		request->remote_addr = wr->wr.rdma.remote_addr;
		request->rkey = wr->wr.rdma.rkey;
	}
}

enum ibv_wc_status rn_check_request(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t total)
{
	if (likely(!rn_fetches(wr->opcode)))
		return IBV_WC_SUCCESS;
	if (unlikely(!qp->attr.max_rd_atomic))
		return IBV_WC_LOC_QP_OP_ERR; /* no READ or atomic may be in flight at all */
	return wr->opcode != IBV_WR_RDMA_READ && total != sizeof(uint64_t) ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

static enum rn_wait execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
			    enum ibv_wc_status *status, uint32_t *byte_len)
{
	struct rn_request request;
	struct rn_transfer t;
	enum rn_wait wait;
	int err;

	*status = local_pieces(qp, wr, true, t.local, &t.num_local, &t.total);
	*byte_len = t.total;
	if (likely(*status == IBV_WC_SUCCESS))
		*status = rn_check_request(qp, wr, t.total);
	if (unlikely(*status != IBV_WC_SUCCESS))
		return RN_WAIT_NOT;
	read_request(qp->ex.qp_base.qp_type, wr, &request);
	t.moved = queued_moved ? *queued_moved : 0;
	t.refused = qp->reply_error;
	t.in_turns = queued_moved != NULL;
	wait = rn_respond(&qp->responder, &request, &t, status);
	if (queued_moved)
		*queued_moved = t.moved;
	if (unlikely(qp->reply_error && !t.refused))
		qp->reply_error = 0;
	/* A request that is not queued yet is queued first. */
	if (unlikely(wait == RN_WAIT_OWNER && queued_moved && (err = rn_remote_start(qp, &t.ask, t.ask_data)))) {
		if (err != EFAULT)
			return RN_WAIT_PEER;
		*status = IBV_WC_LOC_PROT_ERR;
		return RN_WAIT_NOT;
	}
	if (wr->send_flags & IBV_SEND_INLINE && wait == RN_WAIT_NOT)
		qp->count.bytes_inline += t.total;
	return wait;
}

/* Sent, whatever becomes of it: only what is wrong here is an error. */
static enum rn_wait execute_unreliable(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
				       enum ibv_wc_status *status, uint32_t *byte_len)
{
	struct rn_transfer t;
	enum rn_wait wait;

	if (qp->ud)
		return qp->path->execute(qp, wr, status, byte_len);
	if (!qp->responder.found) {
		*status = rn_local_pieces(qp, wr, t.local, &t.num_local, &t.total);
		*byte_len = t.total;
		return RN_WAIT_NOT;
	}
	wait = execute(qp, wr, queued_moved, status, byte_len);
	if (*status == IBV_WC_REM_INV_REQ_ERR || *status == IBV_WC_REM_ACCESS_ERR || *status == IBV_WC_REM_OP_ERR)
		*status = IBV_WC_SUCCESS;
	if (wait == RN_WAIT_RNR || wait == RN_WAIT_PEER)
		wait = RN_WAIT_NOT;
	if (wait == RN_WAIT_NOT)
		rn_responder_give_back(&qp->responder);
	return wait;
}

enum rn_wait rn_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
			enum ibv_wc_status *status, uint32_t *byte_len)
{
	if (unlikely(qp->unreliable))
		return execute_unreliable(qp, wr, queued_moved, status, byte_len);
	return execute(qp, wr, queued_moved, status, byte_len);
}

const struct rn_requester_ops rn_requester_of_qps = {
	.progress = rn_qp_progress,
	.forget_responder = forget_responder,
	.take_turn = rn_cq_take_turn,
	.help = rn_help_ran,
};
