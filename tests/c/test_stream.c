/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams between two processes: every operation, every refusal, and peers that die, stop, lie, or may not
 * come in.  What they have in common with requests executed in place, test_local and others show by stream
 * as well (see the Makefile).
 */
#include "processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "namespace.h"
#include "soft.h"

static struct end mine;
static struct address theirs;

static void open_end(void)
{
	end_open(&mine, &(struct end_options){.memory = USER_MEMORY});
}

static void serve_until_told(int fd)
{
	char mark;

	open_end();
	theirs = connect_over(&mine, fd);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_recv(&mine, i, i * 1000, 1000), 0);
	meet(fd);
	hear(fd, &mark, 1); /* or it has gone */
	end_close(&mine);
}

/* It never sends, so there is no connection from it. */
static void serve_at_rtr(int fd)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct address address;
	char mark;

	open_end();
	address = end_address(&mine);
	tell(fd, &address, sizeof(address));
	CHECK(hear(fd, &theirs, sizeof(theirs)));
	attr.dest_qp_num = theirs.qpn;
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	meet(fd);
	meet(fd);
	hear(fd, &mark, 1);
	end_close(&mine);
}

static struct other with_server(void (*serve)(int fd))
{
	struct other other = spawn(serve);

	open_end();
	theirs = connect_over(&mine, other.fd);
	meet(other.fd);
	return other;
}

static struct other with_impatience(void (*serve)(int fd))
{
	struct ibv_qp_attr attr = default_attr(0);
	struct other other = spawn(serve);

	attr.timeout = SHORT_TIMEOUT;
	open_end();
	theirs = connect_over_with(&mine, other.fd, attr);
	meet(other.fd);
	return other;
}

static void part(struct other *other)
{
	end_close(&mine);
	join(other);
	expect_live_nothing();
}

/* --- operations ------------------------------------------------------------------------------------------- */

static void all_operations(void)
{
	struct other other = with_server(serve_until_told);
	uint64_t value;

	CHECK_EQ(rdmanet_soft_qp_way(mine.qp), RDMANET_SOFT_WAY_STREAM);
	for (uint32_t i = 0; i < BUFFER; i++)
		mine.buffer[i] = i * 7 + (i >> 10);
	/* Cut into frames, there and back. */
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, BUFFER / 2, theirs.buffer + 100, theirs.rkey), 0);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_READ, 2, BUFFER / 2, BUFFER / 2, theirs.buffer + 100, theirs.rkey), 0);
	CHECK_EQ(post_send(&mine, 3, 0, 1000), 0);
	CHECK_EQ(post_send(&mine, 4, 0, 0), 0);
	for (int i = 1; i <= 4; i++)
		expect(mine.cq, i, IBV_WC_SUCCESS);
	CHECK(!memcmp(mine.buffer, mine.buffer + BUFFER / 2, BUFFER / 2));
	value = 5;
	memcpy(mine.buffer, &value, sizeof(value));
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 5, 0, 8, theirs.buffer + 64, theirs.rkey), 0);
	CHECK_EQ(post(&mine,
		      (struct ibv_send_wr){.wr_id = 6,
					   .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = theirs.buffer + 64, .rkey = theirs.rkey, .compare_add = 7}},
		      0, 8),
		 0);
	CHECK_EQ(post(&mine,
		      (struct ibv_send_wr){.wr_id = 7,
					   .opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = theirs.buffer + 64, .rkey = theirs.rkey, .compare_add = 12, .swap = 99}},
		      8, 8),
		 0);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_READ, 8, 16, 8, theirs.buffer + 64, theirs.rkey), 0);
	for (int i = 5; i <= 8; i++)
		expect(mine.cq, i, IBV_WC_SUCCESS);
	for (int i = 0; i < 3; i++) {
		memcpy(&value, mine.buffer + i * 8, sizeof(value));
		CHECK_EQ(value, i == 0 ? 5 : i == 1 ? 12 : 99);
	}
	tell(other.fd, "m", 1);
	part(&other);
}

enum { READS = 8 };

static struct ibv_qp_attr many_reads(void)
{
	struct ibv_qp_attr attr = default_attr(0);

	attr.timeout = 14;
	attr.max_rd_atomic = attr.max_dest_rd_atomic = READS;
	return attr;
}

static void serve_many_reads(int fd)
{
	char mark;

	open_end();
	theirs = connect_over_with(&mine, fd, many_reads());
	meet(fd);
	hear(fd, &mark, 1);
	end_close(&mine);
}

