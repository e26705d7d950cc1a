/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester of a stream: the send queue becomes frames, answers become completions.
 *
 *     executed            acked            next                 posted
 *        |------------------|----------------|--------------------|      counts modulo 2^32
 *          executed there,    on its way,      not framed yet
 *          but behind a READ  or waiting
 *          without its data   for its turn
 *
 * All of it with the send lock held, by whoever is there: the poster, the engine, or poll_cq.
 *
 * A frame of which the socket took only a part must be finished before anything else: it is kept
 * apart from `next`, which an RNR NAK may have moved back meanwhile.
 */
#define _GNU_SOURCE
#include "iwarp.h"
#include "soft.h"

enum {
	PLAN_FRAMES = 16,         /* in one system call */
	PLAN_BYTES = 1024 * 1024, /* likewise, or so */
	PLAN_PIECES = 60,
	READ_RUN = 1024 * 1024,   /* bytes of answers before others have their turn */
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

/* READs and atomics: their answer brings data. */
static bool is_answered_with_data(const struct ibv_send_wr *wr)
{
	return rn_fetches(wr->opcode);
}

static void advance(struct rn_qp *qp);

/* --- frames out ------------------------------------------------------------------------------------------ */

struct plan {
	struct rn_wire_frame frames[PLAN_FRAMES];
	struct iovec pieces[PLAN_PIECES];
	int num_frames, num_pieces;
	size_t bytes;
	bool more; /* it was full: there may be more to send */
	bool fault;
};

static struct rn_wire_frame make_frame(struct rn_qp *qp, const struct ibv_send_wr *wr, uint32_t serial, uint32_t offset,
				       uint32_t total)
{
	struct rn_wire_frame frame = {
		.kind = frame_kinds[wr->opcode],
		.flags = wr->send_flags & IBV_SEND_SOLICITED ? RN_FRAME_SOLICITED : 0,
		.serial = serial,
		.offset = offset,
		.total = total,
		.imm = wr->imm_data,
	};

	if (qp->streams.in)
		frame.ack = qp->streams.in->expected;
	if (serial == qp->streams.behind_rider)
		frame.flags |= RN_FRAME_BEHIND_RIDER;
	if (serial == qp->streams.skipped_to)
		frame.skipped = qp->streams.skipped_to - qp->streams.skipped_from;
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
static bool add_frame(struct rn_qp *qp, struct plan *plan, const struct rn_wire_frame *frame, uint32_t skip,
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
		rn_wire_slice(pieces, count, (uint64_t)frame->offset + in_payload, frame->length - in_payload,
			      plan->pieces + plan->num_pieces, RN_MAX_SGE, &used);
		plan->num_pieces += used;
	}
	plan->bytes += sizeof(*frame) + frame->length - skip;
	return true;
}

static bool is_due(struct rn_qp *qp, struct rn_send *send)
{
	uint64_t now;

	if (!send->deferred || send->due_ns <= (now = rn_now_ns()))
		return true;
	rn_timer_set(&qp->timer, send->due_ns - now);
	return false;
}

/* May request `next` start, and go out? */
static bool may_start(struct rn_qp *qp, struct rn_send *send)
{
	struct rn_streams *streams = &qp->streams;

	if (rn_is_local(send->wr.opcode) || !is_due(qp, send))
		return false;
	if (send->wr.send_flags & IBV_SEND_FENCE && streams->reads)
		return false;
	/* With none allowed it is for check_start to fail it. */
	return !is_answered_with_data(&send->wr) || streams->reads < qp->attr.max_rd_atomic || !qp->attr.max_rd_atomic;
}

/* Its first look: what is wrong with it, before anything goes out. */
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

/* With faults on purpose one request is on its way at a time, and what chaos.c has in store for it comes first. */
static bool meets_fault(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status)
{
	enum rn_wait wait;

	if (qp->streams.next != qp->sq_executed || (qp->wait == RN_WAIT_LOST && !rn_sq_waited_for_nothing(qp)))
		return true;
	wait = rn_chaos_set_off(qp, send, status);
	if (wait == RN_WAIT_NOT && *status == IBV_WC_SUCCESS &&
	    (rn_chaos_finds_no_receive(qp, send) || (rn_settings.iwarp && rn_iwarp_is_too_early(qp))))
		wait = RN_WAIT_RNR;
	if (wait == RN_WAIT_NOT && *status == IBV_WC_SUCCESS && send->plan.status) {
		send->plan.is_refused = true; /* by the responder, who fails with it: a frame goes nonetheless */
		send->total = 0;
	}
	if (wait != RN_WAIT_NOT && qp->unreliable) {
		send->plan.is_dropped = true; /* a frame goes nonetheless: for the count */
		send->total = 0;
		return false;
	}
	if (wait == RN_WAIT_RNR)
		qp->streams.rnr_until_ns = rn_now_ns() + rn_rnr_delay_ns(qp);
	if (wait != RN_WAIT_NOT)
		rn_sq_wait(qp, wait);
	return wait != RN_WAIT_NOT || *status != IBV_WC_SUCCESS;
}

/* Request `next`, before its first frame. False: not now, or never. */
static bool start(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status)
{
	if (atomic_load_explicit(&qp->state, memory_order_relaxed) != IBV_QPS_RTS || !may_start(qp, send))
		return false;
	send->plan.is_refused = false; /* should faults have ended since the last try */
	*status = check_start(qp, send);
	if (*status != IBV_WC_SUCCESS || (unlikely(qp->chaos) && meets_fault(qp, send, status)))
		return false;
	send->moved = 0;
	send->answered = false;
	return true;
}

/* The next frame of the queue, if it may go. */
static bool plan_next(struct rn_qp *qp, struct plan *plan, enum ibv_wc_status *status)
{
	struct rn_streams *streams = &qp->streams;
	struct rn_wire_frame *frame = &plan->frames[plan->num_frames];
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
	if (streams->offset >= send->total || is_answered_with_data(&send->wr)) {
		if (is_answered_with_data(&send->wr))
			streams->reads++;
		streams->next++;
		streams->offset = 0;
	}
	return true;
}

/* What was planned and not sent at all comes again. */
static void unplan(struct rn_qp *qp, struct plan *plan, int from)
{
	struct rn_streams *streams = &qp->streams;

	if (from >= plan->num_frames)
		return;
	for (int i = from; i < plan->num_frames; i++)
		if (is_answered_with_data(&rn_sq_at(qp, plan->frames[i].serial)->wr))
			streams->reads--;
	streams->next = plan->frames[from].serial;
	streams->offset = plan->frames[from].offset;
}

/* So many bytes went out: of the frame begun before, then of those planned. */
static void account(struct rn_qp *qp, struct plan *plan, size_t sent)
{
	struct rn_stream *out = qp->streams.out;
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
		const struct rn_wire_frame *frame = &plan->frames[done];
		uint32_t whole = sizeof(*frame) + frame->length;

		if (qp->streams.in)
			qp->streams.in->told = frame->ack;
		if (sent < whole) {
			out->frame = *frame;
			out->frame_sent = sent;
			done++;
			break;
		}
		sent -= whole;
	}
	unplan(qp, plan, done);
}

