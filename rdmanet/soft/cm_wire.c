/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wires: the TCP socket under a connection.
 *
 * The messages are InfiniBand's: REQ, REP, RTU; REJ with a reason; DREQ, DREP.  Each has a header
 * with magic, version, type and length, and one fixed length; whatever else comes, or a message
 * out of turn, ends the connection, and one line in the log says why.  A socket that says nothing
 * for five seconds after it was accepted is closed.
 *
 *      active                                        passive
 *      CONNECTING --> REQ_SENT --> REP_RECEIVED       ACCEPTED --> REQ_RECEIVED --> REP_SENT
 *                                       |                                             |
 *                                       +-----------> ESTABLISHED <-------------------+
 *                                                     |        |
 *                                          DREQ sent  |        |  DREQ received, DREP sent
 *                                                DREQ_SENT   CLOSING
 *                                                     |        |
 *                                          DREP, close         EOF, close
 *
 * What the end of a wire means depends on its phase, and on nothing else: see lost().  The end is
 * EOF, an error, a message that makes no sense, or the death of the peer's process as its pidfd
 * shows it (a child forked by the dead may hold the socket open).
 *
 * A wire outlives its identifier when the peer must still be told something; then it has five
 * seconds.  Only the engine frees it.
 *
 * rn_cm_lock guards what the program's threads see of a wire: its identifier, phase and output.
 * The socket, the input and the timers are the engine's.  So the lock isn't held over a system
 * call: the program's thread, which may run an event loop, would wait for it.
 */
#define _GNU_SOURCE
#include "cm.h"

#include <arpa/inet.h>
#include <assert.h>
#include <netinet/tcp.h>
#include <stdlib.h>

enum { MAGIC = 0x52444d43 /* "RDMC" */, VERSION = 1 };
enum message_type { REQ = 1, REP, RTU, REJ, DREQ, DREP, MESSAGE_TYPES };

struct header {
	__be32 magic;
	uint8_t version, type;
	__be16 length; /* of the whole message */
};

struct req {
	struct header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count;
	uint8_t flow_control, srq, private_length, reserved;
	__be32 ece_vendor, ece_options;
	uint8_t private_data[RN_CM_REQ_PRIVATE];
};

struct rep {
	struct header header;
	__be32 qpn, psn;
	uint8_t responder_resources, initiator_depth, rnr_retry_count;
	uint8_t flow_control, srq, private_length, reserved[2];
	__be32 ece_vendor, ece_options;
	uint8_t private_data[RN_CM_REP_PRIVATE];
};

struct rej {
	struct header header;
	__be16 reason;
	uint8_t private_length, reserved;
	uint8_t private_data[RN_CM_REJ_PRIVATE];
};

static_assert(sizeof(struct req) == 88 && sizeof(struct rep) == 228 && sizeof(struct rej) == 160,
	      "what goes over the wire has no padding");

static const uint16_t message_length[MESSAGE_TYPES] = {
	[REQ] = sizeof(struct req),     [REP] = sizeof(struct rep),     [RTU] = sizeof(struct header),
	[REJ] = sizeof(struct rej),     [DREQ] = sizeof(struct header), [DREP] = sizeof(struct header),
};

struct rn_wire {
	/* under rn_cm_lock */
	struct rn_list link;       /* of all wires */
	struct rn_cm_id *id;       /* NULL: not yet, or no more */
	struct rn_cm_id *listener; /* until the request has come */
	enum rn_wire_phase phase;
	bool over; /* to be freed as soon as the engine has done with this callback */
	bool told; /* DISCONNECTED */
	/* The longest message fits twice; what is queued is a REQ or a REP, and at most RTU, REJ,
	 * DREQ and DREP after it. */
	unsigned out_length;
	unsigned char out[512];

	/* the engine's, or fixed */
	struct rn_source source;
	struct rn_timer timer;
	struct rn_task task;
	struct rn_death death;
	struct sockaddr_storage near, far; /* the passive side's: of the socket, and of the peer */
	struct sockaddr_storage dst; /* where the active side goes */
	bool connecting;             /* the TCP connection isn't there yet */
	bool watched;                /* death */
	bool wants_room;             /* watching EPOLLOUT */
	uint16_t watch_port;         /* whose death is to be watched */
	uint8_t tos;
	bool tos_set;
	unsigned in_length, sending_length;
	/* Messages are looked at where they came in: all lengths are multiples of four. */
	alignas(8) unsigned char in[512];
	unsigned char sending[512];
};

