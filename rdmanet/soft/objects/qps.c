/* SPDX-License-Identifier: Apache-2.0 */
/* The process's queue pairs by the index of their block. Whoever looks for one, or at all of them, needs no more. */
#include <string.h>

#include "objects/qp_inside.h"

struct rn_qp *rn_qps[RN_QPS_MAX];
_Atomic uint32_t rn_qps_end;

void rn_qps_add(struct rn_qp *qp)
{
	rn_qps[qp->index] = qp;
	if (rn_qps_end <= qp->index)
		rn_qps_end = qp->index + 1;
}

void rn_qps_remove(struct rn_qp *qp)
{
	rn_qps[qp->index] = NULL;
	while (rn_qps_end && !rn_qps[rn_qps_end - 1])
		rn_qps_end--;
}

void rn_qps_forked(void)
{
	memset(rn_qps, 0, rn_qps_end * sizeof(rn_qps[0]));
	rn_qps_end = 0;
}
