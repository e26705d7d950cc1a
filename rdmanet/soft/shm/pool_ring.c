/* SPDX-License-Identifier: Apache-2.0 */
/* Rings of a pool: their memory in the arena, and the private notes beside it.  pool_ring.h has both. */
#include "shm/pool_ring.h"

#include <stdlib.h>
#include <sys/random.h>

#include "base/engine.h"

struct rn_ring *rn_ring_make(uint32_t max_wr, uint32_t max_sge)
{
	struct rn_ring *ring = calloc(1, sizeof(*ring));
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
		atomic_store(&rn_ring_entry(ring, i)->word, 0);
	return ring;
}

uint64_t rn_ring_packed(const struct rn_ring *ring)
{
	return (uint64_t)ring->nonce << 32 | (uint64_t)__builtin_ctz(ring->size) << 28 | ring->stride / 64 << 23 |
	       ring->offset / 64;
}

void rn_ring_free(struct rn_ring *ring)
{
	rn_arena_free(ring->offset, (uint64_t)ring->size * ring->stride);
	free(ring->lists);
	free(ring->shadows);
	free(ring);
}

bool rn_ring_is_in_use(const struct rn_ring *ring)
{
	for (uint32_t i = 0; i < ring->size; i++)
		if (ring->shadows[i].used)
			return true;
	return false;
}
