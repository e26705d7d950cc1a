/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault bench: setting faults, and what a context does when its link or the device fails (faults/fault.h).
 *
 * Locks.  `setting` serialises the setting of faults, and comes before all others; each context's faults have
 * a lock of their own, which comes after all others and is held for a look at the rules.
 *
 * Counts.  Each context counts the faults of its text (faults/fault.h). Those of the text that is for all contexts are
 * added up over them, and what contexts have counted that are closed, or have a text of their own now, is kept in
 * `counted`. Each text that is set has a number, its version, by which the contexts are known that it is for. While the
 * program sets none for all, the text is the environment's when a context opens; if that has changed, it is another.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/extras.h"
#include "device/fault_bench.h"
#include "objects/eager.h"

static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER;
static struct rn_injector *all;
static char *text_for_all; /* that the program has set for every context; NULL: the environment's */
static uint32_t versions;  /* given to texts so far */

/* The text that is for all contexts, while it is counted. */
static struct {
	char *text; /* NULL: none has been set, nor read from the environment */
	uint32_t version;
	uint64_t happened[RN_FAULTS_MAX];
} counted;

static struct rn_context *context_of(struct rn_injector *injector)
{
	return container_of(injector, struct rn_context, injector);
}

static void count(struct rn_injector *injector, unsigned place)
{
	rn_lock(&injector->lock);
	rn_fault_happened(injector, place);
	rn_unlock(&injector->lock);
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
	if (goes_down)
		count(injector, injector->faults.link_place);
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
	count(&context->injector, context->injector.faults.fatal_place);
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

/* With `setting` held: what a context has counted of the text for all is kept, before it counts anew or is gone. */
static void keep_counts(struct rn_injector *injector)
{
	rn_lock(&injector->lock);
	for (unsigned i = 0; i < RN_FAULTS_MAX && injector->version == counted.version; i++)
		counted.happened[i] += injector->happened[i];
	memset(injector->happened, 0, sizeof(injector->happened));
	rn_unlock(&injector->lock);
}

/* With `setting` held: this text is for all contexts from now on. 0, or ENOMEM. */
static int count_for_all(const char *text)
{
	char *kept = strdup(text);

	if (!kept)
		return ENOMEM;
	free(counted.text);
	counted.text = kept;
	counted.version = ++versions;
	memset(counted.happened, 0, sizeof(counted.happened));
	return 0;
}

/* With `setting` held. 0 or errno. own: the text, if it is for this context only; taken if there is no error. */
static int apply(struct rn_context *context, const struct rn_faults *faults, uint32_t version, char *own)
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
	keep_counts(injector);
	free(injector->text);
	injector->text = own;
	pthread_mutex_lock(&context->mutex);
	rn_lock(&injector->lock);
	injector->faults = *faults;
	injector->version = version;
	atomic_store(&injector->may_overrun, faults->overrun != 0);
	injector->completions = 0;
	injector->qps = 0;
	rn_unlock(&injector->lock);
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next)
		rn_qp_take_faults(container_of(at, struct rn_qp, link));
	turn_link(context, faults->link_down && !is_later);
	if (faults->link_down && !is_later)
		count(injector, faults->link_place);
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

/* With `setting` held: the text of a context that opens. */
static const char *text_for_next(void)
{
	return text_for_all ? text_for_all : text_of_environment();
}

enum { ERROR_MAX = 512 };

/* With `setting` held: the faults of a context that opens. 0, or EINVAL: the error was written. */
static int read_for_all(const char *text, struct rn_faults *faults, char error[ERROR_MAX])
{
	static const char name[] = "RDMANET_SOFT_CHAOS: ";

	memcpy(error, name, sizeof(name));
	if (rn_faults_read(text, faults, error + strlen(name), ERROR_MAX - strlen(name)))
		return 0;
	fprintf(stderr, "rdmanet soft0: %s\n", error);
	return EINVAL;
}

