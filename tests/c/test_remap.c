/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that a program brings becomes memory that peers map, and private memory again afterwards; and where
 * that could be noticed it stays as it is.  All with RDMANET_SOFT_ADOPT=1.
 */
#include "processes.h"

#include "shm/remap.h"
#include "base/fence.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <ucontext.h>

enum { PAGES = 8, PAGE_BYTES = 4096, SIZE = PAGES * PAGE_BYTES, COROUTINE_STACK = 512 << 10 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static char *memory;

static void open_all(void)
{
	context = open_soft();
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	for (int i = 0; i < SIZE; i++)
		memory[i] = i % 253;
}

static void close_all(void)
{
	CHECK_EQ(ibv_dealloc_pd(pd), 0);
	CHECK_EQ(ibv_close_device(context), 0);
	munmap(memory, SIZE);
	expect_live_nothing();
}

static struct ibv_mr *reg(size_t offset, size_t length)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory + offset, length, ALL_ACCESS);

	CHECK(mr);
	CHECK(mr->addr == memory + offset && mr->length == length);
	return mr;
}

static void expect_content(void)
{
	for (int i = 0; i < SIZE; i++)
		CHECK_EQ((unsigned char)memory[i], i % 253);
}

/* Is the page a private one? By what the kernel says of it. */
static bool is_private(const char *at)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end;
	char perms[5];
	bool found = false;

	while (fscanf(maps, "%lx-%lx %4s%*[^\n]", &start, &end, perms) == 3 && !found)
		if ((uintptr_t)at >= start && (uintptr_t)at < end) {
			found = true;
			break;
		}
	fclose(maps);
	CHECK(found);
	return perms[3] == 'p';
}

/* --- by itself -------------------------------------------------------------------------------------------- */

static void test_there_and_back(void)
{
	struct ibv_mr *mr;

	open_all();
	mr = reg(PAGE_BYTES + 100, 2 * PAGE_BYTES);
	CHECK(is_private(memory));
	for (int page = 1; page < 4; page++)
		CHECK(!is_private(memory + page * PAGE_BYTES));
	CHECK(is_private(memory + 4 * PAGE_BYTES));
	expect_content();
	memory[PAGE_BYTES + 200] = 'x';
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	for (int page = 0; page < PAGES; page++)
		CHECK(is_private(memory + page * PAGE_BYTES));
	CHECK_EQ(memory[PAGE_BYTES + 200], 'x');
	memory[PAGE_BYTES + 200] = (PAGE_BYTES + 200) % 253;
	expect_content();
	close_all();
}

/* Regions within pages that are remapped share them; one that overlaps them otherwise does without. */
static void test_overlapping(void)
{
	struct ibv_mr *first, *second, *third;

	open_all();
	first = reg(10, 2 * PAGE_BYTES);
	second = reg(PAGE_BYTES, 100);
	third = reg(2 * PAGE_BYTES, 3 * PAGE_BYTES);
	CHECK(!is_private(memory + 2 * PAGE_BYTES));
	CHECK(is_private(memory + 3 * PAGE_BYTES));
	expect_content();
	CHECK_EQ(ibv_dereg_mr(first), 0);
	CHECK(!is_private(memory));
	CHECK_EQ(ibv_dereg_mr(second), 0);
	CHECK(is_private(memory));
	CHECK_EQ(ibv_dereg_mr(third), 0);
	expect_content();
	close_all();
}

static void *wait_for_byte(void *fd)
{
	char byte;

	CHECK_EQ(read(*(int *)fd, &byte, 1), 1);
	return NULL;
}

static _Atomic bool over;

static void *count_up(void *word)
{
	uint64_t *at = word;

	for (uint64_t i = 1; !over; i++)
		__atomic_store_n(at, i, __ATOMIC_RELAXED);
	return NULL;
}

/* Somebody could be writing: nothing is remapped. What is, is turned back under the writer's hands, and loses nothing. */
static void test_another_thread(void)
{
	struct ibv_mr *before, *during;
	pthread_t thread;
	int fds[2];

	open_all();
	CHECK_EQ(pipe(fds), 0);
	before = reg(0, PAGE_BYTES);
	CHECK(!is_private(memory));
	CHECK_EQ(pthread_create(&thread, NULL, wait_for_byte, &fds[0]), 0);
	during = reg(4 * PAGE_BYTES, PAGE_BYTES);
	CHECK(is_private(memory + 4 * PAGE_BYTES));
	CHECK_EQ(ibv_dereg_mr(before), 0);
	CHECK(is_private(memory));
	expect_content();
	CHECK_EQ(write(fds[1], "x", 1), 1);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(ibv_dereg_mr(during), 0);
	close(fds[0]);
	close(fds[1]);
	close_all();
}

