/* SPDX-License-Identifier: Apache-2.0 */
/* Two queue pairs of one process: everything that the responder checks and the requester is told. */
#include "pair.h"
#include "objects/qp.h"

/* --- what works ----------------------------------------------------------------------------------- */

static void test_send(void)
{
	struct ibv_wc wc;

	open_pair();
	strcpy(a.buffer, "over the wire");
	CHECK_EQ(post_recv(&b, 7, 100, 64), 0);
	CHECK_EQ(post_send(&a, 8, 0, 14), 0);
	wc = poll_one(a.cq);
	CHECK_EQ(wc.wr_id, 8);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.opcode, IBV_WC_SEND);
	CHECK_EQ(wc.qp_num, a.qp->qp_num);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, 7);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.opcode, IBV_WC_RECV);
	CHECK_EQ(wc.byte_len, 14);
	CHECK_EQ(wc.qp_num, b.qp->qp_num);
	CHECK_EQ(wc.src_qp, a.qp->qp_num);
	CHECK(!strcmp(b.buffer + 100, "over the wire"));
	close_pair();
}

static void test_send_with_imm(void)
{
	struct ibv_wc wc;

	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 0), 0);
	CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 0x11223344}, 0, 0), 0);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	CHECK_EQ(wc.imm_data, 0x11223344);
	CHECK_EQ(wc.byte_len, 0);
	expect_nothing(a.cq); /* unsignaled */
	close_pair();
}

static void test_scatter_gather(void)
{
	struct ibv_sge from[3], to[3];
	struct ibv_recv_wr recv = {.sg_list = to, .num_sge = 3}, *bad_recv;
	struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .sg_list = from, .num_sge = 3}, *bad;

	open_pair();
	for (int i = 0; i < 5000; i++)
		a.buffer[i] = i * 7;
	from[0] = sge_of(&a, 0, 1);
	from[1] = sge_of(&a, 1, 4000);
	from[2] = sge_of(&a, 4001, 999);
	to[0] = sge_of(&b, 0, 1500);
	to[1] = sge_of(&b, 10000, 3);
	to[2] = sge_of(&b, 20000, 4000);
	CHECK_EQ(ibv_post_recv(b.qp, &recv, &bad_recv), 0);
	CHECK_EQ(ibv_post_send(a.qp, &send, &bad), 0);
	CHECK_EQ(poll_one(b.cq).byte_len, 5000);
	CHECK(!memcmp(b.buffer, a.buffer, 1500));
	CHECK(!memcmp(b.buffer + 10000, a.buffer + 1500, 3));
	CHECK(!memcmp(b.buffer + 20000, a.buffer + 1503, 5000 - 1503));
	CHECK_EQ(b.buffer[20000 + 5000 - 1503], 'b');
	close_pair();
}

static void test_rdma(void)
{
	struct ibv_wc wc;

	open_pair();
	for (int i = 0; i < BUFFER; i++)
		a.buffer[i] = i % 251;
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, BUFFER, at_b(0), b.mr->rkey), 0);
	wc = poll_one(a.cq);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.opcode, IBV_WC_RDMA_WRITE);
	CHECK(!memcmp(a.buffer, b.buffer, BUFFER));
	expect_nothing(b.cq);

	memset(a.buffer, 0, BUFFER);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, BUFFER, at_b(0), b.mr->rkey), 0);
	wc = poll_one(a.cq);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.opcode, IBV_WC_RDMA_READ);
	CHECK_EQ(wc.byte_len, BUFFER);
	CHECK(!memcmp(a.buffer, b.buffer, BUFFER));

	for (int length = 0; length < 40; length++) {
		memset(b.buffer, 'b', 100);
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 3, 5, length, at_b(3), b.mr->rkey), 0);
		expect(a.cq, 3, IBV_WC_SUCCESS);
		CHECK(!memcmp(a.buffer + 5, b.buffer + 3, length));
		CHECK(b.buffer[2] == 'b' && b.buffer[3 + length] == 'b');
	}
	/* Without bytes the key isn't looked at. */
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 4, 0, 0, 0, 0xdead), 0);
	expect(a.cq, 4, IBV_WC_SUCCESS);
	close_pair();
}

