/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The UDP port of a process: held from others, and open while UD queue pairs are ready.
 *
 * The process takes the UDP port before any other can know its number, at all addresses that the host has then, so no
 * other process can receive or send in our queue pairs' name. The socket that holds the port is connected to port 9 of
 * our own address, where nothing sends: so it receives nothing, not even from our own outlets. Those at loopback
 * addresses keep others from binding wildcards. Outlets share the port by SO_REUSEPORT, as in peer/port.c, for the
 * moment in which both allow it. (To disconnect the holder instead isn't enough: for IPv6 the kernel keeps the peer's
 * address.) If the host gets another address later whose port is somebody else's, the next queue pair isn't made
 * ready.
 *
 * Locks: port_lock guards the sockets, and is taken inside sq_lock; nothing is taken inside it.
 */
#include "datagram/port.h"

#include <netinet/in.h>
#include <stdlib.h>

#include "base/gid.h"
#include "base/guard.h"
#include "base/log.h"
#include "datagram/datagram.h"
#include "datagram/wire.h"

enum { DISCARD = 9 /* a service's port that never answers: RFC 863 */ };

/* Keeps the port from others at an address. */
struct hold {
	union ibv_gid gid;
	int fd;
	struct hold *next;
};

struct outlet {
	struct rn_source source;
	union ibv_gid gid;
	uint16_t number;
	struct outlet *next;
};

/* A port, and how many UD queue pairs have it open. */
struct port {
	uint16_t number;
	unsigned users;
	struct hold *holds;
	struct outlet *outlets;
	struct port *next;
};

static pthread_mutex_t port_lock = PTHREAD_MUTEX_INITIALIZER;
static struct port *ports;

/* --- receiving: on the engine -------------------------------------------------------------------------------- */

