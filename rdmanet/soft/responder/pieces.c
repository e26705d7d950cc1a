/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes into pieces, and pieces for system calls.  pieces.h says what a piece is. */
#include "responder/pieces.h"

#include <string.h>

#include "base/extras.h"
#include "objects/mr.h"
#include "responder/place.h"

/* A flag beyond those of verbs.h. */
RN_EXPORT const uint32_t rdmanet_soft_send_of_much = 1u << 30;

bool rn_scatter(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length)
{
	struct rn_runs runs = rn_runs(pieces, count, skip, length);
	struct iovec run;

	const void *lost;

	for (; rn_next_run(&runs, &run); from += run.iov_len)
		if (!rn_bus_copy(run.iov_base, from, run.iov_len, &lost))
			return false;
	return true;
}

bool rn_gather(const struct rn_piece *pieces, int count, char *to)
{
	const void *lost;

	for (int i = 0; i < count; to += pieces[i++].length) {
		if (rn_piece_is_firm(&pieces[i]))
			memcpy(to, pieces[i].at, pieces[i].length);
		else if (!rn_bus_copy(to, pieces[i].at, pieces[i].length, &lost))
			return false;
	}
	return true;
}

bool rn_place(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length)
{
	struct rn_runs runs = rn_runs(pieces, count, skip, length);
	struct iovec run;
	const void *lost;

	for (; rn_next_run(&runs, &run); from += run.iov_len) {
		const struct rn_mr_entry *mr = runs.piece[-1].mr;

		if (mr && mr->kind == RN_MR_ON_DEMAND && !rn_mr_probe((uintptr_t)run.iov_base, run.iov_len, true))
			return false;
		if (!rn_place_with_care(run.iov_base, from, run.iov_len, false, &lost))
			return false;
	}
	return true;
}

size_t rn_slice(const struct rn_piece *pieces, int count, uint64_t skip, uint64_t length, struct iovec *to, int room,
		int *used)
{
	struct rn_runs runs = rn_runs(pieces, count, skip, length);
	size_t covered = 0;

	for (*used = 0; *used < room && rn_next_run(&runs, &to[*used]); ++*used)
		covered += to[*used].iov_len;
	return covered;
}
