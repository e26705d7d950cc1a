/* SPDX-License-Identifier: Apache-2.0 */
/* Extended completion queues (read by iterator) and queue pairs (requests built call by call). */
#include "pair.h"

#include <pthread.h>

enum {
	FIELDS = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
		 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
	OPS = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
	      IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
	      IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
};

static void open_extended(uint32_t cq_flags)
{
	open_pair_with((struct end_options){
		.extended = true,
		.wc_flags = FIELDS,
		.cq_flags = cq_flags,
		.send_ops = OPS,
		.send_wr = 8,
		.recv_wr = 16,
		.cqe = 16,
	});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
}

static struct ibv_cq_ex *ex_cq(const struct end *end)
{
	return (struct ibv_cq_ex *)end->cq;
}

static struct ibv_qp_ex *ex_qp(const struct end *end)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(end->qp);

	CHECK(ex);
	return ex;
}

/* --- the iterator ------------------------------------------------------------------------------------ */

static void iterate_over_sends_and_receives(uint32_t cq_flags)
{
	struct ibv_cq_ex *cq;

	open_extended(cq_flags);
	cq = ex_cq(&b);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0}), ENOENT);
	for (int i = 0; i < 5; i++)
		CHECK_EQ(post_recv(&b, 100 + i, 1000 * i, 1000), 0);
	for (int i = 0; i < 5; i++)
		CHECK_EQ(post(&a,
			      (struct ibv_send_wr){
				      .opcode = IBV_WR_SEND_WITH_IMM,
				      .send_flags = IBV_SEND_SIGNALED,
				      .imm_data = 7 + i,
				      .wr_id = i,
			      },
			      0, 10 * i),
			 0);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0}), 0);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(cq->wr_id, 100 + i);
		CHECK_EQ(cq->status, IBV_WC_SUCCESS);
		CHECK_EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
		CHECK_EQ(ibv_wc_read_byte_len(cq), 10 * i);
		CHECK_EQ(ibv_wc_read_wc_flags(cq), IBV_WC_WITH_IMM);
		CHECK_EQ(ibv_wc_read_imm_data(cq), 7 + i);
		CHECK_EQ(ibv_wc_read_qp_num(cq), b.qp->qp_num);
		CHECK_EQ(ibv_wc_read_src_qp(cq), a.qp->qp_num);
		CHECK_EQ(ibv_wc_read_vendor_err(cq), 0);
		CHECK_EQ(ibv_wc_read_slid(cq) + ibv_wc_read_sl(cq) + ibv_wc_read_dlid_path_bits(cq), 0);
		CHECK_EQ(ibv_next_poll(cq), i < 4 ? 0 : ENOENT);
	}
	ibv_end_poll(cq);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0}), ENOENT);

	/* Ended early, the rest is there still: for the iterator, and for the plain call. */
	cq = ex_cq(&a);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0}), 0);
	CHECK_EQ(cq->wr_id, 0);
	CHECK_EQ(ibv_wc_read_opcode(cq), IBV_WC_SEND);
	CHECK_EQ(ibv_next_poll(cq), 0);
	CHECK_EQ(cq->wr_id, 1);
	ibv_end_poll(cq);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0}), 0);
	CHECK_EQ(cq->wr_id, 2);
	ibv_end_poll(cq);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	expect(a.cq, 4, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){.comp_mask = 1}), EINVAL);
	close_pair();
}

static void test_iterator(void)
{
	iterate_over_sends_and_receives(0);
}

static void test_iterator_single_threaded(void)
{
	iterate_over_sends_and_receives(IBV_CREATE_CQ_ATTR_SINGLE_THREADED);
}

