/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ports of this process: the upper 16 bits of its queue pairs' numbers.
 *
 * The name "\0rdmanet-soft/<port>" claims one, host-wide and without a trace left behind; and the
 * same TCP port on the loopback interface is bound, for peers that can't come by that name.
 */
#define _GNU_SOURCE
#include "peers.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { LOWEST_PORT = 32768, HIGHEST_PORT = 60999 }; /* where no service is expected to listen */

static void port_breathe(struct rn_timer *timer)
{
	rn_source_modify(&RN_OWNER(timer, struct port, breathe)->source, EPOLLIN);
}

static void port_ready(struct rn_source *source, uint32_t epoll_events)
{
	int fd = rn_fd_own(accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));

	(void)epoll_events;
	if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) {
		rn_log("a peer can't be let in yet: %s", strerror(errno));
		rn_source_modify(source, 0);
		rn_timer_set_ms(&RN_OWNER(source, struct port, source)->breathe, BREATHE_MS);
	}
	if (fd < 0)
		return;
	rn_served_new(fd);
}

void rn_port_free(struct port *port)
{
	rn_source_remove(&port->source);
	rn_timer_cancel(&port->breathe);
	rn_fd_close(port->source.fd);
	rn_fd_close(port->tcp_fd);
	free(port);
}

/* NULL and errno: EADDRINUSE when another has it. */
static struct port *port_open(uint16_t number)
{
	struct port *port = calloc(1, sizeof *port);
	struct sockaddr_un name;
	socklen_t length = rn_peer_name(number, &name);
	/* Peers of other kinds will come by TCP: the number is ours there, too. */
	struct sockaddr_in tcp = {
		.sin_family = AF_INET, .sin_port = htons(number), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int error;

	if (!port)
		return NULL;
	port->port = number;
	port->tcp_fd = -1;
	port->source.ready = port_ready;
	port->breathe.fire = port_breathe;
	port->source.fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (port->source.fd < 0 || bind(port->source.fd, (struct sockaddr *)&name, length))
		goto failed;
	port->tcp_fd = rn_fd_own(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (port->tcp_fd < 0 || bind(port->tcp_fd, (struct sockaddr *)&tcp, sizeof tcp))
		goto failed;
	if (listen(port->source.fd, SOMAXCONN))
		goto failed;
	errno = -rn_source_add(&port->source, EPOLLIN);
	if (errno)
		goto failed;
	port->self.port = number;
	port->self.pid = rn_self()->pid;
	port->self.state = RN_PEER_SELF;
	return port;

failed:
	error = errno;
	rn_fd_close(port->tcp_fd);
	rn_fd_close(port->source.fd);
	free(port);
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
