/* SPDX-License-Identifier: Apache-2.0 */
/* Two processes of one user: mapped memory, process_vm_*, the owner's engine, and deaths. */
#include "processes.h"

#include "soft.h"

static struct end a;
static struct address b;
static enum memory server_memory;

/* A server that does nothing but be there. */
static void serve_memory(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){.memory = server_memory});
	memset(end.buffer, 'b', BUFFER);
	connect_over(&end, fd);
	meet(fd); /* the client is done */
	end_close(&end);
	expect_live_nothing();
}

static struct other begin(void (*serve)(int), const struct end_options *options)
{
	struct other other = spawn(serve);

	end_open(&a, options);
	b = connect_over(&a, other.fd);
	return other;
}

static void finish(struct other *other)
{
	end_close(&a);
	expect_live_nothing();
	join(other);
}

/* --- one-sided ---------------------------------------------------------------------------------------- */

static uint64_t fetch_add(uint64_t remote, uint64_t add)
{
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = 3,
					   .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = remote, .rkey = b.rkey, .compare_add = add}},
		      0, 8),
		 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	return *(uint64_t *)a.buffer;
}

static uint64_t compare_swap(uint64_t remote, uint64_t compare, uint64_t swap)
{
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = 3,
					   .opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
					   .send_flags = IBV_SEND_SIGNALED,
					   .wr.atomic = {.remote_addr = remote,
							 .rkey = b.rkey,
							 .compare_add = compare,
							 .swap = swap}},
		      0, 8),
		 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	return *(uint64_t *)a.buffer;
}

static struct rn_counters one_sided(void)
{
	struct other other = begin(serve_memory, &(struct end_options){.memory = USER_MEMORY});
	static char copy[BUFFER];
	struct rn_counters count;

	for (int i = 0; i < BUFFER; i++)
		copy[i] = a.buffer[i] = i % 253;
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, BUFFER, b.buffer, b.rkey), 0);
	memset(copy + 100, 0, 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	memset(a.buffer, 0, BUFFER);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 2, 0, BUFFER, b.buffer, b.rkey), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK(!memcmp(a.buffer, copy, BUFFER));
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 100, 8, b.buffer + 8, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);

	memset(a.buffer, 0, 16);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 16, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(fetch_add(b.buffer + 8, 5), 0);
	CHECK_EQ(fetch_add(b.buffer + 8, 5), 5);
	CHECK_EQ(compare_swap(b.buffer + 8, 10, 1), 10);
	CHECK_EQ(compare_swap(b.buffer + 8, 10, 2), 1);
	count = counted(&a);
	meet(other.fd);
	finish(&other);
	return count;
}

static void test_device_memory(void)
{
	struct rn_counters count;

	server_memory = DEVICE_MEMORY;
	count = one_sided();
	CHECK(count.bytes_mapped >= 2 * BUFFER && !count.bytes_cma && !count.bytes_engine);
	CHECK_EQ(count.syscalls, 0);
}

static void post_part(enum ibv_wr_opcode opcode, uint64_t wr_id, size_t offset, uint32_t length, uint64_t remote)
{
	CHECK_EQ(post(&a,
		      (struct ibv_send_wr){.wr_id = wr_id,
					   .opcode = opcode,
					   .send_flags = IBV_SEND_SIGNALED | rdmanet_soft_send_of_much,
					   .wr.rdma = {.remote_addr = remote, .rkey = b.rkey}},
		      offset, length),
		 0);
	expect(a.cq, wr_id, IBV_WC_SUCCESS);
}

