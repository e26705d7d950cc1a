/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The embedded device: a software RDMA adapter in a shared library that speaks the verbs ABI.
 *
 * Who calls whom:
 *
 *          program                      program                         engine thread
 *             |                            |                        timers, notices, replies
 *     verbs.c  cm.c                 ibv_post_send, ibv_poll_cq               |
 *       |   |                              |                                 |
 *     mr.c cq.c qp.c                    post.c  <----- rn_qp_progress -------+
 *       |   |    |                         |      (what could not be done at once, or chaos.c made wait)
 *       |   |    |                      exec.c: the requester
 *       |   |    |                         |
 *       |   |    |                      respond.c: the responder
 *       |   |    |                      /     |     \
 *       |   |    |         own tables     peer.c     remote.c
 *       |   |    |        (same process)  mapped     owner's engine executes
 *       +---+----+------> arena.c         arena
 *
 * One responder, several ways to reach it.  The poster's thread plays both adapters: exec.c reads
 * the work request, respond.c checks it against the responder's queue pair and keys in the
 * responder's arena, copies once, and completes the receive there.  The ways differ only in how
 * memory is touched: by pointer, by process_vm_*, or by asking the engine of its owner.
 *
 * The addresses of the device are the host's: gid.c.
 * Receives come from the ring of a queue pair, or from a pool that many share (pool.h, srq.c).
 * To peers whose arena can't be mapped requests go as frames of a TCP stream (stream.h), and the responder
 * runs where they come out.
 *
 * XRC has one connection to many of these: xrc.c.
 * UD has no connection: ud.c looks for the receiver with each message, ud_wire.c takes it to other hosts.
 *
 * Locks.  All are private to this process, spin shortly, and are taken in this order:
 *
 *     context (mutex) > world (mutex) > QP send lock > QP receive lock > CQ lock > pool's lock > event queue lock
 *
 * A channel's lock comes before those of its CQs.  A CQ's list of streams (stream_lock) comes after send locks, before
 * receive locks; who has the list first may only try a send lock.  Innermost: the table of channels (channel.c), keys
 * (mr_key.c), a context's faults (chaos.c).
 *
 * No lock is held while waiting for the engine (timer_cancel and the like), since callbacks take
 * the send lock.  Waiting for `busy` while holding the own send lock is fine: nobody who is busy
 * ever waits for a lock of ours (see exec.c).
 *
 * After a fork the child's copies of all this are dead: rn_process moved on, so every object is
 * recognised as foreign; uses are refused, destructors do nothing, a fresh open works.
 */
#ifndef RDMANET_SOFT_H
#define RDMANET_SOFT_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "verbs.h"

#include "arena.h"
#include "chaos.h"
#include "engine.h"
#include "extras.h"
#include "fence.h"
#include "lock.h"
#include "mw.h"
#include "own.h"
#include "peer.h"
#include "pool.h"
#include "respond.h"
#include "settings.h"

#define RN_EXPORT __attribute__((visibility("default")))
#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* What the device can do; verbs.c reports these, the creators enforce them. */
enum {
	RN_MAX_QP_WR = 1 << 15,
	RN_MAX_CQE = 1 << 22,
	RN_MAX_INLINE = 1024,
	RN_MAX_RD_ATOMIC = 128,
	RN_MAX_SRQS = RN_POOLS_MAX,
	RN_MAX_CHANNELS = 1 << 12,
};
enum { RN_LID = 1 }; /* with the link layer of InfiniBand: every device of this host's */
#define RN_MAX_MESSAGE (1u << 30)
#define RN_MAX_DM (64u << 20)

/* --- intrusive list ----------------------------------------------------------------------------- */

struct rn_list {
	struct rn_list *next, *prev;
};

static inline void rn_list_init(struct rn_list *head)
{
	head->next = head->prev = head;
}
static inline void rn_list_add(struct rn_list *head, struct rn_list *item)
{
	item->prev = head->prev;
	item->next = head;
	head->prev->next = item;
	head->prev = item;
}
static inline void rn_list_del(struct rn_list *item)
{
	item->prev->next = item->next;
	item->next->prev = item->prev;
	item->next = item->prev = item;
}
static inline bool rn_list_empty(const struct rn_list *head)
{
	return head->next == head;
}

