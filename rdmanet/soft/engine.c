/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine thread.  engine.h says what it promises; here is how.
 *
 * Locking.  One mutex guards the tables; callbacks run without it.  `running` names the object
 * whose callback is under way, and whoever removes that object from another thread waits on
 * `calm` until it is something else.  The engine never looks at an object after its callback has
 * returned, because the callback may have freed it.
 *
 * Stale events.  epoll_wait returns a batch, and a callback may remove a source that is further
 * down in it.  So an event carries a slot number and the slot's generation, never a pointer.
 *
 * Waking.  The doorbell is written only when the thread sleeps without end.  Timers need no
 * doorbell: whoever sets the earliest arms the timerfd itself (a timerfd, as epoll's own time-out
 * counts milliseconds, or is rounded up by the thread's timer slack of 50 us).  Both descriptors
 * are edge-triggered and so never read.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

struct slot {
	struct rn_source *source; /* NULL: free */
	uint32_t generation;
	uint32_t next_free; /* index + 1 */
};

enum { EVENTS_PER_ROUND = 32, STOP_HOOKS_MAX = 8 };
enum engine_state { OFF, RUNNING, STOPPING };

static struct {
	pthread_mutex_t lock; /* guards all of this */
	pthread_cond_t calm;  /* `running` or `state` changed, and somebody waits */
	enum engine_state state;
	unsigned holds;
	unsigned waiters;
	pthread_t thread;
	int epoll_fd, doorbell_fd, timer_fd;
	bool asleep; /* without end: a task needs the doorbell */

	void *running;
	bool busy; /* some callback is under way, `running` or not */

	struct slot *slots;
	uint32_t slot_count, free_slot;

	struct rn_timer *timers; /* a pairing heap: the earliest at its root */
	uint64_t armed_ns;       /* when timer_fd will fire; 0: never */

	struct rn_task *tasks, **tasks_end;

	void (*stop_hooks[STOP_HOOKS_MAX])(void);
	unsigned stop_hook_count;
} engine = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.calm = PTHREAD_COND_INITIALIZER,
	.tasks_end = &engine.tasks,
	.epoll_fd = -1,
	.doorbell_fd = -1,
	.timer_fd = -1,
};

static _Thread_local bool inside;

bool rn_engine_inside(void)
{
	return inside;
}

bool rn_engine_is_alive(void)
{
	bool alive;

	pthread_mutex_lock(&engine.lock);
	alive = engine.state != OFF;
	pthread_mutex_unlock(&engine.lock);
	return alive;
}

/* Whoever has the lock keeps the engine from all that it does but sleeping. */
void rn_engine_pause(void)
{
	pthread_mutex_lock(&engine.lock);
	while (engine.busy) {
		engine.waiters++;
		pthread_cond_wait(&engine.calm, &engine.lock);
		engine.waiters--;
	}
}

void rn_engine_resume(void)
{
	pthread_mutex_unlock(&engine.lock);
}

uint64_t rn_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- life ------------------------------------------------------------------------------------ */

static void *run(void *);

static void close_descriptors(void)
{
	rn_fd_close(engine.epoll_fd);
	rn_fd_close(engine.doorbell_fd);
	rn_fd_close(engine.timer_fd);
	engine.epoll_fd = engine.doorbell_fd = engine.timer_fd = -1;
}

/* The rest of a forked child sees an engine that never ran. The tables may have been in mid-change,
 * so they are left behind, not freed. */
static void forget_in_child(void)
{
	pthread_mutex_init(&engine.lock, NULL);
	pthread_cond_init(&engine.calm, NULL);
	engine.state = OFF;
	engine.holds = engine.waiters = 0;
	engine.epoll_fd = engine.doorbell_fd = engine.timer_fd = -1;
	engine.asleep = false;
	engine.running = NULL;
	engine.busy = false;
	engine.slots = NULL;
	engine.slot_count = engine.free_slot = 0;
	engine.timers = NULL;
	engine.armed_ns = 0;
	engine.tasks = NULL;
	engine.tasks_end = &engine.tasks;
	inside = false;
}

static void register_fork_handler(void)
{
	rn_at_fork_child(forget_in_child);
}

