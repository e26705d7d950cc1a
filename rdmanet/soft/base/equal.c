/* SPDX-License-Identifier: Apache-2.0 */
#include "base/engine.h"
#include "base/equal.h"
#include "base/lines.h"
#include "base/sock_diag.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

static bool is_same_file(const char *one, const char *other)
{
	struct stat first, second;

	return !stat(one, &first) && !stat(other, &second) && first.st_dev == second.st_dev &&
	       first.st_ino == second.st_ino;
}

static bool shares_root(int pid)
{
	char its[40];

	snprintf(its, sizeof its, "/proc/%d/root", pid);
	return is_same_file("/proc/self/root", its);
}

/* The number of a namespace of a process, as the text of its link has it: no other of this kind has it as long as this
 * one exists.  The kernel asks the same about who reads the link as about who follows it, which takes twice as long.
 * False: it does not tell us. */
static bool read_namespace(const char *path, char text[32])
{
	ssize_t length = readlink(path, text, 32);

	if (length <= 0 || length >= 32)
		return false;
	text[length] = 0;
	return true;
}

static bool shares_namespace(int pid, const char *kind)
{
	char path[40], ours[32], its[32];

	snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
	if (!read_namespace(path, ours))
		return false;
	snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, kind);
	return read_namespace(path, its) && !strcmp(ours, its);
}

/* What /proc/PID/status says, which everybody may read. */
struct status {
	unsigned long long in_effect, bounding; /* capabilities */
	unsigned long no_new_privs, seccomp, filters;
	uid_t user; /* in effect */
	bool is_in_own_pids; /* it has a number in a pid namespace below the one that /proc shows */
	unsigned found;
};

/* The lines without which nothing is known. A kernel may be built without seccomp, or without pid namespaces. */
enum { USER = 1, IN_EFFECT = 2, BOUNDING = 4, NO_NEW_PRIVS = 8, NEEDED = USER | IN_EFFECT | BOUNDING | NO_NEW_PRIVS };

static const char *value_of(const char *line, const char *key)
{
	size_t length;

	if (*line != *key) /* most lines */
		return NULL;
	length = strlen(key);
	if (strncmp(line, key, length) != 0)
		return NULL;
	line += length;
	return line + strspn(line, "\t ");
}

/* One of its lines. Its name is on the first, whose newlines the kernel escapes. False: nothing below matters. */
static bool take_status(const char *line, void *closure)
{
	struct status *status = closure;
	const char *value;

	if ((value = value_of(line, "Uid:"))) {
		status->user = (uid_t)strtoul(value + strcspn(value, "\t "), NULL, 10);
		status->found |= USER;
	} else if ((value = value_of(line, "CapEff:"))) {
		status->in_effect = strtoull(value, NULL, 16);
		status->found |= IN_EFFECT;
	} else if ((value = value_of(line, "CapBnd:"))) {
		status->bounding = strtoull(value, NULL, 16);
		status->found |= BOUNDING;
	} else if ((value = value_of(line, "NoNewPrivs:"))) {
		status->no_new_privs = strtoul(value, NULL, 10);
		status->found |= NO_NEW_PRIVS;
	} else if ((value = value_of(line, "Seccomp:"))) {
		status->seccomp = strtoul(value, NULL, 10);
	} else if ((value = value_of(line, "Seccomp_filters:"))) { /* since Linux 5.9 */
		status->filters = strtoul(value, NULL, 10);
		return false; /* the last one */
	} else if (value_of(line, "Speculation_Store_Bypass:")) { /* behind it, since Linux 4.17 */
		return false;
	} else if ((value = value_of(line, "NSpid:"))) {
		status->is_in_own_pids = value[strcspn(value, "\t ")];
	}
	return true;
}

/* process: its number, or "self". */
static bool read_status(const char *process, struct status *status)
{
	char path[40];

	*status = (struct status){0};
	snprintf(path, sizeof path, "/proc/%s/status", process);
	return rn_for_each_line(path, take_status, status) && status->found == NEEDED;
}

static bool read_both(int pid, struct status *ours, struct status *its)
{
	char number[12];

	snprintf(number, sizeof number, "%d", pid);
	return read_status("self", ours) && read_status(number, its);
}

/*
 * What has no_new_privs may have Landlock, which nobody can see. So it counts as confined, also if we have it ourselves.
 * Of seccomp the number of filters is seen, and a container gives all its processes one: so only more than ours count.
 */
static bool may_do_less(const struct status *its, const struct status *ours)
{
	return its->no_new_privs || its->seccomp > ours->seccomp || its->filters > ours->filters;
}

