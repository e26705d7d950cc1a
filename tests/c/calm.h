/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forking while the device's engine runs.  AddressSanitizer's allocator has locks.  If the engine held one when the test
 * forked, the child would wait for it forever (seen with GCC 12; the C library's own allocator takes care of that).  So
 * the engine runs nothing while a test forks.  Nor is it just being born: a new thread allocates before its first line.
 *
 * Included after harness.h or host_check.h, which say how long EVENTUALLY waits.
 */
#ifndef CALM_H
#define CALM_H

#include <stdatomic.h>
#include <unistd.h>

#include "base/engine.h"

struct calm_turn {
	struct rn_task task;
	atomic_bool is_over;
};

static inline void calm_turn_runs(struct rn_task *task)
{
	atomic_store(&RN_OWNER(task, struct calm_turn, task)->is_over, true);
}

/* Wait until the engine has run a task: it is born, and waits for nobody. */
static inline void await_engine(void)
{
	struct calm_turn turn = {.task.run = calm_turn_runs};

	rn_task_post(&turn.task);
	EVENTUALLY(atomic_load(&turn.is_over));
	rn_task_cancel(&turn.task); /* so that it has returned */
}

static inline pid_t fork_calmly(void)
{
	bool is_alive = rn_engine_is_alive();
	pid_t pid;

	if (is_alive) {
		await_engine();
		rn_engine_pause();
	}
	pid = fork();
	if (is_alive && pid)
		rn_engine_resume();
	return pid;
}

#endif
