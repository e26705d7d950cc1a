/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of receives, as its owner has it.  pool.h has the theory.
 *
 * What peers can write (words, completions, the links of the lists) says what happened, but never
 * where: each entry has a shadow in private memory with the program's wr_id, whether the entry is in
 * use, and its link in the chain of arrivals.  A reference from a list is looked up among the pool's own
 * rings; one that fits no entry ends the list.
 *
 * Resizing makes a new ring: what is posted moves over, what is claimed stays in the old one until
 * it is polled.  A ring is freed when nothing in it is claimed and nothing of it is in use.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "soft.h"

#include "pool.h"

enum { KIND = 3 };

struct shadow {
	uint64_t wr_id;
	uint32_t length; /* of its scatter list: no completion may claim more */
	uint32_t next;   /* in the chain it is on, by reference */
	bool used;       /* posted and not polled yet */
	bool arrived;    /* on a chain */
	bool flushed;    /* it arrives as such, whatever its claimer still does */
};

struct ring {
	struct ring *older;
	uint64_t offset;
	uint32_t size, stride, nonce;
	struct shadow *shadows;
};

struct rn_pool {
	struct rn_lock lock;
	uint32_t index; /* of the block */
	struct rn_pool_block *block;
	uint32_t pd, max_wr, max_sge;
	uint32_t used; /* entries, of all rings */
	bool closed;   /* somebody is stopped inside */
	struct ring *rings; /* the current one, then those that are left by degrees */
};

/* By the index of their block; outside of the pools' own locks. */
static struct rn_lock pools_lock;
static struct rn_pool *pools[RN_POOLS_MAX];
static uint32_t pools_end; /* none at this index or above */

/* --- rings ------------------------------------------------------------------------------------------- */

static struct rn_entry *entry_at(const struct ring *ring, uint32_t position)
{
	return (struct rn_entry *)(rn_arena + ring->offset + (uint64_t)(position & (ring->size - 1)) * ring->stride);
}

static struct shadow *shadow_at(const struct ring *ring, uint32_t position)
{
	return &ring->shadows[position & (ring->size - 1)];
}

static enum rn_entry_kind kind_of(struct rn_entry *entry)
{
	return atomic_load(&entry->word) & KIND;
}

static uint32_t name_in(uint64_t word)
{
	return word >> 2 & 0x3fffffff;
}

static uint64_t posted_word(const struct ring *ring, uint32_t position)
{
	return (uint64_t)position << 32 | (uint64_t)ring->nonce << 2 | RN_ENTRY_POSTED;
}

static uint32_t reference_of(const struct ring *ring, uint32_t position)
{
	return (uint32_t)(((char *)entry_at(ring, position) - rn_arena) / 64);
}

/* The entry that a reference means, if there is such a one. */
static struct shadow *find(const struct rn_pool *pool, uint32_t reference, struct rn_entry **entry)
{
	uint64_t offset = (uint64_t)reference * 64;

	for (const struct ring *ring = pool->rings; ring; ring = ring->older) {
		uint64_t at = offset - ring->offset;

		if (offset < ring->offset || at >= (uint64_t)ring->size * ring->stride || at % ring->stride)
			continue;
		*entry = entry_at(ring, at / ring->stride);
		return &ring->shadows[at / ring->stride];
	}
	return NULL;
}

static struct ring *ring_make(uint32_t max_wr, uint32_t max_sge)
{
	struct ring *ring = calloc(1, sizeof(*ring));
	uint32_t nonce;

	if (!ring)
		return NULL;
	for (ring->size = 2; ring->size < max_wr;)
		ring->size *= 2;
	ring->stride = (sizeof(struct rn_entry) + max_sge * sizeof(struct rn_slot_sge) + 63) / 64 * 64;
	if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
		nonce = (uint32_t)rn_now_ns();
	ring->nonce = (nonce & 0x3fffffff) | 1;
	ring->shadows = calloc(ring->size, sizeof(*ring->shadows));
	ring->offset = ring->shadows ? rn_arena_alloc((uint64_t)ring->size * ring->stride) : 0;
	if (!ring->offset) {
		free(ring->shadows);
		free(ring);
		return NULL;
	}
	for (uint32_t i = 0; i < ring->size; i++)
		atomic_store(&entry_at(ring, i)->word, 0);
	return ring;
}

static uint64_t ring_packed(const struct ring *ring)
{
	return (uint64_t)ring->nonce << 32 | (uint64_t)__builtin_ctz(ring->size) << 28 | ring->stride / 64 << 23 |
	       ring->offset / 64;
}

