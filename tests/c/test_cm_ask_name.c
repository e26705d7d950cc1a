/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A listener that is there by name, beside a TCP program, is asked by a link as well (cm/ask.c): by its address and
 * port.  So a linked process does not wait behind those who fill the queue of the name.
 */
#include "cm_other.h"
#include "namespace.h"

#include <sys/syscall.h>

enum { FEW = 8 };

/* --- the TCP program, which is this one, and the listener beside it ---------------------------------------- */

static int program;

/* number: 0 for any that is free */
static void tcp_program(uint16_t number)
{
	struct sockaddr_in at = address(number);
	socklen_t length = sizeof at;
	static const int on = 1;

	program = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(program >= 0 && !setsockopt(program, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
	CHECK(!bind(program, (struct sockaddr *)&at, sizeof at) && !listen(program, FEW));
	CHECK(!getsockname(program, (struct sockaddr *)&at, &length));
	port = ntohs(at.sin_port);
}

static struct rdma_cm_id *listen_by_name(struct rdma_event_channel *events, in_addr_t where)
{
	struct sockaddr_in at = address(port);
	struct rdma_cm_id *id = new_id(events);

	at.sin_addr.s_addr = htonl(where);
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&at));
	CHECK(!rdma_listen(id, FEW));
	CHECK(rn_cm_id(id)->by_name);
	return id;
}

/* --- a client in another process ------------------------------------------------------------------------- */

