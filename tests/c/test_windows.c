/* SPDX-License-Identifier: Apache-2.0 */
/* Memory windows of both types, and their invalidation from here and from there. */
#include "pair.h"

#include "calm.h"
#include "objects/qp.h"
#include "processes.h"

enum { WRITE_READ = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static uint32_t next_key(uint32_t rkey)
{
	return (rkey & ~0xffu) | ((rkey + 1) & 0xff);
}

static struct ibv_mw_bind_info part_of(struct end *end, size_t offset, uint64_t length, unsigned access)
{
	return (struct ibv_mw_bind_info){
		.mr = end->mr,
		.addr = (uintptr_t)end->buffer + offset,
		.length = length,
		.mw_access_flags = access,
	};
}

static struct ibv_mw *alloc(struct end *end, enum ibv_mw_type type)
{
	struct ibv_mw *mw = ibv_alloc_mw(end->pd, type);

	CHECK(mw && mw->type == type && mw->pd == end->pd);
	return mw;
}

static void bind_type_1(struct end *end, struct ibv_mw *mw, struct ibv_mw_bind_info info, enum ibv_wc_status status)
{
	struct ibv_mw_bind bind = {.wr_id = 31, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
	uint32_t before = mw->rkey;
	struct ibv_wc wc;

	CHECK_EQ(ibv_bind_mw(end->qp, mw, &bind), 0);
	CHECK(mw->rkey != before && mw->rkey >> 8 == before >> 8);
	wc = poll_one(end->cq);
	CHECK_EQ(wc.wr_id, 31);
	CHECK_EQ(wc.status, status);
	if (!status)
		CHECK_EQ(wc.opcode, IBV_WC_BIND_MW);
}

/* The key that it has then. */
static uint32_t bind_type_2(struct end *end, struct ibv_mw *mw, struct ibv_mw_bind_info info, enum ibv_wc_status status)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = 32,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_mw = {.mw = mw, .rkey = mw->rkey = next_key(mw->rkey), .bind_info = info},
	};
	struct ibv_wc wc;

	CHECK_EQ(ibv_post_send(end->qp, &wr, &bad), 0);
	wc = poll_one(end->cq);
	CHECK_EQ(wc.wr_id, 32);
	CHECK_EQ(wc.status, status);
	return mw->rkey;
}

static void invalidate(struct end *end, uint32_t rkey, enum ibv_wc_status status)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = 33, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey};
	struct ibv_wc wc;

	CHECK_EQ(ibv_post_send(end->qp, &wr, &bad), 0);
	wc = poll_one(end->cq);
	CHECK_EQ(wc.wr_id, 33);
	CHECK_EQ(wc.status, status);
	if (!status)
		CHECK_EQ(wc.opcode, IBV_WC_LOCAL_INV);
}

static void write_to(uint64_t addr, uint32_t rkey, uint32_t length, enum ibv_wc_status status)
{
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, length, addr, rkey), 0);
	expect(a.cq, 1, status);
}

/* Both ends anew, after an error. */
static void mend(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
	struct ibv_async_event event;

	while (readable(a.context->async_fd, 20)) { /* the owner's engine tells it of the fault first */
		CHECK_EQ(ibv_get_async_event(a.context, &event), 0);
		ibv_ack_async_event(&event);
	}
	CHECK_EQ(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), 0);
	CHECK_EQ(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
}