static void ring_free(struct ring *ring)
{
	rn_arena_free(ring->offset, (uint64_t)ring->size * ring->stride);
	free(ring->shadows);
	free(ring);
}

static bool ring_is_in_use(const struct ring *ring)
{
	for (uint32_t i = 0; i < ring->size; i++)
		if (ring->shadows[i].used || kind_of(entry_at(ring, i)) == RN_ENTRY_CLAIMED)
			return true;
	return false;
}

/* --- opening and closing -------------------------------------------------------------------------------- */

struct rn_pool *rn_pool_open(uint32_t max_wr, uint32_t max_sge, uint32_t pd)
{
	struct rn_pool *pool = calloc(1, sizeof(*pool));
	struct ring *ring = pool ? ring_make(max_wr, max_sge) : NULL;
	uint32_t index = 0;

	rn_pool_reap();
	rn_lock(&pools_lock);
	while (index < RN_POOLS_MAX && pools[index])
		index++;
	if (!ring || index == RN_POOLS_MAX) {
		rn_unlock(&pools_lock);
		if (ring)
			ring_free(ring);
		free(pool);
		return NULL;
	}
	pool->rings = ring;
	pool->index = index;
	pool->block = rn_arena_pool(rn_arena, index);
	pool->pd = pd;
	pool->max_wr = max_wr;
	pool->max_sge = max_sge;
	atomic_store(&pool->block->tail, 0);
	atomic_store(&pool->block->pd, pd);
	atomic_store(&pool->block->limit, 0);
	atomic_store(&pool->block->number, 0);
	atomic_store(&pool->block->head, 0);
	atomic_store(&pool->block->stray, 0);
	atomic_store(&pool->block->finished, 0);
	atomic_store(&pool->block->ring, ring_packed(pool->rings));
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
		struct ring *older = pool->rings->older;

		ring_free(pool->rings);
		pool->rings = older;
	}
	pools[pool->index] = NULL;
	while (pools_end && !pools[pools_end - 1])
		pools_end--;
	free(pool);
}

/* Take back what is posted. With the lock held. */
static void withdraw(struct rn_pool *pool, struct ring *ring, uint32_t position)
{
	struct rn_entry *entry = entry_at(ring, position);
	uint64_t word = atomic_load(&entry->word);

	if ((word & KIND) == RN_ENTRY_POSTED && atomic_compare_exchange_strong(&entry->word, &word, 0)) {
		shadow_at(ring, position)->used = false;
		pool->used--;
	}
}

static bool is_claimed(struct rn_pool *pool)
{
	for (struct ring *ring = pool->rings; ring; ring = ring->older)
		for (uint32_t i = 0; i < ring->size; i++)
			if (kind_of(entry_at(ring, i)) == RN_ENTRY_CLAIMED)
				return true;
	return false;
}

void rn_pool_close(struct rn_pool *pool)
{
	atomic_store(&pool->block->number, 0);
	atomic_store(&pool->block->ring, 0);
	rn_lock(&pool->lock);
	for (struct ring *ring = pool->rings; ring; ring = ring->older)
		for (uint32_t i = 0; i < ring->size; i++)
			withdraw(pool, ring, i);
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

uint32_t rn_pool_left(struct rn_pool *pool)
{
	uint32_t head = atomic_load(&pool->block->head), left = atomic_load(&pool->block->tail) - head;

	return left < pool->max_wr ? left : pool->max_wr;
}

/* --- posting ----------------------------------------------------------------------------------------------- */

/* The next position whose slot is free. One that lies in the way though it is posted was given back
 * long ago: it gets the position, and is in order again. */
static uint32_t next_position(struct rn_pool *pool)
{
	struct ring *ring = pool->rings;
	uint32_t at = atomic_load_explicit(&pool->block->tail, memory_order_relaxed);

	for (; shadow_at(ring, at)->used; at++) {
		struct rn_entry *entry = entry_at(ring, at);
		uint64_t word = atomic_load_explicit(&entry->word, memory_order_relaxed);

		if ((word & KIND) == RN_ENTRY_POSTED)
			atomic_compare_exchange_strong(&entry->word, &word, posted_word(ring, at));
	}
	return at;
}

/* With the lock held, and room for it. */
static void post(struct rn_pool *pool, uint64_t wr_id, uint32_t length, const struct rn_slot_sge *sges, uint32_t num_sge)
{
	uint32_t at = next_position(pool);
	struct rn_entry *entry = entry_at(pool->rings, at);

	entry->slot.num_sge = num_sge;
	for (uint32_t i = 0; i < num_sge; i++)
		entry->slot.sge[i] = sges[i];
	*shadow_at(pool->rings, at) = (struct shadow){.wr_id = wr_id, .length = length, .used = true};
	pool->used++;
	atomic_store(&entry->word, posted_word(pool->rings, at));
	atomic_store(&pool->block->tail, at + 1);
}

static int post_one(struct rn_pool *pool, const struct ibv_recv_wr *wr)
{
	struct rn_slot_sge sges[RN_MAX_SGE];
	uint64_t length = 0;

	if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > pool->max_sge))
		return EINVAL;
	if (unlikely(pool->used >= pool->max_wr))
		return ENOMEM;
	for (int i = 0; i < wr->num_sge; i++) {
		sges[i] = (struct rn_slot_sge){
			.addr = wr->sg_list[i].addr,
			.length = wr->sg_list[i].length,
			.lkey = wr->sg_list[i].lkey,
		};
		length += wr->sg_list[i].length;
	}
	post(pool, wr->wr_id, length < RN_MAX_MESSAGE ? length : RN_MAX_MESSAGE, sges, wr->num_sge);
	return 0;
}

