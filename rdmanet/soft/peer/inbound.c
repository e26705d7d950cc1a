/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inbound links: what other processes ask of us, and what we give them: arena, segments, channels.  Their sockets come
 * from port.c.
 *
 *     stranger -- HELLO --> challenged -- PROOF --> served
 *
 * A stranger has a socket, and a challenged process a memfd beside it.  A challenged process is one that we may trace,
 * and it only has to read one name.  So there are never more than CHALLENGED_MAX honest ones at a time; beyond that the
 * oldest is closed.  Unlike a silent one it need not leave at once to make a descriptor free for a newcomer,
 * because a connection may depend on this link.
 */
#include "peer/peers.h"
#include "shm/arena.h"
#include "shm/segment.h"

#include <stdlib.h>
#include <string.h>

enum { CHALLENGED_MAX = 16, STREAMED_MAX = 1 << 14 };

void rn_inbound_close(struct inbound *inbound)
{
	struct process *process = inbound->process;

	rn_source_remove(&inbound->source);
	rn_timer_cancel(&inbound->timer);
	rn_stranger_forget(&inbound->stranger);
	rn_proof_end(&inbound->proof);
	rn_fd_close(inbound->source.fd);
	if (inbound->has_mail)
		process->mail_in.offset = 0;
	rn_outbox_clear(&inbound->out);
	*inbound->link = inbound->next;
	if (inbound->next)
		inbound->next->link = inbound->link;
	rn_peers.inbound_count--;
	free(inbound->segments);
	free(inbound->channels);
	free(inbound->streamed);
	free(inbound);
	if (process) {
		process->inbound_count--;
		rn_mail_take_back(process); /* it may have given up our arena */
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

static void answer(struct inbound *inbound, enum rn_link_message_type type, uint32_t value, int64_t size,
		   const void *bytes, size_t length, int fd)
{
	struct rn_link_message message = rn_link_message(type, value, size);

	if (rn_send(&inbound->source, &inbound->out, &message, bytes, length, fd))
		rn_warn(RN_WARN_MAPPING, "out of memory: cannot answer another process's question");
}

/*
 * The device is asked without our lock, since it calls us with its own.  On the engine nobody
 * takes `inbound` away meanwhile.
 */

/* --- who is it? --------------------------------------------------------------------------------- */

/* Refuse to serve it. One that has hung up meanwhile, after a long wait, has not failed to prove anything. */
static bool refuse(struct inbound *inbound, enum rn_refusal refusal)
{
	if (rn_has_hung_up(inbound->source.fd))
		return false;
	rn_proof_failed(&inbound->proof, refusal);
	answer(inbound, RN_LINK_REFUSED, refusal, 0, NULL, 0, -1);
	return false;
}

static bool is_message(enum rn_link_message_type type, size_t length)
{
	return rn_inbox.message.type == type && rn_inbox.message.version == RN_WIRE_VERSION &&
	       rn_inbox.length == length;
}

static bool is_challenged(const struct inbound *inbound)
{
	return !inbound->process && inbound->proof.fd >= 0;
}

/* If there are too many, close the oldest of them. */
static void limit_challenged(const struct inbound *newcomer)
{
	struct inbound *eldest = NULL;
	unsigned count = 0;

	for (struct inbound *inbound = rn_peers.inbound; inbound; inbound = inbound->next) {
		if (!is_challenged(inbound))
			continue;
		count++;
		if (inbound != newcomer)
			eldest = inbound; /* the newest is first */
	}
	if (count > CHALLENGED_MAX && eldest) {
		rn_warn(RN_WARN_SILENCE, "closed the link of process %d, which did not show that it can see our descriptors",
			eldest->proof.pid);
		rn_inbound_close(eldest);
	}
}

/* False: don't serve it. */
static bool on_hello(struct inbound *inbound)
{
	struct identity self = {.instance = rn_instance()};
	bool all_by_stream = rn_settings.transport == RN_TRANSPORT_STREAM && rn_guarded(RN_GUARD_TCP_NO_ARENA);
	enum rn_refusal refusal = all_by_stream ? RN_REFUSED_TRANSPORT : 0;

	if (!refusal)
		refusal = rn_proof_begin(&inbound->proof, inbound->source.fd);
	if (!refusal && !is_message(RN_LINK_HELLO, 0))
		refusal = RN_REFUSED_VERSION;
	if (!refusal)
		refusal = rn_proof_read(&inbound->proof, rn_inbox.message.value);
	if (!refusal)
		refusal = rn_proof_offer(&inbound->proof);
	if (refusal)
		return refuse(inbound, refusal);
	limit_challenged(inbound);
	memcpy(self.nonce, inbound->proof.theirs, sizeof self.nonce);
	answer(inbound, RN_LINK_CHALLENGE, (uint32_t)inbound->proof.fd, 0, &self, sizeof self, -1);
	return true;
}

/* False: likewise. */
static bool on_proof(struct inbound *inbound)
{
	enum rn_refusal refusal = is_message(RN_LINK_PROOF, sizeof(struct identity)) ? 0 : RN_REFUSED_VERSION;
	struct identity self = {.instance = rn_instance()}, other;
	int pidfd = -1, arena_fd;

	memcpy(&other, rn_inbox.bytes, sizeof other);
	if (!refusal)
		refusal = rn_proof_check(&inbound->proof, &other);
	if (!refusal)
		refusal = rn_proof_check_secret(&inbound->proof, RN_LINK_SERVER, &other);
	if (!refusal)
		refusal = rn_proof_hold(&inbound->proof, inbound->source.fd, &pidfd);
	if (refusal)
		return refuse(inbound, refusal);

	pthread_mutex_unlock(&rn_peers.lock);
	arena_fd = rn_arena_fd();
	self.arena_size = (int64_t)rn_arena_size();
	self.witness = rn_witness();
	pthread_mutex_lock(&rn_peers.lock);
	if (arena_fd < 0) {
		rn_fd_close(pidfd);
		return refuse(inbound, RN_REFUSED_CLOSED);
	}
	inbound->process = rn_process_of(inbound->proof.pid, other.instance, pidfd);
	if (!inbound->process)
		return false;
	inbound->process->inbound_count++;
	rn_timer_cancel(&inbound->timer);
	rn_stranger_forget(&inbound->stranger);
	rn_proof_tell_secret(&inbound->proof, RN_LINK_SERVER, &self);
	rn_peer_ops->mapped();
	answer(inbound, RN_LINK_WELCOME, 0, 0, &self, sizeof self, arena_fd);
	if (inbound->process->inbound_count == 1)
		rn_process_notify(inbound->process, RN_LINK_MUTUAL);
	return true;
}

/* --- what it asks for --------------------------------------------------------------------------- */

/* Remembered before the device is asked: so when it takes the thing back in between, which it
 * does before it closes the descriptor, we know. */
static void on_want_segment(struct inbound *inbound)
{
	uint32_t id = rn_inbox.message.value;
	size_t size = 0;
	int fd;

	if (!remember(&inbound->segments, &inbound->segment_count, id))
		goto none;
	pthread_mutex_unlock(&rn_peers.lock);
	fd = rn_segment_fd(id, &size);
	pthread_mutex_lock(&rn_peers.lock);
	if (fd >= 0 && remembers(inbound->segments, inbound->segment_count, id)) {
		answer(inbound, RN_LINK_SEGMENT, id, (int64_t)size, NULL, 0, fd);
		rn_fd_close(fd);
		return;
	}
	rn_fd_close(fd);
	forget(inbound->segments, &inbound->segment_count, id);
none:
	answer(inbound, RN_LINK_SEGMENT, id, 0, NULL, 0, -1);
}

/* The process that asks has an event for it, which we raise if the descriptor can't be sent. */
static void on_want_channel(struct inbound *inbound)
{
	bool wants_event = rn_inbox.message.size;
	uint32_t id = rn_inbox.message.value;
	int fd = -1;

	if (!wants_event && !remember(&inbound->channels, &inbound->channel_count, id))
		wants_event = true;
	pthread_mutex_unlock(&rn_peers.lock);
	if (!wants_event)
		fd = rn_peer_ops->channel_fd(id);
	if (fd < 0)
		rn_peer_ops->channel_signal(id);
	pthread_mutex_lock(&rn_peers.lock);
	if (fd >= 0 && remembers(inbound->channels, inbound->channel_count, id)) {
		answer(inbound, RN_LINK_CHANNEL, id, 1, NULL, 0, fd);
		rn_fd_close(fd);
		return;
	}
	rn_fd_close(fd);
	if (!wants_event)
		forget(inbound->channels, &inbound->channel_count, id);
	answer(inbound, RN_LINK_CHANNEL, id, 0, NULL, 0, -1);
	rn_mail_hear(inbound->process, false); /* the channel may be gone that was to wake its reader */
}

static void on_request(struct inbound *inbound)
{
	static unsigned char room[RN_PEER_MESSAGE_MAX]; /* the engine's */
	int size;

	pthread_mutex_unlock(&rn_peers.lock);
	size = rn_peer_ops->serve(inbound->process->pid, rn_inbox.bytes, rn_inbox.length, room, sizeof room);
	pthread_mutex_lock(&rn_peers.lock);
	answer(inbound, RN_LINK_ANSWER, rn_inbox.message.value, size, room, size > 0 ? (size_t)size : 0, -1);
}

/* The last message about a queue pair counts: its number is reused, late. */
static void on_by_stream(struct inbound *inbound)
{
	struct streamed streamed = {rn_inbox.message.value, (uint32_t)rn_inbox.message.size}, *grown;

	for (unsigned i = 0; i < inbound->streamed_count; i++) {
		if (inbound->streamed[i].theirs == streamed.theirs) {
			inbound->streamed[i] = streamed;
			return;
		}
	}
	if (inbound->streamed_count == STREAMED_MAX)
		inbound->streamed_count--; /* more than a process has: it makes no sense */
	grown = realloc(inbound->streamed, (inbound->streamed_count + 1) * sizeof *grown);
	if (!grown)
		return; /* it will send this again */
	inbound->streamed = grown;
	grown[inbound->streamed_count++] = streamed;
}

static void on_connection(struct inbound *inbound)
{
	rn_mail_hear(inbound->process, true); /* which was written before */
	pthread_mutex_unlock(&rn_peers.lock);
	rn_peers_hear(inbound->process, rn_inbox.message.value, (uint64_t)rn_inbox.message.size, rn_inbox.bytes,
		      rn_inbox.length);
	pthread_mutex_lock(&rn_peers.lock);
}

/* Of a process's links the youngest says where its ring is: an older one may end, or be read, after that. */
static void on_mail(struct inbound *inbound)
{
	for (struct inbound *other = rn_peers.inbound; other != inbound; other = other->next)
		if (other->process == inbound->process && other->has_mail)
			return;
	for (struct inbound *other = inbound->next; other; other = other->next)
		if (other->process == inbound->process)
			other->has_mail = false;
	inbound->has_mail = true;
	rn_on_mail(inbound->process);
}

void rn_peer_answer_connection(const void *process, uint32_t what, uint64_t token, const void *bytes, size_t length)
{
	struct inbound *inbound;

	if (!process) {
		rn_peers_hear(NULL, what, token, bytes, length);
		return;
	}
	pthread_mutex_lock(&rn_peers.lock);
	inbound = rn_peers.inbound;
	while (inbound && inbound->process != process)
		inbound = inbound->next;
	if (inbound) {
		struct rn_link_message message = rn_link_message(RN_LINK_CONNECTION, what, (int64_t)token);

		rn_send(&inbound->source, &inbound->out, &message, bytes, length, -1);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_inbound_last_words(struct process *process)
{
	enum { MOST = 4096 };
	struct inbound *inbound = rn_peers.inbound;

	while (inbound && inbound->process != process)
		inbound = inbound->next;
	rn_mail_hear(process, true);
	for (int i = 0; inbound && i < MOST && rn_receive(inbound->source.fd, false) == ARRIVED; i++) {
		if (rn_inbox.message.type == RN_LINK_CONNECTION)
			on_connection(inbound);
		else if (rn_inbox.message.type == RN_LINK_MAIL)
			on_mail(inbound);
		rn_inbox_discard();
	}
}

static void inbound_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct inbound *inbound = RN_OWNER(source, struct inbound, source);
	bool serve = true, has_introduced_itself = false;

	pthread_mutex_lock(&rn_peers.lock);
	if (epoll_events & EPOLLOUT) {
		rn_outbox_flush(&inbound->source, &inbound->out);
		if (inbound->process)
			rn_mail_hear(inbound->process, false);
	}
	if (inbound->out.first && !(epoll_events & (EPOLLHUP | EPOLLERR)))
		goto out;
	switch (rn_receive(source->fd, false)) {
	case NOTHING:
		break;
	case ENDED:
		serve = false;
		if (inbound->process)
			rn_mail_hear(inbound->process, true);
		break;
	case ARRIVED:
		if (is_challenged(inbound)) {
			serve = on_proof(inbound);
		} else if (!inbound->process) {
			serve = has_introduced_itself = on_hello(inbound);
		} else if (rn_inbox.message.type == RN_LINK_WANT_SEGMENT) {
			on_want_segment(inbound);
		} else if (rn_inbox.message.type == RN_LINK_WANT_CHANNEL) {
			on_want_channel(inbound);
		} else if (rn_inbox.message.type == RN_LINK_REQUEST) {
			on_request(inbound);
		} else if (rn_inbox.message.type == RN_LINK_BY_STREAM) {
			on_by_stream(inbound);
		} else if (rn_inbox.message.type == RN_LINK_CONNECTION) {
			on_connection(inbound);
		} else if (rn_inbox.message.type == RN_LINK_MAIL) {
			on_mail(inbound);
		}
		rn_inbox_discard();
		break;
	}
	if (!serve)
		rn_inbound_close(inbound);
out:
	pthread_mutex_unlock(&rn_peers.lock);
	if (has_introduced_itself)
		rn_stranger_add(&inbound->stranger, RN_STRANGER_KNOWN); /* others may leave for it: without the lock */
}

static void inbound_silent(struct rn_timer *timer)
{
	struct inbound *inbound = RN_OWNER(timer, struct inbound, timer);

	pthread_mutex_lock(&rn_peers.lock);
	if (!inbound->process) {
		rn_warn(RN_WARN_SILENCE, "closed the link of a process that did not identify itself within %llu ms",
			(unsigned long long)rn_settings.silence_ms);
		rn_inbound_close(inbound);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

static void inbound_leave(struct rn_stranger *stranger)
{
	pthread_mutex_lock(&rn_peers.lock);
	rn_inbound_close(RN_OWNER(stranger, struct inbound, stranger));
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_inbound_new(int fd)
{
	struct inbound *inbound = calloc(1, sizeof *inbound);

	if (!inbound) {
		rn_fd_close(fd);
		return;
	}
	/* Read no more questions while a process does not take its answers, so that few are kept. */
	inbound->out = (struct outbox){.end = &inbound->out.first, .waiting = EPOLLOUT};
	inbound->timer.fire = inbound_silent;
	inbound->source = (struct rn_source){.fd = fd, .ready = inbound_ready};
	inbound->stranger = (struct rn_stranger){.from = rn_stranger_user(fd), .leave = inbound_leave};
	inbound->proof.fd = -1;
	pthread_mutex_lock(&rn_peers.lock);
	inbound->link = &rn_peers.inbound;
	inbound->next = rn_peers.inbound;
	if (inbound->next)
		inbound->next->link = &inbound->next;
	rn_peers.inbound = inbound;
	rn_peers.inbound_count++;
	if (rn_source_add(&inbound->source, EPOLLIN)) {
		rn_inbound_close(inbound);
		inbound = NULL;
	} else {
		rn_timer_set_ms(&inbound->timer, rn_settings.silence_ms);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	if (!inbound)
		return;
	rn_stranger_add(&inbound->stranger, RN_STRANGER_SILENT); /* others may leave for it: without the lock */
	inbound_ready(&inbound->source, 0);                       /* its HELLO is mostly there already */
}

bool rn_peer_said_stream(uint32_t its_qpn, uint32_t our_qpn)
{
	bool is_said = false;

	pthread_mutex_lock(&rn_peers.lock);
	for (struct inbound *inbound = rn_peers.inbound; inbound && !is_said; inbound = inbound->next)
		for (unsigned i = 0; i < inbound->streamed_count && !is_said; i++)
			is_said = inbound->streamed[i].theirs == its_qpn && inbound->streamed[i].ours == our_qpn;
	pthread_mutex_unlock(&rn_peers.lock);
	return is_said;
}

void rn_peers_tell_segment_gone(uint32_t id)
{
	struct rn_link_message gone = rn_link_message(RN_LINK_GONE_SEGMENT, id, 0);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct inbound *inbound = rn_peers.inbound; inbound; inbound = inbound->next)
		if (forget(inbound->segments, &inbound->segment_count, id))
			rn_send(&inbound->source, &inbound->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_channel_gone(uint32_t id)
{
	struct rn_link_message gone = rn_link_message(RN_LINK_GONE_CHANNEL, id, 0);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct inbound *inbound = rn_peers.inbound; inbound; inbound = inbound->next)
		if (forget(inbound->channels, &inbound->channel_count, id))
			rn_send(&inbound->source, &inbound->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&rn_peers.lock);
}
