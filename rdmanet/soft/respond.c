/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder.  respond.h says who calls it and what with; view.c what it sees of its queue pair.
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
 * On UC and UD nobody answers: what isn't for this queue pair, or doesn't fit, is dropped as if it had
 * never come.  Only a receive whose own key is bad fails there as well.
 *
 * To move the responder to ERR is its owner's business: we leave a note in `fault`, which makes
 * everybody treat it as ERR, and ring the owner's bell.
 *
 * Long copies are cut: between two pieces busy moves on (an owner that wants to withdraw a key waits
 * for no more than one piece), and life and keys are read again.
 */
#define _GNU_SOURCE
#include <sys/uio.h>

#include "guard.h"
#include "place.h"

enum { PIECE_BYTES = 256 * 1024, ANNOUNCE_BYTES = 4096 };

/* --- memory ---------------------------------------------------------------------------------------------- */

/* Why a range of the responder's can't be had. */
enum reach { REACH_OK, REACH_DENIED, REACH_FAULT, REACH_SEGMENT };

static enum reach map_segment(struct rn_view *view, uint32_t segment, uint64_t offset, struct rn_piece *piece)
{
	if (unlikely(segment != view->segment)) {
		size_t size;
		char *base;

		switch (rn_peer_segment(view->peer, segment, &base, &size, view->waiting)) {
		case RN_SEGMENT_MAPPED:
			break;
		case RN_SEGMENT_ASKED:
			return REACH_SEGMENT;
		case RN_SEGMENT_LOST:
			return REACH_OK; /* like memory without one: piece->far says where it is */
		}
		view->segment = segment;
		view->segment_base = base;
		view->segment_size = size;
	}
	if (offset > view->segment_size || piece->length > view->segment_size - offset)
		return REACH_DENIED; /* the entry contradicts the file */
	piece->at = view->segment_base + offset;
	return REACH_OK;
}

/* Look up a range by the responder's key table. */
static enum reach reach(struct rn_view *view, uint32_t pd, uint32_t key, uint64_t addr, uint32_t length,
			uint32_t access, struct rn_piece *piece)
{
	const struct rn_mr_entry *mr = rn_mr_find(view->mrs, key);
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
		     (qpn && qpn != view->qpn && rn_guarded(RN_GUARD_WINDOW_QP))))
		return REACH_DENIED;
	piece->mr = mr;
	piece->key = key;
	piece->addr = addr;
	piece->length = length;
	piece->at = NULL;
	if (unlikely(kind == RN_MR_NULL))
		at = 0;
	piece->far = base + at;
	if (view->self) {
		piece->at = (char *)(uintptr_t)(base + at);
		if (kind != RN_MR_ON_DEMAND)
			return REACH_OK;
		view->count->syscalls++;
		return rn_mr_probe(base + at, length, access & ~(uint32_t)IBV_ACCESS_REMOTE_READ) ? REACH_OK : REACH_FAULT;
	}
	return kind == RN_MR_SEGMENT ? map_segment(view, READ_ONCE(mr->segment), READ_ONCE(mr->offset) + at, piece) : REACH_OK;
}

/* --- the copy ---------------------------------------------------------------------------------------------- */

enum copied { COPIED, COPY_LOST, COPY_FAULT, COPY_ASKED };

/* One system call moves it. 0, or errno. */
static int copy_far(struct rn_view *view, char *here, const struct rn_piece *piece, uint64_t skip, size_t length,
		    bool to_remote)
{
	while (length) {
		struct iovec local = {here, length}, remote = {(void *)(uintptr_t)(piece->far + skip), length};
		ssize_t moved = to_remote ? process_vm_writev(view->peer->pid, &local, 1, &remote, 1, 0)
					  : process_vm_readv(view->peer->pid, &local, 1, &remote, 1, 0);

		view->count->syscalls++;
		if (moved <= 0)
			return moved ? errno : EFAULT;
		view->count->bytes_cma += moved;
		here += moved;
		skip += moved;
		length -= moved;
	}
	return 0;
}

/* Did the owner's engine refuse what it was asked last? Told once. */
static bool was_refused(struct rn_transfer *t)
{
	bool refused = t->refused;

	t->refused = false;
	return refused;
}

