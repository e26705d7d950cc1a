/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Multicast groups: UD queue pairs that are attached to a GID get what is sent there.
 *
 * A group's GID is its IP address, as RoCE has it.  A message to it is one UDP datagram to that
 * address and one port that all processes share (SO_REUSEADDR), so the network does the copying, also
 * between the processes of this host.  Each process has a socket for a group, joined on every interface that
 * the device has an address of, and gives what comes to each queue pair that is attached.  A sender that is
 * attached itself gets its own messages, as on an adapter that isn't told otherwise.
 *
 * Any process that can send to that address can send into the group, so a process that requires a secret of its peers
 * joins none (see wire.c).  And only what was sent to the group counts: a socket of IPv6 hears what comes to its port
 * at any address of this host.
 *
 * The table is guarded by rn_process_lock.
 */
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "base/gid.h"
#include "base/guard.h"
#include "base/log.h"
#include "datagram/datagram.h"
#include "datagram/multicast.h"
#include "datagram/wire.h"

#ifndef IPV6_MULTICAST_ALL
#define IPV6_MULTICAST_ALL 29
#endif

enum { MULTICAST_QPN = 0xffffff };

struct member {
	struct rn_qp *qp;
	struct member *next;
};

struct group {
	struct rn_source source;
	union ibv_gid gid;
	struct member *members;
	struct group *next;
};

static struct group *groups;

static struct group *find(const union ibv_gid *gid)
{
	struct group *group = groups;

	while (group && memcmp(&group->gid, gid, sizeof(*gid)))
		group = group->next;
	return group;
}

static struct member **find_member(struct group *group, const struct rn_qp *qp)
{
	struct member **at = &group->members;

	while (*at && (*at)->qp != qp)
		at = &(*at)->next;
	return at;
}

/* --- the socket ------------------------------------------------------------------------------------------------ */

static void give_to_all(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram)
{
	struct group *group = closure;

	if (dest_qpn != MULTICAST_QPN)
		return;
	pthread_mutex_lock(&rn_process_lock);
	for (struct member *member = group->members; member; member = member->next)
		rn_ud_deliver(member->qp, datagram);
	pthread_mutex_unlock(&rn_process_lock);
}

static void group_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct group *group = RN_OWNER(source, struct group, source);

	(void)epoll_events;
	rn_ud_wire_receive(source->fd, &group->gid, give_to_all, group);
}

/* Where the device has addresses; some interfaces may not want to. */
static void join(int fd, const struct sockaddr_storage *to)
{
	uint32_t interface, last = 0;

	for (uint32_t i = 0; rn_gid_next(&i, NULL, &interface); i++) {
		struct group_req request = {.gr_group = *to};

		if (interface == last)
			continue;
		request.gr_interface = last = interface;
		setsockopt(fd, to->ss_family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, MCAST_JOIN_GROUP, &request,
			   sizeof(request));
	}
}

/* -1 and errno. */
static int open_socket(const union ibv_gid *gid)
{
	struct sockaddr_storage to;
	socklen_t length = rn_gid_address(gid, 0, RN_UD_GROUP_PORT, &to);
	int fd = rn_fd_own(socket(to.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), on = 1, off = 0, err;
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(RN_UD_GROUP_PORT)};
	struct sockaddr *at = (struct sockaddr *)&to;

	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	/* Only what this very socket has joined. */
	if (to.ss_family == AF_INET) {
		setsockopt(fd, IPPROTO_IP, IP_MULTICAST_ALL, &off, sizeof(off));
	} else {
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
		setsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_ALL, &off, sizeof(off));
		if (setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof(on)))
			goto failed;
		at = (struct sockaddr *)&any; /* a group of the link alone would need an interface to bind to */
		length = sizeof(any);
	}
	if (!bind(fd, at, length)) {
		join(fd, &to);
		return fd;
	}
failed:
	err = errno;
	rn_fd_close(fd);
	errno = err;
	return -1;
}

/* --- attaching -------------------------------------------------------------------------------------------------- */

/* With rn_process_lock held. 0 or errno. */
static int open_group(const union ibv_gid *gid, struct group **opened)
{
	struct group *group = calloc(1, sizeof(*group));
	int err;

	if (!group)
		return ENOMEM;
	group->gid = *gid;
	group->source = (struct rn_source){.fd = open_socket(gid), .ready = group_ready};
	if (group->source.fd < 0) {
		err = errno;
		free(group);
		return err;
	}
	err = -rn_source_add(&group->source, EPOLLIN);
	if (err) {
		rn_fd_close(group->source.fd);
		free(group);
		return err;
	}
	group->next = groups;
	groups = group;
	*opened = group;
	return 0;
}

RN_EXPORT int ibv_attach_mcast(struct ibv_qp *base, const union ibv_gid *gid, uint16_t lid)
{
	struct rn_qp *qp = rn_qp(base);
	struct member *member = calloc(1, sizeof(*member));
	struct group *group;
	int err = 0;

	(void)lid;
	if (!member)
		return ENOMEM;
	if (rn_is_foreign(base->context) || base->qp_type != IBV_QPT_UD || !rn_gid_is_multicast(gid)) {
		free(member);
		return rn_is_foreign(base->context) ? ENODEV : EINVAL;
	}
	if (rn_settings.has_secret && rn_guarded(RN_GUARD_CM_SECRET)) {
		free(member);
		rn_warn(RN_WARN_SECRET,
			"ibv_attach_mcast: a secret is set, and multicast datagrams cannot prove that their sender knows it");
		return EPERM; /* better than to receive nothing without knowing why */
	}
	pthread_mutex_lock(&rn_process_lock);
	group = find(gid);
	if (!group)
		err = open_group(gid, &group);
	if (!err && !*find_member(group, qp)) {
		*member = (struct member){.qp = qp, .next = group->members};
		group->members = member;
		qp->ud->groups++;
		member = NULL;
	}
	pthread_mutex_unlock(&rn_process_lock);
	free(member); /* twice is once */
	return err;
}

RN_EXPORT int ibv_detach_mcast(struct ibv_qp *base, const union ibv_gid *gid, uint16_t lid)
{
	struct group *group, *unused = NULL, **at;
	struct member **link, *member = NULL;
	struct rn_qp *qp = rn_qp(base);

	(void)lid;
	if (rn_is_foreign(base->context))
		return ENODEV;
	if (rn_context_is_dead(base->context))
		return EIO;
	pthread_mutex_lock(&rn_process_lock);
	group = find(gid);
	link = group ? find_member(group, qp) : NULL;
	if (link && *link) {
		member = *link;
		*link = member->next;
		qp->ud->groups--;
		if (!group->members) {
			for (at = &groups; *at != group;)
				at = &(*at)->next;
			*at = group->next;
			unused = group;
		}
	}
	pthread_mutex_unlock(&rn_process_lock);
	/* What runs for it takes rn_process_lock. */
	if (unused) {
		rn_source_remove(&unused->source);
		rn_fd_close(unused->source.fd);
		free(unused);
	}
	if (!member)
		return EINVAL;
	free(member);
	return 0;
}

void rn_mcast_detach_all(struct rn_qp *qp)
{
	while (qp->ud->groups) {
		union ibv_gid gid = {0};

		pthread_mutex_lock(&rn_process_lock);
		for (struct group *group = groups; group; group = group->next)
			if (*find_member(group, qp))
				gid = group->gid;
		pthread_mutex_unlock(&rn_process_lock);
		if (ibv_detach_mcast(&qp->ex.qp_base, &gid, 0))
			return;
	}
}

void rn_mcast_forked(void)
{
	groups = NULL;
}
