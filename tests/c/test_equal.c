/* SPDX-License-Identifier: Apache-2.0 */
/* Whose word counts: is the process at the other end our equal, is it confined, does it still live? No device. */
#define _GNU_SOURCE
#include "base/equal.h"

#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/engine.h"
#include "host_check.h"

/* A process that listens at a Unix socket until it is killed, and our connection to it. */
struct speaker {
	pid_t pid;
	int fd;
	struct ucred peer;
};

/* become: what it does before it listens. */
static struct speaker speaker(void (*become)(void))
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	struct speaker its = {.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
	socklen_t length = sizeof(its.peer);
	int ready[2];
	char byte;

	snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "rdmanet-test-equal/%d", (int)getpid());
	CHECK(its.fd >= 0 && !pipe(ready));
	its.pid = fork();
	CHECK(its.pid >= 0);
	if (!its.pid) {
		int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		become();
		CHECK(!bind(listener, (struct sockaddr *)&name, sizeof(name)) && !listen(listener, 1));
		CHECK(write(ready[1], "l", 1) == 1);
		pause();
	}
	close(ready[1]);
	CHECK(read(ready[0], &byte, 1) == 1);
	close(ready[0]);
	CHECK(!connect(its.fd, (struct sockaddr *)&name, sizeof(name)));
	CHECK(!getsockopt(its.fd, SOL_SOCKET, SO_PEERCRED, &its.peer, &length));
	return its;
}

static void end(const struct speaker *speaker)
{
	close(speaker->fd);
	kill(speaker->pid, SIGKILL);
	CHECK(waitpid(speaker->pid, NULL, 0) == speaker->pid);
}

/* Run in a child: what a process has done to itself it cannot undo. */
static void in_child(void (*test)(void))
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		test();
		CHECK(rn_fd_count() == 0);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
}

static void nothing(void)
{
}

static bool is_free(const struct speaker *speaker)
{
	bool is_confined;

	return rn_is_equal_process(speaker->fd, &speaker->peer, &is_confined) && !is_confined &&
	       !rn_is_confined(&speaker->peer);
}

/* They make what /proc says of a process longer than a page. */
static void have_many_groups(void)
{
	enum { GROUPS = 2000 };
	static gid_t groups[GROUPS];
	struct speaker other = speaker(nothing);

	for (int i = 0; i < GROUPS; i++)
		groups[i] = 1000000000u + (gid_t)i;
	CHECK(!setgroups(GROUPS, groups));
	CHECK(is_free(&other));
	end(&other);
	other = speaker(nothing); /* has them as well */
	CHECK(!setgroups(0, NULL));
	CHECK(is_free(&other));
	end(&other);
}

static void groups_are_no_matter(void)
{
	in_child(have_many_groups);
}

int main(void)
{
	if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)) {
		printf("  confined itself: nothing to see\n");
		return 0;
	}
	if (!geteuid())
		RUN(groups_are_no_matter);
	else
		printf("  not root: no groups\n");
	CHECK(rn_fd_count() == 0);
	return 0;
}
