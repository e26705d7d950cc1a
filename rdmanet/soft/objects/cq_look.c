/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repairing CQs after a process has scribbled over them: shm/own.h says who calls this, and when.
 *
 * What can be lost for good, one scribbled word each:
 *
 *     channel, hold     peers wake nobody, or too late       both are written again, and if the CQ is armed and has
 *                                                            completions, there is an event
 *     dirty, summary    a receive is done, nobody looks      the attached queue pairs are looked at, some at a time
 *     armed             pushers think that nobody sleeps     the word is neither what the owner has left there, nor
 *                       here, or was woken already           that with the mark of a pusher: so there is an event
 *     the channel's     a token was taken by a peer          signalled, or completions that nobody collects, and no
 *     eventfd                                                token, from one look to the next: there is one more
 *
 * In a process that nobody scribbles over all of this changes nothing, except if a receive was completed a moment ago
 * and is not announced yet: then it is announced twice, which causes a spurious event.
 */
#include <poll.h>

#include "objects/cq_inside.h"

enum { QPS_PER_LOOK = 1024 };

static bool has_receives(struct rn_qp *qp)
{
	if (!qp->xrc.is_poll_source && rn_qps[qp->index] != qp)
		return false; /* it is being created or destroyed */
	return unlikely(qp->pool) ? rn_pool_has_next(qp->pool, &qp->arrivals) : rn_cq_has_receives(qp);
}

/* Find receives that are done and were not announced. */
static bool find_unheard(struct rn_cq *cq, bool all)
{
	uint32_t end = cq->attached_end;
	bool found = false;

	for (uint32_t i = 0; i < end && (i < QPS_PER_LOOK || all); i++) {
		struct rn_qp *qp;

		cq->looked_at = cq->looked_at < end ? cq->looked_at : 0;
		qp = cq->attached[cq->looked_at];
		if (qp && !qp->is_ready && has_receives(qp) &&
		    !(atomic_load(&cq->block->dirty[cq->looked_at / 64]) & 1ull << cq->looked_at % 64 &&
		      atomic_load(&cq->block->summary) & 1ull << cq->looked_at / 64)) {
			rn_cq_make_ready(cq, qp);
			found = true;
		}
		cq->looked_at++;
	}
	return found;
}

static bool has_token(const struct rn_channel *channel)
{
	struct pollfd fd = {.fd = channel->channel.fd, .events = POLLIN};

	return poll(&fd, 1, 0) == 1;
}

/* With the channel's lock held, too. Peers may have been misled: they did not know whom to wake. */
static unsigned look_at_arming(struct rn_cq *cq, struct rn_channel *channel, bool misled)
{
	uint32_t left = atomic_load(&cq->armed), now = atomic_load(&cq->block->armed);
	bool asked = left & RN_ARMED_KIND, is_due;

	if (now != left && !(asked && now == (left | RN_ARMED_SIGNALLED))) {
		/* If an event was asked for, raise one: it is unknown what it would have been for. */
		if (!atomic_compare_exchange_strong(&cq->block->armed, &now, asked ? left | RN_ARMED_SIGNALLED : left))
			return 0; /* next time */
		if (asked)
			rn_channel_signal(channel->id);
		return 1;
	}
	if (misled && asked && rn_cq_has_completions(cq)) {
		rn_channel_signal(channel->id);
		return 0;
	}
	is_due = now != left || ((left & RN_ARMED_KIND) == RN_ARMED_NEXT && rn_cq_has_completions(cq) &&
				 rn_channel_is_shared(channel));
	if (!is_due || has_token(channel)) {
		cq->unheard = 0;
	} else if (cq->unheard == now) {
		rn_channel_signal(channel->id);
		cq->unheard = 0;
		return 1;
	} else {
		cq->unheard = now;
	}
	return 0;
}

unsigned rn_cq_look_after(struct rn_cq *cq, bool all)
{
	struct rn_channel *channel = (struct rn_channel *)cq->cq.channel;
	unsigned wrong;

	if (channel)
		rn_lock(&channel->lock);
	rn_lock(&cq->lock);
	wrong = rn_cq_tell(cq);
	if (find_unheard(cq, all || wrong))
		rn_cq_notify(cq->block, NULL, true, RN_CQ_ENOUGH);
	if (channel)
		wrong += look_at_arming(cq, channel, wrong);
	rn_unlock(&cq->lock);
	if (channel)
		rn_unlock(&channel->lock);
	return wrong;
}
