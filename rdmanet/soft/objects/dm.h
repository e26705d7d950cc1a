/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory: dm.c. */
#pragma once

#include "objects/pd.h"

/* Device memory (dm.c). */
struct ibv_dm *rn_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int rn_free_dm(struct ibv_dm *dm);
struct ibv_mr *rn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned access);
/* For device/import.c: if this is the one, what a second handle needs of it, while it can't go; and that handle. */
struct rn_dm_share {
	uint32_t handle;
	size_t length;
	int fd; /* the handle's from now on; -errno: none */
};
bool rn_dm_share(struct rn_list *item, struct rn_dm_share *share);
struct ibv_dm *rn_dm_again(struct ibv_context *context, const struct rn_dm_share *share);
void rn_dm_destroy_all(struct rn_context *context);
void rn_dm_forked(void);
