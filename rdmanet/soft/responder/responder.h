/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder: executes a request at its destination queue pair.
 *
 *     requester/execute.c, the requester           responder.c, the responder (rn_responder_*: ctx.c)
 *     rn_enter                                     rn_responder_open      what the block says, checked
 *       rn_execute --- struct rn_request --------> rn_respond
 *                                                    prepare         rights, keys, the receive: where to?
 *                                                    copy            between transfer.local and .remote
 *                                                    finish, or      publish
 *                                                    refuse          the NAK, and the note for the owner
 *     rn_leave                                     rn_responder_announce
 *
 * It runs where the memory can be reached: in the poster's thread on tables of its own process, in
 * the poster's thread on another's mapped arena, or on the owner's engine with bytes that came
 * from a socket.  So it knows no queue pair of the requester's, only what it sees of the responder's
 * block, the request and the pieces of memory to copy from or to.  In the last case the caller calls
 * prepare, finish and refuse itself, with the socket in the place of the copy.
 *
 * The caller keeps the responder in place meanwhile: by its busy word (see shm/arena.h), or by
 * the send lock of a queue pair of this process.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/wait.h"
#include "objects/responder_ctx.h"
#include "responder/pieces.h"
#include "shm/limits.h"
#include "verbs.h"

/* A request to the responder: a work request without its local half, or a frame. */
struct rn_request {
	enum ibv_wr_opcode opcode;
	unsigned send_flags; /* IBV_SEND_SOLICITED counts, and rdmanet_soft_send_of_much */
	__be32 imm_data;
	uint32_t invalidate_rkey;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t srqn;
	uint64_t compare_add, swap;
};

/* Have the peer's engine move bytes between its memory and ours, or execute an atomic there. */
enum rn_remote_kind { RN_REMOTE_WRITE = 1, RN_REMOTE_READ, RN_REMOTE_CAS, RN_REMOTE_FAA, RN_REMOTE_HELP };
enum { RN_REMOTE_CHUNK = 32 * 1024 };
struct rn_remote {
	uint32_t kind;
	uint32_t source_qpn, dest_qpn;
	uint32_t key;
	uint32_t is_receive; /* a receive buffer: the owner's own rights count */
	uint32_t length;
	uint64_t generation;
	uint64_t addr;
	union {
		uint64_t compare_add;
		uint64_t witness; /* to help with a READ: a page that only the program has that asks; base/witness.h */
	};
	uint64_t swap;
	uint64_t to; /* to help with a READ: where its bytes go in the requester's process, and the serial of its sharing */
	uint32_t serial;
};
struct rn_remote_answer {
	int32_t error; /* 0, EACCES, EFAULT, ENOTCONN: the queue pair is not there */
	uint32_t length;
	char data[];
};
/* For struct rn_peer_ops: answer such a request (owner.c). The answer's length, or -errno. */
int rn_serve_request(int peer_pid, const void *message, size_t length, void *answer, size_t room);
/* For struct rn_help: go on helping a peer with its READ (help.c). */
void rn_help_ran(struct rn_task *task);

/* Long copies are cut into pieces of so much: see copy.c. */
enum { RN_PIECE_BYTES = 256 * 1024 };

/* One request under way. Filled as far as its counts say: its arrays are never cleared. */
struct rn_transfer {
	struct rn_piece local[RN_MAX_SGE + 1], remote[RN_MAX_SGE]; /* one more for UD's GRH */
	int num_local, num_remote;
	uint64_t total, moved; /* bytes; moved: already, by earlier tries */
	struct rn_slot *slot;  /* the receive it takes, or NULL */
	bool to_remote;
	bool is_receive;
	bool is_eager; /* into the slot's room */
	bool is_large; /* it, or what it is a part of, is more than the caches hold: stream.h */
	bool refused; /* the owner's engine refused last time; considered once */
	bool in_turns; /* leave off after a while: RN_WAIT_TURN */

	/* After RN_WAIT_OWNER: what the owner must do, and with which bytes. */
	struct rn_remote ask;
	const char *ask_data;
};

