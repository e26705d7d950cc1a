/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments: files that peers map, and in which memory regions lie.
 *
 * ibv_reg_dmabuf_mr takes a memfd that is sealed against shrinking and growing.  The file becomes a
 * segment, known to peers by a number that is never used twice, and mapped by whoever needs it; regions of
 * one file share its segment.  We map it ourselves as well: the user may unmap his view of it as he likes.
 *
 * A program's own memory becomes one where it may be adopted (adopt.h).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "adopt.h"
#include "mr.h"

/* Guards the list and the counts of users. Innermost: nothing is locked inside it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct rn_list segments = {&segments, &segments};
static uint32_t last_segment;

/* Regions that peers reach without a mapping; while there are any, no memory is adopted. */
static _Atomic unsigned unmapped_regions;

/* --- with the mutex held ------------------------------------------------------------------------------ */

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
		.fd = segment->fd,
		.device = segment->device,
		.inode = segment->inode,
	};
}

/* --- taking and giving back ---------------------------------------------------------------------------- */

int rn_segment_of_file(int fd, struct rn_segment **found)
{
	int err;

	pthread_mutex_lock(&mutex);
	err = segment_get(fd, found);
	pthread_mutex_unlock(&mutex);
	return err;
}

struct rn_segment *rn_segment_adopt(uint64_t addr, size_t length)
{
	uint64_t start = addr & ~(uint64_t)(RN_PAGE - 1), end = (addr + length + RN_PAGE - 1) & ~(uint64_t)(RN_PAGE - 1);
	bool is_alone = rn_adopt_alone();
	struct rn_segment *found = NULL;
	int fd;

	if (is_alone)
		rn_engine_pause(); /* what it writes may lie in the same pages */
	pthread_mutex_lock(&mutex);
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
	pthread_mutex_unlock(&mutex);
	if (is_alone)
		rn_engine_resume();
	return found;
}

void rn_segment_put(struct rn_segment *segment)
{
	if (!segment)
		return;
	pthread_mutex_lock(&mutex);
	if (--segment->users) {
		pthread_mutex_unlock(&mutex);
		return;
	}
	rn_list_del(&segment->link);
	pthread_mutex_unlock(&mutex);
	rn_segment_gone(segment->id);
	if (segment->adopted) {
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

	pthread_mutex_lock(&mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);

		if (segment->id == id) {
			fd = rn_fd_own(fcntl(segment->fd, F_DUPFD_CLOEXEC, 3));
			*size = segment->size;
		}
	}
	pthread_mutex_unlock(&mutex);
	return fd;
}

void rn_segment_unmapped(int more)
{
	atomic_fetch_add(&unmapped_regions, more);
}

unsigned rn_mr_count_mappings(void)
{
	unsigned count = 0;

	pthread_mutex_lock(&mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next)
		count++;
	pthread_mutex_unlock(&mutex);
	return count;
}

/* --- the end -------------------------------------------------------------------------------------------- */

void rn_segment_forked(void)
{
	pthread_mutex_init(&mutex, NULL);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);

		if (segment->adopted) {
			struct rn_adopted adopted = adopted_by(segment);

			rn_adopted_copy_back(&adopted);
		}
		if (segment->base)
			mmap(segment->base, segment->size, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	}
	rn_list_init(&segments);
	atomic_store(&unmapped_regions, 0);
}
