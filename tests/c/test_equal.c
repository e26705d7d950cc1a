/* SPDX-License-Identifier: Apache-2.0 */
/* Whose word counts: is the process at the other end our equal, is it confined, does it still live? No device. */
#define _GNU_SOURCE
#include "base/equal.h"

#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/engine.h"
#include "host_check.h"

/* A process that listens at a Unix socket until we leave, and our connection to it. */
struct speaker {
	pid_t pid;
	int fd;
	struct ucred peer;
};

/* What it does before it listens, and then. */
static struct speaker speaker(void (*before)(void), void (*after)(void))
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	struct speaker its;
	socklen_t length = sizeof(its.peer);
	int ready[2];
	static int count;
	char byte;

	snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "rdmanet-test-equal/%d/%d", (int)getpid(), count++);
	CHECK(!pipe(ready));
	its.pid = fork();
	CHECK(its.pid >= 0);
	if (!its.pid) {
		int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		before();
		CHECK(!bind(listener, (struct sockaddr *)&name, sizeof(name)) && !listen(listener, 1));
		after();
		CHECK(write(ready[1], "l", 1) == 1);
		listener = accept(listener, NULL, NULL);
		_exit(read(listener, &byte, 1) > 0); /* at its end */
	}
	close(ready[1]);
	CHECK(read(ready[0], &byte, 1) == 1);
	close(ready[0]);
	its.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(its.fd >= 0);
	CHECK(!connect(its.fd, (struct sockaddr *)&name, sizeof(name)));
	CHECK(!getsockopt(its.fd, SOL_SOCKET, SO_PEERCRED, &its.peer, &length));
	return its;
}

static void end(const struct speaker *speaker)
{
	close(speaker->fd);
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

	return rn_is_equal_process(&speaker->peer, &is_confined) && !is_confined &&
	       !rn_is_confined(&speaker->peer);
}

/* They make what /proc says of a process longer than a page. */
static void have_many_groups(void)
{
	enum { GROUPS = 2000 };
	static gid_t groups[GROUPS];
	struct speaker other = speaker(nothing, nothing);

	for (int i = 0; i < GROUPS; i++)
		groups[i] = 10000 + (gid_t)i;
	CHECK(!setgroups(GROUPS, groups));
	CHECK(is_free(&other));
	end(&other);
	other = speaker(nothing, nothing); /* has them as well */
	CHECK(!setgroups(0, NULL));
	CHECK(is_free(&other));
	end(&other);
}

static void groups_are_no_matter(void)
{
	in_child(have_many_groups);
}

/* Its child has the socket, and answers. */
static void leave(void)
{
	if (fork())
		_exit(0);
}

static void who_has_ended_is_nobody(void)
{
	struct speaker other = speaker(nothing, nothing), orphan;

	CHECK(rn_still_lives(other.fd, &other.peer));
	end(&other);
	orphan = speaker(nothing, leave);
	CHECK(orphan.peer.pid == orphan.pid);
	CHECK(waitpid(orphan.pid, NULL, 0) == orphan.pid);
	CHECK(!rn_still_lives(orphan.fd, &orphan.peer));
	close(orphan.fd);
}

static void give_up_new_privileges(void)
{
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

/* It allows everything. */
static void add_filter(void)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = {.len = 1, .filter = &allow};

	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
}

static bool is_confined_equal(const struct speaker *speaker)
{
	bool is_confined;

	return rn_is_equal_process(&speaker->peer, &is_confined) && is_confined && rn_is_confined(&speaker->peer);
}

/* Who has it may have Landlock, too, which does not show: so it counts also where we have it ourselves. */
static void have_no_new_privileges(void)
{
	struct speaker other;

	for (int ours = 0; ours < 2; ours++) {
		other = speaker(give_up_new_privileges, nothing);
		CHECK(is_confined_equal(&other));
		end(&other);
		give_up_new_privileges();
	}
}

/* Without no_new_privs only root can have them. */
static void have_filters(void)
{
	struct speaker other = speaker(add_filter, nothing);

	CHECK(is_confined_equal(&other));
	end(&other);
	add_filter(); /* as all have it in a container */
	other = speaker(nothing, nothing);
	CHECK(is_free(&other));
	end(&other);
	other = speaker(add_filter, nothing); /* a second one */
	CHECK(is_confined_equal(&other));
	end(&other);
}

static void no_new_privileges_may_hide_a_sandbox(void)
{
	in_child(have_no_new_privileges);
}

static void filters_are_counted(void)
{
	in_child(have_filters);
}

enum { HIGH = 5000 }; /* a descriptor */
static struct sockaddr_in place;

static void hold_the_listener_high(void)
{
	socklen_t length = sizeof(place);
	struct rlimit limit;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	place = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	CHECK(!bind(fd, (struct sockaddr *)&place, sizeof(place)) && !listen(fd, 1));
	CHECK(!getsockname(fd, (struct sockaddr *)&place, &length));
	CHECK(!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_max > HIGH);
	limit.rlim_cur = HIGH + 1;
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	CHECK(dup2(fd, HIGH) == HIGH);
	close(fd);
}

static void close_it(void)
{
	close(HIGH);
}

/* Whatever its number is: only those that are open are looked at. */
static void a_listener_is_found(void)
{
	struct speaker other;
	struct ucred self = {.pid = getpid()};

	hold_the_listener_high();
	CHECK(rn_has_tcp_listener(&self, (struct sockaddr *)&place));
	other = speaker(nothing, nothing); /* has inherited it */
	CHECK(rn_has_tcp_listener(&other.peer, (struct sockaddr *)&place));
	end(&other);
	other = speaker(close_it, nothing);
	CHECK(!rn_has_tcp_listener(&other.peer, (struct sockaddr *)&place));
	end(&other);
}

static void a_listener_is_found_among_its_descriptors(void)
{
	in_child(a_listener_is_found);
}

int main(void)
{
	if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)) {
		printf("  confined itself: nothing to see\n");
		return 0;
	}
	RUN(no_new_privileges_may_hide_a_sandbox);
	if (!geteuid())
		RUN(groups_are_no_matter);
	else
		printf("  not root: no groups\n");
	if (!geteuid() && prctl(PR_CAPBSET_READ, CAP_SYS_ADMIN, 0, 0, 0) == 1)
		RUN(filters_are_counted);
	else
		printf("  not root: no filters\n");
	RUN(who_has_ended_is_nobody);
	RUN(a_listener_is_found_among_its_descriptors);
	CHECK(rn_fd_count() == 0);
	return 0;
}
