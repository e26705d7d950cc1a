/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer that breaks the rules of the link on purpose: it lets us map what is its, and then does its worst with it.
 * Whatever becomes of work requests to it, we neither crash nor hang.
 */
#include "processes.h"

#include "mr.h"
#include "soft.h"

/* --- memory that is taken back while it is written -------------------------------------------------------- */

static void take_back_again_and_again(int fd)
{
	struct pollfd end_of_test = {.fd = fd, .events = POLLIN};
	struct end end;
	uint32_t id;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	connect_over(&end, fd);
	id = container_of(end.mr, struct rn_mr, mr)->segment->id;
	while (!poll(&end_of_test, 1, 0))
		rn_segment_gone(id); /* a lie: its key is good, and stays so */
	meet(fd);
	end_close(&end);
}

static void test_memory_taken_back_in_use(void)
{
	struct other other = spawn(take_back_again_and_again);
	struct address to;
	struct end end;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	to = connect_over(&end, other.fd);
	for (int i = 0; i < 200; i++) {
		CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, i, 0, BUFFER, to.buffer, to.rkey), 0);
		expect(end.cq, i, IBV_WC_SUCCESS); /* it was mapped again, as often as needed */
	}
	meet(other.fd);
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

int main(void)
{
	RUN(test_memory_taken_back_in_use);
	return 0;
}
