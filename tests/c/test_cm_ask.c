/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that are asked for by a link (cm/ask.c): the second one between two processes has no socket.  What TCP
 * would do for it is done all the same, nobody can ask in another's name, and where a link does not do a socket does.
 */
#include "cm_other.h"
#include "namespace.h"
#include "peer/peer.h"


enum { FEW = 8 };

static bool has_asked(struct rdma_cm_id *id)
{
	bool has;

	pthread_mutex_lock(&rn_cm_lock);
	has = rn_cm_wire_phase(rn_cm_id(id)->wire) == RN_CM_WIRE_REQ_SENT;
	pthread_mutex_unlock(&rn_cm_lock);
	return has;
}

/* By the link or by a socket: which of them, the engine decides, if it is awake. */
static bool is_on_its_way(struct rdma_cm_id *id)
{
	bool is;

	pthread_mutex_lock(&rn_cm_lock);
	is = rn_cm_id(id)->wire->side == RN_CM_ASKER || rn_cm_id(id)->wire->source.fd >= 0;
	pthread_mutex_unlock(&rn_cm_lock);
	return is;
}

/* --- a client in another process: it does what one letter at a time says ------------------------------- */

/* The number that the asker was given for its port, told to the other process. */
static void say_port(int fd, struct rdma_cm_id *id)
{
	__be16 number = rdma_get_src_port(id);

	CHECK(write(fd, &number, sizeof number) == sizeof number);
}

static __be16 hear_port(int fd)
{
	__be16 number;

	CHECK(read(fd, &number, sizeof number) == sizeof number);
	return number;
}

/* n: connect; d, w: disconnect the last one, or await its end; r: be refused; t: ask, and give up. */
static void do_it(struct asker *asker, char letter)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	switch (letter) {
	case 'n':
		id = connect_once_more(asker);
		say_port(asker->fd, id);
		say(asker->fd, side_of(id) == RN_CM_ASKER ? 'l' : 's');
		return;
	case 'd':
		CHECK(!rdma_disconnect(asker->ids[asker->count - 1]));
		/* fall through */
	case 'w':
		want_status(asker->events, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(asker->ids[--asker->count]);
		break;
	case 'r':
		id = connect_to(asker->events);
		event = want(asker->events, RDMA_CM_EVENT_REJECTED);
		CHECK(event->status == RN_REJ_CONSUMER_DEFINED && !strcmp(event->param.conn.private_data, "no"));
		rdma_ack_cm_event(event);
		destroy(id);
		break;
	case 't':
		id = connect_to(asker->events);
		EVENTUALLY(has_asked(id)); /* or there is nothing to give up: the engine may be late */
		destroy(id);
		break;
	default:
		do_as_always(asker, letter);
		return;
	}
	say(asker->fd, 'D');
}

static void client(int fd)
{
	ask_by(fd, do_it);
}

static void accept_it(struct rdma_cm_id *id)
{
	answer(id);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
}

/* The other end is on this channel. */
static void accept_it_by(struct rdma_cm_id *id, struct rdma_event_channel *events)
{
	answer(id);
	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
}

/* The client connects. by: 's' with a socket, 'l' by the link. */
static struct rdma_cm_id *let_in(const struct other *other, char by)
{
	struct rdma_cm_id *id;
	__be16 number;

	say(other->fd, 'n');
	id = next_request();
	accept_it(id);
	number = hear_port(other->fd);
	CHECK(hear(other->fd) == by);
	CHECK((side_of(id) == RN_CM_ASKED) == (by == 'l'));
	CHECK(rdma_get_dst_port(id) == number && number && rdma_get_src_port(id) == htons(port));
	return id;
}

/* Once they are linked, both ways. */
static struct rdma_cm_id *first(const struct other *other)
{
	struct rdma_cm_id *id = let_in(other, 's');

	await_link(id);
	return id;
}

static void end(struct rdma_cm_id *id)
{
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdmanet_soft_cm_peer_is_gone(id));
	destroy(id);
}

/* --- what is as by TCP --------------------------------------------------------------------------------- */

