/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of a queue pair's block: its state, as peers see it, and whether one of them is inside.
 *
 * A peer enters by making `busy` odd, and reads `generation_state` after that.  So who has changed that word waits for
 * those that had entered before.  A peer may be stopped in there: each wait has an end.
 */
#include "base/fence.h"
#include "objects/qp_inside.h"

void rn_qp_tell_state(struct rn_qp *qp, enum ibv_qp_state state)
{
	uint64_t generation_state = (uint64_t)qp->generation << 8 | state;

	atomic_store(&qp->own->generation_state, generation_state);
	atomic_store(&qp->block->generation_state, generation_state);
	rn_fence();
}

/* --- waiting for those inside ----------------------------------------------------------------------------- */

bool rn_qp_is_inside(struct rn_qp_block *block, struct rn_peer *peer)
{
	return atomic_load(&block->busy) & 1 && !(peer && atomic_load(&peer->state) == RN_PEER_DEAD);
}

static bool wait_for(struct rn_qp *qp, uint64_t deadline_ns, bool moved_will_do)
{
	bool self = qp->peer && atomic_load(&qp->peer->state) == RN_PEER_SELF;
	uint32_t seen = atomic_load(&qp->theirs->busy);

	while (rn_qp_is_inside(qp->theirs, qp->peer)) {
		if (atomic_load_explicit(&qp->peer_gone, memory_order_relaxed) ||
		    (moved_will_do && atomic_load(&qp->theirs->busy) != seen))
			return true;
		/* A thread of this process can't be stopped without us: it will be done soon. */
		if (!self && rn_now_ns() >= deadline_ns)
			return false;
		sched_yield();
	}
	return true;
}

bool rn_qp_wait_idle(struct rn_qp *qp, uint64_t deadline_ns)
{
	return wait_for(qp, deadline_ns, false);
}

bool rn_qp_wait_moved(struct rn_qp *qp, uint64_t deadline_ns)
{
	return wait_for(qp, deadline_ns, true);
}

void rn_qp_reset_words(struct rn_qp_block *block, uint32_t next_receive)
{
	atomic_store(&block->done, next_receive);
	atomic_store(&block->busy, (atomic_load(&block->busy) + 3) & ~1u);
	atomic_store(&block->fault, RN_FAULT_NONE);
	atomic_store(&block->established, 0);
	atomic_store(&block->finished, 0);
}

void rn_qp_reset_peers_words(struct rn_qp *qp, uint32_t next_receive)
{
	rn_qp_reset_words(qp->block, next_receive);
	if (qp->own != qp->block)
		rn_qp_reset_words(qp->own, next_receive);
}
