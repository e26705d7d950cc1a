/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that come along with a message (SCM_RIGHTS).
 *
 * Whoever can send to a Unix socket can put any descriptor of his into it, and who drops the last reference to a file
 * closes it: a TCP socket with SO_LINGER and unsent data, or a file of his own FUSE mount, for as long as he likes. It
 * doesn't matter whether we take it, or close our socket with it unread. So nothing of that kind may get in from whom
 * we don't know: the kernel refuses such a message to its sender (SO_PASSRIGHTS 0). An accepted socket has it from its
 * listener, from the first moment on.
 *
 * Before Linux 6.16 there is no such option. There another user of this host can hold up the engine so.
 */
#ifndef RDMANET_SOFT_RIGHTS_H
#define RDMANET_SOFT_RIGHTS_H

#include <stdbool.h>

/* For a Unix socket: before it listens, or connects. */
void rn_rights_accept(int fd, bool yes);

#endif