/* What lies posted in rings that are left moves into the current one, in order; then they go, as far as
 * nobody is inside. With the lock held. */
static void leave_old_rings(struct rn_pool *pool)
{
	struct ring **at = &pool->rings->older;

	while (*at) {
		struct ring *old = *at;
		uint32_t tail = atomic_load(&pool->block->tail);

		for (uint32_t i = 0; i < old->size; i++) {
			struct rn_entry *entry = entry_at(old, tail + i);
			struct shadow moved = *shadow_at(old, tail + i);
			uint64_t word = atomic_load(&entry->word);
			uint32_t num_sge = READ_ONCE(entry->slot.num_sge);

			if ((word & KIND) != RN_ENTRY_POSTED || !atomic_compare_exchange_strong(&entry->word, &word, 0))
				continue;
			shadow_at(old, tail + i)->used = false;
			pool->used--;
			if (num_sge > pool->max_sge)
				num_sge = pool->max_sge;
			post(pool, moved.wr_id, moved.length, entry->slot.sge, num_sge);
		}
		if (ring_is_in_use(old)) {
			at = &old->older;
		} else {
			*at = old->older;
			ring_free(old);
		}
	}
}

int rn_pool_post(struct rn_pool *pool, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	int err = 0;

	rn_lock(&pool->lock);
	if (unlikely(pool->rings->older))
		leave_old_rings(pool);
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
	struct ring *ring = NULL;
	int err = 0;

	rn_lock(&pool->lock);
	if (max_wr < pool->used) {
		err = EINVAL;
	} else if (max_wr > pool->rings->size) {
		ring = ring_make(max_wr, pool->max_sge);
		err = ring ? 0 : ENOMEM;
	}
	if (ring) {
		ring->older = pool->rings;
		pool->rings = ring;
		atomic_store(&pool->block->ring, ring_packed(ring));
		leave_old_rings(pool);
	}
	if (!err)
		pool->max_wr = max_wr;
	rn_unlock(&pool->lock);
	return err;
}

/* --- arrivals: with the CQ's lock held ------------------------------------------------------------------------ */

/* Nothing is known of it any more. With the lock held. */
static void release(struct rn_pool *pool, struct shadow *shadow, struct rn_entry *entry)
{
	atomic_store(&entry->word, 0);
	shadow->used = shadow->arrived = shadow->flushed = false;
	pool->used--;
}

static void chain_append(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t reference, struct shadow *shadow)
{
	struct rn_entry *entry;

	shadow->arrived = true;
	shadow->next = 0;
	if (arrivals->last)
		find(pool, arrivals->last, &entry)->next = reference;
	else
		arrivals->first = reference;
	arrivals->last = reference;
}

/* The list, last first, goes behind the chain, first first. What isn't ours ends it. What was flushed
 * meanwhile is on the chain already, or was polled as such: then it is free with its claimer's last word. */
