/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completion queues and completion channels.
 *
 * A CQ has two kinds of source.  Sends of this process finish into a private ring of the CQ, the
 * size the user asked for: overrunning it loses completions, raises CQ_ERR and ends the CQ.
 * Receives finish in place, in the receive ring of their queue pair, by the hand of the peer; all
 * the peer does to the CQ is set the QP's bit in the CQ's block.  poll_cq collects those bits into
 * a list of ready queue pairs and takes from them in turns.  So nothing that a peer does can
 * overrun a CQ, and a stopped peer holds up nobody.
 *
 * Arming.  A pusher publishes, then looks whether the CQ is armed; a consumer arms, then polls
 * once more.  Both sides are sequentially consistent: the pusher's setting of the dirty bit is an
 * atomic read-modify-write, ordered before its load of `armed`; the consumer's store of `armed` is
 * seq_cst, ordered before its load of `summary`.  With less, both could miss each other, and
 * a wake-up is lost.  For the private ring the CQ's lock does the same.  Arming is one-shot and
 * strict: completions that are there already cause no event.
 *
 * With RDMANET_SOFT_ARM=lenient it is as programs written for adapters know it, which look at what was
 * not polled yet: arming a CQ that holds completions fires at once, and when polling takes the last completion
 * before its event was read, the event is taken back and the CQ armed again.
 *
 * A pusher that finds the CQ armed writes a token to the channel's eventfd (a semaphore), and only
 * then marks the arming as signalled, so that no other pusher writes one as well; get_cq_event
 * takes a token, then looks which of the channel's CQs was signalled.  The order matters: a pusher
 * may be stopped or killed anywhere in between, and if it had taken the arming with it, no
 * completion of anybody's would wake the owner again.  As it is, its own at worst is announced late,
 * or by the engine when it is dead (rn_cq_recover).  The price is a token too many now and then, when two
 * push at once: an event in vain.  And a token may arrive before its mark: then it stands for a
 * CQ that is armed and has completions.  The count in `armed` keeps a late mark off a later arming.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "soft.h"

/* --- channels by number ------------------------------------------------------------------------------ */

/* id = serial << 12 | index. Index 0 is the bell. Guarded by channel_lock, which is innermost. */
static struct {
	uint32_t id;
	int fd;
} channels[RN_MAX_CHANNELS];
static struct rn_lock channel_lock;
static uint32_t channel_serial;

static struct rn_source bell = {.fd = -1};

static uint32_t channel_register(int fd)
{
	uint32_t id = RN_NO_CHANNEL;

	rn_lock(&channel_lock);
	for (unsigned i = 1; i < RN_MAX_CHANNELS; i++) {
		if (channels[i].id)
			continue;
		channel_serial = (channel_serial + 1) % (1 << 19); /* never all ones: that is NO_CHANNEL */
		id = (channel_serial + 1) * RN_MAX_CHANNELS + i;
		channels[i].id = id;
		channels[i].fd = fd;
		break;
	}
	rn_unlock(&channel_lock);
	return id;
}

static void channel_unregister(uint32_t id)
{
	rn_lock(&channel_lock);
	channels[id % RN_MAX_CHANNELS].id = 0;
	rn_unlock(&channel_lock);
}

static void token_write(int fd)
{
	uint64_t one = 1;

	/* The counter can't overflow before its 2^64th event: there is nothing to retry but EINTR. */
	while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void rn_channel_signal(uint32_t id)
{
	int fd = -1;

	rn_lock(&channel_lock);
	if (id == RN_CHANNEL_BELL)
		fd = bell.slot ? bell.fd : -1;
	else if (channels[id % RN_MAX_CHANNELS].id == id)
		fd = channels[id % RN_MAX_CHANNELS].fd;
	/* Inside the lock, or the descriptor may be closed and be somebody else's by now. */
	if (fd >= 0)
		token_write(fd);
	rn_unlock(&channel_lock);
}

/* For the engine, to pass it to a peer: a copy, since another thread may destroy the channel. */
int rn_channel_fd(uint32_t id)
{
	int fd = -1;

	rn_lock(&channel_lock);
	if (id == RN_CHANNEL_BELL)
		fd = bell.fd;
	else if (channels[id % RN_MAX_CHANNELS].id == id)
		fd = channels[id % RN_MAX_CHANNELS].fd;
	if (fd >= 0)
		fd = rn_fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 3));
	rn_unlock(&channel_lock);
	return fd;
}

/* --- the bell: how a peer calls our engine ----------------------------------------------------------- */

static void bell_rung(struct rn_source *source, uint32_t events)
{
	uint64_t count;

	(void)events;
	if (read(source->fd, &count, sizeof(count)) > 0)
		rn_qp_attend_all();
}

