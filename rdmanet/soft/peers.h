/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects behind peer.h, which has the picture.
 *
 *     peer.c        peers and processes: how long they are kept, how their death is told
 *     peer_link.c   we ask: the link, segments, channels, requests
 *     peer_serve.c  they ask
 *     peer_port.c   our ports, and who knocks there
 *     peer_proof.c  who is at the other end, and may it see our memory?
 *     peer_wire.c   messages with descriptors between two sockets
 *
 *     struct peer      one for each port asked for; counted; what the device sees
 *     struct process   one open device of another process: what several peers share, and its pidfd
 *     struct link      our socket to it: what we ask for and get
 *     struct served    its socket to us: what it asks for and gets
 *     struct port      a port of ours, with its listening sockets (struct ear)
 *
 * Who is let in.  Each end of a link shows that it may trace the other, before a descriptor passes: peer_proof.c.
 * Nothing that a process says about itself is believed.  What is mapped was checked first: a memfd that can't
 * shrink, of the size that was told.  A socket that hasn't come through in five seconds is closed, and until then it
 * is a stranger (stranger.h).
 *
 * What can't be mapped.  A process that has proven itself, but whose arena can't be mapped here, or whose link came too
 * late, is reached by TCP; and since a queue pair whose peer maps it takes no connection by TCP in that peer's name,
 * each queue pair that goes this way is announced over the proven link (BY_STREAM).  A segment that can't be mapped
 * is asked for three times, then it is reached as memory without a segment is, and tried again now and then.
 *
 * Without descriptors.  A descriptor that doesn't arrive, because one of the two processes has none left, costs
 * what it was for, never the link: a segment is then one that can't be mapped, and a channel is signalled by its owner.
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
#include "guard.h"
#include "log.h"
#include "secret.h"
#include "settings.h"
#include "stranger.h"

#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

/* --- the wire ----------------------------------------------------------------------------------- */

enum { MAGIC = 0x524e504c /* "RNPL" */, VERSION = 2 };

enum message_type {
	HELLO = 1,    /* value: a descriptor's number */
	WELCOME,      /* identity, + arena */
	REFUSED,      /* value: enum refusal */
	WANT_SEGMENT, /* value: id */
	SEGMENT,      /* value: id, size (0: there is none), + memfd */
	WANT_CHANNEL, /* value: id, size (1: don't send it, signal it once) */
	CHANNEL,      /* value: id, size (0: there is none, or it was signalled), + eventfd */
	REQUEST,      /* value: serial, bytes */
	ANSWER,       /* value: serial, size: of the bytes, or -errno; bytes */
	GONE_SEGMENT, /* value: id */
	GONE_CHANNEL, /* value: id */
	CHALLENGE,    /* value: a descriptor's number; identity */
	PROOF,        /* identity */
	BY_STREAM,    /* value: a queue pair of ours, size: of yours; its requests come by TCP */
	CONNECTION,   /* value: what the connection manager says, size: the token of the connection */
	MESSAGES,
};

struct message {
	uint32_t magic;
	uint16_t version, type;
	uint32_t value, reserved;
	int64_t size;
};

/* What an end says of itself in CHALLENGE, PROOF and WELCOME. */
struct identity {
	uint8_t nonce[RN_NONCE];  /* the other end's, as it was read */
	uint8_t secret[RN_PROOF]; /* of PROOF and WELCOME: the secret is known here */
	uint64_t instance;        /* of the device: another after it was closed and opened */
	int64_t arena_size;       /* of WELCOME */
};

enum refusal {
	REFUSED_USER = 1,
	REFUSED_UNSEEN,
	REFUSED_NO_TRACE,
	REFUSED_VERSION,
	REFUSED_CLOSED,
	REFUSED_NONCE,
	REFUSED_SECRET,
	REFUSED_TRANSPORT,
	REFUSED_AGAIN,
	REFUSED_BUSY,
	REFUSALS,
};

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
	bool is_unmapped;        /* DEAD, though its process has proven itself and lives */
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
	char *_Atomic base; /* NULL: it isn't here */
	_Atomic size_t size;
	/* With the lock: */
	bool asked;        /* an answer will come */
	unsigned tries;    /* that were in vain: after some it is reached another way */
	uint64_t again_ns; /* not asked for before that */
};

struct channel {
	uint32_t id;
	int fd;            /* -1: it isn't here */
	bool asked;        /* for it, or for an event: the answer will come, and that event with it */
	bool owed;         /* another event, then */
	bool is_lost;      /* no descriptor was free for it: its owner signals it */
	uint64_t again_ns; /* not asked for itself before that */
};

/* The proof that an end may trace the other: peer_proof.c. */
struct proof {
	int fd; /* a memfd: its name says our nonce; -1 */
	int pid;
	uid_t user;
	uint8_t ours[RN_NONCE], theirs[RN_NONCE];
};

enum { SEGMENT_BUCKETS = 64 };

struct process {
	struct process *next;
	int pid;
	uint64_t instance;
	bool dead;
	unsigned peers_count, served_count; /* idle without peers, freed when it has neither */
	struct peer *peers;
	struct rn_notice *waiting; /* for a segment: a few of all that there are */
	struct link *link; /* NULL: it is only served */
	struct rn_source pidfd;
	struct rn_timer idle;
	struct rn_timer again; /* ask for segments that could not be mapped; */
	bool asks_again;       /* it is set */
	unsigned given_up;     /* segments */

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
	struct proof proof;      /* until WELCOME */
	bool is_challenged;
	struct peer *peer;       /* until WELCOME */
	struct process *process; /* from then on */
	struct outbox out;
};

