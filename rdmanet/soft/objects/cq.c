/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completion queues: their life, the sends that finish into them, the queue pairs that they look at.
 *
 * A CQ has two kinds of source.  Sends of this process finish into a private ring of the CQ, the
 * size the user asked for: overrunning it loses completions, raises CQ_ERR and ends the CQ.
 * Receives finish in place, in the receive ring of their queue pair, written by the peer
 * (`publish` in responder/responder.c); all that the peer does to the CQ is to set the QP's bit in
 * the CQ's block.  poll_cq collects those bits into a list of ready queue pairs and takes from
 * them in turns.  So nothing that a peer does can overrun a CQ, and a stopped peer delays nobody.
 *
 * cq_event.c describes how a sleeping program is woken, cq_poll.c how completions are taken.
 */
#include <stdlib.h>

#include "base/log.h"
#include "objects/cq_inside.h"

/* --- creating and destroying ------------------------------------------------------------------------- */

/* The process's CQs by block; with rn_process_lock held. */
static struct rn_cq *cqs[RN_CQS_MAX];

/* Give it a block, by which it is found: everything else must be ready. */
static bool block_take(struct rn_cq *cq)
{
	struct rn_channel *channel = (struct rn_channel *)cq->cq.channel;
	const uint32_t not_armed = ~(uint32_t)RN_ARMED_KIND;
	static uint32_t next;
	bool found = false;

	pthread_mutex_lock(&rn_process_lock);
	for (unsigned tried = 0; tried < RN_CQS_MAX && !found; tried++) {
		uint32_t index = next++ % RN_CQS_MAX;

		if (!cqs[index]) {
			found = true;
			cq->index = cq->cq.handle = index;
			cq->block = rn_arena_cq(rn_arena, index);
			cq->armed = atomic_fetch_and(&cq->block->armed, not_armed) & not_armed;
			atomic_store(&rn_own_cqs[index].channel, channel ? channel->id : RN_NO_CHANNEL);
			atomic_store(&rn_own_cqs[index].hold, 0);
			rn_cq_tell(cq);
			cqs[index] = cq;
		}
	}
	pthread_mutex_unlock(&rn_process_lock);
	if (!found)
		rn_warn(RN_WARN_LIMIT,
			"no completion queue: this process already has %u, the embedded device's limit (max_cq)",
			(unsigned)RN_CQS_MAX);
	return found;
}

static void block_give_back(struct rn_cq *cq)
{
	pthread_mutex_lock(&rn_process_lock);
	cqs[cq->index] = NULL;
	pthread_mutex_unlock(&rn_process_lock);
}

static void fall(struct rn_task *task);

static void free_cq(struct rn_cq *cq)
{
	free(cq->stamps);
	free(cq->ring);
	free(cq);
}

struct rn_cq *rn_cq_create(struct ibv_context *ibv_context, const struct ibv_cq_init_attr_ex *attr, bool stamped)
{
	struct rn_context *context = rn_context(ibv_context);
	struct ibv_comp_channel *channel = attr->channel;
	struct rn_cq *cq;
	uint32_t size = 1;

	errno = rn_is_foreign(ibv_context)                          ? ENODEV
		: attr->cqe < 1 || attr->cqe > RN_MAX_CQE           ? EINVAL
		: attr->comp_vector >= (uint32_t)ibv_context->num_comp_vectors ? EINVAL
		: channel && channel->context != ibv_context        ? EINVAL
								    : rn_device_check(context, RN_CREATE_CQ);
	if (errno)
		return NULL;
	while (size < attr->cqe)
		size *= 2;
	cq = calloc(1, sizeof(*cq));
	if (!cq)
		return NULL;
	cq->ring = calloc(size, sizeof(*cq->ring));
	cq->stamps = stamped ? calloc(size, sizeof(*cq->stamps)) : NULL;
	cq->size = size;
	cq->fall.run = fall;
	cq->timer.fire = rn_cq_held_too_long;
	cq->ready_tail = &cq->ready;
	rn_list_init(&cq->tcp_qps);
	cq->cq.context = ibv_context;
	cq->cq.channel = channel;
	cq->cq.cq_context = attr->cq_context;
	cq->cq.cqe = size;
	if (!cq->ring || (stamped && !cq->stamps) || !block_take(cq)) {
		free_cq(cq);
		errno = ENOMEM;
		return NULL;
	}
	pthread_mutex_init(&cq->cq.mutex, NULL);
	pthread_cond_init(&cq->cq.cond, NULL);

	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->cqs, &cq->link);
	if (channel) {
		struct rn_channel *its = (struct rn_channel *)channel;

		channel->refcnt++;
		rn_lock(&its->lock);
		rn_list_add(&its->cqs, &cq->channel_link);
		rn_unlock(&its->lock);
	}
	pthread_mutex_unlock(&context->mutex);
	return cq;
}

