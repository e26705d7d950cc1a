/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying into memory that a program may be polling.
 *
 * WRITE promises programs that poll memory: the last bytes of a message are stored last, and an
 * aligned write of eight bytes is one store.
 */
#pragma once

#include "responder/copy_lines.h"
#include "responder/responder.h"
#include "responder/stream.h"

/* is_large: see struct rn_transfer. Then the two do not overlap. */
static inline void rn_move(char *to, const char *from, size_t length, bool is_large)
{
	if (unlikely(is_large))
		rn_stream_copy(to, from, length);
	else
		rn_copy_bytes(to, from, length);
}

static inline void rn_place_one(char *to, const char *from, size_t length, bool is_large)
{
	uint64_t last;

	if (length < sizeof(last)) {
		memmove(to, from, length);
		return;
	}
	memcpy(&last, from + length - sizeof(last), sizeof(last));
	rn_move(to, from, length - sizeof(last), is_large);
	to += length - sizeof(last);
	if (likely(!((uintptr_t)to % sizeof(last)))) {
		__atomic_store_n((uint64_t *)to, last, __ATOMIC_RELEASE);
	} else {
		memcpy(to, &last, sizeof(last) - 1);
		__atomic_store_n(to + sizeof(last) - 1, (char)(last >> 56), __ATOMIC_RELEASE);
	}
}

/* The same where the memory of either side may be a file's. False: there is none at `lost`. */
static inline bool rn_place_with_care(char *to, const char *from, size_t length, bool is_large, const void **lost)
{
	struct rn_bus bus;

	if (sigsetjmp(bus.back, 0)) {
		*lost = bus.lost;
		return false;
	}
	rn_bus_begin(&bus);
	rn_place_one(to, from, length, is_large);
	rn_bus_end();
	return true;
}
