/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs: their public part. qp_inside.h has what their own files share. */
#pragma once

#include "base/engine.h"
#include "faults/fault.h"
#include "faults/iwarp.h"
#include "objects/context.h"
#include "objects/cq.h"
#include "objects/mr.h"
#include "objects/path.h"
#include "objects/pd.h"
#include "objects/responder_ctx.h"
#include "objects/xrc.h"
#include "peer/peer.h"
#include "shm/own.h"
#include "shm/pool.h"

struct rn_tcp_path;
struct rn_ud;

/* Requests that bring something back. */
static inline bool rn_fetches(enum ibv_wr_opcode opcode)
{
	return opcode >= IBV_WR_RDMA_READ && opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* A posted send that could not be executed at once. Followed by its scatter list or inline data. */
struct rn_send {
	struct ibv_send_wr wr;
	uint64_t due_ns;
	uint64_t moved; /* bytes that were moved already: by the owner's engine, or as a READ's data on a stream */
	uint64_t total; /* on a stream */
	bool deferred;
	bool has_begun; /* it was tried in vain, or some of it is on a stream: draining waits for it */
	struct rn_plan plan; /* faults/fault.h */
	bool answered; /* on a stream: all its data have come */
	alignas(8) char tail[]; /* sge[max_send_sge], or one for the inline data behind it */
};

struct rn_qp {
	struct ibv_qp_ex ex; /* programs hold &ex.qp_base */
	struct rn_context *context;
	struct rn_cq *send_cq, *recv_cq;
	uint32_t index; /* of the block */
	struct rn_qp_block *block;  /* the part that other processes see */
	struct rn_qp_block *own;    /* our own copy of its facts: shm/own.h */
	struct rn_qp_block *_Atomic theirs; /* which of the two has its peer's words; settled with RTR */
	uint32_t generation;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool unreliable; /* UC, UD: no answers, hence no retries */
	struct rn_builder *builder; /* for the ibv_wr_* calls, if it was made for them */

	/* The send queue: under sq_lock. Counts are modulo 2^32: freed <= executed <= posted. */
	alignas(64) struct rn_lock sq_lock;
	_Atomic int state; /* enum ibv_qp_state; changed with sq_lock held */
	uint32_t sq_posted, sq_executed;
	_Atomic uint32_t sq_freed; /* by poll_cq */
	char *sq;                  /* struct rn_send[sq_mask + 1], sq_stride apart: used when queued */
	uint32_t sq_mask, sq_stride;
	struct rn_qp_faults faults; /* when the context has any; changed with both queues' locks held */
	const struct rn_path_ops *path;
	struct rn_responder_ctx responder;
	struct rn_peer *_Atomic peer; /* from RTR on; released with rn_process_lock held, so it stays while that is */
	bool uses_tcp; /* for our requests */
	uint8_t rnr_timer; /* the responder's, by TCP */
	struct rn_counters count;
	/* for the head of the queue, if it waits */
	enum rn_wait wait;
	bool waited; /* sq_executed's deadline is set */
	bool is_polled; /* a poller took the last turn of its copy */
	uint8_t stood_back; /* how often its turn was put off for others that want the send lock */
	uint32_t rnr_tried;
	uint64_t deadline_ns, backoff_ns;
	bool link_failed;
	bool draining; /* SQ_DRAINED is due */
	struct rn_timer timer;
	struct rn_task task;
	struct rn_notice notice;
	bool noticed; /* subscribed */
	struct rn_reply reply;
	bool reply_pending;
	uint32_t reply_length; /* how many bytes the outstanding request moves */
	uint32_t reply_for;    /* sq_executed when it was sent */
	int reply_error;       /* why the owner refused; the next execution acts on it */
	struct rn_help {       /* a READ of the peer's, with which our engine helps: responder/help.c */
		struct rn_task task;
		int pid;
		uint32_t key, serial, given;
		uint64_t addr, length, to, witness;
	} help;

	/* The receive queue: posting under rq_lock, polling under recv_cq->lock. */
	alignas(64) struct rn_lock rq_lock;
	uint64_t rq_offset;
	uint32_t rq_size, rq_stride;
	uint32_t rq_eager; /* the eager buffer of each slot, behind the ring, has this many bytes; 0: none */
	_Atomic uint32_t rq_posted;
	uint64_t recv_wrs;
	struct rn_shadow {
		uint64_t wr_id;
		uint32_t length; /* of its scatter list: no completion may claim more */
		uint32_t lkey;   /* of its only entry, or 0, with the address there */
		uint64_t addr;
		uint16_t num_sge; /* if more than one, the list is in rq_lists */
		bool settled; /* the contents of its eager buffer have been copied */
		bool lost;    /* or could not be: the memory was gone */
		struct rn_receive_plan plan; /* by fault injection */
	} *rq_shadow;
	struct rn_slot_sge *rq_lists; /* cap.max_recv_sge for each slot; NULL: none was that long yet */

	alignas(64) _Atomic uint32_t rq_polled;
	uint32_t cq_bit;
	bool is_attached; /* to recv_cq */
	struct rn_pool *pool; /* receives come from there instead: its SRQ's, or UD's own */
	bool rq_flushing;   /* receives that the peer has not completed by rq_frozen are flushed */
	uint32_t rq_frozen;
	bool is_ready; /* on the CQ's ready list */
	struct rn_qp *next_ready;
	uint64_t completions;
	struct rn_arrivals arrivals; /* from the pool */

	/* The parts of some kinds only. */
	struct rn_ud *ud;           /* UD: datagram/datagram.h */
	struct rn_tcp_path *tcp;    /* connected ones: tcp/tcp.h */
	struct rn_qp_xrc xrc;       /* objects/xrc.h */
	struct rn_qp_iwarp iwarp;   /* faults/iwarp.h */

	bool established_reported;
	_Atomic bool peer_gone; /* its process has died, so it is not inside our block */
	_Atomic bool peer_left_us; /* its process died while it had its queue pair open */
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

/* Has the peer completed this receive? */
static inline bool rn_rq_is_done(const struct rn_qp *qp, uint32_t index)
{
	return atomic_load_explicit(&rn_rq_slot(qp, index)->owner_sequence, memory_order_acquire) == index + 1;
}

/* The bytes of a ring with its room. */
static inline uint64_t rn_rq_bytes(const struct rn_qp *qp)
{
	return (uint64_t)qp->rq_size * qp->rq_stride + rn_eager_bytes(qp->rq_size, qp->rq_eager);
}

/* The process's queue pairs by block index; with rn_process_lock held. */
extern struct rn_qp *rn_qps[RN_QPS_MAX];
extern _Atomic uint32_t rn_qps_end; /* none at this index or above */

/* The first at this index or above; NULL: none. */
static inline struct rn_qp *rn_qp_from(uint32_t index)
{
	for (; index < rn_qps_end; index++)
		if (rn_qps[index])
			return rn_qps[index];
	return NULL;
}

/* With rn_process_lock held. */
#define rn_for_each_qp(qp) for (struct rn_qp *qp = rn_qp_from(0); qp; qp = rn_qp_from(qp->index + 1))

/* The one with this number, or NULL; with rn_process_lock held. */
static inline struct rn_qp *rn_qp_by_number(uint32_t qpn)
{
	uint32_t index = rn_own_locate(qpn);

	return index == RN_QPS_MAX || !rn_qps[index] || rn_qps[index]->ex.qp_base.qp_num != qpn ? NULL : rn_qps[index];
}

/* NULL and errno; init->cap is updated to its real sizes. */
struct rn_qp *rn_qp_create(struct ibv_qp_init_attr_ex *init);
void rn_qp_forget_sqs(void); /* the memory of send queues that is kept for later ones */
struct ibv_qp *rn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *init); /* requester/post_ex.c */
/* Is this a transition, with these attributes? qp_table.c */
bool rn_qp_may_move(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);
/* Publish the state of the queue pair to its peers. */
void rn_qp_tell_state(struct rn_qp *qp, enum ibv_qp_state state);
/* To RESET, silently. Without locks; 0 or errno. */
int rn_qp_reset(struct rn_qp *qp);
/* To ERR, as after a fatal completion: both queues are flushed. With sq_lock held. */
void rn_qp_fail(struct rn_qp *qp);
/* About to become ERR: take what has come already. False: with that, it has failed. With sq_lock held. */
bool rn_qp_last_look(struct rn_qp *qp);
/* iWARP: the connection ends here: QP_FATAL, ERR, and a callback to the connection manager. With sq_lock held. */
void rn_qp_terminate(struct rn_qp *qp);
/* Set that callback, which runs on the engine, without locks. */
void rn_at_qp_terminated(void (*tell)(struct ibv_qp *qp));
/* iWARP: would it send before its peer has? With sq_lock held. */
bool rn_qp_is_too_early(struct rn_qp *qp);
/* Show in its block whether the link is up: when it becomes reachable, and when that changes. With sq_lock held. */
void rn_qp_plug(struct rn_qp *qp, bool is_down);
/* Apply its context's faults from now on; requests posted before keep theirs. With the context's mutex held. */
void rn_qp_take_faults(struct rn_qp *qp);
/* A send has failed on this side, after a last look: go to ERR, or to SQE if the receiving side can go on. */
void rn_qp_send_failed(struct rn_qp *qp);
/* Handle the notes that peers have left for us (faults, first packet). On the engine, or during a look. */
void rn_qp_process_pending(struct rn_qp *qp);
void rn_qp_process_pending_all(void);
/* A completion queue was overrun: how work on its queue pairs ends is lost, so they fail. On the engine. */
void rn_qp_cq_fell(struct rn_cq *cq);
/* Wait until the peer inside the block has left it or died. False: it is stopped in there. */
bool rn_qp_wait_idle(struct rn_qp *qp, uint64_t deadline_ns);
/* The same, but it is enough that the peer reads the keys again. */
bool rn_qp_wait_moved(struct rn_qp *qp, uint64_t deadline_ns);
enum { RN_IDLE_WAIT_NS = 2 * 1000 * 1000 };
unsigned rn_qp_count_quarantined(void);
bool rn_qp_is_quarantined(uint32_t pd); /* any in quarantine that may use keys of this PD */

/* Receives that come from a pool (qp_pool.c): nothing for other queue pairs. */
int rn_qp_pool_open(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init); /* 0 or errno */
void rn_qp_pool_close(struct rn_qp *qp);
int rn_qp_pool_post(struct rn_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
void rn_qp_pool_recover(struct rn_qp *qp);
bool rn_qp_pool_wait(struct rn_qp *qp, uint64_t deadline_ns);
void rn_qp_pool_fail(struct rn_qp *qp);
void rn_qp_pool_discard(struct rn_qp *qp);
void rn_qp_pool_process_died(int pid);
/* The number of its PD; each request to an XRC target brings its own. */
static inline uint32_t rn_qp_pd(const struct rn_qp *qp)
{
	return qp->ex.qp_base.pd ? rn_pd(qp->ex.qp_base.pd)->number : 0;
}
/* The protection domain of its receives. */
static inline uint32_t rn_qp_rq_pd(const struct rn_qp *qp)
{
	return qp->ex.qp_base.srq ? rn_pd(qp->ex.qp_base.srq->pd)->number : rn_qp_pd(qp);
}
/* May its peer use keys of this PD? */
bool rn_qp_uses_pd(const struct rn_qp *qp, uint32_t pd);
void rn_qp_reap(void); /* with rn_process_lock held */
/* For struct rn_peer_ops: withdrawn, died. */
void rn_qp_segment_withdrawn(const char *base);
void rn_qp_process_died(int pid);
void rn_qp_destroy_all(struct rn_context *context);
void rn_qp_close(void);
void rn_qp_forked(void);