static void test_type_1(void)
{
	struct ibv_mw *mw;
	uint32_t old;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_1);
	write_to(at_b(1000), mw->rkey, 8, IBV_WC_REM_ACCESS_ERR); /* not bound yet */
	mend();
	bind_type_1(&b, mw, part_of(&b, 1000, 100, WRITE_READ), IBV_WC_SUCCESS);
	write_to(at_b(1000), mw->rkey, 100, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.buffer + 1000, a.buffer, 100));
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 50, at_b(1050), mw->rkey), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	write_to(at_b(999), mw->rkey, 8, IBV_WC_REM_ACCESS_ERR);
	mend();
	write_to(at_b(1093), mw->rkey, 8, IBV_WC_REM_ACCESS_ERR);
	mend();

	/* Another part, with another key; the old one is dead. */
	old = mw->rkey;
	bind_type_1(&b, mw, part_of(&b, 2000, 100, IBV_ACCESS_REMOTE_WRITE), IBV_WC_SUCCESS);
	write_to(at_b(2000), mw->rkey, 8, IBV_WC_SUCCESS);
	write_to(at_b(1000), old, 8, IBV_WC_REM_ACCESS_ERR);
	mend();
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 8, at_b(2000), mw->rkey), 0); /* no right to read */
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	mend();

	/* Nothing. */
	bind_type_1(&b, mw, (struct ibv_mw_bind_info){0}, IBV_WC_SUCCESS);
	write_to(at_b(2000), mw->rkey, 8, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

static void test_type_2(void)
{
	struct ibv_mw *mw;
	uint32_t rkey;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_2);
	rkey = bind_type_2(&b, mw, part_of(&b, 1000, 100, WRITE_READ), IBV_WC_SUCCESS);
	write_to(at_b(1000), rkey, 100, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.buffer + 1000, a.buffer, 100));
	invalidate(&b, rkey, IBV_WC_SUCCESS);
	write_to(at_b(1000), rkey, 100, IBV_WC_REM_ACCESS_ERR);
	mend();

	/* Bound again, from zero. */
	rkey = bind_type_2(&b, mw, part_of(&b, 3000, 100, WRITE_READ | IBV_ACCESS_ZERO_BASED), IBV_WC_SUCCESS);
	write_to(10, rkey, 8, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.buffer + 3010, a.buffer, 8));
	bind_type_2(&b, mw, part_of(&b, 3000, 100, WRITE_READ), IBV_WC_MW_BIND_ERR); /* while it is bound */
	CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* A window of type 2 is for its queue pair, one of type 1 for all of its PD. */
static void test_other_queue_pair(void)
{
	struct end c, d;
	struct ibv_mw *one, *two;

	open_pair();
	end_open(&c, &(struct end_options){.share = &a});
	end_open(&d, &(struct end_options){.share = &a});
	connect_to(c.qp, d.qp->qp_num);
	connect_to(d.qp, c.qp->qp_num);
	one = alloc(&b, IBV_MW_TYPE_1);
	two = alloc(&b, IBV_MW_TYPE_2);
	bind_type_1(&b, one, part_of(&b, 0, 100, WRITE_READ), IBV_WC_SUCCESS);
	bind_type_2(&b, two, part_of(&b, 0, 100, WRITE_READ), IBV_WC_SUCCESS);
	write_to(at_b(0), one->rkey, 8, IBV_WC_SUCCESS);
	write_to(at_b(0), two->rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&c, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), one->rkey), 0);
	expect(c.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&c, IBV_WR_RDMA_WRITE, 2, 0, 8, at_b(0), two->rkey), 0);
	expect(c.cq, 2, IBV_WC_REM_ACCESS_ERR);
	/* Nor may another queue pair of its owner invalidate it. */
	invalidate(&a, two->rkey, IBV_WC_MW_BIND_ERR);
	end_close(&d);
	end_close(&c);
	CHECK_EQ(ibv_dealloc_mw(one), 0);
	CHECK_EQ(ibv_dealloc_mw(two), 0);
	close_pair();
}

