/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moments: loaded into a victim (LD_PRELOAD), it stops after each call that does something to a TCP socket with a port,
 * until the attacker has had his turn. So a port that is open for a moment only is found by the first attack, and not by
 * the luck of a loop.
 *
 * The attacker listens on the abstract name MOMENTS; he is told the port and the call, and answers with a byte.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int attacker = -1;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

static void find_attacker(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	const char *name = getenv("MOMENTS");

	if (attacker >= 0 || !name)
		return;
	attacker = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	strncpy(at.sun_path + 1, name, sizeof(at.sun_path) - 2);
	if (connect(attacker, (struct sockaddr *)&at, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name)))
		abort();
}

static void a_moment(int fd, const char *call)
{
	struct sockaddr_in6 at = {0};
	socklen_t length = sizeof(at);
	int type = 0, saved = errno, got;
	char text[64], answer;

	getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &(socklen_t){sizeof(type)});
	if (type == SOCK_STREAM && !getsockname(fd, (struct sockaddr *)&at, &length) && at.sin6_port &&
	    (at.sin6_family == AF_INET || at.sin6_family == AF_INET6)) {
		pthread_mutex_lock(&one);
		find_attacker();
		got = snprintf(text, sizeof(text), "%u %s", (unsigned)ntohs(at.sin6_port), call);
		if (attacker >= 0 && (send(attacker, text, (size_t)got, 0) != got || recv(attacker, &answer, 1, 0) != 1))
			abort();
		pthread_mutex_unlock(&one);
	}
	errno = saved;
}

#define THE_REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	int rc = THE_REAL(bind)(fd, address, length);

	a_moment(fd, "bind");
	return rc;
}

int listen(int fd, int backlog)
{
	int rc = THE_REAL(listen)(fd, backlog);

	a_moment(fd, "listen");
	return rc;
}

int setsockopt(int fd, int level, int option, const void *value, socklen_t length)
{
	int rc = THE_REAL(setsockopt)(fd, level, option, value, length);

	a_moment(fd, "setsockopt");
	return rc;
}
