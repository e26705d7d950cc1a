/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester of a stream: answers become completions.  send.c shows how far requests have come.
 *
 * An answer acknowledges all requests up to the one that it is about.  They complete in order, so those behind a READ
 * wait until its data have come.  The data go from the socket straight to where the work request wants them.  After an
 * RNR NAK the requester goes back to the request that found no receive.
 *
 * All of it with the send lock held, by whichever thread is there: the poster, the engine, or poll_cq.
 */
#include "faults/iwarp.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

enum { READ_RUN = 1024 * 1024 }; /* bytes of answers before others have their turn */

void rn_tcp_advance(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	while (rn_is_before(qp->sq_executed, streams->acked)) {
		struct rn_send *head = rn_sq_at(qp, qp->sq_executed);

		if (rn_fetches(head->wr.opcode) && !head->answered)
			break;
		if (unlikely(qp->faults.injector) && rn_fault_acknowledge(&qp->faults, &head->plan) != RN_WAIT_NOT) {
			rn_sq_wait(qp, RN_WAIT_LOST);
			break;
		}
		qp->count.bytes_stream += head->total;
		if (head->wr.send_flags & IBV_SEND_INLINE)
			qp->count.bytes_inline += head->total;
		rn_sq_complete(qp, &head->wr, IBV_WC_SUCCESS, head->total);
	}
}

/* The first request that was not framed at all, whatever was rewound. */
static uint32_t framed_end(const struct rn_qp *qp)
{
	const struct rn_tcp_path *streams = qp->tcp;

	return streams->next + (streams->offset != 0);
}

bool rn_tcp_acknowledged(struct rn_qp *qp, uint32_t count)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (!rn_is_before(streams->acked, count))
		return true; /* known already: both connections report it */
	if (rn_is_before(streams->next, count))
		return false;
	streams->acked = count;
	rn_tcp_advance(qp);
	return true;
}

/* The responder has executed everything up to the request that this answer names. False: it can't name that one. */
static bool is_about(struct rn_qp *qp, uint32_t serial)
{
	if (!rn_is_before(serial, framed_end(qp)))
		return false;
	if (rn_is_before(qp->tcp->acked, serial)) {
		qp->tcp->acked = serial;
		rn_tcp_advance(qp);
	}
	return qp->sq_executed == serial;
}

static bool on_rnr(struct rn_qp *qp, const struct rn_tcp_answer *answer)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (!is_about(qp, answer->serial) || answer->code > 31)
		return false;
	/* Go back to it: the responder discards what was sent after it. */
	streams->stray_end = framed_end(qp);
	streams->next = answer->serial;
	streams->offset = 0;
	streams->reads = 0;
	streams->broken = IBV_WC_SUCCESS; /* that was of this one or a later, and is found again in its turn */
	streams->out->frame_is_void = streams->out->frame_sent;
	qp->rnr_timer = answer->code;
	streams->rnr_until_ns = rn_now_ns() + rn_rnr_code_ns(answer->code);
	rn_sq_wait(qp, RN_WAIT_RNR);
	return true;
}

static bool on_nak(struct rn_qp *qp, const struct rn_tcp_answer *answer)
{
	if (!is_about(qp, answer->serial) ||
	    (answer->code != IBV_WC_REM_INV_REQ_ERR && answer->code != IBV_WC_REM_ACCESS_ERR &&
	     answer->code != IBV_WC_REM_OP_ERR))
		return false;
	rn_sq_fail_head(qp, answer->code);
	return true;
}

/* A header has arrived: determine what follows it, and whether that is allowed. */
static bool on_data(struct rn_qp *qp, struct rn_tcp *out)
{
	const struct rn_tcp_answer *answer = &out->answer;
	bool is_read = answer->kind == RN_ANSWER_READ;
	struct rn_send *send;

	if (!is_about(qp, answer->serial) || !rn_is_before(answer->serial, qp->tcp->next))
		return false;
	send = rn_sq_at(qp, answer->serial);
	if (!rn_fetches(send->wr.opcode) || send->answered || (send->wr.opcode == IBV_WR_RDMA_READ) != is_read ||
	    answer->length > send->total - send->moved || (!answer->length && send->total))
		return false;
	out->answer_left = answer->length;
	return true;
}

