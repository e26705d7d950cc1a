/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stress: memory windows bound, used and taken away at random, between this process and another.
 *
 * In each round we bind windows of both types to random parts of our memory, with random rights, and the child
 * writes, reads and counts through them, and reads back what it wrote; windows are invalidated by us and by its
 * SEND_WITH_INV, and bound again.  The last act takes a window away in the midst of the child's writes, or the child
 * oversteps its bounds or its rights.  It must be refused as adapters do, and from the moment that our side of it has
 * completed nothing may be written.  stress.h has the switches.
 */
#include "stress.h"

#include <assert.h>

#include "base/fence.h"

enum { WINDOWS = 4, AREA = 65536, STAGE = AREA, SENTINEL = 0xee, EXCHANGES = 12 };
static_assert(WINDOWS * AREA <= BUFFER, "each window has an area of its own");

enum act { USE, USE_AND_INVALIDATE, HAMMER, OVERSTEP, STRAY, QUIT };

/* What the child is to do, and with what. */
struct order {
	enum act act;
	uint32_t rkey, access;
	uint64_t addr, length;
	bool zero_based;
};

static struct end end;
static struct address theirs;
static unsigned random_;
static uint64_t binds, uses, endings;

static unsigned roll(unsigned range)
{
	return rand_r(&random_) % range;
}

static struct ibv_wc complete(int err)
{
	CHECK_EQ(err, 0);
	return poll_one(end.cq);
}

/* --- the child: uses ---------------------------------------------------------------------------------------- */

static int rdma(enum ibv_wr_opcode opcode, const struct order *order, uint64_t at, size_t here, uint32_t length)
{
	return post_rdma(&end, opcode, 1, here, length, order->addr + at, order->rkey);
}

static void use(const struct order *order)
{
	for (int i = 0; i < 4; i++) {
		uint32_t length = roll(roll(2) ? 129 : order->length + 1) % (order->length + 1);
		uint64_t at = order->length > length ? roll(order->length - length) : 0;
		unsigned start = roll(256);

		fill((uint8_t *)end.buffer, length, start);
		memset(end.buffer + STAGE, 0, length);
		if (order->access & IBV_ACCESS_REMOTE_WRITE)
			CHECK_EQ(complete(rdma(IBV_WR_RDMA_WRITE, order, at, 0, length)).status, IBV_WC_SUCCESS);
		if (order->access & IBV_ACCESS_REMOTE_READ)
			CHECK_EQ(complete(rdma(IBV_WR_RDMA_READ, order, at, STAGE, length)).status, IBV_WC_SUCCESS);
		if (order->access & IBV_ACCESS_REMOTE_WRITE && order->access & IBV_ACCESS_REMOTE_READ)
			expect_filled((uint8_t *)end.buffer + STAGE, length, start);
	}
}

/* Until it is refused. */
static void hammer(const struct order *order)
{
	enum ibv_wr_opcode opcode = order->access & IBV_ACCESS_REMOTE_WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	struct ibv_wc wc;

	memset(end.buffer, 'h', order->length);
	do
		wc = complete(rdma(opcode, order, 0, 0, roll(4) ? 64 % (order->length + 1) : order->length));
	while (wc.status == IBV_WC_SUCCESS);
	CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
}

static void overstep(const struct order *order)
{
	uint32_t length = 1 + roll(100);
	uint64_t at = roll(2) ? order->length - roll(length) : (uint64_t)-(int64_t)(1 + roll(200));
	bool writes = order->access & IBV_ACCESS_REMOTE_WRITE;

	memset(end.buffer, 'o', length);
	CHECK_EQ(complete(rdma(writes ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, order, at, 0, length)).status,
		 IBV_WC_REM_ACCESS_ERR);
}

/* Within its bounds, against its rights. */
static void stray(const struct order *order)
{
	bool may_write = order->access & IBV_ACCESS_REMOTE_WRITE;

	memset(end.buffer, 's', 64);
	CHECK_EQ(complete(rdma(may_write ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, order, 0, 0, 1 + roll(64))).status,
		 IBV_WC_REM_ACCESS_ERR);
}

