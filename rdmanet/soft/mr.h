/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside memory regions: what their parts tell each other.
 *
 *     ibv_reg_mr  ibv_reg_dmabuf_mr  ibv_dereg_mr     ibv_rereg_mr     ibv_advise_mr
 *            \            |            /                  |                |
 *             +-------- mr.c --------+ <------------ mr_again.c      on_demand.c <--- respond.c, exec.c
 *                      /     \                                        (is it there?)
 *                mr_key.c   segment.c --- adopt.c
 *                keys, and   files that peers map
 *                both tables
 */
#ifndef RDMANET_SOFT_MR_H
#define RDMANET_SOFT_MR_H

#include "soft.h"

enum {
	RN_PAGE = 4096,
	RN_ACCESS_REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
};

/* --- segment.c ------------------------------------------------------------------------------------ */

/* The segment of a sealed memfd, counted once more. 0 or errno. */
int rn_segment_of_file(int fd, struct rn_segment **found);
/* The segment in which this memory lies, or lies from now on; NULL: it can't. */
struct rn_segment *rn_segment_adopt(uint64_t addr, size_t length);
void rn_segment_put(struct rn_segment *segment);
/* One more region that peers reach without a mapping, or one less: while there are any, no memory is adopted. */
void rn_segment_unmapped(int more);
void rn_segment_forked(void);

/* --- mr_key.c ------------------------------------------------------------------------------------- */

void rn_mr_key_forked(void);

/* --- mr.c ----------------------------------------------------------------------------------------- */

/* 0 or errno. */
int rn_mr_check_access(unsigned access);
/* What the entry of this memory will say, and the segment that it has become part of, if any. 0 or errno. */
int rn_mr_plan(void *addr, size_t length, uint64_t iova, unsigned access, struct rn_mr_entry *entry,
	       struct rn_segment **segment);
/* Make its key invalid for everybody. False: a stopped peer may still be using it. With rn_world held. */
bool rn_mr_hide(struct rn_mr *mr);
/* Nobody is at work on it any more. */
void rn_mr_release_memory(struct rn_segment *segment);

#endif
