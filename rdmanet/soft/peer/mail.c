/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mail: what a connection manager says to another one in memory, so that it wakes the program and not an engine first.
 *
 *      writer                                                        reader
 *      fills the next slot of its ring for this reader
 *      writes to the reader's event channel (channels.c) ----------> the program reads an event, and hears its mail
 *      MAIL: "my ring for you is there", once ------ link ---------> the engine, which hears the mail as well
 *
 * A process has a ring in its own arena for each process that it says something to.  So a ring has one writer and one
 * reader, and what lies in it was said by the process whose arena it is.  Nothing else is believed: a message is copied
 * once, and then checked like one that came by the link.
 *
 * A slot's `turn` says whose it is: a nonce, and below it a position; that of the message that may be written there next,
 * one more when it is there.  The ring's memory has another nonce each time it is used, so a reader that was stopped, and
 * reads when the ring is another's, finds nothing and changes nothing.
 *
 * Order.  What is said by the link wakes the engine, which first hears the mail that was written before.  So who says
 * something by the link because the ring is full says all that follows by the link (cm/link.c).
 *
 * A reader that has answers for the writer which the writer does not take hears no more of its mail than of its link
 * (inbound.c), until they are gone: who asks and never listens does not fill our memory.
 *
 * Nobody may read it any more: the channel that was rung is destroyed, or has another number; the reader gives up our
 * arena, or we give up the link.  Then the writer takes back what was not read, and says it by the link, and what it says
 * next in another ring.  Who asks for a channel that is gone (channels.c) is heard at once.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "peer/peers.h"
#include "shm/arena.h"

enum { SLOTS = 64, ROOM = 232 };

struct slot {
	_Atomic uint64_t turn;
	uint64_t token;
	uint32_t what, length;
	unsigned char bytes[ROOM];
};
static_assert(sizeof(struct slot) == 256, "whole pairs of cache lines");

/* One that was taken out of a ring. */
struct letter {
	uint64_t token;
	uint32_t what, length;
	alignas(8) unsigned char bytes[ROOM];
};

static uint64_t turn(const struct ring *ring, uint32_t position)
{
	return (uint64_t)ring->nonce << 32 | position;
}

static struct slot *slot_of(char *arena, const struct ring *ring, uint32_t position)
{
	return (struct slot *)(arena + ring->offset) + position % SLOTS;
}

/* --- writing --------------------------------------------------------------------------------------- */

/* Our ring for this process, of which it has been told. False: there is none. */
static bool open_ring(struct process *process)
{
	struct ring ring = {.offset = rn_arena_alloc(SLOTS * sizeof(struct slot))};
	struct rn_link_message mail;

	if (!ring.offset)
		return false;
	if (getrandom(&ring.nonce, sizeof ring.nonce, GRND_NONBLOCK) != sizeof ring.nonce)
		ring.nonce = (uint32_t)rn_now_ns();
	for (uint32_t i = 0; i < SLOTS; i++)
		atomic_store(&slot_of(rn_arena, &ring, i)->turn, turn(&ring, i));
	mail = rn_link_message(RN_LINK_MAIL, ring.nonce, (int64_t)ring.offset);
	if (rn_send(&process->link->source, &process->link->out, &mail, NULL, 0, -1)) {
		rn_arena_free(ring.offset, SLOTS * sizeof(struct slot));
		return false;
	}
	process->mail_out = ring;
	return true;
}

static void close_ring(struct process *process)
{
	rn_arena_free(process->mail_out.offset, SLOTS * sizeof(struct slot));
	process->mail_out.offset = 0;
}

/* What lies in our own arena others may have changed: it goes to who could read it anyhow. */
static void say_by_link(struct process *process, const struct slot *slot)
{
	struct rn_link_message message =
		rn_link_message(RN_LINK_CONNECTION, READ_ONCE(slot->what), (int64_t)READ_ONCE(slot->token));
	uint32_t length = READ_ONCE(slot->length);

	rn_send(&process->link->source, &process->link->out, &message, slot->bytes, length < ROOM ? length : ROOM, -1);
}

void rn_mail_take_back(struct process *process)
{
	struct ring *ring = &process->mail_out;
	bool was_unread = false;

	if (!ring->offset || !process->link)
		return;
	for (uint32_t position = ring->position - SLOTS; position != ring->position; position++) {
		struct slot *slot = slot_of(rn_arena, ring, position);
		uint64_t filled = turn(ring, position + 1);

		if (!atomic_compare_exchange_strong(&slot->turn, &filled, turn(ring, position + SLOTS)))
			continue;
		say_by_link(process, slot);
		was_unread = true;
	}
	if (was_unread)
		close_ring(process);
}

void rn_mail_close(struct process *process)
{
	rn_mail_take_back(process);
	if (process->mail_out.offset)
		close_ring(process);
}

