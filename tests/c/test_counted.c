/* SPDX-License-Identifier: Apache-2.0 */
/* Each fault of a text is met, by number and by chance, and counted by itself: only what has come to pass. */
#define TIMEOUT 10 /* 4 ms: losses are waited for */
#include "pair.h"

enum { MESSAGES = 60 };

/* How often the fault at this place has happened, which is written so. */
static uint64_t happened(struct ibv_context *context, unsigned place, const char *as)
{
	uint64_t count = 0;
	char text[128];

	CHECK_EQ(rdmanet_soft_chaos_fault(context, place, text, sizeof(text), &count), 0);
	if (strcmp(text, as))
		fprintf(stderr, "%u is %s\n", place, text);
	CHECK(!strcmp(text, as));
	return count;
}

static int post_one(enum ibv_wr_opcode opcode, uint64_t id)
{
	if (opcode == IBV_WR_SEND)
		return post_send(&a, id, 0, 8);
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return post(&a,
			    (struct ibv_send_wr){.wr_id = id,
						 .opcode = opcode,
						 .send_flags = IBV_SEND_SIGNALED,
						 .wr.atomic = {at_b(0), 1, 0, b.mr->rkey}},
			    0, 8);
	return post_rdma(&a, opcode, id, 0, 8, at_b(0), b.mr->rkey);
}

/* What does not end the connection: half of the requests meet it. */
static void half_of_them(void)
{
	static const struct {
		const char *text;
		enum ibv_wr_opcode opcode;
	} faults[] = {
		{"dup=50%", IBV_WR_SEND},
		{"dup=send:50%", IBV_WR_SEND},
		{"dup=write:0.5", IBV_WR_RDMA_WRITE},
		{"dup=atomic:50%", IBV_WR_ATOMIC_FETCH_AND_ADD},
		{"delay=50%:10us", IBV_WR_SEND},
		{"delay=read:50%:1us..10us", IBV_WR_RDMA_READ},
		{"loss=50%:1", IBV_WR_SEND},
		{"ackloss=send:50%:1", IBV_WR_SEND},
		{"rnr=50%:1", IBV_WR_SEND},
	};

	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		uint64_t count;

		open_pair();
		set_faults(a.context, faults[i].text);
		for (int k = 0; k < MESSAGES; k++) {
			if (faults[i].opcode == IBV_WR_SEND)
				CHECK_EQ(post_recv(&b, k, 0, 16), 0);
			CHECK_EQ(post_one(faults[i].opcode, k), 0);
			expect(a.cq, k, IBV_WC_SUCCESS);
		}
		count = happened(a.context, 0, faults[i].text);
		if (count < MESSAGES / 4 || count > MESSAGES * 3 / 4)
			fprintf(stderr, "%s: %lu of %d\n", faults[i].text, (unsigned long)count, MESSAGES);
		CHECK(count >= MESSAGES / 4 && count <= MESSAGES * 3 / 4);
		close_pair();
	}
}

/* What does: with half of the seeds the first request meets it. */
static void with_half_of_the_seeds(void)
{
	static const struct {
		const char *text;
		enum ibv_wr_opcode opcode;
	} faults[] = {
		{"fail=send:50%:GENERAL_ERR", IBV_WR_SEND},
		{"fail=50%:REM_OP_ERR", IBV_WR_SEND},
		{"fail=write:50%:REM_ACCESS_ERR", IBV_WR_RDMA_WRITE},
		{"fail=read:50%:RETRY_EXC_ERR", IBV_WR_RDMA_READ},
		{"fail=recv:50%:LOC_LEN_ERR", IBV_WR_SEND},
	};

	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		unsigned met = 0;

		for (int seed = 0; seed < 32; seed++) {
			char text[128];
			bool fails;

			snprintf(text, sizeof(text), "seed=%d, %s", seed, faults[i].text);
			open_pair();
			set_faults(a.context, text);
			CHECK_EQ(post_recv(&b, 1, 0, 16), 0);
			CHECK_EQ(post_one(faults[i].opcode, 1), 0);
			fails = poll_one(a.cq).status != IBV_WC_SUCCESS;
			if (strstr(faults[i].text, "recv"))
				poll_one(b.cq); /* it is its receiver's */
			CHECK_EQ(happened(a.context, 0, faults[i].text), fails);
			met += fails;
			close_pair();
		}
		if (met < 8 || met > 24)
			fprintf(stderr, "%s: %u of 32\n", faults[i].text, met);
		CHECK(met >= 8 && met <= 24);
	}
}

/* A rule that hits a request which cannot meet it, or ends before, has done nothing. */
static void what_never_comes_to_pass(void)
{
	open_pair();
	set_faults(a.context, "rnr=*, fail=send:1:GENERAL_ERR, fail=recv:3:LOC_LEN_ERR, dup=write:3, overrun=100, memlock=1G,"
		       "fail=create_cq:2");
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_recv(&b, i, 0, 16), 0);
	CHECK_EQ(post_one(IBV_WR_RDMA_WRITE, 1), 0); /* needs no receive */
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(happened(a.context, 0, "rnr=*"), 0);
	CHECK_EQ(happened(a.context, 1, "fail=send:1:GENERAL_ERR"), 0);
	CHECK_EQ(happened(a.context, 2, "fail=recv:3:LOC_LEN_ERR"), 0);
	CHECK_EQ(happened(a.context, 3, "dup=write:3"), 0);
	CHECK_EQ(happened(a.context, 4, "overrun=100"), 0);
	CHECK_EQ(happened(a.context, 5, "memlock=1G"), 0);
	CHECK_EQ(happened(a.context, 6, "fail=create_cq:2"), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_GENERAL_ERR);
	CHECK_EQ(happened(a.context, 1, "fail=send:1:GENERAL_ERR"), 1);
	CHECK_EQ(happened(a.context, 0, "rnr=*"), 0); /* it has failed before */
	close_pair();
}

