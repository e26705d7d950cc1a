/* SPDX-License-Identifier: Apache-2.0 */
/* Unreliable datagrams: GRH, Q_Keys, what is dropped, many senders, and senders that die or stop. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>

#include "base/version.h"
#include "soft.h"
#include "datagram/datagram.h"
#include "datagram/wire.h"

#include "pair.h"
#include "namespace.h"
#include "processes.h"

enum {
	QKEY = 0x11111111,
	GRH = 40,
	UD_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
};

static int loopback_gid(struct ibv_context *context)
{
	union ibv_gid gid;

	for (int i = 0; i < 256; i++)
		if (!ibv_query_gid(context, 1, i, &gid) && gid.raw[12] == 127 && gid.raw[15] == 1)
			return i;
	CHECK(false);
	return -1;
}

static struct ibv_ah *make_ah(struct end *end)
{
	struct ibv_ah_attr attr = {
		.is_global = 1,
		.port_num = 1,
		.grh = {.sgid_index = loopback_gid(end->context), .hop_limit = 3, .traffic_class = 8},
	};
	struct ibv_ah *ah;

	attr.grh.dgid.raw[10] = attr.grh.dgid.raw[11] = 0xff;
	attr.grh.dgid.raw[12] = 127;
	attr.grh.dgid.raw[15] = 1;
	ah = ibv_create_ah(end->pd, &attr);
	CHECK(ah && ah->pd == end->pd && ah->context == end->context);
	return ah;
}

static void start_ud(struct ibv_qp *qp, uint32_t qkey)
{
	struct ibv_qp_attr attr = {.port_num = 1, .qkey = qkey, .sq_psn = 1};

	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, UD_INIT), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, 0), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0);
}

static struct ibv_ah *ah;

static void open_ud(void)
{
	open_pair_with((struct end_options){.cqe = 1024, .type = IBV_QPT_UD});
	start_ud(a.qp, QKEY);
	start_ud(b.qp, QKEY);
	ah = make_ah(&a);
}

static void close_ud(void)
{
	CHECK_EQ(ibv_destroy_ah(ah), 0);
	close_pair();
	expect_live_nothing();
}

static int send_to(struct end *from, uint64_t wr_id, uint32_t qpn, uint32_t qkey, size_t offset, uint32_t length)
{
	return post(from,
		    (struct ibv_send_wr){.wr_id = wr_id, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
					 .wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey}},
		    offset, length);
}

/* By wire, posting is not arriving. What goes from a port to itself arrives in order: when this message is there, all
 * that a has sent before has arrived or been dropped. Nothing else of a may be outstanding. */
static void settle(void)
{
	bool sent = false, arrived = false;

	CHECK_EQ(post_recv(&a, 98, BUFFER / 2, GRH), 0);
	CHECK_EQ(send_to(&a, 99, a.qp->qp_num, QKEY, 0, 0), 0);
	while (!sent || !arrived) {
		struct ibv_wc wc = poll_one(a.cq);

		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK(wc.wr_id == 98 || wc.wr_id == 99);
		*(wc.wr_id == 98 ? &arrived : &sent) = true;
	}
}

static void test_send(void)
{
	struct ibv_wc wc;
	struct ibv_sge sge;
	struct ibv_send_wr wr = {.wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
				 .imm_data = 0x55667788, .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE}, *bad;

	open_ud();
	CHECK_EQ(post_recv(&b, 1, 0, GRH + 100), 0);
	CHECK_EQ(send_to(&a, 2, b.qp->qp_num, QKEY, 0, 100), 0);
	wc = poll_one(a.cq);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.opcode, IBV_WC_SEND);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, 1);
	CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	CHECK_EQ(wc.byte_len, GRH + 100);
	CHECK_EQ(wc.wc_flags, IBV_WC_GRH);
	CHECK_EQ(wc.sl, 8 | 2); /* RoCE v2, IPv4: programs take the header for what it is by this */
	CHECK_EQ(wc.qp_num, b.qp->qp_num);
	CHECK_EQ(wc.src_qp, a.qp->qp_num);
	CHECK_EQ(b.buffer[GRH], 'a');
	CHECK_EQ(b.buffer[GRH + 99], 'a');
	CHECK_EQ(b.buffer[GRH + 100], 'b');

	sge = sge_of(&a, 0, 17);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = b.qp->qp_num;
	wr.wr.ud.remote_qkey = QKEY;
	CHECK_EQ(post_recv(&b, 3, 0, 4096), 0);
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	expect(a.cq, 9, IBV_WC_SUCCESS);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
	CHECK_EQ(wc.imm_data, 0x55667788);
	CHECK_EQ(wc.byte_len, GRH + 17);
	close_ud();
}

