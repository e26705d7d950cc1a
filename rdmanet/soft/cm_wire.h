/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of a wire: what goes over it, and what cm_wire.c, cm_message.c, cm_socket.c and
 * cm_listen.c share.  cm_wire.c tells how a wire lives.
 */
#ifndef RDMANET_SOFT_CM_WIRE_H
#define RDMANET_SOFT_CM_WIRE_H

#include "cm.h"

#include "secret.h"
#include "stranger.h"

#include <assert.h>

/* --- messages ----------------------------------------------------------------------------------- */

enum { MAGIC = 0x52444d43 /* "RDMC" */, VERSION = 1 };
enum message_type {
	REQ = 1, REP, RTU, REJ, DREQ, DREP, SIDR_REQ, SIDR_REP, SECRET_HELLO, SECRET_CHALLENGE, SECRET_PROOF,
	MRA, HANDOVER, MESSAGE_TYPES,
	MOVED = MESSAGE_TYPES, /* by a link only */
};
static_assert(MOVED < 16, "a bit for each in rn_wire.heard");

struct header {
	__be32 magic;
	uint8_t version, type;
	__be16 length; /* of the whole message */
};

/* What kind of queue pair asks; the numbers are those of InfiniBand's REQ. */
enum transport { TRANSPORT_RC, TRANSPORT_UC, TRANSPORT_XRC = 3 };

struct req {
	struct header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count;
	uint8_t flow_control, srq, private_length, transport; /* the latter: enum transport */
	__be32 ece_vendor, ece_options;
	uint8_t private_data[RN_CM_REQ_PRIVATE];
};

struct rep {
	struct header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, rnr_retry_count;
	uint8_t flow_control, srq, private_length, reserved[2];
	__be32 ece_vendor, ece_options;
	uint8_t private_data[RN_CM_REP_PRIVATE];
};

struct rej {
	struct header header;
	__be16 reason;
	uint8_t private_length, reserved;
	uint8_t private_data[RN_CM_REJ_PRIVATE];
};

/* Datagrams: which queue pair serves the port? One question and one answer. */
struct sidr_req {
	struct header header;
	uint8_t private_length, reserved[3];
	uint8_t private_data[RN_CM_SIDR_REQ_PRIVATE];
};

struct sidr_rep {
	struct header header;
	__be32 qpn, qkey;
	uint8_t status, private_length, reserved[2];
	uint8_t private_data[RN_CM_SIDR_REP_PRIVATE];
};

/* What comes by the link will be said of this token: cm_handover.c. */
struct handover {
	struct header header;
	uint8_t token[8];
};

/* Before the first request, where there is a secret: cm_secret.c. */
struct secret_hello {
	struct header header;
	uint8_t nonce[RN_NONCE];
};

struct secret_challenge {
	struct secret_hello hello; /* the passive side's */
	uint8_t proof[RN_PROOF];
};

struct secret_proof {
	struct header header;
	uint8_t proof[RN_PROOF];
};

static_assert(sizeof(struct secret_hello) == 40 && sizeof(struct secret_challenge) == 72 &&
	      sizeof(struct secret_proof) == 40, "nor there");
static_assert(sizeof(struct sidr_req) == 192 && sizeof(struct sidr_rep) == 156, "no padding there, either");
static_assert(sizeof(struct req) == 88 && sizeof(struct rep) == 228 && sizeof(struct rej) == 160,
	      "what goes over the wire has no padding");

static const uint16_t rn_cm_message_length[MESSAGE_TYPES] = {
	[REQ] = sizeof(struct req),     [REP] = sizeof(struct rep),     [RTU] = sizeof(struct header),
	[REJ] = sizeof(struct rej),     [DREQ] = sizeof(struct header), [DREP] = sizeof(struct header),
	[SIDR_REQ] = sizeof(struct sidr_req), [SIDR_REP] = sizeof(struct sidr_rep),
	[SECRET_HELLO] = sizeof(struct secret_hello), [SECRET_CHALLENGE] = sizeof(struct secret_challenge),
	[SECRET_PROOF] = sizeof(struct secret_proof),   [MRA] = sizeof(struct header),
	[HANDOVER] = sizeof(struct handover),
};