/* A request that can't be sent fails when all before it are through. */
static void fail_in_turn(struct rn_qp *qp, uint32_t serial, enum ibv_wc_status status)
{
	qp->streams.broken = status;
	if (qp->sq_executed == serial)
		rn_sq_fail_head(qp, status);
}

/* Instead of an ACK. False: no more for now. */
static bool push_rider(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	struct rn_send *send = rn_sq_at(qp, streams->next);
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	struct rn_wire_frame frame;

	if (start(qp, send, &status)) {
		frame = make_frame(qp, &send->wr, streams->next, 0, send->total);
		status = rn_rider_send(qp, &frame);
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
	struct rn_streams *streams = &qp->streams;
	struct rn_stream *out = streams->out;
	uint32_t broken_at;
	struct plan plan;
	ssize_t sent;

	if (streams->next != qp->sq_posted && !streams->rnr_until_ns && rn_rider_may_go(qp))
		return push_rider(qp);
	plan.num_frames = plan.num_pieces = 0;
	plan.bytes = 0;
	plan.more = plan.fault = false;
	broken_at = streams->next;
	if (out->frame_sent && !add_frame(qp, &plan, &out->frame, out->frame_sent, &status))
		broken_at = out->frame.serial;
	if (status == IBV_WC_SUCCESS && !streams->rnr_until_ns) {
		while (streams->next != qp->sq_posted && plan_next(qp, &plan, &status)) {
			if (plan.num_frames == PLAN_FRAMES || plan.bytes >= PLAN_BYTES) {
				plan.more = true;
				break;
			}
		}
		broken_at = streams->next;
	}
	if (plan.num_pieces) {
		sent = rn_wire_write(out, plan.pieces, plan.num_pieces, &plan.fault);
		if (sent == RN_WIRE_ENDED) {
			unplan(qp, &plan, 0);
			/* What it said before it ended is there to be read yet. */
			if (rn_stream_receive(qp))
				rn_stream_lost(out);
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

/* Executed, but the answer was lost on purpose: the requester tries again, until it hears one. */
static void hear_again(struct rn_qp *qp)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	enum rn_wait wait;

	if (qp->wait == RN_WAIT_LOST && !rn_sq_waited_for_nothing(qp))
		return;
	wait = rn_chaos_set_off(qp, rn_sq_at(qp, qp->sq_executed), &status);
	if (wait != RN_WAIT_NOT)
		rn_sq_wait(qp, wait);
	else
		advance(qp);
}

/* Requests from `next` up to this one are over, and never went out. The frame of the one behind them says so. */
static void skip_to(struct rn_streams *streams, uint32_t end)
{
	if (streams->skipped_to != streams->next)
		streams->skipped_from = streams->next;
	streams->skipped_to = streams->next = streams->acked = end;
	streams->offset = 0;
}

bool rn_stream_execute_local(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	/* After SQE, which flushed what was on its way. */
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

void rn_stream_push(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	if (!streams->out || streams->out->ended || streams->out->state != RN_STREAM_OPEN)
		return;
	if (streams->rnr_until_ns && streams->rnr_until_ns <= rn_now_ns())
		streams->rnr_until_ns = 0;
	if (unlikely(qp->chaos) && qp->sq_executed != qp->sq_posted && rn_is_before(qp->sq_executed, streams->acked) &&
	    !(streams->reads && is_answered_with_data(&rn_sq_at(qp, qp->sq_executed)->wr)))
		hear_again(qp);
	if (streams->broken != IBV_WC_SUCCESS) {
		/* Its turn has come? It may be in the midst of its frames. */
		fail_in_turn(qp, streams->out->frame_sent ? streams->out->frame.serial : streams->next, streams->broken);
		return;
	}
	while (rn_stream_execute_local(qp) && push_some(qp))
		;
	rn_stream_expect(qp);
	if (streams->out && !streams->out->ended)
		rn_stream_watch(streams->out);
}

/* --- answers in ------------------------------------------------------------------------------------------- */

/* Complete, in order, what is known to be done. */
static void advance(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	while (rn_is_before(qp->sq_executed, streams->acked)) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);

		if (is_answered_with_data(&head->wr) && !head->answered)
			break;
		if (unlikely(qp->chaos) && rn_chaos_acknowledge(qp, head) != RN_WAIT_NOT) {
			rn_sq_wait(qp, RN_WAIT_LOST);
			break;
		}
		qp->count.bytes_stream += head->total;
		if (head->wr.send_flags & IBV_SEND_INLINE)
			qp->count.bytes_inline += head->total;
		rn_sq_complete(qp, &head->wr, IBV_WC_SUCCESS, head->total);
	}
}

void rn_stream_drop(struct rn_qp *qp)
{
	while (rn_stream_execute_local(qp) && qp->sq_executed != qp->sq_posted) {
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

/* The first request that was not framed at all, whatever was rewound. */
static uint32_t framed_end(const struct rn_qp *qp)
{
	const struct rn_streams *streams = &qp->streams;

	return streams->next + (streams->offset != 0);
}

bool rn_stream_acknowledged(struct rn_qp *qp, uint32_t count)
{
	struct rn_streams *streams = &qp->streams;

	if (!rn_is_before(streams->acked, count))
		return true; /* old news: it came by two ways */
	if (rn_is_before(streams->next, count))
		return false;
	streams->acked = count;
	advance(qp);
	return true;
}

/* Everything up to the request that this answer is about has been executed. False: it can't be about that. */
static bool is_about(struct rn_qp *qp, uint32_t serial)
{
	if (rn_is_before(serial, qp->sq_executed) || !rn_is_before(serial, framed_end(qp)))
		return false;
	if (rn_is_before(qp->streams.acked, serial)) {
		qp->streams.acked = serial;
		advance(qp);
	}
	return qp->sq_executed == serial;
}

static bool on_rnr(struct rn_qp *qp, const struct rn_wire_answer *answer)
{
	struct rn_streams *streams = &qp->streams;

	if (!is_about(qp, answer->serial) || answer->code > 31)
		return false;
	/* Back to it. What was sent behind it is thrown away there. */
	streams->stray_end = framed_end(qp);
	streams->next = answer->serial;
	streams->offset = 0;
	streams->reads = 0;
	streams->rnr_timer = answer->code;
	streams->rnr_until_ns = rn_now_ns() + rn_rnr_code_ns(answer->code);
	rn_sq_wait(qp, RN_WAIT_RNR);
	return true;
}

static bool on_nak(struct rn_qp *qp, const struct rn_wire_answer *answer)
{
	if (!is_about(qp, answer->serial) ||
	    (answer->code != IBV_WC_REM_INV_REQ_ERR && answer->code != IBV_WC_REM_ACCESS_ERR &&
	     answer->code != IBV_WC_REM_OP_ERR))
		return false;
	if (unlikely(rn_sq_at(qp, answer->serial)->plan.is_refused))
		qp->count.failed++;
	rn_sq_fail_head(qp, answer->code);
	return true;
}

/* A header has come: what follows, and is it allowed to? */
static bool on_data(struct rn_qp *qp, struct rn_stream *out)
{
	const struct rn_wire_answer *answer = &out->answer;
	bool is_read = answer->kind == RN_ANSWER_READ;
	struct rn_send *send;

	if (!is_about(qp, answer->serial) || !rn_is_before(answer->serial, qp->streams.next))
		return false;
	send = rn_sq_at(qp, answer->serial);
	if (!is_answered_with_data(&send->wr) || send->answered || (send->wr.opcode == IBV_WR_RDMA_READ) != is_read ||
	    answer->length > send->total - send->moved || (!answer->length && send->total))
		return false;
	out->answer_left = answer->length;
	return true;
}

/* Does the answer at hand end the request? */
static bool finish_data(struct rn_qp *qp, struct rn_stream *out)
{
	struct rn_send *send = rn_sq_at(qp, out->answer.serial);

	if (send->moved < send->total)
		return true;
	send->answered = true;
	qp->streams.reads--;
	out->answer.kind = 0;
	if (rn_is_before(qp->streams.acked, out->answer.serial + 1))
		return rn_stream_acknowledged(qp, out->answer.serial + 1);
	advance(qp); /* that it was executed we knew: the other connection was faster with its `ack` */
	return true;
}

/* Bytes of a READ or of an atomic, to where the request wants them. */
static bool take_data(struct rn_qp *qp, struct rn_stream *out)
{
	struct rn_send *send = rn_sq_at(qp, out->answer.serial);
	struct rn_piece pieces[RN_MAX_SGE];
	struct iovec direct[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint32_t here = rn_wire_available(out);
	bool fault = false;
	uint64_t total;
	int count, used;
	ssize_t got;

	status = rn_local_pieces_unprobed(qp, &send->wr, pieces, &count, &total);
	if (status != IBV_WC_SUCCESS) {
		rn_sq_fail_head(qp, status);
		return false;
	}
	if (here) {
		if (here > out->answer_left)
			here = out->answer_left;
		if (!rn_place(pieces, count, send->moved, rn_wire_take(out, here), here)) {
			rn_sq_fail_head(qp, IBV_WC_LOC_PROT_ERR);
			return false;
		}
	} else {
		size_t length = rn_wire_slice(pieces, count, send->moved, out->answer_left, direct, RN_MAX_SGE, &used);

		got = rn_wire_read(out, direct, used, length, &fault);
		if (fault) {
			rn_sq_fail_head(qp, IBV_WC_LOC_PROT_ERR);
			return false;
		}
		if (got == RN_WIRE_ENDED) {
			rn_stream_lost(out);
			return false;
		}
		here = (size_t)got < length ? (size_t)got : length;
	}
	send->moved += here;
	out->answer_left -= here;
	return out->answer_left || finish_data(qp, out);
}

/* One answer's header. */
static bool take_answer(struct rn_qp *qp, struct rn_stream *out)
{
	struct rn_wire_answer *answer = &out->answer;

	memcpy(answer, rn_wire_take(out, sizeof(*answer)), sizeof(*answer));
	switch (answer->kind) {
	case RN_ANSWER_ACK:
		return !answer->length && rn_stream_acknowledged(qp, answer->serial);
	case RN_ANSWER_RNR:
		return !answer->length && on_rnr(qp, answer);
	case RN_ANSWER_NAK:
		return !answer->length && on_nak(qp, answer);
	case RN_ANSWER_READ:
	case RN_ANSWER_ATOMIC:
		return on_data(qp, out) && (answer->length || finish_data(qp, out));
	case RN_ANSWER_RIDER:
		out->answer_left = answer->length;
		return rn_rider_makes_sense(answer->length);
	case RN_ANSWER_BYE:
		qp->streams.left = true;
		rn_stream_end(out);
		return false;
	default:
		return false;
	}
}

static bool is_rider_coming(const struct rn_stream *out)
{
	return out->answer_left && out->answer.kind == RN_ANSWER_RIDER;
}

/* So much at least has to be at hand. */
static uint32_t wanted(const struct rn_stream *out)
{
	if (!out->answer_left)
		return sizeof(out->answer);
	return is_rider_coming(out) ? out->answer_left : 1;
}

/* What was read already; the socket won't tell of it again. */
static bool has_more_at_hand(const struct rn_stream *out)
{
	return rn_wire_available(out) >= wanted(out);
}

bool rn_stream_receive(struct rn_qp *qp)
{
	struct rn_stream *out = qp->streams.out;
	size_t taken = 0;
	bool fine;

	out->drained = false;
	out->receiving = true; /* a rider that finds the end of its connection does not look for others from here */
	while (taken < READ_RUN || has_more_at_hand(out)) {
		bool rides = is_rider_coming(out);

		if (out->answer_left && !rides) {
			taken += out->answer_left;
			fine = take_data(qp, out);
			if (fine && out->answer_left && out->drained && !rn_wire_available(out))
				break;
		} else if (has_more_at_hand(out)) {
			fine = rides ? rn_rider_came(qp) : take_answer(qp, out);
		} else {
			ssize_t got;

			if (out->drained && taken) /* the last read told: there is no more */
				break;
			got = rn_wire_read(out, NULL, 0, 0, NULL);
			if (got == RN_WIRE_NOTHING)
				break;
			fine = got > 0;
			taken += fine ? (size_t)got : 0;
		}
		/* A request's failure, or BYE, ends the stream as well. */
		if (qp->streams.out != out || out->ended)
			return false;
		if (!fine) {
			rn_stream_lost(out);
			return false;
		}
	}
	out->receiving = false;
	return true;
}
