/* SPDX-License-Identifier: Apache-2.0 */
#include "base/engine.h"
#include "base/guard.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/process.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 512 };

/* Guards the sink: once it is changed, the caller may close the old descriptor, so no thread may be writing to it. */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static int sink = -1;

/* For each cause: the second of its last line, and how many lines were left out since. */
static struct {
	_Atomic uint64_t second;
	_Atomic uint32_t left_out;
} said[RN_WARNINGS];

/* A child does not write to its parent's sink. */
static void forget_in_child(void)
{
	pthread_mutex_init(&writing, NULL);
	sink = -1;
}

static void start_once(void)
{
	rn_at_fork_child(forget_in_child);
}

static void lock(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
	pthread_mutex_lock(&writing);
}

RN_EXPORT void rdmanet_soft_log_to(int fd)
{
	lock();
	sink = fd;
	pthread_mutex_unlock(&writing);
}

/* Escape everything that a terminal or a log might interpret. */
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

	if (!rn_settings.log)
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	escape(text, line, sizeof(line));
	fprintf(stderr, "rdmanet soft0: %s\n", line);
}

/* May this cause have a line now? If so, left_out is how many it had to leave out. */
static bool is_due(enum rn_warning cause, uint32_t *left_out)
{
	struct timespec now;
	uint64_t second, last = atomic_load(&said[cause].second);

	clock_gettime(CLOCK_MONOTONIC, &now);
	second = (uint64_t)now.tv_sec + 1; /* never 0, which means never */
	if (rn_guarded(RN_GUARD_LOG_RATE) &&
	    (last == second || !atomic_compare_exchange_strong(&said[cause].second, &last, second))) {
		atomic_fetch_add(&said[cause].left_out, 1);
		return false;
	}
	*left_out = atomic_exchange(&said[cause].left_out, 0);
	return true;
}

/* Write one line, whole or not at all. Most come from the engine, which never waits for their reader. */
static bool put_line(const char *text)
{
	struct pollfd standard_error = {.fd = STDERR_FILENO, .events = POLLOUT};
	char line[LINE + 96];
	bool is_said;

	lock();
	if (sink >= 0) {
		is_said = write(sink, text, strlen(text)) >= 0;
	} else {
		snprintf(line, sizeof(line), "rdmanet soft0: %s\n", text);
		is_said = poll(&standard_error, 1, 0) > 0 && standard_error.revents == POLLOUT &&
			  write(STDERR_FILENO, line, strlen(line)) >= 0;
	}
	pthread_mutex_unlock(&writing);
	return is_said;
}

void rn_warn(enum rn_warning cause, const char *format, ...)
{
	char text[LINE], line[LINE + 64];
	int saved = errno;
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
	if (!put_line(line))
		atomic_fetch_add(&said[cause].left_out, left_out + 1); /* the next line reports it */
	errno = saved;
}
