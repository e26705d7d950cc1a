/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs: creating and destroying them.  qp_inside.h lists the other files.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/extras.h"
#include "objects/eager.h"
#include "objects/mw.h"
#include "objects/qp_inside.h"
#include "objects/srq.h"
#include "objects/xrc.h"

/* --- creating ------------------------------------------------------------------------------------------------ */

/* An XRC target belongs to a domain, every other queue pair to a PD. */
static struct ibv_context *home_of(const struct ibv_qp_init_attr_ex *init)
{
	return init->qp_type == IBV_QPT_XRC_RECV && init->xrcd ? init->xrcd->context : init->pd->context;
}

/* Does it have receives of its own? */
static bool has_receives(const struct ibv_qp_init_attr_ex *init)
{
	return !init->srq && init->qp_type != IBV_QPT_XRC_SEND && init->qp_type != IBV_QPT_XRC_RECV;
}

static int check_init(const struct ibv_qp_init_attr_ex *init)
{
	const struct ibv_qp_cap *cap = &init->cap;
	const struct ibv_context *context = home_of(init);

	if (rn_is_foreign(context))
		return ENODEV;
	switch (init->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
		if (init->srq && (init->srq->context != context || rn_srq(init->srq)->type != IBV_SRQT_BASIC))
			return EINVAL;
		if (!init->send_cq || !init->recv_cq || init->send_cq->context != context ||
		    init->recv_cq->context != context)
			return EINVAL;
		break;
	case IBV_QPT_XRC_SEND:
		if (!init->send_cq || init->send_cq->context != context || init->srq)
			return EINVAL;
		break;
	case IBV_QPT_XRC_RECV:
		if (init->srq || !init->xrcd)
			return EINVAL;
		break;
	default:
		return EOPNOTSUPP;
	}
	/* What a queue pair does not have is ignored, whatever it says: ibv_create_qp(3). */
	if (has_receives(init) && (cap->max_recv_wr > RN_MAX_QP_WR || cap->max_recv_sge > RN_MAX_SGE))
		return EINVAL;
	if (init->qp_type != IBV_QPT_XRC_RECV && (cap->max_send_wr > RN_MAX_QP_WR || cap->max_send_sge > RN_MAX_SGE ||
						  cap->max_inline_data > RN_MAX_INLINE))
		return EINVAL;
	return 0;
}

enum { SQ_PAGES_BYTES = 8192, SQS_KEPT = 16, SQ_KEPT_BYTES = 65536 };

static uint32_t power_of_two(uint32_t n)
{
	uint32_t size = 1;

	while (size < n)
		size *= 2;
	return size;
}

static uint32_t to_lines(uint64_t bytes)
{
	return (bytes + 63) & ~63u;
}

/* The sizes of the rings; the program is told what they really hold. */
static void plan_rings(struct rn_qp *qp, struct ibv_qp_cap *cap)
{
	uint64_t tail;

	cap->max_send_wr = cap->max_send_wr ? power_of_two(cap->max_send_wr) : 0;
	cap->max_recv_wr = cap->max_recv_wr ? power_of_two(cap->max_recv_wr) : 0;
	if (!cap->max_send_sge)
		cap->max_send_sge = 1;
	/* At least the room of the scatter list: programs that ask for none rely on that. */
	if (cap->max_inline_data < sizeof(struct ibv_sge) * cap->max_send_sge)
		cap->max_inline_data = sizeof(struct ibv_sge) * cap->max_send_sge;
	cap->max_inline_data = to_lines(cap->max_inline_data);
	if (cap->max_recv_sge < 2)
		cap->max_recv_sge = 2; /* they fit into the slot's cache line anyway */
	tail = sizeof(struct ibv_sge) * cap->max_send_sge;
	if (tail < sizeof(struct ibv_sge) + cap->max_inline_data)
		tail = sizeof(struct ibv_sge) + cap->max_inline_data;

	qp->cap = *cap;
	qp->sq_mask = (cap->max_send_wr ? cap->max_send_wr : 1) - 1;
	qp->sq_stride = to_lines(sizeof(struct rn_send) + tail);
	qp->rq_size = cap->max_recv_wr > 2 ? cap->max_recv_wr : 2; /* see struct rn_slot */
	qp->rq_stride = to_lines(sizeof(struct rn_slot) + sizeof(struct rn_slot_sge) * cap->max_recv_sge +
				 (qp->recv_cq->stamps ? sizeof(uint64_t) : 0));
}