static ssize_t read_file(const char *path, char *text, size_t room)
{
	int fd = rn_fd_own(open(path, O_RDONLY | O_CLOEXEC));
	ssize_t length = fd < 0 ? -1 : read(fd, text, room - 1);

	rn_fd_close(fd);
	text[length > 0 ? length : 0] = 0;
	return length;
}

/* Do these files say the same, up to this character? */
static bool reads_alike(int pid, const char *name, char end)
{
	char ours[4096], its[4096], path[40];

	snprintf(path, sizeof path, "/proc/self/%s", name);
	if (read_file(path, ours, sizeof ours) <= 0)
		return false;
	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	if (read_file(path, its, sizeof its) <= 0)
		return false;
	*strchrnul(ours, end) = 0;
	*strchrnul(its, end) = 0;
	return !strcmp(ours, its);
}

bool rn_is_confined(const struct ucred *peer)
{
	struct status ours, its;

	if (peer->pid <= 0 || !proc_is_ours() || !read_both(peer->pid, &ours, &its))
		return true;
	/* The first mount has a number that no other namespace's has, and is one below its root directory. */
	return may_do_less(&its, &ours) || its.is_in_own_pids || ours.bounding & ~its.bounding ||
	       !reads_alike(peer->pid, "uid_map", 0) || !reads_alike(peer->pid, "mountinfo", '\n');
}

enum { LISTENERS = 64, DESCRIPTORS = 4096 }; /* that are looked at */

static bool is_one_of(const char *link, const uint32_t *inodes, unsigned count)
{
	unsigned inode;

	if (sscanf(link, "socket:[%u]", &inode) != 1)
		return false;
	for (unsigned i = 0; i < count; i++)
		if (inodes[i] == inode)
			return true;
	return false;
}

/* As getdents64() writes it, which glibc has since 2.30. */
struct entry {
	uint64_t inode;
	int64_t offset;
	unsigned short length;
	unsigned char type;
	char name[];
};

/* directory: /proc/PID/fd. The list begins with the lowest numbers, and no memory is allocated for it. */
static bool is_among(int directory, const uint32_t *inodes, unsigned count)
{
	alignas(struct entry) char entries[4096];
	const struct entry *entry;
	unsigned looked = 0;
	char link[40];
	long length;

	while (looked < DESCRIPTORS && (length = syscall(SYS_getdents64, directory, entries, sizeof entries)) > 0) {
		for (long at = 0; at < length && looked < DESCRIPTORS; at += entry->length, looked++) {
			ssize_t got;

			entry = (const void *)(entries + at);
			got = readlinkat(directory, entry->name, link, sizeof link - 1);
			link[got > 0 ? got : 0] = 0;
			if (is_one_of(link, inodes, count))
				return true;
		}
	}
	return false;
}

bool rn_has_tcp_listener(const struct ucred *peer, const struct sockaddr *address)
{
	uint32_t inodes[LISTENERS];
	unsigned count = rn_tcp_listener_inodes(address, inodes, LISTENERS);
	char path[40];
	int directory;
	bool has;

	if (!count)
		return false;
	snprintf(path, sizeof path, "/proc/%d/fd", (int)peer->pid);
	directory = rn_fd_own(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	has = directory >= 0 && is_among(directory, inodes, count);
	rn_fd_close(directory);
	return has;
}

static bool is_still_its_users(const struct ucred *peer)
{
	struct status its;
	char number[12];

	snprintf(number, sizeof number, "%d", (int)peer->pid);
	return read_status(number, &its) && its.user == peer->uid;
}

bool rn_still_lives(int socket_fd, const struct ucred *peer)
{
	struct pollfd ended = {.fd = -1, .events = POLLIN};
	socklen_t length = sizeof ended.fd;
	bool is_over;

	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &ended.fd, &length))
		return errno == ENOPROTOOPT && is_still_its_users(peer);
	rn_fd_own(ended.fd);
	is_over = poll(&ended, 1, 0);
	rn_fd_close(ended.fd);
	return !is_over;
}

bool rn_is_equal_process(const struct ucred *peer, bool *is_confined)
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
	*is_confined = may_do_less(&its, &ours) || !shares_namespace(pid, "mnt") || !shares_root(pid);
	return true;
}

bool rn_is_overflow_user(uid_t user)
{
	char text[16];
	uid_t overflow = 65534;

	if (read_file("/proc/sys/kernel/overflowuid", text, sizeof text) > 0)
		overflow = (uid_t)strtoul(text, NULL, 10);
	return user == overflow;
}
