/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A long READ that both processes carry.
 *
 * A READ of memory that isn't mapped is one process's work, for the kernel copies for whoever asks it: while the requester's
 * engine copies, the owner's stands idle.  So the requester asks the owner's engine to help (RN_REMOTE_HELP), and begins
 * from the front.  The owner's engine takes pieces from the back, and writes them into the requester's memory, until the
 * two meet.  A requester whose owner doesn't help copies all by itself.
 *
 *     requester  0, 1, 2, ... -->        <-- ..., n-2, n-1  owner
 *                       [0, front)      [back, n)
 *
 * Two words of the owner's queue pair (shm/arena.h) say who has what:
 *
 *     shared    serial of this READ, front, back.  Each takes a piece by compare-and-swap, so each piece is taken once.
 *     given     the owner's alone: the serial, and how many of its pieces are in place
 *
 * The requester's memory is the program's again when the READ has its completion, whatever that is.  So before it completes
 * in error, or its memory is deregistered, the requester ends the sharing: it takes `shared` away, after which the owner
 * finds nothing more to take, and waits for the piece that the owner may just be writing.  It does not wait for an owner
 * that is stopped, nor long for one that gets no CPU.  From such a one it takes the witness, without which no call of the
 * owner's writes anything (base/witness.h).  Other READs that had the same witness are then carried by the requester alone.
 * A call that had found the witness already is in the kernel, where nobody is stopped: it gets RN_SHARE_UNDERWAY_NS more.
 *
 * A READ of mapped memory is not carried by two.  Another thread makes it sooner only from 2 MiB on (Zen 4, two CPUs: 1 MiB
 * 23 us either way, 4 MiB 62 us instead of 90, 64 MiB 2.7 ms instead of 3.4), takes a tenth to a third more of the
 * processors' time, and one that others may need.
 *
 * All of it is under the send lock of the requester's queue pair.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "peer/peer.h"
#include "shm/arena.h"

enum { RN_SHARE_PIECE = 256 * 1024, RN_SHARE_UNDERWAY_NS = 20 * 1000 * 1000 };

struct rn_responder_ctx;

/* What the requester knows of it. */
struct rn_share {
	bool is_active;
	uint32_t serial;
	uint32_t front, back, pieces; /* back: as last seen */
	uint64_t base;                /* where in the message the first piece begins */
	const struct rn_mr_entry *memory; /* the requester's region that it goes to, and its key */
	uint32_t key;
	uint64_t witness;             /* without it the owner can write nothing */
	struct rn_reply reply;
	_Atomic bool is_asked;    /* the owner has not answered yet */
	_Atomic bool is_declined; /* it doesn't help, or something is wrong with its words */
};

static inline uint64_t rn_share_word(uint32_t serial, uint32_t front, uint32_t back)
{
	return (uint64_t)serial << 32 | front << 16 | back;
}
static inline uint32_t rn_share_serial(uint64_t word)
{
	return (uint32_t)(word >> 32);
}
static inline uint32_t rn_share_front(uint64_t word)
{
	return (uint32_t)word >> 16;
}
static inline uint32_t rn_share_back(uint64_t word)
{
	return word & 0xffff;
}

/* --- the requester --------------------------------------------------------------------------------------------- */

/* Put these bytes up for sharing, from this position of the message on. */
void rn_share_begin(struct rn_responder_ctx *ctx, uint64_t base, uint64_t length);
enum rn_share_claim {
	RN_SHARE_MINE,  /* the piece before share.front */
	RN_SHARE_EMPTY, /* all are taken */
	RN_SHARE_LOST,  /* somebody has scribbled over the word */
};
enum rn_share_claim rn_share_claim(struct rn_responder_ctx *ctx);
/* When all are taken: are the owner's in place? */
bool rn_share_is_complete(const struct rn_responder_ctx *ctx);
/* End it. The owner writes nothing more into our memory. */
void rn_share_stop(struct rn_responder_ctx *ctx);
/* The same, if the memory is withdrawn. A READ into other memory goes on: it may succeed, and so must not be without the
 * piece that a stopped owner has. */
void rn_share_stop_withdrawn(struct rn_responder_ctx *ctx);

/* --- the owner --------------------------------------------------------------------------------------------------- */

/* Is any piece left? */
static inline bool rn_share_has_more(const struct rn_qp_block *block, uint32_t serial)
{
	uint64_t word = atomic_load(&block->shared);

	return rn_share_serial(word) == serial && rn_share_front(word) < rn_share_back(word);
}
/* Take the last piece that is left. False: there is none. */
bool rn_share_take(struct rn_qp_block *block, uint32_t serial, uint32_t *piece);
/* The piece that was taken last could not be copied: the requester has it to do, if it still wants it. */
bool rn_share_put_back(struct rn_qp_block *block, uint32_t serial, uint32_t piece);