enum {
	UNHEARD_MAX = 1024,  /* accepted sockets that have not spoken yet: beyond, the eldest goes */
	ACCEPTS_PER_ROUND = 16,
	LINGER_MS = 5000,    /* for the last words */
	BREATHE_MS = 100,
};

static struct rn_list wires = {&wires, &wires};
static unsigned unheard; /* wires that are ACCEPTED; both under rn_cm_lock */
static _Atomic unsigned long dropped;

/* Settings, in milliseconds; read once. */

enum rn_wire_phase rn_wire_phase(const struct rn_wire *wire)
{
	return wire->phase;
}

unsigned long rn_wire_dropped(void)
{
	return dropped;
}

/* --- life --------------------------------------------------------------------------------------- */

static void ready(struct rn_source *source, uint32_t epoll_events);
static void timed_out(struct rn_timer *timer);
static void kicked(struct rn_task *task);
static void peer_died(struct rn_death *death, bool failed);

static void set_timer_ms(struct rn_wire *wire, uint64_t ms)
{
	rn_timer_set(&wire->timer, ms * 1000000u);
}

/* rn_cm_lock held. */
static struct rn_wire *wire_new(enum rn_wire_phase phase)
{
	struct rn_wire *wire = calloc(1, sizeof *wire);

	if (!wire)
		return NULL;
	wire->phase = phase;
	wire->connecting = phase == RN_WIRE_CONNECTING;
	wire->source = (struct rn_source){.fd = -1, .ready = ready};
	wire->timer.fire = timed_out;
	wire->task.run = kicked;
	wire->death.dead = peer_died;
	rn_list_add(&wires, &wire->link);
	return wire;
}

static void close_socket(struct rn_wire *wire)
{
	rn_source_remove(&wire->source);
	rn_fd_close(wire->source.fd);
	wire->source.fd = -1;
	if (wire->watched)
		rn_peer_unwatch_death(&wire->death);
	wire->watched = false;
}

/* It has served: from now on its identifier is without, but for one that waits for TIMEWAIT_EXIT.
 * rn_cm_lock held. */
static void finish(struct rn_wire *wire)
{
	wire->over = true;
	if (!wire->id)
		return;
	if (rn_settings.timewait_ms && wire->told && wire->phase != RN_WIRE_TIMEWAIT) {
		wire->phase = RN_WIRE_TIMEWAIT;
		return;
	}
	wire->id->wire = NULL;
	wire->id = NULL;
}

/* Last in each of the engine's callbacks: nothing but this frees a wire. Without the lock. */
static void sweep(struct rn_wire *wire)
{
	bool waits;

	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over) {
		pthread_mutex_unlock(&rn_cm_lock);
		return;
	}
	if (wire->phase == RN_WIRE_ACCEPTED)
		unheard--;
	waits = wire->id != NULL; /* see finish() */
	if (waits)
		wire->over = false;
	else
		rn_list_del(&wire->link);
	pthread_mutex_unlock(&rn_cm_lock);

	close_socket(wire);
	if (waits) {
		set_timer_ms(wire, rn_settings.timewait_ms);
		return;
	}
	rn_timer_cancel(&wire->timer);
	rn_task_cancel(&wire->task);
	free(wire);
}

/* The engine stops. Identifiers that are left, if the program left any, stay unconnected. */
static void stop_all(void)
{
	struct rn_wire *wire;

	do {
		wire = NULL;
		pthread_mutex_lock(&rn_cm_lock);
		if (!rn_list_empty(&wires)) {
			wire = RN_OWNER(wires.next, struct rn_wire, link);
			if (wire->id)
				wire->id->wire = NULL;
			wire->id = NULL;
			wire->over = true;
		}
		pthread_mutex_unlock(&rn_cm_lock);
		if (wire)
			sweep(wire);
	} while (wire);
}

static void forget_in_child(void)
{
	rn_list_init(&wires);
	unheard = 0;
}

