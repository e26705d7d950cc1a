/* SPDX-License-Identifier: Apache-2.0 */
/* The connection manager: in one process, and against processes of its own making. */
#include "cm_harness.h"
#include "cm/wire.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

static struct rdma_conn_param plain_copy = {.responder_resources = 4, .initiator_depth = 2, .retry_count = 7};

/* --- one process -------------------------------------------------------------------------------- */

static void bind_addresses(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel), *other;
	struct sockaddr_in far = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xc6336401)}, same;
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6};
	struct sockaddr unknown = {.sa_family = AF_UNIX};

	CHECK(rdma_bind_addr(id, (struct sockaddr *)&far) == -1 && errno == EADDRNOTAVAIL);
	CHECK(rdma_bind_addr(id, &unknown) == -1 && errno == EINVAL);
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&any6));
	CHECK(rdma_get_src_port(id) && !id->verbs); /* as on adapters: it names no device yet */
	CHECK(IN6_IS_ADDR_UNSPECIFIED(&((struct sockaddr_in6 *)rdma_get_local_addr(id))->sin6_addr));
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&any6) == -1 && errno == EINVAL);
	CHECK(!rdma_listen(id, 1));
	CHECK(!rdma_destroy_id(id));

	id = new_id(channel);
	same = address(0);
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&same));
	same.sin_port = rdma_get_src_port(id);
	other = new_id(channel);
	CHECK(rdma_bind_addr(other, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_listen(id, 0));
	CHECK(rdma_bind_addr(other, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_destroy_id(id));
	CHECK(!rdma_bind_addr(other, (struct sockaddr *)&same));
	CHECK(!rdma_destroy_id(other));
	rdma_destroy_event_channel(channel);
}

static void wrong_order_is_refused(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct rdma_conn_param param = plain;
	struct sockaddr_in everybody = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_BROADCAST)};
	struct rdma_cm_event *event;
	char big[57] = "";

	CHECK(rdma_connect(id, &param) == -1 && errno == EINVAL);
	CHECK(rdma_accept(id, &param) == -1 && errno == EINVAL);
	CHECK(rdma_disconnect(id) == -1 && errno == EINVAL);
	CHECK(rdma_reject(id, NULL, 0) == -1 && errno == EINVAL);
	CHECK(rdma_resolve_route(id, 0) == -1 && errno == EINVAL);
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&everybody, 0));
	event = want(channel, RDMA_CM_EVENT_ADDR_ERROR);
	CHECK(event->status == -EHOSTUNREACH || event->status == -ENETUNREACH); /* the latter where no way leads out */
	rdma_ack_cm_event(event);
	resolve(id, 9);
	param.private_data = big;
	param.private_data_len = 57;
	CHECK(rdma_connect(id, &param) == -1 && errno == EINVAL);
	param.private_data_len = 0;
	param.initiator_depth = 129;
	CHECK(rdma_connect(id, &param) == -1 && errno == EINVAL);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

static void connects_and_disconnects(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);

	for (int who = 0; who < 3; who++) {
		struct pair pair = connect_pair(listener, client, port);
		struct sockaddr_in *near = (void *)rdma_get_local_addr(pair.active);
		struct sockaddr_in *far = (void *)rdma_get_peer_addr(pair.passive);

		CHECK(near->sin_port && near->sin_port == far->sin_port);
		CHECK(near->sin_addr.s_addr == far->sin_addr.s_addr);
		CHECK(ntohs(rdma_get_src_port(pair.passive)) == port && ntohs(rdma_get_dst_port(pair.active)) == port);
		if (who != 1)
			CHECK(!rdma_disconnect(pair.active));
		if (who != 0)
			CHECK(!rdma_disconnect(pair.passive));
		want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
		want_status(client, RDMA_CM_EVENT_DISCONNECTED, 0);
		CHECK(!rdma_disconnect(pair.active) && !rdma_disconnect(pair.passive));
		CHECK(pair.active->qp->state == IBV_QPS_ERR);
		want_none(server, 5);
		want_none(client, 5);
		destroy(pair.active);
		destroy(pair.passive);
	}
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

static void destroyed_while_connected(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	struct pair pair = connect_pair(listener, channel, port);

	destroy(pair.active);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.passive);
	pair = connect_pair(listener, channel, port);
	destroy(pair.passive);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.active);
	want_none(channel, 5);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

