/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What connection managers say to each other in memory (peer/mail.c): nothing of it is lost, whoever ends, is stopped, or
 * does not read; and what another process makes of its own ring, or of ours, is its own affair.
 */
#include "cm_other.h"
#include "cm/wire.h"
#include "peer/peers.h"
#include "shm/arena.h"

#include <sys/resource.h>

enum { FEW = 8, SLOTS = 64, SLOT = 256 };

/* The only other process. */
static struct process *writer(void)
{
	struct process *process;

	pthread_mutex_lock(&rn_peers.lock);
	process = rn_peers.processes;
	while (process && !process->mail_out.offset && !process->mail_in.offset)
		process = process->next;
	pthread_mutex_unlock(&rn_peers.lock);
	return process;
}

static uint32_t position(bool is_in)
{
	const struct process *process = writer();

	return !process ? 0 : is_in ? process->mail_in.position : process->mail_out.position;
}

/* --- a client in another process: it does what one letter at a time says ------------------------------- */

/* The word that says whose the slot is, of the message that is written next, or was written last. */
static _Atomic uint64_t *turn(int back)
{
	const struct ring *ring = &writer()->mail_out;

	return (_Atomic uint64_t *)(rn_arena + ring->offset + (ring->position - (unsigned)back) % SLOTS * SLOT);
}

/* Fill the ring with requests for a listener that is not there, each of which is answered by the link. */
static void ask_in_vain(struct process *process)
{
	enum { TOKEN = 1, WHAT = 4, LENGTH = 5 };
	static uint64_t token;
	struct ring *ring = &process->mail_out;

	for (;;) {
		char *slot = rn_arena + ring->offset + ring->position % SLOTS * SLOT;
		_Atomic uint64_t *its_turn = (_Atomic uint64_t *)slot;

		if (atomic_load(its_turn) != ((uint64_t)ring->nonce << 32 | ring->position))
			break;
		memset(slot + sizeof *its_turn, 0, SLOT - sizeof *its_turn);
		((uint64_t *)slot)[TOKEN] = ++token;
		((uint32_t *)slot)[WHAT] = RN_CM_LINK_ASKS;
		((uint32_t *)slot)[LENGTH] = sizeof(struct rn_cm_link_request);
		ring->position++;
		atomic_store(its_turn, (uint64_t)ring->nonce << 32 | ring->position);
	}
	for (unsigned i = 0; i < process->channel_count; i++)
		if (process->channels[i].fd >= 0)
			rn_eventfd_add(process->channels[i].fd);
}

static bool is_linked(void)
{
	bool is = false;

	pthread_mutex_lock(&rn_peers.lock);
	for (const struct process *process = rn_peers.processes; process; process = process->next)
		is = is || process->link;
	pthread_mutex_unlock(&rn_peers.lock);
	return is;
}

/* n: connect; q, Q: ask, by mail or not; a: say which event came of it; l, L: destroy the last one, by mail or not;
 * i: destroy all, and wait until our link has ended, but keep its socket; I: close that;
 * s: scribble over the length of what was written last; t: over the word that says whose the next slot is;
 * v, V: ask in vain, and read no answers from then on; read them;
 * o: say that our ring lies where none can be; k: end at once, by a signal. */
static void do_it(struct asker *asker, char letter)
{
	static struct process *deaf_to;
	static int kept;
	struct rn_link_message message;
	struct rdma_cm_id *id;
	struct link *link;
	uint32_t before = strchr("qQlL", letter) ? position(false) : 0;

	switch (letter) {
	case 'n':
		connect_once_more(asker);
		break;
	case 'q':
	case 'Q':
		asker->ids[asker->count++] = connect_to(asker->events);
		if (letter == 'q')
			EVENTUALLY(position(false) != before); /* the engine may have been awake, and do it */
		break;
	case 'a':
		say_what_came(asker);
		return;
	case 'l':
	case 'L':
		id = asker->ids[--asker->count];
		CHECK(!rdmanet_soft_cm_leave(id));
		destroy(id);
		if (letter == 'l')
			EVENTUALLY(position(false) != before);
		break;
	case 'i':
		kept = dup(writer()->link->source.fd);
		while (asker->count)
			destroy(asker->ids[--asker->count]);
		EVENTUALLY(!is_linked());
		break;
	case 'I':
		close(kept);
		break;
	case 's':
		((uint32_t *)turn(1))[5] = UINT32_MAX;
		break;
	case 't':
		atomic_store(turn(0), 4711);
		break;
	case 'o':
		link = writer()->link;
		for (int i = 0; i < 3; i++) {
			message = rn_link_message(RN_LINK_MAIL, 1, i == 0 ? 64 : i == 1 ? RN_ARENA_HEAP + 1 : INT64_MIN);
			pthread_mutex_lock(&rn_peers.lock);
			CHECK(!rn_send(&link->source, &link->out, &message, NULL, 0, -1));
			pthread_mutex_unlock(&rn_peers.lock);
		}
		break;
	case 'v':
		if (!deaf_to) {
			deaf_to = writer();
			pthread_mutex_lock(&rn_peers.lock); /* for which the engine waits before it reads */
		}
		ask_in_vain(deaf_to);
		break;
	case 'V':
		pthread_mutex_unlock(&rn_peers.lock);
		break;
	case 'k':
		raise(SIGKILL);
	}
	say(asker->fd, 'D');
}

