/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listeners of this host that have spoken our protocol by TCP, and where; the kernel never uses a cookie twice.  (A name
 * alone is not enough: its listener may be there by name only, beside a TCP program.)  Once a listener's process has
 * accepted a connection, the port of that process is known, too: the upper bits of its queue pairs' numbers, by which a
 * link to it is found (ask.c).  Of a listener that is there by name only its process is all that is known: it has no
 * cookie, and who has the name is asked each time.
 *
 * Used on the engine, or by a thread that stands in for it.
 */
#include "base/gid.h"
#include "base/sock_diag.h"
#include "cm/cm.h"

enum { KNOWN = 16 };

static struct known {
	uint64_t cookie; /* 0: there is none, or it is there by name */
	union ibv_gid gid;
	__be16 port;
	uint16_t peer; /* 0: not known */
	uint32_t mail_channel;
} known[KNOWN];
static unsigned next_known;

static struct known *find(uint64_t cookie)
{
	for (unsigned i = 0; i < KNOWN; i++)
		if (cookie && known[i].cookie == cookie)
			return &known[i];
	return NULL;
}

static bool is_at(const struct known *one, const union ibv_gid *gid, __be16 port)
{
	return one->port == port && rn_gid_is_same(&one->gid, gid);
}

/* The listener that is, or was, there by name. */
static struct known *find_by_name(const struct sockaddr *dst)
{
	union ibv_gid gid;

	rn_gid_of(dst, &gid);
	for (unsigned i = 0; i < KNOWN; i++)
		if (!known[i].cookie && is_at(&known[i], &gid, rn_cm_port(dst)))
			return &known[i];
	return NULL;
}

static struct known *add(const struct sockaddr *dst, uint64_t cookie)
{
	struct known *one = &known[next_known++ % KNOWN];

	*one = (struct known){.cookie = cookie, .port = rn_cm_port(dst)};
	rn_gid_of(dst, &one->gid);
	return one;
}

bool rn_cm_is_known(uint64_t cookie)
{
	return find(cookie) != NULL;
}

void rn_cm_known_has_spoken(const struct sockaddr *dst, uint64_t cookie)
{
	if (cookie && !find(cookie))
		add(dst, cookie);
}

/* An RDMA program that has the TCP port is reached by that: no name beside it is looked for. */
bool rn_cm_known_is_there(const struct sockaddr *dst, uint64_t *cookie)
{
	__be16 port = rn_cm_port(dst);
	struct sockaddr_storage to = {0};
	union ibv_gid gid;
	unsigned at = 0;
	uid_t user;

	rn_gid_of(dst, &gid);
	while (at < KNOWN && !(known[at].cookie && is_at(&known[at], &gid, port)))
		at++;
	if (at == KNOWN || !rn_gid_is_ours(&gid))
		return false;
	memcpy(&to, dst, rn_cm_address_length(dst));
	rn_cm_as_ipv4(&to);
	return rn_tcp_listener_cookie((struct sockaddr *)&to, cookie, &user) && find(*cookie);
}

void rn_cm_known_is_of(const struct sockaddr *dst, uint64_t cookie, uint16_t peer)
{
	struct known *one = cookie ? find(cookie) : find_by_name(dst);

	if (!one && peer)
		one = add(dst, cookie);
	if (one)
		one->peer = peer;
}

void rn_cm_known_reads(const struct sockaddr *dst, uint64_t cookie, uint32_t mail_channel)
{
	struct known *one = cookie ? find(cookie) : find_by_name(dst);

	if (one)
		one->mail_channel = mail_channel;
}

uint16_t rn_cm_known_peer(const struct sockaddr *dst, bool by_name_alone, uint64_t *cookie, uint32_t *mail_channel)
{
	union ibv_gid gid;

	rn_gid_of(dst, &gid);
	for (unsigned i = 0; i < KNOWN; i++) {
		if (!known[i].peer || (by_name_alone && known[i].cookie) || !is_at(&known[i], &gid, rn_cm_port(dst)))
			continue;
		*cookie = known[i].cookie;
		*mail_channel = known[i].mail_channel;
		return known[i].peer;
	}
	return 0;
}
