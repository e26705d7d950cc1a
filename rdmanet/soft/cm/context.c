/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one context of the connection manager, which identifiers have as their `verbs`.
 *
 * The first user opens it, and holds the engine with it; after the last it is closed, unless the program still has
 * objects on it or got it from rdma_get_devices.  When its device has failed, later users get a new one, and
 * earlier users keep the old one.
 */
#include <fcntl.h>
#include <stdlib.h>

#include "base/gid.h"
#include "cm/cm.h"
#include "objects/xrc.h"

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

/* Objects of the parent's context are recognised as foreign by their own mark; here the context is forgotten. */
static void forget_in_child(void)
{
	pthread_mutex_init(&shared.lock, NULL);
	shared.users = 0;
	shared.context = NULL;
	shared.pd = NULL;
	shared.xrcd = NULL;
	shared.dead = NULL;
	shared.handed_out = false;
}

static void (*start)(void);

void rn_cm_context_at_first(void (*what)(void))
{
	start = what;
}

static void start_once(void)
{
	rn_at_fork_child(forget_in_child);
	start();
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

/* Does the program still have objects on it? It may, since it does not close this context itself. */
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

/* With shared.lock held. A device that has failed works when it is opened anew; users of the old context keep it. */
static void renew(void)
{
	struct dead *dead;
	struct ibv_context *context;

	if (!shared.context || !rn_context_is_dead(shared.context) || !(dead = malloc(sizeof(*dead))))
		return;
	context = open_device();
	if (context && rn_context_is_dead(context)) { /* under faults for the whole process every new one is dead too */
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
	if (!rn_context_is_dead(shared.context))
		return;
	pthread_mutex_lock(&shared.lock);
	renew();
	pthread_mutex_unlock(&shared.lock);
}

/* With shared.lock held, and without users. A context on which the program still has objects is left to it. */
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

void rn_cm_context_less(void)
{
	shared.users--;
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
