/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager's calls: librdmacm's interface over a TCP socket per connection.
 *
 * A connection's two queue pairs find each other by number; the connection manager carries the
 * numbers, and some private data, from one program to the other.  It does so on a TCP connection
 * to the very address and port that the program named, one for each RDMA connection, which
 * lives as long, so that its end tells of the peer's end.  cm.h has the picture.
 */
#define _GNU_SOURCE
#include "cm.h"

#include "gid.h"
#include "xrc.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/random.h>

pthread_mutex_t rn_cm_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t rn_cm_acked = PTHREAD_COND_INITIALIZER;

/* --- the one context ---------------------------------------------------------------------------- */

/* A context whose device has failed: identifiers may have it for as long as there are users. */
struct dead {
	struct dead *next;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_xrcd *xrcd;
};

static struct {
	pthread_mutex_t lock; /* taken before rn_cm_lock; guards all of this, opening and closing */
	struct ibv_context *_Atomic context;
	/* Channels, identifiers, lists of devices. From 0 to 1 and back under the lock; by whoever
	 * keeps one of them alive, also without. */
	_Atomic unsigned users;
	struct ibv_pd *_Atomic pd;
	struct ibv_xrcd *xrcd;
	struct dead *dead;
	bool handed_out; /* by rdma_get_devices: the program may keep it */
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The objects of the dead parent's context are foreign by their own mark; here it is forgotten. */
static void forget_in_child(void)
{
	pthread_mutex_init(&rn_cm_lock, NULL);
	pthread_cond_init(&rn_cm_acked, NULL);
	pthread_mutex_init(&shared.lock, NULL);
	shared.users = 0;
	shared.context = NULL;
	shared.pd = NULL;
	shared.xrcd = NULL;
	shared.dead = NULL;
	shared.handed_out = false;
}

static void start_once(void)
{
	rn_at_fork_child(forget_in_child);
	rn_wire_start();
}

static struct ibv_context *open_device(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;
	int error;

	if (!devices)
		return NULL;
	context = ibv_open_device(devices[0]);
	error = errno;
	ibv_free_device_list(devices);
	errno = error;
	return context;
}

/* Does the program still have something on it? As the context isn't its own, it may. */
static bool in_use(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);
	bool used;

	pthread_mutex_lock(&context->mutex);
	used = !rn_list_empty(&context->pds) || !rn_list_empty(&context->channels) || !rn_list_empty(&context->cqs) ||
	       !rn_list_empty(&context->xrcds);
	pthread_mutex_unlock(&context->mutex);
	return used;
}

/* With shared.lock held. A device that has failed lives when it is opened anew; who has the old context keeps it. */
static void renew(void)
{
	struct dead *dead;
	struct ibv_context *context;

	if (!shared.context || !rn_chaos_is_dead(shared.context) || !(dead = malloc(sizeof(*dead))))
		return;
	context = open_device();
	if (context && rn_chaos_is_dead(context)) { /* faults for all see to it that none lives */
		ibv_close_device(context);
		context = NULL;
	}
	if (!context) {
		free(dead);
		return;
	}
	*dead = (struct dead){shared.dead, shared.context, shared.pd, shared.xrcd};
	shared.dead = dead;
	shared.context = context;
	shared.pd = NULL;
	shared.xrcd = NULL;
}

void rn_cm_context_renew(void)
{
	if (!rn_chaos_is_dead(shared.context))
		return;
	pthread_mutex_lock(&shared.lock);
	renew();
	pthread_mutex_unlock(&shared.lock);
}

/* With shared.lock held, and without users. What the program still has something on is left to it. */
static void close_dead(void)
{
	struct dead *dead;

	while ((dead = shared.dead)) {
		shared.dead = dead->next;
		if (dead->pd)
			ibv_dealloc_pd(dead->pd);
		if (dead->xrcd)
			rn_close_xrcd(dead->xrcd);
		if (!in_use(dead->context))
			ibv_close_device(dead->context);
		free(dead);
	}
}