static void test_bad_binds(void)
{
	char *buffer = b.buffer;
	struct ibv_mr *unbindable, *read_only;
	struct ibv_mw_bind bind = {0};
	struct ibv_mw *mw;

	open_pair();
	buffer = b.buffer;
	unbindable = ibv_reg_mr(b.pd, buffer, 100, IBV_ACCESS_LOCAL_WRITE | WRITE_READ);
	read_only = ibv_reg_mr(b.pd, buffer, 100, IBV_ACCESS_MW_BIND);
	CHECK(unbindable && read_only);
	for (int bad = 0; bad < 7; bad++) {
		struct ibv_mw_bind_info info = part_of(&b, 0, 50, WRITE_READ);

		mw = alloc(&b, IBV_MW_TYPE_2);
		switch (bad) {
		case 0:
			info.mr = unbindable;
			break;
		case 1:
			info.mr = read_only; /* what a peer may write, its owner must be allowed to */
			break;
		case 2:
			info.length = BUFFER + 1;
			break;
		case 3:
			info.addr--;
			break;
		case 4:
			info.mw_access_flags |= IBV_ACCESS_MW_BIND;
			break;
		case 5:
			info.length = 0;
			break;
		case 6:
			mw->rkey = a.mr->rkey - 1; /* the key of something else */
			break;
		}
		bind_type_2(&b, mw, info, IBV_WC_MW_BIND_ERR);
		CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
		CHECK_EQ(ibv_dealloc_mw(mw), 0);
		mend();
	}
	/* Refused at once. */
	mw = alloc(&b, IBV_MW_TYPE_1);
	bind.bind_info.length = 8;
	CHECK_EQ(ibv_bind_mw(b.qp, mw, &bind), EINVAL);
	bind.bind_info = part_of(&b, 0, 50, WRITE_READ | IBV_ACCESS_ZERO_BASED);
	CHECK_EQ(ibv_bind_mw(b.qp, mw, &bind), EINVAL);
	CHECK(!ibv_alloc_mw(b.pd, 3) && errno == EINVAL);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	CHECK_EQ(ibv_dereg_mr(unbindable), 0);
	CHECK_EQ(ibv_dereg_mr(read_only), 0);
	close_pair();
}

/* Regions and their keys can't be invalidated, nor can what isn't valid. */
static void test_bad_invalidations(void)
{
	open_pair();
	invalidate(&b, b.mr->rkey, IBV_WC_MW_BIND_ERR);
	mend();
	invalidate(&b, 0, IBV_WC_MW_BIND_ERR);
	mend();
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(post_recv(&b, 1, 0, 100), 0);
		CHECK_EQ(post(&a,
			      (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_INV,
						   .wr_id = 2,
						   .invalidate_rkey = i ? b.mr->rkey : 77},
			      0, 8),
			 0);
		expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
		expect(b.cq, 1, IBV_WC_WR_FLUSH_ERR);
		expect_event(b.context, IBV_EVENT_QP_ACCESS_ERR);
		mend();
	}
	close_pair();
}

static void send_with_inv(uint64_t wr_id, uint32_t rkey)
{
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_INV,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr_id = wr_id,
					   .invalidate_rkey = rkey},
		      0, 8),
		 0);
	expect(a.cq, wr_id, IBV_WC_SUCCESS);
}

