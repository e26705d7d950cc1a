/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects behind peer.h, which has the picture.
 *
 *     peer.c     peers and processes: how long they are kept, how their death is told
 *     notice.c   telling subscribers what becomes of them
 *     link.c     we ask: the link, requests; segments.c, channels.c: and what else we get by it
 *     inbound.c  they ask
 *     port.c     our ports, and accepting connections on them
 *     proof.c    who is at the other end, and may it see our memory?
 *     wire.c     messages with descriptors between two sockets
 *     mail.c     messages in memory: the connection managers'
 *
 *     struct peer      one for each port asked for; counted; what the device sees
 *     struct process   one open device of another process: what several peers share, and its pidfd
 *     struct link      our socket to it: what we ask for and get
 *     struct inbound   its socket to us: what it asks for and gets
 *     struct port      a port of ours, with its listening sockets (struct listener)
 *
 * Admission.  Each end of a link shows that it may trace the other, before a descriptor passes: proof.c.
 * Nothing that a process says about itself is believed.  Memory is checked before it is mapped: a memfd that can't
 * shrink, of the size that was given.  A socket that hasn't come through in five seconds is closed, and until then it
 * is a stranger (base/stranger.h).
 *
 * What can't be mapped.  A process that has proven itself, but whose arena can't be mapped here, or whose link came too
 * late, is reached by TCP; and since a queue pair whose peer maps it takes no connection by TCP in that peer's name,
 * each queue pair that takes this path is announced over the proven link (BY_STREAM).  A segment that can't be mapped
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
#pragma once

#include "base/engine.h"
#include "base/guard.h"
#include "base/log.h"
#include "base/secret.h"
#include "base/settings.h"
#include "base/stranger.h"
#include "base/version.h"
#include "peer/peer.h"
#include "verbs.h"

#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

/* --- the wire ----------------------------------------------------------------------------------- */

enum { RN_LINK_MAGIC = 0x524e504c /* "RNPL" */ };

enum rn_link_message_type {
	RN_LINK_HELLO = 1,    /* value: a descriptor's number */
	RN_LINK_WELCOME,      /* identity, + arena */
	RN_LINK_REFUSED,      /* value: enum rn_refusal */
	RN_LINK_WANT_SEGMENT, /* value: id */
	RN_LINK_SEGMENT,      /* value: id, size (0: there is none), + memfd */
	RN_LINK_WANT_CHANNEL, /* value: id, size (1: don't send it, signal it once) */
	RN_LINK_CHANNEL,      /* value: id, size (0: there is none, or it was signalled), + eventfd */
	RN_LINK_REQUEST,      /* value: serial, bytes */
	RN_LINK_ANSWER,       /* value: serial, size: of the bytes, or -errno; bytes */
	RN_LINK_GONE_SEGMENT, /* value: id */
	RN_LINK_GONE_CHANNEL, /* value: id */
	RN_LINK_CHALLENGE,    /* value: a descriptor's number; identity */
	RN_LINK_PROOF,        /* identity */
	RN_LINK_BY_STREAM,    /* value: a queue pair of ours, size: of yours; its requests come by TCP */
	RN_LINK_CONNECTION,   /* the connection manager's message; value: of what kind, size: the token of the connection */
	RN_LINK_MAIL,         /* value: nonce, size: where the ring for these lies that are not said by the link: mail.c */
	RN_LINK_MESSAGES,
};

struct rn_link_message {
	uint32_t magic;
	uint16_t version, type;
	uint32_t value, reserved;
	int64_t size;
};

/* How an end describes itself in CHALLENGE, PROOF and WELCOME. */
struct identity {
	uint8_t nonce[RN_NONCE];  /* the other end's, as it was read */
	uint8_t secret[RN_PROOF]; /* of PROOF and WELCOME: the secret is known here */
	uint64_t instance;        /* of the device: another after it was closed and opened */
	int64_t arena_size;       /* of WELCOME */
	struct rn_witness witness; /* of WELCOME */
};

enum rn_refusal {
	RN_REFUSED_USER = 1,
	RN_REFUSED_UNSEEN,
	RN_REFUSED_NO_TRACE,
	RN_REFUSED_VERSION,
	RN_REFUSED_CLOSED,
	RN_REFUSED_NONCE,
	RN_REFUSED_SECRET,
	RN_REFUSED_TRANSPORT,
	RN_REFUSED_AGAIN,
	RN_REFUSED_BUSY,
	RN_REFUSALS,
};

extern const char *const rn_refusal_names[RN_REFUSALS];

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
	uint64_t round;
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
	unsigned tries;    /* failed tries: after some it is reached another way */
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

