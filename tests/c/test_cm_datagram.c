/* SPDX-License-Identifier: Apache-2.0 */
/* The connection manager for datagrams: who serves a port, and who says no. */
#include "cm_harness.h"
#include "base/version.h"

static struct rdma_cm_id *new_ud_id(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CHECK(id->qp_type == IBV_QPT_UD);
	return id;
}

static struct rdma_cm_id *new_ud_listener(struct rdma_event_channel *channel, uint16_t *port)
{
	struct sockaddr_in any = address(0);
	struct rdma_cm_id *id = new_ud_id(channel);

	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK(!rdma_listen(id, 4));
	*port = ntohs(rdma_get_src_port(id));
	return id;
}

static struct rdma_cm_id *ask(struct rdma_event_channel *channel, uint16_t port, const char *text)
{
	struct rdma_cm_id *id = new_ud_id(channel);
	struct rdma_conn_param param = with_data(text);

	resolve(id, port);
	CHECK(!rdma_connect(id, &param));
	return id;
}

static struct rdma_cm_id *asked(struct rdma_event_channel *channel, struct rdma_cm_id *listener, const char *text)
{
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;

	CHECK(event->listen_id == listener && id->qp_type == IBV_QPT_UD && id->ps == RDMA_PS_UDP);
	CHECK(event->param.ud.private_data_len == 180 && !strcmp(event->param.ud.private_data, text));
	rdma_ack_cm_event(event);
	return id;
}

static void a_number_is_told(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_ud_listener(server, &port), *id = ask(client, port, "who is there?"), *passive;
	struct rdma_conn_param param = with_data("I am");
	struct rdma_cm_event *event;
	char big[137] = "";

	passive = asked(server, listener, "who is there?");
	CHECK(passive->verbs && passive->route.num_paths == 1);
	param.qp_num = 0x40001;
	param.private_data = big;
	param.private_data_len = 137;
	CHECK(rdma_accept(passive, &param) == -1 && errno == EINVAL);
	param.private_data = "I am";
	param.private_data_len = 5;
	CHECK(!rdma_accept(passive, &param));
	event = want(client, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == id && !event->status);
	CHECK(event->param.ud.qp_num == 0x40001 && event->param.ud.qkey == RDMA_UDP_QKEY);
	CHECK(event->param.ud.private_data_len == 136 && !strcmp(event->param.ud.private_data, "I am"));
	CHECK(event->param.ud.ah_attr.is_global && event->param.ud.ah_attr.port_num == 1);
	CHECK(!memcmp(&event->param.ud.ah_attr.grh.dgid, &id->route.addr.addr.ibaddr.dgid, 16));
	CHECK(event->param.ud.ah_attr.grh.sgid_index == rn_gid_index_of(rdma_get_local_addr(id)));
	rdma_ack_cm_event(event);
	want_none(server, 5);
	CHECK(rdma_disconnect(id) == -1 && errno == EINVAL); /* there is no connection */
	CHECK(!rdma_destroy_id(passive));
	CHECK(!rdma_destroy_id(id));
	want_none(client, 5);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
	CHECK(rn_fd_count() == 0);
}

