/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TCP listeners by /proc/net/tcp and /proc/net/tcp6, for kernels that do not answer by netlink: that needs the modules
 * inet_diag and tcp_diag, which small virtual machines are often without. A listener on "::" may take IPv4 as well, and
 * any listener may be bound to a device: these files say neither. So where listeners of several users fit equally well,
 * none counts. To read them takes long, because the kernel goes through all connections: some milliseconds for 100,000.
 */
#ifndef RDMANET_SOFT_PROC_NET_H
#define RDMANET_SOFT_PROC_NET_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "verbs.h"

/* The listener that a connection to this address reaches, or may reach: its user, and the address that it is bound to.
 * False: there is none, or /proc does not tell. */
bool rn_proc_tcp_listener(const struct sockaddr *address, uid_t *user, union ibv_gid *at);

#endif
