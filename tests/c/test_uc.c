/* SPDX-License-Identifier: Apache-2.0 */
/* Unreliable connections: what arrives is as on RC; what doesn't, nobody hears of. */
#include "pair.h"
#include "soft.h"

static void connect_uc(struct ibv_qp *qp, uint32_t dest_qpn)
{
	struct ibv_qp_attr attr = default_attr(dest_qpn);

	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, RTR_MASK), EINVAL); /* what is RC's */
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0);
}

static void open_uc(void)
{
	open_pair_with((struct end_options){.cqe = 256, .type = IBV_QPT_UC});
	connect_uc(a.qp, b.qp->qp_num);
	connect_uc(b.qp, a.qp->qp_num);
}

static void test_messages(void)
{
	struct ibv_wc wc;

	open_uc();
	CHECK_EQ(post_recv(&b, 1, 0, 100), 0);
	CHECK_EQ(post_send(&a, 2, 0, 100), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, 1);
	CHECK_EQ(wc.byte_len, 100);
	CHECK_EQ(wc.src_qp, a.qp->qp_num);
	CHECK_EQ(b.buffer[99], 'a');
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 3, 0, 200, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	CHECK_EQ(b.buffer[199], 'a');
	CHECK_EQ(post_recv(&b, 4, 0, 0), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 5, 0, 300, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 5, IBV_WC_SUCCESS);
	CHECK_EQ(poll_one(b.cq).opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 6, 0, 8, at_b(0), b.mr->rkey), EINVAL);
	CHECK_EQ(post_rdma(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, 6, 0, 8, at_b(0), b.mr->rkey), EINVAL);
	close_pair();
}

/* The sender is none the wiser, and the receiver unharmed. */
static void test_dropped(void)
{
	open_uc();
	CHECK_EQ(post_send(&a, 1, 0, 64), 0); /* no receive */
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_recv(&b, 2, 0, 16), 0);
	CHECK_EQ(post_send(&a, 2, 0, 64), 0); /* too long */
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 3, 0, 64, at_b(0), b.mr->rkey ^ 1), 0); /* no such key */
	expect(a.cq, 3, IBV_WC_SUCCESS);
	expect_nothing(b.cq);
	CHECK_EQ(post_send(&a, 4, 0, 16), 0);
	expect(a.cq, 4, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	CHECK_EQ(ibv_destroy_qp(b.qp), 0); /* nobody there */
	b.qp = NULL;
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(post_send(&a, 5, 0, 64), 0);
		expect(a.cq, 5, IBV_WC_SUCCESS);
	}
	close_pair();
}

/* What is posted when the peer is there arrives, also where it was not there a moment before, when we came to RTS. */
static void test_peer_that_came_later(void)
{
	for (int i = 0; i < 20; i++) {
		open_pair_with((struct end_options){.cqe = 256, .type = IBV_QPT_UC});
		connect_uc(a.qp, b.qp->qp_num);
		usleep(i * 100); /* at each moment between two attempts to reach it */
		connect_uc(b.qp, a.qp->qp_num);
		CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
		CHECK_EQ(post_send(&a, 2, 0, 8), 0);
		expect(a.cq, 2, IBV_WC_SUCCESS);
		expect(b.cq, 1, IBV_WC_SUCCESS);
		close_pair();
	}
}

/* A send that fails here leaves the receiving side alone, and the queue pair can go on. */
static void test_sqe(void)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_sge bad_key;
	struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &bad_key, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

	open_uc();
	bad_key = sge_of(&a, 0, 8);
	bad_key.lkey ^= 1;
	CHECK_EQ(post_recv(&a, 7, 0, 64), 0);
	CHECK_EQ(post_recv(&b, 8, 0, 64), 0);
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_SQE);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_send(&b, 3, 0, 8), 0);
	expect(b.cq, 3, IBV_WC_SUCCESS);
	expect(a.cq, 7, IBV_WC_SUCCESS);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, 0), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	CHECK_EQ(post_send(&a, 4, 0, 8), 0);
	expect(a.cq, 4, IBV_WC_SUCCESS);
	expect(b.cq, 8, IBV_WC_SUCCESS);
	close_pair();
}

