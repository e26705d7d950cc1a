/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections between two processes of one host do without their sockets once they stand: cm/handover.c.  How they end
 * must be told all the same, and nobody can hand over what isn't his.
 */
#include "cm_other.h"
#include "cm/wire.h"
#include "base/extras.h"
#include "peer/peer.h"

#include <stdatomic.h>

enum { CROWD = 64, OF_LINKS = 16 /* descriptors, at most */ };

/* Connect so many, one after the other; the sockets go. Then do as we are told: disconnect, be disconnected, or wait for
 * the end. */
static void crowd(int fd)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *ids[CROWD];
	unsigned before;
	char what;

	for (int i = 0; i < CROWD; i++) {
		ids[i] = new_id(events);
		resolve(ids[i], port);
		make_qp(ids[i]);
	}
	before = descriptors();
	for (int i = 0; i < CROWD; i++) {
		CHECK(!rdma_connect(ids[i], &(struct rdma_conn_param){.responder_resources = 1, .retry_count = 7}));
		want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	}
	EVENTUALLY(descriptors() <= before + OF_LINKS);
	say(fd, 'E');
	what = hear(fd);
	if (what == 'd')
		for (int i = 0; i < CROWD; i++)
			CHECK(!rdma_disconnect(ids[i]));
	for (int i = 0; i < CROWD; i++)
		want_status(events, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < CROWD; i++)
		destroy(ids[i]);
	close_shared();
	rdma_destroy_event_channel(events);
	say(fd, 'D');
}

static struct rdma_cm_id *accept_one(void)
{
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;

	rdma_ack_cm_event(event);
	make_qp(id);
	CHECK(!rdma_accept(id, &(struct rdma_conn_param){.responder_resources = 1}));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	return id;
}

/* The next event, whatever it is of; a request is accepted. Acknowledged already. */
static enum rdma_cm_event_type next_of_crowd(struct rdma_cm_id **id)
{
	struct rdma_cm_event *event = next_event(channel, LIMIT_MS);
	enum rdma_cm_event_type type;

	CHECK(event);
	if (event->status)
		fprintf(stderr, "%s with status %d\n", rdma_event_str(event->event), event->status);
	CHECK(!event->status);
	type = event->event;
	*id = event->id;
	rdma_ack_cm_event(event);
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
		make_qp(*id);
		CHECK(!rdma_accept(*id, &(struct rdma_conn_param){.responder_resources = 1}));
	}
	return type;
}

/* Accept the crowd. One may ask before we hear that the one before it is ready. */
static void accept_crowd(struct rdma_cm_id *ids[CROWD])
{
	unsigned asked = 0, established = 0;

	while (established < CROWD) {
		struct rdma_cm_id *id;
		enum rdma_cm_event_type type = next_of_crowd(&id);

		if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(asked < CROWD);
			ids[asked++] = id;
		} else {
			CHECK(type == RDMA_CM_EVENT_ESTABLISHED);
			established++;
		}
	}
}

