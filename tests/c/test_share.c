/* SPDX-License-Identifier: Apache-2.0 */
/* Long READs of memory that isn't mapped: two engines carry them, and when one ends early, nobody writes any more. */
#include "processes.h"

#include "soft.h"

#include "base/witness.h"
#include "objects/quiesce.h"
#include "objects/share.h"

enum { LARGE = 16 << 20, UNTOUCHED = 0x5a };

static struct end a;
static struct address b;
static char *mine;
static struct ibv_mr *mine_mr;

static char byte_at(size_t at)
{
	return (char)(at * 131 + (at >> 8) * 7 + (at >> 18));
}

/* The piece that the owner has taken last: if it is still being copied, that shows here. */
static void touch_first(char *memory, uint32_t piece)
{
	if ((piece + 1) * (size_t)RN_SHARE_PIECE <= LARGE)
		memset(memory + piece * (size_t)RN_SHARE_PIECE, UNTOUCHED, RN_SHARE_PIECE);
}

/* Does the server withdraw its memory while it helps? */
static bool withdraws_early;

/* Until some of a READ is left, and some is not; or it was over before that was seen. */
static void await_helping(const struct rn_qp_block *block)
{
	uint64_t word, limit = now_ns() + LIMIT_MS * 1000000ull;

	do {
		CHECK(now_ns() < limit);
		word = atomic_load(&block->shared);
	} while (!word || (!rn_share_front(word) && rn_share_back(word) == LARGE / RN_SHARE_PIECE));
}

/* A server with memory that only process_vm_* can reach. It keeps it until told, then withdraws it, and scribbles there. */
static void serve(int fd)
{
	struct end end;
	struct address large;
	struct ibv_mr *mr;
	char *memory;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	connect_over(&end, fd);
	mr = make_memory(end.pd, USER_MEMORY, LARGE, &memory);
	for (size_t i = 0; i < LARGE; i++)
		memory[i] = byte_at(i);
	large = (struct address){.rkey = mr->rkey, .buffer = (uintptr_t)memory};
	tell(fd, &large, sizeof(large));
	meet(fd);
	if (withdraws_early)
		await_helping(rn_qp(end.qp)->block);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	EVENTUALLY(rdmanet_soft_quarantined() == 0); /* a peer that waits for a CPU in the middle of a piece finishes it */
	touch_first(memory, rn_share_back(atomic_load(&rn_qp(end.qp)->block->shared)));
	memset(memory, UNTOUCHED, LARGE);
	meet(fd);
	munmap(memory, LARGE);
	end_close(&end);
	expect_live_nothing();
}

static struct other begin(void)
{
	struct other other = spawn(serve);

	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	connect_over(&a, other.fd);
	mine_mr = make_memory(a.pd, USER_MEMORY, LARGE, &mine);
	CHECK(hear(other.fd, &b, sizeof(b)));
	return other;
}

static void end_here(void)
{
	if (mine_mr)
		CHECK_EQ(ibv_dereg_mr(mine_mr), 0);
	end_close(&a);
	munmap(mine, LARGE);
	expect_live_nothing();
}

static void finish(struct other *other)
{
	meet(other->fd);
	meet(other->fd);
	end_here();
	join(other);
}

static void post_read(uint64_t wr_id, size_t to, size_t from, uint32_t length)
{
	struct ibv_sge sge = {.addr = (uintptr_t)mine + to, .length = length, .lkey = mine_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = wr_id,
				 .opcode = IBV_WR_RDMA_READ,
				 .send_flags = IBV_SEND_SIGNALED,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .wr.rdma = {.remote_addr = b.buffer + from, .rkey = b.rkey}},
			   *bad;

	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
}

static void expect_bytes(size_t to, size_t from, size_t length)
{
	for (size_t i = 0; i < length; i++)
		if (mine[to + i] != byte_at(from + i))
			CHECK_EQ(to + i, -1);
}

/* --- together ------------------------------------------------------------------------------------------------------ */

