/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strangers: connections that were accepted and have not said yet who they are, or that they get on.
 *
 * The connection manager, the queue pairs' TCP ports and the Unix links each accept before they know whom. All of
 * them together keep at most a quarter of the descriptors that the process may have, and never more than STRANGERS_MAX:
 * a stranger's memory is a few KiB, 36 at most. One too many makes another leave: the eldest of the source that has
 * most. So does a process that has no descriptor left. Who speaks at once is a stranger for milliseconds, and never the
 * eldest.
 *
 * A source is a user of this host; this host itself with all its addresses (a loopback network has 2^24, and any user
 * may take them); another host's address of IPv4; or 48 bits of IPv6, the network that one customer is given.
 *
 * Whoever has proven that it knows the secret, or was accepted and owes the last word of the handshake, is of a second
 * kind, with a limit of its own that is the same: so silence drives nobody out who has spoken, nor the other way round.
 * These have a fifth of the time that silence may last before they may have to leave: an honest burst is over by then,
 * and may be of any size. Where no descriptor is left the silent leave first.
 *
 * All of it runs on the engine.
 */
#ifndef RDMANET_SOFT_STRANGER_H
#define RDMANET_SOFT_STRANGER_H

#include <stdbool.h>
#include <stdint.h>

#include "verbs.h"

enum rn_stranger_kind {
	RN_STRANGER_SILENT,
	RN_STRANGER_KNOWN,
	RN_STRANGER_KINDS,
};

struct rn_stranger {
	union ibv_gid from;                  /* its address; of who comes by a Unix socket: its user */
	void (*leave)(struct rn_stranger *); /* close it: it is forgotten already */
	/* stranger.c's */
	struct rn_stranger *next, **link; /* link is NULL for who is none */
	uint64_t since_ns;
	uint16_t bucket;
	uint8_t kind;
};

/* Is one of this kind from now on. Others may leave, but not this one. */
void rn_stranger_add(struct rn_stranger *, enum rn_stranger_kind kind);
/* Has said who it is, or goes; nothing for who is none. */
void rn_stranger_forget(struct rn_stranger *);
/* No descriptor is left: make one leave. False: there is none. Whoever is called back on behalf of a stranger forgets
 * that one first, or it might be the one. */
bool rn_stranger_make_room(void);
/* The source of a Unix socket's other end: its user; of our own user, its process. */
union ibv_gid rn_stranger_user(int fd);

#endif
