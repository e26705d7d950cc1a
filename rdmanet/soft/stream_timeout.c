/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester's patience: what the queue pair's timeout and retry count mean on a stream.
 *
 * An adapter that hears no acknowledgement within 4.096 us * 2^timeout sends again, and after retry_cnt
 * times in vain the request fails with RETRY_EXC_ERR.  Here TCP sends again, and never tires of it for a quarter
 * of an hour.  So once a request is on its way the stream is looked at now and then; when nothing has been
 * acknowledged for (retry_cnt + 1) timeouts, and the other host has been silent all that time, it is over.
 *
 *     acknowledged something since        patience begins anew
 *     the host acknowledges TCP's bytes   it is alive, and its process slow or stopped: so does it
 *     it leaves some unanswered           patience runs out
 *     there is nothing to answer          a HERE is sent: now there is
 *
 * An adapter answers for a process that is stopped; a stopped process can't answer here.  It is not taken
 * for dead, though: its host's TCP answers for it, also when its window is closed, and is asked about that by
 * TCP's own probes, less and less often.  A host that vanishes then is noticed when one of these is due.
 *
 * Caveats.  TCP itself waits for 200 ms before it sends again, so the budget is at least LEAST_NS.  With timeout 0
 * there is no end but TCP's own.  Of a queue pair without requests on their way nobody notices anything, as on an
 * adapter.
 *
 * The timer is set when a first request goes out, and not again until it fires, so it costs nothing by message.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "soft.h"

static const uint64_t LEAST_NS = 1000 * 1000 * 1000ull;
enum { LOOKS = 4 }; /* within the budget */

static uint64_t budget_ns(const struct rn_qp *qp)
{
	uint64_t budget = rn_sq_ack_budget_ns(qp);

	return budget < LEAST_NS ? LEAST_NS : budget;
}

static bool is_on_its_way(const struct rn_qp *qp)
{
	return rn_stream_in_flight(qp) && qp->sq_executed != qp->sq_posted;
}

/* Is the other host asked something, and for how long hasn't it answered? */
static uint64_t silence_ns(const struct rn_stream *out)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);

	if (getsockopt(out->source.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return 0;
	if (!info.tcpi_retransmits && !info.tcpi_probes)
		return 0;
	return info.tcpi_last_ack_recv * 1000000ull;
}

static bool has_nothing_to_answer(const struct rn_stream *out)
{
	int left = 0;

	return !out->frame_sent && out->output_at == out->output_end && !ioctl(out->source.fd, SIOCOUTQ, &left) && !left;
}

static void ask(struct rn_stream *out)
{
	struct rn_wire_frame here = {.kind = RN_FRAME_HERE};

	if (rn_wire_put(out, &here, sizeof(here)))
		rn_wire_flush(out);
}

static void begin(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	streams->seen_executed = qp->sq_executed;
	streams->seen_acked = streams->acked;
	streams->seen_moved = rn_sq_at(qp, qp->sq_executed)->moved;
	streams->since_ns = rn_now_ns();
}

static bool has_moved(struct rn_qp *qp)
{
	const struct rn_streams *streams = &qp->streams;

	return streams->seen_executed != qp->sq_executed || streams->seen_acked != streams->acked ||
	       streams->seen_moved != rn_sq_at(qp, qp->sq_executed)->moved;
}

void rn_stream_expect(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	if (streams->expects || qp->unreliable || !qp->attr.timeout || !is_on_its_way(qp))
		return;
	streams->expects = true;
	begin(qp);
	rn_timer_set(&streams->patience, budget_ns(qp) / LOOKS);
}

static void look(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	struct rn_stream *out = streams->out;
	uint64_t waited, silence, budget = budget_ns(qp);

	/* Whoever isn't there, or finds no receive, has a budget of another kind. */
	if (has_moved(qp) || !out || out->ended || out->state != RN_STREAM_OPEN || streams->rnr_until_ns) {
		begin(qp);
		return;
	}
	waited = rn_now_ns() - streams->since_ns;
	silence = silence_ns(out);
	if (waited >= budget && silence >= budget)
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	else if (has_nothing_to_answer(out))
		ask(out);
}

void rn_stream_patience(struct rn_timer *timer)
{
	struct rn_streams *streams = container_of(timer, struct rn_streams, patience);
	struct rn_qp *qp = container_of(streams, struct rn_qp, streams);
	int state;

	rn_lock(&qp->sq_lock);
	streams->expects = false;
	state = atomic_load(&qp->state);
	if ((state == IBV_QPS_RTS || state == IBV_QPS_SQD) && is_on_its_way(qp) && qp->attr.timeout) {
		look(qp);
		state = atomic_load(&qp->state);
		streams->expects = state == IBV_QPS_RTS || state == IBV_QPS_SQD;
		if (streams->expects)
			rn_timer_set(timer, budget_ns(qp) / LOOKS);
	}
	rn_unlock(&qp->sq_lock);
}
