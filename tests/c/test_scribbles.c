/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Somebody who has mapped our arena writes over words that are ours, or everybody's.  Each word that could end
 * this process for all its peers is scribbled over, and then those who had no part in it talk on, and new
 * ones come.  (The words of one connection may end that one: test_confused.c has them.)
 *
 * Last, all of the arena at random, by a process that an honest one can't be told from.  What it writes may end any
 * connection; we neither crash nor hang, and when it has gone new ones work.  Arguments: seconds, and a seed.
 */
#include "confused.h"

#include "objects/cq_inside.h"
#include "shm/pool_ring.h"
#include "objects/srq.h"

static const uint32_t hurtful[] = {0, 1, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0xdeadbeef};
enum { HURTFUL = sizeof(hurtful) / sizeof(hurtful[0]) };

static struct end a, b;

/* --- clients ------------------------------------------------------------------------------------------ */

/* Sends 64 bytes whenever it is asked to, and says how that ended. */
static void serve_client(int fd)
{
	struct end end;
	char command;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	connect_over(&end, fd);
	memset(end.buffer, 'c', 64);
	while (hear(fd, &command, 1)) {
		uint8_t status;

		CHECK_EQ(post_send(&end, 1, 0, 64), 0);
		status = poll_one(end.cq).status;
		tell(fd, &status, 1);
	}
	end_close(&end);
	_exit(0);
}

static enum ibv_wc_status ask_to_send(struct other *client)
{
	char command = 's';
	uint8_t status;

	tell(client->fd, &command, 1);
	CHECK(hear(client->fd, &status, 1));
	return status;
}

static void expect_message(struct end *end, struct other *client, uint64_t wr_id)
{
	CHECK_EQ(ask_to_send(client), IBV_WC_SUCCESS);
	expect(end->cq, wr_id, IBV_WC_SUCCESS);
}

/* Children are started before the device is opened: a fork beside the engine's thread is no business of these tests.
 * The last is joined first, as it has a copy of what the others wait for. */
static struct other client;

