/* SPDX-License-Identifier: Apache-2.0 */
/* Address handles: where a UD message goes. ah.c has the theory. */
#pragma once

#include "objects/pd.h"

struct rn_ah {
	struct ibv_ah ah;
	struct ibv_ah_attr attr;
	union ibv_gid from; /* the GID at sgid_index when the handle was made */
	bool is_ours;      /* an address of this host */
	bool is_multicast;
	struct rn_list link;
};

static inline struct rn_ah *rn_ah(struct ibv_ah *ah)
{
	return (struct rn_ah *)ah;
}

/* The 40 bytes in front of each UD message, as a RoCE v2 adapter leaves them: an IPv6 header, or 20 zero bytes
 * and an IPv4 header. length: of the message behind. */
struct rn_grh {
	unsigned char bytes[40];
};
void rn_grh_make(struct rn_grh *grh, const union ibv_gid *from, const union ibv_gid *to, uint8_t traffic_class,
		 uint8_t hop_limit, uint32_t flow_label, uint32_t length);
static inline bool rn_grh_is_ipv4(const void *grh)
{
	return !(*(const unsigned char *)grh >> 4); /* where IPv6 has its version */
}

bool rn_gid_is_multicast(const union ibv_gid *gid);
void rn_ah_destroy_all(struct rn_context *context);

/* Is the address of this host? A LID without a global address is this host's own. */
bool rn_ah_is_ours(const struct ibv_ah_attr *ah);
/* Whether no process with this address can be mapped. */
bool rn_ah_needs_tcp(const struct ibv_ah_attr *ah);
