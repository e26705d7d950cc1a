/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process says of connections over its link (cm/asked.c, cm/link.c): here, this process to itself.  A piece is: what
 * kind of message; for which connection (0: the one that this process has asked for itself, else a token); whether the
 * rest lies over a proper request for one; the rest.  An odd first byte of the input: requests are accepted.  All ends
 * when the program has destroyed what it has.
 */
#include "fuzz.h"

#include "base/gid.h"
#include "cm/wire.h"
#include "rdma_cma.h"

#include <sched.h>
#include <stdatomic.h>

enum { IDS = 64 };

static struct end end;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener, *ids[IDS];
static unsigned count;
static bool accepts;

static struct {
	struct rn_task task;
	const uint8_t *data;
	size_t size;
	uint64_t token;
	atomic_bool is_done;
} speaking;

static void read_events(void)
{
	struct rdma_conn_param param = {.qp_num = end.qp->qp_num, .retry_count = 7};
	struct rdma_cm_event *event;

	while (!rdma_get_cm_event(channel, &event)) {
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type type = event->event;

		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST && (!accepts || count == IDS)) {
			rdma_reject(id, NULL, 0);
			rdma_destroy_id(id);
		} else if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			rdma_accept(id, &param);
			ids[count++] = id;
		} else if (type == RDMA_CM_EVENT_CONNECT_RESPONSE) {
			rdma_establish(id);
		}
	}
}

static void ask(void)
{
	struct rdma_conn_param param = {.qp_num = end.qp->qp_num, .retry_count = 7};
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(rdmanet_soft_cm_resolve(id, NULL, (struct sockaddr *)&listener->route.addr.src_addr) == 1);
	CHECK(!rdma_connect(id, &param));
	ids[count++] = id;
}

/* Until nothing is left of it. */
static void destroy_all(void)
{
	bool is_over = false;

	while (count)
		CHECK(!rdma_destroy_id(ids[--count]));
	while (!is_over) {
		accepts = false;
		read_events();
		pthread_mutex_lock(&rn_cm_lock);
		is_over = rn_list_empty(&rn_cm_wires);
		pthread_mutex_unlock(&rn_cm_lock);
		sched_yield();
	}
}

/* On the engine. */
static void speak(struct rn_task *task)
{
	struct rn_cm_link_request request = {
		.cookie = rn_cm_id(listener)->cookie,
		.req = {.header = {htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_REQ, htobe16(sizeof request.req)},
			.qpn = htobe32(end.qp->qp_num), .retry_count = 7}};
	const uint8_t *piece;
	size_t length;

	(void)task;
	rn_gid_of(&listener->route.addr.src_addr, &request.near);
	request.far = request.near;
	while ((piece = next_piece(&speaking.data, &speaking.size, &length))) {
		uint8_t message[4096] = {0};
		uint64_t token;

		if (length < 3 || length > sizeof message)
			continue;
		token = piece[1] ? piece[1] : speaking.token;
		if (piece[2] & 1)
			memcpy(message, &request, sizeof request);
		memcpy(message, piece + 3, length - 3);
		rn_cm_link_hear(NULL, (piece[0] & 3) | (piece[0] & 128) << 1, token, message,
				piece[2] & 1 ? sizeof request : length - 3);
	}
	atomic_store(&speaking.is_done, true);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};

	(void)argc, (void)argv;
	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	channel = rdma_create_event_channel();
	CHECK(channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	CHECK(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
	CHECK(!rdma_listen(listener, 64));
	accepts = true;
	ask(); /* by a socket: from now on the listener is known */
	while (!rn_cm_id(ids[0])->was_connected)
		read_events();
	destroy_all();
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (!size)
		return 0;
	accepts = *data & 1;
	ask();
	pthread_mutex_lock(&rn_cm_lock);
	speaking.token = rn_cm_id(ids[0])->wire ? rn_cm_id(ids[0])->wire->token : 0;
	pthread_mutex_unlock(&rn_cm_lock);
	speaking.task.run = speak;
	speaking.data = data + 1;
	speaking.size = size - 1;
	atomic_store(&speaking.is_done, false);
	rn_task_post(&speaking.task);
	while (!atomic_load(&speaking.is_done))
		read_events();
	destroy_all();
	return 0;
}
