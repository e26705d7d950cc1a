/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Synchronous identifiers: those without an event channel, whose calls wait for what they began.
 *
 * It has a private channel.  A call that starts something reads the event that ends it, and leaves the
 * event in id->event until the next call (rn_cm_complete), where programs find the private data.  A
 * listener's connections are synchronous too: rdma_get_request gives each a channel of its own.
 *
 * An endpoint is an identifier with its queue pair, made from what rdma_getaddrinfo has found.
 */
#include "cm/cm.h"

#include <poll.h>
#include <stdlib.h>

enum { RESOLVE_MS = 2000 };

/* --- endpoints ---------------------------------------------------------------------------------- */

/* The attributes for the endpoint's queue pair, or, if it listens, for those of its connections. */
static int keep_attributes(struct rn_cm_id *id, struct ibv_pd *pd, const struct ibv_qp_init_attr *attr)
{
	id->id.pd = pd;
	if (!attr)
		return 0;
	id->qp_attr = malloc(sizeof *id->qp_attr);
	if (!id->qp_attr)
		return rn_cm_error(ENOMEM);
	*id->qp_attr = *attr;
	id->qp_attr->qp_type = id->id.qp_type;
	return 0;
}

static int open_active(struct rn_cm_id *id, struct rdma_addrinfo *info, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (rdma_resolve_addr(&id->id, info->ai_src_addr, info->ai_dst_addr, RESOLVE_MS) ||
	    rdma_resolve_route(&id->id, RESOLVE_MS))
		return -1;
	if (!attr)
		return 0;
	attr->qp_type = id->id.qp_type;
	return rdma_create_qp(&id->id, pd, attr);
}

RN_EXPORT int rdma_create_ep(struct rdma_cm_id **result, struct rdma_addrinfo *info, struct ibv_pd *pd,
			     struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *rdma_id;
	struct rn_cm_id *id;
	int rc, error;

	if (rdma_create_id(NULL, &rdma_id, NULL, (enum rdma_port_space)info->ai_port_space))
		return -1;
	id = rn_cm_id(rdma_id);
	if (info->ai_qp_type)
		rdma_id->qp_type = (enum ibv_qp_type)info->ai_qp_type;
	if (info->ai_flags & RAI_PASSIVE)
		rc = rdma_bind_addr(rdma_id, info->ai_src_addr) || keep_attributes(id, pd, attr);
	else
		rc = open_active(id, info, pd, attr);
	if (rc) {
		error = errno;
		rdma_destroy_ep(rdma_id);
		return rn_cm_error(error);
	}
	*result = rdma_id;
	return 0;
}

RN_EXPORT void rdma_destroy_ep(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	if (id->srq)
		rdma_destroy_srq(id);
	rdma_destroy_id(id);
}

RN_EXPORT int rdma_get_request(struct rdma_cm_id *listener, struct rdma_cm_id **result)
{
	struct rn_cm_id *id = rn_cm_id(listener);
	struct rdma_cm_event *event;
	struct ibv_qp_init_attr attr;
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!id->sync)
		return rn_cm_error(EINVAL);
	rn_cm_put_event(id);
	if (rdma_get_cm_event(listener->channel, &event))
		return -1;
	if (event->status)
		error = event->status < 0 ? -event->status : event->status;
	else if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		error = EINVAL;
	if (error) {
		listener->event = event;
		return rn_cm_error(error);
	}
	if (id->qp_attr) {
		attr = *id->qp_attr; /* the call below writes into it */
		if (rdma_create_qp(event->id, listener->pd, &attr)) {
			struct rdma_cm_id *born = event->id;

			error = errno;
			rdma_ack_cm_event(event);
			rdma_destroy_id(born); /* rejects it */
			return rn_cm_error(error);
		}
	}
	*result = event->id;
	(*result)->event = event;
	return 0;
}

/* --- waiting for several ------------------------------------------------------------------------ */

/* For programs that were written for rsockets' poll and wait for event channels with it. */
RN_EXPORT int rpoll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
	return poll(fds, count, timeout_ms);
}