static int start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct epoll_event doorbell = {.events = EPOLLIN | EPOLLET};
	sigset_t all, before;
	int rc;

	pthread_once(&once, register_fork_handler);
	engine.epoll_fd = rn_fd_own(epoll_create1(EPOLL_CLOEXEC));
	engine.doorbell_fd = rn_fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	engine.timer_fd = rn_fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
	if (engine.epoll_fd < 0 || engine.doorbell_fd < 0 || engine.timer_fd < 0 ||
	    epoll_ctl(engine.epoll_fd, EPOLL_CTL_ADD, engine.doorbell_fd, &doorbell) ||
	    epoll_ctl(engine.epoll_fd, EPOLL_CTL_ADD, engine.timer_fd, &doorbell)) {
		rc = -errno;
		goto failed;
	}
	engine.armed_ns = 0;
	engine.asleep = false;

	/* The program's signals are for the program's threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&engine.thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (rc)
		goto failed;
	engine.state = RUNNING;
	return 0;

failed:
	close_descriptors();
	return rc;
}

int rn_engine_hold(void)
{
	int rc = 0;

	pthread_mutex_lock(&engine.lock);
	while (engine.state == STOPPING && !inside) {
		engine.waiters++;
		pthread_cond_wait(&engine.calm, &engine.lock);
		engine.waiters--;
	}
	if (engine.state == STOPPING)
		rc = -ECANCELED;
	else if (engine.state == OFF)
		rc = start();
	if (!rc)
		engine.holds++;
	pthread_mutex_unlock(&engine.lock);
	return rc;
}

static void now_off(void)
{
	close_descriptors();
	free(engine.slots);
	engine.slots = NULL;
	engine.slot_count = engine.free_slot = 0;
	engine.state = OFF;
	if (engine.waiters)
		pthread_cond_broadcast(&engine.calm);
}

static void ring(void)
{
	uint64_t one = 1;

	if (engine.asleep) {
		engine.asleep = false;
		/* Cannot fail but by overflow, and then it is readable anyway. */
		ssize_t written = write(engine.doorbell_fd, &one, sizeof one);
		(void)written;
	}
}

void rn_engine_release(void)
{
	pthread_t thread;

	pthread_mutex_lock(&engine.lock);
	assert(engine.holds);
	if (--engine.holds) {
		pthread_mutex_unlock(&engine.lock);
		return;
	}
	engine.state = STOPPING;
	ring();
	thread = engine.thread;
	if (inside) {
		pthread_detach(thread);
		engine.thread = 0; /* the thread itself turns the lights off */
		pthread_mutex_unlock(&engine.lock);
		return;
	}
	pthread_mutex_unlock(&engine.lock);
	pthread_join(thread, NULL);
	pthread_mutex_lock(&engine.lock);
	now_off();
	pthread_mutex_unlock(&engine.lock);
}

void rn_at_engine_stop(void (*fn)(void))
{
	pthread_mutex_lock(&engine.lock);
	assert(engine.stop_hook_count < STOP_HOOKS_MAX);
	engine.stop_hooks[engine.stop_hook_count++] = fn;
	pthread_mutex_unlock(&engine.lock);
}

/* --- the loop -------------------------------------------------------------------------------- */

static void run_tasks(void);
static void run_timers(void);
static bool arm(void);

/* Both with the lock held, around a callback made without it. */
static void begin(void *object)
{
	engine.running = object;
	engine.busy = true;
	pthread_mutex_unlock(&engine.lock);
}

static void end(void)
{
	pthread_mutex_lock(&engine.lock);
	engine.running = NULL;
	engine.busy = false;
	if (engine.waiters)
		pthread_cond_broadcast(&engine.calm);
}

static void dispatch(const struct epoll_event *event)
{
	uint32_t index = (uint32_t)event->data.u64, generation = (uint32_t)(event->data.u64 >> 32);
	struct rn_source *source;

	if (!index) /* the doorbell or the timer: the loop looks after both each round */
		return;
	if (index > engine.slot_count || engine.slots[index - 1].generation != generation)
		return;
	source = engine.slots[index - 1].source;
	if (!source)
		return;
	begin(source);
	source->ready(source, event->events);
	end();
}