/* Parts of much, which are copied past the caches, with nothing on a line's edge. */
static void test_past_the_caches(void)
{
	struct other other;
	static char copy[BUFFER];

	server_memory = DEVICE_MEMORY;
	other = begin(serve_memory, &(struct end_options){0});
	for (int i = 0; i < BUFFER; i++)
		copy[i] = a.buffer[i] = i % 253;
	post_part(IBV_WR_RDMA_WRITE, 1, 3, BUFFER - 10, b.buffer + 5);
	memset(a.buffer, 'a', BUFFER);
	post_part(IBV_WR_RDMA_READ, 2, 1, BUFFER - 2, b.buffer + 1);
	CHECK(a.buffer[0] == 'a' && a.buffer[BUFFER - 1] == 'a');
	CHECK(a.buffer[1] == 'b' && a.buffer[4] == 'b' && a.buffer[BUFFER - 5] == 'b' && a.buffer[BUFFER - 2] == 'b');
	CHECK(!memcmp(a.buffer + 5, copy + 3, BUFFER - 10));
	meet(other.fd);
	finish(&other);
}

static void test_user_memory(void)
{
	struct rn_counters count;

	server_memory = USER_MEMORY;
	count = one_sided();
	CHECK(!count.bytes_mapped);
	if (!may_reach_others()) {
		printf("    by its engine only: process_vm_readv is refused here\n");
		CHECK(count.bytes_engine >= 2 * BUFFER && !count.bytes_cma);
		return;
	}
	CHECK(count.bytes_cma >= 2 * BUFFER);
	CHECK_EQ(count.bytes_engine, 4 * 8); /* atomics are the owner's */
}

static void test_without_cma(void)
{
	struct rn_counters count;

	server_memory = USER_MEMORY;
	setenv("RDMANET_SOFT_CMA", "0", 1);
	count = one_sided();
	CHECK(count.bytes_engine >= 2 * BUFFER && !count.bytes_mapped && !count.bytes_cma);
	unsetenv("RDMANET_SOFT_CMA");
}

static void test_remote_errors(void)
{
	struct other other;

	for (int user = 0; user < 2; user++) {
		server_memory = user ? USER_MEMORY : DEVICE_MEMORY;
		other = begin(serve_memory, &(struct end_options){0});
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, b.buffer + BUFFER - 4, b.rkey), 0);
		expect(a.cq, 1, IBV_WC_REM_ACCESS_ERR);
		meet(other.fd);
		finish(&other);
	}
}

/* --- what a program that polls its memory may rely on ------------------------------------------------------ */

enum { WATCHED = 4000, WATCHES = 2000 };

/* The last bytes of a WRITE are stored last: once they have changed, all of it is there. */
static void serve_watching(int fd)
{
	volatile uint64_t *last;
	struct address to;
	struct end end;

	end_open(&end, &(struct end_options){.memory = server_memory});
	memset(end.buffer, 0, BUFFER);
	last = (volatile uint64_t *)(end.buffer + WATCHED) - 1;
	to = connect_over(&end, fd);
	for (uint64_t i = 1; i <= WATCHES; i++) {
		uint64_t *all = (uint64_t *)end.buffer;

		for (unsigned spins = 0; *last != i; spins++)
			if (spins % 1024 == 1023)
				sched_yield();
		for (size_t word = 0; word < WATCHED / 8; word++)
			CHECK_EQ(all[word], i);
		/* One aligned word is one store: never half of it. */
		*(uint64_t *)(end.buffer + 8192) = i << 32 | i;
		CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, i, 8192, 8, to.buffer + 8192, to.rkey), 0);
		expect(end.cq, i, IBV_WC_SUCCESS);
	}
	meet(fd);
	end_close(&end);
}

static void test_write_order(void)
{
	struct other other;

	server_memory = DEVICE_MEMORY;
	other = begin(serve_watching, &(struct end_options){0});
	for (uint64_t i = 1; i <= WATCHES; i++) {
		volatile uint64_t *answer = (volatile uint64_t *)(a.buffer + 8192);

		for (size_t word = 0; word < WATCHED / 8; word++)
			((uint64_t *)a.buffer)[word] = i;
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, i, 0, WATCHED, b.buffer, b.rkey), 0);
		for (unsigned spins = 0; (uint32_t)*answer != i; spins++)
			if (spins % 1024 == 1023)
				sched_yield();
		CHECK_EQ(*answer, i << 32 | i);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
	meet(other.fd);
	finish(&other);
}

/* --- receive buffers with holes --------------------------------------------------------------------------- */

