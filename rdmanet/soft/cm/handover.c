/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handing a connection over, from its socket to the links between the two processes.
 *
 * Two processes that map each other's memory have links (peer/peer.h).  A connection between them needs its socket only
 * until it is established: DREQ and DREP can go over the links, and there the peer's death shows, too.  So it costs no
 * descriptor.
 *
 *      A                                                 B
 *      HANDOVER, A's token  ---------- socket ---------->      "this is my name for the connection", from a
 *                           <--------- socket ----------  HANDOVER, B's token      side that is established and linked
 *      MOVED, B's token     ---------- A's link -------->      "further messages come this way"
 *                           <--------- B's link --------  MOVED, A's token
 *
 * A side that has sent MOVED shuts down its half of the socket, and a side that sees the socket's end closes it.
 *
 * Identity.  The peer at the socket names its process by its queue pair's number; the peer at the link has proven its
 * process.  MOVED shows that they are the same: a token is 64 random bits that went over the socket only, and messages
 * with it are accepted only from the process for which the connection is watched (link.c).  So no process can end another's
 * connection, or leave one behind in the name of a process that does not know of it.
 *
 * Order.  MOVED is sent when the kernel has taken everything that went to the socket; then the socket is shut down.  If
 * its end is seen before MOVED, we wait a second for MOVED.  If MOVED comes before the socket has been read, a DREQ may
 * be in it, so the socket is read to its end.  A side that disconnects before it has sent MOVED uses the socket, and
 * the answer comes over the link if the other side has moved.
 *
 * When.  To hand over takes about as many system calls as to connect.  So a connection keeps its socket while it is
 * young, and one that ends soon is never handed over.  At most YOUNG of them have a socket for that reason, so a program
 * that makes many connections at once does not run out of descriptors.
 *
 * All of this runs on the engine.
 */
#include "base/guard.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <sys/random.h>

enum { WORD_MS = 1000, YOUNG = 64, YOUNG_MS = 100 };

static unsigned young; /* how many wires are: under rn_cm_lock */

static void grow_up(struct rn_cm_wire *wire)
{
	young -= wire->is_young;
	wire->is_young = false;
}

void rn_cm_handover_forget(struct rn_cm_wire *wire)
{
	grow_up(wire);
}

void rn_cm_handover_forked(void)
{
	young = 0;
}

/* Without random bytes the connection keeps its socket. */
static void say_token(struct rn_cm_wire *wire)
{
	struct rn_cm_handover handover;
	uint64_t token;

	grow_up(wire);
	if (getrandom(&token, sizeof token, GRND_NONBLOCK) != sizeof token || !token)
		return;
	rn_cm_wire_name(wire, token);
	memcpy(handover.token, &token, sizeof handover.token);
	rn_cm_wire_append(wire, RN_CM_HANDOVER, &handover);
}

void rn_cm_handover_begin(struct rn_cm_wire *wire)
{
	if (!wire->watched || !rn_peer_is_linked(wire->death.peer) || !rn_guarded(RN_GUARD_HANDOVER))
		return;
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && wire->phase == RN_CM_WIRE_ESTABLISHED && !wire->token) {
		if (wire->peer_token || (young == YOUNG && !wire->is_young)) {
			say_token(wire);
		} else if (!wire->is_young) {
			wire->is_young = true;
			young++;
			rn_cm_wire_set_timer_ms(wire, YOUNG_MS);
		}
	}
	pthread_mutex_unlock(&rn_cm_lock);
}

void rn_cm_handover_timer(struct rn_cm_wire *wire)
{
	if (wire->is_young)
		say_token(wire);
}

/* With rn_cm_lock held: nothing is left to send by the socket, or there is none any more. */
static bool can_move(const struct rn_cm_wire *wire)
{
	if (wire->over || wire->moved || !wire->token || !wire->peer_token)
		return false;
	return wire->source.fd < 0 ||
	       (wire->phase == RN_CM_WIRE_ESTABLISHED && !wire->out_length && !wire->sending_length);
}

void rn_cm_handover_go_on(struct rn_cm_wire *wire)
{
	bool moves;

	pthread_mutex_lock(&rn_cm_lock);
	moves = can_move(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	if (moves && rn_cm_link_say_moved(wire)) {
		wire->moved = true;
		if (wire->source.fd >= 0)
			shutdown(wire->source.fd, SHUT_WR);
		rn_cm_link_flush(wire);
	}
}

/* What has not gone by the socket goes by the link; but not our token, which the peer has if it has moved. */
static void say_again(struct rn_cm_wire *wire)
{
	bool is_unsaid = wire->out_length || wire->sending_length;
	struct rn_cm_header header;

	wire->out_length = wire->sending_length = 0;
	if (is_unsaid && wire->phase == RN_CM_WIRE_DREQ_SENT)
		rn_cm_wire_append(wire, RN_CM_DREQ, &header);
}

bool rn_cm_handover_is_cause(struct rn_cm_wire *wire)
{
	bool is;

	pthread_mutex_lock(&rn_cm_lock);
	is = !wire->over && wire->token && wire->peer_token &&
	     (wire->phase == RN_CM_WIRE_ESTABLISHED || wire->phase == RN_CM_WIRE_DREQ_SENT);
	if (is && !wire->moved)
		say_again(wire);
	if (is && !wire->peer_moved && wire->phase == RN_CM_WIRE_ESTABLISHED)
		rn_cm_wire_set_timer_ms(wire, WORD_MS);
	pthread_mutex_unlock(&rn_cm_lock);
	if (is)
		rn_cm_wire_close_socket(wire);
	return is;
}
