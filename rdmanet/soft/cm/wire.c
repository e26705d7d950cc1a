/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wires: the socket under a connection, by TCP or, on one host, a Unix socket.
 *
 * The messages are InfiniBand's: REQ, REP, RTU; MRA if REP takes long; REJ with a reason; DREQ, DREP; for
 * datagrams SIDR_REQ and, with the queue pair's number or a refusal, SIDR_REP, which ends the wire.  Each has a header
 * with magic, version, type and length, and one fixed length; anything else, or a message out of turn or a second
 * time, ends the connection, and one line in the log says why.  An accepted socket that sends nothing for five seconds
 * is closed; while it is the peer's turn, the wire is a stranger (base/stranger.h).
 *
 *      active                                        passive
 *      CONNECTING --> REQ_SENT --> REP_RECEIVED       ACCEPTED --> REQ_RECEIVED --> REP_SENT
 *                                       |                                             |
 *                                       +-----------> ESTABLISHED <-------------------+
 *                                                     |        |
 *                                          DREQ sent  |        |  DREQ received, DREP sent
 *                                                DREQ_SENT   CLOSING
 *                                                     |        |
 *                                          DREP, close             close
 *
 * DREQ is the last that its side says, so its half of the socket ends in the same segment, and the other side closes: the
 * end of the socket is answer enough.  DREP is sent if that end has not come yet.  Who disconnects waits for neither, once
 * its identifier is destroyed.
 *
 * Our first message is a request, so a TCP program gets one where we can't tell what listens: on other hosts.  We
 * recognise a TCP program by its answer, or by its silence.  A connection manager says MRA within a second if its
 * program takes longer to answer; a listener that has sent nothing for five seconds (RDMANET_SOFT_SILENCE) is not one,
 * and the attempt ends.
 *
 * With a secret HELLO_SENT comes before REQ_SENT, and CHALLENGED and PROVEN before REQ_RECEIVED: secret.c.  A side that
 * rejects closes as soon as that is sent, without waiting for the peer.
 *
 * What the end of a wire means depends only on its phase: see lost().  The end is
 * EOF, an error, a message that makes no sense, or the death of the peer's process as its pidfd
 * shows it (a child forked by the dead may hold the socket open).
 *
 * A wire outlives its identifier if the peer must still be told something; then it has five
 * seconds.  Only the engine frees it.
 *
 * rn_cm_lock guards what the program's threads see of a wire: its identifier, phase and output.
 * The socket, the input and the timers are the engine's.  So the lock isn't held over a system
 * call: the program's thread, which may run an event loop, would wait for it.  Between processes that map each other a
 * wire needs its socket only until the connection is established, or not at all.
 *
 * From the top:
 *
 *     start.c     how all of this begins, and ends
 *     listen.c    where wires of the passive side come from; asked.c: those without a socket
 *     callbacks.c what the engine calls
 *     socket.c    bytes out and in
 *     handover.c  how wires get by without their socket; link.c: what they say then
 *     hear.c      what is received, and in which phase
 *     message.c   what is sent
 *     secret.c    what is proven before that; ask.c: how a wire begins without a socket;
 *                 first.c: how it waits until it can
 *     listeners.c who listens, and whom they have been asked for
 *     wire.c      a wire, and what its end means
 */
#include "base/extras.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { BUCKETS = 1024, HANG_UP_BUFFERS = 64 };

struct rn_list rn_cm_wires = {&rn_cm_wires, &rn_cm_wires};
static struct rn_cm_wire *named[BUCKETS]; /* by their tokens, under rn_cm_lock */
static _Atomic unsigned long dropped;

enum rn_cm_wire_phase rn_cm_wire_phase(const struct rn_cm_wire *wire)
{
	return wire->phase;
}

unsigned long rn_cm_wire_dropped(void)
{
	return dropped;
}

/* --- life --------------------------------------------------------------------------------------- */

