/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault bench at work: see chaos.h.
 *
 * Locks.  `setting` serialises whoever sets faults, and comes before all others; each context's faults have
 * a lock of their own, which comes after all others and is held for a look at the rules.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "soft.h"

static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER;
static struct rn_chaos *all;
static _Atomic uint64_t happened; /* faults, since the last text for all */
static char *text_for_all; /* that the program has set for every context; NULL: the environment's */

static struct rn_context *context_of(struct rn_chaos *chaos)
{
	return container_of(chaos, struct rn_context, chaos);
}

/* --- chance ----------------------------------------------------------------------------------- */

/* splitmix64's finish: every bit of the input moves half of the output's. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* A number that depends on nothing but what is said here. */
static uint64_t draw(const struct rn_chaos *chaos, const struct rn_rule *rule, uint32_t qp, uint64_t number,
		     uint32_t try)
{
	uint64_t x = mix(chaos->faults.seed + 0x9e3779b97f4a7c15ull);

	x = mix(x ^ (uint64_t)(rule - chaos->faults.rules + 1) << 32 ^ qp);
	return mix(mix(x + number) + try);
}

static bool happens(const struct rn_chaos *chaos, const struct rn_rule *rule, uint32_t qp, uint64_t number,
		    uint32_t try)
{
	return draw(chaos, rule, qp, number, try) >> 32 < rule->chance;
}

/* --- calls ----------------------------------------------------------------------------------------- */

/* With the lock held: is it this one's turn? */
static bool is_hit(const struct rn_chaos *chaos, struct rn_rule *rule, uint32_t qp, uint64_t number)
{
	bool does = ++rule->seen >= rule->first && rule->seen <= rule->last;

	if (!rule->first)
		does = happens(chaos, rule, qp, number, 0);
	if (does && !rule->is_setting)
		happened++;
	return does;
}

int rn_chaos_call(struct rn_context *context, enum rn_call call)
{
	struct rn_chaos *chaos = &context->chaos;
	int err = 0;

	if (rn_settings.iwarp && (call == RN_CREATE_AH || call == RN_ALLOC_MW || call == RN_OPEN_XRCD))
		return EOPNOTSUPP;
	if (unlikely(atomic_load(&chaos->is_dead)) && call != RN_POST_SEND && call != RN_POST_RECV)
		return EIO;
	rn_lock(&chaos->lock);
	for (unsigned i = 0; i < chaos->faults.count; i++) {
		struct rn_rule *rule = &chaos->faults.rules[i];

		if (rule->action != RN_CALL || (rule->kind != call && !(rule->kind == RN_CREATE && call < RN_CREATE)))
			continue;
		if (is_hit(chaos, rule, 0, rule->seen) && !err)
			err = rule->outcome;
	}
	rn_unlock(&chaos->lock);
	return err;
}

int rn_chaos_pin(struct rn_context *context, uint64_t bytes)
{
	struct rn_chaos *chaos = &context->chaos;
	uint64_t limit;

	rn_lock(&chaos->lock);
	limit = chaos->faults.memlock;
	rn_unlock(&chaos->lock);
	if (limit && (bytes > limit || chaos->pinned > limit - bytes)) {
		happened++;
		return ENOMEM;
	}
	chaos->pinned += bytes;
	return 0;
}

void rn_chaos_unpin(struct rn_context *context, uint64_t bytes)
{
	context->chaos.pinned -= bytes;
}

/* --- requests ---------------------------------------------------------------------------------------- */

static enum rn_kind kind_of(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return RN_WRITE;
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
		return RN_SEND;
	case IBV_WR_RDMA_READ:
		return RN_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return RN_ATOMIC;
	default:
		return RN_ANY;
	}
}

static bool concerns(const struct rn_rule *rule, enum rn_kind kind)
{
	return rule->kind == RN_ANY ? kind != RN_RECV : rule->kind == kind;
}

static uint32_t add_tries(uint32_t have, uint32_t more)
{
	return have + more < have ? RN_TRIES_ALL : have + more;
}

/* By chance, and not for a number of tries: it is for each try to see. */
static bool is_per_try(const struct rn_rule *rule)
{
	return !rule->first && rule->tries == RN_TRIES_ALL;
}

