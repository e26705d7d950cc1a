/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ports of this process: the upper 16 bits of its queue pairs' numbers.
 *
 * The name "\0rdmanet-soft/<port>" reserves one, host-wide and without a trace left behind.  The TCP port of the same
 * number is reserved on all addresses, those to come included, by a socket that is bound and never listens; so no
 * connection from outside is accepted.  datagram/port.c reserves the UDP port.  Only when a queue pair wants a peer
 * that can't come by the name does a second socket listen, on the one address that the queue pair has.
 *
 * The two share the port by SO_REUSEPORT, which shares with sockets of the same user alone.  (SO_REUSEADDR shares with
 * everybody who has set it, too.)  The user of a socket is the one who made it: a program that gives up privileges
 * makes its queue pairs either before that or after it, and its listeners with them.  The reservation is bound
 * before it may share, so that it takes no port from a program that shares one as well.
 *
 * Names are first come, first served, and there are few of them.  If others have taken them all, a free TCP port is
 * used without a name: then no process maps ours, ours maps none, and all connections use TCP.  If only one direction
 * went by TCP, one end would expect the other where it can't come from.
 */
#include "base/gid.h"
#include "base/rights.h"
#include "peer/peers.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* --- listening ------------------------------------------------------------------------------------- */

static void accept_again(struct rn_timer *timer)
{
	rn_source_modify(&RN_OWNER(timer, struct listener, accept_retry)->source, EPOLLIN);
}

static int accept_at(const struct listener *listener)
{
	return rn_fd_own(accept4(listener->source.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

static void listener_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct listener *listener = RN_OWNER(source, struct listener, source);
	int fd = accept_at(listener);

	(void)epoll_events;
	if (fd < 0 && errno == EMFILE && rn_stranger_make_room())
		fd = accept_at(listener);
	if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
		rn_warn(RN_WARN_DESCRIPTORS, "cannot accept a connection to one of our queue pairs yet: %s",
			strerror(errno));
		if (!rn_guarded(RN_GUARD_ACCEPT_REST))
			return;
		rn_source_modify(source, 0);
		rn_timer_set_ms(&listener->accept_retry, ACCEPT_RETRY_MS);
	}
	if (fd >= 0)
		listener->arrived(fd);
}

static void listener_free(struct listener *listener)
{
	rn_source_remove(&listener->source);
	rn_timer_cancel(&listener->accept_retry);
	rn_fd_close(listener->source.fd);
	free(listener);
}

/* Takes a bound socket, also when that fails: 0 or errno. */
static int port_hear(struct port *port, int fd, void (*arrived)(int fd), const union ibv_gid *at)
{
	struct listener *listener = calloc(1, sizeof *listener);
	int error = listener ? 0 : ENOMEM;

	if (!error && listen(fd, SOMAXCONN))
		error = errno;
	if (error) {
		rn_fd_close(fd);
		free(listener);
		return error;
	}
	listener->source = (struct rn_source){.fd = fd, .ready = listener_ready};
	listener->accept_retry.fire = accept_again;
	listener->arrived = arrived;
	if (at)
		listener->gid = *at;
	error = -rn_source_add(&listener->source, EPOLLIN);
	if (error) {
		listener_free(listener);
		return error;
	}
	listener->next = port->listeners;
	port->listeners = listener;
	return 0;
}

/* May others have the port as well? Our own sockets, that is. */
static void share(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, rn_guarded(RN_GUARD_PORT_SHARING) ? SO_REUSEPORT : SO_REUSEADDR, &on, sizeof on);
}

/* The reservation and the listening socket share the port while both allow it: for a moment. */
static int listen_at(struct port *port, const union ibv_gid *at, uint32_t interface)
{
	struct sockaddr_storage address;
	socklen_t length = rn_gid_address(at, interface, port->port, &address);
	int fd = rn_fd_own(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), error = 0;

	if (fd < 0)
		return errno;
	share(port->reserved_fd, 1);
	share(fd, 1);
	if (bind(fd, (struct sockaddr *)&address, length))
		error = errno;
	if (error)
		rn_fd_close(fd);
	else
		error = port_hear(port, fd, rn_peer_ops->accepted, at);
	if (!error && !rn_guarded(RN_GUARD_PORT_SHARING))
		share(fd, 0);
	share(port->reserved_fd, 0);
	return error;
}

int rn_port_listen(uint16_t number, const union ibv_gid *at, uint32_t interface)
{
	struct port *port;
	struct listener *listener;
	int error = EADDRNOTAVAIL;

	pthread_mutex_lock(&rn_peers.lock);
	for (port = rn_peers.ports; port && port->port != number; port = port->next)
		;
	for (listener = port ? port->listeners : NULL; listener && memcmp(&listener->gid, at, sizeof *at); listener = listener->next)
		;
	if (listener)
		error = 0;
	else if (port)
		error = listen_at(port, at, interface);
	pthread_mutex_unlock(&rn_peers.lock);
	return error;
}

