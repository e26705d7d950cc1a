/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous events in a context's queue: raised where they are noticed, forgotten with their object. */
#include <stdlib.h>
#include <unistd.h>

#include "objects/context.h"

enum rn_concern rn_event_concern(enum ibv_event_type type)
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
		return RN_CONCERNS_PORT;
	case IBV_EVENT_CQ_ERR:
		return RN_CONCERNS_CQ;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return RN_CONCERNS_SRQ;
	default:
		return RN_CONCERNS_QP;
	}
}

void rn_event_raise(struct rn_context *context, enum ibv_event_type type, void *element)
{
	struct rn_event *event = calloc(1, sizeof(*event));
	uint64_t one = 1;

	if (!event)
		return;
	event->event.event_type = type;
	switch (rn_event_concern(type)) {
	case RN_CONCERNS_PORT:
		event->event.element.port_num = 1;
		break;
	case RN_CONCERNS_CQ:
		event->event.element.cq = element;
		break;
	case RN_CONCERNS_SRQ:
		event->event.element.srq = element;
		break;
	case RN_CONCERNS_QP:
		event->event.element.qp = element;
		break;
	}
	rn_lock(&context->event_lock);
	rn_list_add(&context->events, &event->link);
	rn_unlock(&context->event_lock);
	while (write(context->verbs.context.async_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void rn_event_forget(struct rn_context *context, void *element, uint32_t *reported, uint32_t *completed,
		     pthread_mutex_t *mutex, pthread_cond_t *cond)
{
	uint32_t expected;

	rn_lock(&context->event_lock);
	for (struct rn_list *at = context->events.next, *next; at != &context->events; at = next) {
		struct rn_event *event = container_of(at, struct rn_event, link);

		next = at->next;
		if (rn_event_concern(event->event.event_type) != RN_CONCERNS_PORT && (void *)event->event.element.qp == element) {
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
