/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program under soft-run looks at a path without opening it: stat() and its family, access(), readlink(), realpath().
 *
 * A node is a link to /dev/null in the tree, and for the program the character device that it leads to.
 *
 * Programs built for old C libraries call __xstat() and its family. Those built with _FORTIFY_SOURCE call __readlink_chk()
 * and __realpath_chk(), whose additional argument is the buffer's size.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "next.h"
#include "tree.h"

struct stat64; /* musl's headers have none */

/* For what the headers do not declare. */
#define NEXT_OF(type, function)                                               \
	static type *next_##function;                                         \
	if (!next_##function)                                                 \
		*(void **)&next_##function = dlsym(RTLD_NEXT, #function)

typedef int xstat_call(int version, const char *path, void *state);
typedef int fxstatat_call(int version, int directory, const char *path, void *state, int flags);
typedef ssize_t readlink_chk_call(const char *path, char *buffer, size_t size, size_t room);
typedef ssize_t readlinkat_chk_call(int directory, const char *path, char *buffer, size_t size, size_t room);
typedef char *realpath_chk_call(const char *path, char *resolved, size_t room);

#define MISSING(function, result)                                             \
	do {                                                                  \
		if (!(function)) {                                            \
			errno = ENOSYS;                                       \
			return result;                                        \
		}                                                             \
	} while (0)

/* What to look at for it. */
static const char *target(const struct place *place)
{
	return place->is_node ? "/dev/null" : place->path;
}

#define STAT(stat, state_type)                                                \
	EXPORT int stat(const char *restrict path, struct state_type *restrict state) \
	{                                                                     \
		struct place place;                                           \
		NEXT(stat);                                                   \
                                                                              \
		return next_##stat(rn_in_tree(path, &place) ? target(&place) : path, state); \
	}

#define XSTAT(xstat)                                                          \
	EXPORT int xstat(int version, const char *path, void *state)          \
	{                                                                     \
		struct place place;                                           \
		NEXT_OF(xstat_call, xstat);                                   \
                                                                              \
		MISSING(next_##xstat, -1);                                    \
		return next_##xstat(version, rn_in_tree(path, &place) ? target(&place) : path, state); \
	}

#define FSTATAT(fstatat, state_type)                                          \
	EXPORT int fstatat(int directory, const char *restrict path, struct state_type *restrict state, int flags) \
	{                                                                     \
		struct place place;                                           \
		NEXT(fstatat);                                                \
                                                                              \
		return next_##fstatat(directory, rn_in_tree(path, &place) ? target(&place) : path, state, flags); \
	}

#define FXSTATAT(fxstatat)                                                    \
	EXPORT int fxstatat(int version, int directory, const char *path, void *state, int flags) \
	{                                                                     \
		struct place place;                                           \
		NEXT_OF(fxstatat_call, fxstatat);                             \
                                                                              \
		MISSING(next_##fxstatat, -1);                                 \
		return next_##fxstatat(version, directory, rn_in_tree(path, &place) ? target(&place) : path, state, \
				       flags);                                \
	}

STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)
XSTAT(__xstat)
XSTAT(__lxstat)
XSTAT(__xstat64)
XSTAT(__lxstat64)
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)
FXSTATAT(__fxstatat)
FXSTATAT(__fxstatat64)

EXPORT int statx(int directory, const char *restrict path, int flags, unsigned mask, struct statx *restrict state)
{
	struct place place;
	NEXT(statx);

	return next_statx(directory, rn_in_tree(path, &place) ? target(&place) : path, flags, mask, state);
}

#define ACCESS(access)                                                        \
	EXPORT int access(const char *path, int mode)                         \
	{                                                                     \
		struct place place;                                           \
		NEXT(access);                                                 \
                                                                              \
		return next_##access(rn_in_tree(path, &place) ? target(&place) : path, mode); \
	}

ACCESS(access)
ACCESS(euidaccess)
ACCESS(eaccess)

EXPORT int faccessat(int directory, const char *path, int mode, int flags)
{
	struct place place;
	NEXT(faccessat);

	return next_faccessat(directory, rn_in_tree(path, &place) ? target(&place) : path, mode, flags);
}