int rn_bell_open(void)
{
	int err;

	bell = (struct rn_source){.fd = rn_fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), .ready = bell_rung};
	if (bell.fd < 0)
		return errno;
	err = -rn_source_add(&bell, EPOLLIN);
	if (err) {
		rn_fd_close(bell.fd);
		bell.fd = -1;
	}
	return err;
}

void rn_bell_close(void)
{
	int fd;

	rn_source_remove(&bell);
	rn_lock(&channel_lock);
	fd = bell.fd;
	bell.fd = -1;
	rn_unlock(&channel_lock);
	rn_fd_close(fd);
}

/* --- events ------------------------------------------------------------------------------------------- */

bool rn_cq_notify(struct rn_cq_block *block, struct rn_peer *peer, bool solicited)
{
	uint32_t armed = atomic_load(&block->armed), kind = armed & RN_ARMED_KIND, channel;

	if (likely(kind == RN_ARMED_NOT) || kind == RN_ARMED_SIGNALLED || (kind == RN_ARMED_SOLICITED && !solicited))
		return false;
	channel = block->channel;
	if (channel == RN_NO_CHANNEL)
		return false;
	if (!peer)
		rn_channel_signal(channel);
	else if (!rn_peer_signal(peer, channel))
		return true; /* it comes with the descriptor; who has that meanwhile may be faster */
	atomic_compare_exchange_strong(&block->armed, &armed, armed | RN_ARMED_SIGNALLED);
	return true;
}

RN_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_channel *channel;

	if (rn_is_foreign(ibv_context)) {
		errno = ENODEV;
		return NULL;
	}
	errno = rn_chaos_call(context, RN_CREATE_COMP_CHANNEL);
	channel = errno ? NULL : calloc(1, sizeof(*channel));
	if (!channel)
		return NULL;
	channel->channel.context = ibv_context;
	/* The program's own: it may set O_NONBLOCK, watch it, and pass it on. */
	channel->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (channel->channel.fd < 0) {
		free(channel);
		return NULL;
	}
	channel->id = channel_register(channel->channel.fd);
	if (channel->id == RN_NO_CHANNEL) {
		close(channel->channel.fd);
		free(channel);
		errno = ENOMEM;
		return NULL;
	}
	rn_list_init(&channel->cqs);
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->channels, &channel->link);
	pthread_mutex_unlock(&context->mutex);
	return &channel->channel;
}

RN_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv_channel)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_channel;
	struct rn_context *context = rn_context(ibv_channel->context);

	if (rn_is_foreign(ibv_channel->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (ibv_channel->refcnt) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&channel->link);
	pthread_mutex_unlock(&context->mutex);

	channel_unregister(channel->id);
	rn_channel_gone(channel->id);
	close(ibv_channel->fd);
	free(channel);
	return 0;
}

static uint32_t kind_of(struct rn_cq *cq)
{
	return atomic_load(&cq->block->armed) & RN_ARMED_KIND;
}

/* Is there a completion to poll? With the lock held. */
static bool has_completions(struct rn_cq *cq)
{
	return cq->head != cq->tail || cq->ready || atomic_load(&cq->block->summary);
}

static bool was_signalled(struct rn_cq *cq)
{
	return kind_of(cq) == RN_ARMED_SIGNALLED;
}

static bool is_owed(struct rn_cq *cq)
{
	return cq->events_owed;
}

