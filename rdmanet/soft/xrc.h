/* SPDX-License-Identifier: Apache-2.0 */
/* Extended reliable connections: domains, their SRQs and targets. xrc.c has the theory. */
#ifndef RDMANET_SOFT_XRC_H
#define RDMANET_SOFT_XRC_H

#include "soft.h"
#include "srq.h"

struct rn_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t number; /* two that were opened by one file have the same */
	unsigned users;  /* SRQs and queue pairs */
	struct rn_list link;
};

static inline struct rn_xrcd *rn_xrcd(struct ibv_xrcd *xrcd)
{
	return (struct rn_xrcd *)xrcd;
}

struct ibv_xrcd *rn_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int rn_close_xrcd(struct ibv_xrcd *xrcd);

/* An SRQ becomes one of a domain, with a CQ of its own, and a number. 0 or errno. */
int rn_xrc_adopt_srq(struct rn_srq *srq, struct ibv_xrcd *xrcd, struct ibv_cq *cq);
/* Before it goes: nothing comes any more. */
void rn_xrc_release_srq(struct rn_srq *srq);
int rn_get_srq_num(struct ibv_srq *srq, uint32_t *number);
/* What this name was about to hand over to any of them is not coming: see rn_pool_sweep. */
void rn_xrc_sweep(uint32_t name);

/* A handle to a target that somebody has created. */
struct ibv_qp *rn_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr);
/* It goes. False: the target itself was meant. */
bool rn_xrc_close_handle(struct rn_qp *qp);

void rn_xrc_close_handles(struct rn_context *context);
void rn_xrc_destroy_all(struct rn_context *context);
void rn_xrc_forked(void);

#endif