#include "stream.h"

/* --- process and context (verbs.c) -------------------------------------------------------------- */

/* Counts forks on the way to this process; what was opened under another number is foreign. */
extern unsigned rn_process;

/* Guards the process's tables: queue pairs by number, ports, what is quarantined. */
extern pthread_mutex_t rn_world;

struct rn_event {
	struct rn_list link;
	struct ibv_async_event event;
};

struct rn_context {
	struct verbs_context verbs;
	unsigned process;
	uint64_t file_device, file_inode; /* of cmd_fd: what a context is imported by */
	bool has_engine; /* holds it since its first queue pair */
	struct rn_list link;

	pthread_mutex_t mutex; /* the lists, and users counts of what is on them */
	struct rn_list pds, tds, ahs, mrs, mws, dms, channels, cqs, xrcds, srqs, qps;

	struct rn_lock event_lock;
	struct rn_list events; /* not read yet */
	struct rn_counters retired;
	struct rn_chaos chaos;
};

static inline struct rn_context *rn_context(struct ibv_context *context)
{
	return container_of(context, struct rn_context, verbs.context);
}
static inline bool rn_is_foreign(const struct ibv_context *context)
{
	return container_of(context, struct rn_context, verbs.context)->process != rn_process;
}

/* Queue an asynchronous event of a QP, a CQ or the port (element: NULL) for ibv_get_async_event. async.c */
void rn_event_raise(struct rn_context *context, enum ibv_event_type type, void *element);
/* Before an object goes: drop its unread events, wait until those read were acknowledged. */
void rn_event_forget(struct rn_context *context, void *element, uint32_t *reported, uint32_t *completed,
		     pthread_mutex_t *mutex, pthread_cond_t *cond);

/* The engine, from the first queue pair of the context on. 0 or errno. */
int rn_context_engine(struct rn_context *context);

extern struct rn_list rn_contexts; /* with rn_world held */
int rn_context_file(struct rn_context *context); /* 0 or errno. import.c */

/* domain.c */
struct rn_pd {
	struct ibv_pd pd;
	uint32_t number;
	unsigned users;
	struct ibv_pd *parent; /* a parent domain: of what, and for which threads */
	struct ibv_td *td;
	struct rn_list link;
};

static inline struct rn_pd *rn_pd(struct ibv_pd *pd)
{
	return (struct rn_pd *)pd;
}

struct ibv_td *rn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int rn_dealloc_td(struct ibv_td *td);
struct ibv_pd *rn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
void rn_domain_destroy_all(struct rn_context *context);

/* --- memory (mr.h) ------------------------------------------------------------------------------ */

struct rn_segment {
	uint32_t id;
	int fd;
	char *base; /* our own mapping, so that the user's munmap is no concern of ours */
	size_t size;
	uint64_t device, inode;
	uint64_t adopted; /* the address where it has taken the place of a program's own memory; 0: it hasn't */
	unsigned users;
	struct rn_list link;
};

struct rn_mr {
	struct ibv_mr mr;
	uint32_t index;
	struct rn_segment *segment; /* NULL: user memory */
	uint64_t pinned;            /* bytes that count against a limit */
	unsigned *holder;           /* counts it as a user: the device memory that it is of, or NULL */
	struct rn_list link;
};

/* Memory that the caller has settled: what its entry says is taken as it is. */
struct ibv_mr *rn_reg_entry(struct ibv_pd *pd, struct rn_mr_entry *entry);
struct ibv_mr *rn_alloc_null_mr(struct ibv_pd *pd);
void rn_null_close(void);
/* Any part of a sealed memfd, by any address. */
struct ibv_mr *rn_reg_memfd(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, unsigned access);

/* The key table that work requests of this process are checked against. What peers see of it in
 * the arena is a copy: they can't make us use what they have scribbled there. */
extern struct rn_mr_entry rn_mr_table[RN_MRS_MAX];

static inline const struct rn_mr_entry *rn_mr_find(const struct rn_mr_entry *table, uint32_t key)
{
	const struct rn_mr_entry *entry = &table[rn_mr_index(key)];

	return atomic_load_explicit(&entry->key, memory_order_acquire) == key && key ? entry : NULL;
}

