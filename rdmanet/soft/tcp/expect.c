/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Does a connection by TCP come from the peer that a queue pair was told of?  And does that peer answer ours?
 *
 * It has to name the right numbers, come from the right address, and have the sequence number that the queue pair
 * expects (and the secret, if there is one: hello.c).  Numbers and addresses are no secrets on a host, and a sequence
 * number has 24 bits.  So there are more checks:
 *
 * A peer that maps our memory does not connect by TCP.  A peer on this host, with a link in either direction, must use
 * its mapping of our arena, unless it has said over its proven link that this queue pair goes by TCP (peer/peers.h).
 * While our link is being made we cannot know yet: the connection is refused, and the peer tries again.  If our link
 * stands and the peer has made none, it may be unable to.  It is then of our own user, so only a socket of that user is
 * accepted.
 *
 * Wrong sequence numbers are counted. After ATTEMPTS of them no connection from that address is accepted for ten
 * seconds, not even with the right number; so a search takes months.  The queue pair itself stays open, or strangers
 * could close any.  Nor can other processes of this host lock out a peer on it, although all of them have the same
 * address: the user who has the peer's port is counted apart from all others.
 *
 * Another process may answer at the peer's port: if the peer has died, any process can take its port.  On this host
 * the kernel tells the owner of a port.  The user who had the port when the queue pair was told of the peer, by a
 * listener or by the reservation that the peer makes before its number is known, must still have it when we connect;
 * else we send nothing.  Listener and reservation belong to one user (peer/port.c), even if the process has given up
 * privileges.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/gid.h"
#include "base/guard.h"
#include "base/log.h"
#include "base/equal.h"
#include "base/sock_diag.h"
#include "objects/ah.h"
#include "tcp/tcp.h"

enum { ATTEMPTS = 8 };
static const uint64_t WINDOW_NS = 10 * 1000000000ull;

/* The address that it comes from. False: it can't be found out any more. */
static bool source_of(const struct rn_tcp *in, union ibv_gid *from)
{
	struct sockaddr_storage address;
	socklen_t length = sizeof(address);

	if (getpeername(in->source.fd, (struct sockaddr *)&address, &length))
		return false;
	rn_gid_of((struct sockaddr *)&address, from);
	return true;
}

static bool is_from_its_address(const struct rn_tcp *in, const struct rn_qp *qp, const union ibv_gid *from)
{
	const union ibv_gid *dgid = &qp->attr.ah_attr.grh.dgid;

	if (rn_gid_is_ours(from))
		return rn_ah_is_ours(&qp->attr.ah_attr);
	return !memcmp(from, dgid, sizeof(*from)) && !memcmp(from, in->hello.source_gid, sizeof(*from));
}

/* Does the peer use its mapping of our memory? */
enum mapping { MAPS_NOT, MAPS_PERHAPS, MAPS };

static enum mapping mapping_of(const struct rn_qp *qp)
{
	if (!qp->peer || qp->link_failed || rn_peer_said_stream(qp->attr.dest_qp_num, qp->ex.qp_base.qp_num))
		return MAPS_NOT;
	return atomic_load(&qp->peer->state) != RN_PEER_READY || rn_peer_is_mutual(qp->peer) ? MAPS : MAPS_PERHAPS;
}

/* The user that listens on this port, at the address by which processes of this host are reached. */
static bool listener_user(uint32_t qpn, uid_t *user)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons((uint16_t)(qpn >> 8)),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};

	return rn_tcp_listener_user((struct sockaddr *)&address, user);
}

/* This asks the kernel, so no lock is held. */
void rn_tcp_ask_whose(struct rn_tcp *in)
{
	uid_t its, theirs;
	bool is_its = listener_user(in->hello.source_qpn, &its) &&
		      rn_tcp_peer_user(in->source.fd, &theirs) && its == theirs && !rn_is_overflow_user(its);

	in->whose = is_its ? RN_WHOSE_PEERS : RN_WHOSE_OTHERS;
}

static bool is_by_another_path(struct rn_tcp *in, const struct rn_qp *qp)
{
	enum mapping mapping = mapping_of(qp);
	int state;

	if (mapping == MAPS_PERHAPS && in->whose <= RN_WHOSE_ASKED) {
		in->whose = RN_WHOSE_ASKED;
		return true;
	}
	if (mapping == MAPS_NOT || (mapping == MAPS_PERHAPS && in->whose == RN_WHOSE_PEERS))
		return false;
	/* An honest peer may be early, too: while the link is being made or has just been refused. */
	state = atomic_load(&qp->peer->state);
	if (state != RN_PEER_CONNECTING && state != RN_PEER_DEAD)
		rn_warn(RN_WARN_ATTACH, "queue pair %#x: refused a TCP connection that claims to be from its peer, %s",
			qp->ex.qp_base.qp_num, mapping == MAPS ? "which maps its memory" : "but comes from another user");
	return true;
}

