/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a listener takes in. If its program does not read its events, that is as many requests as its backlog, and the
 * rest waits. Where the kernel has no descriptor or memory for a connection, it waits, too. Each request has the
 * listener's options.
 */
#define _GNU_SOURCE
#include "base/engine_inside.h"
#include "cm_harness.h"
#include "cm/wire.h"

#include <stdatomic.h>
#include <sys/syscall.h>

enum { BACKLOG = 2, ASKING = 7 };

static unsigned unread(struct rdma_cm_id *listener)
{
	unsigned count;

	pthread_mutex_lock(&rn_cm_lock);
	count = ((struct rn_cm_id *)listener)->unread_requests;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

static void no_more_than_the_backlog_are_taken_in(void)
{
	struct rdma_event_channel *server = new_channel(), *channel = new_channel();
	struct rdma_conn_param param = plain;
	struct rdma_cm_id *ids[ASKING];
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, BACKLOG, &port);

	for (int i = 0; i < ASKING; i++) {
		ids[i] = new_id(channel);
		resolve(ids[i], port);
		make_qp(ids[i]);
		CHECK(!rdma_connect(ids[i], &param));
		if (i == BACKLOG - 1)
			EVENTUALLY(unread(listener) == BACKLOG);
	}
	/* Nothing tells that nobody is taken in: look for a while, in which the engine would. */
	for (int look = 0; look < 50; look++) {
		CHECK(unread(listener) == BACKLOG);
		usleep(1000);
	}
	for (int i = 0; i < ASKING; i++) { /* whoever waited comes when there is room */
		struct rdma_cm_event *event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		struct rdma_cm_id *passive = event->id;

		rdma_ack_cm_event(event);
		CHECK(!rdma_reject(passive, NULL, 0));
		CHECK(!rdma_destroy_id(passive));
		want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	}
	CHECK(unread(listener) == 0);
	want_none(server, 0);
	for (int i = 0; i < ASKING; i++)
		destroy(ids[i]);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(server);
}

static atomic_bool kernel_lacks_memory;
static atomic_uint refused;

/* The kernel's, which fails if we say so. */
int accept4(int fd, __SOCKADDR_ARG address, socklen_t *restrict length, int flags)
{
	if (!atomic_load(&kernel_lacks_memory))
		return (int)syscall(SYS_accept4, fd, address.__sockaddr__, length, flags);
	atomic_fetch_add(&refused, 1);
	errno = ENOBUFS;
	return -1;
}

static void it_tries_again_after_a_shortage(void)
{
	struct rdma_event_channel *server = new_channel(), *channel = new_channel();
	struct rdma_conn_param param = plain;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, BACKLOG, &port), *id = new_id(channel), *passive;
	struct rdma_cm_event *event;

	param.qp_num = 0x4000;
	resolve(id, port);
	atomic_store(&kernel_lacks_memory, true);
	CHECK(!rdma_connect(id, &param));
	EVENTUALLY(atomic_load(&refused) >= 2); /* nothing but its own clock has it try the second time */
	want_none(server, 0);
	atomic_store(&kernel_lacks_memory, false);
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive));
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(server);
}

static unsigned taken_in(void)
{
	unsigned count = 0;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *item = rn_cm_wires.next; item != &rn_cm_wires; item = item->next)
		count++;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

static bool tries_again(struct rdma_cm_id *listener)
{
	bool does;

	pthread_mutex_lock(&rn_engine.lock); /* timers are its own */
	does = ((struct rn_cm_id *)listener)->accept_retry.is_set;
	pthread_mutex_unlock(&rn_engine.lock);
	return does;
}

static void ask(int fd)
{
	struct rn_cm_req req = {
		.header = {.magic = htobe32(RN_CM_MAGIC),
			   .version = RN_WIRE_VERSION,
			   .type = RN_CM_REQ,
			   .length = htobe16(rn_cm_message_length[RN_CM_REQ])},
		.qpn = htobe32(0x4000),
	};

	CHECK(send(fd, &req, sizeof req, MSG_NOSIGNAL) == sizeof req);
}

static void hear_request(struct rdma_event_channel *server)
{
	struct rdma_cm_event *event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *passive = event->id;

	rdma_ack_cm_event(event);
	CHECK(!rdma_destroy_id(passive));
}

/* Those who were taken in before the shortage ask meanwhile, as many as the backlog. */
static void a_shortage_lifts_no_backlog(void)
{
	struct rdma_event_channel *server = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, BACKLOG, &port);
	int fds[BACKLOG], last;

	for (int i = 0; i < BACKLOG; i++)
		fds[i] = tcp_to(port);
	EVENTUALLY(taken_in() == BACKLOG);
	atomic_store(&refused, 0);
	atomic_store(&kernel_lacks_memory, true);
	last = tcp_to(port);
	EVENTUALLY(atomic_load(&refused));
	for (int i = 0; i < BACKLOG; i++)
		ask(fds[i]);
	EVENTUALLY(unread(listener) == BACKLOG);
	atomic_store(&kernel_lacks_memory, false);
	EVENTUALLY(!tries_again(listener));
	for (int look = 0; look < 50; look++) { /* nothing tells that nobody is taken in */
		CHECK(taken_in() == BACKLOG);
		usleep(1000);
	}
	for (int i = 0; i < BACKLOG; i++) {
		hear_request(server);
		close(fds[i]);
	}
	ask(last);
	hear_request(server);
	close(last);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(server);
}

/* The program connects the queue pair of a request by itself, by what rdma_init_qp_attr() says. */
static void requests_inherit_its_options(void)
{
	struct rdma_event_channel *server = new_channel(), *channel = new_channel();
	struct rdma_conn_param param = plain;
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(server, BACKLOG, &port), *id = new_id(channel), *passive;
	uint8_t tos = 0x68, ack_timeout = 17;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	struct rdma_cm_event *event;
	int mask;

	CHECK(!rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos));
	CHECK(!rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &ack_timeout, sizeof ack_timeout));
	param.qp_num = 0x4000;
	resolve(id, port);
	CHECK(!rdma_connect(id, &param));
	event = want(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_init_qp_attr(passive, &attr, &mask) && mask & IBV_QP_AV);
	CHECK(attr.ah_attr.grh.traffic_class == tos);
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS};
	CHECK(!rdma_init_qp_attr(passive, &attr, &mask) && mask & IBV_QP_TIMEOUT);
	CHECK(attr.timeout == ack_timeout);
	CHECK(!rdma_reject(passive, NULL, 0) && !rdma_destroy_id(passive));
	want_status(channel, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(server);
}

int main(void)
{
	RUN(no_more_than_the_backlog_are_taken_in);
	RUN(it_tries_again_after_a_shortage);
	RUN(a_shortage_lifts_no_backlog);
	RUN(requests_inherit_its_options);
	return 0;
}