/* n: connect; t: by TCP; a: by the name alone; d: disconnect the last one. */
static void do_it(struct asker *asker, char letter)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	switch (letter) {
	case 'n':
		id = connect_once_more(asker);
		CHECK(!rdma_get_src_port(id)); /* it has none: the server makes one up, or the program */
		say(asker->fd, side_of(id) == RN_CM_ASKER ? 'l' : 's');
		return;
	case 't':
		connect_once_more(asker);
		break;
	case 'a':
		id = asker->ids[asker->count++] = new_id(asker->events);
		CHECK(!rdmanet_soft_cm_by_name_alone(id));
		resolve(id, port);
		make_qp(id);
		CHECK(!rdma_connect(id, &(struct rdma_conn_param){.private_data = "who asks", .private_data_len = 9}));
		event = want(asker->events, RDMA_CM_EVENT_ESTABLISHED);
		rdma_ack_cm_event(event);
		say(asker->fd, side_of(id) == RN_CM_ASKER ? 'l' : 's');
		return;
	case 'd':
		CHECK(!rdma_disconnect(asker->ids[asker->count - 1]));
		want_status(asker->events, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(asker->ids[--asker->count]);
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

/* how: 'n' or 'a' of the client's; by: 's' with a socket, 'l' by the link. */
static struct rdma_cm_id *let_in(const struct other *other, char how, char by)
{
	struct rdma_cm_id *id;
	uid_t user = (uid_t)-1;

	say(other->fd, how);
	id = next_request();
	CHECK((side_of(id) == RN_CM_ASKED) == (by == 'l'));
	CHECK(!rdma_get_dst_port(id) && rdma_get_src_port(id) == htons(port));
	CHECK(rdmanet_soft_cm_peer_user(id, &user) == RDMANET_SOFT_PEER_BY_NAME && user == geteuid());
	answer(id);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(hear(other->fd) == by);
	return id;
}

static struct rdma_cm_id *first(const struct other *other)
{
	struct rdma_cm_id *id = let_in(other, 'n', 's');

	await_link(id);
	return id;
}

static void end(const struct other *other, struct rdma_cm_id *id)
{
	tell(other, 'd');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
}

/* --- what is asked for ------------------------------------------------------------------------------------ */

static void the_second_has_no_socket(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW] = {first(&other)};

	for (int i = 1; i < FEW; i++)
		ids[i] = let_in(&other, i % 2 ? 'n' : 'a', 'l');
	for (int i = FEW - 1; i >= 0; i--)
		end(&other, ids[i]);
	end_other(&other);
}

/* A name that covers all addresses. */
static void the_name_of_all_addresses(void)
{
	struct other other;
	struct rdma_cm_id *one, *two;

	CHECK(!rdma_destroy_id(listener));
	listener = listen_by_name(channel, INADDR_ANY);
	other = spawn(client);
	one = first(&other);
	two = let_in(&other, 'n', 'l');
	end(&other, two);
	end(&other, one);
	end_other(&other);
	CHECK(!rdma_destroy_id(listener));
	listener = listen_by_name(channel, INADDR_LOOPBACK);
}

static void it_does_not_wait_in_the_names_queue(void)
{
	struct other other = spawn(client), stranger = spawn(client);
	struct rdma_cm_id *one = first(&other), *two = let_in(&other, 'n', 'l'), *asks, *waits;

	rn_source_modify(&rn_cm_id(listener)->accepting, 0); /* as if it had others to accept before */
	tell(&stranger, 'q'); /* who is first in the queue, and waits */
	want_none(channel, 50);
	tell(&other, 'q');
	asks = next_request();
	CHECK(side_of(asks) == RN_CM_ASKED);
	rn_source_modify(&rn_cm_id(listener)->accepting, EPOLLIN);
	waits = next_request();
	CHECK(side_of(waits) == RN_CM_HANDED);
	CHECK(!rdma_reject(asks, "no", 3) && !rdma_reject(waits, "no", 3));
	for (int i = 0; i < 2; i++) {
		const struct other *each = i ? &stranger : &other;

		say(each->fd, 'c');
		CHECK(hear(each->fd) == 'R');
		tell(each, 'l');
	}
	destroy(asks);
	destroy(waits);
	end(&other, two);
	end(&other, one);
	end_other(&other);
	end_other(&stranger);
}

/* Who is asked has no such name any more: the asker looks who has, and finds it. */
static void the_name_passes_to_another(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *one = first(&other), *two = let_in(&other, 'n', 'l'), *three;

	CHECK(!rdma_destroy_id(listener));
	tell(&other, 'q');
	say(other.fd, 'c');
	CHECK(hear(other.fd) == 'R'); /* a TCP program alone */
	tell(&other, 'l');
	listener = listen_by_name(channel, INADDR_LOOPBACK);
	three = let_in(&other, 'n', 's');
	end(&other, three);
	three = let_in(&other, 'n', 'l'); /* and is known again */
	end(&other, three);
	end(&other, two);
	end(&other, one);
	end_other(&other);
}

/* A TCP program and a listener by name follow a listener that had the TCP port itself. The TCP program is not taken for
 * one that has spoken our protocol: it gets no request. */
static void a_name_where_a_listener_was(void)
{
	struct rdma_cm_id *its, *two, *by_name = listener;
	int program_before = program;
	uint16_t before = port;
	struct pollfd has_come;
	struct other other;

	listener = new_listener(channel, FEW, &port);
	other = spawn(client);
	say(other.fd, 't');
	its = next_request();
	answer(its);
	CHECK(hear(other.fd) == 'D');
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	end(&other, its);
	CHECK(!rdma_destroy_id(listener));

	tcp_program(port);
	listener = listen_by_name(channel, INADDR_LOOPBACK);
	its = first(&other);
	two = let_in(&other, 'n', 'l');
	CHECK(!rdma_destroy_id(listener));
	tell(&other, 'q');
	say(other.fd, 'c');
	CHECK(hear(other.fd) == 'R');
	has_come = (struct pollfd){.fd = program, .events = POLLIN};
	CHECK(!poll(&has_come, 1, 0));
	tell(&other, 'l');
	end(&other, two);
	end(&other, its);
	end_other(&other);
	close(program);
	program = program_before;
	listener = by_name;
	port = before;
}

/* What is known of it is set again, and needs no other's place. */
static void one_that_is_asked_in_vain_again_and_again(void)
{
	enum { OFTEN = 100, COOKIE = 1, PEER = 2 };
	struct sockaddr_in other = address(1), name = address(2);
	uint32_t mail_channel;
	uint64_t cookie;

	rn_cm_known_is_of((struct sockaddr *)&other, COOKIE, PEER);
	for (int i = 0; i < OFTEN; i++) {
		rn_cm_known_is_of((struct sockaddr *)&name, 0, PEER);
		CHECK(rn_cm_known_peer((struct sockaddr *)&name, true, &cookie, &mail_channel) == PEER && !cookie);
		rn_cm_known_is_of((struct sockaddr *)&name, 0, 0);
		CHECK(!rn_cm_known_peer((struct sockaddr *)&name, true, &cookie, &mail_channel));
	}
	CHECK(rn_cm_known_peer((struct sockaddr *)&other, false, &cookie, &mail_channel) == PEER && cookie == COOKIE);
	rn_cm_known_is_of((struct sockaddr *)&other, COOKIE, 0);
}

/* --- who asks for what is not his ------------------------------------------------------------------------ */

static struct rn_cm_link_request forged;

/* Sends by its link to ours what it reads. */
static void forger(int fd)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *id = connect_to(events);
	uint64_t token = 1;
	struct rn_peer *peer;

	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	peer = rn_peer_get((uint16_t)(rn_cm_id(id)->terms.remote_qpn >> 8));
	EVENTUALLY(rn_peer_is_linked(peer));
	say(fd, 'L');
	while (hear(fd) == 'f') {
		struct rn_cm_link_request request;

		CHECK(read(fd, &request, sizeof request) == sizeof request);
		request.req.qpn = htobe32(id->qp->qp_num);
		CHECK(rn_peer_tell_connection(peer, RN_CM_LINK_ASKS, token++, &request, sizeof request));
		say(fd, 'D');
	}
	rn_peer_put(peer);
	destroy(id);
	close_shared();
	rdma_destroy_event_channel(events);
}

