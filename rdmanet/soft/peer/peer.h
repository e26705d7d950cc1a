/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers: other processes of this user on this host, and the way into their memory.
 *
 * A queue pair's number carries a port that its process has bound (QPN[23:8]).  The port names
 * an abstract Unix socket, "\0rdmanet-soft/<port>", on which the process serves whoever may see
 * its memory anyhow: those that the kernel lets trace it (proof.c).  Over that link go, once
 * each, the descriptors of its arena, of memory segments and of completion channels; after that
 * the link is quiet, but for requests that only the owner can execute.
 *
 *     poster's process                                       owner's process
 *     rn_peer_get(port) ---- connect, hello ---------------> may we trace each other?
 *                       <--- challenge ---------------------
 *                       ---- proof -------------------------> rn_arena_fd()
 *     arena mapped      <--- welcome + arena fd ------------
 *     rn_peer_segment() ---- segment? ---------------------> rn_segment_fd()
 *     rn_peer_signal()  ---- channel? ---------------------> ops->channel_fd()
 *     rn_peer_request() ---- request ----------------------> ops->serve()
 *     unmapped          <--- gone --------------------------- rn_segment_put(), rn_channel_gone()
 *
 * A link has a direction: each side that wants something makes its own.  Nothing here blocks its
 * caller: what is not there yet is asked for, and a notice says when it has come.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/witness.h"
#include "verbs.h"

enum rn_peer_state {
	RN_PEER_CONNECTING,
	RN_PEER_READY, /* pid, arena, arena_size and witness are valid, until the last put */
	RN_PEER_DEAD,  /* no such process, refused, died, or closed its device */
	RN_PEER_SELF,  /* a port of this process: reach its tables directly */
};

/* One for each port asked for; ports of one process share its link and its mappings. */
struct rn_peer {
	uint16_t port;
	int pid;
	_Atomic int state;
	char *arena; /* mapped read-write, sealed, so never shorter than arena_size */
	size_t arena_size;
	struct rn_witness witness; /* the first part of whatever is done to its memory by pid */
};

/* Once per process, first. Code that keeps peers until the engine stops registers its stop hook later. */
void rn_peers_start(void);

/* Counted.  get starts the link when there is none; NULL only when out of memory.  A dead peer is
 * forgotten: the next get tries anew, whoever has the port then. */
struct rn_peer *rn_peer_get(uint16_t port);
void rn_peer_put(struct rn_peer *);

struct rn_notice;

/*
 * The peer's segment: its base and size, when it is MAPPED.  When it is ASKED for, `waiting` (subscribed to the peer,
 * or NULL) is told SEGMENT_READY, once, and no other (also if another segment has come, or the owner says there is
 * none: look again then).  A LOST one could not be mapped, three times: reach it another way.  Valid until
 * ops->withdrawn: an owner takes it back when no queue pair can be inside any more, but a lying one whenever it likes.
 */
enum rn_segment_state { RN_SEGMENT_MAPPED, RN_SEGMENT_ASKED, RN_SEGMENT_LOST };
enum rn_segment_state rn_peer_segment(struct rn_peer *, uint32_t segment_id, char **base, size_t *size,
				    struct rn_notice *waiting);

/* One write to that completion channel's eventfd: now (true), or one for all when its descriptor has come. */
bool rn_peer_signal(struct rn_peer *, uint32_t channel_id);

/* --- notices: on the engine thread ----------------------------------------------------------- */

enum rn_notice_why {
	RN_LINK_READY,
	RN_LINK_MUTUAL,   /* it is linked to us, too, and was not before */
	RN_LINK_FAILED, /* no process has the port, or it refused us */
	RN_SEGMENT_READY, /* only to those that wait for one: rn_peer_segment */
	RN_PEER_DIED,     /* after LINK_READY only; state is DEAD */
};

struct rn_notice {
	void (*run)(struct rn_notice *, struct rn_peer *, enum rn_notice_why);
	struct rn_peer *peer; /* peer.c's from here on */
	struct rn_notice *next, **link;
	struct rn_notice *next_waiting, **waiting; /* of those that wait for a segment; NULL: it doesn't */
	uint64_t round;
};

