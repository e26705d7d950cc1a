/* SPDX-License-Identifier: Apache-2.0 */
/* The faults of a context, from when it opens until it closes. */
#pragma once

#include <stddef.h>

struct rn_context;

/* Apply the faults that the environment, or the program for all its contexts, has set. 0, or EINVAL: the reason was
 * written. */
int rn_fault_bench_open(struct rn_context *context);
/* Whether a context could be opened, as far as the faults go: 0, or EINVAL: the reason was written, and is in error. */
int rn_fault_bench_check(char *error, size_t size);
void rn_fault_bench_close(struct rn_context *context);
void rn_fault_bench_forked(void);
