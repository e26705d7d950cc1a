/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The embedded device's files, for a program under soft-run: preloaded, it stands before libc where a program opens a
 * file or looks whether there is one.
 *
 * Below /dev/infiniband and /sys/class/infiniband the device is asked (rdmanet_soft_file(), files.c), if the host has no
 * such file. A node is what /dev/null is; what is to be read is a memfd. All else goes to
 * libc, untouched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "next.h"

#define NODE "/dev/null"

enum { TEXT = 128 };

static bool may_be_ours(const char *path)
{
	static const char devices[] = "/dev/infiniband/", attributes[] = "/sys/class/infiniband/";

	return path && path[0] == '/' &&
	       (!strncmp(path, devices, sizeof(devices) - 1) || !strncmp(path, attributes, sizeof(attributes) - 1));
}

/* The device's own, if it was preloaded, too: base/extras.h. */
ssize_t rdmanet_soft_file(const char *path, char *text, size_t size) __attribute__((weak));

/* Its text's length; -1: the device has no such file, or the program no device. errno stays what libc said. */
static ssize_t ask(const char *path, char *text)
{
	int error = errno;
	ssize_t length;

	if (error != ENOENT || !may_be_ours(path) || !rdmanet_soft_file)
		return -1;
	length = rdmanet_soft_file(path, text, TEXT);
	errno = error;
	return length;
}

/* A descriptor for what the device says of this path, or -1. */
static int open_ours(const char *path, int flags)
{
	char text[TEXT];
	ssize_t length = ask(path, text);
	int fd;

	if (length <= 0 || (flags & O_ACCMODE) != O_RDONLY)
		return -1;
	fd = memfd_create("rdmanet-file", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	if (fd >= 0 && (pwrite(fd, text, (size_t)length, 0) != length)) {
		close(fd);
		fd = -1;
	}
	return fd;
}

static bool is_node(const char *path)
{
	char text[TEXT];

	return !ask(path, text);
}

EXPORT int access(const char *path, int mode)
{
	NEXT(access);
	int rc = next_access(path, mode);

	return rc && is_node(path) ? next_access(NODE, mode) : rc;
}

#define STAT(stat)                                                            \
	EXPORT int stat(const char *restrict path, struct stat *restrict state) \
	{                                                                     \
		NEXT(stat);                                                   \
		int rc = next_##stat(path, state);                            \
                                                                              \
		return rc && is_node(path) ? next_##stat(NODE, state) : rc;   \
	}

STAT(stat)
STAT(stat64)

#define OPEN(open)                                                            \
	EXPORT int open(const char *path, int flags, ...)                     \
	{                                                                     \
		NEXT(open);                                                   \
		mode_t mode = 0;                                              \
		va_list rest;                                                 \
		int fd, ours;                                                 \
                                                                              \
		va_start(rest, flags);                                        \
		if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE)      \
			mode = va_arg(rest, mode_t);                          \
		va_end(rest);                                                 \
		fd = next_##open(path, flags, mode);                          \
		if (fd >= 0 || errno != ENOENT || !may_be_ours(path))         \
			return fd;                                            \
		ours = open_ours(path, flags);                                \
		return ours >= 0 ? ours : fd;                                 \
	}

OPEN(open)
OPEN(open64)

#define FOPEN(fopen)                                                          \
	EXPORT FILE *fopen(const char *restrict path, const char *restrict mode) \
	{                                                                     \
		NEXT(fopen);                                                  \
		FILE *file = next_##fopen(path, mode);                        \
		int fd;                                                       \
                                                                              \
		if (file || errno != ENOENT || !may_be_ours(path) || mode[0] != 'r' || strchr(mode, '+')) \
			return file;                                          \
		fd = open_ours(path, strchr(mode, 'e') ? O_RDONLY | O_CLOEXEC : O_RDONLY); \
		return fd < 0 ? NULL : fdopen(fd, mode);                      \
	}

FOPEN(fopen)
FOPEN(fopen64)
