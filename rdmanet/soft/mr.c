/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory regions: keys, segments, and what it takes to withdraw them.
 *
 * A key is index << 8 | generation, so it is found by one array access, and a key that was
 * deregistered stays wrong for 255 further uses of its index; indexes are handed out in turn,
 * from a random start, which makes that a long time.
 *
 * Device memory.  ibv_reg_dmabuf_mr takes a memfd that is sealed against shrinking and growing.
 * The file becomes a segment, known to peers by a number that is never used twice, and mapped by
 * whoever needs it; regions of one file share its segment.  We map it ourselves as well: the user
 * may unmap his view of it as he likes.
 *
 * On-demand memory (IBV_ACCESS_ON_DEMAND; with addr NULL and length SIZE_MAX the whole address
 * space) may have holes.  rn_mr_probe() asks the kernel to bring a range in, which fails
 * where a fault would have killed us.  That costs some 200 ns a page, more than the copy itself. So a
 * program that knows what it posts (memory that it holds a reference to) may vouch for it: with the
 * access flag rdmanet_soft_access_vouched the whole address space is taken at its word.
 *
 * Deregistration invalidates the key, then waits for everybody who may have looked it up before:
 * our own posters hold their send lock meanwhile, peers their QP's busy word (see arena.h).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "adopt.h"
#include "soft.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum {
	PAGE = 4096,
	ACCESS_REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	ACCESS_KNOWN = IBV_ACCESS_LOCAL_WRITE | ACCESS_REMOTE | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND |
		       IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE,
};

alignas(PAGE) struct rn_mr_entry rn_mr_table[RN_MRS_MAX];

/* In the range of flags that a device which doesn't know them ignores (IBV_ACCESS_OPTIONAL_RANGE). */
RN_EXPORT const uint32_t rdmanet_soft_access_vouched = 1u << 29;

/* Guards the segments and the handing out of keys. Innermost: nothing is locked inside it. */
static pthread_mutex_t mr_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct rn_list segments = {&segments, &segments};
static uint32_t last_segment;

/* Regions that peers reach without a mapping; while there are any, no memory is adopted. */
static _Atomic unsigned unmapped_regions;

static uint8_t *generations; /* of each index; 0 = taken */
static uint32_t next_index, taken;

/* A key that a stopped peer may still be using. */
struct quarantined {
	uint32_t key;
	struct rn_segment *segment;
	uint32_t pd;
	struct quarantined *next;
};
static struct quarantined *quarantine; /* with rn_world held */

/* --- trying memory --------------------------------------------------------------------------------- */

/* For kernels before 5.14: read a byte of each page. */
static bool probe_by_reading(uint64_t first, uint64_t last)
{
	char byte;

	for (uint64_t at = first; at < last; at += PAGE) {
		struct iovec to = {&byte, 1}, from = {(void *)(uintptr_t)at, 1};

		if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1)
			return false;
	}
	return true;
}

bool rn_mr_probe(uint64_t addr, uint64_t length, bool write)
{
	static _Atomic int too_old;
	uint64_t first = addr & ~(uint64_t)(PAGE - 1), last = (addr + length + PAGE - 1) & ~(uint64_t)(PAGE - 1);
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

			/* Device mappings say EINVAL as well: so ask about memory that is good. */
			if (madvise((void *)((uintptr_t)&here & ~(uintptr_t)(PAGE - 1)), PAGE, MADV_POPULATE_READ)) {
				atomic_store_explicit(&too_old, 1, memory_order_relaxed);
				return probe_by_reading(first, last);
			}
		}
		return false;
	}
	return true;
}

/* --- segments: with mr_mutex held -------------------------------------------------------------------- */

