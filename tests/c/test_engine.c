/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: its life, and the promise that removed means removed. */
#define _GNU_SOURCE
#include "base/engine_inside.h"
#include "host_check.h"


#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

struct probe {
	struct rn_source source;
	struct rn_timer timer;
	struct rn_task task;
	_Atomic int count, stage;
	_Atomic uint64_t at_ns;
};

#define PROBE(pointer, member) RN_OWNER(pointer, struct probe, member)

static void count_task(struct rn_task *task)
{
	CHECK(rn_engine_inside());
	PROBE(task, task)->count++;
}

static void count_timer(struct rn_timer *timer)
{
	CHECK(rn_engine_inside());
	PROBE(timer, timer)->at_ns = rn_now_ns();
	PROBE(timer, timer)->count++;
}

static void count_source(struct rn_source *source, uint32_t events)
{
	uint64_t value;

	CHECK(events & EPOLLIN);
	CHECK(read(source->fd, &value, sizeof value) == sizeof value);
	PROBE(source, source)->count++;
}

static void ring(int fd)
{
	uint64_t one = 1;

	CHECK(write(fd, &one, sizeof one) == sizeof one);
}

static unsigned threads_before; /* a sanitizer may have one of its own */

static void lives_while_held(void)
{
	unsigned fds = descriptors();

	for (int i = 0; i < 100; i++) {
		CHECK(!rn_engine_hold());
		CHECK(!rn_engine_hold());
		EVENTUALLY(threads() == threads_before + 1); /* the last round's may not be gone yet */
		rn_engine_release();
		CHECK(threads() == threads_before + 1);
		rn_engine_release();
		CHECK(descriptors() == fds);
	}
	EVENTUALLY(threads() == threads_before);
	CHECK(rn_fd_count() == 0);
}

static void *hold_and_release(void *unused)
{
	for (int i = 0; i < 300; i++) {
		CHECK(!rn_engine_hold());
		rn_engine_release();
	}
	return unused;
}

static void holds_race(void)
{
	pthread_t crowd[4];

	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&crowd[i], NULL, hold_and_release, NULL));
	for (int i = 0; i < 4; i++)
		pthread_join(crowd[i], NULL);
	EVENTUALLY(threads() == threads_before);
	CHECK(rn_fd_count() == 0);
}

static void release_inside(struct rn_task *task)
{
	rn_engine_release();
	PROBE(task, task)->count++;
}

static void released_by_itself(void)
{
	static struct probe probe = {.task.run = release_inside};

	for (int i = 0; i < 50; i++) {
		probe.count = 0;
		CHECK(!rn_engine_hold());
		rn_task_post(&probe.task);
		EVENTUALLY(probe.count == 1);
	}
	EVENTUALLY(threads() == threads_before);
	EVENTUALLY(rn_fd_count() == 0);
}

static void signals_are_not_its_own(void)
{
	sigset_t before;

	CHECK(!rn_engine_hold());
	CHECK(!pthread_sigmask(SIG_BLOCK, NULL, &before));
	CHECK(!sigismember(&before, SIGUSR1));
	DIR *dir = opendir("/proc/self/task");
	struct dirent *entry;
	while ((entry = readdir(dir))) {
		char path[300], line[256];
		unsigned long long blocked = 0;

		if (atoi(entry->d_name) == 0 || atoi(entry->d_name) == getpid())
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
		FILE *status = fopen(path, "re");
		while (fgets(line, sizeof line, status))
			sscanf(line, "SigBlk: %llx", &blocked);
		fclose(status);
		CHECK(blocked & (1ull << (SIGUSR1 - 1)));
		CHECK(blocked & (1ull << (SIGINT - 1)));
	}
	closedir(dir);
	rn_engine_release();
}

static void sleeps_when_idle(void)
{
	uint64_t before;

	CHECK(!rn_engine_hold());
	usleep(2000);
	before = cpu_ns();
	usleep(100000);
	CHECK(cpu_ns() - before < 2000000);
	rn_engine_release();
}

/* Four fates by turns.  What must not fire is due in a minute: on a busy machine a test takes its time between
 * two lines, so a timer that was due in a millisecond could have fired before it was cancelled or moved. */
