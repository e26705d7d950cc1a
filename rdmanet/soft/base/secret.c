/* SPDX-License-Identifier: Apache-2.0 */
/* Proofs. secret.h has the theory; secret_key.c reads the key. */
#include "base/secret.h"
#include "base/sha256.h"

#include <string.h>
#include <sys/random.h>

bool rn_secret_nonce(uint8_t nonce[RN_NONCE])
{
	return getrandom(nonce, RN_NONCE, 0) == RN_NONCE;
}

void rn_secret_prove(const char *role, const void *said, size_t length, uint8_t proof[RN_PROOF])
{
	const uint8_t *key = rn_secret_key();
	struct rn_hmac hmac;

	rn_hmac_begin(&hmac, key, key ? RN_SECRET : 0);
	rn_hmac_add(&hmac, role, strlen(role) + 1); /* its end too: no role is the beginning of another */
	rn_hmac_add(&hmac, said, length);
	rn_hmac_end(&hmac, proof);
	explicit_bzero(&hmac, sizeof(hmac)); /* which is as good as the key */
}

bool rn_secret_is_proven(const char *role, const void *said, size_t length, const uint8_t proof[RN_PROOF])
{
	uint8_t expected[RN_PROOF], difference = 0;

	rn_secret_prove(role, said, length, expected);
	for (int i = 0; i < RN_PROOF; i++)
		difference |= expected[i] ^ proof[i];
	return !difference && rn_secret_key(); /* a process that has none has nothing to compare with */
}