/* As much as a stream is allowed in one turn, and more behind it that has come along already: it isn't forgotten when
 * no byte arrives after that.  The other end never polls. */
static void more_than_a_turn(void)
{
	enum { CHUNK = BUFFER / 4 };
	struct other other = spawn(serve_many_reads);

	open_end();
	theirs = connect_over_with(&mine, other.fd, many_reads());
	meet(other.fd);
	for (int round = 0; round < 50; round++) {
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, BUFFER, theirs.buffer, theirs.rkey), 0);
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
		expect(mine.cq, 1, IBV_WC_SUCCESS);
		expect(mine.cq, 2, IBV_WC_SUCCESS);
		for (int i = 0; i < READS; i++)
			CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_READ, i, i % 4 * CHUNK, CHUNK, theirs.buffer, theirs.rkey), 0);
		for (int i = 0; i < READS; i++)
			expect(mine.cq, i, IBV_WC_SUCCESS);
		/* And in what the requester reads. */
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_READ, 1, 0, BUFFER, theirs.buffer, theirs.rkey), 0);
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_READ, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
		CHECK_EQ(ibv_req_notify_cq(mine.cq, 0), 0);
		for (int i = 1; i <= 2; i++)
			expect(mine.cq, i, IBV_WC_SUCCESS);
	}
	tell(other.fd, "m", 1);
	part(&other);
}

static void refused(enum ibv_wr_opcode opcode, uint32_t length, uint32_t wrong_key, enum ibv_wc_status status)
{
	struct other other = with_server(serve_until_told);

	/* What is behind it is flushed. */
	CHECK_EQ(post_rdma(&mine, opcode, 1, 0, length, theirs.buffer, theirs.rkey ^ wrong_key), 0);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
	expect(mine.cq, 1, status);
	expect(mine.cq, 2, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(mine.qp), IBV_QPS_ERR);
	tell(other.fd, "m", 1);
	part(&other);
}

static void refusals(void)
{
	refused(IBV_WR_RDMA_WRITE, 8, 0x100, IBV_WC_REM_ACCESS_ERR);
	refused(IBV_WR_RDMA_WRITE, BUFFER, 0x100, IBV_WC_REM_ACCESS_ERR);
	refused(IBV_WR_RDMA_READ, 8, 0x100, IBV_WC_REM_ACCESS_ERR);
	refused(IBV_WR_RDMA_READ, BUFFER, 0x100, IBV_WC_REM_ACCESS_ERR);
	refused(IBV_WR_SEND, 1001, 0, IBV_WC_REM_INV_REQ_ERR);
	refused(IBV_WR_SEND, BUFFER, 0, IBV_WC_REM_INV_REQ_ERR);
}

static void serve_late(int fd)
{
	char mark;

	open_end();
	theirs = connect_over(&mine, fd);
	meet(fd);
	CHECK(hear(fd, &mark, 1)); /* it has been told to wait */
	for (int i = 0; i < 20; i++) {
		usleep(i % 4 * 500);
		CHECK_EQ(post_recv(&mine, i, i * 40000, 40000), 0);
	}
	for (int i = 0; i < 20; i++) {
		expect(mine.cq, i, IBV_WC_SUCCESS);
		CHECK(mine.buffer[i * 40000] == i && mine.buffer[i * 40000 + 39999] == i);
	}
	meet(fd);
	end_close(&mine);
}

/* Many on their way, and no receive for them: they come again, in order. */
static void receives_come_late(void)
{
	struct other other = with_server(serve_late);
	struct rn_counters count;

	for (int i = 0; i < 20; i++) {
		memset(mine.buffer + i * 40000, i, 40000);
		CHECK_EQ(post_send(&mine, i, i * 40000, 40000), 0);
	}
	EVENTUALLY(!rdmanet_soft_qp_counters(mine.qp, &count) && count.rnr_naks >= 1);
	tell(other.fd, "m", 1);
	for (int i = 0; i < 20; i++)
		expect(mine.cq, i, IBV_WC_SUCCESS);
	meet(other.fd);
	part(&other);
}

static void serve_one_late(int fd)
{
	char mark;

	open_end();
	theirs = connect_over(&mine, fd);
	meet(fd);
	CHECK(hear(fd, &mark, 1));
	CHECK_EQ(post_recv(&mine, 1, 0, 64), 0);
	expect(mine.cq, 1, IBV_WC_SUCCESS);
	meet(fd);
	end_close(&mine);
}

