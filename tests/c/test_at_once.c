/* SPDX-License-Identifier: Apache-2.0 */
/* Lists that are executed without requests: which blocks are, that they are checked as requests are, and what stops them. */
#include "pair.h"
#include "base/page.h"
#include "objects/qp.h"
#include "processes.h"

enum { MUCH = 64, LONG = 600 * 1024 };

static enum memory server_memory;
static bool server_has_hole; /* in the middle of it */

static void serve(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){.memory = server_memory});
	memset(end.buffer, 'b', BUFFER);
	if (server_has_hole)
		munmap(end.buffer + BUFFER / 2, rn_page());
	connect_over(&end, fd);
	meet(fd);
	meet(fd); /* its key is withdrawn */
	CHECK_EQ(ibv_dereg_mr(end.mr), 0);
	end.mr = NULL;
	meet(fd);
	meet(fd);
	_exit(0);
}

static struct rn_block block_at(size_t here, uint64_t there, uint32_t length, uint32_t rkey)
{
	return (struct rn_block){(uintptr_t)a.buffer + here, there, length, a.mr->lkey, rkey};
}

static uint32_t move(enum ibv_wr_opcode opcode, const struct rn_block *blocks, uint32_t count)
{
	return rdmanet_soft_move(a.qp, opcode, 0, blocks, count, BUFFER);
}

/* Memory that is mapped here: also of another process, once a request has reached it. */
static void try_all(uint64_t theirs, uint32_t rkey, const char *their_bytes)
{
	struct rn_block blocks[MUCH], odd = block_at(1, theirs + 3, LONG, rkey);
	struct rn_counters before, after;

	before = counted(&a);
	memset(a.buffer, 'a', BUFFER);
	for (int i = 0; i < MUCH; i++)
		blocks[i] = block_at(i * 100, theirs + (MUCH - i) * 1000, 99, rkey);
	blocks[9].length = 0;
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), MUCH);
	for (int i = 0; i < MUCH * 100; i++)
		CHECK_EQ(a.buffer[i], i % 100 == 99 || i / 100 == 9 ? 'a' : 'b');
	CHECK_EQ(rdmanet_soft_move(a.qp, IBV_WR_RDMA_READ, 0, blocks, MUCH, 11 * 256), 11); /* one has no bytes */

	for (int i = 0; i < LONG; i++)
		a.buffer[i + 1] = i % 251;
	CHECK_EQ(move(IBV_WR_RDMA_WRITE, &odd, 1), 1);
	memset(a.buffer, 'a', BUFFER);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &odd, 1), 1);
	CHECK_EQ(a.buffer[0], 'a');
	for (int i = 0; i < LONG; i++)
		CHECK_EQ((unsigned char)a.buffer[i + 1], i % 251);
	CHECK_EQ(a.buffer[LONG + 1], 'a');
	CHECK(!their_bytes || !memcmp(their_bytes + 3, a.buffer + 1, LONG));

	after = counted(&a);
	CHECK_EQ(after.send_wrs - before.send_wrs, MUCH + 11 + 2);
	CHECK_EQ(after.completions, before.completions);
	CHECK_EQ(after.bytes_local + after.bytes_mapped - before.bytes_local - before.bytes_mapped,
		 (MUCH - 1) * 99 + 10 * 99 + 2 * LONG);
	CHECK_EQ(after.bytes_cma + after.bytes_engine, before.bytes_cma + before.bytes_engine);
	expect_nothing(a.cq);
}

static void within_a_process(void)
{
	open_pair();
	try_all(at_b(0), b.mr->rkey, b.buffer);
	close_pair();
}

/* Where its memory is. */
static struct address begin_server(struct other *other, enum memory memory)
{
	server_memory = memory;
	*other = spawn(serve);
	end_open(&a, &(struct end_options){0});
	return connect_over(&a, other->fd);
}

/* It is mapped here then, if it can be. */
static void read_by_request(struct address theirs)
{
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 1, 0, 8, theirs.buffer, theirs.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
}

static void between_processes(void)
{
	struct other other;
	struct address theirs;
	struct rn_block block;

	theirs = begin_server(&other, DEVICE_MEMORY);
	block = block_at(0, theirs.buffer, 8, theirs.rkey);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 0); /* not mapped yet */
	read_by_request(theirs);
	meet(other.fd);
	try_all(theirs.buffer, theirs.rkey, NULL);
	meet(other.fd);
	meet(other.fd);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 0); /* its key is good no more */
	CHECK_EQ(move(IBV_WR_RDMA_WRITE, &block, 1), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 0); /* nor is the queue pair */
	meet(other.fd);
	join(&other);
	end_close(&a);
}

