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
 *     wire.c     a wire's life, and what its end means
 *     message.c  what is sent
 *     hear.c     what is received, and in which phase
 *     secret.c   what is proven before that
 *     socket.c   bytes out and in
 *     listen.c   where wires of the passive side come from
 *     handover.c how they get by without their socket; link.c: what they say then; ask.c: how they begin without
 */
#define _GNU_SOURCE
#include "base/extras.h"
#include "cm/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct rn_list rn_cm_wires = {&rn_cm_wires, &rn_cm_wires};
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

static void timed_out(struct rn_timer *timer);
static void peer_died(struct rn_death *death, bool failed);
static void peer_linked(struct rn_death *death);

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
	wire->source = (struct rn_source){.fd = -1, .ready = rn_cm_wire_ready};
	wire->timer.fire = timed_out;
	wire->task.run = rn_cm_wire_changed;
	wire->death.dead = peer_died;
	wire->death.linked = peer_linked;
	rn_list_add(&rn_cm_wires, &wire->link);
	return wire;
}

void rn_cm_wire_close_socket(struct rn_cm_wire *wire)
{
	rn_source_remove(&wire->source);
	rn_fd_close(wire->source.fd);
	wire->source.fd = -1;
}

static void let_go(struct rn_cm_wire *wire)
{
	rn_cm_wire_close_socket(wire);
	if (wire->watched)
		rn_peer_unwatch_death(&wire->death);
	wire->watched = wire->moved = false;
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

void rn_cm_wire_sweep(struct rn_cm_wire *wire)
{
	bool waits, is_over;

	pthread_mutex_lock(&rn_cm_lock);
	is_over = wire->over;
	pthread_mutex_unlock(&rn_cm_lock);
	if (!is_over)
		return;
	rn_cm_link_end(wire);
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_handover_forget(wire);
	rn_cm_link_forget(wire);
	rn_cm_ask_look(wire);
	rn_cm_ask_forget(wire);
	waits = wire->id != NULL; /* see rn_cm_wire_finish() */
	if (waits) {
		wire->over = false;
		wire->in_length = 0;
	} else {
		rn_list_del(&wire->link);
	}
	pthread_mutex_unlock(&rn_cm_lock);

	rn_stranger_forget(&wire->stranger);
	let_go(wire);
	if (waits) {
		rn_cm_wire_set_timer_ms(wire, rn_settings.timewait_ms);
		return;
	}
	rn_timer_cancel(&wire->timer);
	rn_task_cancel(&wire->task);
	free(wire);
}

/* The engine stops. Identifiers that the program has left open stay unconnected. */
static void stop_all(void)
{
	struct rn_cm_wire *wire;

	do {
		wire = NULL;
		pthread_mutex_lock(&rn_cm_lock);
		if (!rn_list_empty(&rn_cm_wires)) {
			wire = RN_OWNER(rn_cm_wires.next, struct rn_cm_wire, link);
			if (wire->id)
				wire->id->wire = NULL;
			wire->id = NULL;
			wire->over = true;
		}
		pthread_mutex_unlock(&rn_cm_lock);
		if (wire)
			rn_cm_wire_sweep(wire);
	} while (wire);
	rn_cm_listen_stop();
}

static void forget_in_child(void)
{
	rn_list_init(&rn_cm_wires);
	rn_cm_handover_forked();
	rn_cm_link_forked();
	rn_cm_ask_forked();
	rn_cm_listen_forked();
}

/* It was ended by iWARP's rules. */
static void disconnect_terminated(struct ibv_qp *qp)
{
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_wire_disconnect_qp(qp);
	rn_cm_unlock();
}

void rn_cm_wire_start(void)
{
	rn_at_qp_terminated(disconnect_terminated);
	rn_peers_register_connections(rn_cm_link_hear);
	rn_peers_start(); /* a wire lets go of the peer that it watches */
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
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
		if (!error || error == ECONNREFUSED)
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

static void peer_died(struct rn_death *death, bool failed)
{
	struct rn_cm_wire *wire = RN_OWNER(death, struct rn_cm_wire, death);
	bool goes_on;

	if (failed)
		return; /* its memory can't be reached, but it lives */
	/* What it sent before is still to be read: it may have connected, or disconnected, and then ended. */
	if (!wire->moved && !wire->connecting && wire->source.fd >= 0)
		rn_cm_wire_receive(wire);
	rn_cm_link_digest(wire);
	goes_on = rn_cm_ask_may_go_on(wire);
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && goes_on) {
		rn_cm_ask_by_socket(wire);
	} else if (!wire->over) {
		wire->hung_up = true;
		rn_cm_wire_lost(wire, 0);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_wire_sweep(wire);
}

/* The socket may not be needed any more. */
static void peer_linked(struct rn_death *death)
{
	rn_task_post(&RN_OWNER(death, struct rn_cm_wire, death)->task);
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

/* The time limit of this phase has passed. With rn_cm_lock held. */
static void end_phase(struct rn_cm_wire *wire)
{
	switch (wire->phase) {
	case RN_CM_WIRE_ACCEPTED:
	case RN_CM_WIRE_CHALLENGED:
	case RN_CM_WIRE_PROVEN:
		rn_cm_wire_drop(wire, RN_WARN_SILENCE, "it stopped answering");
		break;
	case RN_CM_WIRE_HELLO_SENT:
	case RN_CM_WIRE_REQ_SENT:
		if (!wire->is_ours) {
			rn_cm_wire_not_ours(wire, "it accepts connections but sends nothing");
			break;
		}
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_CONNECTING:
	case RN_CM_WIRE_REP_SENT:
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_DREQ_SENT:
		rn_cm_wire_lost(wire, 0);
		break;
	case RN_CM_WIRE_TIMEWAIT:
		if (wire->id)
			rn_cm_tell(wire->id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_CLOSING:
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_REQ_RECEIVED: /* the program may take any time, but the peer should know that it does */
		rn_cm_wire_say_wait(wire);
		break;
	case RN_CM_WIRE_ESTABLISHED:
		if (wire->source.fd < 0 && !wire->peer_moved)
			rn_cm_wire_lost(wire, 0);
		rn_cm_handover_timer(wire);
		break;
	case RN_CM_WIRE_REP_RECEIVED:
		break; /* the program may take any time */
	}
}

static void timed_out(struct rn_timer *timer)
{
	struct rn_cm_wire *wire = RN_OWNER(timer, struct rn_cm_wire, timer);
	bool again;

	pthread_mutex_lock(&rn_cm_lock);
	again = wire->again && !wire->over && wire->phase == RN_CM_WIRE_CONNECTING;
	pthread_mutex_unlock(&rn_cm_lock);
	wire->again = false;
	if (again) {
		rn_cm_wire_connect_socket(wire);
		rn_cm_wire_flush(wire);
		rn_cm_wire_sweep(wire);
		return;
	}
	rn_cm_link_hear_late(wire);
	pthread_mutex_lock(&rn_cm_lock);
	/* The program may have gone on meanwhile, by accepting or rejecting: then the timer is that phase's. */
	if (!wire->over && !wire->timer.is_set)
		end_phase(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_wire_get_on(wire);
}