static void connect_ipv6(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *listener = new_id(channel), *id = new_id(channel), *passive;
	struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
	CHECK(!rdma_listen(listener, 0));
	at.sin6_port = rdma_get_src_port(listener);
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&at, 100));
	want_status(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(id, 100));
	want_status(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	make_qp(passive);
	CHECK(!rdma_accept(passive, NULL));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(!ibv_query_qp(passive->qp, &attr, 0x1fffff, &init));
	CHECK(attr.ah_attr.grh.sgid_index == rn_gid_index_of(rdma_get_local_addr(passive)));
	CHECK(attr.ah_attr.grh.dgid.raw[15] == 1);
	CHECK(attr.max_rd_atomic == 4 && attr.max_dest_rd_atomic == 2);
	CHECK(!ibv_query_qp(id->qp, &attr, 0x1fffff, &init));
	CHECK(attr.max_rd_atomic == 2 && attr.max_dest_rd_atomic == 4);
	destroy(id);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

static void connect_from_a_bound_port(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = plain;
	struct sockaddr_in from = address(0);
	struct rdma_cm_event *event;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port), *id = new_id(channel);
	__be16 source;

	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&from));
	source = rdma_get_src_port(id);
	resolve(id, port);
	CHECK(rdma_get_src_port(id) == source);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_get_dst_port(event->id) == source && rdma_get_src_port(id) == source);
	CHECK(!rdma_reject(event->id, NULL, 0));
	struct rdma_cm_id *passive = event->id;
	rdma_ack_cm_event(event);
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(!rdma_destroy_id(passive));
	destroy(id);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

/* Connections of the last server, in TIME_WAIT, don't keep the next from its port; a server does. */
static void a_port_is_free_at_once(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	struct sockaddr_in same = address(port);

	for (int i = 0; i < 3; i++) {
		struct pair pair = connect_pair(listener, channel, port);
		struct rdma_cm_id *other;

		CHECK(!rdma_disconnect(pair.passive)); /* whoever closes first has the TIME_WAIT */
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(pair.passive);
		destroy(pair.active);
		CHECK(!rdma_destroy_id(listener));
		listener = new_id(channel);
		CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&same));
		other = new_id(channel);
		CHECK(rdma_bind_addr(other, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
		CHECK(!rdma_listen(listener, 10));
		CHECK(rdma_bind_addr(other, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
		CHECK(!rdma_destroy_id(other));
	}
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

static void refusals(void)
{
	struct rdma_event_channel *channel = new_channel(), *server = new_channel();
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port), *id = new_id(channel), *passive;

	/* rejected by the program, with private data */
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_reject(passive, "no", 3));
	CHECK(!rdma_destroy_id(passive));
	event = want(channel, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 28 && event->param.conn.private_data_len == 148);
	CHECK(!strcmp(event->param.conn.private_data, "no"));
	rdma_ack_cm_event(event);
	CHECK(id->qp->state == IBV_QPS_ERR);
	destroy(id);

	/* the request's id is destroyed unanswered */
	id = new_id(channel);
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_destroy_id(passive));
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	destroy(id);

	/* the listener goes before the request is read */
	id = new_id(channel);
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	struct pollfd ready = {.fd = server->fd, .events = POLLIN};
	CHECK(poll(&ready, 1, 5000) == 1);
	CHECK(!rdma_destroy_id(listener));
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	want_none(server, 0);
	destroy(id);

	/* nobody listens */
	id = new_id(channel);
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_REJECTED, 8);
	destroy(id);
	close_shared();
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(server);
}

static void the_client_goes_before_accept(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port), *id, *passive;

	for (int late = 0; late < 2; late++) {
		id = new_id(client);
		resolve(id, port);
		make_qp(id);
		CHECK(!rdma_connect(id, &param));
		event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		passive = event->id;
		make_qp(passive);
		destroy(id);
		if (late) /* the news are there, unread */
			CHECK(poll(&(struct pollfd){.fd = server->fd, .events = POLLIN}, 1, LIMIT_MS) == 1);
		CHECK(((const char *)event->param.conn.private_data)[0] == 0); /* ours until acked */
		rdma_ack_cm_event(event);
		if (late)
			CHECK(rdma_accept(passive, &param) == -1 && errno == ECONNRESET);
		else
			rdma_accept(passive, &param); /* either way */
		event = want(server, RDMA_CM_EVENT_REJECTED);
		CHECK(event->id == passive);
		rdma_ack_cm_event(event);
		destroy(passive);
	}
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(client);
	rdma_destroy_event_channel(server);
}

struct late {
	struct rn_task task;
	struct rn_timer *timer;
	sem_t is_due, goes_on;
};

static void fire_late(struct rn_task *task)
{
	struct late *late = container_of(task, struct late, task);

	sem_post(&late->is_due);
	CHECK(!sem_wait(&late->goes_on));
	late->timer->fire(late->timer);
}

/* The time for the program's answer was over, but before the engine could say so it came. */
static void accepted_at_the_last_moment(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	struct late late = {.task.run = fire_late};
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port), *id = new_id(client), *passive;

	CHECK(!sem_init(&late.is_due, 0, 0) && !sem_init(&late.goes_on, 0, 0));
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	make_qp(passive);
	pthread_mutex_lock(&rn_cm_lock);
	late.timer = &rn_cm_id(passive)->wire->timer;
	pthread_mutex_unlock(&rn_cm_lock);
	rn_task_post(&late.task);
	CHECK(!sem_wait(&late.is_due));
	CHECK(!rdma_accept(passive, &param));
	sem_post(&late.goes_on);
	want_status(client, RDMA_CM_EVENT_ESTABLISHED, 0);
	want_status(server, RDMA_CM_EVENT_ESTABLISHED, 0);
	destroy(id);
	want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(client);
	rdma_destroy_event_channel(server);
}

