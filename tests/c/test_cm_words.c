/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words of the connection manager that are right but for one value, which no correct peer says: a request to a listener,
 * a reply to a client. Whoever says one is shown out, and the program hears of no connection.
 */
#include "cm_harness.h"
#include "base/engine_inside.h"
#include "cm/wire.h"

#include "objects/qp.h"

#define OUT_OF_RANGE(type, field, value) {#field, offsetof(type, field), sizeof(((type *)0)->field), value}

struct wrong {
	const char *name;
	size_t offset, size;
	uint32_t value;
};

static const struct wrong requests[] = {
	OUT_OF_RANGE(struct rn_cm_req, qpn, 0x1000000),
	OUT_OF_RANGE(struct rn_cm_req, psn, 0x1000000),
	OUT_OF_RANGE(struct rn_cm_req, responder_resources, RN_MAX_RD_ATOMIC + 1),
	OUT_OF_RANGE(struct rn_cm_req, initiator_depth, RN_MAX_RD_ATOMIC + 1),
	OUT_OF_RANGE(struct rn_cm_req, retry_count, 8),
	OUT_OF_RANGE(struct rn_cm_req, rnr_retry_count, 8),
	OUT_OF_RANGE(struct rn_cm_req, private_length, RN_CM_REQ_PRIVATE + 1),
};

static const struct wrong replies[] = {
	OUT_OF_RANGE(struct rn_cm_rep, qpn, 0x1000000),
	OUT_OF_RANGE(struct rn_cm_rep, psn, 0x1000000),
	OUT_OF_RANGE(struct rn_cm_rep, responder_resources, RN_MAX_RD_ATOMIC + 1),
	OUT_OF_RANGE(struct rn_cm_rep, initiator_depth, RN_MAX_RD_ATOMIC + 1),
	OUT_OF_RANGE(struct rn_cm_rep, rnr_retry_count, 8),
	OUT_OF_RANGE(struct rn_cm_rep, private_length, RN_CM_REP_PRIVATE + 1),
};

static const struct wrong sidr_replies[] = {
	OUT_OF_RANGE(struct rn_cm_sidr_rep, qpn, 0x1000000),
	OUT_OF_RANGE(struct rn_cm_sidr_rep, status, RN_SIDR_LAST + 1),
	OUT_OF_RANGE(struct rn_cm_sidr_rep, private_length, RN_CM_SIDR_REP_PRIVATE + 1),
};

#define EACH(wrong, table) (const struct wrong *wrong = table; wrong < table + sizeof(table) / sizeof(*table); wrong++)

static struct rn_cm_header header_of(enum rn_cm_message type)
{
	return (struct rn_cm_header){
		.magic = htobe32(RN_CM_MAGIC),
		.version = RN_WIRE_VERSION,
		.type = (uint8_t)type,
		.length = htobe16(rn_cm_message_length[type]),
	};
}

/* Wrong in this value, right in all others; NULL: right. */
static void say(int fd, void *message, size_t size, const struct wrong *wrong)
{
	uint32_t big_endian = wrong ? htobe32(wrong->value) : 0;

	if (wrong && wrong->size == sizeof big_endian)
		memcpy((char *)message + wrong->offset, &big_endian, sizeof big_endian);
	else if (wrong)
		((uint8_t *)message)[wrong->offset] = (uint8_t)wrong->value;
	CHECK(send(fd, message, size, MSG_NOSIGNAL) == (ssize_t)size);
}

static void say_request(int fd, const struct wrong *wrong)
{
	struct rn_cm_req req = {.header = header_of(RN_CM_REQ), .qpn = htobe32(0xffffff), .psn = htobe32(0xffffff)};

	req.responder_resources = req.initiator_depth = RN_MAX_RD_ATOMIC;
	req.retry_count = req.rnr_retry_count = 7;
	req.private_length = RN_CM_REQ_PRIVATE;
	say(fd, &req, sizeof req, wrong);
}

