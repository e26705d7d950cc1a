/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extended queue pairs: work requests built by one call after another.
 *
 *     wr_start    no other thread builds on this queue pair from here on
 *     wr_send...  begins a request, with the wr_id and wr_flags that stand in the queue pair
 *     wr_set_...  gives the request begun last its data, or its address
 *     wr_complete posts all of them, or none, and says why
 *     wr_abort    forgets them
 *
 * Setters return nothing, so the first thing that is wrong is kept until wr_complete.  The requests
 * are built in memory of their own: not in the send queue's ring, whose lock would be held while the
 * program does what it likes in between (deregister memory, say, which waits for that very lock).
 * Then post.c posts them as an ordinary chain.
 *
 * As in hardware a queue pair has exactly the operations that it was created for; another is a call
 * of NULL.  That is why unknown bits are refused: a program asks for what it is going to call.
 */
#include <stdlib.h>

#include "requester/requester.h"

struct built {
	struct ibv_send_wr wr;
	alignas(8) char data[]; /* its scatter list, or one entry and the inline data */
};

struct rn_builder {
	struct rn_lock lock; /* from start to complete or abort */
	int error;           /* the first: nothing will be posted */
	uint32_t count, room, stride;
	struct built *last; /* begun last */
	alignas(8) char requests[]; /* struct built[room + 1]: one to spare, for requests that are too many */
};

static struct rn_qp *of(struct ibv_qp_ex *ex)
{
	return container_of(ex, struct rn_qp, ex);
}

static struct built *request_at(struct rn_builder *builder, uint32_t index)
{
	return (struct built *)(builder->requests + (size_t)index * builder->stride);
}

static void refuse(struct rn_builder *builder, int err)
{
	if (!builder->error)
		builder->error = err;
}

/* --- requests ------------------------------------------------------------------------------------------- */

static struct ibv_send_wr *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
	struct rn_builder *builder = of(ex)->builder;
	struct built *next = request_at(builder, builder->count);

	if (builder->count == builder->room)
		refuse(builder, ENOMEM);
	else if (builder->count++)
		builder->last->wr.next = &next->wr;
	next->wr = (struct ibv_send_wr){
		.wr_id = ex->wr_id,
		.opcode = opcode,
		/* Inline is what the setter makes it. */
		.send_flags = ex->wr_flags & ~(unsigned)IBV_SEND_INLINE,
	};
	builder->last = next;
	return &next->wr;
}

static struct ibv_send_wr *begin_rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr)
{
	struct ibv_send_wr *wr = begin(ex, opcode);

	wr->wr.rdma.rkey = rkey;
	wr->wr.rdma.remote_addr = addr;
	return wr;
}

static struct ibv_send_wr *begin_atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr)
{
	struct ibv_send_wr *wr = begin(ex, opcode);

	wr->wr.atomic.rkey = rkey;
	wr->wr.atomic.remote_addr = addr;
	return wr;
}

static void wr_send(struct ibv_qp_ex *ex)
{
	begin(ex, IBV_WR_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm_data)
{
	begin(ex, IBV_WR_SEND_WITH_IMM)->imm_data = imm_data;
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	begin_rdma(ex, IBV_WR_RDMA_WRITE, rkey, addr);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm_data)
{
	begin_rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr)->imm_data = imm_data;
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	begin_rdma(ex, IBV_WR_RDMA_READ, rkey, addr);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	struct ibv_send_wr *wr = begin_atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr);

	wr->wr.atomic.compare_add = compare;
	wr->wr.atomic.swap = swap;
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t add)
{
	begin_atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr)->wr.atomic.compare_add = add;
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	begin(ex, IBV_WR_SEND_WITH_INV)->invalidate_rkey = rkey;
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	begin(ex, IBV_WR_LOCAL_INV)->invalidate_rkey = rkey;
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct ibv_send_wr *wr = begin(ex, IBV_WR_BIND_MW);

	wr->bind_mw.mw = mw;
	wr->bind_mw.rkey = rkey;
	wr->bind_mw.bind_info = *info;
}

/* --- their data ------------------------------------------------------------------------------------------ */

/* Setting data of no request is a mistake that hardware would not survive; we do. */
static struct built *current(struct rn_builder *builder)
{
	if (builder->last)
		return builder->last;
	refuse(builder, EINVAL);
	return request_at(builder, builder->room);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t num_sge, const struct ibv_sge *list)
{
	struct rn_qp *qp = of(ex);
	struct built *request = current(qp->builder);

	if (num_sge > qp->cap.max_send_sge) {
		refuse(qp->builder, EINVAL);
		return;
	}
	if (num_sge)
		memcpy(request->data, list, num_sge * sizeof(*list));
	request->wr.sg_list = (struct ibv_sge *)request->data;
	request->wr.num_sge = num_sge;
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct ibv_send_wr *wr = &current(of(ex)->builder)->wr;

	wr->wr.ud.ah = ah;
	wr->wr.ud.remote_qpn = qpn;
	wr->wr.ud.remote_qkey = qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t srqn)
{
	current(of(ex)->builder)->wr.qp_type.xrc.remote_srqn = srqn;
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};

	wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t num_buf, const struct ibv_data_buf *list)
{
	struct rn_qp *qp = of(ex);
	struct built *request = current(qp->builder);
	struct ibv_sge *sge = (struct ibv_sge *)request->data;
	char *data = (char *)(sge + 1);
	const void *lost;
	size_t length = 0;

	for (size_t i = 0; i < num_buf; i++) {
		if (list[i].length > qp->cap.max_inline_data - length) {
			refuse(qp->builder, EINVAL);
			return;
		}
		if (list[i].length && !rn_bus_copy(data + length, list[i].addr, list[i].length, &lost)) {
			wr_set_sge(ex, 0, 0, 1); /* no key: it fails in its turn */
			return;
		}
		length += list[i].length;
	}
	*sge = (struct ibv_sge){.addr = (uintptr_t)data, .length = length};
	request->wr.sg_list = sge;
	request->wr.num_sge = 1;
	request->wr.send_flags |= IBV_SEND_INLINE;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	struct ibv_data_buf one = {.addr = addr, .length = length};

	wr_set_inline_data_list(ex, 1, &one);
}

