/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page by which others know, while they write to this process or read from it, that it still runs this program.
 *
 * process_vm_writev() and process_vm_readv() name a process by its pid.  A process that executes another program keeps
 * its pid, and the pid of one that has ended is given to another.  Whoever was held up between a look and the call would
 * reach that program's memory.  But one call is for one program's memory, goes through its pieces in order, and stops at
 * the first that it cannot reach.  So the first piece of each call is eight bytes of this page.  It is at a random place,
 * far from where programs have memory, and another program has none there: the rest is not touched.
 *
 *     at      eight bytes that others write to: they mean nothing
 *     at + 8  a random value that others read, and compare
 *
 * A forked child does not inherit the page: it may get the pid of its parent, or of a sibling, and is another process.
 * It makes a page of its own when it needs one, since fork() runs a handler.  A child made by the bare system call goes
 * on to name its parent's page, which it does not have: its peers take it for lost.
 *
 * For a write this is not certain, but as good as: of the 2^34 places where the page may be (with pages of 64 KiB 2^30),
 * another program would have to have writable memory at this one.  For a read the value would have to be the same as
 * well.
 */
#pragma once

#include <stdint.h>

enum { RN_WITNESS_VALUE = 8 }; /* where the value is */

struct rn_witness {
	uint64_t at; /* 0: there is no room for it, and nobody may reach this process by its pid */
	uint64_t value;
};

/* This process's. */
struct rn_witness rn_witness(void);

/*
 * Where another page is, for those that write to memory which they may do for a time only: they name it in place of the
 * witness, and from the moment when it is recalled no call of theirs begins.  0: there is none.  The next one is made when
 * it is asked for.
 */
uint64_t rn_witness_lent(void);
void rn_witness_recall(uint64_t lent);