static void say_reply(int fd, const struct wrong *wrong)
{
	struct rn_cm_rep rep = {.header = header_of(RN_CM_REP), .qpn = htobe32(0xffffff), .psn = htobe32(0xffffff)};

	rep.responder_resources = rep.initiator_depth = RN_MAX_RD_ATOMIC;
	rep.rnr_retry_count = 7;
	rep.private_length = RN_CM_REP_PRIVATE;
	say(fd, &rep, sizeof rep, wrong);
}

static void requests_with_impossible_values(void)
{
	struct rdma_event_channel *server = new_channel();
	struct rdma_cm_event *event;
	struct rdma_cm_id *passive;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	int fd;

	for EACH (wrong, requests) {
		unsigned long before = rn_cm_wire_dropped();

		fd = tcp_to(port);
		say_request(fd, wrong);
		closed_by_peer(fd);
		if (rn_cm_wire_dropped() != before + 1)
			fprintf(stderr, "a request with the %s %u was not dropped\n", wrong->name, wrong->value);
		CHECK(rn_cm_wire_dropped() == before + 1);
		want_none(server, 0);
	}
	fd = tcp_to(port);
	say_request(fd, NULL);
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.qp_num == 0xffffff && event->param.conn.initiator_depth == RN_MAX_RD_ATOMIC);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_destroy_id(passive));
	close(fd);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

static void say_reject(int fd, uint8_t private_length)
{
	struct rn_cm_rej rej = {.header = header_of(RN_CM_REJ), .reason = htobe16(RN_REJ_CONSUMER_DEFINED)};

	rej.private_length = private_length;
	say(fd, &rej, sizeof rej, NULL);
}

