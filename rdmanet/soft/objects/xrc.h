/* SPDX-License-Identifier: Apache-2.0 */
/* Extended reliable connections: domains, their SRQs and targets. xrc.c has the theory. */
#pragma once

#include "base/list.h"
#include "verbs.h"

struct rn_context;
struct rn_cq;
struct rn_qp;
struct rn_srq;
struct rn_xrcd;

/* A queue pair's part of it. */
struct rn_qp_xrc {
	struct rn_xrcd *xrcd;  /* for a target, which has no PD, and */
	struct rn_cq *own_cq;  /* a CQ that stays empty, in place of the program's */
	unsigned handles;      /* how many others have opened */
	bool is_orphan;        /* its creator has closed it, others have not */
	struct rn_qp *real;    /* set: this is such a handle */
	bool is_poll_source;   /* this is no queue pair, only what a CQ polls for an SRQ */
};

struct rn_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t number; /* domains opened by the same file have the same number */
	unsigned users;  /* SRQs and queue pairs */
	struct rn_list link;
};

static inline struct rn_xrcd *rn_xrcd(struct ibv_xrcd *xrcd)
{
	return (struct rn_xrcd *)xrcd;
}

struct ibv_xrcd *rn_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int rn_close_xrcd(struct ibv_xrcd *xrcd);

/* Make an SRQ one of a domain, with a CQ of its own and a number. 0 or errno. */
int rn_xrc_register_srq(struct rn_srq *srq, struct ibv_xrcd *xrcd, struct ibv_cq *cq);
/* Before it is destroyed: stop receives from reaching it. */
void rn_xrc_release_srq(struct rn_srq *srq);
int rn_get_srq_num(struct ibv_srq *srq, uint32_t *number);
/* Take back what the process of this name was about to hand over to any of them: see rn_pool_sweep. */
void rn_xrc_sweep(uint32_t name);

/* A handle to an existing target. */
struct ibv_qp *rn_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr);
/* Close a handle. False: it is the target itself, and has no handles. `orphan` is then to be destroyed, unless NULL: a
 * target that its creator has closed before, and that this was the last handle of. */
bool rn_xrc_close_handle(struct rn_qp *qp, struct rn_qp **orphan);
/* Any handle that a context has, or NULL. */
struct rn_qp *rn_xrc_handle_of(struct rn_context *context);
void rn_xrc_destroy_all(struct rn_context *context);
void rn_xrc_forked(void);
