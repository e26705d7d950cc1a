/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager's calls: librdmacm's interface over a TCP socket per connection.
 *
 * A connection's two queue pairs find each other by number; the connection manager carries the
 * numbers, and some private data, from one program to the other.  It uses a TCP connection
 * to the very address and port that the program named.  There is one for each RDMA connection, and
 * it lives as long, so its end shows the peer's end.  cm.h has the picture.
 */
#include "cm/cm.h"

#include <stdlib.h>

/* --- an identifier's life ----------------------------------------------------------------------- */

static void forget_groups(struct rn_cm_id *id)
{
	while (id->groups) {
		struct rn_cm_group *group = id->groups;

		id->groups = group->next;
		free(group);
	}
}

static void free_id(struct rn_cm_id *id)
{
	if (id->sync)
		rdma_destroy_event_channel(id->id.channel);
	forget_groups(id);
	rn_fd_close(id->bound_fd);
	rn_fd_close(id->name_fd);
	free(id->qp_attr);
	free(id);
}

RN_EXPORT int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **result, void *context,
			     enum rdma_port_space ps)
{
	struct rn_cm_id *id;
	int error;

	if (ps != RDMA_PS_TCP && ps != RDMA_PS_UDP && ps != RDMA_PS_IPOIB && ps != RDMA_PS_IB)
		return rn_cm_error(EPROTONOSUPPORT);
	if (!rn_cm_context_get())
		return -1;
	if ((error = rn_device_check(rn_context(rn_cm_context()), RN_CREATE_ID))) {
		rn_cm_context_put();
		return rn_cm_error(error);
	}
	id = rn_cm_id_new(channel, context, ps);
	if (id && !channel) {
		id->sync = true;
		id->id.channel = rdma_create_event_channel();
	}
	if (!id || !id->id.channel) {
		error = id ? errno : ENOMEM;
		free(id);
		rn_cm_context_put();
		return rn_cm_error(error);
	}
	*result = &id->id;
	return 0;
}

/* It came with a request that nobody has read or will read. rn_cm_lock held. */
static void drop_unseen(struct rn_cm_id *id)
{
	struct rn_cm_event *event, *next;

	if (id->wire)
		rn_cm_wire_abandon(id->wire);
	for (event = rn_cm_event_purge(id); event; event = next) {
		next = event->next;
		free(event);
	}
	free_id(id);
	rn_cm_context_less(); /* its listener is still a user of the context */
}

static void stop_listening(struct rn_cm_id *id)
{
	/* Not under the lock: both wait for their callbacks, which take it. */
	rn_source_remove(&id->accepting);
	rn_timer_cancel(&id->accept_retry);
	rn_fd_close(id->bound_fd);
	id->bound_fd = -1;
}

RN_EXPORT int rdma_destroy_id(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rn_cm_event *event, *next;

	if (id->epoch != rn_epoch())
		return 0; /* the parent's: its events and its sockets are not in this process */
	if (id->state == RN_CM_LISTENING)
		stop_listening(id);
	rn_cm_put_event(id);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state == RN_CM_LISTENING)
		rn_cm_listener_gone(id);
	if (id->state == RN_CM_LISTENING)
		rn_cm_channel_renumber(rn_cm_channel(id->id.channel));
	if (id->wire)
		rn_cm_wire_abandon(id->wire);
	for (event = rn_cm_event_purge(id); event; event = next) {
		next = event->next;
		if (event->id != id)
			drop_unseen(event->id);
		free(event);
	}
	if (id->acked != id->delivered)
		rn_tasks_wake(); /* the peer need not wait for the program's acknowledgements */
	while (id->acked != id->delivered)
		pthread_cond_wait(&rn_cm_acked, &rn_cm_lock);
	rn_cm_unlock_and_send();
	free_id(id);
	rn_cm_context_put();
	return 0;
}

RN_EXPORT int rdma_set_option(struct rdma_cm_id *rdma_id, int level, int name, void *value, size_t length)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	bool is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;
	int number = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (level != RDMA_OPTION_ID || name < RDMA_OPTION_ID_TOS || name > RDMA_OPTION_ID_ACK_TIMEOUT)
		return rn_cm_error(ENOSYS);
	if (!value || length != (is_byte ? sizeof(uint8_t) : sizeof(int)))
		return rn_cm_error(EINVAL);
	if (is_byte)
		number = *(uint8_t *)value;
	else
		memcpy(&number, value, sizeof number);

	switch (name) {
	case RDMA_OPTION_ID_TOS:
		id->tos = (uint8_t)number;
		id->tos_set = true;
		return 0;
	case RDMA_OPTION_ID_ACK_TIMEOUT:
		if (number > 31) /* five bits: 4.096 us * 2^number */
			return rn_cm_error(EINVAL);
		id->ack_timeout = (uint8_t)number;
		id->ack_timeout_set = true;
		return 0;
	case RDMA_OPTION_ID_REUSEADDR:
		if (id->state != RN_CM_IDLE)
			return rn_cm_error(EINVAL);
		id->reuse_address = number != 0;
		return 0;
	default: /* IPv6 only: what we bind is one loopback address, and so it is */
		if (id->state != RN_CM_IDLE)
			return rn_cm_error(EINVAL);
		id->af_only = number != 0;
		return 0;
	}
}

RN_EXPORT const char *rdma_event_str(enum rdma_cm_event_type type)
{
	static const char *const names[] = {
		[RDMA_CM_EVENT_ADDR_RESOLVED] = "RDMA_CM_EVENT_ADDR_RESOLVED",
		[RDMA_CM_EVENT_ADDR_ERROR] = "RDMA_CM_EVENT_ADDR_ERROR",
		[RDMA_CM_EVENT_ROUTE_RESOLVED] = "RDMA_CM_EVENT_ROUTE_RESOLVED",
		[RDMA_CM_EVENT_ROUTE_ERROR] = "RDMA_CM_EVENT_ROUTE_ERROR",
		[RDMA_CM_EVENT_CONNECT_REQUEST] = "RDMA_CM_EVENT_CONNECT_REQUEST",
		[RDMA_CM_EVENT_CONNECT_RESPONSE] = "RDMA_CM_EVENT_CONNECT_RESPONSE",
		[RDMA_CM_EVENT_CONNECT_ERROR] = "RDMA_CM_EVENT_CONNECT_ERROR",
		[RDMA_CM_EVENT_UNREACHABLE] = "RDMA_CM_EVENT_UNREACHABLE",
		[RDMA_CM_EVENT_REJECTED] = "RDMA_CM_EVENT_REJECTED",
		[RDMA_CM_EVENT_ESTABLISHED] = "RDMA_CM_EVENT_ESTABLISHED",
		[RDMA_CM_EVENT_DISCONNECTED] = "RDMA_CM_EVENT_DISCONNECTED",
		[RDMA_CM_EVENT_DEVICE_REMOVAL] = "RDMA_CM_EVENT_DEVICE_REMOVAL",
		[RDMA_CM_EVENT_MULTICAST_JOIN] = "RDMA_CM_EVENT_MULTICAST_JOIN",
		[RDMA_CM_EVENT_MULTICAST_ERROR] = "RDMA_CM_EVENT_MULTICAST_ERROR",
		[RDMA_CM_EVENT_ADDR_CHANGE] = "RDMA_CM_EVENT_ADDR_CHANGE",
		[RDMA_CM_EVENT_TIMEWAIT_EXIT] = "RDMA_CM_EVENT_TIMEWAIT_EXIT",
	};

	if ((unsigned)type < sizeof names / sizeof *names)
		return names[type];
	return "UNKNOWN EVENT";
}
