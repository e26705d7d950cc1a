/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared receive queues: the programs' view of a pool of receives (shm/pool.h).
 *
 * The limit.  A program that wants to know when receives run low arms a limit; when fewer are left,
 * there is one event, and the limit is zero again.  A sender that takes a receive sees that few are left and
 * wakes the owner's engine; the owner looks for itself, so a wakeup that comes twice, or not at all because
 * its sender has died, does no harm.  Arming a limit that is reached already raises the event at once.
 *
 * The number left is the distance of the pool's tail from its head, which is exact except while
 * receives of stopped or dead claimers lie in between.
 */
#include <stdlib.h>

#include "base/fence.h"
#include "objects/srq.h"
#include "objects/xrc.h"
#include "shm/pool.h"

/* All of the process; with rn_process_lock held, which also guards their limits. */
static struct rn_srq *srqs;

/* --- the limit ------------------------------------------------------------------------------------------ */

/* With rn_process_lock held. */
static void attend(struct rn_srq *srq)
{
	if (!srq->limit || rn_pool_left(srq->pool) >= srq->limit)
		return;
	srq->limit = 0;
	rn_pool_set_limit(srq->pool, 0);
	rn_event_raise(rn_context(srq->srq.context), IBV_EVENT_SRQ_LIMIT_REACHED, &srq->srq);
}

void rn_srq_process_pending_all(void)
{
	for (struct rn_srq *srq = srqs; srq; srq = srq->next)
		attend(srq);
}

static void arm(struct rn_srq *srq, uint32_t limit)
{
	srq->limit = limit;
	rn_pool_set_limit(srq->pool, limit);
	attend(srq);
}

/* --- creating and destroying -------------------------------------------------------------------------------- */

static int check_init(struct ibv_pd *pd, const struct ibv_srq_attr *attr)
{
	if (rn_is_foreign(pd->context))
		return ENODEV;
	if (!attr->max_wr || attr->max_wr > RN_MAX_QP_WR || attr->max_sge > RN_MAX_SGE)
		return EINVAL;
	return 0;
}

struct rn_srq *rn_srq_create(struct ibv_pd *pd, void *srq_context, struct ibv_srq_attr *attr)
{
	struct rn_context *context = rn_context(pd->context);
	struct rn_srq *srq;

	errno = check_init(pd, attr);
	if (!errno)
		errno = rn_device_check(context, RN_CREATE_SRQ);
	if (errno)
		return NULL;
	srq = calloc(1, sizeof(*srq));
	if (!srq)
		return NULL;
	if (attr->max_sge < 2)
		attr->max_sge = 2; /* they fit into the entry's line anyway */
	srq->max_sge = attr->max_sge;
	srq->pool = rn_pool_open(attr->max_wr, attr->max_sge, rn_pd(pd)->number, false);
	if (!srq->pool) {
		free(srq);
		errno = ENOMEM;
		return NULL;
	}
	srq->type = IBV_SRQT_BASIC;
	srq->srq.context = pd->context;
	srq->srq.srq_context = srq_context;
	srq->srq.pd = pd;
	srq->srq.handle = rn_pool_index(srq->pool);
	pthread_mutex_init(&srq->srq.mutex, NULL);
	pthread_cond_init(&srq->srq.cond, NULL);
	pthread_mutex_lock(&context->mutex);
	rn_pd(pd)->users++;
	rn_list_add(&context->srqs, &srq->link);
	pthread_mutex_unlock(&context->mutex);
	pthread_mutex_lock(&rn_process_lock);
	srq->next = srqs;
	srqs = srq;
	pthread_mutex_unlock(&rn_process_lock);
	return srq;
}

RN_EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct rn_srq *srq = rn_srq_create(pd, init->srq_context, &init->attr);

	return srq ? &srq->srq : NULL;
}

/* Those of a PD alone, which is all that a basic one needs, go to ibv_create_srq before they come here. */
struct ibv_srq *rn_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *init)
{
	enum { XRC = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };
	enum ibv_srq_type type = init->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? init->srq_type : IBV_SRQT_BASIC;
	/* A basic one's programs say a CQ too (UCX), and adapters disregard it: it is for tags and XRC. */
	uint32_t known = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE | (type == IBV_SRQT_XRC ? XRC : IBV_SRQ_INIT_ATTR_CQ);
	struct rn_srq *srq;
	int err;