/* Subscribing when the state is settled already gives no notice of it: subscribe, then look.
 * After unsubscribe has returned run isn't running and won't (same rules as base/engine.h). */
void rn_peer_subscribe(struct rn_peer *, struct rn_notice *);
void rn_peer_unsubscribe(struct rn_notice *);

/* --- requests: work that the owner's engine does --------------------------------------------- */

enum { RN_PEER_MESSAGE_MAX = 64 * 1024 };

struct rn_reply {
	/* len < 0: -errno, the peer died (ECONNRESET) or refused. On the engine thread. */
	void (*done)(struct rn_reply *, const void *data, long len);
	struct rn_reply *next, **link; /* peer.c's from here on */
	struct rn_peer *peer;
	uint32_t serial;
};

/* 0, or -ENOTCONN (not READY), -EMSGSIZE, -ENOMEM; the message is copied. Answers come in order. */
int rn_peer_request(struct rn_peer *, const void *message, size_t length, struct rn_reply *);
void rn_reply_cancel(struct rn_reply *); /* nothing when answered; the request is still executed */

/* --- the other way --------------------------------------------------------------------------- */

/* To a peer whose link has failed: our queue pair's requests to its queue pair come by TCP. Nothing where there is no
 * link to its process; anew: try to make one, for the next time. */
void rn_peer_tell_stream(struct rn_peer *, uint32_t our_qpn, uint32_t its_qpn, bool anew);
/* Is it ours, or the one who has this port linked to us, as we are to it? What that takes has been taken. */
bool rn_peer_is_met(uint16_t port);
/* Is its process linked to us, as we are to it? Of a peer that is READY. */
bool rn_peer_is_mutual(struct rn_peer *);
/* Has a process that may map our memory announced TCP for its queue pair and ours? */
bool rn_peer_said_stream(uint32_t its_qpn, uint32_t our_qpn);

/* --- ports of this process ------------------------------------------------------------------- */

/* Where no service is expected to listen. */
enum { RN_PORT_LOWEST = 32768, RN_PORT_HIGHEST = 60999 };

/* May a queue pair have this number? */
static inline bool rn_qpn_is_possible(uint32_t qpn)
{
	return qpn >> 8 >= RN_PORT_LOWEST && qpn >> 8 <= RN_PORT_HIGHEST;
}

/* 0 when there is none to be had.  The caller has a hold on the engine while it has the port.  A
 * released port stays with the process, for its next binding, until the engine stops: so links
 * of others stay good. */
uint16_t rn_port_bind(void);
void rn_port_release(uint16_t port);
bool rn_port_is_mine(uint16_t port);
/* Can others link to us by it? */
bool rn_port_has_name(uint16_t port);
/* Listen on the TCP port of this number at this address of ours (interface: for a link-local one),
 * until the engine stops; nothing when it does so already. 0 or errno. Connections go to
 * ops->accepted. */
int rn_port_listen(uint16_t port, const union ibv_gid *at, uint32_t interface);

/* --- for the connection manager --------------------------------------------------------------- */

struct rn_death {
	void (*dead)(struct rn_death *, bool failed); /* once; failed: there never was a link */
	void (*linked)(struct rn_death *);            /* there is one now, from us or to us; or NULL */
	struct rn_notice notice;                      /* peer.c's */
	struct rn_peer *peer;
};

/* Both on the engine thread. */
int rn_peer_watch_death(uint16_t port, struct rn_death *); /* 0 or -errno; keeps the link */
void rn_peer_unwatch_death(struct rn_death *);

/* A message from one connection manager to the other, over the link, about a connection that has this token; `what` is
 * theirs. Any thread, for another thread's peer with a hold on it; false: there is no link. */
bool rn_peer_is_linked(struct rn_peer *);
bool rn_peer_tell_connection(struct rn_peer *, uint32_t what, uint64_t token, const void *message, size_t length);
/* The same in memory, which wakes who reads this event channel of the other process, and not its engine. False: it does
 * not fit there. */
