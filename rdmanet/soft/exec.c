/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester: finds the responder, reads the work request, and plays the responder's part too.
 *
 *     rn_enter    find the responder's queue pair (once), mark it busy, look whether it still lives
 *     rn_execute  one work request: local checks, then respond.c: checks there, one copy, publish
 *     rn_leave    announce what was published, clear busy
 *
 * Nobody there, or in another state or generation, is silence: the requester's retry budget runs.
 * Everything else is answered; respond.c has the list.  UC has neither budget nor answers: what finds
 * nobody, or is refused, is sent all the same.
 *
 * Busy.  While inside, this code takes no lock that somebody could hold who waits for `busy`, and
 * makes no unbounded wait.  We enter by compare-and-swap from the value we left with: the owner that
 * gives the slot to another pair changes it, so whoever comes late can't touch a word that isn't his
 * any more.
 */
#include "soft.h"
#include "ud.h"

static const uint32_t rnr_delays_us[32] = {
	655360, 10,   20,   30,   40,   60,   80,    120,   160,   240,   320,   480,   640,   960,    1280,   1920,
	2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
};

/* --- in and out -------------------------------------------------------------------------------------------- */

/* False: the slot was reset since we left it, and the word may be another's already. */
static bool busy_begin(struct rn_view *view)
{
	uint32_t idle = view->busy;

	/* Sequentially consistent: the full fence between this and the reading of life. */
	if (unlikely(!atomic_compare_exchange_strong(&view->block->busy, &idle, view->busy + 1)))
		return false;
	view->busy++;
	return true;
}

static void busy_end(struct rn_view *view)
{
	atomic_store_explicit(&view->block->busy, ++view->busy, memory_order_release);
}

/* We should not have come: as it was, since somebody else may be counting. */
static void busy_undo(struct rn_view *view)
{
	atomic_store_explicit(&view->block->busy, --view->busy, memory_order_release);
}

static bool is_for_us(const struct rn_qp *qp)
{
	return atomic_load(&qp->view.facts->dest_qpn) == qp->ex.qp_base.qp_num;
}

/* The responder's block in its owner's arena, by number; NULL when its process hasn't such a port. */
struct rn_qp_block *rn_locate(char *arena, uint32_t qpn)
{
	for (uint32_t group = 0; group < RN_PORTS_MAX; group++)
		if (atomic_load(&rn_arena_head(arena)->ports[group]) == qpn >> 8)
			return rn_arena_qp(arena, group * 256 + (qpn & 0xff));
	return NULL;
}

bool rn_was_abandoned(struct rn_qp *qp)
{
	struct rn_peer *peer = qp->peer;
	struct rn_qp_block *block;

	if (!peer->arena || peer->arena_size < RN_ARENA_SIZE)
		return true;
	block = rn_locate(peer->arena, qp->attr.dest_qp_num);
	return block && rn_life_is_open(atomic_load(&block->life)) &&
	       atomic_load(&block->dest_qpn) == qp->ex.qp_base.qp_num;
}

/* Look for the responder; entered when it is found. */
static enum rn_wait find(struct rn_qp *qp)
{
	uint32_t dest = qp->attr.dest_qp_num;
	struct rn_view *view = &qp->view;
	struct rn_qp_block *block;
	uint32_t index;
	uint64_t life;

	if (unlikely(qp->ud))
		return RN_WAIT_PEER; /* it looks for another with each message */
	switch (atomic_load(&qp->peer->state)) {
	case RN_PEER_SELF:
		index = rn_own_locate(dest);
		if (index == RN_QPS_MAX)
			return RN_WAIT_PEER;
		view->self = true;
		rn_view_aim(view, rn_arena, index, atomic_load(&rn_theirs[index]));
		break;
	case RN_PEER_READY:
		if (qp->peer->arena_size < RN_ARENA_SIZE ||
		    READ_ONCE(rn_arena_head(qp->peer->arena)->magic) != RN_ARENA_MAGIC)
			return RN_WAIT_PEER; /* another version of this library */
		block = rn_locate(qp->peer->arena, dest);
		if (!block)
			return RN_WAIT_PEER;
		view->self = false;
		rn_view_aim(view, qp->peer->arena, (uint32_t)(block - rn_arena_qp(qp->peer->arena, 0)), NULL);
		break;
	case RN_PEER_CONNECTING:
		return qp->link_failed ? RN_WAIT_PEER : RN_WAIT_LINK;
	default:
		return RN_WAIT_PEER;
	}
	/* The words of its peer are ours to write only if it takes us for its peer. */
	life = atomic_load(&view->facts->life);
	if (!rn_life_is_open(life) || atomic_load(&view->facts->qpn) != dest || !is_for_us(qp))
		return RN_WAIT_PEER;
	view->busy = atomic_load(&view->block->busy);
	if (view->busy & 1 || !busy_begin(view))
		return RN_WAIT_PEER; /* a predecessor of ours died in there, as its owner will notice */
	life = atomic_load(&view->facts->life);
	view->generation = life >> 8;
	if (!rn_view_is_alive(view) || !is_for_us(qp) || !rn_view_open(view) ||
	    READ_ONCE(view->facts->rq_psn) != qp->attr.sq_psn) {
		busy_undo(view);
		return RN_WAIT_PEER;
	}
	view->peer = view->self ? NULL : qp->peer;
	view->waiting = view->self ? NULL : &qp->notice;
	view->owner = view->self ? rn_qps[view->index] : NULL; /* who waits for us before it goes */
	view->count = &qp->count;
	view->source_qpn = qp->ex.qp_base.qp_num;
	view->found = true;
	return RN_WAIT_NOT;
}

