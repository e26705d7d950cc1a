/* SPDX-License-Identifier: Apache-2.0 */
/* Copying past the caches, and line by line: every byte comes, and none beside them, however the two lie. */
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

typedef void copy(char *to, const char *from, size_t length);

static void expect_copy_by(copy *copy, size_t skip_to, size_t skip_from, size_t length)
{
	memset(to, UNTOUCHED, sizeof(to));
	copy((char *)to + skip_to, (const char *)from + skip_from, length);
	CHECK(!memcmp(to + skip_to, from + skip_from, length));
	for (size_t i = 0; i < skip_to; i++)
		CHECK_EQ(to[i], UNTOUCHED);
	for (size_t i = skip_to + length; i < sizeof(to); i++)
		CHECK_EQ(to[i], UNTOUCHED);
}

static void expect_copy(size_t skip_to, size_t skip_from, size_t length)
{
	expect_copy_by(rn_stream_copy, skip_to, skip_from, length);
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

#if defined(__SSE2__)
static void by_pages(char *to, const char *from, size_t length)
{
	rn_stream_pages(to, from, length / RN_STREAM_PAGE);
}

/* How many they are depends on the maker of the processor: each number is tried here. */
static void pages_side_by_side(void)
{
	size_t line = -(uintptr_t)to % RN_LINE;

	for (size_t pages = 1; pages <= RN_STREAM_PAGES; pages++)
		for (size_t skip_from = 0; skip_from <= EDGE; skip_from += 9)
			expect_copy_by(by_pages, line, skip_from, pages * RN_STREAM_PAGE);
}
#endif

static void line_by_line(void)
{
	for (size_t skip_to = 0; skip_to <= EDGE; skip_to += 3)
		for (size_t length = RN_LINE; length < 5 * RN_LINE; length++)
			expect_copy_by(rn_copy_lines, skip_to, length % EDGE, length);
	for (size_t skip_to = 0; skip_to <= EDGE; skip_to += 7)
		for (size_t skip_from = 0; skip_from <= EDGE; skip_from += 9)
			expect_copy_by(rn_copy_bytes, skip_to, skip_from, 40 * 1024 + skip_to);
}

/* Where the two overlap. */
static void like_memmove(void)
{
	enum { LENGTH = 8192 };

	for (int apart = -LENGTH - 1; apart <= LENGTH + 1; apart += 31) {
		char *at = (char *)to + LENGTH + EDGE;

		memcpy(at, from, LENGTH);
		rn_copy_bytes(at + apart, at, LENGTH);
		CHECK(!memcmp(at + apart, from, LENGTH));
	}
}

int main(void)
{
	fill();
	RUN(every_alignment);
	RUN(every_length);
#if defined(__SSE2__)
	RUN(pages_side_by_side);
#endif
	RUN(line_by_line);
	RUN(like_memmove);
	return 0;
}
