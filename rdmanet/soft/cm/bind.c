/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding: a port of our own.
 *
 * A bound identifier holds a bound TCP socket, so a port that another RDMA program has taken is refused at once (for
 * TCP programs see name.c).
 *
 * A bound socket must keep its port to itself, even before it listens.  So it is bound without an option to share the
 * port.  Old connections of that port, in TIME_WAIT, would then prevent that for a minute, though RDMA's ports are not
 * TCP's.  Hence three ways, tried in this order:
 *
 *   1. Without an option.
 *   2. If all old connections are those of RDMA programs of our user: with SO_REUSEPORT, which ignores them
 *      (rn_cm_release_port() set it on them too), and then the option is removed.  Meanwhile a program of our own user
 *      could share the port, and no other.  A program of our user may already listen there and share its port, though
 *      not with us: that is checked first.
 *   3. If a TCP program has left them: with SO_REUSEADDR, as every TCP server.  That option shares the port with all
 *      users' sockets that have it too, as long as nobody listens: whoever listens has it alone.  (To remove the option
 *      is not enough.  listen() would need it again; and the kernel may remember that the port can be shared.)  So the
 *      socket listens at once, and the port is ours from that listen() on.  A program that gets in before has taken a
 *      free port: we get EADDRINUSE, also if it is only bound, which is checked behind listen().  A peer that connects
 *      before the program listens is not refused then, but waits for that; if the program connects instead, the socket
 *      stops listening (rn_cm_unlisten), and the peer is refused.
 *
 * For TCP servers that follow, connections have SO_REUSEADDR, too: rn_cm_release_port().
 *
 * (Before Linux 6.17 a closed connection that still waits for its peer's answer belongs to root, so the second way does
 * not pass it.  Before Linux 6.8 sockets that are only bound are not seen: the third way then takes the port from a
 * program that has bound it with SO_REUSEADDR and does not listen yet, if it also has old connections.)
 */
#include <unistd.h>

#include "base/gid.h"
#include "base/guard.h"
#include "base/sock_diag.h"
#include "cm/cm.h"

static void share(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, rn_guarded(RN_GUARD_PORT_SHARING) ? SO_REUSEPORT : SO_REUSEADDR, &on, sizeof on);
}