static bool is_about_to_be(struct rn_cq *cq)
{
	bool is_due;

	rn_lock(&cq->lock);
	is_due = kind_of(cq) != RN_ARMED_NOT && has_completions(cq);
	rn_unlock(&cq->lock);
	return is_due;
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

/*
 * What a token stands for: a CQ of the channel that was signalled, or is about to be, round robin.  When
 * there is none the token was one too many; but somebody may have seen the descriptor readable, and would
 * now wait for the next: so any CQ is named, whose owner looks in vain, as after any late event.
 */
static struct rn_cq *channel_take(struct rn_channel *channel, bool settle_for_any)
{
	struct rn_cq *found;

	rn_lock(&channel->lock);
	if ((found = channel_find(channel, was_signalled)))
		atomic_fetch_and(&found->block->armed, ~(uint32_t)RN_ARMED_KIND);
	else if ((found = channel_find(channel, is_owed)))
		found->events_owed--;
	else if ((found = channel_find(channel, is_about_to_be)))
		atomic_fetch_and(&found->block->armed, ~(uint32_t)RN_ARMED_KIND);
	else if (settle_for_any && !rn_list_empty(&channel->cqs))
		found = container_of(channel->cqs.next, struct rn_cq, channel_link);
	if (found) {
		found->events_reported++;
		rn_list_del(&found->channel_link);
		rn_list_add(&channel->cqs, &found->channel_link);
	}
	rn_unlock(&channel->lock);
	return found;
}

RN_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv_channel, struct ibv_cq **ibv_cq, void **cq_context)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_channel;
	/* Lenient: whoever takes no event in vain gets the next one, if it comes soon. */
	struct pollfd next = {.fd = ibv_channel->fd, .events = POLLIN};
	enum { VAIN_MS = 20 };
	struct rn_cq *cq;
	uint64_t token;

	if (rn_is_foreign(ibv_channel->context)) {
		errno = ENODEV;
		return -1;
	}
	do {
		if (read(ibv_channel->fd, &token, sizeof(token)) < 0)
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

/* The next arming, even where the last one still stands: its token may have been read before its mark was
 * made. Asking for any completion outdoes asking for solicited ones, not the other way round. */
static uint32_t armed_again(uint32_t armed, uint32_t kind)
{
	return (armed | RN_ARMED_KIND) + 1 + ((armed & RN_ARMED_KIND) == RN_ARMED_NEXT ? RN_ARMED_NEXT : kind);
}

/* Lenient: what the event was for has been polled. Unless it is being read, it is not to come. With the lock held. */
static void take_event_back(struct rn_cq *cq)
{
	struct rn_channel *channel = (struct rn_channel *)cq->cq.channel;
	uint32_t armed = atomic_load(&cq->block->armed);
	uint64_t token;
	struct iovec to = {&token, sizeof(token)};

	if ((armed & RN_ARMED_KIND) != RN_ARMED_SIGNALLED || has_completions(cq) ||
	    preadv2(channel->channel.fd, &to, 1, -1, RWF_NOWAIT) <= 0)
		return;
	if (!atomic_compare_exchange_strong(&cq->block->armed, &armed, armed_again(armed, RN_ARMED_NEXT))) {
		rn_channel_signal(channel->id); /* it was read, and the token is another's */
		return;
	}
	rn_fence();
	if (has_completions(cq))
		rn_cq_notify(cq->block, NULL, true);
}

int rn_cq_request_notify(struct ibv_cq *ibv_cq, int solicited_only)
{
	struct rn_channel *channel = (struct rn_channel *)ibv_cq->channel;
	uint32_t kind = solicited_only ? RN_ARMED_SOLICITED : RN_ARMED_NEXT, before, after;
	struct rn_cq *cq = rn_cq(ibv_cq);

	if (rn_is_foreign(ibv_cq->context))
		return ENODEV;
	if (unlikely(atomic_load_explicit(&cq->num_streams, memory_order_relaxed)))
		rn_stream_arm(cq);
	if (channel)
		rn_lock(&channel->lock);
	rn_lock(&cq->lock);
	before = atomic_load(&cq->block->armed);
	do
		after = armed_again(before, kind);
	while (!atomic_compare_exchange_weak(&cq->block->armed, &before, after));
	if ((before & RN_ARMED_KIND) == RN_ARMED_SIGNALLED)
		cq->events_owed++;
	rn_fence();
	if (rn_settings.lenient && !solicited_only && channel && has_completions(cq))
		rn_cq_notify(cq->block, NULL, true);
	rn_unlock(&cq->lock);
	if (channel)
		rn_unlock(&channel->lock);
	return 0;
}

/* --- creating and destroying ------------------------------------------------------------------------- */

/* The process's CQs by block; with rn_world held. */
static struct rn_cq *cqs[RN_CQS_MAX];

static bool block_take(struct rn_cq *cq)
{
	static uint32_t next;
	bool found = false;

	pthread_mutex_lock(&rn_world);
	for (unsigned tried = 0; tried < RN_CQS_MAX && !found; tried++) {
		uint32_t index = next++ % RN_CQS_MAX;

		if (!cqs[index]) {
			found = true;
			cqs[index] = cq;
			cq->index = index;
			cq->block = rn_arena_cq(rn_arena, index);
		}
	}
	pthread_mutex_unlock(&rn_world);
	return found;
}

static void block_give_back(struct rn_cq *cq)
{
	pthread_mutex_lock(&rn_world);
	cqs[cq->index] = NULL;
	pthread_mutex_unlock(&rn_world);
}

static void fall(struct rn_task *task);

static void free_cq(struct rn_cq *cq)
{
	free(cq->stamps);
	free(cq->ring);
	free(cq);
}

struct rn_cq *rn_cq_create(struct ibv_context *ibv_context, const struct ibv_cq_init_attr_ex *attr, bool stamped)
{
	struct rn_context *context = rn_context(ibv_context);
	struct ibv_comp_channel *channel = attr->channel;
	struct rn_cq *cq;
	uint32_t size = 1;

	errno = rn_is_foreign(ibv_context)                          ? ENODEV
		: attr->cqe < 1 || attr->cqe > RN_MAX_CQE           ? EINVAL
		: attr->comp_vector >= (uint32_t)ibv_context->num_comp_vectors ? EINVAL
		: channel && channel->context != ibv_context        ? EINVAL
								    : rn_chaos_call(context, RN_CREATE_CQ);
	if (errno)
		return NULL;
	while (size < attr->cqe)
		size *= 2;
	cq = calloc(1, sizeof(*cq));
	if (!cq)
		return NULL;
	cq->ring = calloc(size, sizeof(*cq->ring));
	cq->stamps = stamped ? calloc(size, sizeof(*cq->stamps)) : NULL;
	if (!cq->ring || (stamped && !cq->stamps) || !block_take(cq)) {
		free_cq(cq);
		errno = ENOMEM;
		return NULL;
	}
	cq->size = size;
	cq->fall.run = fall;
	cq->ready_tail = &cq->ready;
	rn_list_init(&cq->streams);
	cq->cq.context = ibv_context;
	cq->cq.channel = channel;
	cq->cq.cq_context = attr->cq_context;
	cq->cq.handle = cq->index;
	cq->cq.cqe = size;
	pthread_mutex_init(&cq->cq.mutex, NULL);
	pthread_cond_init(&cq->cq.cond, NULL);

	atomic_fetch_and(&cq->block->armed, ~(uint32_t)RN_ARMED_KIND);
	cq->block->channel = channel ? ((struct rn_channel *)channel)->id : RN_NO_CHANNEL;

	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->cqs, &cq->link);
	if (channel) {
		struct rn_channel *its = (struct rn_channel *)channel;

		channel->refcnt++;
		rn_lock(&its->lock);
		rn_list_add(&its->cqs, &cq->channel_link);
		rn_unlock(&its->lock);
	}
	pthread_mutex_unlock(&context->mutex);
	return cq;
}

