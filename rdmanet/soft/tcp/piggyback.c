/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Piggybacking: a reply goes back on the connection by which the request has come.
 *
 *     without                                      with
 *     A  ---- request -------- A's connection -->  B      A  ---- request -------- A's connection -->  B
 *     A  <--- TCP's ACK ------ A's connection ---  B      A  <--- ACK + reply ---- A's connection ---  B
 *     A  <--- reply ---------- B's connection ---  B
 *     A  ---- TCP's ACK ------ B's connection -->  B
 *
 * If nothing goes back on a connection, TCP acknowledges what was read with a packet of its own, and that costs a
 * third of a short round trip.  So instead of an ACK a short request of our own is sent there: it is piggybacked on
 * the answers, as an answer itself, whose payload is the frame.  Two programs that send to and fro then need one
 * connection, and a send and a receive on each side.
 *
 * The responder puts a piggybacked request before what waits in the input buffer of the requests' own connection, as
 * if it had come by that.
 *
 * Order.  Requests are executed in order, and two connections keep none between them.  So
 *   - a request is piggybacked only when all before it have been acknowledged: one at a time;
 *   - the request behind it is marked, goes by our own connection, and waits there until the piggybacked one has come;
 *   - a request behind others that have no frame is not piggybacked: its place could not be told by counting frames;
 *   - after an RNR NAK nothing is piggybacked until all that was sent before is acknowledged: frames that will be
 *     discarded there may still be on their way, and must not look like those sent again;
 *   - the end of the other connection counts when the piggybacked requests that came before it have been served.
 *
 * A piggybacked request is copied to the output, and so finished before anything else is sent there.  All of it with
 * the send lock held.
 */
#include "objects/mw.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

/* --- the requester ------------------------------------------------------------------------------------------ */

static bool is_short(const struct ibv_send_wr *wr)
{
	uint64_t total = 0;

	if (rn_fetches(wr->opcode) || rn_is_local(wr->opcode))
		return false;
	for (int i = 0; i < wr->num_sge; i++)
		total += wr->sg_list[i].length;
	return total <= RN_PIGGYBACK_BYTES;
}

/* By our own connection: nothing is under way, nor begun. */
static bool is_all_acknowledged(const struct rn_qp *qp)
{
	const struct rn_tcp_path *streams = qp->tcp;
	const struct rn_tcp *out = streams->out;

	return streams->acked == streams->next && !streams->offset && !rn_is_before(streams->acked, streams->stray_end) &&
	       !out->frame_sent && out->output_at == out->output_end;
}

/* The responder is yet to hear of them. */
static bool is_behind_skipped(const struct rn_tcp_path *streams)
{
	return streams->next == streams->skipped_to && streams->skipped_to != streams->skipped_from;
}

/* Their connection: an ACK is due there, and would go at once. */
static bool is_ack_due(const struct rn_tcp *in)
{
	return in && !in->ended && !in->failed && !in->reading && !in->chunk_left && in->told != in->expected &&
	       in->output_at == in->output_end;
}

bool rn_piggyback_may_go(const struct rn_qp *qp)
{
	const struct rn_send *send = rn_sq_at(qp, qp->tcp->next);
	const struct rn_tcp *in = qp->tcp->in;

	return is_ack_due(in) && !in->was_piggybacked && is_all_acknowledged(qp) && !qp->unreliable &&
	       !is_behind_skipped(qp->tcp) && is_short(&send->wr) && !send->plan.status;
}

enum ibv_wc_status rn_piggyback_send(struct rn_qp *qp, const struct rn_tcp_frame *frame)
{
	struct rn_tcp_answer answer = {.kind = RN_ANSWER_PIGGYBACK, .length = sizeof(*frame) + frame->length};
	struct rn_tcp *in = qp->tcp->in;
	struct rn_piece pieces[RN_MAX_SGE];
	char payload[RN_PIGGYBACK_BYTES];
	enum ibv_wc_status status;
	uint64_t total;
	int count;

	status = rn_local_pieces(qp, &rn_sq_at(qp, frame->serial)->wr, pieces, &count, &total);
	if (status != IBV_WC_SUCCESS)
		return status;
	if (!rn_gather(pieces, count, payload))
		return IBV_WC_LOC_PROT_ERR;
	rn_tcp_put(in, &answer, sizeof(answer));
	rn_tcp_put(in, frame, sizeof(*frame));
	rn_tcp_put(in, payload, total);
	in->told = frame->ack;
	qp->tcp->behind_piggyback = frame->serial + 1;
	if (!rn_tcp_flush(in))
		rn_tcp_watch(in);
	return IBV_WC_SUCCESS;
}

/* --- the responder ------------------------------------------------------------------------------------------ */

bool rn_piggyback_makes_sense(uint32_t length)
{
	return length >= sizeof(struct rn_tcp_frame) && length <= RN_PIGGYBACK_MAX;
}

/* The whole message, and nothing else. */
static bool is_whole(const struct rn_tcp_frame *frame, uint32_t length)
{
	return !frame->offset && frame->length == frame->total && frame->length == length - sizeof(*frame);
}

bool rn_piggyback_came(struct rn_qp *qp)
{
	struct rn_tcp *out = qp->tcp->out, *in = qp->tcp->in;
	uint32_t length = out->answer_left;
	const char *request = rn_tcp_take(out, length);
	struct rn_tcp_frame frame;

	out->answer_left = 0;
	if (in && (in->ended || in->failed))
		return true; /* thrown away, like all that comes */
	memcpy(&frame, request, sizeof(frame));
	if (!in || in->is_piggybacked || in->payload_left || in->reading || !is_whole(&frame, length) ||
	    !rn_tcp_put_back(in, request, length))
		return false;
	in->is_piggybacked = true;
	in->held = false;
	rn_tcp_serve(qp);
	return true;
}

bool rn_piggyback_is_ahead(const struct rn_qp *qp)
{
	const struct rn_tcp *out = qp->tcp->out, *in = qp->tcp->in;

	/* It can come by our own connection only. */
	return in->head.flags & RN_FRAME_BEHIND_PIGGYBACK && in->head.serial == in->expected + 1 && !in->is_piggybacked &&
	       !in->waits && !in->failed && out && !out->ended && out->state == RN_TCP_OPEN;
}