static void the_second_has_no_socket(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other), *again[FEW];
	unsigned before = descriptors();
	uid_t user = (uid_t)-1;

	for (int i = 0; i < FEW; i++) {
		again[i] = let_in(&other, 'l');
		CHECK(rdmanet_soft_cm_peer_user(again[i], &user) == RDMANET_SOFT_PEER_BY_TCP && user == geteuid());
		for (int j = 0; j < i; j++) /* they are told apart */
			CHECK(rdma_get_dst_port(again[i]) != rdma_get_dst_port(again[j]));
	}
	EVENTUALLY(descriptors() <= before + 1); /* the other's event channel */
	for (int i = FEW - 1; i >= 0; i--) {
		if (i % 2) {
			tell(&other, 'd');
			end(again[i]);
		} else {
			CHECK(!rdma_disconnect(again[i]));
			end(again[i]);
			tell(&other, 'w');
		}
	}
	tell(&other, 'd');
	end(id);
	end_other(&other);
}

static void it_is_refused(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other);

	for (int i = 0; i < FEW; i++) {
		struct rdma_cm_id *asks;

		say(other.fd, 'r');
		asks = next_request();
		CHECK(side_of(asks) == RN_CM_ASKED);
		CHECK(!rdma_reject(asks, "no", 3));
		destroy(asks);
		CHECK(hear(other.fd) == 'D');
	}
	tell(&other, 'd');
	end(id);
	end_other(&other);
}

static void it_gives_up(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other);

	for (int i = 0; i < FEW; i++) {
		struct rdma_cm_id *asks;

		tell(&other, 't');
		asks = next_request();
		want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_TIMEOUT);
		destroy(asks);
	}
	tell(&other, 'd');
	end(id);
	end_other(&other);
}

/* Both in one process, which is linked to itself. */
static void within_a_process(void)
{
	struct pair pairs[FEW];
	unsigned before;

	pairs[0] = connect_pair(listener, channel, port);
	before = descriptors();
	for (int i = 1; i < FEW; i++) {
		pairs[i] = connect_pair(listener, channel, port);
		CHECK(side_of(pairs[i].active) == RN_CM_ASKER && side_of(pairs[i].passive) == RN_CM_ASKED);
	}
	CHECK(descriptors() <= before);
	for (int i = 0; i < FEW; i++) {
		CHECK(!rdma_disconnect(i % 2 ? pairs[i].active : pairs[i].passive));
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(pairs[i].active);
		destroy(pairs[i].passive);
	}
}

/* Either side's time is up, which the other one learns. */
static void it_takes_too_long(void)
{
	struct pair pair = connect_pair(listener, channel, port);
	struct rdma_event_channel *events = new_channel();
	uint64_t before = rn_settings.cm_timeout_ms;
	struct rdma_conn_param param = with_data("who is asked");
	struct rdma_cm_id *asks, *asked;

	rn_settings.cm_timeout_ms = 50;
	asks = connect_to(events);
	asked = next_request();
	CHECK(side_of(asks) == RN_CM_ASKER && side_of(asked) == RN_CM_ASKED);
	want_status(events, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	destroy(asks);
	destroy(asked);

	asks = connect_to(events);
	asked = next_request();
	CHECK(side_of(asks) == RN_CM_ASKER && side_of(asked) == RN_CM_ASKED);
	make_qp(asked);
	CHECK(!rdma_accept(asked, &param)); /* the asker does not read that */
	want_status(channel, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
	EVENTUALLY(side_of(asks) == RN_CM_LINK_ASKS); /* it has none: who reads the answer before that goes on */
	want_status(events, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	rn_settings.cm_timeout_ms = before;
	destroy(asks);
	destroy(asked);
	destroy(pair.active);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.passive);
	rdma_destroy_event_channel(events);
}

/* One of its connections has ended: the one that it asked for, or was asked for, is refused. */
static void want_its_end(struct rdma_event_channel *events, const struct rdma_cm_id *asks)
{
	struct rdma_cm_event *event = next_event(events, LIMIT_MS);
	bool is_asked = event && event->id == asks;

	if (!event || event->event != (is_asked ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_DISCONNECTED))
		fprintf(stderr, "%s: %s status %d\n", is_asked ? "the request" : "a connection",
			event ? rdma_event_str(event->event) : "nothing", event ? event->status : 0);
	CHECK(event && event->event == (is_asked ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_DISCONNECTED));
	rdma_ack_cm_event(event);
}

static void a_client_is_killed(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other), *again = let_in(&other, 'l'), *asks;

	tell(&other, 'q');
	asks = next_request();
	kill(other.pid, SIGKILL);
	for (int i = 0; i < 3; i++)
		want_its_end(channel, asks);
	CHECK(rdmanet_soft_cm_peer_is_gone(id) && rdmanet_soft_cm_peer_is_gone(again));
	destroy(id);
	destroy(again);
	destroy(asks);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	close(other.fd);
}

/* What it has said before it ended is heard. */
static void the_last_words(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other), *again[FEW];

	for (int i = 0; i < FEW; i++)
		again[i] = let_in(&other, 'l');
	end_other(&other); /* it destroys them, and ends */
	for (int i = 0; i <= FEW; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < FEW; i++) {
		CHECK(!rdmanet_soft_cm_peer_is_gone(again[i]));
		destroy(again[i]);
	}
	destroy(id);
}