static void refusals(void)
{
	struct rdma_event_channel *server = new_channel(), *client = new_channel();
	uint16_t port, connections;
	struct rdma_cm_id *listener = new_ud_listener(server, &port), *id = ask(client, port, "a"), *passive;
	struct rdma_cm_id *other = new_listener(server, 4, &connections);
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;

	passive = asked(server, listener, "a");
	CHECK(!rdma_reject(passive, "no", 3));
	event = want(client, RDMA_CM_EVENT_UNREACHABLE);
	CHECK(event->status == RN_SIDR_REJECT && !strcmp(event->param.ud.private_data, "no"));
	rdma_ack_cm_event(event);
	CHECK(!rdma_destroy_id(passive) && !rdma_destroy_id(id));

	/* destroyed instead of answered; and the listener with a question unread */
	id = ask(client, port, "b");
	CHECK(!rdma_destroy_id(asked(server, listener, "b")));
	want_status(client, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_REJECT);
	CHECK(!rdma_destroy_id(id));
	id = ask(client, port, "c");
	EVENTUALLY(poll(&(struct pollfd){.fd = server->fd, .events = POLLIN}, 1, 0) == 1);
	CHECK(!rdma_destroy_id(listener));
	want_status(client, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_REJECT);
	CHECK(!rdma_destroy_id(id));

	/* nobody there, or one who connects */
	id = ask(client, 1, "d");
	want_status(client, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_UNSUPPORTED);
	CHECK(!rdma_destroy_id(id));
	id = ask(client, connections, "e");
	want_status(client, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_UNSUPPORTED);
	CHECK(!rdma_destroy_id(id));
	want_none(server, 5);

	/* and a connection is nothing for one who serves datagrams */
	listener = new_ud_listener(server, &port);
	id = new_id(client);
	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	want_status(client, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	want_none(server, 5);
	destroy(id);

	/* who asks may go at any moment: nobody hears of it */
	id = ask(client, port, "f");
	passive = asked(server, listener, "f");
	CHECK(!rdma_destroy_id(id));
	param.qp_num = 0x40001;
	CHECK(!rdma_accept(passive, &param));
	want_none(server, 5);
	CHECK(!rdma_destroy_id(passive));
	CHECK(!rdma_destroy_id(listener) && !rdma_destroy_id(other));
	close_shared();
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
	CHECK(rn_fd_count() == 0);
}

/* What makes no sense ends the socket. */
static void nonsense_is_dropped(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_ud_listener(channel, &port), *id;
	unsigned char req[192] = {'R', 'D', 'M', 'C', RN_WIRE_VERSION, 7, 0, 192, 181}, rep[156] = {'R', 'D', 'M', 'C', RN_WIRE_VERSION, 8, 0, 156};
	unsigned long before = rn_cm_wire_dropped();
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int fd = tcp_to(port), listening, name;

	CHECK(send(fd, req, sizeof req, MSG_NOSIGNAL) == sizeof req); /* private data that are too long */
	closed_by_peer(fd);
	fd = tcp_to(port);
	CHECK(send(fd, rep, sizeof rep, MSG_NOSIGNAL) == sizeof rep); /* an answer to nothing */
	closed_by_peer(fd);
	req[8] = 0;
	fd = tcp_to(port);
	CHECK(send(fd, req, sizeof req, MSG_NOSIGNAL) == sizeof req);
	id = asked(channel, listener, "");
	CHECK(send(fd, req, sizeof req, MSG_NOSIGNAL) == sizeof req); /* asked twice */
	closed_by_peer(fd);
	CHECK(!rdma_destroy_id(id));
	CHECK(rn_cm_wire_dropped() == before + 3);

	/* A server that answers with a queue pair's number of 32 bits. */
	listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!bind(listening, (struct sockaddr *)&at, sizeof at) && !listen(listening, 1));
	CHECK(!getsockname(listening, (struct sockaddr *)&at, &length));
	name = take_name(ntohs(at.sin_port));
	id = ask(channel, ntohs(at.sin_port), "g");
	fd = accept(listening, NULL, NULL);
	CHECK(recv(fd, req, sizeof req, MSG_WAITALL) == sizeof req && req[5] == 7);
	memset(rep + 8, 0xff, 4);
	CHECK(send(fd, rep, sizeof rep, MSG_NOSIGNAL) == sizeof rep);
	want_status(channel, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_UNSUPPORTED);
	close(fd);
	close(listening);
	close(name);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(listener));
	want_none(channel, 0);
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* --- groups ---------------------------------------------------------------------------------------- */

static struct sockaddr_in group(uint32_t last)
{
	return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xefff0000 + last)};
}

static void groups_are_joined(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_ud_id(channel), *connection = new_id(channel);
	struct sockaddr_in at = group(1), other = group(2), own = address(0);
	struct rdma_cm_join_mc_attr_ex attr = {.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS};
	struct rdma_cm_event *event;
	union ibv_gid gid;

	CHECK(rdma_join_multicast(id, (struct sockaddr *)&at, id) == -1 && errno == EINVAL); /* not bound */
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&own));
	own = address(0);
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&own, id) == -1 && errno == EINVAL); /* no group */
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&at, &gid));
	event = want(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	rn_gid_of((struct sockaddr *)&at, &gid);
	CHECK(event->param.ud.private_data == &gid && event->param.ud.qp_num == 0xffffff);
	CHECK(event->param.ud.qkey == RDMA_UDP_QKEY && event->param.ud.ah_attr.is_global);
	CHECK(!memcmp(&event->param.ud.ah_attr.grh.dgid, &gid, 16) && gid.raw[10] == 0xff && gid.raw[12] == 0xef);
	rdma_ack_cm_event(event);
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&at, id) == -1 && errno == EADDRINUSE);
	CHECK(rdma_leave_multicast(id, (struct sockaddr *)&other) == -1 && errno == EADDRNOTAVAIL);
	CHECK(!rdma_leave_multicast(id, (struct sockaddr *)&at));

	/* left before it was heard of; and forgotten */
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&at, NULL));
	CHECK(!rdma_leave_multicast(id, (struct sockaddr *)&at));
	want_none(channel, 0);
	attr.addr = (struct sockaddr *)&at;
	CHECK(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == EINVAL);
	attr.comp_mask |= RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	attr.join_flags = RDMA_MC_JOIN_FLAG_RESERVED;
	CHECK(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == ENOTSUP);
	attr.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
	CHECK(!rdma_join_multicast_ex(id, &attr, NULL));
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&other, NULL));
	want_status(channel, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
	CHECK(!rdma_destroy_id(id));
	want_none(channel, 0);

	resolve(connection, 9);
	CHECK(rdma_join_multicast(connection, (struct sockaddr *)&at, id) == -1 && errno == EINVAL);
	CHECK(!rdma_destroy_id(connection));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

int main(void)
{
	RUN(a_number_is_told);
	RUN(refusals);
	RUN(nonsense_is_dropped);
	RUN(groups_are_joined);
	return 0;
}
