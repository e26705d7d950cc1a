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
 * As in the kernel, nothing of it keeps the original alive: so all that is needed of it is taken
 * with its context's mutex held.
 */
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
	pthread_mutex_lock(&rn_contexts_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next) {
		context = container_of(at, struct rn_context, link);
		if (is_same(context, st.st_dev, st.st_ino))
			device = context->verbs.context.device;
	}
	pthread_mutex_unlock(&rn_contexts_lock);
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
	pthread_mutex_lock(&rn_contexts_lock);
	context->file_device = st.st_dev;
	context->file_inode = st.st_ino;
	pthread_mutex_unlock(&rn_contexts_lock);
	return ibv_context;
}

/* Of each context of this file, each item of its list (at this offset), until one is taken: what it is, and what to
 * take of it, is in `what`. */
static bool find(const struct rn_context *of, size_t list, bool (*take)(struct rn_list *, void *), void *what)
{
	bool found = false;

	pthread_mutex_lock(&rn_contexts_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts && !found; at = at->next) {
		struct rn_context *context = container_of(at, struct rn_context, link);
		struct rn_list *head = (struct rn_list *)((char *)context + list);

		if (!is_same(context, of->file_device, of->file_inode))
			continue;
		pthread_mutex_lock(&context->mutex);
		for (struct rn_list *item = head->next; item != head && !found; item = item->next)
			found = take(item, what);
		pthread_mutex_unlock(&context->mutex);
	}
	pthread_mutex_unlock(&rn_contexts_lock);
	return found;
}

static void *refuse(int err)
{
	errno = err;
	return NULL;
}

/* --- protection domains ----------------------------------------------------------------------------------- */

static bool is_pd(struct rn_list *item, void *handle)
{
	return container_of(item, struct rn_pd, link)->number == *(uint32_t *)handle;
}

RN_EXPORT struct ibv_pd *ibv_import_pd(struct ibv_context *ibv_context, uint32_t handle)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_pd *pd;

	if (rn_is_foreign(ibv_context))
		return refuse(ENODEV);
	if (!find(context, offsetof(struct rn_context, pds), is_pd, &handle))
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

/* What the program sees of the other may just change: rereg. */
static bool take_mr(struct rn_list *item, void *what)
{
	const struct rn_mr *mr = container_of(item, struct rn_mr, link);
	struct ibv_mr *again = what;

	if (mr->index != again->handle || rn_mr_table[mr->index].pd != rn_pd(again->pd)->number)
		return false;
	again->lkey = again->rkey = mr->mr.lkey;
	again->length = rn_mr_table[mr->index].length;
	return true;
}

/* Without an address: the kernel doesn't know where the other has mapped it. */
RN_EXPORT struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct ibv_mr *mr;

	if (rn_is_foreign(pd->context))
		return refuse(ENODEV);
	mr = malloc(sizeof(*mr));
	if (!mr)
		return NULL;
	*mr = (struct ibv_mr){.context = pd->context, .pd = pd, .handle = handle};
	if (find(rn_context(pd->context), offsetof(struct rn_context, mrs), take_mr, mr))
		return mr;
	free(mr);
	return refuse(ENOENT);
}

RN_EXPORT void ibv_unimport_mr(struct ibv_mr *mr)
{
	free(mr);
}

/* --- device memory ---------------------------------------------------------------------------------------------- */

static bool take_dm(struct rn_list *item, void *what)
{
	return rn_dm_share(item, what);
}

RN_EXPORT struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle)
{
	struct rn_dm_share share = {.handle = handle};

	if (rn_is_foreign(context))
		return refuse(ENODEV);
	if (!find(rn_context(context), offsetof(struct rn_context, dms), take_dm, &share))
		return refuse(ENOENT);
	return rn_dm_again(context, &share);
}

RN_EXPORT void ibv_unimport_dm(struct ibv_dm *dm)
{
	rn_free_dm(dm);
}
