/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quiesce the users of a domain: when a region or a window is withdrawn, or changed under its key, wait until nobody
 * uses the old key any more.
 *
 * A user of a key looks it up first, and is done with it a bounded time later, unless its process is stopped, or ends.
 * So the caller clears the key and then calls this, which waits for every user that may have looked it up before:
 *
 *     user                                                    has moved on when
 *     a peer inside one of our queue pairs                    `busy` has changed (shm/arena.h)
 *     a peer that was stopped in one since destroyed          that is no longer put aside (qp_number.c, shm/pool.c)
 *     a peer that has claimed a receive of a UD pool          the claim has changed (shm/pool.h)
 *     a thread of ours that executes a request                it has released the send lock
 *     this process, which moves bytes for a peer              rn_serving has changed
 *     a peer that helps with a READ of ours (share.h)         it has put its piece in place
 *
 * A region's key is used by all of them.  Only the first and the last use a window's key, because it is not an lkey.
 * The callers differ in the locks that they hold, too.  A region is withdrawn with rn_process_lock held and nothing
 * else: queue pairs stay, and any send lock may be taken.  A window is unbound by a request, with the send lock of
 * its queue pair held, so the wait for its users looks only at words that need no lock.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "shm/arena.h"

struct rn_qp;

/* --- regions; with rn_process_lock held ---------------------------------------------------------------------- */

/* Wait for the users of this domain to move on: for peers up to RN_IDLE_WAIT_NS, for our own engine up to
 * RN_QUIESCE_WINDOW_MS. True: they have. */
bool rn_quiesce_region(uint32_t pd);
/* Have they moved on by now? For a key that was cleared before an rn_quiesce_region() that failed. */
bool rn_is_quiet(uint32_t pd);

/* --- windows; without rn_process_lock ------------------------------------------------------------------------- */

/*
 * A process that only waits for a CPU must get one within this time.  The kernel is asked soon whether it has ended, so
 * that nobody is there to wait for, or is stopped, so that waiting is in vain.  Who was waited for in vain, and has not
 * moved since, is not waited for again: many windows of one peer cost this time once.
 */
enum { RN_QUIESCE_WINDOW_MS = 250 };

/* The peers of all queue pairs of the domain. qp: the one whose send lock the caller has, or NULL. */
bool rn_quiesce_window(uint32_t pd, const struct rn_qp *qp);
/* The peer of one queue pair: by number, if that is still one of the domain; or with its send lock held. */
bool rn_quiesce_window_of_number(uint32_t pd, uint32_t qpn);
bool rn_quiesce_window_of(struct rn_qp *qp);

/* --- this process as a user ---------------------------------------------------------------------------------- */

/* Bytes are moved for a peer: those that come by TCP to a queue pair, or, as one, what peers ask of the engine
 * (responder/owner.c). A key that is looked up in between is in use until the end. */
enum { RN_SERVING_ENGINE = RN_QPS_MAX, RN_SERVINGS };
extern _Atomic uint32_t rn_serving[RN_SERVINGS]; /* odd: in between */

static inline void rn_serving_begin(uint32_t which)
{
	atomic_fetch_add(&rn_serving[which], 1); /* seq_cst, as the reading of keys is: shm/arena.h */
}
static inline void rn_serving_end(uint32_t which)
{
	atomic_fetch_add(&rn_serving[which], 1);
}

void rn_quiesce_forked(void);
