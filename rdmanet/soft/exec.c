/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Execution: the requester, then the responder, both played by whoever runs this.
 *
 *     rn_enter    find the responder's queue pair (once), mark it busy, look whether it still lives
 *     rn_execute  one work request: local checks, responder's checks, one copy, publish
 *     rn_leave    announce what was published, clear busy
 *
 * The responder's checks are made on its arena, in the order in which an adapter makes them, and
 * their outcome is what an adapter would answer:
 *
 *     nobody there, wrong state or generation    silence: the requester's retry budget runs
 *     no receive posted                          RNR NAK
 *     operation not permitted, misaligned        NAK invalid request: REM_INV_REQ_ERR here, and the
 *       atomic, longer than the receive          responder goes to ERR with event QP_REQ_ERR
 *     bad key, bounds or rights of the region    NAK access: REM_ACCESS_ERR, event QP_ACCESS_ERR
 *     receive buffer with a bad lkey             LOC_PROT_ERR there, REM_OP_ERR here
 *
 * We can't move the responder to ERR, that is its owner's business: we leave a note in `fault`,
 * which makes everybody treat it as ERR, and ring the owner's bell.
 *
 * Busy.  While inside, this code takes no lock that somebody could hold who waits for `busy`, and
 * makes no unbounded wait.  Long copies are cut: between two pieces busy moves on (an owner that
 * wants to withdraw a key waits for no more than one piece), and life and keys are read again.
 * We enter by compare-and-swap from the value we left with: the owner that gives the slot to another
 * pair changes it, so whoever comes late can't touch a word that isn't his any more.
 *
 * What WRITE promises to those who poll memory: the last bytes of a message are stored last, and an
 * aligned write of eight bytes is one store.
 */
#define _GNU_SOURCE
#include <sys/uio.h>

#include "soft.h"

enum { PIECE_BYTES = 256 * 1024, ANNOUNCE_BYTES = 4096 };

static const uint32_t rnr_delays_us[32] = {
	655360, 10,   20,   30,   40,   60,   80,    120,   160,   240,   320,   480,   640,   960,    1280,   1920,
	2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
};

/* --- finding the responder ------------------------------------------------------------------------------ */

static struct rn_peer *far_peer(const struct rn_qp *qp)
{
	return qp->view.self ? NULL : qp->peer;
}

static void ring_bell(struct rn_qp *qp)
{
	if (qp->view.self)
		rn_channel_signal(RN_CHANNEL_BELL);
	else
		rn_peer_signal(qp->peer, RN_CHANNEL_BELL);
	qp->count.wakeups++;
	qp->count.syscalls++;
}

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

/* To another odd value: we are inside still, but have forgotten what we looked up. */
static void busy_move_on(struct rn_view *view)
{
	view->busy += 2;
	atomic_exchange(&view->block->busy, view->busy);
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
	return atomic_load(&qp->view.block->dest_qpn) == qp->ex.qp_base.qp_num;
}

static bool is_open(uint64_t life)
{
	uint8_t state = life & 0xff;

	return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD;
}

/* Still the one we found, and nobody has left a note? */
static bool is_alive(const struct rn_view *view)
{
	uint64_t life = atomic_load(&view->block->life);

	return likely(life >> 8 == view->generation && is_open(life) &&
		      atomic_load_explicit(&view->block->fault, memory_order_relaxed) == RN_FAULT_NONE);
}

