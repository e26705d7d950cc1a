/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a context is made of, and whether the device works.
 */
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bus_error.h"
#include "faults/iwarp.h"
#include "objects/context.h"

/* Set the fields by which it is imported: device/import.c. 0 or errno. */
static int open_file(struct rn_context *context)
{
	struct stat st;
	int fd = rn_fd_own(memfd_create("rdmanet-context", MFD_CLOEXEC));

	if (fd < 0 || fstat(fd, &st)) {
		int err = errno;

		rn_fd_close(fd);
		return err;
	}
	context->verbs.context.cmd_fd = fd;
	context->file_device = st.st_dev;
	context->file_inode = st.st_ino;
	return 0;
}

int rn_context_init(struct rn_context *context)
{
	struct rn_list *const lists[] = {
		&context->pds,
		&context->tds,
		&context->dms,
		&context->mrs,
		&context->mws,
		&context->channels,
		&context->cqs,
		&context->srqs,
		&context->xrcds,
		&context->ahs,
		&context->qps,
		&context->events,
	};
	int err;

	rn_bus_watch();
	context->process = rn_process;
	pthread_mutex_init(&context->mutex, NULL);
	pthread_mutex_init(&context->verbs.context.mutex, NULL);
	for (unsigned i = 0; i < sizeof lists / sizeof *lists; i++)
		rn_list_init(lists[i]);
	context->verbs.context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (context->verbs.context.async_fd < 0)
		return errno;
	err = open_file(context);
	if (err)
		close(context->verbs.context.async_fd);
	return err;
}

void rn_context_destroy(struct rn_context *context)
{
	while (!rn_list_empty(&context->events)) {
		struct rn_event *event = container_of(context->events.next, struct rn_event, link);

		rn_list_del(&event->link);
		free(event);
	}
	close(context->verbs.context.async_fd);
	rn_fd_close(context->verbs.context.cmd_fd);
	pthread_mutex_destroy(&context->mutex);
	pthread_mutex_destroy(&context->verbs.context.mutex);
}

int rn_device_check(struct rn_context *context, enum rn_call call)
{
	if (rn_settings.iwarp && !rn_iwarp_has(call))
		return EOPNOTSUPP;
	if (unlikely(atomic_load(&context->injector.is_dead)) && call != RN_POST_SEND && call != RN_POST_RECV)
		return EIO;
	return rn_fault_call(&context->injector, call);
}

bool rn_context_is_dead(const struct ibv_context *context)
{
	return atomic_load(&container_of(context, struct rn_context, verbs.context)->injector.is_dead);
}
