/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between connection managers: what the program's calls say, and what becomes of what is
 * heard.  A message that comes out of turn, or says what cannot be, ends the wire.
 */
#define _GNU_SOURCE
#include "cm_wire.h"

#include "gid.h"
#include "guard.h"

#include <stdlib.h>

/* --- what the program asks for: any thread, rn_cm_lock held ------------------------------------- */

static void put_header(enum message_type type, void *message)
{
	struct header *header = message;

	*header = (struct header){htobe32(MAGIC), VERSION, (uint8_t)type, htobe16(rn_cm_message_length[type])};
}

void rn_cm_wire_append(struct rn_wire *wire, enum message_type type, void *message)
{
	unsigned length = rn_cm_message_length[type];

	if (wire->out_length + length > sizeof wire->out)
		return; /* the peer has not read for a whole conversation */
	put_header(type, message);
	memcpy(wire->out + wire->out_length, message, length);
	wire->out_length += length;
}

static void say(struct rn_wire *wire, enum message_type type)
{
	struct header header;

	rn_cm_wire_append(wire, type, &header);
}

void rn_cm_wire_say_wait(struct rn_wire *wire)
{
	say(wire, MRA);
}

/* At once, and without waiting for what he wants: nothing is kept for him, not even until he has spoken. */
void rn_cm_say_no(int fd, int reason)
{
	struct rej rej = {.reason = htobe16((uint16_t)reason)};

	put_header(REJ, &rej);
	if (send(fd, &rej, sizeof rej, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
		rn_cm_hang_up(fd);
}

/* Both halves of XRC are of one kind: who sends is answered by who receives. */
static enum transport transport_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UC:
		return TRANSPORT_UC;
	case IBV_QPT_XRC_SEND:
	case IBV_QPT_XRC_RECV:
		return TRANSPORT_XRC;
	default:
		return TRANSPORT_RC;
	}
}

