/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Links: what we ask of another process, and what it gives.
 */
#define _GNU_SOURCE
#include "peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- the link ----------------------------------------------------------------------------------- */

static void link_ready(struct rn_source *source, uint32_t epoll_events);
static void link_timer(struct rn_timer *timer);

/* The link of a peer that isn't READY came to nothing. */
static void link_failed(struct link *link)
{
	struct peer *peer = link->peer;

	peer->refs++;
	rn_link_close(link);
	rn_peer_unlist(peer);
	rn_timer_cancel(&peer->idle);
	atomic_store(&peer->rn.state, RN_PEER_DEAD);
	rn_peer_notify(peer, RN_LINK_FAILED);
	rn_peer_put_locked(peer);
}

/* 0, or -errno: -EAGAIN when its queue is full. Any thread. */
static int link_connect(struct link *link)
{
	struct sockaddr_un address;
	socklen_t length = rn_peer_name(link->peer->rn.port, &address);
	struct ucred cred;
	socklen_t cred_length = sizeof cred;
	struct message hello = rn_message(HELLO, 0, sizeof(struct identity));
	int rc;

	if (connect(link->source.fd, (struct sockaddr *)&address, length))
		return -errno;
	/* Whoever took the name may not be ours: it learns nothing. */
	if (getsockopt(link->source.fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_length) || cred.uid != geteuid())
		return -EACCES;
	rc = rn_send(&link->source, &link->out, &hello, rn_self(), sizeof(struct identity), -1);
	return rc ? rc : rn_source_add(&link->source, EPOLLIN);
}

/* The first try is made at once, by whoever wants it: a Unix socket connects without waiting. */
int rn_link_start(struct peer *peer)
{
	struct link *link = calloc(1, sizeof *link);
	int rc;

	if (!link)
		return -ENOMEM;
	link->out = (struct outbox){.end = &link->out.first, .waiting = EPOLLIN | EPOLLOUT};
	link->timer.fire = link_timer;
	link->began_ns = rn_now_ns();
	link->peer = peer;
	link->source.ready = link_ready;
	link->source.fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	rc = link->source.fd < 0 ? -errno : link_connect(link);
	if (rc && rc != -EAGAIN) {
		rn_fd_close(link->source.fd);
		free(link);
		return rc;
	}
	peer->link = link;
	rn_peers.links++;
	rn_timer_set_ms(&link->timer, rc ? RETRY_MS : rn_settings.silence_ms);
	return 0;
}

