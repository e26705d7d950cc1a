/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of the paths between queue pairs, which path.h describes. Which one a queue pair takes is decided where it
 * becomes ready to receive (become_reachable() in qp_modify.c), and once more if shared memory fails (progress.c).
 */
#include "objects/path.h"

#include <stddef.h>

static const struct rn_path_ops *paths[RN_PATHS];
const struct rn_requester_ops *rn_requester;

void rn_path_register(enum rn_path_kind kind, const struct rn_path_ops *ops)
{
	paths[kind] = ops;
}

const struct rn_path_ops *rn_path_of(enum ibv_qp_type type)
{
	return paths[type == IBV_QPT_UD ? RN_PATH_DATAGRAM : RN_PATH_TCP];
}

void rn_requester_register(const struct rn_requester_ops *ops)
{
	rn_requester = ops;
}
