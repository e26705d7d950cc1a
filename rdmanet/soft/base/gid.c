/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GID table: how it is kept.  gid.h says what it is.
 *
 *      kernel                 gid.c                                  contexts
 *      address, link ------>  netlink socket -- engine: ready() ---> GID_CHANGE, PORT_ERR, PORT_ACTIVE
 *                                   |
 *                             rn_gid_at() and the others look at the socket first: without an engine,
 *                                         too, nobody is told what was true yesterday
 *
 * When the first context opens, the table is filled in an order that suits programs which take the
 * first entry that looks right: the address that leads to other hosts, other IPv4 addresses, IPv6
 * addresses, link-local ones, and loopback's last.  From then on indexes are stable (see gid.h).
 *
 * The port is up unless its last link to elsewhere has gone: a host that never had one is served by
 * loopback, and that is no fault of its port.
 *
 * Locks.  `opening` guards the socket's life and is held while its source is added and removed;
 * `lock` guards the table and is held for nothing else.  Events are raised with neither.
 */
#include "base/engine.h"
#include "base/gid.h"
#include "base/log.h"

#include <errno.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct entry {
	union ibv_gid gid;
	uint32_t interface;
	int rank; /* only while the table is made */
};

static struct {
	pthread_mutex_t opening, lock;
	unsigned users;
	struct rn_source source; /* the netlink socket; fd -1: none to be had */

	struct entry entries[RN_GIDS]; /* interface 0: empty */
	bool local_only, had_link, has_link;
	bool filled;
	bool unread; /* there was news, and the interfaces couldn't be read: for want of descriptors, mostly */
	struct rn_task telling;
	void (*tell)(enum ibv_event_type type);
	bool watched; /* by the engine, which tells contexts what is */
	bool untold_gids, untold_link;
} table = {.opening = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .source = {.fd = -1}};

enum { LOOPBACK_INTERFACE = 1 }; /* in every network namespace */

/* --- addresses ---------------------------------------------------------------------------------- */

static struct in6_addr *in6(const union ibv_gid *gid)
{
	return (struct in6_addr *)(uintptr_t)gid;
}

static bool is_loopback(const union ibv_gid *gid)
{
	return IN6_IS_ADDR_LOOPBACK(in6(gid)) || (IN6_IS_ADDR_V4MAPPED(in6(gid)) && gid->raw[12] == 127);
}

/* The one entry for all of IPv4's loopback. */
static union ibv_gid localhost(void)
{
	return (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
}

const union ibv_gid rn_gid_any_v4 = {.raw = {[10] = 0xff, [11] = 0xff}};

void rn_gid_of(const struct sockaddr *address, union ibv_gid *gid)
{
	memset(gid, 0, sizeof *gid);
	if (address->sa_family == AF_INET6) {
		memcpy(gid->raw, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, sizeof gid->raw);
		return;
	}
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(&gid->raw[12], &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
}

socklen_t rn_gid_address(const union ibv_gid *gid, uint32_t interface, uint16_t port, struct sockaddr_storage *to)
{
	struct sockaddr_in *v4 = (void *)to;
	struct sockaddr_in6 *v6 = (void *)to;

	memset(to, 0, sizeof *to);
	if (IN6_IS_ADDR_V4MAPPED(in6(gid))) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		memcpy(&v4->sin_addr, &gid->raw[12], 4);
		return sizeof *v4;
	}
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons(port);
	v6->sin6_addr = *in6(gid);
	if (IN6_IS_ADDR_LINKLOCAL(in6(gid)) || IN6_IS_ADDR_MC_LINKLOCAL(in6(gid)))
		v6->sin6_scope_id = interface;
	return sizeof *v6;
}

/* The IPv4 address from which this host reaches others. Nothing is sent. */
static union ibv_gid primary(void)
{
	/* Documentation's: routed like any other. */
	struct sockaddr_in elsewhere = {
		.sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = htonl(0xc6336401)};
	struct sockaddr_storage near = {.ss_family = AF_INET};
	socklen_t length = sizeof near;
	union ibv_gid gid;
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd >= 0 && !connect(fd, (struct sockaddr *)&elsewhere, sizeof elsewhere))
		getsockname(fd, (struct sockaddr *)&near, &length);
	if (fd >= 0)
		close(fd);
	rn_gid_of((struct sockaddr *)&near, &gid);
	return gid;
}

