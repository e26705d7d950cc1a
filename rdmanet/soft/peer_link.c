/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Links: what we ask of another process, and what it gives.
 */
#define _GNU_SOURCE
#include "peers.h"
#include "rights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- the link ----------------------------------------------------------------------------------- */

static void link_ready(struct rn_source *source, uint32_t epoll_events);
static void link_timer(struct rn_timer *timer);

/* There will be no mapping: whoever waits for it is told. The peer may be gone after it. */
static void give_up(struct peer *peer)
{
	peer->refs++;
	rn_peer_unlist(peer);
	rn_timer_cancel(&peer->idle);
	atomic_store(&peer->rn.state, RN_PEER_DEAD);
	rn_peer_notify(peer, RN_LINK_FAILED);
	rn_peer_put_locked(peer);
}

/* The link of a peer that isn't READY came to nothing. */
static void link_failed(struct link *link)
{
	struct peer *peer = link->peer;

	rn_link_close(link);
	give_up(peer);
}

/* 0, or -errno: -EAGAIN when its queue is full. Any thread. */
static int link_connect(struct link *link)
{
	struct sockaddr_un address;
	socklen_t length = rn_peer_name(link->peer->rn.port, &address);
	struct message hello;
	enum refusal refusal;
	int rc;

	if (connect(link->source.fd, (struct sockaddr *)&address, length))
		return -errno;
	/* Whoever took the name may not be ours: it learns nothing. */
	refusal = rn_proof_begin(&link->proof, link->source.fd);
	if (!refusal)
		refusal = rn_proof_offer(&link->proof);
	if (refusal) {
		if (refusal != REFUSED_USER && refusal != REFUSED_AGAIN) /* which is as it should be, or said */
			rn_proof_failed(&link->proof, refusal);
		return -EACCES;
	}
	hello = rn_message(HELLO, (uint32_t)link->proof.fd, 0);
	rc = rn_send(&link->source, &link->out, &hello, NULL, 0, -1);
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
	link->proof.fd = -1;
	link->peer = peer;
	link->source.ready = link_ready;
	link->source.fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	rn_rights_accept(link->source.fd, false);
	rc = link->source.fd < 0 ? -errno : link_connect(link);
	if (rc && rc != -EAGAIN) {
		rn_proof_end(&link->proof);
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
}

static void peer_is_ready(struct peer *peer, struct process *process)
{
	peer->rn.pid = process->pid;
	peer->rn.arena = process->arena;
	peer->rn.arena_size = process->arena_size;
	atomic_store(&peer->rn.state, RN_PEER_READY);
	rn_peer_notify(peer, RN_LINK_READY);
}

/* What the server says next, if it is that: 0, or why not. */
static enum refusal read_identity(const struct link *link, enum message_type type, struct identity *other)
{
	if (rn_inbox.message.type == REFUSED && rn_inbox.message.value && rn_inbox.message.value < REFUSALS) {
		rn_log("port %u lets us not in: %s", link->peer->rn.port, rn_refusal_names[rn_inbox.message.value]);
		return rn_inbox.message.value;
	}
	if (rn_inbox.message.type != type || rn_inbox.message.version != VERSION || rn_inbox.length != sizeof *other)
		return REFUSED_VERSION;
	memcpy(other, rn_inbox.bytes, sizeof *other);
	return 0;
}

static void on_challenge(struct link *link)
{
	struct message message = rn_message(PROOF, 0, 0);
	struct identity self = {.instance = rn_instance()}, other;
	enum refusal refusal = read_identity(link, CHALLENGE, &other);

	if (!refusal)
		refusal = rn_proof_check(&link->proof, &other);
	if (!refusal)
		refusal = rn_proof_read(&link->proof, rn_inbox.message.value);
	if (refusal) {
		if (refusal != REFUSED_NO_TRACE || rn_inbox.message.type == REFUSED || !rn_has_hung_up(link->source.fd))
			rn_proof_failed(&link->proof, refusal);
		link_failed(link); /* it can't be seen, or it isn't there any more */
		return;
	}
	link->is_challenged = true;
	rn_rights_accept(link->source.fd, true); /* the arena comes in answer to the proof */
	memcpy(self.nonce, link->proof.theirs, sizeof self.nonce);
	rn_proof_tell_secret(&link->proof, LINK_CLIENT, &self);
	if (rn_send(&link->source, &link->out, &message, &self, sizeof self, -1))
		link_failed(link);
}

/* Its process has proven itself. The link is that process's from here on, or it has another. */
static void link_stands(struct link *link, struct process *process)
{
	link->peer->link = NULL;
	link->peer = NULL;
	rn_timer_cancel(&link->timer);
	if (process->link) {
		rn_link_close(link); /* by another of its ports we have one */
	} else {
		process->link = link;
		link->process = process;
	}
}

static void on_welcome(struct link *link)
{
	struct peer *peer = link->peer;
	struct process *process = NULL;
	struct identity other;
	enum refusal refusal = read_identity(link, WELCOME, &other);
	int pidfd;

	if (!refusal)
		refusal = rn_proof_check_secret(&link->proof, LINK_CLIENT, &other);
	if (!refusal)
		refusal = rn_proof_hold(&link->proof, link->source.fd, &pidfd);
	if (refusal)
		rn_proof_failed(&link->proof, refusal);
	else
		process = rn_process_of(link->proof.pid, other.instance, pidfd);
	/* rn_process_of may have let callbacks run, but this link and its peer are the engine's. */
	if (!process) {
		link_failed(link);
		return;
	}
	if (!process->arena) {
		process->arena = rn_map_sealed(rn_inbox.fd, other.arena_size);
		process->arena_size = (size_t)other.arena_size;
	}
	peer_attach(peer, process);
	link_stands(link, process);
	peer->is_unmapped = !process->arena;
	if (peer->is_unmapped)
		give_up(peer); /* but we may say so: rn_peer_tell_stream */
	else
		peer_is_ready(peer, process);
}

/* --- segments ----------------------------------------------------------------------------------- */

/* Tries that were in vain; the pause after each but the last, and before a segment that was given up is tried again. */
enum { MAP_TRIES = 3, GIVEN_UP_MS = 1000, GIVEN_UP_MAX = 1024 };
static const uint16_t pauses_ms[MAP_TRIES] = {1, 10, GIVEN_UP_MS};

/* One that was given up has its place until others need it. */
static bool is_free(const struct process *process, const struct segment *segment)
{
	return !segment->used ||
	       (segment->tries >= MAP_TRIES && !segment->asked && process->given_up >= GIVEN_UP_MAX);
}

/* Nothing has been tried. */
static void segment_settle(struct process *process, struct segment *segment)
{
	process->given_up -= segment->used && segment->tries >= MAP_TRIES;
	segment->tries = 0;
	segment->asked = false;
	segment->again_ns = 0;
}

static void segment_free(struct process *process, struct segment *segment)
{
	segment_settle(process, segment);
	segment->used = false;
}

static struct segment *segment_node(struct process *process, uint32_t id, bool add)
{
	struct segment *_Atomic *bucket = &process->segments[id % SEGMENT_BUCKETS];
	struct segment *segment, *unused = NULL;

	for (segment = *bucket; segment; segment = segment->next) {
		if (segment->used && segment->id == id)
			return segment;
		if (!segment->base && is_free(process, segment))
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
	segment_free(process, unused);
	unused->base = NULL;
	unused->id = id;
	unused->used = true;
	return unused;
}

/* It isn't here, for this time. */
static void segment_failed(struct process *process, struct segment *segment)
{
	segment->asked = false;
	if (!rn_guarded(RN_GUARD_MAP_TRIES)) {
		segment_free(process, segment);
		return;
	}
	if (segment->tries < MAP_TRIES && ++segment->tries == MAP_TRIES) {
		process->given_up++;
		rn_warn(RN_WARN_MAPPING,
			"segment %u of process %d can't be mapped: its memory is reached by system calls, or by its owner",
			segment->id, process->pid);
	}
	segment->again_ns = rn_now_ns() + pauses_ms[segment->tries - 1] * 1000000ull;
	if (!process->asks_again)
		rn_timer_set_ms(&process->again, pauses_ms[segment->tries - 1]);
	process->asks_again = true;
}

static void segment_ask(struct process *process, struct segment *segment)
{
	struct message want = rn_message(WANT_SEGMENT, segment->id, 0);

	segment->asked = true;
	if (!process->link || rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
		segment_failed(process, segment);
}

/* For those whose pause is over; then those who wait look again. */
void rn_segments_ask(struct rn_timer *timer)
{
	struct process *process = RN_OWNER(timer, struct process, again);
	uint64_t now = rn_now_ns(), next_ns = UINT64_MAX;

	pthread_mutex_lock(&rn_peers.lock);
	process->asks_again = false;
	for (unsigned i = 0; i < SEGMENT_BUCKETS; i++) {
		for (struct segment *segment = process->segments[i]; segment; segment = segment->next) {
			if (!segment->used || segment->base || segment->asked || segment->tries >= MAP_TRIES)
				continue;
			if (segment->again_ns <= now)
				segment_ask(process, segment);
			else if (segment->again_ns < next_ns)
				next_ns = segment->again_ns;
		}
	}
	if (next_ns != UINT64_MAX && !process->asks_again) {
		rn_timer_set(timer, next_ns - now);
		process->asks_again = true;
	}
	rn_process_tell_waiting(process);
	pthread_mutex_unlock(&rn_peers.lock);
}

static void on_segment(struct process *process)
{
	struct segment *segment = segment_node(process, rn_inbox.message.value, false);
	char *base = NULL;

	if (!segment || !segment->asked)
		return;
	if (rn_inbox.message.size)
		base = rn_map_sealed(rn_inbox.fd, rn_inbox.message.size);
	if (base) {
		segment_settle(process, segment);
		segment->size = (size_t)rn_inbox.message.size;
		segment->base = base; /* the size was there before */
	} else {
		segment_failed(process, segment);
	}
	rn_process_tell_waiting(process);
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
	segment_free(process, segment);
	if (base) {
		pthread_mutex_unlock(&rn_peers.lock);
		rn_segment_withdrawn(base);
		pthread_mutex_lock(&rn_peers.lock);
		rn_unmap(base, size);
	}
	rn_process_tell_waiting(process); /* or who waits for it would wait on */
}

/* --- channels ----------------------------------------------------------------------------------- */

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
	struct message want = rn_message(WANT_CHANNEL, channel->id, event_alone);

	channel->asked = true;
	channel->owed = false;
	if (rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
		channel_forget(process, channel);
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

/* The event that it was asked for with is its owner's to make if the descriptor isn't: see on_want_channel. */
static void on_channel(struct process *process)
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
		channel_forget(process, channel); /* destroyed meanwhile: nobody waits there */
	}
out:
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
	switch (rn_receive(source->fd, link->is_challenged)) {
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
		if (!process && !link->is_challenged)
			on_challenge(link);
		else if (!process)
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

enum rn_segment_way rn_peer_segment(struct rn_peer *rn_peer, uint32_t id, char **base, size_t *size,
				    struct rn_notice *waiting)
{
	struct process *process;
	struct segment *segment;
	bool is_lost = false;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return RN_SEGMENT_ASKED; /* and the notice that comes is of its death */
	process = PEER(rn_peer)->process;
	*base = find_segment(process, id, size);
	if (*base)
		return RN_SEGMENT_MAPPED;
	pthread_mutex_lock(&rn_peers.lock);
	*base = find_segment(process, id, size);
	if (!*base && !process->dead && process->link) {
		segment = segment_node(process, id, true);
		if (segment && !segment->asked && segment->again_ns <= rn_now_ns())
			segment_ask(process, segment);
		is_lost = !segment || segment->tries >= MAP_TRIES;
		if (!is_lost)
			rn_process_await(process, waiting);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	return *base ? RN_SEGMENT_MAPPED : is_lost ? RN_SEGMENT_LOST : RN_SEGMENT_ASKED;
}

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

/* With the lock held: the link to its process, that stands, or NULL. */
static struct link *link_of(struct rn_peer *peer)
{
	struct process *process = atomic_load(&peer->state) == RN_PEER_SELF ? NULL : PEER(peer)->process;

	return process ? process->link : NULL;
}

bool rn_peer_is_linked(struct rn_peer *peer)
{
	int state = atomic_load(&peer->state);

	return state == RN_PEER_READY || state == RN_PEER_SELF;
}

const void *rn_peer_process(struct rn_peer *peer)
{
	return atomic_load(&peer->state) == RN_PEER_SELF ? NULL : PEER(peer)->process;
}

bool rn_peer_tell_connection(struct rn_peer *peer, uint32_t what, uint64_t token)
{
	struct message message = rn_message(CONNECTION, what, (int64_t)token);
	struct link *link;
	int rc = -ENOTCONN;

	if (atomic_load(&peer->state) == RN_PEER_SELF) {
		rn_connection_word(NULL, what, token);
		return true;
	}
	pthread_mutex_lock(&rn_peers.lock);
	link = link_of(peer);
	if (link)
		rc = rn_send(&link->source, &link->out, &message, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
	return !rc;
}

void rn_peer_tell_stream(struct rn_peer *peer, uint32_t ours, uint32_t theirs, bool anew)
{
	struct message message = rn_message(BY_STREAM, ours, theirs);
	struct rn_peer *again = NULL;
	struct link *link;

	pthread_mutex_lock(&rn_peers.lock);
	link = link_of(peer);
	pthread_mutex_unlock(&rn_peers.lock);
	if (!link && anew)
		again = rn_peer_get(peer->port); /* it may let us in now */
	pthread_mutex_lock(&rn_peers.lock);
	link = link_of(again ? again : peer);
	if (link)
		rn_send(&link->source, &link->out, &message, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
	rn_peer_put(again);
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
	process->given_up = 0;
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
	rn_proof_end(&link->proof);
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
