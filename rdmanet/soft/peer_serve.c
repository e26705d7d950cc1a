/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serving: what other processes ask of us.  Their sockets come from peer_port.c.
 *
 *     stranger -- HELLO --> challenged -- PROOF --> served
 *
 * A stranger has a socket, and who is challenged a memfd beside it.  The latter is a process that we may trace, and
 * that has to read one name: more than CHALLENGED_MAX of them at a time are none of ours, and the eldest leaves.  For
 * newcomers without a descriptor it need not leave at once, as who says nothing: a connection may stand on this link.
 */
#define _GNU_SOURCE
#include "own.h"
#include "peers.h"

#include <stdlib.h>
#include <string.h>

enum { CHALLENGED_MAX = 16, STREAMED_MAX = 1 << 14 };

void rn_served_close(struct served *served)
{
	struct process *process = served->process;

	rn_source_remove(&served->source);
	rn_timer_cancel(&served->timer);
	rn_stranger_forget(&served->stranger);
	rn_proof_end(&served->proof);
	rn_fd_close(served->source.fd);
	rn_outbox_clear(&served->out);
	*served->link = served->next;
	if (served->next)
		served->next->link = served->link;
	rn_peers.served_count--;
	free(served->segments);
	free(served->channels);
	free(served->streamed);
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
		rn_warn(RN_WARN_MAPPING, "out of memory: a question of another process stays without an answer");
}

/*
 * The device is asked without our lock, since it calls us with its own.  On the engine nobody
 * takes `served` away meanwhile.
 */

/* --- who is it? --------------------------------------------------------------------------------- */

/* Not to be served. Who has hung up meanwhile, as one does who has waited for long, has nothing left to show. */
static bool refuse(struct served *served, enum refusal refusal)
{
	if (rn_has_hung_up(served->source.fd))
		return false;
	rn_proof_failed(&served->proof, refusal);
	answer(served, REFUSED, refusal, 0, NULL, 0, -1);
	return false;
}

static bool is_message(enum message_type type, size_t length)
{
	return rn_inbox.message.type == type && rn_inbox.message.version == VERSION && rn_inbox.length == length;
}

static bool is_challenged(const struct served *served)
{
	return !served->process && served->proof.fd >= 0;
}

/* One too many: the eldest of them leaves. */
static void limit_challenged(const struct served *newcomer)
{
	struct served *eldest = NULL;
	unsigned count = 0;

	for (struct served *served = rn_peers.served; served; served = served->next) {
		if (!is_challenged(served))
			continue;
		count++;
		if (served != newcomer)
			eldest = served; /* the newest is first */
	}
	if (count > CHALLENGED_MAX && eldest) {
		rn_warn(RN_WARN_SILENCE, "process %d doesn't show that it can see our descriptors: closed",
			eldest->proof.pid);
		rn_served_close(eldest);
	}
}

/* False: not to be served. */
static bool on_hello(struct served *served)
{
	struct identity self = {.instance = rn_instance()};
	bool all_by_stream = rn_settings.transport == RN_TRANSPORT_STREAM && rn_guarded(RN_GUARD_TCP_NO_ARENA);
	enum refusal refusal = all_by_stream ? REFUSED_TRANSPORT : 0;

	if (!refusal)
		refusal = rn_proof_begin(&served->proof, served->source.fd);
	if (!refusal && !is_message(HELLO, 0))
		refusal = REFUSED_VERSION;
	if (!refusal)
		refusal = rn_proof_read(&served->proof, rn_inbox.message.value);
	if (!refusal)
		refusal = rn_proof_offer(&served->proof);
	if (refusal)
		return refuse(served, refusal);
	limit_challenged(served);
	memcpy(self.nonce, served->proof.theirs, sizeof self.nonce);
	answer(served, CHALLENGE, (uint32_t)served->proof.fd, 0, &self, sizeof self, -1);
	return true;
}

