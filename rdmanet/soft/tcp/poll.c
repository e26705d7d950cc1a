/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that polls its CQ looks after the streams of its queue pairs itself: no other thread and no
 * wake-up then lies between a byte's arrival and its completion.
 *
 *     watched   the engine has the sockets in its epoll; poll_cq looks as well, when it finds nothing
 *        |  BUSY empty polls while the CQ isn't armed            ^
 *        v                                                        |  the CQ is armed, or TICK_NS
 *     polled    the engine leaves the sockets alone, but for errors and room to write
 *
 * Polled, an ACK is put off until the next look at the sockets: a program that was sent something is about
 * to answer, and the ACK goes along with that.  Should it stop polling instead, the tick notices.
 *
 * Locks.  A CQ's list has one of its own.  Queue pairs are put on it with their send lock held, so whoever has the
 * list only tries send locks.  If a poller finds one taken, another thread is busy with the same socket, or is
 * about to take the queue pair off the list.  A thread that arms the CQ lets go of the list, and tries again.
 */
#include <sched.h>

#include "requester/requester.h"
#include "tcp/tcp.h"

enum {
	BUSY = 256,
	TICK_NS = 1000 * 1000,
	LOOKS = 8, /* queue pairs that one poll looks at */
};

static bool poll_streams(struct rn_cq *cq);
static void arm_streams(struct rn_cq *cq);
static const struct rn_cq_source_ops streams_of_cq = {.poll = poll_streams, .arm = arm_streams};

static void list_at(struct rn_cq *cq, struct rn_tcp_link *link)
{
	rn_lock(&cq->tcp_lock);
	atomic_store(&cq->source, &streams_of_cq);
	link->round = cq->tcp_round;
	rn_list_add(&cq->tcp_qps, &link->link);
	atomic_fetch_add(&cq->num_tcp, 1);
	rn_unlock(&cq->tcp_lock);
}

static void unlist_at(struct rn_cq *cq, struct rn_tcp_link *link)
{
	rn_lock(&cq->tcp_lock);
	rn_list_del(&link->link);
	atomic_fetch_sub(&cq->num_tcp, 1);
	rn_unlock(&cq->tcp_lock);
}

void rn_tcp_list(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	if (streams->listed)
		return;
	streams->listed = true;
	streams->send_link.qp = streams->recv_link.qp = qp;
	list_at(qp->send_cq, &streams->send_link);
	if (qp->recv_cq != qp->send_cq)
		list_at(qp->recv_cq, &streams->recv_link);
}

void rn_tcp_unlist(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
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

static bool is_open(const struct rn_tcp *stream)
{
	return stream && !stream->ended && stream->state == RN_TCP_OPEN;
}

/* All with the send lock held. */
static void watch_both(struct rn_qp *qp)
{
	if (is_open(qp->tcp->in))
		rn_tcp_watch(qp->tcp->in);
	if (is_open(qp->tcp->out))
		rn_tcp_watch(qp->tcp->out);
}

static void leave_to_engine(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	streams->idle_polls = 0;
	if (!streams->polled)
		return;
	streams->polled = false;
	rn_tcp_tell(qp);
	watch_both(qp);
	/* The socket raises no event for bytes that were read and not handled yet. */
	if (is_open(streams->in) && (streams->in->reading || rn_tcp_available(streams->in)))
		rn_tcp_go_on(streams->in);
}

void rn_tcp_tick(struct rn_timer *timer)
{
	struct rn_tcp_path *streams = container_of(timer, struct rn_tcp_path, tick);
	struct rn_qp *qp = streams->qp;

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
	return is_open(qp->tcp->out) && qp->sq_executed != qp->tcp->next;
}

/* Look at both connections, with the send lock held. True: something has happened. */
static bool look(struct rn_qp *qp, bool is_armed)
{
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_tcp *in = streams->in;
	uint32_t executed = qp->sq_executed, expected = in ? in->expected : 0;
	bool happened = false, heard = false;

	streams->polls++;
	if (!streams->polled && !is_armed && ++streams->idle_polls >= BUSY) {
		streams->polled = true;
		streams->polls_seen = streams->polls;
		watch_both(qp);
		rn_timer_set(&streams->tick, TICK_NS);
	}
	/* First the connection of the last request.  If it has brought everything, the other needs no look. */
	if (in && in->was_piggybacked && is_hoping(qp))
		heard = rn_tcp_receive(qp);
	if (is_open(in) && in->expected == expected)
		rn_tcp_serve(qp);
	if (!heard && is_hoping(qp))
		heard = rn_tcp_receive(qp);
	happened = is_open(in) && in->expected != expected;
	if (!happened)
		rn_tcp_tell(qp);
	/* Each of them may have made room. */
	if (is_open(streams->out) && (heard || qp->sq_executed != executed))
		rn_tcp_push(qp);
	rn_sq_drained(qp);
	return happened || qp->sq_executed != executed;
}

static bool poll_streams(struct rn_cq *cq)
{
	bool happened = false, is_armed;
	struct rn_list *first;

	if (!rn_try_lock(&cq->tcp_lock))
		return false;
	/* The program that polled just now may not poll again. */
	is_armed = rn_cq_is_armed(cq);
	first = cq->tcp_qps.next;
	for (int looked = 0; looked < LOOKS && cq->tcp_qps.next != &cq->tcp_qps && !happened; looked++) {
		struct rn_list *link = cq->tcp_qps.next;
		struct rn_qp *qp = container_of(link, struct rn_tcp_link, link)->qp;

		if (looked && link == first)
			break;
		rn_list_del(link); /* to the end of the list, so that each has its turn */
		rn_list_add(&cq->tcp_qps, link);
		if (!rn_try_lock(&qp->sq_lock))
			continue;
		happened = look(qp, is_armed);
		rn_unlock(&qp->sq_lock);
	}
	rn_unlock(&cq->tcp_lock);
	return happened;
}

static void arm_streams(struct rn_cq *cq)
{
	struct rn_list *at;
	uint32_t round;

	rn_lock(&cq->tcp_lock);
	round = ++cq->tcp_round;
	for (at = cq->tcp_qps.next; at != &cq->tcp_qps;) {
		struct rn_tcp_link *link = container_of(at, struct rn_tcp_link, link);

		if ((int32_t)(link->round - round) >= 0) {
			at = at->next;
		} else if (rn_try_lock(&link->qp->sq_lock)) {
			leave_to_engine(link->qp);
			link->round = round;
			rn_unlock(&link->qp->sq_lock);
			at = at->next;
		} else {
			rn_unlock(&cq->tcp_lock);
			sched_yield();
			rn_lock(&cq->tcp_lock);
			at = cq->tcp_qps.next;
		}
	}
	rn_unlock(&cq->tcp_lock);
}
