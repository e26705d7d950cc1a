/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extended completion queues: the same CQ (cq.c), read one completion at a time, with time stamps.
 *
 * A program that makes its CQ with ibv_create_cq_ex says which fields it will read.  As with adapters,
 * only those have a function; calling another is a call of NULL.  Fields that only a
 * hardware parser could fill in (VLAN, flow tag, tag matching) are refused with EOPNOTSUPP.
 *
 *     start_poll --0--> read... --> next_poll --0--> read... --> next_poll --ENOENT--> end_poll
 *         |
 *       ENOENT: nothing was begun, and end_poll isn't called
 *
 * The iterator takes a completion from the queue as a whole.  So end_poll has nothing to
 * remove: it only ends this thread's turn.  The turn is a lock of its own, not the CQ's, because
 * programs post, to queue pairs that complete here, while they iterate.  SINGLE_THREADED omits the lock.
 *
 * Time stamps are CLOCK_MONOTONIC in nanoseconds, read by the process that made the completion
 * (all processes of a host have the same clock), hence hca_core_clock is 1 GHz.  The
 * wall-clock time is the same instant converted to CLOCK_REALTIME, by the distance of the clocks when it is read.
 */
#include <time.h>

#include "objects/eager.h"

enum {
	FIELDS_KNOWN = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
		       IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
	FIELDS_OF_TIME = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
};

static struct rn_cq *of(struct ibv_cq_ex *ex)
{
	return container_of(ex, struct rn_cq, ex);
}

/* --- the iterator ------------------------------------------------------------------------------------- */

/* The next completion becomes the current one. */
static int take(struct rn_cq *cq)
{
	int got = rn_cq_take(cq, &cq->now.wc, &cq->now.stamp);

	if (got < 0)
		return -got;
	if (!got)
		return ENOENT;
	cq->ex.wr_id = cq->now.wc.wr_id;
	cq->ex.status = cq->now.wc.status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	struct rn_cq *cq = of(ex);
	int err;

	if (attr && attr->comp_mask)
		return EINVAL;
	rn_lock(&cq->turn);
	err = take(cq);
	if (err)
		rn_unlock(&cq->turn);
	return err;
}

static int next_poll(struct ibv_cq_ex *ex)
{
	return take(of(ex));
}

static void end_poll(struct ibv_cq_ex *ex)
{
	rn_unlock(&of(ex)->turn);
}

static int start_poll_alone(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	return attr && attr->comp_mask ? EINVAL : take(of(ex));
}

static void end_poll_alone(struct ibv_cq_ex *ex)
{
	(void)ex;
}

/* --- the readers --------------------------------------------------------------------------------------- */

#define READER(type, name) \
	static type read_##name(struct ibv_cq_ex *ex) \
	{ \
		return of(ex)->now.wc.name; \
	}

READER(enum ibv_wc_opcode, opcode)
READER(uint32_t, vendor_err)
READER(unsigned, wc_flags)
READER(uint32_t, byte_len)
READER(__be32, imm_data) /* the invalidated key as well, as in struct ibv_wc */
READER(uint32_t, qp_num)
READER(uint32_t, src_qp)
READER(uint32_t, slid)
READER(uint8_t, sl)
READER(uint8_t, dlid_path_bits)

static uint64_t read_completion_ts(struct ibv_cq_ex *ex)
{
	return of(ex)->now.stamp;
}

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *ex)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec - (rn_now_ns() - of(ex)->now.stamp);
}

static void fill_in(struct ibv_cq_ex *ex, uint64_t fields, bool alone)
{
	ex->start_poll = alone ? start_poll_alone : start_poll;
	ex->next_poll = next_poll;
	ex->end_poll = alone ? end_poll_alone : end_poll;
	ex->read_opcode = read_opcode;
	ex->read_vendor_err = read_vendor_err;
	ex->read_wc_flags = read_wc_flags;
	if (fields & IBV_WC_EX_WITH_BYTE_LEN)
		ex->read_byte_len = read_byte_len;
	if (fields & IBV_WC_EX_WITH_IMM)
		ex->read_imm_data = read_imm_data;
	if (fields & IBV_WC_EX_WITH_QP_NUM)
		ex->read_qp_num = read_qp_num;
	if (fields & IBV_WC_EX_WITH_SRC_QP)
		ex->read_src_qp = read_src_qp;
	if (fields & IBV_WC_EX_WITH_SLID)
		ex->read_slid = read_slid;
	if (fields & IBV_WC_EX_WITH_SL)
		ex->read_sl = read_sl;
	if (fields & IBV_WC_EX_WITH_DLID_PATH_BITS)
		ex->read_dlid_path_bits = read_dlid_path_bits;
	if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		ex->read_completion_ts = read_completion_ts;
	if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		ex->read_completion_wallclock_ns = read_completion_wallclock_ns;
}

/* --- creating ------------------------------------------------------------------------------------------- */

struct ibv_cq_ex *rn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	uint32_t flags = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? attr->flags : 0;
	struct rn_cq *cq;

	if (attr->comp_mask & ~(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) ||
	    flags & ~(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) ||
	    attr->wc_flags & ~(uint64_t)FIELDS_KNOWN) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	cq = rn_cq_create(context, attr, attr->wc_flags & FIELDS_OF_TIME);
	if (!cq)
		return NULL;
	cq->may_overrun = flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	fill_in(&cq->ex, attr->wc_flags, flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED);
	return &cq->ex;
}
