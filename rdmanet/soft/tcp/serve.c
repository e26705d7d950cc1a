/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder of a stream: frames become requests to responder/responder.c, which checks them; the payload goes
 * straight to the memory that it names; answers go back.
 *
 * All of it with the queue pair's send lock held, so nobody deregisters memory or moves the queue pair
 * meanwhile: deregistration takes that lock after invalidating the key.  Between two runs anything may
 * have changed, so keys are checked again before each piece.
 *
 * While an answer can't go out, no further frame is looked at: a requester that doesn't take its answers
 * delays only itself.
 */
#include "objects/mw.h"
#include "objects/quiesce.h"
#include "tcp/tcp.h"

enum {
	RUN_BYTES = 1024 * 1024, /* before another stream gets its turn */
	ANSWER_ROOM = 64,        /* the most that one frame adds to the output */
	TELL_COUNT = 8,          /* ACKs are put off, but not for more requests than these, */
	TELL_BYTES = 16 * 1024,  /* or for longer messages */
};

static const struct {
	enum ibv_wr_opcode opcode;
	bool has_payload;
} kinds[RN_FRAME_KINDS] = {
	[RN_FRAME_SEND] = {IBV_WR_SEND, true},
	[RN_FRAME_SEND_IMM] = {IBV_WR_SEND_WITH_IMM, true},
	[RN_FRAME_SEND_INV] = {IBV_WR_SEND_WITH_INV, true},
	[RN_FRAME_WRITE] = {IBV_WR_RDMA_WRITE, true},
	[RN_FRAME_WRITE_IMM] = {IBV_WR_RDMA_WRITE_WITH_IMM, true},
	[RN_FRAME_READ] = {IBV_WR_RDMA_READ, false},
	[RN_FRAME_SWAP] = {IBV_WR_ATOMIC_CMP_AND_SWP, false},
	[RN_FRAME_ADD] = {IBV_WR_ATOMIC_FETCH_AND_ADD, false},
};

static void put_answer(struct rn_tcp *in, enum rn_answer_kind kind, uint8_t code, uint32_t serial, uint32_t length)
{
	struct rn_tcp_answer answer = {.kind = kind, .code = code, .serial = serial, .length = length};

	rn_tcp_put(in, &answer, sizeof(answer)); /* there is room: see serve */
}

void rn_tcp_tell(struct rn_qp *qp)
{
	struct rn_tcp *in = qp->tcp->in;

	if (!in || in->ended || in->told == in->expected || in->failed || in->chunk_left)
		return;
	if (rn_tcp_room(in) < ANSWER_ROOM && !rn_tcp_flush(in))
		return;
	in->told = in->expected;
	put_answer(in, RN_ANSWER_ACK, 0, in->expected, 0);
	if (!rn_tcp_flush(in))
		rn_tcp_watch(in);
}

/* The request fails, and this queue pair with it: responder/responder.c has noted that for the engine. */
static void refuse(struct rn_qp *qp, struct rn_tcp *in, enum ibv_wc_status status)
{
	if (unlikely(in->ctx.unreliable)) {
		in->drops = true;
		return;
	}
	if (status == IBV_WC_REM_ACCESS_ERR)
		rn_mr_key_refused(qp);
	put_answer(in, RN_ANSWER_NAK, status, in->head.serial, 0);
	in->failed = in->discards = true;
}

/* Send this answer; none follows it. */
static void fall_silent(struct rn_tcp *in)
{
	put_answer(in, RN_ANSWER_BYE, 0, 0, 0);
	in->failed = in->discards = true;
}

/* --- READ ------------------------------------------------------------------------------------------------------ */

/* In the middle of a message: must it stop here? */
static bool is_withdrawn(struct rn_tcp *in)
{
	const struct rn_transfer *t = &in->transfer;

	for (int i = 0; i < t->num_remote; i++)
		if (atomic_load(&t->remote[i].mr->key) != t->remote[i].key)
			return true;
	in->is_gone |= !rn_responder_is_alive(&in->ctx);
	return in->is_gone;
}

/* It must. A queue pair in ERR, or whose link is down, answers nobody: that is not the requester's mistake. */
static void refuse_withdrawn(struct rn_qp *qp, struct rn_tcp *in)
{
	if (!in->is_gone) {
		refuse(qp, in, rn_respond_refuse(&in->ctx, &in->request, &in->transfer));
		return;
	}
	rn_responder_give_back(&in->ctx);
	if (in->ctx.unreliable)
		in->drops = true;
	else
		fall_silent(in);
}