static void open_receiver(void)
{
	client = spawn(serve_client);
	end_open(&a, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(a.qp);
	for (int i = 0; i < 32; i++)
		CHECK_EQ(post_recv(&a, i, i * 64, 64), 0);
}

static void close_end(void)
{
	end_close(&a);
	memset(&a, 0, sizeof(a));
	expect_live_nothing();
}

static void close_receiver(void)
{
	join(&client);
	close_end();
}

/* --- words of the head ------------------------------------------------------------------------------------ */

static void test_head(void)
{
	for (unsigned i = 0; i < HURTFUL; i++) {
		struct other second = spawn(serve_client);
		uint32_t port;

		open_receiver();
		port = a.qp->qp_num >> 8;
		connect_over(&a, client.fd);
		expect_message(&a, &client, 0);
		rn_arena_head(rn_arena)->magic = rn_arena_head(rn_arena)->size = hurtful[i];
		for (unsigned group = 0; group < RN_PORTS_MAX; group++)
			atomic_store(&rn_arena_head(rn_arena)->ports[group], hurtful[i]);
		end_open(&b, &(struct end_options){.share = &a});
		CHECK_EQ(b.qp->qp_num >> 8, port);
		to_init(b.qp);
		CHECK_EQ(post_recv(&b, 7, 0, 64), 0);
		connect_over(&b, second.fd);
		expect_message(&b, &second, 7);
		expect_message(&a, &client, 1);
		join(&client);
		join(&second);
		end_close(&b);
		close_end();
	}
}

/* --- queue pairs that no other process can enter -------------------------------------------------------------- */

static void connect_within(void)
{
	end_open(&a, &(struct end_options){.cqe = 1024});
	end_open(&b, &(struct end_options){.share = &a, .cqe = 1024});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	memset(a.buffer, 'a', BUFFER);
	memset(b.buffer, 'b', BUFFER);
}

static void close_both(void)
{
	end_close(&b);
	end_close(&a);
	memset(&a, 0, sizeof(a));
	memset(&b, 0, sizeof(b));
	expect_live_nothing();
}

static void scribble_words(void *at, size_t bytes, uint32_t value)
{
	for (size_t i = 0; i < bytes / sizeof(value); i++)
		__atomic_store_n((uint32_t *)at + i, value, __ATOMIC_RELAXED);
}

static void test_blocks_within_a_process(void)
{
	connect_within();
	for (unsigned i = 0; i < HURTFUL; i++) {
		scribble_words(rn_qp(a.qp)->block, sizeof(struct rn_qp_block), hurtful[i]);
		scribble_words(rn_qp(b.qp)->block, sizeof(struct rn_qp_block), hurtful[i]);
		CHECK_EQ(post_recv(&b, i, 0, 64), 0);
		CHECK_EQ(post_send(&a, i, 0, 64), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		expect(b.cq, i, IBV_WC_SUCCESS);
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 64, (uintptr_t)b.buffer + 4096, b.mr->rkey), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	}
	close_both(); /* and nobody is waited for who is inside of them, it seems */
}

/* Where a receive's bytes go is what was posted, whatever its slot says: else they would go anywhere. */
static void test_slots_within_a_process(void)
{
	struct ibv_mr *everything;

	connect_within();
	everything = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND |
							      rdmanet_soft_access_vouched);
	CHECK(everything);
	for (unsigned i = 0; i < 64; i++) {
		struct ibv_sge list[3] = {sge_of(&b, 4096, 8), sge_of(&b, 8192, 40), sge_of(&b, 12288, 100)};
		struct ibv_recv_wr *bad, wr = {.wr_id = i, .sg_list = list, .num_sge = i % 4};
		uint32_t length = i % 4 == 0 ? 0 : i % 4 == 1 ? 8 : i % 4 == 2 ? 48 : 148;
		struct rn_slot *slot = rn_rq_slot(rn_qp(b.qp), rn_qp(b.qp)->rq_posted);

		memset(b.buffer, 'b', BUFFER);
		CHECK_EQ(ibv_post_recv(b.qp, &wr, &bad), 0);
		slot->num_sge = i % 3 ? 4 : UINT16_MAX;
		for (unsigned s = 0; s < 4; s++)
			slot->sge[s] = (struct rn_slot_sge){hurtful[(i + s) % HURTFUL], UINT32_MAX, everything->lkey};
		CHECK_EQ(post_send(&a, i, 0, length), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		expect(b.cq, i, IBV_WC_SUCCESS);
		for (unsigned at = 0; at < BUFFER; at++) {
			bool first = at >= 4096 && at < 4096 + (length < 8 ? length : 8);
			bool second = length > 8 && at >= 8192 && at < 8192 + (length < 48 ? length - 8 : 40);
			bool third = length > 48 && at >= 12288 && at < 12288 + length - 48;

			CHECK_EQ(b.buffer[at], first || second || third ? 'a' : 'b');
		}
	}
	CHECK_EQ(ibv_dereg_mr(everything), 0);
	close_both();
}

/* One that was never posted takes no message. */
static void test_receives_that_nobody_posted(void)
{
	struct rn_qp *qp;
	struct ibv_wc wc;

	connect_within();
	qp = rn_qp(b.qp);
	atomic_store(&rn_rq_slot(qp, qp->rq_posted)->owner_sequence, qp->rq_posted);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 2, IBV_WC_SUCCESS);
	close_both();
}

/* --- keys ----------------------------------------------------------------------------------------------------- */

static void test_keys(void)
{
	struct rn_mr_entry *entry;
	uint64_t message = 0;

	open_receiver();
	connect_over(&a, client.fd);
	expect_message(&a, &client, message++);
	entry = &rn_arena_mrs(rn_arena)[rn_mr_index(a.mr->lkey)];
	for (size_t at = 0; at < sizeof(*entry); at += 4) {
		scribble_words((char *)entry + at, 4, hurtful[at / 4 % HURTFUL]);
		rn_own_look(false);
		expect_message(&a, &client, message++);
	}
	close_receiver();
}

/* --- completion queues ------------------------------------------------------------------------------------------ */

static void expect_cq_event(void)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(readable(a.channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_get_cq_event(a.channel, &cq, &context), 0);
	CHECK(cq == a.cq);
	ibv_ack_cq_events(cq, 1);
}

static struct rn_cq_block *block_of_cq(void)
{
	return rn_cq(a.cq)->block;
}

static void test_channel(void)
{
	uint64_t message = 0;

	open_receiver();
	connect_over(&a, client.fd);
	for (unsigned i = 0; i < HURTFUL; i++) {
		/* Before we go to sleep, */
		block_of_cq()->channel = hurtful[i];
		CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
		CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
		expect_cq_event();
		expect(a.cq, message++, IBV_WC_SUCCESS);
		/* and while we sleep. */
		CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
		block_of_cq()->channel = hurtful[i];
		rn_own_look(false);
		CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
		expect_cq_event();
		expect(a.cq, message++, IBV_WC_SUCCESS);
	}
	close_receiver();
}