/* --- the chain --------------------------------------------------------------------------------------------- */

static void wr_start(struct ibv_qp_ex *ex)
{
	struct rn_builder *builder = of(ex)->builder;

	rn_lock(&builder->lock);
	builder->count = 0;
	builder->error = 0;
	builder->last = NULL;
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct rn_qp *qp = of(ex);
	struct rn_builder *builder = qp->builder;
	int err = builder->error;

	if (!err && builder->count)
		err = rn_post_chain(qp, &request_at(builder, 0)->wr, builder->count);
	rn_unlock(&builder->lock);
	return err;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	rn_unlock(&of(ex)->builder->lock);
}

/* --- creating ---------------------------------------------------------------------------------------------- */

enum {
	OPS_UD = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
	OPS_UC = OPS_UD | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
		 IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW,
	OPS_RC = OPS_UC | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
		 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
};

static uint64_t operations_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_RC:
	case IBV_QPT_XRC_SEND:
		return OPS_RC;
	case IBV_QPT_UC:
		return OPS_UC;
	case IBV_QPT_UD:
		return OPS_UD;
	default:
		return 0;
	}
}

static void fill_in(struct ibv_qp_ex *ex, uint64_t operations)
{
	if (operations & IBV_QP_EX_WITH_SEND)
		ex->wr_send = wr_send;
	if (operations & IBV_QP_EX_WITH_SEND_WITH_IMM)
		ex->wr_send_imm = wr_send_imm;
	if (operations & IBV_QP_EX_WITH_RDMA_WRITE)
		ex->wr_rdma_write = wr_rdma_write;
	if (operations & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
		ex->wr_rdma_write_imm = wr_rdma_write_imm;
	if (operations & IBV_QP_EX_WITH_RDMA_READ)
		ex->wr_rdma_read = wr_rdma_read;
	if (operations & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP)
		ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	if (operations & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
		ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
	if (operations & IBV_QP_EX_WITH_SEND_WITH_INV)
		ex->wr_send_inv = wr_send_inv;
	if (operations & IBV_QP_EX_WITH_LOCAL_INV)
		ex->wr_local_inv = wr_local_inv;
	if (operations & IBV_QP_EX_WITH_BIND_MW)
		ex->wr_bind_mw = wr_bind_mw;
	if (ex->qp_base.qp_type == IBV_QPT_UD)
		ex->wr_set_ud_addr = wr_set_ud_addr;
	if (ex->qp_base.qp_type == IBV_QPT_XRC_SEND)
		ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
}

static struct rn_builder *make_builder(const struct ibv_qp_cap *cap)
{
	size_t data = sizeof(struct ibv_sge) * cap->max_send_sge, stride;
	struct rn_builder *builder;

	if (data < sizeof(struct ibv_sge) + cap->max_inline_data)
		data = sizeof(struct ibv_sge) + cap->max_inline_data;
	stride = (sizeof(struct built) + data + 7) & ~(size_t)7;
	builder = calloc(1, sizeof(*builder) + stride * (cap->max_send_wr + 1));
	if (builder) {
		builder->room = cap->max_send_wr;
		builder->stride = stride;
	}
	return builder;
}

struct ibv_qp *rn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *init)
{
	bool is_target = init->qp_type == IBV_QPT_XRC_RECV;
	uint32_t home = is_target ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD;
	uint32_t known = home | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	uint64_t operations = init->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? init->send_ops_flags : 0;
	struct rn_qp *qp;

	errno = init->comp_mask & ~known                                               ? EOPNOTSUPP
		: init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && init->create_flags ? EOPNOTSUPP
		: operations & ~operations_of(init->qp_type)                            ? EOPNOTSUPP
		: !(init->comp_mask & home)                                             ? EINVAL
		: (is_target ? init->xrcd->context : init->pd->context) != context      ? EINVAL
											   : 0;
	if (errno)
		return NULL;
	qp = rn_qp_create(init);
	if (!qp || !(init->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS))
		return qp ? &qp->ex.qp_base : NULL;
	qp->builder = make_builder(&qp->cap);
	if (!qp->builder) {
		ibv_destroy_qp(&qp->ex.qp_base);
		errno = ENOMEM;
		return NULL;
	}
	fill_in(&qp->ex, operations);
	return &qp->ex.qp_base;
}

RN_EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return rn_qp(qp)->builder ? &rn_qp(qp)->ex : NULL;
}
