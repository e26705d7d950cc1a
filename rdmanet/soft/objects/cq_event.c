/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of completion queues: arming, telling, taking.
 *
 * Arming.  A pusher publishes, then looks whether the CQ is armed; a consumer arms, then polls
 * once more.  Both sides are sequentially consistent: the pusher's setting of the dirty bit is an
 * atomic read-modify-write, ordered before its load of `armed`; the consumer's store of `armed` is
 * seq_cst, ordered before its load of `summary`.  With less, both could miss each other, and
 * a wake-up is lost.  For the private ring the CQ's lock does the same.  Arming is one-shot and
 * strict: completions that are there already cause no event.
 *
 * RDMANET_SOFT_ARM=lenient behaves as adapters do, which consider completions that were not polled yet: arming a CQ
 * that holds completions fires at once, and when polling takes the last completion before its event was read, the
 * event is taken back and the CQ armed again.
 *
 * A pusher that finds the CQ armed writes a token to the channel's eventfd (a semaphore), and only
 * then marks the arming as signalled, so that no other pusher writes one as well; get_cq_event
 * takes a token, then looks which of the channel's CQs was signalled.  The order matters: a pusher
 * may be stopped or killed anywhere in between, and if it had taken the arming with it, no
 * further completion would wake the owner.  As it is, at worst its own completion is announced late, or by the engine
 * when it is dead (rn_cq_recover).  The price is a spurious event now and then, when two push at once and both write a
 * token.  And a token may arrive before its mark: then it stands for a CQ that is armed and has completions.  There may
 * be several, since completions that were there before, or are not solicited, cause no event: then each gets one, as
 * the one that was meant would else be marked with no token left.  The count in `armed` keeps a late mark off a later
 * arming.
 *
 * Moderation (ibv_modify_cq).  The event of an armed CQ waits until so many completions have come since, or
 * the first of them has waited for so long.  Arming records it (RN_ARMED_MODERATED), so a push to a CQ that is not
 * armed does not deal with it.  Pushers count in `held`, which names the arming that it counts for; a pusher that finds
 * another arming there starts a new count and wakes the owner's engine, which sets the timer.  With either limit 0
 * there is no moderation, as on adapters.
 */
#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/fence.h"
#include "base/offer.h"
#include "objects/cq_inside.h"
#include "objects/own_look.h"

static uint32_t kind_of(struct rn_cq *cq)
{
	return atomic_load(&cq->block->armed) & RN_ARMED_KIND;
}

/* --- facts: shm/own.h ---------------------------------------------------------------------------------------- */

static struct rn_own_cq *own_of(const struct rn_cq_block *block)
{
	return &rn_own_cqs[block - rn_arena_cq(rn_arena, 0)];
}

static uint32_t channel_of(const struct rn_cq_block *block, const struct rn_peer *peer)
{
	if (peer || !rn_guarded(RN_GUARD_OWN_FACTS))
		return READ_ONCE(block->channel);
	return atomic_load(&own_of(block)->channel);
}

static uint32_t hold_of(const struct rn_cq_block *block, const struct rn_peer *peer)
{
	return atomic_load(peer ? &block->hold : &own_of(block)->hold);
}

unsigned rn_cq_tell(struct rn_cq *cq)
{
	uint32_t channel = atomic_load(&rn_own_cqs[cq->index].channel), hold = atomic_load(&rn_own_cqs[cq->index].hold);
	unsigned differed = (READ_ONCE(cq->block->channel) != channel) + (atomic_load(&cq->block->hold) != hold);

	__atomic_store_n(&cq->block->channel, channel, __ATOMIC_RELAXED);
	atomic_store(&cq->block->hold, hold);
	return differed;
}

/* --- telling ------------------------------------------------------------------------------------------- */

/* This many more completions have come to a moderated CQ: is its event due now? */
static bool is_due(struct rn_cq_block *block, struct rn_peer *peer, uint32_t armed, uint32_t count)
{
	uint64_t held = atomic_load(&block->held);
	uint32_t sum;
	bool is_first;

	do {
		is_first = held >> 32 != armed;
		if (is_first && atomic_load(&block->armed) != armed)
			return false; /* armed again, by a thread that looks afterwards */
		sum = (is_first ? 0 : (uint32_t)held) + count;
	} while (!atomic_compare_exchange_weak(&block->held, &held, (uint64_t)armed << 32 | sum));
	if (sum >= hold_of(block, peer))
		return true;
	if (atomic_load(peer ? &block->timed : &own_of(block)->timed) == armed)
		return false;
	/* Every pusher wakes it until the timer is set: the first may have been stopped before it woke the engine. */
	if (peer)
		rn_peer_signal(peer, RN_CHANNEL_WAKEUP);
	else
		rn_channel_signal(RN_CHANNEL_WAKEUP);
	return false;
}

