/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a connection manager receives: requests, and what they are refused for; answers; ends.  All on the engine, with
 * rn_cm_lock held.
 *
 * Each message may come once, and only in certain phases of a wire (wire.c), which one table says (rows); one that comes
 * out of turn, or has impossible values, ends the wire.  An accepted request creates an identifier, and an event that
 * brings it to the program.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/gid.h"
#include "base/guard.h"
#include "cm/wire.h"

/* --- what each message means ------------------------------------------------------------------------ */

/* The identifier for a request that has come, and the event that brings it. NULL: it was refused. */
static struct rn_cm_event *make_request_id(struct rn_cm_wire *wire, bool is_datagram, uint8_t transport)
{
	enum { WAIT_MS = 1000 };
	struct rn_cm_id *listener = wire->listener, *id;
	uint64_t wait_ms = rn_settings.silence_ms / 4;
	struct rn_cm_event *event;

	wire->phase = RN_CM_WIRE_REQ_RECEIVED;
	wire->is_datagram = is_datagram;
	wire->listener = NULL;
	rn_cm_wire_set_timer_ms(wire, wait_ms < WAIT_MS ? wait_ms : WAIT_MS);
	if (!listener) {
		rn_cm_wire_say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return NULL;
	}
	if (rn_cm_is_datagram(listener) != is_datagram) {
		rn_cm_wire_say_reject(wire, RN_REJ_INVALID_SERVICE_ID, NULL, 0);
		return NULL;
	}
	if (!is_datagram && transport != rn_cm_transport_of(listener->id.qp_type)) {
		rn_cm_wire_say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0); /* as the kernel does */
		return NULL;
	}
	id = rn_cm_id_new(listener->id.channel, listener->id.context, listener->id.ps);
	event = id ? rn_cm_event_new(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0) : NULL;
	if (!event) {
		free(id);
		rn_cm_wire_say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return NULL;
	}
	rn_cm_context_more();
	id->state = RN_CM_CONNECTION;
	id->wire = wire;
	wire->id = id;
	wire->listener_cookie = listener->cookie;
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
		listener->paused = true; /* further connections wait in TCP's queue */
		rn_source_modify(&listener->accepting, 0);
	}
}

static bool on_req(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_req *req = (const void *)header;
	struct rn_cm_event *event = make_request_id(wire, false, req->transport);
	struct rdma_conn_param *param;
	struct rn_cm_id *id;

	if (!event)
		return true;
	id = event->id;
	/* One side needs resources for what the other can initiate. */
	id->terms = (struct rn_cm_terms){
		.local_psn = rn_cm_random_psn(), /* here: a program with its own queue pair needs it before it accepts */
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
	return true;
}

static bool on_sidr_req(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_sidr_req *req = (const void *)header;
	struct rn_cm_event *event = make_request_id(wire, true, 0);

	if (!event)
		return true;
	rn_cm_event_private(event, req->private_data, req->private_length,
			    rn_settings.padded ? sizeof req->private_data : req->private_length);
	queue_request(event);
	return true;
}

static bool on_sidr_rep(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_sidr_rep *rep = (const void *)header;
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
		rn_cm_path_to(id, &id->id.route.addr.addr.ibaddr.dgid, &param->ah_attr);
		param->qp_num = be32toh(rep->qpn);
		param->qkey = be32toh(rep->qkey);
		rn_cm_event_queue(event);
	}
	rn_cm_wire_finish(wire);
	return true;
}

