/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two processes: the test, and a child that serves it.  Both open the device after the fork, tell
 * each other their addresses over a socket pair, and connect.
 */
#ifndef PROCESSES_H
#define PROCESSES_H

#include "harness.h"

#include <sys/syscall.h>
#include <sys/uio.h>

#include "calm.h"

struct other {
	pid_t pid;
	int fd;
	struct address address;
};

static inline void tell(int fd, const void *data, size_t size)
{
	CHECK_EQ(write(fd, data, size), (ssize_t)size);
}

/* False: the other end has gone. */
static inline bool hear(int fd, void *data, size_t size)
{
	ssize_t got;

	CHECK(readable(fd, LIMIT_MS));
	got = recv(fd, data, size, MSG_WAITALL);
	if (got <= 0)
		return false;
	CHECK_EQ(got, (ssize_t)size);
	return true;
}

/* A point both have come to. */
static inline void meet(int fd)
{
	char mark = 'm';

	tell(fd, &mark, 1);
	CHECK(hear(fd, &mark, 1));
}

/* Start a child that runs serve() and exits. */
static inline struct other spawn(void (*serve)(int fd))
{
	struct other other = {0};
	int fds[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	fflush(NULL);
	other.pid = fork();
	CHECK(other.pid >= 0);
	if (!other.pid) {
		close(fds[0]);
		serve(fds[1]);
		exit(0);
	}
	close(fds[1]);
	other.fd = fds[0];
	return other;
}

static inline void join(struct other *other)
{
	int status, pidfd = (int)syscall(SYS_pidfd_open, other->pid, 0);

	close(other->fd);
	CHECK(pidfd < 0 || readable(pidfd, LIMIT_MS)); /* it has ended */
	close(pidfd);
	CHECK_EQ(waitpid(other->pid, &status, 0), other->pid);
	if (WIFSIGNALED(status))
		fprintf(stderr, "the other process died of signal %d\n", WTERMSIG(status));
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void join_killed(struct other *other)
{
	kill(other->pid, SIGKILL);
	close(other->fd);
	CHECK_EQ(waitpid(other->pid, NULL, 0), other->pid);
}

/* What our children are to us, our peers are to us, by the same user's right: does the kernel permit that? */
static inline bool may_reach_others(void)
{
	static char byte, copy;
	struct iovec ours = {&copy, 1}, theirs = {&byte, 1};
	int fds[2];
	bool may;
	pid_t pid;

	CHECK_EQ(pipe(fds), 0);
	pid = fork();
	if (!pid) {
		close(fds[1]);
		_exit(read(fds[0], &copy, 1)); /* until we close it */
	}
	may = process_vm_readv(pid, &ours, 1, &theirs, 1, 0) == 1;
	close(fds[0]);
	close(fds[1]);
	CHECK_EQ(waitpid(pid, NULL, 0), pid);
	return may;
}

/* Exchange addresses and connect; both sides do this. */
static inline struct address connect_over_with(struct end *end, int fd, struct ibv_qp_attr attr)
{
	struct address mine = end_address(end), theirs;

	tell(fd, &mine, sizeof(mine));
	CHECK(hear(fd, &theirs, sizeof(theirs)));
	attr.dest_qp_num = theirs.qpn;
	connect_with(end->qp, attr);
	meet(fd);
	return theirs;
}

static inline struct address connect_over(struct end *end, int fd)
{
	return connect_over_with(end, fd, default_attr(0));
}

#endif
