/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Links: what we ask of another process, and what it gives.  Its segments and channels: segments.c, channels.c.
 * That the process has died is noticed in peer.c, or here when the link ends (`link_ready`).
 */
#include "base/rights.h"
#include "peer/peers.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* --- the link ----------------------------------------------------------------------------------- */

static void link_ready(struct rn_source *source, uint32_t epoll_events);
static void link_timer(struct rn_timer *timer);

/* There will be no mapping: tell its subscribers. The peer may be freed afterwards. */
static void give_up(struct peer *peer)
{
	peer->refs++;
	rn_peer_unlist(peer);
	rn_timer_cancel(&peer->idle);
	atomic_store(&peer->rn.state, RN_PEER_DEAD);
	rn_peer_notify(peer, RN_LINK_FAILED);
	rn_peer_put_locked(peer);
}

/* The link of a peer that is not READY has failed. */
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
	struct rn_link_message hello;
	enum rn_refusal refusal;
	int rc;

	if (connect(link->source.fd, (struct sockaddr *)&address, length))
		return -errno;
	/* A process of another user may have the name: it learns nothing. */
	refusal = rn_proof_begin(&link->proof, link->source.fd);
	if (!refusal)
		refusal = rn_proof_offer(&link->proof);
	if (refusal) {
		if (refusal != RN_REFUSED_USER && refusal != RN_REFUSED_AGAIN) /* expected, or already logged */
			rn_proof_failed(&link->proof, refusal);
		return -EACCES;
	}
	hello = rn_link_message(RN_LINK_HELLO, (uint32_t)link->proof.fd, 0);
	rc = rn_send(&link->source, &link->out, &hello, NULL, 0, -1);
	return rc ? rc : rn_source_add(&link->source, EPOLLIN);
}

/* The first attempt is made at once by the calling thread: a Unix socket connects without waiting. */
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
	peer->rn.witness = process->witness;
	atomic_store(&peer->rn.state, RN_PEER_READY);
	rn_peer_notify(peer, RN_LINK_READY);
}

/* Read the server's next message, if it is of this type: 0, or why not. */
static enum rn_refusal read_identity(const struct link *link, enum rn_link_message_type type, struct identity *other)
{
	if (rn_inbox.message.type == RN_LINK_REFUSED && rn_inbox.message.value &&
	    rn_inbox.message.value < RN_REFUSALS) {
		rn_log("port %u refused our link: %s", link->peer->rn.port, rn_refusal_names[rn_inbox.message.value]);
		return rn_inbox.message.value;
	}
	if (rn_inbox.message.type != type || rn_inbox.message.version != RN_WIRE_VERSION ||
	    rn_inbox.length != sizeof *other)
		return RN_REFUSED_VERSION;
	memcpy(other, rn_inbox.bytes, sizeof *other);
	return 0;
}

static void on_challenge(struct link *link)
{
	struct rn_link_message message = rn_link_message(RN_LINK_PROOF, 0, 0);
	struct identity self = {.instance = rn_instance()}, other;
	enum rn_refusal refusal = read_identity(link, RN_LINK_CHALLENGE, &other);

	if (!refusal)
		refusal = rn_proof_check(&link->proof, &other);
	if (!refusal)
		refusal = rn_proof_read(&link->proof, rn_inbox.message.value);
	if (refusal) {
		if (refusal != RN_REFUSED_NO_TRACE || rn_inbox.message.type == RN_LINK_REFUSED ||
		    !rn_has_hung_up(link->source.fd))
			rn_proof_failed(&link->proof, refusal);
		link_failed(link); /* we may not see it, or it is gone */
		return;
	}
	link->is_challenged = true;
	rn_rights_accept(link->source.fd, true); /* the arena comes in answer to the proof */
	memcpy(self.nonce, link->proof.theirs, sizeof self.nonce);
	rn_proof_tell_secret(&link->proof, RN_LINK_CLIENT, &self);
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
		rn_link_close(link); /* we have a link by another of its ports */
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
	enum rn_refusal refusal = read_identity(link, RN_LINK_WELCOME, &other);
	int pidfd;

	if (!refusal)
		refusal = rn_proof_check_secret(&link->proof, RN_LINK_CLIENT, &other);
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
		process->witness = other.witness;
	}
	peer_attach(peer, process);
	link_stands(link, process);
	peer->is_unmapped = !process->arena;
	if (peer->is_unmapped)
		give_up(peer); /* but rn_peer_tell_stream may still be used */
	else
		peer_is_ready(peer, process);
	rn_mail_hear(process, false); /* what it has said before its arena was here */
}

/* --- what comes over it ------------------------------------------------------------------------- */

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

