/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that only its owner can touch: asking the owner's engine.
 *
 * The kernel may refuse process_vm_* (Yama, containers), and an atomic on unmapped memory must be
 * done by a CPU that has it.  Then the requester asks the owner's engine, over the link, for at most
 * RN_REMOTE_CHUNK bytes, and leaves the responder. When the answer has come, the requester's engine goes
 * on with the request where it stopped.  Everything else about the
 * work request (checks, the receive's completion, order) stays with the requester, in execute.c, so
 * an answer may come late or never without harm to anybody else. responder/owner.c answers.
 */
#include "requester/requester.h"

/* Take the answer's bytes to where the request wants them. With sq_lock held. */
static enum ibv_wc_status take_answer(struct rn_qp *qp, struct rn_send *head, const struct rn_remote_answer *answer,
				      size_t length)
{
	struct rn_piece pieces[RN_MAX_SGE];
	enum ibv_wc_status status;
	uint64_t total;
	int count;

	if (rn_fetches(head->wr.opcode)) {
		if (answer->length != qp->reply_length || length - sizeof(*answer) < answer->length)
			return IBV_WC_BAD_RESP_ERR;
		status = rn_local_pieces(qp, &head->wr, pieces, &count, &total);
		if (status != IBV_WC_SUCCESS)
			return status;
		if (!rn_scatter(pieces, count, head->moved, answer->data, answer->length))
			return IBV_WC_LOC_PROT_ERR;
	}
	head->moved += qp->reply_length;
	qp->waited = false; /* its patience is for each piece anew */
	qp->count.bytes_engine += qp->reply_length;
	return IBV_WC_SUCCESS;
}

static void answered(struct rn_reply *reply, const void *data, long length)
{
	struct rn_qp *qp = container_of(reply, struct rn_qp, reply);
	const struct rn_remote_answer *answer = data;

	rn_lock(&qp->sq_lock);
	qp->reply_pending = false;
	/* The queue may have been flushed meanwhile. */
	if (qp->sq_executed != qp->sq_posted && qp->reply_for == qp->sq_executed) {
		struct rn_send *head = (struct rn_send *)(qp->sq + (uint64_t)(qp->sq_executed & qp->sq_mask) * qp->sq_stride);
		enum ibv_wc_status status = IBV_WC_SUCCESS;

		if (length < (long)sizeof(*answer))
			; /* died, or makes no sense: the retry budget runs, and news of a death come anyway */
		else if (!answer->error)
			status = take_answer(qp, head, answer, length);
		else if (answer->error != ENOTCONN)
			qp->reply_error = answer->error;
		if (status != IBV_WC_SUCCESS)
			rn_sq_fail_head(qp, status);
	}
	rn_unlock(&qp->sq_lock);
	rn_qp_progress(qp);
}

int rn_remote_start(struct rn_qp *qp, const struct rn_remote *request, const void *data)
{
	struct {
		struct rn_remote request;
		char data[RN_REMOTE_CHUNK];
	} message; /* 32 KiB: only what is used is written */
	size_t length = sizeof(*request);
	const void *lost;
	int err;

	message.request = *request;
	message.request.source_qpn = qp->ex.qp_base.qp_num;
	message.request.dest_qpn = qp->attr.dest_qp_num;
	message.request.generation = qp->responder.generation;
	if (request->kind == RN_REMOTE_WRITE) {
		if (!rn_bus_copy(message.data, data, request->length, &lost))
			return EFAULT;
		length += request->length;
	}
	qp->reply.done = answered;
	qp->reply_length = request->length;
	qp->reply_for = qp->sq_executed;
	qp->reply_pending = true;
	err = -rn_peer_request(qp->peer, &message, length, &qp->reply);
	if (err)
		qp->reply_pending = false;
	return err;
}