static int segment_get(int fd, struct rn_segment **found)
{
	struct rn_segment *segment;
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	/* Whoever maps it must never meet a fault: neither we nor any peer. */
	if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
		return EINVAL;
	if (fstat(fd, &st))
		return errno;
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		segment = container_of(at, struct rn_segment, link);
		if (segment->device == st.st_dev && segment->inode == st.st_ino) {
			segment->users++;
			*found = segment;
			return 0;
		}
	}

	segment = calloc(1, sizeof(*segment));
	if (!segment)
		return ENOMEM;
	segment->fd = rn_fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 3));
	segment->size = st.st_size;
	segment->base = segment->fd < 0 ? MAP_FAILED
					: mmap(NULL, segment->size, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
	if (segment->base == MAP_FAILED) {
		int err = errno;

		rn_fd_close(segment->fd);
		free(segment);
		return err;
	}
	segment->id = ++last_segment;
	segment->device = st.st_dev;
	segment->inode = st.st_ino;
	segment->users = 1;
	rn_list_add(&segments, &segment->link);
	*found = segment;
	return 0;
}

static struct rn_adopted adopted_by(const struct rn_segment *segment)
{
	return (struct rn_adopted){
		.start = segment->adopted,
		.size = segment->size,
		.base = segment->base,
		.device = segment->device,
		.inode = segment->inode,
	};
}

/* The segment in which this memory lies, or lies from now on; NULL: it can't. */
static struct rn_segment *segment_adopt(uint64_t addr, size_t length)
{
	uint64_t start = addr & ~(uint64_t)(PAGE - 1), end = (addr + length + PAGE - 1) & ~(uint64_t)(PAGE - 1);
	bool is_alone = rn_adopt_alone();
	struct rn_segment *found = NULL;
	int fd;

	pthread_mutex_lock(&mr_mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);
		struct rn_adopted adopted = adopted_by(segment);

		if (!adopted.start || end <= adopted.start || start >= adopted.start + adopted.size)
			continue;
		if (start >= adopted.start && end <= adopted.start + adopted.size &&
		    rn_adopted_holds(&adopted, start, end)) {
			segment->users++;
			found = segment;
		}
		goto out;
	}
	if (!is_alone || unmapped_regions)
		goto out;
	fd = rn_adopt(start, end);
	if (fd >= 0 && !segment_get(fd, &found))
		found->adopted = start;
	if (fd >= 0)
		close(fd);
out:
	pthread_mutex_unlock(&mr_mutex);
	return found;
}

static void segment_put(struct rn_segment *segment)
{
	if (!segment)
		return;
	pthread_mutex_lock(&mr_mutex);
	if (--segment->users) {
		pthread_mutex_unlock(&mr_mutex);
		return;
	}
	rn_list_del(&segment->link);
	pthread_mutex_unlock(&mr_mutex);
	rn_segment_gone(segment->id);
	if (segment->adopted && rn_adopt_alone()) {
		struct rn_adopted adopted = adopted_by(segment);

		rn_adopted_give_back(&adopted);
	}
	munmap(segment->base, segment->size);
	rn_fd_close(segment->fd);
	free(segment);
}

/* A copy, since another thread may deregister the region and close the descriptor meanwhile. */
int rn_segment_fd(uint32_t id, size_t *size)
{
	int fd = -1;

	pthread_mutex_lock(&mr_mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);

		if (segment->id == id) {
			fd = rn_fd_own(fcntl(segment->fd, F_DUPFD_CLOEXEC, 3));
			*size = segment->size;
		}
	}
	pthread_mutex_unlock(&mr_mutex);
	return fd;
}

/* --- keys ---------------------------------------------------------------------------------------------- */

uint32_t rn_mr_key_take(void)
{
	uint32_t key = 0;

	pthread_mutex_lock(&mr_mutex);
	if (!generations) {
		generations = malloc(RN_MRS_MAX);
		if (!generations || getrandom(generations, RN_MRS_MAX, 0) < 0 ||
		    getrandom(&next_index, sizeof(next_index), 0) < 0)
			goto out;
		for (unsigned i = 0; i < RN_MRS_MAX; i++)
			generations[i] |= 1;
		next_index %= RN_MRS_MAX;
	}
	for (unsigned tried = 0; taken < RN_MRS_MAX - 1 && tried < RN_MRS_MAX; tried++) {
		uint32_t index = next_index++ % RN_MRS_MAX;

		/* Index 0 stays unused, so that key 0 is never valid. */
		if (!index || rn_mr_table[index].pd)
			continue;
		if (!++generations[index])
			generations[index] = 1;
		key = index << 8 | generations[index];
		rn_mr_table[index].pd = UINT32_MAX; /* taken */
		taken++;
		break;
	}
out:
	pthread_mutex_unlock(&mr_mutex);
	return key;
}

