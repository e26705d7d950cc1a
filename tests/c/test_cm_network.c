/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager between two hosts: two network namespaces, joined by veth.  The queue pairs
 * are numbers only; what is tested is how the hosts find and leave each other.
 */
#include "cm_harness.h"
#include "namespace.h"

#include <net/if.h>
#include <signal.h>
#include <sys/prctl.h>

enum { PORT = 7471, MUTE, SLOW };

struct other_host {
	pid_t pid;
	int fd; /* a byte from it: go on */
};

static void wait_byte(int fd)
{
	char byte;

	CHECK(read(fd, &byte, 1) == 1);
}

static void send_byte(int fd)
{
	CHECK(write(fd, "x", 1) == 1);
}

/*
 * Listens on all addresses, takes what comes, and answers; until it is killed. On port MUTE there is a TCP program that
 * says nothing, and who asks at port SLOW waits until we are told.
 */
static void serve(int fd)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(PORT)};
	struct sockaddr_in6 slow_at = {.sin6_family = AF_INET6, .sin6_port = htons(SLOW)};
	struct sockaddr_in6 mute_at = {.sin6_family = AF_INET6, .sin6_port = htons(MUTE)};
	int mute = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener = new_id(channel), *slow = new_id(channel);
	struct rdma_conn_param answer = with_data("from afar");
	struct rdma_cm_event *event;

	answer.qp_num = 0x900100;
	CHECK(!bind(mute, (struct sockaddr *)&mute_at, sizeof mute_at) && !listen(mute, 4));
	CHECK(!rdma_bind_addr(slow, (struct sockaddr *)&slow_at) && !rdma_listen(slow, 4));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&any) && !rdma_listen(listener, 4));
	send_byte(fd);
	while (!rdma_get_cm_event(channel, &event)) {
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type type = event->event;

		if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(event->param.conn.qp_num == 0x900000);
			CHECK(rn_gid_index_of(rdma_get_local_addr(id)) >= 0);
			CHECK(!rn_gid_is_ours(&id->route.addr.addr.ibaddr.dgid));
		}
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST && event->listen_id == slow)
			wait_byte(fd);
		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			CHECK(!rdma_accept(id, &answer));
		if (type == RDMA_CM_EVENT_DISCONNECTED)
			CHECK(!rdma_destroy_id(id));
	}
}

static struct other_host start_host(void)
{
	struct other_host host;
	int fds[2];
	char command[64];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	host.pid = fork();
	CHECK(host.pid >= 0);
	if (!host.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		CHECK(!unshare(CLONE_NEWNET));
		send_byte(fds[1]);
		wait_byte(fds[1]); /* v1 is here */
		ip("link set lo up && ip link set v1 addrgenmode none && ip link set v1 up");
		ip("addr add 10.8.0.2/24 dev v1 && ip addr add fd08::2/64 dev v1 nodad && ip addr add fe80::2/64 dev v1 nodad");
		serve(fds[1]);
		exit(0);
	}
	host.fd = fds[0];
	wait_byte(host.fd);
	snprintf(command, sizeof command, "link set v1 netns %d", (int)host.pid);
	ip(command);
	ip("link set v0 addrgenmode none && ip link set v0 up"); /* a link-local address of the kernel might be taken instead */
	ip("addr add 10.8.0.1/24 dev v0 && ip addr add fd08::1/64 dev v0 nodad && ip addr add fe80::1/64 dev v0 nodad");
	send_byte(host.fd);
	wait_byte(host.fd);
	return host;
}

static void stop_host(struct other_host *host)
{
	kill(host->pid, SIGKILL);
	CHECK(waitpid(host->pid, NULL, 0) == host->pid);
	close(host->fd);
}

static struct sockaddr_storage parse(const char *text)
{
	struct sockaddr_storage address = {0};
	struct sockaddr_in *v4 = (void *)&address;
	struct sockaddr_in6 *v6 = (void *)&address;

	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(PORT);
	} else {
		CHECK(inet_pton(AF_INET6, text, &v6->sin6_addr) == 1);
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(PORT);
		if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr))
			v6->sin6_scope_id = if_nametoindex("v0");
	}
	return address;
}

static struct rdma_cm_id *connect_to_host(struct rdma_event_channel *channel, const char *there, const char *here)
{
	struct rdma_cm_id *id = new_id(channel);
	struct sockaddr_storage to = parse(there), from = parse(here);
	struct rdma_conn_param param = with_data("hello");
	struct rdma_cm_event *event;
	union ibv_gid near, far;

	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	rn_gid_of((struct sockaddr *)&from, &near);
	rn_gid_of((struct sockaddr *)&to, &far);
	CHECK(!memcmp(&id->route.addr.addr.ibaddr.sgid, &near, 16));
	CHECK(!memcmp(&id->route.addr.addr.ibaddr.dgid, &far, 16));
	CHECK(!rdma_resolve_route(id, 1000));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	param.qp_num = 0x900000;
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(event->param.conn.qp_num == 0x900100 && !strcmp(event->param.conn.private_data, "from afar"));
	rdma_ack_cm_event(event);
	CHECK(!rdma_establish(id));
	return id;
}

