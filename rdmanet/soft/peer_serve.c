/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serving: what other processes ask of us.  Their sockets come from peer_port.c.
 */
#define _GNU_SOURCE
#include "own.h"
#include "peers.h"

#include <stdlib.h>
#include <string.h>

enum { UNNAMED_MAX = 256 }; /* sockets that have not introduced themselves: more are closed at once */

void rn_served_close(struct served *served)
{
	struct process *process = served->process;

	rn_source_remove(&served->source);
	rn_timer_cancel(&served->timer);
	rn_fd_close(served->source.fd);
	rn_outbox_clear(&served->out);
	*served->link = served->next;
	if (served->next)
		served->next->link = served->link;
	rn_peers.served_count--;
	free(served->segments);
	free(served->channels);
	free(served);
	if (process) {
		process->served_count--;
		rn_process_let_go(process);
	}
}

static bool remembers(const uint32_t *ids, unsigned count, uint32_t id)
{
	for (unsigned i = 0; i < count; i++)
		if (ids[i] == id)
			return true;
	return false;
}

static bool remember(uint32_t **ids, unsigned *count, uint32_t id)
{
	uint32_t *grown;

	if (remembers(*ids, *count, id))
		return true;
	grown = realloc(*ids, (*count + 1) * sizeof **ids);
	if (!grown)
		return false;
	*ids = grown;
	grown[(*count)++] = id;
	return true;
}

static bool forget(uint32_t *ids, unsigned *count, uint32_t id)
{
	for (unsigned i = 0; i < *count; i++) {
		if (ids[i] == id) {
			ids[i] = ids[--*count];
			return true;
		}
	}
	return false;
}

static void answer(struct served *served, enum message_type type, uint32_t value, int64_t size, const void *bytes,
		   size_t length, int fd)
{
	struct message message = rn_message(type, value, size);

	if (rn_send(&served->source, &served->out, &message, bytes, length, fd))
		rn_log("out of memory: a peer's question stays without an answer");
}

/*
 * The device is asked without our lock, since it calls us with its own.  On the engine nobody
 * takes `served` away meanwhile.
 */

/* False: not to be served. */
static bool on_hello(struct served *served)
{
	struct identity other, own;
	enum refusal refusal = REFUSED_VERSION;
	int pid = 0, arena_fd;
	size_t arena_size;

	pthread_mutex_unlock(&rn_peers.lock);
	arena_fd = rn_arena_fd();
	arena_size = rn_arena_size();
	pthread_mutex_lock(&rn_peers.lock);
	if (rn_inbox.message.type == HELLO && rn_inbox.message.version == VERSION && rn_inbox.length == sizeof other) {
		memcpy(&other, rn_inbox.bytes, sizeof other);
		refusal = arena_fd < 0 ? REFUSED_CLOSED : rn_judge(served->source.fd, &other, &pid);
	}
	if (refusal) {
		rn_log("process %d is not let in: %s", pid, rn_refusal_names[refusal]);
		answer(served, REFUSED, refusal, 0, NULL, 0, -1);
		return false;
	}
	served->process = rn_process_of(pid, other.instance, served->source.fd);
	if (!served->process)
		return false;
	served->process->served_count++;
	served->pid = pid;
	rn_timer_cancel(&served->timer);
	own = *rn_self();
	own.arena_size = (int64_t)arena_size;
	rn_own_watch();
	answer(served, WELCOME, 0, sizeof own, &own, sizeof own, arena_fd);
	return true;
}

/* Remembered before the device is asked: so when it takes the thing back in between, which it
 * does before it closes the descriptor, we know. */
static void on_want_segment(struct served *served)
{
	uint32_t id = rn_inbox.message.value;
	size_t size = 0;
	int fd;

	if (!remember(&served->segments, &served->segment_count, id))
		goto none;
	pthread_mutex_unlock(&rn_peers.lock);
	fd = rn_segment_fd(id, &size);
	pthread_mutex_lock(&rn_peers.lock);
	if (fd >= 0 && remembers(served->segments, served->segment_count, id)) {
		answer(served, SEGMENT, id, (int64_t)size, NULL, 0, fd);
		rn_fd_close(fd);
		return;
	}
	rn_fd_close(fd);
	forget(served->segments, &served->segment_count, id);
none:
	answer(served, SEGMENT, id, 0, NULL, 0, -1);
}

