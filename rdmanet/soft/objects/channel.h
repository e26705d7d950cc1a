/* SPDX-License-Identifier: Apache-2.0 */
/* Completion channels, by number: channel.c. */
#pragma once

#include "objects/context.h"

struct rn_channel {
	struct ibv_comp_channel channel;
	uint32_t id;
	_Atomic bool never_waits; /* whatever mode its descriptor has now: channel.c */
	struct rn_lock lock; /* the list */
	struct rn_list cqs;
	struct rn_list link;
};

/* A number for this eventfd, by which peers ask for it, and wake who reads it; RN_NO_CHANNEL: there is none left. A reader
 * whose `never_waits` is set must not wait, whatever mode the descriptor has. */
uint32_t rn_channel_register(int fd, _Atomic bool *never_waits);
void rn_channel_unregister(uint32_t channel_id); /* before it is closed */

/* For struct rn_peer_ops. */
int rn_channel_fd(uint32_t channel_id);
void rn_channel_signal(uint32_t channel_id);
enum { RN_CHANNEL_WAKEUP = 0 }; /* the channel by which peers wake this process's engine */
void rn_channel_set_wakeup(int fd); /* -1: there is none. Nobody uses the one before any more. */
