/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a connection manager sends: the messages that the program's calls cause.  hear.c receives them.
 *
 * Any thread may send one, with rn_cm_lock held: it is appended to the wire's output, and the engine sends it.  The
 * engine takes the same lock, so it is woken when that is released: rn_cm_unlock().  If the engine sleeps, and the
 * socket is connected or can be at once, the thread sends it itself: rn_cm_unlock_and_send().
 */
#include "base/gid.h"
#include "base/guard.h"
#include "cm/wire.h"

#include <sys/eventfd.h>

/* Refuse at once, without waiting for the request: nothing is kept for the connection, not even that long. */
void rn_cm_say_no(int fd, int reason)
{
	struct rn_cm_rej rej = {.reason = htobe16((uint16_t)reason)};

	rn_cm_put_header(RN_CM_REJ, &rej);
	if (send(fd, &rej, sizeof rej, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
		rn_cm_hang_up(fd);
}

enum rn_cm_transport rn_cm_transport_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UC:
		return RN_CM_TRANSPORT_UC;
	case IBV_QPT_XRC_SEND:
	case IBV_QPT_XRC_RECV:
		return RN_CM_TRANSPORT_XRC;
	default:
		return RN_CM_TRANSPORT_RC;
	}
}

int rn_cm_wire_connect(struct rn_cm_id *id, const struct rn_cm_param *param)
{
	struct rn_cm_wire *wire = rn_cm_wire_new(RN_CM_WIRE_CONNECTING);
	struct rn_cm_sidr_req sidr_req = {.private_length = param->private_length};
	struct rn_cm_req req = {
		.qpn = htobe32(id->terms.local_qpn),
		.psn = htobe32(id->terms.local_psn),
		.responder_resources = id->terms.responder_resources,
		.initiator_depth = id->terms.initiator_depth,
		.retry_count = id->terms.retry_count,
		.rnr_retry_count = param->rnr_retry_count,
		.flow_control = param->flow_control,
		.srq = param->srq,
		.private_length = param->private_length,
		.transport = rn_cm_transport_of(id->id.qp_type),
		.ece_vendor = htobe32(id->local_ece.vendor_id),
		.ece_options = htobe32(id->local_ece.options),
	};

	enum rn_cm_message type = rn_cm_is_datagram(id) ? RN_CM_SIDR_REQ : RN_CM_REQ;
	void *request = rn_cm_is_datagram(id) ? (void *)&sidr_req : (void *)&req;
	int error = 0;

	if (!wire)
		return ENOMEM;
	wire->id = id;
	id->wire = wire;
	wire->dst = id->id.route.addr.dst_storage;
	wire->tos = id->tos;
	wire->tos_set = id->tos_set;
	wire->by_name_alone = id->by_name_alone;
	if (!id->by_name) {
		wire->source.fd = id->bound_fd; /* it is the wire's now */
		wire->bound = id->bound_fd >= 0;
		wire->listens_early = id->listens_early;
		id->bound_fd = -1;
	}
	wire->is_datagram = rn_cm_is_datagram(id);
	if (param->private_length)
		memcpy(wire->is_datagram ? sidr_req.private_data : req.private_data, param->private_data,
		       param->private_length);
	if (!rn_cm_secret_is_set())
		rn_cm_wire_append(wire, type, request);
	else if (!rn_cm_secret_begin(wire, type, request))
		error = EIO;
	if (error)
		rn_cm_wire_abandon(wire);
	rn_task_queue(&wire->task);
	return error;
}

void rn_cm_wire_watch_peer(struct rn_cm_wire *wire, uint32_t remote_qpn)
{
	if (rn_gid_is_ours(&wire->id->id.route.addr.addr.ibaddr.dgid))
		wire->watch_port = (uint16_t)(remote_qpn >> 8);
}

void rn_cm_wire_accept(struct rn_cm_wire *wire, const struct rn_cm_param *param)
{
	const struct rn_cm_terms *terms = &wire->id->terms;
	struct rn_cm_rep rep = {
		.qpn = htobe32(terms->local_qpn),
		.psn = htobe32(terms->local_psn),
		.responder_resources = terms->responder_resources,
		.initiator_depth = terms->initiator_depth,
		.rnr_retry_count = param->rnr_retry_count,
		.flow_control = param->flow_control,
		.srq = param->srq,
		.private_length = param->private_length,
		.asker_number = htobe16(wire->asker_number),
		.ece_vendor = htobe32(wire->id->local_ece.vendor_id),
		.ece_options = htobe32(wire->id->local_ece.options),
		.mail_channel = htobe32(rn_cm_listener_number(wire)),
	};

	if (param->private_length)
		memcpy(rep.private_data, param->private_data, param->private_length);
	rn_cm_wire_append(wire, RN_CM_REP, &rep);
	wire->phase = RN_CM_WIRE_REP_SENT;
	rn_cm_wire_watch_peer(wire, terms->remote_qpn);
	rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
	rn_task_queue(&wire->task);
}

static void say_sidr(struct rn_cm_wire *wire, struct rn_cm_sidr_rep *rep, const void *private_data, uint8_t length)
{
	rep->private_length = length;
	if (length)
		memcpy(rep->private_data, private_data, length);
	rn_cm_wire_append(wire, RN_CM_SIDR_REP, rep);
	wire->phase = RN_CM_WIRE_CLOSING;
	wire->hangs_up = true;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
}

