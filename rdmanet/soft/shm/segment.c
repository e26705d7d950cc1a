/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments: files that peers map, and in which memory regions lie.
 *
 * ibv_reg_dmabuf_mr takes a memfd that is sealed against shrinking and growing.  The file becomes a
 * segment, known to peers by a number that is never used twice, and mapped by the peers that need it; regions of
 * one file share its segment.  We map it ourselves as well: the program may unmap its view of it whenever it likes.
 *
 * A program's own memory becomes one where it may be remapped (remap.h).
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/engine.h"
#include "base/page.h"
#include "shm/remap.h"
#include "shm/arena.h"
#include "shm/segment.h"

/* Guards the list and the counts of users. Innermost: nothing is locked inside it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct rn_list segments = {&segments, &segments};
static uint32_t last_segment;

/* Regions that peers reach without a mapping; while there are any, no memory is remapped. */
static _Atomic unsigned unmapped_regions;

/* --- with the mutex held ------------------------------------------------------------------------------ */

static int segment_get(int fd, struct rn_segment **found)
{
	struct rn_segment *segment;
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	/* It must never fault, neither here nor in a peer that maps it. */
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

static struct rn_remapped remapped_by(const struct rn_segment *segment)
{
	return (struct rn_remapped){
		.start = segment->remapped,
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

struct rn_segment *rn_segment_remap(uint64_t addr, size_t length)
{
	uint64_t start = rn_page_down(addr), end = rn_page_up(addr + length);
	bool is_alone = rn_remap_alone();
	struct rn_segment *found = NULL;
	int fd;

	if (is_alone)
		rn_engine_pause(); /* what it writes may lie in the same pages */
	pthread_mutex_lock(&mutex);
	for (struct rn_list *at = segments.next; at != &segments; at = at->next) {
		struct rn_segment *segment = container_of(at, struct rn_segment, link);
		struct rn_remapped remapped = remapped_by(segment);

		if (!remapped.start || end <= remapped.start || start >= remapped.start + remapped.size)
			continue;
		if (start >= remapped.start && end <= remapped.start + remapped.size &&
		    rn_remapped_holds(&remapped, start, end)) {
			segment->users++;
			found = segment;
		}
		goto out;
	}
	if (!is_alone || unmapped_regions)
		goto out;
	fd = rn_remap(start, end);
	if (fd >= 0 && !segment_get(fd, &found))
		found->remapped = start;
	if (fd >= 0)
		close(fd);
out:
	pthread_mutex_unlock(&mutex);
	if (is_alone)
		rn_engine_resume();
	return found;
}

static void (*told_of_end)(uint32_t segment_id);

void rn_at_segment_gone(void (*tell)(uint32_t segment_id))
{
	told_of_end = tell;
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
	if (told_of_end)
		told_of_end(segment->id);
	if (segment->remapped) {
		struct rn_remapped remapped = remapped_by(segment);

		rn_remapped_give_back(&remapped);
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

		if (segment->remapped) {
			struct rn_remapped remapped = remapped_by(segment);

			rn_remapped_copy_back(&remapped);
		}
		if (segment->base)
			mmap(segment->base, segment->size, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	}
	rn_list_init(&segments);
	atomic_store(&unmapped_regions, 0);
}
