/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "stranger.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "engine.h"
#include "guard.h"
#include "log.h"

enum {
	STRANGERS_MAX = 448, /* of 36 KiB: less than 16 MiB */
	STRANGERS_MIN = 4,
	BUCKETS = 1024,
};

static struct rn_stranger *first; /* the newest */
static unsigned count;
static uint64_t seed; /* nobody knows who shares a bucket with whom */

static void forget_in_child(void)
{
	first = NULL;
	count = 0;
}

static void start_once(void)
{
	if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) < 0)
		seed = rn_now_ns();
	rn_at_fork_child(forget_in_child);
}

static unsigned limit(void)
{
	struct rlimit files;

	if (getrlimit(RLIMIT_NOFILE, &files) || files.rlim_cur / 4 > STRANGERS_MAX)
		return STRANGERS_MAX;
	return files.rlim_cur / 4 < STRANGERS_MIN ? STRANGERS_MIN : (unsigned)(files.rlim_cur / 4);
}

/* Who has one address of IPv6 has the 2^64 beside it, too. */
static unsigned length_of(const union ibv_gid *source)
{
	static const uint8_t v4[12] = {[10] = 0xff, [11] = 0xff};

	return memcmp(source->raw, v4, sizeof(v4)) ? sizeof(source->raw) / 2 : sizeof(source->raw);
}

static unsigned bucket_of(const struct rn_stranger *stranger)
{
	unsigned length = length_of(&stranger->from);
	uint64_t hash = seed;

	for (unsigned i = 0; i < length; i++)
		hash = (hash ^ stranger->from.raw[i]) * 0x9e3779b97f4a7c15ull;
	return (unsigned)(hash >> 32) % BUCKETS;
}

static bool is_same_source(const struct rn_stranger *a, const struct rn_stranger *b)
{
	unsigned length = length_of(&a->from);

	return length == length_of(&b->from) && !memcmp(&a->from, &b->from, length);
}

/* The bucket that has most is mostly one source's: of two different ones each cancels the other out. */
static const struct rn_stranger *who_has_most(void)
{
	uint16_t in_bucket[BUCKETS] = {0};
	const struct rn_stranger *source = NULL;
	unsigned most = 0, votes = 0;

	for (struct rn_stranger *at = first; at; at = at->next) {
		if (++in_bucket[at->bucket] > in_bucket[most])
			most = at->bucket;
	}
	for (struct rn_stranger *at = first; at; at = at->next) {
		if (at->bucket != most)
			continue;
		if (!votes)
			source = at;
		votes = is_same_source(source, at) ? votes + 1 : votes - 1;
	}
	return source;
}

/* The eldest of the source that has most, but not this one. */
static struct rn_stranger *least_welcome(const struct rn_stranger *newcomer)
{
	const struct rn_stranger *source = who_has_most();
	struct rn_stranger *chosen = NULL;

	for (struct rn_stranger *at = first; at; at = at->next)
		if (at != newcomer && (!chosen || is_same_source(source, at) || !is_same_source(source, chosen)))
			chosen = at; /* the last one found is the eldest; any source's, if that one has no other */
	return chosen;
}

static bool make_one_leave(const struct rn_stranger *newcomer, const char *why)
{
	struct rn_stranger *stranger = least_welcome(newcomer);

	if (!stranger)
		return false;
	rn_warn(RN_WARN_SILENCE, "%u connections have not said who they are, %s: the eldest is closed", count, why);
	rn_stranger_forget(stranger); /* whatever it does: we get on */
	stranger->leave(stranger);
	return true;
}

void rn_stranger_add(struct rn_stranger *stranger)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
	stranger->bucket = (uint16_t)bucket_of(stranger);
	stranger->next = first;
	stranger->link = &first;
	if (first)
		first->link = &stranger->next;
	first = stranger;
	count++;
	while (rn_guarded(RN_GUARD_STRANGERS) && count > limit() && make_one_leave(stranger, "more than there may be"))
		;
}

void rn_stranger_forget(struct rn_stranger *stranger)
{
	if (!stranger->link)
		return;
	*stranger->link = stranger->next;
	if (stranger->next)
		stranger->next->link = stranger->link;
	stranger->link = NULL;
	count--;
}

bool rn_stranger_make_room(void)
{
	return rn_guarded(RN_GUARD_STRANGERS) && make_one_leave(NULL, "and no descriptor is left");
}

union ibv_gid rn_stranger_user(int fd)
{
	struct ucred cred = {.uid = (uid_t)-1};
	socklen_t length = sizeof(cred);
	union ibv_gid from = {.raw = {0xff, 'u', 'i', 'd'}}; /* no address */

	getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length);
	memcpy(&from.raw[4], &cred.uid, sizeof(cred.uid));
	return from;
}
