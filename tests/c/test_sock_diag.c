/* SPDX-License-Identifier: Apache-2.0 */
/* Whose socket is that? No device is needed; other users only where we are root. */
#define _GNU_SOURCE
#include "base/equal.h"
#include "base/sock_diag.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/engine.h"
#include "base/proc_net.h"
#include "host_check.h"
#include "namespace.h"

enum { OTHER = 61001 };

static struct sockaddr_storage v4(uint32_t address, uint16_t port)
{
	struct sockaddr_storage to = {0};

	*(struct sockaddr_in *)&to =
		(struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(address)};
	return to;
}

static struct sockaddr_storage v6(struct in6_addr address, uint16_t port)
{
	struct sockaddr_storage to = {0};

	*(struct sockaddr_in6 *)&to =
		(struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = address};
	return to;
}

static uint16_t port_of(int fd)
{
	struct sockaddr_in6 at;
	socklen_t length = sizeof(at);

	CHECK(!getsockname(fd, (struct sockaddr *)&at, &length));
	return ntohs(at.sin6_port); /* at the same place in both families */
}

/* A socket of this user, bound; listening if so. -1: this machine has no such address. */
static int socket_of(uid_t user, struct sockaddr_storage at, bool listens)
{
	int fd;

	CHECK(!user || !geteuid());
	CHECK(!user || !seteuid(user));
	fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at))) {
		close(fd);
		fd = -1;
	}
	CHECK(fd < 0 || !listens || !listen(fd, 8));
	CHECK(!user || !seteuid(0));
	return fd;
}

/* The kernel says so, and /proc says the same. */
static void expect_listener(struct sockaddr_storage at, uid_t user)
{
	uid_t found = ~user, by_proc = ~user;
	union ibv_gid where, where_by_proc;
	struct ucred self = {.pid = getpid()};
	uint32_t inodes[4] = {0};

	CHECK(rn_tcp_listener((struct sockaddr *)&at, &found, &where) && found == user);
	CHECK(rn_proc_tcp_listener((struct sockaddr *)&at, &by_proc, &where_by_proc) && by_proc == user);
	CHECK(!memcmp(&where, &where_by_proc, sizeof(where)));
	CHECK(rn_tcp_listener_inodes((struct sockaddr *)&at, inodes, 4) == 1 && inodes[0]);
	CHECK(rn_has_tcp_listener(&self, (struct sockaddr *)&at));
}

static void expect_no_listener(struct sockaddr_storage at)
{
	union ibv_gid where;
	uid_t found;

	CHECK(!rn_tcp_listener_user((struct sockaddr *)&at, &found));
	CHECK(!rn_has_tcp_listener(&(struct ucred){.pid = getpid()}, (struct sockaddr *)&at));
	CHECK(!rn_proc_tcp_listener((struct sockaddr *)&at, &found, &where));
}

static enum rn_port_holder holder(struct sockaddr_storage at, bool v6_only)
{
	return rn_tcp_port_holder((struct sockaddr *)&at, v6_only);
}

static void a_listener_has_a_user(uid_t user)
{
	int fd = socket_of(user, v4(INADDR_LOOPBACK, 0), false);
	uint16_t port = port_of(fd);

	expect_no_listener(v4(INADDR_LOOPBACK, port));
	CHECK(holder(v4(INADDR_LOOPBACK, port), false) == RN_PORT_NOBODYS);
	CHECK(!listen(fd, 8));
	expect_listener(v4(INADDR_LOOPBACK, port), user ? user : geteuid());
	expect_no_listener(v4(INADDR_LOOPBACK + 1, port));
	expect_no_listener(v4(INADDR_LOOPBACK, port ^ 1));
	CHECK(holder(v4(INADDR_LOOPBACK, port), false) == (user ? RN_PORT_OTHERS : RN_PORT_OURS));
	CHECK(holder(v4(INADDR_ANY, port), false) == (user ? RN_PORT_OTHERS : RN_PORT_OURS));
	CHECK(holder(v6(in6addr_any, port), false) == (user ? RN_PORT_OTHERS : RN_PORT_OURS)); /* both families' */
	CHECK(holder(v6(in6addr_any, port), true) == RN_PORT_NOBODYS);
	CHECK(holder(v4(INADDR_LOOPBACK + 1, port), false) == RN_PORT_NOBODYS);
	close(fd);
	expect_no_listener(v4(INADDR_LOOPBACK, port));
	CHECK(holder(v4(INADDR_LOOPBACK, port), false) == RN_PORT_NOBODYS);
}

