/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzzing what a peer may say.  The device is whole and alive: each input is a conversation with it over the real
 * socket, so the parser is met with the state around it, and whatever becomes of the input afterwards is covered too.
 *
 *     link.c      messages on the Unix socket of a port, before and after a proper introduction
 *     owner.c     what a process says that lets us map its memory, and answers on the Unix socket
 *     tcp/tcp.c    frames on the TCP port of a queue pair that waits for its peer
 *     answers.c   answers to the requests of a queue pair, by a responder that lies
 *     cm/cm.c        messages on a listener of the connection manager
 *     ask.c       what a process says of connections over its link
 *     base/secret.c    the same where a secret is asked for, before and after a proper introduction
 *     datagram.c  UDP datagrams to a port with a UD queue pair
 *
 * An input is cut into pieces by its own bytes: length (low, high), then that many bytes.  After the last the socket
 * is shut, and the device's end of it is awaited.  Findings are what the sanitizers find, and a device that does not
 * hang up: so a parser may drop what it likes, but has to come to an end.
 */
#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../c/harness.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The next piece, or NULL at the end. */
static inline const uint8_t *next_piece(const uint8_t **data, size_t *size, size_t *length)
{
	const uint8_t *piece = *data + 2;

	if (*size < 3)
		return NULL;
	*length = (*data)[0] | (*data)[1] << 8;
	if (*length > *size - 2)
		*length = *size - 2;
	*data = piece + *length;
	*size -= 2 + *length;
	return piece;
}

/* Until the other end has hung up. libFuzzer's alarm interrupts a recv that has a time limit. */
static inline void hear_the_end(int fd)
{
	char said[4096];
	ssize_t got;

	do
		got = recv(fd, said, sizeof(said), 0);
	while (got > 0 || (got < 0 && errno == EINTR));
	CHECK(got == 0 || errno == ECONNRESET);
}

/* libFuzzer's alarm interrupts a connect, too, which goes on all the same. */
static inline void connect_goes_on(int fd)
{
	struct pollfd done = {.fd = fd, .events = POLLOUT};
	int error = -1;

	CHECK(errno == EINTR);
	while (poll(&done, 1, -1) < 0)
		CHECK(errno == EINTR);
	CHECK(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof(error)}) && !error);
}

static inline int connect_tcp(uint16_t port)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	/* No TIME_WAIT: there would be no port left after a while. */
	struct linger linger = {.l_onoff = 1};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	CHECK(fd >= 0);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)))
		connect_goes_on(fd);
	return fd;
}

/* Say all of it, then wait until the device has hung up. What it answers is read, and no concern of ours. */
static inline void converse(int fd, const uint8_t *data, size_t size)
{
	struct timeval patience = {.tv_sec = 20};
	const uint8_t *piece;
	size_t length;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	while ((piece = next_piece(&data, &size, &length)))
		if (send(fd, piece, length, MSG_NOSIGNAL) < 0)
			break;
	shutdown(fd, SHUT_WR);
	hear_the_end(fd);
	close(fd);
}

#endif
