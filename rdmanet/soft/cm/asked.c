/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that this process is asked for by a link (ask.c): the request is checked like one that came by TCP.
 */
#include "base/gid.h"
#include "base/guard.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <netinet/in.h>

static bool is_usable(const union ibv_gid *gid)
{
	return rn_gid_is_ours(gid) && !IN6_IS_ADDR_LINKLOCAL((const struct in6_addr *)gid);
}

/* Both ends' addresses, as they would be by a socket. False: no connection to this listener has them. */
static bool take_ends(struct rn_cm_wire *wire, const struct rn_cm_id *listener, const struct rn_cm_link_request *request)
{
	const struct sockaddr *at = &listener->id.route.addr.src_addr;
	union ibv_gid gid;

	if (listener->by_name) {
		rn_cm_name_ends(listener, &wire->near, &wire->far);
		return is_usable(&request->near);
	}
	if (!is_usable(&request->near) || !is_usable(&request->far) ||
	    rn_gid_is_v4(&request->near) != rn_gid_is_v4(&request->far))
		return false;
	rn_gid_of(at, &gid);
	if (rn_cm_is_wildcard(at) ? rn_gid_is_v4(&request->near) ? listener->af_only && at->sa_family == AF_INET6
								   : at->sa_family == AF_INET
				  : !rn_gid_is_same(&gid, &request->near))
		return false;
	rn_gid_address(&request->near, 0, be16toh(rn_cm_port(at)), &wire->near);
	wire->asker_number = rn_cm_asked_take_number();
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
	listener = rn_cm_listener_asked(request);
	/* A listener is a user of the context. If its device has failed, listen.c opens it anew. */
	if (listener && !listener->paused && !rn_cm_is_datagram(listener) && !rn_context_is_dead(rn_cm_context()) &&
	    !rn_cm_asked_is_full() && !rn_cm_wire_find(process, RN_CM_ASKED, token) && !rn_cm_secret_is_set() &&
	    rn_guarded(RN_GUARD_HANDOVER))
		wire = rn_cm_wire_new(RN_CM_WIRE_ACCEPTED);
	if (wire) {
		wire->side = RN_CM_ASKED;
		wire->moved = wire->peer_moved = true;
		rn_cm_asked_begins(wire);
		wire->mail_channel = request->mail_channel;
		wire->listener = listener;
		wire->by_name = listener->by_name;
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
	wire->stranger.from = rn_stranger_by_link(wire->death.peer->pid, wire->by_name);
	return true;
}

/* Accept the wire's request, which is checked like any other, or end the wire: false. */
static bool take_request(struct rn_cm_wire *wire, const void *process, uint64_t token,
			 const struct rn_cm_link_request *request)
{
	bool is_watched = watch(wire, process, request);

	rn_cm_lock_to_tell();
	if (is_watched) {
		rn_cm_wire_name(wire, token);
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
	struct rn_cm_link_request request;
	struct rn_cm_header elsewhere;
	struct rn_cm_wire *wire;

	if (length != sizeof request || !token) {
		rn_warn(RN_WARN_LANGUAGE, "refused a connection: its process has asked for it in another language");
		return;
	}
	memcpy(&request, message, sizeof request);
	wire = admit(process, token, &request);
	if (wire && take_request(wire, process, token, &request))
		return;
	rn_cm_put_header(RN_CM_ELSEWHERE, &elsewhere);
	rn_peer_answer_connection(process, RN_CM_ASKER, token, &elsewhere, sizeof elsewhere);
}
