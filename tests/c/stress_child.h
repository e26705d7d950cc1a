/* SPDX-License-Identifier: Apache-2.0 */
/* A child of test_stress_many.c, which has the picture; and what hub and child have in common. */
#ifndef STRESS_CHILD_H
#define STRESS_CHILD_H

#include "stress.h"

enum {
	SLOT = 2048,
	GRH = 40,
	OWN = 0, SHARED = 1, DATAGRAM = 2, QUEUES = 3,
	OWN_RECEIVES = 16,
	SENDS = 8,          /* on their way, of each queue */
	/* A child's memory, behind what it sends. */
	CHILD_RECEIVES_AT = QUEUES * SENDS * SLOT,
	QKEY = 0x11111111,
	CHILD_FD = 40,
};

/* Each message begins with it; the seed of its sender says the rest. */
struct note {
	uint32_t id, queue;
	uint64_t index;
};

static uint32_t length_of(unsigned seed, uint32_t queue, uint64_t index)
{
	uint64_t h = mix(seed * 4 + queue, index);
	uint32_t most = queue == DATAGRAM ? 1024 : SLOT;

	return sizeof(struct note) + (h >> 8) % (h % 4 ? 112 : most - sizeof(struct note) + 1);
}

static uint32_t make_message(char *at, unsigned seed, struct note note)
{
	uint32_t length = length_of(seed, note.queue, note.index);

	memcpy(at, &note, sizeof(note));
	fill((uint8_t *)at + sizeof(note), length - sizeof(note), seed + note.index);
	return length;
}

static struct note check_message(const char *at, unsigned seed, uint32_t length)
{
	struct note note;

	memcpy(&note, at, sizeof(note));
	CHECK(note.queue < QUEUES);
	CHECK_EQ(length, length_of(seed, note.queue, note.index));
	expect_filled((const uint8_t *)at + sizeof(note), length - sizeof(note), seed + note.index);
	return note;
}

/* --- objects ------------------------------------------------------------------------------------------- */

static struct ibv_qp *make_qp(struct end *end, enum ibv_qp_type type, struct ibv_srq *srq, uint32_t receives)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = 4 * SENDS, .max_recv_wr = receives, .max_send_sge = 2, .max_recv_sge = 2,
			.max_inline_data = 128},
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.srq = srq,
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(end->pd, &init);

	CHECK(qp);
	return qp;
}

static void start_ud(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.port_num = 1, .qkey = QKEY, .sq_psn = 1};

	CHECK_EQ(to_state(qp, &attr, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTR, 0), 0);
	CHECK_EQ(to_state(qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0);
}

static struct ibv_ah *make_ah(struct end *end)
{
	struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 3}};
	union ibv_gid gid;
	struct ibv_ah *ah;

	for (int i = 0; i < 256; i++)
		if (!ibv_query_gid(end->context, 1, i, &gid) && gid.raw[12] == 127 && gid.raw[15] == 1)
			attr.grh.sgid_index = i;
	memcpy(attr.grh.dgid.raw + 10, (uint8_t[]){0xff, 0xff, 127, 0, 0, 1}, 6);
	ah = ibv_create_ah(end->pd, &attr);
	CHECK(ah);
	return ah;
}

static void connect_patiently(struct ibv_qp *qp, uint32_t dest_qpn)
{
	struct ibv_qp_attr attr = default_attr(dest_qpn);

	attr.timeout = 20; /* whoever is stopped has 4 times 4 seconds */
	connect_with(qp, attr);
}

/* What each side tells the other. */
struct introduction {
	uint32_t qpns[QUEUES];
	uint32_t id;
};

/* --- a child ------------------------------------------------------------------------------------------------- */

static struct child_state {
	struct end end;
	struct ibv_qp *qps[QUEUES];
	struct ibv_ah *ah;
	struct introduction hub;
	unsigned seed, random;
	uint64_t posted[QUEUES], done[QUEUES], signaled[QUEUES], received, receives;
} me;

static void child_send(uint32_t queue, bool signaled)
{
	struct note note = {.id = me.hub.id, .queue = queue, .index = me.posted[queue]};
	size_t at = (queue * SENDS + note.index % SENDS) * SLOT;
	uint32_t length = make_message(me.end.buffer + at, me.seed, note);
	struct ibv_sge sges[2] = {sge_of(&me.end, at, length / 2), sge_of(&me.end, at + length / 2, length - length / 2)};
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)queue << 56 | note.index,
		.sg_list = sges,
		.num_sge = 2,
		.opcode = rand_r(&me.random) % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM,
		.imm_data = (uint32_t)note.index,
		.send_flags = length <= 128 && rand_r(&me.random) % 2 ? IBV_SEND_INLINE : 0,
	}, *bad;

	if (signaled || rand_r(&me.random) % 3 || note.index - me.signaled[queue] >= SENDS / 2) {
		wr.send_flags |= IBV_SEND_SIGNALED;
		me.signaled[queue] = note.index + 1;
	}
	if (queue == DATAGRAM) {
		wr.wr.ud.ah = me.ah;
		wr.wr.ud.remote_qpn = me.hub.qpns[DATAGRAM];
		wr.wr.ud.remote_qkey = QKEY;
	}
	CHECK_EQ(ibv_post_send(me.qps[queue], &wr, &bad), 0);
	me.posted[queue]++;
}

