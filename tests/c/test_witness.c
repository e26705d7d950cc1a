/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is reached by its owner's pid is that of the program that the link leads to, also at the system call itself.
 *
 * A forked child is the other program: the same memory is at the same addresses there, but for the witness page.
 */
#include "processes.h"

#include "soft.h"

#include "base/fence.h"
#include "base/page.h"
#include "base/witness.h"
#include "responder/inside.h"

/* TRIED: so short that the owner's engine does not help with a READ. */
enum { LENGTH = 100, TRIED = 64 << 10, THEIRS = 't', OURS = 'o' };

static char *memory, *beside; /* in both processes, at the same addresses */

/* --- one copy -------------------------------------------------------------------------------------------------------- */

static struct {
	struct rn_witness witness;
	char first;
} told;

static void serve_memory(int fd)
{
	bool has_witness;

	memset(memory, THEIRS, rn_page());
	CHECK(hear(fd, &has_witness, sizeof(has_witness)));
	told.witness = has_witness ? rn_witness() : (struct rn_witness){0};
	tell(fd, &told, sizeof(told));
	while (hear(fd, &has_witness, sizeof(has_witness))) { /* what is there now? */
		told.first = memory[0];
		for (int i = 1; i < LENGTH; i++)
			CHECK_EQ(memory[i], told.first);
		tell(fd, &told, sizeof(told));
	}
}

static struct other begin_with(bool has_witness)
{
	struct other other;

	memory = mmap(NULL, 2 * rn_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	beside = memory + rn_page();
	other = spawn(serve_memory);
	tell(other.fd, &has_witness, sizeof(has_witness));
	CHECK(hear(other.fd, &told, sizeof(told)));
	return other;
}

static char seen_there(const struct other *other)
{
	bool any = true;

	tell(other->fd, &any, sizeof(any));
	CHECK(hear(other->fd, &told, sizeof(told)));
	return told.first;
}

static void finish_with(struct other *other)
{
	join(other);
	munmap(memory, 2 * rn_page());
}

static enum rn_copied copy(const struct other *other, struct rn_witness witness, bool to_remote, char *here, char *there)
{
	struct rn_peer peer = {.pid = other->pid, .witness = witness};
	struct rn_counters count = {0};
	struct rn_responder_ctx ctx = {.peer = &peer, .count = &count};
	struct rn_transfer t = {.to_remote = to_remote};
	struct rn_piece piece = {.far = (uintptr_t)there, .length = LENGTH};
	enum rn_copied copied = rn_copy_far(&ctx, &t, here, &piece, 0, LENGTH);

