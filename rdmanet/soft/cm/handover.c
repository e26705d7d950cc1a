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
 * with it are accepted only from the process for which the connection is watched.  So no process can end another's
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
#define _GNU_SOURCE
#include "base/guard.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <sys/random.h>

enum { BUCKETS = 1024, WORD_MS = 1000, YOUNG = 64, YOUNG_MS = 100 };

/* Wires by our token, under rn_cm_lock. */
static struct rn_cm_wire *handed[BUCKETS];
static unsigned young; /* how many wires are */

static struct rn_cm_wire *find(uint64_t token)
{
	struct rn_cm_wire *wire = handed[token % BUCKETS];

	while (wire && wire->token != token)
		wire = wire->next_handed;
	return wire;
}

static void grow_up(struct rn_cm_wire *wire)
{
	young -= wire->is_young;
	wire->is_young = false;
}

void rn_cm_handover_forget(struct rn_cm_wire *wire)
{
	struct rn_cm_wire **at = &handed[wire->token % BUCKETS];

	grow_up(wire);
	if (!wire->token)
		return;
	while (*at != wire)
		at = &(*at)->next_handed;
	*at = wire->next_handed;
	wire->token = 0;
}

void rn_cm_handover_forked(void)
{
	memset(handed, 0, sizeof handed);
	young = 0;
}

/* Without random bytes the connection keeps its socket. */
static void say_token(struct rn_cm_wire *wire)
{
	struct rn_cm_handover handover;

	grow_up(wire);
	if (getrandom(&wire->token, sizeof wire->token, GRND_NONBLOCK) != sizeof wire->token || !wire->token) {
		wire->token = 0;
		return;
	}
	wire->next_handed = handed[wire->token % BUCKETS];
	handed[wire->token % BUCKETS] = wire;
	memcpy(handover.token, &wire->token, sizeof handover.token);
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

bool rn_cm_handover_timer(struct rn_cm_wire *wire)
{
	if (!wire->is_young)
		return false;
	say_token(wire);
	return true;
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
	if (moves && rn_peer_tell_connection(wire->death.peer, RN_CM_MOVED, wire->peer_token)) {
		wire->moved = true;
		if (wire->source.fd >= 0)
			shutdown(wire->source.fd, SHUT_WR);
		rn_cm_handover_flush(wire);
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

/* After the last word nothing is left: a link has no end to wait for. */
void rn_cm_handover_flush(struct rn_cm_wire *wire)
{
	const struct rn_cm_header *header = (const void *)wire->out;
	unsigned count;
	uint8_t types[sizeof wire->out / sizeof *header];

	pthread_mutex_lock(&rn_cm_lock);
	count = wire->over ? 0 : wire->out_length / sizeof *header;
	for (unsigned i = 0; i < count; i++)
		types[i] = header[i].type;
	wire->out_length = 0;
	pthread_mutex_unlock(&rn_cm_lock);
	for (unsigned i = 0; i < count; i++)
		rn_peer_tell_connection(wire->death.peer, types[i], wire->peer_token);
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && wire->hangs_up && !wire->out_length)
		rn_cm_wire_finish(wire);
	pthread_mutex_unlock(&rn_cm_lock);
}

/* Heard by the wire's task: this is the peers' turn. */
void rn_cm_handover_word(const void *process, uint32_t what, uint64_t token)
{
	struct rn_cm_wire *wire;

	pthread_mutex_lock(&rn_cm_lock);
	wire = token ? find(token) : NULL;
	if (wire && wire->watched && rn_peer_process(wire->death.peer) == process && what <= RN_CM_MOVED) {
		wire->words |= (uint16_t)(1u << what);
		rn_task_post(&wire->task);
	}
	pthread_mutex_unlock(&rn_cm_lock);
}

void rn_cm_handover_hear(struct rn_cm_wire *wire)
{
	static const uint8_t in_order[] = {RN_CM_MOVED, RN_CM_DREQ, RN_CM_DREP};

	rn_cm_lock_to_tell();
	for (unsigned i = 0; i < sizeof in_order; i++) {
		if (wire->over || !(wire->words & 1u << in_order[i]))
			continue;
		wire->words &= (uint16_t)~(1u << in_order[i]);
		rn_cm_wire_hear(wire, in_order[i]);
	}
	if (!wire->over && wire->words)
		rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "its process said what only the socket can say");
	rn_cm_unlock_and_tell();
}
