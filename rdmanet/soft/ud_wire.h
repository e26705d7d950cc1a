/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams to and from other hosts: one UDP datagram for a UD message.
 *
 *     offset   0      4       5     6      8         12          16     20         24
 *              magic  version flags length dest QPN  source QPN  Q_Key  immediate  the message
 *
 * All in network order.  A socket is bound to each address of the device and the number of the port
 * (QPN >> 8), from the first UD queue pair of that port that goes to RTR until the last has gone:
 * that is the program's asking for it; until then the port is held, and nobody is heard.
 * Who sent a message is what the kernel says, and it must have come from the port that its queue pair's number has.
 */
#ifndef RDMANET_SOFT_UD_WIRE_H
#define RDMANET_SOFT_UD_WIRE_H

#include "ah.h"
#include "soft.h"

struct rn_datagram;

enum { RN_UD_HEADER = 24 };

/* Have the UDP port to ourselves, before its number is known: 0, or errno: EADDRINUSE when another has it. Also where
 * that fails it is freed, on the engine or before it was ever open. */
int rn_ud_wire_reserve(uint16_t port);
void rn_ud_wire_free(uint16_t port);
/* From RTR on, until it is reset. Without locks. 0 or errno. */
int rn_ud_wire_open(struct rn_qp *qp);
void rn_ud_wire_close(struct rn_qp *qp);
/* Sent, or dropped; or RN_WAIT_LINK: the socket is full. With sq_lock held. */
enum rn_wait rn_ud_wire_send(struct rn_qp *qp, const struct rn_ah *ah, const struct ibv_send_wr *wr, uint32_t qkey,
			     const struct rn_piece *pieces, int num_pieces, uint32_t length);

/* What these bytes say; the destination's number comes apart. False: not one of ours. */
bool rn_ud_wire_parse(const void *bytes, size_t length, struct rn_datagram *datagram, uint32_t *dest_qpn);
/* Take what has arrived in a socket, and give each to somebody. On the engine. */
void rn_ud_wire_receive(int fd, const union ibv_gid *at,
			void (*give)(void *closure, uint32_t dest_qpn, const struct rn_datagram *datagram), void *closure);
void rn_ud_wire_forked(void);

#endif
