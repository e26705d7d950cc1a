/* SPDX-License-Identifier: Apache-2.0 */
/* ibv_modify_cq: the event of an armed CQ waits for more completions, but not for long. */
#include "pair.h"

enum { LONGEST_US = 65535 };

static uint64_t now_us(void)
{
	return now_ns() / 1000;
}

static int moderate(struct ibv_cq *cq, int count, int us)
{
	struct ibv_modify_cq_attr attr = {.attr_mask = IBV_CQ_ATTR_MODERATE,
					  .moderate = {.cq_count = count, .cq_period = us}};

	return ibv_modify_cq(cq, &attr);
}

static void deliver(int count)
{
	for (int i = 0; i < count; i++) {
		CHECK_EQ(post_recv(&b, i, 0, 8), 0);
		CHECK_EQ(post_send(&a, i, 0, 8), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
}

static void take_event(struct end *end)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(readable(end->channel->fd, 20000));
	CHECK_EQ(ibv_get_cq_event(end->channel, &cq, &context), 0);
	CHECK(cq == end->cq);
	ibv_ack_cq_events(cq, 1);
}

static void drain(struct end *end)
{
	while (ibv_poll_cq(end->cq, 1, &(struct ibv_wc){0}) > 0)
		;
}

/* An event comes although there are too few completions for it, and not before its time. */
static void test_period(void)
{
	open_pair();
	CHECK_EQ(moderate(b.cq, 100, 20000), 0);
	for (int round = 0; round < 5; round++) {
		uint64_t began;

		CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
		CHECK(!readable(b.channel->fd, 0));
		began = now_us();
		deliver(round + 1);
		take_event(&b);
		CHECK(now_us() - began >= 20000);
		CHECK(!readable(b.channel->fd, 0)); /* one an arming */
		drain(&b);
	}
	close_pair();
}

/* So many completions, and the event is there at once: in one of many tries the machine lets us see that. */
static void test_count(void)
{
	int seen = 0;

	open_pair();
	CHECK_EQ(moderate(b.cq, 4, LONGEST_US), 0);
	for (int round = 0; round < 20 && !seen; round++) {
		uint64_t began = now_us();
		bool early;

		CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
		deliver(3);
		early = readable(b.channel->fd, 0);
		CHECK(!early || now_us() - began >= LONGEST_US);
		deliver(1);
		take_event(&b);
		seen = now_us() - began < LONGEST_US;
		drain(&b);
	}
	CHECK(seen);
	close_pair();
}

/* What is there when the queue is armed counts for nothing; each arming counts for itself. */
static void test_each_arming_anew(void)
{
	open_pair();
	CHECK_EQ(moderate(b.cq, 2, 20000), 0);
	deliver(5);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK(!readable(b.channel->fd, 50)); /* no completion, no period */
	deliver(1);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0); /* before its event: that one is off, as ever */
	deliver(2);
	take_event(&b);
	close_pair();
}

/* Only what an arming asks for counts. */
static void test_solicited(void)
{
	open_pair();
	CHECK_EQ(moderate(b.cq, 2, 1000), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 1), 0);
	deliver(4);
	CHECK(!readable(b.channel->fd, 50));
	CHECK_EQ(post_recv(&b, 0, 0, 8), 0);
	CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SOLICITED}, 0, 8), 0);
	take_event(&b);
	close_pair();
}

/* Sends finish by the hand of their own process, and are moderated as well. */
static void test_sends(void)
{
	uint64_t began;

	open_pair();
	CHECK_EQ(moderate(a.cq, 3, 20000), 0);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	began = now_us();
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	take_event(&a);
	CHECK(now_us() - began >= 20000);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	take_event(&a);
	close_pair();
}

/* Either limit 0: no moderation, from the next arming on. */
static void test_none(void)
{
	static const struct {
		int count, us;
	} none[] = {{0, 0}, {0, LONGEST_US}, {100, 0}};

	open_pair();
	for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
		CHECK_EQ(moderate(b.cq, 100, LONGEST_US), 0);
		CHECK_EQ(moderate(b.cq, none[i].count, none[i].us), 0);
		CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
		deliver(1);
		CHECK(readable(b.channel->fd, 0));
		take_event(&b);
		drain(&b);
	}
	close_pair();
}

static void test_refused(void)
{
	struct ibv_modify_cq_attr nothing = {0}, unknown = {.attr_mask = IBV_CQ_ATTR_MODERATE << 1};
	struct ibv_device_attr_ex attr;

	open_pair();
	CHECK_EQ(ibv_modify_cq(b.cq, &nothing), EINVAL);
	CHECK_EQ(ibv_modify_cq(b.cq, &unknown), EOPNOTSUPP);
	CHECK_EQ(verbs_get_ctx(a.context)->query_device_ex(a.context, NULL, &attr, sizeof(attr)), 0);
	CHECK_EQ(attr.cq_mod_caps.max_cq_count, 65535);
	CHECK_EQ(attr.cq_mod_caps.max_cq_period, 65535);
	close_pair();
}

/* A queue goes with its timer running. */
static void test_destroyed_meanwhile(void)
{
	for (int round = 0; round < 10; round++) {
		open_pair();
		CHECK_EQ(moderate(b.cq, 100, round * 100 + 1), 0);
		CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
		deliver(1);
		close_pair();
	}
}

int main(void)
{
	RUN(test_period);
	RUN(test_count);
	RUN(test_each_arming_anew);
	RUN(test_solicited);
	RUN(test_sends);
	RUN(test_none);
	RUN(test_refused);
	RUN(test_destroyed_meanwhile);
	expect_live_nothing();
	return 0;
}
