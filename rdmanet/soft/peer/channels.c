/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Channels of other processes: the eventfds by which we wake those that sleep there.
 *
 * One is asked for with the first event on it, which its owner makes itself if the descriptor doesn't come; events
 * that are due before the answer are owed, and one stands for all.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "peer/peers.h"

enum { LOST_MS = 100 }; /* a channel for which no descriptor was free is asked for again after this */

/* With channel_lock held. */
static struct channel *channel_find(struct process *process, uint32_t id)
{
	for (unsigned i = 0; i < process->channel_count; i++)
		if (process->channels[i].id == id)
			return &process->channels[i];
	return NULL;
}

/* With channel_lock held. */
static struct channel *channel_add(struct process *process, uint32_t id)
{
	if (process->channel_count == process->channel_room) {
		unsigned room = process->channel_room ? process->channel_room * 2 : 4;
		struct channel *channels = realloc(process->channels, room * sizeof *channels);

		if (!channels)
			return NULL;
		process->channels = channels;
		process->channel_room = room;
	}
	process->channels[process->channel_count] = (struct channel){.id = id, .fd = -1};
	return &process->channels[process->channel_count++];
}

static void channel_forget(struct process *process, struct channel *channel)
{
	rn_fd_close(channel->fd);
	*channel = process->channels[--process->channel_count];
}

/* For the channel and an event on it, or for the event alone. With channel_lock held. */
static void channel_ask(struct process *process, struct channel *channel)
{
	bool event_alone = channel->is_lost && rn_now_ns() < channel->again_ns;
	struct rn_link_message want = rn_link_message(RN_LINK_WANT_CHANNEL, channel->id, event_alone);

	channel->asked = true;
	channel->owed = false;
	if (rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
		channel_forget(process, channel);
}

/* Is it an eventfd, so that a write can't do harm elsewhere? */
static bool is_eventfd(int fd)
{
	char path[32], target[64];
	ssize_t length;

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	length = readlink(path, target, sizeof target - 1);
	if (length < 0)
		return true; /* no /proc: it is a process of our own user, after all */
	target[length] = 0;
	return strstr(target, "[eventfd]") != NULL;
}

/* If the descriptor does not come, its owner raises the event that caused the question: see on_want_channel. */
void rn_on_channel(struct process *process)
{
	bool is_there = rn_inbox.message.size, has_come = is_there && rn_inbox.fd >= 0;
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, rn_inbox.message.value);
	if (!channel || !channel->asked)
		goto out;
	channel->asked = false;
	if (has_come && is_eventfd(rn_inbox.fd)) {
		channel->fd = rn_inbox.fd;
		rn_inbox.fd = -1;
		rn_eventfd_add(channel->fd);
	} else if (is_there && !has_come) {
		channel->is_lost = true;
		channel->again_ns = rn_now_ns() + LOST_MS * 1000000ull;
		channel_ask(process, channel);
	} else if (!is_there && channel->owed) {
		channel_ask(process, channel);
	} else if (is_there || !channel->is_lost) {
		channel_forget(process, channel); /* destroyed meanwhile: nothing waits there */
	}
out:
	pthread_mutex_unlock(&process->channel_lock);
}

void rn_on_gone_channel(struct process *process)
{
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, rn_inbox.message.value);
	if (channel)
		channel_forget(process, channel);
	pthread_mutex_unlock(&process->channel_lock);
	rn_mail_take_back(process);
}

/* --- what the device asks for: any thread ------------------------------------------------------- */

/* True: there is nothing left to do. With channel_lock held. */
static bool channel_signal(struct channel *channel)
{
	if (channel && channel->fd >= 0)
		rn_eventfd_add(channel->fd);
	else if (channel && channel->asked)
		channel->owed = true;
	else
		return false;
	return true;
}

bool rn_peer_signal(struct rn_peer *rn_peer, uint32_t id)
{
	struct process *process;
	struct channel *channel;
	bool is_done, is_written;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return false; /* the dead sleep */
	process = PEER(rn_peer)->process;
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	is_done = channel_signal(channel);
	is_written = is_done && channel->fd >= 0;
	pthread_mutex_unlock(&process->channel_lock);
	if (is_done)
		return is_written;

	pthread_mutex_lock(&rn_peers.lock);
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	is_done = channel_signal(channel);
	is_written = is_done && channel->fd >= 0;
	if (!is_done && !process->dead && process->link && (channel || (channel = channel_add(process, id))))
		channel_ask(process, channel);
	pthread_mutex_unlock(&process->channel_lock);
	pthread_mutex_unlock(&rn_peers.lock);
	return is_written;
}

void rn_channels_release(struct process *process)
{
	pthread_mutex_lock(&process->channel_lock);
	for (unsigned i = 0; i < process->channel_count; i++)
		rn_fd_close(process->channels[i].fd);
	free(process->channels);
	process->channels = NULL;
	process->channel_count = process->channel_room = 0;
	pthread_mutex_unlock(&process->channel_lock);
}