/* Is [addr, addr + length) inside the region? */
static inline bool rn_mr_covers(const struct rn_mr_entry *mr, uint64_t addr, uint64_t length)
{
	uint64_t at = addr - mr->iova;

	return addr >= mr->iova && length <= mr->length && at <= mr->length - length;
}

/* In an entry's access: it is good as an lkey. Regions are, windows aren't. */
#define RN_ACCESS_LOCAL (1u << 31)

/* An index of the table for a new key, and the first key of it; 0: no more. Given back with its last key. */
uint32_t rn_mr_key_take(void);
void rn_mr_key_give_back(uint32_t key);
/* A peer asked this queue pair for memory that it may not have: count it, and say so. With sq_lock held. */
void rn_mr_key_refused(struct rn_qp *qp);
/* Make it valid, in both tables. */
void rn_mr_publish(const struct rn_mr_entry *entry, uint32_t key);

/* Can the range of our own address space be read (written)? Brings it in. One system call. */
bool rn_mr_probe(uint64_t addr, uint64_t length, bool write);

int rn_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags, struct ibv_sge *list,
		 uint32_t num_sge);

/* Device memory (dm.c). */
struct ibv_dm *rn_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int rn_free_dm(struct ibv_dm *dm);
struct ibv_mr *rn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned access);
/* For import.c: is this one it? A second handle for it. */
bool rn_dm_is(struct rn_list *item, uint32_t handle);
struct ibv_dm *rn_dm_again(struct ibv_context *context, struct rn_list *item);
void rn_dm_destroy_all(struct rn_context *context);
void rn_dm_forked(void);

unsigned rn_mr_count_quarantined(void);
unsigned rn_mr_count_mappings(void);
void rn_mr_close(void);
void rn_mr_forked(void);
void rn_mr_reap(void); /* release what nobody is inside of any more; with rn_world held */
void rn_mr_destroy_all(struct rn_context *context);

/* --- completion (cq.h) ------------------------------------------------------------------------------------ */

struct rn_channel {
	struct ibv_comp_channel channel;
	uint32_t id;
	_Atomic bool never_waits; /* whatever its descriptor's mode is by now: channel.c */
	struct rn_lock lock; /* the list */
	struct rn_list cqs;
	struct rn_list link;
};

/* A finished send, in the CQ's private ring. */
struct rn_cqe {
	uint64_t wr_id;
	struct rn_qp *qp;
	uint32_t sq_freed; /* send queue slots up to here are free once this is polled */
	uint32_t byte_len;
	uint8_t status, opcode, vendor_err;
};

struct rn_cq {
	union {
		struct ibv_cq cq;
		struct ibv_cq_ex ex; /* with its functions when it was made by create_cq_ex */
	};
	uint32_t index; /* of the block */
	struct rn_cq_block *block;
	struct rn_lock lock;

	struct rn_cqe *ring; /* finished sends: head..tail, modulo 2^32 */
	uint32_t size, head, tail;
	uint64_t *stamps; /* when each was pushed; NULL: nobody will ask */
	uint64_t stamp;   /* of the completion polled last */
	bool overrun;
	bool may_overrun; /* the program has said that it won't, or doesn't care */
	struct rn_task fall; /* after an overrun: its queue pairs go to ERR */
	_Atomic uint32_t hold_us; /* moderated: how long the event for a completion may wait; 0: not at all */
	struct rn_timer timer;    /* of that */
	bool sends_first; /* whose turn it is */

	struct rn_qp *ready, **ready_tail; /* queue pairs with receives to poll, in turns */
	struct rn_qp *attached[RN_CQ_QPS_MAX];
	uint32_t attached_end; /* none at this bit or above */
	_Atomic uint32_t armed; /* the block's word as we have left it: pushers can but mark it as signalled */
	uint32_t looked_at, unheard; /* by rn_cq_look_after_all: bits; an arming that was signalled without a token */

	struct rn_lock stream_lock; /* the list: see stream_poll.c */
	struct rn_list streams;
	uint32_t stream_round; /* counts armings */
	_Atomic uint32_t num_streams;

