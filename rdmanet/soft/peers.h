/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects behind peer.h, which has the picture.
 *
 *     peer.c        peers and processes: how long they are kept, how their death is told
 *     peer_link.c   we ask: the link, segments, channels, requests
 *     peer_serve.c  they ask
 *     peer_port.c   our ports, and who knocks there
 *     peer_wire.c   messages with descriptors between two sockets, and who is at the other end
 *
 *     struct peer      one for each port asked for; counted; what the device sees
 *     struct process   one open device of another process: what several peers share, and its pidfd
 *     struct link      our socket to it: what we ask for and get
 *     struct served    its socket to us: what it asks for and gets
 *     struct port      a port of ours, with its listening sockets (struct ear)
 *
 * Who is let in.  Both ends of a link compare user (SO_PEERCRED, by the kernel's word), boot, and
 * network and pid namespaces (a pid must mean the same to both), before a descriptor passes.  What
 * is mapped was checked first: a memfd that can't shrink, of the size that was told.  A socket
 * that hasn't introduced itself in five seconds is closed.
 *
 * Death.  A process is dead for us when its pidfd says so, or when the link to it ends: then it
 * may live, but has closed its device, and all that we knew of it is gone.  A link from it that
 * ends tells nothing: it dropped what it kept in store.
 *
 * What is kept.  Nothing is thrown away with the last reference, because the next connection is
 * likely to go to the same process; only when it has been idle for a second, or the engine stops.
 *
 * Locking.  rn_peers.lock guards all of this, and is not held in callbacks: notices, replies and
 * deaths run on the engine with no lock.  Sources and timers are removed on the engine only,
 * where that doesn't wait.  Two things are read without the lock, as they are on the data path: a
 * segment's place (see find_segment), and channels, which have their own lock, so that a
 * wake-up never writes to a descriptor that was just closed.
 */
#ifndef RDMANET_SOFT_PEERS_H
#define RDMANET_SOFT_PEERS_H

#include "peer.h"
#include "verbs.h"

#include "engine.h"
#include "log.h"
#include "settings.h"

#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

/* --- the wire ----------------------------------------------------------------------------------- */

enum { MAGIC = 0x524e504c /* "RNPL" */, VERSION = 1 };

enum message_type {
	HELLO = 1,    /* identity */
	WELCOME,      /* identity, + arena */
	REFUSED,      /* value: enum refusal */
	WANT_SEGMENT, /* value: id */
	SEGMENT,      /* value: id, size (0: there is none), + memfd */
	WANT_CHANNEL, /* value: id */
	CHANNEL,      /* value: id, size (0: there is none), + eventfd */
	REQUEST,      /* value: serial, bytes */
	ANSWER,       /* value: serial, size: of the bytes, or -errno; bytes */
	GONE_SEGMENT, /* value: id */
	GONE_CHANNEL, /* value: id */
};

struct message {
	uint32_t magic;
	uint16_t version, type;
	uint32_t value, reserved;
	int64_t size;
};

/* Who is at the other end. */
struct identity {
	char boot_id[40];
	uint64_t net_namespace, pid_namespace;
	uint64_t instance; /* of the device: another after it was closed and opened */
	int64_t arena_size;
	int32_t pid;
	uint32_t reserved;
};

enum refusal { REFUSED_USER = 1, REFUSED_HOST, REFUSED_NAMESPACE, REFUSED_VERSION, REFUSED_CLOSED, REFUSALS };

extern const char *const rn_refusal_names[REFUSALS];

/* A message that has to wait until the socket takes it. */
struct packet {
	struct packet *next;
	size_t length;
	int fd; /* -1, or a duplicate to pass along */
	unsigned char bytes[];
};

struct outbox {
	struct packet *first, **end;
	uint32_t waiting; /* the events to watch while there is something in it */
};

/* --- the objects -------------------------------------------------------------------------------- */

struct peer {
	struct rn_peer rn; /* first */
	unsigned refs;
	struct process *process; /* set before READY, for good */
	struct link *link;       /* while CONNECTING */
	struct rn_notice *notices, **notices_end;
	struct rn_timer idle;
	struct peer *next;         /* of all that rn_peer_get finds */
	struct peer *next_sibling; /* of the process */
	bool listed;
	unsigned round;
};

/* A segment's place. Nodes are never freed before their process, and stay in their bucket, so that
 * readers need no lock; a node whose segment has gone is used again. */
struct segment {
	struct segment *_Atomic next;
	_Atomic uint32_t id;
	_Atomic bool used;
	char *_Atomic base; /* NULL: asked for */
	_Atomic size_t size;
};

struct channel {
	uint32_t id;
	int fd; /* -1: asked for */
	bool owed; /* an event, when it comes */
};

enum { SEGMENT_BUCKETS = 64 };

struct process {
	struct process *next;
	int pid;
	uint64_t instance;
	bool dead;
	unsigned peers_count, served_count; /* idle without peers, freed when it has neither */
	struct peer *peers;
	struct link *link; /* NULL: it is only served */
	struct rn_source pidfd;
	struct rn_timer idle;

	char *arena;
	size_t arena_size;
	struct segment *_Atomic segments[SEGMENT_BUCKETS];

	pthread_mutex_t channel_lock; /* guards channels; taken after rn_peers.lock or alone */
	struct channel *channels;
	unsigned channel_count, channel_room;

	struct rn_reply *replies, **replies_end; /* in the order of their requests */
	uint32_t serial;
};

struct link {
	struct rn_source source;
	struct rn_timer timer; /* connecting again, or waiting for WELCOME */
	uint64_t began_ns;
	struct peer *peer;       /* until WELCOME */
	struct process *process; /* from then on */
	struct outbox out;
};

struct served {
	struct served *next, **link;
	struct rn_source source;
	struct rn_timer timer; /* waiting for HELLO */
	struct process *process;
	struct outbox out;
	uint32_t *segments, *channels; /* that it was given */
	unsigned segment_count, channel_count;
	int pid;
};

/* A socket that listens. */
struct ear {
	struct ear *next;
	struct rn_source source;
	struct rn_timer breathe;   /* no descriptor left: accept again later */
	void (*arrived)(int fd);   /* takes it; on the engine, without the lock */
	union ibv_gid gid;         /* TCP's */
};

struct port {
	struct port *next;
	struct ear *ears; /* the Unix socket's is the last */
	int reserved_fd;  /* bound to the TCP port on all addresses, never listening */
	uint16_t port;
	bool claimed;
	struct rn_peer self;
};

struct peers_state {
	pthread_mutex_t lock; /* guards all of this, and the objects */
	pthread_cond_t calm;  /* `running` changed and somebody waits */
	void *running;        /* the notice or reply whose callback is under way */
	unsigned waiters, round;

	struct peer *peers;
	struct process *processes;
	struct served *served;
	struct port *ports;

	struct identity self;
	bool self_known;
	unsigned links, served_count, mappings, peer_count;
};
extern struct peers_state rn_peers;


#define PEER(rn_peer) RN_OWNER(rn_peer, struct peer, rn)

enum { IDLE_MS = 1000, RETRY_MS = 1, BREATHE_MS = 100 };

static inline void rn_timer_set_ms(struct rn_timer *timer, uint64_t ms)
{
	rn_timer_set(timer, ms * 1000000u);
}

/* All of what follows: with rn_peers.lock held. */

/* --- peer_wire.c -------------------------------------------------------------------------------- */

const struct identity *rn_self(void);
/* 0, or why not. */
enum refusal rn_judge(int fd, const struct identity *other, int *pid);
socklen_t rn_peer_name(uint16_t port, struct sockaddr_un *address);

static inline struct message rn_message(enum message_type type, uint32_t value, int64_t size)
{
	return (struct message){.magic = MAGIC, .version = VERSION, .type = (uint16_t)type, .value = value, .size = size};
}

/* Now, or when the socket has room. An error of the socket is no error here: its end is seen when
 * it is read. -ENOMEM. */
int rn_send(struct rn_source *source, struct outbox *out, const struct message *message, const void *bytes,
	    size_t length, int fd);
void rn_outbox_flush(struct rn_source *source, struct outbox *out);
void rn_outbox_clear(struct outbox *out);

/* What came in: the engine's only, so one buffer does for all. */
struct inbox {
	struct message message;
	unsigned char bytes[RN_PEER_MESSAGE_MAX];
	size_t length; /* of the bytes */
	int fd;        /* -1, or one that came along: whoever keeps it sets -1 */
};
extern struct inbox rn_inbox;

enum arrival { NOTHING, ARRIVED, ENDED };
enum arrival rn_receive(int socket_fd);
void rn_inbox_discard(void);

/* A memfd of exactly this size that can't change it: mapped; or NULL. */
char *rn_map_sealed(int fd, int64_t size);
void rn_unmap(char *base, size_t size);

/* --- peer.c ------------------------------------------------------------------------------------- */

/* Around a callback, which runs without the lock; and waiting until it isn't running. */
void rn_callback_begin(void *object);
void rn_callback_end(void);
void rn_callback_settle(void *object);

void rn_peer_notify(struct peer *peer, enum rn_notice_why why);
void rn_process_notify(struct process *process, enum rn_notice_why why);
void rn_peer_put_locked(struct peer *peer);
void rn_peer_unlist(struct peer *peer);
/* The known one, or a new one; NULL when out of memory. On the engine. */
struct process *rn_process_of(int pid, uint64_t instance, int socket_fd);
void rn_process_let_go(struct process *process);
void rn_process_died(struct process *process);

/* --- peer_link.c -------------------------------------------------------------------------------- */

int rn_link_start(struct peer *peer); /* 0 or -errno */
void rn_link_close(struct link *link);
void rn_process_release(struct process *process); /* all that it has given us */
void rn_replies_fail(struct process *process);

/* --- peer_serve.c ------------------------------------------------------------------------------- */

void rn_served_new(int fd); /* takes the descriptor; without the lock */
void rn_served_close(struct served *served);

/* --- peer_port.c -------------------------------------------------------------------------------- */

void rn_port_free(struct port *port);
void rn_stream_accepted(int fd); /* takes the descriptor; on the engine, without the lock */

#endif
