/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ports of this process: the upper 16 bits of its queue pairs' numbers.
 *
 * The name "\0rdmanet-soft/<port>" claims one, host-wide and without a trace left behind.  The TCP
 * port of the same number is reserved on all addresses, those to come included, by a socket that is
 * bound and never listens; so nobody from outside gets in.  Only when a queue pair wants a peer that
 * can't come by the name does a second socket listen, on the one address that the queue pair has.
 */
#define _GNU_SOURCE
#include "gid.h"
#include "peers.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { LOWEST_PORT = 32768, HIGHEST_PORT = 60999 }; /* where no service is expected to listen */

/* --- listening ------------------------------------------------------------------------------------- */

static void ear_breathe(struct rn_timer *timer)
{
	rn_source_modify(&RN_OWNER(timer, struct ear, breathe)->source, EPOLLIN);
}

static void ear_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct ear *ear = RN_OWNER(source, struct ear, source);
	int fd = rn_fd_own(accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));

	(void)epoll_events;
	if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
		rn_log("a peer can't be let in yet: %s", strerror(errno));
		rn_source_modify(source, 0);
		rn_timer_set_ms(&ear->breathe, BREATHE_MS);
	}
	if (fd >= 0)
		ear->arrived(fd);
}

static void ear_free(struct ear *ear)
{
	rn_source_remove(&ear->source);
	rn_timer_cancel(&ear->breathe);
	rn_fd_close(ear->source.fd);
	free(ear);
}

/* Takes a bound socket, also when that fails: 0 or errno. */
static int port_hear(struct port *port, int fd, void (*arrived)(int fd), const union ibv_gid *at)
{
	struct ear *ear = calloc(1, sizeof *ear);
	int error = ear ? 0 : ENOMEM;

	if (!error && listen(fd, SOMAXCONN))
		error = errno;
	if (error) {
		rn_fd_close(fd);
		free(ear);
		return error;
	}
	ear->source = (struct rn_source){.fd = fd, .ready = ear_ready};
	ear->breathe.fire = ear_breathe;
	ear->arrived = arrived;
	if (at)
		ear->gid = *at;
	error = -rn_source_add(&ear->source, EPOLLIN);
	if (error) {
		ear_free(ear);
		return error;
	}
	ear->next = port->ears;
	port->ears = ear;
	return 0;
}

static void reuse(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

/* The reservation and the listening socket share the port while both allow it: for a moment. */
static int listen_at(struct port *port, const union ibv_gid *at, uint32_t interface)
{
	struct sockaddr_storage address;
	socklen_t length = rn_gid_address(at, interface, port->port, &address);
	int fd = rn_fd_own(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), error = 0;

	if (fd < 0)
		return errno;
	reuse(port->reserved_fd, 1);
	reuse(fd, 1);
	if (bind(fd, (struct sockaddr *)&address, length))
		error = errno;
	if (error)
		rn_fd_close(fd);
	else
		error = port_hear(port, fd, rn_stream_accepted, at);
	if (!error)
		reuse(fd, 0);
	reuse(port->reserved_fd, 0);
	return error;
}

int rn_port_listen(uint16_t number, const union ibv_gid *at, uint32_t interface)
{
	struct port *port;
	struct ear *ear;
	int error = EADDRNOTAVAIL;

	pthread_mutex_lock(&rn_peers.lock);
	for (port = rn_peers.ports; port && port->port != number; port = port->next)
		;
	for (ear = port ? port->ears : NULL; ear && memcmp(&ear->gid, at, sizeof *at); ear = ear->next)
		;
	if (ear)
		error = 0;
	else if (port)
		error = listen_at(port, at, interface);
	pthread_mutex_unlock(&rn_peers.lock);
	return error;
}

/* --- claiming -------------------------------------------------------------------------------------- */

void rn_port_free(struct port *port)
{
	while (port->ears) {
		struct ear *ear = port->ears;

		port->ears = ear->next;
		ear_free(ear);
	}
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

/* NULL and errno: EADDRINUSE when another has it. */
static struct port *port_open(uint16_t number)
{
	struct port *port = calloc(1, sizeof *port);
	struct sockaddr_un name;
	socklen_t length = rn_peer_name(number, &name);
	int fd, error;

	if (!port)
		return NULL;
	port->port = number;
	port->reserved_fd = -1;
	fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (fd < 0)
		goto failed;
	if (bind(fd, (struct sockaddr *)&name, length))
		goto failed_bound;
	port->reserved_fd = reserve(number);
	if (port->reserved_fd < 0)
		goto failed_bound;
	errno = port_hear(port, fd, rn_served_new, NULL);
	if (errno)
		goto failed;
	port->self.port = number;
	port->self.pid = getpid();
	port->self.state = RN_PEER_SELF;
	return port;

failed_bound:
	error = errno;
	rn_fd_close(fd);
	errno = error;
failed:
	error = errno;
	rn_port_free(port);
	errno = error;
	return NULL;
}

uint16_t rn_port_claim(void)
{
	enum { TRIES = 512, RANGE = HIGHEST_PORT - LOWEST_PORT + 1 };
	struct port *port;
	uint32_t start = 0;
	uint16_t number = 0;

	rn_peers_start();
	pthread_mutex_lock(&rn_peers.lock);
	for (port = rn_peers.ports; port && port->claimed; port = port->next)
		;
	if (!port) {
		if (getrandom(&start, sizeof start, GRND_NONBLOCK) < 0)
			start = (uint32_t)rn_now_ns();
		for (uint32_t i = 0; i < TRIES && !port; i++) {
			port = port_open((uint16_t)(LOWEST_PORT + (start + i * 7) % RANGE));
			if (!port && errno != EADDRINUSE && errno != EACCES)
				break;
		}
		if (port) {
			port->next = rn_peers.ports;
			rn_peers.ports = port;
		}
	}
	if (port) {
		port->claimed = true;
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
			port->claimed = false;
	pthread_mutex_unlock(&rn_peers.lock);
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