struct ibv_context *rn_cm_context_get(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	int error = 0;

	pthread_once(&once, start_once);
	pthread_mutex_lock(&shared.lock);
	renew();
	if (!shared.context) {
		shared.context = open_device();
		if (!shared.context)
			error = errno ? errno : ENODEV;
	}
	if (!error && !shared.users)
		error = -rn_engine_hold();
	if (!error && !shared.users++)
		rn_gid_watch();
	pthread_mutex_unlock(&shared.lock);
	if (error) {
		errno = error;
		return NULL;
	}
	return shared.context;
}

void rn_cm_context_put(void)
{
	pthread_mutex_lock(&shared.lock);
	if (--shared.users) {
		pthread_mutex_unlock(&shared.lock);
		return;
	}
	rn_engine_release();
	close_dead();
	if (shared.pd && !ibv_dealloc_pd(shared.pd))
		shared.pd = NULL;
	if (shared.xrcd && !rn_close_xrcd(shared.xrcd))
		shared.xrcd = NULL;
	/* "Devices remain opened while librdmacm is loaded": rdma_get_devices(3). */
	if (!shared.handed_out && !in_use(shared.context)) {
		ibv_close_device(shared.context);
		shared.context = NULL;
	}
	pthread_mutex_unlock(&shared.lock);
}

void rn_cm_context_more(void)
{
	shared.users++;
}

struct ibv_context *rn_cm_context(void)
{
	return shared.context;
}

struct ibv_pd *rn_cm_default_pd(void)
{
	struct ibv_pd *pd;

	pthread_mutex_lock(&shared.lock);
	if (!shared.pd)
		shared.pd = ibv_alloc_pd(shared.context);
	pd = shared.pd;
	pthread_mutex_unlock(&shared.lock);
	return pd;
}

struct ibv_xrcd *rn_cm_default_xrcd(void)
{
	struct ibv_xrcd_init_attr attr = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
	struct ibv_xrcd *xrcd;

	pthread_mutex_lock(&shared.lock);
	if (!shared.xrcd)
		shared.xrcd = rn_open_xrcd(shared.context, &attr);
	xrcd = shared.xrcd;
	pthread_mutex_unlock(&shared.lock);
	return xrcd;
}

struct ibv_pd *rn_cm_known_pd(void)
{
	return shared.pd;
}

RN_EXPORT struct ibv_context *rdmanet_soft_cm_hold(void)
{
	return rn_cm_context_get();
}

RN_EXPORT void rdmanet_soft_cm_release(struct ibv_context *context)
{
	bool is_current;

	pthread_mutex_lock(&shared.lock);
	is_current = context == shared.context;
	for (struct dead *dead = shared.dead; dead && !is_current; dead = dead->next)
		is_current = context == dead->context;
	pthread_mutex_unlock(&shared.lock);
	if (is_current) /* and not held since before a fork */
		rn_cm_context_put();
}

RN_EXPORT struct ibv_context **rdma_get_devices(int *count)
{
	struct ibv_context **list = calloc(2, sizeof *list);

	if (!list)
		return NULL;
	list[0] = rn_cm_context_get();
	if (!list[0]) {
		free(list);
		return NULL;
	}
	pthread_mutex_lock(&shared.lock);
	shared.handed_out = true;
	pthread_mutex_unlock(&shared.lock);
	if (count)
		*count = 1;
	return list;
}

RN_EXPORT void rdma_free_devices(struct ibv_context **list)
{
	rdmanet_soft_cm_release(list[0]);
	free(list);
}

/* --- an identifier's life ----------------------------------------------------------------------- */

struct rn_cm_id *rn_cm_id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space ps)
{
	struct rn_cm_id *id = calloc(1, sizeof *id);

	if (!id)
		return NULL;
	id->epoch = rn_epoch();
	id->bound_fd = id->name_fd = -1;
	id->id.channel = channel;
	id->id.context = context;
	id->id.ps = ps;
	id->id.qp_type = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
	id->qkey = RDMA_UDP_QKEY;
	return id;
}

