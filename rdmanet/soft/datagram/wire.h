/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams to and from other hosts: one UDP datagram for a UD message.
 *
 *     offset   0      4       5     6      8         12          16     20         24
 *              magic  version flags length dest QPN  source QPN  Q_Key  immediate  the message
 *
 * All in network order.  A socket is bound to each address of the device and the port number (QPN >> 8), from when the
 * first UD queue pair of that port goes to RTR until the last has gone; before that the port is held, and nobody is
 * heard (port.h).  The kernel says who sent a message, and it must have come from the port in its queue pair's number.
 */
#pragma once

#include "objects/ah.h"
#include "objects/qp.h"
#include "responder/responder.h"

struct rn_datagram;

enum { RN_UD_HEADER = 24 };

/* Sent, or dropped; or RN_WAIT_LINK: the socket is full (port.h). With sq_lock held. */
enum rn_wait rn_ud_wire_send(struct rn_qp *qp, const struct rn_ah *ah, const struct ibv_send_wr *wr, uint32_t qkey,
			     const struct rn_piece *pieces, int num_pieces, uint32_t length, bool *fault);

/* Parse these bytes; the destination's number is returned separately. False: they are not a datagram of ours. */
bool rn_ud_wire_parse(const void *bytes, size_t length, struct rn_datagram *datagram, uint32_t *dest_qpn);
/* Receive what has arrived on a socket, and deliver each datagram. On the engine. */
void rn_ud_wire_receive(int fd, const union ibv_gid *at,
			void (*give)(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram), void *closure);