/* A program with queue pairs of its own: CONNECT_RESPONSE, rdma_init_qp_attr, rdma_establish. */
static void own_queue_pair(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port), *id = new_id(channel), *passive;
	uint8_t timeout = 21;
	int mask;

	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout));
	timeout = 32;
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout) == -1);
	resolve(id, port);
	param.qp_num = 0x123456;
	CHECK(rdma_connect(id, NULL) == -1 && errno == EINVAL);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.qp_num == 0x123456);
	passive = event->id;
	rdma_ack_cm_event(event);
	param.qp_num = 0x654321;
	CHECK(!rdma_accept(passive, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(event->id == id && event->param.conn.qp_num == 0x654321);
	rdma_ack_cm_event(event);
	CHECK(!rdma_init_qp_attr(id, &attr, &mask));
	CHECK(attr.dest_qp_num == 0x654321 && mask & IBV_QP_AV);
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!rdma_init_qp_attr(id, &attr, &mask));
	CHECK(attr.timeout == 21 && attr.retry_cnt == 7);
	want_none(channel, 5);
	CHECK(!rdma_establish(id));
	event = want(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == passive);
	rdma_ack_cm_event(event);
	CHECK(!rdma_disconnect(id));
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(passive) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

/* Data may come, and with it the wish to leave, before the word that the peer is ready: that goes another way. */
static void disconnects_when_accepted(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port), *id = new_id(channel), *passive;
	struct rdma_conn_param param = {.qp_num = 0x123456};
	struct rdma_cm_event *event;

	resolve(id, port);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(rdma_disconnect(passive) == -1 && errno == EINVAL); /* of what? */
	CHECK(!rdma_accept(passive, &param));
	want_status(channel, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(!rdma_disconnect(passive));
	want_none(channel, 5);
	CHECK(!rdma_establish(id));
	event = want(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == passive);
	rdma_ack_cm_event(event);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdma_disconnect(id) && !rdma_disconnect(passive));
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(passive) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

static void migrates_with_its_events(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel(), *other = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	struct pair pair = connect_pair(listener, client, port);

	CHECK(!rdma_migrate_id(pair.passive, other));
	CHECK(!rdma_disconnect(pair.active));
	want_status(client, RDMA_CM_EVENT_DISCONNECTED, 0);
	struct pollfd ready = {.fd = other->fd, .events = POLLIN};
	CHECK(poll(&ready, 1, 5000) == 1);
	CHECK(!rdma_migrate_id(pair.passive, client)); /* with an event that nobody has read */
	CHECK(poll(&ready, 1, 0) == 0);
	want_none(server, 0);
	want_none(other, 0);
	want_status(client, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.active);
	destroy(pair.passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
	rdma_destroy_event_channel(other);
}

static void default_pd_and_cqs(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct ibv_qp_init_attr attr = {
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
		.qp_type = IBV_QPT_RC};
	struct ibv_context **devices;
	int count;

	CHECK(rdma_create_qp(id, NULL, &attr) == -1 && errno == EINVAL); /* not bound to a device */
	resolve(id, 9);
	CHECK(!rdma_create_qp(id, NULL, &attr));
	CHECK(id->pd && id->send_cq && id->recv_cq && id->send_cq_channel && id->recv_cq_channel);
	CHECK((devices = rdma_get_devices(&count)) && count == 1 && devices[0] == id->verbs && !devices[1]);
	rdma_free_devices(devices);
	rdma_destroy_qp(id);
	CHECK(!id->send_cq && !id->qp);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

static void addrinfo(void)
{
	struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP}, *info;

	CHECK(!rdma_getaddrinfo("127.0.0.1", "7471", &hints, &info));
	CHECK(info->ai_src_addr && !info->ai_dst_addr && info->ai_qp_type == IBV_QPT_RC);
	CHECK(((struct sockaddr_in *)info->ai_src_addr)->sin_port == htons(7471));
	rdma_freeaddrinfo(info);
	hints.ai_flags = RAI_NUMERICHOST;
	CHECK(!rdma_getaddrinfo("::1", "7471", &hints, &info));
	CHECK(info->ai_dst_addr && info->ai_family == AF_INET6);
	rdma_freeaddrinfo(info);
	hints = (struct rdma_addrinfo){.ai_flags = RAI_NUMERICHOST, .ai_qp_type = IBV_QPT_UD};
	CHECK(!rdma_getaddrinfo("::1", "7471", &hints, &info));
	CHECK(info->ai_port_space == RDMA_PS_UDP && info->ai_qp_type == IBV_QPT_UD);
	rdma_freeaddrinfo(info);
	hints = (struct rdma_addrinfo){.ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_IPOIB};
	CHECK(!rdma_getaddrinfo("::1", "7471", &hints, &info));
	CHECK(info->ai_port_space == RDMA_PS_IPOIB && info->ai_qp_type == IBV_QPT_UD);
	rdma_freeaddrinfo(info);
	CHECK(rdma_getaddrinfo("not a number", "1", &hints, &info) == -1);
	CHECK(rdma_getaddrinfo(NULL, NULL, NULL, &info) == -1 && errno == EINVAL);
	CHECK(!strcmp(rdma_event_str(RDMA_CM_EVENT_REJECTED), "RDMA_CM_EVENT_REJECTED"));
}

/* Without a name the hints' own addresses come back, whichever there are: libfabric asks so. */
static void addrinfo_of_hints(void)
{
	struct sockaddr_in src = address(0), dst = address(7471);
	struct rdma_addrinfo hints = {.ai_family = AF_INET, .ai_port_space = RDMA_PS_TCP}, *info;

	for (int has = 0; has < 8; has++) {
		bool has_src = has & 1, has_dst = has & 2;

		hints.ai_flags = has & 4 ? RAI_PASSIVE : 0;
		hints.ai_src_addr = has_src ? (struct sockaddr *)&src : NULL;
		hints.ai_src_len = has_src ? sizeof src : 0;
		hints.ai_dst_addr = has_dst ? (struct sockaddr *)&dst : NULL;
		hints.ai_dst_len = has_dst ? sizeof dst : 0;
		CHECK(!rdma_getaddrinfo(NULL, NULL, &hints, &info));
		CHECK(info->ai_flags == hints.ai_flags && info->ai_family == AF_INET && !info->ai_next);
		CHECK(info->ai_src_len == hints.ai_src_len && info->ai_dst_len == hints.ai_dst_len);
		CHECK(!info->ai_src_addr == !has_src && !info->ai_dst_addr == !has_dst);
		CHECK(!has_src || !memcmp(info->ai_src_addr, &src, sizeof src));
		CHECK(!has_dst || !memcmp(info->ai_dst_addr, &dst, sizeof dst));
		rdma_freeaddrinfo(info);
	}
	hints.ai_src_len = sizeof(struct sockaddr_storage) + 1;
	CHECK(rdma_getaddrinfo(NULL, NULL, &hints, &info) == -1 && errno == EINVAL);
}

/* "Devices remain opened while librdmacm is loaded" (rdma_get_devices(3)): also without an identifier. */
static void devices_stay_open(void)
{
	struct ibv_context **devices = rdma_get_devices(NULL), *context = devices[0];
	struct ibv_device_attr attr;
	struct ibv_pd *pd;

	rdma_free_devices(devices);
	CHECK(!ibv_query_device(context, &attr));
	CHECK((pd = ibv_alloc_pd(context)) && !ibv_dealloc_pd(pd));
	devices = rdma_get_devices(NULL);
	CHECK(devices[0] == context);
	rdma_free_devices(devices);
}

/* A wildcard names no device: a listener's verbs are its requests' to have. */
static void a_wildcard_has_no_device(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct sockaddr_in any = {.sin_family = AF_INET};

	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK(!id->verbs && !id->port_num && rdma_get_src_port(id));
	CHECK(!rdma_listen(id, 1));
	CHECK(!id->verbs);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

/* --- strangers ---------------------------------------------------------------------------------- */

static void garbage_is_dropped(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	unsigned long before = rn_cm_wire_dropped();
	unsigned char noise[4096];
	struct pair pair;
	int fd;

	srand(1);
	for (size_t i = 0; i < sizeof noise; i++)
		noise[i] = (unsigned char)rand();
	for (size_t length = 8; length <= sizeof noise; length *= 2) {
		fd = tcp_to(port);
		CHECK(send(fd, noise, length, MSG_NOSIGNAL) == (ssize_t)length);
		closed_by_peer(fd);
	}
	/* Right magic, then: a length that is too long; each type out of turn. */
	static const unsigned char headers[][8] = {
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 1, 0xff, 0xff},
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 0, 0, 8},
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 3, 0, 8},
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 5, 0, 8},
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 6, 0, 8},
		{'R', 'D', 'M', 'C', RN_WIRE_VERSION, 200, 0, 8},
	};
	for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
		fd = tcp_to(port);
		CHECK(send(fd, headers[i], 8, MSG_NOSIGNAL) == 8);
		closed_by_peer(fd);
	}
	/* A request with impossible values. */
	unsigned char req[88] = {'R', 'D', 'M', 'C', RN_WIRE_VERSION, 1, 0, 88, 0xff, 0xff, 0xff, 0xff};
	fd = tcp_to(port);
	CHECK(send(fd, req, sizeof req, MSG_NOSIGNAL) == sizeof req);
	closed_by_peer(fd);
	/* A request of which half comes, and the other half a little later, is one. */
	memset(req + 8, 0, sizeof req - 8);
	fd = tcp_to(port);
	CHECK(send(fd, req, 33, MSG_NOSIGNAL) == 33);
	usleep(3000);
	CHECK(send(fd, req + 33, sizeof req - 33, MSG_NOSIGNAL) == sizeof req - 33);
	struct rdma_cm_event *event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *passive = event->id;
	rdma_ack_cm_event(event);
	/* ... after which it talks nonsense */
	CHECK(send(fd, noise, 100, MSG_NOSIGNAL) == 100);
	want_status(server, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(!rdma_destroy_id(passive));
	closed_by_peer(fd);

	CHECK(rn_cm_wire_dropped() - before == 10 + 6 + 1 + 1);
	want_none(server, 0);
	pair = connect_pair(listener, client, port);
	destroy(pair.active);
	want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* Whatever its message is, and however long in its version. */
static void another_version_is_told(void)
{
	struct rdma_event_channel *server = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	unsigned char newer[8] = {'R', 'D', 'M', 'C', RN_WIRE_VERSION + 1, 77, 0, 200};
	struct rn_cm_rej rej;
	int fd = tcp_to(port);

	CHECK(send(fd, newer, sizeof newer, MSG_NOSIGNAL) == sizeof newer);
	CHECK(recv(fd, &rej, sizeof rej, MSG_WAITALL) == sizeof rej);
	CHECK(rej.header.version == RN_WIRE_VERSION && rej.header.type == RN_CM_REJ);
	CHECK(be16toh(rej.reason) == RN_REJ_VERSION);
	closed_by_peer(fd);
	want_none(server, 0);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
}

static void silence_is_dropped(void)
{
	struct rdma_event_channel *server = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	int fd = tcp_to(port);

	closed_by_peer(fd); /* RDMANET_SOFT_SILENCE is shortened in main */
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

static void want_not_ours(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_REJECTED);

	CHECK(event->status == RN_REJ_INVALID_SERVICE_ID && event->param.conn.private_data_len == RN_CM_REJ_PRIVATE);
	CHECK(!strcmp(event->param.conn.private_data, RN_CM_NOT_OURS));
	rdma_ack_cm_event(event);
}

/* A TCP server of this host is left alone. One that wants to be taken for ours, but doesn't speak our language, and one
 * that doesn't speak. */
static void servers_of_another_kind(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = plain;
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), fd, name;
	struct rdma_cm_id *id;

	CHECK(!bind(server, (struct sockaddr *)&at, sizeof at) && !listen(server, 5));
	CHECK(!getsockname(server, (struct sockaddr *)&at, &length));
	param.qp_num = 0x4000;

	id = new_id(channel);
	resolve(id, ntohs(at.sin_port));
	CHECK(!rdma_connect(id, &param));
	want_not_ours(channel);
	CHECK(!rdma_destroy_id(id));
	CHECK(accept(server, NULL, NULL) == -1 && errno == EAGAIN); /* it has heard nothing of it */

	name = take_name(ntohs(at.sin_port));
	CHECK(!fcntl(server, F_SETFL, 0));
	id = new_id(channel);
	resolve(id, ntohs(at.sin_port));
	CHECK(!rdma_connect(id, &param));
	CHECK((fd = accept(server, NULL, NULL)) >= 0);
	CHECK(send(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, 0) == 28);
	want_not_ours(channel);
	close(fd);
	CHECK(!rdma_destroy_id(id));

	id = new_id(channel);
	resolve(id, ntohs(at.sin_port));
	CHECK(!rdma_connect(id, &param));
	CHECK((fd = accept(server, NULL, NULL)) >= 0);
	want_status(channel, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT); /* RDMANET_SOFT_CM_TIMEOUT */
	close(fd);
	CHECK(!rdma_destroy_id(id));
	close(name);

	/* Without the name it is a TCP program again. */
	id = new_id(channel);
	resolve(id, ntohs(at.sin_port));
	CHECK(!rdma_connect(id, &param));
	want_not_ours(channel);
	CHECK(!rdma_destroy_id(id));
	close(server);
	rdma_destroy_event_channel(channel);
}

