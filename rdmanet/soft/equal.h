/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the process at the other end of a Unix socket our equal?
 *
 * The number of its user doesn't say so. A container, or a sandbox that anybody can make, may have the same one, and
 * our network; it is there to be kept from what its user may do. So its user namespace and its pid namespace have to be
 * ours, and it may not have fewer capabilities. All that is the kernel's word (SO_PEERCRED, /proc/PID). What it doesn't
 * tell, of one that is not dumpable, say, or in a pid namespace beside ours, is none.
 */
#ifndef RDMANET_SOFT_EQUAL_H
#define RDMANET_SOFT_EQUAL_H

#include <stdbool.h>
#include <sys/socket.h>

/* peer: what SO_PEERCRED says of that socket. A few files of /proc are read for it: nothing waits. */
bool rn_is_equal_process(int socket_fd, const struct ucred *peer);

#endif
