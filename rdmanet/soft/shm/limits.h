/* SPDX-License-Identifier: Apache-2.0 */
/* What the device can do: queries report these, the creators enforce them. */
#pragma once

#include "base/process.h"
#include "shm/arena.h"

enum {
	RN_MAX_QP_WR = 1 << 15,
	RN_MAX_CQE = 1 << 22,
	RN_MAX_INLINE = 1024,
	RN_MAX_RD_ATOMIC = 128,
	RN_MAX_SRQS = RN_POOLS_MAX,
	RN_MAX_CHANNELS = 1 << 12,
};
enum { RN_LID = 1 }; /* with the link layer of InfiniBand: every device of this host's */
#define RN_MAX_MESSAGE (1u << 30)
#define RN_MAX_DM (64u << 20)
