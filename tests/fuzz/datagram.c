/* SPDX-License-Identifier: Apache-2.0 */
/* Each piece is a datagram. There is no end to wait for, so a proper one follows, which must arrive. See fuzz.h. */
#include "fuzz.h"

#include "datagram/datagram.h"
#include "datagram/wire.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	return 0;
}

/* What the engine does with a datagram begins here; the socket before it has no say in it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct rn_datagram datagram;
	uint32_t dest_qpn;
	char *exactly = malloc(size); /* so that the sanitizer sees where it ends */

	memcpy(exactly, data, size);
	memset(&datagram, 0, sizeof(datagram));
	if (rn_ud_wire_parse(exactly, size, &datagram, &dest_qpn))
		CHECK(dest_qpn < 1u << 24);
	free(exactly);
	return 0;
}
