/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys, and the two tables in which they are looked up.
 *
 * A key is index << 8 | generation, so it is found by one array access, and a key that was
 * deregistered stays wrong for 255 further uses of its index; indexes are handed out in turn,
 * from a random start, which makes that a long time.
 *
 * One table is ours, for the work requests of this process; the other stands in the arena, for peers.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "mr.h"

alignas(RN_PAGE) struct rn_mr_entry rn_mr_table[RN_MRS_MAX];

/* Guards the handing out of keys. Innermost: nothing is locked inside it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *generations; /* of each index; 0 = taken */
static uint32_t next_index, taken;

uint32_t rn_mr_key_take(void)
{
	uint32_t key = 0;

	pthread_mutex_lock(&mutex);
	if (!generations) {
		generations = malloc(RN_MRS_MAX);
		if (!generations || getrandom(generations, RN_MRS_MAX, 0) < 0 ||
		    getrandom(&next_index, sizeof(next_index), 0) < 0)
			goto out;
		for (unsigned i = 0; i < RN_MRS_MAX; i++)
			generations[i] |= 1;
		next_index %= RN_MRS_MAX;
	}
	for (unsigned tried = 0; taken < RN_MRS_MAX - 1 && tried < RN_MRS_MAX; tried++) {
		uint32_t index = next_index++ % RN_MRS_MAX;

		/* Index 0 stays unused, so that key 0 is never valid. */
		if (!index || rn_mr_table[index].pd)
			continue;
		if (!++generations[index])
			generations[index] = 1;
		key = index << 8 | generations[index];
		rn_mr_table[index].pd = UINT32_MAX; /* taken */
		taken++;
		break;
	}
out:
	pthread_mutex_unlock(&mutex);
	return key;
}

void rn_mr_key_give_back(uint32_t key)
{
	uint32_t index = key >> 8;

	rn_mw_open_region(index);
	pthread_mutex_lock(&mutex);
	generations[index] = key & 0xff; /* the next one is another, also after keys that a program chose */
	rn_mr_table[index].pd = 0;
	taken--;
	pthread_mutex_unlock(&mutex);
}

/* Fill our copy of the table; the key goes in last. */
static void entry_publish(struct rn_mr_entry *entry, const struct rn_mr_entry *from, uint32_t key)
{
	entry->pd = from->pd;
	entry->access = from->access;
	entry->kind = from->kind;
	entry->iova = from->iova;
	entry->length = from->length;
	entry->base = from->base;
	entry->offset = from->offset;
	entry->segment = from->segment;
	entry->qpn = from->qpn;
	atomic_store_explicit(&entry->key, key, memory_order_release);
}

void rn_mr_publish(const struct rn_mr_entry *entry, uint32_t key)
{
	entry_publish(&rn_mr_table[key >> 8], entry, key);
	rn_own_tell_mr(key >> 8);
}

void rn_mr_key_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
	madvise(rn_mr_table, sizeof(rn_mr_table), MADV_DONTNEED); /* zeros, without touching 4 MiB */
	taken = 0;
}