static void on_connection(struct process *process)
{
	rn_mail_hear(process, false); /* which was written before */
	pthread_mutex_unlock(&rn_peers.lock);
	rn_peers_hear(process, rn_inbox.message.value, (uint64_t)rn_inbox.message.size, rn_inbox.bytes, rn_inbox.length);
	pthread_mutex_lock(&rn_peers.lock);
}

static void link_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct link *link = RN_OWNER(source, struct link, source);
	struct process *process;

	pthread_mutex_lock(&rn_peers.lock);
	if (epoll_events & EPOLLOUT)
		rn_outbox_flush(&link->source, &link->out);
	/* One message per turn: its callbacks may end the link. */
	switch (rn_receive(source->fd, link->is_challenged)) {
	case NOTHING:
		break;
	case ENDED:
		process = link->process;
		if (process) {
			rn_inbound_last_words(process);
			rn_process_died(process);
		} else {
			link_failed(link);
		}
		break;
	case ARRIVED:
		process = link->process;
		if (!process && !link->is_challenged)
			on_challenge(link);
		else if (!process)
			on_welcome(link);
		else if (rn_inbox.message.type == RN_LINK_SEGMENT)
			rn_on_segment(process);
		else if (rn_inbox.message.type == RN_LINK_CHANNEL)
			rn_on_channel(process);
		else if (rn_inbox.message.type == RN_LINK_ANSWER)
			on_answer(process);
		else if (rn_inbox.message.type == RN_LINK_CONNECTION)
			on_connection(process);
		else if (rn_inbox.message.type == RN_LINK_GONE_SEGMENT)
			rn_on_gone_segment(process);
		else if (rn_inbox.message.type == RN_LINK_GONE_CHANNEL)
			rn_on_gone_channel(process);
		rn_inbox_discard();
		break;
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

/* --- what the device asks for: any thread ------------------------------------------------------- */

int rn_peer_request(struct rn_peer *rn_peer, const void *bytes, size_t length, struct rn_reply *reply)
{
	struct process *process;
	struct rn_link_message request;
	int rc = -ENOTCONN;

	if (length > RN_PEER_MESSAGE_MAX)
		return -EMSGSIZE;
	pthread_mutex_lock(&rn_peers.lock);
	if (atomic_load(&rn_peer->state) == RN_PEER_READY) {
		process = PEER(rn_peer)->process;
		request = rn_link_message(RN_LINK_REQUEST, ++process->serial, (int64_t)length);
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

uint64_t rn_peer_believed_at(struct rn_peer *peer)
{
	const struct process *process = rn_peer_process(peer);

	return process ? process->believed_ns : 0;
}

void rn_peer_believe(struct rn_peer *peer, uint64_t now_ns)
{
	if (atomic_load(&peer->state) != RN_PEER_SELF && PEER(peer)->process)
		PEER(peer)->process->believed_ns = now_ns;
}

bool rn_peer_lives(struct rn_peer *peer)
{
	struct pollfd ended = {.fd = -1, .events = POLLIN};
	const struct process *process;
	bool lives;

	if (atomic_load(&peer->state) == RN_PEER_SELF)
		return true;
	pthread_mutex_lock(&rn_peers.lock);
	process = PEER(peer)->process;
	if (process && !process->dead)
		ended.fd = process->pidfd.fd;
	lives = ended.fd >= 0 && !poll(&ended, 1, 0);
	pthread_mutex_unlock(&rn_peers.lock);
	return lives;
}

bool rn_peer_takes_more(struct rn_peer *peer)
{
	struct link *link;
	bool takes;

	if (atomic_load(&peer->state) == RN_PEER_SELF)
		return true;
	pthread_mutex_lock(&rn_peers.lock);
	link = link_of(peer);
	takes = link && !link->out.first;
	pthread_mutex_unlock(&rn_peers.lock);
	return takes;
}

bool rn_peer_tell_connection(struct rn_peer *peer, uint32_t what, uint64_t token, const void *bytes, size_t length)
{
	struct rn_link_message message = rn_link_message(RN_LINK_CONNECTION, what, (int64_t)token);
	struct link *link;
	int rc = -ENOTCONN;

	if (atomic_load(&peer->state) == RN_PEER_SELF) {
		rn_peers_hear(NULL, what, token, bytes, length);
		return true;
	}
	pthread_mutex_lock(&rn_peers.lock);
	link = link_of(peer);
	if (link)
		rc = rn_send(&link->source, &link->out, &message, bytes, length, -1);
	pthread_mutex_unlock(&rn_peers.lock);
	return !rc;
}

void rn_peer_tell_stream(struct rn_peer *peer, uint32_t ours, uint32_t theirs, bool anew)
{
	struct rn_link_message message = rn_link_message(RN_LINK_BY_STREAM, ours, theirs);
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
	rn_segments_release(process);
	rn_channels_release(process);
}

void rn_link_close(struct link *link)
{
	if (link->process)
		rn_mail_close(link->process);
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
