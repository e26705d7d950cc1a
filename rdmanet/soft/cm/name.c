/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of bound ports, for when RDMA's port space and TCP's are not the same.
 *
 * Each bound identifier has a name, "\0rdmanet-cm/<address>/<port>": an abstract Unix socket, host-wide
 * and without a trace left behind.  It mostly just shows that an RDMA program has the port.
 * If a TCP port is taken and has no such name, a TCP program has it; and RDMA's port of that number is
 * free, as programs that listen on both expect.  Then the Unix socket with the name listens.  Programs of the
 * same host look for it before they use TCP; those of other hosts cannot reach it.
 *
 * "::" is the name of all addresses of both families, and "::-v6only" of IPv6's: so a server may have 0.0.0.0 and ::
 * of one port, each by its own listener, as TCP's servers have.
 *
 * A TCP listener of this host is an RDMA program's if its user has such a name, which does not listen.  Others get no
 * requests from us (rn_cm_name_language): neither one whose port has no name, nor one beside which an RDMA program
 * listens by name, whatever keeps us from connecting to that.  A program that cannot have the name, because a stranger
 * took it first, takes it with a random suffix, "<address>/<port>/<16 digits>", which nobody can take first.
 *
 * Abstract names have no permissions: anybody may take any.  So a name means nothing by itself.  TCP decides.
 *
 *   - The program that has the TCP port listens there, whoever has the name.
 *   - A name is believed of our equals (base/equal.h), and of another user (root is one) whose program listens on that
 *     very TCP port, if the name is of the address that this program is bound to.  A process that is confined must have
 *     that listener among its descriptors.  Else we use TCP.  The kernel tells who it is (SO_PEERCRED: the process that
 *     called listen, which must still live); it gives all users that are unknown in our namespace the same number, which
 *     proves nothing.
 *   - A process that has a name, and is not an equal that listens there, cannot keep a program from a free TCP port.
 *   - A port is listened on by name only beside a TCP listener of our own user, or root's.  If another user
 *     has it, the port is taken.
 *
 * A peer that connects by name may be any user of this host (and network namespace).  It has no address, and is given
 * one of this host, as every local program could choose for itself by TCP; its port is 0, which no TCP connection has.
 * So it can claim nothing that it could not claim by TCP, except to a program that takes a port below 1024 for root's.
 */
#include "base/equal.h"
#include "base/gid.h"
#include "base/guard.h"
#include "base/rights.h"
#include "base/sock_diag.h"
#include "cm/cm.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/un.h>
#include <unistd.h>

/* What a listener covers: an address; all of IPv4, or of both families (gid is a wildcard); all of IPv6. */
struct place {
	union ibv_gid gid;
	bool v6_only; /* and :: */
	__be16 port;
};

static const union ibv_gid any_v6;

static struct place place_of(const struct sockaddr *address, bool af_only)
{
	struct place place = {.port = rn_cm_port(address)};

	rn_gid_of(address, &place.gid);
	place.v6_only = af_only && rn_gid_is_same(&place.gid, &any_v6);
	return place;
}

static bool overlap(const struct place *a, const struct place *b)
{
	bool a_is_all = rn_gid_is_same(&a->gid, &any_v6), b_is_all = rn_gid_is_same(&b->gid, &any_v6);

	if (a_is_all && b_is_all)
		return true;
	if (a_is_all)
		return !a->v6_only || !rn_gid_is_v4(&b->gid);
	if (b_is_all)
		return !b->v6_only || !rn_gid_is_v4(&a->gid);
	if (rn_gid_is_same(&a->gid, &rn_gid_any_v4) || rn_gid_is_same(&b->gid, &rn_gid_any_v4))
		return rn_gid_is_v4(&a->gid) && rn_gid_is_v4(&b->gid);
	return rn_gid_is_same(&a->gid, &b->gid);
}