struct served {
	struct served *next, **link;
	struct rn_source source;
	struct rn_timer timer; /* waiting for HELLO, and PROOF */
	struct rn_stranger stranger;
	struct proof proof; /* its descriptor is there while a PROOF is awaited */
	struct process *process;
	struct outbox out;
	uint32_t *segments, *channels; /* that it was given */
	unsigned segment_count, channel_count;
	struct streamed *streamed; /* the queue pairs whose requests come by TCP */
	unsigned streamed_count;
};

struct streamed {
	uint32_t theirs, ours;
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
	bool has_name;
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

	uint64_t instance; /* of our device; 0: not chosen yet */
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

socklen_t rn_peer_name(uint16_t port, struct sockaddr_un *address);

static inline struct message rn_message(enum message_type type, uint32_t value, int64_t size)
{
	return (struct message){.magic = MAGIC, .version = VERSION, .type = (uint16_t)type, .value = value, .size = size};
}

/* Now, or when the socket has room. An error of the socket is no error here: its end is seen when
 * it is read. Without the descriptor, when none is to be had. -ENOMEM. */
int rn_send(struct rn_source *source, struct outbox *out, const struct message *message, const void *bytes,
	    size_t length, int fd);
void rn_outbox_flush(struct rn_source *source, struct outbox *out);
void rn_outbox_clear(struct outbox *out);

/* What came in: the engine's only, so one buffer does for all. */
struct inbox {
	struct message message;
	unsigned char bytes[RN_PEER_MESSAGE_MAX];
	size_t length; /* of the bytes */
	int fd;        /* -1, or one that came along and found room: whoever keeps it sets -1 */
};
extern struct inbox rn_inbox;

enum arrival { NOTHING, ARRIVED, ENDED };
/* expects_fd: if one came and there was no room for it, that is said. */
enum arrival rn_receive(int socket_fd, bool expects_fd);
void rn_inbox_discard(void);
bool rn_has_hung_up(int socket_fd); /* the other end; what it has said before may be there still */

/* A memfd of exactly this size that can't change it: mapped; or NULL. */
char *rn_map_sealed(int fd, int64_t size);
void rn_unmap(char *base, size_t size);

/* --- peer_proof.c ------------------------------------------------------------------------------- */

/* Each of these: 0, or why not. Who is at the other end, by the kernel's word; then a memfd for it to read, whose
 * number is proof->fd; then its own, by the number that it has said. */
enum refusal rn_proof_begin(struct proof *proof, int socket_fd);
enum refusal rn_proof_offer(struct proof *proof);
enum refusal rn_proof_read(struct proof *proof, uint32_t number);
/* What the other end makes of it; nobody needs our memfd from here on. */
enum refusal rn_proof_check(struct proof *proof, const struct identity *other);
/* Of the secret: of both nonces, by one end or the other. */
enum rn_link_end { LINK_CLIENT, LINK_SERVER };
void rn_proof_tell_secret(const struct proof *proof, enum rn_link_end ours, struct identity *self);
enum refusal rn_proof_check_secret(const struct proof *proof, enum rn_link_end ours, const struct identity *other);
/* Has that process been there all the time? Its pidfd, or -1 where the kernel has none. */
enum refusal rn_proof_hold(const struct proof *proof, int socket_fd, int *pidfd);
void rn_proof_end(struct proof *proof);
/* Say so to whoever runs us; a process that has failed is not looked at again for a while. */
void rn_proof_failed(const struct proof *proof, enum refusal refusal);

/* --- peer.c ------------------------------------------------------------------------------------- */

/* Around a callback, which runs without the lock; and waiting until it isn't running. */
void rn_callback_begin(void *object);
void rn_callback_end(void);
void rn_callback_settle(void *object);

void rn_peer_notify(struct peer *peer, enum rn_notice_why why);
void rn_process_notify(struct process *process, enum rn_notice_why why);
/* Wait for a segment: once, and nothing for who isn't subscribed.  Tell all that do. */
void rn_process_await(struct process *process, struct rn_notice *notice);
void rn_process_tell_waiting(struct process *process);
void rn_peer_put_locked(struct peer *peer);
void rn_peer_unlist(struct peer *peer);
/* The known one, or a new one; NULL when out of memory. Takes the pidfd. On the engine. */
struct process *rn_process_of(int pid, uint64_t instance, int pidfd);
uint64_t rn_instance(void); /* of our device */
void rn_process_let_go(struct process *process);
void rn_process_died(struct process *process);

/* --- peer_link.c -------------------------------------------------------------------------------- */

int rn_link_start(struct peer *peer); /* 0 or -errno */
void rn_link_close(struct link *link);
void rn_segments_ask(struct rn_timer *again); /* for those of a process that could not be mapped */
void rn_process_release(struct process *process); /* all that it has given us */
void rn_replies_fail(struct process *process);

/* --- peer_serve.c ------------------------------------------------------------------------------- */

void rn_served_new(int fd); /* takes the descriptor; without the lock */
void rn_served_close(struct served *served);

/* --- peer_port.c -------------------------------------------------------------------------------- */

void rn_port_free(struct port *port);
void rn_stream_accepted(int fd); /* takes the descriptor; on the engine, without the lock */

#endif