/* How the crowd leaves: it disconnects, is disconnected, or is killed. */
static void leaves(char how)
{
	struct other other = spawn(crowd);
	struct rdma_cm_id *ids[CROWD];
	unsigned before = descriptors();
	uint64_t began;

	accept_crowd(ids);
	EVENTUALLY(descriptors() <= before + OF_LINKS);
	CHECK(hear(other.fd) == 'E');
	began = clock_ns();
	if (how == 'k')
		kill(other.pid, SIGKILL);
	else
		say(other.fd, how);
	if (how == 's')
		for (int i = 0; i < CROWD; i++)
			CHECK(!rdma_disconnect(ids[i]));
	for (int i = 0; i < CROWD; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	printf("   %.1f ms until all %d were told\n", (double)(clock_ns() - began) / 1e6, CROWD);
	for (int i = 0; i < CROWD; i++)
		CHECK(rdmanet_soft_cm_peer_is_gone(ids[i]) == (how == 'k'));
	for (int i = 0; i < CROWD; i++)
		destroy(ids[i]);
	if (how == 'k') {
		close(other.fd);
		CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	} else {
		CHECK(hear(other.fd) == 'D');
		join(&other);
	}
}

static void they_disconnect(void)
{
	leaves('d');
}

static void we_disconnect(void)
{
	leaves('s');
}

static void they_are_killed(void)
{
	leaves('k');
}

/* The same with both ends here. */
static void within_a_process(void)
{
	struct pair pairs[CROWD];
	unsigned before = descriptors();

	for (int i = 0; i < CROWD; i++)
		pairs[i] = connect_pair(listener, channel, port);
	EVENTUALLY(descriptors() <= before + OF_LINKS);
	for (int i = 0; i < CROWD; i++) {
		CHECK(!rdma_disconnect(i % 2 ? pairs[i].active : pairs[i].passive));
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(pairs[i].active);
		destroy(pairs[i].passive);
	}
}

/* The other end's messages come by the link. */
static bool has_moved(struct rdma_cm_id *id)
{
	bool has;

	pthread_mutex_lock(&rn_cm_lock);
	has = rn_cm_id(id)->wire->peer_moved;
	pthread_mutex_unlock(&rn_cm_lock);
	return has;
}

/* What the engine does for a wire, over and over. */
static struct {
	struct rn_task task;
	struct rn_cm_wire *wire;
	atomic_bool has_begun, ends;
} flushing;

static void flush(struct rn_task *task)
{
	(void)task;
	atomic_store(&flushing.has_begun, true);
	while (!atomic_load(&flushing.ends))
		rn_cm_wire_flush(flushing.wire);
}

/* The other end hears that we leave, wherever the engine is when we do. */
static void leave_in_between(const struct pair *pair)
{
	flushing.task.run = flush;
	flushing.wire = rn_cm_id(pair->active)->wire;
	atomic_store(&flushing.has_begun, false);
	atomic_store(&flushing.ends, false);
	rn_task_post(&flushing.task);
	EVENTUALLY(atomic_load(&flushing.has_begun));
	CHECK(!rdmanet_soft_cm_leave(pair->active));
	atomic_store(&flushing.ends, true);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdmanet_soft_cm_peer_is_gone(pair->passive));
	rn_task_cancel(&flushing.task);
	destroy(pair->active);
	destroy(pair->passive);
}

/* By the socket, and by the link. */
static void the_last_word_is_said(void)
{
	enum { FEW = 12 };
	struct pair pairs[FEW];

	for (int i = 0; i < FEW; i++) {
		pairs[i] = connect_pair(listener, channel, port);
		leave_in_between(&pairs[i]);
	}
	for (int i = 0; i < FEW; i++)
		pairs[i] = connect_pair(listener, channel, port);
	for (int i = 0; i < FEW; i++) {
		EVENTUALLY(has_moved(pairs[i].active) && has_moved(pairs[i].passive));
		leave_in_between(&pairs[i]);
	}
}

/* Its task may be run once more after that: TIMEWAIT ends by its timer alone. */
static void post_again(struct rdma_cm_id *id)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (rn_cm_id(id)->wire)
		rn_task_post(&rn_cm_id(id)->wire->task);
	pthread_mutex_unlock(&rn_cm_lock);
}

