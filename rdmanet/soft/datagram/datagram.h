/* SPDX-License-Identifier: Apache-2.0 */
/* Unreliable datagrams: what the rest of the device knows of them. datagram.c has the theory. */
#pragma once

#include "objects/ah.h"
#include "objects/qp.h"

enum {
	RN_UD_MTU = 4096,
	RN_UD_GROUP_PORT = 21070, /* where messages to groups are sent, to any group */
	RN_UD_PEERS = 64,
};

/* What a UD queue pair has beside what all have. */
struct rn_ud {
	uint32_t name;
	bool is_heard;   /* UDP sockets are open for it */
	unsigned groups; /* it is attached to; with rn_process_lock held */
	struct rn_ud_known {
		uint16_t port;
		struct rn_peer *peer;
		uint64_t dead_until;
	} known[RN_UD_PEERS];      /* by port modulo */
	struct rn_peer *seen_peer; /* whose queue pair qp->responder is of */
	uint32_t seen_qpn;
};

extern bool rn_ud_by_wire; /* send everything by wire, even to this host: for tests */

/* How UD queue pairs send and receive. */
extern const struct rn_path_ops rn_datagram_path_ops;

/* A message for a queue pair of this process, from wherever it came. On the engine or in the sender's thread, with
 * rn_process_lock held: it is delivered, or dropped. */
struct rn_datagram {
	enum ibv_wr_opcode opcode; /* SEND or SEND_WITH_IMM */
	bool solicited;
	__be32 imm_data;
	uint32_t source_qpn, qkey;
	struct rn_grh grh;
	const char *data;
	uint32_t length;
};
void rn_ud_deliver(struct rn_qp *qp, const struct rn_datagram *datagram);
