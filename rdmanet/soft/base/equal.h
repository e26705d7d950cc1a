/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the process at the other end of a Unix socket our equal?
 *
 * Its user id doesn't say so. A container, or a sandbox that anybody can make, may have the same user id and our
 * network, and exist to keep a process from what its user may do. So its user namespace and its pid namespace have to
 * be ours, and it may not have fewer capabilities. The kernel tells us all of that (SO_PEERCRED, /proc/PID). A process
 * of which it doesn't tell, because it is not dumpable or in a sibling pid namespace, is not our equal.
 */
#ifndef RDMANET_SOFT_EQUAL_H
#define RDMANET_SOFT_EQUAL_H

#include <stdbool.h>
#include <sys/socket.h>

/* peer: what SO_PEERCRED says of that socket. A few files of /proc are read for it: nothing waits. */
bool rn_is_equal_process(int socket_fd, const struct ucred *peer);

#endif