/* An answer goes to where the header says that the message came from; for both forms of the header. */
static void test_reply(void)
{
	struct ibv_ah_attr attr;
	struct ibv_ah *back;
	struct rn_grh grh;
	union ibv_gid from = {.raw = {0xfd, 1, [15] = 7}}, to = {.raw = {[15] = 1}};
	struct ibv_wc wc;

	open_ud();
	CHECK_EQ(post_recv(&b, 1, 0, 200), 0);
	CHECK_EQ(send_to(&a, 2, b.qp->qp_num, QKEY, 0, 100), 0);
	wc = poll_one(b.cq);
	CHECK_EQ(ibv_init_ah_from_wc(b.context, 1, &wc, (struct ibv_grh *)b.buffer, &attr), 0);
	CHECK(attr.is_global && attr.port_num == 1 && attr.grh.traffic_class == 8);
	CHECK(attr.grh.dgid.raw[10] == 0xff && attr.grh.dgid.raw[12] == 127 && attr.grh.dgid.raw[15] == 1);
	CHECK_EQ(attr.grh.sgid_index, loopback_gid(b.context));
	back = ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)b.buffer, 1);
	CHECK(back);
	CHECK_EQ(ibv_destroy_ah(back), 0);

	rn_grh_make(&grh, &from, &to, 5, 9, 0x12345, 64);
	CHECK_EQ(ibv_init_ah_from_wc(b.context, 1, &wc, (struct ibv_grh *)&grh, &attr), 0);
	CHECK(!memcmp(&attr.grh.dgid, &from, 16));
	CHECK_EQ(attr.grh.flow_label, 0x12345);
	CHECK_EQ(attr.grh.traffic_class, 5);
	memset(&grh, 0, sizeof(grh));
	CHECK(ibv_init_ah_from_wc(b.context, 1, &wc, (struct ibv_grh *)&grh, &attr) == -1 && errno == EINVAL);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	close_ud();
}

static void test_address_handles(void)
{
	struct ibv_ah_attr attr = {.is_global = 0, .port_num = 1};

	open_ud();
	CHECK(!ibv_create_ah(a.pd, &attr) && errno == EINVAL); /* Ethernet has no other */
	attr.is_global = 1;
	attr.grh.sgid_index = 255;
	CHECK(!ibv_create_ah(a.pd, &attr) && errno == EINVAL);
	attr.grh.sgid_index = 0;
	attr.port_num = 2;
	CHECK(!ibv_create_ah(a.pd, &attr) && errno == EINVAL);
	CHECK_EQ(ibv_dealloc_pd(a.pd), EBUSY);
	close_ud();
}

