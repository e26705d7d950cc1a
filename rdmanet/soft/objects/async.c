/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Asynchronous events: raised where they are noticed, queued in the context, read by the program.
 *
 * An event concerns a queue pair, a CQ, an SRQ, or the port.  Each event of an object that was read must be
 * acknowledged before the object is destroyed, which waits for that. Unread events vanish with their
 * object, and their tokens in async_fd are skipped.
 */
#include <stdlib.h>
#include <unistd.h>

#include "objects/srq.h"

/* The program has read it, and owes an acknowledgement. With event_lock held. */
static void count_reported(const struct ibv_async_event *event)
{
	switch (rn_event_concern(event->event_type)) {
	case RN_CONCERNS_PORT:
		break;
	case RN_CONCERNS_CQ:
		rn_cq(event->element.cq)->async_reported++;
		break;
	case RN_CONCERNS_SRQ:
		rn_srq(event->element.srq)->async_reported++;
		break;
	case RN_CONCERNS_QP:
		rn_qp(event->element.qp)->async_reported++;
		break;
	}
}

RN_EXPORT int ibv_get_async_event(struct ibv_context *ibv_context, struct ibv_async_event *to)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_event *event = NULL;
	uint64_t token;

	if (rn_is_foreign(ibv_context)) {
		errno = ENODEV;
		return -1;
	}
	rn_context_engine(context); /* the engine watches the port; without it there are no port events */
	while (!event) { /* the event of a token may have vanished with its object */
		if (read(ibv_context->async_fd, &token, sizeof(token)) < 0)
			return -1;
		rn_lock(&context->event_lock);
		if (!rn_list_empty(&context->events)) {
			event = container_of(context->events.next, struct rn_event, link);
			rn_list_del(&event->link);
			count_reported(&event->event);
		}
		rn_unlock(&context->event_lock);
	}
	*to = event->event;
	free(event);
	return 0;
}

static void acknowledge(struct ibv_context *context, pthread_mutex_t *mutex, pthread_cond_t *cond, uint32_t *completed)
{
	if (rn_is_foreign(context))
		return;
	pthread_mutex_lock(mutex);
	++*completed;
	pthread_cond_broadcast(cond);
	pthread_mutex_unlock(mutex);
}

RN_EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	struct ibv_cq *cq = event->element.cq;
	struct ibv_srq *srq = event->element.srq;
	struct ibv_qp *qp = event->element.qp;

	switch (rn_event_concern(event->event_type)) {
	case RN_CONCERNS_PORT:
		break;
	case RN_CONCERNS_CQ:
		acknowledge(cq->context, &cq->mutex, &cq->cond, &cq->async_events_completed);
		break;
	case RN_CONCERNS_SRQ:
		acknowledge(srq->context, &srq->mutex, &srq->cond, &srq->events_completed);
		break;
	case RN_CONCERNS_QP:
		acknowledge(qp->context, &qp->mutex, &qp->cond, &qp->events_completed);
		break;
	}
}
