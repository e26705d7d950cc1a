/* SPDX-License-Identifier: Apache-2.0 */
/* Bus errors: the handler.  bus_error.h has the theory. */
#define _GNU_SOURCE
#include "bus_error.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

_Thread_local struct rn_bus *rn_bus_under_way RN_BUS_TLS;

static struct sigaction before;

/* Sent by a process, or news of bad memory that nobody touches yet: no instruction waits for an answer. */
static bool is_asynchronous(const siginfo_t *info)
{
	return info->si_code <= 0 || info->si_code == BUS_MCEERR_AO;
}

/*
 * A handler that was set after ours has had the fault, set ours again, and passed the fault on by raising the signal anew,
 * as Python's faulthandler does.  Between rn_bus_begin() and rn_bus_end() this thread raises nothing else.
 */
static bool is_raised_again(const siginfo_t *info)
{
	return info->si_code == SI_TKILL && info->si_pid == getpid();
}

/* Do as the kernel would if we were not here. */
static void pass_on(int number, siginfo_t *info, void *context)
{
	struct sigaction handler = before;
	sigset_t mask = handler.sa_mask, outside;

	if (!(handler.sa_flags & SA_SIGINFO) && (handler.sa_handler == SIG_DFL || handler.sa_handler == SIG_IGN)) {
		if (handler.sa_handler == SIG_IGN && is_asynchronous(info))
			return;
		/* Where an instruction has failed it does so again, and the process ends there. */
		signal(number, SIG_DFL);
		if (is_asynchronous(info))
			raise(number);
		return;
	}
	if (handler.sa_flags & SA_RESETHAND)
		before = (struct sigaction){.sa_handler = SIG_DFL};
	if (!(handler.sa_flags & SA_NODEFER))
		sigaddset(&mask, number);
	pthread_sigmask(SIG_BLOCK, &mask, &outside);
	if (handler.sa_flags & SA_SIGINFO)
		handler.sa_sigaction(number, info, context);
	else
		handler.sa_handler(number);
	pthread_sigmask(SIG_SETMASK, &outside, NULL);
}

static void handle(int number, siginfo_t *info, void *context)
{
	struct rn_bus *bus = rn_bus_under_way;

	if (!bus || (is_asynchronous(info) && !is_raised_again(info))) {
		pass_on(number, info, context);
		return;
	}
	rn_bus_under_way = NULL;
	bus->lost = is_raised_again(info) ? NULL : info->si_addr;
	pthread_sigmask(SIG_SETMASK, &((ucontext_t *)context)->uc_sigmask, NULL); /* the jump restores no mask */
	siglongjmp(bus->back, 1);
}

static void watch(void)
{
	/* Not blocked in the handler, so that one which ends the process by raising it again can. */
	struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | SA_RESTART};

	sigemptyset(&action.sa_mask);
	sigaction(SIGBUS, NULL, &before); /* a signal may come as soon as ours is set */
	sigaction(SIGBUS, &action, &before);
}

void rn_bus_watch(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, watch);
}

bool rn_bus_copy(void *to, const void *from, size_t length, const void **lost)
{
	struct rn_bus bus;

	if (sigsetjmp(bus.back, 0)) {
		*lost = bus.lost;
		return false;
	}
	rn_bus_begin(&bus);
	memmove(to, from, length);
	rn_bus_end();
	return true;
}
