/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listeners: sockets are accepted as long as the program reads the requests that come over them, and
 * a wire is made for each.  Its request is read, and refused, in hear.c; here it is refused only for lack of
 * descriptors.  Until its request has come it is a stranger, and may be closed (base/stranger.h).  It is a
 * stranger again from the program's accept until the peer's RTU; if it is closed then, the program is told as of any
 * lost connection.  In between the peer waits for the program, and the request is not taken back.
 *
 * The last descriptors of the process are reserved for the program, and for connections that are being made: if
 * accept() returns one of those numbers, the connection is refused at once, with the reason.  More are reserved for
 * links, one to each process whose connection was accepted and that shares no memory with us yet, because it must be
 * able to go on.  If no descriptor is left, a spare one is closed to accept a connection and refuse it; the descriptor
 * of that connection becomes the next spare one.
 */
#include "base/gid.h"
#include "base/guard.h"
#include "cm/wire.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

enum {
	ACCEPTS_PER_ROUND = 16,
	ACCEPT_RETRY_MS = 100,
	RESERVE_MAX = 32,
	UNMET_MAX = 32,    /* that are counted */
	LINK_DESCRIPTORS = 8, /* that a link to another process needs while it is made; it keeps five */
};

/* --- descriptors --------------------------------------------------------------------------------- */

static int spare = -1;

static void take_spare(void)
{
	if (spare < 0 && rn_guarded(RN_GUARD_RESERVE))
		spare = rn_fd_own(eventfd(0, EFD_CLOEXEC));
}

/* Keep this descriptor, of a finished connection, as the spare one if there is none: if it were closed and another
 * opened, another thread might take the last number meanwhile. */
static void keep_spare(int fd)
{
	if (spare >= 0 || !rn_guarded(RN_GUARD_RESERVE)) {
		rn_fd_close(fd);
		return;
	}
	shutdown(fd, SHUT_RDWR);
	spare = fd;
}

static bool give_spare(void)
{
	bool had_one = spare >= 0;

	rn_fd_close(spare);
	spare = -1;
	return had_one;
}

void rn_cm_listen_stop(void)
{
	give_spare();
}

void rn_cm_listen_forked(void)
{
	spare = -1;
}

/* Processes of this host that have a connection here and will want a link, by the ports of their queue pairs; so many at
 * most.  (One that has more than 256 queue pairs counts more than once: it was met long ago.) */
static unsigned count_unmet(unsigned most)
{
	enum { ASKING_MAX = 8 }; /* of processes that have only sent a request, which may name any ports */
	uint16_t ports[UNMET_MAX];
	unsigned count = 0, asking = 0;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *at = rn_cm_wires.next; at != &rn_cm_wires && count < most; at = at->next) {
		const struct rn_cm_wire *wire = RN_OWNER(at, struct rn_cm_wire, link);
		bool asks = wire->phase != RN_CM_WIRE_REP_SENT && wire->phase != RN_CM_WIRE_ESTABLISHED;
		uint16_t port = wire->asker_port;
		bool is_counted = !port || (asks && asking == ASKING_MAX);

		for (unsigned i = 0; i < count && !is_counted; i++)
			is_counted = ports[i] == port;
		if (!is_counted && !rn_peer_is_met(port)) {
			ports[count++] = port;
			asking += asks;
		}
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

/* The kernel gives the lowest free number, so all below are taken. */
static bool is_of_reserve(int fd)
{
	struct rlimit files;
	rlim_t quarter, reserve;

	if (!rn_guarded(RN_GUARD_RESERVE) || getrlimit(RLIMIT_NOFILE, &files))
		return false;
	quarter = files.rlim_cur / 4;
	reserve = quarter < RESERVE_MAX ? quarter : RESERVE_MAX;
	if (quarter > UNMET_MAX * LINK_DESCRIPTORS)
		quarter = UNMET_MAX * LINK_DESCRIPTORS;
	if ((rlim_t)fd >= files.rlim_cur - reserve || (rlim_t)fd < files.rlim_cur - reserve - quarter)
		return (rlim_t)fd >= files.rlim_cur - reserve;
	reserve += (rlim_t)count_unmet((unsigned)(quarter / LINK_DESCRIPTORS)) * LINK_DESCRIPTORS;
	return (rlim_t)fd >= files.rlim_cur - reserve;
}

/* The lowest number that is free, if that is lower. */
static int move_down(int fd)
{
	int lower = rn_fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 0));

	if (lower < 0 || lower > fd) {
		rn_fd_close(lower);
		return fd;
	}
	rn_fd_close(fd);
	return lower;
}

/* A peer that connects by name is on this host and has no address: it gets the loopback address, if there is one. */
void rn_cm_name_ends(const struct rn_cm_id *listener, struct sockaddr_storage *near, struct sockaddr_storage *far)
{
	__be16 port = rn_cm_port(&listener->id.route.addr.src_addr);

	*near = listener->id.route.addr.src_storage;
	if (rn_cm_is_wildcard((struct sockaddr *)near))
		rn_cm_set_loopback((struct sockaddr *)near);
	if (rn_gid_index_of((struct sockaddr *)near) < 0) { /* a host without IPv6 */
		*near = (struct sockaddr_storage){.ss_family = AF_INET};
		rn_cm_set_loopback((struct sockaddr *)near);
		rn_cm_set_port((struct sockaddr *)near, port);
	}
	rn_cm_as_ipv4(near);
	*far = *near;
	rn_cm_set_port((struct sockaddr *)far, 0);
}

/* --- newcomers ----------------------------------------------------------------------------------- */

