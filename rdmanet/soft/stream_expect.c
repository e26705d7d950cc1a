/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is whoever comes by TCP the peer that a queue pair was told of?  And is it whoever answers there?
 *
 * It has to be that of the numbers, from the address, with the sequence number that the queue pair expects (and the
 * secret, if there is one: stream_hello.c).  Numbers and addresses are no secrets on a host, and a sequence number
 * has 24 bits.  So there is more to it:
 *
 * Who maps us doesn't come by TCP.  A peer on this host, with a link either way, is expected in its mapping of our
 * arena and nowhere else, unless it has said over its proven link that this queue pair of its goes by TCP (peers.h).
 * While our link is being made nobody knows yet: then it is refused, and comes again.  Where ours stands and its own
 * hasn't come it may be unable to make one.  Its user is ours then, so nobody is let in whose socket isn't its user's.
 *
 * Wrong sequence numbers are counted, and after ATTEMPTS of them nobody from there is let in before ten seconds are
 * over, with the right one neither; so a search takes months.  The queue pair itself isn't closed for it,
 * or strangers could close what they like.  Nor do those of this host keep out its peer, though all of them come from
 * one address: the user of the process that has the peer's port is counted apart from all the others.
 *
 * Who answers at the peer's port may be another, too: the peer may have died, and its port is anybody's then.  On this
 * host the kernel knows whose it is.  Who has it when the queue pair is told of the peer, by a listener or by the
 * reservation that the peer has before its number is known, has it when we connect; else nothing is said there.  The
 * two are one user's (peer_port.c), also of a process that has given up privileges.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "gid.h"
#include "guard.h"
#include "log.h"
#include "sock_diag.h"
#include "soft.h"

enum { ATTEMPTS = 8 };
static const uint64_t WINDOW_NS = 10 * 1000000000ull;

/* Where it comes from: false, if that can't be known any more. */
static bool source_of(const struct rn_stream *in, union ibv_gid *from)
{
	struct sockaddr_storage address;
	socklen_t length = sizeof(address);

	if (getpeername(in->source.fd, (struct sockaddr *)&address, &length))
		return false;
	rn_gid_of((struct sockaddr *)&address, from);
	return true;
}

static bool is_from_its_address(const struct rn_stream *in, const struct rn_qp *qp, const union ibv_gid *from)
{
	const union ibv_gid *dgid = &qp->attr.ah_attr.grh.dgid;

	if (rn_gid_is_ours(from))
		return rn_address_is_ours(&qp->attr.ah_attr);
	return !memcmp(from, dgid, sizeof(*from)) && !memcmp(from, in->hello.source_gid, sizeof(*from));
}

/* Will its requests come by its mapping? */
enum mapping { MAPS_NOT, MAPS_PERHAPS, MAPS };

static enum mapping mapping_of(const struct rn_qp *qp)
{
	if (!qp->peer || qp->link_failed || rn_peer_said_stream(qp->attr.dest_qp_num, qp->ex.qp_base.qp_num))
		return MAPS_NOT;
	return atomic_load(&qp->peer->state) != RN_PEER_READY || rn_peer_is_mutual(qp->peer) ? MAPS : MAPS_PERHAPS;
}

/* Who listens on this port, where those of this host are reached. */
static bool listener_user(uint32_t qpn, uid_t *user)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons((uint16_t)(qpn >> 8)),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};

	return rn_tcp_listener_user((struct sockaddr *)&address, user);
}

/* Only the kernel knows, so no lock is held meanwhile. */
void rn_stream_ask_whose(struct rn_stream *in)
{
	uid_t its, theirs;
	bool is_its = listener_user(in->hello.source_qpn, &its) &&
		      rn_tcp_peer_user(in->source.fd, &theirs) && its == theirs && !rn_is_overflow_user(its);

	in->whose = is_its ? RN_WHOSE_PEERS : RN_WHOSE_OTHERS;
}