static void link_timer(struct rn_timer *timer)
{
	struct link *link = RN_OWNER(timer, struct link, timer);
	int rc = -ETIMEDOUT;

	pthread_mutex_lock(&rn_peers.lock);
	if (!link->process) {
		if (!link->source.slot && rn_now_ns() - link->began_ns < rn_settings.silence_ms * 1000000u)
			rc = link_connect(link);
		if (!rc)
			rn_timer_set_ms(&link->timer, rn_settings.silence_ms);
		else if (rc == -EAGAIN)
			rn_timer_set_ms(&link->timer, RETRY_MS);
		else
			link_failed(link);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

static void peer_attach(struct peer *peer, struct process *process)
{
	peer->process = process;
	peer->next_sibling = process->peers;
	process->peers = peer;
	process->peers_count++;
	peer->rn.pid = process->pid;
	peer->rn.arena = process->arena;
	peer->rn.arena_size = process->arena_size;
	atomic_store(&peer->rn.state, RN_PEER_READY);
}

/* Or REFUSED. The link may be gone after it. */
static void on_welcome(struct link *link)
{
	struct peer *peer = link->peer;
	struct identity other;
	enum refusal refusal = REFUSED_VERSION;
	struct process *process = NULL;
	int pid;

	if (rn_inbox.message.type == REFUSED && rn_inbox.message.value < sizeof rn_refusal_names / sizeof *rn_refusal_names &&
	    rn_inbox.message.value) {
		rn_log("port %u lets us not in: %s", peer->rn.port, rn_refusal_names[rn_inbox.message.value]);
	} else if (rn_inbox.message.type == WELCOME && rn_inbox.message.version == VERSION && rn_inbox.length == sizeof other) {
		memcpy(&other, rn_inbox.bytes, sizeof other);
		refusal = rn_judge(link->source.fd, &other, &pid);
		if (!refusal)
			process = rn_process_of(pid, other.instance, link->source.fd);
		else
			rn_log("port %u is not trusted: %s", peer->rn.port, rn_refusal_names[refusal]);
	}
	/* rn_process_of may have let callbacks run, but this link and its peer are the engine's. */
	if (process && !process->arena) {
		process->arena = rn_map_sealed(rn_inbox.fd, other.arena_size);
		process->arena_size = (size_t)other.arena_size;
		if (!process->arena) {
			rn_process_let_go(process);
			process = NULL;
		}
	}
	if (!process) {
		link_failed(link);
		return;
	}
	peer->link = NULL;
	link->peer = NULL;
	rn_timer_cancel(&link->timer);
	peer_attach(peer, process);
	if (process->link) {
		rn_link_close(link); /* by another of its ports we have one */
	} else {
		process->link = link;
		link->process = process;
	}
	rn_peer_notify(peer, RN_LINK_READY);
}

static struct segment *segment_node(struct process *process, uint32_t id, bool add)
{
	struct segment *_Atomic *bucket = &process->segments[id % SEGMENT_BUCKETS];
	struct segment *segment, *unused = NULL;

	for (segment = *bucket; segment; segment = segment->next) {
		if (segment->used && segment->id == id)
			return segment;
		if (!segment->used)
			unused = segment;
	}
	if (!add)
		return NULL;
	if (!unused) {
		unused = calloc(1, sizeof *unused);
		if (!unused)
			return NULL;
		unused->next = *bucket;
		*bucket = unused;
	}
	unused->base = NULL;
	unused->id = id;
	unused->used = true;
	return unused;
}

static void on_segment(struct process *process)
{
	struct segment *segment = segment_node(process, rn_inbox.message.value, false);
	char *base = NULL;

	if (!segment || segment->base)
		return;
	if (rn_inbox.message.size)
		base = rn_map_sealed(rn_inbox.fd, rn_inbox.message.size);
	if (base) {
		segment->size = (size_t)rn_inbox.message.size;
		segment->base = base; /* the size was there before */
	} else {
		segment->used = false;
	}
	rn_process_notify(process, RN_SEGMENT_READY);
}

/* The owner says that nobody is in it, but we can't take its word for that: nobody finds it from here on, and those
 * who have found it are waited for. */
static void on_gone_segment(struct process *process)
{
	struct segment *segment = segment_node(process, rn_inbox.message.value, false);
	size_t size;
	char *base;

	if (!segment)
		return;
	base = segment->base;
	size = segment->size;
	segment->base = NULL;
	segment->used = false;
	if (base) {
		pthread_mutex_unlock(&rn_peers.lock);
		rn_segment_withdrawn(base);
		pthread_mutex_lock(&rn_peers.lock);
		rn_unmap(base, size);
	}
	rn_process_notify(process, RN_SEGMENT_READY); /* or who waits for it would wait on */
}

/* With channel_lock held. */
static struct channel *channel_find(struct process *process, uint32_t id)
{
	for (unsigned i = 0; i < process->channel_count; i++)
		if (process->channels[i].id == id)
			return &process->channels[i];
	return NULL;
}

static void channel_forget(struct process *process, struct channel *channel)
{
	rn_fd_close(channel->fd);
	*channel = process->channels[--process->channel_count];
}

/* Is it one, so that a write can't do harm elsewhere? */
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

static void on_channel(struct process *process)
{
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, rn_inbox.message.value);
	if (channel && channel->fd < 0) {
		if (rn_inbox.message.size && rn_inbox.fd >= 0 && is_eventfd(rn_inbox.fd)) {
			channel->fd = rn_inbox.fd;
			rn_inbox.fd = -1;
			if (channel->owed)
				rn_eventfd_add(channel->fd);
			channel->owed = false;
		} else {
			channel_forget(process, channel); /* destroyed meanwhile: nobody waits there */
		}
	}
	pthread_mutex_unlock(&process->channel_lock);
}

static void on_gone_channel(struct process *process)
{
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, rn_inbox.message.value);
	if (channel)
		channel_forget(process, channel);
	pthread_mutex_unlock(&process->channel_lock);
}

