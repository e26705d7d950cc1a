/* SPDX-License-Identifier: Apache-2.0 */
/* The less travelled paths of the device, within one process. */
#include "pair.h"

/* --- execution ----------------------------------------------------------------------------------------- */

static int post_atomic(uint64_t remote, uint32_t rkey, uint32_t length)
{
	return post(&a,
		    (struct ibv_send_wr){.wr_id = 1,
					 .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					 .send_flags = IBV_SEND_SIGNALED,
					 .wr.atomic = {.remote_addr = remote, .rkey = rkey, .compare_add = 1}},
		    0, length);
}

static void test_atomic_errors(void)
{
	struct ibv_qp_attr attr;
	struct ibv_mr *mr;

	open_pair();
	CHECK_EQ(post_atomic(at_b(0), b.mr->rkey, 4), 0);
	expect(a.cq, 1, IBV_WC_LOC_LEN_ERR);
	close_pair();

	open_pair();
	CHECK_EQ(post_atomic(at_b(0), b.mr->rkey ^ 0x100, 8), 0);
	expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
	close_pair();

	/* Aligned as an I/O address, not in memory. */
	open_pair();
	mr = ibv_reg_mr_iova2(b.pd, b.buffer + 4, 64, 0x10000, ALL_ACCESS);
	CHECK(mr);
	CHECK_EQ(post_atomic(0x10000, mr->rkey, 8), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();

	/* The other way round. */
	open_pair();
	mr = ibv_reg_mr_iova2(b.pd, b.buffer, 64, 0x10004, ALL_ACCESS);
	CHECK(mr);
	CHECK_EQ(post_atomic(0x10004, mr->rkey, 8), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();

	/* What was refused has no place in memory; least of all the last one's, which was not aligned. */
	open_pair();
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(4), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_atomic(at_b(0), b.mr->rkey ^ 0x100, 8), 0);
	expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
	close_pair();

	/* A requester that may have none on its way. */
	open_pair_with((struct end_options){0});
	connect_to(b.qp, a.qp->qp_num);
	attr = default_attr(b.qp->qp_num);
	attr.max_rd_atomic = 0;
	connect_with(a.qp, attr);
	CHECK_EQ(post_atomic(at_b(0), b.mr->rkey, 8), 0);
	expect(a.cq, 1, IBV_WC_LOC_QP_OP_ERR);
	close_pair();
}

static void test_iova(void)
{
	struct ibv_mr *mr;

	open_pair();
	mr = ibv_reg_mr_iova(b.pd, b.buffer + 100, 50, 0x7000000000000000, ALL_ACCESS);
	CHECK(mr);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 50, 0x7000000000000000, mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(b.buffer[99] == 'b' && b.buffer[100] == 'a' && b.buffer[149] == 'a' && b.buffer[150] == 'b');
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 51, 0x7000000000000000, mr->rkey), 0);
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();

	open_pair();
	mr = ibv_reg_mr(b.pd, b.buffer, 50, ALL_ACCESS | IBV_ACCESS_ZERO_BASED);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 50, 0, mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
}

/* Entries without length are skipped, whatever else they say. */
static void test_empty_entries(void)
{
	struct ibv_sge from[3], to[3];
	struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = to, .num_sge = 3}, *bad_recv;
	struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .sg_list = from, .num_sge = 3}, *bad;

	open_pair();
	from[0] = to[1] = (struct ibv_sge){.addr = 1, .lkey = 2};
	from[1] = sge_of(&a, 0, 10);
	from[2] = sge_of(&a, 10, 20);
	to[0] = sge_of(&b, 0, 15);
	to[2] = sge_of(&b, 100, 15);
	CHECK_EQ(ibv_post_recv(b.qp, &recv, &bad_recv), 0);
	CHECK_EQ(ibv_post_send(a.qp, &send, &bad), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK(b.buffer[14] == 'a' && b.buffer[15] == 'b' && b.buffer[114] == 'a' && b.buffer[115] == 'b');
	close_pair();
}