RN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				       struct ibv_comp_channel *channel, int comp_vector)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = cqe > 0 ? cqe : 0,
		.cq_context = cq_context,
		.channel = channel,
		.comp_vector = comp_vector,
	};
	struct rn_cq *cq = rn_cq_create(context, &attr, false);

	return cq ? &cq->cq : NULL;
}

RN_EXPORT int ibv_resize_cq(struct ibv_cq *ibv_cq, int cqe)
{
	struct rn_cq *cq = rn_cq(ibv_cq);
	uint64_t *stamps = NULL;
	struct rn_cqe *ring;
	uint32_t size = 1, count = 0;

	if (rn_is_foreign(ibv_cq->context))
		return ENODEV;
	if (cqe < 1 || cqe > RN_MAX_CQE)
		return EINVAL;
	while (size < (uint32_t)cqe)
		size *= 2;
	ring = calloc(size, sizeof(*ring));
	if (cq->stamps)
		stamps = calloc(size, sizeof(*stamps));
	if (!ring || (cq->stamps && !stamps)) {
		free(stamps);
		free(ring);
		return ENOMEM;
	}
	rn_lock(&cq->lock);
	if (cq->tail - cq->head > size) {
		rn_unlock(&cq->lock);
		free(stamps);
		free(ring);
		return EINVAL; /* what is there must fit */
	}
	for (uint32_t at = cq->head; at != cq->tail; at++) {
		if (stamps)
			stamps[count] = cq->stamps[at & (cq->size - 1)];
		ring[count++] = cq->ring[at & (cq->size - 1)];
	}
	free(cq->ring);
	free(cq->stamps);
	cq->stamps = stamps;
	cq->ring = ring;
	cq->size = size;
	cq->head = 0;
	cq->tail = count;
	ibv_cq->cqe = size;
	rn_unlock(&cq->lock);
	return 0;
}

/* Has another CQ of the channel an event that was not taken? */
static bool has_unread(struct rn_channel *channel)
{
	bool has;

	rn_lock(&channel->lock);
	has = channel_find(channel, was_signalled) || channel_find(channel, is_owed);
	rn_unlock(&channel->lock);
	return has;
}

/* Tokens of events that were pushed and never read. */
static void drain_tokens(struct rn_channel *channel, uint32_t count)
{
	uint64_t token;
	struct iovec to = {&token, sizeof(token)};

	/* Never waiting, whatever mode the program has set; a kernel that can't leaves them to be skipped. */
	while (count-- && preadv2(channel->channel.fd, &to, 1, -1, RWF_NOWAIT) > 0)
		;
}

