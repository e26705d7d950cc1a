/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls that connect and disconnect: listen, accept and reject; connect and establish; and what both sides do.
 *
 * Each changes the identifier's state, queues a message on its wire (message.c), and returns.
 */
#include "cm/cm.h"
#include "cm/wire.h"

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
	id->accepting = (struct rn_source){.fd = id->bound_fd, .ready = rn_cm_listen_ready};
	id->accept_retry = (struct rn_timer){.fire = rn_cm_listen_retry};

	if (rn_cm_listen(id))
		return -1;
	pthread_mutex_lock(&rn_cm_lock);
	id->state = RN_CM_LISTENING;
	error = -rn_source_add(&id->accepting, EPOLLIN);
	if (error)
		id->state = RN_CM_BOUND;
	else
		rn_cm_listener_begins(id);
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

/* Too much private data for the answer is noticed when the answer is made. As with a kernel's rdma_cm, that costs the
 * request: the client is refused, and nothing is left to accept. */
static void refuse(struct rn_cm_id *id)
{
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REQ_RECEIVED)
		rn_cm_wire_reject(id->wire, RN_REJ_CONSUMER_DEFINED, NULL, 0);
	rn_cm_unlock();
	rn_cm_qp_fail(id);
}

/* If the client has gone meanwhile, that is no error: the program is not told either. */
static int accept_datagrams(struct rn_cm_id *id, const struct rdma_conn_param *param)
{
	struct rn_cm_param wire_param = to_send(id, param);
	int error = 0;

	pthread_mutex_lock(&rn_cm_lock);
	id->terms.local_qpn = id->id.qp ? id->id.qp->qp_num : param->qp_num & 0xffffff;
	if (id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REQ_RECEIVED)
		rn_cm_wire_accept_datagrams(id->wire, &wire_param, id->qkey);
	else if (id->wire)
		error = EINVAL;
	rn_cm_unlock();
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
		error = ECONNRESET; /* it has gone meanwhile, which an event reports as well */
	else if (rn_cm_wire_phase(id->wire) != RN_CM_WIRE_REQ_RECEIVED)
		error = EINVAL;
	pthread_mutex_unlock(&rn_cm_lock);
	if (error)
		return rn_cm_error(error);
	if (param && param->private_data_len > RN_CM_REP_PRIVATE) {
		refuse(id);
		return rn_cm_error(EINVAL);
	}

	/* The terms are set already, as the request offered them. */
	if (param && param->responder_resources != RDMA_MAX_RESP_RES)
		terms->responder_resources = param->responder_resources;
	if (param && param->initiator_depth != RDMA_MAX_INIT_DEPTH)
		terms->initiator_depth = param->initiator_depth;
	terms->local_qpn = rdma_id->qp ? rdma_id->qp->qp_num : param->qp_num;
	if (rdma_id->qp && rn_settings.iwarp)
		rn_qp(rdma_id->qp)->iwarp.is_passive = true;
	error = rn_cm_qp_connect(id);
	if (error) {
		rn_cm_qp_fail(id);
		return rn_cm_error(error);
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REQ_RECEIVED)
		rn_cm_wire_accept(id->wire, &wire_param);
	else
		error = ECONNRESET;
	rn_cm_unlock_and_send();
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
	else if (rn_cm_wire_phase(id->wire) != RN_CM_WIRE_REQ_RECEIVED &&
		 rn_cm_wire_phase(id->wire) != RN_CM_WIRE_REP_SENT &&
		 rn_cm_wire_phase(id->wire) != RN_CM_WIRE_REP_RECEIVED)
		error = EINVAL;
	else
		rn_cm_wire_reject(id->wire, RN_REJ_CONSUMER_DEFINED, private_data, length);
	rn_cm_unlock();
	return error ? rn_cm_error(error) : 0;
}

/* It rejects because of the peer's options, which are never a reason here. */
RN_EXPORT int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length);
RN_EXPORT int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
	return rdma_reject(id, private_data, length);
}

/* Data has come before the active side's RTU: take it for the RTU. */
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
	else if (rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REP_SENT)
		rn_cm_wire_notified(id->wire);
	else if (rn_cm_wire_phase(id->wire) != RN_CM_WIRE_ESTABLISHED)
		error = EINVAL;
	rn_cm_unlock_and_send();
	return error ? rn_cm_error(error) : 0;
}

/* --- the active side ---------------------------------------------------------------------------- */

/* Fault injection may decide that nobody answers there, or that nobody listens. With rn_cm_lock held. 0 or errno. */
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
		fault = rn_device_check(rn_context(rn_cm_context()), RN_CONNECT);
		error = fault ? tell_unreachable(id, fault) : rn_cm_wire_connect(id, &wire_param);
		if (!error)
			id->state = RN_CM_CONNECTION;
	}
	rn_cm_unlock_and_send();
	return error ? rn_cm_error(error) : rn_cm_complete(id);
}

RN_EXPORT int rdmanet_soft_cm_by_name_alone(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	id->by_name_alone = true;
	return 0;
}

/* For programs that modify their queue pair themselves, after CONNECT_RESPONSE. */
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
	} else if (rn_cm_wire_phase(id->wire) != RN_CM_WIRE_REP_RECEIVED) {
		error = EINVAL;
	} else {
		rn_cm_wire_ready_to_use(id->wire);
		id->was_connected = true;
	}
	rn_cm_unlock();
	return error ? rn_cm_error(error) : 0;
}

/* --- both --------------------------------------------------------------------------------------- */

/*
 * After the peer's own disconnection it only takes the queue pair to ERR. A side that has accepted counts as connected:
 * the peer's data may arrive before its RTU, which takes another path.
 */
RN_EXPORT int rdma_disconnect(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);
	bool was_connected, told;

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	pthread_mutex_lock(&rn_cm_lock);
	was_connected = id->was_connected || (id->wire && rn_cm_wire_disconnect_accepted(id->wire));
	pthread_mutex_unlock(&rn_cm_lock);
	if (!was_connected)
		return rn_cm_error(EINVAL);
	rn_cm_qp_fail(id);
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire && rn_cm_wire_phase(id->wire) == RN_CM_WIRE_ESTABLISHED)
		rn_cm_wire_disconnect(id->wire);
	/* Only in this case will an event come. */
	told = !(id->wire && (rn_cm_wire_phase(id->wire) == RN_CM_WIRE_DREQ_SENT ||
			      rn_cm_wire_phase(id->wire) == RN_CM_WIRE_REP_SENT)) &&
	       !rn_cm_event_find(id, RDMA_CM_EVENT_DISCONNECTED);
	rn_cm_unlock_and_send();
	return told ? 0 : rn_cm_complete(id);
}

RN_EXPORT int rdmanet_soft_cm_leave(struct rdma_cm_id *rdma_id)
{
	struct rn_cm_id *id = rn_cm_id(rdma_id);

	if (id->epoch != rn_epoch())
		return rn_cm_error(EBADF);
	rn_cm_qp_fail(id);
	rn_cm_link_hear_mail(); /* who has left already need not be told */
	pthread_mutex_lock(&rn_cm_lock);
	if (id->wire)
		rn_cm_wire_abandon(id->wire);
	rn_cm_unlock_and_send();
	return 0;
}
