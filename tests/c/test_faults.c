/* SPDX-License-Identifier: Apache-2.0 */
/* The fault bench: that its text is understood, and that each fault is what it is on a wire. */
#define TIMEOUT 10 /* 4 ms: losses are waited for, and nothing here takes two processes */
#include "pair.h"

#include <fcntl.h>
#include <inttypes.h>

/* --- the text ---------------------------------------------------------------------------------- */

static void faults(const char *text)
{
	set_faults(a.context, text);
}

static void what_is_understood(void)
{
	static const char *const texts[] = {
		"", " ", ",", "seed=7", "loss=5%", "loss=0.05", "loss=3", "loss=3+", "loss=3..5", "loss=*",
		"loss=send", "loss=send:3", "loss = send : 3 : 2", "LOSS=Send:10%", "ackloss=write:1:2",
		"dup=any:50%", "rnr=send:2:1", "delay=50us", "delay=1ms..5ms", "delay=1.5ms",
		"delay=read:3:1s", "delay=10%:2ms", "fail=send:3:REM_OP_ERR", "fail=REM_OP_ERR",
		"fail=1%:IBV_WC_GENERAL_ERR", "fail=recv:2:loc_prot_err", "fail=create_qp", "fail=create:3",
		"fail=reg_mr:2:EPERM", "fail=post_send:10%:EAGAIN", "overrun=5", "memlock=64K", "memlock=1GiB",
		"memlock=65536", "fail=connect:2:ECONNREFUSED", "fail=resolve_addr",
		"fatal=now", "fatal=5ms", "link=up", "link=down:1s", "link=down:0:20ms",
		"seed=3,loss=5%,,delay=1us..2us,fail=write:9:REM_ACCESS_ERR",
	};

	open_pair();
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		faults(texts[i]);
	close_pair();
}

static void what_is_not(void)
{
	static const struct {
		const char *text, *says;
	} texts[] = {
		{"los=5%", "use delay, loss"},
		{"loss", "name=value"},
		{"loss=", "empty"},
		{"loss=sned:3", "any, send, write, read, atomic"},
		{"loss=101%", "at most 100%"},
		{"loss=1.5", "at most 100%"},
		{"loss=0", "the third"},
		{"loss=5..3", "the third"},
		{"loss=send:3:x", "number of tries"},
		{"loss=send:3:0", "number of tries"},
		{"loss=recv:3", "can only fail"},
		{"rnr=read", "only a send"},
		{"delay=50", "50us"},
		{"fatal=5", "fatal=now or fatal=50ms"},
		{"fatal=never", "fatal=now or fatal=50ms"},
		{"delay=5ms..1ms", "50us"},
		{"delay=send", "the time is missing"},
		{"delay=99999999s", "50us"},
		{"fail=send:3", "REM_OP_ERR"},
		{"fail=send:3:REM_OPERR", "REM_OP_ERR"},
		{"fail=create_qp:1:ENOMEN", "ENOMEM"},
		{"fail=create_gp", "create_qp"},
		{"loss=create_qp", "fail=create_qp"},
		{"overrun=0", "overrun=10"},
		{"memlock=lots", "64K"},
		{"link=sideways", "down:2s:500ms"},
		{"link=down:2", "not a time"},
		{"seed=x", "whole number"},
		{"seed=1:2", "whole number"},
		{"loss=1:2:3:4:5:6", "too many"},
		{"loss=5%, seed=99999999999999999999999", "whole number"},
	};
	char error[512], shortest[4] = "xyz", longest[1024];

	open_pair();
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		CHECK_EQ(rdmanet_soft_chaos(a.context, texts[i].text, error, sizeof(error)), EINVAL);
		if (!strstr(error, texts[i].says))
			fprintf(stderr, "%s gives %s\n", texts[i].text, error);
		CHECK(strstr(error, texts[i].says));
	}
	CHECK_EQ(rdmanet_soft_chaos(a.context, "los=5%", shortest, sizeof(shortest)), EINVAL);
	CHECK_EQ(strlen(shortest), 3);
	CHECK_EQ(rdmanet_soft_chaos(a.context, "los=5%", NULL, 0), EINVAL);
	memset(longest, 'l', sizeof(longest));
	longest[sizeof(longest) - 1] = 0;
	CHECK_EQ(rdmanet_soft_chaos(a.context, longest, error, sizeof(error)), EINVAL);
	longest[0] = 0;
	for (int i = 0; i < 33; i++)
		strcat(longest, "loss=1,");
	CHECK_EQ(rdmanet_soft_chaos(a.context, longest, error, sizeof(error)), EINVAL);
	CHECK(strstr(error, "more than 32"));
	close_pair();
}

