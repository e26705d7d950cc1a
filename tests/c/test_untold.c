/* SPDX-License-Identifier: Apache-2.0 */
/* A host that tells nothing of its listeners, neither by netlink nor in /proc: this is no word that nobody listens. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "base/engine.h"
#include "cm/cm.h"
#include "host_check.h"

static bool is_shown; /* /proc */

int socket(int family, int type, int protocol)
{
	if (family == AF_NETLINK) {
		errno = EAFNOSUPPORT;
		return -1;
	}
	return (int)syscall(SYS_socket, family, type, protocol);
}

int access(const char *path, int mode)
{
	(void)path;
	(void)mode;
	errno = ENOENT;
	return is_shown ? 0 : -1;
}

int main(void)
{
	/* Nobody listens at this port, which is nobody's to have without root. */
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(1), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	uint64_t cookie;

	is_shown = true;
	CHECK(rn_cm_name_language((struct sockaddr *)&to, &cookie) == RN_CM_NOBODY);
	is_shown = false;
	CHECK(rn_cm_name_language((struct sockaddr *)&to, &cookie) == RN_CM_UNTOLD);
	CHECK(rn_fd_count() == 0);
	return 0;
}