/* The proof that an end may trace the other: proof.c. */
struct proof {
	int fd; /* a memfd whose name contains our nonce; or -1 */
	int pid;
	uid_t user;
	uint8_t ours[RN_NONCE], theirs[RN_NONCE];
};

enum { SEGMENT_BUCKETS = 64 };

/* A ring of messages in a writer's arena, and how far this side has come: mail.c. */
struct ring {
	uint64_t offset; /* 0: there is none */
	uint32_t nonce, position;
};

struct process {
	struct process *next;
	int pid;
	uint64_t instance;
	bool dead;
	unsigned peers_count, inbound_count; /* idle without peers, freed when it has neither */
	struct peer *peers;
	struct rn_notice *waiting; /* for a segment: a few of all that there are */
	struct link *link; /* NULL: it has none but inbound ones */
	struct rn_source pidfd;
	struct rn_timer idle;
	struct rn_timer again; /* ask for segments that could not be mapped; */
	bool asks_again;       /* it is set */
	unsigned given_up;     /* segments */

	char *arena;
	size_t arena_size;
	struct rn_witness witness;
	struct segment *_Atomic segments[SEGMENT_BUCKETS];

	pthread_mutex_t channel_lock; /* guards channels; taken after rn_peers.lock or alone */
	struct channel *channels;
	unsigned channel_count, channel_room;

	struct rn_reply *replies, **replies_end; /* in the order of their requests */
	uint32_t serial;

	struct ring mail_out, mail_in; /* from us, while `link` is there, and to us */
	uint64_t round;                /* in which its mail was heard */
	uint64_t believed_ns;          /* when it was, of a name; 0: never (cm/ask.c) */
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

struct inbound {
	struct inbound *next, **link;
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
	bool has_mail; /* said where the process's ring is */
};

struct streamed {
	uint32_t theirs, ours;
};

/* A socket that listens. */
struct listener {
	struct listener *next;
	struct rn_source source;
	struct rn_timer accept_retry;   /* no descriptor left: accept again later */
	void (*arrived)(int fd);   /* takes it; on the engine, without the lock */
	union ibv_gid gid;         /* TCP's */
};

struct port {
	struct port *next;
	struct listener *listeners; /* the Unix socket's is the last */
	int reserved_fd;  /* bound to the TCP port on all addresses, never listening */
	uint16_t port;
	bool has_name;
	bool is_bound;
	struct rn_peer self;
};

struct peers_state {
	pthread_mutex_t lock; /* guards all of this, and the objects */
	pthread_cond_t calm;  /* `running` changed and somebody waits */
	void *running;        /* the notice or reply whose callback is under way */
	unsigned waiters;
	uint64_t round; /* of telling peers, and of hearing mail: never 0, which is what nobody was in yet */

	struct peer *peers;
	struct process *processes;
	struct inbound *inbound;
	struct port *ports;

