/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first words on a stream: who are you, and whom do you want?
 *
 *     requester                                     responder
 *     HELLO numbers, GID, PSN, nonce -------------> with a secret:
 *                                    <------------- CHALLENGE nonce
 *     PROOF by the secret, of both   -------------> checked, in constant time
 *                                    <------------- WELCOME, and its proof
 *                                                   or REFUSED, or SECRET, or VERSION
 *
 * The secret shows that both ends belong together; it doesn't encrypt what follows.  An end that has a secret refuses
 * one that has none.  The proofs (base/secret.h) cover the whole HELLO and both nonces, so none can be used again, or
 * for another queue pair.  Trying again would not help two ends without the same secret, so both sides are told
 * and log it, and requests fail at once, with REM_ABORT_ERR.  The same holds for two ends of different versions
 * (base/version.h).
 *
 * The queue pair is looked for only after that.  When it isn't there yet, or isn't ready, or expects
 * somebody else or another PSN, the answer is REFUSED, and the requester tries again while its retry
 * budget lasts.
 */
#include <arpa/inet.h>
#include <sys/random.h>

#include "base/gid.h"
#include "base/log.h"
#include "base/secret.h"
#include "tcp/tcp.h"

#define REQUESTER "stream requester"
#define RESPONDER "stream responder"

/* What a proof covers: everything that both sides have sent. */
struct said {
	struct rn_tcp_hello hello;
	uint8_t nonce[RN_NONCE];
};
static_assert(sizeof(struct said) == sizeof(struct rn_tcp_hello) + RN_NONCE, "no padding in a proof");

static struct said said_on(const struct rn_tcp *stream)
{
	struct said said = {.hello = stream->hello};

	memcpy(said.nonce, stream->nonce, sizeof(said.nonce));
	return said;
}

static void prove(const struct rn_tcp *stream, const char *role, uint8_t proof[RN_PROOF])
{
	struct said said = said_on(stream);

	rn_secret_prove(role, &said, sizeof(said), proof);
}

static bool is_proven(const struct rn_tcp *stream, const char *role, const uint8_t proof[RN_PROOF])
{
	struct said said = said_on(stream);

	return rn_secret_is_proven(role, &said, sizeof(said), proof);
}

struct where {
	char text[INET6_ADDRSTRLEN];
};

/* The other end's address. */
static struct where where_is(const struct rn_tcp *stream)
{
	struct sockaddr_storage address;
	socklen_t length = sizeof(address);
	struct where where = {"nowhere"}; /* if it is gone already */
	union ibv_gid gid;

	if (!getpeername(stream->source.fd, (struct sockaddr *)&address, &length)) {
		rn_gid_of((struct sockaddr *)&address, &gid);
		if (IN6_IS_ADDR_V4MAPPED((struct in6_addr *)&gid))
			inet_ntop(AF_INET, gid.raw + 12, where.text, sizeof(where.text));
		else
			inet_ntop(AF_INET6, gid.raw, where.text, sizeof(where.text));
	}
	return where;
}

/* --- the requester ----------------------------------------------------------------------------------------- */

bool rn_tcp_hello_send(struct rn_tcp *out)
{
	struct rn_qp *qp = out->qp;
	union ibv_gid gid = {.raw = {0}};

	rn_gid_at(qp->attr.ah_attr.grh.sgid_index, &gid, NULL);
	out->hello = (struct rn_tcp_hello){
		.magic = RN_TCP_MAGIC,
		.version = RN_WIRE_VERSION,
		.flags = rn_settings.has_secret ? RN_TCP_HELLO_SECRET : 0,
		.source_qpn = qp->ex.qp_base.qp_num,
		.dest_qpn = qp->attr.dest_qp_num,
		.psn = qp->attr.sq_psn,
	};
	memcpy(out->hello.source_gid, &gid, sizeof(gid));
	if (getrandom(out->hello.nonce, sizeof(out->hello.nonce), 0) != sizeof(out->hello.nonce))
		return false;
	return rn_tcp_put(out, &out->hello, sizeof(out->hello)) && rn_tcp_flush(out);
}

