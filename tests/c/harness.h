/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the C tests share: an end is everything one side of a connection has, with sizes that suit
 * most tests; two ends are connected by hand, as programs without a connection manager do.
 */
#ifndef HARNESS_H
#define HARNESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "verbs.h"

#include "base/extras.h"

#define CHECK(condition)                                                                                            \
	do {                                                                                                        \
		if (!(condition)) {                                                                                 \
			fprintf(stderr, "%s:%d: %s: not so: %s (errno %d)\n", __FILE__, __LINE__, __func__,         \
				#condition, errno);                                                                 \
			abort();                                                                                    \
		}                                                                                                   \
	} while (0)
#define CHECK_EQ(a, b)                                                                                              \
	do {                                                                                                        \
		long long a_ = (long long)(a), b_ = (long long)(b);                                                 \
		if (a_ != b_) {                                                                                     \
			fprintf(stderr, "%s:%d: %s: %s is %lld, not %s = %lld\n", __FILE__, __LINE__, __func__, #a, \
				a_, #b, b_);                                                                        \
			abort();                                                                                    \
		}                                                                                                   \
	} while (0)

/* A program that hangs is ended by SIGTERM: then it says where it is (addr2line reads that). */
static void say_where(int signal)
{
	void *frames[32];
	char line[64];
	int count = backtrace(frames, 32), length = snprintf(line, sizeof(line), "process %d is in\n", getpid());

	if (write(STDERR_FILENO, line, length) == length)
		backtrace_symbols_fd(frames, count, STDERR_FILENO);
	raise(signal); /* once more, now without a handler: it is SA_RESETHAND */
}

__attribute__((constructor)) static void expect_sigterm(void)
{
	struct sigaction action = {.sa_handler = say_where, .sa_flags = SA_RESETHAND | SA_NODEFER};
	void *frame;

	backtrace(&frame, 1); /* the first call loads a library, which a handler must not do */
	sigaction(SIGTERM, &action, NULL);
}

enum { BUFFER = 1 << 20, ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				      IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND };

/* How long something may take that must happen: nothing but a hanging test comes near it, on any machine. */
enum { LIMIT_MS = 30000 };

/* The acknowledgement timeout of queue pairs: 1 s, four times, as a busy machine has its reasons for letting a process
 * or the engine wait. Who waits for the end of the budget takes SHORT_TIMEOUT. */
enum { SHORT_TIMEOUT = 10 /* 4 ms */ };
#ifndef TIMEOUT
#define TIMEOUT 18
#endif

enum memory { DEVICE_MEMORY, USER_MEMORY };

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	char *buffer;
	struct ibv_mr *mr;
	bool shares_context;
};

/* What the other side must know. */
struct address {
	uint32_t qpn, rkey;
	uint64_t buffer;
};

static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

/* Does everything take the stream's way, so that nothing is done when posting returns? */
static inline bool by_stream(void)
{
	const char *transport = getenv("RDMANET_SOFT_TRANSPORT");

	return transport && !strcmp(transport, "stream");
}

static inline struct ibv_context *open_soft(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);

	ibv_free_device_list(list);
	CHECK(context);
	return context;
}

static inline struct ibv_mr *reg_device_memory(struct ibv_pd *pd, char *buffer, int fd, size_t size, int access)
{
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
	return ibv_reg_dmabuf_mr(pd, 0, size, (uintptr_t)buffer, fd, access);
}

static inline struct ibv_mr *make_memory(struct ibv_pd *pd, enum memory kind, size_t size, char **buffer)
{
	struct ibv_mr *mr;
	int fd = -1;

	if (kind == DEVICE_MEMORY) {
		fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		CHECK(fd >= 0 && !ftruncate(fd, size));
		*buffer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(*buffer != MAP_FAILED);
		mr = reg_device_memory(pd, *buffer, fd, size, ALL_ACCESS);
		close(fd);
	} else {
		*buffer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(*buffer != MAP_FAILED);
		mr = ibv_reg_mr(pd, *buffer, size, ALL_ACCESS);
	}
	CHECK(mr);
	return mr;
}

struct end_options {
	enum memory memory;
	uint32_t send_wr, recv_wr, sge, inline_data;
	int cqe;
	bool sig_all;
	enum ibv_qp_type type; /* 0: RC */
	struct end *share; /* context and PD of another end */
	bool extended;     /* made by ibv_create_cq_ex and ibv_create_qp_ex, of these: */
	uint64_t wc_flags, send_ops;
	uint32_t cq_flags;
};

