/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that lack what they need to reach each other's memory: room in their address space, descriptors, or the
 * time to answer.  It costs the way that the bytes go, never the link, a message or an event.
 */
#include "processes.h"

#include <sys/resource.h>

enum { MAPPED = 256 << 20, SLACK = 64 << 20 };

static struct end a;
static struct address b;

/* --- having too little ----------------------------------------------------------------------------------- */

static struct rlimit limit_to(int resource, rlim_t soft)
{
	struct rlimit before, now;

	CHECK_EQ(getrlimit(resource, &before), 0);
	now = before;
	now.rlim_cur = soft;
	CHECK_EQ(setrlimit(resource, &now), 0);
	return before;
}

static void restore(int resource, struct rlimit before)
{
	CHECK_EQ(setrlimit(resource, &before), 0);
}

/* Room for stacks and the like, but neither for an arena nor for a large segment. */
static struct rlimit without_room(void)
{
	FILE *file = fopen("/proc/self/statm", "re");
	unsigned long pages;

	CHECK(file && fscanf(file, "%lu", &pages) == 1);
	fclose(file);
	return limit_to(RLIMIT_AS, pages * 4096 + SLACK);
}

static struct rlimit without_descriptors(void)
{
	int lowest = fcntl(0, F_DUPFD_CLOEXEC, 0);

	CHECK(lowest > 0);
	close(lowest);
	return limit_to(RLIMIT_NOFILE, lowest);
}

/* --- the other process ------------------------------------------------------------------------------------ */

static bool server_lacks_descriptors;

