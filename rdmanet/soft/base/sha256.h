/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4) and HMAC with it (RFC 2104): what the shared secret of streams needs. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct rn_sha256 {
	uint32_t state[8];
	uint64_t length;
	uint8_t block[64];
};

void rn_sha256_begin(struct rn_sha256 *);
void rn_sha256_add(struct rn_sha256 *, const void *data, size_t length);
void rn_sha256_end(struct rn_sha256 *, uint8_t digest[32]);

struct rn_hmac {
	struct rn_sha256 inner, outer;
};

void rn_hmac_begin(struct rn_hmac *, const void *key, size_t length);
void rn_hmac_add(struct rn_hmac *, const void *data, size_t length);
void rn_hmac_end(struct rn_hmac *, uint8_t mac[32]);
