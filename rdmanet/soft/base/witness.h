/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page by which others know, while they write to this process, that it still runs this program.
 *
 * process_vm_writev() names a process by its pid, which stays the same when the process executes another program: whoever
 * was held up between a look and the call would write into that.  But one call is for one program's memory, and stops at
 * the first of its pieces that it cannot write.  So the first piece is eight bytes of this page.  It is at a random
 * place, far from where programs have memory, and another program has none there: nothing is written.
 *
 * Sure it is not, but as good as: of the 2^34 places where the page may be, another program would have to have writable
 * memory at this one.
 */
#ifndef RDMANET_SOFT_WITNESS_H
#define RDMANET_SOFT_WITNESS_H

#include <stdint.h>

/* The page's address; 0: there is no room for it. A forked child has the parent's. */
uint64_t rn_witness(void);

#endif
