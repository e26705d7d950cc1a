/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of streams: accepting, and the end; connect.c has their other beginning.  tcp.h has the theory.
 *
 *     ours     CONNECTING -> GREETING -> OPEN -> LINGERING -> freed
 *     theirs                 GREETING -> OPEN -> LINGERING -> freed
 *
 * Until an accepted stream is OPEN it belongs to the engine; then to its queue pair, until that lets go of it.  A
 * lingering stream is the engine's again: the last answers are on their way to the peer, and closing a socket with
 * unread bytes would discard them.
 */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/extras.h"
#include "base/gid.h"
#include "base/log.h"
#include "objects/ah.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

enum { FIRST_BACKOFF_NS = 50 * 1000 };

static struct {
	pthread_mutex_t lock; /* the list; innermost */
	struct rn_tcp *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void in_ready(struct rn_source *source, uint32_t events);
static void timer_fired(struct rn_timer *timer);
static void take_apart(struct rn_task *task);
static void go_on(struct rn_task *task);
static void stop_all(void);
static void forget_in_child(void);

static void start_once(void)
{
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

/* --- objects ---------------------------------------------------------------------------------------------- */

struct rn_tcp *rn_tcp_make(int fd, bool is_out)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct rn_tcp *stream = calloc(1, sizeof(*stream));
	int yes = 1;

	pthread_once(&once, start_once);
	if (!stream)
		return NULL;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
	stream->source = (struct rn_source){.fd = fd, .ready = is_out ? rn_tcp_out_ready : in_ready};
	stream->timer.fire = timer_fired;
	stream->task.run = take_apart;
	stream->again.run = go_on;
	stream->is_out = is_out;
	pthread_mutex_lock(&all.lock);
	stream->link = &all.first;
	stream->next = all.first;
	if (stream->next)
		stream->next->link = &stream->next;
	all.first = stream;
	pthread_mutex_unlock(&all.lock);
	return stream;
}

void rn_tcp_free(struct rn_tcp *stream)
{
	rn_stranger_forget(&stream->stranger);
	rn_source_remove(&stream->source);
	rn_timer_cancel(&stream->timer);
	rn_task_cancel(&stream->task);
	rn_task_cancel(&stream->again);
	rn_fd_close(stream->source.fd);
	pthread_mutex_lock(&all.lock);
	*stream->link = stream->next;
	if (stream->next)
		stream->next->link = stream->link;
	pthread_mutex_unlock(&all.lock);
	free(stream->input);
	free(stream);
}

static void stop_all(void)
{
	while (all.first)
		rn_tcp_free(all.first);
}

static void forget_in_child(void)
{
	pthread_mutex_init(&all.lock, NULL);
	all.first = NULL;
}

void rn_tcp_watch(struct rn_tcp *stream)
{
	/* poll_cq looks at open streams only. */
	bool is_polled = stream->qp->tcp->polled && stream->state == RN_TCP_OPEN;
	bool reads = !is_polled && (stream->is_out || !(stream->wants_out || stream->held));
	uint32_t events = (reads ? EPOLLIN : 0) | (stream->wants_out ? EPOLLOUT : 0);

	if (events == stream->events || stream->ended)
		return;
	stream->events = events;
	rn_source_modify(&stream->source, events);
}

static void go_on(struct rn_task *task)
{
	struct rn_tcp *stream = RN_OWNER(task, struct rn_tcp, again);

	stream->source.ready(&stream->source, 0);
}

void rn_tcp_go_on(struct rn_tcp *stream)
{
	if (!stream->ended && !stream->qp->tcp->polled)
		rn_task_post(&stream->again);
}

/* --- which path ------------------------------------------------------------------------------------------------ */

RN_EXPORT int rdmanet_soft_qp_way(struct ibv_qp *base)
{
	struct rn_qp *qp = rn_qp(base);
	int way = RDMANET_SOFT_WAY_NONE;

	if (rn_is_foreign(base->context))
		return RDMANET_SOFT_WAY_NONE;
	rn_lock(&qp->sq_lock);
	if (qp->uses_tcp)
		way = RDMANET_SOFT_WAY_STREAM;
	else if (qp->peer)
		way = atomic_load(&qp->peer->state) == RN_PEER_SELF    ? RDMANET_SOFT_WAY_SELF
		      : atomic_load(&qp->peer->state) == RN_PEER_READY ? RDMANET_SOFT_WAY_MAPPED
								       : RDMANET_SOFT_WAY_NONE;
	rn_unlock(&qp->sq_lock);
	return way;
}

int rn_tcp_listen(struct rn_qp *qp, const struct ibv_ah_attr *ah)
{
	uint16_t port = qp->ex.qp_base.qp_num >> 8;
	uint32_t interface = 0;
	union ibv_gid at;

	/* Connections from this host use the loopback interface, whichever of our addresses they name. */
	if (rn_ah_is_ours(ah))
		at = (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
	else if (!rn_gid_at(ah->grh.sgid_index, &at, &interface))
		return EADDRNOTAVAIL;
	return rn_port_listen(port, &at, interface);
}

void rn_tcp_use(struct rn_qp *qp)
{
	qp->uses_tcp = true;
	qp->responder.found = false;
	rn_tcp_list(qp);
}

bool rn_tcp_is_current(const struct rn_tcp *stream)
{
	const struct rn_tcp_path *streams = stream->qp->tcp;

	return (stream->is_out ? streams->out : streams->in) == stream && !stream->ended;
}

/* --- accepting ------------------------------------------------------------------------------------------------------ */

static void leave(struct rn_stranger *stranger)
{
	rn_tcp_free(RN_OWNER(stranger, struct rn_tcp, stranger));
}

void rn_tcp_accepted(int fd)
{
	struct rn_tcp *in = rn_tcp_make(fd, false);
	struct sockaddr_storage from = {0};
	socklen_t length = sizeof(from);
	int yes = 1;

	if (!in) {
		rn_fd_close(fd);
		return;
	}
	/* Once old, it must not keep the port from a TCP server, when this process has ended. */
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	in->state = RN_TCP_GREETING;
	in->events = EPOLLIN;
	if (getpeername(fd, (struct sockaddr *)&from, &length) || rn_source_add(&in->source, EPOLLIN)) {
		rn_tcp_free(in);
		return;
	}
	rn_timer_set(&in->timer, rn_settings.silence_ms * 1000000);
	in->stranger.leave = leave;
	in->stranger.from = rn_stranger_by_tcp(fd, (struct sockaddr *)&from);
	rn_stranger_add(&in->stranger, RN_STRANGER_SILENT);
}

static bool attach(struct rn_tcp *in)
{
	struct rn_qp *qp;
	bool attached = false;

	pthread_mutex_lock(&rn_process_lock);
	qp = rn_qp_by_number(in->hello.dest_qpn);
	if (qp) {
		rn_lock(&qp->sq_lock);
		attached = rn_tcp_is_expected(in, qp) && rn_tcp_hello_welcome(in) && rn_tcp_serve_begin(qp, in);
		if (attached) {
			rn_tcp_flush(in);
			in->qp = qp;
			in->state = RN_TCP_OPEN;
			qp->tcp->in = in;
			rn_tcp_list(qp);
		}
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_process_lock);
	return attached;
}

bool rn_tcp_attach(struct rn_tcp *in)
{
	bool attached = attach(in);

	if (!attached && in->whose == RN_WHOSE_ASKED) {
		rn_tcp_ask_whose(in);
		attached = attach(in);
	}
	if (attached) {
		rn_stranger_forget(&in->stranger);
		rn_timer_cancel(&in->timer);
	}
	return attached;
}

static void serve(struct rn_tcp *in, uint32_t events)
{
	struct rn_qp *qp = in->qp;

	rn_lock(&qp->sq_lock);
	/* While it waits for a piggybacked request nobody reads the socket, and so would see that. */
	if (rn_tcp_is_current(in) && in->held && events & (EPOLLERR | EPOLLHUP))
		rn_tcp_lost(in);
	if (rn_tcp_is_current(in)) {
		in->wants_out = false;
		rn_tcp_serve(qp);
		/* A piggybacked ACK may have made room, or it is a broken one's turn now. */
		if (qp->uses_tcp && qp->tcp->out && (qp->tcp->next != qp->sq_posted || qp->tcp->broken))
			rn_tcp_push(qp);
		rn_sq_drained(qp);
	}
	rn_unlock(&qp->sq_lock);
}

static void in_ready(struct rn_source *source, uint32_t events)
{
	struct rn_tcp *in = RN_OWNER(source, struct rn_tcp, source);

	if (!in->qp && !rn_tcp_hello_arrived(in)) {
		rn_tcp_free(in);
		return;
	}
	if (in->qp)
		serve(in, events);
}

/* --- the end --------------------------------------------------------------------------------------------------------- */

static void linger_ready(struct rn_source *source, uint32_t events)
{
	struct rn_tcp *stream = RN_OWNER(source, struct rn_tcp, source);
	char unread[16 * 1024];
	ssize_t got;

	(void)events;
	if (stream->output_at != stream->output_end && rn_tcp_flush(stream)) {
		shutdown(stream->source.fd, SHUT_WR);
		rn_source_modify(&stream->source, EPOLLIN);
	}
	/* Read at most this much at a time: the peer can't be told to stop. */
	got = recv(stream->source.fd, unread, sizeof(unread), MSG_DONTWAIT);
	if (!got || (got < 0 && errno != EAGAIN && errno != EINTR))
		rn_tcp_free(stream);
}

/* No queue pair has it from here on. Its source and timer are not set, or this is the engine. */
static void let_go(struct rn_tcp *stream)
{
	stream->qp = NULL;
	if (stream->state != RN_TCP_OPEN) {
		rn_tcp_free(stream);
		return;
	}
	rn_source_remove(&stream->source);
	rn_task_cancel(&stream->again);
	stream->state = RN_TCP_LINGERING;
	stream->source.ready = linger_ready;
	if (rn_tcp_flush(stream))
		shutdown(stream->source.fd, SHUT_WR);
	rn_timer_set(&stream->timer, rn_settings.silence_ms * 1000000);
	if (rn_source_add(&stream->source, EPOLLIN | (stream->output_at != stream->output_end ? EPOLLOUT : 0)))
		rn_tcp_free(stream);
}

/* On the engine: no other callback is running. */
static void take_apart(struct rn_task *task)
{
	struct rn_tcp *stream = RN_OWNER(task, struct rn_tcp, task);
	struct rn_qp *qp = stream->qp;
	struct rn_tcp **its;
	bool is_mine;

	rn_lock(&qp->sq_lock);
	its = stream->is_out ? &qp->tcp->out : &qp->tcp->in;
	is_mine = *its == stream;
	if (is_mine) {
		*its = NULL;
		rn_sq_progress_locked(qp);
	}
	rn_unlock(&qp->sq_lock);
	if (is_mine)
		let_go(stream); /* else a reset has it, and waits for us */
}

static void timer_fired(struct rn_timer *timer)
{
	struct rn_tcp *stream = RN_OWNER(timer, struct rn_tcp, timer);
	struct rn_qp *qp = stream->qp;

	if (!qp) {
		if (stream->state == RN_TCP_GREETING)
			rn_warn(RN_WARN_SILENCE, "closed a connection that did not identify itself within %llu ms",
				(unsigned long long)rn_settings.silence_ms);
		rn_tcp_free(stream);
		return;
	}
	rn_lock(&qp->sq_lock);
	if (rn_tcp_is_current(stream) && stream->state == RN_TCP_GREETING)
		rn_tcp_attempt_failed(stream, true);
	rn_unlock(&qp->sq_lock);
}

void rn_tcp_end(struct rn_tcp *stream)
{
	if (stream->ended)
		return;
	stream->ended = true;
	rn_task_post(&stream->task);
	/* What waits for a piggybacked request would wait for ever from here on. */
	if (stream->is_out && stream->qp->tcp->in && stream->qp->tcp->in->held)
		rn_tcp_go_on(stream->qp->tcp->in);
}

void rn_tcp_lost(struct rn_tcp *stream)
{
	struct rn_qp *qp = stream->qp;
	struct rn_tcp_path *streams = qp->tcp;

	if (stream->ended)
		return;
	rn_tcp_end(stream);
	if (!stream->is_out && !stream->confirmed)
		return; /* it had not begun, and may be tried again */
	if (!stream->is_out && qp->unreliable && stream->hung_up) {
		rn_responder_give_back(&stream->ctx);
		streams->served = stream->expected;
		return; /* it may come again: a request of the peer's has failed */
	}
	/* Cut off within a frame, it could not say BYE on this connection; but it may have on the other. */
	if (!stream->is_out && streams->out && !streams->out->ended && streams->out->state == RN_TCP_OPEN)
		rn_tcp_receive(qp);
	if (streams->left)
		return;
	streams->left = true;
	if (stream->hung_up)
		atomic_store(&qp->peer_left_us, true);
	if (qp->unreliable)
		return;
	if (qp->sq_executed != qp->sq_posted)
		rn_sq_fail_head(qp, IBV_WC_RETRY_EXC_ERR);
	else
		rn_qp_fail(qp);
}

void rn_tcp_leave(struct rn_qp *qp)
{
	struct rn_tcp *out = qp->tcp->out, *in = qp->tcp->in;

	rn_tcp_tell(qp); /* what was executed counts for the peer, even if nothing is answered any more */
	if (out && !out->ended) {
		struct rn_tcp_frame bye = {.kind = RN_FRAME_BYE};

		if (out->state == RN_TCP_OPEN && !out->frame_sent && rn_tcp_put(out, &bye, sizeof(bye)))
			rn_tcp_flush(out);
		rn_tcp_end(out);
	}
	if (in && !in->ended) {
		struct rn_tcp_answer bye = {.kind = RN_ANSWER_BYE};

		if (!in->chunk_left && rn_tcp_put(in, &bye, sizeof(bye)))
			rn_tcp_flush(in);
		rn_tcp_end(in);
	}
}

void rn_tcp_close(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
	struct rn_tcp *mine[2];

	rn_tcp_unlist(qp);
	rn_lock(&qp->sq_lock);
	rn_tcp_leave(qp);
	mine[0] = streams->out;
	mine[1] = streams->in;
	streams->out = streams->in = NULL;
	rn_unlock(&qp->sq_lock);
	rn_timer_cancel(&streams->tick);
	rn_timer_cancel(&streams->patience);
	for (int i = 0; i < 2; i++) {
		if (!mine[i])
			continue;
		rn_source_remove(&mine[i]->source);
		rn_timer_cancel(&mine[i]->timer);
		rn_task_cancel(&mine[i]->task);
		rn_task_cancel(&mine[i]->again);
		let_go(mine[i]);
	}
}

static void forget_places(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;

	qp->uses_tcp = false;
	streams->met = streams->left = streams->denied = streams->polled = streams->expects = false;
	streams->its = streams->others = (struct rn_attempts){0};
	streams->holder = (struct rn_holder){0};
	streams->retry_ns = streams->kept_until_ns = 0;
	streams->backoff_ns = FIRST_BACKOFF_NS;
	streams->acked = streams->next = streams->offset = streams->reads = streams->stray_end = streams->served = 0;
	streams->skipped_from = streams->skipped_to = 0;
	streams->behind_piggyback = UINT32_MAX;
	streams->rnr_until_ns = 0;
	qp->rnr_timer = 12; /* 640 us, until the responder gives its own */
	streams->broken = IBV_WC_SUCCESS;
}

static int open_path(struct rn_qp *qp)
{
	qp->tcp = calloc(1, sizeof(*qp->tcp));
	if (!qp->tcp)
		return ENOMEM;
	qp->tcp->qp = qp;
	qp->tcp->tick.fire = rn_tcp_tick;
	qp->tcp->patience.fire = rn_tcp_patience;
	forget_places(qp);
	return 0;
}

static void free_path(struct rn_qp *qp)
{
	free(qp->tcp);
	qp->tcp = NULL;
}

static bool has_heard(const struct rn_qp *qp)
{
	return qp->tcp->in && qp->tcp->in->expected;
}

const struct rn_path_ops rn_tcp_path_ops = {
	.open = open_path,
	.free = free_path,
	.listen = rn_tcp_listen,
	.expect = rn_tcp_ask_holder,
	.use = rn_tcp_use,
	.progress = rn_tcp_progress,
	.in_flight = rn_tcp_in_flight,
	.has_heard = has_heard,
	.last_look = rn_tcp_last_look,
	.leave = rn_tcp_leave,
	.close = rn_tcp_close,
	.forget = forget_places,
};
