/* SPDX-License-Identifier: Apache-2.0 */
/* The send queue's head: how requests end, in order. */
#include "objects/eager.h"
#include "objects/sq.h"

static const uint8_t wc_opcodes[] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_SEND] = IBV_WC_SEND,
	[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
	[IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
	[IBV_WR_SEND_WITH_INV] = IBV_WC_SEND,
};

/* The request at sq_executed is done, with or without success. */
void rn_sq_complete(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status, uint32_t byte_len)
{
	uint32_t end = ++qp->sq_executed;

	qp->wait = RN_WAIT_NOT;
	qp->waited = false;
	qp->rnr_tried = 0;
	if (!(wr->send_flags & IBV_SEND_SIGNALED) && !qp->sq_sig_all && status == IBV_WC_SUCCESS)
		return;
	rn_cq_push(qp->send_cq, &(struct rn_cqe){
					.wr_id = wr->wr_id,
					.qp = qp,
					.sq_freed = end,
					.byte_len = byte_len,
					.status = status,
					.opcode = wc_opcodes[wr->opcode],
				});
}

bool rn_sq_is_busy(const struct rn_qp *qp)
{
	return qp->reply_pending || rn_sq_has_begun(qp) || (qp->uses_tcp && qp->path->in_flight(qp));
}

void rn_sq_flush(struct rn_qp *qp)
{
	while (qp->sq_executed != qp->sq_posted)
		rn_sq_complete(qp, &rn_sq_at(qp, qp->sq_executed)->wr, IBV_WC_WR_FLUSH_ERR, 0);
}