static void hosts_find_each_other(void)
{
	static const char *const addresses[][2] = {
		{"10.8.0.2", "10.8.0.1"}, {"fd08::2", "fd08::1"}, {"fe80::2", "fe80::1"}};
	struct other_host host = start_host();
	struct rdma_event_channel *channel = new_channel();
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	struct rdma_cm_id *id;
	int mask;

	for (int i = 0; i < 3; i++) {
		id = connect_to_host(channel, addresses[i][0], addresses[i][1]);
		CHECK(!rdma_init_qp_attr(id, &attr, &mask));
		CHECK(attr.ah_attr.grh.sgid_index == rn_gid_index_of(rdma_get_local_addr(id)));
		CHECK(attr.dest_qp_num == 0x900100);
		CHECK(!rdma_disconnect(id));
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		CHECK(!rdma_destroy_id(id));
	}
	id = connect_to_host(channel, "10.8.0.2", "10.8.0.1");
	stop_host(&host);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void resolve_to(struct rdma_cm_id *id, const char *there, enum rdma_cm_event_type type, int status)
{
	struct sockaddr_storage to = parse(there);

	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 100));
	want_status(id->channel, type, status);
}

/* No way, a way that is barred, nobody at its end, nobody at the port, and the network gone. */
static void hosts_that_cannot_be_found(void)
{
	struct other_host host = start_host();
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct rdma_conn_param param = plain;
	struct sockaddr_in to;

	setenv("RDMANET_SOFT_CM_TIMEOUT", "400", 1);
	channel = new_channel();
	unsetenv("RDMANET_SOFT_CM_TIMEOUT");
	id = new_id(channel);

	ip("route add unreachable 10.66.0.0/16");
	resolve_to(id, "10.9.0.1", RDMA_CM_EVENT_ADDR_ERROR, -ENETUNREACH);
	resolve_to(id, "10.66.0.1", RDMA_CM_EVENT_ADDR_ERROR, -EHOSTUNREACH);
	resolve_to(id, "10.8.0.77", RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(id, 100));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	param.qp_num = 0x900000;
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT); /* see above */
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	channel = new_channel(); /* with more patience */

	id = new_id(channel);
	to = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(1), .sin_addr.s_addr = htonl(0x0a080002)};
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 100));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(id, 100));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	CHECK(!rdma_destroy_id(id));

	/* Our own address goes: there is no address vector to be had any more. */
	id = connect_to_host(channel, "10.8.0.2", "10.8.0.1");
	ip("addr del 10.8.0.1/24 dev v0");
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	int mask;
	CHECK(rdma_init_qp_attr(id, &attr, &mask) == -1 && errno == EADDRNOTAVAIL);
	CHECK(!rdma_destroy_id(id));
	stop_host(&host);
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* Nothing that the client could look at beforehand. Who says nothing isn't one of ours; whose program takes its time
 * says so. */
static void who_listens_there(void)
{
	struct other_host host;
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct rdma_conn_param param = plain;
	struct sockaddr_storage to;

	setenv("RDMANET_SOFT_SILENCE", "400", 1);
	host = start_host();
	channel = new_channel();
	param.qp_num = 0x900000;
	for (uint16_t port = MUTE; port <= SLOW; port++) {
		id = new_id(channel);
		to = parse("10.8.0.2");
		rn_cm_set_port((struct sockaddr *)&to, htons(port));
		CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 100));
		want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
		CHECK(!rdma_resolve_route(id, 100));
		want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
		CHECK(!rdma_connect(id, &param));
		if (port == SLOW) {
			want_none(channel, 1500);
			send_byte(host.fd);
			want_status(channel, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
		} else {
			event = want(channel, RDMA_CM_EVENT_REJECTED);
			CHECK(event->status == RN_REJ_INVALID_SERVICE_ID);
			CHECK(!strcmp(event->param.conn.private_data, RN_CM_NOT_OURS));
			rdma_ack_cm_event(event);
		}
		CHECK(!rdma_destroy_id(id));
	}
	stop_host(&host);
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static void groups_without_a_way(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct sockaddr_storage group = parse("239.1.2.3");
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&group, 100));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0); /* by loopback: there is nothing else */
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	want_status(channel, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	RUN_IN_NETWORK(hosts_find_each_other);
	RUN_IN_NETWORK(hosts_that_cannot_be_found);
	RUN_IN_NETWORK(who_listens_there);
	RUN_IN_NETWORK(groups_without_a_way);
	return 0;
}
