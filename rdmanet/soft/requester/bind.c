/* SPDX-License-Identifier: Apache-2.0 */
/* ibv_bind_mw: binding a window of type 1 is a work request that the device makes up. */
#include "objects/mw.h"
#include "requester/requester.h"

/* Type 1 only: the new key is the library's to choose, and good when the bind has completed. */
int rn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	const struct ibv_mw_bind_info *info = &bind->bind_info;
	struct ibv_send_wr *bad_wr, wr = {
		.wr_id = bind->wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = bind->send_flags,
		.bind_mw = {
			.mw = mw,
			.rkey = (mw->rkey & ~(uint32_t)RN_MW_VARIANT) | ((mw->rkey + 1) & RN_MW_VARIANT),
			.bind_info = *info,
		},
	};
	int err;

	if ((!info->mr && (info->addr || info->length)) || info->mw_access_flags & IBV_ACCESS_ZERO_BASED)
		return EINVAL;
	if (mw->pd != qp->pd || (info->mr && info->mr->pd != mw->pd))
		return EPERM;
	err = rn_post_send(qp, &wr, &bad_wr);
	if (!err)
		mw->rkey = wr.bind_mw.rkey;
	return err;
}
