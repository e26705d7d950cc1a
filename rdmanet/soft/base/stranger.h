/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strangers: accepted connections that have not identified themselves yet, or have yet to show progress.
 *
 * The connection manager, the queue pairs' TCP ports and the Unix links each accept connections before they know from
 * whom. All of them together keep at most a quarter of the descriptors that the process may have, and never more than
 * STRANGERS_MAX: a stranger takes a few KiB of memory, 36 at most. If there is one too many, or the process has no
 * descriptor left, one is closed: the oldest of the source that has the most. A connection that speaks at once is a
 * stranger for milliseconds, and never the eldest. One that still owes its proof of the secret remains a
 * stranger for one more round trip. It is spared while most strangers of its source have said nothing: then a silent
 * one is closed.
 *
 * A source is a user of this host, at a Unix socket and, where the kernel tells whose socket is at the other end, by
 * TCP; this host itself with all its addresses, for whom it does not tell (a loopback network has 2^24, and any user may
 * take them); another host's address of IPv4; or 48 bits of IPv6, the network that one customer is given. Sources by
 * TCP and users at Unix sockets are two groups: who leaves is of the larger one, so neither crowd displaces the other.
 *
 * A connection that has proven that it knows the secret, or was accepted and owes the last word of the handshake, is
 * of a second kind. That has a limit of its own, of the same size, so silent connections never displace those that
 * have spoken, nor the other way round. Those of the second kind may be closed only after a fifth of the time allowed
 * for silence: an honest burst, of any size, is over by then. If no descriptor is left, silent ones are closed first.
 *
 * All of it runs on the engine.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "verbs.h"

enum rn_stranger_kind {
	RN_STRANGER_SILENT,
	RN_STRANGER_KNOWN,
	RN_STRANGER_KINDS,
};

struct rn_stranger {
	union ibv_gid from;                  /* its address, or rn_stranger_user() or rn_stranger_by_tcp() of its socket */
	void (*leave)(struct rn_stranger *); /* close it: it is forgotten already */
	bool has_spoken;                     /* a whole first message has come */
	/* stranger.c's */
	struct rn_stranger *next, **link; /* link is NULL if it is not a stranger */
	uint64_t since_ns;
	uint16_t bucket;
	uint8_t kind;
};

/* Make it a stranger of this kind. Others may be closed for it, but not this one. */
void rn_stranger_add(struct rn_stranger *, enum rn_stranger_kind kind);
/* It has identified itself, or is being closed. Does nothing if it is not a stranger. */
void rn_stranger_forget(struct rn_stranger *);
/* No descriptor is left: close a stranger. False: there is none. A callback of a stranger must forget it first, or it
 * might be the one that is closed. */
bool rn_stranger_make_room(void);
/* The source of a Unix socket's other end: its user, or, if that is our own, its process. */
union ibv_gid rn_stranger_user(int fd);
/* The source of a TCP connection from this address: its user, if it comes from this host and the kernel tells. This asks
 * the kernel, so no lock is held. */
union ibv_gid rn_stranger_by_tcp(int fd, const struct sockaddr *far);
/* The source of what comes over a link from this process, which is our own user's, and asks for a listener that has a
 * name, or a TCP port: as if it had come by that. */
union ibv_gid rn_stranger_by_link(int pid, bool of_name);
/* Whose is it, and by which way did it come? Also when it is no stranger any more. */
enum rn_stranger_way {
	RN_STRANGER_UNKNOWN, /* from another host, or the kernel does not tell */
	RN_STRANGER_BY_TCP,
	RN_STRANGER_BY_NAME, /* the listener's, by a Unix socket or by a link */
};
enum rn_stranger_way rn_stranger_way(const union ibv_gid *from, uid_t *user);
