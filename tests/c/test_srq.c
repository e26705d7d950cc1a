/* SPDX-License-Identifier: Apache-2.0 */
/* Shared receive queues: one pool, many queue pairs, and claimers that die or stop anywhere. */
#define _GNU_SOURCE
#include <pthread.h>

#include "soft.h"
#include "objects/srq.h"

#include "pair.h"
#include "processes.h"

static struct ibv_srq *make_srq(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge)
{
	struct ibv_srq_init_attr init = {.srq_context = pd, .attr = {.max_wr = max_wr, .max_sge = max_sge}};
	struct ibv_srq *srq = ibv_create_srq(pd, &init);

	CHECK(srq && init.attr.max_wr >= max_wr && init.attr.max_sge >= max_sge);
	CHECK(srq->srq_context == pd && srq->pd == pd);
	return srq;
}

static struct ibv_qp *make_qp(struct end *end, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = 64, .max_send_sge = 1},
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.srq = srq,
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(end->pd, &init);

	CHECK(qp && qp->srq == srq);
	return qp;
}

static int post_to(struct ibv_srq *srq, struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = sge_of(end, offset, length);
	struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = length ? 1 : 0}, *bad;

	return ibv_post_srq_recv(srq, &wr, &bad);
}

static int send_on(struct ibv_qp *qp, struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = sge_of(end, offset, length);
	struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = length ? 1 : 0, .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static struct rn_pool_block *block_of(struct ibv_srq *srq)
{
	return rn_pool_block(rn_srq(srq)->pool);
}

enum { QPS = 4 };

/* a sends on QPs of its own; b receives on QPs that share an SRQ. */
static struct ibv_srq *shared;
static struct ibv_qp *senders[QPS], *receivers[QPS];

static void open_shared(uint32_t max_wr)
{
	open_pair_with((struct end_options){.cqe = 1024});
	shared = make_srq(b.pd, max_wr, 2);
	for (int i = 0; i < QPS; i++) {
		senders[i] = make_qp(&a, NULL);
		receivers[i] = make_qp(&b, shared);
		connect_to(senders[i], receivers[i]->qp_num);
		connect_to(receivers[i], senders[i]->qp_num);
	}
}

static void close_shared(void)
{
	for (int i = 0; i < QPS; i++) {
		CHECK_EQ(ibv_destroy_qp(senders[i]), 0);
		if (receivers[i])
			CHECK_EQ(ibv_destroy_qp(receivers[i]), 0);
	}
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	close_pair();
	expect_live_nothing();
}

/* How many can be posted until it is full: what is in use is used for something. */
static uint32_t room_in(struct ibv_srq *srq)
{
	uint32_t room = 0;

	while (!post_to(srq, &b, 1000 + room, 0, 0))
		room++;
	return room;
}

/* --- the calls -------------------------------------------------------------------------------------- */

static void test_calls(void)
{
	/* What its receives could be is ignored: it has none of its own. */
	struct ibv_qp_init_attr ignored = {
		.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = UINT32_MAX, .max_recv_sge = UINT32_MAX}};
	struct ibv_qp *other;
	struct ibv_srq_init_attr init = {.attr = {.max_wr = 0, .max_sge = 1}};
	struct ibv_srq_attr attr = {.srq_limit = 9};
	struct ibv_sge sges[3] = {{0}};
	struct ibv_recv_wr wr = {.sg_list = sges, .num_sge = 3}, *bad = NULL;
	struct ibv_qp_attr qp_attr;
	struct ibv_qp_init_attr qp_init;
	struct ibv_qp *qp;

	open_pair();
	CHECK(!ibv_create_srq(b.pd, &init) && errno == EINVAL);
	init.attr.max_wr = 1 << 30;
	CHECK(!ibv_create_srq(b.pd, &init) && errno == EINVAL);
	init.attr = (struct ibv_srq_attr){.max_wr = 8, .max_sge = 1000};
	CHECK(!ibv_create_srq(b.pd, &init) && errno == EINVAL);

	shared = make_srq(b.pd, 8, 2);
	CHECK_EQ(ibv_query_srq(shared, &attr), 0);
	CHECK_EQ(attr.max_wr, 8);
	CHECK_EQ(attr.max_sge, 2);
	CHECK_EQ(attr.srq_limit, 0);
	CHECK_EQ(ibv_post_srq_recv(shared, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	CHECK_EQ(room_in(shared), 8);
	CHECK_EQ(post_to(shared, &b, 1, 0, 8), ENOMEM);

	attr.srq_limit = 9;
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_LIMIT), EINVAL);
	CHECK_EQ(ibv_modify_srq(shared, &attr, 1 << 9), EINVAL);
	CHECK_EQ(ibv_dealloc_pd(b.pd), EBUSY);
	qp = make_qp(&b, shared);
	CHECK_EQ(ibv_destroy_srq(shared), EBUSY);
	CHECK_EQ(ibv_query_qp(qp, &qp_attr, IBV_QP_CAP, &qp_init), 0);
	CHECK(qp_init.srq == shared);
	CHECK_EQ(qp_init.cap.max_recv_wr, 0);
	ignored.srq = shared;
	ignored.send_cq = ignored.recv_cq = b.cq;
	other = ibv_create_qp(b.pd, &ignored);
	CHECK(other);
	CHECK_EQ(ignored.cap.max_recv_wr, 0);
	CHECK_EQ(ibv_destroy_qp(other), 0);
	ignored.srq = NULL;
	ignored.cap.max_recv_wr = ignored.cap.max_recv_sge = UINT32_MAX;
	CHECK(!ibv_create_qp(b.pd, &ignored) && errno == EINVAL);
	to_init(qp);
	wr.num_sge = 0;
	CHECK_EQ(ibv_post_recv(qp, &wr, &bad), EINVAL);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	close_pair();
}