static void from_the_environment(void)
{
	setenv("RDMANET_SOFT_CHAOS", "fail=create_cq:2", 1);
	struct ibv_context *context = open_soft();

	struct ibv_cq *cq = ibv_create_cq(context, 1, NULL, NULL, 0);
	CHECK(cq);
	CHECK(!ibv_create_cq(context, 1, NULL, NULL, 0));
	CHECK_EQ(errno, ENOMEM);
	CHECK_EQ(ibv_destroy_cq(cq), 0);
	CHECK_EQ(ibv_close_device(context), 0);
	unsetenv("RDMANET_SOFT_CHAOS");
}

static void for_all_of_the_process(void)
{
	struct ibv_context *before = open_soft(), *after;

	set_faults(NULL, "fail=alloc_pd:1:EPERM");
	after = open_soft();
	CHECK(!ibv_alloc_pd(before));
	CHECK_EQ(errno, EPERM);
	CHECK(!ibv_alloc_pd(after));
	set_faults(NULL, "");
	setenv("RDMANET_SOFT_CHAOS", "fail=alloc_pd", 1);
	CHECK_EQ(ibv_close_device(before), 0);
	before = open_soft(); /* what the program says counts for more */
	CHECK_EQ(ibv_dealloc_pd(ibv_alloc_pd(before)), 0);
	set_faults(NULL, NULL);
	CHECK(!ibv_alloc_pd(before));
	unsetenv("RDMANET_SOFT_CHAOS");
	set_faults(NULL, NULL);
	CHECK_EQ(ibv_dealloc_pd(ibv_alloc_pd(before)), 0);
	CHECK_EQ(ibv_close_device(before), 0);
	CHECK_EQ(ibv_close_device(after), 0);
}

/* --- creating ------------------------------------------------------------------------------------ */

static void calls_fail(void)
{
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1}};
	struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1};
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = 1, .max_sge = 1}};
	struct ibv_td_init_attr td = {0};
	struct ibv_alloc_dm_attr dm = {.length = 4096};
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
	struct ibv_cq_init_attr_ex cq_ex = {.cqe = 1};
	struct ibv_qp_attr attr;
	struct ibv_parent_domain_init_attr parent = {0};
	struct ibv_srq_init_attr_ex srq_ex = {.attr = {.max_wr = 1, .max_sge = 1}};
	struct ibv_qp_init_attr_ex qp_ex = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1}};
	struct verbs_context *verbs;

	open_pair();
	verbs = verbs_get_ctx(a.context);
	CHECK_EQ(ibv_query_gid(a.context, 1, 0, &ah.grh.dgid), 0);
	parent.pd = srq_ex.pd = qp_ex.pd = a.pd;
	srq_ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
	srq_ex.srq_type = IBV_SRQT_BASIC;
	qp_ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	qp_ex.send_cq = qp_ex.recv_cq = a.cq;
	init.send_cq = init.recv_cq = a.cq;
	faults("fail=create");
	CHECK(!ibv_alloc_pd(a.context) && errno == ENOMEM);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 1, 0) && errno == ENOMEM);
	CHECK(!ibv_create_comp_channel(a.context) && errno == ENOMEM);
	CHECK(!ibv_create_cq(a.context, 1, NULL, NULL, 0) && errno == ENOMEM);
	CHECK(!ibv_create_qp(a.pd, &init) && errno == ENOMEM);
	CHECK(!ibv_create_srq(a.pd, &srq) && errno == ENOMEM);
	CHECK(!ibv_alloc_mw(a.pd, IBV_MW_TYPE_2) && errno == ENOMEM);
	CHECK(!ibv_create_ah(a.pd, &ah) && errno == ENOMEM);
	CHECK(!ibv_reg_mr_iova2(a.pd, a.buffer, 1, 0, 0) && errno == ENOMEM);
	CHECK(!verbs->alloc_td(a.context, &td) && errno == ENOMEM);
	CHECK(!verbs->alloc_parent_domain(a.context, &parent) && errno == ENOMEM);
	CHECK(!verbs->alloc_dm(a.context, &dm) && errno == ENOMEM);
	CHECK(!verbs->alloc_null_mr(a.pd) && errno == ENOMEM);
	CHECK(!verbs->open_xrcd(a.context, &domain) && errno == ENOMEM);
	CHECK(!verbs->create_cq_ex(a.context, &cq_ex) && errno == ENOMEM);
	CHECK(!verbs->create_qp_ex(a.context, &qp_ex) && errno == ENOMEM);
	CHECK(!verbs->create_srq_ex(a.context, &srq_ex) && errno == ENOMEM);
	faults("fail=modify_qp:2:EINVAL");
	attr = default_attr(0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), EINVAL);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	faults("fail=post_recv:2");
	CHECK_EQ(post_recv(&a, 1, 0, 1), 0);
	CHECK_EQ(post_recv(&a, 2, 0, 1), ENOMEM);
	CHECK_EQ(post_recv(&a, 3, 0, 1), 0);
	close_pair();
}

