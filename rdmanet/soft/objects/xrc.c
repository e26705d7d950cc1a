/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extended reliable connections: one connection to a whole process, whichever of its SRQs is meant.
 *
 *     XRC_SEND queue pair ---- request, with the SRQ's number ----> XRC_RECV queue pair (target)
 *                                                                      |  any of the domain's SRQs
 *                                                                   SRQ: its pool, its PD, its CQ
 *
 * A target has neither PD nor CQ.  Each request finds its SRQ by number: the pool that it takes receives from, the PD
 * that its keys count in, and the CQ where it completes.  So receives complete by SRQ here, not by queue pair, and the
 * list of finished ones is in the pool's block.  The CQ polls queue pairs only, so each such SRQ has a poll source: a
 * struct rn_qp that is no queue pair and has only what the CQ polls.
 *
 * A number is the index of the pool and a count, so an old one is unknown.  A domain belongs to
 * one process: two processes can't share one, as the queue pairs of each are in its own arena.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "objects/qp.h"
#include "objects/srq.h"
#include "objects/xrc.h"

enum { COUNT_BITS = 12 };

/* Domains by file; with rn_process_lock held. */
struct domain {
	uint32_t number;
	dev_t device;
	ino_t inode;
	unsigned users;
	struct domain *next;
};
static struct domain *domains;
static uint32_t last_domain;

/* Taken inside the send lock, outside of a CQ's. */
static struct rn_lock xrc_lock;
static struct rn_srq *xrc_srqs;
static uint32_t last_count;

static struct rn_qp *handles; /* with rn_process_lock held */

/* --- domains ------------------------------------------------------------------------------------------------ */

/* With rn_process_lock held. 0, or errno. */
static int find_domain(const struct ibv_xrcd_init_attr *attr, uint32_t *number)
{
	struct domain *domain;
	struct stat st;

	if (attr->fd == -1) {
		*number = ++last_domain;
		return attr->oflags & O_CREAT ? 0 : EINVAL;
	}
	if (fstat(attr->fd, &st))
		return EBADF;
	for (domain = domains; domain; domain = domain->next)
		if (domain->device == st.st_dev && domain->inode == st.st_ino)
			break;
	if (domain && attr->oflags & O_EXCL)
		return EINVAL;
	if (!domain && !(attr->oflags & O_CREAT))
		return EAGAIN;
	if (!domain) {
		domain = malloc(sizeof(*domain));
		if (!domain)
			return ENOMEM;
		*domain = (struct domain){
			.number = ++last_domain, .device = st.st_dev, .inode = st.st_ino, .next = domains};
		domains = domain;
	}
	domain->users++;
	*number = domain->number;
	return 0;
}

static void leave_domain(uint32_t number)
{
	for (struct domain **at = &domains; *at; at = &(*at)->next) {
		struct domain *domain = *at;

		if (domain->number != number)
			continue;
		if (!--domain->users) {
			*at = domain->next;
			free(domain);
		}
		return;
	}
}

struct ibv_xrcd *rn_open_xrcd(struct ibv_context *ibv_context, struct ibv_xrcd_init_attr *attr)
{
	enum { BOTH = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS };
	struct rn_context *context = rn_context(ibv_context);
	struct rn_xrcd *xrcd;

	errno = rn_is_foreign(ibv_context)            ? ENODEV
		: (attr->comp_mask & BOTH) != BOTH    ? EINVAL
		: attr->comp_mask & ~(uint32_t)BOTH   ? EINVAL
						      : rn_device_check(context, RN_OPEN_XRCD);
	xrcd = errno ? NULL : calloc(1, sizeof(*xrcd));
	if (!xrcd)
		return NULL;
	xrcd->xrcd.context = ibv_context;
	pthread_mutex_lock(&rn_process_lock);
	errno = find_domain(attr, &xrcd->number);
	pthread_mutex_unlock(&rn_process_lock);
	if (errno) {
		free(xrcd);
		return NULL;
	}
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->xrcds, &xrcd->link);
	pthread_mutex_unlock(&context->mutex);
	return &xrcd->xrcd;
}