static void test_sharing(void)
{
	open_shared(64);
	for (int i = 0; i < 32; i++)
		CHECK_EQ(post_to(shared, &b, i, i * 64, 64), 0);
	/* In the order of posting, whoever sends. */
	for (int i = 0; i < 32; i++) {
		struct ibv_wc wc;

		memset(a.buffer, 'A' + i, 64);
		CHECK_EQ(send_on(senders[i % QPS], &a, i, 0, 33 + i), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		wc = poll_one(b.cq);
		CHECK_EQ(wc.wr_id, i);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.opcode, IBV_WC_RECV);
		CHECK_EQ(wc.byte_len, 33 + i > 64 ? 64 : 33 + i);
		CHECK_EQ(wc.qp_num, receivers[i % QPS]->qp_num);
		CHECK_EQ(wc.src_qp, senders[i % QPS]->qp_num);
		CHECK_EQ(b.buffer[i * 64], 'A' + i);
		if (i == 31)
			break;
	}
	expect_nothing(b.cq);
	close_shared();
}

/* A burst on each, polled later: each queue pair's messages come in order. */
static void test_bursts(void)
{
	enum { EACH = 16 };
	uint32_t next[QPS] = {0};

	open_shared(64);
	for (int i = 0; i < QPS * EACH; i++)
		CHECK_EQ(post_to(shared, &b, i, i * 64, 64), 0);
	for (int i = 0; i < QPS * EACH; i++) {
		*(uint32_t *)(a.buffer + i * 4) = i / QPS;
		CHECK_EQ(send_on(senders[i % QPS], &a, i, i * 4, 4), 0);
	}
	for (int i = 0; i < QPS * EACH; i++) {
		struct ibv_wc wc = poll_one(b.cq);
		int from = 0;

		while (receivers[from]->qp_num != wc.qp_num)
			from++;
		CHECK_EQ(*(uint32_t *)(b.buffer + wc.wr_id * 64), next[from]++);
	}
	CHECK_EQ(room_in(shared), 64);
	close_shared();
}

static void test_rnr(void)
{
	open_shared(8);
	CHECK_EQ(send_on(senders[0], &a, 1, 0, 64), 0);
	expect_nothing(a.cq);
	CHECK_EQ(post_to(shared, &b, 7, 0, 64), 0);
	expect(b.cq, 7, IBV_WC_SUCCESS);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_shared();
}

