/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder: what a request meets in the queue pair that it is for.
 *
 *     exec.c, the requester                        respond.c, the responder (rn_view_*: view.c)
 *     rn_enter                                     rn_view_open      what the block says, checked
 *       rn_execute --- struct rn_request --------> rn_respond
 *                                                    prepare         rights, keys, the receive: where to?
 *                                                    copy            between transfer.local and .remote
 *                                                    finish, or      publish
 *                                                    refuse          the NAK, and the note for the owner
 *     rn_leave                                     rn_view_announce
 *
 * It runs where the memory can be reached: in the poster's thread on tables of its own process, in
 * the poster's thread on another's mapped arena, or on the owner's engine with bytes that came
 * from a socket.  So it knows no queue pair of the requester's, only a view of the responder's
 * block, the request and the pieces of memory to copy from or to.  The last way calls prepare, finish and
 * refuse itself, with the socket in the place of the copy.
 *
 * The view's user keeps the responder in place meanwhile: by its busy word (see arena.h), or by
 * the send lock of a queue pair of this process.
 */
#ifndef RDMANET_SOFT_RESPOND_H
#define RDMANET_SOFT_RESPOND_H

#include <stdbool.h>
#include <stdint.h>

#include "verbs.h"

#include "arena.h"
#include "counters.h"
#include "peer.h"
#include "pool.h"

/* The responder as its user sees it: what was read from its block when it was found, checked. */
struct rn_view {
	bool found;
	bool self;
	bool datagram;   /* UD */
	bool by_ipv4;    /* and its header is IPv4's */
	bool unreliable; /* UC, UD: what is refused is dropped, and nobody told */
	uint32_t source_qpn; /* the requester's */
	uint32_t qpn;        /* the responder's own */
	struct rn_peer *peer;       /* whose arena it is; NULL: this process's */
	struct rn_notice *waiting;  /* told when a segment of the peer's has come; NULL: who waits looks by itself */
	struct rn_counters *count;  /* of whoever looks */
	uint32_t generation;
	char *arena;
	uint32_t index;
	struct rn_qp_block *block;       /* the words that are ours to write */
	const struct rn_qp_block *facts; /* what its owner says: in its arena, or, of this process's, own.h's copy */
	struct rn_qp *owner;             /* of a connected one of this process; else NULL */
	struct rn_cq_block *cq;
	const struct rn_mr_entry *mrs;
	char *rq;
	uint32_t rq_mask, rq_stride, rq_max_sge, rq_bounce;
	uint32_t pd, rq_pd, max_dest_rd_atomic;
	struct rn_pool_block *pool; /* its receives come from there; NULL: from its own ring */
	_Atomic uint32_t *finished; /* where it goes then */
	uint32_t domain;            /* of an XRC target: each request names its SRQ there; else 0 */
	struct rn_claim claim;      /* one of them, until it is published or given back */
	uint32_t name;              /* to claim by */
	_Atomic uint64_t *dirty;
	uint64_t dirty_bit, summary_bit;
	uint32_t busy;   /* what we wrote last */
	uint32_t done;   /* ours to write, so this is it */
	uint32_t segment; /* the last one used, and where it is mapped */
	char *segment_base;
	size_t segment_size;
	bool no_cma;    /* the kernel has refused: ask the owner's engine */
	bool stamped;   /* each receive gets the time of its completion */
	uint32_t pushed; /* completions were published, so many, and not announced yet */
	bool solicited; /* one of them is worth an event to who waits for solicited ones */
};

/* What is asked of the responder: a work request without its local half, or a frame. */
struct rn_request {
	enum ibv_wr_opcode opcode;
	unsigned send_flags; /* IBV_SEND_SOLICITED counts */
	__be32 imm_data;
	uint32_t invalidate_rkey;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t srqn;
	uint64_t compare_add, swap;
};

/* A run of memory. */
struct rn_piece {
	char *at;     /* where it is mapped here, or NULL */
	uint64_t far; /* else: its address in its owner's process */
	uint32_t length;
	uint32_t key;
	uint64_t addr; /* as the work request has it */
	const struct rn_mr_entry *mr;
};

/* Have the peer's engine move bytes between its memory and ours, or execute an atomic there. */
enum rn_remote_kind { RN_REMOTE_WRITE = 1, RN_REMOTE_READ, RN_REMOTE_CAS, RN_REMOTE_FAA };
enum { RN_REMOTE_CHUNK = 32 * 1024 };
struct rn_remote {
	uint32_t kind;
	uint32_t source_qpn, dest_qpn;
	uint32_t key;
	uint32_t is_receive; /* a receive buffer: the owner's own rights count */
	uint32_t length;
	uint64_t generation;
	uint64_t addr;
	uint64_t compare_add, swap;
};

