/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory whose file is shortened: what touches it gets SIGBUS.  A request that names it fails as it does where an
 * adapter finds no page, on the side whose memory it is, and nobody dies.
 */
#include "pair.h"
#include "processes.h"

#include <setjmp.h>
#include <signal.h>

#include "base/fence.h"

/* ThreadSanitizer has a lock of its own while it executes an atomic, which a jump out of that would leave locked. */
#ifdef RN_TSAN
enum { HAS_ATOMICS = false };
#else
enum { HAS_ATOMICS = true };
#endif

enum { LENGTH = 64 << 10, SHORT = 64 };

struct file {
	int fd;
	char *at;
	struct ibv_mr *mr;
};

static struct file map_file(struct ibv_pd *pd)
{
	struct file file = {.fd = memfd_create("shortened", MFD_CLOEXEC)};

	CHECK(file.fd >= 0 && !ftruncate(file.fd, LENGTH));
	file.at = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
	CHECK(file.at != MAP_FAILED);
	file.mr = pd ? ibv_reg_mr(pd, file.at, LENGTH, ALL_ACCESS) : NULL;
	CHECK(file.mr || !pd);
	return file;
}

static void shorten(const struct file *file, size_t length)
{
	CHECK_EQ(ftruncate(file->fd, length), 0);
}

static void unmap_file(struct file *file)
{
	if (file->mr)
		CHECK_EQ(ibv_dereg_mr(file->mr), 0);
	munmap(file->at, LENGTH);
	close(file->fd);
}

/* --- a handler that the program sets later: it passes the signal on by raising it, as Python's faulthandler does --- */

static bool has_a_handler_on_top;
static struct sigaction below;

static void raise_again(int number)
{
	sigaction(number, &below, NULL);
	raise(number);
}

static void set_a_handler_on_top(void)
{
	struct sigaction action = {.sa_handler = raise_again, .sa_flags = SA_NODEFER | SA_ONSTACK}, before;

	sigaction(SIGBUS, &action, &before);
	if (before.sa_handler != raise_again)
		below = before;
}

/* Post a request whose local memory is the file's; atomics take eight bytes. */
static int post_of(struct end *end, const struct file *file, uint32_t lkey, enum ibv_wr_opcode opcode, uint32_t length,
		   unsigned flags, uint64_t remote, uint32_t rkey)
{
	struct ibv_sge sge = {.addr = (uintptr_t)file->at, .length = length, .lkey = lkey};
	struct ibv_send_wr wr = {.wr_id = 1,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .opcode = opcode,
				 .send_flags = IBV_SEND_SIGNALED | flags},
			   *bad;

	if (has_a_handler_on_top)
		set_a_handler_on_top();
	if (opcode >= IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = remote;
		wr.wr.atomic.rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(end->qp, &wr, &bad);
}

static const uint32_t lengths[] = {SHORT, LENGTH};

/* --- in one process --------------------------------------------------------------------------------------------- */

/* The requester's own; the last bytes are gone, or all. */
static void test_own_memory(void)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};

	for (unsigned i = 0; i < sizeof(opcodes) / sizeof(opcodes[0]); i++) {
		for (unsigned j = 0; j < 2; j++) {
			struct file file;

			open_pair();
			file = map_file(a.pd);
			CHECK_EQ(post_recv(&b, 100, 0, LENGTH), 0);
			shorten(&file, lengths[j] == SHORT ? 0 : LENGTH / 2);
			CHECK_EQ(post_of(&a, &file, file.mr->lkey, opcodes[i], lengths[j], 0, at_b(0), b.mr->rkey), 0);
			expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
			CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
			unmap_file(&file);
			close_pair();
		}
	}
}