/* Receives into its whole address space: first into memory, then where there is none. */
static void serve_on_demand(int fd)
{
	char *memory = calloc(1, 10000);
	struct ibv_mr *all, *own;
	struct end end;

	end_open(&end, &(struct end_options){0});
	all = ibv_reg_mr(end.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	CHECK(all);
	own = end.mr;
	end.mr = all;
	to_init(end.qp);
	CHECK_EQ(post_recv(&end, 1, memory - end.buffer, 10000), 0);
	CHECK_EQ(post_recv(&end, 2, (char *)8192 - end.buffer, 64), 0);
	connect_over(&end, fd);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	CHECK(memory[0] == 'x' && memory[4999] == 'x');
	expect(end.cq, 2, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(ibv_dereg_mr(all), 0);
	end.mr = own;
	meet(fd);
	end_close(&end);
	free(memory);
}

static void test_on_demand_receives(void)
{
	for (int engine = 0; engine < 2; engine++) {
		struct other other;

		if (engine)
			setenv("RDMANET_SOFT_CMA", "0", 1);
		other = begin(serve_on_demand, &(struct end_options){0});
		memset(a.buffer, 'x', 5000);
		CHECK_EQ(post_send(&a, 1, 0, 5000), 0);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		CHECK_EQ(post_send(&a, 2, 0, 64), 0);
		expect(a.cq, 2, IBV_WC_REM_OP_ERR);
		meet(other.fd);
		finish(&other);
		unsetenv("RDMANET_SOFT_CMA");
	}
}

/* --- again and again ------------------------------------------------------------------------------------------ */

static void serve_many(int fd)
{
	for (int i = 0; i < 200; i++)
		serve_memory(fd);
}

static unsigned open_files(void)
{
	unsigned count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void test_open_and_close(void)
{
	struct other other;
	unsigned files = 0;

	server_memory = DEVICE_MEMORY;
	other = spawn(serve_many);
	for (int i = 0; i < 200; i++) {
		end_open(&a, &(struct end_options){0});
		b = connect_over(&a, other.fd);
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 64, b.buffer, b.rkey), 0);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		meet(other.fd);
		end_close(&a);
		expect_live_nothing();
		if (!i)
			files = open_files();
	}
	CHECK_EQ(open_files(), files);
	join(&other);
}

/* One device, many connections, memory that comes and goes: what is mapped here goes with it. */
static void serve_regions(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	for (int i = 0; i < 300; i++) {
		struct address address;
		struct ibv_mr *mr;
		char *memory;

		mr = make_memory(end.pd, DEVICE_MEMORY, 65536, &memory);
		address = (struct address){.rkey = mr->rkey, .buffer = (uintptr_t)memory};
		tell(fd, &address, sizeof(address));
		meet(fd);
		CHECK(!strcmp(memory + 60000, "there"));
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		munmap(memory, 65536);
	}
	meet(fd);
	end_close(&end);
}

static void test_regions_come_and_go(void)
{
	struct other other = begin(serve_regions, &(struct end_options){0});
	struct rn_live live;

	strcpy(a.buffer, "there");
	for (int i = 0; i < 300; i++) {
		CHECK(hear(other.fd, &b, sizeof(b)));
		CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 6, b.buffer + 60000, b.rkey), 0);
		expect(a.cq, 1, IBV_WC_SUCCESS);
		meet(other.fd);
	}
	meet(other.fd);
	usleep(20000);
	rdmanet_soft_live(&live);
	CHECK(live.mappings <= 4); /* our arena and segment, its arena; not 300 segments */
	finish(&other);
}

/* --- two-sided ------------------------------------------------------------------------------------------ */

enum { MESSAGES = 20000, DEPTH = 32 };
static uint32_t message_size = 64;