/* What every ping-pong does: answer while the iterator stands on the question. */
static void test_posting_while_iterating(void)
{
	open_extended(0);
	CHECK_EQ(post_recv(&b, 1, 0, 100), 0);
	CHECK_EQ(post_recv(&a, 2, 0, 100), 0);
	CHECK_EQ(post_send(&a, 3, 0, 64), 0);
	CHECK_EQ(ibv_start_poll(ex_cq(&b), &(struct ibv_poll_cq_attr){0}), 0);
	CHECK_EQ(post_send(&b, 4, 0, 64), 0); /* completes on the CQ that is being read */
	CHECK_EQ(ibv_next_poll(ex_cq(&b)), 0);
	CHECK_EQ(ex_cq(&b)->wr_id, 4);
	CHECK_EQ(ibv_next_poll(ex_cq(&b)), ENOENT);
	ibv_end_poll(ex_cq(&b));
	close_pair();
}

static void test_status_of_errors(void)
{
	open_extended(0);
	CHECK_EQ(post_recv(&b, 1, 0, 10), 0);
	CHECK_EQ(post_send(&a, 2, 0, 64), 0);
	CHECK_EQ(ibv_start_poll(ex_cq(&a), &(struct ibv_poll_cq_attr){0}), 0);
	CHECK_EQ(ex_cq(&a)->status, IBV_WC_REM_INV_REQ_ERR);
	CHECK_EQ(ibv_wc_read_qp_num(ex_cq(&a)), a.qp->qp_num);
	ibv_end_poll(ex_cq(&a));
	CHECK_EQ(ibv_start_poll(ex_cq(&b), &(struct ibv_poll_cq_attr){0}), 0);
	CHECK_EQ(ex_cq(&b)->status, IBV_WC_LOC_LEN_ERR);
	ibv_end_poll(ex_cq(&b));
	close_pair();
}

static uint64_t wall_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* When it was completed, not when it is read. */
static void test_time_stamps(void)
{
	struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
	uint64_t before, after, stamps[3], slack = 1000000;
	struct ibv_device_attr_ex attr;

	open_extended(0);
	CHECK_EQ(verbs_get_ctx(a.context)->query_device_ex(a.context, NULL, &attr, sizeof(attr)), 0);
	CHECK_EQ(attr.completion_timestamp_mask, UINT64_MAX);
	CHECK_EQ(attr.hca_core_clock, 1000000); /* kHz */
	CHECK_EQ(ibv_query_rt_values_ex(a.context, &values), 0);
	CHECK_EQ(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
	before = values.raw_clock.tv_nsec;
	CHECK_EQ(values.raw_clock.tv_sec, 0);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(post_recv(&b, i, 0, 100), 0);
		CHECK_EQ(post_send(&a, i, 0, 64), 0);
	}
	after = now_ns();
	for (struct end *end = &a; end; end = end == &a ? &b : NULL) {
		CHECK_EQ(ibv_start_poll(ex_cq(end), &(struct ibv_poll_cq_attr){0}), 0);
		for (int i = 0; i < 3; i++) {
			uint64_t wall = ibv_wc_read_completion_wallclock_ns(ex_cq(end)), wall_now = wall_ns();

			stamps[i] = ibv_wc_read_completion_ts(ex_cq(end));
			CHECK(before <= stamps[i] && stamps[i] <= after);
			CHECK(wall <= wall_now + slack);
			before = stamps[i];
			ibv_next_poll(ex_cq(end));
		}
		ibv_end_poll(ex_cq(end));
		CHECK(stamps[0] < stamps[2]);
		before = values.raw_clock.tv_nsec;
	}
	close_pair();
}

