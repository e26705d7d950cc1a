/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of receives, the owner's side.  pool.h has the theory, pool_ring.h a drawing.
 *
 * Resizing makes a new ring: what is posted moves over, what is claimed stays in the old one until
 * it is polled.  A ring is freed when nothing in it is claimed and nothing of it is in use.
 */
#include <stdlib.h>

#include "base/engine.h"
#include "base/fence.h"
#include "shm/limits.h"
#include "shm/pool_ring.h"
#include "verbs.h"

/* By the index of their block; outside of the pools' own locks. */
static struct rn_lock pools_lock;
static struct rn_pool *pools[RN_POOLS_MAX];
static uint32_t pools_end; /* none at this index or above */

/* --- opening and closing -------------------------------------------------------------------------------- */

struct rn_pool *rn_pool_open(uint32_t max_wr, uint32_t max_sge, uint32_t pd, bool by_processes)
{
	struct rn_pool *pool = calloc(1, sizeof(*pool));
	struct rn_ring *ring = pool ? rn_ring_make(max_wr, max_sge) : NULL;
	uint32_t index = 0;

	rn_pool_reap();
	rn_lock(&pools_lock);
	while (index < RN_POOLS_MAX && pools[index])
		index++;
	if (!ring || index == RN_POOLS_MAX) {
		rn_unlock(&pools_lock);
		if (ring)
			rn_ring_free(ring);
		free(pool);
		return NULL;
	}
	pool->rings = ring;
	pool->index = index;
	pool->block = rn_arena_pool(rn_arena, index);
	pool->pd = pd;
	pool->max_wr = max_wr;
	pool->max_sge = max_sge;
	pool->by_processes = by_processes;
	pool->own = rn_own_pool(index);
	atomic_store(&pool->own->tail, 0);
	atomic_store(&pool->own->pd, pd);
	atomic_store(&pool->own->limit, 0);
	atomic_store(&pool->own->number, 0);
	atomic_store(&pool->own->older, 0);
	atomic_store(&pool->own->ring, rn_ring_packed(pool->rings));
	atomic_store(&pool->block->head, 0);
	atomic_store(&pool->block->strays, 0);
	atomic_store(&pool->block->strays_found, 0);
	atomic_store(&pool->block->finished, 0);
	rn_own_tell_pool(index);
	pools[index] = pool;
	if (pools_end <= index)
		pools_end = index + 1;
	rn_unlock(&pools_lock);
	return pool;
}

/* With the table's lock held. */
static void pool_free(struct rn_pool *pool)
{
	while (pool->rings) {
		struct rn_ring *older = pool->rings->older;

		rn_ring_free(pool->rings);
		pool->rings = older;
	}
	pools[pool->index] = NULL;
	while (pools_end && !pools[pools_end - 1])
		pools_end--;
	free(pool);
}

void rn_pool_withdraw(struct rn_pool *pool, struct rn_ring *ring, uint32_t position)
{
	struct rn_entry *entry = rn_ring_entry(ring, position);
	struct rn_pool_shadow *shadow = rn_ring_shadow(ring, position);
	uint64_t word = atomic_load(&entry->word);

	if (rn_pool_is_out(shadow) && (word & RN_ENTRY_KIND) == RN_ENTRY_POSTED &&
	    atomic_compare_exchange_strong(&entry->word, &word, 0)) {
		shadow->used = false;
		pool->used--;
	}
}

static bool is_claimed(struct rn_pool *pool)
{
	for (struct rn_ring *ring = pool->rings; ring; ring = ring->older)
		for (uint32_t i = 0; i < ring->size; i++)
			if (ring->shadows[i].used && rn_kind_of(rn_ring_entry(ring, i)) == RN_ENTRY_CLAIMED)
				return true;
	return false;
}

void rn_pool_close(struct rn_pool *pool)
{
	rn_lock(&pool->lock);
	atomic_store(&pool->own->number, 0);
	atomic_store(&pool->own->ring, 0);
	rn_own_tell_pool(pool->index);
	for (struct rn_ring *ring = pool->rings; ring; ring = ring->older)
		for (uint32_t i = 0; i < ring->size; i++)
			rn_pool_withdraw(pool, ring, i);
	pool->closed = true;
	rn_unlock(&pool->lock);
	rn_pool_reap();
}