/* The one behind it can't be sent: that is no fault of the first. */
static void a_receive_comes_late_for_who_is_before_a_bad_one(void)
{
	struct other other = with_server(serve_one_late);
	struct ibv_sge good_sge = sge_of(&mine, 0, 64), bad_sge = good_sge;
	struct ibv_send_wr *refused,
		bad = {.wr_id = 2, .sg_list = &bad_sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED},
		good = {.wr_id = 1, .sg_list = &good_sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
			.next = &bad};
	struct rn_counters count;

	bad_sge.lkey ^= 0x5a5a5a5a;
	CHECK_EQ(ibv_post_send(mine.qp, &good, &refused), 0);
	EVENTUALLY(!rdmanet_soft_qp_counters(mine.qp, &count) && count.rnr_naks >= 1);
	tell(other.fd, "m", 1);
	expect(mine.cq, 1, IBV_WC_SUCCESS);
	expect(mine.cq, 2, IBV_WC_LOC_PROT_ERR);
	meet(other.fd);
	part(&other);
}

/* --- ends ------------------------------------------------------------------------------------------------- */

static void killed_while_idle(void)
{
	struct other other = with_server(serve_until_told);

	CHECK_EQ(post_recv(&mine, 1, 0, 8), 0);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
	expect(mine.cq, 2, IBV_WC_SUCCESS);
	join_killed(&other);
	expect(mine.cq, 1, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(mine.qp), IBV_QPS_ERR);
	end_close(&mine);
	expect_live_nothing();
}

static void killed_under_load(void)
{
	for (int round = 0; round < 10; round++) {
		struct other other = with_server(serve_until_told);
		bool failed = false;
		int posted = 0;

		for (; posted < 40; posted++)
			CHECK_EQ(post_rdma(&mine, posted % 3 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, posted, 0, BUFFER,
					   theirs.buffer, theirs.rkey),
				 0);
		usleep(round * 300);
		kill(other.pid, SIGKILL);
		for (int i = 0; i < posted; i++) {
			struct ibv_wc wc = poll_one(mine.cq);

			CHECK_EQ(wc.wr_id, i);
			CHECK_EQ(wc.status, failed ? IBV_WC_WR_FLUSH_ERR
				 : wc.status == IBV_WC_SUCCESS ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR);
			failed |= wc.status != IBV_WC_SUCCESS;
		}
		join_killed(&other);
		end_close(&mine);
	}
	expect_live_nothing();
}

/* The last answer in the socket, unread: up to which request it acknowledges; 0 without one. */
static uint32_t acknowledged_unread(struct rn_qp *qp)
{
	struct rn_tcp_answer answers[64];
	ssize_t got = recv(qp->tcp->out->source.fd, answers, sizeof(answers), MSG_PEEK | MSG_DONTWAIT);

	return got < (ssize_t)sizeof(*answers) ? 0 : answers[got / (ssize_t)sizeof(*answers) - 1].serial;
}

static void fail_with_answers_unread(void (*serve)(int fd))
{
	enum { MANY = 20 };
	struct other other = with_server(serve);
	struct rn_qp *qp = rn_qp(mine.qp);

	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 0, 0, 8, theirs.buffer, theirs.rkey), 0);
	expect(mine.cq, 0, IBV_WC_SUCCESS);
	kill(other.pid, SIGSTOP);
	CHECK_EQ(waitpid(other.pid, NULL, WUNTRACED), other.pid);
	for (int i = 0; i < MANY; i++)
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, i, 0, 8, theirs.buffer, theirs.rkey), 0);
	rn_lock(&qp->sq_lock);
	kill(other.pid, SIGCONT);
	EVENTUALLY(acknowledged_unread(qp) == qp->sq_posted);
	rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	rn_unlock(&qp->sq_lock);
	for (int i = 0; i < MANY; i++) {
		struct ibv_wc wc = poll_one(mine.cq);

		CHECK_EQ(wc.wr_id, i);
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	}
	CHECK_EQ(state_of(mine.qp), IBV_QPS_ERR);
	tell(other.fd, "m", 1);
	part(&other);
}

/* The queue pair fails while answers lie unread: what they acknowledge has succeeded, and is not behind a failure. */
static void none_succeeds_behind_a_failure(void)
{
	fail_with_answers_unread(serve_until_told);
	fail_with_answers_unread(serve_at_rtr);
}