static bool is_by_another_way(struct rn_stream *in, const struct rn_qp *qp)
{
	enum mapping mapping = mapping_of(qp);

	if (mapping == MAPS_PERHAPS && in->whose <= RN_WHOSE_ASKED) {
		in->whose = RN_WHOSE_ASKED;
		return true;
	}
	if (mapping == MAPS_NOT || (mapping == MAPS_PERHAPS && in->whose == RN_WHOSE_PEERS))
		return false;
	if (atomic_load(&qp->peer->state) != RN_PEER_CONNECTING)
		rn_warn(RN_WARN_ATTACH, "queue pair %06x: a TCP connection in the name of its peer, %s: refused",
			qp->ex.qp_base.qp_num, mapping == MAPS ? "who maps it" : "by another user");
	return true;
}

/* The sequence number, and how often it was wrong. */
static bool is_in_sequence(struct rn_stream *in, struct rn_qp *qp, const union ibv_gid *from)
{
	struct rn_streams *streams = &qp->streams;
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
	rn_warn(RN_WARN_ATTACH, "queue pair %06x: a TCP connection in its peer's name, with %s: refused",
		qp->ex.qp_base.qp_num,
		is_right ? "the right sequence number after too many wrong ones" : "a wrong sequence number");
	return false;
}

bool rn_stream_is_expected(struct rn_stream *in, struct rn_qp *qp)
{
	union ibv_gid from;

	if (!rn_life_is_open(atomic_load(&qp->own->life)) || qp->streams.in || qp->streams.left ||
	    qp->attr.dest_qp_num != in->hello.source_qpn || !source_of(in, &from) ||
	    !is_from_its_address(in, qp, &from))
		return false;
	if (rn_guarded(RN_GUARD_TCP_ATTACH) && is_by_another_way(in, qp))
		return false;
	return is_in_sequence(in, qp, &from);
}

/* --- who answers --------------------------------------------------------------------------------------------- */

/* Of one that may be mapped a reservation isn't asked for: that takes long. */
void rn_stream_ask_holder(struct rn_qp *qp)
{
	struct rn_holder holder = {0};
	bool is_ours, is_stream;
	uint32_t qpn;

	rn_lock(&qp->sq_lock);
	qpn = qp->attr.dest_qp_num;
	is_stream = qp->is_stream || (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_DEAD);
	is_ours = rn_address_is_ours(&qp->attr.ah_attr) &&
		  (is_stream || (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_CONNECTING));
	rn_unlock(&qp->sq_lock);
	if (!is_ours)
		return;
	holder.is_known = listener_user(qpn, &holder.user) ||
			  (is_stream && rn_tcp_bound_user((uint16_t)(qpn >> 8), &holder.user));
	rn_lock(&qp->sq_lock);
	qp->streams.holder = holder;
	rn_unlock(&qp->sq_lock);
}

/* On the engine. The other end of the connection isn't asked for: until it is accepted it has no user. */
void rn_stream_ask_listener(struct rn_stream *out)
{
	struct rn_qp *qp = out->qp;
	uint32_t qpn;
	bool is_known;

	rn_lock(&qp->sq_lock);
	is_known = qp->streams.holder.is_known;
	qpn = qp->attr.dest_qp_num;
	rn_unlock(&qp->sq_lock);
	if (is_known)
		out->listener.is_known = listener_user(qpn, &out->listener.user);
}

bool rn_stream_is_holders(struct rn_stream *out)
{
	const struct rn_holder *holder = &out->qp->streams.holder, *listener = &out->listener;

	if (!holder->is_known || !rn_guarded(RN_GUARD_TCP_HOLDER))
		return true;
	if (listener->is_known && listener->user != holder->user)
		rn_warn(RN_WARN_ATTACH,
			"queue pair %06x: its peer's TCP port %u was user %u's, and is user %u's now: not trusted",
			out->qp->ex.qp_base.qp_num, out->qp->attr.dest_qp_num >> 8, holder->user, listener->user);
	return listener->is_known && listener->user == holder->user;
}