	CHECK_EQ(count.bytes_cma, copied == RN_COPIED ? LENGTH : 0);
	CHECK(count.syscalls <= 1);
	return copied;
}

/* The same as two blocks of a list. */
static int copy_blocks(const struct other *other, struct rn_witness witness, bool to_remote)
{
	struct rn_peer peer = {.pid = other->pid, .witness = witness};
	struct rn_counters count = {0};
	struct rn_responder_ctx ctx = {.peer = &peer, .count = &count};
	struct rn_far_list list = {
		.count = 2,
		.here = {[1] = {beside, LENGTH / 2}, [2] = {beside + LENGTH / 2, LENGTH / 2}},
		.there = {[1] = {memory, LENGTH / 2}, [2] = {memory + LENGTH / 2, LENGTH / 2}},
	};
	int done = rn_respond_far(&ctx, &list, to_remote);

	CHECK_EQ(count.bytes_cma, done * LENGTH / 2);
	CHECK(count.syscalls <= 1);
	return done;
}

static void program_of_the_link(void)
{
	struct other other = begin_with(true);
	char *hole = mmap(NULL, rn_page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct rn_witness witness = told.witness;

	CHECK(witness.at);
	CHECK_EQ(copy(&other, witness, false, beside, memory), RN_COPIED);
	CHECK_EQ(beside[0], THEIRS);
	CHECK_EQ(beside[LENGTH - 1], THEIRS);
	CHECK_EQ(beside[LENGTH], 0);
	memset(beside, OURS, LENGTH);
	CHECK_EQ(copy(&other, witness, true, beside, memory), RN_COPIED);
	CHECK_EQ(seen_there(&other), OURS);
	memset(beside, THEIRS, LENGTH);
	CHECK_EQ(copy_blocks(&other, witness, false), 2);
	CHECK_EQ(beside[0], OURS);
	CHECK_EQ(beside[LENGTH - 1], OURS);
	CHECK_EQ(copy_blocks(&other, witness, true), 2);
	CHECK_EQ(seen_there(&other), OURS);
	/* Which of the two is missing? */
	for (int to_remote = 0; to_remote < 2; to_remote++) {
		CHECK_EQ(copy(&other, witness, to_remote, beside, (char *)8), RN_COPY_FAULT);
		CHECK_EQ(copy(&other, witness, to_remote, hole, memory), RN_COPY_LOCAL_FAULT);
		CHECK_EQ(copy(&other, witness, to_remote, (char *)(UINTPTR_MAX / 2), memory), RN_COPY_LOCAL_FAULT);
	}
	CHECK_EQ(seen_there(&other), OURS);
	munmap(hole, rn_page());
	finish_with(&other);
}

/* It has neither our page, although it is a child of ours, nor another's. */
static void another_program(void)
{
	struct rn_witness witness = rn_witness();
	struct other other = begin_with(false);

	CHECK(witness.at);
	memset(beside, OURS, LENGTH);
	CHECK_EQ(copy(&other, witness, true, beside, memory), RN_COPY_LOST);
	CHECK_EQ(copy_blocks(&other, witness, true), 0);
	CHECK_EQ(seen_there(&other), THEIRS);
	CHECK_EQ(copy_blocks(&other, witness, false), 0);
	CHECK_EQ(copy(&other, witness, false, beside, memory), RN_COPY_LOST);
	CHECK_EQ(beside[0], OURS);
	finish_with(&other);
}

/* For a read it is not enough that there is memory. */
static void another_value(void)
{
	struct other other = begin_with(true);
	struct rn_witness witness = told.witness;

	witness.value ^= 1;
	CHECK_EQ(copy(&other, witness, false, beside, memory), RN_COPY_LOST);
	CHECK_EQ(copy_blocks(&other, witness, false), 0);
	finish_with(&other);
}

/* Who has no witness is asked. */
static void no_witness(void)
{
	struct other other = begin_with(false);

	CHECK_EQ(copy(&other, (struct rn_witness){0}, true, beside, memory), RN_COPY_ASKED);
	CHECK_EQ(copy_blocks(&other, (struct rn_witness){0}, true), 0);
	CHECK_EQ(seen_there(&other), THEIRS);
	finish_with(&other);
}

static void lend_in_child(uint64_t parents)
{
	unsigned char is_resident;
	pid_t pid = fork();
	int status;

	if (!pid) {
		CHECK(mincore((void *)(uintptr_t)parents, 1, &is_resident) < 0);
		CHECK(rn_witness_lent());
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
}

/* Where another page is for as long as somebody may write; then it is nowhere, and the next one is elsewhere. */
static void lent_for_a_time(void)
{
	uint64_t lent = rn_witness_lent(), next;
	unsigned char is_resident;

	CHECK(lent && lent != rn_witness().at);
	CHECK_EQ(rn_witness_lent(), lent);
	CHECK_EQ(mincore((void *)(uintptr_t)lent, 1, &is_resident), 0);
	rn_witness_recall(lent);
	CHECK(mincore((void *)(uintptr_t)lent, 1, &is_resident) < 0);
	CHECK_EQ(errno, ENOMEM);
	next = rn_witness_lent();
	CHECK(next);
#ifndef RN_TSAN /* under which it may be at the same place again */
	rn_witness_recall(lent); /* another READ that had it has ended, too */
#endif
	CHECK_EQ(rn_witness_lent(), next);
	CHECK_EQ(mincore((void *)(uintptr_t)next, 1, &is_resident), 0);
	lend_in_child(next);
}

/* --- queue pairs ------------------------------------------------------------------------------------------------------- */

static struct end a;
static struct address b;

static struct ibv_qp_attr impatient(void)
{
	struct ibv_qp_attr attr = default_attr(0);

	attr.timeout = SHORT_TIMEOUT;
	return attr;
}

/* First it is the program of the link, then one that has no witness. */
static void serve(int fd)
{
	struct end end;
	void *witness;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	memset(end.buffer, THEIRS, BUFFER);
	to_init(end.qp);
	CHECK_EQ(post_recv(&end, 1, 0, BUFFER), 0);
	connect_over_with(&end, fd, impatient());
	meet(fd); /* it has written */
	for (int i = 0; i < LENGTH; i++)
		CHECK_EQ(end.buffer[i], OURS);
	witness = (void *)(uintptr_t)rn_witness().at;
	CHECK_EQ(mprotect(witness, rn_page(), PROT_NONE), 0);
	memset(end.buffer, THEIRS, BUFFER);
	meet(fd);
	meet(fd); /* it has tried */
	for (int i = 0; i < BUFFER; i++)
		CHECK_EQ(end.buffer[i], THEIRS);
	CHECK_EQ(mprotect(witness, rn_page(), PROT_READ | PROT_WRITE), 0);
	end_close(&end);
	expect_live_nothing();
}

static void try(enum ibv_wr_opcode opcode)
{
	struct other other = spawn(serve);

	end_open(&a, &(struct end_options){.memory = USER_MEMORY});
	b = connect_over_with(&a, other.fd, impatient());
	memset(a.buffer, OURS, BUFFER);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, LENGTH, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	meet(other.fd);
	meet(other.fd);
	CHECK_EQ(post_rdma(&a, opcode, 2, 0, TRIED, b.buffer, b.rkey), 0);
	expect(a.cq, 2, IBV_WC_RETRY_EXC_ERR);
	for (int i = 0; i < BUFFER; i++)
		CHECK_EQ(a.buffer[i], OURS);
	meet(other.fd);
	end_close(&a);
	expect_live_nothing();
	join(&other);
}

static void no_write(void)
{
	try(IBV_WR_RDMA_WRITE);
}

static void no_read(void)
{
	try(IBV_WR_RDMA_READ);
}

static void no_send(void)
{
	try(IBV_WR_SEND);
}

int main(void)
{
	if (!may_reach_others()) {
		printf("    process_vm_readv is refused here: nothing to guard\n");
		return 0;
	}
	RUN(lent_for_a_time);
	RUN(program_of_the_link);
	RUN(another_program);
	RUN(another_value);
	RUN(no_witness);
	RUN(no_write);
	RUN(no_read);
	RUN(no_send);
	return 0;
}