int rn_wire_connect(struct rn_cm_id *id, const struct rn_cm_param *param)
{
	struct rn_wire *wire = rn_cm_wire_new(RN_WIRE_CONNECTING);
	struct sidr_req sidr_req = {.private_length = param->private_length};
	struct req req = {
		.qpn = htobe32(id->terms.local_qpn),
		.psn = htobe32(id->terms.local_psn),
		.responder_resources = id->terms.responder_resources,
		.initiator_depth = id->terms.initiator_depth,
		.retry_count = id->terms.retry_count,
		.rnr_retry_count = param->rnr_retry_count,
		.flow_control = param->flow_control,
		.srq = param->srq,
		.private_length = param->private_length,
		.transport = transport_of(id->id.qp_type),
		.ece_vendor = htobe32(id->local_ece.vendor_id),
		.ece_options = htobe32(id->local_ece.options),
	};

	enum message_type type = rn_cm_is_datagram(id) ? SIDR_REQ : REQ;
	void *request = rn_cm_is_datagram(id) ? (void *)&sidr_req : (void *)&req;
	int error = 0;

	if (!wire)
		return ENOMEM;
	wire->id = id;
	id->wire = wire;
	wire->dst = id->id.route.addr.dst_storage;
	wire->tos = id->tos;
	wire->tos_set = id->tos_set;
	if (!id->by_name) {
		wire->source.fd = id->bound_fd; /* it is the wire's now */
		wire->bound = id->bound_fd >= 0;
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
		rn_wire_abandon(wire);
	rn_task_post(&wire->task);
	return error;
}

/* Of a process on this host the death is seen even if a child of it has the socket open. Which one it is the peer says:
 * by a wrong number it ends its own connection only. Nothing is done about it before the program has accepted. */
static void watch_peer(struct rn_wire *wire, uint32_t remote_qpn)
{
	if (rn_gid_is_ours(&wire->id->id.route.addr.addr.ibaddr.dgid))
		wire->watch_port = (uint16_t)(remote_qpn >> 8);
}

void rn_wire_accept(struct rn_wire *wire, const struct rn_cm_param *param)
{
	const struct rn_cm_terms *terms = &wire->id->terms;
	struct rep rep = {
		.qpn = htobe32(terms->local_qpn),
		.psn = htobe32(terms->local_psn),
		.responder_resources = terms->responder_resources,
		.initiator_depth = terms->initiator_depth,
		.rnr_retry_count = param->rnr_retry_count,
		.flow_control = param->flow_control,
		.srq = param->srq,
		.private_length = param->private_length,
		.ece_vendor = htobe32(wire->id->local_ece.vendor_id),
		.ece_options = htobe32(wire->id->local_ece.options),
	};

	if (param->private_length)
		memcpy(rep.private_data, param->private_data, param->private_length);
	rn_cm_wire_append(wire, REP, &rep);
	wire->phase = RN_WIRE_REP_SENT;
	watch_peer(wire, terms->remote_qpn);
	rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
	rn_task_post(&wire->task);
}

static void say_sidr(struct rn_wire *wire, struct sidr_rep *rep, const void *private_data, uint8_t length)
{
	rep->private_length = length;
	if (length)
		memcpy(rep->private_data, private_data, length);
	rn_cm_wire_append(wire, SIDR_REP, rep);
	wire->phase = RN_WIRE_CLOSING;
	wire->hangs_up = true;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
}

void rn_wire_accept_datagrams(struct rn_wire *wire, const struct rn_cm_param *param, uint32_t qkey)
{
	struct sidr_rep rep = {
		.qpn = htobe32(wire->id->terms.local_qpn), .qkey = htobe32(qkey), .status = RN_SIDR_SUCCESS};

	say_sidr(wire, &rep, param->private_data, param->private_length);
	rn_task_post(&wire->task);
}

static void say_reject(struct rn_wire *wire, int reason, const void *private_data, uint8_t length)
{
	struct rej rej = {.reason = htobe16((uint16_t)reason), .private_length = length};
	struct sidr_rep sidr_rep = {
		.status = reason == RN_REJ_INVALID_SERVICE_ID ? RN_SIDR_UNSUPPORTED : RN_SIDR_REJECT};

	if (wire->is_datagram) {
		say_sidr(wire, &sidr_rep, private_data, length);
		return;
	}
	if (length)
		memcpy(rej.private_data, private_data, length);
	rn_cm_wire_append(wire, REJ, &rej);
	wire->phase = RN_WIRE_CLOSING;
	wire->hangs_up = true;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
}

void rn_wire_reject(struct rn_wire *wire, int reason, const void *private_data, uint8_t length)
{
	say_reject(wire, reason, private_data, length);
	rn_task_post(&wire->task);
}

void rn_wire_ready_to_use(struct rn_wire *wire)
{
	say(wire, RTU);
	wire->phase = RN_WIRE_ESTABLISHED;
	rn_task_post(&wire->task);
}

static void established(struct rn_wire *wire)
{
	wire->phase = RN_WIRE_ESTABLISHED;
	rn_timer_set(&wire->timer, UINT64_MAX);
	if (!wire->id)
		return;
	wire->id->was_connected = true;
	rn_cm_tell(wire->id, RDMA_CM_EVENT_ESTABLISHED, 0);
	if (wire->ends)
		rn_wire_disconnect(wire);
}

void rn_wire_force_established(struct rn_wire *wire)
{
	established(wire);
}

void rn_wire_disconnect(struct rn_wire *wire)
{
	say(wire, DREQ);
	wire->phase = RN_WIRE_DREQ_SENT;
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
	rn_task_post(&wire->task);
}

bool rn_wire_disconnect_accepted(struct rn_wire *wire)
{
	if (wire->phase == RN_WIRE_REP_SENT)
		wire->ends = true;
	return wire->ends;
}

void rn_wire_disconnect_qp(const struct ibv_qp *qp)
{
	for (struct rn_list *at = rn_cm_wires.next; at != &rn_cm_wires; at = at->next) {
		struct rn_wire *wire = RN_OWNER(at, struct rn_wire, link);

		if (wire->id && wire->id->id.qp == qp && wire->phase == RN_WIRE_ESTABLISHED)
			rn_wire_disconnect(wire);
	}
}

void rn_wire_abandon(struct rn_wire *wire)
{
	wire->id->wire = NULL;
	wire->id = NULL;
	switch (wire->phase) {
	case RN_WIRE_CONNECTING:
	case RN_WIRE_HELLO_SENT:
	case RN_WIRE_TIMEWAIT:
		wire->over = true; /* swept by its task */
		break;
	case RN_WIRE_REQ_SENT:
		if (wire->is_datagram)
			wire->over = true; /* nobody takes back a question */
		else
			say_reject(wire, RN_REJ_TIMEOUT, NULL, 0);
		break;
	case RN_WIRE_REQ_RECEIVED:
		say_reject(wire, rn_cm_has_descriptors() ? RN_REJ_CONSUMER_DEFINED : RN_REJ_NO_RESOURCES, NULL, 0);
		break;
	case RN_WIRE_REP_SENT:
	case RN_WIRE_REP_RECEIVED:
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		break;
	case RN_WIRE_ESTABLISHED:
		say(wire, DREQ);
		wire->phase = RN_WIRE_DREQ_SENT;
		rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
		break;
	case RN_WIRE_ACCEPTED:
	case RN_WIRE_CHALLENGED:
	case RN_WIRE_PROVEN:
	case RN_WIRE_DREQ_SENT:
	case RN_WIRE_CLOSING:
		break;
	}
	rn_task_post(&wire->task);
}

/* --- messages: engine, rn_cm_lock held ----------------------------------------------------------- */

/* Of a request that was heard: the identifier it makes, and the event that brings it. NULL: it was
 * refused. */
static struct rn_cm_event *bear(struct rn_wire *wire, bool is_datagram, uint8_t transport)
{
	enum { WAIT_MS = 1000 };
	struct rn_cm_id *listener = wire->listener, *id;
	uint64_t wait_ms = rn_settings.silence_ms / 4;
	struct rn_cm_event *event;

	wire->phase = RN_WIRE_REQ_RECEIVED;
	wire->is_datagram = is_datagram;
	wire->listener = NULL;
	rn_cm_wire_set_timer_ms(wire, wait_ms < WAIT_MS ? wait_ms : WAIT_MS);
	if (!listener) {
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return NULL;
	}
	if (rn_cm_is_datagram(listener) != is_datagram) {
		say_reject(wire, RN_REJ_INVALID_SERVICE_ID, NULL, 0);
		return NULL;
	}
	if (!is_datagram && transport != transport_of(listener->id.qp_type)) {
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0); /* as the kernel does */
		return NULL;
	}
	id = rn_cm_id_new(listener->id.channel, listener->id.context, listener->id.ps);
	event = id ? rn_cm_event_new(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0) : NULL;
	if (!event) {
		free(id);
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return NULL;
	}
	rn_cm_context_more();
	id->state = RN_CM_CONNECTION;
	id->wire = wire;
	wire->id = id;
	id->id.qp_type = listener->id.qp_type;
	id->id.route.addr.src_storage = wire->near;
	id->id.route.addr.dst_storage = wire->far;
	id->tos = listener->tos;
	id->ack_timeout = listener->ack_timeout;
	id->ack_timeout_set = listener->ack_timeout_set;
	rn_cm_set_route(id);
	id->id.route.path_rec = &id->path;
	id->id.route.num_paths = 1;
	event->counted_on = listener;
	event->event.listen_id = &listener->id;
	return event;
}

