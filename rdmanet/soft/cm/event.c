/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Event channels, and what is queued on them; deliver.c reads it.
 *
 * The descriptor that the program polls is an eventfd in semaphore mode: one token for each
 * unread event, so that reading is one read, and the program's own O_NONBLOCK decides whether it
 * waits.  The events are in a list beside it, because they move to another channel with
 * their identifier (rdma_migrate_id), and go when it is destroyed.
 *
 * Tokens follow events as far as they can.  Another thread may already have read the token
 * of an event that was taken back; so a reader that finds the list empty reads again.
 *
 * A token may also stand for what a linked process has said in memory (link.c), which the reader then hears: what it is
 * told meanwhile needs no other token.
 *
 * Who reads needs rn_cm_lock next.  If a token were written under it, the reader would wake only to wait for that,
 * often on the very CPU of the thread that holds it.  So what the engine has heard is told when the lock is released.
 * Whoever takes the event back, or destroys the channel, waits for that one write.
 */
#include "cm/cm.h"
#include "objects/channel.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* With rn_cm_lock held: tokens that wait until it is released. What is heard at once is of one channel. */
static struct {
	bool is_wanted;
	struct rn_cm_channel *channel;
	uint64_t tokens;
} held;
/* While they are written; taken after rn_cm_lock, or alone. */
static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;

/* It has read a token of this channel, and found no event: it takes the next one, if it is told here. */
static _Thread_local struct rn_cm_channel *has_token;

static void wait_until_told(void)
{
	pthread_mutex_lock(&telling);
	pthread_mutex_unlock(&telling);
}

RN_EXPORT struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct rn_cm_channel *channel = calloc(1, sizeof *channel);

	if (!channel)
		return NULL;
	if (!rn_cm_context_get()) {
		free(channel);
		return NULL;
	}
	channel->channel.fd = rn_fd_own(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE));
	if (channel->channel.fd < 0) {
		int error = errno;

		rn_cm_context_put();
		free(channel);
		errno = error;
		return NULL;
	}
	channel->epoch = rn_epoch();
	channel->events_end = &channel->events;
	return &channel->channel;
}

/*
 * A program may destroy a channel while a thread of its own reads from it in a loop, as rping did: with a kernel's
 * channel that thread simply goes on waiting.  To get the same here, that thread is given time to come back after its
 * last event; if it then waits again, the channel is left to it, with its descriptor.  True: that is the case.
 */
static bool is_left_to_reader(const struct rn_cm_channel *channel)
{
	enum { TRIES = 50 };
	int reader = channel->reader, self = (int)syscall(SYS_gettid);

	if (!reader || reader == self)
		return false;
	for (int tries = 0; tries < TRIES; tries++) {
		if (syscall(SYS_tgkill, getpid(), reader, 0))
			return false; /* it has ended */
		if (channel->inside)
			return true;
		usleep(1000);
	}
	return false;
}

RN_EXPORT void rdma_destroy_event_channel(struct rdma_event_channel *rdma_channel)
{
	struct rn_cm_channel *channel = rn_cm_channel(rdma_channel);

	if (channel->epoch != rn_epoch())
		return;
	if (is_left_to_reader(channel)) {
		rn_cm_context_put();
		return;
	}
	wait_until_told();
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_channel_renumber(channel);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_fd_close(channel->channel.fd);
	while (channel->events) { /* of identifiers that the program should have destroyed, and did not */
		struct rn_cm_event *event = channel->events;

		channel->events = event->next;
		free(event);
	}
	free(channel);
	rn_cm_context_put();
}

uint32_t rn_cm_channel_number(const struct rn_cm_id *id)
{
	struct rn_cm_channel *channel = rn_cm_channel(id->id.channel);
	uint32_t number;

	if (id->sync || channel->number)
		return channel->number;
	if (!(fcntl(channel->channel.fd, F_GETFL) & O_NONBLOCK))
		return 0;
	channel->is_shared = true; /* before any other process learns of it */
	number = rn_channel_register(channel->channel.fd, &channel->never_waits);
	if (number != RN_NO_CHANNEL)
		channel->number = number;
	return channel->number;
}

void rn_cm_channel_renumber(struct rn_cm_channel *channel)
{
	if (channel->number)
		rn_channel_unregister(channel->number);
	channel->number = 0;
}

/* --- queueing ----------------------------------------------------------------------------------- */

/* Linked processes that know the channel may have filled it, and have made writing wait. */
void rn_cm_event_add_tokens(struct rn_cm_channel *channel, uint64_t count)
{
	ssize_t written;

	if (!channel->is_shared) {
		written = write(channel->channel.fd, &count, sizeof count);
		(void)written; /* fails only if the program closed the descriptor */
		return;
	}
	while (count--)
		rn_eventfd_add(channel->channel.fd);
}

void rn_cm_lock_to_tell(void)
{
	pthread_mutex_lock(&rn_cm_lock);
	held.is_wanted = true;
}