/* The kernel gives a connection to the listener of its very address, and to a wildcard's else. */
static void the_specific_goes_first(uid_t user)
{
	int anywhere = socket_of(user, v4(INADDR_ANY, 0), true), here;
	uint16_t port = port_of(anywhere);

	expect_listener(v4(INADDR_LOOPBACK, port), user ? user : geteuid());
	expect_listener(v4(INADDR_LOOPBACK + 1, port), user ? user : geteuid());
	expect_listener(v4(INADDR_ANY, port), user ? user : geteuid());
	here = socket_of(0, v6(in6addr_loopback, port), true);
	if (here >= 0) {
		expect_listener(v6(in6addr_loopback, port), geteuid());
		CHECK(holder(v6(in6addr_any, port), false) == RN_PORT_OURS); /* among others */
		CHECK(holder(v6(in6addr_any, port), true) == RN_PORT_OURS);
		CHECK(holder(v4(INADDR_LOOPBACK, port), false) == (user ? RN_PORT_OTHERS : RN_PORT_OURS));
		close(here);
	}
	close(anywhere);
	anywhere = socket_of(user, v6(in6addr_any, 0), true);
	if (anywhere < 0)
		return;
	port = port_of(anywhere);
	expect_listener(v6(in6addr_loopback, port), user ? user : geteuid());
	expect_listener(v6(in6addr_any, port), user ? user : geteuid());
	expect_listener(v4(INADDR_LOOPBACK, port), user ? user : geteuid()); /* it is for both families */
	close(anywhere);
}

static int v6_only(uid_t user, uint16_t port)
{
	struct sockaddr_storage at = v6(in6addr_any, port);
	int yes = 1, fd;

	CHECK(!user || !seteuid(user));
	fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(fd < 0 || (!setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof(yes)) &&
			 !bind(fd, (struct sockaddr *)&at, sizeof(at)) && !listen(fd, 8)));
	CHECK(!user || !seteuid(0));
	return fd;
}

/* /proc does not say that a listener takes IPv6 alone. The kernel does; and one of IPv4 comes before it in any case. */
static void one_of_ipv6_alone_is_none_of_ipv4(uid_t user)
{
	int anywhere = socket_of(0, v4(INADDR_ANY, 0), true), other;
	uint16_t port = port_of(anywhere);
	struct sockaddr_storage at = v4(INADDR_LOOPBACK, port);
	uid_t found;

	other = v6_only(user, port);
	if (other < 0) {
		close(anywhere);
		return;
	}
	expect_listener(at, geteuid());
	close(anywhere);
	CHECK(!rn_tcp_listener_user((struct sockaddr *)&at, &found));
	close(other);
}

/* Two listeners on one address, each bound to a device: /proc shows no difference. */
static void two_users_are_none(void)
{
	int yes = 1, ours = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), others;
	struct sockaddr_storage at = v4(INADDR_LOOPBACK, 0);
	union ibv_gid where;
	uid_t found;

	CHECK(!setsockopt(ours, SOL_SOCKET, SO_BINDTODEVICE, "lo", 2));
	CHECK(!bind(ours, (struct sockaddr *)&at, sizeof(at)) && !listen(ours, 8));
	at = v4(INADDR_LOOPBACK, port_of(ours));
	CHECK(rn_proc_tcp_listener((struct sockaddr *)&at, &found, &where) && !found);
	CHECK(!seteuid(OTHER));
	others = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!seteuid(0));
	CHECK(!setsockopt(others, SOL_SOCKET, SO_BINDTODEVICE, "v0", 2));
	CHECK(!setsockopt(others, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)));
	CHECK(!bind(others, (struct sockaddr *)&at, sizeof(at)) && !listen(others, 8));
	CHECK(!rn_proc_tcp_listener((struct sockaddr *)&at, &found, &where));
	close(others);
	CHECK(rn_proc_tcp_listener((struct sockaddr *)&at, &found, &where) && !found);
	close(ours);
}

static void the_other_end_has_a_user(uid_t user)
{
	int listener = socket_of(user, v4(INADDR_LOOPBACK, 0), true), here, there;
	struct sockaddr_storage to = v4(INADDR_LOOPBACK, port_of(listener));
	uid_t found = 12345;

	here = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!connect(here, (struct sockaddr *)&to, sizeof(struct sockaddr_in)));
	CHECK(!rn_tcp_peer_user(here, &found)); /* nobody has accepted it: it is not root's */
	CHECK(!user || !seteuid(user));
	there = accept(listener, NULL, NULL);
	CHECK(!user || !seteuid(0));
	CHECK(there >= 0);
	CHECK(rn_tcp_peer_user(here, &found) && found == (user ? user : geteuid()));
	CHECK(rn_tcp_peer_user(there, &found) && found == geteuid());
	close(here);
	CHECK(!rn_tcp_peer_user(there, &found)); /* closed: it is not root's */
	close(there);
	close(listener);
}