/* --- where a link does not do --------------------------------------------------------------------------- */

static void another_listener_at_that_port(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other), *again;
	struct sockaddr_in at = address(port);

	again = let_in(&other, 'l');
	CHECK(!rdma_destroy_id(listener));
	listener = new_id(channel);
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
	CHECK(!rdma_listen(listener, FEW));
	for (int i = 0; i < 2; i++) { /* by a socket, and then it is known */
		struct rdma_cm_id *anew = let_in(&other, i ? 'l' : 's');

		tell(&other, 'd');
		end(anew);
	}
	tell(&other, 'd');
	end(again);
	tell(&other, 'd');
	end(id);
	end_other(&other);
	CHECK(!rdma_destroy_id(listener));
	listener = new_listener(channel, FEW, &port);
}

/* Requests that the program does not read: as many as its backlog. The others wait in TCP's queue. */
static void more_than_the_backlog(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *id = first(&other);
	unsigned by_link = 0;

	for (int i = 0; i < 2 * FEW; i++)
		tell(&other, 'q');
	for (int i = 0; i < 2 * FEW; i++) {
		struct rdma_cm_event *event = next_event(channel, LIMIT_MS);

		if (event && event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			struct rdma_cm_id *asks = event->id;

			by_link += side_of(asks) == RN_CM_ASKED;
			rdma_ack_cm_event(event);
			CHECK(!rdma_reject(asks, "no", 3));
			destroy(asks);
		} else {
			CHECK(false);
		}
		say(other.fd, 'c');
		CHECK(hear(other.fd) == 'R');
	}
	CHECK(by_link >= FEW && by_link < 2 * FEW);
	for (int i = 0; i < 2 * FEW; i++)
		tell(&other, 'l');
	tell(&other, 'd');
	end(id);
	end_other(&other);
}

/* The server: it listens at the port that it says, lets one in for each 'n', and keeps the others waiting. */
static void server(int fd)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *ids[FEW], *at;
	unsigned count = 0;
	uint16_t where = 0;
	char what;

	channel = events;
	at = listener = new_listener(events, FEW, &where);
	CHECK(write(fd, &where, sizeof where) == sizeof where);
	while ((what = hear(fd)) == 'n') {
		ids[count] = next_request();
		accept_it(ids[count++]);
		say(fd, 'D');
	}
	while (count)
		destroy(ids[--count]);
	CHECK(!rdma_destroy_id(at));
	close_shared();
	rdma_destroy_event_channel(events);
}

/* A server that was stopped, and killed, before it has answered. */
static void a_server_is_killed(void)
{
	struct rdma_event_channel *events = new_channel();
	uint16_t before = port;
	struct other other = spawn(server);
	struct rdma_cm_id *one, *two, *asks;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	one = reach(events, &other);
	await_link(one);
	two = reach(events, &other);
	CHECK(side_of(two) == RN_CM_ASKER);
	kill(other.pid, SIGSTOP);
	asks = connect_to(events);
	EVENTUALLY(side_of(asks) == RN_CM_ASKER); /* by the engine, if it is awake */
	want_none(events, 50);
	kill(other.pid, SIGKILL);
	for (int i = 0; i < 3; i++)
		want_its_end(events, asks);
	CHECK(rdmanet_soft_cm_peer_is_gone(two));
	destroy(one);
	destroy(two);
	destroy(asks);
	rdma_destroy_event_channel(events);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	close(other.fd);
	port = before;
}