static void test_write_with_imm(void)
{
	struct ibv_wc wc;

	open_pair();
	CHECK_EQ(post_recv(&b, 9, 0, 0), 0);
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
					   .imm_data = 5,
					   .wr.rdma = {.remote_addr = at_b(50), .rkey = b.mr->rkey}},
		      0, 300),
		 0);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, 9);
	CHECK_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK_EQ(wc.byte_len, 300);
	CHECK_EQ(wc.imm_data, 5);
	CHECK(b.buffer[50] == 'a' && b.buffer[349] == 'a' && b.buffer[350] == 'b');
	close_pair();
}

static int post_atomic(enum ibv_wr_opcode opcode, uint64_t remote, uint64_t compare_add, uint64_t swap)
{
	return post(&a,
		    (struct ibv_send_wr){.wr_id = 1,
					 .opcode = opcode,
					 .send_flags = IBV_SEND_SIGNALED,
					 .wr.atomic = {.remote_addr = remote,
						       .rkey = b.mr->rkey,
						       .compare_add = compare_add,
						       .swap = swap}},
		    64, 8);
}

static void test_atomics(void)
{
	uint64_t *there, *before;

	open_pair();
	there = (uint64_t *)(b.buffer + 8);
	before = (uint64_t *)(a.buffer + 64);
	*there = 5;
	CHECK_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, at_b(8), 3, 0), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(*there == 8 && *before == 5);
	CHECK_EQ(post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, at_b(8), 8, 100), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(*there == 100 && *before == 8);
	CHECK_EQ(post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, at_b(8), 8, 200), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(*there == 100 && *before == 100);
	CHECK_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, at_b(12), 1, 0), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	close_pair();
}

static void test_inline(void)
{
	struct ibv_sge sge = {.length = 100};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE}, *bad;
	char data[300] = "not registered";

	open_pair();
	sge.addr = (uintptr_t)data;
	CHECK_EQ(post_recv(&b, 1, 0, 200), 0);
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK(!strcmp(b.buffer, "not registered"));
	sge.length = 300;
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	sge.length = 8;
	wr.opcode = IBV_WR_RDMA_READ;
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	close_pair();
}

/* A queue pair connected to itself. */
static void test_loopback(void)
{
	end_open(&a, &(struct end_options){0});
	connect_to(a.qp, a.qp->qp_num);
	CHECK_EQ(post_recv(&a, 1, 0, 64), 0);
	CHECK_EQ(post_send(&a, 2, 100, 64), 0);
	CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	end_close(&a);
}

/* --- queues ----------------------------------------------------------------------------------------- */

static void test_send_queue_accounting(void)
{
	struct ibv_send_wr write = {.opcode = IBV_WR_RDMA_WRITE};

	open_pair();
	write.wr.rdma.remote_addr = at_b(0);
	write.wr.rdma.rkey = b.mr->rkey;
	/* Whoever never signals runs out of slots. */
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post(&a, write, 0, 8), 0);
	CHECK_EQ(post(&a, write, 0, 8), ENOMEM);
	expect_nothing(a.cq);
	close_pair();

	open_pair();
	write.wr.rdma.remote_addr = at_b(0);
	write.wr.rdma.rkey = b.mr->rkey;
	for (int i = 0; i < 63; i++)
		CHECK_EQ(post(&a, write, 0, 8), 0);
	write.send_flags = IBV_SEND_SIGNALED;
	CHECK_EQ(post(&a, write, 0, 8), 0);
	/* It was executed; but only polling it makes room. */
	CHECK_EQ(post(&a, write, 0, 8), ENOMEM);
	expect(a.cq, 0, IBV_WC_SUCCESS);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post(&a, write, 0, 8), 0);
	CHECK_EQ(post(&a, write, 0, 8), ENOMEM);
	close_pair();
}

static void test_recv_queue_full(void)
{
	open_pair();
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&b, i, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 64, 0, 8), ENOMEM);
	CHECK_EQ(post_send(&a, 0, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 64, 0, 8), ENOMEM); /* used, but not polled */
	expect(b.cq, 0, IBV_WC_SUCCESS);
	CHECK_EQ(post_recv(&b, 64, 0, 8), 0);
	close_pair();
}

