/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The socket under a wire: connecting it, bytes out and in.
 */
#include "base/guard.h"
#include "cm/wire.h"

#include <netinet/tcp.h>

enum {
	BUFFERS_PER_CALL = 2,
};

static void lost_unlocked(struct rn_cm_wire *wire, int error)
{
	rn_cm_lock_to_tell();
	if (!wire->over)
		rn_cm_wire_lost(wire, error);
	rn_cm_unlock_and_tell();
}

static void listen_for(struct rn_cm_wire *wire, bool room)
{
	uint32_t events = EPOLLIN | (room ? EPOLLOUT : 0u);
	int rc;

	if (!wire->source.slot) {
		rc = rn_source_add(&wire->source, events);
		if (rc)
			lost_unlocked(wire, -rc);
	} else if (room != wire->wants_room) {
		rn_source_modify(&wire->source, events);
	}
	wire->wants_room = room;
}

/* The output; nothing when the wire is over. */
static bool take_output(struct rn_cm_wire *wire)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over) {
		memcpy(wire->sending, wire->out, wire->out_length);
		wire->sending_length = wire->out_length;
		wire->out_length = 0;
		wire->is_last = wire->hangs_up || wire->phase == RN_CM_WIRE_DREQ_SENT;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return wire->sending_length != 0;
}

/* Everything was sent, and no answer is due. What the program has said since take_output() has queued the task again. */
static bool hung_up(struct rn_cm_wire *wire)
{
	bool is_over;

	pthread_mutex_lock(&rn_cm_lock);
	is_over = wire->hangs_up && !wire->sending_length && !wire->out_length && !wire->over;
	if (is_over)
		rn_cm_wire_finish(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	if (is_over) {
		rn_source_remove(&wire->source); /* first: how the socket ends would wake the engine, for nothing */
		rn_cm_hang_up(wire->source.fd);
	}
	return is_over;
}

void rn_cm_wire_flush(struct rn_cm_wire *wire)
{
	ssize_t sent;

	if (wire->moved) {
		rn_cm_link_flush(wire);
		return;
	}
	if (wire->connecting || wire->source.fd < 0)
		return;
	while (wire->sending_length || take_output(wire)) {
		sent = send(wire->source.fd, wire->sending, wire->sending_length,
			    MSG_NOSIGNAL | MSG_DONTWAIT | (wire->is_last ? MSG_MORE : 0));
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && errno == EAGAIN)
			break;
		if (sent < 0) /* the peer is gone: what it sent before is still to be read */
			sent = wire->sending_length;
		wire->sending_length -= (unsigned)sent;
		memmove(wire->sending, wire->sending + sent, wire->sending_length);
	}
	if (hung_up(wire))
		return;
	if (wire->is_last && !wire->sending_length) {
		shutdown(wire->source.fd, SHUT_WR); /* which the last message has waited for */
		wire->is_last = false;
	}
	listen_for(wire, wire->sending_length != 0);
}

/* The end of the socket mostly comes with DREQ, and then no answer is due. But a side that has our token may take an end
 * without it for a move (handover.c). */
static bool expects_end(const struct rn_cm_wire *wire)
{
	return wire->phase == RN_CM_WIRE_CLOSING && wire->heard & 1u << RN_CM_DREQ && !wire->token;
}

/* Other sockets have their turn, however fast this peer sends: epoll reports again what is left. */
void rn_cm_wire_receive(struct rn_cm_wire *wire)
{
	bool more = true;

	for (int i = 0; more && (i < BUFFERS_PER_CALL || !rn_guarded(RN_GUARD_CM_FLOOD)); i++) {
		size_t room = sizeof wire->in - wire->in_length;
		ssize_t got = recv(wire->source.fd, wire->in + wire->in_length, room, MSG_DONTWAIT);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got <= 0 && rn_cm_handover_is_cause(wire))
			return;
		if (got <= 0) {
			wire->hung_up = !got || errno == ECONNRESET;
			lost_unlocked(wire, got ? errno : 0);
			return;
		}
		rn_cm_lock_to_tell();
		wire->in_length += (unsigned)got;
		rn_cm_wire_digest(wire);
		/* Else that was all; if not, epoll reports it. */
		more = !wire->over && ((size_t)got == room || expects_end(wire));
		rn_cm_unlock_and_tell();
	}
}

