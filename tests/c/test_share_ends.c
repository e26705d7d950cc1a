/* SPDX-License-Identifier: Apache-2.0 */
/* Long READs that two engines carry (test_share.c), when both sides do something at once, or one is held up in between. */
#include "processes.h"

#include "soft.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/time.h>

#include "base/witness.h"
#include "objects/quiesce.h"
#include "objects/share.h"
#include "responder/inside.h"

enum { LARGE = 8 << 20, UNTOUCHED = 0x5a };

/* --- a pair of processes ------------------------------------------------------------------------------------------------- */

/* Who reads from the other, and is read from. */
static struct reader {
	struct end end;
	struct address from;
	char *mine, *memory;
	struct ibv_mr *mine_mr, *memory_mr;
} self;

static char byte_at(size_t at)
{
	return (char)(at * 131 + (at >> 8) * 7 + (at >> 18));
}

static void begin(int fd)
{
	struct address own;

	end_open(&self.end, &(struct end_options){.memory = USER_MEMORY});
	connect_over(&self.end, fd);
	self.mine_mr = make_memory(self.end.pd, USER_MEMORY, LARGE, &self.mine);
	self.memory_mr = make_memory(self.end.pd, USER_MEMORY, LARGE, &self.memory);
	for (size_t i = 0; i < LARGE; i++)
		self.memory[i] = byte_at(i);
	own = (struct address){.rkey = self.memory_mr->rkey, .buffer = (uintptr_t)self.memory};
	tell(fd, &own, sizeof(own));
	CHECK(hear(fd, &self.from, sizeof(self.from)));
}

static void end_here(void)
{
	if (self.mine_mr)
		CHECK_EQ(ibv_dereg_mr(self.mine_mr), 0);
	CHECK_EQ(ibv_dereg_mr(self.memory_mr), 0);
	end_close(&self.end);
	munmap(self.mine, LARGE);
	munmap(self.memory, LARGE);
	expect_live_nothing();
}

static void post_read(uint64_t wr_id)
{
	struct ibv_sge sge = {.addr = (uintptr_t)self.mine, .length = LARGE, .lkey = self.mine_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = wr_id,
				 .opcode = IBV_WR_RDMA_READ,
				 .send_flags = IBV_SEND_SIGNALED,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .wr.rdma = {.remote_addr = self.from.buffer, .rkey = self.from.rkey}},
			   *bad;

	CHECK_EQ(ibv_post_send(self.end.qp, &wr, &bad), 0);
}

static void expect_left_alone(void)
{
	memset(self.mine, UNTOUCHED, LARGE);
	usleep(3000);
	for (size_t i = 0; i < LARGE; i++)
		CHECK_EQ(self.mine[i], UNTOUCHED);
}

/* --- both at once -------------------------------------------------------------------------------------------------- */

/* Each withdraws the memory that it reads into, while its engine helps the other. */
static void withdraw(int fd)
{
	struct ibv_wc wc;
	uint32_t piece;

	begin(fd);
	meet(fd);
	post_read(1);
	meet(fd);
	CHECK_EQ(ibv_dereg_mr(self.mine_mr), 0);
	self.mine_mr = NULL;
	piece = rn_qp(self.end.qp)->responder.share.back;
	if (piece < LARGE / RN_SHARE_PIECE)
		memset(self.mine + piece * (size_t)RN_SHARE_PIECE, UNTOUCHED, RN_SHARE_PIECE);
	expect_left_alone();
	wc = poll_one(self.end.cq);
	CHECK(wc.status != IBV_WC_WR_FLUSH_ERR);
	meet(fd);
	end_here();
}

static void both_withdraw(void)
{
	for (int round = 0; round < 4; round++) {
		struct other other = spawn(withdraw);

		withdraw(other.fd);
		join(&other);
	}
}

/* --- the owner is held up ------------------------------------------------------------------------------------------- */

/* Whoever has the lock may wait for the peer's engine, and that for the piece that ours has taken. */
static void lock(int fd)
{
	begin(fd);
	meet(fd);
	/* Until our engine helps, or it is too late for that. */
	while (!(uint32_t)atomic_load(&rn_qp(self.end.qp)->block->given) && !readable(fd, 0))
		sched_yield();
	pthread_mutex_lock(&rn_process_lock);
	meet(fd);
	meet(fd);
	pthread_mutex_unlock(&rn_process_lock);
	meet(fd);
	end_here();
}

