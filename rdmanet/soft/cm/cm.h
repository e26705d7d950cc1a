/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager's insides.
 *
 *     sync.c       identifiers without a channel, whose calls wait
 *     connect.c    listen, connect, accept, reject, disconnect
 *     resolve.c    how addresses are reached
 *     multicast.c  groups of an identifier for datagrams
 *     addrinfo.c   rdma_getaddrinfo
 *     deliver.c    what the program reads from a channel, and what is done for it then
 *     cm.c         an identifier's life
 *     wire.c       the TCP socket under a connection: time-outs, loss; with it message.c,
 *                  hear.c, secret.c, socket.c, listen.c, handover.c
 *     link.c       connections between processes that are linked: without a socket from the beginning
 *     first.c      the first one, and those that wait for the link that it makes
 *     qp.c         the queue pair of an identifier, and the transitions made for it
 *     event.c      event channels: which events the program gets, and when
 *     bind.c       getting a port, and keeping others off it
 *     name.c       RDMA ports whose TCP port another program has
 *     known.c      listeners of this host that were connected to before
 *     address.c    which addresses are ours
 *     context.c    the context that identifiers are on
 *     id.c         identifiers, and the lock
 *
 * Threads.  Exported calls run in the program's threads and never wait for a socket: they
 * change state, append to a wire's output, and post the wire's task.  Sockets are touched by the
 * engine only (but for bind and listen, which don't wait), or by a thread that stands in for it while
 * it sleeps (rn_cm_unlock_and_send).  The engine never touches a queue pair: transitions happen in the
 * calls, and in rdma_get_cm_event, as in the real library.
 *
 *      program          event channel         engine              TCP         peer's engine
 *      rdma_connect ---------------------> wire: CONNECTING -----------------> ACCEPTED
 *                                                REQ_SENT  ------ REQ -------> REQ_RECEIVED -> CONNECT_REQUEST
 *      rdma_get_cm_event <- CONNECT_RESPONSE - REP_RECEIVED <---- REP -------- REP_SENT     <- rdma_accept
 *        INIT, RTR, RTS ------------------> ESTABLISHED --------- RTU -------> ESTABLISHED  -> ESTABLISHED
 *      rdma_disconnect -------------------> DREQ_SENT ----------- DREQ ------> CLOSING      -> DISCONNECTED
 *                         <- DISCONNECTED - CLOSING  <----------- DREP --------
 *
 * Ownership.  An identifier and its wire point at each other until either is freed.  Wires are
 * freed on the engine, identifiers in rdma_destroy_id (those the program has never seen: with their
 * request).  Whoever holds rn_cm_lock and sees a pointer to one may use it.
 */
#pragma once

#include "base/log.h"
#include "objects/qp.h"
#include "rdma_cma.h"

/* Guards all of the connection manager's state that several threads use: everything below
 * except what is fixed at creation.  Taken before the engine's and the peers' locks, and never
 * held while waiting, modifying a queue pair, or (outside the engine) removing a source. */
extern pthread_mutex_t rn_cm_lock;
extern pthread_cond_t rn_cm_acked; /* some event was acknowledged */

/* After what may have sent a message (message.c): release the lock, and wake the engine. */
static inline void rn_cm_unlock(void)
{
	pthread_mutex_unlock(&rn_cm_lock);
	rn_tasks_wake();
}

/* The same, but if the engine sleeps, this thread itself sends the message, if that does not take long. Not with
 * another lock held. */
static inline void rn_cm_unlock_and_send(void)
{
	pthread_mutex_unlock(&rn_cm_lock);
	rn_tasks_run_here();
}

struct rn_cm_event {
	struct rdma_cm_event event; /* what the program sees: first */
	struct rn_cm_event *next;
	struct rn_cm_id *id;
	struct rn_cm_id *counted_on; /* whose destruction waits for the ack; for a request, the listener */
	struct rn_cm_group *group; /* for MULTICAST_JOIN, until the event is acknowledged */
	unsigned char private_data[196];
};

struct rn_cm_channel {
	struct rdma_event_channel channel; /* first; fd is an eventfd with a token for each event */
	unsigned epoch;
	struct rn_cm_event *events, **events_end; /* not read yet */
	uint32_t number;     /* by which linked processes wake who reads it (link.c); 0: none does */
	_Atomic bool is_shared;   /* it had a number */
	_Atomic bool never_waits; /* objects/channel.h */
	_Atomic int reader;  /* the thread that last called rdma_get_cm_event */
	_Atomic bool inside; /* and whether it is still in that call */
};

/* Of an identifier for datagrams: multicast.c. */
struct rn_cm_group {
	struct rn_cm_group *next;
	struct sockaddr_storage address;
	union ibv_gid gid;
	void *context;
	bool send_only, attached;
	unsigned owed; /* events that were read and not acknowledged; they point here */
};

enum rn_cm_state {
	RN_CM_IDLE,
	RN_CM_BOUND,
	RN_CM_ADDRESS_RESOLVED,
	RN_CM_ROUTE_RESOLVED,
	RN_CM_LISTENING,
	RN_CM_CONNECTION, /* has or had a wire, whose phase says more */
};

/* What both sides agree on for their queue pairs. */
struct rn_cm_terms {
	uint32_t local_qpn, remote_qpn;
	uint32_t local_psn, remote_psn;
	uint8_t responder_resources, initiator_depth;
	uint8_t retry_count;
	uint8_t rnr_retry_count; /* how often we retry, as the peer asked */
};

struct rn_cm_id {
	struct rdma_cm_id id; /* first */
	unsigned epoch;
	enum rn_cm_state state;
	struct rn_cm_wire *wire;
	struct rn_cm_terms terms;
	struct ibv_sa_path_rec path;
	/* -1: none. A TCP socket that is bound to the address; it listens if the identifier does. */
	int bound_fd;
	int name_fd;  /* and the Unix socket that has its name: see name.c */
	bool by_name; /* bound_fd is that Unix socket */
	bool by_name_alone; /* it connects by the listener's name, or not at all */
	bool listens_early; /* bound_fd listens as soon as it is bound, to have its port alone: see bind.c */
	uint8_t tos, ack_timeout;
	bool tos_set, ack_timeout_set, reuse_address, af_only;
	bool was_connected; /* ESTABLISHED once: may disconnect, gets one DISCONNECTED */
	_Atomic bool peer_left_us; /* its process ended while it was connected */
	bool connect_error; /* the program got CONNECT_ERROR: no REJECTED may follow */
	uint32_t delivered, acked;
	uint32_t qkey; /* of datagrams */
	struct rn_cm_group *groups;
	struct ibv_ece local_ece, remote_ece; /* vendors' options of the queue pairs: passed on, not used */

	/* sync.c */
	bool sync; /* it has a private channel */
	struct ibv_qp_init_attr *qp_attr;

	/* a listener's */
	struct rn_list listening; /* listeners.c */
	uint64_t cookie;          /* the number that the kernel gives bound_fd */
	struct rn_source accepting;
	struct rn_timer accept_retry; /* no descriptor left: try again later */
	unsigned backlog, unread_requests;
	bool paused;

	/* qp.c: completion queues that were made for the queue pair */
	bool owns_send_cq, owns_recv_cq;
};

static inline struct rn_cm_channel *rn_cm_channel(struct rdma_event_channel *channel)
{
	return (struct rn_cm_channel *)channel;
}

static inline struct rn_cm_id *rn_cm_id(struct rdma_cm_id *id)
{
	return (struct rn_cm_id *)id;
}

static inline bool rn_cm_is_datagram(const struct rn_cm_id *id)
{
	return id->id.qp_type == IBV_QPT_UD;
}

/* -1 and errno: the convention of every rdma_ call. */
static inline int rn_cm_error(int error)
{
	errno = error;
	return -1;
}

/* --- context.c ---------------------------------------------------------------------------------- */

/* The one context of the connection manager: id->verbs. Opened by the first user (and with it the
 * engine is held), closed after the last, unless the program still has objects on it. When the device has
 * failed, a new one is opened for later users. */
struct ibv_context *rn_cm_context_get(void); /* NULL and errno */
void rn_cm_context_put(void);
void rn_cm_context_more(void);           /* one more user; the caller is one already */
void rn_cm_context_less(void);           /* one user less */
void rn_cm_context_renew(void);          /* open it anew if its device has failed; the caller is a user */
struct ibv_context *rn_cm_context(void); /* as opened */
struct ibv_pd *rn_cm_known_pd(void);     /* the same, if it is there: since an address was bound */
struct ibv_pd *rn_cm_default_pd(void);   /* for rdma_create_qp without one; NULL and errno */
struct ibv_xrcd *rn_cm_default_xrcd(void); /* likewise, for an XRC target and its SRQ */

/* Do this before the first context is opened. */
void rn_cm_context_at_first(void (*what)(void));

/* --- id.c --------------------------------------------------------------------------------------- */

/* Created for a request, or by rdma_create_id. */
struct rn_cm_id *rn_cm_id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space ps);