/* What the block says about itself, read once, checked, kept. False: it makes no sense. */
static bool read_block(struct rn_view *view, const struct rn_qp_block *block)
{
	uint64_t offset = READ_ONCE(block->rq_offset);
	uint32_t size = READ_ONCE(block->rq_size), stride = READ_ONCE(block->rq_stride);
	uint32_t max_sge = READ_ONCE(block->rq_max_sge), cq = READ_ONCE(block->cq), bit = READ_ONCE(block->cq_bit);

	if (size < 2 || size & (size - 1) || size > RN_MAX_QP_WR || stride % 64 || max_sge > RN_MAX_SGE ||
	    stride < sizeof(struct rn_slot) + max_sge * sizeof(struct rn_slot_sge) || stride > 4096 ||
	    offset < RN_ARENA_HEAP || offset % 64 || offset > RN_ARENA_SIZE ||
	    (uint64_t)size * stride > RN_ARENA_SIZE - offset || cq >= RN_CQS_MAX || bit >= RN_CQ_QPS_MAX)
		return false;
	view->rq = view->arena + offset;
	view->rq_mask = size - 1;
	view->rq_stride = stride;
	view->rq_max_sge = max_sge;
	view->cq = rn_arena_cq(view->arena, cq);
	view->dirty = &view->cq->dirty[bit / 64];
	view->dirty_bit = 1ull << bit % 64;
	view->summary_bit = 1ull << bit / 64;
	view->pd = READ_ONCE(block->pd);
	view->max_dest_rd_atomic = READ_ONCE(block->max_dest_rd_atomic);
	return true;
}

/* The responder's block in its owner's arena, by number; NULL when its process hasn't such a port. */
static struct rn_qp_block *locate(char *arena, uint32_t qpn)
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
	block = locate(peer->arena, qp->attr.dest_qp_num);
	return block && is_open(atomic_load(&block->life)) &&
	       atomic_load(&block->dest_qpn) == qp->ex.qp_base.qp_num;
}

/* Look for the responder; entered when it is found. */
static enum rn_wait find(struct rn_qp *qp)
{
	uint32_t dest = qp->attr.dest_qp_num;
	struct rn_view *view = &qp->view;
	struct rn_qp_block *block;
	uint64_t life;

	switch (atomic_load(&qp->peer->state)) {
	case RN_PEER_SELF:
		view->self = true;
		view->arena = rn_arena;
		view->mrs = rn_mr_table;
		break;
	case RN_PEER_READY:
		if (qp->peer->arena_size < RN_ARENA_SIZE ||
		    READ_ONCE(rn_arena_head(qp->peer->arena)->magic) != RN_ARENA_MAGIC)
			return RN_WAIT_PEER; /* another version of this library */
		view->self = false;
		view->arena = qp->peer->arena;
		view->mrs = rn_arena_mrs(view->arena);
		break;
	case RN_PEER_CONNECTING:
		return qp->link_failed ? RN_WAIT_PEER : RN_WAIT_LINK;
	default:
		return RN_WAIT_PEER;
	}
	block = locate(view->arena, dest);
	if (!block)
		return RN_WAIT_PEER;
	view->block = block;

	/* The words of its peer are ours to write only if it takes us for its peer. */
	life = atomic_load(&block->life);
	if (!is_open(life) || atomic_load(&block->qpn) != dest || !is_for_us(qp))
		return RN_WAIT_PEER;
	view->busy = atomic_load(&block->busy);
	if (view->busy & 1 || !busy_begin(view))
		return RN_WAIT_PEER; /* a predecessor of ours died in there, as its owner will notice */
	life = atomic_load(&block->life);
	view->generation = life >> 8;
	if (!is_alive(view) || !is_for_us(qp) || !read_block(view, block) ||
	    READ_ONCE(block->rq_psn) != qp->attr.sq_psn) {
		busy_undo(view);
		return RN_WAIT_PEER;
	}
	view->done = atomic_load(&block->done);
	view->segment = 0;
	view->segment_size = 0;
	view->no_cma = rn_settings.no_cma;
	view->pushed = view->solicited = false;
	view->found = true;
	return RN_WAIT_NOT;
}

enum rn_wait rn_enter(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	if (unlikely(!view->found)) {
		enum rn_wait wait = find(qp);

		if (wait != RN_WAIT_NOT)
			return wait;
	} else {
		if (unlikely(!busy_begin(view)))
			return RN_WAIT_PEER;
		if (unlikely(!is_alive(view))) {
			busy_end(view);
			return RN_WAIT_PEER;
		}
	}
	if (unlikely((atomic_load(&view->block->life) & 0xff) == IBV_QPS_RTR) &&
	    !atomic_exchange(&view->block->established, 1))
		ring_bell(qp);
	return RN_WAIT_NOT;
}

static struct rn_slot *slot_at(const struct rn_view *view, uint32_t index)
{
	return (struct rn_slot *)(view->rq + (uint64_t)(index & view->rq_mask) * view->rq_stride);
}

