/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completion channels, by number: how a peer wakes us.
 *
 * A channel is an eventfd that counts tokens, one for each event; cq_event.c knows what they stand for.
 * Peers know it by a number that is never used twice, and get a copy of the descriptor when they ask
 * (peer/channels.c).  Number 0 is the wakeup of this process's engine: a peer has left work for it.
 *
 * The copy is of the same open file, so a peer can take tokens, and change whether reading waits.  A program that
 * doesn't wait for events (it had O_NONBLOCK set when a peer was first given the channel, or got EAGAIN
 * since) never waits again: else a peer could block its event loop.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "objects/cq_inside.h"

/* --- channels by number ------------------------------------------------------------------------------ */

/* id = serial << 12 | index. Index 0 is the wakeup. Guarded by channel_lock, which is innermost. */
static struct {
	uint32_t id;
	int fd;
	bool is_shared; /* a peer has it as well */
	_Atomic bool *never_waits;
} channels[RN_MAX_CHANNELS];
static struct rn_lock channel_lock;
static uint32_t channel_serial;

static int wakeup = -1;

uint32_t rn_channel_register(int fd, _Atomic bool *never_waits)
{
	uint32_t id = RN_NO_CHANNEL;

	rn_lock(&channel_lock);
	for (unsigned i = 1; i < RN_MAX_CHANNELS; i++) {
		if (channels[i].id)
			continue;
		channel_serial = (channel_serial + 1) % (1 << 19); /* never all ones: that is NO_CHANNEL */
		id = (channel_serial + 1) * RN_MAX_CHANNELS + i;
		channels[i].id = id;
		channels[i].fd = fd;
		channels[i].never_waits = never_waits;
		channels[i].is_shared = false;
		break;
	}
	rn_unlock(&channel_lock);
	return id;
}

void rn_channel_unregister(uint32_t id)
{
	rn_lock(&channel_lock);
	channels[id % RN_MAX_CHANNELS].id = 0;
	rn_unlock(&channel_lock);
	rn_channel_gone(id);
}

static void token_write(int fd)
{
	uint64_t one = 1;

	/* The counter can't overflow before its 2^64th event: only EINTR needs a retry. */
	while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void rn_channel_signal(uint32_t id)
{
	bool is_shared = true;
	int fd = -1;

	rn_lock(&channel_lock);
	if (id == RN_CHANNEL_WAKEUP) {
		fd = wakeup;
	} else if (channels[id % RN_MAX_CHANNELS].id == id) {
		fd = channels[id % RN_MAX_CHANNELS].fd;
		is_shared = channels[id % RN_MAX_CHANNELS].is_shared;
	}
	/* Inside the lock: otherwise the descriptor might be closed and its number reused by now. */
	if (fd >= 0 && is_shared)
		rn_eventfd_add(fd);
	else if (fd >= 0)
		token_write(fd);
	rn_unlock(&channel_lock);
}

void rn_channel_set_wakeup(int fd)
{
	rn_lock(&channel_lock);
	wakeup = fd;
	rn_unlock(&channel_lock);
}

bool rn_channel_is_shared(const struct rn_channel *channel)
{
	bool is;

	rn_lock(&channel_lock);
	is = channels[channel->id % RN_MAX_CHANNELS].is_shared;
	rn_unlock(&channel_lock);
	return is;
}

/* For the engine, to pass it to a peer: a copy, since another thread may destroy the channel. */
int rn_channel_fd(uint32_t id)
{
	int fd = -1;

	rn_lock(&channel_lock);
	if (id == RN_CHANNEL_WAKEUP)
		fd = wakeup;
	else if (channels[id % RN_MAX_CHANNELS].id == id)
		fd = channels[id % RN_MAX_CHANNELS].fd;
	if (fd >= 0 && id != RN_CHANNEL_WAKEUP && !channels[id % RN_MAX_CHANNELS].is_shared &&
	    fcntl(fd, F_GETFL) & O_NONBLOCK)
		atomic_store(channels[id % RN_MAX_CHANNELS].never_waits, true);
	channels[id % RN_MAX_CHANNELS].is_shared |= fd >= 0;
	if (fd >= 0)
		fd = rn_fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 3));
	rn_unlock(&channel_lock);
	return fd;
}

/* --- creating and destroying ------------------------------------------------------------------------- */

RN_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_channel *channel;

	if (rn_is_foreign(ibv_context)) {
		errno = ENODEV;
		return NULL;
	}
	errno = rn_device_check(context, RN_CREATE_COMP_CHANNEL);
	channel = errno ? NULL : calloc(1, sizeof(*channel));
	if (!channel)
		return NULL;
	channel->channel.context = ibv_context;
	/* The program's own: it may set O_NONBLOCK, watch it, and pass it on. */
	channel->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (channel->channel.fd < 0) {
		free(channel);
		return NULL;
	}
	channel->id = rn_channel_register(channel->channel.fd, &channel->never_waits);
	if (channel->id == RN_NO_CHANNEL) {
		close(channel->channel.fd);
		free(channel);
		errno = ENOMEM;
		return NULL;
	}
	rn_list_init(&channel->cqs);
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->channels, &channel->link);
	pthread_mutex_unlock(&context->mutex);
	return &channel->channel;
}

RN_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv_channel)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_channel;
	struct rn_context *context = rn_context(ibv_channel->context);

	if (rn_is_foreign(ibv_channel->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (ibv_channel->refcnt) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&channel->link);
	pthread_mutex_unlock(&context->mutex);

	rn_channel_unregister(channel->id);
	close(ibv_channel->fd);
	free(channel);
	return 0;
}

/* --- the end -------------------------------------------------------------------------------------------- */

void rn_channel_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->channels))
		ibv_destroy_comp_channel(&container_of(context->channels.next, struct rn_channel, link)->channel);
}

void rn_channel_forked(void)
{
	memset(&channel_lock, 0, sizeof(channel_lock));
	memset(channels, 0, sizeof(channels));
	wakeup = -1;
}