/* Go on with the answer to a READ. False: the socket takes no more for now, or it is over. */
static bool answer_read(struct rn_qp *qp, struct rn_tcp *in)
{
	static const char zeros[4096];
	struct rn_transfer *t = &in->transfer;
	uint64_t body = t->total - rn_tcp_tail_length(t);
	struct iovec from[RN_MAX_SGE + 1];
	size_t tail_bytes = 0, body_sent;
	bool fault = false;
	struct rn_tcp_tail tail;
	ssize_t sent;
	int used = 0;

	if (rn_tcp_room(in) < sizeof(tail.answer) + sizeof(tail) && !rn_tcp_flush(in))
		return false;
	if (!in->chunk_left) {
		uint64_t left = body - t->moved;

		if (in->padding || is_withdrawn(in)) {
			in->reading = in->padding = false;
			refuse_withdrawn(qp, in);
			return true;
		}
		in->chunk_left = left < RN_FRAME_BYTES ? left : RN_FRAME_BYTES;
		if (in->chunk_left)
			put_answer(in, RN_ANSWER_READ, 0, in->head.serial, in->chunk_left);
	}
	in->padding |= is_withdrawn(in);
	if (!in->padding && t->moved + in->chunk_left == body)
		in->padding = !(tail_bytes = rn_tcp_make_tail(in, &tail));
	if (in->padding && !in->chunk_left)
		return true;
	if (in->padding)
		from[used++] = (struct iovec){(char *)zeros,
					      in->chunk_left < sizeof(zeros) ? in->chunk_left : sizeof(zeros)};
	else
		rn_slice(t->remote, t->num_remote, t->moved, in->chunk_left, from, RN_MAX_SGE, &used);
	if (tail_bytes)
		from[used++] = (struct iovec){&tail, tail_bytes};
	sent = rn_tcp_write(in, from, used, &fault);
	if (sent == RN_TCP_ENDED) {
		rn_tcp_lost(in);
		return false;
	}
	if (fault) {
		in->padding = true;
		return true;
	}
	body_sent = (size_t)sent < in->chunk_left ? (size_t)sent : in->chunk_left;
	t->moved += body_sent;
	in->chunk_left -= body_sent;
	if (in->chunk_left)
		return !in->wants_out;
	if (tail_bytes) {
		rn_tcp_put(in, (char *)&tail + (sent - body_sent), tail_bytes - (sent - body_sent));
		in->reading = false;
		in->told = ++in->expected; /* the answer says it */
	}
	return true;
}

/* --- frames ------------------------------------------------------------------------------------------------------ */

static bool makes_sense(const struct rn_tcp *in)
{
	const struct rn_tcp_frame *frame = &in->head;

	if (!frame->kind || frame->kind >= RN_FRAME_KINDS || frame->flags & ~RN_FRAME_FLAGS)
		return false;
	if (frame->kind == RN_FRAME_BYE || frame->kind == RN_FRAME_HERE)
		return !frame->length;
	if (frame->total > RN_MAX_MESSAGE || frame->offset > frame->total || frame->length > RN_FRAME_BYTES ||
	    frame->length > frame->total - frame->offset)
		return false;
	if (frame->kind == RN_FRAME_NOTHING)
		return !frame->total;
	if (frame->kind == RN_FRAME_REFUSED)
		return !frame->total && !in->ctx.unreliable && rn_fault_note(frame->imm) != RN_FAULT_NONE;
	if (!kinds[frame->kind].has_payload)
		return !frame->length && !frame->offset &&
		       (frame->kind == RN_FRAME_READ || frame->total == sizeof(uint64_t));
	return frame->length || !frame->total;
}

static void read_frame(const struct rn_tcp_frame *frame, struct rn_request *request)
{
	*request = (struct rn_request){
		.opcode = kinds[frame->kind].opcode,
		.send_flags = frame->flags & RN_FRAME_SOLICITED ? IBV_SEND_SOLICITED : 0,
		.imm_data = frame->imm,
		.invalidate_rkey = frame->imm,
		.remote_addr = frame->addr,
		.rkey = frame->rkey,
		.srqn = frame->srqn,
		.compare_add = frame->compare_add,
		.swap = frame->swap,
	};
}

static void message_done(struct rn_tcp *in)
{
	if (likely(!in->drops))
		rn_respond_finish(&in->ctx, &in->request, &in->transfer);
	in->expected++;
	in->message_done = 0;
}

static void answer_atomic(struct rn_qp *qp, struct rn_tcp *in)
{
	uint64_t before;

	if (!rn_respond_atomic(in->head.kind == RN_FRAME_ADD, in->request.compare_add, in->request.swap,
			       in->transfer.remote[0].at, &before)) {
		refuse(qp, in, rn_respond_refuse(&in->ctx, &in->request, &in->transfer));
		return;
	}
	put_answer(in, RN_ANSWER_ATOMIC, 0, in->head.serial, sizeof(before));
	rn_tcp_put(in, &before, sizeof(before));
	in->told = ++in->expected;
}