/* Who asked may give up while its reply is on the way; not when it has said that all is well. */
static void a_client_rejects_too_late(void)
{
	struct rdma_event_channel *server = new_channel();
	struct rdma_conn_param param = plain;
	struct rn_cm_header ready = header_of(RN_CM_RTU);
	struct rdma_cm_event *event;
	struct rdma_cm_id *passive;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	unsigned long before = rn_cm_wire_dropped();
	struct rn_cm_rep rep;

	for (int established = 0; established < 2; established++) {
		int fd = tcp_to(port);

		say_request(fd, NULL);
		event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		passive = event->id;
		rdma_ack_cm_event(event);
		param.qp_num = 0x4000;
		CHECK(!rdma_accept(passive, &param));
		CHECK(recv(fd, &rep, sizeof rep, MSG_WAITALL) == sizeof rep && be32toh(rep.qpn) == 0x4000);
		if (established) {
			say(fd, &ready, sizeof ready, NULL);
			want_status(server, RDMA_CM_EVENT_ESTABLISHED, 0);
		}
		say_reject(fd, 0);
		want_status(server, established ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_REJECTED,
			    established ? 0 : RN_REJ_CONSUMER_DEFINED);
		CHECK(rn_cm_wire_dropped() == before + (established ? 1 : 0));
		CHECK(!rdma_destroy_id(passive));
		closed_by_peer(fd);
	}
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

/* A server of sockets, which is taken for an RDMA program's by its name. */
static void replies_with_impossible_values(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = plain;
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), name, fd;
	struct rdma_cm_event *event;
	struct rn_cm_req req;
	struct rdma_cm_id *id;

	CHECK(!bind(server, (struct sockaddr *)&at, sizeof at) && !listen(server, 5));
	CHECK(!getsockname(server, (struct sockaddr *)&at, &length));
	name = take_name(ntohs(at.sin_port));
	param.qp_num = 0x4000;
	for (const struct wrong *wrong = replies; wrong <= replies + sizeof replies / sizeof *replies; wrong++) {
		bool is_right = wrong == replies + sizeof replies / sizeof *replies;

		id = new_id(channel);
		resolve(id, ntohs(at.sin_port));
		CHECK(!rdma_connect(id, &param));
		CHECK((fd = accept4(server, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		CHECK(recv(fd, &req, sizeof req, MSG_WAITALL) == sizeof req && be32toh(req.qpn) == 0x4000);
		say_reply(fd, is_right ? NULL : wrong);
		event = next_event(channel, LIMIT_MS);
		CHECK(event && event->id == id);
		if ((event->event == RDMA_CM_EVENT_CONNECT_RESPONSE) != is_right)
			fprintf(stderr, "a reply %s%s: %s\n", is_right ? "without fault" : "with the wrong ",
				is_right ? "" : wrong->name, rdma_event_str(event->event));
		CHECK(event->event == (is_right ? RDMA_CM_EVENT_CONNECT_RESPONSE : RDMA_CM_EVENT_REJECTED));
		rdma_ack_cm_event(event);
		if (!is_right)
			closed_by_peer(fd);
		else
			close(fd);
		CHECK(!rdma_destroy_id(id));
	}
	for (int is_right = 0; is_right < 2; is_right++) {
		id = new_id(channel);
		resolve(id, ntohs(at.sin_port));
		CHECK(!rdma_connect(id, &param));
		CHECK((fd = accept4(server, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		CHECK(recv(fd, &req, sizeof req, MSG_WAITALL) == sizeof req);
		say_reject(fd, is_right ? RN_CM_REJ_PRIVATE : RN_CM_REJ_PRIVATE + 1);
		want_status(channel, RDMA_CM_EVENT_REJECTED, is_right ? RN_REJ_CONSUMER_DEFINED : RN_REJ_INVALID_SERVICE_ID);
		closed_by_peer(fd);
		CHECK(!rdma_destroy_id(id));
	}
	close(name);
	close(server);
	rdma_destroy_event_channel(channel);
}

/* A TCP listener on loopback that is taken for an RDMA program's. */
struct stage {
	int server, name;
	uint16_t port;
};

static struct stage set_up(void)
{
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	struct stage stage = {.server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};

	CHECK(!bind(stage.server, (struct sockaddr *)&at, sizeof at) && !listen(stage.server, 5));
	CHECK(!getsockname(stage.server, (struct sockaddr *)&at, &length));
	stage.port = ntohs(at.sin_port);
	stage.name = take_name(stage.port);
	return stage;
}

static void clear_away(struct stage *stage)
{
	close(stage->name);
	close(stage->server);
}

static void say_sidr_reply(int fd, const struct wrong *wrong)
{
	struct rn_cm_sidr_rep rep = {.header = header_of(RN_CM_SIDR_REP), .qpn = htobe32(0xffffff)};

	rep.private_length = RN_CM_SIDR_REP_PRIVATE;
	say(fd, &rep, sizeof rep, wrong);
}

static void answers_to_datagrams_with_impossible_values(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_conn_param param = {0};
	struct stage stage = set_up();
	const struct wrong *right = sidr_replies + sizeof sidr_replies / sizeof *sidr_replies;

	for (const struct wrong *wrong = sidr_replies; wrong <= right; wrong++) {
		struct rn_cm_sidr_req req;
		struct rdma_cm_id *id;
		int fd;

		CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
		resolve(id, stage.port);
		CHECK(!rdma_connect(id, &param));
		CHECK((fd = accept4(stage.server, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		CHECK(recv(fd, &req, sizeof req, MSG_WAITALL) == sizeof req);
		say_sidr_reply(fd, wrong == right ? NULL : wrong);
		if (wrong == right)
			want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
		else
			want_status(channel, RDMA_CM_EVENT_UNREACHABLE, RN_SIDR_UNSUPPORTED);
		closed_by_peer(fd);
		CHECK(!rdma_destroy_id(id));
	}
	clear_away(&stage);
	rdma_destroy_event_channel(channel);
}

static unsigned accepted(void)
{
	unsigned count = 0;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *item = rn_cm_wires.next; item != &rn_cm_wires; item = item->next)
		count++;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

static unsigned unread(struct rdma_cm_id *listener, bool *is_paused)
{
	unsigned count;

	pthread_mutex_lock(&rn_cm_lock);
	count = ((struct rn_cm_id *)listener)->unread_requests;
	*is_paused = ((struct rn_cm_id *)listener)->paused;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

/* Who was accepted before the listener paused may still ask: it takes in nobody until fewer than its backlog wait. */
static void more_requests_than_the_backlog(void)
{
	enum { BACKLOG = 2, MORE = 4 };
	struct rdma_event_channel *server = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, BACKLOG, &port);
	bool is_paused;
	int fds[MORE];

	for (int i = 0; i < MORE; i++)
		fds[i] = tcp_to(port);
	EVENTUALLY(accepted() == MORE);
	for (int i = 0; i < MORE; i++)
		say_request(fds[i], NULL);
	EVENTUALLY(unread(listener, &is_paused) == MORE && is_paused);
	for (unsigned left = MORE; left--;) {
		struct rdma_cm_event *event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		struct rdma_cm_id *passive = event->id;

		rdma_ack_cm_event(event);
		CHECK(unread(listener, &is_paused) == left && is_paused == (left >= BACKLOG));
		CHECK(!rdma_destroy_id(passive));
		close(fds[MORE - 1 - left]);
	}
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

/* Connect to the stage's listener, and establish that. The socket at the other end. */
static int establish(struct stage *stage, struct rdma_event_channel *channel, struct rdma_cm_id **id)
{
	struct rdma_conn_param param = plain;
	struct rn_cm_header rtu;
	struct rn_cm_req req;
	int fd;

	param.qp_num = 0x4000;
	*id = new_id(channel);
	resolve(*id, stage->port);
	CHECK(!rdma_connect(*id, &param));
	CHECK((fd = accept4(stage->server, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	CHECK(recv(fd, &req, sizeof req, MSG_WAITALL) == sizeof req);
	say_reply(fd, NULL);
	want_status(channel, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(!rdma_establish(*id));
	CHECK(recv(fd, &rtu, sizeof rtu, MSG_WAITALL) == sizeof rtu && rtu.type == RN_CM_RTU);
	return fd;
}

/* The next message is only a header, of this type, and the last. */
static void hear_last(int fd, enum rn_cm_message type)
{
	struct rn_cm_header header;

	CHECK(recv(fd, &header, sizeof header, MSG_WAITALL) == sizeof header && header.type == type);
	CHECK(!recv(fd, &header, 1, 0));
}

/* The passive side's program gives the connection up while our RTU is on its way, or our DREQ after it: ours has ended. */
static void a_rejection_that_crosses_our_last_word(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct stage stage = set_up();
	unsigned long before = rn_cm_wire_dropped();

	for (int disconnects = 0; disconnects < 2; disconnects++) {
		struct rdma_cm_id *id;
		int fd = establish(&stage, channel, &id);

		if (disconnects) {
			CHECK(!rdma_disconnect(id));
			hear_last(fd, RN_CM_DREQ);
		}
		say_reject(fd, 0);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		CHECK(rn_cm_wire_dropped() == before);
		closed_by_peer(fd);
		CHECK(!rdma_destroy_id(id));
	}
	clear_away(&stage);
	rdma_destroy_event_channel(channel);
}

/* Who disconnects has nothing more to say, and waits for the answer; unless the program has destroyed the identifier, or
 * has only left. */
static void disconnecting_is_the_last_word(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct stage stage = set_up();
	struct rn_cm_header answer = header_of(RN_CM_DREP);
	struct rdma_cm_id *id;
	int fd = establish(&stage, channel, &id);

	CHECK(!rdma_disconnect(id));
	hear_last(fd, RN_CM_DREQ);
	want_none(channel, 0);
	say(fd, &answer, sizeof answer, NULL);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdma_destroy_id(id));
	EVENTUALLY(!accepted());
	close(fd);

	for (int way = 0; way < 3; way++) {
		uint64_t begun;

		fd = establish(&stage, channel, &id);
		begun = rn_now_ns();
		if (way == 1)
			CHECK(!rdma_disconnect(id));
		if (way == 2)
			CHECK(!rdmanet_soft_cm_leave(id));
		else
			CHECK(!rdma_destroy_id(id));
		EVENTUALLY(!accepted());
		CHECK(rn_now_ns() - begun < RN_CM_LINGER_MS * 1000000ull);
		hear_last(fd, RN_CM_DREQ);
		want_none(channel, 0);
		close(fd);
	}
	CHECK(!rdmanet_soft_cm_leave(id) && !rdma_destroy_id(id));
	clear_away(&stage);
	rdma_destroy_event_channel(channel);
}

/* It is answered, unless its side's half of the socket has ended, and with that the connection is over: nobody waits for
 * the other side to close. */
static void the_answer_to_it_is_the_end(void)
{
	struct rdma_event_channel *server = new_channel();
	struct rn_cm_header ready = header_of(RN_CM_RTU), last = header_of(RN_CM_DREQ);
	struct rdma_conn_param param = plain;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);

	param.qp_num = 0x4000;
	for (int half_closes = 0; half_closes < 2; half_closes++) {
		int fd = tcp_to(port);
		struct rdma_cm_event *event;
		struct rdma_cm_id *passive;
		struct rn_cm_rep rep;
		uint64_t begun;
		char byte;

		say_request(fd, NULL);
		event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		passive = event->id;
		rdma_ack_cm_event(event);
		CHECK(!rdma_accept(passive, &param));
		CHECK(recv(fd, &rep, sizeof rep, MSG_WAITALL) == sizeof rep);
		say(fd, &ready, sizeof ready, NULL);
		want_status(server, RDMA_CM_EVENT_ESTABLISHED, 0);
		begun = rn_now_ns();
		CHECK(send(fd, &last, sizeof last, half_closes ? MSG_MORE : 0) == sizeof last);
		if (half_closes)
			CHECK(!shutdown(fd, SHUT_WR)); /* in the same segment */
		want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
		if (half_closes)
			CHECK(!recv(fd, &byte, 1, 0));
		else
			hear_last(fd, RN_CM_DREP);
		CHECK(rn_now_ns() - begun < RN_CM_LINGER_MS * 1000000ull);
		EVENTUALLY(!accepted());
		close(fd);
		CHECK(!rdma_destroy_id(passive));
	}
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

/*
 * RTU gets lost. The program may know by what has come that the client is ready, and hears the end also if it does not. A
 * client that moves its queue pair itself may give up when it has been heard, and has not said RTU.
 */
static void a_client_whose_rtu_is_lost(void)
{
	enum { UNHEARD, HEARD, GIVES_UP };
	struct rdma_event_channel *server = new_channel();
	struct rn_cm_header late = header_of(RN_CM_RTU), last = header_of(RN_CM_DREQ);
	struct rn_cm_handover handover = {.header = header_of(RN_CM_HANDOVER), .token = {1}};
	struct rdma_conn_param param = plain;
	unsigned long before = rn_cm_wire_dropped();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);

	param.qp_num = 0x4000;
	for (int how = UNHEARD; how <= GIVES_UP; how++) {
		int fd = tcp_to(port);
		struct rdma_cm_event *event;
		struct rdma_cm_id *passive;
		struct rn_cm_rep rep;

		say_request(fd, NULL);
		event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		passive = event->id;
		rdma_ack_cm_event(event);
		CHECK(rdma_notify(passive, IBV_EVENT_COMM_EST) && errno == EINVAL);
		CHECK(!rdma_accept(passive, &param));
		CHECK(recv(fd, &rep, sizeof rep, MSG_WAITALL) == sizeof rep);
		if (how != UNHEARD) {
			CHECK(rdma_notify(passive, IBV_EVENT_SQ_DRAINED) && errno == EINVAL);
			CHECK(!rdma_notify(passive, IBV_EVENT_COMM_EST));
			want_status(server, RDMA_CM_EVENT_ESTABLISHED, 0);
			CHECK(!rdma_notify(passive, IBV_EVENT_COMM_EST));
		}
		if (how == HEARD)
			say(fd, &late, sizeof late, NULL);
		if (how != GIVES_UP) {
			say(fd, &handover, sizeof handover, NULL);
			say(fd, &last, sizeof last, NULL);
		} else {
			say_reject(fd, 0);
		}
		want_status(server, RDMA_CM_EVENT_DISCONNECTED, 0);
		if (how != GIVES_UP)
			hear_last(fd, RN_CM_DREP);
		CHECK(!rdma_disconnect(passive));
		CHECK(rn_cm_wire_dropped() == before);
		close(fd);
		CHECK(!rdma_destroy_id(passive));
	}
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

static bool engine_sleeps(void)
{
	bool sleeps;

	pthread_mutex_lock(&rn_engine.lock);
	sleeps = rn_engine.asleep;
	pthread_mutex_unlock(&rn_engine.lock);
	return sleeps;
}

static bool is_asked(struct rdma_cm_id *id)
{
	bool is;

	pthread_mutex_lock(&rn_cm_lock);
	is = rn_cm_wire_phase(((struct rn_cm_id *)id)->wire) == RN_CM_WIRE_REQ_SENT;
	pthread_mutex_unlock(&rn_cm_lock);
	return is;
}

static void want_refused(struct rdma_event_channel *channel, struct rdma_cm_id *id, struct stage *stage)
{
	struct rdma_conn_param param = plain;

	param.qp_num = 0x4000;
	resolve(id, stage->port);
	CHECK(!rdma_connect(id, &param));
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	CHECK(!rdma_destroy_id(id));
	CHECK(accept4(stage->server, NULL, NULL, SOCK_CLOEXEC) < 0 && errno == EAGAIN);
}

/* Where an RDMA program has answered before, the caller itself connects, and the engine sleeps on. That is so as long as
 * this very listener is there, and not for who wants a listener by name. */
static void a_listener_that_has_answered(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct stage stage = set_up();
	struct rdma_conn_param param = plain;
	struct sockaddr_in at = address(stage.port);
	static const int on = 1;
	struct rdma_cm_id *id;
	struct rn_cm_req req;
	int fd = establish(&stage, channel, &id);

	CHECK(!rdma_destroy_id(id));
	EVENTUALLY(!accepted());
	close(fd);

	param.qp_num = 0x4000;
	id = new_id(channel);
	resolve(id, stage.port);
	EVENTUALLY(engine_sleeps());
	CHECK(!rdma_connect(id, &param));
	CHECK(is_asked(id));
	CHECK(engine_sleeps());
	CHECK((fd = accept4(stage.server, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	CHECK(recv(fd, &req, sizeof req, MSG_WAITALL) == sizeof req);
	say_reject(fd, 0);
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	closed_by_peer(fd);
	CHECK(!rdma_destroy_id(id));

	CHECK(!fcntl(stage.server, F_SETFL, O_NONBLOCK));
	id = new_id(channel);
	CHECK(!rdmanet_soft_cm_by_name_alone(id));
	want_refused(channel, id, &stage);

	clear_away(&stage);
	stage.server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	CHECK(!setsockopt(stage.server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
	CHECK(!bind(stage.server, (struct sockaddr *)&at, sizeof at) && !listen(stage.server, 5));
	want_refused(channel, new_id(channel), &stage);
	close(stage.server);
	rdma_destroy_event_channel(channel);
}

/* Its connection was accepted, but what it asks for is no longer there. */
static void a_request_to_a_listener_that_has_gone(void)
{
	struct rdma_event_channel *server = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, 10, &port);
	struct rn_cm_rej rej;
	int fd = tcp_to(port);

	EVENTUALLY(accepted());
	CHECK(!rdma_destroy_id(listener));
	say_request(fd, NULL);
	CHECK(recv(fd, &rej, sizeof rej, MSG_WAITALL) == sizeof rej);
	CHECK(rej.header.type == RN_CM_REJ && be16toh(rej.reason) == RN_REJ_CONSUMER_DEFINED);
	closed_by_peer(fd);
	rdma_destroy_event_channel(server);
}

int main(void)
{
	RUN(requests_with_impossible_values);
	RUN(replies_with_impossible_values);
	RUN(answers_to_datagrams_with_impossible_values);
	RUN(a_client_rejects_too_late);
	RUN(a_rejection_that_crosses_our_last_word);
	RUN(disconnecting_is_the_last_word);
	RUN(the_answer_to_it_is_the_end);
	RUN(a_client_whose_rtu_is_lost);
	RUN(a_listener_that_has_answered);
	RUN(a_request_to_a_listener_that_has_gone);
	RUN(more_requests_than_the_backlog);
	return 0;
}