static const struct rn_cm_wire_calls *calls;

void rn_cm_wire_register(const struct rn_cm_wire_calls *its)
{
	calls = its;
}

void rn_cm_wire_forked(void)
{
	rn_list_init(&rn_cm_wires);
	memset(named, 0, sizeof named);
}

void rn_cm_wire_set_timer_ms(struct rn_cm_wire *wire, uint64_t ms)
{
	rn_timer_set(&wire->timer, ms * 1000000u);
}

struct rn_cm_wire *rn_cm_wire_new(enum rn_cm_wire_phase phase)
{
	struct rn_cm_wire *wire = calloc(1, sizeof *wire);

	if (!wire)
		return NULL;
	wire->phase = phase;
	wire->connecting = phase == RN_CM_WIRE_CONNECTING;
	wire->source = (struct rn_source){.fd = -1, .ready = calls->ready};
	wire->timer.fire = calls->fire;
	wire->task.run = calls->run;
	wire->death.dead = calls->dead;
	wire->death.linked = calls->linked;
	wire->stranger.leave = calls->leave;
	rn_list_init(&wire->awaiting);
	rn_list_add(&rn_cm_wires, &wire->link);
	return wire;
}

void rn_cm_wire_close_socket(struct rn_cm_wire *wire)
{
	rn_source_remove(&wire->source);
	rn_fd_close(wire->source.fd);
	wire->source.fd = -1;
}

void rn_cm_wire_finish(struct rn_cm_wire *wire)
{
	wire->over = true;
	if (!wire->id)
		return;
	if (rn_settings.timewait_ms && wire->told && wire->phase != RN_CM_WIRE_TIMEWAIT) {
		wire->phase = RN_CM_WIRE_TIMEWAIT;
		return;
	}
	wire->id->wire = NULL;
	wire->id = NULL;
}

/* --- its name between two processes: link.c --------------------------------------------------------- */

void rn_cm_wire_name(struct rn_cm_wire *wire, uint64_t token)
{
	struct rn_cm_wire **at = &named[token % BUCKETS];

	wire->token = token;
	wire->next_named = *at;
	*at = wire;
}

void rn_cm_wire_unname(struct rn_cm_wire *wire)
{
	struct rn_cm_wire **at = &named[wire->token % BUCKETS];

	if (!wire->token)
		return;
	while (*at != wire)
		at = &(*at)->next_named;
	*at = wire->next_named;
	wire->token = 0;
}

struct rn_cm_wire *rn_cm_wire_find(const void *process, enum rn_cm_link_side side, uint64_t token)
{
	struct rn_cm_wire *wire = token ? named[token % BUCKETS] : NULL;

	while (wire && (wire->token != token || wire->side != side || !wire->watched ||
			rn_peer_process(wire->death.peer) != process))
		wire = wire->next_named;
	return wire;
}

/* --- its output: message.c -------------------------------------------------------------------------- */

void rn_cm_put_header(enum rn_cm_message type, void *message)
{
	struct rn_cm_header *header = message;

	*header = (struct rn_cm_header){htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, (uint8_t)type,
					htobe16(rn_cm_message_length[type])};
}

void rn_cm_wire_append(struct rn_cm_wire *wire, enum rn_cm_message type, void *message)
{
	unsigned length = rn_cm_message_length[type];

	if (wire->out_length + length > sizeof wire->out)
		return; /* the peer has not read for a whole conversation */
	rn_cm_put_header(type, message);
	memcpy(wire->out + wire->out_length, message, length);
	wire->out_length += length;
}

void rn_cm_wire_say(struct rn_cm_wire *wire, enum rn_cm_message type)
{
	struct rn_cm_header header;

	rn_cm_wire_append(wire, type, &header);
}

/* A socket that is closed with unread input discards its last output. So input is read first, but not for ever: a peer
 * that goes on sending loses the answer. */
