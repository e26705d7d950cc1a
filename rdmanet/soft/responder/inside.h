/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the responder: what its files share.
 *
 *     responder.c    the checks, the completion         copy.c     the copy, between mapped memory
 *     far.c          memory that isn't mapped here      atomic.c   the two atomics      claim.c   receives from a pool
 *     share.c        a long READ of such memory         help.c     that of a peer, with which our engine helps
 *     owner.c        what a requester that can't reach our memory asks of our engine
 */
#pragma once

#include "objects/qp.h"
#include "responder/responder.h"

/* --- responder.c ----------------------------------------------------------------------------------------------- */

enum ibv_wc_status rn_deny_access(struct rn_responder_ctx *ctx);

/* --- copy.c ----------------------------------------------------------------------------------------------------- */

/* RN_COPY_FAULT: memory of the responder's is not there; RN_COPY_LOCAL_FAULT: memory of the requester's. RN_COPY_TURN:
 * there is more, for another turn; RN_COPY_SHARED: what is left is the owner's engine's to copy. */
enum rn_copied {
	RN_COPIED,
	RN_COPY_LOST,
	RN_COPY_FAULT,
	RN_COPY_LOCAL_FAULT,
	RN_COPY_ASKED,
	RN_COPY_TURN,
	RN_COPY_SHARED,
};
enum { RN_TURN_BYTES = 1024 * 1024 };

/* Both lists, from position t->moved on. */
enum rn_copied rn_copy(struct rn_responder_ctx *ctx, struct rn_transfer *t);
/* After a piece: every key still to be used is looked up again. */
enum rn_copied rn_still_there(struct rn_responder_ctx *ctx, const struct rn_piece *pieces, int count);

/* --- share.c ---------------------------------------------------------------------------------------------------- */

/* Is this a READ with which the owner's engine may help? */
bool rn_may_share(const struct rn_responder_ctx *ctx, const struct rn_transfer *t);
/* Copy some of it, from position t->moved on. */
enum rn_copied rn_copy_shared(struct rn_responder_ctx *ctx, struct rn_transfer *t);

/* --- owner.c and help.c ------------------------------------------------------------------------------------------ */

/* Where the memory is that a request names. 0, EACCES or EFAULT. With the lock held. */
int rn_owner_find(struct rn_qp *qp, const struct rn_remote *request, uint64_t *at);
/* Help that process with its READ, from now on, in turns. 0 or errno. */
int rn_help_begin(struct rn_qp *qp, int peer_pid, const struct rn_remote *request);

/* --- far.c ------------------------------------------------------------------------------------------------------ */

/* Move this many bytes between `here` and the piece, from its position skip on. */
enum rn_copied rn_copy_far(struct rn_responder_ctx *ctx, struct rn_transfer *t, char *here, const struct rn_piece *remote,
			   uint64_t skip, uint64_t length);
/* The same where it is mapped, if the memory of either side may be a file's. */
enum rn_copied rn_copy_with_care(const struct rn_transfer *t, char *here, char *there, uint64_t length);
/* Did the owner's engine refuse the last question? True once. */
bool rn_was_refused(struct rn_transfer *t);

/* --- atomic.c --------------------------------------------------------------------------------------------------- */

/* After rn_respond_prepare(). */
enum rn_wait rn_execute_atomic(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
			       enum ibv_wc_status *status);

/* --- claim.c ---------------------------------------------------------------------------------------------------- */

/* Claim one from the pool; it stays ours while the message has to wait. NULL: none is posted. */
struct rn_slot *rn_responder_claim(struct rn_responder_ctx *ctx);
/* The scatter list of the one that was claimed, of this process: how many entries were copied, or RN_NOT_POSTED. */
uint32_t rn_responder_pool_list(const struct rn_responder_ctx *ctx, struct rn_slot_sge *list);
