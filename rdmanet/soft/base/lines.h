/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of /proc, line by line: they may be of any length, and no memory is allocated for them.
 */
#pragma once

#include <stdbool.h>

/* Give each line to take(), without its newline, until that returns false. A line is cut after 511 bytes. False: the
 * file cannot be read. */
bool rn_for_each_line(const char *path, bool (*take)(const char *line, void *closure), void *closure);