/* Send back whatever comes; sleeps on the channel when nothing does. */
static void serve_echo(int fd)
{
	struct end end;
	struct ibv_wc wc[16];
	struct ibv_cq *cq;
	void *context;
	bool gone = false;
	uint32_t echoed = 0;

	end_open(&end, &(struct end_options){.memory = server_memory, .cqe = 1024});
	to_init(end.qp);
	for (int i = 0; i < DEPTH; i++)
		CHECK_EQ(post_recv(&end, i, i * 8192, message_size), 0);
	connect_over(&end, fd);
	fcntl(end.channel->fd, F_SETFL, O_NONBLOCK);
	while (!gone) {
		struct pollfd wait[2] = {{.fd = end.channel->fd, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
		int got = 0, idle = 0;

		while (idle < 2) {
			got = ibv_poll_cq(end.cq, 16, wc);
			CHECK(got >= 0);
			for (int i = 0; i < got; i++) {
				if (wc[i].status != IBV_WC_SUCCESS)
					gone = true;
				if (wc[i].status != IBV_WC_SUCCESS || !(wc[i].opcode & IBV_WC_RECV))
					continue;
				CHECK_EQ(wc[i].byte_len, message_size);
				/* From the slot it came to, which is posted again: the client has read it by then. */
				CHECK_EQ(post(&end,
					      (struct ibv_send_wr){.opcode = IBV_WR_SEND,
								   .send_flags = ++echoed % 16 ? 0 : IBV_SEND_SIGNALED},
					      wc[i].wr_id * 8192, message_size),
					 0);
				CHECK_EQ(post_recv(&end, wc[i].wr_id, wc[i].wr_id * 8192, message_size), 0);
			}
			if (got)
				idle = 0;
			else if (!idle++)
				ibv_req_notify_cq(end.cq, 0);
		}
		if (gone)
			break;
		poll(wait, 2, -1);
		if (wait[1].revents)
			break;
		if (wait[0].revents && !ibv_get_cq_event(end.channel, &cq, &context))
			ibv_ack_cq_events(cq, 1);
	}
	end_close(&end);
	expect_live_nothing();
}

/* One message at a time, sleeping for the answer: every arming must have its event. */
static void ping_pong_asleep(int count)
{
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	for (int i = 0; i < count; i++) {
		int received = 0;

		*(int *)a.buffer = i;
		CHECK_EQ(post_recv(&a, i, 65536, message_size), 0);
		CHECK_EQ(post(&a, (struct ibv_send_wr){.opcode = IBV_WR_SEND, .send_flags = i % 16 ? 0 : IBV_SEND_SIGNALED}, 0,
			      message_size),
			 0);
		while (!received) {
			CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
			while (ibv_poll_cq(a.cq, 1, &wc) == 1) {
				CHECK_EQ(wc.status, IBV_WC_SUCCESS);
				received += wc.opcode == IBV_WC_RECV;
			}
			if (received)
				break;
			CHECK(readable(a.channel->fd, LIMIT_MS)); /* a lost wake-up ends here */
			CHECK_EQ(ibv_get_cq_event(a.channel, &cq, &context), 0);
			ibv_ack_cq_events(cq, 1);
		}
		CHECK_EQ(*(int *)(a.buffer + 65536), i);
	}
}

/* Many on their way, polling. */
static void stream(uint32_t count)
{
	uint32_t sent = 0, received = 0;
	struct ibv_wc wc[16];
	uint64_t limit = now_ns() + 60000000000ull;

	for (int i = 0; i < DEPTH; i++)
		CHECK_EQ(post_recv(&a, i, 524288 + i * 8192, message_size), 0);
	while (received < count) {
		int got;

		CHECK(now_ns() < limit);
		while (sent < count && sent - received < DEPTH / 2) {
			size_t at = (sent % DEPTH) * 8192;

			*(uint32_t *)(a.buffer + at) = sent;
			*(uint32_t *)(a.buffer + at + message_size - 4) = ~sent;
			CHECK_EQ(post(&a,
				      (struct ibv_send_wr){.opcode = IBV_WR_SEND,
							   .send_flags = sent % 8 ? 0 : IBV_SEND_SIGNALED},
				      at, message_size),
				 0);
			sent++;
		}
		got = ibv_poll_cq(a.cq, 16, wc);
		CHECK(got >= 0);
		if (!got)
			sched_yield();
		for (int i = 0; i < got; i++) {
			size_t at = 524288 + wc[i].wr_id * 8192;

			CHECK_EQ(wc[i].status, IBV_WC_SUCCESS);
			if (!(wc[i].opcode & IBV_WC_RECV))
				continue;
			CHECK_EQ(*(uint32_t *)(a.buffer + at), received);
			CHECK_EQ(*(uint32_t *)(a.buffer + at + message_size - 4), ~received);
			received++;
			CHECK_EQ(post_recv(&a, wc[i].wr_id, at, message_size), 0);
		}
	}
}

static void test_messages(void)
{
	struct other other;

	for (int user = 0; user < 2; user++) {
		server_memory = user ? USER_MEMORY : DEVICE_MEMORY;
		message_size = 64;
		other = begin(serve_echo, &(struct end_options){.memory = server_memory, .cqe = 1024});
		ping_pong_asleep(1000);
		finish(&other);
		other = begin(serve_echo, &(struct end_options){.memory = server_memory, .cqe = 1024});
		stream(MESSAGES);
		finish(&other);
	}
	message_size = 8000;
	server_memory = DEVICE_MEMORY;
	other = begin(serve_echo, &(struct end_options){.cqe = 1024});
	stream(MESSAGES / 4);
	finish(&other);
	message_size = 64;
}

static void test_messages_without_cma(void)
{
	struct other other;

	setenv("RDMANET_SOFT_CMA", "0", 1);
	server_memory = USER_MEMORY;
	message_size = 5000;
	other = begin(serve_echo, &(struct end_options){.memory = USER_MEMORY, .cqe = 1024});
	stream(MESSAGES / 40);
	finish(&other);
	message_size = 64;
	unsetenv("RDMANET_SOFT_CMA");
}

static void test_deferred(void)
{
	struct rn_counters count;
	struct other other;
	struct ibv_wc wc;

	/* Not before its time, which is long enough for what we do before: the buffer is read late. */
	setenv("RDMANET_SOFT_DEFER", "300000", 1);
	server_memory = DEVICE_MEMORY;
	other = begin(serve_echo, &(struct end_options){.cqe = 1024});
	strcpy(a.buffer, "early");
	CHECK_EQ(post_recv(&a, 1, 65536, message_size), 0);
	CHECK_EQ(post_send(&a, 2, 0, message_size), 0);
	strcpy(a.buffer, "late");
	CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	CHECK(!strcmp(a.buffer + 65536, "late"));
	finish(&other);
	setenv("RDMANET_SOFT_DEFER", "200", 1);
	other = begin(serve_echo, &(struct end_options){.cqe = 1024});
	stream(1000);
	count = counted(&a);
	CHECK_EQ(count.deferred, 1000);
	finish(&other);
	unsetenv("RDMANET_SOFT_DEFER");
}

/* --- receivers not ready, addresses that nobody has ------------------------------------------------------- */

static void serve_late(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	meet(fd); /* it has been told to wait */
	CHECK_EQ(post_recv(&end, 1, 0, 64), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	meet(fd);
	end_close(&end);
}

static void test_rnr(void)
{
	struct other other = begin(serve_late, &(struct end_options){0});
	struct rn_counters count;

	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	do {
		usleep(100);
		count = counted(&a);
	} while (!count.rnr_naks);
	expect_nothing(a.cq);
	meet(other.fd);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	meet(other.fd);
	finish(&other);
}

static void test_nobody(void)
{
	end_open(&a, &(struct end_options){0});
	connect_impatiently(a.qp, 2000 << 8 | 5);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	end_close(&a);
}

/* --- deaths ------------------------------------------------------------------------------------------------ */

static void serve_silence(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_recv(&end, i, 0, 64), 0);
	connect_over(&end, fd);
	pause();
}

/* Nothing on its way: receives are flushed, and who sleeps is woken. */
static void test_killed_while_idle(void)
{
	struct other other = begin(serve_silence, &(struct end_options){0});

	CHECK_EQ(post_recv(&a, 5, 0, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	CHECK_EQ(ibv_req_notify_cq(a.cq, 0), 0);
	join_killed(&other);
	CHECK(readable(a.channel->fd, LIMIT_MS));
	expect(a.cq, 5, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(post_send(&a, 2, 0, 64), 0);
	expect(a.cq, 2, IBV_WC_WR_FLUSH_ERR);
	{
		struct ibv_cq *cq;
		void *context;

		CHECK_EQ(ibv_get_cq_event(a.channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
	}
	end_close(&a);
	expect_live_nothing();
}

static void serve_and_go(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	end_close(&end);
}

/* It has closed in good order: as with an adapter, that is news only to who still wants something. */
static void test_closed_while_idle(void)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct other other = spawn(serve_and_go);

	attr.timeout = SHORT_TIMEOUT;
	end_open(&a, &(struct end_options){0});
	b = connect_over_with(&a, other.fd, attr);

	CHECK_EQ(post_recv(&a, 5, 0, 64), 0);
	join(&other);
	usleep(20000);
	expect_nothing(a.cq);
	CHECK_EQ(state_of(a.qp), IBV_QPS_RTS);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = poll_one(a.cq);

		CHECK_EQ(wc.status, wc.wr_id == 1 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR);
	}
	end_close(&a);
	expect_live_nothing();
}

/* Sends on their way: the first is RETRY_EXC_ERR, at once, not when its long budget ends. */
static void test_killed_while_waiting(void)
{
	struct other other = begin(serve_silence, &(struct end_options){0});

	for (int i = 0; i < 10; i++)
		CHECK_EQ(post_send(&a, i, 0, 64), 0); /* two more than it receives: RNR */
	for (int i = 0; i < 8; i++)
		expect(a.cq, i, IBV_WC_SUCCESS);
	join_killed(&other);
	expect(a.cq, 8, IBV_WC_RETRY_EXC_ERR);
	expect(a.cq, 9, IBV_WC_WR_FLUSH_ERR);
	end_close(&a);
	expect_live_nothing();
}

/* A stopped process is as good as any other: its memory is there. Its requests only wait. */
static void test_stopped(void)
{
	struct other other = begin(serve_silence, &(struct end_options){0});

	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 64, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	kill(other.pid, SIGSTOP);
	for (int i = 0; i < 8; i++) {
		CHECK_EQ(post_send(&a, i, 0, 64), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
	}
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 4096, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	end_close(&a);
	join_killed(&other);
}

static void serve_writer(int fd)
{
	struct end end;
	struct address to;

	end_open(&end, &(struct end_options){0});
	to = connect_over(&end, fd);
	for (;;) {
		struct ibv_wc wc;
		int got = ibv_poll_cq(end.cq, 1, &wc);

		if (got && wc.status != IBV_WC_SUCCESS)
			break;
		if (post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, BUFFER, to.buffer, to.rkey) == EINVAL)
			break;
	}
	pause();
}

/* Stopped before we have met: the budget for that ends. A request on its way to it waits as long. */
static void test_stopped_before_the_link(void)
{
	struct address mine, theirs;
	struct other other;

	other = spawn(serve_memory);
	end_open(&a, &(struct end_options){0});
	CHECK(hear(other.fd, &theirs, sizeof(theirs)));
	kill(other.pid, SIGSTOP);
	waitpid(other.pid, NULL, WUNTRACED);
	mine = end_address(&a);
	tell(other.fd, &mine, sizeof(mine));
	connect_impatiently(a.qp, theirs.qpn);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_RETRY_EXC_ERR);
	end_close(&a);
	join_killed(&other);
	expect_live_nothing();
}

/* Draining: a request that its owner's engine has in hand is finished first. */
static void test_drain_a_request(void)
{
	struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};
	struct other other;

	server_memory = USER_MEMORY;
	setenv("RDMANET_SOFT_CMA", "0", 1);
	other = begin(serve_memory, &(struct end_options){0});
	/* Once, so that the link is there. */
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 64, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	kill(other.pid, SIGSTOP);
	waitpid(other.pid, NULL, WUNTRACED);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 100000, b.buffer, b.rkey), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 3, 0, 64, b.buffer, b.rkey), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK(!readable(a.context->async_fd, 20));
	kill(other.pid, SIGCONT);
	expect_event(a.context, IBV_EVENT_SQ_DRAINED);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect_nothing(a.cq);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	meet(other.fd);
	finish(&other);
	unsetenv("RDMANET_SOFT_CMA");
}

/* Patience with the owner's engine is for each piece anew: for the first one it was as good as over. */
static void test_piece_by_piece(void)
{
	struct other other;
	struct rn_qp *qp;

	server_memory = USER_MEMORY;
	setenv("RDMANET_SOFT_CMA", "0", 1);
	other = begin(serve_memory, &(struct end_options){0});
	qp = rn_qp(a.qp);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 64, b.buffer, b.rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	kill(other.pid, SIGSTOP);
	waitpid(other.pid, NULL, WUNTRACED);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 3 * RN_REMOTE_CHUNK, b.buffer, b.rkey), 0);
	rn_lock(&qp->sq_lock);
	CHECK(qp->reply_pending && qp->waited && qp->wait == RN_WAIT_OWNER);
	qp->deadline_ns = 1;
	rn_unlock(&qp->sq_lock);
	kill(other.pid, SIGCONT);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	meet(other.fd);
	finish(&other);
	unsetenv("RDMANET_SOFT_CMA");
}

