/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that are begun while the first one to their listener is made (cm/first.c): they wait until it has linked
 * the processes, and then take no socket.  If it links nothing, or takes long, each goes by a socket.
 */
#include "cm_other.h"

enum { FEW = 5 };

/* --- a client in another process ------------------------------------------------------------------------- */

static unsigned count_waiting(void)
{
	unsigned count = 0;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *at = rn_cm_wires.next; at != &rn_cm_wires; at = at->next)
		count += RN_OWNER(at, struct rn_cm_wire, link)->awaits_first;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

/* w: all but the first wait; n: none does; f: give up the first one; s: reach nobody by links any more. */
static void do_it(struct asker *asker, char letter)
{
	switch (letter) {
	case 'w':
		EVENTUALLY(count_waiting() == asker->count - 1);
		break;
	case 'n':
		EVENTUALLY(!count_waiting());
		break;
	case 'f':
		destroy(asker->ids[0]);
		asker->ids[0] = asker->ids[--asker->count];
		break;
	case 's':
		rn_settings.transport = RN_TRANSPORT_STREAM;
		break;
	default:
		do_as_always(asker, letter);
		return;
	}
	say(asker->fd, 'D');
}

static void client(int fd)
{
	ask_by(fd, do_it);
}

/* It asks, and all but the first one wait. What the first one has led to. */
static struct rdma_cm_id *first_of_few(const struct other *other)
{
	struct rdma_cm_id *id;

	for (int i = 0; i < FEW; i++)
		tell(other, 'q');
	tell(other, 'w');
	id = next_request();
	CHECK(side_of(id) == RN_CM_HANDED);
	return id;
}

/* Requests that have come before one was established that had been answered. */
static struct rdma_cm_id *early[FEW];
static unsigned early_count;

static void await_established(void)
{
	struct rdma_cm_event *event;
	bool is_request;

	do {
		event = next_event(channel, LIMIT_MS);
		is_request = event && event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
		CHECK(event && (is_request || event->event == RDMA_CM_EVENT_ESTABLISHED));
		if (is_request)
			early[early_count++] = event->id;
		rdma_ack_cm_event(event);
	} while (is_request);
}

static struct rdma_cm_id *next_asked(void)
{
	return early_count ? early[--early_count] : next_request();
}

static void let_in(const struct other *other, struct rdma_cm_id *id)
{
	answer(id);
	say(other->fd, 'c');
	CHECK(hear(other->fd) == 'E');
	await_established();
}

/* The next ones come this way. */
static void let_in_others(const struct other *other, struct rdma_cm_id **ids, int count, enum rn_cm_link_side side)
{
	for (int i = 0; i < count; i++) {
		ids[i] = next_asked();
		CHECK(side_of(ids[i]) == side);
		let_in(other, ids[i]);
	}
}

static void end(struct other *other, struct rdma_cm_id **ids, int count)
{
	end_other(other);
	for (int i = 0; i < count; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < count; i++)
		destroy(ids[i]);
}

/* --- it links the processes ------------------------------------------------------------------------------- */

static void the_others_take_no_socket(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW];

	ids[0] = first_of_few(&other);
	want_none(channel, 20);
	let_in(&other, ids[0]);
	let_in_others(&other, ids + 1, FEW - 1, RN_CM_ASKED);
	tell(&other, 'n');
	end(&other, ids, FEW);
}

static void one_that_waits_is_given_up(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW];

	ids[0] = first_of_few(&other);
	tell(&other, 'l');
	tell(&other, 'w');
	let_in(&other, ids[0]);
	let_in_others(&other, ids + 1, FEW - 2, RN_CM_ASKED);
	want_none(channel, 20);
	end(&other, ids, FEW - 1);
}

/* A process that asks itself is linked from the beginning. */
static void within_a_process(void)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *asks[FEW], *asked[FEW];

	for (int i = 0; i < FEW; i++)
		asks[i] = connect_to(events);
	for (int i = 0; i < FEW; i++) {
		asked[i] = next_asked();
		answer(asked[i]);
		want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
		await_established();
	}
	for (int i = 0; i < FEW; i++)
		destroy(asks[i]);
	for (int i = 0; i < FEW; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < FEW; i++)
		destroy(asked[i]);
	rdma_destroy_event_channel(events);
}

