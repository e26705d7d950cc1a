/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short messages into memory that the sender can't map: carried in two steps, with no system call, and nobody
 * can tell.  The child receives, the test sends.
 */
#include "processes.h"

#include "soft.h"

static struct end a, end;

enum { LENGTH = 64 };

/* The receiver's memory: nobody's but its owner's, unless said otherwise. */
static void open_receiver(int access)
{
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	CHECK_EQ(ibv_dereg_mr(end.mr), 0);
	end.mr = ibv_reg_mr(end.pd, end.buffer, BUFFER, access);
	CHECK(end.mr);
	memset(end.buffer, 'b', BUFFER);
	to_init(end.qp);
}

static void close_receiver(void)
{
	end_close(&end);
	expect_live_nothing();
}

static struct other begin(void (*serve)(int))
{
	struct other other = spawn(serve);

	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	for (int i = 0; i < BUFFER; i++)
		a.buffer[i] = i % 251;
	return other;
}

static struct rn_counters finish(struct other *other)
{
	struct rn_counters count;

	count = counted(&a);
	meet(other->fd);
	end_close(&a);
	expect_live_nothing();
	join(other);
	return count;
}

static void expect_bytes(const char *at, size_t length)
{
	for (size_t i = 0; i < length; i++)
		CHECK_EQ((unsigned char)at[i], i % 251);
	CHECK_EQ(at[length], 'b');
}

/* --- it arrives ------------------------------------------------------------------------------------------- */

static void serve_lengths(int fd)
{
	open_receiver(IBV_ACCESS_LOCAL_WRITE);
	CHECK_EQ(post_recv(&end, 1, 0, 4096), 0);
	CHECK_EQ(post_recv(&end, 2, 8192, LENGTH), 0);
	CHECK_EQ(post_recv(&end, 3, 16384, 0), 0);
	connect_over(&end, fd);
	for (int i = 1; i <= 3; i++) {
		struct ibv_wc wc = poll_one(end.cq);

		CHECK_EQ(wc.wr_id, i);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.byte_len, i == 1 ? 4096 : i == 2 ? LENGTH - 1 : 0);
		CHECK_EQ(wc.wc_flags, 0);
	}
	expect_bytes(end.buffer, 4096);
	expect_bytes(end.buffer + 8192, LENGTH - 1);
	meet(fd);
	close_receiver();
}

static void test_lengths(void)
{
	struct other other = begin(serve_lengths);
	struct rn_counters count;

	connect_over(&a, other.fd);
	CHECK_EQ(post_send(&a, 1, 0, 4096), 0);
	CHECK_EQ(post_send(&a, 2, 0, LENGTH - 1), 0);
	CHECK_EQ(post_send(&a, 3, 0, 0), 0);
	for (int i = 1; i <= 3; i++)
		expect(a.cq, i, IBV_WC_SUCCESS);
	count = finish(&other);
	CHECK_EQ(count.bytes_bounced, 4096 + LENGTH - 1);
	CHECK_EQ(count.bytes_cma, 0);
	CHECK_EQ(count.syscalls, 0);
}

/* What is longer than the room goes another way, and leaves the next one's room alone. */
static void serve_too_long(int fd)
{
	open_receiver(IBV_ACCESS_LOCAL_WRITE);
	CHECK_EQ(post_recv(&end, 1, 0, 8192), 0);
	CHECK_EQ(post_recv(&end, 2, 16384, LENGTH), 0);
	connect_over(&end, fd);
	meet(fd);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	expect(end.cq, 2, IBV_WC_SUCCESS);
	expect_bytes(end.buffer, 8192);
	expect_bytes(end.buffer + 16384, LENGTH);
	meet(fd);
	close_receiver();
}

static void test_too_long(void)
{
	struct other other = begin(serve_too_long);

	connect_over(&a, other.fd);
	CHECK_EQ(post_send(&a, 1, 0, 8192), 0);
	CHECK_EQ(post_send(&a, 2, 0, LENGTH), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	meet(other.fd);
	CHECK_EQ(finish(&other).bytes_bounced, LENGTH);
}

/* A gathered message, several times around the ring. */
static void serve_many(int fd)
{
	open_receiver(IBV_ACCESS_LOCAL_WRITE);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&end, i, i * LENGTH, LENGTH), 0);
	connect_over(&end, fd);
	for (int i = 0; i < 1000; i++) {
		struct ibv_wc wc = poll_one(end.cq);
		const char *at = end.buffer + wc.wr_id * LENGTH;

		CHECK_EQ(wc.wr_id, i % 64);
		CHECK_EQ(wc.byte_len, 30);
		for (int k = 0; k < 30; k++)
			CHECK_EQ((unsigned char)at[k], ((i + k % 10) + k / 10 * 1000) % 251);
		CHECK_EQ(post_recv(&end, wc.wr_id, wc.wr_id * LENGTH, LENGTH), 0);
	}
	meet(fd);
	close_receiver();
}