/* Its memory is still mapped. That it has died is noticed all the same, by the engine, which needs the lock. */
static void whose_process_has_died(void)
{
	struct rn_block blocks[MUCH];
	struct other other;
	struct address theirs;

	theirs = begin_server(&other, DEVICE_MEMORY);
	read_by_request(theirs);
	for (int i = 0; i < MUCH; i++)
		blocks[i] = block_at(0, theirs.buffer, 4096, theirs.rkey);
	kill(other.pid, SIGKILL);
	while (move(IBV_WR_RDMA_READ, blocks, MUCH))
		;
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(waitpid(other.pid, NULL, 0), other.pid);
	close(other.fd);
	end_close(&a);
}

enum { ROUNDS = 50, TURNS = 64, FIRST = 8, WRITTEN = BUFFER / MUCH }; /* in the first turn it writes FIRST, then the next */

static struct {
	uint64_t at;
	uint32_t rkey;
} offered;

/* Withdraw the key while it is in use. From then on nobody writes to the memory. Who has got no CPU for so long that it is
 * not waited for finishes its piece. */
static void withdraw(int fd)
{
	int memory = memfd_create("withdrawn", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	char seen[MUCH], mark, *at;
	bool is_put_aside;
	struct end end;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	CHECK(memory >= 0 && !ftruncate(memory, BUFFER) && !fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	at = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	CHECK(at != MAP_FAILED);
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_mr *mr = server_memory == DEVICE_MEMORY
					    ? ibv_reg_dmabuf_mr(end.pd, 0, BUFFER, (uintptr_t)at, memory, ALL_ACCESS)
					    : ibv_reg_mr(end.pd, at, BUFFER, ALL_ACCESS);

		CHECK(mr);
		offered.at = (uintptr_t)at;
		offered.rkey = mr->rkey;
		tell(fd, &offered, sizeof(offered));
		CHECK(hear(fd, &mark, 1)); /* it writes */
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		is_put_aside = rdmanet_soft_quarantined();
		for (int i = MUCH; i--;)
			seen[i] = READ_ONCE(at[i * WRITTEN]);
		CHECK(hear(fd, &mark, 1)); /* it has been refused */
		for (int i = 0; i < MUCH; i++)
			if (seen[i] != at[i * WRITTEN])
				CHECK(is_put_aside && (at[i * WRITTEN] == seen[i] + 1 || at[i * WRITTEN] == FIRST));
	}
	_exit(0);
}

static void try_while_it_is_withdrawn(enum memory memory)
{
	struct rn_block *blocks = calloc(TURNS * MUCH, sizeof(*blocks));
	struct other other;
	char mark = 'm';

	CHECK(blocks);
	server_memory = memory;
	other = spawn(withdraw);
	end_open(&a, &(struct end_options){0});
	connect_over(&a, other.fd);
	for (int i = 0; i < BUFFER; i++)
		a.buffer[i] = i % 251;
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(hear(other.fd, &offered, sizeof(offered)));
		read_by_request((struct address){.buffer = offered.at, .rkey = offered.rkey});
		for (int i = 0; i < TURNS * MUCH; i++)
			blocks[i] = block_at(FIRST + i / MUCH, offered.at + i % MUCH * WRITTEN, WRITTEN, offered.rkey);
		tell(other.fd, &mark, 1);
		while (rdmanet_soft_move(a.qp, IBV_WR_RDMA_WRITE, 0, blocks, TURNS * MUCH, UINT64_MAX))
			;
		tell(other.fd, &mark, 1);
	}
	join(&other);
	end_close(&a);
	free(blocks);
}

static void a_key_that_is_withdrawn_meanwhile(void)
{
	try_while_it_is_withdrawn(DEVICE_MEMORY);
	try_while_it_is_withdrawn(USER_MEMORY);
}

