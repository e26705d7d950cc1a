/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside a pool, as its owner has it: rings, entries, and what is known of each in private.
 *
 *     ibv_post_srq_recv   ibv_modify_srq       ibv_poll_cq         peers' death     to ERR, to RESET
 *              \            /                     |                    |               |
 *               pool.c: open, post, resize      pool_arrive.c: arrivals, recovery, flushing
 *                        \                          /
 *                         +------ this header -----+
 *
 * What peers can write (words, completions, the links of the lists) says what happened, but never
 * where: each entry has a shadow in private memory with the program's wr_id, whether the entry is in
 * use, and its link in the chain of arrivals.  A reference from a list is looked up among the pool's own
 * rings; one that fits no entry ends the list.
 */
#ifndef RDMANET_SOFT_POOL_RING_H
#define RDMANET_SOFT_POOL_RING_H

#include "soft.h"

enum { RN_ENTRY_KIND = 3 };

struct rn_pool_shadow {
	uint64_t wr_id;
	uint32_t length; /* of its scatter list: no completion may claim more */
	uint32_t next;   /* in the chain it is on, by reference */
	bool used;       /* posted and not polled yet */
	bool arrived;    /* on a chain */
	bool flushed;    /* it arrives as such, whatever its claimer still does */
};

struct rn_ring {
	struct rn_ring *older;
	uint64_t offset;
	uint32_t size, stride, nonce;
	struct rn_pool_shadow *shadows;
};

struct rn_pool {
	struct rn_lock lock;
	uint32_t index; /* of the block */
	struct rn_pool_block *block;
	uint32_t pd, max_wr, max_sge;
	uint32_t used; /* entries, of all rings */
	bool closed;   /* somebody is stopped inside */
	struct rn_ring *rings; /* the current one, then those that are left by degrees */
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

/* The entry that a reference means, if there is such a one. */
static inline struct rn_pool_shadow *rn_pool_find(const struct rn_pool *pool, uint32_t reference,
						  struct rn_entry **entry)
{
	uint64_t offset = (uint64_t)reference * 64;

	for (const struct rn_ring *ring = pool->rings; ring; ring = ring->older) {
		uint64_t at = offset - ring->offset;

		if (offset < ring->offset || at >= (uint64_t)ring->size * ring->stride || at % ring->stride)
			continue;
		*entry = rn_ring_entry(ring, at / ring->stride);
		return &ring->shadows[at / ring->stride];
	}
	*entry = NULL;
	return NULL;
}

/* Nothing is known of it any more. With the lock held. */
static inline void rn_pool_release(struct rn_pool *pool, struct rn_pool_shadow *shadow, struct rn_entry *entry)
{
	atomic_store(&entry->word, 0);
	shadow->used = shadow->arrived = shadow->flushed = false;
	pool->used--;
}

/* Take back what is posted. With the lock held. */
void rn_pool_withdraw(struct rn_pool *pool, struct rn_ring *ring, uint32_t position);
/* What lies posted in rings that are left moves into the current one, in order; then they go, as far as
 * nobody is inside. With the lock held. */
void rn_pool_leave_old_rings(struct rn_pool *pool);
/* Of one that is claimed by this name, which has ended: posted again, or free. With the lock held. */
void rn_pool_recover_entry(struct rn_pool *pool, struct rn_ring *ring, uint32_t position, uint32_t name);

#endif