/* --- many --------------------------------------------------------------------------------------- */

/* Read what has come on a channel; count it by type, and answer requests. */
static void serve(struct rdma_event_channel *channel, struct rdma_cm_id **accepted, unsigned counts[16])
{
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;

	while ((event = next_event(channel, 0))) {
		enum rdma_cm_event_type type = event->event;
		struct rdma_cm_id *id = event->id;

		CHECK(type < 16);
		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			accepted[counts[type]] = id;
			make_qp(id);
			CHECK(!rdma_accept(id, &param));
		}
		counts[type]++;
	}
}

static void two_hundred_at_once(void)
{
	enum { COUNT = 200, FDS_OF_ONE = 3, FDS_OF_OTHERS = 64 };
	struct rlimit limit;
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	struct rdma_conn_param param = plain;
	struct rdma_cm_id *active[COUNT], *passive[COUNT];
	unsigned at_server[16] = {0}, at_client[16] = {0};
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 16, &port); /* fewer than will come */
	uint64_t began;

	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	if (limit.rlim_cur < descriptors() + FDS_OF_OTHERS + COUNT * FDS_OF_ONE) {
		printf("   not run: two hundred, as this process may open %u descriptors only\n", (unsigned)limit.rlim_cur);
		CHECK(!rdma_destroy_id(listener));
		rdma_destroy_event_channel(server);
		rdma_destroy_event_channel(client);
		return;
	}
	for (int i = 0; i < COUNT; i++) {
		active[i] = new_id(client);
		resolve(active[i], port);
		make_qp(active[i]);
	}
	began = clock_ns();
	for (int i = 0; i < COUNT; i++)
		CHECK(!rdma_connect(active[i], &param));
	EVENTUALLY((serve(server, passive, at_server), serve(client, NULL, at_client),
		    at_server[RDMA_CM_EVENT_ESTABLISHED] == COUNT && at_client[RDMA_CM_EVENT_ESTABLISHED] == COUNT));
	printf("   %.1f ms for 200\n", (double)(clock_ns() - began) / 1e6);
	for (int i = 0; i < COUNT; i++) {
		CHECK(active[i]->qp->state == IBV_QPS_RTS);
		destroy(active[i]);
	}
	EVENTUALLY((serve(server, passive, at_server), at_server[RDMA_CM_EVENT_DISCONNECTED] == COUNT));
	for (int i = 0; i < COUNT; i++)
		destroy(passive[i]);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