static void test_write_with_imm(void)
{
	struct ibv_wc wc;

	open_shared(8);
	CHECK_EQ(post_to(shared, &b, 7, 0, 0), 0);
	{
		struct ibv_sge sge = sge_of(&a, 0, 100);
		struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .imm_data = 0x01020304,
					 .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .send_flags = IBV_SEND_SIGNALED,
					 .wr.rdma = {at_b(4096), b.mr->rkey}}, *bad;

		CHECK_EQ(ibv_post_send(senders[0], &wr, &bad), 0);
	}
	expect(a.cq, 1, IBV_WC_SUCCESS);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK_EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	CHECK_EQ(wc.imm_data, 0x01020304);
	CHECK_EQ(wc.byte_len, 100);
	CHECK_EQ(b.buffer[4096], 'a');
	close_shared();
}

/* The keys of an SRQ's receives are of its own PD. */
static void test_own_pd(void)
{
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_sge sge;
	struct ibv_recv_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1}, *bad;
	struct ibv_qp *qp;
	char buffer[64];

	open_pair();
	pd = ibv_alloc_pd(b.context);
	mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	shared = make_srq(pd, 8, 1);
	qp = make_qp(&b, shared);
	connect_to(qp, a.qp->qp_num);
	{
		struct ibv_qp_attr attr = default_attr(0);

		CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
		connect_to(a.qp, qp->qp_num);
	}
	sge = (struct ibv_sge){.addr = (uintptr_t)buffer, .length = 64, .lkey = mr->lkey};
	CHECK_EQ(ibv_post_srq_recv(shared, &wr, &bad), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 5, IBV_WC_SUCCESS);
	CHECK_EQ(buffer[63], 'a');
	/* A key of the queue pair's PD is none. */
	sge = sge_of(&b, 0, 64);
	CHECK_EQ(ibv_post_srq_recv(shared, &wr, &bad), 0);
	CHECK_EQ(post_send(&a, 2, 0, 64), 0);
	expect(a.cq, 2, IBV_WC_REM_OP_ERR);
	expect(b.cq, 5, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(ibv_dealloc_pd(pd), 0);
	close_pair();
}

/* --- events ------------------------------------------------------------------------------------------- */

static void expect_srq_event(struct ibv_context *context, struct ibv_srq *srq)
{
	struct ibv_async_event event;

	CHECK(readable(context->async_fd, LIMIT_MS));
	CHECK_EQ(ibv_get_async_event(context, &event), 0);
	CHECK_EQ(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(event.element.srq == srq);
	ibv_ack_async_event(&event);
}

static void test_limit(void)
{
	struct ibv_srq_attr attr = {.srq_limit = 6};

	open_shared(8);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_LIMIT), 0);
	CHECK_EQ(ibv_query_srq(shared, &attr), 0);
	CHECK_EQ(attr.srq_limit, 6);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(send_on(senders[0], &a, i, 0, 8), 0);
		expect(b.cq, i, IBV_WC_SUCCESS);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
	CHECK_EQ(ibv_query_srq(shared, &attr), 0);
	CHECK_EQ(attr.srq_limit, 6); /* six are left, which is not fewer */
	CHECK_EQ(send_on(senders[1], &a, 2, 0, 8), 0);
	expect_srq_event(b.context, shared);
	CHECK_EQ(ibv_query_srq(shared, &attr), 0);
	CHECK_EQ(attr.srq_limit, 0);
	CHECK_EQ(send_on(senders[1], &a, 3, 0, 8), 0);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	expect(b.cq, 3, IBV_WC_SUCCESS);
	CHECK(!readable(b.context->async_fd, 0)); /* once */

	/* Reached already; and one that nobody reads goes with its object. */
	attr.srq_limit = 6;
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_LIMIT), 0);
	expect_srq_event(b.context, shared);
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_LIMIT), 0);
	close_shared();
}

