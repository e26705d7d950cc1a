/* SPDX-License-Identifier: Apache-2.0 */
#include "base/guard.h"
#include "base/rights.h"

#include <sys/socket.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

void rn_rights_accept(int fd, bool yes)
{
	int value = yes;

	if (rn_guarded(RN_GUARD_PASSED_RIGHTS))
		setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &value, sizeof value); /* before Linux 6.16: see rights.h */
}