/* Let the receiver know what was published. */
static void announce(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	/* See arena.h for why always both, and rn_cq_request_notify for why seq_cst. */
	atomic_fetch_or(view->dirty, view->dirty_bit);
	if (!(atomic_load(&view->cq->summary) & view->summary_bit))
		atomic_fetch_or(&view->cq->summary, view->summary_bit);
	if (rn_cq_notify(view->cq, far_peer(qp), view->solicited)) {
		qp->count.wakeups++;
		qp->count.syscalls++;
	}
	view->pushed = view->solicited = false;
}

void rn_leave(struct rn_qp *qp)
{
	struct rn_view *view = &qp->view;

	if (view->pushed) {
		announce(qp);
		/* The next receive was posted long ago, as a rule: let its line come meanwhile. */
		__builtin_prefetch(slot_at(view, view->done), 1);
	}
	busy_end(view);
}

uint64_t rn_rnr_delay_ns(struct rn_qp *qp)
{
	return rnr_delays_us[atomic_load(&qp->view.block->min_rnr_timer) & 31] * 1000ull;
}

/* --- memory ---------------------------------------------------------------------------------------------- */

enum ibv_wc_status rn_local_pieces(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces, int *count,
				   uint64_t *total)
{
	bool writes = wr->opcode >= IBV_WR_RDMA_READ;
	uint64_t sum = 0;
	int n = 0;

	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];
		const struct rn_mr_entry *mr;

		if (!sge->length)
			continue;
		pieces[n].length = sge->length;
		sum += sge->length;
		if (wr->send_flags & IBV_SEND_INLINE) {
			pieces[n++].at = (char *)(uintptr_t)sge->addr;
			continue;
		}
		mr = rn_mr_find(rn_mr_table, sge->lkey);
		if (unlikely(!mr || mr->pd != rn_pd(qp->ex.qp_base.pd)->number ||
			     !rn_mr_covers(mr, sge->addr, sge->length) ||
			     (writes && !(mr->access & IBV_ACCESS_LOCAL_WRITE))))
			return IBV_WC_LOC_PROT_ERR;
		pieces[n].at = (char *)(uintptr_t)(mr->base + (sge->addr - mr->iova));
		if (mr->kind == RN_MR_ON_DEMAND) {
			qp->count.syscalls++;
			if (!rn_mr_probe((uintptr_t)pieces[n].at, sge->length, writes))
				return IBV_WC_LOC_PROT_ERR;
		}
		n++;
	}
	*count = n;
	*total = sum;
	return sum > RN_MAX_MESSAGE ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* Why a range of the responder's can't be had. */
enum reach { REACH_OK, REACH_DENIED, REACH_FAULT, REACH_SEGMENT };

static enum reach map_segment(struct rn_qp *qp, uint32_t segment, uint64_t offset, struct rn_piece *piece)
{
	struct rn_view *view = &qp->view;

