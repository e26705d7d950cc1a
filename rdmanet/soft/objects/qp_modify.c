/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modifying and querying queue pairs: what each transition does.  qp_table.c says which exist.
 *
 *     RESET -> INIT   receives may be posted
 *     INIT  -> RTR    the block in the arena is complete: the peer may enter; the link to the
 *                     peer's process starts
 *     RTR   -> RTS    work requests are executed
 *     any   -> ERR    no peer can enter any more; we wait for one that is inside; what is left in
 *                     both queues completes as flushed
 *     any   -> RESET  the same, but silently: completions not yet polled vanish too
 *
 * All values are checked before the first is taken: a call that is refused has changed nothing.
 */
#include "base/gid.h"
#include "objects/ah.h"
#include "objects/sq.h"

static int check_address(const struct ibv_ah_attr *ah)
{
	if (rn_settings.infiniband && !ah->is_global)
		return ah->port_num != 1 ? EINVAL : ah->dlid == RN_LID ? 0 : EHOSTUNREACH;
	if (!ah->is_global || ah->port_num != 1 || !rn_gid_at(ah->grh.sgid_index, NULL, NULL))
		return EINVAL;
	return !rn_settings.is_local || rn_gid_is_ours(&ah->grh.dgid) ? 0 : EHOSTUNREACH;
}

static int check_values(const struct ibv_qp_attr *attr, int mask)
{
	/* Three of them have a meaning here; the others are flags of regions, and are ignored. */
	enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND |
			IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE };

	if ((mask & IBV_QP_PORT && attr->port_num != 1) || (mask & IBV_QP_PKEY_INDEX && attr->pkey_index != 0) ||
	    (mask & IBV_QP_ACCESS_FLAGS && attr->qp_access_flags & ~(unsigned)ACCESS) ||
	    (mask & IBV_QP_PATH_MTU && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096)) ||
	    (mask & IBV_QP_DEST_QPN && attr->dest_qp_num > 0xffffff) ||
	    (mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > RN_MAX_RD_ATOMIC) ||
	    (mask & IBV_QP_MAX_DEST_RD_ATOMIC && attr->max_dest_rd_atomic > RN_MAX_RD_ATOMIC) ||
	    (mask & IBV_QP_TIMEOUT && attr->timeout > 31) || (mask & IBV_QP_RETRY_CNT && attr->retry_cnt > 7) ||
	    (mask & IBV_QP_RNR_RETRY && attr->rnr_retry > 7))
		return EINVAL;
	if (mask & IBV_QP_ALT_PATH || (mask & IBV_QP_PATH_MIG_STATE && attr->path_mig_state != IBV_MIG_MIGRATED))
		return EOPNOTSUPP;
	return mask & IBV_QP_AV ? check_address(&attr->ah_attr) : 0;
}

static void take_values(struct rn_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	struct ibv_qp_attr *to = &qp->attr;

	if (mask & IBV_QP_PKEY_INDEX)
		to->pkey_index = attr->pkey_index;
	if (mask & IBV_QP_PORT)
		to->port_num = attr->port_num;
	if (mask & IBV_QP_ACCESS_FLAGS)
		to->qp_access_flags = attr->qp_access_flags;
	if (mask & IBV_QP_AV)
		to->ah_attr = attr->ah_attr;
	if (mask & IBV_QP_PATH_MTU)
		to->path_mtu = attr->path_mtu;
	if (mask & IBV_QP_DEST_QPN)
		to->dest_qp_num = attr->dest_qp_num;
	if (mask & IBV_QP_RQ_PSN)
		to->rq_psn = attr->rq_psn & 0xffffff;
	if (mask & IBV_QP_SQ_PSN)
		to->sq_psn = attr->sq_psn & 0xffffff;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		to->max_rd_atomic = attr->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		to->max_dest_rd_atomic = attr->max_dest_rd_atomic;
	if (mask & IBV_QP_MIN_RNR_TIMER)
		to->min_rnr_timer = attr->min_rnr_timer & 31; /* the field has five bits; DLSlime gives 32 */
	if (mask & IBV_QP_TIMEOUT)
		to->timeout = attr->timeout;
	if (mask & IBV_QP_RETRY_CNT)
		to->retry_cnt = attr->retry_cnt;
	if (mask & IBV_QP_RNR_RETRY)
		to->rnr_retry = attr->rnr_retry;
	if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)
		to->en_sqd_async_notify = attr->en_sqd_async_notify;
	if (mask & IBV_QP_QKEY)
		to->qkey = attr->qkey;
	atomic_store(&qp->own->qkey, qp->attr.qkey);
	atomic_store(&qp->own->access, qp->attr.qp_access_flags);
	atomic_store(&qp->own->min_rnr_timer, qp->attr.min_rnr_timer);
	rn_own_tell_qp(qp->index);
}

