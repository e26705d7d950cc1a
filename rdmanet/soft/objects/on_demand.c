/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On-demand memory (IBV_ACCESS_ON_DEMAND; with addr NULL and length SIZE_MAX the whole address
 * space) may have holes.  rn_mr_probe() asks the kernel to bring a range in, which fails
 * where a fault would have killed us.  That costs some 200 ns a page, more than the copy itself. So a
 * program that knows what it posts (memory that it holds a reference to) may vouch for it: with the
 * access flag rdmanet_soft_access_vouched the whole address space, or a region, is used without probing.
 *
 * ibv_advise_mr brings such memory in beforehand.
 */
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/page.h"
#include "objects/mr.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* --- trying memory --------------------------------------------------------------------------------- */

/* For kernels before 5.14: read a byte of each page. */
static bool probe_by_reading(uint64_t first, uint64_t last)
{
	char byte;

	for (uint64_t at = first; at < last; at += rn_page()) {
		struct iovec to = {&byte, 1}, from = {(void *)(uintptr_t)at, 1};

		if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1)
			return false;
	}
	return true;
}

bool rn_mr_probe(uint64_t addr, uint64_t length, bool write)
{
	static _Atomic int too_old;
	uint64_t first = rn_page_down(addr), last = rn_page_up(addr + length);
	int err;

	if (!length)
		return true;
	if (addr + length < addr || last < first)
		return false;
	if (atomic_load_explicit(&too_old, memory_order_relaxed))
		return probe_by_reading(first, last);
	while ((err = madvise((void *)(uintptr_t)first, last - first,
			      write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) ? errno : 0)) {
		if (err == EINTR || err == EAGAIN)
			continue;
		if (err == EINVAL) {
			char here;

			/* Device mappings cause EINVAL as well: so probe memory that is known to be good. */
			if (madvise((void *)(uintptr_t)rn_page_down((uintptr_t)&here), rn_page(), MADV_POPULATE_READ)) {
				atomic_store_explicit(&too_old, 1, memory_order_relaxed);
				return probe_by_reading(first, last);
			}
		}
		return false;
	}
	return true;
}

/* --- advice --------------------------------------------------------------------------------------------------- */

/* Bring in what will be used soon. Of memory that is registered page by page there is nothing to bring in. */
int rn_advise_mr(struct ibv_pd *ibv_pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags, struct ibv_sge *list,
		 uint32_t num_sge)
{
	bool writes = advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
	uint32_t needed = writes ? RN_ACCESS_LOCAL | IBV_ACCESS_LOCAL_WRITE : RN_ACCESS_LOCAL;
	int err = 0;

	if (rn_is_foreign(ibv_pd->context))
		return ENODEV;
	if (rn_context_is_dead(ibv_pd->context))
		return EIO;
	if (advice > IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT || flags & ~(uint32_t)IB_UVERBS_ADVISE_MR_FLAG_FLUSH)
		return EOPNOTSUPP;
	if (!num_sge)
		return EINVAL;
	for (uint32_t i = 0; i < num_sge && !err; i++) {
		const struct rn_mr_entry *mr = rn_mr_find(rn_mr_table, list[i].lkey);

		if (!mr || mr->pd != rn_pd(ibv_pd)->number || !rn_mr_covers(mr, list[i].addr, list[i].length))
			err = ENOENT;
		else if ((mr->access & needed) != needed)
			err = EPERM;
		else if (advice != IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT && mr->kind == RN_MR_ON_DEMAND &&
			 !rn_mr_probe(mr->base + (list[i].addr - mr->iova), list[i].length, writes))
			err = EFAULT;
	}
	return err;
}