static void a_thousand_in_a_row(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	unsigned fds = 0, mappings = 0;
	size_t memory = 0;
	uint64_t began = 0;

	for (int i = 0; i < 1000; i++) {
		struct pair pair = connect_pair(listener, client, port);

		CHECK(!rdma_disconnect(pair.active));
		want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
		want_status(client, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(pair.active);
		destroy(pair.passive);
		if (i == 99) {
			fds = descriptors();
			mappings = entries("/proc/self/map_files");
			memory = mallinfo2().uordblks;
			began = cpu_ns();
		}
	}
	EVENTUALLY(mallinfo2().uordblks <= memory + 4096); /* the engine frees the last wires */
	printf("   %.0f us of CPU for a connect and close, both sides\n", (double)(cpu_ns() - began) / 900e3);
	EVENTUALLY(descriptors() <= fds);
	CHECK(entries("/proc/self/map_files") <= mappings + 2);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* Both sides go away at any moment, each in its own thread: whatever was on its way then, nothing
 * may be left, hang, or be used after it was freed. */
static _Atomic bool crowd_over;

static void pause_a_little(unsigned *seed)
{
	if (rand_r(seed) % 3)
		usleep((unsigned)rand_r(seed) % 120);
}

/* Take events until nothing comes for a moment, or the end of a connection. */
static bool step(struct rdma_event_channel *channel, int timeout_ms, struct rdma_cm_event *copy)
{
	struct rdma_cm_event *event = next_event(channel, timeout_ms);

	if (!event)
		return false;
	*copy = *event;
	rdma_ack_cm_event(event);
	return true;
}

static void *fickle_clients(void *argument)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port = *(uint16_t *)argument;
	struct sockaddr_in to = address(port);
	struct rdma_conn_param param = plain;
	unsigned seed = port + (unsigned)(uintptr_t)&seed;

	for (int i = 0; i < 150; i++) {
		struct rdma_cm_id *id = new_id(channel);
		struct rdma_cm_event event;
		int steps = rand_r(&seed) % 5;

		CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 0));
		CHECK(step(channel, LIMIT_MS, &event) && !rdma_resolve_route(id, 0));
		CHECK(step(channel, LIMIT_MS, &event));
		make_qp(id);
		CHECK(!rdma_connect(id, &param));
		pause_a_little(&seed);
		for (int n = 0; n < steps && step(channel, n ? 0 : 1, &event); n++) {
			if (event.event == RDMA_CM_EVENT_ESTABLISHED && rand_r(&seed) % 2)
				CHECK(!rdma_disconnect(id));
			pause_a_little(&seed);
		}
		destroy(id);
	}
	want_none(channel, 0);
	rdma_destroy_event_channel(channel);
	return NULL;
}

