/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that are asked for by a link, and never have a socket.
 *
 * Two processes that are linked (peer/peer.h) have proven who they are, and what the secret is if there is one.  Where
 * an earlier connection has shown that a listener of this host is in such a process (known.c), the request for the next
 * one goes over the link or by mail, and with it all messages of the connection (link.c).  It costs no socket and no
 * accept, and it does not wait behind others who ask: anybody may fill the queue of a socket.
 *
 *      asker (active side)                                 asked (passive side)
 *      REQ, the listener's cookie, a token --- mail --->   an event for the program
 *                                          <-- mail ----   REP; by the link: ELSEWHERE
 *
 * The cookie is the number that the kernel gave the listening socket, and gives no other.  Who is asked takes the request
 * only if that very socket still listens; a connection by TCP to the same address would get there.  In all other cases
 * it answers ELSEWHERE: there is no such listener any more; its backlog is full; a secret was set meanwhile.  Then the
 * asker connects by TCP, as it does if the process ends and another listens there.
 *
 * A listener that is there by name only (name.c) is named by its address and port instead: who has the name is asked like
 * who has the cookie's socket, and answers ELSEWHERE if it has it no more.  Before a request the asker asks the kernel
 * about that process what it asks about who accepts a connection to the name, as the answer may have changed.  That is
 * ten questions, so an answer is good for BELIEVED_NS, and for that very process: whether it lives is asked each time.
 * What a process does to itself in that time, it could do as well while a request is on its way to it, which takes as
 * long.  So while the last request waits, as where many connections are begun together, the answer by which that was
 * sent is good for the next, too, for BELIEVED_MOST_NS.
 *
 * What a program may ask a program for does not change.  Who is linked may read and write this process's memory anyhow
 * (peer/proof.c), and is of our own user.
 *
 * This file is the asker's; asked.c is the other's, and listeners.c says which addresses both have. Connections that are
 * begun before there is a link may wait for it: first.c.
 */
#include "base/gid.h"
#include "base/guard.h"
#include "base/sock_diag.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <netinet/in.h>
#include <sys/random.h>

bool rn_cm_ask_is_possible(const struct rn_cm_wire *wire)
{
	const struct sockaddr_in6 *v6 = (const void *)&wire->dst;

	return !wire->is_datagram && !wire->bound && !wire->goes_by_socket && !rn_cm_secret_is_set() &&
	       !(wire->dst.ss_family == AF_INET6 && v6->sin6_scope_id) && rn_guarded(RN_GUARD_HANDOVER);
}

/* By which link it may be asked for: the port of the process, or 0. */
static uint16_t port_to_ask(struct rn_cm_wire *wire)
{
	uint16_t port;

	if (!rn_cm_ask_is_possible(wire))
		return 0;
	port = rn_cm_known_peer((const struct sockaddr *)&wire->dst, wire->by_name_alone, &wire->cookie,
				&wire->mail_channel);
	return port && rn_peer_is_met(port) ? port : 0;
}

enum { BELIEVED_NS = 250 * 1000, BELIEVED_MOST_NS = 2000 * 1000 };

/* The last process that was believed, and about which address. As known.c, it is the engine's. */
static struct {
	struct sockaddr_storage dst;
	uint64_t at_ns; /* its own number for this, too: the next process at its place in memory has another */
	uint64_t token; /* of the last request that was sent because of it; 0: none */
} believed;

/* Does the last request to it wait for an answer? */
static bool is_awaited(struct rn_peer *peer)
{
	const struct rn_cm_wire *last;
	bool is;

	pthread_mutex_lock(&rn_cm_lock);
	last = rn_cm_wire_find(rn_peer_process(peer), RN_CM_ASKER, believed.token);
	is = last && last->phase == RN_CM_WIRE_REQ_SENT && !last->heard;
	pthread_mutex_unlock(&rn_cm_lock);
	return is;
}

/* By what the kernel tells of a number of a process. */
static bool is_believed_now(const struct rn_cm_wire *wire, struct rn_peer *peer)
{
	uint64_t now = rn_now_ns(), at = rn_peer_believed_at(peer);

	if (at && at == believed.at_ns && !memcmp(&believed.dst, &wire->dst, sizeof wire->dst) &&
	    (now - at < BELIEVED_NS || (now - at < BELIEVED_MOST_NS && is_awaited(peer))))
		return true;
	if (!rn_cm_name_is_believed_of(peer->pid, (const struct sockaddr *)&wire->dst))
		return false;
	believed.dst = wire->dst;
	believed.at_ns = now; /* when the questions began */
	believed.token = 0;
	rn_peer_believe(peer, now);
	return true;
}