static void test_gathered(void)
{
	struct other other = begin(serve_many);

	connect_over(&a, other.fd);
	for (int i = 0; i < 1000; i++) {
		struct ibv_sge sge[] = {sge_of(&a, i, 10), sge_of(&a, i + 1000, 10), sge_of(&a, i + 2000, 10)};
		struct ibv_send_wr wr = {.sg_list = sge, .num_sge = 3, .send_flags = IBV_SEND_SIGNALED}, *bad;

		wr.opcode = IBV_WR_SEND;
		CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
		expect(a.cq, 0, IBV_WC_SUCCESS);
	}
	CHECK_EQ(finish(&other).bytes_bounced, 30 * 1000);
}

/* --- where it would show ------------------------------------------------------------------------------------ */

static void serve_unpolled(int fd)
{
	open_receiver(ALL_ACCESS);
	CHECK_EQ(post_recv(&end, 1, 0, LENGTH), 0);
	connect_over(&end, fd);
	meet(fd); /* the test is done: never polled */
	close_receiver();
}

/* What a READ behind the SEND finds are the new bytes, though the receiver has not looked yet. */
static void test_read_behind(void)
{
	struct other other = begin(serve_unpolled);
	struct address b = connect_over(&a, other.fd);

	CHECK_EQ(post_send(&a, 1, 0, LENGTH), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 4096, LENGTH, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK(!memcmp(a.buffer + 4096, a.buffer, LENGTH));
	CHECK_EQ(finish(&other).bytes_bounced, 0);
}

static void serve_pieces(int fd)
{
	struct ibv_recv_wr wr = {.wr_id = 1, .num_sge = 2}, *bad;

	open_receiver(IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge[] = {sge_of(&end, 0, 32), sge_of(&end, 4096, 32)};

	wr.sg_list = sge;
	CHECK_EQ(ibv_post_recv(end.qp, &wr, &bad), 0);
	connect_over(&end, fd);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	for (int i = 0; i < LENGTH; i++)
		CHECK_EQ((unsigned char)end.buffer[i < 32 ? i : 4096 + i - 32], i % 251);
	meet(fd);
	close_receiver();
}

static void test_scattered(void)
{
	struct other other = begin(serve_pieces);

	connect_over(&a, other.fd);
	CHECK_EQ(post_send(&a, 1, 0, LENGTH), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(finish(&other).bytes_bounced, 0);
}

/* The region goes before anybody polls: the bytes are in place, as if an adapter had written them. */
static void serve_deregistered(int fd)
{
	open_receiver(IBV_ACCESS_LOCAL_WRITE);
	CHECK_EQ(post_recv(&end, 1, 0, LENGTH), 0);
	CHECK_EQ(post_recv(&end, 2, 4096, LENGTH), 0);
	connect_over(&end, fd);
	meet(fd); /* both were sent */
	CHECK_EQ(ibv_dereg_mr(end.mr), 0);
	end.mr = NULL;
	expect_bytes(end.buffer, LENGTH);
	expect_bytes(end.buffer + 4096, LENGTH);
	memset(end.buffer, 'c', BUFFER); /* it is the program's again: */
	expect(end.cq, 1, IBV_WC_SUCCESS);
	munmap(end.buffer, BUFFER);
	expect(end.cq, 2, IBV_WC_SUCCESS); /* and nobody touches it any more */
	end.buffer = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	meet(fd);
	close_receiver();
}

static void test_deregistered(void)
{
	struct other other = begin(serve_deregistered);

	connect_over(&a, other.fd);
	for (int i = 1; i <= 2; i++) {
		CHECK_EQ(post_send(&a, i, 0, LENGTH), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
	meet(other.fd);
	CHECK_EQ(finish(&other).bytes_bounced, 2 * LENGTH);
}

/* --- room ------------------------------------------------------------------------------------------------------ */

/* Deep rings have less room for each message, very deep ones none; and all together have their limit. */
static void test_room(void)
{
	uint64_t bytes = 0;
	uint32_t room;
	int rings = 0;

	CHECK_EQ(rn_eager_reserve(RN_MAX_QP_WR), 0);
	room = rn_eager_reserve(512);
	CHECK(room >= 512 && room < 4096);
	rn_eager_release(512, room);
	while ((room = rn_eager_reserve(128))) {
		CHECK_EQ(room, 4096);
		bytes += rn_eager_bytes(128, room);
		rings++;
	}
	CHECK(bytes <= RN_ARENA_SIZE / 4);
	while (rings--)
		rn_eager_release(128, 4096);
	CHECK_EQ(rn_eager_reserve(128), 4096);
	rn_eager_release(128, 4096);
}

int main(void)
{
	RUN(test_lengths);
	RUN(test_too_long);
	RUN(test_gathered);
	RUN(test_read_behind);
	RUN(test_scattered);
	RUN(test_deregistered);
	RUN(test_room);
	return 0;
}
