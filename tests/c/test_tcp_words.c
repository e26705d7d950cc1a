/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words of a stream that are right but for one value: hellos and frames to a queue pair that serves, greetings to one that
 * asks. Whoever says one loses its connection; memory and completion queue stay as they were.
 */
#include "responder.h"
#include "soft.h"

enum { PSN = 17, LENGTH = 64 };

static struct responder peer;
static struct end end;

static void open_all(void)
{
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	memset(end.buffer, 'a', BUFFER);
	responder_open(&peer);
	responder_invite(&peer, end.qp, PSN);
}

static void close_all(void)
{
	responder_hang_up(&peer);
	hang_up(&peer.requests);
	close(peer.listener);
	end_close(&end);
	expect_live_nothing();
}

static void expect_untouched(void)
{
	for (size_t i = 0; i < BUFFER; i++)
		CHECK_EQ(end.buffer[i], 'a');
	expect_nothing(end.cq);
}

static void hear_the_end(int fd)
{
	char byte;

	errno = 0;
	CHECK(recv(fd, &byte, 1, 0) <= 0 && errno != EAGAIN); /* SO_RCVTIMEO */
}

/* --- hellos ------------------------------------------------------------------------------------------------ */

static struct rn_tcp_hello right_hello(void)
{
	return (struct rn_tcp_hello){
		.magic = RN_TCP_MAGIC,
		.version = RN_WIRE_VERSION,
		.source_qpn = peer.qpn,
		.dest_qpn = end.qp->qp_num,
		.psn = PSN,
		.source_gid = {[10] = 0xff, 0xff, 127, 0, 0, 1},
	};
}

/* Let in by this? */
static bool lets_in(struct rn_tcp_hello hello)
{
	struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(end.qp->qp_num >> 8), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	struct timeval patience = {.tv_sec = 20};
	struct rn_tcp_greeting greeting = {0};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	CHECK(!connect(fd, (struct sockaddr *)&to, sizeof(to)));
	CHECK_EQ(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL), (ssize_t)sizeof(hello));
	errno = 0;
	if (recv(fd, &greeting, sizeof(greeting), MSG_WAITALL) != sizeof(greeting))
		CHECK(errno != EAGAIN);
	hang_up(&fd);
	return greeting.kind == RN_GREETING_WELCOME;
}

#define LETS_NOBODY_IN_BY(...)                                 \
	do {                                                   \
		struct rn_tcp_hello hello;                     \
		open_all();                                    \
		hello = right_hello();                         \
		__VA_ARGS__;                                   \
		CHECK(!lets_in(hello));                        \
		CHECK_EQ(state_of(end.qp), IBV_QPS_RTS);       \
		close_all();                                   \
	} while (0)

static void test_hellos(void)
{
	open_all();
	CHECK(lets_in(right_hello()));
	close_all();
	LETS_NOBODY_IN_BY(hello.magic ^= 1);
	LETS_NOBODY_IN_BY(hello.version++);
	LETS_NOBODY_IN_BY(hello.flags = 2);
	LETS_NOBODY_IN_BY(hello.flags = RN_TCP_HELLO_SECRET);
	LETS_NOBODY_IN_BY(hello.source_qpn ^= 1);
	LETS_NOBODY_IN_BY(hello.dest_qpn ^= 1);
	LETS_NOBODY_IN_BY(hello.psn++);
}

/* --- greetings ----------------------------------------------------------------------------------------------- */

/* It does not go on with the connection on which it was greeted so. */
static void expect_no_answer_to(struct rn_tcp_greeting greeting)
{
	open_all();
	CHECK_EQ(post_send(&end, 1, 0, LENGTH), 0);
	responder_accept(&peer, PSN);
	CHECK_EQ(send(peer.answers, &greeting, sizeof(greeting), MSG_NOSIGNAL), (ssize_t)sizeof(greeting));
	hear_the_end(peer.answers);
	close_all();
}

static void test_greetings(void)
{
	static const uint8_t wrong_kinds[] = {0, RN_GREETING_CHALLENGE, RN_GREETING_REFUSED, RN_GREETING_SECRET,
					      RN_GREETING_VERSION, RN_GREETING_VERSION + 1, 255};
	struct rn_tcp_frame here;

	open_all();
	CHECK_EQ(post_send(&end, 1, 0, LENGTH), 0);
	responder_accept(&peer, PSN);
	responder_welcome(&peer);
	hear_all(peer.answers, &here, sizeof(here));
	CHECK_EQ(here.kind, RN_FRAME_HERE);
	close_all();
	expect_no_answer_to((struct rn_tcp_greeting){.magic = RN_TCP_MAGIC ^ 1, .kind = RN_GREETING_WELCOME});
	for (size_t i = 0; i < sizeof(wrong_kinds); i++)
		expect_no_answer_to((struct rn_tcp_greeting){.magic = RN_TCP_MAGIC, .kind = wrong_kinds[i]});
}

/* --- frames -------------------------------------------------------------------------------------------------- */