/* --- address.c ------------------------------------------------------------------------------- */

socklen_t rn_cm_address_length(const struct sockaddr *address); /* 0: no family of ours */
bool rn_cm_is_wildcard(const struct sockaddr *address);
bool rn_cm_is_multicast(const struct sockaddr *address);
void rn_cm_set_loopback(struct sockaddr *address); /* keeps family and port */
__be16 rn_cm_port(const struct sockaddr *address);
void rn_cm_set_port(struct sockaddr *address, __be16 port);
/* Fill in id->verbs and the route, from the id's addresses. */
void rn_cm_set_route(struct rn_cm_id *id);
void rn_cm_as_ipv4(struct sockaddr_storage *address); /* turn an IPv4-mapped address into IPv4 */

/* --- bind.c ---------------------------------------------------------------------------------- */

/* Make the listener's socket listen, and keep others off its port throughout. -1 and errno. */
int rn_cm_listen(struct rn_cm_id *id);
/* For a connection: once old, it must not keep the port from the next listener, be it of RDMA or of TCP. */
void rn_cm_release_port(int fd);
/* For a socket that listens early, before it connects. */
void rn_cm_unlisten(int fd);

/* --- name.c ---------------------------------------------------------------------------------- */

/* A Unix socket with the name of this address and port; -1 and errno. af_only: of IPv6's wildcard, IPv6 only. */
int rn_cm_name_bind(const struct sockaddr *address, bool af_only);
/* The same with a random suffix, if a stranger has the name itself: it shows that an RDMA program has the port. */
int rn_cm_name_bind_other(const struct sockaddr *address, bool af_only);
/* The name is taken: does an equal process listen there? If not, log who has it. is_shared: we got the TCP port by
 * sharing it, as another program of our user may that is bound and does not listen yet: then its name counts too. */