/* To RTS again, and what is sent then arrives, into the receive for what was cut off. */
static void go_on(uint64_t receive)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_wc wc;

	CHECK_EQ(state_of(a.qp), IBV_QPS_SQE);
	CHECK_EQ(post_recv(&a, 5, 0, 64), 0);
	CHECK_EQ(post_send(&b, 6, 0, 8), 0);
	expect(b.cq, 6, IBV_WC_SUCCESS);
	expect(a.cq, 5, IBV_WC_SUCCESS);
	memset(a.buffer, 'n', 1000);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 7, 0, 1000, at_b(BUFFER - 1000), b.mr->rkey), 0);
	CHECK_EQ(post_send(&a, 8, 0, 1000), 0);
	expect(a.cq, 7, IBV_WC_SUCCESS);
	expect(a.cq, 8, IBV_WC_SUCCESS);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, receive);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.byte_len, 1000);
	for (int i = 0; i < 1000; i++)
		CHECK(b.buffer[i] == 'n' && b.buffer[BUFFER - 1000 + i] == 'n');
}

/* The memory ends within a message: what of it is on its way can't be taken back. */
static void test_sqe_within_a_message(void)
{
	enum { LENGTH = 50 * 4096 };
	char *memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr, *own;

	if (!by_stream())
		return; /* who copies it meets a signal */
	open_uc();
	own = a.mr;
	mr = ibv_reg_mr(a.pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr && !mprotect(memory + LENGTH - 4096, 4096, PROT_NONE));
	for (uint64_t round = 0; round < 20; round++) {
		CHECK_EQ(post_recv(&b, round, 0, LENGTH), 0);
		a.mr = mr;
		CHECK_EQ(post_send(&a, 1, memory - a.buffer, LENGTH), 0);
		a.mr = own;
		CHECK_EQ(post_send(&a, 2, 0, 8), 0);
		expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
		expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
		go_on(round);
	}
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
	munmap(memory, LENGTH);
}

/* The socket is full when a message's memory is withdrawn. A queue pair that was draining fails, and has not drained. */
static void cut_off_within_a_frame(bool drains)
{
	enum { LENGTH = 300007 };
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};
	struct ibv_mr *mr, *own;
	uint32_t cut = 0, arrived;
	struct rn_qp *qp;

	open_uc();
	qp = rn_qp(a.qp);
	own = a.mr;
	mr = a.mr = ibv_reg_mr(a.pd, a.buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	CHECK_EQ(post_recv(&b, 1, 0, 1000), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 0, 0, LENGTH, at_b(1000), b.mr->rkey), 0);
	expect(a.cq, 0, IBV_WC_SUCCESS);
	rn_lock(&rn_qp(b.qp)->sq_lock); /* so that it reads nothing */
	for (uint64_t i = 1; !cut; i++) {
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, LENGTH, at_b(1000), b.mr->rkey), 0);
		rn_lock(&qp->sq_lock);
		cut = qp->tcp->out->frame_sent ? qp->tcp->out->frame.serial : 0;
		rn_unlock(&qp->sq_lock);
	}
	CHECK_EQ(cut, qp->sq_posted - 1);
	if (drains)
		CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK_EQ(rn_mr_table[rn_mr_index(mr->lkey)].key, mr->lkey);
	atomic_store(&rn_mr_table[rn_mr_index(mr->lkey)].key, 0); /* as ibv_dereg_mr, which would wait for b */
	rn_unlock(&rn_qp(b.qp)->sq_lock);
	for (arrived = 1; arrived < cut; arrived++)
		expect(a.cq, arrived, IBV_WC_SUCCESS);
	expect(a.cq, cut, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, NULL), 0);
	CHECK(!attr.sq_draining);
	atomic_store(&rn_mr_table[rn_mr_index(mr->lkey)].key, mr->lkey);
	a.mr = own;
	go_on(1);
	CHECK(!readable(a.context->async_fd, 0));
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
}

static void test_sqe_within_a_frame(void)
{
	if (!by_stream())
		return;
	cut_off_within_a_frame(false);
	cut_off_within_a_frame(true);
}

/* A receive whose own key is bad is its owner's mistake. */
static void test_bad_receive(void)
{
	struct ibv_sge bad_key;
	struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &bad_key, .num_sge = 1}, *bad;

	open_uc();
	bad_key = sge_of(&b, 0, 8);
	bad_key.lkey ^= 1;
	CHECK_EQ(ibv_post_recv(b.qp, &wr, &bad), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
	close_pair();
}

int main(void)
{
	RUN(test_messages);
	RUN(test_dropped);
	RUN(test_peer_that_came_later);
	RUN(test_sqe);
	RUN(test_sqe_within_a_message);
	RUN(test_sqe_within_a_frame);
	RUN(test_bad_receive);
	return 0;
}
