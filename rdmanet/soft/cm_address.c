/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses of the connection manager.
 *
 * Every address of this host is the device's, and every address that this host has a way to is one
 * to connect to; the way decides which of ours is the source.  A wildcard to listen on stays one,
 * as destination it means the loopback address, as the kernel's connection manager has it.  An
 * identifier that is bound holds a TCP socket that is bound, so a port that is taken is seen at once;
 * by an RDMA program, that is: see cm_name.c.
 */
#define _GNU_SOURCE
#include "cm.h"

#include "gid.h"
#include "guard.h"
#include "sock_diag.h"

#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

static bool is_mapped(const struct sockaddr_in6 *in6)
{
	return IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr);
}

socklen_t rn_cm_address_length(const struct sockaddr *address)
{
	if (!address)
		return 0;
	return address->sa_family == AF_INET    ? sizeof(struct sockaddr_in)
	       : address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
						: 0;
}

bool rn_cm_is_wildcard(const struct sockaddr *address)
{
	const struct sockaddr_in6 *in6 = (const void *)address;

	if (address->sa_family == AF_INET)
		return ((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr == htonl(INADDR_ANY);
	return IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
}

bool rn_cm_is_multicast(const struct sockaddr *address)
{
	const struct sockaddr_in6 *v6 = (const void *)address;

	if (address->sa_family == AF_INET)
		return IN_MULTICAST(ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr));
	return IN6_IS_ADDR_MULTICAST(&v6->sin6_addr);
}

void rn_cm_set_loopback(struct sockaddr *address)
{
	if (address->sa_family == AF_INET)
		((struct sockaddr_in *)(void *)address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	else
		((struct sockaddr_in6 *)(void *)address)->sin6_addr = in6addr_loopback;
}

/* The port lies at the same place in both families. */
__be16 rn_cm_port(const struct sockaddr *address)
{
	return rn_cm_address_length(address) ? ((const struct sockaddr_in *)(const void *)address)->sin_port : 0;
}

void rn_cm_set_port(struct sockaddr *address, __be16 port)
{
	((struct sockaddr_in *)(void *)address)->sin_port = port;
}

int rn_cm_gid_index(const struct sockaddr *address)
{
	return rn_gid_index_of(address);
}

/* A listener for both families has an IPv4 peer in IPv6's clothes. */
void rn_cm_undress(struct sockaddr_storage *address)
{
	struct sockaddr_in6 v6 = *(struct sockaddr_in6 *)address;

	if (v6.sin6_family != AF_INET6 || !is_mapped(&v6))
		return;
	memset(address, 0, sizeof *address);
	*(struct sockaddr_in *)address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = v6.sin6_port};
	memcpy(&((struct sockaddr_in *)address)->sin_addr, &v6.sin6_addr.s6_addr[12], 4);
}

void rn_cm_set_route(struct rn_cm_id *id)
{
	struct rdma_route *route = &id->id.route;

	/* A wildcard names no device yet: each request that comes has its own. */
	if (!rn_cm_address_length(&route->addr.dst_addr) && rn_cm_is_wildcard(&route->addr.src_addr))
		return;
	id->id.verbs = rn_cm_context();
	if (!id->id.pd)
		id->id.pd = rn_cm_known_pd(); /* for programs that make their queue pairs themselves */
	id->id.port_num = 1;
	rn_gid_of(&route->addr.src_addr, &route->addr.addr.ibaddr.sgid);
	if (!rn_cm_address_length(&route->addr.dst_addr))
		return;
	rn_gid_of(&route->addr.dst_addr, &route->addr.addr.ibaddr.dgid);
	route->addr.addr.ibaddr.pkey = htobe16(0xffff);
	id->path = (struct ibv_sa_path_rec){
		.sgid = route->addr.addr.ibaddr.sgid,
		.dgid = route->addr.addr.ibaddr.dgid,
		.pkey = htobe16(0xffff),
		.reversible = 1,
		.hop_limit = 1,
		.traffic_class = id->tos,
		.mtu_selector = 2,
		.mtu = IBV_MTU_4096,
		.rate_selector = 2,
		.rate = IBV_RATE_100_GBPS,
		.packet_life_time_selector = 2,
	};
}

/* --- binding ------------------------------------------------------------------------------------ */

/*
 * A bound socket must keep others off its port, also while it doesn't listen yet.  So it is bound without an option to
 * share it.  But old connections of that port, in TIME_WAIT, would refuse it then; so where that fails it is bound
 * with SO_REUSEPORT, which disregards them (rn_cm_release_port() gave it to them), and then the option is taken off
 * again.  For that moment a program of our own user could share it, and no other: with SO_REUSEADDR everybody could.
 * A program of ours that listens there, and lets its port be shared, doesn't mean with us: it is looked for first.
 *
 * (Before Linux 6.17 a closed connection that still waits for its peer's answer is root's: for up to some minutes
 * such a one keeps the port from who isn't root.  On this host, and where the peer lives, there is none.)
 */
static void share(int fd, int on)
{
	setsockopt(fd, SOL_SOCKET, rn_guarded(RN_GUARD_PORT_SHARING) ? SO_REUSEPORT : SO_REUSEADDR, &on, sizeof on);
}

void rn_cm_release_port(int fd)
{
	share(fd, 1);
}

/* The port can't be had for this reason: may that be for old connections only? */
static bool may_be_old(int error, const struct sockaddr *address)
{
	uid_t user;

	return error == EADDRINUSE && !(rn_guarded(RN_GUARD_PORT_SHARING) && rn_tcp_listener_user(address, &user));
}

/* is_shared: for that moment it was. */
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

/* Of several that have the port by RDMA_OPTION_ID_REUSEADDR only one listens. A Unix socket always does. */
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

/* The TCP port is taken. A program of ours that listens on both expects RDMA's to be free. 0 or errno. */
static int bind_by_name(const struct rn_cm_id *id, const struct sockaddr *address, struct binding *binding)
{
	enum rn_port_holder holder = rn_tcp_port_holder(be16toh(rn_cm_port(address)));
	int error;

	if (rn_guarded(RN_GUARD_NAME_OWNER) && holder != RN_PORT_OURS && holder != RN_PORT_UNKNOWN)
		return EADDRINUSE;
	if ((error = rn_cm_name_why_taken(address, id->af_only)))
		return error;
	binding->fd = rn_cm_name_claim(address, id->af_only);
	binding->by_name = true;
	return binding->fd < 0 ? errno : 0;
}

/* A port in TCP's space and its name in ours; or the name alone; or the port alone, where a stranger has the name.
 * 0 or errno. */
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
		binding->name_fd = rn_cm_name_claim(address, id->af_only);
		if (binding->name_fd >= 0)
			return 0;
		error = errno;
		if (id->reuse_address ||
		    (error == EADDRINUSE && !rn_cm_name_is_equals(address, id->af_only, is_shared))) {
			binding->name_fd = rn_cm_name_claim_other(address, id->af_only);
			return 0;
		}
		rn_fd_close(binding->fd);
		if (wanted)
			return error;
	} while (error == EADDRINUSE && --tries); /* of those the kernel chose, another */
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