RN_EXPORT int ibv_destroy_cq(struct ibv_cq *ibv_cq)
{
	struct rn_context *context = rn_context(ibv_cq->context);
	struct rn_channel *channel = (struct rn_channel *)ibv_cq->channel;
	struct rn_cq *cq = rn_cq(ibv_cq);
	uint32_t unread, reported;

	if (rn_is_foreign(ibv_cq->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (cq->users) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	rn_list_del(&cq->link);
	reported = 0;
	if (channel) {
		rn_lock(&channel->lock);
		rn_list_del(&cq->channel_link);
		reported = cq->events_reported;
		unread = cq->events_owed + (kind_of(cq) == RN_ARMED_SIGNALLED);
		rn_unlock(&channel->lock);
		drain_tokens(channel, unread);
		if (unread && has_unread(channel))
			rn_channel_signal(channel->id); /* a late mark may have made us take a token of theirs */
		pthread_mutex_lock(&rn_world);
		ibv_cq->channel = NULL; /* nothing to recover any more */
		pthread_mutex_unlock(&rn_world);
		channel->channel.refcnt--;
	}
	pthread_mutex_unlock(&context->mutex);

	/* Events that were handed out must come back before the memory they point to goes. */
	pthread_mutex_lock(&ibv_cq->mutex);
	while (ibv_cq->comp_events_completed != reported)
		pthread_cond_wait(&ibv_cq->cond, &ibv_cq->mutex);
	pthread_mutex_unlock(&ibv_cq->mutex);
	rn_event_forget(context, ibv_cq, &cq->async_reported, &ibv_cq->async_events_completed, &ibv_cq->mutex,
			&ibv_cq->cond);

	rn_task_cancel(&cq->fall);
	block_give_back(cq);
	pthread_mutex_destroy(&ibv_cq->mutex);
	pthread_cond_destroy(&ibv_cq->cond);
	free_cq(cq);
	return 0;
}

/* --- queue pairs of a CQ ------------------------------------------------------------------------------- */

int rn_cq_attach(struct rn_cq *cq, struct rn_qp *qp, uint32_t *bit)
{
	int err = ENOMEM;

	rn_lock(&cq->lock);
	/* The lowest free one, so that few queue pairs stay within the block's first line. */
	for (uint32_t i = 0; i < RN_CQ_QPS_MAX && err; i++) {
		if (!cq->attached[i]) {
			cq->attached[i] = qp;
			*bit = i;
			err = 0;
		}
	}
	rn_unlock(&cq->lock);
	return err;
}

/* With the lock held: put the QP on the list of those to take receives from. */
static void make_ready(struct rn_cq *cq, struct rn_qp *qp)
{
	if (qp->is_ready)
		return;
	qp->is_ready = true;
	qp->next_ready = NULL;
	*cq->ready_tail = qp;
	cq->ready_tail = &qp->next_ready;
}

/* With the lock held: what is left of this QP. */
static void forget_receives(struct rn_cq *cq, struct rn_qp *qp)
{
	for (struct rn_qp **at = &cq->ready; *at; at = &(*at)->next_ready) {
		if (*at != qp)
			continue;
		*at = qp->next_ready;
		if (!*at)
			cq->ready_tail = at;
		break;
	}
	qp->is_ready = false;
}

void rn_cq_detach(struct rn_cq *cq, struct rn_qp *qp)
{
	rn_lock(&cq->lock);
	forget_receives(cq, qp);
	cq->attached[qp->cq_bit] = NULL;
	rn_unlock(&cq->lock);
}

void rn_cq_purge(struct rn_cq *cq, struct rn_qp *qp)
{
	uint32_t to;

	rn_lock(&cq->lock);
	to = cq->head;
	for (uint32_t at = cq->head; at != cq->tail; at++) {
		struct rn_cqe *cqe = &cq->ring[at & (cq->size - 1)];

		if (cqe->qp == qp)
			continue;
		if (cq->stamps)
			cq->stamps[to & (cq->size - 1)] = cq->stamps[at & (cq->size - 1)];
		cq->ring[to++ & (cq->size - 1)] = *cqe;
	}
	cq->tail = to;
	if (cq == qp->recv_cq)
		forget_receives(cq, qp);
	rn_unlock(&cq->lock);
}

/* Nobody can learn any more how work on these queue pairs ends. On the engine: the pusher has a lock. */
static void fall(struct rn_task *task)
{
	struct rn_cq *cq = container_of(task, struct rn_cq, fall);

	pthread_mutex_lock(&rn_world);
	for (uint32_t i = 0; i < rn_qps_end; i++) {
		struct rn_qp *qp = rn_qps[i];
		int state;

		if (!qp || (qp->send_cq != cq && qp->recv_cq != cq))
			continue;
		rn_lock(&qp->sq_lock);
		state = atomic_load(&qp->state);
		if (state != IBV_QPS_RESET && state != IBV_QPS_ERR) {
			rn_event_raise(qp->context, IBV_EVENT_QP_FATAL, qp);
			rn_qp_fail(qp);
		}
		rn_unlock(&qp->sq_lock);
	}
	pthread_mutex_unlock(&rn_world);
}

/* Completions are lost, and nobody will learn which: once, and for good. Without the lock. */
static void report_overrun(struct rn_cq *cq)
{
	rn_event_raise(rn_context(cq->cq.context), IBV_EVENT_CQ_ERR, &cq->cq);
	rn_task_post(&cq->fall);
}

void rn_cq_push(struct rn_cq *cq, const struct rn_cqe *cqe)
{
	bool overrun = false;

	rn_lock(&cq->lock);
	if (unlikely(cq->stamps))
		cq->stamps[cq->tail & (cq->size - 1)] = rn_now_ns();
	if (likely(cq->tail - cq->head < cq->size && !cq->overrun)) {
		cq->ring[cq->tail++ & (cq->size - 1)] = *cqe;
	} else if (cq->may_overrun) {
		cq->head++; /* the oldest is lost */
		cq->ring[cq->tail++ & (cq->size - 1)] = *cqe;
	} else {
		overrun = !cq->overrun;
		cq->overrun = true;
	}
	/* Armed under this lock, hence before this push or after it. */
	if (unlikely(atomic_load_explicit(&cq->block->armed, memory_order_relaxed) & RN_ARMED_KIND) &&
	    rn_cq_notify(cq->block, NULL, cqe->status != IBV_WC_SUCCESS)) {
		cqe->qp->count.wakeups++;
		cqe->qp->count.syscalls++;
	}
	rn_unlock(&cq->lock);
	if (unlikely(overrun))
		report_overrun(cq);
}

void rn_cq_kick(struct rn_cq *cq, struct rn_qp *qp)
{
	rn_lock(&cq->lock);
	make_ready(cq, qp);
	rn_cq_notify(cq->block, NULL, true);
	rn_unlock(&cq->lock);
}

void rn_cq_recover(void)
{
	for (uint32_t i = 0; i < RN_CQS_MAX; i++) {
		struct rn_cq *cq = cqs[i];

		if (!cq)
			continue;
		rn_lock(&cq->lock);
		if (has_completions(cq))
			rn_cq_notify(cq->block, NULL, true);
		rn_unlock(&cq->lock);
	}
}

/* --- polling -------------------------------------------------------------------------------------------- */

/* The bits that peers have set become the list. Summary first: see arena.h. */
static void collect_ready(struct rn_cq *cq)
{
	struct rn_cq_block *block = cq->block;
	uint64_t summary, word;

	if (likely(!atomic_load(&block->summary)))
		return;
	for (summary = atomic_exchange(&block->summary, 0); summary; summary &= summary - 1) {
		unsigned at = __builtin_ctzll(summary);

		for (word = atomic_exchange(&block->dirty[at], 0); word; word &= word - 1) {
			struct rn_qp *qp = cq->attached[at * 64 + __builtin_ctzll(word)];

			if (qp)
				make_ready(cq, qp);
		}
	}
}

static int poll_sends(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = 0;

	while (count < entries && cq->head != cq->tail) {
		struct rn_cqe *cqe = &cq->ring[cq->head & (cq->size - 1)];
		struct rn_qp *qp = cqe->qp;

		if (unlikely(cq->stamps))
			cq->stamp = cq->stamps[cq->head & (cq->size - 1)];
		cq->head++;
		wc[count++] = (struct ibv_wc){
			.wr_id = cqe->wr_id,
			.status = cqe->status,
			.opcode = cqe->opcode,
			.vendor_err = cqe->vendor_err,
			.byte_len = cqe->byte_len,
			.qp_num = qp->ex.qp_base.qp_num,
		};
		qp->completions++;
		/* Only now are the slots free, of the unsignaled sends before it as well. */
		atomic_store_explicit(&qp->sq_freed, cqe->sq_freed, memory_order_release);
	}
	return count;
}

/* Chaos has it that this receive fails: the peer mostly knows, and has left a note; we go to ERR anyway. */
static enum ibv_wc_status fail_on_purpose(struct rn_qp *qp, const struct rn_shadow *shadow)
{
	uint32_t none = RN_FAULT_NONE;

	qp->chaos_failed++;
	if (atomic_compare_exchange_strong(&qp->block->fault, &none, RN_FAULT_LOCAL))
		rn_channel_signal(RN_CHANNEL_BELL);
	return shadow->fails;
}

/* One completed receive. The slot was written by the peer: nothing in it is taken on trust. */
static void read_slot(struct rn_qp *qp, uint32_t index, struct ibv_wc *wc)
{
	const struct rn_shadow *shadow = &qp->rq_shadow[index & (qp->rq_size - 1)];
	const struct rn_slot *slot = rn_rq_slot(qp, index);
	uint8_t status = READ_ONCE(slot->status), opcode = READ_ONCE(slot->opcode);
	uint32_t length = READ_ONCE(slot->byte_len);
	uint8_t flags = READ_ONCE(slot->wc_flags);

	if (opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		opcode = IBV_WC_RECV;
		if (unlikely(length > shadow->length))
			length = shadow->length;
	}
	if (flags & RN_SLOT_BOUNCED)
		rn_bounce_take(qp, index, length);
	*wc = (struct ibv_wc){
		.wr_id = shadow->wr_id,
		.status = unlikely(shadow->fails) ? fail_on_purpose(qp, shadow)
			  : status <= IBV_WC_GENERAL_ERR  ? status
							  : IBV_WC_GENERAL_ERR,
		.opcode = opcode,
		.vendor_err = slot->vendor_err,
		.byte_len = length,
		.imm_data = slot->imm_data,
		.qp_num = qp->ex.qp_base.qp_num,
		.src_qp = qp->attr.dest_qp_num,
		.wc_flags = flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV),
	};
	if (unlikely(wc->wc_flags & IBV_WC_WITH_INV))
		rn_mw_settle(wc->invalidated_rkey);
}

/* What an inlet delivers is for the queue pair that it came to. */
static uint32_t number_of(const struct rn_arrival *arrival)
{
	return arrival->destination < RN_QPS_MAX ? atomic_load(&rn_arena_qp(rn_arena, arrival->destination)->qpn) : 0;
}

/* Receives that came from a pool. */
static int poll_pool(struct rn_qp *qp, int entries, struct ibv_wc *wc)
{
	struct rn_arrival arrival;
	int count = 0;

	for (; count < entries && rn_pool_next(qp->pool, &qp->arrivals, &arrival); count++) {
		wc[count] = (struct ibv_wc){
			.wr_id = arrival.wr_id,
			.status = arrival.status,
			.opcode = arrival.opcode,
			.vendor_err = arrival.vendor_err,
			.byte_len = arrival.byte_len,
			.imm_data = arrival.imm_data,
			.qp_num = qp->is_inlet ? number_of(&arrival) : qp->ex.qp_base.qp_num,
			.src_qp = qp->ud || qp->is_inlet ? arrival.source_qpn : qp->attr.dest_qp_num,
			.wc_flags = arrival.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV | IBV_WC_GRH),
		};
		if (unlikely(wc[count].wc_flags & IBV_WC_WITH_INV))
			rn_mw_settle(wc[count].invalidated_rkey);
	}
	qp->completions += count;
	return count;
}

