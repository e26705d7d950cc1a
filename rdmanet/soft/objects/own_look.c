/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checking the arena's copy of our own words.  shm/own.h has the theory.
 *
 * A look holds rn_process_lock, so queue pairs, CQs and pools stay, and for each of them the lock under which it changes.  Of
 * objects that may number thousands (queue pairs, receives) it checks some at a time, or it would keep a large server
 * busy.  But if one word is wrong others will be, so then all are checked.
 */
#include "base/log.h"
#include "objects/cq_inside.h"
#include "objects/own_look.h"
#include "objects/qp_inside.h"
#include "objects/srq.h"

enum { LOOK_MS = 1000, DOUBLINGS = 5, QPS_PER_LOOK = 1024 };

/* --- looking ------------------------------------------------------------------------------------------------- */

static unsigned tell_qps(bool all)
{
	static uint32_t next;
	uint32_t end = rn_qps_end;
	unsigned differed = 0;

	for (uint32_t looked = 0; looked < end && (looked < QPS_PER_LOOK || all || differed); looked++) {
		struct rn_qp *qp;

		next = next < end ? next : 0;
		qp = rn_qps[next++];
		if (!qp)
			continue;
		rn_lock(&qp->sq_lock);
		differed += rn_own_tell_qp(qp->index);
		rn_unlock(&qp->sq_lock);
	}
	return differed;
}

void rn_own_look(bool all)
{
	unsigned differed = 0;

	pthread_mutex_lock(&rn_process_lock);
	if (rn_arena && rn_guarded(RN_GUARD_OWN_FACTS)) {
		differed = rn_own_tell_head() + rn_own_tell_regions();
		differed += tell_qps(all || differed);
		differed += rn_pool_look_after_all(all || differed);
		differed += rn_cq_look_after_all(all || differed);
		rn_srq_process_pending_all();
	}
	pthread_mutex_unlock(&rn_process_lock);
	if (differed)
		rn_warn(RN_WARN_ARENA,
			"a process of this user overwrote %u words of the arena that only we may write: restored", differed);
}

/* --- when ---------------------------------------------------------------------------------------------------- */

_Atomic uint32_t rn_own_quiet;

static void look(struct rn_timer *timer);
static struct rn_timer watch = {.fire = look};
static struct rn_lock watch_lock; /* guards the following, and the setting of the timer */
static bool is_watching;

uint64_t rn_own_pause_ns(uint32_t quiet)
{
	return LOOK_MS * 1000000ull << (quiet < DOUBLINGS ? quiet : DOUBLINGS);
}

/* With the lock held. */
static void look_after(uint32_t quiet)
{
	if (is_watching)
		rn_timer_set(&watch, rn_own_pause_ns(quiet));
}

static void look(struct rn_timer *timer)
{
	(void)timer;
	rn_own_look(atomic_load(&rn_own_quiet) >= DOUBLINGS);
	rn_lock(&watch_lock);
	look_after(atomic_fetch_add(&rn_own_quiet, 1));
	rn_unlock(&watch_lock);
}

/* A pause of a second is not restarted, so that continuous traffic does not postpone the look. */
void rn_own_moved_again(void)
{
	rn_lock(&watch_lock);
	if (atomic_exchange(&rn_own_quiet, 0) > 1)
		look_after(0);
	rn_unlock(&watch_lock);
}

void rn_own_watch(void)
{
	bool was_watching;

	rn_lock(&watch_lock);
	was_watching = is_watching;
	is_watching = true;
	if (!was_watching)
		look_after(0);
	rn_unlock(&watch_lock);
	rn_own_moves();
}

void rn_own_close(void)
{
	rn_lock(&watch_lock);
	is_watching = false;
	rn_unlock(&watch_lock);
	rn_timer_cancel(&watch);
	atomic_store(&rn_own_quiet, 0);
}

void rn_own_look_forked(void)
{
	watch = (struct rn_timer){.fire = look};
	watch_lock = (struct rn_lock){0};
	is_watching = false;
	atomic_store(&rn_own_quiet, 0);
}
