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

enum concern { PORT, CQ, SRQ, QP };

static enum concern concern_of(enum ibv_event_type type)
{
	switch (type) {
	case IBV_EVENT_DEVICE_FATAL:
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		return PORT;
	case IBV_EVENT_CQ_ERR:
		return CQ;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return SRQ;
	default:
		return QP;
	}
}

void rn_event_raise(struct rn_context *context, enum ibv_event_type type, void *element)
{
	struct rn_event *event = calloc(1, sizeof(*event));
	uint64_t one = 1;

	if (!event)
		return;
	event->event.event_type = type;
	switch (concern_of(type)) {
	case PORT:
		event->event.element.port_num = 1;
		break;
	case CQ:
		event->event.element.cq = element;
		break;
	case SRQ:
		event->event.element.srq = element;
		break;
	case QP:
		event->event.element.qp = element;
		break;
	}
	rn_lock(&context->event_lock);
	rn_list_add(&context->events, &event->link);
	rn_unlock(&context->event_lock);
	while (write(context->verbs.context.async_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

/* The program has read it, and owes an acknowledgement. With event_lock held. */
static void count_reported(const struct ibv_async_event *event)
{
	switch (concern_of(event->event_type)) {
	case PORT:
		break;
	case CQ:
		rn_cq(event->element.cq)->async_reported++;
		break;
	case SRQ:
		rn_srq(event->element.srq)->async_reported++;
		break;
	case QP:
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

	switch (concern_of(event->event_type)) {
	case PORT:
		break;
	case CQ:
		acknowledge(cq->context, &cq->mutex, &cq->cond, &cq->async_events_completed);
		break;
	case SRQ:
		acknowledge(srq->context, &srq->mutex, &srq->cond, &srq->events_completed);
		break;
	case QP:
		acknowledge(qp->context, &qp->mutex, &qp->cond, &qp->events_completed);
		break;
	}
}

void rn_event_forget(struct rn_context *context, void *element, uint32_t *reported, uint32_t *completed,
		     pthread_mutex_t *mutex, pthread_cond_t *cond)
{
	uint32_t expected;

	rn_lock(&context->event_lock);
	for (struct rn_list *at = context->events.next, *next; at != &context->events; at = next) {
		struct rn_event *event = container_of(at, struct rn_event, link);

		next = at->next;
		if (concern_of(event->event.event_type) != PORT && (void *)event->event.element.qp == element) {
			rn_list_del(at);
			free(event);
		}
	}
	expected = *reported;
	rn_unlock(&context->event_lock);

	pthread_mutex_lock(mutex);
	while (*completed != expected)
		pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
}
