/* SPDX-License-Identifier: Apache-2.0 */
/* Whose port is it? RDMA's port space beside TCP's, wildcards, and the options about them. */
#include "cm_harness.h"

#include "base/sock_diag.h"
#include "namespace.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* From now on this process is refused sockets of NETLINK_SOCK_DIAG. */
static void deny_sock_diag(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 5),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NETLINK_SOCK_DIAG, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPROTONOSUPPORT),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
	CHECK(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG) == -1 && errno == EPROTONOSUPPORT);
}

static int tcp_program(uint16_t *port)
{
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, 8));
	CHECK(!getsockname(fd, (struct sockaddr *)&at, &length));
	*port = ntohs(at.sin_port);
	return fd;
}

static int try_bind(struct rdma_cm_id *id, const void *address)
{
	return rdma_bind_addr(id, (struct sockaddr *)(uintptr_t)address) ? errno : 0;
}

static void beside_a_tcp_program(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *other = new_id(channel);
	uint16_t port;
	int tcp = tcp_program(&port), fd;
	struct sockaddr_in at = address(port), any = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	struct pair pair;

	CHECK(!try_bind(listener, &at));
	CHECK(ntohs(rdma_get_src_port(listener)) == port);
	CHECK(try_bind(other, &at) == EADDRINUSE); /* of RDMA's, there is one */
	CHECK(try_bind(other, &any) == EADDRINUSE);
	CHECK(try_bind(other, &any6) == EADDRINUSE);
	CHECK(!rdma_listen(listener, 4));
	CHECK(try_bind(other, &at) == EADDRINUSE);
	pair = connect_pair(listener, channel, port);
	CHECK(ntohs(rdma_get_dst_port(pair.active)) == port && ntohs(rdma_get_src_port(pair.passive)) == port);
	CHECK(!rdma_disconnect(pair.active));
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.active);
	destroy(pair.passive);

	/* The other program never saw any of this. */
	CHECK(fcntl(tcp, F_SETFL, O_NONBLOCK) == 0);
	CHECK(accept(tcp, NULL, NULL) == -1 && errno == EAGAIN);
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!connect(fd, (struct sockaddr *)&at, sizeof at));
	close(fd);
	close(tcp);
	CHECK(try_bind(other, &at) == EADDRINUSE); /* also when TCP's port is free */
	CHECK(!rdma_destroy_id(listener));
	CHECK(!try_bind(other, &at));
	CHECK(!rdma_destroy_id(other));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* It lets others of its user share its port, but doesn't mean us: each of its connections is its own. */
static void beside_a_tcp_program_that_shares(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *late = new_id(channel);
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int yes = 1, tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), ours, fd;

	CHECK(!setsockopt(tcp, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes));
	CHECK(!bind(tcp, (struct sockaddr *)&at, sizeof at) && !getsockname(tcp, (struct sockaddr *)&at, &length));
	CHECK(!try_bind(late, &at)); /* it doesn't listen yet */
	CHECK(!listen(tcp, 64));
	CHECK(rdma_listen(late, 4) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_destroy_id(late));
	CHECK(!try_bind(listener, &at) && !rdma_listen(listener, 4)); /* by name */
	for (int i = 0; i < 32; i++) {
		fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		CHECK(!connect(fd, (struct sockaddr *)&at, sizeof at));
		CHECK((ours = accept(tcp, NULL, NULL)) >= 0); /* or it waits for ever */
		close(ours);
		close(fd);
	}
	close(tcp);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* As in a kernel without the modules inet_diag and tcp_diag. */
static void where_netlink_does_not_tell(void)
{
	deny_sock_diag();
	beside_a_tcp_program_that_shares();
}