static void queue_request(struct rn_cm_event *event)
{
	struct rn_cm_id *listener = event->counted_on;

	rn_cm_event_queue(event);
	if (++listener->unread_requests >= listener->backlog && !listener->paused) {
		listener->paused = true; /* the rest waits in TCP's queue */
		rn_source_modify(&listener->accepting, 0);
	}
}

static void on_req(struct rn_wire *wire, const struct req *req)
{
	struct rn_cm_event *event = bear(wire, false, req->transport);
	struct rdma_conn_param *param;
	struct rn_cm_id *id;

	if (!event)
		return;
	id = event->id;
	/* What one side can initiate, the other must have resources for. */
	id->terms = (struct rn_cm_terms){
		.local_psn = rn_cm_random_psn(), /* by now: who makes his own queue pair asks before he accepts */
		.remote_qpn = be32toh(req->qpn),
		.remote_psn = be32toh(req->psn),
		.responder_resources = req->initiator_depth,
		.initiator_depth = req->responder_resources,
		.retry_count = req->retry_count,
		.rnr_retry_count = req->rnr_retry_count,
	};
	if (rn_gid_is_ours(&id->id.route.addr.addr.ibaddr.dgid))
		wire->asker_port = (uint16_t)(id->terms.remote_qpn >> 8);
	id->remote_ece = (struct ibv_ece){.vendor_id = be32toh(req->ece_vendor), .options = be32toh(req->ece_options)};

	param = &event->event.param.conn;
	rn_cm_event_private(event, req->private_data, req->private_length,
			    rn_settings.padded ? sizeof req->private_data : req->private_length);
	param->responder_resources = id->terms.responder_resources;
	param->initiator_depth = id->terms.initiator_depth;
	param->flow_control = req->flow_control;
	param->retry_count = req->retry_count;
	param->rnr_retry_count = req->rnr_retry_count;
	param->srq = req->srq;
	param->qp_num = id->terms.remote_qpn;
	queue_request(event);
}

