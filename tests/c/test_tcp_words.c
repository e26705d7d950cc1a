/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words of a stream that are right but for one value: hellos and frames to a queue pair that serves, greetings to one
 * that asks. Whoever says one loses its connection; memory and completion queue stay as they were.
 *
 * And words that are right, but come at a bad moment: their memory or their queue pair has gone since the one before,
 * or nobody takes the answers.
 */
#include "processes.h"
#include "responder.h"
#include "soft.h"
#include "base/page.h"

enum { PSN = 17, LENGTH = 64 };

static struct responder peer;
static struct end end;

static void invite_unreliably(void)
{
	struct ibv_qp_attr attr = default_attr(peer.qpn);

	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0);
}

static void open_all_of(enum ibv_qp_type type)
{
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY, .type = type});
	memset(end.buffer, 'a', BUFFER);
	responder_open(&peer);
	if (type == IBV_QPT_RC)
		responder_invite(&peer, end.qp, PSN);
	else
		invite_unreliably();
}

static void open_all(void)
{
	open_all_of(IBV_QPT_RC);
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

/* A word of the connection by which requests come. */
#define OF_STREAM(word)                                          \
	({                                                       \
		struct rn_qp *qp_ = rn_qp(end.qp);               \
		__typeof__(qp_->tcp->in->word) value_;           \
		rn_lock(&qp_->sq_lock);                          \
		value_ = qp_->tcp->in->word;                     \
		rn_unlock(&qp_->sq_lock);                        \
		value_;                                          \
	})

static bool is_connected(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool is;

	rn_lock(&qp->sq_lock);
	is = qp->tcp->in;
	rn_unlock(&qp->sq_lock);
	return is;
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

static int knock(void)
{
	struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(end.qp->qp_num >> 8), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	struct timeval patience = {.tv_sec = 20};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	CHECK(!connect(fd, (struct sockaddr *)&to, sizeof(to)));
	return fd;
}

/* Let in by this? */
static bool lets_in(struct rn_tcp_hello hello)
{
	struct rn_tcp_greeting greeting = {0};
	int fd = knock();

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

/* The peer has one connection for its requests. */
static void test_second_hello(void)
{
	open_all();
	CHECK(responder_call(&peer, end.qp->qp_num, PSN));
	CHECK(!lets_in(right_hello()));
	EVENTUALLY(is_connected());
	CHECK_EQ(state_of(end.qp), IBV_QPS_RTS);
	close_all();
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

static bool is_denied(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool is_denied;

	rn_lock(&qp->sq_lock);
	is_denied = qp->tcp->denied && !qp->tcp->out;
	if (is_denied)
		rn_tcp_progress(qp); /* as it will be tried again and again */
	rn_unlock(&qp->sq_lock);
	return is_denied;
}

/* Denied once, denied for ever. Who only receives would wait in vain, so an RC queue pair fails without a request. */
static void check_denied(enum ibv_qp_type type, bool sends)
{
	struct rn_tcp_greeting greeting = {.magic = RN_TCP_MAGIC, .kind = RN_GREETING_SECRET};

	open_all_of(type);
	CHECK_EQ(post_recv(&end, 1, 0, LENGTH), 0);
	if (sends)
		CHECK_EQ(post_send(&end, 2, 0, LENGTH), 0);
	responder_accept(&peer, PSN);
	CHECK_EQ(send(peer.answers, &greeting, sizeof(greeting), MSG_NOSIGNAL), (ssize_t)sizeof(greeting));
	hear_the_end(peer.answers);
	if (type == IBV_QPT_RC) {
		for (int i = 0; i < 1 + sends; i++) { /* of two queues: in any order */
			struct ibv_wc wc = poll_one(end.cq);

			CHECK_EQ(wc.status, wc.wr_id == 1 ? IBV_WC_WR_FLUSH_ERR : IBV_WC_REM_ABORT_ERR);
		}
	} else {
		EVENTUALLY(is_denied());
		expect_nothing(end.cq);
	}
	CHECK_EQ(state_of(end.qp), type == IBV_QPT_RC ? IBV_QPS_ERR : IBV_QPS_RTS);
	close_all();
}

static void test_denied(void)
{
	check_denied(IBV_QPT_RC, false);
	check_denied(IBV_QPT_RC, true);
	check_denied(IBV_QPT_UC, false);
}

/* --- proofs of the secret ------------------------------------------------------------------------------------- */

enum { PROOF = 32 };

/* Whoever says this instead of the proof. */
static void refuse_proof(void)
{
	struct rn_tcp_hello hello;
	struct rn_tcp_greeting greeting;
	uint8_t proof[PROOF] = {0};

	open_all();
	hello = right_hello();
	hello.flags = RN_TCP_HELLO_SECRET;
	peer.requests = knock();
	CHECK_EQ(send(peer.requests, &hello, sizeof(hello), MSG_NOSIGNAL), (ssize_t)sizeof(hello));
	hear_all(peer.requests, &greeting, sizeof(greeting));
	CHECK_EQ(greeting.kind, RN_GREETING_CHALLENGE);
	CHECK_EQ(send(peer.requests, proof, sizeof(proof), MSG_NOSIGNAL), (ssize_t)sizeof(proof));
	hear_all(peer.requests, &greeting, sizeof(greeting));
	CHECK_EQ(greeting.kind, RN_GREETING_SECRET);
	hear_the_end(peer.requests);
	close_all();
}

/* Whoever welcomes us without a challenge, or without a proof of its own, or challenges us for ever. */
static void refuse_greetings(bool challenges, enum rn_greeting then)
{
	struct rn_tcp_greeting greeting = {.magic = RN_TCP_MAGIC, .kind = RN_GREETING_CHALLENGE};
	uint8_t proof[PROOF];

	open_all();
	CHECK_EQ(post_send(&end, 1, 0, LENGTH), 0);
	responder_accept(&peer, PSN);
	if (challenges) {
		CHECK_EQ(send(peer.answers, &greeting, sizeof(greeting), MSG_NOSIGNAL), (ssize_t)sizeof(greeting));
		hear_all(peer.answers, proof, sizeof(proof));
	}
	greeting.kind = then;
	CHECK_EQ(send(peer.answers, &greeting, sizeof(greeting), MSG_NOSIGNAL), (ssize_t)sizeof(greeting));
	hear_the_end(peer.answers);
	if (then == RN_GREETING_WELCOME)
		expect(end.cq, 1, IBV_WC_REM_ABORT_ERR);
	close_all();
}

/* A secret is for life, so this is a process of its own. */
static void with_a_secret(int fd)
{
	setenv("RDMANET_SOFT_SECRET", "00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef", 1);
	refuse_proof();
	refuse_greetings(false, RN_GREETING_WELCOME);
	refuse_greetings(true, RN_GREETING_WELCOME);
	refuse_greetings(true, RN_GREETING_CHALLENGE);
	meet(fd);
}

static void test_secret(void)
{
	struct other other = spawn(with_a_secret);

	meet(other.fd);
	join(&other);
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
	ENDS_BY(RN_FRAME_ADD, frame.kind = 0);
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

/* --- bad moments ----------------------------------------------------------------------------------------------- */

static struct rn_tcp_answer hear_answer(void)
{
	struct rn_tcp_answer heard;

	hear_all(peer.requests, &heard, sizeof(heard));
	return heard;
}

static void call_as(enum ibv_qp_type type)
{
	open_all_of(type);
	CHECK(responder_call(&peer, end.qp->qp_num, PSN));
	EVENTUALLY(is_connected());
}

/* All of a frame at once: it is taken from the input buffer. */
static void say_in_one(struct rn_tcp_frame frame)
{
	char all[sizeof(frame) + 2 * LENGTH];

	memset(all, 'x', sizeof(all));
	memcpy(all, &frame, sizeof(frame));
	CHECK_EQ(send(peer.requests, all, sizeof(frame) + frame.length, MSG_NOSIGNAL), (ssize_t)sizeof(frame) + frame.length);
}

static void say_bytes(uint32_t length)
{
	char bytes[LENGTH];

	memset(bytes, 'x', sizeof(bytes));
	CHECK_EQ(send(peer.requests, bytes, length, MSG_NOSIGNAL), (ssize_t)length);
}

/* The next message is as welcome as ever. */
static void expect_next_to_succeed(uint32_t serial)
{
	struct rn_tcp_frame frame = right_frame(RN_FRAME_WRITE);

	frame.serial = serial;
	frame.addr += 4096;
	say(frame);
	EVENTUALLY(OF_STREAM(expected) == serial + 1);
	CHECK_EQ(end.buffer[4096 + LENGTH - 1], 'x');
	CHECK_EQ(state_of(end.qp), IBV_QPS_RTS);
}

/* Two frames of a message to a region that goes when the first has been placed. */
static void check_withdrawn(enum ibv_qp_type type, bool in_one, bool by_link)
{
	struct rn_tcp_frame frame;
	struct ibv_mr *mr;

	call_as(type);
	mr = ibv_reg_mr(end.pd, end.buffer, 2 * LENGTH, ALL_ACCESS);
	CHECK(mr);
	frame = right_frame(RN_FRAME_WRITE);
	frame.rkey = mr->rkey;
	frame.total = 2 * LENGTH;
	say(frame);
	EVENTUALLY(OF_STREAM(message_done) == LENGTH);
	frame.offset = LENGTH;
	if (!in_one) {
		CHECK_EQ(send(peer.requests, &frame, sizeof(frame), MSG_NOSIGNAL), (ssize_t)sizeof(frame));
		EVENTUALLY(OF_STREAM(payload_left) == LENGTH);
	}
	if (by_link)
		rn_qp_plug(rn_qp(end.qp), true);
	else
		CHECK_EQ(ibv_dereg_mr(mr), 0);
	if (in_one)
		say_in_one(frame);
	else
		say_bytes(LENGTH);
	if (type == IBV_QPT_RC) {
		struct rn_tcp_answer heard = hear_answer();

		CHECK_EQ(heard.kind, by_link ? RN_ANSWER_BYE : RN_ANSWER_NAK);
		CHECK_EQ(heard.code, by_link ? 0 : IBV_WC_REM_ACCESS_ERR);
		if (!by_link)
			EVENTUALLY(state_of(end.qp) == IBV_QPS_ERR);
	} else {
		EVENTUALLY(OF_STREAM(expected) == 1);
		if (by_link)
			rn_qp_plug(rn_qp(end.qp), false);
		expect_next_to_succeed(1);
	}
	for (int i = 0; i < 2 * LENGTH; i++)
		CHECK_EQ(end.buffer[i], i < LENGTH ? 'x' : 'a');
	if (by_link)
		CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_all();
}

static void test_withdrawn(void)
{
	for (int i = 0; i < 8; i++)
		check_withdrawn(i & 1 ? IBV_QPT_RC : IBV_QPT_UC, i & 2, i & 4);
}

/* The region stays, but a page of it goes: it was registered on demand. */
static void check_unmapped(enum ibv_qp_type type, bool in_one)
{
	char *memory = mmap(NULL, 2 * rn_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct rn_tcp_frame frame;
	struct ibv_mr *mr;

	call_as(type);
	mr = ibv_reg_mr(end.pd, memory, 2 * rn_page(), ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
	CHECK(mr);
	frame = right_frame(RN_FRAME_WRITE);
	frame.rkey = mr->rkey;
	frame.addr = (uintptr_t)memory + rn_page() - LENGTH;
	frame.total = 2 * LENGTH;
	say(frame);
	EVENTUALLY(OF_STREAM(message_done) == LENGTH);
	frame.offset = LENGTH;
	if (!in_one) {
		CHECK_EQ(send(peer.requests, &frame, sizeof(frame), MSG_NOSIGNAL), (ssize_t)sizeof(frame));
		EVENTUALLY(OF_STREAM(payload_left) == LENGTH);
	}
	CHECK(!munmap(memory + rn_page(), rn_page()));
	if (in_one)
		say_in_one(frame);
	else
		say_bytes(LENGTH);
	if (type == IBV_QPT_RC) {
		CHECK_EQ(hear_answer().code, IBV_WC_REM_ACCESS_ERR);
		EVENTUALLY(state_of(end.qp) == IBV_QPS_ERR);
	} else {
		EVENTUALLY(OF_STREAM(expected) == 1);
		expect_next_to_succeed(1);
	}
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_all();
	munmap(memory, rn_page());
}

static void test_unmapped(void)
{
	for (int i = 0; i < 4; i++)
		check_unmapped(i & 1 ? IBV_QPT_RC : IBV_QPT_UC, i & 2);
}

/* A link that is down answers nobody. */
static void test_link_down(void)
{
	static const uint8_t kinds[] = {RN_FRAME_WRITE, RN_FRAME_READ, RN_FRAME_ADD, RN_FRAME_SWAP, RN_FRAME_SEND};

	for (unsigned i = 0; i < sizeof(kinds); i++) {
		struct rn_tcp_frame frame;

		call_as(IBV_QPT_RC);
		rn_qp_plug(rn_qp(end.qp), true);
		frame = right_frame(kinds[i]);
		if (frame.kind == RN_FRAME_SEND)
			frame.total = 0;
		frame.compare_add = 1;
		say(frame);
		CHECK_EQ(hear_answer().kind, RN_ANSWER_BYE);
		expect_untouched();
		close_all();
	}
}

/* What is behind a message that finds no receive is thrown away, but must make sense. */
static void check_behind_a_message_that_waits(uint8_t kind, uint32_t offset, bool is_fine)
{
	struct rn_tcp_frame frame;

	call_as(IBV_QPT_RC);
	frame = right_frame(RN_FRAME_SEND);
	frame.length = frame.total;
	say(frame);
	CHECK_EQ(hear_answer().kind, RN_ANSWER_RNR);
	frame = right_frame(kind);
	frame.serial = 1;
	frame.offset = offset;
	say(frame);
	if (is_fine)
		EVENTUALLY(OF_STREAM(head.serial) == 1 && !OF_STREAM(payload_left));
	else
		hear_the_end(peer.requests);
	expect_untouched();
	close_all();
}

static void test_behind_a_message_that_waits(void)
{
	check_behind_a_message_that_waits(RN_FRAME_WRITE, 0, true);
	check_behind_a_message_that_waits(RN_FRAME_READ, 0, true);
	check_behind_a_message_that_waits(RN_FRAME_WRITE, LENGTH + 1, false);
	check_behind_a_message_that_waits(RN_FRAME_READ, 1, false);
}

/* Faults are injected where there are answers. */
static void test_refused_on_uc(void)
{
	call_as(IBV_QPT_UC);
	say((struct rn_tcp_frame){.kind = RN_FRAME_REFUSED, .imm = IBV_WC_REM_ACCESS_ERR});
	hear_the_end(peer.requests);
	CHECK_EQ(state_of(end.qp), IBV_QPS_RTS);
	expect_untouched();
	close_all();
}

static void test_reading_nothing(void)
{
	struct rn_tcp_frame frame;
	struct rn_tcp_answer heard;

	call_as(IBV_QPT_RC);
	frame = right_frame(RN_FRAME_READ);
	frame.total = 0;
	say(frame);
	frame = right_frame(RN_FRAME_READ);
	frame.serial = 1;
	say(frame);
	heard = hear_answer();
	CHECK(heard.kind == RN_ANSWER_READ && heard.serial == 0 && !heard.length);
	heard = hear_answer();
	CHECK(heard.kind == RN_ANSWER_READ && heard.serial == 1 && heard.length == LENGTH);
	close_all();
}

/* --- answers that nobody takes ---------------------------------------------------------------------------------- */

/* So that its socket is full soon. */
static void narrow(void)
{
	int bytes = 32 * 1024;

	CHECK(!setsockopt(OF_STREAM(source.fd), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)));
}

static void read_all_memory(void)
{
	struct rn_tcp_frame write = right_frame(RN_FRAME_WRITE), frame = right_frame(RN_FRAME_READ);
	char both[sizeof(write) + LENGTH + sizeof(frame)];

	for (int i = 0; i < BUFFER; i++)
		end.buffer[i] = i % 251 + 1;
	frame.total = BUFFER;
	frame.serial = 1;
	/* Behind a request that is not acknowledged yet, which must not be done in the midst of the data. */
	memcpy(both, &write, sizeof(write));
	memcpy(both + sizeof(write), end.buffer, LENGTH);
	memcpy(both + sizeof(write) + LENGTH, &frame, sizeof(frame));
	CHECK_EQ(send(peer.requests, both, sizeof(both), MSG_NOSIGNAL), (ssize_t)sizeof(both));
	EVENTUALLY(OF_STREAM(reading) && OF_STREAM(wants_out));
}

/* The answers to a READ of all memory, as far as they go. */
static uint32_t hear_memory(struct rn_tcp_answer *last, uint32_t *zeros)
{
	static unsigned char chunk[RN_FRAME_BYTES];
	uint32_t heard = 0;

	*zeros = 0;
	while (heard < BUFFER) {
		*last = hear_answer();
		if (last->kind == RN_ANSWER_ACK)
			continue;
		if (last->kind != RN_ANSWER_READ)
			break;
		CHECK(last->length && last->length <= sizeof(chunk) && heard + last->length <= BUFFER);
		hear_all(peer.requests, chunk, last->length);
		for (uint32_t i = 0; i < last->length; i++) {
			if (!chunk[i])
				++*zeros;
			else
				CHECK(!*zeros && chunk[i] == (heard + i) % 251 + 1);
		}
		heard += last->length;
	}
	return heard;
}

static void test_slow_reader(void)
{
	struct rn_tcp_answer last;
	uint32_t zeros;

	call_as(IBV_QPT_RC);
	narrow();
	read_all_memory();
	CHECK_EQ(hear_memory(&last, &zeros), BUFFER);
	CHECK_EQ(zeros, 0);
	close_all();
}

/* The memory goes while it is being read: the chunk that was announced is filled up with zeros, and then refused. */
static void check_gone_while_read(bool by_unmapping)
{
	struct rn_tcp_answer last;
	uint32_t zeros, heard;

	call_as(IBV_QPT_RC);
	narrow();
	CHECK_EQ(ibv_dereg_mr(end.mr), 0);
	end.mr = ibv_reg_mr(end.pd, end.buffer, BUFFER, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
	CHECK(end.mr);
	read_all_memory();
	if (by_unmapping) {
		CHECK(!munmap(end.buffer + rn_page(), BUFFER - rn_page()));
	} else {
		CHECK_EQ(ibv_dereg_mr(end.mr), 0);
		end.mr = NULL;
	}
	heard = hear_memory(&last, &zeros);
	CHECK(zeros && heard < BUFFER);
	CHECK_EQ(last.kind, RN_ANSWER_NAK);
	CHECK_EQ(last.code, IBV_WC_REM_ACCESS_ERR);
	EVENTUALLY(state_of(end.qp) == IBV_QPS_ERR);
	close_all();
}

static void test_gone_while_read(void)
{
	check_gone_while_read(false);
	check_gone_while_read(true);
}

/* Its reader hangs up: nothing is known of it any more, so the queue pair fails. */
static void test_hung_up_while_read(void)
{
	call_as(IBV_QPT_RC);
	narrow();
	read_all_memory();
	hang_up(&peer.requests);
	EVENTUALLY(state_of(end.qp) == IBV_QPS_ERR);
	close_all();
}

/* Requests wait until the answers to those before are taken. Not one answer is lost. */
static void test_unheard_answers(void)
{
	struct rn_tcp_frame frame;
	uint32_t said = 0;
	ssize_t sent;

	call_as(IBV_QPT_RC);
	narrow();
	frame = right_frame(RN_FRAME_READ);
	frame.total = 0;
	do {
		frame.serial = said;
		sent = send(peer.requests, &frame, sizeof(frame), MSG_DONTWAIT | MSG_NOSIGNAL);
		said += sent == sizeof(frame);
	} while (sent == sizeof(frame) || (sent < 0 && !OF_STREAM(wants_out)));
	for (uint32_t i = 0; i < said; i++) {
		struct rn_tcp_answer heard = hear_answer();

		CHECK(heard.kind == RN_ANSWER_READ && heard.serial == i);
	}
	if (sent > 0) { /* the rest of the last one */
		CHECK_EQ(send(peer.requests, (char *)&frame + sent, sizeof(frame) - sent, MSG_NOSIGNAL),
			 (ssize_t)sizeof(frame) - sent);
		CHECK_EQ(hear_answer().serial, said);
	}
	close_all();
}

int main(void)
{
	RUN(test_hellos);
	RUN(test_second_hello);
	RUN(test_greetings);
	RUN(test_denied);
	RUN(test_secret);
	RUN(test_frames);
	RUN(test_second_frames);
	RUN(test_withdrawn);
	RUN(test_unmapped);
	RUN(test_link_down);
	RUN(test_behind_a_message_that_waits);
	RUN(test_refused_on_uc);
	RUN(test_reading_nothing);
	RUN(test_slow_reader);
	RUN(test_gone_while_read);
	RUN(test_hung_up_while_read);
	RUN(test_unheard_answers);
	return 0;
}