/* The kernel copies many by one call. */
static void memory_that_is_not_mapped(void)
{
	struct rn_block blocks[2 * MUCH], block;
	struct rn_counters before, after;
	struct address theirs;
	struct other other;

	theirs = begin_server(&other, USER_MEMORY);
	read_by_request(theirs);
	meet(other.fd);
	before = counted(&a);
	memset(a.buffer, 'a', BUFFER);
	for (int i = 0; i < 2 * MUCH; i++)
		blocks[i] = block_at(i * 100, theirs.buffer + (2 * MUCH - i) * 1000, 99, theirs.rkey);
	blocks[9].length = 0;
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, 2 * MUCH), 2 * MUCH);
	for (int i = 0; i < 2 * MUCH * 100; i++)
		CHECK_EQ(a.buffer[i], i % 100 == 99 || i / 100 == 9 ? 'a' : 'b');
	after = counted(&a);
	CHECK_EQ(after.syscalls - before.syscalls, 2);
	CHECK_EQ(after.bytes_cma - before.bytes_cma, (2 * MUCH - 1) * 99);
	CHECK_EQ(after.send_wrs - before.send_wrs, 2 * MUCH);
	CHECK_EQ(rdmanet_soft_move(a.qp, IBV_WR_RDMA_READ, 0, blocks, MUCH, 3 * (99 + 1024)), 3);

	memset(a.buffer, 'w', 99);
	CHECK_EQ(move(IBV_WR_RDMA_WRITE, blocks, 1), 1);
	block = block_at(BUFFER / 2, theirs.buffer + 2 * MUCH * 1000 - 1, 101, theirs.rkey);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 1);
	for (int i = 0; i < 101; i++)
		CHECK_EQ(a.buffer[BUFFER / 2 + i], i == 0 || i == 100 ? 'b' : 'w');

	for (int i = 0; i < 8; i++)
		blocks[i] = block_at(0, theirs.buffer, 200 * 1024, theirs.rkey);
	blocks[4].length = 300 * 1024; /* the owner's engine helps with such as these */
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, 8), 4);
	CHECK_EQ(counted(&a).syscalls - after.syscalls, 3 + 4);
	blocks[1].there = theirs.buffer + BUFFER;
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, 8), 1);
	expect_nothing(a.cq);

	meet(other.fd);
	meet(other.fd);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 0); /* its key is good no more */
	CHECK_EQ(move(IBV_WR_RDMA_WRITE, &block, 1), 0);
	meet(other.fd);
	join(&other);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &block, 1), 0);
	end_close(&a);
}

/* The blocks before it are done, and a request says what is wrong. */
static void memory_with_a_hole(void)
{
	struct rn_block blocks[MUCH];
	struct address theirs;
	struct other other;

	server_has_hole = true;
	theirs = begin_server(&other, USER_MEMORY);
	server_has_hole = false;
	read_by_request(theirs);
	for (int i = 0; i < MUCH; i++)
		blocks[i] = block_at(i * 8, theirs.buffer, 8, theirs.rkey);
	blocks[20].there += BUFFER / 2;
	memset(a.buffer, 'a', BUFFER);
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), 20);
	for (int i = 0; i < BUFFER; i++)
		CHECK_EQ(a.buffer[i], i < 20 * 8 ? 'b' : 'a');
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks + 20, 1), 0);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 8, blocks[20].there, theirs.rkey), 0);
	expect(a.cq, 2, IBV_WC_REM_ACCESS_ERR);
	for (int i = 0; i < 4; i++)
		meet(other.fd);
	join(&other);
	end_close(&a);
}

/* Nothing of these is done or reported; the blocks before one are done. */
static void what_is_wrong(void)
{
	struct rn_block good, bad[8];
	struct ibv_mr *read_only;

	open_pair();
	read_only = ibv_reg_mr(a.pd, b.buffer, BUFFER, IBV_ACCESS_REMOTE_READ);
	CHECK(read_only);
	good = block_at(0, at_b(0), 8, b.mr->rkey);
	for (int i = 0; i < 8; i++)
		bad[i] = good;
	bad[0].rkey ^= 1;
	bad[1].lkey ^= 1;
	bad[2].there = at_b(BUFFER - 7);
	bad[3].there = at_b(0) - 1;
	bad[4].here += BUFFER - 7;
	bad[5].here -= 1;
	bad[6].length = BUFFER + 1;
	bad[7].rkey = read_only->rkey;
	for (int i = 0; i < 8; i++) {
		struct rn_block list[] = {good, bad[i], good};

		CHECK_EQ(rdmanet_soft_move(a.qp, IBV_WR_RDMA_WRITE, 0, list, 3, 2 * BUFFER), 1);
	}
	bad[0] = good;
	bad[0].lkey = read_only->lkey;
	bad[0].here = at_b(0);
	CHECK_EQ(move(IBV_WR_RDMA_READ, bad, 1), 0);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &good, 1), 1);
	expect_nothing(a.cq);
	CHECK_EQ(ibv_dereg_mr(read_only), 0);
	close_pair();
}

