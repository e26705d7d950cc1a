/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester of a stream: the send queue becomes frames.  answers.c makes completions of what comes back.
 *
 *     executed            acked            next                 posted
 *        |------------------|----------------|--------------------|      counts modulo 2^32
 *          executed there,    on its way,      not framed yet
 *          but behind a READ  or waiting
 *          without its data   for its turn
 *
 * All of it with the send lock held, by whichever thread is there: the poster, the engine, or poll_cq.
 *
 * A frame of which the socket took only a part must be finished before anything else: it is kept
 * apart from `next`, which an RNR NAK may have moved back meanwhile.  Then the responder will discard it, and it is
 * finished with zeros: its memory may have gone, which is an error only when its turn comes again.
 */
#include "faults/iwarp.h"
#include "objects/mw.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

enum {
	PLAN_FRAMES = 16,         /* in one system call */
	PLAN_BYTES = 1024 * 1024, /* likewise, or so */
	PLAN_PIECES = 60,
};

static const uint8_t frame_kinds[] = {
	[IBV_WR_RDMA_WRITE] = RN_FRAME_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = RN_FRAME_WRITE_IMM,
	[IBV_WR_SEND] = RN_FRAME_SEND,
	[IBV_WR_SEND_WITH_IMM] = RN_FRAME_SEND_IMM,
	[IBV_WR_RDMA_READ] = RN_FRAME_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = RN_FRAME_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = RN_FRAME_ADD,
	[IBV_WR_SEND_WITH_INV] = RN_FRAME_SEND_INV,
};

/* --- frames out ------------------------------------------------------------------------------------------ */

struct plan {
	struct rn_tcp_frame frames[PLAN_FRAMES];
	struct iovec pieces[PLAN_PIECES];
	int num_frames, num_pieces;
	size_t bytes;
	bool more; /* it was full: there may be more to send */
	bool fault;
};

static struct rn_tcp_frame make_frame(struct rn_qp *qp, const struct ibv_send_wr *wr, uint32_t serial, uint32_t offset,
				       uint32_t total)
{
	struct rn_tcp_frame frame = {
		.kind = frame_kinds[wr->opcode],
		.flags = wr->send_flags & IBV_SEND_SOLICITED ? RN_FRAME_SOLICITED : 0,
		.serial = serial,
		.offset = offset,
		.total = total,
		.imm = wr->imm_data,
	};

	frame.ack = qp->tcp->in ? qp->tcp->in->expected : qp->tcp->served;
	if (serial == qp->tcp->behind_piggyback)
		frame.flags |= RN_FRAME_BEHIND_PIGGYBACK;
	if (serial == qp->tcp->skipped_to)
		frame.skipped = qp->tcp->skipped_to - qp->tcp->skipped_from;
	if (qp->ex.qp_base.qp_type == IBV_QPT_XRC_SEND)
		frame.srqn = wr->qp_type.xrc.remote_srqn;
	if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		frame.addr = wr->wr.atomic.remote_addr;
		frame.rkey = wr->wr.atomic.rkey;
		frame.compare_add = wr->wr.atomic.compare_add;
		frame.swap = wr->wr.atomic.swap;
		return frame;
	}
	frame.addr = wr->wr.rdma.remote_addr;
	frame.rkey = wr->wr.rdma.rkey;
	if (wr->opcode != IBV_WR_RDMA_READ)
		frame.length = total - offset < RN_FRAME_BYTES ? total - offset : RN_FRAME_BYTES;
	return frame;
}

/* Header and payload, from position skip of both together. False: no room for all of it. */
static bool add_frame(struct rn_qp *qp, struct plan *plan, const struct rn_tcp_frame *frame, uint32_t skip,
		      enum ibv_wc_status *status)
{
	const struct ibv_send_wr *wr = &rn_sq_at(qp, frame->serial)->wr;
	struct rn_piece pieces[RN_MAX_SGE];
	uint32_t in_payload = skip > sizeof(*frame) ? skip - sizeof(*frame) : 0;
	uint64_t total;
	int count, used;

	if (PLAN_PIECES - plan->num_pieces < RN_MAX_SGE + 1)
		return false;
	if (frame->length) {
		/* Each time: the key may be gone by now. */
		*status = rn_local_pieces_unprobed(qp, wr, pieces, &count, &total);
		if (*status != IBV_WC_SUCCESS)
			return false;
	}
	if (skip < sizeof(*frame))
		plan->pieces[plan->num_pieces++] = (struct iovec){(char *)frame + skip, sizeof(*frame) - skip};
	if (frame->length) {
		rn_slice(pieces, count, (uint64_t)frame->offset + in_payload, frame->length - in_payload,
			      plan->pieces + plan->num_pieces, RN_MAX_SGE, &used);
		plan->num_pieces += used;
	}
	plan->bytes += sizeof(*frame) + frame->length - skip;
	return true;
}

