/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/engine.h"
#include "base/equal.h"
#include "base/sock_diag.h"

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

/* What /proc/PID/status says, which everybody may read. */
struct status {
	unsigned long long in_effect, bounding; /* capabilities */
	unsigned long no_new_privs, seccomp;
	bool is_in_own_pids; /* it has a number in a pid namespace below the one that /proc shows */
};

static const char *field(const char *text, const char *key)
{
	const char *line = strstr(text, key); /* its name is on the first line, whose newlines the kernel escapes */

	return line ? line + strlen(key) : NULL;
}

/* process: its number, or "self". */
static ssize_t read_file(const char *process, const char *name, char *text, size_t room)
{
	char path[40];
	ssize_t length;
	int fd;

	snprintf(path, sizeof path, "/proc/%s/%s", process, name);
	fd = rn_fd_own(open(path, O_RDONLY | O_CLOEXEC));
	if (fd < 0)
		return -1;
	length = read(fd, text, room - 1);
	rn_fd_close(fd);
	text[length > 0 ? length : 0] = 0;
	return length;
}

static bool read_status(const char *process, struct status *status)
{
	char text[4096];
	const char *in_effect, *bounding, *no_new_privs, *seccomp, *pids;

	if (read_file(process, "status", text, sizeof text) <= 0)
		return false;
	in_effect = field(text, "\nCapEff:");
	bounding = field(text, "\nCapBnd:");
	no_new_privs = field(text, "\nNoNewPrivs:");
	seccomp = field(text, "\nSeccomp:");
	pids = field(text, "\nNSpid:");
	if (!in_effect || !bounding || !no_new_privs || !pids)
		return false;
	*status = (struct status){
		.in_effect = strtoull(in_effect, NULL, 16),
		.bounding = strtoull(bounding, NULL, 16),
		.no_new_privs = strtoul(no_new_privs, NULL, 10),
		.seccomp = seccomp ? strtoul(seccomp, NULL, 10) : 0, /* a kernel may be built without it */
	};
	pids += strspn(pids, "\t ");
	pids += strcspn(pids, "\t \n");
	status->is_in_own_pids = *pids != '\n';
	return true;
}

static bool read_both(int pid, struct status *ours, struct status *its)
{
	char number[12];

	snprintf(number, sizeof number, "%d", pid);
	return read_status("self", ours) && read_status(number, its);
}

static bool is_more_confined(const struct status *its, const struct status *ours)
{
	return its->no_new_privs > ours->no_new_privs || its->seccomp > ours->seccomp;
}

static bool shares_root(int pid)
{
	char path[40];
	struct stat ours, its;

	snprintf(path, sizeof path, "/proc/%d/root", pid);
	return !stat("/proc/self/root", &ours) && !stat(path, &its) && its.st_dev == ours.st_dev &&
	       its.st_ino == ours.st_ino;
}

/* Do these files say the same, up to this character? */
static bool reads_alike(const char *process, const char *name, char end)
{
	char ours[4096], its[4096];

	if (read_file("self", name, ours, sizeof ours) <= 0 || read_file(process, name, its, sizeof its) <= 0)
		return false;
	*strchrnul(ours, end) = 0;
	*strchrnul(its, end) = 0;
	return !strcmp(ours, its);
}

bool rn_is_confined(const struct ucred *peer)
{
	struct status ours, its;
	char number[12];

	snprintf(number, sizeof number, "%d", (int)peer->pid);
	if (peer->pid <= 0 || !proc_is_ours() || !read_both(peer->pid, &ours, &its))
		return true;
	/* The first mount has a number that no other namespace's has, and is one below its root directory. */
	return is_more_confined(&its, &ours) || its.is_in_own_pids || ours.bounding & ~its.bounding ||
	       !reads_alike(number, "uid_map", 0) || !reads_alike(number, "mountinfo", '\n');
}

enum { LISTENERS = 64, DESCRIPTORS = 4096 };

static bool is_one_of(const char *link, const uint32_t *inodes, unsigned count)
{
	char name[32];

	for (unsigned i = 0; i < count; i++) {
		snprintf(name, sizeof name, "socket:[%u]", inodes[i]);
		if (!strcmp(link, name))
			return true;
	}
	return false;
}

bool rn_has_tcp_listener(const struct ucred *peer, const struct sockaddr *address)
{
	uint32_t inodes[LISTENERS];
	unsigned count = rn_tcp_listener_inodes(address, inodes, LISTENERS);
	char path[40], link[64];
	bool has = false;

	/* A listener is one of the first. The numbers are tried, since a list of them would take memory. */
	for (int number = 0; count && !has && number < DESCRIPTORS; number++) {
		ssize_t length;

		snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)peer->pid, number);
		length = readlink(path, link, sizeof link - 1);
		if (length < 0 && errno != ENOENT)
			return false;
		link[length > 0 ? length : 0] = 0;
		has = is_one_of(link, inodes, count);
	}
	return has;
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

bool rn_is_equal_process(int socket_fd, const struct ucred *peer, bool *is_confined)
{
	struct status ours, its;
	int pid = peer->pid;

	*is_confined = false;
	if (peer->uid != geteuid())
		return false;
	if (pid == getpid())
		return true;
	if (pid <= 0 || !proc_is_ours() || !shares_namespace(pid, "user") || !shares_namespace(pid, "pid") ||
	    !read_both(pid, &ours, &its) || ours.in_effect & ~its.in_effect)
		return false;
	*is_confined = is_more_confined(&its, &ours) || !shares_namespace(pid, "mnt") || !shares_root(pid);
	return lives(socket_fd);
}

bool rn_is_overflow_user(uid_t user)
{
	char text[16] = "";
	int fd = open("/proc/sys/kernel/overflowuid", O_RDONLY | O_CLOEXEC);
	uid_t overflow = 65534;

	if (fd >= 0) {
		if (read(fd, text, sizeof(text) - 1) > 0)
			overflow = (uid_t)strtoul(text, NULL, 10);
		close(fd);
	}
	return user == overflow;
}