static void client(int fd)
{
	ask_by(fd, do_it);
}

static struct rdma_cm_id *accept_next(void)
{
	struct rdma_cm_id *id = next_request();

	answer(id);
	return id;
}

static struct rdma_cm_id *let_in(const struct other *other)
{
	struct rdma_cm_id *id;

	say(other->fd, 'n');
	id = accept_next();
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(hear(other->fd) == 'D');
	return id;
}

/* Linked both ways, and each knows the other's event channel. */
static struct other meet(struct rdma_cm_id *ids[2])
{
	struct other other = spawn(client);

	ids[0] = let_in(&other);
	await_link(ids[0]);
	ids[1] = let_in(&other);
	return other;
}

static void part(struct other *other, struct rdma_cm_id *ids[2])
{
	end_other(other);
	for (int i = 0; i < 2; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < 2; i++)
		destroy(ids[i]);
}

/* --- what goes by mail ----------------------------------------------------------------------------------- */

/* A connection's whole life: REQ, RTU and the last DREQ come by it, and REP goes. */
static void a_life(void)
{
	struct rdma_cm_id *ids[2], *id;
	struct other other = meet(ids);
	uint32_t in = position(true), out = position(false);

	for (uint32_t i = 1; i <= 2 * SLOTS; i++) { /* round and round the ring */
		id = let_in(&other);
		tell(&other, 'l');
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		CHECK(!rdmanet_soft_cm_peer_is_gone(id));
		destroy(id);
		CHECK(position(true) == in + 3 * i && position(false) == out + i);
	}
	part(&other, ids);
}

/* A program that does not read hears all of it when it does. */
static void it_is_read_late(void)
{
	struct rdma_cm_id *ids[2];
	struct other other = meet(ids);

	for (int i = 0; i < FEW; i++)
		tell(&other, 'q');
	for (int i = 0; i < FEW; i++)
		tell(&other, 'l');
	for (int i = 0; i < FEW; i++)
		destroy(next_request());
	want_none(channel, 50);
	part(&other, ids);
}

/* Nor does a time limit pass for a program that has been told in time, and does not read it. */
static void it_is_read_after_its_time(void)
{
	struct rdma_cm_id *ids[2], *id;
	struct other other = meet(ids);
	uint64_t before = rn_settings.cm_timeout_ms;

	rn_settings.cm_timeout_ms = 50;
	say(other.fd, 'n');
	id = accept_next();
	CHECK(hear(other.fd) == 'D'); /* it is established there */
	usleep(150 * 1000);
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	rn_settings.cm_timeout_ms = before;
	tell(&other, 'l');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
	part(&other, ids);
}

/* Who leaves for a newcomer is not who has answered, and whose answer was not read. */
static void it_is_read_before_one_leaves(void)
{
	struct rlimit before, few = {.rlim_cur = 16};
	uint64_t silence_ms = rn_settings.silence_ms;
	struct rdma_conn_param param = with_data("who is asked");
	struct rdma_cm_id *ids[2], *asked[FEW];
	struct other other = meet(ids);

	for (int i = 0; i < FEW; i++)
		tell(&other, 'q');
	for (int i = 0; i < FEW; i++)
		make_qp(asked[i] = next_request());
	for (int i = 0; i < FEW; i++) {
		CHECK(!getrlimit(RLIMIT_NOFILE, &before));
		if (i == FEW - 1) {
			few.rlim_max = before.rlim_max;
			rn_settings.silence_ms = 0;
			CHECK(!setrlimit(RLIMIT_NOFILE, &few));
		}
		CHECK(!rdma_accept(asked[i], &param));
		say(other.fd, 'a');
		CHECK(hear(other.fd) == 'E');
	}
	CHECK(!setrlimit(RLIMIT_NOFILE, &before));
	rn_settings.silence_ms = silence_ms;
	for (int i = 0; i < FEW; i++)
		want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	for (int i = 0; i < FEW; i++)
		tell(&other, 'L');
	for (int i = 0; i < FEW; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < FEW; i++)
		destroy(asked[i]);
	part(&other, ids);
}

