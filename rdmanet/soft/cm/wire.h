/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of a wire: what goes over it, and what the files that wire.c lists share.  wire.c describes a wire's life.
 */
#pragma once

#include "base/guard.h"
#include "base/secret.h"
#include "base/stranger.h"
#include "base/version.h"
#include "cm/cm.h"

#include <assert.h>

/* --- messages ----------------------------------------------------------------------------------- */

enum { RN_CM_MAGIC = 0x52444d43 /* "RDMC" */ };
enum rn_cm_message {
	RN_CM_REQ = 1,
	RN_CM_REP,
	RN_CM_RTU,
	RN_CM_REJ,
	RN_CM_DREQ,
	RN_CM_DREP,
	RN_CM_SIDR_REQ,
	RN_CM_SIDR_REP,
	RN_CM_SECRET_HELLO,
	RN_CM_SECRET_CHALLENGE,
	RN_CM_SECRET_PROOF,
	RN_CM_MRA,
	RN_CM_HANDOVER,
	RN_CM_ELSEWHERE, /* by a link only: ask.c; */
	RN_CM_MESSAGES,
	RN_CM_MOVED = RN_CM_MESSAGES, /* and handover.c */
};
static_assert(RN_CM_MOVED < 16, "a bit for each in rn_cm_wire.heard");

struct rn_cm_header {
	__be32 magic;
	uint8_t version, type; /* RN_WIRE_VERSION */
	__be16 length; /* of the whole message */
};

/* The kind of queue pair that asks; the numbers are those of InfiniBand's REQ. */
enum rn_cm_transport { RN_CM_TRANSPORT_RC, RN_CM_TRANSPORT_UC, RN_CM_TRANSPORT_XRC = 3 };

struct rn_cm_req {
	struct rn_cm_header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count;
	uint8_t flow_control, srq, private_length, transport; /* the latter: enum transport */
	__be32 ece_vendor, ece_options;
	uint8_t private_data[RN_CM_REQ_PRIVATE];
};

struct rn_cm_rep {
	struct rn_cm_header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, rnr_retry_count;
	uint8_t flow_control, srq, private_length;
	__be16 asker_number; /* for the asker's port, if it has none of TCP's: listeners.c */
	__be32 ece_vendor, ece_options;
	__be32 mail_channel; /* where who sends this reads its events, and its listener's, if it may be woken: link.c; else 0 */
	uint8_t private_data[RN_CM_REP_PRIVATE];
};

struct rn_cm_rej {
	struct rn_cm_header header;
	__be16 reason;
	uint8_t private_length, reserved;
	uint8_t private_data[RN_CM_REJ_PRIVATE];
};

/* Datagrams: which queue pair serves the port? One question and one answer. */
struct rn_cm_sidr_req {
	struct rn_cm_header header;
	uint8_t private_length, reserved[3];
	uint8_t private_data[RN_CM_SIDR_REQ_PRIVATE];
};

struct rn_cm_sidr_rep {
	struct rn_cm_header header;
	__be32 qpn, qkey;
	uint8_t status, private_length, reserved[2];
	uint8_t private_data[RN_CM_SIDR_REP_PRIVATE];
};

/* The first message over a link: the request for a connection to the listener that has this cookie, and the addresses
 * that a connection by TCP would have. Of this host, so all but the request is in the host's order. */
struct rn_cm_link_request {
	uint64_t cookie; /* 0: it is there by name, at the address `near` and this port */
	union ibv_gid near, far; /* the listener's, and the asker's */
	struct rn_cm_req req;
	uint32_t mail_channel; /* as in REP */
	uint32_t port;
};

/* Which side of a connection a message over a link is for, or what else it is: link.c. */
enum rn_cm_link_side {
	RN_CM_HANDED, /* it has or had a socket: handover.c */
	RN_CM_ASKER,  /* it never had one, and asked; */
	RN_CM_ASKED,  /* or was asked */
	RN_CM_LINK_ASKS,
	RN_CM_LINK_LAST = 1 << 8, /* beside these: the sender waits for no answer */
};
enum { RN_CM_NONSENSE = 1 }; /* in rn_cm_wire.words: no message has the type 0 */

/* Messages over the link name the connection by this token: handover.c. */
struct rn_cm_handover {
	struct rn_cm_header header;
	uint8_t token[8];
};