static void test_turned_back_under_a_writer(void)
{
	uint64_t *word, seen, last = 0;
	pthread_t thread;
	struct ibv_mr *mr;

	open_all();
	word = (uint64_t *)(memory + PAGE_BYTES);
	for (int i = 0; i < 50; i++) {
		*word = 0;
		over = false;
		mr = reg(0, SIZE);
		CHECK(!is_private(memory)); /* also what was turned back before is remapped again */
		CHECK_EQ(pthread_create(&thread, NULL, count_up, word), 0);
		while (__atomic_load_n(word, __ATOMIC_RELAXED) < 1000)
			;
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		for (int looks = 0; looks < 1000; looks++) {
			seen = __atomic_load_n(word, __ATOMIC_RELAXED);
			CHECK(seen >= last);
			last = seen;
		}
		over = true;
		CHECK_EQ(pthread_join(thread, NULL), 0);
		CHECK(__atomic_load_n(word, __ATOMIC_RELAXED) >= last);
		last = 0;
		while (!rn_remap_alone()) /* the kernel's list of threads is a little behind */
			sched_yield();
	}
	CHECK(is_private(memory));
	close_all();
}

/* What it leaves behind is as good as anonymous memory: allocators rely on the zeros. */
static void test_thrown_away(void)
{
	struct ibv_mr *mr;

	open_all();
	mr = reg(0, SIZE);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	expect_content();
	CHECK_EQ(madvise(memory, PAGE_BYTES, MADV_DONTNEED), 0);
	for (int i = 0; i < PAGE_BYTES; i++)
		CHECK_EQ(memory[i], 0);
	CHECK_EQ((unsigned char)memory[PAGE_BYTES], PAGE_BYTES % 253);
	close_all();
}

/* realloc of a large block does it. */
static void test_moved(void)
{
	char *elsewhere = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	open_all();
	mr = reg(0, SIZE);
	CHECK(mremap(memory, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere) == elsewhere);
	memory = elsewhere;
	CHECK(!is_private(memory));
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK(is_private(memory));
	expect_content();
	close_all();
}

/* Protected, and partly gone. */
static void test_changed(void)
{
	struct ibv_mr *mr;

	open_all();
	mr = reg(0, SIZE);
	CHECK_EQ(mprotect(memory, PAGE_BYTES, PROT_READ), 0);
	CHECK_EQ(munmap(memory + PAGE_BYTES, PAGE_BYTES), 0);
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK(is_private(memory) && is_private(memory + 2 * PAGE_BYTES));
	CHECK_EQ((unsigned char)memory[100], 100);
	CHECK_EQ((unsigned char)memory[2 * PAGE_BYTES], 2 * PAGE_BYTES % 253);
	CHECK_EQ(mprotect(memory, PAGE_BYTES, PROT_READ | PROT_WRITE), 0);
	close_all();
}

/* --- what isn't remapped -------------------------------------------------------------------------------------- */

static ucontext_t outside, coroutine;

static void on_own_stack(void)
{
	struct ibv_mr *mr = reg(0, COROUTINE_STACK);

	CHECK(is_private((char *)__builtin_frame_address(0)));
	CHECK_EQ(ibv_dereg_mr(mr), 0);
}