static int poll_receives(struct rn_cq *cq, struct rn_qp *qp, int entries, struct ibv_wc *wc)
{
	uint32_t polled = atomic_load_explicit(&qp->rq_polled, memory_order_relaxed);
	uint32_t posted = atomic_load_explicit(&qp->rq_posted, memory_order_acquire);
	uint32_t end = qp->rq_flushing ? qp->rq_frozen : posted;
	int count = 0;

	if (unlikely(cq->stamps))
		cq->stamp = rn_now_ns(); /* of what is flushed, or comes from a pool */
	if (unlikely(qp->pool))
		return poll_pool(qp, entries, wc);
	for (; count < entries && polled != end && rn_rq_is_done(qp, polled); polled++) {
		if (unlikely(cq->stamps))
			cq->stamp = atomic_load(rn_slot_stamp(rn_rq_slot(qp, polled), qp->rq_stride));
		read_slot(qp, polled, &wc[count++]);
	}
	if (unlikely(qp->rq_flushing)) {
		for (; count < entries && polled != posted; polled++) {
			wc[count++] = (struct ibv_wc){
				.wr_id = qp->rq_shadow[polled & (qp->rq_size - 1)].wr_id,
				.status = IBV_WC_WR_FLUSH_ERR,
				.opcode = IBV_WC_RECV,
				.qp_num = qp->ex.qp_base.qp_num,
			};
		}
	}
	qp->completions += count;
	atomic_store_explicit(&qp->rq_polled, polled, memory_order_release);
	return count;
}

