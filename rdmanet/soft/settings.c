/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "settings.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sha256.h"

#define PREFIX "RDMANET_SOFT_"

enum form { NUMBER, MICROSECONDS, EITHER, TRANSPORT, SECRET, ELSEWHERE };

/* Every name there is; those that somebody else reads, too. */
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
	{.name = "ADOPT", .form = EITHER, .at = offsetof(struct rn_settings, adopt), .words = {"0", "1"}},
	{.name = "PTRACER", .form = EITHER, .at = offsetof(struct rn_settings, ptracer), .words = {"0", "1"}},
	{.name = "RULES", .form = EITHER, .at = offsetof(struct rn_settings, iwarp), .words = {"roce", "iwarp"}},
	{.name = "LINK", .form = EITHER, .at = offsetof(struct rn_settings, infiniband),
	 .words = {"ethernet", "infiniband"}},
	{.name = "PADDED", .form = EITHER, .at = offsetof(struct rn_settings, padded), .otherwise = 1,
	 .words = {"0", "1"}},
	{.name = "SILENCE", .form = NUMBER, .at = offsetof(struct rn_settings, silence_ms), .otherwise = 5000},
	{.name = "CM_TIMEOUT", .form = NUMBER, .at = offsetof(struct rn_settings, cm_timeout_ms), .otherwise = 60000},
	{.name = "TIMEWAIT", .form = NUMBER, .at = offsetof(struct rn_settings, timewait_ms)},
	{.name = "LOG", .form = ELSEWHERE},       /* log.c */
	{.name = "CHAOS", .form = ELSEWHERE},     /* chaos.c, for each context */
	{.name = "LIBRARY", .form = ELSEWHERE},   /* the Python package */
#ifdef RDMANET_UNGUARDED
	{.name = "WITHOUT", .form = ELSEWHERE}, /* guard.c */
#endif
	{.name = "TRANSPORT", .form = TRANSPORT, .at = offsetof(struct rn_settings, transport)},
	{.name = "SECRET", .form = SECRET},
};
enum { SETTINGS = sizeof(settings) / sizeof(settings[0]) };

struct rn_settings rn_settings;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static bool were_read, named_strangers;

static bool read_number(const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return isdigit((unsigned char)*text) && !*end && !errno && *number < UINT64_MAX / 1000000;
}

static bool read_transport(const char *text, uint64_t *transport, bool says_why)
{
	static const char *const names[] = {"auto", "direct", "stream"};

	for (uint64_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (strcmp(text, names[i]))
			continue;
		*transport = i;
		return true;
	}
	if (says_why)
		fprintf(stderr, "rdmanet soft0: " PREFIX "TRANSPORT=%s: it is auto, direct or stream\n", text);
	return false;
}

static void read_secret(const char *text, struct rn_settings *to)
{
	struct rn_sha256 sha;

	to->has_secret = text && *text;
	if (!to->has_secret)
		return;
	rn_sha256_begin(&sha);
	rn_sha256_add(&sha, text, strlen(text));
	rn_sha256_end(&sha, to->secret_key);
}

/* RDMANET_SOFT itself: how far the device reaches. */
static bool read_scope(struct rn_settings *to, bool says_why)
{
	const char *text = getenv("RDMANET_SOFT");

	to->is_local = text && !strcmp(text, "local");
	if (!text || !*text || to->is_local)
		return true;
	if (says_why)
		fprintf(stderr, "rdmanet soft0: RDMANET_SOFT=%s: it is local, or not set\n", text);
	return false;
}

/* False: it makes no sense. */
static bool read_one(const struct setting *setting, struct rn_settings *to, bool says_why)
{
	void *at = (char *)to + setting->at;
	char name[64];
	const char *text;
	uint64_t number;

	snprintf(name, sizeof(name), PREFIX "%s", setting->name);
	text = getenv(name);
	if (setting->form == EITHER) {
		bool is_set = text && *text, is_true = is_set && !strcmp(text, setting->words[1]);

		if (is_set && !is_true && strcmp(text, setting->words[0])) {
			if (says_why)
				fprintf(stderr, "rdmanet soft0: %s=%s: it is %s or %s\n", name, text, setting->words[0],
					setting->words[1]);
			return false;
		}
		*(bool *)at = is_set ? is_true : setting->otherwise;
		return true;
	}
	if (setting->form == SECRET) {
		read_secret(text, to);
		return true;
	}
	if (!text || !*text) {
		*(uint64_t *)at = setting->otherwise;
		return true;
	}
	if (setting->form == TRANSPORT)
		return read_transport(text, at, says_why);
	if (!read_number(text, &number)) {
		if (says_why)
			fprintf(stderr, "rdmanet soft0: %s=%s: it is a number of %s\n", name, text,
				setting->form == MICROSECONDS ? "microseconds" : "milliseconds");
		return false;
	}
	*(uint64_t *)at = setting->form == MICROSECONDS ? number * 1000 : number;
	return true;
}

static bool is_known(const char *name, size_t length)
{
	for (int i = 0; i < SETTINGS; i++)
		if (strlen(settings[i].name) == length && !memcmp(settings[i].name, name, length))
			return true;
	return false;
}

static void name_strangers(void)
{
	static const size_t prefix = sizeof(PREFIX) - 1;

	for (char **at = environ; at && *at; at++) {
		const char *name = *at + prefix, *end;

		if (strncmp(*at, PREFIX, prefix) || !(end = strchr(name, '=')) || is_known(name, end - name))
			continue;
		fprintf(stderr, "rdmanet soft0: there is no switch " PREFIX "%.*s; there are", (int)(end - name), name);
		for (int i = 0; i < SETTINGS; i++)
			fprintf(stderr, "%s %s", i ? "," : "", settings[i].name);
		fprintf(stderr, "\n");
	}
}

/* With the mutex held. */
static int read_all(bool says_why)
{
	struct rn_settings fresh;
	bool good = true;

	memset(&fresh, 0, sizeof(fresh)); /* padding too: it is compared */
	for (int i = 0; i < SETTINGS; i++)
		if (settings[i].form != ELSEWHERE)
			good &= read_one(&settings[i], &fresh, says_why);
	good &= read_scope(&fresh, says_why);
	if (fresh.iwarp && fresh.infiniband) {
		if (says_why)
			fprintf(stderr, "rdmanet soft0: " PREFIX "LINK=infiniband: iWARP runs on Ethernet\n");
		good = false;
	}
	fresh.padded &= !fresh.iwarp;
	if (says_why && !named_strangers)
		name_strangers();
	named_strangers |= says_why;
	/* Written only where there is news: others read it at any time. */
	if ((good || !were_read) && memcmp(&rn_settings, &fresh, sizeof(fresh)))
		rn_settings = fresh;
	were_read = true;
	return good ? 0 : EINVAL;
}

int rn_settings_read(void)
{
	int err;

	pthread_mutex_lock(&reading);
	err = read_all(true);
	pthread_mutex_unlock(&reading);
	return err;
}

void rn_settings_need(void)
{
	pthread_mutex_lock(&reading);
	if (!were_read)
		read_all(true);
	pthread_mutex_unlock(&reading);
}

void rn_settings_glance(void)
{
	pthread_mutex_lock(&reading);
	read_all(false);
	pthread_mutex_unlock(&reading);
}

void rn_settings_forked(void)
{
	pthread_mutex_init(&reading, NULL);
}
