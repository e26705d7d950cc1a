/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Remapping memory: pages that a program brings itself become pages that peers can map.
 *
 * Another process's ordinary memory is reached by a system call only (process_vm_writev: more than a
 * microsecond), and atomics on it are the owner's business.  Memory of a sealed memfd is mapped, and costs
 * what a copy costs.  With RDMANET_SOFT_ADOPT=1, which soft-run sets, ibv_reg_mr turns the first into the
 * second: the region's pages are copied into a memfd, whose mapping takes their place, at the same addresses.
 * The last ibv_dereg_mr turns them back.
 *
 * What must not notice, and why it doesn't:
 *
 *     other threads     A write between copy and exchange would be lost. So it is done only while the
 *                       process has one thread besides the engine, with signals blocked. The way back needs no
 *                       copy first, and so no solitude: the memfd is mapped again in its own place, privately.
 *     the engine        It writes to what this library has allocated, perhaps in the same pages. It pauses.
 *     the stack         What this very call writes to: pages that hold it are left alone, also those of a
 *                       coroutine's stack, which looks like any memory.
 *     the kernel        Asynchronous reads (io_uring, AIO) may be on their way into the old pages. A process
 *                       that has such a ring keeps its memory as it is.
 *     other regions     Nor may a peer write by an earlier region: it is done only while each
 *                       region there is has been remapped itself.
 *     forked children   They get copies, as of any private memory, made by the fork handler.
 *     the allocator     It may unmap pages, trim them, move them, or map others in their place: so the kernel is
 *                       asked (/proc/self/maps) what lies there, before anything is believed or turned back.
 *                       Afterwards the memfd is emptied under the private copies, so that MADV_DONTNEED leaves
 *                       zeros, as allocators expect.
 *
 * Only private anonymous memory that may be read and written is remapped, no stack, no huge pages, no file, and no
 * more than REMAP_BYTES of it: beyond, the copy at registration costs more than it saves.  Everything else stays as
 * it is, and is reached as before.
 *
 * What can notice: a process that shares the memory without being a thread (clone with CLONE_VM alone) and writes
 * during the registration; a child made without fork handlers (the bare system call), which shares what is
 * registered; a program that grows a registered mapping with mremap, which ends where the memfd does; mlock, which
 * is forgotten.  RDMANET_SOFT_ADOPT=0 is for those.
 */
#include "base/engine.h"
#include "base/page.h"
#include "shm/remap.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { REMAP_BYTES = 256 << 20, STACK_BYTES = 64 << 10 };

#define NAME "rdmanet-remapped"

/* --- what lies where --------------------------------------------------------------------------------------- */

struct area {
	uint64_t start, end, offset, inode;
	unsigned major, minor;
	char perms[4];
	bool is_special; /* it has a name in brackets, other than [heap] */
	bool was_ours;   /* of a memfd that had been remapped */
	bool is_ring;    /* by which the kernel is asked for I/O */
};

/* No allocation, no locale: this runs in forked children as well. */
static const char *hex(const char *at, uint64_t *value)
{
	for (*value = 0;; at++) {
		if (*at >= '0' && *at <= '9')
			*value = *value * 16 + (*at - '0');
		else if (*at >= 'a' && *at <= 'f')
			*value = *value * 16 + (*at - 'a' + 10);
		else
			return at;
	}
}

/* "start-end perms offset major:minor inode   name" */
static bool parse(const char *line, struct area *area)
{
	uint64_t major, minor;

	line = hex(line, &area->start);
	if (*line++ != '-')
		return false;
	line = hex(line, &area->end);
	if (*line++ != ' ')
		return false;
	memcpy(area->perms, line, sizeof(area->perms));
	line = hex(line + 5, &area->offset);
	line = hex(line + 1, &major);
	line = hex(line + 1, &minor);
	area->major = major;
	area->minor = minor;
	area->inode = 0;
	for (line++; *line >= '0' && *line <= '9'; line++)
		area->inode = area->inode * 10 + (*line - '0');
	while (*line == ' ')
		line++;
	area->is_special = *line == '[' && strncmp(line, "[heap]", 6) && strncmp(line, "[anon", 5);
	area->was_ours = !strncmp(line, "/memfd:" NAME, strlen("/memfd:" NAME));
	area->is_ring = !strncmp(line, "anon_inode:[io_uring]", 21) || !strncmp(line, "/[aio]", 6);
	return true;
}

/* Call visit for each area that has a part in [start, end), in order, until it says false. */
static void visit_areas(uint64_t start, uint64_t end, bool (*visit)(const struct area *, void *), void *with)
{
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	char text[8192];
	size_t filled = 0;
	ssize_t got;

	while (fd >= 0 && (got = read(fd, text + filled, sizeof(text) - 1 - filled)) > 0) {
		char *line = text, *next;

		filled += got;
		text[filled] = '\0';
		while ((next = strchr(line, '\n'))) {
			struct area area;

			*next++ = '\0';
			if (parse(line, &area) && area.end > start && (area.start >= end || !visit(&area, with)))
				goto out;
			line = next;
		}
		filled = text + filled - line;
		memmove(text, line, filled);
		if (filled == sizeof(text) - 1)
			filled = 0; /* the rest of a name without end */
	}
out:
	if (fd >= 0)
		close(fd);
}

struct cover {
	uint64_t to; /* covered so far */
	const struct rn_remapped *by; /* NULL: by ordinary memory */
};

static bool is_of(const struct area *area, const struct rn_remapped *remapped)
{
	return area->inode == remapped->inode && area->major == major(remapped->device) &&
	       area->minor == minor(remapped->device) && area->start - area->offset == remapped->start;
}