/* What comes from now on sets a dirty bit. */
static bool has_receives(struct rn_qp *qp)
{
	uint32_t polled = atomic_load(&qp->rq_polled);

	if (unlikely(qp->pool))
		return qp->arrivals.first || atomic_load(qp->arrivals.finished);
	return polled != atomic_load(&qp->rq_posted) && (qp->rq_flushing || rn_rq_is_done(qp, polled));
}

static int poll_ready(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = 0;

	collect_ready(cq);
	while (count < entries && cq->ready) {
		struct rn_qp *qp = cq->ready;
		int got = poll_receives(cq, qp, entries - count, wc + count);

		cq->ready = qp->next_ready;
		if (!cq->ready)
			cq->ready_tail = &cq->ready;
		qp->is_ready = false;
		count += got;
		/* There is more, but it is the next one's turn. */
		if (count == entries && has_receives(qp))
			make_ready(cq, qp);
	}
	return count;
}

/*
 * Programs that poll in a loop: the peer whose work they wait for may be waiting for this CPU.  To
 * offer it costs as much as a message, so he who finds that nobody wants it offers it less and less.
 */
static void polled_nothing(void)
{
	enum { LEAST = 32, MOST = 2048, NOBODY_NS = 1500 };
	static _Thread_local unsigned in_vain, patience = LEAST;
	uint64_t began;

	if (likely(++in_vain < patience))
		return;
	in_vain = 0;
	began = rn_now_ns();
	sched_yield();
	if (rn_now_ns() - began > NOBODY_NS)
		patience = LEAST;
	else if (patience < MOST)
		patience *= 2;
}

