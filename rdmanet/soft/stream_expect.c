/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is whoever comes by TCP the peer that a queue pair was told of?
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

/* Only the kernel knows, so no lock is held meanwhile. */
void rn_stream_ask_whose(struct rn_stream *in)
{
	struct sockaddr_in listener = {
		.sin_family = AF_INET,
		.sin_port = htons(in->hello.source_qpn >> 8),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	uid_t its, theirs;
	bool is_its = rn_tcp_listener_user((struct sockaddr *)&listener, &its) &&
		      rn_tcp_peer_user(in->source.fd, &theirs) && its == theirs;

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