static void timers_fire_in_order_and_in_time(void)
{
	enum { COUNT = 500, CANCELLED = 0, SOON, SOONER, LATER, FATES };
	static struct probe probes[COUNT];
	const uint64_t minute = 60000000000u;

	CHECK(!rn_engine_hold());
	for (int i = 0; i < COUNT; i++) {
		probes[i] = (struct probe){.timer.fire = count_timer};
		rn_timer_set(&probes[i].timer, (i % FATES == SOON ? 1000000u : minute) + (uint64_t)((i * 7919) % COUNT) * 20000u);
	}
	for (int i = 0; i < COUNT; i++) {
		if (i % FATES == CANCELLED)
			rn_timer_cancel(&probes[i].timer);
		else if (i % FATES == SOONER)
			rn_timer_set(&probes[i].timer, (uint64_t)(i * 104729 % COUNT) * 10000u);
		else if (i % FATES == LATER)
			rn_timer_set(&probes[i].timer, 2 * minute);
	}
	for (int i = 0; i < COUNT; i++) {
		bool fires = i % FATES == SOON || i % FATES == SOONER;

		if (fires)
			EVENTUALLY(probes[i].count);
		else
			rn_timer_cancel(&probes[i].timer);
		CHECK(probes[i].count == fires);
		CHECK(!fires || probes[i].at_ns >= probes[i].timer.due_ns);
	}
	rn_engine_release();
}

/* A tenth of a millisecond is not rounded to one. A busy machine may take longer, but not each time. */
static void short_timers_are_short(void)
{
	static struct probe probe = {.timer.fire = count_timer};
	uint64_t took = UINT64_MAX;

	CHECK(!rn_engine_hold());
	for (int tries = 0; took >= 1000000; tries++) {
		uint64_t began = rn_now_ns();

		CHECK(tries < 5000);
		probe.count = 0;
		rn_timer_set(&probe.timer, 100000);
		while (!probe.count)
			usleep(20);
		took = probe.at_ns - began;
		CHECK(took >= 100000);
	}
	rn_engine_release();
}

