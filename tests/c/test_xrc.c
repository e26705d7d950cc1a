/* SPDX-License-Identifier: Apache-2.0 */
/* Extended reliable connections: one connection to many SRQs, each with a PD and a CQ of its own. */
#define _GNU_SOURCE
#include "soft.h"
#include "objects/srq.h"

#include "pair.h"

enum {
	XRC_RTR = RTR_MASK,
	TARGET_RTS = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT,
};

static struct ibv_xrcd *domain;
static struct ibv_qp *sender, *target;
static struct ibv_srq *srqs[2];
static struct ibv_cq *cqs[2];

static struct ibv_xrcd *open_domain(struct ibv_context *context, int fd, int flags)
{
	struct ibv_xrcd_init_attr attr = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = flags};

	return verbs_get_ctx(context)->open_xrcd(context, &attr);
}

static struct ibv_srq *make_srq(struct ibv_cq *cq)
{
	struct ibv_srq_init_attr_ex init = {
		.attr = {.max_wr = 8, .max_sge = 1},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = b.pd,
		.xrcd = domain,
		.cq = cq,
	};
	struct ibv_srq *srq = ibv_create_srq_ex(b.context, &init);

	CHECK(srq);
	return srq;
}

static uint32_t number_of(struct ibv_srq *srq)
{
	uint32_t number = 0;

	CHECK_EQ(ibv_get_srq_num(srq, &number), 0);
	CHECK(number && number <= 0xffffff);
	return number;
}

