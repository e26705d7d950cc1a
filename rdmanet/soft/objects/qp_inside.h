/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside a queue pair: what its files share.
 *
 *     ibv_create_qp  ibv_destroy_qp        ibv_modify_qp      a failed request   peers: wakeup, death
 *             \        /                        |                    |                  |
 *              qp.c --------------------> qp_modify.c                |            qp_events.c
 *           /   |   \                     (qp_table.c)                |             /    |
 *     qp_pool.c | qp_number.c                 |                      v            /     |
 *     receives  | numbers, what a stopped     +---------------> qp_state.c <-----+      |
 *     of pools  | peer may still touch                     to ERR, to RESET             |
 *               +------------------------- timers, notices -----------------------------+
 *
 * Below all of them: qps.c, the table of queue pairs, and qp_block.c, what peers see and touch of one.
 */
#pragma once

#include "objects/qp.h"

/* --- qps.c: the table of queue pairs (qp.h); all with rn_process_lock held ---------------------------------------- */

void rn_qps_add(struct rn_qp *qp);
void rn_qps_remove(struct rn_qp *qp);
void rn_qps_forked(void);

/* --- qp_number.c: all with rn_process_lock held --------------------------------------------------------------- */

/* A free slot's index, or RN_QPS_MAX. With the engine held. */
uint32_t rn_qp_number_take(void);
void rn_qp_number_give_back(uint32_t index);
/* The generation of the slot's next user, or of the same one after a reset. */
uint32_t rn_qp_next_generation(uint32_t index);
/* The peer is stopped inside: its slot and ring stay as they are until it has moved on, or died. */
void rn_qp_put_aside(struct rn_qp *qp);
void rn_qp_number_forked(void);
/* Is this the name (shm/pool.h) of a queue pair that exists or is in quarantine? */
bool rn_qp_has_name(uint32_t name);

/* --- qp_block.c ---------------------------------------------------------------------------------------- */

/* Is a living process inside? */
bool rn_qp_is_inside(struct rn_qp_block *block, struct rn_peer *peer);
/* Reset the words that a peer writes, for a new peer; nobody is inside. The old peer can't enter any more. */
void rn_qp_reset_peers_words(struct rn_qp *qp, uint32_t next_receive);
void rn_qp_reset_words(struct rn_qp_block *block, uint32_t next_receive); /* the same for one block */

/* --- qp_events.c ----------------------------------------------------------------------------------------- */

/* For rn_qp.notice. */
void rn_qp_peer_noticed(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why);
