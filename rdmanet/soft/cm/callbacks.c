/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the engine calls for a wire: its socket is ready, its time is up, the program has changed something, the peer's
 * process is linked or dead, or another connection needs its descriptor.  Each ends by getting on (rn_cm_wire_get_on).
 */
#include "base/guard.h"
#include "cm/wire.h"
#include "peer/peer.h"

#include <stdlib.h>

static void let_go(struct rn_cm_wire *wire)
{
	rn_cm_wire_close_socket(wire);
	if (wire->watched)
		rn_peer_unwatch_death(&wire->death);
	wire->watched = wire->moved = false;
}

void rn_cm_wire_sweep(struct rn_cm_wire *wire)
{
	bool waits, is_over;

	pthread_mutex_lock(&rn_cm_lock);
	is_over = wire->over;
	pthread_mutex_unlock(&rn_cm_lock);
	if (!is_over)
		return;
	rn_cm_link_end(wire);
	pthread_mutex_lock(&rn_cm_lock);
	rn_cm_handover_forget(wire);
	rn_cm_wire_unname(wire);
	rn_cm_asked_look(wire);
	rn_cm_asked_forget(wire);
	waits = wire->id != NULL; /* see rn_cm_wire_finish() */
	if (waits) {
		wire->over = false;
		wire->in_length = 0;
	} else {
		rn_list_del(&wire->link);
	}
	pthread_mutex_unlock(&rn_cm_lock);

	rn_cm_first_forget(wire);
	rn_stranger_forget(&wire->stranger);
	let_go(wire);
	if (waits) {
		rn_cm_wire_set_timer_ms(wire, rn_settings.timewait_ms);
		return;
	}
	rn_timer_cancel(&wire->timer);
	rn_task_cancel(&wire->task);
	free(wire);
}

/* --- strangers ------------------------------------------------------------------------------------ */

enum { NO_STRANGER = -1 };

/* rn_cm_lock held. */
static int kind_of(const struct rn_cm_wire *wire)
{
	switch (wire->phase) {
	case RN_CM_WIRE_ACCEPTED:
	case RN_CM_WIRE_CHALLENGED:
		return RN_STRANGER_SILENT;
	case RN_CM_WIRE_PROVEN:
	case RN_CM_WIRE_REP_SENT:
		return RN_STRANGER_KNOWN;
	default:
		return NO_STRANGER;
	}
}

static void leave(struct rn_stranger *stranger)
{
	struct rn_cm_wire *wire = RN_OWNER(stranger, struct rn_cm_wire, stranger);
	bool stays, is_said;

	if (wire->side)
		rn_cm_link_hear_late(wire);
	else if (stranger->kind == RN_STRANGER_KNOWN)
		rn_cm_wire_receive(wire); /* its RTU may lie there, too */
	pthread_mutex_lock(&rn_cm_lock);
	stays = wire->over || kind_of(wire) == NO_STRANGER;
	is_said = !wire->out_length && !wire->sending_length;
	pthread_mutex_unlock(&rn_cm_lock);
	if (stays) {
		rn_task_post(&wire->task);
		return;
	}
	if (is_said && !wire->side)
		rn_cm_say_no(wire->source.fd, RN_REJ_NO_RESOURCES);
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && wire->side)
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_CONSUMER_DEFINED);
	if (!wire->over && wire->side)
		rn_cm_wire_say_reject(wire, RN_REJ_NO_RESOURCES, NULL, 0);
	else if (!wire->over)
		rn_cm_wire_lost(wire, 0);
	pthread_mutex_unlock(&rn_cm_lock);
	if (wire->side)
		rn_cm_link_flush(wire);
	rn_cm_wire_sweep(wire);
}

