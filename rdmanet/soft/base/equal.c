/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/engine.h"
#include "base/equal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* Are the numbers in /proc those that we know? One of another pid namespace may be mounted there. */
static bool proc_is_ours(void)
{
	char target[12];
	ssize_t length = readlink("/proc/self", target, sizeof target - 1);

	target[length > 0 ? length : 0] = 0;
	return atoi(target) == getpid();
}

static bool shares_namespace(int pid, const char *which)
{
	char path[40];
	struct stat ours, its;

	snprintf(path, sizeof path, "/proc/self/ns/%s", which);
	if (stat(path, &ours))
		return false;
	snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, which);
	return !stat(path, &its) && its.st_dev == ours.st_dev && its.st_ino == ours.st_ino;
}

/* Those in effect. */
static bool read_capabilities(const char *process, unsigned long long *capabilities)
{
	static const char key[] = "\nCapEff:";
	char path[40], text[4096];
	const char *line;
	ssize_t length;
	int fd;

	snprintf(path, sizeof path, "/proc/%s/status", process);
	fd = rn_fd_own(open(path, O_RDONLY | O_CLOEXEC));
	if (fd < 0)
		return false;
	length = read(fd, text, sizeof text - 1);
	rn_fd_close(fd);
	text[length > 0 ? length : 0] = 0;
	line = strstr(text, key); /* its name comes before that; the kernel escapes the newlines in it */
	if (line)
		*capabilities = strtoull(line + sizeof key - 1, NULL, 16);
	return line;
}

static bool has_our_capabilities(int pid)
{
	unsigned long long ours, its;
	char number[12];

	snprintf(number, sizeof number, "%d", pid);
	return read_capabilities("self", &ours) && read_capabilities(number, &its) && !(ours & ~its);
}

/* Else its pid may be another's by now. Before Linux 6.5 nobody can tell. */
static bool lives(int socket_fd)
{
	struct pollfd ended = {.fd = -1, .events = POLLIN};
	socklen_t length = sizeof ended.fd;
	bool is_over;

	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &ended.fd, &length))
		return errno == ENOPROTOOPT;
	rn_fd_own(ended.fd);
	is_over = poll(&ended, 1, 0);
	rn_fd_close(ended.fd);
	return !is_over;
}

bool rn_is_equal_process(int socket_fd, const struct ucred *peer)
{
	if (peer->uid != geteuid())
		return false;
	if (peer->pid == getpid())
		return true;
	return peer->pid > 0 && proc_is_ours() && shares_namespace(peer->pid, "user") && shares_namespace(peer->pid, "pid") &&
	       has_our_capabilities(peer->pid) && lives(socket_fd);
}
