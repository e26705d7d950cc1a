/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words in a peer's arena that are right but for one value: facts of its queue pair, of its keys, of its shared queues.
 * Nothing is read or written by them, and nobody else notices.
 *
 * The peer is an honest process. We write its words ourselves, where they are mapped here, after it has stopped looking
 * for such (shm/own.h), and put them right again.
 */
#include "processes.h"
#include "soft.h"
#include "base/page.h"

enum { LENGTH = 8 };

static struct end end;
static struct other peer;
static struct address theirs;
static char *arena;               /* the peer's */
static struct rn_qp_block *facts; /* of its queue pair */
static struct rn_mr_entry *entry; /* of its region */

static void serve(int fd)
{
	char mark;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	memset(end.buffer, 'p', BUFFER);
	to_init(end.qp);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(post_recv(&end, i, 0, LENGTH), 0);
	connect_over(&end, fd);
	meet(fd);
	rn_own_close();
	meet(fd);
	CHECK(hear(fd, &mark, 1));
	for (int i = 0; i < BUFFER; i++)
		CHECK_EQ(end.buffer[i], i < LENGTH ? 'e' : 'p');
	end_close(&end);
}

static void open_both(void)
{
	struct ibv_qp_attr attr = default_attr(0);

	peer = spawn(serve);
	attr.timeout = SHORT_TIMEOUT;
	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	memset(end.buffer, 'e', BUFFER);
	theirs = connect_over_with(&end, peer.fd, attr);
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, LENGTH, theirs.buffer, theirs.rkey), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS); /* so its segment is mapped, too */
	meet(peer.fd);
	arena = rn_qp(end.qp)->peer->arena;
	facts = rn_arena_locate(arena, theirs.qpn);
	entry = &rn_arena_mrs(arena)[rn_mr_index(theirs.rkey)];
	meet(peer.fd);
}

static void close_both(void)
{
	tell(peer.fd, "m", 1);
	join(&peer);
	end_close(&end);
	expect_live_nothing();
}

/* --- of a queue pair ---------------------------------------------------------------------------------------- */

/* A requester looks at them once, when it has been connected. */
static enum ibv_wc_status write_anew(void)
{
	struct ibv_wc wc;

	CHECK_EQ(to_state(end.qp, &(struct ibv_qp_attr){0}, IBV_QPS_RESET, 0), 0);
	connect_impatiently(end.qp, theirs.qpn);
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, LENGTH, theirs.buffer, theirs.rkey), 0);
	wc = poll_one(end.cq);
	CHECK_EQ(wc.wr_id, 1);
	return wc.status;
}

#define ANSWERS_NOBODY_BY(...)                                             \
	do {                                                               \
		struct rn_qp_block right;                                  \
		memcpy(&right, facts, offsetof(struct rn_qp_block, busy)); \
		__VA_ARGS__;                                               \
		CHECK_EQ(write_anew(), IBV_WC_RETRY_EXC_ERR);              \
		memcpy(facts, &right, offsetof(struct rn_qp_block, busy)); \
		CHECK_EQ(write_anew(), IBV_WC_SUCCESS);                    \
	} while (0)

static void test_queue_pair(void)
{
	open_both();
	ANSWERS_NOBODY_BY(facts->generation_state = (facts->generation_state & ~0xffull) | IBV_QPS_INIT);
	ANSWERS_NOBODY_BY(facts->generation_state = (facts->generation_state & ~0xffull) | IBV_QPS_ERR);
	ANSWERS_NOBODY_BY(facts->qpn ^= 1);
	ANSWERS_NOBODY_BY(facts->dest_qpn ^= 1);
	ANSWERS_NOBODY_BY(facts->rq_psn++);
	/* Its ring. */
	ANSWERS_NOBODY_BY(facts->rq_size = 0);
	ANSWERS_NOBODY_BY(facts->rq_size = 1);
	ANSWERS_NOBODY_BY(facts->rq_size--);
	ANSWERS_NOBODY_BY(facts->rq_size = 2 * RN_MAX_QP_WR);
	ANSWERS_NOBODY_BY(facts->rq_stride = 0);
	ANSWERS_NOBODY_BY(facts->rq_stride += 8);
	ANSWERS_NOBODY_BY(facts->rq_stride = 4096 + 64);
	ANSWERS_NOBODY_BY({
		facts->rq_stride = 512;
		facts->rq_max_sge = RN_MAX_SGE + 1;
	});
	ANSWERS_NOBODY_BY(facts->rq_max_sge = RN_MAX_SGE);
	ANSWERS_NOBODY_BY(facts->rq_offset = RN_ARENA_HEAP - 64);
	ANSWERS_NOBODY_BY(facts->rq_offset += 8);
	ANSWERS_NOBODY_BY(facts->rq_offset = RN_ARENA_SIZE - 64);
	ANSWERS_NOBODY_BY(facts->rq_offset = RN_ARENA_SIZE + 64);
	ANSWERS_NOBODY_BY(facts->rq_offset = UINT64_MAX - 63);
	ANSWERS_NOBODY_BY(facts->rq_eager = RN_ARENA_SIZE / 2);
	ANSWERS_NOBODY_BY(facts->rq_eager = UINT32_MAX);
	/* Other objects. */
	ANSWERS_NOBODY_BY(facts->cq = RN_CQS_MAX);
	ANSWERS_NOBODY_BY(facts->cq_bit = RN_CQ_QPS_MAX);
	ANSWERS_NOBODY_BY(facts->pool = RN_POOLS_MAX);
	close_both();
}