/* Look at the queue pair with this block in this arena; words: where its peer's are, if not there. `self` is set. */
void rn_responder_aim(struct rn_responder_ctx *ctx, char *arena, uint32_t index, struct rn_qp_block *words);
/* Fill in its facts. False: they make no sense. */
bool rn_responder_open(struct rn_responder_ctx *ctx);
/* The SRQ that a request to an XRC target names: its receives, its PD, its CQ. False: no such one. */
bool rn_responder_name_srq(struct rn_responder_ctx *ctx, uint32_t number);
/* Announce to the receiver what was published. */
void rn_responder_announce(struct rn_responder_ctx *ctx);
void rn_responder_wake_owner(struct rn_responder_ctx *ctx);
/* Give back the receive that was taken from a pool for a message that will not be finished. */
void rn_responder_give_back(struct rn_responder_ctx *ctx);
/* Leave a note for the owner, which will go to ERR. */
void rn_responder_leave_fault(struct rn_responder_ctx *ctx, enum rn_fault fault);

static inline struct rn_slot *rn_responder_slot(const struct rn_responder_ctx *ctx, uint32_t index)
{
	return (struct rn_slot *)(ctx->rq + (uint64_t)(index & ctx->rq_mask) * ctx->rq_stride);
}

/* Is it still the queue pair that we found, without a note? */
static inline bool rn_responder_is_alive(const struct rn_responder_ctx *ctx)
{
	uint64_t generation_state = atomic_load(&ctx->facts->generation_state);

	return generation_state >> 8 == ctx->generation && rn_state_is_open(generation_state) &&
	       atomic_load_explicit(&ctx->block->fault, memory_order_relaxed) == RN_FAULT_NONE;
}

/* Execute a whole request. The caller fills in the transfer's local side, total, moved and refused. If the request
 * is done or refused, the status is that of the requester's completion. */
enum rn_wait rn_respond(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
			enum ibv_wc_status *status);

/* Its parts. Prepare makes all checks and says where the bytes go to, or come from (none for an
 * atomic: that is rn_respond's, or rn_respond_atomic's); refused as status says, with all that follows. */
enum rn_wait rn_respond_prepare(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t,
				enum ibv_wc_status *status);
/* The bytes are in place. */
void rn_respond_finish(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t);
/* The memory turned out to be gone: returns the status for the requester. */
enum ibv_wc_status rn_respond_refuse(struct rn_responder_ctx *ctx, const struct rn_request *request, struct rn_transfer *t);

/*
 * For blocks that are copied without a request (requester/at_once.c).
 *
 *     region     all that a key is for, if it is mapped here
 *     range      where one block is: piece->at, or else piece->far. False: a request for it is refused, or has to wait.
 *     far        copy those that are not mapped here, by one system call. How many are done; of the others a request says
 *                what is wrong
 *     goes_on    after RN_PIECE_BYTES: an owner that withdraws a key need wait no longer, and every key is to be looked
 *                up again. False: the responder is not there any more
 */
struct rn_region {
	uint32_t key; /* 0: none */
	uint64_t iova, length;
	char *at;
};
bool rn_respond_region(struct rn_responder_ctx *ctx, bool is_read, uint32_t rkey, struct rn_region *region);
enum { RN_FAR_BLOCKS = 64 };
struct rn_far_list {
	int count;
	struct iovec here[RN_FAR_BLOCKS + 1], there[RN_FAR_BLOCKS + 1]; /* the first one of each is the witness's */
};
bool rn_respond_range(struct rn_responder_ctx *ctx, bool is_read, uint32_t rkey, uint64_t addr, uint32_t length,
		      struct rn_piece *piece);
int rn_respond_far(struct rn_responder_ctx *ctx, struct rn_far_list *list, bool to_remote);
bool rn_respond_goes_on(struct rn_responder_ctx *ctx);

/* Execute it on mapped memory: add, or compare and swap. False: the memory is gone. */
bool rn_respond_atomic(bool is_add, uint64_t compare_add, uint64_t swap, char *at, uint64_t *old);
