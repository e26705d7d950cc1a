/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the responder's process that is not mapped here: the kernel or the owner's engine copies.  And memory that is
 * mapped, but perhaps not there.
 *
 * process_vm_readv and process_vm_writev take one system call for each run, or for many blocks of a list.  If the kernel
 * refuses them, it will always do so, and from then on the owner's engine is asked: the request waits (RN_WAIT_OWNER) for
 * its answer.
 *
 * The kernel finds the memory by the owner's pid.  We may be stopped at any instruction, also right before the call, and
 * meanwhile the owner executes another program, or ends and its pid is another's.  So each call goes to the owner's
 * witness first (base/witness.h): that it was there, and then the memory, is one program's.  If it was not there, the peer
 * is lost, as its link will tell.  That costs 0.2 us for each call (64 bytes: 0.9 us instead of 0.7, 1 MiB: no difference).
 * An owner that has no witness is asked.
 */
#include <sys/uio.h>

#include "base/witness.h"
#include "objects/mr.h"
#include "responder/inside.h"
#include "responder/place.h"

/* One system call: `count` pieces behind the first of each list, which is the witness's. How many bytes of them were moved,
 * or -1 with errno: ESRCH when the process has ended, or runs another program. */
static ssize_t copy_behind_witness(struct rn_responder_ctx *ctx, struct iovec *here, struct iovec *there, int count,
				   bool to_remote)
{
	const struct rn_witness witness = ctx->peer->witness;
	uint64_t mark = 0;
	ssize_t moved;

	here[0] = (struct iovec){&mark, sizeof(mark)};
	there[0] = (struct iovec){(void *)(uintptr_t)(witness.at + (to_remote ? 0 : RN_WITNESS_VALUE)), sizeof(mark)};
	ctx->count->syscalls++;
	moved = to_remote ? process_vm_writev(ctx->peer->pid, here, count + 1, there, count + 1, 0)
			  : process_vm_readv(ctx->peer->pid, here, count + 1, there, count + 1, 0);
	if (moved < 0)
		return -1;
	moved -= sizeof(mark);
	if (moved >= 0 && (to_remote || mark == witness.value))
		return moved;
	errno = ESRCH;
	return -1;
}

/* Move it with one system call. 0, or errno, as above. */
static int copy_by_kernel(struct rn_responder_ctx *ctx, char *here, const struct rn_piece *piece, uint64_t skip, size_t length,
			  bool to_remote)
{
	while (length) {
		struct iovec local[] = {{0}, {here, length}};
		struct iovec remote[] = {{0}, {(void *)(uintptr_t)(piece->far + skip), length}};
		ssize_t moved = copy_behind_witness(ctx, local, remote, 1, to_remote);

		if (moved < 0 && errno != EFAULT)
			return errno;
		if (moved < 0) /* an address here that no program can have is refused before anything is tried */
			return rn_mr_probe((uintptr_t)here, length, !to_remote) ? ESRCH : EFAULT;
		if (!moved)
			return EFAULT;
		ctx->count->bytes_cma += moved;
		here += moved;
		skip += moved;
		length -= moved;
	}
	return 0;
}

int rn_respond_far(struct rn_responder_ctx *ctx, struct rn_far_list *list, bool to_remote)
{
	ssize_t left;
	int done = 0;

	if (ctx->no_cma || !ctx->peer || !ctx->peer->witness.at)
		return 0;
	left = copy_behind_witness(ctx, list->here, list->there, list->count, to_remote);
	for (; done < list->count && left >= (ssize_t)list->here[done + 1].iov_len; done++) {
		left -= list->here[done + 1].iov_len;
		ctx->count->bytes_cma += list->here[done + 1].iov_len;
	}
	return done;
}

bool rn_was_refused(struct rn_transfer *t)
{
	bool refused = t->refused;

	t->refused = false;
	return refused;
}

static enum rn_copied ask_owner(struct rn_transfer *t, const struct rn_piece *piece, uint64_t skip, const char *here,
				uint64_t length)
{
	if (rn_was_refused(t))
		return RN_COPY_FAULT;
	t->ask = (struct rn_remote){
		.kind = t->to_remote ? RN_REMOTE_WRITE : RN_REMOTE_READ,
		.key = piece->key,
		.is_receive = t->is_receive,
		.length = length < RN_REMOTE_CHUNK ? length : RN_REMOTE_CHUNK,
		.addr = piece->addr + skip,
	};
	t->ask_data = here;
	return RN_COPY_ASKED;
}

enum rn_copied rn_copy_far(struct rn_responder_ctx *ctx, struct rn_transfer *t, char *here, const struct rn_piece *remote,
			   uint64_t skip, uint64_t length)
{
	int err = ctx->no_cma || !ctx->peer->witness.at ? EPERM : copy_by_kernel(ctx, here, remote, skip, length, t->to_remote);

	switch (err) {
	case 0:
		return RN_COPIED;
	case EFAULT: /* of which of both? */
		return rn_mr_probe((uintptr_t)here, length, !t->to_remote) ? RN_COPY_FAULT : RN_COPY_LOCAL_FAULT;
	case ESRCH:
		return RN_COPY_LOST;
	default:
		ctx->no_cma = true;
		return ask_owner(t, remote, skip, here, length);
	}
}

enum rn_copied rn_copy_with_care(const struct rn_transfer *t, char *here, char *there, uint64_t length)
{
	char *to = t->to_remote ? there : here, *from = t->to_remote ? here : there;
	const void *lost;

	if (likely(rn_place_with_care(to, from, length, t->is_large, &lost)))
		return RN_COPIED;
	if (!lost)
		return rn_mr_probe((uintptr_t)here, length, !t->to_remote) ? RN_COPY_FAULT : RN_COPY_LOCAL_FAULT;
	return (uintptr_t)lost - (uintptr_t)here < length ? RN_COPY_LOCAL_FAULT : RN_COPY_FAULT;
}
