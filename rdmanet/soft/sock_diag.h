/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose TCP socket is that?  The kernel tells it of every socket of our network namespace, to everybody
 * (sock_diag(7), NETLINK_SOCK_DIAG). One question is three system calls, and waits for nobody.
 */
#ifndef RDMANET_SOFT_SOCK_DIAG_H
#define RDMANET_SOFT_SOCK_DIAG_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

/* The user of the listener that a connection to this address would reach. False: nobody listens, or the kernel
 * doesn't tell. */
bool rn_tcp_listener_user(const struct sockaddr *address, uid_t *user);

/* The user at the other end of this connection. False: it is on another host, or the kernel doesn't tell. */
bool rn_tcp_peer_user(int fd, uid_t *user);

/* What a user is called who has no name in our user namespace: many may share it, so it proves nothing. */
bool rn_is_overflow_user(uid_t user);

#endif