static int name(uid_t user, const char *text, int type)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(text));
	int fd;

	memcpy(at.sun_path + 1, text, strlen(text));
	CHECK(!user || !seteuid(user));
	fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
	CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&at, length));
	CHECK(!user || !seteuid(0));
	return fd;
}

static void a_name_has_a_user(uid_t user)
{
	char text[64];
	uid_t found;
	int fd, other;

	snprintf(text, sizeof(text), "rdmanet-test/%d", (int)getpid());
	CHECK(!rn_unix_name_user(text, strlen(text), &found));
	other = name(0, text, SOCK_DGRAM); /* another name, of the same letters */
	fd = name(user, text, SOCK_STREAM);
	CHECK(rn_unix_name_user(text, strlen(text), &found) && found == (user ? user : geteuid()));
	CHECK(!rn_unix_name_user(text, strlen(text) - 1, &found));
	CHECK(!listen(fd, 1));
	CHECK(rn_unix_name_user(text, strlen(text), &found) && found == (user ? user : geteuid()));
	close(fd);
	CHECK(!rn_unix_name_user(text, strlen(text), &found));
	close(other);
}

struct wanted {
	const char *text;
	bool listens;
	uid_t user;
};

static bool is_wanted(const struct rn_unix_name *name, void *closure)
{
	const struct wanted *wanted = closure;

	return name->length == strlen(wanted->text) && !memcmp(name->text, wanted->text, name->length) &&
	       name->listens == wanted->listens && (!name->has_user || name->user == wanted->user);
}

static void expect_name(const char *text, bool listens, uid_t user, int found)
{
	struct wanted wanted = {.text = text, .listens = listens, .user = user};

	CHECK(rn_unix_name_search(is_wanted, &wanted) == found);
	CHECK(rn_proc_unix_name_search(is_wanted, &wanted) == found);
}

/* The kernel says so, and /proc says the same. */
static void a_name_is_found(uid_t user)
{
	uid_t self = user ? user : geteuid();
	int fd, other, there, accepted;
	char text[64];
	struct sockaddr_un at;
	socklen_t length = sizeof(at);

	snprintf(text, sizeof(text), "rdmanet-test/%d", (int)getpid());
	expect_name(text, false, self, 0);
	other = name(0, text, SOCK_DGRAM);
	expect_name(text, false, self, 0);
	fd = name(user, text, SOCK_STREAM);
	expect_name(text, false, self, 1);
	expect_name(text, true, self, 0);
	CHECK(!listen(fd, 1));
	expect_name(text, true, self, 1);
	expect_name(text, false, self, 0);
	CHECK(!getsockname(fd, (struct sockaddr *)&at, &length));
	there = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!connect(there, (struct sockaddr *)&at, length));
	expect_name(text, false, self, 0); /* of a connection, accepted or not */
	accepted = accept(fd, NULL, NULL);
	CHECK(accepted >= 0);
	close(fd);
	expect_name(text, false, self, 0);
	close(accepted);
	close(there);
	close(other);
}

/* More than one message of the kernel's holds. */
static void among_hundreds(void)
{
	enum { HUNDREDS = 900 };
	static int fds[HUNDREDS];
	char text[64];
	uid_t found;

	for (int i = 0; i < HUNDREDS; i++) {
		snprintf(text, sizeof(text), "rdmanet-test/%d/%d", (int)getpid(), i);
		fds[i] = name(0, text, SOCK_STREAM);
	}
	CHECK(rn_unix_name_user(text, strlen(text), &found) && found == geteuid());
	for (int i = 0; i < HUNDREDS; i++)
		close(fds[i]);
}

static void ours(void)
{
	a_listener_has_a_user(0);
	the_specific_goes_first(0);
	one_of_ipv6_alone_is_none_of_ipv4(0);
	the_other_end_has_a_user(0);
	a_name_has_a_user(0);
	a_name_is_found(0);
}

static void another_users(void)
{
	a_listener_has_a_user(OTHER);
	the_specific_goes_first(OTHER);
	one_of_ipv6_alone_is_none_of_ipv4(OTHER);
	the_other_end_has_a_user(OTHER);
	a_name_has_a_user(OTHER);
	a_name_is_found(OTHER);
}

int main(void)
{
	RUN(ours);
	if (!geteuid()) {
		RUN(another_users);
		RUN_IN_NETWORK(two_users_are_none);
	} else {
		printf("  not root: no other user's\n");
	}
	RUN(among_hundreds);
	CHECK(rn_is_overflow_user(65534) && !rn_is_overflow_user(geteuid()));
	CHECK(rn_fd_count() == 0);
	return 0;
}
