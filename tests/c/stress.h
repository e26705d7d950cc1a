/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stress programs share: a seed that determines what is sent, so that both sides can compute it; how long
 * to go on; and what to repeat when a check fails.
 *
 *   RDMANET_STRESS_SECONDS   how long (3)
 *   RDMANET_STRESS_SEED      of the first round (the time); a failure prints the one to repeat
 *
 * The same by the command line: test_stress SECONDS SEED.
 */
#ifndef STRESS_H
#define STRESS_H

#include "processes.h"

#include <sys/prctl.h>

static unsigned stress_seed;
static const char *stress_what = ""; /* goes on */

static inline void stress_aborted(int signal)
{
	fprintf(stderr, "process %d: RDMANET_STRESS_SEED=%u (%s)\n", getpid(), stress_seed, stress_what);
	(void)signal;
}

static inline void stress_hangs(int signal)
{
	(void)signal;
	abort();
}

/* When to end, by now_ns(). */
static inline uint64_t stress_begin(int argc, char **argv)
{
	const char *seed = argc > 2 ? argv[2] : getenv("RDMANET_STRESS_SEED");
	const char *seconds = argc > 1 ? argv[1] : getenv("RDMANET_STRESS_SECONDS");

	signal(SIGABRT, stress_aborted);
	signal(SIGALRM, stress_hangs);
	stress_seed = seed ? strtoul(seed, NULL, 10) : now_ns() / 1000;
	printf("  first seed %u\n", stress_seed);
	return now_ns() + (seconds ? strtoull(seconds, NULL, 10) : 3) * 1000000000;
}

static inline void fill(uint8_t *to, uint32_t length, uint32_t start)
{
	for (uint32_t i = 0; i < length; i++)
		to[i] = start + i * 31 + (i >> 8);
}

static inline void expect_filled(const uint8_t *at, uint32_t length, uint32_t start)
{
	for (uint32_t i = 0; i < length; i++)
		CHECK_EQ(at[i], (uint8_t)(start + i * 31 + (i >> 8)));
}

static inline uint64_t mix(uint64_t a, uint64_t b)
{
	uint64_t h = a * 0x9e3779b97f4a7c15ull + b * 0xbf58476d1ce4e5b9ull;

	h ^= h >> 31;
	h *= 0x94d049bb133111ebull;
	return h ^ h >> 29;
}

#endif