static inline struct ibv_cq *make_extended_cq(const struct end *end, const struct end_options *options)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = options->cqe ? options->cqe : 256,
		.cq_context = (void *)end,
		.channel = end->channel,
		.wc_flags = options->wc_flags,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = options->cq_flags,
	};

	return (struct ibv_cq *)ibv_create_cq_ex(end->context, &attr);
}

static inline struct ibv_qp *make_extended_qp(const struct end *end, const struct ibv_qp_init_attr *init, uint64_t ops)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = init->send_cq,
		.recv_cq = init->recv_cq,
		.cap = init->cap,
		.qp_type = init->qp_type,
		.sq_sig_all = init->sq_sig_all,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = end->pd,
		.send_ops_flags = ops,
	};

	return ibv_create_qp_ex(end->context, &attr);
}

static inline void end_open(struct end *end, const struct end_options *options)
{
	struct ibv_qp_init_attr init = {
		.cap =
			{
				.max_send_wr = options->send_wr ? options->send_wr : 64,
				.max_recv_wr = options->recv_wr ? options->recv_wr : 64,
				.max_send_sge = options->sge ? options->sge : 4,
				.max_recv_sge = options->sge ? options->sge : 4,
				.max_inline_data = options->inline_data ? options->inline_data : 128,
			},
		.qp_type = options->type ? options->type : IBV_QPT_RC,
		.sq_sig_all = options->sig_all,
	};

	end->shares_context = options->share;
	end->context = options->share ? options->share->context : open_soft();
	end->pd = options->share ? options->share->pd : ibv_alloc_pd(end->context);
	end->channel = ibv_create_comp_channel(end->context);
	end->cq = options->extended ? make_extended_cq(end, options)
				    : ibv_create_cq(end->context, options->cqe ? options->cqe : 256, end, end->channel, 0);
	CHECK(end->pd && end->channel && end->cq);
	init.send_cq = init.recv_cq = end->cq;
	end->qp = options->extended ? make_extended_qp(end, &init, options->send_ops) : ibv_create_qp(end->pd, &init);
	CHECK(end->qp);
	end->mr = make_memory(end->pd, options->memory, BUFFER, &end->buffer);
}

static inline void end_close(struct end *end)
{
	if (end->qp)
		CHECK_EQ(ibv_destroy_qp(end->qp), 0);
	if (end->mr)
		CHECK_EQ(ibv_dereg_mr(end->mr), 0);
	CHECK_EQ(ibv_destroy_cq(end->cq), 0);
	CHECK_EQ(ibv_destroy_comp_channel(end->channel), 0);
	munmap(end->buffer, BUFFER);
	if (end->shares_context)
		return;
	CHECK_EQ(ibv_dealloc_pd(end->pd), 0);
	CHECK_EQ(ibv_close_device(end->context), 0);
}

static inline struct rn_counters counted(const struct end *end)
{
	struct rn_counters counters;

	CHECK_EQ(rdmanet_soft_qp_counters(end->qp, &counters), 0);
	return counters;
}

static inline struct address end_address(const struct end *end)
{
	return (struct address){.qpn = end->qp->qp_num, .rkey = end->mr->rkey, .buffer = (uintptr_t)end->buffer};
}

enum {
	INIT_MASK = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
	RTR_MASK = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
	RTS_MASK = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		   IBV_QP_MAX_QP_RD_ATOMIC,
};

static inline struct ibv_qp_attr default_attr(uint32_t dest_qpn)
{
	struct ibv_qp_attr attr = {
		.path_mtu = IBV_MTU_4096,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
		.dest_qp_num = dest_qpn,
		.rq_psn = 17,
		.sq_psn = 17,
		.port_num = 1,
		.max_rd_atomic = 1,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.timeout = TIMEOUT,
		.retry_cnt = 3,
		.rnr_retry = 7,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 1}},
	};

	attr.ah_attr.grh.dgid.raw[15] = 1; /* ::1 */
	return attr;
}

static inline int to_state(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state state, int mask)
{
	attr->qp_state = state;
	return ibv_modify_qp(qp, attr, mask | IBV_QP_STATE);
}

/* So that receives can be posted before the other side may send. */
static inline void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = default_attr(0);

	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
}

static inline void connect_with(struct ibv_qp *qp, struct ibv_qp_attr attr)
{
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
}

static inline void connect_to(struct ibv_qp *qp, uint32_t dest_qpn)
{
	connect_with(qp, default_attr(dest_qpn));
}

