/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unreliable datagrams.
 *
 * A UD queue pair has no peer: each work request names an address handle, a queue pair number and a
 * Q_Key.  The number says which process (soft.h), the address which host, and from there on it is as with a
 * connected queue pair, one view at a time: the poster's thread claims a receive in the owner's pool
 * (many senders, see pool.h), copies the GRH and the message, and completes it.
 *
 *     address handle
 *       | of this host: rn_peer_get(QPN >> 8)              | of another, or whose memory can't be reached
 *     ud.c: claim, copy, publish in the owner's arena    ud_wire.c: one UDP datagram to address:QPN >> 8,
 *       |                                                  | there the owner's engine calls rn_ud_deliver()
 *     respond.c  <-------------------------------------------+
 *
 * What isn't received is dropped, and the sender never knows: nobody there, another Q_Key, no
 * receive posted, or one that is too short.  The only wait is for a link that is being made; its
 * end, one way or the other, is looked for by timer.
 */
#include <stdlib.h>
#include <unistd.h>

#include "ud.h"

#include "gid.h"
#include "ud_wire.h"

enum { PEERS = 64 };

static const uint64_t FORGET_NS = 1000000000; /* a process that wasn't there is asked for again after this */

struct known {
	uint16_t port;
	struct rn_peer *peer;
	uint64_t dead_until;
};

struct rn_ud {
	uint32_t name;
	struct known known[PEERS]; /* by port modulo */
	struct rn_peer *seen_peer; /* whom the view shows */
	uint32_t seen_qpn;
};

bool rn_ud_by_wire;

int rn_ud_open(struct rn_qp *qp)
{
	qp->ud = calloc(1, sizeof(*qp->ud));
	if (!qp->ud)
		return ENOMEM;
	qp->ud->name = rn_name_of_process(getpid());
	return 0;
}

void rn_ud_reset(struct rn_qp *qp)
{
	struct rn_ud *ud = qp->ud;

	if (!ud)
		return;
	for (unsigned i = 0; i < PEERS; i++)
		if (ud->known[i].peer)
			rn_peer_put(ud->known[i].peer);
	memset(ud->known, 0, sizeof(ud->known));
	ud->seen_peer = NULL;
	ud->seen_qpn = 0;
}

void rn_ud_close(struct rn_qp *qp)
{
	rn_ud_reset(qp);
	free(qp->ud);
	qp->ud = NULL;
}

/* --- finding the receiver ---------------------------------------------------------------------------------- */

/* The process that has this port, or NULL: there is none. */
static struct rn_peer *find_peer(struct rn_ud *ud, uint16_t port)
{
	struct known *known = &ud->known[port % PEERS];

	if (likely(known->port == port && known->peer && atomic_load(&known->peer->state) != RN_PEER_DEAD))
		return known->peer;
	if (known->port == port && !known->peer && rn_now_ns() < known->dead_until)
		return NULL;
	if (known->peer) {
		bool was_it = known->port == port;

		if (known->peer == ud->seen_peer)
			ud->seen_peer = NULL;
		rn_peer_put(known->peer);
		*known = (struct known){.port = port, .dead_until = was_it ? rn_now_ns() + FORGET_NS : 0};
		if (was_it)
			return NULL;
	}
	known->port = port;
	known->peer = rn_peer_get(port);
	return known->peer;
}

/* Look at that queue pair, whoever's it is. RN_WAIT_PEER: there is no such one. */
static enum rn_wait look_at(struct rn_qp *qp, struct rn_peer *peer, uint32_t qpn)
{
	int state = atomic_load(&peer->state);
	struct rn_view *view = &qp->view;
	struct rn_ud *ud = qp->ud;
	struct rn_qp_block *block;