void rn_wire_start(void)
{
	rn_settings_need();
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

/* --- what the program asks for: any thread, rn_cm_lock held ------------------------------------- */

/* The message begins with a header, which is filled in here. */
static void append(struct rn_wire *wire, enum message_type type, void *message)
{
	unsigned length = message_length[type];
	struct header *header = message;

	if (wire->out_length + length > sizeof wire->out)
		return; /* the peer has not read for a whole conversation */
	*header = (struct header){htobe32(MAGIC), VERSION, (uint8_t)type, htobe16((uint16_t)length)};
	memcpy(wire->out + wire->out_length, message, length);
	wire->out_length += length;
}

static void say(struct rn_wire *wire, enum message_type type)
{
	struct header header;

	append(wire, type, &header);
}

int rn_wire_connect(struct rn_cm_id *id, const struct rn_cm_param *param)
{
	struct rn_wire *wire = wire_new(RN_WIRE_CONNECTING);
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
		.ece_vendor = htobe32(id->local_ece.vendor_id),
		.ece_options = htobe32(id->local_ece.options),
	};

	if (!wire)
		return ENOMEM;
	wire->id = id;
	id->wire = wire;
	wire->dst = id->id.route.addr.dst_storage;
	wire->tos = id->tos;
	wire->tos_set = id->tos_set;
	wire->source.fd = id->bound_fd; /* it is the wire's now */
	id->bound_fd = -1;
	if (param->private_length)
		memcpy(req.private_data, param->private_data, param->private_length);
	append(wire, REQ, &req);
	rn_task_post(&wire->task);
	return 0;
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
	append(wire, REP, &rep);
	wire->phase = RN_WIRE_REP_SENT;
	set_timer_ms(wire, rn_settings.cm_timeout_ms);
	rn_task_post(&wire->task);
}

static void say_reject(struct rn_wire *wire, int reason, const void *private_data, uint8_t length)
{
	struct rej rej = {.reason = htobe16((uint16_t)reason), .private_length = length};

	if (length)
		memcpy(rej.private_data, private_data, length);
	append(wire, REJ, &rej);
	wire->phase = RN_WIRE_CLOSING;
	set_timer_ms(wire, LINGER_MS);
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
}

void rn_wire_force_established(struct rn_wire *wire)
{
	established(wire);
}

void rn_wire_disconnect(struct rn_wire *wire)
{
	say(wire, DREQ);
	wire->phase = RN_WIRE_DREQ_SENT;
	set_timer_ms(wire, LINGER_MS);
	rn_task_post(&wire->task);
}

void rn_wire_abandon(struct rn_wire *wire)
{
	wire->id->wire = NULL;
	wire->id = NULL;
	switch (wire->phase) {
	case RN_WIRE_CONNECTING:
	case RN_WIRE_TIMEWAIT:
		wire->over = true; /* swept by its task */
		break;
	case RN_WIRE_REQ_SENT:
		say_reject(wire, RN_REJ_TIMEOUT, NULL, 0);
		break;
	case RN_WIRE_REQ_RECEIVED:
	case RN_WIRE_REP_SENT:
	case RN_WIRE_REP_RECEIVED:
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		break;
	case RN_WIRE_ESTABLISHED:
		say(wire, DREQ);
		wire->phase = RN_WIRE_DREQ_SENT;
		set_timer_ms(wire, LINGER_MS);
		break;
	case RN_WIRE_ACCEPTED:
	case RN_WIRE_DREQ_SENT:
	case RN_WIRE_CLOSING:
		break;
	}
	rn_task_post(&wire->task);
}

/* --- the end of a wire: engine, rn_cm_lock held -------------------------------------------------- */

static void tell_disconnected(struct rn_wire *wire)
{
	if (wire->id && !wire->told)
		rn_cm_tell(wire->id, RDMA_CM_EVENT_DISCONNECTED, 0);
	wire->told = true;
}

static void tell_failed(struct rn_wire *wire, enum rdma_cm_event_type type, int status, const struct rej *rej)
{
	struct rn_cm_event *event;

	if (!wire->id)
		return;
	/* The peer's answer lies there unread: it is void now, and becomes this. */
	event = rn_cm_event_find(wire->id, RDMA_CM_EVENT_CONNECT_RESPONSE);
	if (event) {
		event->event.event = type;
		event->event.status = status;
	} else {
		event = rn_cm_event_new(wire->id, type, status);
		if (!event)
			return;
		rn_cm_event_queue(event);
	}
	memset(&event->event.param, 0, sizeof event->event.param);
	if (rej)
		rn_cm_event_private(event, rej->private_data, rej->private_length,
				    rn_settings.padded ? sizeof rej->private_data : rej->private_length);
}

