/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine thread.  engine.h says what it promises; here is how.
 *
 * Locking.  One mutex guards the tables; callbacks run without it.  `running` names the object
 * whose callback is under way, and whoever removes that object from another thread waits on
 * `calm` until it is something else.  The engine never looks at an object after its callback has
 * returned, because the callback may have freed it.
 *
 * Standing in.  While the engine sleeps, another thread may run tasks in its place (rn_tasks_run_here): to wake the
 * engine costs more than a short task.  The two exclude each other by `asleep`, which only the engine sets, and by
 * `busy`, for which the engine waits when it is woken meanwhile.
 *
 * Waking.  The wakeup is written only when the thread sleeps without end; timers have a timerfd
 * (timer.c).  Both descriptors are edge-triggered and so never read.
 */
#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/engine_inside.h"

enum { EVENTS_PER_ROUND = 32 };

struct rn_engine rn_engine = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.calm = PTHREAD_COND_INITIALIZER,
	.tasks_end = &rn_engine.tasks,
	.epoll_fd = -1,
	.wakeup_fd = -1,
	.timer_fd = -1,
};

static _Thread_local bool inside, stands_in;

bool rn_engine_inside(void)
{
	return inside;
}

bool rn_engine_stands_in(void)
{
	return stands_in;
}

bool rn_engine_is_alive(void)
{
	bool alive;

	pthread_mutex_lock(&rn_engine.lock);
	alive = rn_engine.state != RN_ENGINE_OFF;
	pthread_mutex_unlock(&rn_engine.lock);
	return alive;
}

/* With the lock held. */
static void wait_until_idle(void)
{
	while (rn_engine.busy) {
		rn_engine.waiters++;
		pthread_cond_wait(&rn_engine.calm, &rn_engine.lock);
		rn_engine.waiters--;
	}
}

/* While the lock is held, the engine can do nothing but sleep. */
void rn_engine_pause(void)
{
	pthread_mutex_lock(&rn_engine.lock);
	wait_until_idle();
}

void rn_engine_resume(void)
{
	pthread_mutex_unlock(&rn_engine.lock);
}

/* --- life ------------------------------------------------------------------------------------ */

static void *run(void *);

static void close_descriptors(void)
{
	rn_fd_close(rn_engine.epoll_fd);
	rn_fd_close(rn_engine.wakeup_fd);
	rn_fd_close(rn_engine.timer_fd);
	rn_engine.epoll_fd = rn_engine.wakeup_fd = rn_engine.timer_fd = -1;
}

/* The rest of a forked child sees an engine that never ran. The tables may have been in mid-change,
 * so they are left behind, not freed. */
static void forget_in_child(void)
{
	pthread_mutex_init(&rn_engine.lock, NULL);
	pthread_cond_init(&rn_engine.calm, NULL);
	rn_engine.state = RN_ENGINE_OFF;
	rn_engine.holds = rn_engine.waiters = 0;
	rn_engine.epoll_fd = rn_engine.wakeup_fd = rn_engine.timer_fd = -1;
	rn_engine.asleep = false;
	rn_engine.running = NULL;
	rn_engine.busy = false;
	rn_engine.slots = NULL;
	rn_engine.slot_count = rn_engine.free_slot = 0;
	rn_engine.timers = NULL;
	rn_engine.armed_ns = 0;
	rn_engine.tasks = NULL;
	rn_engine.tasks_end = &rn_engine.tasks;
	inside = stands_in = false;
}

static void register_fork_handler(void)
{
	rn_at_fork_child(forget_in_child);
}

static int start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct epoll_event wakeup = {.events = EPOLLIN | EPOLLET};
	sigset_t all, before;
	int rc;

	pthread_once(&once, register_fork_handler);
	rn_engine.epoll_fd = rn_fd_own(epoll_create1(EPOLL_CLOEXEC));
	rn_engine.wakeup_fd = rn_fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	rn_engine.timer_fd = rn_fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
	if (rn_engine.epoll_fd < 0 || rn_engine.wakeup_fd < 0 || rn_engine.timer_fd < 0 ||
	    epoll_ctl(rn_engine.epoll_fd, EPOLL_CTL_ADD, rn_engine.wakeup_fd, &wakeup) ||
	    epoll_ctl(rn_engine.epoll_fd, EPOLL_CTL_ADD, rn_engine.timer_fd, &wakeup)) {
		rc = -errno;
		goto failed;
	}
	rn_engine.armed_ns = 0;
	rn_engine.asleep = false;

	/* The program's signals are for the program's threads. But SIGBUS that is blocked would be the end: bus_error.h. */
	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&rn_engine.thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (rc)
		goto failed;
	rn_engine.state = RN_ENGINE_RUNNING;
	return 0;

failed:
	close_descriptors();
	return rc;
}

int rn_engine_hold(void)
{
	int rc = 0;

	pthread_mutex_lock(&rn_engine.lock);
	while (rn_engine.state == RN_ENGINE_STOPPING && !inside) {
		rn_engine.waiters++;
		pthread_cond_wait(&rn_engine.calm, &rn_engine.lock);
		rn_engine.waiters--;
	}
	if (rn_engine.state == RN_ENGINE_STOPPING)
		rc = -ECANCELED;
	else if (rn_engine.state == RN_ENGINE_OFF)
		rc = start();
	if (!rc)
		rn_engine.holds++;
	pthread_mutex_unlock(&rn_engine.lock);
	return rc;
}