static void test_cq_of_bad_attributes(void)
{
	static const struct {
		struct ibv_cq_init_attr_ex attr;
		int err;
	} bad[] = {
		{{.cqe = 8, .wc_flags = IBV_WC_EX_WITH_CVLAN}, EOPNOTSUPP},
		{{.cqe = 8, .wc_flags = IBV_WC_EX_WITH_FLOW_TAG}, EOPNOTSUPP},
		{{.cqe = 8, .wc_flags = IBV_WC_EX_WITH_TM_INFO}, EOPNOTSUPP},
		{{.cqe = 8, .wc_flags = 1 << 20}, EOPNOTSUPP},
		{{.cqe = 8, .comp_mask = 1 << 5}, EOPNOTSUPP},
		{{.cqe = 8, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = 1 << 7}, EOPNOTSUPP},
		{{.cqe = 0}, EINVAL},
		{{.cqe = UINT32_MAX}, EINVAL},
		{{.cqe = 8, .comp_vector = 77}, EINVAL},
	};

	open_pair();
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct ibv_cq_init_attr_ex attr = bad[i].attr;

		errno = 0;
		CHECK(!ibv_create_cq_ex(a.context, &attr));
		CHECK_EQ(errno, bad[i].err);
	}
	close_pair();
}

/* Exactly the readers that were asked for. */
static void test_readers(void)
{
	struct ibv_cq_init_attr_ex attr = {.cqe = 8, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN};
	struct ibv_cq_ex *cq;

	open_pair();
	cq = ibv_create_cq_ex(a.context, &attr);
	CHECK(cq && cq->read_opcode && cq->read_vendor_err && cq->read_wc_flags && cq->read_byte_len);
	CHECK(!cq->read_imm_data && !cq->read_completion_ts && !cq->read_cvlan && !cq->read_src_qp);
	CHECK_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	close_pair();
}

/* The program answers for it: the oldest are lost, and nothing else happens. */
static void test_overrun_ignored(void)
{
	open_pair_with((struct end_options){
		.extended = true, .cq_flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, .send_ops = OPS, .send_wr = 8, .cqe = 4});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < 8; i++)
			CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 8, at_b(0), b.mr->rkey), 0);
		for (int i = 4; i < 8; i++)
			expect(a.cq, i, IBV_WC_SUCCESS);
	}
	CHECK(!readable(a.context->async_fd, 0));
	close_pair();
}

/* --- building requests ---------------------------------------------------------------------------------- */

static void test_builder(void)
{
	static const unsigned imm_data[] = {0, 99, 98};
	struct ibv_qp_ex *qp;
	struct ibv_sge list[2];

	open_extended(0);
	qp = ex_qp(&a);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_recv(&b, 100 + i, 1000 * i, 1000), 0);
	memcpy(a.buffer, "hello, world", 12);
	list[0] = sge_of(&a, 0, 5);
	list[1] = sge_of(&a, 5, 7);

	qp->wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = 0;
	qp->wr_send(qp);
	qp->wr_set_sge_list(qp, 2, list);
	qp->wr_id = 2;
	qp->wr_send_imm(qp, 99);
	qp->wr_set_inline_data(qp, "inline", 6);
	qp->wr_id = 3;
	qp->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_rdma_write_imm(qp, b.mr->rkey, at_b(4000), 98);
	qp->wr_set_inline_data_list(qp, 2, (struct ibv_data_buf[]){{"in", 2}, {"two", 3}});
	expect_nothing(b.cq); /* nothing is posted yet */
	CHECK_EQ(qp->wr_complete(qp), 0);

	for (int i = 0; i < 3; i++) {
		struct ibv_wc wc = poll_one(b.cq);

		CHECK_EQ(wc.wr_id, 100 + i);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.imm_data, imm_data[i]);
	}
	CHECK(!memcmp(b.buffer, "hello, world", 12));
	CHECK(!memcmp(b.buffer + 1000, "inline", 6));
	CHECK(!memcmp(b.buffer + 4000, "intwo", 5));
	expect(a.cq, 3, IBV_WC_SUCCESS);
	expect_nothing(a.cq); /* the others were unsignaled */

	/* Inline data is copied when it is set. */
	CHECK_EQ(post_recv(&b, 7, 0, 100), 0);
	qp->wr_start(qp);
	memcpy(list, "first", 5);
	qp->wr_send(qp);
	qp->wr_set_inline_data(qp, list, 5);
	memcpy(list, "later", 5);
	CHECK_EQ(qp->wr_complete(qp), 0);
	CHECK(!memcmp(b.buffer, "first", 5));
	close_pair();
}