/* Somebody has made it look as if nobody slept here, or was called already. */
static void test_arming(void)
{
	uint64_t message = 0;

	open_receiver();
	connect_over(&a, client.fd);
	for (unsigned i = 0; i < HURTFUL; i++) {
		CHECK_EQ(ibv_req_notify_cq(a.cq, i % 2), 0);
		atomic_store(&block_of_cq()->armed, hurtful[i]);
		CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
		rn_own_look(false);
		expect_cq_event();
		expect(a.cq, message++, IBV_WC_SUCCESS);
		while (readable(a.channel->fd, 0))
			expect_cq_event();
	}
	/* All as it should be, there is nothing to tell, however often one looks. */
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	rn_own_look(false);
	rn_own_look(false);
	CHECK(!readable(a.channel->fd, 0));
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	expect_cq_event();
	expect(a.cq, message++, IBV_WC_SUCCESS);
	close_receiver();
}

static void test_dirty_bits(void)
{

	open_receiver();
	connect_over(&a, client.fd);
	expect_message(&a, &client, 0);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	expect_cq_event();
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	atomic_store(&block_of_cq()->summary, 0);
	for (unsigned i = 0; i < RN_CQ_QPS_MAX / 64; i++)
		atomic_store(&block_of_cq()->dirty[i], 0);
	expect_nothing(a.cq);
	rn_own_look(false);
	expect_cq_event();
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_receiver();
}

static void test_token_taken(void)
{
	uint64_t token;

	open_receiver();
	connect_over(&a, client.fd);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	CHECK(readable(a.channel->fd, LIMIT_MS));
	CHECK_EQ(read(a.channel->fd, &token, sizeof(token)), (ssize_t)sizeof(token)); /* as a peer can */
	rn_own_look(false);
	rn_own_look(false);
	expect_cq_event();
	expect(a.cq, 0, IBV_WC_SUCCESS);
	close_receiver();
}

/* A program that doesn't wait isn't made to wait by a peer, who has the same open file. */
static void test_made_to_wait(void)
{
	struct ibv_cq *cq;
	void *context;

	open_receiver();
	CHECK_EQ(fcntl(a.channel->fd, F_SETFL, O_NONBLOCK), 0);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	connect_over(&a, client.fd);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	expect_cq_event();
	CHECK_EQ(fcntl(a.channel->fd, F_SETFL, 0), 0);
	CHECK_EQ(ibv_get_cq_event(a.channel, &cq, &context), -1);
	CHECK_EQ(errno, EAGAIN);
	expect(a.cq, 0, IBV_WC_SUCCESS);
	close_receiver();
}

/* --- looking less often ----------------------------------------------------------------------------------- */

/* Who does nothing is looked after less and less often, though always; whoever begins again, as before. */
static void test_pauses(void)
{
	enum { LONG = 9 };
	struct ibv_wc wc;

	CHECK_EQ(rn_own_pause_ns(0), 1000000000);
	for (uint32_t quiet = 0; quiet < 100; quiet++) {
		CHECK(rn_own_pause_ns(quiet) <= rn_own_pause_ns(quiet + 1));
		CHECK(rn_own_pause_ns(quiet) <= 32 * 1000000000ull);
	}
	CHECK(rn_own_pause_ns(LONG) >= 16 * 1000000000ull);
	open_receiver();
	connect_over(&a, client.fd);
	expect_message(&a, &client, 0); /* so it has the arena already: giving it away is a move, too, on the engine */
	rn_own_quiet = LONG;
	CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	CHECK(rn_own_quiet >= LONG); /* to look in vain is nothing; the engine may have counted one more */
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	CHECK(rn_own_quiet < LONG);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	rn_own_quiet = LONG;
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK(rn_own_quiet < LONG);
	close_receiver();
}

/* In pauses that long a look sees all that there is, however much: the first ones see some of it. */
static void test_look_at_all(void)
{
	enum { MANY = 1500 };
	static struct ibv_qp *crowd[MANY];
	struct rn_qp *last;

	open_receiver();
	connect_over(&a, client.fd);
	for (int i = 0; i < MANY; i++) {
		struct ibv_qp_init_attr init = {.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1},
						.send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC};

		crowd[i] = ibv_create_qp(a.pd, &init);
		CHECK(crowd[i]);
	}
	last = rn_qp(crowd[MANY - 1]);
	rn_own_look(true);
	rn_arena_qp(rn_arena, last->index)->pd = 0x5eed;
	rn_own_look(true);
	CHECK_EQ(rn_arena_qp(rn_arena, last->index)->pd, last->own->pd);
	for (int i = 0; i < MANY; i++)
		CHECK_EQ(ibv_destroy_qp(crowd[i]), 0);
	close_receiver();
}

