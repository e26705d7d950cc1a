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
 * Both prove that they know RDMANET_SOFT_SECRET (base/secret.h), over both HELLOs, which are the nonces.  The passive
 * side does so first.  The request, with the program's private data, goes only to a side that has proven it, and a
 * request is looked at only if its sender has.  A side that has a secret refuses one that has none, or
 * another: it sends REJ with the reason; one side gets an event, the other a line in its log, and the connection
 * ends.
 *
 * Without a secret REQ comes at once.  The secret doesn't encrypt what follows, nor does it prove by which route the
 * peer was reached: anybody who can relay the bytes can read them.
 */
#include "base/guard.h"
#include "cm/wire.h"

static const char active_role[] = "cm active", passive_role[] = "cm passive";

bool rn_cm_secret_begin(struct rn_cm_wire *wire, enum rn_cm_message type, const void *request)
{
	struct rn_cm_secret_hello *hello = &wire->hellos[0];

	if (!rn_secret_nonce(hello->nonce))
		return false;
	wire->request_type = type;
	memcpy(wire->request, request, rn_cm_message_length[type]);
	rn_cm_wire_append(wire, RN_CM_SECRET_HELLO, hello);
	return true;
}

static void warn(const struct rn_cm_wire *wire, const char *what)
{
	char far[RN_CM_FAR];

	rn_warn(RN_WARN_SECRET, "refused the connection with %s: %s", rn_cm_wire_far(wire, far), what);
}

/* Our request, if there is one, is not sent. */
static void refuse(struct rn_cm_wire *wire, int reason, const char *what)
{
	struct rn_cm_rej rej = {.reason = htobe16((uint16_t)reason)};

	warn(wire, what);
	rn_cm_wire_append(wire, RN_CM_REJ, &rej);
	wire->phase = RN_CM_WIRE_CLOSING;
	wire->hangs_up = true;
}

/* --- the passive side ---------------------------------------------------------------------------- */

void rn_cm_secret_missing(struct rn_cm_wire *wire)
{
	refuse(wire, RN_REJ_SECRET_WANTED, "it proves no secret, but RDMANET_SOFT_SECRET is set here");
}

void rn_cm_secret_refused(struct rn_cm_wire *wire)
{
	warn(wire, "it has another secret (RDMANET_SOFT_SECRET)");
}

bool rn_cm_secret_on_hello(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_secret_hello *hello = (const void *)header;
	struct rn_cm_secret_challenge challenge = {.hello.header.type = 0};

	if (!rn_cm_secret_is_set()) {
		refuse(wire, RN_REJ_SECRET_UNKNOWN, "it asks for a secret, but RDMANET_SOFT_SECRET is not set here");
		return true;
	}
	wire->hellos[0] = *hello;
	if (!rn_secret_nonce(wire->hellos[1].nonce))
		return false;
	memcpy(challenge.hello.nonce, wire->hellos[1].nonce, RN_NONCE);
	rn_secret_prove(passive_role, wire->hellos, sizeof wire->hellos, challenge.proof);
	rn_cm_wire_append(wire, RN_CM_SECRET_CHALLENGE, &challenge);
	wire->phase = RN_CM_WIRE_CHALLENGED;
	return true;
}

bool rn_cm_secret_on_proof(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_secret_proof *proof = (const void *)header;

	if (rn_secret_is_proven(active_role, wire->hellos, sizeof wire->hellos, proof->proof))
		wire->phase = RN_CM_WIRE_PROVEN;
	else
		refuse(wire, RN_REJ_SECRET_WRONG, "it has another secret (RDMANET_SOFT_SECRET)");
	return true;
}

/* --- the active side ----------------------------------------------------------------------------- */

bool rn_cm_secret_on_challenge(struct rn_cm_wire *wire, const struct rn_cm_header *header)
{
	const struct rn_cm_secret_challenge *challenge = (const void *)header;
	struct rn_cm_secret_proof answer;

	memcpy(wire->hellos[1].nonce, challenge->hello.nonce, RN_NONCE);
	if (!rn_secret_is_proven(passive_role, wire->hellos, sizeof wire->hellos, challenge->proof)) {
		rn_cm_wire_tell_failed(wire, RDMA_CM_EVENT_REJECTED, RN_REJ_SECRET_WRONG);
		refuse(wire, RN_REJ_SECRET_WRONG, "it has another secret (RDMANET_SOFT_SECRET)");
		return true;
	}
	rn_secret_prove(active_role, wire->hellos, sizeof wire->hellos, answer.proof);
	rn_cm_wire_append(wire, RN_CM_SECRET_PROOF, &answer);
	rn_cm_wire_append(wire, wire->request_type, wire->request);
	wire->phase = RN_CM_WIRE_REQ_SENT;
	return true;
}