/* What was found for the block before is used for that key alone. */
static void several_regions(void)
{
	struct rn_block blocks[MUCH];
	struct ibv_mr *mr;

	open_pair();
	mr = ibv_reg_mr(a.pd, b.buffer + 4096, 8 * MUCH, ALL_ACCESS);
	CHECK(mr);
	for (int i = 0; i < MUCH; i++)
		blocks[i] = block_at(i * 8, at_b(4096 + i * 8), 8, i % 3 ? mr->rkey : b.mr->rkey);
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), MUCH);
	CHECK_EQ(a.buffer[8 * MUCH - 1], 'b');
	CHECK_EQ(a.buffer[8 * MUCH], 'a');
	blocks[4].there -= 40; /* b's buffer has it, and this region not */
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), 4);
	blocks[4].lkey = mr->lkey;
	blocks[4].here = blocks[4].there = at_b(4096);
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), MUCH);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(move(IBV_WR_RDMA_READ, blocks, MUCH), 1);
	close_pair();
}

/* What was posted before is executed before. */
static void behind_what_waits(void)
{
	struct rn_block good;

	open_pair();
	good = block_at(0, at_b(0), 8, b.mr->rkey);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0); /* there is no receive yet */
	CHECK_EQ(move(IBV_WR_RDMA_READ, &good, 1), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(move(IBV_WR_RDMA_READ, &good, 1), 1);
	set_faults(NULL, "delay=1ms");
	CHECK_EQ(move(IBV_WR_RDMA_READ, &good, 1), 0); /* faults happen to requests */
	set_faults(NULL, "");
	CHECK_EQ(move(IBV_WR_RDMA_READ, &good, 1), 1);
	close_pair();
}

/* Each takes as long as a long one, so of many only the first are done. Who withdraws a key waits for few. */
static void many_short_ones(void)
{
	enum { COUNT = 100 * 1000 };
	struct rn_block *list = calloc(COUNT, sizeof *list);
	uint32_t before;

	open_pair();
	CHECK(list);
	for (int i = 0; i < COUNT; i++)
		list[i] = block_at(i % BUFFER, at_b(i % BUFFER), 1, b.mr->rkey);
	CHECK_EQ(rdmanet_soft_move(a.qp, IBV_WR_RDMA_READ, 0, list, COUNT, 1 << 20), 4096);
	before = rn_qp(a.qp)->responder.busy;
	CHECK_EQ(rdmanet_soft_move(a.qp, IBV_WR_RDMA_WRITE, 0, list, COUNT, UINT64_MAX), COUNT);
	CHECK(rn_qp(a.qp)->responder.busy - before >= 2 * COUNT / 1024);
	close_pair();
	free(list);
}

/* A file that is shortened takes its mapping along. */
static void memory_that_goes_away(void)
{
	int fd = memfd_create("shortened", MFD_CLOEXEC);
	struct rn_block list[2];
	struct ibv_mr *mr;
	char *at;

	open_pair();
	CHECK(fd >= 0 && !ftruncate(fd, BUFFER));
	at = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(at != MAP_FAILED);
	mr = ibv_reg_mr(a.pd, at, BUFFER, ALL_ACCESS);
	CHECK(mr);
	list[0] = block_at(0, at_b(0), 8, b.mr->rkey);
	list[1] = (struct rn_block){(uintptr_t)at, at_b(0), 8, mr->lkey, b.mr->rkey};
	CHECK_EQ(move(IBV_WR_RDMA_READ, list, 2), 2);
	CHECK_EQ(ftruncate(fd, 0), 0);
	CHECK_EQ(move(IBV_WR_RDMA_READ, list, 2), 1);
	CHECK_EQ(move(IBV_WR_RDMA_WRITE, list, 2), 1);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	munmap(at, BUFFER);
	close(fd);
	close_pair();
}

int main(void)
{
	RUN(within_a_process);
	RUN(between_processes);
	RUN(whose_process_has_died);
	RUN(a_key_that_is_withdrawn_meanwhile);
	RUN(memory_that_is_not_mapped);
	RUN(memory_with_a_hole);
	RUN(what_is_wrong);
	RUN(several_regions);
	RUN(behind_what_waits);
	RUN(many_short_ones);
	RUN(memory_that_goes_away);
	return 0;
}
