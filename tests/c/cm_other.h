/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Another process that does as it is told, by single characters over a socket pair: connections between two of them.
 * Mostly it asks, and the test's own process is asked.
 */
#ifndef CM_OTHER_H
#define CM_OTHER_H

#include "cm_harness.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>

struct other {
	pid_t pid;
	int fd;
};

static inline struct other spawn(void (*serve)(int fd))
{
	struct other other;
	int fds[2];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	fflush(NULL);
	other.pid = fork();
	CHECK(other.pid >= 0);
	if (!other.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		on.pd = NULL; /* the parent's */
		serve(fds[1]);
		_exit(0); /* what it has forgotten of its parent looks like a leak */
	}
	close(fds[1]);
	other.fd = fds[0];
	return other;
}

static inline void say(int fd, char what)
{
	CHECK(write(fd, &what, 1) == 1);
}

/* 0: the other end has gone. */
static inline char hear(int fd)
{
	char what = 0;

	return read(fd, &what, 1) == 1 ? what : 0;
}

/* It has been told to end. */
static inline void join(struct other *other)
{
	int status;

	close(other->fd);
	CHECK(waitpid(other->pid, &status, 0) == other->pid && !status);
}

/* --- who asks, a letter at a time ------------------------------------------------------------------------ */

static uint16_t port; /* that is asked */

struct asker {
	int fd;
	struct rdma_event_channel *events;
	struct rdma_cm_id *ids[32];
	unsigned count;
};

static inline struct rdma_cm_id *connect_to(struct rdma_event_channel *events)
{
	struct rdma_conn_param param = with_data("who asks");
	struct rdma_cm_id *id = new_id(events);

	resolve(id, port);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	return id;
}

/* The process at the other end is linked to ours, and ours to it. */
static inline void await_link(struct rdma_cm_id *id)
{
	EVENTUALLY(rn_peer_is_met((uint16_t)(rn_cm_id(id)->terms.remote_qpn >> 8)));
}

/* By which way a connection was asked for, and which end this is. */
static inline enum rn_cm_link_side side_of(struct rdma_cm_id *id)
{
	enum rn_cm_link_side side;

	pthread_mutex_lock(&rn_cm_lock);
	side = rn_cm_id(id)->wire ? rn_cm_id(id)->wire->side : RN_CM_LINK_ASKS;
	pthread_mutex_unlock(&rn_cm_lock);
	return side;
}

/* Connect to another process, which lets one in for the letter n. */
static inline struct rdma_cm_id *reach(struct rdma_event_channel *events, const struct other *other)
{
	struct rdma_cm_id *id;

	say(other->fd, 'n');
	id = connect_to(events);
	want_status(events, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(hear(other->fd) == 'D');
	return id;
}

/* Connect, until that stands. */
static inline struct rdma_cm_id *connect_once_more(struct asker *asker)
{
	struct rdma_cm_id *id = asker->ids[asker->count++] = connect_to(asker->events);
	struct rdma_cm_event *event = want(asker->events, RDMA_CM_EVENT_ESTABLISHED);

	CHECK(!event->status && !strcmp(event->param.conn.private_data, "who is asked"));
	rdma_ack_cm_event(event);
	await_link(id);
	return id;
}

/* E, R: what came of what was asked, or ?. */
static inline void say_what_came(struct asker *asker)
{
	struct rdma_cm_event *event = next_event(asker->events, LIMIT_MS);

	CHECK(event);
	say(asker->fd, event->event == RDMA_CM_EVENT_ESTABLISHED ? 'E' : event->event == RDMA_CM_EVENT_REJECTED ? 'R' : '?');
	rdma_ack_cm_event(event);
}

/* Letters that mean the same in every test. q: ask; l: destroy the last one; c: say which event came. */
static inline void do_as_always(struct asker *asker, char letter)
{
	switch (letter) {
	case 'q':
		asker->ids[asker->count++] = connect_to(asker->events);
		break;
	case 'l':
		destroy(asker->ids[--asker->count]);
		break;
	case 'c':
		say_what_came(asker);
		return;
	default:
		abort();
	}
	say(asker->fd, 'D');
}

/* Do what each letter says, until it is e. */
static inline void ask_by(int fd, void (*what)(struct asker *asker, char letter))
{
	struct asker asker = {.fd = fd, .events = new_channel()};
	char letter;

	while ((letter = hear(fd)) != 'e')
		what(&asker, letter);
	while (asker.count)
		destroy(asker.ids[--asker.count]);
	close_shared();
	rdma_destroy_event_channel(asker.events);
}

static inline void tell(const struct other *other, char what)
{
	say(other->fd, what);
	CHECK(hear(other->fd) == 'D');
}

static inline void end_other(struct other *other)
{
	say(other->fd, 'e');
	join(other);
}

/* --- the engine is held up ----------------------------------------------------------------------------------- */

struct hold {
	struct rn_task task;
	atomic_bool has_begun;
	sem_t ends;
};

static inline void hold(struct rn_task *task)
{
	struct hold *this = RN_OWNER(task, struct hold, task);

	atomic_store(&this->has_begun, true);
	while (sem_wait(&this->ends))
		; /* EINTR */
}

/* As soon as the engine has done what it was given before, it does nothing until let_engine_go(). */
static inline void hold_engine_then(struct hold *held)
{
	*held = (struct hold){.task.run = hold};
	CHECK(!sem_init(&held->ends, 0, 0));
	rn_task_post(&held->task);
}

static inline void await_hold(struct hold *held)
{
	EVENTUALLY(atomic_load(&held->has_begun));
}

static inline void hold_engine(struct hold *held)
{
	hold_engine_then(held);
	await_hold(held);
}

static inline void let_engine_go(struct hold *held)
{
	CHECK(!sem_post(&held->ends));
}

/* --- who is asked ------------------------------------------------------------------------------------------ */

static struct rdma_event_channel *channel; /* the listener's, and that of what it accepts */
static struct rdma_cm_id *listener;

static inline struct rdma_cm_id *next_request(void)
{
	struct rdma_cm_event *event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;

	CHECK(!strcmp(event->param.conn.private_data, "who asks") && event->listen_id == listener);
	rdma_ack_cm_event(event);
	return id;
}

static inline void answer(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = with_data("who is asked");

	make_qp(id);
	CHECK(!rdma_accept(id, &param));
}

#endif