/* The sender is none the wiser, and the receiver unharmed. */
static void test_dropped(void)
{
	open_ud();
	CHECK_EQ(send_to(&a, 1, b.qp->qp_num, QKEY, 0, 10), 0); /* no receive */
	expect(a.cq, 1, IBV_WC_SUCCESS);
	settle();
	CHECK_EQ(post_recv(&b, 7, 0, GRH + 16), 0);
	CHECK_EQ(send_to(&a, 1, b.qp->qp_num, QKEY + 1, 0, 16), 0);             /* another key */
	CHECK_EQ(send_to(&a, 1, b.qp->qp_num, QKEY, 0, 17), 0);                 /* too long */
	CHECK_EQ(send_to(&a, 1, b.qp->qp_num ^ 0x40, QKEY, 0, 16), 0);          /* nobody */
	CHECK_EQ(send_to(&a, 1, b.qp->qp_num ^ 0x4000, QKEY + 1, 0, 16), 0);    /* no such process: mostly */
	for (int i = 0; i < 4; i++)
		expect(a.cq, 1, IBV_WC_SUCCESS);
	settle();
	expect_nothing(b.cq);
	CHECK_EQ(send_to(&a, 2, b.qp->qp_num, 0x80000000, 0, 16), 0); /* the sender's own key */
	expect(b.cq, 7, IBV_WC_SUCCESS);
	expect(a.cq, 2, IBV_WC_SUCCESS);
	CHECK_EQ(post_recv(&b, 8, 0, GRH + RN_UD_MTU), 0);
	CHECK_EQ(send_to(&a, 3, b.qp->qp_num, QKEY, 0, RN_UD_MTU), 0);
	expect(b.cq, 8, IBV_WC_SUCCESS);
	expect(a.cq, 3, IBV_WC_SUCCESS);
	CHECK_EQ(state_of(b.qp), IBV_QPS_RTS);
	close_ud();
}

static void test_local_errors(void)
{
	struct ibv_qp_attr attr = default_attr(0);
	struct ibv_qp_init_attr init;
	struct ibv_sge sge;
	struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

	open_ud();
	CHECK_EQ(post_rdma(&a, IBV_WR_RDMA_WRITE, 1, 0, 8, at_b(0), b.mr->rkey), EINVAL);
	sge = sge_of(&a, 0, 8);
	sge.lkey ^= 1;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = b.qp->qp_num;
	wr.wr.ud.remote_qkey = QKEY;
	CHECK_EQ(post_recv(&a, 7, 0, 64), 0);
	CHECK_EQ(ibv_post_send(a.qp, &wr, &bad), 0);
	expect(a.cq, 5, IBV_WC_LOC_PROT_ERR);
	CHECK_EQ(state_of(a.qp), IBV_QPS_SQE);
	CHECK_EQ(send_to(&a, 6, b.qp->qp_num, QKEY, 0, 8), 0);
	expect(a.cq, 6, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(send_to(&b, 8, a.qp->qp_num, QKEY, 0, 8), 0); /* it still receives; the handle is of the same PD */
	expect(a.cq, 7, IBV_WC_SUCCESS);
	expect(b.cq, 8, IBV_WC_SUCCESS);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, RN_UD_MTU + 1), 0); /* more than a packet */
	expect(a.cq, 9, IBV_WC_LOC_LEN_ERR);
	CHECK_EQ(to_state(a.qp, &attr, IBV_QPS_RTS, 0), 0);
	CHECK_EQ(ibv_query_qp(a.qp, &attr, IBV_QP_QKEY, &init), 0);
	CHECK_EQ(attr.qkey, QKEY);
	CHECK_EQ(init.qp_type, IBV_QPT_UD);
	close_ud();
}

static void test_error_and_reset(void)
{
	struct ibv_qp_attr attr = {0};

	open_ud();
	for (int i = 0; i < 4; i++)
		CHECK_EQ(post_recv(&b, i, 0, 64), 0);
	CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, 8), 0);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_ERR, 0), 0);
	expect(b.cq, 0, IBV_WC_SUCCESS);
	for (int i = 1; i < 4; i++)
		expect(b.cq, i, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(post_recv(&b, 5, 0, 64), 0);
	expect(b.cq, 5, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(post_recv(&b, 6, 0, 64), EINVAL);
	start_ud(b.qp, QKEY);
	CHECK_EQ(post_recv(&b, 7, 0, 64), 0);
	CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, 8), 0);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
	expect_nothing(b.cq); /* silently */
	start_ud(b.qp, QKEY);
	for (int i = 0; i < 64; i++) /* all slots are free again */
		CHECK_EQ(post_recv(&b, i, 0, 64), 0);
	CHECK_EQ(post_recv(&b, 64, 0, 64), ENOMEM);
	close_ud();
}

