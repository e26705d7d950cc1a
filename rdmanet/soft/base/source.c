/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's sources: descriptors, and the slots by which events find them.
 *
 * epoll_wait returns a batch, and a callback may remove a source that is further down in it.  So an event carries
 * a slot's number and its generation, never a pointer; a slot that has been given back has another generation.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "base/engine_inside.h"

static int grow_slots(void)
{
	uint32_t count = rn_engine.slot_count ? rn_engine.slot_count * 2 : 16;
	struct rn_source_slot *slots = realloc(rn_engine.slots, count * sizeof *slots);

	if (!slots)
		return -ENOMEM;
	for (uint32_t i = rn_engine.slot_count; i < count; i++)
		slots[i] = (struct rn_source_slot){.next_free = i + 1 < count ? i + 2 : 0};
	rn_engine.free_slot = rn_engine.slot_count + 1;
	rn_engine.slots = slots;
	rn_engine.slot_count = count;
	return 0;
}

static void free_slot(struct rn_source *source)
{
	struct rn_source_slot *slot = &rn_engine.slots[source->slot - 1];

	slot->source = NULL;
	slot->generation++;
	slot->next_free = rn_engine.free_slot;
	rn_engine.free_slot = source->slot;
	source->slot = 0;
}

static struct epoll_event event_of(const struct rn_source *source, uint32_t epoll_events)
{
	uint64_t generation = rn_engine.slots[source->slot - 1].generation;

	return (struct epoll_event){.events = epoll_events, .data.u64 = generation << 32 | source->slot};
}

struct rn_source *rn_source_of(const struct epoll_event *event)
{
	uint32_t index = (uint32_t)event->data.u64, generation = (uint32_t)(event->data.u64 >> 32);

	/* Index 0: the wakeup or the timer, and the loop looks after both each round. */
	if (!index || index > rn_engine.slot_count || rn_engine.slots[index - 1].generation != generation)
		return NULL;
	return rn_engine.slots[index - 1].source;
}

int rn_source_add(struct rn_source *source, uint32_t epoll_events)
{
	struct epoll_event event;
	int rc = 0;

	pthread_mutex_lock(&rn_engine.lock);
	assert(!source->slot && rn_engine.state != RN_ENGINE_OFF);
	if (!rn_engine.free_slot)
		rc = grow_slots();
	if (!rc) {
		struct rn_source_slot *slot = &rn_engine.slots[rn_engine.free_slot - 1];

		source->slot = rn_engine.free_slot;
		rn_engine.free_slot = slot->next_free;
		slot->source = source;
		event = event_of(source, epoll_events);
		if (epoll_ctl(rn_engine.epoll_fd, EPOLL_CTL_ADD, source->fd, &event)) {
			rc = -errno;
			free_slot(source);
		}
	}
	pthread_mutex_unlock(&rn_engine.lock);
	return rc;
}

int rn_source_modify(struct rn_source *source, uint32_t epoll_events)
{
	struct epoll_event event;
	int rc = -ENOENT;

	pthread_mutex_lock(&rn_engine.lock);
	if (source->slot) {
		event = event_of(source, epoll_events);
		rc = epoll_ctl(rn_engine.epoll_fd, EPOLL_CTL_MOD, source->fd, &event) ? -errno : 0;
	}
	pthread_mutex_unlock(&rn_engine.lock);
	return rc;
}

void rn_source_remove(struct rn_source *source)
{
	pthread_mutex_lock(&rn_engine.lock);
	if (source->slot) {
		epoll_ctl(rn_engine.epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
		free_slot(source);
	}
	rn_engine_settle(source);
	pthread_mutex_unlock(&rn_engine.lock);
}
