/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the program is woken for what the engine has heard: cm/event.c. The device's own write() to a channel is watched
 * here, and can be held up.
 */
#include "cm_harness.h"
#include "cm/wire.h"

#include "base/engine.h"

#include <semaphore.h>
#include <stdatomic.h>
#include <sys/syscall.h>

static struct {
	_Atomic int fd; /* the channel's that is watched; -1: none */
	atomic_bool holds_up;
	atomic_uint writes, under_the_lock;
	sem_t begun, may_end;
} watched = {.fd = -1};

/* The C library's, for this program and the device in it. */
ssize_t write(int fd, const void *bytes, size_t length)
{
	if (rn_engine_inside() && fd == atomic_load(&watched.fd)) {
		atomic_fetch_add(&watched.writes, 1);
		if (pthread_mutex_trylock(&rn_cm_lock))
			atomic_fetch_add(&watched.under_the_lock, 1);
		else
			pthread_mutex_unlock(&rn_cm_lock);
		if (atomic_exchange(&watched.holds_up, false)) {
			sem_post(&watched.begun);
			while (sem_wait(&watched.may_end))
				; /* a signal */
		}
	}
	return syscall(SYS_write, fd, bytes, length);
}

static void ask(int fd)
{
	struct rn_cm_req req = {.header = {htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, RN_CM_REQ, htobe16(sizeof req)}};

	CHECK(send(fd, &req, sizeof req, MSG_NOSIGNAL) == sizeof req);
}

/* Who is woken needs the lock, and finds it free. */
static void nobody_wakes_to_wait_for_the_lock(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	struct rdma_cm_event *event;
	struct rdma_cm_id *passive;
	int fd = tcp_to(port);

	atomic_store(&watched.writes, 0);
	atomic_store(&watched.fd, channel->fd);
	ask(fd);
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	close(fd);
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED); /* it has gone */
	CHECK(atomic_load(&watched.writes) == 2 && !atomic_load(&watched.under_the_lock));
	atomic_store(&watched.fd, -1);
	CHECK(!rdma_destroy_id(passive) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

static _Atomic int destroyer;
static atomic_bool is_destroyed;

static void *destroy_it(void *id)
{
	atomic_store(&destroyer, (int)syscall(SYS_gettid));
	CHECK(!rdma_destroy_id(id));
	atomic_store(&is_destroyed, true);
	return NULL;
}

/* The thread waits, for a lock say. */
static bool sleeps(int thread)
{
	char path[64], text[256] = "";
	FILE *file;

	snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
	file = fopen(path, "re");
	if (!file)
		return false;
	text[fread(text, 1, sizeof text - 1, file)] = '\0';
	fclose(file);
	return strstr(text, ") S ") != NULL;
}

/* An event is taken back while it is being told: no token is left for a reader who would find nothing, and wait. */
static void what_is_taken_back_leaves_no_token(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 10, &port);
	struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
	struct rdma_cm_event *event;
	struct rdma_cm_id *passive;
	int fd = tcp_to(port);
	pthread_t thread;

	ask(fd);
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!sem_init(&watched.begun, 0, 0) && !sem_init(&watched.may_end, 0, 0));
	atomic_store(&watched.holds_up, true);
	atomic_store(&watched.fd, channel->fd);
	close(fd);
	while (sem_wait(&watched.begun))
		; /* a signal */
	CHECK(!pthread_create(&thread, NULL, destroy_it, passive));
	EVENTUALLY(atomic_load(&is_destroyed) || sleeps(atomic_load(&destroyer)));
	CHECK(!sem_post(&watched.may_end));
	CHECK(!pthread_join(thread, NULL));
	await_engine();
	CHECK(!poll(&ready, 1, 0));
	atomic_store(&watched.fd, -1);
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	RUN(nobody_wakes_to_wait_for_the_lock);
	RUN(what_is_taken_back_leaves_no_token);
	return 0;
}
