/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listeners: sockets are accepted as long as the program reads the requests that come over them, and
 * a wire is made for each.  Who says nothing has to go, the eldest first when there are too many.
 */
#define _GNU_SOURCE
#include "cm_wire.h"

#include <netinet/tcp.h>

enum {
	UNHEARD_MAX = 1024, /* accepted sockets that have not spoken yet */
	ACCEPTS_PER_ROUND = 16,
	BREATHE_MS = 100,
};

static void drop_eldest_unheard(void)
{
	struct rn_wire *wire = NULL;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *item = rn_cm_wires.next; rn_cm_unheard >= UNHEARD_MAX && !wire && item != &rn_cm_wires;
	     item = item->next) {
		wire = RN_OWNER(item, struct rn_wire, link);
		if (wire->phase != RN_WIRE_ACCEPTED || wire->over)
			wire = NULL;
		else
			rn_cm_wire_drop(wire, "too many that say nothing");
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (wire)
		rn_cm_wire_sweep(wire);
}

/* Who comes by name comes from this host, and has no address: the loopback's, as far as there is one. */
static void name_ends(const struct rn_cm_id *listener, struct sockaddr_storage *near, struct sockaddr_storage *far)
{
	__be16 port = rn_cm_port(&listener->id.route.addr.src_addr);

	*near = listener->id.route.addr.src_storage;
	if (rn_cm_is_wildcard((struct sockaddr *)near))
		rn_cm_set_loopback((struct sockaddr *)near);
	if (rn_cm_gid_index((struct sockaddr *)near) < 0) { /* a host without IPv6 */
		*near = (struct sockaddr_storage){.ss_family = AF_INET};
		rn_cm_set_loopback((struct sockaddr *)near);
		rn_cm_set_port((struct sockaddr *)near, port);
	}
	*far = *near;
	rn_cm_set_port((struct sockaddr *)far, 0);
}

/* False: no more for now. */
static bool accept_one(struct rn_cm_id *listener)
{
	struct sockaddr_storage near = {0}, far = {0};
	socklen_t length = sizeof far, near_length = sizeof near;
	static const int on = 1;
	struct rn_wire *wire;
	bool more;
	int fd;

	fd = rn_fd_own(accept4(listener->bound_fd, (struct sockaddr *)&far, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
	if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
		rn_log("listening on port %u: %s; trying again soon",
			  (unsigned)be16toh(rn_cm_port(&listener->id.route.addr.src_addr)), strerror(errno));
		rn_source_modify(&listener->accepting, 0);
		rn_timer_set(&listener->breathe, BREATHE_MS * 1000000u);
		return false;
	}
	if (fd < 0)
		return errno != EAGAIN;
	if (getsockname(fd, (struct sockaddr *)&near, &near_length)) {
		rn_fd_close(fd);
		return true;
	}
	if (near.ss_family == AF_UNIX)
		name_ends(listener, &near, &far);
	rn_cm_undress(&near);
	rn_cm_undress(&far);
	drop_eldest_unheard();
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	rn_cm_release_port(fd);
	rn_cm_context_renew(); /* the listener is a user of it */
	pthread_mutex_lock(&rn_cm_lock);
	wire = rn_cm_wire_new(RN_WIRE_ACCEPTED);
	if (wire) {
		rn_cm_unheard++;
		wire->source.fd = fd;
		wire->listener = listener;
		wire->near = near;
		wire->far = far;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (!wire) {
		rn_fd_close(fd);
		return true;
	}
	rn_cm_wire_set_timer_ms(wire, rn_settings.silence_ms);
	rn_cm_wire_receive(wire); /* the request is mostly there already */
	rn_cm_wire_flush(wire);
	rn_cm_wire_sweep(wire);
	pthread_mutex_lock(&rn_cm_lock);
	more = !listener->paused;
	pthread_mutex_unlock(&rn_cm_lock);
	return more;
}

void rn_wire_listener_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct rn_cm_id *listener = RN_OWNER(source, struct rn_cm_id, accepting);

	(void)epoll_events;
	for (int i = 0; i < ACCEPTS_PER_ROUND && accept_one(listener); i++)
		;
}

void rn_wire_listener_breathe(struct rn_timer *timer)
{
	struct rn_cm_id *listener = RN_OWNER(timer, struct rn_cm_id, breathe);

	pthread_mutex_lock(&rn_cm_lock);
	if (!listener->paused)
		rn_source_modify(&listener->accepting, EPOLLIN);
	pthread_mutex_unlock(&rn_cm_lock);
}

void rn_wire_listener_resume(struct rn_cm_id *listener)
{
	listener->unread_requests--;
	if (!listener->paused || listener->unread_requests >= listener->backlog)
		return;
	listener->paused = false;
	rn_source_modify(&listener->accepting, EPOLLIN);
}

void rn_wire_listener_gone(struct rn_cm_id *listener)
{
	for (struct rn_list *item = rn_cm_wires.next; item != &rn_cm_wires; item = item->next) {
		struct rn_wire *wire = RN_OWNER(item, struct rn_wire, link);

		if (wire->listener == listener)
			wire->listener = NULL; /* a request that comes yet is rejected */
	}
}