/* Does the answer at hand end the request? */
static bool finish_data(struct rn_qp *qp, struct rn_tcp *out)
{
	struct rn_send *send = rn_sq_at(qp, out->answer.serial);

	if (send->moved < send->total)
		return true;
	send->answered = true;
	qp->tcp->reads--;
	out->answer.kind = 0;
	if (rn_is_before(qp->tcp->acked, out->answer.serial + 1))
		return rn_tcp_acknowledged(qp, out->answer.serial + 1);
	rn_tcp_advance(qp); /* known to be executed: the `ack` of the other connection was faster */
	return true;
}

/* Put bytes of a READ or of an atomic where the request wants them. */
static bool take_data(struct rn_qp *qp, struct rn_tcp *out)
{
	struct rn_send *send = rn_sq_at(qp, out->answer.serial);
	struct rn_piece pieces[RN_MAX_SGE];
	struct iovec direct[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint32_t here = rn_tcp_available(out);
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
		if (!rn_place(pieces, count, send->moved, rn_tcp_take(out, here), here)) {
			rn_sq_fail_head(qp, IBV_WC_LOC_PROT_ERR);
			return false;
		}
	} else {
		size_t length = rn_slice(pieces, count, send->moved, out->answer_left, direct, RN_MAX_SGE, &used);

		got = rn_tcp_read(out, direct, used, length, &fault);
		if (fault) {
			rn_sq_fail_head(qp, IBV_WC_LOC_PROT_ERR);
			return false;
		}
		if (got == RN_TCP_ENDED) {
			rn_tcp_lost(out);
			return false;
		}
		here = (size_t)got < length ? (size_t)got : length;
	}
	send->moved += here;
	out->answer_left -= here;
	return out->answer_left || finish_data(qp, out);
}

/* Take one answer's header. */
static bool take_answer(struct rn_qp *qp, struct rn_tcp *out)
{
	struct rn_tcp_answer *answer = &out->answer;

	memcpy(answer, rn_tcp_take(out, sizeof(*answer)), sizeof(*answer));
	switch (answer->kind) {
	case RN_ANSWER_ACK:
		return !answer->length && rn_tcp_acknowledged(qp, answer->serial);
	case RN_ANSWER_RNR:
		return !answer->length && on_rnr(qp, answer);
	case RN_ANSWER_NAK:
		return !answer->length && on_nak(qp, answer);
	case RN_ANSWER_READ:
	case RN_ANSWER_ATOMIC:
		return on_data(qp, out) && (answer->length || finish_data(qp, out));
	case RN_ANSWER_PIGGYBACK:
		out->answer_left = answer->length;
		return rn_piggyback_makes_sense(answer->length);
	case RN_ANSWER_BYE:
		qp->tcp->left = true;
		rn_tcp_end(out);
		return false;
	default:
		return false;
	}
}

static bool is_piggyback_coming(const struct rn_tcp *out)
{
	return out->answer_left && out->answer.kind == RN_ANSWER_PIGGYBACK;
}

/* At least this many bytes must be in the buffer. */
static uint32_t wanted(const struct rn_tcp *out)
{
	if (!out->answer_left)
		return sizeof(out->answer);
	return is_piggyback_coming(out) ? out->answer_left : 1;
}

/* Bytes that were read already; the socket raises no event for them. */
static bool has_more_at_hand(const struct rn_tcp *out)
{
	return rn_tcp_available(out) >= wanted(out);
}

bool rn_tcp_receive(struct rn_qp *qp)
{
	struct rn_tcp *out = qp->tcp->out;
	size_t taken = 0;
	bool fine;

	out->drained = false;
	out->receiving = true; /* a piggybacked request that finds its connection ended must not look for others */
	while (taken < READ_RUN || has_more_at_hand(out)) {
		bool piggyback = is_piggyback_coming(out);

		if (out->answer_left && !piggyback) {
			taken += out->answer_left;
			fine = take_data(qp, out);
			if (fine && out->answer_left && out->drained && !rn_tcp_available(out))
				break;
		} else if (has_more_at_hand(out)) {
			fine = piggyback ? rn_piggyback_came(qp) : take_answer(qp, out);
		} else {
			ssize_t got;

			if (out->drained && taken) /* the last read showed that there is no more */
				break;
			got = rn_tcp_read(out, NULL, 0, 0, NULL);
			if (got == RN_TCP_NOTHING)
				break;
			fine = got > 0;
			taken += fine ? (size_t)got : 0;
		}
		/* A request's failure, or BYE, ends the stream as well. */
		if (qp->tcp->out != out || out->ended)
			return false;
		if (!fine) {
			rn_tcp_lost(out);
			return false;
		}
	}
	out->receiving = false;
	return true;
}
