/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces: the memory that a request copies from or to, as a scatter list of runs.
 *
 * A position in a list counts bytes from its beginning.  struct rn_runs walks from a position on, for a number of
 * bytes, and returns one contiguous part at a time; all code that copies, stores or describes pieces uses it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "bus_error.h"
#include "shm/arena.h"

/* A run of memory. */
struct rn_piece {
	char *at;     /* where it is mapped here, or NULL */
	uint64_t far; /* else: its address in its owner's process */
	uint32_t length;
	uint32_t key;
	uint64_t addr; /* as the work request has it */
	const struct rn_mr_entry *mr;
};

/* Can this memory not go away while we copy? Device memory can't: its files are sealed. Others are copied with care, by
 * bus_error.h. */
static inline bool rn_piece_is_firm(const struct rn_piece *piece)
{
	return piece->mr && READ_ONCE(piece->mr->kind) == RN_MR_SEGMENT;
}

/* What is left of a walk. */
struct rn_runs {
	const struct rn_piece *piece, *end;
	uint64_t skip, length;
};

static inline struct rn_runs rn_runs(const struct rn_piece *pieces, int count, uint64_t skip, uint64_t length)
{
	return (struct rn_runs){pieces, pieces + count, skip, length};
}

/* Get the next run, which is then runs->piece[-1]. False: no bytes or pieces are left. */
static inline bool rn_next_run(struct rn_runs *runs, struct iovec *run)
{
	for (; runs->piece < runs->end && runs->length; runs->piece++) {
		uint64_t length = runs->piece->length;

		if (runs->skip >= length) {
			runs->skip -= length;
			continue;
		}
		length -= runs->skip;
		if (length > runs->length)
			length = runs->length;
		*run = (struct iovec){runs->piece->at + runs->skip, length};
		runs->length -= length;
		runs->skip = 0;
		runs->piece++;
		return true;
	}
	return false;
}

/* Copy flat memory into pieces mapped here, from position skip on. False: one of them is not there. */
bool rn_scatter(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length);
/* All of the pieces into flat memory. */
bool rn_gather(const struct rn_piece *pieces, int count, char *to);
/* From flat memory to memory that a program may be polling (place.h); on-demand memory is probed first. */
bool rn_place(const struct rn_piece *pieces, int count, uint64_t skip, const char *from, uint64_t length);
/* The part [skip, skip + length) of pieces mapped here, as far as the array goes. Bytes that it covers. */
size_t rn_slice(const struct rn_piece *pieces, int count, uint64_t skip, uint64_t length, struct iovec *to, int room,
		int *used);