/* All of it comes, once, and nothing beside it; the owner's engine has had its part. */
static void both_carry(void)
{
	struct other other = begin();
	struct rn_counters count;
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	uint64_t total = 0;

	do { /* either engine may have to wait for a CPU while the other carries it all */
		memset(mine, UNTOUCHED, LARGE);
		post_read(1, 5, 3, LARGE - 77);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		total += LARGE - 77;
		expect_bytes(5, 3, LARGE - 77);
		CHECK(mine[4] == UNTOUCHED && mine[LARGE - 72] == UNTOUCHED);
		count = counted(&a);
		CHECK_EQ(count.bytes_cma, total);
	} while ((!count.bytes_shared || count.bytes_shared == total) && now_ns() < limit);
	CHECK(count.bytes_shared > 0);
	CHECK(count.bytes_shared < total);
	CHECK_EQ(count.queued, total / (LARGE - 77)); /* no post has copied it */
	finish(&other);
}

static void every_length(void)
{
	struct other other = begin();

	for (uint32_t length = 4 * RN_SHARE_PIECE - 1; length < 9 * RN_SHARE_PIECE; length += RN_SHARE_PIECE / 2 - 1) {
		memset(mine, UNTOUCHED, length + 8);
		post_read(1, 4, length % 999, length);
		post_read(2, length + 4, 0, 1); /* behind it, so not before it */
		expect(a.cq, 1, IBV_WC_SUCCESS);
		expect(a.cq, 2, IBV_WC_SUCCESS);
		expect_bytes(4, length % 999, length);
		CHECK(mine[3] == UNTOUCHED && mine[length + 4] == byte_at(0) && mine[length + 5] == UNTOUCHED);
	}
	finish(&other);
}

/* A request with several entries goes without help. */
static void scattered(void)
{
	struct other other = begin();
	struct ibv_sge sges[2] = {{.addr = (uintptr_t)mine, .length = 5 << 20, .lkey = mine_mr->lkey},
				  {.addr = (uintptr_t)mine + (6 << 20), .length = 9 << 20, .lkey = mine_mr->lkey}};
	struct ibv_send_wr wr = {.wr_id = 1,
				 .opcode = IBV_WR_RDMA_READ,
				 .send_flags = IBV_SEND_SIGNALED,
				 .sg_list = sges,
				 .num_sge = 2,
				 .wr.rdma = {.remote_addr = b.buffer, .rkey = b.rkey}},
			   *bad;

	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect_bytes(0, 0, 5 << 20);
	expect_bytes(6 << 20, 5 << 20, 9 << 20);
	CHECK_EQ(counted(&a).bytes_shared, 0);
	finish(&other);
}

/* --- one without the other ------------------------------------------------------------------------------------------ */

static void owner_is_stopped(void)
{
	struct other other = begin();

	kill(other.pid, SIGSTOP);
	waitpid(other.pid, NULL, WUNTRACED);
	post_read(1, 0, 0, LARGE);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect_bytes(0, 0, LARGE);
	CHECK_EQ(counted(&a).bytes_shared, 0);
	kill(other.pid, SIGCONT);
	post_read(2, 0, 0, LARGE); /* what it finds to help with is over, or is this */
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect_bytes(0, 0, LARGE);
	finish(&other);
}

static void owner_is_killed(void)
{
	for (int round = 0; round < 8; round++) {
		struct other other = begin();
		struct ibv_wc wc;

		post_read(1, 0, 0, LARGE);
		usleep(round * 500);
		join_killed(&other);
		wc = poll_one(a.cq);
		CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_WR_FLUSH_ERR);
		if (wc.status == IBV_WC_SUCCESS)
			expect_bytes(0, 0, LARGE);
		end_here();
	}
}

/* The owner takes its memory back: nothing that it writes there afterwards is read, whoever copies. On a busy machine a
 * READ may be over before that: then there are more rounds, until one was not. */
static void owner_withdraws(void)
{
	int failed = 0;

	withdraws_early = true;
	for (int round = 0; round < 8 || (!failed && round < 50); round++) {
		struct other other = begin();
		struct ibv_wc wc;
		char mark;

		memset(mine, 0, LARGE);
		tell(other.fd, "m", 1);
		post_read(1, 0, 0, LARGE);
		CHECK(hear(other.fd, &mark, 1));
		wc = poll_one(a.cq);
		failed += wc.status == IBV_WC_REM_ACCESS_ERR;
		CHECK(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_SUCCESS);
		for (size_t i = 0; i < LARGE; i++)
			CHECK(mine[i] == byte_at(i) || (wc.status != IBV_WC_SUCCESS && !mine[i]));
		meet(other.fd);
		end_here();
		join(&other);
	}
	CHECK(failed > 0);
	withdraws_early = false;
}