/* Before we hear of its end, another program listens there: here, our own. That one is asked. */
static void a_server_is_replaced(void)
{
	struct hold held;
	struct rdma_event_channel *events = new_channel();
	uint16_t before = port;
	struct other other = spawn(server);
	struct rdma_cm_id *one, *asks, *anew = new_id(channel), *its;
	struct rdma_cm_event *event;
	struct sockaddr_in at;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	at = address(port);
	one = reach(events, &other);
	await_link(one);
	kill(other.pid, SIGSTOP);
	asks = connect_to(events);
	EVENTUALLY(side_of(asks) == RN_CM_ASKER); /* by the engine, if it is awake */
	hold_engine(&held);
	kill(other.pid, SIGKILL);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	CHECK(!rdma_bind_addr(anew, (struct sockaddr *)&at));
	CHECK(!rdma_listen(anew, FEW));
	let_engine_go(&held);
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	its = event->id;
	rdma_ack_cm_event(event);
	CHECK(side_of(asks) == RN_CM_HANDED && side_of(its) == RN_CM_HANDED);
	want_status(events, RDMA_CM_EVENT_DISCONNECTED, 0); /* the first one */
	accept_it_by(its, events);
	rn_task_cancel(&held.task);
	destroy(asks);
	end(its);
	destroy(one);
	CHECK(!rdma_destroy_id(anew));
	rdma_destroy_event_channel(events);
	close(other.fd);
	port = before;
}

/* A listener ends when our connection by TCP has just come to it, before we know that it has: the kernel resets it. */
static void a_listener_ends(void)
{
	struct hold held;
	struct rdma_event_channel *events = new_channel();
	struct rdma_conn_param param = with_data("who asks");
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), name, first_come;
	struct pollfd has_come = {.fd = server, .events = POLLIN};
	struct sockaddr_in at = address(0);
	socklen_t length = sizeof at;
	struct rdma_cm_id *id = new_id(events);

	CHECK(!bind(server, (struct sockaddr *)&at, sizeof at) && !listen(server, 0));
	CHECK(!getsockname(server, (struct sockaddr *)&at, &length));
	name = take_name(ntohs(at.sin_port)); /* or it is taken for a TCP program's */
	first_come = tcp_to(ntohs(at.sin_port)); /* its queue is full: the kernel asks again after a second */
	resolve(id, ntohs(at.sin_port));
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	EVENTUALLY(is_on_its_way(id));
	hold_engine(&held);
	CHECK(rn_cm_id(id)->wire->phase == RN_CM_WIRE_CONNECTING);
	close(accept(server, NULL, NULL));
	CHECK(poll(&has_come, 1, LIMIT_MS) == 1);
	close(server);
	let_engine_go(&held);
	want_status(events, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	rn_task_cancel(&held.task);
	destroy(id);
	rdma_destroy_event_channel(events);
	close(first_come);
	close(name);
}

/* Of a process that does not run few requests are kept: the next ones wait in TCP's queue. */
static void a_server_is_stopped(void)
{
	enum { MANY = 4000 };
	static struct rdma_cm_id *ids[MANY];
	struct rdma_event_channel *events = new_channel();
	uint16_t before = port;
	struct other other = spawn(server);
	struct rdma_cm_id *one;
	int count = 0;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	one = reach(events, &other);
	await_link(one);
	kill(other.pid, SIGSTOP);
	do {
		ids[count] = connect_to(events);
		EVENTUALLY(is_on_its_way(ids[count]));
	} while (side_of(ids[count++]) == RN_CM_ASKER && count < MANY);
	CHECK(count > FEW && count < MANY);
	kill(other.pid, SIGKILL);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	close(other.fd);
	while (count)
		destroy(ids[--count]);
	destroy(one);
	rdma_destroy_event_channel(events);
	port = before;
}

/* A program that reads all requests and answers none: more than some go by TCP, which takes descriptors. */
static void more_than_may_wait(void)
{
	enum { MANY = 1100 };
	static struct rdma_cm_id *asks[MANY], *asked[MANY];
	struct pair pair = connect_pair(listener, channel, port);
	struct rdma_event_channel *events = new_channel();
	int count = 0;

	do {
		asks[count] = connect_to(events);
		asked[count] = next_request();
	} while (side_of(asked[count++]) == RN_CM_ASKED && count < MANY);
	CHECK(count == 1025);
	while (count) {
		destroy(asks[--count]);
		want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_TIMEOUT);
		destroy(asked[count]);
	}
	asks[0] = connect_to(events); /* there is room again, once it is known where */
	asked[0] = next_request();
	destroy(asks[0]);
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_TIMEOUT);
	destroy(asked[0]);
	destroy(pair.active);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(pair.passive);
	rdma_destroy_event_channel(events);
}