/* --- pools ---------------------------------------------------------------------------------------------- */

enum { WR = 8 };
static struct ibv_srq *shared;

static int post_shared(uint64_t wr_id)
{
	struct ibv_sge sge = sge_of(&a, wr_id * 64, 64);
	struct ibv_recv_wr *bad, wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1};

	return ibv_post_srq_recv(shared, &wr, &bad);
}

static void open_shared(void)
{
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = WR, .max_sge = 1}};
	struct ibv_qp_init_attr init = {.cap = {.max_send_wr = 8, .max_send_sge = 1}, .qp_type = IBV_QPT_RC};

	client = spawn(serve_client);
	end_open(&a, &(struct end_options){.memory = DEVICE_MEMORY});
	CHECK_EQ(ibv_destroy_qp(a.qp), 0);
	shared = ibv_create_srq(a.pd, &attr);
	init.send_cq = init.recv_cq = a.cq;
	init.srq = shared;
	a.qp = ibv_create_qp(a.pd, &init);
	CHECK(shared && a.qp);
	for (unsigned i = 0; i < WR; i++)
		CHECK_EQ(post_shared(i), 0);
}

static void close_shared(void)
{
	CHECK_EQ(ibv_destroy_qp(a.qp), 0);
	a.qp = NULL;
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	close_receiver();
}

/* All of the receives are to be had: as many messages come, and as many can be posted. */
static void expect_all_receives(struct other *client)
{
	bool seen[WR] = {false};

	for (unsigned i = 0; i < WR; i++) {
		struct ibv_wc wc;

		CHECK_EQ(ask_to_send(client), IBV_WC_SUCCESS);
		wc = poll_one(a.cq);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK(wc.wr_id < WR && !seen[wc.wr_id]);
		seen[wc.wr_id] = true;
	}
	for (unsigned i = 0; i < WR; i++)
		CHECK_EQ(post_shared(i), 0);
	CHECK_EQ(post_shared(0), ENOMEM);
}

static void test_pool_words(void)
{
	struct rn_pool *pool;

	open_shared();
	pool = rn_srq(shared)->pool;
	connect_over(&a, client.fd);
	expect_all_receives(&client);
	for (size_t at = 0; at < sizeof(struct rn_pool_block); at += 4) {
		scribble_words((char *)rn_pool_block(pool) + at, 4, hurtful[at / 4 % HURTFUL]);
		rn_own_look(false);
		expect_all_receives(&client);
	}
	atomic_store(&rn_pool_block(pool)->head, atomic_load(&rn_pool_block(pool)->tail));
	rn_own_look(false);
	expect_all_receives(&client);
	close_shared();
}

static void test_pool_entries(void)
{
	struct rn_pool *pool;

	open_shared();
	pool = rn_srq(shared)->pool;
	connect_over(&a, client.fd);
	for (unsigned i = 0; i < 4 * HURTFUL; i++) {
		for (unsigned at = 0; at < WR; at++)
			atomic_store(&rn_ring_entry(pool->rings, at)->word, (uint64_t)hurtful[i % HURTFUL] << 32 |
					     (hurtful[at] & (RN_NAME_QP - 1)) << 2 | i / HURTFUL);
		rn_own_look(false);
		expect_all_receives(&client);
	}
	/* With more room, they move. */
	for (unsigned at = 0; at < WR; at++)
		atomic_store(&rn_ring_entry(pool->rings, at)->word, hurtful[at]);
	CHECK_EQ(ibv_modify_srq(shared, &(struct ibv_srq_attr){.max_wr = 2 * WR}, IBV_SRQ_MAX_WR), 0);
	rn_own_look(false);
	rn_own_look(false);
	for (unsigned i = WR; i < 2 * WR; i++)
		CHECK_EQ(post_shared(i), 0);
	CHECK_EQ(post_shared(0), ENOMEM);
	for (unsigned i = 0; i < 2 * WR; i++) {
		CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
		CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	}
	close_shared();
}