/* Before the first request, if there is a secret: secret.c. */
struct rn_cm_secret_hello {
	struct rn_cm_header header;
	uint8_t nonce[RN_NONCE];
};

struct rn_cm_secret_challenge {
	struct rn_cm_secret_hello hello; /* the passive side's */
	uint8_t proof[RN_PROOF];
};

struct rn_cm_secret_proof {
	struct rn_cm_header header;
	uint8_t proof[RN_PROOF];
};

static_assert(sizeof(struct rn_cm_secret_hello) == 40 && sizeof(struct rn_cm_secret_challenge) == 72 &&
	      sizeof(struct rn_cm_secret_proof) == 40, "nor there");
static_assert(sizeof(struct rn_cm_sidr_req) == 192 && sizeof(struct rn_cm_sidr_rep) == 156, "no padding there, either");
static_assert(sizeof(struct rn_cm_link_request) == 136, "likewise");
static_assert(sizeof(struct rn_cm_req) == 88 && sizeof(struct rn_cm_rep) == 232 && sizeof(struct rn_cm_rej) == 160,
	      "what goes over the wire has no padding");

static const uint16_t rn_cm_message_length[RN_CM_MESSAGES] = {
	[RN_CM_REQ] = sizeof(struct rn_cm_req),
	[RN_CM_REP] = sizeof(struct rn_cm_rep),
	[RN_CM_RTU] = sizeof(struct rn_cm_header),
	[RN_CM_REJ] = sizeof(struct rn_cm_rej),
	[RN_CM_DREQ] = sizeof(struct rn_cm_header),
	[RN_CM_DREP] = sizeof(struct rn_cm_header),
	[RN_CM_SIDR_REQ] = sizeof(struct rn_cm_sidr_req),
	[RN_CM_SIDR_REP] = sizeof(struct rn_cm_sidr_rep),
	[RN_CM_SECRET_HELLO] = sizeof(struct rn_cm_secret_hello),
	[RN_CM_SECRET_CHALLENGE] = sizeof(struct rn_cm_secret_challenge),
	[RN_CM_SECRET_PROOF] = sizeof(struct rn_cm_secret_proof),
	[RN_CM_MRA] = sizeof(struct rn_cm_header),
	[RN_CM_HANDOVER] = sizeof(struct rn_cm_handover),
	[RN_CM_ELSEWHERE] = sizeof(struct rn_cm_header),
};

/* --- wires -------------------------------------------------------------------------------------- */

struct rn_cm_wire {
	/* under rn_cm_lock */
	struct rn_list link;       /* of all wires */
	struct rn_cm_id *id;       /* NULL: not yet, or no more */
	struct rn_cm_id *listener; /* until the request has come */
	enum rn_cm_wire_phase phase;
	bool over; /* to be freed as soon as the engine is done with this callback */
	bool told; /* DISCONNECTED */
	bool ends; /* it was accepted and disconnected again: DREQ follows as soon as RTU has come */
	bool is_datagram; /* SIDR_REQ instead of REQ: the answer is the end */
	bool hangs_up; /* as soon as everything was sent */
	uint16_t heard;   /* a bit per type of message: each comes once */
	uint16_t watch_port; /* of the process whose death is to be watched */
	uint16_t asker_port; /* of the queue pair that asks, as a peer on this host gives it; else 0 */
	/* Both sides' HELLOs, the active one's first, and the request that follows. Unused without a secret, but for the
	 * request, if it went over a link. */
	struct rn_cm_secret_hello hellos[2];
	enum rn_cm_message request_type;
	unsigned char request[sizeof(struct rn_cm_sidr_req)];
	/* The longest message fits twice; what is queued is a CHALLENGE, a REQ or a REP, and at most MRA, RTU,
	 * HANDOVER, REJ, DREQ and DREP beside it. */
	unsigned out_length;
	alignas(8) unsigned char out[512];
	/* link.c */
	enum rn_cm_link_side side;
	uint64_t token;
	struct rn_cm_wire *next_named; /* of those with a token */
	bool has_left; /* the peer waits for no answer */
	bool has_said_last; /* nor do we, and the peer knows */
	bool stays_off_mail; /* something went by the link: what follows does, too */
	uint32_t mail_channel; /* by which who reads the other side's events is woken; 0: not known */
	/* listeners.c */
	bool is_waiting; /* counted: it was asked for by a link, and is not established */
	uint16_t asker_number; /* which it was given: 0 if none */
	uint64_t listener_cookie; /* of the passive side, once the request has come: the listener's, if it has one */
	/* handover.c */
	uint64_t peer_token;  /* 0: not received */
	bool is_young; /* it keeps its socket until its timer fires */
	bool peer_moved;
	uint16_t words; /* a bit per type of message: received over the link, and not handled yet */
	/* first.c: the engine's */
	bool is_first; /* others wait until it has linked the processes, */
	uint64_t awaited_until_ns;
	bool awaits_first, has_awaited_first; /* or it is one of these */
	struct rn_list awaiting; /* those, or its place among them */