/* The rest of a frame that the responder will discard, or some of it: zeros, whatever its memory holds. */
static void add_void(struct plan *plan, struct rn_tcp *out)
{
	static const char zeros[4096];
	uint32_t at = out->frame_sent, end = sizeof(out->frame) + out->frame.length;

	if (at < sizeof(out->frame)) {
		plan->pieces[plan->num_pieces++] = (struct iovec){(char *)&out->frame + at, sizeof(out->frame) - at};
		at = sizeof(out->frame);
	}
	while (at < end && plan->num_pieces < PLAN_PIECES) {
		uint32_t length = end - at < sizeof(zeros) ? end - at : sizeof(zeros);

		plan->pieces[plan->num_pieces++] = (struct iovec){(char *)zeros, length};
		at += length;
	}
	plan->bytes += at - out->frame_sent;
	plan->more = true;
}

static bool is_due(struct rn_qp *qp, struct rn_send *send)
{
	uint64_t now;

	if (!send->deferred || send->due_ns <= (now = rn_now_ns()))
		return true;
	rn_timer_set(&qp->timer, send->due_ns - now);
	return false;
}

/* May request `next` start now? */
static bool may_start(struct rn_qp *qp, struct rn_send *send)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (rn_is_local(send->wr.opcode) || !is_due(qp, send))
		return false;
	if (send->wr.send_flags & IBV_SEND_FENCE && streams->reads)
		return false;
	/* If none is allowed, check_start fails it. */
	return !rn_fetches(send->wr.opcode) || streams->reads < qp->attr.max_rd_atomic || !qp->attr.max_rd_atomic;
}

/* Check it for errors before anything is sent. */
static enum ibv_wc_status check_start(struct rn_qp *qp, struct rn_send *send)
{
	struct rn_piece pieces[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint64_t total;
	int count;

	send->total = 0;
	status = rn_local_pieces_unprobed(qp, &send->wr, pieces, &count, &total);
	if (status == IBV_WC_SUCCESS)
		status = rn_check_request(qp, &send->wr, total);
	send->total = total;
	return status;
}

/* With fault injection one request is on its way at a time, and faults/fault.c first decides what happens to it. */
static bool meets_fault(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status)
{
	enum rn_wait wait;

	if (qp->tcp->next != qp->sq_executed || (qp->wait == RN_WAIT_LOST && !rn_sq_waited_for_nothing(qp)))
		return true;
	wait = rn_fault_set_off(&qp->faults, &send->plan, status);
	if (wait == RN_WAIT_NOT && *status == IBV_WC_SUCCESS &&
	    (rn_fault_finds_no_receive(&qp->faults, &send->plan) || (rn_settings.iwarp && rn_qp_is_too_early(qp))))
		wait = RN_WAIT_RNR;
	if (wait == RN_WAIT_NOT && *status == IBV_WC_SUCCESS &&
	    rn_fault_refuse(&qp->faults, &send->plan) != IBV_WC_SUCCESS) {
		send->plan.is_refused = true; /* by the responder, which fails with it: the frame is still sent */
		send->total = 0;
	}
	if (wait != RN_WAIT_NOT && qp->unreliable) {
		send->plan.is_dropped = true; /* the frame is sent all the same, so that the count stays right */
		send->total = 0;
		return false;
	}
	if (wait == RN_WAIT_RNR)
		qp->tcp->rnr_until_ns = rn_now_ns() + rn_rnr_delay_ns(qp);
	if (wait != RN_WAIT_NOT)
		rn_sq_wait(qp, wait);
	return wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS;
}

/* Request `next`, before its first frame. False: not now, or never. */
static bool start(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status)
{
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);

	if ((state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && send->has_begun)) || !may_start(qp, send))
		return false;
	send->plan.is_refused = false; /* in case fault injection has ended since the last try */
	*status = check_start(qp, send);
	if (*status != IBV_WC_SUCCESS || (unlikely(qp->faults.injector) && meets_fault(qp, send, status)))
		return false;
	send->moved = 0;
	send->answered = false;
	return true;
}

