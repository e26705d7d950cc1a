/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The settings: the environment's RDMANET_SOFT_* variables, read in one place.
 *
 * They are read anew whenever the first context of a process opens, so a program (or a test) may
 * set them until then.  A wrong value is not guessed at: a line on standard error says what is
 * expected, and the device does not open.  An unknown name is refused in the same way: it may be mistyped, and a
 * protection that the user asked for would be missing.  Only the secret is kept for the life of the process: see
 * secret.h.
 *
 * docs/environment.md explains them to users.
 */
#pragma once

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
	bool lenient;      /* ARM=lenient: see objects/cq.c */
	bool remap;        /* ADOPT=1: see shm/remap.c */
	bool ptracer;      /* PTRACER=1: PR_SET_PTRACER_ANY, for Yama */
	bool iwarp;        /* RULES=iwarp */
	bool infiniband;   /* LINK=infiniband */
	bool log;          /* LOG=1: lines for debugging the device; see log.h */
	bool padded;       /* PADDED=0: private data arrive with the length that was sent, as on iWARP */
	uint64_t silence_ms;    /* SILENCE: how long a stranger on a socket may be silent */
	uint64_t cm_timeout_ms; /* CM_TIMEOUT: how long the connection manager waits for an answer */
	uint64_t timewait_ms;   /* TIMEWAIT: 0, no TIMEWAIT_EXIT events */
	uint64_t transport;     /* TRANSPORT: enum rn_transport */
	bool is_local;          /* RDMANET_SOFT=local: no TCP beyond this host */
	bool has_secret;        /* SECRET, SECRET_FILE: once true, always true; secret.h has it */
};
extern struct rn_settings rn_settings;

/* Read all of them now. 0, or EINVAL: the errors have been written, and the old values stay. */
int rn_settings_read(void);
/* The present value of RULES, for callers that only list the device: nothing is kept, and no error written. */
bool rn_settings_are_iwarp(void);
/* For callers that may run before any context is opened: read the settings if they were never read. */
void rn_settings_need(void);
void rn_settings_forked(void);