static void owner_is_locked(void)
{
	for (int round = 0; round < 4; round++) {
		struct other other = spawn(lock);
		struct ibv_wc wc;
		int got;

		begin(other.fd);
		post_read(1);
		meet(other.fd);
		while (!(got = ibv_poll_cq(self.end.cq, 1, &wc)) && !readable(other.fd, 0))
			sched_yield();
		meet(other.fd);
		if (!got)
			wc = poll_one(self.end.cq);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		meet(other.fd);
		meet(other.fd);
		end_here();
		join(&other);
	}
}

static void help(int fd)
{
	begin(fd);
	meet(fd);
	end_here();
}

/* Has the owner taken pieces that are not in place yet? */
static bool has_piece(void)
{
	struct rn_qp *qp = rn_qp(self.end.qp);
	struct rn_share *share = &qp->responder.share;
	bool has = false;

	rn_lock(&qp->sq_lock);
	if (share->is_active) {
		uint32_t taken = share->pieces - rn_share_back(atomic_load(&qp->responder.block->shared));

		has = taken && atomic_load(&qp->responder.block->given) != ((uint64_t)share->serial << 32 | taken);
	}
	rn_unlock(&qp->sq_lock);
	return has;
}

/* The requester withdraws other memory, which ends no READ: that waits for the piece, and does not succeed without it. */
static void owner_is_stopped_with_a_piece(void)
{
	struct other other = spawn(help);
	bool is_caught = false;
	struct ibv_wc wc;

	begin(other.fd);
	for (int round = 0; round < 20 && !is_caught; round++) { /* on a busy machine perhaps never */
		post_read(1);
		while (!(is_caught = has_piece()) && !ibv_poll_cq(self.end.cq, 1, &wc))
			sched_yield();
		if (!is_caught)
			continue;
		kill(other.pid, SIGSTOP);
		waitpid(other.pid, NULL, WUNTRACED);
		is_caught = has_piece();
		if (is_caught)
			break;
		kill(other.pid, SIGCONT);
		expect(self.end.cq, 1, IBV_WC_SUCCESS);
	}
	CHECK_EQ(ibv_dereg_mr(self.end.mr), 0);
	self.end.mr = NULL;
	if (is_caught) {
		usleep(100 * 1000);
		CHECK_EQ(ibv_poll_cq(self.end.cq, 1, &wc), 0);
		kill(other.pid, SIGCONT);
		expect(self.end.cq, 1, IBV_WC_SUCCESS);
	}
	for (size_t i = 0; i < LARGE; i++)
		CHECK_EQ(self.mine[i], byte_at(i));
	meet(other.fd);
	end_here();
	join(&other);
}

/* The kernel holds the owner up at each piece that it is about to write, until the test lets it go on. */
static void held_up(int fd)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(filter) / sizeof(*filter), filter};
	int notices;

	CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	notices = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
	CHECK(notices >= 0);
	tell(fd, &notices, sizeof(notices));
	begin(fd);
	meet(fd);
	end_here();
}

static int notices_of(const struct other *other)
{
	int pidfd = (int)syscall(SYS_pidfd_open, other->pid, 0), number, notices;

	CHECK(hear(other->fd, &number, sizeof(number)));
	notices = (int)syscall(SYS_pidfd_getfd, pidfd, number, 0);
	CHECK(notices >= 0);
	close(pidfd);
	return notices;
}

/* Read until the owner has taken a piece: on a busy machine READs may be over before it helps. */
static uint64_t read_until_helped(int notices)
{
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;
	struct seccomp_notif notice = {0};
	struct ibv_wc wc;

	post_read(1);
	while (!readable(notices, 0)) {
		CHECK(now_ns() < limit);
		if (ibv_poll_cq(self.end.cq, 1, &wc))
			post_read(1);
		sched_yield();
	}
	CHECK_EQ(ioctl(notices, SECCOMP_IOCTL_NOTIF_RECV, &notice), 0);
	return notice.id;
}

static void let_go_on(int notices, uint64_t piece)
{
	struct seccomp_notif_resp answer = {.id = piece, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};

	CHECK_EQ(ioctl(notices, SECCOMP_IOCTL_NOTIF_SEND, &answer), 0);
}

