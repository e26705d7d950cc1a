/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder: executes WRITEs, READs, SENDs and atomics at their target.  responder.h says who calls it, and how;
 * ctx.c is its view of its queue pair.  `reach` checks a remote key.  For what comes by TCP only the checks are made
 * here; tcp/serve.c puts the bytes in their place.
 *
 * Its checks are made on the owner's arena, in the order in which an adapter makes them, and
 * their outcome is what an adapter would answer:
 *
 *     no receive posted                          RNR NAK
 *     operation not permitted, misaligned        NAK invalid request: REM_INV_REQ_ERR there, and the
 *       atomic, longer than the receive          responder goes to ERR with event QP_REQ_ERR
 *     bad key, bounds or rights of the region    NAK access: REM_ACCESS_ERR, event QP_ACCESS_ERR
 *     receive buffer with a bad lkey             LOC_PROT_ERR here, REM_OP_ERR there
 *
 * On UC and UD there are no answers: what is not for this queue pair, or does not fit, is dropped as if it
 * had never come.  Only a receive whose own key is bad fails there as well.
 *
 * Only the owner may move the responder to ERR.  We leave a note in `fault`; from then on every requester treats
 * the responder as being in ERR.  Then we wake the owner's engine.
 */
#include "base/extras.h"
#include "base/guard.h"
#include "objects/eager.h"
#include "objects/mw.h"
#include "responder/inside.h"
#include "responder/stream.h"

enum { ANNOUNCE_BYTES = 4096 };

/* --- memory ---------------------------------------------------------------------------------------------- */

/* Why a range of the responder's memory can't be used. */
enum reach { REACH_OK, REACH_DENIED, REACH_FAULT, REACH_SEGMENT };

static enum reach map_segment(struct rn_responder_ctx *ctx, uint32_t segment, uint64_t offset, uint64_t length, char **at)
{
	if (unlikely(segment != ctx->segment)) {
		size_t size;
		char *base;

		switch (rn_peer_segment(ctx->peer, segment, &base, &size, ctx->waiting)) {
		case RN_SEGMENT_MAPPED:
			break;
		case RN_SEGMENT_ASKED:
			return REACH_SEGMENT;
		case RN_SEGMENT_LOST:
			return REACH_OK; /* like memory without one: piece->far says where it is */
		}
		ctx->segment = segment;
		ctx->segment_base = base;
		ctx->segment_size = size;
	}
	if (offset > ctx->segment_size || length > ctx->segment_size - offset)
		return REACH_DENIED; /* the entry contradicts the file */
	*at = ctx->segment_base + offset;
	return REACH_OK;
}

/* Look up a range by the responder's key table. */
static enum reach reach(struct rn_responder_ctx *ctx, uint32_t pd, uint32_t key, uint64_t addr, uint32_t length,
			uint32_t access, struct rn_piece *piece)
{
	const struct rn_mr_entry *mr = rn_mr_find(ctx->mrs, key);
	uint64_t iova, at, size, base;
	uint32_t kind, qpn;

	if (unlikely(!mr || READ_ONCE(mr->pd) != pd || (READ_ONCE(mr->access) & access) != access))
		return REACH_DENIED;
	iova = READ_ONCE(mr->iova);
	size = READ_ONCE(mr->length);
	base = READ_ONCE(mr->base);
	kind = READ_ONCE(mr->kind);
	qpn = READ_ONCE(mr->qpn);
	at = addr - iova;
	if (unlikely(addr < iova || length > size || at > size - length ||
		     (qpn && qpn != ctx->qpn && rn_guarded(RN_GUARD_WINDOW_QP))))
		return REACH_DENIED;
	piece->mr = mr;
	piece->key = key;
	piece->addr = addr;
	piece->length = length;
	piece->at = NULL;
	if (unlikely(kind == RN_MR_NULL))
		at = 0;
	piece->far = base + at;
	if (ctx->self) {
		piece->at = (char *)(uintptr_t)(base + at);
		if (kind != RN_MR_ON_DEMAND)
			return REACH_OK;
		ctx->count->syscalls++;
		return rn_mr_probe(base + at, length, access & ~(uint32_t)IBV_ACCESS_REMOTE_READ) ? REACH_OK : REACH_FAULT;
	}
	if (kind != RN_MR_SEGMENT)
		return REACH_OK;
	return map_segment(ctx, READ_ONCE(mr->segment), READ_ONCE(mr->offset) + at, length, &piece->at);
}

/* --- receives of this process, by private notes: shm/own.h -------------------------------------------------------- */