static void sources_and_tasks(void)
{
	static struct probe probe;

	probe = (struct probe){.source.ready = count_source, .task.run = count_task};
	CHECK(!rn_engine_hold());
	CHECK((probe.source.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0);
	CHECK(!rn_source_add(&probe.source, EPOLLIN));
	for (int i = 1; i <= 20; i++) {
		ring(probe.source.fd);
		EVENTUALLY(probe.count == i);
	}
	CHECK(!rn_source_modify(&probe.source, 0));
	ring(probe.source.fd);
	usleep(3000);
	CHECK(probe.count == 20);
	CHECK(!rn_source_modify(&probe.source, EPOLLIN));
	EVENTUALLY(probe.count == 21);
	rn_source_remove(&probe.source);
	rn_source_remove(&probe.source);
	ring(probe.source.fd);
	rn_task_post(&probe.task);
	EVENTUALLY(probe.count == 22);
	CHECK(rn_source_modify(&probe.source, 0) == -ENOENT);
	close(probe.source.fd);
	CHECK(rn_source_add(&probe.source, EPOLLIN) == -EBADF);
	rn_engine_release();
}

/* One source's callback removes and frees the others of the same batch. */
static struct probe *batch[8];
static _Atomic int batch_ran;

static void remove_others(struct rn_source *source, uint32_t events)
{
	(void)events;
	batch_ran++;
	for (int i = 0; i < 8; i++) {
		rn_source_remove(&batch[i]->source);
		close(batch[i]->source.fd);
		if (&batch[i]->source != source)
			free(batch[i]);
	}
	free(PROBE(source, source));
}

static void hold_up(struct rn_task *task)
{
	struct probe *probe = PROBE(task, task);

	probe->stage = 1;
	while (probe->stage == 1)
		usleep(100);
	probe->count++;
	probe->stage = 3;
}

static void removed_in_the_same_batch(void)
{
	static struct probe stopper = {.task.run = hold_up};

	CHECK(!rn_engine_hold());
	for (int round = 0; round < 20; round++) {
		batch_ran = 0;
		stopper.stage = 0;
		rn_task_post(&stopper.task);
		EVENTUALLY(stopper.stage == 1);
		for (int i = 0; i < 8; i++) {
			batch[i] = calloc(1, sizeof *batch[i]);
			batch[i]->source.ready = remove_others;
			batch[i]->source.fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
			CHECK(!rn_source_add(&batch[i]->source, EPOLLIN));
		}
		stopper.stage = 2;
		EVENTUALLY(batch_ran == 1);
	}
	usleep(2000);
	CHECK(batch_ran == 1);
	rn_engine_release();
}

static void *let_go_later(void *stage)
{
	usleep(20000);
	*(_Atomic int *)stage = 2;
	return NULL;
}

static void cancel_waits_for_the_callback(void)
{
	static struct probe probe = {.task.run = hold_up};
	pthread_t helper;

	CHECK(!rn_engine_hold());
	rn_task_post(&probe.task);
	EVENTUALLY(probe.stage == 1);
	CHECK(!pthread_create(&helper, NULL, let_go_later, &probe.stage));
	rn_task_cancel(&probe.task);
	CHECK(probe.stage == 3 && probe.count == 1);
	pthread_join(helper, NULL);
	rn_engine_release();
}

static void repost(struct rn_task *task)
{
	PROBE(task, task)->count++;
	rn_task_post(task);
}

static void a_task_that_posts_itself_starves_nobody(void)
{
	static struct probe greedy = {.task.run = repost}, timer = {.timer.fire = count_timer};

	CHECK(!rn_engine_hold());
	rn_task_post(&greedy.task);
	rn_timer_set(&timer.timer, 1000000);
	EVENTUALLY(timer.count == 1);
	CHECK(greedy.count > 1);
	rn_task_cancel(&greedy.task);
	rn_engine_release();
}

static bool sleeps(void)
{
	bool asleep;

	pthread_mutex_lock(&rn_engine.lock);
	asleep = rn_engine.asleep;
	pthread_mutex_unlock(&rn_engine.lock);
	return asleep;
}

/* Whether somebody waits until nothing runs in the engine's place: the engine itself, in the test below. */
static bool somebody_waits(void)
{
	bool waits;

	pthread_mutex_lock(&rn_engine.lock);
	waits = rn_engine.waiters > 0;
	pthread_mutex_unlock(&rn_engine.lock);
	return waits;
}

static pthread_t runner;

static void hold_up_here(struct rn_task *task)
{
	CHECK(rn_engine_inside());
	runner = pthread_self();
	hold_up(task);
}

static void *run_here(void *task)
{
	rn_task_queue(task);
	rn_tasks_run_here();
	CHECK(!rn_engine_inside());
	return NULL;
}

/* Another thread takes the engine's place; the engine, woken meanwhile, waits for it, and so does who cancels. */
static void somebody_stands_in(void)
{
	static struct probe here = {.task.run = hold_up_here}, there = {.task.run = count_task};
	pthread_t helper;

	CHECK(!rn_engine_hold());
	EVENTUALLY(sleeps());
	CHECK(!pthread_create(&helper, NULL, run_here, &here.task));
	EVENTUALLY(here.stage == 1);
	rn_task_post(&there.task);
	EVENTUALLY(somebody_waits());
	CHECK(there.count == 0);
	CHECK(!pthread_cancel(helper)); /* not in the middle of a task */
	here.stage = 2;
	rn_task_cancel(&here.task);
	CHECK(here.stage == 3 && here.count == 1);
	EVENTUALLY(there.count == 1);
	pthread_join(helper, NULL);
	CHECK(pthread_equal(runner, helper));
	rn_engine_release();
}

static struct probe late = {.timer.fire = count_timer};

static void set_timer(struct rn_task *task)
{
	PROBE(task, task)->count++;
	rn_timer_set(&late.timer, 1000000);
}

/* The engine sleeps on, and wakes for the timer that was set in its place. */
static void timers_are_set_in_its_place(void)
{
	static struct probe probe = {.task.run = set_timer};

	CHECK(!rn_engine_hold());
	EVENTUALLY(sleeps());
	run_here(&probe.task);
	CHECK(probe.count == 1);
	EVENTUALLY(late.count == 1);
	rn_engine_release();
}

static _Atomic int stopped;

static void on_stop(void)
{
	CHECK(rn_engine_inside());
	stopped++;
}

static _Atomic int forked;

static void on_fork(void)
{
	forked++;
}

static void a_child_starts_afresh(void)
{
	int status, fd = rn_fd_own(eventfd(0, EFD_CLOEXEC));
	unsigned epoch = rn_epoch();
	pid_t child;

	rn_at_fork_child(on_fork);
	CHECK(!rn_engine_hold());
	fflush(NULL);
	child = fork();
	if (!child) {
		static struct probe probe = {.task.run = count_task};

		CHECK(forked == 1 && rn_epoch() == epoch + 1 && rn_fd_count() == 0);
		CHECK(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
		rn_fd_close(fd); /* nothing: it isn't ours any more */
		CHECK(!rn_engine_hold());
		rn_task_post(&probe.task);
		EVENTUALLY(probe.count == 1);
		rn_engine_release();
		CHECK(rn_fd_count() == 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(forked == 0 && rn_epoch() == epoch);
	CHECK(fcntl(fd, F_GETFD) != -1);
	rn_fd_close(fd);
	rn_engine_release();
	CHECK(rn_fd_count() == 0);
}

int main(void)
{
	CHECK(!rn_engine_hold());
	rn_engine_release();
	threads_before = threads();
	RUN(lives_while_held);
	RUN(holds_race);
	RUN(released_by_itself);
	RUN(signals_are_not_its_own);
	RUN(sleeps_when_idle);
	RUN(timers_fire_in_order_and_in_time);
	RUN(short_timers_are_short);
	RUN(sources_and_tasks);
	RUN(removed_in_the_same_batch);
	RUN(cancel_waits_for_the_callback);
	RUN(a_task_that_posts_itself_starves_nobody);
	RUN(somebody_stands_in);
	RUN(timers_are_set_in_its_place);
	RUN(a_child_starts_afresh);
	rn_at_engine_stop(on_stop);
	CHECK(!rn_engine_hold());
	rn_engine_release();
	CHECK(stopped == 1);
	return 0;
}
