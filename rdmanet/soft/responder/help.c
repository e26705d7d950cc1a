/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The owner's part of a long READ that both processes carry; objects/share.h has the theory.
 *
 * Our engine takes a piece at a time, and other tasks have their turn in between.  As for any request, queue pair, key,
 * bounds and rights are looked up in our private tables, for each piece anew.  While it copies, no lock is held: who
 * withdraws the key waits for rn_serving, and who resets the queue pair for the task.  Nor does it wait for a lock with a
 * piece that it has taken: a thread of ours that has the lock may wait for the peer's engine, and a thread of the peer's
 * for this piece.
 *
 * Where in its own memory the peer wants the bytes is its own business.  The kernel writes them there, into the process
 * whose link it is, if we may trace that, if it still runs the program that has asked, and if that still wants the bytes:
 * the first eight bytes of each call go to a witness of the peer's, which it has lent for this (base/witness.h).  Nothing
 * else can tell.  We may be stopped at any instruction, also right before the call.  Meanwhile the peer executes another
 * program, or ends its READ and uses the memory for other things, and we are not to write there.
 *
 * What the help is worth depends on a second CPU that has nothing else to do: where two CPUs were shared by fifteen
 * processes, 256 MiB took 170 ms to 250 ms, with or without it.
 */
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/fence.h"
#include "objects/quiesce.h"
#include "responder/inside.h"

int rn_help_begin(struct rn_qp *qp, int peer_pid, const struct rn_remote *request)
{
	uint64_t at;
	int err;

	if (!qp)
		return ENOTCONN;
	if (request->is_receive)
		return EACCES;
	if (rn_settings.no_cma || qp->theirs != qp->block || !request->witness)
		return EOPNOTSUPP;
	if (!rn_share_has_more(qp->block, request->serial))
		return 0; /* it is done already, and its key may have ended */
	err = rn_owner_find(qp, request, &at);
	if (err)
		return err;
	qp->help.pid = peer_pid;
	qp->help.serial = request->serial;
	qp->help.given = 0;
	qp->help.key = request->key;
	qp->help.addr = request->addr;
	qp->help.length = request->length;
	qp->help.to = request->to;
	qp->help.witness = request->witness;
	/* What another process has shared may have had this serial: a forked one counts on where its parent was. */
	atomic_store(&qp->block->given, (uint64_t)request->serial << 32);
	rn_task_post(&qp->help.task);
	return 0;
}

/* Where this piece is. False: there is no such one, or the peer may not read it any more. */
static bool find(struct rn_qp *qp, uint32_t piece, struct rn_remote *part, uint64_t *at)
{
	const struct rn_help *help = &qp->help;
	uint64_t skip = (uint64_t)piece * RN_SHARE_PIECE;
	int state = atomic_load(&qp->state);

	if (skip >= help->length || state < IBV_QPS_RTR || state > IBV_QPS_SQE)
		return false;
	*part = (struct rn_remote){
		.kind = RN_REMOTE_HELP,
		.dest_qpn = qp->ex.qp_base.qp_num,
		.key = help->key,
		.addr = help->addr + skip,
		.length = help->length - skip < RN_SHARE_PIECE ? help->length - skip : RN_SHARE_PIECE,
		.to = help->to + skip,
	};
	return !rn_owner_find(qp, part, at);
}

static bool write_there(const struct rn_help *help, uint64_t from, uint64_t to, size_t length)
{
	static const uint64_t mark;

	while (length) {
		struct iovec local[] = {{(void *)(uintptr_t)&mark, sizeof(mark)}, {(void *)(uintptr_t)from, length}};
		struct iovec remote[] = {{(void *)(uintptr_t)help->witness, sizeof(mark)},
					 {(void *)(uintptr_t)to, length}};
		/* By number: ThreadSanitizer would see libc's function read what the program wrote, and not that a peer, which
		 * the program has told, came between. */
		ssize_t moved = syscall(SYS_process_vm_writev, help->pid, local, 2, remote, 2, 0);

		if (moved <= (ssize_t)sizeof(mark))
			return false;
		moved -= sizeof(mark);
		from += moved;
		to += moved;
		length -= moved;
	}
	return true;
}

void rn_help_ran(struct rn_task *task)
{
	struct rn_help *help = container_of(task, struct rn_help, task);
	struct rn_qp *qp = container_of(help, struct rn_qp, help);
	struct rn_remote part;
	bool is_taken, is_there;
	uint32_t piece;
	uint64_t at;

	pthread_mutex_lock(&rn_process_lock);
	rn_order_by_peer(); /* who registered the memory */
	rn_serving_begin(RN_SERVING_ENGINE);
	is_taken = rn_share_take(qp->block, help->serial, &piece);
	is_there = is_taken && find(qp, piece, &part, &at);
	pthread_mutex_unlock(&rn_process_lock);
	is_there = is_there && write_there(help, at, part.to, part.length);
	rn_serving_end(RN_SERVING_ENGINE);
	if (!is_taken)
		return;
	if (!is_there && rn_share_put_back(qp->block, help->serial, piece))
		return;
	atomic_store(&qp->block->given, (uint64_t)help->serial << 32 | ++help->given);
	if (is_there)
		rn_task_post(task);
}
