/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams to and from other hosts: ud_wire.h has their form.
 *
 * The poster sends by itself, straight from the program's memory; a socket without room makes the
 * send queue wait a moment, every other failure drops the message, as a network does.  The engine
 * receives, and plays the responder with the bytes that came.
 *
 * The UDP port is the process's before anybody can know its number, at all addresses that the host has then: nobody
 * else hears or speaks in our queue pairs' name. Each socket is connected to itself until the first queue pair opens
 * it, and again after the last: connected, it hears nobody else, and is no open door. Loopback's keep all wildcards
 * from others. Where an address comes later, and its port is somebody else's, the next queue pair isn't made ready.
 *
 * Whoever demands a secret of its peers hears no datagrams from elsewhere: nothing in one could prove
 * that its sender knows it; nor can it join a group (mcast.c).
 *
 * Locks: wire_lock guards the sockets, and is taken inside sq_lock; nothing is taken inside it.
 */
#define _GNU_SOURCE
#include "ud_wire.h"

#include "gid.h"
#include "guard.h"
#include "log.h"
#include "ud.h"

#include <arpa/inet.h>
#include <endian.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { MAGIC = 0x524e5544 /* "RNUD" */, VERSION = 1, HAS_IMM = 1, SOLICITED = 2, BATCH = 32 };

struct header {
	uint32_t magic;
	uint8_t version, flags;
	uint16_t length;
	uint32_t dest_qpn, source_qpn, qkey;
	__be32 imm_data;
};
static_assert(sizeof(struct header) == RN_UD_HEADER, "as ud_wire.h has it");

struct outlet {
	struct rn_source source; /* from the first opening on */
	struct sockaddr_storage at;
	socklen_t at_length;
	union ibv_gid gid;
	uint16_t port;
	struct outlet *next;
};

/* A port, and how many UD queue pairs have it open. */
struct wire {
	uint16_t port;
	unsigned users;
	struct outlet *outlets;
	struct wire *next;
};

static pthread_mutex_t wire_lock = PTHREAD_MUTEX_INITIALIZER;
static struct wire *wires;

/* --- receiving: on the engine -------------------------------------------------------------------------------- */

bool rn_ud_wire_parse(const void *bytes, size_t length, struct rn_datagram *datagram, uint32_t *dest_qpn)
{
	struct header header;

	if (length < sizeof(header))
		return false;
	memcpy(&header, bytes, sizeof(header));
	if (ntohl(header.magic) != MAGIC || header.version != VERSION || header.flags & ~(HAS_IMM | SOLICITED) ||
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

static void give_to_one(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram)
{
	const struct outlet *outlet = closure;
	uint32_t index;

	if (dest_qpn >> 8 != outlet->port)
		return;
	pthread_mutex_lock(&rn_world);
	index = rn_own_locate(dest_qpn);
	if (index < RN_QPS_MAX) {
		struct rn_qp *qp = rn_qps[index];

		if (qp && qp->ex.qp_base.qp_num == dest_qpn)
			rn_ud_deliver(qp, datagram);
	}
	pthread_mutex_unlock(&rn_world);
}

static void outlet_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct outlet *outlet = RN_OWNER(source, struct outlet, source);

	(void)epoll_events;
	rn_ud_wire_receive(source->fd, &outlet->gid, give_to_one, outlet);
}

/* --- opening and closing ---------------------------------------------------------------------------------------- */

/* A socket at the address, bound. -1 and errno. */
static int bind_to(const struct sockaddr_storage *at, socklen_t length, uint32_t interface)
{
	int fd = rn_fd_own(socket(at->ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), size = 1 << 20, err;

	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
	if (at->ss_family == AF_INET) {
		struct ip_mreqn by = {.imr_ifindex = (int)interface};

		setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &by, sizeof(by));
	} else {
		int by = (int)interface, only = 1;

		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
		setsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, &by, sizeof(by));
	}
	if (!bind(fd, (const struct sockaddr *)at, length))
		return fd;
	err = errno;
	rn_fd_close(fd);
	errno = err;
	return -1;
}

static struct wire *find_wire(uint16_t port)
{
	struct wire *wire = wires;

	while (wire && wire->port != port)
		wire = wire->next;
	return wire;
}

static struct wire *get_wire(uint16_t port)
{
	struct wire *wire = find_wire(port);

	if (!wire && (wire = calloc(1, sizeof(*wire)))) {
		*wire = (struct wire){.port = port, .next = wires};
		wires = wire;
	}
	return wire;
}

/* It hears nobody but itself, and whoever lists open ports doesn't find it. False: that can't be. */
static bool outlet_shut(const struct outlet *outlet)
{
	return !connect(outlet->source.fd, (const struct sockaddr *)&outlet->at, outlet->at_length);
}

/* It stays bound: the port was asked for. 0 or errno. */
static int outlet_open(struct outlet *outlet)
{
	static const struct sockaddr nobody = {.sa_family = AF_UNSPEC};

	if (connect(outlet->source.fd, &nobody, sizeof(nobody)))
		return errno;
	return outlet->source.slot ? 0 : -rn_source_add(&outlet->source, EPOLLIN);
}

static void outlets_free(struct outlet *outlets)
{
	while (outlets) {
		struct outlet *outlet = outlets;

		outlets = outlet->next;
		rn_source_remove(&outlet->source);
		rn_fd_close(outlet->source.fd);
		free(outlet);
	}
}

/* The socket with this address: the one that is there, or a new one, open or shut as the others are. NULL and errno. */
static struct outlet *outlet_at(struct wire *wire, const union ibv_gid *gid, uint32_t interface)
{
	struct outlet *outlet;
	int err;

