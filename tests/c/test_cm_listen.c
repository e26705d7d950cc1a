/* SPDX-License-Identifier: Apache-2.0 */
/* A listener whose program does not read its events: it takes in as many requests as its backlog, and the rest waits. */
#include "cm_harness.h"

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

int main(void)
{
	RUN(no_more_than_the_backlog_are_taken_in);
	return 0;
}