static enum copied ask_owner(struct rn_transfer *t, const struct rn_piece *piece, uint64_t skip, const char *here,
			     uint64_t length)
{
	if (was_refused(t))
		return COPY_FAULT;
	t->ask = (struct rn_remote){
		.kind = t->to_remote ? RN_REMOTE_WRITE : RN_REMOTE_READ,
		.key = piece->key,
		.is_receive = t->is_receive,
		.length = length < RN_REMOTE_CHUNK ? length : RN_REMOTE_CHUNK,
		.addr = piece->addr + skip,
	};
	t->ask_data = here;
	return COPY_ASKED;
}

/* To another odd value: we are inside still, but have forgotten what we looked up. */
static void busy_move_on(struct rn_view *view)
{
	view->busy += 2;
	atomic_exchange(&view->block->busy, view->busy);
}

/* Move on: see the head of this file. Then every key that is yet to be used counts anew. */
static enum copied still_there(struct rn_view *view, const struct rn_piece *pieces, int count)
{
	busy_move_on(view);
	if (!rn_view_is_alive(view))
		return COPY_LOST;
	for (int i = 0; i < count; i++)
		if (atomic_load(&pieces[i].mr->key) != pieces[i].key)
			return COPY_FAULT;
	return COPIED;
}

/* Short, and into memory that can't be mapped: leave it in the slot's room. bounce.c says when that is right. */
static bool bounce(struct rn_view *view, struct rn_transfer *t)
{
	const struct rn_piece *remote = &t->remote[0];
	uint32_t index = view->done & view->rq_mask;
	char *to;

	if (!t->is_receive || view->pool || t->num_remote != 1 || remote->at || t->total > view->rq_bounce || t->moved ||
	    READ_ONCE(t->slot->num_sge) != 1 || READ_ONCE(remote->mr->kind) != RN_MR_USER ||
	    READ_ONCE(remote->mr->access) &
		    (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND))
		return false;
	to = rn_bounce_room(view->rq + ((uint64_t)view->rq_mask + 1) * view->rq_stride, index, view->rq_bounce);
	for (int i = 0; i < t->num_local; i++) {
		memcpy(to, t->local[i].at, t->local[i].length);
		to += t->local[i].length;
	}
	t->moved = t->total;
	t->bounced = true;
	view->count->bytes_bounced += t->total;
	return true;
}

/* Both lists from position t->moved on, run by run. */
static enum copied copy(struct rn_view *view, struct rn_transfer *t)
{
	uint64_t local_skip = t->moved, remote_skip = t->moved;
	int l = 0, r = 0;

	if (bounce(view, t))
		return COPIED;
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
		if (run > PIECE_BYTES)
			run = PIECE_BYTES;
		if (likely(remote->at)) {
			char *there = remote->at + remote_skip;

			if (t->to_remote)
				rn_place_one(there, here, run);
			else
				memmove(here, there, run);
			if (view->self)
				view->count->bytes_local += run;
			else
				view->count->bytes_mapped += run;
		} else {
			int err = view->no_cma ? EPERM : copy_far(view, here, remote, remote_skip, run, t->to_remote);

			if (err == EFAULT)
				return COPY_FAULT;
			if (err == ESRCH)
				return COPY_LOST;
			if (err) {
				view->no_cma = true;
				return ask_owner(t, remote, remote_skip, here, run);
			}
		}
		t->moved += run;
		if ((local_skip += run) == t->local[l].length) {
			local_skip = 0;
			l++;
		}
		if ((remote_skip += run) == remote->length) {
			remote_skip = 0;
			r++;
		}
		if (unlikely(run == PIECE_BYTES)) {
			enum copied there = still_there(view, &t->remote[r], t->num_remote - r);

			if (there != COPIED)
				return there;
		}
	}
	return COPIED;
}

/* --- receives of this process, by private notes: own.h -------------------------------------------------------- */

/* Was the next one of the ring posted, and is it out still? */
static inline bool is_posted(const struct rn_view *view)
{
	uint32_t polled = atomic_load_explicit(&view->owner->rq_polled, memory_order_relaxed);
	uint32_t posted = atomic_load_explicit(&view->owner->rq_posted, memory_order_acquire);

	return view->done - polled < posted - polled;
}