static void test_bad_requests(void)
{
	struct ibv_sge sges[20] = {0};
	struct ibv_send_wr second = {.opcode = IBV_WR_SEND, .sg_list = sges, .num_sge = 20, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr first = {.opcode = IBV_WR_SEND, .next = &second}, *bad = NULL;
	struct ibv_recv_wr recv = {.sg_list = sges, .num_sge = 20}, *bad_recv;

	open_pair();
	CHECK_EQ(ibv_post_recv(b.qp, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);
	CHECK_EQ(post_recv(&b, 1, 0, 0), 0);
	/* What comes before the bad one was posted. */
	CHECK_EQ(ibv_post_send(a.qp, &first, &bad), EINVAL);
	CHECK(bad == &second);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = IBV_WR_TSO}, 0, 0), EOPNOTSUPP);
	CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = 99}, 0, 0), EINVAL);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	close_pair();
}

static void test_many_messages(void)
{
	uint32_t sent = 0, received = 0, completed = 0;

	open_pair();
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&b, i, i * 64, 64), 0);
	while (received < 20000) {
		struct ibv_wc wc[16];
		int got;

		/* By stream a message may be here, and its acknowledgement only on its way: then the send queue is full. */
		while (sent - received < 32 && sent - completed < 64 && sent < 20000) {
			*(uint32_t *)(a.buffer + (sent % 64) * 64) = sent;
			CHECK_EQ(post_send(&a, sent, (sent % 64) * 64, 64), 0);
			sent++;
		}
		while ((got = ibv_poll_cq(a.cq, 16, wc)) > 0)
			completed += got;
		got = ibv_poll_cq(b.cq, 16, wc);
		CHECK(got >= 0);
		for (int i = 0; i < got; i++) {
			CHECK_EQ(wc[i].status, IBV_WC_SUCCESS);
			CHECK_EQ(wc[i].wr_id, received % 64);
			CHECK_EQ(*(uint32_t *)(b.buffer + wc[i].wr_id * 64), received);
			CHECK_EQ(post_recv(&b, wc[i].wr_id, wc[i].wr_id * 64, 64), 0);
			received++;
		}
	}
	close_pair();
}

/* --- errors ------------------------------------------------------------------------------------------- */