static bool cover(const struct area *area, void *with)
{
	struct cover *cover = with;

	if (area->start > cover->to)
		return false;
	if (cover->by ? !is_of(area, cover->by)
		      : (area->inode && !area->was_ours) || area->is_special ||
				memcmp(area->perms, "rw-p", sizeof(area->perms)))
		return false;
	cover->to = area->end;
	return true;
}

static bool is_covered(uint64_t start, uint64_t end, const struct rn_remapped *by)
{
	struct cover found = {.to = start, .by = by};

	visit_areas(start, end, cover, &found);
	return found.to >= end;
}

bool rn_remapped_holds(const struct rn_remapped *remapped, uint64_t start, uint64_t end)
{
	return is_covered(start, end, remapped);
}

static bool look_for_ring(const struct area *area, void *found)
{
	return !(*(bool *)found = area->is_ring);
}

/* Is the kernel perhaps writing somewhere, asked to by a call that has returned? */
static bool has_ring(void)
{
	bool found = false;

	visit_areas(0, UINT64_MAX, look_for_ring, &found);
	return found;
}

/* --- to and fro -------------------------------------------------------------------------------------------- */

bool rn_remap_alone(void)
{
	struct stat tasks;

	/* Its links are its threads, and two. */
	return !rn_engine_inside() && !stat("/proc/self/task", &tasks) &&
	       tasks.st_nlink == 2 + 1 + (nlink_t)rn_engine_is_alive();
}

/* Move the mapping at `from` to `to`, in place of the one there. A failure half-way can't be undone. */
static void exchange(char *from, uint64_t to, size_t size)
{
	if (mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)to) == MAP_FAILED) {
		fprintf(stderr, "rdmanet soft0: out of memory while exchanging pages\n");
		abort();
	}
}

static int copy_into_memfd(uint64_t start, size_t size)
{
	int fd = memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -1;
	if (ftruncate(fd, size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		goto failed;
	for (size_t done = 0; done < size;) {
		ssize_t wrote = pwrite(fd, (const void *)(uintptr_t)(start + done), size - done, done);

		if (wrote <= 0)
			goto failed;
		done += wrote;
	}
	return fd;

failed:
	close(fd);
	return -1;
}

int rn_remap(uint64_t start, uint64_t end)
{
	uint64_t here = (uintptr_t)__builtin_frame_address(0);
	size_t size = end - start;
	sigset_t all, before;
	int fd = -1;
	char *view;

	/* A stack's pages below this frame are in use, too: as many as the calls from here may need. */
	if (here + STACK_BYTES >= start && here - STACK_BYTES < end)
		return -1;
	if (size > REMAP_BYTES || !is_covered(start, end, NULL) || has_ring())
		return -1;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	fd = copy_into_memfd(start, size);
	if (fd >= 0) {
		view = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
		if (view == MAP_FAILED) {
			close(fd);
			fd = -1;
		} else {
			exchange(view, start, size);
		}
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return fd;
}

/* Write to each page the bytes that it has, so that it becomes a private copy. */
static bool make_copies(char *at, size_t size)
{
	if (!madvise(at, size, MADV_POPULATE_WRITE))
		return true;
	if (errno != EINVAL)
		return false;
	for (size_t i = 0; i < size; i += rn_page()) /* before Linux 5.14 */
		__atomic_fetch_or(at + i, 0, __ATOMIC_RELAXED);
	return true;
}

static int protection(const struct area *area)
{
	return (area->perms[0] == 'r' ? PROT_READ : 0) | (area->perms[1] == 'w' ? PROT_WRITE : 0) |
	       (area->perms[2] == 'x' ? PROT_EXEC : 0);
}

struct way_back {
	const struct rn_remapped *remapped;
	bool is_whole; /* nothing in the program's hands needs the memfd's pages */
};

/* What other threads write meanwhile goes to the memfd's page or to its copy, which is made from it: none is lost. */
static bool give_back(const struct area *area, void *with)
{
	struct way_back *way = with;
	const struct rn_remapped *remapped = way->remapped;
	char *at = (char *)(uintptr_t)area->start;
	size_t size = area->end - area->start;

	if (area->inode != remapped->inode || area->major != major(remapped->device) ||
	    area->minor != minor(remapped->device) || area->perms[3] != 's' ||
	    (char *)(uintptr_t)area->start == remapped->base)
		return true;
	if (area->offset + size > remapped->size) {
		way->is_whole = false; /* somebody has made it longer: there is nothing behind the end */
		size = area->offset < remapped->size ? remapped->size - area->offset : 0;
	}
	if (size && mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, remapped->fd, area->offset) == MAP_FAILED)
		size = 0; /* it stays what it is: shared with nobody who knows of it */
	if (!size || !make_copies(at, size))
		way->is_whole = false;
	if (size && protection(area) != (PROT_READ | PROT_WRITE))
		mprotect(at, size, protection(area));
	return true;
}

void rn_remapped_give_back(struct rn_remapped *remapped)
{
	struct way_back way = {.remapped = remapped, .is_whole = true};

	visit_areas(0, UINT64_MAX, give_back, &way);
	if (way.is_whole)
		fallocate(remapped->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, remapped->size);
}

static bool copy_back(const struct area *area, void *with)
{
	const struct rn_remapped *remapped = with;
	size_t size = area->end - area->start;
	char *copy;

	if (!is_of(area, remapped))
		return true;
	copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (copy == MAP_FAILED)
		return true; /* it stays what it is: shared with the parent */
	memcpy(copy, remapped->base + (area->start - remapped->start), size);
	mprotect(copy, size, protection(area));
	exchange(copy, area->start, size);
	return true;
}

void rn_remapped_copy_back(struct rn_remapped *remapped)
{
	sigset_t all, before;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	visit_areas(remapped->start, remapped->start + remapped->size, copy_back, remapped);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}