static void test_last_wqe(void)
{
	struct ibv_qp_attr attr = default_attr(0);

	open_shared(8);
	CHECK_EQ(post_to(shared, &b, 1, 0, 64), 0);
	CHECK_EQ(to_state(receivers[0], &attr, IBV_QPS_ERR, 0), 0);
	expect_event(b.context, IBV_EVENT_QP_LAST_WQE_REACHED);
	expect_nothing(b.cq); /* not flushed: another may use it */
	CHECK_EQ(send_on(senders[1], &a, 1, 0, 64), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_shared();
}

static void test_too_short(void)
{
	open_shared(8);
	CHECK_EQ(post_to(shared, &b, 1, 0, 16), 0);
	CHECK_EQ(post_to(shared, &b, 2, 0, 64), 0);
	CHECK_EQ(send_on(senders[0], &a, 1, 0, 17), 0);
	expect(a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
	expect(b.cq, 1, IBV_WC_LOC_LEN_ERR);
	expect_event(b.context, IBV_EVENT_QP_REQ_ERR);
	expect_event(b.context, IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK_EQ(send_on(senders[1], &a, 2, 0, 17), 0);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(room_in(shared), 8);
	close_shared();
}

/* --- resizing ------------------------------------------------------------------------------------------- */

static void test_resize(void)
{
	struct ibv_srq_attr attr = {.max_wr = 64};
	struct rn_recv_claim claim = {0};

	open_shared(8);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	CHECK_EQ(send_on(senders[0], &a, 0, 0, 8), 0); /* one has arrived, one is claimed, six are posted */
	CHECK(rn_recv_claim(rn_arena, block_of(shared), rn_name_of_process(1), &claim));
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_MAX_WR), 0);
	CHECK_EQ(ibv_query_srq(shared, &attr), 0);
	CHECK_EQ(attr.max_wr, 64);
	for (int i = 8; i < 40; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	for (int i = 2; i < 40; i++) {
		CHECK_EQ(send_on(senders[i % QPS], &a, i, 0, 8), 0);
		expect(b.cq, i, IBV_WC_SUCCESS);
	}
	/* The one that was claimed comes back from the ring it was left in. */
	rn_recv_claim_give_back(block_of(shared), &claim);
	CHECK_EQ(post_to(shared, &b, 40, 0, 64), 0);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(send_on(senders[0], &a, 50, 0, 8), 0);
	CHECK_EQ(poll_one(b.cq).wr_id + poll_one(b.cq).wr_id, 41);

	attr.max_wr = 4;
	for (int i = 0; i < 5; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_MAX_WR), EINVAL);
	CHECK_EQ(send_on(senders[0], &a, 60, 0, 8), 0);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_MAX_WR), 0);
	CHECK_EQ(post_to(shared, &b, 9, 0, 64), ENOMEM);
	while (ibv_poll_cq(a.cq, 1, &(struct ibv_wc){0}) > 0)
		;
	close_shared();
}

static _Atomic bool resized_enough;

