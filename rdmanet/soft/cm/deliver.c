/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the program reads from an event channel, and what is done for it then: its queue pair is connected, or attached to
 * a group.
 */
#include "cm/cm.h"

#include <sys/syscall.h>
#include <unistd.h>

enum { IN_VAIN_MOST = 64 }; /* tokens without an event that one call reads */

static void queue_all(struct rn_cm_event *events)
{
	while (events) {
		struct rn_cm_event *next = events->next;

		rn_cm_event_queue(events);
		events = next;
	}
}

/* Without a target it becomes synchronous. */
RN_EXPORT int rdma_migrate_id(struct rdma_cm_id *rdma_id, struct rdma_event_channel *target)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rdma_event_channel *own = NULL;
	struct rn_cm_event *events;
	bool sync = !target;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (sync && id->sync)
		return 0;
	if (sync && !(target = rdma_create_event_channel()))
		return -1;
	rn_cm_put_event(id);
	pthread_mutex_lock(&rn_cm_lock);
	events = rn_cm_event_purge(id);
	if (id->sync)
		own = rdma_id->channel;
	id->sync = sync;
	rn_cm_channel_renumber(rn_cm_channel(rdma_id->channel)); /* the engine hears what comes for it */
	rdma_id->channel = target;
	while (events) {
		struct rn_cm_event *next = events->next, *its = NULL;

		/* A listener's unread requests move along, and what has happened to them since: all on the same channel. */
		if (events->id != id) {
			its = rn_cm_event_purge(events->id);
			events->id->id.channel = target;
		}
		rn_cm_event_queue(events);
		queue_all(its);
		events = next;
	}
	/* What was read from the old channel must be acknowledged before the caller may close it. */
	while (id->acked != id->delivered)
		pthread_cond_wait(&rn_cm_acked, &rn_cm_lock);
	pthread_mutex_unlock(&rn_cm_lock);
	if (own)
		rdma_destroy_event_channel(own);
	return 0;
}

/* --- reading ------------------------------------------------------------------------------------ */

/* The program is about to read that it has joined. It may not have a queue pair to attach. */
static void joined(struct rn_cm_event *event)
{
	struct rn_cm_group *group = event->group;
	int error;

	if (!event->id->id.qp || group->send_only)
		return;
	error = ibv_attach_mcast(event->id->id.qp, &group->gid, 0);
	group->attached = !error;
	if (!error)
		return;
	event->event.event = RDMA_CM_EVENT_MULTICAST_ERROR;
	event->event.status = -error;
}

/* Do what the library does for the program on this event. False: the program does not get the event. */
static bool deliver(struct rn_cm_event *event)
{
	struct rn_cm_id *id = event->id;
	int error;

	switch (event->event.event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		/* The connections of a synchronous listener are synchronous too. */
		if (!event->counted_on->sync || !rdma_migrate_id(&id->id, NULL))
			break;
		rdma_ack_cm_event(&event->event);
		rdma_destroy_id(&id->id); /* rejects it */
		return false;
	case RDMA_CM_EVENT_MULTICAST_JOIN:
		joined(event);
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		if (!id->id.qp)
			break; /* the program modifies its queue pair and calls rdma_establish */
		error = rn_cm_qp_connect(id);
		pthread_mutex_lock(&rn_cm_lock);
		if (!error && id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REP_RECEIVED) {
			rn_cm_wire_ready_to_use(id->wire);
			id->was_connected = true;
			event->event.event = RDMA_CM_EVENT_ESTABLISHED;
		} else {
			if (id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REP_RECEIVED)
				rn_cm_wire_reject(id->wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
			id->connect_error = true;
			event->event.event = RDMA_CM_EVENT_CONNECT_ERROR;
			event->event.status = error ? -error : -ECONNRESET;
		}
		rn_cm_unlock_and_send();
		if (event->event.event == RDMA_CM_EVENT_CONNECT_ERROR)
			rn_cm_qp_fail(id);
		break;
	case RDMA_CM_EVENT_REJECTED:
		if (id->connect_error) {
			rdma_ack_cm_event(&event->event);
			return false;
		}
		rn_cm_qp_fail(id);
		break;
	default:
		break;
	}
	return true;
}

static struct rn_cm_event *take(struct rn_cm_channel *channel)
{
	struct rn_cm_event *event;

	pthread_mutex_lock(&rn_cm_lock);
	event = channel->events;
	if (event) {
		channel->events = event->next;
		if (!channel->events)
			channel->events_end = &channel->events;
		event->next = NULL;
		event->counted_on->delivered++;
		if (event->group)
			event->group->owed++;
		if (event->event.event == RDMA_CM_EVENT_CONNECT_REQUEST)
			rn_cm_listener_resume(event->counted_on);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return event;
}

/* Of a channel that linked processes know, too: they may fill it with tokens, and make reading it wait. */
static bool await_token(struct rn_cm_channel *channel)
{
	uint64_t token;
	bool is_read;

	if (channel->never_waits)
		return rn_eventfd_take(channel->channel.fd);
	channel->inside = true;
	is_read = read(channel->channel.fd, &token, sizeof token) > 0;
	channel->inside = false;
	return is_read;
}

/* A linked process may have said something. */
static struct rn_cm_event *hear(struct rn_cm_channel *channel)
{
	struct rn_cm_event *event;
	bool was_told;

	rn_cm_event_lend_token(channel);
	rn_cm_link_hear_mail();
	was_told = !rn_cm_event_take_token_back();
	event = take(channel);
	if (!event && was_told)
		rn_cm_event_add_tokens(channel, 1); /* another thread was quicker: its own event is there */
	return event;
}

RN_EXPORT int rdma_get_cm_event(struct rdma_event_channel *rdma_channel, struct rdma_cm_event **result)
{
	struct rn_cm_channel *channel = rn_cm_channel(rdma_channel);
	struct rn_cm_event *event;
	int in_vain = 0;

	if (!result)
		return rn_cm_error(EINVAL);
	if (channel->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	channel->reader = (int)syscall(SYS_gettid);
	do {
		if (!await_token(channel))
			return -1;
		event = take(channel);
		if (!event)
			event = hear(channel);
		if (!event && channel->never_waits && ++in_vain == IN_VAIN_MOST)
			return rn_cm_error(EAGAIN);
	} while (!event || !deliver(event));
	*result = &event->event;
	return 0;
}

int rn_cm_complete(struct rn_cm_id *id)
{
	struct rdma_cm_event *event;

	if (!id->sync)
		return 0;
	rn_cm_put_event(id);
	if (rdma_get_cm_event(id->id.channel, &id->id.event))
		return -1;
	event = id->id.event;
	if (!event->status)
		return 0;
	if (event->event == RDMA_CM_EVENT_REJECTED || event->status >= RN_REJ_SECRET_WANTED)
		return rn_cm_error(ECONNREFUSED);
	return rn_cm_error(event->status < 0 ? -event->status : event->status);
}
