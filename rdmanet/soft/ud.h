/* SPDX-License-Identifier: Apache-2.0 */
/* Unreliable datagrams: what the rest of the device knows of them. ud.c has the theory. */
#ifndef RDMANET_SOFT_UD_H
#define RDMANET_SOFT_UD_H

#include "ah.h"
#include "soft.h"

enum {
	RN_UD_MTU = 4096,
	RN_UD_GROUP_PORT = 21070, /* where messages to groups are sent, whoever is in them */
};

struct rn_ud;

extern bool rn_ud_by_wire; /* all of it, also to this host: for tests */

int rn_ud_open(struct rn_qp *qp); /* 0 or errno */
void rn_ud_close(struct rn_qp *qp);
/* Its links go, and whom it heard. Without locks. */
void rn_ud_reset(struct rn_qp *qp);

/* One work request of a UD queue pair. With sq_lock held. */
enum rn_wait rn_ud_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status,
			   uint32_t *byte_len);

/* A message for a queue pair of this process, from wherever it came. On the engine or in the sender's thread, with
 * rn_world held: it is delivered, or dropped. */
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

#endif