/* --- whoever ends ---------------------------------------------------------------------------------------- */

/* The listener goes, and nobody reads what lies there: the asker is told at once, as by TCP. */
static void the_listener_goes(void)
{
	struct rdma_cm_id *ids[2];
	struct other other = meet(ids);

	tell(&other, 'q');
	CHECK(!rdma_destroy_id(listener));
	say(other.fd, 'a');
	CHECK(hear(other.fd) == 'R');
	tell(&other, 'Q'); /* it does not know yet, or knows: likewise */
	say(other.fd, 'a');
	CHECK(hear(other.fd) == 'R');
	part(&other, ids);
	listener = new_listener(channel, FEW, &port);
}

/* It asks, or has been let in and left, and is killed: what it said before is heard. */
static void the_writer_is_killed(void)
{
	struct rdma_cm_id *ids[2], *left, *asked;
	struct other other = meet(ids);

	left = let_in(&other);
	tell(&other, 'l');
	tell(&other, 'q');
	say(other.fd, 'k');
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	for (int i = 0; i < 3; i++) {
		struct rdma_cm_event *event = next_event(channel, LIMIT_MS);

		if (event && event->event == RDMA_CM_EVENT_CONNECT_REQUEST) { /* if it is read before the end is known */
			asked = event->id;
			rdma_ack_cm_event(event);
			destroy(asked);
			i--;
			continue;
		}
		CHECK(event);
		if (event->event == RDMA_CM_EVENT_REJECTED) {
			i--;
		} else {
			CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED);
			CHECK(!rdmanet_soft_cm_peer_is_gone(event->id) == (event->id == left));
		}
		rdma_ack_cm_event(event);
	}
	destroy(left);
	destroy(ids[0]);
	destroy(ids[1]);
	close(other.fd);
}

/* It accepts once; then it says other things by its link, refuses by its first mail, and is killed. */
static void server(int fd)
{
	static const char why[] = "who refuses";
	enum { OTHERS = 8 };
	struct rdma_event_channel *events = new_channel();
	struct rn_link_message message = rn_link_message(RN_LINK_MESSAGES, 0, 0);
	struct rdma_conn_param param = with_data("who is asked");
	struct rdma_cm_id *first, *second;
	struct rdma_cm_event *event;
	struct link *link;

	new_listener(events, FEW, &port);
	CHECK(write(fd, &port, sizeof port) == sizeof port);
	event = want(events, RDMA_CM_EVENT_CONNECT_REQUEST);
	first = event->id;
	rdma_ack_cm_event(event);
	make_qp(first);
	CHECK(!rdma_accept(first, &param));
	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	await_link(first);
	say(fd, 'D');
	event = want(events, RDMA_CM_EVENT_CONNECT_REQUEST);
	second = event->id;
	rdma_ack_cm_event(event);
	say(fd, 'D');
	hear(fd);
	link = writer()->link;
	pthread_mutex_lock(&rn_peers.lock);
	for (int i = 0; i < OTHERS; i++)
		CHECK(!rn_send(&link->source, &link->out, &message, NULL, 0, -1));
	pthread_mutex_unlock(&rn_peers.lock);
	CHECK(!position(false));
	CHECK(!rdma_reject(second, why, sizeof why));
	EVENTUALLY(position(false) == 1);
	raise(SIGKILL);
}

/* The place of its ring is among what was not read yet when its end is seen. */
static void the_writer_is_killed_at_once(void)
{
	struct rdma_event_channel *events = new_channel();
	struct rdma_cm_id *first, *second;
	struct other other = spawn(server);
	struct rdma_cm_event *event;
	uint16_t before = port;

	CHECK(read(other.fd, &port, sizeof port) == sizeof port);
	first = connect_to(events);
	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(hear(other.fd) == 'D');
	await_link(first);
	second = connect_to(events);
	CHECK(hear(other.fd) == 'D');
	rn_engine_pause();
	say(other.fd, 'k');
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	rn_engine_resume();
	for (int i = 0; i < 2; i++) {
		event = next_event(events, LIMIT_MS);
		CHECK(event);
		if (event->id == first)
			CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED);
		else
			CHECK(event->event == RDMA_CM_EVENT_REJECTED && event->param.conn.private_data &&
			      !strcmp(event->param.conn.private_data, "who refuses"));
		rdma_ack_cm_event(event);
	}
	destroy(first);
	destroy(second);
	rdma_destroy_event_channel(events);
	close(other.fd);
	port = before;
}

