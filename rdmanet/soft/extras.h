/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the embedded device exports beyond the verbs ABI.
 *
 * Found by dlsym, by our own core and by tests; a program that doesn't know of it misses nothing.
 * An exported struct only ever grows, at its end.
 */
#ifndef RDMANET_SOFT_EXTRAS_H
#define RDMANET_SOFT_EXTRAS_H

#include <stddef.h>
#include <sys/types.h>

#include "counters.h"

struct ibv_context;
struct ibv_qp;
struct rdma_cm_id;

/* What a context, or one of its queue pairs, has done so far. 0 or errno. */
int rdmanet_soft_counters(struct ibv_context *context, struct rn_counters *counters);
int rdmanet_soft_qp_counters(struct ibv_qp *qp, struct rn_counters *counters);

/* What this process holds now; and how much of it is put aside for peers that are stopped. */
void rdmanet_soft_live(struct rn_live *live);
uint32_t rdmanet_soft_quarantined(void);

/*
 * Make things go wrong: the text is chaos.h's, as in RDMANET_SOFT_CHAOS, and replaces what was set before;
 * "" ends it, NULL is what the environment says. Without a context: for all of this process, and those
 * to come. 0, or errno; EINVAL comes with an error that says what would have been understood.
 */
int rdmanet_soft_chaos(struct ibv_context *context, const char *text, char *error, size_t size);

/* How many faults have come to pass since they were last set for all of the process: a test that meant to
 * provoke one can see that it did. */
uint64_t rdmanet_soft_chaos_happened(void);

/* Which way a queue pair's requests go to its peer: chosen when it comes to RTR, by trying. */
enum {
	RDMANET_SOFT_WAY_NONE,   /* no peer yet, or nobody has answered */
	RDMANET_SOFT_WAY_SELF,   /* the same process: by pointer */
	RDMANET_SOFT_WAY_MAPPED, /* the same host and user: in its mapped arena */
	RDMANET_SOFT_WAY_STREAM, /* TCP */
};
int rdmanet_soft_qp_way(struct ibv_qp *qp);

/* Has the process of the peer ended, as one that is killed does: without a word, and connected still? As far as is known
 * by now, of a queue pair and of an identifier; either may know first. Never of who took leave, or can't be reached. */
int rdmanet_soft_qp_peer_is_gone(struct ibv_qp *qp);
int rdmanet_soft_cm_peer_is_gone(struct rdma_cm_id *id);

/* Keep the connection manager's context open until it is released, which rdma_get_devices() does for good. NULL and
 * errno. What was held before a fork is not the child's to release: nothing happens then. */
struct ibv_context *rdmanet_soft_cm_hold(void);
void rdmanet_soft_cm_release(struct ibv_context *context);

/* Where warnings go: a descriptor that doesn't block, one write() a line; -1: standard error, as in every forked
 * child. Nothing goes to the descriptor from before any more. log.h says what warnings are. */
void rdmanet_soft_log_to(int fd);

/* What was wrong with the switches when the device was opened last, as standard error was told; "" if nothing was. */
void rdmanet_soft_settings_error(char *text, size_t size);

/* What would be in this file of the kernel's, if the device were the kernel's: its length, 0 of a device's node; -1 and
 * errno: ENOENT when it has no such file. Of what is there to be read files.c has the list. */
ssize_t rdmanet_soft_file(const char *path, char *text, size_t size);

/* An access flag for ibv_reg_mr of the whole address space: its user vouches for every range that it
 * posts, so none is tried first. See on_demand.c. */
extern const uint32_t rdmanet_soft_access_vouched;

#endif
