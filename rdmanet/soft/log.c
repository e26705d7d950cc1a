/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"
#include "soft.h"

enum { LINE = 512 };

static _Atomic int sink = -1;

/* Of each cause: when it was said last, in whole seconds, and how many lines were left out since. */
static struct {
	_Atomic uint64_t second;
	_Atomic uint32_t left_out;
} said[RN_WARNINGS];

RN_EXPORT void rdmanet_soft_log_to(int fd)
{
	atomic_store(&sink, fd);
}

/* Nothing that a terminal or a log would take for more than a character of the text. */
static void escape(const char *text, char *to, size_t size)
{
	size_t at = 0;

	for (; *text && at + 5 < size; text++) {
		unsigned char c = (unsigned char)*text;

		if (c >= 0x20 && c < 0x7f)
			to[at++] = *text;
		else
			at += (size_t)snprintf(to + at, size - at, "\\x%02x", c);
	}
	to[at] = 0;
}

void rn_log(const char *format, ...)
{
	char text[LINE], line[LINE];
	va_list arguments;

	if (!getenv("RDMANET_SOFT_LOG"))
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	escape(text, line, sizeof(line));
	fprintf(stderr, "rdmanet soft0: %s\n", line);
}

/* May this cause have a line now? It then tells how many it had to leave out. */
static bool is_due(enum rn_warning cause, uint32_t *left_out)
{
	struct timespec now;
	uint64_t second, last = atomic_load(&said[cause].second);

	clock_gettime(CLOCK_MONOTONIC, &now);
	second = (uint64_t)now.tv_sec + 1; /* never 0: that is never */
	if (rn_guarded(RN_GUARD_LOG_RATE) &&
	    (last == second || !atomic_compare_exchange_strong(&said[cause].second, &last, second))) {
		atomic_fetch_add(&said[cause].left_out, 1);
		return false;
	}
	*left_out = atomic_exchange(&said[cause].left_out, 0);
	return true;
}

void rn_warn(enum rn_warning cause, const char *format, ...)
{
	char text[LINE], line[LINE + 64];
	int fd = atomic_load(&sink), saved = errno;
	uint32_t left_out;
	va_list arguments;

	if (!is_due(cause, &left_out))
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	escape(text, line, LINE);
	if (left_out)
		snprintf(line + strlen(line), sizeof(line) - strlen(line), " (and %u more of this kind)", left_out);
	if (fd < 0)
		fprintf(stderr, "rdmanet soft0: %s\n", line);
	else if (write(fd, line, strlen(line)) < 0)
		atomic_fetch_add(&said[cause].left_out, left_out + 1); /* full: the next line tells of it */
	errno = saved;
}