/* False: likewise. */
static bool on_proof(struct served *served)
{
	enum refusal refusal = is_message(PROOF, sizeof(struct identity)) ? 0 : REFUSED_VERSION;
	struct identity self = {.instance = rn_instance()}, other;
	int pidfd = -1, arena_fd;

	memcpy(&other, rn_inbox.bytes, sizeof other);
	if (!refusal)
		refusal = rn_proof_check(&served->proof, &other);
	if (!refusal)
		refusal = rn_proof_check_secret(&served->proof, LINK_SERVER, &other);
	if (!refusal)
		refusal = rn_proof_hold(&served->proof, served->source.fd, &pidfd);
	if (refusal)
		return refuse(served, refusal);

	pthread_mutex_unlock(&rn_peers.lock);
	arena_fd = rn_arena_fd();
	self.arena_size = (int64_t)rn_arena_size();
	pthread_mutex_lock(&rn_peers.lock);
	if (arena_fd < 0) {
		rn_fd_close(pidfd);
		return refuse(served, REFUSED_CLOSED);
	}
	served->process = rn_process_of(served->proof.pid, other.instance, pidfd);
	if (!served->process)
		return false;
	served->process->served_count++;
	rn_timer_cancel(&served->timer);
	rn_stranger_forget(&served->stranger);
	rn_proof_tell_secret(&served->proof, LINK_SERVER, &self);
	rn_own_watch();
	answer(served, WELCOME, 0, 0, &self, sizeof self, arena_fd);
	return true;
}

/* --- what it asks for --------------------------------------------------------------------------- */

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

/* Whoever asks has an event for it, which is ours to make when the descriptor doesn't go. */
static void on_want_channel(struct served *served)
{
	bool wants_event = rn_inbox.message.size;
	uint32_t id = rn_inbox.message.value;
	int fd = -1;

	if (!wants_event && !remember(&served->channels, &served->channel_count, id))
		wants_event = true;
	pthread_mutex_unlock(&rn_peers.lock);
	if (!wants_event)
		fd = rn_channel_fd(id);
	if (fd < 0)
		rn_channel_signal(id);
	pthread_mutex_lock(&rn_peers.lock);
	if (fd >= 0 && remembers(served->channels, served->channel_count, id)) {
		answer(served, CHANNEL, id, 1, NULL, 0, fd);
		rn_fd_close(fd);
		return;
	}
	rn_fd_close(fd);
	if (!wants_event)
		forget(served->channels, &served->channel_count, id);
	answer(served, CHANNEL, id, 0, NULL, 0, -1);
}

static void on_request(struct served *served)
{
	static unsigned char room[RN_PEER_MESSAGE_MAX]; /* the engine's */
	int size;

	pthread_mutex_unlock(&rn_peers.lock);
	size = rn_serve_request(served->process->pid, rn_inbox.bytes, rn_inbox.length, room, sizeof room);
	pthread_mutex_lock(&rn_peers.lock);
	answer(served, ANSWER, rn_inbox.message.value, size, room, size > 0 ? (size_t)size : 0, -1);
}

/* Of a queue pair the last word counts: its number comes back, late. */
static void on_by_stream(struct served *served)
{
	struct streamed streamed = {rn_inbox.message.value, (uint32_t)rn_inbox.message.size}, *grown;

	for (unsigned i = 0; i < served->streamed_count; i++) {
		if (served->streamed[i].theirs == streamed.theirs) {
			served->streamed[i] = streamed;
			return;
		}
	}
	if (served->streamed_count == STREAMED_MAX)
		served->streamed_count--; /* more than a process has: it makes no sense */
	grown = realloc(served->streamed, (served->streamed_count + 1) * sizeof *grown);
	if (!grown)
		return; /* it says so again */
	served->streamed = grown;
	grown[served->streamed_count++] = streamed;
}

static void on_connection(struct served *served)
{
	pthread_mutex_unlock(&rn_peers.lock);
	rn_connection_word(served->process, rn_inbox.message.value, (uint64_t)rn_inbox.message.size);
	pthread_mutex_lock(&rn_peers.lock);
}