	for (outlet = wire->outlets; outlet; outlet = outlet->next)
		if (!memcmp(&outlet->gid, gid, sizeof(*gid)))
			return outlet;
	outlet = calloc(1, sizeof(*outlet));
	if (!outlet)
		return NULL;
	*outlet = (struct outlet){.source = {.ready = outlet_ready}, .gid = *gid, .port = wire->port, .next = wire->outlets};
	outlet->at_length = rn_gid_address(gid, interface, wire->port, &outlet->at);
	outlet->source.fd = bind_to(&outlet->at, outlet->at_length, interface);
	if (outlet->source.fd < 0) {
		err = errno;
	} else {
		err = wire->users ? outlet_open(outlet) : outlet_shut(outlet) ? 0 : EADDRNOTAVAIL;
		if (err)
			rn_fd_close(outlet->source.fd);
	}
	if (err) {
		rn_log("UD messages can't come from other hosts to UDP port %u: %s", wire->port, strerror(err));
		free(outlet);
		errno = err;
		return NULL;
	}
	wire->outlets = outlet;
	return outlet;
}

/* At all addresses of the host. One that has just gone needs none. 0 or errno. */
static int outlets_everywhere(struct wire *wire)
{
	uint32_t interface;
	union ibv_gid gid;

	for (uint32_t i = 0; i < RN_GIDS; i++)
		if (rn_gid_at(i, &gid, &interface) && !outlet_at(wire, &gid, interface) && errno != EADDRNOTAVAIL &&
		    rn_guarded(RN_GUARD_DATAGRAM_PORT))
			return errno;
	return 0;
}

int rn_ud_wire_reserve(uint16_t port)
{
	struct wire *wire;
	int err;

	if (rn_settings.has_secret || !rn_guarded(RN_GUARD_DATAGRAM_PORT))
		return 0;
	pthread_mutex_lock(&wire_lock);
	wire = get_wire(port);
	err = wire ? outlets_everywhere(wire) : ENOMEM;
	pthread_mutex_unlock(&wire_lock);
	return err;
}

void rn_ud_wire_free(uint16_t port)
{
	struct wire **at, *wire;

	pthread_mutex_lock(&wire_lock);
	for (at = &wires; *at && (*at)->port != port;)
		at = &(*at)->next;
	wire = *at;
	if (wire)
		*at = wire->next;
	pthread_mutex_unlock(&wire_lock);
	if (wire)
		outlets_free(wire->outlets);
	free(wire);
}

/* Those at addresses that the host hasn't any more come back, to be freed without locks. */
static struct outlet *shut_all(struct wire *wire)
{
	struct outlet *gone = NULL;

	for (struct outlet **at = &wire->outlets; *at;) {
		struct outlet *outlet = *at;

		if (rn_gid_is_ours(&outlet->gid) && outlet_shut(outlet)) {
			at = &outlet->next;
			continue;
		}
		*at = outlet->next;
		outlet->next = gone;
		gone = outlet;
	}
	return gone;
}

int rn_ud_wire_open(struct rn_qp *qp)
{
	uint16_t port = qp->ex.qp_base.qp_num >> 8;
	struct outlet *gone = NULL;
	struct wire *wire;
	int err = 0;

	if (rn_settings.has_secret)
		return 0; /* a datagram can't prove that its sender knows it */
	pthread_mutex_lock(&wire_lock);
	wire = get_wire(port);
	if (!wire) {
		err = ENOMEM;
	} else {
		if (!wire->users++)
			for (struct outlet *outlet = wire->outlets; outlet && !err; outlet = outlet->next)
				err = outlet_open(outlet);
		if (!err)
			err = outlets_everywhere(wire);
		if (err && !--wire->users)
			gone = shut_all(wire);
	}
	pthread_mutex_unlock(&wire_lock);
	outlets_free(gone);
	if (err)
		rn_warn(RN_WARN_NAME, "UDP port %u of our queue pairs is not to be had at all our addresses: %s", port,
			strerror(err));
	return err;
}

void rn_ud_wire_close(struct rn_qp *qp)
{
	struct outlet *gone = NULL;
	struct wire *wire;

	pthread_mutex_lock(&wire_lock);
	wire = find_wire(qp->ex.qp_base.qp_num >> 8);
	if (wire && wire->users && !--wire->users)
		gone = shut_all(wire);
	pthread_mutex_unlock(&wire_lock);
	outlets_free(gone);
}

void rn_ud_wire_forked(void)
{
	pthread_mutex_init(&wire_lock, NULL);
	wires = NULL;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

enum rn_wait rn_ud_wire_send(struct rn_qp *qp, const struct rn_ah *ah, const struct ibv_send_wr *wr, uint32_t qkey,
			     const struct rn_piece *pieces, int num_pieces, uint32_t length)
{
	struct header header = {
		.magic = htonl(MAGIC),
		.version = VERSION,
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
	const struct outlet *outlet;
	uint32_t interface = 0;
	struct wire *wire;
	enum rn_wait wait = RN_WAIT_NOT;

	for (int i = 0; i < num_pieces; i++)
		parts[i + 1] = (struct iovec){pieces[i].at, pieces[i].length};
	rn_gid_at(ah->attr.grh.sgid_index, NULL, &interface);
	message.msg_namelen = rn_gid_address(&ah->attr.grh.dgid, interface,
					     ah->is_multicast ? RN_UD_GROUP_PORT : wr->wr.ud.remote_qpn >> 8 & 0xffff, &to);
	pthread_mutex_lock(&wire_lock);
	wire = find_wire(qp->ex.qp_base.qp_num >> 8);
	outlet = wire ? outlet_at(wire, &ah->from, interface) : NULL;
	if (outlet && sendmsg(outlet->source.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
	    (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS))
		wait = RN_WAIT_LINK;
	pthread_mutex_unlock(&wire_lock);
	qp->count.syscalls++;
	return wait;
}