static void on_want_channel(struct served *served)
{
	uint32_t id = rn_inbox.message.value;
	int fd;

	if (!remember(&served->channels, &served->channel_count, id))
		goto none;
	pthread_mutex_unlock(&rn_peers.lock);
	fd = rn_channel_fd(id);
	if (fd < 0)
		rn_channel_signal(id); /* out of descriptors: whoever asks has an event for it */
	pthread_mutex_lock(&rn_peers.lock);
	if (fd >= 0 && remembers(served->channels, served->channel_count, id)) {
		answer(served, CHANNEL, id, 1, NULL, 0, fd);
		rn_fd_close(fd);
		return;
	}
	rn_fd_close(fd);
	forget(served->channels, &served->channel_count, id);
none:
	answer(served, CHANNEL, id, 0, NULL, 0, -1);
}

static void on_request(struct served *served)
{
	static unsigned char room[RN_PEER_MESSAGE_MAX]; /* the engine's */
	int size;

	pthread_mutex_unlock(&rn_peers.lock);
	size = rn_serve_request(served->pid, rn_inbox.bytes, rn_inbox.length, room, sizeof room);
	pthread_mutex_lock(&rn_peers.lock);
	answer(served, ANSWER, rn_inbox.message.value, size, room, size > 0 ? (size_t)size : 0, -1);
}

static void served_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct served *served = RN_OWNER(source, struct served, source);
	bool serve = true;

	pthread_mutex_lock(&rn_peers.lock);
	if (epoll_events & EPOLLOUT)
		rn_outbox_flush(&served->source, &served->out);
	if (served->out.first && !(epoll_events & (EPOLLHUP | EPOLLERR)))
		goto out;
	switch (rn_receive(source->fd)) {
	case NOTHING:
		break;
	case ENDED:
		serve = false;
		break;
	case ARRIVED:
		if (!served->process) {
			serve = on_hello(served);
		} else if (rn_inbox.message.type == WANT_SEGMENT) {
			on_want_segment(served);
		} else if (rn_inbox.message.type == WANT_CHANNEL) {
			on_want_channel(served);
		} else if (rn_inbox.message.type == REQUEST) {
			on_request(served);
		}
		rn_inbox_discard();
		break;
	}
	if (!serve)
		rn_served_close(served);
out:
	pthread_mutex_unlock(&rn_peers.lock);
}

static void served_silent(struct rn_timer *timer)
{
	struct served *served = RN_OWNER(timer, struct served, timer);

	pthread_mutex_lock(&rn_peers.lock);
	if (!served->process) {
		rn_log("a socket on one of our ports said nothing for %llu ms: closed", (unsigned long long)rn_settings.silence_ms);
		rn_served_close(served);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_served_new(int fd)
{
	struct served *served;
	unsigned unnamed = 0;

	pthread_mutex_lock(&rn_peers.lock);
	for (served = rn_peers.served; served; served = served->next)
		unnamed += !served->process;
	served = unnamed < UNNAMED_MAX ? calloc(1, sizeof *served) : NULL;
	if (!served) {
		rn_fd_close(fd);
		goto out;
	}
	/* Who doesn't take its answers gets no more questions in: so little has to be kept. */
	served->out = (struct outbox){.end = &served->out.first, .waiting = EPOLLOUT};
	served->timer.fire = served_silent;
	served->source = (struct rn_source){.fd = fd, .ready = served_ready};
	served->link = &rn_peers.served;
	served->next = rn_peers.served;
	if (served->next)
		served->next->link = &served->next;
	rn_peers.served = served;
	rn_peers.served_count++;
	if (rn_source_add(&served->source, EPOLLIN))
		rn_served_close(served);
	else
		rn_timer_set_ms(&served->timer, rn_settings.silence_ms);
out:
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_segment_gone(uint32_t id)
{
	struct message gone = rn_message(GONE_SEGMENT, id, 0);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct served *served = rn_peers.served; served; served = served->next)
		if (forget(served->segments, &served->segment_count, id))
			rn_send(&served->source, &served->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_channel_gone(uint32_t id)
{
	struct message gone = rn_message(GONE_CHANNEL, id, 0);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct served *served = rn_peers.served; served; served = served->next)
		if (forget(served->channels, &served->channel_count, id))
			rn_send(&served->source, &served->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
}