/* An owner says what it likes of its rings: the older one ends where its arena does, and has shorter lists. */
static void test_shorter_lists_before(void)
{
	enum { OLDER = 2, NEWER = 31 }; /* cache lines of each entry */
	char *arena = mmap(NULL, RN_ARENA_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct rn_pool_block *pool = rn_arena_pool(arena, 0);
	struct rn_entry *last = (struct rn_entry *)(arena + RN_ARENA_SIZE - OLDER * 64);
	struct rn_recv_claim claim = {0};

	CHECK(arena != MAP_FAILED);
	pool->ring = 7ull << 32 | NEWER << 23 | RN_ARENA_HEAP / 64;
	pool->older = 8ull << 32 | OLDER << 23 | (RN_ARENA_SIZE / 64 - OLDER);
	last->word = 8 << 2 | RN_ENTRY_POSTED;
	CHECK(rn_recv_claim(arena, pool, rn_name_of_process(1), &claim));
	CHECK(claim.entry == last);
	CHECK((char *)(last->slot.sge + claim.max_sge) <= arena + RN_ARENA_SIZE);
	munmap(arena, RN_ARENA_SIZE);
}

static void *claim_always(void *block)
{
	struct rn_recv_claim claim = {0};

	while (!atomic_load(&resized_enough)) {
		CHECK(rn_recv_claim(rn_arena, block, rn_name_of_process(1), &claim));
		rn_recv_claim_give_back(block, &claim);
	}
	return NULL;
}

/* While receives move to another ring they are hard to see, but there. */
static void test_never_empty_while_resized(void)
{
	enum { ROUNDS = 12, RECEIVES = 4, LARGEST = 8192 };

	for (int round = 0; round < ROUNDS; round++) {
		pthread_t claimer;

		open_shared(RECEIVES);
		for (int i = 0; i < RECEIVES; i++)
			CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
		atomic_store(&resized_enough, false);
		CHECK_EQ(pthread_create(&claimer, NULL, claim_always, block_of(shared)), 0);
		for (uint32_t size = 2 * RECEIVES; size <= LARGEST; size *= 2) {
			struct ibv_srq_attr attr = {.max_wr = size};

			CHECK_EQ(ibv_modify_srq(shared, &attr, IBV_SRQ_MAX_WR), 0);
		}
		atomic_store(&resized_enough, true);
		CHECK_EQ(pthread_join(claimer, NULL), 0);
		close_shared();
	}
}

/* --- claimers that don't finish ---------------------------------------------------------------------------- */

static uint32_t name_of(struct ibv_qp *qp)
{
	return rn_name_of_qp(rn_qp(qp)->index, rn_qp(qp)->generation);
}

/* One that is stopped holds up its own receive only. */
static void test_stopped_claimer(void)
{
	struct rn_recv_claim claims[3] = {{0}};

	open_shared(8);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	for (int i = 0; i < 3; i++)
		CHECK(rn_recv_claim(rn_arena, block_of(shared), name_of(receivers[i]), &claims[i]));
	for (int round = 0; round < 100; round++) {
		struct ibv_wc wc;

		CHECK_EQ(send_on(senders[3], &a, round, 0, 8), 0);
		expect(a.cq, round, IBV_WC_SUCCESS);
		wc = poll_one(b.cq);
		CHECK(wc.wr_id >= 3);
		CHECK_EQ(post_to(shared, &b, 3 + round % 5, 0, 64), 0);
	}
	/* One wakes up and finishes, one gives back, one fails. */
	claims[0].entry->slot.byte_len = 5;
	claims[0].entry->slot.status = IBV_WC_SUCCESS;
	rn_recv_claim_finish(rn_arena, &claims[0], &rn_qp(receivers[0])->block->finished);
	rn_cq_mark_ready(rn_qp(receivers[0])->recv_cq, rn_qp(receivers[0]));
	expect(b.cq, 0, IBV_WC_SUCCESS);
	rn_recv_claim_give_back(block_of(shared), &claims[1]);
	CHECK_EQ(to_state(receivers[2], &(struct ibv_qp_attr){0}, IBV_QPS_ERR, 0), 0);
	for (int i = 0; i < 7; i++)
		CHECK_EQ(send_on(senders[3], &a, i, 0, 8), 0);
	for (int i = 0, seen = 0; i < 7; i++) {
		struct ibv_wc wc = poll_one(b.cq);

		seen |= 1 << wc.wr_id;
		CHECK(i < 6 || seen == 0xfe);
	}
	CHECK_EQ(room_in(shared), 8);
	close_shared();
}

/* It died between pushing its completion and the last word. */
static void test_died_while_finishing(void)
{
	struct rn_recv_claim claim = {0};
	struct rn_entry *entry;

	open_shared(8);
	CHECK_EQ(post_to(shared, &b, 1, 0, 64), 0);
	CHECK(rn_recv_claim(rn_arena, block_of(shared), name_of(receivers[0]), &claim));
	entry = claim.entry;
	claim.claimed ^= 1ull << 32; /* so that the last word isn't said */
	rn_recv_claim_finish(rn_arena, &claim, &rn_qp(receivers[0])->block->finished);
	CHECK_EQ(atomic_load(&entry->word) & 3, RN_ENTRY_CLAIMED);
	rn_cq_mark_ready(rn_qp(receivers[0])->recv_cq, rn_qp(receivers[0]));
	expect_nothing(b.cq);
	CHECK_EQ(to_state(receivers[0], &(struct ibv_qp_attr){0}, IBV_QPS_ERR, 0), 0);
	CHECK_EQ(send_on(senders[1], &a, 1, 0, 8), 0);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(room_in(shared), 8);
	close_shared();
}

/* Lists and words that a confused peer has scribbled over. */
static void test_confused(void)
{
	_Atomic uint32_t *finished;

	open_shared(8);
	finished = &rn_qp(receivers[0])->block->finished;
	for (uint32_t i = 0, junk = 1; i < 64; i++, junk *= 5) {
		atomic_store(finished, junk);
		rn_cq_mark_ready(rn_qp(receivers[0])->recv_cq, rn_qp(receivers[0]));
		expect_nothing(b.cq);
	}
	CHECK_EQ(post_to(shared, &b, 1, 0, 64), 0);
	CHECK_EQ(post_to(shared, &b, 2, 0, 64), 0);
	{
		/* A list that bites its own tail. */
		struct rn_recv_claim claim = {0};
		uint32_t reference;

		CHECK(rn_recv_claim(rn_arena, block_of(shared), name_of(receivers[0]), &claim));
		reference = ((char *)claim.entry - rn_arena) / 64;
		atomic_store(&claim.entry->slot.owner_sequence, reference);
		atomic_store(finished, reference);
		rn_cq_mark_ready(rn_qp(receivers[0])->recv_cq, rn_qp(receivers[0]));
		expect_nothing(b.cq);
	}
	/* Hints are hints. */
	atomic_store(&block_of(shared)->head, 0x12345678);
	CHECK_EQ(send_on(senders[1], &a, 1, 0, 8), 0);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	/* A ring that lies outside of the arena has no receives. */
	atomic_store(&block_of(shared)->ring, UINT64_MAX);
	CHECK_EQ(send_on(senders[1], &a, 2, 0, 8), 0);
	expect_nothing(b.cq);
	close_shared();
}

/* --- threads ---------------------------------------------------------------------------------------------------- */

enum { MESSAGES = 20000 };

static void *send_many(void *arg)
{
	int i = (int)(intptr_t)arg;

	for (int sent = 0; sent < MESSAGES; sent++) {
		struct ibv_send_wr wr = {.opcode = IBV_WR_SEND,
					 .send_flags = IBV_SEND_INLINE | (sent % 16 ? 0 : IBV_SEND_SIGNALED)}, *bad;
		uint32_t text[2] = {i, sent};
		struct ibv_sge sge = {.addr = (uintptr_t)text, .length = sizeof(text)};

		wr.sg_list = &sge;
		wr.num_sge = 1;
		while (ibv_post_send(senders[i], &wr, &bad))
			sched_yield();
	}
	return NULL;
}

static void test_threads(void)
{
	uint32_t next[QPS] = {0};
	pthread_t threads[QPS];
	struct ibv_wc wc;

	open_pair_with((struct end_options){.cqe = 1024, .inline_data = 64});
	shared = make_srq(b.pd, 32, 2);
	for (int i = 0; i < QPS; i++) {
		struct ibv_qp_init_attr init = {.cap = {64, 0, 1, 0, 64}, .send_cq = a.cq, .recv_cq = a.cq,
						.qp_type = IBV_QPT_RC};

		CHECK(senders[i] = ibv_create_qp(a.pd, &init));
		receivers[i] = make_qp(&b, shared);
		connect_to(senders[i], receivers[i]->qp_num);
		connect_to(receivers[i], senders[i]->qp_num);
	}
	for (int i = 0; i < 32; i++)
		CHECK_EQ(post_to(shared, &b, i, i * 64, 64), 0);
	for (int i = 0; i < QPS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, send_many, (void *)(intptr_t)i), 0);
	for (int got = 0; got < QPS * MESSAGES;) {
		while (ibv_poll_cq(a.cq, 1, &wc) > 0)
			CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		if (!ibv_poll_cq(b.cq, 1, &wc))
			continue;
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		{
			const uint32_t *text = (uint32_t *)(b.buffer + wc.wr_id * 64);

			CHECK_EQ(receivers[text[0]]->qp_num, wc.qp_num);
			CHECK_EQ(text[1], next[text[0]]++);
		}
		CHECK_EQ(post_to(shared, &b, wc.wr_id, wc.wr_id * 64, 64), 0);
		got++;
	}
	for (int i = 0; i < QPS; i++)
		pthread_join(threads[i], NULL);
	close_shared();
}