void rn_cm_hang_up(int fd)
{
	unsigned char unread[512];

	shutdown(fd, SHUT_WR);
	for (int i = 0; i < HANG_UP_BUFFERS && recv(fd, unread, sizeof unread, MSG_DONTWAIT) > 0; i++)
		;
}

/* --- the end of a wire: engine, rn_cm_lock held -------------------------------------------------- */

void rn_cm_wire_tell_disconnected(struct rn_cm_wire *wire)
{
	if (wire->id && !wire->told)
		rn_cm_tell(wire->id, RDMA_CM_EVENT_DISCONNECTED, 0);
	wire->told = true;
}

/* Reasons that exist neither on iWARP nor for datagrams, except on this device. */
static bool is_ours(int reason)
{
	return reason == RN_REJ_NO_RESOURCES || reason >= RN_REJ_SECRET_WANTED;
}

void rn_cm_wire_tell_failed(struct rn_cm_wire *wire, enum rdma_cm_event_type type, int status)
{
	bool is_passive = wire->far.ss_family != 0;

	if (wire->is_datagram && is_passive)
		return; /* it sent a request, and is not interested in the answer any more */
	if (wire->is_datagram && type == RDMA_CM_EVENT_REJECTED) {
		type = RDMA_CM_EVENT_UNREACHABLE;
		if (!is_ours(status))
			status = status == RN_REJ_INVALID_SERVICE_ID ? RN_SIDR_UNSUPPORTED : RN_SIDR_REJECT;
	}
	rn_cm_wire_tell_refused(wire, type, status, NULL, 0, 0);
}

void rn_cm_wire_tell_refused(struct rn_cm_wire *wire, enum rdma_cm_event_type type, int status, const void *data,
			     uint8_t length, size_t field)
{
	struct rn_cm_event *event;

	if (!wire->id)
		return;
	if (type == RDMA_CM_EVENT_REJECTED && rn_settings.iwarp && !is_ours(status))
		status = -ECONNREFUSED; /* the end of a TCP connection gives no reason */
	/* The peer's answer is still unread: it is void now, and this event replaces it. */
	event = rn_cm_event_find(wire->id, RDMA_CM_EVENT_CONNECT_RESPONSE);
	if (event) {
		event->event.event = type;
		event->event.status = status;
	} else {
		event = rn_cm_event_new(wire->id, type, status);
		if (!event)
			return;
		rn_cm_event_queue(event);
	}
	memset(&event->event.param, 0, sizeof event->event.param);
	if (data)
		rn_cm_event_private(event, data, length, rn_settings.padded ? field : length);
}

/* On another host only its answer tells whether the peer is an RDMA program. The private data are for errors.py. */
static bool has_ended_unheard(const struct rn_cm_wire *wire, int error)
{
	return !wire->is_ours && !wire->is_datagram && !wire->heard && (!error || error == ECONNRESET || error == EPIPE);
}

static void tell_no_answer(struct rn_cm_wire *wire)
{
	static const char words[] = RN_CM_NO_ANSWER;

	rn_cm_wire_tell_refused(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED, words, sizeof words - 1,
				RN_CM_REJ_PRIVATE);
}

void rn_cm_wire_lost(struct rn_cm_wire *wire, int error)
{
	switch (wire->phase) {
	case RN_CM_WIRE_CONNECTING:
		/* Reset: the listener has ended with what waited there. Linux's iWARP says so of both, too. */
		if (!error || error == ECONNREFUSED || error == ECONNRESET)
			rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
		else
			rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -error);
		break;
	case RN_CM_WIRE_HELLO_SENT:
	case RN_CM_WIRE_REQ_SENT:
		if (has_ended_unheard(wire, error)) {
			tell_no_answer(wire);
			break;
		}
		/* fall through */
	case RN_CM_WIRE_REP_RECEIVED:
	case RN_CM_WIRE_REQ_RECEIVED:
	case RN_CM_WIRE_REP_SENT:
		/* As with a kernel when a program ends, which destroys its identifiers. */
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
		break;
	case RN_CM_WIRE_ESTABLISHED:
		if (wire->id && wire->hung_up)
			atomic_store(&wire->id->peer_left_us, true);
		rn_cm_wire_tell_disconnected(wire);
		break;
	case RN_CM_WIRE_DREQ_SENT:
		rn_cm_wire_tell_disconnected(wire);
		break;
	case RN_CM_WIRE_ACCEPTED:
	case RN_CM_WIRE_CHALLENGED:
	case RN_CM_WIRE_PROVEN:
	case RN_CM_WIRE_CLOSING:
	case RN_CM_WIRE_TIMEWAIT:
		break;
	}
	rn_cm_wire_finish(wire);
}

