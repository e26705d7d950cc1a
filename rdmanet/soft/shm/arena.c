/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena's memory: one memfd, sealed so that no mapping of it can ever fault, and a heap in
 * its last part.
 *
 * The heap is for receive rings: few, long-lived, a few KiB to a MiB.  First fit over a list
 * of free ranges, sorted by offset and merged, in private memory (nothing a peer scribbles can
 * mislead it).  A range that is freed is given back to the kernel when it spans whole pages, and
 * reads as zeros afterwards in every process.
 *
 * To give pages back and to get others is dear for a program that connects often.  So the last small ranges that were
 * freed are spare: they stay as they are for who wants as much next.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/engine.h"
#include "base/page.h"
#include "base/process.h"
#include "shm/arena.h"

enum { UNIT = 64, SPARES = 16, SPARE_BYTES = 256 << 10 }; /* 4 MiB at most, if all of it was touched */

struct range {
	uint64_t offset, bytes;
	struct range *next;
};

char *rn_arena;

static int arena_fd = -1;
static unsigned arena_users;
static struct range *heap;
static struct {
	uint64_t offset, bytes;
} spare[SPARES]; /* the oldest first */
static unsigned spares;
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
	spares = 0;
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

/* Take the first range that is large enough; 0: there is none. With the lock held. */
static uint64_t take(uint64_t bytes)
{
	for (struct range **at = &heap; *at; at = &(*at)->next) {
		struct range *range = *at;
		uint64_t offset = range->offset;

		if (range->bytes < bytes)
			continue;
		range->offset += bytes;
		range->bytes -= bytes;
		if (!range->bytes) {
			*at = range->next;
			free(range);
		}
		return offset;
	}
	return 0;
}

/* Insert a range into the list. With the lock held. */
static void put(uint64_t offset, uint64_t bytes)
{
	struct range **at, *range, *before = NULL;

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
}

static void give_pages_back(uint64_t offset, uint64_t bytes)
{
	uint64_t first = rn_page_up(offset), last = rn_page_down(offset + bytes);

	if (last > first)
		madvise(rn_arena + first, last - first, MADV_REMOVE);
}

/* The newest spare range of this size; 0: there is none. With the lock held. */
static uint64_t take_spare(uint64_t bytes)
{
	for (unsigned i = spares; i-- > 0;) {
		uint64_t offset = spare[i].offset;

		if (spare[i].bytes != bytes)
			continue;
		spares--;
		memmove(&spare[i], &spare[i + 1], (spares - i) * sizeof(spare[0]));
		return offset;
	}
	return 0;
}

/* Keep a range as it is. If there are too many, it becomes the oldest of them, which is to be freed; else false. */
static bool keep(uint64_t *offset, uint64_t *bytes)
{
	uint64_t oldest, its_bytes;
	bool is_full;

	pthread_mutex_lock(&heap_mutex);
	oldest = spare[0].offset;
	its_bytes = spare[0].bytes;
	is_full = spares == SPARES;
	if (is_full)
		memmove(&spare[0], &spare[1], --spares * sizeof(spare[0]));
	spare[spares].offset = *offset;
	spare[spares++].bytes = *bytes;
	pthread_mutex_unlock(&heap_mutex);
	*offset = oldest;
	*bytes = its_bytes;
	return is_full;
}

uint64_t rn_arena_alloc(uint64_t bytes)
{
	uint64_t offset;

	bytes = round_up(bytes);
	pthread_mutex_lock(&heap_mutex);
	offset = take_spare(bytes);
	if (!offset)
		offset = take(bytes);
	while (!offset && spares) { /* they may be in the way */
		spares--;
		put(spare[spares].offset, spare[spares].bytes);
		offset = take(bytes);
	}
	pthread_mutex_unlock(&heap_mutex);
	return offset;
}

void rn_arena_free(uint64_t offset, uint64_t bytes)
{
	bytes = round_up(bytes);
	if (!offset || (bytes <= SPARE_BYTES && !keep(&offset, &bytes)))
		return;
	give_pages_back(offset, bytes);
	pthread_mutex_lock(&heap_mutex);
	put(offset, bytes);
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
