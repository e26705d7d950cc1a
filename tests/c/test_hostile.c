/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer that breaks the rules of the link on purpose: it lets us map what is its, and then does its worst with it.
 * Whatever becomes of work requests to it, we neither crash nor hang.
 */
#include "processes.h"

#include "objects/mr.h"
#include "peer/peers.h"
#include "soft.h"

/* --- memory that is taken back while it is written -------------------------------------------------------- */

static void take_back_again_and_again(int fd)
{
	struct pollfd end_of_test = {.fd = fd, .events = POLLIN};
	struct end end;
	uint32_t id;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	connect_over(&end, fd);
	id = container_of(end.mr, struct rn_mr, mr)->segment->id;
	while (!poll(&end_of_test, 1, 0))
		rn_peers_tell_segment_gone(id); /* a lie: its key is good, and stays so */
	meet(fd);
	end_close(&end);
}

static void test_memory_taken_back_in_use(void)
{
	struct other other = spawn(take_back_again_and_again);
	struct address to;
	struct end end;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	to = connect_over(&end, other.fd);
	for (int i = 0; i < 200; i++) {
		CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, i, 0, BUFFER, to.buffer, to.rkey), 0);
		expect(end.cq, i, IBV_WC_SUCCESS); /* it was mapped again, as often as needed */
	}
	meet(other.fd);
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

/* --- completion channels that are full ----------------------------------------------------------------------- */

static void fill(int fd)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};
	uint64_t all = UINT64_MAX - 1, before = 0;
	int flags = fcntl(fd, F_GETFL);

	if (!poll(&room, 1, 0))
		return;
	CHECK(!fcntl(fd, F_SETFL, flags | O_NONBLOCK));
	while (read(fd, &before, sizeof(before)) > 0)
		;
	CHECK_EQ(write(fd, &all, sizeof(all)), (ssize_t)sizeof(all));
	CHECK(!fcntl(fd, F_SETFL, flags & ~O_NONBLOCK)); /* whoever writes would wait */
}

/* By the letter: f it is full from here on, w an event has come. And each time there is somebody to wake. */
static void fill_own_channel(int fd)
{
	struct end end;
	char command;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	for (int i = 0; i < 8; i++)
		CHECK_EQ(post_recv(&end, i, 0, 64), 0);
	connect_over(&end, fd);
	while (hear(fd, &command, 1)) {
		if (command == 'f')
			fill(end.channel->fd);
		if (command == 'w')
			CHECK(readable(end.channel->fd, LIMIT_MS));
		CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
		tell(fd, &command, 1);
	}
	end_close(&end);
}

static void command(int fd, char what)
{
	char done;

	tell(fd, &what, 1);
	CHECK(hear(fd, &done, 1));
}

static void send_to_the_full(const char *commands)
{
	struct other other = spawn(fill_own_channel);
	struct end end;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	connect_over(&end, other.fd);
	for (; *commands; commands++) {
		command(other.fd, *commands);
		CHECK_EQ(post_send(&end, 1, 0, 64), 0);
		expect(end.cq, 1, IBV_WC_SUCCESS);
		await_engine();
	}
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

static void test_channel_full_when_it_comes(void)
{
	send_to_the_full("ffa");
}

/* The first event comes with the descriptor: who has seen it, knows that we have the channel. */
static void test_channel_filled_later(void)
{
	send_to_the_full("awffa");
}

/* What we have given to a peer may be filled by it, too. */
static void fill_what_was_given(int fd)
{
	struct process *process;
	struct end end;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	connect_over(&end, fd);
	CHECK_EQ(post_send(&end, 1, 0, 64), 0);
	meet(fd);
	pthread_mutex_lock(&rn_peers.lock);
	process = rn_peers.processes;
	CHECK(process && process->channel_count);
	for (unsigned i = 0; i < process->channel_count; i++) {
		CHECK(process->channels[i].fd >= 0);
		fill(process->channels[i].fd);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	meet(fd);
	meet(fd);
	end_close(&end);
}

static void test_own_channel_filled_by_a_peer(void)
{
	struct other other = spawn(fill_what_was_given);
	struct end end;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	CHECK_EQ(post_recv(&end, 0, 0, 64), 0);
	CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
	connect_over(&end, other.fd);
	CHECK(readable(end.channel->fd, LIMIT_MS)); /* so it has our channel */
	meet(other.fd);
	meet(other.fd);
	for (int i = 0; i < 3; i++) {
		struct ibv_cq *cq;
		void *context;

		CHECK_EQ(ibv_get_cq_event(end.channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
		CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
		rn_channel_signal(((struct rn_channel *)end.channel)->id);
		rn_channel_signal(RN_CHANNEL_WAKEUP);
		await_engine();
	}
	meet(other.fd);
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

int main(void)
{
	RUN(test_memory_taken_back_in_use);
	RUN(test_channel_full_when_it_comes);
	RUN(test_channel_filled_later);
	RUN(test_own_channel_filled_by_a_peer);
	return 0;
}
