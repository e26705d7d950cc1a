/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools of receives: the queues that many take from.
 *
 * The ring of a connected queue pair has one producer and one consumer.  A shared receive queue
 * has many consumers, in as many processes; so has the receive queue of a UD queue pair.  Both are
 * pools: entries in the owner's arena, each with a word that says whose it is, changed by
 * compare-and-swap only.  There is no lock to die with.
 *
 *          owner: post            claimer: claim            claimer: finish
 *     FREE -----------> POSTED -----------------> CLAIMED -----------------> DONE
 *       ^                 ^                          |                         |
 *       |                 +--- give back; or the ----+                         |
 *       |                      owner, when the claimer has died                |
 *       +----------------------- owner: polled --------------------------------+
 *
 * Order.  A posted entry has a position, counted on; it lies in the slot position % size.  `tail` is the owner's,
 * `head` a hint: claimers look from there on, and skip what isn't posted.  The owner skips slots that are still in
 * use, so a stopped claimer costs one slot and delays nobody.  The entries that were given back lie before head,
 * and those that the owner is about to give a new position (their slot comes round again though they are still posted)
 * behind tail; `strays` counts both, and a claimer that finds nothing else looks through the whole ring, until
 * `strays_found` says that somebody has done so in vain since.
 *
 * Resizing.  Receives move to the new ring one by one, the tail with each; claimers know both rings, and one that finds
 * nothing while the tail moves looks again.  So one at most is out of sight at a time.
 *
 * Names.  A claim carries its claimer's name: the queue pair that the message came for (it has one
 * requester), or, of UD, the process that sends.  Whatever bears a dead one's name is the owner's
 * to post again.  The name of a posted entry is the ring's nonce, so whoever comes late can't claim
 * from memory that has become something else: the compare fails.
 *
 * Finishing.  The claimer fills in the completion, pushes the entry onto the list of the queue pair
 * that it is for (a Treiber stack: pushed one by one, taken off all at once, so there is no ABA), and
 * only then says DONE, the last that it does to it.  Then it sets the dirty bit.  The owner moves the list
 * into a private chain, oldest first, and takes from it what is DONE; so a claimer is inside the
 * entry and the queue pair's block for as long as the word says CLAIMED, and that is what the owner
 * waits for where it waits for `busy` of a connected one (arena.h): change generation_state or key, fence, look
 * for claims; the claimer claims, then reads generation_state and keys.
 *
 * Locks.  The pool's lock guards all that is private of it, and is taken inside the CQ's lock.
 * A chain belongs to the CQ's lock.
 */
#pragma once

#include "shm/arena.h"

/* --- the claimer's side (claim.c) ----------------------------------------------------------------- */

struct rn_recv_claim {
	struct rn_entry *entry; /* NULL: none */
	uint64_t posted, claimed; /* its word, before and now */
	uint32_t max_sge;
	bool low;        /* fewer are left than the owner wants: wake its engine, then rn_recv_claim_woke */
	uint32_t arming; /* for that */
};

enum { RN_NAME_QP = 1u << 29 };

/* The name of a queue pair's only requester, and that of a process. */
static inline uint32_t rn_name_of_qp(uint32_t index, uint32_t generation)
{
	return RN_NAME_QP | index << 15 | (generation & 0x7fff);
}
static inline uint32_t rn_name_of_process(int pid)
{
	return (uint32_t)pid & (RN_NAME_QP - 1);
}

/* Take the next receive of a pool in this arena. False: there is none. */
bool rn_recv_claim(char *arena, struct rn_pool_block *pool, uint32_t name, struct rn_recv_claim *claim);
void rn_recv_claim_woke(struct rn_pool_block *pool, struct rn_recv_claim *claim);
void rn_recv_claim_give_back(struct rn_pool_block *pool, struct rn_recv_claim *claim);
/* The completion is in the slot: hand it over, for the queue pair or SRQ whose list this is. */
void rn_recv_claim_finish(char *arena, struct rn_recv_claim *claim, _Atomic uint32_t *finished);

/* --- the owner's side (pool.c) --------------------------------------------------------------------- */

struct ibv_recv_wr;
struct ibv_wc;
struct rn_pool;

/* Where receives come out: a queue pair's list in the arena, and what was taken off it. The chain's ends are
 * references; 0: none. */
struct rn_arrivals {
	_Atomic uint32_t *finished;
	uint32_t first, last;
};