/* The scatter list of the one at hand: how many entries were copied. RN_NOT_POSTED: of a pool, and nobody's. */
static inline uint32_t posted_list(const struct rn_view *view, struct rn_slot_sge *list)
{
	const struct rn_qp *owner = view->owner;
	uint32_t at = view->done & view->rq_mask;
	const struct rn_shadow *shadow;

	if (unlikely(view->pool))
		return rn_pool_posted_list((uint32_t)(view->pool - rn_arena_pool(view->arena, 0)), view->claim.entry,
					   list);
	shadow = &owner->rq_shadow[at];
	return rn_posted_list(shadow->num_sge, shadow->addr, shadow->length, shadow->lkey,
			      owner->rq_lists ? owner->rq_lists + (uint64_t)at * owner->cap.max_recv_sge : NULL, list);
}

/* --- the receive queue --------------------------------------------------------------------------------------- */

/* One from the pool; it stays ours while the message has to wait. */
static struct rn_slot *claim_slot(struct rn_view *view)
{
	struct rn_claim *claim = &view->claim;
	struct rn_slot_sge unused[RN_MAX_SGE];

	if (!claim->entry) {
		if (!rn_claim(view->arena, view->pool, view->name, claim))
			return NULL;
		/* Of this process: one that only a scribbler has posted is gone with that, and counts as none. */
		if (unlikely(view->self && posted_list(view, unused) == RN_NOT_POSTED)) {
			claim->entry = NULL;
			return NULL;
		}
		/* The claim is what keeps the owner from reusing any of it: so only now it counts. */
		if (view->datagram && !rn_view_is_alive(view)) {
			rn_view_give_back(view);
			return NULL;
		}
		view->rq_max_sge = claim->max_sge;
		if (unlikely(claim->low)) {
			rn_view_ring_bell(view);
			rn_claim_rung(view->pool, claim);
		}
	}
	return &claim->entry->slot;
}

void rn_view_give_back(struct rn_view *view)
{
	if (view->claim.entry)
		rn_claim_give_back(view->pool, &view->claim);
}

/* The receive at hand; NULL when none is posted. */
static struct rn_slot *next_slot(struct rn_view *view)
{
	struct rn_slot *slot;

	if (unlikely(view->pool))
		return claim_slot(view);
	slot = rn_view_slot(view, view->done);
	if (unlikely(view->self && !is_posted(view)))
		return NULL;
	return likely(atomic_load_explicit(&slot->turn, memory_order_acquire) == view->done) ? slot : NULL;
}

static void publish(struct rn_view *view, struct rn_slot *slot, const struct rn_request *request,
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
	if (unlikely(view->pool)) {
		if (view->datagram)
			slot->wc_flags |= IBV_WC_GRH | (view->by_ipv4 ? RN_SLOT_IPV4 : 0);
		slot->source_qpn = view->source_qpn;
		slot->destination = view->index;
		rn_claim_finish(view->arena, &view->claim, view->finished);
	} else {
		if (unlikely(view->stamped))
			atomic_store_explicit(rn_slot_stamp(slot, view->rq_stride), rn_now_ns(), memory_order_relaxed);
		atomic_store_explicit(&slot->turn, ++view->done, memory_order_release);
		atomic_store_explicit(&view->block->done, view->done, memory_order_relaxed);
	}
	view->pushed++;
	view->solicited |= status != IBV_WC_SUCCESS || request->send_flags & IBV_SEND_SOLICITED;
	if (length >= ANNOUNCE_BYTES)
		rn_view_announce(view);
}

/* --- what is refused ------------------------------------------------------------------------------------------ */

/* The receive at hand fails here, and the send there. */
static enum ibv_wc_status fail_receive(struct rn_view *view, struct rn_slot *slot, const struct rn_request *request,
				       enum ibv_wc_status here)
{
	if (view->unreliable && here == IBV_WC_LOC_LEN_ERR)
		return IBV_WC_REM_INV_REQ_ERR;
	publish(view, slot, request, here, 0, 0);
	if (here == IBV_WC_LOC_LEN_ERR) {
		rn_view_leave_fault(view, RN_FAULT_REQUEST);
		return IBV_WC_REM_INV_REQ_ERR;
	}
	rn_view_leave_fault(view, RN_FAULT_LOCAL);
	return IBV_WC_REM_OP_ERR;
}

