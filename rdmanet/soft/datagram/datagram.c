/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unreliable datagrams.
 *
 * A UD queue pair has no peer: each work request names an address handle, a queue pair number and a
 * Q_Key.  The number tells the process (peer/peer.h), the address the host, and from there on it is as with a
 * connected queue pair, one receiver at a time: the poster's thread claims a receive in the owner's pool
 * (many senders, see shm/pool.h), copies the GRH and the message, and completes it.
 *
 *     address handle
 *       | of this host: rn_peer_get(QPN >> 8)                    | of another, or whose memory can't be reached
 *     datagram.c: claim, copy, publish in the owner's arena    wire.c: one UDP datagram to address:QPN >> 8,
 *       |                                                        | there the owner's engine calls rn_ud_deliver()
 *     responder/responder.c  <-----------------------------------+
 *
 * What can't be received is dropped, and the sender never knows: no such queue pair, another Q_Key, no
 * receive posted, or one that is too short.  The only wait is for a link that is being made; a timer
 * checks whether it stands or has failed.
 */
#include <stdlib.h>
#include <unistd.h>

#include "base/gid.h"
#include "datagram/datagram.h"
#include "datagram/multicast.h"
#include "datagram/port.h"
#include "datagram/wire.h"
#include "requester/requester.h"

static const uint64_t FORGET_NS = 1000000000; /* a process that wasn't there is asked for again after this */

bool rn_ud_by_wire;

static int open_path(struct rn_qp *qp)
{
	qp->ud = calloc(1, sizeof(*qp->ud));
	if (!qp->ud)
		return ENOMEM;
	qp->ud->name = rn_name_of_process(getpid());
	return 0;
}

/* Release its links, and the senders that it has heard. */
static void clear(struct rn_qp *qp)
{
	struct rn_ud *ud = qp->ud;

	if (!ud)
		return;
	for (unsigned i = 0; i < RN_UD_PEERS; i++)
		if (ud->known[i].peer)
			rn_peer_put(ud->known[i].peer);
	memset(ud->known, 0, sizeof(ud->known));
	ud->seen_peer = NULL;
	ud->seen_qpn = 0;
}

static void free_path(struct rn_qp *qp)
{
	clear(qp);
	free(qp->ud);
	qp->ud = NULL;
}

/* Until it is reset, also where it gets no further. */
static int listen_by_wire(struct rn_qp *qp, const struct ibv_ah_attr *ah)
{
	int err = qp->ud->is_heard ? 0 : rn_ud_port_open(qp);

	(void)ah;
	qp->ud->is_heard = !err;
	return err;
}

static bool is_in_use(const struct rn_qp *qp)
{
	return qp->ud->groups;
}

static void close_wire(struct rn_qp *qp)
{
	if (qp->ud->is_heard)
		rn_ud_port_close(qp);
	qp->ud->is_heard = false;
}

/* --- finding the receiver ---------------------------------------------------------------------------------- */

/* The process that has this port, or NULL: there is none. */
static struct rn_peer *find_peer(struct rn_ud *ud, uint16_t port)
{
	struct rn_ud_known *known = &ud->known[port % RN_UD_PEERS];

	if (likely(known->port == port && known->peer && atomic_load(&known->peer->state) != RN_PEER_DEAD))
		return known->peer;
	if (known->port == port && !known->peer && rn_now_ns() < known->dead_until)
		return NULL;
	if (known->peer) {
		bool was_it = known->port == port;

		if (known->peer == ud->seen_peer)
			ud->seen_peer = NULL;
		rn_peer_put(known->peer);
		*known = (struct rn_ud_known){.port = port, .dead_until = was_it ? rn_now_ns() + FORGET_NS : 0};
		if (was_it)
			return NULL;
	}
	known->port = port;
	known->peer = rn_peer_get(port);
	return known->peer;
}

/* Look at that queue pair, in whichever process. RN_WAIT_PEER: it does not exist. */
static enum rn_wait look_at(struct rn_qp *qp, struct rn_peer *peer, uint32_t qpn)
{
	int state = atomic_load(&peer->state);
	struct rn_responder_ctx *ctx = &qp->responder;
	struct rn_ud *ud = qp->ud;
	struct rn_qp_block *block;