const char *rn_cm_wire_far(const struct rn_cm_wire *wire, char text[RN_CM_FAR])
{
	const struct sockaddr_storage *far = wire->far.ss_family ? &wire->far : &wire->dst;
	struct ucred user;
	socklen_t length = sizeof user;
	char where[INET6_ADDRSTRLEN] = "?";

	if (wire->by_name && !getsockopt(wire->source.fd, SOL_SOCKET, SO_PEERCRED, &user, &length)) {
		snprintf(text, RN_CM_FAR, "user %d of this host", (int)user.uid);
		return text;
	}
	inet_ntop(far->ss_family,
		  far->ss_family == AF_INET ? (const void *)&((const struct sockaddr_in *)far)->sin_addr
					    : (const void *)&((const struct sockaddr_in6 *)far)->sin6_addr,
		  where, sizeof where);
	snprintf(text, RN_CM_FAR, "%s port %u", where, (unsigned)be16toh(rn_cm_port((const struct sockaddr *)far)));
	return text;
}

/* The private data are for errors.py: an adapter has none, and the same reason. */
static void tell_not_ours(struct rn_cm_wire *wire)
{
	static const char words[] = RN_CM_NOT_OURS;

	if (wire->is_datagram)
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	else
		rn_cm_wire_tell_refused(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID, words,
					sizeof words - 1, RN_CM_REJ_PRIVATE);
}

void rn_cm_wire_drop(struct rn_cm_wire *wire, enum rn_warning cause, const char *why)
{
	char far[RN_CM_FAR];

	dropped++;
	rn_warn(cause, "dropped the connection with %s: %s", rn_cm_wire_far(wire, far), why);
	if (wire->phase != RN_CM_WIRE_REQ_SENT && wire->phase != RN_CM_WIRE_HELLO_SENT) {
		rn_cm_wire_lost(wire, 0);
		return;
	}
	tell_not_ours(wire);
	rn_cm_wire_finish(wire);
}

void rn_cm_wire_not_ours(struct rn_cm_wire *wire, const char *why)
{
	char far[RN_CM_FAR];

	rn_warn(RN_WARN_LANGUAGE, "no connection with %s: %s", rn_cm_wire_far(wire, far), why);
	tell_not_ours(wire);
	rn_cm_wire_finish(wire);
}

RN_EXPORT int rdmanet_soft_cm_peer_is_gone(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	return id->epoch == rn_epoch() && atomic_load(&id->peer_left_us);
}

RN_EXPORT int rdmanet_soft_cm_peer_user(struct rdma_cm_id *rdma_id, uid_t *user)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int way = RDMANET_SOFT_PEER_UNKNOWN;

	if (id->epoch != rn_epoch())
		return way;
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire) {
		enum rn_stranger_way its = rn_stranger_way(&id->wire->stranger.from, user);

		way = its == RN_STRANGER_BY_NAME  ? RDMANET_SOFT_PEER_BY_NAME
		      : its == RN_STRANGER_BY_TCP ? RDMANET_SOFT_PEER_BY_TCP
						  : RDMANET_SOFT_PEER_UNKNOWN;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return way;
}
