/*
 * How far apart two CPUs are: the round trip of one cache line between them, in nanoseconds.
 *
 * A virtual machine's host moves its CPUs about. When they land on different core complexes, a cache line
 * takes several times as long from one to the other, and whatever is bound by that (bandwidth and message
 * rates through shared memory) halves. Run before and after a measurement, it says in which state that was.
 *
 * usage: cacheline CPU CPU [MILLISECONDS]
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static alignas(128) atomic_uint ball;
static alignas(128) atomic_uint over;

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec + ts.tv_nsec / 1e9;
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set)) {
		perror("cacheline: sched_setaffinity");
		exit(1);
	}
}

/* Odd is ours to answer: add one. */
static void *answer(void *cpu)
{
	pin(*(int *)cpu);
	while (!atomic_load_explicit(&over, memory_order_relaxed)) {
		unsigned seen = atomic_load_explicit(&ball, memory_order_acquire);

		if (seen & 1)
			atomic_store_explicit(&ball, seen + 1, memory_order_release);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int cpus[2];
	double length = 0.010, begin;
	unsigned trips = 0;
	pthread_t other;

	if (argc < 3) {
		fprintf(stderr, "usage: cacheline CPU CPU [MILLISECONDS]\n");
		return 2;
	}
	cpus[0] = atoi(argv[1]);
	cpus[1] = atoi(argv[2]);
	if (argc > 3)
		length = atof(argv[3]) / 1e3;
	pin(cpus[0]);
	if (pthread_create(&other, NULL, answer, &cpus[1])) {
		perror("cacheline: pthread_create");
		return 1;
	}
	/* The first trip waits for the other thread to start: not counted. */
	atomic_store_explicit(&ball, 1, memory_order_release);
	while (atomic_load_explicit(&ball, memory_order_acquire) & 1)
		;
	begin = now();
	do {
		for (int i = 0; i < 1000; i++, trips++) {
			atomic_fetch_add_explicit(&ball, 1, memory_order_acq_rel);
			while (atomic_load_explicit(&ball, memory_order_acquire) & 1)
				;
		}
	} while (now() - begin < length);
	printf("%.1f\n", (now() - begin) / trips * 1e9);
	atomic_store(&over, 1);
	pthread_join(other, NULL);
	return 0;
}