/* --- processes ----------------------------------------------------------------------------------------------------- */

/* Sends until it is told to stop, or killed. */
static void serve_sender(int fd)
{
	struct end end;
	struct ibv_wc wc;
	uint32_t sent = 0;
	char stop;

	end_open(&end, &(struct end_options){.cqe = 256, .memory = USER_MEMORY});
	connect_over(&end, fd);
	CHECK_EQ(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	while (recv(fd, &stop, 1, MSG_PEEK) != 1) {
		memcpy(end.buffer, &sent, sizeof(sent));
		CHECK_EQ(post_send(&end, sent++, 0, 64), 0);
		wc = poll_one(end.cq);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	}
	CHECK_EQ(fcntl(fd, F_SETFL, 0), 0);
	meet(fd);
	end_close(&end);
	_exit(0); /* what the parent's device had in memory is nobody's here */
}

static void start_sender(struct other *other, struct ibv_qp **qp)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct address mine = {0}, theirs;

	*other = spawn(serve_sender);
	*qp = make_qp(&b, shared);
	mine.qpn = (*qp)->qp_num;
	tell(other->fd, &mine, sizeof(mine));
	CHECK(hear(other->fd, &theirs, sizeof(theirs)));
	attr.dest_qp_num = theirs.qpn;
	connect_with(*qp, attr);
	meet(other->fd);
}

