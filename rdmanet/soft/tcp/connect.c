/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams that we make: connecting to the port in the responder's number, again and again until the peer accepts or
 * the requests have waited long enough.
 *
 * Between attempts there is a pause, which doubles.  Requests wait for the connection as for a link (RN_WAIT_LINK),
 * and once an attempt has failed as for a peer that isn't there (RN_WAIT_PEER), which spends their retries.
 */
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/gid.h"
#include "base/guard.h"
#include "objects/ah.h"
#include "requester/requester.h"
#include "tcp/tcp.h"

enum { LAST_BACKOFF_NS = 20 * 1000 * 1000 };

/*
 * Where nobody listens, because the peer has died, say, the kernel may choose that very port for our end.  TCP then
 * connects the socket to itself, and would keep the port busy for a minute after we have closed it.  Ports are chosen
 * one after the other, and we try fifty times a second, so this does happen.
 */
static bool is_to_itself(int fd, const struct sockaddr_storage *to, socklen_t length)
{
	const struct linger without_a_trace = {.l_onoff = 1};
	struct sockaddr_storage from = {0};
	socklen_t from_length = sizeof(from);

	if (getsockname(fd, (struct sockaddr *)&from, &from_length) || from_length != length || memcmp(&from, to, length))
		return false;
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &without_a_trace, sizeof(without_a_trace));
	return true;
}

/* A descriptor that is connecting, or -errno. */
static int start_socket(struct rn_qp *qp)
{
	const struct ibv_global_route *route = &qp->attr.ah_attr.grh;
	union ibv_gid to = route->dgid, from;
	bool is_ours = rn_ah_is_ours(&qp->attr.ah_attr);
	struct sockaddr_storage address;
	uint32_t interface = 0;
	socklen_t length;
	int fd, err, yes = 1;

	/* Not a queue pair's port: any service may listen there. */
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
	if (!connect(fd, (struct sockaddr *)&address, length) || errno == EINPROGRESS) {
		if (!is_to_itself(fd, &address, length))
			return fd;
		errno = ECONNREFUSED;
	}
failed:
	err = -errno;
	rn_fd_close(fd);
	return err;
}

static void put_off(struct rn_tcp_path *streams)
{
	streams->retry_ns = rn_now_ns() + streams->backoff_ns;
	if (streams->backoff_ns < LAST_BACKOFF_NS)
		streams->backoff_ns *= 2;
}

/*
 * A peer that maps our memory accepts no TCP connection that we have not announced over the link. We can announce it if
 * the peer's process admitted us and only its memory could not be mapped. If it did not admit us, we did not admit it
 * either, so it does not map our memory; except if a link came too late, which is made again if this goes on.
 */
static void announce(struct rn_qp *qp)
{
	if (qp->peer && atomic_load(&qp->peer->state) == RN_PEER_DEAD)
		rn_peer_tell_stream(qp->peer, qp->ex.qp_base.qp_num, qp->attr.dest_qp_num,
				    qp->tcp->backoff_ns >= LAST_BACKOFF_NS);
}

static void start_connecting(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
	int fd = start_socket(qp);

	streams->tried = qp->sq_posted;
	announce(qp);
	if (fd >= 0) {
		streams->out = rn_tcp_make(fd, true);
		if (streams->out) {
			streams->out->qp = qp;
			streams->out->events = EPOLLIN | EPOLLOUT;
			if (!rn_source_add(&streams->out->source, EPOLLIN | EPOLLOUT))
				return;
			rn_tcp_end(streams->out);
		} else {
			rn_fd_close(fd);
		}
	}
	streams->met = true;
	put_off(streams);
}

void rn_tcp_attempt_failed(struct rn_tcp *stream, bool met)
{
	struct rn_tcp_path *streams = stream->qp->tcp;

	streams->met |= met;
	streams->denied |= stream->denied;
	put_off(streams);
	rn_tcp_end(stream);
}

/*
 * Will the attempt soon show whether the peer is there?  If TCP has connected, the other host is alive; its process, or
 * the engine that reads its answer, may be waiting for a CPU.  The greeting has a time limit of its own.
 */
static bool is_being_answered(const struct rn_tcp *out)
{
	struct pollfd connecting = {.fd = out ? out->source.fd : -1, .events = POLLOUT};

	return out && !out->ended && (out->state == RN_TCP_GREETING || poll(&connecting, 1, 0) > 0);
}