/* --- who asks for what is not his ------------------------------------------------------------------------ */

/* What a process sends by hand over its link to ours, which it has by an honest connection. */
static struct rn_cm_link_request forged;
static size_t forged_length = sizeof forged;
static uint32_t forged_what = RN_CM_LINK_ASKS, forged_mail_channel; /* 0: by the link */

static void forger(int fd)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *id = connect_to(events);
	struct rn_peer *peer;
	char what;

	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	peer = rn_peer_get((uint16_t)(rn_cm_id(id)->terms.remote_qpn >> 8));
	EVENTUALLY(rn_peer_is_linked(peer));
	say(fd, 'L');
	while ((what = hear(fd)) != 'e') {
		struct rn_cm_link_request request;
		uint64_t token;

		CHECK(read(fd, &request, sizeof request) == sizeof request);
		CHECK(read(fd, &forged_length, sizeof forged_length) == sizeof forged_length);
		CHECK(read(fd, &forged_what, sizeof forged_what) == sizeof forged_what);
		CHECK(read(fd, &token, sizeof token) == sizeof token);
		if (what == 'o') /* by its own queue pair */
			request.req.qpn = htobe32(id->qp->qp_num);
		CHECK(read(fd, &forged_mail_channel, sizeof forged_mail_channel) == sizeof forged_mail_channel);
		if (forged_mail_channel)
			CHECK(rn_peer_mail(peer, forged_mail_channel, forged_what, token, &request, forged_length));
		else
			CHECK(rn_peer_tell_connection(peer, forged_what, token, &request, forged_length));
		say(fd, 'D');
	}
	rn_peer_put(peer);
	destroy(id);
	close_shared();
	rdma_destroy_event_channel(events);
}

static void forge(const struct other *other, char how, uint64_t token)
{
	say(other->fd, how);
	CHECK(write(other->fd, &forged, sizeof forged) == sizeof forged);
	CHECK(write(other->fd, &forged_length, sizeof forged_length) == sizeof forged_length);
	CHECK(write(other->fd, &forged_what, sizeof forged_what) == sizeof forged_what);
	CHECK(write(other->fd, &token, sizeof token) == sizeof token);
	CHECK(write(other->fd, &forged_mail_channel, sizeof forged_mail_channel) == sizeof forged_mail_channel);
	CHECK(hear(other->fd) == 'D');
}

static void reset_forged(void)
{
	struct sockaddr_in here = address(port);

	forged = (struct rn_cm_link_request){
		.cookie = rn_cm_id(listener)->cookie,
		.req = {.header = {htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_REQ, htobe16(sizeof(struct rn_cm_req))},
			.retry_count = 7, .private_length = sizeof "who asks", .private_data = "who asks"}};
	rn_gid_of((struct sockaddr *)&here, &forged.near);
	forged.far = forged.near;
	forged_length = sizeof forged;
	forged_what = RN_CM_LINK_ASKS;
}

