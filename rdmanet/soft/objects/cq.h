/* SPDX-License-Identifier: Apache-2.0 */
/* Completion queues: their public part. cq_inside.h has what their own files share. */
#pragma once

#include "base/engine.h"
#include "objects/channel.h"
#include "objects/path.h"
#include "shm/arena.h"

struct rn_peer;

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
		struct ibv_cq_ex ex; /* with its functions, if create_cq_ex made it */
	};
	uint32_t index; /* of the block */
	struct rn_cq_block *block;
	struct rn_lock lock;

	struct rn_cqe *ring; /* finished sends: head..tail, modulo 2^32 */
	uint32_t size, head, tail;
	uint64_t *stamps; /* when each was pushed; NULL: not needed */
	uint64_t stamp;   /* of the completion polled last */
	bool overrun;
	bool may_overrun; /* the program says that it won't overrun, or does not care */
	struct rn_task fall; /* after an overrun: its queue pairs go to ERR */
	_Atomic uint32_t hold_us; /* moderation: how long the event for a completion may wait, in us; 0: not at all */
	struct rn_timer timer;    /* for that */
	bool sends_first; /* whether sends are next */
	_Atomic uint32_t turn_polls; /* 1 and more: requests may be copied in turns, and so many polls were in vain; see took_turn */

	struct rn_qp *ready, **ready_tail; /* queue pairs with receives to poll, in turns */
	struct rn_qp *attached[RN_CQ_QPS_MAX];
	uint32_t attached_end; /* none at this bit or above */
	_Atomic uint32_t armed; /* the block's word as we left it: pushers may only mark it as signalled */
	uint32_t looked_at, unheard; /* by rn_cq_look_after_all: bits; an arming that was signalled without a token */

	const struct rn_cq_source_ops *_Atomic source; /* of its streams; from before num_tcp says that there are any */
	struct rn_lock tcp_lock; /* the list: see tcp/poll.c */
	struct rn_list tcp_qps;
	uint32_t tcp_round; /* counts armings */
	_Atomic uint32_t num_tcp;

	uint32_t events_owed;     /* of earlier armings: signalled, not taken, armed again; under the channel's lock */
	uint32_t events_reported; /* by get_cq_event; likewise */
	uint32_t async_reported;
	unsigned users;
	struct rn_list link, channel_link;

	struct rn_lock turn; /* held by the iterating thread, for long, so no lock of ours is taken inside it */
	struct {
		struct ibv_wc wc;
		uint64_t stamp;
	} now; /* where the iterator is */
};

static inline struct rn_cq *rn_cq(struct ibv_cq *cq)
{
	return (struct rn_cq *)cq;
}

/* NULL and errno. stamped: keep the time of each completion. Only the fields of the first version of attr are read. */
struct rn_cq *rn_cq_create(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attr, bool stamped);
struct ibv_cq_ex *rn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
/* A send has finished: with the QP's send lock held. */
void rn_cq_push(struct rn_cq *cq, const struct rn_cqe *cqe);
/* Receives of this QP may be ready to poll (it was flushed): mark it, and wake a waiting program. */
void rn_cq_mark_ready(struct rn_cq *cq, struct rn_qp *qp);
/* A process that may have pushed into any CQ of ours has died, perhaps while doing so. With rn_process_lock held. */
void rn_cq_recover(void);
int rn_cq_attach(struct rn_cq *cq, struct rn_qp *qp, uint32_t *bit); /* 0 or errno */
void rn_cq_detach(struct rn_cq *cq, struct rn_qp *qp);
/* Forget completions of this QP: it is destroyed or reset. */
void rn_cq_purge(struct rn_cq *cq, struct rn_qp *qp);
int rn_cq_poll(struct ibv_cq *cq, int entries, struct ibv_wc *wc);
/* Take one completion: 1, 0 or -errno; and its time, if the CQ keeps that. */
int rn_cq_take(struct rn_cq *cq, struct ibv_wc *wc, uint64_t *stamp);
int rn_cq_request_notify(struct ibv_cq *cq, int solicited_only);
bool rn_cq_is_armed(struct rn_cq *cq); /* and nothing has completed since */

/* Called after this many completions have become visible: signal the CQ's channel if it is armed for them. For our own
 * CQs, with peer NULL, and for a peer's. Returns true when an event was sent. */
bool rn_cq_notify(struct rn_cq_block *block, struct rn_peer *peer, bool solicited, uint32_t count);
enum { RN_CQ_ENOUGH = 1 << 30 }; /* a count for which no event waits any longer */
int rn_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* Set the timers of moderated CQs that pushers have asked for. On the engine. */
void rn_cq_process_pending_all(void);
/* What is done after an overrun, on the engine, with the process's queue pairs: rn_qp_cq_fell. */
void rn_cq_at_overrun(void (*tell)(struct rn_cq *));

/* Find completions that are not announced because peers have scribbled over the arena. With rn_process_lock held. all:
 * not only some of each CQ's. Returns how many of our words were wrong. */
unsigned rn_cq_look_after_all(bool all);
void rn_cq_forked(void);
void rn_cq_destroy_all(struct rn_context *context);