void rn_pool_reap(void)
{
	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++)
		if (pools[i] && pools[i]->closed && !is_claimed(pools[i]))
			pool_free(pools[i]);
	rn_unlock(&pools_lock);
}

unsigned rn_pool_count_quarantined(void)
{
	unsigned count = 0;

	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++)
		count += pools[i] && pools[i]->closed;
	rn_unlock(&pools_lock);
	return count;
}

bool rn_pool_is_quarantined(uint32_t pd)
{
	bool is = false;

	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++)
		is |= pools[i] && pools[i]->closed && pools[i]->pd == pd;
	rn_unlock(&pools_lock);
	return is;
}

void rn_pool_forked(void)
{
	pools_lock = (struct rn_lock){0};
	memset(pools, 0, sizeof(pools));
	pools_end = 0;
}

uint32_t rn_pool_index(const struct rn_pool *pool)
{
	return pool->index;
}

struct rn_pool_block *rn_pool_block(const struct rn_pool *pool)
{
	return pool->block;
}

uint32_t rn_pool_max_wr(const struct rn_pool *pool)
{
	return pool->max_wr;
}

void rn_pool_set_limit(struct rn_pool *pool, uint32_t limit)
{
	rn_lock(&pool->lock);
	if (limit)
		atomic_fetch_add(&pool->own->arming, 1);
	atomic_store(&pool->own->limit, limit);
	rn_own_tell_pool(pool->index);
	rn_fence(); /* the caller looks at the head next: a claimer that moves it later sees the limit */
	rn_unlock(&pool->lock);
}

void rn_pool_set_number(struct rn_pool *pool, uint32_t number, uint32_t domain, uint32_t cq, uint32_t cq_bit)
{
	struct rn_pool_block *own = pool->own;

	rn_lock(&pool->lock);
	atomic_store(&own->cq, cq);
	atomic_store(&own->cq_bit, cq_bit);
	atomic_store(&own->domain, domain);
	rn_own_tell_pool(pool->index);
	atomic_store(&own->number, number);
	rn_own_tell_pool(pool->index);
	rn_unlock(&pool->lock);
}

uint32_t rn_pool_left(struct rn_pool *pool)
{
	uint32_t head = atomic_load(&pool->block->head), left = atomic_load(&pool->own->tail) - head;

	return left < pool->max_wr ? left : pool->max_wr;
}

/* --- posting ----------------------------------------------------------------------------------------------- */

/* The next position whose slot is free. One that lies in the way though it is posted gets the position: it was given
 * back long ago, or others have come round before it.  Until the tail is behind it, it is a stray. */
static uint32_t next_position(struct rn_pool *pool)
{
	struct rn_ring *ring = pool->rings;
	uint32_t at = atomic_load_explicit(&pool->own->tail, memory_order_relaxed);
	bool counted = false;

	for (; rn_ring_shadow(ring, at)->used; at++) {
		struct rn_entry *entry = rn_ring_entry(ring, at);
		uint64_t word = atomic_load_explicit(&entry->word, memory_order_relaxed);

		if ((word & RN_ENTRY_KIND) != RN_ENTRY_POSTED || !rn_pool_is_out(rn_ring_shadow(ring, at)))
			continue;
		if (!counted)
			atomic_fetch_add(&pool->block->strays, 1);
		counted = true;
		atomic_compare_exchange_strong(&entry->word, &word, rn_ring_posted(ring, at));
	}
	return at;
}