/* Nothing more will come. error: of the socket, or 0 for EOF and death. */
static void lost(struct rn_wire *wire, int error)
{
	switch (wire->phase) {
	case RN_WIRE_CONNECTING:
		if (!error || error == ECONNREFUSED)
			tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID, NULL);
		else
			tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -error, NULL);
		break;
	case RN_WIRE_REQ_SENT:
	case RN_WIRE_REP_RECEIVED:
	case RN_WIRE_REQ_RECEIVED:
	case RN_WIRE_REP_SENT:
		/* As a kernel says for a program that ends: it destroys its identifiers. */
		tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED, NULL);
		break;
	case RN_WIRE_ESTABLISHED:
	case RN_WIRE_DREQ_SENT:
		tell_disconnected(wire);
		break;
	case RN_WIRE_ACCEPTED:
	case RN_WIRE_CLOSING:
	case RN_WIRE_TIMEWAIT:
		break;
	}
	finish(wire);
}

static void drop(struct rn_wire *wire, const char *why)
{
	char where[INET6_ADDRSTRLEN] = "?";
	const struct sockaddr_storage *far = wire->far.ss_family ? &wire->far : &wire->dst;

	dropped++;
	inet_ntop(far->ss_family,
		  far->ss_family == AF_INET ? (const void *)&((const struct sockaddr_in *)far)->sin_addr
					    : (const void *)&((const struct sockaddr_in6 *)far)->sin6_addr,
		  where, sizeof where);
	rn_log("connection with %s port %u dropped: %s", where,
		  (unsigned)be16toh(rn_cm_port((const struct sockaddr *)far)), why);
	if (wire->phase != RN_WIRE_REQ_SENT) {
		lost(wire, 0);
		return;
	}
	/* Whoever listens there doesn't speak our language. */
	tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_INVALID_SERVICE_ID, NULL);
	finish(wire);
}

static void peer_died(struct rn_death *death, bool failed)
{
	struct rn_wire *wire = RN_OWNER(death, struct rn_wire, death);

	if (failed)
		return; /* no way into its memory, but it lives */
	pthread_mutex_lock(&rn_cm_lock);
	lost(wire, 0);
	pthread_mutex_unlock(&rn_cm_lock);
	sweep(wire);
}

static void timed_out(struct rn_timer *timer)
{
	struct rn_wire *wire = RN_OWNER(timer, struct rn_wire, timer);

	pthread_mutex_lock(&rn_cm_lock);
	switch (wire->phase) {
	case RN_WIRE_ACCEPTED:
		drop(wire, "it said nothing");
		break;
	case RN_WIRE_CONNECTING:
	case RN_WIRE_REQ_SENT:
	case RN_WIRE_REP_SENT:
		tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, NULL);
		finish(wire);
		break;
	case RN_WIRE_DREQ_SENT:
		lost(wire, 0);
		break;
	case RN_WIRE_TIMEWAIT:
		if (wire->id)
			rn_cm_tell(wire->id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
		finish(wire);
		break;
	case RN_WIRE_CLOSING:
		finish(wire);
		break;
	case RN_WIRE_REP_RECEIVED:
	case RN_WIRE_REQ_RECEIVED:
	case RN_WIRE_ESTABLISHED:
		break; /* the program has all the time it wants */
	}
	pthread_mutex_unlock(&rn_cm_lock);
	sweep(wire);
}

/* --- messages: engine, rn_cm_lock held ----------------------------------------------------------- */

