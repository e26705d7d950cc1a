/* SPDX-License-Identifier: Apache-2.0 */
/* Compare-and-swap, fetch-and-add: CPU atomics where the memory is mapped, else by its owner. */
#include "responder/inside.h"

bool rn_respond_atomic(bool is_add, uint64_t compare_add, uint64_t swap, char *at, uint64_t *old)
{
	struct rn_bus bus;

	if (sigsetjmp(bus.back, 0))
		return false;
	rn_bus_begin(&bus);
	*old = compare_add;
	if (is_add)
		*old = __atomic_fetch_add((uint64_t *)at, compare_add, __ATOMIC_SEQ_CST);
	else
		__atomic_compare_exchange_n((uint64_t *)at, old, swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	rn_bus_end();
	return true;
}

enum rn_wait rn_execute_atomic(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
			       enum ibv_wc_status *status)
{
	const struct rn_piece *target = &t->remote[0];
	uint64_t before;

	if (!target->at) {
		if (rn_was_refused(t)) {
			*status = rn_deny_access(ctx);
			return RN_WAIT_NOT;
		}
		t->ask = (struct rn_remote){
			.kind = request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? RN_REMOTE_CAS : RN_REMOTE_FAA,
			.key = target->key,
			.length = sizeof(before),
			.addr = request->remote_addr,
			.compare_add = request->compare_add,
			.swap = request->swap,
		};
		t->ask_data = NULL;
		return RN_WAIT_OWNER;
	}
	if (!rn_respond_atomic(request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD, request->compare_add, request->swap, target->at,
			       &before)) {
		*status = rn_deny_access(ctx);
		return RN_WAIT_NOT;
	}
	if (!rn_scatter(t->local, t->num_local, 0, (const char *)&before, sizeof(before)))
		*status = IBV_WC_LOC_PROT_ERR;
	if (ctx->self)
		ctx->count->bytes_local += sizeof(before);
	else
		ctx->count->bytes_mapped += sizeof(before);
	return RN_WAIT_NOT;
}