/* Bound, and nobody listens: that it is a TCP program's isn't to be seen. */
static void a_held_port_is_taken(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel);
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(!bind(tcp, (struct sockaddr *)&at, sizeof at) && !getsockname(tcp, (struct sockaddr *)&at, &length));
	CHECK(try_bind(listener, &at) == EADDRINUSE);
	close(tcp);
	CHECK(!try_bind(listener, &at));
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void on_all_addresses(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *other = new_id(channel);
	uint16_t port;
	int tcp = tcp_program(&port);
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	struct sockaddr_in *far;
	struct pair pair;

	for (int beside = 1; beside >= 0; beside--) {
		CHECK(!try_bind(listener, &any6)); /* at first beside a TCP program, then not */
		CHECK(!rdma_listen(listener, 4));
		pair = connect_pair(listener, channel, port);
		far = (void *)rdma_get_peer_addr(pair.passive);
		/* Who comes by name has no address: he gets the loopback's. */
		CHECK(far->sin_family == (beside && has_ipv6() ? AF_INET6 : AF_INET));
		CHECK(rn_gid_index_of(rdma_get_local_addr(pair.passive)) >= 0);
		destroy(pair.active);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(pair.passive);
		CHECK(!rdma_destroy_id(listener));
		listener = new_id(channel);
		if (beside)
			close(tcp);
	}
	CHECK(!rdma_destroy_id(listener) && !rdma_destroy_id(other));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void where_there_is_no_ipv6(void)
{
	write_to("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
	on_all_addresses();
}

static void one_family_only(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *v4 = new_id(channel), *v6 = new_id(channel), *both = new_id(channel);
	struct sockaddr_in any = {.sin_family = AF_INET};
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6};
	int yes = 1;

	CHECK(!try_bind(v4, &any));
	any6.sin6_port = rdma_get_src_port(v4);
	CHECK(try_bind(both, &any6) == EADDRINUSE);
	CHECK(!rdma_set_option(v6, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes));
	CHECK(!try_bind(v6, &any6));
	CHECK(rdma_set_option(v6, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes) == -1 && errno == EINVAL);
	CHECK(!rdma_listen(v4, 1) && !rdma_listen(v6, 1));
	CHECK(!rdma_destroy_id(v4) && !rdma_destroy_id(v6) && !rdma_destroy_id(both));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static int tcp_on(int family, uint16_t *port)
{
	struct sockaddr_in6 any = {.sin6_family = (sa_family_t)family, .sin6_port = htons(*port)};
	socklen_t length = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof any;
	int yes = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (family == AF_INET6)
		CHECK(!setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes));
	CHECK(!bind(fd, (struct sockaddr *)&any, length) && !listen(fd, 8));
	CHECK(!getsockname(fd, (struct sockaddr *)&any, &length));
	*port = ntohs(any.sin6_port); /* at the same place in both families */
	return fd;
}

static struct rdma_cm_id *asks(struct rdma_event_channel *channel, const void *to)
{
	struct rdma_cm_id *id = new_id(channel);
	struct rdma_conn_param param = plain;

	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)(uintptr_t)to, 100));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(id, 100));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	param.qp_num = 0x4000;
	CHECK(!rdma_connect(id, &param));
	return id;
}

/* A server has 0.0.0.0 and :: of a port for TCP, and then by RDMA, too: each address leads to its own listener. */
static void both_families_beside_tcp(void)
{
	struct rdma_event_channel *channel = new_channel(), *clients = new_channel();
	struct rdma_cm_id *v4 = new_id(channel), *v6 = new_id(channel), *other = new_id(channel), *id, *passive;
	struct rdma_cm_event *event;
	uint16_t port = 0;
	int tcp4 = tcp_on(AF_INET, &port), tcp6 = tcp_on(AF_INET6, &port), yes = 1;
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)}, to4 = address(port);
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)}, to6 = any6;

	to6.sin6_addr = in6addr_loopback;
	CHECK(!rdma_set_option(v6, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes));
	CHECK(!try_bind(v4, &any));
	CHECK(try_bind(other, &any6) == EADDRINUSE); /* both families: one of them is taken */
	CHECK(!try_bind(v6, &any6));
	CHECK(try_bind(other, &any6) == EADDRINUSE && try_bind(other, &to6) == EADDRINUSE);
	CHECK(try_bind(other, &to4) == EADDRINUSE);
	CHECK(!rdma_listen(v6, 4) && !rdma_listen(v4, 4));
	for (int i = 0; i < 2; i++) {
		id = asks(clients, i ? (void *)&to6 : (void *)&to4);
		event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		CHECK(event->listen_id == (i ? v6 : v4));
		CHECK(rdma_get_local_addr(event->id)->sa_family == (i ? AF_INET6 : AF_INET));
		passive = event->id;
		rdma_ack_cm_event(event);
		CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive));
		want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
		CHECK(!rdma_destroy_id(id));
	}
	CHECK(!rdma_destroy_id(v4));
	id = asks(clients, &to4);
	want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID); /* v6 is not asked */
	CHECK(!rdma_destroy_id(id));
	CHECK(accept(tcp4, NULL, NULL) == -1 && errno == EAGAIN);
	CHECK(accept(tcp6, NULL, NULL) == -1 && errno == EAGAIN);
	close(tcp4);
	close(tcp6);
	CHECK(!rdma_destroy_id(v6) && !rdma_destroy_id(other));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(clients);
	CHECK(rn_fd_count() == 0);
}

