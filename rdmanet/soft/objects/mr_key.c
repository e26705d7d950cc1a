/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys: how they are made, published and taken back. They are looked up by rn_mr_find() (mr.h). A remote key is checked
 * by reach() in responder/responder.c, or by its owner in responder/owner.c; a local key in requester/execute.c.
 * tcp/serve.c checks again, before each piece, that the keys are still valid.
 *
 * A peer that knows a key and an address can use the memory, so keys must not be guessable: a process that is given
 * keys, or registers memory itself, learns nothing about the keys of others.  A key is index << 16 | tag, so it is
 * found by one array access.
 *
 *                 31            16 15        8 7         0
 *     region      | index         | tag                   |    drawn when it is registered
 *     window      | index         | tag        | variant   |   index, tag and first variant are drawn when it is made;
 *                                                              later ones are the program's choice (ibv_inc_rkey)
 *
 * An index is drawn from those that are free, and a tag from all, but its upper byte differs from that of the key
 * which had the index last: a key that was just withdrawn does not come back, with whatever variant.
 *
 * Randomness comes from the kernel, for 32 keys at a time.
 *
 * One table is ours, for the work requests of this process; the other stands in the arena, for peers.
 */
#include <arpa/inet.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/guard.h"
#include "base/log.h"
#include "objects/eager.h"
#include "objects/mr.h"

static_assert(RN_MRS_MAX == 1 << 16, "any upper half of a key is an index");

/* Guards the allocation of keys. Innermost: nothing is locked inside it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* The indexes that are free, in any order. 0 never is, so that key 0 is never valid. */
static uint16_t vacant[RN_MRS_MAX];
static uint32_t num_vacant;
static bool is_filled;

enum { WORDS = 32 }; /* 256 bytes: getrandom() gives so many at once, or none */
static uint64_t words[WORDS];
static uint32_t words_left;

/* --- with mutex held ------------------------------------------------------------------------------------------- */

static void fill_vacant(void)
{
	for (num_vacant = 0; num_vacant < RN_MRS_MAX - 1; num_vacant++)
		vacant[num_vacant] = num_vacant + 1;
	is_filled = true;
}

/* False: the kernel gives none. */
static bool random_word(uint64_t *word)
{
	if (!words_left) {
		if (getrandom(words, sizeof(words), 0) != sizeof(words))
			return false;
		words_left = WORDS;
	}
	*word = words[--words_left];
	words[words_left] = 0; /* erase what was used */
	return true;
}

/* For the tests' control: one index after the other, and 8 bits. */
static uint32_t predictable_key(uint64_t word)
{
	return (uint32_t)vacant[--num_vacant] << 16 | (word & 0xff);
}

static uint32_t random_key(uint64_t word)
{
	uint32_t at = (word >> 16) * num_vacant >> 48; /* evenly, but for 2^-32 */
	uint32_t index = vacant[at], tag = word & 0xffff, last = rn_mr_table[index].last & 0xffff;

	while (tag >> 8 == last >> 8) {
		if (!random_word(&word))
			return 0;
		tag = word & 0xffff;
	}
	__builtin_prefetch(&rn_arena_mrs(rn_arena)[index], 1); /* it is not in the cache */
	vacant[at] = vacant[--num_vacant];
	return index << 16 | tag;
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

uint32_t rn_mr_key_take(void)
{
	uint32_t key = 0;
	uint64_t word;

	pthread_mutex_lock(&mutex);
	if (!is_filled)
		fill_vacant();
	if (num_vacant && random_word(&word))
		key = rn_guarded(RN_GUARD_RANDOM_KEYS) ? random_key(word) : predictable_key(word);
	pthread_mutex_unlock(&mutex);
	return key;
}

void rn_mr_key_give_back(uint32_t key)
{
	uint32_t index = rn_mr_index(key);

	pthread_mutex_lock(&mutex);
	rn_mr_table[index].last = key;
	vacant[num_vacant++] = index;
	pthread_mutex_unlock(&mutex);
}

void rn_mr_key_refused(struct rn_qp *qp)
{
	char from[INET6_ADDRSTRLEN] = "";

	qp->count.wrong_keys++;
	inet_ntop(AF_INET6, &qp->attr.ah_attr.grh.dgid, from, sizeof(from));
	rn_warn(RN_WARN_KEY, "queue pair %#x: its peer, queue pair %#x at %s, asked for memory that it may not use",
		qp->ex.qp_base.qp_num, qp->attr.dest_qp_num, from);
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
	entry_publish(&rn_mr_table[rn_mr_index(key)], entry, key);
	rn_own_tell_mr(rn_mr_index(key));
}

void rn_mr_key_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
	madvise(rn_mr_table, sizeof(rn_mr_table), MADV_DONTNEED); /* zeros, without touching 4 MiB */
	is_filled = false;
	words_left = 0; /* the parent uses them */
	memset(words, 0, sizeof(words));
}
