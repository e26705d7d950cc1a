/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes that came by themselves (an old value, a frame, a datagram) into the pieces of a scatter list.
 */
#include "place.h"

void rn_scatter(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length)
{
	for (int i = 0; i < count && length; i++) {
		uint64_t run = pieces[i].length;

		if (skip >= run) {
			skip -= run;
			continue;
		}
		run -= skip;
		if (run > length)
			run = length;
		memcpy(pieces[i].at + skip, from, run);
		from += run;
		length -= run;
		skip = 0;
	}
}

bool rn_place(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length)
{
	for (int i = 0; i < count && length; i++) {
		uint64_t run = pieces[i].length;
		char *to = pieces[i].at + skip;

		if (skip >= run) {
			skip -= run;
			continue;
		}
		run -= skip;
		if (run > length)
			run = length;
		if (pieces[i].mr && pieces[i].mr->kind == RN_MR_ON_DEMAND && !rn_mr_probe((uintptr_t)to, run, true))
			return false;
		rn_place_one(to, from, run);
		from += run;
		length -= run;
		skip = 0;
	}
	return true;
}