bool rn_cm_name_is_equals(const struct sockaddr *address, bool af_only, bool is_shared);
/* Does an RDMA program have this port, at this address or one that covers it? EADDRINUSE, 0, or why that is unknown. */
int rn_cm_name_why_taken(const struct sockaddr *address, bool af_only);
/* A socket connected to a process that listens by name and is trusted; -1 and errno: ECONNREFUSED if there is none.
 * Otherwise there may be one, and what has the TCP port is another program: EAGAIN if too many wait to be accepted. */
int rn_cm_name_connect(const struct sockaddr *dst);
/* May this process of our user speak for the address by a name? The question that is asked of who is connected to. */
bool rn_cm_name_is_believed_of(int pid, const struct sockaddr *dst);
/* Does the name of this listener cover the address? */
bool rn_cm_name_covers(const struct rn_cm_id *listener, const union ibv_gid *gid);
/* What listens on this address by TCP? cookie: the listener's, or 0. On the engine. */
enum rn_cm_language {
	RN_CM_UNKNOWN, /* the address is on another host */
	RN_CM_OURS,    /* the listener's user has a name of that port, and so poses as an RDMA program */
	RN_CM_OTHER,   /* a TCP program, not an RDMA program */
	RN_CM_NOBODY,  /* nobody yet */
	RN_CM_UNTOLD,  /* neither netlink nor /proc tells of listeners, or of names */
};
enum rn_cm_language rn_cm_name_language(const struct sockaddr *dst, uint64_t *cookie);

/* --- known.c: on the engine ------------------------------------------------------------------- */