static void test_send_with_inv(void)
{
	struct ibv_mw *mw;
	struct ibv_wc wc;
	uint32_t rkey;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_2);
	for (int round = 0; round < 3; round++) {
		rkey = bind_type_2(&b, mw, part_of(&b, 1000, 100, WRITE_READ), IBV_WC_SUCCESS);
		CHECK_EQ(ibv_dereg_mr(b.mr), EBUSY);
		write_to(at_b(1000), rkey, 100, IBV_WC_SUCCESS);
		CHECK_EQ(post_recv(&b, 5, 0, 100), 0);
		send_with_inv(6, rkey);
		wc = poll_one(b.cq);
		CHECK_EQ(wc.opcode, IBV_WC_RECV);
		CHECK_EQ(wc.byte_len, 8);
		CHECK_EQ(wc.wc_flags, IBV_WC_WITH_INV);
		CHECK_EQ(wc.invalidated_rkey, rkey);
	}
	write_to(at_b(1000), rkey, 100, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* What a window is bound to stays; and a window can go while it is bound. */
static void test_busy(void)
{
	struct ibv_pd *pd;
	struct ibv_mw *mw;
	uint32_t rkey;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_1);
	CHECK_EQ(ibv_dealloc_pd(b.pd), EBUSY);
	bind_type_1(&b, mw, part_of(&b, 0, 100, WRITE_READ), IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(b.mr), EBUSY);
	rkey = mw->rkey;
	write_to(at_b(0), rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	CHECK_EQ(ibv_dereg_mr(b.mr), 0);
	b.mr = NULL;
	write_to(at_b(0), rkey, 8, IBV_WC_REM_ACCESS_ERR);
	pd = ibv_alloc_pd(b.context);
	mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	CHECK_EQ(ibv_dealloc_pd(pd), EBUSY);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	CHECK_EQ(ibv_dealloc_pd(pd), 0);
	close_pair();
}

/* A window goes with the queue pair that it was bound to; closing the device takes what is left. */
static void test_left_behind(void)
{
	struct end c = {0};
	struct ibv_mw *mw;

	end_open(&c, &(struct end_options){0});
	connect_to(c.qp, c.qp->qp_num);
	mw = alloc(&c, IBV_MW_TYPE_2);
	bind_type_2(&c, mw, part_of(&c, 0, 100, WRITE_READ), IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dereg_mr(c.mr), EBUSY);
	CHECK_EQ(ibv_destroy_qp(c.qp), 0);
	CHECK_EQ(ibv_dereg_mr(c.mr), 0);
	CHECK_EQ(ibv_close_device(c.context), 0);
	munmap(c.buffer, BUFFER);
	expect_live_nothing();
}

/* A window's key is no lkey. */
static void test_not_for_local_use(void)
{
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_RDMA_WRITE, .wr_id = 9, .num_sge = 1};
	struct ibv_recv_wr *bad_recv, recv_wr = {.wr_id = 10, .num_sge = 1};
	struct ibv_sge sge;
	struct ibv_mw *mw;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_1);
	bind_type_1(&b, mw, part_of(&b, 0, 100, WRITE_READ | IBV_ACCESS_LOCAL_WRITE), IBV_WC_SUCCESS);
	sge = (struct ibv_sge){.addr = (uintptr_t)b.buffer, .length = 8, .lkey = mw->rkey};
	wr.sg_list = recv_wr.sg_list = &sge;
	CHECK_EQ(ibv_post_recv(b.qp, &recv_wr, &bad_recv), 0);
	CHECK_EQ(post_send(&a, 11, 0, 8), 0);
	expect(b.cq, 10, IBV_WC_LOC_PROT_ERR);
	expect(a.cq, 11, IBV_WC_REM_OP_ERR);
	mend();
	wr.wr.rdma.rkey = a.mr->rkey;
	wr.wr.rdma.remote_addr = (uintptr_t)a.buffer;
	CHECK_EQ(ibv_post_send(b.qp, &wr, &bad), 0);
	expect(b.cq, 9, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* In the queue, behind a send that has to wait. The region is named by address, so it must be kept otherwise. */
static void queued(unsigned flags)
{
	struct ibv_mw_bind_info info;
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_BIND_MW, .wr_id = 2, .send_flags = IBV_SEND_SIGNALED | flags};
	struct ibv_mw *mw;
	struct ibv_mr copy;

	open_pair();
	mw = alloc(&b, IBV_MW_TYPE_2);
	copy = *b.mr;
	info = part_of(&b, 1000, 100, WRITE_READ);
	info.mr = &copy;
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = next_key(mw->rkey);
	wr.bind_mw.bind_info = info;
	CHECK_EQ(post_send(&b, 1, 0, 8), 0); /* no receive there */
	CHECK_EQ(ibv_post_send(b.qp, &wr, &bad), 0);
	memset(&copy, 0xff, sizeof(copy));
	expect_nothing(b.cq);
	CHECK_EQ(post_recv(&a, 3, 0, 100), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	write_to(at_b(1000), wr.bind_mw.rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

static void test_queued(void)
{
	queued(0);
	queued(IBV_SEND_INLINE); /* which means nothing here */
}

static void post_bind(struct end *end, uint64_t wr_id, struct ibv_mw *mw)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_mw = {.mw = mw, .rkey = mw->rkey = next_key(mw->rkey), .bind_info = part_of(end, 1000, 100, WRITE_READ)},
	};

	CHECK_EQ(ibv_post_send(end->qp, &wr, &bad), 0);
}

static void post_invalidation(struct end *end, uint64_t wr_id, uint32_t rkey)
{
	struct ibv_send_wr *bad, wr = {
		.wr_id = wr_id, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey};

	CHECK_EQ(ibv_post_send(end->qp, &wr, &bad), 0);
}

/* Between sends to and fro: all in order, and each counted once. */
static void test_in_between(void)
{
	enum { ROUNDS = 100 };
	struct ibv_mw *mw;

	open_pair();
	mw = alloc(&a, IBV_MW_TYPE_2);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		int sends = 2 + (round % 2 != 0) + (round % 3 == 0);
		uint64_t got;

		for (int i = 0; i < sends; i++)
			CHECK_EQ(post_recv(&b, i, 100 + i * sizeof(round), sizeof(round)), 0);
		CHECK_EQ(post_recv(&a, 9, 100, sizeof(round)), 0);
		memcpy(a.buffer, &round, sizeof(round));
		CHECK_EQ(post_send(&a, 1, 0, sizeof(round)), 0);
		post_bind(&a, 2, mw);
		if (round % 2)
			CHECK_EQ(post_send(&a, 3, 0, sizeof(round)), 0);
		post_invalidation(&a, 4, mw->rkey);
		CHECK_EQ(post_send(&a, 5, 0, sizeof(round)), 0);
		if (round % 3 == 0)
			CHECK_EQ(post_send(&a, 6, 0, sizeof(round)), 0);
		for (int id = 1; id <= 6; id++)
			if ((id != 3 || round % 2) && (id != 6 || round % 3 == 0))
				expect(a.cq, id, IBV_WC_SUCCESS);
		for (int i = 0; i < sends; i++) {
			expect(b.cq, i, IBV_WC_SUCCESS);
			memcpy(&got, b.buffer + 100 + i * sizeof(got), sizeof(got));
			CHECK_EQ(got, round);
		}
		CHECK_EQ(post_send(&b, 7, 100, sizeof(round)), 0);
		expect(b.cq, 7, IBV_WC_SUCCESS);
		expect(a.cq, 9, IBV_WC_SUCCESS);
	}
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* What is nobody else's business needs nobody else: the peer has gone, before or after they met, or never was. */
static void test_without_a_peer(void)
{
	enum { NEVER, BEFORE_THEY_MET, AFTERWARDS, CASES };

	for (int when = 0; when < CASES; when++) {
		struct ibv_qp_attr to_err = {.qp_state = IBV_QPS_ERR};
		struct ibv_mw *mw;

		open_pair_with((struct end_options){.cqe = 1024});
		connect_impatiently(a.qp, when == NEVER ? b.qp->qp_num ^ 0x80 : b.qp->qp_num);
		if (when != NEVER)
			connect_to(b.qp, a.qp->qp_num);
		if (when == AFTERWARDS)
			write_to(at_b(0), b.mr->rkey, 8, IBV_WC_SUCCESS);
		if (when != NEVER)
			CHECK_EQ(ibv_modify_qp(b.qp, &to_err, IBV_QP_STATE), 0);
		mw = alloc(&a, IBV_MW_TYPE_2);
		for (int i = 0; i < 20; i++) {
			post_bind(&a, 1, mw);
			post_invalidation(&a, 2, mw->rkey);
			expect(a.cq, 1, IBV_WC_SUCCESS);
			expect(a.cq, 2, IBV_WC_SUCCESS);
		}
		/* But it waits for its turn. Only a peer that was there is not looked for all the time. */
		occupy_engine();
		CHECK_EQ(post_send(&a, 3, 0, 8), 0);
		CHECK(by_stream() || (rn_qp(a.qp)->backoff_ns > 1000000) == (when == AFTERWARDS));
		release_engine();
		post_bind(&a, 4, mw);
		expect(a.cq, 3, IBV_WC_RETRY_EXC_ERR);
		expect(a.cq, 4, IBV_WC_WR_FLUSH_ERR);
		CHECK_EQ(ibv_dealloc_mw(mw), 0);
		close_pair();
	}
}

static void test_builder(void)
{
	enum { OPS = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV |
		     IBV_QP_EX_WITH_RDMA_WRITE };
	struct ibv_mw_bind_info info;
	struct ibv_qp_ex *at_a, *qp;
	struct ibv_mw *mw;

	open_pair_with((struct end_options){.extended = true, .send_ops = OPS});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	qp = ibv_qp_to_qp_ex(b.qp);
	at_a = ibv_qp_to_qp_ex(a.qp);
	mw = alloc(&b, IBV_MW_TYPE_2);
	info = part_of(&b, 0, 100, WRITE_READ);
	mw->rkey = next_key(mw->rkey);
	qp->wr_flags = at_a->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_start(qp);
	qp->wr_bind_mw(qp, mw, mw->rkey, &info);
	qp->wr_local_inv(qp, mw->rkey);
	qp->wr_bind_mw(qp, mw, mw->rkey, &info);
	CHECK_EQ(qp->wr_complete(qp), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	CHECK_EQ(post_recv(&b, 5, 0, 100), 0);
	at_a->wr_start(at_a);
	at_a->wr_rdma_write(at_a, mw->rkey, at_b(0));
	at_a->wr_set_sge(at_a, a.mr->lkey, (uintptr_t)a.buffer, 8);
	at_a->wr_send_inv(at_a, mw->rkey);
	at_a->wr_set_inline_data(at_a, "bye", 3);
	CHECK_EQ(at_a->wr_complete(at_a), 0);
	CHECK_EQ(poll_one(b.cq).invalidated_rkey, mw->rkey);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* --- another process --------------------------------------------------------------------------------------- */

static enum memory far_memory;

static void serve_window(int fd)
{
	struct ibv_mw *mw;
	struct end end;

	end_open(&end, &(struct end_options){.memory = far_memory});
	memset(end.buffer, 0, BUFFER);
	mw = alloc(&end, IBV_MW_TYPE_2);
	connect_over(&end, fd);
	for (int round = 0; round < 3; round++) {
		uint32_t rkey = bind_type_2(&end, mw, part_of(&end, 4096, 100, WRITE_READ), IBV_WC_SUCCESS);
		struct ibv_wc wc;

		CHECK_EQ(post_recv(&end, 1, 0, 100), 0);
		tell(fd, &rkey, sizeof(rkey));
		wc = poll_one(end.cq);
		CHECK_EQ(wc.wc_flags, IBV_WC_WITH_INV);
		CHECK_EQ(wc.invalidated_rkey, rkey);
		CHECK(!memcmp(end.buffer + 4096, "far away", 8));
		memset(end.buffer + 4096, 0, 8);
	}
	expect_event(end.context, IBV_EVENT_QP_ACCESS_ERR);
	CHECK_EQ(*(uint64_t *)(end.buffer + 4096), 0);
	meet(fd);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	end_close(&end);
}

static void test_other_process(void)
{
	struct address to;
	struct other other;
	uint32_t rkey;

	for (int user = 0; user < 2; user++) {
		far_memory = user ? USER_MEMORY : DEVICE_MEMORY;
		other = spawn(serve_window);
		end_open(&a, &(struct end_options){0});
		to = connect_over(&a, other.fd);
		memcpy(a.buffer, "far away", 8);
		for (int round = 0; round < 3; round++) {
			CHECK(hear(other.fd, &rkey, sizeof(rkey)));
			write_to(to.buffer + 4096, rkey, 8, IBV_WC_SUCCESS);
			send_with_inv(6, rkey);
		}
		write_to(to.buffer + 4096, rkey, 8, IBV_WC_REM_ACCESS_ERR);
		meet(other.fd);
		end_close(&a);
		join(&other);
	}
}

/* --- a peer that is stopped in the midst of a copy ------------------------------------------------------------ */

static int stopped_fd;
static char *forbidden;

/* The copy reads what it may not: here it stands until the owner has seen to its memory. */
static void stand_still(int number)
{
	(void)number;
	meet(stopped_fd);
	CHECK_EQ(mprotect(forbidden, 4096, PROT_READ | PROT_WRITE), 0);
}

static void write_and_stop(int fd)
{
	struct sigaction action = {.sa_handler = stand_still};
	struct address to;
	struct end end;
	uint32_t rkey;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	to = connect_over(&end, fd);
	CHECK(hear(fd, &rkey, sizeof(rkey)));
	/* The first may be the engine's to do, until the two processes know each other; the second is ours. */
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, 64, to.buffer + 4096, rkey), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	stopped_fd = fd;
	forbidden = end.buffer + 4096;
	CHECK_EQ(sigaction(SIGSEGV, &action, NULL), 0);
	CHECK_EQ(mprotect(forbidden, 4096, PROT_NONE), 0);
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 4096, 64, to.buffer + 4096, rkey), 0);
	poll_one(end.cq);
	meet(fd);
	end_close(&end);
}