static enum rn_cm_wire_phase first_word(const struct rn_cm_wire *wire)
{
	return wire->request_type ? RN_CM_WIRE_HELLO_SENT : RN_CM_WIRE_REQ_SENT;
}

/* The TCP connection stands. */
static void connected(struct rn_cm_wire *wire)
{
	uint64_t silence = rn_settings.silence_ms, timeout = rn_settings.cm_timeout_ms;
	struct sockaddr_storage near = {0};
	socklen_t length = sizeof near;

	wire->connecting = false;
	if (!wire->is_ours)
		rn_cm_wire_set_timer_ms(wire, silence < timeout ? silence : timeout);
	if (wire->by_name) {
		pthread_mutex_lock(&rn_cm_lock);
		if (!wire->over)
			wire->phase = first_word(wire);
		pthread_mutex_unlock(&rn_cm_lock);
		return;
	}
	if (wire->bound)
		rn_cm_release_port(wire->source.fd);
	if (getsockname(wire->source.fd, (struct sockaddr *)&near, &length)) {
		lost_unlocked(wire, errno);
		return;
	}
	/* The kernel may choose the very port that nobody listens on: the socket meets itself. */
	if (rn_cm_port((struct sockaddr *)&near) == rn_cm_port((struct sockaddr *)&wire->dst) &&
	    !memcmp(&near, &wire->dst, near.ss_family == AF_INET ? offsetof(struct sockaddr_in, sin_zero) : length)) {
		lost_unlocked(wire, ECONNREFUSED);
		return;
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over) {
		memcpy(&wire->id->id.route.addr.src_addr, &near, length);
		wire->phase = first_word(wire);
	}
	pthread_mutex_unlock(&rn_cm_lock);
}

/*
 * Nobody listens there, or not yet.  Some programs tell each other their ports before they listen, which works with
 * adapters because a request takes its time there: perftest's do, with -R, and if their client is refused it uses an
 * identifier that it has just freed.  On a busy machine the server may have to wait for a CPU; so the attempts take
 * REFUSED_MS in all, with pauses of 1, 2, 4 ms and so on.
 */
enum { REFUSED_MS = 255, LONGEST_PAUSE_MS = 128 };

static bool try_again(struct rn_cm_wire *wire, uint64_t most_ms)
{
	uint64_t pause_ms = wire->paused_ms < LONGEST_PAUSE_MS ? wire->paused_ms + 1 : LONGEST_PAUSE_MS;

	rn_cm_first_forget(wire);
	if (wire->paused_ms + pause_ms > most_ms)
		return false;
	rn_source_remove(&wire->source);
	wire->again = true;
	wire->paused_ms += pause_ms;
	rn_cm_wire_set_timer_ms(wire, pause_ms);
	return true;
}

/* Too many wait to be accepted: by TCP a client would go on trying. Who takes TCP instead need not. */
static uint64_t no_room_ms(const struct rn_cm_wire *wire)
{
	return wire->by_name_alone ? REFUSED_MS : rn_settings.cm_timeout_ms;
}

/* There was no connection by name, for this reason: is the TCP port not to be tried? */
static bool stays_off_tcp(struct rn_cm_wire *wire, int error)
{
	if (!rn_guarded(RN_GUARD_TCP_PROGRAM) || (error == ECONNREFUSED && !wire->by_name_alone))
		return false;
	if (error == EAGAIN && try_again(wire, no_room_ms(wire)))
		return true;
	if (error == EAGAIN)
		rn_warn(RN_WARN_LANGUAGE, "no connection by name with port %u: too many wait to be accepted there",
			(unsigned)be16toh(rn_cm_port((const struct sockaddr *)&wire->dst)));
	lost_unlocked(wire, error == EAGAIN ? ETIMEDOUT : error);
	return true;
}