static bool is_shortage(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

static int accept_socket(struct rn_cm_id *listener, struct sockaddr_storage *far)
{
	socklen_t length = sizeof *far;
	int fd = rn_fd_own(accept4(listener->bound_fd, (struct sockaddr *)far, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));

	if (fd >= 0 && !listener->by_name)
		rn_cm_release_port(fd);
	return fd;
}

/*
 * Accept a socket; -1 and errno. is_last: there is no room for it, and no stranger that could be closed instead.
 * Without a descriptor accept() does not say whether a connection waits: the spare one is used to find out, so that no
 * stranger is closed for nothing.
 */
static int next_socket(struct rn_cm_id *listener, struct sockaddr_storage *far, bool *is_last)
{
	int fd;

	take_spare();
	*is_last = false;
	fd = accept_socket(listener, far);
	if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
		*is_last = give_spare();
		if (!*is_last && !rn_stranger_make_room())
			return rn_cm_error(EMFILE);
		fd = accept_socket(listener, far);
	}
	if (fd < 0 || !(*is_last |= is_of_reserve(fd)) || !rn_stranger_make_room())
		return fd;
	fd = move_down(fd);
	*is_last = is_of_reserve(fd);
	return fd;
}

static void warn_of_shortage(const struct rn_cm_id *listener, const char *what)
{
	struct rlimit files = {0};

	getrlimit(RLIMIT_NOFILE, &files);
	rn_warn(RN_WARN_DESCRIPTORS,
		"listener on port %u: none of the %llu descriptors (RLIMIT_NOFILE) is left for new connections: %s",
		(unsigned)be16toh(rn_cm_port(&listener->id.route.addr.src_addr)), (unsigned long long)files.rlim_cur,
		what);
}

/* False: the connection has gone. */
static bool read_ends(const struct rn_cm_id *listener, int fd, struct sockaddr_storage *near,
		      struct sockaddr_storage *far)
{
	socklen_t length = sizeof *near;

	if (listener->by_name)
		rn_cm_name_ends(listener, near, far);
	else if (getsockname(fd, (struct sockaddr *)near, &length))
		return false;
	rn_cm_as_ipv4(near);
	rn_cm_as_ipv4(far);
	return true;
}

/* Make a wire for this socket, which then owns it. */
static struct rn_cm_wire *meet(struct rn_cm_id *listener, int fd, struct sockaddr_storage *far)
{
	struct sockaddr_storage near = {0};
	static const int on = 1;
	struct rn_cm_wire *wire;

	if (!read_ends(listener, fd, &near, far)) {
		rn_fd_close(fd);
		return NULL;
	}
	if (!listener->by_name)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	rn_cm_context_renew(); /* the listener is a user of the context */
	pthread_mutex_lock(&rn_cm_lock);
	wire = rn_cm_wire_new(RN_CM_WIRE_ACCEPTED);
	if (wire) {
		wire->source.fd = fd;
		wire->by_name = listener->by_name;
		wire->listener = listener;
		wire->near = near;
		wire->far = *far;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (!wire) {
		rn_fd_close(fd);
		return NULL;
	}
	if (wire->by_name)
		wire->stranger.from = rn_stranger_user(fd);
	else
		wire->stranger.from = rn_stranger_by_tcp(fd, (struct sockaddr *)far);
	rn_stranger_add(&wire->stranger, RN_STRANGER_SILENT);
	return wire;
}

/* False: no more for now. */
static bool accept_one(struct rn_cm_id *listener)
{
	struct sockaddr_storage far = {0};
	struct rn_cm_wire *wire;
	bool more, is_last;
	int fd;

	fd = next_socket(listener, &far, &is_last);
	if (fd < 0 && is_shortage(errno)) {
		if (errno == EMFILE || errno == ENFILE)
			warn_of_shortage(listener, "they wait");
		else
			rn_warn(RN_WARN_DESCRIPTORS,
				"listener on port %u: the kernel has no memory for new connections (accept4(): %s): they wait",
				(unsigned)be16toh(rn_cm_port(&listener->id.route.addr.src_addr)), strerror(errno));
		if (!rn_guarded(RN_GUARD_ACCEPT_REST))
			return false;
		rn_source_modify(&listener->accepting, 0);
		rn_timer_set(&listener->accept_retry, ACCEPT_RETRY_MS * 1000000u);
		return false;
	}
	if (fd < 0)
		return errno != EAGAIN;
	if (is_last) {
		rn_cm_say_no(fd, RN_REJ_NO_RESOURCES);
		keep_spare(fd);
		warn_of_shortage(listener, "one was refused");
		return true;
	}
	wire = meet(listener, fd, &far);
	if (!wire)
		return true;
	rn_cm_wire_set_timer_ms(wire, rn_settings.silence_ms);
	rn_cm_wire_receive(wire); /* the request has mostly arrived already */
	rn_cm_wire_look(wire);
	rn_cm_wire_flush(wire);
	rn_cm_wire_sweep(wire);
	pthread_mutex_lock(&rn_cm_lock);
	more = !listener->paused;
	pthread_mutex_unlock(&rn_cm_lock);
	return more;
}

void rn_cm_listen_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct rn_cm_id *listener = RN_OWNER(source, struct rn_cm_id, accepting);

	(void)epoll_events;
	for (int i = 0; i < ACCEPTS_PER_ROUND && accept_one(listener); i++)
		;
}

void rn_cm_listen_retry(struct rn_timer *timer)
{
	struct rn_cm_id *listener = RN_OWNER(timer, struct rn_cm_id, accept_retry);

	pthread_mutex_lock(&rn_cm_lock);
	if (!listener->paused)
		rn_source_modify(&listener->accepting, EPOLLIN);
	pthread_mutex_unlock(&rn_cm_lock);
}