/* Attributes beside the mode, which `ls -l` asks for. */
#define GETXATTR(getxattr)                                                    \
	EXPORT ssize_t getxattr(const char *path, const char *name, void *value, size_t size) \
	{                                                                     \
		struct place place;                                           \
		NEXT(getxattr);                                               \
                                                                              \
		return next_##getxattr(rn_in_tree(path, &place) ? target(&place) : path, name, value, size); \
	}

#define LISTXATTR(listxattr)                                                  \
	EXPORT ssize_t listxattr(const char *path, char *names, size_t size)  \
	{                                                                     \
		struct place place;                                           \
		NEXT(listxattr);                                              \
                                                                              \
		return next_##listxattr(rn_in_tree(path, &place) ? target(&place) : path, names, size); \
	}

GETXATTR(getxattr)
GETXATTR(lgetxattr)
LISTXATTR(listxattr)
LISTXATTR(llistxattr)

/* A node is no link, for all the tree has one. */
static bool is_no_link(const struct place *place)
{
	if (place->is_node)
		errno = EINVAL;
	return place->is_node;
}

EXPORT ssize_t readlink(const char *restrict path, char *restrict buffer, size_t size)
{
	struct place place;
	NEXT(readlink);

	if (!rn_in_tree(path, &place))
		return next_readlink(path, buffer, size);
	return is_no_link(&place) ? -1 : next_readlink(place.path, buffer, size);
}

EXPORT ssize_t readlinkat(int directory, const char *restrict path, char *restrict buffer, size_t size)
{
	struct place place;
	NEXT(readlinkat);

	if (!rn_in_tree(path, &place))
		return next_readlinkat(directory, path, buffer, size);
	return is_no_link(&place) ? -1 : next_readlinkat(directory, place.path, buffer, size);
}

EXPORT ssize_t __readlink_chk(const char *path, char *buffer, size_t size, size_t room)
{
	struct place place;
	NEXT_OF(readlink_chk_call, __readlink_chk);

	MISSING(next___readlink_chk, -1);
	if (!rn_in_tree(path, &place))
		return next___readlink_chk(path, buffer, size, room);
	return is_no_link(&place) ? -1 : next___readlink_chk(place.path, buffer, size, room);
}

EXPORT ssize_t __readlinkat_chk(int directory, const char *path, char *buffer, size_t size, size_t room)
{
	struct place place;
	NEXT_OF(readlinkat_chk_call, __readlinkat_chk);

	MISSING(next___readlinkat_chk, -1);
	if (!rn_in_tree(path, &place))
		return next___readlinkat_chk(directory, path, buffer, size, room);
	return is_no_link(&place) ? -1 : next___readlinkat_chk(directory, place.path, buffer, size, room);
}

/* The result is a path of the program's world again. */
static char *seen(char *resolved)
{
	if (resolved)
		rn_seen_as(resolved, resolved);
	return resolved;
}

/* A node is its own real path. `to`: the program's buffer, or NULL for one that it frees. */
static char *copy_of(const char *path, char *to)
{
	return to ? strcpy(to, path) : strdup(path);
}

EXPORT char *realpath(const char *restrict path, char *restrict resolved)
{
	struct place place;
	NEXT(realpath);

	if (!rn_in_tree(path, &place))
		return next_realpath(path, resolved);
	if (place.is_node)
		return copy_of(rn_seen_as(place.path, place.path), resolved);
	return seen(next_realpath(place.path, resolved));
}

EXPORT char *__realpath_chk(const char *path, char *resolved, size_t room)
{
	struct place place;
	NEXT_OF(realpath_chk_call, __realpath_chk);

	MISSING(next___realpath_chk, NULL);
	if (!rn_in_tree(path, &place))
		return next___realpath_chk(path, resolved, room);
	return realpath(path, resolved); /* libc refuses less room than PATH_MAX, and so does the compiler */
}

EXPORT char *canonicalize_file_name(const char *path)
{
	return realpath(path, NULL);
}
