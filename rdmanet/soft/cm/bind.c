/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding: a port of our own.
 *
 * A bound identifier holds a bound TCP socket, so a port that another RDMA program has taken is refused at once (for
 * TCP programs see name.c).
 *
 * A bound socket must keep its port to itself, even before it listens.  So it is bound without an option to share the
 * port.  But old connections of that port, in TIME_WAIT, would then prevent that; so if it fails, the socket is bound
 * with SO_REUSEPORT, which ignores them (rn_cm_release_port() set it on them too), and then the option is removed.
 * Meanwhile a program of our own user could share the port, and no other; with SO_REUSEADDR any program could.  A
 * program of our user may already listen there and share its port, though not with us: that is checked first.
 *
 * (Before Linux 6.17 a closed connection that still waits for its peer's answer belongs to root: for up to some minutes
 * it keeps the port from other users.  There is none if the peer is on this host, or alive.)
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

void rn_cm_release_port(int fd)
{
	share(fd, 1);
}

/* The port can't be bound for this reason: may old connections be the only cause? */
static bool may_be_old(int error, const struct sockaddr *address)
{
	uid_t user;

	return error == EADDRINUSE && !(rn_guarded(RN_GUARD_PORT_SHARING) && rn_tcp_listener_user(address, &user));
}

/* is_shared: the port was shareable for a moment. */
static int bind_exclusively(int fd, const struct sockaddr *address, bool *is_shared)
{
	socklen_t length = rn_cm_address_length(address);
	int error = bind(fd, address, length) ? errno : 0;

	*is_shared = may_be_old(error, address);
	if (!*is_shared)
		return error;
	share(fd, 1);
	error = bind(fd, address, length) ? errno : 0;
	share(fd, 0);
	return error;
}

/* Of several identifiers with the port by RDMA_OPTION_ID_REUSEADDR only one listens. A Unix socket always does. */
int rn_cm_listen(struct rn_cm_id *id)
{
	int fd = id->bound_fd, error;

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
static int bound_socket(const struct rn_cm_id *id, struct sockaddr_storage *local, bool *is_shared)
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
		error = bind_exclusively(fd, address, is_shared);
	}
	if (!error && getsockname(fd, (struct sockaddr *)local, &length))
		error = errno;
	if (!error)
		return fd;
	rn_fd_close(fd);
	return rn_cm_error(error);
}

struct binding {
	int fd, name_fd;
	bool by_name;
};

/* The TCP port is taken. A program that listens on both expects RDMA's port to be free. 0 or errno. */
static int bind_by_name(const struct rn_cm_id *id, const struct sockaddr *address, struct binding *binding)
{
	enum rn_port_holder holder = rn_tcp_port_holder(be16toh(rn_cm_port(address)));
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
	bool is_shared = false;

	*binding = (struct binding){.fd = -1, .name_fd = -1};
	do {
		rn_cm_set_port(address, wanted);
		binding->fd = bound_socket(id, local, &is_shared);
		if (binding->fd < 0) {
			error = errno;
			break;
		}
		binding->name_fd = rn_cm_name_bind(address, id->af_only);
		if (binding->name_fd >= 0)
			return 0;
		error = errno;
		if (id->reuse_address ||
		    (error == EADDRINUSE && !rn_cm_name_is_equals(address, id->af_only, is_shared))) {
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
	id->state = RN_CM_BOUND;
	rn_cm_set_route(id);
	pthread_mutex_unlock(&rn_cm_lock);
	return 0;
}