/* With the lock held, and room for it. */
static void post(struct rn_pool *pool, uint64_t wr_id, uint32_t length, const struct rn_slot_sge *sges,
		 uint32_t num_sge)
{
	uint32_t at = next_position(pool);
	struct rn_entry *entry = rn_ring_entry(pool->rings, at);

	entry->slot.num_sge = num_sge;
	for (uint32_t i = 0; i < num_sge; i++)
		entry->slot.sge[i] = sges[i];
	*rn_ring_shadow(pool->rings, at) = (struct rn_pool_shadow){
		.wr_id = wr_id,
		.length = length,
		.addr = num_sge == 1 ? sges[0].addr : 0,
		.lkey = num_sge == 1 ? sges[0].lkey : 0,
		.num_sge = num_sge,
		.used = true,
	};
	if (unlikely(num_sge > 1))
		memcpy(rn_ring_list(pool, pool->rings, at), sges, num_sge * sizeof(*sges));
	pool->used++;
	atomic_store(&entry->word, rn_ring_posted(pool->rings, at));
	atomic_store_explicit(&pool->own->tail, at + 1, memory_order_release);
	atomic_store(&pool->block->tail, at + 1);
}

/* Most pools never need them. */
static bool need_lists(struct rn_pool *pool)
{
	struct rn_ring *ring = pool->rings;

	if (unlikely(!ring->lists))
		ring->lists = calloc((size_t)ring->size * pool->max_sge, sizeof(*ring->lists));
	return ring->lists;
}

static int post_one(struct rn_pool *pool, const struct ibv_recv_wr *wr)
{
	struct rn_slot_sge sges[RN_MAX_SGE];
	uint64_t length = 0;

	if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > pool->max_sge))
		return EINVAL;
	if (unlikely(pool->used >= pool->max_wr))
		return ENOMEM;
	if (unlikely(wr->num_sge > 1 && !need_lists(pool)))
		return ENOMEM;
	for (int i = 0; i < wr->num_sge; i++) {
		sges[i] = (struct rn_slot_sge){
			.addr = wr->sg_list[i].addr,
			.length = wr->sg_list[i].length,
			.lkey = wr->sg_list[i].lkey,
		};
		length += wr->sg_list[i].length;
	}
	post(pool, wr->wr_id, wr->num_sge == 1 || length < RN_MAX_MESSAGE ? length : RN_MAX_MESSAGE, sges, wr->num_sge);
	return 0;
}

/* Claimers may also look at the ring before the current one. */
static void show_older(struct rn_pool *pool)
{
	const struct rn_ring *older = pool->rings->older;

	atomic_store(&pool->own->older, older ? rn_ring_packed(older) : 0);
	rn_own_tell_pool(pool->index);
}

void rn_pool_leave_old_rings(struct rn_pool *pool)
{
	struct rn_ring **at = &pool->rings->older;

	while (*at) {
		struct rn_ring *old = *at;
		uint32_t tail = atomic_load(&pool->own->tail);

		for (uint32_t i = 0; i < old->size; i++) {
			struct rn_entry *entry = rn_ring_entry(old, tail + i);
			struct rn_pool_shadow moved = *rn_ring_shadow(old, tail + i);
			uint64_t word = atomic_load(&entry->word);
			struct rn_slot_sge sges[RN_MAX_SGE];

			if (!rn_pool_is_out(&moved) || (word & RN_ENTRY_KIND) != RN_ENTRY_POSTED ||
			    (moved.num_sge > 1 && !need_lists(pool)) ||
			    !atomic_compare_exchange_strong(&entry->word, &word, 0))
				continue;
			rn_ring_shadow(old, tail + i)->used = false;
			pool->used--;
			rn_posted_list(moved.num_sge, moved.addr, moved.length, moved.lkey,
				       rn_ring_list(pool, old, tail + i), sges);
			post(pool, moved.wr_id, moved.length, sges, moved.num_sge);
		}
		if (rn_ring_is_in_use(old)) {
			at = &old->older;
		} else {
			*at = old->older;
			show_older(pool);
			rn_ring_free(old);
		}
	}
}

int rn_pool_post(struct rn_pool *pool, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	int err = 0;

	rn_lock(&pool->lock);
	if (unlikely(pool->rings->older))
		rn_pool_leave_old_rings(pool);
	for (; wr; wr = wr->next) {
		err = post_one(pool, wr);
		if (unlikely(err)) {
			*bad_wr = wr;
			break;
		}
	}
	rn_unlock(&pool->lock);
	return err;
}