static void test_builder_rdma(void)
{
	struct ibv_qp_ex *qp;
	uint64_t word = 40;

	open_extended(0);
	qp = ex_qp(&a);
	memcpy(b.buffer, &word, sizeof(word));
	memcpy(b.buffer + 100, "read me", 7);
	qp->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_start(qp);
	qp->wr_rdma_read(qp, b.mr->rkey, at_b(100));
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
	qp->wr_rdma_write(qp, b.mr->rkey, at_b(200));
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
	qp->wr_atomic_fetch_add(qp, b.mr->rkey, at_b(0), 2);
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer + 16, 8);
	qp->wr_atomic_cmp_swp(qp, b.mr->rkey, at_b(0), 42, 77);
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer + 24, 8);
	CHECK_EQ(qp->wr_complete(qp), 0);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.buffer + 200, "read me", 7));
	memcpy(&word, a.buffer + 16, sizeof(word));
	CHECK_EQ(word, 40);
	memcpy(&word, a.buffer + 24, sizeof(word));
	CHECK_EQ(word, 42);
	memcpy(&word, b.buffer, sizeof(word));
	CHECK_EQ(word, 77);
	close_pair();
}

/* All or nothing; and the next chain starts afresh. */
static void test_builder_errors(void)
{
	struct ibv_sge list[8] = {0};
	struct ibv_qp_ex *qp;
	char too_long[4096] = {0};

	open_extended(0);
	qp = ex_qp(&a);
	qp->wr_flags = IBV_SEND_SIGNALED;
	for (int bad = 0; bad < 4; bad++) {
		qp->wr_start(qp);
		if (bad == 3)
			qp->wr_set_sge(qp, 0, 0, 0); /* of what? */
		qp->wr_send(qp);
		qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
		if (bad == 0)
			qp->wr_set_sge_list(qp, 8, list);
		if (bad == 1)
			qp->wr_set_inline_data(qp, too_long, sizeof(too_long));
		for (int i = 0; bad == 2 && i < 20; i++) { /* the queue takes 8 */
			qp->wr_rdma_write(qp, b.mr->rkey, at_b(0));
			qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
		}
		CHECK_EQ(qp->wr_complete(qp), bad == 2 ? ENOMEM : EINVAL);
	}
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_abort(qp);
	qp->wr_start(qp);
	CHECK_EQ(qp->wr_complete(qp), 0); /* an empty chain is none */
	expect_nothing(a.cq);

	CHECK_EQ(post_recv(&b, 1, 0, 100), 0);
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
	CHECK_EQ(qp->wr_complete(qp), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

/* Slots that are taken count as for ibv_post_send. */
static void test_builder_full_queue(void)
{
	struct ibv_qp_ex *qp;

	open_extended(0);
	qp = ex_qp(&a);
	qp->wr_flags = IBV_SEND_SIGNALED;
	for (int i = 0; i < 6; i++)
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 8, at_b(0), b.mr->rkey), 0);
	for (int round = 0; round < 2; round++) {
		qp->wr_start(qp);
		for (int i = 0; i < 3; i++) {
			qp->wr_rdma_write(qp, b.mr->rkey, at_b(0));
			qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 7);
		}
		CHECK_EQ(qp->wr_complete(qp), round ? 0 : ENOMEM);
		if (!round)
			for (int i = 0; i < 6; i++)
				expect(a.cq, i, IBV_WC_SUCCESS);
	}
	close_pair();
}

