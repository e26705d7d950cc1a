/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that contexts hold: how peers call it, and what it ends with.
 *
 * It starts with the first queue pair of the process, and ends with the last context that has had one.  Peers that leave
 * work for us signal channel 0, the wakeup.
 */
#include <sys/eventfd.h>

#include "base/gid.h"
#include "objects/cq_inside.h"
#include "objects/own_look.h"
#include "objects/qp.h"

/* --- the wakeup ------------------------------------------------------------------------------------------ */

static void woken_up(struct rn_source *source, uint32_t events)
{
	(void)events;
	if (rn_eventfd_take(source->fd)) {
		rn_qp_process_pending_all();
		rn_cq_process_pending_all();
	}
}

static struct rn_source wakeup = {.fd = -1, .ready = woken_up};

/* 0 or errno. */
static int open_wakeup(void)
{
	int err;

	wakeup = (struct rn_source){.fd = rn_fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), .ready = woken_up};
	if (wakeup.fd < 0)
		return errno;
	err = -rn_source_add(&wakeup, EPOLLIN);
	if (err)
		rn_fd_close(wakeup.fd);
	else
		rn_channel_set_wakeup(wakeup.fd);
	return err;
}

static void close_wakeup(void)
{
	rn_source_remove(&wakeup);
	rn_channel_set_wakeup(-1);
	rn_fd_close(wakeup.fd);
}

/* --- holding and releasing ------------------------------------------------------------------------------- */

/* Serialises starting and stopping our work on the engine. Not rn_process_lock: stopping waits for callbacks, which
 * take that lock. */
static pthread_mutex_t engine_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned engine_users;

int rn_context_engine(struct rn_context *context)
{
	int err = 0;

	pthread_mutex_lock(&engine_mutex);
	if (!context->has_engine) {
		err = -rn_engine_hold();
		if (!err && !engine_users && (err = open_wakeup()))
			rn_engine_release();
		if (!err) {
			engine_users++;
			context->has_engine = true;
			rn_gid_watch();
		}
	}
	pthread_mutex_unlock(&engine_mutex);
	return err;
}

void rn_context_release_engine(struct rn_context *context)
{
	pthread_mutex_lock(&engine_mutex);
	if (context->has_engine) {
		if (!--engine_users) {
			rn_own_close();
			rn_qp_close();
			close_wakeup();
		}
		rn_engine_release();
	}
	pthread_mutex_unlock(&engine_mutex);
}

void rn_context_forked(void)
{
	pthread_mutex_init(&engine_mutex, NULL);
	engine_users = 0;
}

/* --- the port ------------------------------------------------------------------------------------- */

void rn_port_event(enum ibv_event_type type)
{
	pthread_mutex_lock(&rn_process_lock);
	for (struct rn_list *at = rn_contexts.next; at != &rn_contexts; at = at->next)
		rn_event_raise(container_of(at, struct rn_context, link), type, NULL);
	pthread_mutex_unlock(&rn_process_lock);
}
