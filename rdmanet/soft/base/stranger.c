/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which stranger is closed when there are too many: least_welcome().  stranger.h has the theory; rdmanet/admission.py
 * does the same for half-open connections of stream servers.
 */
#include "base/engine.h"
#include "base/gid.h"
#include "base/guard.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/sock_diag.h"
#include "base/stranger.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
	STRANGERS_MAX = 448, /* of 36 KiB: less than 16 MiB */
	STRANGERS_MIN = 4,
	BUCKETS = 1024,
	PREFIX_BYTES = 6, /* /48 */
};

/* How the source of a user begins: no address does. Its number follows. */
static const char by_name[4] = {'\xff', 'u', 'i', 'd'}, by_tcp[4] = {'\xff', 't', 'c', 'p'};

static struct rn_stranger *first[RN_STRANGER_KINDS]; /* the newest */
static unsigned count[RN_STRANGER_KINDS];
static uint64_t seed; /* makes the buckets unpredictable */

static void forget_in_child(void)
{
	memset(first, 0, sizeof(first));
	memset(count, 0, sizeof(count));
}

static void start_once(void)
{
	if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) < 0)
		seed = rn_now_ns();
	rn_at_fork_child(forget_in_child);
}

/* Of each kind. */
static unsigned limit(void)
{
	struct rlimit files;

	if (getrlimit(RLIMIT_NOFILE, &files) || files.rlim_cur / 4 > STRANGERS_MAX)
		return STRANGERS_MAX;
	return files.rlim_cur / 4 < STRANGERS_MIN ? STRANGERS_MIN : (unsigned)(files.rlim_cur / 4);
}

/* Reduce an address to what counts as one source. */
static union ibv_gid source_of(union ibv_gid from)
{
	static const union ibv_gid this_host = {.raw = {0xff, 'h', 'e', 'r', 'e'}}; /* no address */
	static const uint8_t v4[12] = {[10] = 0xff, [11] = 0xff};

	if (from.raw[0] == 0xff || (rn_guarded(RN_GUARD_OWN_SOURCE) && rn_gid_is_ours(&from)))
		return from.raw[0] == 0xff ? from : this_host;
	if (memcmp(from.raw, v4, sizeof(v4)))
		memset(&from.raw[PREFIX_BYTES], 0, sizeof(from.raw) - PREFIX_BYTES);
	return from;
}

static unsigned bucket_of(const struct rn_stranger *stranger)
{
	uint64_t hash = seed;

	for (unsigned i = 0; i < sizeof(stranger->from.raw); i++)
		hash = (hash ^ stranger->from.raw[i]) * 0x9e3779b97f4a7c15ull;
	return (unsigned)(hash >> 32) % BUCKETS;
}

static bool is_by_name(const struct rn_stranger *stranger)
{
	return !memcmp(stranger->from.raw, by_name, sizeof(by_name));
}

static bool is_same_source(const struct rn_stranger *a, const struct rn_stranger *b)
{
	return !memcmp(&a->from, &b->from, sizeof(a->from));
}

/* The newest that may be closed; NULL: none may. All behind it are older and may be closed too. (The newcomer is the
 * newest.) */
static struct rn_stranger *first_to_leave(enum rn_stranger_kind kind, const struct rn_stranger *newcomer)
{
	uint64_t patience_ns = kind == RN_STRANGER_KNOWN ? rn_settings.silence_ms * 1000000u / 5 : 0;
	uint64_t now = patience_ns ? rn_now_ns() : UINT64_MAX;
	struct rn_stranger *at = first[kind];

	while (at && (at == newcomer || now - at->since_ns < patience_ns))
		at = at->next;
	return at;
}

/* Is the larger group of them that of the Unix sockets? */
static bool are_mostly_by_name(const struct rn_stranger *from)
{
	int more = 0;

	for (const struct rn_stranger *at = from; at; at = at->next)
		more += is_by_name(at) ? 1 : -1;
	return more > 0;
}

/* Of one group. Most of the largest bucket is one source's; a majority vote finds it: two different entries cancel each
 * other. */
static const struct rn_stranger *who_has_most(struct rn_stranger *from, bool of_names)
{
	uint16_t in_bucket[BUCKETS] = {0};
	const struct rn_stranger *source = NULL;
	unsigned most = 0, votes = 0;

	for (struct rn_stranger *at = from; at; at = at->next) {
		if (is_by_name(at) == of_names && ++in_bucket[at->bucket] > in_bucket[most])
			most = at->bucket;
	}
	for (struct rn_stranger *at = from; at; at = at->next) {
		if (at->bucket != most || is_by_name(at) != of_names)
			continue;
		if (!votes)
			source = at;
		votes = is_same_source(source, at) ? votes + 1 : votes - 1;
	}
	return source;
}

