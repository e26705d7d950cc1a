/* SPDX-License-Identifier: Apache-2.0 */
/* A READ or a WRITE in a list: memory here and at the peer, and their keys. Part of the library's exports (extras.h). */
#pragma once

#include <stdint.h>

struct rn_block {
	uint64_t here, there;
	uint32_t length, lkey, rkey;
};
