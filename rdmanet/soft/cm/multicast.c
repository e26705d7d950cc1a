/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Multicast groups of an identifier for datagrams.
 *
 * On Ethernet no one manages groups: a group's GID is its IP address, and to join it is to attach
 * the queue pair to it.  That happens when the program reads MULTICAST_JOIN, as in the real library;
 * the event tells it how to send there: the address vector, queue pair 0xffffff, and the Q_Key.
 */
#include "base/gid.h"
#include "cm/cm.h"

#include <stdlib.h>

enum { MULTICAST_QPN = 0xffffff };

static struct rn_cm_group **find(struct rn_cm_id *id, const struct sockaddr *address)
{
	struct rn_cm_group **link = &id->groups;
	union ibv_gid gid;

	rn_gid_of(address, &gid);
	while (*link && memcmp(&(*link)->gid, &gid, sizeof gid))
		link = &(*link)->next;
	return link;
}

/* rn_cm_lock held. */
static int announce(struct rn_cm_id *id, struct rn_cm_group *group)
{
	struct rn_cm_event *event = rn_cm_event_new(id, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
	struct rdma_ud_param *param;

	if (!event)
		return ENOMEM;
	param = &event->event.param.ud;
	if (!rn_cm_path_to(id, &group->gid, &param->ah_attr)) {
		free(event);
		return EADDRNOTAVAIL;
	}
	event->group = group;
	param->private_data = group->context;
	param->qp_num = MULTICAST_QPN;
	param->qkey = id->qkey;
	group->next = id->groups;
	id->groups = group;
	rn_cm_event_queue(event);
	return 0;
}

static int join(struct rdma_cm_id *rdma_id, const struct sockaddr *address, bool send_only, void *context)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	socklen_t length = rn_cm_address_length(address);
	struct rn_cm_group *group;
	int error;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!rn_cm_is_datagram(id) || !rdma_id->verbs || !length || !rn_cm_is_multicast(address))
		return rn_cm_error(EINVAL);
	group = calloc(1, sizeof *group);
	if (!group)
		return rn_cm_error(ENOMEM);
	memcpy(&group->address, address, length);
	rn_gid_of(address, &group->gid);
	group->context = context;
	group->send_only = send_only;
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state != RN_CM_BOUND && id->state != RN_CM_ADDRESS_RESOLVED && id->state != RN_CM_ROUTE_RESOLVED)
		error = EINVAL;
	else if (*find(id, address))
		error = EADDRINUSE;
	else
		error = announce(id, group);
	pthread_mutex_unlock(&rn_cm_lock);
	if (error) {
		free(group);
		return rn_cm_error(error);
	}
	return rn_cm_complete(id);
}

RN_EXPORT int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *address, void *context)
{
	return join(id, address, false, context);
}

RN_EXPORT int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr, void *context)
{
	if (attr->comp_mask != (RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS))
		return rn_cm_error(attr->comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED ? ENOTSUP : EINVAL);
	if (attr->join_flags >= RDMA_MC_JOIN_FLAG_RESERVED)
		return rn_cm_error(ENOTSUP);
	return join(id, attr->addr, attr->join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, context);
}

RN_EXPORT int rdma_leave_multicast(struct rdma_cm_id *rdma_id, struct sockaddr *address)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rn_cm_group *group = NULL, **link;
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!rn_cm_address_length(address))
		return rn_cm_error(EINVAL);
	rn_cm_put_event(id);
	pthread_mutex_lock(&rn_cm_lock);
	link = find(id, address);
	group = *link;
	if (group) {
		*link = group->next;
		rn_cm_event_forget_group(id, group);
		while (group->owed)
			pthread_cond_wait(&rn_cm_acked, &rn_cm_lock);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (!group)
		return rn_cm_error(EADDRNOTAVAIL);
	if (group->attached && rdma_id->qp)
		error = ibv_detach_mcast(rdma_id->qp, &group->gid, 0);
	free(group);
	return error ? rn_cm_error(error) : 0;
}
