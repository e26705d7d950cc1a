/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to a call, a request, a receive or a completion: fault.h. Nothing is done about it here. */
#include "base/process.h"
#include "faults/fault.h"

_Atomic uint64_t rn_faults_happened;

/* --- chance ----------------------------------------------------------------------------------- */

/* splitmix64's finish: every bit of the input moves half of the output's. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* A number that depends only on these arguments. */
static uint64_t draw(const struct rn_injector *injector, const struct rn_rule *rule, uint32_t qp, uint64_t number,
		     uint32_t try)
{
	uint64_t x = mix(injector->faults.seed + 0x9e3779b97f4a7c15ull);

	x = mix(x ^ (uint64_t)(rule - injector->faults.rules + 1) << 32 ^ qp);
	return mix(mix(x + number) + try);
}

static bool happens(const struct rn_injector *injector, const struct rn_rule *rule, uint32_t qp, uint64_t number,
		    uint32_t try)
{
	return draw(injector, rule, qp, number, try) >> 32 < rule->chance;
}

/* With the lock held: does the rule apply to this one? */
static bool is_hit(const struct rn_injector *injector, struct rn_rule *rule, uint32_t qp, uint64_t number)
{
	bool does = ++rule->seen >= rule->first && rule->seen <= rule->last;

	return rule->first ? does : happens(injector, rule, qp, number, 0);
}

/* --- what has happened ------------------------------------------------------------------------------- */

void rn_fault_happened(struct rn_injector *injector, unsigned place)
{
	injector->happened[place]++;
	rn_faults_happened++;
}

static void rule_happened(struct rn_injector *injector, const struct rn_rule *rule)
{
	if (!rule->is_setting)
		rn_fault_happened(injector, rule->place);
}

/* What the rules of this kind meant for the request is carried out: each counts once. Of several that fail it the last
 * has decided. */
static void came_to_pass(struct rn_qp_faults *faults, struct rn_plan *plan, enum rn_action action)
{
	struct rn_injector *injector = faults->injector;
	const struct rn_rule *decides = NULL;

	rn_lock(&injector->lock);
	if (plan->version != injector->version)
		plan->due = 0;
	for (uint32_t left = plan->due; left; left &= left - 1) {
		const struct rn_rule *rule = &injector->faults.rules[__builtin_ctz(left)];

		if (rule->action != action)
			continue;
		plan->due &= ~(left & -left);
		if (action != RN_FAIL)
			rule_happened(injector, rule);
		decides = rule;
	}
	if (action == RN_FAIL && decides)
		rule_happened(injector, decides);
	rn_unlock(&injector->lock);
}

/* --- calls ----------------------------------------------------------------------------------------- */

int rn_fault_call(struct rn_injector *injector, enum rn_call call)
{
	int err = 0;

	rn_lock(&injector->lock);
	for (unsigned i = 0; i < injector->faults.count; i++) {
		struct rn_rule *rule = &injector->faults.rules[i];

		if (rule->action != RN_CALL || (rule->kind != call && !(rule->kind == RN_CREATE && call < RN_CREATE)))
			continue;
		if (!is_hit(injector, rule, 0, rule->seen))
			continue;
		rule_happened(injector, rule);
		if (!err)
			err = rule->outcome;
	}
	rn_unlock(&injector->lock);
	return err;
}

int rn_fault_pin(struct rn_injector *injector, uint64_t bytes)
{
	uint64_t limit;
	bool fits;

	rn_lock(&injector->lock);
	limit = injector->faults.memlock;
	fits = !limit || (bytes <= limit && injector->pinned <= limit - bytes);
	if (!fits)
		rn_fault_happened(injector, injector->faults.memlock_place);
	rn_unlock(&injector->lock);
	if (!fits)
		return ENOMEM;
	injector->pinned += bytes;
	return 0;
}