/* Two may have the port, and one of them listen. */
static void used_again(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *a = new_id(channel), *b = new_id(channel);
	struct sockaddr_in at = address(0);
	int yes = 1;

	CHECK(!rdma_set_option(a, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
	CHECK(!try_bind(a, &at));
	at.sin_port = rdma_get_src_port(a);
	CHECK(try_bind(b, &at) == EADDRINUSE);
	CHECK(!rdma_set_option(b, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
	CHECK(!try_bind(b, &at));
	CHECK(!rdma_listen(b, 1));
	CHECK(rdma_listen(a, 1) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_destroy_id(a) && !rdma_destroy_id(b));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* --- a port that passes between TCP and RDMA ----------------------------------------------------------------------- */

/* As every TCP server does it. -1 and errno. */
static int tcp_server(const void *address, socklen_t length)
{
	int yes = 1, fd = socket(((const struct sockaddr *)address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0), error;

	CHECK(fd >= 0 && !setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
	if (!bind(fd, address, length) && !listen(fd, 8))
		return fd;
	error = errno;
	close(fd);
	errno = error;
	return -1;
}

static bool has_old_connections(struct sockaddr_in at)
{
	struct rn_port_use use;

	CHECK(rn_tcp_port_use((struct sockaddr *)&at, false, &use) && !use.is_held);
	return use.has_connections;
}

/* A port with old connections of a TCP server, which has ended them itself. */
static struct sockaddr_in left_by_tcp(void)
{
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int server = tcp_server(&at, sizeof at), here, there = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char end;

	CHECK(server >= 0 && !getsockname(server, (struct sockaddr *)&at, &length));
	CHECK(!has_old_connections(at));
	CHECK(!connect(there, (struct sockaddr *)&at, sizeof at));
	CHECK((here = accept(server, NULL, NULL)) >= 0);
	close(server);
	CHECK(!shutdown(here, SHUT_WR) && !read(there, &end, 1));
	close(there);
	CHECK(!read(here, &end, 1));
	close(here);
	CHECK(has_old_connections(at));
	return at;
}

/* While the identifier is bound nobody else has the port. */
static void is_ours_alone(struct rdma_cm_id *id, struct sockaddr_in at)
{
	struct rdma_cm_id *other = new_id(id->channel);
	int yes = 1, tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(!setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
	CHECK(bind(tcp, (struct sockaddr *)&at, sizeof at) == -1 && errno == EADDRINUSE);
	close(tcp);
	CHECK(try_bind(other, &at) == EADDRINUSE);
	CHECK(!rdma_destroy_id(other));
}

static void rejects_a_client(struct rdma_cm_id *listener, struct sockaddr_in to)
{
	struct rdma_event_channel *clients = new_channel();
	struct rdma_cm_id *id = asks(clients, &to), *passive;
	struct rdma_cm_event *event = want(listener->channel, RDMA_CM_EVENT_CONNECT_REQUEST);

	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive)); /* our end is closed first */
	want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(clients);
}

static void passes_to_rdma_and_back(const void *any, socklen_t length)
{
	struct rdma_event_channel *channel = new_channel();
	struct sockaddr_in at = left_by_tcp();
	struct sockaddr_storage where = {0};
	struct rdma_cm_id *listener;
	int tcp;

	memcpy(&where, any, length);
	((struct sockaddr_in *)&where)->sin_port = at.sin_port; /* at the same place in both families */
	for (int again = 0; again < 2; again++) { /* and from one RDMA server to the next */
		listener = new_id(channel);
		CHECK(!try_bind(listener, &where));
		is_ours_alone(listener, at);
		CHECK(!rdma_listen(listener, 4));
		is_ours_alone(listener, at);
		rejects_a_client(listener, at);
		CHECK(!rdma_destroy_id(listener));
	}
	close_shared();
	CHECK(has_old_connections(at));
	CHECK((tcp = tcp_server(&at, sizeof at)) >= 0);
	close(tcp);
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void from_tcp_and_back(void)
{
	struct sockaddr_in one = address(0), any = {.sin_family = AF_INET};
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6};

	passes_to_rdma_and_back(&one, sizeof one);
	passes_to_rdma_and_back(&any, sizeof any);
	if (has_ipv6())
		passes_to_rdma_and_back(&any6, sizeof any6);
}

/* The last connections of the port are an RDMA program's: others' servers can have it at once. */
static void from_rdma_to_tcp(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel);
	struct sockaddr_in at = address(0);
	int tcp;

	CHECK(!try_bind(listener, &at));
	at.sin_port = rdma_get_src_port(listener);
	CHECK(!rdma_listen(listener, 4));
	rejects_a_client(listener, at);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	CHECK(has_old_connections(at));
	CHECK((tcp = tcp_server(&at, sizeof at)) >= 0);
	close(tcp);
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* Who asks before the program listens is heard then. (Some tell each other their ports before: perftest does.) */
static void early_clients_wait(void)
{
	struct rdma_event_channel *channel = new_channel(), *clients = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *id, *passive;
	struct sockaddr_in at = left_by_tcp();
	struct rdma_cm_event *event;

	CHECK(!try_bind(listener, &at));
	id = asks(clients, &at);
	CHECK(!next_event(clients, 50));
	CHECK(!rdma_listen(listener, 4));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive));
	want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(listener));

	listener = new_id(channel); /* or it learns that nobody will */
	CHECK(!try_bind(listener, &at));
	id = asks(clients, &at);
	CHECK(!next_event(clients, 50));
	CHECK(!rdma_destroy_id(listener));
	want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(clients);
	close_shared();
	CHECK(rn_fd_count() == 0);
}

/* A client may choose such a port, too. */
static void from_tcp_to_a_client(void)
{
	struct rdma_event_channel *channel = new_channel(), *clients = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *id = new_id(clients), *passive;
	struct sockaddr_in from = left_by_tcp(), to = address(0);
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;

	CHECK(!try_bind(listener, &to) && !rdma_listen(listener, 4));
	to.sin_port = rdma_get_src_port(listener);
	param.qp_num = 0x4000;
	CHECK(!rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&to, 100));
	want_status(clients, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	is_ours_alone(id, from);
	CHECK(!rdma_resolve_route(id, 100));
	want_status(clients, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(rdma_get_dst_port(passive) == from.sin_port);
	CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive));
	want_status(clients, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(clients);
	close_shared();
	CHECK(rn_fd_count() == 0);
}

/* A TCP program that has bound the port, and does not listen yet, keeps it. Older kernels do not tell of it. */
static void not_from_a_program_that_is_bound(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel);
	struct sockaddr_in at = left_by_tcp();
	struct rn_port_use use;
	int yes = 1, tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(!setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) && !bind(tcp, (struct sockaddr *)&at, sizeof at));
	CHECK(rn_tcp_port_use((struct sockaddr *)&at, false, &use) && use.has_connections);
	if (use.is_held) {
		CHECK(try_bind(listener, &at) == EADDRINUSE);
		CHECK(!listen(tcp, 8));
	} else {
		printf("  Linux before 6.8: a socket that is only bound is not seen\n");
	}
	close(tcp);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void one_address_is_not_another(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *id = new_id(channel);
	struct sockaddr_in at = address(0), next = address(0);
	struct rdma_conn_param param = plain;

	CHECK(!try_bind(listener, &at));
	CHECK(!rdma_listen(listener, 1));
	next.sin_addr.s_addr = htonl(0x7f000002);
	next.sin_port = rdma_get_src_port(listener);
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&next, 0));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(id, 0));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	destroy(id);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

int main(void)
{
	RUN_IN_NETWORK(where_netlink_does_not_tell); /* first: that it tells is remembered */
	RUN(beside_a_tcp_program);
	RUN(beside_a_tcp_program_that_shares);
	RUN(a_held_port_is_taken);
	RUN(on_all_addresses);
	RUN_IN_NETWORK(where_there_is_no_ipv6);
	RUN(one_family_only);
	if (has_ipv6())
		RUN(both_families_beside_tcp);
	RUN(used_again);
	RUN(from_tcp_and_back);
	RUN(from_rdma_to_tcp);
	RUN(early_clients_wait);
	RUN(from_tcp_to_a_client);
	RUN(not_from_a_program_that_is_bound);
	RUN(one_address_is_not_another);
	return 0;
}
