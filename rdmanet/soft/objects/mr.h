/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory regions: what their files share, and their public part.
 *
 *     ibv_reg_mr  ibv_reg_dmabuf_mr  ibv_dereg_mr     ibv_rereg_mr     ibv_advise_mr
 *            \            |            /                  |                |
 *             +-------- mr.c --------+ <------------ mr_again.c      on_demand.c <--- responder/, requester/
 *                   /     |     \                                     (is it there?)
 *         quiesce.c      mr_key.c   shm/segment.c --- shm/remap.c
 *         waits for      keys, and  files that peers map
 *         their users    both tables
 */
#pragma once

#include "objects/pd.h"
#include "shm/own.h"
#include "shm/segment.h"

struct rn_qp;

struct rn_mr {
	struct ibv_mr mr;
	uint32_t index;
	struct rn_segment *segment; /* NULL: user memory */
	uint64_t pinned;            /* bytes that count against a limit */
	unsigned *holder;           /* the user count of the device memory that it registers, or NULL */
	struct rn_list link;
};

/* Memory that the caller has checked: its entry is taken as it is. */
struct ibv_mr *rn_reg_entry(struct ibv_pd *pd, struct rn_mr_entry *entry);
struct ibv_mr *rn_alloc_null_mr(struct ibv_pd *pd);
void rn_null_close(void);
/* Any part of a sealed memfd, by any address. */
struct ibv_mr *rn_reg_memfd(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, unsigned access);

static inline const struct rn_mr_entry *rn_mr_find(const struct rn_mr_entry *table, uint32_t key)
{
	const struct rn_mr_entry *entry = &table[rn_mr_index(key)];

	/* Sequentially consistent, after `busy` or a claim, which are too: see shm/arena.h. */
	return atomic_load(&entry->key) == key && key ? entry : NULL;
}

/* Is [addr, addr + length) inside the region? */
static inline bool rn_mr_covers(const struct rn_mr_entry *mr, uint64_t addr, uint64_t length)
{
	uint64_t at = addr - mr->iova;

	return addr >= mr->iova && length <= mr->length && at <= mr->length - length;
}

/* Take an index of the table for a new key; returns its first key, or 0 if none is free. Give it back with its last
 * key. */
uint32_t rn_mr_key_take(void);
void rn_mr_key_give_back(uint32_t key);
/* A peer asked this queue pair for memory that it may not use: count and log it. With sq_lock held. */
void rn_mr_key_refused(struct rn_qp *qp);
/* Make it valid, in both tables. */
void rn_mr_publish(const struct rn_mr_entry *entry, uint32_t key);

/* Can the range of our own address space be read (written)? Brings it in. One system call. */
bool rn_mr_probe(uint64_t addr, uint64_t length, bool write);

int rn_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags, struct ibv_sge *list,
		 uint32_t num_sge);

unsigned rn_mr_count_quarantined(void);
unsigned rn_mr_count_mappings(void);
void rn_mr_close(void);
void rn_mr_forked(void);
void rn_mr_reap(void); /* release quarantined regions that nobody uses any more; with rn_process_lock held */
void rn_mr_destroy_all(struct rn_context *context);

/* --- among mr*.c, null_mr.c, on_demand.c ------------------------------------------------------- */

enum {
	RN_ACCESS_REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
};

/* --- mr_key.c ------------------------------------------------------------------------------------- */

void rn_mr_key_forked(void);

/* --- mr.c ----------------------------------------------------------------------------------------- */

/* 0 or errno. */
int rn_mr_check_access(unsigned access);
/* What the entry of this memory will say, and the segment that it has become part of, if any. 0 or errno. */
int rn_mr_plan(void *addr, size_t length, uint64_t iova, unsigned access, struct rn_mr_entry *entry,
	       struct rn_segment **segment);
/* Make its key invalid. False: a stopped peer may still be using it. With rn_process_lock held. */
bool rn_mr_hide(struct rn_mr *mr);
/* Release the memory: nobody uses it any more. */
void rn_mr_release_memory(struct rn_segment *segment);