static void test_own_address_space_receives(void)
{
	char *memory = calloc(1, 5000);
	struct ibv_mr *all, *own;

	open_pair();
	all = ibv_reg_mr(b.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	own = b.mr;
	b.mr = all;
	CHECK_EQ(post_recv(&b, 1, memory - b.buffer, 5000), 0);
	CHECK_EQ(post_recv(&b, 2, (char *)8192 - b.buffer, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 5000), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK(memory[0] == 'a' && memory[4999] == 'a');
	CHECK_EQ(post_send(&a, 2, 0, 64), 0);
	expect(a.cq, 2, IBV_WC_REM_OP_ERR);
	expect(b.cq, 2, IBV_WC_LOC_PROT_ERR);
	b.mr = own;
	CHECK_EQ(ibv_dereg_mr(all), 0);
	close_pair();
	free(memory);
}

/* A region may have holes, if it was registered so; others can't. */
static void test_on_demand_region(void)
{
	char *memory = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	munmap(memory + 4096, 4096);
	open_pair();
	CHECK(!ibv_reg_mr(b.pd, memory, 3 * 4096, ALL_ACCESS) && errno == EFAULT);
	mr = ibv_reg_mr(b.pd, memory, 3 * 4096, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
	CHECK(mr);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 4096, (uintptr_t)memory + 8192, mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 8192, (uintptr_t)memory, mr->rkey), 0);
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
	for (int is_read = 0; is_read < 2; is_read++) {
		for (uint32_t length = 8; length <= 8192; length *= 1024) {
			open_pair();
			mr = ibv_reg_mr(b.pd, memory, 3 * 4096, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
			CHECK(mr);
			CHECK_EQ(post_rdma(&a, is_read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 1, 0, length,
					   (uintptr_t)memory + 4096, mr->rkey), 0);
			expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
			CHECK_EQ(ibv_dereg_mr(mr), 0);
			close_pair();
		}
	}
	munmap(memory, 3 * 4096);
}

/* The buffer of a posted receive is deregistered. */
static void test_receive_buffer_gone(void)
{
	struct ibv_mr *mr, *own;

	open_pair();
	own = b.mr;
	mr = b.mr = ibv_reg_mr(b.pd, b.buffer, 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK_EQ(post_recv(&b, 1, 0, 64), 0);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	b.mr = own;
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_REM_OP_ERR);
	expect(b.cq, 1, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(b.buffer[0], 'b');
	close_pair();
}

/* Regions of one file share what is mapped, and keep it as long as one of them is left. */
static void test_two_regions_of_a_file(void)
{
	struct ibv_mr *first, *second;
	struct rn_live live;
	int fd;

	open_pair();
	fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK_EQ(ftruncate(fd, 8192), 0);
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
	first = ibv_reg_dmabuf_mr(b.pd, 0, 4096, 0, fd, ALL_ACCESS);
	second = ibv_reg_dmabuf_mr(b.pd, 4096, 4096, 0, fd, ALL_ACCESS);
	CHECK(first && second);
	close(fd);
	rdmanet_soft_live(&live);
	CHECK_EQ(live.mappings, 4); /* arena, a's, b's, this one */
	CHECK_EQ(ibv_dereg_mr(first), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 4096, 0, second->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(second), 0);
	close_pair();
}

/* --- the queue ---------------------------------------------------------------------------------------------- */

/* Nobody receives: sends wait in the queue, with copies of what they need. */
static void test_long_wait(void)
{
	struct ibv_qp_attr attr;
	char data[64];

	open_pair_with((struct end_options){.cqe = 1024});
	connect_to(a.qp, b.qp->qp_num);
	attr = default_attr(a.qp->qp_num);
	attr.min_rnr_timer = 20; /* 10 ms */
	connect_with(b.qp, attr);
	for (int i = 0; i < 50; i++) {
		struct ibv_sge sge = {.addr = (uintptr_t)data, .length = 32};
		struct ibv_sge parts[2] = {sge, {.addr = (uintptr_t)data + 32, .length = 32}};
		struct ibv_send_wr wr = {.wr_id = i,
					 .sg_list = parts,
					 .num_sge = 2,
					 .opcode = IBV_WR_SEND,
					 .send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED},
				   *bad;

		memset(data, i, sizeof(data));
		CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	}
	memset(data, 'x', sizeof(data));
	expect_nothing(a.cq);
	for (int i = 0; i < 50; i++)
		CHECK_EQ(post_recv(&b, i, i * 64, 64), 0);
	for (int i = 0; i < 50; i++) {
		expect(a.cq, i, IBV_WC_SUCCESS);
		expect(b.cq, i, IBV_WC_SUCCESS);
		CHECK(b.buffer[i * 64] == i && b.buffer[i * 64 + 63] == i);
	}
	/* Empty again: executed at once. */
	CHECK_EQ(post_recv(&b, 50, 0, 64), 0);
	CHECK_EQ(post_send(&a, 50, 0, 64), 0);
	if (by_stream())
		expect(a.cq, 50, IBV_WC_SUCCESS);
	else
		CHECK_EQ(ibv_poll_cq(a.cq, 1, &(struct ibv_wc){0}), 1);
	close_pair();
}

/* What was tried before a reset does not count. */
static void test_tries_after_a_reset(void)
{
	struct ibv_qp_attr attr;
	struct rn_counters before, count;

	open_pair_with((struct end_options){0});
	attr = default_attr(a.qp->qp_num);
	attr.min_rnr_timer = 0; /* 655 ms */
	connect_with(b.qp, attr);
	attr = default_attr(b.qp->qp_num);
	attr.rnr_retry = 6;
	connect_with(a.qp, attr);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	EVENTUALLY(!rdmanet_soft_qp_counters(a.qp, &count) && count.rnr_naks);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
	before = counted(&a);
	connect_to(b.qp, a.qp->qp_num);
	attr.rnr_retry = 1;
	connect_with(a.qp, attr);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_RNR_RETRY_EXC_ERR);
	count = counted(&a);
	CHECK_EQ(count.rnr_naks - before.rnr_naks, 2);
	close_pair();
}

/* Draining waits for a request that waits for a receive, however often it is tried again, and for no other. */
static void test_drained_behind_a_wait(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};
	struct rn_counters count;

	open_pair();
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	EVENTUALLY(!rdmanet_soft_qp_counters(a.qp, &count) && count.rnr_naks);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK(!readable(a.context->async_fd, 0));
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 3, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 4, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 3, IBV_WC_SUCCESS);
	expect_event(a.context, IBV_EVENT_SQ_DRAINED);
	expect_nothing(a.cq);
	expect_nothing(b.cq);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(b.cq, 4, IBV_WC_SUCCESS);
	CHECK(!readable(a.context->async_fd, 0)); /* once */
	close_pair();
}

