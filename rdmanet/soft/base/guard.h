/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Guards: the checks that keep others out, each by its name.
 *
 * In the library that is installed every guard is on, and rn_guarded() is the constant true. The tests of
 * tests/security build the device a second time with -DRDMANET_UNGUARDED. There RDMANET_SOFT_WITHOUT=name,name
 * switches guards off, so that each attack is first seen to work, and then seen to fail by that one check.
 */
#pragma once

#include <stdbool.h>

enum rn_guard {
	RN_GUARD_NAME_OWNER,    /* a listener's name is believed by the user who owns it: cm/name.c */
	RN_GUARD_NAME_PROCESS,  /* and, if that is our own, by which process: cm/name.c */
	RN_GUARD_NAME_LIFE,     /* which still lives: cm/name.c */
	RN_GUARD_TCP_PROGRAM,   /* a TCP program of this host gets no request: cm/socket.c */
	RN_GUARD_CM_SECRET,     /* the secret is asked for by the connection manager: cm/secret.c */
	RN_GUARD_RESERVE,       /* the last descriptors stay free, and newcomers are refused: cm/listen.c */
	RN_GUARD_ACCEPT_REST,   /* who cannot accept, for want of descriptors, tries again later: cm/listen.c, peer/port.c */
	RN_GUARD_HANDOVER,      /* connections of linked processes keep no descriptors: cm/handover.c, cm/ask.c, cm/asked.c */
	RN_GUARD_LINK_PROOF,    /* both ends of a link show that they may trace each other: peer/proof.c */
	RN_GUARD_TCP_NO_ARENA,  /* where all goes by TCP the arena is given to nobody: peer/inbound.c */
	RN_GUARD_TCP_ATTACH,    /* a mapped queue pair takes no TCP connection: tcp/tcp.c */
	RN_GUARD_TCP_ATTEMPTS,  /* wrong sequence numbers are limited: tcp/tcp.c */
	RN_GUARD_TCP_HOLDER,    /* the process that answers by TCP has the user that had the port: tcp/expect.c */
	RN_GUARD_TCP_RANGE,     /* only ports that queue pairs may have are connected to: tcp/tcp.c */
	RN_GUARD_PORT_SHARING,  /* only our own user may share our ports: peer/port.c */
	RN_GUARD_DATAGRAM_PORT, /* the UDP port is ours before its number is known: datagram/port.c */
	RN_GUARD_MAP_TRIES,     /* a segment that can't be mapped is given up: peer/segments.c */
	RN_GUARD_RANDOM_KEYS,   /* keys can't be predicted: objects/mr_key.c */
	RN_GUARD_WINDOW_QP,     /* a window of type 2 is for one queue pair: responder/responder.c */
	RN_GUARD_WINDOW_LIFE,   /* an invalidated window is gone: objects/mw.c */
	RN_GUARD_RECV_OPCODE,   /* a completion tells the opcode of what completed it: objects/cq_poll.c */
	RN_GUARD_OWN_FACTS,     /* what the owner knows isn't read from the arena */
	RN_GUARD_STRANGERS,     /* strangers are limited: stranger.c */
	RN_GUARD_CM_FLOOD,      /* of one connection little is read at a time, and nothing twice: cm/socket.c, cm/hear.c */
	RN_GUARD_HALF_OPEN,     /* a peer that was accepted and falls silent has to leave when others come: cm/callbacks.c */
	RN_GUARD_OWN_SOURCE,    /* all addresses of this host are one source: stranger.c */
	RN_GUARD_TCP_USER,      /* who connects from this host by TCP is counted by its user: stranger.c */
	RN_GUARD_SECRET_KEY,    /* a secret is a key, and no word: secret_key.c */
	RN_GUARD_SECRET_KEPT,   /* it is kept for the process's life: secret_key.c */
	RN_GUARD_PASSED_RIGHTS, /* strangers pass no descriptors: rights.c */
	RN_GUARD_LOG_RATE,      /* so are the lines that they cause: log.c */
	RN_GUARDS,
};

#ifdef RDMANET_UNGUARDED
bool rn_guarded(enum rn_guard guard);
#else
#define rn_guarded(guard) true
#endif
