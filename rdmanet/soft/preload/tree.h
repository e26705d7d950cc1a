/* SPDX-License-Identifier: Apache-2.0 */
/* Which paths are the embedded device's, and where they are: tree.c. */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

struct place {
	char path[PATH_MAX]; /* in the tree */
	bool is_node;        /* below /dev, and no directory: it is what /dev/null is */
};

/* The place of a path in the tree. False: it is none of ours, and goes to libc as it is. errno is left alone. */
bool rn_in_tree(const char *path, struct place *place);

/* The path that a place in the tree has for the program, in a buffer of PATH_MAX that may be this one; the path itself
 * if it is not in the tree. */
const char *rn_seen_as(const char *path, char *buffer);