	/* the engine's, or fixed */
	struct rn_stranger stranger; /* while we wait for the peer: listen.c */
	struct rn_source source;
	struct rn_timer timer;
	struct rn_task task;
	struct rn_death death;
	struct sockaddr_storage near, far; /* the passive side's: of the socket, and of the peer */
	struct sockaddr_storage dst; /* the active side's destination */
	bool connecting;             /* the TCP connection isn't there yet */
	bool hung_up;                /* the other end has hung up: its process, or its kernel for it */
	bool again;                  /* it was refused, and is tried once more when the timer fires */
	uint64_t paused_ms;          /* before it was tried again, in all */
	bool bound;                  /* the program has chosen its port */
	bool listens_early;          /* so its socket still listens: bind.c */
	bool by_name;                /* over a Unix socket, or the listener has one: see name.c */
	bool by_name_alone;          /* or not at all */
	bool goes_by_socket;         /* it cannot be asked for by a link: ask.c */
	bool is_ours;                /* on the active side: the listener has a name, so it will answer */
	bool watched;                /* death */
	bool moved;                  /* output goes by the link */
	bool wants_room;             /* watching EPOLLOUT */
	bool is_last;                /* what is being sent by the socket: then our half of it ends */
	uint64_t cookie;             /* of the listener, if that is known to be on this host */
	uint8_t tos;
	bool tos_set;
	unsigned in_length, sending_length;
	/* Messages are read in place: all lengths are multiples of four. */
	alignas(8) unsigned char in[512];
	unsigned char sending[512];
};

enum { RN_CM_LINGER_MS = 5000 }; /* for the last words */

/* All wires: under rn_cm_lock. */
extern struct rn_list rn_cm_wires;

/* --- wire.c ---------------------------------------------------------------------------------- */

/* What the engine calls: callbacks.c. */
struct rn_cm_wire_calls {
	void (*ready)(struct rn_source *source, uint32_t epoll_events);
	void (*fire)(struct rn_timer *timer);
	void (*run)(struct rn_task *task); /* the program has changed something */
	void (*dead)(struct rn_death *death, bool failed);
	void (*linked)(struct rn_death *death);
	void (*leave)(struct rn_stranger *stranger); /* a stranger has to go */
};
void rn_cm_wire_register(const struct rn_cm_wire_calls *calls);
void rn_cm_wire_forked(void);

void rn_cm_wire_set_timer_ms(struct rn_cm_wire *wire, uint64_t ms);
void rn_cm_wire_close_socket(struct rn_cm_wire *wire); /* on the engine */
struct rn_cm_wire *rn_cm_wire_new(enum rn_cm_wire_phase phase); /* rn_cm_lock held */
/* The wire is done: from now on its identifier has none, unless it waits for TIMEWAIT_EXIT. rn_cm_lock held. */
void rn_cm_wire_finish(struct rn_cm_wire *wire);

/* By its token; with rn_cm_lock held. */
void rn_cm_wire_name(struct rn_cm_wire *wire, uint64_t token);
void rn_cm_wire_unname(struct rn_cm_wire *wire);
struct rn_cm_wire *rn_cm_wire_find(const void *process, enum rn_cm_link_side side, uint64_t token);

/* The message begins with a header, which is filled in. Any thread, rn_cm_lock held. */
void rn_cm_wire_append(struct rn_cm_wire *wire, enum rn_cm_message type, void *message);
void rn_cm_wire_say(struct rn_cm_wire *wire, enum rn_cm_message type); /* a message that is only a header */
void rn_cm_put_header(enum rn_cm_message type, void *message);
/* Everything was sent; the socket can be closed. */
void rn_cm_hang_up(int fd);