/* A coroutine registers memory with its own stack in it. */
static void test_coroutine(void)
{
	open_all();
	munmap(memory, SIZE);
	memory = mmap(NULL, COROUTINE_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	CHECK_EQ(getcontext(&coroutine), 0);
	coroutine.uc_stack.ss_sp = memory;
	coroutine.uc_stack.ss_size = COROUTINE_STACK;
	coroutine.uc_link = &outside;
	makecontext(&coroutine, on_own_stack, 0);
	CHECK_EQ(swapcontext(&outside, &coroutine), 0);
	munmap(memory + SIZE, COROUTINE_STACK - SIZE);
	close_all();
}

/* A process with a ring for asynchronous I/O: a read may be on its way. */
static void test_asynchronous_io(void)
{
	unsigned long ring = 0;
	struct ibv_mr *mr;

	open_all();
	if (syscall(SYS_io_setup, 4, &ring)) {
		CHECK(errno == ENOSYS || errno == EPERM); /* there is none of it here */
	} else {
		mr = reg(0, SIZE);
		CHECK(is_private(memory));
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		CHECK_EQ(syscall(SYS_io_destroy, ring), 0);
	}
	mr = reg(0, SIZE);
	CHECK(!is_private(memory));
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_all();
}

static void test_not_ordinary_memory(void)
{
	char on_stack[64] = {0};
	char *shared = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mrs[2];

	open_all();
	mrs[0] = ibv_reg_mr(pd, on_stack, sizeof(on_stack), ALL_ACCESS);
	CHECK(mrs[0] && is_private(on_stack));
	CHECK_EQ(ibv_dereg_mr(mrs[0]), 0);
	mrs[0] = ibv_reg_mr(pd, shared, SIZE, ALL_ACCESS);
	mrs[1] = reg(0, SIZE);
	CHECK(mrs[0]);
	CHECK(is_private(memory)); /* peers may be writing by the other one */
	for (int i = 0; i < 2; i++)
		CHECK_EQ(ibv_dereg_mr(mrs[i]), 0);
	munmap(shared, SIZE);
	close_all();
}

/* What the program has put in its place meanwhile is not ours to turn back; nor to take for what was registered. */
static void test_mapped_anew(void)
{
	struct ibv_mr *old, *new;

	open_all();
	old = reg(0, SIZE);
	CHECK(mmap(memory, SIZE / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
	memset(memory, 'n', SIZE / 2);
	new = reg(0, PAGE_BYTES);
	CHECK(is_private(memory));
	CHECK_EQ(ibv_dereg_mr(old), 0);
	CHECK(is_private(memory + SIZE / 2));
	CHECK_EQ(memory[0], 'n');
	CHECK_EQ(memory[SIZE / 2 - 1], 'n');
	CHECK_EQ((unsigned char)memory[SIZE / 2], SIZE / 2 % 253);
	CHECK_EQ(ibv_dereg_mr(new), 0);
	close_all();
}

static void test_forked(void)
{
	struct ibv_mr *mr;
	int status;
	pid_t child;

	open_all();
	mr = reg(0, SIZE);
	fflush(NULL);
	child = fork();
	if (!child) {
		CHECK(is_private(memory));
		expect_content();
		memset(memory, 'c', SIZE);
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	CHECK(!is_private(memory));
	expect_content();
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_all();
}

/* --- with a peer -------------------------------------------------------------------------------------------- */

static struct end a;

__attribute__((unused)) static void serve_memory(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	memset(end.buffer, 0, BUFFER);
	connect_over(&end, fd);
	meet(fd);
	CHECK(!memcmp(end.buffer, "hello", 6));
	CHECK_EQ(*(uint64_t *)(end.buffer + 64), 7);
	meet(fd);
	end_close(&end);
	expect_live_nothing();
}

__attribute__((unused)) static void test_peer(void)
{
	struct other other = spawn(serve_memory);
	struct rn_counters count;
	struct address b;

	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	b = connect_over(&a, other.fd);
	memcpy(a.buffer, "hello", 6);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 6, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = 2,
					   .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = b.buffer + 64, .rkey = b.rkey, .compare_add = 7}},
		      128, 8),
		 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(rdmanet_soft_qp_counters(a.qp, &count), 0);
	CHECK_EQ(count.bytes_mapped, 6 + 8);
	CHECK_EQ(count.bytes_cma + count.bytes_engine, 0);
	CHECK_EQ(count.syscalls, 0);
	meet(other.fd);
	meet(other.fd);
	end_close(&a);
	expect_live_nothing();
	join(&other);
}

static bool under_tsan(void)
{
#ifdef __SANITIZE_THREAD__
	return true;
#else
	return false;
#endif
}

int main(void)
{
	setenv("RDMANET_SOFT_ADOPT", "1", 1);
	RUN(test_there_and_back);
	RUN(test_overlapping);
	RUN(test_thrown_away);
	RUN(test_moved);
	RUN(test_changed);
	RUN(test_coroutine);
	RUN(test_asynchronous_io);
	if (!under_tsan()) /* which has a thread of its own once there was a second, and then nothing is remapped again */
		RUN(test_turned_back_under_a_writer);
	else
		printf("  not run: test_turned_back_under_a_writer, as ThreadSanitizer's own thread is in the way\n");
	RUN(test_not_ordinary_memory);
	RUN(test_mapped_anew);
	RUN(test_forked);
#ifndef RN_TSAN /* which has a thread of its own in each process, so nothing is remapped */
	RUN(test_peer);
#endif
	RUN(test_another_thread);
	return 0;
}