/* Why a request can't be executed yet. */
enum rn_wait {
	RN_WAIT_NOT,
	RN_WAIT_LINK,    /* for the peer's process to let us in */
	RN_WAIT_PEER,    /* for its queue pair to come to life */
	RN_WAIT_RNR,     /* for a receive to be posted */
	RN_WAIT_SEGMENT, /* for its memory to be mapped */
	RN_WAIT_OWNER,   /* for its engine to answer */
	RN_WAIT_DUE,     /* deferred execution */
	RN_WAIT_LOST,    /* for an acknowledgement that doesn't come: chaos.h */
};

/* One request under way. Filled as far as its counts say: its arrays are never cleared. */
struct rn_transfer {
	struct rn_piece local[RN_MAX_SGE + 1], remote[RN_MAX_SGE]; /* one more for UD's GRH */
	int num_local, num_remote;
	uint64_t total, moved; /* bytes; moved: already, by earlier tries */
	struct rn_slot *slot;  /* the receive it takes, or NULL */
	bool to_remote;
	bool is_receive;
	bool bounced; /* into the slot's room */
	bool refused; /* the owner's engine wouldn't, last time: taken into account once */

	/* After RN_WAIT_OWNER: what it is to do, and with which bytes. */
	struct rn_remote ask;
	const char *ask_data;
};

/* Look at the queue pair with this block in this arena; words: where its peer's are, if not there. `self` is set. */
void rn_view_aim(struct rn_view *view, char *arena, uint32_t index, struct rn_qp_block *words);
/* Fill in what is said of it. False: it makes no sense. */
bool rn_view_open(struct rn_view *view);
/* The SRQ that a request to an XRC target names: its receives, its PD, its CQ. False: no such one. */
bool rn_view_name_srq(struct rn_view *view, uint32_t number);
/* Let the receiver know what was published. */
void rn_view_announce(struct rn_view *view);
void rn_view_ring_bell(struct rn_view *view);
/* The receive that was taken from a pool for a message that will not be finished. */
void rn_view_give_back(struct rn_view *view);
/* Leave a note for the owner, who will go to ERR. */
void rn_view_leave_fault(struct rn_view *view, enum rn_fault fault);

static inline struct rn_slot *rn_view_slot(const struct rn_view *view, uint32_t index)
{
	return (struct rn_slot *)(view->rq + (uint64_t)(index & view->rq_mask) * view->rq_stride);
}

/* May a queue pair with this life be entered? */
static inline bool rn_life_is_open(uint64_t life)
{
	uint8_t state = life & 0xff;

	return state >= IBV_QPS_RTR && state <= IBV_QPS_SQE;
}

/* Still the one we found, and nobody has left a note? */
static inline bool rn_view_is_alive(const struct rn_view *view)
{
	uint64_t life = atomic_load(&view->facts->life);

	return life >> 8 == view->generation && rn_life_is_open(life) &&
	       atomic_load_explicit(&view->block->fault, memory_order_relaxed) == RN_FAULT_NONE;
}

/* The whole of it. The transfer comes with its local side, total, moved and refused. Of a request
 * that is done or refused the status says what becomes of it at the requester. */
enum rn_wait rn_respond(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
			enum ibv_wc_status *status);

/* Its parts. Prepare makes all checks and says where the bytes go to, or come from (none for an
 * atomic: that is rn_respond's, or rn_respond_atomic's); refused as status says, with all that follows. */
enum rn_wait rn_respond_prepare(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t,
				enum ibv_wc_status *status);
/* The bytes are in place. */
void rn_respond_finish(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t);
/* The memory turned out to be gone: the status for the requester. */
enum ibv_wc_status rn_respond_refuse(struct rn_view *view, const struct rn_request *request, struct rn_transfer *t);
/* Execute it on memory that is mapped; the value from before. */
uint64_t rn_respond_atomic(const struct rn_request *request, char *at);

/* Copy flat memory into pieces mapped here, from position skip on. */
void rn_scatter(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length);
/* The same, as memory that somebody may be watching wants it; on-demand memory is tried first.
 * False: it isn't there. */
bool rn_place(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length);

#endif
