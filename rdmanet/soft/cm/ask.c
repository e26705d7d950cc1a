/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that are asked for by a link, and never have a socket.
 *
 * Two processes that are linked (peer/peer.h) have proven who they are, and what the secret is if there is one.  Where
 * an earlier connection has shown that a listener of this host is in such a process (known.c), the request for the next
 * one goes over the link or by mail, and with it all messages of the connection (link.c).  It costs no socket, no
 * accept, and no question to the kernel.
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
 * What a program may ask a program for does not change.  Who is linked may read and write this process's memory anyhow
 * (peer/proof.c), and is of our own user.
 *
 * Addresses.  The asker has no port of TCP's.  Programs tell their clients apart by port, so the side that is asked gives
 * each a number that no other such client of its own has, and REP tells the asker.  They are numbers from which the
 * kernel lets no connection begin unless a program wants that very one: those below net.ipv4.ip_local_port_range.  Where
 * that leaves none, as "1024 65535" does, every connection goes by TCP.
 */
#define _GNU_SOURCE
#include "base/gid.h"
#include "base/guard.h"
#include "base/sock_diag.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

enum {
	FIRST_PORT = 1024, /* those below are root's */
	PORTS = 32768 - FIRST_PORT, /* at most */
	WAITING_MAX = 1024, /* that were asked for and are not established: more go by TCP, which takes descriptors */
};

/* All under rn_cm_lock. */
static struct rn_list listeners = {&listeners, &listeners};
static uint64_t taken[PORTS / 64];
static unsigned ports; /* that may be used: since a listener last began */
static unsigned next_port, waiting;

/* --- the asker ----------------------------------------------------------------------------------- */

/* May it be asked for by a link, and by which? The port of the process, or 0. */
static uint16_t port_to_ask(struct rn_cm_wire *wire)
{
	const struct sockaddr_in6 *v6 = (const void *)&wire->dst;
	uint16_t port;

	if (wire->is_datagram || wire->bound || wire->by_name_alone || wire->goes_by_socket || rn_cm_secret_is_set() ||
	    (wire->dst.ss_family == AF_INET6 && v6->sin6_scope_id) || !rn_guarded(RN_GUARD_HANDOVER))
		return 0;
	port = rn_cm_known_peer((const struct sockaddr *)&wire->dst, &wire->cookie, &wire->mail_channel);
	return port && rn_peer_is_met(port) ? port : 0;
}