static void on_req(struct rn_wire *wire, const struct req *req)
{
	struct rn_cm_id *listener = wire->listener, *id;
	struct rn_cm_event *event;
	struct rdma_conn_param *param;

	wire->phase = RN_WIRE_REQ_RECEIVED;
	wire->listener = NULL;
	unheard--;
	rn_timer_cancel(&wire->timer);
	if (!listener) {
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return;
	}
	id = rn_cm_id_new(listener->id.channel, listener->id.context, listener->id.ps);
	event = id ? rn_cm_event_new(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0) : NULL;
	if (!event) {
		free(id);
		say_reject(wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
		return;
	}
	rn_cm_context_more();
	id->state = RN_CM_CONNECTION;
	id->wire = wire;
	wire->id = id;
	id->id.route.addr.src_storage = wire->near;
	id->id.route.addr.dst_storage = wire->far;
	id->tos = listener->tos;
	id->ack_timeout = listener->ack_timeout;
	id->ack_timeout_set = listener->ack_timeout_set;
	rn_cm_set_route(id);
	id->id.route.path_rec = &id->path;
	id->id.route.num_paths = 1;
	/* What one side can initiate, the other must have resources for. */
	id->terms = (struct rn_cm_terms){
		.remote_qpn = be32toh(req->qpn),
		.remote_psn = be32toh(req->psn),
		.responder_resources = req->initiator_depth,
		.initiator_depth = req->responder_resources,
		.retry_count = req->retry_count,
		.rnr_retry_count = req->rnr_retry_count,
	};
	id->remote_ece = (struct ibv_ece){.vendor_id = be32toh(req->ece_vendor), .options = be32toh(req->ece_options)};
	wire->watch_port = (uint16_t)(id->terms.remote_qpn >> 8);

	event->counted_on = listener;
	event->event.listen_id = &listener->id;
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
	rn_cm_event_queue(event);
	if (++listener->unread_requests >= listener->backlog && !listener->paused) {
		listener->paused = true; /* the rest waits in TCP's queue */
		rn_source_modify(&listener->accepting, 0);
	}
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
	wire->watch_port = (uint16_t)(terms->remote_qpn >> 8);

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

/* What may come in which phase; false: out of turn. */
static bool handle(struct rn_wire *wire, const struct header *header)
{
	const struct req *req = (const void *)header;
	const struct rep *rep = (const void *)header;
	const struct rej *rej = (const void *)header;

	switch ((enum message_type)header->type) {
	case REQ:
		if (wire->phase != RN_WIRE_ACCEPTED || req->private_length > sizeof req->private_data ||
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
		if (wire->phase != RN_WIRE_REQ_SENT && wire->phase != RN_WIRE_REP_RECEIVED &&
		    wire->phase != RN_WIRE_REQ_RECEIVED && wire->phase != RN_WIRE_REP_SENT &&
		    wire->phase != RN_WIRE_CLOSING)
			return false;
		if (wire->phase != RN_WIRE_CLOSING)
			tell_failed(wire, RDMA_CM_EVENT_REJECTED, be16toh(rej->reason), rej);
		finish(wire);
		return true;
	case DREQ:
		if (wire->phase == RN_WIRE_CLOSING)
			return true;
		if (wire->phase != RN_WIRE_ESTABLISHED && wire->phase != RN_WIRE_DREQ_SENT)
			return false;
		tell_disconnected(wire);
		say(wire, DREP);
		wire->phase = RN_WIRE_CLOSING;
		set_timer_ms(wire, LINGER_MS);
		return true;
	case DREP:
		if (wire->phase != RN_WIRE_DREQ_SENT && wire->phase != RN_WIRE_CLOSING)
			return false;
		if (wire->phase == RN_WIRE_DREQ_SENT)
			tell_disconnected(wire);
		finish(wire);
		return true;
	case MESSAGE_TYPES:
		break;
	}
	return false;
}

/* All whole messages in the buffer. */
static void digest(struct rn_wire *wire)
{
	unsigned at = 0;

	while (!wire->over && wire->in_length - at >= sizeof(struct header)) {
		const struct header *header = (const void *)(wire->in + at);
		uint16_t length = be16toh(header->length);

		if (be32toh(header->magic) != MAGIC) {
			drop(wire, "not a connection manager's message");
		} else if (header->version != VERSION) {
			drop(wire, "another version");
		} else if (!header->type || header->type >= MESSAGE_TYPES ||
			   length != message_length[header->type]) {
			drop(wire, "a message of unknown type or wrong length");
		} else if (wire->in_length - at < length) {
			break;
		} else if (!handle(wire, header)) {
			drop(wire, "a message out of turn or with impossible values");
		} else {
			at += length; /* all lengths are multiples of four: the next is aligned, too */
		}
	}
	if (wire->over)
		return;
	wire->in_length -= at;
	memmove(wire->in, wire->in + at, wire->in_length);
}

/* --- the socket: engine, without the lock -------------------------------------------------------- */

static void lost_unlocked(struct rn_wire *wire, int error)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over)
		lost(wire, error);
	pthread_mutex_unlock(&rn_cm_lock);
}

static void listen_for(struct rn_wire *wire, bool room)
{
	uint32_t events = EPOLLIN | (room ? EPOLLOUT : 0u);
	int rc;

	if (!wire->source.slot) {
		rc = rn_source_add(&wire->source, events);
		if (rc)
			lost_unlocked(wire, -rc);
	} else if (room != wire->wants_room) {
		rn_source_modify(&wire->source, events);
	}
	wire->wants_room = room;
}

/* What is to be said; nothing any more when the wire is over. */
static bool take_output(struct rn_wire *wire)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over) {
		memcpy(wire->sending, wire->out, wire->out_length);
		wire->sending_length = wire->out_length;
		wire->out_length = 0;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return wire->sending_length != 0;
}