/* Was the next one of the ring posted, and not completed yet? */
static inline bool is_posted(const struct rn_responder_ctx *ctx)
{
	uint32_t polled = atomic_load_explicit(&ctx->owner->rq_polled, memory_order_relaxed);
	uint32_t posted = atomic_load_explicit(&ctx->owner->rq_posted, memory_order_acquire);

	return ctx->done - polled < posted - polled;
}

/* Copy the scatter list of the current receive; returns how many entries. RN_NOT_POSTED: one of a pool that is not
 * posted. */
static inline uint32_t posted_list(const struct rn_responder_ctx *ctx, struct rn_slot_sge *list)
{
	const struct rn_qp *owner = ctx->owner;
	uint32_t at = ctx->done & ctx->rq_mask;
	const struct rn_shadow *shadow;

	if (unlikely(ctx->pool))
		return rn_responder_pool_list(ctx, list);
	shadow = &owner->rq_shadow[at];
	return rn_posted_list(shadow->num_sge, shadow->addr, shadow->length, shadow->lkey,
			      owner->rq_lists ? owner->rq_lists + (uint64_t)at * owner->cap.max_recv_sge : NULL, list);
}

/* --- the receive queue --------------------------------------------------------------------------------------- */

/* The current receive; NULL if none is posted. */
static struct rn_slot *next_slot(struct rn_responder_ctx *ctx)
{
	struct rn_slot *slot;

	if (unlikely(ctx->pool))
		return rn_responder_claim(ctx);
	slot = rn_responder_slot(ctx, ctx->done);
	if (unlikely(ctx->self && !is_posted(ctx)))
		return NULL;
	return likely(atomic_load_explicit(&slot->owner_sequence, memory_order_acquire) == ctx->done) ? slot : NULL;
}

static void publish(struct rn_responder_ctx *ctx, struct rn_slot *slot, const struct rn_request *request,
		    enum ibv_wc_status status, uint32_t length, uint8_t flags)
{
	bool has_imm = request->opcode == IBV_WR_SEND_WITH_IMM || request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	bool has_inv = request->opcode == IBV_WR_SEND_WITH_INV;

	slot->byte_len = length;
	slot->imm_data = unlikely(has_inv) ? request->invalidate_rkey : request->imm_data;
	slot->status = status;
	slot->opcode = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
	slot->wc_flags = flags | (has_imm ? IBV_WC_WITH_IMM : has_inv ? IBV_WC_WITH_INV : 0);
	slot->vendor_err = 0;
	if (unlikely(ctx->pool)) {
		if (ctx->datagram)
			slot->wc_flags |= IBV_WC_GRH | (ctx->by_ipv4 ? RN_SLOT_IPV4 : 0);
		slot->source_qpn = ctx->source_qpn;
		slot->destination = ctx->index;
		rn_recv_claim_finish(ctx->arena, &ctx->claim, ctx->finished);
	} else {
		if (unlikely(ctx->stamped))
			atomic_store_explicit(rn_slot_stamp(slot, ctx->rq_stride), rn_now_ns(), memory_order_relaxed);
		atomic_store_explicit(&slot->owner_sequence, ++ctx->done, memory_order_release);
		atomic_store_explicit(&ctx->block->done, ctx->done, memory_order_relaxed);
	}
	ctx->pushed++;
	ctx->solicited |= status != IBV_WC_SUCCESS || request->send_flags & IBV_SEND_SOLICITED;
	if (length >= ANNOUNCE_BYTES)
		rn_responder_announce(ctx);
}

/* --- what is refused ------------------------------------------------------------------------------------------ */

/* The current receive fails here, and the send there. */
static enum ibv_wc_status fail_receive(struct rn_responder_ctx *ctx, struct rn_slot *slot, const struct rn_request *request,
				       enum ibv_wc_status here)
{
	if (ctx->unreliable && here == IBV_WC_LOC_LEN_ERR)
		return IBV_WC_REM_INV_REQ_ERR;
	publish(ctx, slot, request, here, 0, 0);
	if (here == IBV_WC_LOC_LEN_ERR) {
		rn_responder_leave_fault(ctx, RN_FAULT_REQUEST);
		return IBV_WC_REM_INV_REQ_ERR;
	}
	rn_responder_leave_fault(ctx, RN_FAULT_LOCAL);
	return IBV_WC_REM_OP_ERR;
}

static enum ibv_wc_status deny_request(struct rn_responder_ctx *ctx)
{
	if (!ctx->unreliable)
		rn_responder_leave_fault(ctx, RN_FAULT_REQUEST);
	return IBV_WC_REM_INV_REQ_ERR;
}

