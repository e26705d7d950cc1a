/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Resolving: which of our addresses a destination is reached from, and that there is a route.
 *
 * The program can connect to every address that this host has a route to; the route decides which of ours is the source.
 * A wildcard to listen on stays a wildcard; as a destination it means the loopback address, as in the kernel's connection
 * manager.
 */
#include "base/gid.h"
#include "cm/cm.h"

#include <unistd.h>

/* A datagram to one of the two loopback addresses comes from that address: no route leads elsewhere. */
static bool is_its_own_source(const struct sockaddr *address)
{
	const struct sockaddr_in6 *v6 = (const void *)address;

	if (address->sa_family == AF_INET)
		return ((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr == htonl(INADDR_LOOPBACK);
	return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

/* As the kernel chooses it for a datagram; none is sent. 0 or errno. */
static int ask_for_source(const struct sockaddr *dst, struct sockaddr_storage *near)
{
	socklen_t length = rn_cm_address_length(dst);
	int fd = socket(dst->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), error = 0;

	if (fd < 0)
		return errno;
	if ((!rn_cm_is_wildcard((struct sockaddr *)near) && bind(fd, (struct sockaddr *)near, length)) ||
	    connect(fd, dst, length) || getsockname(fd, (struct sockaddr *)near, &length))
		error = errno;
	close(fd);
	return error;
}

/* Which of our addresses the route to another one starts from. 0, or why there is no route. src: unspecified, or the one
 * that was bound. */
static int find_source(const struct sockaddr *dst, struct sockaddr_storage *src)
{
	struct sockaddr_storage near = *src;
	int error = 0;

	rn_cm_set_port((struct sockaddr *)&near, 0);
	if (is_its_own_source(dst) && rn_cm_is_wildcard((struct sockaddr *)&near))
		rn_cm_set_loopback((struct sockaddr *)&near);
	else
		error = ask_for_source(dst, &near);
	if (error == ENETUNREACH && rn_cm_is_multicast(dst)) {
		/* On a host with loopback only, groups are among its own programs. */
		near.ss_family = dst->sa_family;
		rn_cm_set_loopback((struct sockaddr *)&near);
		error = 0;
	}
	if (error && error != EACCES) /* to everybody at once */
		return error;
	if (error || rn_gid_index_of((struct sockaddr *)&near) < 0)
		return EHOSTUNREACH;
	rn_cm_set_port((struct sockaddr *)&near, rn_cm_port((struct sockaddr *)src));
	*src = near;
	return 0;
}

/* Find the source, and note both addresses. Returns -1 and errno if that cannot be tried; else 0, and in `unreachable` 0
 * or why there is no route. */
static int find_way(struct rn_cm_id *id, struct sockaddr *src, const struct sockaddr *dst, int *unreachable)
{
	struct rdma_addr *addr = &id->id.route.addr;
	socklen_t length = rn_cm_address_length(dst);
	struct sockaddr_storage to = {0}, from;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!length || (id->state != RN_CM_IDLE && id->state != RN_CM_BOUND))
		return rn_cm_error(EINVAL);
	if (!rn_cm_default_pd())
		return -1;
	if (src && rn_cm_address_length(src) && src->sa_family != dst->sa_family)
		return rn_cm_error(EINVAL);
	if (src && id->state == RN_CM_IDLE && (rn_cm_port(src) || !rn_cm_is_wildcard(src)) &&
	    rdma_bind_addr(&id->id, src))
		return -1;

	memcpy(&to, dst, length);
	if (rn_cm_is_wildcard(dst))
		rn_cm_set_loopback((struct sockaddr *)&to);
	from = addr->src_storage;
	from.ss_family = to.ss_family;
	*unreachable = rn_device_check(rn_context(rn_cm_context()), RN_RESOLVE_ADDR);
	if (!*unreachable)
		*unreachable = find_source((struct sockaddr *)&to, &from);
	pthread_mutex_lock(&rn_cm_lock);
	addr->dst_storage = to;
	if (!*unreachable)
		addr->src_storage = from;
	pthread_mutex_unlock(&rn_cm_lock);
	return 0;
}

/* With rn_cm_lock held. */
static void take_address(struct rn_cm_id *id)
{
	rn_cm_set_route(id);
	id->state = RN_CM_ADDRESS_RESOLVED;
}

static void take_route(struct rn_cm_id *id)
{
	id->id.route.path_rec = &id->path;
	id->id.route.num_paths = 1;
	id->state = RN_CM_ROUTE_RESOLVED;
}

/* The source's port is known once the connection is being made, unless it was bound before. */
RN_EXPORT int rdma_resolve_addr(struct rdma_cm_id *rdma_id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0, unreachable;

	(void)timeout_ms; /* nothing to wait for */
	if (find_way(id, src, dst, &unreachable))
		return -1;
	pthread_mutex_lock(&rn_cm_lock);
	if (unreachable)
		error = rn_cm_tell(id, RDMA_CM_EVENT_ADDR_ERROR, -unreachable) ? 0 : ENOMEM;
	else if (!rn_cm_tell(id, RDMA_CM_EVENT_ADDR_RESOLVED, 0))
		error = ENOMEM;
	else
		take_address(id);
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT int rdma_resolve_route(struct rdma_cm_id *rdma_id, int timeout_ms)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0, unreachable;

	(void)timeout_ms;
	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state != RN_CM_ADDRESS_RESOLVED)
		error = EINVAL;
	else if ((unreachable = rn_device_check(rn_context(rn_cm_context()), RN_RESOLVE_ROUTE)))
		error = rn_cm_tell(id, RDMA_CM_EVENT_ROUTE_ERROR, -unreachable) ? 0 : ENOMEM;
	else if (!rn_cm_tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0))
		error = ENOMEM;
	else
		take_route(id);
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT int rdmanet_soft_cm_resolve(struct rdma_cm_id *rdma_id, struct sockaddr *src, struct sockaddr *dst)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	enum rdma_cm_event_type failed = RDMA_CM_EVENT_ADDR_ERROR;
	int error = 0, unreachable;

	if (find_way(id, src, dst, &unreachable))
		return -1;
	pthread_mutex_lock(&rn_cm_lock);
	if (!unreachable) {
		take_address(id);
		failed = RDMA_CM_EVENT_ROUTE_ERROR;
		unreachable = rn_device_check(rn_context(rn_cm_context()), RN_RESOLVE_ROUTE);
	}
	if (!unreachable)
		take_route(id);
	else if (!rn_cm_tell(id, failed, -unreachable))
		error = ENOMEM;
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : !unreachable;
}
