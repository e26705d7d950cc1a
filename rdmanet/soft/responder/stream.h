/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying more than the caches hold.
 *
 * An ordinary store to memory that is not in a cache reads the line first, and puts something else out of the cache.
 * These stores do neither.  The copy goes through several pages side by side: a processor fetches ahead in each of them,
 * but not beyond its end.
 *
 * What was copied is in memory then, and not in a cache.  So it pays only for so much that its beginning would have
 * left the caches anyway when its end comes; for 8 MiB that are read and written again soon, it takes half again as
 * long.  Who sends a large message in parts says so with each, by a flag (rdmanet_soft_send_of_much).
 */
#ifndef RDMANET_SOFT_STREAM_H
#define RDMANET_SOFT_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { RN_STREAM_BYTES = 32 << 20 }; /* a message from this size on */

#if defined(__SSE2__)
#include <emmintrin.h>

enum { RN_STREAM_LINE = 64, RN_STREAM_PAGE = 4096, RN_STREAM_PAGES = 4 };

static inline void rn_stream_line(char *to, const char *from)
{
	__m128i parts[RN_STREAM_LINE / sizeof(__m128i)];

	for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
		parts[i] = _mm_loadu_si128((const __m128i *)from + i);
	for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
		_mm_stream_si128((__m128i *)to + i, parts[i]);
}

/* Like memcpy. Later stores are not seen before these. */
static inline void rn_stream_copy(char *to, const char *from, size_t length)
{
	size_t head = -(uintptr_t)to % RN_STREAM_LINE;

	if (head > length)
		head = length;
	memcpy(to, from, head);
	to += head;
	from += head;
	length -= head;
	for (; length >= RN_STREAM_PAGES * RN_STREAM_PAGE; length -= RN_STREAM_PAGES * RN_STREAM_PAGE) {
		for (size_t at = 0; at < RN_STREAM_PAGE; at += RN_STREAM_LINE)
			for (size_t page = 0; page < RN_STREAM_PAGES; page++)
				rn_stream_line(to + page * RN_STREAM_PAGE + at, from + page * RN_STREAM_PAGE + at);
		to += RN_STREAM_PAGES * RN_STREAM_PAGE;
		from += RN_STREAM_PAGES * RN_STREAM_PAGE;
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

#endif
