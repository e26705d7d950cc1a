/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena's memory: one memfd, sealed so that no mapping of it can ever fault, and a heap in
 * its last part.
 *
 * The heap is for receive rings: few, long-lived, a few KiB to a MiB.  First fit over a list
 * of free ranges, sorted by offset and merged, in private memory (nothing a peer scribbles can
 * mislead it).  A range that is freed is given back to the kernel when it spans whole pages, and
 * reads as zeros afterwards in every process.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/engine.h"
#include "base/process.h"
#include "shm/arena.h"

enum { UNIT = 64, PAGE = 4096 };

struct range {
	uint64_t offset, bytes;
	struct range *next;
};

char *rn_arena;

static int arena_fd = -1;
static unsigned arena_users;
static struct range *heap;
static pthread_mutex_t heap_mutex = PTHREAD_MUTEX_INITIALIZER;

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

/* Not executable; kernels before 6.3 lack the flag for that. */
static int create_memfd(void)
{
	unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd = memfd_create("rdmanet-arena", flags | MFD_NOEXEC_SEAL);

	return fd < 0 && errno == EINVAL ? memfd_create("rdmanet-arena", flags) : fd;
}

int rn_arena_open(void)
{
	struct rn_arena_head *head;
	struct range *all;
	char *map;
	int fd, err;

	if (arena_users) {
		arena_users++;
		return 0;
	}
	all = malloc(sizeof(*all));
	if (!all)
		return ENOMEM;
	fd = rn_fd_own(create_memfd());
	if (fd < 0 || ftruncate(fd, RN_ARENA_SIZE) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		goto failed;
	map = mmap(NULL, RN_ARENA_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (map == MAP_FAILED)
		goto failed;

	head = rn_arena_head(map);
	head->magic = RN_ARENA_MAGIC;
	head->size = RN_ARENA_SIZE;
	*all = (struct range){.offset = RN_ARENA_HEAP, .bytes = RN_ARENA_SIZE - RN_ARENA_HEAP};
	heap = all;
	arena_fd = fd;
	rn_arena = map;
	arena_users = 1;
	return 0;

failed:
	err = errno;
	rn_fd_close(fd);
	free(all);
	return err;
}

void rn_arena_close(void)
{
	if (--arena_users)
		return;
	munmap(rn_arena, RN_ARENA_SIZE);
	rn_arena = NULL;
	rn_fd_close(arena_fd);
	arena_fd = -1;
	while (heap) {
		struct range *next = heap->next;

		free(heap);
		heap = next;
	}
}

/*
 * In a forked child: the mapping is the parent's device. Objects made before the fork still point
 * there, so the addresses stay valid, as private zeros; the descriptor was closed already.
 */
void rn_arena_forked(void)
{
	if (rn_arena)
		mmap(rn_arena, RN_ARENA_SIZE, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	rn_arena = NULL;
	arena_fd = -1;
	arena_users = 0;
	heap = NULL; /* another thread may have been changing the list: leave it */
	pthread_mutex_init(&heap_mutex, NULL);
}

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + UNIT - 1) & ~(uint64_t)(UNIT - 1);
}

uint64_t rn_arena_alloc(uint64_t bytes)
{
	uint64_t offset = 0;

	bytes = round_up(bytes);
	pthread_mutex_lock(&heap_mutex);
	for (struct range **at = &heap; *at; at = &(*at)->next) {
		struct range *range = *at;

		if (range->bytes < bytes)
			continue;
		offset = range->offset;
		range->offset += bytes;
		range->bytes -= bytes;
		if (!range->bytes) {
			*at = range->next;
			free(range);
		}
		break;
	}
	pthread_mutex_unlock(&heap_mutex);
	return offset;
}

void rn_arena_free(uint64_t offset, uint64_t bytes)
{
	struct range **at, *range, *before = NULL;
	uint64_t first = (offset + PAGE - 1) & ~(uint64_t)(PAGE - 1), last;

	if (!offset)
		return;
	bytes = round_up(bytes);
	last = (offset + bytes) & ~(uint64_t)(PAGE - 1);
	if (last > first)
		madvise(rn_arena + first, last - first, MADV_REMOVE);

	pthread_mutex_lock(&heap_mutex);
	for (at = &heap; *at && (*at)->offset < offset; at = &(*at)->next)
		before = *at;
	range = *at;
	if (before && before->offset + before->bytes == offset) {
		before->bytes += bytes;
		if (range && before->offset + before->bytes == range->offset) {
			before->bytes += range->bytes;
			before->next = range->next;
			free(range);
		}
	} else if (range && offset + bytes == range->offset) {
		range->offset = offset;
		range->bytes += bytes;
	} else if ((range = malloc(sizeof(*range)))) {
		*range = (struct range){.offset = offset, .bytes = bytes, .next = *at};
		*at = range;
	} /* without memory for the note the range is lost until the arena closes */
	pthread_mutex_unlock(&heap_mutex);
}

int rn_arena_fd(void)
{
	return arena_fd;
}

size_t rn_arena_size(void)
{
	return RN_ARENA_SIZE;
}

/* The responder's block in its owner's arena, by number; NULL when its process hasn't such a port. */
struct rn_qp_block *rn_arena_locate(char *arena, uint32_t qpn)
{
	for (uint32_t group = 0; group < RN_PORTS_MAX; group++)
		if (atomic_load(&rn_arena_head(arena)->ports[group]) == qpn >> 8)
			return rn_arena_qp(arena, group * 256 + (qpn & 0xff));
	return NULL;
}
