/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory regions: registering and withdrawing them.  mr.h lists the other files.
 *
 * Deregistration invalidates the key, then waits for every user that may have looked it up before (quiesce.h).
 */
#include <stdlib.h>

#include "base/page.h"
#include "objects/eager.h"
#include "objects/mr.h"
#include "objects/mw.h"
#include "objects/qp.h"
#include "objects/quiesce.h"

enum {
	ACCESS_KNOWN = IBV_ACCESS_LOCAL_WRITE | RN_ACCESS_REMOTE | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
		       IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE,
};

/* In the range of flags that devices ignore if they don't know them (IBV_ACCESS_OPTIONAL_RANGE). */
RN_EXPORT const uint32_t rdmanet_soft_access_vouched = 1u << 29;
RN_EXPORT const uint32_t rdmanet_soft_place_bytes = 2u << 20;

/* A key that a stopped peer may still be using. */
struct quarantined {
	uint32_t key;
	struct rn_segment *segment;
	uint32_t pd;
	struct quarantined *next;
};
static struct quarantined *quarantine; /* with rn_process_lock held */

/* --- registering ---------------------------------------------------------------------------------------- */

int rn_mr_check_access(unsigned access)
{
	if (access & ~ACCESS_KNOWN)
		return access & (IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT) ? EOPNOTSUPP : EINVAL;
	/* The owner must have the right to write what a peer may write. */
	if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	return 0;
}

/* Count the bytes that hardware would lock into memory. 0 or errno. */
static int pin(struct rn_context *context, const struct rn_mr_entry *entry, uint64_t *pinned)
{
	int err = rn_device_check(context, RN_REG_MR);

	*pinned = entry->kind == RN_MR_ON_DEMAND || entry->length == SIZE_MAX ? 0 : entry->length;
	if (err)
		return err;
	pthread_mutex_lock(&context->mutex);
	err = rn_fault_pin(&context->injector, *pinned);
	pthread_mutex_unlock(&context->mutex);
	return err;
}

static struct ibv_mr *publish(struct ibv_pd *ibv_pd, void *addr, struct rn_mr_entry *entry, struct rn_segment *segment)
{
	struct rn_context *context = rn_context(ibv_pd->context);
	struct rn_pd *pd = rn_pd(ibv_pd);
	struct rn_mr *mr;
	uint64_t pinned;
	int err = pin(context, entry, &pinned);
	uint32_t key;

	if (err) {
		rn_segment_put(segment);
		errno = err;
		return NULL;
	}
	mr = calloc(1, sizeof(*mr));
	key = mr ? rn_mr_key_take() : 0;
	if (!key) {
		free(mr);
		rn_segment_put(segment);
		pthread_mutex_lock(&context->mutex);
		rn_fault_unpin(&context->injector, pinned);
		pthread_mutex_unlock(&context->mutex);
		errno = ENOMEM;
		return NULL;
	}
	mr->pinned = pinned;
	mr->index = rn_mr_index(key);
	mr->segment = segment;
	mr->mr = (struct ibv_mr){
		.context = ibv_pd->context,
		.pd = ibv_pd,
		.addr = addr,
		.length = entry->length,
		.handle = mr->index,
		.lkey = key,
		.rkey = key,
	};
	if (!segment)
		rn_segment_unmapped(1);
	entry->pd = pd->number;
	entry->access |= RN_ACCESS_LOCAL;
	rn_mr_publish(entry, key);

	pthread_mutex_lock(&context->mutex);
	pd->users++;
	rn_list_add(&context->mrs, &mr->link);
	pthread_mutex_unlock(&context->mutex);
	return &mr->mr;
}

struct ibv_mr *rn_reg_entry(struct ibv_pd *pd, struct rn_mr_entry *entry)
{
	return publish(pd, NULL, entry, NULL);
}

static struct ibv_mr *refuse(int err)
{
	errno = err;
	return NULL;
}

/* What the entry of this memory will say, and the segment that it has become part of, if any. 0 or errno. */
int rn_mr_plan(void *addr, size_t length, uint64_t iova, unsigned access, struct rn_mr_entry *entry,
		     struct rn_segment **segment)
{
	bool writes = access & IBV_ACCESS_LOCAL_WRITE;
	int err = rn_mr_check_access(access);

	*segment = NULL;
	*entry = (struct rn_mr_entry){
		.access = access,
		.iova = iova,
		.length = length,
		.base = (uintptr_t)addr,
		.kind = access & IBV_ACCESS_ON_DEMAND ? RN_MR_ON_DEMAND : RN_MR_USER,
	};
	if (err)
		return err;
	if (!addr && length == SIZE_MAX) {
		/* The whole address space: for our own work requests only. */
		if (!(access & IBV_ACCESS_ON_DEMAND) || access & RN_ACCESS_REMOTE || iova)
			return EINVAL;
		if (access & rdmanet_soft_access_vouched)
			entry->kind = RN_MR_USER;
		return 0;
	}
	if (!length || (uintptr_t)addr + length < (uintptr_t)addr || iova + length < iova)
		return EINVAL;
	/* Hardware pins the pages; we can only make sure that they are there, unless the program knows that. */
	if (!(access & (IBV_ACCESS_ON_DEMAND | rdmanet_soft_access_vouched)) &&
	    !rn_mr_probe((uintptr_t)addr, length, writes))
		return EFAULT;
	if (rn_settings.remap && !(access & IBV_ACCESS_ON_DEMAND) &&
	    (*segment = rn_segment_remap((uintptr_t)addr, length))) {
		entry->kind = RN_MR_SEGMENT;
		entry->segment = (*segment)->id;
		entry->offset = (uintptr_t)addr - (*segment)->remapped;
		entry->base = (uintptr_t)(*segment)->base + entry->offset;
	}
	return 0;
}