/* Memory of the device's, large, and events: each message is waited for by the channel, and answered. */
static void serve(int fd)
{
	struct end end;
	struct address mine, theirs;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	char *memory, more;
	void *context;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	mr = make_memory(end.pd, DEVICE_MEMORY, MAPPED, &memory);
	mine = (struct address){.qpn = end.qp->qp_num, .rkey = mr->rkey, .buffer = (uintptr_t)memory};
	tell(fd, &mine, sizeof(mine));
	CHECK(hear(fd, &theirs, sizeof(theirs)));
	to_init(end.qp);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&end, 1, 0, 64), 0);
	connect_to(end.qp, theirs.qpn);
	EVENTUALLY(rdmanet_soft_qp_way(end.qp) == RDMANET_SOFT_WAY_MAPPED);
	meet(fd);
	expect(end.cq, 1, IBV_WC_SUCCESS); /* the first message: the link is there */
	if (server_lacks_descriptors)
		without_descriptors();
	CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
	meet(fd);
	while (hear(fd, &more, 1) && more) {
		CHECK(readable(end.channel->fd, LIMIT_MS));
		CHECK_EQ(ibv_get_cq_event(end.channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
		CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
		expect(end.cq, 1, IBV_WC_SUCCESS);
		CHECK_EQ(post_send(&end, 2, 0, 16), 0);
		expect(end.cq, 2, IBV_WC_SUCCESS);
		tell(fd, &(int){rdmanet_soft_qp_way(end.qp)}, sizeof(int));
		/* Our own completion has fired the channel: take it, and wait for the next message only. */
		CHECK(readable(end.channel->fd, LIMIT_MS));
		CHECK_EQ(ibv_get_cq_event(end.channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
		CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
		meet(fd);
	}
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	munmap(memory, MAPPED);
	end_close(&end);
}

static struct other begin(void)
{
	struct other other = spawn(serve);
	struct address mine;

	end_open(&a, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(a.qp);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&a, 9, 0, 64), 0);
	CHECK(hear(other.fd, &b, sizeof(b)));
	mine = end_address(&a);
	tell(other.fd, &mine, sizeof(mine));
	return other;
}

static void meet_it(struct other *other)
{
	connect_to(a.qp, b.qpn);
	meet(other->fd);
	CHECK_EQ(post_send(&a, 1, 0, 16), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	meet(other->fd);
}

/* Send to one who sleeps, and hear from it which way its answer went. */
static int ask(struct other *other)
{
	uint64_t sum = 0;
	char more = 1;
	int way;

	tell(other->fd, &more, 1);
	CHECK_EQ(post_send(&a, 1, 0, 16), 0);
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = poll_one(a.cq);

		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		sum += wc.wr_id;
	}
	CHECK_EQ(sum, 1 + 9); /* sent and answered, in any order */
	CHECK(hear(other->fd, &way, sizeof(way)));
	meet(other->fd);
	return way;
}

static void finish(struct other *other)
{
	char more = 0;

	tell(other->fd, &more, 1);
	end_close(&a);
	expect_live_nothing();
	join(other);
}

/* Into its memory and back, and an atomic: right, whichever way it goes. */
static void use_its_memory(void)
{
	struct ibv_send_wr add = {
		.wr_id = 3,
		.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.atomic = {.remote_addr = b.buffer + MAPPED - 8, .rkey = b.rkey, .compare_add = 5},
	};
	static uint64_t sum;

	for (int i = 0; i < 5000; i++)
		a.buffer[i] = (char)(i % 251);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 5000, b.buffer + 4096, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 8192, 5000, b.buffer + 4096, b.rkey), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK(!memcmp(a.buffer, a.buffer + 8192, 5000));
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, 8, b.buffer + MAPPED - 8, b.rkey), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	memcpy(&sum, a.buffer, 8);
	CHECK_EQ(post(&a, add, 0, 8), 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	CHECK_EQ(*(uint64_t *)a.buffer, sum);
	/* What the key doesn't cover is refused all the same; but that would be the end of the queue pair. */
}

/* --- the tests -------------------------------------------------------------------------------------------- */

/* It maps us, and we can't map it: our requests go by TCP, as it was told, and its answers through our memory. */
static void no_room_for_the_arena(void)
{
	struct other other = begin();
	struct rlimit before = without_room();

	meet_it(&other);
	CHECK_EQ(rdmanet_soft_qp_way(a.qp), RDMANET_SOFT_WAY_STREAM);
	CHECK_EQ(ask(&other), RDMANET_SOFT_WAY_MAPPED);
	use_its_memory();
	CHECK(!counted(&a).bytes_mapped && counted(&a).bytes_stream);
	restore(RLIMIT_AS, before);
	finish(&other);
}

/* Three tries, then the kernel copies, or its owner does; and one more try after a while. */
static void room_for_a_segment(bool has_cma)
{
	struct other other;
	struct rlimit before;

	if (!has_cma)
		setenv("RDMANET_SOFT_CMA", "0", 1);
	other = begin();
	meet_it(&other);
	before = without_room();
	use_its_memory();
	CHECK_EQ(counted(&a).bytes_mapped, 16); /* the message: into its small segment */
	CHECK(counted(&a).bytes_cma + counted(&a).bytes_engine >= 10000);
	CHECK(has_cma || !counted(&a).bytes_cma);
	restore(RLIMIT_AS, before);
	EVENTUALLY((use_its_memory(), counted(&a).bytes_mapped > 16));
	finish(&other);
	unsetenv("RDMANET_SOFT_CMA");
}

static void no_room_for_a_segment(void)
{
	room_for_a_segment(true);
}

static void no_room_and_no_cma(void)
{
	room_for_a_segment(false);
}

/* Neither segment nor channel arrive; those who sleep wake up nevertheless. */
static void no_descriptor_is_left_here(void)
{
	struct other other = begin();
	struct rlimit before;

	meet_it(&other);
	before = without_descriptors();
	for (int i = 0; i < 20; i++)
		CHECK_EQ(ask(&other), RDMANET_SOFT_WAY_MAPPED);
	use_its_memory();
	CHECK_EQ(rdmanet_soft_qp_way(a.qp), RDMANET_SOFT_WAY_MAPPED);
	restore(RLIMIT_NOFILE, before);
	EVENTUALLY((use_its_memory(), counted(&a).bytes_mapped > 10000));
	for (int i = 0; i < 20; i++)
		ask(&other);
	finish(&other);
}

static void no_descriptor_is_left_there(void)
{
	struct other other;

	server_lacks_descriptors = true;
	other = begin();
	server_lacks_descriptors = false;
	meet_it(&other);
	for (int i = 0; i < 20; i++)
		CHECK_EQ(ask(&other), RDMANET_SOFT_WAY_MAPPED);
	use_its_memory();
	CHECK_EQ(rdmanet_soft_qp_way(a.qp), RDMANET_SOFT_WAY_MAPPED);
	finish(&other);
}

/* It has us mapped, and is stopped when we come: our link fails, and so it can't be told of TCP. It is, later. */
static void no_time_to_answer(void)
{
	struct ibv_qp_attr attr;
	struct other other;

	setenv("RDMANET_SOFT_SILENCE", "300", 1);
	other = begin();
	meet(other.fd); /* its own link stands */
	kill(other.pid, SIGSTOP);
	CHECK_EQ(waitpid(other.pid, NULL, WUNTRACED), other.pid);
	attr = default_attr(b.qpn);
	attr.timeout = 21; /* 8 s */
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	EVENTUALLY(rdmanet_soft_qp_way(a.qp) == RDMANET_SOFT_WAY_STREAM);
	CHECK_EQ(post_send(&a, 1, 0, 16), 0);
	kill(other.pid, SIGCONT);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	meet(other.fd);
	CHECK_EQ(ask(&other), RDMANET_SOFT_WAY_MAPPED);
	finish(&other);
	unsetenv("RDMANET_SOFT_SILENCE");
}

int main(void)
{
	RUN(no_room_for_the_arena);
	RUN(no_room_for_a_segment);
	RUN(no_room_and_no_cma);
	RUN(no_descriptor_is_left_here);
	RUN(no_descriptor_is_left_there);
	RUN(no_time_to_answer);
	return 0;
}
