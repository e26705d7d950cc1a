/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adopting memory: pages that a program brings itself become pages that peers can map.
 *
 * Another process's ordinary memory is reached by a system call only (process_vm_writev: more than a
 * microsecond), and atomics on it are the owner's business.  Memory of a sealed memfd is mapped, and costs
 * what a copy costs.  With RDMANET_SOFT_ADOPT=1, which soft-run sets, ibv_reg_mr turns the first into the
 * second: the region's pages are copied into a memfd, and its mapping takes their place, at the same addresses.
 * The last ibv_dereg_mr turns them back.
 *
 * Who must not notice, and why he doesn't:
 *
 *     other threads     A write between copy and exchange would be lost. So it is done only while the
 *                       process has one thread besides the engine, with signals blocked.
 *     other regions     Nor may a peer write by an earlier region: it is done only while each
 *                       region there is has been adopted itself.
 *     forked children   They get copies, as of any private memory, made by the fork handler.
 *     the allocator     It may unmap pages, trim them, or map others in their place: so the kernel is asked
 *                       (/proc/self/maps) what lies there, before anything is believed or turned back.
 *
 * Only private anonymous memory that may be read and written is adopted, no stack, and no more than
 * ADOPT_BYTES of it: beyond, the copy at registration costs more than it saves.  Everything else stays as it is,
 * and is reached as before.
 */
#define _GNU_SOURCE
#include "adopt.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "engine.h"

enum { ADOPT_BYTES = 256 << 20 };

/* --- what lies where --------------------------------------------------------------------------------------- */

struct area {
	uint64_t start, end, offset, inode;
	unsigned major, minor;
	char perms[4];
	bool is_special; /* it has a name in brackets, other than [heap] */
};

/* No allocation, no locale: this runs in forked children, too. */
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
	const struct rn_adopted *by; /* NULL: by ordinary memory */
};

static bool is_of(const struct area *area, const struct rn_adopted *adopted)
{
	return area->inode == adopted->inode && area->major == major(adopted->device) &&
	       area->minor == minor(adopted->device) && area->start - area->offset == adopted->start;
}

static bool cover(const struct area *area, void *with)
{
	struct cover *cover = with;

	if (area->start > cover->to)
		return false;
	if (cover->by ? !is_of(area, cover->by)
		      : area->inode || area->is_special || memcmp(area->perms, "rw-p", sizeof(area->perms)))
		return false;
	cover->to = area->end;
	return true;
}

static bool is_covered(uint64_t start, uint64_t end, const struct rn_adopted *by)
{
	struct cover found = {.to = start, .by = by};

	visit_areas(start, end, cover, &found);
	return found.to >= end;
}

bool rn_adopted_holds(const struct rn_adopted *adopted, uint64_t start, uint64_t end)
{
	return is_covered(start, end, adopted);
}

/* --- to and fro -------------------------------------------------------------------------------------------- */

bool rn_adopt_alone(void)
{
	struct stat tasks;

	/* Its links are its threads, and two. */
	return !rn_engine_inside() && !stat("/proc/self/task", &tasks) &&
	       tasks.st_nlink == 2 + 1 + (nlink_t)rn_engine_is_alive();
}

/* Put what is mapped at `from` in the place of what is at `to`. There is no way back from half of it. */
static void exchange(char *from, uint64_t to, size_t size)
{
	if (mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)to) == MAP_FAILED) {
		fprintf(stderr, "rdmanet soft0: out of memory in the middle of exchanging pages\n");
		abort();
	}
}

static int copy_into_memfd(uint64_t start, size_t size)
{
	int fd = memfd_create("rdmanet-adopted", MFD_CLOEXEC | MFD_ALLOW_SEALING);

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

int rn_adopt(uint64_t start, uint64_t end)
{
	size_t size = end - start;
	sigset_t all, before;
	int fd = -1;
	char *view;

	if (size > ADOPT_BYTES || !is_covered(start, end, NULL))
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

static bool give_back(const struct area *area, void *with)
{
	const struct rn_adopted *adopted = with;
	size_t size = area->end - area->start;
	char *copy;

	if (!is_of(area, adopted))
		return true;
	copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (copy == MAP_FAILED)
		return true; /* it stays what it is: shared with nobody who knows of it */
	memcpy(copy, adopted->base + (area->start - adopted->start), size);
	mprotect(copy, size,
		 (area->perms[0] == 'r' ? PROT_READ : 0) | (area->perms[1] == 'w' ? PROT_WRITE : 0) |
			 (area->perms[2] == 'x' ? PROT_EXEC : 0));
	exchange(copy, area->start, size);
	return true;
}

void rn_adopted_give_back(struct rn_adopted *adopted)
{
	sigset_t all, before;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	visit_areas(adopted->start, adopted->start + adopted->size, give_back, adopted);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}