/* How often this thread has waited for another: the device's way to wait a moment. */
static _Thread_local unsigned yields;

int sched_yield(void)
{
	yields++;
	return (int)syscall(SYS_sched_yield);
}

enum { WINDOWS = 20 };

static void bind_many(struct ibv_mw *windows[WINDOWS])
{
	for (int i = 0; i < WINDOWS; i++) {
		windows[i] = alloc(&a, IBV_MW_TYPE_2);
		bind_type_2(&a, windows[i], part_of(&a, 8192, 100, WRITE_READ), IBV_WC_SUCCESS);
	}
}

/* Begin a request of the other's, which does not end. */
static void have_inside(struct other *other, struct ibv_mw **mw, uint32_t *rkey)
{
	char mark;

	*other = spawn(write_and_stop);
	end_open(&a, &(struct end_options){0});
	connect_over(&a, other->fd);
	*mw = alloc(&a, IBV_MW_TYPE_2);
	*rkey = bind_type_2(&a, *mw, part_of(&a, 4096, 100, WRITE_READ), IBV_WC_SUCCESS);
	tell(other->fd, rkey, sizeof(*rkey));
	CHECK(hear(other->fd, &mark, 1)); /* it is inside */
}

/* Who is dead is waited for by nobody, nor said to be stopped. */
static void test_killed_inside(void)
{
	struct ibv_mw *mw, *windows[WINDOWS];
	struct other other;
	char said[4096];
	uint32_t rkey;
	ssize_t got;
	int log[2];

	if (getenv("RDMANET_SOFT_TRANSPORT"))
		return; /* then nobody is inside */
	CHECK_EQ(pipe2(log, O_CLOEXEC | O_NONBLOCK), 0);
	have_inside(&other, &mw, &rkey);
	bind_many(windows);
	rdmanet_soft_log_to(log[1]);
	join_killed(&other);
	for (int i = 0; i < WINDOWS; i++)
		CHECK_EQ(ibv_dealloc_mw(windows[i]), 0);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	if ((got = read(log[0], said, sizeof(said))) > 0)
		fprintf(stderr, "said: %.*s\n", (int)got, said);
	CHECK(got < 0 && errno == EAGAIN);
	rdmanet_soft_log_to(-1);
	end_close(&a);
	close(log[0]);
	close(log[1]);
}

