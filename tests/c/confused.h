/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer out of its mind writes where it has no business to. */
#ifndef CONFUSED_H
#define CONFUSED_H

#include "processes.h"

#include "soft.h"

static unsigned seed;

/* Values that tend to hurt. */
static inline uint64_t nasty(void)
{
	switch (rand_r(&seed) % 8) {
	case 0:
		return 0;
	case 1:
		return UINT64_MAX;
	case 2:
		return UINT32_MAX;
	case 3:
		return 1ull << (rand_r(&seed) % 64);
	case 4:
		return RN_ARENA_SIZE - rand_r(&seed) % 256;
	case 5:
		return rand_r(&seed) % 256;
	default:
		return (uint64_t)rand_r(&seed) << 32 | rand_r(&seed);
	}
}

static inline void scribble(char *at, size_t bytes)
{
	uint64_t value = nasty();
	size_t size = 1 << rand_r(&seed) % 4;

	while (size > bytes || (uintptr_t)at % size)
		size /= 2;
	at += rand_r(&seed) % (bytes / size) * size;
	/* Whole, as hostile processes and ThreadSanitizer like it: what is tested is what others make of it. */
	switch (size) {
	case 1:
		__atomic_store_n((uint8_t *)at, (uint8_t)value, __ATOMIC_RELAXED);
		break;
	case 2:
		__atomic_store_n((uint16_t *)at, (uint16_t)value, __ATOMIC_RELAXED);
		break;
	case 4:
		__atomic_store_n((uint32_t *)at, (uint32_t)value, __ATOMIC_RELAXED);
		break;
	default:
		__atomic_store_n((uint64_t *)at, value, __ATOMIC_RELAXED);
	}
}

/* Every key, the valid ones among them; the keys themselves stay, so that they are used. */
static inline void scribble_keys(char *arena)
{
	for (uint32_t i = 0; i < RN_MRS_MAX; i++)
		if (atomic_load(&rn_arena_mrs(arena)[i].key))
			scribble((char *)&rn_arena_mrs(arena)[i] + 4, sizeof(struct rn_mr_entry) - 4);
}

#endif
