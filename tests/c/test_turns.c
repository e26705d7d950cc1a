/* SPDX-License-Identifier: Apache-2.0 */
/* Long requests: who posts one does not copy it. The engine does, in turns, or whoever polls for it. */
#include "pair.h"

#include <pthread.h>

#include "calm.h"
#include "soft.h"

enum { LONG = 24 << 20, UNTOUCHED = 0x5a };

static char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

static void begin(void)
{
	open_pair();
	from_mr = make_memory(a.pd, USER_MEMORY, LONG, &from);
	to_mr = make_memory(a.pd, USER_MEMORY, LONG, &to);
	for (size_t i = 0; i < LONG; i++)
		from[i] = (char)(i * 131 + (i >> 9));
	memset(to, UNTOUCHED, LONG);
}

static void finish(void)
{
	CHECK_EQ(ibv_dereg_mr(from_mr), 0);
	CHECK_EQ(ibv_dereg_mr(to_mr), 0);
	munmap(from, LONG);
	munmap(to, LONG);
	close_pair();
	expect_live_nothing();
}

/* From `from` to `to`, either way. */
static void post_long(enum ibv_wr_opcode opcode, uint64_t wr_id, uint32_t length)
{
	bool is_read = opcode == IBV_WR_RDMA_READ;
	struct ibv_sge sge = {.addr = (uintptr_t)(is_read ? to : from), .length = length,
			      .lkey = is_read ? to_mr->lkey : from_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = wr_id,
				 .opcode = opcode,
				 .send_flags = IBV_SEND_SIGNALED,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .wr.rdma = {.remote_addr = (uintptr_t)(is_read ? from : to),
					     .rkey = is_read ? from_mr->rkey : to_mr->rkey}},
			   *bad;

	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
}

static uint64_t queued(void)
{
	struct rn_counters count;

	CHECK_EQ(rdmanet_soft_qp_counters(a.qp, &count), 0);
	return count.queued;
}

static bool has_begun(void)
{
	struct rn_qp *qp = rn_qp(a.qp);
	bool begun;

	rn_lock(&qp->sq_lock);
	begun = qp->sq_executed == qp->sq_posted || rn_sq_has_begun(qp);
	rn_unlock(&qp->sq_lock);
	return begun;
}

static bool is_executed(void)
{
	struct rn_qp *qp = rn_qp(a.qp);
	bool executed;

	rn_lock(&qp->sq_lock);
	executed = qp->sq_executed == qp->sq_posted;
	rn_unlock(&qp->sq_lock);
	return executed;
}

/* --- tests ------------------------------------------------------------------------------------------------------------ */

static void nothing_is_copied_by_posting(void)
{
	static const struct {
		enum ibv_wr_opcode opcode;
		uint32_t length, queued;
	} cases[] = {
		{IBV_WR_RDMA_READ, 1 << 20, 0},
		{IBV_WR_RDMA_READ, (1 << 20) + 1, 1},
		{IBV_WR_RDMA_WRITE, 4 << 20, 0},
		{IBV_WR_RDMA_WRITE, (4 << 20) + 1, 1},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		begin();
		occupy_engine();
		post_long(cases[i].opcode, 1, cases[i].length);
		CHECK_EQ(queued(), cases[i].queued);
		CHECK_EQ(to[0], cases[i].queued ? UNTOUCHED : from[0]);
		release_engine();
		expect(a.cq, 1, IBV_WC_SUCCESS);
		CHECK(!memcmp(to, from, cases[i].length) && to[cases[i].length] == UNTOUCHED);
		finish();
	}
}