	uint64_t instance; /* of our device; 0: not chosen yet */
	unsigned links, inbound_count, mappings, peer_count;
};
extern struct peers_state rn_peers;
extern const struct rn_peer_ops *rn_peer_ops;

/* A message of another process about a connection. */
rn_peer_hear rn_peers_hear;

#define PEER(rn_peer) RN_OWNER(rn_peer, struct peer, rn)

enum { IDLE_MS = 1000, RETRY_MS = 1, ACCEPT_RETRY_MS = 100 };

static inline void rn_timer_set_ms(struct rn_timer *timer, uint64_t ms)
{
	rn_timer_set(timer, ms * 1000000u);
}

/* All of what follows: with rn_peers.lock held. */

/* --- wire.c -------------------------------------------------------------------------------- */

socklen_t rn_peer_name(uint16_t port, struct sockaddr_un *address);

static inline struct rn_link_message rn_link_message(enum rn_link_message_type type, uint32_t value, int64_t size)
{
	return (struct rn_link_message){
		.magic = RN_LINK_MAGIC,
		.version = RN_WIRE_VERSION,
		.type = (uint16_t)type,
		.value = value,
		.size = size,
	};
}

/* Now, or when the socket has room. An error of the socket is no error here: its end is seen when
 * it is read. Without the descriptor, when none is to be had. -ENOMEM. */
int rn_send(struct rn_source *source, struct outbox *out, const struct rn_link_message *message, const void *bytes,
	    size_t length, int fd);
void rn_outbox_flush(struct rn_source *source, struct outbox *out);
void rn_outbox_clear(struct outbox *out);

/* The last message received; only the engine uses it, so there is one buffer. */
struct inbox {
	struct rn_link_message message;
	unsigned char bytes[RN_PEER_MESSAGE_MAX];
	size_t length; /* of the bytes */
	int fd;        /* the descriptor that came with it, or -1; code that keeps it sets -1 */
};
extern struct inbox rn_inbox;

enum arrival { NOTHING, ARRIVED, ENDED };
/* expects_fd: log it if a descriptor came and there was no room for it. */
enum arrival rn_receive(int socket_fd, bool expects_fd);
void rn_inbox_discard(void);
bool rn_has_hung_up(int socket_fd); /* the other end; its last messages may still be unread */

/* A memfd of exactly this size that can't change it: mapped; or NULL. */
char *rn_map_sealed(int fd, int64_t size);
void rn_unmap(char *base, size_t size);

/* --- proof.c ------------------------------------------------------------------------------- */

/* Each of these: 0, or why not. Who is at the other end, by the kernel's word; then a memfd for it to read, whose
 * number is proof->fd; then its own, by the number that it has said. */
enum rn_refusal rn_proof_begin(struct proof *proof, int socket_fd);
enum rn_refusal rn_proof_offer(struct proof *proof);
enum rn_refusal rn_proof_read(struct proof *proof, uint32_t number);
/* After the other end's proof: our memfd is not needed any more. */
enum rn_refusal rn_proof_check(struct proof *proof, const struct identity *other);
/* Of the secret: of both nonces, by one end or the other. */
enum rn_link_end { RN_LINK_CLIENT, RN_LINK_SERVER };
void rn_proof_tell_secret(const struct proof *proof, enum rn_link_end ours, struct identity *self);
enum rn_refusal rn_proof_check_secret(const struct proof *proof, enum rn_link_end ours, const struct identity *other);
/* Has that process been there all the time? Its pidfd, or -1 where the kernel has none. */
enum rn_refusal rn_proof_hold(const struct proof *proof, int socket_fd, int *pidfd);
void rn_proof_end(struct proof *proof);
/* Log it; a process that has failed is ignored for a while. */
void rn_proof_failed(const struct proof *proof, enum rn_refusal refusal);

/* --- notice.c ----------------------------------------------------------------------------------- */

/* Around a callback, which runs without the lock; and waiting until it isn't running. */
void rn_callback_begin(void *object);
void rn_callback_end(void);
void rn_callback_settle(void *object);

void rn_peer_notify(struct peer *peer, enum rn_notice_why why);
void rn_process_notify(struct process *process, enum rn_notice_why why);
/* Wait for a segment: once, and nothing for who isn't subscribed.  Tell all that do. */
void rn_process_await(struct process *process, struct rn_notice *notice);
void rn_process_tell_waiting(struct process *process);

/* --- peer.c ------------------------------------------------------------------------------------- */

void rn_peer_put_locked(struct peer *peer);
void rn_peer_unlist(struct peer *peer);
/* The known one, or a new one; NULL when out of memory. Takes the pidfd. On the engine. */
struct process *rn_process_of(int pid, uint64_t instance, int pidfd);
uint64_t rn_instance(void); /* of our device */
void rn_process_let_go(struct process *process);
void rn_process_died(struct process *process);

/* --- link.c -------------------------------------------------------------------------------- */

int rn_link_start(struct peer *peer); /* 0 or -errno */
void rn_link_close(struct link *link);
void rn_process_release(struct process *process); /* all that it has given us */
void rn_replies_fail(struct process *process);

/* --- segments.c, channels.c: on the engine ---------------------------------------------------- */

/* What rn_inbox says of one. */
void rn_on_segment(struct process *process);
void rn_on_gone_segment(struct process *process);
void rn_on_channel(struct process *process);
void rn_on_gone_channel(struct process *process);
void rn_segments_ask(struct rn_timer *again); /* for those of a process that could not be mapped */
void rn_segments_release(struct process *process);
void rn_channels_release(struct process *process);

/* --- inbound.c ----------------------------------------------------------------------------- */

void rn_inbound_new(int fd); /* takes the descriptor; without the lock */
void rn_inbound_close(struct inbound *inbound);
/* Its process has ended: what it has said of connections before is still to be heard. */
void rn_inbound_last_words(struct process *process);
void rn_peers_tell_segment_gone(uint32_t segment_id); /* those who fetched it */

/* --- mail.c -------------------------------------------------------------------------------- */

/* What rn_inbox says of another process's ring; hear what lies in it, if the process takes our answers, or it is the last
 * that it has said: on the engine. */
void rn_on_mail(struct process *process);
void rn_mail_hear(struct process *process, bool is_last);
/* It may not read what we wrote: say it by the link. */
void rn_mail_take_back(struct process *process);
void rn_mail_close(struct process *process); /* the same, and our link to it ends */

/* --- port.c -------------------------------------------------------------------------------- */

void rn_port_free(struct port *port);
