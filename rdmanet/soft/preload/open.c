/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program under soft-run opens a path: open() and its family, fopen(), opendir(), scandir(), chdir().
 *
 * What a file says may change while the program runs: GIDs, the port's state, counters. So the device itself is asked
 * first (rdmanet_soft_file(), device/files.c), and its answer is a memfd. Else the file in the tree is opened.
 *
 * As with the kernel's files: none can be written or made, whoever asks (EACCES). A node cannot be opened (ENXIO): what
 * programs do with it is the device's affair, in the verbs.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "next.h"
#include "tree.h"

struct dirent64; /* musl's headers have none */

enum { TEXT = 128 };

/* The device's own, if it was preloaded, too: base/extras.h. */
ssize_t rdmanet_soft_file(const char *path, char *text, size_t size) __attribute__((weak));

/* Not libc's open(), which would ask us again. */
typedef int open_call(const char *path, int flags, ...);

/* Descriptors for what is in the tree. -1 and errno. */
static int open_place(struct place *place, int flags, open_call *next_open)
{
	char text[TEXT], seen[PATH_MAX];
	struct stat state;
	ssize_t length = -1;
	int fd;

	if (stat(place->path, &state)) {
		if (errno == ENOENT && flags & O_CREAT)
			errno = EACCES;
		return -1;
	}
	if (place->is_node && !(flags & (O_PATH | O_DIRECTORY))) {
		errno = ENXIO;
		return -1;
	}
	if (S_ISREG(state.st_mode) && ((flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC)) {
		errno = EACCES;
		return -1;
	}
	if (S_ISREG(state.st_mode) && !(flags & (O_PATH | O_DIRECTORY)) && rdmanet_soft_file) {
		length = rdmanet_soft_file(rn_seen_as(place->path, seen), text, TEXT);
		if (length < 0 && errno == EINVAL)
			return -1;
	}
	if (length < 0)
		return next_open(place->path, flags, 0);
	fd = memfd_create("rdmanet-file", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	if (fd >= 0 && pwrite(fd, text, (size_t)length, 0) != length) {
		close(fd);
		errno = EIO;
		fd = -1;
	}
	return fd;
}

/* The argument that open() has only if it may make a file. */
#define TAKE_MODE(mode, flags)                                                \
	do {                                                                  \
		va_list rest;                                                 \
                                                                              \
		va_start(rest, flags);                                        \
		if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE)  \
			mode = va_arg(rest, mode_t);                          \
		va_end(rest);                                                 \
	} while (0)

#define OPEN(open)                                                            \
	EXPORT int open(const char *path, int flags, ...)                     \
	{                                                                     \
		struct place place;                                           \
		mode_t mode = 0;                                              \
		NEXT(open);                                                   \
                                                                              \
		TAKE_MODE(mode, flags);                                       \
		if (rn_in_tree(path, &place))                                 \
			return open_place(&place, flags, next_##open);        \
		return next_##open(path, flags, mode);                        \
	}

#define OPENAT(openat, open)                                                  \
	EXPORT int openat(int directory, const char *path, int flags, ...)    \
	{                                                                     \
		struct place place;                                           \
		mode_t mode = 0;                                              \
		NEXT(openat);                                                 \
		NEXT(open);                                                   \
                                                                              \
		TAKE_MODE(mode, flags);                                       \
		if (rn_in_tree(path, &place))                                 \
			return open_place(&place, flags, next_##open);        \
		return next_##openat(directory, path, flags, mode);           \
	}

OPEN(open)
OPEN(open64)
OPENAT(openat, open)
OPENAT(openat64, open64)

/* What programs built with _FORTIFY_SOURCE call where the flags are no constant: there is no mode. */
typedef int open_2_call(const char *path, int flags);
typedef int openat_2_call(int directory, const char *path, int flags);

#define OPEN_2(open_2, open)                                                  \
	EXPORT int open_2(const char *path, int flags)                        \
	{                                                                     \
		static open_2_call *next_##open_2;                            \
		struct place place;                                           \
		NEXT(open);                                                   \
                                                                              \
		if (!next_##open_2)                                           \
			*(void **)&next_##open_2 = dlsym(RTLD_NEXT, #open_2); \
		if (rn_in_tree(path, &place))                                 \
			return open_place(&place, flags, next_##open);        \
		return next_##open_2 ? next_##open_2(path, flags) : next_##open(path, flags); \
	}

#define OPENAT_2(openat_2, openat, open)                                      \
	EXPORT int openat_2(int directory, const char *path, int flags)       \
	{                                                                     \
		static openat_2_call *next_##openat_2;                        \
		struct place place;                                           \
		NEXT(openat);                                                 \
		NEXT(open);                                                   \
                                                                              \
		if (!next_##openat_2)                                         \
			*(void **)&next_##openat_2 = dlsym(RTLD_NEXT, #openat_2); \
		if (rn_in_tree(path, &place))                                 \
			return open_place(&place, flags, next_##open);        \
		return next_##openat_2 ? next_##openat_2(directory, path, flags) : next_##openat(directory, path, flags); \
	}

OPEN_2(__open_2, open)
OPEN_2(__open64_2, open64)
OPENAT_2(__openat_2, openat, open)
OPENAT_2(__openat64_2, openat64, open64)

/* The flags of open() that a mode of fopen() stands for. */
static int flags_of(const char *mode)
{
	int flags = mode[0] == 'r' ? O_RDONLY : O_WRONLY | O_CREAT;

	if (strchr(mode, '+'))
		flags = (flags & ~O_ACCMODE) | O_RDWR;
	return strchr(mode, 'e') ? flags | O_CLOEXEC : flags;
}

#define FOPEN(fopen)                                                          \
	EXPORT FILE *fopen(const char *restrict path, const char *restrict mode) \
	{                                                                     \
		struct place place;                                           \
		FILE *file;                                                   \
		int fd;                                                       \
		NEXT(fopen);                                                  \
		NEXT(open);                                                   \
                                                                              \
		if (!rn_in_tree(path, &place))                                \
			return next_##fopen(path, mode);                      \
		fd = open_place(&place, flags_of(mode), next_open);           \
		if (fd < 0)                                                   \
			return NULL;                                          \
		file = fdopen(fd, mode);                                      \
		if (!file)                                                    \
			close(fd);                                            \
		return file;                                                  \
	}

FOPEN(fopen)
FOPEN(fopen64)

EXPORT DIR *opendir(const char *path)
{
	struct place place;
	NEXT(opendir);

	return next_opendir(rn_in_tree(path, &place) ? place.path : path);
}

/* libc's own calls opendir() within libc. */
#define SCANDIR(scandir, entry)                                               \
	EXPORT int scandir(const char *restrict path, struct entry ***restrict names, \
			   int (*filter)(const struct entry *),               \
			   int (*compare)(const struct entry **, const struct entry **)) \
	{                                                                     \
		struct place place;                                           \
		NEXT(scandir);                                                \
                                                                              \
		return next_##scandir(rn_in_tree(path, &place) ? place.path : path, names, filter, compare); \
	}

SCANDIR(scandir, dirent)
SCANDIR(scandir64, dirent64)

EXPORT int chdir(const char *path)
{
	struct place place;
	NEXT(chdir);

	return next_chdir(rn_in_tree(path, &place) ? place.path : path);
}
