/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the arena's copy of our own words is checked: every second while there is traffic, less and less often without.
 */
#include "base/engine.h"
#include "base/lock.h"
#include "objects/own_look.h"

enum { LOOK_MS = 1000, DOUBLINGS = 5 };

_Atomic uint32_t rn_own_quiet;

static void fired(struct rn_timer *timer);
static struct rn_timer watch = {.fire = fired};
static struct rn_lock watch_lock; /* guards the following, and the setting of the timer */
static void (*look)(bool all);	  /* NULL: nobody watches */

uint64_t rn_own_pause_ns(uint32_t quiet)
{
	return LOOK_MS * 1000000ull << (quiet < DOUBLINGS ? quiet : DOUBLINGS);
}

/* With the lock held. */
static void look_after(uint32_t quiet)
{
	if (look)
		rn_timer_set(&watch, rn_own_pause_ns(quiet));
}

static void fired(struct rn_timer *timer)
{
	void (*now)(bool all);

	(void)timer;
	rn_lock(&watch_lock);
	now = look;
	rn_unlock(&watch_lock);
	if (now)
		now(atomic_load(&rn_own_quiet) >= DOUBLINGS);
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

void rn_own_watch_by(void (*by)(bool all))
{
	bool was_watching;

	rn_lock(&watch_lock);
	was_watching = look;
	look = by;
	if (!was_watching)
		look_after(0);
	rn_unlock(&watch_lock);
	rn_own_moves();
}

void rn_own_close(void)
{
	rn_lock(&watch_lock);
	look = NULL;
	rn_unlock(&watch_lock);
	rn_timer_cancel(&watch);
	atomic_store(&rn_own_quiet, 0);
}

void rn_own_watch_forked(void)
{
	watch = (struct rn_timer){.fire = fired};
	watch_lock = (struct rn_lock){0};
	look = NULL;
	atomic_store(&rn_own_quiet, 0);
}
