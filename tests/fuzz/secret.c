/* SPDX-License-Identifier: Apache-2.0 */
/* As cm/cm.c, where there is a secret: the first byte says whether a proper introduction comes before. See fuzz.h. */
#define LLVMFuzzerInitialize initialize
#define LLVMFuzzerTestOneInput test_without
#include "cm.c"
#undef LLVMFuzzerInitialize
#undef LLVMFuzzerTestOneInput

#include "cm/wire.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	setenv("RDMANET_SOFT_SECRET", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", 1);
	return initialize(argc, argv);
}

static void say_header(struct rn_cm_header *header, enum rn_cm_message type, size_t length)
{
	*header = (struct rn_cm_header){htobe32(RN_CM_MAGIC), RN_WIRE_VERSION, (uint8_t)type, htobe16((uint16_t)length)};
}

static void hear(int fd, void *to, size_t length)
{
	for (size_t at = 0; at < length;) {
		ssize_t got = recv(fd, (char *)to + at, length - at, 0);

		CHECK(got > 0 || (got < 0 && errno == EINTR));
		at += got > 0 ? (size_t)got : 0;
	}
}

static void introduce(int fd)
{
	struct rn_cm_secret_hello hellos[2] = {0};
	struct rn_cm_secret_challenge challenge;
	struct rn_cm_secret_proof proof;

	say_header(&hellos[0].header, RN_CM_SECRET_HELLO, sizeof(hellos[0]));
	CHECK(send(fd, &hellos[0], sizeof(hellos[0]), MSG_NOSIGNAL) == sizeof(hellos[0]));
	hear(fd, &challenge, sizeof(challenge));
	memcpy(hellos[1].nonce, challenge.hello.nonce, RN_NONCE);
	CHECK(rn_secret_is_proven("cm passive", hellos, sizeof(hellos), challenge.proof));
	say_header(&proof.header, RN_CM_SECRET_PROOF, sizeof(proof));
	rn_secret_prove("cm active", hellos, sizeof(hellos), proof.proof);
	CHECK(send(fd, &proof, sizeof(proof), MSG_NOSIGNAL) == sizeof(proof));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct sockaddr_in *at = (struct sockaddr_in *)&listener->route.addr.src_addr;
	int fd;

	if (!size)
		return 0;
	fd = connect_tcp(ntohs(at->sin_port));
	if (data[0] & 1)
		introduce(fd);
	converse(fd, data + 1, size - 1);
	read_events();
	return 0;
}