enum rn_wait rn_enter(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	if (unlikely(!view->found)) {
		enum rn_wait wait = find(qp);

		if (wait == RN_WAIT_PEER && qp->unreliable)
			return RN_WAIT_NOT; /* to send into the void */
		if (wait != RN_WAIT_NOT)
			return wait;
	} else {
		if (unlikely(!busy_begin(view))) {
			view->found = !qp->unreliable;
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_PEER;
		}
		if (unlikely(!rn_view_is_alive(view))) {
			busy_end(view);
			view->found = !qp->unreliable; /* its next life has another generation */
			return qp->unreliable ? RN_WAIT_NOT : RN_WAIT_PEER;
		}
	}
	if (unlikely((atomic_load(&view->facts->life) & 0xff) == IBV_QPS_RTR) &&
	    !atomic_exchange(&view->block->established, 1))
		rn_view_ring_bell(view);
	return RN_WAIT_NOT;
}

void rn_leave(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	if (unlikely(!view->found)) {
		if (view->pushed)
			rn_view_announce(view);
		return;
	}
	if (view->pushed) {
		rn_view_announce(view);
		/* The next receive was posted long ago, as a rule: let its line come meanwhile. */
		__builtin_prefetch(rn_view_slot(view, view->done), 1);
	}
	busy_end(view);
}

void rn_forget_responder(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	if (view->found && unlikely(view->claim.entry) && busy_begin(view)) {
		rn_view_give_back(view);
		busy_end(view);
	}
	view->claim.entry = NULL;
	view->found = false;
}

uint64_t rn_rnr_code_ns(uint8_t code)
{
	return rnr_delays_us[code & 31] * 1000ull;
}

uint64_t rn_rnr_delay_ns(struct rn_qp *qp)
{
	return rn_rnr_code_ns(qp->is_stream ? qp->streams.rnr_timer : atomic_load(&qp->view.facts->min_rnr_timer));
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
		return IBV_WC_LOC_QP_OP_ERR; /* no such request may ever be on its way */
	return wr->opcode != IBV_WR_RDMA_READ && total != sizeof(uint64_t) ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

static enum rn_wait execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
			    enum ibv_wc_status *status, uint32_t *byte_len)
{
	struct rn_request request;
	struct rn_transfer t;
	enum rn_wait wait;

	*status = local_pieces(qp, wr, true, t.local, &t.num_local, &t.total);
	*byte_len = t.total;
	if (likely(*status == IBV_WC_SUCCESS))
		*status = rn_check_request(qp, wr, t.total);
	if (unlikely(*status != IBV_WC_SUCCESS))
		return RN_WAIT_NOT;
	read_request(qp->ex.qp_base.qp_type, wr, &request);
	t.moved = queued_moved ? *queued_moved : 0;
	t.refused = qp->reply_error;
	wait = rn_respond(&qp->view, &request, &t, status);
	if (queued_moved)
		*queued_moved = t.moved;
	if (unlikely(qp->reply_error && !t.refused))
		qp->reply_error = 0;
	/* What isn't queued yet goes there first. */
	if (unlikely(wait == RN_WAIT_OWNER && queued_moved && rn_remote_start(qp, &t.ask, t.ask_data)))
		return RN_WAIT_PEER;
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
		return rn_ud_execute(qp, wr, status, byte_len);
	if (!qp->view.found) {
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
		rn_view_give_back(&qp->view);
	return wait;
}

enum rn_wait rn_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
			enum ibv_wc_status *status, uint32_t *byte_len)
{
	if (unlikely(qp->unreliable))
		return execute_unreliable(qp, wr, queued_moved, status, byte_len);
	return execute(qp, wr, queued_moved, status, byte_len);
}