	uint32_t events_owed;     /* of earlier armings: signalled, not taken, armed again; under the channel's lock */
	uint32_t events_reported; /* by get_cq_event; likewise */
	uint32_t async_reported;
	unsigned users;
	struct rn_list link, channel_link;

	struct rn_lock turn; /* who iterates; for longer than a few instructions, so no lock of ours is inside it */
	struct {
		struct ibv_wc wc;
		uint64_t stamp;
	} now; /* where the iterator is */
};

static inline struct rn_cq *rn_cq(struct ibv_cq *cq)
{
	return (struct rn_cq *)cq;
}

/* NULL and errno. stamped: keep the time of each completion. Only what the first version of attr has is read. */
struct rn_cq *rn_cq_create(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attr, bool stamped);
struct ibv_cq_ex *rn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
/* A send has finished: with the QP's send lock held. */
void rn_cq_push(struct rn_cq *cq, const struct rn_cqe *cqe);
/* Receives of this QP may be there to poll (it was flushed): look at it, wake whoever waits. */
void rn_cq_kick(struct rn_cq *cq, struct rn_qp *qp);
/* A process that may have pushed into any CQ of ours has died, perhaps within: with rn_world held. */
void rn_cq_recover(void);
int rn_cq_attach(struct rn_cq *cq, struct rn_qp *qp, uint32_t *bit); /* 0 or errno */
void rn_cq_detach(struct rn_cq *cq, struct rn_qp *qp);
/* Forget completions of this QP: it is destroyed or reset. */
void rn_cq_purge(struct rn_cq *cq, struct rn_qp *qp);
int rn_cq_poll(struct ibv_cq *cq, int entries, struct ibv_wc *wc);
/* One completion: 1, 0 or -errno; and when it was made, if the CQ keeps that. */
int rn_cq_take(struct rn_cq *cq, struct ibv_wc *wc, uint64_t *stamp);
int rn_cq_request_notify(struct ibv_cq *cq, int solicited_only);
bool rn_cq_is_armed(struct rn_cq *cq); /* and nothing has come since */

/* After so many completions became visible: fire the CQ's channel if it is armed for them. For our own and
 * for a peer's CQ; peer is NULL for our own. Returns true when an event was sent. */
bool rn_cq_notify(struct rn_cq_block *block, struct rn_peer *peer, bool solicited, uint32_t count);
enum { RN_CQ_ENOUGH = 1 << 30 }; /* a count for which no event waits any longer */
int rn_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* What pushers into moderated CQs have left for us. On the engine. */
void rn_cq_attend_all(void);

enum { RN_CHANNEL_BELL = 0 }; /* the channel on which peers call this process's engine */
/* What scribbling peers have made of their words, and of ours: completions that nobody hears of. With rn_world held;
 * all: not only some of each. How many of our words were wrong. */
unsigned rn_cq_look_after_all(bool all);
int rn_bell_open(void); /* 0 or errno; with the engine held */
void rn_bell_close(void);
void rn_cq_forked(void);
void rn_cq_destroy_all(struct rn_context *context);

/* --- queue pairs (qp.h) ------------------------------------------------------------------ */

/* A posted send that could not be executed at once. Followed by its scatter list or inline data. */
struct rn_send {
	struct ibv_send_wr wr;
	uint64_t due_ns;
	uint64_t moved; /* bytes that were carried already: by the owner's engine, or as a READ's data on a stream */
	uint64_t total; /* of a stream */
	bool deferred;
	struct rn_plan plan; /* chaos.h */
	bool answered; /* of a stream: all the data are here */
	alignas(8) char tail[]; /* sge[max_send_sge], or one for the inline data behind it */
};

struct rn_qp {
	struct ibv_qp_ex ex; /* programs hold &ex.qp_base */
	struct rn_context *context;
	struct rn_cq *send_cq, *recv_cq;
	uint32_t index; /* of the block */
	struct rn_qp_block *block;  /* what other processes see of it */
	struct rn_qp_block *own;    /* the facts among that, as we have them: own.h */
	struct rn_qp_block *_Atomic theirs; /* which of the two has its peer's words; settled with RTR */
	uint32_t generation;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool unreliable; /* UC, UD: no answers, hence no retries */
	struct rn_builder *builder; /* of the ibv_wr_* calls, when it was made for them */

