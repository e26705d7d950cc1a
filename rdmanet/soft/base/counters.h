/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters: proof of where every payload byte went.
 *
 * Each queue pair counts for itself, without atomics, under the lock that its path holds anyway.
 * A context's figures are the sum over its queue pairs, including destroyed ones.  Bytes are
 * counted by the requester, once, by the path they took.  Part of the library's exports: fields
 * are only ever added at the end.
 */
#pragma once

#include <stdint.h>

struct rn_counters {
	uint64_t send_wrs;
	uint64_t recv_wrs;
	uint64_t completions;  /* polled */
	uint64_t bytes_mapped; /* one copy, into a segment of the peer's that is mapped here */
	uint64_t bytes_cma;    /* process_vm_readv/writev */
	uint64_t bytes_engine; /* carried to the owner's engine */
	uint64_t bytes_local;  /* one copy, within this process */
	uint64_t bytes_inline; /* of the above: taken from the work request itself */
	uint64_t wakeups;      /* writes to an eventfd */
	uint64_t syscalls;     /* on the data path, wake-ups included */
	uint64_t rnr_naks;
	uint64_t deferred; /* executed late, because of RDMANET_SOFT_DEFER or a fault */
	uint64_t queued;   /* could not be executed at once, for any other reason */
	uint64_t bytes_bounced; /* left in the peer's arena, for it to carry on when it polls: objects/eager.c */
	uint64_t lost;       /* tries whose request or acknowledgement a fault dropped */
	uint64_t duplicates; /* requests that arrived again, and were refused */
	uint64_t failed;     /* requests and receives that a fault made fail */
	uint64_t bytes_stream; /* carried by TCP */
	uint64_t wrong_keys;   /* requests for memory that we refused; a peer that has our arena mapped refuses its own */
	uint64_t bytes_shared; /* of bytes_cma: copied by the owner's engine, which helped: objects/share.h */
};

struct rn_live {
	uint32_t contexts, pds, mrs, channels, cqs, qps;
	uint32_t fds, mappings, peers, links, quarantined;
};

void rn_counters_add(struct rn_counters *sum, const struct rn_counters *more);
