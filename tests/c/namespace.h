/* SPDX-License-Identifier: Apache-2.0 */
/* A network of the test's own: a namespace with loopback and a pair of veth links. Include it behind
 * what defines CHECK. */
#ifndef NAMESPACE_H
#define NAMESPACE_H

#include <fcntl.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static inline void write_to(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* Move this process into a new one, where it may do as it likes. False: not allowed here. */
static inline bool new_network(void)
{
	char map[32];

	snprintf(map, sizeof(map), "0 %u 1", (unsigned)geteuid());
	if (!geteuid())
		return !unshare(CLONE_NEWNET);
	if (unshare(CLONE_NEWUSER | CLONE_NEWNET))
		return false;
	write_to("/proc/self/setgroups", "deny");
	write_to("/proc/self/uid_map", map);
	return true;
}

static inline void ip(const char *command)
{
	char line[256];

	snprintf(line, sizeof(line), "ip %s", command);
	if (system(line))
		fprintf(stderr, "failed: %s\n", line);
}

/* Return when a link carries frames: the kernel finds out some time after both of its ends are up, and has no IPv6
 * multicast route by it before. */
static inline void until_running(const char *name)
{
	struct sockaddr_nl links = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK};
	int changes = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	int any = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq link = {.ifr_flags = 0};
	char change[8192];

	CHECK(any >= 0 && changes >= 0 && !bind(changes, (struct sockaddr *)&links, sizeof(links)));
	snprintf(link.ifr_name, sizeof(link.ifr_name), "%s", name);
	for (;;) {
		CHECK(!ioctl(any, SIOCGIFFLAGS, &link));
		if (link.ifr_flags & IFF_RUNNING)
			break;
		CHECK(recv(changes, change, sizeof(change), 0) > 0);
	}
	close(any);
	close(changes);
}

/* Run in a child with a network of its own; a test that can't be run says so. */
static inline void in_network(const char *name, void (*test)(void))
{
	int status;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		if (!new_network() || system("ip link set lo up && ip link add v0 type veth peer name v1")) {
			printf("  %-32s skipped: no network namespace to be had\n", name);
			exit(0);
		}
		test();
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(status == 0);
}

#define RUN_IN_NETWORK(test)                                                                                        \
	do {                                                                                                        \
		in_network(#test, test);                                                                            \
		printf("  %-32s\n", #test);                                                                         \
		fflush(stdout);                                                                                     \
	} while (0)

#endif
