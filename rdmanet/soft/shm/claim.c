/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking a receive from a pool, and handing it back completed: the claimer's side of pool.h.
 *
 * All that is read here may be in another process's arena.  The ring's place comes in one word and
 * is checked each time, which costs a few shifts; everything else is compared, never followed.
 */
#include "shm/own.h"
#include "shm/pool.h"

#include <sched.h>

enum { KIND = 3, LOOKS = 1000 };

struct ring {
	uint64_t packed;
	char *entries;
	uint32_t size, stride, nonce;
};

static bool unpack(char *arena, uint64_t packed, struct ring *ring)
{
	uint64_t offset = (packed & 0x7fffff) * 64;

	ring->packed = packed;
	ring->stride = (packed >> 23 & 31) * 64;
	ring->size = 1u << (packed >> 28 & 15);
	ring->nonce = packed >> 32;
	ring->entries = arena + offset;
	return packed && ring->stride && offset >= RN_ARENA_HEAP &&
	       (uint64_t)ring->size * ring->stride <= RN_ARENA_SIZE - offset;
}

static struct rn_entry *entry_at(const struct ring *ring, uint32_t position)
{
	return (struct rn_entry *)(ring->entries + (uint64_t)(position & (ring->size - 1)) * ring->stride);
}

static uint64_t word_of(uint32_t position, uint32_t who, enum rn_entry_kind kind)
{
	return (uint64_t)position << 32 | (uint64_t)(who & 0x3fffffff) << 2 | kind;
}

static bool claim_this(struct rn_entry *entry, uint64_t posted, uint32_t name, struct rn_recv_claim *claim)
{
	claim->posted = posted;
	claim->claimed = word_of(posted >> 32, name, RN_ENTRY_CLAIMED);
	/* Sequentially consistent, as the reading of generation_state and keys is: shm/arena.h. */
	if (!atomic_compare_exchange_strong(&entry->word, &posted, claim->claimed))
		return false;
	claim->entry = entry;
	return true;
}

/*
 * From the hint on, in the order of posting.
 *
 * Whoever is slow finds everything up to the tail that it has read taken by others, while more was posted
 * behind it: there is none only if the tail is still the same.  An owner that posts for ever and takes back what it
 * posts would keep us here, so that has an end.
 */
static bool claim_next(const struct ring *ring, const struct rn_pool_block *facts, struct rn_pool_block *pool,
		       uint32_t name, struct rn_recv_claim *claim)
{
	uint32_t head = atomic_load(&pool->head), tail = atomic_load(&facts->tail), at = head;

	for (int looks = 0; at != tail && looks < LOOKS; looks++) {
		if (tail - at > ring->size)
			at = tail - ring->size; /* what is posted lies in here */
		for (; at != tail; at++) {
			struct rn_entry *entry = entry_at(ring, at);
			uint64_t posted = word_of(at, ring->nonce, RN_ENTRY_POSTED);

			if (atomic_load_explicit(&entry->word, memory_order_relaxed) != posted ||
			    !claim_this(entry, posted, name, claim))
				continue;
			/* A faster claimer has moved it further, or far enough. */
			atomic_compare_exchange_strong(&pool->head, &head, at + 1);
			return true;
		}
		tail = atomic_load(&facts->tail);
	}
	return false;
}

/* Any that is posted, wherever it is. */
static bool claim_any(const struct ring *ring, uint32_t name, struct rn_recv_claim *claim)
{
	for (uint32_t i = 0; i < ring->size; i++) {
		struct rn_entry *entry = entry_at(ring, i);
		uint64_t word = atomic_load_explicit(&entry->word, memory_order_relaxed);

		/* Twice: its owner may just give it a new position. */
		for (int tries = 0; tries < 2 && word == word_of(word >> 32, ring->nonce, RN_ENTRY_POSTED); tries++) {
			if (claim_this(entry, word, name, claim))
				return true;
			word = atomic_load_explicit(&entry->word, memory_order_relaxed);
		}
	}
	return false;
}