/* Rounds of telling whom a process concerns are counted, and none of them may seem to have been before. */
static void after_many_rounds(void)
{
	struct rdma_cm_id *ids[2];
	struct other other = meet(ids);

	pthread_mutex_lock(&rn_peers.lock);
	rn_peers.round = UINT32_MAX;
	pthread_mutex_unlock(&rn_peers.lock);
	say(other.fd, 'k');
	CHECK(waitpid(other.pid, NULL, 0) == other.pid);
	for (int i = 0; i < 2; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < 2; i++)
		destroy(ids[i]);
	close(other.fd);
}

static int count_links(void)
{
	int count = 0;

	pthread_mutex_lock(&rn_peers.lock);
	for (const struct inbound *inbound = rn_peers.inbound; inbound; inbound = inbound->next)
		count += inbound->process != NULL;
	pthread_mutex_unlock(&rn_peers.lock);
	return count;
}

/* A process links again, and the end of its older link is seen after that: its ring is the one that it has told last. */
static void an_older_link_ends_late(void)
{
	struct rdma_cm_id *ids[2], *again[3];
	struct other other = meet(ids);
	uint32_t heard;

	say(other.fd, 'i');
	for (int i = 0; i < 2; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < 2; i++)
		destroy(ids[i]);
	CHECK(hear(other.fd) == 'D');
	again[0] = let_in(&other);
	await_link(again[0]);
	again[1] = let_in(&other);
	heard = position(true);
	CHECK(heard && count_links() == 2);
	tell(&other, 'I');
	EVENTUALLY(count_links() == 1);
	again[2] = let_in(&other);
	CHECK(position(true) > heard);
	end_other(&other);
	for (int i = 0; i < 3; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < 3; i++)
		destroy(again[i]);
}

/* --- who writes what makes no sense ------------------------------------------------------------------------ */

/* The length of a message, the word of a slot, the place of a ring: what is wrong is not heard, and all else is. */
static void a_ring_is_scribbled_over(void)
{
	struct rdma_cm_id *ids[2], *id;
	struct other other = meet(ids);

	tell(&other, 't'); /* its next message goes by the link, and so do all of that connection */
	id = let_in(&other);
	tell(&other, 'L');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);

	tell(&other, 'o');
	id = let_in(&other);
	tell(&other, 'L');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
	part(&other, ids);

	other = meet(ids);
	rn_engine_pause(); /* or it may hear the request before that is scribbled over */
	tell(&other, 'q');
	tell(&other, 's');
	rn_engine_resume();
	want_none(channel, 50);
	tell(&other, 'l');
	want_none(channel, 50);
	part(&other, ids);
}

static int count_answers(void)
{
	int count = 0;

	pthread_mutex_lock(&rn_peers.lock);
	for (const struct inbound *inbound = rn_peers.inbound; inbound; inbound = inbound->next)
		for (const struct packet *packet = inbound->out.first; packet; packet = packet->next)
			count++;
	pthread_mutex_unlock(&rn_peers.lock);
	return count;
}

/* Who asks, and does not read the answers, is not heard until it does: they are few. */
static void it_does_not_listen(void)
{
	enum { MORE = 4 };
	struct rdma_cm_id *ids[2], *id;
	struct other other = meet(ids);
	struct rdma_cm_event *event;

	for (int more = 0; more < MORE; more += count_answers() > 0) { /* some fit into the socket */
		tell(&other, 'v');
		CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
	}
	CHECK(count_answers() == 1);
	tell(&other, 'V');
	EVENTUALLY(!count_answers() && !rn_peers_have_mail());
	id = let_in(&other);
	tell(&other, 'L');
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	destroy(id);
	part(&other, ids);
}

/* A listener on a channel of its own, until it is put back. */
struct place {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;
	uint16_t port;
};

static struct place move_to(struct rdma_event_channel *another)
{
	struct place before = {channel, listener, port};

	channel = another;
	listener = new_listener(channel, FEW, &port);
	return before;
}

static void move_back(struct place before)
{
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	channel = before.channel;
	listener = before.listener;
	port = before.port;
}