/*
 * Which address of ours the way to another begins with: what the kernel says for a datagram, of
 * which none is sent.  0, or why there is no way.  src: unspecified, or the one that was bound.
 */
static int find_source(const struct sockaddr *dst, struct sockaddr_storage *src)
{
	socklen_t length = rn_cm_address_length(dst);
	struct sockaddr_storage near = *src;
	int fd = socket(dst->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), error = 0;

	if (fd < 0)
		return errno;
	rn_cm_set_port((struct sockaddr *)&near, 0);
	if ((!rn_cm_is_wildcard((struct sockaddr *)&near) && bind(fd, (struct sockaddr *)&near, length)) ||
	    connect(fd, dst, length) || getsockname(fd, (struct sockaddr *)&near, &length))
		error = errno;
	close(fd);
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

/* The port of the source is known when the connection is under way, or was bound before. */
RN_EXPORT int rdma_resolve_addr(struct rdma_cm_id *rdma_id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rdma_addr *addr = &rdma_id->route.addr;
	socklen_t length = rn_cm_address_length(dst);
	struct sockaddr_storage to = {0}, from;
	int error = 0, no_way;

	(void)timeout_ms; /* nothing to wait for */
	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!length || (id->state != RN_CM_IDLE && id->state != RN_CM_BOUND))
		return rn_cm_error(EINVAL);
	if (!rn_cm_default_pd())
		return -1;
	if (src && rn_cm_address_length(src) && src->sa_family != dst->sa_family)
		return rn_cm_error(EINVAL);
	if (src && id->state == RN_CM_IDLE && (rn_cm_port(src) || !rn_cm_is_wildcard(src)) &&
	    rdma_bind_addr(rdma_id, src))
		return -1;

	memcpy(&to, dst, length);
	if (rn_cm_is_wildcard(dst))
		rn_cm_set_loopback((struct sockaddr *)&to);
	from = addr->src_storage;
	from.ss_family = to.ss_family;
	no_way = rn_chaos_call(rn_context(rn_cm_context()), RN_RESOLVE_ADDR);
	if (!no_way)
		no_way = find_source((struct sockaddr *)&to, &from);

	pthread_mutex_lock(&rn_cm_lock);
	addr->dst_storage = to;
	if (no_way) {
		error = rn_cm_tell(id, RDMA_CM_EVENT_ADDR_ERROR, -no_way) ? 0 : ENOMEM;
	} else if (!rn_cm_tell(id, RDMA_CM_EVENT_ADDR_RESOLVED, 0)) {
		error = ENOMEM;
	} else {
		addr->src_storage = from;
		rn_cm_set_route(id);
		id->state = RN_CM_ADDRESS_RESOLVED;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT int rdma_resolve_route(struct rdma_cm_id *rdma_id, int timeout_ms)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0, no_way;

	(void)timeout_ms;
	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state != RN_CM_ADDRESS_RESOLVED) {
		error = EINVAL;
	} else if ((no_way = rn_chaos_call(rn_context(rn_cm_context()), RN_RESOLVE_ROUTE))) {
		error = rn_cm_tell(id, RDMA_CM_EVENT_ROUTE_ERROR, -no_way) ? 0 : ENOMEM;
	} else if (!rn_cm_tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0)) {
		error = ENOMEM;
	} else {
		rdma_id->route.path_rec = &id->path;
		rdma_id->route.num_paths = 1;
		id->state = RN_CM_ROUTE_RESOLVED;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT __be16 rdma_get_src_port(struct rdma_cm_id *id)
{
	return rn_cm_port(&id->route.addr.src_addr);
}

RN_EXPORT __be16 rdma_get_dst_port(struct rdma_cm_id *id)
{
	return rn_cm_port(&id->route.addr.dst_addr);
}

/* --- names -------------------------------------------------------------------------------------- */

/* One block: the answer and, behind it, its addresses. */
struct answer {
	struct rdma_addrinfo info;
	struct sockaddr_storage src, dst;
};

/* What the hints say of everything but addresses. */
static struct answer *answer_by(const struct rdma_addrinfo *hints, int family)
{
	struct answer *answer = calloc(1, sizeof *answer);
	struct rdma_addrinfo *info = &answer->info;

	if (!answer)
		return NULL;
	info->ai_flags = hints ? hints->ai_flags : 0;
	info->ai_family = family;
	info->ai_port_space = hints ? hints->ai_port_space : 0;
	info->ai_qp_type = hints ? hints->ai_qp_type : 0;
	if (!info->ai_port_space) /* one follows from the other */
		info->ai_port_space = info->ai_qp_type == IBV_QPT_UD ? RDMA_PS_UDP : RDMA_PS_TCP;
	if (!info->ai_qp_type)
		info->ai_qp_type = info->ai_port_space == RDMA_PS_UDP || info->ai_port_space == RDMA_PS_IPOIB ? IBV_QPT_UD
													      : IBV_QPT_RC;
	return answer;
}

static void set_src(struct answer *answer, const struct sockaddr *address, socklen_t length)
{
	memcpy(&answer->src, address, length);
	answer->info.ai_src_addr = (struct sockaddr *)&answer->src;
	answer->info.ai_src_len = length;
}

static void set_dst(struct answer *answer, const struct sockaddr *address, socklen_t length)
{
	memcpy(&answer->dst, address, length);
	answer->info.ai_dst_addr = (struct sockaddr *)&answer->dst;
	answer->info.ai_dst_len = length;
}

/* An address that was found is where to listen, or where to go: from the hint's, if it has one. */
static struct rdma_addrinfo *answer_of(const struct addrinfo *found, const struct rdma_addrinfo *hints)
{
	struct answer *answer = answer_by(hints, found->ai_family);

	if (!answer)
		return NULL;
	if (answer->info.ai_flags & RAI_PASSIVE)
		set_src(answer, found->ai_addr, found->ai_addrlen);
	else
		set_dst(answer, found->ai_addr, found->ai_addrlen);
	if (!answer->info.ai_src_len && hints && hints->ai_src_len)
		set_src(answer, hints->ai_src_addr, hints->ai_src_len);
	return &answer->info;
}

/* Nothing is to be looked up: the hints' own addresses, whichever they have. */
static struct rdma_addrinfo *answer_of_hints(const struct rdma_addrinfo *hints)
{
	struct answer *answer = answer_by(hints, hints->ai_family);

	if (!answer)
		return NULL;
	if (hints->ai_src_len)
		set_src(answer, hints->ai_src_addr, hints->ai_src_len);
	if (hints->ai_dst_len)
		set_dst(answer, hints->ai_dst_addr, hints->ai_dst_len);
	return &answer->info;
}

/* A name that must be asked for makes this call wait, as the real one does. */
RN_EXPORT int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
		     struct rdma_addrinfo **result)
{
	struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found, *each;
	struct rdma_addrinfo *first = NULL, **end = &first;
	int rc;

