/* SPDX-License-Identifier: Apache-2.0 */
/* Multicast groups: what the rest of the device knows of them. multicast.c has the theory. */
#pragma once

#include "objects/qp.h"

/* Its context is closing. */
void rn_mcast_detach_all(struct rn_qp *qp);
void rn_mcast_forked(void);