static void fill(int fd)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};

	while (poll(&room, 1, 0) == 1)
		rn_eventfd_add(fd);
}

static int count_unread(void)
{
	const struct rn_cm_event *event;
	int count = 0;

	pthread_mutex_lock(&rn_cm_lock);
	for (event = ((struct rn_cm_channel *)channel)->events; event; event = event->next)
		count++;
	pthread_mutex_unlock(&rn_cm_lock);
	return count;
}

/* Tokens that stand for nothing, and never end, do not keep a reader that does not wait, and where no more has room, the
 * engine goes on: whatever the other makes of the open file. */
static void the_channel_is_flooded(void)
{
	struct place before = move_to(new_channel());
	struct rdma_cm_id *ids[2];
	struct rdma_cm_event *event;
	uint64_t many = UINT64_MAX - 1024;
	struct other other = meet(ids);

	CHECK(((struct rn_cm_channel *)channel)->never_waits);
	CHECK(!fcntl(channel->fd, F_SETFL, 0));
	CHECK(write(channel->fd, &many, sizeof many) == sizeof many);
	CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
	tell(&other, 'q');
	destroy(next_request());
	say(other.fd, 'a');
	CHECK(hear(other.fd) == 'R'); /* before it asks again: it may hear that at any time */

	tell(&other, 't'); /* what follows comes by the link */
	fill(channel->fd);
	tell(&other, 'Q');
	tell(&other, 'Q');
	EVENTUALLY(count_unread() == 2); /* the engine did not wait for room */
	destroy(next_request());
	destroy(next_request());
	part(&other, ids);
	move_back(before);
}

/* A channel whose reader waits has no number: what wakes it leads to an event. */
static void a_channel_that_waits(void)
{
	struct rdma_event_channel *waits = new_channel();
	struct rdma_cm_id *ids[2];
	struct place before;
	struct other other;

	CHECK(!fcntl(waits->fd, F_SETFL, 0));
	before = move_to(waits);
	other = spawn(client);
	ids[0] = let_in(&other);
	await_link(ids[0]);
	ids[1] = let_in(&other);
	CHECK(!((struct rn_cm_channel *)channel)->number && !position(true));
	part(&other, ids);
	move_back(before);
}

static bool peer_moved(struct rdma_cm_id *id)
{
	bool moved;

	pthread_mutex_lock(&rn_cm_lock);
	moved = rn_cm_id(id)->wire->peer_moved;
	pthread_mutex_unlock(&rn_cm_lock);
	return moved;
}

/* Connections move to another channel before they are accepted: who reads the listener's events hears the next request,
 * whether the connections' are read or not. */
static void connections_move(void)
{
	enum { MOVED = 3 };
	struct rdma_event_channel *aside = new_channel();
	struct rdma_cm_id *ids[2], *moved[MOVED], *last;
	struct other other = meet(ids);

	for (int i = 0; i < MOVED; i++) {
		say(other.fd, 'n');
		moved[i] = next_request();
		CHECK(!rdma_migrate_id(moved[i], aside));
		answer(moved[i]);
		want_status(aside, RDMA_CM_EVENT_ESTABLISHED, 0);
		CHECK(hear(other.fd) == 'D');
		EVENTUALLY(peer_moved(ids[0])); /* what its engine hears by the link would have it hear all */
		want_none(channel, 0); /* and no token is left that would */
		want_none(aside, 0);
	}
	last = let_in(&other);
	end_other(&other);
	for (int i = 0; i < 3; i++)
		want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < MOVED; i++)
		want_status(aside, RDMA_CM_EVENT_DISCONNECTED, 0);
	for (int i = 0; i < MOVED; i++)
		destroy(moved[i]);
	destroy(last);
	destroy(ids[0]);
	destroy(ids[1]);
	rdma_destroy_event_channel(aside);
}

int main(void)
{
	channel = new_channel();
	listener = new_listener(channel, FEW, &port);
	RUN(a_life);
	RUN(it_is_read_late);
	RUN(it_is_read_after_its_time);
	RUN(it_is_read_before_one_leaves);
	RUN(the_listener_goes);
	RUN(the_writer_is_killed);
	RUN(the_writer_is_killed_at_once);
	RUN(after_many_rounds);
	RUN(an_older_link_ends_late);
	RUN(a_ring_is_scribbled_over);
	RUN(it_does_not_listen);
	RUN(the_channel_is_flooded);
	RUN(a_channel_that_waits);
	RUN(connections_move);
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
	return 0;
}