static enum ibv_wc_status deny_request(struct rn_view *view)
{
	if (!view->unreliable)
		rn_view_leave_fault(view, RN_FAULT_REQUEST);
	return IBV_WC_REM_INV_REQ_ERR;
}

static enum ibv_wc_status deny_access(struct rn_view *view)
{
	if (!view->unreliable)
		rn_view_leave_fault(view, RN_FAULT_ACCESS);
	return IBV_WC_REM_ACCESS_ERR;
}

enum ibv_wc_status rn_respond_refuse(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t)
{
	return t->is_receive ? fail_receive(view, t->slot, request, IBV_WC_LOC_PROT_ERR) : deny_access(view);
}

/* --- the requests ----------------------------------------------------------------------------------------------- */

/* Where the receive wants its data. What to answer, or SUCCESS; *reached says more. */
static enum ibv_wc_status receive_pieces(struct rn_view *view, const struct rn_slot *slot, struct rn_transfer *t,
					 enum reach *reached)
{
	struct rn_slot_sge own[RN_MAX_SGE];
	const struct rn_slot_sge *list = unlikely(view->self) ? own : slot->sge;
	uint32_t num_sge = unlikely(view->self) ? posted_list(view, own) : READ_ONCE(slot->num_sge);
	uint64_t left = t->total;

	if (num_sge > view->rq_max_sge)
		return IBV_WC_LOC_QP_OP_ERR;
	for (uint32_t i = 0; i < num_sge && left; i++) {
		uint32_t length = READ_ONCE(list[i].length);

		if (!length)
			continue;
		if (length > left)
			length = left;
		*reached = reach(view, view->rq_pd, READ_ONCE(list[i].lkey), READ_ONCE(list[i].addr), length,
				 IBV_ACCESS_LOCAL_WRITE, &t->remote[t->num_remote++]);
		if (unlikely(*reached != REACH_OK))
			return IBV_WC_LOC_PROT_ERR;
		left -= length;
	}
	return left ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* SEND, with or without immediate data or a key to invalidate. */
static enum rn_wait prepare_send(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				 enum ibv_wc_status *status)
{
	enum reach reached = REACH_OK;
	enum ibv_wc_status here;

	if (unlikely(request->opcode == IBV_WR_SEND_WITH_INV &&
		     !rn_mw_may_invalidate(view->mrs, request->invalidate_rkey, view->pd, view->qpn))) {
		*status = deny_access(view);
		return RN_WAIT_NOT;
	}
	t->slot = next_slot(view);
	if (unlikely(!t->slot)) {
		if (rn_settings.iwarp)
			rn_view_leave_fault(view, RN_FAULT_TERMINATED);
		return RN_WAIT_RNR;
	}
	t->is_receive = t->to_remote = true;
	here = receive_pieces(view, t->slot, t, &reached);
	if (unlikely(here != IBV_WC_SUCCESS)) {
		if (reached == REACH_SEGMENT)
			return RN_WAIT_SEGMENT;
		*status = fail_receive(view, t->slot, request, here);
	}
	return RN_WAIT_NOT;
}

static bool is_permitted(const struct rn_view *view, uint32_t right)
{
	return likely(atomic_load_explicit(&view->facts->access, memory_order_relaxed) & right) &&
	       (right == IBV_ACCESS_REMOTE_WRITE || view->max_dest_rd_atomic);
}

/* The one range that the request names. */
static enum rn_wait prepare_range(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				  uint32_t right, enum ibv_wc_status *status)
{
	t->num_remote = 1;
	switch (reach(view, view->pd, request->rkey, request->remote_addr, t->total, right, &t->remote[0])) {
	case REACH_OK:
		break;
	case REACH_SEGMENT:
		return RN_WAIT_SEGMENT;
	default:
		*status = deny_access(view);
	}
	return RN_WAIT_NOT;
}

/* RDMA WRITE, with or without immediate data, and READ. */
static enum rn_wait prepare_rdma(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				 enum ibv_wc_status *status)
{
	bool is_read = request->opcode == IBV_WR_RDMA_READ;
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;

