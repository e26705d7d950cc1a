/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses of the connection manager.
 *
 * Every address of this host is the device's.  resolve.c says how others are reached.
 */
#include "base/extras.h"
#include "base/gid.h"
#include "cm/cm.h"

static bool is_mapped(const struct sockaddr_in6 *in6)
{
	return IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr);
}

socklen_t rn_cm_address_length(const struct sockaddr *address)
{
	if (!address)
		return 0;
	return address->sa_family == AF_INET    ? sizeof(struct sockaddr_in)
	       : address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
						: 0;
}

bool rn_cm_is_wildcard(const struct sockaddr *address)
{
	const struct sockaddr_in6 *in6 = (const void *)address;

	if (address->sa_family == AF_INET)
		return ((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr == htonl(INADDR_ANY);
	return IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
}

bool rn_cm_is_multicast(const struct sockaddr *address)
{
	const struct sockaddr_in6 *v6 = (const void *)address;

	if (address->sa_family == AF_INET)
		return IN_MULTICAST(ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr));
	return IN6_IS_ADDR_MULTICAST(&v6->sin6_addr);
}

void rn_cm_set_loopback(struct sockaddr *address)
{
	if (address->sa_family == AF_INET)
		((struct sockaddr_in *)(void *)address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	else
		((struct sockaddr_in6 *)(void *)address)->sin6_addr = in6addr_loopback;
}

/* The port lies at the same place in both families. */
__be16 rn_cm_port(const struct sockaddr *address)
{
	return rn_cm_address_length(address) ? ((const struct sockaddr_in *)(const void *)address)->sin_port : 0;
}

void rn_cm_set_port(struct sockaddr *address, __be16 port)
{
	((struct sockaddr_in *)(void *)address)->sin_port = port;
}

/* A listener for both families sees an IPv4 peer as an IPv4-mapped IPv6 address. */
void rn_cm_as_ipv4(struct sockaddr_storage *address)
{
	struct sockaddr_in6 v6 = *(struct sockaddr_in6 *)address;

	if (v6.sin6_family != AF_INET6 || !is_mapped(&v6))
		return;
	memset(address, 0, sizeof *address);
	*(struct sockaddr_in *)address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = v6.sin6_port};
	memcpy(&((struct sockaddr_in *)address)->sin_addr, &v6.sin6_addr.s6_addr[12], 4);
}

void rn_cm_set_route(struct rn_cm_id *id)
{
	struct rdma_route *route = &id->id.route;

	/* A wildcard names no device yet: each request that arrives has its own. */
	if (!rn_cm_address_length(&route->addr.dst_addr) && rn_cm_is_wildcard(&route->addr.src_addr))
		return;
	id->id.verbs = rn_cm_context();
	if (!id->id.pd)
		id->id.pd = rn_cm_known_pd(); /* for programs that make their queue pairs themselves */
	id->id.port_num = 1;
	rn_gid_of(&route->addr.src_addr, &route->addr.addr.ibaddr.sgid);
	if (!rn_cm_address_length(&route->addr.dst_addr))
		return;
	rn_gid_of(&route->addr.dst_addr, &route->addr.addr.ibaddr.dgid);
	route->addr.addr.ibaddr.pkey = htobe16(0xffff);
	id->path = (struct ibv_sa_path_rec){
		.sgid = route->addr.addr.ibaddr.sgid,
		.dgid = route->addr.addr.ibaddr.dgid,
		.pkey = htobe16(0xffff),
		.reversible = 1,
		.hop_limit = 1,
		.traffic_class = id->tos,
		.mtu_selector = 2,
		.mtu = IBV_MTU_4096,
		.rate_selector = 2,
		.rate = IBV_RATE_100_GBPS,
		.packet_life_time_selector = 2,
	};
}

RN_EXPORT __be16 rdma_get_src_port(struct rdma_cm_id *id)
{
	return rn_cm_port(&id->route.addr.src_addr);
}

RN_EXPORT __be16 rdma_get_dst_port(struct rdma_cm_id *id)
{
	return rn_cm_port(&id->route.addr.dst_addr);
}
