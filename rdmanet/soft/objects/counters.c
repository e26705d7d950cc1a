/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the counters and the numbers of live objects.  If a queue pair works meanwhile, each figure is consistent in
 * itself, but they may not belong to the same instant.
 */
#include "objects/eager.h"

void rn_counters_add(struct rn_counters *sum, const struct rn_counters *more)
{
	const uint64_t *from = (const uint64_t *)more;
	uint64_t *to = (uint64_t *)sum;

	for (size_t i = 0; i < sizeof(*sum) / sizeof(*to); i++)
		to[i] += from[i];
}

/* The three places a queue pair counts in, one for each of its locks. */
static void collect(struct rn_qp *qp, struct rn_counters *counters)
{
	rn_lock(&qp->sq_lock);
	*counters = qp->count;
	rn_unlock(&qp->sq_lock);
	counters->recv_wrs += qp->recv_wrs;
	counters->completions += qp->completions;
	counters->failed += qp->faults.failed;
}

RN_EXPORT int rdmanet_soft_qp_counters(struct ibv_qp *qp, struct rn_counters *counters)
{
	if (rn_is_foreign(qp->context))
		return ENODEV;
	collect(rn_qp(qp), counters);
	return 0;
}

static void collect_context(struct rn_context *context, struct rn_counters *counters)
{
	pthread_mutex_lock(&context->mutex);
	*counters = context->retired;
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_counters one;

		collect(container_of(at, struct rn_qp, link), &one);
		rn_counters_add(counters, &one);
	}
	pthread_mutex_unlock(&context->mutex);
}

RN_EXPORT int rdmanet_soft_counters(struct ibv_context *context, struct rn_counters *counters)
{
	if (rn_is_foreign(context))
		return ENODEV;
	collect_context(rn_context(context), counters);
	return 0;
}

void rn_context_sum(struct rn_counters *sum)
{
	*sum = (struct rn_counters){0};
	pthread_mutex_lock(&rn_contexts_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next) {
		struct rn_counters one;

		collect_context(container_of(at, struct rn_context, link), &one);
		rn_counters_add(sum, &one);
	}
	pthread_mutex_unlock(&rn_contexts_lock);
}

RN_EXPORT uint32_t rdmanet_soft_quarantined(void)
{
	uint32_t count;

	pthread_mutex_lock(&rn_process_lock);
	rn_qp_reap();
	rn_mr_reap();
	count = rn_qp_count_quarantined() + rn_mr_count_quarantined() + rn_pool_count_quarantined();
	pthread_mutex_unlock(&rn_process_lock);
	return count;
}