static void timer_fired(struct rn_timer *timer)
{
	rn_requester->progress(container_of(timer, struct rn_qp, timer));
}

static void (*terminated)(struct ibv_qp *qp);

void rn_at_qp_terminated(void (*tell)(struct ibv_qp *qp))
{
	terminated = tell;
}

static void task_ran(struct rn_task *task)
{
	struct rn_qp *qp = container_of(task, struct rn_qp, task);

	rn_requester->progress(qp);
	if (unlikely(atomic_exchange(&qp->iwarp.is_terminated, false)) && terminated)
		terminated(&qp->ex.qp_base);
}

/* The first receive's index: no slot of a zeroed ring has it as its owner_sequence. */
static void start_receives(struct rn_qp *qp)
{
	for (uint32_t i = 0; i < qp->rq_size; i++)
		atomic_store_explicit(&rn_rq_slot(qp, i)->owner_sequence, 0, memory_order_relaxed);
	atomic_store(&qp->rq_posted, qp->rq_size);
	atomic_store(&qp->rq_polled, qp->rq_size);
	rn_qp_reset_peers_words(qp, qp->rq_size);
}

/* A queue pair that no program knows: it is on no list. */
static struct rn_cq *make_own_cq(struct rn_context *context)
{
	struct ibv_cq_init_attr_ex attr = {.cqe = 1};
	struct rn_cq *cq = rn_cq_create(&context->verbs.context, &attr, false);

	if (!cq)
		return NULL;
	pthread_mutex_lock(&context->mutex);
	rn_list_del(&cq->link);
	pthread_mutex_unlock(&context->mutex);
	return cq;
}

static size_t sq_bytes(const struct rn_qp *qp)
{
	return (size_t)(qp->sq_mask + 1) * qp->sq_stride;
}

/*
 * A queue of several pages has them from the kernel: those that it does not reach, as most do not, are never there.  To get
 * them and to give them back takes longer than all else that is done for a queue pair, and programs that connect for each
 * request have one size of queue: so some are kept.  The size of one that is kept is at its start.
 */
static size_t *_Atomic kept_sqs[SQS_KEPT];

void rn_qp_forget_sqs(void)
{
	for (unsigned i = 0; i < SQS_KEPT; i++) {
		size_t *pages = atomic_exchange(&kept_sqs[i], NULL);

		if (pages)
			munmap(pages, *pages);
	}
}

static void keep_sq(void *pages, size_t size)
{
	*(size_t *)pages = size;
	for (unsigned i = 0; i < SQS_KEPT && size <= SQ_KEPT_BYTES; i++) {
		size_t *none = NULL;

		if (atomic_compare_exchange_strong(&kept_sqs[i], &none, pages))
			return;
	}
	munmap(pages, size);
}

static void *take_sq(struct rn_qp *qp)
{
	size_t size = sq_bytes(qp), *kept;
	void *pages;

	if (size < SQ_PAGES_BYTES)
		return calloc(1, size);
	for (unsigned i = 0; i < SQS_KEPT && size <= SQ_KEPT_BYTES; i++) {
		kept = atomic_load(&kept_sqs[i]) ? atomic_exchange(&kept_sqs[i], NULL) : NULL;
		if (kept && *kept == size)
			return kept;
		if (kept)
			munmap(kept, *kept); /* sizes have changed */
	}
	pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return pages == MAP_FAILED ? NULL : pages;
}

static void free_sq(struct rn_qp *qp)
{
	if (qp->sq && sq_bytes(qp) >= SQ_PAGES_BYTES)
		keep_sq(qp->sq, sq_bytes(qp));
	else
		free(qp->sq);
}

static void free_rings(struct rn_qp *qp)
{
	if (qp->rq_offset) {
		rn_arena_free(qp->rq_offset, rn_rq_bytes(qp));
		rn_eager_release(qp->rq_size, qp->rq_eager);
	}
	free(qp->rq_lists);
	free(qp->rq_shadow);
	free_sq(qp);
	free(qp->builder);
	if (qp->xrc.own_cq) {
		qp->xrc.own_cq->users = 0;
		ibv_destroy_cq(&qp->xrc.own_cq->cq);
	}
}

