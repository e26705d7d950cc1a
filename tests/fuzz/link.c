/* SPDX-License-Identifier: Apache-2.0 */
/* The first byte: 1 a proper introduction, and what follows is fuzz; 2 a HELLO that earns a challenge. See fuzz.h. */
#include "fuzz.h"

#include "../c/link.h"

static struct end end;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct sockaddr_un address;
	socklen_t length = wire_name(end.qp->qp_num >> 8, &address);
	int arena = -1, offered = -1;

	if (!size)
		return close(fd);
	while (connect(fd, (struct sockaddr *)&address, length))
		CHECK(errno == EINTR); /* libFuzzer's alarm */
	if (*data & 1) {
		CHECK(!wire_introduce(fd, &arena) && arena >= 0);
	} else if (*data & 2) {
		struct wire_words words = wire_words(WIRE_HELLO, 0);

		words.message.value = (uint32_t)(offered = wire_offer(getpid(), words.identity.nonce));
		CHECK(wire_say(fd, &words, sizeof(words.message), -1) == sizeof(words.message));
	}
	converse(fd, data + 1, size - 1);
	if (arena >= 0)
		close(arena);
	if (offered >= 0)
		close(offered);
	return 0;
}