/* Its queue pair has gone, in good order: silence, so who posts spends the retry budget. */
static void left_in_good_order(void)
{
	struct other other = with_impatience(serve_until_told);

	tell(other.fd, "m", 1);
	join(&other);
	CHECK_EQ(post_recv(&mine, 1, 0, 8), 0);
	expect_nothing(mine.cq);
	CHECK_EQ(state_of(mine.qp), IBV_QPS_RTS);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 2, 0, 8, theirs.buffer, theirs.rkey), 0);
	for (int i = 0; i < 2; i++) { /* of two queues: in any order */
		struct ibv_wc wc = poll_one(mine.cq);

		CHECK_EQ(wc.status, wc.wr_id == 2 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR);
	}
	end_close(&mine);
	expect_live_nothing();
}

/* A stopped peer holds up its own queue pair, and it only until it goes on. */
static void stopped(void)
{
	struct other other = spawn(serve_until_told), second = spawn(serve_until_told);
	struct address at_first;
	struct end first;

	open_end();
	at_first = connect_over(&mine, other.fd);
	meet(other.fd);
	first = mine;
	open_end();
	theirs = connect_over(&mine, second.fd);
	meet(second.fd);
	kill(other.pid, SIGSTOP);
	for (int i = 0; i < 20; i++)
		CHECK_EQ(post_rdma(&first, IBV_WR_RDMA_WRITE, i, 0, BUFFER, at_first.buffer, at_first.rkey), 0);
	for (int i = 0; i < 200; i++) {
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, i, 0, 1000, theirs.buffer, theirs.rkey), 0);
		expect(mine.cq, i, IBV_WC_SUCCESS);
	}
	CHECK_EQ(state_of(first.qp), IBV_QPS_RTS);
	kill(other.pid, SIGCONT);
	for (int i = 0; i < 20; i++)
		expect(first.cq, i, IBV_WC_SUCCESS);
	tell(other.fd, "m", 1);
	tell(second.fd, "m", 1);
	end_close(&first);
	join(&other);
	part(&second);
}

static void serve_and_withdraw(int fd)
{
	open_end();
	theirs = connect_over(&mine, fd);
	meet(fd);
	usleep(3000);
	CHECK_EQ(ibv_dereg_mr(mine.mr), 0);
	mine.mr = NULL;
	/* From here on nobody writes there. */
	memset(mine.buffer, 'z', BUFFER);
	meet(fd);
	for (int i = 0; i < BUFFER; i++)
		CHECK(mine.buffer[i] == 'z');
	end_close(&mine);
}

static void withdrawn_under_load(void)
{
	struct other other = with_server(serve_and_withdraw);
	enum ibv_wc_status status;
	struct ibv_wc wc;

	memset(mine.buffer, 'a', BUFFER);
	do {
		CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, BUFFER, theirs.buffer, theirs.rkey), 0);
		wc = poll_one(mine.cq);
		status = wc.status;
	} while (status == IBV_WC_SUCCESS);
	CHECK_EQ(status, IBV_WC_REM_ACCESS_ERR);
	meet(other.fd);
	part(&other);
}

/* --- who may come ------------------------------------------------------------------------------------------- */

static void serve_as_another(int fd)
{
	CHECK_EQ(setgid(65534), 0);
	CHECK_EQ(setuid(65534), 0);
	serve_until_told(fd);
}

/* Its memory can't be mapped: so it is reached by stream, without being told to. */
static void another_user(void)
{
	struct other other;

	if (getuid()) {
		printf("  not run: only root can become another user\n");
		return;
	}
	setenv("RDMANET_SOFT_TRANSPORT", "auto", 1);
	other = with_server(serve_as_another);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, 1000, theirs.buffer, theirs.rkey), 0);
	expect(mine.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(rdmanet_soft_qp_way(mine.qp), RDMANET_SOFT_WAY_STREAM);
	tell(other.fd, "m", 1);
	part(&other);

	other = with_server(serve_until_told);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, 1000, theirs.buffer, theirs.rkey), 0);
	expect(mine.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(rdmanet_soft_qp_way(mine.qp), RDMANET_SOFT_WAY_MAPPED);
	tell(other.fd, "m", 1);
	part(&other);
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
}

#define SECRET "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
#define WRONG "10112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

static void set_secret(const char *secret)
{
	if (secret[0])
		setenv("RDMANET_SOFT_SECRET", secret, 1);
}

