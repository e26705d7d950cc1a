/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer out of its mind, second part: it writes garbage over what many share (pools of receives, claims, lists of
 * what has finished), over eager receive buffers, windows, datagrams' queue pairs and CQs, in its own arena or
 * in ours, while we send to it, and receive from it, by all of these.  Values are random, or on some boundary.  We
 * neither crash nor hang, no receive is longer than its buffer, no byte lands outside of what was posted or
 * offered, and new objects work as if nothing had been.
 */
#include "confused.h"

#include "objects/srq.h"

static bool scribble_here, scribble_there; /* over its own arena; over what it has mapped of ours */

enum {
	QKEY = 0x11111111,
	GRH = 40,
	RECEIVES = 32,
	ROOM = 256, /* of a receive, and as much of nothing behind it */
	RECEIVES_END = 3 * RECEIVES * 2 * ROOM,
	SENT = RECEIVES_END,
	FETCHED = SENT + ROOM,
	TARGET = 512 * 1024, /* what the window shows */
	TARGET_BYTES = 4096,
	CANARY = 0xc5,
	GARBAGE_MS = 60,
#ifdef RN_TSAN
	ROUNDS = 6, /* a process that it watches takes a second to start */
#else
	ROUNDS = 20,
#endif
};
enum { OWN, SHARED, DATAGRAM, QUEUES };

struct side {
	struct end end; /* its queue pair is OWN */
	struct ibv_srq *srq;
	struct ibv_qp *shared, *ud;
	struct ibv_mr *narrow;
	struct ibv_mw *mw;
	struct ibv_ah *ah;
};

struct introduction {
	uint32_t qpns[QUEUES], rkey, window;
	uint64_t buffer;
};

/* --- both sides ---------------------------------------------------------------------------------------- */

static struct ibv_qp *make_qp(struct side *side, enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = 64, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
		.send_cq = side->end.cq,
		.recv_cq = side->end.cq,
		.srq = srq,
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(side->end.pd, &init);

	CHECK(qp);
	return qp;
}

static void start_ud(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.port_num = 1, .qkey = QKEY, .sq_psn = 1};

	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, 0), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0);
}

static void post_one(struct side *side, unsigned queue, unsigned index)
{
	size_t at = (queue * RECEIVES + index % RECEIVES) * 2 * ROOM;
	struct ibv_sge sge = {(uintptr_t)side->end.buffer + at, ROOM, side->narrow->lkey};
	struct ibv_recv_wr wr = {.wr_id = 1 + at, .sg_list = &sge, .num_sge = 1}, *bad;

	/* It may be full: what a peer has scribbled over doesn't come back. */
	if (queue == SHARED)
		ibv_post_srq_recv(side->srq, &wr, &bad);
	else
		ibv_post_recv(queue == OWN ? side->end.qp : side->ud, &wr, &bad);
}

/* All can be sent to in three ways, and written to through a window. */
static void side_open(struct side *side)
{
	struct ibv_srq_init_attr init = {.attr = {.max_wr = RECEIVES, .max_sge = 1}};
	struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 3, .dgid.raw = {[15] = 1}}};

	memset(side, 0, sizeof(*side));
	end_open(&side->end, &(struct end_options){.memory = seed % 2 ? USER_MEMORY : DEVICE_MEMORY, .cqe = 4096});
	memset(side->end.buffer, CANARY, BUFFER);
	side->narrow = ibv_reg_mr(side->end.pd, side->end.buffer, RECEIVES_END, IBV_ACCESS_LOCAL_WRITE);
	side->srq = ibv_create_srq(side->end.pd, &init);
	side->mw = ibv_alloc_mw(side->end.pd, IBV_MW_TYPE_2);
	side->ah = ibv_create_ah(side->end.pd, &ah);
	CHECK(side->narrow && side->srq && side->mw && side->ah);
	side->shared = make_qp(side, IBV_QPT_RC, side->srq);
	side->ud = make_qp(side, IBV_QPT_UD, NULL);
	start_ud(side->ud);
	to_init(side->end.qp);
	for (unsigned queue = 0; queue < QUEUES; queue++)
		for (unsigned i = 0; i < RECEIVES; i++)
			post_one(side, queue, i);
}

static struct introduction meet_the_other(struct side *side, int fd)
{
	struct introduction mine = {{side->end.qp->qp_num, side->shared->qp_num, side->ud->qp_num}, side->end.mr->rkey, 0,
				    (uintptr_t)side->end.buffer + TARGET}, theirs;
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_send_wr *bad, wr = {
		.wr_id = 0,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_mw = {.mw = side->mw,
			    .rkey = (side->mw->rkey & ~0xffu) | ((side->mw->rkey + 1) & 0xff),
			    .bind_info = {side->end.mr, mine.buffer, TARGET_BYTES, IBV_ACCESS_REMOTE_WRITE}},
	};

