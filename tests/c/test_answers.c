/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers on a stream as no device of ours gives them: out of step between the two connections, or against the
 * rules.  tests/fuzz/answers.c looks for more of the second kind.
 */
#include "responder.h"

enum { PSN = 17 };

static struct responder responder;
static struct end end;

static void open_all(void)
{
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	responder_open(&responder);
	responder_invite(&responder, end.qp, PSN);
}

static void close_all(void)
{
	responder_hang_up(&responder);
	close(responder.listener);
	end_close(&end);
	expect_live_nothing();
}

static void meet_responder(void)
{
	responder_accept(&responder, PSN);
	responder_welcome(&responder);
}

static int post_read(uint64_t wr_id, size_t offset, uint32_t length)
{
	return post_rdma(&end, IBV_WR_RDMA_READ, wr_id, offset, length, 0x1000, 0x100);
}

/* The next frame that isn't HERE, without payload. */
static struct rn_tcp_frame next_frame(void)
{
	struct rn_tcp_frame frame;

	do
		hear_all(responder.answers, &frame, sizeof(frame));
	while (frame.kind == RN_FRAME_HERE);
	CHECK_EQ(frame.length, 0);
	return frame;
}

static void answer(enum rn_answer_kind kind, uint8_t code, uint32_t serial, uint32_t length, char fill)
{
	struct rn_tcp_answer answer = {.kind = kind, .code = code, .serial = serial, .length = length};
	char whole[sizeof(answer) + 4096];

	memcpy(whole, &answer, sizeof(answer));
	memset(whole + sizeof(answer), fill, length);
	CHECK_EQ(send(responder.answers, whole, sizeof(answer) + length, MSG_NOSIGNAL), (ssize_t)(sizeof(answer) + length));
}

/* The acknowledgement rides on a request, which comes by another connection than the data, and sooner. */
static void test_acknowledged_before_the_data(void)
{
	struct rn_tcp_frame nothing = {.kind = RN_FRAME_NOTHING, .ack = 2};
	struct rn_tcp_answer heard;

	open_all();
	CHECK_EQ(post_read(1, 0, 64), 0);
	CHECK_EQ(post_read(2, 64, 64), 0);
	meet_responder();
	CHECK(responder_call(&responder, end.qp->qp_num, PSN));
	CHECK_EQ(next_frame().serial, 0);
	answer(RN_ANSWER_READ, 0, 0, 32, 'x');
	CHECK_EQ(send(responder.requests, &nothing, sizeof(nothing), MSG_NOSIGNAL), (ssize_t)sizeof(nothing));
	hear_all(responder.requests, &heard, sizeof(heard));
	CHECK(heard.kind == RN_ANSWER_ACK && heard.serial == 1);
	answer(RN_ANSWER_READ, 0, 0, 32, 'y');
	expect(end.cq, 1, IBV_WC_SUCCESS);
	CHECK(end.buffer[0] == 'x' && end.buffer[31] == 'x' && end.buffer[32] == 'y' && end.buffer[63] == 'y');
	close_all();
}

static void refused(enum rn_answer_kind kind, uint8_t code, uint32_t serial, uint32_t length)
{
	open_all();
	memset(end.buffer, 'a', 8192);
	CHECK_EQ(post_read(1, 1024, 64), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	answer(kind, code, serial, length, 'x');
	expect(end.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	for (size_t i = 0; i < 8192; i++)
		CHECK_EQ(end.buffer[i], 'a');
	close_all();
}

static void test_lies(void)
{
	refused(RN_ANSWER_READ, 0, 0, 65);          /* more than was asked for */
	refused(RN_ANSWER_READ, 0, 1, 64);          /* of a request that there isn't */
	refused(RN_ANSWER_READ, 0, UINT32_MAX, 64); /* that was before all */
	refused(RN_ANSWER_READ, 0, 0, 0);           /* nothing, and again nothing, for ever */
	refused(RN_ANSWER_ATOMIC, 0, 0, 8);         /* of another kind */
	refused(RN_ANSWER_ACK, 0, 2, 0);            /* what wasn't sent */
	refused(RN_ANSWER_ACK, 0, 1, 8);            /* with a payload */
	refused(RN_ANSWER_RNR, 32, 0, 0);           /* no such timer */
	refused(RN_ANSWER_NAK, IBV_WC_SUCCESS, 0, 0);
	refused(RN_ANSWER_NAK, 255, 0, 0);
	refused(0, 0, 0, 0);
	refused(99, 0, 0, 0);
}

int main(void)
{
	RUN(test_acknowledged_before_the_data);
	RUN(test_lies);
	return 0;
}