/* A sender that is stopped inside holds up its own message only, and what it may write to stays. */
static void test_stopped_sender(void)
{
	struct rn_recv_claim claim = {0};
	struct rn_pool_block *block;
	struct ibv_qp_attr attr = {0};

	open_ud();
	block = rn_pool_block(rn_qp(b.qp)->pool);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(post_recv(&b, i, 0, 64), 0);
	CHECK(rn_recv_claim(rn_arena, block, rn_name_of_process(1), &claim));
	for (int i = 1; i < 4; i++) {
		CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, 8), 0);
		expect(a.cq, 9, IBV_WC_SUCCESS);
		expect(b.cq, i, IBV_WC_SUCCESS);
	}
	CHECK_EQ(ibv_dereg_mr(b.mr), 0);
	b.mr = NULL;
	CHECK_EQ(rdmanet_soft_quarantined(), 1); /* the key */
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_ERR, 0), 0);
	expect(b.cq, 0, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), EBUSY);
	/* It wakes up late. */
	claim.entry->slot.byte_len = 48;
	rn_recv_claim_finish(rn_arena, &claim, &rn_qp(b.qp)->block->finished);
	rn_cq_mark_ready(rn_qp(b.qp)->recv_cq, rn_qp(b.qp));
	expect_nothing(b.cq);
	CHECK_EQ(to_state(b.qp, &attr, IBV_QPS_RESET, 0), 0);
	CHECK_EQ(rdmanet_soft_quarantined(), 0);

	b.mr = ibv_reg_mr(b.pd, b.buffer, BUFFER, ALL_ACCESS);
	start_ud(b.qp, QKEY);
	CHECK_EQ(post_recv(&b, 1, 0, 64), 0);
	CHECK(rn_recv_claim(rn_arena, block, rn_name_of_process(1), &claim));
	CHECK_EQ(ibv_destroy_qp(b.qp), 0);
	b.qp = NULL;
	CHECK(rdmanet_soft_quarantined() > 0);
	rn_recv_claim_give_back(block, &claim);
	CHECK_EQ(rdmanet_soft_quarantined(), 0);
	close_ud();
}

/* What the dead had claimed is posted again. */
static void test_dead_sender(void)
{
	struct rn_recv_claim claim = {0};

	open_ud();
	CHECK_EQ(post_recv(&b, 1, 0, 64), 0);
	CHECK(rn_recv_claim(rn_arena, rn_pool_block(rn_qp(b.qp)->pool), rn_name_of_process(77777), &claim));
	CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, 8), 0);
	expect(a.cq, 9, IBV_WC_SUCCESS);
	expect_nothing(b.cq);
	rn_qp_process_died(77777);
	CHECK_EQ(send_to(&a, 9, b.qp->qp_num, QKEY, 0, 8), 0);
	expect(a.cq, 9, IBV_WC_SUCCESS);
	expect(b.cq, 1, IBV_WC_SUCCESS);
	close_ud();
}

static void test_with_srq(void)
{
	struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 8, .max_sge = 1}};
	struct ibv_qp_init_attr init = {.cap = {.max_send_wr = 4, .max_send_sge = 1}, .qp_type = IBV_QPT_UD};
	struct ibv_qp *qps[2];
	struct ibv_recv_wr wr = {.num_sge = 1}, *bad;
	struct ibv_sge sge;

	open_ud();
	init.send_cq = init.recv_cq = b.cq;
	init.srq = ibv_create_srq(b.pd, &srq_init);
	for (int i = 0; i < 2; i++) {
		CHECK(qps[i] = ibv_create_qp(b.pd, &init));
		start_ud(qps[i], QKEY);
	}
	sge = sge_of(&b, 0, 64);
	wr.sg_list = &sge;
	for (int i = 0; i < 4; i++) {
		wr.wr_id = i;
		CHECK_EQ(ibv_post_srq_recv(init.srq, &wr, &bad), 0);
	}
	CHECK_EQ(ibv_post_recv(qps[0], &wr, &bad), EINVAL);
	for (int i = 0; i < 4; i++) {
		struct ibv_wc wc;

		CHECK_EQ(send_to(&a, i, qps[i % 2]->qp_num, QKEY, 0, 8), 0);
		expect(a.cq, i, IBV_WC_SUCCESS);
		wc = poll_one(b.cq);
		CHECK_EQ(wc.wr_id, i);
		CHECK_EQ(wc.qp_num, qps[i % 2]->qp_num);
		CHECK_EQ(wc.src_qp, a.qp->qp_num);
	}
	for (int i = 0; i < 2; i++)
		CHECK_EQ(ibv_destroy_qp(qps[i]), 0);
	CHECK_EQ(ibv_destroy_srq(init.srq), 0);
	close_ud();
}