/* Give up this peer, not only this connection. */
static bool deny(struct rn_tcp *out, const char *why)
{
	out->denied = true;
	rn_warn(RN_WARN_SECRET, "queue pair %#x: its peer at %s %s", out->hello.source_qpn, where_is(out).text, why);
	return false;
}

static bool deny_version(struct rn_tcp *out, unsigned its)
{
	out->denied = true;
	rn_warn(RN_WARN_LANGUAGE,
		"queue pair %#x: its peer at %s speaks version %u of the device's protocol, this side speaks version %d",
		out->hello.source_qpn, where_is(out).text, its, RN_WIRE_VERSION);
	return false;
}

static bool answer_challenge(struct rn_tcp *out, const struct rn_tcp_greeting *greeting)
{
	uint8_t proof[RN_PROOF];

	if (!rn_settings.has_secret)
		return deny(out, "asks for a secret, but RDMANET_SOFT_SECRET is not set here");
	if (out->challenged)
		return false;
	out->challenged = true;
	memcpy(out->nonce, greeting->nonce, sizeof(out->nonce));
	prove(out, REQUESTER, proof);
	return rn_tcp_put(out, proof, sizeof(proof)) && rn_tcp_flush(out);
}

static bool is_welcome(struct rn_tcp *out, const struct rn_tcp_greeting *greeting)
{
	if (!rn_settings.has_secret || (out->challenged && is_proven(out, RESPONDER, greeting->proof)))
		return true;
	return deny(out, "does not prove that it knows the secret");
}

bool rn_tcp_hello_answered(struct rn_tcp *out)
{
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE};
	struct rn_tcp_greeting greeting;

	for (;;) {
		while (rn_tcp_available(out) < sizeof(greeting)) {
			ssize_t got = rn_tcp_read(out, NULL, 0, 0, NULL);

			if (got <= 0)
				return got == RN_TCP_NOTHING;
		}
		memcpy(&greeting, rn_tcp_take(out, sizeof(greeting)), sizeof(greeting));
		if (greeting.magic != RN_TCP_MAGIC)
			return false;
		if (greeting.kind == RN_GREETING_CHALLENGE) {
			if (!answer_challenge(out, &greeting))
				return false;
			continue;
		}
		if (greeting.kind == RN_GREETING_SECRET)
			return deny(out, "says that its RDMANET_SOFT_SECRET differs from ours");
		if (greeting.kind == RN_GREETING_VERSION)
			return deny_version(out, greeting.version);
		if (greeting.kind != RN_GREETING_WELCOME || !is_welcome(out, &greeting))
			return false;
		out->state = RN_TCP_OPEN;
		return rn_tcp_put(out, &here, sizeof(here)) && rn_tcp_flush(out);
	}
}

/* --- the responder ------------------------------------------------------------------------------------------ */

static bool put_greeting(struct rn_tcp *in, enum rn_greeting kind)
{
	struct rn_tcp_greeting greeting = {.magic = RN_TCP_MAGIC, .kind = kind};

	if (kind == RN_GREETING_VERSION)
		greeting.version = RN_WIRE_VERSION;
	if (kind == RN_GREETING_CHALLENGE)
		memcpy(greeting.nonce, in->nonce, sizeof(greeting.nonce));
	if (kind == RN_GREETING_WELCOME && in->challenged)
		prove(in, RESPONDER, greeting.proof);
	return rn_tcp_put(in, &greeting, sizeof(greeting));
}

bool rn_tcp_hello_welcome(struct rn_tcp *in)
{
	return put_greeting(in, RN_GREETING_WELCOME);
}

static bool greet(struct rn_tcp *in, enum rn_greeting kind)
{
	return put_greeting(in, kind) && rn_tcp_flush(in);
}