static void timewait_after_the_link(void)
{
	struct pair pair;

	rn_settings.timewait_ms = 200;
	pair = connect_pair(listener, channel, port);
	EVENTUALLY(has_moved(pair.active) && has_moved(pair.passive));
	CHECK(!rdma_disconnect(pair.active));
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	post_again(pair.active);
	post_again(pair.passive);
	want_status(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	want_status(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	rn_settings.timewait_ms = 0;
	destroy(pair.active);
	destroy(pair.passive);
}

/* As soon as it is connected it disconnects, or we do, or both: while it is being handed over. */
static void hasty(int fd)
{
	struct rdma_event_channel *events = new_channel();
	struct ibv_wc wc;

	for (int i = 0; i < CROWD; i++) {
		struct rdma_cm_id *id = new_id(events);

		resolve(id, port);
		make_qp(id);
		CHECK(!rdma_connect(id, &(struct rdma_conn_param){.responder_resources = 1, .retry_count = 7}));
		want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
		for (int polls = 0; polls < i * 20; polls++) /* each time another step is under way */
			CHECK(ibv_poll_cq(id->qp->send_cq, 1, &wc) == 0);
		if (i % 3)
			CHECK(!rdma_disconnect(id) || errno == EINVAL);
		want_status(events, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(id);
	}
	close_shared();
	rdma_destroy_event_channel(events);
	say(fd, 'D');
}

static void at_any_moment(void)
{
	struct other other = spawn(hasty);
	unsigned disconnected = 0, established = 0;

	while (disconnected < CROWD) { /* the next one may ask before we hear that it has left */
		struct rdma_cm_id *id;
		enum rdma_cm_event_type type = next_of_crowd(&id);

		if (type == RDMA_CM_EVENT_ESTABLISHED) {
			if (established++ % 3 != 1)
				CHECK(!rdma_disconnect(id) || errno == EINVAL);
		} else if (type != RDMA_CM_EVENT_CONNECT_REQUEST) {
			CHECK(type == RDMA_CM_EVENT_DISCONNECTED);
			disconnected++;
			destroy(id);
		}
	}
	CHECK(hear(other.fd) == 'D');
	join(&other);
}

/* --- who hands over what isn't his --------------------------------------------------------------- */

static int dial(uint16_t to)
{
	struct sockaddr_in at = address(to);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&at, sizeof at));
	return fd;
}

static void send_message(int fd, enum rn_cm_message type, void *message)
{
	struct rn_cm_header *header = message;

	*header = (struct rn_cm_header){htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, (uint8_t)type,
					htobe16(rn_cm_message_length[type])};
	CHECK(send(fd, message, rn_cm_message_length[type], 0) == rn_cm_message_length[type]);
}

/* The next message of this type. */
static void await_message(int fd, enum rn_cm_message type, void *message)
{
	struct rn_cm_header *header = message;

	do {
		CHECK(recv(fd, header, sizeof *header, MSG_WAITALL) == sizeof *header);
		CHECK(header->type < RN_CM_MESSAGES);
		unsigned rest = rn_cm_message_length[header->type] - (unsigned)sizeof *header;
		CHECK(recv(fd, header + 1, rest, MSG_WAITALL) == (ssize_t)rest);
	} while (header->type != type);
}

static uint32_t anothers_qpn;

/* Is let in as a process that it is not, with whose memory the server's is linked, offers to hand over, and goes; or
 * stays (say 's'), and sees the end of the socket. */
static void lie(int fd)
{
	struct rn_cm_req req = {.qpn = htobe32(anothers_qpn), .retry_count = 7};
	unsigned char room[512] __attribute__((aligned(8)));
	struct rn_cm_handover handover = {.token = "a guess"};
	struct rn_cm_header rtu;
	int wire = dial(port);

	send_message(wire, RN_CM_REQ, &req);
	await_message(wire, RN_CM_REP, room);
	send_message(wire, RN_CM_RTU, &rtu);
	await_message(wire, RN_CM_HANDOVER, room);
	send_message(wire, RN_CM_HANDOVER, &handover);
	if (hear(fd) == 's')
		CHECK(recv(wire, room, sizeof room, 0) == 0);
	close(wire);
	say(fd, 'D');
}

static void in_anothers_name(void)
{
	static const char ways[] = "gs";
	struct other honest = spawn(crowd);
	struct rdma_cm_id *ids[CROWD];

	accept_crowd(ids);
	CHECK(hear(honest.fd) == 'E');
	anothers_qpn = rn_cm_id(ids[0])->terms.remote_qpn;
	for (unsigned way = 0; way < 2; way++) {
		struct other liar = spawn(lie);
		struct rdma_cm_id *id = accept_one();

		say(liar.fd, ways[way]);
		CHECK(hear(liar.fd) == 'D');
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		destroy(id);
		join(&liar);
	}
	want_none(channel, 50);
	say(honest.fd, 'd');
	for (int i = 0; i < CROWD; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < CROWD; i++)
		destroy(ids[i]);
	CHECK(hear(honest.fd) == 'D');
	join(&honest);
}

/* A process that is who it is, and speaks by hand on a socket of its own. */
struct by_hand {
	struct rdma_event_channel *events;
	struct rdma_cm_id *id;
	int wire;
	uint16_t port; /* the other side's */
};

/* Up to the other side's answer: RTU comes next. */
static struct by_hand ask_by_hand(uint16_t to)
{
	struct by_hand side = {.events = new_channel(), .wire = dial(to)};
	struct rn_cm_req req = {.retry_count = 7};
	unsigned char room[512] __attribute__((aligned(8)));

	side.id = new_id(side.events);
	resolve(side.id, to);
	make_qp(side.id);
	req.qpn = htobe32(side.id->qp->qp_num);
	send_message(side.wire, RN_CM_REQ, &req);
	await_message(side.wire, RN_CM_REP, room);
	side.port = (uint16_t)(be32toh(((struct rn_cm_rep *)room)->qpn) >> 8);
	return side;
}

static void end_by_hand(struct by_hand *side)
{
	close(side->wire);
	destroy(side->id);
	close_shared();
	rdma_destroy_event_channel(side->events);
}

/* Calls the connection by a token of zero, or by two tokens, and stays. */
static void break_rules(int fd)
{
	struct rn_cm_handover first = {.token = "one"}, second = {.token = "two"}, zero = {.token = ""};
	struct by_hand side = ask_by_hand(port);
	struct rn_cm_header rtu;

	send_message(side.wire, RN_CM_RTU, &rtu);
	if (hear(fd) == '0') {
		send_message(side.wire, RN_CM_HANDOVER, &zero);
	} else {
		send_message(side.wire, RN_CM_HANDOVER, &first);
		send_message(side.wire, RN_CM_HANDOVER, &second);
	}
	CHECK(hear(fd) == 'g');
	end_by_hand(&side);
}

static void against_the_rules(void)
{
	static const char ways[] = "02";

	for (unsigned way = 0; way < 2; way++) {
		struct other other = spawn(break_rules);
		struct rdma_cm_id *id = accept_one();

		say(other.fd, ways[way]);
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		say(other.fd, 'g');
		destroy(id);
		join(&other);
	}
}

/* Says by its link that it has moved, and then, when we are told to, DREQ by the socket after all. */
static void move_early(int fd)
{
	struct rn_cm_handover ours = {.token = "early"}, theirs;
	struct by_hand side = ask_by_hand(port);
	struct rn_peer *peer = rn_peer_get(side.port);
	struct rn_cm_header header;
	uint64_t token;
	char byte;

	EVENTUALLY(rn_peer_is_linked(peer));
	send_message(side.wire, RN_CM_RTU, &header);
	await_message(side.wire, RN_CM_HANDOVER, &theirs);
	send_message(side.wire, RN_CM_HANDOVER, &ours);
	memcpy(&token, theirs.token, sizeof token);
	header.type = RN_CM_MOVED;
	CHECK(rn_peer_tell_connection(peer, RN_CM_HANDED, token, &header, sizeof header));
	CHECK(recv(side.wire, &byte, 1, 0) == 0); /* they have moved, too */
	CHECK(hear(fd) == 'd');
	send_message(side.wire, RN_CM_DREQ, &header);
	CHECK(hear(fd) == 'g');
	rn_peer_put(peer);
	end_by_hand(&side);
}

/* Offers nothing itself, and sees when the other side does; then ends. */
static void wait_for_offer(int fd)
{
	struct by_hand side = ask_by_hand(port);
	struct rn_peer *peer = rn_peer_get(side.port);
	struct rn_cm_handover theirs;
	struct rn_cm_header rtu;
	uint64_t begin_ns;

	EVENTUALLY(rn_peer_is_linked(peer));
	begin_ns = rn_now_ns();
	send_message(side.wire, RN_CM_RTU, &rtu);
	await_message(side.wire, RN_CM_HANDOVER, &theirs);
	CHECK(rn_now_ns() - begin_ns >= 100 * 1000000u);
	CHECK(hear(fd) == 'g');
	rn_peer_put(peer);
	end_by_hand(&side);
}

static void a_young_connection_keeps_its_socket(void)
{
	struct other other = spawn(wait_for_offer);
	struct rdma_cm_id *id = accept_one();

	say(other.fd, 'g');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
	join(&other);
}

static void what_is_in_the_socket_counts(void)
{
	struct other other = spawn(move_early);
	struct rdma_cm_id *id = accept_one();

	want_none(channel, 50); /* it hears that the other has moved */
	say(other.fd, 'd');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	say(other.fd, 'g');
	destroy(id);
	join(&other);
}

int main(void)
{
	channel = new_channel();
	listener = new_listener(channel, CROWD, &port);
	RUN(they_disconnect);
	RUN(we_disconnect);
	RUN(they_are_killed);
	RUN(within_a_process);
	RUN(the_last_word_is_said);
	RUN(timewait_after_the_link);
	RUN(at_any_moment);
	RUN(in_anothers_name);
	RUN(against_the_rules);
	RUN(what_is_in_the_socket_counts);
	RUN(a_young_connection_keeps_its_socket);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
	return 0;
}