/* If the listener is there by name: may its process speak for the address? The answer is about a number of a process.
 * Another one has that number only if ours has ended, so this is asked last. */
static bool is_believed(const struct rn_cm_wire *wire)
{
	struct rn_peer *peer = wire->death.peer;

	return wire->cookie || !rn_peer_process(peer) ||
	       (is_believed_now(wire, peer) && (!rn_guarded(RN_GUARD_NAME_LIFE) || rn_peer_lives(peer)));
}

/* The request that waits in the output. False: it cannot be sent by the link. */
static bool send_request(struct rn_cm_wire *wire, uint64_t token)
{
	struct rn_cm_link_request request = {
		.cookie = wire->cookie, .port = be16toh(rn_cm_port((const struct sockaddr *)&wire->dst))};
	bool is_over;

	pthread_mutex_lock(&rn_cm_lock);
	is_over = wire->over || !wire->id;
	if (!is_over) {
		memcpy(&request.req, wire->out, sizeof request.req);
		memcpy(wire->request, wire->out, sizeof request.req);
		rn_gid_of(&wire->id->id.route.addr.dst_addr, &request.near);
		rn_gid_of(&wire->id->id.route.addr.src_addr, &request.far);
		request.mail_channel = rn_cm_channel_number(wire->id);
		wire->out_length = 0;
		wire->side = RN_CM_ASKER;
		wire->phase = RN_CM_WIRE_REQ_SENT;
		wire->connecting = false;
		wire->by_name = !wire->cookie;
		if (wire->by_name)
			believed.token = token;
		wire->is_ours = wire->moved = wire->peer_moved = true;
		rn_cm_wire_name(wire, token);
		rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (is_over || rn_peer_mail(wire->death.peer, wire->mail_channel, RN_CM_LINK_ASKS, token, &request, sizeof request))
		return true;
	wire->stays_off_mail = true;
	return rn_peer_tell_connection(wire->death.peer, RN_CM_LINK_ASKS, token, &request, sizeof request);
}

bool rn_cm_ask(struct rn_cm_wire *wire)
{
	uint16_t port = port_to_ask(wire);
	uint64_t token = 0;

	if (!port || getrandom(&token, sizeof token, GRND_NONBLOCK) != sizeof token || !token ||
	    rn_peer_watch_death(port, &wire->death))
		return false;
	wire->watched = true;
	if (rn_peer_is_linked(wire->death.peer) && rn_peer_takes_more(wire->death.peer) && is_believed(wire) &&
	    send_request(wire, token))
		return true;
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_ask_by_socket(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	return false;
}

void rn_cm_ask_by_socket(struct rn_cm_wire *wire)
{
	rn_cm_known_is_of((const struct sockaddr *)&wire->dst, wire->cookie, 0);
	rn_cm_wire_unname(wire);
	rn_peer_unwatch_death(&wire->death);
	wire->watched = wire->by_name = false;
	wire->goes_by_socket = true;
	if (!wire->side)
		return;
	wire->side = RN_CM_HANDED;
	wire->moved = wire->peer_moved = wire->hung_up = wire->has_left = false;
	wire->heard = 0;
	wire->phase = RN_CM_WIRE_CONNECTING;
	wire->connecting = true;
	rn_cm_wire_append(wire, RN_CM_REQ, wire->request);
	rn_task_queue(&wire->task);
}

bool rn_cm_ask_on_elsewhere(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	if (wire->side != RN_CM_ASKER)
		return false;
	if (wire->heard != 1u << RN_CM_ELSEWHERE)
		return false;
	rn_cm_ask_by_socket(wire);
	return true;
}

/* Nothing was heard of the request. Is there another listener now? */
bool rn_cm_ask_may_go_on(const struct rn_cm_wire *wire)
{
	struct sockaddr_storage to = wire->dst;
	uint64_t cookie;
	uid_t user;

	if (wire->side != RN_CM_ASKER || wire->phase != RN_CM_WIRE_REQ_SENT || wire->heard)
		return false;
	if (wire->by_name)
		return true; /* who connects to the name sees */
	rn_cm_as_ipv4(&to);
	return rn_tcp_listener_cookie((struct sockaddr *)&to, &cookie, &user);
}
