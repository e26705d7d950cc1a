/* SPDX-License-Identifier: Apache-2.0 */
/* Turning memory that a program brings into memory that peers can map: remap.c has the theory. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A memfd that has taken the place of [start, start + size), and a mapping of it that is our own. */
struct rn_remapped {
	uint64_t start;
	size_t size;
	char *base;
	int fd;
	uint64_t device, inode;
};

/* Is the calling thread the only one, apart from the engine, that could write to memory meanwhile? */
bool rn_remap_alone(void);
/* Exchange whole pages, while alone and the engine paused: the memfd, or -1 and nothing has changed. */
int rn_remap(uint64_t start, uint64_t end);
/* Is this part of it still what the program has there? */
bool rn_remapped_holds(const struct rn_remapped *remapped, uint64_t start, uint64_t end);
/* Turn what the program still has of it back into private memory, at whatever address it is by now. At any time. */
void rn_remapped_give_back(struct rn_remapped *remapped);
/* The same in a forked child, whose parent goes on with the memfd. */
void rn_remapped_copy_back(struct rn_remapped *remapped);