static void on_sidr_req(struct rn_wire *wire, const struct sidr_req *req)
{
	struct rn_cm_event *event = bear(wire, true, 0);

	if (!event)
		return;
	rn_cm_event_private(event, req->private_data, req->private_length,
			    rn_settings.padded ? sizeof req->private_data : req->private_length);
	queue_request(event);
}

static void on_sidr_rep(struct rn_wire *wire, const struct sidr_rep *rep)
{
	struct rn_cm_id *id = wire->id;
	struct rn_cm_event *event;
	struct rdma_ud_param *param;

	if (rep->status) {
		rn_cm_wire_tell_refused(wire, RDMA_CM_EVENT_UNREACHABLE, rep->status, rep->private_data,
					rep->private_length, sizeof rep->private_data);
	} else if ((event = rn_cm_event_new(id, RDMA_CM_EVENT_ESTABLISHED, 0))) {
		rn_cm_event_private(event, rep->private_data, rep->private_length,
				    rn_settings.padded ? sizeof rep->private_data : rep->private_length);
		param = &event->event.param.ud;
		rn_cm_way_to(id, &id->id.route.addr.addr.ibaddr.dgid, &param->ah_attr);
		param->qp_num = be32toh(rep->qpn);
		param->qkey = be32toh(rep->qkey);
		rn_cm_event_queue(event);
	}
	rn_cm_wire_finish(wire);
}

static void on_rep(struct rn_wire *wire, const struct rep *rep)
{
	struct rn_cm_terms *terms = &wire->id->terms;
	struct rn_cm_event *event;
	struct rdma_conn_param *param;

	terms->remote_qpn = be32toh(rep->qpn);
	terms->remote_psn = be32toh(rep->psn);
	terms->responder_resources = rep->initiator_depth;
	terms->initiator_depth = rep->responder_resources;
	terms->rnr_retry_count = rep->rnr_retry_count;
	wire->id->remote_ece =
		(struct ibv_ece){.vendor_id = be32toh(rep->ece_vendor), .options = be32toh(rep->ece_options)};
	wire->phase = RN_WIRE_REP_RECEIVED;
	rn_timer_set(&wire->timer, UINT64_MAX);
	watch_peer(wire, terms->remote_qpn);

	event = rn_cm_event_new(wire->id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	if (!event) {
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return;
	}
	rn_cm_event_private(event, rep->private_data, rep->private_length,
			    rn_settings.padded ? sizeof rep->private_data : rep->private_length);
	param = &event->event.param.conn;
	param->responder_resources = terms->responder_resources;
	param->initiator_depth = terms->initiator_depth;
	param->flow_control = rep->flow_control;
	param->rnr_retry_count = rep->rnr_retry_count;
	param->srq = rep->srq;
	param->qp_num = terms->remote_qpn;
	rn_cm_event_queue(event);
}

/* May it ask for something? */
static bool is_let_in(const struct rn_wire *wire)
{
	return wire->phase == (rn_cm_secret_is_set() ? RN_WIRE_PROVEN : RN_WIRE_ACCEPTED);
}

/* Of the passive side, which has not been asked properly, or of the active side's request. */
static void on_rej(struct rn_wire *wire, const struct rej *rej)
{
	if (wire->phase == RN_WIRE_CHALLENGED)
		rn_cm_secret_refused(wire);
	else if (wire->is_datagram)
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, be16toh(rej->reason));
	else if (wire->phase != RN_WIRE_CLOSING)
		rn_cm_wire_tell_refused(wire, RDMA_CM_EVENT_REJECTED, be16toh(rej->reason), rej->private_data,
					rej->private_length, sizeof rej->private_data);
	rn_cm_wire_finish(wire);
}