/* --- wires -------------------------------------------------------------------------------------- */

struct rn_wire {
	/* under rn_cm_lock */
	struct rn_list link;       /* of all wires */
	struct rn_cm_id *id;       /* NULL: not yet, or no more */
	struct rn_cm_id *listener; /* until the request has come */
	enum rn_wire_phase phase;
	bool over; /* to be freed as soon as the engine has done with this callback */
	bool told; /* DISCONNECTED */
	bool ends; /* it was accepted and disconnected again: DREQ follows as soon as RTU has come */
	bool is_datagram; /* SIDR_REQ instead of REQ: the answer is the end */
	bool hangs_up; /* as soon as all is said */
	uint16_t heard;   /* a bit per type of message: each comes once */
	uint16_t watch_port; /* whose death is to be watched */
	uint16_t asker_port; /* of the queue pair that it was asked for, as its peer on this host says; else 0 */
	/* What both sides have said, the active one first; what it will say then. Without a secret: nothing. */
	struct secret_hello hellos[2];
	enum message_type request_type;
	unsigned char request[sizeof(struct sidr_req)];
	/* The longest message fits twice; what is queued is a CHALLENGE, a REQ or a REP, and at most MRA, RTU,
	 * HANDOVER, REJ, DREQ and DREP beside it. */
	unsigned out_length;
	alignas(8) unsigned char out[512];
	/* cm_handover.c */
	uint64_t token, peer_token;  /* 0: not said; not heard */
	struct rn_wire *next_handed; /* of those with a token */
	bool peer_moved;
	uint16_t words; /* a bit per type of message: heard by the link, and not looked at yet */

	/* the engine's, or fixed */
	struct rn_stranger stranger; /* as long as we wait for it to get on: cm_listen.c */
	struct rn_source source;
	struct rn_timer timer;
	struct rn_task task;
	struct rn_death death;
	struct sockaddr_storage near, far; /* the passive side's: of the socket, and of the peer */
	struct sockaddr_storage dst; /* where the active side goes */
	bool connecting;             /* the TCP connection isn't there yet */
	bool hung_up;                /* the other end has: its process, or its kernel for it */
	bool again;                  /* it was refused, and is tried once more when the timer fires */
	unsigned refusals;
	bool bound;                  /* the program has chosen its port */
	bool by_name;                /* over a Unix socket: see cm_name.c */
	bool is_ours;                /* the active side's: whoever listens there has a name, so it will answer */
	bool watched;                /* death */
	bool moved;                  /* what is to be said goes by the link */
	bool wants_room;             /* watching EPOLLOUT */
	uint64_t cookie;             /* of the listener on this host, as far as it is known */
	uint8_t tos;
	bool tos_set;
	unsigned in_length, sending_length;
	/* Messages are looked at where they came in: all lengths are multiples of four. */
	alignas(8) unsigned char in[512];
	unsigned char sending[512];
};

enum { RN_CM_LINGER_MS = 5000 }; /* for the last words */

/* All wires: under rn_cm_lock. */
extern struct rn_list rn_cm_wires;

/* --- cm_wire.c ---------------------------------------------------------------------------------- */

void rn_cm_wire_set_timer_ms(struct rn_wire *wire, uint64_t ms);
void rn_cm_wire_close_socket(struct rn_wire *wire); /* on the engine */
struct rn_wire *rn_cm_wire_new(enum rn_wire_phase phase); /* rn_cm_lock held */
/* It has served: from now on its identifier is without, but for one that waits for TIMEWAIT_EXIT.
 * rn_cm_lock held. */
void rn_cm_wire_finish(struct rn_wire *wire);
/* Last in each of the engine's callbacks: nothing but this frees a wire. Without the lock. */
void rn_cm_wire_sweep(struct rn_wire *wire);