static void child_post_receives(void)
{
	for (; me.receives - me.received < OWN_RECEIVES; me.receives++) {
		struct ibv_sge sge = sge_of(&me.end, CHILD_RECEIVES_AT + me.receives % OWN_RECEIVES * SLOT, SLOT);
		struct ibv_recv_wr wr = {.wr_id = 1ull << 63 | me.receives, .sg_list = &sge, .num_sge = 1}, *bad;

		CHECK_EQ(ibv_post_recv(me.qps[OWN], &wr, &bad), 0);
	}
}

static void child_poll(void)
{
	struct ibv_wc wc[8];
	int count = ibv_poll_cq(me.end.cq, 8, wc);

	for (int i = 0; i < count; i++) {
		uint32_t queue = wc[i].wr_id >> 56;

		if (wc[i].status != IBV_WC_SUCCESS)
			fprintf(stderr, "child %u, %llx: %s\n", me.hub.id, (unsigned long long)wc[i].wr_id,
				ibv_wc_status_str(wc[i].status));
		CHECK_EQ(wc[i].status, IBV_WC_SUCCESS);
		if (wc[i].wr_id >> 63) {
			size_t at = CHILD_RECEIVES_AT + me.received % OWN_RECEIVES * SLOT;

			CHECK_EQ(wc[i].wr_id & ~(1ull << 63), me.received);
			CHECK_EQ(check_message(me.end.buffer + at, ~me.seed, wc[i].byte_len).index, me.received);
			me.received++;
		} else {
			uint64_t index = wc[i].wr_id & ((1ull << 56) - 1);

			CHECK(queue < QUEUES && index >= me.done[queue] && index < me.posted[queue]);
			me.done[queue] = index + 1;
		}
	}
}

static void child_step(bool sends)
{
	uint32_t queue = rand_r(&me.random) % QUEUES;

	if (sends && me.posted[queue] - me.done[queue] < SENDS)
		child_send(queue, false);
	child_poll();
	child_post_receives();
}

/* In good order: what I have sent, what you have sent, all of it here and there. */
static void child_end(int fd)
{
	uint64_t theirs;
	bool heard = false;

	for (uint32_t queue = 0; queue < QUEUES; queue++) {
		while (me.posted[queue] - me.done[queue] >= SENDS)
			child_step(false);
		child_send(queue, true);
		while (me.done[queue] != me.posted[queue])
			child_step(false);
	}
	tell(fd, me.posted, sizeof(me.posted));
	while (!heard || me.received < theirs) {
		if (!heard && readable(fd, 0)) {
			CHECK(hear(fd, &theirs, sizeof(theirs)));
			heard = true;
		}
		child_step(false);
	}
	CHECK_EQ(me.received, theirs);
	meet(fd);
}

static int child(unsigned seed, unsigned id)
{
	struct introduction mine = {.id = id};
	char word;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGABRT, stress_aborted);
	signal(SIGALRM, stress_hangs);
	stress_seed = seed;
	stress_what = "a child";
	me.seed = me.random = mix(seed, id);
	end_open(&me.end, &(struct end_options){.memory = me.seed % 2 ? DEVICE_MEMORY : USER_MEMORY});
	me.qps[OWN] = make_qp(&me.end, IBV_QPT_RC, NULL, OWN_RECEIVES);
	me.qps[SHARED] = make_qp(&me.end, IBV_QPT_RC, NULL, 1);
	me.qps[DATAGRAM] = make_qp(&me.end, IBV_QPT_UD, NULL, 1);
	me.ah = make_ah(&me.end);
	start_ud(me.qps[DATAGRAM]);
	to_init(me.qps[OWN]);
	child_post_receives();
	for (uint32_t i = 0; i < QUEUES; i++)
		mine.qpns[i] = me.qps[i]->qp_num;
	tell(CHILD_FD, &mine, sizeof(mine));
	CHECK(hear(CHILD_FD, &me.hub, sizeof(me.hub)));
	connect_patiently(me.qps[OWN], me.hub.qpns[OWN]);
	connect_patiently(me.qps[SHARED], me.hub.qpns[SHARED]);
	meet(CHILD_FD);
	while (recv(CHILD_FD, &word, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
		child_step(true);
	child_end(CHILD_FD);
	for (uint32_t i = 0; i < QUEUES; i++)
		CHECK_EQ(ibv_destroy_qp(me.qps[i]), 0);
	CHECK_EQ(ibv_destroy_ah(me.ah), 0);
	end_close(&me.end);
	expect_live_nothing();
	return 0;
}

#endif
