/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kernel with pages of 64 KiB, as some of aarch64 have: what is asked of the kernel is about whole pages.  One with
 * smaller pages takes that as well, so this one is told of the large ones by sysconf(), and madvise() checks what it
 * gets.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "base/fence.h"
#include "base/page.h"
#include "base/witness.h"
#include "host_check.h"
#include "objects/mr.h"
#include "shm/arena.h"

enum { LARGE_PAGE = 64 << 10, ALIGNED_AS_4_KIB = 3 * 4096 };

extern long __sysconf(int name);

/* ThreadSanitizer calls these two before it is ready for what it instruments. */
#define EARLY __attribute__((no_sanitize("thread")))

EARLY long sysconf(int name)
{
	return name == _SC_PAGESIZE ? LARGE_PAGE : __sysconf(name);
}

static unsigned advised;

EARLY int madvise(void *address, size_t length, int advice)
{
	advised++;
	if ((uintptr_t)address % LARGE_PAGE) {
		errno = EINVAL;
		return -1;
	}
	return (int)syscall(SYS_madvise, address, length, advice);
}

static char *whole_pages(size_t length)
{
	char *at = mmap(NULL, length + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(at != MAP_FAILED);
	return at + -(uintptr_t)at % LARGE_PAGE;
}

/* The heap's ranges begin anywhere: of those that are freed whole pages are given back, and read as zeros. */
static void ranges_are_given_back(void)
{
	enum { RANGE = 4 * LARGE_PAGE + ALIGNED_AS_4_KIB, MIDDLE = RANGE / 2 };
	char *place = whole_pages(RN_ARENA_SIZE), *arena = rn_arena;
	uint64_t before, offset;

	/* Where such a kernel would have mapped it. */
	CHECK(mremap(arena, RN_ARENA_SIZE, RN_ARENA_SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
	rn_arena = place;
	before = rn_arena_alloc(ALIGNED_AS_4_KIB);
	offset = rn_arena_alloc(RANGE);
	CHECK(before && offset);
	rn_arena[offset + MIDDLE] = 1;
	advised = 0;
	rn_arena_free(offset, RANGE);
	CHECK(advised == 1 && !rn_arena[offset + MIDDLE]);
	rn_arena_free(before, ALIGNED_AS_4_KIB);
}

static void memory_is_tried_by_the_page(void)
{
	char *at = whole_pages(2 * LARGE_PAGE);

	advised = 0;
	CHECK(rn_mr_probe((uintptr_t)at + ALIGNED_AS_4_KIB, 8, true));
	CHECK(rn_mr_probe((uintptr_t)at + LARGE_PAGE - 4, 8, false));
	CHECK(advised == 2); /* and is not taken for a kernel that cannot do it */
	munmap(at, 2 * LARGE_PAGE);
}

#ifndef RN_TSAN /* under which the page stays where the kernel has put it: base/witness.c */
static void the_witness_is_a_page(void)
{
	CHECK(rn_witness().at && !(rn_witness().at % LARGE_PAGE));
}
#endif

static void the_device_says_so(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_device_attr attr;

	CHECK(context && !ibv_query_device(context, &attr) && attr.page_size_cap == LARGE_PAGE);
	CHECK(!ibv_close_device(context));
	ibv_free_device_list(list);
}

int main(void)
{
	CHECK(!rn_arena_open());
	ranges_are_given_back();
	memory_is_tried_by_the_page();
#ifndef RN_TSAN
	the_witness_is_a_page();
#endif
	rn_arena_close();
	the_device_says_so();
	printf("pages: ok\n");
	return 0;
}
