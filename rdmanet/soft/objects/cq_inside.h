/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside a completion queue: what its files share.
 *
 *     ibv_create_cq   rn_cq_push (sq.c)        ibv_req_notify_cq  ibv_get_cq_event      ibv_poll_cq
 *     ibv_destroy_cq  rn_responder_announce         |                  |                    |
 *          |               | (responder/)           |                  |                    |
 *        cq.c -------------+----------------> cq_event.c <-------------+--- (lenient) --- cq_poll.c
 *     life, sends,         |               arming, events, acks                     sends, receives, turns
 *     attached QPs         |                        |
 *          |               +----- rn_cq_notify -----+
 *          +-----------------------> channel.c <----+
 *                          numbers, descriptors, the wakeup
 */
#pragma once

#include "objects/channel.h"
#include "objects/cq.h"
#include "objects/qp.h"

/* --- channel.c ------------------------------------------------------------------------------------ */

bool rn_channel_is_shared(const struct rn_channel *channel); /* with another process */
void rn_channel_destroy_all(struct rn_context *context);
void rn_channel_forked(void);

/* --- cq_event.c ----------------------------------------------------------------------------------- */

/* Take the CQ off its channel, with its unread events. Returns how many were read: they must be acknowledged.
 * With the context's mutex held. */
uint32_t rn_cq_leave_channel(struct rn_cq *cq);
/* For rn_cq.timer: the event of a moderated CQ has waited long enough. */
void rn_cq_held_too_long(struct rn_timer *timer);
/* Set the arena's copies of channel and hold to ours; returns how many of the two differed. */
unsigned rn_cq_tell(struct rn_cq *cq);
/* Set its timer if it must be set. On the engine, with rn_process_lock held. */
void rn_cq_process_pending(struct rn_cq *cq);
/* Lenient: the event's completions have been polled. Take it back, unless it is being read. With the lock held. */
void rn_cq_take_event_back(struct rn_cq *cq);

/* --- cq_look.c ------------------------------------------------------------------------------------ */

/* Announce completions that were hidden by scribbling: see shm/own.h. With rn_process_lock held. */
unsigned rn_cq_look_after(struct rn_cq *cq, bool all);

/* --- cq.c ----------------------------------------------------------------------------------------- */

/* Completions are lost, and it is unknown which: fail the CQ, once and for good. Without the lock. */
void rn_cq_report_overrun(struct rn_cq *cq);

/* Is there a completion to poll? With the lock held. */
static inline bool rn_cq_has_completions(struct rn_cq *cq)
{
	return cq->head != cq->tail || cq->ready || atomic_load(&cq->block->summary);
}

/* Has this queue pair receives to poll? Later ones set a dirty bit. With the lock held. */
static inline bool rn_cq_has_receives(const struct rn_qp *qp)
{
	uint32_t polled = atomic_load(&qp->rq_polled);

	if (unlikely(qp->pool))
		return qp->arrivals.first || atomic_load(qp->arrivals.finished);
	return polled != atomic_load(&qp->rq_posted) && (qp->rq_flushing || rn_rq_is_done(qp, polled));
}

/* With the lock held: put the QP on the list of those to take receives from. */
static inline void rn_cq_make_ready(struct rn_cq *cq, struct rn_qp *qp)
{
	if (qp->is_ready)
		return;
	qp->is_ready = true;
	qp->next_ready = NULL;
	*cq->ready_tail = qp;
	cq->ready_tail = &qp->next_ready;
}