	t->to_remote = !is_read;
	if (unlikely(!is_permitted(view, right))) {
		*status = deny_request(view);
		return RN_WAIT_NOT;
	}
	if (request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !(t->slot = next_slot(view)))
		return RN_WAIT_RNR;
	if (unlikely(!t->total)) /* without bytes nobody asks for the key */
		return RN_WAIT_NOT;
	return prepare_range(view, request, t, right, status);
}

static enum rn_wait prepare_atomic(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				   enum ibv_wc_status *status)
{
	enum rn_wait wait;
	uint64_t at;

	t->to_remote = false;
	if (unlikely(request->remote_addr % sizeof(uint64_t) || !is_permitted(view, IBV_ACCESS_REMOTE_ATOMIC))) {
		*status = deny_request(view);
		return RN_WAIT_NOT;
	}
	wait = prepare_range(view, request, t, IBV_ACCESS_REMOTE_ATOMIC, status);
	if (wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS)
		return wait;
	at = t->remote[0].at ? (uintptr_t)t->remote[0].at : t->remote[0].far;
	if (unlikely(at % sizeof(uint64_t)))
		*status = deny_request(view); /* aligned by its I/O address, but not in memory */
	return RN_WAIT_NOT;
}

static bool is_atomic(const struct rn_request *request)
{
	return request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

enum rn_wait rn_respond_prepare(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				enum ibv_wc_status *status)
{
	t->num_remote = 0;
	t->slot = NULL;
	t->is_receive = t->bounced = false;
	if (unlikely(view->domain) && !rn_view_name_srq(view, request->srqn)) {
		*status = deny_request(view);
		return RN_WAIT_NOT;
	}
	switch (request->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
		return prepare_send(view, request, t, status);
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
		return prepare_rdma(view, request, t, status);
	default:
		return prepare_atomic(view, request, t, status);
	}
}

void rn_respond_finish(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t)
{
	if (unlikely(request->opcode == IBV_WR_SEND_WITH_INV))
		rn_mw_invalidate((struct rn_mr_entry *)view->mrs, request->invalidate_rkey);
	if (t->slot)
		publish(view, t->slot, request, IBV_WC_SUCCESS, t->total, t->bounced ? RN_SLOT_BOUNCED : 0);
}

uint64_t rn_respond_atomic(const struct rn_request *request, char *at)
{
	uint64_t before = request->compare_add;

	if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return __atomic_fetch_add((uint64_t *)at, before, __ATOMIC_SEQ_CST);
	__atomic_compare_exchange_n((uint64_t *)at, &before, request->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return before;
}

/* Compare-and-swap, fetch-and-add: CPU atomics where the memory is mapped, else by its owner. */
static enum rn_wait execute_atomic(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				   enum ibv_wc_status *status)
{
	const struct rn_piece *target = &t->remote[0];
	uint64_t before;

	if (!target->at) {
		if (was_refused(t)) {
			*status = deny_access(view);
			return RN_WAIT_NOT;
		}
		t->ask = (struct rn_remote){
			.kind = request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? RN_REMOTE_CAS : RN_REMOTE_FAA,
			.key = target->key,
			.length = sizeof(before),
			.addr = request->remote_addr,
			.compare_add = request->compare_add,
			.swap = request->swap,
		};
		t->ask_data = NULL;
		return RN_WAIT_OWNER;
	}
	before = rn_respond_atomic(request, target->at);
	rn_scatter(t->local, t->num_local, 0, (const char *)&before, sizeof(before));
	if (view->self)
		view->count->bytes_local += sizeof(before);
	else
		view->count->bytes_mapped += sizeof(before);
	return RN_WAIT_NOT;
}

enum rn_wait rn_respond(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
			enum ibv_wc_status *status)
{
	enum rn_wait wait;

	if (unlikely(is_atomic(request) && t->moved == t->total))
		return RN_WAIT_NOT; /* the owner's engine did it, the old value is in place */
	wait = rn_respond_prepare(view, request, t, status);
	if (unlikely(wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS))
		return wait;
	if (unlikely(is_atomic(request)))
		return execute_atomic(view, request, t, status);
	switch (copy(view, t)) {
	case COPIED:
		rn_respond_finish(view, request, t);
		return RN_WAIT_NOT;
	case COPY_LOST:
		return RN_WAIT_PEER;
	case COPY_ASKED:
		return RN_WAIT_OWNER;
	default:
		*status = rn_respond_refuse(view, request, t);
		return RN_WAIT_NOT;
	}
}