static void plan_rule(struct rn_qp *qp, struct rn_send *send, struct rn_rule *rule)
{
	struct rn_chaos *chaos = qp->chaos;
	struct rn_plan *plan = &send->plan;

	switch (rule->action) {
	case RN_DELAY:
		send->due_ns += rule->low;
		if (rule->high > rule->low)
			send->due_ns += draw(chaos, rule, qp->chaos_number, plan->number, 1) %
					(rule->high - rule->low + 1);
		break;
	case RN_LOSS:
		plan->lost = add_tries(plan->lost, rule->tries);
		break;
	case RN_ACKLOSS:
		plan->unheard = add_tries(plan->unheard, rule->tries);
		break;
	case RN_RNR:
		plan->rnr = add_tries(plan->rnr, rule->tries);
		break;
	case RN_DUP:
		plan->is_twice = true;
		break;
	case RN_FAIL:
		plan->status = rule->outcome;
		break;
	case RN_CALL:
		break;
	}
}

void rn_chaos_plan(struct rn_qp *qp, struct rn_send *send)
{
	struct rn_chaos *chaos = qp->chaos;
	enum rn_kind kind = kind_of(send->wr.opcode);

	send->plan = (struct rn_plan){.number = ++qp->chaos_requests};
	send->due_ns = 0;
	rn_lock(&chaos->lock);
	for (unsigned i = 0; i < chaos->faults.count; i++) {
		struct rn_rule *rule = &chaos->faults.rules[i];

		if (rule->action == RN_CALL || !concerns(rule, kind) || is_per_try(rule))
			continue;
		if (is_hit(chaos, rule, qp->chaos_number, send->plan.number))
			plan_rule(qp, send, rule);
	}
	rn_unlock(&chaos->lock);
	send->deferred = send->due_ns != 0;
	if (send->deferred)
		send->due_ns += rn_now_ns();
}

/* Does chance have it that this try meets with this? */
static bool meets(struct rn_qp *qp, struct rn_send *send, enum rn_action action)
{
	enum rn_kind kind = kind_of(send->wr.opcode);
	struct rn_chaos *chaos = qp->chaos;
	bool does = false;

	rn_lock(&chaos->lock);
	for (unsigned i = 0; i < chaos->faults.count; i++) {
		const struct rn_rule *rule = &chaos->faults.rules[i];

		if (rule->action == action && concerns(rule, kind) && is_per_try(rule))
			does |= happens(chaos, rule, qp->chaos_number, send->plan.number, ++send->plan.draws);
	}
	rn_unlock(&chaos->lock);
	happened += does;
	return does;
}

/* One of the tries that are certain. */
static bool takes_one(uint32_t *tries)
{
	if (!*tries)
		return false;
	if (*tries != RN_TRIES_ALL)
		--*tries;
	return true;
}

enum rn_fault rn_chaos_note(uint32_t status)
{
	return status == IBV_WC_REM_INV_REQ_ERR  ? RN_FAULT_REQUEST
	       : status == IBV_WC_REM_ACCESS_ERR ? RN_FAULT_ACCESS
	       : status == IBV_WC_REM_OP_ERR     ? RN_FAULT_LOCAL
						 : RN_FAULT_NONE;
}

enum rn_wait rn_chaos_set_off(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status)
{
	struct rn_plan *plan = &send->plan;

	if (plan->is_away)
		return RN_WAIT_NOT;
	if (rn_chaos_link_is_down(qp->chaos))
		return RN_WAIT_PEER;
	if (plan->status && (qp->unreliable || rn_chaos_note(plan->status) == RN_FAULT_NONE)) {
		*status = plan->status;
		qp->count.failed++;
		return RN_WAIT_NOT;
	}
	if (takes_one(&plan->lost) || meets(qp, send, RN_LOSS)) {
		qp->count.lost++;
		return RN_WAIT_LOST;
	}
	if (plan->is_done)
		qp->count.duplicates++; /* the responder knows it by its number, and answers as before */
	plan->is_away = true;
	return RN_WAIT_NOT;
}

