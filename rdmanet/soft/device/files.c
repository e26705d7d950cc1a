/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contents of the files that the kernel would have for our device, for programs that look there and not only into
 * the verbs.  soft-run's preload/device_files.c asks here when a program opens one of them.
 *
 *     /dev/infiniband/rdmanet_soft0                            is there such a device, and may we use it? (UCX)
 *     /sys/class/infiniband/soft0/ports/1/gid_attrs/types/N    RoCE v2, of each GID (UCX: else it takes them for v1's)
 *     /sys/class/infiniband/soft0/ports/1/gid_attrs/ndevs/N    the interface that has its address
 */
#define _GNU_SOURCE
#include <errno.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>

#include "base/extras.h"
#include "base/gid.h"
#include "base/process.h"
#include "base/settings.h"

#define DEVICES "/dev/infiniband/"
#define GID_FILES "/sys/class/infiniband/soft0/ports/1/gid_attrs/"

/* The number at the end of a path with this beginning; -1: it is another path. */
static int index_in(const char *path, const char *begin)
{
	size_t length = strlen(begin);
	unsigned index;
	int end = 0;

	if (strncmp(path, begin, length) != 0 || sscanf(path + length, "%3u%n", &index, &end) != 1 || path[length + end])
		return -1;
	return (int)index;
}

static ssize_t refuse(int error)
{
	errno = error;
	return -1;
}

RN_EXPORT ssize_t rdmanet_soft_file(const char *path, char *text, size_t size)
{
	int of_type = index_in(path, GID_FILES "types/"), of_device = index_in(path, GID_FILES "ndevs/");
	char name[IF_NAMESIZE] = "";
	uint32_t interface;

	if (!strcmp(path, DEVICES "rdmanet_soft0"))
		return 0;
	if (of_type < 0 && of_device < 0)
		return refuse(ENOENT);
	if (!rn_gid_at((uint32_t)(of_type < 0 ? of_device : of_type), NULL, &interface))
		return refuse(EINVAL);
	if (of_type >= 0)
		return snprintf(text, size, "%s\n", rn_settings.infiniband ? "IB/RoCE v1" : "RoCE v2");
	return if_indextoname(interface, name) ? snprintf(text, size, "%s\n", name) : refuse(EINVAL);
}