static int lines_of_log(void)
{
	int ends[2];

	CHECK(!pipe2(ends, O_NONBLOCK | O_CLOEXEC | O_DIRECT));
	rdmanet_soft_log_to(ends[1]);
	return ends[0];
}

/* This end says it too, whichever of the two noticed it first. */
static void expect_to_be_warned(int lines)
{
	struct pollfd log = {.fd = lines, .events = POLLIN};
	char line[512];
	ssize_t length;

	CHECK_EQ(poll(&log, 1, LIMIT_MS), 1);
	length = read(lines, line, sizeof(line) - 1);
	CHECK(length > 0);
	line[length] = 0;
	CHECK(strstr(line, "127.0.0.1") && (strstr(line, "secret") || strstr(line, "RDMANET_SOFT_SECRET")));
}

static void serve_with_its_secret(int fd)
{
	char secret[sizeof(SECRET)], is_same;
	int lines = lines_of_log();

	CHECK(hear(fd, &is_same, 1) && hear(fd, secret, sizeof(secret)));
	set_secret(secret);
	serve_until_told(fd);
	if (!is_same)
		expect_to_be_warned(lines);
}

/* A process has one secret for life: so each of the two is made for the occasion. */
static void try_secret(const char *ours, const char *its, enum ibv_wc_status expected)
{
	struct other other = spawn(serve_with_its_secret);
	struct ibv_qp_attr attr = default_attr(0);
	char secret[sizeof(SECRET)] = {0}, is_same = expected == IBV_WC_SUCCESS;
	int lines = lines_of_log();
	struct ibv_wc wc;

	strcpy(secret, its);
	tell(other.fd, &is_same, 1);
	tell(other.fd, secret, sizeof(secret));
	set_secret(ours);
	attr.timeout = 0; /* no retry budget ends it */
	open_end();
	theirs = connect_over_with(&mine, other.fd, attr);
	meet(other.fd);
	CHECK_EQ(post_rdma(&mine, IBV_WR_RDMA_WRITE, 1, 0, 1000, theirs.buffer, theirs.rkey), 0);
	wc = poll_one(mine.cq);
	/* A queue pair that has learnt it before the request was posted is in ERR, and flushes it. */
	CHECK(wc.wr_id == 1 && (wc.status == expected || (!is_same && wc.status == IBV_WC_WR_FLUSH_ERR)));
	if (!is_same) {
		CHECK_EQ(state_of(mine.qp), IBV_QPS_ERR);
		expect_to_be_warned(lines);
	}
	tell(other.fd, "m", 1);
	part(&other);
}

static void same_secret(int fd)
{
	try_secret(SECRET, SECRET, IBV_WC_SUCCESS);
	meet(fd);
}

static void another_secret(int fd)
{
	try_secret(SECRET, WRONG, IBV_WC_REM_ABORT_ERR);
	meet(fd);
}

static void secret_only_there(int fd)
{
	try_secret("", SECRET, IBV_WC_REM_ABORT_ERR);
	meet(fd);
}

static void secret_only_here(int fd)
{
	try_secret(SECRET, "", IBV_WC_REM_ABORT_ERR);
	meet(fd);
}

static void secrets(void)
{
	static void (*const cases[])(int fd) = {same_secret, another_secret, secret_only_there, secret_only_here};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct other other = spawn(cases[i]);

		meet(other.fd);
		join(&other);
	}
}

/* --- strangers and liars -------------------------------------------------------------------------------------- */

static int knock(uint32_t qpn)
{
	struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(qpn >> 8), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&to, sizeof(to)));
	return fd;
}

/* The other end has closed, whatever it said before. */
static void expect_end(int fd)
{
	char bytes[4096];
	ssize_t got;

	while ((got = recv(fd, bytes, sizeof(bytes), 0)) > 0)
		;
	CHECK(!got || errno == ECONNRESET);
	close(fd);
}

static void say(int fd, const void *data, size_t size)
{
	CHECK_EQ(send(fd, data, size, MSG_NOSIGNAL), (ssize_t)size);
}

/* A queue pair of ours in RTR, and whoever comes claims to be its peer. */
static void open_victim(void)
{
	struct ibv_qp_attr attr = default_attr(0xabcd01);

	open_end();
	memset(mine.buffer, 'v', BUFFER);
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(post_recv(&mine, 1, 0, 64), 0);
}

