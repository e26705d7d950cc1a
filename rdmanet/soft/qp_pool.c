/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs whose receives come from a pool: an SRQ's, which is shared, or a UD queue pair's own.
 *
 * Of a connected one its peer is the only claimer for it, known by `busy` to be inside or not; what it
 * has claimed is recovered when it is out, or dead.  Of UD anybody may be inside, known by the claims
 * themselves: to be waited for are those that were there when life changed, since whoever claims
 * later sees the change.
 */
#include <stdlib.h>

#include "soft.h"
#include "srq.h"
#include "ud.h"
#include "xrc.h"

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

	return qp->xrcd || rn_qp_pd(qp) == pd || (srq && rn_pd(srq->pd)->number == pd);
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
	return init->qp_type == IBV_QPT_UD ? rn_ud_open(qp) : 0;
}

void rn_qp_pool_close(struct rn_qp *qp)
{
	if (is_own(qp))
		rn_pool_close(qp->pool);
	qp->pool = NULL;
	if (qp->ud)
		rn_ud_close(qp);
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
		rn_cq_kick(qp->recv_cq, qp);
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

/* Nobody is inside, or it has died there: what it had claimed goes back. */
void rn_qp_pool_recover(struct rn_qp *qp)
{
	if (qp->xrcd) {
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

/* Who came before life changed has gone? UD's; of others `busy` tells. */
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

/* Silently: what has arrived and was not polled. */
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

/* A process that may have sent to any UD queue pair has died. With rn_world held. */
void rn_qp_pool_process_died(int pid)
{
	uint32_t name = rn_name_of_process(pid);

	for (uint32_t i = 0; i < rn_qps_end; i++) {
		struct rn_qp *qp = rn_qps[i];

		if (!qp || !qp->ud)
			continue;
		rn_lock(&qp->recv_cq->lock);
		rn_pool_sweep(qp->pool, &qp->arrivals, name);
		rn_unlock(&qp->recv_cq->lock);
		rn_cq_kick(qp->recv_cq, qp); /* it may have died before it could tell of what it had finished */
	}
	rn_pool_recover(name);
}