/* Stopped in the middle of writing into us: destroy, dereg and close don't wait for it. */
static void test_stopped_inside(void)
{
	for (int round = 0; round < 10; round++) {
		struct other other = begin(serve_writer, &(struct end_options){0});

		usleep(1000 + round * 173);
		kill(other.pid, SIGSTOP);
		waitpid(other.pid, NULL, WUNTRACED);
		CHECK_EQ(ibv_dereg_mr(a.mr), 0); /* they come back: it stays stopped */
		CHECK_EQ(ibv_destroy_qp(a.qp), 0);
		a.mr = NULL;
		a.qp = NULL;
		CHECK(rdmanet_soft_quarantined() <= 2);
		if (round % 2) {
			kill(other.pid, SIGCONT);
			EVENTUALLY(rdmanet_soft_quarantined() == 0); /* it notices, and leaves */
		}
		end_close(&a);
		join_killed(&other);
		expect_live_nothing();
	}
}

/* Wherever it dies, we are told, and can go on with others. */
static void test_killed_at_random(void)
{
	struct other steady;
	struct end keep;

	server_memory = DEVICE_MEMORY;
	steady = spawn(serve_echo);
	end_open(&keep, &(struct end_options){.cqe = 1024});
	connect_over(&keep, steady.fd);
	for (int round = 0; round < 30; round++) {
		struct other other = spawn(serve_echo);
		uint64_t limit, killed_at;
		bool told = false;
		uint32_t sent = 0, received = 0;
		struct ibv_wc wc;

		end_open(&a, &(struct end_options){.cqe = 1024});
		to_init(a.qp);
		for (int i = 0; i < DEPTH; i++)
			CHECK_EQ(post_recv(&a, 1000 + i, 524288 + i * 8192, message_size), 0);
		b = connect_over(&a, other.fd);
		killed_at = now_ns() + 100000 + (round * 7919 % 100) * 30000;
		limit = killed_at + LIMIT_MS * 1000000ull;
		while (!told) {
			int got = ibv_poll_cq(a.cq, 1, &wc);

			CHECK(now_ns() < limit);
			if (other.pid && now_ns() > killed_at) {
				kill(other.pid, SIGKILL);
				killed_at = UINT64_MAX;
			}
			if (got && wc.status != IBV_WC_SUCCESS)
				told = true;
			else if (got && wc.opcode == IBV_WC_RECV) {
				CHECK_EQ(post_recv(&a, wc.wr_id, 524288 + (wc.wr_id - 1000) * 8192, message_size), 0);
				received++;
			}
			if (!told && sent - received < DEPTH / 2)
				CHECK_EQ(post(&a,
					      (struct ibv_send_wr){.opcode = IBV_WR_SEND,
								   .send_flags = ++sent % 8 ? 0 : IBV_SEND_SIGNALED},
					      0, message_size),
					 0);
		}
		end_close(&a);
		join_killed(&other);
		/* The one that lives has noticed nothing. */
		CHECK_EQ(post_recv(&keep, 7, 65536, message_size), 0);
		CHECK_EQ(post_send(&keep, 8, 0, message_size), 0);
		for (int i = 0; i < 2; i++)
			CHECK_EQ(poll_one(keep.cq).status, IBV_WC_SUCCESS);
	}
	end_close(&keep);
	join(&steady);
	expect_live_nothing();
}