static void check_rdma_error(enum ibv_wr_opcode opcode, uint64_t addr, uint32_t rkey, uint32_t length,
			     enum ibv_wc_status status, enum ibv_event_type event)
{
	CHECK_EQ(post_recv(&b, 50, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 51, 0, 8), 0);
	CHECK_EQ(post_rdma(&a, opcode, 1, 0, length, addr, rkey), 0);
	CHECK_EQ(post_rdma(&a, opcode, 2, 0, length, addr, rkey), 0);
	expect(a.cq, 1, status);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	expect(b.cq, 50, IBV_WC_WR_FLUSH_ERR);
	expect(b.cq, 51, IBV_WC_WR_FLUSH_ERR);
	expect_event(b.context, event);
	CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
	/* Posting goes on, and is flushed. */
	CHECK_EQ(post_recv(&b, 52, 0, 8), 0);
	expect(b.cq, 52, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	expect(a.cq, 3, IBV_WC_WR_FLUSH_ERR);
	expect_nothing(a.cq);
	expect_nothing(b.cq);
	close_pair();
}

static void test_access_errors(void)
{
	struct ibv_qp_attr attr;
	struct ibv_pd *other;
	struct ibv_mr *mr;

	open_pair();
	check_rdma_error(IBV_WR_RDMA_WRITE, at_b(0), b.mr->rkey ^ 1, 8, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	open_pair();
	check_rdma_error(IBV_WR_RDMA_READ, at_b(BUFFER - 4), b.mr->rkey, 8, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	open_pair();
	check_rdma_error(IBV_WR_RDMA_WRITE, at_b(-1), b.mr->rkey, 8, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	open_pair();
	check_rdma_error(IBV_WR_RDMA_WRITE, -8ull, b.mr->rkey, 64, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);

	/* The region is of another PD; it does not allow that. */
	open_pair();
	other = ibv_alloc_pd(b.context);
	mr = ibv_reg_mr(other, b.buffer, 4096, ALL_ACCESS);
	CHECK_EQ(ibv_dealloc_pd(other), EBUSY);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(ibv_dealloc_pd(other), 0);
	close_pair();

	open_pair();
	mr = ibv_reg_mr(b.pd, b.buffer, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 1, 0, 8, at_b(0), mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();

	/* The queue pair doesn't allow it. */
	open_pair_with((struct end_options){0});
	connect_to(a.qp, b.qp->qp_num);
	attr = default_attr(a.qp->qp_num);
	attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
	connect_with(b.qp, attr);
	check_rdma_error(IBV_WR_RDMA_WRITE, at_b(0), b.mr->rkey, 8, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	open_pair_with((struct end_options){0});
	connect_to(a.qp, b.qp->qp_num);
	attr = default_attr(a.qp->qp_num);
	attr.max_dest_rd_atomic = 0;
	connect_with(b.qp, attr);
	check_rdma_error(IBV_WR_RDMA_READ, at_b(0), b.mr->rkey, 8, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
}

static void test_deregistered_key(void)
{
	struct ibv_mr *mr;
	uint32_t key;

	open_pair();
	mr = ibv_reg_mr(b.pd, b.buffer, 4096, ALL_ACCESS);
	key = mr->rkey;
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), key), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 8, at_b(0), key), 0);
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	close_pair();
}

static void test_local_errors(void)
{
	struct ibv_mr *mr;

	open_pair();
	mr = a.mr;
	a.mr = &(struct ibv_mr){.lkey = 0x123456};
	CHECK_EQ(post_send(&a, 1, 0, 8), 0); /* the completion tells, not the call */
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	a.mr = mr;
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS); /* nothing was sent */
	close_pair();

	open_pair();
	CHECK_EQ(post_send(&a, 1, BUFFER - 7, 8), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	close_pair();

	/* A READ needs the right to write here. */
	open_pair();
	mr = a.mr;
	a.mr = ibv_reg_mr(a.pd, a.buffer, 4096, 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(ibv_dereg_mr(a.mr), 0);
	a.mr = mr;
	close_pair();
}

static void test_receive_errors(void)
{
	struct ibv_mr *mr;

	open_pair();
	CHECK_EQ(post_recv(&b, 10, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 11, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 9), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	expect(b.cq, 10, IBV_WC_LOC_LEN_ERR);
	expect(b.cq, 11, IBV_WC_WR_FLUSH_ERR);
	expect_event(b.context, IBV_EVENT_QP_REQ_ERR);
	CHECK_EQ(b.buffer[0], 'b');
	close_pair();

	open_pair();
	mr = b.mr;
	b.mr = &(struct ibv_mr){.lkey = 0x123456};
	CHECK_EQ(post_recv(&b, 10, 0, 8), 0);
	b.mr = mr;
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_REM_OP_ERR);
	expect(b.cq, 10, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
	close_pair();
}

/* --- receivers that are not ready ------------------------------------------------------------------------- */

static void test_rnr(void)
{
	struct ibv_qp_attr attr;
	uint64_t began;

	open_pair();
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	usleep(5000);
	expect_nothing(a.cq);
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	close_pair();

	/* Budget: three times 2.56 ms, then that's it. */
	open_pair_with((struct end_options){0});
	attr = default_attr(a.qp->qp_num);
	attr.min_rnr_timer = 16;
	connect_with(b.qp, attr);
	attr = default_attr(b.qp->qp_num);
	attr.rnr_retry = 3;
	connect_with(a.qp, attr);
	began = now_ns();
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
	CHECK(now_ns() - began >= 3 * 2560000);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	close_pair();

	open_pair_with((struct end_options){0});
	connect_to(b.qp, a.qp->qp_num);
	attr = default_attr(b.qp->qp_num);
	attr.rnr_retry = 0;
	connect_with(a.qp, attr);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
	close_pair();
}

static void test_peer_not_there(void)
{
	struct ibv_qp_attr attr;
	uint64_t began;

	/* Not in RTR yet: the request waits for it. */
	open_pair_with((struct end_options){0});
	attr = default_attr(b.qp->qp_num);
	attr.retry_cnt = 7;
	connect_with(a.qp, attr);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	usleep(20000);
	expect_nothing(a.cq);
	connect_to(b.qp, a.qp->qp_num);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_pair();

	/* Never. 4.2 ms, four times. */
	open_pair_with((struct end_options){0});
	connect_impatiently(a.qp, b.qp->qp_num);
	began = now_ns();
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(now_ns() - began >= 16000000);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	close_pair();

	/* Other packet sequence numbers: dropped. */
	open_pair_with((struct end_options){0});
	connect_impatiently(a.qp, b.qp->qp_num);
	attr = default_attr(a.qp->qp_num);
	attr.rq_psn++;
	connect_with(b.qp, attr);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	close_pair();

	/* Went away. */
	open_pair_with((struct end_options){0});
	connect_impatiently(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	b.qp = NULL;
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 8, at_b(0), b.mr->rkey), 0);
	/* It will hardly come back: nobody looks for it all the time. */
	CHECK(by_stream() || rn_qp(a.qp)->backoff_ns > 1000000);
	expect(a.cq, 2, IBV_WC_RETRY_EXC_ERR);
	close_pair();
}

/* --- events ---------------------------------------------------------------------------------------------- */

static void take_event(struct end *end)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(readable(end->channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_get_cq_event(end->channel, &cq, &context), 0);
	CHECK(cq == end->cq && context == end);
	ibv_ack_cq_events(cq, 1);
}

static void test_arming(void)
{
	open_pair();
	for (int i = 0; i < 20; i++)
		CHECK_EQ(post_recv(&b, i, 0, 8), 0);
	CHECK_EQ(post_send(&a, 0, 0, 8), 0);
	CHECK(!readable(b.channel->fd, 0)); /* not armed */
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK(!readable(b.channel->fd, 0)); /* what is there already causes no event */
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	take_event(&b);
	CHECK(!readable(b.channel->fd, 0)); /* one an arming */
	for (int i = 0; i < 3; i++)
		expect(b.cq, i, IBV_WC_SUCCESS);

	/* Solicited: only what asks for it, and errors. */
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	CHECK(!readable(b.channel->fd, 0));
	CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SOLICITED}, 0, 8), 0);
	take_event(&b);

	/* Any outdoes solicited; solicited does not undo any. */
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	CHECK_EQ(post_send(&a, 4, 0, 8), 0);
	take_event(&b);

	/* Sends too, and errors count as solicited. */
	while (ibv_poll_cq(a.cq, 1, &(struct ibv_wc){0}))
		;
	CHECK_EQ(ibv_req_notify_cq(a.cq, 1), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK(!readable(a.channel->fd, 0));
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), 99), 0);
	take_event(&a);
	close_pair();
}