static void served_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct served *served = RN_OWNER(source, struct served, source);
	bool serve = true, has_introduced_itself = false;

	pthread_mutex_lock(&rn_peers.lock);
	if (epoll_events & EPOLLOUT)
		rn_outbox_flush(&served->source, &served->out);
	if (served->out.first && !(epoll_events & (EPOLLHUP | EPOLLERR)))
		goto out;
	switch (rn_receive(source->fd, false)) {
	case NOTHING:
		break;
	case ENDED:
		serve = false;
		break;
	case ARRIVED:
		if (is_challenged(served)) {
			serve = on_proof(served);
		} else if (!served->process) {
			serve = has_introduced_itself = on_hello(served);
		} else if (rn_inbox.message.type == WANT_SEGMENT) {
			on_want_segment(served);
		} else if (rn_inbox.message.type == WANT_CHANNEL) {
			on_want_channel(served);
		} else if (rn_inbox.message.type == REQUEST) {
			on_request(served);
		} else if (rn_inbox.message.type == BY_STREAM) {
			on_by_stream(served);
		} else if (rn_inbox.message.type == CONNECTION) {
			on_connection(served);
		}
		rn_inbox_discard();
		break;
	}
	if (!serve)
		rn_served_close(served);
out:
	pthread_mutex_unlock(&rn_peers.lock);
	if (has_introduced_itself)
		rn_stranger_add(&served->stranger, RN_STRANGER_KNOWN); /* others may leave for it: without the lock */
}

static void served_silent(struct rn_timer *timer)
{
	struct served *served = RN_OWNER(timer, struct served, timer);

	pthread_mutex_lock(&rn_peers.lock);
	if (!served->process) {
		rn_warn(RN_WARN_SILENCE, "a process didn't say for %llu ms who it is: its link is closed",
			(unsigned long long)rn_settings.silence_ms);
		rn_served_close(served);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

static void served_leave(struct rn_stranger *stranger)
{
	pthread_mutex_lock(&rn_peers.lock);
	rn_served_close(RN_OWNER(stranger, struct served, stranger));
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_served_new(int fd)
{
	struct served *served = calloc(1, sizeof *served);

	if (!served) {
		rn_fd_close(fd);
		return;
	}
	/* Who doesn't take its answers gets no more questions in: so little has to be kept. */
	served->out = (struct outbox){.end = &served->out.first, .waiting = EPOLLOUT};
	served->timer.fire = served_silent;
	served->source = (struct rn_source){.fd = fd, .ready = served_ready};
	served->stranger = (struct rn_stranger){.from = rn_stranger_user(fd), .leave = served_leave};
	served->proof.fd = -1;
	pthread_mutex_lock(&rn_peers.lock);
	served->link = &rn_peers.served;
	served->next = rn_peers.served;
	if (served->next)
		served->next->link = &served->next;
	rn_peers.served = served;
	rn_peers.served_count++;
	if (rn_source_add(&served->source, EPOLLIN)) {
		rn_served_close(served);
		served = NULL;
	} else {
		rn_timer_set_ms(&served->timer, rn_settings.silence_ms);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	if (!served)
		return;
	rn_stranger_add(&served->stranger, RN_STRANGER_SILENT); /* others may leave for it: without the lock */
	served_ready(&served->source, 0);                       /* its HELLO is mostly there already */
}

bool rn_peer_said_stream(uint32_t its_qpn, uint32_t our_qpn)
{
	bool is_said = false;

	pthread_mutex_lock(&rn_peers.lock);
	for (struct served *served = rn_peers.served; served && !is_said; served = served->next)
		for (unsigned i = 0; i < served->streamed_count && !is_said; i++)
			is_said = served->streamed[i].theirs == its_qpn && served->streamed[i].ours == our_qpn;
	pthread_mutex_unlock(&rn_peers.lock);
	return is_said;
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
