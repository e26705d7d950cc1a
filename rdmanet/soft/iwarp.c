/* SPDX-License-Identifier: Apache-2.0 */
#include "iwarp.h"

#include "cm.h"
#include "soft.h"

int rn_iwarp_check(const struct ibv_send_wr *wr)
{
	switch (wr->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
	case IBV_WR_RDMA_WRITE:
		return 0;
	case IBV_WR_RDMA_READ:
		return wr->num_sge > 1 ? EINVAL : 0;
	default:
		return EINVAL;
	}
}

bool rn_iwarp_is_too_early(struct rn_qp *qp)
{
	/* Whoever comes in leaves its mark in the block, whatever it came for. */
	if (qp->is_passive && (atomic_load(&qp->theirs->busy) != qp->busy_before ||
			       atomic_load(&qp->theirs->done) != qp->done_before ||
			       (qp->streams.in && qp->streams.in->expected)))
		qp->is_passive = false;
	return qp->is_passive;
}

void rn_iwarp_terminate(struct rn_qp *qp)
{
	int state = atomic_load(&qp->state);

	if (state == IBV_QPS_ERR || state == IBV_QPS_RESET)
		return;
	rn_event_raise(qp->context, IBV_EVENT_QP_FATAL, qp);
	rn_qp_fail(qp);
	atomic_store(&qp->is_terminated, true);
	rn_task_post(&qp->task);
}

void rn_iwarp_hang_up(struct rn_qp *qp)
{
	if (likely(!atomic_exchange(&qp->is_terminated, false)))
		return;
	pthread_mutex_lock(&rn_cm_lock);
	rn_wire_disconnect_qp(&qp->ex.qp_base);
	pthread_mutex_unlock(&rn_cm_lock);
}