/* The head of the queue must wait for a connection. While one is being made, that costs no retries. */
static void wait_for_connection(struct rn_qp *qp)
{
	enum rn_wait why = qp->tcp->met ? RN_WAIT_PEER : RN_WAIT_LINK;

	if (!rn_sq_has_waited(qp, why) || !is_being_answered(qp->tcp->out))
		rn_sq_wait(qp, why);
}

void rn_tcp_progress(struct rn_qp *qp)
{
	struct rn_tcp_path *streams = qp->tcp;
	int state = atomic_load(&qp->state);
	bool has_work;
	uint64_t now;

	if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
		return;
	if (streams->out && streams->out->state == RN_TCP_OPEN) {
		rn_tcp_push(qp);
		return;
	}
	if (!rn_tcp_execute_local(qp))
		return;
	/*
	 * Sent, for all that it knows. But that somebody was not there yet is no reason to drop what is posted later: the
	 * peer may have come to RTR since, and the application may know that.  Nor is it one that the peer has yet to read
	 * the end of our connection before.
	 */
	now = rn_now_ns();
	if (qp->unreliable && (streams->left || (streams->met && now >= streams->kept_until_ns)) && !streams->out)
		rn_tcp_drop(qp, streams->left ? qp->sq_posted : streams->tried);
	has_work = qp->sq_executed != qp->sq_posted;
	if (streams->left) {
		if (has_work)
			rn_sq_wait(qp, RN_WAIT_PEER);
		return;
	}
	if (streams->denied && !streams->out) {
		if (has_work)
			rn_sq_fail_head(qp, IBV_WC_REM_ABORT_ERR);
		else if (!qp->unreliable)
			rn_qp_fail(qp); /* who only receives would wait for ever */
		return;
	}
	if (!streams->out && now >= streams->retry_ns)
		start_connecting(qp);
	if (has_work && (streams->out || !qp->unreliable))
		wait_for_connection(qp);
	else if (!streams->out)
		rn_timer_set(&qp->timer, streams->retry_ns > now ? streams->retry_ns - now : 0);
}

bool rn_tcp_in_flight(const struct rn_qp *qp)
{
	const struct rn_tcp_path *streams = qp->tcp;

	return qp->uses_tcp && (streams->next != qp->sq_executed || streams->offset ||
				 (streams->out && streams->out->frame_sent));
}

static void connected(struct rn_tcp *out)
{
	socklen_t length = sizeof(int);
	int err = 0;

	if (getsockopt(out->source.fd, SOL_SOCKET, SO_ERROR, &err, &length) || err) {
		rn_tcp_attempt_failed(out, true);
		return;
	}
	out->state = RN_TCP_GREETING;
	if (!rn_tcp_is_holders(out) || !rn_tcp_hello_send(out)) {
		rn_tcp_attempt_failed(out, true);
		return;
	}
	rn_timer_set(&out->timer, rn_settings.silence_ms * 1000000);
	rn_tcp_watch(out);
}

void rn_tcp_out_ready(struct rn_source *source, uint32_t events)
{
	struct rn_tcp *out = RN_OWNER(source, struct rn_tcp, source);
	struct rn_qp *qp = out->qp;

	(void)events;
	if (out->state == RN_TCP_CONNECTING)
		rn_tcp_ask_listener(out);
	rn_lock(&qp->sq_lock);
	if (!rn_tcp_is_current(out))
		goto out;
	out->wants_out = false;
	if (out->state == RN_TCP_CONNECTING) {
		connected(out);
	} else if (out->state == RN_TCP_GREETING) {
		if (!rn_tcp_hello_answered(out)) {
			rn_tcp_attempt_failed(out, true);
		} else if (out->state == RN_TCP_OPEN) {
			rn_timer_cancel(&out->timer);
			if (qp->wait != RN_WAIT_RNR)
				qp->waited = false;
			qp->wait = RN_WAIT_NOT;
			rn_tcp_watch(out);
			rn_tcp_push(qp);
		}
	} else if (rn_tcp_receive(qp)) {
		rn_tcp_push(qp);
		if (rn_tcp_is_current(out))
			rn_tcp_watch(out);
	}
	rn_sq_drained(qp);
out:
	rn_unlock(&qp->sq_lock);
}
