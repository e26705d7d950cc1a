/* SPDX-License-Identifier: Apache-2.0 */
/* To whom a thread that polls in vain leaves its CPU: to other processes, not to a thread that waits for its lock, and
 * to nobody if it sleeps anyhow. */
#include "pair.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "base/fence.h"
#include "base/offer.h"

static cpu_set_t all;

static void share_one_cpu(void)
{
	cpu_set_t one;
	int cpu = 0;

	CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
	while (!CPU_ISSET(cpu, &all))
		cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
}

/* How often this thread has yielded: what the scheduler makes of it depends on who else wants the CPU. */
static _Thread_local long yields;

int sched_yield(void)
{
	yields++;
	return (int)syscall(SYS_sched_yield);
}

/* Poll until so many polls running have yielded nothing. */
static void poll_until_it_keeps_its_cpu(int polls)
{
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	struct ibv_wc wc;
	int running;

	for (running = 0; running < polls; running++) {
		long before = yields;

		CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
		if (yields == before)
			continue;
		running = -1;
		CHECK(now_ns() < limit);
	}
}

static atomic_bool is_held, has_begun;

static void *want_the_lock(void *unused)
{
	atomic_store(&has_begun, true);
	while (atomic_load(&is_held))
		;
	return unused;
}

/* As soon as that thread is seen to have run in its place. Until then, and afterwards, other processes may want the CPU,
 * and get it. */
static void test_a_lock_held_while_polling(void)
{
	enum { POLLS = 60000 }; /* who has seen nobody run yields after 2048 */
	pthread_t other;

	open_pair();
	share_one_cpu();
	atomic_store(&is_held, true);
	CHECK_EQ(pthread_create(&other, NULL, want_the_lock, NULL), 0);
	EVENTUALLY(atomic_load(&has_begun));
	poll_until_it_keeps_its_cpu(POLLS);
	atomic_store(&is_held, false);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
	close_pair();
}

/* This process has one thread. ThreadSanitizer adds one, which computes now and then, on whichever CPU; and a slower
 * program loses more of its time to the host, which counts as its own. */
#ifdef RN_TSAN
enum { MAY_BE_OURSELVES = true };
#else
enum { MAY_BE_OURSELVES = false };
#endif

/* Offer the CPU until somebody takes it. */
static enum rn_taker taker(void)
{
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	enum rn_taker found;

	while ((found = rn_offer_cpu()) == RN_TAKER_NOBODY || (MAY_BE_OURSELVES && found == RN_TAKER_OURSELVES))
		CHECK(now_ns() < limit);
	return found;
}

static pid_t computing_child(void)
{
	pid_t parent = getpid(), child = fork();

	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (getppid() == parent) /* it may have gone before that */
			;
		_exit(0);
	}
	CHECK(child > 0);
	return child;
}

static void end(pid_t child)
{
	CHECK_EQ(kill(child, SIGKILL), 0);
	CHECK_EQ(waitpid(child, NULL, 0), child);
	CHECK_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

static void test_another_process(void)
{
	pid_t child;
	int times;

	share_one_cpu();
	child = computing_child();
	for (times = 0; times < 10; times++)
		CHECK_EQ(taker(), RN_TAKER_OTHERS);
	end(child);
}

/* It would run again only after all others, but one that is woken comes first. */
static void test_a_thread_that_arms_and_sleeps_keeps_its_cpu(void)
{
	pid_t child;
	int times;

	open_pair();
	share_one_cpu();
	child = computing_child();
	CHECK_EQ(taker(), RN_TAKER_OTHERS);
	for (times = 0; times < 10; times++) {
		CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
		CHECK_EQ(rn_offer_cpu(), RN_TAKER_NOBODY);
	}
	CHECK_EQ(taker(), RN_TAKER_OTHERS); /* a second later */
	end(child);
	close_pair();
}

int main(void)
{
	RUN(test_a_lock_held_while_polling);
	RUN(test_another_process);
	RUN(test_a_thread_that_arms_and_sleeps_keeps_its_cpu);
	expect_live_nothing();
	return 0;
}
