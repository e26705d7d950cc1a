/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Address handles, and the part of them that arrives with a message.
 *
 * The port is an Ethernet port, so every address is a GID and every UD message has a GRH in front, in
 * the first 40 bytes of its receive.  RoCE v2 has no GRH on the wire but an IP header, and that is
 * what adapters put there: IPv6's as it is, IPv4's in the last 20 of the 40 bytes.  So a reader must
 * find out which of the two it is, as libibverbs does: by the version, then by IPv4's checksum, since the 20 bytes in
 * front of an IPv4 header need not be zeros.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <stdlib.h>

#include "base/gid.h"
#include "objects/ah.h"

enum {
	HEADERS = 12 + 8 + 4, /* BTH, DETH, ICRC: around a message on a real wire */
	UDP_HEADER = 8,
	IPV4_AT = 20,
};

static bool is_ipv4(const union ibv_gid *gid)
{
	return IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)gid);
}

bool rn_gid_is_multicast(const union ibv_gid *gid)
{
	return gid->raw[0] == 0xff || (is_ipv4(gid) && (gid->raw[12] & 0xf0) == 0xe0);
}

/* --- headers ------------------------------------------------------------------------------------------------ */

static uint16_t checksum(const struct iphdr *header)
{
	const unsigned char *bytes = (const unsigned char *)header;
	uint32_t sum = 0;

	for (unsigned i = 0; i < sizeof(*header); i += 2)
		sum += (uint32_t)bytes[i] << 8 | bytes[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

void rn_grh_make(struct rn_grh *grh, const union ibv_gid *from, const union ibv_gid *to, uint8_t traffic_class,
		 uint8_t hop_limit, uint32_t flow_label, uint32_t length)
{
	if (is_ipv4(to)) {
		struct iphdr header = {
			.version = 4,
			.ihl = 5,
			.tos = traffic_class,
			.tot_len = htons(sizeof(header) + UDP_HEADER + HEADERS + length),
			.frag_off = htons(IP_DF),
			.ttl = hop_limit,
			.protocol = IPPROTO_UDP,
		};

		memcpy(&header.saddr, from->raw + 12, 4);
		memcpy(&header.daddr, to->raw + 12, 4);
		header.check = checksum(&header);
		memset(grh->bytes, 0, IPV4_AT);
		memcpy(grh->bytes + IPV4_AT, &header, sizeof(header));
	} else {
		struct ibv_grh header = {
			.version_tclass_flow = htobe32(6u << 28 | (uint32_t)traffic_class << 20 | (flow_label & 0xfffff)),
			.paylen = htobe16(UDP_HEADER + HEADERS + length),
			.next_hdr = IPPROTO_UDP,
			.hop_limit = hop_limit,
			.sgid = *from,
			.dgid = *to,
		};

		memcpy(grh->bytes, &header, sizeof(header));
	}
}

/* Who sent it to whom. False: neither IPv4 nor IPv6. */
static bool read_header(const struct ibv_grh *grh, union ibv_gid *from, union ibv_gid *to, struct ibv_global_route *route)
{
	bool is_6 = be32toh(grh->version_tclass_flow) >> 28 == 6;
	struct iphdr header;
	uint16_t sum;

	memcpy(&header, (const char *)grh + IPV4_AT, sizeof(header));
	sum = header.check;
	header.check = 0;
	if (header.version == 4 && header.ihl == 5 && sum == checksum(&header)) {
		memset(from, 0, sizeof(*from));
		from->raw[10] = from->raw[11] = 0xff;
		*to = *from;
		memcpy(from->raw + 12, &header.saddr, 4);
		memcpy(to->raw + 12, &header.daddr, 4);
		route->traffic_class = header.tos;
		return true;
	}
	if (!is_6)
		return false;
	*from = grh->sgid;
	*to = grh->dgid;
	route->traffic_class = be32toh(grh->version_tclass_flow) >> 20;
	route->flow_label = be32toh(grh->version_tclass_flow) & 0xfffff;
	return true;
}

/* --- the calls ------------------------------------------------------------------------------------------------ */

/* On InfiniBand's link layer a LID is a complete address; there is one LID, that of this host. */
static bool is_local(const struct ibv_ah_attr *attr)
{
	return rn_settings.infiniband && !attr->is_global && attr->dlid == RN_LID;
}

RN_EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct rn_context *context = rn_context(pd->context);
	struct ibv_ah_attr by_lid;
	union ibv_gid from;
	struct rn_ah *ah;

	errno = rn_is_foreign(pd->context)                           ? ENODEV
		: attr->port_num != 1                                ? EINVAL
		: is_local(attr)                                     ? 0
		: !attr->is_global                                   ? EINVAL
		: !rn_gid_at(attr->grh.sgid_index, &from, NULL)      ? EINVAL
								     : 0;
	if (!errno)
		errno = rn_device_check(context, RN_CREATE_AH);
	if (errno)
		return NULL;
	if (is_local(attr)) {
		rn_gid_at(0, &from, NULL);
		by_lid = *attr;
		by_lid.grh = (struct ibv_global_route){.dgid = from, .hop_limit = 1};
		attr = &by_lid;
	}
	ah = calloc(1, sizeof(*ah));
	if (!ah)
		return NULL;
	ah->ah = (struct ibv_ah){.context = pd->context, .pd = pd};
	ah->attr = *attr;
	ah->from = from;
	ah->is_multicast = rn_gid_is_multicast(&attr->grh.dgid);
	ah->is_ours = !ah->is_multicast && rn_gid_is_ours(&attr->grh.dgid);
	pthread_mutex_lock(&context->mutex);
	rn_pd(pd)->users++;
	rn_list_add(&context->ahs, &ah->link);
	pthread_mutex_unlock(&context->mutex);
	return &ah->ah;
}

RN_EXPORT int ibv_destroy_ah(struct ibv_ah *ibv_ah)
{
	struct rn_context *context = rn_context(ibv_ah->context);
	struct rn_ah *ah = rn_ah(ibv_ah);

	if (rn_is_foreign(ibv_ah->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	rn_list_del(&ah->link);
	rn_pd(ibv_ah->pd)->users--;
	pthread_mutex_unlock(&context->mutex);
	free(ah);
	return 0;
}

void rn_ah_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->ahs))
		ibv_destroy_ah(&container_of(context->ahs.next, struct rn_ah, link)->ah);
}

