/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is ours in the arena, kept twice.
 *
 * Every process that has mapped our arena can write all of it, including what only we should write: states, numbers,
 * rights, where rings lie, keys, channels.  So the owner keeps these facts in private memory as well, and reads them
 * only there; the arena's copy is for peers.  (Of memory keys rn_mr_table is the private copy.)
 *
 *                       the owner writes     the owner reads       a mapped peer reads
 *     facts             both copies          the private one       the arena's
 *     peers' words      to begin anew        the arena's, checked  the arena's, and writes
 *
 * A queue pair that no other process can enter (its peer is of this process, or comes by TCP) has its peer's words in
 * the private copy too: struct rn_qp, `theirs`.  Receives are posted in the arena, but code that fills them within this
 * process (for a peer of this process, a stream, a datagram by wire) goes by private notes of what was posted.
 *
 * So a word that was scribbled over misleads peers, and not us.  Some words would mislead all peers for good: the
 * ports, a CQ's channel, a memory key.  And some that everybody writes (a CQ's arming and dirty bits, a pool's
 * head) could leave us asleep though there are completions.  So once the arena has been given to another process, the
 * engine checks all of them once a second, and corrects what is wrong.
 *
 * An idle process has little to lose: while no completion is polled, no CQ armed and no peer let in, each pause is
 * twice the one before, up to half a minute, and each look then covers everything.
 */
#pragma once

#include "base/guard.h"
#include "shm/arena.h"

/* Of each queue pair of ours the block that has its peer's words: struct rn_qp has it, too. */
extern struct rn_qp_block *_Atomic rn_theirs[RN_QPS_MAX];

/* By the indexes of the arena's blocks. Of queue pairs' and pools' blocks the owner's lines count. */
extern struct rn_qp_block rn_own_qps[RN_QPS_MAX];
extern struct rn_pool_block rn_own_pools[RN_POOLS_MAX];
extern struct rn_own_cq {
	_Atomic uint32_t channel, hold, timed;
} rn_own_cqs[RN_CQS_MAX];
extern _Atomic uint32_t rn_own_ports[RN_PORTS_MAX]; /* with rn_process_lock held; read by anybody */

static inline struct rn_qp_block *rn_own_qp(uint32_t index)
{
	return rn_guarded(RN_GUARD_OWN_FACTS) ? &rn_own_qps[index] : rn_arena_qp(rn_arena, index);
}
static inline struct rn_pool_block *rn_own_pool(uint32_t index)
{
	return rn_guarded(RN_GUARD_OWN_FACTS) ? &rn_own_pools[index] : rn_arena_pool(rn_arena, index);
}
static inline uint32_t rn_own_port(uint32_t group)
{
	return atomic_load(rn_guarded(RN_GUARD_OWN_FACTS) ? &rn_own_ports[group]
							  : &rn_arena_head(rn_arena)->ports[group]);
}

/* Where the facts about this pool stand, of whichever arena it is. */
static inline struct rn_pool_block *rn_pool_facts(char *arena, struct rn_pool_block *pool)
{
	return arena == rn_arena ? rn_own_pool((uint32_t)(pool - rn_arena_pool(arena, 0))) : pool;
}

/* The key table that work requests of this process are checked against. What peers see of it in
 * the arena is a copy: they can't make us use what they have scribbled there. */
extern struct rn_mr_entry rn_mr_table[RN_MRS_MAX];

/* The index of the block of our queue pair with this number; RN_QPS_MAX: we have no such port. */
uint32_t rn_own_locate(uint32_t qpn);

/*
 * Make the arena's copy what the private one is; returns how many words differed.  The first word, which says
 * that all others are good (generation_state, ring, key), is written last.  With the lock held that whoever changes
 * the private copy has.
 */
unsigned rn_own_tell_qp(uint32_t index);
unsigned rn_own_tell_pool(uint32_t index);
unsigned rn_own_tell_mr(uint32_t index); /* no lock needed: it has its own */
unsigned rn_own_tell_head(void);

/* Of all regions; windows are left alone: their peers may take them away in the arena. */
unsigned rn_own_tell_regions(void);

void rn_own_forked(void);