bool rn_cq_notify(struct rn_cq_block *block, struct rn_peer *peer, bool solicited, uint32_t count)
{
	uint32_t armed = atomic_load(&block->armed), kind = armed & RN_ARMED_KIND, channel;

	if (likely(kind == RN_ARMED_NOT) || kind == RN_ARMED_SIGNALLED || (kind == RN_ARMED_SOLICITED && !solicited))
		return false;
	channel = channel_of(block, peer);
	if (channel == RN_NO_CHANNEL)
		return false;
	if (unlikely(armed & RN_ARMED_MODERATED) && !is_due(block, peer, armed, count))
		return false;
	if (!peer)
		rn_channel_signal(channel);
	else if (!rn_peer_signal(peer, channel))
		return true; /* the descriptor brings it; a thread that already has the descriptor may be faster */
	atomic_compare_exchange_strong(&block->armed, &armed, armed | RN_ARMED_SIGNALLED);
	return true;
}

/* --- taking an event ------------------------------------------------------------------------------------- */

bool rn_cq_is_armed(struct rn_cq *cq)
{
	uint32_t kind = kind_of(cq);

	return kind == RN_ARMED_NEXT || kind == RN_ARMED_SOLICITED;
}

static bool was_signalled(struct rn_cq *cq)
{
	return kind_of(cq) == RN_ARMED_SIGNALLED;
}

static bool is_owed(struct rn_cq *cq)
{
	return cq->events_owed;
}

/* Must the event of a moderated CQ wait? */
static bool is_held(struct rn_cq *cq)
{
	uint64_t held = atomic_load(&cq->block->held);
	uint32_t armed = atomic_load(&cq->block->armed);

	return armed & RN_ARMED_MODERATED && (held >> 32 != armed || (uint32_t)held < hold_of(cq->block, NULL));
}

static bool is_about_to_be(struct rn_cq *cq)
{
	bool is;

	rn_lock(&cq->lock);
	is = kind_of(cq) != RN_ARMED_NOT && !is_held(cq) && rn_cq_has_completions(cq);
	rn_unlock(&cq->lock);
	return is;
}

static struct rn_cq *channel_find(struct rn_channel *channel, bool (*is_it)(struct rn_cq *))
{
	for (struct rn_list *at = channel->cqs.next; at != &channel->cqs; at = at->next) {
		struct rn_cq *cq = container_of(at, struct rn_cq, channel_link);

		if (is_it(cq))
			return cq;
	}
	return NULL;
}

static void disarm(struct rn_cq *cq)
{
	uint32_t kind = RN_ARMED_KIND;

	atomic_store(&cq->armed, atomic_fetch_and(&cq->block->armed, ~kind) & ~kind);
}

/* After a token without a mark, which one CQ has got already. */
static void tell_others_that_may_be_meant(struct rn_channel *channel)
{
	struct rn_cq *other;

	while ((other = channel_find(channel, is_about_to_be))) {
		disarm(other);
		other->events_owed++;
		rn_channel_signal(channel->id);
	}
}

/*
 * What a token stands for: a CQ of the channel that was signalled, or is about to be, round robin.  If
 * there is none, the token was spurious; but a thread may have seen the descriptor readable, and would now wait for the
 * next event: so any CQ is returned, whose owner finds nothing, as after any late event.
 */
static struct rn_cq *channel_take(struct rn_channel *channel, bool settle_for_any)
{
	struct rn_cq *found;

	rn_lock(&channel->lock);
	if ((found = channel_find(channel, was_signalled)))
		disarm(found);
	else if ((found = channel_find(channel, is_owed)))
		found->events_owed--;
	else if ((found = channel_find(channel, is_about_to_be))) {
		disarm(found);
		tell_others_that_may_be_meant(channel);
	} else if (settle_for_any && !rn_list_empty(&channel->cqs)) {
		found = container_of(channel->cqs.next, struct rn_cq, channel_link);
	}
	if (found) {
		found->events_reported++;
		rn_list_del(&found->channel_link);
		rn_list_add(&channel->cqs, &found->channel_link);
	}
	rn_unlock(&channel->lock);
	return found;
}