static void test_unread_event(void)
{
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	void *context;

	/* An event that is never read goes with its CQ; the channel's other CQs are not confused. */
	open_pair();
	channel = b.channel;
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK(readable(channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_destroy_comp_channel(channel), EBUSY);
	CHECK_EQ(ibv_destroy_cq(b.cq), EBUSY);
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	CHECK_EQ(ibv_destroy_cq(b.cq), 0);
	CHECK(!readable(channel->fd, 0));
	CHECK_EQ(fcntl(channel->fd, F_SETFL, O_NONBLOCK), 0);
	CHECK_EQ(ibv_get_cq_event(channel, &cq, &context), -1);
	CHECK_EQ(errno, EAGAIN);
	b.qp = NULL;
	b.cq = ibv_create_cq(b.context, 10, &b, channel, 0);
	close_pair();
}

/* That of the channel; NULL: there is none. */
static struct ibv_cq *event_of(struct ibv_comp_channel *channel)
{
	struct ibv_cq *cq;
	void *context;

	if (ibv_get_cq_event(channel, &cq, &context)) {
		CHECK_EQ(errno, EAGAIN);
		return NULL;
	}
	ibv_ack_cq_events(cq, 1);
	return cq;
}

static void test_event_of_one_of_several(void)
{
	struct ibv_qp_init_attr init = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_cq *first, *second;
	uint64_t token = 1;

	open_pair_with((struct end_options){0});
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	CHECK_EQ(ibv_destroy_cq(b.cq), 0);
	b.cq = ibv_create_cq(b.context, 10, &b, a.channel, 0);
	init.send_cq = init.recv_cq = b.cq;
	b.qp = ibv_create_qp(b.pd, &init);
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	CHECK_EQ(fcntl(a.channel->fd, F_SETFL, O_NONBLOCK), 0);

	/* Both hold a completion that they have told of. */
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	for (first = second = NULL; !second;) {
		CHECK(readable(a.channel->fd, LIMIT_MS));
		*(first ? &second : &first) = event_of(a.channel);
	}
	CHECK(first != second);

	/* A pusher has written the token for one of them, and is stopped before it can tell which: both are looked at. */
	CHECK_EQ(ibv_req_notify_cq(a.cq, 1), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	CHECK(!event_of(a.channel));
	CHECK_EQ(write(a.channel->fd, &token, sizeof(token)), sizeof(token));
	first = event_of(a.channel);
	second = event_of(a.channel);
	CHECK(first && second && first != second);
	CHECK(!event_of(a.channel));
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);

	/* Not one that holds nothing. */
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	CHECK(readable(a.channel->fd, LIMIT_MS));
	CHECK(event_of(a.channel) == a.cq);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 1), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	CHECK_EQ(write(a.channel->fd, &token, sizeof(token)), sizeof(token));
	CHECK(event_of(a.channel) == a.cq);
	CHECK(!event_of(a.channel));
	expect(a.cq, 2, IBV_WC_SUCCESS);
	close_pair();
}