/* False: the ring is full, or the reader has made something else of it. */
static bool put(struct ring *ring, const struct letter *letter)
{
	struct slot *slot = slot_of(rn_arena, ring, ring->position);

	if (atomic_load_explicit(&slot->turn, memory_order_acquire) != turn(ring, ring->position))
		return false;
	slot->token = letter->token;
	slot->what = letter->what;
	slot->length = letter->length;
	memcpy(slot->bytes, letter->bytes, letter->length);
	ring->position++;
	atomic_store_explicit(&slot->turn, turn(ring, ring->position), memory_order_release);
	return true;
}

bool rn_peer_mail(struct rn_peer *rn_peer, uint32_t channel, uint32_t what, uint64_t token, const void *bytes,
		  size_t length)
{
	struct letter letter = {.token = token, .what = what, .length = (uint32_t)length};
	struct process *process;
	bool is_there;

	if (!channel || length > ROOM || atomic_load(&rn_peer->state) != RN_PEER_READY)
		return false;
	memcpy(letter.bytes, bytes, length);
	pthread_mutex_lock(&rn_peers.lock);
	process = PEER(rn_peer)->process;
	is_there = !process->dead && process->link && (process->mail_out.offset || open_ring(process)) &&
		   put(&process->mail_out, &letter);
	pthread_mutex_unlock(&rn_peers.lock);
	if (is_there)
		rn_peer_signal(rn_peer, channel);
	return is_there;
}

/* --- hearing --------------------------------------------------------------------------------------- */

void rn_on_mail(struct process *process)
{
	struct ring ring = {.offset = (uint64_t)rn_inbox.message.size, .nonce = rn_inbox.message.value};

	if (ring.offset < RN_ARENA_HEAP || ring.offset % 64 || ring.offset > RN_ARENA_SIZE - SLOTS * sizeof(struct slot)) {
		rn_warn(RN_WARN_LANGUAGE, "another process says that its messages lie where none can be");
		return;
	}
	process->mail_in = ring;
	rn_mail_hear(process, false);
}

static bool has_mail(const struct process *process)
{
	const struct ring *ring = &process->mail_in;

	return ring->offset && process->arena && process->arena_size == RN_ARENA_SIZE && !process->dead &&
	       atomic_load_explicit(&slot_of(process->arena, ring, ring->position)->turn, memory_order_acquire) ==
		       turn(ring, ring->position + 1);
}

static bool takes_answers(const struct process *process)
{
	const struct inbound *inbound = rn_peers.inbound;

	while (inbound && (inbound->process != process || !inbound->out.first))
		inbound = inbound->next;
	return !inbound;
}

/* The next one, whose slot becomes the writer's again. False: the writer has taken it back. */
static bool take(struct process *process, struct letter *letter)
{
	struct ring *ring = &process->mail_in;
	struct slot *slot = slot_of(process->arena, ring, ring->position);
	uint64_t filled = turn(ring, ring->position + 1);

	letter->token = READ_ONCE(slot->token);
	letter->what = READ_ONCE(slot->what);
	letter->length = READ_ONCE(slot->length);
	memcpy(letter->bytes, slot->bytes, sizeof letter->bytes);
	ring->position++;
	return atomic_compare_exchange_strong(&slot->turn, &filled, turn(ring, ring->position - 1 + SLOTS));
}

void rn_mail_hear(struct process *process, bool is_last)
{
	struct letter letter;

	process->peers_count++; /* it stays */
	for (int i = 0; i < SLOTS && has_mail(process) && (is_last || takes_answers(process)); i++) {
		if (!take(process, &letter))
			continue;
		if (letter.length > ROOM) {
			rn_warn(RN_WARN_LANGUAGE, "another process's message for a connection has an impossible length");
			process->mail_in.offset = 0;
			break;
		}
		pthread_mutex_unlock(&rn_peers.lock);
		rn_peers_hear(process, letter.what, letter.token, letter.bytes, letter.length);
		pthread_mutex_lock(&rn_peers.lock);
	}
	process->peers_count--;
	rn_process_let_go(process);
}

/* With the lock held: a process that has mail which may be heard, and was not heard in this round; 0: in any. */
static struct process *find_writer(uint64_t round)
{
	struct process *process = rn_peers.processes;

	while (process && ((round && process->round == round) || !has_mail(process) || !takes_answers(process)))
		process = process->next;
	return process;
}

bool rn_peers_have_mail(void)
{
	bool have;

	pthread_mutex_lock(&rn_peers.lock);
	have = find_writer(0) != NULL;
	pthread_mutex_unlock(&rn_peers.lock);
	return have;
}

void rn_peers_hear_mail(void)
{
	struct process *process;
	uint64_t round;

	pthread_mutex_lock(&rn_peers.lock);
	round = ++rn_peers.round;
	while ((process = find_writer(round))) {
		process->round = round;
		rn_mail_hear(process, false);
	}
	pthread_mutex_unlock(&rn_peers.lock);
}