	if (unlikely(segment != view->segment)) {
		size_t size;
		char *base = rn_peer_segment(qp->peer, segment, &size);

		if (!base)
			return REACH_SEGMENT;
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
static enum reach reach(struct rn_qp *qp, uint32_t key, uint64_t addr, uint32_t length, uint32_t access,
			struct rn_piece *piece)
{
	const struct rn_view *view = &qp->view;
	const struct rn_mr_entry *mr = rn_mr_find(view->mrs, key);
	uint64_t iova, at, size, base;
	uint32_t kind;

	if (unlikely(!mr || READ_ONCE(mr->pd) != view->pd || (READ_ONCE(mr->access) & access) != access))
		return REACH_DENIED;
	iova = READ_ONCE(mr->iova);
	size = READ_ONCE(mr->length);
	base = READ_ONCE(mr->base);
	kind = READ_ONCE(mr->kind);
	at = addr - iova;
	if (unlikely(addr < iova || length > size || at > size - length))
		return REACH_DENIED;
	piece->mr = mr;
	piece->key = key;
	piece->addr = addr;
	piece->length = length;
	piece->at = NULL;
	piece->far = base + at;
	if (view->self) {
		piece->at = (char *)(uintptr_t)(base + at);
		if (kind != RN_MR_ON_DEMAND)
			return REACH_OK;
		qp->count.syscalls++;
		return rn_mr_probe(base + at, length, access & ~(uint32_t)IBV_ACCESS_REMOTE_READ) ? REACH_OK : REACH_FAULT;
	}
	return kind == RN_MR_SEGMENT ? map_segment(qp, READ_ONCE(mr->segment), READ_ONCE(mr->offset) + at, piece) : REACH_OK;
}

/* Into memory that somebody may be watching. */
static void place(char *to, const char *from, size_t length)
{
	uint64_t last;

	if (length < sizeof(last)) {
		memmove(to, from, length);
		return;
	}
	memcpy(&last, from + length - sizeof(last), sizeof(last));
	if (length > sizeof(last))
		memmove(to, from, length - sizeof(last));
	atomic_thread_fence(memory_order_release);
	to += length - sizeof(last);
	if (likely(!((uintptr_t)to % sizeof(last))))
		__atomic_store_n((uint64_t *)to, last, __ATOMIC_RELAXED);
	else
		memcpy(to, &last, sizeof(last));
}

void rn_scatter(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length)
{
	for (int i = 0; i < count && length; i++) {
		uint64_t run = pieces[i].length;

		if (skip >= run) {
			skip -= run;
			continue;
		}
		run -= skip;
		if (run > length)
			run = length;
		memcpy(pieces[i].at + skip, from, run);
		from += run;
		length -= run;
		skip = 0;
	}
}

/* --- the copy ---------------------------------------------------------------------------------------------- */

struct transfer {
	struct rn_piece local[RN_MAX_SGE], remote[RN_MAX_SGE];
	int num_local, num_remote;
	uint64_t total;
	bool to_remote;
	bool is_receive;
};

enum copied { COPIED, COPY_LOST, COPY_FAULT, COPY_ASKED };

/* One system call moves it. 0, or errno. */
static int copy_far(struct rn_qp *qp, char *here, const struct rn_piece *piece, uint64_t skip, size_t length, bool to_remote)
{
	while (length) {
		struct iovec local = {here, length}, remote = {(void *)(uintptr_t)(piece->far + skip), length};
		ssize_t moved = to_remote ? process_vm_writev(qp->peer->pid, &local, 1, &remote, 1, 0)
					  : process_vm_readv(qp->peer->pid, &local, 1, &remote, 1, 0);

		qp->count.syscalls++;
		if (moved <= 0)
			return moved ? errno : EFAULT;
		qp->count.bytes_cma += moved;
		here += moved;
		skip += moved;
		length -= moved;
	}
	return 0;
}

/* Did the owner's engine refuse what it was asked last? Told once. */
static bool was_refused(struct rn_qp *qp)
{
	bool refused = qp->reply_error;

	qp->reply_error = 0;
	return refused;
}

static enum copied ask_owner(struct rn_qp *qp, const struct transfer *t, const struct rn_piece *piece, uint64_t skip,
			     const char *here, uint32_t length)
{
	struct rn_remote request = {
		.kind = t->to_remote ? RN_REMOTE_WRITE : RN_REMOTE_READ,
		.key = piece->key,
		.is_receive = t->is_receive,
		.length = length,
		.addr = piece->addr + skip,
	};

	if (was_refused(qp))
		return COPY_FAULT;
	return rn_remote_start(qp, &request, here) ? COPY_LOST : COPY_ASKED;
}

/* Move on: see the head of this file. Then every key that is yet to be used counts anew. */
static enum copied still_there(struct rn_qp *qp, const struct rn_piece *pieces, int count)
{
	struct rn_view *view = &qp->view;

	busy_move_on(view);
	if (!is_alive(view))
		return COPY_LOST;
	for (int i = 0; i < count; i++)
		if (atomic_load(&pieces[i].mr->key) != pieces[i].key)
			return COPY_FAULT;
	return COPIED;
}

/* Both lists from position *moved on, run by run. */
static enum copied copy(struct rn_qp *qp, const struct transfer *t, uint64_t *moved, bool may_ask)
{
	uint64_t local_skip = *moved, remote_skip = *moved;
	int l = 0, r = 0;

	while (l < t->num_local && local_skip >= t->local[l].length)
		local_skip -= t->local[l++].length;
	while (r < t->num_remote && remote_skip >= t->remote[r].length)
		remote_skip -= t->remote[r++].length;
	while (*moved < t->total) {
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
				place(there, here, run);
			else
				memmove(here, there, run);
			if (qp->view.self)
				qp->count.bytes_local += run;
			else
				qp->count.bytes_mapped += run;
		} else {
			int err = qp->view.no_cma ? EPERM : copy_far(qp, here, remote, remote_skip, run, t->to_remote);

			if (err == EFAULT)
				return COPY_FAULT;
			if (err == ESRCH)
				return COPY_LOST;
			if (err) {
				qp->view.no_cma = true;
				if (!may_ask)
					return COPY_ASKED; /* again from the queue */
				return ask_owner(qp, t, remote, remote_skip, here,
						 run < RN_REMOTE_CHUNK ? run : RN_REMOTE_CHUNK);
			}
		}
		*moved += run;
		if ((local_skip += run) == t->local[l].length) {
			local_skip = 0;
			l++;
		}
		if ((remote_skip += run) == remote->length) {
			remote_skip = 0;
			r++;
		}
		if (unlikely(run == PIECE_BYTES)) {
			enum copied there = still_there(qp, &t->remote[r], t->num_remote - r);

			if (there != COPIED)
				return there;
		}
	}
	return COPIED;
}

/* --- the responder ------------------------------------------------------------------------------------------ */

/* Leave a note for the owner, who will go to ERR. */
static void leave_fault(struct rn_qp *qp, enum rn_fault fault)
{
	uint32_t none = RN_FAULT_NONE;

	if (atomic_compare_exchange_strong(&qp->view.block->fault, &none, fault))
		ring_bell(qp);
}

/* The receive at hand; NULL when none is posted. */
static struct rn_slot *next_slot(const struct rn_view *view)
{
	struct rn_slot *slot = slot_at(view, view->done);

