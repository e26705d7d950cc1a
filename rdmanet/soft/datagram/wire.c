/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams to and from other hosts: wire.h has their form.
 *
 * The poster sends by itself, straight from the program's memory; a socket without room makes the
 * send queue wait a moment, every other failure drops the message, as a network does.  The engine
 * receives, and plays the responder with the bytes that came.
 *
 * A process that requires a secret of its peers receives no datagrams by wire, because nothing in one could prove
 * that its sender knows it; nor can it join a group (multicast.c).
 */
#include "base/gid.h"
#include "base/guard.h"
#include "base/log.h"
#include "base/version.h"
#include "datagram/datagram.h"
#include "datagram/port.h"
#include "datagram/wire.h"

#include <arpa/inet.h>
#include <endian.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { RN_UD_MAGIC = 0x524e5544 /* "RNUD" */, HAS_IMM = 1, SOLICITED = 2, BATCH = 32 };
struct header {
	uint32_t magic;
	uint8_t version, flags;
	uint16_t length;
	uint32_t dest_qpn, source_qpn, qkey;
	__be32 imm_data;
};
static_assert(sizeof(struct header) == RN_UD_HEADER, "as wire.h has it");

/* --- receiving: on the engine -------------------------------------------------------------------------------- */

bool rn_ud_wire_parse(const void *bytes, size_t length, struct rn_datagram *datagram, uint32_t *dest_qpn)
{
	struct header header;

	if (length < sizeof(header))
		return false;
	memcpy(&header, bytes, sizeof(header));
	if (ntohl(header.magic) == RN_UD_MAGIC && header.version != RN_WIRE_VERSION)
		rn_warn(RN_WARN_LANGUAGE,
			"dropped a datagram: it is of version %u of the device's protocol, this side speaks version %d",
			header.version, RN_WIRE_VERSION);
	if (ntohl(header.magic) != RN_UD_MAGIC || header.version != RN_WIRE_VERSION ||
	    header.flags & ~(HAS_IMM | SOLICITED) ||
	    ntohs(header.length) > RN_UD_MTU || ntohs(header.length) != length - sizeof(header) ||
	    ntohl(header.dest_qpn) > 0xffffff || ntohl(header.source_qpn) > 0xffffff)
		return false;
	*dest_qpn = ntohl(header.dest_qpn);
	*datagram = (struct rn_datagram){
		.opcode = header.flags & HAS_IMM ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
		.solicited = header.flags & SOLICITED,
		.imm_data = header.imm_data,
		.source_qpn = ntohl(header.source_qpn),
		.qkey = ntohl(header.qkey),
		.data = (const char *)bytes + sizeof(header),
		.length = ntohs(header.length),
	};
	return true;
}

static uint16_t port_of(const struct sockaddr_storage *address)
{
	return ntohs(address->ss_family == AF_INET ? ((const struct sockaddr_in *)address)->sin_port
						   : ((const struct sockaddr_in6 *)address)->sin6_port);
}

/* Was it sent to this address? Where the socket has no other, the kernel needn't tell. */
static bool is_for(struct msghdr *message, const union ibv_gid *at)
{
	struct in6_pktinfo to;

	for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(message); cmsg; cmsg = CMSG_NXTHDR(message, cmsg)) {
		if (cmsg->cmsg_level != IPPROTO_IPV6 || cmsg->cmsg_type != IPV6_PKTINFO)
			continue;
		memcpy(&to, CMSG_DATA(cmsg), sizeof(to));
		return !memcmp(&to.ipi6_addr, at, sizeof(*at));
	}
	return true;
}

void rn_ud_wire_receive(int fd, const union ibv_gid *at,
			void (*give)(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram), void *closure)
{
	static char bytes[sizeof(struct header) + RN_UD_MTU + 1]; /* the engine's; too long by one is too long */

	for (int i = 0; i < BATCH; i++) {
		union {
			struct cmsghdr header;
			char room[CMSG_SPACE(sizeof(struct in6_pktinfo))];
		} control;
		struct sockaddr_storage from = {0};
		struct iovec iov = {bytes, sizeof(bytes)};
		struct msghdr message = {.msg_name = &from,
					 .msg_namelen = sizeof(from),
					 .msg_iov = &iov,
					 .msg_iovlen = 1,
					 .msg_control = &control,
					 .msg_controllen = sizeof(control)};
		ssize_t length = recvmsg(fd, &message, MSG_DONTWAIT);
		struct rn_datagram datagram;
		union ibv_gid source;
		uint32_t dest_qpn;

		if (length < 0 && errno == ECONNREFUSED)
			continue; /* of something that we sent */
		if (length < 0)
			return;
		if (!is_for(&message, at) || !rn_ud_wire_parse(bytes, (size_t)length, &datagram, &dest_qpn) ||
		    datagram.source_qpn >> 8 != port_of(&from))
			continue;
		rn_gid_of((struct sockaddr *)&from, &source);
		rn_grh_make(&datagram.grh, &source, at, 0, 64, 0, datagram.length);
		give(closure, dest_qpn, &datagram);
	}
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

enum rn_wait rn_ud_wire_send(struct rn_qp *qp, const struct rn_ah *ah, const struct ibv_send_wr *wr, uint32_t qkey,
			     const struct rn_piece *pieces, int num_pieces, uint32_t length, bool *fault)
{
	struct header header = {
		.magic = htonl(RN_UD_MAGIC),
		.version = RN_WIRE_VERSION,
		.flags = (wr->opcode == IBV_WR_SEND_WITH_IMM ? HAS_IMM : 0) |
			 (wr->send_flags & IBV_SEND_SOLICITED ? SOLICITED : 0),
		.length = htons(length),
		.dest_qpn = htonl(wr->wr.ud.remote_qpn & 0xffffff),
		.source_qpn = htonl(qp->ex.qp_base.qp_num),
		.qkey = htonl(qkey),
		.imm_data = wr->imm_data,
	};
	struct iovec parts[RN_MAX_SGE + 1] = {{&header, sizeof(header)}};
	struct sockaddr_storage to;
	struct msghdr message = {.msg_name = &to, .msg_iov = parts, .msg_iovlen = num_pieces + 1};
	uint32_t interface = 0;
	enum rn_wait wait;

	for (int i = 0; i < num_pieces; i++)
		parts[i + 1] = (struct iovec){pieces[i].at, pieces[i].length};
	rn_gid_at(ah->attr.grh.sgid_index, NULL, &interface);
	message.msg_namelen = rn_gid_address(&ah->attr.grh.dgid, interface,
					     ah->is_multicast ? RN_UD_GROUP_PORT : wr->wr.ud.remote_qpn >> 8 & 0xffff, &to);
	wait = rn_ud_port_send(qp->ex.qp_base.qp_num >> 8, &ah->from, interface, &message, fault);
	qp->count.syscalls++;
	return wait;
}