/*
 * One that lies out of order.  All who look do so at once; what is put out of order while they look may be where
 * they have been already, so they look again.  Only then is what was counted before marked as looked for.
 */
static bool claim_stray(const struct ring *ring, const struct rn_pool_block *facts, struct rn_pool_block *pool,
			uint32_t name, struct rn_recv_claim *claim)
{
	uint32_t found = atomic_load(&pool->strays_found), strays = atomic_load(&pool->strays), before;

	if (strays == found)
		return false;
	for (int looks = 0; looks < LOOKS; looks++) {
		if (claim_any(ring, name, claim))
			return true;
		before = strays;
		strays = atomic_load(&pool->strays);
		if (strays == before) {
			if (atomic_load(&facts->ring) == ring->packed) /* else they are in another */
				atomic_compare_exchange_strong(&pool->strays_found, &found, strays);
			return false;
		}
	}
	return false;
}

bool rn_recv_claim(char *arena, struct rn_pool_block *pool, uint32_t name, struct rn_recv_claim *claim)
{
	const struct rn_pool_block *facts = rn_pool_facts(arena, pool);
	uint64_t packed, now = atomic_load(&facts->ring);
	struct ring ring, older;
	const struct ring *in;
	uint32_t limit, tail;
	bool claimed;
	int looks = 0;

	do {
		packed = now;
		tail = atomic_load(&facts->tail);
		if (!unpack(arena, packed, &ring))
			return false;
		in = &ring;
		claimed = claim_next(&ring, facts, pool, name, claim) || claim_stray(&ring, facts, pool, name, claim);
		if (!claimed && unpack(arena, atomic_load(&facts->older), &older)) {
			in = &older;
			claimed = claim_any(&older, name, claim);
		}
		now = atomic_load(&facts->ring);
		/* It was resized under us, or is just emptied into another. */
	} while (!claimed && (now != packed || tail != atomic_load(&facts->tail)) && looks++ < LOOKS);
	if (!claimed)
		return false;
	claim->max_sge = (in->stride - sizeof(struct rn_entry)) / sizeof(struct rn_slot_sge);
	if (claim->max_sge > RN_MAX_SGE)
		claim->max_sge = RN_MAX_SGE;
	limit = atomic_load(&facts->limit);
	claim->low = false;
	if (__builtin_expect(limit != 0, 0)) {
		claim->arming = atomic_load(&facts->arming);
		claim->low = atomic_load(&facts->tail) - atomic_load(&pool->head) < limit &&
			     atomic_load(&pool->woken) != claim->arming;
	}
	return true;
}

/* After the wakeup, not before: a claimer that is stopped in between must not keep others from waking the owner. */
void rn_recv_claim_woke(struct rn_pool_block *pool, struct rn_recv_claim *claim)
{
	claim->low = false;
	atomic_store(&pool->woken, claim->arming);
}

void rn_recv_claim_give_back(struct rn_pool_block *pool, struct rn_recv_claim *claim)
{
	uint64_t word = claim->claimed;

	if (atomic_compare_exchange_strong(&claim->entry->word, &word, claim->posted))
		atomic_fetch_add(&pool->strays, 1);
	claim->entry = NULL;
}

void rn_recv_claim_finish(char *arena, struct rn_recv_claim *claim, _Atomic uint32_t *finished)
{
	struct rn_entry *entry = claim->entry;
	uint32_t reference = (uint32_t)(((char *)entry - arena) / 64), below = atomic_load(finished);
	uint64_t word = claim->claimed;

	do
		atomic_store_explicit(&entry->slot.owner_sequence, below, memory_order_relaxed);
	while (!atomic_compare_exchange_weak(finished, &below, reference));
	/* Fails only when the owner has taken us for dead. */
	atomic_compare_exchange_strong(&entry->word, &word, word_of(word >> 32, (uint32_t)word >> 2, RN_ENTRY_DONE));
	claim->entry = NULL;
}
