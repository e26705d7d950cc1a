/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Riders: a reply goes back on the connection by which the request has come.
 *
 *     without                                      with
 *     A  ---- request -------- A's connection -->  B      A  ---- request -------- A's connection -->  B
 *     A  <--- TCP's ACK ------ A's connection ---  B      A  <--- ACK + reply ---- A's connection ---  B
 *     A  <--- reply ---------- B's connection ---  B
 *     A  ---- TCP's ACK ------ B's connection -->  B
 *
 * On a connection that nothing goes back on TCP acknowledges whatever was read by a packet of its own, and that costs
 * a third of a short round trip.  So where an ACK would go, a short request of our own goes in its stead: it rides
 * on the answers, as an answer itself, whose payload is the frame.  Two programs that send to and fro are left with
 * one connection, and a send and a receive on each side.
 *
 * The responder puts a rider before whatever waits in the input buffer of the requests' own connection, as if it had
 * come by that.
 *
 * Order.  Requests are executed in order, and two connections keep none between them.  So
 *   - a request rides only when all before it have been acknowledged: one at a time;
 *   - the request behind it is marked, goes by our own connection, and waits there until the rider has come;
 *   - nor does one ride behind requests that have no frame: it is by the count that others know what it is behind;
 *   - after an RNR NAK nothing rides before all that was sent until then is acknowledged: frames that
 *     are thrown away there may be under way yet, and must not look like those sent again;
 *   - the end of the other connection counts when riders that came before it have been served.
 *
 * A rider is copied to the output, and so finished before anything else goes that way.  All of it with the send lock
 * held.
 */
#include "soft.h"

/* --- the requester ------------------------------------------------------------------------------------------ */

static bool is_short(const struct ibv_send_wr *wr)
{
	uint64_t total = 0;

	if (rn_fetches(wr->opcode) || rn_is_local(wr->opcode))
		return false;
	for (int i = 0; i < wr->num_sge; i++)
		total += wr->sg_list[i].length;
	return total <= RN_RIDER_BYTES;
}

/* By our own connection: nothing is under way, nor begun. */
static bool is_all_acknowledged(const struct rn_qp *qp)
{
	const struct rn_streams *streams = &qp->streams;
	const struct rn_stream *out = streams->out;

	return streams->acked == streams->next && !streams->offset && !rn_is_before(streams->acked, streams->stray_end) &&
	       !out->frame_sent && out->output_at == out->output_end;
}

/* The responder is yet to hear of them. */
static bool is_behind_skipped(const struct rn_streams *streams)
{
	return streams->next == streams->skipped_to && streams->skipped_to != streams->skipped_from;
}

/* Their connection: an ACK is due there, and would go at once. */
static bool is_ack_due(const struct rn_stream *in)
{
	return in && !in->ended && !in->failed && !in->reading && !in->chunk_left && in->told != in->expected &&
	       in->output_at == in->output_end;
}

bool rn_rider_may_go(const struct rn_qp *qp)
{
	const struct rn_send *send = rn_sq_at(qp, qp->streams.next);
	const struct rn_stream *in = qp->streams.in;

	return is_ack_due(in) && !in->rode && is_all_acknowledged(qp) && !qp->unreliable && !is_behind_skipped(&qp->streams) &&
	       is_short(&send->wr) && !send->plan.status;
}

enum ibv_wc_status rn_rider_send(struct rn_qp *qp, const struct rn_wire_frame *frame)
{
	struct rn_wire_answer answer = {.kind = RN_ANSWER_RIDER, .length = sizeof(*frame) + frame->length};
	struct rn_stream *in = qp->streams.in;
	struct rn_piece pieces[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint64_t total;
	int count;

	status = rn_local_pieces(qp, &rn_sq_at(qp, frame->serial)->wr, pieces, &count, &total);
	if (status != IBV_WC_SUCCESS)
		return status;
	rn_wire_put(in, &answer, sizeof(answer));
	rn_wire_put(in, frame, sizeof(*frame));
	for (int i = 0; i < count; i++)
		rn_wire_put(in, pieces[i].at, pieces[i].length);
	in->told = frame->ack;
	qp->streams.behind_rider = frame->serial + 1;
	if (!rn_wire_flush(in))
		rn_stream_watch(in);
	return IBV_WC_SUCCESS;
}

/* --- the responder ------------------------------------------------------------------------------------------ */

bool rn_rider_makes_sense(uint32_t length)
{
	return length >= sizeof(struct rn_wire_frame) && length <= RN_RIDER_MAX;
}

/* The whole message, and nothing else. */
static bool is_whole(const struct rn_wire_frame *frame, uint32_t length)
{
	return !frame->offset && frame->length == frame->total && frame->length == length - sizeof(*frame);
}

bool rn_rider_came(struct rn_qp *qp)
{
	struct rn_stream *out = qp->streams.out, *in = qp->streams.in;
	uint32_t length = out->answer_left;
	const char *rider = rn_wire_take(out, length);
	struct rn_wire_frame frame;

	out->answer_left = 0;
	if (in && (in->ended || in->failed))
		return true; /* thrown away, like all that comes */
	memcpy(&frame, rider, sizeof(frame));
	if (!in || in->rides || in->payload_left || in->reading || !is_whole(&frame, length) ||
	    !rn_wire_put_back(in, rider, length))
		return false;
	in->rides = true;
	in->held = false;
	rn_stream_serve(qp);
	return true;
}

bool rn_rider_is_ahead(const struct rn_qp *qp)
{
	const struct rn_stream *out = qp->streams.out, *in = qp->streams.in;

	/* It can come by our own connection only. */
	return in->head.flags & RN_FRAME_BEHIND_RIDER && in->head.serial == in->expected + 1 && !in->rides && !in->waits &&
	       !in->failed && out && !out->ended && out->state == RN_STREAM_OPEN;
}