enum ibv_wc_status rn_chaos_refuse(struct rn_qp *qp, struct rn_send *send)
{
	if (likely(!send->plan.status))
		return IBV_WC_SUCCESS;
	qp->count.failed++;
	rn_view_leave_fault(&qp->view, rn_chaos_note(send->plan.status));
	return send->plan.status;
}

bool rn_chaos_finds_no_receive(struct rn_qp *qp, struct rn_send *send)
{
	enum ibv_wr_opcode opcode = send->wr.opcode;

	if (kind_of(opcode) != RN_SEND && opcode != IBV_WR_RDMA_WRITE_WITH_IMM)
		return false;
	if (send->plan.is_done || !(takes_one(&send->plan.rnr) || meets(qp, send, RN_RNR)))
		return false;
	send->plan.is_away = false;
	return true;
}

enum rn_wait rn_chaos_acknowledge(struct rn_qp *qp, struct rn_send *send)
{
	struct rn_plan *plan = &send->plan;

	plan->is_done = true;
	if (plan->is_twice)
		qp->count.duplicates++;
	plan->is_twice = false;
	if (qp->unreliable || !(takes_one(&plan->unheard) || meets(qp, send, RN_ACKLOSS)))
		return RN_WAIT_NOT;
	plan->is_away = false;
	qp->count.lost++;
	return RN_WAIT_LOST;
}

uint8_t rn_chaos_receive(struct rn_qp *qp)
{
	struct rn_chaos *chaos = qp->chaos;
	uint8_t status = 0;

	rn_lock(&chaos->lock);
	for (unsigned i = 0; i < chaos->faults.count; i++) {
		struct rn_rule *rule = &chaos->faults.rules[i];

		if (rule->action == RN_FAIL && concerns(rule, RN_RECV) &&
		    is_hit(chaos, rule, qp->chaos_number, qp->recv_wrs))
			status = rule->outcome;
	}
	rn_unlock(&chaos->lock);
	return status;
}

int rn_chaos_overrun(struct rn_context *context, int polled)
{
	struct rn_chaos *chaos = &context->chaos;
	uint64_t before;

	rn_lock(&chaos->lock);
	before = chaos->completions;
	chaos->completions += polled;
	if (before < chaos->faults.overrun && chaos->completions >= chaos->faults.overrun) {
		polled = chaos->faults.overrun - 1 - before;
		happened++;
	}
	rn_unlock(&chaos->lock);
	return polled;
}

/* --- the link ------------------------------------------------------------------------------------------ */

static void plug(struct rn_qp *qp, bool is_down)
{
	uint32_t from = is_down ? RN_FAULT_NONE : RN_FAULT_UNPLUGGED;

	atomic_compare_exchange_strong(&qp->theirs->fault, &from, is_down ? RN_FAULT_UNPLUGGED : RN_FAULT_NONE);
}

void rn_chaos_plug(struct rn_qp *qp)
{
	plug(qp, rn_chaos_link_is_down(&qp->context->chaos));
}

static void plug_all(struct rn_context *context, bool is_down)
{
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_qp *qp = container_of(at, struct rn_qp, link);

		rn_lock(&qp->sq_lock);
		plug(qp, is_down);
		rn_unlock(&qp->sq_lock);
	}
}

/* With the context's mutex held. */
static void turn_link(struct rn_context *context, bool down)
{
	if (rn_chaos_link_is_down(&context->chaos) == down)
		return;
	/* Whoever finds the link up sends at once, and must find everybody plugged in. */
	if (!down)
		plug_all(context, down);
	atomic_store(&context->chaos.link_is_down, down);
	plug_all(context, down);
	happened += down;
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next) {
		struct rn_qp *qp = container_of(at, struct rn_qp, link);

		rn_task_post(&qp->task);
	}
	rn_event_raise(context, down ? IBV_EVENT_PORT_ERR : IBV_EVENT_PORT_ACTIVE, NULL);
}

static void link_is_due(struct rn_timer *timer)
{
	struct rn_chaos *chaos = container_of(timer, struct rn_chaos, timer);
	struct rn_context *context = context_of(chaos);
	bool goes_down;

	pthread_mutex_lock(&context->mutex);
	goes_down = !rn_chaos_link_is_down(chaos);
	turn_link(context, goes_down);
	if (goes_down && chaos->faults.link_for_ns)
		rn_timer_set(timer, chaos->faults.link_for_ns);
	pthread_mutex_unlock(&context->mutex);
}