/* --- the wire ---------------------------------------------------------------------------------------------- */

/* The sender's own, or the receiver's, is the mapping of a file, which is shortened. */
static void test_shortened_memory(void)
{
	for (int its_own = 0; its_own < 2; its_own++) {
		struct end *end;
		struct ibv_mr *mr;
		char *at;
		int fd = memfd_create("shortened", MFD_CLOEXEC);

		open_ud();
		end = its_own ? &b : &a;
		CHECK(fd >= 0 && !ftruncate(fd, BUFFER));
		CHECK((at = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
		CHECK(mr = ibv_reg_mr(end->pd, at, BUFFER, ALL_ACCESS));
		munmap(end->buffer, BUFFER);
		CHECK_EQ(ibv_dereg_mr(end->mr), 0);
		end->buffer = at;
		end->mr = mr;
		CHECK_EQ(post_recv(&b, 100, 0, 200), 0);
		CHECK_EQ(ftruncate(fd, 0), 0);
		CHECK_EQ(send_to(&a, 1, b.qp->qp_num, QKEY, 0, 100), 0);
		expect(a.cq, 1, its_own ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
		if (its_own)
			expect(b.cq, 100, IBV_WC_LOC_PROT_ERR);
		close(fd);
		close_ud();
	}
}

static void test_by_wire(void)
{
	rn_ud_by_wire = true;
	test_send();
	test_dropped();
	test_with_srq();
	test_shortened_memory();
	rn_ud_by_wire = false;
}

static void test_parsing(void)
{
	unsigned char bytes[RN_UD_HEADER + 8] = {'R', 'N', 'U', 'D', RN_WIRE_VERSION, 1, 0, 8};
	struct rn_datagram datagram;
	uint32_t dest;

	memcpy(bytes + 8, "\0\x12\x34\x56\0\x65\x43\x21\1\2\3\4\5\6\7\x8", 16);
	CHECK(rn_ud_wire_parse(bytes, sizeof(bytes), &datagram, &dest));
	CHECK_EQ(dest, 0x123456);
	CHECK_EQ(datagram.source_qpn, 0x654321);
	CHECK_EQ(datagram.qkey, 0x01020304);
	CHECK_EQ(ntohl(datagram.imm_data), 0x05060708);
	CHECK(datagram.opcode == IBV_WR_SEND_WITH_IMM && !datagram.solicited && datagram.length == 8);
	for (size_t i = 0; i < sizeof(bytes); i++)
		CHECK(!rn_ud_wire_parse(bytes, i, &datagram, &dest));
	bytes[5] = 4;
	CHECK(!rn_ud_wire_parse(bytes, sizeof(bytes), &datagram, &dest));
	bytes[5] = 0;
	bytes[8] = 1;
	CHECK(!rn_ud_wire_parse(bytes, sizeof(bytes), &datagram, &dest));
	bytes[8] = 0;
	bytes[4] = 2;
	CHECK(!rn_ud_wire_parse(bytes, sizeof(bytes), &datagram, &dest));
}

/* --- groups -------------------------------------------------------------------------------------------------- */

static void test_multicast(void)
{
	const pid_t pid = getpid(); /* a group of our own: others hear what is said in it */
	union ibv_gid group = {
		.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [13] = 64 | (pid >> 16 & 63), [14] = pid >> 8 & 255, [15] = pid & 255}};
	union ibv_gid no_group = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 10, [15] = 1}};
	struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = group, .hop_limit = 1}};
	struct ibv_wc wc;

	open_ud();
	CHECK_EQ(ibv_destroy_ah(ah), 0);
	attr.grh.sgid_index = loopback_gid(a.context);
	CHECK(ah = ibv_create_ah(a.pd, &attr));
	CHECK_EQ(ibv_attach_mcast(b.qp, &no_group, 0), EINVAL);
	CHECK_EQ(ibv_detach_mcast(b.qp, &group, 0), EINVAL);
	CHECK_EQ(ibv_attach_mcast(b.qp, &group, 0), 0);
	CHECK_EQ(ibv_attach_mcast(b.qp, &group, 0), 0); /* twice is once */
	CHECK_EQ(ibv_attach_mcast(a.qp, &group, 0), 0);
	CHECK_EQ(post_recv(&a, 1, 0, 128), 0);
	CHECK_EQ(post_recv(&b, 2, 0, 128), 0);
	CHECK_EQ(send_to(&a, 3, 0xffffff, QKEY, 512, 64), 0);
	wc = poll_one(b.cq);
	CHECK_EQ(wc.wr_id, 2);
	CHECK_EQ(wc.byte_len, GRH + 64);
	CHECK_EQ(wc.src_qp, a.qp->qp_num);
	CHECK_EQ(b.buffer[GRH + 63], 'a');
	CHECK(!memcmp(b.buffer + 20 + 16, group.raw + 12, 4)); /* it says that it was for the group */
	CHECK_EQ(poll_one(a.cq).wr_id + poll_one(a.cq).wr_id, 4); /* sent, and heard by the sender itself */
	CHECK_EQ(ibv_destroy_qp(b.qp), EBUSY);
	CHECK_EQ(ibv_detach_mcast(b.qp, &group, 0), 0);
	CHECK_EQ(ibv_detach_mcast(b.qp, &group, 0), EINVAL);
	CHECK_EQ(ibv_detach_mcast(a.qp, &group, 0), 0);
	close_ud();

	/* What is left is taken along with the context. */
	memset(&a, 0, sizeof(a));
	end_open(&a, &(struct end_options){.type = IBV_QPT_UD});
	CHECK_EQ(ibv_attach_mcast(a.qp, &group, 0), 0);
	CHECK_EQ(ibv_close_device(a.context), 0);
	munmap(a.buffer, BUFFER);
	memset(&a, 0, sizeof(a));
	expect_live_nothing();
}

