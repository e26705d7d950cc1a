/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMANET_SOFT_ARM=lenient: events for completions that were there before the arming, and none in vain.
 * The strict rules are tested in test_local.c.
 */
#include "pair.h"

static void send_one(uint64_t wr_id)
{
	CHECK_EQ(post_recv(&b, wr_id, 0, 64), 0);
	CHECK_EQ(post_send(&a, wr_id, 0, 64), 0);
	expect(a.cq, wr_id, IBV_WC_SUCCESS);
}

static void arm(void)
{
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
}

static void take_event(void)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(readable(b.channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_get_cq_event(b.channel, &cq, &context), 0);
	CHECK(cq == b.cq);
	ibv_ack_cq_events(cq, 1);
}

static void test_what_is_there_fires(void)
{
	open_pair();
	send_one(1);
	send_one(2);
	CHECK(!readable(b.channel->fd, 0));
	arm();
	take_event();
	expect(b.cq, 1, IBV_WC_SUCCESS);
	arm(); /* without having polled all of it */
	take_event();
	expect(b.cq, 2, IBV_WC_SUCCESS);
	arm();
	CHECK(!readable(b.channel->fd, 0));
	close_pair();
}

static void test_polled_before_the_event_was_read(void)
{
	open_pair();
	arm();
	send_one(1);
	CHECK(readable(b.channel->fd, 0));
	expect(b.cq, 1, IBV_WC_SUCCESS);
	CHECK(!readable(b.channel->fd, 0));
	send_one(2); /* it is armed still */
	take_event();
	expect(b.cq, 2, IBV_WC_SUCCESS);
	send_one(3); /* and now it isn't */
	CHECK(!readable(b.channel->fd, 0));
	expect(b.cq, 3, IBV_WC_SUCCESS);
	close_pair();
}

static void test_solicited(void)
{
	open_pair();
	send_one(1);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	CHECK(!readable(b.channel->fd, 0));
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

int main(void)
{
	setenv("RDMANET_SOFT_ARM", "lenient", 1);
	RUN(test_what_is_there_fires);
	RUN(test_polled_before_the_event_was_read);
	RUN(test_solicited);
	return 0;
}