void rn_cm_wire_accept_datagrams(struct rn_cm_wire *wire, const struct rn_cm_param *param, uint32_t qkey)
{
	struct rn_cm_sidr_rep rep = {
		.qpn = htobe32(wire->id->terms.local_qpn), .qkey = htobe32(qkey), .status = RN_SIDR_SUCCESS};

	say_sidr(wire, &rep, param->private_data, param->private_length);
	rn_task_queue(&wire->task);
}

void rn_cm_wire_say_reject(struct rn_cm_wire *wire, int reason, const void *private_data, uint8_t length)
{
	struct rn_cm_rej rej = {.reason = htobe16((uint16_t)reason), .private_length = length};
	struct rn_cm_sidr_rep sidr_rep = {
		.status = reason == RN_REJ_INVALID_SERVICE_ID ? RN_SIDR_UNSUPPORTED : RN_SIDR_REJECT};

	if (wire->is_datagram) {
		say_sidr(wire, &sidr_rep, private_data, length);
		return;
	}
	if (length)
		memcpy(rej.private_data, private_data, length);
	rn_cm_wire_append(wire, RN_CM_REJ, &rej);
	wire->phase = RN_CM_WIRE_CLOSING;
	wire->hangs_up = true;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
}

void rn_cm_wire_reject(struct rn_cm_wire *wire, int reason, const void *private_data, uint8_t length)
{
	rn_cm_wire_say_reject(wire, reason, private_data, length);
	rn_task_queue(&wire->task);
}

/* A fault may lose the message. Then only what comes by the queue pair says to the peer that we are ready. */
void rn_cm_wire_ready_to_use(struct rn_cm_wire *wire)
{
	if (!rn_fault_call(&rn_context(rn_cm_context())->injector, RN_RTU))
		rn_cm_wire_say(wire, RN_CM_RTU);
	wire->phase = RN_CM_WIRE_ESTABLISHED;
	rn_task_queue(&wire->task);
}

void rn_cm_wire_established(struct rn_cm_wire *wire)
{
	wire->phase = RN_CM_WIRE_ESTABLISHED;
	rn_timer_set(&wire->timer, UINT64_MAX);
	if (!wire->id)
		return;
	wire->id->was_connected = true;
	rn_cm_tell(wire->id, RDMA_CM_EVENT_ESTABLISHED, 0);
	if (wire->ends)
		rn_cm_wire_disconnect(wire);
}

/* Its task looks again: it is a stranger's no more, and may be handed over. */
void rn_cm_wire_notified(struct rn_cm_wire *wire)
{
	rn_cm_wire_established(wire);
	rn_task_queue(&wire->task);
}

void rn_cm_wire_disconnect(struct rn_cm_wire *wire)
{
	rn_cm_wire_say(wire, RN_CM_DREQ);
	wire->phase = RN_CM_WIRE_DREQ_SENT;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
	rn_task_queue(&wire->task);
}

bool rn_cm_wire_disconnect_accepted(struct rn_cm_wire *wire)
{
	if (wire->phase == RN_CM_WIRE_REP_SENT)
		wire->ends = true;
	return wire->ends;
}

void rn_cm_wire_disconnect_qp(const struct ibv_qp *qp)
{
	for (struct rn_list *at = rn_cm_wires.next; at != &rn_cm_wires; at = at->next) {
		struct rn_cm_wire *wire = RN_OWNER(at, struct rn_cm_wire, link);

		if (wire->id && wire->id->id.qp == qp && wire->phase == RN_CM_WIRE_ESTABLISHED)
			rn_cm_wire_disconnect(wire);
	}
}

/* Could the program have another one now? */
static bool has_descriptors(void)
{
	int fd = rn_fd_own(eventfd(0, EFD_CLOEXEC));
	bool none = fd < 0 && (errno == EMFILE || errno == ENFILE);

	rn_fd_close(fd);
	return !none;
}

void rn_cm_wire_abandon(struct rn_cm_wire *wire)
{
	wire->id->wire = NULL;
	wire->id = NULL;
	switch (wire->phase) {
	case RN_CM_WIRE_CONNECTING:
	case RN_CM_WIRE_HELLO_SENT:
	case RN_CM_WIRE_TIMEWAIT:
		wire->over = true; /* freed by its task */
		break;
	case RN_CM_WIRE_REQ_SENT:
		if (wire->is_datagram)
			wire->over = true; /* a question is not withdrawn */
		else
			rn_cm_wire_say_reject(wire, RN_REJ_TIMEOUT, NULL, 0);
		break;
	case RN_CM_WIRE_REQ_RECEIVED:
		rn_cm_wire_say_reject(wire, has_descriptors() ? RN_REJ_CONSUMER_DEFINED : RN_REJ_NO_RESOURCES, NULL, 0);
		break;
	case RN_CM_WIRE_REP_SENT:
	case RN_CM_WIRE_REP_RECEIVED:
		rn_cm_wire_say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		break;
	case RN_CM_WIRE_ESTABLISHED:
		rn_cm_wire_say(wire, RN_CM_DREQ);
		wire->phase = RN_CM_WIRE_DREQ_SENT;
		rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
		wire->hangs_up = true;
		break;
	case RN_CM_WIRE_DREQ_SENT:
		wire->hangs_up = true; /* nobody waits for the answer any more */
		break;
	case RN_CM_WIRE_ACCEPTED:
	case RN_CM_WIRE_CHALLENGED:
	case RN_CM_WIRE_PROVEN:
	case RN_CM_WIRE_CLOSING:
		break;
	}
	rn_task_queue(&wire->task);
}