/* The oldest of the source that has the most, in the larger group: of its silent ones, if they are its majority. */
static struct rn_stranger *least_welcome(enum rn_stranger_kind kind, const struct rn_stranger *newcomer)
{
	enum { FEW = 8 };
	struct rn_stranger *from = first_to_leave(kind, newcomer), *chosen = from, *silent = NULL;
	bool of_names = are_mostly_by_name(from);
	const struct rn_stranger *source = who_has_most(from, of_names);
	unsigned of_source = 0, silent_of_source = 0;

	for (struct rn_stranger *at = from; at; at = at->next) {
		if (!is_same_source(source, at))
			continue;
		chosen = at;
		of_source++;
		if (!at->has_spoken) {
			silent = at;
			silent_of_source++;
		}
	}
	if (2 * silent_of_source > of_source)
		chosen = silent;
	/* No source has many: an attacker uses many addresses. Honest peers go on at once and are never the oldest. */
	for (struct rn_stranger *at = of_source * FEW < limit() ? chosen : NULL; at; at = at->next) {
		if (is_by_name(at) == of_names)
			chosen = at;
	}
	return chosen;
}

static bool make_one_leave(enum rn_stranger_kind kind, const struct rn_stranger *newcomer, const char *why)
{
	static const char *const what[RN_STRANGER_KINDS] = {
		[RN_STRANGER_SILENT] = "have not identified themselves",
		[RN_STRANGER_KNOWN] = "were admitted but make no progress"};
	struct rn_stranger *stranger = least_welcome(kind, newcomer);

	if (!stranger)
		return false;
	rn_warn(RN_WARN_SILENCE, "%u connections %s, %s: closed the oldest", count[kind], what[kind], why);
	rn_stranger_forget(stranger); /* first, so that the loop ends whatever leave() does */
	stranger->leave(stranger);
	return true;
}

void rn_stranger_add(struct rn_stranger *stranger, enum rn_stranger_kind kind)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
	rn_stranger_forget(stranger);
	stranger->from = source_of(stranger->from);
	stranger->bucket = (uint16_t)bucket_of(stranger);
	stranger->kind = (uint8_t)kind;
	stranger->has_spoken |= kind == RN_STRANGER_KNOWN;
	stranger->since_ns = kind == RN_STRANGER_KNOWN ? rn_now_ns() : 0;
	stranger->next = first[kind];
	stranger->link = &first[kind];
	if (first[kind])
		first[kind]->link = &stranger->next;
	first[kind] = stranger;
	count[kind]++;
	while (rn_guarded(RN_GUARD_STRANGERS) && count[kind] > limit() &&
	       make_one_leave(kind, stranger, "more than the limit"))
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
	count[stranger->kind]--;
}

bool rn_stranger_make_room(void)
{
	static const char why[] = "and no descriptor is left";

	return rn_guarded(RN_GUARD_STRANGERS) && (make_one_leave(RN_STRANGER_SILENT, NULL, why) ||
						  make_one_leave(RN_STRANGER_KNOWN, NULL, why));
}

union ibv_gid rn_stranger_user(int fd)
{
	struct ucred cred = {.uid = (uid_t)-1};
	socklen_t length = sizeof(cred);
	union ibv_gid from = {.raw = {0}};

	memcpy(from.raw, by_name, sizeof(by_name));
	getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length);
	memcpy(&from.raw[4], &cred.uid, sizeof(cred.uid));
	/* Our own user has honest peers: each process counts separately, and those hidden from our namespace as one. */
	if (rn_guarded(RN_GUARD_OWN_SOURCE) && cred.uid == geteuid())
		memcpy(&from.raw[8], &cred.pid, sizeof(cred.pid));
	return from;
}

union ibv_gid rn_stranger_by_tcp(int fd, const struct sockaddr *far)
{
	union ibv_gid from;
	uid_t user;

	rn_gid_of(far, &from);
	if (!rn_guarded(RN_GUARD_TCP_USER) || !rn_gid_is_ours(&from) || !rn_tcp_peer_user(fd, &user))
		return from;
	from = (union ibv_gid){.raw = {0}};
	memcpy(from.raw, by_tcp, sizeof(by_tcp));
	memcpy(&from.raw[sizeof(by_tcp)], &user, sizeof(user));
	return from;
}

union ibv_gid rn_stranger_by_link(int pid, bool of_name)
{
	union ibv_gid from = {.raw = {0}};
	uid_t user = geteuid();

	memcpy(from.raw, of_name ? by_name : by_tcp, sizeof(by_tcp));
	memcpy(&from.raw[sizeof(by_tcp)], &user, sizeof(user));
	memcpy(&from.raw[sizeof(by_tcp) + sizeof(user)], &pid, sizeof(pid));
	return from;
}

enum rn_stranger_way rn_stranger_way(const union ibv_gid *from, uid_t *user)
{
	memcpy(user, &from->raw[sizeof(by_name)], sizeof(*user));
	if (!memcmp(from->raw, by_name, sizeof(by_name)))
		return RN_STRANGER_BY_NAME;
	return memcmp(from->raw, by_tcp, sizeof(by_tcp)) ? RN_STRANGER_UNKNOWN : RN_STRANGER_BY_TCP;
}
