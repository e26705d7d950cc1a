/* SPDX-License-Identifier: Apache-2.0 */
/* Warnings: where they go, that nobody waits for whoever should read them, and that no text of a peer gets out. */
#include "processes.h"

#include "base/log.h"

static int reader = -1, writer = -1;

static void open_sink(void)
{
	int ends[2];

	CHECK(!pipe2(ends, O_NONBLOCK | O_CLOEXEC | O_DIRECT));
	reader = ends[0];
	writer = ends[1];
	rdmanet_soft_log_to(writer);
}

static void close_sink(void)
{
	rdmanet_soft_log_to(-1);
	close(reader);
	close(writer);
}

/* The next line; "" if there is none. */
static const char *next_line(void)
{
	static char line[4096];
	ssize_t length = read(reader, line, sizeof(line) - 1);

	line[length > 0 ? length : 0] = 0;
	return line;
}

/* Causes are limited one by one, so each test has one of its own. */
static void one_a_second_and_a_count(void)
{
	uint64_t began = now_ns() / 1000000000, lines = 0, left_out = 0, said = 0;
	const char *line;

	open_sink();
	while (lines < 3) {
		rn_warn(RN_WARN_KEY, "number %d", 1);
		said++;
		line = next_line();
		if (!line[0])
			continue;
		lines++;
		if (strstr(line, "(and ")) {
			left_out += strtoull(strstr(line, "(and ") + 5, NULL, 10);
			CHECK(strstr(line, " more of this kind)"));
		}
	}
	CHECK(now_ns() / 1000000000 >= began + 2);
	CHECK_EQ(lines + left_out, said);
	close_sink();
}

static void no_text_of_a_peer_gets_out(void)
{
	char expected[128] = "it said \\x1b[2J\\x0aCRITICAL root: hacked\\x7f\\xe2\\x80\\xae";

	open_sink();
	rn_warn(RN_WARN_LANGUAGE, "it said %s", "\x1b[2J\nCRITICAL root: hacked\x7f\u202e");
	CHECK(!strcmp(next_line(), expected));
	close_sink();
	open_sink();
	rn_warn(RN_WARN_NAME, "%s%0400d%0400d", "\n\n\n\n", 1, 2);
	CHECK(strlen(next_line()) < 512 && !strlen(next_line()));
	close_sink();
}

/* As long as nobody reads, nothing is waited for. */
static void a_full_pipe_stops_nobody(void)
{
	uint64_t began = now_ns();
	char byte = 'x';

	open_sink();
	while (write(writer, &byte, 1) == 1)
		;
	rn_warn(RN_WARN_LINK, "lost");
	while (next_line()[0])
		;
	while (now_ns() < began + 1100000000) /* into the next second, which has a line again */
		rn_warn(RN_WARN_LINK, "lost");
	CHECK(!strncmp(next_line(), "lost (and ", 10));
	close_sink();
}

/* Nor for who should read standard error. */
static void a_full_standard_error_stops_nobody(void)
{
	int ends[2], kept = dup(STDERR_FILENO);
	char byte = 'x';

	CHECK(!pipe2(ends, O_CLOEXEC) && dup2(ends[1], STDERR_FILENO) >= 0);
	CHECK(!fcntl(ends[1], F_SETFL, O_NONBLOCK));
	while (write(ends[1], &byte, 1) == 1)
		;
	CHECK(!fcntl(ends[1], F_SETFL, 0));
	rn_warn(RN_WARN_MAPPING, "lost");
	close(ends[0]);
	rn_warn(RN_WARN_SILENCE, "lost"); /* and nobody dies when the reader has gone */
	CHECK(dup2(kept, STDERR_FILENO) >= 0);
	close(kept);
	close(ends[1]);
}

static void in_child(int fd)
{
	int ends[2];
	char said[512];
	ssize_t length;

	CHECK(!pipe2(ends, O_CLOEXEC) && dup2(ends[1], STDERR_FILENO) >= 0);
	rn_warn(RN_WARN_ATTACH, "of the child");
	length = read(ends[0], said, sizeof(said) - 1);
	CHECK(length > 0);
	said[length] = 0;
	CHECK(!strcmp(said, "rdmanet soft0: of the child\n"));
	meet(fd);
}

static void a_child_does_not_write_to_its_parents(void)
{
	struct other child;

	open_sink();
	child = spawn(in_child);
	meet(child.fd);
	join(&child);
	CHECK(!next_line()[0]);
	rn_warn(RN_WARN_ATTACH, "of the parent");
	CHECK(!strcmp(next_line(), "of the parent"));
	close_sink();
}

/* What ENOMEM doesn't say: which of the device's limits it was. */
static const char *why_no_queue_pair(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	const char *line;

	do { /* one line a second */
		errno = 0;
		CHECK(!ibv_create_qp(pd, init) && errno == ENOMEM);
		line = next_line();
	} while (!line[0]);
	return line;
}

static void limits_are_named(void)
{
	enum { QPS = 16384, QPS_OF_A_CQ = 4096, QUEUES = QPS / QPS_OF_A_CQ + 1, CQS = 4096 };
	static struct ibv_qp *qps[QPS];
	static struct ibv_cq *cqs[CQS];
	struct ibv_context *context = open_soft();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1}};
	const char *line;

	open_sink();
	for (int i = 0; i < CQS; i++)
		CHECK((cqs[i] = ibv_create_cq(context, 1, NULL, NULL, 0)));
	for (int i = 0; i < QPS; i++) {
		init.send_cq = init.recv_cq = cqs[i / QPS_OF_A_CQ];
		CHECK((qps[i] = ibv_create_qp(pd, &init)));
		if (i == QPS_OF_A_CQ - 1)
			CHECK(strstr(why_no_queue_pair(pd, &init), "4096 already receive into its completion queue"));
	}
	init.send_cq = init.recv_cq = cqs[QUEUES - 1];
	CHECK(strstr(why_no_queue_pair(pd, &init), "already has 16384"));
	do {
		CHECK(!ibv_create_cq(context, 1, NULL, NULL, 0) && errno == ENOMEM);
		line = next_line();
	} while (!line[0]);
	CHECK(strstr(line, "already has 4096"));
	close_sink();
	for (int i = 0; i < QPS; i++)
		CHECK_EQ(ibv_destroy_qp(qps[i]), 0);
	for (int i = 0; i < CQS; i++)
		CHECK_EQ(ibv_destroy_cq(cqs[i]), 0);
	CHECK_EQ(ibv_dealloc_pd(pd), 0);
	CHECK_EQ(ibv_close_device(context), 0);
}

int main(void)
{
	RUN(one_a_second_and_a_count);
	RUN(no_text_of_a_peer_gets_out);
	RUN(a_full_pipe_stops_nobody);
	RUN(a_full_standard_error_stops_nobody);
	RUN(a_child_does_not_write_to_its_parents);
	RUN(limits_are_named);
	return 0;
}