static void nth_send_refused(void)
{
	open_pair();
	faults("fail=post_send:2..3:EAGAIN");
	for (int i = 1; i <= 4; i++)
		CHECK_EQ(post_recv(&b, i, 0, 10), 0);
	CHECK_EQ(post_send(&a, 1, 0, 10), 0);
	CHECK_EQ(post_send(&a, 2, 0, 10), EAGAIN);
	CHECK_EQ(post_send(&a, 3, 0, 10), EAGAIN);
	CHECK_EQ(post_send(&a, 4, 0, 10), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 4, IBV_WC_SUCCESS);
	close_pair();
}

static void memlock(void)
{
	struct ibv_mr *first, *second;

	open_pair(); /* two buffers of a megabyte */
	faults("memlock=2112K");
	first = ibv_reg_mr(a.pd, a.buffer, 60 << 10, 0);
	CHECK(first);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 8 << 10, 0));
	CHECK_EQ(errno, ENOMEM);
	second = ibv_reg_mr(a.pd, a.buffer, 4 << 10, 0);
	CHECK(second);
	CHECK_EQ(ibv_dereg_mr(first), 0);
	first = ibv_reg_mr(a.pd, a.buffer, 60 << 10, 0);
	CHECK(first);
	CHECK_EQ(ibv_dereg_mr(first), 0);
	CHECK_EQ(ibv_dereg_mr(second), 0);
	first = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND); /* nothing is locked for this */
	CHECK(first);
	CHECK_EQ(ibv_dereg_mr(first), 0);
	close_pair();
}

/* --- requests ---------------------------------------------------------------------------------------- */

static void fill_receives(int count)
{
	for (int i = 0; i < count; i++)
		CHECK_EQ(post_recv(&b, i, i * 16, 16), 0);
}

static void nth_of_a_kind_fails(void)
{
	open_pair();
	faults("fail=write:2:REM_ACCESS_ERR");
	fill_receives(4);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 3, 0, 8, at_b(512), b.mr->rkey), 0);
	CHECK_EQ(post_send(&a, 4, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(a.cq, 3, IBV_WC_REM_ACCESS_ERR);
	expect(a.cq, 4, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(b.buffer[512], 'b'); /* it was not executed */
	CHECK_EQ(counted(&a).failed, 1);
	/* The responder has refused it, too. */
	expect_event(b.context, IBV_EVENT_QP_ACCESS_ERR);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_WR_FLUSH_ERR);
	close_pair();
}

static void receive_fails(void)
{
	open_pair();
	faults("fail=recv:2:LOC_PROT_ERR");
	fill_receives(3);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_send(&a, i, 0, i == 1 ? 0 : 8), 0);
	expect(a.cq, 0, IBV_WC_SUCCESS);
	expect(a.cq, 1, IBV_WC_REM_OP_ERR);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_LOC_PROT_ERR);
	expect(b.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(counted(&b).failed, 1);
	close_pair();
}

