/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: the one thread that plays the adapter's slow half.
 *
 * The fast path has no thread: the thread that posts a work request executes it.  What is left has
 * to be waited for: sockets of the connection manager and of peers, timers (RNR, time-outs), and
 * work that could not be done at once.  One thread waits for all of it; it lives while anything
 * holds it.
 *
 *     sources   descriptors watched by epoll         timers   one-shot, nanoseconds
 *     tasks     run me soon, on the engine
 *
 * All three are embedded in their owner's struct, cost no allocation but a source's slot,
 * and share one promise: once remove/cancel has returned, the callback is not running and
 * will not run, so the owner may free the struct.  From another thread the call waits for a
 * callback that is running; so never call it while holding a lock that the callback takes.
 * Inside its own callback an object may be removed, set again, or freed.
 *
 * Callbacks run on the engine thread (or in its place: rn_tasks_run_here) with no lock held, one after the other,
 * and must not block.  Everything here may be called from any thread that has (or runs under) a hold.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

/* The struct that the source, timer or task is embedded in. */
#define RN_OWNER(pointer, type, member) \
	((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* The first hold starts the thread (-errno when it cannot), the last release ends it and waits
 * until it has gone; released on the engine thread itself, the thread ends by itself. */
int rn_engine_hold(void);
void rn_engine_release(void);

/* True on the engine thread, and on one that stands in for it. */
bool rn_engine_inside(void);
/* True on such a one only. A task that may take long is posted again there: the engine has time. */
bool rn_engine_stands_in(void);

/* Is there such a thread now? */
bool rn_engine_is_alive(void);

/* Between these no callback runs. Not on the engine thread, not with a lock held that a callback takes; and nothing
 * of the engine's may be called meanwhile. */
void rn_engine_pause(void);
void rn_engine_resume(void);

/* CLOCK_MONOTONIC. */
uint64_t rn_now_ns(void);

/* The same as of the last tick of the scheduler: some milliseconds old, and for a fifth of the price. */
uint64_t rn_tick_ns(void);

/* Zero-initialise, fill in fd and ready, then add.  The owner closes fd, after remove. */
struct rn_source {
	int fd;
	void (*ready)(struct rn_source *, uint32_t epoll_events);
	uint32_t slot; /* the engine's: index + 1, 0 = not added */
};

int rn_source_add(struct rn_source *, uint32_t epoll_events); /* 0 or -errno */
int rn_source_modify(struct rn_source *, uint32_t epoll_events);
void rn_source_remove(struct rn_source *); /* nothing when not added */

/* Zero-initialise and fill in fire.  Setting one that is set moves it. */
struct rn_timer {
	void (*fire)(struct rn_timer *);
	uint64_t due_ns;                        /* the engine's from here on: a pairing heap */
	struct rn_timer *child, *next, *before; /* before: elder sibling, or the parent */
	bool is_set;
};

void rn_timer_set(struct rn_timer *, uint64_t delay_ns);
void rn_timer_cancel(struct rn_timer *);

/* Zero-initialise and fill in run.  Posting one that is queued does nothing. */
struct rn_task {
	void (*run)(struct rn_task *);
	struct rn_task *next, **link; /* the engine's */
};

void rn_task_post(struct rn_task *);
/* Post in two steps, for a caller with a lock that the task takes: queue it, release the lock, wake the engine. An engine
 * that is woken earlier only waits for the lock. The caller has a hold on the engine throughout. */
void rn_task_queue(struct rn_task *);
void rn_tasks_wake(void);
/* The same, but if the engine sleeps, the tasks run here, in its place. With no lock held that a callback takes. For
 * tasks that are short. */
void rn_tasks_run_here(void);
void rn_task_cancel(struct rn_task *);

/* Run fn on the engine thread when the last hold has gone, before the thread ends: the place to
 * drop what was kept only to be quick next time.  Registered once, for the life of the process, after
 * those of what it uses: the last one runs first. */
void rn_at_engine_stop(void (*fn)(void));

/* --- fork.c: what a forked child must not keep ---------------------------------------------- */

/* Run fn in a forked child, by the one atfork handler, in order of registration and after the
 * owned descriptors were closed.  Other threads may have been anywhere: fn may not trust locks or
 * lists.  Registered once, for the life of the process. */
void rn_at_fork_child(void (*fn)(void));

/* Descriptors that belong to the device.  An owned one is closed in forked children, where it
 * would keep a dead parent's sockets open, and counts in rn_fd_count(). */
int rn_fd_own(int fd);    /* passes fd through, also -1 */
void rn_fd_close(int fd); /* nothing when negative */
unsigned rn_fd_count(void);

/* How many forks lie between the loading of this library and this process: objects remember the
 * epoch they were made in, and are not used in another. */
unsigned rn_epoch(void);
