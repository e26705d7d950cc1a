/* SPDX-License-Identifier: Apache-2.0 */
/* A lock for a few instructions, within this process. */
#ifndef RDMANET_SOFT_LOCK_H
#define RDMANET_SOFT_LOCK_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

struct rn_lock {
	_Atomic uint32_t held;
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

	while (__builtin_expect(atomic_exchange_explicit(&lock->held, 1, memory_order_acquire), 0)) {
		/* The holder may need this very CPU. */
		while (atomic_load_explicit(&lock->held, memory_order_relaxed)) {
			if (++spins % 64)
				rn_pause();
			else
				sched_yield();
		}
	}
}

static inline void rn_unlock(struct rn_lock *lock)
{
	atomic_store_explicit(&lock->held, 0, memory_order_release);
}

#endif