static bool on_rep(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_rep *rep = (const void *)header;
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
	wire->phase = RN_CM_WIRE_REP_RECEIVED;
	rn_timer_set(&wire->timer, UINT64_MAX);
	rn_cm_wire_watch_peer(wire, terms->remote_qpn);
	wire->mail_channel = be32toh(rep->mail_channel);
	if (wire->side)
		rn_cm_set_port(&wire->id->id.route.addr.src_addr, rep->asker_number);
	else if (wire->cookie || wire->by_name)
		rn_cm_known_is_of((const struct sockaddr *)&wire->dst, wire->cookie, (uint16_t)(terms->remote_qpn >> 8));
	if (wire->cookie || wire->by_name)
		rn_cm_known_reads((const struct sockaddr *)&wire->dst, wire->cookie, wire->mail_channel);

	event = rn_cm_event_new(wire->id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	if (!event) {
		rn_cm_wire_say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return true;
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
	return true;
}

/* Of the passive side, which has not been asked properly, or of the active side's request. */
static bool on_rej(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_rej *rej = (const void *)header;

	if (wire->phase == RN_CM_WIRE_ESTABLISHED || wire->phase == RN_CM_WIRE_DREQ_SENT) {
		/* A program gave up the connection: the passive side's while our RTU was on its way, or the active side's
		 * that was heard before it said RTU. */
		if (!(wire->heard & 1u << RN_CM_REP) && wire->heard & 1u << RN_CM_RTU)
			return false;
		rn_cm_wire_lost(wire, 0);
		return true;
	}
	if (wire->phase == RN_CM_WIRE_CHALLENGED)
		rn_cm_secret_refused(wire);
	else if (wire->is_datagram)
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, be16toh(rej->reason));
	else
		rn_cm_wire_tell_refused(wire, RDMA_CM_EVENT_REJECTED, be16toh(rej->reason), rej->private_data,
					rej->private_length, sizeof rej->private_data);
	rn_cm_wire_finish(wire);
	return true;
}

static bool on_rtu(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	rn_cm_wire_established(wire);
	return true;
}

static bool on_dreq(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	if (wire->id)
		wire->id->was_connected = true; /* without an RTU, too */
	rn_cm_wire_tell_disconnected(wire);
	if (!wire->has_left)
		rn_cm_wire_say(wire, RN_CM_DREP);
	wire->phase = RN_CM_WIRE_CLOSING;
	wire->hangs_up = true; /* the peer has nothing more to say */
	rn_cm_wire_set_timer_ms(wire, RN_CM_LINGER_MS);
	return true;
}

static bool on_drep(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	if (wire->phase == RN_CM_WIRE_DREQ_SENT)
		rn_cm_wire_tell_disconnected(wire);
	rn_cm_wire_finish(wire);
	return true;
}

static bool on_handover(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_handover *handover = (const void *)header;

	if (wire->peer_token)
		return false; /* it has sent one before */
	memcpy(&wire->peer_token, handover->token, sizeof wire->peer_token);
	return wire->peer_token != 0;
}

static bool on_moved(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	(void)header;
	wire->peer_moved = true; /* a timer that waits for that finds it */
	return true;
}

/* --- which values are possible ---------------------------------------------------------------------- */

static bool is_req(const struct rn_cm_header *header)
{
	const struct rn_cm_req *req = (const void *)header;

	return req->private_length <= sizeof req->private_data && be32toh(req->qpn) <= 0xffffff &&
	       be32toh(req->psn) <= 0xffffff && req->retry_count <= 7 && req->rnr_retry_count <= 7 &&
	       req->responder_resources <= RN_MAX_RD_ATOMIC && req->initiator_depth <= RN_MAX_RD_ATOMIC;
}

static bool is_rep(const struct rn_cm_header *header)
{
	const struct rn_cm_rep *rep = (const void *)header;

	return rep->private_length <= sizeof rep->private_data && be32toh(rep->qpn) <= 0xffffff &&
	       be32toh(rep->psn) <= 0xffffff && rep->rnr_retry_count <= 7 &&
	       rep->responder_resources <= RN_MAX_RD_ATOMIC && rep->initiator_depth <= RN_MAX_RD_ATOMIC;
}

static bool is_rej(const struct rn_cm_header *header)
{
	const struct rn_cm_rej *rej = (const void *)header;

	return rej->private_length <= sizeof rej->private_data;
}

static bool is_sidr_req(const struct rn_cm_header *header)
{
	const struct rn_cm_sidr_req *req = (const void *)header;

	return req->private_length <= sizeof req->private_data;
}

static bool is_sidr_rep(const struct rn_cm_header *header)
{
	const struct rn_cm_sidr_rep *rep = (const void *)header;

	return rep->private_length <= sizeof rep->private_data && rep->status <= RN_SIDR_LAST &&
	       be32toh(rep->qpn) <= 0xffffff;
}

/* --- which message may come in which phase ------------------------------------------------------------ */

#define IN(phase) (1u << RN_CM_WIRE_##phase)

/*
 * A bit for each phase. A message that comes in no phase of its row, or whose function says so, is out of turn. Who is
 * CLOSING hangs up and digests no more, so only words are heard there, which come by the link (link.c).
 */
static const struct row {
	uint16_t phases; /* in which it is heard, by `hear` if there is more to do; */
	uint16_t crosses; /* or ignored: it crossed our last words, or says what we know */
	uint16_t of_datagrams; /* instead of both: there is one question and one answer, but for what comes before */
	bool (*is_possible)(const struct rn_cm_header *message);
	bool (*hear)(struct rn_cm_wire *wire, const struct rn_cm_header *message);
} rows[] = {
	[RN_CM_REQ] = {.phases = IN(ACCEPTED) | IN(PROVEN), .is_possible = is_req, .hear = on_req},
	[RN_CM_REP] = {.phases = IN(REQ_SENT), .is_possible = is_rep, .hear = on_rep},
	[RN_CM_RTU] = {.phases = IN(REP_SENT),
		       .crosses = IN(ESTABLISHED) | IN(DREQ_SENT), /* the first: forced by rdma_notify */
		       .hear = on_rtu},
	[RN_CM_REJ] = {.phases = IN(HELLO_SENT) | IN(CHALLENGED) | IN(REQ_SENT) | IN(REP_RECEIVED) | IN(REQ_RECEIVED) |
				 IN(REP_SENT) | IN(ESTABLISHED) | IN(DREQ_SENT),
		       .of_datagrams = IN(HELLO_SENT) | IN(REQ_SENT),
		       .is_possible = is_rej,
		       .hear = on_rej},
	/* These two may follow an RTU that was lost. */
	[RN_CM_DREQ] = {.phases = IN(REP_SENT) | IN(ESTABLISHED) | IN(DREQ_SENT), .crosses = IN(CLOSING), .hear = on_dreq},
	[RN_CM_DREP] = {.phases = IN(DREQ_SENT) | IN(CLOSING), .hear = on_drep},
	[RN_CM_SIDR_REQ] = {.phases = IN(ACCEPTED) | IN(PROVEN), .is_possible = is_sidr_req, .hear = on_sidr_req},
	[RN_CM_SIDR_REP] = {.of_datagrams = IN(REQ_SENT), .is_possible = is_sidr_rep, .hear = on_sidr_rep},
	[RN_CM_SECRET_HELLO] = {.phases = IN(ACCEPTED), .hear = rn_cm_secret_on_hello},
	[RN_CM_SECRET_CHALLENGE] = {.phases = IN(HELLO_SENT),
				    .of_datagrams = IN(HELLO_SENT),
				    .hear = rn_cm_secret_on_challenge},
	[RN_CM_SECRET_PROOF] = {.phases = IN(CHALLENGED), .hear = rn_cm_secret_on_proof},
	[RN_CM_MRA] = {.phases = IN(REQ_SENT), .of_datagrams = IN(REQ_SENT)},
	[RN_CM_HANDOVER] = {.phases = IN(REP_SENT) | IN(REP_RECEIVED) | IN(ESTABLISHED) | IN(DREQ_SENT),
			    .hear = on_handover},
	[RN_CM_ELSEWHERE] = {.phases = IN(REQ_SENT), .hear = rn_cm_ask_on_elsewhere},
	[RN_CM_MOVED] = {.phases = UINT16_MAX, .hear = on_moved},
};

/* --- hearing -------------------------------------------------------------------------------------- */

/* Each message may come once, so a peer can send only little in all, whatever a phase allows. */
static bool is_repeated(struct rn_cm_wire *wire, uint8_t type)
{
	uint16_t bit = (uint16_t)(1u << type), before = wire->heard;

	wire->heard |= bit;
	return before & bit && rn_guarded(RN_GUARD_CM_FLOOD);
}

/* The type is one of the table's. False: out of turn, or impossible values. */
static bool handle(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct row *row = &rows[header->type];
	unsigned phase = 1u << wire->phase;
	bool asks = header->type == RN_CM_REQ || header->type == RN_CM_SIDR_REQ;

	if (is_repeated(wire, header->type))
		return false;
	if (asks && wire->phase == RN_CM_WIRE_ACCEPTED && rn_cm_secret_is_set()) {
		rn_cm_secret_missing(wire);
		return true;
	}
	if (row->is_possible && !row->is_possible(header))
		return false;
	if (!(phase & (wire->is_datagram ? row->of_datagrams : row->phases)))
		return !wire->is_datagram && phase & row->crosses;
	return !row->hear || row->hear(wire, header);
}

/* A peer that has sent one valid message speaks our protocol, and may take its time for the next. */
static void made_sense(struct rn_cm_wire *wire)
{
	rn_cm_known_has_spoken((const struct sockaddr *)&wire->dst, wire->cookie);
	if (wire->is_ours)
		return;
	wire->is_ours = true;
	if (wire->phase == RN_CM_WIRE_REQ_SENT)
		rn_cm_wire_set_timer_ms(wire, rn_settings.cm_timeout_ms);
}

void rn_cm_wire_hear(struct rn_cm_wire *wire, enum rn_cm_message type)
{
	const struct rn_cm_header header = {.type = (uint8_t)type};

	if (!handle(wire, &header))
		rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "a message out of turn");
}