bool rn_peer_mail(struct rn_peer *, uint32_t channel, uint32_t what, uint64_t token, const void *message, size_t length);
bool rn_peers_have_mail(void);  /* has another process said something in memory that was not heard? Any thread */
void rn_peers_hear_mail(void);  /* hear it: on the engine, or a thread that stands in for it */
/* To a process that is being heard: by the link over which it speaks. On the engine. */
void rn_peer_answer_connection(const void *process, uint32_t what, uint64_t token, const void *message, size_t length);
/* Does its process live at this moment, whatever the engine has heard? False, too, where the kernel has no pidfd. */
bool rn_peer_lives(struct rn_peer *);
/* When the connection manager last believed its process, which is its affair; 0: it never has. */
uint64_t rn_peer_believed_at(struct rn_peer *);
void rn_peer_believe(struct rn_peer *, uint64_t now_ns);
/* Has the process taken all that was sent over the link? If not, it does not run, or is busy. */
bool rn_peer_takes_more(struct rn_peer *);
/* The process of a peer that is, or was, linked; to compare with the sender of a message. NULL: this process. */
const void *rn_peer_process(struct rn_peer *);

/* --- the owner takes back ---------------------------------------------------------------------- */

/* Tell those who fetched it. Call when it can't be used any more. Segments say so themselves: shm/segment.h. */
void rn_channel_gone(uint32_t channel_id);

/* What is held for peers now, for rdmanet_soft_live(). */
struct rn_peer_live {
	unsigned peers, links, inbound, mappings;
};
void rn_peer_live(struct rn_peer_live *);

/* --- events ------------------------------------------------------------------------------------ */

/*
 * An eventfd that is shared belongs to the other process as much as to us: that one may have filled the counter, and
 * taken O_NONBLOCK off the open file, so a write or a read may wait for ever.  Reading can be told not to, writing
 * can't, so room is looked for first (cheaper than anything else that we can write to without waiting: a socket,
 * or the kernel's own signal at the end of an asynchronous request).  Left is the moment in between:
 * a process of our own user that fills the counter just then stops the thread that wakes it.
 */
void rn_eventfd_add(int fd);  /* one event; nothing if the counter is full: it then has events enough */
bool rn_eventfd_take(int fd); /* all events, of a semaphore one; false: there is none */

/* --- what the layers above do for peers ---------------------------------------------------------- */

/* Called on the engine thread, but for the ports'. */
struct rn_peer_ops {
	/* A copy of the completion channel's descriptor, to be closed with rn_fd_close; -1: there is none. */
	int (*channel_fd)(uint32_t channel_id);
	/* Raise one event; nothing if there is no such channel. */
	void (*channel_signal)(uint32_t channel_id);
	/* Do what that process asks for. The length of the answer, or -errno. */
	int (*serve)(int peer_pid, const void *message, size_t length, void *answer, size_t room);
	/* A peer's segment is about to be unmapped: none of our posters is in it, or knows it, when this has returned. */
	void (*withdrawn)(const char *base);
	/* Once for each process (each time it had our device open): fire every CQ it could have reached. */
	void (*died)(int pid);
	/* Another process is given the arena. */
	void (*mapped)(void);
	/* A connection came to a port that listens; takes the descriptor. */
	void (*accepted)(int fd);
	/* Called when the TCP port of this number is taken or released, to do the same with other ports: 0 or errno. */
	int (*port_reserve)(uint16_t port);
	void (*port_free)(uint16_t port);
};

/* Before the first peer, or port; ops stay for ever. */
void rn_peers_register(const struct rn_peer_ops *ops);

/* For the connection manager, likewise: a process, to be compared with rn_peer_process, has said this of a connection. On
 * the engine; of this process, or by mail, also on a thread that stands in for it. */
typedef void rn_peer_hear(const void *process, uint32_t what, uint64_t token, const void *message, size_t length);
void rn_peers_register_connections(rn_peer_hear *hear);
