/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checking the arena's copy of our own words.  shm/own.h has the theory.
 *
 * A look holds rn_process_lock, so queue pairs, CQs and pools stay, and for each of them the lock under which it changes.  Of
 * objects that may number thousands (queue pairs, receives) it checks some at a time, or it would keep a large server
 * busy.  But if one word is wrong others will be, so then all are checked.
 */
#include "base/log.h"
#include "objects/cq_inside.h"
#include "objects/own_look.h"
#include "objects/qp_inside.h"
#include "objects/srq.h"

enum { QPS_PER_LOOK = 1024 };

/* --- looking ------------------------------------------------------------------------------------------------- */

static unsigned tell_qps(bool all)
{
	static uint32_t next;
	uint32_t end = rn_qps_end;
	unsigned differed = 0;

	for (uint32_t looked = 0; looked < end && (looked < QPS_PER_LOOK || all || differed); looked++) {
		struct rn_qp *qp;

		next = next < end ? next : 0;
		qp = rn_qps[next++];
		if (!qp)
			continue;
		rn_lock(&qp->sq_lock);
		differed += rn_own_tell_qp(qp->index);
		rn_unlock(&qp->sq_lock);
	}
	return differed;
}

void rn_own_look(bool all)
{
	unsigned differed = 0;

	pthread_mutex_lock(&rn_process_lock);
	if (rn_arena && rn_guarded(RN_GUARD_OWN_FACTS)) {
		differed = rn_own_tell_head() + rn_own_tell_regions();
		differed += tell_qps(all || differed);
		differed += rn_pool_look_after_all(all || differed);
		differed += rn_cq_look_after_all(all || differed);
		rn_srq_process_pending_all();
	}
	pthread_mutex_unlock(&rn_process_lock);
	if (differed)
		rn_warn(RN_WARN_ARENA,
			"a process of this user overwrote %u words of the arena that only we may write: restored", differed);
}

void rn_own_watch(void)
{
	rn_own_watch_by(rn_own_look);
}