static void flush(struct rn_wire *wire)
{
	ssize_t sent;

	if (wire->connecting || wire->source.fd < 0)
		return;
	while (wire->sending_length || take_output(wire)) {
		sent = send(wire->source.fd, wire->sending, wire->sending_length, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && errno == EAGAIN)
			break;
		if (sent < 0) /* it is gone: what it said before that is still to be read */
			sent = wire->sending_length;
		wire->sending_length -= (unsigned)sent;
		memmove(wire->sending, wire->sending + sent, wire->sending_length);
	}
	listen_for(wire, wire->sending_length != 0);
}

static void receive(struct rn_wire *wire)
{
	bool more;

	do {
		size_t room = sizeof wire->in - wire->in_length;
		ssize_t got = recv(wire->source.fd, wire->in + wire->in_length, room, MSG_DONTWAIT);

		more = got < 0 && errno == EINTR;
		if (more)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got <= 0) {
			lost_unlocked(wire, got ? errno : 0);
			return;
		}
		pthread_mutex_lock(&rn_cm_lock);
		wire->in_length += (unsigned)got;
		digest(wire);
		more = !wire->over && (size_t)got == room; /* else that was all; if not, epoll says so */
		pthread_mutex_unlock(&rn_cm_lock);
	} while (more);

	if (wire->watch_port && !wire->watched)
		wire->watched = !rn_peer_watch_death(wire->watch_port, &wire->death);
	wire->watch_port = 0;
}

/* The TCP connection stands. */
static void connected(struct rn_wire *wire)
{
	struct sockaddr_storage near = {0};
	socklen_t length = sizeof near;

	wire->connecting = false;
	if (getsockname(wire->source.fd, (struct sockaddr *)&near, &length)) {
		lost_unlocked(wire, errno);
		return;
	}
	/* The kernel may choose the very port that nobody listens on: the socket meets itself. */
	if (rn_cm_port((struct sockaddr *)&near) == rn_cm_port((struct sockaddr *)&wire->dst) &&
	    !memcmp(&near, &wire->dst, near.ss_family == AF_INET ? offsetof(struct sockaddr_in, sin_zero) : length)) {
		lost_unlocked(wire, ECONNREFUSED);
		return;
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over) {
		memcpy(&wire->id->id.route.addr.src_addr, &near, length);
		wire->phase = RN_WIRE_REQ_SENT;
	}
	pthread_mutex_unlock(&rn_cm_lock);
}

