/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers and the processes they belong to: how long they are kept, and how the death of a process is noticed (its
 * pidfd, or the end of its link) and reported.  peers.h has the theory.
 */
#include "peer/peers.h"
#include "shm/segment.h"

#include <assert.h>
#include <stdlib.h>

struct peers_state rn_peers = {.lock = PTHREAD_MUTEX_INITIALIZER, .calm = PTHREAD_COND_INITIALIZER};

static void stop_all(void);
static void forget_in_child(void);

const struct rn_peer_ops *rn_peer_ops;
static rn_peer_hear *connection_heard;

void rn_peers_register(const struct rn_peer_ops *ops)
{
	rn_peer_ops = ops;
}

void rn_peers_register_connections(rn_peer_hear *hear)
{
	connection_heard = hear;
}

void rn_peers_hear(const void *process, uint32_t what, uint64_t token, const void *message, size_t length)
{
	if (connection_heard)
		connection_heard(process, what, token, message, length);
}

static void start_once(void)
{
	rn_settings_need();
	rn_at_segment_gone(rn_peers_tell_segment_gone);
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

void rn_peers_start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
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

/* Nobody finds it any more, and the engine watches nothing of it. */
static void process_close(struct process *process)
{
	process_unlist(process);
	if (process->link)
		rn_link_close(process->link);
	rn_source_remove(&process->pidfd);
	rn_timer_cancel(&process->idle);
	rn_timer_cancel(&process->again);
	rn_fd_close(process->pidfd.fd);
}

/* On the engine; or, for a dead process, which is closed already, in any thread. */
static void process_free(struct process *process)
{
	if (!process->dead)
		process_close(process);
	rn_process_release(process);
	pthread_mutex_destroy(&process->channel_lock);
	free(process);
}

/* One user fewer. */
void rn_process_let_go(struct process *process)
{
	if (process->peers_count)
		return;
	if (!process->dead)
		rn_timer_set_ms(&process->idle, IDLE_MS);
	else if (!process->inbound_count)
		process_free(process);
}

/* It was not used since: drop our link and its memory; it may keep its own link. */
static void process_idle(struct rn_timer *timer)
{
	struct process *process = RN_OWNER(timer, struct process, idle);

	pthread_mutex_lock(&rn_peers.lock);
	if (!process->peers_count && !process->inbound_count) {
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

/* Called once, on the engine, with the lock held, except while subscribers are told. */
void rn_process_died(struct process *process)
{
	int pid = process->pid;

	if (process->dead)
		return;
	process->dead = true;
	process->peers_count++; /* it stays until all have been told */
	process_close(process);
	for (struct inbound *inbound = rn_peers.inbound, *next; inbound; inbound = next) {
		next = inbound->next;
		if (inbound->process == process)
			rn_inbound_close(inbound);
	}
	for (struct peer *peer = process->peers; peer; peer = peer->next_sibling) {
		rn_peer_unlist(peer);
		rn_timer_cancel(&peer->idle);
		atomic_store(&peer->rn.state, RN_PEER_DEAD);
	}
	/* Free those without users. */
	for (struct peer *peer = process->peers, *next; peer; peer = next) {
		next = peer->next_sibling;
		if (!peer->refs)
			peer_free(peer);
	}
	pthread_mutex_unlock(&rn_peers.lock);
	rn_peer_ops->died(pid);
	pthread_mutex_lock(&rn_peers.lock);
	rn_replies_fail(process);
	rn_process_notify(process, RN_PEER_DIED);
	process->peers_count--;
	rn_process_let_go(process);
}

static void pidfd_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct process *process = RN_OWNER(source, struct process, pidfd);

	(void)epoll_events;
	pthread_mutex_lock(&rn_peers.lock);
	rn_inbound_last_words(process);
	rn_process_died(process);
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
	is_mutual = PEER(rn_peer)->process->inbound_count > 0;
	pthread_mutex_unlock(&rn_peers.lock);
	return is_mutual;
}

bool rn_peer_is_met(uint16_t number)
{
	bool is = rn_port_is_mine(number);

	pthread_mutex_lock(&rn_peers.lock);
	for (struct peer *peer = rn_peers.peers; peer && !is; peer = peer->next)
		is = peer->rn.port == number && atomic_load(&peer->rn.state) == RN_PEER_READY &&
		     peer->process->inbound_count;
	pthread_mutex_unlock(&rn_peers.lock);
	return is;
}

/* --- for the connection manager ----------------------------------------------------------------- */

static void death_notice(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
{
	struct rn_death *death = RN_OWNER(notice, struct rn_death, notice);

	(void)peer;
	if (why == RN_LINK_FAILED || why == RN_PEER_DIED)
		death->dead(death, why == RN_LINK_FAILED);
	else if ((why == RN_LINK_READY || why == RN_LINK_MUTUAL) && death->linked)
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

/* On the engine, when it has no users left. Peers that still have a user are left to it, dead. */
static void stop_all(void)
{
	pthread_mutex_lock(&rn_peers.lock);
	while (rn_peers.inbound)
		rn_inbound_close(rn_peers.inbound);
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
		process_close(process);
		process->dead = true;
		if (!process->peers_count)
			process_free(process);
	}
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
	rn_peers.inbound = NULL;
	rn_peers.ports = NULL;
	rn_peers.instance = 0;
	rn_peers.links = rn_peers.inbound_count = rn_peers.mappings = rn_peers.peer_count = 0;
}

void rn_peer_live(struct rn_peer_live *live)
{
	pthread_mutex_lock(&rn_peers.lock);
	*live = (struct rn_peer_live){
		.peers = rn_peers.peer_count,
		.links = rn_peers.links,
		.inbound = rn_peers.inbound_count,
		.mappings = rn_peers.mappings,
	};
	pthread_mutex_unlock(&rn_peers.lock);
}