/* What isn't done hasn't arrived; what was never posted is taken by nobody here, and taken back by nobody. */
static void test_pool_lies(void)
{
	struct rn_pool *pool;

	open_shared();
	pool = rn_srq(shared)->pool;
	connect_over(&a, client.fd);
	atomic_store(&rn_qp(a.qp)->block->finished, rn_ring_reference(pool->rings, 3));
	atomic_fetch_or(&block_of_cq()->dirty[0], UINT64_MAX);
	atomic_fetch_or(&block_of_cq()->summary, UINT64_MAX);
	expect_nothing(a.cq);
	expect_all_receives(&client);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	expect(a.cq, 0, IBV_WC_SUCCESS);
	/* Free, by our notes. */
	for (unsigned at = 0; at < WR; at++)
		if (!pool->rings->shadows[at].used)
			atomic_store(&rn_ring_entry(pool->rings, at)->word, rn_ring_posted(pool->rings, at));
	CHECK_EQ(post_shared(0), 0);
	CHECK_EQ(post_shared(0), ENOMEM);
	close_shared();
}

/* --- all of it, at random ------------------------------------------------------------------------------- */

static unsigned scribbling_ms = 300;

/* The first words of the arena, those of what there is, and some of the rest. */
static void scribble_somewhere(char *arena)
{
	static const struct {
		size_t at, bytes;
	} parts[] = {
		{0, sizeof(struct rn_arena_head)},
		{RN_ARENA_QPS, 16 * sizeof(struct rn_qp_block)},
		{RN_ARENA_CQS, 8 * sizeof(struct rn_cq_block)},
		{RN_ARENA_POOLS, 4 * sizeof(struct rn_pool_block)},
		{RN_ARENA_HEAP, 64 * 1024},
		{RN_ARENA_HEAP, 8 << 20},
	};
	unsigned part = rand_r(&seed) % (sizeof(parts) / sizeof(parts[0]) + 1);

	if (part == sizeof(parts) / sizeof(parts[0])) {
		/* Not where memory lies: others would write there what they believe to be messages. */
		for (uint32_t i = 0; i < RN_MRS_MAX; i++)
			if (atomic_load(&rn_arena_mrs(arena)[i].key) && !(rand_r(&seed) % 4))
				scribble((char *)&rn_arena_mrs(arena)[i],
					 rand_r(&seed) % 2 ? offsetof(struct rn_mr_entry, kind) : sizeof(uint32_t));
	} else {
		scribble(arena + parts[part].at, parts[part].bytes);
	}
}

static void serve_scribbler(int fd)
{
	struct end end;
	uint64_t until;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	CHECK_EQ(post_send(&end, 1, 0, 64), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	until = now_ns() + scribbling_ms * 1000000ull;
	while (now_ns() < until) {
		scribble_somewhere(rn_qp(end.qp)->peer->arena);
		if (!(rand_r(&seed) % 8))
			usleep(rand_r(&seed) % 50);
	}
	_exit(0);
}

/* Talks as long as it can: whatever becomes of it. */
static void serve_talker(int fd)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_wc wc;
	struct end end;
	uint64_t until;

	attr.timeout = SHORT_TIMEOUT;
	end_open(&end, &(struct end_options){.memory = seed % 2 ? USER_MEMORY : DEVICE_MEMORY});
	connect_over_with(&end, fd, attr);
	until = now_ns() + scribbling_ms * 1000000ull;
	while (now_ns() < until && state_of(end.qp) == IBV_QPS_RTS) {
		post_send(&end, 1, 0, 64);
		post_recv(&end, 2, 0, 64);
		for (int i = 0; i < 4; i++)
			ibv_poll_cq(end.cq, 1, &wc);
	}
	_exit(0);
}

static struct ibv_qp *make_qp(struct ibv_srq *srq, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 3},
		.send_cq = a.cq,
		.recv_cq = a.cq,
		.srq = srq,
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(a.pd, &init);

	CHECK(qp);
	return qp;
}

/* The shared queue's lie apart from the others': this process sends to both, from two threads. */
static void post_something(struct ibv_qp *qp)
{
	uint64_t at = qp ? 32 : 0;
	struct ibv_sge list[3] = {sge_of(&a, at, 32), sge_of(&a, at + 4096, 32), sge_of(&a, at + 8192, 32)};
	struct ibv_recv_wr *bad, wr = {.wr_id = 1, .sg_list = list, .num_sge = 2 + rand_r(&seed) % 2};

	if (qp)
		ibv_post_recv(qp, &wr, &bad);
	else
		ibv_post_srq_recv(shared, &wr, &bad);
}