static void *fickle_server(void *argument)
{
	struct rdma_cm_id *listener = argument;
	struct rdma_conn_param param = plain;
	struct rdma_cm_event event;
	unsigned seed = 7, accepted = 0;

	for (;;) {
		bool over = crowd_over;

		if (!step(listener->channel, 50, &event)) {
			if (over && !accepted)
				return NULL; /* what is asked yet goes with the listener */
			continue;
		}
		if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			pause_a_little(&seed);
			make_qp(event.id);
			switch (rand_r(&seed) % 4) {
			case 0:
				destroy(event.id);
				break;
			case 1:
				rdma_reject(event.id, NULL, 0);
				destroy(event.id);
				break;
			default:
				accepted++;
				rdma_accept(event.id, &param); /* either way: its end comes, or has come, as an event */
			}
		} else if (event.event == RDMA_CM_EVENT_DISCONNECTED || event.event == RDMA_CM_EVENT_REJECTED) {
			destroy(event.id);
			accepted--;
		} else if (event.event == RDMA_CM_EVENT_ESTABLISHED && rand_r(&seed) % 3 == 0) {
			CHECK(!rdma_disconnect(event.id));
		}
	}
}

static void both_sides_go_at_any_moment(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 4, &port), *bound = new_id(channel);
	struct sockaddr_in loopback = address(0);
	pthread_t clients[3], server;
	struct rn_live now;

	CHECK(!rdma_bind_addr(bound, (struct sockaddr *)&loopback));
	open_shared(bound->verbs);
	CHECK(!rdma_destroy_id(bound));
	crowd_over = false;
	CHECK(!pthread_create(&server, NULL, fickle_server, listener));
	for (int i = 0; i < 3; i++)
		CHECK(!pthread_create(&clients[i], NULL, fickle_clients, &port));
	for (int i = 0; i < 3; i++)
		pthread_join(clients[i], NULL);
	crowd_over = true;
	pthread_join(server, NULL);
	CHECK(!rdma_destroy_id(listener));
	rdmanet_soft_live(&now);
	CHECK(now.qps == 0);
	close_shared();
	rdma_destroy_event_channel(channel);
}

