/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of streams: which way to go, connecting, accepting, and the end.  stream.h has the theory.
 *
 *     ours     CONNECTING -> GREETING -> OPEN -> LINGERING -> freed
 *     theirs                 GREETING -> OPEN -> LINGERING -> freed
 *
 * Until a stream that was accepted is OPEN it belongs to nobody but the engine; then to its queue pair,
 * until that lets go of it.  Lingering it is the engine's again: the last answers are on their way to a
 * peer, and closing the socket with bytes unread would take them back.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gid.h"
#include "log.h"
#include "soft.h"

enum {
	FIRST_BACKOFF_NS = 50 * 1000,
	LAST_BACKOFF_NS = 20 * 1000 * 1000,
};

static struct {
	pthread_mutex_t lock; /* the list; innermost */
	struct rn_stream *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void out_ready(struct rn_source *source, uint32_t events);
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

static struct rn_stream *make(int fd, bool is_out)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct rn_stream *stream = calloc(1, sizeof(*stream));
	int yes = 1;

	pthread_once(&once, start_once);
	if (!stream)
		return NULL;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
	stream->source = (struct rn_source){.fd = fd, .ready = is_out ? out_ready : in_ready};
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

void rn_stream_free(struct rn_stream *stream)
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
		rn_stream_free(all.first);
}

static void forget_in_child(void)
{
	pthread_mutex_init(&all.lock, NULL);
	all.first = NULL;
}

void rn_stream_watch(struct rn_stream *stream)
{
	/* Poll_cq looks at what is open, and at nothing else. */
	bool is_polled = stream->qp->streams.polled && stream->state == RN_STREAM_OPEN;
	bool reads = !is_polled && (stream->is_out || !(stream->wants_out || stream->held));
	uint32_t events = (reads ? EPOLLIN : 0) | (stream->wants_out ? EPOLLOUT : 0);

	if (events == stream->events || stream->ended)
		return;
	stream->events = events;
	rn_source_modify(&stream->source, events);
}

static void go_on(struct rn_task *task)
{
	struct rn_stream *stream = RN_OWNER(task, struct rn_stream, again);

	stream->source.ready(&stream->source, 0);
}

void rn_stream_go_on(struct rn_stream *stream)
{
	if (!stream->ended && !stream->qp->streams.polled)
		rn_task_post(&stream->again);
}

/* --- which way ------------------------------------------------------------------------------------------------- */

/* A port's LID, where there is no global address, is this host's own. */
bool rn_address_is_ours(const struct ibv_ah_attr *ah)
{
	return !ah->is_global || rn_gid_is_ours(&ah->grh.dgid);
}

bool rn_stream_is_only_way(const struct ibv_ah_attr *ah)
{
	return rn_settings.transport == RN_TRANSPORT_STREAM || !rn_address_is_ours(ah);
}

RN_EXPORT int rdmanet_soft_qp_way(struct ibv_qp *base)
{
	struct rn_qp *qp = rn_qp(base);
	int way = RDMANET_SOFT_WAY_NONE;

	if (rn_is_foreign(base->context))
		return RDMANET_SOFT_WAY_NONE;
	rn_lock(&qp->sq_lock);
	if (qp->is_stream)
		way = RDMANET_SOFT_WAY_STREAM;
	else if (qp->peer)
		way = atomic_load(&qp->peer->state) == RN_PEER_SELF    ? RDMANET_SOFT_WAY_SELF
		      : atomic_load(&qp->peer->state) == RN_PEER_READY ? RDMANET_SOFT_WAY_MAPPED
								       : RDMANET_SOFT_WAY_NONE;
	rn_unlock(&qp->sq_lock);
	return way;
}

