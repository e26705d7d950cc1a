/* SPDX-License-Identifier: Apache-2.0 */
/* Completion channels, by number: channel.c. */
#ifndef RDMANET_SOFT_CHANNEL_H
#define RDMANET_SOFT_CHANNEL_H

#include "objects/context.h"

struct rn_channel {
	struct ibv_comp_channel channel;
	uint32_t id;
	_Atomic bool never_waits; /* whatever mode its descriptor has now: channel.c */
	struct rn_lock lock; /* the list */
	struct rn_list cqs;
	struct rn_list link;
};

/* For struct rn_peer_ops. */
int rn_channel_fd(uint32_t channel_id);
void rn_channel_signal(uint32_t channel_id);
enum { RN_CHANNEL_WAKEUP = 0 }; /* the channel by which peers wake this process's engine */
void rn_channel_set_wakeup(int fd); /* -1: there is none. Nobody uses the one before any more. */

#endif