/* --- other processes ---------------------------------------------------------------------------- */

struct child {
	pid_t pid;
	int to, from;
};

static const char *program;

/* The same program again, in another role; its standard input and output are ours. */
static struct child start(const char *role, uint16_t port)
{
	char number[16];
	int down[2], up[2];
	struct child child;

	snprintf(number, sizeof number, "%u", port);
	CHECK(!pipe2(down, O_CLOEXEC) && !pipe2(up, O_CLOEXEC));
	fflush(NULL);
	child.pid = fork();
	if (!child.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(down[0], 0);
		dup2(up[1], 1);
		execl(program, program, role, number, (char *)NULL);
		_exit(127);
	}
	close(down[0]);
	close(up[1]);
	child.to = down[1];
	child.from = up[0];
	return child;
}

static void hear(struct child *child, char expected)
{
	char byte = 0;

	CHECK(read(child->from, &byte, 1) == 1);
	CHECK(byte == expected);
}

static void finish(struct child *child)
{
	int status;

	close(child->to);
	close(child->from);
	CHECK(waitpid(child->pid, &status, 0) == child->pid);
}

static void say(char byte)
{
	CHECK(write(1, &byte, 1) == 1);
}

static void sleep_for_ever(void)
{
	for (;;)
		pause();
}

/* Roles. */
static void role_client(uint16_t port, bool fork_first)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct rdma_conn_param param = with_data("from the client");

	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(id->qp->state == IBV_QPS_RTS);
	if (fork_first && !fork()) {
		prctl(PR_SET_PDEATHSIG, 0);
		close(1);
		close(0);
		alarm(10);
		sleep_for_ever();
	}
	say('E');
	struct pollfd ready[2] = {{.fd = channel->fd, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
	CHECK(poll(ready, 2, 10000) > 0);
	if (ready[0].revents)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
	close_shared();
	rdma_destroy_event_channel(channel);
	say('D');
}

/* Sends its request, says so, and waits to be killed. */
static void role_requester(uint16_t port)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct rdma_conn_param param = plain;

	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	sleep_for_ever();
}

static void role_listener(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;

	new_listener(channel, 10, &port);
	CHECK(write(1, &port, sizeof port) == sizeof port);
	want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(write(1, "R", 1) == 1);
	sleep_for_ever();
}

/* Settings that are read once need a process of their own. */
static void role_timewait(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = with_data("short");
	struct rdma_cm_event *event;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port), *id = new_id(channel), *passive;

	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.private_data_len == 6); /* not padded */
	passive = event->id;
	rdma_ack_cm_event(event);
	make_qp(passive);
	CHECK(!rdma_accept(passive, &param));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(!rdma_disconnect(id));
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	want_status(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	destroy(id);
	destroy(passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	say('T');
}

static void settings(void)
{
	struct child child;

	setenv("RDMANET_SOFT_TIMEWAIT", "20", 1);
	setenv("RDMANET_SOFT_PADDED", "0", 1);
	child = start("timewait", 0);
	unsetenv("RDMANET_SOFT_TIMEWAIT");
	unsetenv("RDMANET_SOFT_PADDED");
	hear(&child, 'T');
	finish(&child);
}

static struct rdma_cm_id *accept_one(struct rdma_event_channel *channel)
{
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;

	rdma_ack_cm_event(event);
	make_qp(id);
	CHECK(!rdma_accept(id, &param));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	return id;
}

static void between_processes(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);

	for (int who = 0; who < 2; who++) {
		struct child child = start("client", port);
		struct rdma_cm_id *id = accept_one(channel);

		hear(&child, 'E');
		if (who)
			CHECK(!rdma_disconnect(id));
		else
			close(child.to), child.to = -1;
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		hear(&child, 'D');
		finish(&child);
		destroy(id);
	}
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

static void killed_peers_are_noticed(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	static const char *const roles[] = {"client", "client-that-forked"};

	for (int i = 0; i < 2; i++) {
		struct child child = start(roles[i], port);
		struct rdma_cm_id *id = accept_one(channel);

		hear(&child, 'E');
		kill(child.pid, SIGKILL);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0); /* the second one's child lives on */
		finish(&child);
		destroy(id);
	}
	/* before it is accepted */
	struct child child = start("requester", port);
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;

	kill(child.pid, SIGKILL);
	finish(&child);
	rdma_ack_cm_event(event);
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	make_qp(id);
	CHECK(rdma_accept(id, &(struct rdma_conn_param){0}) == -1 && errno == ECONNRESET);
	destroy(id);
	/* before it accepts */
	child = start("listener", 0);
	CHECK(read(child.from, &port, sizeof port) == sizeof port);
	id = new_id(channel);
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &plain_copy));
	hear(&child, 'R');
	kill(child.pid, SIGKILL);
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	finish(&child);
	destroy(id);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

