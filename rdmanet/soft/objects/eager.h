/* SPDX-License-Identifier: Apache-2.0 */
/* Short messages into memory that peers can't map: eager.c. */
#pragma once

#include "objects/qp.h"

uint32_t rn_eager_reserve(uint32_t slots); /* the room for each; 0: there is none */
void rn_eager_release(uint32_t slots, uint32_t room);
void rn_eager_forked(void);
/* Carry the message of a completed receive to where it belongs. With the CQ's lock held. False: that memory is gone. */
bool rn_eager_take(struct rn_qp *qp, uint32_t index, uint32_t length);
/* The same for all messages that wait for this region, before its key is withdrawn; with rn_process_lock held. */
void rn_eager_settle(uint32_t pd, uint32_t key);
