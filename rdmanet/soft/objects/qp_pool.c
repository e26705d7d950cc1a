/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs whose receives come from a pool: an SRQ's, which is shared, or a UD queue pair's own.
 *
 * Only the peer of a connected queue pair claims for it, and `busy` tells whether it is inside; what it has claimed is
 * recovered when it is out, or dead.  Any process may send to a UD queue pair, and the claims themselves tell which
 * are inside: we wait for the claims made before generation_state changed; later claimers see the change.
 */
#include <stdlib.h>

#include "objects/srq.h"
#include "objects/xrc.h"

static bool is_own(const struct rn_qp *qp)
{
	return qp->pool && !qp->ex.qp_base.srq;
}

static uint32_t name_of(const struct rn_qp *qp)
{
	return rn_name_of_qp(qp->index, qp->generation);
}

bool rn_qp_uses_pd(const struct rn_qp *qp, uint32_t pd)
{
	const struct ibv_srq *srq = qp->ex.qp_base.srq;

	return qp->xrc.xrcd || rn_qp_pd(qp) == pd || (srq && rn_pd(srq->pd)->number == pd);
}

int rn_qp_pool_open(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init)
{
	if (init->srq)
		qp->pool = rn_srq(init->srq)->pool;
	else if (init->qp_type == IBV_QPT_UD)
		qp->pool = rn_pool_open(init->cap.max_recv_wr, init->cap.max_recv_sge, rn_pd(init->pd)->number, true);
	else
		return 0;
	if (!qp->pool)
		return ENOMEM;
	return 0;
}

void rn_qp_pool_close(struct rn_qp *qp)
{
	if (is_own(qp))
		rn_pool_close(qp->pool);
	qp->pool = NULL;
	if (qp->path->free)
		qp->path->free(qp);
}

/* --- posting to a UD queue pair's own ------------------------------------------------------------------------- */

static void flush(struct rn_qp *qp)
{
	bool has_arrivals;

	rn_lock(&qp->recv_cq->lock);
	rn_pool_flush(qp->pool, &qp->arrivals);
	has_arrivals = qp->arrivals.first;
	rn_unlock(&qp->recv_cq->lock);
	if (has_arrivals)
		rn_cq_mark_ready(qp->recv_cq, qp);
}

int rn_qp_pool_post(struct rn_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	int err = EINVAL;

	*bad_wr = wr;
	if (is_own(qp) && atomic_load_explicit(&qp->state, memory_order_acquire) != IBV_QPS_RESET)
		err = rn_pool_post(qp->pool, wr, bad_wr);
	/* rn_qp_fail changes the state, then flushes: either it finds these, or we do. */
	if (is_own(qp) && unlikely(atomic_load(&qp->state) == IBV_QPS_ERR))
		flush(qp);
	return err;
}

/* --- ERR, RESET and deaths ------------------------------------------------------------------------------------- */

/* No peer is inside, or it has died there: take back what it had claimed. */
void rn_qp_pool_recover(struct rn_qp *qp)
{
	if (qp->xrc.xrcd) {
		rn_xrc_sweep(name_of(qp));
		rn_pool_recover(name_of(qp));
	}
	if (!qp->pool || qp->ud)
		return;
	rn_lock(&qp->recv_cq->lock);
	rn_pool_sweep(qp->pool, &qp->arrivals, name_of(qp));
	rn_unlock(&qp->recv_cq->lock);
	rn_pool_recover(name_of(qp));
}

/* Have the claimers from before the change of generation_state gone? For UD; for others `busy` tells. */
bool rn_qp_pool_wait(struct rn_qp *qp, uint64_t deadline_ns)
{
	return !qp->ud || rn_pool_wait_moved(qp->pool, deadline_ns);
}

void rn_qp_pool_fail(struct rn_qp *qp)
{
	if (is_own(qp))
		flush(qp);
	/* Receives of an SRQ are not flushed: others use them. */
	else if (qp->pool)
		rn_event_raise(qp->context, IBV_EVENT_QP_LAST_WQE_REACHED, qp);
}

/* Drop silently what has arrived and was not polled. */
void rn_qp_pool_discard(struct rn_qp *qp)
{
	if (!qp->pool)
		return;
	rn_lock(&qp->recv_cq->lock);
	if (is_own(qp))
		rn_pool_clear(qp->pool, &qp->arrivals);
	else
		rn_pool_discard(qp->pool, &qp->arrivals);
	rn_unlock(&qp->recv_cq->lock);
}

/* A process that may have sent to any UD queue pair has died. With rn_process_lock held. */
void rn_qp_pool_process_died(int pid)
{
	uint32_t name = rn_name_of_process(pid);

	rn_for_each_qp(qp) {
		if (!qp->ud)
			continue;
		rn_lock(&qp->recv_cq->lock);
		rn_pool_sweep(qp->pool, &qp->arrivals, name);
		rn_unlock(&qp->recv_cq->lock);
		rn_cq_mark_ready(qp->recv_cq, qp); /* it may have died before it could announce what it had finished */
	}
	rn_pool_recover(name);
}
