/* SPDX-License-Identifier: Apache-2.0 */
/* Protection domains, also those with a parent, and thread domains: domain.c. */
#pragma once

#include "objects/context.h"

struct rn_pd {
	struct ibv_pd pd;
	uint32_t number;
	unsigned users;
	struct ibv_pd *parent; /* a parent domain: of what, and for which threads */
	struct ibv_td *td;
	struct rn_list link;
};

static inline struct rn_pd *rn_pd(struct ibv_pd *pd)
{
	return (struct rn_pd *)pd;
}

struct ibv_td *rn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int rn_dealloc_td(struct ibv_td *td);
struct ibv_pd *rn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
void rn_domain_destroy_all(struct rn_context *context);
