/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a denied request does to its responder (IBTA 9.9.3, classes A and C).  The queue pair goes to ERR, though it has
 * only receives and its program sleeps until a completion comes.  The receives are flushed in order.  An event says
 * why, unless the receive itself was at fault.  The requester goes to ERR as well, and what either side posts later is
 * flushed.
 *
 * Each case is a request that is right but for one thing.
 */
#include "processes.h"

/* The region is the second of three pages. */
enum { LENGTH = 8, RECEIVES = 3, REGION = 4096 };

/* What is different about the case. */
struct denial {
	enum ibv_wr_opcode opcode;
	enum { KEY = 1, BEFORE, AFTER, RIGHT, DOMAIN, UNALIGNED, QP_RIGHTS, QP_DEPTH, RECEIVE_LENGTH, RECEIVE_KEY } wrong;
	enum ibv_wc_status status;  /* of the request */
	enum ibv_wc_status receive; /* of the first receive */
	enum ibv_event_type event;  /* 0: none, as the receive says it */
};

static const struct denial denials[] = {
#define DENIED(opcode, wrong) {opcode, wrong, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR, IBV_EVENT_QP_ACCESS_ERR}
#define INVALID(opcode, wrong) {opcode, wrong, IBV_WC_REM_INV_REQ_ERR, IBV_WC_WR_FLUSH_ERR, IBV_EVENT_QP_REQ_ERR}
#define EACH(WHY, wrong)                                                                                            \
	WHY(IBV_WR_RDMA_WRITE, wrong), WHY(IBV_WR_RDMA_WRITE_WITH_IMM, wrong), WHY(IBV_WR_RDMA_READ, wrong),         \
		WHY(IBV_WR_ATOMIC_FETCH_AND_ADD, wrong), WHY(IBV_WR_ATOMIC_CMP_AND_SWP, wrong)
	EACH(DENIED, KEY),
	EACH(DENIED, BEFORE),
	EACH(DENIED, AFTER),
	EACH(DENIED, RIGHT),
	EACH(DENIED, DOMAIN),
	EACH(INVALID, QP_RIGHTS),
	INVALID(IBV_WR_RDMA_READ, QP_DEPTH),
	INVALID(IBV_WR_ATOMIC_FETCH_AND_ADD, QP_DEPTH),
	INVALID(IBV_WR_ATOMIC_CMP_AND_SWP, QP_DEPTH),
	INVALID(IBV_WR_ATOMIC_FETCH_AND_ADD, UNALIGNED),
	INVALID(IBV_WR_ATOMIC_CMP_AND_SWP, UNALIGNED),
	DENIED(IBV_WR_SEND_WITH_INV, KEY),
	{IBV_WR_SEND, RECEIVE_LENGTH, IBV_WC_REM_INV_REQ_ERR, IBV_WC_LOC_LEN_ERR, IBV_EVENT_QP_REQ_ERR},
	{IBV_WR_SEND_WITH_IMM, RECEIVE_LENGTH, IBV_WC_REM_INV_REQ_ERR, IBV_WC_LOC_LEN_ERR, IBV_EVENT_QP_REQ_ERR},
	{IBV_WR_SEND, RECEIVE_KEY, IBV_WC_REM_OP_ERR, IBV_WC_LOC_PROT_ERR, 0},
	{IBV_WR_SEND_WITH_IMM, RECEIVE_KEY, IBV_WC_REM_OP_ERR, IBV_WC_LOC_PROT_ERR, 0},
};

static enum memory memory;
static const struct denial *denial; /* the present one: children have it from their parent */
static struct end end;

/* --- the responder ------------------------------------------------------------------------------------------ */

static int right_for(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_READ:
		return IBV_ACCESS_REMOTE_READ;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_ACCESS_REMOTE_WRITE;
	default:
		return IBV_ACCESS_REMOTE_ATOMIC;
	}
}

static void connect_responder(int fd, const struct ibv_mr *region)
{
	struct address mine = {.qpn = end.qp->qp_num, .rkey = region->rkey, .buffer = (uintptr_t)region->addr}, theirs;
	struct ibv_qp_attr attr = default_attr(0);

	tell(fd, &mine, sizeof(mine));
	CHECK(hear(fd, &theirs, sizeof(theirs)));
	attr.dest_qp_num = theirs.qpn;
	if (denial->wrong == QP_RIGHTS)
		attr.qp_access_flags &= ~right_for(denial->opcode);
	if (denial->wrong == QP_DEPTH)
		attr.max_dest_rd_atomic = 0;
	connect_with(end.qp, attr);
}

static void post_receives(void)
{
	struct ibv_mr *mr = end.mr;

	to_init(end.qp);
	for (int i = 0; i < RECEIVES; i++) {
		end.mr = i == 0 && denial->wrong == RECEIVE_KEY ? &(struct ibv_mr){.lkey = mr->lkey ^ 1} : mr;
		CHECK_EQ(post_recv(&end, i, 0, denial->wrong == RECEIVE_LENGTH ? LENGTH - 1 : LENGTH), 0);
	}
	end.mr = mr;
}

