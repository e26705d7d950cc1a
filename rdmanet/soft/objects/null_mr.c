/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The null region: what is written to it vanishes, what is read from it is zeros.
 *
 * Any address is valid in it, so a message of any length must find memory to be copied to.
 * There are two windows of the largest message's length, made for the first region and kept as long
 * as any context is open:
 *
 *     base                        base + RN_MAX_MESSAGE
 *       | a few MiB of scratch,     | zeros that can't be written: the kernel's one
 *       | again and again           | page of them, as often as it takes
 *
 * So on the data path only the line that turns an address into a pointer deals with it.  It is for local use: its only
 * right is that its owner's receives and READs may write it.
 */
#include <sys/mman.h>
#include <unistd.h>

#include "objects/mr.h"

enum { SCRATCH = 16 << 20 };

static char *windows; /* with rn_process_lock held */

static void make_windows(void)
{
	int fd = memfd_create("rdmanet-null", MFD_CLOEXEC);
	char *base = mmap(NULL, 2ul * RN_MAX_MESSAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	bool good = fd >= 0 && base != MAP_FAILED && !ftruncate(fd, SCRATCH);

	for (size_t at = 0; good && at < RN_MAX_MESSAGE; at += SCRATCH)
		good = mmap(base + at, SCRATCH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) !=
		       MAP_FAILED;
	if (fd >= 0)
		close(fd);
	if (good)
		windows = base;
	else if (base != MAP_FAILED)
		munmap(base, 2ul * RN_MAX_MESSAGE);
}

struct ibv_mr *rn_alloc_null_mr(struct ibv_pd *pd)
{
	struct rn_mr_entry entry = {.access = IBV_ACCESS_LOCAL_WRITE, .kind = RN_MR_NULL, .length = SIZE_MAX};

	if (rn_is_foreign(pd->context)) {
		errno = ENODEV;
		return NULL;
	}
	pthread_mutex_lock(&rn_process_lock);
	if (!windows)
		make_windows();
	entry.base = (uintptr_t)windows;
	pthread_mutex_unlock(&rn_process_lock);
	if (!entry.base) {
		errno = ENOMEM;
		return NULL;
	}
	return rn_reg_entry(pd, &entry);
}

/* The last context has closed. With rn_process_lock held. */
void rn_null_close(void)
{
	if (windows)
		munmap(windows, 2ul * RN_MAX_MESSAGE);
	windows = NULL;
}