/* That listener has spoken our protocol: do not check it again. 0 is none. */
void rn_cm_known_has_spoken(const struct sockaddr *dst, uint64_t cookie);
bool rn_cm_is_known(uint64_t cookie);
/* Is what listens on this address by TCP one that has? Takes three system calls, or none. */
bool rn_cm_known_is_there(const struct sockaddr *dst, uint64_t *cookie);
/* The listener with this cookie, or that is there by name (cookie 0), is in the process whose queue pairs have this port,
 * or (0) no longer. */
void rn_cm_known_is_of(const struct sockaddr *dst, uint64_t cookie, uint16_t peer);
/* And its program reads the events of this channel: link.c. */
void rn_cm_known_reads(const struct sockaddr *dst, uint64_t cookie, uint32_t mail_channel);
/* That port, of the listener that was last known at this address, or there by name; 0: none. */
uint16_t rn_cm_known_peer(const struct sockaddr *dst, bool by_name_alone, uint64_t *cookie, uint32_t *mail_channel);

/* --- event.c --------------------------------------------------------------------------------- */

/* All with rn_cm_lock held. */
struct rn_cm_event *rn_cm_event_new(struct rn_cm_id *id, enum rdma_cm_event_type type, int status);
void rn_cm_event_queue(struct rn_cm_event *event);
/* Both; false when out of memory. */
bool rn_cm_tell(struct rn_cm_id *id, enum rdma_cm_event_type type, int status);
/* The private data in a field of this length, filled up with zeros. */
void rn_cm_event_private(struct rn_cm_event *event, const void *data, size_t length, size_t field);
/* The first unread event of this type on this id. */
struct rn_cm_event *rn_cm_event_find(struct rn_cm_id *id, enum rdma_cm_event_type type);
/* Take the unread events of this id (for a listener, its requests) out of its channel; returns a list. */
struct rn_cm_event *rn_cm_event_purge(struct rn_cm_id *id);
/* Drop the unread event of this group, if there is one. */
void rn_cm_event_forget_group(struct rn_cm_id *id, const struct rn_cm_group *group);
/* Around what one wire hears: take rn_cm_lock; release it, and only then wake those who read the events. */
void rn_cm_lock_to_tell(void);
void rn_cm_unlock_and_tell(void);
void rn_cm_event_forked(void);
/* A thread has read a token, and found no event: what it is told until it takes that back, needs no other. True: it was
 * told nothing. */
void rn_cm_event_lend_token(struct rn_cm_channel *channel);
bool rn_cm_event_take_token_back(void);
void rn_cm_event_add_tokens(struct rn_cm_channel *channel, uint64_t count);
void rn_cm_put_event(struct rn_cm_id *id); /* acknowledge id->event, if there is one */
/* With rn_cm_lock. The number by which they wake who reads this identifier's events, 0: they must not; and forget it. */
uint32_t rn_cm_channel_number(const struct rn_cm_id *id);
void rn_cm_channel_renumber(struct rn_cm_channel *channel);

/* --- qp.c ------------------------------------------------------------------------------------ */

uint32_t rn_cm_random_psn(void);
/* 0 or errno; they do nothing without id->qp. */
int rn_cm_qp_connect(struct rn_cm_id *id); /* INIT (again, with the agreed rights), RTR, RTS */
void rn_cm_qp_fail(struct rn_cm_id *id);   /* ERR */
/* The path to a GID, for an address handle. False: our own address is gone. */
bool rn_cm_path_to(const struct rn_cm_id *id, const union ibv_gid *gid, struct ibv_ah_attr *attr);

/* --- deliver.c ------------------------------------------------------------------------------- */

/* Called last in a call that starts something: for a synchronous identifier (sync.c), wait until that ends. */
int rn_cm_complete(struct rn_cm_id *id);

/* --- link.c: the program's threads --------------------------------------------------------------- */

void rn_cm_link_hear_mail(void); /* what linked processes have said in memory */

/* --- wire.c ---------------------------------------------------------------------------------- */

enum {
	RN_CM_REQ_PRIVATE = 56,
	RN_CM_REP_PRIVATE = 196,
	RN_CM_REJ_PRIVATE = 148,
	RN_CM_SIDR_REQ_PRIVATE = 180,
	RN_CM_SIDR_REP_PRIVATE = 136,
};
/* Reasons of rejection, by the InfiniBand specification; and our own, which errors.py explains: the other side
 * requires a secret, has another one, or has none; or it has another version. */