/* Unless an RDMA program of this host has the port, it gets no request. */
static bool is_other(struct rn_cm_wire *wire)
{
	enum rn_cm_language language = rn_cm_name_language((const struct sockaddr *)&wire->dst, &wire->cookie);

	wire->is_ours = language == RN_CM_OURS;
	if (language == RN_CM_OURS || language == RN_CM_UNKNOWN || !rn_guarded(RN_GUARD_TCP_PROGRAM))
		return false;
	if (try_again(wire, REFUSED_MS))
		return true;
	if (language == RN_CM_UNTOLD)
		rn_warn(RN_WARN_LANGUAGE, "no connection with port %u of this host: neither netlink nor /proc tells whether "
			"an RDMA program listens there", (unsigned)be16toh(rn_cm_port((void *)&wire->dst)));
	if (language != RN_CM_OTHER) {
		lost_unlocked(wire, language == RN_CM_NOBODY ? ECONNREFUSED : ENOTSUP);
		return true;
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over)
		rn_cm_wire_not_ours(wire, "a TCP program listens there, not an RDMA program");
	pthread_mutex_unlock(&rn_cm_lock);
	return true;
}

/* Does the connection stand already? On one host it mostly does: connect() says EINPROGRESS before it takes the answer
 * that lies there. What is sent now is there when the listener accepts. */
static bool stands(int fd)
{
	struct sockaddr_storage far;
	socklen_t length = sizeof far;

	return !getpeername(fd, (struct sockaddr *)&far, &length);
}

static void connect_by_tcp(struct rn_cm_wire *wire)
{
	const struct sockaddr *dst = (const struct sockaddr *)&wire->dst;
	static const int on = 1;
	int fd = wire->source.fd, tos = wire->tos, rc, error;

	if (fd < 0)
		fd = rn_fd_own(socket(dst->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (fd < 0) {
		lost_unlocked(wire, errno);
		return;
	}
	wire->source.fd = fd;
	if (wire->listens_early)
		rn_cm_unlisten(fd);
	wire->listens_early = false;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (wire->tos_set && dst->sa_family == AF_INET)
		setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
	rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
	rc = connect(fd, dst, rn_cm_address_length(dst));
	if (rc && errno == ECONNABORTED && wire->paused_ms) /* still the end of the attempt before */
		rc = connect(fd, dst, rn_cm_address_length(dst));
	error = rc ? errno : 0;
	if (!error || (error == EINPROGRESS && stands(fd)))
		connected(wire);
	else if (error == EINPROGRESS)
		listen_for(wire, true);
	else if (error != ECONNREFUSED || !try_again(wire, REFUSED_MS))
		lost_unlocked(wire, error);
}

/* Who listens on this host takes long to find out: that is for the engine itself. */
void rn_cm_wire_connect_socket(struct rn_cm_wire *wire)
{
	const struct sockaddr *dst = (const struct sockaddr *)&wire->dst;
	int fd;

	rn_cm_first_leave(wire);
	if (rn_cm_ask(wire) || rn_cm_first_is_awaited(wire))
		return;
	if (!wire->by_name_alone && rn_cm_known_is_there(dst, &wire->cookie)) {
		wire->is_ours = true;
		connect_by_tcp(wire);
		return;
	}
	if (rn_engine_stands_in()) {
		rn_task_post(&wire->task);
		return;
	}
	fd = rn_cm_name_connect(dst);
	if (fd >= 0) {
		rn_fd_close(wire->source.fd);
		wire->source.fd = fd;
		wire->cookie = 0; /* it was the TCP listener's, which may be another program's */
		wire->by_name = wire->is_ours = true;
		rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
		connected(wire);
	} else if (!stays_off_tcp(wire, errno) && !is_other(wire)) {
		connect_by_tcp(wire);
	}
}

void rn_cm_wire_connected(struct rn_cm_wire *wire)
{
	int error = 0;
	socklen_t length = sizeof error;

	if (getsockopt(wire->source.fd, SOL_SOCKET, SO_ERROR, &error, &length))
		error = errno;
	if (!error)
		connected(wire);
	else if (error != ECONNREFUSED || !try_again(wire, REFUSED_MS))
		lost_unlocked(wire, error);
}