static int introduce(void)
{
	struct rn_tcp_hello hello = {.magic = RN_TCP_MAGIC,
				      .version = RN_WIRE_VERSION,
				      .source_qpn = 0xabcd01,
				      .dest_qpn = mine.qp->qp_num,
				      .psn = 17};
	struct rn_tcp_greeting greeting;
	int fd = knock(mine.qp->qp_num);

	say(fd, &hello, sizeof(hello));
	CHECK_EQ(recv(fd, &greeting, sizeof(greeting), MSG_WAITALL), (ssize_t)sizeof(greeting));
	CHECK_EQ(greeting.kind, RN_GREETING_WELCOME);
	return fd;
}

static void strangers(void)
{
	struct rn_tcp_hello hello = {.magic = RN_TCP_MAGIC, .version = RN_WIRE_VERSION, .psn = 17};
	char noise[200];
	int silent, fd;

	setenv("RDMANET_SOFT_SILENCE", "300", 1);
	open_victim();
	silent = knock(mine.qp->qp_num);
	memset(noise, 'n', sizeof(noise));
	fd = knock(mine.qp->qp_num);
	say(fd, noise, sizeof(noise));
	expect_end(fd);
	/* For nobody; from somebody else; with another number to begin with. */
	for (int i = 0; i < 3; i++) {
		hello.dest_qpn = i == 0 ? mine.qp->qp_num ^ 1 : mine.qp->qp_num;
		hello.source_qpn = i == 1 ? 0xabcd02 : 0xabcd01;
		hello.psn = i == 2 ? 18 : 17;
		fd = knock(mine.qp->qp_num);
		say(fd, &hello, sizeof(hello));
		expect_end(fd);
	}
	expect_end(silent);
	expect_nothing(mine.cq);
	CHECK_EQ(state_of(mine.qp), IBV_QPS_RTR);
	unsetenv("RDMANET_SOFT_SILENCE");
	end_close(&mine);
	expect_live_nothing();
}

static void lie(struct rn_tcp_frame frame, bool is_answered)
{
	struct rn_tcp_answer answer;
	char payload[64] = "never to be seen";
	int fd;

	open_victim();
	fd = introduce();
	frame.rkey = frame.rkey ? mine.mr->rkey : 0;
	frame.addr += (uintptr_t)mine.buffer;
	say(fd, &frame, sizeof(frame));
	send(fd, payload, sizeof(payload), MSG_NOSIGNAL);
	if (is_answered) {
		CHECK_EQ(recv(fd, &answer, sizeof(answer), MSG_WAITALL), (ssize_t)sizeof(answer));
		CHECK_EQ(answer.kind, RN_ANSWER_NAK);
	}
	expect(mine.cq, 1, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(mine.qp), IBV_QPS_ERR);
	shutdown(fd, SHUT_WR);
	expect_end(fd);
	for (int i = 0; i < BUFFER; i++)
		CHECK(mine.buffer[i] == 'v');
	end_close(&mine);
}