	/* The send queue: under sq_lock. Counts are modulo 2^32: freed <= executed <= posted. */
	alignas(64) struct rn_lock sq_lock;
	_Atomic int state; /* enum ibv_qp_state; changed with sq_lock held */
	uint32_t sq_posted, sq_executed;
	_Atomic uint32_t sq_freed; /* by poll_cq */
	char *sq;                  /* struct rn_send[sq_mask + 1], sq_stride apart: used when queued */
	uint32_t sq_mask, sq_stride;
	struct rn_chaos *chaos;    /* of the context, when it has faults; changed with both queues' locks held */
	struct rn_view view;
	struct rn_peer *_Atomic peer; /* from RTR on; put away with rn_world held, so it stays while that is */
	bool is_stream;               /* the way of our requests */
	struct rn_streams streams;
	struct rn_counters count;
	/* of the head of the queue, when it waits */
	enum rn_wait wait;
	bool waited; /* sq_executed's deadline is set */
	uint32_t rnr_tried;
	uint64_t deadline_ns, backoff_ns;
	bool link_failed;
	bool draining; /* SQ_DRAINED is owed */
	struct rn_timer timer;
	struct rn_task task;
	struct rn_notice notice;
	bool noticed; /* subscribed */
	struct rn_reply reply;
	bool reply_pending;
	uint32_t reply_length; /* bytes the outstanding request moves */
	uint32_t reply_for;    /* sq_executed when it was sent */
	int reply_error;       /* why the owner wouldn't: for the next execution to act on */

	/* The receive queue: posting under rq_lock, polling under recv_cq->lock. */
	alignas(64) struct rn_lock rq_lock;
	uint64_t rq_offset;
	uint32_t rq_size, rq_stride;
	uint32_t rq_bounce; /* room for each slot, behind the ring; 0: none */
	_Atomic uint32_t rq_posted;
	uint64_t recv_wrs;
	struct rn_shadow {
		uint64_t wr_id;
		uint32_t length; /* of its scatter list: no completion may claim more */
		uint32_t lkey;   /* of its only entry, or 0, with the address there */
		uint64_t addr;
		uint16_t num_sge; /* of more than one the list is in rq_lists */
		bool settled; /* what was bounced is in place */
		uint8_t fails;   /* with this status, when chaos.c says so */
	} *rq_shadow;
	struct rn_slot_sge *rq_lists; /* cap.max_recv_sge for each slot; NULL: none was that long yet */

	alignas(64) _Atomic uint32_t rq_polled;
	uint32_t cq_bit;
	struct rn_pool *pool; /* receives come from there instead: its SRQ's, or UD's own */
	bool rq_flushing;   /* what the peer hasn't done by rq_frozen is flushed */
	uint32_t rq_frozen;
	bool is_ready; /* on the CQ's ready list */
	struct rn_qp *next_ready;
	uint64_t completions;
	struct rn_arrivals arrivals; /* from the pool */
	struct rn_ud *ud;            /* of UD */
	unsigned groups;             /* it is attached to; with rn_world held */
	bool is_heard;               /* UDP sockets are open for it */

	/* XRC: xrc.c */
	struct rn_xrcd *xrcd;  /* of a target, which has no PD, and */
	struct rn_cq *own_cq;  /* a CQ that nothing ever comes to, in place of the program's */
	unsigned handles;      /* that others have opened */
	bool is_orphan;        /* its creator has let go of it, others have not */
	struct rn_qp *real;    /* this is such a handle */
	bool is_inlet;         /* this is none, only what a CQ polls */

	uint64_t chaos_failed; /* receives; under recv_cq->lock */
	uint32_t chaos_number; /* of this one among the context's */
	uint64_t chaos_requests;

	bool is_passive; /* these: iwarp.h */
	_Atomic bool is_terminated;
	uint32_t busy_before, done_before; /* the peer's words when it was let in */

