/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wait until the engine is there.
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

/* The engine has run a task: it is born, and waits for nobody. */
static inline void await_engine(void)
{
	struct calm_turn turn = {.task.run = calm_turn_runs};

	rn_task_post(&turn.task);
	EVENTUALLY(atomic_load(&turn.is_over));
	rn_task_cancel(&turn.task); /* so that it has returned */
}

#endif
