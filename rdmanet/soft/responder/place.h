/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying into memory that a program may be polling.
 *
 * WRITE promises programs that poll memory: the last bytes of a message are stored last, and an
 * aligned write of eight bytes is one store.
 */
#ifndef RDMANET_SOFT_PLACE_H
#define RDMANET_SOFT_PLACE_H

#include "responder/responder.h"

static inline void rn_place_one(char *to, const char *from, size_t length)
{
	uint64_t last;

	if (length < sizeof(last)) {
		memmove(to, from, length);
		return;
	}
	memcpy(&last, from + length - sizeof(last), sizeof(last));
	if (length > sizeof(last))
		memmove(to, from, length - sizeof(last));
	to += length - sizeof(last);
	if (likely(!((uintptr_t)to % sizeof(last)))) {
		__atomic_store_n((uint64_t *)to, last, __ATOMIC_RELEASE);
	} else {
		memcpy(to, &last, sizeof(last) - 1);
		__atomic_store_n(to + sizeof(last) - 1, (char)(last >> 56), __ATOMIC_RELEASE);
	}
}

#endif
