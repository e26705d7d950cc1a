/* SPDX-License-Identifier: Apache-2.0 */
/* Shared receive queues: what the rest of the device knows of them. srq.c has the theory. */
#pragma once

#include "objects/pd.h"
#include "objects/qp.h"
#include "shm/pool.h"

struct rn_srq {
	struct ibv_srq srq;
	struct rn_pool *pool;
	enum ibv_srq_type type;
	uint32_t max_sge;
	uint32_t limit; /* 0: not armed */
	unsigned users; /* queue pairs */
	uint32_t async_reported;
	struct rn_list link;
	struct rn_srq *next;
	/* of an XRC SRQ: xrc.c */
	struct rn_xrcd *xrcd;
	uint32_t number;
	struct rn_qp *poll_source; /* what its CQ polls */
	struct rn_srq *next_xrc;
};

static inline struct rn_srq *rn_srq(struct ibv_srq *srq)
{
	return (struct rn_srq *)srq;
}

/* NULL and errno; attr is updated to its real sizes. */
struct rn_srq *rn_srq_create(struct ibv_pd *pd, void *srq_context, struct ibv_srq_attr *attr);
struct ibv_srq *rn_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *init);
/* Raise the events of limits that were reached. With rn_process_lock held; on the engine, or during a look. */
void rn_srq_process_pending_all(void);
int rn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
void rn_srq_destroy_all(struct rn_context *context);
void rn_srq_forked(void);