/* Create what it sends and receives with. False: no memory, or no room in its completion queue. */
static bool make_rings(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init)
{
	if (rn_qp_pool_open(qp, init) || qp->path->open(qp))
		return false;
	qp->sq = take_sq(qp);
	qp->rq_shadow = calloc(qp->rq_size, sizeof(*qp->rq_shadow));
	qp->rq_eager = qp->pool || !init->cap.max_recv_wr ? 0 : rn_eager_reserve(qp->rq_size);
	qp->rq_offset = rn_arena_alloc(rn_rq_bytes(qp));
	if (!qp->rq_offset)
		rn_eager_release(qp->rq_size, qp->rq_eager);
	if (!qp->sq || !qp->rq_shadow || !qp->rq_offset)
		return false;
	qp->is_attached = !rn_cq_attach(qp->recv_cq, qp, &qp->cq_bit);
	return qp->is_attached;
}

/* Free a queue pair that has no number yet, as far as it was made. */
static void discard(struct rn_qp *qp)
{
	if (qp->is_attached)
		rn_cq_detach(qp->recv_cq, qp);
	rn_qp_pool_close(qp);
	free_rings(qp);
	free(qp);
}

/* Give it a place in the table, a number and a block. With the context's mutex held. False: there are no more. */
static bool take_number(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init)
{
	bool is_target = init->qp_type == IBV_QPT_XRC_RECV;
	struct ibv_qp *base = &qp->ex.qp_base;

	pthread_mutex_lock(&rn_process_lock);
	qp->index = rn_qp_number_take();
	if (qp->index == RN_QPS_MAX) {
		pthread_mutex_unlock(&rn_process_lock);
		return false;
	}
	qp->generation = rn_qp_next_generation(qp->index);
	qp->block = rn_arena_qp(rn_arena, qp->index);
	qp->own = rn_own_qp(qp->index);
	qp->theirs = qp->own;
	atomic_store(&rn_theirs[qp->index], qp->theirs);
	*base = (struct ibv_qp){
		.context = &qp->context->verbs.context,
		.qp_context = init->qp_context,
		.pd = is_target ? NULL : init->pd,
		.send_cq = is_target ? NULL : init->send_cq,
		.recv_cq = is_target ? NULL : init->recv_cq,
		.srq = init->srq,
		.handle = qp->index,
		.qp_num = rn_own_port(qp->index / 256) << 8 | qp->index % 256,
		.state = IBV_QPS_RESET,
		.qp_type = init->qp_type,
	};
	pthread_mutex_init(&base->mutex, NULL);
	pthread_cond_init(&base->cond, NULL);
	atomic_store(&qp->own->qpn, base->qp_num);
	atomic_store(&qp->own->dest_qpn, 0);
	rn_own_tell_qp(qp->index);
	rn_own_tell_head(); /* peers find it by its port, which must be right even if it was scribbled over */
	qp->arrivals = (struct rn_arrivals){.finished = &qp->block->finished};
	start_receives(qp);
	rn_qp_tell_state(qp, IBV_QPS_RESET);
	rn_qps_add(qp);
	pthread_mutex_unlock(&rn_process_lock);
	return true;
}

/* Count its parents as used. With the context's mutex held. */
static void count_users(struct rn_qp *qp, const struct ibv_qp_init_attr_ex *init)
{
	if (qp->ex.qp_base.pd)
		rn_pd(qp->ex.qp_base.pd)->users++;
	if (init->qp_type == IBV_QPT_XRC_RECV) {
		qp->xrc.xrcd = rn_xrcd(init->xrcd);
		qp->xrc.xrcd->users++;
	}
	qp->send_cq->users++;
	qp->recv_cq->users++;
	if (init->srq)
		rn_srq(init->srq)->users++;
}

struct rn_qp *rn_qp_create(struct ibv_qp_init_attr_ex *init)
{
	bool is_target = init->qp_type == IBV_QPT_XRC_RECV;
	struct rn_context *context = rn_context(home_of(init));
	struct rn_qp *qp;

	errno = check_init(init);
	if (!errno)
		errno = rn_settings.iwarp && init->qp_type != IBV_QPT_RC ? EOPNOTSUPP
									 : rn_device_check(context, RN_CREATE_QP);
	if (!errno)
		errno = rn_context_engine(context);
	if (errno)
		return NULL;
	qp = aligned_alloc(alignof(struct rn_qp), sizeof(*qp));
	if (!qp)
		return NULL;
	memset(qp, 0, sizeof(*qp));
	if (!has_receives(init))
		init->cap.max_recv_wr = init->cap.max_recv_sge = 0; /* the SRQ's own count, or there is none */
	if (is_target)
		init->cap.max_send_wr = init->cap.max_send_sge = init->cap.max_inline_data = 0;
	if (is_target && !(qp->xrc.own_cq = make_own_cq(context))) {
		free(qp);
		return NULL;
	}
	qp->context = context;
	qp->send_cq = is_target ? qp->xrc.own_cq : rn_cq(init->send_cq);
	qp->recv_cq = is_target ? qp->xrc.own_cq : init->recv_cq ? rn_cq(init->recv_cq) : qp->send_cq;
	qp->sq_sig_all = init->sq_sig_all;
	qp->unreliable = init->qp_type == IBV_QPT_UC || init->qp_type == IBV_QPT_UD;
	qp->path = rn_path_of(init->qp_type);
	qp->timer.fire = timer_fired;
	qp->task.run = task_ran;
	qp->help.task.run = rn_requester->help;
	qp->notice.run = rn_qp_peer_noticed;
	plan_rings(qp, &init->cap);

