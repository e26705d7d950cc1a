/* SPDX-License-Identifier: Apache-2.0 */
/* Accepts: loaded into a program (LD_PRELOAD), it counts the calls of accept4() that find no descriptor. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>

atomic_uint accepts_in_vain;

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
	int got = ((__typeof__(&accept4))dlsym(RTLD_NEXT, "accept4"))(fd, address, length, flags);

	if (got < 0 && errno == EMFILE)
		accepts_in_vain++;
	return got;
}
