/* SPDX-License-Identifier: Apache-2.0 */
/* See fuzz.h. What the messages make happen is read, and requests are refused. */
#include "fuzz.h"

#include "rdma_cma.h"

static struct end end;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;

static void read_events(void)
{
	struct rdma_cm_event *event;

	while (!rdma_get_cm_event(channel, &event)) {
		struct rdma_cm_id *id = event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? event->id : NULL;

		rdma_ack_cm_event(event);
		if (id) {
			rdma_reject(id, NULL, 0);
			rdma_destroy_id(id);
		}
	}
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
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct sockaddr_in *at = (struct sockaddr_in *)&listener->route.addr.src_addr;

	converse(connect_tcp(ntohs(at->sin_port)), data, size);
	read_events();
	return 0;
}
