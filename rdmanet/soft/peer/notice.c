/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notices: telling subscribers what becomes of a peer, or that a segment has come. Sources: peer.c (its pidfd) and
 * link.c (its link's end). Subscribers: objects/qp_events.c and cm/callbacks.c.  There are none of a peer on
 * another host: see tcp/tcp.c, tcp/timeout.c and cm/socket.c.
 *
 * Callbacks run on the engine, without rn_peers.lock, one after the other.  `running` names the one that is under way,
 * so whoever unsubscribes from another thread can wait for it.
 */
#include "peer/peers.h"

/* --- callbacks ---------------------------------------------------------------------------------- */

/* Both with the lock held. */
void rn_callback_begin(void *object)
{
	rn_peers.running = object;
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_callback_end(void)
{
	pthread_mutex_lock(&rn_peers.lock);
	rn_peers.running = NULL;
	if (rn_peers.waiters)
		pthread_cond_broadcast(&rn_peers.calm);
}

void rn_callback_settle(void *object)
{
	if (rn_engine_inside()) {
		if (rn_peers.running == object)
			rn_peers.running = NULL;
		return;
	}
	while (rn_peers.running == object) {
		rn_peers.waiters++;
		pthread_cond_wait(&rn_peers.calm, &rn_peers.lock);
		rn_peers.waiters--;
	}
}

/* --- subscribers -------------------------------------------------------------------------------- */

static void notice_append(struct peer *peer, struct rn_notice *notice)
{
	notice->next = NULL;
	notice->link = peer->notices_end;
	*peer->notices_end = notice;
	peer->notices_end = &notice->next;
}

static void notice_unlink(struct peer *peer, struct rn_notice *notice)
{
	*notice->link = notice->next;
	if (notice->next)
		notice->next->link = notice->link;
	else
		peer->notices_end = notice->link;
	notice->next = NULL;
	notice->link = NULL;
}

/* Tell every present subscriber once; they may subscribe and leave meanwhile. Those that were told move to
 * the end, so the first that is marked ends the round. Lock held, but not while they run. */
void rn_peer_notify(struct peer *peer, enum rn_notice_why why)
{
	uint64_t round = ++rn_peers.round;

	peer->refs++;
	while (peer->notices && peer->notices->round != round) {
		struct rn_notice *notice = peer->notices;

		notice_unlink(peer, notice);
		notice_append(peer, notice);
		notice->round = round;
		rn_callback_begin(notice);
		notice->run(notice, &peer->rn, why);
		rn_callback_end();
	}
	rn_peer_put_locked(peer);
}

/* All peers of a process that have it mapped. A peer that is added meanwhile need not be told; it looks by itself. */
void rn_process_notify(struct process *process, enum rn_notice_why why)
{
	uint64_t round = ++rn_peers.round;
	struct peer *peer;

	process->peers_count++; /* it stays */
	do {
		peer = process->peers;
		while (peer && (peer->round == round || peer->is_unmapped))
			peer = peer->next_sibling;
		if (peer) {
			peer->round = round;
			rn_peer_notify(peer, why);
		}
	} while (peer);
	process->peers_count--;
	rn_process_let_go(process);
}

static void waiting_unlink(struct rn_notice *notice)
{
	if (!notice->waiting)
		return;
	*notice->waiting = notice->next_waiting;
	if (notice->next_waiting)
		notice->next_waiting->waiting = notice->waiting;
	notice->waiting = NULL;
}

void rn_process_await(struct process *process, struct rn_notice *notice)
{
	if (!notice || !notice->link || notice->waiting)
		return;
	notice->next_waiting = process->waiting;
	if (notice->next_waiting)
		notice->next_waiting->waiting = &notice->next_waiting;
	notice->waiting = &process->waiting;
	process->waiting = notice;
}

/* Those that wait again meanwhile are on the process's list, and their turn comes with the next segment. */
void rn_process_tell_waiting(struct process *process)
{
	struct rn_notice *told = process->waiting;

	process->waiting = NULL;
	if (told)
		told->waiting = &told;
	process->peers_count++; /* it stays */
	while (told) {
		struct rn_notice *notice = told;
		struct peer *peer = PEER(notice->peer);

		waiting_unlink(notice);
		peer->refs++;
		rn_callback_begin(notice);
		notice->run(notice, &peer->rn, RN_SEGMENT_READY);
		rn_callback_end();
		rn_peer_put_locked(peer);
	}
	process->peers_count--;
	rn_process_let_go(process);
}

void rn_peer_subscribe(struct rn_peer *rn_peer, struct rn_notice *notice)
{
	notice->peer = rn_peer;
	notice->round = 0;
	notice->link = NULL;
	notice->waiting = NULL;
	if (atomic_load(&rn_peer->state) == RN_PEER_SELF)
		return; /* nothing ever happens to it */
	pthread_mutex_lock(&rn_peers.lock);
	notice_append(PEER(rn_peer), notice);
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_peer_unsubscribe(struct rn_notice *notice)
{
	if (!notice->peer || atomic_load(&notice->peer->state) == RN_PEER_SELF)
		return;
	pthread_mutex_lock(&rn_peers.lock);
	if (notice->link)
		notice_unlink(PEER(notice->peer), notice);
	waiting_unlink(notice);
	rn_callback_settle(notice);
	notice->peer = NULL;
	pthread_mutex_unlock(&rn_peers.lock);
}