static void send_with_invalidate(uint32_t rkey)
{
	CHECK_EQ(complete(post(&end,
			       (struct ibv_send_wr){.wr_id = 2, .opcode = IBV_WR_SEND_WITH_INV,
						    .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey}, 0, 0)).status,
		 IBV_WC_SUCCESS);
}

static void connect_patiently(int fd)
{
	struct ibv_qp_attr attr = default_attr(0);

	attr.timeout = 18;
	theirs = connect_over_with(&end, fd, attr);
}

static void serve(int fd)
{
	struct order order;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	random_ = stress_seed + 1;
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	connect_patiently(fd);
	do {
		CHECK(hear(fd, &order, sizeof(order)));
		switch (order.act) {
		case USE:
			use(&order);
			break;
		case USE_AND_INVALIDATE:
			use(&order);
			send_with_invalidate(order.rkey);
			break;
		case HAMMER:
			hammer(&order);
			break;
		case OVERSTEP:
			overstep(&order);
			break;
		case STRAY:
			stray(&order);
			break;
		default:
			break;
		}
		meet(fd);
	} while (order.act < HAMMER);
	end_close(&end);
	expect_live_nothing();
}

/* --- we: bind and take away ------------------------------------------------------------------------------------ */

struct window {
	struct ibv_mw *mw;
	bool bound;
	struct order order;
	uint64_t offset;
};

static struct window windows[WINDOWS];