enum rank { PRIMARY, IPV4, IPV4_LINK_LOCAL, IPV6, IPV6_LINK_LOCAL, IPV4_LOOPBACK, IPV6_LOOPBACK };

static enum rank rank_of(const union ibv_gid *gid, const union ibv_gid *first)
{
	if (IN6_IS_ADDR_LOOPBACK(in6(gid)))
		return IPV6_LOOPBACK;
	if (IN6_IS_ADDR_LINKLOCAL(in6(gid)))
		return IPV6_LINK_LOCAL;
	if (!IN6_IS_ADDR_V4MAPPED(in6(gid)))
		return IPV6;
	if (gid->raw[12] == 127)
		return IPV4_LOOPBACK;
	if (!memcmp(gid, first, sizeof *gid))
		return PRIMARY;
	return gid->raw[12] == 169 && gid->raw[13] == 254 ? IPV4_LINK_LOCAL : IPV4;
}

/* --- reading the interfaces: with the lock held --------------------------------------------------- */

struct found {
	struct entry entries[RN_GIDS];
	unsigned count;
	bool link;
};

/* Behind those of the same rank: the kernel's order. */
static void found_add(struct found *found, const union ibv_gid *gid, uint32_t interface, enum rank rank)
{
	unsigned at = found->count;

	for (unsigned i = 0; i < found->count; i++)
		if (!memcmp(&found->entries[i].gid, gid, sizeof *gid) && found->entries[i].interface == interface)
			return;
	if (found->count == RN_GIDS)
		return;
	while (at && found->entries[at - 1].rank > (int)rank)
		at--;
	memmove(&found->entries[at + 1], &found->entries[at], (found->count - at) * sizeof *found->entries);
	found->entries[at] = (struct entry){.gid = *gid, .interface = interface, .rank = rank};
	found->count++;
}

/* An interface's number, which the list has with its link; 0 and errno.  An alias is no link, and is asked for.
 * Links and addresses are in the same order, so each search goes on where the last one has ended. */
static uint32_t number_of(const char *name, struct ifaddrs *list, struct ifaddrs **at)
{
	const struct ifaddrs *begun = *at;

	do
		if ((*at)->ifa_addr && (*at)->ifa_addr->sa_family == AF_PACKET && !strcmp((*at)->ifa_name, name))
			return (uint32_t)((const struct sockaddr_ll *)(const void *)(*at)->ifa_addr)->sll_ifindex;
	while ((*at = (*at)->ifa_next ? (*at)->ifa_next : list) != begun);
	return if_nametoindex(name);
}

/* 127.0.0.1 is there always, also on a host without any network. False: some may be missing. */
static bool find(struct found *found)
{
	union ibv_gid first = primary(), lo = localhost(), gid;
	struct ifaddrs *list = NULL, *at;
	bool complete = true;

	found->count = found->link = 0;
	found_add(found, &lo, LOOPBACK_INTERFACE, IPV4_LOOPBACK);
	if (getifaddrs(&list)) {
		rn_log("cannot read this host's addresses: %s", strerror(errno));
		return false;
	}
	for (struct ifaddrs *each = at = list; each; each = each->ifa_next) {
		uint32_t interface = number_of(each->ifa_name, list, &at);
		int family = each->ifa_addr ? each->ifa_addr->sa_family : AF_UNSPEC;

		complete &= interface || errno == ENODEV;
		if (!(each->ifa_flags & IFF_UP) || !interface)
			continue;
		found->link |= each->ifa_flags & IFF_RUNNING && !(each->ifa_flags & IFF_LOOPBACK);
		if (family != AF_INET && family != AF_INET6)
			continue;
		rn_gid_of(each->ifa_addr, &gid);
		if (rank_of(&gid, &first) != IPV4_LOOPBACK && (!table.local_only || is_loopback(&gid)))
			found_add(found, &gid, interface, rank_of(&gid, &first));
	}
	freeifaddrs(list);
	return complete;
}