void rn_mr_key_give_back(uint32_t key)
{
	uint32_t index = key >> 8;

	rn_mw_open_region(index);
	pthread_mutex_lock(&mr_mutex);
	generations[index] = key & 0xff; /* the next one is another, also after keys that a program chose */
	rn_mr_table[index].pd = 0;
	taken--;
	pthread_mutex_unlock(&mr_mutex);
}

/* Fill both copies of the table; the key goes in last. */
static void entry_publish(struct rn_mr_entry *entry, const struct rn_mr_entry *from, uint32_t key)
{
	entry->pd = from->pd;
	entry->access = from->access;
	entry->kind = from->kind;
	entry->iova = from->iova;
	entry->length = from->length;
	entry->base = from->base;
	entry->offset = from->offset;
	entry->segment = from->segment;
	entry->qpn = from->qpn;
	atomic_store_explicit(&entry->key, key, memory_order_release);
}

void rn_mr_publish(const struct rn_mr_entry *entry, uint32_t key)
{
	entry_publish(&rn_mr_table[key >> 8], entry, key);
	entry_publish(&rn_arena_mrs(rn_arena)[key >> 8], entry, key);
}

/* --- registering ---------------------------------------------------------------------------------------- */

static int check_access(unsigned access)
{
	if (access & ~ACCESS_KNOWN)
		return access & (IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT) ? EOPNOTSUPP : EINVAL;
	/* What a peer may write, the owner must be allowed to. */
	if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	return 0;
}

/* What hardware would lock into memory. 0 or errno. */
static int pin(struct rn_context *context, const struct rn_mr_entry *entry, uint64_t *pinned)
{
	int err = rn_chaos_call(context, RN_REG_MR);

	*pinned = entry->kind == RN_MR_ON_DEMAND || entry->length == SIZE_MAX ? 0 : entry->length;
	if (err)
		return err;
	pthread_mutex_lock(&context->mutex);
	err = rn_chaos_pin(context, *pinned);
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
		segment_put(segment);
		errno = err;
		return NULL;
	}
	mr = calloc(1, sizeof(*mr));
	key = mr ? rn_mr_key_take() : 0;
	if (!key) {
		free(mr);
		segment_put(segment);
		pthread_mutex_lock(&context->mutex);
		rn_chaos_unpin(context, pinned);
		pthread_mutex_unlock(&context->mutex);
		errno = ENOMEM;
		return NULL;
	}
	mr->pinned = pinned;
	mr->index = key >> 8;
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
		atomic_fetch_add(&unmapped_regions, 1);
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
static int plan_user(void *addr, size_t length, uint64_t iova, unsigned access, struct rn_mr_entry *entry,
		     struct rn_segment **segment)
{
	bool writes = access & IBV_ACCESS_LOCAL_WRITE;
	int err = check_access(access);

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
		if (!(access & IBV_ACCESS_ON_DEMAND) || access & ACCESS_REMOTE || iova)
			return EINVAL;
		if (access & rdmanet_soft_access_vouched)
			entry->kind = RN_MR_USER;
		return 0;
	}
	if (!length || (uintptr_t)addr + length < (uintptr_t)addr || iova + length < iova)
		return EINVAL;
	/* Hardware pins the pages; we can only make sure that they are there. */
	if (!(access & IBV_ACCESS_ON_DEMAND) && !rn_mr_probe((uintptr_t)addr, length, writes))
		return EFAULT;
	if (rn_settings.adopt && !(access & IBV_ACCESS_ON_DEMAND) && (*segment = segment_adopt((uintptr_t)addr, length))) {
		entry->kind = RN_MR_SEGMENT;
		entry->segment = (*segment)->id;
		entry->offset = (uintptr_t)addr - (*segment)->adopted;
		entry->base = (uintptr_t)(*segment)->base + entry->offset;
	}
	return 0;
}