	tell(fd, &mine, sizeof(mine));
	CHECK(hear(fd, &theirs, sizeof(theirs)));
	attr.timeout = 14;
	attr.dest_qp_num = theirs.qpns[OWN];
	connect_with(side->end.qp, attr);
	attr.dest_qp_num = theirs.qpns[SHARED];
	connect_with(side->shared, attr);
	CHECK_EQ(ibv_post_send(side->end.qp, &wr, &bad), 0);
	expect(side->end.cq, 0, IBV_WC_SUCCESS);
	tell(fd, &wr.bind_mw.rkey, sizeof(theirs.window));
	CHECK(hear(fd, &theirs.window, sizeof(theirs.window)));
	return theirs;
}

static void send_on(struct side *side, struct ibv_qp *qp, struct ibv_send_wr wr, uint32_t length)
{
	/* What is read doesn't land in what another queue pair sends at the same time. */
	struct ibv_sge sge = sge_of(&side->end, wr.opcode == IBV_WR_RDMA_READ ? FETCHED : SENT, length);
	struct ibv_send_wr *bad;

	wr.send_flags = IBV_SEND_SIGNALED;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	ibv_post_send(qp, &wr, &bad); /* it may be full, or in ERR */
}

static void send_all(struct side *side, const struct introduction *to)
{
	uint32_t length = 1 + rand_r(&seed) % (ROOM - GRH);

	send_on(side, side->end.qp, (struct ibv_send_wr){.opcode = IBV_WR_SEND}, length);
	send_on(side, side->shared, (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_IMM}, length);
	send_on(side, side->ud,
		(struct ibv_send_wr){.opcode = IBV_WR_SEND,
				     .wr.ud = {.ah = side->ah, .remote_qpn = to->qpns[DATAGRAM], .remote_qkey = QKEY}},
		length);
	send_on(side, side->end.qp,
		(struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {to->buffer, to->window}}, length);
	send_on(side, side->end.qp,
		(struct ibv_send_wr){.opcode = IBV_WR_RDMA_READ, .wr.rdma = {to->buffer, to->rkey}}, length);
	if (!(rand_r(&seed) % 64))
		send_on(side, side->end.qp,
			(struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = to->window}, length);
}

static void receive_all(struct side *side)
{
	struct ibv_wc wc[8];
	int count = ibv_poll_cq(side->end.cq, 8, wc);

	CHECK(count >= 0);
	for (int i = 0; i < count; i++) {
		size_t at = wc[i].wr_id - 1;

		if (!wc[i].wr_id)
			continue;
		CHECK(at < RECEIVES_END && at % (2 * ROOM) == 0);
		CHECK(wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM || wc[i].byte_len <= ROOM);
		post_one(side, at / (RECEIVES * 2 * ROOM), at / (2 * ROOM) % RECEIVES);
	}
	ibv_req_notify_cq(side->end.cq, rand_r(&seed) % 2);
}

/* --- the one that has lost its mind ---------------------------------------------------------------------- */

/* Not only the words of one queue pair: what it shares as well. */
static void scribble_at(char *arena, struct rn_qp_block *block, struct rn_pool_block *pool)
{
	uint64_t ring = atomic_load(&pool->ring), entries = (ring & 0x7fffff) * 64;

	switch (rand_r(&seed) % 8) {
	case 0:
		scribble((char *)pool, sizeof(*pool));
		break;
	case 1:
		scribble((char *)&pool->head, 16);
		break;
	case 2:
		scribble((char *)&block->finished, sizeof(block->finished));
		break;
	case 3:
	case 4: /* whose they are, completions, scatter lists */
		if (entries >= RN_ARENA_HEAP && entries < RN_ARENA_SIZE - RECEIVES * 64)
			scribble(arena + entries, RECEIVES * 64);
		break;
	case 5:
		scribble_keys(arena);
		break;
	case 6:
		scribble((char *)block, sizeof(*block));
		break;
	default:
		scribble((char *)rn_arena_cq(arena, READ_ONCE(block->cq) % RN_CQS_MAX), sizeof(struct rn_cq_block));
	}
}

static void scribble_ring(char *arena, uint64_t offset, uint64_t bytes)
{
	if (offset >= RN_ARENA_HEAP && offset < RN_ARENA_SIZE && bytes && bytes <= RN_ARENA_SIZE - offset)
		scribble(arena + offset, bytes);
}

static void scribble_own(struct side *side)
{
	struct rn_qp *qps[QUEUES] = {rn_qp(side->end.qp), rn_qp(side->shared), rn_qp(side->ud)};
	struct rn_qp *qp = qps[rand_r(&seed) % QUEUES];

	if (qp->pool)
		scribble_at(rn_arena, qp->block, rn_pool_block(qp->pool));
	else
		scribble_ring(rn_arena, qp->rq_offset, rn_rq_bytes(qp));
}