static struct rn_tcp_frame right_frame(uint8_t kind)
{
	return (struct rn_tcp_frame){
		.kind = kind,
		.length = kind == RN_FRAME_WRITE ? LENGTH : 0,
		.total = kind == RN_FRAME_WRITE || kind == RN_FRAME_READ ? LENGTH : sizeof(uint64_t),
		.addr = (uintptr_t)end.buffer,
		.rkey = end.mr->rkey,
	};
}

static void say(struct rn_tcp_frame frame)
{
	static char payload[RN_FRAME_BYTES + 1];

	memset(payload, 'x', sizeof(payload));
	CHECK(frame.length <= sizeof(payload));
	CHECK_EQ(send(peer.requests, &frame, sizeof(frame), MSG_NOSIGNAL), (ssize_t)sizeof(frame));
	if (frame.length) /* it may have hung up */
		send(peer.requests, payload, frame.length, MSG_NOSIGNAL);
}

#define ENDS_BY(of_kind, ...)                                              \
	do {                                                               \
		struct rn_tcp_frame frame;                                 \
		open_all();                                                \
		CHECK(responder_call(&peer, end.qp->qp_num, PSN));         \
		frame = right_frame(of_kind);                              \
		__VA_ARGS__;                                               \
		say(frame);                                                \
		hear_the_end(peer.requests);                               \
		expect_untouched();                                        \
		close_all();                                               \
	} while (0)

static void test_frames(void)
{
	struct rn_tcp_answer heard;

	open_all();
	CHECK(responder_call(&peer, end.qp->qp_num, PSN));
	say(right_frame(RN_FRAME_WRITE));
	hear_all(peer.requests, &heard, sizeof(heard));
	CHECK(heard.kind == RN_ANSWER_ACK && heard.serial == 1);
	CHECK(end.buffer[0] == 'x' && end.buffer[LENGTH - 1] == 'x' && end.buffer[LENGTH] == 'a');
	close_all();

	ENDS_BY(RN_FRAME_WRITE, frame.kind = 0);
	ENDS_BY(RN_FRAME_WRITE, frame.kind = RN_FRAME_KINDS);
	ENDS_BY(RN_FRAME_WRITE, frame.kind = 255);
	ENDS_BY(RN_FRAME_WRITE, frame.flags = RN_FRAME_FLAGS + 1);
	ENDS_BY(RN_FRAME_WRITE, frame.total = RN_MAX_MESSAGE + 1u);
	ENDS_BY(RN_FRAME_WRITE, frame.total = UINT32_MAX);
	ENDS_BY(RN_FRAME_WRITE, frame.offset = LENGTH + 1);
	ENDS_BY(RN_FRAME_WRITE, {
		frame.total = 2 * RN_FRAME_BYTES;
		frame.length = RN_FRAME_BYTES + 1;
	});
	ENDS_BY(RN_FRAME_WRITE, frame.length = LENGTH + 1);
	ENDS_BY(RN_FRAME_WRITE, {
		frame.offset = 1;
		frame.length = LENGTH - 1;
	});
	ENDS_BY(RN_FRAME_WRITE, frame.length = 0);
	ENDS_BY(RN_FRAME_WRITE, frame.serial = 1);
	ENDS_BY(RN_FRAME_WRITE, frame.serial = UINT32_MAX);
	ENDS_BY(RN_FRAME_WRITE, frame.ack = 1);
	ENDS_BY(RN_FRAME_READ, frame.length = 1);
	ENDS_BY(RN_FRAME_READ, frame.offset = 1);
	ENDS_BY(RN_FRAME_ADD, frame.total = 4);
	ENDS_BY(RN_FRAME_SWAP, frame.total = LENGTH);
	ENDS_BY(RN_FRAME_HERE, frame.length = 1);
	ENDS_BY(RN_FRAME_BYE, frame.length = 1);
	ENDS_BY(RN_FRAME_NOTHING, frame.total = 1);
	ENDS_BY(RN_FRAME_REFUSED, frame.imm = IBV_WC_REM_ACCESS_ERR);
	ENDS_BY(RN_FRAME_REFUSED, {
		frame.total = 0;
		frame.imm = IBV_WC_SUCCESS;
	});
}

/* The second frame of a message says another total than the first, or is of another kind, or is not the next. */
static void test_second_frames(void)
{
	for (int wrong = 0; wrong < 4; wrong++) {
		struct rn_tcp_frame frame;
		struct rn_tcp_answer heard;

		open_all();
		CHECK(responder_call(&peer, end.qp->qp_num, PSN));
		frame = right_frame(RN_FRAME_WRITE);
		frame.total = 2 * LENGTH;
		say(frame);
		frame.offset = LENGTH;
		if (wrong == 1)
			frame.total++;
		if (wrong == 2)
			frame.kind = RN_FRAME_SEND;
		if (wrong == 3)
			frame.offset--;
		say(frame);
		if (wrong) {
			hear_the_end(peer.requests);
		} else {
			hear_all(peer.requests, &heard, sizeof(heard));
			CHECK(heard.kind == RN_ANSWER_ACK && heard.serial == 1);
		}
		CHECK_EQ(end.buffer[LENGTH], wrong ? 'a' : 'x');
		close_all();
	}
}

int main(void)
{
	RUN(test_hellos);
	RUN(test_greetings);
	RUN(test_frames);
	RUN(test_second_frames);
	return 0;
}