/* Who isn't there is given up soon. */
static inline void connect_impatiently(struct ibv_qp *qp, uint32_t dest_qpn)
{
	struct ibv_qp_attr attr = default_attr(dest_qpn);

	attr.timeout = SHORT_TIMEOUT;
	connect_with(qp, attr);
}

static inline enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_EQ(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
	return attr.qp_state;
}

/* --- posting --------------------------------------------------------------------------------------- */

static inline struct ibv_sge sge_of(const struct end *end, size_t offset, uint32_t length)
{
	return (struct ibv_sge){.addr = (uintptr_t)end->buffer + offset, .length = length, .lkey = end->mr->lkey};
}

static inline int post_recv(struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = sge_of(end, offset, length);
	struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = length ? 1 : 0}, *bad;

	return ibv_post_recv(end->qp, &wr, &bad);
}

static inline int post(struct end *end, struct ibv_send_wr wr, size_t offset, uint32_t length)
{
	struct ibv_sge sge = sge_of(end, offset, length);
	struct ibv_send_wr *bad;

	wr.sg_list = &sge;
	wr.num_sge = length ? 1 : 0;
	return ibv_post_send(end->qp, &wr, &bad);
}

static inline int post_send(struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
	return post(end, (struct ibv_send_wr){.wr_id = wr_id, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED},
		    offset, length);
}

static inline int post_rdma(struct end *end, enum ibv_wr_opcode opcode, uint64_t wr_id, size_t offset, uint32_t length,
			    uint64_t remote_addr, uint32_t rkey)
{
	return post(end,
		    (struct ibv_send_wr){.wr_id = wr_id,
					 .opcode = opcode,
					 .send_flags = IBV_SEND_SIGNALED,
					 .wr.rdma = {.remote_addr = remote_addr, .rkey = rkey}},
		    offset, length);
}

/* --- completions ------------------------------------------------------------------------------------- */

static inline struct ibv_wc poll_within(struct ibv_cq *cq, uint64_t limit_ns)
{
	uint64_t end = now_ns() + limit_ns;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, &wc)) && now_ns() < end)
		sched_yield();
	CHECK_EQ(got, 1);
	return wc;
}

static inline struct ibv_wc poll_one(struct ibv_cq *cq)
{
	return poll_within(cq, LIMIT_MS * 1000000ull);
}

static inline void expect(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
	struct ibv_wc wc = poll_one(cq);

	CHECK_EQ(wc.wr_id, wr_id);
	if (wc.status != status)
		fprintf(stderr, "status: %s\n", ibv_wc_status_str(wc.status));
	CHECK_EQ(wc.status, status);
}

static inline void expect_nothing(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	CHECK_EQ(ibv_poll_cq(cq, 1, &wc), 0);
}

static inline bool readable(int fd, int timeout_ms)
{
	struct pollfd wait = {.fd = fd, .events = POLLIN};

	return poll(&wait, 1, timeout_ms) == 1;
}

static inline void expect_event(struct ibv_context *context, enum ibv_event_type type)
{
	struct ibv_async_event event;

	CHECK(readable(context->async_fd, LIMIT_MS));
	CHECK_EQ(ibv_get_async_event(context, &event), 0);
	CHECK_EQ(event.event_type, type);
	ibv_ack_async_event(&event);
}

static inline void expect_live_nothing(void)
{
	struct rn_live live;

	rdmanet_soft_live(&live);
	CHECK_EQ(live.contexts, 0);
	CHECK_EQ(live.qps, 0);
	CHECK_EQ(live.fds, 0);
	CHECK_EQ(live.mappings, 0);
	CHECK_EQ(live.quarantined, 0);
}

/* What another thread or process has to bring about. */
#define EVENTUALLY(condition)                                                                                       \
	do {                                                                                                        \
		uint64_t limit_ = now_ns() + LIMIT_MS * 1000000ull;                                                 \
		while (!(condition)) {                                                                              \
			CHECK(now_ns() < limit_ && #condition);                                                     \
			usleep(1000);                                                                               \
		}                                                                                                   \
	} while (0)

#define RUN(test)                                                                                                   \
	do {                                                                                                        \
		uint64_t began_ = now_ns();                                                                         \
		test();                                                                                             \
		printf("  %-32s %5.0f ms\n", #test, (now_ns() - began_) / 1e6);                                     \
		fflush(stdout);                                                                                     \
	} while (0)

#endif
