/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Importing: a second handle of what another context of this process has.
 *
 * The kernel lets a process hand its device's file over to another, which then works with the same protection domains,
 * regions and device memory.  Here they live in one process's arena, so only this process can import them; another one
 * finds nothing behind the file, and gets EOPNOTSUPP.  A context has a file only for this purpose: its inode is the
 * context's name.
 *
 * What is imported is a second struct for the same number: a domain with the number of the other,
 * a region with its key, device memory with its file.  Unimporting it takes away just that struct.
 * As in the kernel, nothing of it keeps the original alive.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects/dm.h"
#include "objects/mr.h"

static bool is_same(const struct rn_context *context, uint64_t device, uint64_t inode)
{
	return context->file_device == device && context->file_inode == inode;
}

/* If a context is returned, it owns the descriptor from here on. */
RN_EXPORT struct ibv_context *ibv_import_device(int cmd_fd)
{
	struct ibv_device *device = NULL;
	struct rn_context *context;
	struct ibv_context *ibv_context;
	struct stat st;

	if (fstat(cmd_fd, &st))
		return NULL;
	pthread_mutex_lock(&rn_process_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next) {
		context = container_of(at, struct rn_context, link);
		if (is_same(context, st.st_dev, st.st_ino))
			device = context->verbs.context.device;
	}
	pthread_mutex_unlock(&rn_process_lock);
	if (!device) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	ibv_context = ibv_open_device(device);
	if (!ibv_context)
		return NULL;
	context = rn_context(ibv_context);
	rn_fd_close(ibv_context->cmd_fd);
	ibv_context->cmd_fd = rn_fd_own(cmd_fd);
	context->file_device = st.st_dev;
	context->file_inode = st.st_ino;
	return ibv_context;
}

/* The context of this file whose list (at this offset) has such an item. */
static struct rn_list *find(struct rn_context *of, size_t list, bool (*is_it)(struct rn_list *, uint32_t), uint32_t handle)
{
	struct rn_list *found = NULL;

	pthread_mutex_lock(&rn_process_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts && !found; at = at->next) {
		struct rn_context *context = container_of(at, struct rn_context, link);
		struct rn_list *head = (struct rn_list *)((char *)context + list);

		if (!is_same(context, of->file_device, of->file_inode))
			continue;
		for (struct rn_list *item = head->next; item != head && !found; item = item->next)
			if (is_it(item, handle))
				found = item;
	}
	pthread_mutex_unlock(&rn_process_lock);
	return found;
}

static void *refuse(int err)
{
	errno = err;
	return NULL;
}

/* --- protection domains ----------------------------------------------------------------------------------- */

static bool is_pd(struct rn_list *item, uint32_t handle)
{
	return container_of(item, struct rn_pd, link)->number == handle;
}

RN_EXPORT struct ibv_pd *ibv_import_pd(struct ibv_context *ibv_context, uint32_t handle)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_pd *pd;

	if (rn_is_foreign(ibv_context))
		return refuse(ENODEV);
	if (!find(context, offsetof(struct rn_context, pds), is_pd, handle))
		return refuse(ENOENT);
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->pd = (struct ibv_pd){.context = ibv_context, .handle = handle};
	pd->number = handle;
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->pds, &pd->link);
	pthread_mutex_unlock(&context->mutex);
	return &pd->pd;
}

/* With children it stays, until they and the context have gone. */
RN_EXPORT void ibv_unimport_pd(struct ibv_pd *pd)
{
	ibv_dealloc_pd(pd);
}

/* --- regions ------------------------------------------------------------------------------------------------- */

static bool is_mr(struct rn_list *item, uint32_t handle)
{
	return container_of(item, struct rn_mr, link)->index == handle;
}

RN_EXPORT struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct rn_list *item;
	struct ibv_mr *mr;

	if (rn_is_foreign(pd->context))
		return refuse(ENODEV);
	item = find(rn_context(pd->context), offsetof(struct rn_context, mrs), is_mr, handle);
	if (!item || rn_pd(container_of(item, struct rn_mr, link)->mr.pd)->number != rn_pd(pd)->number)
		return refuse(ENOENT);
	mr = malloc(sizeof(*mr));
	if (!mr)
		return NULL;
	*mr = container_of(item, struct rn_mr, link)->mr;
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = NULL; /* the kernel doesn't know where the other has mapped it */
	return mr;
}

RN_EXPORT void ibv_unimport_mr(struct ibv_mr *mr)
{
	free(mr);
}

/* --- device memory ---------------------------------------------------------------------------------------------- */

RN_EXPORT struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle)
{
	struct rn_list *item;

	if (rn_is_foreign(context))
		return refuse(ENODEV);
	item = find(rn_context(context), offsetof(struct rn_context, dms), rn_dm_is, handle);
	return item ? rn_dm_again(context, item) : refuse(ENOENT);
}

RN_EXPORT void ibv_unimport_dm(struct ibv_dm *dm)
{
	rn_free_dm(dm);
}
