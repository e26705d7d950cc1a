/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a READ's answer.  tcp.h says why it is special. */
#include "tcp/tcp.h"

size_t rn_tcp_make_tail(const struct rn_tcp *in, struct rn_tcp_tail *tail)
{
	const struct rn_transfer *t = &in->transfer;
	uint32_t length = rn_tcp_tail_length(t);
	struct rn_runs runs = rn_runs(t->remote, t->num_remote, t->total - length, length);
	char *to = tail->data;
	const void *lost;
	struct iovec run;

	tail->answer = (struct rn_tcp_answer){.kind = RN_ANSWER_READ, .serial = in->head.serial, .length = length};
	for (; rn_next_run(&runs, &run); to += run.iov_len)
		if (!rn_bus_copy(to, run.iov_base, run.iov_len, &lost))
			return 0;
	return sizeof(tail->answer) + length;
}