static void receive_of_a_write_fails(void)
{
	open_pair();
	faults("fail=recv:1:GENERAL_ERR");
	fill_receives(2);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(b.cq, 0, IBV_WC_GENERAL_ERR);
	expect(b.cq, 1, IBV_WC_WR_FLUSH_ERR);
	close_pair();
}

/* Each try is waited for; as many as the queue pair has. */
static void loss_spends_the_budget(void)
{
	uint64_t began;

	open_pair(); /* retry_cnt 3, 4 ms */
	faults("loss=send:2");
	fill_receives(3);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	began = now_ns();
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_RETRY_EXC_ERR);
	CHECK(now_ns() - began >= 4 * (4096ull << 10));
	expect(a.cq, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(counted(&a).lost, 4);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	expect_nothing(b.cq);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS); /* the responder notices nothing */
	close_pair();
}

static void lost_and_tried_again(void)
{
	open_pair();
	faults("loss=send:1:3");
	fill_receives(2);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(counted(&a).lost, 3);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

/* The request arrives and is executed, once, however often it is tried again. */
static void lost_acknowledgement(void)
{
	uint64_t *counter;

	open_pair();
	counter = (uint64_t *)b.buffer;
	*counter = 40;
	faults("ackloss=atomic:1:2");
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = 1,
					   .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = at_b(0), .rkey = b.mr->rkey, .compare_add = 2}},
		      0, 8),
		 0);
	struct ibv_wc wc = poll_one(a.cq);

	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.byte_len, 8);
	CHECK_EQ(*counter, 42);
	CHECK_EQ(*(uint64_t *)a.buffer, 40);
	CHECK_EQ(counted(&a).lost, 2);
	CHECK_EQ(counted(&a).duplicates, 2);

	/* For good: it fails here, and has happened there. */
	faults("ackloss=send");
	fill_receives(1);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_RETRY_EXC_ERR);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	close_pair();
}

static void duplicates_are_refused(void)
{
	uint64_t *counter;

	open_pair();
	counter = (uint64_t *)b.buffer;
	*counter = 0;
	faults("dup=*");
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(post(&a,
			      (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
						   .send_flags = IBV_SEND_SIGNALED,
						   .wr.atomic = {at_b(0), 1, 0, b.mr->rkey}},
			      0, 8),
			 0);
		expect(a.cq, 0, IBV_WC_SUCCESS);
	}
	CHECK_EQ(*counter, 5);
	CHECK_EQ(counted(&a).duplicates, 5);
	close_pair();
}

static void receiver_not_ready(void)
{
	struct ibv_qp_attr attr;

	open_pair_with((struct end_options){.cqe = 64});
	attr = default_attr(b.qp->qp_num);
	attr.rnr_retry = 2;
	connect_with(a.qp, attr);
	connect_to(b.qp, a.qp->qp_num);
	faults("rnr=send:1:2, rnr=send:3");
	fill_receives(4);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(counted(&a).rnr_naks, 2);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 9, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(a.cq, 9, IBV_WC_SUCCESS);
	expect(a.cq, 3, IBV_WC_RNR_RETRY_EXC_ERR);
	CHECK_EQ(counted(&a).rnr_naks, 2 + 3);
	close_pair();
}

static void delayed(void)
{
	uint64_t began;

	open_pair();
	faults("delay=300ms..310ms"); /* longer than anybody is kept from looking, below */
	fill_receives(2);
	began = now_ns();
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect_nothing(b.cq);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK(now_ns() - began >= 300000000);
	CHECK_EQ(counted(&a).deferred, 2);
	close_pair();
}

/* What was posted with faults ends with them; what comes later doesn't know of them. */
static void faults_end(void)
{
	open_pair();
	faults("loss=send:1:1");
	fill_receives(3);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	faults("");
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	CHECK_EQ(counted(&a).lost, 1);
	close_pair();
}

/* --- seeds ------------------------------------------------------------------------------------------------ */

enum { MESSAGES = 60 };

struct outcome {
	uint64_t lost, duplicates, rnr_naks;
	int failed; /* the first */
	enum ibv_wc_status status;
};

static struct outcome meet(const char *text)
{
	struct outcome outcome = {.failed = -1};
	struct ibv_qp_attr attr;

