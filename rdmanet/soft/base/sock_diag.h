/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose socket is that?  The kernel tells everybody the owner of every socket in our network namespace
 * (sock_diag(7), NETLINK_SOCK_DIAG). A question about one TCP socket takes three system calls and doesn't wait. For
 * a name, or for a port at any address, the kernel goes through all Unix sockets or all listeners, so that is asked
 * only when something is taken.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "verbs.h"

/* The user of the listener that a connection to this address would reach. Where the kernel answers
 * no such questions, /proc does (proc_net.h). False: nobody listens, or neither tells. */
bool rn_tcp_listener_user(const struct sockaddr *address, uid_t *user);
/* Does either tell of TCP listeners? */
bool rn_tcp_is_told(void);
/* The user, and the address that it is bound to, which may be a wildcard. */
bool rn_tcp_listener(const struct sockaddr *address, uid_t *user, union ibv_gid *at);

/* The inodes of all sockets that listen where a connection to this address goes: several may share a port
 * (SO_REUSEPORT). Returns how many, at most `room`; 0: none, or the kernel doesn't tell. */
unsigned rn_tcp_listener_inodes(const struct sockaddr *address, uint32_t *inodes, unsigned room);

/* The number that the kernel gives this very listener, and no other socket; and its user. False: nobody listens, or the
 * kernel does not tell by netlink. */
bool rn_tcp_listener_cookie(const struct sockaddr *address, uint64_t *cookie, uid_t *user);

/* The user who has bound a socket to this port that neither listens nor is connected. False: nobody, or several users,
 * or the kernel doesn't tell (before Linux 6.8). It goes through all ports: a millisecond or two. */
bool rn_tcp_bound_user(uint16_t port, uid_t *user);

/* What else has this address and port, which are a listener's to be, beside other listeners. */
struct rn_port_use {
	bool has_connections; /* open or old ones: TIME_WAIT, say */
	bool is_held; /* by a socket that is only bound (seen since Linux 6.8), or by another user's open connection */
};
/* False: the kernel does not tell. It goes through all ports and connections. */
bool rn_tcp_port_use(const struct sockaddr *address, bool v6_only, struct rn_port_use *use);

/* The user at the other end of this connection. False: it is on another host, or the kernel doesn't tell. */
bool rn_tcp_peer_user(int fd, uid_t *user);

/* Who listens on this port at an address that a listener of ours there would overlap: if several do, ours count; so do
 * root's, which may do anything. */
enum rn_port_holder {
	RN_PORT_NOBODYS, /* no listener's: it may still be bound, or held by old connections */
	RN_PORT_OURS,
	RN_PORT_OTHERS,
	RN_PORT_UNKNOWN, /* the kernel doesn't tell */
};
enum rn_port_holder rn_tcp_port_holder(const struct sockaddr *address, bool v6_only);

/* The user who has this abstract name, given without its first byte, for a stream socket that is bound or listens.
 * False: nobody has it, or the kernel doesn't tell. */
bool rn_unix_name_user(const char *name, size_t length, uid_t *user);

/* A stream socket with an abstract name that is bound or listens. */
struct rn_unix_name {
	const char *text; /* without the first byte */
	size_t length;
	bool listens;
	bool has_user; /* since Linux 5.3, where the kernel answers by netlink */
	uid_t user;
};

/* Is there one for which this is true? 1, 0; -1: neither netlink nor /proc tells. */
int rn_unix_name_search(bool (*is_it)(const struct rn_unix_name *name, void *closure), void *closure);
