/* SPDX-License-Identifier: Apache-2.0 */
#include "base/proc_net.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/gid.h"
#include "base/lines.h"

enum { LISTEN = 0x0A };

/* One line. */
struct entry {
	union ibv_gid at;
	unsigned port, state, user;
	unsigned long inode; /* 0: the socket is closed */
};

/* "0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 12345 ...": addresses are words of
 * the machine in hexadecimal digits. */
static bool parse(const char *line, struct entry *entry)
{
	unsigned word[4] = {0};
	const char *rest = strchr(line, ':');
	int words = 0, length = 0;

	for (rest = rest ? rest + 1 : ""; words < 4 && sscanf(rest, " %8x%n", &word[words], &length) == 1; rest += length) {
		words++;
		if (rest[length] == ':') {
			rest += length;
			break;
		}
	}
	if ((words != 1 && words != 4) ||
	    sscanf(rest, ":%x %*[0-9A-F]:%*x %x %*x:%*x %*x:%*x %*x %u %*u %lu", &entry->port, &entry->state,
		   &entry->user, &entry->inode) != 4)
		return false;
	entry->at = rn_gid_any_v4;
	if (words == 1)
		memcpy(&entry->at.raw[12], word, 4);
	else
		memcpy(entry->at.raw, word, 16);
	return true;
}

/* How well a listener's address fits: that very one, the wildcard of its family, that of both families. */
enum rank { NONE, BOTH_FAMILIES, WILDCARD, EXACT };

struct search {
	union ibv_gid address;
	unsigned port;
	struct entry found;
	enum rank rank;
	bool is_disputed; /* listeners of the same rank, on several devices, say, are several users' */
};

static enum rank rank_of(const union ibv_gid *at, const union ibv_gid *address)
{
	static const union ibv_gid any;
	bool is_v4 = rn_gid_is_v4(address);

	if (rn_gid_is_same(at, address))
		return EXACT;
	if (rn_gid_is_same(at, &any))
		return is_v4 ? BOTH_FAMILIES : WILDCARD;
	return is_v4 && rn_gid_is_same(at, &rn_gid_any_v4) ? WILDCARD : NONE;
}

static void compare(struct search *search, const struct entry *entry)
{
	enum rank rank = rank_of(&entry->at, &search->address);

	if (entry->port != search->port || !entry->inode || rank < search->rank || rank == NONE)
		return;
	search->is_disputed = rank == search->rank &&
			      (search->is_disputed || entry->user != search->found.user);
	search->found = *entry;
	search->rank = rank;
}

/* Listeners are the first lines, behind one of titles. False: what follows is none. */
static bool take_listener(const char *line, void *closure)
{
	struct search *search = closure;
	struct entry entry;

	if (!parse(line, &entry))
		return true; /* the titles */
	if (entry.state != LISTEN)
		return false;
	compare(search, &entry);
	return true;
}

/* Of this thread's network: /proc/net is the main thread's. */
static const char tcp[] = "/proc/thread-self/net/tcp";

bool rn_proc_tells_of_tcp(void)
{
	return !access(tcp, R_OK);
}

bool rn_proc_tcp_listener(const struct sockaddr *address, uid_t *user, union ibv_gid *at)
{
	struct search search = {0};
	const struct sockaddr_in *v4 = (const void *)address; /* the port is at the same place in both families */

	rn_gid_of(address, &search.address);
	search.port = ntohs(v4->sin_port);
	rn_for_each_line(tcp, take_listener, &search);
	if (search.rank != EXACT)
		rn_for_each_line("/proc/thread-self/net/tcp6", take_listener, &search);
	if (search.rank == NONE || search.is_disputed)
		return false;
	*user = search.found.user;
	*at = search.found.at;
	return true;
}

/* --- Unix ------------------------------------------------------------------------------------------------------ */

struct name_search {
	bool (*is_it)(const struct rn_unix_name *name, void *closure);
	void *closure;
	bool found;
};

/* "0000000000000000: 00000002 00000000 00010000 0001 01 12345 @name": the third number has a bit for listeners, and the
 * fourth is the type. Sockets that are connected, or wait to be accepted, are in other states. */
static bool take_name(const char *line, void *closure)
{
	enum { LISTENS = 0x10000, UNCONNECTED = 1 };
	struct name_search *search = closure;
	unsigned flags, type, state;
	int length = 0;

	if (sscanf(line, "%*[^:]: %*x %*x %x %x %x %*u @%n", &flags, &type, &state, &length) == 3 && length &&
	    type == SOCK_STREAM && state == UNCONNECTED) {
		struct rn_unix_name name = {
			.text = line + length, .length = strlen(line + length), .listens = flags & LISTENS};

		search->found = search->is_it(&name, search->closure);
	}
	return !search->found;
}

int rn_proc_unix_name_search(bool (*is_it)(const struct rn_unix_name *name, void *closure), void *closure)
{
	struct name_search search = {.is_it = is_it, .closure = closure};

	return rn_for_each_line("/proc/thread-self/net/unix", take_name, &search) ? search.found : -1;
}