enum ibv_wc_status rn_deny_access(struct rn_responder_ctx *ctx)
{
	if (!ctx->unreliable)
		rn_responder_leave_fault(ctx, RN_FAULT_ACCESS);
	return IBV_WC_REM_ACCESS_ERR;
}

enum ibv_wc_status rn_respond_refuse(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t)
{
	return t->is_receive ? fail_receive(ctx, t->slot, request, IBV_WC_LOC_PROT_ERR) : rn_deny_access(ctx);
}

/* --- the requests ----------------------------------------------------------------------------------------------- */

/* Find where the receive wants its data. The answer to give, or SUCCESS; *reached says more. */
static enum ibv_wc_status receive_pieces(struct rn_responder_ctx *ctx, const struct rn_slot *slot, struct rn_transfer *t,
					 enum reach *reached)
{
	struct rn_slot_sge own[RN_MAX_SGE];
	const struct rn_slot_sge *list = unlikely(ctx->self) ? own : slot->sge;
	uint32_t num_sge = unlikely(ctx->self) ? posted_list(ctx, own) : READ_ONCE(slot->num_sge);
	uint64_t left = t->total;

	if (num_sge > ctx->rq_max_sge)
		return IBV_WC_LOC_QP_OP_ERR;
	for (uint32_t i = 0; i < num_sge && left; i++) {
		uint32_t length = READ_ONCE(list[i].length);

		if (!length)
			continue;
		if (length > left)
			length = left;
		*reached = reach(ctx, ctx->rq_pd, READ_ONCE(list[i].lkey), READ_ONCE(list[i].addr), length,
				 IBV_ACCESS_LOCAL_WRITE, &t->remote[t->num_remote++]);
		if (unlikely(*reached != REACH_OK))
			return IBV_WC_LOC_PROT_ERR;
		left -= length;
	}
	return left ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* SEND, with or without immediate data or a key to invalidate. */
static enum rn_wait prepare_send(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				 enum ibv_wc_status *status)
{
	enum reach reached = REACH_OK;
	enum ibv_wc_status here;

	if (unlikely(request->opcode == IBV_WR_SEND_WITH_INV &&
		     !rn_mw_may_invalidate(ctx->mrs, request->invalidate_rkey, ctx->pd, ctx->qpn))) {
		*status = rn_deny_access(ctx);
		return RN_WAIT_NOT;
	}
	t->slot = next_slot(ctx);
	if (unlikely(!t->slot)) {
		if (rn_settings.iwarp)
			rn_responder_leave_fault(ctx, RN_FAULT_TERMINATED);
		return RN_WAIT_RNR;
	}
	t->is_receive = t->to_remote = true;
	here = receive_pieces(ctx, t->slot, t, &reached);
	if (unlikely(here != IBV_WC_SUCCESS)) {
		if (reached == REACH_SEGMENT)
			return RN_WAIT_SEGMENT;
		*status = fail_receive(ctx, t->slot, request, here);
	}
	return RN_WAIT_NOT;
}

static bool is_permitted(const struct rn_responder_ctx *ctx, uint32_t right)
{
	return likely(atomic_load_explicit(&ctx->facts->access, memory_order_relaxed) & right) &&
	       (right == IBV_ACCESS_REMOTE_WRITE || ctx->max_dest_rd_atomic);
}

/* The one range that the request names. */
static enum rn_wait prepare_range(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				  uint32_t right, enum ibv_wc_status *status)
{
	t->num_remote = 1;
	switch (reach(ctx, ctx->pd, request->rkey, request->remote_addr, t->total, right, &t->remote[0])) {
	case REACH_OK:
		break;
	case REACH_SEGMENT:
		return RN_WAIT_SEGMENT;
	default:
		*status = rn_deny_access(ctx);
	}
	return RN_WAIT_NOT;
}

bool rn_respond_region(struct rn_responder_ctx *ctx, bool is_read, uint32_t rkey, struct rn_region *region)
{
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE, kind, qpn;
	const struct rn_mr_entry *mr = rn_mr_find(ctx->mrs, rkey);

	region->key = 0;
	if (!is_permitted(ctx, right) || !mr || READ_ONCE(mr->pd) != ctx->pd || !(READ_ONCE(mr->access) & right))
		return false;
	region->iova = READ_ONCE(mr->iova);
	region->length = READ_ONCE(mr->length);
	region->at = NULL;
	kind = READ_ONCE(mr->kind);
	qpn = READ_ONCE(mr->qpn);
	if (qpn && qpn != ctx->qpn && rn_guarded(RN_GUARD_WINDOW_QP))
		return false;
	if (ctx->self && (kind == RN_MR_USER || kind == RN_MR_SEGMENT))
		region->at = (char *)(uintptr_t)READ_ONCE(mr->base);
	else if (!ctx->self && kind == RN_MR_SEGMENT &&
		 map_segment(ctx, READ_ONCE(mr->segment), READ_ONCE(mr->offset), region->length, &region->at) != REACH_OK)
		return false;
	if (region->at)
		region->key = rkey;
	return region->key;
}

bool rn_respond_range(struct rn_responder_ctx *ctx, bool is_read, uint32_t rkey, uint64_t addr, uint32_t length,
		      struct rn_piece *piece)
{
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;

