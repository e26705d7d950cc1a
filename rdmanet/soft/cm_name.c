/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of bound ports, for when RDMA's port space and TCP's are not the same.
 *
 * Each bound identifier has a name, "\0rdmanet-cm/<address>/<port>": an abstract Unix socket, host-wide
 * and without a trace left behind.  It mostly does nothing but say that the port is an RDMA program's.
 * A TCP port that is taken while no such name is, is a TCP program's; and RDMA's port of that number is
 * free, as programs that listen on both expect.  Then the name is what listens.  Programs of the
 * same host look for it before they go by TCP; those of other hosts can't come by it.
 */
#define _GNU_SOURCE
#include "cm.h"

#include "gid.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/un.h>

static socklen_t name_of(const union ibv_gid *gid, __be16 port, struct sockaddr_un *name)
{
	char text[INET6_ADDRSTRLEN];
	int length;

	inet_ntop(AF_INET6, gid, text, sizeof text);
	*name = (struct sockaddr_un){.sun_family = AF_UNIX};
	length = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "rdmanet-cm/%s/%u", text,
			  (unsigned)be16toh(port));
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void)
{
	return rn_fd_own(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

/* -1 and errno: EADDRINUSE when another has it. */
static int claim(const union ibv_gid *gid, __be16 port)
{
	struct sockaddr_un name;
	socklen_t length = name_of(gid, port, &name);
	int fd = new_socket(), error;

	if (fd < 0 || !bind(fd, (struct sockaddr *)&name, length))
		return fd;
	error = errno;
	rn_fd_close(fd);
	return rn_cm_error(error);
}

int rn_cm_name_claim(const struct sockaddr *address)
{
	union ibv_gid gid;

	rn_gid_of(address, &gid);
	return claim(&gid, rn_cm_port(address));
}

static bool is_taken(const union ibv_gid *gid, __be16 port)
{
	int fd = claim(gid, port);

	rn_fd_close(fd);
	return fd < 0;
}

static const union ibv_gid any_v4 = {.raw = {[10] = 0xff, [11] = 0xff}}, any_v6;

bool rn_cm_name_is_taken(const struct sockaddr *address)
{
	__be16 port = rn_cm_port(address);
	union ibv_gid gid;

	rn_gid_of(address, &gid);
	if (is_taken(&any_v4, port) || is_taken(&any_v6, port) || is_taken(&gid, port))
		return true;
	if (!rn_cm_is_wildcard(address))
		return false;
	for (uint32_t i = 0; i < RN_GIDS; i++)
		if (rn_gid_at(i, &gid, NULL) && is_taken(&gid, port))
			return true;
	return false;
}

int rn_cm_name_connect(const struct sockaddr *dst)
{
	union ibv_gid gids[3] = {{.raw = {0}}, any_v4, any_v6};
	struct sockaddr_un name;
	int fd;

	rn_gid_of(dst, &gids[0]);
	if (!rn_gid_is_ours(&gids[0]))
		return -1;
	fd = new_socket();
	if (fd < 0)
		return -1;
	for (unsigned i = 0; i < sizeof gids / sizeof *gids; i++) {
		socklen_t length = name_of(&gids[i], rn_cm_port(dst), &name);

		if (i == 1 && dst->sa_family == AF_INET6)
			continue;
		if (!connect(fd, (struct sockaddr *)&name, length))
			return fd;
	}
	rn_fd_close(fd);
	return -1;
}
