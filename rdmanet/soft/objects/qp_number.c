/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of queue pairs, and the slots of the arena that they stand for.
 *
 * A number is port << 8 | slot: the port says which process, so number and GID together are a full
 * address, final when ibv_create_qp returns.  The first queue pair binds a port, each further
 * 256 another one.  Slots are used in turn, so a number is reused late.
 *
 * A queue pair may be destroyed while its peer is stopped in the middle of a request: then slot and
 * ring are quarantined until the peer has moved on, or died.  rn_qp_reap checks.
 */
#include <stdlib.h>

#include "base/log.h"
#include "objects/eager.h"
#include "objects/qp_inside.h"

/* All of these with rn_process_lock held. */
static uint32_t generations[RN_QPS_MAX]; /* of each slot, counted on through its users */
static bool slots_taken[RN_QPS_MAX];
static bool slots_abandoned[RN_QPS_MAX]; /* a peer was stopped inside, and may still be: `busy` tells */
static uint32_t next_slot, num_ports;

/* The slot and ring of a destroyed queue pair in which a peer was stopped. */
struct quarantined {
	struct rn_qp_block *block; /* with its peer's words */
	uint32_t index, pd, rq_pd, name, pool; /* pool: of UD */
	bool any_pd;                           /* of an XRC target */
	uint64_t rq_offset, rq_bytes;
	uint32_t rq_size, rq_eager;
	struct rn_peer *peer;
	struct quarantined *next;
};
static struct quarantined *quarantine;

/* --- numbers -------------------------------------------------------------------------------------------- */

uint32_t rn_qp_number_take(void)
{
	uint32_t end = num_ports * 256;
	uint16_t port;

	rn_qp_reap();
	for (uint32_t tried = 0; tried < end; tried++) {
		uint32_t index = next_slot++ % end;

		slots_abandoned[index] &= atomic_load(&rn_arena_qp(rn_arena, index)->busy) & 1;
		if (!slots_taken[index] && !slots_abandoned[index]) {
			slots_taken[index] = true;
			return index;
		}
	}
	if (num_ports == RN_PORTS_MAX) {
		rn_warn(RN_WARN_LIMIT, "no queue pair: this process already has %u, the embedded device's limit (max_qp)",
			(unsigned)RN_QPS_MAX);
		return RN_QPS_MAX;
	}
	port = rn_port_bind();
	if (!port) {
		rn_warn(RN_WARN_LIMIT,
			"no queue pair: found no TCP port from 32768 to 60999 for the next 256 queue pairs: %s",
			strerror(errno));
		return RN_QPS_MAX;
	}
	atomic_store(&rn_own_ports[num_ports], port);
	atomic_store(&rn_arena_head(rn_arena)->ports[num_ports++], port);
	slots_taken[end] = true;
	next_slot = end + 1;
	return end;
}

void rn_qp_number_give_back(uint32_t index)
{
	slots_taken[index] = false;
}

uint32_t rn_qp_next_generation(uint32_t index)
{
	return ++generations[index];
}

/* --- putting aside ---------------------------------------------------------------------------------------- */

void rn_qp_put_aside(struct rn_qp *qp)
{
	struct quarantined *aside = malloc(sizeof(*aside));

	slots_abandoned[qp->index] = qp->theirs == qp->block;
	if (!aside)
		goto out; /* lost for good, which is safe */
	*aside = (struct quarantined){
		.block = qp->theirs,
		.index = qp->index,
		.pd = rn_qp_pd(qp),
		.rq_pd = rn_qp_rq_pd(qp),
		.any_pd = qp->xrc.xrcd,
		.name = rn_name_of_qp(qp->index, qp->generation),
		.pool = qp->ud ? rn_pool_index(qp->pool) : RN_NO_POOL,
		.rq_offset = qp->rq_offset,
		.rq_bytes = rn_rq_bytes(qp),
		.rq_size = qp->rq_size,
		.rq_eager = qp->rq_eager,
		.peer = qp->peer,
		.next = quarantine,
	};
	quarantine = aside;
out:
	qp->rq_offset = 0;
	qp->peer = NULL;
}

void rn_qp_reap(void)
{
	for (struct quarantined **at = &quarantine; *at;) {
		struct quarantined *aside = *at;

		if (rn_qp_is_inside(aside->block, aside->peer) || rn_pool_is_claimed(aside->pool)) {
			at = &aside->next;
			continue;
		}
		rn_pool_recover(aside->name);
		rn_arena_free(aside->rq_offset, aside->rq_bytes);
		rn_eager_release(aside->rq_size, aside->rq_eager);
		rn_qp_reset_words(aside->block, 0);
		slots_abandoned[aside->index] = false;
		rn_qp_number_give_back(aside->index);
		if (aside->peer)
			rn_peer_put(aside->peer);
		*at = aside->next;
		free(aside);
	}
	rn_pool_reap();
}

unsigned rn_qp_count_quarantined(void)
{
	unsigned count = 0;

	for (struct quarantined *at = quarantine; at; at = at->next)
		count++;
	return count;
}

bool rn_qp_is_quarantined(uint32_t pd)
{
	for (struct quarantined *at = quarantine; at; at = at->next)
		if (at->pd == pd || at->rq_pd == pd || at->any_pd)
			return true;
	return false;
}

bool rn_qp_has_name(uint32_t name)
{
	uint32_t index = (name & (RN_NAME_QP - 1)) >> 15;
	struct rn_qp *qp = index < RN_QPS_MAX ? rn_qps[index] : NULL;

	if (!(name & RN_NAME_QP))
		return false;
	if (qp && rn_name_of_qp(qp->index, qp->generation) == name)
		return true;
	for (struct quarantined *at = quarantine; at; at = at->next)
		if (at->name == name)
			return true;
	return false;
}

/* --- the end ---------------------------------------------------------------------------------------------- */

/* The last context that had queue pairs is closing: the engine is still there. */
void rn_qp_close(void)
{
	pthread_mutex_lock(&rn_process_lock);
	/* Contexts without queue pairs may keep this arena: a slot where somebody is stopped still has its
	 * busy word to protect it, and its ring stays allocated. Without the engine nobody will tell. */
	rn_qp_reap();
	while (quarantine) {
		struct quarantined *aside = quarantine;

		quarantine = aside->next;
		if (aside->peer)
			rn_peer_put(aside->peer);
		free(aside);
	}
	memset(slots_taken, 0, sizeof(slots_taken));
	while (num_ports) {
		uint32_t port = rn_own_port(--num_ports);

		atomic_store(&rn_own_ports[num_ports], 0);
		atomic_store(&rn_arena_head(rn_arena)->ports[num_ports], 0);
		rn_port_release(port);
	}
	next_slot = 0;
	pthread_mutex_unlock(&rn_process_lock);
}

void rn_qp_number_forked(void)
{
	memset(slots_taken, 0, sizeof(slots_taken));
	memset(slots_abandoned, 0, sizeof(slots_abandoned));
	for (uint32_t group = 0; group < num_ports; group++)
		atomic_store(&rn_own_ports[group], 0);
	num_ports = next_slot = 0;
	quarantine = NULL;
}