void rn_cm_id_free(struct rn_cm_id *id)
{
	if (id->sync)
		rdma_destroy_event_channel(id->id.channel);
	rn_cm_multicast_forget(id);
	rn_fd_close(id->bound_fd);
	rn_fd_close(id->name_fd);
	free(id->qp_attr);
	free(id);
}

RN_EXPORT int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **result, void *context,
			     enum rdma_port_space ps)
{
	struct rn_cm_id *id;
	int error;

	if (ps != RDMA_PS_TCP && ps != RDMA_PS_UDP && ps != RDMA_PS_IPOIB && ps != RDMA_PS_IB)
		return rn_cm_error(EPROTONOSUPPORT);
	if (!rn_cm_context_get())
		return -1;
	if ((error = rn_chaos_call(rn_context(rn_cm_context()), RN_CREATE_ID))) {
		rn_cm_context_put();
		return rn_cm_error(error);
	}
	id = rn_cm_id_new(channel, context, ps);
	if (id && !channel) {
		id->sync = true;
		id->id.channel = rdma_create_event_channel();
	}
	if (!id || !id->id.channel) {
		error = id ? errno : ENOMEM;
		free(id);
		rn_cm_context_put();
		return rn_cm_error(error);
	}
	*result = &id->id;
	return 0;
}

/* It came with a request which nobody has read, and nobody will. rn_cm_lock held. */
static void drop_unseen(struct rn_cm_id *id)
{
	struct rn_cm_event *event, *next;

	if (id->wire)
		rn_wire_abandon(id->wire);
	for (event = rn_cm_event_purge(id); event; event = next) {
		next = event->next;
		free(event);
	}
	rn_cm_id_free(id);
	shared.users--; /* its listener is one, still */
}

static void stop_listening(struct rn_cm_id *id)
{
	/* Not under the lock: both wait for their callbacks, which take it. */
	rn_source_remove(&id->accepting);
	rn_timer_cancel(&id->breathe);
	rn_fd_close(id->bound_fd);
	id->bound_fd = -1;
}

RN_EXPORT int rdma_destroy_id(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rn_cm_event *event, *next;

	if (id->epoch != rn_epoch())
		return 0; /* of the parent: neither its events nor its sockets are here */
	if (id->state == RN_CM_LISTENING)
		stop_listening(id);
	rn_cm_put_event(id);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state == RN_CM_LISTENING)
		rn_wire_listener_gone(id);
	if (id->wire)
		rn_wire_abandon(id->wire);
	for (event = rn_cm_event_purge(id); event; event = next) {
		next = event->next;
		if (event->id != id)
			drop_unseen(event->id);
		free(event);
	}
	while (id->acked != id->delivered)
		pthread_cond_wait(&rn_cm_acked, &rn_cm_lock);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_id_free(id);
	rn_cm_context_put();
	return 0;
}

RN_EXPORT int rdma_set_option(struct rdma_cm_id *rdma_id, int level, int name, void *value, size_t length)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	bool is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;
	int number = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (level != RDMA_OPTION_ID || name < RDMA_OPTION_ID_TOS || name > RDMA_OPTION_ID_ACK_TIMEOUT)
		return rn_cm_error(ENOSYS);
	if (!value || length != (is_byte ? sizeof(uint8_t) : sizeof(int)))
		return rn_cm_error(EINVAL);
	if (is_byte)
		number = *(uint8_t *)value;
	else
		memcpy(&number, value, sizeof number);

	switch (name) {
	case RDMA_OPTION_ID_TOS:
		id->tos = (uint8_t)number;
		id->tos_set = true;
		return 0;
	case RDMA_OPTION_ID_ACK_TIMEOUT:
		if (number > 31) /* five bits: 4.096 us * 2^number */
			return rn_cm_error(EINVAL);
		id->ack_timeout = (uint8_t)number;
		id->ack_timeout_set = true;
		return 0;
	case RDMA_OPTION_ID_REUSEADDR:
		if (id->state != RN_CM_IDLE)
			return rn_cm_error(EINVAL);
		id->reuse_address = number != 0;
		return 0;
	default: /* IPv6 only: what we bind is one loopback address, and so it is */
		if (id->state != RN_CM_IDLE)
			return rn_cm_error(EINVAL);
		id->af_only = number != 0;
		return 0;
	}
}

