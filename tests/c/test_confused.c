/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer out of its mind: it writes garbage over its own arena, and over what it has mapped of
 * ours, while we go on talking to it.  Statuses may be anything; we must neither crash, nor hang, nor
 * believe a length that exceeds the buffer, and afterwards everything else must work as before.
 */
#include "confused.h"

static bool scribble_here, scribble_there; /* over its own arena; over what it has mapped of ours */

static void scribble_arena(char *arena, struct rn_qp_block *block, uint64_t rq, size_t rq_bytes, uint32_t cq)
{
	switch (rand_r(&seed) % 6) {
	case 0:
		scribble((char *)block, sizeof(*block));
		break;
	case 1:
		scribble((char *)&block->generation_state, 64);
		break;
	case 2:
		scribble((char *)&block->busy, 16);
		break;
	case 3:
		scribble((char *)rn_arena_cq(arena, cq), sizeof(struct rn_cq_block));
		break;
	case 4:
		scribble(arena + rq, rq_bytes);
		break;
	default:
		scribble_keys(arena);
	}
}

static void serve_garbage(int fd)
{
	struct address to;
	struct end end;
	struct rn_qp *qp;
	uint64_t until;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(post_recv(&end, i, 0, 64), 0);
	to = connect_over(&end, fd);
	post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, 64, to.buffer, to.rkey);
	while (poll_one(end.cq).opcode & IBV_WC_RECV)
		;
	qp = (struct rn_qp *)end.qp;
	until = now_ns() + 60000000;
	while (now_ns() < until) {
		if (scribble_here)
			scribble_arena(rn_arena, qp->block, qp->rq_offset, (size_t)qp->rq_size * qp->rq_stride,
				       qp->recv_cq->index);
		if (scribble_there)
			scribble_arena(qp->peer->arena, qp->responder.block, qp->responder.rq - qp->peer->arena,
				       (size_t)(qp->responder.rq_mask + 1) * qp->responder.rq_stride,
				       qp->responder.cq - rn_arena_cq(qp->peer->arena, 0));
		usleep(rand_r(&seed) % 50);
	}
	_exit(0); /* in no state to close anything */
}

static void talk(struct end *a, struct address b)
{
	uint64_t until = now_ns() + 50000000;
	struct ibv_wc wc;

	while (now_ns() < until) {
		post_recv(a, 1, 0, 64);
		post_send(a, 2, 0, 64);
		post_rdma(a, IBV_WR_RDMA_WRITE, 3, 0, 64, b.buffer, b.rkey);
		post_rdma(a, IBV_WR_RDMA_READ, 4, 128, 64, b.buffer, b.rkey);
		for (int i = 0; i < 16 && ibv_poll_cq(a->cq, 1, &wc) == 1; i++)
			CHECK(wc.wr_id != 1 || wc.opcode != IBV_WC_RECV || wc.byte_len <= 64);
		ibv_req_notify_cq(a->cq, 0);
		if (state_of(a->qp) == IBV_QPS_ERR)
			break;
	}
}

static void garbage(void)
{
	for (int round = 0; round < 20; round++) {
		struct other other;
		struct address b;
		struct end a;

		seed = round + 1;
		other = spawn(serve_garbage);
		end_open(&a, &(struct end_options){0});
		to_init(a.qp);
		for (int i = 0; i < 32; i++)
			CHECK_EQ(post_recv(&a, 1, 0, 64), 0);
		b = connect_over(&a, other.fd);
		talk(&a, b);
		/* Our own tables are as they were. */
		{
			struct ibv_qp_init_attr init = {
				.send_cq = a.cq, .recv_cq = a.cq, .cap = {16, 16, 1, 1, 0}, .qp_type = IBV_QPT_RC};
			struct ibv_cq *cq = ibv_create_cq(a.context, 16, NULL, NULL, 0);
			struct end self = a;

			init.send_cq = init.recv_cq = self.cq = cq;
			self.qp = ibv_create_qp(a.pd, &init);
			connect_to(self.qp, self.qp->qp_num);
			CHECK_EQ(post_rdma(&self, IBV_WR_RDMA_WRITE, 9, 0, 64, (uintptr_t)a.buffer + 4096, a.mr->rkey), 0);
			expect(cq, 9, IBV_WC_SUCCESS);
			CHECK_EQ(ibv_destroy_qp(self.qp), 0);
			CHECK_EQ(ibv_destroy_cq(cq), 0);
		}
		join(&other);
		end_close(&a);
		expect_live_nothing();
	}
}

static void test_garbage_in_its_arena(void)
{
	scribble_here = true;
	scribble_there = false;
	garbage();
}

static void test_garbage_in_ours(void)
{
	scribble_here = false;
	scribble_there = true;
	garbage();
}

int main(void)
{
	RUN(test_garbage_in_its_arena);
	RUN(test_garbage_in_ours);
	return 0;
}