/* Each field, out of its bounds: the queue pair is in ERR, and memory is as it was. */
static void liars(void)
{
	enum { SEND = RN_FRAME_SEND, WRITE = RN_FRAME_WRITE };
	const struct rn_tcp_frame breaking[] = {
		{.kind = 0, .length = 64, .total = 64},
		{.kind = RN_FRAME_KINDS, .length = 64, .total = 64},
		{.kind = 255, .length = 64, .total = 64},
		{.kind = SEND, .flags = 0x80, .length = 64, .total = 64},
		{.kind = SEND, .length = 64, .total = 63},
		{.kind = SEND, .length = UINT32_MAX, .total = UINT32_MAX},
		{.kind = SEND, .length = 64, .total = UINT32_MAX},
		{.kind = SEND, .length = 0, .total = 64},
		{.kind = SEND, .offset = 64, .length = 64, .total = 128},
		{.kind = SEND, .offset = UINT32_MAX, .length = 64, .total = 64},
		{.kind = SEND, .offset = 65, .length = 64, .total = 64},
		{.kind = SEND, .serial = 1, .length = 64, .total = 64},
		{.kind = SEND, .serial = 3, .skipped = 2, .length = 64, .total = 64},
		{.kind = SEND, .serial = -1, .skipped = 2, .length = 64, .total = 64},
		{.kind = SEND, .ack = 1, .length = 64, .total = 64},
		{.kind = WRITE, .rkey = 1, .length = RN_FRAME_BYTES + 1, .total = RN_FRAME_BYTES + 1},
		{.kind = RN_FRAME_READ, .rkey = 1, .length = 64, .total = 64},
		{.kind = RN_FRAME_READ, .rkey = 1, .total = UINT32_MAX},
		{.kind = RN_FRAME_SWAP, .rkey = 1, .total = 16},
		{.kind = RN_FRAME_ADD, .rkey = 1, .total = 7},
		{.kind = RN_FRAME_NOTHING, .length = 64, .total = 64},
		{.kind = RN_FRAME_REFUSED, .imm = IBV_WC_REM_OP_ERR, .length = 64, .total = 64},
		{.kind = RN_FRAME_REFUSED, .imm = IBV_WC_SUCCESS},
		{.kind = RN_FRAME_REFUSED, .imm = IBV_WC_REM_OP_ERR + 256},
	};
	const struct rn_tcp_frame refused[] = {
		{.kind = WRITE, .length = 64, .total = 64},
		{.kind = WRITE, .rkey = 1, .addr = BUFFER - 63, .length = 64, .total = 64},
		{.kind = WRITE, .rkey = 1, .addr = -1ull, .length = 64, .total = 64},
		{.kind = WRITE, .rkey = 1, .addr = UINT64_MAX - 100, .length = 64, .total = 64},
		{.kind = RN_FRAME_READ, .rkey = 1, .addr = BUFFER, .total = 1},
		{.kind = RN_FRAME_READ, .rkey = 1, .total = BUFFER + 1},
		{.kind = RN_FRAME_SWAP, .rkey = 1, .addr = 4, .total = 8},
		{.kind = RN_FRAME_ADD, .rkey = 1, .addr = BUFFER, .total = 8},
		{.kind = RN_FRAME_SEND_INV, .imm = 12345, .length = 64, .total = 64},
		{.kind = RN_FRAME_REFUSED, .imm = IBV_WC_REM_INV_REQ_ERR},
	};

	for (size_t i = 0; i < sizeof(breaking) / sizeof(breaking[0]); i++)
		lie(breaking[i], false);
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
		lie(refused[i], true);
	expect_live_nothing();
}

/* Cut off anywhere in the midst of a message: no completion of it is seen. */
static void cut_off(void)
{
	struct rn_tcp_frame frame = {.kind = RN_FRAME_SEND, .length = 64, .total = 64};
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE};
	char bytes[sizeof(frame) + 64];

	memset(bytes, 'c', sizeof(bytes));
	memcpy(bytes, &frame, sizeof(frame));
	for (size_t length = 0; length < sizeof(bytes); length += 21) {
		int fd;

		open_victim();
		fd = introduce();
		say(fd, &here, sizeof(here));
		say(fd, bytes, length);
		shutdown(fd, SHUT_WR);
		expect(mine.cq, 1, IBV_WC_WR_FLUSH_ERR);
		expect_end(fd);
		end_close(&mine);
	}
	expect_live_nothing();
}

/* --- the engine alone -------------------------------------------------------------------------------------- */

/* More than it looks at in one go, and a tail that it has read by then: nobody polls, and nothing comes behind it
 * that would wake it. */
static void goes_on_by_itself(void)
{
	enum { ROUNDS = 60, LARGE = 5, SMALL = 50 };
	struct timeval patience = {.tv_sec = 20};
	static char large[sizeof(struct rn_tcp_frame) + RN_FRAME_BYTES];
	static char small[SMALL * (sizeof(struct rn_tcp_frame) + 8)];
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE}, frame;
	struct rn_tcp_answer answer = {0};
	uint32_t serial = 0;
	int fd;

	open_victim();
	fd = introduce();
	CHECK(!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)));
	say(fd, &here, sizeof(here));
	for (int round = 0; round < ROUNDS; round++) {
		frame = (struct rn_tcp_frame){
			.kind = RN_FRAME_WRITE, .rkey = mine.mr->rkey, .addr = (uintptr_t)mine.buffer};
		for (int i = 0; i < LARGE; i++) {
			frame.serial = serial++;
			frame.length = frame.total = RN_FRAME_BYTES - round;
			memcpy(large, &frame, sizeof(frame));
			say(fd, large, sizeof(frame) + frame.length);
		}
		for (int i = 0; i < SMALL; i++) {
			frame.serial = serial++;
			frame.length = frame.total = 8;
			memcpy(small + i * (sizeof(frame) + 8), &frame, sizeof(frame));
		}
		say(fd, small, sizeof(small));
		while (answer.serial != serial) {
			CHECK_EQ(recv(fd, &answer, sizeof(answer), MSG_WAITALL), (ssize_t)sizeof(answer));
			CHECK_EQ(answer.kind, RN_ANSWER_ACK);
		}
	}
	close(fd);
	expect(mine.cq, 1, IBV_WC_WR_FLUSH_ERR);
	end_close(&mine);
	expect_live_nothing();
}