static void try_to_be_heard(bool by_mail)
{
	struct other honest = spawn(client), other;
	struct rdma_cm_id *id = first(&honest), *again = let_in(&honest, 'l'), *its, *asks;
	uint32_t anothers = rn_cm_id(id)->terms.remote_qpn;
	uint64_t token = rn_cm_id(again)->wire->token;

	other = spawn(forger);
	its = next_request();
	accept_it(its);
	CHECK(hear(other.fd) == 'L');
	forged_mail_channel = by_mail ? ((struct rn_cm_channel *)channel)->number : 0;
	CHECK(!by_mail || forged_mail_channel);
	reset_forged();
	forge(&other, 'o', 1); /* this is how it is done */
	asks = next_request();
	CHECK(side_of(asks) == RN_CM_ASKED);
	CHECK(!rdma_reject(asks, "no", 3));
	destroy(asks);

	forged.cookie++;
	forge(&other, 'o', 2); /* no such listener */
	reset_forged();
	forge(&other, 'o', 0); /* no name for it */
	forged_length--;
	forge(&other, 'o', 3);
	forged_length = 1;
	forge(&other, 'o', 3);
	reset_forged();
	forged.req.qpn = htobe32(anothers);
	forge(&other, '-', 4); /* in the name of another process */
	forged.req.qpn = htobe32(0x123456);
	forge(&other, '-', 5); /* of nobody */
	reset_forged();
	forged.far.raw[13] ^= 64; /* 127.64.0.1 is ours as well: no. 63.0.0.1 is not */
	forged.far.raw[12] = 63;
	forge(&other, 'o', 6); /* from another host */
	reset_forged();
	forged.near = (union ibv_gid){.raw = {[15] = 1}};
	forge(&other, 'o', 7); /* to an address that the listener does not have */
	reset_forged();
	forged.req.rnr_retry_count = 99;
	forge(&other, 'o', 8); /* impossible values, as by a socket */
	reset_forged();
	forged.req.header.type = RN_CM_REP;
	forge(&other, 'o', 9);
	want_none(channel, 50);

	/* Of another's connection: the token is right, the process is not. */
	reset_forged();
	*(struct rn_cm_header *)&forged = (struct rn_cm_header){htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_DREQ, htobe16(8)};
	forged_length = 8;
	for (forged_what = RN_CM_HANDED; forged_what <= RN_CM_ASKED; forged_what++)
		forge(&other, '-', token);
	for (forged_what = RN_CM_LINK_ASKS + 1; forged_what <= 9; forged_what++)
		forge(&other, '-', token);
	want_none(channel, 50);
	CHECK(side_of(again) == RN_CM_ASKED);

	/* Twice by the same name: the second is not heard. */
	reset_forged();
	forge(&other, 'o', 10);
	asks = next_request();
	forge(&other, 'o', 10);
	want_none(channel, 50);
	/* Out of turn, about its own: that one ends, and no other. */
	*(struct rn_cm_header *)&forged = (struct rn_cm_header){htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_DREQ, htobe16(8)};
	forged_length = 8;
	forged_what = RN_CM_ASKED;
	forge(&other, '-', 10);
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	destroy(asks);
	want_none(channel, 50);

	end_other(&other);
	end(its);
	tell(&honest, 'd');
	end(again);
	tell(&honest, 'd');
	end(id);
	end_other(&honest);
}

static void requests_that_are_not_heard(void)
{
	try_to_be_heard(false);
}

static void mail_that_is_not_heard(void)
{
	try_to_be_heard(true);
}

/* Where the kernel may begin a connection from any port, no number is left for a client that has none. */
static void no_number_is_left(void)
{
	struct other other;
	struct rdma_cm_id *ids[2];

	write_to("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535");
	channel = new_channel();
	listener = new_listener(channel, FEW, &port);
	other = spawn(client);
	ids[0] = first(&other);
	ids[1] = let_in(&other, 's');
	for (int i = 1; i >= 0; i--) {
		tell(&other, 'd');
		end(ids[i]);
	}
	end_other(&other);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* Last: it makes all forgotten that is known of listeners. */
static void a_listener_that_is_not_known(void)
{
	enum { MANY = 64 };
	struct sockaddr_in at = address(0);
	uint64_t cookie = 0;
	uint32_t mail_channel;

	for (uint16_t i = 1; i <= MANY; i++) {
		at = address(i);
		rn_cm_known_is_of((struct sockaddr *)&at, i, i);
	}
	CHECK(rn_cm_known_peer((struct sockaddr *)&at, false, &cookie, &mail_channel) == MANY && cookie == MANY);
	at = address(MANY + 1);
	cookie = 0;
	CHECK(!rn_cm_known_peer((struct sockaddr *)&at, false, &cookie, &mail_channel) && !cookie);
}

int main(void)
{
	RUN_IN_NETWORK(no_number_is_left);
	channel = new_channel();
	listener = new_listener(channel, FEW, &port);
	RUN(the_second_has_no_socket);
	RUN(it_is_refused);
	RUN(it_gives_up);
	RUN(within_a_process);
	RUN(it_takes_too_long);
	RUN(a_client_is_killed);
	RUN(the_last_words);
	RUN(another_listener_at_that_port);
	RUN(more_than_the_backlog);
	RUN(a_server_is_killed);
	RUN(a_server_is_replaced);
	RUN(a_listener_ends);
	RUN(a_server_is_stopped);
	RUN(more_than_may_wait);
	RUN(requests_that_are_not_heard);
	RUN(mail_that_is_not_heard);
	RUN(a_listener_that_is_not_known);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
	return 0;
}
