/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What has arrived in a pool: taken in order, and given up when a queue pair or a peer ends.
 *
 * A claimer that has completed an entry puts it on the list of its queue pair, last first (claim.c).  Here the
 * owner takes that list, turns it round, and appends it to the queue pair's chain, whose links are in private
 * memory.  An entry on the chain may still be claimed, its claimer having a step to go; it is passed over.
 *
 * The caller holds the lock of the CQ to which the queue pair's receives come.
 */
#include "base/engine.h"
#include "shm/pool_ring.h"
#include "verbs.h"

/* --- arrivals ----------------------------------------------------------------------------------------- */

static void chain_append(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t reference,
			 struct rn_pool_shadow *shadow)
{
	struct rn_entry *entry;

	shadow->arrived = true;
	shadow->next = 0;
	if (arrivals->last)
		rn_pool_find(pool, arrivals->last, &entry)->next = reference;
	else
		arrivals->first = reference;
	arrivals->last = reference;
}

static uint32_t entries_of(const struct rn_pool *pool)
{
	uint32_t count = 0;

	for (const struct rn_ring *ring = pool->rings; ring; ring = ring->older)
		count += ring->size;
	return count;
}

/* The list, last first, goes behind the chain, first first. What isn't ours ends it; what nobody has posted, or
 * claimed, is passed over. What was flushed meanwhile is on the chain already, or was polled as such: then it is free
 * with its claimer's last word. */
static void collect(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	uint32_t at, below, reversed = 0, left;
	struct rn_entry *entry;
	struct rn_pool_shadow *shadow;

	if (!atomic_load_explicit(arrivals->finished, memory_order_relaxed))
		return;
	left = entries_of(pool); /* or a list that leads into itself would have no end */
	for (at = atomic_exchange(arrivals->finished, 0); at && left; at = below, left--) {
		shadow = rn_pool_find(pool, at, &entry);
		if (!shadow)
			break;
		below = atomic_load(&entry->slot.owner_sequence);
		if (!shadow->used || !rn_is_taken(entry))
			continue;
		if (shadow->flushed || shadow->arrived) {
			if (!shadow->arrived && rn_kind_of(entry) == RN_ENTRY_DONE)
				rn_pool_release(pool, shadow, entry);
			continue;
		}
		shadow->arrived = true;
		shadow->next = reversed;
		reversed = at;
	}
	while (reversed) {
		shadow = rn_pool_find(pool, reversed, &entry);
		at = shadow->next;
		chain_append(pool, arrivals, reversed, shadow);
		reversed = at;
	}
}

/* The slot was written by a peer: nothing in it is taken on trust. */
static void read_entry(const struct rn_pool_shadow *shadow, const struct rn_slot *slot, struct rn_arrival *arrival)
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
static void chain_remove(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t before,
			 const struct rn_pool_shadow *shadow)
{
	struct rn_entry *entry;

	if (before)
		rn_pool_find(pool, before, &entry)->next = shadow->next;
	else
		arrivals->first = shadow->next;
	if (!shadow->next)
		arrivals->last = before;
}

bool rn_pool_next(struct rn_pool *pool, struct rn_arrivals *arrivals, struct rn_arrival *arrival)
{
	struct rn_entry *entry;
	struct rn_pool_shadow *shadow;
	bool found = false;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	for (uint32_t at = arrivals->first, before = 0; at && !found; before = at, at = shadow->next) {
		enum rn_entry_kind kind;

		shadow = rn_pool_find(pool, at, &entry);
		kind = rn_kind_of(entry);
		if (kind != RN_ENTRY_DONE && !shadow->flushed)
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
			rn_pool_release(pool, shadow, entry);
		found = true;
		break;
	}
	rn_unlock(&pool->lock);
	return found;
}

bool rn_pool_has_next(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	struct rn_entry *entry;
	const struct rn_pool_shadow *shadow;
	bool has = false;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	for (uint32_t at = arrivals->first; at && !has; at = shadow->next) {
		shadow = rn_pool_find(pool, at, &entry);
		has = shadow->flushed || rn_kind_of(entry) == RN_ENTRY_DONE;
	}
	rn_unlock(&pool->lock);
	return has;
}