static socklen_t name_of(const struct place *place, struct sockaddr_un *name)
{
	char text[INET6_ADDRSTRLEN];
	int length;

	inet_ntop(AF_INET6, &place->gid, text, sizeof text);
	*name = (struct sockaddr_un){.sun_family = AF_UNIX};
	length = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "rdmanet-cm/%s%s/%u", text,
			  place->v6_only ? "-v6only" : "", (unsigned)be16toh(place->port));
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void)
{
	int fd = rn_fd_own(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));

	if (fd >= 0)
		rn_rights_accept(fd, false);
	return fd;
}

/* -1 and errno: EADDRINUSE if another process has it. */
static int bind_name(const struct place *place)
{
	struct sockaddr_un name;
	socklen_t length = name_of(place, &name);
	int fd = new_socket(), error;

	if (fd < 0 || !bind(fd, (struct sockaddr *)&name, length))
		return fd;
	error = errno;
	rn_fd_close(fd);
	return rn_cm_error(error);
}

int rn_cm_name_bind(const struct sockaddr *address, bool af_only)
{
	struct place place = place_of(address, af_only);

	return bind_name(&place);
}

int rn_cm_name_bind_other(const struct sockaddr *address, bool af_only)
{
	struct place place = place_of(address, af_only);
	struct sockaddr_un name;
	socklen_t length = name_of(&place, &name);
	size_t used = length - offsetof(struct sockaddr_un, sun_path);
	uint64_t end;
	int fd, error;

	if (getrandom(&end, sizeof end, GRND_NONBLOCK) != sizeof end)
		return rn_cm_error(EAGAIN);
	length += (socklen_t)snprintf(name.sun_path + used, sizeof name.sun_path - used, "/%016llx",
				      (unsigned long long)end);
	fd = new_socket();
	if (fd < 0 || !bind(fd, (struct sockaddr *)&name, length))
		return fd;
	error = errno;
	rn_fd_close(fd);
	return rn_cm_error(error);
}

/* 0, or why we can't have it: EADDRINUSE if another process has it. */
static int why_taken(const struct place *place)
{
	int fd = bind_name(place);

	rn_fd_close(fd);
	return fd < 0 ? errno : 0;
}

/* The process that called listen at the other end. */
static bool read_owner(int fd, struct ucred *owner)
{
	socklen_t length = sizeof *owner;

	return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, owner, &length);
}

/* It is confined, and has the listener at dst, or is not; dst may be NULL. And it is the process of which that was told:
 * so this is asked last. fd: -1 for a process that is linked: of that one ask.c asks it. */
static bool may_speak(int fd, const struct ucred *owner, bool is_confined, const struct sockaddr *dst)
{
	return (!is_confined || (dst && rn_has_tcp_listener(owner, dst))) &&
	       (fd < 0 || !rn_guarded(RN_GUARD_NAME_LIFE) || rn_still_lives(fd, owner));
}

/* Is this a process of our own user with equal rights? If the user has confined it, it must have the listener at dst:
 * NULL means that it has not. */
static bool is_our_word(int fd, const struct ucred *owner, const struct sockaddr *dst)
{
	bool is_confined;

	if (owner->uid != geteuid())
		return false;
	return !rn_guarded(RN_GUARD_NAME_PROCESS) ||
	       (rn_is_equal_process(owner, &is_confined) && may_speak(fd, owner, is_confined, dst));
}

/* user: the one that has it, listening or not, as far as the kernel tells. Of a socket that is only bound it tells no
 * process. */
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
	is_equal = listens ? is_our_word(fd, &owner, NULL) : is_shared && *user == geteuid();
	rn_fd_close(fd);
	return is_equal;
}

bool rn_cm_name_is_equals(const struct sockaddr *address, bool af_only, bool is_shared)
{
	struct place place = place_of(address, af_only);
	struct sockaddr_un name;
	socklen_t length = name_of(&place, &name);
	uid_t user = (uid_t)-1;

	if (!rn_guarded(RN_GUARD_NAME_OWNER) || is_equals(&name, length, is_shared, &user))
		return true;
	rn_warn(RN_WARN_NAME,
		"user %d holds the socket name %s of our port%s: we listen all the same, since we hold the TCP port",
		(int)user, name.sun_path + 1,
		user == geteuid() ? ", in a process that does not listen there or has other rights than ours" : "");
	return false;
}

