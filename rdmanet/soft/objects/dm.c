/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory: memory of the adapter's own, which programs reach by copying or by work requests.
 *
 * It is a memfd, like the memory that peers map anyway; it is device memory by what a
 * program may do with it: it gets no pointer, offsets count from zero, copies are of whole words, and the amount is
 * limited.  A region of it is zero-based.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bus_error.h"
#include "objects/dm.h"
#include "objects/mr.h"

enum { WORD = 4, LARGEST_ALIGN_LOG = 12 };

struct rn_dm {
	struct ibv_dm dm;
	int fd;
	char *base;
	size_t length;
	bool imported; /* another handle counts it */
	unsigned users;
	struct rn_list link;
};

static _Atomic uint64_t used; /* of RN_MAX_DM, by all contexts */
static _Atomic uint32_t last_handle;

static int check_copy(const struct rn_dm *dm, uint64_t offset, size_t length)
{
	if (rn_is_foreign(dm->dm.context))
		return ENODEV;
	if (offset % WORD || length % WORD || offset > dm->length || length > dm->length - offset)
		return EINVAL;
	return 0;
}

static int copy_to(struct ibv_dm *ibv_dm, uint64_t offset, const void *from, size_t length)
{
	struct rn_dm *dm = container_of(ibv_dm, struct rn_dm, dm);
	int err = check_copy(dm, offset, length);
	const void *lost;

	if (!err && !rn_bus_copy(dm->base + offset, from, length, &lost))
		err = EFAULT;
	return err;
}

static int copy_from(void *to, struct ibv_dm *ibv_dm, uint64_t offset, size_t length)
{
	struct rn_dm *dm = container_of(ibv_dm, struct rn_dm, dm);
	int err = check_copy(dm, offset, length);
	const void *lost;

	if (!err && !rn_bus_copy(to, dm->base + offset, length, &lost))
		err = EFAULT;
	return err;
}

static int make_memory(struct rn_dm *dm)
{
	dm->fd = rn_fd_own(memfd_create("rdmanet-dm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
	if (dm->fd < 0)
		return errno;
	dm->base = MAP_FAILED;
	if (!ftruncate(dm->fd, dm->length) && !fcntl(dm->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		dm->base = mmap(NULL, dm->length, PROT_READ | PROT_WRITE, MAP_SHARED, dm->fd, 0);
	if (dm->base == MAP_FAILED) {
		int err = errno;

		rn_fd_close(dm->fd);
		return err;
	}
	return 0;
}

static void drop_memory(struct rn_dm *dm)
{
	munmap(dm->base, dm->length);
	rn_fd_close(dm->fd);
}

static struct ibv_dm *enlist(struct ibv_context *ibv_context, struct rn_dm *dm, uint32_t handle)
{
	struct rn_context *context = rn_context(ibv_context);

	dm->dm = (struct ibv_dm){
		.context = ibv_context,
		.memcpy_to_dm = copy_to,
		.memcpy_from_dm = copy_from,
		.handle = handle,
	};
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->dms, &dm->link);
	pthread_mutex_unlock(&context->mutex);
	return &dm->dm;
}

struct ibv_dm *rn_alloc_dm(struct ibv_context *ibv_context, struct ibv_alloc_dm_attr *attr)
{
	uint64_t before = atomic_load(&used);
	struct rn_dm *dm;

	errno = rn_is_foreign(ibv_context)                  ? ENODEV
		: attr->comp_mask                           ? EOPNOTSUPP
		: !attr->length || attr->length > RN_MAX_DM ? EINVAL
		: attr->log_align_req > LARGEST_ALIGN_LOG   ? EINVAL /* a page: it always is */
							    : rn_device_check(rn_context(ibv_context), RN_ALLOC_DM);
	if (errno)
		return NULL;
	do {
		if (attr->length > RN_MAX_DM - before) {
			errno = ENOMEM;
			return NULL;
		}
	} while (!atomic_compare_exchange_weak(&used, &before, before + attr->length));
	dm = calloc(1, sizeof(*dm));
	if (dm) {
		dm->length = attr->length;
		errno = make_memory(dm);
	}
	if (!dm || errno) {
		int err = errno;

		atomic_fetch_sub(&used, attr->length);
		free(dm);
		errno = err;
		return NULL;
	}
	return enlist(ibv_context, dm, ++last_handle);
}

bool rn_dm_share(struct rn_list *item, struct rn_dm_share *share)
{
	const struct rn_dm *dm = container_of(item, struct rn_dm, link);

	if (dm->dm.handle != share->handle)
		return false;
	share->length = dm->length;
	share->fd = rn_fd_own(fcntl(dm->fd, F_DUPFD_CLOEXEC, 3));
	if (share->fd < 0)
		share->fd = -errno;
	return true;
}

struct ibv_dm *rn_dm_again(struct ibv_context *context, const struct rn_dm_share *share)
{
	struct rn_dm *dm = calloc(1, sizeof(*dm));
	void *base = MAP_FAILED;

	if (dm && share->fd < 0)
		errno = -share->fd;
	else if (dm)
		base = mmap(NULL, share->length, PROT_READ | PROT_WRITE, MAP_SHARED, share->fd, 0);
	if (base == MAP_FAILED) {
		int err = errno;

		rn_fd_close(share->fd);
		free(dm);
		errno = err;
		return NULL;
	}
	dm->base = base;
	dm->length = share->length;
	dm->fd = share->fd;
	dm->imported = true;
	return enlist(context, dm, share->handle);
}

int rn_free_dm(struct ibv_dm *ibv_dm)
{
	struct rn_dm *dm = container_of(ibv_dm, struct rn_dm, dm);
	struct rn_context *context = rn_context(ibv_dm->context);
	bool is_used;

	if (rn_is_foreign(ibv_dm->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	is_used = dm->users;
	if (!is_used)
		rn_list_del(&dm->link);
	pthread_mutex_unlock(&context->mutex);
	if (is_used)
		return EBUSY;
	drop_memory(dm);
	if (!dm->imported)
		atomic_fetch_sub(&used, dm->length);
	free(dm);
	return 0;
}

struct ibv_mr *rn_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibv_dm, uint64_t offset, size_t length, unsigned access)
{
	struct rn_dm *dm = container_of(ibv_dm, struct rn_dm, dm);
	struct rn_context *context = rn_context(pd->context);
	struct ibv_mr *mr;

	if (pd->context != ibv_dm->context || !(access & IBV_ACCESS_ZERO_BASED) || access & IBV_ACCESS_ON_DEMAND ||
	    offset % WORD || offset > dm->length || length > dm->length - offset) {
		errno = EINVAL;
		return NULL;
	}
	mr = rn_reg_memfd(pd, offset, length, 0, dm->fd, access);
	if (!mr)
		return NULL;
	mr->addr = NULL;
	pthread_mutex_lock(&context->mutex);
	dm->users++;
	container_of(mr, struct rn_mr, mr)->holder = &dm->users;
	pthread_mutex_unlock(&context->mutex);
	return mr;
}

void rn_dm_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->dms))
		rn_free_dm(&container_of(context->dms.next, struct rn_dm, link)->dm);
}

void rn_dm_forked(void)
{
	atomic_store(&used, 0);
}
