/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queue pair of an identifier.
 *
 * rdma_create_qp makes it in INIT, so that receives can be posted before anything can arrive; the calls that settle
 * the connection take it to RTS, with what both sides agreed on.  One for datagrams is in RTS when it is made.  A
 * program that makes its own queue pair gets the same attributes from rdma_init_qp_attr.
 *
 * An identifier of XRC's receiving side has a target, which has no completion queue, and an SRQ, which has one;
 * both are of the connection manager's own domain, if the program names none.
 */
#include "base/gid.h"
#include "cm/cm.h"

#include <stdlib.h>
#include <sys/random.h>

enum {
	/* 4.096 us * 2^18 is about a second, as the kernel takes for RoCE. */
	ACK_TIMEOUT = 18,
	/* 0.64 ms. The kernel's connection manager leaves 0 there, which stands for 655 ms. */
	MIN_RNR_TIMER = 12,
	HOP_LIMIT = 1,
};

bool rn_cm_path_to(const struct rn_cm_id *id, const union ibv_gid *gid, struct ibv_ah_attr *attr)
{
	int gid_index = rn_gid_index_of(&id->id.route.addr.src_addr);

	*attr = (struct ibv_ah_attr){
		.is_global = 1,
		.port_num = id->id.port_num,
		.grh = {.dgid = *gid,
			.sgid_index = (uint8_t)gid_index,
			.hop_limit = HOP_LIMIT,
			.traffic_class = id->tos},
	};
	return gid_index >= 0;
}

uint32_t rn_cm_random_psn(void)
{
	uint32_t psn = 0;

	if (getrandom(&psn, sizeof psn, GRND_NONBLOCK) < 0)
		psn = (uint32_t)rn_now_ns();
	return psn & 0xffffff;
}

/* Datagrams need no peer: they go on to RTS at once. */
static int init_datagram_attr(const struct rn_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		*mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
		attr->pkey_index = 0;
		attr->port_num = id->id.port_num;
		attr->qkey = id->qkey;
		return 0;
	case IBV_QPS_RTR:
		*mask = IBV_QP_STATE;
		return 0;
	case IBV_QPS_RTS:
		*mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
		attr->sq_psn = 0;
		return 0;
	default:
		return rn_cm_error(EINVAL);
	}
}

RN_EXPORT int rdma_init_qp_attr(struct rdma_cm_id *rdma_id, struct ibv_qp_attr *attr, int *mask)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	const struct rn_cm_terms *terms = &id->terms;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (rn_cm_is_datagram(id))
		return init_datagram_attr(id, attr, mask);
	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		*mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
		attr->pkey_index = 0;
		attr->port_num = rdma_id->port_num;
		attr->qp_access_flags = 0;
		if (id->state == RN_CM_CONNECTION) {
			attr->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
			if (terms->responder_resources)
				attr->qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
		}
		return 0;
	case IBV_QPS_RTR:
		if (!rn_cm_path_to(id, &rdma_id->route.addr.addr.ibaddr.dgid, &attr->ah_attr))
			return rn_cm_error(EADDRNOTAVAIL);
		*mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		attr->path_mtu = IBV_MTU_4096;
		attr->dest_qp_num = terms->remote_qpn;
		attr->rq_psn = terms->remote_psn;
		attr->max_dest_rd_atomic = terms->responder_resources;
		attr->min_rnr_timer = MIN_RNR_TIMER;
		return 0;
	case IBV_QPS_RTS:
		*mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			IBV_QP_MAX_QP_RD_ATOMIC;
		attr->timeout = id->ack_timeout_set ? id->ack_timeout : ACK_TIMEOUT;
		attr->retry_cnt = terms->retry_count;
		attr->rnr_retry = terms->rnr_retry_count;
		attr->sq_psn = terms->local_psn;
		attr->max_rd_atomic = terms->initiator_depth;
		return 0;
	default:
		return rn_cm_error(EINVAL);
	}
}

static int transition(struct rn_cm_id *id, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	int mask;

	if (rdma_init_qp_attr(&id->id, &attr, &mask))
		return errno;
	return ibv_modify_qp(id->id.qp, &attr, mask);
}

