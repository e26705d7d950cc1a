/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers and the processes they belong to: how long they are kept, how their death is told.
 * peers.h has the theory.
 */
#define _GNU_SOURCE
#include "peers.h"

#include <assert.h>
#include <stdlib.h>

struct peers_state rn_peers = {.lock = PTHREAD_MUTEX_INITIALIZER, .calm = PTHREAD_COND_INITIALIZER};

static void stop_all(void);
static void forget_in_child(void);

static void start_once(void)
{
	rn_settings_need();
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

void rn_peers_start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
}

/* --- callbacks: the engine's, without the lock -------------------------------------------------- */

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

/* Everybody who subscribes now, once; they may come and go meanwhile. Those that were told move to
 * the end, so the first that is marked ends the round. Lock held, but not while they run. */
void rn_peer_notify(struct peer *peer, enum rn_notice_why why)
{
	unsigned round = ++rn_peers.round;

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

/* All peers of a process that have it mapped. A peer that comes in between needn't be told; it looks by itself. */
void rn_process_notify(struct process *process, enum rn_notice_why why)
{
	unsigned round = ++rn_peers.round;
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

/* --- processes and peers ------------------------------------------------------------------------ */

static void process_unlist(struct process *process)
{
	struct process **at = &rn_peers.processes;

	while (*at && *at != process)
		at = &(*at)->next;
	if (*at)
		*at = process->next;
}

/* The engine's, or of a dead process, whose sources have been removed: any thread. */
static void process_free(struct process *process)
{
	if (!process->dead) {
		process_unlist(process);
		if (process->link)
			rn_link_close(process->link);
		rn_source_remove(&process->pidfd);
		rn_timer_cancel(&process->idle);
		rn_timer_cancel(&process->again);
		rn_fd_close(process->pidfd.fd);
	}
	rn_process_release(process);
	pthread_mutex_destroy(&process->channel_lock);
	free(process);
}

/* Somebody has let go of it. */
void rn_process_let_go(struct process *process)
{
	if (process->peers_count)
		return;
	if (!process->dead)
		rn_timer_set_ms(&process->idle, IDLE_MS);
	else if (!process->served_count)
		process_free(process);
}

/* Nobody has asked for it since: our link and its memory go, though it may keep its own link. */
static void process_idle(struct rn_timer *timer)
{
	struct process *process = RN_OWNER(timer, struct process, idle);

	pthread_mutex_lock(&rn_peers.lock);
	if (!process->peers_count && !process->served_count) {
		process_free(process);
	} else if (!process->peers_count) {
		if (process->link)
			rn_link_close(process->link);
		rn_process_release(process);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}

void rn_peer_unlist(struct peer *peer)
{
	struct peer **at = &rn_peers.peers;

	if (!peer->listed)
		return;
	while (*at != peer)
		at = &(*at)->next;
	*at = peer->next;
	peer->listed = false;
}

/* The engine's, or of a dead peer: any thread. */
static void peer_free(struct peer *peer)
{
	struct process *process = peer->process;

	rn_peer_unlist(peer);
	if (peer->link)
		rn_link_close(peer->link);
	if (process) {
		struct peer **at = &process->peers;

		while (*at != peer)
			at = &(*at)->next_sibling;
		*at = peer->next_sibling;
		process->peers_count--;
	}
	rn_peers.peer_count--;
	free(peer);
	if (process)
		rn_process_let_go(process);
}

void rn_peer_put_locked(struct peer *peer)
{
	assert(peer->refs);
	if (--peer->refs)
		return;
	if (atomic_load(&peer->rn.state) == RN_PEER_DEAD)
		peer_free(peer);
	else
		rn_timer_set_ms(&peer->idle, IDLE_MS);
}

static void peer_idle(struct rn_timer *timer)
{
	struct peer *peer = RN_OWNER(timer, struct peer, idle);

	pthread_mutex_lock(&rn_peers.lock);
	if (!peer->refs)
		peer_free(peer);
	pthread_mutex_unlock(&rn_peers.lock);
}

/* Once. On the engine, lock held, but not while the others are told. */
void rn_process_died(struct process *process)
{
	int pid = process->pid;

	if (process->dead)
		return;
	process->dead = true;
	process_unlist(process);
	process->peers_count++; /* it stays until all is said */
	if (process->link)
		rn_link_close(process->link);
	rn_source_remove(&process->pidfd);
	rn_timer_cancel(&process->idle);
	rn_timer_cancel(&process->again);
	rn_fd_close(process->pidfd.fd);
	for (struct served *served = rn_peers.served, *next; served; served = next) {
		next = served->next;
		if (served->process == process)
			rn_served_close(served);
	}
	for (struct peer *peer = process->peers; peer; peer = peer->next_sibling) {
		rn_peer_unlist(peer);
		rn_timer_cancel(&peer->idle);
		atomic_store(&peer->rn.state, RN_PEER_DEAD);
	}
	/* Those that nobody has any more. */
	for (struct peer *peer = process->peers, *next; peer; peer = next) {
		next = peer->next_sibling;
		if (!peer->refs)
			peer_free(peer);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	rn_peer_died(pid);
	pthread_mutex_lock(&rn_peers.lock);
	rn_replies_fail(process);
	rn_process_notify(process, RN_PEER_DIED);
	process->peers_count--;
	rn_process_let_go(process);
}

static void pidfd_ready(struct rn_source *source, uint32_t epoll_events)
{
	(void)epoll_events;
	pthread_mutex_lock(&rn_peers.lock);
	rn_process_died(RN_OWNER(source, struct process, pidfd));
	pthread_mutex_unlock(&rn_peers.lock);
}

struct process *rn_process_of(int pid, uint64_t instance, int pidfd)
{
	struct process *process;

	for (process = rn_peers.processes; process; process = process->next) {
		if (process->pid == pid && process->instance == instance) {
			rn_fd_close(pidfd);
			return process;
		}
	}
	/* The same process with another instance: that device was closed; say so before anybody
	 * learns of the new one. Its own end may be in the queue yet. */
	for (process = rn_peers.processes; process; process = process->next)
		if (process->pid == pid)
			break;
	if (process)
		rn_process_died(process);

	process = calloc(1, sizeof *process);
	if (!process) {
		rn_fd_close(pidfd);
		return NULL;
	}
	process->pid = pid;
	process->instance = instance;
	process->replies_end = &process->replies;
	process->idle.fire = process_idle;
	process->again.fire = rn_segments_ask;
	pthread_mutex_init(&process->channel_lock, NULL);
	process->pidfd = (struct rn_source){.fd = pidfd, .ready = pidfd_ready};
	if (process->pidfd.fd >= 0)
		rn_source_add(&process->pidfd, EPOLLIN); /* without, the link tells */
	process->next = rn_peers.processes;
	rn_peers.processes = process;
	return process;
}

/* --- having and letting go ---------------------------------------------------------------------- */

struct rn_peer *rn_peer_get(uint16_t number)
{
	struct peer *peer;
	struct port *port;

	rn_peers_start();
	pthread_mutex_lock(&rn_peers.lock);
	for (port = rn_peers.ports; port; port = port->next) {
		if (port->port == number) {
			pthread_mutex_unlock(&rn_peers.lock);
			return &port->self;
		}
	}
	for (peer = rn_peers.peers; peer; peer = peer->next)
		if (peer->rn.port == number)
			break;
	if (!peer) {
		peer = calloc(1, sizeof *peer);
		if (!peer)
			goto out;
		rn_peers.peer_count++;
		peer->rn.port = number;
		peer->notices_end = &peer->notices;
		peer->idle.fire = peer_idle;
		peer->rn.state = RN_PEER_CONNECTING;
		if (rn_link_start(peer)) {
			peer->rn.state = RN_PEER_DEAD;
		} else {
			peer->next = rn_peers.peers;
			rn_peers.peers = peer;
			peer->listed = true;
		}
	}
	peer->refs++;
out:
	pthread_mutex_unlock(&rn_peers.lock);
	return peer ? &peer->rn : NULL;
}

void rn_peer_put(struct rn_peer *peer)
{
	if (!peer || atomic_load(&peer->state) == RN_PEER_SELF)
		return;
	pthread_mutex_lock(&rn_peers.lock);
	rn_peer_put_locked(PEER(peer));
	pthread_mutex_unlock(&rn_peers.lock);
}

bool rn_peer_is_mutual(struct rn_peer *rn_peer)
{
	bool is_mutual;

	pthread_mutex_lock(&rn_peers.lock);
	is_mutual = PEER(rn_peer)->process->served_count > 0;
	pthread_mutex_unlock(&rn_peers.lock);
	return is_mutual;
}

bool rn_peer_is_met(uint16_t number)
{
	bool is = rn_port_is_mine(number);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct peer *peer = rn_peers.peers; peer && !is; peer = peer->next)
		is = peer->rn.port == number && atomic_load(&peer->rn.state) == RN_PEER_READY &&
		     peer->process->served_count;
	pthread_mutex_unlock(&rn_peers.lock);
	return is;
}

/* --- for the connection manager ----------------------------------------------------------------- */

void rn_peer_warm(uint16_t port)
{
	rn_peer_put(rn_peer_get(port)); /* kept for a while */
}

static void death_notice(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
{
	struct rn_death *death = RN_OWNER(notice, struct rn_death, notice);

	(void)peer;
	if (why == RN_LINK_FAILED || why == RN_PEER_DIED)
		death->dead(death, why == RN_LINK_FAILED);
	else if (why == RN_LINK_READY && death->linked)
		death->linked(death);
}

int rn_peer_watch_death(uint16_t port, struct rn_death *death)
{
	death->peer = rn_peer_get(port);
	if (!death->peer)
		return -ENOMEM;
	death->notice.run = death_notice;
	rn_peer_subscribe(death->peer, &death->notice);
	if (atomic_load(&death->peer->state) != RN_PEER_DEAD)
		return 0;
	rn_peer_unwatch_death(death);
	return -ENOTCONN;
}

void rn_peer_unwatch_death(struct rn_death *death)
{
	struct rn_peer *peer = death->peer;

	if (!peer)
		return;
	rn_peer_unsubscribe(&death->notice);
	death->peer = NULL;
	rn_peer_put(peer);
}

/* --- the end ------------------------------------------------------------------------------------ */

/* On the engine, when nobody holds it. Peers that somebody has still are left to him, dead. */
static void stop_all(void)
{
	pthread_mutex_lock(&rn_peers.lock);
	while (rn_peers.served)
		rn_served_close(rn_peers.served);
	for (struct peer *peer = rn_peers.peers, *next; peer; peer = next) {
		next = peer->next;
		rn_peer_unlist(peer);
		rn_timer_cancel(&peer->idle);
		atomic_store(&peer->rn.state, RN_PEER_DEAD);
		if (!peer->refs)
			peer_free(peer);
		else if (peer->link)
			rn_link_close(peer->link);
	}
	for (struct process *process = rn_peers.processes, *next; process; process = next) {
		next = process->next;
		if (process->link)
			rn_link_close(process->link);
		rn_source_remove(&process->pidfd);
		rn_timer_cancel(&process->idle);
		rn_timer_cancel(&process->again);
		rn_fd_close(process->pidfd.fd);
		process->dead = true;
		if (!process->peers_count)
			process_free(process);
	}
	rn_peers.processes = NULL;
	while (rn_peers.ports) {
		struct port *port = rn_peers.ports;

		rn_peers.ports = port->next;
		rn_port_free(port);
	}
	rn_peers.instance = 0;
	pthread_mutex_unlock(&rn_peers.lock);
}

static void forget_in_child(void)
{
	pthread_mutex_init(&rn_peers.lock, NULL);
	pthread_cond_init(&rn_peers.calm, NULL);
	rn_peers.running = NULL;
	rn_peers.waiters = 0;
	rn_peers.peers = NULL;
	rn_peers.processes = NULL;
	rn_peers.served = NULL;
	rn_peers.ports = NULL;
	rn_peers.instance = 0;
	rn_peers.links = rn_peers.served_count = rn_peers.mappings = rn_peers.peer_count = 0;
}

void rn_peer_live(struct rn_peer_live *live)
{
	pthread_mutex_lock(&rn_peers.lock);
	*live = (struct rn_peer_live){
		.peers = rn_peers.peer_count,
		.links = rn_peers.links,
		.served = rn_peers.served_count,
		.mappings = rn_peers.mappings,
	};
	pthread_mutex_unlock(&rn_peers.lock);
}
