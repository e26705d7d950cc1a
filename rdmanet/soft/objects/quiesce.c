/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting until nobody uses a key any more.  quiesce.h has the theory. */
#include "objects/quiesce.h"

#include <sched.h>
#include <time.h>

#include "base/fence.h"
#include "objects/qp.h"

_Atomic uint32_t rn_serving[RN_SERVINGS];

/* --- regions ------------------------------------------------------------------------------------------------- */

/* The engine has done with the piece that it copies for a peer, if it is doing that. */
static bool wait_for_help(uint64_t deadline_ns)
{
	uint32_t seen = atomic_load(&rn_serving[RN_SERVING_ENGINE]);

	while (seen & 1 && !rn_engine_inside() && atomic_load(&rn_serving[RN_SERVING_ENGINE]) == seen) {
		if (rn_now_ns() >= deadline_ns)
			return false;
		sched_yield();
	}
	return true;
}

/* Our engine, which nobody stops without us, has more time than peers. */
static bool wait_for_domain(uint32_t pd, uint64_t deadline_ns, uint64_t engine_deadline_ns)
{
	bool quiet = !rn_qp_is_quarantined(pd) && !rn_pool_is_quarantined(pd) && rn_pools_wait_moved(pd, deadline_ns);

	rn_for_each_qp(qp) {
		if (!rn_qp_uses_pd(qp, pd))
			continue;
		/* Our own posters first: locking and unlocking waits out whoever was inside. */
		rn_lock(&qp->sq_lock);
		rn_share_stop_withdrawn(&qp->responder); /* its owner writes into our memory */
		rn_unlock(&qp->sq_lock);
		quiet &= rn_qp_wait_moved(qp, deadline_ns);
	}
	return wait_for_help(engine_deadline_ns) && quiet;
}

bool rn_quiesce_region(uint32_t pd)
{
	uint64_t now = rn_now_ns();

	rn_fence();
	return wait_for_domain(pd, now + RN_IDLE_WAIT_NS, now + RN_QUIESCE_WINDOW_MS * 1000000ull);
}

bool rn_is_quiet(uint32_t pd)
{
	return wait_for_domain(pd, 0, 0);
}

/* --- windows ------------------------------------------------------------------------------------------------- */

enum {
	BEGIN_NS = 50 * 1000,       /* most are done before this: no need to ask what they are doing */
	AGAIN_NS = 10 * 1000 * 1000, /* ask again */
	NAP_NS = 200 * 1000,
};
enum { NO_PEER = RN_QPS_MAX };

/* The odd value of `busy` at which the peer of each queue pair was waited for in vain. */
static _Atomic uint32_t in_vain[RN_QPS_MAX];

/* What is the process doing that is inside this queue pair? Without waiting: the caller may have any lock. */
static enum rn_life life_of_peer(uint32_t index)
{
	enum rn_life life = RN_LIFE_UNKNOWN;
	struct rn_peer *peer;
	int state, pid = 0;

	if (pthread_mutex_trylock(&rn_process_lock)) /* with it peers stay */
		return RN_LIFE_UNKNOWN;
	peer = rn_qps[index] ? rn_qps[index]->peer : NULL;
	state = peer ? atomic_load(&peer->state) : RN_PEER_CONNECTING;
	if (state == RN_PEER_DEAD)
		life = RN_LIFE_OVER;
	else if (state == RN_PEER_READY)
		pid = peer->pid;
	pthread_mutex_unlock(&rn_process_lock);
	return pid ? rn_process_life(pid) : life;
}

/* This word, the `busy` of that queue pair or another, has moved on from an odd value, if it had one, or does so in
 * time; or nobody is left to move it. No one who is stopped is waited for, nor twice for the same piece of a copy. */
static bool wait_moved(_Atomic uint32_t *word, uint32_t index, uint64_t *deadline_ns)
{
	uint32_t seen = atomic_load(word);
	uint64_t now, ask_ns, nap_ns;
	bool again;

	if (!(seen & 1))
		return true;
	again = index != NO_PEER && atomic_load(&in_vain[index]) == seen;
	now = rn_now_ns();
	ask_ns = again ? now : now + BEGIN_NS;
	nap_ns = now + BEGIN_NS;
	if (!*deadline_ns)
		*deadline_ns = now + RN_QUIESCE_WINDOW_MS * 1000000ull;
	for (; atomic_load(word) == seen; now = rn_now_ns()) {
		enum rn_life life = RN_LIFE_UNKNOWN;

		if (index != NO_PEER && now >= ask_ns) {
			life = life_of_peer(index);
			ask_ns = now + AGAIN_NS;
		}
		if (life == RN_LIFE_OVER)
			return true;
		if (life == RN_LIFE_STOPPED || again || now >= *deadline_ns) {
			if (index != NO_PEER)
				atomic_store(&in_vain[index], seen);
			return false;
		}
		if (now < nap_ns)
			sched_yield();
		else
			nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
	}
	return true;
}

static bool wait_for_engine(uint64_t *deadline_ns)
{
	return rn_engine_inside() || wait_moved(&rn_serving[RN_SERVING_ENGINE], NO_PEER, deadline_ns);
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
		quiet &= wait_moved(&theirs->busy, i, &deadline_ns);
		if (!qp || qp->index != i)
			quiet &= wait_moved(&rn_serving[i], NO_PEER, &deadline_ns);
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
	bool self = qp->peer && atomic_load(&qp->peer->state) == RN_PEER_SELF;
	uint64_t deadline_ns = 0;
	bool quiet;

	rn_fence();
	if (self) /* a thread of this process can't be stopped without us: however long it takes */
		quiet = rn_qp_wait_moved(qp, UINT64_MAX);
	else
		quiet = wait_moved(&qp->theirs->busy, qp->index, &deadline_ns);
	return wait_for_engine(&deadline_ns) && quiet;
}

/* --- the end ------------------------------------------------------------------------------------------------- */

void rn_quiesce_forked(void)
{
	for (uint32_t i = 0; i < RN_SERVINGS; i++)
		if (atomic_load(&rn_serving[i])) /* reading costs no page */
			atomic_store(&rn_serving[i], 0);
}