static void *run(void *unused)
{
	struct epoll_event events[EVENTS_PER_ROUND];
	int count, timeout_ms;

	(void)unused;
	inside = true;
	pthread_setname_np(pthread_self(), "rdmanet-engine");
	pthread_mutex_lock(&engine.lock);
	for (;;) {
		run_tasks();
		run_timers();
		if (engine.state == STOPPING && !engine.tasks)
			break;
		engine.asleep = arm() && !engine.tasks;
		timeout_ms = engine.asleep ? -1 : 0;
		pthread_mutex_unlock(&engine.lock);
		count = epoll_wait(engine.epoll_fd, events, EVENTS_PER_ROUND, timeout_ms);
		pthread_mutex_lock(&engine.lock);
		engine.asleep = false;
		for (int i = 0; i < count; i++)
			dispatch(&events[i]);
	}
	for (unsigned i = engine.stop_hook_count; i-- > 0;) {
		begin(NULL);
		engine.stop_hooks[i]();
		end();
	}
	if (!engine.thread) /* released by one of our own callbacks: nobody joins */
		now_off();
	pthread_mutex_unlock(&engine.lock);
	return NULL;
}

/* Wait until the object's callback isn't running; inside it, that is now: it may free the object,
 * whose address then means nothing any more. Lock held. */
static void settle(void *object)
{
	if (inside) {
		if (engine.running == object)
			engine.running = NULL;
		return;
	}
	while (engine.running == object) {
		engine.waiters++;
		pthread_cond_wait(&engine.calm, &engine.lock);
		engine.waiters--;
	}
}

/* --- sources --------------------------------------------------------------------------------- */

static int grow_slots(void)
{
	uint32_t count = engine.slot_count ? engine.slot_count * 2 : 16;
	struct slot *slots = realloc(engine.slots, count * sizeof *slots);

	if (!slots)
		return -ENOMEM;
	for (uint32_t i = engine.slot_count; i < count; i++)
		slots[i] = (struct slot){.next_free = i + 1 < count ? i + 2 : 0};
	engine.free_slot = engine.slot_count + 1;
	engine.slots = slots;
	engine.slot_count = count;
	return 0;
}

static void free_slot(struct rn_source *source)
{
	struct slot *slot = &engine.slots[source->slot - 1];

	slot->source = NULL;
	slot->generation++;
	slot->next_free = engine.free_slot;
	engine.free_slot = source->slot;
	source->slot = 0;
}

static struct epoll_event event_of(const struct rn_source *source, uint32_t epoll_events)
{
	uint64_t generation = engine.slots[source->slot - 1].generation;

	return (struct epoll_event){.events = epoll_events, .data.u64 = generation << 32 | source->slot};
}

int rn_source_add(struct rn_source *source, uint32_t epoll_events)
{
	struct epoll_event event;
	int rc = 0;

	pthread_mutex_lock(&engine.lock);
	assert(!source->slot && engine.state != OFF);
	if (!engine.free_slot)
		rc = grow_slots();
	if (!rc) {
		struct slot *slot = &engine.slots[engine.free_slot - 1];

		source->slot = engine.free_slot;
		engine.free_slot = slot->next_free;
		slot->source = source;
		event = event_of(source, epoll_events);
		if (epoll_ctl(engine.epoll_fd, EPOLL_CTL_ADD, source->fd, &event)) {
			rc = -errno;
			free_slot(source);
		}
	}
	pthread_mutex_unlock(&engine.lock);
	return rc;
}

int rn_source_modify(struct rn_source *source, uint32_t epoll_events)
{
	struct epoll_event event;
	int rc = -ENOENT;

	pthread_mutex_lock(&engine.lock);
	if (source->slot) {
		event = event_of(source, epoll_events);
		rc = epoll_ctl(engine.epoll_fd, EPOLL_CTL_MOD, source->fd, &event) ? -errno : 0;
	}
	pthread_mutex_unlock(&engine.lock);
	return rc;
}