static void test_own_memory_of_an_atomic(void)
{
	struct file file;

	open_pair();
	file = map_file(a.pd);
	shorten(&file, 0);
	CHECK_EQ(post_of(&a, &file, file.mr->lkey, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 0, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	unmap_file(&file);
	close_pair();
}

/* Memory that a key of the whole address space names, tried first or vouched for. */
static void test_whole_address_space(void)
{
	for (int vouched = 0; vouched < 2; vouched++) {
		struct ibv_mr *all;
		struct file file;

		open_pair();
		all = ibv_reg_mr(a.pd, NULL, SIZE_MAX,
				 IBV_ACCESS_ON_DEMAND | (vouched ? (int)rdmanet_soft_access_vouched : 0));
		CHECK(all);
		file = map_file(NULL);
		CHECK_EQ(post_recv(&b, 100, 0, LENGTH), 0);
		shorten(&file, LENGTH / 2);
		CHECK_EQ(post_of(&a, &file, all->lkey, IBV_WR_SEND, LENGTH, 0, 0, 0), 0);
		expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
		unmap_file(&file);
		CHECK_EQ(ibv_dereg_mr(all), 0);
		close_pair();
	}
}

static void test_inline_data(void)
{
	struct ibv_qp_ex *qp;
	struct file file;

	open_pair();
	file = map_file(NULL);
	CHECK_EQ(post_recv(&b, 100, 0, SHORT), 0);
	shorten(&file, 0);
	CHECK_EQ(post_of(&a, &file, 0, IBV_WR_SEND, SHORT, IBV_SEND_INLINE, 0, 0), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	unmap_file(&file);
	close_pair();

	/* It waits for a receive, and is kept until then. */
	open_pair();
	file = map_file(NULL);
	CHECK_EQ(post_send(&a, 7, 0, SHORT), 0);
	shorten(&file, 0);
	CHECK_EQ(post_of(&a, &file, 0, IBV_WR_SEND, SHORT, IBV_SEND_INLINE, 0, 0), 0);
	CHECK_EQ(post_recv(&b, 100, 0, SHORT), 0);
	expect(b.cq, 100, IBV_WC_SUCCESS);
	expect(a.cq, 7, IBV_WC_SUCCESS);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	unmap_file(&file);
	close_pair();

	open_pair_with((struct end_options){.extended = true, .send_ops = IBV_QP_EX_WITH_SEND});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
	file = map_file(NULL);
	shorten(&file, 0);
	qp = ibv_qp_to_qp_ex(a.qp);
	qp->wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_send(qp);
	qp->wr_set_inline_data(qp, file.at, SHORT);
	CHECK_EQ(qp->wr_complete(qp), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	unmap_file(&file);
	close_pair();
}

/* The responder's, which a key of the requester's request names. */
static void test_remote_memory(void)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
						     IBV_WR_ATOMIC_CMP_AND_SWP};

	for (unsigned i = 0; i < (HAS_ATOMICS ? sizeof(opcodes) / sizeof(opcodes[0]) : 2); i++) {
		for (unsigned j = 0; j < (opcodes[i] < IBV_WR_ATOMIC_CMP_AND_SWP ? 2 : 1); j++) {
			uint32_t length = opcodes[i] < IBV_WR_ATOMIC_CMP_AND_SWP ? lengths[j] : 8;
			struct file file;

			open_pair();
			file = map_file(b.pd);
			shorten(&file, length == LENGTH ? LENGTH / 2 : 0);
			CHECK_EQ(post_of(&a, &(struct file){.at = a.buffer}, a.mr->lkey, opcodes[i], length, 0,
					 (uintptr_t)file.at, file.mr->rkey), 0);
			expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
			unmap_file(&file);
			close_pair();
		}
	}
}

static void post_receive_of(struct end *end, const struct file *file)
{
	struct ibv_sge sge = {.addr = (uintptr_t)file->at, .length = LENGTH, .lkey = file->mr->lkey};
	struct ibv_recv_wr recv = {.wr_id = 100, .sg_list = &sge, .num_sge = 1}, *bad;

	CHECK_EQ(ibv_post_recv(end->qp, &recv, &bad), 0);
}

static void test_receive(void)
{
	for (unsigned j = 0; j < 2; j++) {
		struct file file;

		open_pair();
		file = map_file(b.pd);
		post_receive_of(&b, &file);
		shorten(&file, lengths[j] == SHORT ? 0 : LENGTH / 2);
		CHECK_EQ(post_send(&a, 1, 0, lengths[j]), 0);
		expect(a.cq, 1, IBV_WC_REM_OP_ERR);
		expect(b.cq, 100, IBV_WC_LOC_PROT_ERR);
		unmap_file(&file);
		close_pair();
	}
}

static void test_device_memory(void)
{
	struct ibv_alloc_dm_attr attr = {.length = 4096};
	struct verbs_context *calls;
	struct ibv_dm *dm;
	struct file file;

	open_pair();
	calls = verbs_get_ctx(a.context);
	file = map_file(NULL);
	dm = calls->alloc_dm(a.context, &attr);
	CHECK(dm);
	CHECK_EQ(dm->memcpy_to_dm(dm, 0, file.at, 4096), 0);
	shorten(&file, 0);
	CHECK_EQ(dm->memcpy_to_dm(dm, 0, file.at, 4096), EFAULT);
	CHECK_EQ(dm->memcpy_from_dm(file.at, dm, 0, 4096), EFAULT);
	CHECK_EQ(calls->free_dm(dm), 0);
	unmap_file(&file);
	close_pair();
}

/* --- of two processes ------------------------------------------------------------------------------------------- */

/* The other's memory: registered by its program, so that small messages wait in our arena, and larger ones are copied
 * by the kernel, or by its engine. */
static void hold(int fd, enum memory memory)
{
	struct end end;

	end_open(&end, &(struct end_options){.memory = memory});
	to_init(end.qp);
	CHECK_EQ(post_recv(&end, 100, 0, LENGTH), 0);
	connect_over(&end, fd);
	meet(fd);
	end_close(&end);
}

static void hold_user_memory(int fd)
{
	hold(fd, USER_MEMORY);
}

/* This is mapped, and copied here. */
static void hold_device_memory(int fd)
{
	hold(fd, DEVICE_MEMORY);
}

static void try_own_memory(void (*hold)(int fd), enum ibv_wr_opcode opcode, uint32_t length, unsigned flags)
{
	struct other other = spawn(hold);
	struct address theirs;
	struct file file;

	end_open(&a, &(struct end_options){0});
	theirs = connect_over(&a, other.fd);
	file = map_file(a.pd);
	shorten(&file, length == LENGTH ? LENGTH / 2 : 0);
	CHECK_EQ(post_of(&a, &file, file.mr->lkey, opcode, length, flags, theirs.buffer, theirs.rkey), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	unmap_file(&file);
	meet(other.fd);
	join(&other);
	end_close(&a);
}

static void test_own_memory_for_another(void)
{
	for (int no_cma = 0; no_cma < 2; no_cma++) {
		if (no_cma)
			setenv("RDMANET_SOFT_CMA", "0", 1);
		for (unsigned j = 0; j < 2; j++) {
			try_own_memory(hold_user_memory, IBV_WR_SEND, lengths[j], 0);
			try_own_memory(hold_user_memory, IBV_WR_RDMA_WRITE, lengths[j], 0);
			try_own_memory(hold_user_memory, IBV_WR_RDMA_READ, lengths[j], 0);
		}
		if (HAS_ATOMICS)
			try_own_memory(hold_user_memory, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 0);
	}
	unsetenv("RDMANET_SOFT_CMA");
}

static void test_own_memory_past_the_caches(void)
{
	try_own_memory(hold_device_memory, IBV_WR_RDMA_WRITE, LENGTH, rdmanet_soft_send_of_much);
	try_own_memory(hold_device_memory, IBV_WR_RDMA_READ, LENGTH, rdmanet_soft_send_of_much);
}

/* Its memory is a file's, and shortened. */
static void hold_shortened_memory(int fd)
{
	struct file file;
	struct end end;
	char *buffer;

	end_open(&end, &(struct end_options){0});
	buffer = end.buffer;
	file = map_file(end.pd);
	to_init(end.qp);
	post_receive_of(&end, &file);
	shorten(&file, 0);
	tell(fd, &(struct address){.rkey = file.mr->rkey, .buffer = (uintptr_t)file.at}, sizeof(struct address));
	connect_over(&end, fd);
	meet(fd);
	expect(end.cq, 100, hear(fd, buffer, 1) && *buffer == 's' ? IBV_WC_LOC_PROT_ERR : IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	unmap_file(&file);
	end_close(&end);
}

static void try_remote_memory(enum ibv_wr_opcode opcode, uint32_t length)
{
	struct other other = spawn(hold_shortened_memory);
	char is_send = opcode == IBV_WR_SEND ? 's' : 'r';
	struct address theirs;

	end_open(&a, &(struct end_options){0});
	CHECK(hear(other.fd, &theirs, sizeof(theirs)));
	connect_over(&a, other.fd);
	CHECK_EQ(post_of(&a, &(struct file){.at = a.buffer}, a.mr->lkey, opcode, length, 0, theirs.buffer, theirs.rkey), 0);
	expect(a.cq, 1, opcode == IBV_WR_SEND ? IBV_WC_REM_OP_ERR : IBV_WC_REM_ACCESS_ERR);
	meet(other.fd);
	tell(other.fd, &is_send, 1);
	join(&other);
	end_close(&a);
}

static void test_remote_memory_of_another(void)
{
	for (int no_cma = 0; no_cma < 2; no_cma++) {
		if (no_cma)
			setenv("RDMANET_SOFT_CMA", "0", 1);
		try_remote_memory(IBV_WR_SEND, LENGTH);
		for (unsigned j = 0; j < 2; j++) {
			try_remote_memory(IBV_WR_RDMA_WRITE, lengths[j]);
			try_remote_memory(IBV_WR_RDMA_READ, lengths[j]);
		}
		if (HAS_ATOMICS)
			try_remote_memory(IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
	}
	unsetenv("RDMANET_SOFT_CMA");
}

/* A short message waits in the arena of a receiver that has only local rights to its memory. The sender is done by
 * then. */
static void receive_eagerly(int fd)
{
	struct file file;
	struct end end;

	end_open(&end, &(struct end_options){0});
	file = map_file(NULL);
	file.mr = ibv_reg_mr(end.pd, file.at, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	CHECK(file.mr);
	to_init(end.qp);
	post_receive_of(&end, &file);
	CHECK_EQ(post_recv(&end, 101, 0, SHORT), 0);
	connect_over(&end, fd);
	meet(fd);
	shorten(&file, 0);
	expect(end.cq, 100, IBV_WC_LOC_PROT_ERR);
	expect(end.cq, 101, IBV_WC_WR_FLUSH_ERR); /* it goes to ERR, by itself */
	unmap_file(&file);
	end_close(&end);
}

static void test_eager_receive(void)
{
	struct other other = spawn(receive_eagerly);

	end_open(&a, &(struct end_options){0});
	connect_over(&a, other.fd);
	CHECK_EQ(post_send(&a, 1, 0, SHORT), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	meet(other.fd);
	join(&other);
	end_close(&a);
}

/* --- whose signal it is ------------------------------------------------------------------------------------------ */

static sigjmp_buf out;
static volatile sig_atomic_t handled;

static void on_bus(int number, siginfo_t *info, void *context)
{
	(void)context;
	CHECK_EQ(number, SIGBUS);
	handled++;
	if (info->si_code > 0)
		siglongjmp(out, 1);
}

/* A program's own handler gets what is not of the device's doing. */
static void have_a_handler(int fd)
{
	struct sigaction action = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
	struct file file;

	(void)fd;
	sigaction(SIGBUS, &action, NULL);
	open_pair();
	file = map_file(a.pd);
	shorten(&file, 0);
	CHECK_EQ(post_of(&a, &file, file.mr->lkey, IBV_WR_RDMA_WRITE, SHORT, 0, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(handled, 0);
	if (!sigsetjmp(out, 1))
		*(volatile char *)file.at = 1;
	CHECK_EQ(handled, 1);
	raise(SIGBUS);
	CHECK_EQ(handled, 2);
	unmap_file(&file);
	close_pair();
}

/* Without one it is the end. */
static void have_none(int fd)
{
	struct file file;

	signal(SIGBUS, SIG_DFL); /* a sanitizer's, perhaps */
	open_pair();
	file = map_file(a.pd);
	shorten(&file, 0);
	meet(fd);
	*(volatile char *)file.at = 1;
	_exit(1);
}

static void raise_without_one(int fd)
{
	signal(SIGBUS, SIG_DFL);
	open_pair();
	meet(fd);
	raise(SIGBUS);
	_exit(1);
}

static void expect_end(void (*serve)(int fd))
{
	struct other other = spawn(serve);
	int status;

	meet(other.fd);
	CHECK_EQ(waitpid(other.pid, &status, 0), other.pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
	close(other.fd);
}

static void test_signals_of_others(void)
{
	struct other other = spawn(have_a_handler);

	join(&other);
	expect_end(have_none);
	expect_end(raise_without_one);
}

/* It sees each fault, and the request fails all the same. */
static void test_a_handler_on_top(void)
{
	has_a_handler_on_top = true;
	test_own_memory();
	test_whole_address_space();
	test_inline_data();
	test_remote_memory();
	has_a_handler_on_top = false;
	sigaction(SIGBUS, &below, NULL);
}

int main(void)
{
	RUN(test_signals_of_others); /* before the device has its handler */
	RUN(test_own_memory);
	if (HAS_ATOMICS)
		RUN(test_own_memory_of_an_atomic);
	RUN(test_whole_address_space);
	RUN(test_inline_data);
	RUN(test_remote_memory);
	RUN(test_a_handler_on_top);
	RUN(test_receive);
	RUN(test_device_memory);
	RUN(test_own_memory_for_another);
	RUN(test_own_memory_past_the_caches);
	RUN(test_remote_memory_of_another);
	if (!by_stream()) /* which has no such messages */
		RUN(test_eager_receive);
	expect_live_nothing();
	return 0;
}