/* --- the passive side --------------------------------------------------------------------------- */

RN_EXPORT int rdma_listen(struct rdma_cm_id *rdma_id, int backlog)
{
	enum { BACKLOG_MAX = 1024 };
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct sockaddr_in anywhere = {.sin_family = AF_INET};
	int error;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (id->state == RN_CM_IDLE && rdma_bind_addr(rdma_id, (struct sockaddr *)&anywhere))
		return -1;
	if (id->state != RN_CM_BOUND)
		return rn_cm_error(EINVAL);
	id->backlog = backlog > 0 && backlog < BACKLOG_MAX ? (unsigned)backlog : BACKLOG_MAX;
	id->accepting = (struct rn_source){.fd = id->bound_fd, .ready = rn_wire_listener_ready};
	id->breathe = (struct rn_timer){.fire = rn_wire_listener_breathe};

	if (rn_cm_listen(id))
		return -1;
	pthread_mutex_lock(&rn_cm_lock);
	id->state = RN_CM_LISTENING;
	error = -rn_source_add(&id->accepting, EPOLLIN);
	if (error)
		id->state = RN_CM_BOUND;
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : 0;
}

static uint8_t at_most(uint8_t value, uint8_t limit)
{
	return value < limit ? value : limit;
}

/* RDMA_MAX_RESP_RES and RDMA_MAX_INIT_DEPTH, both 255, stand for what the device can do. */
static bool is_valid(const struct rdma_conn_param *param, uint8_t private_max)
{
	return !param || (param->private_data_len <= private_max &&
			  (!param->private_data_len || param->private_data) &&
			  (param->responder_resources == RDMA_MAX_RESP_RES ||
			   param->responder_resources <= RN_MAX_RD_ATOMIC) &&
			  (param->initiator_depth == RDMA_MAX_INIT_DEPTH ||
			   param->initiator_depth <= RN_MAX_RD_ATOMIC));
}

static struct rn_cm_param to_send(const struct rn_cm_id *id, const struct rdma_conn_param *param)
{
	enum { RETRY_FOR_EVER = 7 };

	if (!param)
		return (struct rn_cm_param){.rnr_retry_count = RETRY_FOR_EVER};
	return (struct rn_cm_param){
		.private_data = param->private_data,
		.private_length = param->private_data_len,
		.flow_control = param->flow_control,
		.srq = id->id.qp ? id->id.qp->srq != NULL : param->srq,
		.rnr_retry_count = at_most(param->rnr_retry_count, RETRY_FOR_EVER),
	};
}

uint32_t rn_cm_random_psn(void)
{
	uint32_t psn = 0;

	if (getrandom(&psn, sizeof psn, GRND_NONBLOCK) < 0)
		psn = (uint32_t)rn_now_ns();
	return psn & 0xffffff;
}

/* More private data than the answer has room for is found when the answer is made. As with a kernel's
 * rdma_cm, that costs the request: who asked is refused, and there is nothing left to accept. */
static void refuse(struct rn_cm_id *id)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_wire_phase(id->wire) == RN_WIRE_REQ_RECEIVED)
		rn_wire_reject(id->wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_qp_fail(id);
}

/* Who asked has gone meanwhile? No matter: nobody is told of it, either. */
static int accept_datagrams(struct rn_cm_id *id, const struct rdma_conn_param *param)
{
	struct rn_cm_param wire_param = to_send(id, param);
	int error = 0;

	pthread_mutex_lock(&rn_cm_lock);
	id->terms.local_qpn = id->id.qp ? id->id.qp->qp_num : param->qp_num & 0xffffff;
	if (id->wire && rn_wire_phase(id->wire) == RN_WIRE_REQ_RECEIVED)
		rn_wire_accept_datagrams(id->wire, &wire_param, id->qkey);
	else if (id->wire)
		error = EINVAL;
	pthread_mutex_unlock(&rn_cm_lock);
	if (error)
		return rn_cm_error(error);
	rn_cm_put_event(id);
	return 0;
}

