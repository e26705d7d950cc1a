/* SPDX-License-Identifier: Apache-2.0 */
#include "base/lines.h"

#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "base/engine.h"

enum { LINE_BYTES = 512, READ_BYTES = 4096 };

bool rn_for_each_line(const char *path, bool (*take)(const char *line, void *closure), void *closure)
{
	int fd = rn_fd_own(open(path, O_RDONLY | O_CLOEXEC));
	char bytes[READ_BYTES], line[LINE_BYTES];
	size_t length = 0;
	bool more = fd >= 0, is_read = fd >= 0;

	while (more) {
		ssize_t got = read(fd, bytes, sizeof(bytes));
		const char *at = bytes, *end = bytes + (got > 0 ? got : 0);

		more = got > 0;
		is_read &= got >= 0;
		while (more && at < end) {
			const char *newline = memchr(at, '\n', (size_t)(end - at));
			size_t piece = (size_t)((newline ? newline : end) - at), room = sizeof(line) - 1 - length;

			memcpy(line + length, at, piece < room ? piece : room);
			length += piece < room ? piece : room;
			at = newline ? newline + 1 : end;
			if (!newline)
				continue;
			line[length] = '\0';
			length = 0;
			more = take(line, closure);
		}
	}
	rn_fd_close(fd);
	return is_read;
}