/* The next frame of the queue, if it may go. */
static bool plan_next(struct rn_qp *qp, struct plan *plan, enum ibv_wc_status *status)
{
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_tcp_frame *frame = &plan->frames[plan->num_frames];
	struct rn_send *send = rn_sq_at(qp, streams->next);

	if (!streams->offset && !start(qp, send, status))
		return false;
	*frame = make_frame(qp, &send->wr, streams->next, streams->offset, send->total);
	if (unlikely(send->plan.is_dropped)) {
		frame->kind = RN_FRAME_NOTHING;
		frame->length = 0;
	} else if (unlikely(send->plan.is_refused)) {
		frame->kind = RN_FRAME_REFUSED;
		frame->imm = send->plan.status;
	}
	if (!add_frame(qp, plan, frame, 0, status)) {
		plan->more = *status == IBV_WC_SUCCESS;
		return false;
	}
	plan->num_frames++;
	streams->offset += frame->length;
	if (streams->offset >= send->total || rn_fetches(send->wr.opcode)) {
		if (rn_fetches(send->wr.opcode))
			streams->reads++;
		streams->next++;
		streams->offset = 0;
	}
	return true;
}

/* Plan again what was planned and not sent at all. */
static void unplan(struct rn_qp *qp, struct plan *plan, int from)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (from >= plan->num_frames)
		return;
	for (int i = from; i < plan->num_frames; i++)
		if (rn_fetches(rn_sq_at(qp, plan->frames[i].serial)->wr.opcode))
			streams->reads--;
	streams->next = plan->frames[from].serial;
	streams->offset = plan->frames[from].offset;
}

/* This many bytes were sent: first the rest of the frame begun before, then planned ones. */
static void account(struct rn_qp *qp, struct plan *plan, size_t sent)
{
	struct rn_tcp *out = qp->tcp->out;
	int done = 0;

	if (out->frame_sent) {
		uint32_t left = sizeof(out->frame) + out->frame.length - out->frame_sent;

		if (sent < left) {
			out->frame_sent += sent;
			unplan(qp, plan, 0);
			return;
		}
		sent -= left;
		out->frame_sent = 0;
	}
	for (; done < plan->num_frames && sent; done++) {
		const struct rn_tcp_frame *frame = &plan->frames[done];
		uint32_t whole = sizeof(*frame) + frame->length;

		rn_sq_at(qp, frame->serial)->has_begun = true;
		if (qp->tcp->in)
			qp->tcp->in->told = frame->ack;
		if (sent < whole) {
			out->frame = *frame;
			out->frame_sent = sent;
			out->frame_is_void = false;
			done++;
			break;
		}
		sent -= whole;
	}
	unplan(qp, plan, done);
}

/* A request that can't be sent fails when all before it are done. */
static void fail_in_turn(struct rn_qp *qp, uint32_t serial, enum ibv_wc_status status)
{
	struct rn_tcp_path *streams = qp->tcp;

	streams->broken = status;
	streams->broken_at = serial;
	if (qp->sq_executed != serial)
		return;
	rn_sq_fail_head(qp, status);
	if (atomic_load(&qp->state) != IBV_QPS_SQE)
		return;
	/* The queue may go on, but if this request was cut off, then on another connection. */
	streams->broken = IBV_WC_SUCCESS;
	if (streams->out && (streams->out->frame_sent || streams->offset)) {
		rn_tcp_end(streams->out);
		streams->kept_until_ns = rn_now_ns() + rn_settings.silence_ms * 1000000;
	}
	streams->next = serial;
	streams->offset = 0;
}

/* Send a request in place of an ACK. False: no more for now. */
static bool push_piggyback(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_send *send = rn_sq_at(qp, streams->next);
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	struct rn_tcp_frame frame;

	if (start(qp, send, &status)) {
		frame = make_frame(qp, &send->wr, streams->next, 0, send->total);
		status = rn_piggyback_send(qp, &frame);
		send->has_begun = status == IBV_WC_SUCCESS;
		if (status == IBV_WC_SUCCESS)
			return ++streams->next != qp->sq_posted;
	}
	if (status != IBV_WC_SUCCESS)
		fail_in_turn(qp, streams->next, status);
	return false;
}