/* --- the device's end ----------------------------------------------------------------------------------- */

bool rn_chaos_is_dead(const struct ibv_context *context)
{
	return atomic_load(&container_of(context, struct rn_context, verbs.context)->chaos.is_dead);
}

/* With the context's mutex held. */
static void die(struct rn_context *context)
{
	if (atomic_exchange(&context->chaos.is_dead, true))
		return;
	happened++;
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
	struct rn_context *context = context_of(container_of(timer, struct rn_chaos, end));

	pthread_mutex_lock(&context->mutex);
	die(context);
	pthread_mutex_unlock(&context->mutex);
}

/* --- setting them ---------------------------------------------------------------------------------------- */

/* With the context's mutex held: from now on its requests have plans, or none. Those posted before keep theirs. */
static void mark(struct rn_qp *qp)
{
	struct rn_chaos *chaos = &qp->context->chaos;

	rn_lock(&qp->sq_lock);
	rn_lock(&qp->rq_lock);
	qp->chaos = chaos->faults.is_set || rn_settings.iwarp ? chaos : NULL;
	qp->chaos_number = ++chaos->qps;
	qp->chaos_requests = 0;
	rn_unlock(&qp->rq_lock);
	rn_unlock(&qp->sq_lock);
}

void rn_chaos_adopt(struct rn_qp *qp)
{
	mark(qp);
}

/* With `setting` held. 0 or errno. */
static int apply(struct rn_context *context, const struct rn_faults *faults)
{
	struct rn_chaos *chaos = &context->chaos;
	bool is_later = faults->link_down && faults->link_after_ns;
	int err = faults->link_down || faults->is_fatal ? rn_context_engine(context) : 0;

	if (err)
		return err;
	if (chaos->timer.fire)
		rn_timer_cancel(&chaos->timer);
	if (chaos->end.fire)
		rn_timer_cancel(&chaos->end);
	chaos->timer.fire = link_is_due;
	chaos->end.fire = end_is_due;
	pthread_mutex_lock(&context->mutex);
	rn_lock(&chaos->lock);
	chaos->faults = *faults;
	atomic_store(&chaos->may_overrun, faults->overrun != 0);
	chaos->completions = 0;
	chaos->qps = 0;
	rn_unlock(&chaos->lock);
	for (struct rn_list *at = context->qps.next; at != &context->qps; at = at->next)
		mark(container_of(at, struct rn_qp, link));
	turn_link(context, faults->link_down && !is_later);
	if (faults->is_fatal && !faults->fatal_after_ns)
		die(context);
	pthread_mutex_unlock(&context->mutex);
	if (faults->is_fatal && faults->fatal_after_ns)
		rn_timer_set(&chaos->end, faults->fatal_after_ns);
	if (is_later)
		rn_timer_set(&chaos->timer, faults->link_after_ns);
	else if (faults->link_down && faults->link_for_ns)
		rn_timer_set(&chaos->timer, faults->link_for_ns);
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

int rn_chaos_open(struct rn_context *context)
{
	struct rn_chaos *chaos = &context->chaos;
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
		chaos->next = all;
		chaos->link = &all;
		if (all)
			all->link = &chaos->next;
		all = chaos;
	}
	pthread_mutex_unlock(&setting);
	return err;
}

void rn_chaos_close(struct rn_context *context)
{
	struct rn_chaos *chaos = &context->chaos;

	pthread_mutex_lock(&setting);
	if (chaos->link)
		*chaos->link = chaos->next;
	if (chaos->next)
		chaos->next->link = chaos->link;
	rn_timer_cancel(&chaos->timer);
	rn_timer_cancel(&chaos->end);
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
		happened = 0;
		for (struct rn_chaos *chaos = all; chaos && !err; chaos = chaos->next)
			err = apply(context_of(chaos), &faults);
	}
	pthread_mutex_unlock(&setting);
	return err;
}

RN_EXPORT uint64_t rdmanet_soft_chaos_happened(void)
{
	return happened;
}

void rn_chaos_forked(void)
{
	pthread_mutex_init(&setting, NULL);
	all = NULL;
}