static void now_off(void)
{
	close_descriptors();
	free(rn_engine.slots);
	rn_engine.slots = NULL;
	rn_engine.slot_count = rn_engine.free_slot = 0;
	rn_engine.state = RN_ENGINE_OFF;
	if (rn_engine.waiters)
		pthread_cond_broadcast(&rn_engine.calm);
}

void rn_engine_ring(void)
{
	uint64_t one = 1;
	/* Cannot fail but by overflow, and then it is readable anyway. */
	ssize_t written = write(rn_engine.wakeup_fd, &one, sizeof one);

	(void)written;
}

void rn_engine_wakeup(void)
{
	if (rn_engine.asleep) {
		rn_engine.asleep = false;
		rn_engine_ring();
	}
}

void rn_engine_release(void)
{
	pthread_t thread;

	pthread_mutex_lock(&rn_engine.lock);
	assert(rn_engine.holds);
	if (--rn_engine.holds) {
		pthread_mutex_unlock(&rn_engine.lock);
		return;
	}
	rn_engine.state = RN_ENGINE_STOPPING;
	rn_engine_wakeup();
	thread = rn_engine.thread;
	if (inside) {
		pthread_detach(thread);
		rn_engine.thread = 0; /* the thread itself turns the lights off */
		pthread_mutex_unlock(&rn_engine.lock);
		return;
	}
	pthread_mutex_unlock(&rn_engine.lock);
	pthread_join(thread, NULL);
	pthread_mutex_lock(&rn_engine.lock);
	now_off();
	pthread_mutex_unlock(&rn_engine.lock);
}

void rn_at_engine_stop(void (*fn)(void))
{
	pthread_mutex_lock(&rn_engine.lock);
	assert(rn_engine.stop_hook_count < RN_STOP_HOOKS_MAX);
	rn_engine.stop_hooks[rn_engine.stop_hook_count++] = fn;
	pthread_mutex_unlock(&rn_engine.lock);
}

/* --- standing in ------------------------------------------------------------------------------ */

bool rn_engine_stand_in(void)
{
	if (inside || !rn_engine.asleep || rn_engine.busy || rn_engine.state != RN_ENGINE_RUNNING)
		return false;
	inside = stands_in = true;
	return true;
}

void rn_engine_stand_down(void)
{
	inside = stands_in = false;
	/* What the engine sees to before it sleeps. */
	if (!rn_timers_arm() || rn_engine.tasks)
		rn_engine_wakeup();
}

/* --- the loop -------------------------------------------------------------------------------- */

void rn_engine_begin(void *object)
{
	rn_engine.running = object;
	rn_engine.busy = true;
	pthread_mutex_unlock(&rn_engine.lock);
}

void rn_engine_end(void)
{
	pthread_mutex_lock(&rn_engine.lock);
	rn_engine.running = NULL;
	rn_engine.busy = false;
	if (rn_engine.waiters)
		pthread_cond_broadcast(&rn_engine.calm);
}

static void dispatch(const struct epoll_event *event)
{
	struct rn_source *source = rn_source_of(event);

	if (!source)
		return;
	rn_engine_begin(source);
	source->ready(source, event->events);
	rn_engine_end();
}

static void *run(void *unused)
{
	struct epoll_event events[EVENTS_PER_ROUND];
	int count, timeout_ms;

	(void)unused;
	inside = true;
	pthread_setname_np(pthread_self(), "rdmanet-engine");
	pthread_mutex_lock(&rn_engine.lock);
	for (;;) {
		rn_tasks_run();
		rn_timers_run();
		if (rn_engine.state == RN_ENGINE_STOPPING && !rn_engine.tasks)
			break;
		rn_engine.asleep = rn_timers_arm() && !rn_engine.tasks;
		timeout_ms = rn_engine.asleep ? -1 : 0;
		pthread_mutex_unlock(&rn_engine.lock);
		count = epoll_wait(rn_engine.epoll_fd, events, EVENTS_PER_ROUND, timeout_ms);
		pthread_mutex_lock(&rn_engine.lock);
		wait_until_idle(); /* somebody stands in for us */
		rn_engine.asleep = false;
		for (int i = 0; i < count; i++)
			dispatch(&events[i]);
	}
	for (unsigned i = rn_engine.stop_hook_count; i-- > 0;) {
		rn_engine_begin(NULL);
		rn_engine.stop_hooks[i]();
		rn_engine_end();
	}
	if (!rn_engine.thread) /* released by one of our own callbacks: nobody joins */
		now_off();
	pthread_mutex_unlock(&rn_engine.lock);
	return NULL;
}

void rn_engine_settle(void *object)
{
	if (inside) {
		if (rn_engine.running == object)
			rn_engine.running = NULL;
		return;
	}
	while (rn_engine.running == object) {
		rn_engine.waiters++;
		pthread_cond_wait(&rn_engine.calm, &rn_engine.lock);
		rn_engine.waiters--;
	}
}