static bool is_among(const struct entry *entry, const struct entry *entries, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		if (entries[i].interface == entry->interface && rn_gid_is_same(&entries[i].gid, &entry->gid))
			return true;
	return false;
}

/* True: something has changed. */
static bool merge(const struct found *found)
{
	bool changed = false;
	uint32_t empty = 0;

	for (uint32_t i = 0; i < RN_GIDS; i++) {
		if (!table.entries[i].interface || is_among(&table.entries[i], found->entries, found->count))
			continue;
		table.entries[i] = (struct entry){0};
		changed = true;
	}
	for (unsigned i = 0; i < found->count; i++) {
		if (is_among(&found->entries[i], table.entries, RN_GIDS))
			continue;
		while (empty < RN_GIDS && table.entries[empty].interface)
			empty++;
		if (empty == RN_GIDS)
			break;
		table.entries[empty] = found->entries[i];
		changed = true;
	}
	return changed;
}

static void read_interfaces(void)
{
	static struct found found; /* large, and the lock is held */
	bool had = table.has_link;

	table.unread = !find(&found);
	if (table.unread && table.filled)
		return; /* as it was, until that can be told */
	table.filled = true;
	table.untold_gids |= merge(&found);
	table.had_link |= found.link;
	table.has_link = found.link || !table.had_link;
	table.untold_link ^= table.has_link != had; /* gone and come back: nothing to tell */
}

/* --- keeping it current --------------------------------------------------------------------------- */

/* Only the arrival of messages matters, not their contents; even if some were lost. */
static bool has_news(void)
{
	char messages[8192];
	bool news = false;
	ssize_t got;

	if (table.source.fd < 0)
		return false;
	do {
		got = recv(table.source.fd, messages, sizeof messages, MSG_DONTWAIT);
		news |= got > 0 || (got < 0 && errno == ENOBUFS);
	} while (got > 0 || (got < 0 && (errno == EINTR || errno == ENOBUFS)));
	return news;
}

/* Take the lock, and have the table as it is now. The engine tells what has changed: callers may hold other locks. */
static void lock_current(void)
{
	pthread_mutex_lock(&table.lock);
	if (has_news() || table.unread)
		read_interfaces();
	if (table.watched && (table.untold_gids || table.untold_link))
		rn_task_post(&table.telling);
}

static void tell(struct rn_task *task)
{
	bool gids, link, has_link;

	(void)task;
	lock_current();
	gids = table.untold_gids;
	link = table.untold_link;
	has_link = table.has_link;
	table.untold_gids = table.untold_link = false;
	pthread_mutex_unlock(&table.lock);
	if (gids)
		table.tell(IBV_EVENT_GID_CHANGE);
	if (link)
		table.tell(has_link ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
}

static void ready(struct rn_source *source, uint32_t epoll_events)
{
	(void)source, (void)epoll_events;
	tell(&table.telling);
}

static void engine_stops(void)
{
	pthread_mutex_lock(&table.lock);
	table.watched = false;
	pthread_mutex_unlock(&table.lock);
	rn_source_remove(&table.source);
	rn_task_cancel(&table.telling);
}

static void forget_in_child(void)
{
	pthread_mutex_init(&table.opening, NULL);
	pthread_mutex_init(&table.lock, NULL);
	table.users = 0;
	table.source = (struct rn_source){.fd = -1};
	table.telling = (struct rn_task){0};
	table.watched = false;
}

static void start_once(void)
{
	rn_at_fork_child(forget_in_child);
	rn_at_engine_stop(engine_stops);
}

static int open_socket(void)
{
	struct sockaddr_nl groups = {
		.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
	int fd = rn_fd_own(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE));

	if (fd >= 0 && !bind(fd, (struct sockaddr *)&groups, sizeof groups))
		return fd;
	rn_log("cannot watch this host's addresses for changes: %s", strerror(errno));
	rn_fd_close(fd);
	return -1;
}

void rn_gid_open(void (*tell_contexts)(enum ibv_event_type type))
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
	pthread_mutex_lock(&table.opening);
	if (!table.users++) {
		int fd = open_socket(); /* before the table is read, so that nothing is missed */
		const char *local = getenv("RDMANET_SOFT");

		pthread_mutex_lock(&table.lock);
		table.source = (struct rn_source){.fd = fd, .ready = ready};
		table.telling.run = tell;
		table.tell = tell_contexts;
		memset(table.entries, 0, sizeof table.entries);
		table.local_only = local && !strcmp(local, "local");
		table.had_link = table.filled = false;
		read_interfaces();
		table.untold_gids = table.untold_link = false;
		pthread_mutex_unlock(&table.lock);
	}
	pthread_mutex_unlock(&table.opening);
}

