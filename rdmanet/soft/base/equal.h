/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the process at the other end of a Unix socket our equal? Is it confined?
 *
 * Its user id doesn't say so. A container, or a sandbox that anybody can make, may have the same user id and our
 * network, and exist to keep a process from what its user may do. So its user namespace and its pid namespace have to
 * be ours, and it may not have fewer capabilities. The kernel tells us all of that (SO_PEERCRED, /proc/PID). A process
 * of which it doesn't tell, because it is not dumpable or in a sibling pid namespace, is not our equal.
 *
 * A process may be confined in other ways, too: by another root directory, other mounts, Landlock, seccomp. Services
 * often are, and are meant to serve all the same. What tells them from a sandbox that has only taken their name is
 * that they have the TCP listener: rdmanet/loop/trust.py has the theory.
 *
 * Not seen is what somebody with CAP_SYS_ADMIN has done to a process without no_new_privs, as a manager of services may:
 * Landlock, or as many filters of seccomp as ours, but others. Nor is AppArmor's and SELinux's confinement looked at.
 *
 * A socket listens as long as somebody has it, also if the process that called listen has ended, which is the one that
 * SO_PEERCRED tells. Its pid is given to others then, and /proc tells of them. So the last question is whether the
 * process still lives.
 */
#pragma once

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

/* peer: what SO_PEERCRED says of a socket. A few files of /proc are read for it: nothing waits.
 * is_confined: something may keep it from what we may do: other mounts or another root directory; no_new_privs, also if
 * we have it ourselves, since Landlock needs it, which does not show; or seccomp, with more filters than ours. */
bool rn_is_equal_process(const struct ucred *peer, bool *is_confined);

/* The same of another user's process, by what everybody may read: also its namespaces, and the capabilities that it
 * could ever have. True if nothing can be read. */
bool rn_is_confined(const struct ucred *peer);

/* Is the TCP listener that gets connections to this address among the descriptors of that process? */
bool rn_has_tcp_listener(const struct ucred *peer, const struct sockaddr *address);

/* Does the process of that socket, peer by SO_PEERCRED, still live? To be asked last: what /proc has said by its pid is
 * of another process otherwise. Before Linux 6.5 the kernel doesn't tell, and whoever has the pid must be of its user. */
bool rn_still_lives(int socket_fd, const struct ucred *peer);

/* The number of users that are unknown in our user namespace: many may share it, so it proves nothing. */
bool rn_is_overflow_user(uid_t user);