static void give_to_one(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram)
{
	const struct outlet *outlet = closure;
	uint32_t index;

	if (dest_qpn >> 8 != outlet->number)
		return;
	pthread_mutex_lock(&rn_process_lock);
	index = rn_own_locate(dest_qpn);
	if (index < RN_QPS_MAX) {
		struct rn_qp *qp = rn_qps[index];

		if (qp && qp->ex.qp_base.qp_num == dest_qpn)
			rn_ud_deliver(qp, datagram);
	}
	pthread_mutex_unlock(&rn_process_lock);
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

/* A socket at the address, bound; it shares it with the socket that holds it, or, -1, with none. -1 and errno. */
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

static struct port *find_port(uint16_t number)
{
	struct port *port = ports;

	while (port && port->number != number)
		port = port->next;
	return port;
}

static struct port *get_port(uint16_t number)
{
	struct port *port = find_port(number);

	if (!port && (port = calloc(1, sizeof(*port)))) {
		*port = (struct port){.number = number, .next = ports};
		ports = port;
	}
	return port;
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

/* The socket that holds the port at this address: an existing or a new one, or NULL and errno. */
static struct hold *hold_at(struct port *port, const union ibv_gid *gid, uint32_t interface)
{
	struct sockaddr_storage at;
	socklen_t length = rn_gid_address(gid, interface, port->number, &at);
	struct hold *hold;

	for (hold = port->holds; hold; hold = hold->next)
		if (!memcmp(&hold->gid, gid, sizeof(*gid)))
			return hold;
	hold = calloc(1, sizeof(*hold));
	if (!hold)
		return NULL;
	*hold = (struct hold){.gid = *gid, .fd = bind_to(&at, length, -1), .next = port->holds};
	if (hold->fd < 0) {
		int err = errno;

		free(hold);
		errno = err;
		return NULL;
	}
	rn_gid_address(gid, interface, DISCARD, &at);
	if (connect(hold->fd, (struct sockaddr *)&at, length)) { /* no route: the address is going, or not ready yet */
		rn_fd_close(hold->fd);
		free(hold);
		errno = EADDRNOTAVAIL;
		return NULL;
	}
	port->holds = hold;
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
static int outlet_make(struct port *port, const union ibv_gid *gid, uint32_t interface)
{
	struct sockaddr_storage at;
	socklen_t length = rn_gid_address(gid, interface, port->number, &at);
	const struct hold *hold = NULL;
	struct outlet *outlet;
	int fd, err;

	if (rn_guarded(RN_GUARD_DATAGRAM_PORT) && !(hold = hold_at(port, gid, interface)))
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
					  .number = port->number,
					  .next = port->outlets};
		err = -rn_source_add(&outlet->source, EPOLLIN);
	}
	if (err) {
		rn_fd_close(fd);
		free(outlet);
		return err;
	}
	port->outlets = outlet;
	return 0;
}

/* The socket with this address: an existing or a new one, or NULL and errno. */
static struct outlet *outlet_at(struct port *port, const union ibv_gid *gid, uint32_t interface)
{
	int err;

	for (struct outlet *outlet = port->outlets; outlet; outlet = outlet->next)
		if (!memcmp(&outlet->gid, gid, sizeof(*gid)))
			return outlet;
	err = outlet_make(port, gid, interface);
	if (!err)
		return port->outlets;
	rn_log("cannot receive UD messages from other hosts on UDP port %u: %s", port->number, strerror(err));
	errno = err;
	return NULL;
}

/* Hold the port, or receive on it, at all addresses of the host, except one that has just gone. 0 or errno. */
static int everywhere(struct port *port, bool is_heard)
{
	uint32_t interface;
	union ibv_gid gid;
	bool done;
	int err;

	for (uint32_t i = 0; rn_gid_next(&i, &gid, &interface); i++) {
		done = is_heard ? outlet_at(port, &gid, interface) != NULL : hold_at(port, &gid, interface) != NULL;
		err = errno;
		if (done || err == EADDRNOTAVAIL || !rn_guarded(RN_GUARD_DATAGRAM_PORT))
			continue;
		/* An address that this host got later: another process may have the port there, and only there. */
		if (!is_heard || err != EADDRINUSE)
			return err;
		rn_warn(RN_WARN_NAME,
			"another process has UDP port %u at an address that this host got later: no datagrams are received "
			"there",
			port->number);
	}
	return 0;
}

int rn_ud_port_reserve(uint16_t number)
{
	struct port *port;
	int err;

	if (rn_settings.has_secret || !rn_guarded(RN_GUARD_DATAGRAM_PORT))
		return 0;
	pthread_mutex_lock(&port_lock);
	port = get_port(number);
	err = port ? everywhere(port, false) : ENOMEM;
	pthread_mutex_unlock(&port_lock);
	return err;
}

void rn_ud_port_free(uint16_t number)
{
	struct port **at, *port;

	pthread_mutex_lock(&port_lock);
	for (at = &ports; *at && (*at)->number != number;)
		at = &(*at)->next;
	port = *at;
	if (port)
		*at = port->next;
	pthread_mutex_unlock(&port_lock);
	if (port) {
		outlets_free(port->outlets);
		holds_free(&port->holds, false);
	}
	free(port);
}

/* The last user is gone: returns the outlets, to be freed without locks. */
static struct outlet *no_outlets(struct port *port)
{
	struct outlet *outlets = port->outlets;

	port->outlets = NULL;
	holds_free(&port->holds, true);
	return outlets;
}

int rn_ud_port_open(struct rn_qp *qp)
{
	uint16_t number = qp->ex.qp_base.qp_num >> 8;
	struct outlet *gone = NULL;
	struct port *port;
	int err = 0;

	if (rn_settings.has_secret)
		return 0; /* a datagram can't prove that its sender knows it */
	pthread_mutex_lock(&port_lock);
	port = get_port(number);
	if (!port) {
		err = ENOMEM;
	} else {
		port->users++;
		err = everywhere(port, true);
		if (err && !--port->users)
			gone = no_outlets(port);
	}
	pthread_mutex_unlock(&port_lock);
	outlets_free(gone);
	if (err)
		rn_warn(RN_WARN_NAME, "cannot use UDP port %u of our queue pairs at all our addresses: %s", number,
			strerror(err));
	return err;
}

void rn_ud_port_close(struct rn_qp *qp)
{
	struct outlet *gone = NULL;
	struct port *port;

	pthread_mutex_lock(&port_lock);
	port = find_port(qp->ex.qp_base.qp_num >> 8);
	if (port && port->users && !--port->users)
		gone = no_outlets(port);
	pthread_mutex_unlock(&port_lock);
	outlets_free(gone);
}

void rn_ud_port_forked(void)
{
	pthread_mutex_init(&port_lock, NULL);
	ports = NULL;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

enum rn_wait rn_ud_port_send(uint16_t number, const union ibv_gid *from, uint32_t interface, const struct msghdr *message,
			     bool *fault)
{
	const struct outlet *outlet;
	enum rn_wait wait = RN_WAIT_NOT;
	struct port *port;

	pthread_mutex_lock(&port_lock);
	port = find_port(number);
	outlet = port ? outlet_at(port, from, interface) : NULL;
	if (outlet && sendmsg(outlet->source.fd, message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
		*fault = errno == EFAULT;
		if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
			wait = RN_WAIT_LINK;
	}
	pthread_mutex_unlock(&port_lock);
	return wait;
}
