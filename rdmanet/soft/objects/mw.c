/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory windows.  mw.h has the theory.
 *
 * One lock guards the table of windows and their bindings.  It is innermost, and held for
 * a few instructions: not while waiting for those who may still be using a key that was withdrawn.
 *
 * That wait.  When a bind or an invalidation completes, nobody uses the old key any more, as for ibv_dereg_mr
 * (quiesce.h).  The users of a window of type 2 are one queue pair's, those of type 1 the PD's.  The thread that
 * executes the request waits, with the send lock of its queue pair held.  If a peer is stopped inside, the request
 * fails, and the queue pair with it: the key is gone, but when that peer continues it may write the rest of its
 * current piece (responder/responder.c: 256 KiB at most).  Until then the memory is not released, as in mr.c.
 */
#include <stdlib.h>

#include "base/guard.h"
#include "base/log.h"
#include "objects/eager.h"
#include "objects/mw.h"
#include "objects/quiesce.h"

enum {
	REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	/* LOCAL_WRITE means nothing for a window; all devices accept it silently. */
	KNOWN = REMOTE | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE,
};

struct rn_mw {
	struct ibv_mw mw;
	uint32_t index;
	uint32_t key;    /* while bound; else 0 */
	uint32_t last;   /* the key it had last */
	uint32_t region; /* the index of the region, while bound */
	uint32_t qpn;    /* type 2, while bound */
	struct rn_list link;
	struct rn_list bound; /* while bound: on all_bound */
};

static struct rn_lock mw_lock;
static struct rn_list all_bound = {&all_bound, &all_bound};
static struct rn_mw *windows[RN_MRS_MAX];
static uint32_t bound[RN_MRS_MAX]; /* to each region; CLOSED: there is none, or not for long */
static uint32_t num_windows;

#define CLOSED UINT32_MAX

static struct rn_mr_entry *shared_entry(uint32_t index)
{
	return &rn_arena_mrs(rn_arena)[index];
}

static void warn_of_stopped(uint32_t qpn)
{
	rn_warn(RN_WARN_KEY,
		"queue pair %x: a peer was stopped while it used a key that has since been withdrawn: it may still use up to "
		"256 KiB of that memory when it continues", qpn);
}

/* --- with mw_lock held ---------------------------------------------------------------------------------- */

static void unbind(struct rn_mw *mw)
{
	if (!mw->key)
		return;
	if (rn_guarded(RN_GUARD_WINDOW_LIFE)) {
		atomic_store(&rn_mr_table[mw->index].key, 0);
		atomic_store(&shared_entry(mw->index)->key, 0);
	}
	bound[mw->region]--;
	rn_list_del(&mw->bound);
	mw->key = mw->qpn = 0;
}

/* The peer has invalidated it in the arena. */
static void settle(struct rn_mw *mw)
{
	if (mw->key && atomic_load(&shared_entry(mw->index)->key) != mw->key)
		unbind(mw);
}

static struct rn_mw *find(uint32_t key)
{
	struct rn_mw *mw = windows[rn_mr_index(key)];

	if (mw)
		settle(mw);
	return mw;
}

/* --- binding ---------------------------------------------------------------------------------------------- */

/* May this part of the region get these rights? */
static bool is_bindable(const struct rn_mr_entry *mr, uint32_t pd, const struct ibv_mw_bind_info *info)
{
	unsigned access = info->mw_access_flags;

	return mr && mr->pd == pd && mr->access & IBV_ACCESS_MW_BIND && !(access & ~(unsigned)KNOWN) &&
	       (mr->access & IBV_ACCESS_LOCAL_WRITE ||
		!(access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC))) &&
	       rn_mr_covers(mr, info->addr, info->length);
}

static void fill_in(struct rn_mr_entry *window, const struct rn_mr_entry *mr, const struct ibv_mw_bind_info *info,
		    uint32_t qpn)
{
	uint64_t at = info->addr - mr->iova;

	*window = (struct rn_mr_entry){
		.pd = mr->pd,
		.access = info->mw_access_flags & REMOTE,
		.kind = mr->kind,
		.iova = info->mw_access_flags & IBV_ACCESS_ZERO_BASED ? 0 : info->addr,
		.length = info->length,
		.base = mr->base + at,
		.offset = mr->offset + at,
		.segment = mr->segment,
		.qpn = qpn,
	};
}