/*
 * The peer's first message, or its answer to ours, is of another version. It knows a REJ all the same, and who gets one
 * learns both versions (base/version.h).
 */
static void on_other_version(struct rn_cm_wire *wire, unsigned its)
{
	char far[RN_CM_FAR], words[64];
	struct rn_cm_rej rej = {.reason = htobe16(RN_REJ_VERSION)};
	int length;

	if (wire->phase != RN_CM_WIRE_ACCEPTED && wire->phase != RN_CM_WIRE_HELLO_SENT &&
	    wire->phase != RN_CM_WIRE_REQ_SENT) {
		rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "it changed the version of the protocol");
		return;
	}
	rn_warn(RN_WARN_LANGUAGE,
		"refused the connection with %s: its device speaks version %u of the protocol, this side speaks version %d",
		rn_cm_wire_far(wire, far), its, RN_WIRE_VERSION);
	if (wire->phase == RN_CM_WIRE_ACCEPTED) {
		rn_cm_wire_append(wire, RN_CM_REJ, &rej);
		wire->phase = RN_CM_WIRE_CLOSING;
		wire->hangs_up = true;
		return;
	}
	length = snprintf(words, sizeof words, RN_CM_OTHER_VERSION "%u there, %d here", its, RN_WIRE_VERSION);
	rn_cm_wire_tell_refused(wire, wire->is_datagram ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_REJECTED,
				RN_REJ_VERSION, words, (uint8_t)length, RN_CM_SIDR_REP_PRIVATE);
	rn_cm_wire_finish(wire);
}

void rn_cm_wire_digest(struct rn_cm_wire *wire)
{
	unsigned at = 0;

	if (wire->hangs_up)
		at = wire->in_length;
	while (!wire->over && wire->in_length - at >= sizeof(struct rn_cm_header)) {
		const struct rn_cm_header *header = (const void *)(wire->in + at);
		uint16_t length = be16toh(header->length);

		if (be32toh(header->magic) != RN_CM_MAGIC) {
			rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "not a connection manager's message");
		} else if (header->version != RN_WIRE_VERSION) {
			on_other_version(wire, header->version);
			at = wire->in_length;
		} else if (!header->type || header->type >= RN_CM_MESSAGES ||
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
				at = wire->in_length; /* ignore whatever follows */
		}
	}
	if (wire->over)
		return;
	wire->in_length -= at;
	memmove(wire->in, wire->in + at, wire->in_length);
}
