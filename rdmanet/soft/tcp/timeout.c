/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requester's patience: what the queue pair's timeout and retry count mean on a stream.
 *
 * An adapter that hears no acknowledgement within 4.096 us * 2^timeout sends again, and after retry_cnt
 * times in vain the request fails with RETRY_EXC_ERR.  Here TCP sends again, and goes on for a quarter
 * of an hour.  So once a request is on its way the stream is checked now and then; when nothing has been
 * acknowledged for (retry_cnt + 1) timeouts, and the other host has been silent all that time, it is over.
 *
 *     acknowledged something since        patience begins anew
 *     the host acknowledges TCP's bytes   it is alive, and its process is slow or stopped: likewise
 *     it leaves some unanswered           patience runs out
 *     there is nothing to answer          a HERE is sent: now there is
 *
 * An adapter answers for a process that is stopped; here a stopped process can't answer.  It is not taken for dead,
 * because its host's TCP answers for it.  Even if the window is closed, that TCP answers our TCP's probes, which come
 * less and less often.  If the host vanishes then, that is noticed when the next probe is due.
 *
 * Caveats.  TCP itself waits for 200 ms before it sends again, so the budget is at least LEAST_NS.  With timeout 0
 * only TCP's own limit applies.  While a queue pair has no requests on their way nothing is noticed, as on an
 * adapter.
 *
 * The timer is set when a first request goes out, and not again until it fires, so it costs nothing per message.
 */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "base/extras.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

static const uint64_t LEAST_NS = 1000 * 1000 * 1000ull;
enum { LOOKS = 4 }; /* within the budget */

static uint64_t budget_ns(const struct rn_qp *qp)
{
	uint64_t budget = rn_sq_ack_budget_ns(qp);

	return budget < LEAST_NS ? LEAST_NS : budget;
}

static bool is_on_its_way(const struct rn_qp *qp)
{
	return rn_tcp_in_flight(qp) && qp->sq_executed != qp->sq_posted;
}

/* Does the other host owe TCP an answer, and for how long? */
static uint64_t silence_ns(const struct rn_tcp *out)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);

	if (getsockopt(out->source.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return 0;
	if (!info.tcpi_retransmits && !info.tcpi_probes)
		return 0;
	return info.tcpi_last_ack_recv * 1000000ull;
}

static bool has_nothing_to_answer(const struct rn_tcp *out)
{
	int left = 0;

	return !out->frame_sent && out->output_at == out->output_end && !ioctl(out->source.fd, SIOCOUTQ, &left) && !left;
}

static void ask(struct rn_tcp *out)
{
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE};

	if (rn_tcp_put(out, &here, sizeof(here)))
		rn_tcp_flush(out);
}

static void begin(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	streams->seen_executed = qp->sq_executed;
	streams->seen_acked = streams->acked;
	streams->seen_moved = rn_sq_at(qp, qp->sq_executed)->moved;
	streams->since_ns = rn_now_ns();
}

static bool has_moved(struct rn_qp *qp)
{
	const struct rn_tcp_path *streams = qp->tcp;

	return streams->seen_executed != qp->sq_executed || streams->seen_acked != streams->acked ||
	       streams->seen_moved != rn_sq_at(qp, qp->sq_executed)->moved;
}

void rn_tcp_expect(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (streams->expects || qp->unreliable || !qp->attr.timeout || !is_on_its_way(qp))
		return;
	streams->expects = true;
	begin(qp);
	rn_timer_set(&streams->patience, budget_ns(qp) / LOOKS);
}

static void look(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_tcp *out = streams->out;
	uint64_t waited, silence, budget = budget_ns(qp);

	/* A peer that is not there, or has no receive, is limited by the retry counts instead. */
	if (has_moved(qp) || !out || out->ended || out->state != RN_TCP_OPEN || streams->rnr_until_ns) {
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

void rn_tcp_patience(struct rn_timer *timer)
{
	struct rn_tcp_path *streams = container_of(timer, struct rn_tcp_path, patience);
	struct rn_qp *qp = streams->qp;
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

RN_EXPORT int rdmanet_soft_qp_silence(struct ibv_qp *base, uint64_t *ns)
{
	struct rn_qp *qp = rn_qp(base);
	struct rn_tcp *out;

	*ns = 0;
	if (rn_is_foreign(base->context))
		return EINVAL;
	rn_lock(&qp->sq_lock);
	out = qp->uses_tcp ? qp->tcp->out : NULL;
	if (out && !out->ended && out->state == RN_TCP_OPEN)
		*ns = silence_ns(out);
	rn_unlock(&qp->sq_lock);
	return 0;
}
