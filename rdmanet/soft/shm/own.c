/* SPDX-License-Identifier: Apache-2.0 */
/* The facts that are ours, and how the arena's copy of them is made: own.h has the theory. */
#include "base/lock.h"
#include "base/process.h"
#include "shm/own.h"

struct rn_qp_block *_Atomic rn_theirs[RN_QPS_MAX];
struct rn_qp_block rn_own_qps[RN_QPS_MAX];
struct rn_pool_block rn_own_pools[RN_POOLS_MAX];
struct rn_own_cq rn_own_cqs[RN_CQS_MAX];
_Atomic uint32_t rn_own_ports[RN_PORTS_MAX];
alignas(128) struct rn_mr_entry rn_mr_table[RN_MRS_MAX];

/* Guards the arena's copy of the key table, and the next. Innermost. */
static struct rn_lock keys_lock;
/* The entries that were published and not yet seen to be invalid: few of many. */
static _Atomic uint64_t keys[RN_MRS_MAX / 64];

/* --- telling ----------------------------------------------------------------------------------------------- */

typedef uint64_t __attribute__((may_alias)) word;

static unsigned tell(void *shared, const void *own, size_t bytes)
{
	word *to = shared;
	const word *from = own;
	unsigned differed = 0;

	for (size_t i = bytes / sizeof(word); i--;) {
		uint64_t value = __atomic_load_n(&from[i], __ATOMIC_ACQUIRE);

		if (__atomic_load_n(&to[i], __ATOMIC_RELAXED) == value)
			continue;
		__atomic_store_n(&to[i], value, __ATOMIC_RELEASE);
		differed++;
	}
	return differed;
}

unsigned rn_own_tell_qp(uint32_t index)
{
	return tell(rn_arena_qp(rn_arena, index), rn_own_qp(index), offsetof(struct rn_qp_block, busy));
}

unsigned rn_own_tell_pool(uint32_t index)
{
	return tell(rn_arena_pool(rn_arena, index), rn_own_pool(index), offsetof(struct rn_pool_block, head));
}

unsigned rn_own_tell_mr(uint32_t index)
{
	unsigned differed;

	rn_lock(&keys_lock);
	keys[index / 64] |= 1ull << index % 64;
	differed = tell(&rn_arena_mrs(rn_arena)[index], &rn_mr_table[index],
			offsetof(struct rn_mr_entry, last));
	rn_unlock(&keys_lock);
	return differed;
}

unsigned rn_own_tell_head(void)
{
	struct rn_arena_head own = {.magic = RN_ARENA_MAGIC, .size = RN_ARENA_SIZE};

	for (uint32_t group = 0; group < RN_PORTS_MAX; group++)
		own.ports[group] = rn_own_port(group);
	return tell(rn_arena_head(rn_arena), &own, sizeof(own));
}

uint32_t rn_own_locate(uint32_t qpn)
{
	for (uint32_t group = 0; group < RN_PORTS_MAX; group++)
		if (rn_own_port(group) == qpn >> 8)
			return group * 256 + (qpn & 0xff);
	return RN_QPS_MAX;
}

/* Forget the entry if it is not valid; it is published again before it becomes valid. */
static void forget_key(uint32_t index)
{
	rn_lock(&keys_lock);
	if (!atomic_load(&rn_mr_table[index].key))
		keys[index / 64] &= ~(1ull << index % 64);
	rn_unlock(&keys_lock);
}

/* Windows are left alone: their peers may take them away in the arena. */
unsigned rn_own_tell_regions(void)
{
	unsigned differed = 0;

	for (uint32_t at = 0; at < RN_MRS_MAX / 64; at++) {
		for (uint64_t left = atomic_load_explicit(&keys[at], memory_order_relaxed); left; left &= left - 1) {
			uint32_t index = at * 64 + __builtin_ctzll(left);

			if (!atomic_load_explicit(&rn_mr_table[index].key, memory_order_acquire))
				forget_key(index);
			else if (READ_ONCE(rn_mr_table[index].access) & RN_ACCESS_LOCAL)
				differed += rn_own_tell_mr(index);
		}
	}
	return differed;
}

void rn_own_forked(void)
{
	keys_lock = (struct rn_lock){0};
	memset((void *)keys, 0, sizeof(keys));
}