/* A process without a name neither maps others nor is mapped: so both ends take the same path. */
static bool is_nameless(const struct rn_qp *qp)
{
	return rn_settings.transport == RN_TRANSPORT_AUTO && !rn_port_is_mine(qp->attr.dest_qp_num >> 8) &&
	       !rn_port_has_name(qp->ex.qp_base.qp_num >> 8);
}

/* The block is complete before its state says RTR. With sq_lock held. */
static int become_reachable(struct rn_qp *qp)
{
	struct rn_qp_block *own = qp->own;

	if (!qp->ud && (rn_ah_needs_tcp(&qp->attr.ah_attr) || is_nameless(qp))) {
		qp->path->use(qp);
	} else if (!qp->ud) {
		qp->peer = rn_peer_get(qp->attr.dest_qp_num >> 8);
		if (!qp->peer)
			return ENOMEM;
	}
	qp->theirs = qp->ud || (qp->peer && atomic_load(&qp->peer->state) != RN_PEER_SELF) ? qp->block : own;
	atomic_store(&rn_theirs[qp->index], qp->theirs);
	/* A number is valid on one host: no process of this host may be taken for one of another host. */
	atomic_store(&own->dest_qpn, qp->ud || rn_ah_is_ours(&qp->attr.ah_attr) ? qp->attr.dest_qp_num : 0);
	own->pd = rn_qp_pd(qp);
	own->domain = qp->xrc.xrcd ? qp->xrc.xrcd->number : 0;
	own->rq_psn = qp->attr.rq_psn;
	own->rq_offset = qp->rq_offset;
	own->rq_size = qp->rq_size;
	own->rq_stride = qp->rq_stride;
	own->rq_max_sge = qp->cap.max_recv_sge;
	own->rq_eager = qp->rq_eager;
	own->cq = qp->recv_cq->index;
	own->cq_bit = qp->cq_bit;
	own->stamped = qp->recv_cq->stamps != NULL;
	own->max_dest_rd_atomic = qp->attr.max_dest_rd_atomic;
	own->pool = qp->pool ? rn_pool_index(qp->pool) : RN_NO_POOL;
	own->type = qp->ex.qp_base.qp_type;
	rn_own_tell_qp(qp->index);
	rn_qp_plug(qp, rn_fault_link_is_down(&qp->context->injector));
	qp->iwarp.busy_before = atomic_load(&qp->theirs->busy);
	qp->iwarp.done_before = atomic_load(&qp->theirs->done);
	qp->iwarp.is_terminated = false;
	return 0;
}

/* From RTR on, subscribe to the peer's notices. Without locks. */
static void watch_peer(struct rn_qp *qp)
{
	if (qp->path->expect)
		qp->path->expect(qp);
	if (!qp->peer)
		return;
	rn_peer_subscribe(qp->peer, &qp->notice);
	qp->noticed = true;
	if (atomic_load(&qp->peer->state) == RN_PEER_DEAD) {
		rn_lock(&qp->sq_lock);
		qp->link_failed = true;
		rn_unlock(&qp->sq_lock);
	}
}

/* Half-way. It can be tried again from ERR, when the peer has moved on. */
static void fail_reset(struct rn_qp *qp)
{
	rn_lock(&qp->sq_lock);
	atomic_store(&qp->state, IBV_QPS_INIT);
	rn_qp_fail(qp);
	rn_unlock(&qp->sq_lock);
}

