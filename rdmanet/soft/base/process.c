/* SPDX-License-Identifier: Apache-2.0 */
/* What a process has one of.  That another process has died is noticed in peer/peer.c. */
#include "base/fence.h"
#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#ifdef RN_TSAN
_Atomic unsigned rn_fence_word;
#endif

unsigned rn_process;
pthread_mutex_t rn_process_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t rn_contexts_lock = PTHREAD_MUTEX_INITIALIZER;
struct rn_list rn_contexts = {&rn_contexts, &rn_contexts};

/* All of its threads, and whether or not its parent has heard of it. */
static bool is_over(int pid)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);
	struct pollfd ended = {.fd = fd, .events = POLLIN};
	bool over;

	if (fd < 0) /* an old kernel: a process whose parent hasn't heard of its end counts as alive */
		return kill(pid, 0) && errno == ESRCH;
	over = poll(&ended, 1, 0) > 0;
	close(fd);
	return over;
}

/* The letter behind the name, which may have brackets of its own. */
static char state_of(int pid)
{
	char path[32], text[512], *end;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	got = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (fd >= 0)
		close(fd);
	if (got <= 0)
		return '?';
	text[got] = '\0';
	end = strrchr(text, ')');
	return end && end[1] ? end[2] : '?';
}

enum rn_life rn_process_life(int pid)
{
	if (is_over(pid))
		return RN_LIFE_OVER;
	return state_of(pid) == 'T' ? RN_LIFE_STOPPED : RN_LIFE_UNKNOWN;
}

void rn_process_forked(void)
{
	rn_process++;
	pthread_mutex_init(&rn_process_lock, NULL);
	pthread_mutex_init(&rn_contexts_lock, NULL);
	rn_list_init(&rn_contexts);
}
