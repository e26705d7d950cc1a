/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends, a and b, in one process and one PD. */
#ifndef PAIR_H
#define PAIR_H

#include "harness.h"

static struct end a, b;

static inline void open_pair_with(struct end_options options)
{
	end_open(&a, &options);
	options.share = &a;
	end_open(&b, &options);
	memset(a.buffer, 'a', BUFFER);
	memset(b.buffer, 'b', BUFFER);
}

static inline void open_pair(void)
{
	open_pair_with((struct end_options){.cqe = 1024});
	connect_to(a.qp, b.qp->qp_num);
	connect_to(b.qp, a.qp->qp_num);
}

static inline void close_pair(void)
{
	end_close(&b);
	end_close(&a);
	memset(&a, 0, sizeof(a));
	memset(&b, 0, sizeof(b));
}

/* The faults of one device, or of all (NULL). */
static inline void set_faults(struct ibv_context *context, const char *text)
{
	char error[512];
	int err = rdmanet_soft_chaos(context, text, error, sizeof(error));

	if (err)
		fprintf(stderr, "%s: %s\n", text, error);
	CHECK_EQ(err, 0);
}

static inline uint64_t at_b(size_t offset)
{
	return (uintptr_t)b.buffer + offset;
}

#endif