/* --- binding --------------------------------------------------------------------------------------- */

void rn_port_free(struct port *port)
{
	while (port->listeners) {
		struct listener *listener = port->listeners;

		port->listeners = listener->next;
		listener_free(listener);
	}
	if (port->reserved_fd >= 0) /* else the number may be another port's of ours */
		rn_peer_ops->port_free(port->port);
	rn_fd_close(port->reserved_fd);
	free(port);
}

/* A socket that keeps the TCP port from others on all addresses of both families; on a host
 * without IPv6, of the one. -1 and errno. */
static int reserve(uint16_t number)
{
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(number)};
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(number)};
	int fd = rn_fd_own(socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), both = 0;

	if (fd >= 0 && !setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both)) {
		if (!bind(fd, (struct sockaddr *)&v6, sizeof v6))
			return fd;
		if (errno == EADDRINUSE)
			goto taken;
	}
	rn_fd_close(fd);
	fd = rn_fd_own(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (fd >= 0 && !bind(fd, (struct sockaddr *)&v4, sizeof v4))
		return fd;
taken:
	both = errno;
	rn_fd_close(fd);
	errno = both;
	return -1;
}

/* Listen by name. 0, or errno: EADDRINUSE if another process has it. */
static int port_name(struct port *port)
{
	struct sockaddr_un name;
	socklen_t length = rn_peer_name(port->port, &name);
	int fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), error;

	if (fd < 0)
		return errno;
	rn_rights_accept(fd, false);
	if (!bind(fd, (struct sockaddr *)&name, length))
		return port_hear(port, fd, rn_inbound_new, NULL);
	error = errno;
	rn_fd_close(fd);
	return error;
}

/* NULL and errno: EADDRINUSE if another process has it. */
static struct port *port_open(uint16_t number, bool has_name)
{
	struct port *port = calloc(1, sizeof *port);
	int error;

	if (!port)
		return NULL;
	port->port = number;
	port->has_name = has_name;
	port->reserved_fd = reserve(number);
	error = port->reserved_fd < 0 ? errno : rn_peer_ops->port_reserve(number);
	if (!error && has_name)
		error = port_name(port);
	if (error) {
		rn_port_free(port);
		errno = error;
		return NULL;
	}
	port->self.port = number;
	port->self.pid = getpid();
	port->self.state = RN_PEER_SELF;
	return port;
}

/* A free one; NULL: there is none. */
static struct port *port_find(bool has_name)
{
	enum { TRIES = 512, RANGE = RN_PORT_HIGHEST - RN_PORT_LOWEST + 1 };
	struct port *port = NULL;
	uint32_t start = 0;

	if (getrandom(&start, sizeof start, GRND_NONBLOCK) < 0)
		start = (uint32_t)rn_now_ns();
	for (uint32_t i = 0; i < TRIES && !port; i++) {
		port = port_open((uint16_t)(RN_PORT_LOWEST + (start + i * 7) % RANGE), has_name);
		if (!port && errno != EADDRINUSE && errno != EACCES)
			break;
	}
	return port;
}

uint16_t rn_port_bind(void)
{
	struct port *port;
	uint16_t number = 0;

	rn_peers_start();
	pthread_mutex_lock(&rn_peers.lock);
	for (port = rn_peers.ports; port && port->is_bound; port = port->next)
		;
	if (!port) {
		port = port_find(true);
		if (!port && errno == EADDRINUSE && (port = port_find(false)))
			rn_warn(RN_WARN_NAME,
				"other processes hold the socket names of all ports: port %u has no name, and its peers use TCP",
				port->port);
		if (port) {
			port->next = rn_peers.ports;
			rn_peers.ports = port;
		}
	}
	if (port) {
		port->is_bound = true;
		number = port->port;
	}
	pthread_mutex_unlock(&rn_peers.lock);
	return number;
}

void rn_port_release(uint16_t number)
{
	pthread_mutex_lock(&rn_peers.lock);
	for (struct port *port = rn_peers.ports; port; port = port->next)
		if (port->port == number)
			port->is_bound = false;
	pthread_mutex_unlock(&rn_peers.lock);
}

bool rn_port_has_name(uint16_t number)
{
	bool has_name = false;

	pthread_mutex_lock(&rn_peers.lock);
	for (struct port *port = rn_peers.ports; port; port = port->next)
		has_name |= port->port == number && port->has_name;
	pthread_mutex_unlock(&rn_peers.lock);
	return has_name;
}

bool rn_port_is_mine(uint16_t number)
{
	bool mine = false;

	pthread_mutex_lock(&rn_peers.lock);
	for (struct port *port = rn_peers.ports; port; port = port->next)
		mine |= port->port == number;
	pthread_mutex_unlock(&rn_peers.lock);
	return mine;
}