enum {
	RN_REJ_NO_RESOURCES = 3,
	RN_REJ_TIMEOUT = 4,
	RN_REJ_INVALID_SERVICE_ID = 8,
	RN_REJ_CONSUMER_DEFINED = 28,
	RN_REJ_SECRET_WANTED = 0x5301,
	RN_REJ_SECRET_WRONG,
	RN_REJ_SECRET_UNKNOWN,
	RN_REJ_VERSION,
};
/* The private data of a REJECTED that no peer has sent: what listens there does not speak our protocol. */
#define RN_CM_NOT_OURS "rdmanet: another language"
/* Likewise: what listens there has ended the connection without a word. */
#define RN_CM_NO_ANSWER "rdmanet: no answer"
/* Likewise, and then both versions: the peer has another one (base/version.h). */
#define RN_CM_OTHER_VERSION "rdmanet: version "
/* The values for datagrams. */
enum { RN_SIDR_SUCCESS, RN_SIDR_UNSUPPORTED, RN_SIDR_REJECT, RN_SIDR_LAST = 5 };

enum rn_cm_wire_phase {
	RN_CM_WIRE_CONNECTING,
	RN_CM_WIRE_HELLO_SENT, /* with a secret */
	RN_CM_WIRE_REQ_SENT,
	RN_CM_WIRE_REP_RECEIVED,
	RN_CM_WIRE_ACCEPTED,
	RN_CM_WIRE_CHALLENGED, /* with a secret: our proof was sent, and */
	RN_CM_WIRE_PROVEN,     /* the peer's has come */
	RN_CM_WIRE_REQ_RECEIVED,
	RN_CM_WIRE_REP_SENT,
	RN_CM_WIRE_ESTABLISHED,
	RN_CM_WIRE_DREQ_SENT,
	RN_CM_WIRE_CLOSING,  /* over as soon as what was said is sent */
	RN_CM_WIRE_TIMEWAIT, /* closed; TIMEWAIT_EXIT is due */
};

struct rn_cm_param {
	const void *private_data;
	uint8_t private_length;
	uint8_t flow_control, srq, rnr_retry_count;
};

/* All with rn_cm_lock held. */
enum rn_cm_wire_phase rn_cm_wire_phase(const struct rn_cm_wire *wire);
int rn_cm_wire_connect(struct rn_cm_id *id, const struct rn_cm_param *param); /* 0 or errno */
void rn_cm_wire_accept(struct rn_cm_wire *wire, const struct rn_cm_param *param);
void rn_cm_wire_accept_datagrams(struct rn_cm_wire *wire, const struct rn_cm_param *param, uint32_t qkey);
void rn_cm_wire_reject(struct rn_cm_wire *wire, int reason, const void *private_data, uint8_t length);
void rn_cm_wire_ready_to_use(struct rn_cm_wire *wire); /* RTU: the active side is established */
void rn_cm_wire_notified(struct rn_cm_wire *wire);     /* so is the passive side, by its program, without an RTU */
void rn_cm_wire_disconnect(struct rn_cm_wire *wire);
/* The same before the peer is ready: done as soon as it is. False if it is ready, or was not accepted. */
bool rn_cm_wire_disconnect_accepted(struct rn_cm_wire *wire);
/* For the identifier with this queue pair, if there is one. */
void rn_cm_wire_disconnect_qp(const struct ibv_qp *qp);
/* The id is destroyed: send what the phase requires; then the wire finishes alone. */
void rn_cm_wire_abandon(struct rn_cm_wire *wire);

/* The listener's source and timer. */
void rn_cm_listen_ready(struct rn_source *source, uint32_t epoll_events);
void rn_cm_listen_retry(struct rn_timer *timer);
/* A request was read or taken back: go on accepting if that was suspended. rn_cm_lock held. */
void rn_cm_listener_resume(struct rn_cm_id *listener);
void rn_cm_listener_gone(struct rn_cm_id *listener);

/* How many connections were dropped because of what came over them, or did not come. */
unsigned long rn_cm_wire_dropped(void);