	if (likely(ud->seen_peer == peer && ud->seen_qpn == qpn && rn_responder_is_alive(ctx)))
		return RN_WAIT_NOT;
	if (ctx->pushed)
		rn_responder_announce(ctx);
	ud->seen_peer = NULL;
	if (state == RN_PEER_CONNECTING)
		return RN_WAIT_LINK;
	if (state == RN_PEER_DEAD)
		return RN_WAIT_PEER;
	if (state == RN_PEER_READY && (peer->arena_size < RN_ARENA_SIZE ||
				       READ_ONCE(rn_arena_head(peer->arena)->magic) != RN_ARENA_MAGIC))
		return RN_WAIT_PEER;
	ctx->self = state == RN_PEER_SELF;
	ctx->owner = NULL;
	if (ctx->self) {
		uint32_t index = rn_own_locate(qpn);

		if (index == RN_QPS_MAX)
			return RN_WAIT_PEER;
		rn_responder_aim(ctx, rn_arena, index, NULL);
	} else {
		block = rn_arena_locate(peer->arena, qpn);
		if (!block)
			return RN_WAIT_PEER;
		rn_responder_aim(ctx, peer->arena, (uint32_t)(block - rn_arena_qp(peer->arena, 0)), NULL);
	}
	if (atomic_load(&ctx->facts->qpn) != qpn)
		return RN_WAIT_PEER;
	ctx->generation = atomic_load(&ctx->facts->generation_state) >> 8;
	if (!rn_responder_is_alive(ctx) || READ_FACT(ctx->facts->type) != IBV_QPT_UD || !rn_responder_open(ctx) || !ctx->pool)
		return RN_WAIT_PEER;
	ctx->peer = ctx->self ? NULL : peer;
	ctx->count = &qp->count;
	ctx->source_qpn = qp->ex.qp_base.qp_num;
	ctx->name = ud->name;
	ud->seen_peer = peer;
	ud->seen_qpn = qpn;
	return RN_WAIT_NOT;
}

/* --- sending ----------------------------------------------------------------------------------------------- */

/* Into the receiver's memory. RN_WAIT_OWNER: that can't be reached from here. Everything else that
 * isn't a wait is done, whatever has become of it. */
static enum rn_wait send_direct(struct rn_qp *qp, struct rn_peer *peer, const struct ibv_send_wr *wr, uint32_t qkey,
				struct rn_transfer *t, enum ibv_wc_status *status)
{
	enum rn_wait wait = look_at(qp, peer, wr->wr.ud.remote_qpn);
	struct rn_request request = {.opcode = wr->opcode, .send_flags = wr->send_flags, .imm_data = wr->imm_data};
	enum ibv_wc_status there = IBV_WC_SUCCESS;
	struct rn_responder_ctx *ctx = &qp->responder;

	if (wait == RN_WAIT_NOT) {
		if (atomic_load_explicit(&ctx->facts->qkey, memory_order_relaxed) != qkey)
			return RN_WAIT_NOT;
		ctx->by_ipv4 = rn_grh_is_ipv4(t->local[0].at);
		wait = rn_respond(ctx, &request, t, &there);
		rn_responder_give_back(ctx); /* what was not published */
		if (there == IBV_WC_LOC_PROT_ERR) /* memory of our own is gone */
			*status = there;
	}
	return wait == RN_WAIT_RNR || wait == RN_WAIT_PEER ? RN_WAIT_NOT : wait;
}