static void test_write_with_imm_waits(void)
{
	open_pair();
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = 1,
					   .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.rdma = {.remote_addr = at_b(0), .rkey = b.mr->rkey}},
		      0, 8),
		 0);
	usleep(1000);
	expect_nothing(a.cq);
	CHECK_EQ(post_recv(&b, 2, 0, 0), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	close_pair();
}

static void test_short_timeout(void)
{
	struct ibv_qp_attr attr;
	uint64_t began;

	open_pair_with((struct end_options){0});
	attr = default_attr(b.qp->qp_num);
	attr.timeout = 1; /* 8 us: taken as what adapters can do */
	attr.retry_cnt = 0;
	connect_with(a.qp, attr);
	began = now_ns();
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(now_ns() - began > 1000000);
	close_pair();

	/* 0: for ever. */
	open_pair_with((struct end_options){0});
	attr = default_attr(b.qp->qp_num);
	attr.timeout = 0;
	attr.retry_cnt = 0;
	connect_with(a.qp, attr);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	usleep(50000);
	expect_nothing(a.cq);
	connect_to(b.qp, a.qp->qp_num);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

/* --- completion queues --------------------------------------------------------------------------------------- */

static void test_resize(void)
{
	open_pair();
	for (int i = 0; i < 40; i++)
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 8, at_b(0), b.mr->rkey), 0);
	for (int i = 0; i < 10; i++)
		expect(a.cq, i, IBV_WC_SUCCESS);
	if (!by_stream()) /* by stream some may still be on their way */
		CHECK_EQ(ibv_resize_cq(a.cq, 16), EINVAL); /* thirty are in it */
	CHECK_EQ(ibv_resize_cq(a.cq, 0), EINVAL);
	CHECK_EQ(ibv_resize_cq(a.cq, 32), 0);
	CHECK_EQ(a.cq->cqe, 32);
	for (int i = 10; i < 40; i++)
		expect(a.cq, i, IBV_WC_SUCCESS);
	expect_nothing(a.cq);
	close_pair();
}