/* On the engine, with rn_cm_lock held. error: of the socket, or 0 for EOF and death. */
void rn_cm_wire_lost(struct rn_wire *wire, int error);
void rn_cm_wire_drop(struct rn_wire *wire, enum rn_warning cause, const char *why);
/* Whoever listens where we wanted to connect isn't one of ours: REJECTED, as by an adapter on which nobody listens. */
void rn_cm_wire_not_ours(struct rn_wire *wire, const char *why);
/* Who is at the other end: "127.0.0.1 port 4711", "user 1000 of this host". */
enum { RN_CM_FAR = 80 };
const char *rn_cm_wire_far(const struct rn_wire *wire, char text[RN_CM_FAR]);
void rn_cm_wire_tell_disconnected(struct rn_wire *wire);
void rn_cm_wire_tell_failed(struct rn_wire *wire, enum rdma_cm_event_type type, int status);
/* The same, with the private data of a field of this length. */
void rn_cm_wire_tell_refused(struct rn_wire *wire, enum rdma_cm_event_type type, int status, const void *data,
			     uint8_t length, size_t field);

/* --- cm_message.c ------------------------------------------------------------------------------- */

/* All whole messages in the buffer. On the engine, with rn_cm_lock held. */
void rn_cm_wire_digest(struct rn_wire *wire);
/* One that is no more than its header. Likewise. */
void rn_cm_wire_hear(struct rn_wire *wire, enum message_type type);
/* The message begins with a header, which is filled in. Any thread, rn_cm_lock held. */
void rn_cm_wire_append(struct rn_wire *wire, enum message_type type, void *message);
/* MRA: the request has come, and the answer will take its time. rn_cm_lock held. */
void rn_cm_wire_say_wait(struct rn_wire *wire);
/* REJ without a wire, and that was it. On the engine. */
void rn_cm_say_no(int fd, int reason);

/* --- cm_listen.c: on the engine ------------------------------------------------------------------ */

void rn_cm_listen_stop(void);
void rn_cm_listen_forked(void);
/* Is it a stranger's, and of which kind? Its phase says so: in each of the engine's callbacks. Without the lock. */
void rn_cm_listen_look(struct rn_wire *wire);
/* Could the program have another one now? Any thread. */
bool rn_cm_has_descriptors(void);

/* --- cm_secret.c: on the engine, with rn_cm_lock held --------------------------------------------- */

/* Does the connection manager ask for a secret? */
bool rn_cm_secret_is_set(void);
/* The active side's first word; the request waits until the passive side has proven that it knows the secret. Any
 * thread. False: the kernel has no random bytes. */
bool rn_cm_secret_begin(struct rn_wire *wire, enum message_type type, const void *request);
/* False: out of turn. */
bool rn_cm_secret_on_hello(struct rn_wire *wire, const struct secret_hello *hello);
bool rn_cm_secret_on_challenge(struct rn_wire *wire, const struct secret_challenge *challenge);
bool rn_cm_secret_on_proof(struct rn_wire *wire, const struct secret_proof *proof);
/* A request from who has proven nothing, and the refusal of what we have proven. */
void rn_cm_secret_missing(struct rn_wire *wire);
void rn_cm_secret_refused(struct rn_wire *wire);

/* --- cm_handover.c: on the engine, without the lock but for the first two ----------------------------- */

void rn_cm_handover_forget(struct rn_wire *wire); /* its token */
void rn_cm_handover_forked(void);
/* In each of the engine's callbacks: before what is to be said is said, and after. */
void rn_cm_handover_begin(struct rn_wire *wire);
void rn_cm_handover_go_on(struct rn_wire *wire);
/* Of one that has moved: say what is to be said. */
void rn_cm_handover_flush(struct rn_wire *wire);
/* The socket has ended: because the peer has moved, or is about to say so? Then it is closed. */
bool rn_cm_handover_is_cause(struct rn_wire *wire);
void rn_cm_handover_hear(struct rn_wire *wire);

/* --- cm_socket.c: on the engine, without the lock ------------------------------------------------ */

void rn_cm_wire_receive(struct rn_wire *wire);
void rn_cm_wire_flush(struct rn_wire *wire);
/* All is said; the socket can be closed. */
void rn_cm_hang_up(int fd);
void rn_cm_wire_ready(struct rn_source *source, uint32_t epoll_events);
void rn_cm_wire_connect(struct rn_wire *wire);
void rn_cm_wire_kicked(struct rn_task *task); /* the program has changed something */

#endif