static void reset_forged(void)
{
	struct sockaddr_in here = address(port);

	forged = (struct rn_cm_link_request){
		.port = port,
		.req = {.header = {htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_REQ, htobe16(sizeof(struct rn_cm_req))},
			.retry_count = 7, .private_length = sizeof "who asks", .private_data = "who asks"}};
	rn_gid_of((struct sockaddr *)&here, &forged.near);
}

static void forge(const struct other *other)
{
	say(other->fd, 'f');
	CHECK(write(other->fd, &forged, sizeof forged) == sizeof forged);
	CHECK(hear(other->fd) == 'D');
}

static void requests_that_are_not_heard(void)
{
	struct other other = spawn(forger);
	struct rdma_cm_id *its = next_request(), *asks, *by_tcp;
	uint16_t another;

	answer(its);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(hear(other.fd) == 'L');
	reset_forged();
	forge(&other); /* this is how it is done */
	asks = next_request();
	CHECK(side_of(asks) == RN_CM_ASKED);
	CHECK(!rdma_reject(asks, "no", 3));
	destroy(asks);

	by_tcp = new_listener(channel, FEW, &another);
	forged.port = another; /* a listener that has its TCP port, and so no name */
	forge(&other);
	forged.port = port + 65536u;
	forge(&other);
	reset_forged();
	forged.near.raw[12] = 63; /* 63.0.0.1 is not ours */
	forge(&other);
	reset_forged();
	forged.near = (union ibv_gid){.raw = {[15] = 1}}; /* an address that the name does not cover */
	forge(&other);
	reset_forged();
	forged.cookie = rn_cm_id(listener)->cookie; /* of the name's socket, which no TCP connection gets to */
	forge(&other);
	reset_forged();
	forged.req.rnr_retry_count = 99;
	forge(&other);
	want_none(channel, 50);
	CHECK(!rdma_destroy_id(by_tcp));
	end_other(&other);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(its);
}

/* --- a server in another process --------------------------------------------------------------------------- */

/* n: let one in; x: become another program; f: end, and leave the sockets to a child. */
static void server(int fd)
{
	struct rdma_event_channel *events = new_channel();
	char what;

	channel = events;
	tcp_program(0);
	listener = listen_by_name(events, INADDR_LOOPBACK);
	CHECK(write(fd, &port, sizeof port) == sizeof port);
	while ((what = hear(fd)) == 'n') {
		struct rdma_cm_id *id = next_request();

		answer(id);
		want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
		say(fd, 'D');
	}
	if (what == 'x') {
		CHECK(!fcntl(fd, F_SETFD, 0) && !fcntl(program, F_SETFD, 0));
		CHECK(dup2(fd, 0) == 0 && dup2(fd, 1) == 1);
		execlp("cat", "cat", NULL);
	}
	if (what == 'f' && !fork())
		hear(fd); /* until the test closes it */
	_exit(0);
}

/* Before it has answered. Nobody has its name then. */
static void a_stopped_server_is_killed(void)
{
	struct rdma_event_channel *events = new_channel();
	uint16_t before = port;
	struct other other = spawn(server);
	struct rdma_cm_id *one, *asks;
	unsigned refused = 0;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	one = reach(events, &other);
	await_link(one);
	kill(other.pid, SIGSTOP);
	asks = connect_to(events);
	EVENTUALLY(side_of(asks) == RN_CM_ASKER);
	want_none(events, 50);
	kill(other.pid, SIGKILL);
	for (int i = 0; i < 2; i++) {
		struct rdma_cm_event *event = next_event(events, LIMIT_MS);

		CHECK(event && event->event == (event->id == asks ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_DISCONNECTED));
		refused += event->id == asks;
		rdma_ack_cm_event(event);
	}
	CHECK(refused == 1);
	destroy(one);
	destroy(asks);
	rdma_destroy_event_channel(events);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	close(other.fd);
	port = before;
}

