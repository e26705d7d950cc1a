/* SPDX-License-Identifier: Apache-2.0 */
/* A first byte that is odd: the introduction is a proper one, and what follows is fuzz. See fuzz.h. */
#include "fuzz.h"

#include "peers.h"

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
	socklen_t length = rn_peer_name(end.qp->qp_num >> 8, &address);

	if (!size)
		return close(fd);
	while (connect(fd, (struct sockaddr *)&address, length))
		CHECK(errno == EINTR); /* libFuzzer's alarm */
	if (*data & 1) {
		struct {
			struct message message;
			struct identity identity;
		} hello = {.message = rn_message(HELLO, 0, sizeof(struct identity))};

		pthread_mutex_lock(&rn_peers.lock);
		hello.identity = *rn_self();
		pthread_mutex_unlock(&rn_peers.lock);
		CHECK(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello));
	}
	converse(fd, data + 1, size - 1);
	return 0;
}