void rn_cm_unlock_and_tell(void)
{
	struct rn_cm_channel *channel = held.channel;
	uint64_t tokens = held.tokens;

	held.is_wanted = false;
	held.channel = NULL;
	held.tokens = 0;
	if (tokens && has_token == channel) {
		tokens--;
		has_token = NULL;
	}
	if (!tokens) {
		pthread_mutex_unlock(&rn_cm_lock);
		return;
	}
	pthread_mutex_lock(&telling);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_event_add_tokens(channel, tokens);
	pthread_mutex_unlock(&telling);
}

void rn_cm_event_lend_token(struct rn_cm_channel *channel)
{
	has_token = channel;
}

bool rn_cm_event_take_token_back(void)
{
	bool is_left = has_token != NULL;

	has_token = NULL;
	return is_left;
}

void rn_cm_event_forked(void)
{
	pthread_mutex_init(&telling, NULL);
	held.is_wanted = false;
	held.channel = NULL;
	held.tokens = 0;
}

static bool read_token(struct rn_cm_channel *channel)
{
	uint64_t token;
	struct iovec iov = {.iov_base = &token, .iov_len = sizeof token};

	return preadv2(channel->channel.fd, &iov, 1, -1, RWF_NOWAIT) == sizeof token;
}

/* If another thread was quicker, or the kernel can't, a reader finds an empty list. */
static void take_token(struct rn_cm_channel *channel)
{
	if (channel == held.channel) {
		held.tokens--;
		if (!held.tokens)
			held.channel = NULL;
	} else if (!read_token(channel)) {
		wait_until_told();
		read_token(channel);
	}
}

struct rn_cm_event *rn_cm_event_new(struct rn_cm_id *id, enum rdma_cm_event_type type, int status)
{
	struct rn_cm_event *event = calloc(1, sizeof *event);

	if (!event) {
		rn_log("out of memory: lost event %d of an identifier", (int)type);
		return NULL;
	}
	event->id = event->counted_on = id;
	event->event.id = &id->id;
	event->event.event = type;
	event->event.status = status;
	return event;
}

void rn_cm_event_private(struct rn_cm_event *event, const void *data, size_t length, size_t field)
{
	struct rdma_conn_param *param = &event->event.param.conn;

	memset(event->private_data, 0, sizeof event->private_data);
	if (length)
		memcpy(event->private_data, data, length);
	param->private_data = event->private_data;
	param->private_data_len = (uint8_t)field;
}

void rn_cm_event_queue(struct rn_cm_event *event)
{
	struct rn_cm_channel *channel = rn_cm_channel(event->id->id.channel);

	event->next = NULL;
	*channel->events_end = event;
	channel->events_end = &event->next;
	if (!held.is_wanted || (held.channel && held.channel != channel)) {
		rn_cm_event_add_tokens(channel, 1);
		return;
	}
	held.channel = channel;
	held.tokens++;
}

bool rn_cm_tell(struct rn_cm_id *id, enum rdma_cm_event_type type, int status)
{
	struct rn_cm_event *event = rn_cm_event_new(id, type, status);

	if (event)
		rn_cm_event_queue(event);
	return event != NULL;
}

struct rn_cm_event *rn_cm_event_find(struct rn_cm_id *id, enum rdma_cm_event_type type)
{
	struct rn_cm_event *event = rn_cm_channel(id->id.channel)->events;

	while (event && (event->id != id || event->event.event != type))
		event = event->next;
	return event;
}

struct rn_cm_event *rn_cm_event_purge(struct rn_cm_id *id)
{
	struct rn_cm_channel *channel = rn_cm_channel(id->id.channel);
	struct rn_cm_event **link = &channel->events, *purged = NULL, **end = &purged;

	while (*link) {
		struct rn_cm_event *event = *link;

		if (event->id != id && event->counted_on != id) {
			link = &event->next;
			continue;
		}
		*link = event->next;
		event->next = NULL;
		*end = event;
		end = &event->next;
		take_token(channel);
	}
	channel->events_end = link;
	return purged;
}

void rn_cm_event_forget_group(struct rn_cm_id *id, const struct rn_cm_group *group)
{
	struct rn_cm_channel *channel = rn_cm_channel(id->id.channel);
	struct rn_cm_event **link = &channel->events, *event;

	while (*link && (*link)->group != group)
		link = &(*link)->next;
	event = *link;
	if (!event)
		return;
	*link = event->next;
	if (!*link)
		channel->events_end = link;
	free(event);
	take_token(channel);
}

/* --- once it was read ----------------------------------------------------------------------------- */

RN_EXPORT int rdma_ack_cm_event(struct rdma_cm_event *rdma_event)
{
	struct rn_cm_event *event = (struct rn_cm_event *)rdma_event;

	if (!event)
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	event->counted_on->acked++;
	if (event->group)
		event->group->owed--;
	pthread_cond_broadcast(&rn_cm_acked);
	pthread_mutex_unlock(&rn_cm_lock);
	free(event);
	return 0;
}

void rn_cm_put_event(struct rn_cm_id *id)
{
	struct rdma_cm_event *event = id->id.event;

	id->id.event = NULL;
	if (event)
		rdma_ack_cm_event(event);
}