/* A message of ours, by hand, from a port that fits its sender's number. */
static void send_by_hand(int fd, const char *host, uint16_t port, char first)
{
	struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = htons(port)}, from;
	unsigned char bytes[RN_UD_HEADER + 8] = {'R', 'N', 'U', 'D', RN_WIRE_VERSION, 0, 0, 8, 0, 0xff, 0xff, 0xff};
	socklen_t length = sizeof(from);
	uint32_t number, qkey = htonl(QKEY);

	CHECK(!getsockname(fd, (struct sockaddr *)&from, &length));
	number = htonl((uint32_t)ntohs(from.sin6_port) << 8);
	memcpy(bytes + 12, &number, 4);
	memcpy(bytes + 16, &qkey, 4);
	bytes[RN_UD_HEADER] = first;
	CHECK_EQ(inet_pton(AF_INET6, host, &to.sin6_addr), 1);
	CHECK_EQ(sendto(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&to, sizeof(to)), sizeof(bytes));
}

/* Not what anybody sends to the groups' port at one of this host's addresses, from wherever that can be reached. */
static void only_what_was_sent_to_the_group(void)
{
	union ibv_gid group = {.raw = {0xff, 0x1e, [15] = 7}};
	struct sockaddr_in6 any = {.sin6_family = AF_INET6};
	int fd, interface;

	ip("link set v0 up");
	ip("link set v1 up");
	until_running("v0");
	ip("addr add fd00:7::1/64 dev v0 nodad"); /* which waits until the kernel has told everybody */
	open_ud();
	CHECK_EQ(ibv_attach_mcast(a.qp, &group, 0), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_recv(&a, i, i * 128, 128), 0);
	fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	interface = (int)if_nametoindex("v0");
	CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&any, sizeof(any)) && interface);
	CHECK(!setsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, &interface, sizeof(interface)));
	send_by_hand(fd, "::1", RN_UD_GROUP_PORT, 'l');
	send_by_hand(fd, "fd00:7::1", RN_UD_GROUP_PORT, 'u');
	send_by_hand(fd, "ff1e::7", RN_UD_GROUP_PORT, 'g');
	CHECK_EQ(poll_one(a.cq).wr_id, 0);
	CHECK_EQ(a.buffer[GRH], 'g');
	CHECK_EQ(ibv_detach_mcast(a.qp, &group, 0), 0);
	close(fd);
	close_ud();
}

