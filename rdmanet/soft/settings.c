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

#define PREFIX "RDMANET_SOFT_"

enum form { NUMBER, MICROSECONDS, YES_OR_NO, NO_OR_YES, ELSEWHERE };

/* Every name there is; those that somebody else reads, too. */
static const struct setting {
	const char *name;
	enum form form;
	size_t at;          /* in struct rn_settings */
	uint64_t otherwise; /* as the field has it */
} settings[] = {
	{"DEFER", MICROSECONDS, offsetof(struct rn_settings, defer_ns), 0},
	{"CMA", NO_OR_YES, offsetof(struct rn_settings, no_cma), 0},
	{"ADOPT", YES_OR_NO, offsetof(struct rn_settings, adopt), 0},
	{"PADDED", YES_OR_NO, offsetof(struct rn_settings, padded), 1},
	{"SILENCE", NUMBER, offsetof(struct rn_settings, silence_ms), 5000},
	{"CM_TIMEOUT", NUMBER, offsetof(struct rn_settings, cm_timeout_ms), 60000},
	{"TIMEWAIT", NUMBER, offsetof(struct rn_settings, timewait_ms), 0},
	{"LOG", ELSEWHERE, 0, 0},       /* log.c */
	{"CHAOS", ELSEWHERE, 0, 0},     /* chaos.c, for each context */
	{"LIBRARY", ELSEWHERE, 0, 0},   /* the Python package */
	{"TRANSPORT", ELSEWHERE, 0, 0}, /* the ways to a peer */
	{"SECRET", ELSEWHERE, 0, 0},
	{"ARM", ELSEWHERE, 0, 0},
};
enum { SETTINGS = sizeof(settings) / sizeof(settings[0]) };

struct rn_settings rn_settings;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static bool were_read;

static bool read_number(const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return isdigit((unsigned char)*text) && !*end && !errno && *number < UINT64_MAX / 1000000;
}

/* False: it was said why not. */
static bool read_one(const struct setting *setting, struct rn_settings *to)
{
	void *at = (char *)to + setting->at;
	char name[64];
	const char *text;
	uint64_t number;

	snprintf(name, sizeof(name), PREFIX "%s", setting->name);
	text = getenv(name);
	if (setting->form == YES_OR_NO || setting->form == NO_OR_YES) {
		bool is_set = text && *text;

		if (is_set && strcmp(text, "0") && strcmp(text, "1")) {
			fprintf(stderr, "rdmanet soft0: %s=%s: it is 0 or 1\n", name, text);
			return false;
		}
		*(bool *)at = is_set ? (*text == '1') == (setting->form == YES_OR_NO) : setting->otherwise;
		return true;
	}
	if (!text || !*text) {
		*(uint64_t *)at = setting->otherwise;
		return true;
	}
	if (!read_number(text, &number)) {
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
static int read_all(void)
{
	struct rn_settings fresh;
	bool good = true;

	memset(&fresh, 0, sizeof(fresh)); /* padding too: it is compared */
	for (int i = 0; i < SETTINGS; i++)
		if (settings[i].form != ELSEWHERE)
			good &= read_one(&settings[i], &fresh);
	if (!were_read)
		name_strangers();
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

void rn_settings_forked(void)
{
	pthread_mutex_init(&reading, NULL);
}
