/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside a pool, the owner's side: rings, entries, and a private shadow of each.
 *
 *     ibv_post_srq_recv   ibv_modify_srq       ibv_poll_cq         peers' death     to ERR, to RESET
 *              \            /                     |                    |               |
 *               pool.c: open, post, resize      pool_arrive.c: arrivals, recovery, flushing
 *                        \                          /
 *                         +------ this header -----+
 *
 * What peers can write (words, completions, the links of the lists) tells what happened, but never
 * where: each entry has a shadow in private memory with the program's wr_id and scatter list, whether the entry is in
 * use, and its link in the chain of arrivals.  A reference from a list is looked up among the pool's own
 * rings; one that fits no entry ends the list.  A word that contradicts its shadow is ignored.
 */
#pragma once

#include "base/lock.h"
#include "base/process.h"
#include "shm/own.h"
#include "shm/pool.h"

enum { RN_ENTRY_KIND = 3 };

struct rn_pool_shadow {
	uint64_t wr_id;
	uint32_t length; /* of its scatter list: no completion may claim more */
	uint32_t next;   /* in the chain it is on, by reference */
	uint64_t addr;   /* of its only entry, with the key below; of more the list is in the ring's lists */
	uint32_t lkey;
	uint16_t num_sge;
	bool used;       /* posted and not polled yet */
	bool arrived;    /* on a chain */
	bool flushed;    /* it arrives as such, whatever its claimer still does */
};

struct rn_ring {
	struct rn_ring *older;
	uint64_t offset;
	uint32_t size, stride, nonce;
	struct rn_pool_shadow *shadows;
	struct rn_slot_sge *lists; /* the pool's max_sge for each entry; NULL: none was longer than one yet */
};

struct rn_pool {
	struct rn_lock lock;
	uint32_t index; /* of the block */
	struct rn_pool_block *block; /* what peers see */
	struct rn_pool_block *own;   /* the facts among that: own.h */
	uint32_t pd, max_wr, max_sge;
	uint32_t used; /* entries, of all rings */
	uint32_t looked_at; /* by rn_pool_look_after_all: entries of the current ring */
	bool closed;   /* a claimer is stopped inside */
	bool by_processes; /* see rn_pool_open */
	struct rn_ring *rings; /* the current one, then older ones that still have entries */
};

static inline struct rn_entry *rn_ring_entry(const struct rn_ring *ring, uint32_t position)
{
	return (struct rn_entry *)(rn_arena + ring->offset + (uint64_t)(position & (ring->size - 1)) * ring->stride);
}

static inline struct rn_pool_shadow *rn_ring_shadow(const struct rn_ring *ring, uint32_t position)
{
	return &ring->shadows[position & (ring->size - 1)];
}

static inline enum rn_entry_kind rn_kind_of(struct rn_entry *entry)
{
	return atomic_load(&entry->word) & RN_ENTRY_KIND;
}

static inline bool rn_is_taken(struct rn_entry *entry)
{
	return rn_kind_of(entry) >= RN_ENTRY_CLAIMED;
}

static inline uint32_t rn_entry_name(uint64_t word)
{
	return word >> 2 & 0x3fffffff;
}

static inline uint64_t rn_ring_posted(const struct rn_ring *ring, uint32_t position)
{
	return (uint64_t)position << 32 | (uint64_t)ring->nonce << 2 | RN_ENTRY_POSTED;
}

static inline uint32_t rn_ring_reference(const struct rn_ring *ring, uint32_t position)
{
	return (uint32_t)(((char *)rn_ring_entry(ring, position) - rn_arena) / 64);
}

/* The ring, and the place in it, of the entry that a reference names; NULL: there is none. */
static inline const struct rn_ring *rn_pool_locate(const struct rn_pool *pool, uint32_t reference, uint32_t *position)
{
	uint64_t offset = (uint64_t)reference * 64;

	for (const struct rn_ring *ring = pool->rings; ring; ring = ring->older) {
		uint64_t at = offset - ring->offset;

		if (offset < ring->offset || at >= (uint64_t)ring->size * ring->stride || at % ring->stride)
			continue;
		*position = (uint32_t)(at / ring->stride);
		return ring;
	}
	return NULL;
}

static inline struct rn_pool_shadow *rn_pool_find(const struct rn_pool *pool, uint32_t reference,
						  struct rn_entry **entry)
{
	uint32_t position;
	const struct rn_ring *ring = rn_pool_locate(pool, reference, &position);

	*entry = ring ? rn_ring_entry(ring, position) : NULL;
	return ring ? rn_ring_shadow(ring, position) : NULL;
}

/* Posted, and not on any chain? For other entries the arena's word is ignored. */
static inline bool rn_pool_is_out(const struct rn_pool_shadow *shadow)
{
	return shadow->used && !shadow->arrived && !shadow->flushed;
}

/* Nothing is known of it any more. With the lock held. */
static inline void rn_pool_release(struct rn_pool *pool, struct rn_pool_shadow *shadow, struct rn_entry *entry)
{
	atomic_store(&entry->word, 0);
	pool->used -= shadow->used;
	shadow->used = shadow->arrived = shadow->flushed = false;
}

static inline struct rn_slot_sge *rn_ring_list(const struct rn_pool *pool, const struct rn_ring *ring,
					       uint32_t position)
{
	return ring->lists ? ring->lists + (uint64_t)(position & (ring->size - 1)) * pool->max_sge : NULL;
}

/* --- pool_ring.c ---------------------------------------------------------------------------------------------- */

struct rn_ring *rn_ring_make(uint32_t max_wr, uint32_t max_sge); /* NULL: no memory */
void rn_ring_free(struct rn_ring *ring);
/* What peers read of it in the pool's block. */
uint64_t rn_ring_packed(const struct rn_ring *ring);
bool rn_ring_is_in_use(const struct rn_ring *ring); /* any entry */

/* --- pool.c, pool_arrive.c --------------------------------------------------------------------------------------- */

/* Take back what is posted. With the lock held. */
void rn_pool_withdraw(struct rn_pool *pool, struct rn_ring *ring, uint32_t position);
/* Move the posted entries of older rings into the current one, in order; then free the rings in which no claimer is.
 * With the lock held. */
void rn_pool_leave_old_rings(struct rn_pool *pool);
/* Each pool in turn, with its lock held; what visit returns, summed up. */
unsigned rn_pool_visit_all(unsigned (*visit)(struct rn_pool *pool, bool all), bool all);
/* Of one that is claimed by this name, which has ended: posted again, or free. With the lock held. */
void rn_pool_recover_entry(struct rn_pool *pool, struct rn_ring *ring, uint32_t position, uint32_t name);