static void test_comm_est(void)
{
	struct ibv_qp_attr attr;

	open_pair_with((struct end_options){0});
	connect_to(a.qp, b.qp->qp_num);
	attr = default_attr(a.qp->qp_num);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	expect_event(b.context, IBV_EVENT_COMM_EST);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	close_pair();
}

static void test_cq_overrun(void)
{
	struct ibv_wc wc;

	open_pair_with((struct end_options){.cqe = 4, .sig_all = true});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	for (int i = 0; i < 5; i++)
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 8, at_b(0), b.mr->rkey), 0);
	expect_event(a.context, IBV_EVENT_CQ_ERR);
	expect_event(a.context, IBV_EVENT_QP_FATAL);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	CHECK(ibv_poll_cq(a.cq, 1, &wc) < 0);
	close_pair();
}

/* --- states ------------------------------------------------------------------------------------------------ */

static void test_transitions(void)
{
	struct ibv_qp_attr attr;

	open_pair_with((struct end_options){0});
	attr = default_attr(b.qp->qp_num);
	CHECK_EQ(post_recv(&a, 1, 0, 8), EINVAL); /* in RESET */
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_ERR, 0), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK & ~IBV_QP_PORT), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK | IBV_QP_QKEY), EINVAL);
	attr.port_num = 2;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), EINVAL);
	attr.port_num = 1;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(a.qp->state, IBV_QPS_INIT);
	CHECK_EQ(post_recv(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, RTS_MASK), EINVAL);
	attr.ah_attr.is_global = 0;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), EINVAL);
	attr.ah_attr.is_global = 1;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), EINVAL);
	attr.max_rd_atomic = 255;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, RTS_MASK), EINVAL);
	attr.max_rd_atomic = 4;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	attr.cur_qp_state = IBV_QPS_RTR;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, IBV_QP_CUR_STATE), EINVAL);
	attr.cur_qp_state = IBV_QPS_RTS;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, IBV_QP_CUR_STATE), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), EINVAL);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_ERR, 0), 0);
	expect(a.cq, 1, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RESET);
	close_pair();
}

