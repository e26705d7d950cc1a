/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying more than the caches hold.
 *
 * An ordinary store to memory that is not in a cache reads the line first, and puts something else out of the cache.
 * These stores do neither.  The copy goes through several pages side by side: a processor fetches ahead in each of them,
 * but not beyond its end.  AMD's do go beyond, and take a quarter longer for pages side by side (Zen 4: 64 MiB 4.1 ms
 * instead of 5.2 ms of CPU time), so there it goes through one after the other.
 *
 * What was copied is in memory then, and not in a cache.  So it pays only for so much that its beginning would have
 * left the caches anyway when its end comes; for 8 MiB that are read and written again soon, it takes half again as
 * long.  Who sends a large message in parts says so with each, by a flag (rdmanet_soft_send_of_much).
 */
#pragma once

#include "responder/copy_lines.h"

enum { RN_STREAM_BYTES = 32 << 20 }; /* a message from this size on */

#if defined(__SSE2__)

enum { RN_STREAM_PAGE = 4096, RN_STREAM_PAGES = 4 };

static inline void rn_stream_line(char *to, const char *from)
{
	const __m128i *in = (const __m128i *)from;
	__m128i *out = (__m128i *)to;
	__m128i first = _mm_loadu_si128(in), second = _mm_loadu_si128(in + 1);
	__m128i third = _mm_loadu_si128(in + 2), fourth = _mm_loadu_si128(in + 3);

	_mm_stream_si128(out, first);
	_mm_stream_si128(out + 1, second);
	_mm_stream_si128(out + 2, third);
	_mm_stream_si128(out + 3, fourth);
}

/* So many pages side by side. */
static inline void rn_stream_pages(char *to, const char *from, size_t pages)
{
	for (size_t at = 0; at < RN_STREAM_PAGE; at += RN_LINE)
		for (size_t page = 0; page < pages; page++)
			rn_stream_line(to + page * RN_STREAM_PAGE + at, from + page * RN_STREAM_PAGE + at);
}

/* Like memcpy. Later stores are not seen before these. */
static inline void rn_stream_copy(char *to, const char *from, size_t length)
{
	size_t head = -(uintptr_t)to % RN_LINE;
	size_t pages = rn_is_amd() ? 1 : RN_STREAM_PAGES, step = pages * RN_STREAM_PAGE;

	if (head > length)
		head = length;
	memcpy(to, from, head);
	to += head;
	from += head;
	length -= head;
	for (; length >= step; length -= step, to += step, from += step) {
		if (pages == 1)
			rn_stream_pages(to, from, 1);
		else
			rn_stream_pages(to, from, RN_STREAM_PAGES);
	}
	_mm_sfence();
	memcpy(to, from, length);
}

#else

static inline void rn_stream_copy(char *to, const char *from, size_t length)
{
	memcpy(to, from, length);
}

#endif
