/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's tasks: a list, in the order in which they were posted. */
#include "base/engine_inside.h"

static void append_task(struct rn_task *task)
{
	task->next = NULL;
	task->link = rn_engine.tasks_end;
	*rn_engine.tasks_end = task;
	rn_engine.tasks_end = &task->next;
}

static void unlink_task(struct rn_task *task)
{
	*task->link = task->next;
	if (task->next)
		task->next->link = task->link;
	else
		rn_engine.tasks_end = task->link;
	task->next = NULL;
	task->link = NULL;
}

/* Those that are there now; what they post waits for the next round, so that sockets and timers
 * have their turn. */
void rn_tasks_run(void)
{
	static struct rn_task mark; /* one thread at a time runs tasks, and no task runs others */

	if (!rn_engine.tasks)
		return;
	append_task(&mark);
	while (rn_engine.tasks != &mark) {
		struct rn_task *task = rn_engine.tasks;

		unlink_task(task);
		rn_engine_begin(task);
		task->run(task);
		rn_engine_end();
	}
	unlink_task(&mark);
}

void rn_task_post(struct rn_task *task)
{
	pthread_mutex_lock(&rn_engine.lock);
	if (!task->link) {
		append_task(task);
		rn_engine_wakeup();
	}
	pthread_mutex_unlock(&rn_engine.lock);
}

void rn_task_queue(struct rn_task *task)
{
	pthread_mutex_lock(&rn_engine.lock);
	if (!task->link)
		append_task(task);
	pthread_mutex_unlock(&rn_engine.lock);
}

void rn_tasks_wake(void)
{
	bool must_wake;

	pthread_mutex_lock(&rn_engine.lock);
	must_wake = rn_engine.tasks && rn_engine.asleep;
	if (must_wake)
		rn_engine.asleep = false;
	pthread_mutex_unlock(&rn_engine.lock);
	if (must_wake)
		rn_engine_ring();
}

enum { ROUNDS_HERE = 3 }; /* what is heard is handled by a task, and so is the answer */

void rn_tasks_run_here(void)
{
	bool stands_in;
	int cancel;

	/* A task may call what is a cancellation point, and the engine would wait for its end for ever. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&rn_engine.lock);
	stands_in = rn_engine.tasks && rn_engine_stand_in();
	if (stands_in) {
		for (int i = 0; i < ROUNDS_HERE && rn_engine.tasks && rn_engine.asleep; i++)
			rn_tasks_run();
		rn_engine_stand_down();
	}
	pthread_mutex_unlock(&rn_engine.lock);
	pthread_setcancelstate(cancel, NULL);
	if (!stands_in)
		rn_tasks_wake();
}

void rn_task_cancel(struct rn_task *task)
{
	pthread_mutex_lock(&rn_engine.lock);
	rn_engine_settle(task); /* first: what runs may post it again */
	if (task->link)
		unlink_task(task);
	pthread_mutex_unlock(&rn_engine.lock);
}
