/* SPDX-License-Identifier: Apache-2.0 */
/* What a requester knows of the responder that it plays. It is declared here because each queue pair has one;
 * responder/ctx.c and responder/responder.c fill it. */
#pragma once

#include "base/counters.h"
#include "objects/share.h"
#include "peer/peer.h"
#include "shm/arena.h"
#include "shm/pool.h"

struct rn_qp;

/* The responder as the requester sees it: what was read from its block, and checked, when it was found. */
struct rn_responder_ctx {
	bool found;
	bool self;
	bool datagram;   /* UD */
	bool by_ipv4;    /* and its header is IPv4's */
	bool unreliable; /* UC, UD: a refused request is dropped silently */
	uint32_t source_qpn; /* the requester's */
	uint32_t qpn;        /* the responder's own */
	struct rn_peer *peer;       /* whose arena it is; NULL: this process's */
	struct rn_notice *waiting;  /* told when a segment of the peer's has come; NULL: the waiter looks by itself */
	struct rn_counters *count;  /* of whoever looks */
	uint32_t generation;
	char *arena;
	uint32_t index;
	struct rn_qp_block *block;       /* the words that are ours to write */
	const struct rn_qp_block *facts; /* its owner's words: in its arena or, in this process, shm/own.h's copy */
	struct rn_qp *owner;             /* of a connected one of this process; else NULL */
	struct rn_cq_block *cq;
	const struct rn_mr_entry *mrs;
	char *rq;
	uint32_t rq_mask, rq_stride, rq_max_sge, rq_eager;
	uint32_t pd, rq_pd, max_dest_rd_atomic;
	struct rn_pool_block *pool; /* its receives come from there; NULL: from its own ring */
	_Atomic uint32_t *finished; /* where a finished one goes then */
	uint32_t domain;            /* of an XRC target: each request names its SRQ there; else 0 */
	struct rn_recv_claim claim;      /* one of them, until it is published or given back */
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
	struct rn_share share; /* a READ that its owner helps with */
	uint32_t pushed; /* how many completions were published and not announced yet */
	bool solicited; /* one of them is worth an event to those that wait for solicited ones */
};

/* May a queue pair in this state be entered? */
static inline bool rn_state_is_open(uint64_t generation_state)
{
	uint8_t state = generation_state & 0xff;

	return state >= IBV_QPS_RTR && state <= IBV_QPS_SQE;
}
