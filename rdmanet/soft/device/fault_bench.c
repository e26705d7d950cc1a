/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault bench: setting faults, and what a context does when its link or the device fails (faults/fault.h).
 *
 * Locks.  `setting` serialises the setting of faults, and comes before all others; each context's faults have
 * a lock of their own, which comes after all others and is held for a look at the rules.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "device/fault_bench.h"
#include "objects/eager.h"

static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER;
static struct rn_injector *all;
static char *text_for_all; /* that the program has set for every context; NULL: the environment's */

static struct rn_context *context_of(struct rn_injector *injector)
{
	return container_of(injector, struct rn_context, injector);
}

/* --- the link ------------------------------------------------------------------------------------------ */

static void plug_all(struct rn_context *context, bool is_down)
{
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_qp *qp = container_of(at, struct rn_qp, link);

		rn_lock(&qp->sq_lock);
		rn_qp_plug(qp, is_down);
		rn_unlock(&qp->sq_lock);
	}
}

/* With the context's mutex held. */
static void turn_link(struct rn_context *context, bool down)
{
	if (rn_fault_link_is_down(&context->injector) == down)
		return;
	/* A sender that finds the link up sends at once, and must find all receivers connected. */
	if (!down)
		plug_all(context, down);
	atomic_store(&context->injector.link_is_down, down);
	plug_all(context, down);
	rn_faults_happened += down;
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_qp *qp = container_of(at, struct rn_qp, link);

		rn_task_post(&qp->task);
	}
	rn_event_raise(context, down ? IBV_EVENT_PORT_ERR : IBV_EVENT_PORT_ACTIVE, NULL);
}

static void link_is_due(struct rn_timer *timer)
{
	struct rn_injector *injector = container_of(timer, struct rn_injector, timer);
	struct rn_context *context = context_of(injector);
	bool goes_down;

	pthread_mutex_lock(&context->mutex);
	goes_down = !rn_fault_link_is_down(injector);
	turn_link(context, goes_down);
	if (goes_down && injector->faults.link_for_ns)
		rn_timer_set(timer, injector->faults.link_for_ns);
	pthread_mutex_unlock(&context->mutex);
}

/* --- the device's end ----------------------------------------------------------------------------------- */

/* With the context's mutex held. */
static void die(struct rn_context *context)
{
	if (atomic_exchange(&context->injector.is_dead, true))
		return;
	rn_faults_happened++;
	rn_event_raise(context, IBV_EVENT_DEVICE_FATAL, NULL);
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_qp *qp = container_of(at, struct rn_qp, link);

		rn_lock(&qp->sq_lock);
		rn_qp_fail(qp);
		rn_unlock(&qp->sq_lock);
	}
}

static void end_is_due(struct rn_timer *timer)
{
	struct rn_context *context = context_of(container_of(timer, struct rn_injector, end));

	pthread_mutex_lock(&context->mutex);
	die(context);
	pthread_mutex_unlock(&context->mutex);
}

/* --- setting them ---------------------------------------------------------------------------------------- */

/* With `setting` held. 0 or errno. */
static int apply(struct rn_context *context, const struct rn_faults *faults)
{
	struct rn_injector *injector = &context->injector;
	bool is_later = faults->link_down && faults->link_after_ns;
	int err = faults->link_down || faults->is_fatal ? rn_context_engine(context) : 0;

	if (err)
		return err;
	if (injector->timer.fire)
		rn_timer_cancel(&injector->timer);
	if (injector->end.fire)
		rn_timer_cancel(&injector->end);
	injector->timer.fire = link_is_due;
	injector->end.fire = end_is_due;
	pthread_mutex_lock(&context->mutex);
	rn_lock(&injector->lock);
	injector->faults = *faults;
	atomic_store(&injector->may_overrun, faults->overrun != 0);
	injector->completions = 0;
	injector->qps = 0;
	rn_unlock(&injector->lock);
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next)
		rn_qp_take_faults(container_of(at, struct rn_qp, link));
	turn_link(context, faults->link_down && !is_later);
	if (faults->is_fatal && !faults->fatal_after_ns)
		die(context);
	pthread_mutex_unlock(&context->mutex);
	if (faults->is_fatal && faults->fatal_after_ns)
		rn_timer_set(&injector->end, faults->fatal_after_ns);
	if (is_later)
		rn_timer_set(&injector->timer, faults->link_after_ns);
	else if (faults->link_down && faults->link_for_ns)
		rn_timer_set(&injector->timer, faults->link_for_ns);
	return 0;
}

/* RDMANET_SOFT_DEFER is a delay for everything. */
static void add_defer(struct rn_faults *faults)
{
	if (!rn_settings.defer_ns || faults->count == RN_RULES_MAX)
		return;
	faults->rules[faults->count++] = (struct rn_rule){
		.action = RN_DELAY,
		.first = 1,
		.last = UINT64_MAX,
		.low = rn_settings.defer_ns,
		.high = rn_settings.defer_ns,
		.is_setting = true,
	};
	faults->is_set = true;
}

static const char *text_of_environment(void)
{
	const char *text = getenv("RDMANET_SOFT_CHAOS");

	return text ? text : "";
}

int rn_fault_bench_open(struct rn_context *context)
{
	struct rn_injector *injector = &context->injector;
	struct rn_faults faults;
	char error[512];
	const char *text;
	int err = EINVAL;

	pthread_mutex_lock(&setting);
	text = text_for_all ? text_for_all : text_of_environment();
	if (rn_faults_read(text, &faults, error, sizeof(error))) {
		add_defer(&faults);
		err = apply(context, &faults);
	} else {
		fprintf(stderr, "rdmanet soft0: RDMANET_SOFT_CHAOS: %s\n", error);
	}
	if (!err) {
		injector->next = all;
		injector->link = &all;
		if (all)
			all->link = &injector->next;
		all = injector;
	}
	pthread_mutex_unlock(&setting);
	return err;
}

void rn_fault_bench_close(struct rn_context *context)
{
	struct rn_injector *injector = &context->injector;

	pthread_mutex_lock(&setting);
	if (injector->link)
		*injector->link = injector->next;
	if (injector->next)
		injector->next->link = injector->link;
	rn_timer_cancel(&injector->timer);
	rn_timer_cancel(&injector->end);
	pthread_mutex_unlock(&setting);
}

RN_EXPORT int rdmanet_soft_chaos(struct ibv_context *ibv_context, const char *text, char *error, size_t size)
{
	char *kept = ibv_context || !text ? NULL : strdup(text), none[1];
	struct rn_faults faults;
	int err = 0;

	if (ibv_context ? rn_is_foreign(ibv_context) : text && !kept) {
		free(kept);
		return ibv_context ? ENODEV : ENOMEM;
	}
	if (!text)
		text = text_of_environment();
	if (!rn_faults_read(text, &faults, size ? error : none, size ? size : sizeof(none))) {
		free(kept);
		return EINVAL;
	}
	pthread_mutex_lock(&setting);
	add_defer(&faults);
	if (ibv_context) {
		err = apply(rn_context(ibv_context), &faults);
	} else {
		free(text_for_all);
		text_for_all = kept;
		rn_faults_happened = 0;
		for (struct rn_injector *injector = all; injector && !err; injector = injector->next)
			err = apply(context_of(injector), &faults);
	}
	pthread_mutex_unlock(&setting);
	return err;
}

RN_EXPORT uint64_t rdmanet_soft_chaos_happened(void)
{
	return rn_faults_happened;
}

void rn_fault_bench_forked(void)
{
	pthread_mutex_init(&setting, NULL);
	all = NULL;
}