RN_EXPORT int rdma_accept(struct rdma_cm_id *rdma_id, struct rdma_conn_param *param)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	uint8_t private_max = rn_cm_is_datagram(id) ? RN_CM_SIDR_REP_PRIVATE : UINT8_MAX; /* the latter: below */
	struct rn_cm_param wire_param = to_send(id, param);
	struct rn_cm_terms *terms = &id->terms;
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!is_valid(param, private_max) || id->state != RN_CM_CONNECTION || (!rdma_id->qp && !param))
		return rn_cm_error(EINVAL);
	if (rn_cm_is_datagram(id))
		return accept_datagrams(id, param);
	pthread_mutex_lock(&rn_cm_lock);
	if (!id->wire)
		error = ECONNRESET; /* it went away meanwhile; an event says so, too */
	else if (rn_wire_phase(id->wire) != RN_WIRE_REQ_RECEIVED)
		error = EINVAL;
	pthread_mutex_unlock(&rn_cm_lock);
	if (error)
		return rn_cm_error(error);
	if (param && param->private_data_len > RN_CM_REP_PRIVATE) {
		refuse(id);
		return rn_cm_error(EINVAL);
	}

	/* The request's terms are in place already: what it offered. */
	if (param && param->responder_resources != RDMA_MAX_RESP_RES)
		terms->responder_resources = param->responder_resources;
	if (param && param->initiator_depth != RDMA_MAX_INIT_DEPTH)
		terms->initiator_depth = param->initiator_depth;
	terms->local_qpn = rdma_id->qp ? rdma_id->qp->qp_num : param->qp_num;
	if (rdma_id->qp && rn_settings.iwarp)
		rn_qp(rdma_id->qp)->is_passive = true;
	error = rn_cm_qp_connect(id);
	if (error) {
		rn_cm_qp_fail(id);
		return rn_cm_error(error);
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_wire_phase(id->wire) == RN_WIRE_REQ_RECEIVED)
		rn_wire_accept(id->wire, &wire_param);
	else
		error = ECONNRESET;
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT int rdma_reject(struct rdma_cm_id *rdma_id, const void *private_data, uint8_t length)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (length > (rn_cm_is_datagram(id) ? RN_CM_SIDR_REP_PRIVATE : RN_CM_REJ_PRIVATE) || (length && !private_data))
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state != RN_CM_CONNECTION)
		error = EINVAL;
	else if (!id->wire)
		error = ECONNRESET;
	else if (rn_wire_phase(id->wire) != RN_WIRE_REQ_RECEIVED && rn_wire_phase(id->wire) != RN_WIRE_REP_RECEIVED)
		error = EINVAL;
	else
		rn_wire_reject(id->wire, RN_REJ_CONSUMER_DEFINED, private_data, length);
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : 0;
}

/* For the reason that options were not to the liking of who was asked; here they never are a reason. */
RN_EXPORT int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length);
RN_EXPORT int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
	return rdma_reject(id, private_data, length);
}

/* Data has come before the active side's word that it is ready (RTU): take it for that. */
RN_EXPORT int rdma_notify(struct rdma_cm_id *rdma_id, enum ibv_event_type event)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (event != IBV_EVENT_COMM_EST)
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	if (!id->wire)
		error = EINVAL;
	else if (rn_wire_phase(id->wire) == RN_WIRE_REP_SENT)
		rn_wire_force_established(id->wire);
	else if (rn_wire_phase(id->wire) != RN_WIRE_ESTABLISHED)
		error = EINVAL;
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : 0;
}

/* --- the active side ---------------------------------------------------------------------------- */