/* Check the sequence number, and how often it was wrong before. */
static bool is_in_sequence(struct rn_tcp *in, struct rn_qp *qp, const union ibv_gid *from)
{
	struct rn_tcp_path *streams = qp->tcp;
	bool is_right = in->hello.psn == qp->attr.rq_psn;
	struct rn_attempts *attempts;
	uint64_t now;

	if (!rn_guarded(RN_GUARD_TCP_ATTEMPTS))
		return is_right;
	if (is_right && !streams->its.count && !streams->others.count)
		return true;
	if (rn_gid_is_ours(from) && in->whose <= RN_WHOSE_ASKED) {
		in->whose = RN_WHOSE_ASKED;
		return false;
	}
	now = rn_now_ns();
	attempts = in->whose == RN_WHOSE_OTHERS ? &streams->others : &streams->its;
	if (now - attempts->since_ns >= WINDOW_NS)
		*attempts = (struct rn_attempts){.since_ns = now};
	if (attempts->count < ATTEMPTS && is_right)
		return true;
	if (attempts->count < ATTEMPTS)
		attempts->count++;
	rn_warn(RN_WARN_ATTACH, "queue pair %#x: refused a TCP connection that claims to be from its peer, with %s",
		qp->ex.qp_base.qp_num,
		is_right ? "the right sequence number after too many wrong ones" : "a wrong sequence number");
	return false;
}

bool rn_tcp_is_expected(struct rn_tcp *in, struct rn_qp *qp)
{
	union ibv_gid from;

	if (!rn_state_is_open(atomic_load(&qp->own->generation_state)) || qp->tcp->in || qp->tcp->left ||
	    qp->attr.dest_qp_num != in->hello.source_qpn || !source_of(in, &from) ||
	    !is_from_its_address(in, qp, &from))
		return false;
	if (rn_guarded(RN_GUARD_TCP_ATTACH) && is_by_another_path(in, qp))
		return false;
	return is_in_sequence(in, qp, &from);
}

/* --- who answers --------------------------------------------------------------------------------------------- */

/* Don't look for the reservation of a peer that may be mapped: that takes long. */
void rn_tcp_ask_holder(struct rn_qp *qp)
{
	struct rn_holder holder = {0};
	bool is_ours, uses_tcp;
	uint32_t qpn;

	rn_lock(&qp->sq_lock);
	qpn = qp->attr.dest_qp_num;
	uses_tcp = qp->uses_tcp || (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_DEAD);
	is_ours = rn_ah_is_ours(&qp->attr.ah_attr) &&
		  (uses_tcp || (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_CONNECTING));
	rn_unlock(&qp->sq_lock);
	if (!is_ours)
		return;
	holder.is_known = listener_user(qpn, &holder.user) ||
			  (uses_tcp && rn_tcp_bound_user((uint16_t)(qpn >> 8), &holder.user));
	rn_lock(&qp->sq_lock);
	qp->tcp->holder = holder;
	rn_unlock(&qp->sq_lock);
}

/* On the engine. Look up the listener, not the other end of the connection, which has no user until it is accepted. */
void rn_tcp_ask_listener(struct rn_tcp *out)
{
	struct rn_qp *qp = out->qp;
	uint32_t qpn;
	bool is_known;

	rn_lock(&qp->sq_lock);
	is_known = qp->tcp->holder.is_known;
	qpn = qp->attr.dest_qp_num;
	rn_unlock(&qp->sq_lock);
	if (is_known)
		out->listener.is_known = listener_user(qpn, &out->listener.user);
}

bool rn_tcp_is_holders(struct rn_tcp *out)
{
	const struct rn_holder *holder = &out->qp->tcp->holder, *listener = &out->listener;

	if (!holder->is_known || !rn_guarded(RN_GUARD_TCP_HOLDER))
		return true;
	if (listener->is_known && listener->user != holder->user)
		rn_warn(RN_WARN_ATTACH,
			"queue pair %#x: its peer's TCP port %u belonged to user %u and now belongs to user %u: not trusted",
			out->qp->ex.qp_base.qp_num, out->qp->attr.dest_qp_num >> 8, holder->user, listener->user);
	return listener->is_known && listener->user == holder->user;
}