RN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				       struct ibv_comp_channel *channel, int comp_vector)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = cqe > 0 ? cqe : 0,
		.cq_context = cq_context,
		.channel = channel,
		.comp_vector = comp_vector,
	};
	struct rn_cq *cq = rn_cq_create(context, &attr, false);

	return cq ? &cq->cq : NULL;
}

RN_EXPORT int ibv_resize_cq(struct ibv_cq *ibv_cq, int cqe)
{
	struct rn_cq *cq = rn_cq(ibv_cq);
	uint64_t *stamps = NULL;
	struct rn_cqe *ring;
	uint32_t size = 1, count = 0;

	if (rn_is_foreign(ibv_cq->context))
		return ENODEV;
	if (rn_context_is_dead(ibv_cq->context))
		return EIO;
	if (cqe < 1 || cqe > RN_MAX_CQE)
		return EINVAL;
	while (size < (uint32_t)cqe)
		size *= 2;
	ring = calloc(size, sizeof(*ring));
	if (cq->stamps)
		stamps = calloc(size, sizeof(*stamps));
	if (!ring || (cq->stamps && !stamps)) {
		free(stamps);
		free(ring);
		return ENOMEM;
	}
	rn_lock(&cq->lock);
	if (cq->tail - cq->head > size) {
		rn_unlock(&cq->lock);
		free(stamps);
		free(ring);
		return EINVAL; /* its contents must fit */
	}
	for (uint32_t at = cq->head; at != cq->tail; at++) {
		if (stamps)
			stamps[count] = cq->stamps[at & (cq->size - 1)];
		ring[count++] = cq->ring[at & (cq->size - 1)];
	}
	free(cq->ring);
	free(cq->stamps);
	cq->stamps = stamps;
	cq->ring = ring;
	cq->size = size;
	cq->head = 0;
	cq->tail = count;
	ibv_cq->cqe = size;
	rn_unlock(&cq->lock);
	return 0;
}

