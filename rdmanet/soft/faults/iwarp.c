/* SPDX-License-Identifier: Apache-2.0 */
#include "faults/iwarp.h"

#include <errno.h>

int rn_iwarp_check(const struct ibv_send_wr *wr)
{
	switch (wr->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
	case IBV_WR_RDMA_WRITE:
		return 0;
	case IBV_WR_RDMA_READ:
		return wr->num_sge > 1 ? EINVAL : 0;
	default:
		return EINVAL;
	}
}

bool rn_iwarp_has(enum rn_call call)
{
	return call != RN_CREATE_AH && call != RN_ALLOC_MW && call != RN_OPEN_XRCD;
}
