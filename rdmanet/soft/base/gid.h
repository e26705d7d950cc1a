/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GID table: the IP addresses of this host, as RoCE v2 has them.
 *
 * An address keeps its index as long as it exists; one that goes leaves its index empty, and one
 * that comes takes the first empty one.  IPv4 addresses are IPv6-mapped, as everywhere in RDMA.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "verbs.h"

enum { RN_GIDS = 256 }; /* an address vector's sgid_index has eight bits */

/* The table is there while at least one context is open. tell: of events of the port, on the engine. */
void rn_gid_open(void (*tell)(enum ibv_event_type type));
void rn_gid_close(void);
/* Have the engine, which the caller holds, tell contexts of changes. Once for each start of it. */
void rn_gid_watch(void);

unsigned rn_gid_count(void);
/* False: nothing there, and nothing is written. interface: its number in this network namespace; may be NULL, as gid
 * may. */
bool rn_gid_at(uint32_t index, union ibv_gid *gid, uint32_t *interface);
/* The same of the first entry from *index on, which becomes its index. Each call is a system call, as is one of
 * rn_gid_at(): to go through the table with that would take 256 of them, for the few addresses that hosts have. */
bool rn_gid_next(uint32_t *index, union ibv_gid *gid, uint32_t *interface);
/* Is it an address of this host (all of 127.0.0.0/8 are)? */
bool rn_gid_is_ours(const union ibv_gid *gid);
/* Of the entry with this address; all of 127.0.0.0/8 have 127.0.0.1's. -1: there is none. */
int rn_gid_index_of(const struct sockaddr *address);
/* RDMANET_SOFT=local: only loopback's addresses are in the table. */
bool rn_gid_local_only(void);
/* False when the last link to elsewhere has gone: what the port's state says. */
bool rn_gid_has_link(void);

extern const union ibv_gid rn_gid_any_v4; /* IPv4's wildcard, mapped. IPv6's is all zeros */

static inline bool rn_gid_is_same(const union ibv_gid *a, const union ibv_gid *b)
{
	return !memcmp(a, b, sizeof(*a));
}

static inline bool rn_gid_is_v4(const union ibv_gid *gid)
{
	return !memcmp(gid, &rn_gid_any_v4, 12);
}

/* Convert one into the other. An IPv4-mapped address becomes an IPv4 one; a link-local one
 * gets the interface as its scope. */
void rn_gid_of(const struct sockaddr *address, union ibv_gid *gid);
socklen_t rn_gid_address(const union ibv_gid *gid, uint32_t interface, uint16_t port, struct sockaddr_storage *to);