static void test_reset(void)
{
	struct ibv_qp_attr attr;

	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	attr = default_attr(0);
	/* Silent: completions that were not polled vanish, receives too. */
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
	expect_nothing(a.cq);
	expect_nothing(b.cq);
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	CHECK_EQ(post_recv(&b, 3, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(b.cq, 3, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	close_pair();
}

static void test_drained(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};

	open_pair();
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	expect_event(a.context, IBV_EVENT_SQ_DRAINED);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	usleep(2000);
	expect_nothing(a.cq);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

static void test_flush_order(void)
{
	struct ibv_qp_attr attr = {0};

	open_pair();
	for (int i = 0; i < 10; i++)
		CHECK_EQ(post_recv(&a, i, 0, 8), 0);
	for (int i = 20; i < 30; i++) /* nobody receives: they wait */
		CHECK_EQ(post(&a, (struct ibv_send_wr){.wr_id = i, .opcode = IBV_WR_SEND}, 0, 8), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_ERR, 0), 0);
	for (int recv = 0, send = 20; recv < 10 || send < 30;) {
		struct ibv_wc wc = poll_one(a.cq);

		CHECK_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		CHECK_EQ(wc.wr_id, wc.wr_id >= 20 ? send++ : recv++);
	}
	expect_nothing(a.cq);
	close_pair();
}

/* --- memory ------------------------------------------------------------------------------------------------- */

static void test_registration(void)
{
	struct ibv_mr *mr;
	char *memory;
	int fd;

	open_pair();
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 4096, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 4096, IBV_ACCESS_REMOTE_ATOMIC) && errno == EINVAL);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 4096, 1 << 12) && errno == EINVAL);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 0, 0) && errno == EINVAL);
	CHECK(!ibv_reg_mr(a.pd, (void *)8192, 4096, 0) && errno == EFAULT);
	memory = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!ibv_reg_mr(a.pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	CHECK((mr = ibv_reg_mr(a.pd, memory, 4096, 0)) && !ibv_dereg_mr(mr));
	munmap(memory, 4096);

	/* Device memory: sealed memfds only, within their size, same page offset as the I/O address. */
	fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK_EQ(ftruncate(fd, 8192), 0);
	CHECK(!ibv_reg_dmabuf_mr(a.pd, 0, 8192, 0, fd, 0) && errno == EINVAL);
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
	CHECK(!ibv_reg_dmabuf_mr(a.pd, 4096, 8192, 0, fd, 0) && errno == EINVAL);
	CHECK(!ibv_reg_dmabuf_mr(a.pd, 0, 4096, 1, fd, 0) && errno == EINVAL);
	CHECK((mr = ibv_reg_dmabuf_mr(a.pd, 4096, 4096, 0, fd, ALL_ACCESS)));
	memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	strcpy(memory + 4096, "at address zero");
	CHECK_EQ(post(&b,
		      (struct ibv_send_wr){.wr_id = 1,
					   .opcode = IBV_WR_RDMA_READ,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.rdma = {.remote_addr = 0, .rkey = mr->rkey}},
		      0, 16),
		 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK(!strcmp(b.buffer, "at address zero"));
	munmap(memory, 8192); /* the device has its own view of it */
	CHECK_EQ(post_rdma(&b, IBV_WR_RDMA_WRITE, 2, 0, 16, 0, mr->rkey), 0);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close(fd);
	close_pair();
}

static void test_whole_address_space(void)
{
	struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_mr *all, *own;
	char *malloced = malloc(100000);

	open_pair();
	CHECK(!ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
	CHECK(!ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE));
	all = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	CHECK(all);
	own = a.mr;
	a.mr = all;
	memset(malloced, 'm', 100000);
	CHECK_EQ(post_recv(&b, 1, 0, 100000), 0);
	CHECK_EQ(post(&a, wr, malloced - a.buffer, 100000), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.buffer, malloced, 100000));
	/* Where nothing is, that is an error of ours. */
	CHECK_EQ(post(&a, wr, (char *)4096 - a.buffer, 8), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	a.mr = own;
	CHECK_EQ(ibv_dereg_mr(all), 0);
	close_pair();
	free(malloced);
}

static void test_vouched_address_space(void)
{
	struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_mr *own, *tried, *vouched;
	char *malloced = malloc(100000);
	struct rn_counters count;

	open_pair();
	tried = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND);
	vouched = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | (int)rdmanet_soft_access_vouched);
	CHECK(tried);
	CHECK(vouched);
	/* Not for peers either. */
	CHECK(!ibv_reg_mr(a.pd, NULL, SIZE_MAX,
			  IBV_ACCESS_ON_DEMAND | IBV_ACCESS_REMOTE_READ | (int)rdmanet_soft_access_vouched));
	own = a.mr;
	memset(malloced, 'v', 100000);
	for (int tries = 0; tries < 2; tries++) {
		a.mr = tries ? tried : vouched;
		memset(b.buffer, 0, 100000);
		CHECK_EQ(post_recv(&b, 1, 0, 100000), 0);
		CHECK_EQ(post(&a, wr, malloced - a.buffer, 100000), 0);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		expect(b.cq, 1, IBV_WC_SUCCESS);
		CHECK(!memcmp(b.buffer, malloced, 100000));
		count = counted(&a);
		if (!by_stream())
			CHECK_EQ(count.syscalls, (uint64_t)tries); /* the one that tried the range first */
	}
	a.mr = own;
	CHECK_EQ(ibv_dereg_mr(tried), 0);
	CHECK_EQ(ibv_dereg_mr(vouched), 0);
	close_pair();
	free(malloced);
}