static void start_connecting(struct rn_wire *wire)
{
	const struct sockaddr *dst = (const struct sockaddr *)&wire->dst;
	static const int on = 1;
	int fd = wire->source.fd, tos = wire->tos;

	if (fd < 0)
		fd = rn_fd_own(socket(dst->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (fd < 0) {
		lost_unlocked(wire, errno);
		return;
	}
	wire->source.fd = fd;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (wire->tos_set && dst->sa_family == AF_INET)
		setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
	set_timer_ms(wire, rn_settings.cm_timeout_ms);
	if (!connect(fd, dst, rn_cm_address_length(dst)))
		connected(wire);
	else if (errno == EINPROGRESS)
		listen_for(wire, true);
	else
		lost_unlocked(wire, errno);
}

static void finish_connecting(struct rn_wire *wire)
{
	int error = 0;
	socklen_t length = sizeof error;

	if (getsockopt(wire->source.fd, SOL_SOCKET, SO_ERROR, &error, &length))
		error = errno;
	if (error)
		lost_unlocked(wire, error);
	else
		connected(wire);
}

static void ready(struct rn_source *source, uint32_t epoll_events)
{
	struct rn_wire *wire = RN_OWNER(source, struct rn_wire, source);

	if (wire->connecting)
		finish_connecting(wire);
	else if (epoll_events & ~(uint32_t)EPOLLOUT)
		receive(wire);
	flush(wire);
	sweep(wire);
}

/* The program has changed something. */
static void kicked(struct rn_task *task)
{
	struct rn_wire *wire = RN_OWNER(task, struct rn_wire, task);
	bool start;

	pthread_mutex_lock(&rn_cm_lock);
	start = !wire->over && wire->connecting && !wire->source.slot;
	pthread_mutex_unlock(&rn_cm_lock);
	if (start)
		start_connecting(wire);
	flush(wire);
	sweep(wire);
}

/* --- listeners ---------------------------------------------------------------------------------- */

static void drop_eldest_unheard(void)
{
	struct rn_wire *wire = NULL;

	pthread_mutex_lock(&rn_cm_lock);
	for (struct rn_list *item = wires.next; unheard >= UNHEARD_MAX && !wire && item != &wires; item = item->next) {
		wire = RN_OWNER(item, struct rn_wire, link);
		if (wire->phase != RN_WIRE_ACCEPTED || wire->over)
			wire = NULL;
		else
			drop(wire, "too many that say nothing");
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (wire)
		sweep(wire);
}

/* False: no more for now. */
static bool accept_one(struct rn_cm_id *listener)
{
	struct sockaddr_storage near = {0}, far = {0};
	socklen_t length = sizeof far, near_length = sizeof near;
	static const int on = 1;
	struct rn_wire *wire;
	bool more;
	int fd;

	fd = rn_fd_own(accept4(listener->bound_fd, (struct sockaddr *)&far, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
	if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
		rn_log("listening on port %u: %s; trying again soon",
			  (unsigned)be16toh(rn_cm_port(&listener->id.route.addr.src_addr)), strerror(errno));
		rn_source_modify(&listener->accepting, 0);
		rn_timer_set(&listener->breathe, BREATHE_MS * 1000000u);
		return false;
	}
	if (fd < 0)
		return errno != EAGAIN;
	if (getsockname(fd, (struct sockaddr *)&near, &near_length)) {
		rn_fd_close(fd);
		return true;
	}
	rn_cm_undress(&near);
	rn_cm_undress(&far);
	drop_eldest_unheard();
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	pthread_mutex_lock(&rn_cm_lock);
	wire = wire_new(RN_WIRE_ACCEPTED);
	if (wire) {
		unheard++;
		wire->source.fd = fd;
		wire->listener = listener;
		wire->near = near;
		wire->far = far;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	if (!wire) {
		rn_fd_close(fd);
		return true;
	}
	set_timer_ms(wire, rn_settings.silence_ms);
	receive(wire); /* the request is mostly there already */
	flush(wire);
	sweep(wire);
	pthread_mutex_lock(&rn_cm_lock);
	more = !listener->paused;
	pthread_mutex_unlock(&rn_cm_lock);
	return more;
}

void rn_wire_listener_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct rn_cm_id *listener = RN_OWNER(source, struct rn_cm_id, accepting);

	(void)epoll_events;
	for (int i = 0; i < ACCEPTS_PER_ROUND && accept_one(listener); i++)
		;
}

void rn_wire_listener_breathe(struct rn_timer *timer)
{
	struct rn_cm_id *listener = RN_OWNER(timer, struct rn_cm_id, breathe);

	pthread_mutex_lock(&rn_cm_lock);
	if (!listener->paused)
		rn_source_modify(&listener->accepting, EPOLLIN);
	pthread_mutex_unlock(&rn_cm_lock);
}

void rn_wire_listener_resume(struct rn_cm_id *listener)
{
	listener->unread_requests--;
	if (!listener->paused || listener->unread_requests >= listener->backlog)
		return;
	listener->paused = false;
	rn_source_modify(&listener->accepting, EPOLLIN);
}

void rn_wire_listener_gone(struct rn_cm_id *listener)
{
	for (struct rn_list *item = wires.next; item != &wires; item = item->next) {
		struct rn_wire *wire = RN_OWNER(item, struct rn_wire, link);

		if (wire->listener == listener)
			wire->listener = NULL; /* a request that comes yet is rejected */
	}
}