enum { LONG = 3 * RN_REMOTE_CHUNK };

static void serve_two_messages(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	memset(end.buffer, 's', BUFFER);
	connect_over(&end, fd);
	CHECK_EQ(post_send(&end, 1, 0, LONG), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_send(&end, 2, 0, LONG), 0);
	expect(end.cq, 2, IBV_WC_REM_OP_ERR);
	meet(fd);
	end_close(&end);
	_exit(0);
}

/* The keys of an SRQ's receives are of its own PD for the owner's engine, too. */
static void test_own_pd_for_the_engine(void)
{
	struct address mine = {0}, theirs;
	struct ibv_mr *mr, *own;
	struct other other;
	struct ibv_pd *pd;
	struct ibv_qp *qp;

	setenv("RDMANET_SOFT_CMA", "0", 1);
	other = spawn(serve_two_messages);
	open_pair_with((struct end_options){.memory = USER_MEMORY});
	pd = ibv_alloc_pd(b.context);
	mr = ibv_reg_mr(pd, b.buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE);
	shared = make_srq(pd, 8, 1);
	qp = make_qp(&b, shared);
	own = b.mr;
	b.mr = mr;
	CHECK_EQ(post_to(shared, &b, 5, 0, LONG), 0);
	b.mr = own;
	CHECK_EQ(post_to(shared, &b, 6, LONG, LONG), 0); /* with a key of the queue pair's */
	mine.qpn = qp->qp_num;
	tell(other.fd, &mine, sizeof(mine));
	CHECK(hear(other.fd, &theirs, sizeof(theirs)));
	connect_to(qp, theirs.qpn);
	meet(other.fd);
	expect(b.cq, 5, IBV_WC_SUCCESS);
	CHECK(b.buffer[0] == 's' && b.buffer[LONG - 1] == 's');
	expect(b.cq, 6, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(b.buffer[LONG], 'b');
	meet(other.fd);
	join(&other);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(ibv_dealloc_pd(pd), 0);
	close_pair();
	unsetenv("RDMANET_SOFT_CMA");
}

/* Receive some. The receives of whoever died come back. */
static void receive_some(int count)
{
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	struct ibv_wc wc;

	while (count) {
		CHECK(now_ns() < limit);
		if (!ibv_poll_cq(b.cq, 1, &wc)) {
			sched_yield();
			continue;
		}
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.byte_len, 64);
		CHECK_EQ(post_to(shared, &b, wc.wr_id, 0, 64), 0);
		count--;
	}
}

static void drain_events(struct ibv_context *context)
{
	struct ibv_async_event event;

	while (readable(context->async_fd, 0) && !ibv_get_async_event(context, &event))
		ibv_ack_async_event(&event);
}

