/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repairing pools after a process has scribbled over them: shm/own.h says who calls this, and when.
 *
 * A receive that the program has posted and not polled must be available to claimers, claimed by one, or on its way to
 * a CQ.  Its word says which, and any peer can write it.  A word that no claimer can have written (an unknown state or
 * name) is repaired from the private shadow: the receive is posted again, or, if it has arrived, done.  The scatter
 * list of a posted receive is repaired likewise.  And if the head says that nothing is left although something is, all
 * claimers are told to search everywhere.
 */
#include "objects/qp_inside.h"
#include "shm/pool_ring.h"

#include <signal.h>

enum { ENTRIES_PER_LOOK = 1024 };

/* May a process have claimed it by this name? */
static bool is_somebody(const struct rn_pool *pool, uint32_t name)
{
	if (!pool->by_processes)
		return rn_qp_has_name(name);
	return name && !(name & RN_NAME_QP) && (!kill((pid_t)name, 0) || errno == EPERM);
}

/* For a posted receive: its claimer must find the scatter list that was posted. */
static unsigned look_at_list(const struct rn_pool *pool, const struct rn_ring *ring, uint32_t position)
{
	const struct rn_pool_shadow *shadow = rn_ring_shadow(ring, position);
	struct rn_slot *slot = &rn_ring_entry(ring, position)->slot;
	struct rn_slot_sge list[RN_MAX_SGE];
	unsigned wrong = READ_ONCE(slot->num_sge) != shadow->num_sge;

	rn_posted_list(shadow->num_sge, shadow->addr, shadow->length, shadow->lkey, rn_ring_list(pool, ring, position),
		       list);
	__atomic_store_n(&slot->num_sge, shadow->num_sge, __ATOMIC_RELAXED);
	for (uint32_t i = 0; i < shadow->num_sge; i++) {
		if (READ_ONCE(slot->sge[i].addr) == list[i].addr && READ_ONCE(slot->sge[i].length) == list[i].length &&
		    READ_ONCE(slot->sge[i].lkey) == list[i].lkey)
			continue;
		__atomic_store_n(&slot->sge[i].addr, list[i].addr, __ATOMIC_RELAXED);
		__atomic_store_n(&slot->sge[i].length, list[i].length, __ATOMIC_RELAXED);
		__atomic_store_n(&slot->sge[i].lkey, list[i].lkey, __ATOMIC_RELAXED);
		wrong++;
	}
	return wrong;
}

static unsigned look_at(struct rn_pool *pool, struct rn_ring *ring, uint32_t position)
{
	struct rn_pool_shadow *shadow = rn_ring_shadow(ring, position);
	struct rn_entry *entry = rn_ring_entry(ring, position);
	uint64_t word = atomic_load(&entry->word), right = rn_ring_posted(ring, position);

	if (!shadow->used || (rn_is_taken(entry) && is_somebody(pool, rn_entry_name(word))))
		return 0;
	if (pool->closed || shadow->flushed) {
		if (!rn_is_taken(entry) || !atomic_compare_exchange_strong(&entry->word, &word, 0))
			return 0;
		if (!shadow->arrived)
			rn_pool_release(pool, shadow, entry);
		return 1;
	}
	if (shadow->arrived)
		right = word - (word & RN_ENTRY_KIND) + RN_ENTRY_DONE;
	else if ((word & RN_ENTRY_KIND) == RN_ENTRY_POSTED && rn_entry_name(word) == ring->nonce)
		return look_at_list(pool, ring, position);
	if (word == right || !atomic_compare_exchange_strong(&entry->word, &word, right))
		return 0;
	atomic_fetch_add(&pool->block->strays, 1);
	return 1 + (shadow->arrived ? 0 : look_at_list(pool, ring, position));
}

static unsigned look_after(struct rn_pool *pool, bool all)
{
	uint32_t left = atomic_load(&pool->own->tail) - atomic_load(&pool->block->head);
	unsigned wrong = rn_own_tell_pool(pool->index);

	for (uint32_t i = 0; i < pool->rings->size && (i < ENTRIES_PER_LOOK || all || wrong); i++)
		wrong += look_at(pool, pool->rings, pool->looked_at++);
	for (struct rn_ring *ring = pool->rings->older; ring; ring = ring->older)
		for (uint32_t i = 0; i < ring->size; i++)
			wrong += look_at(pool, ring, i);
	if (pool->used && (!left || left > pool->rings->size))
		atomic_fetch_add(&pool->block->strays, 1);
	return wrong;
}

unsigned rn_pool_look_after_all(bool all)
{
	unsigned wrong = rn_pool_visit_all(look_after, all);

	rn_pool_reap();
	return wrong;
}
