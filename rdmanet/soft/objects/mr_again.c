/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registering again (ibv_rereg_mr): other memory, another PD or other rights under the same key.
 *
 * It happens as a whole or not at all.  It waits for the users of the old entry, as a withdrawal does; if a process
 * was stopped while using it, the call fails with EBUSY.
 */
#include "objects/mr.h"
#include "objects/mw.h"

enum { CHANGES_PLACE = IBV_REREG_MR_CHANGE_TRANSLATION, CHANGES_PD = IBV_REREG_MR_CHANGE_PD,
       CHANGES_ACCESS = IBV_REREG_MR_CHANGE_ACCESS };

/* What the entry will say when the memory stays where it is. 0 or errno. */
static int plan_access(const struct rn_mr_entry *old, unsigned access, struct rn_mr_entry *entry)
{
	int err = rn_mr_check_access(access);

	*entry = *old;
	entry->access = access;
	if (err)
		return err;
	if ((access ^ old->access) & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED))
		return EINVAL; /* how it is reached, and by which addresses, was fixed with the memory */
	if (old->kind == RN_MR_USER && access & IBV_ACCESS_LOCAL_WRITE && old->length != SIZE_MAX &&
	    !rn_mr_probe(old->base, old->length, true))
		return EFAULT;
	return 0;
}

/* Under the same key, so users of the key see the change, and never a key that means something else. 0 or errno. */
static int replace(struct rn_mr *mr, struct rn_pd *pd, struct rn_mr_entry *entry)
{
	struct rn_context *context = rn_context(mr->mr.context);
	uint32_t key = mr->mr.lkey;
	int err = 0;

	entry->pd = pd->number;
	entry->access |= RN_ACCESS_LOCAL;
	pthread_mutex_lock(&context->mutex);
	if (!rn_mw_close_region(mr->index)) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	pthread_mutex_lock(&rn_process_lock);
	if (rn_mr_hide(mr)) {
		rn_mr_publish(entry, key);
		rn_pd(mr->mr.pd)->users--;
		pd->users++;
	} else {
		struct rn_mr_entry old = rn_mr_table[mr->index];

		rn_mr_publish(&old, key); /* a peer stopped while using it must not continue with another region */
		err = EBUSY;
	}
	pthread_mutex_unlock(&rn_process_lock);
	rn_mw_open_region(mr->index);
	pthread_mutex_unlock(&context->mutex);
	return err;
}

static int rereg_failed(int err, int how)
{
	errno = err;
	return how;
}

/* On error the region is as it was. */
RN_EXPORT int ibv_rereg_mr(struct ibv_mr *ibv_mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct rn_mr *mr = container_of(ibv_mr, struct rn_mr, mr);
	struct rn_segment *segment = mr->segment, *old_segment = mr->segment;
	const struct rn_mr_entry *old = &rn_mr_table[mr->index];
	struct rn_mr_entry entry;
	int err;

	if (rn_is_foreign(ibv_mr->context))
		return rereg_failed(ENODEV, IBV_REREG_MR_ERR_INPUT);
	if (rn_context_is_dead(ibv_mr->context))
		return rereg_failed(EIO, IBV_REREG_MR_ERR_INPUT);
	if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || (flags & CHANGES_PLACE && (!length || !addr)) ||
	    (flags & CHANGES_PD && (!pd || pd->context != ibv_mr->context)) || (access && !(flags & CHANGES_ACCESS)))
		return rereg_failed(EINVAL, IBV_REREG_MR_ERR_INPUT);
	if (!(flags & CHANGES_PD))
		pd = ibv_mr->pd;
	if (!(flags & CHANGES_ACCESS))
		access = old->access & ~RN_ACCESS_LOCAL;
	if (!(flags & CHANGES_PLACE))
		err = plan_access(old, access, &entry);
	else if (segment && !segment->remapped)
		err = EINVAL; /* a part of a file can't be replaced by memory */
	else
		err = rn_mr_plan(addr, length, access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)addr, access, &entry,
				 &segment);
	if (!err && flags & CHANGES_PLACE && !segment)
		rn_segment_unmapped(1);
	if (!err && (err = replace(mr, rn_pd(pd), &entry)) && flags & CHANGES_PLACE)
		rn_mr_release_memory(segment);
	if (err)
		return rereg_failed(err, IBV_REREG_MR_ERR_CMD);
	ibv_mr->pd = pd;
	if (flags & CHANGES_PLACE) {
		rn_mr_release_memory(old_segment);
		mr->segment = segment;
		ibv_mr->addr = addr;
		ibv_mr->length = length;
	}
	return 0;
}
