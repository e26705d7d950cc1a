/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The clocks tell who ran.  A yield that nobody takes returns within a microsecond.  A thread that spins for a lock keeps
 * the CPU for a time slice, and its process's CPU time grows by as much.
 */
#include "base/offer.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "base/engine.h"

enum { NOBODY_NS = 1500, SLICE_NS = 100000 /* at least */ };
#define LATER_NS 1000000000u

static _Thread_local uint64_t armed_ns;

void rn_offer_later(void)
{
	armed_ns = rn_tick_ns();
}

static uint64_t cpu_time_of_process(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum rn_taker rn_offer_cpu(void)
{
	uint64_t ours, began, away;

	if (armed_ns && rn_tick_ns() - armed_ns < LATER_NS)
		return RN_TAKER_NOBODY;
	ours = cpu_time_of_process();
	began = rn_now_ns();
	sched_yield();
	away = rn_now_ns() - began;
	if (away <= NOBODY_NS)
		return RN_TAKER_NOBODY;
	if (away >= SLICE_NS && cpu_time_of_process() - ours > away / 2)
		return RN_TAKER_OURSELVES;
	return RN_TAKER_OTHERS;
}
