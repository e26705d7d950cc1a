/* SPDX-License-Identifier: Apache-2.0 */
/* The send queue's head: how requests end, in order. */
#ifndef RDMANET_SOFT_SQ_H
#define RDMANET_SOFT_SQ_H

#include "objects/qp.h"

/* The request at sq_executed is done, with or without success. */
void rn_sq_complete(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status, uint32_t byte_len);
/* Flush what is queued. With sq_lock held. */
void rn_sq_flush(struct rn_qp *qp);
/* The head of the queue fails with this status: completes it in error, QP to ERR. sq_lock held. */
void rn_sq_fail_head(struct rn_qp *qp, enum ibv_wc_status status);

#endif
