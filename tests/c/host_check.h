/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the host side share: a check that stays in release builds, counts of what a
 * process holds, and waiting for a condition with a limit. */
#ifndef RDMANET_TESTS_HOST_CHECK_H
#define RDMANET_TESTS_HOST_CHECK_H

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How long something may take that must happen: nothing but a hanging test comes near it, on any machine. */
enum { LIMIT_MS = 30000 };

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: in %s: not so: %s\n", __FILE__, __LINE__, __func__, \
			        #condition);                                                       \
			abort();                                                                   \
		}                                                                                  \
	} while (0)

/* Tries for up to half a minute; a millisecond apart, as another thread or process has to act. */
#define EVENTUALLY(condition)                                                                      \
	do {                                                                                       \
		for (int tries_ = 0; !(condition); tries_++) {                                     \
			CHECK(tries_ < LIMIT_MS && #condition);                                        \
			usleep(1000);                                                              \
		}                                                                                  \
	} while (0)

#define RUN(test)                                                                                  \
	do {                                                                                       \
		uint64_t began_ = clock_ns();                                                      \
		test();                                                                            \
		printf("ok %-44s %6.1f ms\n", #test, (double)(clock_ns() - began_) / 1e6);         \
		fflush(stdout);                                                                    \
	} while (0)

static inline uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t cpu_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline unsigned entries(const char *directory)
{
	DIR *dir = opendir(directory);
	unsigned count = 0;

	CHECK(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static inline unsigned descriptors(void)
{
	return entries("/proc/self/fd");
}

static inline unsigned threads(void)
{
	return entries("/proc/self/task") - 2;
}

/* Mappings of memfds: what the device and its peers share. */
static inline unsigned shared_mappings(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	unsigned count = 0;

	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		count += strstr(line, "/memfd:") != NULL;
	fclose(maps);
	return count;
}

#endif