static enum rn_wait execute(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status,
			    uint32_t *byte_len)
{
	struct rn_ah *ah = rn_ah(wr->wr.ud.ah);
	struct rn_peer *peer = NULL;
	struct rn_transfer t;
	struct rn_grh grh;
	uint32_t qkey;
	enum rn_wait wait;
	bool fault = false;

	*byte_len = 0;
	if (unlikely(!ah || ah->ah.pd != qp->ex.qp_base.pd)) {
		*status = IBV_WC_LOC_QP_OP_ERR;
		return RN_WAIT_NOT;
	}
	*status = rn_local_pieces(qp, wr, t.local + 1, &t.num_local, &t.total);
	*byte_len = t.total;
	if (unlikely(*status == IBV_WC_SUCCESS && t.total > RN_UD_MTU))
		*status = IBV_WC_LOC_LEN_ERR; /* a datagram is one packet */
	if (unlikely(*status != IBV_WC_SUCCESS))
		return RN_WAIT_NOT;
	rn_grh_make(&grh, &ah->from, &ah->attr.grh.dgid, ah->attr.grh.traffic_class, ah->attr.grh.hop_limit,
		    ah->attr.grh.flow_label, t.total);
	/* The uppermost bit says: the queue pair's own, which a program without privilege may not choose. */
	qkey = wr->wr.ud.remote_qkey & 1u << 31 ? qp->attr.qkey : wr->wr.ud.remote_qkey;

	if (ah->is_ours && !rn_ud_by_wire && rn_settings.transport != RN_TRANSPORT_STREAM &&
	    (peer = find_peer(qp->ud, wr->wr.ud.remote_qpn >> 8))) {
		t.local[0] = (struct rn_piece){.at = (char *)grh.bytes, .length = sizeof(grh)};
		t.num_local++;
		t.total += sizeof(grh);
		t.moved = 0;
		t.refused = t.in_turns = false;
		wait = send_direct(qp, peer, wr, qkey, &t, status);
		if (wait != RN_WAIT_OWNER)
			goto done;
		t.num_local--;
		t.total -= sizeof(grh);
	}
	wait = rn_ud_wire_send(qp, ah, wr, qkey, t.local + 1, t.num_local, t.total, &fault);
	if (fault)
		*status = IBV_WC_LOC_PROT_ERR;
done:
	if (wait == RN_WAIT_NOT && wr->send_flags & IBV_SEND_INLINE)
		qp->count.bytes_inline += *byte_len;
	return wait;
}

/* --- receiving what came by wire ----------------------------------------------------------------------------- */

void rn_ud_deliver(struct rn_qp *qp, const struct rn_datagram *datagram)
{
	struct rn_request request = {
		.opcode = datagram->opcode,
		.send_flags = datagram->solicited ? IBV_SEND_SOLICITED : 0,
		.imm_data = datagram->imm_data,
	};
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	struct rn_counters count = {0};
	struct rn_responder_ctx ctx = {.self = true, .count = &count};
	struct rn_transfer t;

	rn_responder_aim(&ctx, rn_arena, qp->index, NULL);
	ctx.generation = atomic_load(&qp->own->generation_state) >> 8;
	if (!qp->ud || !rn_responder_is_alive(&ctx) || atomic_load(&qp->own->qkey) != datagram->qkey ||
	    !rn_responder_open(&ctx) || !ctx.pool)
		return;
	ctx.source_qpn = datagram->source_qpn;
	ctx.name = qp->ud->name;
	ctx.by_ipv4 = rn_grh_is_ipv4(datagram->grh.bytes);
	t.local[0] = (struct rn_piece){.at = (char *)datagram->grh.bytes, .length = sizeof(datagram->grh)};
	t.local[1] = (struct rn_piece){.at = (char *)datagram->data, .length = datagram->length};
	t.num_local = datagram->length ? 2 : 1;
	t.total = sizeof(datagram->grh) + datagram->length;
	t.moved = 0;
	t.refused = t.in_turns = false;
	rn_respond(&ctx, &request, &t, &status);
	rn_responder_give_back(&ctx);
	if (ctx.pushed)
		rn_responder_announce(&ctx);
}

const struct rn_path_ops rn_datagram_path_ops = {
	.open = open_path,
	.free = free_path,
	.listen = listen_by_wire,
	.execute = execute,
	.close = close_wire,
	.clear = clear,
	.is_in_use = is_in_use,
	.detach = rn_mcast_detach_all,
};
