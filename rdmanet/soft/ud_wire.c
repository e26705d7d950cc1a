/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams to and from other hosts: ud_wire.h has their form.
 *
 * The poster sends by itself, straight from the program's memory; a socket without room makes the
 * send queue wait a moment, every other failure drops the message, as a network does.  The engine
 * receives, and plays the responder with the bytes that came.
 *
 * The UDP port is the process's before anybody can know its number, at all addresses that the host has then: nobody
 * else hears or speaks in our queue pairs' name. What holds it is connected to our own address's port 9, where nobody
 * speaks: so it hears nobody, not even our own outlets, and is no open door. Loopback's keep all wildcards from others.
 * Outlets share it by SO_REUSEPORT, as peer_port.c has it, while both allow it: for a moment. (To disconnect it instead
 * isn't enough: of IPv6 the kernel keeps the peer's address.)
 * Where an address comes later, and its port is somebody else's, the next queue pair isn't made ready.
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
enum { DISCARD = 9 /* a service's port that never answers: RFC 863 */ };

struct header {
	uint32_t magic;
	uint8_t version, flags;
	uint16_t length;
	uint32_t dest_qpn, source_qpn, qkey;
	__be32 imm_data;
};
static_assert(sizeof(struct header) == RN_UD_HEADER, "as ud_wire.h has it");

/* Keeps the port from others at an address. */
struct hold {
	union ibv_gid gid;
	int fd;
	struct hold *next;
};

struct outlet {
	struct rn_source source;
	union ibv_gid gid;
	uint16_t port;
	struct outlet *next;
};

/* A port, and how many UD queue pairs have it open. */
struct wire {
	uint16_t port;
	unsigned users;
	struct hold *holds;
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

static void share(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on));
}

/* A socket at the address, bound; it shares it with who holds it, or, -1, with nobody. -1 and errno. */
static int bind_to(const struct sockaddr_storage *at, socklen_t length, int held_by)
{
	int only = 1, err, fd = rn_fd_own(socket(at->ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));

	if (fd < 0)
		return -1;
	if (at->ss_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
	if (held_by >= 0) {
		share(held_by, 1);
		share(fd, 1);
	}
	err = bind(fd, (const struct sockaddr *)at, length) ? errno : 0;
	if (held_by >= 0)
		share(held_by, 0);
	if (!err)
		return fd;
	rn_fd_close(fd);
	errno = err;
	return -1;
}

/* For an outlet's socket: room for what comes, and the way of what goes to groups. */
static void prepare(int fd, sa_family_t family, uint32_t interface)
{
	struct ip_mreqn of_ipv4 = {.imr_ifindex = (int)interface};
	int size = 1 << 20, of_ipv6 = (int)interface;

	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
	if (family == AF_INET)
		setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &of_ipv4, sizeof(of_ipv4));
	else
		setsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, &of_ipv6, sizeof(of_ipv6));
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

/* What holds the port at this address: what is there, or a new one, or NULL and errno. */
static struct hold *hold_at(struct wire *wire, const union ibv_gid *gid, uint32_t interface)
{
	struct sockaddr_storage at;
	socklen_t length = rn_gid_address(gid, interface, wire->port, &at);
	struct hold *hold;

	for (hold = wire->holds; hold; hold = hold->next)
		if (!memcmp(&hold->gid, gid, sizeof(*gid)))
			return hold;
	hold = calloc(1, sizeof(*hold));
	if (!hold)
		return NULL;
	*hold = (struct hold){.gid = *gid, .fd = bind_to(&at, length, -1), .next = wire->holds};
	if (hold->fd < 0) {
		int err = errno;

		free(hold);
		errno = err;
		return NULL;
	}
	rn_gid_address(gid, interface, DISCARD, &at);
	if (connect(hold->fd, (struct sockaddr *)&at, length)) { /* no way to it: it is going, or not there yet */
		rn_fd_close(hold->fd);
		free(hold);
		errno = EADDRNOTAVAIL;
		return NULL;
	}
	wire->holds = hold;
	return hold;
}

static void holds_free(struct hold **from, bool only_gone)
{
	while (*from) {
		struct hold *hold = *from;

		if (only_gone && rn_gid_is_ours(&hold->gid)) {
			from = &hold->next;
			continue;
		}
		*from = hold->next;
		rn_fd_close(hold->fd);
		free(hold);
	}
}

/* 0 or errno. */
static int outlet_make(struct wire *wire, const union ibv_gid *gid, uint32_t interface)
{
	struct sockaddr_storage at;
	socklen_t length = rn_gid_address(gid, interface, wire->port, &at);
	const struct hold *hold = NULL;
	struct outlet *outlet;
	int fd, err;

	if (rn_guarded(RN_GUARD_DATAGRAM_PORT) && !(hold = hold_at(wire, gid, interface)))
		return errno;
	fd = bind_to(&at, length, hold ? hold->fd : -1);
	if (fd < 0)
		return errno;
	prepare(fd, at.ss_family, interface);
	outlet = calloc(1, sizeof(*outlet));
	err = outlet ? 0 : ENOMEM;
	if (!err) {
		*outlet = (struct outlet){.source = {.fd = fd, .ready = outlet_ready},
					  .gid = *gid,
					  .port = wire->port,
					  .next = wire->outlets};
		err = -rn_source_add(&outlet->source, EPOLLIN);
	}
	if (err) {
		rn_fd_close(fd);
		free(outlet);
		return err;
	}
	wire->outlets = outlet;
	return 0;
}

/* The socket with this address: the one that is there, or a new one, or NULL and errno. */
static struct outlet *outlet_at(struct wire *wire, const union ibv_gid *gid, uint32_t interface)
{
	int err;

	for (struct outlet *outlet = wire->outlets; outlet; outlet = outlet->next)
		if (!memcmp(&outlet->gid, gid, sizeof(*gid)))
			return outlet;
	err = outlet_make(wire, gid, interface);
	if (!err)
		return wire->outlets;
	rn_log("UD messages can't come from other hosts to UDP port %u: %s", wire->port, strerror(err));
	errno = err;
	return NULL;
}

/* At all addresses of the host the port is held, or heard on; at one that has just gone neither. 0 or errno. */
static int everywhere(struct wire *wire, bool is_heard)
{
	uint32_t interface;
	union ibv_gid gid;
	bool done;
	int err;

	for (uint32_t i = 0; i < RN_GIDS; i++) {
		if (!rn_gid_at(i, &gid, &interface))
			continue;
		done = is_heard ? outlet_at(wire, &gid, interface) != NULL : hold_at(wire, &gid, interface) != NULL;
		err = errno;
		if (done || err == EADDRNOTAVAIL || !rn_guarded(RN_GUARD_DATAGRAM_PORT))
			continue;
		/* An address that this host got later: whoever was there first has the port at that one, and no other. */
		if (!is_heard || err != EADDRINUSE)
			return err;
		rn_warn(RN_WARN_NAME, "UDP port %u is somebody else's at an address that this host got later: no datagrams there",
			wire->port);
	}
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
	err = wire ? everywhere(wire, false) : ENOMEM;
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
	if (wire) {
		outlets_free(wire->outlets);
		holds_free(&wire->holds, false);
	}
	free(wire);
}

/* The last user goes: its outlets come back, to be freed without locks. */
static struct outlet *no_outlets(struct wire *wire)
{
	struct outlet *outlets = wire->outlets;

	wire->outlets = NULL;
	holds_free(&wire->holds, true);
	return outlets;
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
		wire->users++;
		err = everywhere(wire, true);
		if (err && !--wire->users)
			gone = no_outlets(wire);
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
		gone = no_outlets(wire);
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