static void test_counters(void)
{
	struct rn_counters count, qp;

	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 1000, at_b(0), b.mr->rkey), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	qp = counted(&a);
	CHECK_EQ(qp.send_wrs, 2);
	if (!by_stream()) { /* which isn't acknowledged yet, perhaps */
		CHECK_EQ(qp.bytes_local, 1064);
		CHECK_EQ(qp.syscalls, 0);
	}
	ibv_destroy_qp(a.qp);
	a.qp = NULL;
	CHECK_EQ(rdmanet_soft_counters(a.context, &count), 0);
	CHECK_EQ(count.send_wrs, 2);
	CHECK_EQ(count.recv_wrs, 1);
	CHECK_EQ(count.completions, 1);
	CHECK_EQ(count.bytes_local, by_stream() ? 0 : 1064);
	close_pair();
}

static void test_close_with_children(void)
{
	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	CHECK_EQ(ibv_close_device(a.context), 0);
	munmap(a.buffer, BUFFER);
	munmap(b.buffer, BUFFER);
	expect_live_nothing();
}

static void test_many_objects(void)
{
	enum { COUNT = 600 };
	static struct ibv_qp *qps[COUNT];
	struct ibv_qp_init_attr init = {.cap = {1, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};

	open_pair();
	init.send_cq = init.recv_cq = a.cq;
	/* Beyond one port's 256 numbers, and beyond the first line of the CQ's bits. */
	for (int i = 0; i < COUNT; i++) {
		CHECK(qps[i] = ibv_create_qp(a.pd, &init));
		CHECK(i == 0 || qps[i]->qp_num != qps[i - 1]->qp_num);
		connect_to(qps[i], qps[i]->qp_num);
	}
	for (int i = 0; i < COUNT; i++) {
		struct ibv_recv_wr recv = {.wr_id = i}, *bad_recv;
		struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *bad;

		CHECK_EQ(ibv_post_recv(qps[i], &recv, &bad_recv), 0);
		CHECK_EQ(ibv_post_send(qps[i], &send, &bad), 0);
	}
	for (int i = 0; i < COUNT; i++)
		CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	for (int i = 0; i < COUNT; i++)
		CHECK_EQ(ibv_destroy_qp(qps[i]), 0);
	close_pair();
}

static void test_not_in_this_version(void)
{
	struct ibv_qp_init_attr init = {.cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RAW_PACKET};

	open_pair();
	init.send_cq = init.recv_cq = a.cq;
	CHECK(!ibv_create_qp(a.pd, &init) && errno == EOPNOTSUPP);
	close_pair();
}

int main(void)
{
	RUN(test_send);
	RUN(test_send_with_imm);
	RUN(test_scatter_gather);
	RUN(test_rdma);
	RUN(test_write_with_imm);
	RUN(test_atomics);
	RUN(test_inline);
	RUN(test_loopback);
	RUN(test_send_queue_accounting);
	RUN(test_recv_queue_full);
	RUN(test_bad_requests);
	RUN(test_many_messages);
	RUN(test_access_errors);
	RUN(test_deregistered_key);
	RUN(test_local_errors);
	RUN(test_receive_errors);
	RUN(test_rnr);
	RUN(test_peer_not_there);
	RUN(test_arming);
	RUN(test_unread_event);
	RUN(test_event_of_one_of_several);
	RUN(test_comm_est);
	RUN(test_cq_overrun);
	RUN(test_transitions);
	RUN(test_reset);
	RUN(test_drained);
	RUN(test_flush_order);
	RUN(test_registration);
	RUN(test_whole_address_space);
	RUN(test_vouched_address_space);
	RUN(test_counters);
	RUN(test_close_with_children);
	RUN(test_many_objects);
	RUN(test_not_in_this_version);
	expect_live_nothing();
	return 0;
}