/* The first frame of a message: the responder's checks. */
static void begin_message(struct rn_qp *qp, struct rn_tcp *in)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	enum rn_wait wait;

	if (unlikely(in->head.kind == RN_FRAME_REFUSED)) {
		rn_responder_leave_fault(&in->ctx, rn_fault_note(in->head.imm));
		refuse(qp, in, in->head.imm);
		return;
	}
	read_frame(&in->head, &in->request);
	in->transfer.total = in->head.total;
	in->transfer.moved = 0;
	in->transfer.refused = false;
	in->is_gone = false;
	wait = rn_respond_prepare(&in->ctx, &in->request, &in->transfer, &status);
	if (unlikely(in->ctx.unreliable) && (wait != RN_WAIT_NOT || status != IBV_WC_SUCCESS)) {
		rn_responder_give_back(&in->ctx);
		in->drops = true; /* as if it had never arrived */
		return;
	}
	if (wait == RN_WAIT_RNR) {
		put_answer(in, RN_ANSWER_RNR, atomic_load(&qp->own->min_rnr_timer) & 31, in->head.serial, 0);
		in->waits = in->discards = true;
	} else if (wait != RN_WAIT_NOT) { /* memory of our own is always there */
		refuse(qp, in, IBV_WC_REM_OP_ERR);
	} else if (status != IBV_WC_SUCCESS) {
		refuse(qp, in, status);
	} else if (in->head.kind == RN_FRAME_READ) {
		in->reading = true;
		in->padding = false;
	} else if (!kinds[in->head.kind].has_payload) {
		answer_atomic(qp, in);
	}
}

/* A frame's header. False: it breaks the rules. */
static bool begin_frame(struct rn_qp *qp, struct rn_tcp *in)
{
	const struct rn_tcp_frame *frame = &in->head;
	bool piggybacked = in->is_piggybacked;

	in->is_piggybacked = false;
	in->confirmed = true;
	if (!makes_sense(in))
		return false;
	if (frame->kind == RN_FRAME_HERE)
		return true;
	if (frame->kind == RN_FRAME_BYE) {
		in->said_bye = qp->tcp->left = true;
		return true;
	}
	in->payload_left = frame->length;
	if (in->failed)
		return true; /* discarding all */
	if (!rn_tcp_acknowledged(qp, frame->ack))
		return false;
	if (in->waits && (frame->serial != in->expected || frame->offset))
		return true; /* sent before the NAK came: so it is discarded as well */
	if (unlikely(frame->serial != in->expected) && frame->serial - in->expected <= frame->skipped && !in->message_done)
		in->expected = frame->serial;
	if (frame->serial != in->expected || frame->offset != in->message_done)
		return false;
	in->waits = in->discards = false;
	in->was_piggybacked = piggybacked;
	if (frame->kind == RN_FRAME_NOTHING) {
		in->expected++;
		return true;
	}
	if (!frame->offset) {
		in->drops = false;
		if (!rn_responder_is_alive(&in->ctx)) {
			fall_silent(in);
			return true;
		}
		if (unlikely(atomic_load(&qp->state) == IBV_QPS_RTR) && !atomic_exchange(&qp->theirs->established, 1))
			rn_responder_wake_owner(&in->ctx);
		begin_message(qp, in);
	} else if (frame->total != in->transfer.total || kinds[frame->kind].opcode != in->request.opcode) {
		return false;
	}
	if (!frame->total && !in->discards && kinds[frame->kind].has_payload)
		message_done(in);
	return true;
}

/* Payload bytes were placed, or thrown away. */
static void account(struct rn_tcp *in, uint32_t length)
{
	in->payload_left -= length;
	if (in->discards)
		return;
	in->message_done += length;
	in->transfer.moved += length;
	if (in->transfer.moved == in->transfer.total)
		message_done(in);
}

/* Payload that is in the input buffer already. */
static void take_buffered(struct rn_qp *qp, struct rn_tcp *in)
{
	uint32_t here = rn_tcp_available(in);
	struct rn_transfer *t = &in->transfer;
	const char *data;

	if (here > in->payload_left)
		here = in->payload_left;
	data = rn_tcp_take(in, here);
	if (!in->discards && !in->drops && is_withdrawn(in))
		refuse_withdrawn(qp, in);
	else if (!in->discards && !in->drops && !rn_place(t->remote, t->num_remote, t->moved, data, here))
		refuse(qp, in, rn_respond_refuse(&in->ctx, &in->request, t));
	account(in, here);
}