RN_EXPORT int ibv_destroy_cq(struct ibv_cq *ibv_cq)
{
	struct rn_context *context = rn_context(ibv_cq->context);
	struct rn_cq *cq = rn_cq(ibv_cq);
	uint32_t reported;

	if (rn_is_foreign(ibv_cq->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (cq->users) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&cq->link);
	reported = rn_cq_leave_channel(cq);
	pthread_mutex_unlock(&context->mutex);

	/* Events that the program has got must be acknowledged before the memory that they point to is freed. */
	pthread_mutex_lock(&ibv_cq->mutex);
	while (ibv_cq->comp_events_completed != reported)
		pthread_cond_wait(&ibv_cq->cond, &ibv_cq->mutex);
	pthread_mutex_unlock(&ibv_cq->mutex);
	rn_event_forget(context, ibv_cq, &cq->async_reported, &ibv_cq->async_events_completed, &ibv_cq->mutex,
			&ibv_cq->cond);

	rn_task_cancel(&cq->fall);
	rn_timer_cancel(&cq->timer); /* it has left its channel, so nothing sets the timer again */
	block_give_back(cq);
	pthread_mutex_destroy(&ibv_cq->mutex);
	pthread_cond_destroy(&ibv_cq->cond);
	free_cq(cq);
	return 0;
}

/* --- queue pairs of a CQ ------------------------------------------------------------------------------- */

int rn_cq_attach(struct rn_cq *cq, struct rn_qp *qp, uint32_t *bit)
{
	int err = ENOMEM;

	rn_lock(&cq->lock);
	/* The lowest free one, so that few queue pairs stay within the block's first line. */
	for (uint32_t i = 0; i < RN_CQ_QPS_MAX && err; i++) {
		if (!cq->attached[i]) {
			cq->attached[i] = qp;
			if (cq->attached_end <= i)
				cq->attached_end = i + 1;
			*bit = i;
			err = 0;
		}
	}
	rn_unlock(&cq->lock);
	if (err)
		rn_warn(RN_WARN_LIMIT, "no queue pair: %u already receive into its completion queue, which is the limit",
			(unsigned)RN_CQ_QPS_MAX);
	return err;
}

/* With the lock held: forget this QP. */
static void forget_receives(struct rn_cq *cq, struct rn_qp *qp)
{
	for (struct rn_qp **at = &cq->ready; *at; at = &(*at)->next_ready) {
		if (*at != qp)
			continue;
		*at = qp->next_ready;
		if (!*at)
			cq->ready_tail = at;
		break;
	}
	qp->is_ready = false;
}

void rn_cq_detach(struct rn_cq *cq, struct rn_qp *qp)
{
	rn_lock(&cq->lock);
	forget_receives(cq, qp);
	cq->attached[qp->cq_bit] = NULL;
	rn_unlock(&cq->lock);
}

void rn_cq_purge(struct rn_cq *cq, struct rn_qp *qp)
{
	uint32_t to;

	rn_lock(&cq->lock);
	to = cq->head;
	for (uint32_t at = cq->head; at != cq->tail; at++) {
		struct rn_cqe *cqe = &cq->ring[at & (cq->size - 1)];

		if (cqe->qp == qp)
			continue;
		if (cq->stamps)
			cq->stamps[to & (cq->size - 1)] = cq->stamps[at & (cq->size - 1)];
		cq->ring[to++ & (cq->size - 1)] = *cqe;
	}
	cq->tail = to;
	if (cq == qp->recv_cq)
		forget_receives(cq, qp);
	rn_unlock(&cq->lock);
}

static void (*at_overrun)(struct rn_cq *);

void rn_cq_at_overrun(void (*tell)(struct rn_cq *))
{
	at_overrun = tell;
}

/* On the engine, because the pusher holds a lock. */
static void fall(struct rn_task *task)
{
	at_overrun(container_of(task, struct rn_cq, fall));
}

void rn_cq_report_overrun(struct rn_cq *cq)
{
	rn_event_raise(rn_context(cq->cq.context), IBV_EVENT_CQ_ERR, &cq->cq);
	rn_task_post(&cq->fall);
}

void rn_cq_push(struct rn_cq *cq, const struct rn_cqe *cqe)
{
	bool overrun = false;

	rn_lock(&cq->lock);
	if (unlikely(cq->stamps))
		cq->stamps[cq->tail & (cq->size - 1)] = rn_now_ns();
	if (likely(cq->tail - cq->head < cq->size && !cq->overrun)) {
		cq->ring[cq->tail++ & (cq->size - 1)] = *cqe;
	} else if (cq->may_overrun) {
		cq->head++; /* the oldest is lost */
		cq->ring[cq->tail++ & (cq->size - 1)] = *cqe;
	} else {
		overrun = !cq->overrun;
		cq->overrun = true;
	}
	/* Armed under this lock, hence before this push or after it. */
	if (unlikely(atomic_load_explicit(&cq->block->armed, memory_order_relaxed) & RN_ARMED_KIND) &&
	    rn_cq_notify(cq->block, NULL, cqe->status != IBV_WC_SUCCESS, 1)) {
		cqe->qp->count.wakeups++;
		cqe->qp->count.syscalls++;
	}
	rn_unlock(&cq->lock);
	if (unlikely(overrun))
		rn_cq_report_overrun(cq);
}

void rn_cq_mark_ready(struct rn_cq *cq, struct rn_qp *qp)
{
	rn_lock(&cq->lock);
	rn_cq_make_ready(cq, qp);
	rn_cq_notify(cq->block, NULL, true, 1);
	rn_unlock(&cq->lock);
}

void rn_cq_recover(void)
{
	for (uint32_t i = 0; i < RN_CQS_MAX; i++) {
		struct rn_cq *cq = cqs[i];

		if (!cq)
			continue;
		rn_lock(&cq->lock);
		if (rn_cq_has_completions(cq))
			rn_cq_notify(cq->block, NULL, true, RN_CQ_ENOUGH);
		rn_unlock(&cq->lock);
	}
}

unsigned rn_cq_look_after_all(bool all)
{
	unsigned wrong = 0;

	for (uint32_t i = 0; i < RN_CQS_MAX; i++)
		if (cqs[i])
			wrong += rn_cq_look_after(cqs[i], all || wrong);
	return wrong;
}

void rn_cq_process_pending_all(void)
{
	pthread_mutex_lock(&rn_process_lock);
	for (uint32_t i = 0; i < RN_CQS_MAX; i++)
		if (cqs[i] && cqs[i]->cq.channel)
			rn_cq_process_pending(cqs[i]);
	pthread_mutex_unlock(&rn_process_lock);
}

/* --- the end -------------------------------------------------------------------------------------------- */

void rn_cq_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->cqs)) {
		struct rn_cq *cq = container_of(context->cqs.next, struct rn_cq, link);

		cq->cq.comp_events_completed = cq->events_reported;
		cq->cq.async_events_completed = cq->async_reported;
		ibv_destroy_cq(&cq->cq);
	}
	rn_channel_destroy_all(context);
}

void rn_cq_forked(void)
{
	memset(cqs, 0, sizeof(cqs));
	rn_channel_forked();
}
