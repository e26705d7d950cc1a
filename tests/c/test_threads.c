/* SPDX-License-Identifier: Apache-2.0 */
/* Threads of one process: posting, polling, taking away, all at once. Meant for sanitizers, too. */
#include "pair.h"

#include <pthread.h>
#include <stdatomic.h>

/* --- both directions, each end in a thread of its own, sleeping on its channel -------------------------- */

enum { ROUNDS = 5000 };

static void *play(void *argument)
{
	struct end *end = argument;
	bool serves = end == &a;
	int received = 0, sent = 0;

	while (received < ROUNDS || sent < ROUNDS) {
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;
		int got = 0;

		if (sent < ROUNDS && sent + !serves <= received) {
			CHECK_EQ(post(end,
				      (struct ibv_send_wr){.opcode = IBV_WR_SEND,
							   .send_flags = sent % 16 ? 0 : IBV_SEND_SIGNALED},
				      0, 64),
				 0);
			sent++;
		}
		CHECK_EQ(ibv_req_notify_cq(end->cq, 0), 0);
		while (ibv_poll_cq(end->cq, 1, &wc) == 1) {
			CHECK_EQ(wc.status, IBV_WC_SUCCESS);
			got++;
			if (!(wc.opcode & IBV_WC_RECV))
				continue;
			received++;
			CHECK_EQ(post_recv(end, 0, 4096, 64), 0);
		}
		if (got || (sent < ROUNDS && sent + !serves <= received) || received == ROUNDS)
			continue;
		CHECK(readable(end->channel->fd, LIMIT_MS)); /* a lost wake-up ends here */
		CHECK_EQ(ibv_get_cq_event(end->channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

static void test_ping_pong(void)
{
	pthread_t thread;

	open_pair();
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(post_recv(&a, 0, 4096, 64), 0);
		CHECK_EQ(post_recv(&b, 0, 4096, 64), 0);
	}
	CHECK_EQ(pthread_create(&thread, NULL, play, &b), 0);
	play(&a);
	pthread_join(thread, NULL);
	close_pair();
}

/* --- memory and queue pairs vanish under a writer ---------------------------------------------------------- */

static _Atomic bool stop;
static _Atomic uint32_t key;
static uint64_t target;

static void *write_away(void *argument)
{
	(void)argument;
	while (!atomic_load(&stop)) {
		struct ibv_qp_attr attr = default_attr(b.qp ? b.qp->qp_num : 0);
		struct ibv_wc wc;

		if (post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 65536, target, atomic_load(&key)))
			continue;
		wc = poll_one(a.cq);
		if (wc.status == IBV_WC_SUCCESS)
			continue;
		/* It was withdrawn: begin anew. */
		CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
		CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
		CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
		connect_to(a.qp, b.qp->qp_num);
		connect_to(b.qp, a.qp->qp_num);
	}
	return NULL;
}

static void test_deregister_under_writer(void)
{
	pthread_t thread;

	open_pair();
	stop = false;
	key = 0;
	{
		/* The same addresses each time, so that a late write would hit unmapped memory. */
		char *place = mmap(NULL, 65536, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		target = (uintptr_t)place;
		CHECK_EQ(pthread_create(&thread, NULL, write_away, NULL), 0);
		for (int i = 0; i < 300; i++) {
			struct ibv_mr *mr;

			CHECK(mmap(place, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place);
			mr = ibv_reg_mr(b.pd, place, 65536, ALL_ACCESS);
			CHECK(mr);
			atomic_store(&key, mr->rkey);
			usleep(i % 7 * 50);
			CHECK_EQ(ibv_dereg_mr(mr), 0);
			CHECK(mmap(place, 65536, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place);
		}
		atomic_store(&stop, true);
		pthread_join(thread, NULL);
		munmap(place, 65536);
	}
	close_pair();
}

static void *post_to_vanishing(void *argument)
{
	(void)argument;
	while (!atomic_load(&stop)) {
		struct ibv_wc wc;

		post_send(&a, 1, 0, 64);
		while (ibv_poll_cq(a.cq, 1, &wc) == 1)
			;
	}
	return NULL;
}

static void test_destroy_under_sender(void)
{
	struct ibv_qp_init_attr init = {.cap = {64, 64, 4, 4, 64}, .qp_type = IBV_QPT_RC};

	for (int round = 0; round < 100; round++) {
		struct ibv_qp_attr attr = {0};
		pthread_t thread;

		if (round)
			init.send_cq = init.recv_cq = b.cq;
		else
			open_pair();
		if (round) {
			b.qp = ibv_create_qp(b.pd, &init);
			CHECK(b.qp);
			CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RESET, 0), 0);
			connect_to(a.qp, b.qp->qp_num);
			connect_to(b.qp, a.qp->qp_num);
		}
		for (int i = 0; i < 64; i++)
			CHECK_EQ(post_recv(&b, i, 0, 64), 0);
		stop = false;
		CHECK_EQ(pthread_create(&thread, NULL, post_to_vanishing, NULL), 0);
		usleep(round % 10 * 20);
		CHECK_EQ(ibv_destroy_qp(b.qp), 0);
		b.qp = NULL;
		atomic_store(&stop, true);
		pthread_join(thread, NULL);
	}
	close_pair();
}

/* --- several threads on one queue pair ------------------------------------------------------------------------ */

static _Atomic int written;

static void *add_up(void *argument)
{
	(void)argument;
	for (int i = 0; i < 2000;) {
		struct ibv_wc wc;

		if (!post(&a,
			  (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					       .send_flags = IBV_SEND_SIGNALED,
					       .wr.atomic = {.remote_addr = (uintptr_t)b.buffer, .rkey = b.mr->rkey, .compare_add = 1}},
			  0, 8))
			i++;
		if (ibv_poll_cq(a.cq, 1, &wc) == 1) {
			CHECK_EQ(wc.status, IBV_WC_SUCCESS);
			atomic_fetch_add(&written, 1);
		}
	}
	return NULL;
}

static void test_shared_queue_pair(void)
{
	pthread_t threads[4];

	open_pair();
	written = 0;
	*(uint64_t *)b.buffer = 0;
	for (int i = 0; i < 4; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, add_up, NULL), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	while (written < 8000) {
		CHECK_EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		written++;
	}
	CHECK_EQ(*(uint64_t *)b.buffer, 8000);
	close_pair();
}

/* --- events must come back before their object goes ------------------------------------------------------------ */

static struct ibv_async_event async_event;
static _Atomic bool acknowledged;

static void *acknowledge_late(void *cq)
{
	usleep(20000);
	atomic_store(&acknowledged, true);
	if (cq)
		ibv_ack_cq_events(cq, 1);
	else
		ibv_ack_async_event(&async_event);
	return NULL;
}

static void test_acknowledge_before_destroy(void)
{
	struct ibv_cq *cq;
	pthread_t thread;
	void *context;

	open_pair();
	/* An unread one is dropped, one that was read is waited for. */
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, (uintptr_t)b.buffer, 99), 0);
	CHECK(readable(b.context->async_fd, LIMIT_MS));
	CHECK_EQ(ibv_get_async_event(b.context, &async_event), 0);
	CHECK_EQ(async_event.event_type, IBV_EVENT_QP_ACCESS_ERR);
	CHECK(async_event.element.qp == b.qp);
	acknowledged = false;
	CHECK_EQ(pthread_create(&thread, NULL, acknowledge_late, NULL), 0);
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	CHECK(acknowledged);
	pthread_join(thread, NULL);
	b.qp = NULL;

	CHECK_EQ(ibv_destroy_qp(a.qp), 0);
	a.qp = NULL;
	end_close(&b);
	end_close(&a);

	open_pair();
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(ibv_req_notify_cq(b.cq, 0), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(ibv_get_cq_event(b.channel, &cq, &context), 0);
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	b.qp = NULL;
	acknowledged = false;
	CHECK_EQ(pthread_create(&thread, NULL, acknowledge_late, cq), 0);
	CHECK_EQ(ibv_destroy_cq(cq), 0);
	CHECK(acknowledged);
	pthread_join(thread, NULL);
	b.cq = ibv_create_cq(b.context, 1, NULL, b.channel, 0);
	close_pair();
}

int main(void)
{
	RUN(test_ping_pong);
	RUN(test_deregister_under_writer);
	RUN(test_destroy_under_sender);
	RUN(test_shared_queue_pair);
	RUN(test_acknowledge_before_destroy);
	expect_live_nothing();
	return 0;
}