/* Nor is who is stopped. */
static void test_sigstop_inside(void)
{
	struct ibv_mw *mw, *windows[WINDOWS];
	siginfo_t stopped = {0};
	struct other other;
	uint32_t rkey;
	char mark = 'm';

	if (getenv("RDMANET_SOFT_TRANSPORT"))
		return;
	have_inside(&other, &mw, &rkey);
	bind_many(windows);
	kill(other.pid, SIGSTOP);
	CHECK_EQ(waitid(P_PID, other.pid, &stopped, WSTOPPED), 0);
	CHECK_EQ(ibv_dealloc_mw(mw), 0); /* it says so */
	yields = 0;
	for (int i = 0; i < WINDOWS; i++)
		CHECK_EQ(ibv_dealloc_mw(windows[i]), 0);
	CHECK_EQ(yields, 0);
	kill(other.pid, SIGCONT);
	tell(other.fd, &mark, 1);
	meet(other.fd);
	end_close(&a);
	join(&other);
}

static void test_stopped_inside(void)
{
	struct other other;
	struct ibv_mw *mw, *elsewhere, *windows[WINDOWS];
	uint32_t rkey, far;
	struct end c, d;
	char mark;

	if (getenv("RDMANET_SOFT_TRANSPORT"))
		return; /* then nobody is inside */
	other = spawn(write_and_stop);
	end_open(&a, &(struct end_options){0});
	connect_over(&a, other.fd);
	end_open(&c, &(struct end_options){.share = &a});
	end_open(&d, &(struct end_options){.share = &a});
	connect_to(c.qp, d.qp->qp_num);
	connect_to(d.qp, c.qp->qp_num);
	mw = alloc(&a, IBV_MW_TYPE_2);
	elsewhere = alloc(&c, IBV_MW_TYPE_2);
	far = bind_type_2(&a, mw, part_of(&a, 4096, 100, WRITE_READ), IBV_WC_SUCCESS);
	tell(other.fd, &far, sizeof(far));
	CHECK(hear(other.fd, &mark, 1)); /* it is inside */

	/* A window is its own queue pair's business: others don't wait for who is stopped there. */
	rkey = bind_type_2(&c, elsewhere, part_of(&c, 0, 100, WRITE_READ), IBV_WC_SUCCESS);
	invalidate(&c, rkey, IBV_WC_SUCCESS);
	bind_many(windows);
	/* Its owner is told that the key's last user is still there, and the memory isn't given back until he has left. */
	invalidate(&a, far, IBV_WC_RESP_TIMEOUT_ERR);
	/* He was waited for, and has not moved: he is not waited for again. */
	yields = 0;
	for (int i = 0; i < WINDOWS; i++)
		CHECK_EQ(ibv_dealloc_mw(windows[i]), 0);
	CHECK_EQ(yields, 0);
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	CHECK_EQ(ibv_dealloc_mw(elsewhere), 0);
	CHECK_EQ(ibv_dereg_mr(a.mr), 0);
	a.mr = NULL;
	CHECK(rdmanet_soft_quarantined());
	tell(other.fd, &mark, 1);
	meet(other.fd);
	EVENTUALLY(rdmanet_soft_quarantined() == 0);
	end_close(&d);
	end_close(&c);
	end_close(&a);
	join(&other);
}

int main(void)
{
	RUN(test_type_1);
	RUN(test_type_2);
	RUN(test_other_queue_pair);
	RUN(test_bad_binds);
	RUN(test_bad_invalidations);
	RUN(test_send_with_inv);
	RUN(test_busy);
	RUN(test_left_behind);
	RUN(test_not_for_local_use);
	RUN(test_queued);
	RUN(test_in_between);
	RUN(test_without_a_peer);
	RUN(test_builder);
	RUN(test_other_process);
	RUN(test_stopped_inside);
	RUN(test_killed_inside);
	RUN(test_sigstop_inside);
	expect_live_nothing();
	return 0;
}