/* --- many senders --------------------------------------------------------------------------------------------- */

enum { SENDERS = 4, MESSAGES = 5000, WINDOW = 64 };

/* The other side of test_killed: messages to one queue pair, for ever. */
static void serve_sender(int fd)
{
	struct address theirs;
	struct end end;
	uint32_t sent = 0;

	CHECK(hear(fd, &theirs, sizeof(theirs)));
	end_open(&end, &(struct end_options){.cqe = 256, .type = IBV_QPT_UD, .memory = USER_MEMORY});
	start_ud(end.qp, QKEY);
	ah = make_ah(&end);
	meet(fd);
	for (;;) {
		struct ibv_wc wc;

		memcpy(end.buffer, &sent, sizeof(sent));
		CHECK_EQ(send_to(&end, sent++, theirs.qpn, QKEY, 0, 64), 0);
		while (!ibv_poll_cq(end.cq, 1, &wc))
			sched_yield();
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	}
}

static void start_sender(struct other *other)
{
	struct address mine = end_address(&b);

	*other = spawn(serve_sender);
	tell(other->fd, &mine, sizeof(mine));
	meet(other->fd);
}

static void receive_some(int count)
{
	uint64_t limit = now_ns() + 20000000000ull;
	struct ibv_wc wc;

	while (count) {
		CHECK(now_ns() < limit);
		if (!ibv_poll_cq(b.cq, 1, &wc)) {
			sched_yield();
			continue;
		}
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK_EQ(wc.byte_len, GRH + 64);
		CHECK_EQ(post_recv(&b, wc.wr_id, wc.wr_id * 128, 128), 0);
		count--;
	}
}

static void test_killed(void)
{
	enum { ROUNDS = 16, PROCESSES = 3, WR = 8 };
	unsigned seed = getenv("SEED") ? strtoul(getenv("SEED"), NULL, 0) : (unsigned)now_ns(), room = 0;
	struct other others[PROCESSES];
	struct ibv_wc wc;

	printf("    seed %u\n", seed);
	fflush(NULL);
	end_open(&b, &(struct end_options){.cqe = 1024, .type = IBV_QPT_UD, .recv_wr = WR});
	start_ud(b.qp, QKEY);
	for (int i = 0; i < WR; i++)
		CHECK_EQ(post_recv(&b, i, i * 128, 128), 0);
	for (int i = 0; i < PROCESSES; i++)
		start_sender(&others[i]);
	for (int round = 0; round < ROUNDS; round++) {
		int victim = rand_r(&seed) % PROCESSES;

		receive_some(20 + rand_r(&seed) % 300);
		if (round % 3 == 0) {
			kill(others[victim].pid, SIGSTOP);
			receive_some(100);
		}
		join_killed(&others[victim]);
		start_sender(&others[victim]);
	}
	for (int i = 0; i < PROCESSES; i++)
		join_killed(&others[i]);
	/* The engine hears of each death; then every receive is there again, or has arrived. */
	for (uint64_t limit = now_ns() + 20000000000ull; room < WR;) {
		CHECK(now_ns() < limit);
		while (ibv_poll_cq(b.cq, 1, &wc) > 0)
			room++;
		/* Whatever is posted can be claimed: take it for the count. */
		for (struct rn_recv_claim claim = {0}; rn_recv_claim(rn_arena, rn_pool_block(rn_qp(b.qp)->pool),
							   rn_name_of_process(getpid()), &claim);)
			room++;
		sched_yield();
	}
	CHECK_EQ(room, WR);
	rn_pool_recover(rn_name_of_process(getpid()));
	end_close(&b);
	memset(&b, 0, sizeof(b));
	expect_live_nothing();
}