/* Payload from the socket. False: there is none now, or it is over. */
static bool take_direct(struct rn_qp *qp, struct rn_tcp *in)
{
	struct rn_transfer *t = &in->transfer;
	struct iovec to[RN_MAX_SGE];
	bool fault = false;
	size_t length = 0;
	ssize_t got;
	int used = 0;

	if (!in->discards && !in->drops && is_withdrawn(in))
		refuse_withdrawn(qp, in);
	if (!in->discards && !in->drops)
		length = rn_slice(t->remote, t->num_remote, t->moved, in->payload_left, to, RN_MAX_SGE, &used);
	got = rn_tcp_read(in, to, used, length, &fault);
	if (fault) {
		refuse(qp, in, rn_respond_refuse(&in->ctx, &in->request, t));
		return true;
	}
	if (got == RN_TCP_ENDED) {
		rn_tcp_lost(in);
		return false;
	}
	if (length && got > 0)
		account(in, (size_t)got < length ? (size_t)got : length);
	return got > 0 && (!in->drained || rn_tcp_available(in));
}

/* What the peer sent on the other connection before this one ended has arrived before the end. */
static void receive_piggyback(struct rn_qp *qp)
{
	const struct rn_tcp *out = qp->tcp->out, *in = qp->tcp->in;

	if (qp->tcp->acked != qp->tcp->next && out && !out->ended && out->state == RN_TCP_OPEN &&
	    !out->receiving && !(in && in->serving)) /* it may not have come yet */
		rn_tcp_receive(qp);
}

void rn_tcp_last_look(struct rn_qp *qp)
{
	enum { LOOKS = 4 }; /* no sender may keep us here */
	struct rn_tcp *in = qp->tcp->in;

	for (int i = 0; i < LOOKS && in && !in->ended && !in->failed && !in->serving && in->state == RN_TCP_OPEN; i++)
		if (!rn_tcp_serve(qp) || in->drained)
			break;
	receive_piggyback(qp);
}

/* Nothing more will come, for one reason or another. */
static void end(struct rn_qp *qp, struct rn_tcp *in)
{
	receive_piggyback(qp);
	if (in->ended)
		return;
	if (!in->said_bye) {
		rn_tcp_lost(in);
		return;
	}
	rn_responder_give_back(&in->ctx);
	rn_tcp_end(in);
}

/* Serve the frames that have arrived, until it is another stream's turn; return how many bytes. fine: the peer keeps
 * the rules. is_over: the connection has ended. */
static uint32_t serve_frames(struct rn_qp *qp, struct rn_tcp *in, bool *fine, bool *is_over)
{
	uint32_t run = 0;

	while (run < RUN_BYTES && !in->ended) {
		if (in->reading) {
			if (!answer_read(qp, in))
				break;
			run += RN_FRAME_BYTES;
		} else if (rn_tcp_room(in) < ANSWER_ROOM && !rn_tcp_flush(in)) {
			break;
		} else if (in->payload_left) {
			run += in->payload_left;
			if (rn_tcp_available(in))
				take_buffered(qp, in);
			else if (!take_direct(qp, in))
				break;
			run -= in->payload_left;
		} else if (rn_tcp_available(in) >= sizeof(in->head)) {
			memcpy(&in->head, in->input + in->input_at, sizeof(in->head));
			in->held = rn_piggyback_is_ahead(qp);
			if (in->held)
				break;
			rn_tcp_take(in, sizeof(in->head));
			run += sizeof(in->head);
			*fine = begin_frame(qp, in);
			if (!*fine || in->head.kind == RN_FRAME_BYE)
				break;
		} else {
			ssize_t got;

			if (in->drained)
				break;
			got = rn_tcp_read(in, NULL, 0, 0, NULL);
			*is_over = got == RN_TCP_ENDED;
			if (got <= 0)
				break;
		}
	}
	return run;
}

bool rn_tcp_serve(struct rn_qp *qp)
{
	struct rn_tcp *in = qp->tcp->in;
	uint32_t run, before = in->expected;
	bool fine = true, is_over = false;

	in->serving = true;
	rn_serving_begin(qp->index);

	in->drained = in->is_piggybacked; /* its socket was not read */
	run = serve_frames(qp, in, &fine, &is_over);
	if (in->ctx.pushed)
		rn_responder_announce(&in->ctx);
	if (!fine && !in->ended)
		rn_tcp_lost(in);
	rn_serving_end(qp->index);
	in->serving = false;
	if (is_over || in->said_bye)
		end(qp, in);
	if (in->ended)
		return false;
	/* A program that polls is likely to answer, and the ACK goes along with that. */
	if (in->output_at != in->output_end || !qp->tcp->polled || in->expected - in->told > TELL_COUNT ||
	    run > TELL_BYTES || in->expected - before > TELL_COUNT)
		rn_tcp_tell(qp);
	if (!in->reading)
		rn_tcp_flush(in);
	/* The turn is over, and the socket raises no event for what has been read from it already. */
	if (run >= RUN_BYTES && (in->reading || rn_tcp_available(in)))
		rn_tcp_go_on(in);
	rn_tcp_watch(in);
	return true;
}