/* As far as we know it; what it says of itself is garbage by now, perhaps. */
static void scribble_theirs(struct side *side, const struct introduction *them)
{
	struct rn_peer *peer = rn_qp(side->end.qp)->peer;
	unsigned which = rand_r(&seed) % QUEUES;
	struct rn_qp_block *block;
	uint32_t pool;

	if (!peer || atomic_load(&peer->state) != RN_PEER_READY)
		return;
	block = rn_arena_locate(peer->arena, them->qpns[which]);
	if (!block)
		return;
	pool = READ_ONCE(block->pool);
	if (pool < RN_POOLS_MAX)
		scribble_at(peer->arena, block, rn_arena_pool(peer->arena, pool));
	else
		scribble_ring(peer->arena, READ_ONCE(block->rq_offset),
			      rn_eager_bytes(RECEIVES, READ_ONCE(block->rq_eager) % 4097) + RECEIVES * 64);
}

static void serve_garbage(int fd)
{
	struct introduction them;
	struct side side;
	uint64_t until;

	seed += 1000;
	side_open(&side);
	them = meet_the_other(&side, fd);
	send_all(&side, &them); /* so that we have its arena */
	meet(fd);
	until = now_ns() + GARBAGE_MS * 1000000ull;
	while (now_ns() < until) {
		if (scribble_here)
			scribble_own(&side);
		if (scribble_there) {
			scribble_theirs(&side, &them);
			send_all(&side, &them);
		}
		if (!(rand_r(&seed) % 8))
			usleep(rand_r(&seed) % 50);
	}
	_exit(0); /* in no state to close anything */
}

/* --- who talks to it ----------------------------------------------------------------------------------------- */

/* Between the receives, and behind what the window shows. */
static void expect_canaries(const struct side *side)
{
	const uint8_t *memory = (const uint8_t *)side->end.buffer;

	for (size_t at = 0; at < RECEIVES_END; at += 2 * ROOM)
		for (size_t i = ROOM; i < 2 * ROOM; i++)
			CHECK_EQ(memory[at + i], CANARY);
	for (size_t at = TARGET + TARGET_BYTES; at < BUFFER; at++)
		CHECK_EQ(memory[at], CANARY);
}

/* New ones, of every kind. */
static void expect_new_ones_to_work(void)
{
	struct end a, b;

	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	end_open(&b, &(struct end_options){.memory = USER_MEMORY, .share = &a});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	CHECK_EQ(post_recv(&b, 2, 0, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	end_close(&b);
	end_close(&a);
}

static void side_close(struct side *side)
{
	CHECK_EQ(ibv_destroy_qp(side->end.qp), 0);
	side->end.qp = NULL;
	CHECK_EQ(ibv_destroy_qp(side->shared), 0);
	CHECK_EQ(ibv_destroy_qp(side->ud), 0);
	CHECK_EQ(ibv_destroy_srq(side->srq), 0);
	CHECK_EQ(ibv_dealloc_mw(side->mw), 0);
	CHECK_EQ(ibv_destroy_ah(side->ah), 0);
	CHECK_EQ(ibv_dereg_mr(side->narrow), 0);
	end_close(&side->end);
}

static void garbage(void)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct introduction them;
		struct side side;
		struct other other;
		uint64_t until;

		seed = round + 1;
		other = spawn(serve_garbage);
		side_open(&side);
		them = meet_the_other(&side, other.fd);
		send_all(&side, &them);
		meet(other.fd);
		until = now_ns() + GARBAGE_MS * 1000000ull;
		while (now_ns() < until) {
			send_all(&side, &them);
			for (int i = 0; i < 4; i++)
				receive_all(&side);
		}
		expect_new_ones_to_work();
		if (!scribble_there) /* in our arena it can say itself where it writes: it has our memory, too */
			expect_canaries(&side);
		join(&other);
		receive_all(&side);
		side_close(&side);
		expect_live_nothing();
	}
}

static void test_garbage_in_its_arena(void)
{
	scribble_here = true;
	scribble_there = false;
	garbage();
}

static void test_garbage_in_ours(void)
{
	scribble_here = false;
	scribble_there = true;
	garbage();
}

/* Somebody has taken a receive, and nobody has that name: with the last context it is over. */
static void test_claimed_for_ever(void)
{
	struct rn_recv_claim claim = {0};
	struct side side;

	seed = 2; /* memory that has a descriptor */
	side_open(&side);
	CHECK(rn_recv_claim(rn_arena, rn_pool_block(rn_qp(side.ud)->pool), rn_name_of_process(0x12345), &claim));
	CHECK_EQ(ibv_dereg_mr(side.end.mr), 0);
	side.end.mr = NULL;
	CHECK(rdmanet_soft_quarantined());
	side_close(&side);
	expect_live_nothing();
}

int main(void)
{
	RUN(test_claimed_for_ever);
	RUN(test_garbage_in_its_arena);
	RUN(test_garbage_in_ours);
	return 0;
}