static void collect(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	uint32_t at, below, reversed = 0, left = pool->used;
	struct rn_entry *entry;
	struct shadow *shadow;

	if (!atomic_load_explicit(arrivals->finished, memory_order_relaxed))
		return;
	for (at = atomic_exchange(arrivals->finished, 0); at && left; at = below, left--) {
		shadow = find(pool, at, &entry);
		if (!shadow || !shadow->used)
			break;
		below = atomic_load(&entry->slot.turn);
		if (shadow->flushed || shadow->arrived) {
			if (!shadow->arrived && kind_of(entry) == RN_ENTRY_DONE)
				release(pool, shadow, entry);
			continue;
		}
		shadow->arrived = true;
		shadow->next = reversed;
		reversed = at;
	}
	while (reversed) {
		shadow = find(pool, reversed, &entry);
		at = shadow->next;
		chain_append(pool, arrivals, reversed, shadow);
		reversed = at;
	}
}

/* The slot was written by a peer: nothing in it is taken on trust. */
static void read_entry(const struct shadow *shadow, const struct rn_slot *slot, struct rn_arrival *arrival)
{
	uint8_t status = READ_ONCE(slot->status), opcode = READ_ONCE(slot->opcode);
	uint32_t length = READ_ONCE(slot->byte_len);

	if (opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		opcode = IBV_WC_RECV;
		if (unlikely(length > shadow->length))
			length = shadow->length;
	}
	*arrival = (struct rn_arrival){
		.wr_id = shadow->wr_id,
		.byte_len = length,
		.imm_data = READ_ONCE(slot->imm_data),
		.source_qpn = READ_ONCE(slot->source_qpn) & 0xffffff,
		.destination = READ_ONCE(slot->destination),
		.status = status <= IBV_WC_GENERAL_ERR ? status : IBV_WC_GENERAL_ERR,
		.opcode = opcode,
		.wc_flags = READ_ONCE(slot->wc_flags),
		.vendor_err = READ_ONCE(slot->vendor_err),
	};
}

/* Take an entry off the chain; before: the one before it, or 0. */
static void chain_remove(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t before, const struct shadow *shadow)
{
	struct rn_entry *entry;

	if (before)
		find(pool, before, &entry)->next = shadow->next;
	else
		arrivals->first = shadow->next;
	if (!shadow->next)
		arrivals->last = before;
}

bool rn_pool_next(struct rn_pool *pool, struct rn_arrivals *arrivals, struct rn_arrival *arrival)
{
	struct rn_entry *entry;
	struct shadow *shadow;
	bool found = false;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	for (uint32_t at = arrivals->first, before = 0; at && !found; before = at, at = shadow->next) {
		enum rn_entry_kind kind;

		shadow = find(pool, at, &entry);
		kind = kind_of(entry);
		if (kind == RN_ENTRY_CLAIMED && !shadow->flushed)
			continue; /* its claimer has a step to go, and is passed over */
		if (shadow->flushed)
			*arrival = (struct rn_arrival){.wr_id = shadow->wr_id, .status = IBV_WC_WR_FLUSH_ERR,
						       .opcode = IBV_WC_RECV};
		else
			read_entry(shadow, &entry->slot, arrival);
		chain_remove(pool, arrivals, before, shadow);
		if (kind == RN_ENTRY_CLAIMED)
			shadow->arrived = false; /* flushed; in use until its claimer has left it */
		else
			release(pool, shadow, entry);
		found = true;
		break;
	}
	rn_unlock(&pool->lock);
	return found;
}

void rn_pool_sweep(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t name)
{
	struct rn_entry *entry;
	struct shadow *shadow;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	for (uint32_t at = arrivals->first, before = 0; at; at = shadow->next) {
		uint64_t word;

		shadow = find(pool, at, &entry);
		word = atomic_load(&entry->word);
		if ((word & KIND) != RN_ENTRY_CLAIMED || name_in(word) != name || shadow->flushed) {
			before = at;
			continue;
		}
		chain_remove(pool, arrivals, before, shadow);
		shadow->arrived = false; /* rn_pool_recover does the rest */
	}
	rn_unlock(&pool->lock);
}

void rn_pool_discard(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	struct rn_entry *entry;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	while (arrivals->first) {
		struct shadow *shadow = find(pool, arrivals->first, &entry);

		arrivals->first = shadow->next;
		shadow->arrived = false;
		if (kind_of(entry) != RN_ENTRY_CLAIMED)
			release(pool, shadow, entry);
	}
	arrivals->last = 0;
	rn_unlock(&pool->lock);
}

