/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers on a stream as no device of ours gives them: out of step between the two connections, or against the
 * rules.  tests/fuzz/answers.c looks for more of the second kind.
 */
#include "responder.h"
#include "soft.h"

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

/* Draining: what was on its way is told to wait for a receive, comes again, and is done only then. */
static void test_told_to_wait_while_draining(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};

	open_all();
	CHECK_EQ(post_send(&end, 1, 0, 0), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK_EQ(post_send(&end, 2, 0, 0), 0);
	answer(RN_ANSWER_RNR, 1, 0, 0, 0);
	CHECK_EQ(next_frame().serial, 0);
	CHECK(!readable(end.context->async_fd, 0));
	answer(RN_ANSWER_ACK, 0, 1, 0, 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	expect_event(end.context, IBV_EVENT_SQ_DRAINED);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTS, 0), 0);
	CHECK_EQ(next_frame().serial, 1);
	answer(RN_ANSWER_ACK, 0, 2, 0, 0);
	expect(end.cq, 2, IBV_WC_SUCCESS);
	close_all();
}

/* Who goes on, or fails, drains no longer. */
static void test_no_longer_draining(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};

	open_all();
	CHECK_EQ(post_send(&end, 1, 0, 0), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTS, 0), 0);
	answer(RN_ANSWER_ACK, 0, 1, 0, 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(state_of(end.qp), IBV_QPS_RTS); /* so whoever took the answer has finished */
	CHECK(!readable(end.context->async_fd, 0));
	CHECK_EQ(post_send(&end, 2, 0, 0), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_ERR, 0), 0);
	expect(end.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(ibv_query_qp(end.qp, &attr, IBV_QP_STATE, NULL), 0);
	CHECK(!attr.sq_draining);
	CHECK(!readable(end.context->async_fd, 0));
	close_all();
}

static void expect_untouched(void)
{
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	for (size_t i = 0; i < 8192; i++)
		CHECK_EQ(end.buffer[i], 'a');
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
	expect_untouched();
}

/* The same for a message, which has no data to come back. */
static void refused_for_a_send(enum rn_answer_kind kind, uint8_t code, uint32_t serial, uint32_t length)
{
	struct rn_tcp_frame frame;
	char payload[64];

	open_all();
	memset(end.buffer, 'a', 8192);
	CHECK_EQ(post_send(&end, 1, 1024, sizeof(payload)), 0);
	meet_responder();
	do
		hear_all(responder.answers, &frame, sizeof(frame));
	while (frame.kind == RN_FRAME_HERE);
	hear_all(responder.answers, payload, sizeof(payload));
	answer(kind, code, serial, length, 'x');
	expect(end.cq, 1, IBV_WC_RETRY_EXC_ERR);
	expect_untouched();
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
	refused(RN_ANSWER_PIGGYBACK, 0, 0, sizeof(struct rn_tcp_frame)); /* of who has no connection for requests */
	refused(RN_ANSWER_RNR, 1, 1, 0);            /* of what wasn't sent */
	refused(RN_ANSWER_RNR, 1, 0, 8);            /* with a payload */
	refused(RN_ANSWER_NAK, IBV_WC_REM_ACCESS_ERR, 1, 0);
	refused(RN_ANSWER_NAK, IBV_WC_REM_ACCESS_ERR, UINT32_MAX, 0);
	refused(RN_ANSWER_NAK, IBV_WC_REM_ACCESS_ERR, 0, 8);
	refused_for_a_send(RN_ANSWER_NAK, IBV_WC_REM_ACCESS_ERR, 1, 0);
	refused_for_a_send(RN_ANSWER_RNR, 1, 1, 0);
	refused_for_a_send(RN_ANSWER_READ, 0, 0, 8);
	refused_for_a_send(RN_ANSWER_ATOMIC, 0, 0, 8);
	refused(RN_ANSWER_NAK, IBV_WC_SUCCESS, 0, 0);
	refused(RN_ANSWER_NAK, 255, 0, 0);
	refused(0, 0, 0, 0);
	refused(99, 0, 0, 0);
}

