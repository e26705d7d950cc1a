/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strangers: connections that were accepted and have not said yet who they are.
 *
 * The connection manager, the queue pairs' TCP ports and the Unix links each accept before they know whom. All of
 * them together keep at most a quarter of the descriptors that the process may have, and never more than STRANGERS_MAX:
 * a stranger's memory is a few KiB, 36 at most. One too many makes another leave: the eldest of the source that has most.
 * So does a process that has no descriptor left. Who speaks at once is a stranger for milliseconds, and never the eldest.
 *
 * All of it runs on the engine.
 */
#ifndef RDMANET_SOFT_STRANGER_H
#define RDMANET_SOFT_STRANGER_H

#include <stdbool.h>
#include <stdint.h>

#include "verbs.h"

struct rn_stranger {
	union ibv_gid from;                  /* its address; of who comes by a Unix socket: its user */
	void (*leave)(struct rn_stranger *); /* close it: it is forgotten already */
	struct rn_stranger *next, **link;    /* stranger.c's; link is NULL for who is none */
	uint16_t bucket;
};

/* Is one from now on. Others may leave, but not this one. */
void rn_stranger_add(struct rn_stranger *);
/* Has said who it is, or goes; nothing for who is none. */
void rn_stranger_forget(struct rn_stranger *);
/* No descriptor is left: make one leave. False: there is none. Whoever is called back on behalf of a stranger forgets
 * that one first, or it might be the one. */
bool rn_stranger_make_room(void);
/* The source of a Unix socket's other end: its user. */
union ibv_gid rn_stranger_user(int fd);

#endif