/* The request that waits in the output. False: it cannot be sent by the link. */
static bool send_request(struct rn_cm_wire *wire, uint64_t token)
{
	struct rn_cm_link_request request = {.cookie = wire->cookie};
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
		wire->is_ours = wire->moved = wire->peer_moved = true;
		rn_cm_link_name(wire, token);
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
	if (rn_peer_is_linked(wire->death.peer) && rn_peer_takes_more(wire->death.peer) && send_request(wire, token))
		return true;
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_ask_by_socket(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	return false;
}

void rn_cm_ask_by_socket(struct rn_cm_wire *wire)
{
	rn_cm_known_is_of((const struct sockaddr *)&wire->dst, wire->cookie, 0);
	rn_cm_link_forget(wire);
	rn_peer_unwatch_death(&wire->death);
	wire->watched = false;
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

bool rn_cm_ask_hear_elsewhere(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	if (wire->side != RN_CM_ASKER)
		return false;
	if (wire->phase == RN_CM_WIRE_CLOSING)
		return true; /* crossed our REJ */
	if (wire->phase != RN_CM_WIRE_REQ_SENT || wire->heard != 1u << RN_CM_ELSEWHERE)
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
	rn_cm_as_ipv4(&to);
	return rn_tcp_listener_cookie((struct sockaddr *)&to, &cookie, &user);
}

/* --- who is asked -------------------------------------------------------------------------------- */

/* How many numbers lie below the kernel's own; none, if it does not tell. */
static unsigned count_ports(void)
{
	int fd = rn_fd_own(open("/proc/sys/net/ipv4/ip_local_port_range", O_RDONLY | O_CLOEXEC));
	unsigned long first = 0;
	char text[32] = "";

	if (fd >= 0 && read(fd, text, sizeof text - 1) > 0)
		first = strtoul(text, NULL, 10);
	rn_fd_close(fd);
	if (first <= FIRST_PORT)
		return 0;
	return first - FIRST_PORT < PORTS ? (unsigned)(first - FIRST_PORT) : PORTS;
}

void rn_cm_ask_listen(struct rn_cm_id *id)
{
	socklen_t length = sizeof id->cookie;

	rn_list_init(&id->listening);
	ports = count_ports();
	if (!id->by_name && !getsockopt(id->bound_fd, SOL_SOCKET, SO_COOKIE, &id->cookie, &length))
		rn_list_add(&listeners, &id->listening);
}

void rn_cm_ask_listener_gone(struct rn_cm_id *id)
{
	rn_list_del(&id->listening);
}

static struct rn_cm_id *find_listener(uint64_t cookie)
{
	for (struct rn_list *at = listeners.next; at != &listeners; at = at->next) {
		struct rn_cm_id *id = RN_OWNER(at, struct rn_cm_id, listening);

		if (id->cookie == cookie && id->state == RN_CM_LISTENING)
			return id;
	}
	return NULL;
}

uint32_t rn_cm_ask_number(const struct rn_cm_wire *wire)
{
	const struct rn_cm_id *listener = find_listener(wire->listener_cookie);

	return listener && listener->id.channel == wire->id->id.channel ? rn_cm_channel_number(wire->id) : 0;
}

/* 0: none is left. */
static uint16_t take_port(void)
{
	for (unsigned i = 0; i < ports; i++) {
		unsigned at = next_port++ % ports;

		if (!(taken[at / 64] & 1ull << at % 64)) {
			taken[at / 64] |= 1ull << at % 64;
			return (uint16_t)(FIRST_PORT + at);
		}
	}
	return 0;
}

static void give_port_back(uint16_t port)
{
	unsigned at = port - FIRST_PORT;

	if (port)
		taken[at / 64] &= ~(1ull << at % 64);
}

static bool is_usable(const union ibv_gid *gid)
{
	return rn_gid_is_ours(gid) && !IN6_IS_ADDR_LINKLOCAL((const struct in6_addr *)gid);
}

/* Both ends' addresses, as they would be by TCP. False: no connection to this listener has them. */
static bool take_ends(struct rn_cm_wire *wire, const struct rn_cm_id *listener, const struct rn_cm_link_request *request)
{
	const struct sockaddr *at = &listener->id.route.addr.src_addr;
	union ibv_gid gid;

	if (!is_usable(&request->near) || !is_usable(&request->far) ||
	    rn_gid_is_v4(&request->near) != rn_gid_is_v4(&request->far))
		return false;
	rn_gid_of(at, &gid);
	if (rn_cm_is_wildcard(at) ? rn_gid_is_v4(&request->near) ? listener->af_only && at->sa_family == AF_INET6
								   : at->sa_family == AF_INET
				  : !rn_gid_is_same(&gid, &request->near))
		return false;
	rn_gid_address(&request->near, 0, be16toh(rn_cm_port(at)), &wire->near);
	wire->asker_number = take_port();
	if (!wire->asker_number)
		return false;
	rn_gid_address(&request->far, 0, wire->asker_number, &wire->far);
	return true;
}

/* Make a wire for the request. NULL: it is not for us. */
static struct rn_cm_wire *admit(const void *process, uint64_t token, const struct rn_cm_link_request *request)
{
	struct rn_cm_wire *wire = NULL;
	struct rn_cm_id *listener;

	pthread_mutex_lock(&rn_cm_lock);
	listener = find_listener(request->cookie);
	/* A listener is a user of the context. If its device has failed, listen.c opens it anew. */
	if (listener && !listener->paused && !rn_cm_is_datagram(listener) && !rn_context_is_dead(rn_cm_context()) &&
	    waiting < WAITING_MAX && !rn_cm_link_find(process, RN_CM_ASKED, token) && !rn_cm_secret_is_set() &&
	    rn_guarded(RN_GUARD_HANDOVER))
		wire = rn_cm_wire_new(RN_CM_WIRE_ACCEPTED);
	if (wire) {
		wire->side = RN_CM_ASKED;
		wire->moved = wire->peer_moved = true;
		wire->is_waiting = true;
		waiting++;
		wire->mail_channel = request->mail_channel;
		wire->listener = listener;
		wire->stranger.leave = rn_cm_listen_leave;
		wire->over = !take_ends(wire, listener, request);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return wire;
}

/* Its own queue pair names a port of the process that asks. False: it does not. */
static bool watch(struct rn_cm_wire *wire, const void *process, const struct rn_cm_link_request *request)
{
	uint16_t port = (uint16_t)(be32toh(request->req.qpn) >> 8);

	if (wire->over || !rn_peer_is_met(port) || rn_peer_watch_death(port, &wire->death))
		return false;
	wire->watched = true;
	if (!rn_peer_is_linked(wire->death.peer) || rn_peer_process(wire->death.peer) != process)
		return false;
	wire->stranger.from = rn_stranger_by_link(wire->death.peer->pid);
	return true;
}

/* Accept the wire's request, which is checked like any other, or end the wire: false. */
static bool take_request(struct rn_cm_wire *wire, const void *process, uint64_t token,
			 const struct rn_cm_link_request *request)
{
	bool is_watched = watch(wire, process, request);

	rn_cm_lock_to_tell();
	if (is_watched) {
		rn_cm_link_name(wire, token);
		memcpy(wire->in, &request->req, sizeof request->req);
		wire->in_length = sizeof request->req;
		rn_cm_wire_digest(wire);
	} else {
		wire->over = true;
	}
	rn_cm_unlock_and_tell();
	rn_cm_wire_get_on(wire);
	return is_watched;
}

void rn_cm_asked(const void *process, uint64_t token, const void *message, size_t length)
{
	struct rn_cm_header elsewhere = {htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_ELSEWHERE,
					 htobe16(sizeof(struct rn_cm_header))};
	struct rn_cm_link_request request;
	struct rn_cm_wire *wire;

	if (length != sizeof request || !token) {
		rn_warn(RN_WARN_LANGUAGE, "refused a connection: its process has asked for it in another language");
		return;
	}
	memcpy(&request, message, sizeof request);
	wire = admit(process, token, &request);
	if (!wire || !take_request(wire, process, token, &request))
		rn_peer_answer_connection(process, RN_CM_ASKER, token, &elsewhere, sizeof elsewhere);
}

void rn_cm_ask_look(struct rn_cm_wire *wire)
{
	bool waits = !wire->over && (wire->phase == RN_CM_WIRE_ACCEPTED || wire->phase == RN_CM_WIRE_REQ_RECEIVED ||
				     wire->phase == RN_CM_WIRE_REP_SENT);

	if (!wire->is_waiting || waits)
		return;
	wire->is_waiting = false;
	waiting--;
}

void rn_cm_ask_forget(struct rn_cm_wire *wire)
{
	give_port_back(wire->asker_number);
	wire->asker_number = 0;
}

void rn_cm_ask_forked(void)
{
	rn_list_init(&listeners);
	memset(taken, 0, sizeof taken);
	waiting = 0;
}
