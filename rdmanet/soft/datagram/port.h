/* SPDX-License-Identifier: Apache-2.0 */
/* The UDP port of a process: port.c. */
#pragma once

#include <sys/socket.h>

#include "objects/qp.h"

/* Take the UDP port before its number is known: 0, or errno: EADDRINUSE if another process has it. Also where
 * that fails it is freed, on the engine or before it was ever open. */
int rn_ud_port_reserve(uint16_t number);
void rn_ud_port_free(uint16_t number);
/* From RTR on, until it is reset. Without locks. 0 or errno. */
int rn_ud_port_open(struct rn_qp *qp);
void rn_ud_port_close(struct rn_qp *qp);
/* From the socket at this address of ours. Sent, or dropped; or RN_WAIT_LINK: the socket is full. */
enum rn_wait rn_ud_port_send(uint16_t number, const union ibv_gid *from, uint32_t interface, const struct msghdr *message,
			     bool *fault);
void rn_ud_port_forked(void);
