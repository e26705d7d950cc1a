/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An identifier before anything has happened to it, and the lock under which everything does.
 */
#include "cm/cm.h"

#include <stdlib.h>

pthread_mutex_t rn_cm_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t rn_cm_acked = PTHREAD_COND_INITIALIZER;

struct rn_cm_id *rn_cm_id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space ps)
{
	struct rn_cm_id *id = calloc(1, sizeof *id);

	if (!id)
		return NULL;
	id->epoch = rn_epoch();
	id->bound_fd = id->name_fd = -1;
	id->id.channel = channel;
	id->id.context = context;
	id->id.ps = ps;
	id->id.qp_type = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
	id->qkey = RDMA_UDP_QKEY;
	return id;
}
