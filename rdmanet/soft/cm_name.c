/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of bound ports, for when RDMA's port space and TCP's are not the same.
 *
 * Each bound identifier has a name, "\0rdmanet-cm/<address>/<port>": an abstract Unix socket, host-wide
 * and without a trace left behind.  It mostly does nothing but say that the port is an RDMA program's.
 * A TCP port that is taken while no such name is, is a TCP program's; and RDMA's port of that number is
 * free, as programs that listen on both expect.  Then the name is what listens.  Programs of the
 * same host look for it before they go by TCP; those of other hosts can't come by it.
 *
 * Abstract names have no permissions: anybody may take any.  So a name means nothing by itself.  TCP decides.
 *
 *   - Who has the TCP port listens there, whoever has the name.
 *   - A name is believed of our equals (equal.h), and of another user (root is one) whose program listens on that very
 *     TCP port, if the name is of the address that this program is bound to.  Else we go by TCP.  Who it is the kernel
 *     says (SO_PEERCRED: whoever called listen); of users that have no name in our namespace it says one and the same,
 *     which proves nothing.
 *   - Who has a name, and isn't an equal that listens there, keeps nobody from a TCP port that is free.
 *   - A port is listened on by name only beside a TCP listener of our own user, or root's.  One that somebody else has
 *     is taken.
 *
 * Who comes by name may be any user of this host (and network namespace).  It has no address, and is given one of this
 * host's, as every local program could choose for itself by TCP; its port is 0, which no TCP connection has.  So it can
 * pretend nothing that it could not by TCP, but for whoever takes a port below 1024 for a word of root's.
 */
#define _GNU_SOURCE
#include "cm.h"

#include "equal.h"
#include "gid.h"
#include "guard.h"
#include "rights.h"
#include "sock_diag.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/un.h>
#include <unistd.h>

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
	int fd = rn_fd_own(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));

	if (fd >= 0)
		rn_rights_accept(fd, false);
	return fd;
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

/* 0, or why we can't have it: EADDRINUSE when another has. */
static int why_taken(const union ibv_gid *gid, __be16 port)
{
	int fd = claim(gid, port);

	rn_fd_close(fd);
	return fd < 0 ? errno : 0;
}

/* Whoever called listen at the other end. */
static bool read_owner(int fd, struct ucred *owner)
{
	socklen_t length = sizeof *owner;

	return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, owner, &length);
}

/* Of our own user: is it its word, or that of one whom it has locked up? */
static bool is_our_word(int fd, const struct ucred *owner)
{
	return owner->uid == geteuid() && (!rn_guarded(RN_GUARD_NAME_PROCESS) || rn_is_equal_process(fd, owner));
}

/* user: who has it, listening or not, as far as the kernel tells. Of who is only bound it tells no process. */
static bool is_equals(const struct sockaddr_un *name, socklen_t length, bool is_shared, uid_t *user)
{
	struct ucred owner;
	bool listens, is_equal;
	int fd;

	if (rn_unix_name_user(name->sun_path + 1, length - offsetof(struct sockaddr_un, sun_path) - 1, user) &&
	    *user != geteuid())
		return false;
	fd = new_socket();
	listens = fd >= 0 && !connect(fd, (const struct sockaddr *)name, length) && read_owner(fd, &owner);
	if (listens)
		*user = owner.uid;
	is_equal = listens ? is_our_word(fd, &owner) : is_shared && *user == geteuid();
	rn_fd_close(fd);
	return is_equal;
}

bool rn_cm_name_is_equals(const struct sockaddr *address, bool is_shared)
{
	struct sockaddr_un name;
	union ibv_gid gid;
	socklen_t length;
	uid_t user = (uid_t)-1;

	rn_gid_of(address, &gid);
	length = name_of(&gid, rn_cm_port(address), &name);
	if (!rn_guarded(RN_GUARD_NAME_OWNER) || is_equals(&name, length, is_shared, &user))
		return true;
	rn_warn(RN_WARN_NAME, "the name %s of our port is taken by user %d%s: we have TCP's port, which counts",
		name.sun_path + 1, (int)user, user == geteuid() ? ", by no equal process that listens there" : "");
	return false;
}

static const union ibv_gid any_v4 = {.raw = {[10] = 0xff, [11] = 0xff}}, any_v6;

int rn_cm_name_why_taken(const struct sockaddr *address)
{
	__be16 port = rn_cm_port(address);
	union ibv_gid gid;
	int error;

	rn_gid_of(address, &gid);
	if ((error = why_taken(&any_v4, port)) || (error = why_taken(&any_v6, port)) || (error = why_taken(&gid, port)))
		return error;
	if (!rn_cm_is_wildcard(address))
		return 0;
	for (uint32_t i = 0; i < RN_GIDS && !error; i++)
		if (rn_gid_at(i, &gid, NULL))
			error = why_taken(&gid, port);
	return error;
}

/*
 * Another user's: it must be the user whose listener has TCP's port, and the name must be of the very address that this
 * listener is bound to. Whoever listens there by RDMA too has claimed that name, so nobody whom that user has locked
 * up in a container can have it.
 */
static bool is_listeners_word(const struct ucred *owner, const union ibv_gid *gid, const struct sockaddr *dst)
{
	struct sockaddr_storage to = {0};
	union ibv_gid at;
	uid_t listener;

	memcpy(&to, dst, rn_cm_address_length(dst));
	rn_cm_undress(&to);
	return rn_tcp_listener((struct sockaddr *)&to, &listener, &at) && listener == owner->uid &&
	       (!rn_guarded(RN_GUARD_NAME_PROCESS) || !memcmp(&at, gid, sizeof(at)));
}

/* May it speak for this address and port? Root's word is no better than others': a container's root is root. */
static bool is_believed(int fd, const struct sockaddr_un *name, const union ibv_gid *gid, const struct sockaddr *dst)
{
	struct ucred owner = {.uid = (uid_t)-1};

	if (!rn_guarded(RN_GUARD_NAME_OWNER))
		return true;
	if (read_owner(fd, &owner) && !rn_is_overflow_user(owner.uid) &&
	    (owner.uid == geteuid() ? is_our_word(fd, &owner) : is_listeners_word(&owner, gid, dst)))
		return true;
	rn_warn(RN_WARN_NAME, "the name %s is user %d's%s, who has nothing to say there: we go by TCP",
		name->sun_path + 1, (int)owner.uid,
		owner.uid == geteuid() ? " in a sandbox or container, or not dumpable" : "");
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
	for (unsigned i = 0; i < sizeof gids / sizeof *gids; i++) {
		socklen_t length = name_of(&gids[i], rn_cm_port(dst), &name);

		if (i == 1 && dst->sa_family == AF_INET6)
			continue;
		fd = new_socket();
		if (fd < 0)
			return -1;
		if (!connect(fd, (struct sockaddr *)&name, length) && is_believed(fd, &name, &gids[i], dst))
			return fd;
		rn_fd_close(fd);
	}
	return -1;
}