int rn_stream_listen(struct rn_qp *qp, const struct ibv_ah_attr *ah)
{
	uint16_t port = qp->ex.qp_base.qp_num >> 8;
	uint32_t interface = 0;
	union ibv_gid at;

	/* Those of this host come over the loopback interface, whichever address they call us by. */
	if (rn_address_is_ours(ah))
		at = (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
	else if (!rn_gid_at(ah->grh.sgid_index, &at, &interface))
		return EADDRNOTAVAIL;
	return rn_port_listen(port, &at, interface);
}

void rn_stream_use(struct rn_qp *qp)
{
	qp->is_stream = true;
	qp->view.found = false;
	rn_stream_list(qp);
}

/* --- connecting -------------------------------------------------------------------------------------------------- */

/* A descriptor that is connecting, or -errno. */
static int start_socket(struct rn_qp *qp)
{
	const struct ibv_global_route *route = &qp->attr.ah_attr.grh;
	union ibv_gid to = route->dgid, from;
	bool is_ours = rn_address_is_ours(&qp->attr.ah_attr);
	struct sockaddr_storage address;
	uint32_t interface = 0;
	socklen_t length;
	int fd, err, yes = 1;

	/* Of no queue pair: what listens there may be any service. */
	if (!rn_qpn_is_possible(qp->attr.dest_qp_num) && rn_guarded(RN_GUARD_TCP_RANGE))
		return -EADDRNOTAVAIL;
	if (is_ours)
		to = (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
	else if (!rn_gid_at(route->sgid_index, &from, &interface))
		return -EADDRNOTAVAIL;
	length = rn_gid_address(&to, interface, qp->attr.dest_qp_num >> 8, &address);
	fd = rn_fd_own(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (fd < 0)
		return -errno;
	if (!is_ours) {
		struct sockaddr_storage source;
		socklen_t source_length = rn_gid_address(&from, interface, 0, &source);

		setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof(yes));
		if (source.ss_family != address.ss_family || bind(fd, (struct sockaddr *)&source, source_length))
			goto failed;
	}
	if (!connect(fd, (struct sockaddr *)&address, length) || errno == EINPROGRESS)
		return fd;
failed:
	err = -errno;
	rn_fd_close(fd);
	return err;
}

static void put_off(struct rn_streams *streams)
{
	streams->retry_ns = rn_now_ns() + streams->backoff_ns;
	if (streams->backoff_ns < LAST_BACKOFF_NS)
		streams->backoff_ns *= 2;
}

/*
 * A peer that maps us expects nobody by TCP before he has said so, over the link. To a process that we couldn't
 * map he can. Else he wasn't let in, and nor was that one; but for a link that came too late, which is made anew if
 * this goes on.
 */
static void announce(struct rn_qp *qp)
{
	if (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_DEAD)
		rn_peer_tell_stream(qp->peer, qp->ex.qp_base.qp_num, qp->attr.dest_qp_num,
				    qp->streams.backoff_ns >= LAST_BACKOFF_NS);
}

static void start_connecting(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	int fd = start_socket(qp);

	announce(qp);
	if (fd >= 0) {
		streams->out = make(fd, true);
		if (streams->out) {
			streams->out->qp = qp;
			streams->out->events = EPOLLIN | EPOLLOUT;
			if (!rn_source_add(&streams->out->source, EPOLLIN | EPOLLOUT))
				return;
			rn_stream_end(streams->out);
		} else {
			rn_fd_close(fd);
		}
	}
	streams->met = true;
	put_off(streams);
}

void rn_stream_attempt_failed(struct rn_stream *stream, bool met)
{
	struct rn_streams *streams = &stream->qp->streams;

	streams->met |= met;
	streams->denied |= stream->denied;
	put_off(streams);
	rn_stream_end(stream);
}

/*
 * Will it be told soon whether somebody is there?  Where TCP has come through the other host is alive, and the process,
 * or the engine that should read its answer, may be waiting for a CPU.  It has its own time to say something.
 */
static bool is_being_answered(const struct rn_stream *out)
{
	struct pollfd connecting = {.fd = out ? out->source.fd : -1, .events = POLLOUT};

	return out && !out->ended && (out->state == RN_STREAM_GREETING || poll(&connecting, 1, 0) > 0);
}

/* The head has to wait until there is a connection; not in vain while one is being made. */
static void wait_for_connection(struct rn_qp *qp)
{
	enum rn_wait why = qp->streams.met ? RN_WAIT_PEER : RN_WAIT_LINK;

	if (!rn_sq_has_waited(qp, why) || !is_being_answered(qp->streams.out))
		rn_sq_wait(qp, why);
}

void rn_stream_progress(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	int state = atomic_load(&qp->state);
	bool has_work;
	uint64_t now;

	if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
		return;
	if (streams->out && streams->out->state == RN_STREAM_OPEN) {
		rn_stream_push(qp);
		return;
	}
	if (!rn_stream_execute_local(qp))
		return;
	if (qp->unreliable && (streams->left || streams->met) && !streams->out)
		rn_stream_drop(qp); /* sent, for all that it knows */
	has_work = qp->sq_executed != qp->sq_posted;
	if (streams->left) {
		if (has_work)
			rn_sq_wait(qp, RN_WAIT_PEER);
		return;
	}
	if (streams->denied && !streams->out) {
		if (has_work)
			rn_sq_fail_head(qp, IBV_WC_REM_ABORT_ERR);
		return;
	}
	now = rn_now_ns();
	if (!streams->out && now >= streams->retry_ns)
		start_connecting(qp);
	if (has_work)
		wait_for_connection(qp);
	else if (!streams->out)
		rn_timer_set(&qp->timer, streams->retry_ns > now ? streams->retry_ns - now : 0);
}

bool rn_stream_in_flight(const struct rn_qp *qp)
{
	const struct rn_streams *streams = &qp->streams;

	return qp->is_stream && (streams->next != qp->sq_executed || streams->offset ||
				 (streams->out && streams->out->frame_sent));
}

/* Still its queue pair's, and of use? With the send lock held. */
static bool is_current(const struct rn_stream *stream)
{
	const struct rn_streams *streams = &stream->qp->streams;

	return (stream->is_out ? streams->out : streams->in) == stream && !stream->ended;
}

static void connected(struct rn_stream *out)
{
	socklen_t length = sizeof(int);
	int err = 0;

	if (getsockopt(out->source.fd, SOL_SOCKET, SO_ERROR, &err, &length) || err) {
		rn_stream_attempt_failed(out, true);
		return;
	}
	out->state = RN_STREAM_GREETING;
	if (!rn_stream_is_holders(out) || !rn_hello_send(out)) {
		rn_stream_attempt_failed(out, true);
		return;
	}
	rn_timer_set(&out->timer, rn_settings.silence_ms * 1000000);
	rn_stream_watch(out);
}

static void out_ready(struct rn_source *source, uint32_t events)
{
	struct rn_stream *out = RN_OWNER(source, struct rn_stream, source);
	struct rn_qp *qp = out->qp;

	(void)events;
	if (out->state == RN_STREAM_CONNECTING)
		rn_stream_ask_listener(out);
	rn_lock(&qp->sq_lock);
	if (!is_current(out))
		goto out;
	out->wants_out = false;
	if (out->state == RN_STREAM_CONNECTING) {
		connected(out);
	} else if (out->state == RN_STREAM_GREETING) {
		if (!rn_hello_answered(out)) {
			rn_stream_attempt_failed(out, true);
		} else if (out->state == RN_STREAM_OPEN) {
			rn_timer_cancel(&out->timer);
			if (qp->wait != RN_WAIT_RNR)
				qp->waited = false;
			qp->wait = RN_WAIT_NOT;
			rn_stream_watch(out);
			rn_stream_push(qp);
		}
	} else if (rn_stream_receive(qp)) {
		rn_stream_push(qp);
		if (is_current(out))
			rn_stream_watch(out);
	}
	rn_sq_drained(qp);
out:
	rn_unlock(&qp->sq_lock);
}

/* --- accepting ------------------------------------------------------------------------------------------------------ */

static void leave(struct rn_stranger *stranger)
{
	rn_stream_free(RN_OWNER(stranger, struct rn_stream, stranger));
}

void rn_stream_accepted(int fd)
{
	struct rn_stream *in = make(fd, false);
	struct sockaddr_storage from = {0};
	socklen_t length = sizeof(from);

	if (!in) {
		rn_fd_close(fd);
		return;
	}
	in->state = RN_STREAM_GREETING;
	in->events = EPOLLIN;
	if (getpeername(fd, (struct sockaddr *)&from, &length) || rn_source_add(&in->source, EPOLLIN)) {
		rn_stream_free(in);
		return;
	}
	rn_timer_set(&in->timer, rn_settings.silence_ms * 1000000);
	in->stranger.leave = leave;
	rn_gid_of((struct sockaddr *)&from, &in->stranger.from);
	rn_stranger_add(&in->stranger, RN_STRANGER_SILENT);
}

/* The queue pair with this number; with rn_world held. */
static struct rn_qp *find_qp(uint32_t qpn)
{
	for (uint32_t i = 0; i < rn_qps_end; i++)
		if (rn_qps[i] && rn_qps[i]->ex.qp_base.qp_num == qpn)
			return rn_qps[i];
	return NULL;
}

static bool attach(struct rn_stream *in)
{
	struct rn_qp *qp;
	bool attached = false;

	pthread_mutex_lock(&rn_world);
	qp = find_qp(in->hello.dest_qpn);
	if (qp) {
		rn_lock(&qp->sq_lock);
		attached = rn_stream_is_expected(in, qp) && rn_hello_welcome(in) && rn_stream_serve_begin(qp, in);
		if (attached) {
			rn_wire_flush(in);
			in->qp = qp;
			in->state = RN_STREAM_OPEN;
			qp->streams.in = in;
			rn_stream_list(qp);
		}
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_world);
	return attached;
}

bool rn_stream_attach(struct rn_stream *in)
{
	bool attached = attach(in);

	if (!attached && in->whose == RN_WHOSE_ASKED) {
		rn_stream_ask_whose(in);
		attached = attach(in);
	}
	if (attached) {
		rn_stranger_forget(&in->stranger);
		rn_timer_cancel(&in->timer);
	}
	return attached;
}

static void serve(struct rn_stream *in, uint32_t events)
{
	struct rn_qp *qp = in->qp;

	rn_lock(&qp->sq_lock);
	/* While it waits for a rider nobody reads, and would see that. */
	if (is_current(in) && in->held && events & (EPOLLERR | EPOLLHUP))
		rn_stream_lost(in);
	if (is_current(in)) {
		in->wants_out = false;
		rn_stream_serve(qp);
		/* An ACK that rode along may have made room. */
		if (qp->is_stream && qp->streams.out && qp->streams.next != qp->sq_posted)
			rn_stream_push(qp);
		rn_sq_drained(qp);
	}
	rn_unlock(&qp->sq_lock);
}

static void in_ready(struct rn_source *source, uint32_t events)
{
	struct rn_stream *in = RN_OWNER(source, struct rn_stream, source);

	if (!in->qp && !rn_hello_arrived(in)) {
		rn_stream_free(in);
		return;
	}
	if (in->qp)
		serve(in, events);
}

/* --- the end --------------------------------------------------------------------------------------------------------- */

static void linger_ready(struct rn_source *source, uint32_t events)
{
	struct rn_stream *stream = RN_OWNER(source, struct rn_stream, source);
	char unread[16 * 1024];
	ssize_t got;

	(void)events;
	if (stream->output_at != stream->output_end && rn_wire_flush(stream)) {
		shutdown(stream->source.fd, SHUT_WR);
		rn_source_modify(&stream->source, EPOLLIN);
	}
	/* No more than this much at a time: it can't be told to stop. */
	got = recv(stream->source.fd, unread, sizeof(unread), MSG_DONTWAIT);
	if (!got || (got < 0 && errno != EAGAIN && errno != EINTR))
		rn_stream_free(stream);
}

/* It is nobody's from here on. Its source and timer are not set, or this is the engine. */
static void let_go(struct rn_stream *stream)
{
	stream->qp = NULL;
	if (stream->state != RN_STREAM_OPEN) {
		rn_stream_free(stream);
		return;
	}
	rn_source_remove(&stream->source);
	rn_task_cancel(&stream->again);
	stream->state = RN_STREAM_LINGERING;
	stream->source.ready = linger_ready;
	if (rn_wire_flush(stream))
		shutdown(stream->source.fd, SHUT_WR);
	rn_timer_set(&stream->timer, rn_settings.silence_ms * 1000000);
	if (rn_source_add(&stream->source, EPOLLIN | (stream->output_at != stream->output_end ? EPOLLOUT : 0)))
		rn_stream_free(stream);
}

/* On the engine: nobody's callback is under way but this. */
static void take_apart(struct rn_task *task)
{
	struct rn_stream *stream = RN_OWNER(task, struct rn_stream, task);
	struct rn_qp *qp = stream->qp;
	struct rn_stream **its;
	bool is_mine;

	rn_lock(&qp->sq_lock);
	its = stream->is_out ? &qp->streams.out : &qp->streams.in;
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
	struct rn_stream *stream = RN_OWNER(timer, struct rn_stream, timer);
	struct rn_qp *qp = stream->qp;

	if (!qp) {
		if (stream->state == RN_STREAM_GREETING)
			rn_warn(RN_WARN_SILENCE, "a connection didn't say for %llu ms who it is: closed",
				(unsigned long long)rn_settings.silence_ms);
		rn_stream_free(stream);
		return;
	}
	rn_lock(&qp->sq_lock);
	if (is_current(stream) && stream->state == RN_STREAM_GREETING)
		rn_stream_attempt_failed(stream, true);
	rn_unlock(&qp->sq_lock);
}

void rn_stream_end(struct rn_stream *stream)
{
	if (stream->ended)
		return;
	stream->ended = true;
	rn_task_post(&stream->task);
	/* What waits for a rider waits in vain from here on. */
	if (stream->is_out && stream->qp->streams.in && stream->qp->streams.in->held)
		rn_stream_go_on(stream->qp->streams.in);
}

void rn_stream_lost(struct rn_stream *stream)
{
	struct rn_qp *qp = stream->qp;
	struct rn_streams *streams = &qp->streams;

	if (stream->ended)
		return;
	rn_stream_end(stream);
	if (!stream->is_out && !stream->confirmed)
		return; /* it had not even begun, and may come again */
	/* Cut off in the midst of a frame it could not say BYE here; but it may have there. */
	if (!stream->is_out && streams->out && !streams->out->ended && streams->out->state == RN_STREAM_OPEN)
		rn_stream_receive(qp);
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

void rn_stream_leave(struct rn_qp *qp)
{
	struct rn_stream *out = qp->streams.out, *in = qp->streams.in;

	rn_stream_tell(qp); /* what was executed counts for the peer, also if nobody answers any more */
	if (out && !out->ended) {
		struct rn_wire_frame bye = {.kind = RN_FRAME_BYE};

		if (out->state == RN_STREAM_OPEN && !out->frame_sent && rn_wire_put(out, &bye, sizeof(bye)))
			rn_wire_flush(out);
		rn_stream_end(out);
	}
	if (in && !in->ended) {
		struct rn_wire_answer bye = {.kind = RN_ANSWER_BYE};

		if (!in->chunk_left && rn_wire_put(in, &bye, sizeof(bye)))
			rn_wire_flush(in);
		rn_stream_end(in);
	}
}

void rn_stream_close(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;
	struct rn_stream *mine[2];

	rn_stream_unlist(qp);
	rn_lock(&qp->sq_lock);
	rn_stream_leave(qp);
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

void rn_stream_init(struct rn_qp *qp)
{
	qp->streams.tick.fire = rn_stream_tick;
	qp->streams.patience.fire = rn_stream_patience;
	rn_stream_forget(qp);
}

void rn_stream_forget(struct rn_qp *qp)
{
	struct rn_streams *streams = &qp->streams;

	qp->is_stream = false;
	streams->met = streams->left = streams->denied = streams->polled = streams->expects = false;
	streams->its = streams->others = (struct rn_attempts){0};
	streams->holder = (struct rn_holder){0};
	streams->retry_ns = 0;
	streams->backoff_ns = FIRST_BACKOFF_NS;
	streams->acked = streams->next = streams->offset = streams->reads = streams->stray_end = 0;
	streams->skipped_from = streams->skipped_to = 0;
	streams->behind_rider = UINT32_MAX;
	streams->rnr_until_ns = 0;
	streams->rnr_timer = 12; /* 640 us, until the responder says */
	streams->broken = IBV_WC_SUCCESS;
}