/* The index from which the answer to a message leaves: that of the address that it was sent to. If that was a group's or
 * loopback's, any of the same family. */
static uint32_t index_for_answers(const union ibv_gid *to)
{
	uint32_t any = RN_GIDS - 1;
	union ibv_gid gid;

	for (uint32_t i = 0; rn_gid_next(&i, &gid, NULL); i++) {
		if (rn_gid_is_same(&gid, to))
			return i;
		if (i < any && is_ipv4(&gid) == is_ipv4(to))
			any = i;
	}
	return any;
}

/* The address of a message's sender, from the GID that it was sent to. */
RN_EXPORT int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
				  struct ibv_ah_attr *attr)
{
	union ibv_gid from, to;

	memset(attr, 0, sizeof(*attr));
	attr->port_num = port;
	attr->dlid = wc->slid;
	attr->sl = wc->sl;
	attr->src_path_bits = wc->dlid_path_bits;
	if (!(wc->wc_flags & IBV_WC_GRH))
		return 0;
	if (rn_is_foreign(context)) {
		errno = ENODEV;
		return -1;
	}
	if (port != 1 || !read_header(grh, &from, &to, &attr->grh)) {
		errno = EINVAL;
		return -1;
	}
	attr->is_global = 1;
	attr->grh.dgid = from;
	attr->grh.hop_limit = 0xff;
	attr->grh.sgid_index = index_for_answers(&to);
	return 0;
}

RN_EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr attr;

	return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}

/* --- whose address it is ------------------------------------------------------------------------------ */

/* A port's LID, where there is no global address, is this host's own. */
bool rn_ah_is_ours(const struct ibv_ah_attr *ah)
{
	return !ah->is_global || rn_gid_is_ours(&ah->grh.dgid);
}

bool rn_ah_needs_tcp(const struct ibv_ah_attr *ah)
{
	return rn_settings.transport == RN_TRANSPORT_STREAM || !rn_ah_is_ours(ah);
}