/* Data of a request before which another has yet to be answered. */
static void test_data_out_of_order(void)
{
	open_all();
	memset(end.buffer, 'a', 8192);
	CHECK_EQ(post_read(1, 1024, 64), 0);
	CHECK_EQ(post_read(2, 2048, 64), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	CHECK_EQ(next_frame().serial, 1);
	answer(RN_ANSWER_READ, 0, 1, 64, 'x');
	expect(end.cq, 1, IBV_WC_RETRY_EXC_ERR);
	expect(end.cq, 2, IBV_WC_WR_FLUSH_ERR);
	expect_untouched();
}

static bool is_in_the_middle(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool is;

	rn_lock(&qp->sq_lock);
	is = qp->tcp->out->answer_left == 64;
	rn_unlock(&qp->sq_lock);
	return is;
}

/* Data for memory that has gone, and data that ends early. */
static void test_data_without_an_end(void)
{
	struct rn_tcp_answer half = {.kind = RN_ANSWER_READ, .length = 64};

	open_all();
	CHECK_EQ(post_read(1, 1024, 64), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	CHECK_EQ(ibv_dereg_mr(end.mr), 0);
	end.mr = NULL;
	memset(end.buffer, 'a', 8192);
	answer(RN_ANSWER_READ, 0, 0, 64, 'x');
	expect(end.cq, 1, IBV_WC_LOC_PROT_ERR);
	expect_untouched();

	open_all();
	CHECK_EQ(post_read(1, 1024, 64), 0);
	meet_responder();
	CHECK_EQ(next_frame().serial, 0);
	CHECK_EQ(send(responder.answers, &half, sizeof(half), MSG_NOSIGNAL), (ssize_t)sizeof(half));
	EVENTUALLY(is_in_the_middle());
	hang_up(&responder.answers);
	expect(end.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	close_all();
}

/* --- frames that were cut ----------------------------------------------------------------------------------- */

enum { LENGTH = 100003 };

static void open_narrow(void)
{
	int room = 64 * 1024;

	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	responder_open(&responder);
	CHECK(!setsockopt(responder.listener, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room)));
	responder_invite(&responder, end.qp, PSN);
	meet_responder();
}

static bool is_open(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool is_open;

	rn_lock(&qp->sq_lock);
	is_open = qp->tcp->out && qp->tcp->out->state == RN_TCP_OPEN;
	rn_unlock(&qp->sq_lock);
	return is_open;
}

/* Nobody reads: post until the socket takes only a part of a frame, which is the last one's. How many are posted. */
static uint32_t post_until_cut(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	uint32_t cut = 0;

	EVENTUALLY(is_open());
	while (!cut) {
		CHECK_EQ(post_send(&end, qp->sq_posted, 0, LENGTH), 0);
		rn_lock(&qp->sq_lock);
		cut = qp->tcp->out->frame_sent;
		rn_unlock(&qp->sq_lock);
	}
	CHECK_EQ(qp->tcp->out->frame.serial, qp->sq_posted - 1);
	return qp->sq_posted;
}

static enum ibv_wc_status broken_status(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	enum ibv_wc_status status;

	rn_lock(&qp->sq_lock);
	status = qp->tcp->broken;
	rn_unlock(&qp->sq_lock);
	return status;
}

/* The next SEND, whole. */
static struct rn_tcp_frame next_send(void)
{
	static char payload[LENGTH];
	struct rn_tcp_frame frame;

	do
		hear_all(responder.answers, &frame, sizeof(frame));
	while (frame.kind == RN_FRAME_HERE);
	CHECK_EQ(frame.kind, RN_FRAME_SEND);
	CHECK_EQ(frame.length, LENGTH);
	hear_all(responder.answers, payload, frame.length);
	return frame;
}

/* A request that can't be sent is behind one whose frame was cut: that one is finished, and succeeds. */
static void test_a_bad_one_behind_a_cut_one(void)
{
	struct ibv_send_wr *refused, wr = {.opcode = IBV_WR_SEND, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_sge bad;
	uint32_t posted;

	open_narrow();
	posted = post_until_cut();
	bad = sge_of(&end, 0, 64);
	bad.lkey ^= 0x5a5a5a5a;
	wr.sg_list = &bad;
	wr.wr_id = posted;
	CHECK_EQ(ibv_post_send(end.qp, &wr, &refused), 0);
	CHECK_EQ(broken_status(), IBV_WC_LOC_PROT_ERR);
	answer(RN_ANSWER_ACK, 0, posted - 1, 0, 0); /* the head is the one that was cut */
	for (uint32_t i = 0; i + 1 < posted; i++)
		expect(end.cq, i, IBV_WC_SUCCESS);
	for (uint32_t i = 0; i < posted; i++)
		CHECK_EQ(next_send().serial, i);
	answer(RN_ANSWER_ACK, 0, posted, 0, 0);
	expect(end.cq, posted - 1, IBV_WC_SUCCESS);
	expect(end.cq, posted, IBV_WC_LOC_PROT_ERR);
	close_all();
}

/* The memory of a frame that was cut goes, and a request before it is told to wait for a receive: the frame is
 * finished all the same, that request comes again, and what has no memory fails in its turn. */
static void cut_and_told_to_wait(bool is_known_before)
{
	struct ibv_mr *first, *others;
	uint32_t posted;

	open_narrow();
	CHECK_EQ(post_send(&end, 0, 0, LENGTH), 0);
	CHECK_EQ(next_send().serial, 0);
	first = end.mr;
	others = end.mr = ibv_reg_mr(end.pd, end.buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	posted = post_until_cut();
	end.mr = first;
	CHECK_EQ(ibv_dereg_mr(others), 0);
	if (is_known_before) {
		CHECK_EQ(post_send(&end, posted++, 0, LENGTH), 0); /* goes on with the frame */
		CHECK_EQ(broken_status(), IBV_WC_LOC_PROT_ERR);
	}
	answer(RN_ANSWER_RNR, 1, 0, 0, 0);
	while (next_send().serial)
		;
	answer(RN_ANSWER_ACK, 0, 1, 0, 0);
	expect(end.cq, 0, IBV_WC_SUCCESS);
	expect(end.cq, 1, IBV_WC_LOC_PROT_ERR);
	for (uint32_t i = 2; i < posted; i++)
		expect(end.cq, i, IBV_WC_WR_FLUSH_ERR);
	close_all();
}

static void test_cut_and_told_to_wait(void)
{
	cut_and_told_to_wait(false);
	cut_and_told_to_wait(true);
}

int main(void)
{
	RUN(test_acknowledged_before_the_data);
	RUN(test_told_to_wait_while_draining);
	RUN(test_no_longer_draining);
	RUN(test_lies);
	RUN(test_data_out_of_order);
	RUN(test_data_without_an_end);
	RUN(test_a_bad_one_behind_a_cut_one);
	RUN(test_cut_and_told_to_wait);
	return 0;
}
