/* SPDX-License-Identifier: Apache-2.0 */
/* Copying past the caches: every byte comes, and none beside them, however the two lie. */
#include "harness.h"

#include "responder/stream.h"

enum { ROOM = 96 * 1024, EDGE = 64, UNTOUCHED = 0xee };

static unsigned char from[ROOM + 2 * EDGE], to[ROOM + 2 * EDGE];

static void fill(void)
{
	uint32_t word = 1;

	for (size_t i = 0; i < sizeof(from); i++) {
		word = word * 1664525 + 1013904223;
		from[i] = word >> 24;
	}
}

static void expect_copy(size_t skip_to, size_t skip_from, size_t length)
{
	memset(to, UNTOUCHED, sizeof(to));
	rn_stream_copy((char *)to + skip_to, (const char *)from + skip_from, length);
	CHECK(!memcmp(to + skip_to, from + skip_from, length));
	for (size_t i = 0; i < skip_to; i++)
		CHECK_EQ(to[i], UNTOUCHED);
	for (size_t i = skip_to + length; i < sizeof(to); i++)
		CHECK_EQ(to[i], UNTOUCHED);
}

static void every_alignment(void)
{
	for (size_t skip_to = 0; skip_to <= EDGE; skip_to += 7)
		for (size_t skip_from = 0; skip_from <= EDGE; skip_from += 9)
			expect_copy(skip_to, skip_from, 40 * 1024 + skip_to);
}

static void every_length(void)
{
	for (size_t length = 0; length < 200; length++)
		expect_copy(length % EDGE, 1, length);
	for (size_t blocks = 1; blocks * 16384 < ROOM - 64; blocks++)
		for (size_t more = 0; more < 130; more += 13)
			expect_copy(5, 3, blocks * 16384 - 65 + more);
}

int main(void)
{
	fill();
	RUN(every_alignment);
	RUN(every_length);
	return 0;
}
