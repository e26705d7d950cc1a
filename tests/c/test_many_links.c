/* SPDX-License-Identifier: Apache-2.0 */
/* A host with very many links, as of containers, each with an address: the kernel lists the links, then the addresses in
 * the same order.  How often names are compared while the GID table is read grows as they do, not as their square. */
#include "harness.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>

#include "base/gid.h"

enum { LINKS = 2000 };
static struct ifaddrs found[2 * LINKS];
static _Atomic unsigned comparisons;

int strcmp(const char *one, const char *other)
{
	comparisons++;
	while (*one && *one == *other)
		one++, other++;
	return (unsigned char)*one - (unsigned char)*other;
}

int getifaddrs(struct ifaddrs **list)
{
	static char names[LINKS][16];
	static struct sockaddr_ll numbers[LINKS];
	static struct sockaddr_in addresses[LINKS];

	for (int i = 0; i < LINKS; i++) {
		snprintf(names[i], sizeof(names[i]), "link%d", i);
		numbers[i] = (struct sockaddr_ll){.sll_family = AF_PACKET, .sll_ifindex = 1000 + i};
		addresses[i] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x0a000001u + (uint32_t)i)};
		found[i] = found[LINKS + i] = (struct ifaddrs){.ifa_name = names[i], .ifa_flags = IFF_UP};
		found[i].ifa_addr = (struct sockaddr *)&numbers[i];
		found[LINKS + i].ifa_addr = (struct sockaddr *)&addresses[i];
	}
	for (int i = 0; i + 1 < 2 * LINKS; i++)
		found[i].ifa_next = &found[i + 1];
	*list = found;
	comparisons = 0;
	return 0;
}

void freeifaddrs(struct ifaddrs *list)
{
	CHECK(list == found && comparisons >= LINKS && comparisons < 6 * LINKS);
}

static void each_is_found_where_the_last_one_was(void)
{
	struct ibv_context *context = open_soft();
	uint32_t index = 0, number = 0, count = 0;
	union ibv_gid gid;

	for (; rn_gid_next(&index, &gid, &number) && count < 200; index++, count++) {
		CHECK(gid.raw[12] == 10 && (gid.raw[14] << 8 | gid.raw[15]) == (int)number - 999);
		CHECK_EQ(number, 1000 + count);
	}
	CHECK_EQ(count, 200);
	CHECK_EQ(ibv_close_device(context), 0);
}

int main(void)
{
	RUN(each_is_found_where_the_last_one_was);
	return 0;
}
