/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first connection to a listener of this host, and those that are begun before the two processes are linked.
 *
 * The first one goes by a socket, and links the processes (peer/peer.h) when it is accepted.  Those that are begun
 * meanwhile wait for the link, and are then asked for by it (ask.c).  By a socket each of them would take a descriptor
 * and an accept, and both engines several turns: a program that makes many connections at once makes one that way.
 *
 * They wait for rn_cm_first_wait_ms at most, from when the first one began, and no longer when it is clear that it
 * links nothing: it is refused, tried again or closed; or the processes may not map each other.  Then each goes by a
 * socket.  A first connection that takes longer is waited for no more, and no other in its place.
 *
 * All of this runs on the engine, or a thread that stands in for it.
 */
#include "base/gid.h"
#include "cm/wire.h"
#include "peer/peer.h"

enum { FIRSTS = 16 };

uint64_t rn_cm_first_wait_ms = 250;

static struct rn_cm_wire *firsts[FIRSTS];

static struct rn_cm_wire *first_to(const struct rn_cm_wire *wire)
{
	for (unsigned i = 0; i < FIRSTS; i++)
		if (firsts[i] && firsts[i]->by_name_alone == wire->by_name_alone &&
		    !memcmp(&firsts[i]->dst, &wire->dst, sizeof wire->dst))
			return firsts[i];
	return NULL;
}

static bool is_on_this_host(const struct rn_cm_wire *wire)
{
	union ibv_gid gid;

	rn_gid_of((const struct sockaddr *)&wire->dst, &gid);
	return rn_gid_is_ours(&gid);
}

static void begin(struct rn_cm_wire *wire)
{
	unsigned at = 0;

	while (at < FIRSTS && firsts[at])
		at++;
	if (at == FIRSTS || rn_settings.transport == RN_TRANSPORT_STREAM || !is_on_this_host(wire))
		return;
	firsts[at] = wire;
	wire->is_first = true;
	wire->awaited_until_ns = rn_now_ns() + rn_cm_first_wait_ms * 1000000;
}

void rn_cm_first_leave(struct rn_cm_wire *wire)
{
	if (!wire->awaits_first)
		return;
	rn_list_del(&wire->awaiting);
	wire->awaits_first = wire->again = false;
}

bool rn_cm_first_is_awaited(struct rn_cm_wire *wire)
{
	struct rn_cm_wire *first;
	uint64_t now;

	if (wire->is_first || wire->has_awaited_first || !rn_cm_ask_is_possible(wire))
		return false;
	first = first_to(wire);
	if (!first) {
		begin(wire);
		return false;
	}
	now = rn_now_ns();
	if (now >= first->awaited_until_ns)
		return false;
	rn_list_add(&first->awaiting, &wire->awaiting);
	wire->awaits_first = wire->has_awaited_first = true;
	wire->again = true;
	rn_timer_set(&wire->timer, first->awaited_until_ns - now);
	return true;
}

void rn_cm_first_forget(struct rn_cm_wire *wire)
{
	rn_cm_first_leave(wire);
	if (!wire->is_first)
		return;
	wire->is_first = false;
	for (unsigned i = 0; i < FIRSTS; i++)
		if (firsts[i] == wire)
			firsts[i] = NULL;
	while (!rn_list_empty(&wire->awaiting)) {
		struct rn_cm_wire *next = RN_OWNER(wire->awaiting.next, struct rn_cm_wire, awaiting);

		rn_cm_first_leave(next);
		rn_timer_cancel(&next->timer);
		rn_task_post(&next->task);
	}
}

void rn_cm_first_look(struct rn_cm_wire *wire)
{
	bool is_answered;

	if (!wire->is_first)
		return;
	pthread_mutex_lock(&rn_cm_lock);
	is_answered = wire->heard & 1u << RN_CM_REP;
	pthread_mutex_unlock(&rn_cm_lock);
	if (is_answered && (!wire->watched || rn_peer_is_met(wire->death.peer->port)))
		rn_cm_first_forget(wire);
}

void rn_cm_first_forked(void)
{
	memset(firsts, 0, sizeof firsts);
}