static enum ibv_wc_status bind(struct rn_qp *qp, const struct ibv_send_wr *wr, uint32_t lkey)
{
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;
	uint32_t pd = rn_pd(qp->ex.qp_base.pd)->number, key = wr->bind_mw.rkey;
	const struct rn_mr_entry *mr = rn_mr_find(rn_mr_table, lkey);
	enum ibv_wc_status status = IBV_WC_MW_BIND_ERR;
	struct rn_mr_entry entry;
	struct rn_mw *mw;
	bool was_bound, unused = true;

	rn_lock(&mw_lock);
	mw = find(key);
	if (!mw || rn_pd(mw->mw.pd)->number != pd || (key ^ mw->last) & ~(uint32_t)RN_MW_VARIANT)
		goto out; /* its user may choose only the variant of its key */
	if (mw->mw.type == IBV_MW_TYPE_2 && (mw->key || !info->length))
		goto out; /* it must be invalidated first, and not by this */
	if (info->length && (!is_bindable(mr, pd, info) || bound[rn_mr_index(lkey)] == CLOSED))
		goto out;
	status = IBV_WC_SUCCESS;
	was_bound = mw->key;
	unbind(mw);
	if (was_bound) {
		rn_unlock(&mw_lock); /* ordering the binds of one window is up to its user */
		unused = rn_quiesce_window(pd, qp);
		rn_lock(&mw_lock);
		if (!unused || find(key) != mw || mw->key || (info->length && bound[rn_mr_index(lkey)] == CLOSED))
			status = IBV_WC_MW_BIND_ERR;
	}
	if (!info->length || status != IBV_WC_SUCCESS)
		goto out;
	mw->key = mw->last = key;
	mw->region = rn_mr_index(lkey);
	mw->qpn = mw->mw.type == IBV_MW_TYPE_2 ? qp->ex.qp_base.qp_num : 0;
	bound[mw->region]++;
	rn_list_add(&all_bound, &mw->bound);
	fill_in(&entry, mr, info, mw->qpn);
	rn_mr_publish(&entry, key);
out:
	rn_unlock(&mw_lock);
	if (!unused)
		warn_of_stopped(qp->ex.qp_base.qp_num);
	return status;
}

static enum ibv_wc_status invalidate(struct rn_qp *qp, uint32_t key)
{
	struct rn_mw *mw;
	bool valid;

	rn_lock(&mw_lock);
	mw = find(key);
	valid = mw && mw->key == key && mw->qpn == qp->ex.qp_base.qp_num;
	if (valid)
		unbind(mw);
	rn_unlock(&mw_lock);
	if (!valid)
		return IBV_WC_MW_BIND_ERR;
	if (rn_quiesce_window_of(qp))
		return IBV_WC_SUCCESS;
	warn_of_stopped(qp->ex.qp_base.qp_num);
	return IBV_WC_RESP_TIMEOUT_ERR;
}

void rn_mw_keep(struct ibv_send_wr *copy)
{
	copy->num_sge = 0;
	if (copy->opcode == IBV_WR_BIND_MW && copy->bind_mw.bind_info.mr) {
		*copy->sg_list = (struct ibv_sge){.lkey = copy->bind_mw.bind_info.mr->lkey};
		copy->num_sge = 1;
		copy->bind_mw.bind_info.mr = NULL;
	}
}

enum ibv_wc_status rn_mw_execute(struct rn_qp *qp, const struct ibv_send_wr *wr)
{
	const struct ibv_mr *mr = wr->bind_mw.bind_info.mr;

	if (wr->opcode == IBV_WR_LOCAL_INV)
		return invalidate(qp, wr->invalidate_rkey);
	return bind(qp, wr, mr ? mr->lkey : wr->num_sge ? wr->sg_list[0].lkey : 0);
}

/* --- what the peer may do ----------------------------------------------------------------------------------- */

bool rn_mw_may_invalidate(const struct rn_mr_entry *table, uint32_t key, uint32_t pd, uint32_t qpn)
{
	const struct rn_mr_entry *entry = rn_mr_find(table, key);

	return entry && READ_ONCE(entry->pd) == pd && READ_ONCE(entry->qpn) == qpn;
}

void rn_mw_settle(uint32_t key)
{
	rn_lock(&mw_lock);
	find(key);
	rn_unlock(&mw_lock);
}

