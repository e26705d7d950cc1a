/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wait until the engine is there, or have it stand still.
 *
 * Included after harness.h or host_check.h, which say how long EVENTUALLY waits.
 */
#ifndef CALM_H
#define CALM_H

#include <stdatomic.h>
#include <semaphore.h>
#include <stdbool.h>
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

/* Between these two the engine does nothing else. */
static struct {
	struct rn_task task;
	atomic_bool runs;
	sem_t may_end;
} calm_occupant;

static inline void calm_occupant_runs(struct rn_task *task)
{
	(void)task;
	atomic_store(&calm_occupant.runs, true);
	while (sem_wait(&calm_occupant.may_end))
		; /* a signal */
}

static inline void occupy_engine(void)
{
	calm_occupant.task.run = calm_occupant_runs;
	atomic_store(&calm_occupant.runs, false);
	CHECK(!sem_init(&calm_occupant.may_end, 0, 0));
	rn_task_post(&calm_occupant.task);
	EVENTUALLY(atomic_load(&calm_occupant.runs));
}

static inline void release_engine(void)
{
	CHECK(!sem_post(&calm_occupant.may_end));
	rn_task_cancel(&calm_occupant.task);
}

#endif