/* --- it does not ------------------------------------------------------------------------------------------ */

static void the_first_is_refused(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW];

	ids[0] = first_of_few(&other);
	CHECK(!rdma_reject(ids[0], "no", 3));
	destroy(ids[0]);
	say(other.fd, 'c');
	CHECK(hear(other.fd) == 'R');
	let_in_others(&other, ids, FEW - 1, RN_CM_HANDED);
	end(&other, ids, FEW - 1);
}

static void the_first_is_given_up(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW], *first = first_of_few(&other);

	tell(&other, 'f');
	want_status(channel, RDMA_CM_EVENT_REJECTED, RN_REJ_TIMEOUT);
	destroy(first);
	let_in_others(&other, ids, FEW - 1, RN_CM_HANDED);
	end(&other, ids, FEW - 1);
}

/* Nobody waits long for it, nor does one that is begun later. */
static void the_first_is_not_answered(void)
{
	struct other other;
	struct rdma_cm_id *ids[FEW + 1];

	rn_cm_first_wait_ms = 1000;
	other = spawn(client);
	rn_cm_first_wait_ms = LIMIT_MS;
	ids[0] = first_of_few(&other);
	for (int i = 1; i < FEW; i++) {
		ids[i] = next_request();
		CHECK(side_of(ids[i]) == RN_CM_HANDED);
	}
	tell(&other, 'q');
	tell(&other, 'n');
	ids[FEW] = next_request();
	CHECK(side_of(ids[FEW]) == RN_CM_HANDED);
	for (int i = 0; i <= FEW; i++)
		let_in(&other, ids[i]);
	end(&other, ids, FEW + 1);
}

static void nothing_is_mapped(void)
{
	struct other other = spawn(client);
	struct rdma_cm_id *ids[FEW];

	tell(&other, 's');
	for (int i = 0; i < FEW; i++)
		tell(&other, 'q');
	tell(&other, 'n');
	let_in_others(&other, ids, FEW, RN_CM_HANDED);
	end(&other, ids, FEW);
}

/* The server, which listens at the port that it says. */
static void server(int fd)
{
	struct rdma_event_channel *events = new_channel();
	uint16_t where = 0;

	listener = new_listener(events, 2 * FEW, &where);
	CHECK(write(fd, &where, sizeof where) == sizeof where);
	hear(fd);
	_exit(0);
}

/* Before it has answered. Then nobody listens there. */
static void the_server_is_killed(void)
{
	struct rdma_event_channel *events = new_channel();
	struct other other = spawn(server);
	struct rdma_cm_id *asks[FEW];
	uint16_t before = port;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	for (int i = 0; i < FEW; i++)
		asks[i] = connect_to(events);
	EVENTUALLY(count_waiting() == FEW - 1);
	kill(other.pid, SIGKILL);
	for (int i = 0; i < FEW; i++) {
		struct rdma_cm_event *event = want(events, RDMA_CM_EVENT_REJECTED);

		rdma_ack_cm_event(event);
	}
	CHECK(!count_waiting());
	for (int i = 0; i < FEW; i++)
		destroy(asks[i]);
	rdma_destroy_event_channel(events);
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	close(other.fd);
	port = before;
}

int main(void)
{
	rn_cm_first_wait_ms = LIMIT_MS; /* or a slow machine is too late */
	channel = new_channel();
	listener = new_listener(channel, 2 * FEW, &port);
	RUN(the_others_take_no_socket);
	RUN(one_that_waits_is_given_up);
	RUN(within_a_process);
	RUN(the_first_is_refused);
	RUN(the_first_is_given_up);
	RUN(the_first_is_not_answered);
	RUN(nothing_is_mapped);
	RUN(the_server_is_killed);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
	return 0;
}
