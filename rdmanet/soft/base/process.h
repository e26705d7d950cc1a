/* SPDX-License-Identifier: Apache-2.0 */
/* What there is one of per process, and what each file of the device needs from the compiler. */
#pragma once

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/list.h"

#define RN_EXPORT __attribute__((visibility("default")))
#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Counts the forks that led to this process. A context that was opened under another count is foreign. */
extern unsigned rn_process;

/* Guards the process's tables: contexts, queue pairs by number, ports, what is quarantined. */
extern pthread_mutex_t rn_process_lock;

/*
 * Of struct rn_context. Read with one of both locks held, and changed with both.  Who walks the lists of all contexts
 * holds the second one, which comes before the contexts' mutexes.
 */
extern struct rn_list rn_contexts;
extern pthread_mutex_t rn_contexts_lock;

/* What does a process do: run or wait, not run until it is told to (SIGSTOP), or nothing any more? */
enum rn_life { RN_LIFE_UNKNOWN, RN_LIFE_STOPPED, RN_LIFE_OVER };
enum rn_life rn_process_life(int pid);

/* In a forked child: another process, in which nothing is open. */
void rn_process_forked(void);