	return likely(atomic_load_explicit(&slot->turn, memory_order_acquire) == view->done) ? slot : NULL;
}

static void publish(struct rn_qp *qp, struct rn_slot *slot, const struct ibv_send_wr *wr, enum ibv_wc_status status,
		    uint32_t length)
{
	bool has_imm = wr->opcode == IBV_WR_SEND_WITH_IMM || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct rn_view *view = &qp->view;

	slot->byte_len = length;
	slot->imm_data = wr->imm_data;
	slot->status = status;
	slot->opcode = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
	slot->wc_flags = has_imm ? IBV_WC_WITH_IMM : 0;
	slot->vendor_err = 0;
	atomic_store_explicit(&slot->turn, ++view->done, memory_order_release);
	atomic_store_explicit(&view->block->done, view->done, memory_order_relaxed);
	view->pushed = true;
	view->solicited |= status != IBV_WC_SUCCESS || wr->send_flags & IBV_SEND_SOLICITED;
	if (length >= ANNOUNCE_BYTES)
		announce(qp);
}

/* The receive at hand fails there, and the send here. */
static enum ibv_wc_status fail_receive(struct rn_qp *qp, struct rn_slot *slot, const struct ibv_send_wr *wr,
				       enum ibv_wc_status there)
{
	publish(qp, slot, wr, there, 0);
	if (there == IBV_WC_LOC_LEN_ERR) {
		leave_fault(qp, RN_FAULT_REQUEST);
		return IBV_WC_REM_INV_REQ_ERR;
	}
	leave_fault(qp, RN_FAULT_LOCAL);
	return IBV_WC_REM_OP_ERR;
}

/* Where the receive wants its data. What to answer, or SUCCESS; *reached says more. */
static enum ibv_wc_status receive_pieces(struct rn_qp *qp, const struct rn_slot *slot, struct transfer *t,
					 enum reach *reached)
{
	uint32_t num_sge = READ_ONCE(slot->num_sge);
	uint64_t left = t->total;

