/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first words on a stream: who are you, and whom do you want?
 *
 *     requester                                     responder
 *     HELLO numbers, GID, PSN, nonce -------------> with a secret:
 *                                    <------------- CHALLENGE nonce
 *     PROOF = HMAC("requester", both) ------------> checked, in constant time
 *                                    <------------- WELCOME, HMAC("responder", both)
 *                                                   or REFUSED
 *
 * The secret (RDMANET_SOFT_SECRET) says that both ends belong together; it doesn't encrypt what follows.
 * Who has one talks to nobody who hasn't.  The proofs cover the whole HELLO and both nonces, so none can
 * be used again, or for another queue pair.
 *
 * The queue pair is looked for only after that.  When it isn't there yet, or isn't ready, or expects
 * somebody else or another PSN, the answer is REFUSED, and the requester tries again while its retry
 * budget lasts.
 */
#define _GNU_SOURCE
#include <sys/random.h>

#include "gid.h"
#include "log.h"
#include "sha256.h"
#include "soft.h"

enum { PROOF = 32 };

static void prove(const struct rn_stream *stream, const char *role, const uint8_t *nonce, uint8_t proof[PROOF])
{
	struct rn_hmac hmac;

	rn_hmac_begin(&hmac, rn_settings.secret_key, sizeof(rn_settings.secret_key));
	rn_hmac_add(&hmac, role, 9);
	rn_hmac_add(&hmac, &stream->hello, sizeof(stream->hello));
	rn_hmac_add(&hmac, nonce, sizeof(stream->nonce));
	rn_hmac_end(&hmac, proof);
}

/* As long for a good one as for a bad one. */
static bool is_same(const uint8_t *a, const uint8_t *b)
{
	uint8_t difference = 0;

	for (int i = 0; i < PROOF; i++)
		difference |= a[i] ^ b[i];
	return !difference;
}

/* --- the requester ----------------------------------------------------------------------------------------- */

bool rn_hello_send(struct rn_stream *out)
{
	struct rn_qp *qp = out->qp;
	union ibv_gid gid = {.raw = {0}};

	rn_gid_at(qp->attr.ah_attr.grh.sgid_index, &gid, NULL);
	out->hello = (struct rn_wire_hello){
		.magic = RN_STREAM_MAGIC,
		.version = RN_STREAM_VERSION,
		.source_qpn = qp->ex.qp_base.qp_num,
		.dest_qpn = qp->attr.dest_qp_num,
		.psn = qp->attr.sq_psn,
	};
	memcpy(out->hello.source_gid, &gid, sizeof(gid));
	if (getrandom(out->hello.nonce, sizeof(out->hello.nonce), 0) != sizeof(out->hello.nonce))
		return false;
	return rn_wire_put(out, &out->hello, sizeof(out->hello)) && rn_wire_flush(out);
}

static bool answer_challenge(struct rn_stream *out, const struct rn_wire_greeting *greeting)
{
	uint8_t proof[PROOF];

	if (!rn_settings.has_secret || out->challenged) {
		rn_warn(RN_WARN_SECRET, "queue pair %06x: its peer asks for a secret, and there is none here",
		       out->hello.source_qpn);
		return false;
	}
	out->challenged = true;
	memcpy(out->nonce, greeting->nonce, sizeof(out->nonce));
	prove(out, "requester", out->nonce, proof);
	return rn_wire_put(out, proof, sizeof(proof)) && rn_wire_flush(out);
}

static bool is_welcome(struct rn_stream *out, const struct rn_wire_greeting *greeting)
{
	uint8_t proof[PROOF];

	if (!rn_settings.has_secret)
		return true;
	if (out->challenged) {
		prove(out, "responder", out->nonce, proof);
		if (is_same(proof, greeting->proof))
			return true;
	}
	rn_warn(RN_WARN_SECRET, "queue pair %06x: its peer doesn't know the secret", out->hello.source_qpn);
	return false;
}

bool rn_hello_answered(struct rn_stream *out)
{
	struct rn_wire_frame here = {.kind = RN_FRAME_HERE};
	struct rn_wire_greeting greeting;

	for (;;) {
		while (rn_wire_available(out) < sizeof(greeting)) {
			ssize_t got = rn_wire_read(out, NULL, 0, 0, NULL);

			if (got <= 0)
				return got == RN_WIRE_NOTHING;
		}
		memcpy(&greeting, rn_wire_take(out, sizeof(greeting)), sizeof(greeting));
		if (greeting.magic != RN_STREAM_MAGIC)
			return false;
		if (greeting.kind == RN_GREETING_CHALLENGE) {
			if (!answer_challenge(out, &greeting))
				return false;
			continue;
		}
		if (greeting.kind != RN_GREETING_WELCOME || !is_welcome(out, &greeting))
			return false;
		out->state = RN_STREAM_OPEN;
		return rn_wire_put(out, &here, sizeof(here)) && rn_wire_flush(out);
	}
}

/* --- the responder ------------------------------------------------------------------------------------------ */

static bool put_greeting(struct rn_stream *in, enum rn_greeting kind)
{
	struct rn_wire_greeting greeting = {.magic = RN_STREAM_MAGIC, .kind = kind};

	if (kind == RN_GREETING_CHALLENGE)
		memcpy(greeting.nonce, in->nonce, sizeof(greeting.nonce));
	if (kind == RN_GREETING_WELCOME && in->challenged)
		prove(in, "responder", in->nonce, greeting.proof);
	return rn_wire_put(in, &greeting, sizeof(greeting));
}

bool rn_hello_welcome(struct rn_stream *in)
{
	return put_greeting(in, RN_GREETING_WELCOME);
}

static bool greet(struct rn_stream *in, enum rn_greeting kind)
{
	return put_greeting(in, kind) && rn_wire_flush(in);
}

/* It has introduced itself well enough: is what it wants here? */
static bool decide(struct rn_stream *in)
{
	if (rn_stream_attach(in))
		return true;
	greet(in, RN_GREETING_REFUSED);
	return false;
}

static bool on_hello(struct rn_stream *in)
{
	memcpy(&in->hello, rn_wire_take(in, sizeof(in->hello)), sizeof(in->hello));
	if (in->hello.magic != RN_STREAM_MAGIC || in->hello.version != RN_STREAM_VERSION) {
		rn_warn(RN_WARN_LANGUAGE, "a stranger on one of our ports speaks another language: closed");
		return false;
	}
	if (!rn_settings.has_secret)
		return decide(in);
	in->challenged = true;
	return getrandom(in->nonce, sizeof(in->nonce), 0) == sizeof(in->nonce) && greet(in, RN_GREETING_CHALLENGE);
}

static bool on_proof(struct rn_stream *in)
{
	uint8_t expected[PROOF];

	prove(in, "requester", in->nonce, expected);
	if (!is_same(expected, (const uint8_t *)rn_wire_take(in, PROOF))) {
		rn_warn(RN_WARN_SECRET, "a stranger on one of our ports doesn't know the secret: closed");
		greet(in, RN_GREETING_REFUSED);
		return false;
	}
	return decide(in);
}

bool rn_hello_arrived(struct rn_stream *in)
{
	while (!in->qp) {
		uint32_t needed = in->challenged ? PROOF : sizeof(in->hello);

		while (rn_wire_available(in) < needed) {
			ssize_t got = rn_wire_read(in, NULL, 0, 0, NULL);

			if (got <= 0)
				return got == RN_WIRE_NOTHING;
		}
		if (in->challenged ? !on_proof(in) : !on_hello(in))
			return false;
	}
	return true;
}