static void expect_failure(void)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(readable(end.channel->fd, LIMIT_MS));
	CHECK_EQ(ibv_get_cq_event(end.channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
	for (int i = 0; i < RECEIVES; i++)
		expect(end.cq, i, i == 0 ? denial->receive : IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	if (denial->event)
		expect_event(end.context, denial->event);
	CHECK_EQ(post_recv(&end, 4, 0, LENGTH), 0);
	expect(end.cq, 4, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_send(&end, 5, 0, LENGTH), 0);
	expect(end.cq, 5, IBV_WC_WR_FLUSH_ERR);
	expect_nothing(end.cq);
	CHECK(!readable(end.context->async_fd, 0));
	for (int i = 0; i < 3 * REGION; i++)
		CHECK_EQ(end.buffer[i], 'r');
}

static void serve(int fd)
{
	int access = ALL_ACCESS & (denial->wrong == RIGHT ? ~right_for(denial->opcode) : ALL_ACCESS);
	struct ibv_mr *region;
	struct ibv_pd *other;

	rdmanet_soft_log_to(open("/dev/null", O_WRONLY | O_CLOEXEC)); /* it tells of each wrong key */
	end_open(&end, &(struct end_options){.memory = memory});
	memset(end.buffer, 'r', 3 * REGION);
	other = ibv_alloc_pd(end.context);
	CHECK(other);
	region = ibv_reg_mr(denial->wrong == DOMAIN ? other : end.pd, end.buffer + REGION, REGION, access);
	CHECK(region);
	post_receives();
	CHECK_EQ(ibv_req_notify_cq(end.cq, 1), 0);
	connect_responder(fd, region);
	meet(fd);
	expect_failure();
	meet(fd);
	CHECK_EQ(ibv_dereg_mr(region), 0);
	CHECK_EQ(ibv_dealloc_pd(other), 0);
	end_close(&end);
	exit(0);
}

/* --- the requester ------------------------------------------------------------------------------------------ */

static struct ibv_send_wr request_to(const struct address *region)
{
	struct ibv_send_wr wr = {.wr_id = 1, .opcode = denial->opcode, .send_flags = IBV_SEND_SIGNALED};
	bool is_atomic = right_for(wr.opcode) == IBV_ACCESS_REMOTE_ATOMIC;
	uint32_t rkey = denial->wrong == KEY ? region->rkey ^ 1 : region->rkey;
	uint64_t at = region->buffer;

	if (denial->wrong == BEFORE)
		at -= LENGTH;
	else if (denial->wrong == AFTER)
		at += is_atomic ? REGION : REGION - LENGTH + 1;
	else if (denial->wrong == UNALIGNED)
		at += 4;
	if (wr.opcode == IBV_WR_SEND_WITH_INV) {
		wr.invalidate_rkey = rkey;
	} else if (is_atomic) {
		wr.wr.atomic.remote_addr = at;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 0x7272727272727272; /* what is there */
		wr.wr.atomic.swap = 1;
	} else {
		wr.wr.rdma.remote_addr = at;
		wr.wr.rdma.rkey = rkey;
	}
	return wr;
}

static void check_denial(void)
{
	struct other responder = spawn(serve);
	struct address region;

	end_open(&end, &(struct end_options){.memory = memory});
	memset(end.buffer, 'q', LENGTH);
	to_init(end.qp);
	CHECK_EQ(post_recv(&end, 3, 0, LENGTH), 0);
	region = connect_over(&end, responder.fd);
	CHECK_EQ(post(&end, request_to(&region), 0, LENGTH), 0);
	CHECK_EQ(post_send(&end, 2, 0, LENGTH), 0);
	for (int i = 0; i < 3; i++) { /* of two queues: in any order */
		struct ibv_wc wc = poll_one(end.cq);

		CHECK_EQ(wc.status, wc.wr_id == 1 ? denial->status : IBV_WC_WR_FLUSH_ERR);
	}
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	CHECK(!readable(end.context->async_fd, 0));
	for (int i = 0; i < LENGTH; i++)
		CHECK_EQ(end.buffer[i], 'q');
	meet(responder.fd);
	join(&responder);
	end_close(&end);
	expect_live_nothing();
}

static void check_denials(void)
{
	for (unsigned i = 0; i < sizeof(denials) / sizeof(denials[0]); i++) {
		denial = &denials[i];
		check_denial();
	}
}

static void test_mapped_memory(void)
{
	memory = DEVICE_MEMORY;
	check_denials();
}

static void test_memory_of_the_process(void)
{
	memory = USER_MEMORY;
	check_denials();
}

int main(void)
{
	RUN(test_mapped_memory);
	RUN(test_memory_of_the_process);
	return 0;
}