int rn_cm_qp_connect(struct rn_cm_id *id)
{
	static const enum ibv_qp_state steps[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
	int error = 0;

	if (!id->id.qp)
		return 0;
	for (size_t i = 0; i < sizeof steps / sizeof *steps && !error; i++)
		error = transition(id, steps[i]);
	return error;
}

void rn_cm_qp_fail(struct rn_cm_id *id)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

	if (id->id.qp)
		ibv_modify_qp(id->id.qp, &attr, IBV_QP_STATE);
}

/* --- creation ----------------------------------------------------------------------------------- */

static void destroy_cqs(struct rn_cm_id *id)
{
	struct rdma_cm_id *rdma_id = &id->id;

	if (rdma_id->qp_type == IBV_QPT_XRC_RECV && rdma_id->srq)
		return; /* it belongs to the SRQ */
	if (id->owns_recv_cq) {
		ibv_destroy_cq(rdma_id->recv_cq);
		ibv_destroy_comp_channel(rdma_id->recv_cq_channel);
	}
	if (id->owns_send_cq) {
		ibv_destroy_cq(rdma_id->send_cq);
		ibv_destroy_comp_channel(rdma_id->send_cq_channel);
	}
	rdma_id->recv_cq = rdma_id->send_cq = NULL;
	rdma_id->recv_cq_channel = rdma_id->send_cq_channel = NULL;
	id->owns_recv_cq = id->owns_send_cq = false;
}

static bool make_cq(struct rn_cm_id *id, uint32_t entries, struct ibv_comp_channel **channel, struct ibv_cq **cq)
{
	*channel = ibv_create_comp_channel(id->id.verbs);
	if (!*channel)
		return false;
	*cq = ibv_create_cq(id->id.verbs, entries ? (int)entries : 1, id, *channel, 0);
	if (*cq)
		return true;
	ibv_destroy_comp_channel(*channel);
	*channel = NULL;
	return false;
}

/* A program that gives no completion queues gets one of each, with channels. */
static bool make_cqs(struct rn_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
	struct rdma_cm_id *rdma_id = &id->id;

	if (!attr->send_cq) {
		if (!make_cq(id, attr->cap.max_send_wr, &rdma_id->send_cq_channel, &rdma_id->send_cq))
			return false;
		id->owns_send_cq = true;
		attr->send_cq = rdma_id->send_cq;
	}
	if (!attr->recv_cq) {
		if (!make_cq(id, attr->cap.max_recv_wr, &rdma_id->recv_cq_channel, &rdma_id->recv_cq))
			return false;
		id->owns_recv_cq = true;
		attr->recv_cq = rdma_id->recv_cq;
	}
	return true;
}

static struct ibv_qp *create_target(struct rn_cm_id *id, const struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp_init_attr_ex of_domain = *attr;

	of_domain.srq = NULL; /* each message names its SRQ */
	of_domain.comp_mask &= ~(uint32_t)IBV_QP_INIT_ATTR_PD;
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_XRCD)) {
		of_domain.xrcd = rn_cm_default_xrcd();
		of_domain.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
	}
	return of_domain.xrcd ? ibv_create_qp_ex(id->id.verbs, &of_domain) : NULL;
}

/* The extended attributes begin as the plain ones do, which make a plain queue pair. */
static struct ibv_qp *create(struct rn_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
	if (attr->qp_type == IBV_QPT_XRC_RECV)
		return create_target(id, attr);
	if (!make_cqs(id, attr))
		return NULL;
	if (!attr->srq && attr->qp_type != IBV_QPT_XRC_SEND)
		attr->srq = id->id.srq;
	if (attr->comp_mask == IBV_QP_INIT_ATTR_PD)
		return ibv_create_qp(attr->pd, (struct ibv_qp_init_attr *)attr);
	return ibv_create_qp_ex(id->id.verbs, attr);
}

RN_EXPORT int rdma_create_qp_ex(struct rdma_cm_id *rdma_id, struct ibv_qp_init_attr_ex *attr)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct ibv_qp *qp;
	int error;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!rdma_id->verbs || rdma_id->qp || attr->qp_type != rdma_id->qp_type)
		return rn_cm_error(EINVAL);
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD)) {
		attr->pd = rn_cm_default_pd();
		if (!attr->pd)
			return -1;
		attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
	}
	if (attr->pd->context != rdma_id->verbs || (attr->srq && attr->srq->context != rdma_id->verbs))
		return rn_cm_error(EINVAL);
	qp = create(id, attr);
	if (!qp) {
		error = errno;
		goto no_qp;
	}
	rdma_id->qp = qp;
	error = rn_cm_is_datagram(id) ? rn_cm_qp_connect(id) : transition(id, IBV_QPS_INIT);
	if (error)
		goto no_init;
	rdma_id->pd = attr->pd;
	return 0;