	return is_permitted(ctx, right) && reach(ctx, ctx->pd, rkey, addr, length, right, piece) == REACH_OK;
}

/* RDMA WRITE, with or without immediate data, and READ. */
static enum rn_wait prepare_rdma(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				 enum ibv_wc_status *status)
{
	bool is_read = request->opcode == IBV_WR_RDMA_READ;
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;

	t->to_remote = !is_read;
	/* Within one process the two may overlap. */
	t->is_large = !ctx->self && (t->total >= RN_STREAM_BYTES || request->send_flags & rdmanet_soft_send_of_much);
	if (unlikely(!is_permitted(ctx, right))) {
		*status = deny_request(ctx);
		return RN_WAIT_NOT;
	}
	if (request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !(t->slot = next_slot(ctx)))
		return RN_WAIT_RNR;
	if (unlikely(!t->total)) /* without bytes the key does not matter */
		return RN_WAIT_NOT;
	return prepare_range(ctx, request, t, right, status);
}

static enum rn_wait prepare_atomic(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				   enum ibv_wc_status *status)
{
	enum rn_wait wait;
	uint64_t at;

	t->to_remote = false;
	if (unlikely(request->remote_addr % sizeof(uint64_t) || !is_permitted(ctx, IBV_ACCESS_REMOTE_ATOMIC))) {
		*status = deny_request(ctx);
		return RN_WAIT_NOT;
	}
	wait = prepare_range(ctx, request, t, IBV_ACCESS_REMOTE_ATOMIC, status);
	if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
		return wait;
	at = t->remote[0].at ? (uintptr_t)t->remote[0].at : t->remote[0].far;
	if (unlikely(at % sizeof(uint64_t)))
		*status = deny_request(ctx); /* aligned by its I/O address, but not in memory */
	return RN_WAIT_NOT;
}

static bool is_atomic(const struct rn_request *request)
{
	return request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

enum rn_wait rn_respond_prepare(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				enum ibv_wc_status *status)
{
	t->num_remote = 0;
	t->slot = NULL;
	t->is_receive = t->is_eager = t->is_large = false;
	if (unlikely(ctx->domain) && !rn_responder_name_srq(ctx, request->srqn)) {
		*status = deny_request(ctx);
		return RN_WAIT_NOT;
	}
	switch (request->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
		return prepare_send(ctx, request, t, status);
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
		return prepare_rdma(ctx, request, t, status);
	default:
		return prepare_atomic(ctx, request, t, status);
	}
}

void rn_respond_finish(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t)
{
	if (unlikely(request->opcode == IBV_WR_SEND_WITH_INV))
		rn_mw_invalidate((struct rn_mr_entry *)ctx->mrs, request->invalidate_rkey);
	if (t->slot)
		publish(ctx, t->slot, request, IBV_WC_SUCCESS, t->total, t->is_eager ? RN_SLOT_EAGER : 0);
}

enum rn_wait rn_respond(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
			enum ibv_wc_status *status)
{
	enum rn_wait wait;

	if (unlikely(is_atomic(request) && t->moved == t->total))
		return RN_WAIT_NOT; /* the owner's engine did it, the old value is in place */
	wait = rn_respond_prepare(ctx, request, t, status);
	if (unlikely(wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS))
		return wait;
	if (unlikely(is_atomic(request)))
		return rn_execute_atomic(ctx, request, t, status);
	switch (rn_copy(ctx, t)) {
	case RN_COPIED:
		rn_respond_finish(ctx, request, t);
		return RN_WAIT_NOT;
	case RN_COPY_LOST:
		return RN_WAIT_PEER;
	case RN_COPY_ASKED:
		return RN_WAIT_OWNER;
	case RN_COPY_TURN:
		return RN_WAIT_TURN;
	case RN_COPY_SHARED:
		return RN_WAIT_SHARED;
	case RN_COPY_LOCAL_FAULT: /* the responder has noticed nothing but a message without end */
		*status = IBV_WC_LOC_PROT_ERR;
		return RN_WAIT_NOT;
	default:
		*status = rn_respond_refuse(ctx, request, t);
		return RN_WAIT_NOT;
	}
}
