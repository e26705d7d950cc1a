/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page that only this program has: witness.h.
 *
 * The page is filled at an ordinary place, and then moved, by the system calls' numbers: ThreadSanitizer keeps these
 * addresses for itself, and ends a program that asks its mmap() for one.  In a build for it the page stays where it was
 * filled, which is random enough for tests.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/engine.h"
#include "base/fence.h"
#include "base/page.h"
#include "base/witness.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Between the heap of a program and its libraries, where addresses have 47 bits. With fewer there is no such place. */
#define FIRST 0x100000000000ull
enum { TRIES = 8, PLACE_BITS = 46 };

static struct rn_witness witness;
static _Atomic uint64_t lent;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#ifdef RN_TSAN
static uint64_t move(void *page)
{
	return (uintptr_t)page;
}
#else
/* Keep a random place free for us. 0: there are no such addresses. */
static uint64_t reserve(void)
{
#if UINTPTR_MAX > UINT32_MAX
	for (int i = 0; i < TRIES; i++) {
		uint64_t place;
		long at;

		if (getrandom(&place, sizeof(place), GRND_NONBLOCK) != sizeof(place))
			return 0;
		place = FIRST + rn_page_down(place & ((1ull << PLACE_BITS) - 1));
		at = syscall(SYS_mmap, place, rn_page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		if (at != -1 && (uint64_t)at == place)
			return place;
		if (at != -1) /* a kernel that does not know the flag has taken the place for a wish */
			syscall(SYS_munmap, at, rn_page());
	}
#endif
	return 0;
}

/* Move the page from where it was filled. 0: there is no place for it. */
static uint64_t move(void *page)
{
	uint64_t place = reserve();

	if (place && syscall(SYS_mremap, page, rn_page(), rn_page(), MREMAP_MAYMOVE | MREMAP_FIXED, place) == -1) {
		syscall(SYS_munmap, place, rn_page());
		place = 0;
	}
	return place;
}
#endif

static struct rn_witness make(void)
{
	struct rn_witness made = {0};
	uint64_t *page;

	if (getrandom(&made.value, sizeof(made.value), GRND_NONBLOCK) != sizeof(made.value))
		return made;
	page = mmap(NULL, rn_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED)
		return made;
	page[RN_WITNESS_VALUE / sizeof(*page)] = made.value;
	made.at = move(page);
	if (!made.at) {
		munmap(page, rn_page());
	} else if (madvise((void *)(uintptr_t)made.at, rn_page(), MADV_DONTFORK)) {
		syscall(SYS_munmap, made.at, rn_page());
		made.at = 0;
	}
	return made;
}

/* The pages are the parent's alone. */
static void forget_in_child(void)
{
	witness = (struct rn_witness){0};
	atomic_store(&lent, 0);
	once = (pthread_once_t)PTHREAD_ONCE_INIT;
}

static void begin(void)
{
	static bool is_heard;

	if (!is_heard)
		rn_at_fork_child(forget_in_child);
	is_heard = true;
	witness = make();
}

struct rn_witness rn_witness(void)
{
	pthread_once(&once, begin);
	return witness;
}

uint64_t rn_witness_lent(void)
{
	uint64_t at = atomic_load(&lent), made;

	if (at || !rn_witness().at)
		return at;
	made = make().at;
	if (atomic_compare_exchange_strong(&lent, &at, made))
		return made;
	if (made)
		syscall(SYS_munmap, made, rn_page());
	return at;
}

void rn_witness_recall(uint64_t at)
{
	uint64_t expected = at;

	if (at && atomic_compare_exchange_strong(&lent, &expected, 0))
		syscall(SYS_munmap, at, rn_page());
}
