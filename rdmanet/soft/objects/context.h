/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: what a program opens the device for, and the lists of all that it has made there. */
#pragma once

#include "base/counters.h"
#include "base/lock.h"
#include "base/process.h"
#include "base/settings.h"
#include "faults/fault.h"
#include "shm/limits.h"
#include "verbs.h"

struct rn_event {
	struct rn_list link;
	struct ibv_async_event event;
};

struct rn_context {
	struct verbs_context verbs;
	unsigned process;
	uint64_t file_device, file_inode; /* of cmd_fd: they identify a context that is imported */
	bool has_engine; /* holds it since its first queue pair */
	struct rn_list link;

	pthread_mutex_t mutex; /* the lists, and the user counts of the objects on them */
	struct rn_list pds, tds, ahs, mrs, mws, dms, channels, cqs, xrcds, srqs, qps;

	struct rn_lock event_lock;
	struct rn_list events; /* not read yet */
	struct rn_counters retired;
	struct rn_injector injector;
};

static inline struct rn_context *rn_context(struct ibv_context *context)
{
	return container_of(context, struct rn_context, verbs.context);
}
static inline bool rn_is_foreign(const struct ibv_context *context)
{
	return container_of(context, struct rn_context, verbs.context)->process != rn_process;
}

/* The counters of all contexts that are open in this process. counters.c */
void rn_context_sum(struct rn_counters *sum);

/* What an asynchronous event is about. event.c */
enum rn_concern { RN_CONCERNS_PORT, RN_CONCERNS_CQ, RN_CONCERNS_SRQ, RN_CONCERNS_QP };
enum rn_concern rn_event_concern(enum ibv_event_type type);
/* Queue an asynchronous event of a QP, a CQ or the port (element: NULL) for ibv_get_async_event. */
void rn_event_raise(struct rn_context *context, enum ibv_event_type type, void *element);
/* Before an object is destroyed: drop its unread events, and wait until those that were read are acknowledged. */
void rn_event_forget(struct rn_context *context, void *element, uint32_t *reported, uint32_t *completed,
		     pthread_mutex_t *mutex, pthread_cond_t *cond);

/* Initialise an empty context. 0 or errno. context.c */
int rn_context_init(struct rn_context *context);
/* Called once all its objects are gone. */
void rn_context_destroy(struct rn_context *context);
/* 0, or the errno for a call that the device does not support, that finds it dead, or that fault injection fails. */
int rn_device_check(struct rn_context *context, enum rn_call call);
/* Has the device died? Then every call fails with EIO. */
bool rn_context_is_dead(const struct ibv_context *context);
/* Hold the engine, from the context's first queue pair on. 0 or errno. context_engine.c */
int rn_context_engine(struct rn_context *context);
void rn_context_release_engine(struct rn_context *context);
void rn_context_forked(void);
/* An event of the port, to all contexts. */
void rn_port_event(enum ibv_event_type type);
