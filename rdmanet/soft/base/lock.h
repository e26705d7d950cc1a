/* SPDX-License-Identifier: Apache-2.0 */
/* A lock for a few instructions, within this process. */
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct rn_lock {
	_Atomic uint32_t held;
	_Atomic uint32_t waiting; /* how many want it */
};

static inline void rn_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static inline void rn_lock(struct rn_lock *lock)
{
	unsigned spins = 0;

	if (__builtin_expect(!atomic_exchange_explicit(&lock->held, 1, memory_order_acquire), 1))
		return;
	atomic_fetch_add_explicit(&lock->waiting, 1, memory_order_relaxed);
	while (atomic_exchange_explicit(&lock->held, 1, memory_order_acquire)) {
		/* The holder may need this very CPU. */
		while (atomic_load_explicit(&lock->held, memory_order_relaxed)) {
			if (++spins % 64)
				rn_pause();
			else
				sched_yield();
		}
	}
	atomic_fetch_sub_explicit(&lock->waiting, 1, memory_order_relaxed);
}

/* Does anybody wait for it? For a holder that gives it back, and would take it again at once. */
static inline bool rn_lock_is_wanted(const struct rn_lock *lock)
{
	return atomic_load_explicit(&lock->waiting, memory_order_relaxed) != 0;
}

static inline bool rn_try_lock(struct rn_lock *lock)
{
	return !atomic_load_explicit(&lock->held, memory_order_relaxed) &&
	       !atomic_exchange_explicit(&lock->held, 1, memory_order_acquire);
}

static inline void rn_unlock(struct rn_lock *lock)
{
	atomic_store_explicit(&lock->held, 0, memory_order_release);
}
