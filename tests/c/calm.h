/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forking while the device's engine runs.  AddressSanitizer's allocator has locks.  If the engine held one when the test
 * forked, the child would wait for it forever (seen with GCC 12; the C library's own allocator takes care of that).  So
 * the engine runs nothing while a test forks.  Nor is it just being born: a new thread allocates before its first line.
 */
#ifndef CALM_H
#define CALM_H

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/engine.h"

struct calm_birth {
	struct rn_task task;
	atomic_bool is_over;
};

static inline void calm_born(struct rn_task *task)
{
	atomic_store(&RN_OWNER(task, struct calm_birth, task)->is_over, true);
}

static inline void await_birth(void)
{
	struct calm_birth birth = {.task.run = calm_born};

	rn_task_post(&birth.task);
	while (!atomic_load(&birth.is_over))
		sched_yield();
	rn_task_cancel(&birth.task); /* so that it has returned */
}

static inline pid_t fork_calmly(void)
{
	bool is_alive = rn_engine_is_alive();
	pid_t pid;

	if (is_alive) {
		await_birth();
		rn_engine_pause();
	}
	pid = fork();
	if (is_alive && pid)
		rn_engine_resume();
	return pid;
}

#endif
