/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sockets by /proc, for kernels that do not answer by netlink.
 *
 * TCP listeners by /proc/net/tcp and /proc/net/tcp6: netlink needs the modules inet_diag, tcp_diag and unix_diag, which
 * small virtual machines often lack. A listener on "::" may take IPv4 as well, and any listener may be bound to a device:
 * these files say neither. So where listeners of several users fit equally well, none counts. To read them takes long,
 * because the kernel goes through all connections: some milliseconds for 100,000.
 */
#pragma once

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "base/sock_diag.h"
#include "verbs.h"

/* May /proc be read? */
bool rn_proc_tells_of_tcp(void);

/* The listener that a connection to this address reaches, or may reach: its user, and the address that it is bound to.
 * False: there is none, or /proc does not tell. */
bool rn_proc_tcp_listener(const struct sockaddr *address, uid_t *user, union ibv_gid *at);

/* As rn_unix_name_search(), by /proc/net/unix. That names no users. */
int rn_proc_unix_name_search(bool (*is_it)(const struct rn_unix_name *name, void *closure), void *closure);
