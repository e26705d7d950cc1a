/* SPDX-License-Identifier: Apache-2.0 */
/* What the connection manager's tests share: channels, identifiers, waiting for an event, and a pair
 * of connected queue pairs. */
#ifndef CM_HARNESS_H
#define CM_HARNESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/extras.h"
#include "base/gid.h"
#include "cm/cm.h"
#include "host_check.h"

#include "calm.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

/* A machine may be without. */
static inline bool has_ipv6(void)
{
	struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
	int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool has = fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at);

	if (fd >= 0)
		close(fd);
	return has;
}

static inline struct rdma_event_channel *new_channel(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();

	CHECK(channel);
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	return channel;
}

static inline struct rdma_cm_id *new_id(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	return id;
}

static inline struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int timeout_ms)
{
	struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
	struct rdma_cm_event *event;

	for (;;) {
		if (!rdma_get_cm_event(channel, &event))
			return event;
		CHECK(errno == EAGAIN);
		if (poll(&ready, 1, timeout_ms) != 1)
			return NULL;
	}
}

static inline struct rdma_cm_event *want(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = next_event(channel, LIMIT_MS);

	if (!event || event->event != type)
		fprintf(stderr, "wanted %s, got %s status %d\n", rdma_event_str(type),
			event ? rdma_event_str(event->event) : "nothing", event ? event->status : 0);
	CHECK(event && event->event == type);
	return event;
}

static inline void want_status(struct rdma_event_channel *channel, enum rdma_cm_event_type type, int status)
{
	struct rdma_cm_event *event = want(channel, type);

	if (event->status != status)
		fprintf(stderr, "%s with status %d\n", rdma_event_str(type), event->status);
	CHECK(event->status == status);
	rdma_ack_cm_event(event);
}

static inline void want_none(struct rdma_event_channel *channel, int for_ms)
{
	struct rdma_cm_event *event = next_event(channel, for_ms);

	if (event)
		fprintf(stderr, "unexpected %s\n", rdma_event_str(event->event));
	CHECK(!event);
}

static inline struct sockaddr_in address(uint16_t port)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline int tcp_to(uint16_t port)
{
	struct sockaddr_in to = address(port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&to, sizeof to));
	return fd;
}

static inline void closed_by_peer(int fd)
{
	struct pollfd ready = {.fd = fd, .events = POLLIN};
	char byte;

	CHECK(poll(&ready, 1, LIMIT_MS) == 1);
	CHECK(recv(fd, &byte, 1, 0) <= 0);
	close(fd);
}

/* For a TCP listener on loopback that is to be taken for an RDMA program's. The socket. */
static inline int take_name(uint16_t port)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "rdmanet-cm/::ffff:127.0.0.1/%u", port);

	CHECK(!bind(fd, (struct sockaddr *)&name, (socklen_t)(sizeof name.sun_family + 1 + (size_t)length)));
	return fd;
}

static inline struct rdma_cm_id *new_listener(struct rdma_event_channel *channel, int backlog, uint16_t *port)
{
	struct sockaddr_in any = {.sin_family = AF_INET};
	struct rdma_cm_id *id = new_id(channel);

	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK(rdma_get_src_port(id));
	CHECK(!rdma_listen(id, backlog));
	*port = ntohs(rdma_get_src_port(id));
	return id;
}

static inline void resolve(struct rdma_cm_id *id, uint16_t port)
{
	struct sockaddr_in to = address(port);

	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000));
	want_status(id->channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(id->verbs && id->port_num == 1);
	CHECK(!rdma_resolve_route(id, 1000));
	want_status(id->channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
}

/* What the queue pairs of a test share. */
static struct {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
} on;

static inline void open_shared(struct ibv_context *context)
{
	if (on.pd)
		return;
	CHECK((on.pd = ibv_alloc_pd(context)));
	CHECK((on.cq = ibv_create_cq(context, 4096, NULL, NULL, 0)));
}

static inline void close_shared(void)
{
	if (!on.pd)
		return;
	CHECK(!ibv_destroy_cq(on.cq));
	CHECK(!ibv_dealloc_pd(on.pd));
	on.pd = NULL;
	on.cq = NULL;
}

static inline void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
		.qp_type = IBV_QPT_RC};

	open_shared(id->verbs);
	attr.send_cq = attr.recv_cq = on.cq;
	CHECK(!rdma_create_qp(id, on.pd, &attr));
	CHECK(id->qp && id->qp->state == IBV_QPS_INIT);
}

static const struct rdma_conn_param plain = {.responder_resources = 4, .initiator_depth = 2, .retry_count = 7};

static inline struct rdma_conn_param with_data(const char *text)
{
	struct rdma_conn_param param = plain;

	param.private_data = text;
	param.private_data_len = (uint8_t)(strlen(text) + 1);
	return param;
}

struct pair {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *active, *passive;
};

/* Connect within one process, all events on one channel or two. */
static inline struct pair connect_pair(struct rdma_cm_id *listener, struct rdma_event_channel *active_channel, uint16_t port)
{
	struct rdma_conn_param param = with_data("from the client"), answer = with_data("from the server");
	struct rdma_cm_event *event;
	struct pair pair = {.channel = active_channel, .active = new_id(active_channel)};

	resolve(pair.active, port);
	make_qp(pair.active);
	CHECK(!rdma_connect(pair.active, &param));

	event = want(listener->channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->listen_id == listener && event->id != listener && event->id->channel == listener->channel);
	CHECK(event->id->context == listener->context && event->id->verbs == pair.active->verbs);
	CHECK(event->param.conn.private_data_len == 56);
	CHECK(!strcmp(event->param.conn.private_data, "from the client"));
	CHECK(event->param.conn.responder_resources == 2 && event->param.conn.initiator_depth == 4);
	CHECK(event->param.conn.qp_num == pair.active->qp->qp_num);
	pair.passive = event->id;
	rdma_ack_cm_event(event);
	make_qp(pair.passive);
	answer.responder_resources = 2;
	answer.initiator_depth = 3;
	CHECK(!rdma_accept(pair.passive, &answer));
	CHECK(pair.passive->qp->state == IBV_QPS_RTS);

	event = want(active_channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == pair.active && event->status == 0);
	CHECK(event->param.conn.private_data_len == 196);
	CHECK(!strcmp(event->param.conn.private_data, "from the server"));
	CHECK(event->param.conn.responder_resources == 3 && event->param.conn.initiator_depth == 2);
	CHECK(event->param.conn.qp_num == pair.passive->qp->qp_num);
	CHECK(pair.active->qp->state == IBV_QPS_RTS);
	rdma_ack_cm_event(event);
	event = want(listener->channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == pair.passive);
	rdma_ack_cm_event(event);
	return pair;
}

static inline void destroy(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
}

#endif
