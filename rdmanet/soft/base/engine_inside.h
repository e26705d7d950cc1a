/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the engine: its state, and what its parts tell each other.
 *
 *     engine.c     the thread: its life, its loop, and the promise that engine.h makes about callbacks
 *     source.c     descriptors        timer.c   one-shot timers        task.c   run me soon
 */
#pragma once

#include <pthread.h>

#include "base/engine.h"

enum { RN_STOP_HOOKS_MAX = 8 };
enum rn_engine_state { RN_ENGINE_OFF, RN_ENGINE_RUNNING, RN_ENGINE_STOPPING };

struct rn_engine {
	pthread_mutex_t lock; /* guards all of this */
	pthread_cond_t calm;  /* `running` or `state` changed, and somebody waits */
	enum rn_engine_state state;
	unsigned holds;
	unsigned waiters;
	pthread_t thread;
	int epoll_fd, wakeup_fd, timer_fd;
	bool asleep; /* without end: a task needs the wakeup */

	void *running;
	bool busy; /* some callback is under way, `running` or not */

	struct rn_source_slot {
		struct rn_source *source; /* NULL: free */
		uint32_t generation;
		uint32_t next_free; /* index + 1 */
	} *slots;
	uint32_t slot_count, free_slot;

	struct rn_timer *timers; /* a pairing heap: the earliest at its root */
	uint64_t armed_ns;       /* when timer_fd will fire; 0: never */

	struct rn_task *tasks, **tasks_end;

	void (*stop_hooks[RN_STOP_HOOKS_MAX])(void);
	unsigned stop_hook_count;
};
extern struct rn_engine rn_engine;

/* All with the lock held. */

/* --- engine.c ----------------------------------------------------------------------------------- */

/* Around a callback, which is made without it. */
void rn_engine_begin(void *object);
void rn_engine_end(void);
/* Wait until the object's callback isn't running; inside it, that is now: it may free the object, whose address then
 * means nothing any more. */
void rn_engine_settle(void *object);
/* There is a task: wake the thread, if it sleeps without end. */
void rn_engine_wakeup(void);
/* If the thread sleeps, take its place, in which callbacks may run. False: it is awake, or it is this thread. */
bool rn_engine_stand_in(void);
void rn_engine_stand_down(void);
/* Wake it, with `asleep` taken back: also without the lock. */
void rn_engine_ring(void);

/* --- source.c ----------------------------------------------------------------------------------- */

/* The source that an event is for; NULL: none that is still there, or the engine's own descriptors. */
struct rn_source *rn_source_of(const struct epoll_event *event);

/* --- timer.c ------------------------------------------------------------------------------------ */

void rn_timers_run(void);
/* Before sleeping. False: one is due. */
bool rn_timers_arm(void);

/* --- task.c ------------------------------------------------------------------------------------- */

void rn_tasks_run(void);