int rn_pool_resize(struct rn_pool *pool, uint32_t max_wr)
{
	struct rn_ring *ring = NULL;
	int err = 0;

	rn_lock(&pool->lock);
	if (max_wr < pool->used) {
		err = EINVAL;
	} else if (max_wr > pool->rings->size) {
		ring = rn_ring_make(max_wr, pool->max_sge);
		err = ring ? 0 : ENOMEM;
	}
	if (ring) {
		ring->older = pool->rings;
		pool->rings = ring;
		show_older(pool);
		atomic_store(&pool->own->ring, rn_ring_packed(ring));
		rn_own_tell_pool(pool->index);
		rn_pool_leave_old_rings(pool);
	}
	if (!err)
		pool->max_wr = max_wr;
	rn_unlock(&pool->lock);
	return err;
}

/* --- all of them ----------------------------------------------------------------------------------------- */

void rn_pool_recover(uint32_t name)
{
	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++) {
		struct rn_pool *pool = pools[i];

		if (!pool)
			continue;
		rn_lock(&pool->lock);
		for (struct rn_ring *ring = pool->rings; ring; ring = ring->older)
			for (uint32_t at = 0; at < ring->size; at++)
				rn_pool_recover_entry(pool, ring, at, name);
		atomic_fetch_add(&pool->block->strays, 1);
		if (pool->rings->older)
			rn_pool_leave_old_rings(pool);
		rn_unlock(&pool->lock);
	}
	rn_unlock(&pools_lock);
	rn_pool_reap();
}

uint32_t rn_pool_posted_list(uint32_t index, struct rn_entry *entry, struct rn_slot_sge *list)
{
	uint32_t num_sge = RN_NOT_POSTED, position;
	const struct rn_ring *ring = NULL;
	struct rn_pool *pool;

	rn_lock(&pools_lock);
	pool = pools[index];
	if (pool) {
		rn_lock(&pool->lock);
		ring = rn_pool_locate(pool, (uint32_t)(((char *)entry - rn_arena) / 64), &position);
		if (ring && rn_pool_is_out(rn_ring_shadow(ring, position))) {
			const struct rn_pool_shadow *shadow = rn_ring_shadow(ring, position);

			num_sge = rn_posted_list(shadow->num_sge, shadow->addr, shadow->length, shadow->lkey,
						 rn_ring_list(pool, ring, position), list);
		} else if (ring) {
			atomic_store(&entry->word, 0);
		}
		rn_unlock(&pool->lock);
	}
	rn_unlock(&pools_lock);
	return num_sge;
}

unsigned rn_pool_visit_all(unsigned (*visit)(struct rn_pool *pool, bool all), bool all)
{
	unsigned sum = 0;

	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++) {
		if (!pools[i])
			continue;
		rn_lock(&pools[i]->lock);
		sum += visit(pools[i], all);
		rn_unlock(&pools[i]->lock);
	}
	rn_unlock(&pools_lock);
	return sum;
}

bool rn_pools_wait_moved(uint32_t pd, uint64_t deadline_ns)
{
	bool moved = true;

	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++)
		if (pools[i] && pools[i]->pd == pd)
			moved &= rn_pool_wait_moved(pools[i], deadline_ns);
	rn_unlock(&pools_lock);
	return moved;
}

bool rn_pool_is_claimed(uint32_t index)
{
	bool is = false;

	rn_lock(&pools_lock);
	is = index < RN_POOLS_MAX && pools[index] && !rn_pool_wait_moved(pools[index], 0);
	rn_unlock(&pools_lock);
	return is;
}

void rn_pool_forget_all(void)
{
	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++) {
		if (!pools[i])
			continue;
		for (struct rn_ring *ring = pools[i]->rings, *older; ring; ring = older) {
			older = ring->older;
			free(ring->lists);
			free(ring->shadows);
			free(ring);
		}
		free(pools[i]);
		pools[i] = NULL;
	}
	pools_end = 0;
	rn_unlock(&pools_lock);
}