static void connect_xrc(void)
{
	struct ibv_qp_attr attr = default_attr(target->qp_num);

	CHECK_EQ(to_state(sender, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(sender, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), 0);
	CHECK_EQ(to_state(sender, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	attr = default_attr(sender->qp_num);
	CHECK_EQ(to_state(target, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(target, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(target, &attr, IBV_QPS_RTS, TARGET_RTS), 0);
}

static void open_xrc(void)
{
	struct ibv_qp_init_attr send = {.cap = {.max_send_wr = 16, .max_send_sge = 1}, .qp_type = IBV_QPT_XRC_SEND};
	struct ibv_qp_init_attr_ex recv = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};

	open_pair();
	CHECK(domain = open_domain(b.context, -1, O_CREAT));
	send.send_cq = a.cq;
	CHECK(sender = ibv_create_qp(a.pd, &send));
	recv.xrcd = domain;
	CHECK(target = verbs_get_ctx(b.context)->create_qp_ex(b.context, &recv));
	CHECK(!target->pd && !target->send_cq && !target->recv_cq);
	for (int i = 0; i < 2; i++) {
		CHECK(cqs[i] = ibv_create_cq(b.context, 64, NULL, NULL, 0));
		srqs[i] = make_srq(cqs[i]);
	}
	connect_xrc();
}

static void close_xrc(void)
{
	CHECK_EQ(verbs_get_ctx(b.context)->close_xrcd(domain), EBUSY);
	CHECK_EQ(ibv_destroy_cq(cqs[0]), EBUSY);
	if (target)
		CHECK_EQ(ibv_destroy_qp(target), 0);
	CHECK_EQ(ibv_destroy_qp(sender), 0);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(ibv_destroy_srq(srqs[i]), 0);
		CHECK_EQ(ibv_destroy_cq(cqs[i]), 0);
	}
	CHECK_EQ(verbs_get_ctx(b.context)->close_xrcd(domain), 0);
	close_pair();
	expect_live_nothing();
}

static int send_xrc(uint64_t wr_id, enum ibv_wr_opcode opcode, uint32_t srqn, uint32_t length, uint32_t rkey)
{
	struct ibv_sge sge = sge_of(&a, 0, length);
	struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				 .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {at_b(4096), rkey},
				 .qp_type.xrc.remote_srqn = srqn}, *bad;

	return ibv_post_send(sender, &wr, &bad);
}

static int post_to(struct ibv_srq *srq, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = sge_of(&b, offset, length);
	struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

	return ibv_post_srq_recv(srq, &wr, &bad);
}

static void test_messages(void)
{
	struct ibv_recv_wr wr = {0}, *bad;
	struct ibv_wc wc;

	open_xrc();
	CHECK(number_of(srqs[0]) != number_of(srqs[1]));
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_to(srqs[i % 2], i, i * 64, 64), 0);
	for (int i = 0; i < 8; i++) {
		CHECK_EQ(send_xrc(i, IBV_WR_SEND, number_of(srqs[i % 2]), 10 + i, 0), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		wc = poll_one(cqs[i % 2]);
		CHECK_EQ(wc.wr_id, i);
		CHECK_EQ(wc.byte_len, 10 + i);
		CHECK_EQ(wc.qp_num, target->qp_num);
		CHECK_EQ(wc.src_qp, sender->qp_num);
		CHECK_EQ(b.buffer[i * 64], 'a');
	}
	CHECK_EQ(send_xrc(9, IBV_WR_RDMA_WRITE, number_of(srqs[0]), 100, b.mr->rkey), 0);
	expect(a.cq, 9, IBV_WC_SUCCESS);
	CHECK_EQ(b.buffer[4096 + 99], 'a');
	CHECK_EQ(send_xrc(10, IBV_WR_RDMA_READ, number_of(srqs[1]), 100, b.mr->rkey), 0);
	expect(a.cq, 10, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_post_recv(target, &wr, &bad), ENOMEM);
	CHECK_EQ(ibv_post_send(target, &(struct ibv_send_wr){0}, &(struct ibv_send_wr *){NULL}) != 0, 1);
	expect_nothing(cqs[0]);
	expect_nothing(cqs[1]);
	close_xrc();
}

/* Both CQs hear of what came while nobody looked, each its own; a receive that is missing is waited for. */
static void test_waiting(void)
{
	open_xrc();
	CHECK_EQ(send_xrc(1, IBV_WR_SEND, number_of(srqs[1]), 10, 0), 0);
	CHECK_EQ(post_to(srqs[0], 1, 0, 64), 0);
	expect_nothing(a.cq);
	CHECK_EQ(post_to(srqs[1], 2, 64, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(cqs[1], 2, IBV_WC_SUCCESS);
	CHECK_EQ(send_xrc(2, IBV_WR_SEND, number_of(srqs[0]), 10, 0), 0);
	expect(cqs[0], 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	close_xrc();
}

/* Both hear of two that were posted at once. */
static void test_one_chain_to_both(void)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr[2], *bad;

	open_xrc();
	sge = sge_of(&a, 0, 10);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(post_to(srqs[i], i, i * 64, 64), 0);
		wr[i] = (struct ibv_send_wr){.wr_id = i, .next = i ? NULL : &wr[1], .sg_list = &sge, .num_sge = 1,
					     .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
					     .qp_type.xrc.remote_srqn = number_of(srqs[i])};
	}
	CHECK_EQ(ibv_post_send(sender, wr, &bad), 0);
	for (int i = 0; i < 2; i++) {
		expect(a.cq, i, IBV_WC_SUCCESS);
		expect(cqs[i], i, IBV_WC_SUCCESS);
	}
	close_xrc();
}

static void test_unknown(void)
{
	uint32_t old;

	open_xrc();
	old = number_of(srqs[0]);
	CHECK_EQ(ibv_destroy_srq(srqs[0]), 0);
	srqs[0] = make_srq(cqs[0]); /* the same slot, another number */
	CHECK(number_of(srqs[0]) != old);
	CHECK_EQ(send_xrc(1, IBV_WR_SEND, old, 10, 0), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	CHECK_EQ(state_of(target), IBV_QPS_ERR);
	close_xrc();
	open_xrc();
	CHECK_EQ(send_xrc(1, IBV_WR_SEND, 0, 10, 0), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	close_xrc();
}

/* What the one sender had claimed when it died is there again. */
static void test_dead_sender(void)
{
	struct rn_recv_claim claim = {0};
	struct rn_pool_block *block;

	open_xrc();
	block = rn_pool_block(rn_srq(srqs[0])->pool);
	CHECK_EQ(post_to(srqs[0], 1, 0, 64), 0);
	CHECK(rn_recv_claim(rn_arena, block, rn_name_of_qp(rn_qp(target)->index, rn_qp(target)->generation), &claim));
	claim.claimed ^= 1ull << 32; /* so that the last word isn't said */
	rn_recv_claim_finish(rn_arena, &claim, &block->finished);
	CHECK_EQ(to_state(target, &(struct ibv_qp_attr){0}, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(to_state(sender, &(struct ibv_qp_attr){0}, IBV_QPS_RESET, 0), 0);
	connect_xrc();
	CHECK_EQ(send_xrc(1, IBV_WR_SEND, number_of(srqs[0]), 10, 0), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(cqs[0], 1, IBV_WC_SUCCESS);
	close_xrc();
}

static void test_shared_target(void)
{
	struct ibv_qp_open_attr attr = {
		.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_type = IBV_QPT_XRC_RECV,
	};
	struct ibv_qp *handle;

	open_xrc();
	attr.xrcd = domain;
	attr.qp_num = target->qp_num ^ 1;
	CHECK(!verbs_get_ctx(b.context)->open_qp(b.context, &attr) && errno == EINVAL);
	attr.qp_num = target->qp_num;
	CHECK(handle = verbs_get_ctx(b.context)->open_qp(b.context, &attr));
	CHECK_EQ(state_of(handle), IBV_QPS_RTS);
	CHECK_EQ(ibv_destroy_qp(target), 0); /* its creator's; it lives on */
	target = NULL;
	CHECK_EQ(post_to(srqs[0], 1, 0, 64), 0);
	CHECK_EQ(send_xrc(1, IBV_WR_SEND, number_of(srqs[0]), 10, 0), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(cqs[0], 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_destroy_qp(handle), 0);
	close_xrc();
}

static void test_domains(void)
{
	int fd = memfd_create("domain", MFD_CLOEXEC);
	struct ibv_xrcd *first, *second;

	open_pair();
	CHECK(!open_domain(a.context, -1, 0) && errno == EINVAL);
	CHECK(!open_domain(a.context, fd, 0) && errno == EAGAIN);
	CHECK(first = open_domain(a.context, fd, O_CREAT));
	CHECK(second = open_domain(a.context, fd, 0));
	CHECK(!open_domain(a.context, fd, O_CREAT | O_EXCL) && errno == EINVAL);
	CHECK_EQ(verbs_get_ctx(a.context)->close_xrcd(first), 0);
	CHECK_EQ(verbs_get_ctx(a.context)->close_xrcd(second), 0);
	close(fd);
	close_pair();
	expect_live_nothing();
}

/* A context that is closed takes all of it along. */
static void test_left_behind(void)
{
	struct ibv_context *context = open_soft();
	struct ibv_qp_init_attr_ex recv = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
	struct ibv_qp_open_attr attr = {
		.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_type = IBV_QPT_XRC_RECV,
	};

	CHECK(recv.xrcd = attr.xrcd = open_domain(context, -1, O_CREAT));
	CHECK(target = verbs_get_ctx(context)->create_qp_ex(context, &recv));
	attr.qp_num = target->qp_num;
	CHECK(verbs_get_ctx(context)->open_qp(context, &attr));
	CHECK_EQ(ibv_close_device(context), 0);
	expect_live_nothing();
}

int main(void)
{
	RUN(test_messages);
	RUN(test_waiting);
	RUN(test_one_chain_to_both);
	RUN(test_unknown);
	RUN(test_dead_sender);
	RUN(test_shared_target);
	RUN(test_domains);
	RUN(test_left_behind);
	return 0;
}
