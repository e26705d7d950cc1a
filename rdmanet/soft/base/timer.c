/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's timers.
 *
 * They need no wakeup: whoever sets the earliest arms the timerfd itself (a timerfd, as epoll's own time-out
 * counts milliseconds, or is rounded up by the thread's timer slack of 50 us).
 */
#include <sys/timerfd.h>
#include <time.h>

#include "base/engine_inside.h"

uint64_t rn_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t rn_tick_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- the heap --------------------------------------------------------------------------------- */

/* A pairing heap: no allocation, O(1) to set, O(log n) amortised to take out; the connection
 * manager's thousands of five-second time-outs are set and cancelled without ever being sorted. */
static struct rn_timer *meld(struct rn_timer *a, struct rn_timer *b)
{
	struct rn_timer *swap;

	if (!a)
		return b;
	if (!b)
		return a;
	if (b->due_ns < a->due_ns) {
		swap = a;
		a = b;
		b = swap;
	}
	b->before = a;
	b->next = a->child;
	if (b->next)
		b->next->before = b;
	a->child = b;
	return a;
}

/* One heap of a list of siblings: pairs from the left, then all of them from the right. */
static struct rn_timer *meld_siblings(struct rn_timer *list)
{
	struct rn_timer *pairs = NULL, *heap = NULL;

	while (list) {
		struct rn_timer *a = list, *b = a->next, *pair;

		list = b ? b->next : NULL;
		a->next = a->before = NULL;
		if (b)
			b->next = b->before = NULL;
		pair = meld(a, b);
		pair->next = pairs;
		pairs = pair;
	}
	while (pairs) {
		struct rn_timer *pair = pairs;

		pairs = pair->next;
		pair->next = NULL;
		heap = meld(heap, pair);
	}
	return heap;
}

static void take_out(struct rn_timer *timer)
{
	struct rn_timer *below = meld_siblings(timer->child);

	if (timer == rn_engine.timers) {
		rn_engine.timers = below;
	} else {
		if (timer->before->child == timer)
			timer->before->child = timer->next;
		else
			timer->before->next = timer->next;
		if (timer->next)
			timer->next->before = timer->before;
		rn_engine.timers = meld(rn_engine.timers, below);
	}
	timer->child = timer->next = timer->before = NULL;
	timer->is_set = false;
}

/* --- firing ----------------------------------------------------------------------------------- */

static void arm_at(uint64_t due_ns)
{
	struct itimerspec when = {.it_value = {.tv_sec = (time_t)(due_ns / 1000000000u),
	                                       .tv_nsec = (long)(due_ns % 1000000000u)}};

	rn_engine.armed_ns = due_ns;
	timerfd_settime(rn_engine.timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

/* See to it that the timerfd fires in time for the earliest; false when that is due already.  A
 * timerfd armed too early (for a timer since cancelled) is left: one idle round is cheaper than
 * a system call for each time-out that never comes. */
bool rn_timers_arm(void)
{
	uint64_t now_ns, due_ns;

	if (!rn_engine.timers)
		return true;
	due_ns = rn_engine.timers->due_ns;
	now_ns = rn_now_ns();
	if (due_ns <= now_ns)
		return false;
	if (rn_engine.armed_ns <= now_ns || rn_engine.armed_ns > due_ns)
		arm_at(due_ns);
	return true;
}

void rn_timers_run(void)
{
	uint64_t now_ns;

	if (!rn_engine.timers)
		return;
	now_ns = rn_now_ns(); /* once: timers that fire to set themselves anew don't hold the loop */
	while (rn_engine.timers && rn_engine.timers->due_ns <= now_ns) {
		struct rn_timer *timer = rn_engine.timers;

		take_out(timer);
		rn_engine_begin(timer);
		timer->fire(timer);
		rn_engine_end();
	}
}

void rn_timer_set(struct rn_timer *timer, uint64_t delay_ns)
{
	uint64_t now_ns;

	pthread_mutex_lock(&rn_engine.lock);
	/* Inside: read earlier, the timerfd could look armed that has fired and been seen to meanwhile. */
	now_ns = rn_now_ns();
	if (timer->is_set)
		take_out(timer);
	timer->due_ns = now_ns + delay_ns < now_ns ? UINT64_MAX : now_ns + (delay_ns ? delay_ns : 1);
	timer->is_set = true;
	rn_engine.timers = meld(rn_engine.timers, timer);
	if (!rn_engine_inside() && rn_engine.timers == timer && rn_engine.state != RN_ENGINE_OFF &&
	    (rn_engine.armed_ns <= now_ns || rn_engine.armed_ns > timer->due_ns))
		arm_at(timer->due_ns);
	pthread_mutex_unlock(&rn_engine.lock);
}

void rn_timer_cancel(struct rn_timer *timer)
{
	pthread_mutex_lock(&rn_engine.lock);
	rn_engine_settle(timer); /* first: what runs may set it again */
	if (timer->is_set)
		take_out(timer);
	pthread_mutex_unlock(&rn_engine.lock);
}