void rn_fault_unpin(struct rn_injector *injector, uint64_t bytes)
{
	injector->pinned -= bytes;
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

/* By chance, and not for a number of tries: it is for each try to see. Only these faults have tries. */
static bool is_per_try(const struct rn_rule *rule)
{
	return !rule->first && rule->tries == RN_TRIES_ALL &&
	       (rule->action == RN_LOSS || rule->action == RN_ACKLOSS || rule->action == RN_RNR);
}

/* With the lock held: the rule hits this request. */
static void plan_rule(const struct rn_qp_faults *faults, const struct rn_rule *rule, struct rn_plan *plan)
{
	struct rn_injector *injector = faults->injector;

	switch (rule->action) {
	case RN_DELAY:
		rule_happened(injector, rule); /* it waits in any case */
		plan->delay_ns += rule->low;
		if (rule->high > rule->low)
			plan->delay_ns += draw(injector, rule, faults->number, plan->number, 1) %
					  (rule->high - rule->low + 1);
		return;
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
		return;
	}
	plan->due |= 1u << (rule - injector->faults.rules);
}

void rn_fault_plan(struct rn_qp_faults *faults, enum ibv_wr_opcode opcode, struct rn_plan *plan)
{
	struct rn_injector *injector = faults->injector;

	*plan = (struct rn_plan){
		.number = ++faults->requests,
		.kind = kind_of(opcode),
		.needs_receive = kind_of(opcode) == RN_SEND || opcode == IBV_WR_RDMA_WRITE_WITH_IMM,
	};
	rn_lock(&injector->lock);
	plan->version = injector->version;
	for (unsigned i = 0; i < injector->faults.count; i++) {
		struct rn_rule *rule = &injector->faults.rules[i];

		if (rule->action == RN_CALL || !concerns(rule, plan->kind) || is_per_try(rule))
			continue;
		if (is_hit(injector, rule, faults->number, plan->number))
			plan_rule(faults, rule, plan);
	}
	rn_unlock(&injector->lock);
}

/* Does chance have it that this try meets with this? */
static bool meets(struct rn_qp_faults *faults, struct rn_plan *plan, enum rn_action action)
{
	struct rn_injector *injector = faults->injector;
	bool does = false;

	rn_lock(&injector->lock);
	for (unsigned i = 0; i < injector->faults.count; i++) {
		const struct rn_rule *rule = &injector->faults.rules[i];

		if (rule->action != action || !concerns(rule, plan->kind) || !is_per_try(rule) ||
		    !happens(injector, rule, faults->number, plan->number, ++plan->draws))
			continue;
		rule_happened(injector, rule);
		does = true;
	}
	rn_unlock(&injector->lock);
	return does;
}

/* Does this try fail: because it is one of those that are certain to, of which it uses up one, or by chance? */
static bool fails(struct rn_qp_faults *faults, struct rn_plan *plan, uint32_t *tries, enum rn_action action)
{
	if (!*tries)
		return meets(faults, plan, action);
	if (*tries != RN_TRIES_ALL)
		--*tries;
	came_to_pass(faults, plan, action);
	return true;
}

enum rn_fault rn_fault_note(uint32_t status)
{
	return status == IBV_WC_REM_INV_REQ_ERR  ? RN_FAULT_REQUEST
	       : status == IBV_WC_REM_ACCESS_ERR ? RN_FAULT_ACCESS
	       : status == IBV_WC_REM_OP_ERR     ? RN_FAULT_LOCAL
						 : RN_FAULT_NONE;
}

enum rn_wait rn_fault_set_off(struct rn_qp_faults *faults, struct rn_plan *plan, enum ibv_wc_status *status)
{
	if (plan->is_away)
		return RN_WAIT_NOT;
	if (rn_fault_link_is_down(faults->injector))
		return RN_WAIT_PEER;
	if (plan->status && (faults->unreliable || rn_fault_note(plan->status) == RN_FAULT_NONE)) {
		*status = rn_fault_refuse(faults, plan);
		return RN_WAIT_NOT;
	}
	if (fails(faults, plan, &plan->lost, RN_LOSS)) {
		faults->count->lost++;
		return RN_WAIT_LOST;
	}
	if (plan->is_done)
		faults->count->duplicates++; /* the responder knows it by its number, and answers as before */
	plan->is_away = true;
	return RN_WAIT_NOT;
}

enum ibv_wc_status rn_fault_refuse(struct rn_qp_faults *faults, struct rn_plan *plan)
{
	if (likely(!plan->status))
		return IBV_WC_SUCCESS;
	faults->count->failed++;
	came_to_pass(faults, plan, RN_FAIL);
	return plan->status;
}

bool rn_fault_finds_no_receive(struct rn_qp_faults *faults, struct rn_plan *plan)
{
	if (!plan->needs_receive || plan->is_done || !fails(faults, plan, &plan->rnr, RN_RNR))
		return false;
	plan->is_away = false;
	return true;
}

enum rn_wait rn_fault_acknowledge(struct rn_qp_faults *faults, struct rn_plan *plan)
{
	plan->is_done = true;
	if (plan->is_twice) {
		faults->count->duplicates++;
		came_to_pass(faults, plan, RN_DUP);
	}
	plan->is_twice = false;
	if (faults->unreliable || !fails(faults, plan, &plan->unheard, RN_ACKLOSS))
		return RN_WAIT_NOT;
	plan->is_away = false;
	faults->count->lost++;
	return RN_WAIT_LOST;
}

struct rn_receive_plan rn_fault_receive(struct rn_qp_faults *faults, uint64_t number)
{
	struct rn_injector *injector = faults->injector;
	struct rn_receive_plan plan = {0};

	rn_lock(&injector->lock);
	for (unsigned i = 0; i < injector->faults.count; i++) {
		struct rn_rule *rule = &injector->faults.rules[i];

		if (rule->action != RN_FAIL || !concerns(rule, RN_RECV) || !is_hit(injector, rule, faults->number, number))
			continue;
		plan = (struct rn_receive_plan){
			.status = rule->outcome,
			.place = rule->place,
			.version = injector->version,
		};
	}
	rn_unlock(&injector->lock);
	return plan;
}

void rn_fault_received(struct rn_injector *injector, const struct rn_receive_plan *plan)
{
	rn_lock(&injector->lock);
	if (plan->version == (uint16_t)injector->version)
		rn_fault_happened(injector, plan->place);
	rn_unlock(&injector->lock);
}

int rn_fault_overrun(struct rn_injector *injector, int polled)
{
	uint64_t before;

	rn_lock(&injector->lock);
	before = injector->completions;
	injector->completions += polled;
	if (before < injector->faults.overrun && injector->completions >= injector->faults.overrun) {
		polled = injector->faults.overrun - 1 - before;
		rn_fault_happened(injector, injector->faults.overrun_place);
	}
	rn_unlock(&injector->lock);
	return polled;
}
