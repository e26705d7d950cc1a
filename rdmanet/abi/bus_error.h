/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bus errors: touching memory that may be the mapping of a file.
 *
 * A file that is shortened takes the memory of its mappings along: what touches that gets SIGBUS, which ends the
 * process.  The kernel, which copies for a TCP socket, gets EFAULT instead.  So code that copies what a program names
 * says that it does, and gets an answer too:
 *
 *     rn_bus_copy(to, from, length, &lost)     like memmove; false: there is no memory at `lost`,
 *                                              which is NULL if a handler that passed the signal on did not say where
 *
 *     if (sigsetjmp(bus.back, 0))              or, around code of one's own that holds no lock:
 *             ...                              bus.lost is not there
 *     rn_bus_begin(&bus);
 *     ...
 *     rn_bus_end();
 *
 * Ordinary memory costs the sigsetjmp, a few nanoseconds; asking the kernel first would cost a system call.  A handler of
 * SIGBUS jumps back, on a thread that is between the two calls; every other SIGBUS goes to the handler that was there
 * before, or ends the process as ever.  A program may set another handler later if that passes the signal on: by a call,
 * or by setting ours again and raising the signal, as Python's faulthandler does.  One that does neither ends this
 * protection.
 *
 * The device and the core have a copy each, and each handler passes on what is the other's.
 */
#ifndef RDMANET_BUS_ERROR_H
#define RDMANET_BUS_ERROR_H

#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/*
 * A handler must not allocate its thread's variables, which the general model does on first use; the initial-exec one
 * never does.  (musl allocates them with the thread, and refuses that model to libraries that are loaded later.)
 */
#if defined(__GLIBC__)
#define RN_BUS_TLS __attribute__((visibility("hidden"), tls_model("initial-exec")))
#else
#define RN_BUS_TLS __attribute__((visibility("hidden")))
#endif

struct rn_bus {
	sigjmp_buf back;
	const void *lost;
};
extern _Thread_local struct rn_bus *rn_bus_under_way RN_BUS_TLS;

/* Set the handler, once for the process and before the first of the following calls. */
__attribute__((visibility("hidden"))) void rn_bus_watch(void);

static inline void rn_bus_begin(struct rn_bus *bus)
{
	rn_bus_under_way = bus;
	atomic_signal_fence(memory_order_seq_cst);
}

static inline void rn_bus_end(void)
{
	atomic_signal_fence(memory_order_seq_cst);
	rn_bus_under_way = NULL;
}

__attribute__((visibility("hidden"))) bool rn_bus_copy(void *to, const void *from, size_t length, const void **lost);

#endif
