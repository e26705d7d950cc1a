/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens in a forked child.
 *
 * Only the forking thread lives on there: no engine, and locks and lists as they were at that
 * instant.  The child must not keep the parent's sockets open (a dead parent would look alive),
 * must not write into memory that the parent shares with its peers, and must be able to open the
 * device afresh.  So one handler closes every descriptor the device owns and lets each module
 * forget what it had; objects of the parent stay as they are, and are refused by their epoch.
 *
 * The owned descriptors are a bitmap, because a bitmap is sound at any instant, and a list isn't.
 *
 * In a build for a sanitizer the engine runs nothing during a fork. Their allocators have locks. That of GCC 12's
 * AddressSanitizer does not take them before a fork, as the C library's does. If the engine held one, the child would
 * wait for it forever.
 */
#include "base/engine.h"

#include <assert.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

enum {
	DESCRIPTORS_MAX = 1 << 20, /* fs.nr_open's default: no process has a higher number */
	HANDLERS_MAX = 32,
};

static _Atomic uint64_t owned[DESCRIPTORS_MAX / 64];
static _Atomic unsigned owned_count, words_used;
static _Atomic unsigned epoch;

static void (*_Atomic handlers[HANDLERS_MAX])(void);
static _Atomic unsigned handler_count;

static void in_child(void)
{
	unsigned words = atomic_load(&words_used), count = atomic_load(&handler_count);

	atomic_fetch_add(&epoch, 1);
	for (unsigned i = 0; i < words; i++) {
		uint64_t bits = atomic_exchange(&owned[i], 0);

		for (; bits; bits &= bits - 1)
			close((int)(i * 64) + __builtin_ctzll(bits));
	}
	atomic_store(&owned_count, 0);
	atomic_store(&words_used, 0);
	for (unsigned i = 0; i < count && i < HANDLERS_MAX; i++) {
		void (*handler)(void) = atomic_load(&handlers[i]);

		if (handler)
			handler();
	}
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
struct turn {
	struct rn_task task;
	sem_t over;
};

static _Thread_local bool paused;

static void turn_runs(struct rn_task *task)
{
	sem_post(&RN_OWNER(task, struct turn, task)->over);
}

/* A new thread allocates before its first line, so it is not enough that no callback runs: the engine has run a task. */
static void before_fork(void)
{
	struct turn turn = {.task.run = turn_runs};

	paused = !rn_engine_inside() && rn_engine_is_alive() && !rn_engine_hold();
	if (!paused)
		return;
	sem_init(&turn.over, 0, 0);
	rn_task_post(&turn.task);
	while (sem_wait(&turn.over))
		;
	rn_task_cancel(&turn.task); /* so that it has returned */
	rn_engine_pause();
}

static void in_parent(void)
{
	if (!paused)
		return;
	rn_engine_resume();
	rn_engine_release();
}
#else
static void (*const before_fork)(void) = NULL, (*const in_parent)(void) = NULL;
#endif

static void install(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

static void ensure_installed(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, install);
}

void rn_at_fork_child(void (*fn)(void))
{
	unsigned i = atomic_fetch_add(&handler_count, 1);

	ensure_installed();
	assert(i < HANDLERS_MAX);
	atomic_store(&handlers[i], fn);
}

int rn_fd_own(int fd)
{
	unsigned word = (unsigned)fd / 64, used;

	ensure_installed();
	if (fd < 0 || fd >= DESCRIPTORS_MAX)
		return fd;
	atomic_fetch_or(&owned[word], UINT64_C(1) << (fd % 64));
	atomic_fetch_add(&owned_count, 1);
	used = atomic_load(&words_used);
	while (used <= word && !atomic_compare_exchange_weak(&words_used, &used, word + 1))
		;
	return fd;
}

/* Disowned first: a fork in between leaks a descriptor into the child; the other way round the
 * child would close a number that somebody else may have got. */
void rn_fd_close(int fd)
{
	if (fd < 0)
		return;
	if (fd < DESCRIPTORS_MAX) {
		uint64_t bit = UINT64_C(1) << (fd % 64);

		if (!(atomic_fetch_and(&owned[fd / 64], ~bit) & bit))
			return; /* of another epoch: closed when this process was forked */
		atomic_fetch_sub(&owned_count, 1);
	}
	close(fd);
}

unsigned rn_fd_count(void)
{
	return atomic_load(&owned_count);
}

unsigned rn_epoch(void)
{
	ensure_installed();
	return atomic_load(&epoch);
}
