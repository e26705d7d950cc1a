/* SPDX-License-Identifier: Apache-2.0 */
/* Another process that does as it is told, by single characters over a socket pair: connections between two of them. */
#ifndef CM_OTHER_H
#define CM_OTHER_H

#include "cm_harness.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

struct other {
	pid_t pid;
	int fd;
};

static inline struct other spawn(void (*serve)(int fd))
{
	struct other other;
	int fds[2];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	fflush(NULL);
	other.pid = fork();
	CHECK(other.pid >= 0);
	if (!other.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		on.pd = NULL; /* the parent's */
		serve(fds[1]);
		_exit(0); /* what it has forgotten of its parent looks like a leak */
	}
	close(fds[1]);
	other.fd = fds[0];
	return other;
}

static inline void say(int fd, char what)
{
	CHECK(write(fd, &what, 1) == 1);
}

/* 0: the other end has gone. */
static inline char hear(int fd)
{
	char what = 0;

	return read(fd, &what, 1) == 1 ? what : 0;
}

/* It has been told to end. */
static inline void join(struct other *other)
{
	int status;

	close(other->fd);
	CHECK(waitpid(other->pid, &status, 0) == other->pid && !status);
}

#endif