/* --- of a key ------------------------------------------------------------------------------------------------- */

static void expect_denied(uint64_t at)
{
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_READ, 1, 2 * LENGTH, LENGTH, at, theirs.rkey), 0);
	expect(end.cq, 1, IBV_WC_REM_ACCESS_ERR);
	for (int i = 0; i < BUFFER; i++)
		CHECK_EQ(end.buffer[i], 'e');
	close_both();
}

/* What the entry says is not what the segment has. */
static void test_segment(void)
{
	open_both();
	entry->offset += BUFFER + rn_page();
	expect_denied(theirs.buffer);
	open_both();
	entry->length += rn_page();
	expect_denied(theirs.buffer + BUFFER);
	open_both();
	entry->length += rn_page();
	expect_denied(theirs.buffer + BUFFER - LENGTH / 2);
	open_both();
	entry->offset = UINT64_MAX - LENGTH / 2;
	expect_denied(theirs.buffer);
}

/* --- of a shared queue of an XRC domain ------------------------------------------------------------------------ */

enum { TARGET_RTS = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT };

static void serve_xrc(int fd)
{
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
	struct ibv_qp_init_attr_ex target = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
	struct ibv_srq_init_attr_ex init = {
		.attr = {.max_wr = 8, .max_sge = 1},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
	};
	struct ibv_recv_wr *bad;
	struct ibv_qp_attr attr;
	struct ibv_sge sge;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	uint32_t words[2], sender;
	char mark;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	memset(end.buffer, 'p', BUFFER);
	target.xrcd = init.xrcd = verbs_get_ctx(end.context)->open_xrcd(end.context, &domain);
	CHECK(init.xrcd && (qp = verbs_get_ctx(end.context)->create_qp_ex(end.context, &target)));
	init.pd = end.pd;
	init.cq = end.cq;
	CHECK(srq = ibv_create_srq_ex(end.context, &init));
	sge = sge_of(&end, 0, LENGTH);
	CHECK_EQ(ibv_post_srq_recv(srq, &(struct ibv_recv_wr){.sg_list = &sge, .num_sge = 1}, &bad), 0);
	words[0] = qp->qp_num;
	CHECK_EQ(ibv_get_srq_num(srq, &words[1]), 0);
	tell(fd, words, sizeof(words));
	CHECK(hear(fd, &sender, sizeof(sender)));
	attr = default_attr(sender);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, TARGET_RTS), 0);
	meet(fd);
	rn_own_close();
	meet(fd);
	CHECK(hear(fd, &mark, 1));
	exit(0);
}

/* Send to a shared queue, after this word of it has got this value; 0: none has. */
static enum ibv_wc_status send_to_queue(size_t word, uint32_t value)
{
	struct ibv_qp_init_attr init = {.cap = {.max_send_wr = 1, .max_send_sge = 1}, .qp_type = IBV_QPT_XRC_SEND};
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED, .num_sge = 1};
	struct rn_pool_block *pool;
	struct ibv_qp_attr attr;
	struct ibv_sge sge;
	uint32_t words[2];
	struct ibv_qp *qp;
	struct ibv_wc wc;

	peer = spawn(serve_xrc);
	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	init.send_cq = end.cq;
	CHECK(qp = ibv_create_qp(end.pd, &init));
	tell(peer.fd, &qp->qp_num, sizeof(qp->qp_num));
	CHECK(hear(peer.fd, words, sizeof(words)));
	attr = default_attr(words[0]);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), 0);
	meet(peer.fd);
	EVENTUALLY(atomic_load(&rn_qp(qp)->peer->state) == RN_PEER_READY);
	meet(peer.fd);
	pool = rn_arena_pool(rn_qp(qp)->peer->arena, words[1] % RN_POOLS_MAX);
	if (word)
		*(uint32_t *)((char *)pool + word) = value;
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	sge = sge_of(&end, 0, LENGTH);
	wr.sg_list = &sge;
	wr.qp_type.xrc.remote_srqn = words[1];
	CHECK_EQ(ibv_post_send(qp, &wr, &bad), 0);
	wc = poll_one(end.cq);
	CHECK_EQ(ibv_destroy_qp(qp), 0);
	close_both();
	return wc.status;
}

static void test_shared_queue(void)
{
	static const struct {
		size_t at;
		uint32_t value;
	} wrong[] = {
		{offsetof(struct rn_pool_block, number), 0},
		{offsetof(struct rn_pool_block, number), RN_POOLS_MAX},
		{offsetof(struct rn_pool_block, domain), 0},
		{offsetof(struct rn_pool_block, domain), 77},
		{offsetof(struct rn_pool_block, cq), RN_CQS_MAX},
		{offsetof(struct rn_pool_block, cq), UINT32_MAX},
		{offsetof(struct rn_pool_block, cq_bit), RN_CQ_QPS_MAX},
		{offsetof(struct rn_pool_block, cq_bit), UINT32_MAX},
	};

	CHECK_EQ(send_to_queue(0, 0), IBV_WC_SUCCESS);
	for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		CHECK_EQ(send_to_queue(wrong[i].at, wrong[i].value), IBV_WC_REM_INV_REQ_ERR);
}

int main(void)
{
	RUN(test_queue_pair);
	RUN(test_segment);
	RUN(test_shared_queue);
	return 0;
}
