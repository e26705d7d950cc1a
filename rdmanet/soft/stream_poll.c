/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that polls its CQ looks after the streams of its queue pairs itself: between a byte's arrival
 * and its completion there is no other thread then, nor a wake-up.
 *
 *     watched   the engine has the sockets in its epoll; poll_cq looks as well, when it finds nothing
 *        |  BUSY empty polls while the CQ isn't armed            ^
 *        v                                                        |  the CQ is armed, or TICK_NS
 *     polled    the engine leaves the sockets alone, but for errors and room to write
 *
 * Polled, an ACK is put off until the next look at the sockets: a program that was sent something is about
 * to answer, and the ACK rides on that.  Should it stop polling instead, the tick notices.
 *
 * Locks.  A CQ's list has one of its own.  Queue pairs are put on it with their send lock held, so whoever has the
 * list only tries send locks.  To the poller one that is taken says that somebody is busy with the same socket, or is
 * about to take the queue pair off the list; who arms the CQ lets go of the list, and comes again.
 */
#include <sched.h>

#include "soft.h"

enum {
	BUSY = 256,
	TICK_NS = 1000 * 1000,
	LOOKS = 8, /* queue pairs that one poll looks at */
};

static bool try_lock(struct rn_lock *lock)
{
	return !atomic_load_explicit(&lock->held, memory_order_relaxed) &&
	       !atomic_exchange_explicit(&lock->held, 1, memory_order_acquire);
}

static void list_at(struct rn_cq *cq, struct rn_stream_link *link)
{
	rn_lock(&cq->stream_lock);
	link->round = cq->stream_round;
	rn_list_add(&cq->streams, &link->link);
	atomic_fetch_add(&cq->num_streams, 1);
	rn_unlock(&cq->stream_lock);
}

static void unlist_at(struct rn_cq *cq, struct rn_stream_link *link)
{
	rn_lock(&cq->stream_lock);
	rn_list_del(&link->link);
	atomic_fetch_sub(&cq->num_streams, 1);
	rn_unlock(&cq->stream_lock);
}

void rn_stream_list(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	if (streams->listed)
		return;
	streams->listed = true;
	streams->send_link.qp = streams->recv_link.qp = qp;
	list_at(qp->send_cq, &streams->send_link);
	if (qp->recv_cq != qp->send_cq)
		list_at(qp->recv_cq, &streams->recv_link);
}

void rn_stream_unlist(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	bool was_listed;

	rn_lock(&qp->sq_lock);
	was_listed = streams->listed;
	streams->listed = false;
	rn_unlock(&qp->sq_lock);
	if (!was_listed)
		return;
	unlist_at(qp->send_cq, &streams->send_link);
	if (qp->recv_cq != qp->send_cq)
		unlist_at(qp->recv_cq, &streams->recv_link);
}

static bool is_open(const struct rn_stream *stream)
{
	return stream && !stream->ended && stream->state == RN_STREAM_OPEN;
}

/* All with the send lock held. */
static void watch_both(struct rn_qp *qp)
{
	if (is_open(qp->streams.in))
		rn_stream_watch(qp->streams.in);
	if (is_open(qp->streams.out))
		rn_stream_watch(qp->streams.out);
}

static void leave_to_engine(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	streams->idle_polls = 0;
	if (!streams->polled)
		return;
	streams->polled = false;
	rn_stream_tell(qp);
	watch_both(qp);
	/* What was read and not looked at yet raises no event. */
	if (is_open(streams->in) && (streams->in->reading || rn_wire_available(streams->in)))
		rn_stream_go_on(streams->in);
}

void rn_stream_tick(struct rn_timer *timer)
{
	struct rn_streams *streams = container_of(timer, struct rn_streams, tick);
	struct rn_qp *qp = container_of(streams, struct rn_qp, streams);

	rn_lock(&qp->sq_lock);
	if (streams->polled) {
		if (streams->polls == streams->polls_seen) {
			leave_to_engine(qp);
		} else {
			streams->polls_seen = streams->polls;
			rn_timer_set(timer, TICK_NS);
		}
	}
	rn_unlock(&qp->sq_lock);
}

/* For answers. */
static bool is_hoping(const struct rn_qp *qp)
{
	return is_open(qp->streams.out) && qp->sq_executed != qp->streams.next;
}

/* With the send lock held. Has anything happened? */
static bool look(struct rn_qp *qp, bool is_armed)
{
	struct rn_streams *streams = &qp->streams;
	struct rn_stream *in = streams->in;
	uint32_t executed = qp->sq_executed, expected = in ? in->expected : 0;
	bool happened = false, heard = false;

	streams->polls++;
	if (!streams->polled && !is_armed && ++streams->idle_polls >= BUSY) {
		streams->polled = true;
		streams->polls_seen = streams->polls;
		watch_both(qp);
		rn_timer_set(&streams->tick, TICK_NS);
	}
	/* First where the last request came from.  It may have told all there is to tell, so the other need not be asked. */
	if (in && in->rode && is_hoping(qp))
		heard = rn_stream_receive(qp);
	if (is_open(in) && in->expected == expected)
		rn_stream_serve(qp);
	if (!heard && is_hoping(qp))
		heard = rn_stream_receive(qp);
	happened = is_open(in) && in->expected != expected;
	if (!happened)
		rn_stream_tell(qp);
	/* Either may have made room. */
	if (is_open(streams->out) && (heard || qp->sq_executed != executed))
		rn_stream_push(qp);
	rn_sq_drained(qp);
	return happened || qp->sq_executed != executed;
}

bool rn_stream_poll(struct rn_cq *cq)
{
	bool happened = false, is_armed;
	struct rn_list *first;

	if (!try_lock(&cq->stream_lock))
		return false;
	/* Nobody may be about to look again, whoever polled just now. */
	is_armed = rn_cq_is_armed(cq);
	first = cq->streams.next;
	for (int looked = 0; looked < LOOKS && cq->streams.next != &cq->streams && !happened; looked++) {
		struct rn_list *link = cq->streams.next;
		struct rn_qp *qp = container_of(link, struct rn_stream_link, link)->qp;

		if (looked && link == first)
			break;
		rn_list_del(link); /* to the end: everybody's turn comes */
		rn_list_add(&cq->streams, link);
		if (!try_lock(&qp->sq_lock))
			continue;
		happened = look(qp, is_armed);
		rn_unlock(&qp->sq_lock);
	}
	rn_unlock(&cq->stream_lock);
	return happened;
}

void rn_stream_arm(struct rn_cq *cq)
{
	struct rn_list *at;
	uint32_t round;

	rn_lock(&cq->stream_lock);
	round = ++cq->stream_round;
	for (at = cq->streams.next; at != &cq->streams;) {
		struct rn_stream_link *link = container_of(at, struct rn_stream_link, link);

		if ((int32_t)(link->round - round) >= 0) {
			at = at->next;
		} else if (try_lock(&link->qp->sq_lock)) {
			leave_to_engine(link->qp);
			link->round = round;
			rn_unlock(&link->qp->sq_lock);
			at = at->next;
		} else {
			rn_unlock(&cq->stream_lock);
			sched_yield();
			rn_lock(&cq->stream_lock);
			at = cq->streams.next;
		}
	}
	rn_unlock(&cq->stream_lock);
}