static void give_out(struct window *window)
{
	static const unsigned rights[] = {IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ,
					  IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
	bool is_2 = window->mw->type == IBV_MW_TYPE_2;
	struct order *order = &window->order;
	struct ibv_mw_bind_info info;

	window->offset = (window - windows) * AREA + roll(AREA / 2);
	*order = (struct order){.access = rights[roll(3)], .length = 1 + roll(AREA / 2), .zero_based = is_2 && roll(2)};
	info = (struct ibv_mw_bind_info){
		.mr = end.mr,
		.addr = (uintptr_t)end.buffer + window->offset,
		.length = order->length,
		.mw_access_flags = order->access | (order->zero_based ? IBV_ACCESS_ZERO_BASED : 0),
	};
	order->addr = order->zero_based ? 0 : info.addr;
	if (is_2) {
		struct ibv_send_wr wr = {.wr_id = 3, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

		window->mw->rkey = (window->mw->rkey & ~0xffu) | ((window->mw->rkey + 1) & 0xff);
		wr.bind_mw.mw = window->mw;
		wr.bind_mw.rkey = window->mw->rkey;
		wr.bind_mw.bind_info = info;
		CHECK_EQ(complete(ibv_post_send(end.qp, &wr, &bad)).status, IBV_WC_SUCCESS);
	} else {
		struct ibv_mw_bind bind = {.wr_id = 3, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};

		CHECK_EQ(complete(ibv_bind_mw(end.qp, window->mw, &bind)).status, IBV_WC_SUCCESS);
	}
	order->rkey = window->mw->rkey;
	window->bound = true;
	binds++;
}

/* Type 2 by LOCAL_INV, type 1 by a bind of nothing. */
static enum ibv_wc_status try_to_take_back(struct window *window)
{
	struct ibv_send_wr wr = {.wr_id = 4, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				 .invalidate_rkey = window->order.rkey}, *bad;
	struct ibv_mw_bind nothing = {.wr_id = 4, .send_flags = IBV_SEND_SIGNALED};

	window->bound = false;
	return complete(window->mw->type == IBV_MW_TYPE_2 ? ibv_post_send(end.qp, &wr, &bad)
							  : ibv_bind_mw(end.qp, window->mw, &nothing)).status;
}

static void take_back(struct window *window)
{
	CHECK_EQ(try_to_take_back(window), IBV_WC_SUCCESS);
}

static void dealloc(struct window *window)
{
	CHECK_EQ(ibv_dealloc_mw(window->mw), 0);
	window->mw = NULL;
}

static void have_done(int fd, struct window *window, enum act act)
{
	struct order order = window->order;

	order.act = act;
	rn_order_by_peer(); /* our engine may do it for the child */
	tell(fd, &order, sizeof(order));
	uses++;
}

static void hear_of_it(int fd)
{
	meet(fd);
	rn_order_by_peer();
}

static void use_it(int fd, struct window *window)
{
	bool by_peer = window->mw->type == IBV_MW_TYPE_2 && roll(2);

	if (by_peer)
		CHECK_EQ(post_recv(&end, 5, 0, 0), 0);
	have_done(fd, window, by_peer ? USE_AND_INVALIDATE : USE);
	if (by_peer) {
		struct ibv_wc wc = poll_one(end.cq);

		CHECK_EQ(wc.wr_id, 5);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.wc_flags, IBV_WC_WITH_INV);
		CHECK_EQ(wc.invalidated_rkey, window->order.rkey);
		window->bound = false;
	}
	hear_of_it(fd);
}

static void expect_untouched(void)
{
	for (size_t i = 0; i < WINDOWS * AREA; i++)
		CHECK_EQ((uint8_t)end.buffer[i], SENTINEL);
}

/* In the midst of its writes. The first that is refused ends the connection, and may flush the very request that
 * took the window back: then nobody knows, but what has been deallocated is gone. */
static void take_away(int fd, struct window *window)
{
	enum ibv_wc_status status = IBV_WC_WR_FLUSH_ERR;

	have_done(fd, window, HAMMER);
	usleep(roll(2000));
	if (roll(2)) {
		status = try_to_take_back(window);
		CHECK(status == IBV_WC_SUCCESS || status == IBV_WC_WR_FLUSH_ERR);
	}
	if (status != IBV_WC_SUCCESS)
		dealloc(window);
	memset(end.buffer, SENTINEL, WINDOWS * AREA);
	hear_of_it(fd);
	expect_untouched();
}

static void end_badly(int fd, struct window *window)
{
	static const enum act acts[] = {HAMMER, HAMMER, OVERSTEP, STRAY, QUIT};
	enum act act = acts[roll(5)];

	if (act == STRAY && window->order.access == (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ))
		act = OVERSTEP;
	if (act == HAMMER) {
		take_away(fd, window);
	} else {
		memset(end.buffer, SENTINEL, WINDOWS * AREA);
		have_done(fd, window, act);
		hear_of_it(fd);
		expect_untouched();
	}
	endings++;
}

static void play(void)
{
	unsigned way = mix(stress_seed, 0) % 4;
	struct window *last;
	struct other other;

	random_ = stress_seed;
	setenv("RDMANET_SOFT_CMA", way == 1 ? "0" : "1", 1);
	setenv("RDMANET_SOFT_DEFER", way == 2 ? "50" : "0", 1);
	other = spawn(serve);
	end_open(&end, &(struct end_options){.memory = roll(2) ? DEVICE_MEMORY : USER_MEMORY});
	connect_patiently(other.fd);
	for (int i = 0; i < WINDOWS; i++) {
		windows[i] = (struct window){.mw = ibv_alloc_mw(end.pd, i % 2 ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1)};
		CHECK(windows[i].mw);
	}
	for (int i = 0; i < EXCHANGES; i++) {
		struct window *window = &windows[roll(WINDOWS)];

		if (window->bound && window->mw->type == IBV_MW_TYPE_2)
			take_back(window);
		give_out(window);
		CHECK_EQ(ibv_dereg_mr(end.mr), EBUSY);
		use_it(other.fd, window);
		if (window->bound && roll(2))
			take_back(window);
	}
	last = &windows[roll(WINDOWS)];
	if (!last->bound)
		give_out(last);
	end_badly(other.fd, last);
	join(&other);
	CHECK_EQ(ibv_destroy_qp(end.qp), 0);
	end.qp = NULL;
	for (int i = 0; i < WINDOWS; i++)
		if (windows[i].mw)
			CHECK_EQ(ibv_dealloc_mw(windows[i].mw), 0);
	end_close(&end);
	expect_live_nothing();
}

int main(int argc, char **argv)
{
	uint64_t until = stress_begin(argc, argv), rounds = 0;

	do {
		alarm(60);
		play();
		rounds++;
		stress_seed++;
	} while (now_ns() < until);
	printf("  %llu rounds, %llu binds, %llu uses, %llu endings\n", (unsigned long long)rounds, (unsigned long long)binds,
	       (unsigned long long)uses, (unsigned long long)endings);
	return 0;
}
