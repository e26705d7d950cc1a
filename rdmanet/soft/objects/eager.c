/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eager receive buffers: small messages into memory that the sender cannot map.
 *
 * Peers can write memory that a program brings itself only with a system call, which costs more than a small message
 * is worth.  So behind each receive ring of a connected queue pair there is room for one short message per slot, in
 * the owner's arena, which the peer has mapped anyway.  The responder (responder/responder.c) leaves the message
 * there, sets RN_SLOT_EAGER in the completion, and the owner's poll_cq copies it to where the receive wants it.
 * Buffer and slot are handed over together, so neither is given back on its own.
 *
 *     ring                                 room
 *     | slot 0 | slot 1 | slot 2 | ...     | message 0 | message 1 | message 2 | ...
 *
 * The send has succeeded before its bytes are in place, and nobody may notice that:
 *
 *     another request     Only receives into memory that no peer has rights to go this way: a READ
 *                         behind the SEND would find the old bytes, a WRITE would be undone.
 *     deregistration      Before a key is withdrawn, waiting messages are copied (rn_eager_settle).
 *     the peer            It says whether there is a message, and its length. The owner decides where it goes, by
 *                         its private copy of what was posted, checked against its own keys.
 */
#include "bus_error.h"
#include "objects/eager.h"

enum {
	LARGEST = 4096,           /* above this, copying is the main cost */
	RING_BYTES = 512 * 1024,  /* of one ring */
	ALL_BYTES = 128 << 20,    /* of all: a quarter of the arena */
	SKEW = 64,                /* else all messages would compete for the same few sets of a cache */
};

static _Atomic uint64_t reserved;

uint32_t rn_eager_reserve(uint32_t slots)
{
	uint32_t room = LARGEST;
	uint64_t bytes;

	while ((uint64_t)room * slots > RING_BYTES)
		room /= 2;
	if (room < SKEW)
		return 0;
	bytes = rn_eager_bytes(slots, room);
	if (atomic_fetch_add(&reserved, bytes) + bytes > ALL_BYTES) {
		atomic_fetch_sub(&reserved, bytes);
		return 0;
	}
	return room;
}

void rn_eager_release(uint32_t slots, uint32_t room)
{
	atomic_fetch_sub(&reserved, rn_eager_bytes(slots, room));
}

void rn_eager_forked(void)
{
	atomic_store(&reserved, 0);
}

/* From the room of this slot into the region. The entry is our own; that the range is in it was checked. */
static bool carry(struct rn_qp *qp, uint32_t index, const struct rn_mr_entry *mr, uint64_t addr, uint32_t length)
{
	const char *rooms = rn_arena + qp->rq_offset + (uint64_t)qp->rq_size * qp->rq_stride;

	const void *lost;

	return rn_bus_copy((void *)(uintptr_t)(mr->base + (addr - mr->iova)),
			   rn_eager_room(rooms, index & (qp->rq_size - 1), qp->rq_eager), length, &lost);
}

bool rn_eager_take(struct rn_qp *qp, uint32_t index, uint32_t length)
{
	struct rn_shadow *shadow = &qp->rq_shadow[index & (qp->rq_size - 1)];
	const struct rn_mr_entry *mr;

	if (shadow->settled || !length || length > qp->rq_eager || length > shadow->length)
		return true;
	mr = rn_mr_find(rn_mr_table, shadow->lkey);
	if (mr && mr->pd == rn_pd(qp->ex.qp_base.pd)->number && rn_mr_covers(mr, shadow->addr, length) &&
	    mr->access & IBV_ACCESS_LOCAL_WRITE)
		return carry(qp, index, mr, shadow->addr, length);
	return true;
}

/* Copy this queue pair's messages that wait for the region, whose key is still valid here. With the CQ's lock held. */
static void settle(struct rn_qp *qp, uint32_t key)
{
	uint32_t posted = atomic_load(&qp->rq_posted);

	for (uint32_t i = atomic_load(&qp->rq_polled); i != posted && rn_rq_is_done(qp, i); i++) {
		struct rn_shadow *shadow = &qp->rq_shadow[i & (qp->rq_size - 1)];
		const struct rn_slot *slot = rn_rq_slot(qp, i);

		if (shadow->lkey != key || !(READ_ONCE(slot->wc_flags) & RN_SLOT_EAGER))
			continue;
		shadow->lost = !rn_eager_take(qp, i, READ_ONCE(slot->byte_len));
		shadow->settled = true;
	}
}

void rn_eager_settle(uint32_t pd, uint32_t key)
{
	rn_for_each_qp(qp) {
		if (!qp->rq_eager || rn_pd(qp->ex.qp_base.pd)->number != pd)
			continue;
		rn_lock(&qp->recv_cq->lock);
		settle(qp, key);
		rn_unlock(&qp->recv_cq->lock);
	}
}