/* Take a token; wait for one unless the program does not wait. False, and errno. */
static bool take_token(struct rn_channel *channel)
{
	uint64_t token;
	struct iovec to = {&token, sizeof(token)};
	ssize_t got = -1;

	errno = EOPNOTSUPP;
	if (atomic_load_explicit(&channel->never_waits, memory_order_relaxed))
		got = preadv2(channel->channel.fd, &to, 1, -1, RWF_NOWAIT);
	if (got < 0 && errno == EOPNOTSUPP) /* or the kernel can't tell, before Linux 5.8 */
		got = read(channel->channel.fd, &token, sizeof(token));
	if (got < 0 && errno == EAGAIN && rn_channel_is_shared(channel))
		atomic_store_explicit(&channel->never_waits, true, memory_order_relaxed);
	return got >= 0;
}

RN_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv_channel, struct ibv_cq **ibv_cq, void **cq_context)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_channel;
	/* Lenient: skip a spurious event, and take the next one if it comes soon. */
	struct pollfd next = {.fd = ibv_channel->fd, .events = POLLIN};
	enum { VAIN_MS = 20 };
	struct rn_cq *cq;

	if (rn_is_foreign(ibv_channel->context)) {
		errno = ENODEV;
		return -1;
	}
	do {
		if (!take_token(channel))
			return -1;
		cq = channel_take(channel, !rn_settings.lenient);
		if (unlikely(!cq && rn_settings.lenient && poll(&next, 1, VAIN_MS) <= 0))
			cq = channel_take(channel, true);
	} while (!cq); /* a token of the last CQ, which is gone */
	*ibv_cq = &cq->cq;
	*cq_context = cq->cq.cq_context;
	return 0;
}

RN_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int events)
{
	if (rn_is_foreign(cq->context))
		return;
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += events;
	pthread_cond_broadcast(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}

/* --- arming -------------------------------------------------------------------------------------------- */

/* Start a new arming even if the last one still stands: its token may have been read before its mark was made. Arming
 * for any completion overrides arming for solicited ones, not the other way round. */
static uint32_t armed_again(struct rn_cq *cq, uint32_t armed, uint32_t kind)
{
	return (armed | RN_ARMED_FLAGS) + 1 + ((armed & RN_ARMED_KIND) == RN_ARMED_NEXT ? RN_ARMED_NEXT : kind) +
	       (atomic_load(&cq->hold_us) ? RN_ARMED_MODERATED : 0);
}

void rn_cq_take_event_back(struct rn_cq *cq)
{
	struct rn_channel *channel = (struct rn_channel *)cq->cq.channel;
	uint32_t armed = atomic_load(&cq->block->armed), after;
	uint64_t token;
	struct iovec to = {&token, sizeof(token)};

	if ((armed & RN_ARMED_KIND) != RN_ARMED_SIGNALLED || rn_cq_has_completions(cq) ||
	    preadv2(channel->channel.fd, &to, 1, -1, RWF_NOWAIT) <= 0)
		return;
	after = armed_again(cq, armed, RN_ARMED_NEXT);
	if (!atomic_compare_exchange_strong(&cq->block->armed, &armed, after)) {
		rn_channel_signal(channel->id); /* ours was read already, and this token belongs to another CQ */
		return;
	}
	atomic_store(&cq->armed, after);
	rn_fence();
	if (rn_cq_has_completions(cq))
		rn_cq_notify(cq->block, NULL, true, 1);
}

int rn_cq_request_notify(struct ibv_cq *ibv_cq, int solicited_only)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_cq->channel;
	uint32_t kind = solicited_only ? RN_ARMED_SOLICITED : RN_ARMED_NEXT, before, after;
	struct rn_cq *cq = rn_cq(ibv_cq);

	if (rn_is_foreign(ibv_cq->context))
		return ENODEV;
	rn_offer_later();
	if (unlikely(atomic_load_explicit(&cq->num_tcp, memory_order_acquire)))
		atomic_load_explicit(&cq->source, memory_order_relaxed)->arm(cq);
	rn_own_moves();
	if (unlikely(atomic_load_explicit(&cq->turn_polls, memory_order_relaxed)))
		atomic_store_explicit(&cq->turn_polls, 1, memory_order_relaxed);
	if (channel)
		rn_lock(&channel->lock);
	rn_lock(&cq->lock);
	before = atomic_load(&cq->block->armed);
	do
		after = armed_again(cq, before, kind);
	while (!atomic_compare_exchange_weak(&cq->block->armed, &before, after));
	atomic_store_explicit(&cq->armed, after, memory_order_relaxed);
	if (rn_guarded(RN_GUARD_OWN_FACTS)) /* written again: it is in the cache line that we have now. See shm/own.h */
		__atomic_store_n(&cq->block->channel, channel ? channel->id : RN_NO_CHANNEL, __ATOMIC_RELAXED);
	if ((before & RN_ARMED_KIND) == RN_ARMED_SIGNALLED)
		cq->events_owed++;
	rn_fence();
	if (rn_settings.lenient && !solicited_only && channel && rn_cq_has_completions(cq))
		rn_cq_notify(cq->block, NULL, true, cq->tail - cq->head + 1);
	rn_unlock(&cq->lock);
	if (channel)
		rn_unlock(&channel->lock);
	return 0;
}