/* On the engine, with rn_cm_lock held. error: of the socket, or 0 for EOF and death. */
void rn_cm_wire_lost(struct rn_cm_wire *wire, int error);
void rn_cm_wire_drop(struct rn_cm_wire *wire, enum rn_warning cause, const char *why);
/* What listens at our destination does not speak our protocol: REJECTED, as by an adapter on which nobody listens. */
void rn_cm_wire_not_ours(struct rn_cm_wire *wire, const char *why);
/* Who is at the other end: "127.0.0.1 port 4711", "user 1000 of this host". */
enum { RN_CM_FAR = 80 };
const char *rn_cm_wire_far(const struct rn_cm_wire *wire, char text[RN_CM_FAR]);
void rn_cm_wire_tell_disconnected(struct rn_cm_wire *wire);
void rn_cm_wire_tell_failed(struct rn_cm_wire *wire, enum rdma_cm_event_type type, int status);
/* The same, with the private data of a field of this length. */
void rn_cm_wire_tell_refused(struct rn_cm_wire *wire, enum rdma_cm_event_type type, int status, const void *data,
			     uint8_t length, size_t field);

/* --- listeners.c: with rn_cm_lock held, any thread ------------------------------------------------ */

void rn_cm_listener_begins(struct rn_cm_id *id);
struct rn_cm_id *rn_cm_listener_find(uint64_t cookie);
/* The one that the request by a link is for. */
struct rn_cm_id *rn_cm_listener_asked(const struct rn_cm_link_request *request);
/* For REP: the number of the channel whose reader hears what comes for this connection and for its listener; 0: they have
 * two, or there is no listener any more. */
uint32_t rn_cm_listener_number(const struct rn_cm_wire *wire);
/* Connections that listeners were asked for by a link, and that wait for the program or for the asker. */
bool rn_cm_asked_is_full(void); /* no more of them */
void rn_cm_asked_begins(struct rn_cm_wire *wire);
uint16_t rn_cm_asked_take_number(void);      /* for the asker's port; 0: none is left */
void rn_cm_asked_look(struct rn_cm_wire *wire); /* does it still wait? */
void rn_cm_asked_forget(struct rn_cm_wire *wire); /* give its number back */
void rn_cm_listeners_forked(void);

/* --- ask.c: on the engine ----------------------------------------------------------------------- */

/* Ask by a link. False: connect by a socket. Without the lock. */
bool rn_cm_ask(struct rn_cm_wire *wire);
/* May a link do for it what a socket does, if there is one to its listener's process? */
bool rn_cm_ask_is_possible(const struct rn_cm_wire *wire);
/* The same, if it was asked for by a link in vain. With the lock. */
void rn_cm_ask_by_socket(struct rn_cm_wire *wire);
/* For the table of hear.c, with the lock; false: out of turn. */
bool rn_cm_ask_on_elsewhere(struct rn_cm_wire *wire, const struct rn_cm_header *header);
bool rn_cm_ask_may_go_on(const struct rn_cm_wire *wire); /* its process has ended; without the lock */

/* --- first.c: on the engine, without the lock but for the last ---------------------------------- */

/* It waits for the first connection to its listener, and is posted when that is over. False: connect by a socket. */
bool rn_cm_first_is_awaited(struct rn_cm_wire *wire);
void rn_cm_first_leave(struct rn_cm_wire *wire); /* it waits no more */
void rn_cm_first_look(struct rn_cm_wire *wire); /* has it linked the processes? */
void rn_cm_first_forget(struct rn_cm_wire *wire); /* it will not, or is over */
void rn_cm_first_forked(void);
extern uint64_t rn_cm_first_wait_ms; /* tests change it */

/* --- secret.c: on the engine, with rn_cm_lock held --------------------------------------------- */

/* Does the connection manager require a secret? */
static inline bool rn_cm_secret_is_set(void)
{
	return rn_settings.has_secret && rn_guarded(RN_GUARD_CM_SECRET);
}

/* Send the active side's first message; the request waits until the passive side has proven that it knows the secret.
 * Any thread. False: the kernel has no random bytes. */
bool rn_cm_secret_begin(struct rn_cm_wire *wire, enum rn_cm_message type, const void *request);
/* For the table of hear.c. False: what it says makes no sense. */
bool rn_cm_secret_on_hello(struct rn_cm_wire *wire, const struct rn_cm_header *header);
bool rn_cm_secret_on_challenge(struct rn_cm_wire *wire, const struct rn_cm_header *header);
bool rn_cm_secret_on_proof(struct rn_cm_wire *wire, const struct rn_cm_header *header);
/* Handle a request from a side that has proven nothing, and the rejection of our own proof. */
void rn_cm_secret_missing(struct rn_cm_wire *wire);
void rn_cm_secret_refused(struct rn_cm_wire *wire);