static struct ibv_mr *reg_user(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct rn_mr_entry entry;
	struct rn_segment *segment;
	int err = rn_is_foreign(pd->context) ? ENODEV : plan_user(addr, length, iova, access, &entry, &segment);

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
	if ((err = check_access(access)))
		return refuse(err);
	if (iova + length < iova)
		return refuse(EINVAL);
	pthread_mutex_lock(&mr_mutex);
	err = segment_get(fd, &segment);
	pthread_mutex_unlock(&mr_mutex);
	if (err)
		return refuse(err);
	if (offset > segment->size || length > segment->size - offset) {
		segment_put(segment);
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
	return !length || (offset ^ iova) & (PAGE - 1) ? refuse(EINVAL) : rn_reg_memfd(pd, offset, length, iova, fd, access);
}

/* --- withdrawing ------------------------------------------------------------------------------------------ */

/*
 * Nobody who saw the key valid is at work any more?  With rn_world held, so queue pairs stay.
 * Our own posters first: locking and unlocking waits out whoever was inside.
 */
static bool wait_unused(uint32_t pd, uint64_t deadline)
{
	bool unused = !rn_qp_is_quarantined(pd) && !rn_pool_is_quarantined(pd) && rn_pools_wait_moved(pd, deadline);

	for (uint32_t i = 0; i < rn_qps_end; i++) {
		struct rn_qp *qp = rn_qps[i];

		if (!qp || !rn_qp_uses_pd(qp, pd))
			continue;
		rn_lock(&qp->sq_lock);
		rn_unlock(&qp->sq_lock);
		unused &= rn_qp_wait_moved(qp, deadline);
	}
	return unused;
}

static bool is_bounced_into(const struct rn_mr_entry *mr)
{
	return mr->kind == RN_MR_USER && mr->access & IBV_ACCESS_LOCAL_WRITE &&
	       !(mr->access & (ACCESS_REMOTE | IBV_ACCESS_MW_BIND));
}

/* Nobody is at work on it any more. */
static void release_memory(struct rn_segment *segment)
{
	if (segment)
		segment_put(segment);
	else
		atomic_fetch_sub(&unmapped_regions, 1);
}

/* Make its key invalid for everybody. False: a stopped peer may still be using it. With rn_world held. */
static bool hide(struct rn_mr *mr)
{
	uint32_t index = mr->index, pd = rn_mr_table[index].pd;

	rn_mr_reap(); /* nobody tells us when a stopped peer has moved on */
	/* First the peers' copy: what they have bounced goes by ours (bounce.c). */
	atomic_store(&rn_arena_mrs(rn_arena)[index].key, 0);
	if (is_bounced_into(&rn_mr_table[index])) {
		rn_fence();
		wait_unused(pd, rn_now_ns() + RN_IDLE_WAIT_NS);
		rn_bounce_settle(pd, atomic_load(&rn_mr_table[index].key));
	}
	atomic_store(&rn_mr_table[index].key, 0);
	rn_fence();
	return wait_unused(pd, rn_now_ns() + RN_IDLE_WAIT_NS);
}

/* With rn_world held. */
static void withdraw(struct rn_mr *mr)
{
	uint32_t pd = rn_mr_table[mr->index].pd;
	struct quarantined *aside;

	if (hide(mr)) {
		rn_mr_key_give_back(mr->mr.lkey);
		release_memory(mr->segment);
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
	rn_chaos_unpin(context, mr->pinned);
	pthread_mutex_lock(&rn_world);
	withdraw(mr);
	pthread_mutex_unlock(&rn_world);
	pd->users--;
	if (holder)
		--*holder;
	pthread_mutex_unlock(&context->mutex);
	return 0;
}

/* --- registering again ------------------------------------------------------------------------------------ */

enum { CHANGES_PLACE = IBV_REREG_MR_CHANGE_TRANSLATION, CHANGES_PD = IBV_REREG_MR_CHANGE_PD,
       CHANGES_ACCESS = IBV_REREG_MR_CHANGE_ACCESS };

/* What the entry will say when the memory stays where it is. 0 or errno. */
static int plan_access(const struct rn_mr_entry *old, unsigned access, struct rn_mr_entry *entry)
{
	int err = check_access(access);

	*entry = *old;
	entry->access = access;
	if (err)
		return err;
	if ((access ^ old->access) & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED))
		return EINVAL; /* how it is reached, and by which addresses, was settled with the memory */
	if (old->kind == RN_MR_USER && access & IBV_ACCESS_LOCAL_WRITE && old->length != SIZE_MAX &&
	    !rn_mr_probe(old->base, old->length, true))
		return EFAULT;
	return 0;
}

/* Under the same key, so whoever knows it sees the change and no gap in which it means something else. 0 or errno. */
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
	pthread_mutex_lock(&rn_world);
	if (hide(mr)) {
		rn_mr_publish(entry, key);
		rn_pd(mr->mr.pd)->users--;
		pd->users++;
	} else {
		struct rn_mr_entry old = rn_mr_table[mr->index];

		rn_mr_publish(&old, key); /* a peer that is stopped inside must not wake up to something else */
		err = EBUSY;
	}
	pthread_mutex_unlock(&rn_world);
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
	if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || (flags & CHANGES_PLACE && (!length || !addr)) ||
	    (flags & CHANGES_PD && (!pd || pd->context != ibv_mr->context)) || (access && !(flags & CHANGES_ACCESS)))
		return rereg_failed(EINVAL, IBV_REREG_MR_ERR_INPUT);
	if (!(flags & CHANGES_PD))
		pd = ibv_mr->pd;
	if (!(flags & CHANGES_ACCESS))
		access = old->access & ~RN_ACCESS_LOCAL;
	if (!(flags & CHANGES_PLACE))
		err = plan_access(old, access, &entry);
	else if (segment && !segment->adopted)
		err = EINVAL; /* a part of a file isn't replaced by memory */
	else
		err = plan_user(addr, length, (uintptr_t)addr, access, &entry, &segment);
	if (!err && flags & CHANGES_PLACE && !segment)
		atomic_fetch_add(&unmapped_regions, 1);
	if (!err && (err = replace(mr, rn_pd(pd), &entry)) && flags & CHANGES_PLACE)
		release_memory(segment);
	if (err)
		return rereg_failed(err, IBV_REREG_MR_ERR_CMD);
	ibv_mr->pd = pd;
	if (flags & CHANGES_PLACE) {
		release_memory(old_segment);
		mr->segment = segment;
		ibv_mr->addr = addr;
		ibv_mr->length = length;
	}
	return 0;
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

