/* SPDX-License-Identifier: Apache-2.0 */
/* What surrounds memory: domains of several kinds, device memory, registering again, advice, importing. */
#include "pair.h"

#include <pthread.h>
#include <stdatomic.h>

static struct verbs_context *calls(void)
{
	return verbs_get_ctx(a.context);
}

static void write_to(uint64_t addr, uint32_t rkey, uint32_t length, enum ibv_wc_status status)
{
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, length, addr, rkey), 0);
	expect(a.cq, 1, status);
}

/* --- device memory ----------------------------------------------------------------------------------------- */

static struct ibv_dm *alloc_dm(size_t length)
{
	struct ibv_alloc_dm_attr attr = {.length = length};
	struct ibv_dm *dm = calls()->alloc_dm(a.context, &attr);

	CHECK(dm);
	return dm;
}

static void test_device_memory(void)
{
	enum { ACCESS = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	struct ibv_dm *dm;
	struct ibv_mr *mr;
	char text[16];

	open_pair();
	dm = alloc_dm(4096);
	CHECK_EQ(dm->memcpy_to_dm(dm, 100, "device memory..", 16), 0);
	CHECK_EQ(dm->memcpy_from_dm(text, dm, 100, 16), 0);
	CHECK(!memcmp(text, "device memory..", 16));
	CHECK_EQ(dm->memcpy_to_dm(dm, 2, text, 4), EINVAL); /* whole words only */
	CHECK_EQ(dm->memcpy_to_dm(dm, 0, text, 3), EINVAL);
	CHECK_EQ(dm->memcpy_from_dm(text, dm, 4096, 4), EINVAL);
	CHECK_EQ(dm->memcpy_from_dm(text, dm, UINT64_MAX - 3, 4), EINVAL);

	mr = calls()->reg_dm_mr(b.pd, dm, 100, 1000, ACCESS);
	CHECK(mr && !mr->addr && mr->length == 1000);
	CHECK_EQ(calls()->free_dm(dm), EBUSY);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 16, 0, mr->rkey), 0); /* from zero */
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK(!memcmp(a.buffer, "device memory..", 16));
	memcpy(a.buffer, "written", 8);
	write_to(900, mr->rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(dm->memcpy_from_dm(text, dm, 1000, 8), 0);
	CHECK(!strcmp(text, "written"));
	write_to(996, mr->rkey, 8, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(calls()->free_dm(dm), 0);
	close_pair();
}

static void test_device_memory_limits(void)
{
	struct ibv_alloc_dm_attr attr = {0};
	struct ibv_device_attr_ex device;
	struct ibv_dm *dm, *rest;

	open_pair();
	CHECK_EQ(calls()->query_device_ex(a.context, NULL, &device, sizeof(device)), 0);
	CHECK(!calls()->alloc_dm(a.context, &attr) && errno == EINVAL);
	attr.length = device.max_dm_size + 4;
	CHECK(!calls()->alloc_dm(a.context, &attr) && errno == EINVAL);
	attr = (struct ibv_alloc_dm_attr){.length = 4, .log_align_req = 60};
	CHECK(!calls()->alloc_dm(a.context, &attr) && errno == EINVAL);
	attr = (struct ibv_alloc_dm_attr){.length = 4, .comp_mask = 8};
	CHECK(!calls()->alloc_dm(a.context, &attr) && errno == EOPNOTSUPP);
	dm = alloc_dm(4096);
	rest = alloc_dm(device.max_dm_size - 4096);
	attr = (struct ibv_alloc_dm_attr){.length = 4};
	CHECK(!calls()->alloc_dm(a.context, &attr) && errno == ENOMEM); /* there is only so much */
	CHECK(!calls()->reg_dm_mr(a.pd, dm, 0, 100, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL); /* not zero-based */
	CHECK(!calls()->reg_dm_mr(a.pd, dm, 4092, 8, IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	CHECK_EQ(calls()->free_dm(rest), 0);
	close_pair(); /* what is left goes with the context */
}

/* --- domains -------------------------------------------------------------------------------------------------- */

static void test_parent_domain(void)
{
	struct ibv_parent_domain_init_attr attr = {0};
	struct ibv_td_init_attr td_attr = {0};
	struct ibv_pd *parent;
	struct ibv_mr *mr;
	struct ibv_td *td;

	open_pair();
	td = calls()->alloc_td(a.context, &td_attr);
	CHECK(td);
	attr.pd = b.pd;
	attr.td = td;
	parent = calls()->alloc_parent_domain(a.context, &attr);
	CHECK(parent);
	CHECK_EQ(calls()->dealloc_td(td), EBUSY);
	/* What is made in it fits to what is made in the other. */
	mr = ibv_reg_mr(parent, b.buffer, 4096, ALL_ACCESS);
	CHECK(mr);
	write_to(at_b(0), mr->rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dealloc_pd(parent), EBUSY);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(ibv_dealloc_pd(parent), 0);
	CHECK_EQ(calls()->dealloc_td(td), 0);

	CHECK(!calls()->alloc_parent_domain(a.context, &(struct ibv_parent_domain_init_attr){0}) && errno == EINVAL);
	attr = (struct ibv_parent_domain_init_attr){.pd = b.pd, .comp_mask = 1 << 9};
	CHECK(!calls()->alloc_parent_domain(a.context, &attr) && errno == EOPNOTSUPP);
	td_attr.comp_mask = 1;
	CHECK(!calls()->alloc_td(a.context, &td_attr) && errno == EINVAL);
	/* Left for the context to take along. */
	td_attr.comp_mask = 0;
	attr = (struct ibv_parent_domain_init_attr){.pd = ibv_alloc_pd(a.context), .td = calls()->alloc_td(a.context, &td_attr)};
	CHECK(calls()->alloc_parent_domain(a.context, &attr));
	CHECK_EQ(ibv_dealloc_pd(attr.pd), EBUSY);
	close_pair();
}

static void test_import(void)
{
	struct ibv_context *again;
	struct ibv_dm *dm, *same_dm;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	char text[8];
	int fd;

	open_pair();
	fd = dup(a.context->cmd_fd);
	CHECK(fd >= 0);
	again = ibv_import_device(fd);
	CHECK(again && again != a.context);
	pd = ibv_import_pd(again, b.pd->handle);
	CHECK(pd);
	mr = ibv_import_mr(pd, b.mr->handle);
	CHECK(mr && mr->rkey == b.mr->rkey && mr->length == BUFFER && !mr->addr);
	CHECK(!ibv_import_pd(again, 12345678) && errno == ENOENT);
	CHECK(!ibv_import_mr(pd, 0) && errno == ENOENT);
	dm = alloc_dm(64);
	same_dm = ibv_import_dm(again, dm->handle);
	CHECK(same_dm);
	CHECK_EQ(dm->memcpy_to_dm(dm, 0, "shared.", 8), 0);
	CHECK_EQ(same_dm->memcpy_from_dm(text, same_dm, 0, 8), 0);
	CHECK(!strcmp(text, "shared."));
	ibv_unimport_dm(same_dm);
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	CHECK_EQ(ibv_close_device(again), 0);
	CHECK_EQ(calls()->free_dm(dm), 0);
	fd = memfd_create("no device", MFD_CLOEXEC);
	CHECK(!ibv_import_device(fd) && errno == EOPNOTSUPP);
	close(fd);
	CHECK(!ibv_import_device(-1) && errno == EBADF);
	close_pair();
}

/* --- others come and go meanwhile --------------------------------------------------------------------------------- */

enum { TIMES = 300 };

static void *come_and_go(void *done)
{
	for (int i = 0; i < TIMES; i++) {
		struct ibv_context *context = open_soft();
		struct ibv_pd *pd = ibv_alloc_pd(a.context), *left;
		struct ibv_mr *mr = ibv_reg_mr(pd, b.buffer, 4096, ALL_ACCESS);
		struct ibv_dm *dm = alloc_dm(64);
		struct ibv_cq *cq = ibv_create_cq(a.context, 1, NULL, NULL, 0);

		CHECK(pd && mr && cq);
		left = ibv_alloc_pd(context); /* the context takes it along */
		CHECK(left);
		CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, b.pd, NULL, 0, 0), 0);
		CHECK_EQ(ibv_dealloc_pd(pd), 0);
		CHECK_EQ(ibv_destroy_cq(cq), 0);
		CHECK_EQ(calls()->free_dm(dm), 0);
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		CHECK_EQ(ibv_close_device(context), 0);
	}
	atomic_store((_Atomic bool *)done, true);
	return NULL;
}

/* Whoever looks for one object passes all others, which may just be destroyed. */
static void test_import_beside_destruction(void)
{
	_Atomic bool done = false;
	struct ibv_context *again;
	struct ibv_dm *dm, *same_dm;
	struct ibv_pd *pd, *same_pd;
	struct ibv_mr *mr;
	struct rn_live live;
	pthread_t thread;

	open_pair();
	dm = alloc_dm(64);
	again = ibv_import_device(dup(a.context->cmd_fd));
	CHECK(again);
	pd = ibv_import_pd(again, b.pd->handle);
	CHECK(pd);
	CHECK_EQ(pthread_create(&thread, NULL, come_and_go, &done), 0);
	while (!atomic_load(&done)) {
		CHECK(!ibv_import_pd(again, UINT32_MAX) && errno == ENOENT);
		CHECK(!ibv_import_mr(pd, UINT32_MAX) && errno == ENOENT);
		CHECK(!ibv_import_dm(again, UINT32_MAX) && errno == ENOENT);
		same_pd = ibv_import_pd(again, b.pd->handle);
		mr = ibv_import_mr(pd, b.mr->handle);
		same_dm = ibv_import_dm(again, dm->handle);
		CHECK(same_pd && mr && mr->length == BUFFER && same_dm);
		ibv_unimport_dm(same_dm);
		ibv_unimport_mr(mr);
		ibv_unimport_pd(same_pd);
		rdmanet_soft_live(&live);
		CHECK(live.pds >= 2 && live.contexts >= 2 && live.qps == 2);
	}
	pthread_join(thread, NULL);
	ibv_unimport_pd(pd);
	CHECK_EQ(ibv_close_device(again), 0);
	CHECK_EQ(calls()->free_dm(dm), 0);
	close_pair();
}

/* --- registering again ------------------------------------------------------------------------------------------- */

static void mend(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
	struct ibv_async_event event;

	while (readable(a.context->async_fd, 20)) {
		CHECK_EQ(ibv_get_async_event(a.context, &event), 0);
		ibv_ack_async_event(&event);
	}
	CHECK_EQ(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), 0);
	CHECK_EQ(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
}

/* The key stays: who has it sees what has changed. */
static void test_rereg(void)
{
	struct ibv_pd *other;
	struct ibv_mr *mr;
	uint32_t rkey;

	open_pair();
	other = ibv_alloc_pd(b.context);
	mr = ibv_reg_mr(b.pd, b.buffer, 4096, ALL_ACCESS);
	rkey = mr->rkey;
	write_to(at_b(0), rkey, 8, IBV_WC_SUCCESS);

	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), 0);
	CHECK_EQ(mr->rkey, rkey);
	write_to(at_b(0), rkey, 8, IBV_WC_REM_ACCESS_ERR);
	mend();
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS), 0);
	write_to(at_b(0), rkey, 8, IBV_WC_SUCCESS);

	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.buffer + 8192, 100, 0), 0);
	CHECK(mr->addr == b.buffer + 8192 && mr->length == 100);
	write_to(at_b(8192), rkey, 8, IBV_WC_SUCCESS);
	write_to(at_b(0), rkey, 8, IBV_WC_REM_ACCESS_ERR);
	mend();

	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0), 0);
	CHECK_EQ(ibv_dealloc_pd(other), EBUSY);
	CHECK(mr->pd == other);
	write_to(at_b(8192), rkey, 8, IBV_WC_REM_ACCESS_ERR);
	mend();
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, b.pd,
			      b.buffer, 4096, ALL_ACCESS),
		 0);
	write_to(at_b(0), rkey, 8, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_dealloc_pd(other), 0);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
}

