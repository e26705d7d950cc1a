/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments of other processes, mapped here.  Ours are given out in inbound.c (`on_want_segment`), to processes that
 * have proven who they are (proof.c).
 *
 * One is asked for when a request needs it, and looked up without a lock from then on.  One that can't be mapped is
 * asked for three times, with growing pauses, and then given up: its memory is reached by system calls or by its
 * owner.  After a second it may be tried again.
 */
#include <stdlib.h>

#include "peer/peers.h"

/* Tries that were in vain; the pause after each but the last, and before a segment that was given up is tried again. */
enum { MAP_TRIES = 3, GIVEN_UP_MS = 1000, GIVEN_UP_MAX = 1024 };
static const uint16_t pauses_ms[MAP_TRIES] = {1, 10, GIVEN_UP_MS};

/* One that was given up keeps its entry until another needs it. */
static bool is_free(const struct process *process, const struct segment *segment)
{
	return !segment->used ||
	       (segment->tries >= MAP_TRIES && !segment->asked && process->given_up >= GIVEN_UP_MAX);
}

/* Nothing has been tried. */
static void segment_settle(struct process *process, struct segment *segment)
{
	process->given_up -= segment->used && segment->tries >= MAP_TRIES;
	segment->tries = 0;
	segment->asked = false;
	segment->again_ns = 0;
}

static void segment_free(struct process *process, struct segment *segment)
{
	segment_settle(process, segment);
	segment->used = false;
}

static struct segment *segment_node(struct process *process, uint32_t id, bool add)
{
	struct segment *_Atomic *bucket = &process->segments[id % SEGMENT_BUCKETS];
	struct segment *segment, *unused = NULL;

	for (segment = *bucket; segment; segment = segment->next) {
		if (segment->used && segment->id == id)
			return segment;
		if (!segment->base && is_free(process, segment))
			unused = segment;
	}
	if (!add)
		return NULL;
	if (!unused) {
		unused = calloc(1, sizeof *unused);
		if (!unused)
			return NULL;
		unused->next = *bucket;
		*bucket = unused;
	}
	segment_free(process, unused);
	unused->base = NULL;
	unused->id = id;
	unused->used = true;
	return unused;
}

/* This attempt to map it has failed. */
static void segment_failed(struct process *process, struct segment *segment)
{
	segment->asked = false;
	if (!rn_guarded(RN_GUARD_MAP_TRIES)) {
		segment_free(process, segment);
		return;
	}
	if (segment->tries < MAP_TRIES && ++segment->tries == MAP_TRIES) {
		process->given_up++;
		rn_warn(RN_WARN_MAPPING,
			"cannot map segment %u of process %d: its memory is reached by system calls, or through its owner",
			segment->id, process->pid);
	}
	segment->again_ns = rn_now_ns() + pauses_ms[segment->tries - 1] * 1000000ull;
	if (!process->asks_again)
		rn_timer_set_ms(&process->again, pauses_ms[segment->tries - 1]);
	process->asks_again = true;
}

static void segment_ask(struct process *process, struct segment *segment)
{
	struct rn_link_message want = rn_link_message(RN_LINK_WANT_SEGMENT, segment->id, 0);

	segment->asked = true;
	if (!process->link || rn_send(&process->link->source, &process->link->out, &want, NULL, 0, -1))
		segment_failed(process, segment);
}

/* Retry those whose pause is over; then their waiters look again. */
void rn_segments_ask(struct rn_timer *timer)
{
	struct process *process = RN_OWNER(timer, struct process, again);
	uint64_t now = rn_now_ns(), next_ns = UINT64_MAX;

	pthread_mutex_lock(&rn_peers.lock);
	process->asks_again = false;
	for (unsigned i = 0; i < SEGMENT_BUCKETS; i++) {
		for (struct segment *segment = process->segments[i]; segment; segment = segment->next) {
			if (!segment->used || segment->base || segment->asked || segment->tries >= MAP_TRIES)
				continue;
			if (segment->again_ns <= now)
				segment_ask(process, segment);
			else if (segment->again_ns < next_ns)
				next_ns = segment->again_ns;
		}
	}
	if (next_ns != UINT64_MAX && !process->asks_again) {
		rn_timer_set(timer, next_ns - now);
		process->asks_again = true;
	}
	rn_process_tell_waiting(process);
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_on_segment(struct process *process)
{
	struct segment *segment = segment_node(process, rn_inbox.message.value, false);
	char *base = NULL;

	if (!segment || !segment->asked)
		return;
	if (rn_inbox.message.size)
		base = rn_map_sealed(rn_inbox.fd, rn_inbox.message.size);
	if (base) {
		segment_settle(process, segment);
		segment->size = (size_t)rn_inbox.message.size;
		segment->base = base; /* the size was there before */
	} else {
		segment_failed(process, segment);
	}
	rn_process_tell_waiting(process);
}

/* The owner claims that no request uses it, which we don't trust: from here on it can't be found, and we wait for the
 * threads that have found it. */
void rn_on_gone_segment(struct process *process)
{
	struct segment *segment = segment_node(process, rn_inbox.message.value, false);
	size_t size;
	char *base;

	if (!segment)
		return;
	base = segment->base;
	size = segment->size;
	segment->base = NULL;
	segment_free(process, segment);
	if (base) {
		pthread_mutex_unlock(&rn_peers.lock);
		rn_peer_ops->withdrawn(base);
		pthread_mutex_lock(&rn_peers.lock);
		rn_unmap(base, size);
	}
	rn_process_tell_waiting(process); /* or those that wait for it would wait on */
}

/* --- what the device asks for: any thread ------------------------------------------------------- */

/* Without the lock. A node is written in the order base = NULL, id, used, size, base; so a base
 * that is seen between two looks at a matching id belongs to it. */
static void *find_segment(struct process *process, uint32_t id, size_t *size)
{
	for (struct segment *segment = process->segments[id % SEGMENT_BUCKETS]; segment; segment = segment->next) {
		char *base;

		if (!segment->used || segment->id != id)
			continue;
		base = segment->base;
		*size = segment->size;
		if (base && segment->base == base && segment->id == id)
			return base;
	}
	return NULL;
}

enum rn_segment_state rn_peer_segment(struct rn_peer *rn_peer, uint32_t id, char **base, size_t *size,
				    struct rn_notice *waiting)
{
	struct process *process;
	struct segment *segment;
	bool is_lost = false;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return RN_SEGMENT_ASKED; /* the next notice will be that of its death */
	process = PEER(rn_peer)->process;
	*base = find_segment(process, id, size);
	if (*base)
		return RN_SEGMENT_MAPPED;
	pthread_mutex_lock(&rn_peers.lock);
	*base = find_segment(process, id, size);
	if (!*base && !process->dead && process->link) {
		segment = segment_node(process, id, true);
		if (segment && !segment->asked && segment->again_ns <= rn_now_ns())
			segment_ask(process, segment);
		is_lost = !segment || segment->tries >= MAP_TRIES;
		if (!is_lost)
			rn_process_await(process, waiting);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	return *base ? RN_SEGMENT_MAPPED : is_lost ? RN_SEGMENT_LOST : RN_SEGMENT_ASKED;
}

void rn_segments_release(struct process *process)
{
	for (unsigned i = 0; i < SEGMENT_BUCKETS; i++) {
		struct segment *segment = process->segments[i];

		process->segments[i] = NULL;
		while (segment) {
			struct segment *next = segment->next;

			rn_unmap(segment->base, segment->size);
			free(segment);
			segment = next;
		}
	}
	process->given_up = 0;
}
