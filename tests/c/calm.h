/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forking while the device's engine runs.  AddressSanitizer's allocator has locks.  If the engine held one when the test
 * forked, the child would wait for it forever (seen with GCC 12; the C library's own allocator takes care of that).  So
 * the engine runs nothing while a test forks.
 */
#ifndef CALM_H
#define CALM_H

#include <unistd.h>

#include "base/engine.h"

static inline pid_t fork_calmly(void)
{
	bool is_alive = rn_engine_is_alive();
	pid_t pid;

	if (is_alive)
		rn_engine_pause();
	pid = fork();
	if (is_alive && pid)
		rn_engine_resume();
	return pid;
}

#endif