/* --- message.c ------------------------------------------------------------------------------- */

/* Send REJ without a wire. On the engine. */
void rn_cm_say_no(int fd, int reason);
/* REJ, with which the wire ends. rn_cm_lock held. */
void rn_cm_wire_say_reject(struct rn_cm_wire *wire, int reason, const void *private_data, uint8_t length);
/* RTU has come, or the program knows that it will come. */
void rn_cm_wire_established(struct rn_cm_wire *wire);
/* Watch the peer's process, if it is on this host: its death shows even if a child of it holds the socket open. The
 * peer names the process; with a wrong number it ends only its own connection. Nothing is done before the program has
 * accepted. */
void rn_cm_wire_watch_peer(struct rn_cm_wire *wire, uint32_t remote_qpn);
/* Both halves of XRC are of one kind: a sending one connects to a receiving one. */
enum rn_cm_transport rn_cm_transport_of(enum ibv_qp_type type);

/* --- hear.c: on the engine, with rn_cm_lock held ---------------------------------------------- */

/* Handle all whole messages in the buffer. */
void rn_cm_wire_digest(struct rn_cm_wire *wire);
/* Handle a message that is only a header. */
void rn_cm_wire_hear(struct rn_cm_wire *wire, enum rn_cm_message type);

/* --- link.c: on the engine, without the lock ---------------------------------------------------- */

/* The wire ends: tell the other side, unless it knows. */
void rn_cm_link_end(struct rn_cm_wire *wire);
/* Hear what the other process says. */
void rn_cm_link_hear(const void *process, uint32_t what, uint64_t token, const void *message, size_t length);
void rn_cm_link_digest(struct rn_cm_wire *wire); /* handle what was heard */
/* Its time is up, or it has to leave: is there mail that the program has not read? */
void rn_cm_link_hear_late(struct rn_cm_wire *wire);
void rn_cm_link_flush(struct rn_cm_wire *wire);  /* send the output */
bool rn_cm_link_say_moved(const struct rn_cm_wire *wire);
void rn_cm_link_forked(void);

/* --- handover.c: on the engine, without the lock but for the first three --------------------------- */

void rn_cm_handover_forget(struct rn_cm_wire *wire); /* that it was young */
void rn_cm_handover_timer(struct rn_cm_wire *wire); /* its timer has fired */
void rn_cm_handover_forked(void);
/* In each of the engine's callbacks: before the output is sent, and after. */
void rn_cm_handover_begin(struct rn_cm_wire *wire);
void rn_cm_handover_go_on(struct rn_cm_wire *wire);
/* The socket has ended: has the peer moved, or is its MOVED still to come? Then close the socket. */
bool rn_cm_handover_is_cause(struct rn_cm_wire *wire);

/* --- socket.c: on the engine, without the lock ------------------------------------------------ */

void rn_cm_wire_receive(struct rn_cm_wire *wire);
void rn_cm_wire_flush(struct rn_cm_wire *wire);
void rn_cm_wire_connect_socket(struct rn_cm_wire *wire);
void rn_cm_wire_connected(struct rn_cm_wire *wire); /* its socket is, or could not be */

/* --- callbacks.c: on the engine, without the lock -------------------------------------------------- */

extern const struct rn_cm_wire_calls rn_cm_wire_calls;
/* Update whether the wire is a stranger, and of which kind, by its phase. */
void rn_cm_wire_look(struct rn_cm_wire *wire);
/* Last in each of the engine's callbacks: nothing but this frees a wire. */
void rn_cm_wire_sweep(struct rn_cm_wire *wire);
/* Both; between them update what is waited for, and send what is to be sent. At the end of each callback. */
void rn_cm_wire_get_on(struct rn_cm_wire *wire);

/* --- asked.c, listen.c: on the engine --------------------------------------------------------------- */

void rn_cm_asked(const void *process, uint64_t token, const void *message, size_t length);
/* Both ends' addresses, of a peer that connects by the listener's name. */
void rn_cm_name_ends(const struct rn_cm_id *listener, struct sockaddr_storage *near, struct sockaddr_storage *far);
void rn_cm_listen_stop(void);
void rn_cm_listen_forked(void);
