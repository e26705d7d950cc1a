/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that come along with a message (SCM_RIGHTS).
 *
 * A process that can send to a Unix socket can put any of its descriptors into it, and the process that drops the last
 * reference to a file has to close it. Closing can take as long as the sender likes: a TCP socket with SO_LINGER and
 * unsent data, or a file of the sender's own FUSE mount. It doesn't matter whether we take the descriptor or close our
 * socket with it unread. So processes that we don't know must not be able to send us one: with SO_PASSRIGHTS 0 the
 * kernel refuses such a message to its sender. An accepted socket inherits the option from its listener.
 *
 * Linux before 6.16 has no such option; there another user of this host can hold up the engine in this way.
 */
#pragma once

#include <stdbool.h>

/* For a Unix socket: before it listens, or connects. */
void rn_rights_accept(int fd, bool yes);