/* Chaos has it that one of these found no room: from that one on they are gone. With the lock held. */
static int lose_one(struct rn_cq *cq, int count)
{
	int left = rn_chaos_overrun(rn_context(cq->cq.context), count);

	if (left == count)
		return count;
	cq->overrun = true;
	report_overrun(cq);
	return left ? left : -EIO;
}

/* As many as there are, sends and receives in turns; or -errno. */
static int poll_all(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count;

	rn_lock(&cq->lock);
	if (unlikely(cq->overrun)) {
		rn_unlock(&cq->lock);
		return -EIO;
	}
	cq->sends_first = !cq->sends_first;
	if (cq->sends_first) {
		count = poll_sends(cq, entries, wc);
		count += poll_ready(cq, entries - count, wc + count);
	} else {
		count = poll_ready(cq, entries, wc);
		count += poll_sends(cq, entries - count, wc + count);
	}
	if (unlikely(atomic_load_explicit(&rn_context(cq->cq.context)->chaos.may_overrun, memory_order_relaxed)))
		count = lose_one(cq, count);
	if (unlikely(rn_settings.lenient) && count && cq->cq.channel)
		take_event_back(cq);
	rn_unlock(&cq->lock);
	return count;
}

static int poll_or_look(struct rn_cq *cq, int entries, struct ibv_wc *wc)
{
	int count = poll_all(cq, entries, wc);

	if (!count && unlikely(atomic_load_explicit(&cq->num_streams, memory_order_relaxed)) && rn_stream_poll(cq))
		count = poll_all(cq, entries, wc);
	if (count)
		rn_order_by_peer();
	else
		polled_nothing();
	return count;
}

int rn_cq_poll(struct ibv_cq *ibv_cq, int entries, struct ibv_wc *wc)
{
	if (unlikely(rn_is_foreign(ibv_cq->context)))
		return -ENODEV;
	if (unlikely(entries <= 0))
		return entries < 0 ? -EINVAL : 0;
	return poll_or_look(rn_cq(ibv_cq), entries, wc);
}

int rn_cq_take(struct rn_cq *cq, struct ibv_wc *wc, uint64_t *stamp)
{
	int got = rn_cq_poll(&cq->cq, 1, wc);

	*stamp = cq->stamp;
	return got;
}

/* --- the end -------------------------------------------------------------------------------------------- */

void rn_cq_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->cqs)) {
		struct rn_cq *cq = container_of(context->cqs.next, struct rn_cq, link);

		cq->cq.comp_events_completed = cq->events_reported;
		cq->cq.async_events_completed = cq->async_reported;
		ibv_destroy_cq(&cq->cq);
	}
	while (!rn_list_empty(&context->channels))
		ibv_destroy_comp_channel(&container_of(context->channels.next, struct rn_channel, link)->channel);
}

void rn_cq_forked(void)
{
	memset(&channel_lock, 0, sizeof(channel_lock));
	memset(channels, 0, sizeof(channels));
	memset(cqs, 0, sizeof(cqs));
	bell = (struct rn_source){.fd = -1};
}