/* For datagrams there is one question and one answer, but for what comes before. */
static bool is_of_datagrams(const struct rn_wire *wire, uint8_t type)
{
	return type == SIDR_REP || (wire->phase == RN_WIRE_HELLO_SENT && type == SECRET_CHALLENGE) ||
	       (wire->phase == RN_WIRE_REQ_SENT && type == MRA) ||
	       ((wire->phase == RN_WIRE_HELLO_SENT || wire->phase == RN_WIRE_REQ_SENT) && type == REJ);
}

/* Each message is said once. So a peer says little in all, whatever it is that a phase lets pass. */
static bool is_repeated(struct rn_wire *wire, uint8_t type)
{
	uint16_t bit = (uint16_t)(1u << type), before = wire->heard;

	wire->heard |= bit;
	return before & bit && rn_guarded(RN_GUARD_CM_FLOOD);
}

/* What may come in which phase; false: out of turn. */
static bool handle(struct rn_wire *wire, const struct header *header)
{
	const struct req *req = (const void *)header;
	const struct rep *rep = (const void *)header;
	const struct rej *rej = (const void *)header;
	const struct sidr_req *sidr_req = (const void *)header;
	const struct sidr_rep *sidr_rep = (const void *)header;
	const struct handover *handover = (const void *)header;

	if (is_repeated(wire, header->type))
		return false;
	if (wire->is_datagram && !is_of_datagrams(wire, header->type))
		return false;
	if ((header->type == REQ || header->type == SIDR_REQ) && wire->phase == RN_WIRE_ACCEPTED && !is_let_in(wire)) {
		rn_cm_secret_missing(wire);
		return true;
	}
	switch ((enum message_type)header->type) {
	case REQ:
		if (!is_let_in(wire) || req->private_length > sizeof req->private_data ||
		    be32toh(req->qpn) > 0xffffff || be32toh(req->psn) > 0xffffff || req->retry_count > 7 ||
		    req->rnr_retry_count > 7 || req->responder_resources > RN_MAX_RD_ATOMIC ||
		    req->initiator_depth > RN_MAX_RD_ATOMIC)
			return false;
		on_req(wire, req);
		return true;
	case REP:
		if (rep->private_length > sizeof rep->private_data || be32toh(rep->qpn) > 0xffffff ||
		    be32toh(rep->psn) > 0xffffff || rep->rnr_retry_count > 7 ||
		    rep->responder_resources > RN_MAX_RD_ATOMIC || rep->initiator_depth > RN_MAX_RD_ATOMIC)
			return false;
		if (wire->phase == RN_WIRE_CLOSING)
			return true; /* crossed our REJ */
		if (wire->phase != RN_WIRE_REQ_SENT)
			return false;
		on_rep(wire, rep);
		return true;
	case RTU:
		if (wire->phase == RN_WIRE_ESTABLISHED || wire->phase == RN_WIRE_DREQ_SENT ||
		    wire->phase == RN_WIRE_CLOSING)
			return true; /* forced by rdma_notify, or crossed our last words */
		if (wire->phase != RN_WIRE_REP_SENT)
			return false;
		established(wire);
		return true;
	case REJ:
		if (rej->private_length > sizeof rej->private_data)
			return false;
		if (wire->phase == RN_WIRE_ESTABLISHED || wire->phase == RN_WIRE_DREQ_SENT) {
			/* Only of who was asked: its program gave the connection up while our RTU was on its way. */
			if (!(wire->heard & 1u << REP))
				return false;
			rn_cm_wire_lost(wire, 0);
			return true;
		}
		if (wire->phase != RN_WIRE_HELLO_SENT && wire->phase != RN_WIRE_CHALLENGED &&
		    wire->phase != RN_WIRE_REQ_SENT && wire->phase != RN_WIRE_REP_RECEIVED &&
		    wire->phase != RN_WIRE_REQ_RECEIVED && wire->phase != RN_WIRE_REP_SENT &&
		    wire->phase != RN_WIRE_CLOSING)
			return false;
		on_rej(wire, rej);
		return true;
	case DREQ:
		if (wire->phase == RN_WIRE_CLOSING)
			return true;
		if (wire->phase != RN_WIRE_ESTABLISHED && wire->phase != RN_WIRE_DREQ_SENT)
			return false;
		rn_cm_wire_tell_disconnected(wire);
		say(wire, DREP);
		wire->phase = RN_WIRE_CLOSING;
		rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
		return true;
	case DREP:
		if (wire->phase != RN_WIRE_DREQ_SENT && wire->phase != RN_WIRE_CLOSING)
			return false;
		if (wire->phase == RN_WIRE_DREQ_SENT)
			rn_cm_wire_tell_disconnected(wire);
		rn_cm_wire_finish(wire);
		return true;
	case SIDR_REQ:
		if (!is_let_in(wire) || sidr_req->private_length > sizeof sidr_req->private_data)
			return false;
		on_sidr_req(wire, sidr_req);
		return true;
	case SIDR_REP:
		if (!wire->is_datagram || wire->phase != RN_WIRE_REQ_SENT ||
		    sidr_rep->private_length > sizeof sidr_rep->private_data || sidr_rep->status > RN_SIDR_LAST ||
		    be32toh(sidr_rep->qpn) > 0xffffff)
			return false;
		on_sidr_rep(wire, sidr_rep);
		return true;
	case SECRET_HELLO:
		return rn_cm_secret_on_hello(wire, (const void *)header);
	case SECRET_CHALLENGE:
		return rn_cm_secret_on_challenge(wire, (const void *)header);
	case SECRET_PROOF:
		return rn_cm_secret_on_proof(wire, (const void *)header);
	case MRA:
		return wire->phase == RN_WIRE_REQ_SENT || wire->phase == RN_WIRE_CLOSING;
	case HANDOVER:
		if (wire->phase != RN_WIRE_REP_RECEIVED && wire->phase != RN_WIRE_ESTABLISHED &&
		    wire->phase != RN_WIRE_DREQ_SENT && wire->phase != RN_WIRE_CLOSING)
			return false;
		memcpy(&wire->peer_token, handover->token, sizeof wire->peer_token);
		return wire->peer_token != 0;
	case MOVED:
		wire->peer_moved = true;
		if (wire->phase == RN_WIRE_ESTABLISHED)
			rn_timer_set(&wire->timer, UINT64_MAX);
		return true;
	}
	return false;
}

