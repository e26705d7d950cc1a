/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the environment variables RDMANET_SOFT_*, once, at the process's start. Those marked ELSEWHERE are
 * only known here; the named files read them.
 */
#include "base/extras.h"
#include "base/process.h"
#include "base/secret.h"
#include "base/settings.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREFIX "RDMANET_SOFT_"

enum form { NUMBER, MICROSECONDS, EITHER, TRANSPORT, ELSEWHERE };

/* All names, including those that other files read. */
static const struct setting {
	const char *name;
	enum form form;
	size_t at;          /* in struct rn_settings */
	uint64_t otherwise; /* as the field has it */
	const char *words[2]; /* of EITHER: false, true */
} settings[] = {
	{.name = "DEFER", .form = MICROSECONDS, .at = offsetof(struct rn_settings, defer_ns)},
	{.name = "CMA", .form = EITHER, .at = offsetof(struct rn_settings, no_cma), .words = {"1", "0"}},
	{.name = "ARM", .form = EITHER, .at = offsetof(struct rn_settings, lenient), .words = {"strict", "lenient"}},
	{.name = "ADOPT", .form = EITHER, .at = offsetof(struct rn_settings, remap), .words = {"0", "1"}},
	{.name = "PTRACER", .form = EITHER, .at = offsetof(struct rn_settings, ptracer), .words = {"0", "1"}},
	{.name = "RULES", .form = EITHER, .at = offsetof(struct rn_settings, iwarp), .words = {"roce", "iwarp"}},
	{.name = "LINK", .form = EITHER, .at = offsetof(struct rn_settings, infiniband),
	 .words = {"ethernet", "infiniband"}},
	{.name = "PADDED", .form = EITHER, .at = offsetof(struct rn_settings, padded), .otherwise = 1,
	 .words = {"0", "1"}},
	{.name = "SILENCE", .form = NUMBER, .at = offsetof(struct rn_settings, silence_ms), .otherwise = 5000},
	{.name = "CM_TIMEOUT", .form = NUMBER, .at = offsetof(struct rn_settings, cm_timeout_ms), .otherwise = 60000},
	{.name = "TIMEWAIT", .form = NUMBER, .at = offsetof(struct rn_settings, timewait_ms)},
	{.name = "LOG", .form = EITHER, .at = offsetof(struct rn_settings, log), .words = {"0", "1"}},
	{.name = "CHAOS", .form = ELSEWHERE},       /* device/fault_bench.c, for each context */
	{.name = "LIBRARY", .form = ELSEWHERE},     /* the Python package */
	{.name = "FILES", .form = ELSEWHERE},       /* preload/tree.c */
#ifdef RDMANET_UNGUARDED
	{.name = "WITHOUT", .form = ELSEWHERE},     /* guard.c */
#endif
	{.name = "TRANSPORT", .form = TRANSPORT, .at = offsetof(struct rn_settings, transport)},
	{.name = "SECRET", .form = ELSEWHERE},      /* secret_key.c */
	{.name = "SECRET_FILE", .form = ELSEWHERE},
};
enum { SETTINGS = sizeof(settings) / sizeof(settings[0]) };

struct rn_settings rn_settings;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static bool were_read;
static char error[1024]; /* the errors of the last reading, separated by semicolons */

/* With the mutex held. Returns false, for the caller to return. */
static bool complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static bool complain(const char *format, ...)
{
	size_t at = strlen(error);
	va_list arguments;

	if (at && at + 2 < sizeof(error)) {
		memcpy(error + at, "; ", 3);
		at += 2;
	}
	va_start(arguments, format);
	vsnprintf(error + at, sizeof(error) - at, format, arguments);
	va_end(arguments);
	fprintf(stderr, "rdmanet soft0: %s\n", error + at);
	return false;
}

RN_EXPORT void rdmanet_soft_settings_error(char *text, size_t size)
{
	pthread_mutex_lock(&reading);
	snprintf(text, size, "%s", error);
	pthread_mutex_unlock(&reading);
}

static bool read_number(const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return isdigit((unsigned char)*text) && !*end && !errno && *number < UINT64_MAX / 1000000;
}

static bool read_transport(const char *text, uint64_t *transport)
{
	static const char *const names[] = {"auto", "direct", "stream"};

	for (uint64_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (strcmp(text, names[i]))
			continue;
		*transport = i;
		return true;
	}
	return complain(PREFIX "TRANSPORT=%s: must be auto, direct or stream", text);
}

static bool read_secret(struct rn_settings *to)
{
	char why[512];
	int err = rn_secret_read(why, sizeof(why));

	to->has_secret = rn_secret_key();
	return !err || complain("%s", why);
}