void rn_source_remove(struct rn_source *source)
{
	pthread_mutex_lock(&engine.lock);
	if (source->slot) {
		epoll_ctl(engine.epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
		free_slot(source);
	}
	settle(source);
	pthread_mutex_unlock(&engine.lock);
}

/* --- timers ---------------------------------------------------------------------------------- */

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

	if (timer == engine.timers) {
		engine.timers = below;
	} else {
		if (timer->before->child == timer)
			timer->before->child = timer->next;
		else
			timer->before->next = timer->next;
		if (timer->next)
			timer->next->before = timer->before;
		engine.timers = meld(engine.timers, below);
	}
	timer->child = timer->next = timer->before = NULL;
	timer->is_set = false;
}

static void arm_at(uint64_t due_ns)
{
	struct itimerspec when = {.it_value = {.tv_sec = (time_t)(due_ns / 1000000000u),
	                                       .tv_nsec = (long)(due_ns % 1000000000u)}};

	engine.armed_ns = due_ns;
	timerfd_settime(engine.timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

/* See to it that the timerfd fires in time for the earliest; false when that is due already.  A
 * timerfd armed too early (for a timer since cancelled) is left: one idle round is cheaper than
 * a system call for each time-out that never comes. */
static bool arm(void)
{
	uint64_t now_ns, due_ns;

	if (!engine.timers)
		return true;
	due_ns = engine.timers->due_ns;
	now_ns = rn_now_ns();
	if (due_ns <= now_ns)
		return false;
	if (engine.armed_ns <= now_ns || engine.armed_ns > due_ns)
		arm_at(due_ns);
	return true;
}

static void run_timers(void)
{
	uint64_t now_ns;

	if (!engine.timers)
		return;
	now_ns = rn_now_ns(); /* once: timers that fire to set themselves anew don't hold the loop */
	while (engine.timers && engine.timers->due_ns <= now_ns) {
		struct rn_timer *timer = engine.timers;

		take_out(timer);
		begin(timer);
		timer->fire(timer);
		end();
	}
}

void rn_timer_set(struct rn_timer *timer, uint64_t delay_ns)
{
	uint64_t now_ns;

	pthread_mutex_lock(&engine.lock);
	/* Inside: read earlier, the timerfd could look armed that has fired and been seen to meanwhile. */
	now_ns = rn_now_ns();
	if (timer->is_set)
		take_out(timer);
	timer->due_ns = now_ns + delay_ns < now_ns ? UINT64_MAX : now_ns + (delay_ns ? delay_ns : 1);
	timer->is_set = true;
	engine.timers = meld(engine.timers, timer);
	if (!inside && engine.timers == timer && engine.state != OFF &&
	    (engine.armed_ns <= now_ns || engine.armed_ns > timer->due_ns))
		arm_at(timer->due_ns);
	pthread_mutex_unlock(&engine.lock);
}

void rn_timer_cancel(struct rn_timer *timer)
{
	pthread_mutex_lock(&engine.lock);
	settle(timer); /* first: what runs may set it again */
	if (timer->is_set)
		take_out(timer);
	pthread_mutex_unlock(&engine.lock);
}

/* --- tasks ----------------------------------------------------------------------------------- */

static void append_task(struct rn_task *task)
{
	task->next = NULL;
	task->link = engine.tasks_end;
	*engine.tasks_end = task;
	engine.tasks_end = &task->next;
}

static void unlink_task(struct rn_task *task)
{
	*task->link = task->next;
	if (task->next)
		task->next->link = task->link;
	else
		engine.tasks_end = task->link;
	task->next = NULL;
	task->link = NULL;
}

/* Those that are there now; what they post waits for the next round, so that sockets and timers
 * have their turn. */
static void run_tasks(void)
{
	struct rn_task mark = {0};

	if (!engine.tasks)
		return;
	append_task(&mark);
	while (engine.tasks != &mark) {
		struct rn_task *task = engine.tasks;

		unlink_task(task);
		begin(task);
		task->run(task);
		end();
	}
	unlink_task(&mark);
}

void rn_task_post(struct rn_task *task)
{
	pthread_mutex_lock(&engine.lock);
	if (!task->link) {
		append_task(task);
		ring();
	}
	pthread_mutex_unlock(&engine.lock);
}

void rn_task_cancel(struct rn_task *task)
{
	pthread_mutex_lock(&engine.lock);
	settle(task); /* first: what runs may post it again */
	if (task->link)
		unlink_task(task);
	pthread_mutex_unlock(&engine.lock);
}