/* One system call's worth. False: no more for now. */
static bool push_some(struct rn_qp *qp)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_tcp *out = streams->out;
	bool begins = !streams->rnr_until_ns && streams->broken == IBV_WC_SUCCESS;
	uint32_t broken_at;
	struct plan plan;
	ssize_t sent;

	if (streams->next != qp->sq_posted && begins && rn_piggyback_may_go(qp))
		return push_piggyback(qp);
	plan.num_frames = plan.num_pieces = 0;
	plan.bytes = 0;
	plan.more = plan.fault = false;
	broken_at = streams->next;
	if (out->frame_sent && out->frame_is_void)
		add_void(&plan, out);
	else if (out->frame_sent && !add_frame(qp, &plan, &out->frame, out->frame_sent, &status))
		broken_at = out->frame.serial;
	if (status == IBV_WC_SUCCESS && begins && !plan.more) {
		while (streams->next != qp->sq_posted && plan_next(qp, &plan, &status)) {
			if (plan.num_frames == PLAN_FRAMES || plan.bytes >= PLAN_BYTES) {
				plan.more = true;
				break;
			}
		}
		broken_at = streams->next;
	}
	if (plan.num_pieces) {
		sent = rn_tcp_write(out, plan.pieces, plan.num_pieces, &plan.fault);
		if (sent == RN_TCP_ENDED) {
			unplan(qp, &plan, 0);
			/* What the peer sent before it ended is still to be read. */
			if (rn_tcp_receive(qp))
				rn_tcp_lost(out);
			return false;
		}
		if ((size_t)sent < plan.bytes && !plan.fault)
			out->wants_out = true;
		account(qp, &plan, sent);
		if (plan.fault) {
			broken_at = out->frame_sent ? out->frame.serial : streams->next;
			status = IBV_WC_LOC_PROT_ERR;
		}
	}
	if (status != IBV_WC_SUCCESS) {
		fail_in_turn(qp, broken_at, status);
		return false;
	}
	return plan.more && !out->wants_out;
}

/* Executed, but fault injection lost the answer: the requester tries again until it gets one. */
static void hear_again(struct rn_qp *qp)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	enum rn_wait wait;

	if (qp->wait == RN_WAIT_LOST && !rn_sq_waited_for_nothing(qp))
		return;
	wait = rn_fault_set_off(&qp->faults, &rn_sq_at(qp, qp->sq_executed)->plan, &status);
	if (wait != RN_WAIT_NOT)
		rn_sq_wait(qp, wait);
	else
		rn_tcp_advance(qp);
}

/* Requests from `next` up to this one are done without having been sent. The frame of the next one says so. */
static void skip_to(struct rn_tcp_path *streams, uint32_t end)
{
	if (streams->skipped_to != streams->next)
		streams->skipped_from = streams->next;
	streams->skipped_to = streams->next = streams->acked = end;
	streams->offset = 0;
}

bool rn_tcp_execute_local(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	/* After SQE, in which everything on its way was flushed. */
	if (rn_is_before(streams->next, qp->sq_executed))
		skip_to(streams, qp->sq_executed);
	while (streams->next == qp->sq_executed && streams->next != qp->sq_posted && !streams->offset) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);
		enum ibv_wc_status status;

		if (!rn_is_local(head->wr.opcode) || atomic_load(&qp->state) != IBV_QPS_RTS || !is_due(qp, head))
			break;
		status = rn_mw_execute(qp, &head->wr);
		if (status != IBV_WC_SUCCESS) {
			rn_sq_fail_head(qp, status);
			return false;
		}
		skip_to(streams, streams->next + 1);
		rn_sq_complete(qp, &head->wr, status, 0);
	}
	return true;
}

void rn_tcp_push(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (!streams->out || streams->out->ended || streams->out->state != RN_TCP_OPEN)
		return;
	if (streams->rnr_until_ns && streams->rnr_until_ns <= rn_now_ns())
		streams->rnr_until_ns = 0;
	if (unlikely(qp->faults.injector) && qp->sq_executed != qp->sq_posted && rn_is_before(qp->sq_executed, streams->acked) &&
	    !(streams->reads && rn_fetches(rn_sq_at(qp, qp->sq_executed)->wr.opcode)))
		hear_again(qp);
	/* Is it the broken one's turn? The frame of one before it may still have to be finished. */
	if (streams->broken != IBV_WC_SUCCESS &&
	    !(streams->out->frame_sent && streams->out->frame.serial != streams->broken_at))
		fail_in_turn(qp, streams->broken_at, streams->broken);
	else
		while (rn_tcp_execute_local(qp) && push_some(qp))
			;
	rn_tcp_expect(qp);
	if (streams->out && !streams->out->ended)
		rn_tcp_watch(streams->out);
}

void rn_tcp_drop(struct rn_qp *qp, uint32_t end)
{
	while (rn_tcp_execute_local(qp) && rn_is_before(qp->sq_executed, end)) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);
		enum ibv_wc_status status;

		if (rn_is_local(head->wr.opcode))
			return; /* not now */
		status = check_start(qp, head);
		if (status != IBV_WC_SUCCESS) {
			rn_sq_fail_head(qp, status);
			return;
		}
		rn_sq_complete(qp, &head->wr, status, head->total);
	}
}