/* Chaos has it that nobody answers there, or that nobody listens. With rn_cm_lock held. 0 or errno. */
static int tell_unreachable(struct rn_cm_id *id, int fault)
{
	bool is_refused = fault == ECONNREFUSED && !rn_cm_is_datagram(id);

	if (!is_refused)
		return rn_cm_tell(id, RDMA_CM_EVENT_UNREACHABLE, -fault) ? 0 : ENOMEM;
	return rn_cm_tell(id, RDMA_CM_EVENT_REJECTED,
			  rn_settings.iwarp ? -ECONNREFUSED : RN_REJ_INVALID_SERVICE_ID) ? 0 : ENOMEM;
}

RN_EXPORT int rdma_connect(struct rdma_cm_id *rdma_id, struct rdma_conn_param *param)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	struct rn_cm_param wire_param = to_send(id, param);
	struct rn_cm_terms *terms = &id->terms;
	int error = 0, fault;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	if (!is_valid(param, rn_cm_is_datagram(id) ? RN_CM_SIDR_REQ_PRIVATE : RN_CM_REQ_PRIVATE) ||
	    (!rdma_id->qp && !param && !rn_cm_is_datagram(id)))
		return rn_cm_error(EINVAL);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->state != RN_CM_ROUTE_RESOLVED) {
		error = EINVAL;
	} else {
		terms->local_qpn = rdma_id->qp ? rdma_id->qp->qp_num : param ? param->qp_num : 0;
		terms->local_psn = rn_cm_random_psn();
		terms->responder_resources = at_most(param ? param->responder_resources : RDMA_MAX_RESP_RES,
						     RN_MAX_RD_ATOMIC);
		terms->initiator_depth = at_most(param ? param->initiator_depth : RDMA_MAX_INIT_DEPTH,
						 RN_MAX_RD_ATOMIC);
		terms->retry_count = at_most(param ? param->retry_count : 7, 7);
		fault = rn_chaos_call(rn_context(rn_cm_context()), RN_CONNECT);
		error = fault ? tell_unreachable(id, fault) : rn_wire_connect(id, &wire_param);
		if (!error)
			id->state = RN_CM_CONNECTION;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

/* For programs that move their queue pair themselves, after CONNECT_RESPONSE. */
RN_EXPORT int rdma_establish(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	int error = 0;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	pthread_mutex_lock(&rn_cm_lock);
	if (rdma_id->qp || id->state != RN_CM_CONNECTION) {
		error = EINVAL;
	} else if (!id->wire) {
		error = ECONNRESET;
	} else if (rn_wire_phase(id->wire) != RN_WIRE_REP_RECEIVED) {
		error = EINVAL;
	} else {
		rn_wire_ready_to_use(id->wire);
		id->was_connected = true;
	}
	pthread_mutex_unlock(&rn_cm_lock);
	return error ? rn_cm_error(error) : 0;
}

/* --- both --------------------------------------------------------------------------------------- */

/*
 * After the peer's own disconnection it only takes the queue pair to ERR. Who has accepted is connected: the peer's
 * data may be there before its RTU, which goes another way.
 */
RN_EXPORT int rdma_disconnect(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	bool was_connected, told;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	pthread_mutex_lock(&rn_cm_lock);
	was_connected = id->was_connected || (id->wire && rn_wire_disconnect_accepted(id->wire));
	pthread_mutex_unlock(&rn_cm_lock);
	if (!was_connected)
		return rn_cm_error(EINVAL);
	rn_cm_qp_fail(id);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_wire_phase(id->wire) == RN_WIRE_ESTABLISHED)
		rn_wire_disconnect(id->wire);
	/* Only then is there an event to wait for. */
	told = !(id->wire && (rn_wire_phase(id->wire) == RN_WIRE_DREQ_SENT ||
			      rn_wire_phase(id->wire) == RN_WIRE_REP_SENT)) &&
	       !rn_cm_event_find(id, RDMA_CM_EVENT_DISCONNECTED);
	pthread_mutex_unlock(&rn_cm_lock);
	return told ? 0 : rn_cm_complete(id);
}