static void talk_for_a_while(struct ibv_qp *qps[], unsigned count)
{
	uint64_t until = now_ns() + scribbling_ms * 1000000ull;
	struct ibv_wc wc[8];
	unsigned round = 0;

	while (now_ns() < until) {
		struct ibv_qp *qp = qps[round++ % count];
		struct ibv_sge sge = sge_of(&a, 64 * 1024, 64);
		struct ibv_send_wr *bad, wr = {
			.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1};
		struct ibv_mr *mr;

		ibv_post_send(qp, &wr, &bad);
		post_something(qp->srq ? NULL : qp);
		ibv_req_notify_cq(a.cq, round % 2);
		CHECK(ibv_poll_cq(a.cq, 8, wc) >= 0);
		if (round % 64 == 0) {
			mr = ibv_reg_mr(a.pd, a.buffer, 4096, IBV_ACCESS_LOCAL_WRITE);
			CHECK(mr && !ibv_dereg_mr(mr));
			ibv_modify_srq(shared, &(struct ibv_srq_attr){.srq_limit = 4}, IBV_SRQ_LIMIT);
			state_of(qp);
		}
		if (round % 256 == 0)
			rn_own_look(false);
		if (round % 1024 == 0)
			CHECK_EQ(ibv_destroy_qp(make_qp(round % 2048 ? shared : NULL, IBV_QPT_RC)), 0);
	}
	await_engine();
}

static void one_round(void)
{
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 32, .max_sge = 3}};
	enum { TALKERS = 3 };
	struct other others[TALKERS + 1];
	struct ibv_qp *qps[6], *own;

	client = spawn(serve_client);
	for (int i = 0; i <= TALKERS; i++) {
		seed += 7919;
		others[i] = spawn(i < TALKERS ? serve_talker : serve_scribbler);
	}
	end_open(&a, &(struct end_options){.memory = DEVICE_MEMORY, .cqe = 4096});
	own = a.qp;
	shared = ibv_create_srq(a.pd, &attr);
	CHECK(shared);
	for (int i = 0; i <= TALKERS; i++)
		qps[i] = make_qp(i % 2 ? shared : NULL, IBV_QPT_RC);
	qps[4] = make_qp(NULL, IBV_QPT_RC);
	qps[5] = make_qp(shared, IBV_QPT_RC);
	connect_impatiently(qps[4], qps[5]->qp_num);
	connect_impatiently(qps[5], qps[4]->qp_num);
	for (int i = 0; i <= TALKERS; i++) {
		to_init(qps[i]);
		for (int posted = 0; posted < 16; posted++)
			post_something(qps[i]->srq ? NULL : qps[i]);
		a.qp = qps[i];
		connect_over(&a, others[i].fd);
	}
	a.qp = own;
	talk_for_a_while(qps, 6);
	for (int i = TALKERS; i >= 0; i--)
		join(&others[i]);
	/* They have gone. */
	rn_own_look(false);
	end_open(&b, &(struct end_options){.share = &a, .memory = DEVICE_MEMORY});
	to_init(b.qp);
	CHECK_EQ(post_recv(&b, 5, 0, 64), 0);
	connect_over(&b, client.fd);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK_EQ(ask_to_send(&client), IBV_WC_SUCCESS);
	CHECK(readable(b.channel->fd, LIMIT_MS));
	expect(b.cq, 5, IBV_WC_SUCCESS);
	end_close(&b);
	for (int i = 0; i < 6; i++)
		CHECK_EQ(ibv_destroy_qp(qps[i]), 0);
	CHECK_EQ(ibv_destroy_srq(shared), 0);
	close_receiver();
}

static unsigned seconds;

static void test_at_random(void)
{
	uint64_t until = now_ns() + seconds * 1000000000ull;
	unsigned rounds = 0;

	if (!seed)
		seed = (unsigned)now_ns();
	printf("    seed %u\n", seed);
	fflush(NULL);
	do
		one_round();
	while (++rounds < 3 || now_ns() < until);
}

int main(int argc, char **argv)
{
	seconds = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 0) : 0;
	seed = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 0) : 0;
	RUN(test_head);
	RUN(test_blocks_within_a_process);
	RUN(test_slots_within_a_process);
	RUN(test_receives_that_nobody_posted);
	RUN(test_keys);
	RUN(test_channel);
	RUN(test_arming);
	RUN(test_dirty_bits);
	RUN(test_token_taken);
	RUN(test_made_to_wait);
	RUN(test_pauses);
	RUN(test_look_at_all);
	RUN(test_pool_words);
	RUN(test_pool_entries);
	RUN(test_pool_lies);
	RUN(test_at_random);
	return 0;
}