void rn_pool_sweep(struct rn_pool *pool, struct rn_arrivals *arrivals, uint32_t name)
{
	struct rn_entry *entry;
	struct rn_pool_shadow *shadow;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	for (uint32_t at = arrivals->first, before = 0; at; at = shadow->next) {
		uint64_t word;

		shadow = rn_pool_find(pool, at, &entry);
		word = atomic_load(&entry->word);
		if ((word & RN_ENTRY_KIND) != RN_ENTRY_CLAIMED || rn_entry_name(word) != name || shadow->flushed) {
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
		struct rn_pool_shadow *shadow = rn_pool_find(pool, arrivals->first, &entry);

		arrivals->first = shadow->next;
		shadow->arrived = false;
		if (rn_kind_of(entry) != RN_ENTRY_CLAIMED)
			rn_pool_release(pool, shadow, entry);
	}
	arrivals->last = 0;
	rn_unlock(&pool->lock);
}

/* With the lock held. */
void rn_pool_recover_entry(struct rn_pool *pool, struct rn_ring *ring, uint32_t position, uint32_t name)
{
	struct rn_pool_shadow *shadow = rn_ring_shadow(ring, position);
	struct rn_entry *entry = rn_ring_entry(ring, position);
	uint64_t word = atomic_load(&entry->word);

	if (rn_entry_name(word) != name)
		return;
	if ((word & RN_ENTRY_KIND) == RN_ENTRY_DONE && shadow->used && !shadow->arrived)
		rn_pool_release(pool, shadow, entry); /* for a queue pair that is gone */
	if ((word & RN_ENTRY_KIND) != RN_ENTRY_CLAIMED)
		return;
	if (shadow->used && !shadow->flushed && !pool->closed) {
		atomic_compare_exchange_strong(&entry->word, &word, rn_ring_posted(ring, word >> 32));
		return;
	}
	if (!atomic_compare_exchange_strong(&entry->word, &word, 0))
		return;
	if (shadow->used && !shadow->arrived)
		rn_pool_release(pool, shadow, entry);
}

/* --- the end of a UD queue pair's receives -------------------------------------------------------------- */

/* Of entries that are posted: what others say of themselves means nothing. */
static bool is_process(uint64_t word)
{
	return (word & RN_ENTRY_KIND) == RN_ENTRY_CLAIMED && !(rn_entry_name(word) & RN_NAME_QP);
}

/* With the lock held: claimers don't take it. */
static bool wait_moved(struct rn_pool *pool, uint64_t deadline_ns)
{
	for (struct rn_ring *ring = pool->rings; ring; ring = ring->older) {
		for (uint32_t i = 0; i < ring->size; i++) {
			struct rn_entry *entry = rn_ring_entry(ring, i);
			uint64_t seen = ring->shadows[i].used ? atomic_load(&entry->word) : 0;

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

void rn_pool_flush(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	struct rn_ring *ring = pool->rings;
	uint32_t tail;

	rn_lock(&pool->lock);
	collect(pool, arrivals);
	tail = atomic_load(&pool->own->tail);
	for (uint32_t i = 0; i < ring->size; i++) {
		struct rn_pool_shadow *shadow = rn_ring_shadow(ring, tail + i);
		struct rn_entry *entry = rn_ring_entry(ring, tail + i);
		uint64_t word = atomic_load(&entry->word);

		if (!shadow->used || shadow->flushed || (word & RN_ENTRY_KIND) == RN_ENTRY_DONE)
			continue;
		if ((word & RN_ENTRY_KIND) == RN_ENTRY_POSTED && !atomic_compare_exchange_strong(&entry->word, &word, 0) &&
		    (word & RN_ENTRY_KIND) == RN_ENTRY_DONE)
			continue;
		shadow->flushed = true;
		if (!shadow->arrived) /* or its claimer was about to say DONE */
			chain_append(pool, arrivals, rn_ring_reference(ring, tail + i), shadow);
	}
	rn_unlock(&pool->lock);
}

void rn_pool_clear(struct rn_pool *pool, struct rn_arrivals *arrivals)
{
	rn_pool_discard(pool, arrivals);
	rn_lock(&pool->lock);
	for (uint32_t i = 0; i < pool->rings->size; i++) {
		struct rn_entry *entry = rn_ring_entry(pool->rings, i);
		struct rn_pool_shadow *shadow = rn_ring_shadow(pool->rings, i);

		rn_pool_withdraw(pool, pool->rings, i);
		if (shadow->used && rn_kind_of(entry) != RN_ENTRY_CLAIMED)
			rn_pool_release(pool, shadow, entry);
	}
	rn_unlock(&pool->lock);
}
