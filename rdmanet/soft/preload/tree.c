/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tree of files that the kernel would have for the embedded device. soft-run has made it, with true directories and
 * links in it, below the directory that RDMANET_SOFT_FILES names, which has `sys` and `dev` in it. So a path is ours by its
 * beginning alone, and what it leads to is for libc to say, with the right errno.
 *
 * A program under soft-run has the embedded device only. So what the host has at these paths is not seen.
 *
 * Programs also ask which adapter an interface belongs to: /sys/class/net/NAME/device/infiniband. `device` leads to a
 * directory below /sys/devices. Where soft-run has put an `infiniband` at such a place, this is /sys/class/infiniband.
 *
 * The setting is read before the program's main(): later it may change its environment at any time.
 */
#include "tree.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SETTING "RDMANET_SOFT_FILES"
#define DEVICES "/dev/infiniband"

static const char *const ours[] = {
	DEVICES,
	"/sys/class/infiniband",
	"/sys/class/infiniband_verbs",
	"/sys/devices/virtual/rdmanet",
};

#define INTERFACES "/sys/class/net"
#define OTHERS "/sys/devices"
#define ADAPTERS "/infiniband"
#define OUR_ADAPTERS "/sys/class/infiniband"

static char root[PATH_MAX];
static size_t root_length;

__attribute__((constructor)) static void find_root(void)
{
	const char *setting = getenv(SETTING);
	size_t length = setting ? strlen(setting) : 0;

	if (length && setting[0] == '/' && length < sizeof(root) / 2) {
		memcpy(root, setting, length + 1);
		root_length = length;
	}
}

/* Is it this directory, or below it? */
static bool is_below(const char *path, const char *directory)
{
	size_t length = strlen(directory);

	return !strncmp(path, directory, length) && (!path[length] || path[length] == '/');
}

/* Without what changes nothing, "//" and "/./", as far as the beginning needs it. */
static void tidy(const char *path, char *to)
{
	const char *end = to + PATH_MAX / 2 - 1;

	while (*path && to < end) {
		while (path[0] == '/' && (path[1] == '/' || (path[1] == '.' && (path[2] == '/' || !path[2]))))
			path += path[1] == '/' ? 1 : 2;
		if (*path)
			*to++ = *path++;
	}
	*to = 0;
}

/* No path is longer than the tidied one, PATH_MAX / 2, and root is shorter than that. */
static void put(struct place *place, const char *begin, const char *rest)
{
	char *to = mempcpy(place->path, root, root_length);

	to = mempcpy(to, begin, strlen(begin));
	memcpy(to, rest, strlen(rest) + 1);
}

/* What follows the adapters of an interface in a path; NULL: it leads elsewhere. */
static const char *behind_adapters(const char *path)
{
	const char *at = strstr(path, ADAPTERS), *rest;
	struct place place;
	struct stat state;

	if (!at || !is_below(at, ADAPTERS) || !(is_below(path, INTERFACES) || is_below(path, OTHERS)))
		return NULL;
	rest = at + strlen(ADAPTERS);
	put(&place, path, "");
	place.path[root_length + (size_t)(rest - path)] = 0;
	return lstat(place.path, &state) ? NULL : rest;
}

bool rn_in_tree(const char *path, struct place *place)
{
	char tidied[PATH_MAX / 2];
	const char *rest;
	struct stat state;
	int error = errno;

	/* Most paths end here: it must cost next to nothing. */
	if (!root_length || !path || path[0] != '/' || strnlen(path, sizeof(tidied)) == sizeof(tidied))
		return false;
	if (strncmp(path, "/sys", 4) && strncmp(path, "/dev", 4) && path[1] != '/' && path[1] != '.')
		return false;
	tidy(path, tidied);
	for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++) {
		if (!is_below(tidied, ours[i]))
			continue;
		put(place, tidied, "");
		place->is_node = is_below(tidied, DEVICES) && !stat(place->path, &state) && S_ISCHR(state.st_mode);
		errno = error;
		return true;
	}
	rest = behind_adapters(tidied);
	if (rest)
		put(place, OUR_ADAPTERS, rest);
	place->is_node = false;
	errno = error;
	return rest != NULL;
}

const char *rn_seen_as(const char *path, char *buffer)
{
	if (!root_length || strncmp(path, root, root_length) || path[root_length] != '/')
		return path;
	memmove(buffer, path + root_length, strlen(path + root_length) + 1);
	return buffer;
}
