/* SPDX-License-Identifier: Apache-2.0 */
/* The send queue's head: how requests end, in order. */
#pragma once

#include "objects/qp.h"

/* The request at sq_executed is done, with or without success. */
void rn_sq_complete(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status, uint32_t byte_len);
/* The head of the queue is being executed: it is finished even in SQD. */
static inline bool rn_sq_has_begun(const struct rn_qp *qp)
{
	const struct rn_send *head = rn_sq_at(qp, qp->sq_executed);

	return qp->sq_executed != qp->sq_posted && (head->has_begun || head->moved || head->plan.is_done);
}
/* Is anything under way, so that the queue is not drained yet? With sq_lock held. */
bool rn_sq_is_busy(const struct rn_qp *qp);
/* Flush what is queued. With sq_lock held. */
void rn_sq_flush(struct rn_qp *qp);
/* The head of the queue fails with this status: completes it in error, QP to ERR. sq_lock held. qp_state.c */
void rn_sq_fail_head(struct rn_qp *qp, enum ibv_wc_status status);