	open_pair_with((struct end_options){.cqe = 256, .send_wr = MESSAGES, .recv_wr = MESSAGES});
	attr = default_attr(b.qp->qp_num);
	attr.timeout = 1;
	attr.retry_cnt = 2;
	connect_with(a.qp, attr);
	connect_to(b.qp, a.qp->qp_num);
	faults(text);
	fill_receives(MESSAGES);
	for (int i = 0; i < MESSAGES; i++)
		CHECK_EQ(post_send(&a, i, 0, 8), 0);
	for (int i = 0; i < MESSAGES && outcome.failed < 0; i++) {
		struct ibv_wc wc = poll_one(a.cq);

		CHECK_EQ(wc.wr_id, i);
		if (wc.status != IBV_WC_SUCCESS) {
			outcome.failed = i;
			outcome.status = wc.status;
		}
	}
	outcome.lost = counted(&a).lost;
	outcome.duplicates = counted(&a).duplicates;
	outcome.rnr_naks = counted(&a).rnr_naks;
	close_pair();
	return outcome;
}

static void same_seed_same_fate(void)
{
	static const char *const texts[] = {
		"seed=4,loss=20%,rnr=10%,fail=1%:GENERAL_ERR",
		"seed=5,loss=20%,rnr=10%,fail=1%:GENERAL_ERR",
		"seed=3,ackloss=15%,delay=0us..200us,dup=30%",
	};
	struct outcome outcomes[3];

	for (int i = 0; i < 3; i++) {
		struct outcome again;

		outcomes[i] = meet(texts[i]);
		again = meet(texts[i]);
		CHECK(!memcmp(&again, &outcomes[i], sizeof(again)));
		CHECK(again.lost);
	}
	CHECK(memcmp(&outcomes[0], &outcomes[1], sizeof(outcomes[0])));
	CHECK(outcomes[2].duplicates);
}

/* --- the CQ, the link ------------------------------------------------------------------------------------ */

static void cq_overrun(void)
{
	struct ibv_wc wc[8];

	open_pair();
	faults("overrun=3");
	fill_receives(4);
	for (int i = 1; i <= 4; i++)
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK_EQ(ibv_poll_cq(a.cq, 8, wc), 2);
	CHECK_EQ(wc[1].wr_id, 2);
	expect_event(a.context, IBV_EVENT_CQ_ERR);
	expect_event(a.context, IBV_EVENT_QP_FATAL);
	CHECK(ibv_poll_cq(a.cq, 8, wc) < 0);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	close_pair();
}

static enum ibv_port_state port_state(struct ibv_context *context)
{
	struct ibv_port_attr attr;

	CHECK_EQ(ibv_query_port(context, 1, (void *)&attr), 0);
	return attr.state;
}

static void link_down_and_up(void)
{
	struct ibv_qp_attr attr;

	open_pair_with((struct end_options){.cqe = 64});
	attr = default_attr(b.qp->qp_num);
	attr.timeout = 22; /* a minute: nothing gives up */
	connect_with(a.qp, attr);
	connect_to(b.qp, a.qp->qp_num);
	fill_receives(2);
	CHECK_EQ(port_state(a.context), IBV_PORT_ACTIVE);
	faults("link=down");
	expect_event(a.context, IBV_EVENT_PORT_ERR);
	CHECK_EQ(port_state(a.context), IBV_PORT_DOWN);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK(!readable(a.channel->fd, 20));
	expect_nothing(a.cq);
	expect_nothing(b.cq);
	faults("");
	expect_event(a.context, IBV_EVENT_PORT_ACTIVE);
	CHECK_EQ(port_state(a.context), IBV_PORT_ACTIVE);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	close_pair();
}

/* What fails from then on, and what doesn't: the program can clean up. */
static void expect_dead(void)
{
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .send_cq = a.cq, .recv_cq = a.cq};
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_device_attr device;
	struct ibv_port_attr port;

	CHECK(!ibv_alloc_pd(a.context) && errno == EIO);
	CHECK(!ibv_reg_mr(a.pd, a.buffer, 1, 0) && errno == EIO);
	CHECK(!ibv_create_comp_channel(a.context) && errno == EIO);
	CHECK(!ibv_create_cq(a.context, 1, NULL, NULL, 0) && errno == EIO);
	CHECK(!ibv_create_qp(a.pd, &init) && errno == EIO);
	CHECK_EQ(ibv_query_device(a.context, &device), EIO);
	CHECK_EQ(ibv_query_port(a.context, 1, (void *)&port), EIO);
	CHECK_EQ(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), EIO);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), EIO);
	CHECK_EQ(ibv_resize_cq(a.cq, 8), EIO);
}

