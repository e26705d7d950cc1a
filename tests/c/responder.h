/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder's end of a stream, by hand: two sockets and no device, so that it can say what no device would.
 * The queue pair under test takes it for a peer at 127.0.0.1, whose number is of the port that we listen on.
 */
#ifndef RESPONDER_H
#define RESPONDER_H

#include "harness.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "tcp/frames.h"

struct responder {
	int listener;
	uint32_t qpn;  /* ours, by which the queue pair calls us */
	int answers;   /* its requests come here, and our answers go there; -1: not yet */
	int requests;  /* the other direction's; -1: not yet */
};

static inline void responder_open(struct responder *responder)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t length = sizeof(at);

	*responder = (struct responder){.answers = -1, .requests = -1};
	responder->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(responder->listener >= 0 && !bind(responder->listener, (struct sockaddr *)&at, sizeof(at)));
	CHECK(!listen(responder->listener, 64));
	CHECK(!getsockname(responder->listener, (struct sockaddr *)&at, &length));
	responder->qpn = ntohs(at.sin_port) << 8 | 7;
}

/* No TIME_WAIT: whoever does this often would have no port left after a while. */
static inline void hang_up(int *fd)
{
	struct linger linger = {.l_onoff = 1};

	if (*fd < 0)
		return;
	setsockopt(*fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
	close(*fd);
	*fd = -1;
}

static inline void responder_hang_up(struct responder *responder)
{
	hang_up(&responder->answers);
	hang_up(&responder->requests);
}

/* To RTS, with whatever was posted in INIT; it will connect to us. */
static inline void responder_invite(const struct responder *responder, struct ibv_qp *qp, uint32_t psn)
{
	struct ibv_qp_attr attr = default_attr(responder->qpn);

	attr.sq_psn = attr.rq_psn = psn;
	attr.max_rd_atomic = 4;
	connect_with(qp, attr);
}

static inline void hear_all(int fd, void *data, size_t size)
{
	CHECK_EQ(recv(fd, data, size, MSG_WAITALL), (ssize_t)size);
}

/* The connection that was opened for this PSN; earlier ones are leftovers. */
static inline void responder_accept(struct responder *responder, uint32_t psn)
{
	struct timeval patience = {.tv_sec = 20};
	struct rn_tcp_hello hello;
	int fd, on = 1;

	for (;;) {
		CHECK(readable(responder->listener, 20000));
		fd = accept4(responder->listener, NULL, NULL, SOCK_CLOEXEC);
		CHECK(fd >= 0);
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
		if (recv(fd, &hello, sizeof(hello), MSG_WAITALL) == sizeof(hello) && hello.psn == psn)
			break;
		hang_up(&fd);
	}
	CHECK_EQ(hello.magic, RN_TCP_MAGIC);
	CHECK_EQ(hello.dest_qpn, responder->qpn);
	responder->answers = fd;
}

static inline void responder_welcome(const struct responder *responder)
{
	struct rn_tcp_greeting welcome = {.magic = RN_TCP_MAGIC, .kind = RN_GREETING_WELCOME};

	CHECK_EQ(send(responder->answers, &welcome, sizeof(welcome), MSG_NOSIGNAL), (ssize_t)sizeof(welcome));
}

/* Requests of our own: the other direction. False: we are not let in. */
static inline bool responder_call(struct responder *responder, uint32_t qpn, uint32_t psn)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(qpn >> 8), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	struct rn_tcp_hello hello = {
		.magic = RN_TCP_MAGIC,
		.version = RN_WIRE_VERSION,
		.source_qpn = responder->qpn,
		.dest_qpn = qpn,
		.psn = psn,
		.source_gid = {[10] = 0xff, 0xff, 127, 0, 0, 1},
	};
	struct timeval patience = {.tv_sec = 20};
	struct rn_tcp_greeting greeting;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	CHECK(fd >= 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	CHECK(!connect(fd, (struct sockaddr *)&to, sizeof(to)));
	CHECK_EQ(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL), (ssize_t)sizeof(hello));
	if (recv(fd, &greeting, sizeof(greeting), MSG_WAITALL) != sizeof(greeting) || greeting.kind != RN_GREETING_WELCOME) {
		hang_up(&fd);
		return false;
	}
	responder->requests = fd;
	return true;
}

#endif