/* --- forks --------------------------------------------------------------------------------------------------- */

static void test_fork(void)
{
	struct other other;
	int status;
	pid_t child;

	server_memory = DEVICE_MEMORY;
	other = begin(serve_echo, &(struct end_options){.cqe = 1024});
	ping_pong_asleep(10);
	fflush(NULL);
	child = fork();
	if (!child) {
		struct ibv_wc wc;
		struct end fresh;

		/* The parent's objects are refused, their destructors do nothing. */
		CHECK_EQ(post_send(&a, 1, 0, 64), ENODEV);
		CHECK_EQ(post_recv(&a, 1, 0, 64), ENODEV);
		CHECK(ibv_poll_cq(a.cq, 1, &wc) < 0);
		CHECK(!ibv_alloc_pd(a.context));
		CHECK_EQ(ibv_destroy_qp(a.qp), 0);
		CHECK_EQ(ibv_dereg_mr(a.mr), 0);
		CHECK_EQ(ibv_close_device(a.context), 0);
		/* A device of its own works. */
		end_open(&fresh, &(struct end_options){0});
		connect_to(fresh.qp, fresh.qp->qp_num);
		CHECK_EQ(post_recv(&fresh, 1, 0, 64), 0);
		CHECK_EQ(post_send(&fresh, 2, 0, 64), 0);
		for (int i = 0; i < 2; i++)
			CHECK_EQ(poll_one(fresh.cq).status, IBV_WC_SUCCESS);
		end_close(&fresh);
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	ping_pong_asleep(10); /* the parent hasn't noticed */
	finish(&other);
}

/* The dead process has left a child, which holds copies of all its descriptors. */
static void serve_and_fork(int fd)
{
	struct end end;

	end_open(&end, &(struct end_options){0});
	connect_over(&end, fd);
	if (!fork()) {
		close(fd);
		sleep(3);
		_exit(0);
	}
	CHECK_EQ(post_recv(&end, 1, 0, 64), 0); /* the child is there, it says */
	pause();
}

static void test_killed_with_child(void)
{
	struct other other = begin(serve_and_fork, &(struct end_options){0});

	CHECK_EQ(post_recv(&a, 5, 0, 64), 0);
	CHECK_EQ(post_send(&a, 1, 0, 64), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	kill(other.pid, SIGKILL);
	expect(a.cq, 5, IBV_WC_WR_FLUSH_ERR);
	end_close(&a);
	join_killed(&other);
}

int main(void)
{
	RUN(test_device_memory);
	RUN(test_past_the_caches);
	RUN(test_user_memory);
	RUN(test_without_cma);
	RUN(test_remote_errors);
	RUN(test_write_order);
	RUN(test_on_demand_receives);
	RUN(test_open_and_close);
	RUN(test_regions_come_and_go);
	RUN(test_messages);
	RUN(test_messages_without_cma);
	RUN(test_deferred);
	RUN(test_rnr);
	RUN(test_nobody);
	RUN(test_killed_while_idle);
	RUN(test_closed_while_idle);
	RUN(test_killed_while_waiting);
	RUN(test_stopped);
	RUN(test_stopped_before_the_link);
	RUN(test_drain_a_request);
	RUN(test_piece_by_piece);
	RUN(test_stopped_inside);
	RUN(test_killed_at_random);
	RUN(test_fork);
	RUN(test_killed_with_child);
	return 0;
}
