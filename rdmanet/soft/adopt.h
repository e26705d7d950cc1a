/* SPDX-License-Identifier: Apache-2.0 */
/* Turning memory that a program brings into memory that peers can map: adopt.c has the theory. */
#ifndef RDMANET_SOFT_ADOPT_H
#define RDMANET_SOFT_ADOPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A memfd that has taken the place of [start, start + size), and a mapping of it that is our own. */
struct rn_adopted {
	uint64_t start;
	size_t size;
	char *base;
	int fd;
	uint64_t device, inode;
};

/* Is there nobody but the calling thread (and the engine) who could write to memory meanwhile? */
bool rn_adopt_alone(void);
/* Exchange whole pages, while alone and the engine paused: the memfd, or -1 and nothing has changed. */
int rn_adopt(uint64_t start, uint64_t end);
/* Is this part of it still what the program has there? */
bool rn_adopted_holds(const struct rn_adopted *adopted, uint64_t start, uint64_t end);
/* Whatever is left of it in the program's hands becomes private memory again, wherever it is by now. At any time. */
void rn_adopted_give_back(struct rn_adopted *adopted);
/* The same in a forked child, whose parent goes on with the memfd. */
void rn_adopted_copy_back(struct rn_adopted *adopted);

#endif
