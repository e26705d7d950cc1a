/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the obvious C program gets from the network: the yardstick for the device's path over TCP.
 *
 *     tcp_peer serve                            prints its port, serves one client after the other until killed
 *     tcp_peer bulk HOST PORT SIZE COUNT        prints GB/s
 *     tcp_peer ping HOST PORT SIZE COUNT        prints the median round trip in microseconds; both ends sleep in recv
 *     tcp_peer ping-polling HOST PORT ...       the same; both ends call recv until there is something
 *
 * A client begins with what it wants; the server answers with one byte when the last of a bulk has come, so that
 * bytes in a buffer don't count.
 */
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum kind { BULK, PING, PING_POLLING };

struct wish {
	uint64_t kind, size, count;
};

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

static void send_all(int fd, const void *data, size_t size)
{
	const char *at = data;

	while (size) {
		ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);

		if (sent < 0)
			fail("send");
		at += sent;
		size -= sent;
	}
}

/* False: the other end has closed. */
static int receive_all(int fd, void *data, size_t size, int polling)
{
	char *at = data;

	while (size) {
		ssize_t got = recv(fd, at, size, polling ? MSG_DONTWAIT : 0);

		if (got < 0 && polling)
			continue;
		if (got < 0)
			fail("recv");
		if (!got)
			return 0;
		at += got;
		size -= got;
	}
	return 1;
}

static void *memory_of(size_t size)
{
	void *memory = malloc(size);

	if (!memory)
		fail("malloc");
	memset(memory, 1, size);
	return memory;
}

static void without_delay(int fd)
{
	int yes = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)))
		fail("TCP_NODELAY");
}

static void serve_one(int fd)
{
	struct wish wish;
	char *memory;

	without_delay(fd);
	if (!receive_all(fd, &wish, sizeof(wish), 0))
		return;
	memory = memory_of(wish.size);
	for (uint64_t i = 0; i < wish.count; i++) {
		if (!receive_all(fd, memory, wish.size, wish.kind == PING_POLLING))
			break;
		if (wish.kind != BULK)
			send_all(fd, memory, wish.size);
	}
	if (wish.kind == BULK)
		send_all(fd, "", 1);
	free(memory);
}

static _Noreturn void serve(void)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
	socklen_t length = sizeof(any);
	int listener = socket(AF_INET6, SOCK_STREAM, 0);

	if (listener < 0 || bind(listener, (struct sockaddr *)&any, length) || listen(listener, 8) ||
	    getsockname(listener, (struct sockaddr *)&any, &length))
		fail("listen");
	printf("%d\n", ntohs(any.sin6_port));
	fflush(stdout);
	for (;;) {
		int fd = accept(listener, NULL, NULL);

		if (fd < 0)
			fail("accept");
		serve_one(fd);
		close(fd);
	}
}

static int connect_to(const char *host, const char *port)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
	int fd;

	if (getaddrinfo(host, port, &hints, &found)) {
		fprintf(stderr, "%s: no such address\n", host);
		exit(1);
	}
	fd = socket(found->ai_family, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen))
		fail("connect");
	freeaddrinfo(found);
	return fd;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static int ask_bulk(int fd, uint64_t size, uint64_t count)
{
	char *memory = memory_of(size);
	double begin_s = now_s();

	for (uint64_t i = 0; i < count; i++)
		send_all(fd, memory, size);
	if (!receive_all(fd, memory, 1, 0))
		return 1;
	printf("%.4f\n", size * count / (now_s() - begin_s) * 1e-9);
	free(memory);
	return 0;
}

static int ask_ping(int fd, int polling, uint64_t size, uint64_t count)
{
	double *times_s = memory_of(count * sizeof(*times_s));
	char *memory = memory_of(size);

	for (uint64_t i = 0; i < count; i++) {
		double begin_s = now_s();

		send_all(fd, memory, size);
		if (!receive_all(fd, memory, size, polling))
			return 1;
		times_s[i] = now_s() - begin_s;
	}
	qsort(times_s, count, sizeof(*times_s), compare);
	printf("%.3f\n", times_s[count / 2] * 1e6);
	free(times_s);
	free(memory);
	return 0;
}

static int ask(int fd, enum kind kind, uint64_t size, uint64_t count)
{
	struct wish wish = {kind, size, count};

	if (!size || !count)
		return 2;
	without_delay(fd);
	send_all(fd, &wish, sizeof(wish));
	return kind == BULK ? ask_bulk(fd, size, count) : ask_ping(fd, kind == PING_POLLING, size, count);
}

int main(int argc, char **argv)
{
	static const char *const kinds[] = {[BULK] = "bulk", [PING] = "ping", [PING_POLLING] = "ping-polling"};

	if (argc == 2 && !strcmp(argv[1], "serve"))
		serve();
	for (int i = 0; argc == 6 && i < 3; i++)
		if (!strcmp(argv[1], kinds[i]))
			return ask(connect_to(argv[2], argv[3]), i, strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
	fprintf(stderr, "usage: tcp_peer serve | bulk|ping|ping-polling HOST PORT SIZE COUNT\n");
	return 2;
}