static void test_builder_in_wrong_state(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	struct ibv_qp_ex *qp;

	open_pair_with((struct end_options){.extended = true, .send_ops = OPS});
	to_init(a.qp);
	qp = ex_qp(&a);
	for (int in_error = 0; in_error < 2; in_error++) {
		qp->wr_start(qp);
		qp->wr_id = 5;
		qp->wr_send(qp);
		CHECK_EQ(qp->wr_complete(qp), in_error ? 0 : EINVAL);
		CHECK_EQ(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), 0);
	}
	expect(a.cq, 5, IBV_WC_WR_FLUSH_ERR);
	close_pair();
}

/* The right operations, and no others. */
static void test_operations(void)
{
	struct ibv_qp_init_attr plain = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp;

	open_pair();
	plain.send_cq = plain.recv_cq = a.cq;
	CHECK(!ibv_qp_to_qp_ex(a.qp));
	qp = make_extended_qp(&a, &plain, IBV_QP_EX_WITH_RDMA_WRITE);
	CHECK(qp && ibv_qp_to_qp_ex(qp)->wr_rdma_write && !ibv_qp_to_qp_ex(qp)->wr_send);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	plain.qp_type = IBV_QPT_UD;
	qp = make_extended_qp(&a, &plain, IBV_QP_EX_WITH_SEND);
	CHECK(qp && ibv_qp_to_qp_ex(qp)->wr_set_ud_addr && !ibv_qp_to_qp_ex(qp)->wr_set_xrc_srqn);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	CHECK(!make_extended_qp(&a, &plain, IBV_QP_EX_WITH_RDMA_WRITE) && errno == EOPNOTSUPP);
	plain.qp_type = IBV_QPT_UC;
	CHECK(!make_extended_qp(&a, &plain, IBV_QP_EX_WITH_RDMA_READ) && errno == EOPNOTSUPP);
	plain.qp_type = IBV_QPT_RC;
	CHECK(!make_extended_qp(&a, &plain, IBV_QP_EX_WITH_TSO) && errno == EOPNOTSUPP);
	CHECK(!make_extended_qp(&a, &plain, IBV_QP_EX_WITH_FLUSH) && errno == EOPNOTSUPP);
	CHECK(!make_extended_qp(&a, &plain, OPS | 1ull << 40) && errno == EOPNOTSUPP);
	close_pair();
}

static void *build_many(void *unused)
{
	struct ibv_qp_ex *qp = ex_qp(&a);

	for (int i = 0; i < 500; i++) {
		qp->wr_start(qp);
		qp->wr_id = 1;
		qp->wr_flags = IBV_SEND_SIGNALED;
		qp->wr_rdma_write(qp, b.mr->rkey, at_b(0));
		qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.buffer, 8);
		if (qp->wr_complete(qp))
			i--; /* full: the other thread polls */
	}
	return unused;
}

/* Two threads build on one queue pair, and iterate over one CQ. */
static void test_threads(void)
{
	struct ibv_poll_cq_attr attr = {0};
	pthread_t threads[2];
	int seen = 0;

	open_extended(0);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, build_many, NULL), 0);
	while (seen < 1000) {
		if (ibv_start_poll(ex_cq(&a), &attr))
			continue;
		do {
			CHECK_EQ(ex_cq(&a)->status, IBV_WC_SUCCESS);
			seen++;
		} while (!ibv_next_poll(ex_cq(&a)));
		ibv_end_poll(ex_cq(&a));
	}
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	close_pair();
}

int main(void)
{
	RUN(test_iterator);
	RUN(test_iterator_single_threaded);
	RUN(test_posting_while_iterating);
	RUN(test_status_of_errors);
	RUN(test_time_stamps);
	RUN(test_cq_of_bad_attributes);
	RUN(test_readers);
	RUN(test_overrun_ignored);
	RUN(test_builder);
	RUN(test_builder_rdma);
	RUN(test_builder_errors);
	RUN(test_builder_full_queue);
	RUN(test_builder_in_wrong_state);
	RUN(test_operations);
	RUN(test_threads);
	expect_live_nothing();
	return 0;
}
