/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The facts that are ours, and the look that is taken at the arena's copy of them.  own.h has the theory.
 *
 * A look holds rn_world, so queue pairs, CQs and pools stay, and for each of them the lock under which it changes.  Of
 * what there may be thousands of (queue pairs, receives) it sees some at a time, or a large server would be busy with
 * it.  But where one word is wrong others will be, so from there on all are looked at.
 */
#include "own.h"

#include "cq.h"
#include "log.h"
#include "pool_ring.h"
#include "srq.h"

enum { LOOK_MS = 1000, DOUBLINGS = 5, QPS_PER_LOOK = 1024 };

struct rn_qp_block *_Atomic rn_theirs[RN_QPS_MAX];
struct rn_qp_block rn_own_qps[RN_QPS_MAX];
struct rn_pool_block rn_own_pools[RN_POOLS_MAX];
struct rn_own_cq rn_own_cqs[RN_CQS_MAX];
_Atomic uint32_t rn_own_ports[RN_PORTS_MAX];

/* Guards the arena's copy of the key table, and the next. Innermost. */
static struct rn_lock keys_lock;
/* The entries that were told of, but for those that were seen to be no longer valid: few of many. */
static uint64_t keys[RN_MRS_MAX / 64];

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

/* --- looking ------------------------------------------------------------------------------------------------- */

/* If it isn't valid, in which case it is told of before it is again. */
static void forget_key(uint32_t index)
{
	rn_lock(&keys_lock);
	if (!atomic_load(&rn_mr_table[index].key))
		keys[index / 64] &= ~(1ull << index % 64);
	rn_unlock(&keys_lock);
}

/* Windows are left alone: their peers may take them away in the arena. */
static unsigned tell_regions(void)
{
	unsigned differed = 0;

	for (uint32_t at = 0; at < RN_MRS_MAX / 64; at++) {
		for (uint64_t left = READ_ONCE(keys[at]); left; left &= left - 1) {
			uint32_t index = at * 64 + __builtin_ctzll(left);

			if (!atomic_load_explicit(&rn_mr_table[index].key, memory_order_acquire))
				forget_key(index);
			else if (READ_ONCE(rn_mr_table[index].access) & RN_ACCESS_LOCAL)
				differed += rn_own_tell_mr(index);
		}
	}
	return differed;
}

static unsigned tell_qps(bool all)
{
	static uint32_t next;
	uint32_t end = rn_qps_end;
	unsigned differed = 0;

	for (uint32_t looked = 0; looked < end && (looked < QPS_PER_LOOK || all || differed); looked++) {
		struct rn_qp *qp;

		next = next < end ? next : 0;
		qp = rn_qps[next++];
		if (!qp)
			continue;
		rn_lock(&qp->sq_lock);
		differed += rn_own_tell_qp(qp->index);
		rn_unlock(&qp->sq_lock);
	}
	return differed;
}

void rn_own_look(bool all)
{
	unsigned differed = 0;

	pthread_mutex_lock(&rn_world);
	if (rn_arena && rn_guarded(RN_GUARD_OWN_FACTS)) {
		differed = rn_own_tell_head() + tell_regions();
		differed += tell_qps(all || differed);
		differed += rn_pool_look_after_all(all || differed);
		differed += rn_cq_look_after_all(all || differed);
		rn_srq_attend_all();
	}
	pthread_mutex_unlock(&rn_world);
	if (differed)
		rn_warn(RN_WARN_ARENA, "a process of this user wrote over %u of our own words: set right again", differed);
}

/* --- when ---------------------------------------------------------------------------------------------------- */

_Atomic uint32_t rn_own_quiet;

static void look(struct rn_timer *timer);
static struct rn_timer watch = {.fire = look};
static struct rn_lock watch_lock; /* guards the next, and the setting of the timer */
static bool is_watching;

uint64_t rn_own_pause_ns(uint32_t quiet)
{
	return LOOK_MS * 1000000ull << (quiet < DOUBLINGS ? quiet : DOUBLINGS);
}

/* With the lock held. */
static void look_after(uint32_t quiet)
{
	if (is_watching)
		rn_timer_set(&watch, rn_own_pause_ns(quiet));
}

static void look(struct rn_timer *timer)
{
	(void)timer;
	rn_own_look(atomic_load(&rn_own_quiet) >= DOUBLINGS);
	rn_lock(&watch_lock);
	look_after(atomic_fetch_add(&rn_own_quiet, 1));
	rn_unlock(&watch_lock);
}

/* A pause of a second goes on, so that those who move on don't put it off. */
void rn_own_moved_again(void)
{
	rn_lock(&watch_lock);
	if (atomic_exchange(&rn_own_quiet, 0) > 1)
		look_after(0);
	rn_unlock(&watch_lock);
}

void rn_own_watch(void)
{
	bool was_watching;

	rn_lock(&watch_lock);
	was_watching = is_watching;
	is_watching = true;
	if (!was_watching)
		look_after(0);
	rn_unlock(&watch_lock);
	rn_own_moves();
}

void rn_own_close(void)
{
	rn_lock(&watch_lock);
	is_watching = false;
	rn_unlock(&watch_lock);
	rn_timer_cancel(&watch);
	atomic_store(&rn_own_quiet, 0);
}

void rn_own_forked(void)
{
	watch = (struct rn_timer){.fire = look};
	watch_lock = (struct rn_lock){0};
	is_watching = false;
	atomic_store(&rn_own_quiet, 0);
	keys_lock = (struct rn_lock){0};
	memset(keys, 0, sizeof(keys));
}