int rn_close_xrcd(struct ibv_xrcd *ibv_xrcd)
{
	struct rn_context *context = rn_context(ibv_xrcd->context);
	struct rn_xrcd *xrcd = rn_xrcd(ibv_xrcd);

	if (rn_is_foreign(ibv_xrcd->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (xrcd->users) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&xrcd->link);
	pthread_mutex_unlock(&context->mutex);
	pthread_mutex_lock(&rn_process_lock);
	leave_domain(xrcd->number);
	pthread_mutex_unlock(&rn_process_lock);
	free(xrcd);
	return 0;
}

/* --- SRQs of a domain ----------------------------------------------------------------------------------------- */

int rn_xrc_register_srq(struct rn_srq *srq, struct ibv_xrcd *xrcd, struct ibv_cq *cq)
{
	struct rn_context *context = rn_context(srq->srq.context);
	struct rn_pool_block *block = rn_pool_block(srq->pool);
	struct rn_qp *poll_source = aligned_alloc(alignof(struct rn_qp), sizeof(*poll_source));
	uint32_t bit;

	if (!poll_source)
		return ENOMEM;
	memset(poll_source, 0, sizeof(*poll_source));
	poll_source->xrc.is_poll_source = true;
	poll_source->pool = srq->pool;
	poll_source->arrivals.finished = &block->finished;
	poll_source->recv_cq = rn_cq(cq);
	if (rn_cq_attach(rn_cq(cq), poll_source, &bit)) {
		free(poll_source);
		return ENOMEM;
	}
	poll_source->cq_bit = bit;
	srq->poll_source = poll_source;
	srq->xrcd = rn_xrcd(xrcd);
	pthread_mutex_lock(&context->mutex);
	srq->xrcd->users++;
	rn_cq(cq)->users++;
	pthread_mutex_unlock(&context->mutex);

	rn_lock(&xrc_lock);
	last_count = (last_count + 1) % ((1 << COUNT_BITS) - 1);
	srq->number = (last_count + 1) << COUNT_BITS | rn_pool_index(srq->pool);
	srq->next_xrc = xrc_srqs;
	xrc_srqs = srq;
	rn_unlock(&xrc_lock);
	/* Last: from here on it can be found. */
	rn_pool_set_number(srq->pool, srq->number, srq->xrcd->number, rn_cq(cq)->index, bit);
	return 0;
}

void rn_xrc_release_srq(struct rn_srq *srq)
{
	struct rn_context *context = rn_context(srq->srq.context);
	struct rn_srq **at;

	if (!srq->poll_source)
		return;
	rn_pool_set_number(srq->pool, 0, 0, 0, 0);
	rn_lock(&xrc_lock);
	for (at = &xrc_srqs; *at != srq;)
		at = &(*at)->next_xrc;
	*at = srq->next_xrc;
	rn_unlock(&xrc_lock);
	rn_cq_detach(srq->poll_source->recv_cq, srq->poll_source);
	rn_lock(&srq->poll_source->recv_cq->lock);
	rn_pool_discard(srq->pool, &srq->poll_source->arrivals);
	rn_unlock(&srq->poll_source->recv_cq->lock);
	pthread_mutex_lock(&context->mutex);
	srq->xrcd->users--;
	srq->poll_source->recv_cq->users--;
	pthread_mutex_unlock(&context->mutex);
	free(srq->poll_source);
}

int rn_get_srq_num(struct ibv_srq *srq, uint32_t *number)
{
	if (rn_srq(srq)->type != IBV_SRQT_XRC)
		return EINVAL;
	*number = rn_srq(srq)->number;
	return 0;
}

void rn_xrc_sweep(uint32_t name)
{
	rn_lock(&xrc_lock);
	for (struct rn_srq *srq = xrc_srqs; srq; srq = srq->next_xrc) {
		rn_lock(&srq->poll_source->recv_cq->lock);
		rn_pool_sweep(srq->pool, &srq->poll_source->arrivals, name);
		rn_unlock(&srq->poll_source->recv_cq->lock);
	}
	rn_unlock(&xrc_lock);
}

/* --- sharing a target ------------------------------------------------------------------------------------------ */

struct ibv_qp *rn_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr)
{
	enum { NEEDED = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE };
	struct rn_qp *handle, *real;