int rn_fault_bench_check(char *error, size_t size)
{
	struct rn_faults faults;
	char why[ERROR_MAX];
	int err;

	pthread_mutex_lock(&setting);
	err = read_for_all(text_for_next(), &faults, why);
	pthread_mutex_unlock(&setting);
	if (err)
		snprintf(error, size, "%s", why);
	return err;
}

int rn_fault_bench_open(struct rn_context *context)
{
	struct rn_injector *injector = &context->injector;
	struct rn_faults faults;
	const char *text;
	char error[ERROR_MAX];
	int err;

	pthread_mutex_lock(&setting);
	text = text_for_next();
	err = read_for_all(text, &faults, error);
	if (!err) {
		add_defer(&faults);
		err = counted.text && !strcmp(text, counted.text) ? 0 : count_for_all(text);
		if (!err)
			err = apply(context, &faults, counted.version, NULL);
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
	keep_counts(injector);
	free(injector->text);
	pthread_mutex_unlock(&setting);
}

/* With `setting` held: for all contexts, those to come included. 0 or errno. */
static int set_for_all(const char *text, const struct rn_faults *faults)
{
	char *kept = text ? strdup(text) : NULL;
	int err = text && !kept ? ENOMEM : count_for_all(text ? text : text_of_environment());

	if (err) {
		free(kept);
		return err;
	}
	free(text_for_all);
	text_for_all = kept;
	rn_faults_happened = 0;
	for (struct rn_injector *injector = all; injector && !err; injector = injector->next)
		err = apply(context_of(injector), faults, counted.version, NULL);
	return err;
}

static int set_for_one(struct rn_context *context, const char *text, const struct rn_faults *faults)
{
	char *own = strdup(text ? text : text_of_environment());
	int err = own ? apply(context, faults, ++versions, own) : ENOMEM;

	if (err)
		free(own);
	return err;
}

RN_EXPORT int rdmanet_soft_chaos(struct ibv_context *ibv_context, const char *text, char *error, size_t size)
{
	struct rn_faults faults;
	char none[1];
	int err;

	if (ibv_context && rn_is_foreign(ibv_context))
		return ENODEV;
	if (!rn_faults_read(text ? text : text_of_environment(), &faults, size ? error : none, size ? size : sizeof(none)))
		return EINVAL;
	pthread_mutex_lock(&setting);
	add_defer(&faults);
	err = ibv_context ? set_for_one(rn_context(ibv_context), text, &faults) : set_for_all(text, &faults);
	pthread_mutex_unlock(&setting);
	return err;
}

/* With `setting` held: is there a fault at this place of the text, and where? */
static bool find_fault(const char *text, unsigned place, struct rn_span *span)
{
	struct rn_faults faults;
	char none[1];

	if (!text || !rn_faults_read(text, &faults, none, sizeof(none)) || place >= faults.places)
		return false;
	*span = faults.spans[place];
	return true;
}

/* With `setting` held: how often it has happened in this context. */
static uint64_t counted_in(struct rn_injector *injector, unsigned place)
{
	uint64_t happened;

	rn_lock(&injector->lock);
	happened = injector->happened[place];
	rn_unlock(&injector->lock);
	return happened;
}

RN_EXPORT int rdmanet_soft_chaos_fault(struct ibv_context *ibv_context, unsigned place, char *text, size_t size,
				       uint64_t *happened)
{
	struct rn_injector *injector = ibv_context ? &rn_context(ibv_context)->injector : NULL;
	const char *of;
	struct rn_span span;
	int err = ENOENT;

	if (ibv_context && rn_is_foreign(ibv_context))
		return ENODEV;
	pthread_mutex_lock(&setting);
	/* A context that was opened with another environment has neither. */
	of = injector && injector->text ? injector->text
	     : !injector || injector->version == counted.version ? counted.text
								 : NULL;
	if (find_fault(of, place, &span)) {
		snprintf(text, size, "%.*s", (int)span.length, of + span.at);
		*happened = injector ? counted_in(injector, place) : counted.happened[place];
		for (struct rn_injector *at = injector ? NULL : all; at; at = at->next)
			*happened += at->version == counted.version ? counted_in(at, place) : 0;
		err = 0;
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
