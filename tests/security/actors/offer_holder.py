# ruff: noqa: F821
"""Was offered a region, and does not let go of it: writes when it was taken back, whatever it said before.

usage: offer_holder PORT acknowledges|never|invalidates|starves|is_deaf|hoards|rambles
"""

import asyncio

from tests.support.bare_peer import ABORT, CREDIT, DATA, PING, PONG, SLOTS, BarePeer, frame

from rdmanet import credit
from rdmanet._core import Library, WROpcode

port, how = int(argv[0]), argv[1]


async def tell_of_many_regions(client, each):
    """So many at a time, until the server has enough of it; how many."""
    told, kind = 0, PONG
    while kind == PONG and told < 1000:
        news = [credit.Region(told + i, 0x1000, 1, 1, 4, "n" * 255) for i in range(each)]
        body = credit.pack_credit(credit.Credit(16, tuple(news)))
        await client.done(frame(CREDIT, body, reaped=client.reaped))
        told += each
        await client.done(frame(PING, bytes(8), reaped=client.reaped))
        while (kind := (await client.next_frame())[0]) not in (PONG, ABORT, 0):
            pass
    return told


async def main():
    receives = {"starves": 2, "is_deaf": 0}.get(how, SLOTS)
    client = BarePeer(Library.embedded(), receives=receives, renews=receives == SLOTS)
    await client.connect("127.0.0.1", port, retry_count=7)
    await client.done(frame(CREDIT))
    say(connected=True)
    if how == "is_deaf":
        # What the server sends, and what it posts behind that, is held up by its device.
        say(sent=(await client.done(frame(DATA, b"x"))).name)
        hear()
        return
    if how in ("hoards", "rambles"):
        hear()  # the server's side has been made
        # As many regions as it can make the server remember, a few at a time; or all in one long frame.
        say(told=await tell_of_many_regions(client, 8 if how == "hoards" else 100))
        return
    region = await client.offered()
    there = {"remote_addr": region.address, "rkey": region.rkey}
    say(first=(await client.done(b"granted ", WROpcode.RDMA_WRITE, **there)).name)
    if how == "invalidates":
        data = frame(DATA, b"x", reaped=client.reaped)
        say(sent=(await client.done(data, WROpcode.SEND_WITH_INV, invalidate_rkey=region.rkey)).name)
        say(last=(await client.next_frame())[0])
        return
    if how == "starves":
        # Its credits promise receives that are not there: what the server sends now is held up, by its device.
        for _ in range(2):
            await client.done(frame(DATA, bytes(100), reaped=client.reaped))
    if how == "acknowledges":
        assert (await client.news()).revoked == (region.id,)
        acknowledgement = credit.pack_credit(credit.Credit(16, acked=(region.id,)))
        await client.done(frame(CREDIT, acknowledgement, reaped=client.reaped))
    hear()  # the owner's block has ended
    say(second=(await client.done(b"REVOKED!", WROpcode.RDMA_WRITE, **there)).name)


asyncio.run(main())
