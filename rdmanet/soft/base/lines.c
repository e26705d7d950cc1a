/* SPDX-License-Identifier: Apache-2.0 */
#include "base/lines.h"

#include <fcntl.h>
#include <stddef.h>
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

		more = got > 0;
		is_read &= got >= 0;
		for (ssize_t i = 0; more && i < got; i++) {
			if (bytes[i] != '\n') {
				if (length < sizeof(line) - 1)
					line[length++] = bytes[i];
				continue;
			}
			line[length] = '\0';
			length = 0;
			more = take(line, closure);
		}
	}
	rn_fd_close(fd);
	return is_read;
}