/* The peer is known: is the queue pair that it wants here? */
static bool decide(struct rn_tcp *in)
{
	if (rn_tcp_attach(in))
		return true;
	greet(in, RN_GREETING_REFUSED);
	return false;
}

static bool refuse_stranger(struct rn_tcp *in, const char *why)
{
	rn_warn(RN_WARN_SECRET, "refused a connection from %s: it %s", where_is(in).text, why);
	greet(in, RN_GREETING_SECRET);
	return false;
}

/* Magic, version and flags come first in every version; how long the rest is, only our own tells. */
enum { HEAD = offsetof(struct rn_tcp_hello, source_qpn) };

static bool on_head(struct rn_tcp *in)
{
	memcpy(&in->hello, rn_tcp_take(in, HEAD), HEAD);
	if (in->hello.magic == RN_TCP_MAGIC && in->hello.version != RN_WIRE_VERSION) {
		rn_warn(RN_WARN_LANGUAGE,
			"refused a connection from %s to a port of our queue pairs: it speaks version %u of the device's "
			"protocol, this side speaks version %d",
			where_is(in).text, in->hello.version, RN_WIRE_VERSION);
		greet(in, RN_GREETING_VERSION);
		return false;
	}
	if (in->hello.magic != RN_TCP_MAGIC || in->hello.flags & ~RN_TCP_HELLO_SECRET) {
		rn_warn(RN_WARN_LANGUAGE,
			"closed a connection from %s to a port of our queue pairs: it speaks another protocol",
			where_is(in).text);
		return false;
	}
	return true;
}

static bool on_hello(struct rn_tcp *in)
{
	memcpy((char *)&in->hello + HEAD, rn_tcp_take(in, sizeof(in->hello) - HEAD), sizeof(in->hello) - HEAD);
	in->stranger.has_spoken = true;
	if (!rn_settings.has_secret && in->hello.flags & RN_TCP_HELLO_SECRET)
		return refuse_stranger(in, "has a secret, but RDMANET_SOFT_SECRET is not set here");
	if (!rn_settings.has_secret)
		return decide(in);
	in->challenged = true;
	return rn_secret_nonce(in->nonce) && greet(in, RN_GREETING_CHALLENGE);
}

static bool on_proof(struct rn_tcp *in)
{
	if (!is_proven(in, REQUESTER, (const uint8_t *)rn_tcp_take(in, RN_PROOF)))
		return refuse_stranger(in, "does not know the secret");
	return decide(in);
}

/* A requester that hangs up when asked for the secret has none. */
static void on_end(const struct rn_tcp *in)
{
	if (in->challenged)
		rn_warn(RN_WARN_SECRET, "a connection from %s ended when it was asked for the secret", where_is(in).text);
}

bool rn_tcp_hello_arrived(struct rn_tcp *in)
{
	while (!in->qp) {
		bool has_head = in->hello.magic;
		uint32_t needed = in->challenged ? RN_PROOF : has_head ? sizeof(in->hello) - HEAD : HEAD;

		while (rn_tcp_available(in) < needed) {
			ssize_t got = rn_tcp_read(in, NULL, 0, 0, NULL);

			if (got == RN_TCP_NOTHING)
				return true;
			if (got < 0) {
				on_end(in);
				return false;
			}
		}
		if (in->challenged ? !on_proof(in) : has_head ? !on_hello(in) : !on_head(in))
			return false;
	}
	return true;
}

bool rn_tcp_serve_begin(struct rn_qp *qp, struct rn_tcp *in)
{
	struct rn_responder_ctx *ctx = &in->ctx;

	ctx->self = true;
	ctx->peer = NULL;
	ctx->owner = qp;
	ctx->count = &qp->count;
	ctx->source_qpn = qp->attr.dest_qp_num;
	ctx->generation = qp->generation;
	rn_responder_aim(ctx, rn_arena, qp->index, qp->theirs);
	if (!rn_responder_open(ctx))
		return false;
	ctx->found = true;
	in->expected = in->told = qp->tcp->served;
	return true;
}