no_init:
	rdma_id->qp = NULL;
	ibv_destroy_qp(qp);
no_qp:
	destroy_cqs(id);
	return rn_cm_error(error);
}

RN_EXPORT int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex attr_ex = {
		.qp_context = attr->qp_context,
		.send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq,
		.srq = attr->srq,
		.cap = attr->cap,
		.qp_type = attr->qp_type,
		.sq_sig_all = attr->sq_sig_all,
		.comp_mask = pd ? IBV_QP_INIT_ATTR_PD : 0,
		.pd = pd,
	};

	if (rdma_create_qp_ex(id, &attr_ex))
		return -1;
	attr->cap = attr_ex.cap; /* what was granted */
	return 0;
}

RN_EXPORT void rdma_destroy_qp(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch() || !rdma_id->qp)
		return;
	ibv_destroy_qp(rdma_id->qp);
	rdma_id->qp = NULL;
	destroy_cqs(id);
}

/* --- shared receive queues ------------------------------------------------------------------------ */

/* Add what an XRC identifier needs and the program has left out. */
static int give_domain(struct rn_cm_id *id, struct ibv_srq_init_attr_ex *attr)
{
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD)) {
		attr->xrcd = rn_cm_default_xrcd();
		if (!attr->xrcd)
			return -1;
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
	}
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ)) {
		if (!id->owns_recv_cq && !make_cq(id, attr->attr.max_wr, &id->id.recv_cq_channel, &id->id.recv_cq))
			return -1;
		id->owns_recv_cq = true;
		attr->cq = id->id.recv_cq;
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
	}
	return 0;
}

RN_EXPORT int rdma_create_srq_ex(struct rdma_cm_id *rdma_id, struct ibv_srq_init_attr_ex *attr)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	bool has_cqs = id->owns_recv_cq;
	struct ibv_srq *srq;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!rdma_id->verbs || rdma_id->srq)
		return rn_cm_error(EINVAL);
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD)) {
		attr->pd = rdma_id->pd ? rdma_id->pd : rn_cm_default_pd();
		if (!attr->pd)
			return -1;
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
	}
	if (attr->pd->context != rdma_id->verbs)
		return rn_cm_error(EINVAL);
	if (attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE && attr->srq_type == IBV_SRQT_XRC && give_domain(id, attr))
		return -1;
	srq = ibv_create_srq_ex(rdma_id->verbs, attr);
	if (!srq) {
		int error = errno;

		if (!has_cqs)
			destroy_cqs(id);
		return rn_cm_error(error);
	}
	if (!rdma_id->pd)
		rdma_id->pd = attr->pd;
	rdma_id->srq = srq;
	return 0;
}

RN_EXPORT int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex attr_ex = {
		.srq_context = attr->srq_context,
		.attr = attr->attr,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | (pd ? IBV_SRQ_INIT_ATTR_PD : 0),
		.srq_type = id->qp_type == IBV_QPT_XRC_RECV ? IBV_SRQT_XRC : IBV_SRQT_BASIC,
		.pd = pd,
	};

	if (rdma_create_srq_ex(id, &attr_ex))
		return -1;
	attr->attr = attr_ex.attr; /* what was granted */
	return 0;
}

RN_EXPORT void rdma_destroy_srq(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch() || !rdma_id->srq)
		return;
	ibv_destroy_srq(rdma_id->srq);
	rdma_id->srq = NULL;
	if (!rdma_id->qp)
		destroy_cqs(id); /* those of an XRC target, which the SRQ has kept */
}

/* --- vendors' options: for queue pairs that the program makes itself ------------------------------- */

RN_EXPORT int rdma_set_local_ece(struct rdma_cm_id *rdma_id, struct ibv_ece *ece)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (rdma_id->qp || !ece || !ece->vendor_id || ece->comp_mask)
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	id->local_ece = *ece;
	pthread_mutex_unlock(&rn_cm_lock);
	return 0;
}

RN_EXPORT int rdma_get_remote_ece(struct rdma_cm_id *rdma_id, struct ibv_ece *ece)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (rdma_id->qp || !ece)
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	*ece = id->remote_ece;
	pthread_mutex_unlock(&rn_cm_lock);
	return 0;
}
