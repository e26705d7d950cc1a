# ruff: noqa: F821
"""Wants the region that was offered to another client: guesses its key from those of its own, or has been told it."""

import asyncio

from tests.support.bare_peer import CREDIT, BarePeer, frame

from rdmanet._core import Library, WROpcode

port = int(argv[0])
order = hear()
assert order is not None
address = order["address"]


async def connected():
    client = BarePeer(Library.embedded(), renews=True)
    await client.connect("127.0.0.1", port, retry_count=7)
    await client.done(frame(CREDIT))
    return client


async def read(client, rkey):
    return (await client.done(opcode=WROpcode.RDMA_READ, length=16, remote_addr=address, rkey=rkey)).name


async def main():
    # The right key, as if it had been found: is it good on this connection?
    client = await connected()
    own = (await client.offered()).rkey if order["search"] else 0
    status = await read(client, order["rkey"])
    say(status=status, data=client.data_read.decode(errors="replace"))
    client.close()
    if not order["search"]:
        return

    # A key of its own tells where others' are, if keys are predictable: those of who came before are that far ahead.
    tried, found = 0, ""
    for variant in range(256):
        client = await connected()
        tried += 1
        guess = (own >> 16) + order["ahead"] << 16 & 0xFFFFFFFF | own & 0xFF00 | variant
        if await read(client, guess) == "SUCCESS":
            found = client.data_read.decode(errors="replace")
            break
        client.close()
    say(tried=tried, found=found)


asyncio.run(main())