static void test_rereg_errors(void)
{
	struct ibv_mr *mr;

	open_pair();
	mr = ibv_reg_mr(b.pd, b.buffer, 4096, ALL_ACCESS);
	CHECK_EQ(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQ(ibv_rereg_mr(mr, 64, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 8, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE),
		 IBV_REREG_MR_ERR_CMD);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)0x1000, 4096, 0), IBV_REREG_MR_ERR_CMD);
	CHECK_EQ(errno, EFAULT);
	/* Part of a file: it isn't replaced by memory. */
	CHECK_EQ(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.buffer, 4096, 0), IBV_REREG_MR_ERR_CMD);
	CHECK_EQ(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS), 0);
	write_to(at_b(0), mr->rkey, 8, IBV_WC_SUCCESS); /* as it was */
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
}

static void test_advice(void)
{
	struct ibv_sge sge;
	struct ibv_mr *all;
	char *hole;

	open_pair();
	all = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	CHECK(all);
	sge = (struct ibv_sge){.addr = (uintptr_t)a.buffer, .length = 4096, .lkey = all->lkey};
	CHECK_EQ(ibv_advise_mr(a.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, IB_UVERBS_ADVISE_MR_FLAG_FLUSH, &sge, 1), 0);
	hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	sge.addr = (uintptr_t)hole;
	CHECK_EQ(ibv_advise_mr(a.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EFAULT);
	CHECK_EQ(ibv_advise_mr(a.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0, &sge, 1), 0);
	sge.lkey = 1;
	CHECK_EQ(ibv_advise_mr(a.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), ENOENT);
	CHECK_EQ(ibv_advise_mr(a.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 1 << 7, &sge, 1), EOPNOTSUPP);
	CHECK_EQ(ibv_advise_mr(a.pd, 17, 0, &sge, 1), EOPNOTSUPP);
	munmap(hole, 4096);
	CHECK_EQ(ibv_dereg_mr(all), 0);
	close_pair();
}

/* Zeros come from it, of any address; what goes to it is gone. */
static void test_null_region(void)
{
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_RDMA_WRITE, .wr_id = 5, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_recv_wr *bad_recv, recv_wr = {.wr_id = 6};
	struct ibv_sge sge[2];
	struct ibv_mr *null;

	open_pair();
	null = calls()->alloc_null_mr(a.pd);
	CHECK(null);
	sge[0] = (struct ibv_sge){.addr = 0x123456789, .length = 5000, .lkey = null->lkey};
	sge[1] = sge_of(&a, 0, 100);
	wr.sg_list = recv_wr.sg_list = sge;
	wr.num_sge = recv_wr.num_sge = 2;
	wr.wr.rdma.remote_addr = at_b(0);
	wr.wr.rdma.rkey = b.mr->rkey;
	for (int round = 0; round < 2; round++) {
		memset(b.buffer, 'b', 6000);
		CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0); /* zeros, then a's */
		expect(a.cq, 5, IBV_WC_SUCCESS);
		CHECK(b.buffer[0] == 0 && b.buffer[4999] == 0 && b.buffer[5000] == 'a' && b.buffer[5100] == 'b');
		/* Discard the head of a message, keep its end. */
		memset(b.buffer, 'x', 5000);
		memset(b.buffer + 5000, 'y', 100);
		CHECK_EQ(ibv_post_recv(a.qp, &recv_wr, &bad_recv), 0);
		CHECK_EQ(post_send(&b, 7, 0, 5100), 0);
		expect(a.cq, 6, IBV_WC_SUCCESS);
		expect(b.cq, 7, IBV_WC_SUCCESS);
		CHECK(a.buffer[0] == 'y' && a.buffer[99] == 'y' && a.buffer[100] == 'a');
		memset(a.buffer, 'a', 100);
	}
	/* It is nobody else's. */
	write_to(0, null->rkey, 8, IBV_WC_REM_ACCESS_ERR);
	CHECK_EQ(ibv_dereg_mr(null), 0);
	close_pair();
}

int main(void)
{
	RUN(test_device_memory);
	RUN(test_device_memory_limits);
	RUN(test_parent_domain);
	RUN(test_import);
	RUN(test_import_beside_destruction);
	RUN(test_rereg);
	RUN(test_rereg_errors);
	RUN(test_advice);
	RUN(test_null_region);
	expect_live_nothing();
	return 0;
}