static int move(struct rn_qp *qp, enum ibv_qp_state from, enum ibv_qp_state to, const struct ibv_qp_attr *attr, int mask)
{
	int err = 0;

	if (to == IBV_QPS_RESET) {
		err = rn_qp_reset(qp);
		if (err)
			fail_reset(qp);
		return err;
	}
	if (to == IBV_QPS_RTR && (mask & IBV_QP_AV || qp->ud) && (err = qp->path->listen(qp, &attr->ah_attr)))
		return err;
	rn_lock(&qp->sq_lock);
	if (atomic_load(&qp->state) != (int)from) {
		/* It failed while we were checking. */
		err = to == IBV_QPS_ERR ? 0 : EINVAL;
		goto out;
	}
	if (to == IBV_QPS_ERR) {
		rn_qp_fail(qp);
		goto out;
	}
	take_values(qp, attr, mask);
	if (to == IBV_QPS_RTR && (err = become_reachable(qp)))
		goto out;
	if (from == to)
		goto out;
	atomic_store(&qp->state, to);
	rn_qp_tell_state(qp, to);
	if (to == IBV_QPS_SQD && qp->attr.en_sqd_async_notify) {
		/* Drained when started requests are done. */
		if (rn_sq_is_busy(qp))
			qp->draining = true;
		else
			rn_event_raise(qp->context, IBV_EVENT_SQ_DRAINED, qp);
	}
	if (to == IBV_QPS_RTS)
		qp->draining = false;
	if (to == IBV_QPS_RTS && (qp->sq_executed != qp->sq_posted || qp->uses_tcp || qp->link_failed))
		rn_task_post(&qp->task);
out:
	rn_unlock(&qp->sq_lock);
	if (!err && to == IBV_QPS_RTR && from != to)
		watch_peer(qp);
	return err;
}

/* An XRC queue pair is one half. Programs also give attributes of the other half, which the kernel ignores, whatever
 * its table says. */
static int without_other_half(enum ibv_qp_type type, int mask)
{
	if (type == IBV_QPT_XRC_SEND)
		return mask & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (type == IBV_QPT_XRC_RECV)
		return mask & ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
	return mask;
}

RN_EXPORT int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct rn_qp *qp = rn_qp(base)->xrc.real ? rn_qp(base)->xrc.real : rn_qp(base);
	enum ibv_qp_state from, to;
	int err;

	if (rn_is_foreign(base->context))
		return ENODEV;
	rn_qp_process_pending(qp);
	mask = without_other_half(base->qp_type, mask);
	from = atomic_load(&qp->state);
	to = mask & IBV_QP_STATE ? attr->qp_state : from;
	if (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != from)
		return EINVAL;
	if (!rn_qp_may_move(base->qp_type, from, to, mask))
		return EINVAL;
	err = check_values(attr, mask);
	if (!err)
		err = rn_device_check(qp->context, RN_MODIFY_QP);
	if (!err)
		err = move(qp, from, to, attr, mask);
	if (!err)
		base->state = to;
	return err;
}

RN_EXPORT int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct rn_qp *qp = rn_qp(base)->xrc.real ? rn_qp(base)->xrc.real : rn_qp(base);

	(void)mask;
	if (rn_is_foreign(base->context))
		return ENODEV;
	if (rn_context_is_dead(base->context))
		return EIO;
	rn_qp_process_pending(qp);
	rn_lock(&qp->sq_lock);
	*attr = qp->attr;
	attr->qp_state = attr->cur_qp_state = base->state = atomic_load(&qp->state);
	attr->path_mig_state = IBV_MIG_MIGRATED;
	attr->cap = qp->cap;
	attr->sq_draining = qp->draining;
	rn_unlock(&qp->sq_lock);
	if (init)
		*init = (struct ibv_qp_init_attr){
			.qp_context = base->qp_context,
			.send_cq = base->send_cq,
			.recv_cq = base->recv_cq,
			.srq = base->srq,
			.cap = qp->cap,
			.qp_type = base->qp_type,
			.sq_sig_all = qp->sq_sig_all,
		};
	return 0;
}