void rn_mw_invalidate(struct rn_mr_entry *table, uint32_t key)
{
	bool is_ours = table == rn_mr_table;
	uint32_t expected = key;

	if (is_ours)
		table = rn_arena_mrs(rn_arena);
	atomic_compare_exchange_strong(&table[rn_mr_index(key)].key, &expected, 0);
	if (is_ours)
		rn_mw_settle(key);
}

/* --- what waits for us ----------------------------------------------------------------------------------------- */

bool rn_mw_close_region(uint32_t index)
{
	bool closed;

	rn_lock(&mw_lock);
	for (struct rn_list *at = all_bound.next, *next; bound[index] && at != &all_bound; at = next) {
		struct rn_mw *mw = container_of(at, struct rn_mw, bound);

		next = at->next;
		if (mw->region == index)
			settle(mw);
	}
	closed = !bound[index];
	if (closed)
		bound[index] = CLOSED;
	rn_unlock(&mw_lock);
	return closed;
}

void rn_mw_open_region(uint32_t index)
{
	rn_lock(&mw_lock);
	bound[index] = 0;
	rn_unlock(&mw_lock);
}

void rn_mw_forget_qp(uint32_t qpn)
{
	rn_lock(&mw_lock);
	for (struct rn_list *at = all_bound.next, *next; at != &all_bound; at = next) {
		struct rn_mw *mw = container_of(at, struct rn_mw, bound);

		next = at->next;
		if (mw->qpn == qpn)
			unbind(mw);
	}
	rn_unlock(&mw_lock);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

struct ibv_mw *rn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct rn_context *context = rn_context(pd->context);
	struct rn_mw *mw;
	uint32_t key;

	errno = rn_is_foreign(pd->context)                          ? ENODEV
		: type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2 ? EINVAL
								 : rn_device_check(context, RN_ALLOC_MW);
	if (errno)
		return NULL;
	mw = calloc(1, sizeof(*mw));
	key = mw ? rn_mr_key_take() : 0;
	if (!key) {
		free(mw);
		errno = ENOMEM;
		return NULL;
	}
	mw->index = rn_mr_index(key);
	mw->last = key;
	mw->mw = (struct ibv_mw){.context = pd->context, .pd = pd, .rkey = key, .handle = mw->index, .type = type};
	pthread_mutex_lock(&context->mutex);
	rn_pd(pd)->users++;
	rn_list_add(&context->mws, &mw->link);
	pthread_mutex_unlock(&context->mutex);
	rn_lock(&mw_lock);
	windows[mw->index] = mw;
	num_windows++;
	rn_unlock(&mw_lock);
	return &mw->mw;
}

int rn_dealloc_mw(struct ibv_mw *ibv_mw)
{
	struct rn_mw *mw = container_of(ibv_mw, struct rn_mw, mw);
	struct rn_context *context = rn_context(ibv_mw->context);
	uint32_t pd, qpn;
	bool was_bound;

	if (rn_is_foreign(ibv_mw->context))
		return 0;
	rn_lock(&mw_lock);
	settle(mw);
	was_bound = mw->key;
	qpn = mw->qpn;
	pd = rn_pd(ibv_mw->pd)->number;
	unbind(mw);
	windows[mw->index] = NULL;
	num_windows--;
	rn_unlock(&mw_lock);
	if (was_bound && !(qpn ? rn_quiesce_window_of_number(pd, qpn) : rn_quiesce_window(pd, NULL)))
		warn_of_stopped(qpn);
	rn_mr_key_give_back(mw->last);
	pthread_mutex_lock(&context->mutex);
	rn_list_del(&mw->link);
	rn_pd(ibv_mw->pd)->users--;
	pthread_mutex_unlock(&context->mutex);
	free(mw);
	return 0;
}

void rn_mw_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->mws))
		rn_dealloc_mw(&container_of(context->mws.next, struct rn_mw, link)->mw);
}

void rn_mw_forked(void)
{
	memset(&mw_lock, 0, sizeof(mw_lock));
	if (num_windows)
		memset(windows, 0, sizeof(windows));
	for (uint32_t i = 0; i < RN_MRS_MAX; i++)
		if (bound[i]) /* reading costs no page */
			bound[i] = 0;
	num_windows = 0;
	rn_list_init(&all_bound);
}