/* Kept from its work while a connection is made, for longer than the request waits for a host: but the host has
 * answered, TCP says so. */
static void engine_is_late(void)
{
	struct ibv_qp_attr attr;
	bool is_over = false;
	struct rn_qp *qp;
	struct end peer;

	open_end();
	end_open(&peer, &(struct end_options){.memory = USER_MEMORY, .share = &mine});
	attr = default_attr(mine.qp->qp_num);
	attr.timeout = SHORT_TIMEOUT;
	connect_with(peer.qp, attr);
	CHECK_EQ(post_recv(&peer, 1, 0, 8), 0);
	attr = default_attr(peer.qp->qp_num);
	attr.timeout = SHORT_TIMEOUT;
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	qp = rn_qp(mine.qp);
	pthread_mutex_lock(&rn_process_lock); /* whom a stranger wants can't be looked up meanwhile */
	CHECK_EQ(to_state(mine.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	CHECK_EQ(post_send(&mine, 2, 0, 8), 0);
	while (!is_over) {
		rn_lock(&qp->sq_lock);
		is_over = rn_sq_has_waited(qp, RN_WAIT_LINK);
		rn_unlock(&qp->sq_lock);
		usleep(1000);
	}
	pthread_mutex_unlock(&rn_process_lock);
	expect(mine.cq, 2, IBV_WC_SUCCESS);
	expect(peer.cq, 1, IBV_WC_SUCCESS);
	end_close(&peer);
	end_close(&mine);
	expect_live_nothing();
}

/* The kernel chooses the port to connect from: here it can only be the one to connect to. */
static void not_to_itself(void)
{
	struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(40000),
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct ibv_qp_attr attr = default_attr(40000 << 8);
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	write_to("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001");
	open_end();
	attr.timeout = SHORT_TIMEOUT;
	connect_with(mine.qp, attr);
	CHECK_EQ(post_send(&mine, 1, 0, 8), 0);
	expect(mine.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK_EQ(bind(fd, (struct sockaddr *)&there, sizeof(there)), 0); /* nothing of it is left */
	close(fd);
	end_close(&mine);
	expect_live_nothing();
}

static void *arm(void *cq)
{
	CHECK_EQ(ibv_req_notify_cq(cq, 0), 0);
	return NULL;
}

/* Who has a send lock may have the lock of any CQ's list, also while somebody arms the CQ and wants that very send
 * lock: two queue pairs whose CQs are crossed get in each other's way otherwise. */
static void armed_while_listed(void)
{
	struct rn_qp *qp;
	struct rn_cq *cq;
	pthread_t armer;
	bool has_begun = false;

	open_end();
	connect_to(mine.qp, 12345 << 8);
	qp = rn_qp(mine.qp);
	cq = rn_cq(mine.cq);
	rn_lock(&qp->sq_lock);
	CHECK_EQ(pthread_create(&armer, NULL, arm, mine.cq), 0);
	while (!has_begun) {
		rn_lock(&cq->tcp_lock);
		has_begun = cq->tcp_round;
		rn_unlock(&cq->tcp_lock);
		sched_yield();
	}
	rn_lock(&cq->tcp_lock);
	rn_unlock(&cq->tcp_lock);
	rn_unlock(&qp->sq_lock);
	pthread_join(armer, NULL);
	end_close(&mine);
	expect_live_nothing();
}

int main(void)
{
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	RUN(all_operations);
	RUN(more_than_a_turn);
	RUN(refusals);
	RUN(receives_come_late);
	RUN(a_receive_comes_late_for_who_is_before_a_bad_one);
	RUN(killed_while_idle);
	RUN(killed_under_load);
	RUN(none_succeeds_behind_a_failure);
	RUN(left_in_good_order);
	RUN(stopped);
	RUN(withdrawn_under_load);
	RUN(another_user);
	RUN(secrets);
	RUN(strangers);
	RUN(liars);
	RUN(cut_off);
	RUN(goes_on_by_itself);
	RUN(engine_is_late);
	RUN(armed_while_listed);
	RUN_IN_NETWORK(not_to_itself);
	return 0;
}