/* --- the end ----------------------------------------------------------------------------------------------- */

void rn_mr_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->mrs))
		ibv_dereg_mr(&container_of(context->mrs.next, struct rn_mr, link)->mr);
}

void rn_mr_reap(void)
{
	uint32_t used_pd = 0; /* most are of one: ask once */

	for (struct quarantined **at = &quarantine; *at;) {
		struct quarantined *aside = *at;

		if (aside->pd == used_pd || !wait_unused(aside->pd, 0)) {
			used_pd = aside->pd;
			at = &aside->next;
			continue;
		}
		rn_mr_key_give_back(aside->key);
		release_memory(aside->segment);
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

unsigned rn_mr_count_mappings(void)
{
	unsigned count = 0;

	pthread_mutex_lock(&mr_mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next)
		count++;
	pthread_mutex_unlock(&mr_mutex);
	return count;
}

/* The last context has closed: nothing is registered, nobody is served. */
void rn_mr_close(void)
{
	rn_mr_reap();
}

void rn_mr_forked(void)
{
	pthread_mutex_init(&mr_mutex, NULL);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);

		if (segment->adopted) {
			struct rn_adopted adopted = adopted_by(segment);

			rn_adopted_give_back(&adopted);
		}
		if (segment->base)
			mmap(segment->base, segment->size, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	}
	rn_list_init(&segments);
	madvise(rn_mr_table, sizeof(rn_mr_table), MADV_DONTNEED); /* zeros, without touching 4 MiB */
	taken = 0;
	quarantine = NULL;
	atomic_store(&unmapped_regions, 0);
}
