/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The switches: what the environment's RDMANET_SOFT_* variables say, read in one place.
 *
 * They are read anew whenever the first context of a process opens, so a program (or a test) may
 * set them until then.  A value that makes no sense is not guessed at: a line on standard error
 * says what would, and the device doesn't open.  Nor does it with a name that nobody knows: it is one that was
 * mistyped, and a protection that was asked for is not there.  The secret alone is kept for the life of the
 * process: see secret.h.
 *
 * docs/environment.md explains them to users.
 */
#ifndef RDMANET_SOFT_SETTINGS_H
#define RDMANET_SOFT_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

enum rn_transport {
	RN_TRANSPORT_AUTO,   /* direct where the peer lets us, else by stream */
	RN_TRANSPORT_DIRECT, /* never by stream to a peer of this host */
	RN_TRANSPORT_STREAM, /* always, within this process too */
};

struct rn_settings {
	uint64_t defer_ns; /* DEFER, given in microseconds: execute that much later, on the engine */
	bool no_cma;       /* CMA=0: no process_vm_readv and process_vm_writev */
	bool lenient;      /* ARM=lenient: see cq.c */
	bool adopt;        /* ADOPT=1: see adopt.c */
	bool ptracer;      /* PTRACER=1: PR_SET_PTRACER_ANY, for Yama */
	bool iwarp;        /* RULES=iwarp */
	bool infiniband;   /* LINK=infiniband */
	bool padded;       /* PADDED=0: private data arrive with the length they were sent with; iWARP's way */
	uint64_t silence_ms;    /* SILENCE: how long a stranger on a socket may say nothing */
	uint64_t cm_timeout_ms; /* CM_TIMEOUT: how long the connection manager waits for an answer */
	uint64_t timewait_ms;   /* TIMEWAIT: 0, no TIMEWAIT_EXIT events */
	uint64_t transport;     /* TRANSPORT: enum rn_transport */
	bool is_local;          /* RDMANET_SOFT=local: no TCP beyond this host */
	bool has_secret;        /* SECRET, SECRET_FILE: once true, always true; secret.h has it */
};
extern struct rn_settings rn_settings;

/* All of them, now. 0, or EINVAL: what was wrong has been said, and the old ones stay. */
int rn_settings_read(void);
/* What RULES would say now, for whoever only looks at the device: nothing is read for good, and nothing said. */
bool rn_settings_are_iwarp(void);
/* For those who may be asked before any context was opened: reads what was never read. */
void rn_settings_need(void);
void rn_settings_forked(void);

#endif