/* Once the READ has ended, its memory is the program's: the piece goes nowhere, however late the owner goes on. */
static void owner_is_late(bool withdraws)
{
	struct other other = spawn(held_up);
	int notices = notices_of(&other);
	struct ibv_qp_attr attr = {0};
	struct ibv_wc wc;
	uint64_t piece;
	char mark;

	begin(other.fd);
	piece = read_until_helped(notices);
	if (withdraws) {
		CHECK_EQ(ibv_dereg_mr(self.mine_mr), 0);
		self.mine_mr = NULL;
	} else {
		CHECK_EQ(to_state(self.end.qp, &attr, IBV_QPS_ERR, 0), 0);
	}
	wc = poll_one(self.end.cq);
	CHECK_EQ(wc.status, withdraws ? IBV_WC_LOC_PROT_ERR : IBV_WC_WR_FLUSH_ERR);
	memset(self.mine, UNTOUCHED, LARGE);
	let_go_on(notices, piece);
	meet(other.fd);
	CHECK(!hear(other.fd, &mark, 1)); /* it has ended */
	for (size_t i = 0; i < LARGE; i++)
		CHECK_EQ(self.mine[i], UNTOUCHED);
	close(notices);
	end_here();
	join(&other);
}

/* A program must not take memory away that is being read into, but nothing is written to what is at its place then. */
static void memory_is_moved(void)
{
	struct other other = spawn(held_up);
	int notices = notices_of(&other);
	struct ibv_wc wc;
	uint64_t piece;
	char *moved, mark;

	begin(other.fd);
	piece = read_until_helped(notices);
	moved = mmap(NULL, LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(mremap(self.mine, LARGE, LARGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == moved);
	memset(moved, UNTOUCHED, LARGE);
	let_go_on(notices, piece);
	wc = poll_one(self.end.cq);
	CHECK_EQ(wc.status, IBV_WC_LOC_PROT_ERR);
	meet(other.fd);
	CHECK(!hear(other.fd, &mark, 1)); /* it has ended */
	for (size_t i = 0; i < LARGE; i++)
		CHECK_EQ(moved[i], UNTOUCHED);
	close(notices);
	CHECK(mremap(moved, LARGE, LARGE, MREMAP_MAYMOVE | MREMAP_FIXED, self.mine) == self.mine);
	end_here();
	join(&other);
}

static void owner_is_late_after_a_flush(void)
{
	owner_is_late(false);
}

static void owner_is_late_after_a_withdrawal(void)
{
	owner_is_late(true);
}

/* --- within one process --------------------------------------------------------------------------------------------- */

static struct rn_remote request_for(uint32_t serial)
{
	return (struct rn_remote){
		.kind = RN_REMOTE_HELP,
		.source_qpn = rn_qp(self.end.qp)->attr.dest_qp_num,
		.dest_qpn = self.end.qp->qp_num,
		.generation = rn_qp(self.end.qp)->generation,
		.key = self.memory_mr->rkey,
		.addr = (uintptr_t)self.memory,
		.length = LARGE,
		.serial = serial,
		.witness = rn_witness().at,
	};
}

static int ask(const struct rn_remote *request)
{
	struct rn_remote_answer answer;

	CHECK_EQ(rn_serve_request(getpid(), request, sizeof(*request), &answer, sizeof(answer)), sizeof(answer));
	return answer.error;
}

/* Another READ, of a process that was forked from the one which has read before, has the same serial. */
static void a_serial_again(void)
{
	struct other other = spawn(help);
	struct rn_remote request;
	struct rn_qp_block *block;

	begin(other.fd);
	block = rn_qp(self.end.qp)->block;
	occupy_engine();
	atomic_store(&block->given, 5ull << 32 | 3);
	atomic_store(&block->shared, rn_share_word(5, 0, 8));
	request = request_for(5);
	CHECK_EQ(ask(&request), 0);
	CHECK_EQ(atomic_load(&block->given), 5ull << 32);
	atomic_store(&block->shared, 0);
	release_engine();
	meet(other.fd);
	end_here();
	join(&other);
}

static atomic_bool stop;
static struct rn_remote asked;

static void *ask_on(void *unused)
{
	(void)unused;
	while (!stop)
		ask(&asked);
	return NULL;
}

static void stand_still(int signal)
{
	(void)signal;
	usleep(3000);
}

/* Our engine is asked to help, and stands still anywhere in that, while the queue pair is reset. */
static void reset_while_asked(void)
{
	struct other other = spawn(help);
	struct ibv_qp_attr attr;
	struct rn_qp *qp;
	pthread_t thread;

	begin(other.fd);
	qp = rn_qp(self.end.qp);
	attr = qp->attr;
	signal(SIGUSR1, stand_still);
	for (int round = 0; round < 30; round++) {
		stop = false;
		occupy_engine();
		atomic_store(&qp->block->shared, rn_share_word(5, 0, 8));
		asked = request_for(5);
		CHECK_EQ(pthread_create(&thread, NULL, ask_on, NULL), 0);
		EVENTUALLY((uint32_t)(atomic_load(&qp->block->given) >> 32) == 5);
		pthread_kill(thread, SIGUSR1);
		CHECK_EQ(to_state(self.end.qp, &(struct ibv_qp_attr){0}, IBV_QPS_RESET, 0), 0);
		stop = true;
		CHECK_EQ(pthread_join(thread, NULL), 0);
		CHECK(!qp->help.task.link);
		atomic_store(&qp->block->given, 0);
		atomic_store(&qp->block->shared, 0);
		release_engine();
		connect_with(self.end.qp, attr);
	}
	signal(SIGUSR1, SIG_DFL);
	meet(other.fd);
	end_here();
	join(&other);
}

static volatile sig_atomic_t has_ended;

static void end_serving(int signal)
{
	(void)signal;
	has_ended = 1;
	rn_serving_end(RN_SERVING_ENGINE);
}

/* The engine copies a piece, and has to wait for a CPU meanwhile: who withdraws the region waits longer. */
static void engine_is_slow(void)
{
	struct itimerval soon = {.it_value.tv_usec = 20 * 1000};

	end_open(&self.end, &(struct end_options){.memory = USER_MEMORY});
	rn_serving_begin(RN_SERVING_ENGINE);
	signal(SIGALRM, end_serving);
	CHECK_EQ(setitimer(ITIMER_REAL, &soon, NULL), 0);
	CHECK_EQ(ibv_dereg_mr(self.end.mr), 0);
	CHECK(has_ended);
	CHECK_EQ(rdmanet_soft_quarantined(), 0);
	signal(SIGALRM, SIG_DFL);
	self.end.mr = NULL;
	end_close(&self.end);
	expect_live_nothing();
}

/* All is in place, but what the owner had there when it had failed its queue pair is not what was to be read. */
static void owner_has_failed(void)
{
	static struct rn_qp_block block;
	static struct rn_responder_ctx ctx;
	static struct rn_mr_entry entry = {.key = 7};
	static struct rn_counters count;
	struct rn_transfer t = {.num_local = 1, .num_remote = 1, .total = 4ull * RN_SHARE_PIECE, .in_turns = true};

	ctx = (struct rn_responder_ctx){.block = &block, .facts = &block, .generation = 3, .count = &count};
	t.remote[0] = (struct rn_piece){.mr = &entry, .key = 7};
	for (int state = IBV_QPS_RTS; state <= IBV_QPS_ERR; state += IBV_QPS_ERR - IBV_QPS_RTS) {
		uint32_t piece;

		rn_share_begin(&ctx, 0, t.total);
		while (rn_share_take(&block, ctx.share.serial, &piece))
			;
		atomic_store(&block.given, (uint64_t)ctx.share.serial << 32 | 4);
		atomic_store(&block.generation_state, 3ull << 8 | state);
		t.moved = 0;
		CHECK_EQ(rn_copy_shared(&ctx, &t), state == IBV_QPS_RTS ? RN_COPIED : RN_COPY_LOST);
		CHECK_EQ(t.moved, state == IBV_QPS_RTS ? t.total : 0);
		CHECK(!ctx.share.is_active);
	}
}

int main(void)
{
	RUN(owner_has_failed);
	RUN(engine_is_slow);
	RUN(a_serial_again);
	RUN(reset_while_asked);
	if (!may_reach_others()) {
		printf("    process_vm_readv is refused here: nothing to share\n");
		return 0;
	}
	RUN(owner_is_locked);
	RUN(owner_is_stopped_with_a_piece);
	RUN(memory_is_moved);
	RUN(owner_is_late_after_a_flush);
	RUN(owner_is_late_after_a_withdrawal);
	RUN(both_withdraw);
	return 0;
}