/* how: of the server's. Its TCP listener stays, and nobody takes the request. The end of its link is not yet that of its
 * name: until the process has ended, or the other program runs, a request may wait there, and end with it. */
static void the_server_is_no_more(char how)
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
	say(other.fd, how);
	for (int i = 0; i < 2; i++)
		want_status(events, RDMA_CM_EVENT_DISCONNECTED, 0);
	if (how == 'x') {
		say(other.fd, 'x');
		CHECK(hear(other.fd) == 'x');
	} else {
		CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	}
	asks = connect_to(events);
	want_status(events, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID);
	destroy(one);
	destroy(two);
	destroy(asks);
	rdma_destroy_event_channel(events);
	close(other.fd);
	CHECK(how != 'x' || waitpid(other.pid, NULL, 0) == other.pid);
	port = before;
}

static void the_server_becomes_another_program(void)
{
	the_server_is_no_more('x');
}

static void the_server_leaves_its_sockets_to_a_child(void)
{
	the_server_is_no_more('f');
}

/* Another process of our user gets this pid, which is free. Who may not choose pids gets none. The engine is held, and
 * under sanitizers fork() waits for it. */
static pid_t take_pid(pid_t pid)
{
	enum { TRIES = 1000 };
	char before[12];
	pid_t child;

	snprintf(before, sizeof before, "%d", (int)pid - 1);
	for (int i = 0; i < TRIES; i++) {
		write_to("/proc/sys/kernel/ns_last_pid", before);
		child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
		CHECK(child >= 0);
		if (!child) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			while (syscall(SYS_getpid) == pid)
				pause();
			syscall(SYS_exit_group, 0);
		}
		if (child == pid)
			return child;
		CHECK(waitpid(child, NULL, 0) == child);
		if (geteuid())
			break;
	}
	return 0;
}

/* Before our engine has heard of its end, and just as it is to be asked. What it was believed is not believed of the
 * other, whose pid is the same. */
static void a_servers_pid_passes_to_another(void)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_conn_param param = with_data("who asks");
	uint16_t before = port;
	struct other other = spawn(server);
	struct rdma_cm_id *one, *asks = new_id(events);
	struct hold held, before_it, behind_it;
	pid_t successor;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	one = reach(events, &other);
	await_link(one);
	resolve(asks, port);
	make_qp(asks);
	hold_engine(&held); /* so that the next three are of one turn of the engine, and it hears nothing between */
	hold_engine_then(&before_it);
	CHECK(!rdma_connect(asks, &param));
	hold_engine_then(&behind_it);
	let_engine_go(&held);
	await_hold(&before_it);
	kill(other.pid, SIGKILL);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	successor = take_pid(other.pid);
	let_engine_go(&before_it);
	await_hold(&behind_it);
	if (successor)
		CHECK(side_of(asks) != RN_CM_ASKER);
	else
		fprintf(stderr, "nobody may choose a pid here, or others were faster: not tried\n");
	let_engine_go(&behind_it);
	for (int i = 0; i < 2; i++) {
		struct rdma_cm_event *event = next_event(events, LIMIT_MS);

		CHECK(event && event->event == (event->id == asks ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_DISCONNECTED));
		rdma_ack_cm_event(event);
	}
	rn_task_cancel(&held.task);
	rn_task_cancel(&before_it.task);
	rn_task_cancel(&behind_it.task);
	if (successor) {
		kill(successor, SIGKILL);
		CHECK(waitpid(successor, NULL, 0) == successor);
	}
	destroy(one);
	destroy(asks);
	rdma_destroy_event_channel(events);
	close(other.fd);
	port = before;
}

int main(void)
{
	tcp_program(0);
	channel = new_channel();
	listener = listen_by_name(channel, INADDR_LOOPBACK);
	RUN(the_second_has_no_socket);
	RUN(the_name_of_all_addresses);
	RUN(it_does_not_wait_in_the_names_queue);
	RUN(the_name_passes_to_another);
	RUN(a_name_where_a_listener_was);
	RUN(one_that_is_asked_in_vain_again_and_again);
	RUN(requests_that_are_not_heard);
	RUN(a_stopped_server_is_killed);
	RUN(a_servers_pid_passes_to_another);
	RUN(the_server_becomes_another_program);
	RUN(the_server_leaves_its_sockets_to_a_child);
	CHECK(!rdma_destroy_id(listener));
	close(program);
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
	return 0;
}