	bool established_reported;
	_Atomic bool peer_gone; /* its process has died: nobody is inside our block */
	_Atomic bool peer_left_us; /* and this queue pair with it, which it had open still */
	uint32_t async_reported;
	struct rn_list link;
};

static inline struct rn_qp *rn_qp(struct ibv_qp *qp)
{
	return (struct rn_qp *)qp;
}

/* The send queue's entry for a request. */
static inline struct rn_send *rn_sq_at(const struct rn_qp *qp, uint32_t index)
{
	return (struct rn_send *)(qp->sq + (uint64_t)(index & qp->sq_mask) * qp->sq_stride);
}

static inline struct rn_slot *rn_rq_slot(const struct rn_qp *qp, uint32_t index)
{
	return (struct rn_slot *)(rn_arena + qp->rq_offset + (uint64_t)(index & (qp->rq_size - 1)) * qp->rq_stride);
}

/* Has the peer done with this receive? */
static inline bool rn_rq_is_done(const struct rn_qp *qp, uint32_t index)
{
	return atomic_load_explicit(&rn_rq_slot(qp, index)->turn, memory_order_acquire) == index + 1;
}

/* Short messages into memory that peers can't map (bounce.c). */
uint32_t rn_bounce_reserve(uint32_t slots); /* the room for each, 0: none is to be had */
void rn_bounce_release(uint32_t slots, uint32_t room);
void rn_bounce_forked(void);
/* Carry the message of a completed receive to where it belongs. With the CQ's lock held. */
void rn_bounce_take(struct rn_qp *qp, uint32_t index, uint32_t length);
/* The same for all that waits for this region, before its key goes; with rn_world held. */
void rn_bounce_settle(uint32_t pd, uint32_t key);

/* The bytes of a ring with its room. */
static inline uint64_t rn_rq_bytes(const struct rn_qp *qp)
{
	return (uint64_t)qp->rq_size * qp->rq_stride + rn_bounce_bytes(qp->rq_size, qp->rq_bounce);
}

/* The process's queue pairs by block index; with rn_world held. */
extern struct rn_qp *rn_qps[RN_QPS_MAX];
extern _Atomic uint32_t rn_qps_end; /* none at this index or above */

/* NULL and errno; init->cap becomes what it really has. */
struct rn_qp *rn_qp_create(struct ibv_qp_init_attr_ex *init);
struct ibv_qp *rn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *init); /* qp_ex.c */
/* Is this a transition, with these attributes? qp_table.c */
bool rn_qp_may_move(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);
/* Tell everybody who wants in what state the queue pair is in. */
void rn_qp_life_store(struct rn_qp *qp, enum ibv_qp_state state);
/* Silently back to nothing. Without locks; 0 or errno. */
int rn_qp_reset(struct rn_qp *qp);
/* To ERR, as after a fatal completion: both queues are flushed. With sq_lock held. */
void rn_qp_fail(struct rn_qp *qp);
/* A send has failed here, not there: to ERR, or SQE where the receiving side can live on. */
void rn_qp_send_failed(struct rn_qp *qp);
/* What peers have left for us (faults, first packet). On the engine, or whenever somebody looks. */
void rn_qp_attend(struct rn_qp *qp);
void rn_qp_attend_all(void);
/* Wait until whoever is inside the block has left it or died. False: it is stopped in there. */
bool rn_qp_wait_idle(struct rn_qp *qp, uint64_t deadline_ns);
/* The same, but that it has looked at the keys again will do. */
bool rn_qp_wait_moved(struct rn_qp *qp, uint64_t deadline_ns);
enum { RN_IDLE_WAIT_NS = 2 * 1000 * 1000 };
unsigned rn_qp_count_quarantined(void);
bool rn_qp_is_quarantined(uint32_t pd); /* any that may use keys of this PD */

