# ruff: noqa: F821
"""Completes receives of the server's without sending what it says: hopes for what lies in them.

usage: offer_liar PORT ATTACK...; each attack has a connection of its own, on which 24 messages went before, so that all
slots have held one. Tells what came back of it, and the server's last words.
"""

import asyncio

from tests.support.bare_peer import ABORT, CREDIT, DATA, BarePeer, frame

from rdmanet import credit
from rdmanet._core import Library, WROpcode


async def attack(what, size):
    client = BarePeer(Library.embedded(), renews=True)
    await client.connect("127.0.0.1", int(argv[0]), retry_count=7)
    await client.done(frame(CREDIT))
    region = await client.offered()
    there = {"remote_addr": region.address, "rkey": region.rkey}
    for n in range(24):  # each is echoed, and its slot posted again
        await client.done(frame(DATA, b"mine %02d" % n, granted=16 + n, reaped=client.reaped))
        body = await client.next_of(DATA)
        assert body == b"mine %02d" % n, body
    data = (frame(DATA, b"frame", granted=40, reaped=client.reaped) + bytes(200))[:size]
    if what == "write":
        sent = await client.done(data, WROpcode.RDMA_WRITE_WITH_IMM, **there)
    elif what == "imm":
        sent = await client.done(data, WROpcode.SEND_WITH_IMM)
    else:
        sent = await client.done(data)
    back, words = b"", None
    while True:
        kind, body = await client.next_frame()
        if kind == DATA:
            back += body
            break
        if kind == ABORT:
            words = credit.unpack_abort(body).reason
        if kind in (0, ABORT):
            break
    client.close()
    return {"sent": sent.name, "echoed": back.decode(errors="replace"), "words": words}


for each in argv[1:]:
    what, _, size = each.partition(":")
    say(attack=each, **asyncio.run(attack(what, int(size))))