void rn_gid_close(void)
{
	int fd = -1;

	pthread_mutex_lock(&table.opening);
	if (!--table.users) {
		pthread_mutex_lock(&table.lock);
		table.watched = false;
		pthread_mutex_unlock(&table.lock);
		rn_source_remove(&table.source);
		rn_task_cancel(&table.telling);
		pthread_mutex_lock(&table.lock);
		fd = table.source.fd;
		table.source.fd = -1;
		pthread_mutex_unlock(&table.lock);
	}
	rn_fd_close(fd);
	pthread_mutex_unlock(&table.opening);
}

void rn_gid_watch(void)
{
	pthread_mutex_lock(&table.opening);
	if (table.source.fd >= 0 && !table.source.slot && !rn_source_add(&table.source, EPOLLIN)) {
		pthread_mutex_lock(&table.lock);
		table.watched = true;
		rn_task_post(&table.telling); /* what was seen by others before */
		pthread_mutex_unlock(&table.lock);
	}
	pthread_mutex_unlock(&table.opening);
}

/* --- looking things up ---------------------------------------------------------------------------- */

unsigned rn_gid_count(void)
{
	unsigned count = 0;

	lock_current();
	for (uint32_t i = 0; i < RN_GIDS; i++)
		count += table.entries[i].interface != 0;
	pthread_mutex_unlock(&table.lock);
	return count;
}

static bool take(const struct entry *entry, union ibv_gid *gid, uint32_t *interface)
{
	if (!entry->interface)
		return false;
	if (gid)
		*gid = entry->gid;
	if (interface)
		*interface = entry->interface;
	return true;
}

bool rn_gid_at(uint32_t index, union ibv_gid *gid, uint32_t *interface)
{
	bool is_there;

	if (index >= RN_GIDS)
		return false;
	lock_current();
	is_there = take(&table.entries[index], gid, interface);
	pthread_mutex_unlock(&table.lock);
	return is_there;
}

bool rn_gid_next(uint32_t *index, union ibv_gid *gid, uint32_t *interface)
{
	bool is_there;

	lock_current();
	while (*index < RN_GIDS && !table.entries[*index].interface)
		++*index;
	is_there = *index < RN_GIDS && take(&table.entries[*index], gid, interface);
	pthread_mutex_unlock(&table.lock);
	return is_there;
}

static int index_of(const union ibv_gid *gid, uint32_t interface)
{
	int found = -1;

	lock_current();
	for (int i = 0; i < RN_GIDS && found < 0; i++)
		if (table.entries[i].interface && !memcmp(&table.entries[i].gid, gid, sizeof *gid) &&
		    (!interface || table.entries[i].interface == interface))
			found = i;
	pthread_mutex_unlock(&table.lock);
	return found;
}

bool rn_gid_is_ours(const union ibv_gid *gid)
{
	return is_loopback(gid) || index_of(gid, 0) >= 0;
}

int rn_gid_index_of(const struct sockaddr *address)
{
	const struct sockaddr_in6 *v6 = (const void *)address;
	union ibv_gid gid, lo = localhost();

	rn_gid_of(address, &gid);
	if (is_loopback(&gid) && IN6_IS_ADDR_V4MAPPED(in6(&gid)))
		return index_of(&lo, 0);
	return index_of(&gid, address->sa_family == AF_INET6 ? v6->sin6_scope_id : 0);
}

bool rn_gid_local_only(void)
{
	return table.local_only; /* as long as a context is open */
}

bool rn_gid_has_link(void)
{
	bool has_link;

	lock_current();
	has_link = table.has_link;
	pthread_mutex_unlock(&table.lock);
	return has_link;
}