	errno = type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC                                       ? EOPNOTSUPP
		: !(init->comp_mask & IBV_SRQ_INIT_ATTR_PD) || init->pd->context != context           ? EINVAL
		: init->comp_mask & ~known                                                            ? EINVAL
		: type == IBV_SRQT_XRC && ((init->comp_mask & XRC) != XRC || init->cq->context != context) ? EINVAL
												      : 0;
	srq = errno ? NULL : rn_srq_create(init->pd, init->srq_context, &init->attr);
	if (!srq || type == IBV_SRQT_BASIC)
		return srq ? &srq->srq : NULL;
	srq->type = IBV_SRQT_XRC;
	err = rn_xrc_register_srq(srq, init->xrcd, init->cq);
	if (err) {
		ibv_destroy_srq(&srq->srq);
		errno = err;
		return NULL;
	}
	return &srq->srq;
}

RN_EXPORT int ibv_modify_srq(struct ibv_srq *ibv_srq, struct ibv_srq_attr *attr, int mask)
{
	struct rn_srq *srq = rn_srq(ibv_srq);
	uint32_t max_wr;
	int err = 0;

	if (rn_is_foreign(ibv_srq->context))
		return ENODEV;
	if (rn_context_is_dead(ibv_srq->context))
		return EIO;
	if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		return EINVAL;
	max_wr = mask & IBV_SRQ_MAX_WR ? attr->max_wr : rn_pool_max_wr(srq->pool);
	if (!max_wr || max_wr > RN_MAX_QP_WR || (mask & IBV_SRQ_LIMIT && attr->srq_limit > max_wr))
		return EINVAL;
	if (mask & IBV_SRQ_MAX_WR)
		err = rn_pool_resize(srq->pool, max_wr);
	if (!err && mask & IBV_SRQ_LIMIT) {
		pthread_mutex_lock(&rn_process_lock);
		arm(srq, attr->srq_limit);
		pthread_mutex_unlock(&rn_process_lock);
	}
	return err;
}

RN_EXPORT int ibv_query_srq(struct ibv_srq *ibv_srq, struct ibv_srq_attr *attr)
{
	struct rn_srq *srq = rn_srq(ibv_srq);

	if (rn_is_foreign(ibv_srq->context))
		return ENODEV;
	if (rn_context_is_dead(ibv_srq->context))
		return EIO;
	pthread_mutex_lock(&rn_process_lock);
	attend(srq);
	*attr = (struct ibv_srq_attr){
		.max_wr = rn_pool_max_wr(srq->pool),
		.max_sge = srq->max_sge,
		.srq_limit = srq->limit,
	};
	pthread_mutex_unlock(&rn_process_lock);
	return 0;
}

RN_EXPORT int ibv_destroy_srq(struct ibv_srq *ibv_srq)
{
	struct rn_context *context = rn_context(ibv_srq->context);
	struct rn_srq *srq = rn_srq(ibv_srq), **at;

	if (rn_is_foreign(ibv_srq->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (srq->users) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&srq->link);
	pthread_mutex_unlock(&context->mutex);

	pthread_mutex_lock(&rn_process_lock);
	for (at = &srqs; *at != srq;)
		at = &(*at)->next;
	*at = srq->next;
	pthread_mutex_unlock(&rn_process_lock);
	rn_xrc_release_srq(srq);
	rn_pool_close(srq->pool);
	rn_event_forget(context, ibv_srq, &srq->async_reported, &ibv_srq->events_completed, &ibv_srq->mutex,
			&ibv_srq->cond);
	pthread_mutex_lock(&context->mutex);
	rn_pd(ibv_srq->pd)->users--;
	pthread_mutex_unlock(&context->mutex);
	pthread_mutex_destroy(&ibv_srq->mutex);
	pthread_cond_destroy(&ibv_srq->cond);
	free(srq);
	return 0;
}

void rn_srq_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->srqs)) {
		struct rn_srq *srq = container_of(context->srqs.next, struct rn_srq, link);

		srq->srq.events_completed = srq->async_reported;
		ibv_destroy_srq(&srq->srq);
	}
}

void rn_srq_forked(void)
{
	srqs = NULL;
	rn_xrc_forked();
	rn_pool_forked();
}

/* --- posting -------------------------------------------------------------------------------------------------- */

int rn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	if (unlikely(rn_is_foreign(srq->context))) {
		*bad_wr = wr;
		return ENODEV;
	}
	rn_order_by_peer();
	return rn_pool_post(rn_srq(srq)->pool, wr, bad_wr);
}