	if (hints && (hints->ai_src_len > sizeof(struct sockaddr_storage) ||
		      hints->ai_dst_len > sizeof(struct sockaddr_storage)))
		return rn_cm_error(EINVAL);
	if (!node && !service) {
		if (!hints)
			return rn_cm_error(EINVAL);
		*result = answer_of_hints(hints);
		return *result ? 0 : rn_cm_error(ENOMEM);
	}
	if (hints) {
		want.ai_flags = (hints->ai_flags & RAI_PASSIVE ? AI_PASSIVE : 0) |
				(hints->ai_flags & RAI_NUMERICHOST ? AI_NUMERICHOST : 0);
		want.ai_family = hints->ai_flags & RAI_FAMILY || hints->ai_family ? hints->ai_family : AF_UNSPEC;
	}
	rc = getaddrinfo(node, service, &want, &found);
	if (rc)
		return rn_cm_error(rc == EAI_SYSTEM ? errno : rc == EAI_MEMORY ? ENOMEM : EADDRNOTAVAIL);
	for (each = found; each; each = each->ai_next) {
		if (!rn_cm_address_length(each->ai_addr))
			continue;
		*end = answer_of(each, hints);
		if (!*end)
			break;
		end = &(*end)->ai_next;
	}
	freeaddrinfo(found);
	if (each || !first) {
		rdma_freeaddrinfo(first);
		return rn_cm_error(each ? ENOMEM : EADDRNOTAVAIL);
	}
	*result = first;
	return 0;
}

RN_EXPORT void rdma_freeaddrinfo(struct rdma_addrinfo *info)
{
	while (info) {
		struct rdma_addrinfo *next = info->ai_next;

		free(RN_OWNER(info, struct answer, info));
		info = next;
	}
}