/* Two queue pairs, one CQ: what goes with one leaves the other's completions alone. */
static void test_purge(void)
{
	struct ibv_qp_init_attr init = {.cap = {16, 16, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct end c;

	open_pair();
	c = a;
	init.send_cq = init.recv_cq = a.cq;
	c.qp = ibv_create_qp(a.pd, &init);
	connect_to(c.qp, c.qp->qp_num);
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 10 + i, 0, 8, at_b(0), b.mr->rkey), 0);
		CHECK_EQ(post_recv(&c, 20 + i, 64, 8), 0);
		CHECK_EQ(post_send(&c, 30 + i, 128, 8), 0);
	}
	CHECK_EQ(ibv_destroy_qp(c.qp), 0);
	for (int i = 0; i < 4; i++)
		expect(a.cq, 10 + i, IBV_WC_SUCCESS);
	expect_nothing(a.cq);
	close_pair();
}

/* A CQ without a channel may be armed; nothing comes of it. Bad arguments are refused. */
static void test_plain_cq(void)
{
	struct ibv_cq *cq;

	open_pair();
	CHECK(!ibv_create_cq(a.context, 0, NULL, NULL, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(a.context, 1, NULL, NULL, 1) && errno == EINVAL);
	CHECK(cq = ibv_create_cq(a.context, 1, NULL, NULL, 0));
	CHECK_EQ(ibv_req_notify_cq(cq, 0), 0);
	CHECK_EQ(ibv_poll_cq(cq, 0, NULL), 0);
	CHECK(ibv_poll_cq(cq, -1, NULL) < 0);
	CHECK_EQ(ibv_destroy_cq(cq), 0);
	close_pair();
}

/* --- device ----------------------------------------------------------------------------------------------------- */

static void test_queries(void)
{
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	struct ibv_gid_entry entries[32];
	ssize_t count;
	union ibv_gid gid;
	char compat[64];
	__be16 pkey;

	open_pair();
	CHECK_EQ(ibv_query_device(a.context, &device), 0);
	CHECK(device.max_qp > 0 && device.phys_port_cnt == 1);
	/* The exported function knows 48 bytes, and not one more. */
	memset(compat, 0x55, sizeof(compat));
	CHECK_EQ((ibv_query_port)(a.context, 1, (void *)compat), 0);
	for (int i = 48; i < 64; i++)
		CHECK_EQ(compat[i], 0x55);
	CHECK_EQ(verbs_get_ctx(a.context)->query_port(a.context, 1, &port, sizeof(port)), 0);
	CHECK_EQ(port.state, IBV_PORT_ACTIVE);
	CHECK_EQ(port.flags, IBV_QPF_GRH_REQUIRED);
	CHECK_EQ(verbs_get_ctx(a.context)->query_port(a.context, 2, &port, sizeof(port)), EINVAL);
	CHECK_EQ(ibv_query_gid(a.context, 1, 0, &gid), 0);
	/* Which addresses there are is the host's affair, but loopback's are the last. */
	count = _ibv_query_gid_table(a.context, entries, 32, 0, sizeof(entries[0]));
	CHECK(count >= 1 && count <= 32);
	CHECK(!memcmp(&gid, &entries[0].gid, sizeof(gid)));
	CHECK_EQ(entries[count - 1].gid.raw[15], 1);
	CHECK_EQ(_ibv_query_gid_table(a.context, entries, count - 1, 0, sizeof(entries[0])), -EINVAL);
	CHECK_EQ(ibv_query_gid(a.context, 1, port.gid_tbl_len, &gid), -1);
	CHECK_EQ(ibv_query_pkey(a.context, 1, 0, &pkey), 0);
	CHECK_EQ(ibv_get_pkey_index(a.context, 1, pkey), 0);
	CHECK(!strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success"));
	CHECK(ibv_wc_status_str(999) && ibv_event_type_str(999));
	close_pair();
}

int main(void)
{
	RUN(test_atomic_errors);
	RUN(test_iova);
	RUN(test_empty_entries);
	RUN(test_own_address_space_receives);
	RUN(test_on_demand_region);
	RUN(test_receive_buffer_gone);
	RUN(test_two_regions_of_a_file);
	RUN(test_long_wait);
	RUN(test_tries_after_a_reset);
	RUN(test_drained_behind_a_wait);
	RUN(test_write_with_imm_waits);
	RUN(test_short_timeout);
	RUN(test_resize);
	RUN(test_purge);
	RUN(test_plain_cq);
	RUN(test_queries);
	expect_live_nothing();
	return 0;
}
