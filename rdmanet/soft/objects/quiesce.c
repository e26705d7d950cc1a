/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting until nobody uses a key any more.  quiesce.h has the theory. */
#include "objects/quiesce.h"

#include <sched.h>

#include "base/fence.h"
#include "objects/qp.h"

_Atomic uint32_t rn_serving[RN_SERVINGS];

/* --- regions ------------------------------------------------------------------------------------------------- */

static bool wait_for_domain(uint32_t pd, uint64_t deadline_ns)
{
	bool quiet = !rn_qp_is_quarantined(pd) && !rn_pool_is_quarantined(pd) && rn_pools_wait_moved(pd, deadline_ns);

	rn_for_each_qp(qp) {
		if (!rn_qp_uses_pd(qp, pd))
			continue;
		/* Our own posters first: locking and unlocking waits out whoever was inside. */
		rn_lock(&qp->sq_lock);
		rn_unlock(&qp->sq_lock);
		quiet &= rn_qp_wait_moved(qp, deadline_ns);
	}
	return quiet;
}

bool rn_quiesce_region(uint32_t pd)
{
	rn_fence();
	return wait_for_domain(pd, rn_now_ns() + RN_IDLE_WAIT_NS);
}

bool rn_is_quiet(uint32_t pd)
{
	return wait_for_domain(pd, 0);
}

/* --- windows ------------------------------------------------------------------------------------------------- */

/* This word has moved on from an odd value, if it had one, or does so in time. */
static bool wait_moved(_Atomic uint32_t *word, uint64_t *deadline_ns)
{
	uint32_t seen = atomic_load(word);

	if (!(seen & 1))
		return true;
	if (!*deadline_ns)
		*deadline_ns = rn_now_ns() + RN_QUIESCE_WINDOW_MS * 1000000ull;
	while (atomic_load(word) == seen) {
		if (rn_now_ns() >= *deadline_ns)
			return false;
		sched_yield();
	}
	return true;
}

static bool wait_for_engine(uint64_t *deadline_ns)
{
	return rn_engine_inside() || wait_moved(&rn_serving[RN_SERVING_ENGINE], deadline_ns);
}

static bool wait_for_peers(uint32_t pd, uint32_t first, uint32_t end, const struct rn_qp *qp)
{
	uint64_t deadline_ns = 0;
	bool quiet = true;

	rn_fence();
	for (uint32_t i = first; i < end; i++) {
		struct rn_qp_block *theirs = atomic_load(&rn_theirs[i]);

		if (!theirs || READ_ONCE(rn_own_qp(i)->pd) != pd)
			continue;
		quiet &= wait_moved(&theirs->busy, &deadline_ns);
		if (!qp || qp->index != i)
			quiet &= wait_moved(&rn_serving[i], &deadline_ns);
	}
	return wait_for_engine(&deadline_ns) && quiet;
}

bool rn_quiesce_window(uint32_t pd, const struct rn_qp *qp)
{
	return wait_for_peers(pd, 0, rn_qps_end, qp);
}

bool rn_quiesce_window_of_number(uint32_t pd, uint32_t qpn)
{
	uint32_t index = rn_own_locate(qpn);

	return wait_for_peers(pd, index, index < RN_QPS_MAX ? index + 1 : rn_qps_end, NULL);
}

bool rn_quiesce_window_of(struct rn_qp *qp)
{
	uint64_t deadline_ns = 0;
	bool quiet;

	rn_fence();
	quiet = !(atomic_load(&qp->theirs->busy) & 1) ||
		rn_qp_wait_moved(qp, rn_now_ns() + RN_QUIESCE_WINDOW_MS * 1000000ull);
	return wait_for_engine(&deadline_ns) && quiet;
}

/* --- the end ------------------------------------------------------------------------------------------------- */

void rn_quiesce_forked(void)
{
	for (uint32_t i = 0; i < RN_SERVINGS; i++)
		if (atomic_load(&rn_serving[i])) /* reading costs no page */
			atomic_store(&rn_serving[i], 0);
}
