/* SPDX-License-Identifier: Apache-2.0 */
/* The arena's heap: what is freed can be had again, as it is or in one piece. */
#define _GNU_SOURCE
#include "base/process.h"
#include "host_check.h"
#include "shm/arena.h"

enum { SMALL = 100 << 10, LARGE = 1 << 20, RANGES = 40, ALL = (RN_ARENA_SIZE - RN_ARENA_HEAP) / 64 * 64 };

static void small_ones_stay_as_they_are(void)
{
	uint64_t first = rn_arena_alloc(SMALL), second = rn_arena_alloc(SMALL);

	CHECK(first && second && first != second);
	rn_arena[first] = rn_arena[second] = 1;
	rn_arena_free(first, SMALL);
	rn_arena_free(second, SMALL);
	CHECK(rn_arena_alloc(SMALL) == second); /* the newest */
	CHECK(rn_arena_alloc(SMALL) == first);
	CHECK(rn_arena[first] && rn_arena[second]);
	rn_arena_free(first, SMALL);
	rn_arena_free(second, SMALL);
}

static void large_ones_are_given_back(void)
{
	uint64_t offset = rn_arena_alloc(LARGE);

	CHECK(offset);
	rn_arena[offset + LARGE / 2] = 1;
	rn_arena_free(offset, LARGE);
	CHECK(rn_arena_alloc(LARGE) == offset);
	CHECK(!rn_arena[offset + LARGE / 2]);
	rn_arena_free(offset, LARGE);
}

static void all_can_be_had_in_one_piece(void)
{
	uint64_t ranges[RANGES], whole;

	for (int i = 0; i < RANGES; i++)
		CHECK((ranges[i] = rn_arena_alloc(SMALL)));
	for (int i = 0; i < RANGES; i += 2)
		rn_arena_free(ranges[i], SMALL);
	for (int i = 1; i < RANGES; i += 2)
		rn_arena_free(ranges[i], SMALL);
	whole = rn_arena_alloc(ALL);
	CHECK(whole == RN_ARENA_HEAP);
	CHECK(!rn_arena_alloc(SMALL));
	rn_arena_free(whole, ALL);
}

static void nothing_is_left_of_one_that_was_closed(void)
{
	uint64_t offset = rn_arena_alloc(SMALL);

	rn_arena[offset] = 1;
	rn_arena_free(offset, SMALL);
	rn_arena_close();
	CHECK(!rn_arena_open());
	CHECK(rn_arena_alloc(ALL) == RN_ARENA_HEAP);
	CHECK(!rn_arena[offset]);
}

int main(void)
{
	CHECK(!rn_arena_open());
	small_ones_stay_as_they_are();
	large_ones_are_given_back();
	all_can_be_had_in_one_piece();
	nothing_is_left_of_one_that_was_closed();
	rn_arena_close();
	printf("arena: ok\n");
	return 0;
}