static void share_with_all(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

void rn_cm_release_port(int fd)
{
	share(fd, 1);
	share_with_all(fd, 1);
}

struct binding {
	int fd, name_fd;
	bool by_name;
	bool listens_early;
	bool is_shared; /* programs of our own user could have the port as well, for a moment */
};

/* The port can't be bound for this reason: may old connections be the only cause? */
static bool may_be_old(int error, const struct sockaddr *address)
{
	uid_t user;

	return error == EADDRINUSE && !(rn_guarded(RN_GUARD_PORT_SHARING) && rn_tcp_listener_user(address, &user));
}

/* The third way. 0 or errno. */
static int bind_and_listen(int fd, const struct sockaddr *address, bool af_only)
{
	struct rn_port_use use;
	int error;

	if (!rn_tcp_port_use(address, af_only, &use) || use.is_held || !use.has_connections)
		return EADDRINUSE;
	share(fd, 0); /* RDMA_OPTION_ID_REUSEADDR does not help here: who listens is alone */
	share_with_all(fd, 1);
	error = bind(fd, address, rn_cm_address_length(address)) || listen(fd, 1) ? errno : 0;
	share_with_all(fd, 0);
	if (!error && (!rn_tcp_port_use(address, af_only, &use) || use.is_held))
		error = EADDRINUSE;
	return error;
}

static int bind_exclusively(int fd, const struct sockaddr *address, struct binding *binding)
{
	socklen_t length = rn_cm_address_length(address);
	int error = bind(fd, address, length) ? errno : 0;

	binding->is_shared = may_be_old(error, address);
	if (!binding->is_shared)
		return error;
	share(fd, 1);
	error = bind(fd, address, length) ? errno : 0;
	share(fd, 0);
	return error;
}

void rn_cm_unlisten(int fd)
{
	shutdown(fd, SHUT_RDWR); /* it keeps its port */
}

/* Of several identifiers with the port by RDMA_OPTION_ID_REUSEADDR only one listens. A Unix socket always does. */
int rn_cm_listen(struct rn_cm_id *id)
{
	int fd = id->bound_fd, error;

	if (id->listens_early)
		return listen(fd, SOMAXCONN); /* for more than one to wait */
	if (!rn_guarded(RN_GUARD_PORT_SHARING))
		share(fd, 1);
	else if (id->reuse_address)
		share(fd, 0);
	error = listen(fd, SOMAXCONN) ? errno : 0;
	if (may_be_old(error, &id->id.route.addr.src_addr)) {
		share(fd, 1);
		error = listen(fd, SOMAXCONN) ? errno : 0;
		share(fd, 0);
	}
	if (error && id->reuse_address)
		share(fd, 1);
	return error ? rn_cm_error(error) : 0;
}

/* A TCP socket bound to it, whose port is filled in; or -1 and errno. */
static int bound_socket(const struct rn_cm_id *id, struct sockaddr_storage *local, struct binding *binding)
{
	const struct sockaddr *address = (struct sockaddr *)local;
	socklen_t length = rn_cm_address_length(address);
	int fd = rn_fd_own(socket(local->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	int only = id->af_only, error;

	if (fd < 0)
		return -1;
	if (local->ss_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
	if (id->reuse_address) {
		share(fd, 1);
		error = bind(fd, address, length) ? errno : 0;
	} else {
		error = bind_exclusively(fd, address, binding);
	}
	if (may_be_old(error, address)) {
		error = bind_and_listen(fd, address, id->af_only);
		binding->listens_early = binding->is_shared = !error;
	}
	if (!error && getsockname(fd, (struct sockaddr *)local, &length))
		error = errno;
	if (!error)
		return fd;
	rn_fd_close(fd);
	return rn_cm_error(error);
}

/* The TCP port is taken. A program that listens on both expects RDMA's port to be free. 0 or errno. */
static int bind_by_name(const struct rn_cm_id *id, const struct sockaddr *address, struct binding *binding)
{
	enum rn_port_holder holder = rn_tcp_port_holder(address, id->af_only);
	int error;

	if (rn_guarded(RN_GUARD_NAME_OWNER) && holder != RN_PORT_OURS && holder != RN_PORT_UNKNOWN)
		return EADDRINUSE;
	if ((error = rn_cm_name_why_taken(address, id->af_only)))
		return error;
	binding->fd = rn_cm_name_bind(address, id->af_only);
	binding->by_name = true;
	return binding->fd < 0 ? errno : 0;
}

/* Get a TCP port and its name; or the name alone; or the port alone, if a stranger has the name. 0 or errno. */
static int bind_both(const struct rn_cm_id *id, struct sockaddr_storage *local, struct binding *binding)
{
	struct sockaddr *address = (struct sockaddr *)local;
	__be16 wanted = rn_cm_port(address);
	int tries = 16, error;

	*binding = (struct binding){.fd = -1, .name_fd = -1};
	do {
		rn_cm_set_port(address, wanted);
		binding->fd = bound_socket(id, local, binding);
		if (binding->fd < 0) {
			error = errno;
			break;
		}
		binding->name_fd = rn_cm_name_bind(address, id->af_only);
		if (binding->name_fd >= 0)
			return 0;
		error = errno;
		if (id->reuse_address ||
		    (error == EADDRINUSE && !rn_cm_name_is_equals(address, id->af_only, binding->is_shared))) {
			binding->name_fd = rn_cm_name_bind_other(address, id->af_only);
			return 0;
		}
		rn_fd_close(binding->fd);
		if (wanted)
			return error;
	} while (error == EADDRINUSE && --tries); /* if the kernel chose the port: try another */
	if (error != EADDRINUSE || !wanted || id->reuse_address)
		return error;
	return bind_by_name(id, address, binding);
}

RN_EXPORT int rdma_bind_addr(struct rdma_cm_id *rdma_id, struct sockaddr *address)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct sockaddr_storage local = {0};
	socklen_t length = rn_cm_address_length(address);
	struct binding binding;
	int error;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!length || id->state != RN_CM_IDLE)
		return rn_cm_error(EINVAL);
	if (!rn_cm_default_pd())
		return -1;
	memcpy(&local, address, length);
	if (rn_gid_local_only() && rn_cm_is_wildcard((struct sockaddr *)&local))
		rn_cm_set_loopback((struct sockaddr *)&local);
	if (!rn_cm_is_wildcard((struct sockaddr *)&local) && rn_gid_index_of((struct sockaddr *)&local) < 0)
		return rn_cm_error(EADDRNOTAVAIL);
	error = bind_both(id, &local, &binding);
	if (error)
		return rn_cm_error(error);
	pthread_mutex_lock(&rn_cm_lock);
	memcpy(&rdma_id->route.addr.src_addr, &local, length);
	id->bound_fd = binding.fd;
	id->name_fd = binding.name_fd;
	id->by_name = binding.by_name;
	id->listens_early = binding.listens_early;
	id->state = RN_CM_BOUND;
	rn_cm_set_route(id);
	pthread_mutex_unlock(&rn_cm_lock);
	return 0;
}