/* --- the requester ends it: at different moments, some of them in the middle --------------------------------------- */

/* From now on this memory is the program's. Whoever may still write there has some time to do so. */
static void expect_left_alone(uint32_t piece)
{
	touch_first(mine, piece);
	usleep(1000);
	for (size_t i = 0; i < RN_SHARE_PIECE && piece < LARGE / RN_SHARE_PIECE; i++)
		CHECK_EQ(mine[piece * (size_t)RN_SHARE_PIECE + i], UNTOUCHED);
	memset(mine, UNTOUCHED, LARGE);
	usleep(3000);
	for (size_t i = 0; i < LARGE; i++)
		CHECK_EQ(mine[i], UNTOUCHED);
}

/* Which piece its owner has taken last. */
static uint32_t taken(void)
{
	return rn_qp(a.qp)->responder.share.back;
}

/* Until some of the READ has been copied. */
static void await_begin(void)
{
	struct rn_qp *qp = rn_qp(a.qp);
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	bool has_begun;

	do {
		CHECK(now_ns() < limit);
		rn_lock(&qp->sq_lock);
		has_begun = qp->sq_executed == qp->sq_posted || rn_sq_has_begun(qp);
		rn_unlock(&qp->sq_lock);
	} while (!has_begun);
}

static void flush(struct ibv_wc *wc)
{
	struct ibv_qp_attr attr = {0};

	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_ERR, 0), 0);
	*wc = poll_one(a.cq);
}

static void flushed_in_the_middle(void)
{
	int flushes = 0;

	for (int round = 0; round < 10 || (!flushes && round < 50); round++) {
		struct other other = begin();
		struct ibv_wc wc;

		post_read(1, 0, 0, LARGE);
		await_begin();
		usleep(round % 5 * 100);
		flush(&wc);
		CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR);
		flushes += wc.status != IBV_WC_SUCCESS;
		expect_left_alone(taken());
		finish(&other);
	}
	CHECK(flushes > 0);
}

static void reset_in_the_middle(void)
{
	for (int round = 0; round < 10; round++) {
		struct other other = begin();
		struct ibv_qp_attr attr = {0};

		post_read(1, 0, 0, LARGE);
		usleep(round * 200);
		if (round % 2) {
			CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
			expect_left_alone(taken());
		} else {
			CHECK_EQ(ibv_destroy_qp(a.qp), 0);
			a.qp = NULL;
			expect_left_alone(LARGE / RN_SHARE_PIECE - 1);
		}
		finish(&other);
	}
}

/* A program must not do that, but the device must not write to memory that it doesn't know any more. */
static void deregistered_in_the_middle(void)
{
	for (int round = 0; round < 10; round++) {
		struct other other = begin();
		struct ibv_wc wc;

		post_read(1, 0, 0, LARGE);
		usleep(round * 200);
		CHECK_EQ(ibv_dereg_mr(mine_mr), 0);
		mine_mr = NULL;
		expect_left_alone(taken());
		wc = poll_one(a.cq);
		CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_LOC_PROT_ERR);
		finish(&other);
	}
}

/* --- who has which piece, without anybody who copies ------------------------------------------------------------------- */

static struct rn_qp_block block;
static struct rn_responder_ctx ctx;

static void fresh(uint32_t pieces)
{
	memset(&block, 0, sizeof(block));
	memset(&ctx, 0, sizeof(ctx));
	ctx.block = &block;
	ctx.facts = &block;
	rn_share_begin(&ctx, 0, (uint64_t)pieces * RN_SHARE_PIECE - 1);
}

static void give(uint32_t count)
{
	atomic_store(&block.given, (uint64_t)ctx.share.serial << 32 | count);
}