int rn_cm_name_why_taken(const struct sockaddr *address, bool af_only)
{
	struct place place = place_of(address, af_only);
	struct place others[] = {place, {.gid = rn_gid_any_v4}, {.gid = any_v6}, {.gid = any_v6, .v6_only = true}};
	struct place one = {.port = place.port};
	int error;

	for (unsigned i = 0; i < sizeof others / sizeof *others; i++) {
		others[i].port = place.port;
		if (overlap(&place, &others[i]) && (error = why_taken(&others[i])))
			return error;
	}
	if (!rn_cm_is_wildcard(address))
		return 0;
	for (uint32_t i = 0; rn_gid_next(&i, &one.gid, NULL); i++)
		if (overlap(&place, &one) && (error = why_taken(&one)))
			return error;
	return 0;
}

/* Another user's name: that user's listener must have the TCP port, and be bound to the very address of the name. */
static bool is_of_listeners_user(uid_t user, const union ibv_gid *gid, const struct sockaddr *dst)
{
	union ibv_gid at;
	uid_t listener;

	return rn_tcp_listener(dst, &listener, &at) && listener == user &&
	       (!rn_guarded(RN_GUARD_NAME_PROCESS) || rn_gid_is_same(&at, gid));
}

/*
 * An RDMA program that listens there has bound that name. But a TCP program has not, and then a process that its user
 * has confined may.
 */
static bool is_listeners_word(int fd, const struct ucred *owner, const union ibv_gid *gid,
			      const struct sockaddr *dst)
{
	return is_of_listeners_user(owner->uid, gid, dst) &&
	       (!rn_guarded(RN_GUARD_NAME_PROCESS) || may_speak(fd, owner, rn_is_confined(owner), dst));
}

/* May it speak for this address and port? Root is trusted no more than others: a container's root is root. */
static bool is_believed(int fd, const struct sockaddr_un *name, const union ibv_gid *gid, const struct sockaddr *dst)
{
	struct ucred owner = {.uid = (uid_t)-1};
	struct sockaddr_storage to = {0};
	struct sockaddr *as_ipv4 = (struct sockaddr *)&to;

	if (!rn_guarded(RN_GUARD_NAME_OWNER))
		return true;
	memcpy(&to, dst, rn_cm_address_length(dst));
	rn_cm_as_ipv4(&to);
	if (read_owner(fd, &owner) && !rn_is_overflow_user(owner.uid) &&
	    (owner.uid == geteuid() ? is_our_word(fd, &owner, as_ipv4)
				       : is_listeners_word(fd, &owner, gid, as_ipv4)))
		return true;
	rn_warn(RN_WARN_NAME, "user %d holds the socket name %s%s and has no right to that address: connecting by TCP",
		(int)owner.uid, name->sun_path + 1,
		owner.uid == geteuid() ? ", in a process in a sandbox or container, or not dumpable," : "");
	return false;
}

bool rn_cm_name_is_believed_of(int pid, const struct sockaddr *dst)
{
	const struct ucred owner = {.pid = pid, .uid = geteuid()};
	struct sockaddr_storage to = {0};

	memcpy(&to, dst, rn_cm_address_length(dst));
	rn_cm_as_ipv4(&to);
	return is_our_word(-1, &owner, (struct sockaddr *)&to);
}

bool rn_cm_name_covers(const struct rn_cm_id *listener, const union ibv_gid *gid)
{
	struct place place = place_of(&listener->id.route.addr.src_addr, listener->af_only), one = {.gid = *gid};

	return overlap(&place, &one);
}

enum { PLACES = 3 };

/* What covers this address, of a listener. */
static void places_for(const struct sockaddr *dst, struct place places[PLACES])
{
	places[0] = place_of(dst, false);
	if (rn_gid_is_v4(&places[0].gid))
		places[1] = (struct place){.gid = rn_gid_any_v4};
	else
		places[1] = (struct place){.gid = any_v6, .v6_only = true};
	places[2] = (struct place){.gid = any_v6};
	places[1].port = places[2].port = places[0].port;
}

