/* SPDX-License-Identifier: Apache-2.0 */
/* Compare-and-swap, fetch-and-add: CPU atomics where the memory is mapped, else by its owner. */
#include "responder/inside.h"

uint64_t rn_respond_atomic(const struct rn_request *request, char *at)
{
	uint64_t before = request->compare_add;

	if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return __atomic_fetch_add((uint64_t *)at, before, __ATOMIC_SEQ_CST);
	__atomic_compare_exchange_n((uint64_t *)at, &before, request->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return before;
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
	before = rn_respond_atomic(request, target->at);
	rn_scatter(t->local, t->num_local, 0, (const char *)&before, sizeof(before));
	if (ctx->self)
		ctx->count->bytes_local += sizeof(before);
	else
		ctx->count->bytes_mapped += sizeof(before);
	return RN_WAIT_NOT;
}
