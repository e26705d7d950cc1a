/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the connection manager begins, when the first context is wanted (context.c), and what it does when the engine stops
 * and in a forked child.
 */
#include "cm/wire.h"
#include "peer/peer.h"

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
	pthread_mutex_init(&rn_cm_lock, NULL);
	pthread_cond_init(&rn_cm_acked, NULL);
	rn_cm_event_forked();
	rn_cm_wire_forked();
	rn_cm_handover_forked();
	rn_cm_link_forked();
	rn_cm_first_forked();
	rn_cm_listeners_forked();
	rn_cm_listen_forked();
}

/* It was ended by iWARP's rules. */
static void disconnect_terminated(struct ibv_qp *qp)
{
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_wire_disconnect_qp(qp);
	rn_cm_unlock();
}

static void hear_link(const void *process, uint32_t what, uint64_t token, const void *message, size_t length)
{
	if (what == RN_CM_LINK_ASKS)
		rn_cm_asked(process, token, message, length);
	else
		rn_cm_link_hear(process, what, token, message, length);
}

static void start(void)
{
	rn_cm_wire_register(&rn_cm_wire_calls);
	rn_at_qp_terminated(disconnect_terminated);
	rn_peers_register_connections(hear_link);
	rn_peers_start(); /* a wire lets go of the peer that it watches */
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

__attribute__((constructor)) static void register_start(void)
{
	rn_cm_context_at_first(start);
}