/* With the lock held. */
static void recover_entry(struct rn_pool *pool, struct ring *ring, uint32_t position, uint32_t name)
{
	struct shadow *shadow = shadow_at(ring, position);
	struct rn_entry *entry = entry_at(ring, position);
	uint64_t word = atomic_load(&entry->word);

	if (name_in(word) != name)
		return;
	if ((word & KIND) == RN_ENTRY_DONE && shadow->used && !shadow->arrived)
		release(pool, shadow, entry); /* for a queue pair that is gone */
	if ((word & KIND) != RN_ENTRY_CLAIMED)
		return;
	if (shadow->used && !shadow->flushed && !pool->closed) {
		atomic_compare_exchange_strong(&entry->word, &word, posted_word(ring, word >> 32));
		return;
	}
	if (!atomic_compare_exchange_strong(&entry->word, &word, 0))
		return;
	if (shadow->used && !shadow->arrived)
		release(pool, shadow, entry);
}

void rn_pool_recover(uint32_t name)
{
	rn_lock(&pools_lock);
	for (uint32_t i = 0; i < pools_end; i++) {
		struct rn_pool *pool = pools[i];

		if (!pool)
			continue;
		rn_lock(&pool->lock);
		for (struct ring *ring = pool->rings; ring; ring = ring->older)
			for (uint32_t at = 0; at < ring->size; at++)
				recover_entry(pool, ring, at, name);
		atomic_store(&pool->block->stray, 1);
		if (pool->rings->older)
			leave_old_rings(pool);
		rn_unlock(&pool->lock);
	}
	rn_unlock(&pools_lock);
	rn_pool_reap();
}

/* --- the end of a UD queue pair's receives ----------------------------------------------------------------------- */

static bool is_process(uint64_t word)
{
	return (word & KIND) == RN_ENTRY_CLAIMED && !(name_in(word) & RN_NAME_QP);
}

/* With the lock held: claimers don't take it. */
static bool wait_moved(struct rn_pool *pool, uint64_t deadline_ns)
{
	for (struct ring *ring = pool->rings; ring; ring = ring->older) {
		for (uint32_t i = 0; i < ring->size; i++) {
			struct rn_entry *entry = entry_at(ring, i);
			uint64_t seen = atomic_load(&entry->word);

			while (is_process(seen) && atomic_load(&entry->word) == seen) {
				if (rn_now_ns() >= deadline_ns)
					return false;
				sched_yield();
			}
		}
	}
	return true;
}

bool rn_pool_wait_moved(struct rn_pool *pool, uint64_t deadline_ns)
{
	bool moved;

	rn_lock(&pool->lock);
	moved = wait_moved(pool, deadline_ns);
	rn_unlock(&pool->lock);
	return moved;
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
		for (struct ring *ring = pools[i]->rings, *older; ring; ring = older) {
			older = ring->older;
			free(ring->shadows);
			free(ring);
		}
		free(pools[i]);
		pools[i] = NULL;
	}
	pools_end = 0;
	rn_unlock(&pools_lock);
}

void rn_pool_flush(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	struct ring *ring = pool->rings;
	uint32_t tail;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	tail = atomic_load(&pool->block->tail);
	for (uint32_t i = 0; i < ring->size; i++) {
		struct shadow *shadow = shadow_at(ring, tail + i);
		struct rn_entry *entry = entry_at(ring, tail + i);
		uint64_t word = atomic_load(&entry->word);

		if (!shadow->used || shadow->flushed || (word & KIND) == RN_ENTRY_DONE)
			continue;
		if ((word & KIND) == RN_ENTRY_POSTED && !atomic_compare_exchange_strong(&entry->word, &word, 0) &&
		    (word & KIND) == RN_ENTRY_DONE)
			continue;
		shadow->flushed = true;
		if (!shadow->arrived) /* or its claimer was about to say DONE */
			chain_append(pool, arrivals, reference_of(ring, tail + i), shadow);
	}
	rn_unlock(&pool->lock);
}

void rn_pool_clear(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	rn_pool_discard(pool, arrivals);
	rn_lock(&pool->lock);
	for (uint32_t i = 0; i < pool->rings->size; i++) {
		struct rn_entry *entry = entry_at(pool->rings, i);
		struct shadow *shadow = shadow_at(pool->rings, i);

		withdraw(pool, pool->rings, i);
		if (shadow->used && kind_of(entry) != RN_ENTRY_CLAIMED)
			release(pool, shadow, entry);
	}
	rn_unlock(&pool->lock);
}