/* Whoever has said one thing that makes sense is one of ours, and may take its time for the next. */
static void made_sense(struct rn_wire *wire)
{
	rn_cm_name_has_spoken(wire->cookie);
	wire->cookie = 0;
	if (wire->is_ours)
		return;
	wire->is_ours = true;
	if (wire->phase == RN_WIRE_REQ_SENT)
		rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
}

void rn_cm_wire_hear(struct rn_wire *wire, enum message_type type)
{
	const struct header header = {.type = (uint8_t)type};

	if (!handle(wire, &header))
		rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "a message out of turn");
}

void rn_cm_wire_digest(struct rn_wire *wire)
{
	unsigned at = 0;

	if (wire->hangs_up)
		at = wire->in_length;
	while (!wire->over && wire->in_length - at >= sizeof(struct header)) {
		const struct header *header = (const void *)(wire->in + at);
		uint16_t length = be16toh(header->length);

		if (be32toh(header->magic) != MAGIC) {
			rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "not a connection manager's message");
		} else if (header->version != VERSION) {
			rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "another version");
		} else if (!header->type || header->type >= MESSAGE_TYPES ||
			   length != rn_cm_message_length[header->type]) {
			rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "a message of unknown type or wrong length");
		} else if (wire->in_length - at < length) {
			break;
		} else if (!handle(wire, header)) {
			rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "a message out of turn or with impossible values");
		} else {
			made_sense(wire);
			at += length; /* all lengths are multiples of four: the next is aligned, too */
			if (wire->hangs_up)
				at = wire->in_length; /* whatever follows */
		}
	}
	if (wire->over)
		return;
	wire->in_length -= at;
	memmove(wire->in, wire->in + at, wire->in_length);
}