static void device_dies(void)
{
	open_pair();
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_recv(&b, i, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	faults("fatal=now");
	expect_event(a.context, IBV_EVENT_DEVICE_FATAL);
	expect(b.cq, 0, IBV_WC_SUCCESS); /* that has come */
	expect(b.cq, 1, IBV_WC_WR_FLUSH_ERR);
	expect(b.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0); /* as in ERR, which it is in */
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_recv(&b, 3, 0, 8), 0);
	expect(b.cq, 3, IBV_WC_WR_FLUSH_ERR);
	expect_dead();
	faults(""); /* for good */
	expect_dead();
	CHECK(!readable(a.context->async_fd, 0));
	close_pair();
	open_pair(); /* opened anew it lives */
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	close_pair();
}

static void device_dies_later(void)
{
	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 8), 0);
	faults("fatal=10ms");
	expect_event(a.context, IBV_EVENT_DEVICE_FATAL);
	expect(b.cq, 1, IBV_WC_WR_FLUSH_ERR);
	expect(b.cq, 2, IBV_WC_WR_FLUSH_ERR);
	expect_dead();
	close_pair();
	open_pair();
	faults("fatal=1s");
	close_pair(); /* it has gone before */
}

static void link_down_for_too_long(void)
{
	open_pair();
	fill_receives(2);
	faults("link=down");
	expect_event(a.context, IBV_EVENT_PORT_ERR);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	expect_nothing(b.cq);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	close_pair();
}

static void link_flaps(void)
{
	open_pair();
	faults("link=down:5ms:5ms");
	CHECK_EQ(port_state(a.context), IBV_PORT_ACTIVE);
	expect_event(a.context, IBV_EVENT_PORT_ERR);
	expect_event(a.context, IBV_EVENT_PORT_ACTIVE);
	CHECK(!readable(a.context->async_fd, 20));
	close_pair();
}

/* The peer's link: its queue pairs can't be reached, whoever asks. */
static void link_of_the_peer(void)
{
	struct ibv_qp_attr attr;

	end_open(&a, &(struct end_options){.cqe = 64});
	end_open(&b, &(struct end_options){.cqe = 64});
	attr = default_attr(b.qp->qp_num);
	attr.timeout = 22;
	set_faults(b.context, "link=down"); /* before it is connected */
	expect_event(b.context, IBV_EVENT_PORT_ERR);
	connect_with(a.qp, attr);
	connect_to(b.qp, a.qp->qp_num);
	fill_receives(3);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK(!readable(a.channel->fd, 20));
	expect_nothing(a.cq);
	CHECK(!readable(a.context->async_fd, 0));
	set_faults(b.context, "");
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	/* And again, now that it has been found. */
	set_faults(b.context, "link=down");
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK(!readable(a.channel->fd, 20));
	expect_nothing(a.cq);
	set_faults(b.context, "");
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	close_pair();
}

int main(void)
{
	RUN(what_is_understood);
	RUN(what_is_not);
	RUN(from_the_environment);
	RUN(for_all_of_the_process);
	RUN(calls_fail);
	RUN(nth_send_refused);
	RUN(memlock);
	RUN(nth_of_a_kind_fails);
	RUN(receive_fails);
	RUN(receive_of_a_write_fails);
	RUN(loss_spends_the_budget);
	RUN(lost_and_tried_again);
	RUN(lost_acknowledgement);
	RUN(duplicates_are_refused);
	RUN(receiver_not_ready);
	RUN(delayed);
	RUN(faults_end);
	RUN(same_seed_same_fate);
	RUN(cq_overrun);
	RUN(device_dies);
	RUN(device_dies_later);
	RUN(link_down_and_up);
	RUN(link_down_for_too_long);
	RUN(link_flaps);
	RUN(link_of_the_peer);
	expect_live_nothing();
	return 0;
}