/* RDMANET_SOFT itself: whether the device reaches other hosts. */
static bool read_scope(struct rn_settings *to)
{
	const char *text = getenv("RDMANET_SOFT");

	to->is_local = text && !strcmp(text, "local");
	if (!text || !*text || to->is_local)
		return true;
	return complain("RDMANET_SOFT=%s: must be local, or not set", text);
}

/* False: the value is wrong. */
static bool read_one(const struct setting *setting, struct rn_settings *to)
{
	void *at = (char *)to + setting->at;
	char name[64];
	const char *text;
	uint64_t number;

	snprintf(name, sizeof(name), PREFIX "%s", setting->name);
	text = getenv(name);
	if (setting->form == EITHER) {
		bool is_set = text && *text, is_true = is_set && !strcmp(text, setting->words[1]);

		if (is_set && !is_true && strcmp(text, setting->words[0]))
			return complain("%s=%s: must be %s or %s", name, text, setting->words[0], setting->words[1]);
		*(bool *)at = is_set ? is_true : setting->otherwise;
		return true;
	}
	if (!text || !*text) {
		*(uint64_t *)at = setting->otherwise;
		return true;
	}
	if (setting->form == TRANSPORT)
		return read_transport(text, at);
	if (!read_number(text, &number))
		return complain("%s=%s: must be a whole number of %s", name, text,
				setting->form == MICROSECONDS ? "microseconds" : "milliseconds");
	*(uint64_t *)at = setting->form == MICROSECONDS ? number * 1000 : number;
	return true;
}

/* --- names ------------------------------------------------------------------------------------------------ */

enum { NAME = 32 };

static unsigned least(unsigned a, unsigned b)
{
	return a < b ? a : b;
}

/* The edit distance from a to b. Neither is longer than NAME. */
static unsigned distance(const char *a, size_t length, const char *b)
{
	unsigned row[NAME + 1], above, corner;

	for (unsigned j = 0; j <= length; j++)
		row[j] = j;
	for (; *b; b++) {
		corner = row[0]++;
		for (unsigned j = 1; j <= length; j++) {
			above = row[j];
			row[j] = least(least(above, row[j - 1]) + 1, corner + (a[j - 1] != *b));
			corner = above;
		}
	}
	return row[length];
}

/* The setting that was probably meant; NULL: the name is one. */
static const char *meant_by(const char *name, size_t length)
{
	unsigned nearest = UINT_MAX, far;
	const char *found = settings[0].name;

	for (int i = 0; i < SETTINGS; i++) {
		if (strlen(settings[i].name) == length && !memcmp(settings[i].name, name, length))
			return NULL;
		far = distance(name, length < NAME ? length : NAME, settings[i].name);
		if (far < nearest) {
			nearest = far;
			found = settings[i].name;
		}
	}
	return found;
}

/* The value is not shown: it may be the secret. */
static bool know_all_names(void)
{
	static const size_t prefix = sizeof(PREFIX) - 1;
	bool good = true;

	for (char **at = environ; at && *at; at++) {
		const char *name = *at + prefix, *end, *meant;

		if (strncmp(*at, PREFIX, prefix) || !(end = strchr(name, '=')) || !(meant = meant_by(name, end - name)))
			continue;
		good = complain("unknown variable " PREFIX "%.*s; did you mean " PREFIX "%s?", (int)(end - name), name,
				meant);
	}
	return good;
}

/* --- all of them -------------------------------------------------------------------------------------------- */

/* With the mutex held. */
static int read_all(void)
{
	struct rn_settings fresh;
	bool good = true;

	error[0] = 0;
	memset(&fresh, 0, sizeof(fresh)); /* padding too: it is compared */
	for (int i = 0; i < SETTINGS; i++)
		if (settings[i].form != ELSEWHERE)
			good &= read_one(&settings[i], &fresh);
	good &= read_secret(&fresh);
	good &= read_scope(&fresh);
	if (fresh.iwarp && fresh.infiniband)
		good = complain(PREFIX "LINK=infiniband: RULES=iwarp requires Ethernet");
	good &= know_all_names();
	fresh.padded &= !fresh.iwarp;
	/* Written only if something changed: other threads read it at any time. */
	if ((good || !were_read) && memcmp(&rn_settings, &fresh, sizeof(fresh)))
		rn_settings = fresh;
	were_read = true;
	return good ? 0 : EINVAL;
}

int rn_settings_read(void)
{
	int err;

	pthread_mutex_lock(&reading);
	err = read_all();
	pthread_mutex_unlock(&reading);
	return err;
}

void rn_settings_need(void)
{
	pthread_mutex_lock(&reading);
	if (!were_read)
		read_all();
	pthread_mutex_unlock(&reading);
}

bool rn_settings_are_iwarp(void)
{
	const char *rules = getenv(PREFIX "RULES");

	return rules && !strcmp(rules, "iwarp");
}

void rn_settings_forked(void)
{
	pthread_mutex_init(&reading, NULL);
}