	errno = rn_is_foreign(context) ? ENODEV
		: (attr->comp_mask & NEEDED) != NEEDED || attr->qp_type != IBV_QPT_XRC_RECV ? EINVAL
											   : 0;
	if (!errno)
		errno = rn_device_check(rn_context(context), RN_CREATE_QP);
	handle = errno ? NULL : aligned_alloc(alignof(struct rn_qp), sizeof(*handle));
	if (!handle)
		return NULL;
	memset(handle, 0, sizeof(*handle));
	pthread_mutex_lock(&rn_process_lock);
	real = rn_qp_by_number(attr->qp_num);
	if (real && (!real->xrc.xrcd || real->ex.qp_base.context != context || real->xrc.xrcd->number != rn_xrcd(attr->xrcd)->number))
		real = NULL;
	if (real) {
		real->xrc.handles++;
		handle->xrc.real = real;
		handle->next_ready = handles;
		handles = handle;
	}
	pthread_mutex_unlock(&rn_process_lock);
	if (!real) {
		free(handle);
		errno = EINVAL;
		return NULL;
	}
	handle->ex.qp_base = (struct ibv_qp){
		.context = context,
		.qp_context = attr->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT ? attr->qp_context : NULL,
		.handle = real->index,
		.qp_num = attr->qp_num,
		.state = atomic_load(&real->state),
		.qp_type = IBV_QPT_XRC_RECV,
	};
	pthread_mutex_init(&handle->ex.qp_base.mutex, NULL);
	pthread_cond_init(&handle->ex.qp_base.cond, NULL);
	return &handle->ex.qp_base;
}

/* The target lives until all its handles are closed. */
bool rn_xrc_close_handle(struct rn_qp *qp, struct rn_qp **orphan)
{
	struct rn_qp *real = qp->xrc.real;
	struct rn_qp **at;

	*orphan = NULL;
	pthread_mutex_lock(&rn_process_lock);
	if (!real) {
		bool shared = qp->xrc.handles;

		qp->xrc.is_orphan = shared;
		pthread_mutex_unlock(&rn_process_lock);
		return shared;
	}
	for (at = &handles; *at != qp;)
		at = &(*at)->next_ready;
	*at = qp->next_ready;
	if (!--real->xrc.handles && real->xrc.is_orphan)
		*orphan = real;
	pthread_mutex_unlock(&rn_process_lock);
	pthread_mutex_destroy(&qp->ex.qp_base.mutex);
	pthread_cond_destroy(&qp->ex.qp_base.cond);
	free(qp);
	return true;
}

struct rn_qp *rn_xrc_handle_of(struct rn_context *context)
{
	struct rn_qp *handle;

	pthread_mutex_lock(&rn_process_lock);
	for (handle = handles; handle && rn_context(handle->ex.qp_base.context) != context;)
		handle = handle->next_ready;
	pthread_mutex_unlock(&rn_process_lock);
	return handle;
}

/* --- the end ---------------------------------------------------------------------------------------------------- */

void rn_xrc_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->xrcds)) {
		struct rn_xrcd *xrcd = container_of(context->xrcds.next, struct rn_xrcd, link);

		xrcd->users = 0;
		rn_close_xrcd(&xrcd->xrcd);
	}
}

void rn_xrc_forked(void)
{
	xrc_lock = (struct rn_lock){0};
	xrc_srqs = NULL;
	domains = NULL;
	handles = NULL;
}