/* Nobody polls: the program sleeps until the event comes. */
static void the_engine_copies(void)
{
	struct ibv_cq *cq;
	void *context;

	begin();
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	CHECK(readable(a.channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_get_cq_event(a.channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(to, from, LONG));
	finish();
}

static void a_poller_copies(void)
{
	for (int way = 0; way < 2; way++) {
		begin();
		occupy_engine();
		post_long(way ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 1, LONG);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		CHECK(!memcmp(to, from, LONG));
		release_engine();
		finish();
	}
}

/* On-demand memory is looked at once, on each side, and not for each turn. */
static void on_demand_in_one_go(void)
{
	struct rn_counters count;

	begin();
	CHECK_EQ(ibv_dereg_mr(from_mr), 0);
	CHECK_EQ(ibv_dereg_mr(to_mr), 0);
	from_mr = ibv_reg_mr(a.pd, from, LONG, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
	to_mr = ibv_reg_mr(a.pd, to, LONG, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
	CHECK(from_mr && to_mr);
	post_long(IBV_WR_RDMA_READ, 1, LONG);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(to, from, LONG));
	CHECK_EQ(rdmanet_soft_qp_counters(a.qp, &count), 0);
	CHECK_EQ(count.syscalls, 2);
	finish();
}

/* A poller that leaves off: the engine goes on. */
static void one_after_the_other(void)
{
	struct ibv_wc wc;
	bool is_done = false;

	begin();
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	for (int polls = 0; polls < 100 && !is_done; polls++)
		is_done = ibv_poll_cq(a.cq, 1, &wc);
	EVENTUALLY(is_executed());
	if (!is_done)
		expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(to, from, LONG));
	finish();
}

static void in_order(void)
{
	begin();
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	a.buffer[0] = 'z';
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 1, (uintptr_t)to, to_mr->rkey), 0);
	post_long(IBV_WR_RDMA_WRITE, 3, 5 << 20);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 4, 0, 1, (uintptr_t)to + 9, to_mr->rkey), 0);
	for (int i = 1; i <= 4; i++)
		expect(a.cq, i, IBV_WC_SUCCESS);
	CHECK(to[0] == from[0] && to[9] == 'z' && to[10] == from[10]);
	finish();
}

static void drained_when_it_is_done(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};
	struct ibv_wc wc;

	begin();
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	EVENTUALLY(has_begun());
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	expect_event(a.context, IBV_EVENT_SQ_DRAINED);
	CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 1);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK(!memcmp(to, from, LONG));
	finish();
}

/* Other threads of the program use the queue pair in between. */
static atomic_bool is_over;

static void *look(void *unused)
{
	while (!atomic_load(&is_over))
		CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	return unused;
}

static void others_use_the_queue_pair(void)
{
	pthread_t thread;

	begin();
	atomic_store(&is_over, false);
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	CHECK_EQ(pthread_create(&thread, NULL, look, NULL), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	atomic_store(&is_over, true);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK(!memcmp(to, from, LONG));
	finish();
}

/* Who has polled for one may sleep through the next: the engine does not wait for a poller. */
static void polled_once(void)
{
	begin();
	occupy_engine();
	post_long(IBV_WR_RDMA_WRITE, 1, LONG);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(rn_qp(a.qp)->is_polled);
	post_long(IBV_WR_RDMA_WRITE, 2, LONG);
	CHECK(!rn_qp(a.qp)->is_polled);
	release_engine();
	EVENTUALLY(is_executed());
	expect(a.cq, 2, IBV_WC_SUCCESS);
	finish();
}

/* Somebody waits for the send lock all the time: the request is done in the end. */
static void wanted_for_ever(void)
{
	begin();
	atomic_fetch_add(&rn_qp(a.qp)->sq_lock.waiting, 1);
	post_long(IBV_WR_RDMA_WRITE, 1, 5 << 20);
	EVENTUALLY(is_executed());
	atomic_fetch_sub(&rn_qp(a.qp)->sq_lock.waiting, 1);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(to, from, 5 << 20));
	finish();
}

int main(void)
{
	RUN(nothing_is_copied_by_posting);
	RUN(the_engine_copies);
	RUN(a_poller_copies);
	RUN(on_demand_in_one_go);
	RUN(one_after_the_other);
	RUN(in_order);
	RUN(drained_when_it_is_done);
	RUN(others_use_the_queue_pair);
	RUN(polled_once);
	RUN(wanted_for_ever);
	return 0;
}