/* Receives that come from a pool (qp_pool.c): nothing for other queue pairs. */
int rn_qp_pool_open(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init); /* 0 or errno */
void rn_qp_pool_close(struct rn_qp *qp);
int rn_qp_pool_post(struct rn_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
void rn_qp_pool_recover(struct rn_qp *qp);
bool rn_qp_pool_wait(struct rn_qp *qp, uint64_t deadline_ns);
void rn_qp_pool_fail(struct rn_qp *qp);
void rn_qp_pool_discard(struct rn_qp *qp);
void rn_qp_pool_process_died(int pid);
/* The number of its PD; a target's requests bring their own. */
static inline uint32_t rn_qp_pd(const struct rn_qp *qp)
{
	return qp->ex.qp_base.pd ? rn_pd(qp->ex.qp_base.pd)->number : 0;
}
/* May whoever comes in there use keys of this PD? */
bool rn_qp_uses_pd(const struct rn_qp *qp, uint32_t pd);
void rn_qp_reap(void); /* with rn_world held */
void rn_qp_destroy_all(struct rn_context *context);
void rn_qp_close(void);
void rn_qp_forked(void);

/* --- posting and executing (post.c, exec.c, remote.c) -------------------------------------------- */

/* Requests that bring something back. */
static inline bool rn_fetches(enum ibv_wr_opcode opcode)
{
	return opcode >= IBV_WR_RDMA_READ && opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD;
}

int rn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
/* A chain of that many, all or none. 0 or errno. */
int rn_post_chain(struct rn_qp *qp, struct ibv_send_wr *first, uint32_t count);
int rn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* Go on with what is queued. Takes the send lock; engine thread. */
void rn_qp_progress(struct rn_qp *qp);
/* The same, with sq_lock held; and parts of it. */
void rn_sq_progress_locked(struct rn_qp *qp);
void rn_sq_drained(struct rn_qp *qp); /* in SQD: tell it, once nothing is on its way any more */
void rn_sq_wait(struct rn_qp *qp, enum rn_wait why); /* the head of the queue can't be executed yet */
bool rn_sq_has_waited(const struct rn_qp *qp, enum rn_wait why); /* for that, as long as it may */
uint64_t rn_sq_ack_budget_ns(const struct rn_qp *qp); /* how long all tries together wait for an answer */
bool rn_sq_waited_for_nothing(struct rn_qp *qp); /* in RN_WAIT_LOST: is it time to try again? */
/* The request at sq_executed is done, one way or the other. */
void rn_sq_complete(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status, uint32_t byte_len);
/* Flush what is queued. With sq_lock held. */
void rn_sq_flush(struct rn_qp *qp);
/* The head of the queue fails with this status: completes it in error, QP to ERR. sq_lock held. */
void rn_sq_fail_head(struct rn_qp *qp, enum ibv_wc_status status);

/* Into the responder, and out again: see arena.h. All with sq_lock held. */
enum rn_wait rn_enter(struct rn_qp *qp);
/* Execute one work request. moved: of a queued one, how many bytes were carried already; NULL when
 * the request isn't queued yet, so that it must not wait for the owner's engine. */
enum rn_wait rn_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *moved,
			enum ibv_wc_status *status, uint32_t *byte_len);
void rn_leave(struct rn_qp *qp);
/* The responder is given up: a receive that was claimed from its pool goes back. */
void rn_forget_responder(struct rn_qp *qp);
/* The block of the queue pair with this number in a peer's arena; NULL: no such port there. */
struct rn_qp_block *rn_locate(char *arena, uint32_t qpn);
/* The peer's process has ended: killed with its queue pair open, or was that closed before? */
bool rn_was_abandoned(struct rn_qp *qp);
/* How long the responder wants us to wait for its next receive. */
uint64_t rn_rnr_delay_ns(struct rn_qp *qp);
uint64_t rn_rnr_code_ns(uint8_t code);

/* 0: the answer will come, and rn_qp_progress with it; or errno. data: what to write. */
int rn_remote_start(struct rn_qp *qp, const struct rn_remote *request, const void *data);

/* The local side of a work request, checked; IBV_WC_SUCCESS or what is wrong with it. */
enum ibv_wc_status rn_local_pieces(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces,
				   int *count, uint64_t *total);
/* The same for the kernel to touch, which tells of a hole in on-demand memory. */
enum ibv_wc_status rn_local_pieces_unprobed(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces,
					    int *count, uint64_t *total);
/* What is wrong with a request, before anything goes out. */
enum ibv_wc_status rn_check_request(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t total);

#endif
