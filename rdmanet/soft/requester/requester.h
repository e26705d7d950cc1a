/* SPDX-License-Identifier: Apache-2.0 */
/* Posting and executing: post.c, progress.c, execute.c, remote.c. */
#pragma once

#include "objects/qp.h"
#include "objects/sq.h"
#include "responder/responder.h"

int rn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
/* A chain of that many, all or none. 0 or errno. */
int rn_post_chain(struct rn_qp *qp, struct ibv_send_wr *first, uint32_t count);
int rn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* Go on with what is queued. Takes the send lock; engine thread. */
void rn_qp_progress(struct rn_qp *qp);
/* The same, with sq_lock held; and parts of it. */
void rn_sq_progress_locked(struct rn_qp *qp);
bool rn_cq_take_turn(struct rn_cq *cq); /* for rn_requester_ops */
void rn_sq_drained(struct rn_qp *qp); /* in SQD: tell it, once nothing is on its way any more */
void rn_sq_wait(struct rn_qp *qp, enum rn_wait why); /* the head of the queue can't be executed yet */
bool rn_sq_has_waited(const struct rn_qp *qp, enum rn_wait why); /* for that, as long as it may */
uint64_t rn_sq_ack_budget_ns(const struct rn_qp *qp); /* how long all tries together wait for an answer */
bool rn_sq_waited_for_nothing(struct rn_qp *qp); /* in RN_WAIT_LOST: is it time to try again? */

/* Into the responder, and out again: see shm/arena.h. All with sq_lock held. */
enum rn_wait rn_enter(struct rn_qp *qp);
/* Execute one work request. moved: of a queued one, how many bytes were carried already; NULL when
 * the request isn't queued yet, so that it must not wait for the owner's engine. */
enum rn_wait rn_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t *moved,
			enum ibv_wc_status *status, uint32_t *byte_len);
void rn_leave(struct rn_qp *qp);
/* For rn_requester_register. */
extern const struct rn_requester_ops rn_requester_of_qps;
/* How long the responder wants us to wait for its next receive. */
uint64_t rn_rnr_delay_ns(struct rn_qp *qp);
uint64_t rn_rnr_code_ns(uint8_t code);

/* Ask the engine of the memory's owner (remote.c). 0: the answer will come, and rn_qp_progress with it; or errno.
 * data: what to write. */
int rn_remote_start(struct rn_qp *qp, const struct rn_remote *request, const void *data);

/* The local side of a work request, checked; IBV_WC_SUCCESS or what is wrong with it. */
enum ibv_wc_status rn_local_pieces(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces,
				   int *count, uint64_t *total);
/* The same for the kernel to touch, which tells of a hole in on-demand memory. */
enum ibv_wc_status rn_local_pieces_unprobed(struct rn_qp *qp, const struct ibv_send_wr *wr, struct rn_piece *pieces,
					    int *count, uint64_t *total);
/* What is wrong with a request, before anything goes out. */
enum ibv_wc_status rn_check_request(struct rn_qp *qp, const struct ibv_send_wr *wr, uint64_t total);