	if (likely(ud->seen_peer == peer && ud->seen_qpn == qpn && rn_view_is_alive(view)))
		return RN_WAIT_NOT;
	if (view->pushed)
		rn_view_announce(view);
	ud->seen_peer = NULL;
	if (state == RN_PEER_CONNECTING)
		return RN_WAIT_LINK;
	if (state == RN_PEER_DEAD)
		return RN_WAIT_PEER;
	if (state == RN_PEER_READY && (peer->arena_size < RN_ARENA_SIZE ||
				       READ_ONCE(rn_arena_head(peer->arena)->magic) != RN_ARENA_MAGIC))
		return RN_WAIT_PEER;
	view->self = state == RN_PEER_SELF;
	view->owner = NULL;
	if (view->self) {
		uint32_t index = rn_own_locate(qpn);

		if (index == RN_QPS_MAX)
			return RN_WAIT_PEER;
		rn_view_aim(view, rn_arena, index, NULL);
	} else {
		block = rn_locate(peer->arena, qpn);
		if (!block)
			return RN_WAIT_PEER;
		rn_view_aim(view, peer->arena, (uint32_t)(block - rn_arena_qp(peer->arena, 0)), NULL);
	}
	if (atomic_load(&view->facts->qpn) != qpn)
		return RN_WAIT_PEER;
	view->generation = atomic_load(&view->facts->life) >> 8;
	if (!rn_view_is_alive(view) || READ_ONCE(view->facts->type) != IBV_QPT_UD || !rn_view_open(view) || !view->pool)
		return RN_WAIT_PEER;
	view->peer = view->self ? NULL : peer;
	view->count = &qp->count;
	view->source_qpn = qp->ex.qp_base.qp_num;
	view->name = ud->name;
	ud->seen_peer = peer;
	ud->seen_qpn = qpn;
	return RN_WAIT_NOT;
}

/* --- sending ----------------------------------------------------------------------------------------------- */

/* Into the receiver's memory. RN_WAIT_OWNER: that can't be reached from here. Everything else that
 * isn't a wait is done, whatever has become of it. */
static enum rn_wait send_direct(struct rn_qp *qp, struct rn_peer *peer, const struct ibv_send_wr *wr, uint32_t qkey,
				struct rn_transfer *t)
{
	enum rn_wait wait = look_at(qp, peer, wr->wr.ud.remote_qpn);
	struct rn_request request = {.opcode = wr->opcode, .send_flags = wr->send_flags, .imm_data = wr->imm_data};
	enum ibv_wc_status there = IBV_WC_SUCCESS;
	struct rn_view *view = &qp->view;

	if (wait == RN_WAIT_NOT) {
		if (atomic_load_explicit(&view->facts->qkey, memory_order_relaxed) != qkey)
			return RN_WAIT_NOT;
		view->by_ipv4 = rn_grh_is_ipv4(t->local[0].at);
		wait = rn_respond(view, &request, t, &there);
		rn_view_give_back(view); /* what was not published */
	}
	return wait == RN_WAIT_RNR || wait == RN_WAIT_PEER ? RN_WAIT_NOT : wait;
}

enum rn_wait rn_ud_execute(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status,
			   uint32_t *byte_len)
{
	struct rn_ah *ah = rn_ah(wr->wr.ud.ah);
	struct rn_peer *peer = NULL;
	struct rn_transfer t;
	struct rn_grh grh;
	uint32_t qkey;
	enum rn_wait wait;

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
		t.refused = false;
		wait = send_direct(qp, peer, wr, qkey, &t);
		if (wait != RN_WAIT_OWNER)
			goto done;
		t.num_local--;
		t.total -= sizeof(grh);
	}
	wait = rn_ud_wire_send(qp, ah, wr, qkey, t.local + 1, t.num_local, t.total);
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
	struct rn_view view = {.self = true, .count = &count};
	struct rn_transfer t;

	rn_view_aim(&view, rn_arena, qp->index, NULL);
	view.generation = atomic_load(&qp->own->life) >> 8;
	if (!qp->ud || !rn_view_is_alive(&view) || atomic_load(&qp->own->qkey) != datagram->qkey ||
	    !rn_view_open(&view) || !view.pool)
		return;
	view.source_qpn = datagram->source_qpn;
	view.name = qp->ud->name;
	view.by_ipv4 = rn_grh_is_ipv4(datagram->grh.bytes);
	t.local[0] = (struct rn_piece){.at = (char *)datagram->grh.bytes, .length = sizeof(datagram->grh)};
	t.local[1] = (struct rn_piece){.at = (char *)datagram->data, .length = datagram->length};
	t.num_local = datagram->length ? 2 : 1;
	t.total = sizeof(datagram->grh) + datagram->length;
	t.moved = 0;
	t.refused = false;
	rn_respond(&view, &request, &t, &status);
	rn_view_give_back(&view);
	if (view.pushed)
		rn_view_announce(&view);
}