	if (num_sge > qp->view.rq_max_sge)
		return IBV_WC_LOC_QP_OP_ERR;
	for (uint32_t i = 0; i < num_sge && left; i++) {
		uint32_t length = READ_ONCE(slot->sge[i].length);

		if (!length)
			continue;
		if (length > left)
			length = left;
		*reached = reach(qp, READ_ONCE(slot->sge[i].lkey), READ_ONCE(slot->sge[i].addr), length,
				 IBV_ACCESS_LOCAL_WRITE, &t->remote[t->num_remote++]);
		if (unlikely(*reached != REACH_OK))
			return IBV_WC_LOC_PROT_ERR;
		left -= length;
	}
	return left ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* SEND, with or without immediate data. */
static enum rn_wait execute_send(struct rn_qp *qp, const struct ibv_send_wr *wr, struct transfer *t, uint64_t *moved,
				 bool may_ask, enum ibv_wc_status *status)
{
	struct rn_slot *slot = next_slot(&qp->view);
	enum reach reached = REACH_OK;
	enum ibv_wc_status there;

	if (unlikely(!slot))
		return RN_WAIT_RNR;
	t->is_receive = t->to_remote = true;
	there = receive_pieces(qp, slot, t, &reached);
	if (unlikely(there != IBV_WC_SUCCESS)) {
		if (reached == REACH_SEGMENT)
			return RN_WAIT_SEGMENT;
		*status = fail_receive(qp, slot, wr, there);
		return RN_WAIT_NOT;
	}
	switch (copy(qp, t, moved, may_ask)) {
	case COPIED:
		publish(qp, slot, wr, IBV_WC_SUCCESS, t->total);
		return RN_WAIT_NOT;
	case COPY_LOST:
		return RN_WAIT_PEER;
	case COPY_ASKED:
		return RN_WAIT_OWNER;
	default:
		*status = fail_receive(qp, slot, wr, IBV_WC_LOC_PROT_ERR);
		return RN_WAIT_NOT;
	}
}

static enum ibv_wc_status deny_request(struct rn_qp *qp)
{
	leave_fault(qp, RN_FAULT_REQUEST);
	return IBV_WC_REM_INV_REQ_ERR;
}

static enum ibv_wc_status deny_access(struct rn_qp *qp)
{
	leave_fault(qp, RN_FAULT_ACCESS);
	return IBV_WC_REM_ACCESS_ERR;
}

/* RDMA WRITE, with or without immediate data, and READ. */
static enum rn_wait execute_rdma(struct rn_qp *qp, const struct ibv_send_wr *wr, struct transfer *t, uint64_t *moved,
				 bool may_ask, enum ibv_wc_status *status)
{
	bool is_read = wr->opcode == IBV_WR_RDMA_READ;
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
	struct rn_view *view = &qp->view;
	struct rn_slot *slot = NULL;

	t->to_remote = !is_read;
	if (unlikely(!(atomic_load_explicit(&view->block->access, memory_order_relaxed) & right) ||
		     (is_read && !view->max_dest_rd_atomic))) {
		*status = deny_request(qp);
		return RN_WAIT_NOT;
	}
	if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !(slot = next_slot(view)))
		return RN_WAIT_RNR;
	if (likely(t->total)) { /* without bytes nobody asks for the key */
		t->num_remote = 1;
		switch (reach(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, t->total, right, &t->remote[0])) {
		case REACH_OK:
			break;
		case REACH_SEGMENT:
			return RN_WAIT_SEGMENT;
		default:
			*status = deny_access(qp);
			return RN_WAIT_NOT;
		}
		switch (copy(qp, t, moved, may_ask)) {
		case COPIED:
			break;
		case COPY_LOST:
			return RN_WAIT_PEER;
		case COPY_ASKED:
			return RN_WAIT_OWNER;
		default:
			*status = deny_access(qp);
			return RN_WAIT_NOT;
		}
	}
	if (slot)
		publish(qp, slot, wr, IBV_WC_SUCCESS, t->total);
	return RN_WAIT_NOT;
}

/* Compare-and-swap, fetch-and-add: CPU atomics where the memory is mapped, else by its owner. */
static enum rn_wait execute_atomic(struct rn_qp *qp, const struct ibv_send_wr *wr, struct transfer *t, uint64_t *moved,
				   bool may_ask, enum ibv_wc_status *status)
{
	bool is_swap = wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
	uint64_t addr = wr->wr.atomic.remote_addr, before;
	struct rn_view *view = &qp->view;
	struct rn_piece target;

	if (unlikely(t->total != sizeof(before))) {
		*status = IBV_WC_LOC_LEN_ERR;
		return RN_WAIT_NOT;
	}
	if (*moved == sizeof(before)) /* the owner's engine did it, the old value is in place */
		return RN_WAIT_NOT;
	if (unlikely(addr % sizeof(before) || !view->max_dest_rd_atomic ||
		     !(atomic_load_explicit(&view->block->access, memory_order_relaxed) & IBV_ACCESS_REMOTE_ATOMIC))) {
		*status = deny_request(qp);
		return RN_WAIT_NOT;
	}
	switch (reach(qp, wr->wr.atomic.rkey, addr, sizeof(before), IBV_ACCESS_REMOTE_ATOMIC, &target)) {
	case REACH_OK:
		break;
	case REACH_SEGMENT:
		return RN_WAIT_SEGMENT;
	default:
		*status = deny_access(qp);
		return RN_WAIT_NOT;
	}
	if (unlikely((target.at ? (uintptr_t)target.at : target.far) % sizeof(before))) {
		*status = deny_request(qp); /* aligned by its I/O address, but not in memory */
		return RN_WAIT_NOT;
	}
	if (!target.at) {
		struct rn_remote request = {
			.kind = is_swap ? RN_REMOTE_CAS : RN_REMOTE_FAA,
			.key = target.key,
			.length = sizeof(before),
			.addr = addr,
			.compare_add = wr->wr.atomic.compare_add,
			.swap = wr->wr.atomic.swap,
		};

		if (was_refused(qp)) {
			*status = deny_access(qp);
			return RN_WAIT_NOT;
		}
		if (may_ask && rn_remote_start(qp, &request, NULL))
			return RN_WAIT_PEER;
		return RN_WAIT_OWNER;
	}
	before = wr->wr.atomic.compare_add;
	if (is_swap)
		__atomic_compare_exchange_n((uint64_t *)target.at, &before, wr->wr.atomic.swap, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST);
	else
		before = __atomic_fetch_add((uint64_t *)target.at, before, __ATOMIC_SEQ_CST);
	rn_scatter(t->local, t->num_local, 0, (const char *)&before, sizeof(before));
	if (view->self)
		qp->count.bytes_local += sizeof(before);
	else
		qp->count.bytes_mapped += sizeof(before);
	return RN_WAIT_NOT;
}

enum rn_wait rn_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *queued_moved,
			enum ibv_wc_status *status, uint32_t *byte_len)
{
	struct transfer t; /* filled as far as its counts say */
	uint64_t moved = queued_moved ? *queued_moved : 0;
	enum rn_wait wait;

	t.num_remote = 0;
	t.is_receive = false;
	*status = rn_local_pieces(qp, wr, t.local, &t.num_local, &t.total);
	*byte_len = t.total;
	if (unlikely(*status != IBV_WC_SUCCESS))
		return RN_WAIT_NOT;
	switch (wr->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		wait = execute_send(qp, wr, &t, &moved, queued_moved, status);
		break;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		wait = execute_rdma(qp, wr, &t, &moved, queued_moved, status);
		break;
	default:
		if (unlikely(!qp->attr.max_rd_atomic)) {
			*status = IBV_WC_LOC_QP_OP_ERR; /* no such request may ever be on its way */
			return RN_WAIT_NOT;
		}
		wait = wr->opcode == IBV_WR_RDMA_READ ? execute_rdma(qp, wr, &t, &moved, queued_moved, status)
						      : execute_atomic(qp, wr, &t, &moved, queued_moved, status);
	}
	if (queued_moved)
		*queued_moved = moved;
	if (wr->send_flags & IBV_SEND_INLINE && wait == RN_WAIT_NOT)
		qp->count.bytes_inline += t.total;
	return wait;
}