void rn_cm_wire_look(struct rn_cm_wire *wire)
{
	int kind;

	pthread_mutex_lock(&rn_cm_lock);
	kind = wire->over ? NO_STRANGER : kind_of(wire);
	wire->stranger.has_spoken = wire->phase != RN_CM_WIRE_ACCEPTED;
	rn_cm_asked_look(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	if (kind == NO_STRANGER || (kind == RN_STRANGER_KNOWN && !rn_guarded(RN_GUARD_HALF_OPEN)))
		rn_stranger_forget(&wire->stranger);
	else if (kind == RN_STRANGER_KNOWN && !(wire->stranger.link && wire->stranger.kind == kind))
		rn_stranger_add(&wire->stranger, RN_STRANGER_KNOWN);
}

/* --- what the engine calls ------------------------------------------------------------------------ */

/* Whose death is to be known is known since its answer, or ours. */
static void watch(struct rn_cm_wire *wire)
{
	uint16_t port;

	pthread_mutex_lock(&rn_cm_lock);
	port = wire->over ? 0 : wire->watch_port;
	wire->watch_port = 0;
	pthread_mutex_unlock(&rn_cm_lock);
	if (port && !wire->watched)
		wire->watched = !rn_peer_watch_death(port, &wire->death);
}

void rn_cm_wire_get_on(struct rn_cm_wire *wire)
{
	rn_cm_wire_look(wire);
	watch(wire);
	rn_cm_handover_begin(wire);
	rn_cm_wire_flush(wire);
	rn_cm_handover_go_on(wire);
	rn_cm_first_look(wire);
	rn_cm_wire_sweep(wire);
}

static void ready(struct rn_source *source, uint32_t epoll_events)
{
	struct rn_cm_wire *wire = RN_OWNER(source, struct rn_cm_wire, source);

	if (wire->connecting)
		rn_cm_wire_connected(wire);
	else if (epoll_events & ~(uint32_t)EPOLLOUT)
		rn_cm_wire_receive(wire);
	rn_cm_wire_get_on(wire);
}

static void changed(struct rn_task *task)
{
	struct rn_cm_wire *wire = RN_OWNER(task, struct rn_cm_wire, task);
	bool start;

	pthread_mutex_lock(&rn_cm_lock);
	start = !wire->over && wire->connecting && !wire->source.slot && !wire->again;
	pthread_mutex_unlock(&rn_cm_lock);
	if (start)
		rn_cm_wire_connect_socket(wire);
	rn_cm_link_digest(wire);
	rn_cm_wire_get_on(wire);
}

static void peer_died(struct rn_death *death, bool failed)
{
	struct rn_cm_wire *wire = RN_OWNER(death, struct rn_cm_wire, death);
	bool goes_on;

	if (failed) { /* its memory can't be reached, but it lives */
		rn_cm_first_forget(wire);
		return;
	}
	/* What it sent before is still to be read: it may have connected, or disconnected, and then ended. */
	if (!wire->moved && !wire->connecting && wire->source.fd >= 0)
		rn_cm_wire_receive(wire);
	rn_cm_link_digest(wire);
	goes_on = rn_cm_ask_may_go_on(wire);
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && goes_on) {
		rn_cm_ask_by_socket(wire);
	} else if (!wire->over) {
		wire->hung_up = true;
		rn_cm_wire_lost(wire, 0);
	}
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_wire_sweep(wire);
}

/* The socket may not be needed any more. */
static void peer_linked(struct rn_death *death)
{
	rn_task_post(&RN_OWNER(death, struct rn_cm_wire, death)->task);
}

/* The time limit of this phase has passed. With rn_cm_lock held. */
static void end_phase(struct rn_cm_wire *wire)
{
	switch (wire->phase) {
	case RN_CM_WIRE_ACCEPTED:
	case RN_CM_WIRE_CHALLENGED:
	case RN_CM_WIRE_PROVEN:
		rn_cm_wire_drop(wire, RN_WARN_SILENCE, "it stopped answering");
		break;
	case RN_CM_WIRE_HELLO_SENT:
	case RN_CM_WIRE_REQ_SENT:
		if (!wire->is_ours) {
			rn_cm_wire_not_ours(wire, "it accepts connections but sends nothing");
			break;
		}
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_CONNECTING:
	case RN_CM_WIRE_REP_SENT:
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_DREQ_SENT:
		rn_cm_wire_lost(wire, 0);
		break;
	case RN_CM_WIRE_TIMEWAIT:
		if (wire->id)
			rn_cm_tell(wire->id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_CLOSING:
		rn_cm_wire_finish(wire);
		break;
	case RN_CM_WIRE_REQ_RECEIVED: /* the program may take any time, but the peer should know that it does */
		rn_cm_wire_say(wire, RN_CM_MRA);
		break;
	case RN_CM_WIRE_ESTABLISHED:
		if (wire->source.fd < 0 && !wire->peer_moved)
			rn_cm_wire_lost(wire, 0);
		rn_cm_handover_timer(wire);
		break;
	case RN_CM_WIRE_REP_RECEIVED:
		break; /* the program may take any time */
	}
}

static void timed_out(struct rn_timer *timer)
{
	struct rn_cm_wire *wire = RN_OWNER(timer, struct rn_cm_wire, timer);
	bool again;

	pthread_mutex_lock(&rn_cm_lock);
	again = wire->again && !wire->over && wire->phase == RN_CM_WIRE_CONNECTING;
	pthread_mutex_unlock(&rn_cm_lock);
	wire->again = false;
	if (again) {
		rn_cm_wire_connect_socket(wire);
		rn_cm_wire_flush(wire);
		rn_cm_wire_sweep(wire);
		return;
	}
	rn_cm_link_hear_late(wire);
	pthread_mutex_lock(&rn_cm_lock);
	/* The program may have gone on meanwhile, by accepting or rejecting: then the timer is that phase's. */
	if (!wire->over && !wire->timer.is_set)
		end_phase(wire);
	pthread_mutex_unlock(&rn_cm_lock);
	rn_cm_wire_get_on(wire);
}

const struct rn_cm_wire_calls rn_cm_wire_calls = {
	.ready = ready,
	.fire = timed_out,
	.run = changed,
	.dead = peer_died,
	.linked = peer_linked,
	.leave = leave,
};