static void on_answer(struct process *process)
{
	struct rn_reply *reply;
	int64_t size = rn_inbox.message.size;

	for (reply = process->replies; reply && reply->serial != rn_inbox.message.value; reply = reply->next)
		;
	if (!reply)
		return; /* cancelled */
	*reply->link = reply->next;
	if (reply->next)
		reply->next->link = reply->link;
	else
		process->replies_end = reply->link;
	reply->link = NULL;
	if (size >= 0 && (uint64_t)size != rn_inbox.length)
		size = -EPROTO;
	rn_callback_begin(reply);
	reply->done(reply, rn_inbox.bytes, (long)size);
	rn_callback_end();
}

static void link_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct link *link = RN_OWNER(source, struct link, source);
	struct process *process;

	pthread_mutex_lock(&rn_peers.lock);
	if (epoll_events & EPOLLOUT)
		rn_outbox_flush(&link->source, &link->out);
	/* One message a turn: the callbacks it causes may end the link. */
	switch (rn_receive(source->fd)) {
	case NOTHING:
		break;
	case ENDED:
		if (link->process)
			rn_process_died(link->process);
		else
			link_failed(link);
		break;
	case ARRIVED:
		process = link->process;
		if (!process)
			on_welcome(link);
		else if (rn_inbox.message.type == SEGMENT)
			on_segment(process);
		else if (rn_inbox.message.type == CHANNEL)
			on_channel(process);
		else if (rn_inbox.message.type == ANSWER)
			on_answer(process);
		else if (rn_inbox.message.type == GONE_SEGMENT)
			on_gone_segment(process);
		else if (rn_inbox.message.type == GONE_CHANNEL)
			on_gone_channel(process);
		rn_inbox_discard();
		break;
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

/* --- what the device asks for: any thread ------------------------------------------------------- */

/* Without the lock. A node is written in the order base = NULL, id, used, size, base; so a base
 * that is seen between two looks at a matching id belongs to it. */
static void *find_segment(struct process *process, uint32_t id, size_t *size)
{
	for (struct segment *segment = process->segments[id % SEGMENT_BUCKETS]; segment; segment = segment->next) {
		char *base;

		if (!segment->used || segment->id != id)
			continue;
		base = segment->base;
		*size = segment->size;
		if (base && segment->base == base && segment->id == id)
			return base;
	}
	return NULL;
}

void *rn_peer_segment(struct rn_peer *rn_peer, uint32_t id, size_t *size)
{
	struct process *process;
	struct message want = rn_message(WANT_SEGMENT, id, 0);
	void *base;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return NULL;
	process = PEER(rn_peer)->process;
	base = find_segment(process, id, size);
	if (base)
		return base;
	pthread_mutex_lock(&rn_peers.lock);
	if (!process->dead && process->link && !segment_node(process, id, false)) {
		struct segment *segment = segment_node(process, id, true);

		if (segment && rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
			segment->used = false;
	}
	base = find_segment(process, id, size);
	pthread_mutex_unlock(&rn_peers.lock);
	return base;
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

bool rn_peer_signal(struct rn_peer *rn_peer, uint32_t id)
{
	struct process *process;
	struct channel *channel;
	struct message want = rn_message(WANT_CHANNEL, id, 0);
	bool is_written;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return false; /* the dead sleep */
	process = PEER(rn_peer)->process;
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	is_written = channel && channel->fd >= 0;
	if (is_written)
		rn_eventfd_add(channel->fd);
	else if (channel)
		channel->owed = true;
	pthread_mutex_unlock(&process->channel_lock);
	if (channel)
		return is_written;

	pthread_mutex_lock(&rn_peers.lock);
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	is_written = channel && channel->fd >= 0;
	if (is_written) {
		rn_eventfd_add(channel->fd);
	} else if (channel) {
		channel->owed = true;
	} else if (!process->dead && process->link && (channel = channel_add(process, id))) {
		channel->owed = true;
		if (rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
			channel_forget(process, channel);
	}
	pthread_mutex_unlock(&process->channel_lock);
	pthread_mutex_unlock(&rn_peers.lock);
	return is_written;
}

int rn_peer_request(struct rn_peer *rn_peer, const void *bytes, size_t length, struct rn_reply *reply)
{
	struct process *process;
	struct message request;
	int rc = -ENOTCONN;

	if (length > RN_PEER_MESSAGE_MAX)
		return -EMSGSIZE;
	pthread_mutex_lock(&rn_peers.lock);
	if (atomic_load(&rn_peer->state) == RN_PEER_READY) {
		process = PEER(rn_peer)->process;
		request = rn_message(REQUEST, ++process->serial, (int64_t)length);
		if (!process->dead && process->link)
			rc = rn_send(&process->link->source, &process->link->out, &request, bytes, length, -1);
		if (!rc) {
			reply->peer = rn_peer;
			reply->serial = process->serial;
			reply->next = NULL;
			reply->link = process->replies_end;
			*process->replies_end = reply;
			process->replies_end = &reply->next;
		}
	}
	pthread_mutex_unlock(&rn_peers.lock);
	return rc;
}

void rn_reply_cancel(struct rn_reply *reply)
{
	pthread_mutex_lock(&rn_peers.lock);
	if (reply->link) {
		struct process *process = PEER(reply->peer)->process;

		*reply->link = reply->next;
		if (reply->next)
			reply->next->link = reply->link;
		else
			process->replies_end = reply->link;
		reply->link = NULL;
	}
	rn_callback_settle(reply);
	pthread_mutex_unlock(&rn_peers.lock);
}

/* --- the end ------------------------------------------------------------------------------------ */

void rn_process_release(struct process *process)
{
	rn_unmap(process->arena, process->arena_size);
	process->arena = NULL;
	for (unsigned i = 0; i < SEGMENT_BUCKETS; i++) {
		struct segment *segment = process->segments[i];

		process->segments[i] = NULL;
		while (segment) {
			struct segment *next = segment->next;

			rn_unmap(segment->base, segment->size);
			free(segment);
			segment = next;
		}
	}
	pthread_mutex_lock(&process->channel_lock);
	for (unsigned i = 0; i < process->channel_count; i++)
		rn_fd_close(process->channels[i].fd);
	free(process->channels);
	process->channels = NULL;
	process->channel_count = process->channel_room = 0;
	pthread_mutex_unlock(&process->channel_lock);
}

void rn_link_close(struct link *link)
{
	rn_source_remove(&link->source);
	rn_timer_cancel(&link->timer);
	rn_fd_close(link->source.fd);
	rn_outbox_clear(&link->out);
	if (link->peer)
		link->peer->link = NULL;
	if (link->process)
		link->process->link = NULL;
	rn_peers.links--;
	free(link);
}

/* Every request without its answer: the owner is gone. */
void rn_replies_fail(struct process *process)
{
	while (process->replies) {
		struct rn_reply *reply = process->replies;

		process->replies = reply->next;
		if (reply->next)
			reply->next->link = &process->replies;
		else
			process->replies_end = &process->replies;
		reply->link = NULL;
		rn_callback_begin(reply);
		reply->done(reply, NULL, -ECONNRESET);
		rn_callback_end();
	}
}
