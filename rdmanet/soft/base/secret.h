/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The secret, as both ends of a connection prove it to each other without telling it.
 *
 * It is a key of 256 bits (RDMANET_SOFT_SECRET: 64 hexadecimal digits, or RDMANET_SOFT_SECRET_FILE: a file of them),
 * and not a passphrase: an eavesdropper could try words by the million, but not keys.  It is kept in a page that is
 * left out of core dumps.  A process that has had it keeps it for life, and so do its forked children.
 *
 * A proof is HMAC-SHA256 under the secret, of the role of the end that proves (so that no proof can be sent back to its
 * maker) and of everything that both ends have sent before, nonces included (so that no proof can be used again).
 *
 * Who proves it: peer/proof.c (links on one host), cm/secret.c (connections), tcp/hello.c (streams of queue pairs).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RN_SECRET = 32, RN_NONCE = 32, RN_PROOF = 32 };

/* --- secret_key.c: where it comes from ---------------------------------------------------------------------- */

/* Take it from the environment, unless this process has one already. 0, or errno: `why` says what to do, and never
 * contains the secret. One thread at a time. */
int rn_secret_read(char *why, size_t size);
/* NULL: there is none. */
const uint8_t *rn_secret_key(void);

/* --- secret.c: proofs ---------------------------------------------------------------------------------------- */

bool rn_secret_nonce(uint8_t nonce[RN_NONCE]); /* false: the kernel has no random bytes */
/* role: names the protocol and the end, "cm client" for example. */
void rn_secret_prove(const char *role, const void *said, size_t length, uint8_t proof[RN_PROOF]);
/* Takes as long for a wrong proof as for the right one. */
bool rn_secret_is_proven(const char *role, const void *said, size_t length, const uint8_t proof[RN_PROOF]);