static void each_piece_once(void)
{
	uint32_t piece;

	fresh(5);
	CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_MINE);
	CHECK(rn_share_take(&block, ctx.share.serial, &piece));
	CHECK_EQ(piece, 4);
	CHECK(rn_share_take(&block, ctx.share.serial, &piece));
	CHECK_EQ(piece, 3);
	CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_MINE);
	CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_MINE);
	CHECK_EQ(ctx.share.front, 3);
	CHECK(!rn_share_take(&block, ctx.share.serial, &piece));
	CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_EMPTY);
	give(1);
	CHECK(!rn_share_is_complete(&ctx));
	give(2);
	CHECK(rn_share_is_complete(&ctx));
	rn_share_stop(&ctx);
}

/* Another READ's helper, one that comes too late, and a piece that the owner could not copy. */
static void not_for_everybody(void)
{
	uint32_t piece, serial;

	fresh(3);
	serial = ctx.share.serial;
	CHECK(!rn_share_take(&block, serial + 2, &piece));
	CHECK(rn_share_take(&block, serial, &piece));
	CHECK(rn_share_put_back(&block, serial, piece));
	for (int i = 0; i < 3; i++)
		CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_MINE);
	CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_EMPTY);
	CHECK(rn_share_is_complete(&ctx));
	rn_share_stop(&ctx);
	CHECK(!rn_share_take(&block, serial, &piece));
	CHECK(!rn_share_put_back(&block, serial, piece));
}

static void scribbled_over(void)
{
	static const uint64_t lies[] = {0, UINT64_MAX, 1};

	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
		fresh(8);
		CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_MINE);
		atomic_store(&block.shared, lies[i]);
		CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_LOST);
	}
	for (uint32_t back = 9; back < 12; back++) {
		fresh(8);
		atomic_store(&block.shared, rn_share_word(ctx.share.serial, 0, back));
		CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_LOST);
		atomic_store(&block.shared, rn_share_word(ctx.share.serial, 1, 8));
		CHECK_EQ(rn_share_claim(&ctx), RN_SHARE_LOST);
	}
}

/* Our engine copies a piece of a region that is withdrawn: the region is put aside until it has done so. */
static void region_in_use(void)
{
	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	rn_serving_begin(RN_SERVING_ENGINE);
	CHECK_EQ(ibv_dereg_mr(a.mr), 0);
	a.mr = NULL;
	CHECK_EQ(rdmanet_soft_quarantined(), 1);
	rn_serving_end(RN_SERVING_ENGINE);
	EVENTUALLY(rdmanet_soft_quarantined() == 0);
	end_close(&a);
	expect_live_nothing();
}

/* The owner writes only to the program that has asked: another one in the same process would not have this page. */
static void not_into_another_program(void)
{
	struct other other = begin();
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull, shared;
	void *witness;

	do { /* the control: it helps this program */
		CHECK(now_ns() < limit);
		post_read(1, 0, 0, LARGE);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		shared = counted(&a).bytes_shared;
	} while (!shared);
	witness = (void *)(uintptr_t)rn_witness_lent();
	CHECK(witness);
	CHECK_EQ(mprotect(witness, 8, PROT_NONE), 0);
	for (int i = 0; i < 4; i++) {
		memset(mine, UNTOUCHED, LARGE);
		post_read(1, 0, 0, LARGE);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		expect_bytes(0, 0, LARGE);
	}
	CHECK_EQ(counted(&a).bytes_shared, shared);
	CHECK_EQ(mprotect(witness, 8, PROT_READ | PROT_WRITE), 0);
	finish(&other);
}

int main(void)
{
	RUN(each_piece_once);
	RUN(not_for_everybody);
	RUN(scribbled_over);
	RUN(region_in_use);
	if (!may_reach_others()) {
		printf("    process_vm_readv is refused here: nothing to share\n");
		return 0;
	}
	RUN(both_carry);
	RUN(every_length);
	RUN(scattered);
	RUN(not_into_another_program);
	RUN(owner_is_stopped);
	RUN(owner_is_killed);
	RUN(owner_withdraws);
	RUN(flushed_in_the_middle);
	RUN(reset_in_the_middle);
	RUN(deregistered_in_the_middle);
	return 0;
}
