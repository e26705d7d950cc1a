/* SPDX-License-Identifier: Apache-2.0 */
/* Checking and repairing words in the arena that others may have overwritten: shm/own.h has the theory. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Another process has got the arena: check it from here on. On the engine. */
void rn_own_watch(void);
/* One such look, at some of what there is much of, or at all. On the engine, or where there is none. */
void rn_own_look(bool all);

/* --- own_watch.c: when ------------------------------------------------------------------------------------------- */

/* Look from here on, on the engine. */
void rn_own_watch_by(void (*look)(bool all));
/* The looks since anything moved here. */
extern _Atomic uint32_t rn_own_quiet;
/* The pause before the next look, after so many. */
uint64_t rn_own_pause_ns(uint32_t quiet);
void rn_own_moved_again(void);
/* There is traffic: completions are polled, or a CQ is armed. Without locks. */
static inline void rn_own_moves(void)
{
	if (__builtin_expect(atomic_load_explicit(&rn_own_quiet, memory_order_relaxed) != 0, 0))
		rn_own_moved_again();
}
void rn_own_close(void); /* the engine may stop */
void rn_own_watch_forked(void);
