/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory windows: keys for a part of a region, given and taken by work requests.
 *
 * A window has an index in the key table, like a region; its key is that index, eight bits that were drawn when it was
 * made (mr_key.c), and eight that change with each binding.  Unbound, its entry is not valid.  Bound, the entry says
 * the same things as a region's, so a responder looks it up as any key.  What differs: it has no right to be an lkey,
 * and a window of type 2 names the queue pair that it is bound to, the only one whose peer may use it.
 *
 *                     type 1                          type 2
 *     bound by        ibv_bind_mw                     IBV_WR_BIND_MW, with a key that the program chose
 *     bound again     by another bind                 never before it was invalidated
 *     unbound by      a bind of no bytes              IBV_WR_LOCAL_INV, or the peer's SEND_WITH_INV
 *     good for        all queue pairs of its PD       one
 *
 * A peer's SEND_WITH_INV is executed by the peer, in the arena, where it clears the key of the
 * entry that only itself could use.  Our private table still has it until the message is polled, or we
 * look at the window: rn_mw_settle brings the two together.
 *
 * While windows are bound to a region it can't be deregistered: EBUSY.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "shm/arena.h"
#include "verbs.h"

enum { RN_MW_VARIANT = 0xff }; /* of a key: mr_key.c */

struct rn_context;
struct rn_mr_entry;
struct rn_qp;

/* Requests that no responder takes part in. */
static inline bool rn_is_local(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_LOCAL_INV || opcode == IBV_WR_BIND_MW;
}

/* Called before a copy of a request is kept. A bind points to its region; the copy names it by key, in its only list
 * entry. */
void rn_mw_keep(struct ibv_send_wr *copy);
/* Execute BIND_MW or LOCAL_INV: SUCCESS, MW_BIND_ERR, or RESP_TIMEOUT_ERR: a peer was stopped while it used the key.
 * With sq_lock held, outside of any responder. */
enum ibv_wc_status rn_mw_execute(struct rn_qp *qp, const struct ibv_send_wr *wr);

/* The responder's part of SEND_WITH_INV. Is this a key that this queue pair's peer may invalidate? */
bool rn_mw_may_invalidate(const struct rn_mr_entry *table, uint32_t key, uint32_t pd, uint32_t qpn);
/* Invalidate it: in a peer's arena, or, if table is our own, for good. */
void rn_mw_invalidate(struct rn_mr_entry *table, uint32_t key);
/* The owner was told that this key was invalidated: see above. That may be wrong. */
void rn_mw_settle(uint32_t key);

/* A region is being destroyed. False: windows are bound to it. True: none will be until its index is used again. */
bool rn_mw_close_region(uint32_t index);
void rn_mw_open_region(uint32_t index);
/* A queue pair is being destroyed, and with it the bindings of its windows. */
void rn_mw_forget_qp(uint32_t qpn);

struct ibv_mw *rn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int rn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int rn_dealloc_mw(struct ibv_mw *mw);
void rn_mw_destroy_all(struct rn_context *context);
void rn_mw_forked(void);
