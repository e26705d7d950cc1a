/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that peers map, by file: each is a memfd that has a number, and is passed to peers by that. */
#pragma once

#include "base/process.h"

struct rn_segment {
	uint32_t id;
	int fd;
	char *base; /* our own mapping, so that the user's munmap is no concern of ours */
	size_t size;
	uint64_t device, inode;
	uint64_t remapped; /* the address where it has taken the place of a program's own memory; 0: it hasn't */
	unsigned users;
	struct rn_list link;
};

/* The segment of a sealed memfd, counted once more. 0 or errno. */
int rn_segment_of_file(int fd, struct rn_segment **found);
/* The segment in which this memory lies, or lies from now on; NULL: it can't. */
struct rn_segment *rn_segment_remap(uint64_t addr, size_t length);
void rn_segment_put(struct rn_segment *segment);
/* One more region that peers reach without a mapping, or one less: while there are any, no memory is remapped. */
void rn_segment_unmapped(int more);
void rn_segment_forked(void);
/* A copy, to be closed with rn_fd_close; -1: there is none, or no descriptor to be had. */
int rn_segment_fd(uint32_t segment_id, size_t *size);
/* Called for each segment that is freed, once its keys are invalid and no queue pair uses it. */
void rn_at_segment_gone(void (*tell)(uint32_t segment_id));
