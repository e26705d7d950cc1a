/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes over the links between two processes (peer/peer.h), of a connection that has no socket: it was asked for by
 * a link (ask.c), or has been handed over to the links (handover.c).
 *
 * A message names its connection by a token.  A connection that was asked for by a link has the asker's token on both
 * sides, so the message says for which side it is.  A connection that was handed over has a token of each side.  A
 * message counts only if it comes from the process for which the connection is watched, so no process can speak of
 * another's connection.
 *
 * Mail.  What is said by the link is heard by the engine, which then wakes the program.  So what only the program waits
 * for goes by mail (peer/mail.c), which wakes whoever reads the other side's event channel: rdma_get_cm_event hears it, in
 * the engine's place.  REQ and REP tell the channels' numbers.  The engine hears mail, too, where the program may not: when
 * a time limit has passed, when a connection has to leave for another (base/stranger.h), when a listener or a channel is
 * gone, and when the other process has ended.  Only channels that do not wait have a number, since what wakes their readers
 * need not lead to an event: who polls the descriptor, and then waits for the event, would wait in vain.
 *
 * A link does not end with a connection, as a socket does.  So if a connection that was asked for by a link ends here
 * without a last message, by a time limit, say, an empty message tells the other side what the end of a socket would
 * have told it.
 */
#include "cm/wire.h"
#include "peer/peer.h"

static void hear_mail(struct rn_task *task)
{
	rn_peers_hear_mail();
	if (rn_peers_have_mail())
		rn_task_queue(task);
}

static struct rn_task hearing = {.run = hear_mail};

void rn_cm_link_forked(void)
{
	hearing.link = NULL;
}

/* Keep it for the wire's task: this is the peers' turn. */
static void keep(struct rn_cm_wire *wire, const void *message, size_t length)
{
	const struct rn_cm_header *header = message;
	bool fits = wire->side ? length <= sizeof wire->in - wire->in_length
			       : length == sizeof *header && header->type <= RN_CM_MOVED;

	if (!fits) {
		wire->words |= RN_CM_NONSENSE;
	} else if (wire->side) {
		memcpy(wire->in + wire->in_length, message, length);
		wire->in_length += (unsigned)length;
	} else {
		wire->words |= (uint16_t)(1u << header->type);
	}
}

void rn_cm_link_hear(const void *process, uint32_t what, uint64_t token, const void *message, size_t length)
{
	struct rn_cm_wire *wire;

	pthread_mutex_lock(&rn_cm_lock);
	wire = rn_cm_wire_find(process, (enum rn_cm_link_side)(what & ~RN_CM_LINK_LAST), token);
	if (wire) {
		wire->has_left |= (what & RN_CM_LINK_LAST) != 0;
		if (wire->side && !length)
			wire->hung_up = true;
		else
			keep(wire, message, length);
		rn_task_queue(&wire->task);
	}
	pthread_mutex_unlock(&rn_cm_lock);
}

void rn_cm_link_hear_mail(void)
{
	if (!rn_peers_have_mail())
		return;
	rn_task_queue(&hearing);
	rn_tasks_run_here();
}

/* Of a connection that was handed over; what came over the link, with the lock. */
static void digest_words(struct rn_cm_wire *wire)
{
	static const uint8_t in_order[] = {RN_CM_MOVED, RN_CM_DREQ, RN_CM_DREP};

	for (unsigned i = 0; i < sizeof in_order; i++) {
		if (wire->over || !(wire->words & 1u << in_order[i]))
			continue;
		wire->words &= (uint16_t)~(1u << in_order[i]);
		rn_cm_wire_hear(wire, in_order[i]);
	}
}

void rn_cm_link_digest(struct rn_cm_wire *wire)
{
	rn_cm_lock_to_tell();
	if (!wire->over && wire->side)
		rn_cm_wire_digest(wire);
	else if (!wire->over)
		digest_words(wire);
	if (!wire->over && wire->words)
		rn_cm_wire_drop(wire, RN_WARN_LANGUAGE, "its process said by the link what makes no sense there");
	if (!wire->over && wire->side && wire->hung_up)
		rn_cm_wire_lost(wire, 0);
	rn_cm_unlock_and_tell();
}

void rn_cm_link_hear_late(struct rn_cm_wire *wire)
{
	if (!wire->side)
		return;
	rn_peers_hear_mail();
	rn_cm_link_digest(wire);
}

/* May it wait until the program reads it? What the other side waits for is answered by its engine. */
static bool is_for_program(const struct rn_cm_header *header, bool is_last)
{
	return header && (header->type == RN_CM_REP || header->type == RN_CM_RTU || header->type == RN_CM_REJ ||
			  (header->type == RN_CM_DREQ && is_last));
}

/* For the other side. */
static void tell(struct rn_cm_wire *wire, const struct rn_cm_header *header, size_t length, bool is_last)
{
	static const enum rn_cm_link_side other[] = {
		[RN_CM_HANDED] = RN_CM_HANDED, [RN_CM_ASKER] = RN_CM_ASKED, [RN_CM_ASKED] = RN_CM_ASKER};
	uint32_t what = (uint32_t)other[wire->side] | (is_last ? RN_CM_LINK_LAST : 0u);

	if (wire->side && !wire->stays_off_mail && is_for_program(header, is_last) &&
	    rn_peer_mail(wire->death.peer, wire->mail_channel, what, wire->token, header, length))
		return;
	wire->stays_off_mail = true;
	rn_peer_tell_connection(wire->death.peer, what, wire->side ? wire->token : wire->peer_token, header, length);
}

void rn_cm_link_end(struct rn_cm_wire *wire)
{
	if (wire->side && wire->watched && !wire->has_said_last && !wire->has_left)
		tell(wire, NULL, 0, true);
}

bool rn_cm_link_say_moved(const struct rn_cm_wire *wire)
{
	const struct rn_cm_header moved = {.type = RN_CM_MOVED};

	return rn_peer_tell_connection(wire->death.peer, RN_CM_HANDED, wire->peer_token, &moved, sizeof moved);
}

void rn_cm_link_flush(struct rn_cm_wire *wire)
{
	alignas(8) unsigned char out[sizeof wire->out];
	bool is_last;
	unsigned length;

	pthread_mutex_lock(&rn_cm_lock);
	length = wire->over ? 0 : wire->out_length;
	memcpy(out, wire->out, length);
	wire->out_length = 0;
	is_last = wire->hangs_up;
	pthread_mutex_unlock(&rn_cm_lock);
	for (unsigned at = 0; at < length;) {
		const struct rn_cm_header *header = (const void *)(out + at);
		uint16_t bytes = be16toh(header->length);

		wire->has_said_last |= is_last && at + bytes == length;
		tell(wire, header, bytes, is_last && at + bytes == length);
		at += bytes;
	}
	pthread_mutex_lock(&rn_cm_lock);
	if (!wire->over && wire->hangs_up && !wire->out_length)
		rn_cm_wire_finish(wire);
	pthread_mutex_unlock(&rn_cm_lock);
}