static void test_killed(void)
{
	enum { WR = 8, ROUNDS = 60, SENDERS = 3 };
	struct other others[SENDERS];
	struct ibv_qp *qps[SENDERS];
	unsigned seed = getenv("SEED") ? strtoul(getenv("SEED"), NULL, 0) : (unsigned)now_ns();
	uint32_t used = 0;
	uint64_t limit;
	struct ibv_wc wc;

	printf("    seed %u\n", seed);
	fflush(NULL);
	end_open(&b, &(struct end_options){.cqe = 1024});
	CHECK_EQ(fcntl(b.context->async_fd, F_SETFL, O_NONBLOCK), 0);
	shared = make_srq(b.pd, WR, 2);
	for (int i = 0; i < WR; i++)
		CHECK_EQ(post_to(shared, &b, i, 0, 64), 0);
	for (int i = 0; i < SENDERS; i++)
		start_sender(&others[i], &qps[i]);
	for (int round = 0; round < ROUNDS; round++) {
		int victim = rand_r(&seed) % SENDERS;

		receive_some(50 + rand_r(&seed) % 500);
		if (round % 4 == 0) { /* stopped first, wherever it is: the others go on */
			kill(others[victim].pid, SIGSTOP);
			receive_some(200);
		}
		join_killed(&others[victim]);
		CHECK_EQ(ibv_destroy_qp(qps[victim]), 0);
		while (!post_to(shared, &b, round, 0, 64)) /* for what had arrived and went with the queue pair */
			;
		drain_events(b.context);
		start_sender(&others[victim], &qps[victim]);
	}
	limit = now_ns() + LIMIT_MS * 1000000ull;
	for (int i = 0; i < SENDERS; i++) {
		char stop = 's';

		tell(others[i].fd, &stop, 1);
		while (recv(others[i].fd, &stop, 1, MSG_PEEK | MSG_DONTWAIT) != 1) {
			CHECK(now_ns() < limit);
			if (ibv_poll_cq(b.cq, 1, &wc))
				CHECK_EQ(post_to(shared, &b, wc.wr_id, 0, 64), 0);
		}
		CHECK(hear(others[i].fd, &stop, 1));
	}
	/* Nothing was lost: what isn't posted has arrived. */
	while (ibv_poll_cq(b.cq, 1, &wc))
		used++;
	while (!post_to(shared, &b, 0, 0, 64))
		used--;
	CHECK_EQ(used, 0);
	CHECK_EQ(rn_pool_left(rn_srq(shared)->pool), WR);
	for (int i = 0; i < SENDERS; i++) {
		join(&others[i]);
		CHECK_EQ(ibv_destroy_qp(qps[i]), 0);
	}
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	end_close(&b);
	memset(&b, 0, sizeof(b));
	expect_live_nothing();
}

/* UCX names a CQ for a basic one, which adapters disregard. */
static void test_basic_with_a_cq(void)
{
	struct ibv_srq_init_attr_ex init = {.attr = {.max_wr = 4, .max_sge = 1}, .srq_type = IBV_SRQT_BASIC};
	struct ibv_srq *srq;

	open_pair_with((struct end_options){.cqe = 4});
	init.pd = b.pd;
	init.cq = b.cq;
	init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ;
	CHECK((srq = ibv_create_srq_ex(b.context, &init)) && !ibv_destroy_srq(srq));
	init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
	CHECK(!ibv_create_srq_ex(b.context, &init) && errno == EINVAL);
	close_pair();
	expect_live_nothing();
}

int main(void)
{
	RUN(test_calls);
	RUN(test_basic_with_a_cq);
	RUN(test_sharing);
	RUN(test_bursts);
	RUN(test_rnr);
	RUN(test_write_with_imm);
	RUN(test_own_pd);
	RUN(test_own_pd_for_the_engine);
	RUN(test_limit);
	RUN(test_last_wqe);
	RUN(test_too_short);
	RUN(test_resize);
	RUN(test_shorter_lists_before);
	RUN(test_never_empty_while_resized);
	RUN(test_stopped_claimer);
	RUN(test_died_while_finishing);
	RUN(test_confused);
	RUN(test_threads);
	RUN(test_killed);
	return 0;
}