	if (!make_rings(qp, init))
		goto no_memory;
	pthread_mutex_lock(&context->mutex);
	if (!take_number(qp, init)) {
		pthread_mutex_unlock(&context->mutex);
		goto no_memory;
	}
	count_users(qp, init);
	rn_qp_take_faults(qp);
	rn_list_add(&context->qps, &qp->link);
	pthread_mutex_unlock(&context->mutex);
	return qp;

no_memory:
	discard(qp);
	errno = ENOMEM;
	return NULL;
}

RN_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex ex = {
		.qp_context = init->qp_context,
		.send_cq = init->send_cq,
		.recv_cq = init->recv_cq,
		.srq = init->srq,
		.cap = init->cap,
		.qp_type = init->qp_type,
		.sq_sig_all = init->sq_sig_all,
		.pd = pd,
	};
	struct rn_qp *qp = rn_qp_create(&ex);

	if (!qp)
		return NULL;
	init->cap = ex.cap;
	return &qp->ex.qp_base;
}

/* --- destroying --------------------------------------------------------------------------------------------- */

RN_EXPORT int ibv_destroy_qp(struct ibv_qp *base)
{
	struct rn_context *context = rn_context(base->context);
	struct rn_qp *qp = rn_qp(base);
	struct rn_counters count;
	struct rn_qp *orphan;
	int err;

	if (rn_is_foreign(base->context))
		return 0;
	if (unlikely(base->qp_type == IBV_QPT_XRC_RECV) && rn_xrc_close_handle(qp, &orphan)) {
		if (orphan)
			ibv_destroy_qp(&orphan->ex.qp_base);
		return 0;
	}
	if (qp->path->is_in_use && qp->path->is_in_use(qp))
		return EBUSY;
	err = rn_qp_reset(qp);
	rn_mw_forget_qp(base->qp_num);
	pthread_mutex_lock(&rn_process_lock);
	if (err)
		rn_qp_put_aside(qp);
	else
		rn_qp_number_give_back(qp->index);
	rn_qps_remove(qp);
	pthread_mutex_unlock(&rn_process_lock);
	if (err) {
		rn_cq_purge(qp->send_cq, qp);
		rn_cq_purge(qp->recv_cq, qp);
		rn_qp_pool_discard(qp);
	}
	rn_cq_detach(qp->recv_cq, qp);
	rn_event_forget(context, base, &qp->async_reported, &base->events_completed, &base->mutex, &base->cond);

	pthread_mutex_lock(&context->mutex);
	rn_list_del(&qp->link);
	rdmanet_soft_qp_counters(base, &count);
	rn_counters_add(&context->retired, &count);
	if (base->pd)
		rn_pd(base->pd)->users--;
	if (qp->xrc.xrcd)
		qp->xrc.xrcd->users--;
	qp->send_cq->users--;
	qp->recv_cq->users--;
	if (base->srq)
		rn_srq(base->srq)->users--;
	pthread_mutex_unlock(&context->mutex);
	rn_qp_pool_close(qp);
	free_rings(qp);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	free(qp);
	return 0;
}

void rn_qp_destroy_all(struct rn_context *context)
{
	struct rn_qp *handle;

	while ((handle = rn_xrc_handle_of(context)))
		ibv_destroy_qp(&handle->ex.qp_base);
	while (!rn_list_empty(&context->qps)) {
		struct rn_qp *qp = container_of(context->qps.next, struct rn_qp, link);

		if (qp->path->detach)
			qp->path->detach(qp);
		qp->ex.qp_base.events_completed = qp->async_reported;
		ibv_destroy_qp(&qp->ex.qp_base);
	}
}

void rn_qp_forked(void)
{
	rn_qps_forked();
	rn_qp_number_forked();
}
