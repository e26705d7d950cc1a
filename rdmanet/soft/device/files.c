/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What may have changed in the files that the kernel would have for our device, for programs that look there and not only
 * into the verbs. soft-run's preload/open.c asks here when a program opens one of them; all other files are in the tree
 * that soft-run has made, and so are these, as they were then.
 *
 *     /sys/class/infiniband/soft0/ports/1/
 *         state, phys_state          has the host a link?
 *         gids/N                     the GID table, as base/gid.h has it
 *         gid_attrs/types/N          RoCE v2, of each GID (UCX: else it takes them for v1's)
 *         gid_attrs/ndevs/N          the interface that has its address
 *         counters/port_xmit_*       what this process's requests have moved, READs too: nobody counts for the host
 *         hw_counters/NAME           the counters of base/counters.h, summed over this process's contexts
 */
#include <errno.h>
#include <inttypes.h>
#include <net/if.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/extras.h"
#include "base/gid.h"
#include "base/process.h"
#include "base/settings.h"
#include "objects/context.h"

#define PORT "/sys/class/infiniband/soft0/ports/1/"

static ssize_t refuse(int error)
{
	errno = error;
	return -1;
}

/* --- addresses -------------------------------------------------------------------------------------- */

static ssize_t gid_text(const union ibv_gid *gid, char *text, size_t size)
{
	int length = 0;

	for (unsigned i = 0; i < 16; i += 2)
		length += snprintf(text + length, size - (size_t)length, "%s%02x%02x", i ? ":" : "", gid->raw[i], gid->raw[i + 1]);
	return length + snprintf(text + length, size - (size_t)length, "\n");
}

enum attribute { GID, TYPE, INTERFACE };

static const struct {
	const char *begin;
	enum attribute attribute;
} tables[] = {{"gids/", GID}, {"gid_attrs/types/", TYPE}, {"gid_attrs/ndevs/", INTERFACE}};

/* Like the kernel: an empty entry is a GID of zeros, whose attributes cannot be read. */
static ssize_t of_entry(enum attribute attribute, const char *number, char *text, size_t size)
{
	union ibv_gid gid = {0};
	char name[IF_NAMESIZE] = "";
	uint32_t interface;
	unsigned index;
	bool is_there;
	int end = 0;

	if (sscanf(number, "%3u%n", &index, &end) != 1 || number[end] || index >= RN_GIDS)
		return refuse(ENOENT);
	is_there = rn_gid_at(index, &gid, &interface);
	if (attribute == GID)
		return gid_text(&gid, text, size);
	if (!is_there)
		return refuse(EINVAL);
	if (attribute == TYPE)
		return snprintf(text, size, "%s\n", rn_settings.infiniband ? "IB/RoCE v1" : "RoCE v2");
	return if_indextoname(interface, name) ? snprintf(text, size, "%s\n", name) : refuse(EINVAL);
}

/* --- counters --------------------------------------------------------------------------------------- */

#define COUNTER(name) {#name, offsetof(struct rn_counters, name)}

static const struct {
	const char *name;
	size_t at;
} counters[] = {
	COUNTER(send_wrs),	COUNTER(recv_wrs),     COUNTER(completions),  COUNTER(bytes_mapped), COUNTER(bytes_cma),
	COUNTER(bytes_engine),	COUNTER(bytes_local),  COUNTER(bytes_inline), COUNTER(wakeups),      COUNTER(syscalls),
	COUNTER(rnr_naks),	COUNTER(deferred),     COUNTER(queued),	      COUNTER(bytes_bounced), COUNTER(lost),
	COUNTER(duplicates),	COUNTER(failed),       COUNTER(bytes_stream), COUNTER(wrong_keys),
	COUNTER(bytes_shared),
};
_Static_assert(sizeof(counters) / sizeof(counters[0]) * sizeof(uint64_t) == sizeof(struct rn_counters),
	       "each counter has a file");

static ssize_t counter_text(const char *name, char *text, size_t size)
{
	struct rn_counters sum;

	rn_context_sum(&sum);
	for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++)
		if (!strcmp(name, counters[i].name))
			return snprintf(text, size, "%" PRIu64 "\n", *(uint64_t *)((char *)&sum + counters[i].at));
	return refuse(ENOENT);
}

/* The kernel counts data in units of four bytes. */
static ssize_t port_counter_text(const char *name, char *text, size_t size)
{
	struct rn_counters sum;
	uint64_t bytes;

	rn_context_sum(&sum);
	bytes = sum.bytes_mapped + sum.bytes_cma + sum.bytes_engine + sum.bytes_local + sum.bytes_bounced + sum.bytes_stream;
	if (!strcmp(name, "port_xmit_data"))
		return snprintf(text, size, "%" PRIu64 "\n", bytes / 4);
	if (!strcmp(name, "port_xmit_packets") || !strcmp(name, "unicast_xmit_packets"))
		return snprintf(text, size, "%" PRIu64 "\n", sum.send_wrs);
	return refuse(ENOENT);
}

/* --- the files -------------------------------------------------------------------------------------- */

/* The text behind this beginning of a path; NULL: it begins otherwise. */
static const char *behind(const char *path, const char *begin)
{
	size_t length = strlen(begin);

	return strncmp(path, begin, length) ? NULL : path + length;
}

RN_EXPORT ssize_t rdmanet_soft_file(const char *path, char *text, size_t size)
{
	const char *name = behind(path, PORT), *rest;
	/* Before a context is open there is no GID table, and nothing has been counted. */
	if (!name || !rn_gid_count())
		return refuse(ENOENT);
	if (!strcmp(name, "state"))
		return snprintf(text, size, "%s\n", rn_gid_has_link() ? "4: ACTIVE" : "1: DOWN");
	if (!strcmp(name, "phys_state"))
		return snprintf(text, size, "%s\n", rn_gid_has_link() ? "5: LinkUp" : "3: Disabled");
	if ((rest = behind(name, "hw_counters/")))
		return counter_text(rest, text, size);
	if ((rest = behind(name, "counters/")))
		return port_counter_text(rest, text, size);
	for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
		if ((rest = behind(name, tables[i].begin)))
			return of_entry(tables[i].attribute, rest, text, size);
	return refuse(ENOENT);
}
