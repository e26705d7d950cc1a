/* SPDX-License-Identifier: Apache-2.0 */
/* iWARP's rules, and the link layer of InfiniBand: what the device is, by its switches. */
#include "pair.h"

static void it_says_so(void)
{
	struct ibv_device **list;
	struct ibv_device_attr attr;
	struct ibv_port_attr port;

	setenv("RDMANET_SOFT_RULES", "iwarp", 1);
	list = ibv_get_device_list(NULL);
	CHECK_EQ(list[0]->node_type, IBV_NODE_RNIC);
	CHECK_EQ(list[0]->transport_type, IBV_TRANSPORT_IWARP);
	ibv_free_device_list(list);
	open_pair();
	CHECK_EQ(ibv_query_device(a.context, &attr), 0);
	CHECK_EQ(attr.atomic_cap, IBV_ATOMIC_NONE);
	CHECK_EQ(attr.max_sge_rd, 1);
	CHECK_EQ(ibv_query_port(a.context, 1, (void *)&port), 0);
	CHECK_EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
	close_pair();
}

static void what_cannot_be_posted(void)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM,
						     IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD};
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_READ, .num_sge = 2}, *bad;
	struct ibv_sge sge[2];

	open_pair();
	for (size_t i = 0; i < sizeof(opcodes) / sizeof(opcodes[0]); i++)
		CHECK_EQ(post_rdma(&a, opcodes[i], 1, 0, 8, at_b(0), b.mr->rkey), EINVAL);
	sge[0] = sge[1] = sge_of(&a, 0, 8);
	wr.sg_list = sge;
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_READ, 1, 0, 8, at_b(0), b.mr->rkey), 0);
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 2, 0, 8, at_b(0), b.mr->rkey), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	close_pair();
}

static void what_cannot_be_created(void)
{
	struct ibv_qp_init_attr init = {.cap = {.max_send_wr = 1}};

	open_pair();
	init.send_cq = init.recv_cq = a.cq;
	init.qp_type = IBV_QPT_UC;
	CHECK(!ibv_create_qp(a.pd, &init) && errno == EOPNOTSUPP);
	init.qp_type = IBV_QPT_UD;
	CHECK(!ibv_create_qp(a.pd, &init) && errno == EOPNOTSUPP);
	CHECK(!ibv_alloc_mw(a.pd, IBV_MW_TYPE_1) && errno == EOPNOTSUPP);
	close_pair();
}

/* TCP took the message, so it was sent; then there is no connection any more. */
static void send_without_a_receive(void)
{
	open_pair();
	CHECK_EQ(post_recv(&b, 7, 0, 8), 0);
	CHECK_EQ(post_send(&a, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	CHECK_EQ(post_send(&a, 3, 0, 8), 0);
	expect(a.cq, 1, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(a.cq, 3, IBV_WC_WR_FLUSH_ERR);
	expect(b.cq, 7, IBV_WC_SUCCESS);
	expect_event(a.context, IBV_EVENT_QP_FATAL);
	expect_event(b.context, IBV_EVENT_QP_FATAL);
	CHECK_EQ(state_of(a.qp), IBV_QPS_ERR);
	CHECK_EQ(state_of(b.qp), IBV_QPS_ERR);
	close_pair();
	unsetenv("RDMANET_SOFT_RULES");
}

static void roce_again(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK_EQ(list[0]->node_type, IBV_NODE_CA);
	CHECK_EQ(list[0]->transport_type, IBV_TRANSPORT_IB);
	ibv_free_device_list(list);
}

static void infiniband(void)
{
	struct ibv_qp_attr attr;
	struct ibv_port_attr port;
	struct ibv_gid_entry gid;

	setenv("RDMANET_SOFT_LINK", "infiniband", 1);
	open_pair_with((struct end_options){.cqe = 64});
	CHECK_EQ(ibv_query_port(a.context, 1, (void *)&port), 0);
	CHECK_EQ(port.link_layer, IBV_LINK_LAYER_INFINIBAND);
	CHECK_EQ(port.lid, 1);
	CHECK_EQ(_ibv_query_gid_ex(a.context, 1, 0, &gid, 0, sizeof(gid)), 0);
	CHECK_EQ(gid.gid_type, IBV_GID_TYPE_IB);

	/* By LID, without a global address. */
	attr = default_attr(b.qp->qp_num);
	attr.ah_attr = (struct ibv_ah_attr){.dlid = 2, .port_num = 1};
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_INIT, INIT_MASK), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), EHOSTUNREACH);
	attr.ah_attr.dlid = port.lid;
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	attr.dest_qp_num = a.qp->qp_num;
	connect_with(b.qp, attr);
	CHECK_EQ(post_recv(&b, 1, 0, 8), 0);
	CHECK_EQ(post_send(&a, 2, 0, 8), 0);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_pair();
	unsetenv("RDMANET_SOFT_LINK");
}

int main(void)
{
	RUN(it_says_so);
	RUN(what_cannot_be_posted);
	RUN(what_cannot_be_created);
	RUN(send_without_a_receive);
	RUN(roce_again);
	RUN(infiniband);
	expect_live_nothing();
	return 0;
}
