/* SPDX-License-Identifier: Apache-2.0 */
/*
 * iWARP's rules, with RDMANET_SOFT_RULES=iwarp: what a program that was only tried on InfiniBand or RoCE
 * falls over on adapters that speak RDMA over TCP.
 *
 *   - There is no immediate data, there are no atomics, and a READ has one scatter entry.  There are reliable
 *     connections and nothing else: no datagrams, no address handles, no memory windows.
 *   - Nothing is retried.  A SEND that finds no receive posted ends the connection: it has completed well
 *     when TCP took it, the queue pairs of both sides go to ERR with QP_FATAL, and the
 *     connection manager says DISCONNECTED.
 *   - The side that connects speaks first.  What the accepting side sends before it has heard from the
 *     other ends the connection as well.
 *   - Private data arrive with the length they were sent with.
 *
 * Milder than an adapter: queue pairs can be connected by hand, too, and their addresses are RoCE's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "faults/fault.h"
#include "verbs.h"

/* What a queue pair has of it. */
struct rn_qp_iwarp {
	bool is_passive; /* the accepting side's, and has not heard from its peer */
	_Atomic bool is_terminated; /* the connection has ended, and the connection manager has yet to be told */
	uint32_t busy_before, done_before; /* the peer's words when it was let in */
};

/* May this be posted? 0 or errno. */
int rn_iwarp_check(const struct ibv_send_wr *wr);
/* Is there such a call? */
bool rn_iwarp_has(enum rn_call call);