static struct ibv_mr *reg_user(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct rn_mr_entry entry;
	struct rn_segment *segment;
	int err = rn_is_foreign(pd->context) ? ENODEV : rn_mr_plan(addr, length, iova, access, &entry, &segment);

	return err ? refuse(err) : publish(pd, addr, &entry, segment);
}

RN_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	uint64_t iova = access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)addr;

	return reg_user(pd, addr, length, iova, access);
}

RN_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return reg_user(pd, addr, length, iova, access);
}

RN_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	return reg_user(pd, addr, length, iova, access);
}

struct ibv_mr *rn_reg_memfd(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, unsigned access)
{
	struct rn_mr_entry entry = {.access = access, .kind = RN_MR_SEGMENT, .iova = iova, .length = length};
	struct rn_segment *segment = NULL;
	int err;

	if (rn_is_foreign(pd->context))
		return refuse(ENODEV);
	if ((err = rn_mr_check_access(access)))
		return refuse(err);
	if (iova + length < iova)
		return refuse(EINVAL);
	if ((err = rn_segment_of_file(fd, &segment)))
		return refuse(err);
	if (offset > segment->size || length > segment->size - offset) {
		rn_segment_put(segment);
		return refuse(EINVAL);
	}
	entry.base = (uintptr_t)segment->base + offset;
	entry.offset = offset;
	entry.segment = segment->id;
	return publish(pd, (void *)(uintptr_t)offset, &entry, segment);
}

RN_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
					   int access)
{
	return !length || (offset ^ iova) & (rn_page() - 1) ? refuse(EINVAL)
							  : rn_reg_memfd(pd, offset, length, iova, fd, access);
}

/* --- withdrawing ------------------------------------------------------------------------------------------ */

static bool may_receive_eagerly(const struct rn_mr_entry *mr)
{
	return mr->kind == RN_MR_USER && mr->access & IBV_ACCESS_LOCAL_WRITE &&
	       !(mr->access & (RN_ACCESS_REMOTE | IBV_ACCESS_MW_BIND));
}

/* Release the memory: nobody uses it any more. */
void rn_mr_release_memory(struct rn_segment *segment)
{
	if (segment)
		rn_segment_put(segment);
	else
		rn_segment_unmapped(-1);
}

/* Make its key invalid. False: a stopped peer may still be using it. With rn_process_lock held. */
bool rn_mr_hide(struct rn_mr *mr)
{
	uint32_t index = mr->index, pd = rn_mr_table[index].pd;

	rn_mr_reap(); /* we are not notified when a stopped peer has moved on */
	/* First the peers' copy: messages left in eager buffers are copied by ours (eager.c). */
	atomic_store(&rn_arena_mrs(rn_arena)[index].key, 0);
	if (may_receive_eagerly(&rn_mr_table[index])) {
		rn_quiesce_region(pd);
		rn_eager_settle(pd, atomic_load(&rn_mr_table[index].key));
	}
	atomic_store(&rn_mr_table[index].key, 0);
	return rn_quiesce_region(pd);
}

static void give_back(uint32_t key)
{
	rn_mw_open_region(rn_mr_index(key)); /* to windows of whoever has its index next */
	rn_mr_key_give_back(key);
}

/* With rn_process_lock held. */
static void withdraw(struct rn_mr *mr)
{
	uint32_t pd = rn_mr_table[mr->index].pd;
	struct quarantined *aside;

	if (rn_mr_hide(mr)) {
		give_back(mr->mr.lkey);
		rn_mr_release_memory(mr->segment);
	} else if ((aside = malloc(sizeof(*aside)))) {
		*aside = (struct quarantined){.key = mr->mr.lkey, .segment = mr->segment, .pd = pd, .next = quarantine};
		quarantine = aside;
	} /* else it is never reused: the same, but for the counter */
	rn_list_del(&mr->link);
	free(mr);
}

RN_EXPORT int ibv_dereg_mr(struct ibv_mr *ibv_mr)
{
	struct rn_mr *mr = container_of(ibv_mr, struct rn_mr, mr);
	struct rn_context *context = rn_context(ibv_mr->context);
	struct rn_pd *pd = rn_pd(ibv_mr->pd);
	unsigned *holder = mr->holder;

	if (rn_is_foreign(ibv_mr->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (!rn_mw_close_region(mr->index)) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_fault_unpin(&context->injector, mr->pinned);
	pthread_mutex_lock(&rn_process_lock);
	withdraw(mr);
	pthread_mutex_unlock(&rn_process_lock);
	pd->users--;
	if (holder)
		--*holder;
	pthread_mutex_unlock(&context->mutex);
	return 0;
}

/* --- the end ----------------------------------------------------------------------------------------------- */

void rn_mr_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->mrs))
		ibv_dereg_mr(&container_of(context->mrs.next, struct rn_mr, link)->mr);
}

void rn_mr_reap(void)
{
	uint32_t used_pd = 0; /* most have the same: ask once */

	for (struct quarantined **at = &quarantine; *at;) {
		struct quarantined *aside = *at;

		if (aside->pd == used_pd || !rn_is_quiet(aside->pd)) {
			used_pd = aside->pd;
			at = &aside->next;
			continue;
		}
		give_back(aside->key);
		rn_mr_release_memory(aside->segment);
		*at = aside->next;
		free(aside);
	}
}

unsigned rn_mr_count_quarantined(void)
{
	unsigned count = 0;

	for (struct quarantined *at = quarantine; at; at = at->next)
		count++;
	return count;
}

/* The last context has closed: nothing is registered, and no peer is served. */
void rn_mr_close(void)
{
	rn_mr_reap();
}

void rn_mr_forked(void)
{
	rn_segment_forked();
	rn_mr_key_forked();
	quarantine = NULL;
}
