/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The secret, before anything else.
 *
 *     active                                        passive
 *     CONNECTING                                    ACCEPTED
 *     HELLO_SENT ------------ HELLO nonce ---------->
 *                <----------- CHALLENGE nonce, proof  CHALLENGED
 *     REQ_SENT -------------- PROOF ---------------->
 *              -------------- REQ ------------------> PROVEN, and so on
 *
 * Both prove that they know RDMANET_SOFT_SECRET (secret.h), over both HELLOs, which are the nonces.  The passive side
 * does so first: the request, with the program's private data, goes to nobody who hasn't; and a request is looked at
 * only of who has.  Whoever has a secret talks to nobody who has none, or another: it says REJ with the reason, there is
 * an event on one side and a line in the log on the other, and that was it.
 *
 * Without a secret REQ comes at once, as ever.  The secret doesn't encrypt what follows, nor does it say on which way
 * the peer was reached: who can pass on the bytes can read them.
 */
#define _GNU_SOURCE
#include "cm_wire.h"

#include "guard.h"

static const char active_role[] = "cm active", passive_role[] = "cm passive";

bool rn_cm_secret_is_set(void)
{
	return rn_settings.has_secret && rn_guarded(RN_GUARD_CM_SECRET);
}

bool rn_cm_secret_begin(struct rn_wire *wire, enum message_type type, const void *request)
{
	struct secret_hello *hello = &wire->hellos[0];

	if (!rn_secret_nonce(hello->nonce))
		return false;
	wire->request_type = type;
	memcpy(wire->request, request, rn_cm_message_length[type]);
	rn_cm_wire_append(wire, SECRET_HELLO, hello);
	return true;
}

static void warn(const struct rn_wire *wire, const char *what)
{
	char far[RN_CM_FAR];

	rn_warn(RN_WARN_SECRET, "connection with %s refused: %s", rn_cm_wire_far(wire, far), what);
}

/* A request, if there is one, stays here. */
static void refuse(struct rn_wire *wire, int reason, const char *what)
{
	struct rej rej = {.reason = htobe16((uint16_t)reason)};

	warn(wire, what);
	rn_cm_wire_append(wire, REJ, &rej);
	wire->phase = RN_WIRE_CLOSING;
	wire->hangs_up = true;
}

/* --- the passive side ---------------------------------------------------------------------------- */

void rn_cm_secret_missing(struct rn_wire *wire)
{
	refuse(wire, RN_REJ_SECRET_WANTED, "it proves no secret, and RDMANET_SOFT_SECRET is set here");
}

void rn_cm_secret_refused(struct rn_wire *wire)
{
	warn(wire, "it knows another secret (RDMANET_SOFT_SECRET)");
}

bool rn_cm_secret_on_hello(struct rn_wire *wire, const struct secret_hello *hello)
{
	struct secret_challenge challenge = {.hello.header.type = 0};

	if (wire->phase != RN_WIRE_ACCEPTED)
		return false;
	if (!rn_cm_secret_is_set()) {
		refuse(wire, RN_REJ_SECRET_UNKNOWN, "it asks for a secret, and RDMANET_SOFT_SECRET isn't set here");
		return true;
	}
	wire->hellos[0] = *hello;
	if (!rn_secret_nonce(wire->hellos[1].nonce))
		return false;
	memcpy(challenge.hello.nonce, wire->hellos[1].nonce, RN_NONCE);
	rn_secret_prove(passive_role, wire->hellos, sizeof wire->hellos, challenge.proof);
	rn_cm_wire_append(wire, SECRET_CHALLENGE, &challenge);
	wire->phase = RN_WIRE_CHALLENGED;
	return true;
}

bool rn_cm_secret_on_proof(struct rn_wire *wire, const struct secret_proof *proof)
{
	if (wire->phase != RN_WIRE_CHALLENGED)
		return false;
	if (rn_secret_is_proven(active_role, wire->hellos, sizeof wire->hellos, proof->proof))
		wire->phase = RN_WIRE_PROVEN;
	else
		refuse(wire, RN_REJ_SECRET_WRONG, "it knows another secret (RDMANET_SOFT_SECRET)");
	return true;
}

/* --- the active side ----------------------------------------------------------------------------- */

bool rn_cm_secret_on_challenge(struct rn_wire *wire, const struct secret_challenge *challenge)
{
	struct secret_proof answer;

	if (wire->phase != RN_WIRE_HELLO_SENT)
		return false;
	memcpy(wire->hellos[1].nonce, challenge->hello.nonce, RN_NONCE);
	if (!rn_secret_is_proven(passive_role, wire->hellos, sizeof wire->hellos, challenge->proof)) {
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_SECRET_WRONG);
		refuse(wire, RN_REJ_SECRET_WRONG, "it knows another secret (RDMANET_SOFT_SECRET)");
		return true;
	}
	rn_secret_prove(active_role, wire->hellos, sizeof wire->hellos, answer.proof);
	rn_cm_wire_append(wire, SECRET_PROOF, &answer);
	rn_cm_wire_append(wire, wire->request_type, wire->request);
	wire->phase = RN_WIRE_REQ_SENT;
	return true;
}