/* One that happens does not hide one that does not; all are in the sum. */
static void each_by_itself(void)
{
	uint64_t count;
	char text[8];

	open_pair();
	set_faults(NULL, " seed=3 ,delay = 1us, loss=send:2:1,  link=up, fail=send:9:GENERAL_ERR");
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(post_recv(&b, i, 0, 16), 0);
		CHECK_EQ(post_send(&a, i, 0, 8), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
	CHECK_EQ(happened(NULL, 0, "delay = 1us"), 4);
	CHECK_EQ(happened(NULL, 1, "loss=send:2:1"), 1);
	CHECK_EQ(happened(NULL, 2, "fail=send:9:GENERAL_ERR"), 0);
	CHECK_EQ(rdmanet_soft_chaos_fault(NULL, 3, text, sizeof(text), &count), ENOENT);
	CHECK_EQ(rdmanet_soft_chaos_fault(NULL, 0, text, sizeof(text), &count), 0);
	CHECK(!strcmp(text, "delay ="));
	CHECK_EQ(rdmanet_soft_chaos_happened(), 5);
	close_pair();
	CHECK_EQ(happened(NULL, 0, "delay = 1us"), 4); /* of contexts that are closed */
	set_faults(NULL, NULL);
	CHECK_EQ(rdmanet_soft_chaos_fault(NULL, 0, text, sizeof(text), &count), ENOENT);
}

/* Of all contexts, except those that have a text of their own. */
static void in_all_contexts(void)
{
	struct ibv_context *first = open_soft(), *second;

	set_faults(NULL, "fail=alloc_pd:1..2");
	second = open_soft();
	CHECK(!ibv_alloc_pd(first));
	CHECK(!ibv_alloc_pd(second));
	CHECK(!ibv_alloc_pd(second));
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd:1..2"), 3);
	CHECK_EQ(happened(second, 0, "fail=alloc_pd:1..2"), 2);
	set_faults(second, "fail=create_cq, fail=alloc_pd");
	CHECK(!ibv_alloc_pd(second));
	CHECK_EQ(happened(second, 0, "fail=create_cq"), 0);
	CHECK_EQ(happened(second, 1, "fail=alloc_pd"), 1);
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd:1..2"), 3);
	CHECK_EQ(ibv_close_device(second), 0);
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd:1..2"), 3);
	set_faults(NULL, "fail=alloc_pd:1..2");
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd:1..2"), 0);
	set_faults(NULL, NULL);
	CHECK_EQ(ibv_close_device(first), 0);
}

/* Those of the environment; another text is counted anew. */
static void of_the_environment(void)
{
	struct ibv_context *first, *second;

	setenv("RDMANET_SOFT_CHAOS", "fail=alloc_pd", 1);
	first = open_soft();
	CHECK(!ibv_alloc_pd(first));
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd"), 1);
	second = open_soft();
	CHECK(!ibv_alloc_pd(second));
	CHECK_EQ(happened(NULL, 0, "fail=alloc_pd"), 2);
	CHECK_EQ(ibv_close_device(second), 0);
	setenv("RDMANET_SOFT_CHAOS", "fail=create_cq", 1);
	second = open_soft();
	CHECK_EQ(happened(NULL, 0, "fail=create_cq"), 0);
	CHECK(!ibv_alloc_pd(first)); /* which has the text from before */
	CHECK_EQ(happened(NULL, 0, "fail=create_cq"), 0);
	CHECK_EQ(ibv_close_device(second), 0);
	CHECK_EQ(ibv_close_device(first), 0);
	unsetenv("RDMANET_SOFT_CHAOS");
}

static void what_there_is_one_of(void)
{
	static const char *const texts[] = {"overrun=5, overrun=6", "memlock=1M,memlock=2M", "fatal=1s, fatal=2s",
					    "link=down:1s:1s, link=down:3s", "link=down:1s, link=up"};
	char error[512];

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		CHECK_EQ(rdmanet_soft_chaos(NULL, texts[i], error, sizeof(error)), EINVAL);
		CHECK(strstr(error, "before"));
	}
}

static void of_the_device(void)
{
	struct ibv_wc wc[8];

	open_pair();
	set_faults(a.context, "overrun=2, memlock=1M, link=down:0:1ms");
	CHECK_EQ(happened(a.context, 2, "link=down:0:1ms"), 1);
	expect_event(a.context, IBV_EVENT_PORT_ERR);
	expect_event(a.context, IBV_EVENT_PORT_ACTIVE);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 8, 0));
	CHECK_EQ(happened(a.context, 1, "memlock=1M"), 1);
	for (int i = 1; i <= 2; i++)
		CHECK_EQ(post_one(IBV_WR_RDMA_WRITE, i), 0);
	for (int polled = 0; polled < 1;)
		polled += ibv_poll_cq(a.cq, 8, wc);
	while (!happened(a.context, 0, "overrun=2"))
		ibv_poll_cq(a.cq, 8, wc);
	set_faults(a.context, "fatal=now");
	CHECK_EQ(happened(a.context, 0, "fatal=now"), 1);
	close_pair();
}

int main(void)
{
	RUN(half_of_them);
	RUN(with_half_of_the_seeds);
	RUN(what_never_comes_to_pass);
	RUN(each_by_itself);
	RUN(in_all_contexts);
	RUN(of_the_environment);
	RUN(what_there_is_one_of);
	RUN(of_the_device);
	expect_live_nothing();
	return 0;
}
