/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The full fence, in words that ThreadSanitizer understands.
 *
 * Where two sides each write one word and then read the other's (shm/arena.h: `busy` against `generation_state` and
 * keys; an arming against a completion) a full fence stands between the two.  ThreadSanitizer has no model of fences:
 * it would ignore them, and gcc refuses to compile one for it.  It does know that a read-modify-write of a word orders
 * everything before it with everything after the next one of the same word.  So in builds for it a full fence is an
 * addition to one global word.  That orders at least what the fence does; it can hide a race only between threads that
 * both pass a fence in between, and those pairs are what the fence is for.
 *
 * The other thing it cannot see is order that comes about through another process: a receive that this
 * process's engine has filled for a peer becomes a completion when the peer writes it, in shared memory.
 * Both ends use the same word then: see rn_order_by_peer().
 *
 * A release fence has no such stand-in: say what the store itself is (memory_order_release) instead.
 */
#pragma once

#include <stdatomic.h>

#if defined(__SANITIZE_THREAD__)
#define RN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RN_TSAN 1
#endif
#endif

#ifdef RN_TSAN
extern _Atomic unsigned rn_fence_word;
#endif

static inline void rn_fence(void)
{
#ifdef RN_TSAN
	atomic_fetch_add(&rn_fence_word, 1);
#else
	atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* What one thread did here before, another of this process may see after, since a peer came between. */
static inline void rn_order_by_peer(void)
{
#ifdef RN_TSAN
	rn_fence();
#endif
}