static void forked_children_start_afresh(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	struct pair pair = connect_pair(listener, client, port);
	pid_t child;
	int status;

	fflush(NULL);
	child = fork();
	if (!child) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;

		CHECK(rdma_get_cm_event(server, &event) == -1 && errno == EBADF);
		CHECK(rdma_disconnect(pair.active) == -1 && errno == EBADF);
		CHECK(!rdma_destroy_id(pair.active));
		rdma_destroy_event_channel(client);
		on.pd = NULL;
		client = new_channel();
		id = new_id(client);
		resolve(id, port);
		make_qp(id);
		CHECK(!rdma_connect(id, &plain_copy));
		want_status(client, RDMA_CM_EVENT_ESTABLISHED, 0);
		destroy(id);
		close_shared();
		rdma_destroy_event_channel(client);
		_exit(0);
	}
	struct rdma_cm_id *id = accept_one(server);
	want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	want_none(server, 10);
	want_none(client, 0);
	CHECK(pair.active->qp->state == IBV_QPS_RTS);
	destroy(id);
	destroy(pair.active);
	want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* Who has the failed device's context keeps it; who comes then has it anew, through the same channel and listener. */
static void the_device_fails(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	struct pair old = connect_pair(listener, channel, port), new;
	struct ibv_context *failed = old.active->verbs;
	struct ibv_pd *failed_pd = on.pd;
	struct ibv_cq *failed_cq = on.cq;
	struct ibv_async_event event;

	CHECK(!rdmanet_soft_chaos(failed, "fatal=now", NULL, 0));
	CHECK(!ibv_get_async_event(failed, &event) && event.event_type == IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
	on.pd = NULL;
	on.cq = NULL;
	new = connect_pair(listener, channel, port);
	CHECK(new.active->verbs != failed && new.passive->verbs == new.active->verbs);
	CHECK(old.active->verbs == failed);
	CHECK(!rdma_disconnect(old.active));
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(old.active);
	destroy(old.passive);
	CHECK(!ibv_destroy_cq(failed_cq) && !ibv_dealloc_pd(failed_pd));
	destroy(new.active);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(new.passive);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv)
{
	unsigned fds, count;

	program = "/proc/self/exe";
	if (argc == 3) {
		uint16_t port = (uint16_t)atoi(argv[2]);

		if (!strcmp(argv[1], "client"))
			role_client(port, false);
		else if (!strcmp(argv[1], "client-that-forked"))
			role_client(port, true);
		else if (!strcmp(argv[1], "requester"))
			role_requester(port);
		else if (!strcmp(argv[1], "listener"))
			role_listener();
		else if (!strcmp(argv[1], "timewait"))
			role_timewait();
		return 0;
	}
	RUN(addrinfo);
	RUN(addrinfo_of_hints);
	fds = descriptors();
	count = threads();
	RUN(bind_addresses);
	RUN(a_wildcard_has_no_device);
	RUN(wrong_order_is_refused);
	RUN(connects_and_disconnects);
	RUN(destroyed_while_connected);
	if (has_ipv6())
		RUN(connect_ipv6);
	else
		printf("not run: connect_ipv6, as there is no ::1 here\n");
	RUN(connect_from_a_bound_port);
	RUN(a_port_is_free_at_once);
	RUN(refusals);
	RUN(the_client_goes_before_accept);
	RUN(accepted_at_the_last_moment);
	RUN(own_queue_pair);
	RUN(disconnects_when_accepted);
	RUN(migrates_with_its_events);
	RUN(the_device_fails);
	RUN(garbage_is_dropped);
	/* Only where that is what is tested: a busy machine takes longer. */
	setenv("RDMANET_SOFT_SILENCE", "300", 1);
	RUN(another_version_is_told);
	RUN(silence_is_dropped);
	unsetenv("RDMANET_SOFT_SILENCE");
	setenv("RDMANET_SOFT_CM_TIMEOUT", "400", 1);
	RUN(servers_of_another_kind);
	unsetenv("RDMANET_SOFT_CM_TIMEOUT");
	RUN(two_hundred_at_once);
	RUN(a_thousand_in_a_row);
	RUN(both_sides_go_at_any_moment);
	RUN(settings);
	RUN(between_processes);
	RUN(killed_peers_are_noticed);
	RUN(forked_children_start_afresh);
	CHECK(descriptors() == fds && rn_fd_count() == 0);
	EVENTUALLY(threads() <= count + 1); /* a sanitizer's own */
	CHECK(shared_mappings() == 0);
	/* Last: the device stays open from here on. */
	RUN(default_pd_and_cqs);
	RUN(devices_stay_open);
	return 0;
}