/*
 * This name was not connected to, for another reason than that nobody listens: may it be a listener of those who are
 * believed? Only a connection shows the process, but a stranger's name counts no more than one that we could connect to.
 */
static bool may_be_believed(const struct sockaddr_un *name, socklen_t length, const union ibv_gid *gid,
			    const struct sockaddr *dst)
{
	uid_t user;

	if (!rn_unix_name_user(name->sun_path + 1, length - offsetof(struct sockaddr_un, sun_path) - 1, &user))
		return true;
	return user == geteuid() || is_of_listeners_user(user, gid, dst);
}

int rn_cm_name_connect(const struct sockaddr *dst)
{
	struct place places[PLACES];
	struct sockaddr_un name;
	int fd = -1, error = ECONNREFUSED;

	places_for(dst, places);
	if (!rn_gid_is_ours(&places[0].gid))
		return rn_cm_error(ECONNREFUSED);
	for (unsigned i = 0; i < PLACES; i++) {
		socklen_t length = name_of(&places[i], &name);

		if (fd < 0)
			fd = new_socket();
		if (fd < 0)
			return -1;
		if (connect(fd, (struct sockaddr *)&name, length)) {
			int why = errno;

			/* Most often nobody has that name, and the socket is as good as new. */
			if (why != ECONNREFUSED && may_be_believed(&name, length, &places[i].gid, dst))
				error = why;
			continue;
		}
		if (is_believed(fd, &name, &places[i].gid, dst))
			return fd;
		rn_fd_close(fd);
		fd = -1;
	}
	rn_fd_close(fd);
	return rn_cm_error(error);
}

/* --- a TCP program's port ------------------------------------------------------------------------------------ */

struct wanted {
	char names[PLACES][sizeof(struct sockaddr_un)];
	size_t lengths[PLACES];
	uid_t user; /* the TCP listener's */
};

/*
 * One of these names, with or without a random suffix, that shows that an RDMA program has the TCP port. Such a name does
 * not listen, since the TCP socket does: one that listens is beside another program's TCP port. And the user who has the
 * port has the name: anybody else may take names, too.
 */
static bool is_wanted(const struct rn_unix_name *name, void *closure)
{
	const struct wanted *wanted = closure;

	if (name->listens || (name->has_user && name->user != wanted->user))
		return false;
	for (unsigned i = 0; i < PLACES; i++)
		if (name->length >= wanted->lengths[i] &&
		    !memcmp(name->text, wanted->names[i], wanted->lengths[i]) &&
		    (name->length == wanted->lengths[i] || name->text[wanted->lengths[i]] == '/'))
			return true;
	return false;
}

enum rn_cm_language rn_cm_name_language(const struct sockaddr *dst, uint64_t *cookie)
{
	struct place places[PLACES];
	struct sockaddr_storage to = {0};
	struct wanted wanted = {0};
	struct sockaddr_un name;
	bool is_told;

	*cookie = 0;
	places_for(dst, places);
	if (!rn_gid_is_ours(&places[0].gid))
		return RN_CM_UNKNOWN;
	memcpy(&to, dst, rn_cm_address_length(dst));
	rn_cm_as_ipv4(&to);
	is_told = rn_tcp_listener_cookie((struct sockaddr *)&to, cookie, &wanted.user);
	if (is_told && rn_cm_is_known(*cookie))
		return RN_CM_OURS;
	if (!is_told && !rn_tcp_listener_user((struct sockaddr *)&to, &wanted.user))
		return rn_tcp_is_told() ? RN_CM_NOBODY : RN_CM_UNTOLD;
	for (unsigned i = 0; i < PLACES; i++) {
		wanted.lengths[i] = name_of(&places[i], &name) - offsetof(struct sockaddr_un, sun_path) - 1;
		memcpy(wanted.names[i], name.sun_path + 1, wanted.lengths[i]);
	}
	switch (rn_unix_name_search(is_wanted, &wanted)) {
	case 0:
		return RN_CM_OTHER;
	case 1:
		return RN_CM_OURS;
	default:
		return RN_CM_UNTOLD;
	}
}