struct sender {
	struct end end;
	uint32_t number;
	pthread_t thread;
};

static _Atomic uint32_t received[SENDERS];

/* Not further ahead than there are receives: so nothing may be lost. */
static void *send_many(void *arg)
{
	struct sender *sender = arg;
	struct ibv_wc wc;

	for (uint32_t sent = 0; sent < MESSAGES; sent++) {
		while (sent - atomic_load(&received[sender->number]) >= WINDOW / SENDERS)
			sched_yield();
		((uint32_t *)sender->end.buffer)[0] = sender->number;
		((uint32_t *)sender->end.buffer)[1] = sent;
		CHECK_EQ(send_to(&sender->end, sent, b.qp->qp_num, QKEY, 0, 8), 0);
		while (!ibv_poll_cq(sender->end.cq, 1, &wc))
			sched_yield();
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
	}
	return NULL;
}

static void test_threads(void)
{
	static struct sender senders[SENDERS];
	struct ibv_wc wc;

	open_ud();
	for (uint32_t i = 0; i < SENDERS; i++) {
		atomic_store(&received[i], 0);
		senders[i].number = i;
		end_open(&senders[i].end, &(struct end_options){.type = IBV_QPT_UD, .share = &a});
		start_ud(senders[i].end.qp, QKEY);
	}
	for (int i = 0; i < WINDOW; i++)
		CHECK_EQ(post_recv(&b, i, i * 128, 128), 0);
	for (int i = 0; i < SENDERS; i++)
		CHECK_EQ(pthread_create(&senders[i].thread, NULL, send_many, &senders[i]), 0);
	for (int got = 0; got < SENDERS * MESSAGES;) {
		const uint32_t *text;
		uint32_t from;

		if (!ibv_poll_cq(b.cq, 1, &wc))
			continue;
		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		text = (uint32_t *)(b.buffer + wc.wr_id * 128 + GRH);
		from = text[0];
		CHECK_EQ(wc.src_qp, senders[from].end.qp->qp_num);
		CHECK_EQ(text[1], atomic_load(&received[from]));
		CHECK_EQ(post_recv(&b, wc.wr_id, wc.wr_id * 128, 128), 0);
		atomic_fetch_add(&received[from], 1);
		got++;
	}
	for (int i = 0; i < SENDERS; i++) {
		pthread_join(senders[i].thread, NULL);
		end_close(&senders[i].end);
	}
	close_ud();
}

/* Four who take one and give it back, of five: there is always one to be had. */
static void *claim_and_give_back(void *arg)
{
	struct rn_pool_block *block = arg;

	for (int i = 0; i < 100000; i++) {
		struct rn_recv_claim claim = {0};

		CHECK(rn_recv_claim(rn_arena, block, rn_name_of_process(getpid()), &claim));
		rn_recv_claim_give_back(block, &claim);
	}
	return NULL;
}

static void test_given_back(void)
{
	pthread_t threads[SENDERS];

	open_ud();
	for (int i = 0; i < SENDERS + 1; i++)
		CHECK_EQ(post_recv(&b, i, i * 128, 128), 0);
	for (int i = 0; i < SENDERS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, claim_and_give_back, rn_pool_block(rn_qp(b.qp)->pool)), 0);
	for (int i = 0; i < SENDERS; i++)
		pthread_join(threads[i], NULL);
	close_ud();
}

int main(void)
{
	RUN(test_send);
	RUN(test_reply);
	RUN(test_address_handles);
	RUN(test_dropped);
	RUN(test_local_errors);
	RUN(test_error_and_reset);
	RUN(test_stopped_sender);
	RUN(test_dead_sender);
	RUN(test_with_srq);
	RUN(test_shortened_memory);
	RUN(test_by_wire);
	RUN(test_parsing);
	RUN(test_multicast);
	RUN_IN_NETWORK(only_what_was_sent_to_the_group);
	RUN(test_threads);
	RUN(test_given_back);
	RUN(test_killed);
	return 0;
}