/* A completed receive as it came out. */
struct rn_arrival {
	uint64_t wr_id;
	uint32_t byte_len, imm_data, source_qpn;
	uint16_t destination; /* the queue pair's block index */
	uint8_t status, opcode, wc_flags, vendor_err;
};

/* by_processes: claimers are named by process, not by queue pair. NULL: out of memory. */
struct rn_pool *rn_pool_open(uint32_t max_wr, uint32_t max_sge, uint32_t pd, bool by_processes);
/* No receive is taken from it any more; it is freed later if a claimer is stopped inside. */
void rn_pool_close(struct rn_pool *pool);
void rn_pool_reap(void);
unsigned rn_pool_count_quarantined(void);
bool rn_pool_is_quarantined(uint32_t pd);
/* What this name has claimed is posted again: it is dead, or has been waited for. Its arrivals first:
 * see rn_pool_sweep. */
void rn_pool_recover(uint32_t name);
void rn_pool_forked(void);

/* What scribbling peers have made of all pools, with rn_process_lock held; all: not only some receives of each. How many words
 * of ours were wrong. */
unsigned rn_pool_look_after_all(bool all);

uint32_t rn_pool_index(const struct rn_pool *pool);
struct rn_pool_block *rn_pool_block(const struct rn_pool *pool);
uint32_t rn_pool_max_wr(const struct rn_pool *pool);
/* Wake the owner when fewer than that are left; 0: don't. With rn_process_lock held. */
void rn_pool_set_limit(struct rn_pool *pool, uint32_t limit);
/* What an XRC SRQ is found by, and where it completes. */
void rn_pool_set_number(struct rn_pool *pool, uint32_t number, uint32_t domain, uint32_t cq, uint32_t cq_bit);
uint32_t rn_pool_left(struct rn_pool *pool); /* posted and not claimed, as far as the hint goes */

/* What was posted in this entry, which this process has claimed: how many entries of its list were copied.
 * RN_NOT_POSTED: nothing, whatever the arena says; it isn't claimed any more. */
uint32_t rn_pool_posted_list(uint32_t index, struct rn_entry *entry, struct rn_slot_sge *list);
enum { RN_NOT_POSTED = UINT16_MAX };

/* A private note of a scatter list: one entry by itself, more of them in `more`. The same again. */
static inline uint32_t rn_posted_list(uint32_t num_sge, uint64_t addr, uint32_t length, uint32_t lkey,
				      const struct rn_slot_sge *more, struct rn_slot_sge *list)
{
	if (num_sge == 1)
		list[0] = (struct rn_slot_sge){.addr = addr, .length = length, .lkey = lkey};
	else if (num_sge <= RN_MAX_SGE)
		for (uint32_t i = 0; i < num_sge; i++)
			list[i] = more[i];
	return num_sge;
}

/* Post a chain. 0, or errno and the refused one. */
int rn_pool_post(struct rn_pool *pool, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* EINVAL: it holds more than that; ENOMEM. */
int rn_pool_resize(struct rn_pool *pool, uint32_t max_wr);

/* With the CQ's lock held: take the next one that has arrived. False: there is none. */
bool rn_pool_next(struct rn_pool *pool, struct rn_arrivals *arrivals, struct rn_arrival *arrival);
/* Is there one? */
bool rn_pool_has_next(struct rn_pool *pool, struct rn_arrivals *arrivals);
/* What this name was about to hand over is not coming: take it off, post it again. */
void rn_pool_sweep(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t name);
/* What has arrived will never be polled. */
void rn_pool_discard(struct rn_pool *pool, struct rn_arrivals *arrivals);

/* The queue of a UD queue pair ends in ERR: what is posted arrives as flushed, what is claimed
 * too; or in RESET: it is just gone. With the CQ's lock held. */
void rn_pool_flush(struct rn_pool *pool, struct rn_arrivals *arrivals);
void rn_pool_clear(struct rn_pool *pool, struct rn_arrivals *arrivals);
/* Processes (not queue pairs' requesters) that are inside now: wait until each has taken a step. False: one
 * is stopped. */
bool rn_pool_wait_moved(struct rn_pool *pool, uint64_t deadline_ns);
/* The same, of all pools with receives of this PD. */
bool rn_pools_wait_moved(uint32_t pd, uint64_t deadline_ns);
/* Is such a process inside the pool with this block? */
bool rn_pool_is_claimed(uint32_t index);
/* The arena is closed, whoever may be stopped in it. */
void rn_pool_forget_all(void);
