/* SPDX-License-Identifier: Apache-2.0 */
/* A page that only this program has: witness.h. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/page.h"
#include "base/witness.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Between the heap of a program and its libraries, where addresses have 47 bits. With fewer there is no such place. */
#define FIRST 0x100000000000ull
enum { TRIES = 8, PLACE_BITS = 46 };

static uint64_t page;

static void map(void)
{
	for (int i = 0; i < TRIES && !page; i++) {
		uint64_t place;
		void *at;

		if (getrandom(&place, sizeof(place), GRND_NONBLOCK) != sizeof(place))
			return;
		place = FIRST + rn_page_down(place & ((1ull << PLACE_BITS) - 1));
		at = mmap((void *)(uintptr_t)place, rn_page(), PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		if (at == MAP_FAILED)
			continue;
		if ((uintptr_t)at == place)
			page = place;
		else /* a kernel that does not know the flag has taken the place for a wish */
			munmap(at, rn_page());
	}
}

uint64_t rn_witness(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, map);
	return page;
}
