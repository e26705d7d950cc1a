/* SPDX-License-Identifier: Apache-2.0 */
/* A first byte that is odd: the greeting is a proper one, and what follows is fuzz.
 * The queue pair waits at RTR for a peer at 127.0.0.1 that it has never seen: whoever says so is let in. See fuzz.h. */
#include "fuzz.h"

#include "../c/soft.h"
#include "tcp/tcp.h"

enum { STRANGER = 0x812345 };

static struct end end;

static void anew(void)
{
	struct ibv_qp_attr attr = default_attr(STRANGER);

	memset(&attr.ah_attr.grh.dgid, 0, sizeof(attr.ah_attr.grh.dgid));
	attr.ah_attr.grh.dgid.raw[10] = attr.ah_attr.grh.dgid.raw[11] = 0xff;
	memcpy(attr.ah_attr.grh.dgid.raw + 12, (uint8_t[]){127, 0, 0, 1}, 4);
	/* Ours is an address of loopback's too. */
	for (int i = 0; i < 256; i++) {
		union ibv_gid gid;

		if (!ibv_query_gid(end.context, 1, i, &gid) && !memcmp(&gid, &attr.ah_attr.grh.dgid, sizeof(gid)))
			attr.ah_attr.grh.sgid_index = i;
	}
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(post_recv(&end, i, 64 * i, 64), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	anew();
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct ibv_wc wc[8];
	int fd;

	if (!size)
		return 0;
	fd = connect_tcp(end.qp->qp_num >> 8);
	if (*data & 1) {
		struct rn_tcp_hello hello = {
			.magic = RN_TCP_MAGIC,
			.version = RN_WIRE_VERSION,
			.source_qpn = STRANGER,
			.dest_qpn = end.qp->qp_num,
			.psn = 17,
			.source_gid = {[10] = 0xff, 0xff, 127, 0, 0, 1},
		};

		CHECK(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello));
	}
	converse(fd, data + 1, size - 1);
	while (ibv_poll_cq(end.cq, 8, wc) > 0)
		;
	if (state_of(end.qp) != IBV_QPS_RTR)
		anew();
	return 0;
}