/* --- moderation ------------------------------------------------------------------------------------------ */

int rn_modify_cq(struct ibv_cq *ibv_cq, struct ibv_modify_cq_attr *attr)
{
	struct rn_cq *cq = rn_cq(ibv_cq);
	uint32_t count = attr->moderate.cq_count, us = attr->moderate.cq_period;

	if (rn_is_foreign(ibv_cq->context))
		return ENODEV;
	if (rn_context_is_dead(ibv_cq->context))
		return EIO;
	if (!attr->attr_mask)
		return EINVAL;
	if (attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
		return EOPNOTSUPP;
	rn_lock(&cq->lock);
	atomic_store(&rn_own_cqs[cq->index].hold, count);
	rn_cq_tell(cq);
	atomic_store(&cq->hold_us, count ? us : 0); /* from the next arming on */
	rn_unlock(&cq->lock);
	return 0;
}

void rn_cq_held_too_long(struct rn_timer *timer)
{
	struct rn_cq *cq = container_of(timer, struct rn_cq, timer);
	uint32_t armed;

	rn_lock(&cq->lock);
	armed = atomic_load(&cq->block->armed);
	if (armed == atomic_load(&own_of(cq->block)->timed))
		rn_cq_notify(cq->block, NULL, true, RN_CQ_ENOUGH);
	rn_unlock(&cq->lock);
}

void rn_cq_process_pending(struct rn_cq *cq)
{
	uint32_t armed = atomic_load(&cq->block->armed), kind = armed & RN_ARMED_KIND;

	if (likely(!(armed & RN_ARMED_MODERATED)) || kind == RN_ARMED_NOT || kind == RN_ARMED_SIGNALLED ||
	    armed == atomic_load(&own_of(cq->block)->timed) || atomic_load(&cq->block->held) >> 32 != armed)
		return;
	rn_timer_set(&cq->timer, atomic_load(&cq->hold_us) * 1000ull);
	atomic_store(&own_of(cq->block)->timed, armed);
	atomic_store(&cq->block->timed, armed);
}

/* --- the end of a CQ's events -------------------------------------------------------------------------- */

/* Has another CQ of the channel an event that was not taken? */
static bool has_unread(struct rn_channel *channel)
{
	bool has;

	rn_lock(&channel->lock);
	has = channel_find(channel, was_signalled) || channel_find(channel, is_owed);
	rn_unlock(&channel->lock);
	return has;
}

/* Remove tokens of events that were pushed and never read. */
static void drain_tokens(struct rn_channel *channel, uint32_t count)
{
	uint64_t token;
	struct iovec to = {&token, sizeof(token)};

	/* Never wait, whatever mode the program has set; if the kernel can't, the tokens are left to be skipped. */
	while (count-- && preadv2(channel->channel.fd, &to, 1, -1, RWF_NOWAIT) > 0)
		;
}

uint32_t rn_cq_leave_channel(struct rn_cq *cq)
{
	struct rn_channel *channel = (struct rn_channel *)cq->cq.channel;
	uint32_t unread, reported;

	if (!channel)
		return 0;
	rn_lock(&channel->lock);
	rn_list_del(&cq->channel_link);
	reported = cq->events_reported;
	unread = cq->events_owed + (kind_of(cq) == RN_ARMED_SIGNALLED);
	rn_unlock(&channel->lock);
	drain_tokens(channel, unread);
	if (unread && has_unread(channel))
		rn_channel_signal(channel->id); /* a late mark may have made us take a token of another CQ */
	pthread_mutex_lock(&rn_process_lock);
	cq->cq.channel = NULL; /* nothing to recover any more */
	pthread_mutex_unlock(&rn_process_lock);
	channel->channel.refcnt--;
	return reported;
}
